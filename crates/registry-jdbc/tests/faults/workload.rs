//! Clients that compete for a few keys while a fault occurs. The tests inject the faults, and
//! `outcome` evaluates the results.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use registry_core::{
    BackendErrorKind, DistributedLock, FencingToken, LockError, LockOptions, Registry,
};
use registry_testkit::history::{History, HistoryEvent, Recorder, host_clock};
use registry_testkit::recording_client::{RecordedGuard, RecordingClient};
use registry_testkit::{error_text, eventually, within};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::outcome::WorkloadOutcome;
use crate::server::{LockMode, Server, TEST_TIMEOUT, registry_in};

/// A short lease, so that tests in which a lease expires are fast.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// The interval at which a holder checks its guard and writes.
const CHECK_INTERVAL: Duration = Duration::from_millis(25);
/// The default number of clients.
const CLIENTS: usize = 3;
pub(crate) const KEYS: [&str; 3] = ["a", "b", "c"];
/// The key of the long holds.
const LONG_HOLD_KEY: &str = "steady";

/// Competing clients, each with its own connections.
pub(crate) struct Workload {
    mode: LockMode,
    state: Arc<SharedState>,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
}

/// The state that all clients share.
struct SharedState {
    recorder: Recorder,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    /// A resource: the newest token of a write, by key. It rejects older tokens.
    written: Mutex<HashMap<String, FencingToken>>,
    granted: watch::Sender<u64>,
    lost: watch::Sender<u64>,
    long_holds: watch::Sender<LongHolds>,
    stop: watch::Sender<bool>,
    /// Errors that no outage explains.
    unexpected_errors: Mutex<Vec<String>>,
}

/// The state of the long holds.
#[derive(Debug, Default)]
struct LongHolds {
    /// The number of callers that hold their lock.
    holds: u32,
    /// Whether they hold the lock until they lose it.
    lasts_until_loss: bool,
}

impl LongHolds {
    /// Ends a hold, unless it must last until its loss. Returns whether it ended.
    fn end_hold(&mut self) -> bool {
        self.holds -= u32::from(!self.lasts_until_loss);
        !self.lasts_until_loss
    }
}

impl Workload {
    /// Starts the clients, and returns after some grants.
    pub(crate) async fn begin(server: &Server) -> Self {
        Self::begin_with_urls(&vec![server.url(); CLIENTS], LEASE).await
    }

    /// As [`begin`](Self::begin), for locks of this mode.
    pub(crate) async fn begin_with_mode(server: &Server, mode: LockMode) -> Self {
        Self::begin_clients(&vec![server.url(); CLIENTS], LEASE, mode).await
    }

    /// As [`begin`](Self::begin), with one URL for each client.
    pub(crate) async fn begin_with_urls(urls: &[String], lease: Duration) -> Self {
        Self::begin_clients(urls, lease, LockMode::Lease).await
    }

    async fn begin_clients(urls: &[String], lease: Duration, mode: LockMode) -> Self {
        let state = Arc::new(SharedState {
            recorder: Recorder::new(host_clock()),
            clock: Box::new(host_clock()),
            written: Mutex::default(),
            granted: watch::Sender::default(),
            lost: watch::Sender::default(),
            long_holds: watch::Sender::default(),
            stop: watch::Sender::new(false),
            unexpected_errors: Mutex::default(),
        });
        let (mut registries, mut workers) = (Vec::new(), JoinSet::new());
        for (client, url) in (0..).zip(urls) {
            let registry = registry_in(url, lease, mode).await;
            for (role, key) in (0..).zip(KEYS) {
                // Two callers, so that claims are also handed over locally, and one caller with
                // long holds.
                for caller in 0..3 {
                    let state = Arc::clone(&state);
                    let lock = registry.obtain(if caller < 2 { key } else { LONG_HOLD_KEY });
                    let number = client * 100 + role * 10 + caller;
                    workers
                        .spawn(async move { state.run_client(&lock, number, caller == 2).await });
                }
            }
            registries.push(registry);
        }
        let workload = Self { mode, state, registries, workers };
        workload.wait_for_grants().await;
        workload
    }

    /// The current time in nanoseconds of the history's clock.
    pub(crate) fn now(&self) -> u64 {
        (self.state.clock)()
    }

    /// The time `span` from now.
    pub(crate) fn after(&self, span: Duration) -> u64 {
        self.now() + u64::try_from(span.as_nanos()).unwrap()
    }

    /// Waits until 15 more grants have been recorded.
    pub(crate) async fn wait_for_grants(&self) {
        let mut granted = self.state.granted.subscribe();
        let enough = *granted.borrow() + 15;
        drop(within(TEST_TIMEOUT, granted.wait_for(|granted| *granted >= enough)).await.unwrap());
    }

    /// Waits until a client holds a lock that it keeps until its loss. A fault after that costs a
    /// hold, if it can. Returns the number of losses so far. Lasts until
    /// [`wait_for_loss`](Self::wait_for_loss).
    pub(crate) async fn wait_for_long_hold(&self) -> u64 {
        let mut long_holds = self.state.long_holds.subscribe();
        self.state.long_holds.send_modify(|long_holds| long_holds.lasts_until_loss = true);
        drop(
            within(TEST_TIMEOUT, long_holds.wait_for(|long_holds| long_holds.holds > 0))
                .await
                .unwrap(),
        );
        self.losses()
    }

    /// Waits until more than `before` holds have been lost.
    pub(crate) async fn wait_for_loss(&self, before: u64) {
        let mut lost = self.state.lost.subscribe();
        drop(within(TEST_TIMEOUT, lost.wait_for(|lost| *lost > before)).await.unwrap());
        self.state.long_holds.send_modify(|long_holds| long_holds.lasts_until_loss = false);
    }

    fn losses(&self) -> u64 {
        *self.state.lost.borrow()
    }

    /// Ends the workload after the faults have ended. Checks that every key is released and that a
    /// new client acquires each of them.
    pub(crate) async fn end(self, server: &Server) -> WorkloadOutcome {
        self.end_with(server, Vec::new()).await
    }

    /// As [`end`](Self::end), with the events that clients in other processes have recorded.
    pub(crate) async fn end_with(
        mut self,
        server: &Server,
        other_events: Vec<HistoryEvent>,
    ) -> WorkloadOutcome {
        self.wait_for_grants().await;
        self.state.stop.send_replace(true);
        while let Some(ended) = within(TEST_TIMEOUT, self.workers.join_next()).await {
            ended.unwrap();
        }
        for registry in &self.registries {
            let report = registry.close(TEST_TIMEOUT).await;
            assert_eq!((report.lost, registry.held()), (0, 0), "{report:?}");
        }
        // After a grant of unknown outcome, or a release that a crash undid, the key is free at the
        // end of the lease.
        eventually(LEASE + Duration::from_secs(20), async || server.held_keys().await == "0").await;
        let new_registry = registry_in(&server.url(), LEASE, self.mode).await;
        for key in KEYS.into_iter().chain([LONG_HOLD_KEY]) {
            let recording_client = RecordingClient::new(&self.state.recorder, 9_999);
            let lock = new_registry.obtain(key);
            let taken = recording_client.lock_with(&lock, LockOptions::new());
            let guard = within(TEST_TIMEOUT, taken).await.unwrap().unwrap();
            self.state.write(9_999, &guard);
            guard.unlock().await.unwrap();
        }
        _ = new_registry.close(TEST_TIMEOUT).await;
        let unexpected_errors =
            self.state.unexpected_errors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert!(
            unexpected_errors.is_empty(),
            "errors that no outage explains: {unexpected_errors:#?}"
        );
        let losses = self.losses();
        let events = self.state.recorder.events().into_iter().chain(other_events);
        WorkloadOutcome { history: History::from_events(events).unwrap(), losses }
    }
}

impl SharedState {
    /// Acquires the key repeatedly, for a few milliseconds or as a long hold.
    async fn run_client(&self, lock: &DistributedLock, client: u32, is_long: bool) {
        let mut stop = self.stop.subscribe();
        let recording_client = RecordingClient::new(&self.recorder, client);
        while !*stop.borrow() {
            let wait = Duration::from_millis(fastrand::u64(100..1_500));
            match recording_client.lock_with(lock, LockOptions::new().wait(wait)).await {
                Ok(Some(guard)) => {
                    self.granted.send_modify(|granted| *granted += 1);
                    self.hold(guard, client, is_long, &mut stop).await;
                }
                Ok(None) => {}
                Err(error) => {
                    self.record_error(&error);
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    /// Works under the lock until it has been held long enough, it is lost, or the workload ends.
    async fn hold(
        &self,
        guard: RecordedGuard,
        client: u32,
        is_long: bool,
        stop: &mut watch::Receiver<bool>,
    ) {
        let hold = if is_long { 3_000 } else { fastrand::u64(1..30) };
        let until = Instant::now() + Duration::from_millis(hold);
        self.long_holds.send_modify(|long_holds| long_holds.holds += u32::from(is_long));
        let has_ended =
            || self.long_holds.send_modify(|long_holds| long_holds.holds -= u32::from(is_long));
        let lost = guard.lost();
        tokio::pin!(lost);
        loop {
            guard.record_state();
            self.write(client, &guard);
            let now = Instant::now();
            if now >= until && (!is_long || self.long_holds.send_if_modified(LongHolds::end_hold)) {
                break;
            }
            let next_check = now + CHECK_INTERVAL;
            let next_check = if now < until { next_check.min(until) } else { next_check };
            tokio::select! {
                biased;
                _ = &mut lost => {
                    guard.record_state();
                    self.lost.send_modify(|lost| *lost += 1);
                    // Writes like a holder that ignores its loss notification.
                    self.write(client, &guard);
                    has_ended();
                    break;
                }
                () = sleep_until(next_check) => {}
                _ = stop.wait_for(|stop| *stop) => {
                    has_ended();
                    break;
                }
            }
        }
        if let Err(error) = guard.unlock().await {
            self.record_error(&error);
        }
    }

    fn write(&self, client: u32, guard: &RecordedGuard) {
        let token = guard.fencing_token();
        let writing = self.recorder.write(client, guard.key(), token);
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = written.entry(guard.key().to_owned()).or_insert(token);
        if *newest <= token {
            *newest = token;
            writing.accepted();
        } else {
            writing.rejected();
        }
    }

    fn record_error(&self, error: &LockError) {
        let is_expected = match error {
            LockError::Lost { .. } => true,
            LockError::Backend { source, .. } => source.kind() == BackendErrorKind::Transient,
            _ => false,
        };
        if !is_expected {
            let mut unexpected_errors =
                self.unexpected_errors.lock().unwrap_or_else(PoisonError::into_inner);
            unexpected_errors.push(error_text(error));
        }
    }
}
