//! Clients that reach only a follower, which forwards each `LeaseKeepAlive` to the leader.

use std::sync::Arc;

use futures_util::future::join_all;
use registry_core::{LockGuard, Registry};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::{EtcdCluster, EtcdOptions};
use registry_testkit::proxy::FaultProxy;
use tokio::time::sleep;

use super::workload::{millis, secs};

/// The locks need 125 renewals per second. One stream carries at most 25, because each takes a
/// round trip of 40 ms between the members.
#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_locks_are_renewed_through_a_distant_follower() {
    let options = EtcdOptions::new().peer_delay(millis(20));
    let cluster = EtcdCluster::start_with(3, &options).await.unwrap();
    let follower = (cluster.leader().await.unwrap() + 1) % 3;
    let proxy = FaultProxy::start(cluster.member(follower).addr()).unwrap();
    let config = EtcdConfig::new([(proxy.addr().ip().to_string(), proxy.addr().port())]);
    let backend = EtcdBackend::open(config).await.unwrap();
    let registry = Registry::builder(Arc::new(backend)).lease(LEASE).build().unwrap();
    let mut guards: Vec<LockGuard> = Vec::new();
    let locks: Vec<_> = (0..500).map(|n| registry.obtain(&format!("key-{n}"))).collect();
    for batch in locks.chunks(100) {
        let granted = join_all(batch.iter().map(|lock| lock.lock())).await;
        guards.extend(granted.into_iter().map(Result::unwrap));
    }
    let lost = || guards.iter().filter(|guard| !guard.is_held()).count();
    // Long enough for a lease without renewals to end.
    sleep(LEASE * 2).await;
    assert_eq!(lost(), 0, "each round is renewed in time");
    // After a reconnection, all claims are verified at once.
    proxy.cut_all().await;
    sleep(LEASE).await;
    assert_eq!(lost(), 0, "the connection is replaced in time");
}

const LEASE: std::time::Duration = secs(12);
