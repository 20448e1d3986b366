//! One active grant: its lease, its state, and its end.
//!
//! A grant ends when its last guard is removed ([`ActiveGrant::end_hold`]), when it is lost
//! ([`ActiveGrant::lose`]), or when its mode is converted ([`ActiveGrant::convert`]), whichever is
//! first. After `end_hold`, a hand-over can revert the end and pass the claim to the next local
//! caller.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{Claim, Grant};
use crate::clock::Moment;
use crate::engine::Engine;
use crate::error::{BackendError, LostReason};
use crate::event::{LockEvent, ReleaseEnd};
use crate::fencing::FencingToken;
use crate::guard::{Hold, LockGuard};
use crate::invalidation::Epoch;
use crate::lease::{Due, Lease, LeaseOptions};
use crate::local_lock::{LocalLock, LocalPermit};
use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};
use crate::observed::{ObservedHolds, ObservedRelease};
use crate::options::ClaimOptions;
use crate::owner::Owner;
use crate::release::{PendingRelease, ReleasePermit, possible_grants, release_in_background};
use crate::schedule::{EntryId, LatestEntryId, Renewable, RenewerAction};

/// The parts of a pending claim that the active grant takes over.
pub(crate) type ClaimParts = (LocalPermit, Claim, Arc<ClaimOptions>);

pub(crate) struct ActiveGrant {
    claim: Claim,
    options: Arc<ClaimOptions>,
    local_lock: Arc<LocalLock>,
    first_token: FencingToken,
    granted_at: Moment,
    /// Other processes compete for the key.
    contended: bool,
    /// The number of attempts of this claim with an unknown outcome. Each may still reach the store
    /// after the release.
    unknown_attempts: u32,
    /// A copy of the end of the lease, so that a reader need not lock `state`. `PAST` once the
    /// claim is lost.
    valid_until: AtomicI64,
    lost: Notify,
    /// A future waits for a notification of `lost`.
    has_loss_waiter: AtomicBool,
    observed_holds: ObservedHolds,
    state: Mutex<GrantState>,
}

/// The initial state of an active grant: from the store's response, or from the grant that was
/// converted.
struct InitialState {
    local_lock: Arc<LocalLock>,
    granted_at: Moment,
    contended: bool,
    unknown_attempts: u32,
    /// The invalidation epoch of the key when the request was sent.
    epoch_at_send: Epoch,
    /// See [`GrantState::extra_tokens_used`].
    extra_tokens_used: u32,
    /// See [`GrantState::fenced`].
    fenced: bool,
    min_hold_end: Moment,
    /// See [`GrantState::longest_lease`].
    longest_lease: Duration,
}

struct GrantState {
    phase: GrantPhase,
    lease: Lease,
    /// The longest lease that a request of this claim has stated. The store may have granted it,
    /// and never shortens a lease.
    longest_lease: Duration,
    /// The local permit of an exclusive grant in the phase `Held`. `None` for other modes, and for
    /// a grant that was converted to exclusive.
    permit: Option<LocalPermit>,
    timer: Option<EntryId>,
    /// The number of tokens of the claim's [`token_block`](Claim::token_block) that were used after
    /// `first_token`. Each hand-over and each reader that joins uses one.
    extra_tokens_used: u32,
    /// The number of holds. More than one only in a shared grant.
    holds: u32,
    /// A fenced write was begun and may still be open, or a conversion was dropped. After a
    /// hand-over, either could take effect during the hold of the next local caller. The claim is
    /// therefore not handed over.
    fenced: bool,
    /// The store reported in the phase `Ending` that the claim is gone.
    gone_while_ending: bool,
    /// The invalidation epoch of the key at the grant, or at the last invalidation that reached
    /// this grant.
    seen_epoch: Epoch,
    /// `PAST` without a `min_hold`.
    min_hold_end: Moment,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GrantPhase {
    Held,
    Ending,
    Lost(LostReason),
}

/// The interval between checks for the loss of a claim whose lease ended during its release.
const LOSS_CHECK_INTERVAL: Duration = Duration::from_millis(10);

impl ActiveGrant {
    /// Creates the active grant and schedules its renewal. Returns `permit`, `claim` and `options`
    /// if the lease was over before the store's response arrived.
    pub(crate) fn start(
        mut permit: LocalPermit,
        claim: Claim,
        options: Arc<ClaimOptions>,
        granted: Grant,
        sent_at: Moment,
        epoch_at_send: Epoch,
        unknown_attempts: u32,
    ) -> Result<Arc<Self>, Box<ClaimParts>> {
        let now = Moment::now_reusing_check_of(sent_at);
        let lease = Lease::from_grant(options.lease, sent_at, granted.lease, now);
        if matches!(lease.due(now), Due::Over(_)) {
            return Err(Box::new((permit, claim, options)));
        }
        permit.on_granted(now);
        let initial = InitialState {
            local_lock: Arc::clone(permit.local_lock()),
            granted_at: now,
            contended: permit.contention.as_ref().is_some_and(|it| it.is_contended()),
            unknown_attempts,
            epoch_at_send,
            extra_tokens_used: 0,
            fenced: false,
            min_hold_end: if options.min_hold.is_zero() {
                Moment::PAST
            } else {
                now.after(options.min_hold)
            },
            longest_lease: claim.lease(),
        };
        Ok(Self::activate(initial, Some(permit), claim, options, granted.token, lease, now))
    }

    /// Replaces this grant after the store has converted it to the mode of `claim`. Fails if this
    /// grant has ended, or its lease was over before the store's response arrived.
    pub(crate) fn convert(
        self: &Arc<Self>,
        claim: Claim,
        granted: Grant,
        sent_at: Moment,
        epoch_at_send: Epoch,
    ) -> Result<Arc<Self>, LostReason> {
        let now = Moment::now();
        if let Some(reason) = self.loss_at(now) {
            return Err(reason);
        }
        let mut options = ClaimOptions::clone(&self.options);
        options.mode = claim.mode();
        let (permit, extra_tokens_used, fenced, min_hold_end, longest_lease) = {
            let mut state = self.state();
            match state.phase {
                GrantPhase::Held => state.phase = GrantPhase::Ending,
                GrantPhase::Lost(reason) => return Err(reason),
                GrantPhase::Ending => return Err(LostReason::Gone),
            }
            self.cancel_timer(&mut state);
            options.lease.length = state.lease.length();
            (
                state.permit.take(),
                state.extra_tokens_used,
                state.fenced,
                state.min_hold_end,
                state.longest_lease,
            )
        };
        // `max_hold` counts from the first grant, so the time since then is subtracted.
        let held_for = now.since(self.granted_at);
        let lease_options = LeaseOptions {
            max_hold: options.lease.max_hold.map(|max| max.saturating_sub(held_for)),
            ..options.lease
        };
        let lease = Lease::from_grant(lease_options, sent_at, granted.lease, now);
        let initial = InitialState {
            local_lock: Arc::clone(&self.local_lock),
            granted_at: self.granted_at,
            contended: self.contended,
            unknown_attempts: self.unknown_attempts,
            epoch_at_send,
            // A weaker mode keeps the block of tokens, of which some may have been used.
            extra_tokens_used: if granted.token == self.first_token {
                extra_tokens_used
            } else {
                0
            },
            fenced,
            min_hold_end,
            longest_lease,
        };
        let options = Arc::new(options);
        let grant = Self::activate(initial, permit, claim, options, granted.token, lease, now);
        self.engine().active_grants.leave();
        Ok(grant)
    }

    /// Creates an active grant from `initial` and schedules its renewal. Shared by
    /// [`start`](Self::start) and [`convert`](Self::convert).
    fn activate(
        initial: InitialState,
        permit: Option<LocalPermit>,
        claim: Claim,
        options: Arc<ClaimOptions>,
        first_token: FencingToken,
        mut lease: Lease,
        now: Moment,
    ) -> Arc<Self> {
        let InitialState {
            local_lock,
            granted_at,
            contended,
            unknown_attempts,
            epoch_at_send,
            extra_tokens_used,
            fenced,
            min_hold_end,
            longest_lease,
        } = initial;
        if let Some(after) = local_lock.engine().verify_after() {
            lease.schedule_first_verification(now.after(after));
        }
        let grant = Arc::new(Self {
            claim,
            options,
            first_token,
            granted_at,
            contended,
            unknown_attempts,
            valid_until: AtomicI64::new(lease.valid_until().to_bits()),
            lost: Notify::new(),
            has_loss_waiter: false.into(),
            observed_holds: ObservedHolds::default(),
            state: Mutex::new(GrantState {
                phase: GrantPhase::Held,
                lease,
                longest_lease,
                permit,
                timer: None,
                extra_tokens_used,
                holds: 1,
                fenced,
                gone_while_ending: false,
                seen_epoch: epoch_at_send,
                min_hold_end,
            }),
            local_lock,
        });
        grant.engine().active_grants.enter();
        grant.set_timer(&mut grant.state(), now);
        if grant.claim.mode() != ClaimMode::Exclusive {
            grant.local_lock.record_concurrent_grant(&grant);
        }
        // The epochs are compared after the claim was scheduled. An earlier invalidation has
        // changed the epoch, and a later one finds the claim in the schedule.
        if grant.local_lock.invalidation_epoch() != epoch_at_send {
            Arc::clone(&grant).invalidate(now);
        }
        let mode = grant.claim.mode();
        if mode == ClaimMode::Shared {
            grant.local_lock.offer_to_readers(&grant);
        }
        grant
    }

    /// Passes the local permit of a grant that is not exclusive to the next local caller, which may
    /// compete because the store may grant other claims next to this one.
    ///
    /// Call this method after [`LocalLock::record_hold`]: waiters of the same owner then re-enter
    /// the hold, instead of receiving the permit and waiting for their own owner.
    pub(crate) fn pass_on_permit(&self) {
        if self.claim.mode() != ClaimMode::Exclusive {
            let permit = self.state().permit.take();
            drop(permit);
        }
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.claim
    }

    /// Returns the claim to pass to the release. Its token block contains only the used tokens. Its
    /// flag [`is_fenced`](Claim::is_fenced) equals [`GrantState::fenced`].
    pub(crate) fn claim_to_release(&self) -> Claim {
        let state = self.state();
        let used = state.extra_tokens_used.saturating_add(1);
        self.claim.clone().with_token_block(used).with_fenced(state.fenced)
    }

    /// Returns the claim with its current lease.
    pub(crate) fn claim_with_current_lease(&self) -> Claim {
        self.claim.clone().with_lease(self.lease_length())
    }

    /// Waits until the claim is lost, and returns the reason.
    pub(crate) async fn lost(self: &Arc<Self>) -> LostReason {
        loop {
            let notification = self.loss_notification();
            tokio::pin!(notification);
            notification.as_mut().enable();
            self.register_loss_waiter();
            if let Some(reason) = self.loss() {
                return reason;
            }
            tokio::select! {
                biased;
                () = &mut notification => {}
                () = self.wait_for_lease_end() => {}
            }
        }
    }

    /// Waits until the claim is lost or the current end of its lease has passed. A renewal may have
    /// extended the lease meanwhile.
    ///
    /// Checks for a loss at each poll: after a pause of the process, tokio may poll a task before
    /// it fires the task's timers.
    pub(crate) async fn wait_for_lease_end(self: &Arc<Self>) {
        // The lease of a claim that is being released may end without a loss. The callers call this
        // function in a loop until they are notified. `LOSS_CHECK_INTERVAL` prevents a busy loop.
        let (now, valid_until) = (Moment::now(), self.valid_until());
        let end = if now < valid_until { valid_until } else { now.after(LOSS_CHECK_INTERVAL) };
        let mut deadline = pin!(self.engine().sleep_until(end));
        poll_fn(
            |cx| {
                if self.loss().is_some() { Poll::Ready(()) } else { deadline.as_mut().poll(cx) }
            },
        )
        .await;
    }

    pub(crate) fn local_lock(&self) -> &Arc<LocalLock> {
        &self.local_lock
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.local_lock.engine()
    }

    /// Returns the token under which the store knows this grant.
    pub(crate) fn first_token(&self) -> FencingToken {
        self.first_token
    }

    /// Emits the event that a hold with `token` began, and returns the id of the hold.
    pub(crate) fn begin_observed_hold(self: &Arc<Self>, token: FencingToken) -> u64 {
        let id = self.observed_holds.begin(self.engine(), &self.claim, token);
        if let Some(reason) = self.loss() {
            self.observed_holds.end_all(self.engine(), &self.claim, reason);
        }
        id
    }

    /// Emits the event that a hold ended, unless its loss was emitted.
    pub(crate) fn end_observed_hold(&self, id: u64) {
        self.observed_holds.end(self.engine(), &self.claim, id);
    }

    pub(crate) fn granted_at(&self) -> Moment {
        self.granted_at
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment::from_bits(self.valid_until.load(Ordering::Acquire))
    }

    /// Returns [`possible_grants`](crate::release::possible_grants) of this claim.
    pub(crate) fn possible_grants(&self) -> u32 {
        possible_grants(self.unknown_attempts)
    }

    /// Returns the reason if the claim is lost. If the lease has run out unnoticed, this first ends
    /// the claim by [`lose`](Self::lose).
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

    /// Returns a future that resolves when the claim may have been lost.
    ///
    /// Enable it, then call [`register_loss_waiter`](Self::register_loss_waiter), then check
    /// [`loss`](Self::loss), in this order: otherwise a loss in between is missed.
    pub(crate) fn loss_notification(&self) -> tokio::sync::futures::Notified<'_> {
        self.lost.notified()
    }

    /// Requests a notification of a loss. If `notify_loss` swaps the flag before this call, the
    /// caller's next check of the state sees the loss. If `notify_loss` swaps the flag later, it
    /// notifies the caller.
    pub(crate) fn register_loss_waiter(&self) {
        self.has_loss_waiter.swap(true, Ordering::AcqRel);
    }

    /// Notifies the futures that wait for a loss.
    pub(crate) fn notify_loss(&self) {
        if self.has_loss_waiter.swap(false, Ordering::AcqRel) {
            self.lost.notify_waiters();
        }
    }

    /// Ends the claim because it is lost: notifies the holder, passes on the local permit, and
    /// releases a claim that the store may still have. After `MaxHold` and `Closed`, the permit
    /// passes on only after this release. Returns false if the claim has ended or is ending.
    pub(crate) fn lose(self: &Arc<Self>, reason: LostReason) -> bool {
        let (permit, longest_lease) = {
            let mut state = self.state();
            if state.phase != GrantPhase::Held {
                // In the phase `Ending`, this prevents a hand-over.
                state.gone_while_ending |= reason == LostReason::Gone;
                return false;
            }
            state.phase = GrantPhase::Lost(reason);
            self.valid_until.store(Moment::PAST.to_bits(), Ordering::Release);
            self.cancel_timer(&mut state);
            (state.permit.take(), state.longest_lease)
        };
        self.notify_loss();
        let engine = self.engine();
        engine.lost_claims.fetch_add(1, Ordering::AcqRel);
        engine.emit(|| LockEvent::Lost {
            key: self.claim.key().as_str(),
            mode: self.claim.mode(),
            token: self.first_token,
            reason,
        });
        self.observed_holds.end_all(engine, &self.claim, reason);
        let (permit_to_pass_now, permit_to_pass_after_release) = match reason {
            // After `Gone`, the record of this claim no longer exists. After `Expired`, the store
            // may be unreachable, so a release may not succeed. The next local caller sends its own
            // request instead of waiting for the release.
            LostReason::Expired | LostReason::Gone => (permit, None),
            LostReason::MaxHold | LostReason::Closed => (None, permit),
        };
        drop(permit_to_pass_now);
        // A renewal without a response needs no clean-up: it never restores a released grant.
        let possible_grants = self.possible_grants();
        if reason != LostReason::Gone || possible_grants > 0 {
            let claim = self.claim_to_release();
            release_in_background(PendingRelease {
                permit: permit_to_pass_after_release.map(LocalPermit::into_release_permit),
                // A renewal without a response may have just extended the lease to its full length.
                lease: longest_lease,
                possible_grants,
                ..PendingRelease::new(Arc::clone(engine), claim)
            });
        }
        // After the job is submitted: `close` waits first for active grants, then for jobs.
        engine.active_grants.leave();
        true
    }

    /// Ends one hold because its last guard is gone. If no other hold remains, the claim ends: the
    /// lease renewer starts no further renewal. Returns `None` if another hold remains, and the
    /// reason if the claim is lost.
    pub(crate) fn end_hold(self: &Arc<Self>) -> Result<Option<EndingGrant>, LostReason> {
        // The exact time, which includes a suspension of the host. A hand-over, and the end of one
        // of several holds, send no request whose response would show the loss.
        let now = Moment::now();
        if let Some(reason) = self.loss_at(now) {
            return Err(reason);
        }
        let mut state = self.state();
        if let GrantPhase::Lost(reason) = state.phase {
            return Err(reason);
        }
        state.holds -= 1;
        if state.holds > 0 {
            return Ok(None);
        }
        if !mutated(Mutant::RenewAfterRelease) {
            state.phase = GrantPhase::Ending;
        }
        let permit = state.permit.take();
        drop(state);
        Ok(Some(EndingGrant {
            grant: Some(Arc::clone(self)),
            permit,
            is_scheduled: true,
            has_outcome: false,
            observed: None,
        }))
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
            // Unreachable: the caller has a guard of the hold, so the hold has not ended.
            GrantPhase::Ending => return Err(LostReason::Gone),
        }
        Ok(())
    }

    /// Returns the first guard of a further hold of this shared grant for `owner`. Returns `None`
    /// if `options` differ from those of the grant, or if no further hold is allowed.
    ///
    /// The limits are those of a hand-over. Readers that follow each other without end must not
    /// keep a claim forever, because other processes cannot acquire the key meanwhile.
    pub(crate) fn join(
        self: &Arc<Self>,
        options: &ClaimOptions,
        owner: Option<Owner>,
    ) -> Option<LockGuard> {
        if *self.options != *options {
            return None;
        }
        let now = Moment::now_coarse();
        let mut state = self.state();
        let is_held = state.phase == GrantPhase::Held
            || state.phase == GrantPhase::Ending && mutated(Mutant::EndedGrantJoined);
        if !is_held || !self.may_pass_on(now, &state) {
            return None;
        }
        let token = self.first_token.checked_add(u64::from(state.extra_tokens_used) + 1)?;
        state.extra_tokens_used += 1;
        state.holds += 1;
        drop(state);
        Some(Hold::first_guard(Arc::clone(self), token, owner))
    }

    /// Returns whether this claim may be handed over to another local caller. Only exclusive claims
    /// may be handed over. With a claim of another mode, another local caller may already compete
    /// in the store, and a hand-over would overtake it.
    fn may_hand_over(&self, now: Moment, state: &GrantState) -> bool {
        self.claim.mode() == ClaimMode::Exclusive && self.may_pass_on(now, state)
    }

    /// Returns whether another local caller may use this claim.
    fn may_pass_on(&self, now: Moment, state: &GrantState) -> bool {
        let engine = self.engine();
        let held_for = now.since(self.granted_at);
        // A converted claim may have a smaller block of tokens than `hand_over_limits` allows.
        !state.gone_while_ending
            && state.extra_tokens_used.saturating_add(1) < self.claim.token_block()
            && !state.fenced
            && !state.lease.is_suspect()
            && engine.defaults.hand_over_limits.allow_another(
                state.extra_tokens_used,
                held_for,
                self.contended,
            )
            && !engine.capabilities.fair
            && !self.options.fair
            && self.options.lease.max_hold.is_none()
            && self.options.lease.renews
            && state.lease.length() == self.options.lease.length
            // The `min_hold` of the receiver would count from this grant, not from the hand-over.
            && self.options.min_hold.is_zero()
            && now >= state.min_hold_end
            // If less than a third of the lease remains, renewals have failed, and the receiver
            // would soon lose the lock.
            && self.valid_until().since(now) > self.options.lease.length / 3
    }

    /// Reverts [`end_hold`](Self::end_hold) for a hand-over. Takes `permit`, and returns the first
    /// guard of a new hold of `owner`, or `None` if the claim must not be handed over.
    fn resume(
        self: &Arc<Self>,
        permit: &mut Option<LocalPermit>,
        owner: Option<Owner>,
    ) -> Option<LockGuard> {
        // Coarse, because the receiver of the claim checks the exact time.
        let now = Moment::now_coarse();
        let mut state = self.state();
        if !self.may_hand_over(now, &state) {
            return None;
        }
        let token = self.first_token.checked_add(u64::from(state.extra_tokens_used) + 1)?;
        state.phase = GrantPhase::Held;
        state.permit = permit.take();
        state.extra_tokens_used += 1;
        state.holds = 1;
        if state.timer.is_none() {
            self.set_timer(&mut state, now);
        }
        drop(state);
        Some(Hold::first_guard(Arc::clone(self), token, owner))
    }

    /// Removes the claim from the lease renewer's schedule.
    fn unschedule(&self) {
        if !mutated(Mutant::RenewAfterRelease) {
            self.cancel_timer(&mut self.state());
        }
    }

    /// Returns whether an invalidation has not been verified yet, or the store has reported that
    /// the claim is gone while its release was beginning.
    pub(crate) fn may_be_gone(&self) -> bool {
        let state = self.state();
        // A claim that is not scheduled any more receives no invalidation.
        state.gone_while_ending
            || state.lease.is_suspect()
            || state.seen_epoch != self.local_lock.invalidation_epoch()
    }

    /// Returns the remaining time of `min_hold`.
    pub(crate) fn min_hold_left(&self) -> Duration {
        let end = self.state().min_hold_end;
        if end == Moment::PAST { Duration::ZERO } else { end.since(Moment::now()) }
    }

    /// Begins a `min_hold` now. An earlier one is not shortened.
    pub(crate) fn begin_min_hold(&self, min_hold: Duration) {
        let end = Moment::now().after(min_hold);
        let mut state = self.state();
        state.min_hold_end = state.min_hold_end.max(end);
    }

    /// Returns the lease length that renewals of this claim request.
    pub(crate) fn lease_length(&self) -> Duration {
        self.state().lease.length()
    }

    /// Returns the longest time for which the store may keep the claim without a further renewal.
    pub(crate) fn longest_lease(&self) -> Duration {
        self.state().longest_lease
    }

    /// Records that a request with this lease is about to be sent.
    pub(crate) fn on_lease_requested(&self, lease: Duration) {
        let mut state = self.state();
        state.longest_lease = state.longest_lease.max(lease);
    }

    /// Makes later renewals request `length`.
    pub(crate) fn set_lease_length(&self, length: Duration) {
        self.state().lease.set_length(length);
    }

    /// Records that a renewal sent at `sent_at` was granted.
    pub(crate) fn record_renewal(self: &Arc<Self>, sent_at: Moment, granted: Duration) {
        let now = Moment::now();
        let valid_for = {
            let mut state = self.state();
            if state.phase != GrantPhase::Held {
                return;
            }
            // A lease that was over before the response is not restored: the holder may have been
            // notified.
            if matches!(state.lease.due(now), Due::Over(_)) {
                None
            } else {
                state.lease.on_renewed(sent_at, granted);
                self.valid_until.store(state.lease.valid_until().to_bits(), Ordering::Release);
                self.cancel_timer(&mut state);
                self.set_timer(&mut state, now);
                Some(state.lease.valid_until().since(now))
            }
        };
        let (key, mode) = (self.claim.key().as_str(), self.claim.mode());
        match valid_for {
            Some(valid_for) => {
                self.engine().emit(|| LockEvent::Renewed { key, mode, valid_for });
            }
            None => {
                self.loss();
            }
        }
    }

    fn emit_renew_failed(&self, error: &BackendError, valid_for: Duration) {
        let (key, mode) = (self.claim.key().as_str(), self.claim.mode());
        self.engine().emit(|| LockEvent::RenewFailed { key, mode, error, valid_for });
    }

    fn set_timer(self: &Arc<Self>, state: &mut GrantState, now: Moment) {
        let (at, is_renewal) = match state.lease.due(now) {
            Due::At(at) => (at, at < state.lease.valid_until()),
            Due::Renew(_) | Due::Verify(_) => (now, true),
            Due::Over(_) => (now, false),
        };
        let this: Arc<dyn Renewable> = Arc::<Self>::clone(self);
        state.timer = Some(self.engine().schedule.insert(at, is_renewal, this, now));
    }

    fn cancel_timer(&self, state: &mut GrantState) {
        if let Some(timer) = state.timer.take() {
            self.engine().schedule.remove(timer);
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

    fn latest_entry_id(&self) -> &LatestEntryId {
        &self.local_lock.latest_entry_id
    }

    fn lose(self: Arc<Self>, reason: LostReason) -> bool {
        Self::lose(&self, reason)
    }

    fn invalidate(self: Arc<Self>, now: Moment) {
        let mut state = self.state();
        state.seen_epoch = self.local_lock.invalidation_epoch();
        // In the phase `Ending`, the grant needs no timer: the recorded invalidation makes
        // `may_hand_over` return false.
        if state.lease.on_invalidated(now) && state.phase == GrantPhase::Held {
            self.cancel_timer(&mut state);
            self.set_timer(&mut state, now);
        }
    }

    fn begin_due_action(self: Arc<Self>, timer: EntryId, now: Moment) -> RenewerAction {
        let mut state = self.state();
        if state.timer != Some(timer) {
            // The claim has been rescheduled since.
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
            due @ (Due::Renew(requested_lease) | Due::Verify(requested_lease)) => {
                // Short enough for several attempts between the first renewal and the end of the
                // lease.
                let operation_timeout =
                    self.engine().defaults.operation_timeout.min(state.lease.length() / 6);
                let previous_unanswered = if matches!(due, Due::Renew(_)) {
                    state.lease.on_renewal_sent(now, operation_timeout)
                } else {
                    state.lease.on_verification_sent(now, operation_timeout)
                };
                self.set_timer(&mut state, now);
                RenewerAction::Renew {
                    requested_lease,
                    is_verification: matches!(due, Due::Verify(_)),
                    previous_unanswered,
                }
            }
        }
    }

    fn begin_early_renewal(
        self: Arc<Self>,
        now: Moment,
        renews_whole_shard: bool,
    ) -> Option<Duration> {
        let mut state = self.state();
        if state.phase != GrantPhase::Held {
            return None;
        }
        let requested_lease = state.lease.batch_renewal_lease(now, renews_whole_shard)?;
        let operation_timeout =
            self.engine().defaults.operation_timeout.min(state.lease.length() / 6);
        state.lease.on_renewal_sent(now, operation_timeout);
        self.cancel_timer(&mut state);
        self.set_timer(&mut state, now);
        Some(requested_lease)
    }

    fn on_confirmed(self: Arc<Self>, sent_at: Moment, granted: Duration) {
        let is_auto_renewed = {
            let mut state = self.state();
            let is_auto_renewed = state.lease.on_confirmed(sent_at);
            if !is_auto_renewed && state.phase == GrantPhase::Held {
                self.cancel_timer(&mut state);
                self.set_timer(&mut state, Moment::now());
            }
            is_auto_renewed
        };
        // Without automatic renewal, a verification does not extend the lease.
        if is_auto_renewed {
            self.record_renewal(sent_at, granted);
        }
    }

    fn on_renewal_failed(self: Arc<Self>, sent_at: Moment, error: &BackendError) {
        let now = Moment::now();
        let (is_auto_renewed, valid_for) = {
            let mut state = self.state();
            if state.phase != GrantPhase::Held {
                return;
            }
            // Random, so that clients do not all retry at once when the store is reachable again.
            let pause = state.lease.retry_pause().mul_f64(0.5 + fastrand::f64() / 2.0);
            let is_auto_renewed = state.lease.on_request_failed(sent_at, now, pause);
            self.cancel_timer(&mut state);
            self.set_timer(&mut state, now);
            (is_auto_renewed, state.lease.valid_until().since(now))
        };
        if is_auto_renewed {
            self.emit_renew_failed(error, valid_for);
        }
    }

    fn emit_unanswered_renewal(&self, now: Moment) {
        if self.options.lease.renews && !self.engine().observers.is_empty() {
            let left = self.valid_until().since(now);
            self.emit_renew_failed(&self.engine().no_response_error(), left);
        }
    }
}

/// An active grant without guards, and its local permit, until it is handed over or released in the
/// store. The grant counts as active until this value is dropped, so that `close` waits for it.
#[derive(Debug)]
pub(crate) struct EndingGrant {
    grant: Option<Arc<ActiveGrant>>,
    permit: Option<LocalPermit>,
    /// The claim may still be in the lease renewer's schedule.
    is_scheduled: bool,
    /// The outcome of the release is recorded. If it is not, `drop` records a failure.
    has_outcome: bool,
    /// `None` without observers.
    observed: Option<ObservedRelease>,
}

impl EndingGrant {
    /// Hands the claim over to the next local caller, without a request to the store, and returns
    /// `None`. If no caller can receive the claim or a hand-over is not allowed, this removes the
    /// claim from the lease renewer's schedule and returns `self`.
    pub(crate) fn hand_over(mut self) -> Option<Self> {
        let grant = self.grant.take()?;
        // If this grant has no permit, another local caller may have the permit and compete in the
        // store.
        let handed_over = self.permit.is_some()
            && grant
                .local_lock
                .hand_over(&grant.options, |owner| grant.resume(&mut self.permit, owner));
        if handed_over {
            self.set_observed_end(ReleaseEnd::HandedOver);
            return None;
        }
        grant.unschedule();
        self.is_scheduled = false;
        self.grant = Some(grant);
        Some(self)
    }

    /// Returns the claim to pass to the release.
    pub(crate) fn claim(&self) -> Claim {
        self.grant().claim_to_release()
    }

    /// Takes the local permit. Its drop passes it to the next local caller.
    pub(crate) fn take_permit(&mut self) -> Option<Box<dyn ReleasePermit>> {
        self.permit.take().map(LocalPermit::into_release_permit)
    }

    /// Records that the claim does not hold the key any more.
    pub(crate) fn record_end(&mut self) {
        self.has_outcome = true;
        self.set_observed_end(ReleaseEnd::Released);
    }

    /// Emits the event that the release of a hold with this token began.
    pub(crate) fn observe(&mut self, token: FencingToken) {
        let grant = self.grant();
        self.observed = ObservedRelease::begin(grant.engine(), &grant.claim, token);
    }

    fn set_observed_end(&mut self, end: ReleaseEnd) {
        if let Some(observed) = &mut self.observed {
            observed.end = end;
        }
    }

    /// Records a failed release. The claim ends with its lease, so the caller must also call
    /// [`Engine::record_left_to_lease`].
    pub(crate) fn record_failure(&mut self) {
        self.has_outcome = true;
        self.grant().engine().failed_releases.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn grant(&self) -> &Arc<ActiveGrant> {
        self.grant.as_ref().expect("the grant is present until a hand-over")
    }
}

impl Drop for EndingGrant {
    fn drop(&mut self) {
        // `None` after a hand-over.
        if let Some(grant) = self.grant.take() {
            if self.is_scheduled {
                grant.unschedule();
            }
            let engine = grant.engine();
            if !self.has_outcome {
                // The backend has panicked, or no runtime runs the release.
                engine.record_left_to_lease(&grant.claim);
                engine.failed_releases.fetch_add(1, Ordering::AcqRel);
            }
            // Before the grant stops counting as active, so that `close` returns after this event.
            self.observed = None;
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
