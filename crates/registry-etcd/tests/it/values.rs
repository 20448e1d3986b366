//! Value blocks: a write takes effect only while the claim is exclusive. One member, without an
//! engine.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

use std::time::Duration;

use registry_core::{
    Attempt, Claim, ClaimMode, FencingToken, Key, LockBackend, ValueStore, ValueWrite,
};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;

async fn client(server: &EtcdServer) -> EtcdBackend {
    let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
    EtcdBackend::open(config).await.unwrap()
}

async fn granted(client: &EtcdBackend, claim: &Claim) -> FencingToken {
    match client.try_acquire(claim).await.unwrap() {
        Attempt::Granted(grant) => grant.token,
        other => panic!("{claim:?}: {other:?}"),
    }
}

/// The first client does not know of the conversions, like a request that arrives after them.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_write_of_a_claim_that_was_downgraded_has_no_effect() {
    let server = EtcdServer::start().await.unwrap();
    let (first, second) = (client(&server).await, client(&server).await);
    let key = Key::new("key").unwrap();
    let claim = Claim::new(key.clone(), Duration::from_secs(60));
    let token = granted(&first, &claim).await;
    let late_write = async || first.set_value(&claim, token, b"late").await.unwrap();
    assert_eq!(late_write().await, ValueWrite::Written);
    let convert = |mode| claim.clone().converted_to(mode).restricted_to_grant(token);
    granted(&second, &convert(ClaimMode::Upgradable)).await;
    assert_eq!(late_write().await, ValueWrite::NotHeld);
    let upgraded = granted(&second, &convert(ClaimMode::Exclusive)).await;
    let new_write = second.set_value(&claim, upgraded, b"new").await.unwrap();
    assert_eq!(new_write, ValueWrite::Written);
    assert_eq!(late_write().await, ValueWrite::NotHeld);
    let value = first.value(&key).await.unwrap().value.unwrap();
    assert_eq!((value.token, &*value.bytes), (upgraded, &b"new"[..]));
}
