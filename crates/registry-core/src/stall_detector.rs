//! The stall detector: takes over the work of futures that are kept and not polled.
//!
//! A future that is not polled cannot release its claim or local permit, or complete its call. A
//! waiting future therefore keeps its claim, permit or call in a [`MonitoredCell`]. One task per
//! registry checks these cells. It also checks each local lock for admissions that their waiters
//! have not received.
//!
//! `unpolled_max` is the time for which a future may go without a poll. After half of this time,
//! the task wakes the future once. After all of this time, the task takes the state. It abandons an
//! acquisition, drops a permit, or makes the background releaser complete a call to the store.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Moment;
use crate::mutant::{Mutant, mutated};
use crate::panic_safe::{catch_panic, wake};

/// An object that the stall detector checks.
pub(crate) trait StallCheck: Send + Sync {
    /// Checks for futures that are not polled, and takes over their work. The task calls this
    /// method several times within `unpolled_max`. Returns false if no further check is needed.
    fn check_stalled(self: Arc<Self>, now: Moment) -> bool;
}

/// The handle of the stall detector of one registry.
#[derive(Clone, Default)]
pub(crate) struct StallDetector(Arc<StallDetectorShared>);

#[derive(Default)]
struct StallDetectorShared {
    checked_objects: Mutex<CheckedObjects>,
    changed: Notify,
}

#[derive(Default)]
struct CheckedObjects {
    by_id: BTreeMap<u64, CheckedObject>,
    next_id: u64,
    /// The time between two rounds of checks. `None` while the task waits for a registration.
    round_interval: Option<Duration>,
    stopped: bool,
}

struct CheckedObject {
    object: Weak<dyn StallCheck>,
    check_interval: Duration,
    next_check_at: Moment,
}

impl StallDetector {
    /// Registers `object`, which the task then checks four times per `unpolled_max`. Returns the id
    /// for [`deregister`](Self::deregister).
    pub(crate) fn register(&self, object: Weak<dyn StallCheck>, unpolled_max: Duration) -> u64 {
        let check_interval = unpolled_max / 4;
        let mut checked_objects = self.checked_objects();
        let id = checked_objects.next_id;
        checked_objects.next_id += 1;
        // The first round sets the time of the next check, so that the caller need not read the
        // clock.
        let checked_object = CheckedObject { object, check_interval, next_check_at: Moment::PAST };
        checked_objects.by_id.insert(id, checked_object);
        let shortens_round =
            checked_objects.round_interval.is_none_or(|interval| check_interval < interval);
        if shortens_round {
            checked_objects.round_interval = Some(check_interval);
        }
        drop(checked_objects);
        if shortens_round {
            self.0.changed.notify_one();
        }
        id
    }

    pub(crate) fn deregister(&self, id: u64) {
        // The entry is dropped after the unlock.
        let checked_object = self.checked_objects().by_id.remove(&id);
        drop(checked_object);
    }

    /// Makes the task end.
    pub(crate) fn stop(&self) {
        self.checked_objects().stopped = true;
        self.0.changed.notify_one();
    }

    /// Returns the future of the task, which runs until [`stop`](Self::stop).
    pub(crate) fn task(&self) -> impl Future<Output = ()> + Send + use<> {
        run(self.clone())
    }

    /// Updates and returns the time until the next round. Returns `Some(None)` if no object is
    /// registered, and `None` after [`stop`](Self::stop).
    fn update_round_interval(&self) -> Option<Option<Duration>> {
        let mut checked_objects = self.checked_objects();
        if checked_objects.stopped {
            return None;
        }
        let intervals = checked_objects.by_id.values().map(|checked| checked.check_interval);
        checked_objects.round_interval = intervals.min();
        Some(checked_objects.round_interval)
    }

    /// Returns the objects that are due for a check, and schedules their next check.
    fn begin_round(&self, now: Moment) -> Vec<(u64, Weak<dyn StallCheck>)> {
        let mut checked_objects = self.checked_objects();
        let mut due = Vec::new();
        for (id, checked) in &mut checked_objects.by_id {
            if checked.next_check_at <= now {
                // The check is due slightly before the interval ends, so that a round that begins
                // slightly early still includes the object.
                checked.next_check_at =
                    now.after(checked.check_interval - checked.check_interval / 8);
                due.push((*id, Weak::clone(&checked.object)));
            }
        }
        due
    }

    fn checked_objects(&self) -> MutexGuard<'_, CheckedObjects> {
        self.0.checked_objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn run(stall_detector: StallDetector) {
    // The interval counts from here. A registration that ends before the next round thus does not
    // postpone that round.
    let mut last_round_at = Moment::now();
    while let Some(interval) = stall_detector.update_round_interval() {
        let Some(interval) = interval else {
            stall_detector.0.changed.notified().await;
            last_round_at = Moment::now();
            continue;
        };
        let left = last_round_at.after(interval).since(Moment::now());
        if !left.is_zero() {
            tokio::select! {
                biased;
                () = stall_detector.0.changed.notified() => continue,
                () = tokio::time::sleep(left) => {}
            }
        }
        let now = Moment::now();
        last_round_at = now;
        for (n, (id, object)) in stall_detector.begin_round(now).into_iter().enumerate() {
            let needs_checks =
                object.upgrade().and_then(|object| catch_panic(|| object.check_stalled(now)));
            if needs_checks != Some(true) {
                stall_detector.deregister(id);
            }
            if n % 256 == 255 {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The state of a future that waits.
pub(crate) trait MonitoredState: Send + Sized + 'static {
    /// The value that the future receives instead of its state, if the stall detector has taken the
    /// state.
    type Replacement: Send + 'static;

    /// Abandons or completes the future's work, because the future was not polled for
    /// `unpolled_max`. The implementation passes the replacement to [`MonitoredCell::resolve`] of
    /// `cell`.
    fn take_over(self, cell: &Arc<MonitoredCell<Self>>);
}

/// The cell that contains the state of a future. The stall detector takes the state if the future
/// is not polled.
pub(crate) struct MonitoredCell<S: MonitoredState> {
    unpolled_max: Duration,
    /// Locked while the future is polled, so that a poll need not move the state.
    content: Mutex<CellContent<S>>,
    poll_state: Mutex<PollState>,
}

/// The polls of a future, as the stall detector sees them.
struct PollState {
    /// The waker of the task that polls the future.
    waker: Option<Waker>,
    /// The future was polled after the last check.
    polled: bool,
    /// The time of the last check that found the future polled.
    unpolled_since: Moment,
    /// The stall detector has woken the future after `unpolled_since`.
    woken: bool,
}

enum CellContent<S: MonitoredState> {
    /// The future is not waiting.
    Empty,
    State(S),
    /// The stall detector has taken the state. Contains the replacement once it is known.
    Taken(Option<S::Replacement>),
}

impl<S: MonitoredState> MonitoredCell<S> {
    /// Stores the replacement for the taken state, and wakes the future.
    pub(crate) fn resolve(&self, replacement: S::Replacement) {
        *self.content() = CellContent::Taken(Some(replacement));
        let waker = self.poll_state().waker.take();
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    /// Records a poll by the task of `waker`.
    fn record_poll(&self, waker: &Waker) {
        let mut poll_state = self.poll_state();
        poll_state.polled = true;
        if !poll_state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            let previous = poll_state.waker.replace(waker.clone());
            // The previous waker is dropped after the unlock. A waker may own a task, whose
            // destructor may use this cell.
            drop(poll_state);
            drop(previous);
        }
    }

    fn content(&self) -> MutexGuard<'_, CellContent<S>> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_state(&self) -> MutexGuard<'_, PollState> {
        self.poll_state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: MonitoredState> Wake for MonitoredCell<S> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let waker = self.poll_state().waker.clone();
        if let Some(waker) = waker {
            wake(waker);
        }
    }
}

impl<S: MonitoredState> StallCheck for MonitoredCell<S> {
    fn check_stalled(self: Arc<Self>, now: Moment) -> bool {
        let mut content = match self.content.try_lock() {
            Ok(content) => content,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The future is being polled.
            Err(TryLockError::WouldBlock) => return true,
        };
        match *content {
            CellContent::State(_) => {}
            CellContent::Empty => {
                self.poll_state().polled = true;
                return true;
            }
            CellContent::Taken(_) => return false,
        }
        let mut poll_state = self.poll_state();
        if mem::take(&mut poll_state.polled) {
            poll_state.unpolled_since = now;
            poll_state.woken = false;
            return true;
        }
        let unpolled = now.since(poll_state.unpolled_since);
        if !poll_state.woken {
            // A future that waits for the store's response is not polled either. The wake-up makes
            // its task poll the future, unless the task is stalled.
            if unpolled >= self.unpolled_max / 2 {
                poll_state.woken = true;
                let waker = poll_state.waker.clone();
                drop(poll_state);
                drop(content);
                if let Some(waker) = waker {
                    wake(waker);
                }
            }
            return true;
        }
        if unpolled < self.unpolled_max || mutated(Mutant::UnpolledCallerKept) {
            return true;
        }
        drop(poll_state);
        let taken = mem::replace(&mut *content, CellContent::Taken(None));
        drop(content);
        if let CellContent::State(state) = taken {
            state.take_over(&self);
        }
        false
    }
}

/// The future's handle of its [`MonitoredCell`]. Dropping the handle drops the content of the
/// cell.
pub(crate) struct MonitoredWait<'a, S: MonitoredState> {
    stall_detector: &'a StallDetector,
    unpolled_max: Duration,
    /// The cell, and its id in the stall detector.
    cell: Option<(Arc<MonitoredCell<S>>, u64)>,
}

impl<'a, S: MonitoredState> MonitoredWait<'a, S> {
    pub(crate) fn new(stall_detector: &'a StallDetector, unpolled_max: Duration) -> Self {
        Self { stall_detector, unpolled_max, cell: None }
    }

    /// Polls `step` until it is ready, and returns `state` with the output. The cell contains
    /// `state` during this wait. If the stall detector has taken `state`, this method returns the
    /// replacement.
    pub(crate) async fn run<T>(
        &mut self,
        state: S,
        mut step: impl FnMut(&mut S, &mut Context<'_>) -> Poll<T>,
    ) -> Result<(S, T), S::Replacement> {
        let cell = Arc::clone(self.cell());
        *cell.content() = CellContent::State(state);
        poll_fn(|cx| {
            cell.record_poll(cx.waker());
            // The cell's waker calls the task's waker, and catches its panics.
            let waker = Waker::from(Arc::clone(&cell));
            let mut content = cell.content();
            let output = match &mut *content {
                CellContent::State(state) => {
                    ready!(step(state, &mut Context::from_waker(&waker)))
                }
                CellContent::Taken(replacement) => {
                    return replacement.take().map_or(Poll::Pending, |it| Poll::Ready(Err(it)));
                }
                CellContent::Empty => return Poll::Pending,
            };
            match mem::replace(&mut *content, CellContent::Empty) {
                CellContent::State(state) => Poll::Ready(Ok((state, output))),
                CellContent::Empty | CellContent::Taken(_) => {
                    unreachable!("the content is locked")
                }
            }
        })
        .await
    }

    /// Waits for `future`, which does not use `state`. The cell contains `state` during this wait.
    ///
    /// `future` is boxed to keep the returned future small. A wait costs more than the allocation.
    pub(crate) fn wait_for<'s, F: Future>(
        &'s mut self,
        state: S,
        future: F,
    ) -> impl Future<Output = Result<(S, F::Output), S::Replacement>> + use<'s, 'a, S, F> {
        let mut future = Box::pin(future);
        self.run(state, move |_, cx| future.as_mut().poll(cx))
    }

    fn cell(&mut self) -> &Arc<MonitoredCell<S>> {
        let (stall_detector, unpolled_max) = (self.stall_detector, self.unpolled_max);
        let (cell, _) = self.cell.get_or_insert_with(|| {
            let cell = Arc::new(MonitoredCell {
                unpolled_max,
                content: Mutex::new(CellContent::Empty),
                poll_state: Mutex::new(PollState {
                    waker: None,
                    polled: true,
                    unpolled_since: Moment::PAST,
                    woken: false,
                }),
            });
            let object: Weak<MonitoredCell<S>> = Arc::downgrade(&cell);
            let id = stall_detector.register(object, unpolled_max);
            (cell, id)
        });
        cell
    }
}

impl<S: MonitoredState> Drop for MonitoredWait<'_, S> {
    fn drop(&mut self) {
        if let Some((cell, id)) = self.cell.take() {
            self.stall_detector.deregister(id);
            let content = mem::replace(&mut *cell.content(), CellContent::Empty);
            let waker = cell.poll_state().waker.take();
            drop(content);
            drop(waker);
        }
    }
}
