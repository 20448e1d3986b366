//! Invalidations: the server notifies a holder whose lock is removed, long before a renewal would.
//! The leases are so long that no other mechanism can.

use std::time::Duration;

use registry_core::{LockGuard, LockRegistry as _, LostReason, Registry};
use registry_redis::RedisConfig;
use registry_testkit::redis::{RedisCluster, RedisQuorum, RedisServer, SentinelSetup};
use registry_testkit::{eventually, within};
use tokio::time::Instant;

use crate::contest::{LONG, registry};

/// Renewals start after a third of the lease.
const LEASE: Duration = Duration::from_secs(600);
/// The time limit for a notification on a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// Acquires `key`.
async fn held(registry: &Registry, key: &str) -> LockGuard {
    within(LONG, registry.obtain(key).lock()).await.unwrap()
}

/// Removes the lock by `happening` and waits until its holder is notified.
async fn is_told(what: &str, guard: &LockGuard, happening: impl Future) {
    assert!(guard.is_held());
    let told = tokio::spawn(guard.lost());
    let begun = Instant::now();
    happening.await;
    let reason = within(LONG, told).await.unwrap();
    let told_after = begun.elapsed();
    println!("{what}: told after {told_after:?}");
    assert_eq!(reason, LostReason::Gone);
    assert!(!guard.is_held());
    assert!(told_after < SOON, "{what}: {told_after:?}");
}

/// Changes that an operator can make to the lock of `k`.
const HAPPENINGS: [&str; 5] = [
    "DEL lock-registry:{k}",
    "UNLINK lock-registry:{k}",
    "SET lock-registry:{k} mine",
    "RENAME lock-registry:{k} elsewhere",
    "FLUSHALL",
];

/// Applies each of these changes to a new lock.
async fn is_told_of_all(kind: &str, registry: &Registry, server: &RedisServer) {
    for happening in HAPPENINGS {
        let guard = held(registry, "k").await;
        is_told(&format!("{kind}, {happening}"), &guard, server.ask(happening)).await;
        server.ask("DEL lock-registry:{k}").await.unwrap();
    }
}

/// Cuts the connection and waits until the lock is tracked over another one.
async fn cut(guard: &LockGuard, server: &RedisServer) {
    server.client_kill("normal").await.unwrap();
    eventually(LONG, async || guard.renew(LEASE).await.is_ok()).await;
}

#[tokio::test]
async fn a_single_server_tells_a_holder_whose_lock_is_taken_away() {
    let server = RedisServer::start(&[]).await.unwrap();
    let ours = registry(&RedisConfig::from_url(&server.url()).unwrap(), LEASE).await;
    assert!(ours.capabilities().reports_invalidations);
    is_told_of_all("single", &ours, &server).await;

    let guard = held(&ours, "k").await;
    cut(&guard, &server).await;
    is_told("single, after a cut", &guard, server.ask("DEL lock-registry:{k}")).await;

    // A change during the cut is detected as soon as a new connection exists.
    for _ in 0..5 {
        let guard = held(&ours, "k").await;
        is_told("single, in a cut", &guard, async {
            server.client_kill("normal").await.unwrap();
            server.ask("DEL lock-registry:{k}").await.unwrap();
        })
        .await;
    }
}

/// The verification after the disconnection fails while the server is down. The next one follows
/// the new connection.
#[tokio::test]
async fn a_holder_is_told_of_a_restart_without_data_as_soon_as_the_server_is_back() {
    let mut server = RedisServer::start(&[]).await.unwrap();
    let ours = registry(&RedisConfig::from_url(&server.url()).unwrap(), LEASE).await;
    let mut delays = Vec::new();
    for _ in 0..5 {
        let guard = held(&ours, "k").await;
        server.kill();
        server.lose_data().unwrap();
        // Long enough for some verifications to fail.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        assert!(guard.is_held());
        server.start_again().await.unwrap();
        let back = Instant::now();
        assert_eq!(within(SOON, guard.lost()).await, LostReason::Gone);
        delays.push(back.elapsed());
    }
    println!("single, restarted without data: told after {delays:?}");
}

#[tokio::test]
async fn a_single_server_tells_all_holders_when_it_is_emptied() {
    let server = RedisServer::start(&[]).await.unwrap();
    let ours = registry(&RedisConfig::from_url(&server.url()).unwrap(), LEASE).await;
    let mut guards = Vec::new();
    for key in 0..100 {
        guards.push(held(&ours, &format!("many/{key}")).await);
    }
    let begun = Instant::now();
    server.ask("FLUSHALL").await.unwrap();
    for guard in &guards {
        assert_eq!(within(LONG, guard.lost()).await, LostReason::Gone);
    }
    println!("single, FLUSHALL: the last of 100 told after {:?}", begun.elapsed());
    assert!(begun.elapsed() < SOON);
}

#[tokio::test]
async fn the_master_of_sentinels_tells_a_holder_whose_lock_is_taken_away() {
    let setup = SentinelSetup::start().await.unwrap();
    let config = RedisConfig::from_url(&setup.url()).unwrap();
    let ours = registry(&config, LEASE).await;
    let durable = registry(&config.with_replicas(1), LEASE).await;
    let master = setup.server(setup.master().await.unwrap());
    is_told_of_all("sentinel", &ours, master).await;
    is_told_of_all("sentinel, replicas=1", &durable, master).await;

    let guard = held(&ours, "k").await;
    cut(&guard, master).await;
    is_told("sentinel, after a cut", &guard, master.ask("DEL lock-registry:{k}")).await;

    // The lock survives a failover, and the new master tracks it.
    let guard = held(&ours, "k").await;
    let master = setup.server(setup.failover().await.unwrap());
    // The claim is verified at the new master before any renewal.
    let seen = async || master.ask("CLIENT LIST").await.unwrap().contains("cmd=eval");
    eventually(LONG, seen).await;
    is_told("sentinel, after a failover", &guard, master.ask("DEL lock-registry:{k}")).await;
}

#[tokio::test]
async fn the_masters_of_a_cluster_tell_a_holder_whose_lock_is_taken_away() {
    let cluster = RedisCluster::start().await.unwrap();
    let ours = registry(&RedisConfig::from_url(&cluster.url()).unwrap(), LEASE).await;
    let slot = RedisCluster::slot_of("lock-registry:{k}");
    let master = cluster.node(cluster.master_of(slot).await.unwrap());
    for happening in HAPPENINGS.iter().filter(|happening| !happening.starts_with("RENAME")) {
        let guard = held(&ours, "k").await;
        is_told(&format!("cluster, {happening}"), &guard, master.ask(happening)).await;
        master.ask("DEL lock-registry:{k}").await.unwrap();
    }
    let guard = held(&ours, "k").await;
    cut(&guard, master).await;
    is_told("cluster, after a cut", &guard, master.ask("DEL lock-registry:{k}")).await;

    let guard = held(&ours, "k").await;
    let to = cluster.master_of((slot + 6_000) % 16_384).await.unwrap();
    cluster.migrate(slot, to).await.unwrap();
    let master = cluster.node(to);
    let seen = async || master.ask("CLIENT LIST").await.unwrap().contains("cmd=eval");
    eventually(LONG, seen).await;
    is_told("cluster, after the slot has moved", &guard, master.ask("DEL lock-registry:{k}")).await;

    let guard = held(&ours, "k").await;
    let master = cluster.node(cluster.failover(slot).await.unwrap());
    eventually(LONG, async || master.ask("CLIENT LIST").await.unwrap().contains("cmd=eval")).await;
    is_told("cluster, after a failover", &guard, master.ask("DEL lock-registry:{k}")).await;
}

#[tokio::test]
async fn a_holder_hears_of_a_loss_while_its_slot_is_on_its_way() {
    let cluster = RedisCluster::start().await.unwrap();
    let ours = registry(&RedisConfig::from_url(&cluster.url()).unwrap(), LEASE).await;
    let slot = RedisCluster::slot_of("lock-registry:{k}");
    let guard = held(&ours, "k").await;
    let to = cluster.master_of((slot + 6_000) % 16_384).await.unwrap();
    let master = cluster.node(cluster.master_of(slot).await.unwrap());
    eventually(LONG, async || {
        master.ask("INFO stats").await.unwrap().contains("tracking_total_keys:1\r\n")
    })
    .await;
    let migration = cluster.begin_migration(slot, to).await.unwrap();
    assert!(cluster.migrate_key(&migration, "lock-registry:{k}").await.unwrap());
    let taker = cluster.node(to);
    let seen = async || taker.ask("CLIENT LIST").await.unwrap().contains("cmd=eval");
    eventually(LONG, seen).await;
    let mut operator = taker.connect().await.unwrap();
    is_told("cluster, while the slot is on its way", &guard, async {
        operator.ask_args(&["ASKING"]).await.unwrap();
        operator.ask_args(&["DEL", "lock-registry:{k}"]).await.unwrap();
    })
    .await;

    cluster.finish_migration(migration).await.unwrap();
    let guard = held(&ours, "k").await;
    is_told("cluster, when it has come", &guard, taker.ask("DEL lock-registry:{k}")).await;
}

#[tokio::test]
async fn a_quorum_tells_a_holder_whose_lock_a_majority_has_no_more() {
    let quorum = RedisQuorum::start(5).await.unwrap();
    let ours = registry(&RedisConfig::from_url(&quorum.url()).unwrap(), LEASE).await;
    for happening in HAPPENINGS {
        let guard = held(&ours, "k").await;
        // Two of five masters do not suffice.
        for server in &quorum.servers()[..2] {
            server.ask(happening).await.unwrap();
        }
        guard.renew(LEASE).await.unwrap();
        assert!(guard.is_held());
        is_told(&format!("quorum, {happening}"), &guard, quorum.servers()[4].ask(happening)).await;
        for server in quorum.servers() {
            server.ask("DEL lock-registry:{k}").await.unwrap();
        }
    }
    let guard = held(&ours, "k").await;
    for server in quorum.servers() {
        server.client_kill("normal").await.unwrap();
    }
    eventually(LONG, async || guard.renew(LEASE).await.is_ok()).await;
    is_told("quorum, after a cut", &guard, async {
        for server in &quorum.servers()[1..4] {
            server.ask("DEL lock-registry:{k}").await.unwrap();
        }
    })
    .await;
}
