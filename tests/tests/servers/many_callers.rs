//! Ten thousand callers, of one key or of one key each. They cost few requests to the store and no
//! threads, and they do not block each other.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, LockBackend, MemoryBackend,
    PassThroughBackend, Registry, Release, Renewal,
};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::redis::RedisServer;
use registry_testkit::zookeeper::{ZooKeeperOptions, ZooKeeperServer};
use tokio::task::JoinSet;
use tokio::time::Instant;

const CALLERS: usize = 10_000;

const POLL: Duration = Duration::from_millis(250);

/// The in-process store, with a record of the request times and the concurrent requests.
#[derive(Debug)]
struct MeasuringBackend {
    inner: MemoryBackend,
    requests: Mutex<Vec<Instant>>,
    concurrent_requests: ConcurrencyGauge,
    concurrent_waits: ConcurrencyGauge,
}

#[derive(Debug, Default)]
struct ConcurrencyGauge {
    now: AtomicUsize,
    max: AtomicUsize,
}

struct GaugeEntry<'a>(&'a ConcurrencyGauge);

impl ConcurrencyGauge {
    fn enter(&self) -> GaugeEntry<'_> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.max.fetch_max(now, Ordering::SeqCst);
        GaugeEntry(self)
    }
}

impl Drop for GaugeEntry<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl MeasuringBackend {
    fn over(inner: MemoryBackend) -> Self {
        Self {
            inner,
            requests: Mutex::default(),
            concurrent_requests: ConcurrencyGauge::default(),
            concurrent_waits: ConcurrencyGauge::default(),
        }
    }

    /// Records a request, and waits 1 ms, as for a real store.
    async fn request(&self) -> GaugeEntry<'_> {
        self.requests.lock().unwrap().push(Instant::now());
        let inside = self.concurrent_requests.enter();
        tokio::time::sleep(Duration::from_millis(1)).await;
        inside
    }
}

#[async_trait]
impl LockBackend for MeasuringBackend {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let _inside = self.request().await;
        // Without confirmed wake-ups, the waiter polls at each interval.
        Ok(match self.inner.try_acquire(claim).await? {
            Attempt::Busy(busy) => Attempt::Busy(busy.without_wake_check()),
            granted => granted,
        })
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
        let _inside = self.concurrent_waits.enter();
        self.inner.wait(claim, busy).await;
    }
}

/// The number of threads of this process.
#[cfg(target_os = "linux")]
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Callers that all wait for a key that another process holds.
struct WaitingCallers {
    callers: JoinSet<()>,
    local: Registry,
    backend: Arc<MeasuringBackend>,
    held: registry_core::LockGuard,
}

async fn waiting_callers() -> WaitingCallers {
    let store = MemoryBackend::new();
    let backend = Arc::new(MeasuringBackend::over(store.clone()));
    let local = Registry::builder(Arc::clone(&backend) as _).poll(POLL).build().unwrap();
    let remote = Registry::builder(Arc::new(store)).build().unwrap();
    let held = remote.obtain("k").lock().await.unwrap();
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let lock = local.obtain("k");
        callers.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    tokio::task::yield_now().await;
    WaitingCallers { callers, local, backend, held }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_waiters_are_one_request_per_poll_interval() {
    let WaitingCallers { callers: _callers, local, backend, held } = waiting_callers().await;
    assert_eq!(local.local_locks(), 1);
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
async fn ten_thousand_waiters_have_one_claim_in_the_store() {
    let WaitingCallers { mut callers, local, backend, held } = waiting_callers().await;
    tokio::time::sleep(POLL * 40).await;
    held.unlock().await.unwrap();
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    local.idle().await;
    assert_eq!(backend.concurrent_requests.max.load(Ordering::SeqCst), 1, "requests at once");
    assert_eq!(backend.concurrent_waits.max.load(Ordering::SeqCst), 1, "waits at once");
    // The claim is handed over from caller to caller: one acquire and one release for every 65
    // callers.
    let requests = backend.requests.lock().unwrap().len();
    assert!(requests < CALLERS / 10, "{requests} requests for {CALLERS} callers");
    assert_eq!((local.local_locks(), local.held()), (0, 0));
}

/// Consecutive hand-overs make other processes wait, and they save requests to the store. With
/// short work the wait is short and the saving is large.
#[tokio::test(start_paused = true)]
async fn short_work_is_handed_over_more_often_in_a_row_than_long_work() {
    for (work, handoff, callers_per_claim) in [
        (Duration::ZERO, None, 65),
        (Duration::from_millis(2), None, 33),
        (Duration::ZERO, Some(40), 41),
        (Duration::from_millis(2), Some(40), 41),
    ] {
        let backend = Arc::new(MeasuringBackend::over(MemoryBackend::new()));
        let mut registry = Registry::builder(Arc::clone(&backend) as _).poll(POLL);
        if let Some(handoff) = handoff {
            registry = registry.handoff(handoff);
        }
        let registry = registry.build().unwrap();
        let mut callers = JoinSet::new();
        for _ in 0..callers_per_claim * 3 {
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
    let fewest_threads = (0..10)
        .map(|_| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build()
                .unwrap();
            let before = threads();
            runtime.block_on(async {
                let waiting_callers = waiting_callers().await;
                tokio::time::sleep(POLL).await;
                let more = threads().saturating_sub(before);
                drop(waiting_callers);
                more
            })
        })
        .min();
    assert!(fewest_threads.unwrap() < 100, "{fewest_threads:?} more threads");
}

/// Only the local lock excludes these callers: the store grants every request.
#[test]
fn handles_on_all_threads_share_one_local_lock() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    let registry = {
        let _inside = runtime.enter();
        Registry::builder(Arc::new(PassThroughBackend::new())).build().unwrap()
    };
    let keys = ["a", "b", "c"];
    let is_occupied: Arc<[AtomicBool]> = keys.iter().map(|_| AtomicBool::new(false)).collect();
    let lock_once = {
        let (registry, is_occupied) = (registry.clone(), Arc::clone(&is_occupied));
        async move |n: usize| {
            let key_index = n % keys.len();
            let (one, other) = (registry.obtain(keys[key_index]), registry.obtain(keys[key_index]));
            let lock = if n.is_multiple_of(2) { one } else { other };
            let guard = lock.lock().await.unwrap();
            // The guard alone keeps the local lock alive.
            drop(lock);
            assert!(
                !is_occupied[key_index].swap(true, Ordering::SeqCst),
                "two critical sections overlap"
            );
            if n.is_multiple_of(5) {
                tokio::task::yield_now().await;
            }
            is_occupied[key_index].store(false, Ordering::SeqCst);
            if n.is_multiple_of(3) {
                drop(guard);
            } else {
                guard.unlock().await.unwrap();
            }
        }
    };
    let tasks: Vec<_> = (0..8)
        .map(|first| {
            let lock_once = lock_once.clone();
            runtime.spawn(async move {
                for n in 0..4_000 {
                    lock_once(first + n).await;
                }
            })
        })
        .collect();
    thread::scope(|scope| {
        for first in 0..4 {
            let (lock_once, runtime) = (&lock_once, &runtime);
            scope.spawn(move || {
                for n in 0..4_000 {
                    runtime.block_on(lock_once(first + n));
                }
            });
        }
    });
    for task in tasks {
        runtime.block_on(task).unwrap();
    }
    runtime.block_on(registry.idle());
    assert_eq!((registry.local_locks(), registry.held()), (0, 0));
}

/// Callers of different keys, all at once, in the store of a server.
async fn assert_different_keys_are_served(url: &str) {
    // For this many requests, an unoptimized build takes seconds, and a loaded machine half a
    // minute. ZooKeeper's leases are at most half of the session.
    let session = if url.starts_with("zk:") { "&session=2m" } else { "" };
    let url = format!("{url}?timeout=1m&lease=1m{session}");
    let registry = lock_registry::connect(&url).await.unwrap();
    let other_holder = registry.obtain("other holder").lock().await.unwrap();
    let mut callers = JoinSet::new();
    for n in 0..CALLERS {
        let lock = registry.obtain(&format!("orders/{n}"));
        callers.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    assert!(other_holder.is_held());
    other_holder.unlock().await.unwrap();
    assert!(registry.close(Duration::from_secs(60)).await.is_clean());
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_redis() {
    let server = RedisServer::start(&[]).await.unwrap();
    assert_different_keys_are_served(&server.url()).await;
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_postgresql() {
    let server = PostgresServer::start().await.unwrap();
    assert_different_keys_are_served(&server.url()).await;
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_mariadb() {
    let server = MariaDbServer::start().await.unwrap();
    assert_different_keys_are_served(&server.url()).await;
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_zookeeper() {
    let options = ZooKeeperOptions::new().without_fsync();
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    assert_different_keys_are_served(&server.url()).await;
}

#[tokio::test]
async fn ten_thousand_callers_of_different_keys_are_served_by_etcd() {
    let server = EtcdServer::start().await.unwrap();
    assert_different_keys_are_served(&server.url().replace("http", "etcd")).await;
}
