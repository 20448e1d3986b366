//! A registry whose runtime has shut down is closed. This affects new calls, calls that wait in
//! another runtime, and its count of held locks. A registry whose runtime is not driven renews
//! nothing and releases no dropped guard.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, LockBackend, LockError, LockGuard, LockRegistry,
    LostReason, MemoryBackend, Registry, Release, Renewal,
};
use registry_testkit::redis::RedisServer;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(30);

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn over(store: &MemoryBackend, home: &Runtime, lease: Duration) -> Registry {
    let _inside = home.enter();
    Registry::builder(Arc::new(store.clone())).lease(lease).build().unwrap()
}

/// No task can release the claim any more, but the dropped guard must still free its memory.
#[test]
fn a_guard_dropped_after_its_runtime_leaves_no_slot() {
    let (store, home) = (MemoryBackend::new(), runtime());
    let ours = over(&store, &home, LONG);
    let guard = home.block_on(ours.obtain("k").lock()).unwrap();
    drop(home);
    drop(guard);
    assert_eq!(ours.held(), 0, "held");
    assert_eq!(ours.slots(), 0, "slots");
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

/// A claim still scheduled at the lease renewer would keep the engine, the backend and its
/// connections alive for ever.
#[test]
fn a_registry_dropped_after_its_runtime_frees_its_backend() {
    let alive = Arc::new(());
    let home = runtime();
    let ours = {
        let _inside = home.enter();
        let backend = CountedBackend(MemoryBackend::new(), Arc::clone(&alive));
        Registry::builder(Arc::new(backend)).build().unwrap()
    };
    let guard = home.block_on(ours.obtain("k").lock()).unwrap();
    drop(home);
    drop(guard);
    drop(ours);
    assert_eq!(Arc::strong_count(&alive), 1, "the backend is never dropped");
}

/// Returns the result of a caller in a live runtime after the runtime of its registry has ended.
fn waits_elsewhere(holder_is_local: bool) -> Result<LockGuard, LockError> {
    let store = MemoryBackend::new();
    let (home, elsewhere) = (runtime(), runtime());
    let ours = over(&store, &home, Duration::from_millis(500));
    let theirs = over(&store, &elsewhere, LONG);
    let holder = if holder_is_local { &ours } else { &theirs };
    // The lock is not released while the caller waits.
    let guard = elsewhere.block_on(holder.obtain("k").lock()).unwrap();
    let lock = ours.obtain("k");
    let mut waiting = Box::pin(async move { lock.lock().await });
    {
        let _inside = elsewhere.enter();
        let mut in_passing = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut in_passing).is_pending());
    }
    let waiting = elsewhere.spawn(waiting);
    drop(home);
    let outcome = elsewhere.block_on(async { timeout(LONG, waiting).await });
    drop(guard);
    outcome.expect("it waits for ever").unwrap()
}

#[test]
fn a_waiter_for_another_process_is_sent_away() {
    let outcome = waits_elsewhere(false);
    assert!(matches!(outcome, Err(LockError::Closed)), "{outcome:?}");
}

#[test]
fn a_waiter_in_the_local_line_is_sent_away() {
    let outcome = waits_elsewhere(true);
    assert!(matches!(outcome, Err(LockError::Closed)), "{outcome:?}");
}

/// A runtime that only runs inside `block_on`.
fn undriven() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn a_lock_whose_home_runtime_is_not_driven_is_lost_at_its_deadline() {
    let store = MemoryBackend::new();
    let (home, elsewhere) = (undriven(), runtime());
    let ours = over(&store, &home, Duration::from_millis(500));
    let theirs = over(&store, &elsewhere, LONG);
    elsewhere.block_on(async {
        let guard = ours.obtain("k").lock().await.unwrap();
        let reason = timeout(LONG, guard.lost()).await.expect("its loss is not reported");
        assert_eq!(reason, LostReason::Expired);
        let next = timeout(LONG, theirs.obtain("k").lock()).await.expect("the key stays taken");
        assert!(!guard.is_held());
        next.unwrap().unlock().await.unwrap();
    });
}

#[test]
fn a_dropped_guard_whose_home_runtime_is_not_driven_is_released_once_it_is() {
    let store = MemoryBackend::new();
    let (home, elsewhere) = (undriven(), runtime());
    let ours = over(&store, &home, LONG);
    let theirs = over(&store, &elsewhere, LONG);
    elsewhere.block_on(async {
        drop(ours.obtain("k").lock().await.unwrap());
        assert!(theirs.obtain("k").try_lock().await.unwrap().is_none(), "something released it");
        // `unlock` needs no task of the home runtime.
        ours.obtain("other").lock().await.unwrap().unlock().await.unwrap();
        assert!(theirs.obtain("other").try_lock().await.unwrap().is_some());
    });
    home.block_on(ours.idle());
    let taken = elsewhere.block_on(theirs.obtain("k").try_lock()).unwrap();
    assert!(taken.is_some(), "the key stays taken");
}

#[test]
fn a_call_to_a_server_whose_home_runtime_is_not_driven_fails() {
    let (home, elsewhere) = (undriven(), runtime());
    let server = elsewhere.block_on(RedisServer::start(&[])).unwrap();
    let ours = home.block_on(lock_registry::connect(&server.url())).unwrap();
    let outcome = elsewhere.block_on(async { timeout(LONG, ours.obtain("k").try_lock()).await });
    let outcome = outcome.expect("it waits for ever");
    assert!(matches!(outcome, Err(LockError::Backend { .. })), "{outcome:?}");
}
