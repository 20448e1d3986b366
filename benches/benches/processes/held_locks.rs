//! Measures many locks that one process holds and renews.

use std::time::Duration;

use futures_util::future::join_all;
use registry_core::Registry;
use registry_testkit::redis::RedisServer;

use crate::measurement::{
    LIMIT, child as start_child, cpu_time, info_number, median, pings, quantile, resident_bytes,
};
use crate::server::{LockServer, open};
use crate::{read_stdin_line, redis_reference};

const LEASE: Duration = Duration::from_secs(3);

/// The cost of one process while it held its locks.
#[derive(Default)]
struct Cost {
    client_percent: f64,
    server_percent: f64,
    connections: f64,
    /// The maximum latency of another client's command, in milliseconds.
    max_latency: f64,
    p999: f64,
    bytes_per_lock: f64,
}

pub async fn bench_redis(is_full_run: bool) {
    // Disk writes would dominate the time.
    let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
    let (rounds, count, time) = if is_full_run { (3, 10_000, 6_000) } else { (1, 100, 100) };
    let time = Duration::from_millis(time);
    let names = ["idle", "reference", "engine"];
    let mut results: [Vec<Cost>; 3] = Default::default();
    for _ in 0..rounds {
        for (name, results) in names.into_iter().zip(&mut results) {
            results.push(run_round(&server, name, count, time).await);
        }
    }
    println!("\n{count} locks held, lease {LEASE:?}");
    for (name, rounds) in names.into_iter().zip(&results) {
        let median_of = |field: &dyn Fn(&Cost) -> f64| median(rounds.iter().map(field));
        println!(
            "  {name:<9} client {:.2} % of a processor, server {:.2} %; another client's maximum latency {:.2} ms (best and worst round {:.2}, \
             {:.2}), p99.9 {:.2} ms; {:.0} bytes a lock; {:.0} connections",
            median_of(&|cost| cost.client_percent),
            median_of(&|cost| cost.server_percent),
            median_of(&|cost| cost.max_latency),
            quantile(rounds.iter().map(|cost| cost.max_latency), 0.0),
            quantile(rounds.iter().map(|cost| cost.max_latency), 1.0),
            median_of(&|cost| cost.p999),
            median_of(&|cost| cost.bytes_per_lock),
            median_of(&|cost| cost.connections),
        );
    }
    let [client, server] = [&|cost: &Cost| cost.client_percent, &|cost: &Cost| cost.server_percent]
        as [&dyn Fn(&Cost) -> f64; 2];
    let ratio = |field: &dyn Fn(&Cost) -> f64| {
        median(results[2].iter().map(field)) / median(results[1].iter().map(field))
    };
    println!(
        "  the engine takes {:.2} x the client's time and {:.2} x the server's",
        ratio(client),
        ratio(server)
    );
}

async fn run_round(server: &RedisServer, name: &str, count: usize, time: Duration) -> Cost {
    server.send_command("FLUSHALL").await.unwrap();
    let before = info_number(server, "clients", "connected_clients").await;
    let mut cost = Cost::default();
    let count_text = count.to_string();
    let mut child = if name == "idle" {
        None
    } else {
        let url = server.url();
        let mut child = start_child(&["held", name, &url, &count_text]);
        let line = child.expect_line(|line| line.starts_with("held"), LIMIT).await.unwrap();
        drop(line);
        Some(child)
    };
    // The idle phase comes first: a client that pings without a pause causes most of the server's
    // work.
    tokio::time::sleep(time / 6).await;
    let server_pid = info_number(server, "server", "process_id").await;
    let cpu_times = || {
        (cpu_time(server_pid), child.as_ref().map_or(Duration::ZERO, |child| cpu_time(child.id())))
    };
    let earlier = cpu_times();
    tokio::time::sleep(time).await;
    let later = cpu_times();
    let percent =
        |later: Duration, earlier| (later - earlier).as_secs_f64() / time.as_secs_f64() * 100.0;
    cost.server_percent = percent(later.0, earlier.0);
    cost.client_percent = percent(later.1, earlier.1);
    cost.connections =
        f64::from(info_number(server, "clients", "connected_clients").await.saturating_sub(before));
    let addr = server.addr();
    let latencies = tokio::task::spawn_blocking(move || pings(addr, time)).await.unwrap();
    let latencies_ms = || latencies.iter().map(|time| time.as_secs_f64() * 1e3);
    cost.max_latency = quantile(latencies_ms(), 1.0);
    cost.p999 = quantile(latencies_ms(), 0.999);
    if let Some(child) = &mut child {
        child.write_line("end").unwrap();
        let bytes = |line: &str| line.strip_prefix("bytes ")?.parse::<f64>().ok();
        cost.bytes_per_lock = child.expect_map(bytes, LIMIT).await.unwrap() / count as f64;
    }
    cost
}

/// Counts the statements that one renewal of all locks takes.
pub async fn bench_postgres(is_full_run: bool) {
    let server = LockServer::postgres().await;
    let (count, periods) = if is_full_run { (10_000_u32, 6) } else { (100, 1) };
    let url = server.url();
    let mut child = start_child(&["held", "engine", &url, &count.to_string()]);
    child.expect_line(|line| line.starts_with("held"), LIMIT).await.unwrap();
    // Skips the first period: its renewals are spread out, as the grants were.
    tokio::time::sleep(LEASE / 3 * 2).await;
    server.count_requests().await;
    tokio::time::sleep(LEASE / 3 * periods).await;
    let statements = server.requests("engine").await;
    child.write_line("end").unwrap();
    child.expect_line(|line| line.starts_with("bytes"), LIMIT).await.unwrap();
    println!(
        "\n{count} locks held on PostgreSQL, lease {LEASE:?}: {:.1} statements a period",
        statements as f64 / f64::from(periods)
    );
}

/// The process that holds the locks.
pub async fn child(arguments: &[&str]) {
    let [client, url, count] = arguments[..] else { panic!("usage: held CLIENT URL COUNT") };
    let keys: Vec<String> =
        (0..count.parse().unwrap()).map(|key: u32| format!("orders/{key}")).collect();
    if client == "reference" {
        let connection = redis_reference::connect(url).await;
        let command = tokio::select! {
            command = read_stdin_line() => command,
            never = redis_reference::hold(&connection, &keys, LEASE) => never,
        };
        assert_eq!(command, "end");
        println!("bytes 0");
        return;
    }
    let registry = Registry::builder(open(url).await).lease(LEASE).build().unwrap();
    wait_once(&registry, Registry::builder(open(url).await).build().unwrap()).await;
    let before = resident_bytes();
    let mut guards = Vec::with_capacity(keys.len());
    for keys in keys.chunks(100) {
        // Only the guards are needed to hold; each lock handle is dropped at once.
        let guards_of_chunk =
            keys.iter().map(async |key| registry.obtain(key).lock().await.unwrap());
        guards.extend(join_all(guards_of_chunk).await);
    }
    println!("held");
    read_stdin_line().await;
    assert!(guards.iter().all(|guard| guard.is_held()), "a lock was lost");
    println!("bytes {}", resident_bytes().saturating_sub(before));
    read_stdin_line().await;
}

/// Waits for a lock once, so that everything that the first wait creates exists.
async fn wait_once(registry: &Registry, other: Registry) {
    let held = other.obtain("warm").lock().await.unwrap();
    let waiting = registry.obtain("warm");
    let wait = async {
        let wait = Duration::from_millis(100);
        assert!(waiting.try_lock_for(wait).await.unwrap().is_none());
    };
    wait.await;
    held.unlock().await.unwrap();
    waiting.lock().await.unwrap().unlock().await.unwrap();
    _ = other.close(Duration::from_secs(1)).await;
}
