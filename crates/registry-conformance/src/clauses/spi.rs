//! The clauses of the `LockBackend` contract that no other module contains.

use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{Attempt, Claim, Queueing, Release, Renewal};

use crate::context::{
    TestContext, assert_busy, assert_freed, assert_granted, attempt, is_free, key, release,
    renew_all,
};

/// Repeating the acquire of a granted claim returns `Granted`, and one release frees the key. The
/// engine repeats a request whose reply was lost.
pub async fn a_granted_claim_is_granted_again(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_granted(&*client, &claim).await;
    assert_freed(&*client, &claim).await;
    assert!(is_free(&*client, claim.key()).await, "the release left a grant of the claim");
}

/// A second client can repeat the acquire of a granted claim, because the claim id alone identifies
/// the claim. One release through the second client frees the key.
pub async fn a_granted_claim_is_granted_again_through_another_client(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    let claim = context.acquire_with_lease(&*first, context.long_lease()).await;
    assert_granted(&*second, &claim).await;
    assert_freed(&*second, &claim).await;
    assert!(is_free(&*first, claim.key()).await, "the release left a grant of the claim");
}

/// Eight concurrent acquires of one claim are all granted with the same token. One release frees
/// the key.
pub async fn concurrent_repetitions_of_one_acquire_are_one_grant(context: &TestContext) {
    let first = context.client().await;
    let second = context.another_client(&first).await;
    let clients = [first, second];
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let attempts = (0..8).map(|n| assert_granted(&*clients[n % 2], &claim));
    let grants = join_all(attempts).await;
    assert!(grants.iter().all(|grant| grant.token == grants[0].token), "one grant: {grants:?}");
    assert_freed(&*clients[0], &claim).await;
    assert!(is_free(&*clients[1], claim.key()).await, "the release left a grant of the claim");
}

/// Repeating the acquire of a granted claim with a shorter lease does not shorten its lease.
pub async fn a_repeated_acquire_does_not_shorten_the_lease(context: &TestContext) {
    let client = context.client().await;
    let claim = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_granted(&*client, &claim.clone().with_lease(context.short_lease())).await;
    tokio::time::sleep(context.short_lease() * 2).await;
    assert_busy(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    assert_freed(&*client, &claim).await;
}

/// A grant states a lease that is longer than zero and at most as long as requested. The engine
/// treats the lock as held for this time, less a margin.
pub async fn a_grant_states_its_lease(context: &TestContext) {
    let client = context.client().await;
    let claim = Claim::new(key("orders:42"), context.long_lease());
    let grant = assert_granted(&*client, &claim).await;
    assert!(grant.lease > Duration::ZERO && grant.lease <= context.long_lease(), "{grant:?}");
    assert_freed(&*client, &claim).await;
}

/// Claims with the shortest and with the longest lease of the store's capabilities are granted.
/// After a release, their key is free. `lease_min` is at most `lease_max`.
pub async fn the_shortest_and_the_longest_lease_are_granted(context: &TestContext) {
    let client = context.client().await;
    let capabilities = context.capabilities();
    assert!(capabilities.lease_min <= capabilities.lease_max, "{capabilities:?}");
    for lease in [capabilities.lease_min, capabilities.lease_max] {
        let claim = Claim::new(key("orders:42"), lease);
        assert_granted(&*client, &claim).await;
        // The shortest lease may have expired before the release.
        release(&*client, &claim).await;
        assert!(
            is_free(&*client, claim.key()).await,
            "the key is not free after the release of a claim with a lease of {lease:?}"
        );
    }
}

/// Two clients of one store return equal capabilities. Capabilities belong to the store, not to a
/// connection.
pub async fn every_client_of_a_store_has_the_same_capabilities(context: &TestContext) {
    assert_eq!(context.client().await.capabilities(), context.client().await.capabilities());
}

/// Two clients compute the same shard for a claim. The engine groups renewals by shard. Clients
/// that disagree renew a claim in the wrong shard.
pub async fn a_claim_has_the_same_shard_in_every_client(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    for n in 0..64 {
        let claim = Claim::new(key(&format!("orders:n{n}")), context.long_lease());
        assert_eq!(first.shard(&claim), second.shard(&claim), "{claim:?}");
    }
}

/// A grant or release through one client is effective for another client as soon as it is answered.
pub async fn a_change_by_one_client_is_visible_to_another_at_once(context: &TestContext) {
    let (first, second) = (context.client().await, context.client().await);
    for _ in 0..20 {
        let claim = context.acquire_with_lease(&*first, context.long_lease()).await;
        assert_busy(&*second, &Claim::new(key("orders:42"), context.long_lease())).await;
        assert_freed(&*first, &claim).await;
        let next = context.acquire_with_lease(&*second, context.long_lease()).await;
        assert_freed(&*second, &next).await;
    }
}

/// A client still answers correctly after a thousand requests, among them busy answers and releases
/// of claims that hold nothing.
pub async fn a_client_answers_correctly_after_a_thousand_requests(context: &TestContext) {
    let client = context.client().await;
    let holder = Claim::new(key("held"), context.long_lease());
    assert_granted(&*client, &holder).await;
    for n in 0..250 {
        let claim = Claim::new(key(&format!("orders:n{}", n % 20)), context.long_lease());
        assert_granted(&*client, &claim).await;
        assert_busy(&*client, &Claim::new(key("held"), context.long_lease())).await;
        assert_freed(&*client, &claim).await;
        assert_eq!(release(&*client, &claim).await, Release::NotHeld);
    }
    assert_freed(&*client, &holder).await;
}

/// 64 concurrent acquires, one renewal of all 64 claims, and 64 concurrent releases through one
/// client all succeed, whatever the size of its connection pool.
pub async fn many_concurrent_requests_of_one_client_are_all_answered(context: &TestContext) {
    let client = context.client().await;
    let claims: Vec<_> =
        (0..64).map(|n| Claim::new(key(&format!("orders:n{n}")), context.long_lease())).collect();
    join_all(claims.iter().map(|claim| assert_granted(&*client, claim))).await;
    for answer in renew_all(&*client, &claims).await {
        assert!(matches!(answer, Ok(Renewal::Renewed(_))), "{answer:?}");
    }
    join_all(claims.iter().map(|claim| assert_freed(&*client, claim))).await;
}

/// Releasing a busy claim that the store may have queued returns `NotHeld` and removes the claim
/// from the queue. After the holder's release, the next claim is granted.
pub async fn a_released_busy_claim_leaves_the_queue(context: &TestContext) {
    let client = context.client().await;
    let holder = Claim::new(key("orders:42"), context.long_lease());
    let waiter = Claim::new(key("orders:42"), context.long_lease()).with_queueing(Queueing::Join);
    assert_granted(&*client, &holder).await;
    assert_busy(&*client, &waiter).await;
    assert_eq!(release(&*client, &waiter).await, Release::NotHeld);
    assert_freed(&*client, &holder).await;
    let next = context.acquire_with_lease(&*client, context.long_lease()).await;
    assert_freed(&*client, &next).await;
}

/// Busy claims that do not queue leave no record in the store. After the holder's release, the key
/// is free.
pub async fn a_busy_claim_leaves_no_record(context: &TestContext) {
    let client = context.client().await;
    let holder = context.acquire_with_lease(&*client, context.long_lease()).await;
    for _ in 0..10 {
        assert_busy(&*client, &Claim::new(key("orders:42"), context.long_lease())).await;
    }
    assert_freed(&*client, &holder).await;
    assert!(is_free(&*client, holder.key()).await, "a busy claim holds the key");
}

/// A store with a queue grants queued claims in the order of their first attempts, whichever client
/// sent them.
pub async fn queued_claims_are_granted_in_the_order_of_their_arrival(context: &TestContext) {
    let clients = [context.client().await, context.client().await];
    let claims: Vec<_> = (0..6)
        .map(|_| Claim::new(key("orders:42"), context.long_lease()).with_queueing(Queueing::Join))
        .collect();
    assert_granted(&*clients[0], &claims[0]).await;
    for (n, claim) in claims.iter().enumerate().skip(1) {
        assert_busy(&*clients[n % 2], claim).await;
    }
    for first in 0..claims.len() {
        // Attempts in reverse order: a repeated attempt does not change a claim's place in the
        // queue.
        for (n, claim) in claims.iter().enumerate().skip(first + 1).rev() {
            assert_busy(&*clients[n % 2], claim).await;
        }
        assert_granted(&*clients[first % 2], &claims[first]).await;
        assert_freed(&*clients[first % 2], &claims[first]).await;
    }
}

/// Releasing a queued claim removes it from the queue, so that the claim behind it is granted. The
/// released claim can be acquired again afterwards.
pub async fn a_released_queued_claim_does_not_block_the_next_one(context: &TestContext) {
    let client = context.client().await;
    let claims: Vec<_> = (0..3)
        .map(|_| Claim::new(key("orders:42"), context.long_lease()).with_queueing(Queueing::Join))
        .collect();
    assert_granted(&*client, &claims[0]).await;
    assert_busy(&*client, &claims[1]).await;
    assert_busy(&*client, &claims[2]).await;
    assert_eq!(release(&*client, &claims[1]).await, Release::NotHeld);
    assert_freed(&*client, &claims[0]).await;
    assert_granted(&*client, &claims[2]).await;
    assert_freed(&*client, &claims[2]).await;
    assert!(
        matches!(attempt(&*client, &claims[1]).await, Attempt::Granted(_)),
        "the released claim could not be acquired again"
    );
    assert_freed(&*client, &claims[1]).await;
}

/// `diagnose` succeeds on a reachable store and locks nothing. A store that can be inspected has a
/// [`LockAdmin`](registry_core::LockAdmin).
pub async fn a_reachable_store_can_be_diagnosed(context: &TestContext) {
    let client = context.client().await;
    assert!(client.admin().is_some() || !context.capabilities().inspect, "inspect without admin");
    if let Some(admin) = client.admin() {
        admin.diagnose().await.expect("a store that can be reached is diagnosed");
    }
    assert!(is_free(&*client, &key("orders:42")).await, "a diagnosis holds nothing");
}
