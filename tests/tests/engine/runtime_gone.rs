//! A registry whose runtime has shut down is closed: calls that wait in another runtime return
//! `Closed`, and no local lock or backend remains in memory. A registry whose runtime is not driven
//! renews nothing, and releases no dropped guard until it is driven again.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, LockBackend, LockError, LockGuard, LostReason,
    MemoryBackend, Registry, Release, Renewal,
};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(30);

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn over(store: &MemoryBackend, registry_runtime: &Runtime, lease: Duration) -> Registry {
    let _inside = registry_runtime.enter();
    Registry::builder(Arc::new(store.clone())).lease(lease).build().unwrap()
}

/// No task can release the claim any more, but the drop must still free the local lock.
#[test]
fn a_guard_dropped_after_its_runtime_leaves_no_local_lock() {
    let (store, registry_runtime) = (MemoryBackend::new(), runtime());
    let local = over(&store, &registry_runtime, LONG);
    let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
    drop(registry_runtime);
    drop(guard);
    assert_eq!(local.held(), 0, "held");
    assert_eq!(local.local_locks(), 0, "local locks");
}

/// The in-process store, with a reference count that shows whether it still exists.
#[derive(Debug)]
struct CountedBackend(MemoryBackend, #[expect(dead_code, reason = "it is only counted")] Arc<()>);

#[async_trait]
impl LockBackend for CountedBackend {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.0.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.0.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.0.release(claim).await
    }
}

/// If the claim stayed scheduled at the lease renewer, the engine, the backend and its connections
/// would never be dropped.
#[test]
fn a_registry_dropped_after_its_runtime_frees_its_backend() {
    let backend_count = Arc::new(());
    let registry_runtime = runtime();
    let local = {
        let _inside = registry_runtime.enter();
        let backend = CountedBackend(MemoryBackend::new(), Arc::clone(&backend_count));
        Registry::builder(Arc::new(backend)).build().unwrap()
    };
    let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
    drop(registry_runtime);
    drop(guard);
    drop(local);
    assert_eq!(Arc::strong_count(&backend_count), 1, "the backend is never dropped");
}

/// Returns the result of a caller in a live runtime after the runtime of its registry has ended.
fn wait_in_another_runtime(holder_is_local: bool) -> Result<LockGuard, LockError> {
    let store = MemoryBackend::new();
    let (registry_runtime, other_runtime) = (runtime(), runtime());
    let local = over(&store, &registry_runtime, Duration::from_secs(10));
    let remote = over(&store, &other_runtime, LONG);
    let holder = if holder_is_local { &local } else { &remote };
    // The lock is not released while the caller waits.
    let guard = other_runtime.block_on(holder.obtain("k").lock()).unwrap();
    let lock = local.obtain("k");
    let mut waiting = Box::pin(async move { lock.lock().await });
    {
        let _inside = other_runtime.enter();
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
    }
    let waiting = other_runtime.spawn(waiting);
    drop(registry_runtime);
    let outcome = other_runtime.block_on(async { timeout(LONG, waiting).await });
    drop(guard);
    outcome.expect("the call never returns").unwrap()
}

#[test]
fn a_waiter_for_another_process_returns_closed() {
    let outcome = wait_in_another_runtime(false);
    assert!(matches!(outcome, Err(LockError::Closed)), "{outcome:?}");
}

#[test]
fn a_waiter_in_the_local_queue_returns_closed() {
    let outcome = wait_in_another_runtime(true);
    assert!(matches!(outcome, Err(LockError::Closed)), "{outcome:?}");
}

/// Returns a runtime whose tasks run only inside `block_on`.
fn undriven_runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn a_lock_whose_runtime_is_not_driven_is_lost_at_its_deadline() {
    let store = MemoryBackend::new();
    let (registry_runtime, other_runtime) = (undriven_runtime(), runtime());
    let local = over(&store, &registry_runtime, Duration::from_millis(500));
    let remote = over(&store, &other_runtime, LONG);
    other_runtime.block_on(async {
        let guard = local.obtain("k").lock().await.unwrap();
        let reason = timeout(LONG, guard.lost()).await.expect("its loss is not reported");
        assert_eq!(reason, LostReason::Expired);
        let next = timeout(LONG, remote.obtain("k").lock()).await.expect("the key stays locked");
        assert!(!guard.is_held());
        next.unwrap().unlock().await.unwrap();
    });
}

#[test]
fn a_dropped_guard_is_released_once_its_runtime_is_driven_again() {
    let store = MemoryBackend::new();
    let (registry_runtime, other_runtime) = (undriven_runtime(), runtime());
    let local = over(&store, &registry_runtime, LONG);
    let remote = over(&store, &other_runtime, LONG);
    other_runtime.block_on(async {
        drop(local.obtain("k").lock().await.unwrap());
        assert!(remote.obtain("k").try_lock().await.unwrap().is_none(), "something released it");
        // `unlock` needs no task of the home runtime.
        local.obtain("other").lock().await.unwrap().unlock().await.unwrap();
        assert!(remote.obtain("other").try_lock().await.unwrap().is_some());
    });
    registry_runtime.block_on(local.idle());
    let taken = other_runtime.block_on(remote.obtain("k").try_lock()).unwrap();
    assert!(taken.is_some(), "the key stays locked");
}
