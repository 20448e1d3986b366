//! The metrics of `lockreg serve` in the text format of Prometheus.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use lock_registry::observe::MetricsObserver;
use metrics::{counter, describe_counter, describe_gauge, gauge, with_local_recorder};
use metrics_exporter_prometheus::PrometheusBuilder;

use super::monitor::Frame;

/// The values of one name and mode.
#[derive(Debug, Default)]
struct Counts {
    number: u32,
    /// The longest time for which a claim has been held or has waited.
    longest: Duration,
}

/// Returns the metrics of `frame`. Uses a new recorder for each frame, because a recorder would
/// keep the series of names that are no longer locked.
pub(crate) fn format(frame: &Frame, names: &MetricsObserver) -> Bytes {
    let recorder = PrometheusBuilder::new().build_recorder();
    let text = recorder.handle();
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
            "groups of labels that wait for each other in a cycle"
        );
        describe_gauge!(
            "lockreg_snapshot_timestamp_seconds",
            "time of the last snapshot of the store that succeeded, in seconds since 1970"
        );
        describe_gauge!("lockreg_snapshot_seconds", "duration of the last snapshot that succeeded");
        describe_counter!("lockreg_snapshot_failures_total", "failed attempts to take a snapshot");

        let mut holders: BTreeMap<(Arc<str>, &'static str), Counts> = BTreeMap::new();
        for holder in &frame.snapshot.holders {
            let name = names.name_of(holder.key.as_str());
            holders.entry((name, holder.mode.name())).or_default().add(holder.held_for);
        }
        for ((name, mode), counts) in holders {
            let labels = [("name", name.to_string()), ("mode", mode.to_owned())];
            gauge!("lockreg_holders", &labels).set(counts.number);
            gauge!("lockreg_longest_hold_seconds", &labels).set(counts.longest.as_secs_f64());
        }
        let mut waiters: BTreeMap<(Arc<str>, &'static str), Counts> = BTreeMap::new();
        for waiter in &frame.snapshot.waiters {
            let name = names.name_of(waiter.key.as_str());
            waiters.entry((name, waiter.mode.name())).or_default().add(waiter.waited_for);
        }
        for ((name, mode), counts) in waiters {
            let labels = [("name", name.to_string()), ("mode", mode.to_owned())];
            gauge!("lockreg_waiters", &labels).set(counts.number);
            gauge!("lockreg_longest_wait_seconds", &labels).set(counts.longest.as_secs_f64());
        }
        let deadlocks = u32::try_from(frame.graph.deadlocks.len()).unwrap_or(u32::MAX);
        gauge!("lockreg_deadlocks").set(deadlocks);
        let taken_at = Duration::from_millis(frame.taken_at_ms);
        gauge!("lockreg_snapshot_timestamp_seconds").set(taken_at.as_secs_f64());
        gauge!("lockreg_snapshot_seconds").set(frame.took.as_secs_f64());
        counter!("lockreg_snapshot_failures_total").absolute(frame.failures);
    });
    text.render().into()
}

impl Counts {
    fn add(&mut self, time: Option<Duration>) {
        self.number += 1;
        self.longest = self.longest.max(time.unwrap_or_default());
    }
}
