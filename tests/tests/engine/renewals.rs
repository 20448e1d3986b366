//! Tests which claims are renewed in one call, and when a converted claim is verified, over the
//! in-process store on paused time.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, LockBackend, LockGuard, MemoryBackend, Registry,
    Release, Renewal, RenewalPolicy,
};
use tokio::time::sleep;

const LEASE: Duration = Duration::from_secs(12);
const RENEWAL_INTERVAL: Duration = Duration::from_secs(4);

/// Records how many claims each call of `renew` contains.
#[derive(Debug)]
struct Store {
    inner: MemoryBackend,
    policy: RenewalPolicy,
    calls: Mutex<Vec<usize>>,
}

impl Store {
    fn new(batch_max: usize) -> Arc<Self> {
        Self::with_policy(RenewalPolicy::new().with_batch_max(batch_max))
    }

    fn with_policy(policy: RenewalPolicy) -> Arc<Self> {
        Arc::new(Self { inner: MemoryBackend::new(), policy, calls: Mutex::default() })
    }

    fn registry(self: &Arc<Self>) -> Registry {
        Registry::builder(Arc::clone(self) as _).lease(LEASE).build().unwrap()
    }

    fn take_calls(&self) -> Vec<usize> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

#[async_trait]
impl LockBackend for Store {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities().with_renewal(self.policy)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.inner.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.calls.lock().unwrap().push(claims.len());
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.inner.release(claim).await
    }
}

/// Acquires `count` locks, one per `interval`.
async fn acquire_all(registry: &Registry, count: u32, interval: Duration) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for n in 0..count {
        guards.push(registry.obtain(&format!("k{n}")).lock().await.unwrap());
        sleep(interval).await;
    }
    guards
}

#[tokio::test(start_paused = true)]
async fn a_renewal_call_contains_the_claims_that_are_due_soon_and_no_others() {
    let store = Store::new(100);
    let registry = store.registry();
    // The first five are due within a second of the first one, and the sixth later.
    let guards = acquire_all(&registry, 6, Duration::from_millis(250)).await;
    sleep(RENEWAL_INTERVAL - Duration::from_millis(6 * 250) + Duration::from_millis(100)).await;
    assert_eq!(store.take_calls(), [5]);
    sleep(Duration::from_millis(1_200)).await;
    assert_eq!(store.take_calls(), [1]);
    assert!(guards.iter().all(LockGuard::is_held));
}

#[tokio::test(start_paused = true)]
async fn renewal_calls_are_as_large_as_the_store_accepts() {
    let store = Store::new(50);
    let registry = store.registry();
    let guards = acquire_all(&registry, 200, Duration::from_millis(10)).await;
    sleep(RENEWAL_INTERVAL * 2).await;
    store.take_calls();
    sleep(RENEWAL_INTERVAL * 10).await;
    let calls = store.take_calls();
    assert!(calls.iter().all(|&claims| claims <= 50), "{calls:?}");
    // With 50 claims per call, 200 claims need at least four calls per interval.
    assert!(calls.len() <= 10 * 5 + 5, "{} calls: {calls:?}", calls.len());
    assert!(guards.iter().all(LockGuard::is_held));
}

/// A store with `verify_after` reports a change to a record only after a renewal has read the
/// record. A conversion writes the record without such a read, so the engine must verify the claim
/// again.
#[tokio::test(start_paused = true)]
async fn a_converted_claim_is_verified_as_early_as_a_new_one() {
    let verify_after = Duration::from_millis(25);
    let store = Store::with_policy(RenewalPolicy::new().with_verify_after(verify_after));
    let registry = store.registry();
    let guard = registry.obtain("k").lock().await.unwrap();
    sleep(verify_after / 2).await;
    let guard = guard.downgrade_to_upgradable().await.unwrap();
    sleep(verify_after * 2).await;
    assert_eq!(store.take_calls(), [1]);
    let guard = guard.upgrade().await.unwrap();
    sleep(verify_after * 2).await;
    assert_eq!(store.take_calls(), [1]);
    assert!(guard.is_held());
}
