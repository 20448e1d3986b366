//! A registry whose runtime has shut down is closed: for callers who come, for callers who wait elsewhere, for the count
//! of what it holds.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Capabilities, Claim, LockBackend, LockError, LockGuard, LockRegistry,
    MemoryBackend, Registry, Release, Renewal,
};
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

/// Nobody is left to give the claim back, but the guard is gone, and so must be what it held in memory.
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

/// The in-process store, with somebody to tell whether it is still there.
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

/// A claim that is still on the keeper's schedule would keep the engine, the backend and its connections for ever.
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

/// What becomes of a caller in a runtime that lives on, when the runtime of its registry ends.
fn waits_elsewhere(holder_is_local: bool) -> Result<LockGuard, LockError> {
    let store = MemoryBackend::new();
    let (home, elsewhere) = (runtime(), runtime());
    let ours = over(&store, &home, Duration::from_millis(500));
    let theirs = over(&store, &elsewhere, LONG);
    let holder = if holder_is_local { &ours } else { &theirs };
    // Nobody lets it go while the other waits.
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
