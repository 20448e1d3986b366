//! A release frees a key at once, and only the claim that holds the key can release it.

use registry_core::{Claim, LockError, LockOptions, LockRegistryExt as _, Release};

use crate::context::{
    TestContext, assert_busy, assert_freed, assert_granted, is_free, key, release, unlock,
};
use crate::faulty::{Fault, Faults, Operation};

/// Another client can acquire a released key as soon as the release is answered.
pub async fn a_released_key_is_free_at_once(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    for _ in 0..10 {
        let claim = context.acquire_with_lease(&*first, context.long_lease()).await;
        assert_freed(&*first, &claim).await;
        let next = context.acquire_with_lease(&*second, context.long_lease()).await;
        assert_freed(&*second, &next).await;
    }
}

/// Releasing a claim again returns `NotHeld` and leaves the key free. The engine repeats a release
/// whose reply was lost.
pub async fn a_repeated_release_returns_not_held(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_eq!(release(&*client, &claim).await, Release::Freed);
    for _ in 0..3 {
        assert_eq!(release(&*client, &claim).await, Release::NotHeld);
    }
    assert!(is_free(&*client, claim.key()).await);
}

/// Of eight concurrent releases of one claim, at most one returns `Freed`, and the key is free
/// afterwards. In a quorum, it is possible that none returns `Freed`, because each server may
/// process a different release first.
pub async fn of_concurrent_repetitions_of_one_release_at_most_one_frees(context: &TestContext) {
    let clients = [context.client().await, context.client().await];
    let claim = Claim::new(key("orders:42"), context.long_lease());
    assert_granted(&*clients[0], &claim).await;
    let releases = (0..8).map(|n| release(&*clients[n % 2], &claim));
    let answers = futures_util::future::join_all(releases).await;
    let done = answers.iter().filter(|answer| **answer == Release::Freed).count();
    assert!(done <= 1, "{answers:?}");
    assert!(is_free(&*clients[0], claim.key()).await);
}

/// Releasing a claim that was never granted returns `NotHeld`, and the claim can still be acquired.
/// A release may overtake its own acquire.
pub async fn releasing_a_claim_that_was_never_granted_returns_not_held(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    assert_eq!(release(&*client, &claim).await, Release::NotHeld);
    assert_granted(&*client, &claim).await;
    assert_freed(&*client, &claim).await;
}

/// Releasing a claim that does not hold the key returns `NotHeld`, through each client, and leaves
/// the key held.
pub async fn releasing_another_claim_does_not_free_the_key(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let holder = context.acquire_with_lease(&*first, context.long_lease()).await;
    let other_claim = Claim::new(key("orders:42"), context.long_lease());
    assert_eq!(release(&*second, &other_claim).await, Release::NotHeld);
    assert_eq!(release(&*first, &other_claim).await, Release::NotHeld);
    assert_busy(&*second, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*first, &holder).await;
}

/// Repeating the release of an old claim returns `NotHeld` and does not free the key of its
/// successor.
pub async fn a_late_release_does_not_free_the_successor(context: &TestContext) {
    let client = context.client().await;
    let old = Claim::new(key("orders:42"), context.long_lease());
    let new = Claim::new(key("orders:42"), context.long_lease());
    assert_granted(&*client, &old).await;
    assert_freed(&*client, &old).await;
    assert_granted(&*client, &new).await;
    assert_eq!(release(&*client, &old).await, Release::NotHeld);
    assert_busy(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*client, &new).await;
}

/// Releasing a claim's id under another key returns `NotHeld` and leaves the claim's own key held.
pub async fn a_release_under_another_key_frees_nothing(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    let other_key = Claim::new(key("orders:43"), context.long_lease()).with_id(claim.id());
    assert_eq!(release(&*client, &other_key).await, Release::NotHeld);
    assert_busy(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*client, &claim).await;
}

/// A grant can be released through another client, with its key and claim id alone. The lease and
/// the token block of the release may differ from those of the acquire.
pub async fn a_grant_is_released_through_another_client(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let claim = context.acquire_with_lease(&*first, context.long_lease()).await;
    // In a release, the engine sends the number of used tokens, and the lease of the acquire even
    // after an extension.
    assert_freed(&*second, &claim.clone().with_lease(context.short_lease()).with_token_block(7))
        .await;
    assert!(is_free(&*first, claim.key()).await);
}

/// A claim that is granted again after its release can be released again. An acquire may arrive
/// after its own release.
pub async fn a_claim_that_was_granted_after_its_release_is_released_again(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_freed(&*client, &claim).await;
    assert_granted(&*client, &claim).await;
    assert_freed(&*client, &claim).await;
    assert!(is_free(&*client, claim.key()).await);
}

/// When `unlock` has returned, `try_lock` in another process returns a guard at once.
pub async fn an_unlocked_lock_is_free_for_another_process_at_once(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await];
    for n in 0..10 {
        let guard =
            registries[n % 2].obtain("orders:42").try_lock().await.expect("the store answers");
        unlock(guard.expect("the lock was unlocked before")).await;
    }
}

/// The engine repeats a release that was refused or whose request was lost. The key is free long
/// before its lease ends.
pub async fn a_refused_release_is_retried(context: &TestContext) {
    let faults = Faults::none().at_call(Operation::Release, 1, Fault::Refuse).at_call(
        Operation::Release,
        2,
        Fault::LoseRequest,
    );
    let faulty = context.faulty(faults).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let other = context.registry().await;
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    // `unlock` may retry successfully or return the store error. In both cases the key must be free
    // long before its lease ends.
    drop(guard.unlock().await);
    context.assert_becomes_free(&other, "orders:42").await;
}

/// If the reply to a release is lost, `unlock` does not return `LockError::Lost`, although the
/// repeated release finds the claim no longer held.
pub async fn a_lost_release_reply_is_not_reported_as_a_lost_lock(context: &TestContext) {
    let faulty =
        context.faulty(Faults::none().at_call(Operation::Release, 1, Fault::LoseReply)).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    if let Err(error @ LockError::Lost { .. }) = guard.unlock().await {
        panic!("the lock was held until it was unlocked: {error:?}");
    }
    context.assert_becomes_free(&registry, "orders:42").await;
}

/// `unlock` returns an error if no release reaches the store, because it is then unknown whether
/// the lock is free.
pub async fn an_unlock_that_never_reaches_the_store_is_an_error(context: &TestContext) {
    let faulty =
        context.faulty(Faults::none().always(Operation::Release, Fault::LoseRequest)).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let guard = registry.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let answer = guard.unlock().await;
    assert!(answer.is_err(), "it is unknown whether the lock is free");
    faulty.clear_faults();
    context.assert_becomes_free(&registry, "orders:42").await;
}

/// `execute_locked` holds the lock while the work runs, and has released it when it returns.
pub async fn execute_locked_holds_the_lock_during_the_work_only(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let done = local
        .execute_locked("orders:42", async |guard| {
            assert!(guard.is_held());
            let busy = remote.obtain("orders:42").try_lock().await.expect("busy is no error");
            assert!(busy.is_none(), "the work runs without its lock");
            "done"
        })
        .await
        .expect("a free lock is acquired");
    assert_eq!(done.output, "done");
    done.unlocked.expect("a held lock is unlocked");
    let guard = remote.obtain("orders:42").try_lock().await.expect("the store answers");
    guard.expect("the work is done").unlock().await.expect("a held lock is unlocked");
}

/// `execute_locked_with` returns `Ok(None)` without running the work if the lock stays busy until
/// the deadline.
pub async fn execute_locked_with_returns_none_when_the_lock_is_busy(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = remote.obtain("orders:42").lock().await.expect("a free lock is acquired");
    let work = async |_: &_| panic!("the work runs without its lock");
    let done = local
        .execute_locked_with("orders:42", LockOptions::new().wait(context.short_lease()), work)
        .await
        .expect("busy is no error");
    assert!(done.is_none());
    guard.unlock().await.expect("a held lock is unlocked");
}

/// `execute_locked` returns both the output of the work and the error of a failed unlock.
pub async fn a_failing_unlock_does_not_hide_the_result_of_the_work(context: &TestContext) {
    let faulty = context.faulty(Faults::none().always(Operation::Release, Fault::Refuse)).await;
    let registry = context.registry_over(&faulty, context.renewable_lease());
    let done =
        registry.execute_locked("orders:42", async |_| 42).await.expect("a free lock is acquired");
    assert_eq!(done.output, 42);
    assert!(done.unlocked.is_err(), "the store refused the release");
    faulty.clear_faults();
    context.assert_becomes_free(&registry, "orders:42").await;
}

/// Unlocking a lock whose lease has expired returns `LockError::Lost`, and the successor keeps the
/// lock.
pub async fn unlocking_an_expired_lock_is_an_error_and_does_not_affect_the_successor(
    context: &TestContext,
) {
    let (first, second) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let options = LockOptions::new().lease(context.short_lease()).auto_renew(false);
    let old = first.obtain("orders:42").lock_with(options).await.expect("the store answers");
    let new = second.obtain("orders:42").lock().await.expect("the old lease ends");
    match old.unlock().await {
        Err(LockError::Lost { .. }) => {}
        other => panic!("the unlock of a lost lock returned {other:?}"),
    }
    first.idle().await;
    assert!(new.is_held());
    assert!(third.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    new.unlock().await.expect("a held lock is unlocked");
}

/// If the guard of an expired lock is dropped, the successor keeps the lock.
pub async fn dropping_an_expired_guard_does_not_affect_the_successor(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let options = LockOptions::new().lease(context.short_lease()).auto_renew(false);
    let old = first.obtain("orders:42").lock_with(options).await.expect("the store answers");
    let new = second.obtain("orders:42").lock().await.expect("the old lease ends");
    drop(old);
    first.idle().await;
    assert!(new.is_held());
    assert!(third.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    new.unlock().await.expect("a held lock is unlocked");
}
