//! Releases a claim in the store, with retries until the outcome is known or the lease is over.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::{Claim, Release};
use crate::call::Call;
use crate::clock::{Moment, sleep};
use crate::engine::{Engine, backoff};
use crate::error::BackendError;
use crate::event::LockEvent;
use crate::mutant::{Mutant, mutated};

/// A local permit that is passed on, by its drop, once the release has an outcome.
pub(crate) trait PassedOnAfterRelease: fmt::Debug + Send {
    /// Records a store error for the callers that wait for the permit.
    fn record_error(&self, error: &BackendError);
}

/// A claim that is being released.
#[derive(Debug)]
pub(crate) struct PendingRelease {
    pub(crate) engine: Arc<Engine>,
    pub(crate) claim: Claim,
    /// Passed on once the store has responded or the lease is over, so that the next local caller
    /// does not find our own record.
    pub(crate) permit: Option<Box<dyn PassedOnAfterRelease>>,
    /// The time from now after which the store's clock has freed the claim in any case.
    pub(crate) lease: Duration,
    /// The number of attempts of this claim that may still reach the store.
    pub(crate) unknown_attempts: u32,
    /// A release that is already in flight.
    pub(crate) in_flight: Option<Call<Result<Release, BackendError>>>,
    /// Receives the error of the first release that is [blocked](BackendError::as_blocked).
    pub(crate) blocked: Option<oneshot::Sender<BackendError>>,
}

/// The outcome of a release.
#[derive(Debug)]
pub(crate) enum ReleaseOutcome {
    /// The grant existed and has ended, possibly by an earlier release whose reply was lost.
    Freed,
    /// The grant did not exist any more.
    NotHeld,
    /// The outcome is unknown; the store's clock frees the claim at the end of its lease.
    Unknown(BackendError),
}

/// Releases a claim in the background.
pub(crate) fn release_in_background(pending: PendingRelease) {
    let background = pending.engine.background.clone();
    background.submit_release(Box::pin(async move {
        release_claim(pending).await;
    }));
}

/// Releases a claim, and repeats this while the outcome is unknown.
pub(crate) async fn release_claim(mut pending: PendingRelease) -> ReleaseOutcome {
    if mutated(Mutant::PermitBeforeRelease) {
        pending.permit = None;
    }
    let outcome = release_until_answered(&mut pending).await;
    if let ReleaseOutcome::Unknown(_) = outcome {
        // The store is unreachable or refuses, so only its clock frees the key now. The next local
        // caller must learn this from its own request.
        pending.engine.leave_to_lease(pending.claim.key());
    }
    pending.permit = None;
    let freed = u32::from(matches!(outcome, ReleaseOutcome::Freed));
    if pending.unknown_attempts > freed {
        let background = pending.engine.background.clone();
        background.submit_release(Box::pin(reap_late_grants(pending, freed)));
    }
    outcome
}

async fn release_until_answered(pending: &mut PendingRelease) -> ReleaseOutcome {
    let engine = Arc::clone(&pending.engine);
    let mut until = None;
    let mut attempt = 0;
    let mut may_have_freed = false;
    loop {
        let in_flight = pending.in_flight.take();
        let mut release = in_flight.unwrap_or_else(|| engine.release(&pending.claim));
        let error = match release.answer_within(engine.defaults.operation_timeout).await {
            Some(Ok(Release::Freed)) => return ReleaseOutcome::Freed,
            // An earlier release, whose reply was lost, has freed it.
            Some(Ok(Release::NotHeld)) if may_have_freed => return ReleaseOutcome::Freed,
            Some(Ok(Release::NotHeld)) => return ReleaseOutcome::NotHeld,
            Some(Err(error)) => error,
            None => engine.no_response_error(),
        };
        may_have_freed |= !error.refused();
        if error.is_blocked()
            && let Some(blocked) = pending.blocked.take()
        {
            let _ = blocked.send(error.clone());
        }
        let key = pending.claim.key().as_str();
        engine.emit(|| LockEvent::ReleaseFailed { key, error: &error });
        if let Some(permit) = &pending.permit {
            permit.record_error(&error);
        }
        let until = *until.get_or_insert_with(|| Moment::now().after(pending.lease));
        let pause = backoff(attempt);
        if !error.is_retryable()
            || Moment::now().after(pause) >= until
            || mutated(Mutant::ReleaseErrorSwallowed)
        {
            return ReleaseOutcome::Unknown(error);
        }
        sleep(pause).await;
        attempt += 1;
    }
}

/// Releases late grants of unresolved attempts: the release of a claim can overtake its acquire
/// request.
async fn reap_late_grants(pending: PendingRelease, mut freed: u32) {
    let engine = &pending.engine;
    let until = Moment::now().after(pending.lease);
    let mut attempt = 0;
    while freed < pending.unknown_attempts && Moment::now() < until {
        let pause = engine.sleep_until(Moment::now().after(backoff(attempt)).min(until));
        tokio::select! {
            biased;
            () = pause => {}
            () = engine.out_of_time.wait() => {
                engine.leave_to_lease(pending.claim.key());
                return;
            }
        }
        if let Some(Ok(Release::Freed)) =
            engine.release(&pending.claim).answer_within(engine.defaults.operation_timeout).await
        {
            freed += 1;
        }
        attempt += 1;
    }
}
