//! The local half of a lock: one local lock per key and registry, with one local permit and a FIFO
//! wait queue.
//!
//! Nothing here sends a request to a store. The caller that has the local permit ([`LocalPermit`])
//! may compete for the key in the store; dropping the permit passes it to the next caller in the
//! queue. A local lock lives as long as a handle, guard or waiter of its key, so none is evicted
//! while it is in use. Called by [`acquire`](crate::acquire), and by releases and hand-overs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::clock::Moment;
use crate::contained::wake;
use crate::engine::Engine;
use crate::error::BackendError;
use crate::fairness::Contention;
use crate::guard::Hold;
use crate::guard::LockGuard;
use crate::interleave::{Mutex, MutexGuard, interleaving_point};
use crate::invalidation::Epoch;
use crate::key::Key;
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::owner::Owner;
use crate::release::PassedOnAfterRelease;
use crate::schedule::LastTimerKey;
use crate::watch::Watched;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry as MapEntry;

/// The local locks of one registry, by key.
pub(crate) struct LocalLocks {
    local_locks: DashMap<Key, Weak<LocalLock>>,
    /// The number of local locks removed since the size of the table was last checked.
    removed: AtomicUsize,
    /// The number of removals that triggers the next check.
    removed_max: AtomicUsize,
}

impl LocalLocks {
    pub(crate) fn new() -> Self {
        let removed_max = AtomicUsize::new(SHRINK_AFTER_MIN);
        Self { local_locks: DashMap::new(), removed: AtomicUsize::new(0), removed_max }
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.local_locks.len()
    }

    /// Returns all local locks that are alive now.
    pub(crate) fn all(&self) -> Vec<Arc<LocalLock>> {
        self.local_locks.iter().filter_map(|entry| entry.value().upgrade()).collect()
    }

    /// Returns whether this registry has a local lock for `key`. Checks the key only: an upgraded
    /// reference could become the last one, and its drop could end the registry.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.local_locks.contains_key(key)
    }

    /// Returns the local lock of `key`, or `None` if there is none yet.
    pub(crate) fn get(&self, key: &str) -> Option<Arc<LocalLock>> {
        interleaving_point();
        self.local_locks.get(key)?.upgrade()
    }

    /// Returns the local lock of `key`. If there is none, `make` creates it.
    pub(crate) fn get_or_insert(
        &self,
        key: Key,
        make: impl FnOnce(Key) -> Arc<LocalLock>,
    ) -> Arc<LocalLock> {
        interleaving_point();
        match self.local_locks.entry(key) {
            MapEntry::Occupied(mut entry) => match entry.get().upgrade() {
                Some(local_lock) => local_lock,
                // The old local lock is dead but its `Drop` has not removed the entry yet. It is
                // unreachable, so a new one may replace it; `remove_dead` then leaves the new entry
                // in place.
                None => {
                    let local_lock = make(entry.key().clone());
                    entry.insert(Arc::downgrade(&local_lock));
                    local_lock
                }
            },
            MapEntry::Vacant(entry) => {
                let local_lock = make(entry.key().clone());
                entry.insert(Arc::downgrade(&local_lock));
                local_lock
            }
        }
    }

    fn remove_dead(&self, key: &Key) {
        let gone = self
            .local_locks
            .remove_if(key, |_, local_lock| local_lock.strong_count() == 0)
            .is_some();
        if gone
            && self.removed.fetch_add(1, Ordering::Relaxed)
                >= self.removed_max.load(Ordering::Relaxed)
        {
            self.shrink();
        }
    }

    /// Frees memory if less than a quarter of the table is used. Amortised cost: about one moved
    /// entry per removal.
    fn shrink(&self) {
        self.removed.store(0, Ordering::Relaxed);
        let (alive, capacity) = (self.local_locks.len(), self.local_locks.capacity());
        if alive.saturating_mul(4) < capacity {
            self.local_locks.shrink_to_fit();
        }
        self.removed_max.store((alive / 2).max(SHRINK_AFTER_MIN), Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.local_locks.capacity()
    }

    /// Removes a local lock that is still in use: the bug [`Mutant::HeldLockEvicted`].
    fn evict(&self, key: &Key) {
        self.local_locks.remove(key);
    }
}

impl fmt::Debug for LocalLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalLocks").field("len", &self.len()).finish()
    }
}

/// With fewer removals than this, the table is not shrunk: the memory saved is not worth the work.
const SHRINK_AFTER_MIN: usize = 16_384;

/// A local lock: the state that all callers of one key in one registry share.
pub(crate) struct LocalLock {
    key: Key,
    engine: Arc<Engine>,
    /// The table that this local lock is in.
    table: Arc<LocalLocks>,
    wait_queue: Mutex<WaitQueue>,
    /// False only if no caller waits, or the only waiter is just joining the queue.
    has_waiters: AtomicBool,
    /// False only if [`WaitQueue::store_error`] is `None`. Written by the caller that has the
    /// local permit.
    has_store_error: AtomicBool,
    /// The invalidation epoch of this key.
    epoch: AtomicU32,
    /// The schedule entry by which the lease renewer finds the claim that is held on this key.
    pub(crate) timer: LastTimerKey,
}

#[derive(Default)]
struct WaitQueue {
    /// A caller has the local permit.
    taken: bool,
    /// The store error of the last request by the caller with the local permit. If the store does
    /// not respond, the callers behind must get this error, not the result "held".
    store_error: Option<BackendError>,
    /// The current hold, if its owner may re-enter.
    reentrant: Weak<Hold>,
    next_ticket: u64,
    /// By ticket: the first entry has waited longest, and removal from any position is cheap.
    waiters: BTreeMap<u64, Waiter>,
    /// The waiters that have an owner, so that those of one owner are found without a scan.
    by_owner: BTreeSet<(Owner, u64)>,
    /// The last local permit or claim sent to a waiter, which may have received it already.
    last_sent: Option<Sent>,
    /// The re-entrant guards sent to waiters of the current owner, which may have received them
    /// already.
    last_reentered: Vec<Sent>,
    /// The id of the registration with the registry's watch, and the time for which a waiter may
    /// go unpolled. `None` if there is nothing to check.
    watched: Option<(u64, Duration)>,
    closed: bool,
}

struct Waiter {
    owner: Option<Owner>,
    /// `None` for the registry's default terms, so that many waiters need not share one reference
    /// count.
    terms: Option<Arc<Terms>>,
    delivery: Arc<Delivery>,
}

/// An admission that was sent to a waiter.
struct Sent {
    delivery: Arc<Delivery>,
    patience: Duration,
    /// When a check first found it not received.
    since: Option<Moment>,
}

impl Sent {
    /// Returns whether the waiter has left its admission unreceived for `patience` since the first
    /// check.
    fn is_overdue(&mut self, now: Moment) -> bool {
        let since = *self.since.get_or_insert(now);
        now.since(since) >= self.patience
    }
}

/// The one-value channel through which a waiter receives its admission.
struct Delivery(Mutex<DeliveryState>);

enum DeliveryState {
    NotYet(Option<Waker>),
    Admission(Admission),
    /// The waiter did not receive its entry in time, and the next waiter got it.
    PassedOn,
    Closed,
    /// The waiter has received its entry, or is gone.
    Over,
}

impl Delivery {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(DeliveryState::NotYet(None))))
    }

    /// Sends the waiter its entry. Must not be called while the wait queue is locked: a waker may
    /// drop the task that it wakes, and the task's `Drop` locks the queue.
    fn deliver(&self, entry: Admission) {
        self.put(DeliveryState::Admission(entry));
    }

    fn close(&self) {
        self.put(DeliveryState::Closed);
    }

    fn put(&self, delivered: DeliveryState) {
        let mut state = self.state();
        let DeliveryState::NotYet(waker) = &mut *state else {
            drop(state);
            // The waiter is gone. The drop of an entry passes it to the next waiter.
            drop(delivered);
            return;
        };
        let waker = waker.take();
        *state = delivered;
        drop(state);
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<Admission, NotAdmitted>> {
        let mut state = self.state();
        match &mut *state {
            DeliveryState::NotYet(waker) => {
                if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    let before = waker.replace(cx.waker().clone());
                    // Dropped after the unlock: a waker may own the task whose destructor drops
                    // this waiter.
                    drop(state);
                    drop(before);
                }
                Poll::Pending
            }
            DeliveryState::PassedOn => Poll::Ready(Err(NotAdmitted::PassedOn)),
            DeliveryState::Admission(_) => {
                match std::mem::replace(&mut *state, DeliveryState::Over) {
                    DeliveryState::Admission(entry) => Poll::Ready(Ok(entry)),
                    _ => Poll::Ready(Err(NotAdmitted::Closed)),
                }
            }
            DeliveryState::Closed | DeliveryState::Over => Poll::Ready(Err(NotAdmitted::Closed)),
        }
    }

    /// Takes back an entry that the waiter has not received, and passes it to the next waiter.
    fn pass_on(&self) {
        let mut state = self.state();
        if matches!(*state, DeliveryState::Admission(_)) {
            let entry = std::mem::replace(&mut *state, DeliveryState::PassedOn);
            drop(state);
            drop(entry);
        }
    }

    /// Records that the waiter is gone. An entry that it has not received passes to the next
    /// waiter.
    fn leave(&self) {
        let before = std::mem::replace(&mut *self.state(), DeliveryState::Over);
        drop(before);
    }

    /// Returns whether the waiter may still receive an entry.
    fn is_open(&self) -> bool {
        matches!(*self.state(), DeliveryState::NotYet(_) | DeliveryState::Admission(_))
    }

    fn state(&self) -> MutexGuard<'_, DeliveryState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a caller receives when it is admitted: at the front of the queue, or at once if its owner
/// holds the lock.
#[derive(Debug)]
pub(crate) enum Admission {
    /// The local permit, with which the caller may compete for the key in the store.
    LocalPermit(LocalPermit),
    /// Another guard of a lock that this owner already holds.
    Reentered(LockGuard),
    /// The claim of the previous local holder, by hand-over.
    HandedOver(LockGuard),
}

/// The reason why a caller was not admitted.
#[derive(Debug)]
pub(crate) enum NotAdmitted {
    /// The deadline passed. Contains the last store error of the caller in front, if its last
    /// request failed.
    TimedOut(Option<BackendError>),
    /// The caller was at the front but was not polled for the time of a lease. It must wait again.
    PassedOn,
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
            timer: LastTimerKey::default(),
        }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns the current invalidation epoch of this key.
    pub(crate) fn epoch(&self) -> Epoch {
        Epoch {
            of_key: self.epoch.load(Ordering::Relaxed),
            of_all: self.engine.invalidations.epoch_of_all(),
        }
    }

    /// Records an invalidation of this key, for acquisitions in flight.
    pub(crate) fn invalidate(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for the local permit or a hand-over. Re-enters at once if `owner` already holds the
    /// lock.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        owner: Option<&Owner>,
        terms: &Arc<Terms>,
        deadline: Option<Moment>,
    ) -> Result<Admission, NotAdmitted> {
        let mut waiting = {
            let mut wait_queue = self.wait_queue();
            if wait_queue.closed {
                return Err(NotAdmitted::Closed);
            }
            if let Some(guard) = wait_queue.reenter(owner) {
                return Ok(Admission::Reentered(guard));
            }
            if !wait_queue.taken {
                wait_queue.taken = true;
                return Ok(Admission::LocalPermit(LocalPermit::new(Arc::clone(self))));
            }
            if deadline.is_some_and(|deadline| deadline <= Moment::now()) {
                return Err(NotAdmitted::TimedOut(wait_queue.store_error.clone()));
            }
            let ticket = wait_queue.next_ticket;
            wait_queue.next_ticket += 1;
            let delivery = Delivery::new();
            let own = Arc::ptr_eq(terms, &self.engine.default_terms);
            let own_terms = if own { None } else { Some(Arc::clone(terms)) };
            let waiter =
                Waiter { owner: owner.cloned(), terms: own_terms, delivery: Arc::clone(&delivery) };
            wait_queue.push(ticket, waiter);
            self.has_waiters.store(true, Ordering::Relaxed);
            self.watch_queue(&mut wait_queue, terms.lease.length);
            WaiterGuard { local_lock: self, ticket: Some(ticket), delivery }
        };
        self.engine.emit(|| crate::LockEvent::Waiting { key: self.key.as_str() });
        let delivery = Arc::clone(&waiting.delivery);
        let entry = poll_fn(|cx| delivery.poll(cx));
        let entered = match deadline {
            None => entry.await,
            Some(deadline) => tokio::select! {
                biased;
                entered = entry => entered,
                () = self.engine.sleep_until(deadline) => {
                    let store_error = self.wait_queue().store_error.clone();
                    return Err(NotAdmitted::TimedOut(store_error));
                }
            },
        };
        // The sender of the result has already removed this waiter from the queue.
        waiting.ticket = None;
        entered
    }

    /// Registers this local lock with the registry's watch, so that a waiter of this `patience` is
    /// checked in time.
    fn watch_queue(self: &Arc<Self>, wait_queue: &mut WaitQueue, patience: Duration) {
        if wait_queue.watched.is_some_and(|(_, watched)| watched <= patience) {
            return;
        }
        let watch = self.engine.background.watch();
        if let Some((ticket, _)) = wait_queue.watched {
            watch.deregister(ticket);
        }
        let local_lock: Weak<Self> = Arc::downgrade(self);
        wait_queue.watched = Some((watch.register(local_lock, patience), patience));
    }

    /// Records a store error of the caller with the local permit.
    pub(crate) fn record_store_error(&self, error: &BackendError) {
        let mut wait_queue = self.wait_queue();
        wait_queue.store_error = Some(error.clone());
        self.has_store_error.store(true, Ordering::Relaxed);
    }

    /// Records that the store responded to the caller with the local permit.
    pub(crate) fn record_response(&self) {
        if self.has_store_error.load(Ordering::Relaxed) {
            self.wait_queue().clear_store_error(&self.has_store_error);
        }
    }

    /// Records `hold` as the current hold, and sends guards to the waiters of the same owner. The
    /// caller still has the first guard of `hold`.
    pub(crate) fn record_hold(&self, hold: &Arc<Hold>) {
        if hold.owner().is_none() {
            return;
        }
        let mut wait_queue = self.wait_queue();
        let same_owner = wait_queue.begin_hold(hold);
        drop(wait_queue);
        for (delivery, entry) in same_owner {
            delivery.deliver(entry);
        }
    }

    /// Hands a claim over to the next caller if its terms are the same. `make` creates the guard,
    /// or returns `None` if the claim can no longer be handed over. The local permit stays with the
    /// claim. Returns false if nothing was handed over.
    pub(crate) fn hand_over(
        &self,
        terms: &Terms,
        make: impl FnOnce(Option<Owner>) -> Option<LockGuard>,
    ) -> bool {
        // A caller that joins the queue only now gets the local permit instead.
        if !self.has_waiters.load(Ordering::Relaxed) {
            return false;
        }
        let mut wait_queue = self.wait_queue();
        if wait_queue.closed {
            return false;
        }
        // Only the first in the queue: skipping it would break the order.
        let Some(first) = wait_queue.waiters.first_entry() else {
            return false;
        };
        let requested_terms = first.get().terms.as_ref().unwrap_or(&self.engine.default_terms);
        if **requested_terms != *terms {
            return false;
        }
        let Some(guard) = make(first.get().owner.clone()) else {
            return false;
        };
        let (ticket, waiter) = first.remove_entry();
        let delivery = wait_queue.give(ticket, waiter, &self.engine);
        // Before the unlock: afterwards the receiver may already be done, and the next hold begun.
        let same_owner = wait_queue.begin_hold(guard.hold());
        drop(wait_queue);
        delivery.deliver(Admission::HandedOver(guard));
        for (delivery, entry) in same_owner {
            delivery.deliver(entry);
        }
        true
    }

    /// Ends all waits with [`NotAdmitted::Closed`], now and from now on.
    pub(crate) fn close(&self) {
        let mut wait_queue = self.wait_queue();
        wait_queue.closed = true;
        let waiters = std::mem::take(&mut wait_queue.waiters);
        wait_queue.by_owner.clear();
        drop(wait_queue);
        for waiter in waiters.into_values() {
            waiter.delivery.close();
        }
    }

    fn pass_on(self: &Arc<Self>) {
        let mut wait_queue = self.wait_queue();
        wait_queue.reentrant = Weak::new();
        // The next caller sends its own request to the store.
        wait_queue.clear_store_error(&self.has_store_error);
        let next = wait_queue.waiters.pop_first();
        let next = next.map(|(ticket, waiter)| wait_queue.give(ticket, waiter, &self.engine));
        wait_queue.taken = next.is_some();
        if wait_queue.waiters.is_empty() {
            self.has_waiters.store(false, Ordering::Relaxed);
        }
        drop(wait_queue);
        if let Some(delivery) = next {
            delivery.deliver(Admission::LocalPermit(LocalPermit::new(Arc::clone(self))));
        }
    }

    fn wait_queue(&self) -> MutexGuard<'_, WaitQueue> {
        // No code panics between two assignments to these fields, so a poisoned queue is
        // consistent.
        self.wait_queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched for LocalLock {
    fn check(self: Arc<Self>, now: Moment) -> bool {
        let mut wait_queue = self.wait_queue();
        let mut overdue = Vec::new();
        wait_queue.last_sent.take_if(|sent| !sent.delivery.is_open());
        wait_queue.last_reentered.retain(|sent| sent.delivery.is_open());
        let WaitQueue { last_sent, last_reentered, .. } = &mut *wait_queue;
        for sent in last_sent.iter_mut().chain(last_reentered) {
            if sent.is_overdue(now) && !mutated(Mutant::UnpolledCallerKept) {
                overdue.push(Arc::clone(&sent.delivery));
            }
        }
        let goes_on = wait_queue.last_sent.is_some()
            || !wait_queue.last_reentered.is_empty()
            || !wait_queue.waiters.is_empty();
        if !goes_on {
            wait_queue.watched = None;
            wait_queue.last_reentered = Vec::new();
        }
        drop(wait_queue);
        for delivery in overdue {
            delivery.pass_on();
        }
        goes_on
    }
}

impl WaitQueue {
    fn clear_store_error(&mut self, has_store_error: &AtomicBool) {
        self.store_error = None;
        has_store_error.store(false, Ordering::Relaxed);
    }

    /// Removes the waiters with the owner of `hold` from the queue, and returns them with their
    /// guards.
    fn begin_hold(&mut self, hold: &Arc<Hold>) -> Vec<(Arc<Delivery>, Admission)> {
        let mut entries = Vec::new();
        let Some(owner) = hold.owner() else {
            self.reentrant = Weak::new();
            return entries;
        };
        // If the hold is already lost, another caller may have the local permit and be the current
        // hold.
        if hold.held().valid_until() <= Moment::now_coarse() {
            return entries;
        }
        self.reentrant = Arc::downgrade(hold);
        let own = (owner.clone(), 0)..=(owner.clone(), u64::MAX);
        let same_owner: Vec<u64> = self.by_owner.range(own).map(|(_, ticket)| *ticket).collect();
        if !same_owner.is_empty() {
            self.last_reentered.retain(|sent| sent.delivery.is_open());
        }
        for ticket in same_owner {
            // If the hold has ended, the remaining waiters stay in the queue for a local permit.
            let Some(guard) = hold.reenter() else { break };
            let Some(waiter) = self.remove(ticket) else { break };
            self.last_reentered.push(waiter.sent(hold.held().local_lock().engine()));
            entries.push((waiter.delivery, Admission::Reentered(guard)));
        }
        entries
    }

    fn push(&mut self, ticket: u64, waiter: Waiter) {
        if let Some(owner) = &waiter.owner {
            self.by_owner.insert((owner.clone(), ticket));
        }
        self.waiters.insert(ticket, waiter);
    }

    fn remove(&mut self, ticket: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&ticket)?;
        self.clear_owner(ticket, &waiter);
        Some(waiter)
    }

    fn clear_owner(&mut self, ticket: u64, waiter: &Waiter) {
        if let Some(owner) = &waiter.owner {
            self.by_owner.remove(&(owner.clone(), ticket));
        }
    }

    /// Records that `waiter`, just removed from the queue, gets the local permit or the claim. Only
    /// one waiter has it at a time.
    fn give(&mut self, ticket: u64, waiter: Waiter, engine: &Engine) -> Arc<Delivery> {
        self.clear_owner(ticket, &waiter);
        self.last_sent = Some(waiter.sent(engine));
        waiter.delivery
    }

    fn reenter(&self, owner: Option<&Owner>) -> Option<LockGuard> {
        let owner = owner?;
        let hold = self.reentrant.upgrade()?;
        if hold.owner() == Some(owner) { hold.reenter() } else { None }
    }
}

impl Waiter {
    fn sent(&self, engine: &Engine) -> Sent {
        let terms = self.terms.as_ref().unwrap_or(&engine.default_terms);
        Sent { delivery: Arc::clone(&self.delivery), patience: terms.lease.length, since: None }
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
        if let Some((ticket, _)) = wait_queue.watched {
            self.engine.background.watch().deregister(ticket);
        }
        // At this point the local lock is dead but still in the table.
        interleaving_point();
        self.table.remove_dead(&self.key);
    }
}

/// The local permit: the right of one caller of this process to compete for the key in the store.
/// Dropping it passes it to the next caller in the queue.
#[derive(Debug)]
pub(crate) struct LocalPermit {
    local_lock: Option<Arc<LocalLock>>,
    pub(crate) contention: Option<Box<Contention>>,
    granted_at: Option<Moment>,
}

impl LocalPermit {
    fn new(local_lock: Arc<LocalLock>) -> Self {
        let contention = local_lock.engine.fairness.contention(&local_lock.key);
        Self { local_lock: Some(local_lock), contention, granted_at: None }
    }

    pub(crate) fn local_lock(&self) -> &Arc<LocalLock> {
        self.local_lock.as_ref().expect("a permit has its local lock until it is dropped")
    }

    pub(crate) fn for_release(self) -> Box<dyn PassedOnAfterRelease> {
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

impl PassedOnAfterRelease for LocalPermit {
    fn record_error(&self, error: &BackendError) {
        self.local_lock().record_store_error(error);
    }
}

impl Drop for LocalPermit {
    fn drop(&mut self) {
        if let Some(local_lock) = self.local_lock.take() {
            if let (Some(granted_at), Some(contention)) = (self.granted_at, &self.contention) {
                local_lock.engine.fairness.on_release(&local_lock.key, **contention, granted_at);
            }
            local_lock.pass_on();
        }
    }
}

/// A place in the wait queue. Dropping it leaves the queue; an entry that was already sent passes
/// to the next waiter.
struct WaiterGuard<'a> {
    local_lock: &'a LocalLock,
    /// `None` once the waiter is not in the queue any more.
    ticket: Option<u64>,
    delivery: Arc<Delivery>,
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            let waiter = self.local_lock.wait_queue().remove(ticket);
            drop(waiter);
            self.delivery.leave();
        }
    }
}
