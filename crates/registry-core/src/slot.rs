//! The local half of a lock: one slot per key and process, a turn that one caller has at a time, a FIFO queue for the rest.
//!
//! Nothing here talks to a store. Whoever has the [`Turn`] may contend for the key remotely; dropping it lets the next in
//! line. A slot lives as long as a handle, guard or waiter does, so nothing is ever evicted under anybody.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry as MapEntry;
use tokio::sync::oneshot;

use crate::clock::Moment;
use crate::engine::Engine;
use crate::error::BackendError;
use crate::guard::LockGuard;
use crate::hints::NewsMark;
use crate::hold::Hold;
use crate::interleave::{Mutex, MutexGuard, point};
use crate::keeper::LastSeat;
use crate::key::Key;
use crate::mutant::{Mutant, mutated};
use crate::options::Terms;
use crate::owner::Owner;

/// The slots of one registry, by key.
pub(crate) struct SlotTable(DashMap<Key, Weak<Slot>>);

impl SlotTable {
    pub(crate) fn new() -> Self {
        Self(DashMap::new())
    }

    /// How many slots are alive.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// All slots that are alive now.
    pub(crate) fn all(&self) -> Vec<Arc<Slot>> {
        self.0.iter().filter_map(|entry| entry.value().upgrade()).collect()
    }

    /// Whether anybody here has to do with `key`. Takes hold of no slot: letting it go might end the registry.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.0.contains_key(key)
    }

    /// The one slot of `key`; `None` when there is none yet.
    pub(crate) fn get(&self, key: &str) -> Option<Arc<Slot>> {
        point();
        self.0.get(key)?.upgrade()
    }

    /// The one slot of `key`, made by `make` if there is none.
    pub(crate) fn get_or_insert(&self, key: Key, make: impl FnOnce(Key) -> Arc<Slot>) -> Arc<Slot> {
        point();
        match self.0.entry(key) {
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
        self.0.remove_if(key, |_, slot| slot.strong_count() == 0);
    }

    /// Forgets a slot that is still in use. The bug that [`Mutant::HeldSlotEvicted`] stands for.
    fn evict(&self, key: &Key) {
        self.0.remove(key);
    }
}

impl fmt::Debug for SlotTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotTable").field("len", &self.len()).finish()
    }
}

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
    closed: bool,
}

type Door = oneshot::Sender<Entry>;

struct Waiter {
    owner: Option<Owner>,
    /// `None` for the registry's own, so that a crowd need not share a count.
    terms: Option<Arc<Terms>>,
    door: Door,
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
                return Ok(Entry::Turn(Turn { slot: Some(Arc::clone(self)) }));
            }
            if deadline.is_some_and(|deadline| deadline <= Moment::now()) {
                return Err(NoEntry::TimedOut(line.trouble.clone()));
            }
            let ticket = line.next_ticket;
            line.next_ticket += 1;
            let (door, entry) = oneshot::channel();
            let own = Arc::ptr_eq(terms, &self.engine.default_terms);
            let terms = if own { None } else { Some(Arc::clone(terms)) };
            let waiter = Waiter { owner: owner.cloned(), terms, door };
            line.waiters.insert(ticket, waiter);
            self.wanted.store(true, Ordering::Relaxed);
            Waiting { slot: self, ticket: Some(ticket), entry }
        };
        self.engine.tell(|| crate::LockEvent::Waiting { key: self.key.as_str() });
        let entry = &mut waiting.entry;
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
        // Whoever opened or closed the door has taken our place off the line.
        waiting.ticket = None;
        // A door that nobody holds any more: the line was closed.
        entered.map_err(|_| NoEntry::Closed)
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
        for (door, entry) in friends {
            deliver(door, entry);
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
        let waiter = first.remove();
        // Before the line is unlocked: the taker may be done by then, and the next one's hold begun.
        let friends = line.begin_hold(guard.hold());
        drop(line);
        deliver(waiter.door, Entry::HandedOver(guard));
        for (door, entry) in friends {
            deliver(door, entry);
        }
        true
    }

    /// Sends everybody away, now and from now on.
    pub(crate) fn close(&self) {
        let mut line = self.line();
        line.closed = true;
        let waiters = std::mem::take(&mut line.waiters);
        drop(line);
        drop(waiters);
    }

    fn pass_on(self: &Arc<Self>) {
        let mut line = self.line();
        line.reentrant = Weak::new();
        // Whoever is next asks the store again.
        line.forget_trouble(&self.troubled);
        let next = line.waiters.pop_first();
        line.taken = next.is_some();
        if line.waiters.is_empty() {
            self.wanted.store(false, Ordering::Relaxed);
        }
        drop(line);
        if let Some((_, waiter)) = next {
            let turn = Turn { slot: Some(Arc::clone(self)) };
            deliver(waiter.door, Entry::Turn(turn));
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        // A panic between two field assignments cannot happen here; poisoning carries no meaning.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a door. Never while the line is locked: a waker may drop the task that it wakes, and that leaves the line.
fn deliver(door: Door, entry: Entry) {
    // An entry whose taker is gone is passed on by its own drop.
    drop(door.send(entry));
}

impl Line {
    fn forget_trouble(&mut self, troubled: &AtomicBool) {
        self.trouble = None;
        troubled.store(false, Ordering::Relaxed);
    }

    /// Takes those off the line who wait under the owner of `hold`, with the guards that they are to get.
    fn begin_hold(&mut self, hold: &Arc<Hold>) -> Vec<(Door, Entry)> {
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
        let is_friend = |waiter: &Waiter| waiter.owner.as_ref() == Some(owner);
        let friends: Vec<u64> = self
            .waiters
            .iter()
            .filter(|(_, waiter)| is_friend(waiter))
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in friends {
            // A hold that is over already leaves its friends in line; they get their own turn.
            let Some(guard) = hold.enter_again() else { break };
            let Some(waiter) = self.waiters.remove(&ticket) else { break };
            entries.push((waiter.door, Entry::Again(guard)));
        }
        entries
    }

    fn enter_again(&self, owner: Option<&Owner>) -> Option<LockGuard> {
        let owner = owner?;
        let hold = self.reentrant.upgrade()?;
        if hold.owner() == Some(owner) { hold.enter_again() } else { None }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Here the slot is dead and still in the table.
        point();
        self.engine.slots().remove_dead(&self.key);
    }
}

/// The right of one caller of this process to contend for the key in the store. Dropping it lets the next in line.
#[derive(Debug)]
pub(crate) struct Turn {
    slot: Option<Arc<Slot>>,
}

impl Turn {
    pub(crate) fn slot(&self) -> &Arc<Slot> {
        self.slot.as_ref().expect("a turn has its slot until it is dropped")
    }

    pub(crate) fn taken(&self) {
        if mutated(Mutant::HeldSlotEvicted) {
            let slot = self.slot();
            slot.engine.slots().evict(&slot.key);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.pass_on();
        }
    }
}

/// A place in the line. Dropping it gives the place up; an entry that has already been given is passed on by its own drop.
struct Waiting<'a> {
    slot: &'a Slot,
    /// `None` once the place is not in the line any more.
    ticket: Option<u64>,
    entry: oneshot::Receiver<Entry>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            let waiter = self.slot.line().waiters.remove(&ticket);
            drop(waiter);
        }
    }
}
