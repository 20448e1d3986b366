//! A workload of clients that contend for a few keys during faults, and the checks of its recorded
//! history. It contains no store and no fault: tests provide the registries and cause the faults.

mod verdict;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{
    BackendErrorKind, DistributedLock, FencingToken, LockError, LockOptions, LockRegistry as _,
    LostReason, Registry,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::eventually::within;
use crate::history::{Event, History, Recorder, host_clock};
use crate::shown::error_text;
use crate::witness::{Witness, WitnessedGuard};

pub use verdict::{Outcome, Overlap};

/// A limit for any machine. Only a failing test reaches it.
pub const LONG: Duration = Duration::from_secs(60);

/// The interval at which a holder records its guard's validity and writes.
const LOOK_EACH: Duration = Duration::from_millis(25);
/// The number of keys of each kind.
const KEYS: usize = 3;

/// A lock that was lost while it was held.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Loss {
    /// The key.
    pub key: String,
    /// The reason.
    pub reason: LostReason,
    /// When the holder was notified, on the clock of [`Contest::now`].
    pub at: u64,
}

/// A workload of clients, distributed over the registries. All clients contend for some keys and
/// hold them briefly. Each other key has one permanent holder, and one client that waits for it.
#[derive(Debug)]
#[must_use = "a contest is ended, and its outcome judged"]
pub struct Contest {
    ring: Arc<Ring>,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
    stop: watch::Sender<bool>,
}

/// The state that all clients share.
struct Ring {
    recorder: Recorder,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    /// The protected resource: for each key, the newest token of a write. It rejects older tokens.
    written: Mutex<HashMap<String, FencingToken>>,
    contested: Vec<String>,
    steady: Vec<String>,
    /// The number of grants of each key.
    granted: watch::Sender<BTreeMap<String, u64>>,
    /// The keys that their permanent holders hold at present.
    held: watch::Sender<BTreeSet<String>>,
    losses: watch::Sender<Vec<Loss>>,
    errors: Mutex<Vec<String>>,
    /// Errors that no outage explains.
    wrong: Mutex<Vec<String>>,
}

impl Contest {
    /// Starts the workload and returns once all keys have been granted.
    ///
    /// # Cancel safety
    /// Dropping the future stops the workload without a verdict.
    ///
    /// # Panics
    /// Panics if a key is not granted in time.
    pub async fn begin(registries: Vec<Registry>) -> Self {
        let keys = |kind: &str| (0..KEYS).map(|number| format!("{kind}/{number}")).collect();
        let ring = Arc::new(Ring {
            recorder: Recorder::new(host_clock()),
            clock: Box::new(host_clock()),
            written: Mutex::default(),
            contested: keys("contested"),
            steady: keys("steady"),
            granted: watch::Sender::default(),
            held: watch::Sender::default(),
            losses: watch::Sender::default(),
            errors: Mutex::default(),
            wrong: Mutex::default(),
        });
        let mut workers = JoinSet::new();
        let stop = watch::Sender::new(false);
        let client = |client: usize, role: usize, key: &str| Client {
            ring: Arc::clone(&ring),
            // Each registry has its own range of 100 client numbers.
            number: u32::try_from(client % registries.len() * 100 + role).unwrap_or(u32::MAX),
            lock: registries[client % registries.len()].obtain(key),
            stop: stop.subscribe(),
        };
        // The waiters for the permanently held keys start only once each key has its holder.
        for (role, key) in ring.steady.iter().enumerate() {
            workers.spawn(client(role, 50 + role, key).holds());
        }
        ring.granted(&ring.steady, 1).await;
        for (role, key) in ring.steady.iter().enumerate() {
            workers.spawn(client(role + 1, 50 + role, key).contends(Duration::from_millis(100)));
        }
        for number in 0..registries.len() {
            for (role, key) in ring.contested.iter().enumerate() {
                // Two callers, so that the local wait queue is used as well.
                for caller in [2 * role, 2 * role + 1] {
                    workers.spawn(client(number, caller, key).contends(Duration::from_millis(1)));
                }
            }
        }
        ring.granted(&ring.contested, 1).await;
        Self { ring, registries, workers, stop }
    }

    /// Returns the current time, in nanoseconds of the history's clock.
    #[must_use]
    pub fn now(&self) -> u64 {
        (self.ring.clock)()
    }

    /// Waits until each contested key has been granted three more times.
    ///
    /// # Cancel safety
    /// Dropping the future at any time has no effect.
    ///
    /// # Panics
    /// Panics with the last errors if the grants do not occur in time.
    pub async fn goes_on(&self) {
        self.ring.granted(&self.ring.contested, 3).await;
    }

    /// Waits until all permanent holders hold their keys.
    ///
    /// # Cancel safety
    /// Dropping the future at any time has no effect.
    ///
    /// # Panics
    /// Panics if that does not happen in time.
    pub async fn steady(&self) {
        let mut held = self.ring.held.subscribe();
        let all = held.wait_for(|held| self.ring.steady.iter().all(|key| held.contains(key)));
        drop(within(LONG, all).await);
    }

    /// Waits until the permanent holders have lost at least `holds` locks since the workload
    /// started.
    ///
    /// # Cancel safety
    /// Dropping the future at any time has no effect.
    ///
    /// # Panics
    /// Panics if that does not happen in time.
    pub async fn loses_steadily(&self, holds: usize) {
        let mut losses = self.ring.losses.subscribe();
        let steady = |loss: &&Loss| self.ring.steady.contains(&loss.key);
        let all = losses.wait_for(|losses| losses.iter().filter(steady).count() >= holds);
        drop(within(LONG, all).await);
    }

    /// Returns the losses so far.
    #[must_use]
    pub fn losses(&self) -> Vec<Loss> {
        self.ring.losses.borrow().clone()
    }

    /// Writes to the resource as a client outside the workload, and returns whether the resource
    /// accepted the write.
    #[must_use]
    pub fn write_as(&self, client: u32, key: &str, token: FencingToken) -> bool {
        self.ring.write(client, key, token)
    }

    /// Returns the recorder, for other clients that use the same keys.
    #[must_use]
    pub fn recorder(&self) -> &Recorder {
        &self.ring.recorder
    }

    /// Ends the workload once all faults are repaired, and verifies that nothing remains locked.
    /// `newcomer` must acquire every key within `limit`, and all registries must release all their
    /// locks. `elsewhere` contains the events recorded by other processes.
    ///
    /// # Cancel safety
    /// Dropping the future stops the workload without a verdict.
    ///
    /// # Panics
    /// Panics if a lock remains, or if a client got an error that no outage explains.
    pub async fn end(
        mut self,
        newcomer: Registry,
        limit: Duration,
        elsewhere: Vec<Event>,
    ) -> Outcome {
        self.stop.send_replace(true);
        let ended = async {
            while let Some(ended) = self.workers.join_next().await {
                assert!(ended.is_ok(), "a client has panicked: {ended:?}");
            }
        };
        within(LONG, ended).await;
        let healed = Instant::now();
        for key in self.ring.contested.iter().chain(&self.ring.steady) {
            let witness = Witness::new(&self.ring.recorder, NEWCOMER);
            let lock = newcomer.obtain(key);
            let taken = witness.lock_with(&lock, LockOptions::new());
            match within(limit, taken).await {
                Ok(Some(guard)) => {
                    self.ring.write_under(NEWCOMER, &guard);
                    let freed = guard.unlock().await;
                    assert!(freed.is_ok(), "{key} was not given back: {freed:?}");
                }
                other => panic!("a newcomer did not get {key}: {other:?}"),
            }
        }
        let taken_after = healed.elapsed();
        self.registries.push(newcomer);
        for registry in &self.registries {
            let report = registry.close(LONG).await;
            assert_eq!((report.lost, registry.held()), (0, 0), "{report:?}");
        }
        let wrong = locked(&self.ring.wrong).clone();
        assert!(wrong.is_empty(), "errors that no outage explains: {wrong:#?}");
        let mut events = self.ring.recorder.events();
        events.extend(elsewhere);
        let history = History::from_events(events);
        let history = history.unwrap_or_else(|broken| panic!("the record is broken: {broken}"));
        let errors = locked(&self.ring.errors).clone();
        let losses = self.losses();
        let steady = self.ring.steady.clone();
        Outcome { history, losses, errors, taken_after, steady, stopped: Vec::new() }
    }
}

/// The client number of the registry that acquires all keys after the workload.
const NEWCOMER: u32 = 9_999;

impl Ring {
    /// Waits until each of `keys` has been granted `times` more times.
    async fn granted(&self, keys: &[String], times: u64) {
        let mut granted = self.granted.subscribe();
        let before = granted.borrow().clone();
        let count = |counts: &BTreeMap<String, u64>, key| counts.get(key).copied().unwrap_or(0);
        let enough = |counts: &BTreeMap<String, u64>| {
            keys.iter().all(|key| count(counts, key) >= count(&before, key) + times)
        };
        if timeout(LONG, granted.wait_for(enough)).await.is_err() {
            let now = self.granted.borrow().clone();
            let errors = locked(&self.errors);
            let last: Vec<_> = errors.iter().rev().take(5).collect();
            panic!("keys are stuck: granted {before:?} before and {now:?} now; {last:#?}");
        }
    }

    fn write(&self, client: u32, key: &str, token: FencingToken) -> bool {
        let writing = self.recorder.write(client, key, token);
        let mut written = locked(&self.written);
        let newest = written.entry(key.to_owned()).or_insert(token);
        let taken = *newest <= token;
        if taken {
            *newest = token;
            writing.accepted();
        } else {
            writing.rejected();
        }
        taken
    }

    fn write_under(&self, client: u32, guard: &WitnessedGuard) {
        let token = guard.fencing_token().expect("stores that are put to the test give tokens");
        self.write(client, guard.key(), token);
    }

    fn note_loss(&self, key: &str, reason: LostReason) {
        let loss = Loss { key: key.to_owned(), reason, at: (self.clock)() };
        self.losses.send_modify(|losses| losses.push(loss));
    }

    fn note_error(&self, doing: &str, error: &LockError) {
        let text = format!("{doing}: {}", error_text(error));
        let is_expected = match error {
            // The guard has already reported the loss, or its release detects it.
            LockError::Lost { .. } => return,
            LockError::Backend { source, .. } => source.kind() == BackendErrorKind::Transient,
            _ => false,
        };
        if !is_expected {
            locked(&self.wrong).push(text.clone());
        }
        locked(&self.errors).push(text);
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("granted", &self.granted.borrow()).finish_non_exhaustive()
    }
}

/// One caller in one registry.
struct Client {
    ring: Arc<Ring>,
    number: u32,
    lock: DistributedLock,
    stop: watch::Receiver<bool>,
}

impl Client {
    /// Acquires the key repeatedly and holds it briefly.
    async fn contends(mut self, pause: Duration) {
        while !*self.stop.borrow() {
            let wait = Duration::from_millis(fastrand::u64(100..1_500));
            let hold = match fastrand::u32(0..20) {
                0 => fastrand::u64(100..900),
                _ => fastrand::u64(1..10),
            };
            if let Some(guard) = self.take(wait).await {
                self.keep(guard, Duration::from_millis(hold)).await;
            }
            sleep(pause).await;
        }
    }

    /// Holds the key as long as possible, and reacquires it after a loss.
    async fn holds(mut self) {
        while !*self.stop.borrow() {
            if let Some(guard) = self.take(Duration::from_secs(2)).await {
                let key = self.lock.key().to_owned();
                self.ring.held.send_modify(|held| _ = held.insert(key.clone()));
                self.keep(guard, Duration::from_secs(3_600)).await;
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
                sleep(Duration::from_millis(20)).await;
                None
            }
        }
    }

    /// Works under the lock until `hold` has passed, the lock is lost, or the workload ends.
    async fn keep(&mut self, guard: WitnessedGuard, hold: Duration) {
        let until = Instant::now() + hold;
        let lost = guard.lost();
        tokio::pin!(lost);
        loop {
            guard.note();
            self.ring.write_under(self.number, &guard);
            let look = until.min(Instant::now() + LOOK_EACH);
            tokio::select! {
                biased;
                reason = &mut lost => {
                    guard.note();
                    self.ring.note_loss(self.lock.key(), reason);
                    // Simulates a holder that ignores the loss.
                    self.ring.write_under(self.number, &guard);
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
