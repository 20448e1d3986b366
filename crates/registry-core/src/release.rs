//! Releases a claim in the store, with retries until the outcome is known or the lease is over.

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
use crate::slot::Turn;

/// A claim that is being released.
#[derive(Debug)]
pub(crate) struct GivingBack {
    pub(crate) engine: Arc<Engine>,
    pub(crate) claim: Claim,
    /// Passed on once the store has responded or the lease is over, so that the next local caller
    /// does not find our own record.
    pub(crate) turn: Option<Turn>,
    /// The time from now after which the store's clock has freed the claim in any case.
    pub(crate) lease: Duration,
    /// The number of attempts of this claim that may still reach the store.
    pub(crate) stray_attempts: u32,
    /// A release that is already in flight.
    pub(crate) under_way: Option<Call<Result<Release, BackendError>>>,
    /// Receives the error of the first release that is [blocked](BackendError::as_blocked).
    pub(crate) blocked: Option<oneshot::Sender<BackendError>>,
}

/// The outcome of a release.
#[derive(Debug)]
pub(crate) enum GivenBack {
    /// The grant existed and has ended, possibly by an earlier release whose reply was lost.
    Freed,
    /// The grant did not exist any more.
    NotHeld,
    /// The outcome is unknown; the store's clock frees the claim at the end of its lease.
    Unknown(BackendError),
}

/// Releases a claim in the background.
pub(crate) fn give_back_in_background(giving: GivingBack) {
    let janitor = giving.engine.janitor.clone();
    janitor.hand_over(Box::pin(async move {
        give_back(giving).await;
    }));
}

/// Releases a claim, and repeats this while the outcome is unknown.
pub(crate) async fn give_back(mut giving: GivingBack) -> GivenBack {
    if mutated(Mutant::TurnBeforeRelease) {
        giving.turn = None;
    }
    let outcome = release_until_answered(&mut giving).await;
    if let GivenBack::Unknown(_) = outcome {
        // The store is unreachable or refuses, so only its clock frees the key now. The next local
        // caller must learn this from its own request.
        giving.engine.leave_to_lease(giving.claim.key());
    }
    giving.turn = None;
    let freed = u32::from(matches!(outcome, GivenBack::Freed));
    if giving.stray_attempts > freed {
        let janitor = giving.engine.janitor.clone();
        janitor.hand_over(Box::pin(hunt_stray_grants(giving, freed)));
    }
    outcome
}

async fn release_until_answered(giving: &mut GivingBack) -> GivenBack {
    let engine = Arc::clone(&giving.engine);
    let mut until = None;
    let mut attempt = 0;
    let mut may_have_freed = false;
    loop {
        let under_way = giving.under_way.take();
        let mut release = under_way.unwrap_or_else(|| engine.release(&giving.claim));
        let error = match release.answer_within(engine.defaults.answer_limit).await {
            Some(Ok(Release::Freed)) => return GivenBack::Freed,
            // An earlier release, whose reply was lost, has freed it.
            Some(Ok(Release::NotHeld)) if may_have_freed => return GivenBack::Freed,
            Some(Ok(Release::NotHeld)) => return GivenBack::NotHeld,
            Some(Err(error)) => error,
            None => engine.unanswered(),
        };
        may_have_freed |= !error.refused();
        if error.is_blocked()
            && let Some(blocked) = giving.blocked.take()
        {
            let _ = blocked.send(error.clone());
        }
        let key = giving.claim.key().as_str();
        engine.tell(|| LockEvent::ReleaseFailed { key, error: &error });
        if let Some(turn) = &giving.turn {
            turn.slot().failed(&error);
        }
        let until = *until.get_or_insert_with(|| Moment::now().after(giving.lease));
        let pause = backoff(attempt);
        if !error.is_retryable()
            || Moment::now().after(pause) >= until
            || mutated(Mutant::ReleaseErrorSwallowed)
        {
            return GivenBack::Unknown(error);
        }
        sleep(pause).await;
        attempt += 1;
    }
}

/// Releases late grants of unresolved attempts: the release of a claim can overtake its acquire
/// request.
async fn hunt_stray_grants(giving: GivingBack, mut freed: u32) {
    let engine = &giving.engine;
    let until = Moment::now().after(giving.lease);
    let mut attempt = 0;
    while freed < giving.stray_attempts && Moment::now() < until {
        let pause = engine.sleep_until(Moment::now().after(backoff(attempt)).min(until));
        tokio::select! {
            biased;
            () = pause => {}
            () = engine.out_of_time.given() => {
                engine.leave_to_lease(giving.claim.key());
                return;
            }
        }
        if let Some(Ok(Release::Freed)) =
            engine.release(&giving.claim).answer_within(engine.defaults.answer_limit).await
        {
            freed += 1;
        }
        attempt += 1;
    }
}
