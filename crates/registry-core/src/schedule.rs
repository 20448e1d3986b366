//! The schedule of the lease renewer: when each active grant is due.
//!
//! Every active grant is in it, renewed or not, so that the end of its lease is noticed.

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

    /// Returns the schedule key that the local lock of this claim remembers.
    fn last_timer(&self) -> &LastTimerKey;

    /// Returns what to do for this claim, whose entry `timer` is due.
    fn take_due_action(self: Arc<Self>, timer: TimerKey, now: Moment) -> RenewerAction;

    /// Returns the lease to request now, in a call that renews other claims. Returns `None` if this
    /// claim is not due soon. See
    /// [`Lease::batch_renewal_lease`](crate::lease::Lease::batch_renewal_lease).
    fn renew_early(self: Arc<Self>, now: Moment, whole_shard: bool) -> Option<Duration>;

    /// Records an invalidation of the key, and schedules a verification of the claim.
    fn invalidate(self: Arc<Self>, now: Moment);

    /// Records that the response to the request of `sent_at` confirmed the claim.
    fn confirmed(self: Arc<Self>, sent_at: Moment, granted: Duration);

    /// Records that the request of `sent_at` failed.
    fn renewal_failed(self: Arc<Self>, sent_at: Moment, error: &BackendError);

    /// Emits an event: a renewal had no response, and is repeated now.
    fn emit_renewal_unanswered(&self, now: Moment);

    /// Ends the claim by loss. Returns false if the claim had ended.
    fn lose(self: Arc<Self>, reason: LostReason) -> bool;
}

/// What the lease renewer must do for a claim.
pub(crate) enum RenewerAction {
    Nothing,
    Renew {
        requested: Duration,
        /// The renewal is sent early, to verify that the claim is still held.
        is_verification: bool,
        /// The previous renewal had no response.
        unanswered: bool,
    },
    Lose(LostReason),
}

/// The key of a claim in the schedule: its due time, and a ticket that makes it unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TimerKey {
    at: Moment,
    ticket: u64,
    /// The claim is due for a renewal or verification, which may be sent slightly early. False at
    /// the end of a lease.
    renewal: bool,
}

/// The key of the last entry that a local lock had in the schedule; the entry may have been
/// removed. Accessed only while the schedule is locked.
#[derive(Debug, Default)]
pub(crate) struct LastTimerKey {
    at: AtomicI64,
    ticket: AtomicU64,
}

impl LastTimerKey {
    fn set(&self, timer: TimerKey) {
        self.at.store(timer.at.to_bits(), Ordering::Relaxed);
        self.ticket.store(timer.ticket, Ordering::Relaxed);
    }

    fn find(&self, timers: &BTreeMap<TimerKey, Arc<dyn Renewable>>) -> Option<Arc<dyn Renewable>> {
        let at = Moment::from_bits(self.at.load(Ordering::Relaxed));
        let ticket = self.ticket.load(Ordering::Relaxed);
        let timer = |renewal| TimerKey { at, ticket, renewal };
        timers.range(timer(false)..=timer(true)).next().map(|(_, grant)| Arc::clone(grant))
    }
}

#[derive(Default)]
pub(crate) struct Schedule {
    timers: Mutex<Timers>,
    /// Wakes the lease renewer's task.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct Timers {
    by_key: BTreeMap<TimerKey, Arc<dyn Renewable>>,
    next_ticket: u64,
    /// The value of `next_ticket` at the last call of [`Schedule::due`].
    last_next_ticket: u64,
    /// When the task's timer fires; `None` while the task waits for a notification.
    wakes_at: Option<Moment>,
    stopped: bool,
}

impl Schedule {
    /// Adds an entry for a claim, and wakes the task if it is the earliest.
    pub(crate) fn set(
        &self,
        at: Moment,
        renewal: bool,
        grant: Arc<dyn Renewable>,
        now: Moment,
    ) -> TimerKey {
        let mut timers = self.timers();
        let timer = TimerKey { at, ticket: timers.next_ticket, renewal };
        grant.last_timer().set(timer);
        timers.next_ticket += 1;
        timers.by_key.insert(timer, grant);
        // The task is overdue if the host was suspended: tokio's timers do not count that time.
        if timers.wakes_at.is_none_or(|wakes_at| at < wakes_at || wakes_at < now) {
            timers.wakes_at = Some(at);
            drop(timers);
            self.changed.notify_one();
        }
        timer
    }

    pub(crate) fn cancel(&self, timer: TimerKey) {
        let grant = self.timers().by_key.remove(&timer);
        drop(grant);
    }

    /// Returns all active grants.
    pub(crate) fn all(&self) -> Vec<Arc<dyn Renewable>> {
        self.timers().by_key.values().cloned().collect()
    }

    /// Returns the first `count` claims that are due for a renewal, in the order of their due
    /// times.
    pub(crate) fn next_renewals(&self, count: usize) -> Vec<Arc<dyn Renewable>> {
        let timers = self.timers();
        let renewals = timers.by_key.iter().filter(|(timer, _)| timer.renewal);
        renewals.take(count).map(|(_, grant)| Arc::clone(grant)).collect()
    }

    /// Returns the claims that are due, and sets [`wakes_at`](Self::wakes_at). Returns `None` after
    /// [`stop`](Self::stop).
    ///
    /// A due claim stays in the schedule until it is handled, so that [`all`](Self::all) returns
    /// it.
    pub(crate) fn due(&self, now: Moment) -> Option<Vec<(TimerKey, Arc<dyn Renewable>)>> {
        let mut timers = self.timers();
        if timers.stopped {
            return None;
        }
        let after = |moment| TimerKey { at: moment, ticket: u64::MAX, renewal: true };
        let entry = |(timer, grant): (&TimerKey, &Arc<dyn Renewable>)| (*timer, Arc::clone(grant));
        let mut due: Vec<_> = timers.by_key.range(..=after(now)).map(entry).collect();
        let mut later = timers.by_key.range(after(now)..);
        let first_later = later.clone().next().map(|(timer, _)| timer.at);
        if due.iter().any(|(timer, _)| timer.renewal) {
            // One call for all claims that are due at about the same time.
            let soon = later.by_ref().take_while(|(timer, _)| timer.at <= now.after(BATCH_WINDOW));
            due.extend(soon.filter(|(timer, _)| timer.renewal).map(entry));
        }
        // A superfluous timer costs less than a notification per short-lived claim. The timer of a
        // claim that is gone is therefore kept, and an empty schedule that was in use gets a timer.
        let planned = timers.wakes_at.filter(|at| *at > now);
        let was_used = timers.next_ticket != timers.last_next_ticket;
        timers.last_next_ticket = timers.next_ticket;
        let next = first_later.into_iter().chain(planned).min();
        let next = next.or_else(|| was_used.then_some(Moment::FUTURE));
        // tokio's timers do not count the time for which the host is suspended.
        timers.wakes_at = next.map(|at| at.min(now.after(CLOCK_READ_INTERVAL)));
        Some(due)
    }

    /// Returns the claim that had the schedule key `last`, if it is still in the schedule.
    pub(crate) fn find(&self, last: &LastTimerKey) -> Option<Arc<dyn Renewable>> {
        last.find(&self.timers().by_key)
    }

    /// Returns when the task must run next. `None` if only a notification wakes it.
    pub(crate) fn wakes_at(&self) -> Option<Moment> {
        self.timers().wakes_at
    }

    /// Ends the task.
    pub(crate) fn stop(&self) {
        self.timers().stopped = true;
        self.changed.notify_one();
    }

    fn timers(&self) -> MutexGuard<'_, Timers> {
        self.timers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schedule").field("len", &self.timers().by_key.len()).finish_non_exhaustive()
    }
}

/// The maximum time between two reads of the clock by the task.
const CLOCK_READ_INTERVAL: Duration = Duration::from_secs(1);
