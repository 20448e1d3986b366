//! Clients that contend for a few keys while something goes wrong. Knows no fault: the tests make those. See `verdict` for what it was worth.

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

/// Short, so that a test of a lease that ends does not take long.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// How often a holder looks at its guard and writes.
const LOOK_EACH: Duration = Duration::from_millis(25);
/// How many clients there are unless a test says otherwise.
const CLIENTS: usize = 3;
pub(crate) const KEYS: [&str; 3] = ["a", "b", "c"];
/// The key of those who do not let go soon.
const STEADY: &str = "steady";

/// Clients that contend, each with connections of its own.
pub(crate) struct Contest {
    mode: Mode,
    ring: Arc<Ring>,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
}

/// What all clients share.
struct Ring {
    recorder: Recorder,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    /// A resource: for each key, the newest token that it was written to with. It refuses older ones.
    written: Mutex<HashMap<String, FencingToken>>,
    granted: watch::Sender<u64>,
    lost: watch::Sender<u64>,
    steady: watch::Sender<Steady>,
    stop: watch::Sender<bool>,
    /// Errors that no outage explains.
    wrong: Mutex<Vec<String>>,
}

/// Those who do not let go soon.
#[derive(Debug, Default)]
struct Steady {
    /// How many have their lock.
    holds: u32,
    /// Whether they have it until they lose it.
    is_kept: bool,
}

impl Steady {
    /// Ends a hold, if it may end.
    fn let_go(&mut self) -> bool {
        self.holds -= u32::from(!self.is_kept);
        !self.is_kept
    }
}

impl Contest {
    /// Begins, and returns when there were some grants.
    pub(crate) async fn begin(server: &Server) -> Self {
        Self::begin_by(&vec![server.url(); CLIENTS], LEASE).await
    }

    /// As [`begin`](Self::begin), for locks of this mode.
    pub(crate) async fn begin_in(server: &Server, mode: Mode) -> Self {
        Self::begin_as(&vec![server.url(); CLIENTS], LEASE, mode).await
    }

    /// As [`begin`](Self::begin), with a way to the server for each client.
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
                // Two callers, so that claims are handed over inside a process as well; and some who do not let go.
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

    /// This moment, in nanoseconds of the history's clock.
    pub(crate) fn now(&self) -> u64 {
        (self.ring.clock)()
    }

    /// So long after this moment.
    pub(crate) fn after(&self, span: Duration) -> u64 {
        self.now() + u64::try_from(span.as_nanos()).unwrap()
    }

    /// Returns when many more grants were made.
    pub(crate) async fn goes_on(&self) {
        let mut granted = self.ring.granted.subscribe();
        let enough = *granted.borrow() + 15;
        drop(within(LONG, granted.wait_for(|granted| *granted >= enough)).await.unwrap());
    }

    /// Returns when there is somebody who has a lock and does not let go of it before it is lost: what happens next costs a hold, if it can.
    /// Tells how many were lost so far. Goes on until [`loses`](Self::loses).
    pub(crate) async fn holds_on(&self) -> u64 {
        let mut steady = self.ring.steady.subscribe();
        self.ring.steady.send_modify(|steady| steady.is_kept = true);
        drop(within(LONG, steady.wait_for(|steady| steady.holds > 0)).await.unwrap());
        self.losses()
    }

    /// Returns when a hold was lost after so many.
    pub(crate) async fn loses(&self, before: u64) {
        let mut lost = self.ring.lost.subscribe();
        drop(within(LONG, lost.wait_for(|lost| *lost > before)).await.unwrap());
        self.ring.steady.send_modify(|steady| steady.is_kept = false);
    }

    fn losses(&self) -> u64 {
        *self.ring.lost.borrow()
    }

    /// Ends the contest when all is well again, and sees to it that nothing is left: everything is given back, and a newcomer gets every key.
    pub(crate) async fn end(self, server: &Server) -> Outcome {
        self.end_with(server, Vec::new()).await
    }

    /// As [`end`](Self::end), with what clients in other processes have recorded.
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
        // A grant of unknown outcome, or a release that a crash took back, costs its lease.
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
    /// Takes the key for moments, or for as long as it can, again and again.
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

    /// Works under the lock until it has been held long enough, is lost, or the contest ends.
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
                    // What a holder does who does not listen.
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
