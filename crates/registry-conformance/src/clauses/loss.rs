//! A holder that may have lost its lock is notified in time, with the reason, and the loss is
//! final.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::poll;
use registry_core::{
    LockError, LockOptions, LockRegistry as _, LockRegistryExt as _, LostReason, Registry,
};
use tokio::time::{sleep, timeout};

use crate::faulty::{Fault, Faults, Operation};
use crate::lab::Lab;

/// If the store no longer has a claim, `lost` returns `LostReason::Gone`, after the next renewal at
/// the latest.
pub async fn a_lock_that_is_gone_is_told_to_its_holder(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told");
    assert_eq!(reason, LostReason::Gone);
    assert!(!guard.is_held());
}

/// After a loss, every call of `lost` returns at once, `is_held` is false, and no validity is left.
/// `renew`, `reenter` and `unlock` return `LockError::Lost`.
pub async fn a_lost_lock_stays_lost(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    guard.lost().await;
    for _ in 0..3 {
        assert!(poll!(pin!(guard.lost())).is_ready(), "the loss is told once and never again");
        assert!(!guard.is_held());
        assert_eq!(guard.valid_for(), Duration::ZERO);
        assert!(guard.valid_until() <= std::time::Instant::now() + Duration::from_secs(24 * 3_600));
        assert!(matches!(guard.renew(lab.renewed()).await, Err(LockError::Lost { .. })));
        assert!(matches!(guard.reenter(), Err(LockError::Lost { .. })));
    }
    match guard.unlock().await {
        Err(LockError::Lost { key, reason: LostReason::Gone, .. }) => assert_eq!(key, "orders:42"),
        other => panic!("a lost lock is unlocked: {other:?}"),
    }
}

/// Unlocking or dropping a guard is not reported as a loss to a pending `lost` future.
pub async fn a_lock_that_is_let_go_is_not_lost(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let lock = registry.obtain("orders:42");
    let (first, second) =
        (lock.lock().await.expect("a free lock is had"), registry.obtain("orders:43"));
    let second = second.lock().await.expect("a free lock is had");
    let (mut unlocked, mut dropped) = (pin!(first.lost()), pin!(second.lost()));
    assert!(poll!(unlocked.as_mut()).is_pending() && poll!(dropped.as_mut()).is_pending());
    first.unlock().await.expect("a held lock is unlocked");
    drop(second);
    sleep(lab.renewed() * 2).await;
    assert!(poll!(unlocked).is_pending(), "an unlocked lock is told as lost");
    assert!(poll!(dropped).is_pending(), "a dropped lock is told as lost");
}

/// `lost` stays pending while the lock is renewed, for twice the lease.
pub async fn a_held_lock_is_not_told_as_lost(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let early = timeout(lab.renewed() * 2, guard.lost()).await;
    assert!(early.is_err(), "told as lost: {early:?}");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A store that reports losses notifies the holder of a broken lock before its next renewal. Locks
/// of other keys stay held.
pub async fn a_broken_lock_is_told_at_once(lab: &Lab) {
    let (holding, breaking) = (lab.registry().await, lab.registry().await);
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is had");
    let other = holding.obtain("orders:43").lock().await.expect("a free lock is had");
    broken(&breaking, "orders:42").await;
    // The lease is so long that no renewal finds the loss in time.
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
    assert_eq!(reason, LostReason::Gone);
    assert!(other.is_held(), "told of another key");
    other.unlock().await.expect("a held lock is unlocked");
}

/// A store that reports losses also notifies the holder of a broken lock with `renew(false)`.
pub async fn a_broken_lock_that_is_not_renewed_is_told_at_once(lab: &Lab) {
    let (holding, breaking) = (lab.registry().await, lab.registry().await);
    let fixed = LockOptions::new().renew(false);
    let guard = holding.obtain("orders:42").lock_with(fixed).await.expect("no trouble");
    let guard = guard.expect("without a wait there is always a guard");
    broken(&breaking, "orders:42").await;
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
    assert_eq!(reason, LostReason::Gone);
}

/// In a store that reports losses, each registry over one client is notified of the losses of its
/// own locks.
pub async fn every_registry_over_a_client_is_told_of_its_losses(lab: &Lab) {
    let client = lab.client().await;
    let open = || lab.builder(Arc::clone(&client)).build().expect("the registry is built");
    let (first, second, breaking) = (open(), open(), lab.registry().await);
    // A registry that was dropped must not end the notifications of the others.
    drop(open());
    for (registry, name) in [(&first, "orders:42"), (&second, "orders:43")] {
        let guard = registry.obtain(name).lock().await.expect("a free lock is had");
        broken(&breaking, name).await;
        let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
        assert_eq!(reason, LostReason::Gone);
    }
}

/// A holder is notified at once if its own registry breaks the lock. The key is then free, and
/// locks of other keys stay held. A store need not report a client's own changes, so the engine
/// verifies the claim.
pub async fn a_lock_that_its_own_registry_breaks_is_lost_at_once(lab: &Lab) {
    let registry = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let other = registry.obtain("orders:43").lock().await.expect("a free lock is had");
    sleep(PAST_FIRST_LOOK).await;
    broken(&registry, "orders:42").await;
    // The lease is so long that no renewal finds the loss in time.
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
    assert_eq!(reason, LostReason::Gone);
    let next = registry.obtain("orders:42").try_lock_for(lab.patience()).await;
    next.expect("no trouble").expect("a broken lock is free").unlock().await.expect("it is held");
    assert!(other.is_held(), "told of another key");
    other.unlock().await.expect("a held lock is unlocked");
}

/// A holder is notified at once if another registry over the same client breaks the lock.
pub async fn a_lock_that_a_registry_over_the_same_client_breaks_is_lost_at_once(lab: &Lab) {
    let client = lab.client().await;
    let open = || lab.builder(Arc::clone(&client)).build().expect("the registry is built");
    let (holding, breaking) = (open(), open());
    // A registry that was dropped must not end the notifications of the others.
    drop(open());
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is had");
    sleep(PAST_FIRST_LOOK).await;
    broken(&breaking, "orders:42").await;
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
    assert_eq!(reason, LostReason::Gone);
}

/// Longer than any store's `verify_after`, which would find the loss without a notification.
const PAST_FIRST_LOOK: Duration = Duration::from_millis(500);

async fn broken(breaking: &Registry, name: &str) {
    // A store with injected faults may break the lock and still return an error.
    while breaking.force_release(name).await.is_err() {}
}

/// During an outage that is longer than the lease, the lock is lost with `LostReason::Expired`, by
/// the holder's own clock. Another process can then acquire it.
pub async fn an_outage_longer_than_the_lease_is_a_loss(lab: &Lab) {
    let faulty = lab.faulty(Faults::none()).await;
    let registry = lab.registry_over(&faulty, lab.renewed());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    faulty.apply(Faults::outage());
    let reason =
        timeout(lab.renewed() + lab.patience(), guard.lost()).await.expect("the loss is told");
    assert_eq!(reason, LostReason::Expired);
    let other = lab.registry().await;
    lab.free_soon(&other, "orders:42").await;
}

/// If the store accepts renewals and never answers them, the lock is lost with
/// `LostReason::Expired`.
pub async fn a_store_that_never_answers_is_a_loss(lab: &Lab) {
    let faulty = lab.faulty(Faults::none()).await;
    let registry = lab.registry_over(&faulty, lab.renewed());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let hang = Fault::DelayRequest(Duration::from_secs(3_600));
    faulty.apply(Faults::none().always(Operation::Renew, hang).always(Operation::Release, hang));
    let reason =
        timeout(lab.renewed() + lab.patience(), guard.lost()).await.expect("the loss is told");
    assert_eq!(reason, LostReason::Expired);
    // Dropping the guard does not wait for the store.
    drop(guard);
    faulty.heal();
    lab.free_soon(&registry, "orders:42").await;
}

/// A lock with `renew(false)` is lost with `LostReason::Expired` when its lease ends, and `unlock`
/// returns this error.
pub async fn an_unrenewed_lock_is_lost_when_its_lease_ends(lab: &Lab) {
    let registry = lab.registry().await;
    let options = LockOptions::new().lease(lab.short()).renew(false);
    let guard = registry.obtain("orders:42").lock_with(options).await.expect("no trouble");
    let guard = guard.expect("without a wait there is always a guard");
    let watched = guard.lost();
    let reason = timeout(lab.short() + lab.patience(), watched).await.expect("the loss is told");
    assert_eq!(reason, LostReason::Expired);
    assert!(matches!(
        guard.unlock().await,
        Err(LockError::Lost { reason: LostReason::Expired, .. })
    ));
}

/// A guard whose lock is lost does not block other callers of its process: a waiter acquires the
/// lock.
pub async fn a_lost_lock_gives_up_its_turn_in_this_process(lab: &Lab) {
    let registry = lab.registry().await;
    let lock = registry.obtain("orders:42");
    let options = LockOptions::new().lease(lab.short()).renew(false);
    let lost = lock.lock_with(options).await.expect("no trouble");
    let next = lock.try_lock_for(lab.short() + lab.patience()).await.expect("no trouble");
    next.expect("the old lease ends").unlock().await.expect("a held lock is unlocked");
    drop(lost);
    lab.free_soon(&registry, "orders:42").await;
}

/// When the lock is lost, `protect` drops the work and returns `LockError::Lost`.
pub async fn protected_work_stops_when_the_lock_is_lost(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let work = guard.protect(async {
        lab.break_claim(guard.claim()).await;
        std::future::pending::<()>().await;
    });
    match timeout(lab.patience(), work).await.expect("the work is stopped") {
        Err(LockError::Lost { reason: LostReason::Gone, .. }) => {}
        other => panic!("the work went on: {other:?}"),
    }
}

/// If the work ends before a loss, `protect` returns its output, and the lock stays held.
pub async fn protected_work_gives_its_own_result(lab: &Lab) {
    let registry = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let work = async {
        sleep(Duration::from_millis(10)).await;
        Err::<(), _>("the work's own error")
    };
    assert_eq!(guard.protect(work).await.expect("the lock is held"), Err("the work's own error"));
    assert!(guard.is_held());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// If the lock is already lost, `protect` returns `LockError::Lost` without polling the work.
pub async fn work_does_not_begin_under_a_lost_lock(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    guard.lost().await;
    let work = async { panic!("the work begins under a lost lock") };
    assert!(matches!(guard.protect::<_>(work).await, Err::<(), _>(LockError::Lost { .. })));
}

/// When the lock is lost, `execute_locked` drops the work and returns `LockError::Lost`. The key
/// can then be acquired again.
pub async fn executed_work_stops_when_the_lock_is_lost(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let work = registry.execute_locked("orders:42", async |guard| {
        lab.break_claim(guard.claim()).await;
        std::future::pending::<()>().await;
    });
    match timeout(lab.patience(), work).await.expect("the work is stopped") {
        Err(LockError::Lost { .. }) => {}
        other => panic!("the work went on: {other:?}"),
    }
    lab.free_soon(&registry, "orders:42").await;
}

/// If the store no longer has the claim, `renew` of the guard returns `LockError::Lost` with
/// `LostReason::Gone`, and the guard is not held.
pub async fn a_renewal_by_hand_finds_out_about_the_loss(lab: &Lab) {
    let registry = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    let answer = lab.renew_by_hand(&guard, lab.long()).await;
    assert!(matches!(answer, Err(LockError::Lost { reason: LostReason::Gone, .. })), "{answer:?}");
    assert!(!guard.is_held());
}

/// If the store no longer has the claim, `unlock` returns `LockError::Lost` with
/// `LostReason::Gone`, even without an earlier notification.
pub async fn unlocking_finds_out_about_the_loss(lab: &Lab) {
    let registry = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    match guard.unlock().await {
        Err(LockError::Lost { reason: LostReason::Gone, .. }) => {}
        other => panic!("a lost lock is unlocked: {other:?}"),
    }
}

/// If the store no longer has the claim and refuses the first release, `unlock` returns an error.
/// The refused release freed nothing, so a repeated release that finds nothing is not a success.
pub async fn a_refused_release_does_not_hide_the_loss(lab: &Lab) {
    let faulty = lab.faulty(Faults::none().at(Operation::Release, 1, Fault::Refuse)).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    let answer = guard.unlock().await;
    assert!(answer.is_err(), "a lock that was lost is unlocked as if it had been held");
}
