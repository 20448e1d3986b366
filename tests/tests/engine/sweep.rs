//! The cancellation sweep: each operation is dropped after every possible number of polls, over the
//! in-process store, over SQLite and behind faults.
//!
//! After every drop, the key becomes free again: within a second if no reply was lost, otherwise
//! within the lease. Other callers of the lock and the registry are not affected. No local lock,
//! claim or record remains. The scenarios are here. The stores, the faults and the checks are in
//! the folder `sweep`.

#![expect(
    clippy::unwrap_used,
    clippy::future_not_send,
    reason = "a test may panic, and drives its futures manually on one thread"
)]

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    DistributedLock, LockError, LockGuard, LockOptions, LockRegistryExt as _, MultiLock, Owner,
};

mod environments;
mod faults;
mod remote_store;
mod fair_store;

use environments::{Environment, KEY, Scenario, TestSetup};

/// Each scenario becomes two tests: one over the in-process store on paused time, one over SQLite.
/// Scenarios that often wait for the end of a lease run only on paused time.
macro_rules! swept {
    (
        $($(#[doc = $doc:literal])+ $scenario:ident;)+
        only_over_memory:
        $($(#[doc = $paused_doc:literal])+ $paused_scenario:ident;)+
    ) => {
        mod over_memory {
            $($(#[doc = $doc])+
            #[tokio::test(start_paused = true)]
            async fn $scenario() {
                super::environments::sweep_paused(super::$scenario).await;
            })+

            $($(#[doc = $paused_doc])+
            #[tokio::test(start_paused = true)]
            async fn $paused_scenario() {
                super::environments::sweep_paused(super::$paused_scenario).await;
            })+
        }

        mod over_sqlite {
            $($(#[doc = $doc])+
            #[tokio::test]
            async fn $scenario() {
                super::environments::sweep_sqlite(super::$scenario).await;
            })+
        }
    };
}

swept! {
    /// `lock` of a free key.
    lock_of_a_free_key;
    /// `lock` of a key that another process holds and frees after a while.
    lock_of_a_key_that_is_released;
    /// `lock` behind a local caller whose claim is handed over.
    lock_behind_a_local_holder;
    /// `lock` behind a local caller that still competes with another process.
    lock_behind_a_local_contender;
    /// `try_lock` of a free key.
    try_lock_of_a_free_key;
    /// `try_lock_for` of a key that stays locked.
    try_lock_for_until_the_deadline;
    /// `try_lock_for` of a key that is released in time.
    try_lock_for_with_success;
    /// `try_lock_for` behind a local holder, until the deadline.
    try_lock_for_behind_a_local_holder;
    /// `lock` for an owner when another caller of the same owner is granted the lock first.
    lock_for_an_owner_granted_elsewhere;
    /// `lock` for an owner while another caller of the same owner waits behind.
    lock_for_an_owner_with_another_caller;
    /// Nested locks within `Owner::scope`.
    nested_locks_in_a_scope;
    /// `unlock`.
    unlock;
    /// `unlock` of one of several guards of a hold.
    unlock_of_a_further_guard;
    /// `unlock` before the `min_hold` is over.
    unlock_before_min_hold;
    /// `unlock` of a lock that was lost.
    unlock_of_a_lost_lock;
    /// `extend`.
    extend;
    /// `protect`, with work that ends.
    protect;
    /// `protect` under a lock that is lost.
    protect_until_the_loss;
    /// `execute_locked`.
    execute_locked;
    /// `read` of a free key.
    read_of_a_free_key;
    /// `read` next to a local reader, whose grant it joins.
    read_beside_a_local_reader;
    /// `read` of a key that another process holds exclusively and frees after a while.
    read_behind_a_writer;
    /// `upgrade` next to a reader of another process.
    upgrade_beside_a_reader;
    /// `try_upgrade_for` until its deadline, and the release of the unchanged guard.
    try_upgrade_for_until_the_deadline;
    /// `downgrade`.
    downgrade;
    /// `downgrade_to_upgradable`, and `upgrade` again.
    downgrade_to_upgradable;
    /// `acquire_many` of units of which another process holds too many.
    acquire_many_behind_a_permit;
    /// `lock` of several keys, of which another process holds one.
    lock_of_several_keys;
    /// `unlock` of several keys.
    unlock_of_several_keys;
    /// `close` of a registry without locks.
    close_at_rest;
    /// `close` while a guard is released.
    close_while_a_guard_is_released;
    /// `close` while a guard is still held.
    close_with_a_held_guard;
    /// `close` while a caller is acquiring.
    close_while_a_caller_contends;

    only_over_memory:
    /// `lock` of a key that another process reads. The waiting caller blocks new readers.
    lock_behind_a_reader;
    /// `acquire` of a fair semaphore behind a local caller that waits for more units.
    acquire_behind_a_fair_caller;
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn locked(lock: &DistributedLock) -> LockGuard {
    lock.lock().await.unwrap()
}

/// Holds `guard` for 10 ms. The result of the release is ignored: the store may be unreachable.
async fn hold(guard: LockGuard) {
    tokio::time::sleep(ms(10)).await;
    drop(guard.unlock().await);
}

/// Waits for the lock and holds it for 10 ms.
async fn lock_and_hold(lock: DistributedLock, options: LockOptions) {
    hold(lock.lock_with(options).await.unwrap()).await;
}

/// Locks with `options`, and ignores failures caused by the faults.
async fn attempt(lock: DistributedLock, options: LockOptions) -> Vec<LockGuard> {
    lock.lock_with(options).await.into_iter().collect()
}

/// Locks with the default options, and ignores failures caused by the faults.
async fn attempt_default(lock: DistributedLock) -> Vec<LockGuard> {
    lock.lock().await.into_iter().collect()
}

async fn lock_of_a_free_key(_: &Environment, setup: &TestSetup) -> Scenario {
    Scenario::of(attempt_default(setup.local.obtain(KEY)))
}

async fn lock_of_a_key_that_is_released(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.remote.obtain(KEY)).await;
    Scenario::of(attempt_default(setup.local.obtain(KEY))).with_concurrent(hold(held))
}

async fn lock_behind_a_local_holder(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.local.obtain(KEY)).await;
    Scenario::of(attempt_default(setup.local.obtain(KEY))).with_concurrent(hold(held))
}

async fn lock_behind_a_local_contender(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.remote.obtain(KEY)).await;
    let (lock, first) = (setup.local.obtain(KEY), setup.local.obtain(KEY));
    let scenario = Scenario::of(attempt_default(lock))
        .with_concurrent(lock_and_hold(first, LockOptions::new()))
        .with_concurrent(hold(held));
    enqueue_spawned().await;
    scenario
}

/// Lets the callers that were just spawned join the queue.
async fn enqueue_spawned() {
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
}

async fn try_lock_of_a_free_key(_: &Environment, setup: &TestSetup) -> Scenario {
    Scenario::of(attempt(setup.local.obtain(KEY), LockOptions::new().wait(Duration::ZERO)))
}

async fn try_lock_for_until_the_deadline(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.remote.obtain(KEY)).await;
    let holder = async move {
        tokio::time::sleep(ms(100)).await;
        held.unlock().await.unwrap();
    };
    let options = LockOptions::new().wait(ms(50));
    Scenario::of(attempt(setup.local.obtain(KEY), options)).with_concurrent(holder)
}

async fn try_lock_for_with_success(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.remote.obtain(KEY)).await;
    let options = LockOptions::new().wait(Duration::from_secs(60));
    Scenario::of(attempt(setup.local.obtain(KEY), options)).with_concurrent(hold(held))
}

async fn try_lock_for_behind_a_local_holder(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.local.obtain(KEY)).await;
    // The deadline passes at the instant at which the holder releases the lock.
    let options = LockOptions::new().wait(ms(10));
    Scenario::of(attempt(setup.local.obtain(KEY), options)).with_concurrent(hold(held))
}

async fn lock_for_an_owner_granted_elsewhere(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.remote.obtain(KEY)).await;
    let options = LockOptions::new().owner(&Owner::new());
    let scenario = Scenario::of(attempt(setup.local.obtain(KEY), options.clone()))
        .with_concurrent(lock_and_hold(setup.local.obtain(KEY), options))
        .with_concurrent(hold(held));
    enqueue_spawned().await;
    scenario
}

async fn lock_for_an_owner_with_another_caller(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.local.obtain(KEY)).await;
    let options = LockOptions::new().owner(&Owner::new());
    Scenario::of(attempt(setup.local.obtain(KEY), options.clone()))
        .with_concurrent(lock_and_hold(setup.local.obtain(KEY), options))
        .with_concurrent(hold(held))
}

async fn nested_locks_in_a_scope(_: &Environment, setup: &TestSetup) -> Scenario {
    let lock = setup.local.obtain(KEY);
    Scenario::of(Owner::scope(async move {
        let mut guards = attempt_default(lock.clone()).await;
        guards.extend(attempt_default(lock.clone()).await);
        if let Some(inner) = guards.pop() {
            drop(inner.unlock().await);
        }
        guards.extend(attempt_default(lock).await);
        guards
    }))
}

async fn unlock_guard(guard: LockGuard) -> Vec<LockGuard> {
    drop(guard.unlock().await);
    Vec::new()
}

async fn unlock(_: &Environment, setup: &TestSetup) -> Scenario {
    Scenario::of(unlock_guard(locked(&setup.local.obtain(KEY)).await))
}

async fn unlock_of_a_further_guard(_: &Environment, setup: &TestSetup) -> Scenario {
    let guard = locked(&setup.local.obtain(KEY)).await;
    let further = guard.reenter().unwrap();
    Scenario { still_held: vec![Arc::new(guard)], ..Scenario::of(unlock_guard(further)) }
}

async fn unlock_before_min_hold(_: &Environment, setup: &TestSetup) -> Scenario {
    let options = LockOptions::new().min_hold(ms(100)).auto_renew(false);
    let guard = setup.local.obtain(KEY).lock_with(options).await.unwrap();
    Scenario::of(unlock_guard(guard))
}

async fn unlock_of_a_lost_lock(_: &Environment, setup: &TestSetup) -> Scenario {
    let guard = locked(&setup.local.obtain(KEY)).await;
    assert!(setup.remote.force_release(KEY).await.unwrap());
    Scenario::of(unlock_guard(guard))
}

async fn extend(environment: &Environment, setup: &TestSetup) -> Scenario {
    let guard = Arc::new(locked(&setup.local.obtain(KEY)).await);
    let extended = Arc::clone(&guard);
    // In some environments the lease must expire. A longer one would exceed their recovery limit.
    let lease = environment.lease();
    let swept = async move {
        drop(extended.extend(lease).await);
        Vec::new()
    };
    Scenario { still_held: vec![guard], ..Scenario::of(swept) }
}

async fn protect(_: &Environment, setup: &TestSetup) -> Scenario {
    let guard = Arc::new(locked(&setup.local.obtain(KEY)).await);
    let protecting = Arc::clone(&guard);
    let swept = async move {
        let work = async {
            for _ in 0..3 {
                tokio::time::sleep(ms(5)).await;
            }
        };
        protecting.protect(work).await.unwrap();
        Vec::new()
    };
    Scenario { still_held: vec![guard], ..Scenario::of(swept) }
}

async fn protect_until_the_loss(_: &Environment, setup: &TestSetup) -> Scenario {
    // The grant must arrive before the end of the hold, also on a busy machine.
    let options = LockOptions::new().max_hold(ms(500));
    let guard = setup.local.obtain(KEY).lock_with(options).await.unwrap();
    Scenario::of(async move {
        guard.protect(std::future::pending::<()>()).await.unwrap_err();
        drop(guard.unlock().await);
        Vec::new()
    })
}

async fn execute_locked(_: &Environment, setup: &TestSetup) -> Scenario {
    let registry = setup.local.clone();
    Scenario::of(async move {
        let work = async |guard: &LockGuard| {
            tokio::task::yield_now().await;
            assert!(guard.is_held());
        };
        drop(registry.execute_locked(KEY, work).await);
        Vec::new()
    })
}

/// Returns the guard, or `None` if the store does not support its mode.
fn supported(acquired: Result<LockGuard, LockError>) -> Option<LockGuard> {
    match acquired {
        Err(LockError::Unsupported { .. }) => None,
        acquired => Some(acquired.unwrap()),
    }
}

/// Adds a holder in another process, which releases after 10 ms. `None`: the store does not support
/// the mode of the holder.
fn with_remote_holder(scenario: Scenario, held: Option<LockGuard>) -> Scenario {
    match held {
        Some(held) => scenario.with_concurrent(hold(held)),
        None => scenario,
    }
}

async fn read(lock: DistributedLock) -> Vec<LockGuard> {
    lock.read().await.into_iter().collect()
}

async fn read_of_a_free_key(_: &Environment, setup: &TestSetup) -> Scenario {
    Scenario::of(read(setup.local.obtain(KEY)))
}

async fn read_beside_a_local_reader(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = supported(setup.local.obtain(KEY).read().await);
    let still_held = held.into_iter().map(Arc::new).collect();
    Scenario { still_held, ..Scenario::of(read(setup.local.obtain(KEY))) }
}

async fn read_behind_a_writer(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.remote.obtain(KEY)).await;
    Scenario::of(read(setup.local.obtain(KEY))).with_concurrent(hold(held))
}

async fn lock_behind_a_reader(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = supported(setup.remote.obtain(KEY).read().await);
    with_remote_holder(Scenario::of(attempt_default(setup.local.obtain(KEY))), held)
}

async fn upgrade_beside_a_reader(_: &Environment, setup: &TestSetup) -> Scenario {
    let reader = supported(setup.remote.obtain(KEY).read().await);
    let upgradable = supported(setup.local.obtain(KEY).upgradable().await);
    let upgraded = async move {
        let Some(upgradable) = upgradable else { return Vec::new() };
        upgradable.upgrade().await.into_iter().collect()
    };
    with_remote_holder(Scenario::of(upgraded), reader)
}

async fn try_upgrade_for_until_the_deadline(_: &Environment, setup: &TestSetup) -> Scenario {
    let reader = supported(setup.remote.obtain(KEY).read().await);
    let upgradable = supported(setup.local.obtain(KEY).upgradable().await);
    let upgraded = async move {
        let Some(upgradable) = upgradable else { return Vec::new() };
        match upgradable.try_upgrade_for(ms(5)).await {
            Ok(Ok(guard) | Err(guard)) => unlock_guard(guard).await,
            Err(_) => Vec::new(),
        }
    };
    with_remote_holder(Scenario::of(upgraded), reader)
}

async fn downgrade(_: &Environment, setup: &TestSetup) -> Scenario {
    let guard = locked(&setup.local.obtain(KEY)).await;
    Scenario::of(async move { guard.downgrade().await.into_iter().collect() })
}

async fn downgrade_to_upgradable(_: &Environment, setup: &TestSetup) -> Scenario {
    let guard = locked(&setup.local.obtain(KEY)).await;
    Scenario::of(async move {
        let Ok(guard) = guard.downgrade_to_upgradable().await else { return Vec::new() };
        guard.upgrade().await.into_iter().collect()
    })
}

async fn acquire_many_behind_a_permit(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = supported(setup.remote.semaphore(KEY, 3).acquire_many(2).await);
    let semaphore = setup.local.semaphore(KEY, 3);
    let acquired = async move { semaphore.acquire_many(2).await.into_iter().collect() };
    with_remote_holder(Scenario::of(acquired), held)
}

async fn acquire_behind_a_fair_caller(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = supported(setup.remote.semaphore(KEY, 3).acquire().await);
    let semaphore = setup.local.semaphore(KEY, 3);
    let has_permits = held.is_some();
    let first = semaphore.clone();
    let waits_for_all = async move {
        if has_permits {
            hold(first.acquire_with(3, LockOptions::new().fair(true)).await.unwrap()).await;
        }
    };
    let swept = async move {
        semaphore.acquire_with(1, LockOptions::new().fair(true)).await.into_iter().collect()
    };
    let scenario = with_remote_holder(Scenario::of(swept).with_concurrent(waits_for_all), held);
    enqueue_spawned().await;
    scenario
}

fn several_keys(environment: &Environment, setup: &TestSetup) -> MultiLock {
    setup.local.obtain_all(environment.other_keys().iter().copied().chain([KEY]))
}

async fn lock_of_several_keys(environment: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.remote.obtain(KEY)).await;
    let several = several_keys(environment, setup);
    let swept = async move {
        drop(several.lock().await);
        Vec::new()
    };
    with_other_keys(environment, Scenario::of(swept).with_concurrent(hold(held)))
}

async fn unlock_of_several_keys(environment: &Environment, setup: &TestSetup) -> Scenario {
    let guard = several_keys(environment, setup).lock().await.unwrap();
    let swept = async move {
        drop(guard.unlock().await);
        Vec::new()
    };
    with_other_keys(environment, Scenario::of(swept))
}

fn with_other_keys(environment: &Environment, scenario: Scenario) -> Scenario {
    Scenario { uses_other_keys: !environment.other_keys().is_empty(), ..scenario }
}

/// A scenario that sweeps `close`.
fn close_scenario(setup: &TestSetup, limit: Duration) -> Scenario {
    let registry = setup.local.clone();
    let swept = async move {
        _ = registry.close(limit).await;
        Vec::new()
    };
    Scenario { closes: true, ..Scenario::of(swept) }
}

async fn close_at_rest(_: &Environment, setup: &TestSetup) -> Scenario {
    close_scenario(setup, Duration::from_secs(60))
}

async fn close_while_a_guard_is_released(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.local.obtain(KEY)).await;
    close_scenario(setup, Duration::from_secs(60)).with_concurrent(hold(held))
}

async fn close_with_a_held_guard(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.local.obtain(KEY)).await;
    let holder = async move {
        // Holds until the loss notification, or for 200 ms if `close` was dropped before it.
        drop(tokio::time::timeout(ms(200), held.lost()).await);
    };
    close_scenario(setup, ms(20)).with_concurrent(holder)
}

async fn close_while_a_caller_contends(_: &Environment, setup: &TestSetup) -> Scenario {
    let held = locked(&setup.remote.obtain(KEY)).await;
    let lock = setup.local.obtain(KEY);
    let contender = async move { drop(lock.lock().await) };
    let scenario =
        close_scenario(setup, ms(20)).with_concurrent(contender).with_concurrent(hold(held));
    enqueue_spawned().await;
    scenario
}
