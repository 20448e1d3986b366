//! The stores of the cancellation sweep, the faults in front of them, and the checks after a future
//! was dropped. The dropped operations are the scenarios in `sweep.rs`.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use registry_conformance::sweep::{SweepOutcome, sweep};
use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    FencingToken, LockBackend, LockError, LockGuard, LockRegistryExt as _, MemoryBackend, Registry,
};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::fair_store::FairBackend;
use super::faults::{
    LATE, delays, persistent_message_faults, random_faults, transient_message_faults,
};
use super::remote_store::RemoteStore;

/// The one key that all callers compete for.
pub(crate) const KEY: &str = "orders/42";

/// No future takes this many polls.
const POLLS_MAX: usize = 1_000;

/// The time until a waiter notices that a lease has expired.
const EXPIRY_DELAY: Duration = Duration::from_millis(10);

/// A store, and the faults between it and the registry whose futures are dropped.
pub(crate) struct Environment {
    name: String,
    store: StoreUnderTest,
    request_fault: Option<RequestFault>,
    recovery: Recovery,
    /// The maximum delay of a request that still reaches the store.
    late: Duration,
    lease: Duration,
    handoff: u32,
    /// Added to the recovery limit. Zero on paused time. On real time, it allows for a busy
    /// machine.
    slack: Duration,
}

/// The faults of the local registry's requests, from the first poll of the future on.
#[derive(Clone)]
enum RequestFault {
    Faults(Faults),
    /// The first acquire fails at once and reaches the store after this time.
    LateAcquire(Duration),
    /// Requests and replies take this time, whether or not their caller still waits.
    Latency(Duration),
}

/// How soon the key is free after the last call that competed for it has ended.
#[derive(Clone, Copy)]
enum Recovery {
    /// Within a second: no reply is lost.
    Prompt,
    /// Within 4 s: single messages are lost or late, and the engine must repeat its request.
    Soon,
    /// At the end of the lease at the latest: the faults may prevent every release.
    WithLease,
}

enum StoreUnderTest {
    Memory(MemoryBackend),
    Fair(FairBackend),
    Sqlite(PathBuf),
}

/// One run in an environment: the registry whose future is dropped, and the registry of another
/// process.
pub(crate) struct TestSetup {
    pub(crate) local: Registry,
    pub(crate) remote: Registry,
    fault_layer: Option<FaultLayer>,
}

/// The fault layer between the local registry and the store.
enum FaultLayer {
    Faulty(Arc<FaultyBackend>),
    RemoteStore(Arc<RemoteStore>),
}

/// The operation that is swept, and the other activity around it.
pub(crate) struct Scenario {
    /// The future that is dropped. Its guards are dropped after it.
    pub(crate) swept: Pin<Box<dyn Future<Output = Vec<LockGuard>>>>,
    /// Other callers in the same registry or elsewhere. They must all complete.
    pub(crate) others: JoinSet<()>,
    /// Guards that must still hold after the drop. They are dropped afterwards.
    pub(crate) still_held: Vec<Arc<LockGuard>>,
    /// Whether the swept operation closes the local registry.
    pub(crate) closes: bool,
    /// Whether the swept operation also locks the other keys.
    pub(crate) uses_other_keys: bool,
}

impl Scenario {
    pub(crate) fn of(swept: impl Future<Output = Vec<LockGuard>> + 'static) -> Self {
        Self {
            swept: Box::pin(swept),
            others: JoinSet::new(),
            still_held: Vec::new(),
            closes: false,
            uses_other_keys: false,
        }
    }

    pub(crate) fn with_concurrent(
        mut self,
        other: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        self.others.spawn(other);
        self
    }
}

impl Environment {
    fn new(name: impl Into<String>, store: StoreUnderTest) -> Self {
        Self {
            name: name.into(),
            store,
            request_fault: None,
            recovery: Recovery::Prompt,
            late: Duration::ZERO,
            lease: Duration::from_secs(30),
            handoff: 32,
            slack: Duration::ZERO,
        }
    }

    fn faulty(self, faults: Faults) -> Self {
        Self { request_fault: Some(RequestFault::Faults(faults)), ..self }
    }

    fn recovery(self, recovery: Recovery) -> Self {
        Self { recovery, ..self }
    }

    fn late(self, late: Duration) -> Self {
        Self { late, ..self }
    }

    /// Returns further keys, for locks of several keys. A store of one key has none.
    pub(crate) fn other_keys(&self) -> &'static [&'static str] {
        match self.store {
            StoreUnderTest::Fair(_) => &[],
            StoreUnderTest::Memory(_) | StoreUnderTest::Sqlite(_) => &["orders/41", "orders/43"],
        }
    }

    /// How long a key stays locked after its holder has died.
    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    async fn setup(&self) -> TestSetup {
        let store = self.backend().await;
        let fault_layer = match &self.request_fault {
            None => None,
            Some(RequestFault::Faults(_)) => {
                let faulty = FaultyBackend::new(Arc::clone(&store), Faults::none());
                Some(FaultLayer::Faulty(Arc::new(faulty)))
            }
            Some(RequestFault::LateAcquire(_) | RequestFault::Latency(_)) => {
                Some(FaultLayer::RemoteStore(Arc::new(RemoteStore::to(Arc::clone(&store)))))
            }
        };
        let backend: Arc<dyn LockBackend> = match &fault_layer {
            None => store,
            Some(FaultLayer::Faulty(faulty)) => Arc::clone(faulty) as _,
            Some(FaultLayer::RemoteStore(remote_store)) => Arc::clone(remote_store) as _,
        };
        let open = |backend| {
            Registry::builder(backend).lease(self.lease).handoff(self.handoff).build().unwrap()
        };
        TestSetup { local: open(backend), remote: open(self.backend().await), fault_layer }
    }

    async fn backend(&self) -> Arc<dyn LockBackend> {
        match &self.store {
            StoreUnderTest::Memory(store) => Arc::new(store.clone()),
            StoreUnderTest::Fair(store) => Arc::new(store.clone()),
            StoreUnderTest::Sqlite(path) => {
                Arc::new(SqliteBackend::open(SqliteConfig::new(path)).await.unwrap())
            }
        }
    }

    /// Returns how long the key may stay locked after the last call that competed for it has ended.
    fn recovery_limit(&self) -> Duration {
        let expected = match self.recovery {
            Recovery::Prompt => Duration::from_secs(1),
            Recovery::Soon => Duration::from_secs(4),
            Recovery::WithLease => self.lease,
        };
        expected + self.late + EXPIRY_DELAY + self.slack
    }

    /// Sweeps the operation of `scenario`. If `other_waiter`, another caller of the local registry
    /// waits for the lock.
    #[expect(clippy::async_yields_async, reason = "the future is the product: the sweep drives it")]
    async fn sweep(
        &self,
        other_waiter: bool,
        scenario: impl AsyncFn(&Self, &TestSetup) -> Scenario,
    ) {
        let running = RefCell::new(None);
        let last_token = Cell::new(None);
        sweep(
            async || {
                let setup = self.setup().await;
                let Scenario { swept, mut others, still_held, closes, uses_other_keys } =
                    scenario(self, &setup).await;
                if other_waiter {
                    let lock = setup.local.obtain(KEY);
                    others.spawn(async move {
                        match lock.lock().await {
                            Ok(guard) => drop(guard),
                            Err(LockError::Closed) if closes => {}
                            Err(error) => panic!("another caller returned an error: {error:?}"),
                        }
                    });
                }
                match (&setup.fault_layer, &self.request_fault) {
                    (Some(FaultLayer::Faulty(faulty)), Some(RequestFault::Faults(faults))) => {
                        faulty.apply(faults.clone());
                    }
                    (
                        Some(FaultLayer::RemoteStore(remote_store)),
                        Some(RequestFault::LateAcquire(after)),
                    ) => {
                        remote_store.fail_next_acquire(*after);
                    }
                    (
                        Some(FaultLayer::RemoteStore(remote_store)),
                        Some(RequestFault::Latency(latency)),
                    ) => {
                        remote_store.set_latency(*latency);
                    }
                    _ => {}
                }
                running.replace(Some((setup, others, still_held, closes, uses_other_keys)));
                swept
            },
            POLLS_MAX,
            async |end| {
                let (setup, others, still_held, closes, uses_other_keys) = running.take().unwrap();
                let run = format!("{self}, other waiter: {other_waiter}, {}", describe_end(&end));
                let after_drop =
                    CheckAfterRun { environment: self, setup, closes, uses_other_keys, run };
                last_token.set(after_drop.check(end, others, still_held, last_token.get()).await);
            },
        )
        .await;
    }
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with handoff {}", self.name, self.handoff)
    }
}

fn describe_end(end: &SweepOutcome<Vec<LockGuard>>) -> String {
    match end {
        SweepOutcome::Dropped { polls } => format!("dropped after {polls} polls"),
        SweepOutcome::DroppedWoken { polls } => {
            format!("dropped after {polls} polls and a wake-up")
        }
        _ => "completed".to_owned(),
    }
}

/// The checks after one run of a swept future.
struct CheckAfterRun<'a> {
    environment: &'a Environment,
    setup: TestSetup,
    closes: bool,
    uses_other_keys: bool,
    run: String,
}

impl CheckAfterRun<'_> {
    /// Panics unless all other callers complete, another client can acquire the key with a larger
    /// token, and the local registry becomes idle, each within its time limit. Returns the token of
    /// that client.
    async fn check(
        self,
        end: SweepOutcome<Vec<LockGuard>>,
        mut others: JoinSet<()>,
        still_held: Vec<Arc<LockGuard>>,
        last_token: Option<FencingToken>,
    ) -> Option<FencingToken> {
        let Self { environment, setup, closes, uses_other_keys, run } = self;
        let recovery_limit = environment.recovery_limit();
        drop(end);
        for guard in &still_held {
            assert!(guard.is_held(), "{run}: a guard is lost");
        }
        drop(still_held);

        // Other callers of the registry complete. Each may have to wait until the key is free
        // after the previous caller.
        let rounds = u32::try_from(others.len()).unwrap() + 1;
        let all_done = async {
            while let Some(other) = others.join_next().await {
                other.unwrap();
            }
        };
        timeout(recovery_limit * rounds, all_done)
            .await
            .unwrap_or_else(|_| panic!("{run}: another caller never completes"));

        // Another client acquires the key, with a newer token.
        let others_ended_at = Instant::now();
        let guard = timeout(recovery_limit, setup.remote.obtain(KEY).lock())
            .await
            .unwrap_or_else(|_| panic!("{run}: the key is not free after {recovery_limit:?}"))
            .unwrap();
        let token = guard.fencing_token();
        assert!(Some(token) > last_token, "{run}: token {token} after {last_token:?}");
        guard.unlock().await.unwrap();
        if uses_other_keys {
            let other_keys = setup.remote.obtain_all(environment.other_keys().iter().copied());
            let guard = timeout(recovery_limit, other_keys.lock())
                .await
                .unwrap_or_else(|_| panic!("{run}: another key is not free"))
                .unwrap();
            guard.unlock().await.unwrap();
        }

        // A late request does not lock the key again for longer than allowed.
        if !environment.late.is_zero() {
            tokio::time::sleep(environment.late).await;
            timeout(recovery_limit, setup.remote.obtain(KEY).lock())
                .await
                .unwrap_or_else(|_| panic!("{run}: the key is locked again"))
                .unwrap()
                .unlock()
                .await
                .unwrap();
        }

        // No state remains in the registry. In an in-process store without late requests, no record
        // remains either.
        let left = recovery_limit.saturating_sub(others_ended_at.elapsed())
            + environment.lease
            + environment.late;
        timeout(left, setup.local.idle()).await.unwrap_or_else(|_| {
            panic!("{run}: the background releaser is not idle after {left:?}")
        });
        assert_eq!(setup.local.local_locks(), 0, "{run}: local locks");
        assert_eq!(setup.local.held(), 0, "{run}: held");
        if let Some(FaultLayer::Faulty(faulty)) = &setup.fault_layer {
            faulty.clear_faults();
            faulty.wait_for_late_repetitions().await;
        }
        if !closes {
            let guard = setup.local.obtain(KEY).lock().await.unwrap();
            guard.unlock().await.unwrap();
        }
        let report = setup.local.close(recovery_limit).await;
        // A dropped `close` may already have ended a hold, so `lost` is not checked. If releases do
        // not arrive, one claim may be left to its lease.
        let may_be_left = closes && matches!(environment.recovery, Recovery::WithLease);
        let clean =
            if closes { report.abandoned <= usize::from(may_be_left) } else { report.is_clean() };
        assert!(clean, "{run}: {report:?}");
        let records = match &environment.store {
            StoreUnderTest::Memory(store) => store.records(),
            StoreUnderTest::Fair(store) => store.records(),
            StoreUnderTest::Sqlite(_) => 0,
        };
        assert!(
            records == 0 || !environment.late.is_zero(),
            "{run}: {records} records in the store"
        );
        _ = setup.remote.close(recovery_limit).await;
        Some(token)
    }
}

/// Sweeps the operation of `scenario` over in-process stores, on paused time. One environment runs
/// at a time, because all share the clock.
pub(crate) async fn sweep_paused(scenario: impl AsyncFn(&Environment, &TestSetup) -> Scenario) {
    for environment in in_process_environments() {
        for other_waiter in [false, true] {
            environment.sweep(other_waiter, &scenario).await;
        }
    }
}

/// Sweeps the operation of `scenario` over SQLite. The environments are concurrent, because they
/// spend most of their time waiting. Each has its own file.
pub(crate) async fn sweep_sqlite(scenario: impl AsyncFn(&Environment, &TestSetup) -> Scenario) {
    let folders = [false, true].map(|other_waiter| (other_waiter, tempfile::tempdir().unwrap()));
    let environments = folders.iter().flat_map(|(other_waiter, folder)| {
        sqlite_environments(folder).into_iter().map(move |environment| (environment, *other_waiter))
    });
    stream::iter(environments)
        .for_each_concurrent(None, async |(environment, other_waiter)| {
            environment.sweep(other_waiter, &scenario).await;
        })
        .await;
}

/// In-process stores, without faults and behind all kinds of faults. For paused time.
fn in_process_environments() -> Vec<Environment> {
    let mut environments = Vec::new();
    for handoff in [32, 0] {
        let mut add =
            |environment: Environment| environments.push(Environment { handoff, ..environment });
        let memory =
            |name: &str| Environment::new(name, StoreUnderTest::Memory(MemoryBackend::new()));
        add(memory("memory"));
        for (name, faults) in delays() {
            add(memory(name).faulty(faults));
        }
        for (name, faults) in transient_message_faults() {
            add(memory(name).faulty(faults).recovery(Recovery::Soon));
        }
        let request_fault = Some(RequestFault::Latency(Duration::from_millis(10)));
        add(Environment { request_fault, ..memory("high latency") });
        let after = Duration::from_millis(500);
        let request_fault = Some(RequestFault::LateAcquire(after));
        let environment =
            memory("acquire fails and arrives later").recovery(Recovery::Soon).late(after);
        add(Environment { request_fault, ..environment });
        for (name, faults, late) in persistent_message_faults() {
            add(memory(name).faulty(faults).recovery(Recovery::WithLease).late(late));
        }
        for seed in 0..12 {
            let environment =
                memory(&format!("random faults, seed {seed}")).faulty(random_faults(seed));
            add(environment.recovery(Recovery::WithLease).late(LATE));
        }
    }
    let fair = |name: &str| Environment::new(name, StoreUnderTest::Fair(FairBackend::default()));
    environments.push(fair("fair"));
    for (name, faults) in delays() {
        environments.push(fair(&format!("fair, {name}")).faulty(faults));
    }
    for (name, faults) in transient_message_faults() {
        environments.push(fair(&format!("fair, {name}")).faulty(faults).recovery(Recovery::Soon));
    }
    for (name, faults, late) in persistent_message_faults() {
        let environment = fair(&format!("fair, {name}")).faulty(faults);
        environments.push(environment.recovery(Recovery::WithLease).late(late));
    }
    environments
}

/// SQLite, without faults and behind some faults. For real time.
fn sqlite_environments(folder: &tempfile::TempDir) -> Vec<Environment> {
    let file = |name: &str| {
        let path = folder.path().join(format!("{}.db", name.replace(' ', "-")));
        // 30 s is far more than any step takes here, and less than the lease.
        Environment {
            slack: Duration::from_secs(30),
            lease: Duration::from_secs(120),
            ..Environment::new(format!("sqlite, {name}"), StoreUnderTest::Sqlite(path))
        }
    };
    // In these environments, the key may stay locked until the lease ends, so the lease is short.
    let lossy = |name: &str, faults| {
        let environment = file(name).faulty(faults).recovery(Recovery::WithLease);
        Environment { lease: Duration::from_secs(3), ..environment }
    };
    let ms = Duration::from_millis;
    vec![
        file("no faults"),
        Environment { handoff: 0, ..file("no hand-over") },
        file("slow").faulty(
            Faults::none()
                .always(Operation::Acquire, Fault::DelayReply(ms(3)))
                .always(Operation::Renew, Fault::DelayReply(ms(3)))
                .always(Operation::Release, Fault::DelayRequest(ms(3))),
        ),
        lossy(
            "acquire reply lost",
            Faults::none().at_call(Operation::Acquire, 1, Fault::LoseReply),
        ),
        lossy(
            "release reply lost",
            Faults::none().at_call(Operation::Release, 1, Fault::LoseReply),
        ),
        lossy("release lost", Faults::none().at_call(Operation::Release, 1, Fault::LoseRequest)),
    ]
}
