//! The local half of a lock: one local lock per key and registry, with one local permit and a FIFO
//! wait queue.
//!
//! Nothing here sends a request to a store. The caller that has the local permit ([`Turn`]) may
//! compete for the key in the store; dropping the permit passes it to the next caller in the queue.
//! A local lock lives as long as a handle, guard or waiter of its key, so none is evicted while it
//! is in use. [`acquire`](crate::acquire) enters it; releases and hand-overs end here.

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
use crate::guard::LockGuard;
use crate::hold::Hold;
use crate::interleave::{Mutex, MutexGuard, point};
use crate::invalidation::NewsMark;
use crate::keeper::LastSeat;
use crate::key::Key;
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::owner::Owner;
use crate::watch::Watched;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry as MapEntry;

/// The local locks of one registry, by key.
pub(crate) struct SlotTable {
    slots: DashMap<Key, Weak<Slot>>,
    /// The number of local locks removed since the size of the table was last checked.
    left: AtomicUsize,
    /// The number of removals that triggers the next check.
    left_max: AtomicUsize,
}

impl SlotTable {
    pub(crate) fn new() -> Self {
        let left_max = AtomicUsize::new(SHRINK_AFTER_MIN);
        Self { slots: DashMap::new(), left: AtomicUsize::new(0), left_max }
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns all local locks that are alive now.
    pub(crate) fn all(&self) -> Vec<Arc<Slot>> {
        self.slots.iter().filter_map(|entry| entry.value().upgrade()).collect()
    }

    /// Returns whether this registry has a local lock for `key`. Does not upgrade the reference,
    /// because dropping the last one might end the registry.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.slots.contains_key(key)
    }

    /// Returns the local lock of `key`, or `None` if there is none yet.
    pub(crate) fn get(&self, key: &str) -> Option<Arc<Slot>> {
        point();
        self.slots.get(key)?.upgrade()
    }

    /// Returns the local lock of `key`. If there is none, `make` creates it.
    pub(crate) fn get_or_insert(&self, key: Key, make: impl FnOnce(Key) -> Arc<Slot>) -> Arc<Slot> {
        point();
        match self.slots.entry(key) {
            MapEntry::Occupied(mut entry) => match entry.get().upgrade() {
                Some(slot) => slot,
                // The old local lock is dead but its `Drop` has not removed the entry yet. It is
                // unreachable, so a new one may replace it; `remove_dead` then leaves the new entry
                // in place.
                None => {
                    let slot = make(entry.key().clone());
                    entry.insert(Arc::downgrade(&slot));
                    slot
                }
            },
            MapEntry::Vacant(entry) => {
                let slot = make(entry.key().clone());
                entry.insert(Arc::downgrade(&slot));
                slot
            }
        }
    }

    fn remove_dead(&self, key: &Key) {
        let gone = self.slots.remove_if(key, |_, slot| slot.strong_count() == 0).is_some();
        if gone
            && self.left.fetch_add(1, Ordering::Relaxed) >= self.left_max.load(Ordering::Relaxed)
        {
            self.shrink();
        }
    }

    /// Frees memory if less than a quarter of the table is used. Moves about one entry per removal
    /// since the last check.
    fn shrink(&self) {
        self.left.store(0, Ordering::Relaxed);
        let (alive, room) = (self.slots.len(), self.slots.capacity());
        if alive.saturating_mul(4) < room {
            self.slots.shrink_to_fit();
        }
        self.left_max.store((alive / 2).max(SHRINK_AFTER_MIN), Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn room(&self) -> usize {
        self.slots.capacity()
    }

    /// Removes a local lock that is still in use: the bug [`Mutant::HeldSlotEvicted`].
    fn evict(&self, key: &Key) {
        self.slots.remove(key);
    }
}

impl fmt::Debug for SlotTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotTable").field("len", &self.len()).finish()
    }
}

/// With fewer removals than this, the table is not shrunk: the memory saved is not worth the work.
const SHRINK_AFTER_MIN: usize = 16_384;

/// A local lock: the state that all callers of one key in one registry share.
pub(crate) struct Slot {
    key: Key,
    engine: Arc<Engine>,
    line: Mutex<Line>,
    /// False only if no caller waits, or one has only just joined the queue.
    wanted: AtomicBool,
    /// False only if [`Line::trouble`] is `None`. Written by the caller that has the local permit.
    troubled: AtomicBool,
    /// The invalidation epoch of this key.
    news: AtomicU32,
    /// The schedule entry by which the lease renewer finds the claim that is held on this key.
    pub(crate) seat: LastSeat,
}

#[derive(Default)]
struct Line {
    /// A caller has the local permit.
    taken: bool,
    /// The store error of the last request by the caller with the local permit. If the store does
    /// not respond, the callers behind must get this error, not the result "held".
    trouble: Option<BackendError>,
    /// The current hold, if its owner may re-enter.
    reentrant: Weak<Hold>,
    next_ticket: u64,
    /// By ticket: the first entry has waited longest, and removal from any position is cheap.
    waiters: BTreeMap<u64, Waiter>,
    /// The waiters that have an owner, so that those of one owner are found without a scan.
    by_owner: BTreeSet<(Owner, u64)>,
    /// The last local permit or claim sent to a waiter, which may have received it already.
    given: Option<Given>,
    /// The re-entrant guards sent to waiters of the current owner, which may have received them
    /// already.
    given_again: Vec<Given>,
    /// The ticket and the patience with which the registry's watch checks this local lock, while a
    /// caller waits.
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

/// An entry that was sent to a waiter.
struct Given {
    delivery: Arc<Delivery>,
    patience: Duration,
    /// When a check first found it not received.
    since: Option<Moment>,
}

impl Given {
    /// Returns whether the waiter has not received its entry within its patience.
    fn is_overdue(&mut self, now: Moment) -> bool {
        let since = *self.since.get_or_insert(now);
        now.since(since) >= self.patience
    }
}

/// The one-value channel through which a waiter receives its entry.
struct Delivery(Mutex<Delivered>);

enum Delivered {
    NotYet(Option<Waker>),
    Entry(Entry),
    /// The waiter did not receive its entry in time, and the next waiter got it.
    PassedOn,
    Closed,
    /// The waiter has received its entry, or is gone.
    Over,
}

impl Delivery {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Delivered::NotYet(None))))
    }

    /// Sends the waiter its entry. Must not be called while the wait queue is locked: a waker may
    /// drop the task that it wakes, and the task's `Drop` locks the queue.
    fn deliver(&self, entry: Entry) {
        self.put(Delivered::Entry(entry));
    }

    fn close(&self) {
        self.put(Delivered::Closed);
    }

    fn put(&self, delivered: Delivered) {
        let mut state = self.state();
        let Delivered::NotYet(waker) = &mut *state else {
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

    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<Entry, NoEntry>> {
        let mut state = self.state();
        match &mut *state {
            Delivered::NotYet(waker) => {
                if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    let before = waker.replace(cx.waker().clone());
                    // Dropped after the unlock: a waker may own the task whose destructor drops
                    // this waiter.
                    drop(state);
                    drop(before);
                }
                Poll::Pending
            }
            Delivered::PassedOn => Poll::Ready(Err(NoEntry::PassedOn)),
            Delivered::Entry(_) => match std::mem::replace(&mut *state, Delivered::Over) {
                Delivered::Entry(entry) => Poll::Ready(Ok(entry)),
                _ => Poll::Ready(Err(NoEntry::Closed)),
            },
            Delivered::Closed | Delivered::Over => Poll::Ready(Err(NoEntry::Closed)),
        }
    }

    /// Takes back an entry that the waiter has not received, and passes it to the next waiter.
    fn pass_on(&self) {
        let mut state = self.state();
        if matches!(*state, Delivered::Entry(_)) {
            let entry = std::mem::replace(&mut *state, Delivered::PassedOn);
            drop(state);
            drop(entry);
        }
    }

    /// Records that the waiter is gone. An entry that it has not received passes to the next
    /// waiter.
    fn leave(&self) {
        let before = std::mem::replace(&mut *self.state(), Delivered::Over);
        drop(before);
    }

    /// Returns whether the waiter may still receive an entry.
    fn is_open(&self) -> bool {
        matches!(*self.state(), Delivered::NotYet(_) | Delivered::Entry(_))
    }

    fn state(&self) -> MutexGuard<'_, Delivered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a caller receives at the front of the queue.
#[derive(Debug)]
pub(crate) enum Entry {
    /// The local permit, with which the caller may compete for the key in the store.
    Turn(Turn),
    /// Another guard of a lock that this owner already holds.
    Again(LockGuard),
    /// The claim of the previous local holder, by hand-over.
    HandedOver(LockGuard),
}

/// The reason why a caller received no entry.
#[derive(Debug)]
pub(crate) enum NoEntry {
    /// The deadline passed. Contains the last store error of the caller in front, if its last
    /// request failed.
    TimedOut(Option<BackendError>),
    /// The caller was at the front but was not polled for a lease. It must wait again.
    PassedOn,
    /// The registry is closing.
    Closed,
}

impl Slot {
    pub(crate) fn new(key: Key, engine: Arc<Engine>) -> Self {
        Self {
            key,
            engine,
            line: Mutex::default(),
            wanted: false.into(),
            troubled: false.into(),
            news: 0.into(),
            seat: LastSeat::default(),
        }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns the current invalidation epoch of this key.
    pub(crate) fn news(&self) -> NewsMark {
        NewsMark { of_key: self.news.load(Ordering::Relaxed), of_all: self.engine.keeper.gaps() }
    }

    /// Records an invalidation of this key, for acquisitions in flight.
    pub(crate) fn hear(&self) {
        self.news.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for the local permit or a hand-over. Re-enters at once if `owner` already holds the
    /// lock.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        owner: Option<&Owner>,
        terms: &Arc<Terms>,
        deadline: Option<Moment>,
    ) -> Result<Entry, NoEntry> {
        let mut waiting = {
            let mut line = self.line();
            if line.closed {
                return Err(NoEntry::Closed);
            }
            if let Some(again) = line.enter_again(owner) {
                return Ok(Entry::Again(again));
            }
            if !line.taken {
                line.taken = true;
                return Ok(Entry::Turn(Turn::new(Arc::clone(self))));
            }
            if deadline.is_some_and(|deadline| deadline <= Moment::now()) {
                return Err(NoEntry::TimedOut(line.trouble.clone()));
            }
            let ticket = line.next_ticket;
            line.next_ticket += 1;
            let delivery = Delivery::new();
            let own = Arc::ptr_eq(terms, &self.engine.default_terms);
            let own_terms = if own { None } else { Some(Arc::clone(terms)) };
            let waiter =
                Waiter { owner: owner.cloned(), terms: own_terms, delivery: Arc::clone(&delivery) };
            line.push(ticket, waiter);
            self.wanted.store(true, Ordering::Relaxed);
            self.watch_line(&mut line, terms.lease.length);
            Waiting { slot: self, ticket: Some(ticket), delivery }
        };
        self.engine.tell(|| crate::LockEvent::Waiting { key: self.key.as_str() });
        let delivery = Arc::clone(&waiting.delivery);
        let entry = poll_fn(|cx| delivery.poll(cx));
        let entered = match deadline {
            None => entry.await,
            Some(deadline) => tokio::select! {
                biased;
                entered = entry => entered,
                () = self.engine.sleep_until(deadline) => {
                    let trouble = self.line().trouble.clone();
                    return Err(NoEntry::TimedOut(trouble));
                }
            },
        };
        // The sender of the result has already removed this waiter from the queue.
        waiting.ticket = None;
        entered
    }

    /// Registers this local lock with the registry's watch, so that a waiter of this `patience` is
    /// checked in time.
    fn watch_line(self: &Arc<Self>, line: &mut Line, patience: Duration) {
        if line.watched.is_some_and(|(_, watched)| watched <= patience) {
            return;
        }
        let watch = self.engine.janitor.watch();
        if let Some((ticket, _)) = line.watched {
            watch.deregister(ticket);
        }
        let slot: Weak<Self> = Arc::downgrade(self);
        line.watched = Some((watch.register(slot, patience), patience));
    }

    /// Records a store error of the caller with the local permit.
    pub(crate) fn failed(&self, error: &BackendError) {
        let mut line = self.line();
        line.trouble = Some(error.clone());
        self.troubled.store(true, Ordering::Relaxed);
    }

    /// Records that the store responded to the caller with the local permit.
    pub(crate) fn answered(&self) {
        if self.troubled.load(Ordering::Relaxed) {
            self.line().forget_trouble(&self.troubled);
        }
    }

    /// Records `hold` as the current hold, and sends guards to the waiters of the same owner. The
    /// caller still has the first guard of `hold`.
    pub(crate) fn held_by(&self, hold: &Arc<Hold>) {
        if hold.owner().is_none() {
            return;
        }
        let mut line = self.line();
        let friends = line.begin_hold(hold);
        drop(line);
        for (delivery, entry) in friends {
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
        if !self.wanted.load(Ordering::Relaxed) {
            return false;
        }
        let mut line = self.line();
        if line.closed {
            return false;
        }
        // Only the first in the queue: skipping it would break the order.
        let Some(first) = line.waiters.first_entry() else {
            return false;
        };
        let wanted = first.get().terms.as_ref().unwrap_or(&self.engine.default_terms);
        if **wanted != *terms {
            return false;
        }
        let Some(guard) = make(first.get().owner.clone()) else {
            return false;
        };
        let (ticket, waiter) = first.remove_entry();
        let delivery = line.give(ticket, waiter, &self.engine);
        // Before the unlock: afterwards the receiver may already be done, and the next hold begun.
        let friends = line.begin_hold(guard.hold());
        drop(line);
        delivery.deliver(Entry::HandedOver(guard));
        for (delivery, entry) in friends {
            delivery.deliver(entry);
        }
        true
    }

    /// Ends all waits with [`NoEntry::Closed`], now and from now on.
    pub(crate) fn close(&self) {
        let mut line = self.line();
        line.closed = true;
        let waiters = std::mem::take(&mut line.waiters);
        line.by_owner.clear();
        drop(line);
        for waiter in waiters.into_values() {
            waiter.delivery.close();
        }
    }

    fn pass_on(self: &Arc<Self>) {
        let mut line = self.line();
        line.reentrant = Weak::new();
        // The next caller sends its own request to the store.
        line.forget_trouble(&self.troubled);
        let next = line.waiters.pop_first();
        let next = next.map(|(ticket, waiter)| line.give(ticket, waiter, &self.engine));
        line.taken = next.is_some();
        if line.waiters.is_empty() {
            self.wanted.store(false, Ordering::Relaxed);
        }
        drop(line);
        if let Some(delivery) = next {
            delivery.deliver(Entry::Turn(Turn::new(Arc::clone(self))));
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        // No code panics between two assignments to these fields, so a poisoned queue is
        // consistent.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched for Slot {
    fn check(self: Arc<Self>, now: Moment) -> bool {
        let mut line = self.line();
        let mut overdue = Vec::new();
        line.given.take_if(|given| !given.delivery.is_open());
        line.given_again.retain(|given| given.delivery.is_open());
        let Line { given, given_again, .. } = &mut *line;
        for given in given.iter_mut().chain(given_again) {
            if given.is_overdue(now) && !mutated(Mutant::UnpolledCallerKept) {
                overdue.push(Arc::clone(&given.delivery));
            }
        }
        let goes_on =
            line.given.is_some() || !line.given_again.is_empty() || !line.waiters.is_empty();
        if !goes_on {
            line.watched = None;
            line.given_again = Vec::new();
        }
        drop(line);
        for delivery in overdue {
            delivery.pass_on();
        }
        goes_on
    }
}

impl Line {
    fn forget_trouble(&mut self, troubled: &AtomicBool) {
        self.trouble = None;
        troubled.store(false, Ordering::Relaxed);
    }

    /// Removes the waiters with the owner of `hold` from the queue, and returns them with their
    /// guards.
    fn begin_hold(&mut self, hold: &Arc<Hold>) -> Vec<(Arc<Delivery>, Entry)> {
        let mut entries = Vec::new();
        let Some(owner) = hold.owner() else {
            self.reentrant = Weak::new();
            return entries;
        };
        // If the hold is already lost, another caller may have the local permit and be the current
        // hold.
        if hold.held().valid_until() <= Moment::about_now() {
            return entries;
        }
        self.reentrant = Arc::downgrade(hold);
        let own = (owner.clone(), 0)..=(owner.clone(), u64::MAX);
        let friends: Vec<u64> = self.by_owner.range(own).map(|(_, ticket)| *ticket).collect();
        if !friends.is_empty() {
            self.given_again.retain(|given| given.delivery.is_open());
        }
        for ticket in friends {
            // If the hold has ended, the remaining waiters stay in the queue for a local permit.
            let Some(guard) = hold.enter_again() else { break };
            let Some(waiter) = self.remove(ticket) else { break };
            self.given_again.push(waiter.given(hold.held().slot().engine()));
            entries.push((waiter.delivery, Entry::Again(guard)));
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
        self.forget_owner(ticket, &waiter);
        Some(waiter)
    }

    fn forget_owner(&mut self, ticket: u64, waiter: &Waiter) {
        if let Some(owner) = &waiter.owner {
            self.by_owner.remove(&(owner.clone(), ticket));
        }
    }

    /// Records that `waiter`, just removed from the queue, gets the local permit or the claim. Only
    /// one waiter has it at a time.
    fn give(&mut self, ticket: u64, waiter: Waiter, engine: &Engine) -> Arc<Delivery> {
        self.forget_owner(ticket, &waiter);
        self.given = Some(waiter.given(engine));
        waiter.delivery
    }

    fn enter_again(&self, owner: Option<&Owner>) -> Option<LockGuard> {
        let owner = owner?;
        let hold = self.reentrant.upgrade()?;
        if hold.owner() == Some(owner) { hold.enter_again() } else { None }
    }
}

impl Waiter {
    fn given(&self, engine: &Engine) -> Given {
        let terms = self.terms.as_ref().unwrap_or(&engine.default_terms);
        Given { delivery: Arc::clone(&self.delivery), patience: terms.lease.length, since: None }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let line = self.line.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((ticket, _)) = line.watched {
            self.engine.janitor.watch().deregister(ticket);
        }
        // At this point the local lock is dead but still in the table.
        point();
        self.engine.slots().remove_dead(&self.key);
    }
}

/// The local permit: the right of one caller of this process to compete for the key in the store.
/// Dropping it passes it to the next caller in the queue.
#[derive(Debug)]
pub(crate) struct Turn {
    slot: Option<Arc<Slot>>,
    pub(crate) contention: Option<Box<Contention>>,
    granted_at: Option<Moment>,
}

impl Turn {
    fn new(slot: Arc<Slot>) -> Self {
        let contention = slot.engine.fairness.contention(&slot.key);
        Self { slot: Some(slot), contention, granted_at: None }
    }

    pub(crate) fn slot(&self) -> &Arc<Slot> {
        self.slot.as_ref().expect("a turn has its slot until it is dropped")
    }

    /// Records that the store has granted the claim of this permit.
    pub(crate) fn taken(&mut self, now: Moment) {
        self.granted_at = Some(now);
        if let (Some(slot), Some(contention)) = (&self.slot, &mut self.contention) {
            slot.engine.fairness.on_grant(contention);
        }
        if mutated(Mutant::HeldSlotEvicted) {
            let slot = self.slot();
            slot.engine.slots().evict(&slot.key);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            if let (Some(granted_at), Some(contention)) = (self.granted_at, &self.contention) {
                slot.engine.fairness.on_release(&slot.key, **contention, granted_at);
            }
            slot.pass_on();
        }
    }
}

/// A place in the wait queue. Dropping it leaves the queue; an entry that was already sent passes
/// to the next waiter.
struct Waiting<'a> {
    slot: &'a Slot,
    /// `None` once the waiter is not in the queue any more.
    ticket: Option<u64>,
    delivery: Arc<Delivery>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            let waiter = self.slot.line().remove(ticket);
            drop(waiter);
            self.delivery.leave();
        }
    }
}
