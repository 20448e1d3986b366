//! Closing under load: no request reaches the store after the close, and a clean report is correct.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Capabilities, Claim, LockBackend, LockError,
    LockRegistry, MemoryBackend, Registry, Release, Renewal,
};
use tokio::task::JoinSet;

/// Rejects every request after its close, as a store with connections does, and counts the rejected
/// ones.
#[derive(Debug, Default)]
struct Closable {
    inner: MemoryBackend,
    closed: AtomicBool,
    too_late: AtomicUsize,
}

impl Closable {
    fn check(&self) -> Result<(), BackendError> {
        if !self.closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.too_late.fetch_add(1, Ordering::SeqCst);
        Err(BackendError::new(BackendErrorKind::Misconfigured, "closed").as_refused())
    }
}

#[async_trait]
impl LockBackend for Closable {
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
async fn nothing_reaches_a_store_after_it_was_closed() {
    for round in 0..300_u64 {
        let backend = Arc::new(Closable::default());
        let ours = Registry::builder(Arc::clone(&backend) as _).handoff(0).build().unwrap();
        let mut tasks = JoinSet::new();
        for _ in 0..16 {
            let lock = ours.obtain("k");
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
        let report = ours.close(Duration::from_secs(30)).await;
        assert!(report.is_clean(), "round {round}: {report:?}");
        tasks.join_all().await;
        let too_late = backend.too_late.load(Ordering::SeqCst);
        assert_eq!(too_late, 0, "round {round}: requests after the store was closed");
        assert_eq!(backend.inner.records(), 0, "round {round}: something is still held");
    }
}

/// A future that exists but is not polled keeps its claim in flight for ever. It must not delay the
/// loss notifications of other holders.
#[tokio::test(start_paused = true)]
async fn a_caller_who_stands_still_does_not_keep_holders_from_hearing_of_the_close() {
    let store = MemoryBackend::new();
    let ours = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let theirs = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let elsewhere = theirs.obtain("stuck").lock().await.unwrap();
    let guard = ours.obtain("k").lock().await.unwrap();
    let lock = ours.obtain("stuck");
    let mut standing = Box::pin(lock.lock());
    assert!(futures_util::poll!(standing.as_mut()).is_pending());
    let report = ours.close(Duration::from_millis(50)).await;
    assert_eq!(report.lost, 1);
    assert!(!guard.is_held() && !report.is_clean(), "{report:?}");
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
    elsewhere.unlock().await.unwrap();
}
