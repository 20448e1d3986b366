//! A workload of clients that contend for a few keys while a test injects faults, and the recording
//! of their operations. This module injects no faults.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use registry_core::{
    BackendErrorKind, FencingToken, LockError, LockOptions, LockRegistry as _, LostReason, Registry,
};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::history::{Event, History, Recorder, host_clock};
use registry_testkit::witness::{Witness, WitnessedGuard};
use registry_testkit::{error_text, eventually, within};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::verdict::Outcome;

/// Sufficient on any machine; reached only by a failing test.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Short, so that tests of expiring leases stay fast.
pub(crate) const LEASE: Duration = Duration::from_secs(3);
/// The response timeout. So short a lease does not permit the engine's default of three seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// The default number of clients.
const CLIENTS: usize = 3;
/// How often a holder checks its guard and writes.
const LOOK_EACH: Duration = Duration::from_millis(25);

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns a registry with its own connections, like another process.
pub(crate) async fn registry(config: &EtcdConfig, lease: Duration) -> Registry {
    let config = config.clone().with_response_timeout(ANSWER_LIMIT);
    let backend = EtcdBackend::open(config).await.unwrap();
    let builder = Registry::builder(Arc::new(backend)).lease(lease);
    builder.timeout(ANSWER_LIMIT).build().unwrap()
}

/// A resource that stores the newest token of each key and refuses writes with older ones.
#[derive(Debug, Default)]
pub(crate) struct Resource(Mutex<HashMap<String, FencingToken>>);

impl Resource {
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
        let taken = *known <= token;
        if taken {
            *known = token;
            writing.accepted();
        } else {
            writing.rejected();
        }
        taken
    }
}

/// A hold that ended without a release.
#[derive(Debug, Clone)]
pub(crate) struct Loss {
    pub(crate) key: String,
    pub(crate) reason: LostReason,
}

/// A workload. All clients acquire the contested keys for short times. Each steady key is held
/// permanently by one client, and another client waits for it.
pub(crate) struct Contest {
    ring: Arc<Ring>,
    config: EtcdConfig,
    lease: Duration,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
    stop: watch::Sender<bool>,
}

/// The state that all clients share.
struct Ring {
    recorder: Recorder,
    resource: Resource,
    contested: Vec<String>,
    steady: Vec<String>,
    /// The number of grants of each key.
    granted: watch::Sender<BTreeMap<String, u64>>,
    /// The steady keys that are held now.
    held: watch::Sender<BTreeSet<String>>,
    losses: watch::Sender<Vec<Loss>>,
    errors: Mutex<Vec<String>>,
    /// Errors that no outage explains.
    wrong: Mutex<Vec<String>>,
}

/// The keys of a workload.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    pub(crate) contested: Vec<String>,
    pub(crate) steady: Vec<String>,
}

impl Default for Keys {
    fn default() -> Self {
        let keys = |kind: &str| (0..3).map(|number| format!("{kind}/{number}")).collect();
        Self { contested: keys("contested"), steady: keys("steady") }
    }
}

impl Contest {
    /// Starts the workload and waits until each key was granted.
    pub(crate) async fn begin(config: &EtcdConfig) -> Self {
        Self::begin_with(&vec![config.clone(); CLIENTS], config, Keys::default(), LEASE).await
    }

    /// Like [`begin`](Self::begin), with one configuration per client. `direct` reaches the members
    /// without a proxy.
    pub(crate) async fn begin_with(
        ways: &[EtcdConfig],
        direct: &EtcdConfig,
        keys: Keys,
        lease: Duration,
    ) -> Self {
        let Keys { contested, steady } = keys;
        let ring = Arc::new(Ring {
            recorder: Recorder::new(host_clock()),
            resource: Resource::default(),
            contested,
            steady,
            granted: watch::Sender::default(),
            held: watch::Sender::default(),
            losses: watch::Sender::default(),
            errors: Mutex::default(),
            wrong: Mutex::default(),
        });
        let mut registries = Vec::new();
        for way in ways {
            registries.push(registry(way, lease).await);
        }
        let mut workers = JoinSet::new();
        let stop = watch::Sender::new(false);
        let client = |number: usize, role: usize, key: &str| Client {
            ring: Arc::clone(&ring),
            number: u32::try_from(number % ways.len() * 100 + role).unwrap(),
            lock: registries[number % ways.len()].obtain(key),
            stop: stop.subscribe(),
        };
        // A second client contends for a steady key only after its first grant.
        for (role, key) in ring.steady.iter().enumerate() {
            workers.spawn(client(role, 50 + role, key).holds());
        }
        ring.granted(&ring.steady.iter().collect::<Vec<_>>(), 1).await;
        for (role, key) in ring.steady.iter().enumerate() {
            workers.spawn(client(role + 1, 50 + role, key).contends(millis(100)));
        }
        for number in 0..ways.len() {
            for (role, key) in ring.contested.iter().enumerate() {
                workers.spawn(client(number, 2 * role, key).contends(millis(1)));
                workers.spawn(client(number, 2 * role + 1, key).contends(millis(1)));
            }
        }
        ring.granted(&ring.contested.iter().collect::<Vec<_>>(), 1).await;
        Self { ring, config: direct.clone(), lease, registries, workers, stop }
    }

    /// Waits until each contested key was granted three more times.
    pub(crate) async fn goes_on(&self) {
        self.goes_on_with(&self.ring.contested.iter().collect::<Vec<_>>()).await;
    }

    /// Waits until each of these keys was granted three more times.
    pub(crate) async fn goes_on_with(&self, keys: &[&String]) {
        self.ring.granted(keys, 3).await;
    }

    /// Waits until all steady keys are held.
    pub(crate) async fn steady(&self) {
        let mut held = self.ring.held.subscribe();
        let all = held.wait_for(|held| self.ring.steady.iter().all(|key| held.contains(key)));
        drop(within(LONG, all).await);
    }

    /// Waits until steady keys were lost `holds` times since the start of the workload.
    pub(crate) async fn loses_steadily(&self, holds: usize) {
        let mut losses = self.ring.losses.subscribe();
        let steady = |loss: &&Loss| loss.key.starts_with("steady");
        let all = losses.wait_for(|losses| losses.iter().filter(steady).count() >= holds);
        drop(within(LONG, all).await);
    }

    /// Writes to the resource as a client outside the workload. Returns whether the write was
    /// accepted.
    pub(crate) fn write_as(&self, client: u32, key: &str, token: FencingToken) -> bool {
        self.ring.resource.write(&self.ring.recorder, client, key, token)
    }

    /// Returns the recorder, for other clients of the same keys.
    pub(crate) fn recorder(&self) -> &Recorder {
        &self.ring.recorder
    }

    /// Stops the workload after all faults have ended. Asserts that a new client acquires every key
    /// within a lease, that all locks are released, and that the cluster of `server` holds no lock
    /// any more.
    pub(crate) async fn end(self, server: &EtcdServer) -> Outcome {
        self.end_with(server, Vec::new()).await
    }

    /// Like [`end`](Self::end), with the records of other processes.
    pub(crate) async fn end_with(
        mut self,
        server: &EtcdServer,
        events_elsewhere: Vec<Event>,
    ) -> Outcome {
        self.stop.send_replace(true);
        let ended = async {
            while let Some(ended) = self.workers.join_next().await {
                ended.unwrap();
            }
        };
        within(LONG, ended).await;
        let healed = Instant::now();
        let newcomer = registry(&self.config, self.lease).await;
        for key in self.ring.contested.iter().chain(&self.ring.steady) {
            let witness = Witness::new(&self.ring.recorder, 9_999);
            let lock = newcomer.obtain(key);
            let taken = witness.lock_with(&lock, LockOptions::new());
            let guard = within(self.lease + secs(15), taken).await.unwrap().unwrap();
            self.ring.write(9_999, &guard);
            guard.unlock().await.unwrap();
        }
        let taken_after = healed.elapsed();
        self.registries.push(newcomer);
        for registry in &self.registries {
            let report = registry.close(LONG).await;
            assert_eq!((report.lost, registry.held()), (0, 0), "{report:?}");
        }
        drop(self.registries);
        eventually(self.lease + secs(20), async || left_over(server).await).await;

        let wrong = self.ring.wrong.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert!(wrong.is_empty(), "errors that no outage explains: {wrong:#?}");
        let mut events = self.ring.recorder.events();
        events.extend(events_elsewhere);
        let errors = self.ring.errors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let losses = self.ring.losses.borrow().clone();
        let history = History::from_events(events).unwrap();
        Outcome { history, losses, errors, taken_after }
    }
}

/// Returns an error with the keys that remain in the cluster of this member.
async fn left_over(server: &EtcdServer) -> Result<(), String> {
    let names = server.ctl(&["get", "lock-registry/", "--prefix", "--keys-only"]).await;
    let names = names.map_err(|error| error.to_string())?;
    if names.is_empty() { Ok(()) } else { Err(format!("there still are {names}")) }
}

impl Ring {
    /// Waits until each of the keys was granted `times` more times.
    async fn granted(&self, keys: &[&String], times: u64) {
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
            panic!("keys are stuck: granted {before:?} before and {now:?} now; {last:#?}");
        }
    }

    fn write(&self, client: u32, guard: &WitnessedGuard) {
        let token = guard.fencing_token().expect("etcd gives tokens");
        self.resource.write(&self.recorder, client, guard.key(), token);
    }

    fn note_loss(&self, key: &str, reason: LostReason) {
        let loss = Loss { key: key.to_owned(), reason };
        self.losses.send_modify(|losses| losses.push(loss));
    }

    fn note_error(&self, doing: &str, error: &LockError) {
        let text = format!("{doing}: {}", error_text(error));
        let expected = match error {
            // The guard has reported the loss already, or the release detects it.
            LockError::Lost { .. } => return,
            LockError::Backend { source, .. } => source.kind() == BackendErrorKind::Transient,
            _ => false,
        };
        if !expected {
            self.wrong.lock().unwrap_or_else(PoisonError::into_inner).push(text.clone());
        }
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }
}

/// One caller of one client.
struct Client {
    ring: Arc<Ring>,
    number: u32,
    lock: registry_core::DistributedLock,
    stop: watch::Receiver<bool>,
}

impl Client {
    /// Repeatedly acquires the key for a short time.
    async fn contends(mut self, pause: Duration) {
        while !*self.stop.borrow() {
            let wait = millis(rand::random_range(100..1_500));
            let hold = match rand::random_range(0..20) {
                0 => millis(rand::random_range(100..900)),
                _ => millis(rand::random_range(1..10)),
            };
            if let Some(guard) = self.take(wait).await {
                self.keep(guard, hold).await;
            }
            sleep(pause).await;
        }
    }

    /// Holds the key as long as possible and reacquires it after a loss.
    async fn holds(mut self) {
        while !*self.stop.borrow() {
            if let Some(guard) = self.take(secs(2)).await {
                let key = self.lock.key().to_owned();
                self.ring.held.send_modify(|held| _ = held.insert(key.clone()));
                self.keep(guard, secs(3_600)).await;
                self.ring.held.send_modify(|held| _ = held.remove(&key));
            }
        }
    }

    async fn take(&mut self, wait: Duration) -> Option<WitnessedGuard> {
        let witness = Witness::new(&self.ring.recorder, self.number);
        match witness.lock_with(&self.lock, LockOptions::new().wait(wait)).await {
            Ok(Some(guard)) => {
                self.ring.granted.send_modify(|granted| {
                    *granted.entry(self.lock.key().to_owned()).or_default() += 1;
                });
                Some(guard)
            }
            Ok(None) => None,
            Err(error) => {
                self.ring.note_error("lock", &error);
                sleep(millis(20)).await;
                None
            }
        }
    }

    /// Writes under the lock until `hold` is over, the lock is lost, or the workload ends.
    async fn keep(&mut self, guard: WitnessedGuard, hold: Duration) {
        let until = Instant::now() + hold;
        let lost = guard.lost();
        tokio::pin!(lost);
        loop {
            guard.note();
            self.ring.write(self.number, &guard);
            let look = until.min(Instant::now() + LOOK_EACH);
            tokio::select! {
                biased;
                reason = &mut lost => {
                    guard.note();
                    self.ring.note_loss(self.lock.key(), reason);
                    // Simulates a holder that ignores the loss notification.
                    self.ring.write(self.number, &guard);
                    break;
                }
                () = sleep_until(look) => if look == until { break },
                _ = self.stop.wait_for(|stop| *stop) => break,
            }
        }
        if let Err(error) = guard.unlock().await {
            self.ring.note_error("unlock", &error);
        }
    }
}
