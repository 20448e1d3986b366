//! Abandons acquisitions, and finishes calls to the store, of futures that are kept and not polled.
//!
//! A future that is not polled cannot release anything. Its state (a claim, a local permit, a call)
//! is therefore in a [`SuspensionCell`] while it waits. One task per registry checks these cells.
//! Each future sets `unpolled_max`, the time for which it may go without a poll. After half of it,
//! the task wakes the future once. After all of it, the task takes the state: it abandons an
//! acquisition, and lets the background releaser complete a call to the store.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Moment;
use crate::contained::{catch_panic, wake};
use crate::mutant::{Mutant, mutated};

/// An object that the task checks.
pub(crate) trait Watched: Send + Sync {
    /// Called a few times within `unpolled_max`. Returns false if no further check is needed.
    fn check(self: Arc<Self>, now: Moment) -> bool;
}

/// The objects that the task checks.
#[derive(Clone, Default)]
pub(crate) struct Watch(Arc<WatchShared>);

#[derive(Default)]
struct WatchShared {
    registrations: Mutex<Registrations>,
    changed: Notify,
}

#[derive(Default)]
struct Registrations {
    by_ticket: BTreeMap<u64, Registration>,
    next_ticket: u64,
    /// The time between two rounds of checks; `None` while the task waits for an entry.
    round: Option<Duration>,
    stopped: bool,
}

struct Registration {
    watched: Weak<dyn Watched>,
    every: Duration,
    next_at: Moment,
}

impl Watch {
    /// Registers `watched` to be checked four times per `unpolled_max`. Returns a ticket for
    /// [`deregister`](Self::deregister).
    pub(crate) fn register(&self, watched: Weak<dyn Watched>, unpolled_max: Duration) -> u64 {
        let every = unpolled_max / 4;
        let mut registrations = self.registrations();
        let ticket = registrations.next_ticket;
        registrations.next_ticket += 1;
        // The first round sets the time of the next check, so that the caller need not read the
        // clock.
        registrations
            .by_ticket
            .insert(ticket, Registration { watched, every, next_at: Moment::PAST });
        let shortens_round = registrations.round.is_none_or(|round| every < round);
        if shortens_round {
            registrations.round = Some(every);
        }
        drop(registrations);
        if shortens_round {
            self.0.changed.notify_one();
        }
        ticket
    }

    pub(crate) fn deregister(&self, ticket: u64) {
        let entry = self.registrations().by_ticket.remove(&ticket);
        drop(entry);
    }

    /// Makes the task end.
    pub(crate) fn stop(&self) {
        self.registrations().stopped = true;
        self.0.changed.notify_one();
    }

    /// Returns the future of the task. It runs until [`stop`](Self::stop).
    pub(crate) fn work(&self) -> impl Future<Output = ()> + Send + use<> {
        work(self.clone())
    }

    /// Returns the time until the next round: `Some(None)` if nothing is registered, `None` after
    /// [`stop`](Self::stop).
    fn next_round(&self) -> Option<Option<Duration>> {
        let mut registrations = self.registrations();
        if registrations.stopped {
            return None;
        }
        registrations.round = registrations.by_ticket.values().map(|entry| entry.every).min();
        Some(registrations.round)
    }

    fn due(&self, now: Moment) -> Vec<(u64, Weak<dyn Watched>)> {
        let mut registrations = self.registrations();
        let mut due = Vec::new();
        for (ticket, entry) in &mut registrations.by_ticket {
            if entry.next_at <= now {
                // Slightly less than `every`, so that a round of the same length does not skip the
                // entry.
                entry.next_at = now.after(entry.every - entry.every / 8);
                due.push((*ticket, Weak::clone(&entry.watched)));
            }
        }
        due
    }

    fn registrations(&self) -> MutexGuard<'_, Registrations> {
        self.0.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn work(watch: Watch) {
    while let Some(round) = watch.next_round() {
        let Some(round) = round else {
            watch.0.changed.notified().await;
            continue;
        };
        tokio::select! {
            biased;
            () = watch.0.changed.notified() => continue,
            () = tokio::time::sleep(round) => {}
        }
        let now = Moment::now();
        for (n, (ticket, watched)) in watch.due(now).into_iter().enumerate() {
            let is_kept = watched.upgrade().and_then(|watched| catch_panic(|| watched.check(now)));
            if is_kept != Some(true) {
                watch.deregister(ticket);
            }
            if n % 256 == 255 {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The state of a future that waits.
pub(crate) trait SuspendedState: Send + Sized + 'static {
    /// What the future gets instead of its state when it is polled after the state was taken.
    type Replacement: Send + 'static;

    /// Abandons or finishes the future's work, because the future was not polled for
    /// `unpolled_max`. The implementation passes a value for the future to
    /// [`SuspensionCell::resolve`] of `cell`.
    fn abandon(self, cell: &Arc<SuspensionCell<Self>>);
}

/// The cell that holds the state of a future, which the watch takes if the future is not polled.
pub(crate) struct SuspensionCell<S: SuspendedState> {
    unpolled_max: Duration,
    /// Locked while the future is polled, so that a poll need not move the state.
    content: Mutex<Content<S>>,
    polling: Mutex<Polling>,
}

/// How the future is polled.
struct Polling {
    /// The waker of the task that polls the future.
    waker: Option<Waker>,
    /// The future was polled since the last check.
    polled: bool,
    /// The time of the last check that found the future polled.
    unpolled_since: Moment,
    /// The future was woken since `unpolled_since`.
    woken: bool,
}

enum Content<S: SuspendedState> {
    /// No future is running in the cell.
    Empty,
    Here(S),
    /// The watch has taken the state. `Some` once there is a value for the future.
    Abandoned(Option<S::Replacement>),
}

impl<S: SuspendedState> SuspensionCell<S> {
    /// Stores a value for the future whose state was taken, and wakes the future.
    pub(crate) fn resolve(&self, replacement: S::Replacement) {
        *self.content() = Content::Abandoned(Some(replacement));
        let waker = self.polling().waker.take();
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    fn set_waker(&self, waker: &Waker) {
        let mut polling = self.polling();
        polling.polled = true;
        if !polling.waker.as_ref().is_some_and(|own| own.will_wake(waker)) {
            let before = polling.waker.replace(waker.clone());
            // Dropped after the unlock: a waker may own a task, whose destructor may use this cell.
            drop(polling);
            drop(before);
        }
    }

    fn content(&self) -> MutexGuard<'_, Content<S>> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn polling(&self) -> MutexGuard<'_, Polling> {
        self.polling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: SuspendedState> Wake for SuspensionCell<S> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let waker = self.polling().waker.clone();
        if let Some(waker) = waker {
            wake(waker);
        }
    }
}

impl<S: SuspendedState> Watched for SuspensionCell<S> {
    fn check(self: Arc<Self>, now: Moment) -> bool {
        let mut content = match self.content.try_lock() {
            Ok(content) => content,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The future is being polled.
            Err(TryLockError::WouldBlock) => return true,
        };
        match *content {
            Content::Here(_) => {}
            Content::Empty => {
                self.polling().polled = true;
                return true;
            }
            Content::Abandoned(_) => return false,
        }
        let mut polling = self.polling();
        if mem::take(&mut polling.polled) {
            polling.unpolled_since = now;
            polling.woken = false;
            return true;
        }
        let unpolled = now.since(polling.unpolled_since);
        if !polling.woken {
            // A future that waits for its store is not polled either, but a wake-up makes its task
            // poll it.
            if unpolled >= self.unpolled_max / 2 {
                polling.woken = true;
                let waker = polling.waker.clone();
                drop(polling);
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
        drop(polling);
        let taken = mem::replace(&mut *content, Content::Abandoned(None));
        drop(content);
        if let Content::Here(state) = taken {
            state.abandon(&self);
        }
        false
    }
}

/// The future's handle of its [`SuspensionCell`]. Dropping it drops the content of the cell.
pub(crate) struct Suspension<'a, S: SuspendedState> {
    watch: &'a Watch,
    unpolled_max: Duration,
    cell: Option<(Arc<SuspensionCell<S>>, u64)>,
}

impl<'a, S: SuspendedState> Suspension<'a, S> {
    pub(crate) fn new(watch: &'a Watch, unpolled_max: Duration) -> Self {
        Self { watch, unpolled_max, cell: None }
    }

    /// Polls `step` until it is ready, and returns `state` with the output. Meanwhile `state` is
    /// in the cell. If the watch took it from there, this returns the value that
    /// [`SuspensionCell::resolve`] stored.
    pub(crate) async fn run<T>(
        &mut self,
        state: S,
        mut step: impl FnMut(&mut S, &mut Context<'_>) -> Poll<T>,
    ) -> Result<(S, T), S::Replacement> {
        let cell = Arc::clone(self.cell());
        *cell.content() = Content::Here(state);
        poll_fn(|cx| {
            cell.set_waker(cx.waker());
            // The cell's waker passes wake-ups on to the task's, and contains its panics.
            let waker = Waker::from(Arc::clone(&cell));
            let mut content = cell.content();
            let output = match &mut *content {
                Content::Here(state) => {
                    ready!(step(state, &mut Context::from_waker(&waker)))
                }
                Content::Abandoned(replacement) => {
                    return replacement.take().map_or(Poll::Pending, |it| Poll::Ready(Err(it)));
                }
                Content::Empty => return Poll::Pending,
            };
            match mem::replace(&mut *content, Content::Empty) {
                Content::Here(state) => Poll::Ready(Ok((state, output))),
                Content::Empty | Content::Abandoned(_) => unreachable!("the content is locked"),
            }
        })
        .await
    }

    /// Waits for `future`, which does not need `state`, with `state` in the cell.
    ///
    /// `future` is boxed, so that the future of an acquisition that never waits is small. Where it
    /// waits, the allocation costs little beside the request before it.
    pub(crate) fn during<'s, F: Future>(
        &'s mut self,
        state: S,
        future: F,
    ) -> impl Future<Output = Result<(S, F::Output), S::Replacement>> + use<'s, 'a, S, F> {
        let mut future = Box::pin(future);
        self.run(state, move |_, cx| future.as_mut().poll(cx))
    }

    fn cell(&mut self) -> &Arc<SuspensionCell<S>> {
        let (watch, unpolled_max) = (self.watch, self.unpolled_max);
        let (cell, _) = self.cell.get_or_insert_with(|| {
            let cell = Arc::new(SuspensionCell {
                unpolled_max,
                content: Mutex::new(Content::Empty),
                polling: Mutex::new(Polling {
                    waker: None,
                    polled: true,
                    unpolled_since: Moment::PAST,
                    woken: false,
                }),
            });
            let watched: Weak<SuspensionCell<S>> = Arc::downgrade(&cell);
            let ticket = watch.register(watched, unpolled_max);
            (cell, ticket)
        });
        cell
    }
}

impl<S: SuspendedState> Drop for Suspension<'_, S> {
    fn drop(&mut self) {
        if let Some((cell, ticket)) = self.cell.take() {
            self.watch.deregister(ticket);
            let content = mem::replace(&mut *cell.content(), Content::Empty);
            let waker = cell.polling().waker.take();
            drop(content);
            drop(waker);
        }
    }
}
