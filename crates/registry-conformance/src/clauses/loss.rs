//! A holder that may have lost its lock knows it, in time, with the reason, and for good.

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

/// The store says that the claim is gone; the holder hears it with the next renewal.
pub async fn a_lock_that_is_gone_is_told_to_its_holder(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told");
    assert_eq!(reason, LostReason::Gone);
    assert!(!guard.is_held());
}

/// Asking after the loss gives the answer at once, however often.
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

/// Letting go is no loss, also for those who watch.
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

/// A healthy lock is not told as lost, whoever listens.
pub async fn a_held_lock_is_not_told_as_lost(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let early = timeout(lab.renewed() * 2, guard.lost()).await;
    assert!(early.is_err(), "told as lost: {early:?}");
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A store that tells losses does not let the holder go on until its next renewal.
pub async fn a_broken_lock_is_told_at_once(lab: &Lab) {
    let (holding, breaking) = (lab.registry().await, lab.registry().await);
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is had");
    let other = holding.obtain("orders:43").lock().await.expect("a free lock is had");
    broken(&breaking, "orders:42").await;
    // With so long a lease no renewal comes in time.
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
    assert_eq!(reason, LostReason::Gone);
    assert!(other.is_held(), "told of another key");
    other.unlock().await.expect("a held lock is unlocked");
}

/// A holder that wants no renewals is told all the same.
pub async fn a_broken_lock_that_is_not_renewed_is_told_at_once(lab: &Lab) {
    let (holding, breaking) = (lab.registry().await, lab.registry().await);
    let fixed = LockOptions::new().renew(false);
    let guard = holding.obtain("orders:42").lock_with(fixed).await.expect("no trouble");
    let guard = guard.expect("without a wait there is always a guard");
    broken(&breaking, "orders:42").await;
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
    assert_eq!(reason, LostReason::Gone);
}

/// One client may serve several registries, and each has its own holders.
pub async fn every_registry_over_a_client_is_told_of_its_losses(lab: &Lab) {
    let client = lab.client().await;
    let open = || lab.builder(Arc::clone(&client)).build().expect("the registry is built");
    let (first, second, breaking) = (open(), open(), lab.registry().await);
    // Whoever has come and gone before takes no news away from those who are there.
    drop(open());
    for (registry, name) in [(&first, "orders:42"), (&second, "orders:43")] {
        let guard = registry.obtain(name).lock().await.expect("a free lock is had");
        broken(&breaking, name).await;
        let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
        assert_eq!(reason, LostReason::Gone);
    }
}

/// A store need not report to a client what that client did, so the engine verifies the claim.
pub async fn a_lock_that_its_own_registry_breaks_is_lost_at_once(lab: &Lab) {
    let registry = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let other = registry.obtain("orders:43").lock().await.expect("a free lock is had");
    sleep(PAST_FIRST_LOOK).await;
    broken(&registry, "orders:42").await;
    // With so long a lease no renewal comes in time.
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
    assert_eq!(reason, LostReason::Gone);
    let next = registry.obtain("orders:42").try_lock_for(lab.patience()).await;
    next.expect("no trouble").expect("a broken lock is free").unlock().await.expect("it is held");
    assert!(other.is_held(), "told of another key");
    other.unlock().await.expect("a held lock is unlocked");
}

/// The same for each registry over the client that breaks the lock.
pub async fn a_lock_that_a_registry_over_the_same_client_breaks_is_lost_at_once(lab: &Lab) {
    let client = lab.client().await;
    let open = || lab.builder(Arc::clone(&client)).build().expect("the registry is built");
    let (holding, breaking) = (open(), open());
    // A registry that has come and gone takes no news away from the others.
    drop(open());
    let guard = holding.obtain("orders:42").lock().await.expect("a free lock is had");
    sleep(PAST_FIRST_LOOK).await;
    broken(&breaking, "orders:42").await;
    let reason = timeout(lab.patience(), guard.lost()).await.expect("the loss is told at once");
    assert_eq!(reason, LostReason::Gone);
}

/// The look that some stores want soon after a grant would find the loss by itself.
const PAST_FIRST_LOOK: Duration = Duration::from_millis(500);

async fn broken(breaking: &Registry, name: &str) {
    // A store with faults put in may do it and not tell.
    while breaking.force_release(name).await.is_err() {}
}

/// A store that is out of reach for a lease's length: the holder stops in time, by its own clock.
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

/// A store that takes requests and never answers is no better.
pub async fn a_store_that_never_answers_is_a_loss(lab: &Lab) {
    let faulty = lab.faulty(Faults::none()).await;
    let registry = lab.registry_over(&faulty, lab.renewed());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let hang = Fault::DelayRequest(Duration::from_secs(3_600));
    faulty.apply(Faults::none().always(Operation::Renew, hang).always(Operation::Release, hang));
    let reason =
        timeout(lab.renewed() + lab.patience(), guard.lost()).await.expect("the loss is told");
    assert_eq!(reason, LostReason::Expired);
    // Dropped like any other, without waiting for the store.
    drop(guard);
    faulty.heal();
    lab.free_soon(&registry, "orders:42").await;
}

/// A lock that is not renewed is lost when its lease ends, and says so.
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

/// A guard that is kept though its lock is lost does not keep the callers of its own process out.
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

/// Work that is protected ends where it is when the lock is lost.
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

/// Work that is done in time gives what it gives, and the lock is still held.
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

/// Work never begins under a lock that is lost already.
pub async fn work_does_not_begin_under_a_lost_lock(lab: &Lab) {
    let registry = lab.registry_of(lab.renewed()).await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    guard.lost().await;
    let work = async { panic!("the work begins under a lost lock") };
    assert!(matches!(guard.protect::<_>(work).await, Err::<(), _>(LockError::Lost { .. })));
}

/// The same for work that a registry runs.
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

/// A renewal by hand that finds nothing to renew says so, and the guard knows.
pub async fn a_renewal_by_hand_finds_out_about_the_loss(lab: &Lab) {
    let registry = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    let answer = lab.renew_by_hand(&guard, lab.long()).await;
    assert!(matches!(answer, Err(LockError::Lost { reason: LostReason::Gone, .. })), "{answer:?}");
    assert!(!guard.is_held());
}

/// Whoever unlocks what was taken away hears of it, even if nothing else told before.
pub async fn unlocking_finds_out_about_the_loss(lab: &Lab) {
    let registry = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    match guard.unlock().await {
        Err(LockError::Lost { reason: LostReason::Gone, .. }) => {}
        other => panic!("a lost lock is unlocked: {other:?}"),
    }
}

/// A release that the store refused did nothing: that the next one finds nothing is a loss, not a success.
pub async fn a_refused_release_does_not_hide_the_loss(lab: &Lab) {
    let faulty = lab.faulty(Faults::none().at(Operation::Release, 1, Fault::Refuse)).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    lab.break_claim(guard.claim()).await;
    let answer = guard.unlock().await;
    assert!(answer.is_err(), "a lock that was lost is unlocked as if it had been held");
}
