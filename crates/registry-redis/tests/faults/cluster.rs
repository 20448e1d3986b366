//! A cluster whose slots fail over, migrate, and become unavailable. A fault of one master affects
//! only the locks in its slots.

use std::time::Duration;

use registry_core::{LockRegistry as _, LostReason, Registry};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::redis::{RedisCluster, RedisServer, ServerOptions};
use registry_testkit::{eventually, within};
use tokio::time::{Instant, sleep};

use crate::contest::{Contest, Keys, LEASE, LONG, millis, registry, secs};

/// Returns the slot of a lock, which depends on its name.
fn slot_of(key: &str) -> u16 {
    RedisCluster::slot_of(format!("lock-registry:{{{key}}}"))
}

/// Returns a key of this kind that is initially on the given master.
fn key_on(master: u16, kind: &str) -> String {
    let mut keys = (0..).map(|number| format!("{kind}/{number}"));
    keys.find(|key| slot_of(key) / 5_462 == master).unwrap()
}

/// Returns one key of each kind on each master.
fn keys() -> Keys {
    let keys = |kind| (0..3).map(|master| key_on(master, kind)).collect();
    Keys { contested: keys("contested"), steady: keys("steady") }
}

async fn begin(cluster: &RedisCluster, lease: Duration) -> Contest {
    let config = config(cluster);
    Contest::begin_with(&vec![config.clone(); 3], &config, keys(), lease).await
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
async fn a_failover_of_a_well_master_ends_no_hold_and_makes_no_second_holder() {
    let cluster = RedisCluster::start().await.unwrap();
    let contest = begin(&cluster, secs(6)).await;
    for slot in [0, 8_000, 16_000] {
        contest.goes_on().await;
        cluster.failover(slot).await.unwrap();
    }
    contest.goes_on().await;
    let outcome = contest.end(&masters(&cluster).await).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

#[tokio::test]
async fn clients_follow_the_failover_of_a_crashed_master_and_tokens_grow_over_it() {
    let mut cluster = RedisCluster::start().await.unwrap();
    let contest = begin(&cluster, LEASE).await;
    contest.goes_on().await;
    let (slot, begin) = (slot_of(&key_on(0, "contested")), contest.now());
    let old = cluster.kill_master_of(slot).await.unwrap();
    cluster.wait_for_new_master_of(slot, old).await.unwrap();
    let over = Instant::now();
    let end = contest.after(LEASE);
    contest.goes_on().await;
    println!("all keys granted again {:?} after the failover", over.elapsed());
    contest.goes_on().await;
    let outcome = contest.end(&masters(&cluster).await).await;
    outcome.assert_flawless_but_between(&[(begin, end)]);
}

/// The slot migrates with its locks and channels while clients hold, await, acquire and release
/// them.
#[tokio::test]
async fn a_slot_that_moves_away_ends_no_hold_and_makes_no_second_holder() {
    let cluster = RedisCluster::start().await.unwrap();
    let contest = begin(&cluster, secs(6)).await;
    for kind in ["steady", "contested"] {
        for (from, to) in [(0, 8_000), (1, 16_000)] {
            contest.goes_on().await;
            let key = key_on(from, kind);
            let to = cluster.master_of(to).await.unwrap();
            let migration = cluster.begin_migration(slot_of(&key), to).await.unwrap();
            // As long as the migration of a large slot takes.
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
    contest.goes_on().await;
    let outcome = contest.end(&masters(&cluster).await).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

/// A waiter on a channel that migrates with its slot must subscribe at the new master.
#[tokio::test]
async fn a_waiter_whose_slot_moves_away_is_woken_by_the_release() {
    let cluster = RedisCluster::start().await.unwrap();
    let (ours, theirs) = (deaf(&cluster).await, deaf(&cluster).await);
    let key = key_on(0, "k");
    for to in [8_000, 0] {
        let guard = ours.obtain(&key).lock().await.unwrap();
        let waiter = waiting(&theirs, &cluster, &key).await;
        let to = cluster.master_of(to).await.unwrap();
        cluster.migrate(slot_of(&key), to).await.unwrap();
        assert!(guard.is_held());
        guard.unlock().await.unwrap();
        within(LONG, waiter).await.unwrap();
    }
}

/// Returns a registry whose waiters poll too rarely to notice a release.
async fn deaf(cluster: &RedisCluster) -> Registry {
    let backend = RedisBackend::open(config(cluster)).await.unwrap();
    let builder = Registry::builder(std::sync::Arc::new(backend));
    builder.lease(secs(300)).poll(secs(3_600)).build().unwrap()
}

/// Starts a waiter for `key` and returns once its master has the subscription.
async fn waiting(
    registry: &Registry,
    cluster: &RedisCluster,
    key: &str,
) -> tokio::task::JoinHandle<()> {
    let lock = registry.obtain(key);
    let waiter = tokio::spawn(async move {
        lock.lock().await.unwrap().unlock().await.unwrap();
    });
    let master = cluster.node(cluster.master_of(slot_of(key)).await.unwrap());
    let question = format!("PUBSUB SHARDNUMSUB lock-registry:{{{key}}}");
    eventually(LONG, async || master.ask(&question).await.unwrap().contains(":1")).await;
    waiter
}

/// How a shard fails.
#[derive(Clone, Copy, PartialEq)]
enum Death {
    StandingStill,
    Crash,
}

#[tokio::test]
async fn a_shard_that_stands_still_holds_up_no_lock_of_the_others() {
    a_dead_shard_holds_up_no_lock_of_the_others(Death::StandingStill).await;
}

#[tokio::test]
async fn a_shard_that_has_crashed_holds_up_no_lock_of_the_others() {
    a_dead_shard_holds_up_no_lock_of_the_others(Death::Crash).await;
}

async fn a_dead_shard_holds_up_no_lock_of_the_others(death: Death) {
    let options = ServerOptions::new().args(&["--cluster-require-full-coverage", "no"]);
    let mut cluster = RedisCluster::start_with(&options).await.unwrap();
    let lease = LEASE * 2;
    let contest = begin(&cluster, lease).await;
    contest.goes_on().await;
    let Keys { contested, steady } = keys();
    // One lock on the failing shard and one on another shard.
    let ours = registry(&config(&cluster), secs(60)).await;
    let (dying, living) = (key_on(0, "mine"), key_on(1, "mine"));
    let on_dying = ours.obtain(&dying).lock().await.unwrap();
    let on_living = ours.obtain(&living).lock().await.unwrap();
    let theirs = deaf(&cluster).await;
    let waiter = waiting(&theirs, &cluster, &living).await;
    contest.steady().await;

    let slot = slot_of(&contested[0]);
    let master = cluster.master_of(slot).await.unwrap();
    let mut nodes = cluster.replicas_of(slot).await.unwrap();
    nodes.push(master);
    let begin = contest.now();
    for node in &nodes {
        match death {
            Death::StandingStill => cluster.pause(*node).unwrap(),
            Death::Crash => cluster.node_mut(*node).kill(),
        }
    }
    let others: Vec<_> = contested[1..].iter().collect();
    for _ in 0..3 {
        contest.goes_on_with(&others).await;
    }
    on_living.unlock().await.unwrap();
    within(LONG, waiter).await.unwrap();
    contest.loses_steadily(1).await;
    // As long as a lease that is not renewed lasts.
    sleep(lease).await;
    contest.goes_on_with(&others).await;
    let losses = contest.losses();
    let lost = losses.iter().filter(|loss| loss.key.starts_with("steady")).map(|loss| &loss.key);
    assert_eq!(lost.collect::<Vec<_>>(), [&steady[0]], "the others were renewed in time");
    assert!(losses.iter().all(|loss| loss.reason == LostReason::Expired), "{losses:?}");

    for node in &nodes {
        match death {
            Death::StandingStill => cluster.resume(*node).unwrap(),
            Death::Crash => cluster.node_mut(*node).start_again().await.unwrap(),
        }
    }
    contest.goes_on().await;
    let end = contest.after(lease);
    println!("the long lease of the dead shard goes on: {}", on_dying.is_held());
    eventually(LONG, async || on_dying.renew(secs(60)).await.is_ok() || !on_dying.is_held()).await;
    drop(on_dying);
    ours.idle().await;
    cluster.settle().await.unwrap();
    let outcome = contest.end(&masters(&cluster).await).await;
    // The replica may have taken over when the shard came back, without the master's last grants.
    outcome.assert_flawless_but_between(&[(begin, end)]);
}
