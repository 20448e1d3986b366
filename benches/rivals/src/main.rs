//! Runs 64 tasks of one process on Redis, with this library and with others, alternately in the
//! same run.
//!
//! `bare` is no library. It does the minimum that a correct lock must do: two scripts over one
//! shared connection, and each task sends its own requests. All contestants run on the same runtime
//! against the same server, which is flushed between runs. Every critical section asserts mutual
//! exclusion. Arguments: seconds per contestant and round, number of rounds.

mod contestant;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use registry_testkit::redis::RedisServer;
use tokio::task::JoinSet;

use crate::contestant::{Contestant, ContestantKind};

const TASKS: usize = 64;
const KINDS: [ContestantKind; 4] = [
    ContestantKind::Bare,
    ContestantKind::Engine,
    ContestantKind::Rslock,
    ContestantKind::DistributedLock,
];

fn main() {
    let mut arguments =
        std::env::args().skip(1).map(|argument| argument.parse().expect("a number"));
    let seconds = Duration::from_secs(arguments.next().unwrap_or(3));
    let rounds = arguments.next().unwrap_or(5);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // Disk writes would dominate the time.
        let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
        let unsynchronized =
            run(&server, ContestantKind::Unsynchronized, true, Duration::from_millis(200)).await;
        assert!(
            unsynchronized.overlaps > 0,
            "the check did not detect overlapping critical sections"
        );
        for one_key in [true, false] {
            let mut results: [Vec<RunResult>; KINDS.len()] = Default::default();
            for _ in 0..rounds {
                for (kind, results) in KINDS.into_iter().zip(&mut results) {
                    let outcome = run(&server, kind, one_key, seconds).await;
                    assert_eq!(
                        outcome.overlaps, 0,
                        "{kind:?} granted the lock to two tasks at once"
                    );
                    results.push(outcome);
                }
            }
            println!("\n{TASKS} tasks, {}", if one_key { "one key" } else { "a key each" });
            print(&results);
        }
    });
}

struct RunResult {
    sections: f64,
    sections_min: u64,
    sections_max: u64,
    /// The number of commands that the server received.
    requests: f64,
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
    let requests = requests(server).await;
    // A task that is still queued may wait longer than the whole measurement.
    let _drained =
        tokio::time::timeout(DRAIN_TIMEOUT, async { while tasks.join_next().await.is_some() {} })
            .await;
    tasks.shutdown().await;
    contestant.close().await;
    let sections = section_counts.iter().sum::<u64>() as f64;
    RunResult {
        sections: sections / time.as_secs_f64(),
        sections_min: section_counts.iter().copied().min().unwrap_or_default(),
        sections_max: section_counts.iter().copied().max().unwrap_or_default(),
        requests: requests / sections,
        overlaps: overlaps.load(Ordering::Relaxed),
    }
}

/// The time limit for tasks that are still queued at the end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The number of commands from clients and from their scripts.
async fn requests(server: &RedisServer) -> f64 {
    let info = server.send_command_args(&["INFO", "commandstats"]).await.unwrap().text().unwrap_or_default();
    let calls = |line: &str| -> Option<f64> {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let sent = ["eval", "evalsha", "subscribe", "ping"].contains(&name);
        sent.then(|| rest.split(',').next()?.parse().ok())?
    };
    let scripts: f64 = info.lines().filter_map(calls).sum();
    scripts
}

fn print(results: &[Vec<RunResult>; KINDS.len()]) {
    let sections =
        |outcomes: &[RunResult]| median(outcomes.iter().map(|outcome| outcome.sections).collect());
    let engine = sections(&results[1]);
    println!("{:<24} {:>11} {:>7} {:>10} {:>8}", "", "sections/s", "speedup", "max/min", "scripts");
    for (kind, outcomes) in KINDS.iter().zip(results) {
        let share = outcomes
            .iter()
            .map(|outcome| outcome.sections_max as f64 / outcome.sections_min.max(1) as f64);
        let rate = sections(outcomes);
        println!(
            "{:<24} {rate:>11.0} {:>6.2}x {:>10.2} {:>8.2}",
            format!("{kind:?}"),
            engine / rate,
            median(share.collect()),
            median(outcomes.iter().map(|outcome| outcome.requests).collect()),
        );
    }
    // The spread of single rounds shows how far the ratios can be trusted.
    for (kind, outcomes) in KINDS.iter().zip(results) {
        let rounds: Vec<String> =
            outcomes.iter().map(|outcome| format!("{:.0}", outcome.sections)).collect();
        println!("  rounds of {kind:?}: {}", rounds.join(" "));
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
