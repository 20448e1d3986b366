//! A hand-over of a claim to the next local caller is an acquisition like any other. That caller
//! alone holds the lock, for the lease that it requested.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, LockBackend, LockOptions, LockRegistry,
    MemoryBackend, Registry, Release, Renewal,
};
use tokio::sync::Notify;
use tokio::time::timeout;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

fn over(store: &MemoryBackend, lease: Duration) -> Registry {
    Registry::builder(Arc::new(store.clone())).lease(lease).build().unwrap()
}

/// The runtime may be blocked for longer than the lease between the drop of a guard and the work of
/// the background releaser.
#[tokio::test]
async fn a_claim_whose_lease_ended_on_the_way_is_not_handed_over() {
    let store = MemoryBackend::new();
    let ours = over(&store, ms(300));
    let lock = ours.obtain("k");
    let guard = lock.lock().await.unwrap();
    let mut waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    tokio::task::yield_now().await;
    drop(guard);
    // Blocks the only thread of our runtime until another process has acquired the key.
    let (theirs, their_guard) = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let guard = runtime.block_on(async {
            over(&store, LONG).obtain("k").try_lock_for(LONG).await.unwrap().unwrap()
        });
        (runtime, guard)
    })
    .join()
    .unwrap();
    assert!(timeout(ms(500), &mut waiter).await.is_err(), "two holders");
    let token = their_guard.fencing_token();
    theirs.spawn(their_guard.unlock());
    let next = timeout(LONG, waiter).await.unwrap().unwrap();
    assert!(next.is_held() && next.fencing_token() > token);
    theirs.shutdown_background();
}

/// A delivered guard may wait for longer than its lease until the caller's future is polled.
#[tokio::test]
async fn a_guard_that_was_fetched_too_late_is_not_given_to_the_caller() {
    let ours = over(&MemoryBackend::new(), ms(300));
    let lock = ours.obtain("k");
    let guard = lock.lock().await.unwrap();
    let waiter = tokio::spawn(async move { lock.lock().await.unwrap().is_held() });
    tokio::task::yield_now().await;
    guard.unlock().await.unwrap();
    thread::sleep(ms(400));
    assert!(timeout(LONG, waiter).await.unwrap().unwrap(), "lock() gave a guard that was over");
}

/// Delays the reply to its first renewal.
#[derive(Debug, Default)]
struct HoldsBack {
    inner: MemoryBackend,
    renewals: AtomicUsize,
    asked: Notify,
    go: Notify,
}

#[async_trait]
impl LockBackend for HoldsBack {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.inner.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        if self.renewals.fetch_add(1, Ordering::SeqCst) == 0 {
            self.asked.notify_one();
            self.go.notified().await;
        }
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.inner.release(claim).await
    }
}

/// The reply to a renewal may arrive after the guard was dropped and before the next caller has the
/// claim.
#[tokio::test]
async fn a_claim_that_the_store_calls_gone_is_not_handed_over() {
    let backend = Arc::new(HoldsBack::default());
    let ours = Registry::builder(Arc::clone(&backend) as _).lease(ms(1_500)).build().unwrap();
    let theirs = over(&backend.inner, LONG);
    let lock = ours.obtain("k");
    let guard = lock.lock().await.unwrap();
    let mut waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    backend.asked.notified().await;
    assert!(theirs.force_release("k").await.unwrap());
    let other = theirs.obtain("k").try_lock().await.unwrap().unwrap();
    backend.go.notify_one();
    drop(guard);
    assert!(timeout(ms(500), &mut waiter).await.is_err(), "two holders");
    other.unlock().await.unwrap();
    assert!(timeout(LONG, waiter).await.unwrap().unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_not_renewed_is_given_whole_or_not_at_all() {
    let lock = Registry::in_memory().unwrap().obtain("k");
    let options = LockOptions::new().renew(false).lease(ms(1_200));
    let guard = lock.lock_with(options.clone()).await.unwrap().unwrap();
    let waiter = tokio::spawn(async move { lock.lock_with(options).await.unwrap().unwrap() });
    tokio::time::sleep(ms(700)).await;
    guard.unlock().await.unwrap();
    let next = waiter.await.unwrap();
    assert!(next.valid_for() > ms(1_000), "{:?} of 1.2 s are left", next.valid_for());
}

#[tokio::test(start_paused = true)]
async fn what_one_holder_made_of_his_lease_is_not_the_next_ones() {
    let lock = over(&MemoryBackend::new(), ms(500)).obtain("k");
    let guard = lock.lock().await.unwrap();
    let waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    tokio::task::yield_now().await;
    guard.renew(Duration::from_secs(3_600)).await.unwrap();
    guard.unlock().await.unwrap();
    let next = waiter.await.unwrap();
    assert!(next.valid_for() <= ms(500), "{:?} of a lease of 500 ms", next.valid_for());
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A task of an executor that has ended: waking it drops it at once.
struct Orphan(Mutex<Option<Task>>);

impl Wake for Orphan {
    fn wake(self: Arc<Self>) {
        let task = self.0.lock().unwrap().take();
        drop(task);
    }
}

#[tokio::test]
async fn a_waiter_that_vanishes_when_it_is_woken_holds_up_nobody() {
    let ours = Registry::in_memory().unwrap();
    for handed_over in [true, false] {
        let lock = ours.obtain("k");
        let guard = lock.lock().await.unwrap();
        let orphan = Arc::new(Orphan(Mutex::new(None)));
        let options = LockOptions::new();
        // A claim is handed over only to a waiter with the holder's options. Any other waiter
        // acquires from the store.
        let options = if handed_over { options } else { options.label("another") };
        let waits = lock.clone();
        let mut task: Task = Box::pin(async move {
            let _ = waits.lock_with(options).await;
        });
        let waker = Waker::from(Arc::clone(&orphan));
        assert!(task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        *orphan.0.lock().unwrap() = Some(task);
        let unlocking = thread::spawn({
            let runtime = tokio::runtime::Handle::current();
            move || runtime.block_on(guard.unlock())
        });
        timeout(LONG, tokio::task::spawn_blocking(|| unlocking.join()))
            .await
            .expect("unlock returns")
            .unwrap()
            .unwrap()
            .unwrap();
        let next = timeout(LONG, lock.lock()).await.expect("the key is free").unwrap();
        next.unlock().await.unwrap();
    }
}
