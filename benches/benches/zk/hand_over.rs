//! Measures the time from a release in one process to the grant in another process.

use std::io::BufRead;
use std::process::Command;
use std::time::{Duration, Instant};

use lock_registry_benches::{is_full_run, row};
use nix::time::{ClockId, clock_gettime};
use registry_testkit::process::HelperProcess;
use registry_testkit::zookeeper::ZooKeeperServer;

use crate::reference::ZkReference;
use crate::{LIMIT, open_registry};

/// The time that a holder works.
const WORK: Duration = Duration::from_millis(2);

/// Runs two processes that compete for the lock. Each requests it again after every release.
pub async fn bench(server: &ZooKeeperServer) {
    let (rounds, tenures) = if is_full_run() { (3, 500) } else { (1, 5) };
    let servers = server.addr().to_string();
    let mut medians = [Vec::new(), Vec::new()];
    let mut round_trips = Vec::new();
    for _ in 0..rounds {
        for (medians, client) in medians.iter_mut().zip(["reference", "engine"]) {
            medians.push(median(measure_hand_overs(&servers, client, tenures).await));
        }
        let reference = ZkReference::connect(&servers, "/bare").await;
        for _ in 0..tenures {
            // The connection is idle first, as it is before a measured release.
            tokio::time::sleep(WORK).await;
            let started = Instant::now();
            reference.write_and_list().await;
            round_trips.push(started.elapsed().as_nanos() as u64);
        }
    }
    let [reference, engine] = medians.map(median);
    let round_trip = median(round_trips);
    let row = row("hand-over", "ZooKeeper: from a release to the grant in another process");
    for (reference, median) in
        [("a bare loop", reference), ("a write and a list, on an idle connection", round_trip)]
    {
        let hand_over = row.clone().measured(engine as f64, "ns");
        hand_over.against(reference, median as f64).record();
    }
}

/// Returns the times from each release to the next grant, if that grant was in the other process.
async fn measure_hand_overs(servers: &str, client: &str, tenures: usize) -> Vec<u64> {
    let mut children: Vec<_> = (0..2)
        .map(|_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["child", client, servers, &tenures.to_string()]);
            HelperProcess::spawn(command).unwrap()
        })
        .collect();
    for child in &mut children {
        child.expect_line(|line| line == "ready", LIMIT).await.unwrap();
    }
    for child in &mut children {
        child.write_line("start").unwrap();
    }
    // The grants of both processes, sorted by time: the times of grant and release, and the
    // process.
    let mut grants: Vec<(u64, u64, usize)> = Vec::new();
    for (number, child) in children.iter_mut().enumerate() {
        child.expect_line(|line| line == "done", LIMIT).await.unwrap();
        grants.extend(child.lines().iter().filter_map(|line| {
            let (granted, released) = line.split_once(' ')?;
            Some((granted.parse().ok()?, released.parse().ok()?, number))
        }));
    }
    grants.sort_unstable();
    let overlaps = grants.windows(2).filter(|pair| pair[1].0 < pair[0].1).count();
    assert_eq!(overlaps, 0, "two processes held the lock at once");
    let changes = grants.windows(2).filter(|pair| pair[0].2 != pair[1].2);
    changes.map(|pair| pair[1].0 - pair[0].1).collect()
}

/// Acquires the lock `tenures` times and prints when it was granted and released.
pub async fn child(arguments: &[&str]) {
    let [client, servers, tenures] = arguments[..] else { panic!("usage: CLIENT SERVERS TENURES") };
    let tenures: usize = tenures.parse().unwrap();
    let mut tenure_times = Vec::with_capacity(tenures);
    if client == "reference" {
        let mut reference = ZkReference::connect(servers, "/bare/turns").await;
        wait_for_start();
        for _ in 0..tenures {
            reference.lock_pipelined().await;
            let granted = now();
            tokio::time::sleep(WORK).await;
            tenure_times.push((granted, now()));
            reference.unlock().await;
        }
    } else {
        let registry = open_registry(servers).await;
        let lock = registry.obtain("turns");
        wait_for_start();
        for _ in 0..tenures {
            let guard = lock.lock().await.unwrap();
            let granted = now();
            tokio::time::sleep(WORK).await;
            tenure_times.push((granted, now()));
            guard.unlock().await.unwrap();
        }
    }
    for (granted, released) in tenure_times {
        println!("{granted} {released}");
    }
    println!("done");
}

/// Prints `ready` and waits for a line from the parent process.
fn wait_for_start() {
    println!("ready");
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

/// The monotonic clock in nanoseconds, which is the same in all processes.
fn now() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap();
    u64::try_from(now.tv_sec() * 1_000_000_000 + now.tv_nsec()).unwrap()
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}
