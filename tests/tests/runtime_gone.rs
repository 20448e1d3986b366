//! A registry whose runtime has shut down is closed: for callers who come, for callers who wait elsewhere, for the count
//! of what it holds.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockError, LockOptions, LockRegistry, MemoryBackend, Registry};
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

/// With the cycle of engine, keeper and claim, the backend and its connections would live for ever.
#[test]
fn a_registry_dropped_after_its_runtime_frees_its_backend() {
    #[derive(Debug)]
    struct Counted(MemoryBackend, #[expect(dead_code, reason = "it is only counted")] Arc<()>);

    #[async_trait::async_trait]
    impl registry_core::LockBackend for Counted {
        fn capabilities(&self) -> registry_core::Capabilities {
            self.0.capabilities()
        }

        async fn try_acquire(
            &self,
            claim: &registry_core::Claim,
        ) -> Result<registry_core::Attempt, registry_core::BackendError> {
            self.0.try_acquire(claim).await
        }

        async fn renew(
            &self,
            claims: &[registry_core::Claim],
        ) -> Vec<Result<registry_core::Renewal, registry_core::BackendError>> {
            self.0.renew(claims).await
        }

        async fn release(
            &self,
            claim: &registry_core::Claim,
        ) -> Result<registry_core::Release, registry_core::BackendError> {
            self.0.release(claim).await
        }
    }

    let alive = Arc::new(());
    let home = runtime();
    let ours = {
        let _inside = home.enter();
        let backend = Counted(MemoryBackend::new(), Arc::clone(&alive));
        Registry::builder(Arc::new(backend)).build().unwrap()
    };
    let guard = home.block_on(ours.obtain("k").lock()).unwrap();
    drop(home);
    drop(guard);
    drop(ours);
    assert_eq!(Arc::strong_count(&alive), 1, "the backend is never dropped");
}

/// Waits in a runtime that lives on, for a registry whose runtime ends.
fn waits_elsewhere(behind_whom: &str) -> Result<Result<bool, LockError>, &'static str> {
    let store = MemoryBackend::new();
    let (home, elsewhere) = (runtime(), runtime());
    let ours = over(&store, &home, Duration::from_millis(500));
    let theirs = over(&store, &elsewhere, LONG);
    let holder = if behind_whom == "another process" { &theirs } else { &ours };
    // A guard that nobody lets go, as after `mem::forget`.
    let options = LockOptions::new();
    let guard = elsewhere.block_on(holder.obtain("k").lock_with(options)).unwrap().unwrap();
    let lock = ours.obtain("k");
    let waiting = elsewhere.spawn(async move { lock.lock().await.map(|guard| guard.is_held()) });
    elsewhere.block_on(tokio::task::yield_now());
    drop(home);
    let outcome = elsewhere.block_on(async { timeout(LONG, waiting).await });
    drop(guard);
    outcome.map(|joined| joined.unwrap()).map_err(|_| "still waiting")
}

#[test]
fn a_waiter_for_another_process_is_sent_away_when_its_registry_loses_its_runtime() {
    let outcome = waits_elsewhere("another process");
    assert!(matches!(outcome, Ok(Err(LockError::Closed))), "{outcome:?}");
}

#[test]
fn a_waiter_in_the_local_line_is_sent_away_when_its_registry_loses_its_runtime() {
    let outcome = waits_elsewhere("a local caller");
    assert!(matches!(outcome, Ok(Err(LockError::Closed))), "{outcome:?}");
}
