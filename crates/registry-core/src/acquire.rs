//! One acquisition: the local permit, the claim in the store, the guard. Called by
//! [`DistributedLock`](crate::DistributedLock), and by `multi` for several keys. `conversion` uses
//! the same wait between attempts.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, join_all};

use crate::backend::{Attempt, Busy, Claim, Queueing};
use crate::clock::Moment;
use crate::engine::{Engine, backoff, store_error};
use crate::error::{BackendError, BackendErrorKind, LockError};
use crate::event::{AcquireEnd, LockEvent};
use crate::fairness::Contention;
use crate::fencing::FencingToken;
use crate::grant::ActiveGrant;
use crate::guard::{Hold, LockGuard};
use crate::key::Key;
use crate::local_lock::{Admission, LocalLock, LocalPermit, NotAdmitted};
use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};
use crate::observed::ObservedCall;
use crate::options::{ClaimOptions, Defaults, LockOptions};
use crate::owner::Owner;
use crate::pending_claim::{Abandoned, AttemptOutcome, PendingClaim};
use crate::registration::WaiterRegistration;
use crate::stall_detector::MonitoredWait;

/// Acquires the lock of `local_lock`. Returns `None` if the lock was still held at the deadline.
///
/// `current_mode` returns the mode, which may change while the caller waits for the local permit.
pub(crate) async fn acquire(
    local_lock: &Arc<LocalLock>,
    current_mode: impl Fn() -> ClaimMode,
    options: &LockOptions,
) -> Result<Option<LockGuard>, LockError> {
    let call = ObservedCall::begin(local_lock.engine(), local_lock.key(), current_mode());
    let result = acquire_unobserved(local_lock, current_mode, options).await;
    if let Some(call) = call {
        end_observed(call, result.as_ref().map(Option::as_ref));
    }
    result
}

/// Ends a call with its result, and begins the hold of a new guard.
fn end_observed(call: ObservedCall<'_>, result: Result<Option<&LockGuard>, &LockError>) {
    call.end(match result {
        Ok(Some(guard)) => AcquireEnd::Acquired(guard.fencing_token()),
        Ok(None) => AcquireEnd::Busy,
        Err(_) => AcquireEnd::Failed,
    });
    if let Ok(Some(guard)) = result {
        guard.hold().observe();
    }
}

async fn acquire_unobserved(
    local_lock: &Arc<LocalLock>,
    current_mode: impl Fn() -> ClaimMode,
    options: &LockOptions,
) -> Result<Option<LockGuard>, LockError> {
    // Yields when the task's coop budget is used up: a store that responds without waiting must not
    // block the other tasks of this thread. This future owns nothing yet, so it may be dropped.
    tokio::task::coop::consume_budget().await;
    let engine = local_lock.engine();
    engine.check_open()?;
    engine.backend.check_key(local_lock.key())?;
    let owner = options.owner.clone().or_else(Owner::current);
    let started_at = match options.wait {
        Some(_) => Moment::now(),
        // Without a deadline, only observers read this time.
        None if engine.observers.is_empty() => Moment::PAST,
        None => Moment::now_coarse(),
    };
    // One deadline for the local queue and the store together.
    let deadline = options.limited_wait().map(|wait| started_at.after(wait));

    // Repeats only if this caller was not polled for the time of a lease, or if the mode changed.
    loop {
        let mode = current_mode();
        engine.require_mode(mode)?;
        let own_options = engine.claim_options(options, mode)?;
        let claim_options = own_options.as_ref().unwrap_or(&engine.default_options);

        // 1. Wait for the local permit, for which the callers of this process compete.
        let admitted = admit(local_lock, owner.as_ref(), claim_options, deadline).await?;
        let permit = match admitted {
            Some(PermitOrGuard::LocalPermit(permit)) => permit,
            Some(PermitOrGuard::Guard(guard)) => return Ok(Some(guard)),
            None => {
                emit_gave_up(local_lock, mode, started_at);
                return Ok(None);
            }
        };
        if current_mode() != mode {
            // The semaphore was resized during the wait. While a claim with the old number of units
            // is held, claims with the new number fail.
            continue;
        }

        // 2. Send the claim to the store, where processes compete. If the future is dropped, the
        //    claim is released.
        let acquisition = Acquisition { local_lock, engine, claim_options, started_at, deadline };
        match acquisition.run(permit, owner.clone()).await {
            // From here on, the lease renewer renews the claim, and dropping the guard releases it.
            Ok(Some(guard)) => return Ok(Some(guard)),
            Ok(None) => {
                emit_gave_up(local_lock, mode, started_at);
                return Ok(None);
            }
            Err(AcquireFailure::Abandoned) => {}
            Err(AcquireFailure::Failed(error)) => return Err(error),
        }
    }
}

/// Tries to acquire all of these locks, which belong to one registry. Returns the guards of the
/// granted ones, and the index of the first busy one. The store grants all or none if it can decide
/// all keys in one step.
///
/// # Cancel safety
/// If the future is dropped, the background releaser releases all claims that were or may be
/// granted.
pub(crate) async fn try_acquire_all(
    local_locks: &[&Arc<LocalLock>],
    options: &LockOptions,
) -> Result<(Vec<LockGuard>, Option<usize>), LockError> {
    let calls = local_locks
        .iter()
        .map(|lock| ObservedCall::begin(lock.engine(), lock.key(), ClaimMode::Exclusive));
    let calls: Vec<_> = calls.collect();
    let result = try_acquire_all_unobserved(local_locks, options).await;
    for (call, local_lock) in calls.into_iter().zip(local_locks) {
        let Some(call) = call else { continue };
        let is_of_key = |guard: &&LockGuard| guard.key() == local_lock.key().as_str();
        end_observed(call, result.as_ref().map(|(guards, _)| guards.iter().find(is_of_key)));
    }
    result
}

async fn try_acquire_all_unobserved(
    local_locks: &[&Arc<LocalLock>],
    options: &LockOptions,
) -> Result<(Vec<LockGuard>, Option<usize>), LockError> {
    tokio::task::coop::consume_budget().await;
    let mut guards = Vec::with_capacity(local_locks.len());
    let Some(engine) = local_locks.first().map(|local_lock| local_lock.engine()) else {
        return Ok((guards, None));
    };
    let mode = ClaimMode::Exclusive;
    engine.check_open()?;
    for local_lock in local_locks {
        engine.backend.check_key(local_lock.key())?;
    }
    let own_options = engine.claim_options(options, mode)?;
    let claim_options = own_options.as_ref().unwrap_or(&engine.default_options);
    let owner = options.owner.clone().or_else(Owner::current);
    let started_at = Moment::now();
    let deadline = Some(started_at);

    // 1. Take all local permits, without waiting. If one of them is taken, no request is sent.
    let (mut acquisitions, mut pending) = (Vec::new(), Vec::new());
    for (index, local_lock) in local_locks.iter().enumerate() {
        match admit(local_lock, owner.as_ref(), claim_options, deadline).await? {
            Some(PermitOrGuard::Guard(guard)) => guards.push(guard),
            Some(PermitOrGuard::LocalPermit(permit)) => {
                let acquisition =
                    Acquisition { local_lock, engine, claim_options, started_at, deadline };
                pending.push(acquisition.pending_claim(permit));
                acquisitions.push((index, acquisition));
            }
            None => {
                emit_gave_up(local_lock, mode, started_at);
                return Ok((guards, Some(index)));
            }
        }
    }

    // 2. Send the claims to the store.
    for (pending, (_, acquisition)) in pending.iter_mut().zip(&acquisitions) {
        // A batch does not wait for the fairness pause before a first attempt. The deadline has
        // passed, so this call only cancels that pause.
        _ = pending.contention().and_then(|contention| acquisition.pause_end_or_skip(contention));
    }
    if engine.is_closing() {
        return Err(LockError::Closed);
    }
    let is_sent = PendingClaim::send_all(&mut pending, engine).await;
    let outcomes = pending.into_iter().zip(acquisitions).map(|(pending, (index, acquisition))| {
        let owner = owner.clone();
        async move {
            let outcome = acquisition.attempt_in_batch(pending, is_sent, owner);
            match outcome.await {
                // Acquires this key alone, with a new claim.
                Err(AcquireFailure::Abandoned) => {
                    let acquired = acquire_unobserved(local_locks[index], || mode, options);
                    let retried = Box::pin(acquired).await;
                    (
                        index,
                        retried.map(|guard| guard.map_or(KeyOutcome::Busy, KeyOutcome::Retried)),
                    )
                }
                Err(AcquireFailure::Failed(error)) => (index, Err(error)),
                Ok(outcome) => {
                    if matches!(outcome, KeyOutcome::Busy) {
                        emit_gave_up(acquisition.local_lock, mode, started_at);
                    }
                    (index, Ok(outcome))
                }
            }
        }
    });
    let (mut busy, mut retried, mut is_other_key_busy) = (None, None, false);
    for (index, outcome) in join_all(outcomes).await {
        match outcome? {
            KeyOutcome::Granted(guard) => guards.push(guard),
            KeyOutcome::Retried(guard) => {
                guards.push(guard);
                retried = Some(index);
            }
            KeyOutcome::Busy => _ = busy.get_or_insert(index),
            KeyOutcome::OtherKeyBusy => is_other_key_busy = true,
        }
    }
    if is_other_key_busy {
        // The store named one busy key and granted none. If this caller's attempt for that
        // key was abandoned, its retry may have acquired the key since. The key is still reported
        // as busy, so that the caller starts again with it.
        busy = busy.or(retried);
    }
    if is_other_key_busy && busy.is_none() {
        let keys: Vec<_> = local_locks.iter().map(|lock| lock.key().as_str()).collect();
        return Err(store_error("acquire", &keys.join(", "), BackendError::missing_in_batch()));
    }
    Ok((guards, busy))
}

/// What a caller gets from the local lock.
enum PermitOrGuard {
    LocalPermit(LocalPermit),
    Guard(LockGuard),
}

/// Waits for the local permit, or for a guard of a claim that this process already has. Returns
/// `None` at the deadline, or the store error if the last request of another local caller failed.
async fn admit(
    local_lock: &Arc<LocalLock>,
    owner: Option<&Owner>,
    claim_options: &Arc<ClaimOptions>,
    deadline: Option<Moment>,
) -> Result<Option<PermitOrGuard>, LockError> {
    let engine = local_lock.engine();
    // Repeats only if the lock of a received guard was lost, or if this caller was not polled for
    // the time of a lease.
    loop {
        let guard = match local_lock.enter(owner, claim_options, deadline).await {
            Ok(Admission::LocalPermit(permit)) => {
                return Ok(Some(PermitOrGuard::LocalPermit(permit)));
            }
            // The lock was lost before this caller received the guard.
            Ok(
                Admission::Reentered(guard)
                | Admission::HandedOver(guard)
                | Admission::Joined(guard),
            ) if !guard.is_held() => continue,
            Ok(Admission::Reentered(guard)) => finish_reentry(local_lock, Ok(guard))?,
            Ok(Admission::HandedOver(guard)) => {
                let (key, mode, token) = (guard.key(), guard.mode(), guard.fencing_token());
                engine.emit(|| LockEvent::HandedOver { key, mode, token });
                guard
            }
            Ok(Admission::Joined(guard)) => {
                let (key, mode, token) = (guard.key(), guard.mode(), guard.fencing_token());
                engine.emit(|| LockEvent::Joined { key, mode, token });
                guard
            }
            Err(NotAdmitted::HeldByOwner(held)) => finish_reentry(local_lock, Err(held))?,
            Err(NotAdmitted::TimedOut(None)) => return Ok(None),
            // The last request of the caller with the local permit failed, so it is unknown whether
            // the lock is held.
            Err(NotAdmitted::TimedOut(Some(error))) => {
                return Err(store_error("acquire", local_lock.key().as_str(), error));
            }
            Err(NotAdmitted::Revoked) => continue,
            Err(NotAdmitted::Closed) => return Err(LockError::Closed),
        };
        return Ok(Some(PermitOrGuard::Guard(guard)));
    }
}

/// Emits [`LockEvent::Reentered`] for a guard, or returns the error for a held mode that excludes
/// the requested one.
fn finish_reentry(
    local_lock: &LocalLock,
    reentry: Result<LockGuard, ClaimMode>,
) -> Result<LockGuard, LockError> {
    let key = local_lock.key().as_str();
    let guard = reentry.map_err(|held| LockError::HeldByOwner { key: key.to_owned(), held })?;
    let (mode, token) = (guard.mode(), guard.fencing_token());
    local_lock.engine().emit(|| LockEvent::Reentered { key, mode, token });
    Ok(guard)
}

/// The outcome for one key of an attempt for several keys.
enum KeyOutcome {
    Granted(LockGuard),
    /// The attempt for this key was abandoned, and then the key was acquired alone.
    Retried(LockGuard),
    Busy,
    /// The store granted nothing, because another key was busy.
    OtherKeyBusy,
}

impl From<Option<LockGuard>> for KeyOutcome {
    fn from(guard: Option<LockGuard>) -> Self {
        guard.map_or(Self::Busy, Self::Granted)
    }
}

fn emit_gave_up(local_lock: &LocalLock, mode: ClaimMode, started_at: Moment) {
    local_lock.engine().emit(|| LockEvent::GaveUp {
        key: local_lock.key().as_str(),
        mode,
        waited: Moment::now().since(started_at),
    });
}

/// What a waiting acquisition keeps from one attempt to the next.
struct WaitState {
    wake_limiter: WakeRateLimiter,
    /// The start of the wait, or the last change of `last_token` in a store without a queue. The
    /// interval between polls grows with the time since then.
    holder_changed_at: Moment,
    /// The token of the last holder that the store named.
    last_token: Option<FencingToken>,
    registration: WaiterRegistration,
}

impl WaitState {
    /// Begins a wait, after the first busy response.
    fn begin(engine: &Arc<Engine>, claim: &Claim) -> Self {
        let now = Moment::now();
        Self {
            wake_limiter: WakeRateLimiter::new(now),
            holder_changed_at: now,
            last_token: None,
            registration: WaiterRegistration::new(engine, claim, now),
        }
    }
}

/// Why an acquisition in the store returned neither a guard nor `None`.
enum AcquireFailure {
    /// This caller was not polled for the length of a lease. Its claim and its local permit are
    /// released.
    Abandoned,
    Failed(LockError),
}

impl From<Abandoned> for AcquireFailure {
    fn from(_: Abandoned) -> Self {
        Self::Abandoned
    }
}

impl From<LockError> for AcquireFailure {
    fn from(error: LockError) -> Self {
        Self::Failed(error)
    }
}

/// The acquisition of one key in the store, by the caller with the local permit.
#[derive(Clone, Copy)]
struct Acquisition<'a> {
    local_lock: &'a LocalLock,
    engine: &'a Engine,
    claim_options: &'a Arc<ClaimOptions>,
    started_at: Moment,
    deadline: Option<Moment>,
}

impl Acquisition<'_> {
    /// Creates the pending claim, and returns the future of its acquisition.
    ///
    /// Not an `async fn`: the future of one contains its arguments and each future that it awaits,
    /// which contains the claim again.
    fn run(
        self,
        permit: LocalPermit,
        owner: Option<Owner>,
    ) -> impl Future<Output = Result<Option<LockGuard>, AcquireFailure>> {
        let mut pending = self.pending_claim(permit);
        let pause_end =
            pending.contention().and_then(|contention| self.pause_end_or_skip(contention));
        match pause_end {
            Some(pause_end) => {
                let first = FirstAttempt::At(pause_end);
                Either::Left(Box::pin(self.retry(pending, first, owner)))
            }
            None => Either::Right(self.run_without_pause(pending, owner)),
        }
    }

    fn pending_claim(&self, permit: LocalPermit) -> PendingClaim {
        let claim = self.fresh_claim(self.local_lock.key());
        PendingClaim::new(permit, claim, Arc::clone(self.claim_options))
    }

    /// Waits for the response to an attempt that [`PendingClaim::send_all`] has sent. If `is_sent`
    /// is false, sends the attempt first.
    async fn attempt_in_batch(
        self,
        mut pending: PendingClaim,
        is_sent: bool,
        owner: Option<Owner>,
    ) -> Result<KeyOutcome, AcquireFailure> {
        if !is_sent {
            return self.run_without_pause(pending, owner).await.map(KeyOutcome::from);
        }
        let mut monitored_wait = MonitoredWait::new(
            self.engine.background.stall_detector(),
            self.claim_options.lease.length,
        );
        let outcome;
        (pending, outcome) = pending.response(None, self.engine, &mut monitored_wait).await?;
        drop(monitored_wait);
        match &outcome {
            // Dropping the pending claim passes on its permit.
            AttemptOutcome::Completed(_, Err(error)) if error.is_other_key_busy() => {
                Ok(KeyOutcome::OtherKeyBusy)
            }
            _ => self.guard_or_retry(pending, Some(outcome), owner).await.map(KeyOutcome::from),
        }
    }

    async fn run_without_pause(
        self,
        mut pending: PendingClaim,
        owner: Option<Owner>,
    ) -> Result<Option<LockGuard>, AcquireFailure> {
        self.check_open()?;
        let outcome = pending.send(self.engine).await;
        self.guard_or_retry(pending, outcome, owner).await
    }

    /// Confirms a grant and creates its guard. Without a grant, returns the future of
    /// [`retry`](Self::retry). Not an `async fn`, for the same reason as [`run`](Self::run).
    fn guard_or_retry(
        self,
        mut pending: PendingClaim,
        mut outcome: Option<AttemptOutcome>,
        owner: Option<Owner>,
    ) -> impl Future<Output = Result<Option<LockGuard>, AcquireFailure>> {
        if let Some(AttemptOutcome::Completed(sent_at, Ok(Attempt::Granted(grant)))) = outcome {
            self.local_lock.record_response();
            let token = grant.token;
            match pending.confirm(grant, sent_at) {
                Ok(grant) => {
                    let guard = self.create_guard(grant, token, owner, 1);
                    return Either::Left(ready(guard.map(Some)));
                }
                Err(late) => pending = *late,
            }
            outcome = Some(AttemptOutcome::Completed(sent_at, Err(late_grant_error())));
        }
        // Boxed, because the futures of all waits are large, and the caller's future would contain
        // them even where the store responds at once.
        Either::Right(Box::pin(self.retry(pending, FirstAttempt::Sent(outcome), owner)))
    }

    /// Repeats the attempt until a grant, the deadline, or an error that must be returned.
    async fn retry(
        self,
        mut pending: PendingClaim,
        first: FirstAttempt,
        owner: Option<Owner>,
    ) -> Result<Option<LockGuard>, AcquireFailure> {
        let key = self.local_lock.key();
        let mut monitored_wait = MonitoredWait::new(
            self.engine.background.stall_detector(),
            self.claim_options.lease.length,
        );
        let mut attempts = 0;
        let mut failures = RetryState::default();
        let mut wait_state = None;
        let mut first_outcome = match first {
            FirstAttempt::At(pause_end) => {
                (pending, ()) = monitored_wait.wait_for(pending, self.pause(pause_end)).await?;
                None
            }
            FirstAttempt::Sent(outcome) => Some(outcome),
        };
        // Ends with a grant, at the deadline, or with an error. A permanent store error ends it at
        // once. Without a deadline, other store errors end it after the length of a lease. A busy
        // key alone never ends it.
        loop {
            attempts += 1;
            let outcome = match first_outcome.take() {
                Some(outcome) => outcome,
                None => {
                    self.check_open()?;
                    pending.send(self.engine).await
                }
            };
            let response;
            (pending, response) =
                pending.response(outcome, self.engine, &mut monitored_wait).await?;
            let error = match response {
                AttemptOutcome::Completed(sent_at, Ok(Attempt::Granted(grant))) => {
                    self.local_lock.record_response();
                    let token = grant.token;
                    match pending.confirm(grant, sent_at) {
                        Ok(grant) => {
                            return self.create_guard(grant, token, owner, attempts).map(Some);
                        }
                        Err(late) => pending = *late,
                    }
                    late_grant_error()
                }
                AttemptOutcome::Completed(_, Ok(Attempt::Busy(busy))) => {
                    self.local_lock.record_response();
                    // Another call of this owner may have converted its lock or joined a grant
                    // since this call was admitted.
                    if let Some(owner) = &owner
                        && let Some(reentry) =
                            self.local_lock.reenter(owner, self.claim_options.mode)
                    {
                        return Ok(Some(finish_reentry(self.local_lock, reentry)?));
                    }
                    self.check_units_in_store(&busy)?;
                    failures = RetryState::default();
                    if let Some(contention) = pending.contention() {
                        contention.on_busy();
                    }
                    self.engine.emit(|| LockEvent::Busy {
                        key: key.as_str(),
                        mode: self.claim_options.mode,
                        busy: &busy,
                    });
                    if self.deadline_passed(Moment::now()) {
                        return Ok(None);
                    }
                    let wait_state = wait_state.get_or_insert_with(|| {
                        WaitState::begin(self.local_lock.engine(), pending.claim())
                    });
                    pending = self
                        .wait_while_busy(pending, busy, wait_state, &mut monitored_wait)
                        .await?;
                    continue;
                }
                AttemptOutcome::Completed(_, Ok(Attempt::Gone)) => unexpected_gone_error(),
                AttemptOutcome::Completed(_, Err(error)) => error,
                AttemptOutcome::Unknown => self.engine.no_response_error(),
            };
            pending.record_error(&error);
            let pause = self.retry_or_fail(key, &mut failures, error);
            let outcome;
            (pending, outcome) = monitored_wait.wait_for(pending, pause).await?;
            outcome?;
            // After a request without a response, the next attempt uses a new claim.
            pending.replace_unanswered_claim(|| self.fresh_claim(key));
        }
    }

    /// Creates the first guard of a new grant, and emits [`LockEvent::Granted`]. Fails if the
    /// registry is closing.
    fn create_guard(
        &self,
        grant: Arc<ActiveGrant>,
        token: FencingToken,
        owner: Option<Owner>,
        attempts: u32,
    ) -> Result<LockGuard, AcquireFailure> {
        let guard = Hold::first_guard(grant, token, owner);
        // If the registry is closing, it is too late to return the guard. Dropping the guard
        // releases the claim.
        self.check_open()?;
        self.local_lock.record_hold(guard.hold());
        guard.hold().grant().pass_on_permit();
        self.engine.emit(|| LockEvent::Granted {
            key: self.local_lock.key().as_str(),
            mode: self.claim_options.mode,
            token,
            waited: Moment::now().since(self.started_at),
            attempts,
        });
        Ok(guard)
    }

    /// Fails if the held permits state another number of units than this claim.
    fn check_units_in_store(&self, busy: &Busy) -> Result<(), AcquireFailure> {
        match (busy.units_in_store, self.claim_options.mode) {
            (Some(held), ClaimMode::Permits { of, .. }) => {
                let key = self.local_lock.key().as_str().to_owned();
                Err(LockError::UnitsMismatch { key, stated: of, held }.into())
            }
            _ => Ok(()),
        }
    }

    /// Fails if the registry is closing.
    ///
    /// A [`PendingClaim`] is counted before this check, and `close` sets its flag before it reads
    /// that count. Either this check sees the flag, or `close` waits for the claim. Unless `close`
    /// reaches its limit, no request therefore reaches a closed store.
    fn check_open(&self) -> Result<(), AcquireFailure> {
        if self.engine.is_closing() { Err(LockError::Closed.into()) } else { Ok(()) }
    }

    /// Returns the end of the fairness pause before the first attempt, or `None` if there is no
    /// pause. Cancels a pause that does not end before the deadline.
    fn pause_end_or_skip(&self, contention: &mut Contention) -> Option<Moment> {
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
        let options = self.claim_options;
        let queueing = if self.deadline_passed(self.started_at) {
            // The wait is zero, so no attempt follows a busy response.
            Queueing::Skip
        } else if engine.capabilities.fair || options.fair {
            Queueing::Join
        } else {
            Queueing::ExclusiveIntent
        };
        let limits = &engine.defaults.hand_over_limits;
        let hand_overs_max = match options.mode {
            ClaimMode::Exclusive => limits.max,
            // If shared grants of several processes overlap, only the newest returns its unused
            // tokens. With larger blocks, the tokens of a busy key could run ahead of the clock.
            ClaimMode::Shared => limits.max.min(Defaults::HAND_OVER_LIMITS.max),
            _ => 0,
        };
        Claim::new(key.clone(), options.lease.length)
            .with_mode(options.mode)
            .with_label(options.label.clone())
            .with_queueing(queueing)
            .with_token_block(hand_overs_max.saturating_add(1))
    }

    /// Waits after a `Busy` response until the next attempt is due.
    async fn wait_while_busy(
        &self,
        mut pending: PendingClaim,
        busy: Busy,
        wait_state: &mut WaitState,
        monitored_wait: &mut MonitoredWait<'_, PendingClaim>,
    ) -> Result<PendingClaim, AcquireFailure> {
        let token = busy.holder.as_ref().and_then(|holder| holder.token);
        // A new holder restarts the growth of the interval between polls, except in a store with a
        // queue. There, a new holder is only the next claim in the queue, so the turn of this claim
        // is hardly nearer.
        if token != wait_state.last_token && !self.engine.capabilities.fair {
            wait_state.holder_changed_at = Moment::now();
        }
        wait_state.last_token = token;
        let wait = wait_for_attempt(
            self.engine,
            self.deadline,
            pending.claim().clone(),
            busy,
            wait_state.holder_changed_at,
            &mut wait_state.registration,
        );
        let woken;
        (pending, woken) = monitored_wait.wait_for(pending, wait).await?;
        if woken? == WokenBy::Store {
            let delay = pending.contention().map(|contention| contention.delay_after_wake());
            let pause = wait_state.wake_limiter.pause_after_wake().max(delay.unwrap_or_default());
            if !pause.is_zero() {
                let end = Moment::now().after(pause);
                let end = end.min(self.deadline.unwrap_or(Moment::FUTURE));
                (pending, ()) = monitored_wait.wait_for(pending, self.pause(end)).await?;
            }
        }
        Ok(pending)
    }

    /// Waits before the next attempt after a store error, or returns the error.
    async fn retry_or_fail(
        &self,
        key: &Key,
        failures: &mut RetryState,
        error: BackendError,
    ) -> Result<(), LockError> {
        let engine = self.engine;
        engine.emit(|| LockEvent::AttemptFailed {
            key: key.as_str(),
            mode: self.claim_options.mode,
            error: &error,
        });
        let error = store_error("acquire", key.as_str(), error);
        failures.pause_or_fail(engine, error, self.deadline, self.claim_options.lease.length).await
    }

    fn deadline_passed(&self, now: Moment) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }
}

/// Waits until the next attempt is due, and refreshes `registration` meanwhile. If the store
/// confirms its wake-ups, the interval between polls grows with the time since `holder_changed_at`.
pub(crate) async fn wait_for_attempt(
    engine: &Engine,
    deadline: Option<Moment>,
    claim: Claim,
    busy: Busy,
    holder_changed_at: Moment,
    registration: &mut WaiterRegistration,
) -> Result<WokenBy, LockError> {
    let now = Moment::now();
    let wake_ups_only = mutated(Mutant::WakeUpOnly);
    let lease_end = match busy.retry_after {
        Some(left) if !wake_ups_only => now.after(left.saturating_add(DELAY_AFTER_LEASE_END)),
        _ => Moment::FUTURE,
    };
    // One last attempt is made at the deadline, so that a lock that became free in time is not
    // missed.
    let mut latest_attempt_at = lease_end.min(deadline.unwrap_or(Moment::FUTURE));
    // The place in the queue expires unless the attempt is repeated.
    if busy.is_queued && !engine.capabilities.fair {
        latest_attempt_at = latest_attempt_at.min(now.after(claim.lease() / 3));
    }
    // A wake-up can be lost although the store has confirmed its wake-ups. The next poll is
    // therefore due when the time since `holder_changed_at` has about doubled, and after about
    // `CONFIRMED_POLL_MAX` at the latest. A lost wake-up thus at most about doubles the wait.
    let recheck_at = now
        .after(jittered(now.since(holder_changed_at).min(CONFIRMED_POLL_MAX)))
        .min(latest_attempt_at);
    let wake = engine.backend.wait(&claim, &busy);
    tokio::pin!(wake);
    loop {
        registration.refresh();
        let now = Moment::now();
        let poll =
            if wake_ups_only { Moment::FUTURE } else { now.after(jittered(engine.defaults.poll)) };
        tokio::select! {
            biased;
            () = engine.closing.wait() => return Err(LockError::Closed),
            () = &mut wake => return Ok(WokenBy::Store),
            () = engine.sleep_until(poll.min(latest_attempt_at)) => {}
        }
        if Moment::now() >= recheck_at || !busy.confirms_wake_ups(&claim) {
            return Ok(WokenBy::Timer);
        }
    }
}

/// Returns the error for a grant whose lease was over before the response arrived.
///
/// [`PendingClaim::confirm`] releases that claim. The next attempt has a claim with a new id, so
/// that this release cannot end a later grant.
fn late_grant_error() -> BackendError {
    BackendError::transient(
        "the store's grant arrived after its lease was over; use a longer lease",
    )
}

fn unexpected_gone_error() -> BackendError {
    let message = "the store treated a new claim as a conversion; report this bug";
    BackendError::new(BackendErrorKind::Protocol, message)
}

/// Consecutive store errors.
#[derive(Debug, Default)]
pub(crate) struct RetryState {
    since: Option<Moment>,
    count: u32,
}

impl RetryState {
    /// Waits before the next attempt after `error`, or returns the error.
    pub(crate) async fn pause_or_fail(
        &mut self,
        engine: &Engine,
        error: LockError,
        deadline: Option<Moment>,
        lease: Duration,
    ) -> Result<(), LockError> {
        let now = Moment::now();
        let since = *self.since.get_or_insert(now);
        // Without a deadline, store errors are retried for the length of a lease. A failover
        // usually takes less time. The caller must learn of a longer outage.
        let limit = deadline.unwrap_or_else(|| since.after(lease));
        if !error.is_retryable() || now >= limit {
            return Err(error);
        }
        let retry_at = now.after(backoff(self.count)).min(limit);
        self.count += 1;
        tokio::select! {
            biased;
            () = engine.closing.wait() => Err(LockError::Closed),
            () = engine.sleep_until(retry_at) => Ok(()),
        }
    }
}

/// The first attempt of [`Acquisition::retry`].
enum FirstAttempt {
    /// Is sent at this time.
    At(Moment),
    /// Has been sent. Contains its outcome, or `None` if the store has not responded yet.
    Sent(Option<AttemptOutcome>),
}

/// What ended [`wait_for_attempt`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WokenBy {
    /// A wake-up from the store.
    Store,
    /// The poll interval, the end of the holder's lease, or the deadline. Also the time at which a
    /// claim must repeat its attempt to keep its place in the queue.
    Timer,
}

/// Limits how often wake-ups lead to attempts: a token bucket, with one token per wake-up.
///
/// Without this limit, a store that sends endless wake-ups makes this process send requests without
/// a pause. The same happens if other processes acquire the key first each time.
struct WakeRateLimiter {
    wake_ups_left: u32,
    refilled_at: Moment,
}

impl WakeRateLimiter {
    fn new(now: Moment) -> Self {
        Self { wake_ups_left: WAKE_BURST_MAX, refilled_at: now }
    }

    /// Counts a wake-up, and returns the pause before the attempt that follows it.
    fn pause_after_wake(&mut self) -> Duration {
        let now = Moment::now();
        let intervals = now.since(self.refilled_at).as_nanos() / WAKE_INTERVAL_MIN.as_nanos();
        if intervals > 0 {
            let refill = u32::try_from(intervals).unwrap_or(u32::MAX);
            self.wake_ups_left = self.wake_ups_left.saturating_add(refill).min(WAKE_BURST_MAX);
            self.refilled_at = now;
        }
        if let Some(wake_ups_left) = self.wake_ups_left.checked_sub(1) {
            self.wake_ups_left = wake_ups_left;
            return Duration::ZERO;
        }
        // During the pause, the bucket would gain one token, which this wake-up uses. The next
        // refill therefore begins after the pause.
        self.refilled_at = now.after(WAKE_INTERVAL_MIN);
        WAKE_INTERVAL_MIN
    }
}

/// Lengthens `pause` at random by up to a quarter, so that waiters do not all poll at the same
/// time.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(1.0 + fastrand::f64() / 4.0)
}

/// The time between the end of the holder's lease and the attempt that follows it.
const DELAY_AFTER_LEASE_END: Duration = Duration::from_millis(1);

/// The longest interval between the polls of a waiter whose wake-ups the store confirms.
/// [`jittered`] lengthens it. It equals the default lease. At this interval, 2,000 waiters send
/// fewer than 100 requests per second.
const CONFIRMED_POLL_MAX: Duration = Duration::from_secs(30);

/// The maximum number of consecutive wake-ups that are each followed by an attempt at once.
const WAKE_BURST_MAX: u32 = 64;

/// The minimum time between attempts that follow wake-ups, once the burst is used up.
const WAKE_INTERVAL_MIN: Duration = Duration::from_millis(1);
