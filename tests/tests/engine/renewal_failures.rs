//! Occasional failures of renewals lose no lock. A renewal fails by a missing reply, a lost request
//! or a panic of the backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, LockBackend, LockEvent, LockOptions, MemoryBackend,
    Observer, Registry, Release, Renewal,
};

use super::panicking_backend::PanickingBackend;

/// One in this many renewals receives no reply.
const UNANSWERED_EVERY: usize = 10;

/// Leaves every tenth renewal unanswered.
#[derive(Debug)]
struct UnansweringBackend {
    inner: MemoryBackend,
    renewals: AtomicUsize,
}

#[async_trait]
impl LockBackend for UnansweringBackend {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.inner.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        if self.renewals.fetch_add(1, Ordering::Relaxed) % UNANSWERED_EVERY == UNANSWERED_EVERY - 1
        {
            std::future::pending::<()>().await;
        }
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.inner.release(claim).await
    }
}

/// After four unanswered renewals in a row, the lease renewer sends no more until a response
/// arrives. Renewals that are answered in between must reset this count.
#[tokio::test(start_paused = true)]
async fn occasional_unanswered_renewals_lose_no_lock() {
    let backend = UnansweringBackend { inner: MemoryBackend::new(), renewals: AtomicUsize::new(0) };
    let failures = Arc::new(RenewFailureCounter::default());
    let observer = Arc::clone(&failures) as Arc<dyn Observer>;
    let local = Registry::builder(Arc::new(backend)).observer(observer).build().unwrap();
    let guard = local.obtain("k").lock().await.unwrap();
    for hour in 1..=24 {
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        assert!(guard.is_held(), "lost within hour {hour}");
        assert!(
            failures.0.swap(0, Ordering::Relaxed) > 0,
            "no failure was reported in hour {hour}"
        );
    }
}

/// Counts the reported renewal failures.
#[derive(Debug, Default)]
struct RenewFailureCounter(AtomicUsize);

impl Observer for RenewFailureCounter {
    fn on(&self, event: &LockEvent<'_>) {
        if let LockEvent::RenewFailed { valid_for, .. } = event {
            assert!(*valid_for > Duration::ZERO, "the lock is held");
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The same for renewals that end with a panic of the backend.
#[tokio::test(start_paused = true)]
async fn occasional_panicking_renewals_lose_no_lock() {
    let backend = Arc::new(PanickingBackend::over(MemoryBackend::new()));
    let local = Registry::builder(Arc::clone(&backend) as _).build().unwrap();
    let guard = local.obtain("k").lock().await.unwrap();
    for hour in 1..=24 {
        backend.panic_once_in("renew");
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        assert!(backend.has_panicked(), "no renewal was sent in hour {hour}");
        assert!(guard.is_held(), "lost within hour {hour}");
    }
}

/// The lease renewer's own task calls `shard`.
#[tokio::test(start_paused = true)]
async fn a_panic_in_shard_does_not_stop_the_lease_renewer() {
    let backend = Arc::new(PanickingBackend::over(MemoryBackend::new()));
    let local = Registry::builder(Arc::clone(&backend) as _).build().unwrap();
    let guard = local.obtain("k").lock().await.unwrap();
    let other = local.obtain("other").lock().await.unwrap();
    backend.panic_once_in("shard");
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(backend.has_panicked());
    assert!(guard.is_held() && other.is_held(), "renewals have stopped");
}

/// During its `min_hold`, a key stays locked after its guard was dropped. Two failed renewals must
/// not end this hold.
#[tokio::test(start_paused = true)]
async fn a_failed_renewal_ends_no_min_hold() {
    let store = MemoryBackend::new();
    let lossy = Faults::none().at_call(Operation::Renew, 1, Fault::LoseRequest).at_call(
        Operation::Renew,
        2,
        Fault::LoseRequest,
    );
    let faulty = FaultyBackend::new(Arc::new(store.clone()), lossy);
    let local =
        Registry::builder(Arc::new(faulty)).lease(Duration::from_millis(600)).build().unwrap();
    let remote = Registry::builder(Arc::new(store)).build().unwrap();
    let options = LockOptions::new().min_hold(Duration::from_secs(3));
    drop(local.obtain("k").lock_with(options).await.unwrap());
    tokio::time::sleep(Duration::from_millis(2_900)).await;
    assert!(remote.obtain("k").try_lock().await.unwrap().is_none(), "free before its min_hold");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(remote.obtain("k").try_lock().await.unwrap().is_some());
}
