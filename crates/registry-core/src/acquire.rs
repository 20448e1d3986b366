//! One acquisition from the first line to the last: our turn in this process, our claim in the store, the guard.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Attempt, Busy, Claim};
use crate::claim::{Answer, Contender};
use crate::clock::Moment;
use crate::engine::{Engine, backoff, trouble};
use crate::error::{BackendError, LockError};
use crate::event::LockEvent;
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::hold::Hold;
use crate::key::Key;
use crate::mutant::{Mutant, mutated};
use crate::options::{LockOptions, Terms};
use crate::owner::Owner;
use crate::slot::{Entry, NoEntry, Slot, Turn};

/// Takes the lock of `slot`. `None` when others held it until the deadline, as far as the store has told.
pub(crate) async fn acquire(
    slot: &Arc<Slot>,
    options: &LockOptions,
) -> Result<Option<LockGuard>, LockError> {
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

    // 1. Our turn among the callers of this process.
    let turn = loop {
        match slot.enter(owner.as_ref(), terms, deadline).await {
            Ok(Entry::Turn(turn)) => break turn,
            // The lease ended on its way to us.
            Ok(Entry::Again(guard) | Entry::HandedOver(guard)) if !guard.is_held() => drop(guard),
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
            Err(NoEntry::Closed) => return Err(LockError::Closed),
        }
    };

    // 2. Our claim among the processes. Dropped at any point, it gives back what it may have got.
    let contest = Contest { slot, engine, terms, began, deadline };
    let Some(guard) = contest.win(turn, owner).await? else {
        return Ok(gave_up(slot, began));
    };

    // 3. From here the keeper renews, and dropping the guard releases.
    Ok(Some(guard))
}

fn gave_up(slot: &Slot, began: Moment) -> Option<LockGuard> {
    slot.engine().tell(|| LockEvent::GaveUp {
        key: slot.key().as_str(),
        waited: Moment::now().since(began),
    });
    None
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
    async fn win(&self, turn: Turn, owner: Option<Owner>) -> Result<Option<LockGuard>, LockError> {
        let key = self.slot.key();
        let mut contender = Contender::new(turn, self.fresh_claim(key), self.terms);
        let mut attempts = 0;
        let mut failures = Failures::default();
        let mut early_wakes = 0;
        let mut last_seen = None;
        // Ends: by a grant, by the deadline, or after a lease's length of trouble. A caller without a deadline who
        // is merely told "busy" has asked to wait for ever.
        loop {
            // The contender is counted before this look, and closing begins before it counts contenders: one of the two
            // sees the other, so that no request leaves for a store that is being closed.
            if self.engine.is_closing() {
                return Err(LockError::Closed);
            }
            attempts += 1;
            match contender.attempt(self.engine).await {
                Answer::Answered(sent_at, Ok(Attempt::Granted(grant))) => {
                    self.slot.answered();
                    let token = grant.token;
                    match contender.take(grant, sent_at) {
                        Ok(held) => {
                            let guard = Hold::first_guard(held, token, owner);
                            if self.engine.is_closing() {
                                // Too late to start anything; dropping the guard gives the claim back.
                                return Err(LockError::Closed);
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
                            self.endure(key, &mut failures, error).await?;
                            contender = *late;
                        }
                    }
                }
                Answer::Answered(_, Ok(Attempt::Busy(busy))) => {
                    failures = Failures::default();
                    self.slot.answered();
                    self.engine.tell(|| LockEvent::Busy { key: key.as_str(), busy: &busy });
                    if self.is_over(Moment::now()) {
                        return Ok(None);
                    }
                    let asked_at = Moment::now();
                    let seen = Seen::of(&busy);
                    if seen.is_news_to(last_seen.replace(seen)) {
                        // Somebody else was faster: the hint was true.
                        early_wakes = 0;
                    }
                    if self.wait(contender.claim().clone(), busy).await? == Woken::Early {
                        early_wakes += 1;
                        // A store that wakes without cause must not make us a busy loop.
                        if early_wakes > EARLY_WAKES_MAX && Moment::now().since(asked_at) < EARLY {
                            tokio::time::sleep(EARLY).await;
                        }
                    } else {
                        early_wakes = 0;
                    }
                }
                Answer::Answered(_, Err(error)) => {
                    self.endure(key, &mut failures, error).await?;
                }
                Answer::Unanswered => {
                    self.endure(key, &mut failures, self.engine.unanswered()).await?;
                    // The unanswered claim belongs to the janitor now.
                    let fresh = self.fresh_claim(key);
                    contender.start_over(fresh);
                }
            }
        }
    }

    fn fresh_claim(&self, key: &Key) -> Claim {
        let engine = self.engine;
        Claim::new(key.clone(), self.terms.lease.length)
            .with_label(self.terms.label.clone())
            .with_queue(engine.capabilities.fair && !self.is_over(self.began))
            .with_token_block(engine.defaults.handoffs.max.saturating_add(1))
    }

    /// Waits until another attempt makes sense.
    async fn wait(&self, claim: Claim, busy: Busy) -> Result<Woken, LockError> {
        let engine = self.engine;
        let now = Moment::now();
        let poll = engine.defaults.poll.mul_f64(1.0 + fastrand::f64() / 4.0);
        let pause =
            busy.retry_after.map_or(poll, |left| left.saturating_add(AFTER_LEASE).min(poll));
        let pause =
            if mutated(Mutant::WakeUpOnly) { Duration::from_secs(1_000_000) } else { pause };
        // At the deadline one last look is taken, so that a lock that came free in time is not missed.
        let until = now.after(pause).min(self.deadline.unwrap_or(Moment::FUTURE));
        tokio::select! {
            biased;
            () = engine.closing.given() => Err(LockError::Closed),
            () = engine.backend.wait(&claim, &busy) => Ok(Woken::Early),
            () = engine.sleep_until(until) => Ok(Woken::ByTime),
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

/// What a store tells of the holder, as far as it shows whether it is another one.
#[derive(Clone, Copy)]
struct Seen {
    token: Option<FencingToken>,
    left: Option<Duration>,
}

impl Seen {
    fn of(busy: &Busy) -> Self {
        Self { token: busy.holder.as_ref().and_then(|holder| holder.token), left: busy.retry_after }
    }

    /// Whether something has happened since `earlier`: a lease grows by a new grant, or else by a renewal, which is rare.
    fn is_news_to(self, earlier: Option<Self>) -> bool {
        earlier.is_none_or(|earlier| self.token != earlier.token || self.left > earlier.left)
    }
}

/// How long after the end of the holder's lease an attempt is made.
const AFTER_LEASE: Duration = Duration::from_millis(1);

/// How many hints in a row may turn out false before they are slowed down to one per [`EARLY`].
const EARLY_WAKES_MAX: u32 = 8;
const EARLY: Duration = Duration::from_millis(2);
