//! `close` promises that everything was given back when its report is clean, and that nobody holds anything afterwards.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{LockBackend, LockRegistry, MemoryBackend, Registry};
use tokio::time::advance;

/// An `unlock` in mid-flight is neither held any more nor the janitor's yet. `close` must not close the store under it.
#[tokio::test(start_paused = true)]
async fn close_waits_for_an_unlock_on_its_way() {
    let store = MemoryBackend::new();
    let slow = Faults::none()
        .always(Operation::Release, Fault::DelayRequest(Duration::from_millis(500)));
    let faulty: Arc<dyn LockBackend> =
        Arc::new(FaultyBackend::new(Arc::new(store.clone()), slow));
    let ours = Registry::builder(faulty).build().unwrap();
    let theirs = Registry::builder(Arc::new(store)).build().unwrap();
    let guard = ours.obtain("k").lock().await.unwrap();
    let unlocking = tokio::spawn(guard.unlock());
    tokio::task::yield_now().await;
    let report = ours.close(Duration::from_secs(60)).await;
    assert!(report.is_clean(), "{report:?}");
    let next = theirs.obtain("k").try_lock().await.unwrap();
    assert!(next.is_some(), "closed with a clean report, and the key is still taken");
    unlocking.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_caller_who_comes_during_the_close_gets_nothing() {
    let store = MemoryBackend::new();
    let slow =
        Faults::none().always(Operation::Acquire, Fault::DelayReply(Duration::from_millis(500)));
    let faulty: Arc<dyn LockBackend> =
        Arc::new(FaultyBackend::new(Arc::new(store.clone()), slow));
    let ours = Registry::builder(faulty).build().unwrap();
    let locking = tokio::spawn({
        let lock = ours.obtain("k");
        async move { lock.lock().await }
    });
    tokio::task::yield_now().await;
    let report = ours.close(Duration::from_secs(60)).await;
    assert!(report.is_clean(), "{report:?}");
    assert!(locking.await.unwrap().is_err());
    assert_eq!(store.records(), 0);
    advance(Duration::from_secs(60)).await;
    assert_eq!((ours.slots(), ours.held()), (0, 0));
}
