//! A request that failed for its caller may still arrive at the store and be granted. The
//! background releaser releases this grant before its lease ends.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, LockBackend, MemoryBackend, Registry, Release,
    Renewal,
};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Fails the first acquire at once and delivers it after 500 ms; delays the replies to all others.
#[derive(Debug)]
struct LateAcquireBackend {
    inner: MemoryBackend,
    acquires: AtomicUsize,
    late_requests: Mutex<JoinSet<()>>,
    /// The first acquire fails like a request on a connection that broke while idle.
    is_stale: bool,
}

impl LateAcquireBackend {
    fn over(store: &MemoryBackend, is_stale: bool) -> Self {
        let (acquires, late_requests) = (AtomicUsize::new(0), Mutex::default());
        Self { inner: store.clone(), acquires, late_requests, is_stale }
    }
}

const ARRIVES_AFTER: Duration = Duration::from_millis(500);
const ANSWERS_AFTER: Duration = Duration::from_millis(100);

#[async_trait]
impl LockBackend for LateAcquireBackend {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        if self.acquires.fetch_add(1, Ordering::SeqCst) > 0 {
            let answer = self.inner.try_acquire(claim).await;
            sleep(ANSWERS_AFTER).await;
            return answer;
        }
        let (inner, claim) = (self.inner.clone(), claim.clone());
        self.late_requests.lock().unwrap().spawn(async move {
            sleep(ARRIVES_AFTER).await;
            drop(inner.try_acquire(&claim).await);
        });
        let error = BackendError::transient("the connection broke on purpose");
        Err(if self.is_stale { error.as_stale_connection() } else { error })
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.inner.release(claim).await
    }
}

/// The caller ends while its second attempt is in flight. That attempt is granted and released; the
/// first one arrives afterwards and is granted again.
#[tokio::test(start_paused = true)]
async fn a_late_acquire_is_released_although_a_later_one_was_released() {
    let store = MemoryBackend::new();
    let local =
        Registry::builder(Arc::new(LateAcquireBackend::over(&store, false))).build().unwrap();
    let remote = Registry::builder(Arc::new(store)).build().unwrap();
    let lock = local.obtain("k");
    let timed_out = timeout(Duration::from_millis(50), lock.lock()).await;
    assert!(timed_out.is_err(), "the second attempt is answered after 100 ms");
    sleep(ARRIVES_AFTER).await;
    // Far below the lease of 30 s, and far above the poll intervals of the search.
    let next = remote.obtain("k").try_lock_for(Duration::from_secs(5)).await.unwrap();
    assert!(next.is_some(), "left to its lease, although the store answers");
}

/// The backend leaves the retry to the engine, which counts the first request as an unknown
/// attempt.
#[tokio::test(start_paused = true)]
async fn a_single_try_survives_a_stale_connection_and_its_first_request_leaves_no_lock() {
    let store = MemoryBackend::new();
    let local =
        Registry::builder(Arc::new(LateAcquireBackend::over(&store, true))).build().unwrap();
    let remote = Registry::builder(Arc::new(store)).build().unwrap();
    let guard = local.obtain("k").try_lock().await.unwrap();
    guard.expect("the second request is granted").unlock().await.unwrap();
    sleep(ARRIVES_AFTER).await;
    let next = remote.obtain("k").try_lock_for(Duration::from_secs(5)).await.unwrap();
    assert!(next.is_some(), "left to its lease, although the store answers");
}
