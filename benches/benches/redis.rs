//! Measures the overhead of the engine and the Redis store over the two scripts that a lock needs.
//! Also measures a `once` job whose tick is already done, and the step-down of a leader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lock_registry_benches::{
    compare, hand_over_time, median_of, record_server, row, write_results,
};
use redis::Script;
use redis::aio::MultiplexedConnection;
use registry_core::election::Term;
use registry_core::once::Outcome;
use registry_core::{LockOptions, LockRegistryExt as _, Registry};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::redis::RedisServer;

const ROUNDS: usize = 100;
/// Long enough for a waiter to enqueue. A candidate that has stepped down enqueues too.
const PAUSE: Duration = Duration::from_millis(50);

/// The Lua functions that the store puts before each script.
const FUNCTIONS: [&str; 3] = [
    include_str!("../../crates/registry-redis/src/script/layout/native.lua"),
    include_str!("../../crates/registry-redis/src/script/tokens.lua"),
    include_str!("../../crates/registry-redis/src/script/entries.lua"),
];
const ACQUIRE: &str = include_str!("../../crates/registry-redis/src/script/acquire.lua");
const RELEASE: &str = include_str!("../../crates/registry-redis/src/script/release.lua");

fn main() {
    lock_registry_benches::pin_to_one_processor();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // Disk writes would dominate the time.
        let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
        let connection = connection(&server).await;
        let script = |body: &str| Script::new(&format!("{}\n{body}", FUNCTIONS.join("\n")));
        let (acquire, release) = (script(ACQUIRE), script(RELEASE));
        let pair = async |key: &str| {
            let mut connection = connection.clone();
            let owner = "000102030405060708090a0b0c0d0e0f";
            let (name, token) = (format!("bare:{{{key}}}"), format!("bare:{{{key}}}:token"));
            let mut call = acquire.key(&name);
            // As many tokens as a claim of this library reserves.
            call.key(&token).arg(owner).arg(30_000).arg(65).arg(86_400_000).arg("");
            let (granted, _token, _lease): (i64, String, i64) =
                call.invoke_async(&mut connection).await.unwrap();
            assert_eq!(granted, 1);
            let mut call = release.key(&name);
            call.key(token).arg(owner).arg(1).arg("PUBLISH").arg("0").arg(&name);
            let freed: i64 = call.invoke_async(&mut connection).await.unwrap();
            assert_eq!(freed, 1);
        };
        let backend =
            RedisBackend::open(RedisConfig::from_url(&server.url()).unwrap()).await.unwrap();
        let registry = Registry::builder(Arc::new(backend)).build().unwrap();
        let lock = registry.obtain("orders/42");
        let lock_and_unlock = || async { lock.lock().await.unwrap().unlock().await.unwrap() };
        let info = server.send_command_args(&["INFO", "server"]).await.unwrap();
        record_server("Redis", &info.text().unwrap_or_default());
        let reference = || async { pair("orders/42").await };
        let against = "the same two scripts on one connection of the same kind";
        let uncontended = row("pairs", "Redis: uncontended lock and unlock");
        compare(uncontended, against, reference, lock_and_unlock).await;

        // As many concurrent locks as a busy service has.
        let keys: Vec<String> = (0..64).map(|key| format!("orders/{key}")).collect();
        let locks: Vec<_> = keys.iter().map(|key| registry.obtain(key)).collect();
        let reference = || async { _ = join_all(keys.iter().map(|key| pair(key))).await };
        let lock_and_unlock = || async {
            let pairs =
                locks.iter().map(async |lock| lock.lock().await.unwrap().unlock().await.unwrap());
            join_all(pairs).await;
        };
        let against = "the same scripts, all at once on that connection";
        let at_once = row("pairs", "Redis: 64 uncontended pairs at once");
        compare(at_once, against, reference, lock_and_unlock).await;

        // This job sends one read to the store. Its reference is the simplest command.
        let job = registry.once("report").tick(1);
        _ = job.run(async |_| ()).await.unwrap();
        let reference = || async {
            let value: Option<String> =
                redis::cmd("GET").arg("none").query_async(&mut connection.clone()).await.unwrap();
            assert_eq!(value, None);
        };
        let is_done = || async {
            let outcome = job.run(async |_| ()).await.unwrap();
            assert!(matches!(outcome, Outcome::AlreadyDone { .. }));
        };
        let row = row("jobs", "`once` of a tick that is done");
        compare(row, "a `GET`", reference, is_done).await;

        let backend =
            RedisBackend::open(RedisConfig::from_url(&server.url()).unwrap()).await.unwrap();
        let other = Registry::builder(Arc::new(backend)).build().unwrap();
        step_downs([&registry, &other]).await;
        _ = registry.close(Duration::from_secs(1)).await;
        _ = other.close(Duration::from_secs(1)).await;
    });
    write_results("redis");
}

/// Measures the time from the call of `step_down` until the next leader starts its work. The
/// reference is the hand-over of a fair lock.
async fn step_downs(registries: [&Registry; 2]) {
    let mut hand_overs = Vec::new();
    for round in 0..ROUNDS {
        let locks = [round, round + 1].map(|n| registries[n % 2].obtain("handed"));
        hand_overs.push(hand_over_time(locks, &LockOptions::new().fair(true), PAUSE).await);
    }

    let (term_started, mut term_starts) = tokio::sync::mpsc::unbounded_channel();
    let elections = registries.map(|registry| registry.election("role"));
    for (number, election) in elections.clone().into_iter().enumerate() {
        let term_started = term_started.clone();
        tokio::spawn(async move {
            let work = async |term: Term| {
                // After the last round, no receiver is left.
                _ = term_started.send((number, Instant::now()));
                term.stopping().await;
            };
            election.run(work).await.unwrap();
        });
    }
    let mut step_downs = Vec::new();
    let (mut leader, _) = term_starts.recv().await.unwrap();
    for _ in 0..ROUNDS {
        tokio::time::sleep(PAUSE).await;
        let started = Instant::now();
        assert!(elections[leader].step_down());
        let (next, begun) = term_starts.recv().await.unwrap();
        step_downs.push(begun - started);
        leader = next;
    }
    let row = row("jobs", "election: from a step-down to the first step of the next leader");
    let step_down = row.measured(median_of(step_downs), "ns");
    step_down.against("the hand-over of a fair lock", median_of(hand_overs)).record();
}

/// Opens a connection of the same kind as the store's.
async fn connection(server: &RedisServer) -> MultiplexedConnection {
    let addr = redis::ConnectionAddr::Tcp(server.addr().ip().to_string(), server.addr().port());
    let info = redis::IntoConnectionInfo::into_connection_info(addr).unwrap();
    let settings = info.redis_settings().clone().set_protocol(redis::ProtocolVersion::RESP3);
    let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
    let client = redis::Client::open(info.set_redis_settings(settings).set_tcp_settings(tcp));
    let connection_config =
        redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(10)));
    client.unwrap().get_multiplexed_async_connection_with_config(&connection_config).await.unwrap()
}
