//! One acquisition from the first line to the last: our turn in this process, our claim in the store, the guard.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Busy, Claim};
use crate::claim::{Abandoned, Answer, Contender};
use crate::clock::Moment;
use crate::engine::{Engine, backoff, trouble};
use crate::error::{BackendError, LockError};
use crate::event::LockEvent;
use crate::fairness::Contention;
use crate::guard::LockGuard;
use crate::hold::Hold;
use crate::key::Key;
use crate::mutant::{Mutant, mutated};
use crate::options::{LockOptions, Terms};
use crate::owner::Owner;
use crate::slot::{Entry, NoEntry, Slot, Turn};
use crate::watch::Suspension;

/// Takes the lock of `slot`. `None` when others held it until the deadline, as far as the store has told.
pub(crate) async fn acquire(
    slot: &Arc<Slot>,
    options: &LockOptions,
) -> Result<Option<LockGuard>, LockError> {
    // A store that answers at once must not keep the other tasks of this thread from running. Nothing is armed yet.
    tokio::task::coop::consume_budget().await;
    let engine = slot.engine();
    engine.check_open()?;
    engine.backend.check_key(slot.key())?;
    let special_terms = engine.terms(options)?;
    let terms = special_terms.as_ref().unwrap_or(&engine.default_terms);
    let owner = options.owner.clone().or_else(Owner::current);
    let began = match options.wait {
        Some(_) => Moment::now(),
        // Only for observers.
        None if engine.observers.is_empty() => Moment::PAST,
        None => Moment::about_now(),
    };
    // One budget for everything.
    let deadline = options.wait.map(|wait| began.after(wait));

    // Ends: each further round is one that this caller was not polled for a lease in.
    loop {
        // 1. Our turn among the callers of this process.
        let turn = match slot.enter(owner.as_ref(), terms, deadline).await {
            Ok(Entry::Turn(turn)) => turn,
            // The lease ended on its way to us.
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
            // Nobody knows whether somebody has the lock.
            Err(NoEntry::TimedOut(Some(error))) => {
                return Err(trouble("acquire", slot.key().as_str(), error));
            }
            Err(NoEntry::PassedOn) => continue,
            Err(NoEntry::Closed) => return Err(LockError::Closed),
        };

        // 2. Our claim among the processes. Dropped at any point, it gives back what it may have got.
        let contest = Contest { slot, engine, terms, began, deadline };
        match contest.win(turn, owner.clone()).await {
            // From here the keeper renews, and dropping the guard releases.
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

/// Why a contest ended without an answer.
enum Stopped {
    /// This caller was not polled for a lease: its claim and its turn are gone.
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

/// The contest for one key between the processes, fought by the one caller of this process whose turn it is.
struct Contest<'a> {
    slot: &'a Slot,
    engine: &'a Engine,
    terms: &'a Arc<Terms>,
    began: Moment,
    deadline: Option<Moment>,
}

impl Contest<'_> {
    async fn win(&self, turn: Turn, owner: Option<Owner>) -> Result<Option<LockGuard>, Stopped> {
        let key = self.slot.key();
        let mut contender = Contender::new(turn, self.fresh_claim(key), Arc::clone(self.terms));
        let mut suspension = Suspension::new(self.engine.janitor.watch(), self.terms.lease.length);
        let mut attempts = 0;
        let mut failures = Failures::default();
        let mut early_wakes = EarlyWakes::new();
        let mut quiet_since = Moment::now();
        let mut last_token = None;
        if let Some(end) = self.pause_end(contender.contention()) {
            (contender, ()) = suspension.during(contender, self.pause(end)).await?;
        }
        // Ends: by a grant, by the deadline, or after a lease's length of trouble. A caller without a deadline who
        // is merely told "busy" has asked to wait for ever.
        loop {
            // The contender is counted before this look, and closing begins before it counts contenders: one of the two
            // sees the other, so that no request leaves for a store that is being closed.
            if self.engine.is_closing() {
                return Err(LockError::Closed.into());
            }
            attempts += 1;
            let answer;
            (contender, answer) = contender.attempt(self.engine, &mut suspension).await?;
            match answer {
                Answer::Answered(sent_at, Ok(Attempt::Granted(grant))) => {
                    self.slot.answered();
                    let token = grant.token;
                    match contender.take(grant, sent_at) {
                        Ok(held) => {
                            let guard = Hold::first_guard(held, token, owner);
                            if self.engine.is_closing() {
                                // Too late to start anything; dropping the guard gives the claim back.
                                return Err(LockError::Closed.into());
                            }
                            self.slot.held_by(guard.hold());
                            self.engine.tell(|| LockEvent::Granted {
                                key: key.as_str(),
                                token,
                                waited: Moment::now().since(self.began),
                                attempts,
                            });
                            return Ok(Some(guard));
                        }
                        // The lease was over before the reply came. The claim is on its way back; a fresh one
                        // must not be taken for it.
                        Err(late) => {
                            let error = BackendError::transient(
                                "the store's grant arrived after its lease was over",
                            );
                            let pause = self.endure(key, &mut failures, error);
                            let borne;
                            (contender, borne) = suspension.during(*late, pause).await?;
                            borne?;
                        }
                    }
                }
                Answer::Answered(_, Ok(Attempt::Busy(busy))) => {
                    failures = Failures::default();
                    self.slot.answered();
                    contender.contention().on_busy();
                    self.engine.tell(|| LockEvent::Busy { key: key.as_str(), busy: &busy });
                    if self.is_over(Moment::now()) {
                        return Ok(None);
                    }
                    let token = busy.holder.as_ref().and_then(|holder| holder.token);
                    // In a queue, another holder in front is no news to those behind.
                    if token != last_token && !self.engine.capabilities.fair {
                        quiet_since = Moment::now();
                    }
                    last_token = token;
                    let wait = self.wait(contender.claim().clone(), busy, quiet_since);
                    let woken;
                    (contender, woken) = suspension.during(contender, wait).await?;
                    if woken? == Woken::Early {
                        let pause =
                            early_wakes.take().max(contender.contention().delay_after_wake());
                        if !pause.is_zero() {
                            let end = Moment::now().after(pause);
                            let end = end.min(self.deadline.unwrap_or(Moment::FUTURE));
                            (contender, ()) = suspension.during(contender, self.pause(end)).await?;
                        }
                    }
                }
                Answer::Answered(_, Err(error)) => {
                    let pause = self.endure(key, &mut failures, error);
                    let borne;
                    (contender, borne) = suspension.during(contender, pause).await?;
                    borne?;
                }
                Answer::Unanswered => {
                    let pause = self.endure(key, &mut failures, self.engine.unanswered());
                    let borne;
                    (contender, borne) = suspension.during(contender, pause).await?;
                    borne?;
                    // The unanswered claim belongs to the janitor now.
                    let fresh = self.fresh_claim(key);
                    contender.start_over(fresh);
                }
            }
        }
    }

    /// The end of the pause before the first attempt. A caller whose deadline comes before that does not pause.
    fn pause_end(&self, contention: &mut Contention) -> Option<Moment> {
        let end = contention.pause_end()?;
        if self.is_over(end) {
            contention.skip_pause();
            return None;
        }
        Some(end)
    }

    /// Waits until `end`, or until the registry is being closed.
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

    /// Waits until another attempt makes sense. `quiet_since` is when the lock last changed hands, as far as this process knows.
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
        // At the deadline one last look is taken, so that a lock that came free in time is not missed.
        let last_look = lease_end.min(self.deadline.unwrap_or(Moment::FUTURE));
        // A confirmed wake-up that is lost all the same costs at most the time that was waited already.
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

    /// Bears a failure for a while, or gives it to the caller.
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
        // Without a deadline, trouble is borne for the length of a lease: by then a failover is over, or it is an outage
        // that somebody must hear of.
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

/// Trouble in a row.
#[derive(Debug, Default)]
struct Failures {
    since: Option<Moment>,
    count: u32,
}

#[derive(Debug, PartialEq, Eq)]
enum Woken {
    /// By the store's hint.
    Early,
    /// By the poll, the holder's lease or the deadline.
    ByTime,
}

/// Limits how often wake-ups lead to attempts: a token bucket, so that a store that wakes without cause, or lets others be
/// faster again and again, does not make this process a busy loop.
struct EarlyWakes {
    left: u32,
    counted_at: Moment,
}

impl EarlyWakes {
    fn new() -> Self {
        Self { left: EARLY_WAKES_BURST, counted_at: Moment::now() }
    }

    /// Counts a wake-up, and returns the pause before it may be followed.
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
        // The wake-up that this pause pays for.
        self.counted_at = now.after(EARLY_WAKES_PAUSE);
        EARLY_WAKES_PAUSE
    }
}

/// Up to a quarter longer, so that waiters that began together do not poll together.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(1.0 + fastrand::f64() / 4.0)
}

/// How long after the end of the holder's lease an attempt is made.
const AFTER_LEASE: Duration = Duration::from_millis(1);

/// The longest time between two attempts of a waiter whose wake-ups are confirmed: a holder's lease by default, so that 2,000 waiters send
/// fewer than 100 requests a second.
const CONFIRMED_POLL_MAX: Duration = Duration::from_secs(30);

/// How many wake-ups may be followed at once, and the pause for each one after that.
const EARLY_WAKES_BURST: u32 = 64;
const EARLY_WAKES_PAUSE: Duration = Duration::from_millis(1);
