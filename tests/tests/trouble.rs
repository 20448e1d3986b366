//! A store in trouble is told as such, never as a lock that somebody has; also to those who stand in line behind the one who asks it.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{LockGuard, LockRegistry as _, MemoryBackend, Registry};
use tokio::task::{JoinHandle, yield_now};

/// Longer than anybody is ready to wait for an answer.
const SILENT: Fault = Fault::DelayRequest(Duration::from_secs(100_000));
const SECOND: Duration = Duration::from_secs(1);

/// A registry over `store` with these faults in between.
fn faulty(store: &MemoryBackend, faults: Faults) -> Registry {
    let backend = FaultyBackend::new(Arc::new(store.clone()), faults);
    Registry::builder(Arc::new(backend)).build().unwrap()
}

/// Somebody who is after the lock, and in front.
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

/// The attempt is carried through and given back for as long as its lease, and nobody else contends meanwhile.
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
    // Otherwise the lock would be handed over without the store.
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
    // The second attempt is answered: they have it.
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
