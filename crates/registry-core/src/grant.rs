//! One active grant: its lease, its local holder, and its end.
//!
//! It ends by the last guard ([`ActiveGrant::end`]) or by loss
//! ([`ActiveGrant::lose`]), whichever comes first. A hand-over reverts an end by the last
//! guard, and passes the claim to the next local caller.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{Claim, Grant};
use crate::clock::Moment;
use crate::engine::Engine;
use crate::error::{BackendError, LostReason};
use crate::event::LockEvent;
use crate::fencing::FencingToken;
use crate::guard::Hold;
use crate::guard::LockGuard;
use crate::invalidation::Epoch;
use crate::lease::{Due, Lease};
use crate::local_lock::{LocalLock, LocalPermit};
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::owner::Owner;
use crate::release::{PassedOnAfterRelease, PendingRelease, release_in_background};
use crate::schedule::{LastTimerKey, Renewable, RenewerAction, TimerKey};

/// The state of an acquisition that passes to the active grant.
pub(crate) type ClaimParts = (LocalPermit, Claim, Arc<Terms>);

pub(crate) struct ActiveGrant {
    claim: Claim,
    terms: Arc<Terms>,
    local_lock: Arc<LocalLock>,
    first_token: FencingToken,
    granted_at: Moment,
    /// Other processes want the key.
    contended: bool,
    /// The number of attempts of this claim with an unknown outcome. One of them may still reach
    /// the store after the release.
    unknown_attempts: u32,
    /// The end of the lease, for readers that must not lock `state`. `PAST` once the
    /// claim is lost.
    valid_until: AtomicI64,
    lost: Notify,
    /// A future waits for the loss.
    watched: AtomicBool,
    state: Mutex<GrantState>,
}

struct GrantState {
    phase: GrantPhase,
    lease: Lease,
    /// Present while the claim is held. Ending the claim takes it.
    permit: Option<LocalPermit>,
    timer: Option<TimerKey>,
    hand_overs: u32,
    /// A fenced write may be open. The store cannot distinguish it from a write of the next local
    /// holder.
    fenced: bool,
    /// The store reported the loss of the claim while it was ending.
    gone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GrantPhase {
    Held,
    Ending,
    Lost(LostReason),
}

impl ActiveGrant {
    /// Creates the active grant. Returns the local permit and the claim if the lease was over
    /// before the grant arrived.
    pub(crate) fn take(
        mut permit: LocalPermit,
        claim: Claim,
        terms: Arc<Terms>,
        grant: Grant,
        sent_at: Moment,
        epoch_at_send: Epoch,
        unknown_attempts: u32,
    ) -> Result<Arc<Self>, Box<ClaimParts>> {
        let now = Moment::now_after(sent_at);
        let mut lease = Lease::granted(terms.lease, sent_at, grant.lease, now);
        if matches!(lease.due(now), Due::Over(_)) {
            return Err(Box::new((permit, claim, terms)));
        }
        if let Some(after) = permit.local_lock().engine().verify_after() {
            lease.verify_first_at(now.after(after));
        }
        permit.on_granted(now);
        let local_lock = Arc::clone(permit.local_lock());
        let held = Arc::new(Self {
            claim,
            terms,
            first_token: grant.token,
            granted_at: now,
            contended: permit.contention.as_ref().is_some_and(|it| it.is_contended()),
            unknown_attempts,
            valid_until: AtomicI64::new(lease.valid_until().to_bits()),
            lost: Notify::new(),
            watched: false.into(),
            state: Mutex::new(GrantState {
                phase: GrantPhase::Held,
                lease,
                permit: Some(permit),
                timer: None,
                hand_overs: 0,
                fenced: false,
                gone: false,
            }),
            local_lock,
        });
        held.engine().active_grants.enter();
        held.set_timer(&mut held.state(), now);
        // After scheduling: an invalidation that arrives from here on finds the claim in the
        // schedule.
        if held.local_lock.epoch() != epoch_at_send {
            Arc::clone(&held).invalidate(now);
        }
        Ok(held)
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// Returns the claim for its release, with the number of tokens that its holders have used.
    pub(crate) fn claim_to_release(&self) -> Claim {
        let used = self.state().hand_overs.saturating_add(1);
        self.claim.clone().with_token_block(used)
    }

    pub(crate) fn local_lock(&self) -> &Arc<LocalLock> {
        &self.local_lock
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.local_lock.engine()
    }

    pub(crate) fn granted_at(&self) -> Moment {
        self.granted_at
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment::from_bits(self.valid_until.load(Ordering::Acquire))
    }

    /// Returns the number of attempts that the release may have to free: those of unknown outcome
    /// and the granted one. Zero if no outcome is unknown.
    pub(crate) fn unknown_attempts_at_release(&self) -> u32 {
        if self.unknown_attempts == 0 { 0 } else { self.unknown_attempts + 1 }
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
                GrantPhase::Lost(reason) => return Some(reason),
                GrantPhase::Ending => return None,
                GrantPhase::Held => state.lease.due(now),
            }
        };
        if let Due::Over(reason) = due
            && self.lose(reason)
        {
            return Some(reason);
        }
        match self.state().phase {
            GrantPhase::Lost(reason) => Some(reason),
            GrantPhase::Held | GrantPhase::Ending => None,
        }
    }

    /// Resolves whenever the claim may have been lost; the caller then checks [`loss`](Self::loss).
    /// First enable the future, then call [`announce_watcher`](Self::announce_watcher).
    pub(crate) fn loss_notified(&self) -> tokio::sync::futures::Notified<'_> {
        self.lost.notified()
    }

    /// Requests a notification of a loss. If the swap in `notify_loss` comes first, the caller's
    /// next check sees the loss. Otherwise `notify_loss` sees this swap and notifies.
    pub(crate) fn announce_watcher(&self) {
        self.watched.swap(true, Ordering::AcqRel);
    }

    /// Notifies the futures that wait for a loss.
    pub(crate) fn notify_loss(&self) {
        if self.watched.swap(false, Ordering::AcqRel) {
            self.lost.notify_waiters();
        }
    }

    /// Ends the claim by loss. Notifies the holder first, and only then lets other callers acquire
    /// the key. Returns false if the claim had ended.
    pub(crate) fn lose(self: &Arc<Self>, reason: LostReason) -> bool {
        let (permit, lease_length, fenced) = {
            let mut state = self.state();
            if state.phase != GrantPhase::Held {
                // The claim is ending, but a hand-over could still revert that.
                state.gone |= reason == LostReason::Gone;
                return false;
            }
            state.phase = GrantPhase::Lost(reason);
            self.valid_until.store(Moment::PAST.to_bits(), Ordering::Release);
            self.cancel_timer(&mut state);
            (state.permit.take(), state.lease.length(), state.fenced)
        };
        self.notify_loss();
        let engine = self.engine();
        engine.lost.fetch_add(1, Ordering::AcqRel);
        engine.emit(|| LockEvent::Lost {
            key: self.claim.key().as_str(),
            token: self.first_token,
            reason,
        });
        let (permit_now, permit_after) = match reason {
            // The store may be unreachable. The next local caller must learn this from its own
            // request, instead of waiting behind a record that cannot be removed.
            LostReason::Expired | LostReason::Gone => (permit, None),
            LostReason::MaxHold | LostReason::Closed => (None, permit),
        };
        drop(permit_now);
        // Counts acquire attempts only. An unanswered renewal needs no clean-up, because it never
        // restores a released grant.
        let unknown_attempts = self.unknown_attempts_at_release();
        if reason != LostReason::Gone || unknown_attempts > 0 {
            release_in_background(PendingRelease {
                engine: Arc::clone(engine),
                claim: self.claim_to_release().with_fenced(fenced),
                permit: permit_after.map(LocalPermit::for_release),
                // An unanswered renewal may have just extended the lease to its full length.
                lease: lease_length,
                unknown_attempts,
                in_flight: None,
                blocked: None,
            });
        }
        // After the job is submitted: closing waits first for held claims, then for the background
        // releaser.
        engine.active_grants.leave();
        true
    }

    /// Ends the claim because its holder releases it. The lease renewer starts no renewal from here
    /// on.
    pub(crate) fn end(self: &Arc<Self>) -> Result<EndingGrant, LostReason> {
        // An inexact time is enough: the response to the release says whether the grant still
        // existed, and the receiver of a hand-over checks the lease itself.
        let now = Moment::now_coarse();
        if let Some(reason) = self.loss_at(now) {
            return Err(reason);
        }
        let mut state = self.state();
        if let GrantPhase::Lost(reason) = state.phase {
            return Err(reason);
        }
        if !mutated(Mutant::RenewAfterRelease) {
            state.phase = GrantPhase::Ending;
        }
        let (permit, fenced) = (state.permit.take(), state.fenced);
        drop(state);
        Ok(EndingGrant {
            held: Some(Arc::clone(self)),
            permit,
            fenced,
            has_timer: true,
            settled: false,
        })
    }

    /// Excludes the claim from hand-over until it ends. Fails if the claim has ended or is ending.
    /// The hand-over is decided under the same mutex.
    pub(crate) fn exclude_from_hand_over(self: &Arc<Self>) -> Result<(), LostReason> {
        if let Some(reason) = self.loss() {
            return Err(reason);
        }
        let mut state = self.state();
        match state.phase {
            GrantPhase::Held => state.fenced = true,
            GrantPhase::Lost(reason) => return Err(reason),
            // Unreachable for a guard of the current hold: the hold cannot end while that guard
            // lives.
            GrantPhase::Ending => return Err(LostReason::Gone),
        }
        Ok(())
    }

    /// Returns whether this claim may be handed over to another local caller.
    fn may_hand_over(&self, now: Moment, state: &GrantState) -> bool {
        let engine = self.engine();
        let held_for = now.since(self.granted_at);
        !state.gone
            && !state.fenced
            && !state.lease.is_suspect()
            && engine.defaults.handoffs.allow_another(state.hand_overs, held_for, self.contended)
            && !engine.capabilities.fair
            && self.terms.lease.max_hold.is_none()
            && self.terms.lease.renews
            && state.lease.length() == self.terms.lease.length
            && held_for >= self.terms.min_hold
            // The receiver must start before the lease renewer's next try.
            && self.valid_until().since(now) > self.terms.lease.length / 3
    }

    /// Reverts the end, for a hold of `owner`.
    fn resume(
        self: &Arc<Self>,
        permit: &mut Option<LocalPermit>,
        owner: Option<Owner>,
    ) -> Option<LockGuard> {
        // Read again, because the claim may have been ending for a while. Inexact, because the
        // receiver of the claim checks the exact time.
        let now = Moment::now_coarse();
        let mut state = self.state();
        if !self.may_hand_over(now, &state) {
            return None;
        }
        let token = self.first_token.checked_add(u64::from(state.hand_overs) + 1)?;
        state.phase = GrantPhase::Held;
        state.permit = permit.take();
        state.hand_overs += 1;
        if state.timer.is_none() {
            self.set_timer(&mut state, now);
        }
        drop(state);
        Some(Hold::first_guard(Arc::clone(self), token, owner))
    }

    /// Removes the claim from the lease renewer's schedule.
    fn cancel_timer_for_good(&self) {
        if !mutated(Mutant::RenewAfterRelease) {
            self.cancel_timer(&mut self.state());
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

    /// Records that a renewal sent at `sent_at` was granted.
    pub(crate) fn renewed(self: &Arc<Self>, sent_at: Moment, granted: Duration) {
        let now = Moment::now();
        let valid_for = {
            let mut state = self.state();
            if state.phase != GrantPhase::Held {
                return;
            }
            // A lease that was over before the response stays over: its holder may have been
            // notified already.
            if matches!(state.lease.due(now), Due::Over(_)) {
                None
            } else {
                state.lease.renewed(sent_at, granted);
                self.valid_until.store(state.lease.valid_until().to_bits(), Ordering::Release);
                self.cancel_timer(&mut state);
                self.set_timer(&mut state, now);
                Some(state.lease.valid_until().since(now))
            }
        };
        match valid_for {
            Some(valid_for) => self
                .engine()
                .emit(|| LockEvent::Renewed { key: self.claim.key().as_str(), valid_for }),
            None => {
                self.loss();
            }
        }
    }

    fn emit_renew_failed(&self, error: &BackendError, valid_for: Duration) {
        let key = self.claim.key().as_str();
        self.engine().emit(|| LockEvent::RenewFailed { key, error, valid_for });
    }

    fn set_timer(self: &Arc<Self>, state: &mut GrantState, now: Moment) {
        let (at, renewal) = match state.lease.due(now) {
            Due::At(at) => (at, at < state.lease.valid_until()),
            Due::Renew(_) | Due::Verify(_) => (now, true),
            Due::Over(_) => (now, false),
        };
        let this: Arc<dyn Renewable> = Arc::<Self>::clone(self);
        state.timer = Some(self.engine().schedule.set(at, renewal, this, now));
    }

    fn cancel_timer(&self, state: &mut GrantState) {
        if let Some(timer) = state.timer.take() {
            self.engine().schedule.cancel(timer);
        }
    }

    fn state(&self) -> MutexGuard<'_, GrantState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Renewable for ActiveGrant {
    fn claim(&self) -> &Claim {
        &self.claim
    }

    fn last_timer(&self) -> &LastTimerKey {
        &self.local_lock.timer
    }

    fn lose(self: Arc<Self>, reason: LostReason) -> bool {
        Self::lose(&self, reason)
    }

    fn invalidate(self: Arc<Self>, now: Moment) {
        let mut state = self.state();
        // A claim that is ending only records it: `may_hand_over` then refuses a hand-over.
        if state.lease.invalidated(now) && state.phase == GrantPhase::Held {
            self.cancel_timer(&mut state);
            self.set_timer(&mut state, now);
        }
    }

    fn next_action(self: Arc<Self>, timer: TimerKey, now: Moment) -> RenewerAction {
        let mut state = self.state();
        if state.timer != Some(timer) {
            // The claim was rescheduled in the meantime.
            return RenewerAction::Nothing;
        }
        self.cancel_timer(&mut state);
        if state.phase != GrantPhase::Held {
            return RenewerAction::Nothing;
        }
        match state.lease.due(now) {
            Due::Over(reason) => RenewerAction::Lose(reason),
            Due::At(_) => {
                self.set_timer(&mut state, now);
                RenewerAction::Nothing
            }
            due @ (Due::Renew(requested) | Due::Verify(requested)) => {
                // Several tries must fit between the first renewal and the end of the lease.
                let operation_timeout =
                    self.engine().defaults.operation_timeout.min(state.lease.length() / 6);
                let unanswered = if matches!(due, Due::Renew(_)) {
                    state.lease.renewal_sent(now, operation_timeout)
                } else {
                    state.lease.verification_sent(now, operation_timeout)
                };
                self.set_timer(&mut state, now);
                RenewerAction::Renew {
                    requested,
                    is_verification: matches!(due, Due::Verify(_)),
                    unanswered,
                }
            }
        }
    }

    fn renew_early(self: Arc<Self>, now: Moment, together: bool) -> Option<Duration> {
        let mut state = self.state();
        if state.phase != GrantPhase::Held {
            return None;
        }
        let requested = state.lease.joins(now, together)?;
        let operation_timeout =
            self.engine().defaults.operation_timeout.min(state.lease.length() / 6);
        state.lease.renewal_sent(now, operation_timeout);
        self.cancel_timer(&mut state);
        self.set_timer(&mut state, now);
        Some(requested)
    }

    fn confirmed(self: Arc<Self>, sent_at: Moment, granted: Duration) {
        let is_renewal = {
            let mut state = self.state();
            let is_renewal = state.lease.confirmed(sent_at);
            if !is_renewal && state.phase == GrantPhase::Held {
                self.cancel_timer(&mut state);
                self.set_timer(&mut state, Moment::now());
            }
            is_renewal
        };
        // A claim that is verified but not renewed keeps the end of its lease.
        if is_renewal {
            self.renewed(sent_at, granted);
        }
    }

    fn renewal_failed(self: Arc<Self>, sent_at: Moment, error: &BackendError) {
        let now = Moment::now();
        let (is_renewal, valid_for) = {
            let mut state = self.state();
            if state.phase != GrantPhase::Held {
                return;
            }
            // Jittered, so that clients do not all retry at once when a store is back.
            let pause = state.lease.retry_pause().mul_f64(0.5 + fastrand::f64() / 2.0);
            let is_renewal = state.lease.request_failed(sent_at, now, pause);
            self.cancel_timer(&mut state);
            self.set_timer(&mut state, now);
            (is_renewal, state.lease.valid_until().since(now))
        };
        if is_renewal {
            self.emit_renew_failed(error, valid_for);
        }
    }

    fn renewal_unanswered(&self, now: Moment) {
        if self.terms.lease.renews && !self.engine().observers.is_empty() {
            let left = self.valid_until().since(now);
            self.emit_renew_failed(&self.engine().no_response_error(), left);
        }
    }
}

/// A claim that its holder has released, with its local permit, until it is handed over or released
/// in the store. The claim counts as active until this is dropped, so that closing waits for it.
#[derive(Debug)]
pub(crate) struct EndingGrant {
    held: Option<Arc<ActiveGrant>>,
    permit: Option<LocalPermit>,
    fenced: bool,
    /// The claim may still be in the lease renewer's schedule.
    has_timer: bool,
    /// The outcome is known and counted.
    settled: bool,
}

impl EndingGrant {
    /// Hands the claim over to the next local caller, without a request to the store, if that is
    /// allowed and a caller waits. Otherwise removes the claim from the lease renewer's schedule
    /// and returns it.
    pub(crate) fn hand_over(mut self) -> Option<Self> {
        let held = self.held.take()?;
        let handed_over =
            held.local_lock.hand_over(&held.terms, |owner| held.resume(&mut self.permit, owner));
        if handed_over {
            return None;
        }
        held.cancel_timer_for_good();
        self.has_timer = false;
        self.held = Some(held);
        Some(self)
    }

    /// Returns the claim for its release.
    pub(crate) fn claim(&self) -> Claim {
        self.held().claim_to_release().with_fenced(self.fenced)
    }

    /// Takes the local permit, to be passed on after the store's response.
    pub(crate) fn take_permit(&mut self) -> Option<Box<dyn PassedOnAfterRelease>> {
        self.permit.take().map(LocalPermit::for_release)
    }

    /// Records that the claim holds nothing any more.
    pub(crate) fn settle(&mut self) {
        self.settled = true;
    }

    /// Records that the claim could not be released: the end of its lease frees it. The caller has
    /// already emitted the event.
    pub(crate) fn left_to_lease(&mut self) {
        self.settled = true;
        self.held().engine().unreleased_claims.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn held(&self) -> &Arc<ActiveGrant> {
        self.held.as_ref().expect("the claim is here unless it was handed over")
    }
}

impl Drop for EndingGrant {
    fn drop(&mut self) {
        // Not reached after a hand-over. Usually the claim has been released. Without a runtime,
        // the end of its lease frees it.
        if let Some(held) = self.held.take() {
            if self.has_timer {
                held.cancel_timer_for_good();
            }
            let engine = held.engine();
            if !self.settled {
                // The backend has panicked, or the runtime is gone.
                engine.leave_to_lease(held.claim.key());
                engine.unreleased_claims.fetch_add(1, Ordering::AcqRel);
            }
            engine.active_grants.leave();
        }
    }
}

impl fmt::Debug for ActiveGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActiveGrant")
            .field("key", self.claim.key())
            .field("token", &self.first_token)
            .finish_non_exhaustive()
    }
}
