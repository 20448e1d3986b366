//! One claim that the store has granted: its lease, who has it locally, and how it ends.
//!
//! It ends exactly once: by the last guard ([`HeldClaim::end`]) or by loss ([`HeldClaim::lose`]), whichever comes first.
//! Handing over is an end that is taken back in favour of the next local caller.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{Claim, Grant};
use crate::claim::Parts;
use crate::clock::Moment;
use crate::engine::Engine;
use crate::error::{BackendError, LostReason};
use crate::event::LockEvent;
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::hints::NewsMark;
use crate::hold::Hold;
use crate::keeper::Seat;
use crate::lease::{Due, Lease};
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::owner::Owner;
use crate::release::{GivingBack, give_back_in_background};
use crate::slot::{Slot, Turn};

pub(crate) struct HeldClaim {
    claim: Claim,
    terms: Arc<Terms>,
    slot: Arc<Slot>,
    first_token: Option<FencingToken>,
    granted_at: Moment,
    /// Other processes want the key.
    contended: bool,
    /// Attempts of this claim whose outcome stayed unknown: one of them may still arrive after the release.
    stray_attempts: u32,
    /// The lease's end, for readers that must not wait for a lock. `PAST` once it has ended.
    valid_until: AtomicI64,
    lost: Notify,
    /// Somebody watches for a loss.
    watched: AtomicBool,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    lease: Lease,
    /// Here while the claim is held; whoever ends it takes it along.
    turn: Option<Turn>,
    seat: Option<Seat>,
    handovers: u32,
    /// A fenced write may be open, which the store cannot tell from one of the next local holder.
    fenced: bool,
    /// The store has said so while the claim was ending.
    gone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Held,
    Ending,
    Lost(LostReason),
}

/// What the keeper has to do about a claim.
pub(crate) enum Tick {
    Nothing,
    Renew {
        ask: Duration,
        /// It is not for the time, but to hear whether the claim is still held.
        is_look: bool,
        /// The renewal before was not answered.
        unanswered: bool,
    },
    Lose(LostReason),
}

impl HeldClaim {
    /// Takes a grant into custody. Gives turn and claim back when the lease was over before the grant arrived.
    pub(crate) fn take(
        mut turn: Turn,
        claim: Claim,
        terms: Arc<Terms>,
        grant: Grant,
        sent_at: Moment,
        news_then: NewsMark,
        stray_attempts: u32,
    ) -> Result<Arc<Self>, Box<Parts>> {
        let now = Moment::now_after(sent_at);
        let mut lease = Lease::granted(terms.lease, sent_at, grant.lease, now);
        if matches!(lease.due(now), Due::Over(_)) {
            return Err(Box::new((turn, claim, terms)));
        }
        if let Some(after) = turn.slot().engine().first_look() {
            lease.look_first_at(now.after(after));
        }
        turn.taken(now);
        let slot = Arc::clone(turn.slot());
        let held = Arc::new(Self {
            claim,
            terms,
            first_token: grant.token,
            granted_at: now,
            contended: turn.contention.is_contended(),
            stray_attempts,
            valid_until: AtomicI64::new(lease.valid_until().to_bits()),
            lost: Notify::new(),
            watched: false.into(),
            state: Mutex::new(State {
                phase: Phase::Held,
                lease,
                turn: Some(turn),
                seat: None,
                handovers: 0,
                fenced: false,
                gone: false,
            }),
            slot,
        });
        held.engine().held.enter();
        held.seat(&mut held.state(), now);
        // In this order: news that comes from here on finds the claim on the schedule.
        if held.slot.news() != news_then {
            held.hear(now);
        }
        Ok(held)
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// The claim as it is released: its block says how many tokens the holders have used.
    pub(crate) fn claim_to_release(&self) -> Claim {
        let used = self.state().handovers.saturating_add(1);
        self.claim.clone().with_token_block(used)
    }

    pub(crate) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.slot.engine()
    }

    pub(crate) fn granted_at(&self) -> Moment {
        self.granted_at
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment::from_bits(self.valid_until.load(Ordering::Acquire))
    }

    /// How many attempts of this claim may have to be freed, the one that was granted included. None if there is only that.
    pub(crate) fn stray_attempts_at_release(&self) -> u32 {
        if self.stray_attempts == 0 { 0 } else { self.stray_attempts + 1 }
    }

    /// Why it was lost; also notices a lease that has run out unseen.
    pub(crate) fn loss(self: &Arc<Self>) -> Option<LostReason> {
        self.loss_at(Moment::now())
    }

    fn loss_at(self: &Arc<Self>, now: Moment) -> Option<LostReason> {
        if now < self.valid_until() {
            return None;
        }
        let due = {
            let state = self.state();
            match state.phase {
                Phase::Lost(reason) => return Some(reason),
                Phase::Ending => return None,
                Phase::Held => state.lease.due(now),
            }
        };
        if let Due::Over(reason) = due
            && self.lose(reason)
        {
            return Some(reason);
        }
        match self.state().phase {
            Phase::Lost(reason) => Some(reason),
            Phase::Held | Phase::Ending => None,
        }
    }

    /// Resolves whenever something may have been lost. A hint to look at [`loss`](Self::loss), to be enabled first and then
    /// [announced](Self::announce_watcher).
    pub(crate) fn lost_hint(&self) -> tokio::sync::futures::Notified<'_> {
        self.lost.notified()
    }

    /// Says that hints are wanted. What has changed before the last hint that did not reach the watcher is seen by its next
    /// look: of these two exchanges one comes first, and the other one sees it.
    pub(crate) fn announce_watcher(&self) {
        self.watched.swap(true, Ordering::AcqRel);
    }

    /// Lets those who watch for a loss look again.
    pub(crate) fn hint_loss(&self) {
        if self.watched.swap(false, Ordering::AcqRel) {
            self.lost.notify_waiters();
        }
    }

    /// Ends the claim by loss: tells the holder first, and only then lets anybody else at the key. False if it had ended.
    pub(crate) fn lose(self: &Arc<Self>, reason: LostReason) -> bool {
        let (turn, lease_length, fenced) = {
            let mut state = self.state();
            if state.phase != Phase::Held {
                // Let go, but perhaps to be handed over.
                state.gone |= reason == LostReason::Gone;
                return false;
            }
            state.phase = Phase::Lost(reason);
            self.valid_until.store(Moment::PAST.to_bits(), Ordering::Release);
            self.unseat(&mut state);
            (state.turn.take(), state.lease.length(), state.fenced)
        };
        self.hint_loss();
        let engine = self.engine();
        engine.lost.fetch_add(1, Ordering::AcqRel);
        engine.tell(|| LockEvent::Lost {
            key: self.claim.key().as_str(),
            token: self.first_token,
            reason,
        });
        let (turn_now, turn_after) = match reason {
            // The store may be out of reach. Local callers must find that out by themselves instead of queueing
            // behind a record that nobody can remove.
            LostReason::Expired | LostReason::Gone => (turn, None),
            LostReason::MaxHold | LostReason::Closed => (None, turn),
        };
        drop(turn_now);
        // A renewal that was never answered needs no such care: it never brings back what has been released.
        let stray_attempts = self.stray_attempts_at_release();
        if reason != LostReason::Gone || stray_attempts > 0 {
            give_back_in_background(GivingBack {
                engine: Arc::clone(engine),
                claim: self.claim_to_release().with_fenced(fenced),
                turn: turn_after,
                // A renewal that was never answered may have been carried out a moment ago.
                lease: lease_length,
                stray_attempts,
                under_way: None,
                blocked: None,
            });
        }
        // Only now: closing waits for what is held first, and for the janitor after that.
        engine.held.leave();
        true
    }

    /// Ends the claim by the holder's own will. The keeper starts no renewal from here on.
    pub(crate) fn end(self: &Arc<Self>) -> Result<Ending, LostReason> {
        // Exact would not help: a store that frees the claim tells by itself whether it was still there, and a holder to
        // whom it is handed over looks for himself.
        let now = Moment::about_now();
        if let Some(reason) = self.loss_at(now) {
            return Err(reason);
        }
        let mut state = self.state();
        if let Phase::Lost(reason) = state.phase {
            return Err(reason);
        }
        if !mutated(Mutant::RenewAfterRelease) {
            state.phase = Phase::Ending;
        }
        let (turn, fenced) = (state.turn.take(), state.fenced);
        drop(state);
        Ok(Ending { held: Some(Arc::clone(self)), turn, fenced, seated: true, settled: false })
    }

    /// Excludes the claim from hand-over until it ends. Fails if it has ended, or is about to: under the same mutex the
    /// end decides whether the claim is handed over.
    pub(crate) fn exclude_from_hand_over(self: &Arc<Self>) -> Result<(), LostReason> {
        if let Some(reason) = self.loss() {
            return Err(reason);
        }
        let mut state = self.state();
        match state.phase {
            Phase::Held => state.fenced = true,
            Phase::Lost(reason) => return Err(reason),
            // A guard keeps its hold from ending, so only a guard of an earlier hold could come here.
            Phase::Ending => return Err(LostReason::Gone),
        }
        Ok(())
    }

    /// Whether this claim may pass to another local caller as it is.
    fn may_be_handed_over(&self, now: Moment, state: &State) -> bool {
        let engine = self.engine();
        let held_for = now.since(self.granted_at);
        !state.gone
            && !state.fenced
            && !state.lease.is_in_doubt()
            && engine.defaults.handoffs.allow_another(state.handovers, held_for, self.contended)
            && !engine.capabilities.fair
            && self.terms.lease.max_hold.is_none()
            && self.terms.lease.renews
            && state.lease.length() == self.terms.lease.length
            && held_for >= self.terms.min_hold
            // Enough of the lease must be left for the next one to get going before the keeper's next try.
            && self.valid_until().since(now) > self.terms.lease.length / 3
    }

    /// Takes the end back, in favour of a hold of `owner`.
    fn begin_again(
        self: &Arc<Self>,
        turn: &mut Option<Turn>,
        owner: Option<Owner>,
    ) -> Option<LockGuard> {
        // Read now: the claim may have been ending for a while. Whoever takes it looks exactly.
        let now = Moment::about_now();
        let mut state = self.state();
        if !self.may_be_handed_over(now, &state) {
            return None;
        }
        state.phase = Phase::Held;
        state.turn = turn.take();
        state.handovers += 1;
        if state.seat.is_none() {
            self.seat(&mut state, now);
        }
        let steps = u64::from(state.handovers);
        let token = self.first_token.and_then(|first| first.checked_add(steps));
        drop(state);
        Some(Hold::first_guard(Arc::clone(self), token, owner))
    }

    /// Takes the claim out of the keeper's hands.
    fn unseat_for_good(&self) {
        if !mutated(Mutant::RenewAfterRelease) {
            self.unseat(&mut self.state());
        }
    }

    /// The time from now until this claim may be freed at the earliest.
    pub(crate) fn min_hold_left(&self) -> Duration {
        if self.terms.min_hold.is_zero() {
            return Duration::ZERO;
        }
        self.granted_at.after(self.terms.min_hold).since(Moment::now())
    }

    /// How long a lease of this claim lasts.
    pub(crate) fn lease_length(&self) -> Duration {
        self.state().lease.length()
    }

    /// Makes the renewals to come ask for `length`.
    pub(crate) fn set_lease_length(&self, length: Duration) {
        self.state().lease.set_length(length);
    }

    /// Notes that the store has told of a change of its record by itself, and has it asked whether the claim is still held.
    pub(crate) fn hear(self: &Arc<Self>, now: Moment) {
        let mut state = self.state();
        // One that is ending may yet be handed over; see there.
        if state.lease.heard(now) && state.phase == Phase::Held {
            self.unseat(&mut state);
            self.seat(&mut state, now);
        }
    }

    /// What the keeper has to do about this claim, which is due at `seat`.
    pub(crate) fn tick(self: &Arc<Self>, seat: Seat, now: Moment) -> Tick {
        let mut state = self.state();
        if state.seat != Some(seat) {
            // Seated anew in the meantime.
            return Tick::Nothing;
        }
        self.unseat(&mut state);
        if state.phase != Phase::Held {
            return Tick::Nothing;
        }
        match state.lease.due(now) {
            Due::Over(reason) => Tick::Lose(reason),
            Due::At(_) => {
                self.seat(&mut state, now);
                Tick::Nothing
            }
            due @ (Due::Renew(ask) | Due::Look(ask)) => {
                // Several tries must fit between the first renewal and the end of the lease.
                let answer_limit =
                    self.engine().defaults.answer_limit.min(state.lease.length() / 6);
                let unanswered = if matches!(due, Due::Renew(_)) {
                    state.lease.renewal_sent(now, answer_limit)
                } else {
                    state.lease.look_sent(now, answer_limit)
                };
                self.seat(&mut state, now);
                Tick::Renew { ask, is_look: matches!(due, Due::Look(_)), unanswered }
            }
        }
    }

    /// How much time to ask for now, because others are being renewed; `together` if this one more costs nothing. `None` if it is better
    /// left as it is.
    pub(crate) fn join(self: &Arc<Self>, now: Moment, together: bool) -> Option<Duration> {
        let mut state = self.state();
        if state.phase != Phase::Held {
            return None;
        }
        let ask = state.lease.joins(now, together)?;
        let answer_limit = self.engine().defaults.answer_limit.min(state.lease.length() / 6);
        state.lease.renewal_sent(now, answer_limit);
        self.unseat(&mut state);
        self.seat(&mut state, now);
        Some(ask)
    }

    /// Notes what the store answered to the keeper's request of `sent_at`: the claim is still held.
    pub(crate) fn confirmed(self: &Arc<Self>, sent_at: Moment, granted: Duration) {
        let is_renewal = {
            let mut state = self.state();
            let is_renewal = state.lease.confirmed(sent_at);
            if !is_renewal && state.phase == Phase::Held {
                self.unseat(&mut state);
                self.seat(&mut state, Moment::now());
            }
            is_renewal
        };
        // Where there are only looks the lease ends when it would have ended.
        if is_renewal {
            self.renewed(sent_at, granted);
        }
    }

    /// Notes that a renewal sent at `sent_at` was granted.
    pub(crate) fn renewed(self: &Arc<Self>, sent_at: Moment, granted: Duration) {
        let now = Moment::now();
        let valid_for = {
            let mut state = self.state();
            if state.phase != Phase::Held {
                return;
            }
            // A lease that was over before the answer came stays over: its holder may have been told already.
            if matches!(state.lease.due(now), Due::Over(_)) {
                None
            } else {
                state.lease.renewed(sent_at, granted);
                self.valid_until.store(state.lease.valid_until().to_bits(), Ordering::Release);
                self.unseat(&mut state);
                self.seat(&mut state, now);
                Some(state.lease.valid_until().since(now))
            }
        };
        match valid_for {
            Some(valid_for) => self
                .engine()
                .tell(|| LockEvent::Renewed { key: self.claim.key().as_str(), valid_for }),
            None => {
                self.loss();
            }
        }
    }

    /// Notes that a renewal failed with an unknown outcome. It is tried again soon, as long as the lease lasts.
    pub(crate) fn renewal_failed(self: &Arc<Self>, sent_at: Moment, error: &BackendError) {
        let now = Moment::now();
        let (is_renewal, valid_for) = {
            let mut state = self.state();
            if state.phase != Phase::Held {
                return;
            }
            // The jitter keeps the clients of a store that has just come back from all asking at once.
            let pause = state.lease.retry_pause().mul_f64(0.5 + fastrand::f64() / 2.0);
            let is_renewal = state.lease.request_failed(sent_at, now, pause);
            self.unseat(&mut state);
            self.seat(&mut state, now);
            (is_renewal, state.lease.valid_until().since(now))
        };
        if is_renewal {
            self.tell_renew_failed(error, valid_for);
        }
    }

    /// Tells that a renewal stayed unanswered for as long as it was waited for.
    pub(crate) fn renewal_unanswered(&self, now: Moment) {
        if self.terms.lease.renews && !self.engine().observers.is_empty() {
            let left = self.valid_until().since(now);
            self.tell_renew_failed(&self.engine().unanswered(), left);
        }
    }

    fn tell_renew_failed(&self, error: &BackendError, valid_for: Duration) {
        let key = self.claim.key().as_str();
        self.engine().tell(|| LockEvent::RenewFailed { key, error, valid_for });
    }

    fn seat(self: &Arc<Self>, state: &mut State, now: Moment) {
        let (at, renewal) = match state.lease.due(now) {
            Due::At(at) => (at, at < state.lease.valid_until()),
            Due::Renew(_) | Due::Look(_) => (now, true),
            Due::Over(_) => (now, false),
        };
        state.seat = Some(self.engine().keeper.seat(at, renewal, Arc::clone(self), now));
    }

    fn unseat(&self, state: &mut State) {
        if let Some(seat) = state.seat.take() {
            self.engine().keeper.unseat(seat);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A claim that its holder is done with, and the turn that goes with it. It counts as held until this is dropped, so
/// that closing waits for it.
#[derive(Debug)]
pub(crate) struct Ending {
    held: Option<Arc<HeldClaim>>,
    turn: Option<Turn>,
    fenced: bool,
    /// It may still be on the keeper's schedule.
    seated: bool,
    /// What has become of it is known, and counted.
    settled: bool,
}

impl Ending {
    /// Passes the claim to the next local caller, without the store, if that is allowed and somebody wants it. Otherwise it
    /// comes back, and the keeper has nothing to do with it any more.
    pub(crate) fn hand_over(mut self) -> Option<Self> {
        let held = self.held.take()?;
        let handed_over =
            held.slot.hand_over(&held.terms, |owner| held.begin_again(&mut self.turn, owner));
        if handed_over {
            return None;
        }
        held.unseat_for_good();
        self.seated = false;
        self.held = Some(held);
        Some(self)
    }

    /// The claim as its release needs it.
    pub(crate) fn claim(&self) -> Claim {
        self.held().claim_to_release().with_fenced(self.fenced)
    }

    /// The turn, to be passed on when the store has answered.
    pub(crate) fn take_turn(&mut self) -> Option<Turn> {
        self.turn.take()
    }

    /// Notes that the claim holds nothing any more.
    pub(crate) fn settle(&mut self) {
        self.settled = true;
    }

    /// Notes that the store could not be made to free the claim, and that this has been told.
    pub(crate) fn left_to_lease(&mut self) {
        self.settled = true;
        self.held().engine().endings_left.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn held(&self) -> &Arc<HeldClaim> {
        self.held.as_ref().expect("the claim is here unless it was handed over")
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // Not handed over. Usually given back; without a runtime, left to its lease.
        if let Some(held) = self.held.take() {
            if self.seated {
                held.unseat_for_good();
            }
            let engine = held.engine();
            if !self.settled {
                // The backend has panicked, or the runtime is gone.
                engine.leave_to_lease(held.claim.key());
                engine.endings_left.fetch_add(1, Ordering::AcqRel);
            }
            engine.held.leave();
        }
    }
}

impl fmt::Debug for HeldClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldClaim")
            .field("key", self.claim.key())
            .field("token", &self.first_token)
            .finish_non_exhaustive()
    }
}
