//! Measures 64 tasks of one process that lock on Redis, with this library and with other lock
//! crates, alternately in the same run.
//!
//! `bare` is not a library. It does the minimum that a correct lock must do, with two scripts over
//! one shared connection. Each task sends its own requests. All contestants run on the same runtime
//! against the same server, which is flushed between runs. Every critical section asserts mutual
//! exclusion.

mod contestant;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lock_registry_benches::{is_full_run, record_server, row, write_results_of};
use registry_testkit::redis::RedisServer;
use tokio::task::JoinSet;

use crate::contestant::{Contestant, ContestantKind};

const TASKS: usize = 64;
const ONE_KEY: &str = "one key";
/// The contestants, with their columns in the table of the book.
const KINDS: [(ContestantKind, &str); 4] = [
    (ContestantKind::Engine, "this library"),
    (ContestantKind::Bare, "bare"),
    (ContestantKind::Rslock, "rslock 0.10"),
    (ContestantKind::DistributedLock, "distributed-lock-redis 0.2"),
];

fn main() {
    let (rounds, time) = if is_full_run() { (5, 2_000) } else { (1, 100) };
    let time = Duration::from_millis(time);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // Disk writes would dominate the time.
        let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
        let info = server.send_command_args(&["INFO", "server"]).await.unwrap();
        record_server("Redis", &info.text().unwrap_or_default());
        let unsynchronized =
            run(&server, ContestantKind::Unsynchronized, true, Duration::from_millis(200)).await;
        assert!(
            unsynchronized.overlaps > 0,
            "the check did not detect overlapping critical sections"
        );
        for one_key in [true, false] {
            let mut results: [Vec<RunResult>; KINDS.len()] = Default::default();
            for _ in 0..rounds {
                for ((kind, _), results) in KINDS.into_iter().zip(&mut results) {
                    let outcome = run(&server, kind, one_key, time).await;
                    assert_eq!(
                        outcome.overlaps, 0,
                        "{kind:?} granted the lock to two tasks at once"
                    );
                    results.push(outcome);
                }
            }
            record(if one_key { ONE_KEY } else { "a key each" }, &results);
        }
    });
    write_results_of("rivals", "cargo bench --manifest-path benches/rivals/Cargo.toml");
}

struct RunResult {
    sections_per_second: f64,
    sections_min: u64,
    sections_max: u64,
    /// The scripts, subscriptions and pings that clients sent, per critical section.
    commands_per_section: f64,
    overlaps: u64,
}

/// Lets all tasks acquire and release as often as they can.
async fn run(
    server: &RedisServer,
    kind: ContestantKind,
    one_key: bool,
    time: Duration,
) -> RunResult {
    server.send_command("FLUSHALL").await.unwrap();
    let contestant = Arc::new(Contestant::new(kind, server).await);
    // Everything that the first use creates exists before the measurement.
    contestant.run_section("warm", || {}).await;
    server.send_command("CONFIG RESETSTAT").await.unwrap();
    let overlaps = Arc::new(AtomicU64::new(0));
    let shared_flag = Arc::new(AtomicBool::new(false));
    let start = Instant::now();
    let end = start + time;
    let counts: Vec<Arc<AtomicU64>> = (0..TASKS).map(|_| Arc::default()).collect();
    let mut tasks = JoinSet::new();
    for (task, count) in counts.iter().enumerate() {
        let contestant = Arc::clone(&contestant);
        let (count, overlaps) = (Arc::clone(count), Arc::clone(&overlaps));
        let (key, is_inside) = if one_key {
            ("orders/42".to_owned(), Arc::clone(&shared_flag))
        } else {
            (format!("orders/{task}"), Arc::default())
        };
        tasks.spawn(async move {
            let lock = contestant.task_lock(&key);
            let critical_section = || {
                if is_inside.swap(true, Ordering::AcqRel) {
                    overlaps.fetch_add(1, Ordering::Relaxed);
                }
                count.fetch_add(1, Ordering::Relaxed);
                is_inside.store(false, Ordering::Release);
            };
            while Instant::now() < end {
                lock.run_section(critical_section).await;
            }
        });
    }
    tokio::time::sleep_until(end.into()).await;
    let section_counts: Vec<u64> =
        counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    let commands = client_commands(server).await;
    // A task that is still queued may wait longer than the whole measurement.
    let _drained =
        tokio::time::timeout(DRAIN_TIMEOUT, async { while tasks.join_next().await.is_some() {} })
            .await;
    tasks.shutdown().await;
    contestant.close().await;
    let sections = section_counts.iter().sum::<u64>() as f64;
    RunResult {
        sections_per_second: sections / time.as_secs_f64(),
        sections_min: section_counts.iter().copied().min().unwrap_or_default(),
        sections_max: section_counts.iter().copied().max().unwrap_or_default(),
        commands_per_section: commands / sections,
        overlaps: overlaps.load(Ordering::Relaxed),
    }
}

/// The time limit for tasks that are still queued at the end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The number of scripts, subscriptions and pings that clients have sent.
async fn client_commands(server: &RedisServer) -> f64 {
    let info = server
        .send_command_args(&["INFO", "commandstats"])
        .await
        .unwrap()
        .text()
        .unwrap_or_default();
    let calls = |line: &str| -> Option<f64> {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let sent = ["eval", "evalsha", "subscribe", "ping"].contains(&name);
        sent.then(|| rest.split(',').next()?.parse().ok())?
    };
    let commands: f64 = info.lines().filter_map(calls).sum();
    commands
}

fn record(keys: &str, results: &[Vec<RunResult>; KINDS.len()]) {
    let median_of = |outcomes: &[RunResult], field: &dyn Fn(&RunResult) -> f64| {
        median(outcomes.iter().map(field).collect())
    };
    let max_over_min =
        |outcome: &RunResult| outcome.sections_max as f64 / outcome.sections_min.max(1) as f64;
    let engine = median_of(&results[0], &|outcome| outcome.sections_per_second);
    for ((_, column), outcomes) in KINDS.iter().zip(results) {
        let record = |name: &str, value: f64, unit| {
            row("rivals", format!("{keys}: {name}")).column(*column).measured(value, unit).record();
        };
        let sections = median_of(outcomes, &|outcome| outcome.sections_per_second);
        record("critical sections", sections, "/s");
        record("speed of this library, divided by its speed", engine / sections, "x");
        let commands = median_of(outcomes, &|outcome| outcome.commands_per_section);
        record("scripts per section", commands, "");
        if keys == ONE_KEY {
            let name = "maximum over minimum of sections per task";
            record(name, median_of(outcomes, &max_over_min), "");
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
