//! The remote half of an acquisition: a claim that may or may not have reached the store, and its
//! clean-up.
//!
//! The clean-up is armed before the first request is sent. If a [`PendingClaim`] is dropped while a
//! request is in flight, the background releaser completes the request and releases the claim.
//! Called by `acquire`.

use std::future::{Future as _, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::{FutureExt as _, join_all};

use crate::backend::{Attempt, BatchAttempt, Claim, Grant, LockBackend};
use crate::call::{Call, CallFuture, first_poll, split_by_claim};
use crate::clock::{Moment, sleep};
use crate::engine::{Engine, PolledOnce};
use crate::error::{BackendError, BackendErrorKind};
use crate::fairness::Contention;
use crate::grant::{ActiveGrant, ClaimParts};
use crate::invalidation::Epoch;
use crate::local_lock::{LocalLock, LocalPermit};
use crate::mutant::{Mutant, mutated};
use crate::options::ClaimOptions;
use crate::panic_safe::{catch_panic, discard_panic};
use crate::release::{
    PendingRelease, ReleasePermit as _, possible_grants, release_claim, release_in_background,
};
use crate::stall_detector::{MonitoredCell, MonitoredState, MonitoredWait};

type AttemptCall = Call<Result<Attempt, BackendError>>;

/// The result of one attempt.
#[derive(Debug)]
pub(crate) enum AttemptOutcome {
    /// The backend returned this result for the request that was sent at this time.
    Completed(Moment, Result<Attempt, BackendError>),
    /// The backend returned no result within the operation time-out. The outcome is unknown.
    Unknown,
}

/// A claim that competes for a key in the store. It has a local permit, so a registry has at most
/// one pending claim per key. Callers that do not wait are the exception: each may have an extra
/// permit, outside of the local queue.
#[derive(Debug)]
pub(crate) struct PendingClaim {
    /// Present until a grant is confirmed or this value is dropped.
    parts: Option<ClaimParts>,
    in_flight: Option<AttemptCall>,
    /// When the last attempt was sent.
    sent_at: Moment,
    /// The invalidation epoch of the key when the last attempt was sent.
    epoch_at_send: Epoch,
    /// The number of attempts of this claim with an unknown outcome.
    unknown_attempts: u32,
    /// The claim may be in the store's queue.
    queued: bool,
}

impl PendingClaim {
    pub(crate) fn new(permit: LocalPermit, claim: Claim, options: Arc<ClaimOptions>) -> Self {
        permit.local_lock().engine().pending_claims.enter();
        Self {
            sent_at: Moment::PAST,
            epoch_at_send: Epoch::default(),
            parts: Some((permit, claim, options)),
            in_flight: None,
            unknown_attempts: 0,
            queued: false,
        }
    }

    fn local_lock(&self) -> &Arc<LocalLock> {
        self.parts.as_ref().expect("the permit is here until a grant is confirmed").0.local_lock()
    }

    fn engine(&self) -> &Arc<Engine> {
        self.local_lock().engine()
    }

    /// Returns the contention between this process and others for the key. `None` for an extra
    /// permit, and for a store that needs no fairness between processes.
    pub(crate) fn contention(&mut self) -> Option<&mut Contention> {
        let parts = self.parts.as_mut().expect("the permit is here until a grant is confirmed");
        parts.0.contention.as_deref_mut()
    }

    /// Records a failed attempt, for the callers that wait behind this one.
    pub(crate) fn record_error(&self, error: &BackendError) {
        let parts = self.parts.as_ref().expect("the permit is here until a grant is confirmed");
        parts.0.record_error(error);
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.parts.as_ref().expect("the claim is here until a grant is confirmed").1
    }

    /// Sends one request to the store and polls it once. Returns `None` if the store has not
    /// responded yet; [`response`](Self::response) then waits for the response.
    ///
    /// If the store responds at once, as the in-process store does, the attempt needs no timer and
    /// no [`MonitoredWait`].
    ///
    /// A backend sends one request per call, and the engine counts one attempt per call. If a
    /// backend repeated the request, the first one could arrive after the release and be granted.
    /// The engine would not release that grant.
    pub(crate) async fn send(&mut self, engine: &Engine) -> Option<AttemptOutcome> {
        // Read before the request is sent. The store's lease starts at an unknown time between
        // request and response. If the lease counted from the response, the engine would trust a
        // lease that is already over.
        self.sent_at = Moment::now();
        self.epoch_at_send = self.local_lock().invalidation_epoch();
        // Counts the attempt in case the backend panics here, before the request is recorded as in
        // flight.
        self.unknown_attempts += 1;
        let first = first_poll_of_attempt(engine, self.claim()).await;
        self.unknown_attempts -= 1;
        match first {
            Ok(response) => Some(self.record_response(response)),
            Err(request) => {
                self.in_flight = Some(Call::after_first_poll(&engine.background, request));
                None
            }
        }
    }

    /// Sends one request for all claims, if there are at least two, the store has batches, and the
    /// claims are in one shard. Otherwise sends nothing and returns false.
    /// [`response`](Self::response) returns the response to each claim. If the store declines the
    /// batch, the call sends one request per claim.
    pub(crate) async fn send_all(pending_claims: &mut [Self], engine: &Engine) -> bool {
        let Some(first) = pending_claims.first() else { return false };
        let shard = engine.backend.shard(first.claim());
        if pending_claims.len() < 2
            || engine.backend.batch().is_none()
            || !pending_claims.iter().all(|it| engine.backend.shard(it.claim()) == shard)
        {
            return false;
        }
        let claims: Vec<Claim> = pending_claims.iter().map(|it| it.claim().clone()).collect();
        let backend = Arc::clone(&engine.backend);
        let call = async move { attempt_all(&*backend, &claims).await };
        let mut call_parts =
            split_by_claim(call, pending_claims.len(), || Err(BackendError::missing_in_batch()));
        let sent_at = Moment::now();
        for pending in &mut *pending_claims {
            pending.sent_at = sent_at;
            pending.epoch_at_send = pending.local_lock().invalidation_epoch();
            // Counts the attempt in case the backend panics at the first poll.
            pending.unknown_attempts += 1;
        }
        // One poll sends the request. Each part is polled again by the task that waits for it.
        poll_fn(|cx| {
            if let Some(first) = call_parts.first_mut()
                && let Poll::Ready(response) = first.as_mut().poll(cx)
            {
                *first = Box::pin(std::future::ready(response));
            }
            Poll::Ready(())
        })
        .await;
        for (pending, part) in pending_claims.iter_mut().zip(call_parts) {
            pending.unknown_attempts -= 1;
            pending.in_flight = Some(Call::new(&engine.background, part));
        }
        true
    }

    /// Returns `outcome` if [`send`](Self::send) returned one. Otherwise waits for the response for
    /// at most the operation time-out.
    ///
    /// If the connection broke while it was idle, repeats the request once. Await this directly
    /// after `send`. The first poll here skips the request, because `send` has just polled it. If
    /// the task were woken between the two, that wake-up would be lost.
    ///
    /// # Errors
    /// [`Abandoned`] if the future was not polled for the length of a lease.
    ///
    /// # Cancel safety
    /// If the future is dropped, the background releaser completes the request and releases the
    /// claim.
    pub(crate) async fn response(
        mut self,
        outcome: Option<AttemptOutcome>,
        engine: &Engine,
        monitored_wait: &mut MonitoredWait<'_, Self>,
    ) -> Result<(Self, AttemptOutcome), Abandoned> {
        let first;
        (self, first) = self.wait_for_response(outcome, engine, monitored_wait).await?;
        match first {
            AttemptOutcome::Completed(_, Err(error)) if error.is_stale_connection() => {
                let second = self.send(engine).await;
                self.wait_for_response(second, engine, monitored_wait).await
            }
            first => Ok((self, first)),
        }
    }

    async fn wait_for_response(
        self,
        outcome: Option<AttemptOutcome>,
        engine: &Engine,
        monitored_wait: &mut MonitoredWait<'_, Self>,
    ) -> Result<(Self, AttemptOutcome), Abandoned> {
        if let Some(outcome) = outcome {
            return Ok((self, outcome));
        }
        let mut end = pin!(sleep(engine.defaults.operation_timeout));
        let response = monitored_wait.run(self, |pending, cx| {
            if let Some(call) = pending.in_flight.as_mut()
                && let Poll::Ready(response) = Pin::new(call).poll(cx)
            {
                return Poll::Ready(Some(response));
            }
            end.as_mut().poll(cx).map(|()| None)
        });
        let (mut pending, response) = response.await?;
        let outcome = match response {
            Some(response) => pending.record_response(response),
            None => AttemptOutcome::Unknown,
        };
        Ok((pending, outcome))
    }

    /// Records a response, and counts the attempt if its outcome is unknown.
    fn record_response(&mut self, response: Result<Attempt, BackendError>) -> AttemptOutcome {
        self.in_flight = None;
        match &response {
            Ok(Attempt::Granted(_) | Attempt::Gone) => {}
            Ok(Attempt::Busy(busy)) => self.queued |= busy.is_queued || self.claim().joins_queue(),
            Err(error) if error.refused() => {}
            Err(_) => self.unknown_attempts += 1,
        }
        AttemptOutcome::Completed(self.sent_at, response)
    }

    /// Converts this claim to an active grant.
    ///
    /// If the lease ended before the response arrived, returns `Err` with a new claim that has the
    /// same local permit. The old claim is released in the background.
    pub(crate) fn confirm(
        mut self,
        granted: Grant,
        sent_at: Moment,
    ) -> Result<Arc<ActiveGrant>, Box<Self>> {
        let (permit, claim, options) =
            self.parts.take().expect("the claim is here until a grant is confirmed");
        let confirmed = ActiveGrant::start(
            permit,
            claim,
            options,
            granted,
            sent_at,
            self.epoch_at_send,
            self.unknown_attempts,
        );
        let confirmed = confirmed.map_err(|late| {
            let (permit, claim, options) = *late;
            let engine = Arc::clone(permit.local_lock().engine());
            let fresh_claim = claim.clone().with_id(crate::ClaimId::random());
            release_in_background(PendingRelease {
                possible_grants: possible_grants(self.unknown_attempts),
                // In a release, this is the number of tokens that may have been used. Without a
                // guard, that is at most the first token.
                ..PendingRelease::new(engine, claim.with_token_block(1))
            });
            Box::new(Self::new(permit, fresh_claim, options))
        });
        // `pending_claims` is decremented only after the grant or the new claim was counted, so
        // that `close` never misses this caller.
        match &confirmed {
            Ok(grant) => grant.engine().pending_claims.leave(),
            Err(replacement) => replacement.engine().pending_claims.leave(),
        }
        confirmed
    }

    /// If the last request has no response yet, passes its claim to the background releaser and
    /// replaces it by the result of `new_claim`. The next request must not have the id of a claim
    /// whose last request has no response.
    pub(crate) fn replace_unanswered_claim(&mut self, new_claim: impl FnOnce() -> Claim) {
        if self.in_flight.is_none() {
            return;
        }
        let Some((permit, claim, options)) = self.parts.take() else {
            return;
        };
        let engine = Arc::clone(permit.local_lock().engine());
        self.abandon_claim(Arc::clone(&engine), claim, None);
        *self = Self::new(permit, new_claim(), options);
        engine.pending_claims.leave();
    }

    /// Leaves the clean-up to the background releaser. It completes the request in flight, and
    /// releases a claim that the store may have granted or queued. `permit` then passes to the next
    /// local caller. If no clean-up is needed, `permit` passes on at once.
    fn abandon_claim(&mut self, engine: Arc<Engine>, claim: Claim, permit: Option<LocalPermit>) {
        // In a release, this is the number of tokens that may have been used. Without a guard, that
        // is at most the first token.
        let claim = claim.with_token_block(1);
        let in_flight = self.in_flight.take().and_then(|mut call| call.take_future());
        let unknown_attempts = self.unknown_attempts;
        if mutated(Mutant::CancelledAcquireLeaks) {
            return;
        }
        if let Some(call) = in_flight {
            let background = engine.background.clone();
            let queued = self.queued || claim.joins_queue();
            let pending_release = PendingRelease {
                permit: permit.map(LocalPermit::into_release_permit),
                possible_grants: unknown_attempts,
                ..PendingRelease::new(engine, claim)
            };
            background.submit_release(Box::pin(finish_and_release(call, pending_release, queued)));
        } else if unknown_attempts > 0 || self.queued {
            release_in_background(PendingRelease {
                permit: permit.map(LocalPermit::into_release_permit),
                possible_grants: unknown_attempts,
                ..PendingRelease::new(engine, claim)
            });
        }
    }
}

impl Drop for PendingClaim {
    fn drop(&mut self) {
        if let Some((permit, claim, _)) = self.parts.take() {
            let engine = Arc::clone(permit.local_lock().engine());
            self.abandon_claim(Arc::clone(&engine), claim, Some(permit));
            engine.pending_claims.leave();
        }
    }
}

/// The acquisition was not polled for the length of a lease. Its claim is being released, and its
/// local permit passes to the next caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Abandoned;

impl MonitoredState for PendingClaim {
    type Replacement = Abandoned;

    fn take_over(self, cell: &Arc<MonitoredCell<Self>>) {
        catch_panic(|| drop(self));
        cell.resolve(Abandoned);
    }
}

/// Sends an attempt and polls it once. Returns the call if the store has not responded yet.
async fn first_poll_of_attempt(engine: &Engine, claim: &Claim) -> PolledOnce<Attempt> {
    if let Some(memory) = &engine.memory {
        return Ok(memory.acquire(claim));
    }
    let (backend, claim) = (Arc::clone(&engine.backend), claim.clone());
    first_poll(Box::pin(async move { backend.try_acquire(&claim).await })).await
}

/// Makes one attempt for all claims together, or one attempt per claim if the store declines the
/// batch. Returns the response to each claim.
async fn attempt_all(
    backend: &dyn LockBackend,
    claims: &[Claim],
) -> Vec<Result<Attempt, BackendError>> {
    let attempt = match backend.batch() {
        Some(batch) => batch.try_acquire_all(claims).await,
        None => Ok(BatchAttempt::Declined),
    };
    match attempt {
        Ok(BatchAttempt::Granted(grants)) => {
            grants.into_iter().map(|grant| Ok(Attempt::Granted(grant))).collect()
        }
        Ok(BatchAttempt::Busy(busy_index, busy)) => {
            let mut responses = vec![Err(BackendError::other_key_busy()); claims.len()];
            if let Some(response) = responses.get_mut(busy_index) {
                *response = Ok(Attempt::Busy(busy));
            }
            responses
        }
        Ok(BatchAttempt::Declined) => {
            join_all(claims.iter().map(|claim| backend.try_acquire(claim))).await
        }
        Err(error) => vec![Err(error); claims.len()],
    }
}

/// Waits for the response to an abandoned request, and releases the claim.
async fn finish_and_release(
    call: CallFuture<Result<Attempt, BackendError>>,
    mut pending_release: PendingRelease,
    queued: bool,
) {
    let limit = pending_release.engine.defaults.operation_timeout;
    // If the call panicked when its caller polled it, it panics here again. The outcome is then
    // unknown.
    let call = AssertUnwindSafe(call).catch_unwind();
    tokio::pin!(call);
    let response = match tokio::time::timeout(limit, &mut call).await {
        Ok(response) => response,
        Err(_) => {
            // The store does not respond. The next local caller gets the permit now, and detects
            // this with its own request.
            pending_release.permit = None;
            call.await
        }
    };
    let panic_to_error = |payload| {
        discard_panic(payload);
        Err(BackendError::new(BackendErrorKind::Protocol, "the backend panicked; report this bug"))
    };
    let response = response.unwrap_or_else(panic_to_error);
    if response.is_ok()
        && let Some(permit) = &pending_release.permit
    {
        permit.record_response();
    }
    match response {
        // If the claim has no queue entry and no attempt with an unknown outcome, there is nothing
        // to release.
        Ok(Attempt::Busy(busy))
            if pending_release.possible_grants == 0 && !queued && !busy.is_queued =>
        {
            return;
        }
        Err(error) if error.refused() && pending_release.possible_grants == 0 && !queued => return,
        // `possible_grants` counts only the unknown attempts so far. This grant is added, because
        // each of these grants needs its own release. If the number is 0, one release is enough.
        Ok(Attempt::Granted(_)) if pending_release.possible_grants > 0 => {
            pending_release.possible_grants += 1
        }
        Ok(_) => {}
        // The request had no effect. The release is for the queue entry and for grants of earlier
        // attempts.
        Err(error) if error.refused() => {}
        Err(_) => pending_release.possible_grants += 1,
    }
    release_claim(pending_release).await;
}
