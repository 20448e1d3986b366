//! Measures an operation next to a reference. Each result is printed as a ratio to the reference
//! and recorded.
//!
//! Absolute times depend more on the machine than on the program. A reference does the minimum that
//! the job needs, in the same run.

mod modes;
mod pairs;
mod results;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::Criterion;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use registry_core::{DistributedLock, LockOptions};

pub use modes::compare_modes;
pub use pairs::measure_pairs;
pub use results::{Figure, Row, is_full_run, record_server, row, write_results, write_results_of};

/// Runs `benches` with the command line's options, and records the results of each of `groups`. A
/// group is a pair: its name and the name of its reference.
pub fn run(groups: &[(&str, &str)], benches: impl FnOnce(&mut Criterion)) {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(4))
        .configure_from_args();
    benches(&mut criterion);
    criterion.final_summary();
    for (group, reference) in groups {
        record_group(group, reference);
    }
}

fn record_group(group: &str, reference: &str) {
    let folder = criterion_folder().join(group);
    let Some(reference_median) = median_ns(&folder.join("reference")) else { return };
    let Ok(entries) = fs::read_dir(&folder) else { return };
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    names.sort();
    for bench in names {
        let name = bench.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name != "reference"
            && name != "report"
            && let Some(median) = median_ns(&bench)
        {
            let row = row("in process", format!("{group}: {name}"));
            row.measured(median, "ns").against(reference, reference_median).record();
        }
    }
}

/// Returns the time from the release of a lock to its grant to another client. During `pause`, the
/// other client starts to wait for the lock.
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

/// Returns the median of these times in nanoseconds.
pub fn median_of(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_nanos() as f64
}

/// Pins this thread, and all threads that it starts, to one processor.
///
/// This is for work that passes between threads. On several processors, most of its time is the
/// wake-up of a sleeping thread, which varies by a factor of four with the kernel's placement.
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

/// The number of times that a pair is measured.
struct Rounds {
    min: usize,
    max: usize,
    /// After the minimum number of rounds, the measurement stops at this limit. A pair that waits
    /// for a disk takes a thousand times as long as others.
    time_limit: Duration,
}

impl Rounds {
    fn of_command_line() -> Self {
        if is_full_run() {
            Self { min: 30, max: 20_000, time_limit: Duration::from_secs(6) }
        } else {
            Self { min: 1, max: 20, time_limit: Duration::from_millis(250) }
        }
    }
}

/// Times `reference` and `measured` alternately, so that both run under the same conditions.
/// Returns the sorted times in nanoseconds.
async fn time_alternately<R, O>(
    reference: impl Fn() -> R,
    measured: impl Fn() -> O,
) -> [Vec<f64>; 2]
where
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
        times[0].push((reference_end - start).as_nanos() as f64);
        times[1].push(reference_end.elapsed().as_nanos() as f64);
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times
    })
}

/// Times `reference` and `measured` alternately, and records the medians and the p99.
pub async fn compare<R, O>(
    row: Row,
    reference_name: &str,
    reference: impl Fn() -> R,
    measured: impl Fn() -> O,
) where
    R: Future<Output = ()>,
    O: Future<Output = ()>,
{
    let [reference, measured] = time_alternately(reference, measured).await;
    let figure = row.measured(quantile(&measured, 0.5), "ns").p99(quantile(&measured, 0.99));
    figure.against(reference_name, quantile(&reference, 0.5)).record();
}

/// Like [`compare`], but in a task, as in a service: the wake-up of a future outside of a task
/// always crosses threads.
///
/// Each round runs twenty pairs in a row. The background work of one side then falls into its own
/// time and not into that of the other side. The figures are those of one pair.
pub async fn compare_in_task<R, O>(
    row: Row,
    reference_name: &'static str,
    reference: impl Fn(usize) -> R + Send + 'static,
    measured: impl Fn(usize) -> O + Send + 'static,
) where
    R: Future<Output = ()> + Send + 'static,
    O: Future<Output = ()> + Send + 'static,
{
    let task = tokio::spawn(async move {
        time_alternately(move || reference(PAIRS), move || measured(PAIRS)).await
    });
    let times = task.await.expect("a bench failed");
    let [reference, measured] = times.map(|times| quantile(&times, 0.5) / PAIRS as f64);
    row.measured(measured, "ns").against(reference_name, reference).record();
}

/// The number of pairs in one round of a task.
const PAIRS: usize = 20;

/// Returns the `q` quantile of sorted values.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * q).round() as usize]
}

fn criterion_folder() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    target.join("criterion")
}

fn median_ns(bench: &Path) -> Option<f64> {
    let estimates = fs::read(bench.join("new/estimates.json")).ok()?;
    let estimates: serde_json::Value = serde_json::from_slice(&estimates).ok()?;
    estimates.pointer("/median/point_estimate")?.as_f64()
}
