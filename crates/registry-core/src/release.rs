//! Releases a claim in the store, with retries until the outcome is known, an error is permanent,
//! or the lease is over.

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

/// A local permit that stays taken until the release of the claim has an outcome. Its drop passes
/// the permit to the next local caller.
///
/// This is a trait because `local_lock` depends on this module.
pub(crate) trait ReleasePermit: fmt::Debug + Send {
    /// Records a store error, which the callers that wait for the permit return at their deadline.
    fn record_error(&self, error: &BackendError);

    /// Records that the store responded, so that these callers return no earlier error.
    fn record_response(&self);
}

/// A claim that is being released.
#[derive(Debug)]
pub(crate) struct PendingRelease {
    pub(crate) engine: Arc<Engine>,
    pub(crate) claim: Claim,
    /// Dropped when the release has an outcome. After an earlier drop, the next local caller would
    /// find the key held by this claim in the store. If the store does not respond to an abandoned
    /// attempt, `finish_and_release` drops the permit before the release.
    pub(crate) permit: Option<Box<dyn ReleasePermit>>,
    /// The longest time for which the store can still keep the claim after a failed release.
    pub(crate) lease: Duration,
    /// If an attempt has an unknown outcome: the maximum number of grants of this claim. The number
    /// includes grants of attempts that have not reached the store yet. Each grant needs its own
    /// release. 0 if all outcomes are known: one release with a response then suffices.
    pub(crate) possible_grants: u32,
    /// A release that is already in flight.
    pub(crate) in_flight: Option<Call<Result<Release, BackendError>>>,
    /// Sends the error of the first release that is [blocked](BackendError::as_blocked).
    pub(crate) blocked_error_sender: Option<oneshot::Sender<BackendError>>,
}

impl PendingRelease {
    /// Creates the release of a claim without a local permit. Assumes that all attempts of the
    /// claim have a known outcome; otherwise, the caller sets `possible_grants`.
    pub(crate) fn new(engine: Arc<Engine>, claim: Claim) -> Self {
        Self {
            lease: claim.lease(),
            engine,
            claim,
            permit: None,
            possible_grants: 0,
            in_flight: None,
            blocked_error_sender: None,
        }
    }
}

/// Returns [`PendingRelease::possible_grants`] of a granted claim. Each of its `unknown_attempts`
/// may still cause another grant.
pub(crate) const fn possible_grants(unknown_attempts: u32) -> u32 {
    if unknown_attempts == 0 { 0 } else { unknown_attempts + 1 }
}

/// The outcome of a release.
#[derive(Debug)]
pub(crate) enum ReleaseOutcome {
    /// This release, or an earlier release whose response was lost, has ended the grant.
    Freed,
    /// The grant had ended before the release.
    NotHeld,
    /// The store did not confirm the release, or refused it. The claim ends with its lease at the
    /// latest.
    Unknown(BackendError),
}

/// Releases a claim in the background.
pub(crate) fn release_in_background(pending: PendingRelease) {
    let background = pending.engine.background.clone();
    background.submit_release(Box::pin(async move {
        release_claim(pending).await;
    }));
}

/// Releases a claim, and repeats the release after each transient error until the lease is over.
pub(crate) async fn release_claim(mut pending: PendingRelease) -> ReleaseOutcome {
    if mutated(Mutant::PermitBeforeRelease) {
        pending.permit = None;
    }
    let outcome = release_with_retries(&mut pending).await;
    if let ReleaseOutcome::Unknown(_) = outcome {
        // The store is unreachable or refuses the release. The claim ends with its lease. Until
        // then, the attempts of the next local caller find the key busy or fail.
        pending.engine.record_left_to_lease(&pending.claim);
    }
    pending.permit = None;
    let freed = u32::from(matches!(outcome, ReleaseOutcome::Freed));
    if pending.possible_grants > freed {
        let background = pending.engine.background.clone();
        background.submit_release(Box::pin(release_late_grants(pending, freed)));
    }
    outcome
}

/// Repeats the release until its outcome is known, an error is permanent, or the lease is over.
async fn release_with_retries(pending: &mut PendingRelease) -> ReleaseOutcome {
    let engine = Arc::clone(&pending.engine);
    let mut until = None;
    let mut attempt = 0;
    let mut may_have_freed = false;
    loop {
        let in_flight = pending.in_flight.take();
        let mut release = in_flight.unwrap_or_else(|| engine.release(&pending.claim));
        let error = match release.response_within(engine.defaults.operation_timeout).await {
            Some(Ok(released)) => {
                if let Some(permit) = &pending.permit {
                    permit.record_response();
                }
                // An earlier release, whose response was lost, may have ended the grant.
                let was_freed = released == Release::Freed || may_have_freed;
                return if was_freed { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld };
            }
            Some(Err(error)) => error,
            None => engine.no_response_error(),
        };
        may_have_freed |= !error.refused();
        if error.is_blocked()
            && let Some(sender) = pending.blocked_error_sender.take()
        {
            let _ = sender.send(error.clone());
        }
        let (key, mode) = (pending.claim.key().as_str(), pending.claim.mode());
        engine.emit(|| LockEvent::ReleaseFailed { key, mode, error: &error });
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

/// Releases the grants of attempts that reach the store after the release of their claim. Ends when
/// all `possible_grants` are released, when the lease is over, or when the limit of `close` is
/// reached. The pauses grow with the time since the release, so that long leases cause few
/// requests.
async fn release_late_grants(pending: PendingRelease, mut freed: u32) {
    let engine = &pending.engine;
    let released_at = Moment::now();
    let until = released_at.after(pending.lease);
    let mut attempt = 0;
    while freed < pending.possible_grants && Moment::now() < until {
        let now = Moment::now();
        let pause = backoff(attempt).max(now.since(released_at) / LATE_RELEASE_DIVISOR);
        let pause = engine.sleep_until(now.after(pause).min(until));
        tokio::select! {
            biased;
            () = pause => {}
            () = engine.close_limit_reached.wait() => {
                engine.record_left_to_lease(&pending.claim);
                return;
            }
        }
        if let Some(Ok(Release::Freed)) =
            engine.release(&pending.claim).response_within(engine.defaults.operation_timeout).await
        {
            freed += 1;
        }
        attempt += 1;
    }
}

/// The pause before a late release is at least the time since the first release, divided by this.
const LATE_RELEASE_DIVISOR: u32 = 16;
