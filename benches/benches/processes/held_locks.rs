//! Measures many locks that one process holds and renews: in Redis next to bare scripts, in
//! PostgreSQL by the number of statements.

use std::time::Duration;

use futures_util::future::join_all;
use lock_registry_benches::{is_full_run, row};
use registry_core::Registry;
use registry_testkit::redis::RedisServer;

use crate::measurement::{
    LIMIT, cpu_time, info_number, median, pings, quantile, resident_bytes, start_child,
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
    /// The maximum latency of another client's command, in nanoseconds.
    max_latency: f64,
    p999: f64,
    bytes_per_lock: f64,
}

pub async fn bench_redis() {
    // Disk writes would dominate the time.
    let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
    let (rounds, count, time) = if is_full_run() { (3, 10_000, 4_000) } else { (1, 100, 100) };
    let time = Duration::from_millis(time);
    let names = ["idle", "reference", "engine"];
    let mut results: [Vec<Cost>; 3] = Default::default();
    for _ in 0..rounds {
        for (name, results) in names.into_iter().zip(&mut results) {
            results.push(run_round(&server, name, count, time).await);
        }
    }
    let [idle, reference, engine] = &results;
    let median_of =
        |rounds: &[Cost], field: &dyn Fn(&Cost) -> f64| median(rounds.iter().map(field));
    type Field<'a> = (&'a str, &'a str, &'a dyn Fn(&Cost) -> f64);
    let fields: [Field<'_>; 5] = [
        ("processor time of the client", "% of a processor", &|cost| cost.client_percent),
        ("processor time of the server", "% of a processor", &|cost| cost.server_percent),
        ("longest stall of another client", "ns", &|cost| cost.max_latency),
        ("p99.9 of another client's `PING`", "ns", &|cost| cost.p999),
        ("connections", "", &|cost| cost.connections),
    ];
    for (name, unit, field) in fields {
        let figure = row("redis-held", name).measured(median_of(engine, field), unit);
        figure.against("bare scripts", median_of(reference, field)).record();
    }
    for (name, unit, field) in &fields[2..4] {
        let row = row("redis-held", format!("{name}, with no lock held"));
        row.measured(median_of(idle, field), unit).record();
    }
    let bytes = median_of(engine, &|cost| cost.bytes_per_lock);
    row("redis-held", "resident memory of the client, per lock").measured(bytes, "bytes").record();
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
    // The processor times are measured before the latencies: a client that pings without a pause
    // causes most of the server's work.
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
    let latencies_ns = || latencies.iter().map(|time| time.as_nanos() as f64);
    cost.max_latency = quantile(latencies_ns(), 1.0);
    cost.p999 = quantile(latencies_ns(), 0.999);
    if let Some(child) = &mut child {
        child.write_line("end").unwrap();
        let bytes = |line: &str| line.strip_prefix("bytes ")?.parse::<f64>().ok();
        cost.bytes_per_lock = child.expect_map(bytes, LIMIT).await.unwrap() / count as f64;
    }
    cost
}

/// Counts the statements that one renewal of all locks takes.
pub async fn bench_postgres() {
    let server = LockServer::postgres().await;
    let (count, periods) = if is_full_run() { (10_000_u32, 6) } else { (100, 1) };
    let url = server.url();
    let mut child = start_child(&["held", "engine", &url, &count.to_string()]);
    child.expect_line(|line| line.starts_with("held"), LIMIT).await.unwrap();
    // Skips the first period, in which the renewals are as spread out as the grants were.
    tokio::time::sleep(LEASE / 3 * 2).await;
    server.reset_request_count().await;
    tokio::time::sleep(LEASE / 3 * periods).await;
    let statements = server.requests("engine").await;
    child.write_line("end").unwrap();
    child.expect_line(|line| line.starts_with("bytes"), LIMIT).await.unwrap();
    let row = row("postgres-held", "statements for one renewal of all locks");
    row.measured(statements as f64 / f64::from(periods), "").record();
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

/// Waits for a lock once, so that the memory of a held lock does not include what the first wait
/// creates.
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
