//! Tombstones exist as long as they are needed, and no longer.

use std::sync::Arc;

use registry_core::{LockOptions, LockRegistry as _, Registry};
use registry_etcd::EtcdBackend;
use registry_testkit::etcd::EtcdServer;
use registry_testkit::eventually;
use registry_testkit::proxy::{FaultProxy, Mode};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::contest::{LEASE, LONG, millis, registry, secs};
use crate::one::{lease_of, left, of, server};

/// Revokes all leases except that of the entry of `key`.
async fn end_leases_of_traces(server: &EtcdServer, key: &str) {
    let place = lease_of(server, key).await.unwrap();
    let all = server.ctl(&["lease", "list"]).await.unwrap();
    // Unlike key names, this list pads lease numbers with zeros.
    for lease in all.lines().skip(1).filter(|lease| lease.trim_start_matches('0') != place) {
        server.ctl(&["lease", "revoke", lease]).await.unwrap();
    }
    assert_eq!(left(server).await.len(), 1, "only the place");
}

async fn stand(server: &EtcdServer, count: usize) {
    eventually(LONG, async || match left(server).await {
        left if left.len() == count => Ok(()),
        left => Err(format!("{left:?}")),
    })
    .await;
}

/// A new tombstone keeps the next claim cautious, even if another client has ended the old one.
#[tokio::test]
async fn a_holder_whose_trace_somebody_else_has_ended_leaves_another_one() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let theirs = registry(&config, LEASE).await;
    for waits in [false, true] {
        let ours = registry(&of(proxy.addr()), LEASE).await;
        let guard = ours.obtain("key").lock().await.unwrap();
        let waiting = waits.then(|| {
            let lock = theirs.obtain("key");
            tokio::spawn(async move { lock.lock().await })
        });
        if waits {
            stand(&server, 4).await;
            let waiter = left(&server).await;
            let place = lease_of(&server, "key").await.unwrap();
            // Revokes only the holder's tombstone lease. The waiter's tombstone has a different
            // lease.
            let all = server.ctl(&["lease", "list"]).await.unwrap();
            for lease in all.lines().skip(1) {
                let keys = server.ctl(&["lease", "timetolive", lease, "--keys"]).await.unwrap();
                if keys.contains(&format!("key!{place}")) {
                    server.ctl(&["lease", "revoke", lease]).await.unwrap();
                }
            }
            assert_eq!(left(&server).await.len(), 3, "of {waiter:?}");
            stand(&server, 4).await;
        } else {
            end_leases_of_traces(&server, "key").await;
            stand(&server, 2).await;
        }
        proxy.set_mode(Mode::BlackHole).await.unwrap();
        let lease = lease_of(&server, "key").await.unwrap();
        let begun = Instant::now();
        server.ctl(&["lease", "revoke", &lease]).await.unwrap();
        let next = match waiting {
            Some(waiting) => waiting.await.unwrap().unwrap(),
            None => theirs.obtain("key").lock().await.unwrap(),
        };
        assert!(begun.elapsed() >= millis(250), "too soon: after {:?}", begun.elapsed());
        next.unlock().await.unwrap();
        proxy.set_mode(Mode::Pass).await.unwrap();
        drop(guard);
        ours.close(LONG).await;
        stand(&server, 0).await;
    }
}

/// No call releases this lock, and the process continues.
#[tokio::test]
async fn a_lock_that_is_left_to_its_lease_leaves_nothing_behind() {
    let (server, config) = server().await;
    let backend = Arc::new(EtcdBackend::open(config).await.unwrap());
    let registry = || Registry::builder(Arc::clone(&backend) as _).lease(LEASE).build().unwrap();
    let (ours, goes_on) = (registry(), registry());
    let guard = goes_on.obtain("other").lock().await.unwrap();
    let terms = LockOptions::new().min_hold(LEASE);
    let left_alone = ours.obtain("key").lock_with(terms).await.unwrap().unwrap();
    left_alone.unlock().await.unwrap();
    let report = ours.close(millis(10)).await;
    assert_eq!(report.abandoned, 1, "{report:?}");
    assert_eq!(left(&server).await.len(), 4);
    stand(&server, 2).await;
    guard.unlock().await.unwrap();
    assert_eq!(goes_on.close(secs(10)).await.lost, 0);
}

/// Concurrent callers share one lease request.
#[tokio::test]
async fn those_who_come_at_once_share_one_lease_for_their_traces() {
    let (server, config) = server().await;
    let ours = registry(&config, LEASE).await;
    let many = (0..50).map(|number| ours.obtain(&format!("key/{number}")));
    let locking = many.map(|lock| tokio::spawn(async move { lock.lock().await }));
    let mut guards = Vec::new();
    for locking in locking.collect::<Vec<_>>() {
        guards.push(locking.await.unwrap().unwrap());
    }
    let granted = server.figure("etcd_debugging_lease_granted_total", "").await.unwrap();
    assert_eq!(granted, 51, "one for each place, and one");
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    stand(&server, 0).await;
}

/// The delay also does not occur if the previous holder's lease is in the queue again. Each of the
/// two clients reuses the same lease every time.
#[tokio::test]
async fn nobody_waits_for_those_who_let_go() {
    const TURNS: u32 = 200;
    let (server, config) = server().await;
    let begun = Instant::now();
    let mut taking_turns = JoinSet::new();
    for _ in 0..2 {
        let registry = registry(&config, secs(30)).await;
        taking_turns.spawn(async move {
            let lock = registry.obtain("key");
            for _ in 0..TURNS / 2 {
                lock.lock().await.unwrap().unlock().await.unwrap();
            }
        });
    }
    taking_turns.join_all().await;
    let (took, waits) = (begun.elapsed(), millis(250) * TURNS);
    assert!(took < waits / 2, "{took:?} for {TURNS} turns");
    assert_eq!(left(&server).await, [""; 0]);
}
