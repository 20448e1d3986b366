//! Upgradable locks and conversions: the mode of a held lock changes, and the lock stays held.
#![expect(clippy::async_yields_async, reason = "each call of `make` returns a new future to sweep")]

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use futures_util::poll;
use registry_core::{
    Attempt, Busy, Claim, ClaimMode, Grant, LockBackend, LockError, LockGuard, LockOptions,
    LostReason, Owner, Queueing, Registry, Release, Renewal,
};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::context::{
    CriticalSection, TestContext, admin, assert_busy, assert_freed, assert_granted, assert_renewed,
    attempt, is_free, key, release, renew, unlock,
};
use crate::faulty::{Fault, Faults, Operation};
use crate::sweep::{SweepOutcome, sweep};

/// One upgradable claim holds a key next to readers of the same client and of others, in any order
/// of arrival.
pub async fn an_upgradable_claim_holds_next_to_readers(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let before = context.acquire_in(&*first, ClaimMode::Shared).await;
    let upgradable = context.acquire_in(&*second, ClaimMode::Upgradable).await;
    let after = context.acquire_in(&*first, ClaimMode::Shared).await;
    let same_client = context.acquire_in(&*second, ClaimMode::Shared).await;
    for (client, claim) in
        [(&first, before), (&second, upgradable.clone()), (&first, after), (&second, same_client)]
    {
        assert_freed(&**client, &claim).await;
    }
    assert!(is_free(&*first, upgradable.key()).await, "a released claim holds the key");
}

/// While an upgradable claim holds a key, other upgradable and exclusive claims are busy. An
/// exclusive claim excludes an upgradable one.
pub async fn an_upgradable_claim_excludes_writers_and_a_second_one(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let upgradable = context.acquire_in(&*first, ClaimMode::Upgradable).await;
    for mode in [ClaimMode::Upgradable, ClaimMode::Exclusive] {
        for client in [&first, &second] {
            assert_busy(&**client, &context.claim(mode)).await;
        }
    }
    assert_freed(&*first, &upgradable).await;
    let writer = context.acquire_in(&*second, ClaimMode::Exclusive).await;
    assert_busy(&*first, &context.claim(ClaimMode::Upgradable)).await;
    assert_freed(&*second, &writer).await;
    let next = context.acquire_in(&*first, ClaimMode::Upgradable).await;
    assert_freed(&*first, &next).await;
}

/// Of many concurrent upgradable claims of three clients, the store grants exactly one.
pub async fn of_many_concurrent_upgradable_claims_exactly_one_is_granted(context: &TestContext) {
    let clients = [context.client().await, context.client().await, context.client().await];
    for round in 0..5 {
        let mut tasks = JoinSet::new();
        for n in 0..12 {
            let client = Arc::clone(&clients[n % 3]);
            let claim = context.claim(ClaimMode::Upgradable);
            tasks.spawn(async move {
                let is_granted = matches!(attempt(&*client, &claim).await, Attempt::Granted(_));
                is_granted.then_some((client, claim))
            });
        }
        let winners: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
        assert_eq!(winners.len(), 1, "winners of round {round}: {winners:?}");
        assert_freed(&*winners[0].0, &winners[0].1).await;
    }
}

/// An upgrade is busy while readers hold the key, and blocks new readers. It is granted after the
/// last reader released the key, and then excludes all other claims.
pub async fn an_upgrade_waits_for_readers_and_blocks_new_ones(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
    let (claim, grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let next = context.acquire_in(&*second, ClaimMode::Shared).await;
    let upgrade = conversion(&claim, grant, ClaimMode::Exclusive);
    assert_busy(&*first, &upgrade).await;
    for client in [&first, &second] {
        assert_busy(&**client, &context.claim(ClaimMode::Shared)).await;
    }
    assert_freed(&*second, &next).await;
    assert_busy(&*first, &upgrade).await;
    assert_granted(&*second, &reader).await;
    assert_freed(&*second, &reader).await;
    assert_busy(&*second, &context.claim(ClaimMode::Shared)).await;
    assert_granted(&*first, &upgrade).await;
    for mode in [ClaimMode::Shared, ClaimMode::Upgradable, ClaimMode::Exclusive] {
        assert_busy(&*second, &context.claim(mode)).await;
    }
    assert_freed(&*first, &claim).await;
    assert!(is_free(&*second, claim.key()).await, "a released claim holds the key");
}

/// The upgrade of an upgradable claim without readers is granted at once.
pub async fn an_upgrade_without_readers_is_granted_at_once(context: &TestContext) {
    let client = context.client().await;
    let (claim, grant) = acquire_upgradable_claim(context, &*client, context.long_lease()).await;
    assert_granted(&*client, &conversion(&claim, grant, ClaimMode::Exclusive)).await;
    assert_busy(&*client, &context.claim(ClaimMode::Exclusive)).await;
    assert_renewed(&*client, &claim).await;
    assert_freed(&*client, &claim).await;
    assert!(is_free(&*client, claim.key()).await, "a released claim holds the key");
}

/// An upgrade is granted while another claim waits for the key; otherwise the two would deadlock.
/// The waiting claim is granted after the release, with a larger token, even if it began to wait
/// before a downgrade of the holder.
pub async fn an_upgrade_does_not_wait_for_a_waiting_writer(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let queueing =
        if context.capabilities().fair { Queueing::Join } else { Queueing::ExclusiveIntent };
    let modes = [ClaimMode::Exclusive, ClaimMode::Upgradable];
    for (held, mode) in modes.into_iter().flat_map(|held| modes.map(|mode| (held, mode))) {
        let claim = context.claim(held);
        let mut grant = assert_granted(&*first, &claim).await;
        let waiting = context.claim(mode).with_queueing(queueing);
        assert_busy(&*second, &waiting).await;
        if held == ClaimMode::Exclusive {
            grant =
                assert_granted(&*first, &conversion(&claim, grant, ClaimMode::Upgradable)).await;
            assert_busy(&*second, &waiting).await;
        }
        let upgraded =
            assert_granted(&*first, &conversion(&claim, grant, ClaimMode::Exclusive)).await;
        assert_busy(&*second, &waiting).await;
        assert_freed(&*first, &claim).await;
        let next = assert_granted(&*second, &waiting).await;
        assert!(
            !context.capabilities().fencing || next.token > upgraded.token,
            "{mode} behind {held}: {next:?} after {upgraded:?}"
        );
        let again = assert_granted(&*second, &waiting).await;
        assert!(!context.capabilities().fencing || again.token == next.token, "{again:?}");
        assert_freed(&*second, &waiting).await;
    }
}

/// The token of an upgrade is larger than those of the claim and of all readers before it. A later
/// claim has a larger token than all tokens that the upgrade reserved.
pub async fn an_upgraded_claim_has_a_larger_token(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let (claim, grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let block = if context.capabilities().fair { 1 } else { 5 };
    let reader = context.claim(ClaimMode::Shared).with_token_block(block);
    let reader_token = assert_granted(&*second, &reader).await.token;
    assert!(reader_token > grant.token, "{reader_token:?} after {grant:?}");
    assert_freed(&*second, &reader).await;
    let upgrade = conversion(&claim, grant, ClaimMode::Exclusive).with_token_block(block);
    let upgraded = assert_granted(&*first, &upgrade).await;
    assert!(
        upgraded.token.get() >= reader_token.get() + u64::from(block),
        "{upgraded:?} after {reader_token:?}"
    );
    assert_freed(&*first, &upgrade).await;
    let next_claim = context.claim(ClaimMode::Exclusive);
    let next = assert_granted(&*second, &next_claim).await;
    assert!(
        next.token.get() >= upgraded.token.get() + u64::from(block),
        "{next:?} after {upgraded:?}"
    );
    assert_freed(&*second, &next_claim).await;
    assert_larger_than_token_of_waiting_reader(context).await;
}

/// Asserts that an upgrade has a larger token than a reader that waited behind a writer while the
/// upgrade waited. In a store with a queue, the reader is granted when the writer leaves.
async fn assert_larger_than_token_of_waiting_reader(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let [for_writer, for_reader] = if context.capabilities().fair {
        [Queueing::Join; 2]
    } else {
        [Queueing::ExclusiveIntent, Queueing::Skip]
    };
    let (claim, grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let holding = context.acquire_in(&*second, ClaimMode::Shared).await;
    let writer = context.claim(ClaimMode::Exclusive).with_queueing(for_writer);
    assert_busy(&*second, &writer).await;
    let reader = context.claim(ClaimMode::Shared).with_queueing(for_reader);
    assert_busy(&*second, &reader).await;
    let upgrade = conversion(&claim, grant, ClaimMode::Exclusive);
    assert_busy(&*first, &upgrade).await;
    release(&*second, &writer).await;
    let reader_token = match attempt(&*second, &reader).await {
        Attempt::Granted(grant) => Some(grant.token),
        _ => None,
    };
    release(&*second, &reader).await;
    assert_freed(&*second, &holding).await;
    let upgraded = assert_granted(&*first, &upgrade).await;
    assert!(Some(upgraded.token) > reader_token, "{upgraded:?} after {reader_token:?}");
    assert_freed(&*first, &upgrade).await;
}

/// A repeated upgrade is granted again with the same token, as after a lost reply. One release
/// frees the key.
pub async fn a_repeated_upgrade_is_one_conversion(context: &TestContext) {
    let client = context.client().await;
    let (claim, grant) = acquire_upgradable_claim(context, &*client, context.long_lease()).await;
    let upgrade = conversion(&claim, grant, ClaimMode::Exclusive);
    let first = assert_granted(&*client, &upgrade).await;
    for _ in 0..2 {
        let again = assert_granted(&*client, &upgrade).await;
        assert!(!context.capabilities().fencing || again.token == first.token, "{again:?}");
    }
    assert_freed(&*client, &claim).await;
    assert_eq!(release(&*client, &claim).await, Release::NotHeld);
    assert!(is_free(&*client, claim.key()).await, "a released claim holds the key");
}

/// A repeated downgrade is granted again with the same token, and one release frees the key.
pub async fn a_repeated_downgrade_is_one_conversion(context: &TestContext) {
    let client = context.client().await;
    for to in [ClaimMode::Upgradable, ClaimMode::Shared] {
        let claim = context.claim(ClaimMode::Exclusive);
        let grant = assert_granted(&*client, &claim).await;
        for _ in 0..3 {
            let again = assert_granted(&*client, &conversion(&claim, grant, to)).await;
            assert!(!context.capabilities().fencing || again.token == grant.token, "{again:?}");
        }
        assert_busy(&*client, &context.claim(ClaimMode::Exclusive)).await;
        assert_freed(&*client, &claim).await;
        assert_eq!(release(&*client, &claim).await, Release::NotHeld);
        assert!(is_free(&*client, claim.key()).await, "a released claim holds the key");
    }
}

/// A conversion of a claim that was released, has expired, or was never granted returns `Gone` and
/// grants nothing.
pub async fn a_conversion_of_an_ended_claim_grants_nothing(context: &TestContext) {
    let client = context.client().await;
    let (released, released_grant) =
        acquire_upgradable_claim(context, &*client, context.long_lease()).await;
    assert_freed(&*client, &released).await;
    let (expired, expired_grant) =
        acquire_upgradable_claim(context, &*client, context.short_lease()).await;
    context.wait_until_expired(&*client, &expired).await;
    let never_granted = context.claim(ClaimMode::Upgradable);
    for (claim, grant) in
        [(released, released_grant), (expired, expired_grant), (never_granted, expired_grant)]
    {
        for to in [ClaimMode::Exclusive, ClaimMode::Upgradable, ClaimMode::Shared] {
            assert_gone(&*client, &conversion(&claim, grant, to)).await;
        }
        assert!(is_free(&*client, claim.key()).await, "a conversion of nothing holds the key");
    }
}

/// A conversion of a claim that waits for the key returns `Gone`.
pub async fn a_conversion_of_a_waiting_claim_grants_nothing(context: &TestContext) {
    let client = context.client().await;
    let reader = context.claim(ClaimMode::Shared);
    let grant = assert_granted(&*client, &reader).await;
    let writer = context.claim(ClaimMode::Exclusive).with_queueing(Queueing::ExclusiveIntent);
    assert_busy(&*client, &writer).await;
    assert_gone(&*client, &conversion(&writer, grant, ClaimMode::Shared)).await;
    assert_eq!(release(&*client, &writer).await, Release::NotHeld);
    assert_freed(&*client, &reader).await;
    assert!(is_free(&*client, reader.key()).await, "a waiting claim holds the key");
}

/// After the downgrade of an exclusive claim to shared, the claim has the same token, readers are
/// granted, and writers are busy.
pub async fn a_downgrade_lets_readers_in_and_keeps_the_token(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let claim = context.claim(ClaimMode::Exclusive);
    let grant = assert_granted(&*first, &claim).await;
    assert_busy(&*second, &context.claim(ClaimMode::Shared)).await;
    let weaker = assert_granted(&*first, &conversion(&claim, grant, ClaimMode::Shared)).await;
    assert!(!context.capabilities().fencing || weaker.token == grant.token, "{weaker:?}");
    let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
    let other = context.acquire_in(&*second, ClaimMode::Upgradable).await;
    assert_busy(&*second, &context.claim(ClaimMode::Exclusive)).await;
    assert_freed(&*second, &other).await;
    assert_freed(&*second, &reader).await;
    assert_busy(&*second, &context.claim(ClaimMode::Exclusive)).await;
    assert_freed(&*first, &claim).await;
    assert!(is_free(&*second, claim.key()).await, "a released claim holds the key");
}

/// After the downgrade of an exclusive claim to upgradable, the claim has the same token, readers
/// are granted, and a second upgradable claim is busy. Another upgrade has a larger token.
pub async fn a_claim_is_upgraded_and_downgraded_again(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let (claim, mut grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    for _ in 0..3 {
        let upgraded =
            assert_granted(&*first, &conversion(&claim, grant, ClaimMode::Exclusive)).await;
        assert!(!context.capabilities().fencing || upgraded.token > grant.token, "{upgraded:?}");
        assert_busy(&*second, &context.claim(ClaimMode::Shared)).await;
        grant = assert_granted(&*first, &conversion(&claim, upgraded, ClaimMode::Upgradable)).await;
        assert!(!context.capabilities().fencing || upgraded.token == grant.token, "{grant:?}");
        let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
        assert_busy(&*second, &context.claim(ClaimMode::Upgradable)).await;
        assert_freed(&*second, &reader).await;
    }
    assert_freed(&*first, &claim).await;
}

/// A downgrade request that arrives after a later upgrade does not change the mode of the claim:
/// readers are busy.
pub async fn a_late_downgrade_does_not_weaken_a_later_upgrade(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let (claim, before) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let withdrawal = conversion(&claim, before, ClaimMode::Upgradable);
    let upgraded = assert_granted(&*first, &conversion(&claim, before, ClaimMode::Exclusive)).await;
    let downgrade = conversion(&claim, upgraded, ClaimMode::Upgradable);
    let weaker = assert_granted(&*first, &downgrade).await;
    assert_granted(&*first, &conversion(&claim, weaker, ClaimMode::Exclusive)).await;
    for late in [withdrawal, downgrade] {
        drop(attempt(&*first, &late).await);
        assert_busy(&*second, &context.claim(ClaimMode::Shared)).await;
    }
    assert_renewed(&*first, &claim).await;
    assert_freed(&*first, &claim).await;
}

/// An upgrade request that arrives after a downgrade to shared does not change the mode of the
/// claim and blocks no readers.
pub async fn a_late_upgrade_does_not_strengthen_a_downgraded_claim(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let (claim, before) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let upgrade = conversion(&claim, before, ClaimMode::Exclusive);
    let upgraded = assert_granted(&*first, &upgrade).await;
    assert_granted(&*first, &conversion(&claim, upgraded, ClaimMode::Shared)).await;
    assert!(!matches!(attempt(&*first, &upgrade).await, Attempt::Granted(_)));
    let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
    assert_freed(&*second, &reader).await;
    assert_freed(&*first, &claim).await;
}

/// A conversion of a claim to its current mode withdraws a waiting upgrade. New readers are granted
/// at once, and the claim is still upgradable.
pub async fn a_withdrawn_upgrade_lets_readers_in(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
    let (claim, grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let upgrade = conversion(&claim, grant, ClaimMode::Exclusive);
    assert_busy(&*first, &upgrade).await;
    let next = context.claim(ClaimMode::Shared);
    assert_busy(&*second, &next).await;
    assert_granted(&*first, &conversion(&claim, grant, ClaimMode::Upgradable)).await;
    assert_granted(&*second, &next).await;
    assert_freed(&*second, &next).await;
    assert_freed(&*second, &reader).await;
    assert_granted(&*first, &upgrade).await;
    assert_freed(&*first, &claim).await;
}

/// A waiting upgrade that is not repeated stops blocking new readers when the lease of its last
/// attempt ends. The claim still holds the key.
pub async fn a_waiting_upgrade_lapses_with_its_lease(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
    let (claim, grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let upgrade = conversion(&claim, grant, ClaimMode::Exclusive);
    assert_busy(&*first, &upgrade.with_lease(context.renewable_lease())).await;
    let next = context.claim(ClaimMode::Shared);
    assert_busy(&*second, &next).await;
    sleep(context.renewable_lease()).await;
    context.wait_until_granted(&*second, &next).await;
    assert_renewed(&*first, &claim).await;
    assert_busy(&*second, &context.claim(ClaimMode::Upgradable)).await;
    for (client, claim) in [(&second, next), (&second, reader), (&first, claim)] {
        assert_freed(&**client, &claim).await;
    }
}

/// Releasing a claim whose upgrade waits ends the grant and the upgrade.
pub async fn a_release_during_an_upgrade_lets_readers_in(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
    let (claim, grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    assert_busy(&*first, &conversion(&claim, grant, ClaimMode::Exclusive)).await;
    assert_freed(&*first, &claim).await;
    let next = context.acquire_in(&*second, ClaimMode::Shared).await;
    assert_freed(&*second, &next).await;
    assert_freed(&*second, &reader).await;
    assert!(is_free(&*first, claim.key()).await, "a released claim holds the key");
}

/// An upgrade is granted after the last reader has expired.
pub async fn an_upgrade_is_granted_after_the_readers_expire(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let reader = context.claim(ClaimMode::Shared).with_lease(context.short_lease());
    assert_granted(&*second, &reader).await;
    let (claim, grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let upgrade = conversion(&claim, grant, ClaimMode::Exclusive);
    context.wait_until_granted(&*first, &upgrade).await;
    assert_eq!(renew(&*second, &reader).await, Renewal::Gone);
    assert_busy(&*second, &context.claim(ClaimMode::Shared)).await;
    assert_freed(&*first, &claim).await;
}

/// A conversion with a longer lease extends the lease of its claim. A conversion with a shorter
/// lease does not shorten it.
pub async fn a_conversion_extends_the_lease_and_never_shortens_it(context: &TestContext) {
    let client = context.client().await;
    let modes = [ClaimMode::Exclusive, ClaimMode::Upgradable, ClaimMode::Shared];
    let claims = modes.map(|mode| {
        let name = key(&format!("orders:{mode}"));
        Claim::new(name, context.renewable_lease()).with_mode(ClaimMode::Upgradable)
    });
    let mut grants = Vec::new();
    for (claim, to) in claims.iter().zip(modes) {
        let grant = assert_granted(&*client, claim).await;
        let longer = conversion(claim, grant, to).with_lease(context.long_lease());
        let converted = assert_granted(&*client, &longer).await;
        assert!(converted.lease > context.renewable_lease(), "{converted:?}");
        grants.push(converted);
        let shorter = conversion(claim, converted, to).with_lease(context.short_lease());
        let again = assert_granted(&*client, &shorter).await;
        assert!(again.lease > context.renewable_lease(), "{again:?}");
    }
    sleep(context.renewable_lease() * 3 / 2).await;
    for claim in &claims {
        assert_busy(&*client, &Claim::new(claim.key().clone(), context.long_lease())).await;
        assert_renewed(&*client, claim).await;
        assert_freed(&*client, claim).await;
    }
}

/// In a store with wake-ups, the release of the last reader ends the `wait` of an upgrade.
pub async fn the_last_reader_wakes_a_waiting_upgrade(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let (claim, grant) = acquire_upgradable_claim(context, &*first, context.long_lease()).await;
    let upgrade = conversion(&claim, grant, ClaimMode::Exclusive);
    let reader = context.acquire_in(&*second, ClaimMode::Shared).await;
    let busy = assert_busy(&*first, &upgrade).await;
    assert_woken(context, &*first, &upgrade, &busy, async {
        assert_freed(&*second, &reader).await;
    })
    .await;
    assert_granted(&*first, &upgrade).await;
    assert_freed(&*first, &claim).await;
}

/// In a store with wake-ups, a downgrade and a withdrawn upgrade end the `wait` of a reader.
pub async fn a_weaker_mode_wakes_waiting_readers(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    for to in [ClaimMode::Upgradable, ClaimMode::Shared] {
        let claim = context.claim(ClaimMode::Exclusive);
        let grant = assert_granted(&*first, &claim).await;
        let reader = context.claim(ClaimMode::Shared);
        let busy = assert_busy(&*second, &reader).await;
        assert_woken(context, &*second, &reader, &busy, async {
            assert_granted(&*first, &conversion(&claim, grant, to)).await;
        })
        .await;
        assert_granted(&*second, &reader).await;
        if to == ClaimMode::Upgradable {
            assert_busy(&*first, &conversion(&claim, grant, ClaimMode::Exclusive)).await;
            let next = context.claim(ClaimMode::Shared);
            let busy = assert_busy(&*second, &next).await;
            assert_woken(context, &*second, &next, &busy, async {
                assert_granted(&*first, &conversion(&claim, grant, to)).await;
            })
            .await;
        }
        assert_freed(&*second, &reader).await;
        assert_freed(&*first, &claim).await;
    }
}

/// `inspect` returns the mode and the token after each conversion, and the label as before.
pub async fn inspect_returns_the_mode_after_a_conversion(context: &TestContext) {
    let client = context.client().await;
    let claim = context.claim(ClaimMode::Upgradable).with_label(Some("host:1".into()));
    let mut grant = assert_granted(&*client, &claim).await;
    for to in [ClaimMode::Exclusive, ClaimMode::Upgradable, ClaimMode::Shared] {
        grant = assert_granted(&*client, &conversion(&claim, grant, to)).await;
        let holders = admin(&*client).inspect(claim.key()).await.expect("inspect answers");
        let [holder] = holders.as_slice() else { panic!("one holder: {holders:?}") };
        assert_eq!(holder.mode, to);
        assert!(!context.capabilities().fencing || holder.token == Some(grant.token), "{holder:?}");
        if context.capabilities().labels {
            assert_eq!(holder.label.as_deref(), Some("host:1"));
        }
    }
    assert_freed(&*client, &claim).await;
}

/// After a forced release, a conversion of the claim returns `Gone`.
pub async fn a_claim_that_was_released_by_force_cannot_be_converted(context: &TestContext) {
    let client = context.client().await;
    let (claim, grant) = acquire_upgradable_claim(context, &*client, context.long_lease()).await;
    let released = admin(&*client).force_release(claim.key()).await.expect("it answers");
    assert_eq!(released, Release::Freed);
    assert_gone(&*client, &conversion(&claim, grant, ClaimMode::Exclusive)).await;
    let next = context.acquire_in(&*client, ClaimMode::Exclusive).await;
    assert_gone(&*client, &conversion(&claim, grant, ClaimMode::Exclusive)).await;
    assert_freed(&*client, &next).await;
}

/// `upgrade` waits for the readers of other processes, blocks new ones, and returns an exclusive
/// guard with a larger token. `downgrade` lets readers in and keeps the token.
pub async fn a_guard_is_upgraded_after_the_readers_and_downgraded(context: &TestContext) {
    let (local, reading) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let guard = acquire_upgradable(&local).await;
    let before = guard.fencing_token();
    let mut upgrade = tokio::spawn(guard.upgrade());
    context.wait_until_readers_are_blocked(&third).await;
    assert!(poll!(&mut upgrade).is_pending(), "a writer next to a reader");
    unlock(reader).await;
    let guard = output_of(context, upgrade).await.expect("the lock is upgraded");
    assert_eq!(guard.mode(), ClaimMode::Exclusive);
    assert!(!context.capabilities().fencing || guard.fencing_token() > before, "{guard:?}");
    assert!(third.obtain("orders:42").try_read().await.expect("busy is no error").is_none());
    let token = guard.fencing_token();
    let guard = guard.downgrade().await.expect("the lock is downgraded");
    assert_eq!((guard.mode(), guard.fencing_token()), (ClaimMode::Shared, token));
    context.wait_until_readers_enter(&third).await;
    assert!(third.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    unlock(guard).await;
    context.assert_becomes_free(&third, "orders:42").await;
}

/// An exclusive guard is repeatedly downgraded to upgradable and upgraded again. It excludes other
/// upgradable callers throughout.
pub async fn a_guard_is_converted_repeatedly(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let mut guard = local.obtain("orders:42").lock().await.expect("a free lock is acquired");
    for _ in 0..3 {
        let token = guard.fencing_token();
        guard = guard.downgrade_to_upgradable().await.expect("the lock is downgraded");
        assert_eq!((guard.mode(), guard.fencing_token()), (ClaimMode::Upgradable, token));
        context.wait_until_readers_enter(&remote).await;
        for registry in [&local, &remote] {
            let lock = registry.obtain("orders:42");
            let second = lock.try_upgradable_with(LockOptions::new()).await;
            assert!(second.expect("busy is no error").is_none(), "two upgradable guards");
            assert!(lock.try_lock().await.expect("busy is no error").is_none());
        }
        guard = guard.upgrade().await.expect("the lock is upgraded");
        assert!(!context.capabilities().fencing || guard.fencing_token() > token, "{guard:?}");
        assert!(remote.obtain("orders:42").try_read().await.expect("busy is no error").is_none());
    }
    unlock(guard).await;
    context.assert_becomes_free(&remote, "orders:42").await;
    assert_eq!(local.held(), 0, "a converted lock is counted twice");
}

/// `try_upgrade_for` returns the unchanged guard at its deadline if a reader still holds the lock.
/// New readers can then acquire it, and a later upgrade succeeds.
pub async fn an_upgrade_that_times_out_leaves_the_guard_held(context: &TestContext) {
    let (local, reading) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let mut guard = acquire_upgradable(&local).await;
    let token = guard.fencing_token();
    for wait in [Duration::ZERO, Duration::from_millis(300)] {
        let unchanged = guard.try_upgrade_for(wait).await.expect("the store answers");
        guard = unchanged.expect_err("a writer next to a reader");
        assert_eq!((guard.mode(), guard.fencing_token()), (ClaimMode::Upgradable, token));
        assert!(guard.is_held());
        // Long before the lease is over.
        context.wait_until_readers_enter(&third).await;
    }
    assert!(third.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    unlock(reader).await;
    let upgraded = guard.try_upgrade_for(context.max_wait()).await.expect("the store answers");
    unlock(upgraded.expect("no reader is left")).await;
    context.assert_becomes_free(&third, "orders:42").await;
}

/// Dropping an `upgrade` future releases the lock: readers acquire it, and the key is free after
/// the last reader.
pub async fn a_dropped_upgrade_frees_the_key(context: &TestContext) {
    let (local, reading) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let upgrade = tokio::spawn(acquire_upgradable(&local).await.upgrade());
    context.wait_until_readers_are_blocked(&third).await;
    upgrade.abort();
    context.wait_until_readers_enter(&third).await;
    unlock(reader).await;
    context.assert_becomes_free(&third, "orders:42").await;
    context.assert_becomes_free(&local, "orders:42").await;
}

/// If the lock is lost while `upgrade` waits, `upgrade` returns `LockError::Lost`, and readers can
/// acquire the lock.
pub async fn a_loss_during_an_upgrade_ends_it(context: &TestContext) {
    let (local, reading) =
        (context.registry_with_lease(context.renewable_lease()).await, context.registry().await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let guard = acquire_upgradable(&local).await;
    let (claim, lost) = (guard.claim().clone(), guard.lost());
    let upgrade = tokio::spawn(guard.upgrade());
    context.wait_until_readers_are_blocked(&third).await;
    context.break_claim(&claim).await;
    match output_of(context, upgrade).await {
        Err(LockError::Lost { reason: LostReason::Gone, .. }) => {}
        other => panic!("the upgrade of a lost lock returned {other:?}"),
    }
    assert_eq!(timeout(context.max_wait(), lost).await.expect("it is lost"), LostReason::Gone);
    context.wait_until_readers_enter(&third).await;
    unlock(reader).await;
    context.assert_becomes_free(&third, "orders:42").await;
}

/// A `lost` future that was obtained before a conversion stays pending during the conversion. It
/// reports a loss that occurs after the conversion.
pub async fn a_lost_future_from_before_a_conversion_reports_a_later_loss(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let guard = acquire_upgradable(&registry).await;
    let (mut first_lost, unpolled) = (pin!(guard.lost()), guard.lost());
    assert!(poll!(first_lost.as_mut()).is_pending());
    let guard = guard.upgrade().await.expect("the lock is upgraded");
    let mut second_lost = pin!(guard.lost());
    assert!(poll!(second_lost.as_mut()).is_pending());
    let guard = guard.downgrade().await.expect("the lock is downgraded");
    sleep(context.renewable_lease() / 2).await;
    assert!(poll!(first_lost.as_mut()).is_pending(), "a conversion is reported as a loss");
    assert!(poll!(second_lost.as_mut()).is_pending(), "a conversion is reported as a loss");
    context.break_claim(guard.claim()).await;
    let limit = context.renewable_lease() + context.max_wait();
    for lost in [first_lost, second_lost] {
        let reason = timeout(limit, lost).await.expect("the loss is reported");
        assert_eq!(reason, LostReason::Gone);
    }
    assert!(!guard.is_held());
    drop(guard);
    // First polled after the loss, and after the last guard was dropped.
    let reason = timeout(limit, unpolled).await.expect("the loss is reported");
    assert_eq!(reason, LostReason::Gone);
}

/// A converted lock is renewed beyond its lease, in each mode.
pub async fn a_converted_lock_is_renewed_beyond_its_lease(context: &TestContext) {
    let (local, remote) =
        (context.registry_with_lease(context.renewable_lease()).await, context.registry().await);
    let mut guard = acquire_upgradable(&local).await;
    sleep(context.renewable_lease() * 3 / 2).await;
    guard = guard.upgrade().await.expect("the lock is held");
    sleep(context.renewable_lease() * 3 / 2).await;
    assert!(remote.obtain("orders:42").try_read().await.expect("busy is no error").is_none());
    guard = guard.downgrade().await.expect("the lock is held");
    sleep(context.renewable_lease() * 3 / 2).await;
    assert!(guard.is_held());
    assert!(remote.obtain("orders:42").try_lock().await.expect("busy is no error").is_none());
    unlock(guard).await;
}

/// An owner re-enters its lock in each mode after a conversion, even if other callers of its
/// process have tried to acquire the lock. An owner never waits for itself.
pub async fn an_owner_reenters_a_converted_lock(context: &TestContext) {
    let registry = context.registry().await;
    let owner = Owner::new();
    let with_owner = || LockOptions::new().owner(&owner);
    let lock = registry.obtain("orders:42");
    let outer = lock.upgradable_with(with_owner()).await.expect("a free lock is acquired");
    let inner = lock.read_with(with_owner()).await.expect("an owner re-enters");
    assert_eq!(inner.mode(), ClaimMode::Upgradable);
    drop(inner);
    let outer = outer.upgrade().await.expect("the lock is upgraded");
    for _ in 0..2 {
        assert!(lock.try_lock().await.expect("busy is no error").is_none());
        assert!(lock.try_read().await.expect("busy is no error").is_none());
        for reentry in [
            timeout(context.max_wait(), lock.lock_with(with_owner())).await,
            timeout(context.max_wait(), lock.read_with(with_owner())).await,
        ] {
            let inner = reentry.expect("an owner does not wait for itself").expect("it re-enters");
            assert_eq!(inner.fencing_token(), outer.fencing_token());
        }
    }
    let outer = outer.downgrade().await.expect("the lock is downgraded");
    let inner = timeout(context.max_wait(), lock.read_with(with_owner())).await;
    let inner = inner.expect("an owner does not wait for itself").expect("it re-enters");
    assert_eq!(inner.fencing_token(), outer.fencing_token());
    drop(inner);
    match timeout(context.max_wait(), lock.lock_with(with_owner())).await.expect("it does not wait")
    {
        Err(LockError::HeldByOwner { held: ClaimMode::Shared, .. }) => {}
        other => panic!("an owner waits for itself: {other:?}"),
    }
    unlock(outer).await;
    unlock(lock.lock_with(with_owner()).await.expect("the lock is free")).await;
}

/// These invalid conversions return `LockError::InvalidConversion` without an attempt, and drop
/// their guard: a shared lock can be neither upgraded nor downgraded, and a lock with other guards
/// cannot be converted.
pub async fn an_invalid_conversion_is_refused_before_any_request(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let registry = context.registry_over(&faulty, context.long_lease());
    let lock = registry.obtain("orders:42");
    let shared = || async { lock.read().await.expect("the lock is acquired") };
    let exclusive = || async { lock.lock().await.expect("the lock is acquired") };
    let attempts = || faulty.calls(Operation::Acquire);

    let (guard, before) = (shared().await, attempts());
    assert_invalid(guard.upgrade().await, ClaimMode::Shared, ClaimMode::Exclusive);
    assert_eq!(attempts(), before, "an attempt was sent");
    context.assert_becomes_free(&registry, "orders:42").await;

    let (guard, before) = (shared().await, attempts());
    assert_invalid(guard.downgrade().await, ClaimMode::Shared, ClaimMode::Shared);
    assert_eq!(attempts(), before, "an attempt was sent");
    context.assert_becomes_free(&registry, "orders:42").await;

    let (guard, before) = (exclusive().await, attempts());
    let inner = guard.reenter().expect("the lock is held");
    assert_invalid(guard.downgrade().await, ClaimMode::Exclusive, ClaimMode::Shared);
    assert_eq!(attempts(), before, "an attempt was sent");
    assert!(inner.is_held(), "the other guard lost its lock");
    let guard = inner.downgrade().await.expect("the other guard is gone");
    unlock(guard).await;
}

/// A downgrade after a hand-over keeps the token of the guard. Readers that join, and later
/// holders, have larger tokens than all guards before.
pub async fn a_downgrade_after_a_hand_over_keeps_the_token(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let lock = local.obtain("orders:42");
    let mut guard = lock.lock().await.expect("a free lock is acquired");
    for _ in 0..3 {
        let mut waiting = Box::pin(lock.lock());
        assert!(poll!(waiting.as_mut()).is_pending(), "two guards of one key");
        unlock(guard).await;
        guard = waiting.await.expect("the lock is acquired");
    }
    let token = guard.fencing_token();
    let guard = guard.downgrade().await.expect("the lock is downgraded");
    assert_eq!(guard.fencing_token(), token, "a downgrade changed the token");
    let reader = lock.read().await.expect("readers share the lock");
    assert!(reader.fencing_token() > token, "{reader:?} after {token:?}");
    let last = reader.fencing_token();
    unlock(guard).await;
    unlock(reader).await;
    let next = remote.obtain("orders:42").lock().await.expect("the lock is acquired");
    assert!(next.fencing_token() > last, "{next:?} after {last:?}");
    unlock(next).await;
}

/// Readers that share a converted grant have tokens that no other guard has.
pub async fn readers_of_a_converted_grant_have_tokens_of_their_own(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = acquire_upgradable(&local).await.upgrade().await.expect("no reader is left");
    let mut guards = vec![guard.downgrade().await.expect("the lock is downgraded")];
    for registry in [&local, &local, &remote, &remote, &local] {
        guards.push(registry.obtain("orders:42").read().await.expect("readers share the lock"));
    }
    let tokens: HashSet<_> = guards.iter().map(LockGuard::fencing_token).collect();
    assert_eq!(tokens.len(), guards.len(), "two guards with one token: {guards:?}");
    for guard in guards {
        unlock(guard).await;
    }
    let writer = remote.obtain("orders:42").lock().await.expect("the lock is acquired");
    assert!(tokens.iter().all(|token| *token < writer.fencing_token()), "{writer:?}, {tokens:?}");
    unlock(writer).await;
}

/// A waiting caller, upgradable or exclusive, acquires the lock when the upgradable holder unlocks
/// it, in this process and in another.
pub async fn waiters_acquire_the_lock_after_an_upgradable_holder(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let guard = acquire_upgradable(&local).await;
    let mut tasks = JoinSet::new();
    for registry in [&local, &remote] {
        let (lock, wait) = (registry.obtain("orders:42"), context.max_wait());
        tasks.spawn(async move { lock.try_upgradable_with(LockOptions::new().wait(wait)).await });
        let (lock, wait) = (registry.obtain("orders:42"), context.max_wait());
        tasks.spawn(async move { lock.try_lock_for(wait).await });
    }
    sleep(Duration::from_millis(50)).await;
    unlock(guard).await;
    while let Some(next) = tasks.join_next().await {
        let next = next.expect("no panic").expect("the store answers");
        unlock(next.expect("the holder before has unlocked")).await;
    }
}

/// An upgrade does not wait for a waiting writer of the same or another process. The writer
/// acquires the lock afterwards.
pub async fn a_guard_is_upgraded_before_a_waiting_writer(context: &TestContext) {
    let local = context.registry().await;
    let (remote, count) = context.counting_registry().await;
    let guard = acquire_upgradable(&local).await;
    let writers = [&local, &remote].map(|registry| {
        let lock = registry.obtain("orders:42");
        tokio::spawn(async move {
            unlock(lock.lock().await.expect("the lock is acquired")).await;
        })
    });
    context.eventually("the writer waits in the store", async || count.get() > 0).await;
    let upgraded = guard.try_upgrade_for(context.max_wait()).await.expect("the store answers");
    let guard = upgraded.expect("the upgrade does not wait for the writer");
    assert!(writers.iter().all(|writer| !writer.is_finished()), "two exclusive guards");
    unlock(guard).await;
    for writer in writers {
        output_of(context, writer).await;
    }
}

/// A conversion is repeated if its requests are refused or lost, or its replies are lost. It
/// converts the lock once.
pub async fn a_conversion_is_repeated_after_lost_requests_and_replies(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let guard = acquire_upgradable(&local).await;
    let faults_with = |fault| {
        Faults::none()
            .at_call(Operation::Acquire, 1, Fault::Refuse)
            .at_call(Operation::Acquire, 2, Fault::LoseRequest)
            .at_call(Operation::Acquire, 3, fault)
            .at_call(Operation::Acquire, 4, Fault::LoseReply)
    };
    faulty.apply(faults_with(Fault::LoseReply));
    let guard = guard.upgrade().await.expect("the conversion is repeated");
    assert!(remote.obtain("orders:42").try_read().await.expect("busy is no error").is_none());
    faulty.apply(faults_with(Fault::Repeat));
    let guard = guard.downgrade().await.expect("the conversion is repeated");
    assert_eq!(guard.mode(), ClaimMode::Shared);
    context.wait_until_readers_enter(&remote).await;
    unlock(guard).await;
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// If the store denies a conversion, the call returns `LockError::Backend` at once, and the lock is
/// released.
pub async fn a_permanent_store_error_during_a_conversion_releases_the_lock(context: &TestContext) {
    let faulty = context.faulty(Faults::none()).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let guard = acquire_upgradable(&local).await;
    faulty.apply(Faults::none().always(Operation::Acquire, Fault::Deny));
    let denied = timeout(context.max_wait(), guard.upgrade()).await;
    match denied.expect("a permanent error is not retried") {
        Err(LockError::Backend { .. }) => {}
        other => panic!("a store that denies is reported as {other:?}"),
    }
    context.assert_becomes_free(&remote, "orders:42").await;
}

/// `close` ends a waiting upgrade with an error, and releases its lock.
pub async fn close_ends_a_waiting_upgrade(context: &TestContext) {
    let (local, reading) = (context.registry().await, context.registry().await);
    let third = context.registry().await;
    let reader = reading.obtain("orders:42").read().await.expect("a free lock is acquired");
    let upgrade = tokio::spawn(acquire_upgradable(&local).await.upgrade());
    context.wait_until_readers_are_blocked(&third).await;
    let report = local.close(context.max_wait()).await;
    assert_eq!(report.abandoned, 0, "{report:?}");
    match output_of(context, upgrade).await {
        Err(LockError::Closed | LockError::Lost { .. }) => {}
        other => panic!("the upgrade in a closed registry returned {other:?}"),
    }
    context.wait_until_readers_enter(&third).await;
    unlock(reader).await;
    context.assert_becomes_free(&third, "orders:42").await;
}

/// While callers of two processes read, upgrade if they can, and downgrade again, no exclusive
/// holder overlaps with another holder.
pub async fn upgraded_sections_never_overlap_with_others(context: &TestContext) {
    let registries = [context.registry().await, context.registry().await];
    let section = Arc::new(CriticalSection::default());
    let mut tasks = JoinSet::new();
    for n in 0..6 {
        let (lock, section) = (registries[n % 2].obtain("orders:42"), Arc::clone(&section));
        tasks.spawn(async move {
            let work = || sleep(Duration::from_millis(1));
            for round in 0..3 {
                if (n / 2 + round) % 3 == 0 {
                    let guard = lock.upgradable().await.expect("the lock is acquired");
                    section.share(1, usize::MAX, work()).await;
                    let guard = guard.upgrade().await.expect("the lock is upgraded");
                    section.write(work()).await;
                    let guard = guard.downgrade().await.expect("the lock is downgraded");
                    section.share(1, usize::MAX, work()).await;
                    unlock(guard).await;
                } else {
                    let guard = lock.read().await.expect("the lock is acquired");
                    section.share(1, usize::MAX, work()).await;
                    unlock(guard).await;
                }
            }
        });
    }
    assert_eq!(tasks.join_all().await.len(), 6, "all callers acquire the lock");
}

/// An `upgrade` future may be dropped at every poll while a reader holds the lock and then unlocks
/// it. The key is soon free.
pub async fn upgrade_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let make = async || {
        let reader = remote.obtain("orders:42").read().await.expect("the lock is acquired");
        tokio::spawn(async move {
            sleep(Duration::from_millis(20)).await;
            unlock(reader).await;
        });
        acquire_upgradable(&local).await.upgrade()
    };
    sweep_conversion(context, make, [&remote, &local]).await;
}

/// A `try_upgrade_for` future that withdraws its upgrade, and a `downgrade` future, may be dropped
/// at every poll. The key is soon free.
pub async fn a_withdrawal_and_a_downgrade_may_be_dropped_at_every_poll(context: &TestContext) {
    let slow = Fault::DelayReply(Duration::from_millis(15));
    let faulty = context.faulty(Faults::none().always(Operation::Acquire, slow)).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let make = async || {
        let guard = local.obtain("orders:42").lock().await.expect("the lock is acquired");
        guard.downgrade()
    };
    sweep_conversion(context, make, [&remote, &local]).await;
    let reader = remote.obtain("orders:42").read().await.expect("a free lock is acquired");
    let make = async || acquire_upgradable(&local).await.try_upgrade_for(Duration::ZERO);
    let third = context.registry().await;
    sweep(make, 1_000, async |end| {
        drop(end);
        local.idle().await;
        context.wait_until_readers_enter(&third).await;
    })
    .await;
    unlock(reader).await;
    context.assert_becomes_free(&local, "orders:42").await;
}

async fn sweep_conversion<F>(
    context: &TestContext,
    make: impl AsyncFnMut() -> F,
    registries: [&Registry; 2],
) where
    F: Future<Output = Result<LockGuard, LockError>>,
{
    sweep(make, 1_000, async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
            unlock(output.expect("the lock is converted")).await;
        }
        for registry in registries {
            context.assert_becomes_free(registry, "orders:42").await;
        }
    })
    .await;
}

/// Acquires `orders:42` with a new upgradable claim of this lease. Returns the claim and its grant.
async fn acquire_upgradable_claim(
    context: &TestContext,
    client: &dyn LockBackend,
    lease: Duration,
) -> (Claim, Grant) {
    let claim = context.claim(ClaimMode::Upgradable).with_lease(lease);
    let grant = assert_granted(client, &claim).await;
    (claim, grant)
}

/// Returns the request that changes the mode of `grant`, as the engine sends it.
fn conversion(claim: &Claim, grant: Grant, to: ClaimMode) -> Claim {
    claim.clone().converted_to(to).restricted_to_grant(grant.token)
}

/// Asserts that the store answers `conversion` with `Gone`.
async fn assert_gone(client: &dyn LockBackend, conversion: &Claim) {
    let answer = attempt(client, conversion).await;
    assert_eq!(answer, Attempt::Gone, "{conversion:?}");
}

/// Asserts that `change` ends the `wait` of `claim`.
async fn assert_woken(
    context: &TestContext,
    client: &dyn LockBackend,
    claim: &Claim,
    busy: &Busy,
    change: impl Future<Output = ()>,
) {
    let wait = timeout(context.max_wait(), client.wait(claim, busy));
    let later = async {
        sleep(Duration::from_millis(50)).await;
        change.await;
    };
    let (woken, ()) = join(wait, later).await;
    woken.expect("the change ends the wait");
}

async fn acquire_upgradable(registry: &Registry) -> LockGuard {
    registry.obtain("orders:42").upgradable().await.expect("the lock is acquired")
}

/// Returns the output of `task`. Panics unless the task ends within `max_wait`.
async fn output_of<T>(context: &TestContext, task: JoinHandle<T>) -> T {
    let output = timeout(context.max_wait(), task).await.expect("the call ends");
    output.expect("no panic")
}

fn assert_invalid(result: Result<LockGuard, LockError>, from: ClaimMode, to: ClaimMode) {
    match result {
        Err(LockError::InvalidConversion { from: stated, to: wanted, .. }) => {
            assert_eq!((stated, wanted), (from, to));
        }
        other => panic!("{from} to {to}: {other:?}"),
    }
}
