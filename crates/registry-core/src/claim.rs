//! The remote half of an acquisition: a claim that the store may or may not know yet, and its
//! clean-up.
//!
//! The clean-up is armed before the first request is sent. If a [`Contender`] is dropped while a
//! request is in flight, the background releaser completes the request and releases the claim.
//! Called by `acquire`.

use std::future::Future as _;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::FutureExt as _;

use crate::backend::{Attempt, Claim, Grant};
use crate::call::{Call, CallFuture, first_poll};
use crate::clock::{Moment, sleep};
use crate::contained::{contain, discard};
use crate::engine::Engine;
use crate::error::{BackendError, BackendErrorKind};
use crate::fairness::Contention;
use crate::held::HeldClaim;
use crate::invalidation::NewsMark;
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::release::{GivingBack, give_back, give_back_in_background};
use crate::slot::{Slot, Turn};
use crate::watch::{Parked, Suspended, Suspension};

/// The state of an acquisition that passes to the active grant.
pub(crate) type Parts = (Turn, Claim, Arc<Terms>);

type AttemptCall = Call<Result<Attempt, BackendError>>;

/// The result of one attempt.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The store responded to a request that was sent at this time.
    Answered(Moment, Result<Attempt, BackendError>),
    /// The store did not respond in time. The outcome is unknown.
    Unanswered,
}

/// The one caller of this process that competes for a key in the store.
#[derive(Debug)]
pub(crate) struct Contender {
    /// Present until a grant is taken or the contender is dropped.
    parts: Option<Parts>,
    in_flight: Option<AttemptCall>,
    /// When the last attempt was sent.
    sent_at: Moment,
    /// The invalidation epoch of the key when the last attempt was sent.
    news_then: NewsMark,
    /// The number of attempts of this claim with an unknown outcome.
    stray_attempts: u32,
    /// The claim may be in the store's queue.
    queued: bool,
}

impl Contender {
    pub(crate) fn new(turn: Turn, claim: Claim, terms: Arc<Terms>) -> Self {
        turn.slot().engine().contending.enter();
        Self {
            sent_at: Moment::PAST,
            news_then: NewsMark::default(),
            parts: Some((turn, claim, terms)),
            in_flight: None,
            stray_attempts: 0,
            queued: false,
        }
    }

    fn slot(&self) -> &Arc<Slot> {
        self.parts.as_ref().expect("the turn is here until a grant is taken").0.slot()
    }

    fn engine(&self) -> &Arc<Engine> {
        self.slot().engine()
    }

    /// Returns the contention between this process and others for the key. `None` if the store needs
    /// no fairness between processes.
    pub(crate) fn contention(&mut self) -> Option<&mut Contention> {
        let parts = self.parts.as_mut().expect("the turn is here until a grant is taken");
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
    pub(crate) async fn send(&mut self, engine: &Engine) -> Option<Answer> {
        // Taken before the request leaves. The store's lease starts at an unknown moment between
        // send and reply; counting from the reply would let us trust a lease that is already over.
        self.sent_at = Moment::now();
        self.news_then = self.slot().news();
        // Counts the attempt in case the backend panics here, before the request is recorded as in
        // flight.
        self.stray_attempts += 1;
        let first = match engine.backend.acquire_at_once(self.claim()) {
            Some(answer) => Ok(answer),
            None => first_poll(engine.acquiring(self.claim())).await,
        };
        self.stray_attempts -= 1;
        match first {
            Ok(answer) => Some(self.answered(answer)),
            Err(request) => {
                self.in_flight = Some(Call::polled(&engine.janitor, request));
                None
            }
        }
    }

    /// Waits for the response to the request that was [sent](Self::send) within the same poll of
    /// the same task. Repeats the request once if the connection had broken while idle. Returns
    /// `Abandoned` if it was not polled for a lease.
    ///
    /// # Cancel safety
    /// Dropping the future drops the contender, and the background releaser completes the request.
    pub(crate) async fn answer(
        mut self,
        sent: Option<Answer>,
        engine: &Engine,
        suspension: &mut Suspension<'_, Self>,
    ) -> Result<(Self, Answer), Abandoned> {
        let first;
        (self, first) = self.one_answer(sent, engine, suspension).await?;
        match first {
            Answer::Answered(_, Err(error)) if error.is_stale_connection() => {
                let sent = self.send(engine).await;
                self.one_answer(sent, engine, suspension).await
            }
            answer => Ok((self, answer)),
        }
    }

    async fn one_answer(
        self,
        sent: Option<Answer>,
        engine: &Engine,
        suspension: &mut Suspension<'_, Self>,
    ) -> Result<(Self, Answer), Abandoned> {
        if let Some(answer) = sent {
            return Ok((self, answer));
        }
        let mut end = pin!(sleep(engine.defaults.answer_limit));
        let answered = suspension.run(self, |contender, cx| {
            if let Some(call) = contender.in_flight.as_mut()
                && let Poll::Ready(answer) = Pin::new(call).poll(cx)
            {
                return Poll::Ready(Some(answer));
            }
            end.as_mut().poll(cx).map(|()| None)
        });
        let (mut contender, answer) = answered.await?;
        let answer = match answer {
            Some(answer) => contender.answered(answer),
            None => Answer::Unanswered,
        };
        Ok((contender, answer))
    }

    /// Records a response, and counts the attempt if its outcome is unknown.
    fn answered(&mut self, answer: Result<Attempt, BackendError>) -> Answer {
        self.in_flight = None;
        match &answer {
            Ok(Attempt::Granted(_)) => {}
            Ok(Attempt::Busy(_)) => self.queued |= self.claim().queue(),
            Err(error) if error.refused() => {}
            Err(_) => self.stray_attempts += 1,
        }
        Answer::Answered(self.sent_at, answer)
    }

    /// Takes a grant. If its lease was over before it arrived, the claim is released in the
    /// background. The contender then continues with the same local permit and a new claim.
    pub(crate) fn take(
        mut self,
        grant: Grant,
        sent_at: Moment,
    ) -> Result<Arc<HeldClaim>, Box<Self>> {
        let (turn, claim, terms) =
            self.parts.take().expect("the claim is here until a grant is taken");
        let taken = HeldClaim::take(
            turn,
            claim,
            terms,
            grant,
            sent_at,
            self.news_then,
            self.stray_attempts,
        );
        let taken = taken.map_err(|late| {
            let (turn, claim, terms) = *late;
            let engine = Arc::clone(turn.slot().engine());
            let fresh = claim.clone().with_id(crate::ClaimId::random());
            give_back_in_background(GivingBack {
                engine,
                lease: claim.lease(),
                claim,
                turn: None,
                stray_attempts: self.stray_attempts + 1,
                under_way: None,
                blocked: None,
            });
            Box::new(Self::new(turn, fresh, terms))
        });
        // After the new state is counted, so that closing always counts this caller at least once.
        match &taken {
            Ok(held) => held.engine().contending.leave(),
            Err(late) => late.engine().contending.leave(),
        }
        taken
    }

    /// Leaves a claim whose request has no response to the background releaser, and continues with
    /// a new one. Only an answered request can be repeated safely with the same id.
    pub(crate) fn replace_unanswered(&mut self, fresh: impl FnOnce() -> Claim) {
        if self.in_flight.is_none() {
            return;
        }
        let Some((turn, claim, terms)) = self.parts.take() else {
            return;
        };
        let engine = Arc::clone(turn.slot().engine());
        self.leave_behind(Arc::clone(&engine), claim, None);
        *self = Self::new(turn, fresh(), terms);
        engine.contending.leave();
    }

    fn leave_behind(&mut self, engine: Arc<Engine>, claim: Claim, turn: Option<Turn>) {
        let in_flight = self.in_flight.take().and_then(|mut call| call.take());
        let stray_attempts = self.stray_attempts;
        if mutated(Mutant::CancelledAcquireLeaks) {
            return;
        }
        if let Some(call) = in_flight {
            let janitor = engine.janitor.clone();
            let queued = self.queued || claim.queue();
            let giving = GivingBack {
                engine,
                lease: claim.lease(),
                claim,
                turn,
                stray_attempts,
                under_way: None,
                blocked: None,
            };
            janitor.hand_over(Box::pin(finish_and_give_back(call, giving, queued)));
        } else if stray_attempts > 0 || self.queued {
            give_back_in_background(GivingBack {
                engine,
                lease: claim.lease(),
                claim,
                turn,
                stray_attempts,
                under_way: None,
                blocked: None,
            });
        }
    }
}

impl Drop for Contender {
    fn drop(&mut self) {
        if let Some((turn, claim, _)) = self.parts.take() {
            let engine = Arc::clone(turn.slot().engine());
            self.leave_behind(Arc::clone(&engine), claim, Some(turn));
            engine.contending.leave();
        }
    }
}

/// The acquisition was not polled for a lease: its claim is being released, and its local permit
/// passes to the next caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Abandoned;

impl Parked for Contender {
    type Left = Abandoned;

    fn abandon(self, cell: &Arc<Suspended<Self>>) {
        contain(|| drop(self));
        cell.leave(Abandoned);
    }
}

/// Waits for the outcome of a request whose caller is gone, and releases what it was granted.
async fn finish_and_give_back(
    call: CallFuture<Result<Attempt, BackendError>>,
    mut giving: GivingBack,
    queued: bool,
) {
    let limit = giving.engine.defaults.answer_limit;
    // If the backend panicked while its caller polled it, it panics here again. The outcome is then
    // unknown.
    let call = AssertUnwindSafe(call).catch_unwind();
    tokio::pin!(call);
    let answer = match tokio::time::timeout(limit, &mut call).await {
        Ok(answer) => answer,
        Err(_) => {
            // If the store does not respond, the next local caller must learn this from its own
            // request.
            giving.turn = None;
            call.await
        }
    };
    let panicked = |payload| {
        discard(payload);
        Err(BackendError::new(BackendErrorKind::Protocol, "the backend panicked"))
    };
    match answer.unwrap_or_else(panicked) {
        // There is nothing to release unless an earlier attempt was granted.
        Ok(Attempt::Busy(_)) if giving.stray_attempts == 0 && !queued => return,
        Err(error) if error.refused() && giving.stray_attempts == 0 && !queued => return,
        // Each attempt may have caused a grant of its own, one after the release of the other.
        Ok(Attempt::Granted(_)) if giving.stray_attempts > 0 => giving.stray_attempts += 1,
        Ok(_) => {}
        Err(_) => giving.stray_attempts += 1,
    }
    give_back(giving).await;
}
