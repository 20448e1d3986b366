//! Callers that lock through a connection and end together with their runtime. Their lock belongs
//! to the guard and outlives them.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, LockGuard, LockRegistry, Registry};
use registry_testkit::within;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use crate::server::{Kind, LONG, Mode, backend_in, registry_in};

const KEY: &str = "orders/42";
const LEASE: Duration = Duration::from_secs(60);
/// Well before the next renewal.
const AT_ONCE: Duration = Duration::from_secs(8);

/// Runs `work` in its own runtime, which then ends.
async fn elsewhere<T, F>(work: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let there = tokio::task::spawn_blocking(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work())
    });
    within(LONG, there).await.unwrap()
}

async fn lock(registry: &Registry, key: &str) -> LockGuard {
    within(LONG, registry.obtain(key).lock()).await.unwrap()
}

async fn a_lock_outlives_the_runtime_it_was_taken_in(kind: Kind, mode: Mode) {
    let server = kind.start().await;
    let theirs = registry_in(&server.url(), LEASE, mode).await;
    let ours = registry_in(&server.url(), LEASE, mode).await;
    let there = ours.clone();
    let guard = elsewhere(|| async move { lock(&there, KEY).await }).await;
    let other = lock(&ours, "orders/43").await;
    // A locked row may be reported as busy or as a retryable error.
    assert!(!matches!(theirs.obtain(KEY).try_lock().await, Ok(Some(_))));
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
    other.unlock().await.unwrap();
    lock(&theirs, KEY).await.unlock().await.unwrap();
}

async fn a_lock_of_a_session_outlives_the_runtime_it_was_taken_in(kind: Kind) {
    a_lock_outlives_the_runtime_it_was_taken_in(kind, Mode::Session).await;
}

async fn a_locked_row_outlives_the_runtime_it_was_locked_in(kind: Kind) {
    a_lock_outlives_the_runtime_it_was_taken_in(kind, Mode::Row).await;
}

fn registry_over(backend: &Arc<dyn LockBackend>) -> Registry {
    Registry::builder(Arc::clone(backend)).lease(LEASE).build().unwrap()
}

/// The runtime of the registry that opened a session owns its connection. The connection ends with
/// that runtime.
async fn holders_are_told_at_once_that_a_runtime_took_their_connection_along(
    kind: Kind,
    mode: Mode,
) {
    let server = kind.start().await;
    let shared = backend_in(&server.url(), mode).await;
    let (begun, has_begun) = oneshot::channel();
    let (end, ends) = oneshot::channel();
    let there = Arc::clone(&shared);
    let first = tokio::spawn(elsewhere(|| async move {
        let registry = registry_over(&there);
        let guard = lock(&registry, KEY).await;
        begun.send(()).unwrap();
        ends.await.unwrap();
        drop((guard, registry));
    }));
    within(LONG, has_begun).await.unwrap();
    let ours = registry_over(&shared);
    let guard = lock(&ours, "orders/43").await;
    end.send(()).unwrap();
    within(LONG, first).await.unwrap();
    within(AT_ONCE, guard.lost()).await;
    let theirs = registry_in(&server.url(), LEASE, mode).await;
    let next = lock(&theirs, "orders/43").await;
    assert!(next.fencing_token() > guard.fencing_token());
    drop(lock(&ours, KEY).await);
}

async fn holders_by_a_session_are_told_at_once_that_a_runtime_took_it_along(kind: Kind) {
    holders_are_told_at_once_that_a_runtime_took_their_connection_along(kind, Mode::Session).await;
}

on_both_servers! {
    a_lock_of_a_session_outlives_the_runtime_it_was_taken_in,
    a_locked_row_outlives_the_runtime_it_was_locked_in,
    holders_by_a_session_are_told_at_once_that_a_runtime_took_it_along,
}
