//! Calls on one thing, one after another, in the order of arrival. Knows no database.
//!
//! A caller polls its own call, so nothing is handed to another task as long as all goes well. But callers may stall: a
//! future that is kept and not polled, as in a `select!` whose other branch is at work, would keep its turn for ever, and with it
//! everybody else. So who waits for long lets tasks carry all unfinished calls on.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::OwnedMutexGuard;

/// How long a call waits for its turn before it has the others carried on. Far more than a statement takes, far less than a
/// renewal can be late.
const PATIENCE: Duration = Duration::from_millis(20);

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The thing and those who call.
pub(super) struct Lane<S> {
    shared: Arc<Shared<S>>,
}

struct Shared<S> {
    thing: Arc<tokio::sync::Mutex<S>>,
    unfinished: Mutex<HashMap<u64, Weak<dyn Carry>>>,
    next_id: AtomicU64,
}

impl<S: Send + 'static> Lane<S> {
    pub(super) fn new(thing: S) -> Self {
        Self {
            shared: Arc::new(Shared {
                thing: Arc::new(tokio::sync::Mutex::new(thing)),
                unfinished: Mutex::default(),
                next_id: AtomicU64::new(0),
            }),
        }
    }

    /// Does `work` on the thing when it is its turn.
    ///
    /// # Cancel safety
    /// Dropping the future drops the work, unless somebody who waited for it has it carried on.
    pub(super) async fn call<T, W>(
        &self,
        work: impl FnOnce(OwnedMutexGuard<S>) -> W + Send + 'static,
    ) -> T
    where
        T: Send + 'static,
        W: Future<Output = T> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        let call = Arc::new(Call::new(Box::pin(async move {
            let thing = shared.turn().await;
            work(thing).await
        })));
        let _entry = self.shared.enter(&call);
        poll_fn(|cx| call.poll_by_caller(cx)).await
    }
}

impl<S> Shared<S> {
    async fn turn(&self) -> OwnedMutexGuard<S> {
        if let Ok(thing) = Arc::clone(&self.thing).try_lock_owned() {
            return thing;
        }
        let mut turn = std::pin::pin!(Arc::clone(&self.thing).lock_owned());
        loop {
            if let Ok(thing) = tokio::time::timeout(PATIENCE, turn.as_mut()).await {
                return thing;
            }
            let unfinished: Vec<_> =
                lock(&self.unfinished).values().filter_map(Weak::upgrade).collect();
            unfinished.into_iter().for_each(Carry::carry_on);
        }
    }

    fn enter<T: Send + 'static>(&self, call: &Arc<Call<T>>) -> Entry<'_> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let call: Weak<Call<T>> = Arc::downgrade(call);
        lock(&self.unfinished).insert(id, call);
        Entry { unfinished: &self.unfinished, id }
    }
}

struct Entry<'a> {
    unfinished: &'a Mutex<HashMap<u64, Weak<dyn Carry>>>,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        lock(self.unfinished).remove(&self.id);
    }
}

/// One call: polled by its caller, or carried on by a task.
struct Call<T> {
    progress: Mutex<Progress<T>>,
    has_carrier: AtomicBool,
}

struct Progress<T> {
    /// `None` when it has ended.
    future: Option<Boxed<T>>,
    /// A task polls the future. The caller must not, as the future knows only the last waker.
    is_carried: bool,
    /// What a task has brought.
    answer: Option<T>,
    caller: Option<Waker>,
}

trait Carry: Send + Sync {
    /// Has a task poll the call to its end, unless one does already.
    fn carry_on(self: Arc<Self>);
}

impl<T: Send + 'static> Call<T> {
    fn new(future: Boxed<T>) -> Self {
        let progress =
            Progress { future: Some(future), is_carried: false, answer: None, caller: None };
        Self { progress: Mutex::new(progress), has_carrier: AtomicBool::new(false) }
    }

    fn poll_by_caller(&self, cx: &mut Context<'_>) -> Poll<T> {
        let mut progress = lock(&self.progress);
        if let Some(answer) = progress.answer.take() {
            return Poll::Ready(answer);
        }
        match &mut progress.caller {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        if progress.is_carried {
            return Poll::Pending;
        }
        progress.poll_future(cx)
    }

    fn poll_by_carrier(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut progress = lock(&self.progress);
        progress.is_carried = true;
        let answer = ready!(progress.poll_future(cx));
        progress.answer = Some(answer);
        Poll::Ready(())
    }
}

impl<T> Progress<T> {
    fn poll_future(&mut self, cx: &mut Context<'_>) -> Poll<T> {
        let Some(future) = self.future.as_mut() else { return Poll::Pending };
        let answer = ready!(future.as_mut().poll(cx));
        self.future = None;
        Poll::Ready(answer)
    }
}

impl<T: Send + 'static> Carry for Call<T> {
    fn carry_on(self: Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        if self.has_carrier.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut carrier = Carrier { call: self, has_begun: false };
        // Detached: it ends with the call, which ends in bounded time, and its answer goes to the caller.
        drop(runtime.spawn(poll_fn(move |cx| carrier.poll(cx))));
    }
}

/// The task's end of a call.
struct Carrier<T: Send + 'static> {
    call: Arc<Call<T>>,
    has_begun: bool,
}

impl<T: Send + 'static> Carrier<T> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.has_begun = true;
        if lock(&self.call.progress).future.is_none() {
            // The caller was faster.
            return Poll::Ready(());
        }
        self.call.poll_by_carrier(cx)
    }
}

/// Gives the call back to its caller: with the answer or, if the runtime shuts down, without.
impl<T: Send + 'static> Drop for Carrier<T> {
    fn drop(&mut self) {
        self.call.has_carrier.store(false, Ordering::Release);
        // A runtime that shuts down drops a new task where it is spawned, and that may be inside a poll of this very call.
        if self.has_begun {
            let mut progress = lock(&self.call.progress);
            progress.is_carried = false;
            let caller = progress.caller.take();
            drop(progress);
            if let Some(caller) = caller {
                caller.wake();
            }
        }
    }
}

/// What is behind these locks is whole at any time, even if a future panics.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};

    use tokio::sync::Notify;
    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    /// A call that needs two polls at least, and notes that it ran.
    async fn note(lane: &Lane<Vec<u32>>, n: u32) -> u32 {
        lane.call(move |mut notes| async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            notes.push(n);
            n
        })
        .await
    }

    #[tokio::test]
    async fn calls_are_made_in_the_order_of_arrival() {
        let lane = Lane::new(Vec::new());
        let (a, b, c) = tokio::join!(note(&lane, 1), note(&lane, 2), note(&lane, 3));
        assert_eq!((a, b, c), (1, 2, 3));
        assert_eq!(lane.call(async |notes| notes.clone()).await, [1, 2, 3]);
        assert!(lock(&lane.shared.unfinished).is_empty());
    }

    #[tokio::test]
    async fn callers_that_stall_hold_up_nobody_and_get_their_answers() {
        let lane = Lane::new(Vec::new());
        // One has its turn and sleeps in it; the other two are next in line.
        let mut stalled = [1, 2, 3].map(|n| Box::pin(note(&lane, n)));
        for call in &mut stalled {
            assert!(poll_once(call.as_mut()).is_pending());
        }
        assert_eq!(timeout(SOON, note(&lane, 4)).await.unwrap(), 4);
        assert_eq!(lane.call(async |notes| notes.clone()).await, [1, 2, 3, 4]);
        for (n, call) in (1..).zip(stalled) {
            assert_eq!(timeout(SOON, call).await.unwrap(), n);
        }
    }

    #[tokio::test]
    async fn a_caller_that_is_only_slow_is_woken_by_who_carried_its_call() {
        let lane = Arc::new(Lane::new(Vec::new()));
        let go = Arc::new(Notify::new());
        let first = {
            let (lane, go) = (Arc::clone(&lane), Arc::clone(&go));
            let work = async move {
                let hold = async move |thing| {
                    go.notified().await;
                    drop(thing);
                };
                lane.call(hold).await;
            };
            Handle::current().spawn(work)
        };
        tokio::task::yield_now().await;
        let mut second = Box::pin(note(&lane, 2));
        // Long enough for the first call to be carried on.
        assert!(timeout(PATIENCE * 5, &mut second).await.is_err());
        go.notify_one();
        assert_eq!(timeout(SOON, second).await.unwrap(), 2);
        timeout(SOON, first).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_dropped_call_lets_the_next_one_in() {
        let lane = Lane::new(Vec::new());
        for polls in 0..3 {
            let mut dropped = Box::pin(note(&lane, polls));
            for _ in 0..polls {
                assert!(poll_once(dropped.as_mut()).is_pending());
            }
            drop(dropped);
            timeout(SOON, note(&lane, 9)).await.unwrap();
        }
        assert!(lock(&lane.shared.unfinished).is_empty());
    }

    #[test]
    fn a_call_survives_the_runtime_that_carried_it_on() {
        let lane = Lane::new(Vec::new());
        let go = Arc::new(Notify::new());
        let runtime =
            || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let notified = Arc::clone(&go);
        let mut stalled = Box::pin(lane.call(move |mut notes| async move {
            notified.notified().await;
            notes.push(1);
        }));
        let other = runtime();
        other.block_on(async {
            assert!(poll_once(stalled.as_mut()).is_pending());
            assert!(timeout(PATIENCE * 5, note(&lane, 2)).await.is_err());
        });
        drop(other);
        go.notify_one();
        runtime().block_on(async { timeout(SOON, stalled).await.unwrap() });
    }
}
