//! Guards and incomplete futures that are dropped outside a runtime, with a runtime that shuts
//! down, after its end, and during a panic. No drop panics, and no key stays locked beyond its
//! lease.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Once};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use futures_util::future::BoxFuture;
use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    DistributedLock, LockBackend, LockError, LockGuard, LockOptions, LockRegistry,
    LockRegistryExt as _, LostReason, MemoryBackend, Registry,
};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

/// Longer than any test waits: a key that is free earlier was released and did not expire.
const NEVER: Duration = Duration::from_secs(3_600);

/// A short lease, for claims that expire.
const SHORT: Duration = Duration::from_millis(500);

/// A store that outlives the runtimes that use it.
enum Store {
    Memory(MemoryBackend),
    Sqlite(tempfile::TempDir),
}

impl Store {
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

    fn open(&self, home: &Runtime, lease: Duration) -> Registry {
        home.block_on(async {
            Registry::builder(self.backend().await).lease(lease).build().unwrap()
        })
    }

    /// Opens a registry over the same store behind faults.
    fn open_faulty(
        &self,
        home: &Runtime,
        lease: Duration,
        faults: Faults,
    ) -> (Registry, Arc<FaultyBackend>) {
        home.block_on(async {
            let faulty = Arc::new(FaultyBackend::new(self.backend().await, faults));
            let backend: Arc<dyn LockBackend> = Arc::clone(&faulty) as _;
            (Registry::builder(backend).lease(lease).build().unwrap(), faulty)
        })
    }

    /// Checks that another client, in another runtime, acquires the key.
    fn is_free_for_others(&self) {
        let elsewhere = runtime();
        let theirs = self.open(&elsewhere, LONG);
        elsewhere.block_on(async {
            let guard = theirs.obtain("k").try_lock_for(LONG).await.unwrap();
            guard.expect("the key stays taken").unlock().await.unwrap();
        });
    }
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Returns the panics inside the engine and the runtime, which would swallow them. Panics of the
/// tests themselves are excluded.
fn unexpected_panics() -> Vec<String> {
    static WATCH: Once = Once::new();
    static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());
    WATCH.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let file = panic.location().map_or("", |location| location.file());
            if ["registry-core", "registry-jdbc", "tokio", "sqlx"].iter().any(|c| file.contains(c))
            {
                SEEN.lock().unwrap().push(panic.to_string());
            }
            before(panic);
        }));
    });
    SEEN.lock().unwrap().clone()
}

/// Runs `test` over each store, and fails if a background task has panicked.
fn over_each_store(test: impl Fn(&Store)) {
    unexpected_panics();
    for store in Store::all() {
        test(&store);
    }
    assert_eq!(unexpected_panics(), [] as [String; 0]);
}

type Locking = BoxFuture<'static, Result<LockGuard, LockError>>;

/// A `lock()` that was polled until it waits for something other than its own wake-ups.
fn half_done(home: &Runtime, lock: DistributedLock) -> Locking {
    let mut locking: Locking = Box::pin(async move { lock.lock().await });
    let _inside = home.enter();
    let polled = locking.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Pending), "{polled:?}");
    locking
}

/// No reply to any acquire for the duration of the test.
fn no_answers() -> Faults {
    Faults::none().always(Operation::Acquire, Fault::DelayReply(NEVER))
}

#[test]
fn a_guard_dropped_outside_a_runtime_is_given_back() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, NEVER);
        let guard = home.block_on(ours.obtain("k").lock()).unwrap();
        thread::spawn(move || drop(guard)).join().unwrap();
        store.is_free_for_others();
        home.block_on(ours.idle());
        assert_eq!((ours.slots(), ours.held()), (0, 0));
    });
}

#[test]
fn a_lock_future_dropped_outside_a_runtime_gives_back_what_it_got() {
    over_each_store(|store| {
        let home = runtime();
        let slow = Faults::none().always(Operation::Acquire, Fault::DelayReply(SHORT));
        let (ours, _) = store.open_faulty(&home, NEVER, slow);
        let locking = half_done(&home, ours.obtain("k"));
        thread::spawn(move || drop(locking)).join().unwrap();
        home.block_on(ours.idle());
        store.is_free_for_others();
        assert_eq!((ours.slots(), ours.held()), (0, 0));
    });
}

#[test]
fn a_waiter_dropped_outside_a_runtime_leaves_the_line() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, NEVER);
        let guard = home.block_on(ours.obtain("k").lock()).unwrap();
        let waiting = half_done(&home, ours.obtain("k"));
        let behind = home.spawn({
            let lock = ours.obtain("k");
            async move { lock.lock().await.unwrap().unlock().await.unwrap() }
        });
        // The waiter has been granted the lock when it is dropped.
        drop(guard);
        home.block_on(ours.idle());
        drop(waiting);
        home.block_on(behind).unwrap();
        store.is_free_for_others();
        home.block_on(ours.idle());
        assert_eq!((ours.slots(), ours.held()), (0, 0));
    });
}

#[test]
fn an_unlock_dropped_outside_a_runtime_goes_on_in_the_background() {
    over_each_store(|store| {
        let home = runtime();
        let slow = Faults::none().always(Operation::Release, Fault::DelayRequest(SHORT));
        let (ours, _) = store.open_faulty(&home, NEVER, slow);
        let guard = home.block_on(ours.obtain("k").lock()).unwrap();
        let mut unlocking: BoxFuture<'static, _> = Box::pin(guard.unlock());
        {
            let _inside = home.enter();
            assert!(unlocking.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        drop(unlocking);
        store.is_free_for_others();
    });
}

/// Fills a runtime with every kind of pending work: a held guard, a waiter behind it, and a request
/// without a reply. Further, a loss watcher, protected work, and a guard at the background
/// releaser.
fn busy_home(store: &Store, home: &Runtime) -> Vec<Registry> {
    let ours = store.open(home, SHORT);
    let (mute, _) = store.open_faulty(home, SHORT, no_answers());
    let (ready, is_ready) = oneshot::channel();
    home.spawn({
        let ours = ours.clone();
        async move {
            let guard = ours.obtain("k").lock().await.unwrap();
            tokio::spawn(guard.lost());
            tokio::spawn({
                let lock = ours.obtain("k");
                async move { drop(lock.lock().await) }
            });
            let other = ours.obtain("dropped").lock().await.unwrap();
            drop(other);
            ready.send(()).unwrap();
            drop(guard.protect(std::future::pending::<()>()).await);
        }
    });
    home.spawn({
        let mute = mute.clone();
        async move { drop(mute.obtain("mute").lock().await) }
    });
    home.block_on(is_ready).unwrap();
    vec![ours, mute]
}

#[test]
fn a_runtime_that_shuts_down_leaves_no_key_beyond_its_lease() {
    let ends: [fn(Runtime); 3] = [
        |home| home.shutdown_background(),
        |home| home.shutdown_timeout(Duration::from_millis(10)),
        drop,
    ];
    over_each_store(|store| {
        for end in ends {
            let home = runtime();
            // The registries are dropped before their runtime.
            drop(busy_home(store, &home));
            end(home);
            store.is_free_for_others();
            // The registries outlive their runtime.
            let home = runtime();
            let registries = busy_home(store, &home);
            end(home);
            store.is_free_for_others();
            drop(registries);
        }
    });
}

#[test]
fn a_current_thread_runtime_may_be_dropped_with_everything_in_it() {
    over_each_store(|store| {
        let home = Builder::new_current_thread().enable_all().build().unwrap();
        let ours = store.open(&home, SHORT);
        let locks = (ours.obtain("k"), ours.obtain("k"));
        home.block_on(async {
            let guard = locks.0.lock().await.unwrap();
            tokio::spawn(async move {
                guard.lost().await;
                drop(guard);
            });
            tokio::spawn(async move { drop(locks.1.lock().await) });
            tokio::task::yield_now().await;
        });
        drop(home);
        drop(ours);
        store.is_free_for_others();
    });
}

#[test]
fn a_guard_that_outlives_its_runtime_can_be_dropped_and_asked() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, SHORT);
        let guard = home.block_on(ours.obtain("k").lock()).unwrap();
        drop(home);
        assert_eq!(guard.key(), "k");
        assert!(guard.valid_for() <= SHORT);
        assert!(format!("{guard:?}").contains("LockGuard"));
        drop(guard);
        store.is_free_for_others();
    });
}

#[test]
fn a_guard_that_outlives_its_runtime_hears_of_its_loss_elsewhere() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, SHORT);
        let guard = home.block_on(ours.obtain("k").lock()).unwrap();
        drop(home);
        let elsewhere = runtime();
        let reason = elsewhere.block_on(async { tokio::time::timeout(LONG, guard.lost()).await });
        assert!(matches!(reason, Ok(LostReason::Expired | LostReason::Closed)), "{reason:?}");
        let unlocked = elsewhere.block_on(guard.unlock());
        assert!(matches!(unlocked, Err(LockError::Lost { .. })), "{unlocked:?}");
    });
}

#[test]
fn futures_that_outlive_their_runtime_can_be_dropped() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, SHORT);
        let guard = home.block_on(ours.obtain("k").lock()).unwrap();
        let waiting = half_done(&home, ours.obtain("k"));
        let (mute, _) = store.open_faulty(&home, SHORT, no_answers());
        let unanswered = half_done(&home, mute.obtain("mute"));
        let lost = guard.lost();
        drop(home);
        drop(waiting);
        drop(unanswered);
        drop(lost);
        drop(guard);
        store.is_free_for_others();
    });
}

#[test]
fn a_registry_whose_runtime_is_gone_says_that_it_is_closed() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, SHORT);
        let (lock, known) = (ours.obtain("k"), ours.obtain("known"));
        home.block_on(async { known.lock().await.unwrap().unlock().await.unwrap() });
        drop(home);
        runtime().block_on(async {
            let options = LockOptions::new();
            assert!(matches!(lock.lock().await, Err(LockError::Closed)));
            assert!(matches!(lock.try_lock().await, Err(LockError::Closed)));
            assert!(matches!(lock.try_lock_for(LONG).await, Err(LockError::Closed)));
            assert!(matches!(known.lock_with(options).await, Err(LockError::Closed)));
            let done = ours.execute_locked("k", async |_| ()).await;
            assert!(matches!(done, Err(LockError::Closed)));
            let closing = tokio::time::timeout(LONG, ours.close(Duration::ZERO)).await;
            assert!(closing.is_ok(), "close hangs");
        });
    });
}

#[test]
fn a_registry_can_be_used_from_another_runtime_while_its_own_lives() {
    over_each_store(|store| {
        let (home, elsewhere) = (runtime(), runtime());
        let ours = store.open(&home, NEVER);
        elsewhere.block_on(async {
            let guard = ours.obtain("k").lock().await.unwrap();
            guard.renew(NEVER).await.unwrap();
            drop(guard);
            let guard = ours.obtain("k").try_lock_for(LONG).await.unwrap().unwrap();
            guard.unlock().await.unwrap();
        });
        // The other runtime may end: no task of the registry runs there.
        let guard = elsewhere.block_on(ours.obtain("k").lock()).unwrap();
        drop(elsewhere);
        drop(guard);
        store.is_free_for_others();
    });
}

#[test]
fn a_panicking_thread_gives_its_guard_back() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, NEVER);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _guard = home.block_on(ours.obtain("k").lock()).unwrap();
            let _waiting = half_done(&home, ours.obtain("k"));
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        store.is_free_for_others();
    });
}

#[test]
fn a_panicking_task_gives_its_guard_back() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, NEVER);
        let works: [fn(Registry) -> BoxFuture<'static, ()>; 3] = [
            |ours| {
                Box::pin(async move {
                    let _guard = ours.obtain("k").lock().await.unwrap();
                    panic!("on purpose");
                })
            },
            |ours| {
                Box::pin(async move {
                    let guard = ours.obtain("k").lock().await.unwrap();
                    guard.protect(async { panic!("on purpose") }).await.unwrap()
                })
            },
            |ours| {
                Box::pin(async move {
                    let work = async |_: &LockGuard| panic!("on purpose");
                    ours.execute_locked("k", work).await.unwrap().output
                })
            },
        ];
        for work in works {
            let panicked = home.block_on(home.spawn(work(ours.clone()))).unwrap_err();
            assert!(panicked.is_panic());
            store.is_free_for_others();
        }
        home.block_on(ours.idle());
        assert_eq!((ours.slots(), ours.held()), (0, 0));
    });
}

#[test]
fn a_panic_with_the_runtime_already_gone_is_no_double_panic() {
    over_each_store(|store| {
        let home = runtime();
        let ours = store.open(&home, SHORT);
        let guard = home.block_on(ours.obtain("k").lock()).unwrap();
        let waiting = half_done(&home, ours.obtain("k"));
        drop(home);
        // A second panic during unwinding would abort the process.
        let panicked = catch_unwind(AssertUnwindSafe(move || {
            let _dropped_in_passing = (guard, waiting);
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        store.is_free_for_others();
    });
}

#[tokio::test(start_paused = true)]
async fn a_leaked_guard_with_a_max_hold_costs_no_more_than_that() {
    let store = MemoryBackend::new();
    let open = || Registry::builder(Arc::new(store.clone())).build().unwrap();
    let (ours, theirs) = (open(), open());
    let options = LockOptions::new().max_hold(Duration::from_secs(100));
    std::mem::forget(ours.obtain("k").lock_with(options).await.unwrap().unwrap());
    let too_early = theirs.obtain("k").try_lock_for(Duration::from_secs(99)).await.unwrap();
    assert!(too_early.is_none(), "the lock is not renewed until its max_hold");
    let limit = Duration::from_secs(2);
    let ours_again = tokio::time::timeout(limit, ours.obtain("k").lock()).await.unwrap().unwrap();
    ours_again.unlock().await.unwrap();
    let theirs_now = tokio::time::timeout(limit, theirs.obtain("k").lock()).await.unwrap().unwrap();
    theirs_now.unlock().await.unwrap();
    assert_eq!(ours.held(), 0);
}
