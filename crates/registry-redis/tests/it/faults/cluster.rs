//! A cluster whose slots fail over, migrate, and become unavailable. A fault of one master affects
//! only the locks in its slots.

use std::time::Duration;

use registry_core::{LostReason, Registry};
use registry_redis::RedisConfig;
use registry_testkit::redis::{RedisCluster, RedisOptions, RedisServer};
use registry_testkit::workload::WorkloadOptions;
use registry_testkit::{eventually, within};
use tokio::time::{Instant, sleep};

use super::workload::{LEASE, LONG, LONG_LEASE, Workload, backend, millis, registry, secs};

/// Returns the slot of a lock, which depends on its name.
fn slot_of(key: &str) -> u16 {
    RedisCluster::slot_of(format!("lock-registry:{{{key}}}"))
}

/// Returns a key of this kind that is initially on the given master.
fn key_on(master: u16, kind: &str) -> String {
    let mut keys = (0..).map(|number| format!("{kind}/{number}"));
    keys.find(|key| slot_of(key) / 5_462 == master).unwrap()
}

/// Returns one key of this kind on each master.
fn keys(kind: &str) -> Vec<String> {
    (0..3).map(|master| key_on(master, kind)).collect()
}

async fn start_workload(cluster: &RedisCluster, lease: Duration) -> Workload {
    let config = config(cluster);
    let options = WorkloadOptions::new().keys(keys("contested"), keys("steady"));
    Workload::start_with(&vec![config.clone(); 3], &config, options, lease).await
}

/// Starts a cluster for a test in which no node fails. On a busy machine, nodes with a short
/// time-out would suspect each other.
async fn patient_cluster() -> RedisCluster {
    let options = RedisOptions::new().args(&["--cluster-node-timeout", "10000"]);
    RedisCluster::start_with(&options).await.unwrap()
}

fn config(cluster: &RedisCluster) -> RedisConfig {
    RedisConfig::from_url(&cluster.url()).unwrap()
}

/// Returns the servers that hold locks.
async fn masters(cluster: &RedisCluster) -> Vec<&RedisServer> {
    let mut masters = Vec::new();
    for slot in [0, 8_000, 16_000] {
        masters.push(cluster.node(cluster.master_of(slot).await.unwrap()));
    }
    masters
}

#[tokio::test]
async fn a_failover_of_a_healthy_master_loses_no_lock_and_creates_no_second_holder() {
    let cluster = patient_cluster().await;
    let workload = start_workload(&cluster, LONG_LEASE).await;
    for slot in [0, 8_000, 16_000] {
        workload.wait_for_progress().await;
        cluster.failover(slot).await.unwrap();
    }
    workload.wait_for_progress().await;
    workload.end(&masters(&cluster).await).await.assert_no_losses();
}

#[tokio::test]
async fn clients_follow_the_failover_of_a_crashed_master_and_tokens_keep_growing() {
    let mut cluster = RedisCluster::start().await.unwrap();
    let workload = start_workload(&cluster, LEASE).await;
    workload.wait_for_progress().await;
    let (slot, begin) = (slot_of(&key_on(0, "contested")), workload.now());
    let old = cluster.kill_master_of(slot).await.unwrap();
    cluster.wait_for_new_master_of(slot, old).await.unwrap();
    let failover_at = Instant::now();
    let window = workload.window(begin, LEASE);
    workload.wait_for_progress().await;
    println!("all keys granted again {:?} after the failover", failover_at.elapsed());
    workload.wait_for_progress().await;
    let outcome = workload.end(&masters(&cluster).await).await;
    outcome.assert_guarantees_except_in(&[window]);
}

/// The slot migrates with its locks and channels while clients acquire, wait for, hold and release
/// them.
#[tokio::test]
async fn a_slot_migration_loses_no_lock_and_creates_no_second_holder() {
    let cluster = patient_cluster().await;
    let workload = start_workload(&cluster, LONG_LEASE).await;
    for kind in ["steady", "contested"] {
        for (from, to) in [(0, 8_000), (1, 16_000)] {
            workload.wait_for_progress().await;
            let key = key_on(from, kind);
            let to = cluster.master_of(to).await.unwrap();
            let migration = cluster.begin_migration(slot_of(&key), to).await.unwrap();
            // The migration of a large slot takes about this long.
            sleep(millis(200)).await;
            let lock = format!("lock-registry:{{{key}}}");
            cluster.migrate_key(&migration, &lock).await.unwrap();
            sleep(millis(200)).await;
            cluster.migrate_key(&migration, format!("{lock}:token")).await.unwrap();
            // From now on the servers redirect each command to the new master (`ASK`).
            sleep(millis(500)).await;
            cluster.finish_migration(migration).await.unwrap();
        }
    }
    workload.wait_for_progress().await;
    workload.end(&masters(&cluster).await).await.assert_no_losses();
}

/// A waiter on a channel that migrates with its slot must subscribe at the new master.
#[tokio::test]
async fn a_waiter_whose_slot_migrates_is_woken_by_the_release() {
    let cluster = patient_cluster().await;
    let (registry_a, registry_b) =
        (open_without_polling(&cluster).await, open_without_polling(&cluster).await);
    let key = key_on(0, "k");
    for to in [8_000, 0] {
        let guard = registry_a.obtain(&key).lock().await.unwrap();
        let waiter = spawn_waiter(&registry_b, &cluster, &key).await;
        let to = cluster.master_of(to).await.unwrap();
        cluster.migrate(slot_of(&key), to).await.unwrap();
        assert!(guard.is_held());
        guard.unlock().await.unwrap();
        within(LONG, waiter).await.unwrap();
    }
}

/// The user may not use client tracking, so no server sends an invalidation. A command for another
/// key of the slot receives `MOVED`, and updates the slot map before the next refresh.
#[tokio::test]
async fn held_locks_are_verified_after_another_command_has_found_that_their_slot_moved() {
    let cluster = patient_cluster().await;
    for node in cluster.nodes() {
        let reply = cluster.node(node).send_command("ACL SETUSER default -client").await.unwrap();
        assert_eq!(reply, "+OK\r\n");
    }
    // Renewals start after a third of the lease, and `LONG` is shorter.
    let registry_a = registry(&config(&cluster), LONG * 10).await;
    assert!(!registry_a.capabilities().reports_invalidations);
    let key = key_on(0, "held");
    let slot = slot_of(&key);
    let mut others = (0..).map(|number| format!("other/{number}"));
    let other = others.find(|other| slot_of(other) == slot).unwrap();
    let guard = registry_a.obtain(&key).lock().await.unwrap();
    let to = cluster.master_of(8_000).await.unwrap();
    cluster.migrate(slot, to).await.unwrap();
    let remove = format!("DEL lock-registry:{{{key}}}");
    assert_eq!(cluster.node(to).send_command(&remove).await.unwrap(), ":1\r\n");
    assert!(guard.is_held(), "nothing has notified the holder");
    registry_a.obtain(&other).lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Gone);
}

/// Returns a registry whose waiters poll too rarely to notice a release.
async fn open_without_polling(cluster: &RedisCluster) -> Registry {
    let builder = Registry::builder(std::sync::Arc::new(backend(&config(cluster)).await));
    builder.lease(secs(300)).poll(secs(3_600)).build().unwrap()
}

/// Starts a waiter for `key` and returns once its master has the subscription.
async fn spawn_waiter(
    registry: &Registry,
    cluster: &RedisCluster,
    key: &str,
) -> tokio::task::JoinHandle<()> {
    let lock = registry.obtain(key);
    let waiter = tokio::spawn(async move {
        lock.lock().await.unwrap().unlock().await.unwrap();
    });
    let master = cluster.node(cluster.master_of(slot_of(key)).await.unwrap());
    let command = format!("PUBSUB SHARDNUMSUB lock-registry:{{{key}}}");
    eventually(LONG, async || master.send_command(&command).await.unwrap().contains(":1")).await;
    waiter
}

/// How a shard fails.
#[derive(Clone, Copy, PartialEq)]
enum ShardFault {
    Suspended,
    Crashed,
}

#[tokio::test]
async fn a_suspended_shard_delays_no_lock_of_the_others() {
    a_failed_shard_delays_no_lock_of_the_others(ShardFault::Suspended).await;
}

#[tokio::test]
async fn a_crashed_shard_delays_no_lock_of_the_others() {
    a_failed_shard_delays_no_lock_of_the_others(ShardFault::Crashed).await;
}

async fn a_failed_shard_delays_no_lock_of_the_others(fault: ShardFault) {
    let options = RedisOptions::new().args(&["--cluster-require-full-coverage", "no"]);
    let mut cluster = RedisCluster::start_with(&options).await.unwrap();
    let lease = LEASE * 2;
    let workload = start_workload(&cluster, lease).await;
    workload.wait_for_progress().await;
    let (contested, steady) = (keys("contested"), keys("steady"));
    // One lock on the failing shard and one on another shard.
    let registry_a = registry(&config(&cluster), secs(60)).await;
    let (failing_key, other_key) = (key_on(0, "mine"), key_on(1, "mine"));
    let on_failing_shard = registry_a.obtain(&failing_key).lock().await.unwrap();
    let on_other_shard = registry_a.obtain(&other_key).lock().await.unwrap();
    let registry_b = open_without_polling(&cluster).await;
    let waiter = spawn_waiter(&registry_b, &cluster, &other_key).await;
    workload.wait_until_long_held().await;

    let slot = slot_of(&contested[0]);
    let master = cluster.master_of(slot).await.unwrap();
    let mut nodes = cluster.replicas_of(slot).await.unwrap();
    nodes.push(master);
    let begin = workload.now();
    for node in &nodes {
        match fault {
            ShardFault::Suspended => cluster.pause(*node).unwrap(),
            ShardFault::Crashed => cluster.node_mut(*node).kill(),
        }
    }
    let others = &contested[1..];
    for _ in 0..3 {
        workload.wait_for_progress_of(others).await;
    }
    on_other_shard.unlock().await.unwrap();
    within(LONG, waiter).await.unwrap();
    workload.wait_for_long_held_losses(1).await;
    // Long enough for a lease without renewals to end.
    sleep(lease).await;
    workload.wait_for_progress_of(others).await;
    let losses = workload.losses();
    let lost = losses.iter().filter(|loss| loss.key.starts_with("steady")).map(|loss| &loss.key);
    assert_eq!(lost.collect::<Vec<_>>(), [&steady[0]], "the others were renewed in time");
    assert!(losses.iter().all(|loss| loss.reason == LostReason::Expired), "{losses:?}");

    for node in &nodes {
        match fault {
            ShardFault::Suspended => cluster.resume(*node).unwrap(),
            ShardFault::Crashed => cluster.node_mut(*node).restart().await.unwrap(),
        }
    }
    workload.wait_for_progress().await;
    let window = workload.window(begin, lease);
    println!("the long lease of the dead shard goes on: {}", on_failing_shard.is_held());
    eventually(LONG, async || {
        on_failing_shard.extend(secs(60)).await.is_ok() || !on_failing_shard.is_held()
    })
    .await;
    drop(on_failing_shard);
    registry_a.idle().await;
    cluster.wait_until_consistent().await.unwrap();
    let outcome = workload.end(&masters(&cluster).await).await;
    // When the shard returned, its replica may have taken over without the master's last grants.
    outcome.assert_guarantees_except_in(&[window]);
}
