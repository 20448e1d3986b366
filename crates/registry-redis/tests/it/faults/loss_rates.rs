//! Measures how often a failover after a crash loses a lock. This is a measurement and not a test:
//! start it explicitly. It takes some minutes and prints a row for each setting.

use std::time::Duration;

use registry_core::{LockGuard, LockOptions, Registry};
use registry_redis::RedisConfig;
use registry_testkit::redis::{RedisCluster, SentinelSetup};
use registry_testkit::{eventually, within};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::workload::{LONG, millis, registry, secs};

/// The number of crashes.
const RUNS: usize = 20;
/// So long that no lease ends before its holder has reached the new master.
const LEASE: Duration = Duration::from_secs(60);
/// The number of callers that acquire locks until the crash.
const CALLERS: usize = 8;
/// Locks that were acquired less than this before the last acquisition are counted separately. The
/// crash ends the acquisitions.
const RECENT: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct LossCounts {
    /// The runs in which at least one lock was lost.
    runs_with_loss: usize,
    /// Of the locks older than [`RECENT`]: how many existed, and how many were lost.
    old: (usize, usize),
    /// The same for the younger locks.
    recent: (usize, usize),
    /// The time from the crash until a lock could be acquired again.
    down: Vec<Duration>,
}

/// How long before the crash the replicas are disconnected from their master, in the rows with
/// lagging replicas.
const LAG: Duration = Duration::from_millis(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, which takes minutes: cargo test -p registry-redis --all-features --test it -- --ignored --nocapture loss_rates::"]
async fn loss_rate_of_crashes_under_sentinels() {
    print_table_header();
    for (name, replicas, lag) in [
        ("Sentinel", 0, Duration::ZERO),
        ("Sentinel, replicas 20 ms behind", 0, LAG),
        ("Sentinel, `with_replicas(1)`", 1, Duration::ZERO),
        ("Sentinel, `with_replicas(1)`, replicas 20 ms behind", 1, LAG),
    ] {
        let mut tally = LossCounts::default();
        for _ in 0..RUNS {
            let mut setup = SentinelSetup::start().await.unwrap();
            let config = RedisConfig::from_url(&setup.url()).unwrap().with_replicas(replicas);
            let crash = async || {
                if !lag.is_zero() {
                    setup.isolate_replicas().await.unwrap();
                    sleep(lag).await;
                }
                let old = setup.kill_master().await.unwrap();
                setup.resume_all_except(old).unwrap();
                setup.wait_for_new_master(old).await.unwrap();
            };
            run_once(&mut tally, config, |_| true, crash).await;
        }
        tally.print(name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, which takes minutes: cargo test -p registry-redis --all-features --test it -- --ignored --nocapture loss_rates::"]
async fn loss_rate_of_crashes_in_a_cluster() {
    print_table_header();
    for (name, replicas, lag) in [
        ("Cluster", 0, Duration::ZERO),
        ("Cluster, replicas 20 ms behind", 0, LAG),
        ("Cluster, `with_replicas(1)`", 1, Duration::ZERO),
        ("Cluster, `with_replicas(1)`, replicas 20 ms behind", 1, LAG),
    ] {
        let mut tally = LossCounts::default();
        for _ in 0..RUNS {
            let mut cluster = RedisCluster::start().await.unwrap();
            let config = RedisConfig::from_url(&cluster.url()).unwrap().with_replicas(replicas);
            let crash = async || {
                let mut cut_off = Vec::new();
                if !lag.is_zero() {
                    cut_off = cluster.isolate_replicas_of(0).await.unwrap();
                    sleep(lag).await;
                }
                let old = cluster.kill_master_of(0).await.unwrap();
                for replica in cut_off {
                    cluster.resume(replica).unwrap();
                }
                cluster.wait_for_new_master_of(0, old).await.unwrap();
                // Without the old master as a replica, the new master would refuse grants that need
                // a replica.
                cluster.node_mut(old).restart().await.unwrap();
            };
            run_once(&mut tally, config, is_on_first_master, crash).await;
        }
        tally.print(name);
    }
}

fn print_table_header() {
    println!(
        "| | crashes | with a loss | older locks | lost | locks of the last {RECENT:?} | lost | none granted for (median) |"
    );
    println!("|---|---|---|---|---|---|---|---|");
}

/// Returns whether the lock of `key` is on the first master of a cluster.
fn is_on_first_master(key: &str) -> bool {
    RedisCluster::slot_of(format!("lock-registry:{{{key}}}")) < 5_461
}

/// Acquires locks until the crash, then verifies all of them.
async fn run_once(
    tally: &mut LossCounts,
    config: RedisConfig,
    is_affected: fn(&str) -> bool,
    crash: impl AsyncFnOnce(),
) {
    let registry_a = registry(&config, LEASE).await;
    let stop = watch::Sender::new(false);
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let (registry_a, stop) = (registry_a.clone(), stop.subscribe());
        callers.spawn(acquire_until_crash(registry_a, caller, is_affected, stop));
    }
    sleep(millis(300)).await;
    let crashed = Instant::now();
    crash().await;
    stop.send_replace(true);
    let acquired: Vec<(Instant, LockGuard)> =
        within(LONG, callers.join_all()).await.into_iter().flatten().collect();
    let free = (0..).map(|number| format!("free/{number}")).find(|key| is_affected(key)).unwrap();
    let guard = within(LONG, registry_a.obtain(&free).lock()).await.unwrap();
    tally.down.push(crashed.elapsed());
    guard.unlock().await.unwrap();

    let last = acquired
        .iter()
        .map(|(at, _)| *at)
        .max()
        .expect("some locks were acquired before the crash");
    let mut lost_some = false;
    for (at, guard) in acquired {
        // Either the new master has the lock, or the renewal reports the loss.
        let is_known = async || guard.extend(LEASE).await.is_ok() || !guard.is_held();
        eventually(LONG, is_known).await;
        let lost = !guard.is_held();
        let counts = if at + RECENT < last { &mut tally.old } else { &mut tally.recent };
        counts.0 += 1;
        counts.1 += usize::from(lost);
        lost_some |= lost;
    }
    tally.runs_with_loss += usize::from(lost_some);
}

async fn acquire_until_crash(
    registry_a: Registry,
    caller: usize,
    is_affected: fn(&str) -> bool,
    mut stop: watch::Receiver<bool>,
) -> Vec<(Instant, LockGuard)> {
    let mut acquired = Vec::new();
    let keys = (0..).map(|number| format!("{caller}/{number}")).filter(|key| is_affected(key));
    for key in keys {
        let lock = registry_a.obtain(&key);
        let acquiring = lock.try_lock_with(LockOptions::new().wait(secs(1)));
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => break,
            guard = acquiring => match guard {
                Ok(Some(guard)) => acquired.push((Instant::now(), guard)),
                // The server has crashed.
                Ok(None) | Err(_) => break,
            },
        }
    }
    acquired
}

impl LossCounts {
    fn print(mut self, name: &str) {
        self.down.sort_unstable();
        let median = self.down[self.down.len() / 2];
        let Self { runs_with_loss, old, recent, down } = self;
        println!(
            "| {name} | {} | {runs_with_loss} | {} | {} | {} | {} | {:.1} s |",
            down.len(),
            old.0,
            old.1,
            recent.0,
            recent.1,
            median.as_secs_f64(),
        );
    }
}
