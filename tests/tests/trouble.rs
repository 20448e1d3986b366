//! A store error is returned as an error, never as "busy". This includes callers queued behind
//! another local caller.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{LockGuard, LockRegistry as _, MemoryBackend, Registry};
use tokio::task::{JoinHandle, yield_now};

/// Longer than any caller waits for a reply.
const SILENT: Fault = Fault::DelayRequest(Duration::from_secs(100_000));
const SECOND: Duration = Duration::from_secs(1);

/// A registry over `store` with these faults in between.
fn faulty(store: &MemoryBackend, faults: Faults) -> Registry {
    let backend = FaultyBackend::new(Arc::new(store.clone()), faults);
    Registry::builder(Arc::new(backend)).build().unwrap()
}

/// Spawns a caller that acquires the lock and is first in the local queue.
async fn after(registry: &Registry) -> JoinHandle<Option<LockGuard>> {
    let lock = registry.obtain("k");
    let caller = tokio::spawn(async move { lock.lock().await.ok() });
    yield_now().await;
    caller
}

#[tokio::test(start_paused = true)]
async fn who_waits_behind_a_caller_in_trouble_is_told_of_it() {
    for fault in [SILENT, Fault::Refuse, Fault::LoseRequest] {
        let ours = faulty(&MemoryBackend::new(), Faults::none().always(Operation::Acquire, fault));
        let front = after(&ours).await;
        let error = ours.obtain("k").try_lock_for(5 * SECOND).await.unwrap_err();
        assert!(error.is_retryable(), "{fault:?}: {error}");
        let error = ours.obtain("k").try_lock().await.unwrap_err();
        assert!(error.is_retryable(), "{fault:?}: {error}");
        front.abort();
    }
}

/// For as long as its lease, the engine tries to complete and release the attempt. Meanwhile no
/// other local caller competes.
#[tokio::test(start_paused = true)]
async fn who_comes_while_an_unanswered_attempt_is_given_back_is_told_of_the_trouble() {
    let silent =
        Faults::none().always(Operation::Acquire, SILENT).always(Operation::Release, SILENT);
    let ours = faulty(&MemoryBackend::new(), silent);
    for wait in [0, 0, 1, 2, 5, 10] {
        let error = ours.obtain("k").try_lock_for(wait * SECOND).await.unwrap_err();
        assert!(error.is_retryable(), "{wait} s: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_behind_a_release_that_is_not_answered_is_told_of_the_trouble() {
    let refuses = Faults::none().always(Operation::Release, Fault::Refuse);
    let backend = Arc::new(FaultyBackend::new(Arc::new(MemoryBackend::new()), refuses));
    // With hand-over, the lock would pass to the next caller without the store.
    let ours = Registry::builder(backend).handoff(0).build().unwrap();
    drop(ours.obtain("k").lock().await.unwrap());
    let error = ours.obtain("k").try_lock_for(SECOND).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
}

#[tokio::test(start_paused = true)]
async fn trouble_that_is_over_is_forgotten() {
    let store = MemoryBackend::new();
    let theirs = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let held = theirs.obtain("k").lock().await.unwrap();
    let ours = faulty(&store, Faults::none().at(Operation::Acquire, 1, Fault::Refuse));
    let front = after(&ours).await;
    // The second attempt receives a reply: the other process holds the lock.
    assert!(ours.obtain("k").try_lock_for(5 * SECOND).await.unwrap().is_none());
    held.unlock().await.unwrap();
    let guard = front.await.unwrap().unwrap();
    assert!(ours.obtain("k").try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
    ours.obtain("k").try_lock().await.unwrap().unwrap().unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_a_caller_of_this_process_holds_is_busy_whatever_its_renewals_meet() {
    let ours =
        faulty(&MemoryBackend::new(), Faults::none().always(Operation::Renew, Fault::Refuse));
    let guard = ours.obtain("k").lock().await.unwrap();
    assert!(ours.obtain("k").try_lock_for(15 * SECOND).await.unwrap().is_none());
    assert!(guard.is_held());
}
