//! `close` waits for guards, notifies the remaining holders, releases their locks, and ends in
//! bounded time.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join;
use futures_util::poll;
use registry_core::{LockError, LockOptions, LockRegistryExt as _, LostReason};
use tokio::time::{sleep, timeout};

use crate::context::{TestContext, unlock};
use crate::faulty::{Fault, Faults, Operation};

/// `close` waits for guards until its time limit. A lock that is unlocked in this time counts as
/// released, and its key is free.
pub async fn close_waits_for_guards_to_be_released(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = local.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let (report, unlocked) = join(local.close(context.max_wait()), async {
        sleep(Duration::from_millis(50)).await;
        assert!(guard.is_held(), "close released a lock before its limit");
        guard.unlock().await
    })
    .await;
    unlocked.expect("a held lock is unlocked");
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.released, 1, "{report:?}");
    let next = remote.obtain("orders:42").try_lock().await.expect("the store answers");
    unlock(next.expect("the registry is closed")).await;
}

/// At its time limit, `close` releases the locks whose guards still exist. These guards are lost
/// with `LostReason::Closed`, and their keys are free.
pub async fn close_releases_the_remaining_locks_at_its_limit(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let mut guards = Vec::new();
    for n in 0..3 {
        guards.push(
            local.obtain(&format!("orders:n{n}")).lock().await.expect("a free lock is acquired"),
        );
    }
    let report = local.close(Duration::from_millis(50)).await;
    assert_eq!((report.lost, report.abandoned), (3, 0), "{report:?}");
    for (n, guard) in guards.into_iter().enumerate() {
        assert!(!guard.is_held());
        assert_eq!(guard.lost().await, LostReason::Closed);
        let next =
            remote.obtain(&format!("orders:n{n}")).try_lock().await.expect("the store answers");
        unlock(next.expect("the registry is closed")).await;
        assert!(matches!(
            guard.unlock().await,
            Err(LockError::Lost { reason: LostReason::Closed, .. })
        ));
    }
}

/// `close` waits for the releases of guards that were dropped before the call. Their keys are free
/// when it returns.
pub async fn close_releases_the_locks_of_dropped_guards(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    for n in 0..10 {
        drop(local.obtain(&format!("orders:n{n}")).lock().await.expect("a free lock is acquired"));
    }
    let report = local.close(context.max_wait()).await;
    assert!(report.is_clean(), "{report:?}");
    for n in 0..10 {
        let next =
            remote.obtain(&format!("orders:n{n}")).try_lock().await.expect("the store answers");
        unlock(next.expect("the registry is closed")).await;
    }
}

/// After `close`, all calls that acquire a lock return `LockError::Closed`.
pub async fn a_closed_registry_returns_closed(context: &TestContext) {
    let registry = context.registry().await;
    let before = registry.obtain("orders:42");
    let report = registry.close(context.max_wait()).await;
    assert!(report.is_clean() && report.released == 0, "{report:?}");
    for lock in [before, registry.obtain("orders:43")] {
        assert!(matches!(lock.lock().await, Err(LockError::Closed)));
        assert!(matches!(lock.try_lock().await, Err(LockError::Closed)));
        assert!(matches!(lock.try_lock_for(context.short_lease()).await, Err(LockError::Closed)));
        assert!(matches!(lock.try_lock_with(LockOptions::new()).await, Err(LockError::Closed)));
    }
    let executed = registry.execute_locked("orders:42", async |_| ()).await;
    assert!(matches!(executed, Err(LockError::Closed)));
}

/// `close` ends waits at once with `LockError::Closed`, whether this process or another one holds
/// the lock.
pub async fn close_ends_waits_with_closed(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let remote_guard = remote.obtain("orders:1").lock().await.expect("a free lock is acquired");
    let local_guard = local.obtain("orders:2").lock().await.expect("a free lock is acquired");
    let (for_remote, for_local) = (local.obtain("orders:1"), local.obtain("orders:2"));
    let (mut first, mut second) = (pin!(for_remote.lock()), pin!(for_local.lock()));
    // Long enough for the first waiter to receive a busy answer and to wait for the store.
    assert!(
        timeout(Duration::from_millis(100), first.as_mut()).await.is_err(),
        "two guards of one key"
    );
    assert!(poll!(second.as_mut()).is_pending(), "two guards of one key");
    let closing = local.close(context.max_wait());
    let waiters = async {
        let (first, second) = join(first, second).await;
        assert!(matches!(first, Err(LockError::Closed)), "{first:?}");
        assert!(matches!(second, Err(LockError::Closed)), "{second:?}");
        local_guard.unlock().await
    };
    let (report, unlocked) = join(closing, timeout(context.max_wait(), waiters)).await;
    unlocked.expect("waiting calls return `Closed`").expect("a held lock is unlocked");
    assert!(report.is_clean(), "{report:?}");
    remote_guard.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&remote, "orders:1").await;
}

/// Two concurrent calls of `close` and a later one all return a clean report.
pub async fn closing_twice_returns_clean_reports(context: &TestContext) {
    let registry = context.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    guard.unlock().await.expect("a held lock is unlocked");
    let other = registry.clone();
    let (first, second) =
        join(registry.close(context.max_wait()), other.close(context.max_wait())).await;
    assert!(first.is_clean() && second.is_clean(), "{first:?} {second:?}");
    assert!(registry.close(Duration::ZERO).await.is_clean());
}

/// A `close` future that is not polled any more does not block another call of `close`, however
/// many times it was polled before.
pub async fn an_unpolled_close_does_not_block_another_close(context: &TestContext) {
    for polls in 1..=POLLS_MAX {
        let registry = context.registry().await;
        let mut unpolled = pin!(registry.close(Duration::ZERO));
        let mut is_done = false;
        for _ in 0..polls {
            is_done = poll!(unpolled.as_mut()).is_ready();
            if is_done {
                break;
            }
            sleep(Duration::from_millis(2)).await;
        }
        if is_done {
            return;
        }
        let other = timeout(context.max_wait(), registry.close(Duration::ZERO)).await;
        assert!(other.expect("the other call closes the registry").is_clean());
        _ = unpolled.await;
    }
    panic!("close is not complete after {POLLS_MAX} polls");
}

/// `close` ends in bounded time if the store does not answer, and its report counts the abandoned
/// locks. The abandoned locks end with their leases.
pub async fn close_ends_in_bounded_time_if_the_store_does_not_answer(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    drop(registry.obtain("orders:1").lock().await.expect("a free lock is acquired"));
    registry.idle().await;
    let held_guard = registry.obtain("orders:2").lock().await.expect("a free lock is acquired");
    let dropped = registry.obtain("orders:3").lock().await.expect("a free lock is acquired");
    let hang = Fault::DelayRequest(Duration::from_secs(7_200));
    faulty.apply(Faults::none().always(Operation::Release, hang).always(Operation::Renew, hang));
    drop(dropped);
    let closing = registry.close(Duration::from_millis(200));
    let report = timeout(context.max_wait(), closing).await.expect("close ends in time");
    assert!(!report.is_clean() && report.abandoned >= 1, "{report:?}");
    assert!(!held_guard.is_held());
    // The keys become free when their leases end.
    let other = context.registry().await;
    context.assert_becomes_free(&other, "orders:2").await;
    context.assert_becomes_free(&other, "orders:3").await;
}

/// Closing one registry does not affect another process, whose lock stays held and renewed.
pub async fn closing_one_registry_does_not_affect_another(context: &TestContext) {
    let (local, remote) =
        (context.registry().await, context.registry_with_lease(context.renewable_lease()).await);
    let local_guard = local.obtain("orders:1").lock().await.expect("a free lock is acquired");
    let remote_guard = remote.obtain("orders:2").lock().await.expect("a free lock is acquired");
    _ = local.close(Duration::ZERO).await;
    assert!(!local_guard.is_held());
    sleep(context.renewable_lease() * 2).await;
    assert!(remote_guard.is_held(), "the other process lost its lock");
    remote_guard.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&remote, "orders:1").await;
}

const POLLS_MAX: usize = 1_000;
