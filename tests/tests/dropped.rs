//! Guards and incomplete futures that are dropped outside a runtime, with a runtime that shuts
//! down, after its end, and during a panic. No drop panics, and no key stays locked beyond its
//! lease. The tests watch the panics of the whole process, so they are in a binary of their own.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Once};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use futures_util::future::BoxFuture;
use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    DistributedLock, LockBackend, LockError, LockGuard, LockOptions, LockRegistryExt as _,
    LostReason, MemoryBackend, Registry,
};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

/// Longer than any test waits: a key that becomes free was released and did not expire.
const NEVER: Duration = Duration::from_secs(3_600);

/// A short lease, for claims that expire.
const SHORT: Duration = Duration::from_secs(2);

/// A store that outlives the runtimes that use it.
enum TestStore {
    Memory(MemoryBackend),
    Sqlite(tempfile::TempDir),
}

impl TestStore {
    fn all() -> [Self; 2] {
        [Self::Memory(MemoryBackend::new()), Self::Sqlite(tempfile::tempdir().unwrap())]
    }

    async fn backend(&self) -> Arc<dyn LockBackend> {
        match self {
            Self::Memory(store) => Arc::new(store.clone()),
            Self::Sqlite(folder) => {
                let config = SqliteConfig::new(folder.path().join("locks.db"));
                Arc::new(SqliteBackend::open(config).await.unwrap())
            }
        }
    }

    fn open(&self, registry_runtime: &Runtime, lease: Duration) -> Registry {
        registry_runtime.block_on(async {
            Registry::builder(self.backend().await).lease(lease).build().unwrap()
        })
    }

    /// Opens a registry over this store, behind faults.
    fn open_faulty(
        &self,
        registry_runtime: &Runtime,
        lease: Duration,
        faults: Faults,
    ) -> (Registry, Arc<FaultyBackend>) {
        registry_runtime.block_on(async {
            let faulty = Arc::new(FaultyBackend::new(self.backend().await, faults));
            let backend: Arc<dyn LockBackend> = Arc::clone(&faulty) as _;
            (Registry::builder(backend).lease(lease).build().unwrap(), faulty)
        })
    }

    /// Checks that another client, in another runtime, acquires the key.
    fn assert_free_for_others(&self) {
        let other_runtime = runtime();
        let remote = self.open(&other_runtime, LONG);
        other_runtime.block_on(async {
            let guard = remote.obtain("k").try_lock_for(LONG).await.unwrap();
            guard.expect("the key stays locked").unlock().await.unwrap();
        });
    }
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Returns the panics inside the engine, the store and the runtime. Without this check they would
/// go unnoticed, because a runtime catches the panics of its tasks.
fn unexpected_panics() -> Vec<String> {
    static INSTALL_HOOK: Once = Once::new();
    static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    INSTALL_HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let file = panic.location().map_or("", |location| location.file());
            if ["registry-core", "registry-jdbc", "tokio", "sqlx"].iter().any(|c| file.contains(c))
            {
                PANICS.lock().unwrap().push(panic.to_string());
            }
            before(panic);
        }));
    });
    PANICS.lock().unwrap().clone()
}

/// Runs `test` over each store, and fails if a background task has panicked. The stores are tested
/// at the same time, because most tests wait for the end of a lease.
fn for_each_store(test: impl Fn(&TestStore) + Sync) {
    unexpected_panics();
    thread::scope(|scope| {
        for store in TestStore::all() {
            let test = &test;
            scope.spawn(move || test(&store));
        }
    });
    assert_eq!(unexpected_panics(), [] as [String; 0]);
}

type LockFuture = BoxFuture<'static, Result<LockGuard, LockError>>;

/// Returns a `lock()` future that was polled once and is pending.
fn polled_once(registry_runtime: &Runtime, lock: DistributedLock) -> LockFuture {
    let mut lock_future: LockFuture = Box::pin(async move { lock.lock().await });
    let _inside = registry_runtime.enter();
    let polled = lock_future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Pending), "{polled:?}");
    lock_future
}

/// Returns faults that delay the reply to every acquire until the test has ended.
fn no_replies() -> Faults {
    Faults::none().always(Operation::Acquire, Fault::DelayReply(NEVER))
}

#[test]
fn a_guard_dropped_outside_a_runtime_is_released() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, NEVER);
        let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
        thread::spawn(move || drop(guard)).join().unwrap();
        store.assert_free_for_others();
        registry_runtime.block_on(local.idle());
        assert_eq!((local.local_locks(), local.held()), (0, 0));
    });
}

#[test]
fn a_lock_future_dropped_outside_a_runtime_releases_its_grant() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let slow = Faults::none().always(Operation::Acquire, Fault::DelayReply(SHORT));
        let (local, _) = store.open_faulty(&registry_runtime, NEVER, slow);
        let lock_future = polled_once(&registry_runtime, local.obtain("k"));
        thread::spawn(move || drop(lock_future)).join().unwrap();
        registry_runtime.block_on(local.idle());
        store.assert_free_for_others();
        assert_eq!((local.local_locks(), local.held()), (0, 0));
    });
}

#[test]
fn a_waiter_dropped_outside_a_runtime_leaves_the_queue() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, NEVER);
        let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
        let waiting = polled_once(&registry_runtime, local.obtain("k"));
        let next_waiter = registry_runtime.spawn({
            let lock = local.obtain("k");
            async move { lock.lock().await.unwrap().unlock().await.unwrap() }
        });
        // The waiter has been granted the lock when it is dropped.
        drop(guard);
        registry_runtime.block_on(local.idle());
        drop(waiting);
        registry_runtime.block_on(next_waiter).unwrap();
        store.assert_free_for_others();
        registry_runtime.block_on(local.idle());
        assert_eq!((local.local_locks(), local.held()), (0, 0));
    });
}

#[test]
fn an_unlock_dropped_outside_a_runtime_completes_in_the_background() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let slow = Faults::none().always(Operation::Release, Fault::DelayRequest(SHORT));
        let (local, _) = store.open_faulty(&registry_runtime, NEVER, slow);
        let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
        let mut unlocking: BoxFuture<'static, _> = Box::pin(guard.unlock());
        {
            let _inside = registry_runtime.enter();
            assert!(unlocking.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        drop(unlocking);
        store.assert_free_for_others();
    });
}

/// Opens registries, and spawns every kind of pending work in a runtime: a held guard, a waiter
/// behind it, a request without a reply, a loss watcher, protected work, and a dropped guard.
fn registries_with_pending_work(store: &TestStore, registry_runtime: &Runtime) -> Vec<Registry> {
    let local = store.open(registry_runtime, SHORT);
    let (unanswered_registry, _) = store.open_faulty(registry_runtime, SHORT, no_replies());
    let (ready, is_ready) = oneshot::channel();
    registry_runtime.spawn({
        let local = local.clone();
        async move {
            let guard = local.obtain("k").lock().await.unwrap();
            tokio::spawn(guard.lost());
            tokio::spawn({
                let lock = local.obtain("k");
                async move { drop(lock.lock().await) }
            });
            let other = local.obtain("dropped").lock().await.unwrap();
            drop(other);
            ready.send(()).unwrap();
            drop(guard.protect(std::future::pending::<()>()).await);
        }
    });
    registry_runtime.spawn({
        let unanswered_registry = unanswered_registry.clone();
        async move { drop(unanswered_registry.obtain("mute").lock().await) }
    });
    registry_runtime.block_on(is_ready).unwrap();
    vec![local, unanswered_registry]
}

#[test]
fn a_runtime_shutdown_leaves_no_key_locked_beyond_its_lease() {
    let ends: [fn(Runtime); 3] = [
        |registry_runtime| registry_runtime.shutdown_background(),
        |registry_runtime| registry_runtime.shutdown_timeout(Duration::from_millis(10)),
        drop,
    ];
    thread::scope(|scope| {
        for end in ends {
            scope.spawn(move || {
                for_each_store(|store| {
                    let registry_runtime = runtime();
                    // The registries are dropped before their runtime.
                    drop(registries_with_pending_work(store, &registry_runtime));
                    end(registry_runtime);
                    store.assert_free_for_others();
                    // The registries outlive their runtime.
                    let registry_runtime = runtime();
                    let registries = registries_with_pending_work(store, &registry_runtime);
                    end(registry_runtime);
                    store.assert_free_for_others();
                    drop(registries);
                });
            });
        }
    });
}

#[test]
fn a_current_thread_runtime_may_be_dropped_with_everything_in_it() {
    for_each_store(|store| {
        let registry_runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let local = store.open(&registry_runtime, SHORT);
        let locks = (local.obtain("k"), local.obtain("k"));
        registry_runtime.block_on(async {
            let guard = locks.0.lock().await.unwrap();
            tokio::spawn(async move {
                guard.lost().await;
                drop(guard);
            });
            tokio::spawn(async move { drop(locks.1.lock().await) });
            tokio::task::yield_now().await;
        });
        drop(registry_runtime);
        drop(local);
        store.assert_free_for_others();
    });
}

#[test]
fn a_guard_that_outlives_its_runtime_can_be_queried_and_dropped() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, SHORT);
        let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
        drop(registry_runtime);
        assert_eq!(guard.key(), "k");
        assert!(guard.valid_for() <= SHORT);
        assert!(format!("{guard:?}").contains("LockGuard"));
        drop(guard);
        store.assert_free_for_others();
    });
}

#[test]
fn a_guard_that_outlives_its_runtime_reports_its_loss_in_another_runtime() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, SHORT);
        let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
        drop(registry_runtime);
        let other_runtime = runtime();
        let reason =
            other_runtime.block_on(async { tokio::time::timeout(LONG, guard.lost()).await });
        assert!(matches!(reason, Ok(LostReason::Expired | LostReason::Closed)), "{reason:?}");
        let unlocked = other_runtime.block_on(guard.unlock());
        assert!(matches!(unlocked, Err(LockError::Lost { .. })), "{unlocked:?}");
    });
}

#[test]
fn futures_that_outlive_their_runtime_can_be_dropped() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, SHORT);
        let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
        let waiting = polled_once(&registry_runtime, local.obtain("k"));
        let (unanswered_registry, _) = store.open_faulty(&registry_runtime, SHORT, no_replies());
        let unanswered = polled_once(&registry_runtime, unanswered_registry.obtain("mute"));
        let lost = guard.lost();
        drop(registry_runtime);
        drop(waiting);
        drop(unanswered);
        drop(lost);
        drop(guard);
        store.assert_free_for_others();
    });
}

#[test]
fn a_registry_without_its_runtime_returns_closed() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, SHORT);
        let (lock, known) = (local.obtain("k"), local.obtain("known"));
        registry_runtime.block_on(async { known.lock().await.unwrap().unlock().await.unwrap() });
        drop(registry_runtime);
        runtime().block_on(async {
            let options = LockOptions::new();
            assert!(matches!(lock.lock().await, Err(LockError::Closed)));
            assert!(matches!(lock.try_lock().await, Err(LockError::Closed)));
            assert!(matches!(lock.try_lock_for(LONG).await, Err(LockError::Closed)));
            assert!(matches!(known.lock_with(options).await, Err(LockError::Closed)));
            let done = local.execute_locked("k", async |_| ()).await;
            assert!(matches!(done, Err(LockError::Closed)));
            let closing = tokio::time::timeout(LONG, local.close(Duration::ZERO)).await;
            assert!(closing.is_ok(), "close hangs");
        });
    });
}

#[test]
fn a_registry_can_be_used_from_another_runtime_while_its_own_runs() {
    for_each_store(|store| {
        let (registry_runtime, other_runtime) = (runtime(), runtime());
        let local = store.open(&registry_runtime, NEVER);
        other_runtime.block_on(async {
            let guard = local.obtain("k").lock().await.unwrap();
            guard.extend(NEVER).await.unwrap();
            drop(guard);
            let guard = local.obtain("k").try_lock_for(LONG).await.unwrap().unwrap();
            guard.unlock().await.unwrap();
        });
        // The other runtime may end: no task of the registry runs there.
        let guard = other_runtime.block_on(local.obtain("k").lock()).unwrap();
        drop(other_runtime);
        drop(guard);
        store.assert_free_for_others();
    });
}

#[test]
fn a_panicking_thread_releases_its_lock() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, NEVER);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
            let _waiting = polled_once(&registry_runtime, local.obtain("k"));
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        store.assert_free_for_others();
    });
}

#[test]
fn a_panicking_task_releases_its_lock() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, NEVER);
        let works: [fn(Registry) -> BoxFuture<'static, ()>; 3] = [
            |local| {
                Box::pin(async move {
                    let _guard = local.obtain("k").lock().await.unwrap();
                    panic!("on purpose");
                })
            },
            |local| {
                Box::pin(async move {
                    let guard = local.obtain("k").lock().await.unwrap();
                    guard.protect(async { panic!("on purpose") }).await.unwrap()
                })
            },
            |local| {
                Box::pin(async move {
                    let work = async |_: &LockGuard| panic!("on purpose");
                    local.execute_locked("k", work).await.unwrap().output
                })
            },
        ];
        for work in works {
            let panicked =
                registry_runtime.block_on(registry_runtime.spawn(work(local.clone()))).unwrap_err();
            assert!(panicked.is_panic());
            store.assert_free_for_others();
        }
        registry_runtime.block_on(local.idle());
        assert_eq!((local.local_locks(), local.held()), (0, 0));
    });
}

#[test]
fn a_panic_after_the_end_of_the_runtime_is_no_double_panic() {
    for_each_store(|store| {
        let registry_runtime = runtime();
        let local = store.open(&registry_runtime, SHORT);
        let guard = registry_runtime.block_on(local.obtain("k").lock()).unwrap();
        let waiting = polled_once(&registry_runtime, local.obtain("k"));
        drop(registry_runtime);
        // A second panic during unwinding would abort the process.
        let panicked = catch_unwind(AssertUnwindSafe(move || {
            let _dropped_during_unwinding = (guard, waiting);
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        store.assert_free_for_others();
    });
}

#[tokio::test(start_paused = true)]
async fn a_leaked_guard_ends_with_its_max_hold() {
    let store = MemoryBackend::new();
    let open = || Registry::builder(Arc::new(store.clone())).build().unwrap();
    let (local, remote) = (open(), open());
    let options = LockOptions::new().max_hold(Duration::from_secs(100));
    std::mem::forget(local.obtain("k").lock_with(options).await.unwrap());
    let too_early = remote.obtain("k").try_lock_for(Duration::from_secs(99)).await.unwrap();
    assert!(too_early.is_none(), "the lock is not renewed until its max_hold");
    let limit = Duration::from_secs(2);
    let local_again = tokio::time::timeout(limit, local.obtain("k").lock()).await.unwrap().unwrap();
    local_again.unlock().await.unwrap();
    let remote_again =
        tokio::time::timeout(limit, remote.obtain("k").lock()).await.unwrap().unwrap();
    remote_again.unlock().await.unwrap();
    assert_eq!(local.held(), 0);
}
