//! Abandons acquisitions, and finishes calls to the store, of futures that are kept and not polled.
//!
//! A future that is not polled cannot release anything. Between two polls it therefore stores its
//! state (a claim, a local permit, a call) in a [`Suspended`] cell. One task per registry checks
//! these cells. Each future sets a *patience*, the time for which it may go without a poll. After
//! half of it, the task wakes the future once. After all of it, the task takes the state: it
//! abandons an acquisition, and lets the background releaser complete a call to the store.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Moment;
use crate::contained::{catch_panic, wake};
use crate::mutant::{Mutant, mutated};

/// An object that the task checks.
pub(crate) trait Watched: Send + Sync {
    /// Called a few times per patience. Returns false if no further check is needed.
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
    /// Registers `watched` to be checked four times per `patience`. Returns a ticket for
    /// [`deregister`](Self::deregister).
    pub(crate) fn register(&self, watched: Weak<dyn Watched>, patience: Duration) -> u64 {
        let every = patience / 4;
        let mut registrations = self.registrations();
        let ticket = registrations.next_ticket;
        registrations.next_ticket += 1;
        // The first round sets the time of the next check, so that the caller need not read the
        // clock.
        registrations
            .by_ticket
            .insert(ticket, Registration { watched, every, next_at: Moment::PAST });
        let is_news = registrations.round.is_none_or(|round| every < round);
        if is_news {
            registrations.round = Some(every);
        }
        drop(registrations);
        if is_news {
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
            let goes_on = watched.upgrade().and_then(|watched| catch_panic(|| watched.check(now)));
            if goes_on != Some(true) {
                watch.deregister(ticket);
            }
            if n % 256 == 255 {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The state of a future between two polls.
pub(crate) trait Parked: Send + Sized + 'static {
    /// What the future gets instead of its state when it is polled after the state was taken.
    type Replacement: Send + 'static;

    /// Abandons or finishes the future's work, because the future was not polled for its patience.
    /// The implementation passes a value for the future to [`Suspended::leave`] of `cell`.
    fn abandon(self, cell: &Arc<Suspended<Self>>);
}

/// The cell in which a future stores its state between two polls.
pub(crate) struct Suspended<P: Parked> {
    patience: Duration,
    state: Mutex<SuspendedState<P>>,
}

struct SuspendedState<P: Parked> {
    content: Content<P>,
    /// The waker of the task that polls the future.
    waker: Option<Waker>,
    /// The future was polled since the last check.
    polled: bool,
    /// The time of the last check that found the future polled.
    unpolled_since: Moment,
    /// The future was woken since `unpolled_since`.
    woken: bool,
}

enum Content<P: Parked> {
    /// The future has its state, because it is being polled, or is done.
    Taken,
    Here(P),
    /// The watch has taken the state. `Some` once there is a value for the future.
    Abandoned(Option<P::Replacement>),
}

impl<P: Parked> Suspended<P> {
    /// Stores a value for the future whose state was taken, and wakes the future.
    pub(crate) fn leave(&self, replacement: P::Replacement) {
        let mut state = self.state();
        state.content = Content::Abandoned(Some(replacement));
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    fn set_waker(&self, waker: &Waker) {
        let mut state = self.state();
        state.polled = true;
        if !state.waker.as_ref().is_some_and(|own| own.will_wake(waker)) {
            let before = state.waker.replace(waker.clone());
            // Dropped after the unlock: a waker may own a task, whose destructor may use this cell.
            drop(state);
            drop(before);
        }
    }

    /// Takes the content. If the state was taken and its value is not stored yet, the content
    /// stays.
    fn take(&self) -> Content<P> {
        let mut state = self.state();
        match state.content {
            Content::Abandoned(None) => Content::Abandoned(None),
            _ => mem::replace(&mut state.content, Content::Taken),
        }
    }

    fn state(&self) -> MutexGuard<'_, SuspendedState<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: Parked> Wake for Suspended<P> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let waker = self.state().waker.clone();
        if let Some(waker) = waker {
            wake(waker);
        }
    }
}

impl<P: Parked> Watched for Suspended<P> {
    fn check(self: Arc<Self>, now: Moment) -> bool {
        let mut state = self.state();
        match state.content {
            Content::Here(_) => {}
            Content::Taken => {
                state.polled = true;
                return true;
            }
            Content::Abandoned(_) => return false,
        }
        if mem::take(&mut state.polled) {
            state.unpolled_since = now;
            state.woken = false;
            return true;
        }
        let unpolled = now.since(state.unpolled_since);
        if !state.woken {
            // A future that waits for its store is not polled either, but a wake-up makes its task
            // poll it.
            if unpolled >= self.patience / 2 {
                state.woken = true;
                let waker = state.waker.clone();
                drop(state);
                if let Some(waker) = waker {
                    wake(waker);
                }
            }
            return true;
        }
        if unpolled < self.patience || mutated(Mutant::UnpolledCallerKept) {
            return true;
        }
        let content = mem::replace(&mut state.content, Content::Abandoned(None));
        drop(state);
        if let Content::Here(parked) = content {
            parked.abandon(&self);
        }
        false
    }
}

/// The future's handle of its [`Suspended`] cell. Dropping it drops the content of the cell.
pub(crate) struct Suspension<'a, P: Parked> {
    watch: &'a Watch,
    patience: Duration,
    cell: Option<(Arc<Suspended<P>>, u64)>,
}

impl<'a, P: Parked> Suspension<'a, P> {
    pub(crate) fn new(watch: &'a Watch, patience: Duration) -> Self {
        Self { watch, patience, cell: None }
    }

    /// Polls `step` until it is ready, and returns `parked` with the output. Between two polls
    /// `parked` is in the cell. If the watch took it from there, this returns the value that
    /// [`Suspended::leave`] stored.
    pub(crate) async fn run<T>(
        &mut self,
        parked: P,
        mut step: impl FnMut(&mut P, &mut Context<'_>) -> Poll<T>,
    ) -> Result<(P, T), P::Replacement> {
        let cell = Arc::clone(self.cell());
        let mut first = Some(parked);
        poll_fn(|cx| {
            cell.set_waker(cx.waker());
            let mut parked = match first.take() {
                Some(parked) => parked,
                None => match cell.take() {
                    Content::Here(parked) => parked,
                    Content::Abandoned(Some(replacement)) => return Poll::Ready(Err(replacement)),
                    Content::Abandoned(None) | Content::Taken => return Poll::Pending,
                },
            };
            // The cell's waker passes wake-ups on to the task's, and contains its panics.
            let waker = Waker::from(Arc::clone(&cell));
            if let Poll::Ready(output) = step(&mut parked, &mut Context::from_waker(&waker)) {
                return Poll::Ready(Ok((parked, output)));
            }
            cell.state().content = Content::Here(parked);
            Poll::Pending
        })
        .await
    }

    /// Waits for `future`, which does not need `parked`, with `parked` in the cell.
    pub(crate) async fn during<F: Future>(
        &mut self,
        parked: P,
        future: F,
    ) -> Result<(P, F::Output), P::Replacement> {
        let mut future = std::pin::pin!(future);
        self.run(parked, |_, cx| future.as_mut().poll(cx)).await
    }

    fn cell(&mut self) -> &Arc<Suspended<P>> {
        let (watch, patience) = (self.watch, self.patience);
        let (cell, _) = self.cell.get_or_insert_with(|| {
            let cell = Arc::new(Suspended {
                patience,
                state: Mutex::new(SuspendedState {
                    content: Content::Taken,
                    waker: None,
                    polled: true,
                    unpolled_since: Moment::PAST,
                    woken: false,
                }),
            });
            let watched: Weak<Suspended<P>> = Arc::downgrade(&cell);
            let ticket = watch.register(watched, patience);
            (cell, ticket)
        });
        cell
    }
}

impl<P: Parked> Drop for Suspension<'_, P> {
    fn drop(&mut self) {
        if let Some((cell, ticket)) = self.cell.take() {
            self.watch.deregister(ticket);
            let mut state = cell.state();
            let content = mem::replace(&mut state.content, Content::Taken);
            let waker = state.waker.take();
            drop(state);
            drop(content);
            drop(waker);
        }
    }
}
