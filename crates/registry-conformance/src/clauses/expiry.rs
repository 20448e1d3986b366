//! Leases end, on the store's clock alone, and nobody is left behind a dead holder.

use std::time::Duration;

use registry_core::{Attempt, Claim, LockOptions, LockRegistry as _, Release, Renewal};
use tokio::time::Instant;

use crate::faulty::{Fault, Faults, Operation};
use crate::harness::RemoteLock;
use crate::lab::{Lab, attempt, busy, freed, granted, key, release, renew};

/// A holder that died does not hold for ever.
pub async fn a_grant_ends_with_its_lease(lab: &Lab) {
    let (dead, heir) = (lab.client().await, lab.client().await);
    granted(&*dead, &Claim::new(key("orders:42"), lab.short())).await;
    let claim = Claim::new(key("orders:42"), lab.long());
    lab.granted_at_last(&*heir, &claim).await;
    freed(&*heir, &claim).await;
}

/// The holder works until its lease is over; so nobody may be let in before.
pub async fn a_grant_does_not_end_before_its_lease(lab: &Lab) {
    let client = lab.client().await;
    for _ in 0..3 {
        let claim = Claim::new(key("orders:42"), lab.short());
        let before = Instant::now();
        let grant = granted(&*client, &claim).await;
        let heir = Claim::new(key("orders:42"), lab.long());
        lab.granted_at_last(&*client, &heir).await;
        // Counted from before the request: the store's lease cannot have begun earlier. Less what the engine's own
        // margin allows for clocks that run at different rates.
        let least = grant.lease - grant.lease / 100 - Duration::from_millis(2);
        let lasted = before.elapsed();
        assert!(lasted >= least, "told to last {:?}, it lasted {lasted:?}", grant.lease);
        freed(&*client, &heir).await;
    }
}

/// Those who are refused must not keep a dead holder alive.
pub async fn failed_attempts_do_not_prolong_the_holders_lease(lab: &Lab) {
    let client = lab.client().await;
    granted(&*client, &Claim::new(key("orders:42"), lab.short())).await;
    let until = Instant::now() + lab.short() * 4 + lab.patience();
    let heir = Claim::new(key("orders:42"), lab.long());
    // Without a pause between them: at no time is the last attempt longer ago than a lease.
    while let Attempt::Busy(_) = attempt(&*client, &heir).await {
        assert!(Instant::now() < until, "asking keeps a dead holder alive");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    freed(&*client, &heir).await;
}

/// The right of a holder whose lease is over has passed to its successor, whole.
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

/// A busy store that says when to come back must not send waiters away beyond the lease.
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

/// A guard never believes in more time than the store gave.
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

/// A lease counts from before the request: however slow the reply, the holder knows of its end first.
pub async fn a_slow_reply_shortens_what_the_guard_believes(lab: &Lab) {
    // Longer than the margin for clocks at different rates, so that the margin does not hide what is missing.
    let (lease, slow) = (lab.renewed() * 10, lab.renewed() / 3);
    let late = Fault::DelayReply(slow);
    let faulty = lab.faulty(Faults::none().at(Operation::Acquire, 1, late)).await;
    let registry = lab.registry_over(&faulty, lease);
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    assert!(guard.valid_for() <= lease - slow, "{:?} is left of {lease:?}", guard.valid_for());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// Those who wait get a dead holder's lock, though nobody is left who could wake them.
pub async fn a_waiter_gets_a_dead_holders_lock(lab: &Lab) {
    let dead = lab.client().await;
    granted(&*dead, &Claim::new(key("orders:42"), lab.short())).await;
    let registry = lab.registry().await;
    let wait = lab.short() * 4 + lab.patience();
    let guard = registry.obtain("orders:42").try_lock_for(wait).await.expect("no trouble");
    guard.expect("the lease of the dead is over").unlock().await.expect("a held lock is unlocked");
}

/// At most one of two believes that it holds: the old holder stops believing before the new one can begin.
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

/// A real other process dies without a word.
pub async fn a_killed_process_holds_no_longer_than_its_lease(lab: &Lab) {
    let mut there = lab.remote(lab.renewed()).await;
    assert!(matches!(there.lock("orders:42", Duration::ZERO).await, RemoteLock::Held { .. }));
    there.kill().await;
    let here = lab.registry().await;
    let wait = lab.renewed() * 2 + lab.patience();
    let guard = here.obtain("orders:42").try_lock_for(wait).await.expect("no trouble");
    guard.expect("the lease of the dead is over").unlock().await.expect("a held lock is unlocked");
}

/// A real other process is stopped beyond its lease. When it goes on it knows, and its successor never notices.
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
