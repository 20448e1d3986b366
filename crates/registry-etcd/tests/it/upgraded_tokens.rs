//! Claims that are queued behind an upgraded claim have larger tokens than the upgrade. One member,
//! without an engine.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

use std::time::Duration;

use registry_core::{
    Attempt, Claim, ClaimMode, FencingToken, Key, LockBackend, Queueing, Release, Renewal,
};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;

async fn client(server: &EtcdServer) -> EtcdBackend {
    let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
    EtcdBackend::open(config).await.unwrap()
}

fn queued_claim(mode: ClaimMode) -> Claim {
    let claim = Claim::new(Key::new("key").unwrap(), Duration::from_secs(60));
    claim.with_mode(mode).with_queueing(Queueing::Join)
}

async fn granted(client: &EtcdBackend, claim: &Claim) -> FencingToken {
    match client.try_acquire(claim).await.unwrap() {
        Attempt::Granted(grant) => grant.token,
        other => panic!("{claim:?}: {other:?}"),
    }
}

async fn assert_busy(client: &EtcdBackend, claim: &Claim) {
    let attempt = client.try_acquire(claim).await.unwrap();
    assert!(matches!(attempt, Attempt::Busy(_)), "{claim:?}: {attempt:?}");
}

/// The claims of a queue are granted with increasing tokens. They are enqueued before the upgrade,
/// after the upgrade, or between the release of the upgraded claim and the next grant.
#[tokio::test(flavor = "multi_thread")]
async fn all_claims_behind_an_upgraded_one_have_larger_tokens() {
    let server = EtcdServer::start().await.unwrap();
    let (first, second) = (client(&server).await, client(&server).await);
    let permits = ClaimMode::Permits { take: 1, of: 2 };
    for next in [ClaimMode::Exclusive, ClaimMode::Upgradable, permits] {
        let upgradable = queued_claim(ClaimMode::Upgradable);
        let token = granted(&first, &upgradable).await;
        let mut queue = Vec::new();
        for mode in [next, ClaimMode::Exclusive, ClaimMode::Shared, permits, permits] {
            queue.push(queued_claim(mode));
            assert_busy(&second, queue.last().unwrap()).await;
        }
        let upgrade =
            upgradable.clone().converted_to(ClaimMode::Exclusive).restricted_to_grant(token);
        let upgraded = granted(&first, &upgrade).await;
        queue.push(queued_claim(ClaimMode::Upgradable));
        assert_busy(&second, queue.last().unwrap()).await;
        assert_eq!(first.release(&upgradable).await.unwrap(), Release::Freed);
        for mode in [ClaimMode::Exclusive, permits, ClaimMode::Exclusive] {
            queue.push(queued_claim(mode));
            assert_busy(&second, queue.last().unwrap()).await;
        }
        assert_are_granted_after(&second, queue, upgraded).await;
    }
}

/// A claim that was enqueued behind an exclusive claim has a larger token than an upgrade of that
/// claim after a downgrade. The queue has more claims than one transaction can change.
#[tokio::test(flavor = "multi_thread")]
async fn claims_that_waited_through_a_downgrade_and_an_upgrade_have_larger_tokens() {
    let server = EtcdServer::start().await.unwrap();
    let (first, second) = (client(&server).await, client(&server).await);
    let exclusive = queued_claim(ClaimMode::Exclusive);
    let token = granted(&first, &exclusive).await;
    let permits = ClaimMode::Permits { take: 1, of: 2 };
    let modes = [ClaimMode::Exclusive, ClaimMode::Upgradable, ClaimMode::Shared, permits];
    let mut queue = Vec::new();
    for mode in modes.into_iter().cycle().take(120) {
        queue.push(queued_claim(mode));
        assert_busy(&second, queue.last().unwrap()).await;
    }
    let downgrade =
        exclusive.clone().converted_to(ClaimMode::Upgradable).restricted_to_grant(token);
    assert_eq!(granted(&first, &downgrade).await, token);
    for mode in modes {
        queue.push(queued_claim(mode));
        assert_busy(&second, queue.last().unwrap()).await;
    }
    let upgrade = exclusive.clone().converted_to(ClaimMode::Exclusive).restricted_to_grant(token);
    let upgraded = granted(&first, &upgrade).await;
    assert_eq!(granted(&first, &upgrade).await, upgraded);
    assert_eq!(first.release(&exclusive).await.unwrap(), Release::Freed);
    assert_are_granted_after(&second, queue, upgraded).await;
}

/// Asserts that the claims are granted one after the other, with tokens that grow from `last` on.
async fn assert_are_granted_after(client: &EtcdBackend, queue: Vec<Claim>, mut last: FencingToken) {
    for claim in queue {
        let token = granted(client, &claim).await;
        assert!(token > last, "{claim:?}: {token:?} after {last:?}");
        assert_eq!(granted(client, &claim).await, token, "{claim:?}");
        let holders = client.admin().unwrap().inspect(claim.key()).await.unwrap();
        assert!(holders.iter().any(|holder| holder.token == Some(token)), "{holders:?}");
        let renewed = client.renew(std::slice::from_ref(&claim)).await.pop().unwrap();
        assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{renewed:?}");
        assert_eq!(client.release(&claim).await.unwrap(), Release::Freed, "{claim:?}");
        last = token;
    }
}
