//! A grant ends with its lease, on the store's clock, and a waiter can then acquire the key.

use std::time::Duration;

use registry_core::{Attempt, Claim, LockOptions, Release, Renewal};
use tokio::time::Instant;

use crate::context::{
    TestContext, assert_busy, assert_freed, assert_granted, attempt, key, release, renew,
};
use crate::faulty::{Fault, Faults, Operation};
use crate::harness::RemoteLock;

/// A grant that is neither renewed nor released ends with its lease. The store then grants a claim
/// of another client.
pub async fn a_grant_ends_with_its_lease(context: &TestContext) {
    let (former, successor) = (context.client().await, context.client().await);
    assert_granted(&*former, &Claim::new(key("orders:42"), context.short_lease())).await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    context.wait_until_granted(&*successor, &claim).await;
    assert_freed(&*successor, &claim).await;
}

/// A grant lasts at least as long as the lease that the store returned, because its holder relies
/// on that lease. The clause allows 1 % and 2 ms less: the margin of the engine for clocks that run
/// at different rates.
pub async fn a_grant_does_not_end_before_its_lease(context: &TestContext) {
    let client = context.client().await;
    for _ in 0..3 {
        let claim = Claim::new(key("orders:42"), context.short_lease());
        let before = Instant::now();
        let grant = assert_granted(&*client, &claim).await;
        let successor = Claim::new(key("orders:42"), context.long_lease());
        context.wait_until_granted(&*client, &successor).await;
        // Counted from before the request, because the store's lease cannot have begun earlier.
        let minimum = grant.lease - grant.lease / 100 - Duration::from_millis(2);
        let lasted = before.elapsed();
        assert!(
            lasted >= minimum,
            "the returned lease was {:?}, but the grant lasted {lasted:?}",
            grant.lease
        );
        assert_freed(&*client, &successor).await;
    }
}

/// Busy attempts of another claim do not extend the holder's lease.
pub async fn busy_attempts_do_not_extend_the_holders_lease(context: &TestContext) {
    let client = context.client().await;
    assert_granted(&*client, &Claim::new(key("orders:42"), context.short_lease())).await;
    let until = Instant::now() + context.short_lease() * 4 + context.max_wait();
    let successor = Claim::new(key("orders:42"), context.long_lease());
    // If an attempt extended the lease, the grant would never end, because the pause is shorter
    // than the lease.
    while let Attempt::Busy(_) = attempt(&*client, &successor).await {
        assert!(Instant::now() < until, "busy attempts extend the lease of the holder");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_freed(&*client, &successor).await;
}

/// After another claim has acquired the key, the expired claim cannot renew or release its grant,
/// and an attempt with it is busy. The successor's grant is unaffected.
pub async fn an_expired_claim_does_not_affect_its_successor(context: &TestContext) {
    let (former, successor) = (context.client().await, context.client().await);
    let expired = context.acquire_with_lease(&*former, context.short_lease()).await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    context.wait_until_granted(&*successor, &claim).await;
    assert_eq!(renew(&*former, &expired).await, Renewal::Gone);
    assert_eq!(release(&*former, &expired).await, Release::NotHeld);
    assert_busy(&*former, &expired).await;
    assert!(
        matches!(renew(&*successor, &claim).await, Renewal::Renewed(_)),
        "the successor lost its grant"
    );
    assert_freed(&*successor, &claim).await;
}

/// `retry_after` of a busy answer is at most the holder's lease plus one second.
pub async fn retry_after_is_at_most_the_lease_plus_one_second(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.short_lease()).await;
    if let Attempt::Busy(busy) =
        attempt(&*client, &Claim::new(key("orders:42"), context.long_lease())).await
    {
        let retry_after = busy.retry_after.unwrap_or_default();
        assert!(
            retry_after <= context.short_lease() + Duration::from_secs(1),
            "{busy:?}: retry_after exceeds the lease of {:?} by more than 1 s",
            context.short_lease()
        );
    }
    release(&*client, &claim).await;
}

/// `valid_for` of a new guard is shorter than its lease.
pub async fn a_guard_is_valid_for_less_than_its_lease(context: &TestContext) {
    let registry = context.registry().await;
    for lease in [context.renewable_lease(), context.long_lease()] {
        let options = LockOptions::new().lease(lease);
        let guard =
            registry.obtain("orders:42").lock_with(options).await.expect("the store answers");
        let valid_for = guard.valid_for();
        assert!(valid_for < lease, "valid for {valid_for:?}, not below the lease of {lease:?}");
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// The validity of a guard counts from before the request. A delayed reply shortens it by at least
/// the delay, so that the holder stops before the store's lease ends.
pub async fn a_slow_reply_shortens_the_validity_of_the_guard(context: &TestContext) {
    // The delay exceeds the margin for clock rates. A validity that ignores the delay therefore
    // fails the assertion.
    let (lease, delay) = (context.renewable_lease() * 10, context.renewable_lease() / 3);
    let delayed_reply = Fault::DelayReply(delay);
    let faulty = context.faulty(Faults::none().at_call(Operation::Acquire, 1, delayed_reply)).await;
    let registry = context.registry_over(&faulty, lease);
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let valid_for = guard.valid_for();
    assert!(
        valid_for <= lease - delay,
        "valid for {valid_for:?}: the lease of {lease:?} was not reduced by {delay:?}"
    );
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A waiter acquires the lock of a dead holder after its lease, although no release wakes the
/// waiter.
pub async fn a_waiter_acquires_the_lock_of_a_dead_holder(context: &TestContext) {
    let former = context.client().await;
    assert_granted(&*former, &Claim::new(key("orders:42"), context.short_lease())).await;
    let registry = context.registry().await;
    let wait = context.short_lease() * 4 + context.max_wait();
    let guard = registry.obtain("orders:42").try_lock_for(wait).await.expect("the store answers");
    guard
        .expect("the lease of the dead holder is over")
        .unlock()
        .await
        .expect("a held lock is unlocked");
}

/// When an unrenewed lease has ended and another registry, as of another process, has acquired the
/// lock, the old guard already reports that it is not held. It has no validity left.
pub async fn an_expired_guard_is_not_held_once_another_process_has_the_lock(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    for _ in 0..3 {
        let options = LockOptions::new().lease(context.short_lease()).auto_renew(false);
        let old = first.obtain("orders:42").lock_with(options).await.expect("the store answers");
        let new = second.obtain("orders:42").lock().await.expect("the old lease ends");
        assert!(!old.is_held(), "two guards are held");
        assert_eq!(old.valid_for(), Duration::ZERO);
        new.unlock().await.expect("a held lock is unlocked");
        drop(old);
        first.idle().await;
    }
}

/// The lock of a killed operating-system process becomes free after its lease. A waiter in the test
/// process then acquires it.
pub async fn the_lock_of_a_killed_process_becomes_free_after_its_lease(context: &TestContext) {
    let mut remote = context.remote(context.renewable_lease()).await;
    assert!(matches!(remote.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    remote.kill().await;
    let local = context.registry().await;
    let wait = context.renewable_lease() * 2 + context.max_wait();
    let guard = local.obtain("orders:42").try_lock_for(wait).await.expect("the store answers");
    guard
        .expect("the lease of the dead holder is over")
        .unlock()
        .await
        .expect("a held lock is unlocked");
}

/// An operating-system process is paused (SIGSTOP) for longer than its lease, and then resumed. It
/// reports that it does not hold the lock, and its unlock fails. The successor keeps the lock.
pub async fn a_stopped_process_detects_its_loss_and_does_not_affect_its_successor(
    context: &TestContext,
) {
    let mut remote = context.remote(context.renewable_lease()).await;
    assert!(matches!(remote.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    remote.pause().await;
    let local = context.registry().await;
    let wait = context.renewable_lease() * 2 + context.max_wait();
    let guard = local.obtain("orders:42").try_lock_for(wait).await.expect("the store answers");
    let guard = guard.expect("the lease of the stopped process is over");
    remote.resume().await;
    assert!(!remote.is_held("orders:42").await, "the resumed process did not detect its loss");
    assert!(!remote.unlock("orders:42").await, "the unlock of a lost lock succeeded");
    assert!(guard.is_held(), "the successor lost its lock");
    let third = context.registry().await;
    assert!(third.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    guard.unlock().await.expect("a held lock is unlocked");
}
