//! Callers that lock through a connection and end together with their runtime. Their lock belongs
//! to the guard and outlives them.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, LockGuard, Registry};
use registry_testkit::within;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use crate::server::{LockMode, ServerKind, TEST_TIMEOUT, backend_with_mode, registry_with_mode};

const KEY: &str = "orders/42";
const LEASE: Duration = Duration::from_secs(60);
/// Well before the next renewal.
const AT_ONCE: Duration = Duration::from_secs(15);

/// Runs `work` in its own runtime, which then ends.
async fn run_in_own_runtime<T, F>(work: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let there = tokio::task::spawn_blocking(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work())
    });
    within(TEST_TIMEOUT, there).await.unwrap()
}

async fn lock(registry: &Registry, key: &str) -> LockGuard {
    within(TEST_TIMEOUT, registry.obtain(key).lock()).await.unwrap()
}

async fn a_lock_outlives_the_runtime_of_its_acquisition(kind: ServerKind, mode: LockMode) {
    let server = kind.start().await;
    let second_registry = registry_with_mode(&server.url(), LEASE, mode).await;
    let first_registry = registry_with_mode(&server.url(), LEASE, mode).await;
    let there = first_registry.clone();
    let guard = run_in_own_runtime(|| async move { lock(&there, KEY).await }).await;
    let other = lock(&first_registry, "orders/43").await;
    // A locked row may be reported as busy or as a retryable error.
    assert!(!matches!(second_registry.obtain(KEY).try_lock().await, Ok(Some(_))));
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
    other.unlock().await.unwrap();
    lock(&second_registry, KEY).await.unlock().await.unwrap();
}

async fn a_session_lock_outlives_the_runtime_of_its_acquisition(kind: ServerKind) {
    a_lock_outlives_the_runtime_of_its_acquisition(kind, LockMode::Session).await;
}

async fn a_row_lock_outlives_the_runtime_of_its_acquisition(kind: ServerKind) {
    a_lock_outlives_the_runtime_of_its_acquisition(kind, LockMode::Row).await;
}

fn registry_over(backend: &Arc<dyn LockBackend>) -> Registry {
    Registry::builder(Arc::clone(backend)).lease(LEASE).build().unwrap()
}

/// The runtime of the registry that opened a session owns its connection. The connection ends with
/// that runtime.
async fn the_end_of_a_runtime_notifies_the_holders_of_its_connection(
    kind: ServerKind,
    mode: LockMode,
) {
    let server = kind.start().await;
    let shared = backend_with_mode(&server.url(), mode).await;
    let (begun, has_begun) = oneshot::channel();
    let (end, ends) = oneshot::channel();
    let there = Arc::clone(&shared);
    let first = tokio::spawn(run_in_own_runtime(|| async move {
        let registry = registry_over(&there);
        let guard = lock(&registry, KEY).await;
        begun.send(()).unwrap();
        ends.await.unwrap();
        drop((guard, registry));
    }));
    within(TEST_TIMEOUT, has_begun).await.unwrap();
    let first_registry = registry_over(&shared);
    let guard = lock(&first_registry, "orders/43").await;
    end.send(()).unwrap();
    within(TEST_TIMEOUT, first).await.unwrap();
    within(AT_ONCE, guard.lost()).await;
    let second_registry = registry_with_mode(&server.url(), LEASE, mode).await;
    let next = lock(&second_registry, "orders/43").await;
    assert!(next.fencing_token() > guard.fencing_token());
    drop(lock(&first_registry, KEY).await);
}

async fn the_end_of_a_runtime_notifies_the_holders_of_its_session(kind: ServerKind) {
    the_end_of_a_runtime_notifies_the_holders_of_its_connection(kind, LockMode::Session).await;
}

on_both_servers! {
    a_session_lock_outlives_the_runtime_of_its_acquisition,
    a_row_lock_outlives_the_runtime_of_its_acquisition,
    the_end_of_a_runtime_notifies_the_holders_of_its_session,
}
