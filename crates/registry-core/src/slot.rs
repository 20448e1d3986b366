//! The local half of a lock: one slot per key and process, a turn that one caller has at a time, a FIFO queue for the rest.
//!
//! Nothing here talks to a store. Whoever has the [`Turn`] may contend for the key remotely; dropping it lets the next in
//! line. A slot lives as long as a handle, guard or waiter does, so nothing is ever evicted under anybody.

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
use crate::hints::NewsMark;
use crate::hold::Hold;
use crate::interleave::{Mutex, MutexGuard, point};
use crate::keeper::LastSeat;
use crate::key::Key;
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::owner::Owner;
use crate::watch::Watched;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry as MapEntry;

/// The slots of one registry, by key.
pub(crate) struct SlotTable {
    slots: DashMap<Key, Weak<Slot>>,
    /// How many have left since it was last checked whether the table is far too large.
    left: AtomicUsize,
    /// How many may leave until then.
    left_max: AtomicUsize,
}

impl SlotTable {
    pub(crate) fn new() -> Self {
        let left_max = AtomicUsize::new(SHRINK_AFTER_MIN);
        Self { slots: DashMap::new(), left: AtomicUsize::new(0), left_max }
    }

    /// How many slots are alive.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// All slots that are alive now.
    pub(crate) fn all(&self) -> Vec<Arc<Slot>> {
        self.slots.iter().filter_map(|entry| entry.value().upgrade()).collect()
    }

    /// Whether anybody here has to do with `key`. Takes hold of no slot: letting it go might end the registry.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.slots.contains_key(key)
    }

    /// The one slot of `key`; `None` when there is none yet.
    pub(crate) fn get(&self, key: &str) -> Option<Arc<Slot>> {
        point();
        self.slots.get(key)?.upgrade()
    }

    /// The one slot of `key`, made by `make` if there is none.
    pub(crate) fn get_or_insert(&self, key: Key, make: impl FnOnce(Key) -> Arc<Slot>) -> Arc<Slot> {
        point();
        match self.slots.entry(key) {
            MapEntry::Occupied(mut entry) => match entry.get().upgrade() {
                Some(slot) => slot,
                // The old slot is dead but has not left the table yet: nobody can reach it any more, so
                // a new one may take its place. The old one's `Drop` will see that the entry is not its own.
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

    /// Gives memory back when most of the table is empty. Moves about one slot for each that has left since the last time.
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

    /// Forgets a slot that is still in use. The bug that [`Mutant::HeldSlotEvicted`] stands for.
    fn evict(&self, key: &Key) {
        self.slots.remove(key);
    }
}

impl fmt::Debug for SlotTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotTable").field("len", &self.len()).finish()
    }
}

/// A table that has not lost as many slots is not shrunk: what it has too much is not worth the work.
const SHRINK_AFTER_MIN: usize = 16_384;

/// What all callers of one key in one registry share.
pub(crate) struct Slot {
    key: Key,
    engine: Arc<Engine>,
    line: Mutex<Line>,
    /// False only if nobody waits, or somebody has just come.
    wanted: AtomicBool,
    /// False only if there is no [`Line::trouble`]. Written by whoever has the turn.
    troubled: AtomicBool,
    /// Counts the news of this key.
    news: AtomicU32,
    /// Where the keeper finds the claim that is held on this key.
    pub(crate) seat: LastSeat,
}

#[derive(Default)]
struct Line {
    /// Somebody has the turn.
    taken: bool,
    /// What went wrong when the store was asked last, by whoever has the turn. A store that does not answer must not look to those behind
    /// like a lock that somebody has.
    trouble: Option<BackendError>,
    /// The current hold, if its owner may enter again.
    reentrant: Weak<Hold>,
    next_ticket: u64,
    /// By ticket, so the first is the longest waiting, and leaving from the middle is cheap.
    waiters: BTreeMap<u64, Waiter>,
    /// The waiters that have an owner, to find those of one owner without a look at all.
    by_owner: BTreeSet<(Owner, u64)>,
    /// The turn or the claim that a waiter was given last; it may have taken it.
    given: Option<Given>,
    /// The further guards that waiters of the current owner were given; they may have taken them.
    given_again: Vec<Given>,
    /// How the registry's watch knows this slot, and for which patience, while somebody waits.
    watched: Option<(u64, Duration)>,
    closed: bool,
}

struct Waiter {
    owner: Option<Owner>,
    /// `None` for the registry's own, so that a crowd need not share a count.
    terms: Option<Arc<Terms>>,
    delivery: Arc<Delivery>,
}

/// An entry that was given to a waiter.
struct Given {
    delivery: Arc<Delivery>,
    patience: Duration,
    /// When it was first found not taken.
    since: Option<Moment>,
}

impl Given {
    /// Whether the waiter has let its patience pass without taking its entry.
    fn is_overdue(&mut self, now: Moment) -> bool {
        let since = *self.since.get_or_insert(now);
        now.since(since) >= self.patience
    }
}

/// Where one waiter finds its entry.
struct Delivery(Mutex<Delivered>);

enum Delivered {
    NotYet(Option<Waker>),
    Entry(Entry),
    /// The waiter did not take its entry, which went on to the next one.
    PassedOn,
    Closed,
    /// The waiter has taken its entry, or has gone.
    Over,
}

impl Delivery {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Delivered::NotYet(None))))
    }

    /// Gives the waiter its entry. Never while the line is locked: a waker may drop the task that it wakes, and that leaves the line.
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
            // The waiter is gone. An entry is passed on by its own drop.
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
                    // Not while this is locked: a waker may own the task that drops this waiter.
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

    /// Takes back an entry that the waiter has not taken, and passes it on.
    fn pass_on(&self) {
        let mut state = self.state();
        if matches!(*state, Delivered::Entry(_)) {
            let entry = std::mem::replace(&mut *state, Delivered::PassedOn);
            drop(state);
            drop(entry);
        }
    }

    /// Notes that the waiter is gone. An entry that it has not taken is passed on.
    fn leave(&self) {
        let before = std::mem::replace(&mut *self.state(), Delivered::Over);
        drop(before);
    }

    /// Whether the waiter may yet take an entry.
    fn is_open(&self) -> bool {
        matches!(*self.state(), Delivered::NotYet(_) | Delivered::Entry(_))
    }

    fn state(&self) -> MutexGuard<'_, Delivered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a caller gets when it comes to the front.
#[derive(Debug)]
pub(crate) enum Entry {
    /// The right to contend for the key in the store.
    Turn(Turn),
    /// A further guard of a lock that this owner already holds.
    Again(LockGuard),
    /// The claim of the one who was in front, who is done with it.
    HandedOver(LockGuard),
}

/// Why a caller got nothing.
#[derive(Debug)]
pub(crate) enum NoEntry {
    /// The deadline came first; with the trouble of the one in front, if that is what held it up.
    TimedOut(Option<BackendError>),
    /// The caller had come to the front and was not polled for a lease. It has to wait again.
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

    /// How much has been heard of this key.
    pub(crate) fn news(&self) -> NewsMark {
        NewsMark { of_key: self.news.load(Ordering::Relaxed), of_all: self.engine.keeper.gaps() }
    }

    /// Notes that there is news of this key, for whoever contends for it.
    pub(crate) fn hear(&self) {
        self.news.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for this caller's turn, or enters at once what `owner` already holds.
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
        // Whoever gave us an answer has taken our place off the line.
        waiting.ticket = None;
        entered
    }

    /// Has the registry's watch check this line, in time for a waiter of this `patience`.
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

    /// Notes what the store, asked by whoever has the turn, has failed with.
    pub(crate) fn failed(&self, error: &BackendError) {
        let mut line = self.line();
        line.trouble = Some(error.clone());
        self.troubled.store(true, Ordering::Relaxed);
    }

    /// Notes that the store has answered whoever has the turn.
    pub(crate) fn answered(&self) {
        if self.troubled.load(Ordering::Relaxed) {
            self.line().forget_trouble(&self.troubled);
        }
    }

    /// Notes that `hold` is the current one, and lets in those who wait under the same owner. Called by the holder, who
    /// still has the first guard.
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

    /// Passes a claim to the next caller, if that one asked for the same. `make` makes its guard, if the claim is good for it
    /// still; the turn stays with the claim. Returns false when there is nobody to take it.
    pub(crate) fn hand_over(
        &self,
        terms: &Terms,
        make: impl FnOnce(Option<Owner>) -> Option<LockGuard>,
    ) -> bool {
        // Whoever has come only just now gets the turn.
        if !self.wanted.load(Ordering::Relaxed) {
            return false;
        }
        let mut line = self.line();
        if line.closed {
            return false;
        }
        // Strictly the first in line: passing over it would break the order.
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
        // Before the line is unlocked: the taker may be done by then, and the next one's hold begun.
        let friends = line.begin_hold(guard.hold());
        drop(line);
        delivery.deliver(Entry::HandedOver(guard));
        for (delivery, entry) in friends {
            delivery.deliver(entry);
        }
        true
    }

    /// Sends everybody away, now and from now on.
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
        // Whoever is next asks the store again.
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
        // A panic between two field assignments cannot happen here; poisoning carries no meaning.
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

    /// Takes those off the line who wait under the owner of `hold`, with the guards that they are to get.
    fn begin_hold(&mut self, hold: &Arc<Hold>) -> Vec<(Arc<Delivery>, Entry)> {
        let mut entries = Vec::new();
        let Some(owner) = hold.owner() else {
            self.reentrant = Weak::new();
            return entries;
        };
        // Lost already: the turn may be another's by now, and so is the place of the current hold.
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
            // A hold that is over already leaves its friends in line; they get their own turn.
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

    /// Notes that the waiter that has just left the line gets the turn, or the claim with it. One waiter has it at a time.
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
        // Here the slot is dead and still in the table.
        point();
        self.engine.slots().remove_dead(&self.key);
    }
}

/// The right of one caller of this process to contend for the key in the store. Dropping it lets the next in line.
#[derive(Debug)]
pub(crate) struct Turn {
    slot: Option<Arc<Slot>>,
    pub(crate) contention: Contention,
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

    /// Notes that the store has granted the claim of this turn.
    pub(crate) fn taken(&mut self, now: Moment) {
        self.granted_at = Some(now);
        if let Some(slot) = &self.slot {
            slot.engine.fairness.on_grant(&mut self.contention);
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
            if let Some(granted_at) = self.granted_at {
                slot.engine.fairness.on_release(&slot.key, self.contention, granted_at);
            }
            slot.pass_on();
        }
    }
}

/// A place in the line. Dropping it gives the place up; an entry that has already been given is passed on by its own drop.
struct Waiting<'a> {
    slot: &'a Slot,
    /// `None` once the place is not in the line any more.
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
