//! One acquisition: the local permit, the claim in the store, the guard. Called by
//! [`DistributedLock`](crate::DistributedLock).

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Busy, Claim};
use crate::claim::{Abandoned, Answer, Contender};
use crate::clock::Moment;
use crate::engine::{Engine, backoff, trouble};
use crate::error::{BackendError, LockError};
use crate::event::LockEvent;
use crate::fairness::Contention;
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::held::HeldClaim;
use crate::hold::Hold;
use crate::key::Key;
use crate::mutant::{Mutant, mutated};
use crate::options::{LockOptions, Terms};
use crate::owner::Owner;
use crate::slot::{Entry, NoEntry, Slot, Turn};
use crate::watch::Suspension;

/// Acquires the lock of `slot`. Returns `None` if the lock was held until the deadline, according
/// to the last response.
pub(crate) async fn acquire(
    slot: &Arc<Slot>,
    options: &LockOptions,
) -> Result<Option<LockGuard>, LockError> {
    // Yields when the task's coop budget is used up: a store that responds without waiting must not
    // block the other tasks of this thread. Nothing needs clean-up yet.
    tokio::task::coop::consume_budget().await;
    let engine = slot.engine();
    engine.check_open()?;
    engine.backend.check_key(slot.key())?;
    let special_terms = engine.terms(options)?;
    let terms = special_terms.as_ref().unwrap_or(&engine.default_terms);
    let owner = options.owner.clone().or_else(Owner::current);
    let began = match options.wait {
        Some(_) => Moment::now(),
        // Only observers use this value.
        None if engine.observers.is_empty() => Moment::PAST,
        None => Moment::about_now(),
    };
    // One deadline for the local queue and the store together.
    let deadline = options.wait.map(|wait| began.after(wait));

    // Terminates: each further round means that an entry's lease ended on the way, or that this
    // caller was not polled for a lease.
    loop {
        // 1. The local permit, among the callers of this process.
        let turn = match slot.enter(owner.as_ref(), terms, deadline).await {
            Ok(Entry::Turn(turn)) => turn,
            // The lease ended before this caller received the guard.
            Ok(Entry::Again(guard) | Entry::HandedOver(guard)) if !guard.is_held() => continue,
            Ok(Entry::Again(guard)) => {
                let (key, token) = (guard.key(), guard.fencing_token());
                engine.tell(|| LockEvent::Reentered { key, token });
                return Ok(Some(guard));
            }
            Ok(Entry::HandedOver(guard)) => {
                let (key, token) = (guard.key(), guard.fencing_token());
                engine.tell(|| LockEvent::HandedOver { key, token });
                return Ok(Some(guard));
            }
            Err(NoEntry::TimedOut(None)) => return Ok(gave_up(slot, began)),
            // It is unknown whether the lock is held.
            Err(NoEntry::TimedOut(Some(error))) => {
                return Err(trouble("acquire", slot.key().as_str(), error));
            }
            Err(NoEntry::PassedOn) => continue,
            Err(NoEntry::Closed) => return Err(LockError::Closed),
        };

        // 2. The claim in the store, among the processes. If the future is dropped, the claim is
        //    released.
        let contest = Contest { slot, engine, terms, began, deadline };
        match contest.win(turn, owner.clone()).await {
            // From here on, the lease renewer renews the claim, and dropping the guard releases it.
            Ok(Some(guard)) => return Ok(Some(guard)),
            Ok(None) => return Ok(gave_up(slot, began)),
            Err(Stopped::Abandoned) => {}
            Err(Stopped::Failed(error)) => return Err(error),
        }
    }
}

fn gave_up(slot: &Slot, began: Moment) -> Option<LockGuard> {
    slot.engine().tell(|| LockEvent::GaveUp {
        key: slot.key().as_str(),
        waited: Moment::now().since(began),
    });
    None
}

/// The reason why an acquisition ended without a result.
enum Stopped {
    /// This caller was not polled for a lease: its claim and its local permit are released.
    Abandoned,
    Failed(LockError),
}

impl From<Abandoned> for Stopped {
    fn from(_: Abandoned) -> Self {
        Self::Abandoned
    }
}

impl From<LockError> for Stopped {
    fn from(error: LockError) -> Self {
        Self::Failed(error)
    }
}

/// The acquisition of one key in the store, by the caller with the local permit.
struct Contest<'a> {
    slot: &'a Slot,
    engine: &'a Engine,
    terms: &'a Arc<Terms>,
    began: Moment,
    deadline: Option<Moment>,
}

impl Contest<'_> {
    async fn win(self, turn: Turn, owner: Option<Owner>) -> Result<Option<LockGuard>, Stopped> {
        let claim = self.fresh_claim(self.slot.key());
        let mut contender = Contender::new(turn, claim, Arc::clone(self.terms));
        let pause_end = contender.contention().and_then(|it| self.pause_end(it));
        if pause_end.is_some() {
            return Box::pin(self.contend(contender, pause_end, None, owner)).await;
        }
        self.check_open()?;
        let mut sent = contender.send(self.engine).await;
        if let Some(Answer::Answered(sent_at, Ok(Attempt::Granted(grant)))) = sent {
            let token = grant.token;
            match contender.take(grant, sent_at) {
                Ok(held) => return self.guard(held, token, owner, 1).map(Some),
                Err(late) => contender = *late,
            }
            sent = Some(Answer::Answered(sent_at, Err(late_grant())));
        }
        // Boxed, because the futures of all waits are large, and the caller's future would contain
        // them even where the store responds at once.
        Box::pin(self.contend(contender, None, Some(sent), owner)).await
    }

    /// Repeats the attempt until a grant, the deadline, or a store error that must be returned.
    /// `sent` is the result of the first [`Contender::send`], if it has been called.
    async fn contend(
        self,
        mut contender: Contender,
        pause_end: Option<Moment>,
        mut sent: Option<Option<Answer>>,
        owner: Option<Owner>,
    ) -> Result<Option<LockGuard>, Stopped> {
        let key = self.slot.key();
        let mut suspension = Suspension::new(self.engine.janitor.watch(), self.terms.lease.length);
        let mut attempts = 0;
        let mut failures = Failures::default();
        let mut early_wakes = EarlyWakes::new();
        let mut quiet_since = Moment::now();
        let mut last_token = None;
        if let Some(end) = pause_end {
            (contender, ()) = suspension.during(contender, self.pause(end)).await?;
        }
        // Terminates by a grant, by the deadline, or after store errors for the length of a lease.
        // With only "busy" responses and no deadline, a caller waits without limit, as requested.
        loop {
            attempts += 1;
            let sent = match sent.take() {
                Some(sent) => sent,
                None => {
                    self.check_open()?;
                    contender.send(self.engine).await
                }
            };
            let answer;
            (contender, answer) = contender.answer(sent, self.engine, &mut suspension).await?;
            let error = match answer {
                Answer::Answered(sent_at, Ok(Attempt::Granted(grant))) => {
                    let token = grant.token;
                    match contender.take(grant, sent_at) {
                        Ok(held) => return self.guard(held, token, owner, attempts).map(Some),
                        Err(late) => contender = *late,
                    }
                    late_grant()
                }
                Answer::Answered(_, Ok(Attempt::Busy(busy))) => {
                    failures = Failures::default();
                    self.slot.answered();
                    if let Some(contention) = contender.contention() {
                        contention.on_busy();
                    }
                    self.engine.tell(|| LockEvent::Busy { key: key.as_str(), busy: &busy });
                    if self.is_over(Moment::now()) {
                        return Ok(None);
                    }
                    let token = busy.holder.as_ref().and_then(|holder| holder.token);
                    // In a queue, a new holder in front does not concern the claims behind.
                    if token != last_token && !self.engine.capabilities.fair {
                        quiet_since = Moment::now();
                    }
                    last_token = token;
                    let wait = self.wait(contender.claim().clone(), busy, quiet_since);
                    let woken;
                    (contender, woken) = suspension.during(contender, wait).await?;
                    if woken? == Woken::Early {
                        let delay = contender.contention().map(|it| it.delay_after_wake());
                        let pause = early_wakes.take().max(delay.unwrap_or_default());
                        if !pause.is_zero() {
                            let end = Moment::now().after(pause);
                            let end = end.min(self.deadline.unwrap_or(Moment::FUTURE));
                            (contender, ()) = suspension.during(contender, self.pause(end)).await?;
                        }
                    }
                    continue;
                }
                Answer::Answered(_, Err(error)) => error,
                Answer::Unanswered => self.engine.unanswered(),
            };
            let pause = self.endure(key, &mut failures, error);
            let borne;
            (contender, borne) = suspension.during(contender, pause).await?;
            borne?;
            // The background releaser completes a request without a response.
            contender.replace_unanswered(|| self.fresh_claim(key));
        }
    }

    /// Returns the guard of a new grant.
    fn guard(
        &self,
        held: Arc<HeldClaim>,
        token: Option<FencingToken>,
        owner: Option<Owner>,
        attempts: u32,
    ) -> Result<LockGuard, Stopped> {
        self.slot.answered();
        let guard = Hold::first_guard(held, token, owner);
        // If the registry is closing, it is too late to return a guard. Dropping it releases the
        // claim.
        self.check_open()?;
        self.slot.held_by(guard.hold());
        self.engine.tell(|| LockEvent::Granted {
            key: self.slot.key().as_str(),
            token,
            waited: Moment::now().since(self.began),
            attempts,
        });
        Ok(guard)
    }

    /// Fails if the registry is closing.
    ///
    /// The acquisition is counted before this check, and closing sets its flag before it counts
    /// acquisitions. At least one of the two sees the other, so no request is sent to a store that
    /// is being closed.
    fn check_open(&self) -> Result<(), Stopped> {
        if self.engine.is_closing() { Err(LockError::Closed.into()) } else { Ok(()) }
    }

    /// Returns the end of the pause before the first attempt. Skips the pause if the caller's
    /// deadline comes first.
    fn pause_end(&self, contention: &mut Contention) -> Option<Moment> {
        let end = contention.pause_end()?;
        if self.is_over(end) {
            contention.skip_pause();
            return None;
        }
        Some(end)
    }

    /// Waits until `end`, or until the registry is closing.
    async fn pause(&self, end: Moment) {
        tokio::select! {
            biased;
            () = self.engine.closing.given() => {}
            () = self.engine.sleep_until(end) => {}
        }
    }

    fn fresh_claim(&self, key: &Key) -> Claim {
        let engine = self.engine;
        Claim::new(key.clone(), self.terms.lease.length)
            .with_label(self.terms.label.clone())
            .with_queue(engine.capabilities.fair && !self.is_over(self.began))
            .with_token_block(engine.defaults.handoffs.max.saturating_add(1))
    }

    /// Waits until another attempt makes sense. `quiet_since` is when the holder last changed, as
    /// far as this process knows.
    async fn wait(
        &self,
        claim: Claim,
        busy: Busy,
        quiet_since: Moment,
    ) -> Result<Woken, LockError> {
        let engine = self.engine;
        let now = Moment::now();
        let is_mutant = mutated(Mutant::WakeUpOnly);
        let lease_end = match busy.retry_after {
            Some(left) if !is_mutant => now.after(left.saturating_add(AFTER_LEASE)),
            _ => Moment::FUTURE,
        };
        // One last attempt is made at the deadline, so that a lock that became free in time is not
        // missed.
        let last_look = lease_end.min(self.deadline.unwrap_or(Moment::FUTURE));
        // A wake-up can be lost in spite of the confirmation. This limits the cost to the time
        // waited so far.
        let confirmed_until =
            now.after(jittered(now.since(quiet_since).min(CONFIRMED_POLL_MAX))).min(last_look);
        let wake = engine.backend.wait(&claim, &busy);
        tokio::pin!(wake);
        loop {
            let now = Moment::now();
            let poll =
                if is_mutant { Moment::FUTURE } else { now.after(jittered(engine.defaults.poll)) };
            tokio::select! {
                biased;
                () = engine.closing.given() => return Err(LockError::Closed),
                () = &mut wake => return Ok(Woken::Early),
                () = engine.sleep_until(poll.min(last_look)) => {}
            }
            if Moment::now() >= confirmed_until || !engine.backend.wakes_confirmed(&claim, &busy) {
                return Ok(Woken::ByTime);
            }
        }
    }

    /// Waits before the next attempt after a store error, or returns the error.
    async fn endure(
        &self,
        key: &Key,
        failures: &mut Failures,
        error: BackendError,
    ) -> Result<(), LockError> {
        let engine = self.engine;
        engine.tell(|| LockEvent::AttemptFailed { key: key.as_str(), error: &error });
        self.slot.failed(&error);
        let now = Moment::now();
        let since = *failures.since.get_or_insert(now);
        // Without a deadline, store errors are retried for the length of a lease. By then a
        // failover is over, or it is an outage that the caller must learn of.
        let limit = self.deadline.unwrap_or_else(|| since.after(self.terms.lease.length));
        if !error.is_retryable() || now >= limit {
            return Err(trouble("acquire", key.as_str(), error));
        }
        let retry_at = now.after(backoff(failures.count)).min(limit);
        failures.count += 1;
        tokio::select! {
            biased;
            () = engine.closing.given() => Err(LockError::Closed),
            () = engine.sleep_until(retry_at) => Ok(()),
        }
    }

    fn is_over(&self, now: Moment) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }
}

/// Returns the error of a grant whose lease was over before the reply arrived.
///
/// That claim is being released. The next attempt has a claim with a new id, so that this release
/// does not end its grant.
fn late_grant() -> BackendError {
    BackendError::transient("the store's grant arrived after its lease was over")
}

/// Consecutive store errors.
#[derive(Debug, Default)]
struct Failures {
    since: Option<Moment>,
    count: u32,
}

#[derive(Debug, PartialEq, Eq)]
enum Woken {
    /// By a wake-up from the store.
    Early,
    /// By the poll interval, the end of the holder's lease, or the deadline.
    ByTime,
}

/// A token bucket that limits how often wake-ups lead to attempts. Without it, superfluous
/// wake-ups, or other processes that are faster each time, would make this process a busy loop.
struct EarlyWakes {
    left: u32,
    counted_at: Moment,
}

impl EarlyWakes {
    fn new() -> Self {
        Self { left: EARLY_WAKES_BURST, counted_at: Moment::now() }
    }

    /// Counts a wake-up, and returns the pause before the attempt that follows it.
    fn take(&mut self) -> Duration {
        let now = Moment::now();
        let pauses = now.since(self.counted_at).as_nanos() / EARLY_WAKES_PAUSE.as_nanos();
        if pauses > 0 {
            let earned = u32::try_from(pauses).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(earned).min(EARLY_WAKES_BURST);
            self.counted_at = now;
        }
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return Duration::ZERO;
        }
        // This wake-up uses the token that the pause earns.
        self.counted_at = now.after(EARLY_WAKES_PAUSE);
        EARLY_WAKES_PAUSE
    }
}

/// Adds up to a quarter, so that waiters that began together do not poll together.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(1.0 + fastrand::f64() / 4.0)
}

/// The time between the end of the holder's lease and the attempt that follows it.
const AFTER_LEASE: Duration = Duration::from_millis(1);

/// The longest time between two attempts of a waiter whose wake-ups are confirmed. As long as the
/// default lease, so that 2,000 waiters send fewer than 100 requests a second.
const CONFIRMED_POLL_MAX: Duration = Duration::from_secs(30);

/// The number of wake-ups that are followed without a pause, and the pause for each one after that.
const EARLY_WAKES_BURST: u32 = 64;
const EARLY_WAKES_PAUSE: Duration = Duration::from_millis(1);
