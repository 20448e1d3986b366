//! Loss notification. A loss is reported however late a caller checks, and a released lock is never
//! lost. A watcher that never resolves holds no resources.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockError, LockOptions, LockRegistry, LostReason, MemoryBackend, Registry};

/// `lost` never resolves after a release, so a task that awaits it never ends. The task must not
/// keep the local lock, and with it the whole engine, alive.
#[tokio::test(start_paused = true)]
async fn a_watcher_of_a_lock_that_was_let_go_keeps_no_slot() {
    let registry = Registry::builder(Arc::new(MemoryBackend::new())).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    let watcher = tokio::spawn(guard.lost());
    tokio::task::yield_now().await;
    guard.unlock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!watcher.is_finished(), "nothing was lost");
    assert_eq!(registry.slots(), 0);
}

/// The same for a watcher that starts after the release.
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

/// A supervisor may be busy while its worker's lock is lost and the worker's guard is dropped.
#[tokio::test(start_paused = true)]
async fn a_loss_is_told_to_whoever_looks_after_the_guard_is_gone() {
    let registry = Registry::in_memory().unwrap();
    let options = || LockOptions::new().renew(false).lease(Duration::from_secs(1));
    for unlock in [false, true] {
        let guard = registry.obtain("k").lock_with(options()).await.unwrap().unwrap();
        let lost = guard.lost();
        tokio::time::sleep(Duration::from_secs(2)).await;
        if unlock {
            assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
        } else {
            drop(guard);
        }
        let told = tokio::time::timeout(Duration::from_secs(60), lost).await;
        assert_eq!(told, Ok(LostReason::Expired), "unlocked: {unlock}");
    }
}

/// The claim continues under the next local caller. A later loss is not the first holder's loss.
#[tokio::test(start_paused = true)]
async fn a_loss_after_a_hand_over_is_not_told_to_the_first_holder() {
    let store = MemoryBackend::new();
    let registry = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let operator = Registry::builder(Arc::new(store)).build().unwrap();
    let first = registry.obtain("k").lock().await.unwrap();
    let (lost, early) = (first.lost(), tokio::spawn(first.lost()));
    let second = tokio::spawn({
        let lock = registry.obtain("k");
        async move { lock.lock().await.unwrap() }
    });
    tokio::task::yield_now().await;
    let token = first.fencing_token().unwrap();
    first.unlock().await.unwrap();
    let second = second.await.unwrap();
    assert_eq!(second.fencing_token(), token.checked_add(1), "the claim was handed over");
    assert!(operator.force_release("k").await.unwrap());
    assert_eq!(second.lost().await, LostReason::Gone);
    let told = tokio::time::timeout(Duration::from_secs(60), lost).await;
    assert!(told.is_err() && !early.is_finished(), "the first holder let go in time");
}
