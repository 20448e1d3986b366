//! Measures many locks that one process holds and renews.

use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{LockRegistry, Registry};
use registry_testkit::redis::RedisServer;

use crate::measure::{
    LIMIT, child as start_child, info_number, median, pings, quantile, ran, resident,
};
use crate::store::{Store, open};
use crate::{bare_redis, order};

const LEASE: Duration = Duration::from_secs(3);

/// The cost of one process while it held its locks.
#[derive(Default)]
struct Cost {
    client_percent: f64,
    server_percent: f64,
    connections: f64,
    /// The longest latency of another client's command, in milliseconds.
    longest_stall: f64,
    p999: f64,
    bytes_per_lock: f64,
}

pub async fn bench_redis(in_earnest: bool) {
    // Disk writes would dominate the time.
    let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
    let (rounds, count, time) = if in_earnest { (3, 10_000, 6_000) } else { (1, 100, 100) };
    let time = Duration::from_millis(time);
    let names = ["nobody", "bare", "ours"];
    let mut results: [Vec<Cost>; 3] = Default::default();
    for _ in 0..rounds {
        for (name, results) in names.into_iter().zip(&mut results) {
            results.push(round(&server, name, count, time).await);
        }
    }
    println!("\n{count} locks held, lease {LEASE:?}");
    for (name, rounds) in names.into_iter().zip(&results) {
        let over = |figure: &dyn Fn(&Cost) -> f64| median(rounds.iter().map(figure));
        println!(
            "  {name:<7} client {:.2} % of a processor, server {:.2} %; another client's longest stall {:.2} ms (best and worst round {:.2}, \
             {:.2}), p99.9 {:.2} ms; {:.0} bytes a lock; {:.0} connections",
            over(&|cost| cost.client_percent),
            over(&|cost| cost.server_percent),
            over(&|cost| cost.longest_stall),
            quantile(rounds.iter().map(|cost| cost.longest_stall), 0.0),
            quantile(rounds.iter().map(|cost| cost.longest_stall), 1.0),
            over(&|cost| cost.p999),
            over(&|cost| cost.bytes_per_lock),
            over(&|cost| cost.connections),
        );
    }
    let [client, server] = [&|cost: &Cost| cost.client_percent, &|cost: &Cost| cost.server_percent]
        as [&dyn Fn(&Cost) -> f64; 2];
    let ratio = |figure: &dyn Fn(&Cost) -> f64| {
        median(results[2].iter().map(figure)) / median(results[1].iter().map(figure))
    };
    println!(
        "  ours takes {:.2} x the client's time and {:.2} x the server's",
        ratio(client),
        ratio(server)
    );
}

async fn round(server: &RedisServer, name: &str, count: usize, time: Duration) -> Cost {
    server.ask("FLUSHALL").await.unwrap();
    let before = info_number(server, "clients", "connected_clients").await;
    let mut cost = Cost::default();
    let count_text = count.to_string();
    let mut child = if name == "nobody" {
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
    let used = || (ran(server_pid), child.as_ref().map_or(Duration::ZERO, |child| ran(child.id())));
    let earlier = used();
    tokio::time::sleep(time).await;
    let later = used();
    let percent =
        |later: Duration, earlier| (later - earlier).as_secs_f64() / time.as_secs_f64() * 100.0;
    cost.server_percent = percent(later.0, earlier.0);
    cost.client_percent = percent(later.1, earlier.1);
    cost.connections =
        f64::from(info_number(server, "clients", "connected_clients").await.saturating_sub(before));
    let addr = server.addr();
    let times = tokio::task::spawn_blocking(move || pings(addr, time)).await.unwrap();
    let stalls = || times.iter().map(|time| time.as_secs_f64() * 1e3);
    cost.longest_stall = quantile(stalls(), 1.0);
    cost.p999 = quantile(stalls(), 0.999);
    if let Some(child) = &mut child {
        child.write_line("end").unwrap();
        let bytes = |line: &str| line.strip_prefix("bytes ")?.parse::<f64>().ok();
        cost.bytes_per_lock = child.expect_map(bytes, LIMIT).await.unwrap() / count as f64;
    }
    cost
}

/// Counts the statements that one renewal of all locks takes.
pub async fn bench_postgres(in_earnest: bool) {
    let store = Store::postgres().await;
    let (count, periods) = if in_earnest { (10_000_u32, 6) } else { (100, 1) };
    let url = store.url();
    let mut child = start_child(&["held", "ours", &url, &count.to_string()]);
    child.expect_line(|line| line.starts_with("held"), LIMIT).await.unwrap();
    // Skips the first period: its renewals are spread out, as the grants were.
    tokio::time::sleep(LEASE / 3 * 2).await;
    store.count_requests().await;
    tokio::time::sleep(LEASE / 3 * periods).await;
    let statements = store.requests("ours").await;
    child.write_line("end").unwrap();
    child.expect_line(|line| line.starts_with("bytes"), LIMIT).await.unwrap();
    println!(
        "\n{count} locks held on PostgreSQL, lease {LEASE:?}: {:.1} statements a period",
        statements as f64 / f64::from(periods)
    );
}

/// The process that holds the locks.
pub async fn child(arguments: &[&str]) {
    let [contestant, url, count] = arguments[..] else { panic!("held CONTESTANT URL COUNT") };
    let keys: Vec<String> =
        (0..count.parse().unwrap()).map(|key: u32| format!("orders/{key}")).collect();
    if contestant == "bare" {
        let connection = bare_redis::connect(url).await;
        let told = tokio::select! {
            told = order() => told,
            never = bare_redis::hold(&connection, &keys, LEASE) => never,
        };
        assert_eq!(told, "end");
        println!("bytes 0");
        return;
    }
    let registry = Registry::builder(open(url).await).lease(LEASE).build().unwrap();
    wait_once(&registry, Registry::builder(open(url).await).build().unwrap()).await;
    let before = resident();
    let mut guards = Vec::with_capacity(keys.len());
    for keys in keys.chunks(100) {
        // Only the guards are needed to hold; each lock handle is dropped at once.
        let taken = keys.iter().map(async |key| registry.obtain(key).lock().await.unwrap());
        guards.extend(join_all(taken).await);
    }
    println!("held");
    order().await;
    assert!(guards.iter().all(|guard| guard.is_held()), "a lock was lost");
    println!("bytes {}", resident().saturating_sub(before));
    order().await;
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
    other.close(Duration::from_secs(1)).await;
}
