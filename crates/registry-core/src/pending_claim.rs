//! The remote half of an acquisition: a claim that the store may or may not know yet, and its
//! clean-up.
//!
//! The clean-up is armed before the first request is sent. If a [`PendingClaim`] is dropped while a
//! request is in flight, the background releaser completes the request and releases the claim.
//! Called by `acquire`.

use std::future::Future as _;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::FutureExt as _;

use crate::backend::{Attempt, Claim, Grant};
use crate::call::{Call, CallFuture};
use crate::clock::{Moment, sleep};
use crate::contained::{catch_panic, discard};
use crate::engine::Engine;
use crate::error::{BackendError, BackendErrorKind};
use crate::fairness::Contention;
use crate::grant::{ActiveGrant, ClaimParts};
use crate::invalidation::Epoch;
use crate::local_lock::{LocalLock, LocalPermit};
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::release::{PendingRelease, release_claim, release_in_background};
use crate::watch::{Parked, Suspended, Suspension};

type AttemptCall = Call<Result<Attempt, BackendError>>;

/// The result of one attempt.
#[derive(Debug)]
pub(crate) enum AttemptOutcome {
    /// The store responded to a request that was sent at this time.
    Responded(Moment, Result<Attempt, BackendError>),
    /// The store did not respond in time. The outcome is unknown.
    Unknown,
}

/// The one caller of this process that competes for a key in the store.
#[derive(Debug)]
pub(crate) struct PendingClaim {
    /// Present until a grant is taken or this is dropped.
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
    pub(crate) fn new(permit: LocalPermit, claim: Claim, terms: Arc<Terms>) -> Self {
        permit.local_lock().engine().pending_claims.enter();
        Self {
            sent_at: Moment::PAST,
            epoch_at_send: Epoch::default(),
            parts: Some((permit, claim, terms)),
            in_flight: None,
            unknown_attempts: 0,
            queued: false,
        }
    }

    fn local_lock(&self) -> &Arc<LocalLock> {
        self.parts.as_ref().expect("the permit is here until a grant is taken").0.local_lock()
    }

    fn engine(&self) -> &Arc<Engine> {
        self.local_lock().engine()
    }

    /// Returns the contention between this process and others for the key. `None` if the store
    /// needs no fairness between processes.
    pub(crate) fn contention(&mut self) -> Option<&mut Contention> {
        let parts = self.parts.as_mut().expect("the permit is here until a grant is taken");
        parts.0.contention.as_deref_mut()
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.parts.as_ref().expect("the claim is here until a grant is taken").1
    }

    /// Sends one request to the store and polls it once. Returns `None` if the store has not
    /// responded yet; [`answer`](Self::answer) then waits for the response.
    ///
    /// A store in this process responds at once. Its callers need neither a timer nor a suspension.
    ///
    /// The backend itself must not repeat an attempt. The first request may still reach the store
    /// after the release of the second one's grant, and only a counted attempt is released again.
    pub(crate) async fn send(&mut self, engine: &Engine) -> Option<AttemptOutcome> {
        // Taken before the request leaves. The store's lease starts at an unknown moment between
        // send and reply; counting from the reply would let us trust a lease that is already over.
        self.sent_at = Moment::now();
        self.epoch_at_send = self.local_lock().epoch();
        // Counts the attempt in case the backend panics here, before the request is recorded as in
        // flight.
        self.unknown_attempts += 1;
        let first = engine.send_attempt(self.claim()).await;
        self.unknown_attempts -= 1;
        match first {
            Ok(answer) => Some(self.answered(answer)),
            Err(request) => {
                self.in_flight = Some(Call::polled(&engine.background, request));
                None
            }
        }
    }

    /// Waits for the response to the request that was [sent](Self::send) within the same poll of
    /// the same task. Repeats the request once if the connection had broken while idle. Returns
    /// `Abandoned` if it was not polled for a lease.
    ///
    /// # Cancel safety
    /// Dropping the future drops the pending claim, and the background releaser completes the request.
    pub(crate) async fn answer(
        mut self,
        sent: Option<AttemptOutcome>,
        engine: &Engine,
        suspension: &mut Suspension<'_, Self>,
    ) -> Result<(Self, AttemptOutcome), Abandoned> {
        let first;
        (self, first) = self.response(sent, engine, suspension).await?;
        match first {
            AttemptOutcome::Responded(_, Err(error)) if error.is_stale_connection() => {
                let sent = self.send(engine).await;
                self.response(sent, engine, suspension).await
            }
            answer => Ok((self, answer)),
        }
    }

    async fn response(
        self,
        sent: Option<AttemptOutcome>,
        engine: &Engine,
        suspension: &mut Suspension<'_, Self>,
    ) -> Result<(Self, AttemptOutcome), Abandoned> {
        if let Some(answer) = sent {
            return Ok((self, answer));
        }
        let mut end = pin!(sleep(engine.defaults.operation_timeout));
        let answered = suspension.run(self, |pending, cx| {
            if let Some(call) = pending.in_flight.as_mut()
                && let Poll::Ready(answer) = Pin::new(call).poll(cx)
            {
                return Poll::Ready(Some(answer));
            }
            end.as_mut().poll(cx).map(|()| None)
        });
        let (mut pending, answer) = answered.await?;
        let answer = match answer {
            Some(answer) => pending.answered(answer),
            None => AttemptOutcome::Unknown,
        };
        Ok((pending, answer))
    }

    /// Records a response, and counts the attempt if its outcome is unknown.
    fn answered(&mut self, answer: Result<Attempt, BackendError>) -> AttemptOutcome {
        self.in_flight = None;
        match &answer {
            Ok(Attempt::Granted(_)) => {}
            Ok(Attempt::Busy(_)) => self.queued |= self.claim().joins_queue(),
            Err(error) if error.refused() => {}
            Err(_) => self.unknown_attempts += 1,
        }
        AttemptOutcome::Responded(self.sent_at, answer)
    }

    /// Takes a grant. If its lease was over before it arrived, the claim is released in the
    /// background. The caller then continues with the same local permit and a new claim.
    pub(crate) fn take(
        mut self,
        grant: Grant,
        sent_at: Moment,
    ) -> Result<Arc<ActiveGrant>, Box<Self>> {
        let (permit, claim, terms) =
            self.parts.take().expect("the claim is here until a grant is taken");
        let taken = ActiveGrant::take(
            permit,
            claim,
            terms,
            grant,
            sent_at,
            self.epoch_at_send,
            self.unknown_attempts,
        );
        let taken = taken.map_err(|late| {
            let (permit, claim, terms) = *late;
            let engine = Arc::clone(permit.local_lock().engine());
            let fresh = claim.clone().with_id(crate::ClaimId::random());
            release_in_background(PendingRelease {
                engine,
                lease: claim.lease(),
                claim,
                permit: None,
                unknown_attempts: self.unknown_attempts + 1,
                in_flight: None,
                blocked: None,
            });
            Box::new(Self::new(permit, fresh, terms))
        });
        // After the new state is counted, so that closing always counts this caller at least once.
        match &taken {
            Ok(held) => held.engine().pending_claims.leave(),
            Err(late) => late.engine().pending_claims.leave(),
        }
        taken
    }

    /// Leaves a claim whose request has no response to the background releaser, and continues with
    /// a new one. Only an answered request can be repeated safely with the same id.
    pub(crate) fn replace_unresolved(&mut self, fresh: impl FnOnce() -> Claim) {
        if self.in_flight.is_none() {
            return;
        }
        let Some((permit, claim, terms)) = self.parts.take() else {
            return;
        };
        let engine = Arc::clone(permit.local_lock().engine());
        self.abandon_claim(Arc::clone(&engine), claim, None);
        *self = Self::new(permit, fresh(), terms);
        engine.pending_claims.leave();
    }

    fn abandon_claim(&mut self, engine: Arc<Engine>, claim: Claim, permit: Option<LocalPermit>) {
        let in_flight = self.in_flight.take().and_then(|mut call| call.take());
        let unknown_attempts = self.unknown_attempts;
        if mutated(Mutant::CancelledAcquireLeaks) {
            return;
        }
        if let Some(call) = in_flight {
            let background = engine.background.clone();
            let queued = self.queued || claim.joins_queue();
            let pending_release = PendingRelease {
                engine,
                lease: claim.lease(),
                claim,
                permit: permit.map(LocalPermit::for_release),
                unknown_attempts,
                in_flight: None,
                blocked: None,
            };
            background.submit_release(Box::pin(finish_and_release(call, pending_release, queued)));
        } else if unknown_attempts > 0 || self.queued {
            release_in_background(PendingRelease {
                engine,
                lease: claim.lease(),
                claim,
                permit: permit.map(LocalPermit::for_release),
                unknown_attempts,
                in_flight: None,
                blocked: None,
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

/// The acquisition was not polled for a lease: its claim is being released, and its local permit
/// passes to the next caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Abandoned;

impl Parked for PendingClaim {
    type Replacement = Abandoned;

    fn abandon(self, cell: &Arc<Suspended<Self>>) {
        catch_panic(|| drop(self));
        cell.leave(Abandoned);
    }
}

/// Waits for the outcome of a request whose caller is gone, and releases what it was granted.
async fn finish_and_release(
    call: CallFuture<Result<Attempt, BackendError>>,
    mut pending_release: PendingRelease,
    queued: bool,
) {
    let limit = pending_release.engine.defaults.operation_timeout;
    // If the backend panicked while its caller polled it, it panics here again. The outcome is then
    // unknown.
    let call = AssertUnwindSafe(call).catch_unwind();
    tokio::pin!(call);
    let answer = match tokio::time::timeout(limit, &mut call).await {
        Ok(answer) => answer,
        Err(_) => {
            // If the store does not respond, the next local caller must learn this from its own
            // request.
            pending_release.permit = None;
            call.await
        }
    };
    let panicked = |payload| {
        discard(payload);
        Err(BackendError::new(BackendErrorKind::Protocol, "the backend panicked; report this bug"))
    };
    match answer.unwrap_or_else(panicked) {
        // There is nothing to release unless an earlier attempt was granted.
        Ok(Attempt::Busy(_)) if pending_release.unknown_attempts == 0 && !queued => return,
        Err(error) if error.refused() && pending_release.unknown_attempts == 0 && !queued => return,
        // Each attempt may have caused a grant of its own, one after the release of the other.
        Ok(Attempt::Granted(_)) if pending_release.unknown_attempts > 0 => {
            pending_release.unknown_attempts += 1
        }
        Ok(_) => {}
        Err(_) => pending_release.unknown_attempts += 1,
    }
    release_claim(pending_release).await;
}
