//! Mutants of the Redis store, and the mutant of the engine's handling of force-released locks. On
//! a real server, each violates a property.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, Claim, Key, LockBackend as _, Mutant as EngineMutant, Registry, Renewal,
    switch_mutant as switch_engine_mutant,
};
use registry_redis::{Mutant, RedisBackend, RedisConfig, switch_mutant};
use registry_testkit::eventually;
use registry_testkit::redis::RedisServer;
use tokio::time::timeout;

/// Renewals start after a third of the lease, long after each test has ended.
const LEASE: Duration = Duration::from_secs(300);
/// Long enough for any machine; reached only with a mutant.
const SOON: Duration = Duration::from_secs(10);
/// Opening a connection may take long on a busy machine.
const CONNECT: Duration = Duration::from_secs(30);

async fn store(server: &RedisServer) -> Arc<RedisBackend> {
    let config = RedisConfig::from_url(&server.url()).unwrap().with_connect_timeout(CONNECT);
    Arc::new(RedisBackend::open(config).await.unwrap())
}

/// Returns whether a claim stays held after the server has refused to renew it.
async fn a_refused_renewal_ends_no_lock(server: &RedisServer) -> bool {
    let store = store(server).await;
    let claim = Claim::new(Key::new("refused").unwrap(), LEASE);
    assert!(matches!(store.try_acquire(&claim).await.unwrap(), Attempt::Granted(_)));
    server.send_command("CONFIG SET min-replicas-to-write 1").await.unwrap();
    let renewed = store.renew(std::slice::from_ref(&claim)).await.remove(0);
    server.send_command("CONFIG SET min-replicas-to-write 0").await.unwrap();
    let _ = store.release(&claim).await.unwrap();
    !matches!(renewed, Ok(Renewal::Gone))
}

/// Returns whether a holder is notified at once when its own registry force-releases its lock.
async fn a_process_that_breaks_its_own_lock_is_notified(server: &RedisServer) -> bool {
    let registry = Registry::builder(store(server).await).lease(LEASE).build().unwrap();
    let guard = registry.obtain("broken").lock().await.unwrap();
    // Waits until the first verification is over, which would detect the loss itself.
    eventually(SOON, async || {
        server.send_command("INFO stats").await.unwrap().contains("tracking_total_keys:1\r\n")
    })
    .await;
    assert!(registry.force_release("broken").await.unwrap());
    timeout(SOON, guard.lost()).await.is_ok()
}

#[test]
fn every_bug_of_the_redis_store_is_found_and_nothing_else() {
    let _serialized = super::serialized();
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let server = RedisServer::start(&[]).await.unwrap();
        assert!(a_refused_renewal_ends_no_lock(&server).await, "without a bug");
        assert!(a_process_that_breaks_its_own_lock_is_notified(&server).await, "without a bug");
        for mutant in Mutant::ALL {
            switch_mutant(Some(mutant));
            assert!(!a_refused_renewal_ends_no_lock(&server).await, "{mutant:?} is not found");
        }
        switch_mutant(None);
        switch_engine_mutant(Some(EngineMutant::ForcedReleaseUnverified));
        let is_missed = a_process_that_breaks_its_own_lock_is_notified(&server).await;
        switch_engine_mutant(None);
        assert!(!is_missed, "ForcedReleaseUnverified is not found");
    });
}
