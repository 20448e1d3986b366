//! A workload of clients that contend for a few keys while a test injects faults, and the recording
//! of their operations. This module injects no faults.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use registry_core::{BackendErrorKind, FencingToken, LockError, LockOptions, LostReason, Registry};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::history::{History, HistoryEvent, Recorder, host_clock};
use registry_testkit::recording_client::{RecordedGuard, RecordingClient};
use registry_testkit::redis::RedisServer;
use registry_testkit::{error_text, eventually, within};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::outcome::WorkloadOutcome;

/// Sufficient on any machine; reached only by a failing test.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Short, so that tests of expiring leases stay fast.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// The response timeout. A lease of two seconds does not permit the engine's default of three.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The default number of clients.
const CLIENTS: usize = 3;
/// How many times in a row a client hands a lock over between its callers.
pub(crate) const HAND_OVERS: u32 = 2;
/// How often a holder checks its guard and writes.
const CHECK_INTERVAL: Duration = Duration::from_millis(25);

pub(crate) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns a registry with its own connections, like another process.
pub(crate) async fn registry(config: &RedisConfig, lease: Duration) -> Registry {
    let backend = RedisBackend::open(config.clone()).await.unwrap();
    let builder = Registry::builder(Arc::new(backend)).lease(lease).handoff(HAND_OVERS);
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
        let newest_token = newest.entry(key.to_owned()).or_insert(token);
        let is_accepted = *newest_token <= token;
        if is_accepted {
            *newest_token = token;
            writing.accepted();
        } else {
            writing.rejected();
        }
        is_accepted
    }
}

/// A hold that ended without a release.
#[derive(Debug, Clone)]
pub(crate) struct LockLoss {
    pub(crate) key: String,
    pub(crate) reason: LostReason,
    /// When the holder was notified, on the clock of [`Workload::now`].
    pub(crate) at: u64,
}

/// A workload. All clients acquire the contested keys for short times. Each steady key is held
/// permanently by one client, and another client waits for it.
pub(crate) struct Workload {
    state: Arc<SharedState>,
    config: RedisConfig,
    lease: Duration,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
    stop: watch::Sender<bool>,
}

/// The state that all clients share.
struct SharedState {
    recorder: Recorder,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    resource: FencedResource,
    contested: Vec<String>,
    steady: Vec<String>,
    /// The number of grants of each key.
    granted: watch::Sender<BTreeMap<String, u64>>,
    /// The steady keys that are held now.
    held: watch::Sender<BTreeSet<String>>,
    losses: watch::Sender<Vec<LockLoss>>,
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
    pub(crate) async fn start(config: &RedisConfig) -> Self {
        Self::start_with(&vec![config.clone(); CLIENTS], config, WorkloadKeys::default(), LEASE)
            .await
    }

    /// Like [`start`](Self::start), with one configuration per client. `direct` reaches the servers
    /// without a proxy.
    pub(crate) async fn start_with(
        client_configs: &[RedisConfig],
        direct: &RedisConfig,
        keys: WorkloadKeys,
        lease: Duration,
    ) -> Self {
        let WorkloadKeys { contested, steady } = keys;
        let state = Arc::new(SharedState {
            recorder: Recorder::new(host_clock()),
            clock: Box::new(host_clock()),
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
        for client_config in client_configs {
            registries.push(registry(client_config, lease).await);
        }
        let mut workers = JoinSet::new();
        let stop = watch::Sender::new(false);
        let client = |number: usize, role: usize, key: &str| WorkloadClient {
            state: Arc::clone(&state),
            number: u32::try_from(number % client_configs.len() * 100 + role).unwrap(),
            lock: registries[number % client_configs.len()].obtain(key),
            stop: stop.subscribe(),
        };
        // A second client contends for a steady key only after its first grant.
        for (role, key) in state.steady.iter().enumerate() {
            workers.spawn(client(role, 50 + role, key).run_holder());
        }
        state.wait_for_grants(&state.steady.iter().collect::<Vec<_>>(), 1).await;
        for (role, key) in state.steady.iter().enumerate() {
            workers.spawn(client(role + 1, 50 + role, key).run_contender(millis(100)));
        }
        for number in 0..client_configs.len() {
            for (role, key) in state.contested.iter().enumerate() {
                // Two callers per client, so that hand-overs within a process occur as well.
                workers.spawn(client(number, 2 * role, key).run_contender(millis(1)));
                workers.spawn(client(number, 2 * role + 1, key).run_contender(millis(1)));
            }
        }
        state.wait_for_grants(&state.contested.iter().collect::<Vec<_>>(), 1).await;
        Self { state, config: direct.clone(), lease, registries, workers, stop }
    }

    /// Returns the current time in nanoseconds on the history's clock.
    pub(crate) fn now(&self) -> u64 {
        (self.state.clock)()
    }

    /// Returns the time `span` from now.
    pub(crate) fn after(&self, span: Duration) -> u64 {
        self.now() + u64::try_from(span.as_nanos()).unwrap()
    }

    /// Waits until each contested key was granted three more times.
    pub(crate) async fn wait_for_grants(&self) {
        self.wait_for_grants_of(&self.state.contested.iter().collect::<Vec<_>>()).await;
    }

    /// Waits until each of these keys was granted three more times.
    pub(crate) async fn wait_for_grants_of(&self, keys: &[&String]) {
        self.state.wait_for_grants(keys, 3).await;
    }

    /// Waits until all steady keys are held.
    pub(crate) async fn wait_until_steady_held(&self) {
        let mut held = self.state.held.subscribe();
        let all = held.wait_for(|held| self.state.steady.iter().all(|key| held.contains(key)));
        drop(within(LONG, all).await);
    }

    /// Waits until steady keys were lost `count` times since the start of the workload.
    pub(crate) async fn wait_for_steady_losses(&self, count: usize) {
        let mut losses = self.state.losses.subscribe();
        let steady = |loss: &&LockLoss| loss.key.starts_with("steady");
        let all = losses.wait_for(|losses| losses.iter().filter(steady).count() >= count);
        drop(within(LONG, all).await);
    }

    /// Returns the losses so far.
    pub(crate) fn losses(&self) -> Vec<LockLoss> {
        self.state.losses.borrow().clone()
    }

    /// Returns the number of errors that callers received so far.
    pub(crate) fn errors(&self) -> usize {
        self.state.errors.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Writes to the resource as a client outside the workload. Returns whether the write was
    /// accepted.
    pub(crate) fn write_as(&self, client: u32, key: &str, token: FencingToken) -> bool {
        self.state.resource.write(&self.state.recorder, client, key, token)
    }

    /// Returns the recorder, for other clients of the same keys.
    pub(crate) fn recorder(&self) -> &Recorder {
        &self.state.recorder
    }

    /// Stops the workload after all faults have ended. Asserts that a new client acquires every key
    /// within a lease, that all locks are released, and that `servers`, the masters, hold no lock
    /// any more.
    pub(crate) async fn end(self, servers: &[&RedisServer]) -> WorkloadOutcome {
        self.end_with(servers, Vec::new()).await
    }

    /// Like [`end`](Self::end), with the records of other processes.
    pub(crate) async fn end_with(
        mut self,
        servers: &[&RedisServer],
        remote_events: Vec<HistoryEvent>,
    ) -> WorkloadOutcome {
        self.stop.send_replace(true);
        let ended = async {
            while let Some(ended) = self.workers.join_next().await {
                ended.unwrap();
            }
        };
        within(LONG, ended).await;
        let started_at = Instant::now();
        let new_client = registry(&self.config, self.lease).await;
        for key in self.state.contested.iter().chain(&self.state.steady) {
            let recording_client = RecordingClient::new(&self.state.recorder, 9_999);
            let lock = new_client.obtain(key);
            let acquiring = recording_client.lock_with(&lock, LockOptions::new());
            let guard = within(self.lease + secs(15), acquiring).await.unwrap().unwrap();
            self.state.write(9_999, &guard);
            guard.unlock().await.unwrap();
        }
        let acquired_after = started_at.elapsed();
        self.registries.push(new_client);
        for registry in &self.registries {
            let report = registry.close(LONG).await;
            assert_eq!((report.lost, registry.held()), (0, 0), "{report:?}");
        }
        drop(self.registries);
        eventually(self.lease + secs(20), async || check_no_locks_remain(servers).await).await;

        let unexpected_errors =
            self.state.unexpected_errors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert!(
            unexpected_errors.is_empty(),
            "errors that no outage explains: {unexpected_errors:#?}"
        );
        let mut events = self.state.recorder.events();
        events.extend(remote_events);
        let errors = self.state.errors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let losses = self.state.losses.borrow().clone();
        let history = History::from_events(events).unwrap();
        WorkloadOutcome { history, losses, errors, acquired_after }
    }
}

/// Returns an error with the locks that remain on the servers.
async fn check_no_locks_remain(servers: &[&RedisServer]) -> Result<(), String> {
    for server in servers {
        let names =
            server.send_command_args(&["KEYS", "*"]).await.map_err(|error| error.to_string())?;
        let names = names.items().iter().filter_map(|name| name.text());
        let is_lock = |name: &String| !name.ends_with("}:token") && !name.ends_with("{}:age");
        let locks: Vec<String> = names.filter(is_lock).collect();
        if !locks.is_empty() {
            return Err(format!("{} still has {locks:?}", server.addr()));
        }
    }
    Ok(())
}

impl SharedState {
    /// Waits until each of the keys was granted `times` more times.
    async fn wait_for_grants(&self, keys: &[&String], times: u64) {
        let mut granted = self.granted.subscribe();
        let before = granted.borrow().clone();
        let count = |counts: &BTreeMap<String, u64>, key| counts.get(key).copied().unwrap_or(0);
        let is_reached = |counts: &BTreeMap<String, u64>| {
            keys.iter().all(|key| count(counts, *key) >= count(&before, *key) + times)
        };
        if tokio::time::timeout(LONG, granted.wait_for(is_reached)).await.is_err() {
            let now = self.granted.borrow().clone();
            let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
            let last: Vec<_> = errors.iter().rev().take(5).collect();
            panic!("keys are stuck: granted {before:?} before and {now:?} now; {last:#?}");
        }
    }

    fn write(&self, client: u32, guard: &RecordedGuard) {
        let token = guard.fencing_token();
        self.resource.write(&self.recorder, client, guard.key(), token);
    }

    fn record_loss(&self, key: &str, reason: LostReason) {
        let loss = LockLoss { key: key.to_owned(), reason, at: (self.clock)() };
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

/// One caller of one client.
struct WorkloadClient {
    state: Arc<SharedState>,
    number: u32,
    lock: registry_core::DistributedLock,
    stop: watch::Receiver<bool>,
}

impl WorkloadClient {
    /// Repeatedly acquires the key for a short time.
    async fn run_contender(mut self, pause: Duration) {
        while !*self.stop.borrow() {
            let wait = millis(rand::random_range(100..1_500));
            let hold = match rand::random_range(0..20) {
                0 => millis(rand::random_range(100..900)),
                _ => millis(rand::random_range(1..10)),
            };
            if let Some(guard) = self.try_acquire(wait).await {
                self.hold_for(guard, hold).await;
            }
            sleep(pause).await;
        }
    }

    /// Holds the key as long as possible and reacquires it after a loss.
    async fn run_holder(mut self) {
        while !*self.stop.borrow() {
            if let Some(guard) = self.try_acquire(secs(2)).await {
                let key = self.lock.key().to_owned();
                self.state.held.send_modify(|held| _ = held.insert(key.clone()));
                self.hold_for(guard, secs(3_600)).await;
                self.state.held.send_modify(|held| _ = held.remove(&key));
            }
        }
    }

    async fn try_acquire(&mut self, wait: Duration) -> Option<RecordedGuard> {
        let recording_client = RecordingClient::new(&self.state.recorder, self.number);
        match recording_client.lock_with(&self.lock, LockOptions::new().wait(wait)).await {
            Ok(Some(guard)) => {
                self.state.granted.send_modify(|granted| {
                    *granted.entry(self.lock.key().to_owned()).or_default() += 1;
                });
                Some(guard)
            }
            Ok(None) => None,
            Err(error) => {
                self.state.record_error("lock", &error);
                sleep(millis(20)).await;
                None
            }
        }
    }

    /// Writes under the lock until `hold` is over, the lock is lost, or the workload ends.
    async fn hold_for(&mut self, guard: RecordedGuard, hold: Duration) {
        let until = Instant::now() + hold;
        let lost = guard.lost();
        tokio::pin!(lost);
        loop {
            guard.record_state();
            self.state.write(self.number, &guard);
            let next_check = until.min(Instant::now() + CHECK_INTERVAL);
            tokio::select! {
                biased;
                reason = &mut lost => {
                    guard.record_state();
                    self.state.record_loss(self.lock.key(), reason);
                    // Simulates a holder that ignores the loss notification.
                    self.state.write(self.number, &guard);
                    break;
                }
                () = sleep_until(next_check) => if next_check == until { break },
                _ = self.stop.wait_for(|stop| *stop) => break,
            }
        }
        if let Err(error) = guard.unlock().await {
            self.state.record_error("unlock", &error);
        }
    }
}
