//! The lease renewer: renews the held claims of a registry and ends those whose lease runs out.
//! Time arithmetic is in `lease`.
//!
//! A registry has one task and one schedule. Claims that are due together are renewed in batches
//! per shard. Each batch is a separate call, so that no shard waits for another. Started by
//! [`RegistryBuilder::build`](crate::RegistryBuilder::build).

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{FutureExt as _, poll_fn};
use futures_util::stream::{FuturesUnordered, Stream as _};
use tokio::sync::Notify;

use crate::backend::{Claim, LockBackend, Renewal};
use crate::clock::Moment;
use crate::contained::{contain, discard};
use crate::engine::missing_answer;
use crate::error::{BackendError, LostReason};
use crate::held::{HeldClaim, Tick};
use crate::invalidation::{Inbox, Invalidations, News};
use crate::key::Key;
use crate::lease::TOGETHER;
use crate::slot::SlotTable;

/// The key of a claim in the schedule: its due time, and a ticket that makes it unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Seat {
    at: Moment,
    ticket: u64,
    /// The claim is due for a renewal, which may be sent slightly early.
    renewal: bool,
}

type Seats = BTreeMap<Seat, Arc<HeldClaim>>;

#[derive(Clone)]
pub(crate) struct Keeper(Arc<Shared>);

pub(crate) struct Shared {
    schedule: Mutex<Schedule>,
    /// The invalidations that the task has not handled yet.
    inbox: Inbox,
    /// The invalidation epoch of all keys, for reports that may have been missed.
    gaps: AtomicU32,
    slots: Arc<SlotTable>,
    changed: Notify,
}

impl Shared {
    /// Makes the task verify the claim on `key`, if there is one.
    pub(crate) fn hear_of(&self, key: &Key) {
        if self.slots.has(key) && self.inbox.put(key) {
            self.changed.notify_one();
        }
    }

    /// Makes the task verify all held claims.
    pub(crate) fn hear_of_all(&self) {
        if self.inbox.put_all() {
            self.changed.notify_one();
        }
    }

    /// Returns whether the task still handles invalidations.
    pub(crate) fn listens(&self) -> bool {
        self.inbox.is_open()
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last schedule key of a local lock's claim, which may have left the schedule. Accessed only
/// while the schedule is locked.
#[derive(Debug, Default)]
pub(crate) struct LastSeat {
    at: AtomicI64,
    ticket: AtomicU64,
}

impl LastSeat {
    fn set(&self, seat: Seat) {
        self.at.store(seat.at.to_bits(), Ordering::Relaxed);
        self.ticket.store(seat.ticket, Ordering::Relaxed);
    }

    fn find(&self, seats: &Seats) -> Option<Arc<HeldClaim>> {
        let at = Moment::from_bits(self.at.load(Ordering::Relaxed));
        let ticket = self.ticket.load(Ordering::Relaxed);
        let seat = |renewal| Seat { at, ticket, renewal };
        seats.range(seat(false)..=seat(true)).next().map(|(_, held)| Arc::clone(held))
    }
}

#[derive(Default)]
struct Schedule {
    seats: Seats,
    next_ticket: u64,
    /// The value of `next_ticket` at the last pass of the task.
    seen_ticket: u64,
    /// When the task's timer fires; `None` while the task waits for a notification.
    wakes_at: Option<Moment>,
    stopped: bool,
}

impl Keeper {
    pub(crate) fn new(slots: Arc<SlotTable>) -> Self {
        Self(Arc::new(Shared {
            schedule: Mutex::default(),
            inbox: Inbox::default(),
            gaps: 0.into(),
            slots,
            changed: Notify::new(),
        }))
    }

    /// Adds a claim to the schedule. Every held claim is in it, renewed or not, so that its end is
    /// noticed.
    pub(crate) fn seat(
        &self,
        at: Moment,
        renewal: bool,
        held: Arc<HeldClaim>,
        now: Moment,
    ) -> Seat {
        let mut schedule = self.0.schedule();
        let seat = Seat { at, ticket: schedule.next_ticket, renewal };
        held.slot().seat.set(seat);
        schedule.next_ticket += 1;
        schedule.seats.insert(seat, held);
        // An overdue timer means that the host was suspended: tokio's timers did not count that
        // time.
        if schedule.wakes_at.is_none_or(|wakes_at| at < wakes_at || wakes_at < now) {
            schedule.wakes_at = Some(at);
            drop(schedule);
            self.0.changed.notify_one();
        }
        seat
    }

    pub(crate) fn unseat(&self, seat: Seat) {
        let held = self.0.schedule().seats.remove(&seat);
        drop(held);
    }

    /// Returns a handle by which a store reports invalidations.
    pub(crate) fn invalidations(&self) -> Invalidations {
        Invalidations::new(Arc::downgrade(&self.0))
    }

    /// Returns all claims that are held now.
    pub(crate) fn all(&self) -> Vec<Arc<HeldClaim>> {
        self.0.schedule().seats.values().cloned().collect()
    }

    /// Returns the first `count` claims that are due for a renewal, in the order of their due
    /// times.
    fn next_renewals(&self, count: usize) -> Vec<Arc<HeldClaim>> {
        let schedule = self.0.schedule();
        let renewals = schedule.seats.iter().filter(|(seat, _)| seat.renewal);
        renewals.take(count).map(|(_, held)| Arc::clone(held)).collect()
    }

    /// Returns the invalidation epoch of all keys.
    pub(crate) fn gaps(&self) -> u32 {
        self.0.gaps.load(Ordering::Relaxed)
    }

    /// Ends the task.
    pub(crate) fn stop(&self) {
        self.0.inbox.close();
        self.0.schedule().stopped = true;
        self.0.changed.notify_one();
    }

    /// Returns the future of the task. It runs until [`stop`](Self::stop).
    pub(crate) fn work(
        &self,
        backend: Arc<dyn LockBackend>,
    ) -> impl Future<Output = ()> + Send + use<> {
        work(Listening(self.clone()), backend)
    }

    /// Passes queued invalidations to their claims. Returns false if there were none.
    fn hear(&self, now: Moment) -> bool {
        let about = match self.0.inbox.take() {
            News::None => return false,
            News::Of(keys) => {
                let mut about = Vec::new();
                for key in keys {
                    if let Some(slot) = self.0.slots.get(key.as_str()) {
                        // Before the lookup: a claim that is not in the schedule yet compares the
                        // epoch when it is added.
                        slot.hear();
                        about.extend(slot.seat.find(&self.0.schedule().seats));
                    }
                }
                about
            }
            News::OfAll => {
                // Before the lookup, for the same reason.
                self.0.gaps.fetch_add(1, Ordering::Relaxed);
                self.all()
            }
        };
        for held in about {
            held.hear(now);
        }
        true
    }

    /// Returns the claims that are due, and sets the next timer. Returns `None` after
    /// [`stop`](Self::stop).
    ///
    /// A due claim stays in the schedule until it is handled, so that closing finds every claim
    /// there.
    fn due(&self, now: Moment) -> Option<Vec<(Seat, Arc<HeldClaim>)>> {
        let mut schedule = self.0.schedule();
        if schedule.stopped {
            return None;
        }
        let after = |moment| Seat { at: moment, ticket: u64::MAX, renewal: true };
        let entry = |(seat, held): (&Seat, &Arc<HeldClaim>)| (*seat, Arc::clone(held));
        let mut due: Vec<_> = schedule.seats.range(..=after(now)).map(entry).collect();
        let mut later = schedule.seats.range(after(now)..);
        let first_later = later.clone().next().map(|(seat, _)| seat.at);
        if due.iter().any(|(seat, _)| seat.renewal) {
            // One call for all claims that are due at about the same time.
            let soon = later.by_ref().take_while(|(seat, _)| seat.at <= now.after(TOGETHER));
            due.extend(soon.filter(|(seat, _)| seat.renewal).map(entry));
        }
        // A short-lived claim is usually followed by others, and a notification for each costs more
        // than a superfluous timer. The timer of a claim that is gone is therefore kept, and an
        // empty schedule that was in use gets a timer.
        let as_planned = schedule.wakes_at.filter(|at| *at > now);
        let was_used = schedule.next_ticket != schedule.seen_ticket;
        schedule.seen_ticket = schedule.next_ticket;
        let next = first_later.into_iter().chain(as_planned).min();
        let next = next.or_else(|| was_used.then_some(Moment::FUTURE));
        // tokio's timers do not count suspended time, so the task reads the clock at this interval.
        schedule.wakes_at = next.map(|at| at.min(now.after(LOOK_AT_CLOCK)));
        Some(due)
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper")
            .field("held", &self.0.schedule().seats.len())
            .finish_non_exhaustive()
    }
}

/// The renewals of one shard, grouped into calls.
#[derive(Default)]
struct Batches(Vec<Vec<(Weak<HeldClaim>, Claim)>>);

impl Batches {
    fn add(&mut self, held: &Arc<HeldClaim>, ask: Duration, batch_max: usize) {
        let claim = (Arc::downgrade(held), held.claim().clone().with_lease(ask));
        match self.0.last_mut().filter(|last| last.len() < batch_max) {
            Some(last) => last.push(claim),
            None => self.0.push(vec![claim]),
        }
    }

    /// Returns how many more claims the last call can include.
    fn room(&self, batch_max: usize) -> usize {
        self.0.last().map_or(0, |last| batch_max.saturating_sub(last.len()))
    }
}

/// One renewal call, its claims and its results.
struct Batch {
    /// Weak, so that a claim that ends during the call does not keep its local lock alive.
    helds: Vec<Weak<HeldClaim>>,
    sent_at: Moment,
    answers: Vec<Result<Renewal, BackendError>>,
}

type BatchCall = Pin<Box<dyn Future<Output = Batch> + Send>>;

/// The task's reference to the lease renewer. Its drop closes the invalidation queue.
struct Listening(Keeper);

impl Drop for Listening {
    fn drop(&mut self) {
        // Also reached when the runtime shuts down and drops the task.
        self.0.0.inbox.close();
    }
}

async fn work(listening: Listening, backend: Arc<dyn LockBackend>) {
    let keeper = &listening.0;
    let mut calls: FuturesUnordered<BatchCall> = FuturesUnordered::new();
    loop {
        let now = Moment::now();
        let heard = keeper.hear(now);
        let Some(due) = keeper.due(now) else {
            break;
        };
        let mut renewals: BTreeMap<u32, Batches> = BTreeMap::new();
        let batch_max = renewals_max(&*backend);
        let mut is_due = false;
        for (seat, held) in due {
            match held.tick(seat, now) {
                Tick::Nothing => {}
                Tick::Lose(reason) => _ = held.lose(reason),
                Tick::Renew { ask, is_look, unanswered } => {
                    if unanswered {
                        held.renewal_unanswered(now);
                    }
                    is_due |= !is_look;
                    let batches = renewals.entry(shard(&*backend, held.claim())).or_default();
                    batches.add(&held, ask, batch_max);
                }
            }
        }
        if is_due {
            let together = renews_together(&*backend);
            let room = renewals.values().map(|batches| batches.room(batch_max));
            let room = room.fold(0, usize::saturating_add);
            for held in keeper.next_renewals(room) {
                let batches = renewals.get_mut(&shard(&*backend, held.claim()));
                if let Some(batches) = batches.filter(|batches| batches.room(batch_max) > 0)
                    && let Some(ask) = held.join(now, together)
                {
                    batches.add(&held, ask, batch_max);
                }
            }
        }
        for batch in renewals.into_values().flat_map(|batches| batches.0) {
            calls.push(renew(Arc::clone(&backend), batch, now));
        }
        if heard {
            // Other tasks of this thread must run even if invalidations arrive without a pause.
            tokio::task::yield_now().await;
        }
        let wakes_at = keeper.0.schedule().wakes_at;
        let sleep = async {
            match wakes_at {
                Some(at) => tokio::time::sleep(at.since(Moment::now())).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            batch = poll_fn(|cx| Pin::new(&mut calls).poll_next(cx)), if !calls.is_empty() => {
                if let Some(batch) = batch {
                    settle(batch);
                }
            }
            () = keeper.0.changed.notified() => {}
            () = sleep => {}
        }
    }
    // Calls in flight are completed: the backend contract does not allow dropping them.
    while poll_fn(|cx| Pin::new(&mut calls).poll_next(cx)).await.is_some() {}
}

fn renew(
    backend: Arc<dyn LockBackend>,
    batch: Vec<(Weak<HeldClaim>, Claim)>,
    sent_at: Moment,
) -> BatchCall {
    let (helds, claims): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    // If the backend panics, only this batch fails, not the lease renewer's task.
    let call = AssertUnwindSafe(async move { backend.renew(&claims).await }).catch_unwind();
    Box::pin(call.map(move |answers| Batch {
        helds,
        sent_at,
        answers: answers.map_err(discard).unwrap_or_default(),
    }))
}

fn renews_together(backend: &dyn LockBackend) -> bool {
    contain(|| backend.renews_together()).unwrap_or_default()
}

fn shard(backend: &dyn LockBackend, claim: &Claim) -> u32 {
    contain(|| backend.shard(claim)).unwrap_or_default()
}

fn renewals_max(backend: &dyn LockBackend) -> usize {
    contain(|| backend.renewals_max()).unwrap_or_default().max(1)
}

fn settle(batch: Batch) {
    let mut answers = batch.answers.into_iter();
    for held in batch.helds {
        let answer = answers.next().unwrap_or_else(|| Err(missing_answer()));
        let Some(held) = held.upgrade() else { continue };
        match answer {
            Ok(Renewal::Renewed(granted)) => held.confirmed(batch.sent_at, granted),
            Ok(Renewal::Gone) => _ = held.lose(LostReason::Gone),
            Err(error) => held.renewal_failed(batch.sent_at, &error),
        }
    }
}

const LOOK_AT_CLOCK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::{Attempt, Capabilities, LockRegistry as _, PassThroughBackend, Registry, Release};

    /// Requests a verification of each lock that is held for more than 25 ms.
    #[derive(Debug)]
    struct Curious(PassThroughBackend);

    #[async_trait]
    impl LockBackend for Curious {
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }

        async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
            self.0.try_acquire(claim).await
        }

        async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
            self.0.renew(claims).await
        }

        async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
            self.0.release(claim).await
        }

        fn verify_after(&self) -> Option<Duration> {
            Some(Duration::from_millis(25))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn locks_that_are_held_for_a_moment_call_the_keeper_once_for_all() {
        let registry =
            Registry::builder(Arc::new(Curious(PassThroughBackend::new()))).build().unwrap();
        let lock = registry.obtain("orders/42");
        // First with an otherwise empty schedule, then next to a lock that is held throughout.
        for beside_another in [false, true] {
            let other = if beside_another {
                Some(registry.obtain("orders/43").lock().await.unwrap())
            } else {
                None
            };
            // Longer than any timer that the other lock or earlier locks have set.
            tokio::time::sleep(Duration::from_millis(2_500)).await;
            let began = Moment::now();
            for millis in 0..20 {
                let guard = lock.lock().await.unwrap();
                let keeper = guard.hold().held().engine().keeper.clone();
                guard.unlock().await.unwrap();
                // Paused time advances only when all tasks are idle.
                tokio::time::sleep(Duration::from_millis(1)).await;
                let planned = Some(began.after(Duration::from_millis(25)));
                assert_eq!(keeper.0.schedule().wakes_at, planned, "after {millis} ms");
            }
            drop(other);
        }
    }
}
