//! Decides which fault applies to which call: by probability and seed, or by the number of the
//! call.

use std::time::Duration;

/// A method of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// `try_acquire`, and `try_acquire_all` of a batch.
    Acquire,
    /// `renew`; one call may carry many claims.
    Renew,
    /// `release`, and `release_all` of a batch.
    Release,
    /// `wait`.
    Wait,
    /// `inspect`.
    Inspect,
    /// `list`.
    List,
    /// `force_release`.
    ForceRelease,
    /// `diagnose`.
    Diagnose,
    /// `value`.
    Value,
    /// `set_value`.
    SetValue,
}

impl Operation {
    /// All operations, in the order of their declaration.
    pub const ALL: [Self; 10] = [
        Self::Acquire,
        Self::Renew,
        Self::Release,
        Self::Wait,
        Self::Inspect,
        Self::List,
        Self::ForceRelease,
        Self::Diagnose,
        Self::Value,
        Self::SetValue,
    ];

    const fn index(self) -> usize {
        self as usize
    }
}

/// A fault of a call. Several faults can apply to one call. If one of them keeps the request from
/// the store, only [`DelayRequest`](Self::DelayRequest) takes effect with it. Only the delays,
/// [`LoseWake`](Self::LoseWake) and [`WakeEarly`](Self::WakeEarly) affect [`Operation::Wait`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The store does not execute the request, and the caller's error says so.
    Refuse,
    /// The store does not execute the request, and the caller's error says that a retry cannot
    /// succeed.
    Deny,
    /// The store does not execute the request, but the caller's error leaves this unknown.
    LoseRequest,
    /// The store executes the request, but the caller's error leaves this unknown.
    LoseReply,
    /// Delays the request by this time. A fault of [`Faults::sometimes`] delays it by a random part
    /// of this time.
    DelayRequest(Duration),
    /// Delays the reply by this time. A fault of [`Faults::sometimes`] delays it by a random part
    /// of this time.
    DelayReply(Duration),
    /// The store executes the request twice in succession. The caller receives the first reply.
    Repeat,
    /// The store executes the request once more after this time, whatever has happened since. A
    /// fault of [`Faults::sometimes`] repeats it after a random part of this time.
    RepeatLate(Duration),
    /// Suppresses the store's wake-up. Only for [`Operation::Wait`].
    LoseWake,
    /// Sends a wake-up after this time without a release. A fault of [`Faults::sometimes`] sends it
    /// after a random part of this time. Only for [`Operation::Wait`].
    WakeEarly(Duration),
}

/// A plan of faults: which fault applies to which call.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use registry_conformance::{Fault, Faults, Operation};
///
/// let faults = Faults::seeded(42)
///     .sometimes(Operation::Release, 0.1, Fault::LoseReply)
///     .sometimes(Operation::Acquire, 0.5, Fault::DelayReply(Duration::from_millis(20)))
///     .at_call(Operation::Renew, 3, Fault::Refuse)
///     .from_call(Operation::Renew, 5, Fault::LoseRequest);
/// # drop(faults);
/// ```
#[derive(Debug, Clone)]
pub struct Faults {
    seed: u64,
    rules: Vec<(Operation, Trigger, Fault)>,
}

#[derive(Debug, Clone, Copy)]
enum Trigger {
    Sometimes(f64),
    At(u64),
    From(u64),
}

impl Faults {
    /// Creates a plan without faults.
    #[must_use]
    pub const fn none() -> Self {
        Self::seeded(0)
    }

    /// Creates a plan without faults. `seed` determines the random faults that you add later.
    #[must_use]
    pub const fn seeded(seed: u64) -> Self {
        Self { seed, rules: Vec::new() }
    }

    /// Creates a plan that refuses all operations except [`Operation::Wait`]. Waits and the
    /// registrations of waiters still reach the store.
    #[must_use]
    pub fn outage() -> Self {
        let operations = Operation::ALL.into_iter().filter(|op| *op != Operation::Wait);
        operations.fold(Self::none(), |faults, op| faults.always(op, Fault::Refuse))
    }

    /// Applies `fault` to each call of `operation` with this `probability`.
    ///
    /// # Panics
    /// If `probability` is not within `0.0..=1.0`.
    #[must_use]
    pub fn sometimes(mut self, operation: Operation, probability: f64, fault: Fault) -> Self {
        assert!((0.0..=1.0).contains(&probability), "{probability} is not a probability");
        self.rules.push((operation, Trigger::Sometimes(probability), fault));
        self
    }

    /// Applies `fault` to call number `call` of `operation`. The first call has number 1.
    #[must_use]
    pub fn at_call(mut self, operation: Operation, call: u64, fault: Fault) -> Self {
        self.rules.push((operation, Trigger::At(call), fault));
        self
    }

    /// Applies `fault` to call number `call` of `operation` and to all later ones.
    #[must_use]
    pub fn from_call(mut self, operation: Operation, call: u64, fault: Fault) -> Self {
        self.rules.push((operation, Trigger::From(call), fault));
        self
    }

    /// Applies `fault` to every call of `operation`.
    #[must_use]
    pub fn always(self, operation: Operation, fault: Fault) -> Self {
        self.from_call(operation, 1, fault)
    }
}

/// The faults of one call.
#[derive(Debug, Default)]
pub(super) struct CallFaults {
    pub(super) refuse: bool,
    pub(super) deny: bool,
    pub(super) lose_request: bool,
    pub(super) lose_reply: bool,
    pub(super) delay_request: Option<Duration>,
    pub(super) delay_reply: Option<Duration>,
    pub(super) repeat: bool,
    pub(super) repeat_late: Option<Duration>,
    pub(super) lose_wake: bool,
    pub(super) wake_early: Option<Duration>,
}

/// Executes a plan of faults, with its random generator and its counters.
#[derive(Debug)]
pub(super) struct FaultInjector {
    faults: Faults,
    random: fastrand::Rng,
    /// Calls under this plan, by operation.
    calls: [u64; Operation::ALL.len()],
    /// Calls under earlier plans, by operation.
    calls_before: [u64; Operation::ALL.len()],
    injected: u64,
}

impl FaultInjector {
    pub(super) fn new(faults: Faults) -> Self {
        let random = fastrand::Rng::with_seed(faults.seed);
        let none = [0; Operation::ALL.len()];
        Self { faults, random, calls: none, calls_before: none, injected: 0 }
    }

    pub(super) fn replace_plan(&mut self, faults: Faults) {
        let before = std::mem::replace(self, Self::new(faults));
        self.injected = before.injected;
        self.calls_before = before.calls_before;
        for (sum, calls) in self.calls_before.iter_mut().zip(before.calls) {
            *sum += calls;
        }
    }

    pub(super) fn calls(&self, operation: Operation) -> u64 {
        self.calls[operation.index()] + self.calls_before[operation.index()]
    }

    pub(super) fn injected(&self) -> u64 {
        self.injected
    }

    /// Counts a call of `operation` and returns its faults.
    pub(super) fn begin_call(&mut self, operation: Operation) -> CallFaults {
        let call = &mut self.calls[operation.index()];
        *call += 1;
        let call = *call;
        let mut faults_of_call = CallFaults::default();
        for (_, trigger, fault) in self.faults.rules.iter().filter(|rule| rule.0 == operation) {
            // Each probabilistic rule of the operation draws a number at each call, whether or not
            // another rule has hit.
            let (hit, exact) = match trigger {
                Trigger::Sometimes(probability) => (self.random.f64() < *probability, false),
                Trigger::At(number) => (call == *number, true),
                Trigger::From(number) => (call >= *number, true),
            };
            if !hit {
                continue;
            }
            self.injected += 1;
            let random = &mut self.random;
            let mut time = |max: Duration| if exact { max } else { max.mul_f64(random.f64()) };
            match *fault {
                Fault::Refuse => faults_of_call.refuse = true,
                Fault::Deny => faults_of_call.deny = true,
                Fault::LoseRequest => faults_of_call.lose_request = true,
                Fault::LoseReply => faults_of_call.lose_reply = true,
                Fault::DelayRequest(max) => faults_of_call.delay_request = Some(time(max)),
                Fault::DelayReply(max) => faults_of_call.delay_reply = Some(time(max)),
                Fault::Repeat => faults_of_call.repeat = true,
                Fault::RepeatLate(max) => faults_of_call.repeat_late = Some(time(max)),
                Fault::LoseWake => faults_of_call.lose_wake = true,
                Fault::WakeEarly(max) => faults_of_call.wake_early = Some(time(max)),
            }
        }
        faults_of_call
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusals(seed: u64) -> Vec<bool> {
        let faults = Faults::seeded(seed).sometimes(Operation::Acquire, 0.5, Fault::Refuse);
        let mut injector = FaultInjector::new(faults);
        (0..64).map(|_| injector.begin_call(Operation::Acquire).refuse).collect()
    }

    #[test]
    fn the_same_seed_injects_the_same_faults() {
        assert_eq!(refusals(7), refusals(7));
        assert_ne!(refusals(7), refusals(8));
    }

    #[test]
    fn scripted_faults_hit_the_calls_they_name() {
        let faults = Faults::none().at_call(Operation::Renew, 2, Fault::LoseReply).from_call(
            Operation::Renew,
            4,
            Fault::Refuse,
        );
        let mut injector = FaultInjector::new(faults);
        let hit: Vec<_> = (0..5)
            .map(|_| injector.begin_call(Operation::Renew))
            .map(|faults_of_call| (faults_of_call.lose_reply, faults_of_call.refuse))
            .collect();
        assert_eq!(
            hit,
            [(false, false), (true, false), (false, false), (false, true), (false, true)]
        );
        assert!(
            !injector.begin_call(Operation::Release).refuse,
            "another operation has its own count"
        );
    }

    #[test]
    fn a_new_plan_restarts_its_script_and_keeps_the_totals() {
        let mut injector =
            FaultInjector::new(Faults::none().at_call(Operation::Acquire, 1, Fault::Refuse));
        assert!(injector.begin_call(Operation::Acquire).refuse);
        injector.replace_plan(Faults::none().at_call(Operation::Acquire, 1, Fault::LoseReply));
        assert!(injector.begin_call(Operation::Acquire).lose_reply);
        assert_eq!((injector.calls(Operation::Acquire), injector.injected()), (2, 2));
    }
}
