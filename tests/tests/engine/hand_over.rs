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
    Attempt, BackendError, Capabilities, Claim, LockBackend, LockOptions, MemoryBackend, Registry,
    Release, Renewal,
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
async fn an_expired_claim_is_not_handed_over() {
    let store = MemoryBackend::new();
    let local = over(&store, ms(3_000));
    let lock = local.obtain("k");
    let guard = lock.lock().await.unwrap();
    let mut waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    tokio::task::yield_now().await;
    drop(guard);
    // Blocks the only thread of our runtime until another process has acquired the key.
    let (remote_runtime, remote_guard) = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let guard = runtime.block_on(async {
            over(&store, LONG).obtain("k").try_lock_for(LONG).await.unwrap().unwrap()
        });
        (runtime, guard)
    })
    .join()
    .unwrap();
    assert!(timeout(ms(500), &mut waiter).await.is_err(), "two holders");
    let token = remote_guard.fencing_token();
    remote_runtime.spawn(remote_guard.unlock());
    let next = timeout(LONG, waiter).await.unwrap().unwrap();
    assert!(next.is_held() && next.fencing_token() > token);
    remote_runtime.shutdown_background();
}

/// A delivered guard may wait for longer than its lease until the caller's future is polled.
#[tokio::test]
async fn an_expired_guard_is_not_returned_to_the_caller() {
    let local = over(&MemoryBackend::new(), ms(3_000));
    let lock = local.obtain("k");
    let guard = lock.lock().await.unwrap();
    let waiter = tokio::spawn(async move { lock.lock().await.unwrap().is_held() });
    tokio::task::yield_now().await;
    guard.unlock().await.unwrap();
    thread::sleep(ms(3_100));
    assert!(timeout(LONG, waiter).await.unwrap().unwrap(), "lock() returned an expired guard");
}

/// Delays the reply to its first renewal.
#[derive(Debug, Default)]
struct DelayingBackend {
    inner: MemoryBackend,
    renewals: AtomicUsize,
    renewal_started: Notify,
    continue_renewal: Notify,
}

#[async_trait]
impl LockBackend for DelayingBackend {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.inner.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        if self.renewals.fetch_add(1, Ordering::SeqCst) == 0 {
            self.renewal_started.notify_one();
            self.continue_renewal.notified().await;
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
async fn a_claim_that_is_gone_is_not_handed_over() {
    let backend = Arc::new(DelayingBackend::default());
    let local = Registry::builder(Arc::clone(&backend) as _).lease(ms(15_000)).build().unwrap();
    let remote = over(&backend.inner, LONG);
    let lock = local.obtain("k");
    let guard = lock.lock().await.unwrap();
    let mut waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    backend.renewal_started.notified().await;
    assert!(remote.force_release("k").await.unwrap());
    let other = remote.obtain("k").try_lock().await.unwrap().unwrap();
    backend.continue_renewal.notify_one();
    drop(guard);
    assert!(timeout(ms(500), &mut waiter).await.is_err(), "two holders");
    other.unlock().await.unwrap();
    assert!(timeout(LONG, waiter).await.unwrap().unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_without_renewal_receives_a_full_lease() {
    let lock = Registry::in_memory().unwrap().obtain("k");
    let options = LockOptions::new().auto_renew(false).lease(ms(1_200));
    let guard = lock.lock_with(options.clone()).await.unwrap();
    let waiter = tokio::spawn(async move { lock.lock_with(options).await.unwrap() });
    tokio::time::sleep(ms(700)).await;
    guard.unlock().await.unwrap();
    let next = waiter.await.unwrap();
    assert!(next.valid_for() > ms(1_000), "{:?} of 1.2 s are left", next.valid_for());
}

#[tokio::test(start_paused = true)]
async fn a_lease_extended_by_one_holder_does_not_pass_to_the_next() {
    let lock = over(&MemoryBackend::new(), ms(500)).obtain("k");
    let guard = lock.lock().await.unwrap();
    let waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    tokio::task::yield_now().await;
    guard.extend(Duration::from_secs(3_600)).await.unwrap();
    guard.unlock().await.unwrap();
    let next = waiter.await.unwrap();
    assert!(next.valid_for() <= ms(500), "{:?} of a lease of 500 ms", next.valid_for());
}

type BoxedTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A task of an executor that has ended: waking it drops it at once.
struct DropOnWake(Mutex<Option<BoxedTask>>);

impl Wake for DropOnWake {
    fn wake(self: Arc<Self>) {
        let task = self.0.lock().unwrap().take();
        drop(task);
    }
}

#[tokio::test]
async fn a_waiter_that_is_dropped_by_its_wake_up_blocks_no_other() {
    let local = Registry::in_memory().unwrap();
    for handed_over in [true, false] {
        let lock = local.obtain("k");
        let guard = lock.lock().await.unwrap();
        let drop_on_wake = Arc::new(DropOnWake(Mutex::new(None)));
        let options = LockOptions::new();
        // A claim is handed over only to a waiter with the holder's options. Any other waiter
        // acquires from the store.
        let options = if handed_over { options } else { options.label("another") };
        let waiter_lock = lock.clone();
        let mut task: BoxedTask = Box::pin(async move {
            let _ = waiter_lock.lock_with(options).await;
        });
        let waker = Waker::from(Arc::clone(&drop_on_wake));
        assert!(task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        *drop_on_wake.0.lock().unwrap() = Some(task);
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
