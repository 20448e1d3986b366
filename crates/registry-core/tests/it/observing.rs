//! Events, metrics and log lines contain the mode of the lock.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::poll;
use registry_core::{
    LockEvent, LockOptions, LockRegistryExt as _, LostReason, MemoryBackend, Observer, Registry,
};

/// Acquires, waits, converts, loses and releases in all modes. Only `observer` is notified of it.
async fn use_every_mode(observer: Arc<dyn Observer>) {
    let store = MemoryBackend::new();
    let registry = || Registry::builder(Arc::new(store.clone()));
    let (registry, other) = (registry().observer(observer).build().unwrap(), registry().build());
    let (lock, other) = (registry.obtain("k"), other.unwrap());

    let semaphore = registry.semaphore("units", 5);
    let permit = semaphore.acquire_many(2).await.unwrap();
    assert!(semaphore.try_acquire_many(4).await.unwrap().is_none());
    permit.extend(Duration::from_secs(60)).await.unwrap();
    let again = permit.reenter().unwrap();
    permit.unlock().await.unwrap();
    again.unlock().await.unwrap();

    let readers = [lock.read().await.unwrap(), lock.read().await.unwrap()];
    for reader in readers {
        reader.unlock().await.unwrap();
    }

    let guard = lock.upgradable().await.unwrap();
    let guard = guard.upgrade().await.unwrap();
    let guard = guard.downgrade_to_upgradable().await.unwrap();
    assert!(other.force_release("k").await.unwrap());
    assert_eq!(guard.lost().await, LostReason::Gone);
    drop(guard);
    registry.idle().await;

    let guard = lock.lock().await.unwrap();
    {
        let mut waiter = pin!(lock.lock());
        assert!(poll!(&mut waiter).is_pending());
        guard.unlock().await.unwrap();
        waiter.await.unwrap().unlock().await.unwrap();
    }

    let kept = LockOptions::new().min_hold(Duration::from_secs(3_600));
    lock.read_with(kept).await.unwrap().unlock().await.unwrap();
    _ = registry.close(Duration::ZERO).await;
}

#[derive(Debug, Default)]
struct Log(Mutex<Vec<String>>);

impl Log {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Observer for Log {
    fn on(&self, event: &LockEvent<'_>) {
        let (name, mode) = match event {
            LockEvent::Waiting { mode, .. } => ("waiting", mode),
            LockEvent::Busy { mode, .. } => ("busy", mode),
            LockEvent::GaveUp { mode, .. } => ("gave up", mode),
            LockEvent::Granted { mode, .. } => ("granted", mode),
            LockEvent::Reentered { mode, .. } => ("re-entered", mode),
            LockEvent::HandedOver { mode, .. } => ("handed over", mode),
            LockEvent::Joined { mode, .. } => ("joined", mode),
            LockEvent::Converted { mode, .. } => ("converted to", mode),
            LockEvent::Renewed { mode, .. } => ("renewed", mode),
            LockEvent::Lost { mode, .. } => ("lost", mode),
            LockEvent::Released { mode, .. } => ("released", mode),
            LockEvent::LeftToLease { mode, .. } => ("left to its lease", mode),
            _ => return,
        };
        self.0.lock().unwrap().push(format!("{name}: {mode}"));
    }
}

#[tokio::test(start_paused = true)]
async fn each_event_contains_the_mode_and_the_units() {
    let log = Arc::new(Log::default());
    use_every_mode(Arc::clone(&log) as Arc<dyn Observer>).await;
    let expected = [
        "granted: permits 2 of 5",
        "busy: permits 4 of 5",
        "gave up: permits 4 of 5",
        "renewed: permits 2 of 5",
        "re-entered: permits 2 of 5",
        "released: permits 2 of 5",
        "granted: shared",
        "joined: shared",
        "released: shared",
        "granted: upgradable",
        "converted to: exclusive",
        "converted to: upgradable",
        "lost: upgradable",
        "granted: exclusive",
        "waiting: exclusive",
        "handed over: exclusive",
        "released: exclusive",
        "granted: shared",
        "left to its lease: shared",
    ];
    assert_eq!(log.take(), expected);
}

#[cfg(feature = "metrics")]
mod counted {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    use metrics::{
        Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
        SharedString, Unit,
    };
    use registry_core::observe::MetricsObserver;

    use super::*;

    /// Counts the increments of each counter, and the values of each histogram.
    #[derive(Default)]
    struct Totals(Mutex<BTreeMap<String, Arc<Total>>>);

    #[derive(Default)]
    struct Total(AtomicU64);

    impl Totals {
        fn total(&self, key: &Key) -> Arc<Total> {
            let mut labels: Vec<_> = key.labels().map(|it| (it.key(), it.value())).collect();
            labels.sort_unstable();
            let labels: Vec<_> =
                labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let name = format!("{} {}", key.name(), labels.join(" "));
            Arc::clone(self.0.lock().unwrap().entry(name).or_default())
        }
    }

    impl CounterFn for Total {
        fn increment(&self, value: u64) {
            self.0.fetch_add(value, Ordering::Relaxed);
        }

        fn absolute(&self, value: u64) {
            self.0.store(value, Ordering::Relaxed);
        }
    }

    impl HistogramFn for Total {
        fn record(&self, _: f64) {
            self.increment(1);
        }
    }

    impl Recorder for Totals {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.total(key))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(self.total(key))
        }
    }

    #[test]
    fn each_metric_has_the_mode_as_a_label_without_units() {
        let totals = Totals::default();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        metrics::with_local_recorder(&totals, || {
            let observer = Arc::new(MetricsObserver::new("memory"));
            runtime.unwrap().block_on(use_every_mode(observer));
        });
        let totals = totals.0.into_inner().unwrap();
        let totals: Vec<_> = totals
            .iter()
            .map(|(name, total)| format!("{name}: {}", total.0.load(Ordering::Relaxed)))
            .collect();
        let expected = [
            "lock_registry_conversions_total from=exclusive mode=upgradable store=memory: 1",
            "lock_registry_conversions_total from=upgradable mode=exclusive store=memory: 1",
            "lock_registry_gave_up_total mode=permits store=memory: 1",
            "lock_registry_grants_total how=handover mode=exclusive store=memory: 1",
            "lock_registry_grants_total how=joined mode=shared store=memory: 1",
            "lock_registry_grants_total how=reentry mode=permits store=memory: 1",
            "lock_registry_grants_total how=store mode=exclusive store=memory: 1",
            "lock_registry_grants_total how=store mode=permits store=memory: 1",
            "lock_registry_grants_total how=store mode=shared store=memory: 2",
            "lock_registry_grants_total how=store mode=upgradable store=memory: 1",
            "lock_registry_held_seconds mode=exclusive store=memory: 1",
            "lock_registry_held_seconds mode=permits store=memory: 1",
            "lock_registry_held_seconds mode=shared store=memory: 1",
            "lock_registry_left_to_lease_total mode=shared store=memory: 1",
            "lock_registry_lost_total mode=upgradable reason=gone store=memory: 1",
            "lock_registry_permit_units_total mode=permits store=memory: 2",
            "lock_registry_renewals_total mode=permits outcome=renewed store=memory: 1",
            "lock_registry_wait_seconds mode=exclusive store=memory: 1",
            "lock_registry_wait_seconds mode=permits store=memory: 1",
            "lock_registry_wait_seconds mode=shared store=memory: 2",
            "lock_registry_wait_seconds mode=upgradable store=memory: 1",
        ];
        assert_eq!(totals, expected);
    }
}

#[cfg(feature = "tracing")]
mod logged {
    use std::fmt;

    use registry_core::observe::TracingObserver;
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Records the message and the mode of each log line.
    #[derive(Clone, Default)]
    struct Lines(Arc<Log>);

    #[derive(Default)]
    struct Line {
        message: String,
        mode: Option<String>,
    }

    impl Visit for Line {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            match field.name() {
                "message" => self.message = format!("{value:?}"),
                "mode" => self.mode = Some(format!("{value:?}")),
                _ => {}
            }
        }
    }

    impl Subscriber for Lines {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "lock_registry"
        }

        fn event(&self, event: &Event<'_>) {
            let mut line = Line::default();
            event.record(&mut line);
            if let Line { message, mode: Some(mode) } = line {
                self.0.0.lock().unwrap().push(format!("{message}: {mode}"));
            }
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[tokio::test(start_paused = true)]
    async fn each_log_line_contains_the_mode_and_the_units() {
        let lines = Lines::default();
        let _default = tracing::subscriber::set_default(lines.clone());
        use_every_mode(Arc::new(TracingObserver::new())).await;
        let expected = [
            "lock granted: permits 2 of 5",
            "lock busy: permits 4 of 5",
            "gave up waiting: permits 4 of 5",
            "lease renewed: permits 2 of 5",
            "lock re-entered: permits 2 of 5",
            "lock released: permits 2 of 5",
            "lock granted: shared",
            "shared lock joined: shared",
            "lock released: shared",
            "lock granted: upgradable",
            "lock converted: exclusive",
            "lock converted: upgradable",
            "lock lost: upgradable",
            "lock granted: exclusive",
            "waiting for local callers: exclusive",
            "lock handed over: exclusive",
            "lock released: exclusive",
            "lock granted: shared",
            "claim left to its lease: shared",
        ];
        assert_eq!(lines.0.take(), expected);
    }
}
