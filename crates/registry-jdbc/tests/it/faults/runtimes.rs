//! A caller acquires a session lock or a row lock, and then its runtime ends. The lock belongs to
//! the guard and outlives that runtime. If the runtime owns the connection, the holders are
//! notified.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, LockGuard, Registry};
use registry_testkit::within;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use super::server::{LockMode, ServerKind, TEST_TIMEOUT, backend_with_mode, registry_with_mode};

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
    let finished = tokio::task::spawn_blocking(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work())
    });
    within(TEST_TIMEOUT, finished).await.unwrap()
}

async fn lock(registry: &Registry, key: &str) -> LockGuard {
    within(TEST_TIMEOUT, registry.obtain(key).lock()).await.unwrap()
}

async fn a_lock_outlives_the_runtime_of_its_acquisition(kind: ServerKind, mode: LockMode) {
    let server = kind.start().await;
    let second_registry = registry_with_mode(&server.url(), LEASE, mode).await;
    let first_registry = registry_with_mode(&server.url(), LEASE, mode).await;
    let moved_registry = first_registry.clone();
    let guard = run_in_own_runtime(|| async move { lock(&moved_registry, KEY).await }).await;
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

/// The runtime in which a session was opened owns its connection, so the connection ends with that
/// runtime. Holders in other runtimes are notified.
async fn the_end_of_a_runtime_notifies_the_holders_of_its_connection(
    kind: ServerKind,
    mode: LockMode,
) {
    let server = kind.start().await;
    let shared_backend = backend_with_mode(&server.url(), mode).await;
    let (locked_sender, locked) = oneshot::channel();
    let (end_sender, end) = oneshot::channel();
    let moved_backend = Arc::clone(&shared_backend);
    let first = tokio::spawn(run_in_own_runtime(|| async move {
        let registry = registry_over(&moved_backend);
        let guard = lock(&registry, KEY).await;
        locked_sender.send(()).unwrap();
        end.await.unwrap();
        drop((guard, registry));
    }));
    within(TEST_TIMEOUT, locked).await.unwrap();
    let first_registry = registry_over(&shared_backend);
    let guard = lock(&first_registry, "orders/43").await;
    end_sender.send(()).unwrap();
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
