//! What the locks are worth while the server stands still, crashes and cuts connections: clients contend meanwhile, all that happens to them is
//! recorded, and the checkers of the testkit decide. One server that keeps its data breaks no promise.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use registry_core::{
    BackendErrorKind, DistributedLock, FencingToken, LockError, LockOptions, LockRegistry, Registry,
};
use registry_testkit::check::check;
use registry_testkit::error_text;
use registry_testkit::history::{History, Recorder, host_clock};
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::within;
use registry_testkit::witness::{Witness, WitnessedGuard};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::lab::{backend, config, cut_all, server};

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);
/// Short, so that a test of a lease that ends does not take long.
const LEASE: Duration = Duration::from_secs(2);
/// How long a question may stay unanswered. Such a lease has no time for the engine's own three.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// How often a holder looks at its guard and writes.
const LOOK_EACH: Duration = Duration::from_millis(25);
const CLIENTS: u32 = 3;
const KEYS: [&str; 3] = ["a", "b", "c"];

/// Clients that contend for a few keys, each with connections of its own.
struct Contest {
    ring: Arc<Ring>,
    registries: Vec<Registry>,
    workers: JoinSet<()>,
}

/// What all clients share.
struct Ring {
    recorder: Recorder,
    /// A resource: for each key, the newest token that it was written to with. It refuses older ones.
    written: Mutex<HashMap<String, FencingToken>>,
    granted: watch::Sender<u64>,
    lost: watch::Sender<u64>,
    stop: watch::Sender<bool>,
    /// Errors that no outage explains.
    wrong: Mutex<Vec<String>>,
}

impl Contest {
    async fn begin(server: &MariaDbServer) -> Self {
        let ring = Arc::new(Ring {
            recorder: Recorder::new(host_clock()),
            written: Mutex::default(),
            granted: watch::Sender::default(),
            lost: watch::Sender::default(),
            stop: watch::Sender::new(false),
            wrong: Mutex::default(),
        });
        let (mut registries, mut workers) = (Vec::new(), JoinSet::new());
        for client in 0..CLIENTS {
            let backend = backend(config(server)).await;
            let registry = Registry::builder(Arc::new(backend)).lease(LEASE).timeout(ANSWER_LIMIT);
            let registry = registry.build().unwrap();
            for (role, key) in (0..).zip(KEYS) {
                // Two callers, so that claims are handed over inside a process as well; and some who do not let go.
                for caller in 0..3 {
                    let ring = Arc::clone(&ring);
                    let lock = registry.obtain(if caller < 2 { key } else { "steady" });
                    let number = client * 100 + role * 10 + caller;
                    workers.spawn(async move { ring.contend(&lock, number, caller == 2).await });
                }
            }
            registries.push(registry);
        }
        let contest = Self { ring, registries, workers };
        contest.goes_on().await;
        contest
    }

    /// Returns when many more grants were made.
    async fn goes_on(&self) {
        let mut granted = self.ring.granted.subscribe();
        let enough = *granted.borrow() + 15;
        drop(within(LONG, granted.wait_for(|granted| *granted >= enough)).await.unwrap());
    }

    fn losses(&self) -> u64 {
        *self.ring.lost.borrow()
    }

    /// Returns when a hold was lost after so many.
    async fn loses(&self, before: u64) {
        let mut lost = self.ring.lost.subscribe();
        drop(within(LONG, lost.wait_for(|lost| *lost > before)).await.unwrap());
    }

    /// Ends when all is well again, and judges.
    async fn end(mut self, server: &MariaDbServer) {
        self.goes_on().await;
        self.ring.stop.send_replace(true);
        while let Some(ended) = within(LONG, self.workers.join_next()).await {
            ended.unwrap();
        }
        for registry in &self.registries {
            let report = registry.close(LONG).await;
            assert_eq!((report.lost, registry.held()), (0, 0), "{report:?}");
        }
        let held = "SELECT count(*) FROM lock_registry_locks WHERE claim IS NOT NULL \
            AND until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
        assert_eq!(server.sql(held).await.unwrap(), "0", "something is left");
        let wrong = self.ring.wrong.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert!(wrong.is_empty(), "errors that no outage explains: {wrong:#?}");
        let history = History::from_events(self.ring.recorder.events()).unwrap();
        let checked = check(&history).unwrap_or_else(|violation| panic!("{violation}"));
        assert!(checked.grants >= 20 && checked.writes >= 20, "that was too little: {checked:?}");
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
                    let hold = if is_steady { 3_000 } else { fastrand::u64(1..30) };
                    self.keep(guard, client, Duration::from_millis(hold), &mut stop).await;
                }
                Ok(None) => {}
                Err(error) => {
                    self.note(&error);
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    /// Works under the lock until `hold` is over, the lock is lost, or the contest ends.
    async fn keep(
        &self,
        guard: WitnessedGuard,
        client: u32,
        hold: Duration,
        stop: &mut watch::Receiver<bool>,
    ) {
        let until = Instant::now() + hold;
        let lost = guard.lost();
        tokio::pin!(lost);
        loop {
            guard.note();
            self.write(client, &guard);
            let look = until.min(Instant::now() + LOOK_EACH);
            tokio::select! {
                biased;
                _ = &mut lost => {
                    guard.note();
                    self.lost.send_modify(|lost| *lost += 1);
                    // What a holder does who does not listen.
                    self.write(client, &guard);
                    break;
                }
                () = sleep_until(look) => if look == until { break },
                _ = stop.wait_for(|stop| *stop) => break,
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

#[tokio::test]
async fn a_server_that_stands_still_makes_no_second_holder() {
    let server = server().await;
    let contest = Contest::begin(&server).await;
    for _ in 0..2 {
        // For less than a lease,
        server.pause().unwrap();
        sleep(LEASE / 4).await;
        server.resume().unwrap();
        contest.goes_on().await;
        // and for as long as it takes until somebody has lost his.
        let before = contest.losses();
        server.pause().unwrap();
        contest.loses(before).await;
        server.resume().unwrap();
        contest.goes_on().await;
    }
    contest.end(&server).await;
}

#[tokio::test]
async fn crashes_break_no_promise() {
    let mut server = server().await;
    let contest = Contest::begin(&server).await;
    for down in [Duration::ZERO, LEASE / 2, LEASE * 3 / 2] {
        server.kill();
        sleep(down).await;
        server.start_again().await.unwrap();
        contest.goes_on().await;
    }
    contest.end(&server).await;
}

#[tokio::test]
async fn cut_connections_break_no_promise() {
    let server = server().await;
    let contest = Contest::begin(&server).await;
    for _ in 0..6 {
        cut_all(&server).await;
        contest.goes_on().await;
    }
    contest.end(&server).await;
}
