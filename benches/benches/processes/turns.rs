//! Processes that compete for one key. Each holder works for 2 ms.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{DistributedLock, LockRegistry, Registry};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::measure::{LIMIT, child as start_child, median, quantile};
use crate::store::{Store, open};
use crate::{bare_postgres, bare_redis, now, order};

const KEY: &str = "orders/42";
const WORK: Duration = Duration::from_millis(2);

struct Setting {
    title: &'static str,
    processes: usize,
    /// The number of tasks of each process.
    tasks: usize,
    /// How soon a process asks again after its release.
    again: Again,
    /// The maximum number of consecutive hand-overs inside one process.
    handoffs: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    AtOnce,
    /// After 0.5 to 1.5 ms, which is before the next holder finishes its 2 ms of work.
    Soon,
}

const SETTINGS: [Setting; 5] = [
    Setting { title: "2 processes", processes: 2, tasks: 1, again: Again::Soon, handoffs: 32 },
    Setting { title: "8 processes", processes: 8, tasks: 1, again: Again::Soon, handoffs: 32 },
    Setting {
        title: "8 processes that ask again at once",
        processes: 8,
        tasks: 1,
        again: Again::AtOnce,
        handoffs: 32,
    },
    Setting {
        title: "200 waiters in 4 processes",
        processes: 4,
        tasks: 50,
        again: Again::AtOnce,
        handoffs: 32,
    },
    Setting {
        title: "200 waiters in 4 processes, nothing passed on within one",
        processes: 4,
        tasks: 50,
        again: Again::AtOnce,
        handoffs: 0,
    },
];

/// One tenure of one process, with three timestamps.
struct Turn {
    process: usize,
    asked: u64,
    granted: u64,
    released: u64,
}

struct Round {
    /// In the order of the grants.
    turns: Vec<Turn>,
    time: Duration,
    requests: u64,
    /// Over all requests, in milliseconds.
    longest_wait: f64,
}

pub async fn bench(store: &Store, in_earnest: bool) {
    let (rounds, time) = if in_earnest { (5, 4_000) } else { (1, 100) };
    let time = Duration::from_millis(time);
    // Tests the check itself: a contestant without mutual exclusion must be detected.
    let broken = round(store, "broken", &SETTINGS[0], Duration::from_millis(100)).await;
    assert!(broken.overlaps() > 0, "turns that overlap were not noticed");
    for setting in &SETTINGS {
        let polls = matches!(store, Store::Postgres(_)) && setting.again == Again::Soon;
        let contestants = if polls { &["bare", "ours", "polls"][..] } else { &["bare", "ours"] };
        let mut results = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (contestant, results) in contestants.iter().zip(&mut results) {
                let round = round(store, contestant, setting, time).await;
                assert_eq!(round.overlaps(), 0, "{contestant} let two in");
                results.push(round);
            }
        }
        println!("\n{}: {}, holder works 2 ms", store.name(), setting.title);
        let reference = print(store, "reference", &results[0], None);
        print(store, "ours", &results[1], Some(reference));
        if polls {
            print(store, "who polls each 100 ms", &results[2], Some(reference));
        }
    }
}

/// Lets the processes of `setting` compete for the key for `time`.
async fn round(store: &Store, contestant: &str, setting: &Setting, time: Duration) -> Round {
    store.clear().await;
    let (url, tasks, handoffs) =
        (store.url(), setting.tasks.to_string(), setting.handoffs.to_string());
    let again = format!("{:?}", setting.again);
    let arguments = ["turns", contestant, &url, &tasks, &again, &handoffs];
    let mut children: Vec<_> = (0..setting.processes).map(|_| start_child(&arguments)).collect();
    for child in &mut children {
        child.expect_line(|line| line == "ready", LIMIT).await.unwrap();
    }
    store.count_requests().await;
    // All processes stop at the same time, so a late start does not shift the end.
    let end = now() + time.as_nanos() as u64;
    for child in &mut children {
        child.write_line(&end.to_string()).unwrap();
    }
    tokio::time::sleep(time).await;
    let requests = store.requests(contestant).await;
    for child in &mut children {
        child.expect_line(|line| line == "done", LIMIT).await.unwrap();
    }
    let mut turns: Vec<Turn> = Vec::new();
    for (process, child) in children.iter().enumerate() {
        for line in child.lines() {
            let moments: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
            if let [asked, granted, released] = moments[..] {
                turns.push(Turn { process, asked, granted, released });
            }
        }
    }
    turns.sort_by_key(|turn| turn.granted);
    let longest_wait = quantile(turns.iter().map(|turn| ms(turn.granted - turn.asked)), 1.0);
    // After `end` fewer and fewer processes compete.
    turns.retain(|turn| turn.granted < end);
    Round { turns, time, requests, longest_wait }
}

impl Round {
    /// The number of grants before the previous holder has released.
    fn overlaps(&self) -> usize {
        self.pairs().filter(|[before, after]| after.granted < before.released).count()
    }

    /// The time from each release to the next grant in another process that already waited, in
    /// milliseconds.
    fn hand_overs(&self) -> Vec<f64> {
        let between = self.pairs().filter(|[before, after]| {
            before.process != after.process && after.asked < before.released
        });
        between.map(|[before, after]| ms(after.granted.saturating_sub(before.released))).collect()
    }

    fn changes(&self) -> usize {
        self.pairs().filter(|[before, after]| before.process != after.process).count()
    }

    fn pairs(&self) -> impl Iterator<Item = [&Turn; 2]> {
        self.turns.windows(2).map(|pair| [&pair[0], &pair[1]])
    }
}

fn ms(nanos: u64) -> f64 {
    nanos as f64 / 1e6
}

/// Prints the medians over the rounds and their ratios to the reference. Returns the median and the
/// p99 of the hand-over.
fn print(store: &Store, name: &str, rounds: &[Round], reference: Option<[f64; 2]>) -> [f64; 2] {
    let over = |figure: &dyn Fn(&Round) -> f64| median(rounds.iter().map(figure));
    let middle = over(&|round| quantile(round.hand_overs(), 0.5));
    let p99 = over(&|round| quantile(round.hand_overs(), 0.99));
    let turns = |round: &Round| round.turns.len() as f64;
    println!(
        "  {name:<9} release to grant elsewhere: median {middle:.3} ms, p99 {p99:.3} ms; {:.2} {} a grant, {:.2} a change of \
         process; {:.0} grants/s, {:.0} changes/s; longest wait {:.0} ms (worst round {:.0})",
        over(&|round| round.requests as f64 / turns(round)),
        store.requests_name(),
        over(&|round| round.requests as f64 / round.changes().max(1) as f64),
        over(&|round| turns(round) / round.time.as_secs_f64()),
        over(&|round| round.changes() as f64 / round.time.as_secs_f64()),
        over(&|round| round.longest_wait),
        quantile(rounds.iter().map(|round| round.longest_wait), 1.0),
    );
    if let Some([reference_middle, reference_p99]) = reference {
        println!(
            "  {:<9} {:.2} x its median, {:.2} x its p99",
            "",
            middle / reference_middle,
            p99 / reference_p99
        );
    }
    [middle, p99]
}

/// One of the competing processes.
pub async fn child(arguments: &[&str]) {
    let [contestant, url, tasks, again, handoffs] = arguments[..] else {
        panic!("turns CONTESTANT URL TASKS AGAIN HANDOFFS")
    };
    let contestant =
        Arc::new(Contestant::connect(contestant, url, handoffs.parse().unwrap()).await);
    let pause = again == format!("{:?}", Again::Soon);
    println!("ready");
    let end: u64 = order().await.parse().unwrap();
    let mut working = JoinSet::new();
    for _ in 0..tasks.parse().unwrap() {
        let contestant = Arc::clone(&contestant);
        working.spawn(async move {
            let mut turns = Vec::new();
            while now() < end {
                turns.push(contestant.turn().await);
                if pause {
                    // The clock is random enough here.
                    tokio::time::sleep(Duration::from_micros(500 + now() % 1_000)).await;
                }
            }
            turns
        });
    }
    let turns = working.join_all().await;
    for [asked, granted, released] in turns.into_iter().flatten() {
        println!("{asked} {granted} {released}");
    }
    println!("done");
    // The exit of the process is not part of the measurement.
    order().await;
}

enum Contestant {
    Ours(DistributedLock, #[expect(dead_code, reason = "it lives as long as its locks")] Registry),
    BareRedis(Mutex<bare_redis::Bare>),
    BarePostgres(Mutex<bare_postgres::Bare>),
    /// Has no mutual exclusion.
    Broken,
}

impl Contestant {
    async fn connect(name: &str, url: &str, handoffs: u32) -> Self {
        let is_redis = url.starts_with("redis:");
        match name {
            "ours" => {
                let registry =
                    Registry::builder(open(url).await).handoff(handoffs).build().unwrap();
                Self::Ours(registry.obtain(KEY), registry)
            }
            "bare" if is_redis => {
                Self::BareRedis(Mutex::new(bare_redis::Bare::connect(url, KEY).await))
            }
            "bare" | "polls" => {
                let listens = name == "bare";
                let bare = bare_postgres::Bare::connect(url, KEY, listens).await;
                Self::BarePostgres(Mutex::new(bare))
            }
            _ => Self::Broken,
        }
    }

    /// Locks and unlocks once. Returns the times of the request, the grant and the release.
    async fn turn(&self) -> [u64; 3] {
        let work = async || {
            let granted = now();
            tokio::time::sleep(WORK).await;
            [granted, now()]
        };
        let asked = now();
        let [granted, released] = match self {
            Self::Ours(lock, _) => {
                let guard = lock.lock().await.unwrap();
                let moments = work().await;
                guard.unlock().await.unwrap();
                moments
            }
            Self::BareRedis(bare) => {
                let mut bare = bare.lock().await;
                bare.lock().await;
                let moments = work().await;
                bare.unlock().await;
                moments
            }
            Self::BarePostgres(bare) => {
                let mut bare = bare.lock().await;
                bare.lock().await;
                let moments = work().await;
                bare.unlock().await;
                moments
            }
            Self::Broken => work().await,
        };
        [asked, granted, released]
    }
}
