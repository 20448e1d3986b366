//! The cancellation sweep: each operation is dropped after every possible number of polls, over the
//! in-process store, over SQLite and behind faults.
//!
//! After every drop the key becomes free again: within a second if no reply was lost, otherwise
//! within the lease. Other callers of the lock and the registry are not affected, and nothing is
//! left behind. The scenes are here. The stores, the faults and the checks are in the folder
//! `sweep`.

#![expect(
    clippy::unwrap_used,
    clippy::future_not_send,
    reason = "a test may panic, and drives its futures by hand on one thread"
)]

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    DistributedLock, LockGuard, LockOptions, LockRegistry, LockRegistryExt as _, Owner,
};

#[path = "sweep/worlds.rs"]
mod worlds;

#[path = "sweep/faults.rs"]
mod faults;

#[path = "sweep/wire.rs"]
mod wire;

#[path = "sweep/fair.rs"]
mod fair;

use worlds::{KEY, Scene, Stage, World};

/// Each scene becomes two tests: one over the in-process store on paused time, one over SQLite.
macro_rules! swept {
    ($($(#[doc = $doc:literal])+ $scene:ident;)+) => {
        mod over_memory {
            $($(#[doc = $doc])+
            #[tokio::test(start_paused = true)]
            async fn $scene() {
                for world in super::worlds::paused() {
                    world.sweep(super::$scene).await;
                }
            })+
        }

        mod over_sqlite {
            $($(#[doc = $doc])+
            #[tokio::test]
            async fn $scene() {
                let folder = tempfile::tempdir().unwrap();
                for world in super::worlds::sqlite(&folder) {
                    world.sweep(super::$scene).await;
                }
            })+
        }
    };
}

swept! {
    /// `lock` of a free key.
    lock_of_a_free_key;
    /// `lock` of a key that another process holds and frees after a while.
    lock_of_a_key_that_comes_free;
    /// `lock` behind a local caller that hands the claim over.
    lock_behind_a_local_holder;
    /// `lock` behind a local caller that still competes with another process.
    lock_behind_a_local_contender;
    /// `try_lock` of a free key.
    try_lock_of_a_free_key;
    /// `try_lock_for` of a key that stays locked.
    try_lock_for_in_vain;
    /// `try_lock_for` of a key that is released in time.
    try_lock_for_with_success;
    /// `try_lock_for` behind a local holder, until the deadline.
    try_lock_for_behind_a_local_holder;
    /// `lock` for an owner whose other caller gets the lock first.
    lock_for_an_owner_who_gets_it_elsewhere;
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
    /// `renew`.
    renew;
    /// `protect`, with work that ends.
    protect;
    /// `protect` under a lock that is lost.
    protect_until_the_loss;
    /// `execute_locked`.
    execute_locked;
    /// `close` of a registry without locks.
    close_at_rest;
    /// `close` while a guard is released.
    close_while_a_guard_is_let_go;
    /// `close` while a guard is still held.
    close_over_a_guard_that_stays;
    /// `close` while a caller is acquiring.
    close_while_a_caller_contends;
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
async fn visit(lock: DistributedLock, options: LockOptions) {
    hold(lock.lock_with(options).await.unwrap().unwrap()).await;
}

/// Locks with `options`, and ignores failures caused by the faults.
async fn attempt(lock: DistributedLock, options: LockOptions) -> Vec<LockGuard> {
    lock.lock_with(options).await.ok().flatten().into_iter().collect()
}

/// Locks with the default options, and ignores failures caused by the faults.
async fn attempt_plainly(lock: DistributedLock) -> Vec<LockGuard> {
    lock.lock().await.into_iter().collect()
}

async fn lock_of_a_free_key(_: &World, stage: &Stage) -> Scene {
    Scene::of(attempt_plainly(stage.ours.obtain(KEY)))
}

async fn lock_of_a_key_that_comes_free(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.theirs.obtain(KEY)).await;
    Scene::of(attempt_plainly(stage.ours.obtain(KEY))).beside(hold(held))
}

async fn lock_behind_a_local_holder(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.ours.obtain(KEY)).await;
    Scene::of(attempt_plainly(stage.ours.obtain(KEY))).beside(hold(held))
}

async fn lock_behind_a_local_contender(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.theirs.obtain(KEY)).await;
    let (lock, first) = (stage.ours.obtain(KEY), stage.ours.obtain(KEY));
    let scene = Scene::of(attempt_plainly(lock))
        .beside(visit(first, LockOptions::new()))
        .beside(hold(held));
    in_line().await;
    scene
}

/// Lets the callers that were just spawned join the queue.
async fn in_line() {
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
}

async fn try_lock_of_a_free_key(_: &World, stage: &Stage) -> Scene {
    Scene::of(attempt(stage.ours.obtain(KEY), LockOptions::new().wait(Duration::ZERO)))
}

async fn try_lock_for_in_vain(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.theirs.obtain(KEY)).await;
    let lasting = async move {
        tokio::time::sleep(ms(100)).await;
        held.unlock().await.unwrap();
    };
    let options = LockOptions::new().wait(ms(50));
    Scene::of(attempt(stage.ours.obtain(KEY), options)).beside(lasting)
}

async fn try_lock_for_with_success(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.theirs.obtain(KEY)).await;
    let options = LockOptions::new().wait(Duration::from_secs(60));
    Scene::of(attempt(stage.ours.obtain(KEY), options)).beside(hold(held))
}

async fn try_lock_for_behind_a_local_holder(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.ours.obtain(KEY)).await;
    // The deadline and the end of the hold fall on the same instant.
    let options = LockOptions::new().wait(ms(10));
    Scene::of(attempt(stage.ours.obtain(KEY), options)).beside(hold(held))
}

async fn lock_for_an_owner_who_gets_it_elsewhere(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.theirs.obtain(KEY)).await;
    let options = LockOptions::new().owner(&Owner::new());
    let scene = Scene::of(attempt(stage.ours.obtain(KEY), options.clone()))
        .beside(visit(stage.ours.obtain(KEY), options))
        .beside(hold(held));
    in_line().await;
    scene
}

async fn lock_for_an_owner_with_another_caller(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.ours.obtain(KEY)).await;
    let options = LockOptions::new().owner(&Owner::new());
    Scene::of(attempt(stage.ours.obtain(KEY), options.clone()))
        .beside(visit(stage.ours.obtain(KEY), options))
        .beside(hold(held))
}

async fn nested_locks_in_a_scope(_: &World, stage: &Stage) -> Scene {
    let lock = stage.ours.obtain(KEY);
    Scene::of(Owner::scope(async move {
        let mut guards = attempt_plainly(lock.clone()).await;
        guards.extend(attempt_plainly(lock.clone()).await);
        if let Some(inner) = guards.pop() {
            drop(inner.unlock().await);
        }
        guards.extend(attempt_plainly(lock).await);
        guards
    }))
}

async fn let_go(guard: LockGuard) -> Vec<LockGuard> {
    drop(guard.unlock().await);
    Vec::new()
}

async fn unlock(_: &World, stage: &Stage) -> Scene {
    Scene::of(let_go(locked(&stage.ours.obtain(KEY)).await))
}

async fn unlock_of_a_further_guard(_: &World, stage: &Stage) -> Scene {
    let guard = locked(&stage.ours.obtain(KEY)).await;
    let further = guard.reenter().unwrap();
    Scene { kept: vec![Arc::new(guard)], ..Scene::of(let_go(further)) }
}

async fn unlock_before_min_hold(_: &World, stage: &Stage) -> Scene {
    let options = LockOptions::new().min_hold(ms(100)).renew(false);
    let guard = stage.ours.obtain(KEY).lock_with(options).await.unwrap().unwrap();
    Scene::of(let_go(guard))
}

async fn unlock_of_a_lost_lock(_: &World, stage: &Stage) -> Scene {
    let guard = locked(&stage.ours.obtain(KEY)).await;
    assert!(stage.theirs.force_release(KEY).await.unwrap());
    Scene::of(let_go(guard))
}

async fn renew(world: &World, stage: &Stage) -> Scene {
    let guard = Arc::new(locked(&stage.ours.obtain(KEY)).await);
    let renewed = Arc::clone(&guard);
    // Renewing for a longer lease would invalidate the limit of worlds that wait for its end.
    let lease = world.lease();
    let swept = async move {
        drop(renewed.renew(lease).await);
        Vec::new()
    };
    Scene { kept: vec![guard], ..Scene::of(swept) }
}

async fn protect(_: &World, stage: &Stage) -> Scene {
    let guard = Arc::new(locked(&stage.ours.obtain(KEY)).await);
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
    Scene { kept: vec![guard], ..Scene::of(swept) }
}

async fn protect_until_the_loss(_: &World, stage: &Stage) -> Scene {
    let options = LockOptions::new().max_hold(ms(100));
    let guard = stage.ours.obtain(KEY).lock_with(options).await.unwrap().unwrap();
    Scene::of(async move {
        guard.protect(std::future::pending::<()>()).await.unwrap_err();
        drop(guard.unlock().await);
        Vec::new()
    })
}

async fn execute_locked(_: &World, stage: &Stage) -> Scene {
    let registry = stage.ours.clone();
    Scene::of(async move {
        let work = async |guard: &LockGuard| {
            tokio::task::yield_now().await;
            assert!(guard.is_held());
        };
        drop(registry.execute_locked(KEY, work).await);
        Vec::new()
    })
}

/// A scene that sweeps `close`.
fn closing(stage: &Stage, limit: Duration) -> Scene {
    let registry = stage.ours.clone();
    let swept = async move {
        registry.close(limit).await;
        Vec::new()
    };
    Scene { closes: true, ..Scene::of(swept) }
}

async fn close_at_rest(_: &World, stage: &Stage) -> Scene {
    closing(stage, Duration::from_secs(60))
}

async fn close_while_a_guard_is_let_go(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.ours.obtain(KEY)).await;
    closing(stage, Duration::from_secs(60)).beside(hold(held))
}

async fn close_over_a_guard_that_stays(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.ours.obtain(KEY)).await;
    let stubborn = async move {
        // Holds until the loss notification, or for 200 ms if `close` was dropped before it.
        drop(tokio::time::timeout(ms(200), held.lost()).await);
    };
    closing(stage, ms(20)).beside(stubborn)
}

async fn close_while_a_caller_contends(_: &World, stage: &Stage) -> Scene {
    let held = locked(&stage.theirs.obtain(KEY)).await;
    let lock = stage.ours.obtain(KEY);
    let contender = async move { drop(lock.lock().await) };
    let scene = closing(stage, ms(20)).beside(contender).beside(hold(held));
    in_line().await;
    scene
}
