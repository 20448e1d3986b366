//! Loss notification over the in-process store. A loss is reported however late a caller checks,
//! and a released lock is never lost. A future of `lost` that never resolves holds no resources.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use registry_core::{LockError, LockOptions, LostReason, MemoryBackend, Registry};

/// `lost` never resolves after a release, so a task that awaits it never ends. The task must not
/// keep the local lock, and with it the whole engine, alive.
#[tokio::test(start_paused = true)]
async fn a_loss_future_of_a_released_lock_keeps_no_local_lock() {
    let registry = Registry::builder(Arc::new(MemoryBackend::new())).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    let loss_task = tokio::spawn(guard.lost());
    tokio::task::yield_now().await;
    guard.unlock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!loss_task.is_finished(), "nothing was lost");
    assert_eq!(registry.local_locks(), 0);
}

/// The same for a future that is polled only after the release.
#[tokio::test(start_paused = true)]
async fn a_loss_future_polled_after_the_release_keeps_no_local_lock() {
    let registry = Registry::builder(Arc::new(MemoryBackend::new())).build().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    let lost = guard.lost();
    guard.unlock().await.unwrap();
    let loss_task = tokio::spawn(lost);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!loss_task.is_finished(), "nothing was lost");
    assert_eq!(registry.local_locks(), 0);
}

/// A supervisor may be busy while its worker's lock is lost and the worker's guard is dropped.
#[tokio::test(start_paused = true)]
async fn a_loss_is_reported_after_the_guard_is_dropped() {
    let registry = Registry::in_memory().unwrap();
    let options = || LockOptions::new().auto_renew(false).lease(Duration::from_secs(1));
    for unlock in [false, true] {
        let guard = registry.obtain("k").lock_with(options()).await.unwrap();
        let lost = guard.lost();
        tokio::time::sleep(Duration::from_secs(2)).await;
        if unlock {
            assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
        } else {
            drop(guard);
        }
        let result = tokio::time::timeout(Duration::from_secs(60), lost).await;
        assert_eq!(result, Ok(LostReason::Expired), "unlocked: {unlock}");
    }
}

/// The claim continues under the next local caller. A later loss is not the first holder's loss.
#[tokio::test(start_paused = true)]
async fn a_loss_after_a_hand_over_is_not_reported_to_the_first_holder() {
    let store = MemoryBackend::new();
    let registry = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let operator = Registry::builder(Arc::new(store)).build().unwrap();
    let first = registry.obtain("k").lock().await.unwrap();
    let (lost, pending_loss) = (first.lost(), tokio::spawn(first.lost()));
    let second = tokio::spawn({
        let lock = registry.obtain("k");
        async move { lock.lock().await.unwrap() }
    });
    tokio::task::yield_now().await;
    let token = first.fencing_token();
    first.unlock().await.unwrap();
    let second = second.await.unwrap();
    assert_eq!(Some(second.fencing_token()), token.checked_add(1), "the claim was handed over");
    assert!(operator.force_release("k").await.unwrap());
    assert_eq!(second.lost().await, LostReason::Gone);
    let result = tokio::time::timeout(Duration::from_secs(60), lost).await;
    assert!(
        result.is_err() && !pending_loss.is_finished(),
        "the first holder released before the loss"
    );
}

/// A runtime may poll a task before the task's timers, for example after the process was paused.
#[tokio::test]
async fn protected_work_does_not_continue_after_a_pause_beyond_its_lease() {
    let registry = Registry::in_memory().unwrap();
    let options = LockOptions::new().auto_renew(false).lease(Duration::from_millis(200));
    let guard = Arc::new(registry.obtain("k").lock_with(options).await.unwrap());
    let protected = tokio::spawn(async move {
        let work = async {
            while guard.is_held() {
                // The runtime has one thread, so no timer fires.
                std::thread::sleep(Duration::from_millis(10));
            }
            let mut is_first = true;
            std::future::poll_fn(|cx| {
                cx.waker().wake_by_ref();
                if std::mem::take(&mut is_first) { Poll::Pending } else { Poll::Ready(()) }
            })
            .await;
        };
        guard.protect(work).await
    });
    let ended = protected.await.unwrap();
    assert!(matches!(ended, Err(LockError::Lost { .. })), "the work has continued: {ended:?}");
}
