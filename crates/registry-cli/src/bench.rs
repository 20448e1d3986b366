//! `lockreg bench`: measures lock and unlock pairs against a store. For comparison, it also
//! measures the inspection of a free key.

use std::time::{Duration, Instant};

use lock_registry::{LockError, Registry, backend::ClaimId};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::acquire::close;
use crate::args::{self, GlobalArgs};
use crate::exit::CliError;
use crate::output::{Output, table};
use crate::store::StoreConfig;

/// `lockreg bench`.
pub(crate) async fn bench(
    global: &GlobalArgs,
    bench: &args::BenchArgs,
    output: Output,
) -> Result<u8, CliError> {
    let registry = StoreConfig::choose(global)?.open(output).await?;
    let store = registry.capabilities().store;
    // The random prefix separates the keys from the keys of other users and other benchmarks.
    let prefix = format!("lockreg-bench/{}", ClaimId::random());
    let round_trip = if registry.capabilities().inspect {
        LatencyStats::of(measure_round_trips(&registry, &prefix).await?)
    } else {
        None
    };
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..bench.tasks {
        tasks.spawn(measure_pairs(
            registry.clone(),
            format!("{prefix}/{task}"),
            started + bench.time,
        ));
    }
    let mut durations = Vec::new();
    while let Some(done) = tasks.join_next().await {
        durations
            .extend(done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?);
    }
    let elapsed = started.elapsed();
    close(&registry).await;
    let per_second = durations.len() as f64 / elapsed.as_secs_f64();
    let pair = LatencyStats::of(durations).expect("each task measures at least one pair");
    let report = json!({
        "store": store,
        "tasks": bench.tasks,
        "pairs": pair.count,
        "pairs_per_second": per_second.round(),
        "pair": pair.view(),
        "round_trip": round_trip.as_ref().map(LatencyStats::view),
    });
    output.result(&report, || {
        let row = |name: &str, stats: &LatencyStats| {
            [
                name.to_owned(),
                format_micros(stats.median),
                format_micros(stats.p99),
                format_micros(stats.max),
            ]
        };
        let rows = [
            Some(row("lock and unlock", &pair)),
            round_trip.as_ref().map(|round_trip| row("inspect a free key", round_trip)),
        ];
        format!(
            "{store}, {} task(s): {} pairs, {per_second:.0} per second\n\n{}",
            bench.tasks,
            pair.count,
            table(["", "MEDIAN", "99 %", "MAX"], rows.into_iter().flatten())
        )
    })?;
    Ok(0)
}

/// Measures inspections of a key that is not locked. In most stores, an inspection is one request.
/// In PostgreSQL, MariaDB and MySQL, it is several.
async fn measure_round_trips(
    registry: &Registry,
    prefix: &str,
) -> Result<Vec<Duration>, LockError> {
    let lock = registry.obtain(prefix);
    let mut durations = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let sent_at = Instant::now();
        lock.holders().await?;
        durations.push(sent_at.elapsed());
    }
    Ok(durations)
}

/// Measures lock and unlock pairs until `deadline`.
async fn measure_pairs(
    registry: Registry,
    key: String,
    deadline: Instant,
) -> Result<Vec<Duration>, LockError> {
    let lock = registry.obtain(&key);
    let mut durations = Vec::new();
    // The loop checks the time at its end, so that each task measures at least one pair.
    loop {
        let started = Instant::now();
        lock.lock().await?.unlock().await?;
        durations.push(started.elapsed());
        if Instant::now() >= deadline || durations.len() >= PAIRS_MAX {
            return Ok(durations);
        }
    }
}

/// Statistics of many durations.
#[derive(Debug)]
struct LatencyStats {
    count: usize,
    median: Duration,
    p99: Duration,
    max: Duration,
}

impl LatencyStats {
    fn of(mut durations: Vec<Duration>) -> Option<Self> {
        durations.sort_unstable();
        let percentile = |percent: usize| {
            durations.get((durations.len().saturating_sub(1)) * percent / 100).copied()
        };
        Some(Self {
            count: durations.len(),
            median: percentile(50)?,
            p99: percentile(99)?,
            max: percentile(100)?,
        })
    }

    fn view(&self) -> Value {
        let micros = |span: Duration| span.as_nanos() as f64 / 1_000.0;
        json!({ "median_us": micros(self.median), "p99_us": micros(self.p99), "max_us": micros(self.max) })
    }
}

fn format_micros(span: Duration) -> String {
    format!("{:.1} µs", span.as_nanos() as f64 / 1_000.0)
}

/// The number of measured round trips.
const ROUND_TRIPS: usize = 200;
/// The maximum number of pairs per task, which limits the memory of a task.
const PAIRS_MAX: usize = 5_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_stats_are_none_without_values_and_percentiles_otherwise() {
        assert!(LatencyStats::of(Vec::new()).is_none());
        let stats = LatencyStats::of((1..=101).rev().map(Duration::from_micros).collect()).unwrap();
        assert_eq!((stats.median, stats.p99, stats.max).0, Duration::from_micros(51));
        assert_eq!(stats.p99, Duration::from_micros(100));
        assert_eq!(stats.max, Duration::from_micros(101));
    }
}
