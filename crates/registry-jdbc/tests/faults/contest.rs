//! Clients that compete for a few keys while a fault occurs. The tests inject the faults, and
//! `verdict` evaluates the results.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use registry_core::{
    BackendErrorKind, DistributedLock, FencingToken, LockError, LockOptions, LockRegistry, Registry,
};
use registry_testkit::history::{Event, History, Recorder, host_clock};
use registry_testkit::witness::{Witness, WitnessedGuard};
use registry_testkit::{error_text, eventually, within};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::server::{LONG, Mode, Server, registry_in};
use crate::verdict::Outcome;

/// A short lease, so that tests in which a lease expires are fast.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// The interval at which a holder checks its guard and writes.
const LOOK_EACH: Duration = Duration::from_millis(25);
/// The default number of clients.
const CLIENTS: usize = 3;
pub(crate) const KEYS: [&str; 3] = ["a", "b", "c"];
/// The key of the long holds.
const STEADY: &str = "steady";

/// Competing clients, each with its own connections.
pub(crate) struct Contest {
    mode: Mode,
    ring: Arc<Ring>,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
}

/// The state that all clients share.
struct Ring {
    recorder: Recorder,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    /// A resource: the newest token of a write, by key. It rejects older tokens.
    written: Mutex<HashMap<String, FencingToken>>,
    granted: watch::Sender<u64>,
    lost: watch::Sender<u64>,
    steady: watch::Sender<Steady>,
    stop: watch::Sender<bool>,
    /// Errors that no outage explains.
    wrong: Mutex<Vec<String>>,
}

/// The state of the long holds.
#[derive(Debug, Default)]
struct Steady {
    /// The number of callers that hold their lock.
    holds: u32,
    /// Whether they hold the lock until they lose it.
    is_kept: bool,
}

impl Steady {
    /// Ends a hold, unless it must last until its loss. Returns whether it ended.
    fn let_go(&mut self) -> bool {
        self.holds -= u32::from(!self.is_kept);
        !self.is_kept
    }
}

impl Contest {
    /// Starts the clients, and returns after some grants.
    pub(crate) async fn begin(server: &Server) -> Self {
        Self::begin_by(&vec![server.url(); CLIENTS], LEASE).await
    }

    /// As [`begin`](Self::begin), for locks of this mode.
    pub(crate) async fn begin_in(server: &Server, mode: Mode) -> Self {
        Self::begin_as(&vec![server.url(); CLIENTS], LEASE, mode).await
    }

    /// As [`begin`](Self::begin), with one URL for each client.
    pub(crate) async fn begin_by(ways: &[String], lease: Duration) -> Self {
        Self::begin_as(ways, lease, Mode::Lease).await
    }

    async fn begin_as(ways: &[String], lease: Duration, mode: Mode) -> Self {
        let ring = Arc::new(Ring {
            recorder: Recorder::new(host_clock()),
            clock: Box::new(host_clock()),
            written: Mutex::default(),
            granted: watch::Sender::default(),
            lost: watch::Sender::default(),
            steady: watch::Sender::default(),
            stop: watch::Sender::new(false),
            wrong: Mutex::default(),
        });
        let (mut registries, mut workers) = (Vec::new(), JoinSet::new());
        for (client, way) in (0..).zip(ways) {
            let registry = registry_in(way, lease, mode).await;
            for (role, key) in (0..).zip(KEYS) {
                // Two callers, so that claims are also handed over locally, and one caller with
                // long holds.
                for caller in 0..3 {
                    let ring = Arc::clone(&ring);
                    let lock = registry.obtain(if caller < 2 { key } else { STEADY });
                    let number = client * 100 + role * 10 + caller;
                    workers.spawn(async move { ring.contend(&lock, number, caller == 2).await });
                }
            }
            registries.push(registry);
        }
        let contest = Self { mode, ring, registries, workers };
        contest.goes_on().await;
        contest
    }

    /// The current time in nanoseconds of the history's clock.
    pub(crate) fn now(&self) -> u64 {
        (self.ring.clock)()
    }

    /// The time `span` from now.
    pub(crate) fn after(&self, span: Duration) -> u64 {
        self.now() + u64::try_from(span.as_nanos()).unwrap()
    }

    /// Waits until 15 more grants have been recorded.
    pub(crate) async fn goes_on(&self) {
        let mut granted = self.ring.granted.subscribe();
        let enough = *granted.borrow() + 15;
        drop(within(LONG, granted.wait_for(|granted| *granted >= enough)).await.unwrap());
    }

    /// Waits until a client holds a lock that it keeps until its loss. A fault after that costs a
    /// hold, if it can. Returns the number of losses so far. Lasts until [`loses`](Self::loses).
    pub(crate) async fn holds_on(&self) -> u64 {
        let mut steady = self.ring.steady.subscribe();
        self.ring.steady.send_modify(|steady| steady.is_kept = true);
        drop(within(LONG, steady.wait_for(|steady| steady.holds > 0)).await.unwrap());
        self.losses()
    }

    /// Waits until more than `before` holds have been lost.
    pub(crate) async fn loses(&self, before: u64) {
        let mut lost = self.ring.lost.subscribe();
        drop(within(LONG, lost.wait_for(|lost| *lost > before)).await.unwrap());
        self.ring.steady.send_modify(|steady| steady.is_kept = false);
    }

    fn losses(&self) -> u64 {
        *self.ring.lost.borrow()
    }

    /// Ends the contest after the faults have ended. Checks that every key is released and that a
    /// new client acquires each of them.
    pub(crate) async fn end(self, server: &Server) -> Outcome {
        self.end_with(server, Vec::new()).await
    }

    /// As [`end`](Self::end), with the events that clients in other processes have recorded.
    pub(crate) async fn end_with(mut self, server: &Server, elsewhere: Vec<Event>) -> Outcome {
        self.goes_on().await;
        self.ring.stop.send_replace(true);
        while let Some(ended) = within(LONG, self.workers.join_next()).await {
            ended.unwrap();
        }
        for registry in &self.registries {
            let report = registry.close(LONG).await;
            assert_eq!((report.lost, registry.held()), (0, 0), "{report:?}");
        }
        // After a grant of unknown outcome, or a release that a crash undid, the key is free at the
        // end of the lease.
        eventually(LEASE + Duration::from_secs(20), async || server.held().await == "0").await;
        let newcomer = registry_in(&server.url(), LEASE, self.mode).await;
        for key in KEYS.into_iter().chain([STEADY]) {
            let witness = Witness::new(&self.ring.recorder, 9_999);
            let lock = newcomer.obtain(key);
            let taken = witness.lock_with(&lock, LockOptions::new());
            let guard = within(LONG, taken).await.unwrap().unwrap();
            self.ring.write(9_999, &guard);
            guard.unlock().await.unwrap();
        }
        newcomer.close(LONG).await;
        let wrong = self.ring.wrong.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert!(wrong.is_empty(), "errors that no outage explains: {wrong:#?}");
        let losses = self.losses();
        let events = self.ring.recorder.events().into_iter().chain(elsewhere);
        Outcome { history: History::from_events(events).unwrap(), losses }
    }
}

impl Ring {
    /// Acquires the key repeatedly, for a few milliseconds or as a long hold.
    async fn contend(&self, lock: &DistributedLock, client: u32, is_steady: bool) {
        let mut stop = self.stop.subscribe();
        let witness = Witness::new(&self.recorder, client);
        while !*stop.borrow() {
            let wait = Duration::from_millis(fastrand::u64(100..1_500));
            match witness.lock_with(lock, LockOptions::new().wait(wait)).await {
                Ok(Some(guard)) => {
                    self.granted.send_modify(|granted| *granted += 1);
                    self.keep(guard, client, is_steady, &mut stop).await;
                }
                Ok(None) => {}
                Err(error) => {
                    self.note(&error);
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    /// Works under the lock until it has been held long enough, it is lost, or the contest ends.
    async fn keep(
        &self,
        guard: WitnessedGuard,
        client: u32,
        is_steady: bool,
        stop: &mut watch::Receiver<bool>,
    ) {
        let hold = if is_steady { 3_000 } else { fastrand::u64(1..30) };
        let until = Instant::now() + Duration::from_millis(hold);
        self.steady.send_modify(|steady| steady.holds += u32::from(is_steady));
        let has_ended = || self.steady.send_modify(|steady| steady.holds -= u32::from(is_steady));
        let lost = guard.lost();
        tokio::pin!(lost);
        loop {
            guard.note();
            self.write(client, &guard);
            let now = Instant::now();
            if now >= until && (!is_steady || self.steady.send_if_modified(Steady::let_go)) {
                break;
            }
            let look = now + LOOK_EACH;
            let look = if now < until { look.min(until) } else { look };
            tokio::select! {
                biased;
                _ = &mut lost => {
                    guard.note();
                    self.lost.send_modify(|lost| *lost += 1);
                    // Writes like a holder that ignores its loss notification.
                    self.write(client, &guard);
                    has_ended();
                    break;
                }
                () = sleep_until(look) => {}
                _ = stop.wait_for(|stop| *stop) => {
                    has_ended();
                    break;
                }
            }
        }
        if let Err(error) = guard.unlock().await {
            self.note(&error);
        }
    }

    fn write(&self, client: u32, guard: &WitnessedGuard) {
        let token = guard.fencing_token().unwrap();
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

    fn note(&self, error: &LockError) {
        let is_expected = match error {
            LockError::Lost { .. } => true,
            LockError::Backend { source, .. } => source.kind() == BackendErrorKind::Transient,
            _ => false,
        };
        if !is_expected {
            let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
            wrong.push(error_text(error));
        }
    }
}
