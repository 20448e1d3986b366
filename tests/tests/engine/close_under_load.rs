//! Closing under load: no request reaches the store after the close, and a clean report is correct.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Capabilities, Claim, LockBackend, LockError,
    MemoryBackend, Registry, Release, Renewal,
};
use tokio::task::JoinSet;

/// Rejects every request after its close, as a store with connections does, and counts the rejected
/// ones.
#[derive(Debug, Default)]
struct ClosableBackend {
    inner: MemoryBackend,
    closed: AtomicBool,
    requests_after_close: AtomicUsize,
}

impl ClosableBackend {
    fn check(&self) -> Result<(), BackendError> {
        if !self.closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.requests_after_close.fetch_add(1, Ordering::SeqCst);
        Err(BackendError::new(BackendErrorKind::Misconfigured, "closed").as_refused())
    }
}

#[async_trait]
impl LockBackend for ClosableBackend {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        tokio::task::yield_now().await;
        self.check()?;
        self.inner.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        tokio::task::yield_now().await;
        self.check()?;
        self.inner.release(claim).await
    }

    async fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_reaches_a_closed_store() {
    for round in 0..300_u64 {
        let backend = Arc::new(ClosableBackend::default());
        let local = Registry::builder(Arc::clone(&backend) as _).handoff(0).build().unwrap();
        let mut tasks = JoinSet::new();
        for _ in 0..16 {
            let lock = local.obtain("k");
            tasks.spawn(async move {
                loop {
                    match lock.lock().await {
                        Ok(guard) => drop(guard.unlock().await),
                        Err(LockError::Closed) => return,
                        Err(error) => panic!("{error:?}"),
                    }
                }
            });
        }
        for _ in 0..round % 50 {
            tokio::task::yield_now().await;
        }
        let report = local.close(Duration::from_secs(30)).await;
        assert!(report.is_clean(), "round {round}: {report:?}");
        tasks.join_all().await;
        let requests_after_close = backend.requests_after_close.load(Ordering::SeqCst);
        assert_eq!(requests_after_close, 0, "round {round}: requests after the store was closed");
        assert_eq!(backend.inner.records(), 0, "round {round}: something is still held");
    }
}

/// A future that exists but is not polled keeps its claim in flight without a limit. It must not
/// delay the loss notifications of other holders.
#[tokio::test(start_paused = true)]
async fn an_unpolled_caller_does_not_delay_the_loss_notification_of_close() {
    let store = MemoryBackend::new();
    let local = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let remote = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let remote_guard = remote.obtain("stuck").lock().await.unwrap();
    let guard = local.obtain("k").lock().await.unwrap();
    let lock = local.obtain("stuck");
    let mut unpolled = Box::pin(lock.lock());
    assert!(futures_util::poll!(unpolled.as_mut()).is_pending());
    let report = local.close(Duration::from_millis(50)).await;
    assert_eq!(report.lost, 1);
    assert!(!guard.is_held() && !report.is_clean(), "{report:?}");
    assert!(remote.obtain("k").try_lock().await.unwrap().is_some());
    remote_guard.unlock().await.unwrap();
}
