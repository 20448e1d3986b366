//! Runs benchmark groups and prints each result as a ratio to the reference of its group.
//!
//! Absolute times depend more on the machine than on the program. In each group the benchmark named
//! `reference` does the minimum that the job needs. The other benchmarks are reported as ratios to
//! it, from the same run.

mod modes;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::Criterion;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use registry_core::{DistributedLock, LockOptions};

pub use modes::compare_modes;

/// Runs `benches` with the command line's options, and prints the ratios of what was measured.
pub fn run(groups: &[&str], benches: impl FnOnce(&mut Criterion)) {
    let mut criterion = Criterion::default().configure_from_args();
    benches(&mut criterion);
    criterion.final_summary();
    for group in groups {
        print_ratios(group);
    }
}

fn print_ratios(group: &str) {
    let folder = results_folder().join(group);
    let Some(reference) = median_ns(&folder.join("reference")) else { return };
    println!("\n{group}: reference {reference:.0} ns");
    let Ok(entries) = fs::read_dir(&folder) else { return };
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    names.sort();
    for bench in names {
        let name = bench.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name != "reference"
            && name != "report"
            && let Some(median) = median_ns(&bench)
        {
            print_ratio(group, name, median, reference);
        }
    }
}

/// Returns the time from the release of a lock to its grant to another client. `pause` is long
/// enough for that client to wait for the lock.
pub async fn hand_over_time(
    [releasing, acquiring]: [DistributedLock; 2],
    options: &LockOptions,
    pause: Duration,
) -> Duration {
    let guard = releasing.lock_with(options.clone()).await.unwrap();
    let options = options.clone();
    let waiting = tokio::spawn(async move {
        let guard = acquiring.lock_with(options).await.unwrap();
        (Instant::now(), guard)
    });
    tokio::time::sleep(pause).await;
    let started = Instant::now();
    guard.unlock().await.unwrap();
    let (ended, guard) = waiting.await.unwrap();
    guard.unlock().await.unwrap();
    ended - started
}

/// Returns the middle one of these times.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Pins this thread, and all threads that it starts, to one processor.
///
/// For work that passes between threads: on several processors, most of its time is the wake-up of
/// a sleeping thread. That time varies by a factor of four with the kernel's placement.
pub fn pin_to_one_processor() {
    let this = Pid::from_raw(0);
    let first = sched_getaffinity(this).ok().and_then(|allowed| {
        (0..CpuSet::count()).find(|processor| allowed.is_set(*processor).unwrap_or(false))
    });
    let mut one = CpuSet::new();
    if let Some(first) = first
        && one.set(first).and_then(|()| sched_setaffinity(this, &one)).is_ok()
    {
        return;
    }
    eprintln!("pinning to one processor failed; the results will vary between runs");
}

/// How often a pair is measured.
struct Rounds {
    min: usize,
    max: usize,
    /// A pair that waits for a disk takes a thousand times as long. Above the minimum, it needs
    /// only as many rounds as fit into this limit.
    time_limit: Duration,
}

impl Rounds {
    fn of_command_line() -> Self {
        if std::env::args().any(|argument| argument == "--bench") {
            Self { min: 100, max: 20_000, time_limit: Duration::from_secs(15) }
        } else {
            // `cargo test` only verifies that the benchmark works, not how fast it is.
            Self { min: 1, max: 20, time_limit: Duration::from_millis(250) }
        }
    }
}

/// Times `reference` and `measured` alternately, so that both run under the same conditions, and
/// prints the ratio of their medians.
pub async fn compare<R, O>(
    group: &str,
    reference: impl Fn() -> R,
    name: &str,
    measured: impl Fn() -> O,
) where
    R: Future<Output = ()>,
    O: Future<Output = ()>,
{
    let rounds = Rounds::of_command_line();
    let mut times = [Vec::with_capacity(rounds.max), Vec::with_capacity(rounds.max)];
    let started = Instant::now();
    for round in 0..rounds.max {
        if round >= rounds.min && started.elapsed() > rounds.time_limit {
            break;
        }
        let start = Instant::now();
        reference().await;
        let reference_end = Instant::now();
        measured().await;
        times[0].push(reference_end - start);
        times[1].push(reference_end.elapsed());
    }
    let [reference, measured] = times.map(|mut times| {
        times.sort();
        times[times.len() / 2].as_secs_f64() * 1e9
    });
    println!("\n{group}: reference {reference:.0} ns");
    print_ratio(group, name, measured, reference);
}

/// Runs [`compare`] in a task, as servers do their work. A future outside of a task is woken in
/// another thread each time.
///
/// Each round runs twenty pairs in a row, so that the background work of one side falls into its
/// own round and not into the other's.
pub async fn compare_in_task<R, O>(
    group: &'static str,
    reference: impl Fn(usize) -> R + Send + 'static,
    name: &'static str,
    measured: impl Fn(usize) -> O + Send + 'static,
) where
    R: Future<Output = ()> + Send + 'static,
    O: Future<Output = ()> + Send + 'static,
{
    let task = tokio::spawn(async move {
        compare(group, move || reference(PAIRS), name, move || measured(PAIRS)).await;
    });
    task.await.expect("a bench failed");
}

/// The number of pairs in one round of a task.
const PAIRS: usize = 20;

fn print_ratio(group: &str, name: &str, median: f64, reference: f64) {
    let (ratio, speed) = (median / reference, reference / median);
    println!("{group}/{name}: {median:.0} ns, {ratio:.2} x its time, {speed:.2} x its speed");
}

fn results_folder() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    target.join("criterion")
}

fn median_ns(bench: &Path) -> Option<f64> {
    let estimates = fs::read(bench.join("new/estimates.json")).ok()?;
    let estimates: serde_json::Value = serde_json::from_slice(&estimates).ok()?;
    estimates.pointer("/median/point_estimate")?.as_f64()
}
