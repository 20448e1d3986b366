//! The schedule of the lease renewer: when each active grant is due.
//!
//! The schedule contains every grant until its release begins, even without automatic renewal. The
//! lease renewer thus detects the end of every lease.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::Claim;
use crate::clock::Moment;
use crate::error::{BackendError, LostReason};
use crate::lease::BATCH_WINDOW;

/// An active grant, as the lease renewer sees it.
pub(crate) trait Renewable: Send + Sync {
    fn claim(&self) -> &Claim;

    /// Returns the id of the latest schedule entry of this claim's local lock.
    fn latest_entry_id(&self) -> &LatestEntryId;

    /// Returns the action for this claim, whose entry `id` is due. If the action is a renewal,
    /// records it as sent. Schedules the next entry unless the claim or its lease has ended.
    fn begin_due_action(self: Arc<Self>, id: EntryId, now: Moment) -> RenewerAction;

    /// Returns the lease to request now, in a call that renews other claims, and records the
    /// renewal as sent. Returns `None` if this claim is not due soon, or must not be renewed now.
    /// See [`Lease::batch_renewal_lease`](crate::lease::Lease::batch_renewal_lease).
    fn begin_early_renewal(
        self: Arc<Self>,
        now: Moment,
        renews_whole_shard: bool,
    ) -> Option<Duration>;

    /// Records an invalidation of the key, and schedules a verification of the claim.
    fn invalidate(self: Arc<Self>, now: Moment);

    /// Records that the response to the request of `sent_at` confirmed the claim.
    fn on_confirmed(self: Arc<Self>, sent_at: Moment, granted: Duration);

    /// Records that the request of `sent_at` failed.
    fn on_renewal_failed(self: Arc<Self>, sent_at: Moment, error: &BackendError);

    /// Emits the event of a renewal that had no response and is now repeated.
    fn emit_unanswered_renewal(&self, now: Moment);

    /// Ends the claim because it is lost. Returns false if the claim had ended before.
    fn lose(self: Arc<Self>, reason: LostReason) -> bool;
}

/// The action of the lease renewer for a claim.
pub(crate) enum RenewerAction {
    Nothing,
    Renew {
        requested_lease: Duration,
        /// The renewal is sent early, to verify that the claim is still held.
        is_verification: bool,
        /// The previous request of the same kind, renewal or verification, had no response.
        previous_unanswered: bool,
    },
    Lose(LostReason),
}

/// The id of an entry in the schedule: its due time, and a number that makes the id unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EntryId {
    at: Moment,
    number: u64,
    /// True if the claim is due for a renewal or verification, which may be sent slightly early.
    /// False if the entry is for the end of the lease.
    is_renewal: bool,
}

/// The id of the latest entry that a local lock had in the schedule. The entry may have been
/// removed. The fields are accessed only while the schedule is locked.
#[derive(Debug, Default)]
pub(crate) struct LatestEntryId {
    at: AtomicI64,
    number: AtomicU64,
}

impl LatestEntryId {
    fn set(&self, id: EntryId) {
        self.at.store(id.at.to_bits(), Ordering::Relaxed);
        self.number.store(id.number, Ordering::Relaxed);
    }

    fn find(&self, entries: &BTreeMap<EntryId, Arc<dyn Renewable>>) -> Option<Arc<dyn Renewable>> {
        let at = Moment::from_bits(self.at.load(Ordering::Relaxed));
        let number = self.number.load(Ordering::Relaxed);
        let id = |is_renewal| EntryId { at, number, is_renewal };
        entries.range(id(false)..=id(true)).next().map(|(_, grant)| Arc::clone(grant))
    }
}

#[derive(Default)]
pub(crate) struct RenewalSchedule {
    state: Mutex<ScheduleState>,
    /// Wakes the lease renewer's task.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct ScheduleState {
    entries: BTreeMap<EntryId, Arc<dyn Renewable>>,
    /// The number of the next entry.
    next_number: u64,
    /// The value of `next_number` at the last call of [`RenewalSchedule::begin_round`].
    last_round_number: u64,
    /// The time at which the task's timer fires. `None` while the task waits only for a
    /// notification.
    wakes_at: Option<Moment>,
    stopped: bool,
}

impl RenewalSchedule {
    /// Adds an entry for a claim, and returns its id. Wakes the task if its timer fires after
    /// `at`, is overdue, or is not set.
    pub(crate) fn insert(
        &self,
        at: Moment,
        is_renewal: bool,
        grant: Arc<dyn Renewable>,
        now: Moment,
    ) -> EntryId {
        let mut state = self.state();
        let id = EntryId { at, number: state.next_number, is_renewal };
        grant.latest_entry_id().set(id);
        state.next_number += 1;
        state.entries.insert(id, grant);
        // The timer is overdue after a suspension of the host, which tokio's timers do not count.
        if state.wakes_at.is_none_or(|wakes_at| at < wakes_at || wakes_at < now) {
            state.wakes_at = Some(at);
            drop(state);
            self.changed.notify_one();
        }
        id
    }

    /// Removes the entry `id`, if it exists.
    pub(crate) fn remove(&self, id: EntryId) {
        // The grant is dropped after the unlock.
        let grant = self.state().entries.remove(&id);
        drop(grant);
    }

    /// Returns the grants of all entries. A grant that is being released has no entry.
    pub(crate) fn all(&self) -> Vec<Arc<dyn Renewable>> {
        self.state().entries.values().cloned().collect()
    }

    /// Returns the `count` claims whose next renewal or verification is due first, in the order of
    /// their due times.
    pub(crate) fn next_renewals(&self, count: usize) -> Vec<Arc<dyn Renewable>> {
        let state = self.state();
        let renewals = state.entries.iter().filter(|(id, _)| id.is_renewal);
        renewals.take(count).map(|(_, grant)| Arc::clone(grant)).collect()
    }

    /// Begins a round of the task: returns the claims that are due, and sets
    /// [`wakes_at`](Self::wakes_at). If a renewal is due, also returns the renewals that are due
    /// within [`BATCH_WINDOW`]. Returns `None` after [`stop`](Self::stop).
    ///
    /// A due claim stays in the schedule, and thus in [`all`](Self::all), until the lease renewer
    /// has handled it.
    pub(crate) fn begin_round(&self, now: Moment) -> Option<Vec<(EntryId, Arc<dyn Renewable>)>> {
        let mut state = self.state();
        if state.stopped {
            return None;
        }
        let last_id_at = |at| EntryId { at, number: u64::MAX, is_renewal: true };
        let entry = |(id, grant): (&EntryId, &Arc<dyn Renewable>)| (*id, Arc::clone(grant));
        let mut due: Vec<_> = state.entries.range(..=last_id_at(now)).map(entry).collect();
        let mut later = state.entries.range(last_id_at(now)..);
        let first_later = later.clone().next().map(|(id, _)| id.at);
        if due.iter().any(|(id, _)| id.is_renewal) {
            // Claims that are due at about the same time share one call.
            let soon = later.by_ref().take_while(|(id, _)| id.at <= now.after(BATCH_WINDOW));
            due.extend(soon.filter(|(id, _)| id.is_renewal).map(entry));
        }
        // Without a timer, each short-lived claim would notify the task when it is inserted. These
        // notifications cost more than a superfluous wake-up by the timer. The timer therefore
        // stays set when its claim is removed. For the same reason, an empty schedule that was in
        // use since the last round gets a timer.
        let current_timer = state.wakes_at.filter(|at| *at > now);
        let was_used = state.next_number != state.last_round_number;
        state.last_round_number = state.next_number;
        let next = first_later.into_iter().chain(current_timer).min();
        let next = next.or_else(|| was_used.then_some(Moment::FUTURE));
        // tokio's timers do not count the time for which the host is suspended.
        state.wakes_at = next.map(|at| at.min(now.after(CLOCK_READ_INTERVAL)));
        Some(due)
    }

    /// Returns the grant whose entry has the id `last`, if this entry is still in the schedule.
    pub(crate) fn find(&self, last: &LatestEntryId) -> Option<Arc<dyn Renewable>> {
        last.find(&self.state().entries)
    }

    /// Returns the time at which the task must run next. `None` if only a notification wakes the
    /// task.
    pub(crate) fn wakes_at(&self) -> Option<Moment> {
        self.state().wakes_at
    }

    /// Makes the task end.
    pub(crate) fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, ScheduleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RenewalSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RenewalSchedule")
            .field("len", &self.state().entries.len())
            .finish_non_exhaustive()
    }
}

/// The maximum time between two reads of the clock by the task, unless the schedule is empty.
const CLOCK_READ_INTERVAL: Duration = Duration::from_secs(1);
