//! A workload of clients that contend for a few keys during faults, and the checks of its recorded
//! history. Tests provide the registries and cause the faults. `faults` contains the faults that
//! the tests of several stores share.

mod faults;
mod outcome;
mod suspended;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{
    BackendErrorKind, DistributedLock, FencingToken, LockError, LockOptions, LostReason, Registry,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::error_text::error_text;
use crate::eventually::within;
use crate::history::{History, HistoryEvent, Recorder, Window, host_clock};
use crate::recording_client::{RecordedGuard, RecordingClient};

pub use faults::{assert_releases_without_reply_free_their_keys, end_acquisition_without_reply};
pub use outcome::{ValidityOverlap, WorkloadOutcome};
pub use suspended::assert_a_suspended_holder_is_replaced;

/// A limit for any machine. Only a failing test reaches it.
pub const LONG: Duration = Duration::from_secs(60);

/// The interval at which a holder records its guard's validity and writes.
const CHECK_INTERVAL: Duration = Duration::from_millis(25);
/// The number of keys of each kind.
const KEYS: usize = 3;
/// The client numbers of registry N begin at N times this number.
const CLIENT_NUMBERS_PER_REGISTRY: u32 = 100;

/// A lock that was lost while it was held.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RecordedLoss {
    /// The key.
    pub key: String,
    /// The reason.
    pub reason: LostReason,
    /// When the holder was notified, on the clock of [`Workload::now`].
    pub at: u64,
}

/// What a workload uses, and what its checks may assume about the store.
#[derive(Debug, Clone)]
pub struct WorkloadOptions {
    contested: Vec<String>,
    long_held: Vec<String>,
    is_queued: bool,
    hand_overs: u32,
}

impl Default for WorkloadOptions {
    fn default() -> Self {
        let keys = |kind: &str| (0..KEYS).map(|number| format!("{kind}/{number}")).collect();
        let (contested, long_held) = (keys("contested"), keys("steady"));
        Self { contested, long_held, is_queued: false, hand_overs: 0 }
    }
}

impl WorkloadOptions {
    /// Creates options with three keys of each kind, for a store without a queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the keys that clients of all registries contend for, and those with permanent holders.
    #[must_use]
    pub fn keys(mut self, contested: Vec<String>, long_held: Vec<String>) -> Self {
        (self.contested, self.long_held) = (contested, long_held);
        self
    }

    /// Expects the busy answers of a store with a queue: see [`check_queued`].
    ///
    /// [`check_queued`]: crate::check::check_queued
    #[must_use]
    pub fn queued(mut self) -> Self {
        self.is_queued = true;
        self
    }

    /// Sets the maximum number of consecutive hand-overs of a grant.
    /// [`WorkloadOutcome::assert_guarantees_except_in`] then tolerates hand-overs of lost grants in
    /// its windows.
    #[must_use]
    pub fn hand_overs(mut self, times: u32) -> Self {
        self.hand_overs = times;
        self
    }
}

/// A resource that stores the newest token of each key and rejects writes with older tokens.
#[derive(Debug, Default)]
pub struct FencedResource(Mutex<HashMap<String, FencingToken>>);

impl FencedResource {
    /// Writes, records the write, and returns whether the resource accepted it.
    pub fn write(&self, recorder: &Recorder, client: u32, key: &str, token: FencingToken) -> bool {
        let writing = recorder.write(client, key, token);
        let mut newest_tokens = locked(&self.0);
        let newest = newest_tokens.entry(key.to_owned()).or_insert(token);
        let is_accepted = *newest <= token;
        if is_accepted {
            *newest = token;
            writing.accepted();
        } else {
            writing.rejected();
        }
        is_accepted
    }
}

/// A workload of clients, distributed over the registries. Two clients of each registry contend for
/// each contested key and hold it briefly. Each long-held key has one permanent holder, and one
/// client that waits for it.
#[derive(Debug)]
#[must_use = "a workload must be ended to be checked"]
pub struct Workload {
    state: Arc<SharedState>,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
    stop: watch::Sender<bool>,
}

/// The state that all clients share.
struct SharedState {
    recorder: Recorder,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    resource: FencedResource,
    options: WorkloadOptions,
    /// The number of grants of each key.
    granted: watch::Sender<BTreeMap<String, u64>>,
    /// The keys that their permanent holders hold at present.
    held: watch::Sender<BTreeSet<String>>,
    losses: watch::Sender<Vec<RecordedLoss>>,
    errors: Mutex<Vec<String>>,
    /// Errors that no outage explains.
    unexpected_errors: Mutex<Vec<String>>,
}

impl Workload {
    /// Starts the workload and returns once all keys have been granted.
    ///
    /// # Cancel safety
    /// Dropping the future stops the workload without a result.
    ///
    /// # Panics
    /// Panics if a key is not granted in time.
    pub async fn begin(registries: Vec<Registry>, options: WorkloadOptions) -> Self {
        let state = Arc::new(SharedState {
            recorder: Recorder::new(host_clock()),
            clock: Box::new(host_clock()),
            resource: FencedResource::default(),
            options,
            granted: watch::Sender::default(),
            held: watch::Sender::default(),
            losses: watch::Sender::default(),
            errors: Mutex::default(),
            unexpected_errors: Mutex::default(),
        });
        let mut workers = JoinSet::new();
        let stop = watch::Sender::new(false);
        let client = |registry: usize, caller: usize, key: &str| WorkloadClient {
            state: Arc::clone(&state),
            number: u32::try_from(
                registry % registries.len() * CLIENT_NUMBERS_PER_REGISTRY as usize + caller,
            )
            .unwrap_or(u32::MAX),
            lock: registries[registry % registries.len()].obtain(key),
            stop: stop.subscribe(),
        };
        // The waiters for the permanently held keys start only once each key has its holder.
        for (index, key) in state.options.long_held.iter().enumerate() {
            workers.spawn(client(index, 50 + index, key).hold_repeatedly());
        }
        state.wait_for_grants(&state.options.long_held, 1).await;
        for (index, key) in state.options.long_held.iter().enumerate() {
            workers.spawn(
                client(index + 1, 50 + index, key).contend_repeatedly(Duration::from_millis(100)),
            );
        }
        for registry in 0..registries.len() {
            for (index, key) in state.options.contested.iter().enumerate() {
                // Two callers, so that the local wait queue is used as well.
                for caller in [2 * index, 2 * index + 1] {
                    workers.spawn(
                        client(registry, caller, key).contend_repeatedly(Duration::from_millis(1)),
                    );
                }
            }
        }
        state.wait_for_grants(&state.options.contested, 1).await;
        Self { state, registries, workers, stop }
    }

    /// Returns the current time, in nanoseconds of the history's clock.
    #[must_use]
    pub fn now(&self) -> u64 {
        (self.state.clock)()
    }

    /// Returns the window from the time `begin` until `span` from now.
    #[must_use]
    pub fn window(&self, begin: u64, span: Duration) -> Window {
        let span = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Window::new(begin, self.now().saturating_add(span))
    }

    /// Waits until each contested key has been granted three more times.
    ///
    /// # Panics
    /// Panics with the last errors if the grants do not occur in time.
    pub async fn wait_for_progress(&self) {
        self.wait_for_progress_of(&self.state.options.contested).await;
    }

    /// Like [`wait_for_progress`](Self::wait_for_progress), for some of the contested keys.
    ///
    /// # Panics
    /// Panics with the last errors if the grants do not occur in time.
    pub async fn wait_for_progress_of(&self, keys: &[String]) {
        self.state.wait_for_grants(keys, 3).await;
    }

    /// Waits until all permanent holders hold their keys.
    ///
    /// # Panics
    /// Panics if that does not happen in time.
    pub async fn wait_until_long_held(&self) {
        let mut held = self.state.held.subscribe();
        let all =
            held.wait_for(|held| self.state.options.long_held.iter().all(|key| held.contains(key)));
        drop(within(LONG, all).await);
    }

    /// Waits until holders of the long-held keys have lost at least `minimum` locks since the
    /// workload started.
    ///
    /// # Panics
    /// Panics if that does not happen in time.
    pub async fn wait_for_long_held_losses(&self, minimum: usize) {
        let mut losses = self.state.losses.subscribe();
        let long_held = |loss: &&RecordedLoss| self.state.options.long_held.contains(&loss.key);
        let all = losses.wait_for(|losses| losses.iter().filter(long_held).count() >= minimum);
        drop(within(LONG, all).await);
    }

    /// Returns how many locks of the long-held keys have been lost so far.
    #[must_use]
    pub fn long_held_losses(&self) -> usize {
        let is_long_held = |loss: &&RecordedLoss| self.state.options.long_held.contains(&loss.key);
        self.state.losses.borrow().iter().filter(is_long_held).count()
    }

    /// Returns the losses so far.
    #[must_use]
    pub fn losses(&self) -> Vec<RecordedLoss> {
        self.state.losses.borrow().clone()
    }

    /// Returns the number of errors that callers received so far, except reports of a loss.
    #[must_use]
    pub fn errors(&self) -> usize {
        locked(&self.state.errors).len()
    }

    /// Writes to the resource as a client outside the workload, and returns whether the resource
    /// accepted the write.
    #[must_use]
    pub fn write_as(&self, client: u32, key: &str, token: FencingToken) -> bool {
        self.state.resource.write(&self.state.recorder, client, key, token)
    }

    /// Returns the recorder, for other clients that use the same keys.
    #[must_use]
    pub fn recorder(&self) -> &Recorder {
        &self.state.recorder
    }

    /// Ends the workload and verifies that nothing remains locked. `verifier` must acquire each key
    /// within `limit`, and all registries must release all their locks. The test must have repaired
    /// all faults. `other_events` contains the events recorded by other processes.
    ///
    /// # Cancel safety
    /// Dropping the future stops the workload without a result.
    ///
    /// # Panics
    /// Panics if a lock remains, if a client got an error that no outage explains, if a client has
    /// panicked or does not end in time, or if the recorded events are inconsistent.
    pub async fn end(
        mut self,
        verifier: Registry,
        limit: Duration,
        other_events: Vec<HistoryEvent>,
    ) -> WorkloadOutcome {
        self.stop.send_replace(true);
        let ended = async {
            while let Some(ended) = self.workers.join_next().await {
                assert!(ended.is_ok(), "a client has panicked: {ended:?}");
            }
        };
        within(LONG, ended).await;
        let workload_ended = Instant::now();
        let options = &self.state.options;
        for key in options.contested.iter().chain(&options.long_held) {
            let recording_client = RecordingClient::new(&self.state.recorder, VERIFIER);
            let lock = verifier.obtain(key);
            let acquired = recording_client.lock_with(&lock, LockOptions::new());
            match within(limit, acquired).await {
                Ok(Some(guard)) => {
                    self.state.write_under(VERIFIER, &guard);
                    let released = guard.unlock().await;
                    assert!(released.is_ok(), "{key} was not released: {released:?}");
                }
                other => panic!("the verifier did not acquire {key}: {other:?}"),
            }
        }
        let acquired_after = workload_ended.elapsed();
        self.registries.push(verifier);
        for registry in &self.registries {
            let report = registry.close(LONG).await;
            assert_eq!((report.lost, registry.held()), (0, 0), "{report:?}");
        }
        let unexpected_errors = locked(&self.state.unexpected_errors).clone();
        assert!(
            unexpected_errors.is_empty(),
            "errors that no outage explains: {unexpected_errors:#?}"
        );
        let mut events = self.state.recorder.events();
        events.extend(other_events);
        let history = History::from_events(events);
        let history = history.unwrap_or_else(|broken| panic!("{broken}"));
        let errors = locked(&self.state.errors).clone();
        let losses = self.losses();
        let options = self.state.options.clone();
        let paused_keys = Vec::new();
        WorkloadOutcome { history, losses, errors, acquired_after, options, paused_keys }
    }
}

/// The client number of the registry that acquires all keys after the workload.
const VERIFIER: u32 = 9_999;

impl SharedState {
    /// Waits until each of `keys` has been granted `times` more times.
    async fn wait_for_grants(&self, keys: &[String], times: u64) {
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
            panic!(
                "keys are not granted any more: granted {before:?} before and {now:?} now; {last:#?}"
            );
        }
    }

    fn write_under(&self, client: u32, guard: &RecordedGuard) {
        let token = guard.fencing_token();
        self.resource.write(&self.recorder, client, guard.key(), token);
    }

    fn note_loss(&self, key: &str, reason: LostReason) {
        let loss = RecordedLoss { key: key.to_owned(), reason, at: (self.clock)() };
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
            locked(&self.unexpected_errors).push(text.clone());
        }
        locked(&self.errors).push(text);
    }
}

impl fmt::Debug for SharedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedState")
            .field("granted", &self.granted.borrow())
            .finish_non_exhaustive()
    }
}

/// One caller in one registry.
struct WorkloadClient {
    state: Arc<SharedState>,
    number: u32,
    lock: DistributedLock,
    stop: watch::Receiver<bool>,
}

impl WorkloadClient {
    /// Acquires the key repeatedly and holds it briefly.
    async fn contend_repeatedly(mut self, pause: Duration) {
        while !*self.stop.borrow() {
            let wait = Duration::from_millis(fastrand::u64(100..1_500));
            let hold = match fastrand::u32(0..20) {
                0 => fastrand::u64(100..900),
                _ => fastrand::u64(1..10),
            };
            if let Some(guard) = self.acquire(wait).await {
                self.work_under(guard, Duration::from_millis(hold)).await;
            }
            sleep(pause).await;
        }
    }

    /// Holds the key as long as possible, and reacquires it after a loss.
    async fn hold_repeatedly(mut self) {
        while !*self.stop.borrow() {
            if let Some(guard) = self.acquire(Duration::from_secs(2)).await {
                let key = self.lock.key().to_owned();
                self.state.held.send_modify(|held| _ = held.insert(key.clone()));
                self.work_under(guard, Duration::from_secs(3_600)).await;
                self.state.held.send_modify(|held| _ = held.remove(&key));
            }
        }
    }

    async fn acquire(&mut self, wait: Duration) -> Option<RecordedGuard> {
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
                self.state.note_error("lock", &error);
                sleep(Duration::from_millis(20)).await;
                None
            }
        }
    }

    /// Works under the lock until `hold` has passed, the lock is lost, or the workload ends.
    async fn work_under(&mut self, guard: RecordedGuard, hold: Duration) {
        let until = Instant::now() + hold;
        let lost = guard.lost();
        tokio::pin!(lost);
        loop {
            guard.record_state();
            self.state.write_under(self.number, &guard);
            let next_check = until.min(Instant::now() + CHECK_INTERVAL);
            tokio::select! {
                biased;
                reason = &mut lost => {
                    guard.record_state();
                    self.state.note_loss(self.lock.key(), reason);
                    // Simulates a holder that ignores the loss.
                    self.state.write_under(self.number, &guard);
                    break;
                }
                () = sleep_until(next_check) => if next_check == until { break },
                _ = self.stop.wait_for(|stop| *stop) => break,
            }
        }
        if let Err(error) = guard.unlock().await {
            self.state.note_error("unlock", &error);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
