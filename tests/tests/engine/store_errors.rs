//! A store error is returned as an error, never as "busy". This includes callers queued behind
//! another local caller.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{LockGuard, MemoryBackend, Registry};
use tokio::task::{JoinHandle, yield_now};

/// Longer than any caller waits for a reply.
const UNANSWERED: Fault = Fault::DelayRequest(Duration::from_secs(100_000));
const SECOND: Duration = Duration::from_secs(1);

/// Opens a registry over `store`, behind these faults.
fn faulty(store: &MemoryBackend, faults: Faults) -> Registry {
    let backend = FaultyBackend::new(Arc::new(store.clone()), faults);
    Registry::builder(Arc::new(backend)).build().unwrap()
}

/// Spawns a caller that acquires the lock and is first in the local queue.
async fn spawn_first_caller(registry: &Registry) -> JoinHandle<Option<LockGuard>> {
    let lock = registry.obtain("k");
    let caller = tokio::spawn(async move { lock.lock().await.ok() });
    yield_now().await;
    caller
}

#[tokio::test(start_paused = true)]
async fn an_error_names_operation_key_and_address() {
    let silent = Faults::none().always(Operation::Acquire, UNANSWERED);
    let backend = FaultyBackend::new(Arc::new(MemoryBackend::new()), silent);
    let registry = Registry::builder(Arc::new(backend)).address("db.example:5432").build().unwrap();
    let error = registry.obtain("orders/42").try_lock().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "acquire on \"orders/42\" at db.example:5432 failed: the memory store did not answer within 3s; check its load and the network"
    );
}

#[tokio::test(start_paused = true)]
async fn a_caller_behind_a_failing_caller_returns_its_error() {
    for fault in [UNANSWERED, Fault::Refuse, Fault::LoseRequest] {
        let local = faulty(&MemoryBackend::new(), Faults::none().always(Operation::Acquire, fault));
        let first_caller = spawn_first_caller(&local).await;
        let error = local.obtain("k").try_lock_for(5 * SECOND).await.unwrap_err();
        assert!(error.is_retryable(), "{fault:?}: {error}");
        let error = local.obtain("k").try_lock().await.unwrap_err();
        assert!(error.is_retryable(), "{fault:?}: {error}");
        first_caller.abort();
    }
}

/// At 6 s, the permit passes to the second caller, whose first request has no response until 9 s.
#[tokio::test(start_paused = true)]
async fn a_caller_behind_a_second_unanswered_attempt_returns_an_error() {
    let silent = Faults::none().always(Operation::Acquire, UNANSWERED);
    let local = faulty(&MemoryBackend::new(), silent);
    local.obtain("k").try_lock().await.unwrap_err();
    let second_caller = spawn_first_caller(&local).await;
    tokio::time::sleep(3 * SECOND + SECOND / 2).await;
    for wait in [Duration::ZERO, SECOND] {
        let error = local.obtain("k").try_lock_for(wait).await.unwrap_err();
        assert!(error.is_retryable(), "{wait:?}: {error}");
    }
    second_caller.abort();
}

/// Until its lease is over, the engine tries to release the unanswered attempt. Meanwhile, no other
/// local caller competes.
#[tokio::test(start_paused = true)]
async fn a_caller_during_the_release_of_an_unanswered_attempt_returns_its_error() {
    let silent = Faults::none()
        .always(Operation::Acquire, UNANSWERED)
        .always(Operation::Release, UNANSWERED);
    let local = faulty(&MemoryBackend::new(), silent);
    for wait in [0, 0, 1, 2, 5, 10] {
        let error = local.obtain("k").try_lock_for(wait * SECOND).await.unwrap_err();
        assert!(error.is_retryable(), "{wait} s: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_behind_a_refused_release_returns_its_error() {
    let refuses = Faults::none().always(Operation::Release, Fault::Refuse);
    let backend = Arc::new(FaultyBackend::new(Arc::new(MemoryBackend::new()), refuses));
    // With hand-over, the lock would pass to the next caller without the store.
    let local = Registry::builder(backend).handoff(0).build().unwrap();
    drop(local.obtain("k").lock().await.unwrap());
    let error = local.obtain("k").try_lock_for(SECOND).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
}

/// The store keeps the key for the first of the two extensions, because it never shortens a lease.
#[tokio::test(start_paused = true)]
async fn a_failed_release_is_repeated_for_the_longest_lease_that_was_requested() {
    let store = MemoryBackend::new();
    let backend = Arc::new(FaultyBackend::new(Arc::new(store.clone()), Faults::none()));
    let local = Registry::builder(Arc::clone(&backend) as _).build().unwrap();
    let guard = local.obtain("k").lock().await.unwrap();
    guard.extend(3_600 * SECOND).await.unwrap();
    guard.extend(30 * SECOND).await.unwrap();
    backend.apply(Faults::none().always(Operation::Release, Fault::Refuse));
    drop(guard);
    tokio::time::sleep(120 * SECOND).await;
    backend.clear_faults();
    let remote = Registry::builder(Arc::new(store)).build().unwrap();
    assert!(remote.obtain("k").try_lock_for(120 * SECOND).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_past_store_error_is_not_returned() {
    let store = MemoryBackend::new();
    let remote = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let held = remote.obtain("k").lock().await.unwrap();
    let local = faulty(&store, Faults::none().at_call(Operation::Acquire, 1, Fault::Refuse));
    let first_caller = spawn_first_caller(&local).await;
    // The second attempt receives a reply: the other process holds the lock.
    assert!(local.obtain("k").try_lock_for(5 * SECOND).await.unwrap().is_none());
    held.unlock().await.unwrap();
    let guard = first_caller.await.unwrap().unwrap();
    assert!(local.obtain("k").try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
    local.obtain("k").try_lock().await.unwrap().unwrap().unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lock_held_in_this_process_is_busy_after_a_failed_attempt_of_a_reader() {
    let faults = Faults::none().at_call(Operation::Acquire, 2, Fault::Refuse);
    let local = faulty(&MemoryBackend::new(), faults);
    let guard = local.obtain("k").lock().await.unwrap();
    local.obtain("k").try_read().await.unwrap_err();
    assert!(local.obtain("k").try_lock().await.unwrap().is_none());
    assert!(local.obtain("k").try_lock_for(SECOND).await.unwrap().is_none());
    guard.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lock_held_in_this_process_is_busy_even_if_its_renewals_fail() {
    let local =
        faulty(&MemoryBackend::new(), Faults::none().always(Operation::Renew, Fault::Refuse));
    let guard = local.obtain("k").lock().await.unwrap();
    assert!(local.obtain("k").try_lock_for(15 * SECOND).await.unwrap().is_none());
    assert!(guard.is_held());
}
