//! One acquisition: the local permit, the claim in the store, the guard. Called by
//! [`DistributedLock`](crate::DistributedLock).

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Busy, Claim, Queueing};
use crate::clock::Moment;
use crate::engine::{Engine, backoff, store_error};
use crate::error::{BackendError, LockError};
use crate::event::LockEvent;
use crate::fairness::Contention;
use crate::fencing::FencingToken;
use crate::grant::ActiveGrant;
use crate::guard::Hold;
use crate::guard::LockGuard;
use crate::key::Key;
use crate::local_lock::{Admission, LocalLock, LocalPermit, NotAdmitted};
use crate::mutant::{Mutant, mutated};
use crate::options::{LockOptions, Terms};
use crate::owner::Owner;
use crate::pending_claim::{Abandoned, AttemptOutcome, PendingClaim};
use crate::watch::Suspension;

/// Acquires the lock of `local_lock`. Returns `None` if the lock was held until the deadline,
/// according to the last response.
pub(crate) async fn acquire(
    local_lock: &Arc<LocalLock>,
    options: &LockOptions,
) -> Result<Option<LockGuard>, LockError> {
    // Yields when the task's coop budget is used up: a store that responds without waiting must not
    // block the other tasks of this thread. This future owns nothing yet, so it may be dropped.
    tokio::task::coop::consume_budget().await;
    let engine = local_lock.engine();
    engine.check_open()?;
    engine.backend.check_key(local_lock.key())?;
    let special_terms = engine.terms(options)?;
    let terms = special_terms.as_ref().unwrap_or(&engine.default_terms);
    let owner = options.owner.clone().or_else(Owner::current);
    let started_at = match options.wait {
        Some(_) => Moment::now(),
        // Only observers use this value.
        None if engine.observers.is_empty() => Moment::PAST,
        None => Moment::now_coarse(),
    };
    // One deadline for the local queue and the store together.
    let deadline = options.limited_wait().map(|wait| started_at.after(wait));

    // Repeats only if the lease of a received guard has ended, or if this caller was not polled for
    // the time of a lease.
    loop {
        // 1. The local permit, among the callers of this process.
        let permit = match local_lock.enter(owner.as_ref(), terms, deadline).await {
            Ok(Admission::LocalPermit(permit)) => permit,
            // The lease ended before this caller received the guard.
            Ok(Admission::Reentered(guard) | Admission::HandedOver(guard)) if !guard.is_held() => {
                continue;
            }
            Ok(Admission::Reentered(guard)) => {
                let (key, token) = (guard.key(), guard.fencing_token());
                engine.emit(|| LockEvent::Reentered { key, token });
                return Ok(Some(guard));
            }
            Ok(Admission::HandedOver(guard)) => {
                let (key, token) = (guard.key(), guard.fencing_token());
                engine.emit(|| LockEvent::HandedOver { key, token });
                return Ok(Some(guard));
            }
            Err(NotAdmitted::TimedOut(None)) => return Ok(timed_out(local_lock, started_at)),
            // It is unknown whether the lock is held.
            Err(NotAdmitted::TimedOut(Some(error))) => {
                return Err(store_error("acquire", local_lock.key().as_str(), error));
            }
            Err(NotAdmitted::PassedOn) => continue,
            Err(NotAdmitted::Closed) => return Err(LockError::Closed),
        };

        // 2. The claim in the store, among the processes. If the future is dropped, the claim is
        //    released.
        let acquisition = Acquisition { local_lock, engine, terms, started_at, deadline };
        match acquisition.run(permit, owner.clone()).await {
            // From here on, the lease renewer renews the claim, and dropping the guard releases it.
            Ok(Some(guard)) => return Ok(Some(guard)),
            Ok(None) => return Ok(timed_out(local_lock, started_at)),
            Err(Stopped::Abandoned) => {}
            Err(Stopped::Failed(error)) => return Err(error),
        }
    }
}

fn timed_out(local_lock: &LocalLock, started_at: Moment) -> Option<LockGuard> {
    local_lock.engine().emit(|| LockEvent::GaveUp {
        key: local_lock.key().as_str(),
        waited: Moment::now().since(started_at),
    });
    None
}

/// The reason why an acquisition ended without a result.
enum Stopped {
    /// This caller was not polled for the time of a lease. Its claim and its local permit are
    /// released.
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
struct Acquisition<'a> {
    local_lock: &'a LocalLock,
    engine: &'a Engine,
    terms: &'a Arc<Terms>,
    started_at: Moment,
    deadline: Option<Moment>,
}

impl Acquisition<'_> {
    async fn run(
        self,
        permit: LocalPermit,
        owner: Option<Owner>,
    ) -> Result<Option<LockGuard>, Stopped> {
        let claim = self.fresh_claim(self.local_lock.key());
        let mut pending = PendingClaim::new(permit, claim, Arc::clone(self.terms));
        let pause_end = pending.contention().and_then(|it| self.pause_end(it));
        if pause_end.is_some() {
            return Box::pin(self.retry(pending, pause_end, None, owner)).await;
        }
        self.check_open()?;
        let mut sent = pending.send(self.engine).await;
        if let Some(AttemptOutcome::Responded(sent_at, Ok(Attempt::Granted(grant)))) = sent {
            self.local_lock.record_response();
            let token = grant.token;
            match pending.take(grant, sent_at) {
                Ok(held) => return self.guard(held, token, owner, 1).map(Some),
                Err(late) => pending = *late,
            }
            sent = Some(AttemptOutcome::Responded(sent_at, Err(late_grant())));
        }
        // Boxed, because the futures of all waits are large, and the caller's future would contain
        // them even where the store responds at once.
        Box::pin(self.retry(pending, None, Some(sent), owner)).await
    }

    /// Repeats the attempt until a grant, the deadline, or a store error that must be returned.
    /// `sent` is the result of the first [`PendingClaim::send`], if it has been called.
    async fn retry(
        self,
        mut pending: PendingClaim,
        pause_end: Option<Moment>,
        mut sent: Option<Option<AttemptOutcome>>,
        owner: Option<Owner>,
    ) -> Result<Option<LockGuard>, Stopped> {
        let key = self.local_lock.key();
        let mut suspension =
            Suspension::new(self.engine.background.watch(), self.terms.lease.length);
        let mut attempts = 0;
        let mut failures = Failures::default();
        let mut wake_limiter = WakeRateLimiter::new();
        let mut holder_changed_at = Moment::now();
        let mut last_token = None;
        if let Some(end) = pause_end {
            (pending, ()) = suspension.during(pending, self.pause(end)).await?;
        }
        // Terminates by a grant, by the deadline, or after store errors for the length of a lease.
        // With only "busy" responses and no deadline, a caller waits without limit, as requested.
        loop {
            attempts += 1;
            let sent = match sent.take() {
                Some(sent) => sent,
                None => {
                    self.check_open()?;
                    pending.send(self.engine).await
                }
            };
            let answer;
            (pending, answer) = pending.answer(sent, self.engine, &mut suspension).await?;
            let error = match answer {
                AttemptOutcome::Responded(sent_at, Ok(Attempt::Granted(grant))) => {
                    self.local_lock.record_response();
                    let token = grant.token;
                    match pending.take(grant, sent_at) {
                        Ok(held) => return self.guard(held, token, owner, attempts).map(Some),
                        Err(late) => pending = *late,
                    }
                    late_grant()
                }
                AttemptOutcome::Responded(_, Ok(Attempt::Busy(busy))) => {
                    failures = Failures::default();
                    self.local_lock.record_response();
                    if let Some(contention) = pending.contention() {
                        contention.on_busy();
                    }
                    self.engine.emit(|| LockEvent::Busy { key: key.as_str(), busy: &busy });
                    if self.deadline_passed(Moment::now()) {
                        return Ok(None);
                    }
                    let token = busy.holder.as_ref().and_then(|holder| holder.token);
                    // In a queue, a new holder in front does not concern the claims behind.
                    if token != last_token && !self.engine.capabilities.fair {
                        holder_changed_at = Moment::now();
                    }
                    last_token = token;
                    let wait = self.wait(pending.claim().clone(), busy, holder_changed_at);
                    let woken;
                    (pending, woken) = suspension.during(pending, wait).await?;
                    if woken? == Woken::ByStore {
                        let delay = pending.contention().map(|it| it.delay_after_wake());
                        let pause = wake_limiter.take().max(delay.unwrap_or_default());
                        if !pause.is_zero() {
                            let end = Moment::now().after(pause);
                            let end = end.min(self.deadline.unwrap_or(Moment::FUTURE));
                            (pending, ()) = suspension.during(pending, self.pause(end)).await?;
                        }
                    }
                    continue;
                }
                AttemptOutcome::Responded(_, Err(error)) => error,
                AttemptOutcome::Unknown => self.engine.no_response_error(),
            };
            let pause = self.retry_or_fail(key, &mut failures, error);
            let outcome;
            (pending, outcome) = suspension.during(pending, pause).await?;
            outcome?;
            // The background releaser has a claim without a response; a new claim follows.
            pending.replace_unresolved(|| self.fresh_claim(key));
        }
    }

    /// Returns the guard of a new grant.
    fn guard(
        &self,
        held: Arc<ActiveGrant>,
        token: FencingToken,
        owner: Option<Owner>,
        attempts: u32,
    ) -> Result<LockGuard, Stopped> {
        let guard = Hold::first_guard(held, token, owner);
        // If the registry is closing, it is too late to return a guard. Dropping it releases the
        // claim.
        self.check_open()?;
        self.local_lock.record_hold(guard.hold());
        self.engine.emit(|| LockEvent::Granted {
            key: self.local_lock.key().as_str(),
            token,
            waited: Moment::now().since(self.started_at),
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
        if self.deadline_passed(end) {
            contention.skip_pause();
            return None;
        }
        Some(end)
    }

    /// Waits until `end`, or until the registry is closing.
    async fn pause(&self, end: Moment) {
        tokio::select! {
            biased;
            () = self.engine.closing.wait() => {}
            () = self.engine.sleep_until(end) => {}
        }
    }

    fn fresh_claim(&self, key: &Key) -> Claim {
        let engine = self.engine;
        let queues = engine.capabilities.fair && !self.deadline_passed(self.started_at);
        Claim::new(key.clone(), self.terms.lease.length)
            .with_label(self.terms.label.clone())
            .with_queueing(if queues { Queueing::Join } else { Queueing::Skip })
            .with_token_block(engine.defaults.handoffs.max.saturating_add(1))
    }

    /// Waits until another attempt makes sense. `holder_changed_at` is when the holder last
    /// changed, as far as this process knows.
    async fn wait(
        &self,
        claim: Claim,
        busy: Busy,
        holder_changed_at: Moment,
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
        let last_attempt_at = lease_end.min(self.deadline.unwrap_or(Moment::FUTURE));
        // A wake-up can be lost although the backend confirms wake-ups. A poll after as long again
        // as already waited at most doubles the wait.
        let recheck_at = now
            .after(jittered(now.since(holder_changed_at).min(CONFIRMED_POLL_MAX)))
            .min(last_attempt_at);
        let wake = engine.backend.wait(&claim, &busy);
        tokio::pin!(wake);
        loop {
            let now = Moment::now();
            let poll =
                if is_mutant { Moment::FUTURE } else { now.after(jittered(engine.defaults.poll)) };
            tokio::select! {
                biased;
                () = engine.closing.wait() => return Err(LockError::Closed),
                () = &mut wake => return Ok(Woken::ByStore),
                () = engine.sleep_until(poll.min(last_attempt_at)) => {}
            }
            if Moment::now() >= recheck_at || !busy.wakes_confirmed(&claim) {
                return Ok(Woken::ByTime);
            }
        }
    }

    /// Waits before the next attempt after a store error, or returns the error.
    async fn retry_or_fail(
        &self,
        key: &Key,
        failures: &mut Failures,
        error: BackendError,
    ) -> Result<(), LockError> {
        let engine = self.engine;
        engine.emit(|| LockEvent::AttemptFailed { key: key.as_str(), error: &error });
        self.local_lock.record_store_error(&error);
        let now = Moment::now();
        let since = *failures.since.get_or_insert(now);
        // Without a deadline, store errors are retried for the length of a lease. By then a
        // failover is over, or it is an outage that the caller must learn of.
        let limit = self.deadline.unwrap_or_else(|| since.after(self.terms.lease.length));
        if !error.is_retryable() || now >= limit {
            return Err(store_error("acquire", key.as_str(), error));
        }
        let retry_at = now.after(backoff(failures.count)).min(limit);
        failures.count += 1;
        tokio::select! {
            biased;
            () = engine.closing.wait() => Err(LockError::Closed),
            () = engine.sleep_until(retry_at) => Ok(()),
        }
    }

    fn deadline_passed(&self, now: Moment) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }
}

/// Returns the error of a grant whose lease was over before the reply arrived.
///
/// That claim is being released. The next attempt has a claim with a new id, so that this release
/// does not end its grant.
fn late_grant() -> BackendError {
    BackendError::transient(
        "the store's grant arrived after its lease was over; use a longer lease",
    )
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
    ByStore,
    /// By the poll interval, the end of the holder's lease, or the deadline.
    ByTime,
}

/// A token bucket that limits how often wake-ups lead to attempts. Without it, superfluous
/// wake-ups, or other processes that are faster each time, would make this process a busy loop.
struct WakeRateLimiter {
    left: u32,
    counted_at: Moment,
}

impl WakeRateLimiter {
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

/// The number of wake-ups that an attempt follows at once, and the pause before each attempt after
/// that.
const EARLY_WAKES_BURST: u32 = 64;
const EARLY_WAKES_PAUSE: Duration = Duration::from_millis(1);
