//! Somebody who watches for the loss of a lock that was let go waits for nothing. That must cost nothing either.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockRegistry, MemoryBackend, Registry};

/// `lost` never resolves once the lock was let go, so a task that awaits it is there for ever. It must not keep the slot, and
/// with it the whole engine, alive.
#[tokio::test(start_paused = true)]
async fn a_watcher_of_a_lock_that_was_let_go_keeps_no_slot() {
    let registry = Registry::builder(Arc::new(MemoryBackend::new())).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    let watcher = tokio::spawn(guard.lost());
    tokio::task::yield_now().await;
    guard.unlock().await.unwrap();
    // The watcher looks again when the lease would have ended.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!watcher.is_finished(), "nothing was lost");
    assert_eq!(registry.slots(), 0);
}

/// The same for work that watches while it goes on.
#[tokio::test(start_paused = true)]
async fn a_watcher_that_begins_after_the_end_keeps_no_slot() {
    let registry = Registry::builder(Arc::new(MemoryBackend::new())).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    let lost = guard.lost();
    guard.unlock().await.unwrap();
    let watcher = tokio::spawn(lost);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!watcher.is_finished(), "nothing was lost");
    assert_eq!(registry.slots(), 0);
}
