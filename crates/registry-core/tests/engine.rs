//! The engine over the in-process store, on paused time: what one registry promises its callers.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test may panic, and keeps its tasks itself"
)]

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    ConfigError, LockError, LockOptions, LockRegistry, LockRegistryExt, LostReason, MemoryBackend,
    Owner, Registry,
};
use tokio::time::advance;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn two_processes() -> (Registry, Registry) {
    let store = MemoryBackend::new();
    let open = || Registry::builder(Arc::new(store.clone())).build().unwrap();
    (open(), open())
}

#[tokio::test(start_paused = true)]
async fn a_lock_excludes_and_is_free_again_after_unlock() {
    let (ours, theirs) = two_processes();
    let guard = ours.obtain("k").lock().await.unwrap();
    assert!(guard.is_held());
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    assert!(ours.obtain("k").try_lock().await.unwrap().is_none());
    let token = guard.fencing_token();
    guard.unlock().await.unwrap();
    let next = theirs.obtain("k").try_lock().await.unwrap().unwrap();
    assert!(next.fencing_token() > token);
    next.unlock().await.unwrap();
    assert_eq!((ours.slots(), theirs.slots()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_held_lock_is_renewed_for_as_long_as_it_is_held() {
    let (ours, theirs) = two_processes();
    let guard = ours.obtain("k").lock().await.unwrap();
    tokio::time::sleep(secs(600)).await;
    assert!(guard.is_held());
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_renewal_the_holder_is_told_before_anybody_else_gets_the_lock() {
    let (ours, theirs) = two_processes();
    let options = LockOptions::new().renew(false).lease(secs(10));
    let guard = ours.obtain("k").lock_with(options).await.unwrap().unwrap();
    let lost = guard.lost();
    let next = tokio::spawn(async move { theirs.obtain("k").lock().await });
    assert_eq!(lost.await, LostReason::Expired);
    assert!(!guard.is_held());
    assert!(!next.is_finished());
    let next = next.await.unwrap().unwrap();
    assert!(matches!(
        guard.unlock().await,
        Err(LockError::Lost { reason: LostReason::Expired, .. })
    ));
    assert!(next.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_frees_the_key_in_the_background() {
    let (ours, theirs) = two_processes();
    drop(ours.obtain("k").lock().await.unwrap());
    ours.idle().await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn an_owner_enters_again_and_others_wait_for_the_last_guard() {
    let (ours, theirs) = two_processes();
    let owner = Owner::new();
    let options = LockOptions::new().owner(&owner);
    let lock = ours.obtain("k");
    let outer = lock.lock_with(options.clone()).await.unwrap().unwrap();
    let inner = lock.lock_with(options).await.unwrap().unwrap();
    assert_eq!(outer.fencing_token(), inner.fencing_token());
    outer.unlock().await.unwrap();
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    inner.unlock().await.unwrap();
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn local_callers_pass_the_claim_on_with_growing_tokens() {
    let (ours, theirs) = two_processes();
    let first = ours.obtain("k").lock().await.unwrap();
    let mut token = first.fencing_token();
    let lock = ours.obtain("k");
    let mut waiters = tokio::task::JoinSet::new();
    for n in 0..10 {
        let lock = lock.clone();
        waiters.spawn(async move { (n, lock.lock().await.unwrap()) });
        tokio::task::yield_now().await;
    }
    first.unlock().await.unwrap();
    let mut order = Vec::new();
    while let Some(next) = waiters.join_next().await {
        let (n, guard) = next.unwrap();
        assert!(guard.fencing_token() > token && guard.is_held());
        token = guard.fencing_token();
        order.push(n);
        guard.unlock().await.unwrap();
    }
    assert_eq!(order, (0..10).collect::<Vec<_>>());
    drop(lock);
    let after = theirs.obtain("k").try_lock().await.unwrap().unwrap();
    assert!(after.fencing_token() > token);
    assert_eq!(ours.slots(), 0);
}

#[tokio::test(start_paused = true)]
async fn close_tells_the_holders_before_their_keys_are_free() {
    let (ours, theirs) = two_processes();
    let guard = ours.obtain("k").lock().await.unwrap();
    let waiter = tokio::spawn({
        let lock = ours.obtain("k");
        async move { lock.lock().await }
    });
    tokio::task::yield_now().await;
    let report = ours.close(secs(1)).await;
    assert_eq!((report.lost, report.abandoned), (1, 0));
    assert!(matches!(waiter.await.unwrap(), Err(LockError::Closed)));
    assert_eq!(guard.lost().await, LostReason::Closed);
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
    assert!(matches!(ours.obtain("x").lock().await, Err(LockError::Closed)));
    assert_eq!(ours.close(secs(1)).await.lost, 1);
}

#[tokio::test(start_paused = true)]
async fn the_work_is_stopped_when_its_lock_is_lost() {
    let (ours, theirs) = two_processes();
    let guard = ours.obtain("k").lock().await.unwrap();
    assert!(theirs.force_release("k").await.unwrap());
    let outcome = guard.protect(std::future::pending::<()>()).await;
    assert!(matches!(outcome, Err(LockError::Lost { reason: LostReason::Gone, .. })));
}

#[tokio::test(start_paused = true)]
async fn execute_locked_can_be_spawned_and_tells_both_results() {
    let (ours, _) = two_processes();
    let registry: Arc<dyn LockRegistry> = Arc::new(ours);
    let done = tokio::spawn(async move {
        registry.execute_locked("k", async |guard| guard.fencing_token()).await
    });
    let done = done.await.unwrap().unwrap();
    assert!(done.output.is_some() && done.unlocked.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_lock_kept_for_its_min_hold_is_free_after_it() {
    let (ours, theirs) = two_processes();
    let options = LockOptions::new().min_hold(secs(60));
    ours.obtain("k").lock_with(options).await.unwrap().unwrap().unlock().await.unwrap();
    advance(secs(58)).await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_none());
    tokio::time::sleep(secs(3)).await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn max_hold_ends_the_hold_and_frees_the_key() {
    let (ours, theirs) = two_processes();
    let options = LockOptions::new().max_hold(secs(100));
    let guard = ours.obtain("k").lock_with(options).await.unwrap().unwrap();
    tokio::time::sleep(secs(99)).await;
    assert!(guard.is_held());
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    ours.idle().await;
    assert!(theirs.obtain("k").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn options_out_of_range_are_refused_before_any_io() {
    let (ours, _) = two_processes();
    let lock = ours.obtain("k");
    for options in [
        LockOptions::new().lease(Duration::ZERO),
        LockOptions::new().lease(Duration::from_millis(1)),
        LockOptions::new().lease(secs(100 * 365 * 86_400)),
        LockOptions::new().wait(secs(100 * 365 * 86_400)),
        LockOptions::new().min_hold(secs(10)).max_hold(secs(5)),
        LockOptions::new().label("x".repeat(2_000)),
    ] {
        let refused = lock.lock_with(options).await;
        assert!(matches!(refused, Err(LockError::InvalidOption(_))), "{refused:?}");
    }
    for key in ["", &"k".repeat(4_097)] {
        assert!(matches!(ours.obtain(key).lock().await, Err(LockError::InvalidKey(_))));
    }
}

#[test]
fn a_runtime_without_time_is_refused_when_the_registry_is_built() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let refused = runtime.block_on(async { Registry::in_memory() });
    assert!(matches!(refused, Err(ConfigError::NoRuntime)), "{refused:?}");
    assert!(matches!(Registry::check_runtime(), Err(ConfigError::NoRuntime)));
}
