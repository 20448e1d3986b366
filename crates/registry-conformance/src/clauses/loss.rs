//! A holder that may have lost its lock is notified in time, with the reason, and the loss is
//! final.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::poll;
use registry_core::{LockError, LockOptions, LockRegistryExt as _, LostReason, Registry};
use tokio::time::{sleep, timeout};

use crate::context::{TestContext, unlock};
use crate::faulty::{Fault, Faults, Operation};

/// If the store no longer has a claim, `lost` returns `LostReason::Gone`, after the next renewal at
/// the latest.
pub async fn a_holder_is_notified_when_its_claim_is_gone(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    context.break_claim(guard.claim()).await;
    let reason = timeout(context.max_wait(), guard.lost()).await.expect("the loss is reported");
    assert_eq!(reason, LostReason::Gone);
    assert!(!guard.is_held());
}

/// After a loss, every call of `lost` returns at once, `is_held` is false, and no validity is left.
/// `extend`, `reenter` and `unlock` return `LockError::Lost`.
pub async fn a_lost_lock_stays_lost(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    context.break_claim(guard.claim()).await;
    guard.lost().await;
    for _ in 0..3 {
        assert!(poll!(pin!(guard.lost())).is_ready(), "a later call of `lost` is pending");
        assert!(!guard.is_held());
        assert_eq!(guard.valid_for(), Duration::ZERO);
        assert!(guard.valid_until() <= std::time::Instant::now() + Duration::from_secs(24 * 3_600));
        assert!(matches!(
            guard.extend(context.renewable_lease()).await,
            Err(LockError::Lost { .. })
        ));
        assert!(matches!(guard.reenter(), Err(LockError::Lost { .. })));
    }
    match guard.unlock().await {
        Err(LockError::Lost { key, reason: LostReason::Gone, .. }) => assert_eq!(key, "orders:42"),
        other => panic!("the unlock of a lost lock returned {other:?}"),
    }
}

/// Unlocking or dropping a guard is not reported as a loss to a pending `lost` future.
pub async fn a_released_lock_is_not_reported_as_lost(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let lock = registry.obtain("orders:42");
    let (first, second) =
        (lock.lock().await.expect("a free lock is acquired"), registry.obtain("orders:43"));
    let second = second.lock().await.expect("a free lock is acquired");
    let (mut unlocked, mut dropped) = (pin!(first.lost()), pin!(second.lost()));
    assert!(poll!(unlocked.as_mut()).is_pending() && poll!(dropped.as_mut()).is_pending());
    first.unlock().await.expect("a held lock is unlocked");
    drop(second);
    sleep(context.renewable_lease() * 2).await;
    assert!(poll!(unlocked).is_pending(), "an unlocked lock is reported as lost");
    assert!(poll!(dropped).is_pending(), "a dropped lock is reported as lost");
}

/// `lost` stays pending while the lock is renewed, for twice the lease.
pub async fn a_held_lock_is_not_reported_as_lost(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let early = timeout(context.renewable_lease() * 2, guard.lost()).await;
    assert!(early.is_err(), "reported as lost: {early:?}");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// In a store that reports invalidations, the holder of a broken lock is notified before its next
/// renewal. Locks of other keys stay held.
pub async fn a_forced_release_is_reported_before_the_next_renewal(context: &TestContext) {
    let (holding, operator) = (context.registry().await, context.registry().await);
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let other = holding.obtain("orders:43").lock().await.expect("a free lock is acquired");
    assert_force_released(&operator, "orders:42").await;
    // The lease is so long that no renewal finds the loss in time.
    context.assert_lost(&guard, Duration::ZERO, LostReason::Gone).await;
    assert!(other.is_held(), "the loss of another key was reported");
    other.unlock().await.expect("a held lock is unlocked");
}

/// In a store that reports invalidations, the holder of a broken lock with `auto_renew(false)` is
/// notified too.
pub async fn a_forced_release_is_reported_to_a_holder_that_does_not_renew(context: &TestContext) {
    let (holding, operator) = (context.registry().await, context.registry().await);
    let fixed = LockOptions::new().auto_renew(false);
    let guard = holding.obtain("orders:42").lock_with(fixed).await.expect("the store answers");
    assert_force_released(&operator, "orders:42").await;
    context.assert_lost(&guard, Duration::ZERO, LostReason::Gone).await;
}

/// In a store that reports invalidations, each registry over one client is notified of the losses
/// of its own locks.
pub async fn every_registry_over_one_client_is_notified_of_its_losses(context: &TestContext) {
    let client = context.client().await;
    let open = || context.builder(Arc::clone(&client)).build().expect("the registry is built");
    let (first, second, operator) = (open(), open(), context.registry().await);
    // A registry that was dropped must not end the notifications of the others.
    drop(open());
    for (registry, name) in [(&first, "orders:42"), (&second, "orders:43")] {
        let guard = registry.obtain(name).lock().await.expect("a free lock is acquired");
        assert_force_released(&operator, name).await;
        context.assert_lost(&guard, Duration::ZERO, LostReason::Gone).await;
    }
}

/// A holder is notified at once if its own registry breaks the lock. The key is then free, and
/// locks of other keys stay held. A store need not report a client's own changes, so the engine
/// verifies the claim.
pub async fn a_forced_release_by_the_same_registry_is_reported_at_once(context: &TestContext) {
    let registry = context.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let other = registry.obtain("orders:43").lock().await.expect("a free lock is acquired");
    sleep(AFTER_FIRST_VERIFICATION).await;
    assert_force_released(&registry, "orders:42").await;
    // The lease is so long that no renewal finds the loss in time.
    context.assert_lost(&guard, Duration::ZERO, LostReason::Gone).await;
    let next = registry.obtain("orders:42").try_lock_for(context.max_wait()).await;
    unlock(next.expect("the store answers").expect("a broken lock is free")).await;
    assert!(other.is_held(), "the loss of another key was reported");
    other.unlock().await.expect("a held lock is unlocked");
}

/// A holder is notified at once if another registry over the same client breaks the lock.
pub async fn a_forced_release_by_another_registry_over_the_client_is_reported_at_once(
    context: &TestContext,
) {
    let client = context.client().await;
    let open = || context.builder(Arc::clone(&client)).build().expect("the registry is built");
    let (holding, operator) = (open(), open());
    // A registry that was dropped must not end the notifications of the others.
    drop(open());
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is acquired");
    sleep(AFTER_FIRST_VERIFICATION).await;
    assert_force_released(&operator, "orders:42").await;
    context.assert_lost(&guard, Duration::ZERO, LostReason::Gone).await;
}

/// Longer than the `verify_after` of all stores of this workspace, so that the first verification
/// cannot detect the loss instead.
const AFTER_FIRST_VERIFICATION: Duration = Duration::from_millis(500);

async fn assert_force_released(operator: &Registry, name: &str) {
    // A store with injected faults may break the lock and still return an error.
    while operator.force_release(name).await.is_err() {}
}

/// During an outage that is longer than the lease, the lock is lost with `LostReason::Expired`, by
/// the holder's own clock. Another process can then acquire it.
pub async fn an_outage_longer_than_the_lease_is_a_loss(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    faulty.apply(Faults::outage());
    context.assert_lost(&guard, context.renewable_lease(), LostReason::Expired).await;
    let other = context.registry().await;
    context.assert_becomes_free(&other, "orders:42").await;
}

/// If the store never answers renewals, the lock is lost with `LostReason::Expired`.
pub async fn an_unanswered_renewal_is_a_loss(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let hang = Fault::DelayRequest(Duration::from_secs(3_600));
    faulty.apply(Faults::none().always(Operation::Renew, hang).always(Operation::Release, hang));
    context.assert_lost(&guard, context.renewable_lease(), LostReason::Expired).await;
    // Dropping the guard does not wait for the store.
    drop(guard);
    faulty.clear_faults();
    context.assert_becomes_free(&registry, "orders:42").await;
}

/// A lock with `auto_renew(false)` is lost with `LostReason::Expired` when its lease ends. `unlock`
/// then returns `LockError::Lost` with this reason.
pub async fn an_unrenewed_lock_is_lost_when_its_lease_ends(context: &TestContext) {
    let registry = context.registry().await;
    let options = LockOptions::new().lease(context.short_lease()).auto_renew(false);
    let guard = registry.obtain("orders:42").lock_with(options).await.expect("the store answers");
    let lost = guard.lost();
    let reason = timeout(context.short_lease() + context.max_wait(), lost)
        .await
        .expect("the loss is reported");
    assert_eq!(reason, LostReason::Expired);
    assert!(matches!(
        guard.unlock().await,
        Err(LockError::Lost { reason: LostReason::Expired, .. })
    ));
}

/// A guard whose lock is lost does not block other callers of its process: a waiter acquires the
/// lock.
pub async fn a_lost_lock_does_not_block_other_callers_of_its_process(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("orders:42");
    let options = LockOptions::new().lease(context.short_lease()).auto_renew(false);
    let lost = lock.lock_with(options).await.expect("the store answers");
    let next = lock
        .try_lock_for(context.short_lease() + context.max_wait())
        .await
        .expect("the store answers");
    unlock(next.expect("the old lease ends")).await;
    drop(lost);
    context.assert_becomes_free(&registry, "orders:42").await;
}

/// When the lock is lost, `protect` drops the work and returns `LockError::Lost`.
pub async fn protect_stops_the_work_when_the_lock_is_lost(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let work = guard.protect(async {
        context.break_claim(guard.claim()).await;
        std::future::pending::<()>().await;
    });
    match timeout(context.max_wait(), work).await.expect("the work is stopped") {
        Err(LockError::Lost { reason: LostReason::Gone, .. }) => {}
        other => panic!("the work continued: {other:?}"),
    }
}

/// If the work ends before a loss, `protect` returns its output, and the lock stays held.
pub async fn protect_returns_the_output_of_completed_work(context: &TestContext) {
    let registry = context.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let work = async {
        sleep(Duration::from_millis(10)).await;
        Err::<(), _>("the work's own error")
    };
    assert_eq!(guard.protect(work).await.expect("the lock is held"), Err("the work's own error"));
    assert!(guard.is_held());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// If the lock is already lost, `protect` returns `LockError::Lost` without polling the work.
pub async fn protect_does_not_start_work_under_a_lost_lock(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    context.break_claim(guard.claim()).await;
    guard.lost().await;
    let work = async { panic!("the work begins under a lost lock") };
    assert!(matches!(guard.protect::<_>(work).await, Err::<(), _>(LockError::Lost { .. })));
}

/// When the lock is lost, `execute_locked` drops the work and returns `LockError::Lost`. The key
/// can then be acquired again.
pub async fn execute_locked_stops_the_work_when_the_lock_is_lost(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let work = registry.execute_locked("orders:42", async |guard| {
        context.break_claim(guard.claim()).await;
        std::future::pending::<()>().await;
    });
    match timeout(context.max_wait(), work).await.expect("the work is stopped") {
        Err(LockError::Lost { .. }) => {}
        other => panic!("the work continued: {other:?}"),
    }
    context.assert_becomes_free(&registry, "orders:42").await;
}

/// If the store no longer has the claim, `extend` of the guard returns `LockError::Lost` with
/// `LostReason::Gone`, and the guard is not held.
pub async fn a_manual_renewal_detects_the_loss(context: &TestContext) {
    let registry = context.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    context.break_claim(guard.claim()).await;
    let answer = context.renew_with_retries(&guard, context.long_lease()).await;
    assert!(matches!(answer, Err(LockError::Lost { reason: LostReason::Gone, .. })), "{answer:?}");
    assert!(!guard.is_held());
}

/// If the store no longer has the claim, `unlock` returns `LockError::Lost` with
/// `LostReason::Gone`, even without an earlier notification.
pub async fn unlock_detects_the_loss(context: &TestContext) {
    let registry = context.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    context.break_claim(guard.claim()).await;
    match guard.unlock().await {
        Err(LockError::Lost { reason: LostReason::Gone, .. }) => {}
        other => panic!("the unlock of a lost lock returned {other:?}"),
    }
}

/// If the store no longer has the claim and refuses the first release, `unlock` returns an error.
/// The refused release freed nothing, so a repeated release that finds nothing is not a success.
pub async fn a_refused_release_does_not_hide_the_loss(context: &TestContext) {
    let faulty = context.faulty(Faults::none().at_call(Operation::Release, 1, Fault::Refuse)).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    context.break_claim(guard.claim()).await;
    let answer = guard.unlock().await;
    assert!(answer.is_err(), "the unlock of a lost lock returned `Ok`");
}
