//! Re-entry requires an explicit owner, or a guard of the lock. It sends no request and does not
//! change the lock.

use std::pin::pin;
use std::time::Duration;

use futures_util::poll;
use registry_core::{LockError, LockOptions, LostReason, Owner};
use tokio::time::{Instant, timeout};

use crate::context::{TestContext, unlock};
use crate::faulty::Faults;

/// A lock acquired without an owner is busy for all other calls, including those of the same task
/// and those with an owner.
pub async fn a_lock_without_an_owner_is_not_reentrant(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    let guard = lock.lock().await.expect("a free lock is acquired");
    assert!(lock.try_lock().await.expect("busy is no error").is_none());
    let owner = Owner::new();
    let owned = lock.try_lock_with(LockOptions::new().owner(&owner).wait(Duration::ZERO)).await;
    assert!(owned.expect("busy is no error").is_none(), "an owner entered a lock without one");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// An owner can acquire its own lock again. Another owner, and calls without an owner, return
/// `Ok(None)`.
pub async fn an_owner_can_reenter_its_lock(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    let (owner, other) = (Owner::new(), Owner::new());
    let with_owner = || LockOptions::new().owner(&owner).wait(Duration::ZERO);
    let outer = lock.lock_with(with_owner()).await.expect("the store answers");
    let inner = lock.lock_with(with_owner()).await.expect("the store answers");
    let other_owner =
        lock.try_lock_with(LockOptions::new().owner(&other).wait(Duration::ZERO)).await;
    assert!(other_owner.expect("busy is no error").is_none(), "another owner re-entered the lock");
    assert!(
        lock.try_lock().await.expect("busy is no error").is_none(),
        "a call without an owner acquired the lock"
    );
    inner.unlock().await.expect("a held lock is unlocked");
    outer.unlock().await.expect("a held lock is unlocked");
}

/// An owner cannot re-enter its lock from another process, where the lock is busy.
pub async fn an_owner_cannot_reenter_from_another_process(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let owner = Owner::new();
    let with_owner = || LockOptions::new().owner(&owner).wait(Duration::ZERO);
    let guard = local.obtain("orders:42").lock_with(with_owner()).await.expect("the store answers");
    let second =
        remote.obtain("orders:42").try_lock_with(with_owner()).await.expect("busy is no error");
    assert!(second.is_none(), "two processes hold");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// Re-entry through the owner or through a guard, and unlocking the inner guards, send no request
/// to the store.
pub async fn reentry_sends_no_request_to_the_store(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let owner = Owner::new();
    let lock = registry.obtain("orders:42");
    let outer = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("the store answers");
    let requests = faulty.requests();
    let by_owner =
        lock.lock_with(LockOptions::new().owner(&owner)).await.expect("the store answers");
    let by_guard = outer.reenter().expect("a held lock is re-entered");
    by_owner.unlock().await.expect("a held lock is unlocked");
    by_guard.unlock().await.expect("a held lock is unlocked");
    assert_eq!(faulty.requests(), requests, "a request reached the store");
    outer.unlock().await.expect("a held lock is unlocked");
}

/// All guards of a re-entered lock have the same token.
pub async fn reentered_guards_have_the_same_token(context: &TestContext) {
    let registry = context.registry().await;
    let owner = Owner::new();
    let lock = registry.obtain("orders:42");
    let outer = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("the store answers");
    let inner = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("the store answers");
    let innermost = inner.reenter().expect("a held lock is re-entered");
    assert_eq!(inner.fencing_token(), outer.fencing_token());
    assert_eq!(innermost.fencing_token(), outer.fencing_token());
}

/// Re-entry with a shorter lease and `auto_renew(false)` does not shorten the lease of the lock.
pub async fn reentry_never_shortens_the_lease(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let owner = Owner::new();
    let lock = local.obtain("orders:42");
    let outer = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("the store answers");
    let short = LockOptions::new().owner(&owner).lease(context.short_lease()).auto_renew(false);
    let inner = lock.lock_with(short).await.expect("the store answers");
    tokio::time::sleep(context.short_lease() * 2).await;
    assert!(outer.is_held() && inner.is_held(), "the inner lease shortened the outer one");
    assert!(remote.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    inner.unlock().await.expect("a held lock is unlocked");
    assert!(outer.is_held());
    outer.unlock().await.expect("a held lock is unlocked");
}

/// The `min_hold` and `max_hold` of the first guard count from the grant and apply to all guards.
/// Those of inner guards are ignored.
pub async fn hold_limits_are_those_of_the_first_guard_of_a_lock(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let (lock, remote) = (local.obtain("orders:42"), remote.obtain("orders:42"));
    let owner = Owner::new();
    let with_owner = || LockOptions::new().owner(&owner);
    let enter =
        async |options: LockOptions| lock.lock_with(options).await.expect("the store answers");

    // The inner `min_hold` is ignored.
    let outer = enter(with_owner()).await;
    let inner =
        enter(with_owner().min_hold(context.max_wait() * 2).max_hold(context.max_wait() * 2)).await;
    outer.unlock().await.expect("a held lock is unlocked");
    inner.unlock().await.expect("a held lock is unlocked");
    context.assert_becomes_free(&local, "orders:42").await;

    // The outer `min_hold` applies, whichever guard is unlocked last.
    let min_hold = context.short_lease();
    let requested_at = Instant::now();
    let outer = enter(with_owner().min_hold(min_hold)).await;
    let inner = enter(with_owner()).await;
    outer.unlock().await.expect("a held lock is unlocked");
    inner.unlock().await.expect("a held lock is unlocked");
    let next = remote.try_lock_for(context.max_wait()).await.expect("the store answers");
    let locked_for = requested_at.elapsed();
    assert!(locked_for >= min_hold, "the key was locked for {locked_for:?} of {min_hold:?}");
    unlock(next.expect("the min_hold is over")).await;

    // An inner `max_hold` neither shortens nor extends the hold.
    let max_hold = context.renewable_lease();
    let outer = enter(with_owner().max_hold(max_hold)).await;
    let longer = enter(with_owner().max_hold(max_hold * 20)).await;
    let shorter = enter(with_owner().max_hold(context.short_lease())).await;
    for guard in [outer, longer, shorter] {
        assert_eq!(guard.lost().await, LostReason::MaxHold);
        assert!(matches!(
            guard.unlock().await,
            Err(LockError::Lost { reason: LostReason::MaxHold, .. })
        ));
    }
    context.assert_becomes_free(&local, "orders:42").await;
}

/// The lock is released when its last guard is unlocked or dropped, in whatever order, and not
/// before.
pub async fn a_lock_is_released_with_its_last_guard(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let lock = local.obtain("orders:42");
    let remote = remote.obtain("orders:42");
    let outer = lock.lock().await.expect("a free lock is acquired");
    let inner = outer.reenter().expect("a held lock is re-entered");
    let innermost = inner.reenter().expect("a held lock is re-entered");
    outer.unlock().await.expect("a held lock is unlocked");
    assert!(lock.try_lock().await.expect("busy is no error").is_none());
    drop(innermost);
    local.idle().await;
    assert!(remote.try_lock().await.expect("busy is no error").is_none());
    assert!(inner.is_held());
    inner.unlock().await.expect("a held lock is unlocked");
    let next = remote.try_lock().await.expect("the store answers").expect("the last guard is gone");
    next.unlock().await.expect("a held lock is unlocked");
}

/// Lock calls in an `Owner::scope` use the owner of the scope, and a nested scope has the same
/// owner. A scope cannot re-enter a lock that was acquired outside of it.
pub async fn an_owner_scope_applies_to_nested_calls(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    Owner::scope(async {
        let outer = lock.lock().await.expect("a free lock is acquired");
        let inner = Owner::scope(async { lock.try_lock().await }).await.expect("the store answers");
        inner
            .expect("the owner of the scope re-enters")
            .unlock()
            .await
            .expect("a held lock is unlocked");
        outer.unlock().await.expect("a held lock is unlocked");
    })
    .await;
    let guard = lock.lock().await.expect("a free lock is acquired");
    let next = Owner::scope(lock.try_lock()).await.expect("busy is no error");
    assert!(next.is_none(), "a scope re-entered a lock that was acquired outside of it");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// An owner that re-enters does not queue behind waiters, because it would wait for itself.
pub async fn a_reentering_owner_does_not_queue_behind_waiters(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    let owner = Owner::new();
    let with_owner = || LockOptions::new().owner(&owner);
    let outer = lock.lock_with(with_owner()).await.expect("the store answers");
    let mut waiter = pin!(lock.lock());
    assert!(poll!(waiter.as_mut()).is_pending(), "two guards of one key");
    let inner = timeout(context.max_wait(), lock.lock_with(with_owner()))
        .await
        .expect("an owner does not wait for itself");
    let inner = inner.expect("the owner re-enters");
    inner.unlock().await.expect("a held lock is unlocked");
    outer.unlock().await.expect("a held lock is unlocked");
    waiter
        .await
        .expect("the lock is free at last")
        .unlock()
        .await
        .expect("a held lock is unlocked");
}

/// If two calls of one owner wait for a lock, both acquire it at the next unlock, with the same
/// token.
pub async fn two_waiting_calls_of_one_owner_acquire_together(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    let owner = Owner::new();
    let with_owner = || LockOptions::new().owner(&owner);
    let holder = lock.lock().await.expect("a free lock is acquired");
    let (mut first, mut second) =
        (pin!(lock.lock_with(with_owner())), pin!(lock.lock_with(with_owner())));
    assert!(poll!(first.as_mut()).is_pending() && poll!(second.as_mut()).is_pending());
    holder.unlock().await.expect("a held lock is unlocked");
    let first = first.await.expect("the call acquired the lock");
    let second = timeout(context.max_wait(), second).await.expect("both calls acquire the lock");
    let second = second.expect("the second call of the owner acquired the lock");
    assert_eq!(first.fencing_token(), second.fencing_token());
    first.unlock().await.expect("a held lock is unlocked");
    second.unlock().await.expect("a held lock is unlocked");
}

/// A loss is reported to all guards of a lock with the same reason. Their `reenter` and `unlock`
/// return `LockError::Lost`.
pub async fn a_loss_is_reported_to_all_guards_of_a_lock(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let outer = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let inner = outer.reenter().expect("a held lock is re-entered");
    context.break_claim(outer.claim()).await;
    for guard in [outer, inner] {
        assert_eq!(guard.lost().await, LostReason::Gone);
        assert!(
            matches!(guard.reenter(), Err(LockError::Lost { .. })),
            "a lost lock is re-entered"
        );
        assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    }
}
