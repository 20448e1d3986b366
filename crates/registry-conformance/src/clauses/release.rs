//! What is given back is free, at once and for good; and only its holder can give it back.

use registry_core::{
    Claim, LockError, LockOptions, LockRegistry as _, LockRegistryExt as _, Release,
};

use crate::faulty::{Fault, Faults, Operation};
use crate::lab::{Lab, busy, freed, granted, is_free, key, release};

/// No remainder of a lease, no pause: what was released is free when the answer is there.
pub async fn a_released_key_is_free_at_once(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    for _ in 0..10 {
        let claim = Claim::new(key("orders:42"), lab.long());
        granted(&*first, &claim).await;
        freed(&*first, &claim).await;
        let next = Claim::new(key("orders:42"), lab.long());
        granted(&*second, &next).await;
        freed(&*second, &next).await;
    }
}

/// A release may be repeated at will, since its reply may have been lost.
pub async fn a_repeated_release_is_harmless(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &claim).await;
    assert_eq!(release(&*client, &claim).await, Release::Freed);
    for _ in 0..3 {
        assert_eq!(release(&*client, &claim).await, Release::NotHeld);
    }
    assert!(is_free(&*client, claim.key()).await);
}

/// Of many releases at once no two did it. That one of them did is not promised: several stores that must agree may each have been
/// reached by another one first.
pub async fn repetitions_of_one_release_at_once_free_once(lab: &Lab) {
    let clients = [lab.client().await, lab.client().await];
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*clients[0], &claim).await;
    let releases = (0..8).map(|n| release(&*clients[n % 2], &claim));
    let answers = futures_util::future::join_all(releases).await;
    let done = answers.iter().filter(|answer| **answer == Release::Freed).count();
    assert!(done <= 1, "{answers:?}");
    assert!(is_free(&*clients[0], claim.key()).await);
}

/// A release may overtake its own acquire: it has to be answered without harm.
pub async fn releasing_what_was_never_granted_is_harmless(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.long());
    assert_eq!(release(&*client, &claim).await, Release::NotHeld);
    granted(&*client, &claim).await;
    freed(&*client, &claim).await;
}

/// Release is by owner. A stranger's frees nothing.
pub async fn releasing_anothers_grant_does_not_free_it(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    let holder = Claim::new(key("orders:42"), lab.long());
    granted(&*first, &holder).await;
    let stranger = Claim::new(key("orders:42"), lab.long());
    assert_eq!(release(&*second, &stranger).await, Release::NotHeld);
    assert_eq!(release(&*first, &stranger).await, Release::NotHeld);
    busy(&*second, &Claim::new(key("orders:42"), lab.long())).await;
    freed(&*first, &holder).await;
}

/// A release that arrives late must not hit whoever holds by then.
pub async fn a_late_release_does_not_free_the_successor(lab: &Lab) {
    let client = lab.client().await;
    let old = Claim::new(key("orders:42"), lab.long());
    let new = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &old).await;
    freed(&*client, &old).await;
    granted(&*client, &new).await;
    assert_eq!(release(&*client, &old).await, Release::NotHeld);
    busy(&*client, &Claim::new(key("orders:42"), lab.long())).await;
    freed(&*client, &new).await;
}

/// The same key, another key: a claim's id frees only under its own key.
pub async fn a_release_under_another_key_frees_nothing(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &claim).await;
    let elsewhere = Claim::new(key("orders:43"), lab.long()).with_id(claim.id());
    assert_eq!(release(&*client, &elsewhere).await, Release::NotHeld);
    busy(&*client, &Claim::new(key("orders:42"), lab.long())).await;
    freed(&*client, &claim).await;
}

/// Release needs the claim and nothing else: no connection, no memory of the acquire.
pub async fn a_grant_is_released_through_another_client(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*first, &claim).await;
    // What the engine knows when it cleans up is the claim as it was made, not what came of it.
    freed(&*second, &claim.clone().with_lease(lab.short()).with_token_block(7)).await;
    assert!(is_free(&*first, claim.key()).await);
}

/// An acquire that arrives after its own release is cleaned up by the same release, repeated.
pub async fn a_claim_that_was_granted_after_its_release_is_released_again(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &claim).await;
    freed(&*client, &claim).await;
    granted(&*client, &claim).await;
    freed(&*client, &claim).await;
    assert!(is_free(&*client, claim.key()).await);
}

/// Unlocking is over when it says so: nobody has to wait for anything after it.
pub async fn an_unlocked_lock_is_free_for_all_at_once(lab: &Lab) {
    let registries = [lab.registry().await, lab.registry().await];
    for n in 0..10 {
        let guard = registries[n % 2].obtain("orders:42").try_lock().await.expect("no trouble");
        let guard = guard.expect("the lock was unlocked before");
        guard.unlock().await.expect("a held lock is unlocked");
    }
}

/// A store that was away for a moment gets the release a little later.
pub async fn a_refused_release_is_made_again(lab: &Lab) {
    let faults = Faults::none().at(Operation::Release, 1, Fault::Refuse).at(
        Operation::Release,
        2,
        Fault::LoseRequest,
    );
    let faulty = lab.faulty(faults).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let other = lab.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    // Whether unlock bears the trouble or reports it, the key must become free long before its lease is over.
    drop(guard.unlock().await);
    lab.free_soon(&other, "orders:42").await;
}

/// A release whose reply was lost is repeated, and "not held any more" is then no loss.
pub async fn a_lost_release_reply_is_not_taken_for_a_lost_lock(lab: &Lab) {
    let faulty = lab.faulty(Faults::none().at(Operation::Release, 1, Fault::LoseReply)).await;
    let registry = lab.registry_over(&faulty, lab.long());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    if let Err(error @ LockError::Lost { .. }) = guard.unlock().await {
        panic!("the lock was held until it was unlocked: {error:?}");
    }
    lab.free_soon(&registry, "orders:42").await;
}

/// Unknown is never reported as success: as long as the store has not answered, the lock is not known to be free.
pub async fn an_unlock_that_never_reaches_the_store_is_an_error(lab: &Lab) {
    let faulty = lab.faulty(Faults::none().always(Operation::Release, Fault::LoseRequest)).await;
    let registry = lab.registry_over(&faulty, lab.renewed());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is had");
    let answer = guard.unlock().await;
    assert!(answer.is_err(), "nobody knows whether the lock is free");
    faulty.heal();
    lab.free_soon(&registry, "orders:42").await;
}

/// The lock is held for exactly as long as the work lasts.
pub async fn execute_locked_holds_the_lock_during_the_work_only(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let done = here
        .execute_locked("orders:42", async |guard| {
            assert!(guard.is_held());
            let busy = there.obtain("orders:42").try_lock().await.expect("busy is no error");
            assert!(busy.is_none(), "the work runs without its lock");
            "done"
        })
        .await
        .expect("a free lock is had");
    assert_eq!(done.output, "done");
    done.unlocked.expect("a held lock is unlocked");
    let guard = there.obtain("orders:42").try_lock().await.expect("no trouble");
    guard.expect("the work is done").unlock().await.expect("a held lock is unlocked");
}

/// A busy lock means that the work did not run.
pub async fn execute_locked_for_gives_none_when_the_lock_is_busy(lab: &Lab) {
    let (here, there) = (lab.registry().await, lab.registry().await);
    let guard = there.obtain("orders:42").lock().await.expect("a free lock is had");
    let work = async |_: &_| panic!("the work runs without its lock");
    let done =
        here.execute_locked_for("orders:42", lab.short(), work).await.expect("busy is no error");
    assert!(done.is_none());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// The work's result and the trouble of unlocking are both told.
pub async fn a_failing_unlock_does_not_hide_the_result_of_the_work(lab: &Lab) {
    let faulty = lab.faulty(Faults::none().always(Operation::Release, Fault::Refuse)).await;
    let registry = lab.registry_over(&faulty, lab.renewed());
    let done =
        registry.execute_locked("orders:42", async |_| 42).await.expect("a free lock is had");
    assert_eq!(done.output, 42);
    assert!(done.unlocked.is_err(), "the store refused the release");
    faulty.heal();
    lab.free_soon(&registry, "orders:42").await;
}

/// What was lost cannot be unlocked, and whoever holds by then is left alone.
pub async fn unlocking_an_expired_lock_is_an_error_and_leaves_the_successor_alone(lab: &Lab) {
    let (first, second) = (lab.registry().await, lab.registry().await);
    let third = lab.registry().await;
    let options = LockOptions::new().lease(lab.short()).renew(false);
    let old = first.obtain("orders:42").lock_with(options).await.expect("no trouble");
    let old = old.expect("without a wait there is always a guard");
    let new = second.obtain("orders:42").lock().await.expect("the old lease ends");
    match old.unlock().await {
        Err(LockError::Lost { .. }) => {}
        other => panic!("what was lost is unlocked: {other:?}"),
    }
    first.idle().await;
    assert!(new.is_held());
    assert!(third.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    new.unlock().await.expect("a held lock is unlocked");
}

/// The same when the expired guard is simply dropped.
pub async fn dropping_an_expired_guard_leaves_the_successor_alone(lab: &Lab) {
    let (first, second) = (lab.registry().await, lab.registry().await);
    let third = lab.registry().await;
    let options = LockOptions::new().lease(lab.short()).renew(false);
    let old = first.obtain("orders:42").lock_with(options).await.expect("no trouble");
    let new = second.obtain("orders:42").lock().await.expect("the old lease ends");
    drop(old);
    first.idle().await;
    assert!(new.is_held());
    assert!(third.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    new.unlock().await.expect("a held lock is unlocked");
}
