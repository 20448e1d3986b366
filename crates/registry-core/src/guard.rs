//! The guard of a held lock, and the hold that its guards share: queries, extension, loss
//! notification and release. The requests of a release are in `release`.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::backend::{Claim, LockBackend, Release, Renewal};
use crate::call::Call;
use crate::clock::Moment;
use crate::contained::shielded;
use crate::engine::{Engine, backoff, lost, store_error};
use crate::error::{BackendError, LockError, LostReason};
use crate::event::LockEvent;
use crate::fencing::FencingToken;
use crate::grant::{ActiveGrant, EndingGrant};
use crate::invalidation::Epoch;
use crate::key::Key;
use crate::lease::{covering, drift_margin};
use crate::mutant::{Mutant, mutated};
use crate::options::check_lease;
use crate::owner::Owner;
use crate::release::{PendingRelease, ReleaseOutcome, release_claim};

/// Proof that a lock is held, for as long as [`is_held`](Self::is_held) returns true.
///
/// The guard borrows nothing and may be moved between tasks and threads. While it lives, the lease
/// renewer extends the lease. Release the lock with [`unlock`](Self::unlock), which waits for the
/// store's response and reports whether the lock was lost. Dropping the guard also releases the
/// lock: it passes the release to the registry's background releaser. The drop does not block and
/// reports no error, inside or outside a runtime.
///
/// A lease can end while its holder still works: the process was paused, the network was down, or
/// another client forced the release. Wait for [`lost`](Self::lost), or wrap the work in
/// [`protect`](Self::protect). Also send the [`fencing_token`](Self::fencing_token) with each
/// write: only the token protects data against a holder that has not noticed the loss yet.
///
/// A leaked guard (`mem::forget`) is renewed until the registry is closed, unless the lock was
/// acquired with [`max_hold`](crate::LockOptions::max_hold).
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct LockGuard {
    /// `None` only once `unlock` or `drop` has consumed the guard.
    hold: Option<Arc<Hold>>,
}

impl LockGuard {
    pub(crate) fn new(hold: Arc<Hold>) -> Self {
        Self { hold: Some(hold) }
    }

    /// Returns the key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        self.held().claim().key().as_str()
    }

    /// Returns the fencing token of this grant. It is larger than all tokens granted for this key
    /// before, unless the store [does not fence](crate::Capabilities::fencing).
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.hold().token()
    }

    /// Returns the instant until which the lock is certainly held without a further renewal. The
    /// instant is in the past once the lock is lost.
    ///
    /// The lease counts from before the request was sent, less a margin of 1 % and 2 ms for clocks
    /// that run at different rates. The clock includes the time for which this host is suspended.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        let now = Moment::now();
        self.held().valid_until().max(now).to_instant(now)
    }

    /// Returns how long the lock is certainly held without a further renewal. Zero once it is lost.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        self.held().valid_until().since(Moment::now())
    }

    /// Returns whether the lock is certainly held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        Moment::now() < self.held().valid_until()
    }

    /// Waits until the lock is lost and returns the reason. Never resolves if the lock is released
    /// while it is held.
    ///
    /// The future does not borrow the guard, so another task can await it. It reports a loss even
    /// if it is first polled after the guard is gone. It resolves at
    /// [`valid_until`](Self::valid_until) at the latest, whatever the state of the network. After a
    /// pause of the process, it resolves at its first poll.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect. A later call returns the same reason.
    pub fn lost(&self) -> impl Future<Output = LostReason> + Send + 'static + use<> {
        let hold = Arc::clone(self.hold());
        async move {
            loop {
                let hint = hold.held().loss_notified();
                tokio::pin!(hint);
                // Enabled before the check; a loss in between would be missed otherwise.
                hint.as_mut().enable();
                hold.held().announce_watcher();
                match hold.hold_state() {
                    HoldState::Held => {}
                    HoldState::Lost(reason) => return reason,
                    HoldState::Released => break,
                }
                // The lease renewer reports a loss. The deadline also holds if the renewer's
                // runtime is gone.
                let deadline = hold.held().valid_until();
                // The task that ends the lease calls this task's waker; a panic of the waker must
                // not reach it.
                shielded(async {
                    tokio::select! {
                        biased;
                        () = &mut hint => {}
                        () = hold.held().engine().sleep_until(deadline) => {}
                    }
                })
                .await;
            }
            // A future that is kept must not keep the local lock of a released lock alive.
            drop(hold);
            std::future::pending().await
        }
    }

    /// Runs `work` while the lock is held. If the lock is lost first, drops `work` at its current
    /// `.await`.
    ///
    /// This stops the work but does not undo it. A request that was already sent may still take
    /// effect later, so send the [`fencing_token`](Self::fencing_token) with it.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock was lost before `work` completed.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`. The guard remains.
    pub async fn protect<F: Future>(&self, work: F) -> Result<F::Output, LockError> {
        let key = self.held().claim().key();
        tokio::select! {
            biased;
            // Polled first, so that a process that resumes after a long pause does not continue its
            // work.
            reason = self.lost() => Err(lost(key, reason)),
            done = work => Ok(done),
        }
    }

    /// Extends the lease to at least `lease` from now. Later renewals also request `lease`.
    ///
    /// # Errors
    /// [`LockError::InvalidOption`] for a lease that the store does not accept, before any I/O.
    /// [`LockError::Lost`] if the lock is not held any more. [`LockError::Backend`] if the store
    /// did not confirm the renewal; the lease is then unchanged.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease in the store may or may not be extended. The guard
    /// relies only on confirmed renewals.
    pub async fn extend(&self, lease: Duration) -> Result<(), LockError> {
        let held = self.held();
        let engine = held.engine();
        check_lease("lease", lease, &engine.capabilities)?;
        if let Some(reason) = held.loss() {
            return Err(lost(held.claim().key(), reason));
        }
        let sent_at = Moment::now();
        let key = held.claim().key();
        let claim = held.claim().clone().with_lease(lease);
        let limit = engine.defaults.operation_timeout;
        let answer = engine.renew(claim).answer_to_caller_within(limit, lease).await;
        match answer.unwrap_or_else(|| Err(engine.no_response_error())) {
            Ok(Renewal::Renewed(granted)) => {
                held.set_lease_length(lease);
                held.renewed(sent_at, granted);
            }
            Ok(Renewal::Gone) => _ = held.lose(LostReason::Gone),
            Err(error) => return Err(store_error("extend", key.as_str(), error)),
        }
        match held.loss() {
            Some(reason) => Err(lost(key, reason)),
            None => Ok(()),
        }
    }

    /// Returns another guard of the same hold: same token, same lease, no request to the store. The
    /// lock is released with the last guard.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock is not held any more.
    pub fn reenter(&self) -> Result<Self, LockError> {
        let held = self.held();
        let again = self
            .hold()
            .reenter()
            .ok_or_else(|| lost(held.claim().key(), held.loss().unwrap_or(LostReason::Expired)))?;
        held.engine()
            .emit(|| LockEvent::Reentered { key: self.key(), token: self.fencing_token() });
        Ok(again)
    }

    /// Releases the lock. Waits until the store has freed the key, or the claim has passed to the
    /// next local caller.
    ///
    /// If other guards from [`reenter`](Self::reenter) are alive, only this guard ends. If the
    /// [`min_hold`](crate::LockOptions::min_hold) is not over, this does not wait for it. When it
    /// is over, the background releaser frees the key. If the lease would end before that, it is
    /// extended first.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock was lost: work since then was not protected.
    /// [`LockError::Backend`] if the store did not confirm the release in time. A release that may
    /// succeed later is retried in the background, and the lease ends in any case. Some stores
    /// cannot free a key while a fenced transaction is open. They return [`LockError::Backend`] at
    /// once, and the background releaser frees the key after the transaction.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the release to the background, as dropping the guard does.
    pub async fn unlock(mut self) -> Result<(), LockError> {
        let Some(hold) = self.hold.take() else {
            return Ok(());
        };
        let Some(ended) = hold.leave() else {
            return match hold.hold_state() {
                HoldState::Lost(reason) => Err(lost(hold.held().claim().key(), reason)),
                HoldState::Held | HoldState::Released => Ok(()),
            };
        };
        let ending = ended.map_err(|reason| lost(hold.held().claim().key(), reason))?;
        drop(hold);
        release_or_hand_over(ending).await
    }

    /// Returns the claim for a fenced write, which compares it inside the store, and excludes the
    /// claim from hand-over.
    ///
    /// A store knows the claim, and not which of its local holders sends a request. Without the
    /// exclusion, a fenced write that is still open could take effect after the write of the next
    /// local holder. After this call, the end of the lock releases the claim in the store, so the
    /// next local caller acquires a claim of its own. The exclusion lasts as long as the claim,
    /// also if the write is dropped.
    ///
    /// A backend calls this before it sends the first request of the write.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock is not held any more.
    pub fn claim_for_fence(&self) -> Result<&Claim, LockError> {
        let held = self.held();
        let excluded = held.exclude_from_hand_over();
        excluded.map(|()| held.claim()).map_err(|reason| lost(held.claim().key(), reason))
    }

    /// Returns the claim under which the store knows this hold. For tests and diagnosis.
    ///
    /// A fenced write uses [`claim_for_fence`](Self::claim_for_fence) instead: this claim may pass
    /// to the next local caller.
    #[must_use]
    pub fn claim(&self) -> &Claim {
        self.held().claim()
    }

    /// Returns the backend of the lock's registry if it is a `B`. For fenced writes, together with
    /// [`claim_for_fence`](Self::claim_for_fence).
    #[must_use]
    pub fn backend<B: LockBackend>(&self) -> Option<&B> {
        let backend: &dyn std::any::Any = &*self.held().engine().backend;
        backend.downcast_ref()
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        self.hold.as_ref().expect("a guard has its hold until it is consumed")
    }

    fn held(&self) -> &Arc<ActiveGrant> {
        self.hold().held()
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut guard = f.debug_struct("LockGuard");
        if let Some(hold) = &self.hold {
            guard
                .field("key", hold.held().claim().key())
                .field("token", &hold.token())
                .field("valid_for", &self.valid_for());
        }
        guard.finish_non_exhaustive()
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        let Some(hold) = self.hold.take() else { return };
        // A lost claim needs no release here: the code that noticed the loss has handled it.
        if let Some(Ok(ending)) = hold.leave() {
            let engine = Arc::clone(hold.held().engine());
            drop(hold);
            release_later(&engine, ending);
        }
    }
}

/// Hands the claim over, or releases it and waits for the outcome.
///
/// # Cancel safety
/// Dropping the future leaves the release to the background.
async fn release_or_hand_over(ending: EndingGrant) -> Result<(), LockError> {
    let Some(mut ending) = ending.hand_over() else {
        yield_at_times().await;
        return Ok(());
    };
    let engine = ending.held().engine();
    if !ending.held().min_hold_left().is_zero() {
        let (engine, key) = (Arc::clone(engine), ending.held().claim().key().clone());
        return Box::pin(keep(ending, &engine)).await.map_err(|reason| lost(&key, reason));
    }
    let claim = ending.claim();
    let first = engine.send_release(&claim).await;
    if let Ok(Ok(Release::Freed)) = first
        && ending.held().unknown_attempts_at_release() == 0
    {
        emit_released(ending.held());
        ending.settle();
        drop(ending);
        yield_at_times().await;
        return Ok(());
    }
    let release = match first {
        Ok(answer) => Call::answered(&engine.background, answer),
        Err(release) => Call::polled(&engine.background, release),
    };
    // Boxed, because the futures of all waits are large, and the caller's future would contain
    // them even where the store responds at once.
    Box::pin(release_in_flight(ending, &claim, release)).await
}

/// Leaves a claim to the background releaser, which hands it over or releases it.
fn release_later(engine: &Engine, ending: EndingGrant) {
    drop(release_call(engine, hand_over_or_release(ending)));
}

/// Yields when this task's coop budget is used up. Called after all work is done, so that dropping
/// or not polling the future here delays no release.
async fn yield_at_times() {
    tokio::task::coop::consume_budget().await;
}

/// Waits for a release that was sent, and repeats it while its outcome is unknown.
async fn release_in_flight(
    ending: EndingGrant,
    claim: &Claim,
    release: Call<Result<Release, BackendError>>,
) -> Result<(), LockError> {
    let (engine, key) = (Arc::clone(ending.held().engine()), claim.key());
    let patience = ending.held().lease_length();
    if !claim.is_fenced() {
        let job = release_call(&engine, release_grant(ending, Some(release), None, None));
        return outcome(job, &engine, key, patience).await;
    }
    // The caller may have to end its own transaction before the store can free the key.
    let (blocked, refusal) = oneshot::channel();
    let job = release_call(&engine, release_grant(ending, Some(release), None, Some(blocked)));
    tokio::select! {
        biased;
        outcome = outcome(job, &engine, key, patience) => outcome,
        Ok(error) = refusal => Err(store_error("release", key.as_str(), error)),
    }
}

/// Wraps the release of a claim in a call. If the call is dropped, the background releaser finishes
/// it.
fn release_call(
    engine: &Engine,
    job: impl Future<Output = ReleaseOutcome> + Send + 'static,
) -> Call<ReleaseOutcome> {
    Call::releasing_claim(&engine.background, Box::pin(job))
}

/// Waits for the outcome for at most the operation time-out.
async fn outcome(
    job: Call<ReleaseOutcome>,
    engine: &Engine,
    key: &Key,
    patience: Duration,
) -> Result<(), LockError> {
    let limit = engine.defaults.operation_timeout;
    match job.answer_to_caller_within(limit, patience).await {
        Some(ReleaseOutcome::Freed) => Ok(()),
        _ if mutated(Mutant::ReleaseErrorSwallowed) => Ok(()),
        Some(ReleaseOutcome::NotHeld) => Err(lost(key, LostReason::Gone)),
        Some(ReleaseOutcome::Unknown(error)) => Err(store_error("release", key.as_str(), error)),
        None => Err(store_error("release", key.as_str(), engine.no_response_error())),
    }
}

/// Leaves the claim to the background until its `min_hold` is over. Waits for the first renewal
/// that this needs, because the key must stay locked even if this process ends right after.
async fn keep(ending: EndingGrant, engine: &Engine) -> Result<(), LostReason> {
    let (secured, is_secured) = oneshot::channel();
    let (limit, patience) = (engine.defaults.operation_timeout, ending.held().lease_length());
    let job = release_call(engine, release_grant(ending, None, Some(secured), None));
    tokio::select! {
        biased;
        _ = job.answer_to_caller_within(limit, patience) => Ok(()),
        // A failed renewal is not an error of the caller: the background retries it while the lease
        // lasts.
        secured = is_secured => secured.unwrap_or(Ok(())),
    }
}

/// Hands the claim over to the next local caller, or releases it.
async fn hand_over_or_release(ending: EndingGrant) -> ReleaseOutcome {
    match ending.hand_over() {
        None => ReleaseOutcome::Freed,
        Some(ending) => release_grant(ending, None, None, None).await,
    }
}

/// Releases the claim in the store once its `min_hold` is over.
async fn release_grant(
    mut ending: EndingGrant,
    in_flight: Option<Call<Result<Release, BackendError>>>,
    secured: Option<Secured>,
    blocked: Option<oneshot::Sender<BackendError>>,
) -> ReleaseOutcome {
    let held = Arc::clone(ending.held());
    let engine = Arc::clone(held.engine());
    let min_hold_left = held.min_hold_left();
    if !min_hold_left.is_zero() && !keep_for(&held, &engine, min_hold_left, secured).await {
        ending.left_to_lease();
        engine.leave_to_lease(held.claim().key());
        return ReleaseOutcome::Unknown(BackendError::transient(
            "the registry was closed before the end of min_hold",
        ));
    }
    let outcome = release_claim(PendingRelease {
        engine: Arc::clone(&engine),
        claim: ending.claim(),
        permit: ending.take_permit(),
        lease: held.lease_length(),
        unknown_attempts: held.unknown_attempts_at_release(),
        in_flight,
        blocked,
    })
    .await;
    match &outcome {
        ReleaseOutcome::Freed => {
            emit_released(&held);
            ending.settle();
        }
        ReleaseOutcome::NotHeld => ending.settle(),
        ReleaseOutcome::Unknown(_) => ending.left_to_lease(),
    }
    outcome
}

fn emit_released(held: &ActiveGrant) {
    held.engine().emit(|| LockEvent::Released {
        key: held.claim().key().as_str(),
        held_for: Moment::now().since(held.granted_at()),
    });
}

/// Receives a message once the first renewal of a kept claim is done or not needed. The message is
/// an error if the claim is lost.
type Secured = oneshot::Sender<Result<(), LostReason>>;

/// Keeps a claim without a guard until its `min_hold` is over. Returns false if closing the
/// registry ended the wait.
async fn keep_for(
    held: &ActiveGrant,
    engine: &Engine,
    left: Duration,
    secured: Option<Secured>,
) -> bool {
    let end = Moment::now().after(left);
    tokio::select! {
        biased;
        () = keep_until(held, engine, end, secured) => true,
        () = engine.out_of_time.wait() => false,
    }
}

/// Waits until `end`, and renews the lease as long as it is valid. Returns early if the claim is
/// lost. Also renews after an invalidation of the key, because local callers must not wait for a
/// key whose release was forced.
async fn keep_until(held: &ActiveGrant, engine: &Engine, end: Moment, secured: Option<Secured>) {
    let store = &engine.capabilities;
    let mut secured = secured;
    let mut emit = |outcome| secured.take().map(|secured| secured.send(outcome));
    let mut until = held.valid_until();
    let mut failures = 0;
    let mut epoch = held.local_lock().epoch();
    let mut renews = until < end;
    loop {
        let mut again_at = end;
        if renews {
            epoch = held.local_lock().epoch();
            let now = Moment::now();
            // The store limits the length of a lease, so one renewal may not be enough.
            let lease = covering(end.since(now)).clamp(store.lease_min, store.lease_max);
            let mut renewal = engine.renew(held.claim().clone().with_lease(lease));
            let pause = match renewal.answer_within(engine.defaults.operation_timeout).await {
                Some(Ok(Renewal::Renewed(granted))) => {
                    failures = 0;
                    until = until.max(now.after(granted.saturating_sub(drift_margin(granted))));
                    renews = until < end;
                    granted / 3
                }
                Some(Ok(Renewal::Gone)) => {
                    emit(Err(LostReason::Gone));
                    return;
                }
                Some(Err(error)) if !error.is_retryable() => {
                    renews = false;
                    Duration::ZERO
                }
                Some(Err(_)) | None => {
                    failures += 1;
                    Duration::ZERO
                }
            };
            let next = Moment::now().after(pause.max(backoff(failures)));
            // A lease that ends before the next try cannot be renewed.
            renews &= until >= end || next < until;
            if renews {
                again_at = next.min(end);
            }
        }
        emit(Ok(()));
        if invalidated_before(held, engine, epoch, again_at).await {
            renews = true;
        } else if again_at >= end {
            return;
        }
    }
}

/// Waits until `at`, or until the epoch of the key differs from `before`. Returns true in the
/// latter case.
async fn invalidated_before(
    held: &ActiveGrant,
    engine: &Engine,
    before: Epoch,
    at: Moment,
) -> bool {
    loop {
        // Not checked at once: a renewal may itself cause an invalidation.
        engine.sleep_until(Moment::now().after(engine.defaults.poll).min(at)).await;
        if Moment::now() >= at {
            return false;
        }
        if held.local_lock().epoch() != before {
            return true;
        }
    }
}

/// One holder's use of a grant: its token, its owner, its guards. A grant has one hold at a time,
/// and each hand-over begins a new one.
#[derive(Debug)]
pub(crate) struct Hold {
    held: Arc<ActiveGrant>,
    token: FencingToken,
    owner: Option<Owner>,
    /// The number of live guards. Never increases again from zero.
    guards: AtomicUsize,
    /// A [`HoldState`], set when the last guard is gone.
    hold_state: AtomicU8,
}

/// The state of a lock under one hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HoldState {
    /// Held, or the release has just begun.
    Held,
    /// Released by the holder while it was held.
    Released,
    Lost(LostReason),
}

impl Hold {
    /// Starts a hold with its first guard.
    pub(crate) fn first_guard(
        held: Arc<ActiveGrant>,
        token: FencingToken,
        owner: Option<Owner>,
    ) -> LockGuard {
        LockGuard::new(Arc::new(Self {
            held,
            token,
            owner,
            guards: AtomicUsize::new(1),
            hold_state: AtomicU8::new(HoldState::Held.code()),
        }))
    }

    pub(crate) fn held(&self) -> &Arc<ActiveGrant> {
        &self.held
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.token
    }

    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// Returns another guard, unless the last one is gone or the lock is lost.
    pub(crate) fn reenter(self: &Arc<Self>) -> Option<LockGuard> {
        if self.held.valid_until() <= Moment::now() {
            return None;
        }
        self.guards
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |guards| {
                if guards == 0 { None } else { guards.checked_add(1) }
            })
            .ok()?;
        Some(LockGuard::new(Arc::clone(self)))
    }

    /// Removes one guard. The last one ends the hold: as released, unless the lock was lost before.
    pub(crate) fn leave(&self) -> Option<Result<EndingGrant, LostReason>> {
        if self.guards.fetch_sub(1, Ordering::AcqRel) != 1 {
            return None;
        }
        let ended = self.held.end();
        // Before a hand-over, because a later loss of the claim belongs to the next hold.
        let hold_state =
            ended.as_ref().map_or_else(|reason| HoldState::Lost(*reason), |_| HoldState::Released);
        self.hold_state.store(hold_state.code(), Ordering::Release);
        self.held.notify_loss();
        Some(ended)
    }

    /// Returns the state of the lock under this hold.
    pub(crate) fn hold_state(&self) -> HoldState {
        // The loss is read first: a loss seen before the end of this hold is a loss of this hold.
        let loss = self.held.loss();
        match HoldState::of_code(self.hold_state.load(Ordering::Acquire)) {
            HoldState::Held => loss.map_or(HoldState::Held, HoldState::Lost),
            settled => settled,
        }
    }
}

impl HoldState {
    const ALL: [Self; 6] = [
        Self::Held,
        Self::Released,
        Self::Lost(LostReason::Expired),
        Self::Lost(LostReason::Gone),
        Self::Lost(LostReason::MaxHold),
        Self::Lost(LostReason::Closed),
    ];

    /// Returns the index in [`ALL`](Self::ALL), for an atomic.
    const fn code(self) -> u8 {
        match self {
            Self::Held => 0,
            Self::Released => 1,
            Self::Lost(LostReason::Expired) => 2,
            Self::Lost(LostReason::Gone) => 3,
            Self::Lost(LostReason::MaxHold) => 4,
            Self::Lost(LostReason::Closed) => 5,
        }
    }

    fn of_code(code: u8) -> Self {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Self::Held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_state_is_read_as_it_was_written() {
        for hold_state in HoldState::ALL {
            assert_eq!(HoldState::of_code(hold_state.code()), hold_state);
        }
    }
}
