//! Gives a claim back to the store and does not let go before the outcome is known or the lease is over.

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

/// A claim on its way back.
#[derive(Debug)]
pub(crate) struct GivingBack {
    pub(crate) engine: Arc<Engine>,
    pub(crate) claim: Claim,
    /// Passed on when the store has answered or the lease is over, so that the next local caller does not meet our own record.
    pub(crate) turn: Option<Turn>,
    /// How long from now the store's clock will have freed the claim at the latest.
    pub(crate) lease: Duration,
    /// Attempts of this claim that may still arrive at the store.
    pub(crate) stray_attempts: u32,
    /// A release that is already on its way.
    pub(crate) under_way: Option<Call<Result<Release, BackendError>>>,
    /// Receives the error of the first release that is [blocked](BackendError::as_blocked).
    pub(crate) blocked: Option<oneshot::Sender<BackendError>>,
}

/// How giving back ended.
#[derive(Debug)]
pub(crate) enum GivenBack {
    /// The grant was there and has ended, or was ended by a release of ours whose reply was lost.
    Freed,
    /// There was no grant any more.
    NotHeld,
    /// It could not be found out; the store's clock frees the claim at the end of its lease.
    Unknown(BackendError),
}

/// Gives a claim back on the janitor's time.
pub(crate) fn give_back_in_background(giving: GivingBack) {
    let janitor = giving.engine.janitor.clone();
    janitor.hand_over(Box::pin(async move {
        give_back(giving).await;
    }));
}

/// Releases a claim, again and again while the outcome is unknown.
pub(crate) async fn give_back(mut giving: GivingBack) -> GivenBack {
    if mutated(Mutant::TurnBeforeRelease) {
        giving.turn = None;
    }
    let outcome = release_until_answered(&mut giving).await;
    if let GivenBack::Unknown(_) = outcome {
        // The store is out of reach, or says no. Only its clock frees the key now; local callers must not be kept
        // from finding that out for themselves.
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
            // An earlier release, whose reply was lost, has done it.
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

/// Ends grants that attempts of this claim may yet cause: a request can be overtaken by its own release.
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
