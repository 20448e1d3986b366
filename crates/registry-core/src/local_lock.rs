//! The local half of a lock: one local lock per key and registry, with one local permit and a FIFO
//! wait queue.
//!
//! Nothing here sends a request to a store. The caller that has the local permit ([`LocalPermit`])
//! may compete for the key in the store. Dropping the permit passes it to the next caller in the
//! queue. A caller that does not wait, and whose claim is not exclusive, may compete at the same
//! time with an extra permit. Dropping an extra permit passes it to no caller. A local lock lives
//! as long as a handle, guard or waiter of its key. [`acquire`](crate::acquire), releases and
//! hand-overs call this module.
//!
//! A grant ([`ActiveGrant`]) belongs to this process. A hold ([`Hold`]) is the use of a grant by
//! one holder. Only a shared grant can have several holds at the same time. Each hold has one or
//! more guards.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::clock::Moment;
use crate::engine::Engine;
use crate::error::BackendError;
use crate::fairness::Contention;
use crate::grant::ActiveGrant;
use crate::guard::{Hold, LockGuard};
use crate::interleave::{Mutex, MutexGuard, interleaving_point};
use crate::invalidation::Epoch;
use crate::key::Key;
use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};
use crate::options::ClaimOptions;
use crate::owner::Owner;
use crate::panic_safe::wake;
use crate::release::ReleasePermit;
use crate::schedule::LatestEntryId;
use crate::stall_detector::StallCheck;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry as MapEntry;

/// The local locks of one registry, by key.
pub(crate) struct LocalLocks {
    local_locks: DashMap<Key, Weak<LocalLock>>,
    /// The number of removals since the size of the table was last checked.
    removals: AtomicUsize,
    /// The number of removals after which the size is checked again.
    removals_before_shrink_check: AtomicUsize,
}

impl LocalLocks {
    pub(crate) fn new() -> Self {
        let removals_before_shrink_check = AtomicUsize::new(REMOVALS_BEFORE_SHRINK_CHECK_MIN);
        Self {
            local_locks: DashMap::new(),
            removals: AtomicUsize::new(0),
            removals_before_shrink_check,
        }
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.local_locks.len()
    }

    /// Returns all local locks that are alive now.
    pub(crate) fn all(&self) -> Vec<Arc<LocalLock>> {
        self.local_locks.iter().filter_map(|entry| entry.value().upgrade()).collect()
    }

    /// Returns whether the table has an entry for `key`. Does not upgrade the `Weak`: the new `Arc`
    /// could become the last one. Its drop could then drop the last `Arc<Engine>`, and with it the
    /// backend, which may be the caller of this function.
    pub(crate) fn contains(&self, key: &Key) -> bool {
        self.local_locks.contains_key(key)
    }

    /// Returns the local lock of `key`, or `None` if there is none yet.
    pub(crate) fn get(&self, key: &str) -> Option<Arc<LocalLock>> {
        interleaving_point();
        self.local_locks.get(key)?.upgrade()
    }

    /// Returns the local lock of `key`. If there is none, `create` returns a new one.
    pub(crate) fn get_or_insert(
        &self,
        key: Key,
        create: impl FnOnce(Key) -> Arc<LocalLock>,
    ) -> Arc<LocalLock> {
        interleaving_point();
        match self.local_locks.entry(key) {
            MapEntry::Occupied(mut entry) => match entry.get().upgrade() {
                Some(local_lock) => local_lock,
                // The `Drop` of the old local lock has not removed its entry yet. The new local
                // lock replaces the dead entry. `remove_dead` removes an entry only if it has no
                // strong reference.
                None => {
                    let local_lock = create(entry.key().clone());
                    entry.insert(Arc::downgrade(&local_lock));
                    local_lock
                }
            },
            MapEntry::Vacant(entry) => {
                let local_lock = create(entry.key().clone());
                entry.insert(Arc::downgrade(&local_lock));
                local_lock
            }
        }
    }

    fn remove_dead(&self, key: &Key) {
        let is_removed = self
            .local_locks
            .remove_if(key, |_, local_lock| local_lock.strong_count() == 0)
            .is_some();
        if is_removed
            && self.removals.fetch_add(1, Ordering::Relaxed)
                >= self.removals_before_shrink_check.load(Ordering::Relaxed)
        {
            self.shrink();
        }
    }

    /// Frees memory if less than a quarter of the table is used. The amortised cost is a constant
    /// number of moved entries per removal.
    fn shrink(&self) {
        self.removals.store(0, Ordering::Relaxed);
        let (alive, capacity) = (self.local_locks.len(), self.local_locks.capacity());
        if alive.saturating_mul(4) < capacity {
            self.local_locks.shrink_to_fit();
        }
        self.removals_before_shrink_check
            .store((alive / 2).max(REMOVALS_BEFORE_SHRINK_CHECK_MIN), Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.local_locks.capacity()
    }

    /// Removes a local lock that is in use. Only for [`Mutant::HeldLockEvicted`].
    fn evict(&self, key: &Key) {
        self.local_locks.remove(key);
    }
}

impl fmt::Debug for LocalLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalLocks").field("len", &self.len()).finish()
    }
}

/// The minimum of [`LocalLocks::removals_before_shrink_check`]: with fewer removals, too little
/// memory is saved.
const REMOVALS_BEFORE_SHRINK_CHECK_MIN: usize = 16_384;

/// The minimum number of entries by which [`WaitQueue::unreceived_guards`] grows.
const UNRECEIVED_GROWTH_MIN: usize = 16;

/// A local lock: the state that all callers of one key in one registry share.
pub(crate) struct LocalLock {
    key: Key,
    engine: Arc<Engine>,
    /// The table that this local lock is in.
    table: Arc<LocalLocks>,
    wait_queue: Mutex<WaitQueue>,
    /// A hint, read without locking the queue. If false, the queue is empty, or its first waiter is
    /// just joining. If true, the queue may nevertheless be empty.
    has_waiters: AtomicBool,
    /// Whether [`WaitQueue::store_error`] is `Some`. Read without locking the queue, but written
    /// only while the queue is locked.
    has_store_error: AtomicBool,
    /// The number of invalidations of this key. An acquisition compares this number before and
    /// after its request.
    epoch: AtomicU32,
    /// The latest entry of this key in the schedule. The lease renewer finds the active grant
    /// through this entry.
    pub(crate) latest_entry_id: LatestEntryId,
}

#[derive(Default)]
struct WaitQueue {
    /// A caller has the local permit.
    is_permit_taken: bool,
    /// The store error of the last request by the caller with the local permit. Queued callers
    /// return this error at their deadline, because it is unknown whether the lock is held.
    store_error: Option<BackendError>,
    /// The current exclusive hold if it has an owner; that owner can re-enter. Otherwise empty.
    exclusive_hold: Weak<Hold>,
    /// The holds that are not exclusive and have an owner. The owner of a shared or upgradable hold
    /// can re-enter.
    concurrent_holds: Vec<Weak<Hold>>,
    /// The last shared grant, which further readers may join.
    joinable_grant: Weak<ActiveGrant>,
    /// The grants of this key that are not exclusive. Several can exist at the same time. Some may
    /// have ended.
    concurrent_grants: Vec<Weak<ActiveGrant>>,
    next_ticket: u64,
    /// By ticket, so that the first entry has waited longest and any entry is removed cheaply.
    waiters: BTreeMap<u64, LocalWaiter>,
    /// An index of the waiters by owner.
    by_owner: BTreeSet<(Owner, u64)>,
    /// The last permit or claim that was sent to a waiter. The stall check clears this field once
    /// the waiter has received it.
    unreceived_permit: Option<SentAdmission>,
    /// Guards that were sent to waiters, by re-entry or by joining a shared grant. The stall check
    /// removes those that were received.
    unreceived_guards: Vec<SentAdmission>,
    /// The id of this lock's registration with the stall detector, and the shortest
    /// [`SentAdmission::unpolled_max`] of its waiters. `None` if there is nothing to check.
    stall_registration: Option<(u64, Duration)>,
    closed: bool,
}

struct LocalWaiter {
    owner: Option<Owner>,
    /// `None` for the registry's defaults. A shared `Arc` would make all waiters of all keys write
    /// the same reference count.
    options: Option<Arc<ClaimOptions>>,
    channel: Arc<AdmissionChannel>,
}

/// An admission that was sent to a waiter.
struct SentAdmission {
    channel: Arc<AdmissionChannel>,
    /// The time within which the waiter must be polled and so receive the admission. It starts at
    /// `first_checked_at`. After it, the stall check drops the admission, which passes a permit to
    /// the next waiter.
    unpolled_max: Duration,
    /// The time of the first stall check after the admission was sent.
    first_checked_at: Option<Moment>,
}

impl SentAdmission {
    /// Returns whether the admission is overdue. The first call starts the timer.
    fn check_overdue(&mut self, now: Moment) -> bool {
        let first_checked_at = *self.first_checked_at.get_or_insert(now);
        now.since(first_checked_at) >= self.unpolled_max
    }
}

/// The oneshot channel through which a waiter receives its admission.
struct AdmissionChannel(Mutex<ChannelState>);

enum ChannelState {
    /// The waiter waits. Contains its waker.
    Pending(Option<Waker>),
    Sent(Admission),
    /// The waiter did not receive its admission in time. A permit in it passed to the next waiter.
    Revoked,
    /// The owner of the waiter has acquired the key in this mode, which excludes the requested one.
    HeldByOwner(ClaimMode),
    /// The registry is closing.
    Closed,
    /// The waiter has received its admission, or is gone.
    Done,
}

/// The result of a wait, for the waiter of this channel.
type WaitResult = (Arc<AdmissionChannel>, ChannelState);

/// Sends these results. Must not be called while the wait queue is locked; see
/// [`AdmissionChannel::send`].
fn complete_all(results: Vec<WaitResult>) {
    for (channel, result) in results {
        channel.complete(result);
    }
}

impl AdmissionChannel {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(ChannelState::Pending(None))))
    }

    /// Sends the waiter its admission. Must not be called while the wait queue is locked. A waker
    /// may drop the task that it wakes, and the task's `Drop` locks the queue.
    fn send(&self, admission: Admission) {
        self.complete(ChannelState::Sent(admission));
    }

    fn close(&self) {
        self.complete(ChannelState::Closed);
    }

    fn complete(&self, result: ChannelState) {
        let mut state = self.state();
        let ChannelState::Pending(waker) = &mut *state else {
            drop(state);
            // The waiter is gone. The drop of an admission passes its permit to the next waiter.
            drop(result);
            return;
        };
        let waker = waker.take();
        *state = result;
        drop(state);
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<Admission, NotAdmitted>> {
        let mut state = self.state();
        match &mut *state {
            ChannelState::Pending(waker) => {
                if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    let before = waker.replace(cx.waker().clone());
                    // Dropped after the unlock: a waker may own the task whose destructor drops
                    // this waiter.
                    drop(state);
                    drop(before);
                }
                Poll::Pending
            }
            ChannelState::Revoked => Poll::Ready(Err(NotAdmitted::Revoked)),
            ChannelState::HeldByOwner(held) => Poll::Ready(Err(NotAdmitted::HeldByOwner(*held))),
            ChannelState::Sent(_) => match std::mem::replace(&mut *state, ChannelState::Done) {
                ChannelState::Sent(admission) => Poll::Ready(Ok(admission)),
                _ => Poll::Ready(Err(NotAdmitted::Closed)),
            },
            ChannelState::Closed | ChannelState::Done => Poll::Ready(Err(NotAdmitted::Closed)),
        }
    }

    /// Drops an admission that the waiter has not received. A permit passes to the next waiter.
    fn revoke(&self) {
        let mut state = self.state();
        if matches!(*state, ChannelState::Sent(_)) {
            let unreceived = std::mem::replace(&mut *state, ChannelState::Revoked);
            drop(state);
            drop(unreceived);
        }
    }

    /// Records that the waiter is gone. A permit that it has not received passes to the next
    /// waiter.
    fn cancel(&self) {
        let before = std::mem::replace(&mut *self.state(), ChannelState::Done);
        drop(before);
    }

    /// Returns whether the waiter may still receive an admission.
    fn is_open(&self) -> bool {
        matches!(*self.state(), ChannelState::Pending(_) | ChannelState::Sent(_))
    }

    fn state(&self) -> MutexGuard<'_, ChannelState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How [`LocalLock::enter`] admits a caller: with a permit, or with a guard of a grant that this
/// process already has.
#[derive(Debug)]
pub(crate) enum Admission {
    /// The local permit, with which the caller may compete for the key in the store.
    LocalPermit(LocalPermit),
    /// Another guard of a lock that this owner already holds.
    Reentered(LockGuard),
    /// The claim of the previous local holder, by hand-over.
    HandedOver(LockGuard),
    /// A further hold of a shared grant of this process.
    Joined(LockGuard),
}

/// Why a caller got no [`Admission`].
#[derive(Debug)]
pub(crate) enum NotAdmitted {
    /// The deadline passed. Contains the error of the last request by the caller with the local
    /// permit, if that request failed.
    TimedOut(Option<BackendError>),
    /// The caller was admitted but was not polled for the length of a lease, so the admission was
    /// revoked. It must queue again.
    Revoked,
    /// The owner holds the key in a mode that excludes the requested one, so the caller would wait
    /// for its own owner.
    HeldByOwner(ClaimMode),
    /// The registry is closing.
    Closed,
}

impl LocalLock {
    pub(crate) fn new(key: Key, engine: Arc<Engine>, table: Arc<LocalLocks>) -> Self {
        Self {
            key,
            engine,
            table,
            wait_queue: Mutex::default(),
            has_waiters: false.into(),
            has_store_error: false.into(),
            epoch: 0.into(),
            latest_entry_id: LatestEntryId::default(),
        }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns the current invalidation epoch of this key.
    pub(crate) fn invalidation_epoch(&self) -> Epoch {
        Epoch {
            key: self.epoch.load(Ordering::Relaxed),
            registry: self.engine.invalidations.registry_epoch(),
        }
    }

    /// Records an invalidation of this key, for acquisitions in flight.
    pub(crate) fn invalidate(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for the local permit, a hand-over, or a shared grant to join. If `owner` holds the
    /// lock, or acquires it during the wait, in a mode that includes the requested one, the caller
    /// re-enters the lock. If that mode excludes the requested one, returns
    /// [`NotAdmitted::HeldByOwner`].
    ///
    /// If the permit is taken, a caller that does not wait gets an extra permit outside of the
    /// queue, unless its mode is exclusive. The store may grant its claim even while another caller
    /// of this process has the permit.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        owner: Option<&Owner>,
        options: &Arc<ClaimOptions>,
        deadline: Option<Moment>,
    ) -> Result<Admission, NotAdmitted> {
        let mut waiting = {
            let mut wait_queue = self.wait_queue();
            if wait_queue.closed {
                return Err(NotAdmitted::Closed);
            }
            if let Some(owner) = owner
                && let Some(result) = wait_queue.reenter(owner, options.mode)
            {
                return result.map(Admission::Reentered).map_err(NotAdmitted::HeldByOwner);
            }
            if !wait_queue.is_permit_taken {
                if let Some(guard) = wait_queue.join(options, owner) {
                    let results = wait_queue.begin_hold(guard.hold());
                    drop(wait_queue);
                    complete_all(results);
                    return Ok(Admission::Joined(guard));
                }
                wait_queue.is_permit_taken = true;
                return Ok(Admission::LocalPermit(LocalPermit::new(Arc::clone(self))));
            }
            if deadline.is_some_and(|deadline| deadline <= Moment::now()) {
                if options.mode == ClaimMode::Exclusive {
                    return Err(NotAdmitted::TimedOut(wait_queue.store_error.clone()));
                }
                return Ok(Admission::LocalPermit(LocalPermit::extra(Arc::clone(self))));
            }
            let ticket = wait_queue.next_ticket;
            wait_queue.next_ticket += 1;
            let channel = AdmissionChannel::new();
            let is_default = Arc::ptr_eq(options, &self.engine.default_options);
            let waiter = LocalWaiter {
                owner: owner.cloned(),
                options: (!is_default).then(|| Arc::clone(options)),
                channel: Arc::clone(&channel),
            };
            wait_queue.push(ticket, waiter);
            self.has_waiters.store(true, Ordering::Relaxed);
            self.register_with_stall_detector(&mut wait_queue, options.lease.length);
            WaiterGuard { local_lock: self, ticket: Some(ticket), channel }
        };
        let (key, mode) = (self.key.as_str(), options.mode);
        self.engine.emit(|| crate::LockEvent::Waiting { key, mode });
        let channel = Arc::clone(&waiting.channel);
        let admission = poll_fn(|cx| channel.poll(cx));
        let admission = match deadline {
            None => admission.await,
            Some(deadline) => tokio::select! {
                biased;
                admission = admission => admission,
                () = self.engine.sleep_until(deadline) => {
                    let store_error = self.wait_queue().store_error.clone();
                    return Err(NotAdmitted::TimedOut(store_error));
                }
            },
        };
        // The sender of the result has already removed this waiter from the queue.
        waiting.ticket = None;
        admission
    }

    /// Returns another guard for `owner` if this owner holds the key in a mode that includes
    /// `wanted`. Returns the held mode as the error if that mode excludes `wanted`. Otherwise
    /// returns `None`.
    pub(crate) fn reenter(
        &self,
        owner: &Owner,
        wanted: ClaimMode,
    ) -> Option<Result<LockGuard, ClaimMode>> {
        self.wait_queue().reenter(owner, wanted)
    }

    /// Returns whether the owner of `hold` also has another hold. An upgrade of `hold` would then
    /// wait for its own owner.
    pub(crate) fn upgrade_would_wait_for_own_owner(&self, hold: &Hold) -> bool {
        hold.owner().is_some_and(|owner| {
            let wait_queue = self.wait_queue();
            let mut holds = wait_queue.holds_of(owner);
            holds.any(|other| !std::ptr::eq(&*other, hold) && other.is_held())
        })
    }

    /// Registers this local lock with the stall detector, so that a waiter that is not polled for
    /// `unpolled_max` is detected in time.
    fn register_with_stall_detector(
        self: &Arc<Self>,
        wait_queue: &mut WaitQueue,
        unpolled_max: Duration,
    ) {
        if wait_queue.stall_registration.is_some_and(|(_, shortest)| shortest <= unpolled_max) {
            return;
        }
        let stall_detector = self.engine.background.stall_detector();
        if let Some((id, _)) = wait_queue.stall_registration {
            stall_detector.deregister(id);
        }
        let local_lock: Weak<Self> = Arc::downgrade(self);
        let id = stall_detector.register(local_lock, unpolled_max);
        wait_queue.stall_registration = Some((id, unpolled_max));
    }

    /// Records a store error of the caller with the local permit.
    fn record_store_error(&self, error: &BackendError) {
        let mut wait_queue = self.wait_queue();
        wait_queue.store_error = Some(error.clone());
        self.has_store_error.store(true, Ordering::Relaxed);
    }

    /// Records that the store responded to a caller with a local or extra permit.
    pub(crate) fn record_response(&self) {
        if self.has_store_error.load(Ordering::Relaxed) {
            self.wait_queue().clear_store_error(&self.has_store_error);
        }
    }

    /// Records `hold` for re-entry by its owner. Sends a guard to each waiter of this owner that
    /// may re-enter `hold`, and an error to each that would wait for its own owner. Does nothing
    /// for a hold without an owner. Called while the first guard of `hold` exists.
    pub(crate) fn record_hold(&self, hold: &Arc<Hold>) {
        if hold.owner().is_none() {
            return;
        }
        let mut wait_queue = self.wait_queue();
        let results = wait_queue.begin_hold(hold);
        drop(wait_queue);
        complete_all(results);
    }

    /// Hands the claim over to the first waiter if that waiter requested `options`. Returns whether
    /// it did.
    ///
    /// `new_guard` creates the guard for the waiter's owner, or returns `None` if the claim can no
    /// longer be handed over. The grant keeps the local permit.
    pub(crate) fn hand_over(
        &self,
        options: &ClaimOptions,
        new_guard: impl FnOnce(Option<Owner>) -> Option<LockGuard>,
    ) -> bool {
        // A caller that is just joining the queue is missed here. It gets the local permit instead.
        if !self.has_waiters.load(Ordering::Relaxed) {
            return false;
        }
        let mut wait_queue = self.wait_queue();
        if wait_queue.closed {
            return false;
        }
        // Only the first waiter: skipping it would break the order.
        let Some(first) = wait_queue.waiters.first_entry() else {
            return false;
        };
        let requested_options =
            first.get().options.as_ref().unwrap_or(&self.engine.default_options);
        if **requested_options != *options {
            return false;
        }
        let Some(guard) = new_guard(first.get().owner.clone()) else {
            return false;
        };
        let (ticket, waiter) = first.remove_entry();
        let channel = wait_queue.record_sent(ticket, waiter, &self.engine);
        // The hold of the previous owner has ended.
        wait_queue.exclusive_hold = Weak::new();
        // `begin_hold` runs under the queue lock, because another hold can begin after the unlock.
        let results = wait_queue.begin_hold(guard.hold());
        drop(wait_queue);
        channel.send(Admission::HandedOver(guard));
        complete_all(results);
        true
    }

    /// Makes all current and later waits return [`NotAdmitted::Closed`].
    pub(crate) fn close(&self) {
        let mut wait_queue = self.wait_queue();
        wait_queue.closed = true;
        let waiters = std::mem::take(&mut wait_queue.waiters);
        wait_queue.by_owner.clear();
        drop(wait_queue);
        for waiter in waiters.into_values() {
            waiter.channel.close();
        }
    }

    /// Records `grant`, which is not exclusive. This process may have further grants of the key at
    /// the same time.
    pub(crate) fn record_concurrent_grant(&self, grant: &Arc<ActiveGrant>) {
        let grants = &mut self.wait_queue().concurrent_grants;
        if grants.len() == grants.capacity() {
            grants.retain(|grant| grant.strong_count() > 0);
        }
        grants.push(Arc::downgrade(grant));
    }

    /// Returns the grants that [`record_concurrent_grant`](Self::record_concurrent_grant) has
    /// recorded.
    pub(crate) fn concurrent_grants(&self) -> Vec<Arc<ActiveGrant>> {
        self.wait_queue().concurrent_grants.iter().filter_map(Weak::upgrade).collect()
    }

    /// Makes further readers join `grant`, which is shared.
    pub(crate) fn offer_to_readers(&self, grant: &Arc<ActiveGrant>) {
        self.wait_queue().joinable_grant = Arc::downgrade(grant);
    }

    /// Lets the readers at the front of the queue join the current shared grant, if possible. Then
    /// passes the local permit to the first remaining waiter.
    fn pass_on(self: &Arc<Self>) {
        let mut wait_queue = self.wait_queue();
        // An exclusive hold can be active while the permit of another caller is passed on, because
        // a grant that was upgraded to exclusive has no local permit. Only a hold that has ended is
        // cleared.
        if wait_queue.exclusive_hold.upgrade().is_none_or(|hold| !hold.is_held()) {
            wait_queue.exclusive_hold = Weak::new();
        }
        let results = wait_queue.join_first_waiters(&self.engine);
        let next = if mutated(Mutant::WrongWaiterAdmitted) {
            wait_queue.waiters.pop_last()
        } else {
            wait_queue.waiters.pop_first()
        };
        let next =
            next.map(|(ticket, waiter)| wait_queue.record_sent(ticket, waiter, &self.engine));
        wait_queue.is_permit_taken = next.is_some();
        if next.is_none() {
            // No caller has the permit now, and the next caller sends its own request, so the error
            // is cleared. If the permit passes to a waiter instead, the error is kept until the
            // store responds to that waiter. Callers queued until then return it at their deadline.
            wait_queue.clear_store_error(&self.has_store_error);
        }
        if wait_queue.waiters.is_empty() {
            self.has_waiters.store(false, Ordering::Relaxed);
        }
        drop(wait_queue);
        complete_all(results);
        if let Some(channel) = next {
            channel.send(Admission::LocalPermit(LocalPermit::new(Arc::clone(self))));
        }
    }

    fn wait_queue(&self) -> MutexGuard<'_, WaitQueue> {
        // No code panics between two assignments to the queue, so the queue is consistent even if
        // its mutex is poisoned.
        self.wait_queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StallCheck for LocalLock {
    fn check_stalled(self: Arc<Self>, now: Moment) -> bool {
        let mut wait_queue = self.wait_queue();
        let mut overdue = Vec::new();
        wait_queue.unreceived_permit.take_if(|sent| !sent.channel.is_open());
        wait_queue.unreceived_guards.retain(|sent| sent.channel.is_open());
        let WaitQueue { unreceived_permit, unreceived_guards, .. } = &mut *wait_queue;
        for sent in unreceived_permit.iter_mut().chain(unreceived_guards) {
            if sent.check_overdue(now) && !mutated(Mutant::UnpolledCallerKept) {
                overdue.push(Arc::clone(&sent.channel));
            }
        }
        let needs_checks = wait_queue.unreceived_permit.is_some()
            || !wait_queue.unreceived_guards.is_empty()
            || !wait_queue.waiters.is_empty();
        if !needs_checks {
            wait_queue.stall_registration = None;
            wait_queue.unreceived_guards = Vec::new();
        }
        drop(wait_queue);
        for channel in overdue {
            channel.revoke();
        }
        needs_checks
    }
}

impl WaitQueue {
    fn clear_store_error(&mut self, has_store_error: &AtomicBool) {
        self.store_error = None;
        has_store_error.store(false, Ordering::Relaxed);
    }

    /// Returns a further hold of the current shared grant, if `options` are the same and the grant
    /// may be joined. Returns `None` while `owner` upgrades its lock, because the upgrade would
    /// wait for the new hold.
    fn join(&self, options: &ClaimOptions, owner: Option<&Owner>) -> Option<LockGuard> {
        let mut holds = owner.into_iter().flat_map(|owner| self.holds_of(owner));
        if options.mode != ClaimMode::Shared || holds.any(|hold| hold.may_be_upgrading()) {
            return None;
        }
        self.joinable_grant.upgrade()?.join(options, owner.cloned())
    }

    /// Records a sent guard. Before the vector grows, this removes the guards that were received.
    /// The guards that are not yet received thus limit the size of the vector.
    fn record_unreceived_guard(&mut self, sent: SentAdmission) {
        let guards = &mut self.unreceived_guards;
        if guards.len() == guards.capacity() {
            guards.retain(|sent| sent.channel.is_open());
            guards.reserve(guards.len().max(UNRECEIVED_GROWTH_MIN));
        }
        guards.push(sent);
    }

    /// Makes the readers at the front of the queue join the current shared grant, and begins their
    /// holds.
    fn join_first_waiters(&mut self, engine: &Engine) -> Vec<WaitResult> {
        let mut results = Vec::new();
        while let Some((&ticket, waiter)) = self.waiters.first_key_value() {
            let options = waiter.options.as_ref().unwrap_or(&engine.default_options);
            let Some(guard) = self.join(options, waiter.owner.as_ref()) else { break };
            let Some(waiter) = self.remove(ticket) else { break };
            self.record_unreceived_guard(waiter.to_sent_admission(engine));
            let reentries = self.begin_hold(guard.hold());
            results.push((waiter.channel, ChannelState::Sent(Admission::Joined(guard))));
            results.extend(reentries);
        }
        results
    }

    /// Records `hold` for re-entry by its owner. The waiters of this owner leave the queue if they
    /// may re-enter `hold`, or if they would wait for their own owner. Returns a guard or an error
    /// for each of these. Does nothing for a hold without an owner.
    fn begin_hold(&mut self, hold: &Arc<Hold>) -> Vec<WaitResult> {
        let mut results = Vec::new();
        let Some(owner) = hold.owner() else { return results };
        // An expired hold is not recorded, because `exclusive_hold` may already refer to a later
        // hold.
        if hold.grant().valid_until() <= Moment::now_coarse() {
            return results;
        }
        let held = hold.grant().claim().mode();
        if held == ClaimMode::Exclusive {
            self.exclusive_hold = Arc::downgrade(hold);
        } else {
            let hold = Arc::downgrade(hold);
            self.concurrent_holds.retain(|it| it.strong_count() > 0 && !it.ptr_eq(&hold));
            self.concurrent_holds.push(hold);
        }
        let of_owner = (owner.clone(), 0)..=(owner.clone(), u64::MAX);
        let tickets: Vec<u64> = self.by_owner.range(of_owner).map(|(_, ticket)| *ticket).collect();
        if !tickets.is_empty() {
            self.unreceived_guards.retain(|sent| sent.channel.is_open());
        }
        let engine = hold.grant().local_lock().engine();
        for ticket in tickets {
            let options = self.waiters.get(&ticket).and_then(|waiter| waiter.options.as_ref());
            let wanted = options.unwrap_or(&engine.default_options).mode;
            if is_reentrant(held, wanted) {
                // If the hold has ended, the remaining waiters stay in the queue for a local
                // permit.
                let Some(guard) = hold.reenter() else { break };
                let Some(waiter) = self.remove(ticket) else { break };
                self.record_unreceived_guard(waiter.to_sent_admission(engine));
                results.push((waiter.channel, ChannelState::Sent(Admission::Reentered(guard))));
            } else if is_excluded_for_owner(held, wanted) && hold.is_held() {
                let Some(waiter) = self.remove(ticket) else { break };
                results.push((waiter.channel, ChannelState::HeldByOwner(held)));
            }
        }
        results
    }

    fn push(&mut self, ticket: u64, waiter: LocalWaiter) {
        if let Some(owner) = &waiter.owner {
            self.by_owner.insert((owner.clone(), ticket));
        }
        self.waiters.insert(ticket, waiter);
    }

    fn remove(&mut self, ticket: u64) -> Option<LocalWaiter> {
        let waiter = self.waiters.remove(&ticket)?;
        self.remove_from_index(ticket, &waiter);
        Some(waiter)
    }

    fn remove_from_index(&mut self, ticket: u64, waiter: &LocalWaiter) {
        if let Some(owner) = &waiter.owner {
            self.by_owner.remove(&(owner.clone(), ticket));
        }
    }

    /// Records that `waiter`, which was just removed from the queue, is being sent the local permit
    /// or the claim. Returns the waiter's channel.
    fn record_sent(
        &mut self,
        ticket: u64,
        waiter: LocalWaiter,
        engine: &Engine,
    ) -> Arc<AdmissionChannel> {
        self.remove_from_index(ticket, &waiter);
        self.unreceived_permit = Some(waiter.to_sent_admission(engine));
        waiter.channel
    }

    /// Returns the recorded holds of `owner`. Some may have ended.
    fn holds_of(&self, owner: &Owner) -> impl Iterator<Item = Arc<Hold>> {
        let holds = std::iter::once(&self.exclusive_hold).chain(&self.concurrent_holds);
        holds.filter_map(Weak::upgrade).filter(move |hold| hold.owner() == Some(owner))
    }

    /// See [`LocalLock::reenter`].
    fn reenter(&self, owner: &Owner, wanted: ClaimMode) -> Option<Result<LockGuard, ClaimMode>> {
        let mut result = None;
        for hold in self.holds_of(owner) {
            let held = hold.grant().claim().mode();
            if is_reentrant(held, wanted) {
                if let Some(guard) = hold.reenter() {
                    return Some(Ok(guard));
                }
            } else if is_excluded_for_owner(held, wanted) && hold.is_held() {
                result = Some(Err(held));
            }
        }
        result
    }
}

/// Returns whether a call for `wanted` would wait for its own owner, which holds the key in the
/// mode `held`. Calls of one owner may wait for each other's permits, because permits are not
/// re-entrant.
fn is_excluded_for_owner(held: ClaimMode, wanted: ClaimMode) -> bool {
    use ClaimMode::Permits;
    let are_permits = matches!((held, wanted), (Permits { .. }, Permits { .. }));
    !held.is_compatible(wanted) && !are_permits
}

/// Returns whether an owner that holds a key in the mode `held` may re-enter it in the mode
/// `wanted`.
fn is_reentrant(held: ClaimMode, wanted: ClaimMode) -> bool {
    use ClaimMode::{Exclusive, Shared, Upgradable};
    matches!(
        (held, wanted),
        (Exclusive, Exclusive | Shared | Upgradable)
            | (Upgradable, Upgradable | Shared)
            | (Shared, Shared)
    )
}

impl LocalWaiter {
    fn to_sent_admission(&self, engine: &Engine) -> SentAdmission {
        let options = self.options.as_ref().unwrap_or(&engine.default_options);
        SentAdmission {
            channel: Arc::clone(&self.channel),
            unpolled_max: options.lease.length,
            first_checked_at: None,
        }
    }
}

impl fmt::Debug for LocalLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalLock").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Drop for LocalLock {
    fn drop(&mut self) {
        let wait_queue = self.wait_queue.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((id, _)) = wait_queue.stall_registration {
            self.engine.background.stall_detector().deregister(id);
        }
        // Here `Weak::upgrade` fails for this local lock, but its entry is still in the table.
        interleaving_point();
        self.table.remove_dead(&self.key);
    }
}

/// The local permit: the right of one caller of this process to compete for the key in the store.
/// Dropping the permit passes it to the next caller in the queue.
#[derive(Debug)]
pub(crate) struct LocalPermit {
    local_lock: Option<Arc<LocalLock>>,
    /// The contention with other processes for the key, as measured under earlier permits. `None`
    /// for an extra permit, and for a store that needs no fairness between processes.
    pub(crate) contention: Option<Box<Contention>>,
    granted_at: Option<Moment>,
    /// False for an extra permit outside of the queue. Its drop passes no permit to a waiter.
    passes_on: bool,
}

impl LocalPermit {
    fn new(local_lock: Arc<LocalLock>) -> Self {
        let contention = local_lock.engine.fairness.contention(&local_lock.key);
        Self { local_lock: Some(local_lock), contention, granted_at: None, passes_on: true }
    }

    /// Returns an extra permit outside of the queue, for a caller that does not wait.
    fn extra(local_lock: Arc<LocalLock>) -> Self {
        let local_lock = Some(local_lock);
        Self { local_lock, contention: None, granted_at: None, passes_on: false }
    }

    pub(crate) fn local_lock(&self) -> &Arc<LocalLock> {
        self.local_lock.as_ref().expect("a permit has its local lock until it is dropped")
    }

    pub(crate) fn into_release_permit(self) -> Box<dyn ReleasePermit> {
        Box::new(self)
    }

    /// Records that the store has granted the claim of this permit.
    pub(crate) fn on_granted(&mut self, now: Moment) {
        self.granted_at = Some(now);
        if let (Some(local_lock), Some(contention)) = (&self.local_lock, &mut self.contention) {
            local_lock.engine.fairness.on_grant(contention);
        }
        if mutated(Mutant::HeldLockEvicted) {
            let local_lock = self.local_lock();
            local_lock.table.evict(&local_lock.key);
        }
    }
}

impl ReleasePermit for LocalPermit {
    fn record_error(&self, error: &BackendError) {
        // The error of an extra permit is not recorded. The caller with the local permit may hold
        // the key, so queued callers must return `TimedOut(None)`, not this error.
        if self.passes_on {
            self.local_lock().record_store_error(error);
        }
    }

    fn record_response(&self) {
        self.local_lock().record_response();
    }
}

impl Drop for LocalPermit {
    fn drop(&mut self) {
        if let Some(local_lock) = self.local_lock.take() {
            if let (Some(granted_at), Some(contention)) = (self.granted_at, &self.contention) {
                local_lock.engine.fairness.on_release(&local_lock.key, **contention, granted_at);
            }
            if self.passes_on {
                local_lock.pass_on();
            }
        }
    }
}

/// A place in the wait queue. Its drop removes the waiter from the queue. A permit that was sent
/// but not received passes to the next waiter.
struct WaiterGuard<'a> {
    local_lock: &'a LocalLock,
    /// `None` once the waiter is not in the queue any more.
    ticket: Option<u64>,
    channel: Arc<AdmissionChannel>,
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            let waiter = self.local_lock.wait_queue().remove(ticket);
            drop(waiter);
            self.channel.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_received_guards_do_not_accumulate() {
        let mut wait_queue = WaitQueue::default();
        for _ in 0..10_000 {
            let channel = AdmissionChannel::new();
            wait_queue.record_unreceived_guard(SentAdmission {
                channel: Arc::clone(&channel),
                unpolled_max: Duration::from_secs(1),
                first_checked_at: None,
            });
            // The waiter receives its guard.
            *channel.0.lock().unwrap() = ChannelState::Done;
        }
        assert!(wait_queue.unreceived_guards.capacity() < 100);
    }
}
