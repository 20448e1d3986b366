//! Runs calls on one value, one at a time. Independent of the database. Used by `link`.
//!
//! A caller that finds the value free polls its own call, because a switch to another task takes a
//! tenth of a statement's time. All other calls are queued for one task on the backend's own
//! thread. Calls of low priority run after the others. That task also takes over a call that its
//! caller polls:
//! - when another call is queued behind it,
//! - when its caller drops it,
//! - when it has not ended after [`STALLED`], because a caller may keep a future and never poll it
//!   again.
//!
//! So every call runs to its end, even without its caller. Queueing and taking over have constant
//! cost.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{Notify, OwnedMutexGuard, mpsc, oneshot};
use tokio::task::unconstrained;

use super::worker::Worker;

/// How long a caller may take for its own call. Far longer than a statement, far shorter than the
/// slack of a renewal.
const STALLED: Duration = Duration::from_millis(50);

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Job<S> = Box<dyn FnOnce(OwnedMutexGuard<S>) -> Boxed<()> + Send>;

/// A value, and the queues of calls on it.
pub(super) struct SerialExecutor<S> {
    shared: Arc<Shared<S>>,
    queue: mpsc::UnboundedSender<Queued<S>>,
    later: mpsc::UnboundedSender<Queued<S>>,
}

/// The order of queued calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Priority {
    Normal,
    /// After all others. For acquisitions, so that renewals and releases are on time behind any
    /// number of them.
    Low,
}

enum Queued<S> {
    Call(Job<S>),
    /// The caller of the in-place call has dropped it.
    TakeOver,
}

struct Shared<S> {
    value: Arc<tokio::sync::Mutex<S>>,
    /// The last call that its caller polled. It may have ended.
    in_place: Mutex<Option<Arc<dyn InPlace>>>,
    /// The number of in-place calls so far.
    begun: AtomicU64,
    /// The task checks every [`STALLED`] whether the in-place call has ended.
    is_checking: AtomicBool,
    check: Notify,
}

/// The call panicked on the backend's thread, so it has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Panicked;

impl<S: Send + 'static> SerialExecutor<S> {
    /// Creates an executor whose queued calls run on `worker`.
    pub(super) fn new(value: S, worker: &Worker) -> Self {
        let (queue, calls) = mpsc::unbounded_channel();
        let (later, later_calls) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            value: Arc::new(tokio::sync::Mutex::new(value)),
            in_place: Mutex::default(),
            begun: AtomicU64::new(0),
            is_checking: AtomicBool::new(false),
            check: Notify::new(),
        });
        worker.spawn(Arc::clone(&shared).run(calls, later_calls));
        Self { shared, queue, later }
    }

    /// Runs `work` on the value, after the calls before it.
    ///
    /// # Errors
    /// [`Panicked`] if `work` panicked on the backend's thread.
    ///
    /// # Cancel safety
    /// Dropping the future does not end the work.
    pub(super) async fn call<T, W>(
        &self,
        priority: Priority,
        work: impl FnOnce(OwnedMutexGuard<S>) -> W + Send + 'static,
    ) -> Result<T, Panicked>
    where
        T: Send + 'static,
        W: Future<Output = T> + Send + 'static,
    {
        let work = match self.shared.begin_in_place(work) {
            Ok(call) => {
                let mut finish = Finish { call: &call, queue: &self.queue, is_over: false };
                let answer = poll_fn(|cx| call.poll_by_caller(cx)).await;
                finish.is_over = true;
                return answer;
            }
            Err(work) => work,
        };
        let (answer, answered) = oneshot::channel();
        let job: Job<S> = Box::new(move |value| {
            let work = work(value);
            // The receiver may have been dropped.
            Box::pin(async move { drop(answer.send(work.await)) })
        });
        let queue = match priority {
            Priority::Normal => &self.queue,
            Priority::Low => &self.later,
        };
        queue.send(Queued::Call(job)).map_err(|_| Panicked)?;
        answered.await.map_err(|_| Panicked)
    }
}

impl<S: Send + 'static> Shared<S> {
    /// Begins a call that its caller polls. Returns `work` if the value is in use.
    fn begin_in_place<T, W, F>(&self, work: F) -> Result<Arc<Call<T>>, F>
    where
        T: Send + 'static,
        W: Future<Output = T> + Send + 'static,
        F: FnOnce(OwnedMutexGuard<S>) -> W,
    {
        // Locked before the value, so that the task that waits for the value finds the call that
        // has it.
        let mut in_place = lock(&self.in_place);
        let Ok(value) = Arc::clone(&self.value).try_lock_owned() else { return Err(work) };
        let call = Arc::new(Call::new(Box::pin(work(value))));
        let before = in_place.replace(Arc::<Call<T>>::clone(&call));
        drop(in_place);
        drop(before);
        self.begun.fetch_add(1, Ordering::SeqCst);
        if !self.is_checking.load(Ordering::SeqCst)
            && !self.is_checking.swap(true, Ordering::SeqCst)
        {
            self.check.notify_one();
        }
        Ok(call)
    }

    /// Runs queued calls until the executor is dropped.
    async fn run(
        self: Arc<Self>,
        mut calls: mpsc::UnboundedReceiver<Queued<S>>,
        mut later: mpsc::UnboundedReceiver<Queued<S>>,
    ) {
        loop {
            let queued = tokio::select! {
                biased;
                Some(queued) = calls.recv() => queued,
                queued = later.recv() => match queued {
                    Some(queued) => queued,
                    None => return,
                },
                () = self.stalled() => Queued::TakeOver,
            };
            let value = self.value().await;
            if let Queued::Call(job) = queued {
                // A panic drops the sender of the result with the work, so the caller gets an
                // error.
                let work = AssertUnwindSafe(async move { job(value).await });
                let _ = work.catch_unwind().await;
            }
        }
    }

    /// Returns the value. Polls the call that has it to its end.
    async fn value(&self) -> OwnedMutexGuard<S> {
        let mut value = pin!(unconstrained(Arc::clone(&self.value).lock_owned()));
        // Joins the queue of the mutex first, so that no other caller begins an in-place call
        // meanwhile.
        if let Poll::Ready(value) = futures_util::poll!(value.as_mut()) {
            return value;
        }
        let in_place = lock(&self.in_place).clone();
        if let Some(call) = in_place {
            poll_fn(|cx| call.poll_by_task(cx)).await;
        }
        value.await
    }

    /// Returns when an in-place call has not ended after [`STALLED`].
    ///
    /// Without in-place calls there are no checks, so an idle process sleeps.
    async fn stalled(&self) {
        loop {
            if !self.is_checking.load(Ordering::SeqCst) {
                self.check.notified().await;
            }
            let begun = self.begun.load(Ordering::SeqCst);
            tokio::time::sleep(STALLED).await;
            if self.begun.load(Ordering::SeqCst) != begun {
                continue;
            }
            let is_over = lock(&self.in_place).as_ref().is_none_or(|call| call.is_over());
            if !is_over {
                return;
            }
            self.is_checking.store(false, Ordering::SeqCst);
            if self.begun.load(Ordering::SeqCst) != begun {
                // A call began while `is_checking` was still set, so it did not notify the task.
                self.is_checking.store(true, Ordering::SeqCst);
            }
        }
    }
}

/// Makes the task take over a call that its caller drops.
struct Finish<'a, T: Send + 'static, S> {
    call: &'a Arc<Call<T>>,
    queue: &'a mpsc::UnboundedSender<Queued<S>>,
    is_over: bool,
}

impl<T: Send + 'static, S> Drop for Finish<'_, T, S> {
    fn drop(&mut self) {
        if !self.is_over && !self.call.is_over() {
            let _ = self.queue.send(Queued::TakeOver);
        }
    }
}

/// A call that its caller polls until the task takes it over.
struct Call<T> {
    progress: Mutex<Progress<T>>,
}

struct Progress<T> {
    /// `None` after its end.
    future: Option<Boxed<T>>,
    /// The task polls the future. The caller must not, because the future keeps only the last
    /// waker.
    is_taken_over: bool,
    /// The result, if the task polled the future to its end.
    answer: Option<Result<T, Panicked>>,
    caller: Option<Waker>,
}

trait InPlace: Send + Sync {
    fn is_over(&self) -> bool;

    fn poll_by_task(&self, cx: &mut Context<'_>) -> Poll<()>;
}

impl<T: Send + 'static> Call<T> {
    fn new(future: Boxed<T>) -> Self {
        let progress =
            Progress { future: Some(future), is_taken_over: false, answer: None, caller: None };
        Self { progress: Mutex::new(progress) }
    }

    fn poll_by_caller(&self, cx: &mut Context<'_>) -> Poll<Result<T, Panicked>> {
        let mut progress = lock(&self.progress);
        if let Some(answer) = progress.answer.take() {
            return Poll::Ready(answer);
        }
        if !progress.is_taken_over
            && let Poll::Ready(answer) = progress.poll_future(cx)
        {
            // The call stays in `in_place` until the next one, and a waker keeps its task
            // allocated.
            progress.caller = None;
            return Poll::Ready(Ok(answer));
        }
        match &mut progress.caller {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl<T: Send + 'static> InPlace for Call<T> {
    fn is_over(&self) -> bool {
        lock(&self.progress).future.is_none()
    }

    fn poll_by_task(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut progress = lock(&self.progress);
        if progress.future.is_none() {
            return Poll::Ready(());
        }
        progress.is_taken_over = true;
        let answer = match catch_unwind(AssertUnwindSafe(|| progress.poll_future(cx))) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(answer)) => Ok(answer),
            Err(_) => Err(Panicked),
        };
        progress.answer = Some(answer);
        let caller = progress.caller.take();
        drop(progress);
        if let Some(caller) = caller {
            // A waker is foreign code that may panic, and the task serves other callers too.
            let _ = catch_unwind(AssertUnwindSafe(|| caller.wake()));
        }
        Poll::Ready(())
    }
}

impl<T> Progress<T> {
    fn poll_future(&mut self, cx: &mut Context<'_>) -> Poll<T> {
        // A panic drops the future, so that the value is free and the future is never polled again.
        let Some(mut future) = self.future.take() else { return Poll::Pending };
        let answer = future.as_mut().poll(cx);
        if answer.is_pending() {
            self.future = Some(future);
        }
        answer
    }
}

impl<S> fmt::Debug for SerialExecutor<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialExecutor").finish_non_exhaustive()
    }
}

/// Ignores poisoning: no code leaves the locked data inconsistent, even if a future panics.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn executor() -> (SerialExecutor<Vec<u32>>, Worker) {
        let worker = Worker::start().unwrap();
        (SerialExecutor::new(Vec::new(), &worker), worker)
    }

    /// Needs at least two polls, and records that it ran.
    async fn note(executor: &SerialExecutor<Vec<u32>>, worker: &Worker, n: u32) -> u32 {
        let worker = worker.clone();
        executor
            .call(Priority::Normal, move |mut notes| async move {
                worker.sleep(Duration::from_millis(1)).await;
                notes.push(n);
                n
            })
            .await
            .unwrap()
    }

    async fn notes(executor: &SerialExecutor<Vec<u32>>) -> Vec<u32> {
        executor.call(Priority::Low, async |notes| notes.clone()).await.unwrap()
    }

    #[tokio::test]
    async fn calls_are_made_in_the_order_of_arrival() {
        let (executor, worker) = executor();
        let answers =
            tokio::join!(note(&executor, &worker, 1), note(&executor, &worker, 2), async {
                note(&executor, &worker, 3).await
            });
        assert_eq!(answers, (1, 2, 3));
        assert_eq!(notes(&executor).await, [1, 2, 3]);
    }

    #[tokio::test]
    async fn calls_of_low_priority_wait_for_the_others() {
        let (executor, worker) = executor();
        let low = |n| executor.call(Priority::Low, async move |mut notes| notes.push(n));
        let _ = tokio::join!(note(&executor, &worker, 1), low(4), low(5), async {
            tokio::join!(note(&executor, &worker, 2), note(&executor, &worker, 3))
        });
        assert_eq!(notes(&executor).await, [1, 2, 3, 4, 5]);
    }

    #[tokio::test]
    async fn callers_that_stall_hold_up_nobody_and_get_their_answers() {
        let (executor, worker) = executor();
        // The first call has the value and sleeps. The other two are queued.
        let mut stalled = [1, 2, 3].map(|n| Box::pin(note(&executor, &worker, n)));
        for call in &mut stalled {
            assert!(poll_once(call.as_mut()).is_pending());
        }
        assert_eq!(timeout(SOON, note(&executor, &worker, 4)).await.unwrap(), 4);
        assert_eq!(notes(&executor).await, [1, 2, 3, 4]);
        for (n, call) in (1..).zip(stalled) {
            assert_eq!(timeout(SOON, call).await.unwrap(), n);
        }
    }

    #[tokio::test]
    async fn a_call_ends_without_its_caller_and_without_another_call() {
        for is_dropped in [false, true] {
            let (executor, _worker) = executor();
            let (done, is_done) = oneshot::channel();
            let (go, gone) = oneshot::channel::<()>();
            let mut call = Box::pin(executor.call(Priority::Normal, move |notes| async move {
                gone.await.unwrap();
                drop(notes);
                done.send(()).unwrap();
            }));
            assert!(poll_once(call.as_mut()).is_pending());
            let kept = if is_dropped { None } else { Some(call) };
            go.send(()).unwrap();
            timeout(SOON, is_done).await.unwrap().unwrap();
            if let Some(call) = kept {
                timeout(SOON, call).await.unwrap().unwrap();
            }
        }
    }

    #[tokio::test]
    async fn an_idle_executor_checks_nothing_and_checks_again_when_it_is_used() {
        let (executor, worker) = executor();
        for n in 0..3 {
            note(&executor, &worker, n).await;
            let idle = async {
                while executor.shared.is_checking.load(Ordering::SeqCst) {
                    tokio::time::sleep(STALLED).await;
                }
            };
            timeout(SOON, idle).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_caller_that_is_only_slow_is_woken_with_the_answer() {
        let (executor, worker) = executor();
        let executor = Arc::new(executor);
        let go = Arc::new(Notify::new());
        let first = {
            let (executor, go) = (Arc::clone(&executor), Arc::clone(&go));
            tokio::spawn(async move {
                let hold = async move |value| {
                    go.notified().await;
                    drop(value);
                };
                executor.call(Priority::Normal, hold).await.unwrap();
            })
        };
        tokio::task::yield_now().await;
        let mut second = Box::pin(note(&executor, &worker, 2));
        // Long enough for a takeover of the first call.
        assert!(timeout(STALLED * 2, &mut second).await.is_err());
        go.notify_one();
        assert_eq!(timeout(SOON, second).await.unwrap(), 2);
        timeout(SOON, first).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_panic_is_its_own_callers_error() {
        let (executor, worker) = executor();
        let mut stalled =
            Box::pin(executor.call(Priority::Normal, async |notes: OwnedMutexGuard<Vec<u32>>| {
                tokio::task::yield_now().await;
                drop(notes);
                panic!("on purpose, after it was taken over");
            }));
        assert!(poll_once(stalled.as_mut()).is_pending());
        let mut queued =
            Box::pin(executor.call(Priority::Normal, async |notes: OwnedMutexGuard<Vec<u32>>| {
                drop(notes);
                panic!("on purpose, in the queue");
            }));
        assert!(poll_once(queued.as_mut()).is_pending());
        assert_eq!(timeout(SOON, note(&executor, &worker, 3)).await.unwrap(), 3);
        let stalled: Result<(), _> = timeout(SOON, stalled).await.unwrap();
        let queued: Result<(), _> = timeout(SOON, queued).await.unwrap();
        assert_eq!((stalled, queued), (Err(Panicked), Err(Panicked)));
    }

    #[test]
    fn a_call_survives_the_runtime_of_its_caller() {
        let (executor, worker) = executor();
        let runtime =
            || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut stalled = Box::pin(note(&executor, &worker, 1));
        let other = runtime();
        other.block_on(async { assert!(poll_once(stalled.as_mut()).is_pending()) });
        drop(other);
        runtime().block_on(async { timeout(SOON, stalled).await.unwrap() });
    }
}
