//! Tests observers over the in-process store: events, metrics, log lines and trace spans, and the
//! lock mode that each of them contains.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{FutureExt as _, poll};
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, Invalidations, LockAdmin, LockBackend,
    LockEvent, LockGuard, LockOptions, LockRegistryExt as _, LostReason, MemoryBackend, Observer,
    Owner, Registry, Release, Renewal,
};
use tokio::sync::Notify;

/// Acquires, waits, converts, loses and releases in all modes. `observer` receives the events of
/// one registry. The other registry, which forces a release, has no observer.
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

    let with_min_hold = LockOptions::new().min_hold(Duration::from_secs(3_600));
    lock.read_with(with_min_hold).await.unwrap().unlock().await.unwrap();
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

/// The in-process store. Its attempts panic if `panics` is set, and its requests fail if `fails` is
/// set.
#[derive(Debug, Default)]
struct Store {
    inner: MemoryBackend,
    panics: AtomicBool,
    fails: AtomicBool,
}

impl Store {
    fn check(&self) -> Result<(), BackendError> {
        match self.fails.load(Ordering::Relaxed) {
            true => Err(BackendError::transient("the store is down")),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl LockBackend for Store {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        assert!(!self.panics.load(Ordering::Relaxed), "the store panics");
        self.check()?;
        self.inner.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        match self.check() {
            Ok(()) => self.inner.renew(claims).await,
            Err(error) => vec![Err(error); claims.len()],
        }
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.inner.release(claim).await
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.inner.wait(claim, busy).await;
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.inner.admin()
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.inner.subscribe(invalidations);
    }
}

/// The ids of the acquisitions, holds and releases that began and have not ended.
#[derive(Debug, Default)]
struct OpenOperations(Mutex<BTreeMap<&'static str, BTreeSet<u64>>>);

impl OpenOperations {
    fn counts(&self) -> [usize; 3] {
        let open = self.0.lock().unwrap();
        ["acquire", "hold", "release"].map(|kind| open.get(kind).map_or(0, BTreeSet::len))
    }
}

impl Observer for OpenOperations {
    fn on(&self, event: &LockEvent<'_>) {
        let (kind, id, begins) = match event {
            LockEvent::AcquireBegan { id, .. } => ("acquire", id, true),
            LockEvent::AcquireEnded { id, .. } => ("acquire", id, false),
            LockEvent::HoldBegan { id, .. } => ("hold", id, true),
            LockEvent::HoldEnded { id, .. } => ("hold", id, false),
            LockEvent::ReleaseBegan { id, .. } => ("release", id, true),
            LockEvent::ReleaseEnded { id, .. } => ("release", id, false),
            _ => return,
        };
        let mut open = self.0.lock().unwrap();
        let ids = open.entry(kind).or_default();
        let is_paired = if begins { ids.insert(*id) } else { ids.remove(id) };
        // The registry would catch a panic here, so an unpaired event leaves an id that stays open.
        if !is_paired {
            open.entry("acquire").or_default().insert(u64::MAX);
        }
    }
}

/// Drops its guard when the hold of this guard ends.
#[derive(Debug, Default)]
struct GuardOwner(Mutex<Option<LockGuard>>);

impl Observer for GuardOwner {
    fn on(&self, event: &LockEvent<'_>) {
        if let LockEvent::HoldEnded { .. } = event {
            drop(self.0.lock().unwrap().take());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_observer_may_drop_the_guard_of_a_lost_lock() {
    let owner = Arc::new(GuardOwner::default());
    let registry = Registry::builder(Arc::new(MemoryBackend::new()))
        .observer(Arc::clone(&owner) as Arc<dyn Observer>)
        .build()
        .unwrap();
    *owner.0.lock().unwrap() = Some(registry.obtain("k").lock().await.unwrap());
    _ = registry.close(Duration::ZERO).await;
    assert!(owner.0.lock().unwrap().is_none());
}

/// Blocks the first caller in its event until another caller has the lock too.
#[derive(Debug)]
struct SlowObserver {
    has_begun: Notify,
    holds: Mutex<(usize, usize)>,
    other_caller: Mutex<std::sync::mpsc::Receiver<()>>,
}

impl Observer for SlowObserver {
    fn on(&self, event: &LockEvent<'_>) {
        match event {
            LockEvent::HoldBegan { .. } => {
                let count = {
                    let mut holds = self.holds.lock().unwrap();
                    holds.0 += 1;
                    holds.0
                };
                if count == 1 {
                    self.has_begun.notify_one();
                    self.other_caller.lock().unwrap().recv().unwrap();
                }
            }
            LockEvent::HoldEnded { .. } => self.holds.lock().unwrap().1 += 1,
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_of_one_owner_begin_a_hold_once() {
    let (sender, other_caller) = std::sync::mpsc::channel();
    let observer = Arc::new(SlowObserver {
        has_begun: Notify::new(),
        holds: Mutex::default(),
        other_caller: Mutex::new(other_caller),
    });
    let registry = Registry::builder(Arc::new(MemoryBackend::new()))
        .observer(Arc::clone(&observer) as Arc<dyn Observer>)
        .build()
        .unwrap();
    let owner = Owner::new();
    let lock = || {
        let (lock, options) = (registry.obtain("k"), LockOptions::new().owner(&owner));
        async move { lock.lock_with(options).await.unwrap() }
    };
    let first = tokio::spawn(lock());
    observer.has_begun.notified().await;
    let second = lock().await;
    sender.send(()).unwrap();
    drop((first.await.unwrap(), second));
    registry.idle().await;
    assert_eq!(*observer.holds.lock().unwrap(), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn every_begin_has_one_end_after_dropped_futures_losses_panics_and_close() {
    let open = Arc::new(OpenOperations::default());
    let store = Arc::new(Store::default());
    let registry = || Registry::builder(Arc::clone(&store) as Arc<dyn LockBackend>);
    let observed = registry().observer(Arc::clone(&open) as Arc<dyn Observer>).build().unwrap();
    let other = registry().build().unwrap();
    let lock = observed.obtain("k");

    // Futures are dropped while another registry holds the key, while another caller is in front,
    // and after each number of polls on a free key.
    let foreign = other.obtain("k").lock().await.unwrap();
    {
        let (mut first, mut second) = (pin!(lock.lock()), pin!(lock.lock()));
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        assert_eq!(open.counts(), [2, 0, 0], "both wait");
    }
    assert_eq!(open.counts(), [0, 0, 0], "their futures were dropped");
    assert!(lock.try_lock_for(Duration::from_secs(1)).await.unwrap().is_none());
    foreign.unlock().await.unwrap();
    for polls in 0..20 {
        let mut future = Box::pin(async {
            let guard = lock.lock().await.unwrap();
            tokio::task::yield_now().await;
            guard.unlock().await.unwrap();
        });
        for _ in 0..polls {
            if poll!(&mut future).is_ready() {
                break;
            }
        }
        drop(future);
        observed.idle().await;
        assert_eq!(open.counts(), [0, 0, 0], "after {polls} polls");
    }

    // A hand-over to a caller whose future is dropped before it receives the guard.
    let guard = lock.lock().await.unwrap();
    let mut waiter = Box::pin(lock.lock());
    assert!(poll!(&mut waiter).is_pending());
    guard.unlock().await.unwrap();
    drop(waiter);
    observed.idle().await;
    assert_eq!(open.counts(), [0, 0, 0], "the receiver of a hand-over was dropped");

    // Losses, with the guard alive and with the guard leaked.
    let guard = lock.lock().await.unwrap();
    assert_eq!(open.counts(), [0, 1, 0], "held");
    assert!(other.force_release("k").await.unwrap());
    guard.lost().await;
    assert_eq!(open.counts(), [0, 0, 0], "lost");
    drop(guard);
    std::mem::forget(lock.lock().await.unwrap());
    assert!(other.force_release("k").await.unwrap());
    lock.lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(open.counts(), [0, 0, 0], "the guard of a lost lock was leaked");

    // Conversions, readers of one grant, several keys.
    let guard = lock.upgradable().await.unwrap().upgrade().await.unwrap();
    assert_eq!(open.counts(), [0, 1, 0], "converted");
    guard.downgrade().await.unwrap().unlock().await.unwrap();
    let readers = [lock.read().await.unwrap(), lock.read().await.unwrap()];
    assert_eq!(open.counts(), [0, 2, 0], "two readers");
    drop(readers);
    observed.idle().await;
    let both = observed.obtain_all(["a", "b"]).lock().await.unwrap();
    assert_eq!(open.counts(), [0, 2, 0], "two keys");
    both.unlock().await.unwrap();
    observed.idle().await;
    assert_eq!(open.counts(), [0, 0, 0]);

    // A panic of the store.
    store.panics.store(true, Ordering::Relaxed);
    assert!(AssertUnwindSafe(lock.lock()).catch_unwind().await.is_err());
    store.panics.store(false, Ordering::Relaxed);
    observed.idle().await;
    assert_eq!(open.counts(), [0, 0, 0], "the store panicked");

    // Closing, with a guard, a leaked guard and a waiter.
    let guard = lock.lock().await.unwrap();
    std::mem::forget(observed.obtain("leaked").lock().await.unwrap());
    let mut waiter = pin!(lock.lock());
    assert!(poll!(&mut waiter).is_pending());
    assert_eq!(open.counts(), [1, 2, 0]);
    _ = observed.close(Duration::ZERO).await;
    assert!(waiter.await.is_err());
    assert_eq!(open.counts(), [0, 0, 0], "closed");
    drop(guard);
    assert_eq!(open.counts(), [0, 0, 0], "dropped after the close");
}

#[test]
fn a_guard_that_outlives_its_runtime_ends_its_hold() {
    let open = Arc::new(OpenOperations::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let guard = runtime.block_on(async {
        let registry = Registry::builder(Arc::new(MemoryBackend::new()));
        let registry = registry.observer(Arc::clone(&open) as Arc<dyn Observer>).build().unwrap();
        registry.obtain("k").lock().await.unwrap()
    });
    assert_eq!(open.counts(), [0, 1, 0]);
    drop(runtime);
    drop(guard);
    assert_eq!(open.counts(), [0, 0, 0]);
}

#[cfg(feature = "server-tests")]
mod counted {
    use std::sync::atomic::AtomicU64;

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata,
        Recorder, SharedString, Unit,
    };
    use registry_core::election::Leadership;
    use registry_core::observe::{KeyNames, MetricsObserver, describe_metrics};

    use super::*;

    /// Sums the increments of each counter and gauge, and counts the values of each histogram.
    #[derive(Default)]
    struct Totals {
        totals: Mutex<BTreeMap<String, Arc<Total>>>,
        described: Mutex<BTreeMap<String, Option<Unit>>>,
    }

    #[derive(Default)]
    struct Total(AtomicU64);

    impl Totals {
        fn total(&self, key: &Key) -> Arc<Total> {
            let mut labels: Vec<_> = key.labels().map(|it| (it.key(), it.value())).collect();
            labels.sort_unstable();
            let labels: Vec<_> =
                labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let name = format!("{} {}", key.name(), labels.join(" "));
            Arc::clone(self.totals.lock().unwrap().entry(name).or_default())
        }

        fn describe(&self, name: KeyName, unit: Option<Unit>) {
            self.described.lock().unwrap().insert(name.as_str().to_owned(), unit);
        }

        /// Returns a line for each metric with its labels, and its value.
        fn lines(&self) -> Vec<String> {
            let totals = self.totals.lock().unwrap();
            let line = |(name, total): (&String, &Arc<Total>)| {
                format!("{name}: {}", total.0.load(Ordering::Relaxed).cast_signed())
            };
            totals.iter().map(line).collect()
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

    impl GaugeFn for Total {
        fn increment(&self, value: f64) {
            self.0.fetch_add((value as i64).cast_unsigned(), Ordering::Relaxed);
        }

        fn decrement(&self, value: f64) {
            GaugeFn::increment(self, -value);
        }

        fn set(&self, value: f64) {
            self.0.store(value as u64, Ordering::Relaxed);
        }
    }

    impl HistogramFn for Total {
        fn record(&self, _: f64) {
            CounterFn::increment(self, 1);
        }
    }

    impl Recorder for Totals {
        fn describe_counter(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
            self.describe(name, unit);
        }

        fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
            self.describe(name, unit);
        }

        fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
            self.describe(name, unit);
        }

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.total(key))
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.total(key))
        }

        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(self.total(key))
        }
    }

    /// Runs `work` on paused time with a recorder, and returns what was recorded.
    fn recorded<F: Future<Output = ()>>(work: impl FnOnce() -> F) -> Totals {
        let totals = Totals::default();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        metrics::with_local_recorder(&totals, || runtime.unwrap().block_on(work()));
        totals
    }

    fn registry_with_metrics() -> Registry {
        let builder = Registry::builder(Arc::new(MemoryBackend::new()));
        builder.observer(Arc::new(MetricsObserver::new("memory"))).build().unwrap()
    }

    #[test]
    fn each_metric_has_the_mode_as_a_label_without_units() {
        let totals = recorded(|| use_every_mode(Arc::new(MetricsObserver::new("memory"))));
        let expected = [
            "lock_registry_acquisitions_total how=handover mode=exclusive name=k store=memory: 1",
            "lock_registry_acquisitions_total how=joined mode=shared name=k store=memory: 1",
            "lock_registry_acquisitions_total how=reentry mode=permits name=units store=memory: 1",
            "lock_registry_acquisitions_total how=store mode=exclusive name=k store=memory: 1",
            "lock_registry_acquisitions_total how=store mode=permits name=units store=memory: 1",
            "lock_registry_acquisitions_total how=store mode=shared name=k store=memory: 2",
            "lock_registry_acquisitions_total how=store mode=upgradable name=k store=memory: 1",
            "lock_registry_attempts_total mode=exclusive name=k outcome=granted store=memory: 1",
            "lock_registry_attempts_total mode=permits name=units outcome=busy store=memory: 1",
            "lock_registry_attempts_total mode=permits name=units outcome=granted store=memory: 1",
            "lock_registry_attempts_total mode=shared name=k outcome=granted store=memory: 2",
            "lock_registry_attempts_total mode=upgradable name=k outcome=granted store=memory: 1",
            "lock_registry_conversions_total from=exclusive mode=upgradable name=k store=memory: 1",
            "lock_registry_conversions_total from=upgradable mode=exclusive name=k store=memory: 1",
            "lock_registry_held mode=exclusive name=k store=memory: 0",
            "lock_registry_held mode=permits name=units store=memory: 0",
            "lock_registry_held mode=shared name=k store=memory: 0",
            "lock_registry_held mode=upgradable name=k store=memory: 0",
            "lock_registry_hold_seconds mode=exclusive name=k store=memory: 3",
            "lock_registry_hold_seconds mode=permits name=units store=memory: 1",
            "lock_registry_hold_seconds mode=shared name=k store=memory: 3",
            "lock_registry_hold_seconds mode=upgradable name=k store=memory: 2",
            "lock_registry_left_to_lease_total mode=shared name=k store=memory: 1",
            "lock_registry_lost_total mode=upgradable name=k reason=gone store=memory: 1",
            "lock_registry_not_acquired_total mode=permits name=units reason=busy store=memory: 1",
            "lock_registry_permit_units_total mode=permits name=units store=memory: 2",
            "lock_registry_renewals_total mode=permits name=units outcome=renewed store=memory: 1",
            "lock_registry_wait_seconds mode=exclusive name=k store=memory: 2",
            "lock_registry_wait_seconds mode=permits name=units store=memory: 2",
            "lock_registry_wait_seconds mode=shared name=k store=memory: 3",
            "lock_registry_wait_seconds mode=upgradable name=k store=memory: 1",
            "lock_registry_waiting mode=exclusive name=k store=memory: 0",
            "lock_registry_waiting mode=permits name=units store=memory: 0",
            "lock_registry_waiting mode=shared name=k store=memory: 0",
            "lock_registry_waiting mode=upgradable name=k store=memory: 0",
        ];
        assert_eq!(totals.lines(), expected);
    }

    #[test]
    fn failed_requests_and_the_loss_that_follows_are_counted() {
        let totals = recorded(|| async {
            let store = Arc::new(Store::default());
            let registry = Registry::builder(Arc::clone(&store) as Arc<dyn LockBackend>);
            let observer = Arc::new(MetricsObserver::new("memory"));
            let registry = registry.observer(observer).build().unwrap();
            let guard = registry.obtain("k").lock().await.unwrap();
            store.fails.store(true, Ordering::Relaxed);
            assert_eq!(guard.lost().await, LostReason::Expired);
            let wait = Duration::from_millis(1);
            assert!(registry.obtain("other").try_lock_for(wait).await.is_err());
        });
        let lines = totals.lines();
        let count = |start: &str| {
            let line = lines.iter().find_map(|line| line.strip_prefix(start));
            line.and_then(|line| line.rsplit_once(": ")?.1.parse::<u64>().ok()).unwrap_or(0)
        };
        let exclusive =
            |name: &str, rest: &str| count(&format!("{name} mode=exclusive name={rest}"));
        let renewals = exclusive("lock_registry_renewals_total", "k outcome=failed store=memory");
        assert!(renewals >= 2, "{lines:#?}");
        assert_eq!(exclusive("lock_registry_lost_total", "k reason=expired store=memory"), 1);
        let not_acquired = "lock_registry_not_acquired_total";
        assert_eq!(exclusive(not_acquired, "other reason=failed store=memory"), 1);
        let attempts =
            exclusive("lock_registry_attempts_total", "other outcome=failed store=memory");
        assert!(attempts >= 1, "{lines:#?}");
        assert_eq!(exclusive("lock_registry_held", "k store=memory"), 0);
    }

    #[test]
    fn ticks_and_leaders_are_counted() {
        let totals = recorded(|| async {
            let registry = registry_with_metrics();
            let job = registry.once("backup/7").tick(7);
            let failed = job.try_run(|_| async { Err::<(), _>("disk full") }).await.unwrap();
            assert_eq!(failed, registry_core::once::Outcome::Ran(Err("disk full")));
            drop(job.run(|_| async {}).await.unwrap());
            drop(job.run(|_| async {}).await.unwrap());
            let next = registry.once("backup/7").tick(8);
            {
                let mut running = pin!(next.run(|_| std::future::pending::<()>()));
                assert!(poll!(&mut running).is_pending());
                drop(next.run(|_| async {}).await.unwrap());
            }
            registry.idle().await;

            let election = registry.election("scheduler");
            let candidate = election.clone();
            let mut running = Box::pin(candidate.run(|term| async move { term.stopping().await }));
            let mut leadership = election.leadership();
            let elected = leadership.wait_for(|now| matches!(now, Leadership::Leader(_)));
            tokio::select! {
                _ = &mut running => panic!("the candidate stopped"),
                elected = elected => drop(elected.unwrap()),
            }
            drop(running);
            registry.idle().await;
        });
        let lines = totals.lines();
        let expect = |line: &str| assert!(lines.iter().any(|it| it == line), "{line}: {lines:#?}");
        expect("lock_registry_ticks_total name=backup/* outcome=already_done store=memory: 1");
        expect("lock_registry_ticks_total name=backup/* outcome=busy store=memory: 1");
        expect("lock_registry_ticks_total name=backup/* outcome=done store=memory: 1");
        // One tick returned an error, and the call of another was dropped.
        expect("lock_registry_ticks_total name=backup/* outcome=failed store=memory: 2");
        expect("lock_registry_leader name=scheduler store=memory: 0");
        let last_tick = "lock_registry_last_tick_timestamp_seconds name=backup/* store=memory: ";
        let at = lines.iter().find_map(|line| line.strip_prefix(last_tick)).unwrap();
        assert!(at.parse::<u64>().unwrap() > 1_700_000_000, "a time since 1970: {at}");
    }

    #[test]
    fn the_leader_gauge_is_one_during_a_term_and_zero_during_a_campaign() {
        let totals = Totals::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        metrics::with_local_recorder(&totals, || {
            runtime.block_on(async {
                let registry = registry_with_metrics();
                let gauge = || {
                    let lines = totals.lines();
                    let line = lines.iter().find(|it| it.contains("leader name=scheduler "));
                    line.map(|line| line.ends_with(": 1"))
                };
                let election = registry.election("scheduler");
                let blocked = registry.obtain("scheduler").lock().await.unwrap();
                let mut running = Box::pin(election.run_term(|_| async { gauge() }));
                assert!(poll!(&mut running).is_pending());
                assert_eq!(gauge(), Some(false), "campaigns");
                blocked.unlock().await.unwrap();
                assert_eq!(running.await.unwrap(), Some(Some(true)), "leads");
                assert_eq!(gauge(), Some(false), "stepped down");
            });
        });
    }

    #[test]
    fn every_metric_and_label_is_described() {
        let totals = recorded(|| async {
            use_every_mode(Arc::new(MetricsObserver::new("memory"))).await;
            let registry = registry_with_metrics();
            drop(registry.once("job").tick(1).run(|_| async {}).await.unwrap());
            registry.election("role").run_term(|_| async {}).await.unwrap();
        });
        let mut recorded = BTreeSet::new();
        for line in totals.lines() {
            let mut words = line.rsplit_once(": ").unwrap().0.split(' ');
            let name = words.next().unwrap();
            let metric = describe_metrics().iter().find(|it| it.name == name).unwrap();
            recorded.insert(name.to_owned());
            let labels: BTreeMap<_, _> = words.map(|it| it.split_once('=').unwrap()).collect();
            let described: BTreeSet<_> =
                metric.labels.iter().map(|it| it.0).chain(["store", "name"]).collect();
            assert_eq!(labels.keys().copied().collect::<BTreeSet<_>>(), described, "{line}");
            for (label, values) in metric.labels {
                assert!(values.contains(&labels[label]), "{line}");
            }
        }
        let described = totals.described.into_inner().unwrap();
        assert_eq!(described.keys().cloned().collect::<BTreeSet<_>>(), recorded);
        for (name, unit) in described {
            let is_seconds = name.ends_with("_seconds");
            let expected = if is_seconds { Unit::Seconds } else { Unit::Count };
            assert_eq!(unit, Some(expected), "{name}");
        }
    }

    #[test]
    fn the_name_of_a_key_has_no_identifiers_and_the_number_of_names_is_limited() {
        let totals = recorded(|| async {
            let names = KeyNames::new().pattern("tenants/*").limit(2);
            let observer = MetricsObserver::new("memory").names(names);
            let registry = Registry::builder(Arc::new(MemoryBackend::new()));
            let registry = registry.observer(Arc::new(observer)).build().unwrap();
            for key in ["orders/1", "orders/2", "tenants/a", "tenants/b", "x", "y", "z\n\"{}"] {
                registry.obtain(key).lock().await.unwrap().unlock().await.unwrap();
            }
        });
        let prefix = "lock_registry_wait_seconds mode=exclusive name=";
        let lines = totals.lines();
        let names: Vec<_> = lines.iter().filter_map(|it| it.strip_prefix(prefix)).collect();
        let expected = ["orders/*", "other", "tenants/*", "x"];
        let counts = [2, 2, 2, 1];
        let expected: Vec<_> = expected
            .iter()
            .zip(counts)
            .map(|(name, count)| format!("{name} store=memory: {count}"))
            .collect();
        assert_eq!(names, expected);
    }
}

#[cfg(feature = "server-tests")]
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

#[cfg(feature = "server-tests")]
mod traced {
    use opentelemetry::trace::{SpanId, TracerProvider as _};
    use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
    use registry_core::observe::TracingObserver;
    use tracing::{Instrument as _, info_span};
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    /// The exported spans.
    struct Spans(Vec<SpanData>);

    impl Spans {
        fn named(&self, name: &str) -> Vec<&SpanData> {
            self.0.iter().filter(|span| span.name == name).collect()
        }

        /// Returns the child spans of the span named `request`, ordered by their start.
        fn children_of(&self, request: &str) -> Vec<&SpanData> {
            let [parent] = self.named(request)[..] else { panic!("one span {request}") };
            let mut spans: Vec<_> = self.0.iter().filter(|it| is_child(it, parent)).collect();
            spans.sort_by_key(|span| span.start_time);
            spans
        }
    }

    fn is_child(span: &SpanData, parent: &SpanData) -> bool {
        span.parent_span_id == parent.span_context.span_id()
            && span.span_context.trace_id() == parent.span_context.trace_id()
    }

    fn attribute(span: &SpanData, name: &str) -> String {
        let found = span.attributes.iter().find(|it| it.key.as_str() == name);
        found.map(|it| it.value.to_string()).unwrap_or_default()
    }

    #[tokio::test]
    async fn wait_hold_and_release_are_spans_of_the_callers_trace() {
        let exporter = InMemorySpanExporter::default();
        let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let _default = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

        let registry = Registry::builder(Arc::new(MemoryBackend::new()));
        let observer = TracingObserver::new().store("memory");
        let registry = registry.observer(Arc::new(observer)).build().unwrap();
        let lock = registry.obtain("orders/42");
        let first = async {
            let guard = lock.lock().await.unwrap();
            tokio::task::yield_now().await;
            let token = guard.fencing_token();
            guard.unlock().await.unwrap();
            token
        };
        let second = async {
            let guard = lock.lock().await.unwrap();
            let token = guard.fencing_token();
            registry.force_release("orders/42").await.unwrap();
            guard.lost().await;
            token
        };
        let tokens = tokio::join!(
            first.instrument(info_span!("first request")),
            second.instrument(info_span!("second request")),
        );
        drop(provider.force_flush());
        let spans = Spans(exporter.get_finished_spans().unwrap());

        let [wait, hold, release] = spans.children_of("first request")[..] else {
            panic!("{:?}", spans.0)
        };
        let [second_wait, second_hold] = spans.children_of("second request")[..] else {
            panic!("{:?}", spans.0)
        };
        let described = |span: &SpanData| {
            assert_eq!(attribute(span, "key"), "orders/42");
            assert_eq!(attribute(span, "store"), "memory");
            assert_eq!(attribute(span, "mode"), "exclusive");
            let token = attribute(span, "token").parse::<u64>().unwrap();
            (span.name.to_string(), token, attribute(span, "outcome"))
        };
        let (first, second) = (tokens.0.get(), tokens.1.get());
        let expected = |name: &str, token, outcome: &str| (name.into(), token, outcome.into());
        assert_eq!(described(wait), expected("wait", first, "acquired"));
        assert_eq!(described(hold), expected("hold", first, "released"));
        assert_eq!(described(release), expected("release", first, "handed over"));
        assert_eq!(described(second_wait), expected("wait", second, "acquired"));
        let lost = format!("lost: {}", LostReason::Gone);
        assert_eq!(described(second_hold), expected("hold", second, &lost));

        // Each span begins and ends with the operation that it describes.
        assert!(wait.end_time <= hold.start_time && hold.end_time <= release.start_time);
        assert!(second_wait.start_time <= hold.end_time, "it waits while the first one holds");
        assert!(second_wait.end_time >= hold.end_time, "until the first one releases");
        assert!(second_hold.start_time >= second_wait.end_time);
    }

    #[tokio::test]
    async fn a_dropped_call_ends_its_span_without_a_token() {
        let exporter = InMemorySpanExporter::default();
        let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let _default = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));

        let registry = Registry::builder(Arc::new(MemoryBackend::new()));
        let registry = registry.observer(Arc::new(TracingObserver::new())).build().unwrap();
        let lock = registry.obtain("k");
        let guard = lock.lock().await.unwrap();
        {
            let mut waiter = pin!(lock.lock());
            assert!(poll!(&mut waiter).is_pending());
        }
        assert!(lock.try_lock().await.unwrap().is_none());
        let spans = Spans(exporter.get_finished_spans().unwrap());
        let waits = spans.named("wait");
        let outcomes: Vec<_> = waits.iter().map(|span| attribute(span, "outcome")).collect();
        assert_eq!(outcomes, ["acquired", "dropped", "busy"]);
        assert_eq!(attribute(waits[1], "token"), "");
        assert_eq!(waits[1].parent_span_id, SpanId::INVALID, "called outside of any span");
        assert!(spans.named("hold").is_empty(), "still held");
        drop(guard);
        registry.idle().await;
        let spans = Spans(exporter.get_finished_spans().unwrap());
        assert_eq!((spans.named("hold").len(), spans.named("release").len()), (1, 1));
    }
}
