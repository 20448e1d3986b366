//! Tombstones: a holder writes, rewrites and deletes them when required. One member.

use std::sync::Arc;

use registry_core::{LockOptions, Registry};
use registry_etcd::EtcdBackend;
use registry_testkit::etcd::EtcdServer;
use registry_testkit::eventually;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::one::{config_of, first_lease, lock_keys, server};
use super::workload::{LEASE, LONG, millis, registry, secs};

/// Revokes all leases except that of the entry of `key`.
async fn revoke_tombstone_leases(server: &EtcdServer, key: &str) {
    let entry_lease = first_lease(server, key).await.unwrap();
    let all = server.ctl(&["lease", "list"]).await.unwrap();
    // Unlike key names, this list pads lease numbers with zeros.
    for lease in all.lines().skip(1).filter(|lease| lease.trim_start_matches('0') != entry_lease) {
        server.ctl(&["lease", "revoke", lease]).await.unwrap();
    }
    assert_eq!(lock_keys(server).await.len(), 1, "only the entry");
}

async fn wait_for_key_count(server: &EtcdServer, count: usize) {
    eventually(LONG, async || match lock_keys(server).await {
        keys if keys.len() == count => Ok(()),
        keys => Err(format!("{keys:?}")),
    })
    .await;
}

/// The new tombstone delays the next grant like the deleted one.
#[tokio::test]
async fn a_holder_rewrites_a_tombstone_that_another_client_has_deleted() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let second_client = registry(&config, LEASE).await;
    for waits in [false, true] {
        let first_client = registry(&config_of(proxy.addr()), LEASE).await;
        let guard = first_client.obtain("key").lock().await.unwrap();
        let waiting = waits.then(|| {
            let lock = second_client.obtain("key");
            tokio::spawn(async move { lock.lock().await })
        });
        if waits {
            wait_for_key_count(&server, 4).await;
            let keys_before = lock_keys(&server).await;
            let entry_lease = first_lease(&server, "key").await.unwrap();
            // Revokes only the holder's tombstone lease. The waiter's tombstone has a different
            // lease.
            let all = server.ctl(&["lease", "list"]).await.unwrap();
            for lease in all.lines().skip(1) {
                let keys = server.ctl(&["lease", "timetolive", lease, "--keys"]).await.unwrap();
                if keys.contains(&format!("key!{entry_lease}")) {
                    server.ctl(&["lease", "revoke", lease]).await.unwrap();
                }
            }
            assert_eq!(lock_keys(&server).await.len(), 3, "of {keys_before:?}");
            wait_for_key_count(&server, 4).await;
        } else {
            revoke_tombstone_leases(&server, "key").await;
            wait_for_key_count(&server, 2).await;
        }
        proxy.set_mode(ProxyMode::BlackHole).await.unwrap();
        let lease = first_lease(&server, "key").await.unwrap();
        let started = Instant::now();
        server.ctl(&["lease", "revoke", &lease]).await.unwrap();
        let next = match waiting {
            Some(waiting) => waiting.await.unwrap().unwrap(),
            None => second_client.obtain("key").lock().await.unwrap(),
        };
        assert!(started.elapsed() >= millis(250), "too soon: after {:?}", started.elapsed());
        next.unlock().await.unwrap();
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        drop(guard);
        _ = first_client.close(LONG).await;
        wait_for_key_count(&server, 0).await;
    }
}

/// `close` abandons the lock, and the process continues.
#[tokio::test]
async fn an_abandoned_lock_leaves_no_keys() {
    let (server, config) = server().await;
    let backend = Arc::new(EtcdBackend::open(config).await.unwrap());
    let registry = || Registry::builder(Arc::clone(&backend) as _).lease(LEASE).build().unwrap();
    let (first_registry, second_registry) = (registry(), registry());
    let guard = second_registry.obtain("other").lock().await.unwrap();
    let options = LockOptions::new().min_hold(LEASE);
    let guard_with_min_hold = first_registry.obtain("key").lock_with(options).await.unwrap();
    guard_with_min_hold.unlock().await.unwrap();
    let report = first_registry.close(millis(10)).await;
    assert_eq!(report.abandoned, 1, "{report:?}");
    assert_eq!(lock_keys(&server).await.len(), 4);
    wait_for_key_count(&server, 2).await;
    guard.unlock().await.unwrap();
    assert_eq!(second_registry.close(secs(10)).await.lost, 0);
}

#[tokio::test]
async fn concurrent_claims_share_one_tombstone_lease() {
    let (server, config) = server().await;
    let first_client = registry(&config, LEASE).await;
    let many = (0..50).map(|number| first_client.obtain(&format!("key/{number}")));
    let locking = many.map(|lock| tokio::spawn(async move { lock.lock().await }));
    let mut guards = Vec::new();
    for locking in locking.collect::<Vec<_>>() {
        guards.push(locking.await.unwrap().unwrap());
    }
    let granted = server.metric("etcd_debugging_lease_granted_total", "").await.unwrap();
    assert_eq!(granted, 51, "one for each entry, and one for all tombstones");
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    wait_for_key_count(&server, 0).await;
}

/// Each of the two clients reuses one lease. When the next grant is checked, the lease of the
/// previous holder is therefore in the queue again.
#[tokio::test]
async fn a_grant_after_a_release_is_not_delayed() {
    const ROUNDS: u32 = 200;
    let (server, config) = server().await;
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for _ in 0..2 {
        let registry = registry(&config, secs(30)).await;
        clients.spawn(async move {
            let lock = registry.obtain("key");
            for _ in 0..ROUNDS / 2 {
                lock.lock().await.unwrap().unlock().await.unwrap();
            }
        });
    }
    clients.join_all().await;
    let (took, all_delays) = (started.elapsed(), millis(250) * ROUNDS);
    assert!(took < all_delays / 2, "{took:?} for {ROUNDS} rounds");
    assert_eq!(lock_keys(&server).await, [""; 0]);
}
