//! Re-entry requires an explicit owner, or a guard of the lock. It sends no request and does not
//! change the lock.

use std::pin::pin;
use std::time::Duration;

use futures_util::poll;
use registry_core::{LockError, LockOptions, LockRegistry as _, LostReason, Owner};
use tokio::time::{Instant, timeout};

use crate::faulty::Faults;
use crate::lab::Lab;

/// A lock taken without an owner is busy for all other calls, including those of the same task and
/// those with an owner.
pub async fn a_lock_without_an_owner_is_not_reentrant(lab: &Lab) {
    let registry = lab.registry().await;
    let lock = registry.obtain("orders:42");
    let guard = lock.lock().await.expect("a free lock is had");
    assert!(lock.try_lock().await.expect("busy is no error").is_none());
    let owner = Owner::new();
    let owned = lock.lock_with(LockOptions::new().owner(&owner).wait(Duration::ZERO)).await;
    assert!(owned.expect("busy is no error").is_none(), "an owner enters what is not its own");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// An owner can acquire its own lock again. Another owner, and calls without an owner, return
/// `Ok(None)`.
pub async fn an_owner_enters_its_own_lock_again(lab: &Lab) {
    let registry = lab.registry().await;
    let lock = registry.obtain("orders:42");
    let (owner, other) = (Owner::new(), Owner::new());
    let own = || LockOptions::new().owner(&owner).wait(Duration::ZERO);
    let outer = lock.lock_with(own()).await.expect("no trouble").expect("the lock is free");
    let inner = lock.lock_with(own()).await.expect("no trouble").expect("its owner enters again");
    let foreign = lock.lock_with(LockOptions::new().owner(&other).wait(Duration::ZERO)).await;
    assert!(foreign.expect("busy is no error").is_none(), "another owner enters");
    assert!(
        lock.try_lock().await.expect("busy is no error").is_none(),
        "somebody without owner enters"
    );
    inner.unlock().await.expect("a held lock is unlocked");
    outer.unlock().await.expect("a held lock is unlocked");
}

/// An owner cannot re-enter its lock from another process, where the lock is busy.
pub async fn an_owner_does_not_enter_from_another_process(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let owner = Owner::new();
    let own = || LockOptions::new().owner(&owner).wait(Duration::ZERO);
    let guard = here.obtain("orders:42").lock_with(own()).await.expect("no trouble");
    let second = there.obtain("orders:42").lock_with(own()).await.expect("busy is no error");
    assert!(second.is_none(), "two processes hold");
    guard.expect("the lock is free").unlock().await.expect("a held lock is unlocked");
}

/// Re-entry through the owner or through a guard, and unlocking the inner guards, send no request
/// to the store.
pub async fn entering_again_asks_the_store_nothing(lab: &Lab) {
    let faulty = lab.faulty(Faults::none()).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let owner = Owner::new();
    let lock = registry.obtain("orders:42");
    let outer = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("no trouble");
    let outer = outer.expect("without a wait there is always a guard");
    let requests = faulty.requests();
    let by_owner = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("no trouble");
    let by_owner = by_owner.expect("its owner enters again");
    let by_guard = outer.reenter().expect("a held lock is entered again");
    by_owner.unlock().await.expect("a held lock is unlocked");
    by_guard.unlock().await.expect("a held lock is unlocked");
    assert_eq!(faulty.requests(), requests, "the store heard of it");
    outer.unlock().await.expect("a held lock is unlocked");
}

/// All guards of a re-entered lock have the same token.
pub async fn entering_again_has_the_same_token(lab: &Lab) {
    let registry = lab.registry().await;
    let owner = Owner::new();
    let lock = registry.obtain("orders:42");
    let outer = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("no trouble");
    let outer = outer.expect("without a wait there is always a guard");
    let inner = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("no trouble");
    let inner = inner.expect("its owner enters again");
    let innermost = inner.reenter().expect("a held lock is entered again");
    assert!(outer.fencing_token().is_some());
    assert_eq!(inner.fencing_token(), outer.fencing_token());
    assert_eq!(innermost.fencing_token(), outer.fencing_token());
}

/// Re-entry with a shorter lease and `renew(false)` does not shorten the lease of the lock.
pub async fn entering_again_never_shortens_the_lease(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let owner = Owner::new();
    let lock = here.obtain("orders:42");
    let outer = lock.lock_with(LockOptions::new().owner(&owner)).await.expect("no trouble");
    let outer = outer.expect("without a wait there is always a guard");
    let short = LockOptions::new().owner(&owner).lease(lab.short()).renew(false);
    let inner = lock.lock_with(short).await.expect("no trouble").expect("its owner enters again");
    tokio::time::sleep(lab.short() * 2).await;
    assert!(outer.is_held() && inner.is_held(), "the inner lease cut the outer one");
    assert!(there.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    inner.unlock().await.expect("a held lock is unlocked");
    assert!(outer.is_held());
    outer.unlock().await.expect("a held lock is unlocked");
}

/// The `min_hold` and `max_hold` of the first guard count from the grant and apply to all guards.
/// Those of inner guards are ignored.
pub async fn holds_are_those_of_the_first_guard_of_a_lock(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let (lock, there) = (here.obtain("orders:42"), there.obtain("orders:42"));
    let owner = Owner::new();
    let own = || LockOptions::new().owner(&owner);
    let enter = async |options: LockOptions| {
        let guard = lock.lock_with(options).await.expect("no trouble");
        guard.expect("without a wait there is always a guard")
    };

    // The inner `min_hold` is ignored.
    let outer = enter(own()).await;
    let inner = enter(own().min_hold(lab.patience() * 2).max_hold(lab.patience() * 2)).await;
    outer.unlock().await.expect("a held lock is unlocked");
    inner.unlock().await.expect("a held lock is unlocked");
    lab.free_soon(&here, "orders:42").await;

    // The outer `min_hold` applies, whichever guard is unlocked last.
    let min_hold = lab.short();
    let wanted_at = Instant::now();
    let outer = enter(own().min_hold(min_hold)).await;
    let inner = enter(own()).await;
    outer.unlock().await.expect("a held lock is unlocked");
    inner.unlock().await.expect("a held lock is unlocked");
    let next = there.try_lock_for(lab.patience()).await.expect("no trouble");
    let kept = wanted_at.elapsed();
    assert!(kept >= min_hold, "the key was taken for {kept:?} of {min_hold:?}");
    next.expect("the min_hold is over").unlock().await.expect("a held lock is unlocked");

    // An inner `max_hold` neither shortens nor extends the hold.
    let max_hold = lab.renewed();
    let outer = enter(own().max_hold(max_hold)).await;
    let longer = enter(own().max_hold(max_hold * 20)).await;
    let shorter = enter(own().max_hold(lab.short())).await;
    for guard in [outer, longer, shorter] {
        assert_eq!(guard.lost().await, LostReason::MaxHold);
        assert!(matches!(
            guard.unlock().await,
            Err(LockError::Lost { reason: LostReason::MaxHold, .. })
        ));
    }
    lab.free_soon(&here, "orders:42").await;
}

/// The lock is released when its last guard is unlocked or dropped, in whatever order, and not
/// before.
pub async fn a_lock_is_free_when_its_last_guard_is_gone(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let lock = here.obtain("orders:42");
    let there = there.obtain("orders:42");
    let outer = lock.lock().await.expect("a free lock is had");
    let inner = outer.reenter().expect("a held lock is entered again");
    let innermost = inner.reenter().expect("a held lock is entered again");
    outer.unlock().await.expect("a held lock is unlocked");
    assert!(lock.try_lock().await.expect("busy is no error").is_none());
    drop(innermost);
    here.idle().await;
    assert!(there.try_lock().await.expect("busy is no error").is_none());
    assert!(inner.is_held());
    inner.unlock().await.expect("a held lock is unlocked");
    let next = there.try_lock().await.expect("no trouble").expect("the last guard is gone");
    next.unlock().await.expect("a held lock is unlocked");
}

/// Lock calls in an `Owner::scope`, also in a nested one, use the owner of the scope. A scope
/// cannot enter a lock that was taken outside of it.
pub async fn an_owner_scope_reaches_nested_calls(lab: &Lab) {
    let registry = lab.registry().await;
    let lock = registry.obtain("orders:42");
    Owner::scope(async {
        let outer = lock.lock().await.expect("a free lock is had");
        let inner = Owner::scope(async { lock.try_lock().await }).await.expect("no trouble");
        inner
            .expect("the scope's owner enters again")
            .unlock()
            .await
            .expect("a held lock is unlocked");
        outer.unlock().await.expect("a held lock is unlocked");
    })
    .await;
    let guard = lock.lock().await.expect("a free lock is had");
    let next = Owner::scope(lock.try_lock()).await.expect("busy is no error");
    assert!(next.is_none(), "a scope enters what was taken outside of it");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// An owner that re-enters does not queue behind waiters, because it would wait for itself.
pub async fn an_owner_does_not_queue_behind_those_who_wait(lab: &Lab) {
    let registry = lab.registry().await;
    let lock = registry.obtain("orders:42");
    let owner = Owner::new();
    let own = || LockOptions::new().owner(&owner);
    let outer = lock.lock_with(own()).await.expect("no trouble").expect("the lock is free");
    let mut stranger = pin!(lock.lock());
    assert!(poll!(stranger.as_mut()).is_pending(), "two guards of one key");
    let inner =
        timeout(lab.patience(), lock.lock_with(own())).await.expect("an owner waits for itself");
    let inner = inner.expect("no trouble").expect("its owner enters again");
    inner.unlock().await.expect("a held lock is unlocked");
    outer.unlock().await.expect("a held lock is unlocked");
    stranger
        .await
        .expect("the lock is free at last")
        .unlock()
        .await
        .expect("a held lock is unlocked");
}

/// If two calls of one owner wait for a lock, both acquire it at the next unlock, with the same
/// token.
pub async fn a_waiter_is_let_in_beside_its_own_owner(lab: &Lab) {
    let registry = lab.registry().await;
    let lock = registry.obtain("orders:42");
    let owner = Owner::new();
    let own = || LockOptions::new().owner(&owner);
    let stranger = lock.lock().await.expect("a free lock is had");
    let (mut first, mut second) = (pin!(lock.lock_with(own())), pin!(lock.lock_with(own())));
    assert!(poll!(first.as_mut()).is_pending() && poll!(second.as_mut()).is_pending());
    stranger.unlock().await.expect("a held lock is unlocked");
    let first = first.await.expect("no trouble").expect("its turn has come");
    let second = timeout(lab.patience(), second).await.expect("an owner waits for itself");
    let second = second.expect("no trouble").expect("its owner is inside");
    assert_eq!(first.fencing_token(), second.fencing_token());
    first.unlock().await.expect("a held lock is unlocked");
    second.unlock().await.expect("a held lock is unlocked");
}

/// A loss is reported to all guards of a lock with the same reason. Their `reenter` and `unlock`
/// return `LockError::Lost`.
pub async fn a_loss_is_told_to_all_guards_of_a_lock(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let outer = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let inner = outer.reenter().expect("a held lock is entered again");
    lab.break_claim(outer.claim()).await;
    for guard in [outer, inner] {
        assert_eq!(guard.lost().await, LostReason::Gone);
        assert!(
            matches!(guard.reenter(), Err(LockError::Lost { .. })),
            "a lost lock is entered again"
        );
        assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    }
}
