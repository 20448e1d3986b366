//! `lockreg bench`: measures lock and unlock pairs against a store, and for comparison one round
//! trip to it.

use std::time::{Duration, Instant};

use lock_registry::{ClaimId, LockError, LockRegistry, Registry};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::args::{self, Global};
use crate::exit::Failure;
use crate::say::{Say, table};
use crate::store::Store;
use crate::take::close;

/// `lockreg bench`.
pub(crate) async fn bench(global: &Global, bench: &args::Bench, say: Say) -> Result<u8, Failure> {
    let registry = Store::choose(global)?.open(say).await?;
    let store = registry.capabilities().store;
    // A random prefix, so that the keys differ from those of other users and of other benchmarks.
    let prefix = format!("lockreg-bench/{}", ClaimId::random());
    let trip = if registry.capabilities().inspect {
        Figures::of(round_trips(&registry, &prefix).await?)
    } else {
        None
    };
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..bench.tasks {
        tasks.spawn(pairs(registry.clone(), format!("{prefix}/{task}"), began + bench.time));
    }
    let mut spans = Vec::new();
    while let Some(done) = tasks.join_next().await {
        spans.extend(done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?);
    }
    let took = began.elapsed();
    close(&registry).await;
    let per_second = spans.len() as f64 / took.as_secs_f64();
    let Some(pair) = Figures::of(spans) else {
        return Err(Failure::usage("no task has measured anything"));
    };
    let report = json!({
        "store": store,
        "tasks": bench.tasks,
        "pairs": pair.count,
        "pairs_per_second": per_second.round(),
        "pair": pair.view(),
        "round_trip": trip.as_ref().map(Figures::view),
    });
    say.result(&report, || {
        let row = |name: &str, figures: &Figures| {
            [name.to_owned(), micros(figures.median), micros(figures.p99), micros(figures.max)]
        };
        let rows = [
            Some(row("lock and unlock", &pair)),
            trip.as_ref().map(|trip| row("one round trip", trip)),
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

/// Measures inspections of a key that is not locked, which need one round trip.
async fn round_trips(registry: &Registry, prefix: &str) -> Result<Vec<Duration>, LockError> {
    let lock = registry.obtain(prefix);
    let mut spans = Vec::with_capacity(TRIPS);
    for _ in 0..TRIPS {
        let asked = Instant::now();
        lock.holder().await?;
        spans.push(asked.elapsed());
    }
    Ok(spans)
}

async fn pairs(
    registry: Registry,
    key: String,
    until: Instant,
) -> Result<Vec<Duration>, LockError> {
    let lock = registry.obtain(&key);
    let mut spans = Vec::new();
    // Checked at the end of the loop, so that each task measures at least one pair.
    loop {
        let began = Instant::now();
        lock.lock().await?.unlock().await?;
        spans.push(began.elapsed());
        if Instant::now() >= until || spans.len() >= PAIRS_MAX {
            return Ok(spans);
        }
    }
}

/// Statistics of many time spans.
#[derive(Debug)]
struct Figures {
    count: usize,
    median: Duration,
    p99: Duration,
    max: Duration,
}

impl Figures {
    fn of(mut spans: Vec<Duration>) -> Option<Self> {
        spans.sort_unstable();
        let at =
            |percent: usize| spans.get((spans.len().saturating_sub(1)) * percent / 100).copied();
        Some(Self { count: spans.len(), median: at(50)?, p99: at(99)?, max: at(100)? })
    }

    fn view(&self) -> Value {
        let micros = |span: Duration| span.as_nanos() as f64 / 1_000.0;
        json!({ "median_us": micros(self.median), "p99_us": micros(self.p99), "max_us": micros(self.max) })
    }
}

fn micros(span: Duration) -> String {
    format!("{:.1} µs", span.as_nanos() as f64 / 1_000.0)
}

/// The number of measured round trips.
const TRIPS: usize = 200;
/// The maximum number of pairs per task, which limits the memory of a task.
const PAIRS_MAX: usize = 5_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_nothing_are_none_and_of_many_are_in_order() {
        assert!(Figures::of(Vec::new()).is_none());
        let figures = Figures::of((1..=101).rev().map(Duration::from_micros).collect()).unwrap();
        assert_eq!((figures.median, figures.p99, figures.max).0, Duration::from_micros(51));
        assert_eq!(figures.p99, Duration::from_micros(100));
        assert_eq!(figures.max, Duration::from_micros(101));
    }
}
