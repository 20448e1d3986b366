//! Invalidations: the server notifies a holder of the removal of its lock. The leases are so long
//! that no renewal detects the loss during a test.

use std::time::Duration;

use registry_core::{LockGuard, LostReason, Registry};
use registry_redis::RedisConfig;
use registry_testkit::redis::{RedisCluster, RedisQuorum, RedisServer, SentinelSetup};
use registry_testkit::{eventually, within};
use tokio::time::Instant;

use super::workload::{LONG, registry};

/// Renewals start after a third of the lease.
const LEASE: Duration = Duration::from_secs(600);
/// The time limit for a notification on a busy machine.
const NOTIFY_LIMIT: Duration = Duration::from_secs(5);

async fn acquire(registry: &Registry, key: &str) -> LockGuard {
    within(LONG, registry.obtain(key).lock()).await.unwrap()
}

/// Awaits `change`, which removes the lock. Asserts that its holder is notified within
/// [`NOTIFY_LIMIT`].
async fn assert_notified(what: &str, guard: &LockGuard, change: impl Future) {
    assert!(guard.is_held());
    let lost = tokio::spawn(guard.lost());
    let started_at = Instant::now();
    change.await;
    let reason = within(LONG, lost).await.unwrap();
    let delay = started_at.elapsed();
    println!("{what}: notified after {delay:?}");
    assert_eq!(reason, LostReason::Gone);
    assert!(!guard.is_held());
    assert!(delay < NOTIFY_LIMIT, "{what}: {delay:?}");
}

/// Changes that an operator can make to the lock of `k`.
const CHANGES: [&str; 5] = [
    "DEL lock-registry:{k}",
    "UNLINK lock-registry:{k}",
    "SET lock-registry:{k} mine",
    "RENAME lock-registry:{k} elsewhere",
    "FLUSHALL",
];

/// Applies each of the [`CHANGES`] to a new lock and asserts that its holder is notified.
async fn assert_notified_of_all_changes(kind: &str, registry: &Registry, server: &RedisServer) {
    for change in CHANGES {
        let guard = acquire(registry, "k").await;
        assert_notified(&format!("{kind}, {change}"), &guard, server.send_command(change)).await;
        server.send_command("DEL lock-registry:{k}").await.unwrap();
    }
}

/// Closes all normal connections and waits until the server tracks the lock over a new connection.
async fn close_connections(guard: &LockGuard, server: &RedisServer) {
    server.client_kill("normal").await.unwrap();
    eventually(LONG, async || guard.extend(LEASE).await.is_ok()).await;
}

#[tokio::test]
async fn a_single_server_notifies_the_holder_of_a_removed_lock() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = registry(&RedisConfig::from_url(&server.url()).unwrap(), LEASE).await;
    assert!(registry_a.capabilities().reports_invalidations);
    assert_notified_of_all_changes("single", &registry_a, &server).await;

    let guard = acquire(&registry_a, "k").await;
    close_connections(&guard, &server).await;
    assert_notified(
        "single, after a disconnection",
        &guard,
        server.send_command("DEL lock-registry:{k}"),
    )
    .await;

    // A change during the disconnection is detected as soon as a new connection exists.
    for _ in 0..5 {
        let guard = acquire(&registry_a, "k").await;
        assert_notified("single, during a disconnection", &guard, async {
            server.client_kill("normal").await.unwrap();
            server.send_command("DEL lock-registry:{k}").await.unwrap();
        })
        .await;
    }
}

/// The verification after the disconnection fails while the server is down. The next one follows
/// the reconnection.
#[tokio::test]
async fn a_holder_is_notified_of_a_restart_without_data_as_soon_as_the_server_is_back() {
    let mut server = RedisServer::start(&[]).await.unwrap();
    let registry_a = registry(&RedisConfig::from_url(&server.url()).unwrap(), LEASE).await;
    let mut delays = Vec::new();
    for _ in 0..5 {
        let guard = acquire(&registry_a, "k").await;
        server.kill();
        server.delete_data().unwrap();
        // Long enough for some verifications to fail.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        assert!(guard.is_held());
        server.restart().await.unwrap();
        let restarted_at = Instant::now();
        assert_eq!(within(NOTIFY_LIMIT, guard.lost()).await, LostReason::Gone);
        delays.push(restarted_at.elapsed());
    }
    println!("single, restarted without data: notified after {delays:?}");
}

#[tokio::test]
async fn a_single_server_notifies_all_holders_of_a_flush() {
    let server = RedisServer::start(&[]).await.unwrap();
    let registry_a = registry(&RedisConfig::from_url(&server.url()).unwrap(), LEASE).await;
    let mut guards = Vec::new();
    for key in 0..100 {
        guards.push(acquire(&registry_a, &format!("many/{key}")).await);
    }
    let started_at = Instant::now();
    server.send_command("FLUSHALL").await.unwrap();
    for guard in &guards {
        assert_eq!(within(LONG, guard.lost()).await, LostReason::Gone);
    }
    println!("single, FLUSHALL: the last of 100 notified after {:?}", started_at.elapsed());
    assert!(started_at.elapsed() < NOTIFY_LIMIT);
}

#[tokio::test]
async fn a_sentinel_master_notifies_the_holder_of_a_removed_lock() {
    let setup = SentinelSetup::start().await.unwrap();
    let config = RedisConfig::from_url(&setup.url()).unwrap();
    let registry_a = registry(&config, LEASE).await;
    let durable = registry(&config.with_replicas(1), LEASE).await;
    let master = setup.server(setup.master().await.unwrap());
    assert_notified_of_all_changes("sentinel", &registry_a, master).await;
    assert_notified_of_all_changes("sentinel, replicas=1", &durable, master).await;

    let guard = acquire(&registry_a, "k").await;
    close_connections(&guard, master).await;
    assert_notified(
        "sentinel, after a disconnection",
        &guard,
        master.send_command("DEL lock-registry:{k}"),
    )
    .await;

    // The lock survives a failover, and the new master tracks it.
    let guard = acquire(&registry_a, "k").await;
    let master = setup.server(setup.failover().await.unwrap());
    // The claim is verified at the new master before any renewal.
    let has_run_a_script =
        async || master.send_command("CLIENT LIST").await.unwrap().contains("cmd=eval");
    eventually(LONG, has_run_a_script).await;
    assert_notified(
        "sentinel, after a failover",
        &guard,
        master.send_command("DEL lock-registry:{k}"),
    )
    .await;
}

#[tokio::test]
async fn a_cluster_notifies_the_holder_of_a_removed_lock() {
    let cluster = RedisCluster::start().await.unwrap();
    let registry_a = registry(&RedisConfig::from_url(&cluster.url()).unwrap(), LEASE).await;
    let slot = RedisCluster::slot_of("lock-registry:{k}");
    let master = cluster.node(cluster.master_of(slot).await.unwrap());
    for change in CHANGES.iter().filter(|change| !change.starts_with("RENAME")) {
        let guard = acquire(&registry_a, "k").await;
        assert_notified(&format!("cluster, {change}"), &guard, master.send_command(change)).await;
        master.send_command("DEL lock-registry:{k}").await.unwrap();
    }
    let guard = acquire(&registry_a, "k").await;
    close_connections(&guard, master).await;
    assert_notified(
        "cluster, after a disconnection",
        &guard,
        master.send_command("DEL lock-registry:{k}"),
    )
    .await;

    let guard = acquire(&registry_a, "k").await;
    let to = cluster.master_of((slot + 6_000) % 16_384).await.unwrap();
    cluster.migrate(slot, to).await.unwrap();
    let master = cluster.node(to);
    let has_run_a_script =
        async || master.send_command("CLIENT LIST").await.unwrap().contains("cmd=eval");
    eventually(LONG, has_run_a_script).await;
    assert_notified(
        "cluster, after the slot has migrated",
        &guard,
        master.send_command("DEL lock-registry:{k}"),
    )
    .await;

    let guard = acquire(&registry_a, "k").await;
    let master = cluster.node(cluster.failover(slot).await.unwrap());
    eventually(LONG, async || {
        master.send_command("CLIENT LIST").await.unwrap().contains("cmd=eval")
    })
    .await;
    assert_notified(
        "cluster, after a failover",
        &guard,
        master.send_command("DEL lock-registry:{k}"),
    )
    .await;
}

#[tokio::test]
async fn a_holder_is_notified_of_a_loss_while_its_slot_migrates() {
    let cluster = RedisCluster::start().await.unwrap();
    let registry_a = registry(&RedisConfig::from_url(&cluster.url()).unwrap(), LEASE).await;
    let slot = RedisCluster::slot_of("lock-registry:{k}");
    let guard = acquire(&registry_a, "k").await;
    let to = cluster.master_of((slot + 6_000) % 16_384).await.unwrap();
    let master = cluster.node(cluster.master_of(slot).await.unwrap());
    eventually(LONG, async || {
        master.send_command("INFO stats").await.unwrap().contains("tracking_total_keys:1\r\n")
    })
    .await;
    let migration = cluster.begin_migration(slot, to).await.unwrap();
    assert!(cluster.migrate_key(&migration, "lock-registry:{k}").await.unwrap());
    let target = cluster.node(to);
    let has_run_a_script =
        async || target.send_command("CLIENT LIST").await.unwrap().contains("cmd=eval");
    eventually(LONG, has_run_a_script).await;
    let mut operator = target.connect().await.unwrap();
    assert_notified("cluster, during the migration", &guard, async {
        operator.send_command_args(&["ASKING"]).await.unwrap();
        operator.send_command_args(&["DEL", "lock-registry:{k}"]).await.unwrap();
    })
    .await;

    cluster.finish_migration(migration).await.unwrap();
    let guard = acquire(&registry_a, "k").await;
    assert_notified(
        "cluster, after the migration",
        &guard,
        target.send_command("DEL lock-registry:{k}"),
    )
    .await;
}

#[tokio::test]
async fn a_quorum_notifies_a_holder_that_lost_its_majority() {
    let quorum = RedisQuorum::start(5).await.unwrap();
    let registry_a = registry(&RedisConfig::from_url(&quorum.url()).unwrap(), LEASE).await;
    for change in CHANGES {
        let guard = acquire(&registry_a, "k").await;
        // A removal on two of five masters ends no lock.
        for server in &quorum.servers()[..2] {
            server.send_command(change).await.unwrap();
        }
        guard.extend(LEASE).await.unwrap();
        assert!(guard.is_held());
        assert_notified(
            &format!("quorum, {change}"),
            &guard,
            quorum.servers()[4].send_command(change),
        )
        .await;
        for server in quorum.servers() {
            server.send_command("DEL lock-registry:{k}").await.unwrap();
        }
    }
    let guard = acquire(&registry_a, "k").await;
    for server in quorum.servers() {
        server.client_kill("normal").await.unwrap();
    }
    eventually(LONG, async || guard.extend(LEASE).await.is_ok()).await;
    assert_notified("quorum, after a disconnection", &guard, async {
        for server in &quorum.servers()[1..4] {
            server.send_command("DEL lock-registry:{k}").await.unwrap();
        }
    })
    .await;
}
