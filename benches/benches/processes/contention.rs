//! Processes that compete for one key. Each holder works for 2 ms.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{DistributedLock, Registry};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::measurement::{LIMIT, child as start_child, median, quantile};
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
        title: "8 processes that request it again at once",
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
        title: "200 waiters in 4 processes, no hand-over within one",
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
    /// Over all requests, in milliseconds.
    longest_wait: f64,
}

pub async fn bench(server: &LockServer, is_full_run: bool) {
    let (rounds, time) = if is_full_run { (5, 4_000) } else { (1, 100) };
    let time = Duration::from_millis(time);
    // Tests the check itself: it must detect a client without mutual exclusion.
    let unsynchronized =
        run_round(server, "unsynchronized", &SCENARIOS[0], Duration::from_millis(100)).await;
    assert!(unsynchronized.overlaps() > 0, "the check did not detect overlapping tenures");
    for scenario in &SCENARIOS {
        let polls = matches!(server, LockServer::Postgres(_))
            && scenario.reacquire_delay == ReacquireDelay::Short;
        let clients =
            if polls { &["reference", "engine", "polling"][..] } else { &["reference", "engine"] };
        let mut results = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (client, results) in clients.iter().zip(&mut results) {
                let round = run_round(server, client, scenario, time).await;
                assert_eq!(
                    round.overlaps(),
                    0,
                    "{client} granted the lock to two processes at once"
                );
                results.push(round);
            }
        }
        println!("\n{}: {}, holder works 2 ms", server.name(), scenario.title);
        let reference = print(server, "reference", &results[0], None);
        print(server, "engine", &results[1], Some(reference));
        if polls {
            print(server, "polls every 100 ms", &results[2], Some(reference));
        }
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
    server.count_requests().await;
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
        quantile(tenures.iter().map(|tenure| ms(tenure.granted - tenure.requested)), 1.0);
    // After `end` fewer and fewer processes compete.
    tenures.retain(|tenure| tenure.granted < end);
    RoundResult { tenures, time, requests, longest_wait }
}

impl RoundResult {
    /// The number of grants before the previous holder has released.
    fn overlaps(&self) -> usize {
        self.pairs().filter(|[before, after]| after.granted < before.released).count()
    }

    /// The time from each release to the next grant in another process that already waited, in
    /// milliseconds.
    fn hand_overs(&self) -> Vec<f64> {
        let between = self.pairs().filter(|[before, after]| {
            before.process != after.process && after.requested < before.released
        });
        between.map(|[before, after]| ms(after.granted.saturating_sub(before.released))).collect()
    }

    fn process_changes(&self) -> usize {
        self.pairs().filter(|[before, after]| before.process != after.process).count()
    }

    fn pairs(&self) -> impl Iterator<Item = [&Tenure; 2]> {
        self.tenures.windows(2).map(|pair| [&pair[0], &pair[1]])
    }
}

fn ms(nanos: u64) -> f64 {
    nanos as f64 / 1e6
}

/// Prints the medians over the rounds and their ratios to the reference. Returns the median and the
/// p99 of the hand-over.
fn print(
    server: &LockServer,
    name: &str,
    rounds: &[RoundResult],
    reference: Option<[f64; 2]>,
) -> [f64; 2] {
    let median_of = |field: &dyn Fn(&RoundResult) -> f64| median(rounds.iter().map(field));
    let median_ms = median_of(&|round| quantile(round.hand_overs(), 0.5));
    let p99 = median_of(&|round| quantile(round.hand_overs(), 0.99));
    let tenures = |round: &RoundResult| round.tenures.len() as f64;
    println!(
        "  {name:<9} release to grant elsewhere: median {median_ms:.3} ms, p99 {p99:.3} ms; {:.2} {} a grant, {:.2} a change of \
         process; {:.0} grants/s, {:.0} changes/s; longest wait {:.0} ms (worst round {:.0})",
        median_of(&|round| round.requests as f64 / tenures(round)),
        server.requests_name(),
        median_of(&|round| round.requests as f64 / round.process_changes().max(1) as f64),
        median_of(&|round| tenures(round) / round.time.as_secs_f64()),
        median_of(&|round| round.process_changes() as f64 / round.time.as_secs_f64()),
        median_of(&|round| round.longest_wait),
        quantile(rounds.iter().map(|round| round.longest_wait), 1.0),
    );
    if let Some([reference_median, reference_p99]) = reference {
        println!(
            "  {:<9} {:.2} x its median, {:.2} x its p99",
            "",
            median_ms / reference_median,
            p99 / reference_p99
        );
    }
    [median_ms, p99]
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
            "reference" | "polling" => {
                let listens = name == "reference";
                let reference =
                    postgres_reference::PostgresReference::connect(url, KEY, listens).await;
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
