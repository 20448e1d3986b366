//! Many callers, of one key or of one key each. They cost few requests to the store and no threads,
//! and they do not block each other.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, LockBackend, LockRegistry, MemoryBackend,
    PassThroughBackend, Registry, Release, Renewal,
};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::redis::RedisServer;
use registry_testkit::zookeeper::{ZooKeeperOptions, ZooKeeperServer};
use tokio::task::JoinSet;
use tokio::time::Instant;

const CROWD: usize = 10_000;

const POLL: Duration = Duration::from_millis(250);

/// The in-process store, with a record of the request times and the concurrent requests.
#[derive(Debug)]
struct WatchedBackend {
    inner: MemoryBackend,
    requests: Mutex<Vec<Instant>>,
    at_once: Gauge,
    waiting_at_once: Gauge,
}

#[derive(Debug, Default)]
struct Gauge {
    now: AtomicUsize,
    most: AtomicUsize,
}

struct Inside<'a>(&'a Gauge);

impl Gauge {
    fn enter(&self) -> Inside<'_> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        Inside(self)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl WatchedBackend {
    fn over(inner: MemoryBackend) -> Self {
        Self {
            inner,
            requests: Mutex::default(),
            at_once: Gauge::default(),
            waiting_at_once: Gauge::default(),
        }
    }

    /// A request is not instant, as with any real store.
    async fn request(&self) -> Inside<'_> {
        self.requests.lock().unwrap().push(Instant::now());
        let inside = self.at_once.enter();
        tokio::time::sleep(Duration::from_millis(1)).await;
        inside
    }
}

#[async_trait]
impl LockBackend for WatchedBackend {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let _inside = self.request().await;
        self.inner.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let _inside = self.request().await;
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let _inside = self.request().await;
        self.inner.release(claim).await
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let _inside = self.waiting_at_once.enter();
        self.inner.wait(claim, busy).await;
    }
}

/// The number of threads of this process.
#[cfg(target_os = "linux")]
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Callers that all wait for a key that another process holds.
struct Crowd {
    callers: JoinSet<()>,
    ours: Registry,
    backend: Arc<WatchedBackend>,
    held: registry_core::LockGuard,
}

async fn crowd() -> Crowd {
    let store = MemoryBackend::new();
    let backend = Arc::new(WatchedBackend::over(store.clone()));
    let ours = Registry::builder(Arc::clone(&backend) as _).poll(POLL).build().unwrap();
    let theirs = Registry::builder(Arc::new(store)).build().unwrap();
    let held = theirs.obtain("k").lock().await.unwrap();
    let mut callers = JoinSet::new();
    for _ in 0..CROWD {
        let lock = ours.obtain("k");
        callers.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    tokio::task::yield_now().await;
    Crowd { callers, ours, backend, held }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_waiters_are_one_request_per_poll_interval() {
    let Crowd { callers: _callers, ours, backend, held } = crowd().await;
    assert_eq!(ours.slots(), 1);
    let intervals = 400;
    tokio::time::sleep(POLL * intervals).await;
    let requests = backend.requests.lock().unwrap().clone();
    // The waiters are alive and poll.
    assert!(requests.len() > 200, "{} requests in {intervals} intervals", requests.len());
    let gaps = requests.windows(2).map(|pair| pair[1] - pair[0]);
    let shortest = gaps.min().unwrap();
    assert!(shortest >= POLL, "two requests within {shortest:?}");
    assert!(held.is_held());
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_waiters_hold_one_place_at_the_store() {
    let Crowd { mut callers, ours, backend, held } = crowd().await;
    tokio::time::sleep(POLL * 40).await;
    held.unlock().await.unwrap();
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    ours.idle().await;
    assert_eq!(backend.at_once.most.load(Ordering::SeqCst), 1, "requests at once");
    assert_eq!(backend.waiting_at_once.most.load(Ordering::SeqCst), 1, "waits at once");
    // The claim is handed over from caller to caller: one acquire and one release for every 65
    // callers.
    let requests = backend.requests.lock().unwrap().len();
    assert!(requests < CROWD / 10, "{requests} requests for {CROWD} callers");
    assert_eq!((ours.slots(), ours.held()), (0, 0));
}

/// Consecutive hand-overs make other processes wait, and they save requests to the store. With
/// short work the wait is short and the saving is large.
#[tokio::test(start_paused = true)]
async fn short_work_is_handed_over_more_often_in_a_row_than_long_work() {
    for (work, handoff, at_once) in [
        (Duration::ZERO, None, 65),
        (Duration::from_millis(2), None, 33),
        (Duration::ZERO, Some(40), 41),
        (Duration::from_millis(2), Some(40), 41),
    ] {
        let backend = Arc::new(WatchedBackend::over(MemoryBackend::new()));
        let mut registry = Registry::builder(Arc::clone(&backend) as _).poll(POLL);
        if let Some(handoff) = handoff {
            registry = registry.handoff(handoff);
        }
        let registry = registry.build().unwrap();
        let mut callers = JoinSet::new();
        for _ in 0..at_once * 3 {
            let lock = registry.obtain("k");
            callers.spawn(async move {
                let guard = lock.lock().await.unwrap();
                if !work.is_zero() {
                    tokio::time::sleep(work).await;
                }
                guard.unlock().await.unwrap();
            });
        }
        callers.join_all().await;
        registry.idle().await;
        let requests = backend.requests.lock().unwrap().len();
        assert_eq!(requests, 3 * 2, "{work:?}, handoff {handoff:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ten_thousand_waiters_need_no_thread() {
    // Other tests of this process start and stop threads, so the minimum of ten measurements
    // counts.
    let fewest = (0..10)
        .map(|_| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build()
                .unwrap();
            let before = threads();
            runtime.block_on(async {
                let crowd = crowd().await;
                tokio::time::sleep(POLL).await;
                let more = threads().saturating_sub(before);
                drop(crowd);
                more
            })
        })
        .min();
    assert!(fewest.unwrap() < 100, "{fewest:?} more threads");
}

/// Only the local locks exclude these callers: the store grants every request.
#[test]
fn handles_that_come_and_go_on_all_threads_share_one_turn() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    let registry = {
        let _inside = runtime.enter();
        Registry::builder(Arc::new(PassThroughBackend::new())).build().unwrap()
    };
    let keys = ["a", "b", "c"];
    let rooms: Arc<[AtomicBool]> = keys.iter().map(|_| AtomicBool::new(false)).collect();
    let visit = {
        let (registry, rooms) = (registry.clone(), Arc::clone(&rooms));
        async move |n: usize| {
            let room = n % keys.len();
            let (one, other) = (registry.obtain(keys[room]), registry.obtain(keys[room]));
            let lock = if n.is_multiple_of(2) { one } else { other };
            let guard = lock.lock().await.unwrap();
            // The guard alone keeps the local lock alive.
            drop(lock);
            assert!(!rooms[room].swap(true, Ordering::SeqCst), "two are inside");
            if n.is_multiple_of(5) {
                tokio::task::yield_now().await;
            }
            rooms[room].store(false, Ordering::SeqCst);
            if n.is_multiple_of(3) {
                drop(guard);
            } else {
                guard.unlock().await.unwrap();
            }
        }
    };
    let tasks: Vec<_> = (0..8)
        .map(|first| {
            let visit = visit.clone();
            runtime.spawn(async move {
                for n in 0..4_000 {
                    visit(first + n).await;
                }
            })
        })
        .collect();
    thread::scope(|scope| {
        for first in 0..4 {
            let (visit, runtime) = (&visit, &runtime);
            scope.spawn(move || {
                for n in 0..4_000 {
                    runtime.block_on(visit(first + n));
                }
            });
        }
    });
    for task in tasks {
        runtime.block_on(task).unwrap();
    }
    runtime.block_on(registry.idle());
    assert_eq!((registry.slots(), registry.held()), (0, 0));
}

/// Callers of different keys, all at once, in the store of a server.
async fn different_keys_at_once_are_all_served(url: &str) {
    // An unoptimized build takes seconds for this many requests.
    let url = format!("{url}?timeout=1m");
    let registry = lock_registry::connect(&url).await.unwrap();
    let bystander = registry.obtain("bystander").lock().await.unwrap();
    let mut callers = JoinSet::new();
    for n in 0..CROWD {
        let lock = registry.obtain(&format!("orders/{n}"));
        callers.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    assert!(bystander.is_held());
    bystander.unlock().await.unwrap();
    assert!(registry.close(Duration::from_secs(60)).await.is_clean());
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_redis() {
    let server = RedisServer::start(&[]).await.unwrap();
    different_keys_at_once_are_all_served(&server.url()).await;
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_postgresql() {
    let server = PostgresServer::start().await.unwrap();
    different_keys_at_once_are_all_served(&server.url()).await;
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_mariadb() {
    let server = MariaDbServer::start().await.unwrap();
    different_keys_at_once_are_all_served(&server.url()).await;
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_zookeeper() {
    let options = ZooKeeperOptions::new().without_fsync();
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    different_keys_at_once_are_all_served(&server.url()).await;
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_etcd() {
    let server = EtcdServer::start().await.unwrap();
    different_keys_at_once_are_all_served(&server.url().replace("http", "etcd")).await;
}
