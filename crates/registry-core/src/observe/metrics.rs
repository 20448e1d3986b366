//! Exports lock events as metrics.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use metrics::{Label, SharedString, Unit};

use super::names::{KeyNames, SeenNames};
use crate::error::LostReason;
use crate::event::{AcquireEnd, LockEvent, Observer, TickEnd};
use crate::mode::ClaimMode;

/// Records lock events with the `metrics` facade. [`describe_metrics`] returns the names, kinds and
/// labels of the metrics.
///
/// Every metric has the labels `store` and `name`. Keys are not labels, because their number has no
/// limit: [`KeyNames`] derives `name` from the key. Most metrics have the label `mode`, with the
/// [name](ClaimMode::name) of the mode; units are not a label.
///
/// The gauges of waits and holds also decrease after a dropped future, a loss, a panic or a close.
#[derive(Debug, Clone)]
pub struct MetricsObserver {
    store: &'static str,
    names: Arc<SeenNames>,
}

impl MetricsObserver {
    /// The upper bounds of the buckets of this observer's histograms, in seconds. Configure the
    /// exporter with them: without buckets, `metrics-exporter-prometheus` exports summaries, whose
    /// quantiles cannot be combined over several processes.
    pub const BUCKETS: [f64; 16] = [
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0,
        300.0, 1_800.0,
    ];

    /// Creates an observer whose metrics have `store` as their label `store`. Describes the metrics
    /// to the current recorder.
    #[must_use]
    pub fn new(store: &'static str) -> Self {
        Self::describe();
        Self { store, names: Arc::new(SeenNames::new(KeyNames::new())) }
    }

    /// Sets how the label `name` is derived from keys.
    #[must_use]
    pub fn names(mut self, names: KeyNames) -> Self {
        self.names = Arc::new(SeenNames::new(names));
        self
    }

    /// Returns the label `name` of `key`.
    #[must_use]
    pub fn name_of(&self, key: &str) -> Arc<str> {
        self.names.name_of(key)
    }

    /// Describes the metrics to the current recorder. [`new`](Self::new) does this too. Call this
    /// function if the recorder was installed after `new`.
    pub fn describe() {
        for MetricDescription { name, kind, unit, help, .. } in METRICS {
            match kind {
                MetricKind::Counter => metrics::describe_counter!(*name, *unit, *help),
                MetricKind::Gauge => metrics::describe_gauge!(*name, *unit, *help),
                MetricKind::Histogram => metrics::describe_histogram!(*name, *unit, *help),
            }
        }
    }

    /// Returns the labels `store` and `name`, followed by `others`.
    fn labels<const N: usize>(
        &self,
        key: &str,
        others: [(&'static str, &'static str); N],
    ) -> Vec<Label> {
        let mut labels = Vec::with_capacity(N + 2);
        labels.push(Label::from_static_parts("store", self.store));
        labels.push(Label::new("name", SharedString::from_shared(self.names.name_of(key))));
        labels.extend(others.map(|(name, value)| Label::from_static_parts(name, value)));
        labels
    }

    fn count<const N: usize>(
        &self,
        metric: &MetricDescription,
        key: &str,
        labels: [(&'static str, &'static str); N],
    ) {
        self.count_by(metric, key, labels, 1);
    }

    fn count_by<const N: usize>(
        &self,
        metric: &MetricDescription,
        key: &str,
        labels: [(&'static str, &'static str); N],
        value: u64,
    ) {
        metrics::counter!(metric.name, self.labels(key, labels)).increment(value);
    }

    fn add<const N: usize>(
        &self,
        metric: &MetricDescription,
        key: &str,
        labels: [(&'static str, &'static str); N],
        value: f64,
    ) {
        metrics::gauge!(metric.name, self.labels(key, labels)).increment(value);
    }

    fn time(&self, metric: &MetricDescription, key: &str, mode: ClaimMode, time: Duration) {
        let labels = self.labels(key, [("mode", mode.name())]);
        metrics::histogram!(metric.name, labels).record(time.as_secs_f64());
    }

    fn on_attempt(&self, key: &str, mode: ClaimMode, outcome: &'static str) {
        self.count(&ATTEMPTS, key, [("mode", mode.name()), ("outcome", outcome)]);
    }

    fn on_acquired(&self, key: &str, mode: ClaimMode, how: &'static str) {
        self.count(&ACQUISITIONS, key, [("mode", mode.name()), ("how", how)]);
    }

    fn on_renewal(&self, key: &str, mode: ClaimMode, outcome: &'static str) {
        self.count(&RENEWALS, key, [("mode", mode.name()), ("outcome", outcome)]);
    }

    fn on_tick(&self, key: &str, end: TickEnd, completed_at: Option<SystemTime>) {
        let outcome = match end {
            TickEnd::Done => "done",
            TickEnd::AlreadyDone => "already_done",
            TickEnd::Busy => "busy",
            TickEnd::Failed => "failed",
        };
        self.count(&TICKS, key, [("outcome", outcome)]);
        let since_1970 = completed_at.map(|at| at.duration_since(SystemTime::UNIX_EPOCH));
        if let Some(Ok(since_1970)) = since_1970 {
            metrics::gauge!(LAST_TICK.name, self.labels(key, [])).set(since_1970.as_secs_f64());
        }
    }
}

impl Observer for MetricsObserver {
    fn on(&self, event: &LockEvent<'_>) {
        match event {
            LockEvent::AcquireBegan { key, mode, .. } => {
                self.add(&WAITING, key, [("mode", mode.name())], 1.0);
            }
            LockEvent::AcquireEnded { key, mode, waited, end, .. } => {
                self.add(&WAITING, key, [("mode", mode.name())], -1.0);
                self.time(&WAIT_SECONDS, key, *mode, *waited);
                let reason = match end {
                    AcquireEnd::Acquired(_) => return,
                    AcquireEnd::Busy => "busy",
                    AcquireEnd::Failed => "failed",
                    AcquireEnd::Dropped => "dropped",
                };
                self.count(&NOT_ACQUIRED, key, [("mode", mode.name()), ("reason", reason)]);
            }
            LockEvent::HoldBegan { key, mode, .. } => {
                self.add(&HELD, key, [("mode", mode.name())], 1.0);
            }
            LockEvent::HoldEnded { key, mode, held_for, .. } => {
                self.add(&HELD, key, [("mode", mode.name())], -1.0);
                self.time(&HOLD_SECONDS, key, *mode, *held_for);
            }
            LockEvent::Busy { key, mode, .. } => self.on_attempt(key, *mode, "busy"),
            LockEvent::AttemptFailed { key, mode, .. } => self.on_attempt(key, *mode, "failed"),
            LockEvent::Granted { key, mode, .. } => {
                self.on_attempt(key, *mode, "granted");
                self.on_acquired(key, *mode, "store");
                let units = mode.units();
                if units > 0 {
                    self.count_by(&PERMIT_UNITS, key, [("mode", mode.name())], units.into());
                }
            }
            LockEvent::Reentered { key, mode, .. } => self.on_acquired(key, *mode, "reentry"),
            LockEvent::HandedOver { key, mode, .. } => self.on_acquired(key, *mode, "handover"),
            LockEvent::Joined { key, mode, .. } => self.on_acquired(key, *mode, "joined"),
            LockEvent::Converted { key, from, mode, .. } => {
                self.count(&CONVERSIONS, key, [("mode", mode.name()), ("from", from.name())]);
            }
            LockEvent::Renewed { key, mode, .. } => self.on_renewal(key, *mode, "renewed"),
            LockEvent::RenewFailed { key, mode, .. } => self.on_renewal(key, *mode, "failed"),
            LockEvent::Lost { key, mode, reason, .. } => {
                let reason = match reason {
                    LostReason::Expired => "expired",
                    LostReason::Gone => "gone",
                    LostReason::MaxHold => "max_hold",
                    LostReason::Closed => "closed",
                };
                self.count(&LOST, key, [("mode", mode.name()), ("reason", reason)]);
            }
            LockEvent::LeftToLease { key, mode, .. } => {
                self.count(&LEFT_TO_LEASE, key, [("mode", mode.name())]);
            }
            // Creates the gauge, so that a role without a leader has the value 0.
            LockEvent::Campaigning { key } => self.add(&LEADER, key, [], 0.0),
            LockEvent::LeadershipBegan { key, .. } => self.add(&LEADER, key, [], 1.0),
            LockEvent::LeadershipEnded { key, .. } => self.add(&LEADER, key, [], -1.0),
            LockEvent::Tick { key, end, completed_at } => self.on_tick(key, *end, *completed_at),
            LockEvent::Waiting { .. }
            | LockEvent::GaveUp { .. }
            | LockEvent::Released { .. }
            | LockEvent::ReleaseFailed { .. }
            | LockEvent::ReleaseBegan { .. }
            | LockEvent::ReleaseEnded { .. }
            | LockEvent::Closing
            | LockEvent::Closed => {}
        }
    }
}

/// A metric of [`MetricsObserver`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct MetricDescription {
    /// The name.
    pub name: &'static str,
    /// The kind.
    pub kind: MetricKind,
    /// The labels in addition to `store` and `name`, each with its values. The values of `mode` are
    /// the [names](ClaimMode::name) of the modes.
    pub labels: &'static [(&'static str, &'static [&'static str])],
    /// What the metric measures.
    pub help: &'static str,
    unit: Unit,
}

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricKind {
    /// A number that only increases.
    Counter,
    /// A number that increases and decreases.
    Gauge,
    /// A distribution of times in seconds.
    Histogram,
}

impl MetricKind {
    /// Returns the name of the kind in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Returns the metrics of [`MetricsObserver`].
#[must_use]
pub const fn describe_metrics() -> &'static [MetricDescription] {
    METRICS
}

type Labels = &'static [(&'static str, &'static [&'static str])];

const MODE: (&str, &[&str]) = ("mode", &["exclusive", "shared", "upgradable", "permits"]);

const fn counter(name: &'static str, labels: Labels, help: &'static str) -> MetricDescription {
    MetricDescription { name, kind: MetricKind::Counter, labels, help, unit: Unit::Count }
}

const fn gauge(name: &'static str, labels: Labels, help: &'static str) -> MetricDescription {
    MetricDescription { name, kind: MetricKind::Gauge, labels, help, unit: Unit::Count }
}

const fn histogram(name: &'static str, labels: Labels, help: &'static str) -> MetricDescription {
    MetricDescription { name, kind: MetricKind::Histogram, labels, help, unit: Unit::Seconds }
}

const METRICS: &[MetricDescription] = &[
    ATTEMPTS,
    ACQUISITIONS,
    NOT_ACQUIRED,
    WAITING,
    WAIT_SECONDS,
    HELD,
    HOLD_SECONDS,
    LOST,
    RENEWALS,
    LEFT_TO_LEASE,
    CONVERSIONS,
    PERMIT_UNITS,
    LEADER,
    TICKS,
    LAST_TICK,
];

const ATTEMPTS: MetricDescription = counter(
    "lock_registry_attempts_total",
    &[MODE, ("outcome", &["granted", "busy", "failed"])],
    "attempts to acquire a key in the store, and failed reads and writes of an election's record",
);
const ACQUISITIONS: MetricDescription = counter(
    "lock_registry_acquisitions_total",
    &[MODE, ("how", &["store", "handover", "joined", "reentry"])],
    "acquired locks: granted by the store, handed over within the process, joined by a reader, re-entered",
);
const NOT_ACQUIRED: MetricDescription = counter(
    "lock_registry_not_acquired_total",
    &[MODE, ("reason", &["busy", "failed", "dropped"])],
    "calls that ended without the lock, because it was held until the deadline, an error occurred, or the future was dropped",
);
const WAITING: MetricDescription =
    gauge("lock_registry_waiting", &[MODE], "calls that are acquiring a lock");
const WAIT_SECONDS: MetricDescription = histogram(
    "lock_registry_wait_seconds",
    &[MODE],
    "time from a call to its end, with or without the lock",
);
const HELD: MetricDescription =
    gauge("lock_registry_held", &[MODE], "locks that callers of this process hold");
const HOLD_SECONDS: MetricDescription = histogram(
    "lock_registry_hold_seconds",
    &[MODE],
    "time for which a caller held a lock, until its release began or the lock was lost or converted",
);
const LOST: MetricDescription = counter(
    "lock_registry_lost_total",
    &[MODE, ("reason", &["expired", "gone", "max_hold", "closed"])],
    "locks that were lost before their release",
);
const RENEWALS: MetricDescription = counter(
    "lock_registry_renewals_total",
    &[MODE, ("outcome", &["renewed", "failed"])],
    "renewals; failed ones are retried while the lease lasts",
);
const LEFT_TO_LEASE: MetricDescription = counter(
    "lock_registry_left_to_lease_total",
    &[MODE],
    "claims that were not released, so that their keys may stay locked until their leases end",
);
const CONVERSIONS: MetricDescription = counter(
    "lock_registry_conversions_total",
    &[MODE, ("from", &["exclusive", "upgradable"])],
    "upgrades and downgrades; `mode` is the new mode",
);
const PERMIT_UNITS: MetricDescription =
    counter("lock_registry_permit_units_total", &[MODE], "units of all granted permits");
const LEADER: MetricDescription = gauge(
    "lock_registry_leader",
    &[],
    "1 while this process leads the role, otherwise 0, from its first campaign on",
);
const TICKS: MetricDescription = counter(
    "lock_registry_ticks_total",
    &[("outcome", &["done", "already_done", "busy", "failed"])],
    "ticks of jobs that this process tried to run",
);
const LAST_TICK: MetricDescription = MetricDescription {
    unit: Unit::Seconds,
    ..gauge(
        "lock_registry_last_tick_timestamp_seconds",
        &[],
        "when the last known tick of the job was completed, by any process: seconds since 1970",
    )
};
