//! Runs asynchronous calls on one value, one at a time. Used by `connection`.
//!
//! If the value is free, the caller polls its own call (an in-place call). This saves a switch to
//! another task, a tenth of a statement's time. All other calls are queued for one task on the
//! backend's own thread. Calls of low priority run after all other queued calls. The task also
//! takes over an in-place call:
//! - when another call is queued,
//! - when its caller drops the call,
//! - when the call has not ended after [`STALL_TIMEOUT`], because a caller may never poll its
//!   future again.
//!
//! Every call therefore runs to its end, even without its caller. Queueing and taking over have
//! constant cost.

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

use super::worker::WorkerThread;

/// The task takes over an in-place call that runs for longer than this time. The takeover happens
/// after at most twice this time. This time is much longer than a statement, and much shorter than
/// the margin of a renewal.
const STALL_TIMEOUT: Duration = Duration::from_millis(50);

type BoxedFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type QueuedWork<S> = Box<dyn FnOnce(OwnedMutexGuard<S>) -> BoxedFuture<()> + Send>;

/// A value, and the queues of calls on it.
pub(super) struct SerialExecutor<S> {
    state: Arc<ExecutorState<S>>,
    queue: mpsc::UnboundedSender<QueueItem<S>>,
    low_priority_queue: mpsc::UnboundedSender<QueueItem<S>>,
}

/// The order of queued calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Priority {
    Normal,
    /// The call runs after all queued normal calls. Most writes of acquisitions have this priority,
    /// so that they do not delay renewals and releases. Writes to an existing record have normal
    /// priority.
    Low,
}

enum QueueItem<S> {
    Call(QueuedWork<S>),
    /// The task takes over the in-place call, because its caller has dropped it or does not poll
    /// it.
    TakeOver,
}

struct ExecutorState<S> {
    value: Arc<tokio::sync::Mutex<S>>,
    /// The last in-place call. It may have ended.
    in_place: Mutex<Option<Arc<dyn AnyInPlaceCall>>>,
    /// The number of in-place calls so far.
    in_place_calls: AtomicU64,
    /// Whether the task checks, once per [`STALL_TIMEOUT`], if the in-place call has ended.
    is_monitoring: AtomicBool,
    monitor_wakeup: Notify,
}

/// The call panicked on the backend's thread and has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Panicked;

impl<S: Send + 'static> SerialExecutor<S> {
    /// Creates an executor whose queued calls run on `worker`.
    pub(super) fn new(value: S, worker: &WorkerThread) -> Self {
        let (queue, calls) = mpsc::unbounded_channel();
        let (low_priority_queue, low_priority_calls) = mpsc::unbounded_channel();
        let state = Arc::new(ExecutorState {
            value: Arc::new(tokio::sync::Mutex::new(value)),
            in_place: Mutex::default(),
            in_place_calls: AtomicU64::new(0),
            is_monitoring: AtomicBool::new(false),
            monitor_wakeup: Notify::new(),
        });
        worker.spawn(Arc::clone(&state).run(calls, low_priority_calls));
        Self { state, queue, low_priority_queue }
    }

    /// Runs `work` on the value: at once if the value is free, otherwise after the calls of the
    /// same priority that are already queued. A call of low priority also waits for all queued
    /// normal calls.
    ///
    /// # Errors
    /// [`Panicked`] if `work` panicked on the backend's thread.
    ///
    /// # Cancel safety
    /// Dropping the future does not end the work.
    ///
    /// # Panics
    /// If `work` panics while the caller polls it.
    pub(super) async fn call<T, W>(
        &self,
        priority: Priority,
        work: impl FnOnce(OwnedMutexGuard<S>) -> W + Send + 'static,
    ) -> Result<T, Panicked>
    where
        T: Send + 'static,
        W: Future<Output = T> + Send + 'static,
    {
        let work = match self.state.start_in_place(work) {
            Ok(call) => {
                let mut take_over_on_drop =
                    TakeOverOnDrop { call: &call, queue: &self.queue, is_over: false };
                let result = poll_fn(|cx| call.poll_by_caller(cx)).await;
                take_over_on_drop.is_over = true;
                return result;
            }
            Err(work) => work,
        };
        let (result_sender, result_receiver) = oneshot::channel();
        let work: QueuedWork<S> = Box::new(move |value| {
            let work = work(value);
            // The receiver may have been dropped.
            Box::pin(async move { drop(result_sender.send(work.await)) })
        });
        let queue = match priority {
            Priority::Normal => &self.queue,
            Priority::Low => &self.low_priority_queue,
        };
        queue.send(QueueItem::Call(work)).map_err(|_| Panicked)?;
        result_receiver.await.map_err(|_| Panicked)
    }
}

impl<S: Send + 'static> ExecutorState<S> {
    /// Starts a call that its caller polls. Returns `work` if the value is in use.
    fn start_in_place<T, W, F>(&self, work: F) -> Result<Arc<InPlaceCall<T>>, F>
    where
        T: Send + 'static,
        W: Future<Output = T> + Send + 'static,
        F: FnOnce(OwnedMutexGuard<S>) -> W,
    {
        // `in_place` is locked before the value, so that a task that waits for the value finds the
        // call that holds the value.
        let mut in_place = lock(&self.in_place);
        let Ok(value) = Arc::clone(&self.value).try_lock_owned() else { return Err(work) };
        let call = Arc::new(InPlaceCall::new(Box::pin(work(value))));
        let previous = in_place.replace(Arc::<InPlaceCall<T>>::clone(&call));
        drop(in_place);
        drop(previous);
        self.in_place_calls.fetch_add(1, Ordering::SeqCst);
        if !self.is_monitoring.load(Ordering::SeqCst)
            && !self.is_monitoring.swap(true, Ordering::SeqCst)
        {
            self.monitor_wakeup.notify_one();
        }
        Ok(call)
    }

    /// Runs queued calls until the executor is dropped.
    async fn run(
        self: Arc<Self>,
        mut calls: mpsc::UnboundedReceiver<QueueItem<S>>,
        mut low_priority_calls: mpsc::UnboundedReceiver<QueueItem<S>>,
    ) {
        loop {
            let queued = tokio::select! {
                biased;
                Some(queued) = calls.recv() => queued,
                queued = low_priority_calls.recv() => match queued {
                    Some(queued) => queued,
                    // The executor was dropped. A call may have been queued since the poll of
                    // `calls`.
                    None => match calls.recv().await {
                        Some(queued) => queued,
                        None => return,
                    },
                },
                () = self.wait_for_stall() => QueueItem::TakeOver,
            };
            let value = self.acquire_value().await;
            if let QueueItem::Call(work) = queued {
                // A panic drops `work` with the sender of the result, so the caller gets an error.
                let work = AssertUnwindSafe(async move { work(value).await });
                let _ = work.catch_unwind().await;
            }
        }
    }

    /// Acquires the value. If an in-place call holds the value, polls that call to its end.
    async fn acquire_value(&self) -> OwnedMutexGuard<S> {
        let mut value = pin!(unconstrained(Arc::clone(&self.value).lock_owned()));
        // The first poll enqueues the task at the mutex, so that no caller can start another
        // in-place call.
        if let Poll::Ready(value) = futures_util::poll!(value.as_mut()) {
            return value;
        }
        let in_place = lock(&self.in_place).clone();
        if let Some(call) = in_place {
            poll_fn(|cx| call.poll_by_task(cx)).await;
        }
        value.await
    }

    /// Waits until an in-place call has run for at least [`STALL_TIMEOUT`].
    ///
    /// The timer runs only while there are in-place calls, so an idle process does not wake up.
    async fn wait_for_stall(&self) {
        loop {
            if !self.is_monitoring.load(Ordering::SeqCst) {
                self.monitor_wakeup.notified().await;
            }
            let in_place_calls = self.in_place_calls.load(Ordering::SeqCst);
            tokio::time::sleep(STALL_TIMEOUT).await;
            if self.in_place_calls.load(Ordering::SeqCst) != in_place_calls {
                continue;
            }
            let is_over = lock(&self.in_place).as_ref().is_none_or(|call| call.is_over());
            if !is_over {
                return;
            }
            self.is_monitoring.store(false, Ordering::SeqCst);
            if self.in_place_calls.load(Ordering::SeqCst) != in_place_calls {
                // A call began while `is_monitoring` was still set, so the call did not notify the
                // task.
                self.is_monitoring.store(true, Ordering::SeqCst);
            }
        }
    }
}

/// Makes the task take over a call that its caller drops.
struct TakeOverOnDrop<'a, T: Send + 'static, S> {
    call: &'a Arc<InPlaceCall<T>>,
    queue: &'a mpsc::UnboundedSender<QueueItem<S>>,
    is_over: bool,
}

impl<T: Send + 'static, S> Drop for TakeOverOnDrop<'_, T, S> {
    fn drop(&mut self) {
        if !self.is_over && !self.call.is_over() {
            let _ = self.queue.send(QueueItem::TakeOver);
        }
    }
}

/// A call that its caller polls until the task takes it over.
struct InPlaceCall<T> {
    state: Mutex<CallState<T>>,
}

struct CallState<T> {
    /// The running call. `None` after its end.
    future: Option<BoxedFuture<T>>,
    /// Whether the task polls the future. Then the caller must not poll it, because the future
    /// keeps only the last waker.
    is_taken_over: bool,
    /// The result, if the task polled the future to its end.
    result: Option<Result<T, Panicked>>,
    caller: Option<Waker>,
}

trait AnyInPlaceCall: Send + Sync {
    fn is_over(&self) -> bool;

    fn poll_by_task(&self, cx: &mut Context<'_>) -> Poll<()>;
}

impl<T: Send + 'static> InPlaceCall<T> {
    fn new(future: BoxedFuture<T>) -> Self {
        let state =
            CallState { future: Some(future), is_taken_over: false, result: None, caller: None };
        Self { state: Mutex::new(state) }
    }

    fn poll_by_caller(&self, cx: &mut Context<'_>) -> Poll<Result<T, Panicked>> {
        let mut state = lock(&self.state);
        if let Some(result) = state.result.take() {
            return Poll::Ready(result);
        }
        if !state.is_taken_over
            && let Poll::Ready(result) = state.poll_future(cx)
        {
            // The call stays in `in_place` until the next call, and a stored waker would keep its
            // task allocated.
            state.caller = None;
            return Poll::Ready(Ok(result));
        }
        match &mut state.caller {
            Some(waker) => waker.clone_from(cx.waker()),
            slot @ None => *slot = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl<T: Send + 'static> AnyInPlaceCall for InPlaceCall<T> {
    fn is_over(&self) -> bool {
        lock(&self.state).future.is_none()
    }

    fn poll_by_task(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = lock(&self.state);
        if state.future.is_none() {
            return Poll::Ready(());
        }
        state.is_taken_over = true;
        let result = match catch_unwind(AssertUnwindSafe(|| state.poll_future(cx))) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(result)) => Ok(result),
            Err(_) => Err(Panicked),
        };
        state.result = Some(result);
        let caller = state.caller.take();
        drop(state);
        if let Some(caller) = caller {
            // A waker may panic. A panic must not end this task, because the task serves other
            // callers.
            let _ = catch_unwind(AssertUnwindSafe(|| caller.wake()));
        }
        Poll::Ready(())
    }
}

impl<T> CallState<T> {
    fn poll_future(&mut self, cx: &mut Context<'_>) -> Poll<T> {
        // If the poll panics, the future is dropped, so that the value is free and the future is
        // never polled again.
        let Some(mut future) = self.future.take() else { return Poll::Pending };
        let result = future.as_mut().poll(cx);
        if result.is_pending() {
            self.future = Some(future);
        }
        result
    }
}

impl<S> fmt::Debug for SerialExecutor<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialExecutor").finish_non_exhaustive()
    }
}

/// Locks the mutex. Ignores poisoning: no code leaves the locked data inconsistent, even if a
/// future panics.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn executor() -> (SerialExecutor<Vec<u32>>, WorkerThread) {
        let worker = WorkerThread::start().unwrap();
        (SerialExecutor::new(Vec::new(), &worker), worker)
    }

    /// Runs a call that needs at least two polls, and records `n`.
    async fn record(executor: &SerialExecutor<Vec<u32>>, worker: &WorkerThread, n: u32) -> u32 {
        let worker = worker.clone();
        executor
            .call(Priority::Normal, move |mut recorded| async move {
                worker.sleep(Duration::from_millis(1)).await;
                recorded.push(n);
                n
            })
            .await
            .unwrap()
    }

    async fn recorded(executor: &SerialExecutor<Vec<u32>>) -> Vec<u32> {
        executor.call(Priority::Low, async |recorded| recorded.clone()).await.unwrap()
    }

    #[tokio::test]
    async fn calls_run_in_the_order_of_arrival() {
        let (executor, worker) = executor();
        let answers =
            tokio::join!(record(&executor, &worker, 1), record(&executor, &worker, 2), async {
                record(&executor, &worker, 3).await
            });
        assert_eq!(answers, (1, 2, 3));
        assert_eq!(recorded(&executor).await, [1, 2, 3]);
    }

    #[tokio::test]
    async fn a_low_priority_call_waits_for_normal_calls() {
        let (executor, worker) = executor();
        let low = |n| executor.call(Priority::Low, async move |mut recorded| recorded.push(n));
        // The first call ends when all other calls are queued. Until then, the executor's task
        // waits with the second call, so it has taken no call of low priority.
        let (release, released) = oneshot::channel::<()>();
        let first = executor.call(Priority::Normal, async move |mut recorded| {
            released.await.unwrap();
            recorded.push(1);
        });
        let (second, third) = (record(&executor, &worker, 2), record(&executor, &worker, 3));
        let _ = tokio::join!(first, second, low(4), low(5), third, async {
            release.send(()).unwrap();
        });
        assert_eq!(recorded(&executor).await, [1, 2, 3, 4, 5]);
    }

    #[tokio::test]
    async fn a_stalled_caller_delays_no_other_call_and_gets_its_result() {
        let (executor, worker) = executor();
        // The first call holds the value and sleeps. The other two calls are queued.
        let mut stalled = [1, 2, 3].map(|n| Box::pin(record(&executor, &worker, n)));
        for call in &mut stalled {
            assert!(poll_once(call.as_mut()).is_pending());
        }
        assert_eq!(timeout(TIMEOUT, record(&executor, &worker, 4)).await.unwrap(), 4);
        assert_eq!(recorded(&executor).await, [1, 2, 3, 4]);
        for (n, call) in (1..).zip(stalled) {
            assert_eq!(timeout(TIMEOUT, call).await.unwrap(), n);
        }
    }

    #[tokio::test]
    async fn a_call_ends_without_polls_of_its_caller_and_without_another_call() {
        for is_dropped in [false, true] {
            let (executor, _worker) = executor();
            let (end_sender, end_receiver) = oneshot::channel();
            let (start_sender, start_receiver) = oneshot::channel::<()>();
            let mut call = Box::pin(executor.call(Priority::Normal, move |recorded| async move {
                start_receiver.await.unwrap();
                drop(recorded);
                end_sender.send(()).unwrap();
            }));
            assert!(poll_once(call.as_mut()).is_pending());
            let polled_call = if is_dropped { None } else { Some(call) };
            start_sender.send(()).unwrap();
            timeout(TIMEOUT, end_receiver).await.unwrap().unwrap();
            if let Some(call) = polled_call {
                timeout(TIMEOUT, call).await.unwrap().unwrap();
            }
        }
    }

    #[tokio::test]
    async fn an_idle_executor_stops_its_checks_and_resumes_them_when_used() {
        let (executor, worker) = executor();
        for n in 0..3 {
            record(&executor, &worker, n).await;
            let idle = async {
                while executor.state.is_monitoring.load(Ordering::SeqCst) {
                    tokio::time::sleep(STALL_TIMEOUT).await;
                }
            };
            timeout(TIMEOUT, idle).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_slow_caller_is_woken_with_the_result() {
        let (executor, worker) = executor();
        let executor = Arc::new(executor);
        let finish = Arc::new(Notify::new());
        let first = {
            let (executor, finish) = (Arc::clone(&executor), Arc::clone(&finish));
            tokio::spawn(async move {
                let hold = async move |value| {
                    finish.notified().await;
                    drop(value);
                };
                executor.call(Priority::Normal, hold).await.unwrap();
            })
        };
        tokio::task::yield_now().await;
        let mut second = Box::pin(record(&executor, &worker, 2));
        // This pause is long enough for a takeover of the first call.
        assert!(timeout(STALL_TIMEOUT * 2, &mut second).await.is_err());
        finish.notify_one();
        assert_eq!(timeout(TIMEOUT, second).await.unwrap(), 2);
        timeout(TIMEOUT, first).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_panic_is_returned_only_to_its_own_caller() {
        let (executor, worker) = executor();
        let mut stalled = Box::pin(executor.call(
            Priority::Normal,
            async |recorded: OwnedMutexGuard<Vec<u32>>| {
                tokio::task::yield_now().await;
                drop(recorded);
                panic!("expected, after the take-over");
            },
        ));
        assert!(poll_once(stalled.as_mut()).is_pending());
        let mut queued = Box::pin(executor.call(
            Priority::Normal,
            async |recorded: OwnedMutexGuard<Vec<u32>>| {
                drop(recorded);
                panic!("expected, in the queue");
            },
        ));
        assert!(poll_once(queued.as_mut()).is_pending());
        assert_eq!(timeout(TIMEOUT, record(&executor, &worker, 3)).await.unwrap(), 3);
        let stalled: Result<(), _> = timeout(TIMEOUT, stalled).await.unwrap();
        let queued: Result<(), _> = timeout(TIMEOUT, queued).await.unwrap();
        assert_eq!((stalled, queued), (Err(Panicked), Err(Panicked)));
    }

    #[test]
    fn a_call_survives_the_runtime_of_its_caller() {
        let (executor, worker) = executor();
        let runtime =
            || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut stalled = Box::pin(record(&executor, &worker, 1));
        let other = runtime();
        other.block_on(async { assert!(poll_once(stalled.as_mut()).is_pending()) });
        drop(other);
        runtime().block_on(async { timeout(TIMEOUT, stalled).await.unwrap() });
    }
}
