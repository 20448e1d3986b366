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

use crate::contestant::{Contestant, Kind};

const TASKS: usize = 64;
const KINDS: [Kind; 4] = [Kind::Bare, Kind::Ours, Kind::Rslock, Kind::DistributedLock];

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
        let broken = run(&server, Kind::Broken, true, Duration::from_millis(200)).await;
        assert!(broken.overlaps > 0, "sections that overlap were not noticed");
        for one_key in [true, false] {
            let mut results: [Vec<Outcome>; KINDS.len()] = Default::default();
            for _ in 0..rounds {
                for (kind, results) in KINDS.into_iter().zip(&mut results) {
                    let outcome = run(&server, kind, one_key, seconds).await;
                    assert_eq!(outcome.overlaps, 0, "{kind:?} let two in");
                    results.push(outcome);
                }
            }
            println!("\n{TASKS} tasks, {}", if one_key { "one key" } else { "a key each" });
            print(&results);
        }
    });
}

struct Outcome {
    sections: f64,
    least: u64,
    most: u64,
    /// The number of commands that the server received.
    requests: f64,
    overlaps: u64,
}

/// Lets all tasks acquire and release as often as they can.
async fn run(server: &RedisServer, kind: Kind, one_key: bool, time: Duration) -> Outcome {
    server.ask("FLUSHALL").await.unwrap();
    let contestant = Arc::new(Contestant::new(kind, server).await);
    // Everything that the first use creates exists before the measurement.
    contestant.section("warm", || {}).await;
    server.ask("CONFIG RESETSTAT").await.unwrap();
    let overlaps = Arc::new(AtomicU64::new(0));
    let common = Arc::new(AtomicBool::new(false));
    let start = Instant::now();
    let end = start + time;
    let counts: Vec<Arc<AtomicU64>> = (0..TASKS).map(|_| Arc::default()).collect();
    let mut tasks = JoinSet::new();
    for (task, count) in counts.iter().enumerate() {
        let contestant = Arc::clone(&contestant);
        let (count, overlaps) = (Arc::clone(count), Arc::clone(&overlaps));
        let (key, inside) = if one_key {
            ("orders/42".to_owned(), Arc::clone(&common))
        } else {
            (format!("orders/{task}"), Arc::default())
        };
        tasks.spawn(async move {
            let mine = contestant.of(&key);
            let section = || {
                if inside.swap(true, Ordering::AcqRel) {
                    overlaps.fetch_add(1, Ordering::Relaxed);
                }
                count.fetch_add(1, Ordering::Relaxed);
                inside.store(false, Ordering::Release);
            };
            while Instant::now() < end {
                mine.section(section).await;
            }
        });
    }
    tokio::time::sleep_until(end.into()).await;
    let shares: Vec<u64> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    let requests = requests(server).await;
    // A task that is still queued may have to wait for long.
    let _late =
        tokio::time::timeout(GRACE, async { while tasks.join_next().await.is_some() {} }).await;
    tasks.shutdown().await;
    contestant.close().await;
    let sections = shares.iter().sum::<u64>() as f64;
    Outcome {
        sections: sections / time.as_secs_f64(),
        least: shares.iter().copied().min().unwrap_or_default(),
        most: shares.iter().copied().max().unwrap_or_default(),
        requests: requests / sections,
        overlaps: overlaps.load(Ordering::Relaxed),
    }
}

/// The time limit for tasks that are still queued at the end.
const GRACE: Duration = Duration::from_secs(1);

/// The number of commands from clients and from their scripts.
async fn requests(server: &RedisServer) -> f64 {
    let info = server.ask_args(&["INFO", "commandstats"]).await.unwrap().text().unwrap_or_default();
    let calls = |line: &str| -> Option<f64> {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let sent = ["eval", "evalsha", "subscribe", "ping"].contains(&name);
        sent.then(|| rest.split(',').next()?.parse().ok())?
    };
    let scripts: f64 = info.lines().filter_map(calls).sum();
    scripts
}

fn print(results: &[Vec<Outcome>; KINDS.len()]) {
    let sections =
        |outcomes: &[Outcome]| median(outcomes.iter().map(|outcome| outcome.sections).collect());
    let ours = sections(&results[1]);
    println!(
        "{:<24} {:>11} {:>7} {:>10} {:>8}",
        "", "sections/s", "ours is", "most/least", "scripts"
    );
    for (kind, outcomes) in KINDS.iter().zip(results) {
        let share =
            outcomes.iter().map(|outcome| outcome.most as f64 / outcome.least.max(1) as f64);
        let rate = sections(outcomes);
        println!(
            "{:<24} {rate:>11.0} {:>6.2}x {:>10.2} {:>8.2}",
            format!("{kind:?}"),
            ours / rate,
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
