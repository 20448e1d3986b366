//! Tests user code that runs inside the engine: observers, wakers and destructors. Locks still work
//! if it panics, or if it calls the engine again.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::future::Future;
use std::panic::panic_any;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use registry_core::{
    Attempt, Claim, Key, LockAdmin, LockBackend, LockError, LockEvent, LockGuard, LockOptions,
    LostReason, MemoryBackend, Observer, Owner, Registry,
};
use tokio::task::unconstrained;
use tokio::time::sleep;

type LockFuture = Pin<Box<dyn Future<Output = Result<Option<LockGuard>, LockError>> + Send>>;

fn lock_future(registry: &Registry, options: LockOptions) -> LockFuture {
    let lock = registry.obtain("k");
    // Without `unconstrained`, a future that is polled manually uses up its coop budget, and is
    // then always pending.
    Box::pin(unconstrained(async move { lock.lock_with(options).await.map(Some) }))
}

fn poll<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(waker))
}

/// The payload of a panic that panics again when it is dropped.
struct PanicsOnDrop;

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        panic_any(Self);
    }
}

struct PanicsOnWake;

impl Wake for PanicsOnWake {
    fn wake(self: Arc<Self>) {
        panic_any(PanicsOnDrop);
    }
}

fn panics_on_wake() -> Waker {
    Waker::from(Arc::new(PanicsOnWake))
}

#[derive(Debug)]
struct PanicsOnEvents;

impl Observer for PanicsOnEvents {
    fn on(&self, _: &LockEvent<'_>) {
        panic_any(PanicsOnDrop);
    }
}

#[tokio::test(start_paused = true)]
async fn an_observer_whose_panic_payload_panics_on_drop_does_not_end_renewal() {
    let backend = Arc::new(MemoryBackend::new());
    let registry = Registry::builder(backend).observer(Arc::new(PanicsOnEvents)).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    sleep(Duration::from_secs(600)).await;
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_waker_that_panics_at_a_loss_does_not_end_renewal() {
    let store = MemoryBackend::new();
    let registry = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let broken = registry.obtain("k").lock().await.unwrap();
    let kept = registry.obtain("kept").lock().await.unwrap();
    let mut first = Box::pin(broken.lost());
    assert!(poll(&mut first, &panics_on_wake()).is_pending());
    let second = broken.lost();
    store.force_release(&Key::new("k").unwrap()).await.unwrap();
    assert_eq!(second.await, LostReason::Gone);
    sleep(Duration::from_secs(600)).await;
    assert!(kept.is_held());
    kept.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_waker_that_panics_in_a_hand_over_does_not_affect_other_waiters() {
    let registry = Registry::in_memory().unwrap();
    let owner = Owner::new();
    let own = || LockOptions::new().owner(&owner);
    let held = registry.obtain("k").lock().await.unwrap();
    let mut first = lock_future(&registry, own());
    let mut second = lock_future(&registry, own());
    assert!(poll(&mut first, &panics_on_wake()).is_pending());
    assert!(poll(&mut second, Waker::noop()).is_pending());
    held.unlock().await.unwrap();
    let first = first.await.unwrap().unwrap();
    let second = second.await.unwrap().unwrap();
    assert_eq!(first.fencing_token(), second.fencing_token());
}

/// Polls its task before `wake` returns.
struct PollsInPlace {
    task: Mutex<Option<LockFuture>>,
    done: std::sync::mpsc::Sender<Option<LockGuard>>,
}

impl Wake for PollsInPlace {
    fn wake(self: Arc<Self>) {
        // `None` while the task is being polled.
        let Some(mut task) = self.task.lock().unwrap().take() else { return };
        let waker = Waker::from(Arc::clone(&self));
        match poll(&mut task, &waker) {
            Poll::Ready(guard) => self.done.send(guard.unwrap()).unwrap(),
            Poll::Pending => *self.task.lock().unwrap() = Some(task),
        }
    }
}

#[test]
fn a_waker_that_polls_in_place_does_not_block_the_in_process_store() {
    let (result_sender, result) = channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let granted = runtime.block_on(async {
            let store = MemoryBackend::new();
            let registry = Registry::builder(Arc::new(store.clone())).build().unwrap();
            let claim = |lease| Claim::new(Key::new("k").unwrap(), lease);
            let short = claim(Duration::from_secs(10));
            assert!(matches!(store.try_acquire(&short).await, Ok(Attempt::Granted(_))));
            let (done, _granted) = channel();
            let task = PollsInPlace {
                task: Mutex::new(Some(lock_future(&registry, LockOptions::new()))),
                done,
            };
            Waker::from(Arc::new(task)).wake();
            // The sleep blocks the runtime, so no timer of the engine wakes the task. The attempt
            // after it removes the expired record, and that wakes the task.
            std::thread::sleep(Duration::from_millis(10_100));
            let next = claim(Duration::from_secs(600));
            matches!(store.try_acquire(&next).await, Ok(Attempt::Granted(_)))
        });
        result_sender.send(granted).unwrap();
    });
    assert!(result.recv_timeout(Duration::from_secs(30)).expect("the store is not blocked"));
}

/// Drops its task instead of waking it.
struct DropsItsTask(Mutex<Option<LockFuture>>, Arc<AtomicUsize>);

impl Wake for DropsItsTask {
    fn wake(self: Arc<Self>) {
        let task = self.0.lock().unwrap().take();
        if task.is_some() {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
        drop(task);
    }
}

#[test]
fn a_long_queue_whose_wakers_drop_their_tasks_does_not_overflow_the_stack() {
    const WAITERS: usize = 20_000;
    let (result_sender, result) = sync_channel(1);
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let backend = Arc::new(MemoryBackend::new());
            let registry = Registry::builder(backend).handoff(0).build().unwrap();
            let held = registry.obtain("k").lock().await.unwrap();
            let dropped = Arc::new(AtomicUsize::new(0));
            for _ in 0..WAITERS {
                let task = Arc::new(DropsItsTask(Mutex::default(), Arc::clone(&dropped)));
                let waker = Waker::from(Arc::clone(&task));
                let mut waiting = lock_future(&registry, LockOptions::new());
                assert!(poll(&mut waiting, &waker).is_pending());
                *task.0.lock().unwrap() = Some(waiting);
            }
            held.unlock().await.unwrap();
            let next = registry.obtain("k").lock().await.unwrap();
            next.unlock().await.unwrap();
            result_sender.send(dropped.load(Ordering::Relaxed)).unwrap();
        });
    });
    thread.join().unwrap();
    assert_eq!(result.recv().unwrap(), WAITERS);
}

#[tokio::test]
async fn locking_and_unlocking_lets_other_tasks_run() {
    let registry = Registry::in_memory().unwrap();
    let ticks = Arc::new(AtomicUsize::new(0));
    let others = {
        let ticks = Arc::clone(&ticks);
        async move {
            loop {
                ticks.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(others);
    let lock = registry.obtain("k");
    for _ in 0..10_000 {
        let guard = lock.lock().await.unwrap();
        unconstrained(guard.unlock()).await.unwrap();
    }
    assert!(
        ticks.load(Ordering::Relaxed) >= 10,
        "{ticks:?} times while 10,000 locks were acquired"
    );

    let before = ticks.load(Ordering::Relaxed);
    let mut guards = Vec::new();
    for n in 0..10_000 {
        guards.push(unconstrained(registry.obtain(&n.to_string()).lock()).await);
    }
    for guard in guards {
        guard.unwrap().unlock().await.unwrap();
    }
    let ticks = ticks.load(Ordering::Relaxed) - before;
    assert!(ticks >= 10, "{ticks} times while 10,000 locks were unlocked");
}
