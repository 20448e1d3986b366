//! The load of locks on the members, as counted by the members' metrics: the number of streams and
//! calls, and the waiters that a release wakes.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{LockOptions, Registry};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::eventually;
use tokio::time::sleep;

async fn registry(server: &EtcdServer) -> Registry {
    let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
    let open = async || EtcdBackend::open(config.clone()).await;
    let backend = eventually(Duration::from_secs(60), open).await;
    // Calls may take long on a loaded machine. All leases of these tests are longer.
    Registry::builder(Arc::new(backend)).timeout(Duration::from_secs(8)).build().unwrap()
}

/// Returns the number of calls of this method, including streams.
async fn calls(server: &EtcdServer, method: &str) -> u64 {
    server.metric("grpc_server_started_total", &format!("grpc_method=\"{method}\"")).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_held_locks_use_a_few_lease_streams_and_one_watch_stream() {
    let server = EtcdServer::start().await.unwrap();
    let registry = registry(&server).await;
    let options = || LockOptions::new().lease(Duration::from_secs(9));
    // More locks than one page of a list contains.
    let locks: Vec<_> = (0..1_010).map(|n| registry.obtain(&format!("orders/{n}"))).collect();
    let mut guards = Vec::new();
    for batch in locks.chunks(100) {
        for guard in join_all(batch.iter().map(|lock| lock.lock_with(options()))).await {
            guards.push(guard.unwrap());
        }
    }
    let before = calls(&server, "Txn").await;
    // Long enough for two renewals of each lock.
    sleep(Duration::from_secs(10)).await;
    assert!(guards.iter().all(|guard| guard.is_held()));
    // One stream, or more if a busy machine slows the member.
    let streams = calls(&server, "LeaseKeepAlive").await;
    assert!((1..=16).contains(&streams), "{streams} streams");
    assert_eq!(calls(&server, "Watch").await, 1);
    // One call verifies a hundred claims.
    let calls_sent = calls(&server, "Txn").await - before;
    assert!(calls_sent < 200, "{calls_sent} calls for some thousands of renewals");
    let mut keys = HashSet::new();
    for holder in registry.list().await.unwrap() {
        assert!(keys.insert(holder.key.clone()), "listed twice: {}", holder.key);
    }
    assert_eq!(keys.len(), guards.len());
    for batch in guards.chunks_mut(100) {
        assert!(batch.iter().all(|guard| guard.is_held()));
    }
    for released in join_all(guards.into_iter().map(registry_core::LockGuard::unlock)).await {
        released.unwrap();
    }
}

/// A waiter is notified over the watch stream. While that works, its polls send no requests.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_send_only_keep_alives() {
    let server = EtcdServer::start().await.unwrap();
    let (holder, waiter) = (registry(&server).await, registry(&server).await);
    let keys: Vec<_> = (0..200).map(|n| format!("orders/{n}")).collect();
    // So long that renewals do not affect the count.
    let options = || LockOptions::new().lease(Duration::from_secs(3_600));
    let locks: Vec<_> = keys.iter().map(|key| holder.obtain(key)).collect();
    let held = join_all(locks.iter().map(|lock| lock.lock_with(options()))).await;
    let waiting: Vec<_> = keys.iter().map(|key| waiter.obtain(key)).collect();
    let waiting: Vec<_> =
        waiting.into_iter().map(|lock| tokio::spawn(async move { lock.lock().await })).collect();
    let watches = async || {
        let watches = server.metric("etcd_debugging_mvcc_watcher_total", "").await.unwrap();
        if watches >= 400 { Ok(()) } else { Err(format!("{watches} watches")) }
    };
    eventually(Duration::from_secs(60), watches).await;
    // The first poll after the watch is confirmed reads the whole queue.
    sleep(Duration::from_secs(3)).await;
    let messages = async || server.metric("grpc_server_msg_received_total", "").await.unwrap();
    let before = messages().await;
    sleep(Duration::from_secs(10)).await;
    let sent = messages().await - before;
    assert!(sent < 400, "{sent} messages of 200 waiters in 10 s");
    assert_eq!(calls(&server, "Watch").await, 2, "each client still uses its first stream");
    for guard in held {
        guard.unwrap().unlock().await.unwrap();
    }
    for granted in waiting {
        let granted = registry_testkit::within(Duration::from_secs(60), granted).await;
        granted.unwrap().unwrap().unlock().await.unwrap();
    }
}

/// A release wakes only the next waiter, however long the queue is.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_wakes_only_the_next_waiter() {
    let server = EtcdServer::start().await.unwrap();
    let first = registry(&server).await;
    let mut guard = first.obtain("key").lock().await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..20 {
        let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
        let backend = EtcdBackend::open(config).await.unwrap();
        let poll = Duration::from_secs(600);
        let builder = Registry::builder(Arc::new(backend)).poll(poll);
        let lock = builder.build().unwrap().obtain("key");
        waiting.push(tokio::spawn(async move { lock.lock().await.unwrap() }));
        let queue = "lock-registry/key/";
        let queued = async || {
            let names = server.ctl(&["get", queue, "--prefix", "--keys-only"]).await.unwrap();
            let count = names.lines().filter(|line| !line.is_empty()).count();
            if count == n + 2 { Ok(()) } else { Err(format!("{count} entries")) }
        };
        eventually(Duration::from_secs(60), queued).await;
    }
    let before = calls(&server, "Txn").await;
    for next in waiting {
        guard.unlock().await.unwrap();
        guard = registry_testkit::within(Duration::from_secs(60), next).await.unwrap();
    }
    guard.unlock().await.unwrap();
    // Two calls per release: the release itself, and a read by the next waiter.
    let calls = calls(&server, "Txn").await - before;
    assert!(calls <= 2 * 21, "{calls} calls for 21 releases");
}
