//! Measures processes that compete for one key, with the engine and with a bare loop. Each holder
//! works for 2 ms.

use std::sync::Arc;
use std::time::Duration;

use lock_registry_benches::{is_full_run, row};
use registry_core::{DistributedLock, Registry};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::measurement::{LIMIT, median, quantile, start_child};
use crate::server::{LockServer, open};
use crate::{now, postgres_reference, read_stdin_line, redis_reference};

const KEY: &str = "orders/42";
const WORK: Duration = Duration::from_millis(2);

struct ContentionScenario {
    title: &'static str,
    processes: usize,
    /// The number of tasks of each process.
    tasks: usize,
    /// The pause of a process between its release and its next request.
    reacquire_delay: ReacquireDelay,
    /// The maximum number of consecutive hand-overs inside one process.
    handoffs: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReacquireDelay {
    None,
    /// After 0.5 to 1.5 ms, which is before the next holder finishes its 2 ms of work.
    Short,
}

const SCENARIOS: [ContentionScenario; 5] = [
    ContentionScenario {
        title: "2 processes",
        processes: 2,
        tasks: 1,
        reacquire_delay: ReacquireDelay::Short,
        handoffs: 32,
    },
    ContentionScenario {
        title: "8 processes",
        processes: 8,
        tasks: 1,
        reacquire_delay: ReacquireDelay::Short,
        handoffs: 32,
    },
    ContentionScenario {
        title: "8 processes that request the lock again at once",
        processes: 8,
        tasks: 1,
        reacquire_delay: ReacquireDelay::None,
        handoffs: 32,
    },
    ContentionScenario {
        title: "200 waiters in 4 processes",
        processes: 4,
        tasks: 50,
        reacquire_delay: ReacquireDelay::None,
        handoffs: 32,
    },
    ContentionScenario {
        title: "200 waiters in 4 processes, `handoff` 0",
        processes: 4,
        tasks: 50,
        reacquire_delay: ReacquireDelay::None,
        handoffs: 0,
    },
];

/// One tenure of one process, with three timestamps.
struct Tenure {
    process: usize,
    requested: u64,
    granted: u64,
    released: u64,
}

struct RoundResult {
    /// In the order of the grants.
    tenures: Vec<Tenure>,
    time: Duration,
    requests: u64,
    /// Over all requests, in nanoseconds.
    longest_wait: f64,
}

pub async fn bench(server: &LockServer) {
    let (rounds, time) = if is_full_run() { (5, 1_500) } else { (1, 100) };
    let time = Duration::from_millis(time);
    // Tests the check itself: it must detect a client without mutual exclusion.
    let unsynchronized =
        run_round(server, "unsynchronized", &SCENARIOS[0], Duration::from_millis(100)).await;
    assert!(unsynchronized.overlaps() > 0, "the check did not detect overlapping tenures");
    for scenario in &SCENARIOS {
        let mut results = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (client, results) in ["reference", "engine"].into_iter().zip(&mut results) {
                let round = run_round(server, client, scenario, time).await;
                assert_eq!(
                    round.overlaps(),
                    0,
                    "{client} granted the lock to two processes at once"
                );
                results.push(round);
            }
        }
        record(server, scenario, &results);
    }
}

/// Lets the processes of `scenario` compete for the key for `time`.
async fn run_round(
    server: &LockServer,
    client: &str,
    scenario: &ContentionScenario,
    time: Duration,
) -> RoundResult {
    server.clear().await;
    let (url, tasks, handoffs) =
        (server.url(), scenario.tasks.to_string(), scenario.handoffs.to_string());
    let reacquire_delay = format!("{:?}", scenario.reacquire_delay);
    let arguments = ["contention", client, &url, &tasks, &reacquire_delay, &handoffs];
    let mut children: Vec<_> = (0..scenario.processes).map(|_| start_child(&arguments)).collect();
    for child in &mut children {
        child.expect_line(|line| line == "ready", LIMIT).await.unwrap();
    }
    server.reset_request_count().await;
    // All processes stop at the same time, so a late start does not shift the end.
    let end = now() + time.as_nanos() as u64;
    for child in &mut children {
        child.write_line(&end.to_string()).unwrap();
    }
    tokio::time::sleep(time).await;
    let requests = server.requests(client).await;
    for child in &mut children {
        child.expect_line(|line| line == "done", LIMIT).await.unwrap();
    }
    let mut tenures: Vec<Tenure> = Vec::new();
    for (process, child) in children.iter().enumerate() {
        for line in child.lines() {
            let timestamps: Vec<u64> =
                line.split(' ').filter_map(|word| word.parse().ok()).collect();
            if let [requested, granted, released] = timestamps[..] {
                tenures.push(Tenure { process, requested, granted, released });
            }
        }
    }
    tenures.sort_by_key(|tenure| tenure.granted);
    let longest_wait =
        quantile(tenures.iter().map(|tenure| (tenure.granted - tenure.requested) as f64), 1.0);
    // After `end`, fewer and fewer processes compete, so these tenures do not count.
    tenures.retain(|tenure| tenure.granted < end);
    RoundResult { tenures, time, requests, longest_wait }
}

impl RoundResult {
    /// The number of grants that came before the release of the previous holder.
    fn overlaps(&self) -> usize {
        self.pairs().filter(|[before, after]| after.granted < before.released).count()
    }

    /// The time from each release to the next grant in another process that already waited, in
    /// nanoseconds.
    fn hand_overs(&self) -> Vec<f64> {
        let between = self.pairs().filter(|[before, after]| {
            before.process != after.process && after.requested < before.released
        });
        between
            .map(|[before, after]| after.granted.saturating_sub(before.released) as f64)
            .collect()
    }

    fn process_changes(&self) -> usize {
        self.pairs().filter(|[before, after]| before.process != after.process).count()
    }

    fn pairs(&self) -> impl Iterator<Item = [&Tenure; 2]> {
        self.tenures.windows(2).map(|pair| [&pair[0], &pair[1]])
    }
}

/// Records the medians over the rounds.
fn record(
    server: &LockServer,
    scenario: &ContentionScenario,
    [reference, engine]: &[Vec<RoundResult>; 2],
) {
    let median_of = |rounds: &[RoundResult], field: &dyn Fn(&RoundResult) -> f64| {
        median(rounds.iter().map(field))
    };
    type Field<'a> = (&'a str, &'a str, &'a dyn Fn(&RoundResult) -> f64);
    let hand_over: [Field<'_>; 2] = [
        ("median", "ns", &|round| quantile(round.hand_overs(), 0.5)),
        ("p99", "ns", &|round| quantile(round.hand_overs(), 0.99)),
    ];
    let requests: [Field<'_>; 1] =
        [(server.requests_name(), "", &|round| round.requests as f64 / round.tenures.len() as f64)];
    let fairness: [Field<'_>; 2] = [
        ("longest wait", "ns", &|round| round.longest_wait),
        ("changes of the holding process", "/s", &|round| {
            round.process_changes() as f64 / round.time.as_secs_f64()
        }),
    ];
    let measures_hand_over = scenario.tasks == 1;
    let measures_fairness = measures_hand_over && scenario.reacquire_delay == ReacquireDelay::None;
    let fields = hand_over.iter().filter(|_| measures_hand_over).chain(&requests);
    for (name, unit, field) in fields.chain(fairness.iter().filter(|_| measures_fairness)) {
        let (table, reference_name) = server.table();
        let row = row(table, format!("{}, {name}", scenario.title));
        let figure = row.measured(median_of(engine, field), unit);
        figure.against(reference_name, median_of(reference, field)).record();
    }
}

/// One of the competing processes.
pub async fn child(arguments: &[&str]) {
    let [client, url, tasks, reacquire_delay, handoffs] = arguments[..] else {
        panic!("usage: contention CLIENT URL TASKS DELAY HANDOFFS")
    };
    let client = Arc::new(LockClient::connect(client, url, handoffs.parse().unwrap()).await);
    let pause = reacquire_delay == format!("{:?}", ReacquireDelay::Short);
    println!("ready");
    let end: u64 = read_stdin_line().await.parse().unwrap();
    let mut workers = JoinSet::new();
    for _ in 0..tasks.parse().unwrap() {
        let client = Arc::clone(&client);
        workers.spawn(async move {
            let mut tenures = Vec::new();
            while now() < end {
                tenures.push(client.lock_and_unlock().await);
                if pause {
                    // The clock is random enough here.
                    tokio::time::sleep(Duration::from_micros(500 + now() % 1_000)).await;
                }
            }
            tenures
        });
    }
    let tenures = workers.join_all().await;
    for [requested, granted, released] in tenures.into_iter().flatten() {
        println!("{requested} {granted} {released}");
    }
    println!("done");
    // The exit of the process is not part of the measurement.
    read_stdin_line().await;
}

enum LockClient {
    Engine(
        DistributedLock,
        #[expect(dead_code, reason = "keeps the registry alive as long as its locks")] Registry,
    ),
    Redis(Mutex<redis_reference::RedisReference>),
    Postgres(Mutex<postgres_reference::PostgresReference>),
    /// Has no mutual exclusion.
    Unsynchronized,
}

impl LockClient {
    async fn connect(name: &str, url: &str, handoffs: u32) -> Self {
        let is_redis = url.starts_with("redis:");
        match name {
            "engine" => {
                let registry =
                    Registry::builder(open(url).await).handoff(handoffs).build().unwrap();
                Self::Engine(registry.obtain(KEY), registry)
            }
            "reference" if is_redis => {
                Self::Redis(Mutex::new(redis_reference::RedisReference::connect(url, KEY).await))
            }
            "reference" => {
                let reference = postgres_reference::PostgresReference::connect(url, KEY).await;
                Self::Postgres(Mutex::new(reference))
            }
            _ => Self::Unsynchronized,
        }
    }

    /// Locks and unlocks once. Returns the times of the request, the grant and the release.
    async fn lock_and_unlock(&self) -> [u64; 3] {
        let work = async || {
            let granted = now();
            tokio::time::sleep(WORK).await;
            [granted, now()]
        };
        let requested = now();
        let [granted, released] = match self {
            Self::Engine(lock, _) => {
                let guard = lock.lock().await.unwrap();
                let timestamps = work().await;
                guard.unlock().await.unwrap();
                timestamps
            }
            Self::Redis(reference) => {
                let mut reference = reference.lock().await;
                reference.lock().await;
                let timestamps = work().await;
                reference.unlock().await;
                timestamps
            }
            Self::Postgres(reference) => {
                let mut reference = reference.lock().await;
                reference.lock().await;
                let timestamps = work().await;
                reference.unlock().await;
                timestamps
            }
            Self::Unsynchronized => work().await,
        };
        [requested, granted, released]
    }
}
