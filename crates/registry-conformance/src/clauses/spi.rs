//! The contract between a backend and the engine, sentence by sentence, as far as it is not about time, tokens or keys.

use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{Attempt, Claim, Release, Renewal};

use crate::lab::{Lab, attempt, busy, freed, granted, is_free, key, release};

/// The reply may have been lost, so the engine asks again and must hear the same.
pub async fn a_granted_claim_is_granted_again(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &claim).await;
    granted(&*client, &claim).await;
    freed(&*client, &claim).await;
    assert!(is_free(&*client, claim.key()).await, "two grants of one claim are one hold");
}

/// A claim is known by its id alone: the request may be repeated over another connection.
pub async fn a_granted_claim_is_granted_again_through_another_client(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*first, &claim).await;
    granted(&*second, &claim).await;
    freed(&*second, &claim).await;
    assert!(is_free(&*first, claim.key()).await, "two grants of one claim are one hold");
}

/// A repeated request is the same request, even while the first one is still being worked on.
pub async fn repetitions_of_one_acquire_at_once_are_one_grant(lab: &Lab) {
    let first = lab.client().await;
    let second = lab.another_client(&first).await;
    let clients = [first, second];
    let claim = Claim::new(key("orders:42"), lab.long());
    let attempts = (0..8).map(|n| granted(&*clients[n % 2], &claim));
    let grants = join_all(attempts).await;
    assert!(grants.iter().all(|grant| grant.token == grants[0].token), "one grant: {grants:?}");
    freed(&*clients[0], &claim).await;
    assert!(is_free(&*clients[1], claim.key()).await, "eight grants of one claim are one hold");
}

/// The holder's lease must not suffer from its own repeated request.
pub async fn a_repeated_acquire_does_not_shorten_the_lease(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &claim).await;
    granted(&*client, &claim.clone().with_lease(lab.short())).await;
    tokio::time::sleep(lab.short() * 2).await;
    busy(&*client, &Claim::new(key("orders:42"), lab.long())).await;
    freed(&*client, &claim).await;
}

/// The engine trusts what it is told for as long as it is told.
pub async fn a_grant_tells_how_long_it_lasts(lab: &Lab) {
    let client = lab.client().await;
    let claim = Claim::new(key("orders:42"), lab.long());
    let grant = granted(&*client, &claim).await;
    assert!(grant.lease > Duration::ZERO && grant.lease <= lab.long(), "{grant:?}");
    freed(&*client, &claim).await;
}

/// A store that says which leases it takes has to take them.
pub async fn the_shortest_and_the_longest_lease_are_granted(lab: &Lab) {
    let client = lab.client().await;
    let capabilities = lab.capabilities();
    assert!(capabilities.lease_min <= capabilities.lease_max, "{capabilities:?}");
    for lease in [capabilities.lease_min, capabilities.lease_max] {
        let claim = Claim::new(key("orders:42"), lease);
        granted(&*client, &claim).await;
        // The shortest may be over before it is given back.
        release(&*client, &claim).await;
        assert!(is_free(&*client, claim.key()).await, "a lease of {lease:?} was given back");
    }
}

/// What is promised is a property of the store, not of the connection.
pub async fn every_client_of_a_store_has_the_same_capabilities(lab: &Lab) {
    assert_eq!(lab.client().await.capabilities(), lab.client().await.capabilities());
}

/// The engine batches by shard; a claim that changed its shard would be renewed in the wrong place.
pub async fn a_claim_has_the_same_shard_in_every_client(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    for n in 0..64 {
        let claim = Claim::new(key(&format!("orders:n{n}")), lab.long());
        assert_eq!(first.shard(&claim), second.shard(&claim), "{claim:?}");
    }
}

/// What one client did is there for all others as soon as it is answered.
pub async fn a_client_sees_at_once_what_another_did(lab: &Lab) {
    let (first, second) = (lab.client().await, lab.client().await);
    for _ in 0..20 {
        let claim = Claim::new(key("orders:42"), lab.long());
        granted(&*first, &claim).await;
        busy(&*second, &Claim::new(key("orders:42"), lab.long())).await;
        freed(&*first, &claim).await;
        let next = Claim::new(key("orders:42"), lab.long());
        granted(&*second, &next).await;
        freed(&*second, &next).await;
    }
}

/// Trouble of one key or a busy answer must not leave the client unfit for the next request.
pub async fn a_thousand_requests_leave_a_client_as_good_as_new(lab: &Lab) {
    let client = lab.client().await;
    let holder = Claim::new(key("held"), lab.long());
    granted(&*client, &holder).await;
    for n in 0..250 {
        let claim = Claim::new(key(&format!("orders:n{}", n % 20)), lab.long());
        granted(&*client, &claim).await;
        busy(&*client, &Claim::new(key("held"), lab.long())).await;
        freed(&*client, &claim).await;
        assert_eq!(release(&*client, &claim).await, Release::NotHeld);
    }
    freed(&*client, &holder).await;
}

/// Requests of many tasks share a client and must not wait for each other for ever, whatever its pool's size.
pub async fn many_requests_at_once_through_one_client_are_all_answered(lab: &Lab) {
    let client = lab.client().await;
    let claims: Vec<_> =
        (0..64).map(|n| Claim::new(key(&format!("orders:n{n}")), lab.long())).collect();
    join_all(claims.iter().map(|claim| granted(&*client, claim))).await;
    for answer in client.renew(&claims).await {
        assert!(matches!(answer, Ok(Renewal::Renewed(_))), "{answer:?}");
    }
    join_all(claims.iter().map(|claim| freed(&*client, claim))).await;
}

/// Only a store that queues may keep a claim that was refused, and a release must take it out again.
pub async fn a_busy_claim_is_not_kept_beyond_its_release(lab: &Lab) {
    let client = lab.client().await;
    let holder = Claim::new(key("orders:42"), lab.long());
    let refused = Claim::new(key("orders:42"), lab.long()).with_queue(true);
    granted(&*client, &holder).await;
    busy(&*client, &refused).await;
    assert_eq!(release(&*client, &refused).await, Release::NotHeld);
    freed(&*client, &holder).await;
    let next = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &next).await;
    freed(&*client, &next).await;
}

/// A busy answer is an answer; a claim that does not queue may simply be dropped.
pub async fn a_busy_claim_leaves_nothing_behind(lab: &Lab) {
    let client = lab.client().await;
    let holder = Claim::new(key("orders:42"), lab.long());
    granted(&*client, &holder).await;
    for _ in 0..10 {
        busy(&*client, &Claim::new(key("orders:42"), lab.long())).await;
    }
    freed(&*client, &holder).await;
    assert!(is_free(&*client, holder.key()).await, "those who were refused hold nothing");
}

/// A store that queues grants in the order of arrival, whichever client the claims came through.
pub async fn queued_claims_are_granted_in_the_order_of_their_arrival(lab: &Lab) {
    let clients = [lab.client().await, lab.client().await];
    let claims: Vec<_> =
        (0..6).map(|_| Claim::new(key("orders:42"), lab.long()).with_queue(true)).collect();
    granted(&*clients[0], &claims[0]).await;
    for (n, claim) in claims.iter().enumerate().skip(1) {
        busy(&*clients[n % 2], claim).await;
    }
    for first in 0..claims.len() {
        // Whoever asks out of order is still behind those who came before.
        for (n, claim) in claims.iter().enumerate().skip(first + 1).rev() {
            busy(&*clients[n % 2], claim).await;
        }
        granted(&*clients[first % 2], &claims[first]).await;
        freed(&*clients[first % 2], &claims[first]).await;
    }
}

/// One that leaves the store's queue does not block those behind it.
pub async fn a_queued_claim_that_is_released_lets_the_next_one_pass(lab: &Lab) {
    let client = lab.client().await;
    let claims: Vec<_> =
        (0..3).map(|_| Claim::new(key("orders:42"), lab.long()).with_queue(true)).collect();
    granted(&*client, &claims[0]).await;
    busy(&*client, &claims[1]).await;
    busy(&*client, &claims[2]).await;
    assert_eq!(release(&*client, &claims[1]).await, Release::NotHeld);
    freed(&*client, &claims[0]).await;
    granted(&*client, &claims[2]).await;
    freed(&*client, &claims[2]).await;
    assert!(
        matches!(attempt(&*client, &claims[1]).await, Attempt::Granted(_)),
        "its place was gone, not its right"
    );
    freed(&*client, &claims[1]).await;
}

/// `doctor` asks a store that works; it must not be the thing that fails.
pub async fn a_store_that_works_can_be_diagnosed(lab: &Lab) {
    let client = lab.client().await;
    client.diagnose().await.expect("a store that can be reached is diagnosed");
    assert!(is_free(&*client, &key("orders:42")).await, "a diagnosis holds nothing");
}
