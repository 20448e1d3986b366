//! The guard of a held lock, and the hold that its guards share: queries, extension, loss
//! notification, and the end of the hold. `release` repeats a release whose outcome is unknown.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::oneshot;

use crate::backend::{Claim, LockBackend, Release, Renewal};
use crate::background::BackgroundReleaser;
use crate::call::{Call, first_poll, split_by_claim};
use crate::clock::Moment;
use crate::engine::{Engine, PolledOnce, lost_error, store_error};
use crate::error::{BackendError, LockError, LostReason};
use crate::event::LockEvent;
use crate::fencing::FencingToken;
use crate::grant::{ActiveGrant, EndingGrant};
use crate::key::Key;
use crate::lease::lease_covering;
use crate::min_hold::{FirstRenewalSender, MinHold};
use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};
use crate::options::check_lease;
use crate::owner::Owner;
use crate::panic_safe::with_panic_safe_waker;
use crate::release::{PendingRelease, ReleaseOutcome, release_claim};

/// A held lock. It is certainly held as long as [`is_held`](Self::is_held) returns true.
///
/// The guard borrows nothing and may be moved between tasks and threads. While it lives, the lease
/// renewer extends the lease, unless the lock was acquired without
/// [`auto_renew`](crate::LockOptions::auto_renew). Release the lock with [`unlock`](Self::unlock),
/// which waits for the store's response and reports whether the lock was lost. Dropping the guard
/// also releases the lock: it passes the release to the registry's background releaser. The drop
/// does not block and reports no error, inside or outside a runtime.
///
/// A lease can end while its holder still works: the process was paused, the network was down, or
/// another client forced the release. Wait for [`lost`](Self::lost), or wrap the work in
/// [`protect`](Self::protect). Also send the [`fencing_token`](Self::fencing_token) with each
/// write: only the token protects data against a holder that has not noticed the loss yet.
///
/// The lease of a leaked guard (`mem::forget`) is renewed until the registry is closed. With
/// [`max_hold`](crate::LockOptions::max_hold), or without
/// [`auto_renew`](crate::LockOptions::auto_renew), the lock is lost earlier.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct LockGuard {
    /// `None` only once `unlock`, `drop` or a conversion has consumed the guard.
    hold: Option<Arc<Hold>>,
}

impl LockGuard {
    pub(crate) fn new(hold: Arc<Hold>) -> Self {
        Self { hold: Some(hold) }
    }

    /// Returns the key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        self.grant().claim().key().as_str()
    }

    /// Returns the mode in which the lock is held.
    #[must_use]
    pub fn mode(&self) -> ClaimMode {
        self.grant().claim().mode()
    }

    /// Returns the fencing token of this hold. It is larger than the tokens of all earlier holders
    /// that this lock excludes, unless the store [does not fence](crate::Capabilities::fencing).
    ///
    /// An exclusive lock excludes all other holders. A reader may have a smaller token than an
    /// earlier reader.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.hold().token()
    }

    /// Returns the instant until which the lock is certainly held without a further renewal. Once
    /// the lock is lost, this is the time of the call.
    ///
    /// The lease counts from before the request was sent, less a margin of 1 % and 2 ms for clocks
    /// that run at different rates. On Linux and Android, the clock includes the time for which
    /// this host is suspended.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        let now = Moment::now();
        self.grant().valid_until().max(now).to_instant(now)
    }

    /// Returns how long the lock is certainly held without a further renewal. Zero once it is lost.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        self.grant().valid_until().since(Moment::now())
    }

    /// Returns whether the lock is certainly held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        Moment::now() < self.grant().valid_until()
    }

    /// Waits until the lock is lost and returns the reason. Never resolves if the lock is released
    /// before a loss.
    ///
    /// The future does not borrow the guard, so another task can await it. It reports a loss even
    /// if it is first polled after the guard is dropped. Without a renewal, it resolves at
    /// [`valid_until`](Self::valid_until), even if the network is down. If the process was paused
    /// beyond that time, the future resolves at its next poll.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect. A later call returns the same reason.
    pub fn lost(&self) -> impl Future<Output = LostReason> + Send + 'static + use<> {
        Arc::clone(self.hold()).lost()
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
        let key = self.grant().claim().key();
        tokio::select! {
            biased;
            // Polled first, so that a process that resumes after a long pause does not continue its
            // work.
            reason = self.lost() => Err(lost_error(key, reason)),
            output = work => Ok(output),
        }
    }

    /// Extends the lease to at least `lease` from now, but not beyond the end of
    /// [`max_hold`](crate::LockOptions::max_hold). Later renewals also request `lease`.
    ///
    /// # Errors
    /// [`LockError::InvalidOption`] for a lease that the store does not accept, before any I/O.
    /// [`LockError::Lost`] if the lock is not held any more. [`LockError::Backend`] if the store
    /// did not confirm the renewal; the guard then relies on its previous lease.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease in the store may or may not be extended. The guard
    /// relies only on confirmed renewals.
    pub async fn extend(&self, lease: Duration) -> Result<(), LockError> {
        let grant = self.grant();
        let engine = grant.engine();
        check_lease("lease", lease, &engine.capabilities)?;
        if let Some(reason) = grant.loss() {
            return Err(lost_error(grant.claim().key(), reason));
        }
        grant.on_lease_requested(lease);
        let sent_at = Moment::now();
        let key = grant.claim().key();
        let claim = grant.claim().clone().with_lease(lease);
        let limit = engine.defaults.operation_timeout;
        let response = engine.renew(claim).monitored_response_within(limit, lease).await;
        match response.unwrap_or_else(|| Err(engine.no_response_error())) {
            Ok(Renewal::Renewed(granted)) => {
                grant.set_lease_length(lease);
                grant.record_renewal(sent_at, granted);
            }
            Ok(Renewal::Gone) => _ = grant.lose(LostReason::Gone),
            Err(error) => return Err(store_error("extend", key.as_str(), error)),
        }
        match grant.loss() {
            Some(reason) => Err(lost_error(key, reason)),
            None => Ok(()),
        }
    }

    /// Returns another guard of the same hold: same token, same lease, no request to the store. The
    /// lock is released with the last guard.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock is not held any more.
    pub fn reenter(&self) -> Result<Self, LockError> {
        let grant = self.grant();
        let guard = self.hold().reenter().ok_or_else(|| {
            lost_error(grant.claim().key(), grant.loss().unwrap_or(LostReason::Expired))
        })?;
        let (key, mode, token) = (self.key(), self.mode(), self.fencing_token());
        grant.engine().emit(|| LockEvent::Reentered { key, mode, token });
        Ok(guard)
    }

    /// Releases the lock. Waits until the store has freed the key, or the claim has passed to the
    /// next local caller.
    ///
    /// If other guards of the same hold are alive, or other readers of this process share the
    /// grant, only this guard ends. Further guards of a hold come from [`reenter`](Self::reenter),
    /// or from an acquisition by the same [`Owner`]. If the
    /// [`min_hold`](crate::LockOptions::min_hold) is not over, this returns without waiting for its
    /// end; the background releaser then frees the key. If the lease would end before the
    /// `min_hold`, or an invalidation has not been verified yet, this first waits for a renewal.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock was lost: work since then was not protected.
    /// [`LockError::Backend`] if the store did not confirm the release within the operation
    /// time-out, or at once for an error that a retry cannot resolve. The background releaser
    /// retries a release that may still succeed. If no retry succeeds, the lock ends with its
    /// lease. Some stores cannot free a key while a fenced transaction is open. For these, `unlock`
    /// returns [`LockError::Backend`] at once, and the background releaser frees the key after the
    /// transaction.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the release to the background, as dropping the guard does.
    pub async fn unlock(self) -> Result<(), LockError> {
        match self.end()? {
            Some(ending) => release_or_hand_over(ending).await,
            None => Ok(()),
        }
    }

    /// Ends this guard. Returns the grant to release, or `None` if the grant has other guards.
    fn end(mut self) -> Result<Option<EndingGrant>, LockError> {
        let Some(hold) = self.hold.take() else {
            return Ok(None);
        };
        let Some(ended) = hold.remove_guard() else {
            return match hold.state() {
                HoldState::Lost(reason) => Err(lost_error(hold.grant().claim().key(), reason)),
                HoldState::Held | HoldState::Released => Ok(None),
            };
        };
        ended.map(Some).map_err(|reason| lost_error(hold.grant().claim().key(), reason))
    }

    /// Returns the claim for a fenced write, and excludes the claim from hand-over. The store
    /// compares the claim in the same step as the write.
    ///
    /// After a hand-over, two local holders have the same claim one after the other. A store cannot
    /// distinguish their writes, so an open write of the first holder could take effect after a
    /// write of the second. After this call, the end of the hold releases the claim in the store,
    /// and the next local caller acquires a new claim. The exclusion lasts until that release, even
    /// if the write is dropped.
    ///
    /// A backend calls this before it sends the first request of the write.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock is not held any more.
    pub fn claim_for_fence(&self) -> Result<&Claim, LockError> {
        let grant = self.grant();
        let excluded = grant.exclude_from_hand_over();
        excluded.map(|()| grant.claim()).map_err(|reason| lost_error(grant.claim().key(), reason))
    }

    /// Returns the claim under which the store knows this hold. For tests and diagnosis.
    ///
    /// A fenced write uses [`claim_for_fence`](Self::claim_for_fence) instead: this claim may pass
    /// to the next local caller.
    #[must_use]
    pub fn claim(&self) -> &Claim {
        self.grant().claim()
    }

    /// Returns the backend of the lock's registry if it is a `B`. For fenced writes, together with
    /// [`claim_for_fence`](Self::claim_for_fence).
    #[must_use]
    pub fn backend<B: LockBackend>(&self) -> Option<&B> {
        let backend: &dyn std::any::Any = &*self.grant().engine().backend;
        backend.downcast_ref()
    }

    /// Consumes the guard without a release.
    pub(crate) fn into_hold(mut self) -> Arc<Hold> {
        self.hold.take().expect("a guard has its hold until it is consumed")
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        self.hold.as_ref().expect("a guard has its hold until it is consumed")
    }

    fn grant(&self) -> &Arc<ActiveGrant> {
        self.hold().grant()
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut guard = f.debug_struct("LockGuard");
        if let Some(hold) = &self.hold {
            guard
                .field("key", hold.grant().claim().key())
                .field("token", &hold.token())
                .field("valid_for", &self.valid_for());
        }
        guard.finish_non_exhaustive()
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        let Some(hold) = self.hold.take() else { return };
        // A lost claim needs no release here: `ActiveGrant::lose` has released it.
        if let Some(Ok(ending)) = hold.remove_guard() {
            let engine = Arc::clone(hold.grant().engine());
            drop(hold);
            release_or_hand_over_in_background(&engine, ending);
        }
    }
}

/// Releases the locks of all guards. Returns one of the errors, if any.
///
/// If the store has batches, one request releases all claims that can join a batch. These claims
/// are exclusive, not fenced, and without a remaining `min_hold`. They are in the registry and the
/// shard of the first such claim.
///
/// # Cancel safety
/// As [`LockGuard::unlock`].
pub(crate) async fn unlock_all(guards: Vec<LockGuard>) -> Result<(), LockError> {
    let mut result = Ok(());
    let mut singles = Vec::new();
    let mut batch: Vec<(EndingGrant, Claim)> = Vec::new();
    for guard in guards {
        let ending = match guard.end() {
            Ok(Some(ending)) => ending,
            Ok(None) => continue,
            Err(error) => {
                result = result.and(Err(error));
                continue;
            }
        };
        let Some(ending) = ending.hand_over() else { continue };
        let claim = ending.claim();
        let engine = ending.grant().engine();
        let joins_batch = engine.backend.batch().is_some()
            && claim.mode() == ClaimMode::Exclusive
            && !claim.is_fenced()
            && ending.grant().min_hold_left().is_zero()
            && batch.first().is_none_or(|(first, first_claim)| {
                Arc::ptr_eq(first.grant().engine(), engine)
                    && engine.backend.shard(first_claim) == engine.backend.shard(&claim)
            });
        if joins_batch {
            batch.push((ending, claim));
        } else {
            singles.push(ending);
        }
    }
    if batch.len() < 2 {
        singles.extend(batch.drain(..).map(|(ending, _)| ending));
    }
    let batched = release_batch(batch);
    // Created before the first poll. If the future is dropped, or a release panics, the background
    // releaser completes the calls that were not polled yet.
    let singles: Vec<_> = singles
        .into_iter()
        .map(|ending| {
            let engine = Arc::clone(ending.grant().engine());
            release_call(&engine, release_ending(ending))
        })
        .collect();
    let singles = join_all(singles);
    let (batched, singles) = futures_util::future::join(batched, singles).await;
    batched.into_iter().chain(singles).fold(result, Result::and)
}

/// Releases the claims of one shard with one request. Then waits for the outcome of each release.
async fn release_batch(batch: Vec<(EndingGrant, Claim)>) -> Vec<Result<(), LockError>> {
    let Some((first, _)) = batch.first() else { return Vec::new() };
    let engine = Arc::clone(first.grant().engine());
    let backend = Arc::clone(&engine.backend);
    let claims: Vec<Claim> = batch.iter().map(|(_, claim)| claim.clone()).collect();
    let call = async move {
        match backend.batch() {
            Some(batch) => batch.release_all(&claims).await,
            None => join_all(claims.iter().map(|claim| backend.release(claim))).await,
        }
    };
    let parts = split_by_claim(call, batch.len(), || Err(BackendError::missing_in_batch()));
    let release = |((ending, claim), part): ((EndingGrant, Claim), _)| {
        let background = engine.background.clone();
        let release = async move {
            let sent = first_poll(part).await;
            finish_release(ending, &claim, sent, &background).await
        };
        release_call(&engine, release)
    };
    // As in `unlock_all`, created before the first poll.
    let releases: Vec<_> = batch.into_iter().zip(parts).map(release).collect();
    join_all(releases).await
}

/// Hands the claim over, or releases it and waits for the outcome.
///
/// # Cancel safety
/// Dropping the future leaves the release to the background.
async fn release_or_hand_over(ending: EndingGrant) -> Result<(), LockError> {
    let Some(ending) = ending.hand_over() else {
        yield_if_budget_used_up().await;
        return Ok(());
    };
    release_ending(ending).await
}

/// Releases the claim, and waits for the outcome. If the `min_hold` is not over, leaves the release
/// to the background releaser.
async fn release_ending(ending: EndingGrant) -> Result<(), LockError> {
    let engine = ending.grant().engine();
    if !ending.grant().min_hold_left().is_zero() {
        let (engine, key) = (Arc::clone(engine), ending.grant().claim().key().clone());
        return Box::pin(release_after_min_hold(ending, &engine, &key)).await;
    }
    let claim = ending.claim();
    let background = engine.background.clone();
    let sent = engine.send_release(&claim).await;
    finish_release(ending, &claim, sent, &background).await
}

/// Waits for the outcome of a release that was sent and polled once.
async fn finish_release(
    mut ending: EndingGrant,
    claim: &Claim,
    sent: PolledOnce<Release>,
    background: &BackgroundReleaser,
) -> Result<(), LockError> {
    if let Ok(Ok(Release::Freed)) = sent
        && ending.grant().possible_grants() == 0
    {
        emit_released(ending.grant());
        ending.record_end();
        drop(ending);
        yield_if_budget_used_up().await;
        return Ok(());
    }
    let release = match sent {
        Ok(response) => Call::completed(background, response),
        Err(release) => Call::after_first_poll(background, release),
    };
    // Boxed, because the futures of all waits are large, and the caller's future would contain
    // them even where the store responds at once.
    Box::pin(release_in_flight(ending, claim, release)).await
}

/// Makes the background releaser hand the claim over or release the claim.
fn release_or_hand_over_in_background(engine: &Engine, ending: EndingGrant) {
    drop(release_call(engine, async move {
        match ending.hand_over() {
            None => ReleaseOutcome::Freed,
            Some(ending) => release_grant(ending, ReleaseContext::default()).await,
        }
    }));
}

/// Yields if this task's coop budget is used up. Called after the release, so that a future that is
/// dropped or not polled here delays nothing.
async fn yield_if_budget_used_up() {
    tokio::task::coop::consume_budget().await;
}

/// Waits for the outcome of a release that was sent. The release is repeated while its outcome is
/// unknown.
async fn release_in_flight(
    ending: EndingGrant,
    claim: &Claim,
    release: Call<Result<Release, BackendError>>,
) -> Result<(), LockError> {
    let (engine, key) = (Arc::clone(ending.grant().engine()), claim.key());
    let unpolled_max = ending.grant().lease_length();
    if !claim.is_fenced() {
        let context = ReleaseContext { in_flight: Some(release), ..ReleaseContext::default() };
        let job = release_call(&engine, release_grant(ending, context));
        return wait_for_outcome(job, &engine, key, unpolled_max).await;
    }
    // An open transaction of the caller may block the release. If the store reports this, the call
    // returns at once, so that the caller can end the transaction.
    let (blocked_error_sender, blocked_error) = oneshot::channel();
    let context = ReleaseContext {
        in_flight: Some(release),
        blocked_error_sender: Some(blocked_error_sender),
        ..ReleaseContext::default()
    };
    let job = release_call(&engine, release_grant(ending, context));
    tokio::select! {
        biased;
        outcome = wait_for_outcome(job, &engine, key, unpolled_max) => outcome,
        Ok(error) = blocked_error => Err(store_error("release", key.as_str(), error)),
    }
}

/// Returns a call that runs `job`. If the call is dropped, the background releaser completes it.
fn release_call<T: Send + 'static>(
    engine: &Engine,
    job: impl Future<Output = T> + Send + 'static,
) -> Call<T> {
    Call::releasing_claim(&engine.background, Box::pin(job))
}

/// Waits for the outcome of `job` for at most the operation time-out.
async fn wait_for_outcome(
    job: Call<ReleaseOutcome>,
    engine: &Engine,
    key: &Key,
    unpolled_max: Duration,
) -> Result<(), LockError> {
    let limit = engine.defaults.operation_timeout;
    let outcome = job.monitored_response_within(limit, unpolled_max).await;
    release_result(
        outcome.unwrap_or_else(|| ReleaseOutcome::Unknown(engine.no_response_error())),
        key,
    )
}

/// Converts the outcome of a release to the result of `unlock`.
fn release_result(outcome: ReleaseOutcome, key: &Key) -> Result<(), LockError> {
    match outcome {
        ReleaseOutcome::Freed => Ok(()),
        _ if mutated(Mutant::ReleaseErrorSwallowed) => Ok(()),
        ReleaseOutcome::NotHeld => Err(lost_error(key, LostReason::Gone)),
        ReleaseOutcome::Unknown(error) => Err(store_error("release", key.as_str(), error)),
    }
}

/// Makes the background releaser release the claim when its `min_hold` is over.
///
/// If the lease ends before that, waits for a first renewal: the key must stay locked even if this
/// process ends right after the call.
async fn release_after_min_hold(
    ending: EndingGrant,
    engine: &Engine,
    key: &Key,
) -> Result<(), LockError> {
    let (first_renewal_sender, mut first_renewal) = oneshot::channel();
    let limit = engine.defaults.operation_timeout;
    let unpolled_max = ending.grant().lease_length();
    let context = ReleaseContext {
        first_renewal_sender: Some(first_renewal_sender),
        ..ReleaseContext::default()
    };
    let job = release_call(engine, release_grant(ending, context));
    tokio::select! {
        biased;
        // The claim was lost, or its `min_hold` has ended meanwhile.
        outcome = job.monitored_response_within(limit, unpolled_max) => {
            match first_renewal.try_recv() {
                Ok(Err(reason)) => Err(lost_error(key, reason)),
                _ => outcome.map_or(Ok(()), |outcome| release_result(outcome, key)),
            }
        }
        // A failed renewal is not returned: the background releaser repeats it while the lease
        // lasts.
        outcome = &mut first_renewal => {
            outcome.unwrap_or(Ok(())).map_err(|reason| lost_error(key, reason))
        }
    }
}

/// How a release starts, and which events its caller waits for.
#[derive(Default)]
struct ReleaseContext {
    /// A release that is already in flight.
    in_flight: Option<Call<Result<Release, BackendError>>>,
    /// Sends the caller the outcome of the first renewal during the `min_hold`.
    first_renewal_sender: Option<FirstRenewalSender>,
    /// Sends the caller the error of the first release that is [blocked](BackendError::as_blocked).
    blocked_error_sender: Option<oneshot::Sender<BackendError>>,
}

/// Releases the claim in the store once its `min_hold` is over.
async fn release_grant(mut ending: EndingGrant, context: ReleaseContext) -> ReleaseOutcome {
    let grant = Arc::clone(ending.grant());
    let engine = Arc::clone(grant.engine());
    let min_hold_left = grant.min_hold_left();
    if !min_hold_left.is_zero() {
        let min_hold = MinHold {
            claim: grant.claim(),
            engine: &engine,
            end: Moment::now().after(min_hold_left),
            valid_until: grant.valid_until(),
            may_be_gone: grant.may_be_gone(),
            current_epoch: || grant.local_lock().invalidation_epoch(),
        };
        if !min_hold.wait(context.first_renewal_sender).await {
            ending.record_failure();
            engine.record_left_to_lease(grant.claim());
            return ReleaseOutcome::Unknown(BackendError::transient(
                "the registry was closed before the end of min_hold; the key stays locked until the lease ends",
            ));
        }
    }
    let outcome = release_claim(PendingRelease {
        engine: Arc::clone(&engine),
        claim: ending.claim(),
        permit: ending.take_permit(),
        // The last renewal for the `min_hold` may have requested a lease that exceeds it.
        lease: grant
            .longest_lease()
            .max(lease_covering(min_hold_left).saturating_sub(min_hold_left)),
        possible_grants: grant.possible_grants(),
        in_flight: context.in_flight,
        blocked_error_sender: context.blocked_error_sender,
    })
    .await;
    match &outcome {
        ReleaseOutcome::Freed => {
            emit_released(&grant);
            ending.record_end();
        }
        ReleaseOutcome::NotHeld => ending.record_end(),
        ReleaseOutcome::Unknown(_) => ending.record_failure(),
    }
    outcome
}

fn emit_released(grant: &ActiveGrant) {
    grant.engine().emit(|| LockEvent::Released {
        key: grant.claim().key().as_str(),
        mode: grant.claim().mode(),
        held_for: Moment::now().since(grant.granted_at()),
    });
}

/// The use of a grant by one holder: token, owner, number of guards. An exclusive grant has one
/// hold at a time, and each hand-over begins a new hold. A shared grant may have several.
#[derive(Debug)]
pub(crate) struct Hold {
    grant: Arc<ActiveGrant>,
    token: FencingToken,
    owner: Option<Owner>,
    /// The number of live guards. Zero once the hold has ended, and temporarily while the only
    /// guard is being converted.
    guards: AtomicUsize,
    /// A [`HoldState`] as a code. `Held` until the last guard is gone.
    end_state: AtomicU8,
    /// Whether a caller has begun to emit [`LockEvent::HoldBegan`]. Several callers of one owner
    /// can get guards of the same hold at the same time.
    is_observed: AtomicBool,
    /// The id in [`LockEvent::HoldBegan`]. Zero if that event was not emitted.
    observed_id: AtomicU64,
    /// The hold that replaced this one when its lock was converted.
    successor: OnceLock<Arc<Self>>,
}

/// Whether the lock is still held by one hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HoldState {
    /// Held, or the last guard is just being removed.
    Held,
    /// The last guard was removed while the lock was held, or the lock was converted.
    Released,
    Lost(LostReason),
}

impl Hold {
    /// Starts a hold with its first guard.
    pub(crate) fn first_guard(
        grant: Arc<ActiveGrant>,
        token: FencingToken,
        owner: Option<Owner>,
    ) -> LockGuard {
        LockGuard::new(Arc::new(Self {
            grant,
            token,
            owner,
            guards: AtomicUsize::new(1),
            end_state: AtomicU8::new(HoldState::Held.code()),
            is_observed: false.into(),
            observed_id: 0.into(),
            successor: OnceLock::new(),
        }))
    }

    /// Waits until the lock is lost; see [`LockGuard::lost`].
    pub(crate) fn lost(self: Arc<Self>) -> impl Future<Output = LostReason> + Send + 'static {
        let mut hold = self;
        async move {
            loop {
                let successor = {
                    let notification = hold.grant().loss_notification();
                    tokio::pin!(notification);
                    // Enabled before the check; a loss in between would be missed otherwise.
                    notification.as_mut().enable();
                    hold.grant().register_loss_waiter();
                    match hold.state() {
                        HoldState::Lost(reason) => return reason,
                        HoldState::Released => match hold.successor() {
                            Some(successor) => successor,
                            None => break,
                        },
                        HoldState::Held => {
                            // The lease renewer notifies of a loss. `wait_for_lease_end` covers the
                            // case that the renewer's runtime has shut down. The task that detects
                            // the loss calls this task's waker. A panic of the waker must not end
                            // that task.
                            with_panic_safe_waker(async {
                                tokio::select! {
                                    biased;
                                    () = &mut notification => {}
                                    () = hold.grant().wait_for_lease_end() => {}
                                }
                            })
                            .await;
                            continue;
                        }
                    }
                };
                hold = successor;
            }
            // After the release, a pending future must not keep the local lock alive.
            drop(hold);
            std::future::pending().await
        }
    }

    pub(crate) fn grant(&self) -> &Arc<ActiveGrant> {
        &self.grant
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.token
    }

    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// Returns whether the hold has a guard and its lease is valid. False during a conversion.
    pub(crate) fn is_held(&self) -> bool {
        self.guards.load(Ordering::Acquire) > 0 && Moment::now() < self.grant.valid_until()
    }

    /// Returns whether the hold is upgradable, and its only guard is being converted or dropped.
    pub(crate) fn may_be_upgrading(&self) -> bool {
        self.grant.claim().mode() == ClaimMode::Upgradable
            && self.guards.load(Ordering::Acquire) == 0
            && self.end_state.load(Ordering::Acquire) == HoldState::Held.code()
            && Moment::now() < self.grant.valid_until()
    }

    /// Returns another guard, unless the last one is gone or the lock is lost.
    pub(crate) fn reenter(self: &Arc<Self>) -> Option<LockGuard> {
        if self.grant.valid_until() <= Moment::now() {
            return None;
        }
        self.guards
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |guards| {
                if guards == 0 { None } else { guards.checked_add(1) }
            })
            .ok()?;
        Some(LockGuard::new(Arc::clone(self)))
    }

    /// Prevents re-entry while the only guard is being converted. Returns false, and changes
    /// nothing, if there are other guards.
    pub(crate) fn try_forbid_reentry(&self) -> bool {
        self.guards.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Reverts [`try_forbid_reentry`](Self::try_forbid_reentry).
    pub(crate) fn allow_reentry(&self) {
        self.guards.store(1, Ordering::Release);
    }

    /// Ends this hold, whose lock was converted. Futures that wait for the loss of this hold then
    /// wait for the loss of `successor`.
    pub(crate) fn end_by_conversion(&self, successor: &Arc<Self>) {
        // A strong reference: a future that is polled after the last guard is gone must find the
        // loss of the successor.
        _ = self.successor.set(Arc::clone(successor));
        self.end_observed();
        successor.observe();
        self.end_state.store(HoldState::Released.code(), Ordering::Release);
        self.grant.notify_loss();
    }

    fn successor(&self) -> Option<Arc<Self>> {
        self.successor.get().cloned()
    }

    /// Removes one guard. Returns `None` if this hold has other guards, or its shared grant has
    /// other holds. The last guard ends the hold. Returns the reason if the lock was lost before.
    pub(crate) fn remove_guard(&self) -> Option<Result<EndingGrant, LostReason>> {
        if self.guards.fetch_sub(1, Ordering::AcqRel) != 1 {
            return None;
        }
        let mut ended = self.grant.end_hold();
        self.end_observed();
        if let Ok(Some(ending)) = &mut ended {
            ending.observe(self.token);
        }
        // Stored before a hand-over, because a later loss of the claim belongs to the next hold.
        let end_state =
            ended.as_ref().map_or_else(|reason| HoldState::Lost(*reason), |_| HoldState::Released);
        self.end_state.store(end_state.code(), Ordering::Release);
        self.grant.notify_loss();
        // `None` if other readers still hold the grant.
        ended.transpose()
    }

    /// Emits the event that this hold began, unless that event was emitted before. Called by the
    /// task that acquired the lock, which may not be the task that handed it over.
    pub(crate) fn observe(&self) {
        let grant = &self.grant;
        if grant.engine().observers.is_empty() || self.is_observed.swap(true, Ordering::AcqRel) {
            return;
        }
        // The calling task has a guard of this hold, so the id is stored before the hold ends.
        self.observed_id.store(grant.begin_observed_hold(self.token), Ordering::Relaxed);
    }

    fn end_observed(&self) {
        let id = self.observed_id.load(Ordering::Relaxed);
        if id != 0 {
            self.grant.end_observed_hold(id);
        }
    }

    /// Returns the state of this hold.
    pub(crate) fn state(&self) -> HoldState {
        // The loss is read before the end state. If the hold has not ended by then, the loss
        // belongs to this hold, not to a later one.
        let loss = self.grant.loss();
        match HoldState::from_code(self.end_state.load(Ordering::Acquire)) {
            HoldState::Held => loss.map_or(HoldState::Held, HoldState::Lost),
            ended => ended,
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

    fn from_code(code: u8) -> Self {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Self::Held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hold_state_survives_its_code() {
        for state in HoldState::ALL {
            assert_eq!(HoldState::from_code(state.code()), state);
        }
    }
}
