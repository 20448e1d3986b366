//! The blocking facade: mutual exclusion between plain threads, errors instead of deadlocks inside
//! a runtime, and safe drops in any order and place.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use registry_core::blocking::{BlockingGuard, BlockingMultiGuard, BlockingRegistry};
use registry_core::{
    ClaimMode, ConfigError, LockError, LockOptions, LostReason, MemoryBackend, Registry,
};

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

fn over(store: &MemoryBackend) -> BlockingRegistry {
    let backend = Arc::new(store.clone());
    BlockingRegistry::open(async { Registry::builder(backend).build() }).unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Waits until the background releases of dropped guards are done.
fn idle(registry: &BlockingRegistry) {
    runtime().block_on(registry.registry().idle());
}

#[test]
fn a_plain_thread_locks_and_unlocks() {
    let store = MemoryBackend::new();
    let (local, remote) = (over(&store), over(&store));
    let guard = local.obtain("k").lock().unwrap();
    assert!(guard.is_held());
    assert_eq!(guard.key(), "k");
    assert!(remote.obtain("k").try_lock().unwrap().is_none());
    assert!(remote.obtain("k").try_lock_for(Duration::from_millis(20)).unwrap().is_none());
    assert_eq!(remote.obtain("k").holders().unwrap()[0].token, Some(guard.fencing_token()));
    let token = guard.fencing_token();
    guard.extend(Duration::from_secs(60)).unwrap();
    guard.unlock().unwrap();
    let next = remote.obtain("k").try_lock().unwrap().unwrap();
    assert!(next.fencing_token() > token);
    next.unlock().unwrap();
    assert_eq!(store.records(), 0);
}

#[test]
fn threads_exclude_each_other() {
    let store = MemoryBackend::new();
    let registries = [over(&store), over(&store)];
    let inside = AtomicBool::new(false);
    thread::scope(|scope| {
        for registry in &registries {
            for _ in 0..4 {
                scope.spawn(|| {
                    let lock = registry.obtain("k");
                    for _ in 0..25 {
                        let guard = lock.lock().unwrap();
                        assert!(
                            !inside.swap(true, Ordering::SeqCst),
                            "two critical sections overlap"
                        );
                        thread::yield_now();
                        inside.store(false, Ordering::SeqCst);
                        guard.unlock().unwrap();
                    }
                });
            }
        }
    });
    assert_eq!(store.records(), 0);
}

#[test]
fn a_blocked_thread_continues_when_the_holder_drops_its_guard() {
    let local = over(&MemoryBackend::new());
    let guard = local.obtain("k").lock().unwrap();
    let (starts, started) = mpsc::channel();
    let waiter = thread::spawn({
        let lock = local.obtain("k");
        move || {
            starts.send(()).unwrap();
            lock.lock().unwrap().unlock().unwrap();
        }
    });
    started.recv().unwrap();
    drop(guard);
    waiter.join().unwrap();
}

#[test]
fn a_thread_is_notified_of_a_loss() {
    let store = MemoryBackend::new();
    let (local, remote) = (over(&store), over(&store));
    let options = LockOptions::new().lease(Duration::from_secs(3));
    let guard = local.obtain("k").lock_with(options).unwrap();
    assert_eq!(guard.lost_within(Duration::ZERO).unwrap(), None);
    assert!(runtime().block_on(remote.registry().force_release("k")).unwrap());
    assert_eq!(guard.lost_within(LONG).unwrap(), Some(LostReason::Gone));
    assert!(matches!(guard.unlock(), Err(LockError::Lost { .. })));
}

#[test]
fn a_plain_thread_reads_beside_readers_and_without_writers() {
    let store = MemoryBackend::new();
    let (local, remote) = (over(&store), over(&store));
    let (lock, other) = (local.obtain("k"), remote.obtain("k"));
    let readers = [
        lock.read().unwrap(),
        lock.read_with(LockOptions::new().label("nightly")).unwrap(),
        other.try_read().unwrap().unwrap(),
        other.try_read_for(LONG).unwrap().unwrap(),
        other.try_read_with(LockOptions::new().wait(LONG)).unwrap().unwrap(),
    ];
    for reader in readers {
        assert_eq!(reader.mode(), ClaimMode::Shared);
        assert!(other.try_lock().unwrap().is_none());
        reader.unlock().unwrap();
    }
    let writer = lock.lock().unwrap();
    assert!(other.try_read().unwrap().is_none());
    assert!(other.try_read_for(Duration::from_millis(20)).unwrap().is_none());
    let waited = other.read_with(LockOptions::new().wait(Duration::from_millis(20)));
    assert!(matches!(waited, Err(LockError::WaitElapsed { .. })), "{waited:?}");
    writer.unlock().unwrap();
    assert_eq!(store.records(), 0);
}

#[test]
fn a_blocking_upgrade_waits_until_the_readers_have_left() {
    let store = MemoryBackend::new();
    let (local, remote) = (over(&store), over(&store));
    let lock = local.obtain("k");
    let guard = lock.upgradable().unwrap();
    assert!(lock.try_upgradable_with(LockOptions::new()).unwrap().is_none(), "one at a time");
    let reader = remote.obtain("k").read().unwrap();
    let guard = guard.try_upgrade_for(Duration::from_millis(20)).unwrap().unwrap_err();
    assert_eq!(guard.mode(), ClaimMode::Upgradable);
    let read = guard.fencing_token();
    let guard = thread::scope(|scope| {
        scope.spawn(|| {
            // The waiting upgrade blocks new readers.
            let started = Instant::now();
            while let Some(early) = remote.obtain("k").try_read().unwrap() {
                assert!(started.elapsed() < LONG, "the upgrade does not wait in the store");
                early.unlock().unwrap();
            }
            reader.unlock().unwrap();
        });
        guard.upgrade().unwrap()
    });
    assert_eq!(guard.mode(), ClaimMode::Exclusive);
    assert!(guard.fencing_token() > read);
    assert!(remote.obtain("k").try_read().unwrap().is_none());

    let guard = guard.downgrade_to_upgradable().unwrap().downgrade().unwrap();
    assert_eq!(guard.mode(), ClaimMode::Shared);
    remote.obtain("k").try_read().unwrap().unwrap().unlock().unwrap();
    let refused = guard.upgrade();
    assert!(matches!(refused, Err(LockError::InvalidConversion { .. })), "{refused:?}");
    idle(&local);
    assert_eq!(store.records(), 0, "a refused conversion releases the lock");
}

#[test]
fn plain_threads_share_the_units_of_a_semaphore() {
    let store = MemoryBackend::new();
    let (local, remote) = (over(&store), over(&store));
    let (semaphore, other) = (local.semaphore("k", 8), remote.semaphore("k", 8));
    let permits = [
        semaphore.acquire().unwrap(),
        semaphore.acquire_many(2).unwrap(),
        semaphore.acquire_with(1, LockOptions::new().label("nightly")).unwrap(),
        other.try_acquire().unwrap().unwrap(),
        other.try_acquire_many(2).unwrap().unwrap(),
        other.try_acquire_for(LONG).unwrap().unwrap(),
    ];
    assert!(other.try_acquire().unwrap().is_none());
    assert!(other.try_acquire_for(Duration::from_millis(20)).unwrap().is_none());
    assert!(other.try_acquire_with(2, LockOptions::new()).unwrap().is_none());
    let taken = other.holders().unwrap().iter().map(|holder| holder.mode.units()).sum::<u32>();
    assert_eq!((taken, other.units(), other.key()), (8, 8, "k"));
    let units_in_store = remote.semaphore("k", 9).acquire();
    assert!(
        matches!(units_in_store, Err(LockError::UnitsMismatch { stated: 9, held: 8, .. })),
        "{units_in_store:?}"
    );
    for permit in permits {
        permit.unlock().unwrap();
    }
    semaphore.resize(2).unwrap();
    assert_eq!(semaphore.units(), 2);
    let too_many = semaphore.acquire_many(3);
    assert!(matches!(too_many, Err(LockError::InvalidOption(_))), "{too_many:?}");
    assert_eq!(store.records(), 0);
}

#[test]
fn a_plain_thread_locks_several_keys_together_or_none() {
    let store = MemoryBackend::new();
    let (local, remote) = (over(&store), over(&store));
    let lock = local.obtain_all(["b", "a", "b"]);
    assert_eq!(lock.keys().collect::<Vec<_>>(), ["a", "b"]);
    let busy = remote.obtain("b").lock().unwrap();
    assert!(lock.try_lock().unwrap().is_none());
    assert!(lock.try_lock_for(Duration::from_millis(20)).unwrap().is_none());
    assert!(lock.try_lock_with(LockOptions::new()).unwrap().is_none());
    remote.obtain("a").try_lock().unwrap().unwrap().unlock().unwrap();
    busy.unlock().unwrap();
    lock.lock_with(LockOptions::new().wait(LONG)).unwrap().unlock().unwrap();

    let guard = lock.lock().unwrap();
    assert_eq!(guard.fencing_tokens().map(|(key, _)| key).collect::<Vec<_>>(), ["a", "b"]);
    assert!(guard.is_held() && guard.valid_until() > Instant::now());
    assert!(remote.obtain("a").try_lock().unwrap().is_none());
    assert_eq!(guard.lost_within(Duration::ZERO).unwrap(), None);
    assert!(runtime().block_on(remote.registry().force_release("b")).unwrap());
    assert_eq!(guard.lost_within(LONG).unwrap(), Some(("b".into(), LostReason::Gone)));
    assert!(!guard.is_held());
    assert!(matches!(guard.unlock(), Err(LockError::Lost { .. })));
    assert_eq!(store.records(), 0);
}

/// Locks of different keys, for calls that consume their guards.
struct HeldLocks {
    to_unlock: BlockingGuard,
    to_upgrade: BlockingGuard,
    to_try_upgrade: BlockingGuard,
    to_downgrade: BlockingGuard,
    several: BlockingMultiGuard,
}

impl HeldLocks {
    fn acquire(registry: &BlockingRegistry) -> Self {
        Self {
            to_unlock: registry.obtain("k").lock().unwrap(),
            to_upgrade: registry.obtain("upgrade").upgradable().unwrap(),
            to_try_upgrade: registry.obtain("try upgrade").upgradable().unwrap(),
            to_downgrade: registry.obtain("downgrade").lock().unwrap(),
            several: registry.obtain_all(["one", "two"]).lock().unwrap(),
        }
    }
}

/// Makes every blocking call, inside a runtime, where each must be refused.
fn assert_blocking_calls_are_refused(registry: &BlockingRegistry, held: HeldLocks) {
    let refused = |result: Result<(), LockError>| {
        assert!(matches!(result, Err(LockError::InsideRuntime)), "{result:?}");
    };
    let lock = registry.obtain("k");
    refused(lock.lock().map(drop));
    refused(lock.try_lock().map(drop));
    refused(lock.try_lock_for(LONG).map(drop));
    refused(lock.try_lock_with(LockOptions::new()).map(drop));
    refused(lock.holders().map(drop));
    refused(lock.read().map(drop));
    refused(lock.try_read().map(drop));
    refused(lock.try_read_for(LONG).map(drop));
    refused(lock.upgradable().map(drop));
    refused(lock.try_upgradable_with(LockOptions::new()).map(drop));
    let semaphore = registry.semaphore("s", 2);
    refused(semaphore.acquire().map(drop));
    refused(semaphore.try_acquire_for(LONG).map(drop));
    refused(semaphore.resize(3));
    refused(semaphore.holders().map(drop));
    let several = registry.obtain_all(["a", "b"]);
    refused(several.lock().map(drop));
    refused(several.try_lock_for(LONG).map(drop));
    let HeldLocks { to_unlock, to_upgrade, to_try_upgrade, to_downgrade, several } = held;
    refused(to_unlock.extend(LONG));
    refused(to_unlock.lost_within(LONG).map(drop));
    refused(to_unlock.unlock());
    refused(to_upgrade.upgrade().map(drop));
    refused(to_try_upgrade.try_upgrade_for(LONG).map(drop));
    refused(to_downgrade.downgrade().map(drop));
    refused(several.lost_within(LONG).map(drop));
    refused(several.unlock());
    refused(registry.close(LONG).map(drop));
    let another = BlockingRegistry::open(async { Registry::in_memory() });
    assert!(matches!(another, Err(ConfigError::Invalid(_))), "{another:?}");
}

#[test]
fn inside_a_runtime_every_call_is_an_error_and_neither_a_deadlock_nor_a_panic() {
    type CallSite = fn(&tokio::runtime::Runtime, Box<dyn FnOnce() + Send>);
    let call_sites: [CallSite; 4] = [
        |runtime, calls| runtime.block_on(async { calls() }),
        |runtime, calls| runtime.block_on(async { tokio::spawn(async { calls() }).await.unwrap() }),
        |runtime, calls| runtime.block_on(runtime.spawn_blocking(calls)).unwrap(),
        |runtime, calls| {
            let _inside = runtime.enter();
            calls();
        },
    ];
    for call_site in call_sites {
        let store = MemoryBackend::new();
        let local = over(&store);
        let held = HeldLocks::acquire(&local);
        call_site(
            &runtime(),
            Box::new({
                let local = local.clone();
                move || assert_blocking_calls_are_refused(&local, held)
            }),
        );
        // A refused call that consumes its guard releases the guard in the background.
        idle(&local);
        assert_eq!(store.records(), 0);
        local.obtain("k").try_lock().unwrap().unwrap().unlock().unwrap();
    }
}

#[test]
fn everything_can_be_dropped_inside_a_runtime() {
    let store = MemoryBackend::new();
    let local = over(&store);
    let (lock, guard) = (local.obtain("k"), local.obtain("k").lock().unwrap());
    runtime().block_on(async move {
        drop(local);
        drop(lock);
        drop(guard);
    });
    runtime().block_on(async { drop(over_in_a_thread(&store)) });
}

/// Opens a registry in a new thread: inside a runtime, that is refused.
fn over_in_a_thread(store: &MemoryBackend) -> BlockingRegistry {
    thread::scope(|scope| scope.spawn(|| over(store)).join().unwrap())
}

#[test]
fn a_guard_outlives_its_lock_and_its_registry() {
    let store = MemoryBackend::new();
    let guard = over(&store).obtain("k").lock().unwrap();
    assert!(guard.is_held());
    guard.extend(LONG).unwrap();
    guard.unlock().unwrap();
    assert_eq!(store.records(), 0);
}

#[test]
fn a_lock_outlives_its_registry() {
    let store = MemoryBackend::new();
    let lock = over(&store).obtain("k");
    lock.lock().unwrap().unlock().unwrap();
    assert_eq!(store.records(), 0);
}

#[test]
fn a_panicking_blocking_thread_releases_its_lock() {
    let local = over(&MemoryBackend::new());
    let panicked = thread::spawn({
        let local = local.clone();
        move || {
            let _guard = local.obtain("k").lock().unwrap();
            panic!("on purpose");
        }
    });
    panicked.join().unwrap_err();
    idle(&local);
    local.obtain("k").try_lock().unwrap().unwrap().unlock().unwrap();
}

#[test]
fn a_closed_blocking_registry_returns_closed() {
    let local = over(&MemoryBackend::new());
    let guard = local.obtain("k").lock().unwrap();
    let report = local.close(Duration::ZERO).unwrap();
    assert_eq!(report.lost, 1);
    assert!(!guard.is_held());
    assert!(matches!(local.obtain("k").lock(), Err(LockError::Closed)));
    assert!(matches!(guard.unlock(), Err(LockError::Lost { reason: LostReason::Closed, .. })));
}

#[test]
fn bad_input_is_refused_as_in_the_async_registry() {
    let local = over(&MemoryBackend::new());
    assert!(matches!(local.obtain("").lock(), Err(LockError::InvalidKey(_))));
    let options = LockOptions::new().lease(Duration::ZERO);
    assert!(matches!(local.obtain("k").try_lock_with(options), Err(LockError::InvalidOption(_))));
    let outside = Registry::in_memory();
    assert!(matches!(outside, Err(ConfigError::NoRuntime)), "{outside:?}");
}

/// The drop of the last guard ends the runtime of the registry, so the drop itself must wait for
/// the reply to the release.
#[test]
fn the_last_guard_of_a_blocking_registry_is_released() {
    let store = MemoryBackend::new();
    let long = || LockOptions::new().lease(Duration::from_secs(3_600));
    for inside in [false, true] {
        for _ in 0..20 {
            let local = over_in_a_thread(&store);
            let guard =
                thread::spawn(move || local.obtain("k").lock_with(long()).unwrap()).join().unwrap();
            if inside {
                runtime().block_on(async move { drop(guard) });
            } else {
                drop(guard);
            }
            let next = over(&store).obtain("k").try_lock_for(LONG).unwrap();
            assert!(next.is_some(), "dropped inside a runtime: {inside}");
        }
    }
}

thread_local! {
    static LAST_GUARD: std::cell::RefCell<Option<BlockingGuard>> = const { std::cell::RefCell::new(None) };
}

/// When the guard is dropped at the end of a thread, tokio's thread-locals may already be
/// destroyed.
#[test]
fn a_guard_in_a_thread_local_is_released_at_the_end_of_its_thread() {
    let store = MemoryBackend::new();
    let long = || LockOptions::new().lease(Duration::from_secs(3_600));
    let local = over(&store);
    let first = local.obtain("first").lock_with(long()).unwrap();
    let last = local.obtain("last").lock_with(long()).unwrap();
    drop(local);
    let ended = thread::spawn(move || {
        drop(first);
        LAST_GUARD.with(|slot| *slot.borrow_mut() = Some(last));
        LAST_GUARD.with(|slot| slot.borrow().as_ref().unwrap().extend(LONG).unwrap());
    });
    ended.join().unwrap();
    let remote = over(&store);
    for key in ["first", "last"] {
        assert!(remote.obtain(key).try_lock_for(LONG).unwrap().is_some(), "{key}");
    }
}
