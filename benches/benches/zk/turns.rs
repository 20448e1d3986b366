//! Measures the time from a release in one process to the grant in the next.

use std::io::BufRead;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use registry_core::LockRegistry;
use registry_testkit::process::HelperProcess;
use registry_testkit::zookeeper::ZooKeeperServer;

use crate::bare::Bare;
use crate::{LIMIT, ours};

/// The time that a holder works.
const WORK: Duration = Duration::from_millis(2);

/// Runs two processes that compete for the lock all the time.
pub async fn bench(server: &ZooKeeperServer, in_earnest: bool) {
    let (rounds, turns) = if in_earnest { (5, 500) } else { (1, 5) };
    let servers = server.addr().to_string();
    let mut medians = [Vec::new(), Vec::new()];
    let mut trips = Vec::new();
    for _ in 0..rounds {
        for (medians, contestant) in medians.iter_mut().zip(["bare", "ours"]) {
            medians.push(median(between(&servers, contestant, turns).await));
        }
        let bare = Bare::connect(&servers, "/bare").await;
        for _ in 0..turns {
            // The connection is idle before a measured release too.
            tokio::time::sleep(WORK).await;
            let asked = Instant::now();
            bare.two_round_trips().await;
            trips.push(asked.elapsed().as_nanos() as u64);
        }
    }
    let [bare, ours] = medians.map(median);
    let trip = median(trips);
    let micros = |nanos: u64| nanos as f64 / 1e3;
    println!(
        "\nfrom a release to the grant in another process, medians: bare {:.0} us, ours {:.0} us ({:.2} x its time); two round trips, a write \
         and a look, are {:.0} us, so ours takes {:.2} x that",
        micros(bare),
        micros(ours),
        ours as f64 / bare as f64,
        micros(trip),
        ours as f64 / trip as f64,
    );
}

/// The times between a release and the next grant, where the grant was in the other process.
async fn between(servers: &str, contestant: &str, turns: usize) -> Vec<u64> {
    let mut children: Vec<_> = (0..2)
        .map(|_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["child", contestant, servers, &turns.to_string()]);
            HelperProcess::spawn(command).unwrap()
        })
        .collect();
    for child in &mut children {
        child.expect_line(|line| line == "ready", LIMIT).await.unwrap();
    }
    for child in &mut children {
        child.write_line("go").unwrap();
    }
    // The grants of both processes, sorted by time.
    let mut all: Vec<(u64, u64, usize)> = Vec::new();
    for (number, child) in children.iter_mut().enumerate() {
        child.expect_line(|line| line == "done", LIMIT).await.unwrap();
        all.extend(child.lines().iter().filter_map(|line| {
            let (granted, released) = line.split_once(' ')?;
            Some((granted.parse().ok()?, released.parse().ok()?, number))
        }));
    }
    all.sort_unstable();
    let overlaps = all.windows(2).filter(|pair| pair[1].0 < pair[0].1).count();
    assert_eq!(overlaps, 0, "two at once");
    let other = all.windows(2).filter(|pair| pair[0].2 != pair[1].2);
    other.map(|pair| pair[1].0 - pair[0].1).collect()
}

/// Acquires the lock `turns` times and prints when it was granted and released.
pub async fn child(arguments: &[&str]) {
    let [contestant, servers, turns] = arguments[..] else { panic!("CONTESTANT SERVERS TURNS") };
    let turns: usize = turns.parse().unwrap();
    let mut lines = Vec::with_capacity(turns);
    if contestant == "bare" {
        let mut bare = Bare::connect(servers, "/bare/turns").await;
        ready();
        for _ in 0..turns {
            bare.lock_at_once().await;
            let granted = now();
            tokio::time::sleep(WORK).await;
            lines.push((granted, now()));
            bare.unlock().await;
        }
    } else {
        let registry = ours(servers).await;
        let lock = registry.obtain("turns");
        ready();
        for _ in 0..turns {
            let guard = lock.lock().await.unwrap();
            let granted = now();
            tokio::time::sleep(WORK).await;
            lines.push((granted, now()));
            guard.unlock().await.unwrap();
        }
    }
    for (granted, released) in lines {
        println!("{granted} {released}");
    }
    println!("done");
}

/// Prints `ready` and waits for a line from the parent process.
fn ready() {
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
