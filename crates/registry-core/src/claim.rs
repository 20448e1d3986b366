//! The remote half of an acquisition: a claim that may or may not be known to the store yet, and the clean-up for it.
//!
//! The clean-up is armed before the first request leaves: whoever drops a [`Contender`] in mid-flight leaves to the
//! janitor a claim that is carried to its end and given back.

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
use crate::hints::NewsMark;
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::release::{GivingBack, give_back, give_back_in_background};
use crate::slot::{Slot, Turn};
use crate::watch::{Parked, Suspended, Suspension};

/// What an acquisition has, and passes to the claim that is held.
pub(crate) type Parts = (Turn, Claim, Arc<Terms>);

type AttemptCall = Call<Result<Attempt, BackendError>>;

/// What came of one attempt.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The store answered a request that left at this moment.
    Answered(Moment, Result<Attempt, BackendError>),
    /// It did not answer in time. The outcome is unknown.
    Unanswered,
}

/// The one caller of this process that contends for a key.
#[derive(Debug)]
pub(crate) struct Contender {
    /// They are here until a grant is taken or the contender is dropped.
    parts: Option<Parts>,
    in_flight: Option<AttemptCall>,
    /// What had been heard of the key when the last attempt left.
    news_then: NewsMark,
    /// Attempts of this claim whose outcome is unknown.
    stray_attempts: u32,
    /// The store may have the claim in its queue.
    queued: bool,
}

impl Contender {
    pub(crate) fn new(turn: Turn, claim: Claim, terms: Arc<Terms>) -> Self {
        turn.slot().engine().contending.enter();
        Self {
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

    /// What is known of other processes that want the key.
    pub(crate) fn contention(&mut self) -> &mut Contention {
        let parts = self.parts.as_mut().expect("the turn is here until a grant is taken");
        &mut parts.0.contention
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.parts.as_ref().expect("the claim is here until a grant is taken").1
    }

    /// Asks the store once, and once more if the connection had broken while idle. Returns `Abandoned` if it was not polled for
    /// a lease in between.
    ///
    /// The backend does not repeat an attempt itself: the first request may still arrive after the release of what the
    /// second one was granted, and only a counted attempt is released again.
    ///
    /// # Cancel safety
    /// Dropping the future drops the contender, which carries the request to its end in the background.
    pub(crate) async fn attempt(
        self,
        engine: &Engine,
        suspension: &mut Suspension<'_, Self>,
    ) -> Result<(Self, Answer), Abandoned> {
        let (contender, answer) = self.request(engine, suspension).await?;
        match answer {
            Answer::Answered(_, Err(error)) if error.is_stale_connection() => {
                contender.request(engine, suspension).await
            }
            answer => Ok((contender, answer)),
        }
    }

    /// Sends one request, and counts it if its outcome stays unknown.
    async fn request(
        mut self,
        engine: &Engine,
        suspension: &mut Suspension<'_, Self>,
    ) -> Result<(Self, Answer), Abandoned> {
        // Taken before the request leaves. The store's lease starts at an unknown moment between send and
        // reply; counting from the reply would let us trust a lease that is already over.
        let sent_at = Moment::now();
        self.news_then = self.slot().news();
        // For a backend that panics right here. All else that can go wrong finds the request in flight.
        self.stray_attempts += 1;
        let first = match engine.backend.acquire_at_once(self.claim()) {
            Some(answer) => Ok(answer),
            None => first_poll(engine.acquiring(self.claim())).await,
        };
        self.stray_attempts -= 1;
        let answer = match first {
            Ok(answer) => answer,
            Err(request) => {
                self.in_flight = Some(Call::polled(&engine.janitor, request));
                let mut end = pin!(sleep(engine.defaults.answer_limit));
                let answered = suspension.run(self, |contender, cx| {
                    if let Some(call) = contender.in_flight.as_mut()
                        && let Poll::Ready(answer) = Pin::new(call).poll(cx)
                    {
                        return Poll::Ready(Some(answer));
                    }
                    end.as_mut().poll(cx).map(|()| None)
                });
                let (contender, answer) = answered.await?;
                self = contender;
                match answer {
                    Some(answer) => answer,
                    None => return Ok((self, Answer::Unanswered)),
                }
            }
        };
        self.in_flight = None;
        match &answer {
            Ok(Attempt::Granted(_)) => {}
            Ok(Attempt::Busy(_)) => self.queued |= self.claim().queue(),
            Err(error) if error.refused() => {}
            Err(_) => self.stray_attempts += 1,
        }
        Ok((self, Answer::Answered(sent_at, answer)))
    }

    /// Takes a grant. If its lease was over before it arrived, the claim goes back to the store and the contender goes on
    /// with the same turn and a fresh claim.
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
        // Only now, so that closing never sees nobody between two states of the same caller.
        match &taken {
            Ok(held) => held.engine().contending.leave(),
            Err(late) => late.engine().contending.leave(),
        }
        taken
    }

    /// Leaves the present claim to the janitor and goes on with a fresh one. For a claim whose request hangs: only a
    /// request that has been answered can be repeated safely under the same id.
    pub(crate) fn start_over(&mut self, fresh: Claim) {
        let Some((turn, claim, terms)) = self.parts.take() else {
            return;
        };
        let engine = Arc::clone(turn.slot().engine());
        self.leave_behind(Arc::clone(&engine), claim, None);
        *self = Self::new(turn, fresh, terms);
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

/// An acquisition was not polled for a lease: its claim is being released, and its local turn passes on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Abandoned;

impl Parked for Contender {
    type Left = Abandoned;

    fn abandon(self, cell: &Arc<Suspended<Self>>) {
        contain(|| drop(self));
        cell.leave(Abandoned);
    }
}

/// Waits for the outcome of a request that its caller has left, and gives back what it got.
async fn finish_and_give_back(
    call: CallFuture<Result<Attempt, BackendError>>,
    mut giving: GivingBack,
    queued: bool,
) {
    let limit = giving.engine.defaults.answer_limit;
    // A backend that panicked in front of its caller would panic again: then all that is known is that nothing is.
    let call = AssertUnwindSafe(call).catch_unwind();
    tokio::pin!(call);
    let answer = match tokio::time::timeout(limit, &mut call).await {
        Ok(answer) => answer,
        Err(_) => {
            // A store that hangs must not keep local callers from finding that out for themselves.
            giving.turn = None;
            call.await
        }
    };
    let panicked = |payload| {
        discard(payload);
        Err(BackendError::new(BackendErrorKind::Protocol, "the backend panicked"))
    };
    match answer.unwrap_or_else(panicked) {
        // Nothing is there unless an earlier attempt left it.
        Ok(Attempt::Busy(_)) if giving.stray_attempts == 0 && !queued => return,
        Err(error) if error.refused() && giving.stray_attempts == 0 && !queued => return,
        // Every attempt may have caused a grant of its own, one after the release of the other.
        Ok(Attempt::Granted(_)) if giving.stray_attempts > 0 => giving.stray_attempts += 1,
        Ok(_) => {}
        Err(_) => giving.stray_attempts += 1,
    }
    give_back(giving).await;
}
