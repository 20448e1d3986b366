//! A workload of clients that contend for a few keys while a test injects faults, and the recording
//! of their operations. This module injects no faults.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use registry_core::{BackendErrorKind, FencingToken, LockError, LockOptions, LostReason, Registry};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::history::{History, HistoryEvent, Recorder, host_clock};
use registry_testkit::recording_client::{RecordedGuard, RecordingClient};
use registry_testkit::{error_text, eventually, within};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::outcome::WorkloadOutcome;

/// Sufficient on any machine; reached only by a failing test.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Short, so that tests of expiring leases stay fast.
pub(crate) const LEASE: Duration = Duration::from_secs(3);
/// The response timeout. So short a lease does not permit the engine's default of three seconds.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The default number of clients.
const CLIENTS: usize = 3;
/// The interval at which a holder checks its guard and writes.
const CHECK_INTERVAL: Duration = Duration::from_millis(25);

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns a registry with its own connections, like another process.
pub(crate) async fn registry(config: &EtcdConfig, lease: Duration) -> Registry {
    let config = config.clone().with_response_timeout(RESPONSE_TIMEOUT);
    let backend = EtcdBackend::open(config).await.unwrap();
    let builder = Registry::builder(Arc::new(backend)).lease(lease);
    builder.timeout(RESPONSE_TIMEOUT).build().unwrap()
}

/// A resource that stores the newest token of each key and refuses writes with older ones.
#[derive(Debug, Default)]
pub(crate) struct FencedResource(Mutex<HashMap<String, FencingToken>>);

impl FencedResource {
    /// Writes and records the write. Returns whether the resource accepted it.
    pub(crate) fn write(
        &self,
        recorder: &Recorder,
        client: u32,
        key: &str,
        token: FencingToken,
    ) -> bool {
        let writing = recorder.write(client, key, token);
        let mut newest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = newest.entry(key.to_owned()).or_insert(token);
        let accepted = *known <= token;
        if accepted {
            *known = token;
            writing.accepted();
        } else {
            writing.rejected();
        }
        accepted
    }
}

/// A hold that ended without a release.
#[derive(Debug, Clone)]
pub(crate) struct WorkloadLoss {
    pub(crate) key: String,
    pub(crate) reason: LostReason,
}

/// A workload. All clients acquire the contested keys for short times. Each steady key is held
/// permanently by one client, and another client waits for it.
pub(crate) struct Workload {
    shared: Arc<SharedState>,
    config: EtcdConfig,
    lease: Duration,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
    stop: watch::Sender<bool>,
}

/// The state that all clients share.
struct SharedState {
    recorder: Recorder,
    resource: FencedResource,
    contested: Vec<String>,
    steady: Vec<String>,
    /// The number of grants of each key.
    granted: watch::Sender<BTreeMap<String, u64>>,
    /// The steady keys that are held now.
    held: watch::Sender<BTreeSet<String>>,
    losses: watch::Sender<Vec<WorkloadLoss>>,
    errors: Mutex<Vec<String>>,
    /// Errors that no outage explains.
    unexpected_errors: Mutex<Vec<String>>,
}

/// The keys of a workload.
#[derive(Debug, Clone)]
pub(crate) struct WorkloadKeys {
    pub(crate) contested: Vec<String>,
    pub(crate) steady: Vec<String>,
}

impl Default for WorkloadKeys {
    fn default() -> Self {
        let keys = |kind: &str| (0..3).map(|number| format!("{kind}/{number}")).collect();
        Self { contested: keys("contested"), steady: keys("steady") }
    }
}

impl Workload {
    /// Starts the workload and waits until each key was granted.
    pub(crate) async fn start(config: &EtcdConfig) -> Self {
        Self::start_with(&vec![config.clone(); CLIENTS], config, WorkloadKeys::default(), LEASE)
            .await
    }

    /// Like [`start`](Self::start), with one configuration per client. `direct` reaches the members
    /// without a proxy.
    pub(crate) async fn start_with(
        configs: &[EtcdConfig],
        direct: &EtcdConfig,
        keys: WorkloadKeys,
        lease: Duration,
    ) -> Self {
        let WorkloadKeys { contested, steady } = keys;
        let shared = Arc::new(SharedState {
            recorder: Recorder::new(host_clock()),
            resource: FencedResource::default(),
            contested,
            steady,
            granted: watch::Sender::default(),
            held: watch::Sender::default(),
            losses: watch::Sender::default(),
            errors: Mutex::default(),
            unexpected_errors: Mutex::default(),
        });
        let mut registries = Vec::new();
        for config in configs {
            registries.push(registry(config, lease).await);
        }
        let mut workers = JoinSet::new();
        let stop = watch::Sender::new(false);
        let client = |number: usize, role: usize, key: &str| Client {
            shared: Arc::clone(&shared),
            number: u32::try_from(number % configs.len() * 100 + role).unwrap(),
            lock: registries[number % configs.len()].obtain(key),
            stop: stop.subscribe(),
        };
        // A second client contends for a steady key only after its first grant.
        for (role, key) in shared.steady.iter().enumerate() {
            workers.spawn(client(role, 50 + role, key).run_holder());
        }
        shared.wait_for_grants(&shared.steady.iter().collect::<Vec<_>>(), 1).await;
        for (role, key) in shared.steady.iter().enumerate() {
            workers.spawn(client(role + 1, 50 + role, key).run_contender(millis(100)));
        }
        for number in 0..configs.len() {
            for (role, key) in shared.contested.iter().enumerate() {
                workers.spawn(client(number, 2 * role, key).run_contender(millis(1)));
                workers.spawn(client(number, 2 * role + 1, key).run_contender(millis(1)));
            }
        }
        shared.wait_for_grants(&shared.contested.iter().collect::<Vec<_>>(), 1).await;
        Self { shared, config: direct.clone(), lease, registries, workers, stop }
    }

    /// Waits until each contested key was granted three more times.
    pub(crate) async fn wait_for_progress(&self) {
        self.wait_for_progress_of(&self.shared.contested.iter().collect::<Vec<_>>()).await;
    }

    /// Waits until each of these keys was granted three more times.
    pub(crate) async fn wait_for_progress_of(&self, keys: &[&String]) {
        self.shared.wait_for_grants(keys, 3).await;
    }

    /// Waits until all steady keys are held.
    pub(crate) async fn wait_until_steady_held(&self) {
        let mut held = self.shared.held.subscribe();
        let all = held.wait_for(|held| self.shared.steady.iter().all(|key| held.contains(key)));
        drop(within(LONG, all).await);
    }

    /// Waits until steady keys were lost `count` times since the start of the workload.
    pub(crate) async fn wait_for_steady_losses(&self, count: usize) {
        let mut losses = self.shared.losses.subscribe();
        let steady = |loss: &&WorkloadLoss| loss.key.starts_with("steady");
        let all = losses.wait_for(|losses| losses.iter().filter(steady).count() >= count);
        drop(within(LONG, all).await);
    }

    /// Writes to the resource as a client outside the workload. Returns whether the write was
    /// accepted.
    pub(crate) fn write_as(&self, client: u32, key: &str, token: FencingToken) -> bool {
        self.shared.resource.write(&self.shared.recorder, client, key, token)
    }

    /// Returns the recorder, for other clients of the same keys.
    pub(crate) fn recorder(&self) -> &Recorder {
        &self.shared.recorder
    }

    /// Stops the workload after all faults have ended. Asserts that a new client acquires every key
    /// within a lease, that all locks are released, and that no keys remain in the cluster of
    /// `server`.
    pub(crate) async fn finish(self, server: &EtcdServer) -> WorkloadOutcome {
        self.finish_with(server, Vec::new()).await
    }

    /// Like [`finish`](Self::finish), with the records of other processes.
    pub(crate) async fn finish_with(
        mut self,
        server: &EtcdServer,
        other_events: Vec<HistoryEvent>,
    ) -> WorkloadOutcome {
        self.stop.send_replace(true);
        let ended = async {
            while let Some(ended) = self.workers.join_next().await {
                ended.unwrap();
            }
        };
        within(LONG, ended).await;
        let recovered_at = Instant::now();
        let new_client = registry(&self.config, self.lease).await;
        for key in self.shared.contested.iter().chain(&self.shared.steady) {
            let recording_client = RecordingClient::new(&self.shared.recorder, 9_999);
            let lock = new_client.obtain(key);
            let acquiring = recording_client.lock_with(&lock, LockOptions::new());
            let guard = within(self.lease + secs(15), acquiring).await.unwrap().unwrap();
            self.shared.write(9_999, &guard);
            guard.unlock().await.unwrap();
        }
        let reacquired_after = recovered_at.elapsed();
        self.registries.push(new_client);
        for registry in &self.registries {
            let report = registry.close(LONG).await;
            assert_eq!((report.lost, registry.held()), (0, 0), "{report:?}");
        }
        drop(self.registries);
        eventually(self.lease + secs(20), async || remaining_keys(server).await).await;

        let unexpected_errors =
            self.shared.unexpected_errors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert!(
            unexpected_errors.is_empty(),
            "errors that no outage explains: {unexpected_errors:#?}"
        );
        let mut events = self.shared.recorder.events();
        events.extend(other_events);
        let errors = self.shared.errors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let losses = self.shared.losses.borrow().clone();
        let history = History::from_events(events).unwrap();
        WorkloadOutcome { history, losses, errors, reacquired_after }
    }
}

/// Returns an error with the keys that remain in the cluster of this member.
async fn remaining_keys(server: &EtcdServer) -> Result<(), String> {
    let names = server.ctl(&["get", "lock-registry/", "--prefix", "--keys-only"]).await;
    let names = names.map_err(|error| error.to_string())?;
    if names.is_empty() { Ok(()) } else { Err(format!("remaining keys: {names}")) }
}

impl SharedState {
    /// Waits until each of the keys was granted `times` more times.
    async fn wait_for_grants(&self, keys: &[&String], times: u64) {
        let mut granted = self.granted.subscribe();
        let before = granted.borrow().clone();
        let count = |counts: &BTreeMap<String, u64>, key| counts.get(key).copied().unwrap_or(0);
        let enough = |counts: &BTreeMap<String, u64>| {
            keys.iter().all(|key| count(counts, *key) >= count(&before, *key) + times)
        };
        if tokio::time::timeout(LONG, granted.wait_for(enough)).await.is_err() {
            let now = self.granted.borrow().clone();
            let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
            let last: Vec<_> = errors.iter().rev().take(5).collect();
            panic!("no progress: grants {before:?} before and {now:?} now; {last:#?}");
        }
    }

    fn write(&self, client: u32, guard: &RecordedGuard) {
        let token = guard.fencing_token();
        self.resource.write(&self.recorder, client, guard.key(), token);
    }

    fn record_loss(&self, key: &str, reason: LostReason) {
        let loss = WorkloadLoss { key: key.to_owned(), reason };
        self.losses.send_modify(|losses| losses.push(loss));
    }

    fn record_error(&self, operation: &str, error: &LockError) {
        let text = format!("{operation}: {}", error_text(error));
        let expected = match error {
            // The guard has reported the loss already, or the release detects it.
            LockError::Lost { .. } => return,
            LockError::Backend { source, .. } => source.kind() == BackendErrorKind::Transient,
            _ => false,
        };
        if !expected {
            self.unexpected_errors
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(text.clone());
        }
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }
}

/// One task of one client.
struct Client {
    shared: Arc<SharedState>,
    number: u32,
    lock: registry_core::DistributedLock,
    stop: watch::Receiver<bool>,
}

impl Client {
    /// Repeatedly acquires the key for a short time.
    async fn run_contender(mut self, pause: Duration) {
        while !*self.stop.borrow() {
            let wait = millis(rand::random_range(100..1_500));
            let hold = match rand::random_range(0..20) {
                0 => millis(rand::random_range(100..900)),
                _ => millis(rand::random_range(1..10)),
            };
            if let Some(guard) = self.acquire(wait).await {
                self.hold(guard, hold).await;
            }
            sleep(pause).await;
        }
    }

    /// Holds the key as long as possible and reacquires it after a loss.
    async fn run_holder(mut self) {
        while !*self.stop.borrow() {
            if let Some(guard) = self.acquire(secs(2)).await {
                let key = self.lock.key().to_owned();
                self.shared.held.send_modify(|held| _ = held.insert(key.clone()));
                self.hold(guard, secs(3_600)).await;
                self.shared.held.send_modify(|held| _ = held.remove(&key));
            }
        }
    }

    async fn acquire(&mut self, wait: Duration) -> Option<RecordedGuard> {
        let recording_client = RecordingClient::new(&self.shared.recorder, self.number);
        match recording_client.lock_with(&self.lock, LockOptions::new().wait(wait)).await {
            Ok(Some(guard)) => {
                self.shared.granted.send_modify(|granted| {
                    *granted.entry(self.lock.key().to_owned()).or_default() += 1;
                });
                Some(guard)
            }
            Ok(None) => None,
            Err(error) => {
                self.shared.record_error("lock", &error);
                sleep(millis(20)).await;
                None
            }
        }
    }

    /// Writes under the lock until `hold` is over, the lock is lost, or the workload ends.
    async fn hold(&mut self, guard: RecordedGuard, hold: Duration) {
        let until = Instant::now() + hold;
        let lost = guard.lost();
        tokio::pin!(lost);
        loop {
            guard.record_state();
            self.shared.write(self.number, &guard);
            let next_check = until.min(Instant::now() + CHECK_INTERVAL);
            tokio::select! {
                biased;
                reason = &mut lost => {
                    guard.record_state();
                    self.shared.record_loss(self.lock.key(), reason);
                    // Simulates a holder that ignores the loss notification.
                    self.shared.write(self.number, &guard);
                    break;
                }
                () = sleep_until(next_check) => if next_check == until { break },
                _ = self.stop.wait_for(|stop| *stop) => break,
            }
        }
        if let Err(error) = guard.unlock().await {
            self.shared.record_error("unlock", &error);
        }
    }
}
