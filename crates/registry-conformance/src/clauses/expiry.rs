//! A grant ends with its lease, on the store's clock, and a waiter can then acquire the key.

use std::time::Duration;

use registry_core::{Attempt, Claim, LockOptions, LockRegistry as _, Release, Renewal};
use tokio::time::Instant;

use crate::faulty::{Fault, Faults, Operation};
use crate::harness::RemoteLock;
use crate::lab::{Lab, attempt, busy, freed, granted, key, release, renew};

/// A grant that is neither renewed nor released ends, so that a claim of another client is granted.
pub async fn a_grant_ends_with_its_lease(lab: &Lab) {
    let (dead, heir) = (lab.client().await, lab.client().await);
    granted(&*dead, &Claim::new(key("orders:42"), lab.short())).await;
    let claim = Claim::new(key("orders:42"), lab.long());
    lab.granted_at_last(&*heir, &claim).await;
    freed(&*heir, &claim).await;
}

/// A grant lasts at least as long as the lease that the store returned, because its holder works
/// for that time. The clause allows 1 % and 2 ms less, which is the margin of the engine for clock
/// rates.
pub async fn a_grant_does_not_end_before_its_lease(lab: &Lab) {
    let client = lab.client().await;
    for _ in 0..3 {
        let claim = Claim::new(key("orders:42"), lab.short());
        let before = Instant::now();
        let grant = granted(&*client, &claim).await;
        let heir = Claim::new(key("orders:42"), lab.long());
        lab.granted_at_last(&*client, &heir).await;
        // Counted from before the request, because the store's lease cannot have begun earlier. The
        // engine's margin allows for clocks that run at different rates.
        let least = grant.lease - grant.lease / 100 - Duration::from_millis(2);
        let lasted = before.elapsed();
        assert!(lasted >= least, "told to last {:?}, it lasted {lasted:?}", grant.lease);
        freed(&*client, &heir).await;
    }
}

/// Busy attempts of another claim do not extend the holder's lease.
pub async fn failed_attempts_do_not_prolong_the_holders_lease(lab: &Lab) {
    let client = lab.client().await;
    granted(&*client, &Claim::new(key("orders:42"), lab.short())).await;
    let until = Instant::now() + lab.short() * 4 + lab.patience();
    let heir = Claim::new(key("orders:42"), lab.long());
    // The pause is so short that the grant would never end if an attempt extended its lease.
    while let Attempt::Busy(_) = attempt(&*client, &heir).await {
        assert!(Instant::now() < until, "asking keeps a dead holder alive");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    freed(&*client, &heir).await;
}

/// Once its successor holds the key, an expired claim cannot renew, release or acquire it. The
/// successor's grant is unaffected.
pub async fn an_expired_claim_is_powerless_against_its_successor(lab: &Lab) {
    let (dead, heir) = (lab.client().await, lab.client().await);
    let expired = Claim::new(key("orders:42"), lab.short());
    granted(&*dead, &expired).await;
    let claim = Claim::new(key("orders:42"), lab.long());
    lab.granted_at_last(&*heir, &claim).await;
    assert_eq!(renew(&*dead, &expired).await, Renewal::Gone);
    assert_eq!(release(&*dead, &expired).await, Release::NotHeld);
    busy(&*dead, &expired).await;
    assert!(
        matches!(renew(&*heir, &claim).await, Renewal::Renewed(_)),
        "the successor is untouched"
    );
    freed(&*heir, &claim).await;
}

/// `retry_after` of a busy answer is at most the holder's lease plus one second.
pub async fn a_busy_reply_never_tells_more_time_than_the_lease(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.short());
    granted(&*client, &claim).await;
    if let Attempt::Busy(refusal) =
        attempt(&*client, &Claim::new(key("orders:42"), lab.long())).await
    {
        let told = refusal.retry_after.unwrap_or_default();
        assert!(
            told <= lab.short() + Duration::from_secs(1),
            "{refusal:?} of a lease of {:?}",
            lab.short()
        );
    }
    release(&*client, &claim).await;
}

/// `valid_for` of a new guard is shorter than its lease.
pub async fn a_guard_is_valid_for_less_than_its_lease(lab: &Lab) {
    let registry = lab.registry().await;
    for lease in [lab.renewed(), lab.long()] {
        let options = LockOptions::new().lease(lease);
        let guard = registry.obtain("orders:42").lock_with(options).await.expect("no trouble");
        let guard = guard.expect("without a wait there is always a guard");
        assert!(guard.valid_for() < lease, "{:?} of a lease of {lease:?}", guard.valid_for());
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// The validity of a guard counts from before the request. A delayed reply shortens it by at least
/// the delay, so that the holder stops before the store's lease ends.
pub async fn a_slow_reply_shortens_what_the_guard_believes(lab: &Lab) {
    // The delay exceeds the margin for clock rates, so that the margin cannot hide a missing
    // deduction.
    let (lease, slow) = (lab.renewed() * 10, lab.renewed() / 3);
    let late = Fault::DelayReply(slow);
    let faulty = lab.faulty(Faults::none().at(Operation::Acquire, 1, late)).await;
    let registry = lab.registry_over(&faulty, lease);
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    assert!(guard.valid_for() <= lease - slow, "{:?} is left of {lease:?}", guard.valid_for());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// A waiter acquires the lock of a dead holder after its lease, although no release wakes the
/// waiter.
pub async fn a_waiter_gets_a_dead_holders_lock(lab: &Lab) {
    let dead = lab.client().await;
    granted(&*dead, &Claim::new(key("orders:42"), lab.short())).await;
    let registry = lab.registry().await;
    let wait = lab.short() * 4 + lab.patience();
    let guard = registry.obtain("orders:42").try_lock_for(wait).await.expect("no trouble");
    guard.expect("the lease of the dead is over").unlock().await.expect("a held lock is unlocked");
}

/// When another process has acquired the lock after an unrenewed lease, the old guard already
/// reports that it is not held. It has no validity left.
pub async fn a_holder_knows_of_its_end_before_anybody_else_can_have_the_lock(lab: &Lab) {
    let (first, second) = (lab.registry().await, lab.registry().await);
    for _ in 0..3 {
        let options = LockOptions::new().lease(lab.short()).renew(false);
        let old = first.obtain("orders:42").lock_with(options).await.expect("no trouble");
        let old = old.expect("without a wait there is always a guard");
        let new = second.obtain("orders:42").lock().await.expect("the old lease ends");
        assert!(!old.is_held(), "two believe that they hold");
        assert_eq!(old.valid_for(), Duration::ZERO);
        new.unlock().await.expect("a held lock is unlocked");
        drop(old);
        first.idle().await;
    }
}

/// The lock of a killed operating-system process becomes free after its lease, and a waiter here
/// acquires it.
pub async fn a_killed_process_holds_no_longer_than_its_lease(lab: &Lab) {
    let mut there = lab.remote(lab.renewed()).await;
    assert!(matches!(there.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    there.kill().await;
    let here = lab.registry().await;
    let wait = lab.renewed() * 2 + lab.patience();
    let guard = here.obtain("orders:42").try_lock_for(wait).await.expect("no trouble");
    guard.expect("the lease of the dead is over").unlock().await.expect("a held lock is unlocked");
}

/// An operating-system process that is stopped beyond its lease and then continued reports that it
/// does not hold the lock, and its unlock fails. The successor keeps the lock.
pub async fn a_stopped_process_finds_out_and_leaves_its_successor_alone(lab: &Lab) {
    let mut there = lab.remote(lab.renewed()).await;
    assert!(matches!(there.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    there.stop().await;
    let here = lab.registry().await;
    let wait = lab.renewed() * 2 + lab.patience();
    let guard = here.obtain("orders:42").try_lock_for(wait).await.expect("no trouble");
    let guard = guard.expect("the lease of the stopped is over");
    there.cont().await;
    assert!(!there.is_held("orders:42").await, "it went on and believed that it held");
    assert!(!there.unlock("orders:42").await, "what was lost is not unlocked");
    assert!(guard.is_held(), "the successor was disturbed");
    let third = lab.registry().await;
    assert!(third.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    guard.unlock().await.expect("a held lock is unlocked");
}
