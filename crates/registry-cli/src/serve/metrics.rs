//! The metrics of `lockreg serve` in the text format of Prometheus.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use lock_registry::Key;
use lock_registry::modes::ClaimMode;
use lock_registry::observe::MetricsObserver;
use metrics::{counter, describe_counter, describe_gauge, gauge, with_local_recorder};
use metrics_exporter_prometheus::PrometheusBuilder;

use super::monitor::Published;

/// The values of one name and mode.
#[derive(Debug, Default)]
struct Counts {
    number: u32,
    /// The longest time for which a claim has been held or has waited.
    longest: Duration,
}

/// Returns the metrics of `published`. Uses a new recorder for each call, because a recorder would
/// keep the series of names that are no longer locked.
pub(crate) fn format(published: &Published, observer: &MetricsObserver) -> Bytes {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    with_local_recorder(&recorder, || {
        describe_gauge!("lockreg_holders", "holders of locks in the store");
        describe_gauge!(
            "lockreg_longest_hold_seconds",
            "age of the oldest grant that is still held"
        );
        describe_gauge!("lockreg_waiters", "claims that wait in the store");
        describe_gauge!(
            "lockreg_longest_wait_seconds",
            "longest time for which a claim has waited"
        );
        describe_gauge!(
            "lockreg_deadlocks",
            "groups of clients that wait for each other in a cycle"
        );
        describe_gauge!(
            "lockreg_snapshot_timestamp_seconds",
            "time of the last snapshot of the store that succeeded, in seconds since 1970"
        );
        describe_gauge!("lockreg_snapshot_seconds", "duration of the last snapshot that succeeded");
        describe_counter!("lockreg_snapshot_failures_total", "failed attempts to take a snapshot");

        let holders = published.snapshot.holders.iter();
        record(
            "lockreg_holders",
            "lockreg_longest_hold_seconds",
            observer,
            holders.map(|holder| (&holder.key, holder.mode, holder.held_for)),
        );
        let waiters = published.snapshot.waiters.iter();
        record(
            "lockreg_waiters",
            "lockreg_longest_wait_seconds",
            observer,
            waiters.map(|waiter| (&waiter.key, waiter.mode, waiter.waited_for)),
        );
        let deadlocks = u32::try_from(published.graph.deadlocks.len()).unwrap_or(u32::MAX);
        gauge!("lockreg_deadlocks").set(deadlocks);
        let taken_at = Duration::from_millis(published.taken_at_ms);
        gauge!("lockreg_snapshot_timestamp_seconds").set(taken_at.as_secs_f64());
        gauge!("lockreg_snapshot_seconds").set(published.took.as_secs_f64());
        counter!("lockreg_snapshot_failures_total").absolute(published.failures);
    });
    handle.render().into()
}

/// Records the number of `claims` and the longest of their times, for each name and mode.
fn record<'a>(
    number_gauge: &'static str,
    longest_gauge: &'static str,
    observer: &MetricsObserver,
    claims: impl Iterator<Item = (&'a Key, ClaimMode, Option<Duration>)>,
) {
    let mut counts: BTreeMap<(Arc<str>, &'static str), Counts> = BTreeMap::new();
    for (key, mode, time) in claims {
        let counts = counts.entry((observer.name_of(key.as_str()), mode.name())).or_default();
        counts.number += 1;
        counts.longest = counts.longest.max(time.unwrap_or_default());
    }
    for ((name, mode), counts) in counts {
        let labels = [("name", name.to_string()), ("mode", mode.to_owned())];
        gauge!(number_gauge, &labels).set(counts.number);
        gauge!(longest_gauge, &labels).set(counts.longest.as_secs_f64());
    }
}
