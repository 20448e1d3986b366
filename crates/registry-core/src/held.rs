//! One active grant: its lease, its local holder, and its end.
//!
//! It ends exactly once: by the last guard ([`HeldClaim::end`]) or by loss ([`HeldClaim::lose`]),
//! whichever comes first. A hand-over reverts the end and passes the claim to the next local
//! caller.

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
use crate::hold::Hold;
use crate::invalidation::NewsMark;
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
    /// The number of attempts of this claim with an unknown outcome. One of them may still reach
    /// the store after the release.
    stray_attempts: u32,
    /// The end of the lease, for readers that must not lock `state`. `PAST` once the lease has
    /// ended.
    valid_until: AtomicI64,
    lost: Notify,
    /// A future waits for the loss.
    watched: AtomicBool,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    lease: Lease,
    /// Present while the claim is held. Ending the claim takes it.
    turn: Option<Turn>,
    seat: Option<Seat>,
    handovers: u32,
    /// A fenced write may be open. The store cannot distinguish it from a write of the next local
    /// holder.
    fenced: bool,
    /// The store reported the loss of the claim while it was ending.
    gone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Held,
    Ending,
    Lost(LostReason),
}

/// What the lease renewer must do for a claim.
pub(crate) enum Tick {
    Nothing,
    Renew {
        ask: Duration,
        /// Not because of the time, but to verify that the claim is still held.
        is_look: bool,
        /// The previous renewal had no response.
        unanswered: bool,
    },
    Lose(LostReason),
}

impl HeldClaim {
    /// Creates the active grant. Returns the local permit and the claim if the lease was over
    /// before the grant arrived.
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
        if let Some(after) = turn.slot().engine().verify_after() {
            lease.look_first_at(now.after(after));
        }
        turn.taken(now);
        let slot = Arc::clone(turn.slot());
        let held = Arc::new(Self {
            claim,
            terms,
            first_token: grant.token,
            granted_at: now,
            contended: turn.contention.as_ref().is_some_and(|it| it.is_contended()),
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
        // After scheduling: an invalidation that arrives from here on finds the claim in the
        // schedule.
        if held.slot.news() != news_then {
            held.hear(now);
        }
        Ok(held)
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// Returns the claim for its release, with the number of tokens that its holders have used.
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

    /// Returns how many attempts of this claim the release may have to free, including the granted
    /// one. Zero if the granted one is the only one.
    pub(crate) fn stray_attempts_at_release(&self) -> u32 {
        if self.stray_attempts == 0 { 0 } else { self.stray_attempts + 1 }
    }

    /// Returns the reason of the loss. Also detects a lease that has run out unnoticed.
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

    /// Resolves whenever the claim may have been lost; the caller then checks [`loss`](Self::loss).
    /// First enable the future, then call [`announce_watcher`](Self::announce_watcher).
    pub(crate) fn lost_hint(&self) -> tokio::sync::futures::Notified<'_> {
        self.lost.notified()
    }

    /// Requests a notification of a loss. If the swap in `hint_loss` comes first, the caller's next
    /// check sees the loss. Otherwise `hint_loss` sees this swap and notifies.
    pub(crate) fn announce_watcher(&self) {
        self.watched.swap(true, Ordering::AcqRel);
    }

    /// Notifies the futures that wait for a loss.
    pub(crate) fn hint_loss(&self) {
        if self.watched.swap(false, Ordering::AcqRel) {
            self.lost.notify_waiters();
        }
    }

    /// Ends the claim by loss. Notifies the holder first, and only then lets other callers acquire
    /// the key. Returns false if the claim had ended.
    pub(crate) fn lose(self: &Arc<Self>, reason: LostReason) -> bool {
        let (turn, lease_length, fenced) = {
            let mut state = self.state();
            if state.phase != Phase::Held {
                // The claim is ending, but a hand-over could still revert that.
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
            // The store may be unreachable. The next local caller must learn this from its own
            // request, instead of waiting behind a record that cannot be removed.
            LostReason::Expired | LostReason::Gone => (turn, None),
            LostReason::MaxHold | LostReason::Closed => (None, turn),
        };
        drop(turn_now);
        // Counts acquire attempts only. An unanswered renewal needs no clean-up, because it never
        // restores a released grant.
        let stray_attempts = self.stray_attempts_at_release();
        if reason != LostReason::Gone || stray_attempts > 0 {
            give_back_in_background(GivingBack {
                engine: Arc::clone(engine),
                claim: self.claim_to_release().with_fenced(fenced),
                turn: turn_after,
                // An unanswered renewal may have just extended the lease to its full length.
                lease: lease_length,
                stray_attempts,
                under_way: None,
                blocked: None,
            });
        }
        // After the job is submitted: closing waits first for held claims, then for the background
        // releaser.
        engine.held.leave();
        true
    }

    /// Ends the claim because its holder releases it. The lease renewer starts no renewal from here
    /// on.
    pub(crate) fn end(self: &Arc<Self>) -> Result<Ending, LostReason> {
        // An inexact time is enough: the response to the release says whether the grant still
        // existed, and the receiver of a hand-over checks the lease itself.
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

    /// Excludes the claim from hand-over until it ends. Fails if the claim has ended or is ending.
    /// The end decides about a hand-over under the same mutex.
    pub(crate) fn exclude_from_hand_over(self: &Arc<Self>) -> Result<(), LostReason> {
        if let Some(reason) = self.loss() {
            return Err(reason);
        }
        let mut state = self.state();
        match state.phase {
            Phase::Held => state.fenced = true,
            Phase::Lost(reason) => return Err(reason),
            // A guard keeps its hold from ending, so only a guard of an earlier hold could reach
            // this.
            Phase::Ending => return Err(LostReason::Gone),
        }
        Ok(())
    }

    /// Returns whether this claim may be handed over to another local caller.
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
            // Enough of the lease must remain for the next holder to start before the lease
            // renewer's next try.
            && self.valid_until().since(now) > self.terms.lease.length / 3
    }

    /// Reverts the end, for a hold of `owner`.
    fn begin_again(
        self: &Arc<Self>,
        turn: &mut Option<Turn>,
        owner: Option<Owner>,
    ) -> Option<LockGuard> {
        // Read again, because the claim may have been ending for a while. Inexact, because the
        // receiver of the claim checks the exact time.
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

    /// Removes the claim from the lease renewer's schedule.
    fn unseat_for_good(&self) {
        if !mutated(Mutant::RenewAfterRelease) {
            self.unseat(&mut self.state());
        }
    }

    /// Returns the time until this claim may be freed.
    pub(crate) fn min_hold_left(&self) -> Duration {
        if self.terms.min_hold.is_zero() {
            return Duration::ZERO;
        }
        self.granted_at.after(self.terms.min_hold).since(Moment::now())
    }

    /// Returns the length of a lease of this claim.
    pub(crate) fn lease_length(&self) -> Duration {
        self.state().lease.length()
    }

    /// Makes later renewals request `length`.
    pub(crate) fn set_lease_length(&self, length: Duration) {
        self.state().lease.set_length(length);
    }

    /// Records an invalidation of the key, and schedules a verification of the claim.
    pub(crate) fn hear(self: &Arc<Self>, now: Moment) {
        let mut state = self.state();
        // A claim that is ending only records it: `may_be_handed_over` then refuses a hand-over.
        if state.lease.heard(now) && state.phase == Phase::Held {
            self.unseat(&mut state);
            self.seat(&mut state, now);
        }
    }

    /// Returns what the lease renewer must do for this claim, which is due at `seat`.
    pub(crate) fn tick(self: &Arc<Self>, seat: Seat, now: Moment) -> Tick {
        let mut state = self.state();
        if state.seat != Some(seat) {
            // The claim was rescheduled in the meantime.
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

    /// Returns the lease to request now, in a call that renews other claims. `together` means that
    /// one more claim costs nothing. Returns `None` if this claim is not to be renewed now.
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

    /// Records the response to the lease renewer's request of `sent_at`: the claim is still held.
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
        // A claim that is verified but not renewed keeps the end of its lease.
        if is_renewal {
            self.renewed(sent_at, granted);
        }
    }

    /// Records that a renewal sent at `sent_at` was granted.
    pub(crate) fn renewed(self: &Arc<Self>, sent_at: Moment, granted: Duration) {
        let now = Moment::now();
        let valid_for = {
            let mut state = self.state();
            if state.phase != Phase::Held {
                return;
            }
            // A lease that was over before the response stays over: its holder may have been
            // notified already.
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

    /// Records that a renewal failed with an unknown outcome. It is retried soon, as long as the
    /// lease lasts.
    pub(crate) fn renewal_failed(self: &Arc<Self>, sent_at: Moment, error: &BackendError) {
        let now = Moment::now();
        let (is_renewal, valid_for) = {
            let mut state = self.state();
            if state.phase != Phase::Held {
                return;
            }
            // Jittered, so that clients do not all retry at once when a store is back.
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

    /// Emits an event for a renewal that had no response until its retry.
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

/// A pending release: a claim that its holder has released, with its local permit. The claim counts
/// as held until this is dropped, so that closing waits for it.
#[derive(Debug)]
pub(crate) struct Ending {
    held: Option<Arc<HeldClaim>>,
    turn: Option<Turn>,
    fenced: bool,
    /// The claim may still be in the lease renewer's schedule.
    seated: bool,
    /// The outcome is known and counted.
    settled: bool,
}

impl Ending {
    /// Hands the claim over to the next local caller, without a request to the store, if that is
    /// allowed and a caller waits. Otherwise removes the claim from the lease renewer's schedule
    /// and returns it.
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

    /// Returns the claim for its release.
    pub(crate) fn claim(&self) -> Claim {
        self.held().claim_to_release().with_fenced(self.fenced)
    }

    /// Takes the local permit, to be passed on after the store's response.
    pub(crate) fn take_turn(&mut self) -> Option<Turn> {
        self.turn.take()
    }

    /// Records that the claim holds nothing any more.
    pub(crate) fn settle(&mut self) {
        self.settled = true;
    }

    /// Records that only the lease frees the claim. The caller has already emitted the event for
    /// this.
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
        // Reached unless the claim was handed over. Usually it has been released; without a
        // runtime, only its lease frees it.
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
