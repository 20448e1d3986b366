//! Locks of several keys: a caller holds all of the keys or none.
#![expect(clippy::async_yields_async, reason = "each call of `make` returns a new future to sweep")]

use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{
    Attempt, BatchAttempt, Claim, Grant, LockBackend, LockRegistryExt as _, Release,
};

use crate::context::{
    TestContext, assert_busy, assert_freed, assert_granted, is_free, key, unlock,
};
use crate::faulty::{Fault, Faults, Operation};
use crate::sweep::{SweepOutcome, sweep};

const KEYS: [&str; 3] = ["orders:1", "orders:2", "orders:3"];
/// The maximum number of polls of a swept future.
const POLLS_MAX: usize = 1_000;

fn claims(context: &TestContext) -> Vec<Claim> {
    KEYS.map(|name| Claim::new(key(name), context.long_lease())).to_vec()
}

/// Acquires all claims: in one request if the store can do this, otherwise one after the other. If
/// a claim is busy, releases it and the claims before it, and returns its index.
async fn acquire_all(client: &dyn LockBackend, claims: &[Claim]) -> Result<Vec<Grant>, usize> {
    if let Some(batch) = client.batch() {
        match batch.try_acquire_all(claims).await.expect("the store answers") {
            BatchAttempt::Granted(grants) => {
                assert_eq!(grants.len(), claims.len(), "one grant for each claim");
                return Ok(grants);
            }
            BatchAttempt::Busy(index, _) => return Err(index),
            BatchAttempt::Declined => {}
        }
    }
    let mut grants = Vec::new();
    for (index, claim) in claims.iter().enumerate() {
        match client.try_acquire(claim).await.expect("the store answers") {
            Attempt::Granted(grant) => grants.push(grant),
            _ => {
                for claim in &claims[..=index] {
                    client.release(claim).await.expect("the store answers");
                }
                return Err(index);
            }
        }
    }
    Ok(grants)
}

async fn release_all(client: &dyn LockBackend, claims: &[Claim]) -> Vec<Release> {
    let released = match client.batch() {
        Some(batch) => batch.release_all(claims).await,
        None => join_all(claims.iter().map(|claim| client.release(claim))).await,
    };
    assert_eq!(released.len(), claims.len(), "one answer for each claim");
    released.into_iter().map(|released| released.expect("the store answers")).collect()
}

/// If one of several keys is held, an attempt for all keys returns the index of the busy claim. The
/// other keys are then free.
pub async fn an_attempt_with_one_busy_key_holds_none(context: &TestContext) {
    let (client, other) = (context.client().await, context.client().await);
    for (busy_index, name) in KEYS.iter().enumerate() {
        let holder = Claim::new(key(name), context.long_lease());
        assert_granted(&*other, &holder).await;
        let claims = claims(context);
        assert_eq!(acquire_all(&*client, &claims).await, Err(busy_index));
        for (index, claim) in claims.iter().enumerate() {
            assert_eq!(is_free(&*other, claim.key()).await, index != busy_index, "{claim:?}");
        }
        assert_freed(&*other, &holder).await;
    }
    let claims = claims(context);
    acquire_all(&*client, &claims).await.expect("all keys are free");
    for claim in &claims {
        assert_busy(&*other, &Claim::new(claim.key().clone(), context.long_lease())).await;
    }
    assert_eq!(release_all(&*client, &claims).await, [Release::Freed; KEYS.len()]);
}

/// A repeated attempt for several keys returns the same tokens, also through single requests, and
/// one release of each claim frees its key. The engine uses single requests to repeat an attempt
/// whose reply was lost with an idle connection.
pub async fn a_repeated_attempt_for_several_keys_has_the_same_tokens(context: &TestContext) {
    let client = context.client().await;
    let claims = claims(context);
    let tokens =
        |grants: Vec<Grant>| grants.into_iter().map(|grant| grant.token).collect::<Vec<_>>();
    let first = tokens(acquire_all(&*client, &claims).await.expect("all keys are free"));
    let again = tokens(acquire_all(&*client, &claims).await.expect("the claims hold their keys"));
    assert_eq!(first, again);
    for (claim, token) in claims.iter().zip(&first) {
        assert_eq!(assert_granted(&*client, claim).await.token, *token);
    }
    assert_freed(&*client, &claims[1]).await;
    let rest = tokens(acquire_all(&*client, &claims).await.expect("the claims hold their keys"));
    assert_eq!((rest[0], rest[2]), (first[0], first[2]));
    assert!(rest[1] > first[1], "{rest:?} after {first:?}");
    assert_eq!(release_all(&*client, &claims).await, [Release::Freed; KEYS.len()]);
    for claim in &claims {
        assert!(is_free(&*client, claim.key()).await);
    }
}

/// The tokens of attempts for several keys are larger than all earlier tokens of each key, and
/// smaller than all later ones.
pub async fn tokens_of_several_keys_increase(context: &TestContext) {
    let client = context.client().await;
    let mut last = [None; KEYS.len()];
    // In a store with a queue, a grant has one token, because no claim is handed over in a process.
    let block = if context.capabilities().fair { 1 } else { 9 };
    for _ in 0..5 {
        for with_batch in [false, true] {
            let claims: Vec<_> =
                claims(context).into_iter().map(|claim| claim.with_token_block(block)).collect();
            let grants = if with_batch {
                acquire_all(&*client, &claims).await.expect("all keys are free")
            } else {
                join_all(claims.iter().map(|claim| assert_granted(&*client, claim))).await
            };
            for (last, grant) in last.iter_mut().zip(&grants) {
                assert!(Some(grant.token) > *last, "{grant:?} after {last:?}");
                // The release reports all tokens of the block as used.
                *last = grant.token.checked_add(u64::from(block) - 1);
            }
            release_all(&*client, &claims).await;
        }
    }
}

/// A release of several claims returns the outcome of each claim. A claim that holds nothing does
/// not affect the others, and a successor keeps its key.
pub async fn claims_of_several_keys_are_released_independently(context: &TestContext) {
    let client = context.client().await;
    let claims = claims(context);
    acquire_all(&*client, &claims).await.expect("all keys are free");
    assert_freed(&*client, &claims[1]).await;
    let successor = Claim::new(claims[1].key().clone(), context.long_lease());
    assert_granted(&*client, &successor).await;
    let outcomes = [Release::Freed, Release::NotHeld, Release::Freed];
    assert_eq!(release_all(&*client, &claims).await, outcomes);
    assert_eq!(release_all(&*client, &claims).await, [Release::NotHeld; KEYS.len()]);
    assert!(is_free(&*client, claims[0].key()).await && is_free(&*client, claims[2].key()).await);
    assert_freed(&*client, &successor).await;
}

/// `obtain_all` holds all keys or none, and waits for the busy one. A store error is retried as for
/// a lock of one key.
pub async fn a_lock_of_several_keys_waits_for_the_busy_one(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let held = remote.obtain(KEYS[1]).lock().await.expect("the key is free");
    let all = local.obtain_all(KEYS);
    assert!(all.try_lock().await.expect("the store answers").is_none(), "a key is held");
    context.assert_becomes_free(&remote, KEYS[0]).await;
    context.assert_becomes_free(&remote, KEYS[2]).await;
    let waiting = tokio::spawn(async move { all.lock().await });
    unlock(held).await;
    let guard = waiting.await.expect("the task ends").expect("all keys become free");
    assert!(guard.is_held());
    guard.unlock().await.expect("held locks are unlocked");
    for name in KEYS {
        context.assert_becomes_free(&remote, name).await;
    }
    assert_failed_attempts_are_repeated(context).await;
}

async fn assert_failed_attempts_are_repeated(context: &TestContext) {
    for fault in [Fault::LoseReply, Fault::Refuse] {
        let fails_once = || Faults::none().at_call(Operation::Acquire, 1, fault);
        let faulty = context.faulty(fails_once()).await;
        let (local, remote) =
            (context.registry_over(&faulty, context.long_lease()), context.registry().await);
        let all = local.obtain_all(KEYS);
        let guard = all.lock().await.expect("the attempt is repeated");
        assert!(guard.is_held());
        guard.unlock().await.expect("held locks are unlocked");
        faulty.apply(fails_once());
        let guard = all.try_lock_for(context.max_wait()).await.expect("the attempt is repeated");
        guard.expect("the keys are free").unlock().await.expect("held locks are unlocked");
        faulty.apply(fails_once());
        let error = all.try_lock().await.expect_err("a single attempt is not repeated");
        assert!(error.is_retryable(), "{error}");
        for name in KEYS {
            context.assert_becomes_free(&remote, name).await;
        }
    }
}

/// The acquisition of several keys may be dropped at every poll while the store is slow. All keys
/// are soon free.
pub async fn a_lock_of_several_keys_may_be_dropped_at_every_poll(context: &TestContext) {
    let slow = Fault::DelayReply(Duration::from_millis(15));
    let faults = Faults::none().always(Operation::Acquire, slow).always(Operation::Release, slow);
    let faulty = context.faulty(faults).await;
    let local = context.registry_over(&faulty, context.long_lease());
    let remote = context.registry().await;
    let make = async || {
        let all = local.obtain_all(KEYS);
        async move { all.lock().await?.unlock().await }
    };
    sweep(make, POLLS_MAX, async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
            output.expect("free keys are locked and unlocked");
        }
        for name in KEYS {
            context.assert_becomes_free(&remote, name).await;
        }
        local.idle().await;
    })
    .await;
}
