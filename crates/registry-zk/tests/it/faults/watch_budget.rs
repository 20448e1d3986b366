//! More locks in one session than the session can watch. One server.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, select_all, try_join_all};
use registry_core::{LockGuard, Registry};
use registry_testkit::proxy::FaultProxy;
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::{ZooKeeperOptions, ZooKeeperServer};
use registry_testkit::{eventually, within};
use registry_zk::ZkBackend;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::support::{config, operator, secs};

/// More nodes than the watch budget of one session; see `WatchBudget`.
const HELD: usize = 2_000;
const CONTENDED: usize = 400;
/// Long enough to acquire all these locks, even on a slow machine.
const SESSION: Duration = Duration::from_secs(40);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// Opens a store with time-outs for many concurrent requests.
async fn open(url: &str) -> (Arc<ZkBackend>, Registry) {
    let config = config(url, SESSION).with_request_timeout(REQUEST_TIMEOUT);
    let backend = Arc::new(ZkBackend::open(config).await.unwrap());
    let builder = Registry::builder(Arc::clone(&backend) as Arc<_>).timeout(REQUEST_TIMEOUT);
    let registry = builder.lease(backend.session_timeout() / 2).build().unwrap();
    (backend, registry)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_connection_ends_no_hold_of_two_thousand() {
    let options = ZooKeeperOptions::new().without_fsync();
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let operator = operator(&server).await;
    let (_, other_client) = open(&server.url()).await;
    let (backend, client) = open(&format!("zk://{}", proxy.addr())).await;
    let session = backend.session_id();

    let acquire_all = |registry: &Registry, kind: &str, count: usize| {
        let locks: Vec<_> = (0..count).map(|n| registry.obtain(&format!("{kind}/{n}"))).collect();
        async move {
            let mut all = Vec::new();
            for chunk in locks.chunks(50) {
                all.extend(try_join_all(chunk.iter().map(|lock| lock.lock())).await.unwrap());
            }
            all
        }
    };
    let other_guards = acquire_all(&other_client, "awaited", CONTENDED).await;
    let held = acquire_all(&client, "held", HELD).await;
    let mut waiter_tasks = JoinSet::new();
    for n in 0..CONTENDED {
        let lock = client.obtain(&format!("awaited/{n}"));
        waiter_tasks.spawn(async move { lock.lock().await });
    }
    let is_queued = async |n: usize| {
        let path = format!("/lock-registry/default/awaited%2F{n}");
        operator.list_children(&path).await.unwrap().len() == 2
    };
    eventually(LONG, async || {
        join_all((0..CONTENDED).map(&is_queued)).await.iter().all(|queued| *queued)
    })
    .await;
    // The watch budget is used up by some held locks and some waiters.
    let watches = async || server.metric("zk_watch_count").await.unwrap();
    eventually(LONG, async || watches().await > 1_200).await;

    for _ in 0..3 {
        let before = proxy.counts().accepted;
        proxy.cut_all().await;
        proxy.until(LONG, |counts| counts.accepted > before).await.unwrap();
        // The registry still grants locks.
        within(LONG, client.obtain("another").lock()).await.unwrap().unlock().await.unwrap();
    }
    let connections = proxy.counts().accepted;
    let any = select_all(held.iter().map(|guard| Box::pin(guard.lost())));
    assert!(timeout(SESSION + secs(5), any).await.is_err(), "a lock was lost");
    assert!(held.iter().all(LockGuard::is_held));
    assert_eq!(backend.session_id(), session);
    assert!(proxy.counts().accepted <= connections + 2, "{:?}", proxy.counts());

    // Each waiter acquires its lock and each holder detects a deleted node, watched or not.
    drop(join_all(other_guards.into_iter().map(LockGuard::unlock)).await);
    let mut next = Vec::new();
    while let Some(guard) = within(LONG, waiter_tasks.join_next()).await {
        next.push(guard.unwrap().unwrap());
    }
    assert_eq!(next.len(), CONTENDED);
    for n in [0, HELD - 1] {
        let path = format!("/lock-registry/default/held%2F{n}");
        for name in operator.list_children(&path).await.unwrap() {
            operator.delete(&format!("{path}/{name}"), None).await.unwrap();
        }
        within(LONG, held[n].lost()).await;
    }
}
