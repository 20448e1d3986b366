//! The public types and their futures are `Send` and `Sync`, so that guards, locks and registries
//! can be moved to and shared with other tasks. Most of these tests pass if they compile.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::Cell;
use std::error::Error;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use registry_core::blocking::{BlockingGuard, BlockingLock, BlockingRegistry};
use registry_core::{
    BackendError, Capabilities, Claim, CloseReport, ConfigError, DistributedLock, Executed,
    FencingToken, Finding, Holder, Key, LockBackend, LockError, LockGuard, LockOptions,
    LockRegistry, LockRegistryExt, LostReason, MemoryBackend, Observer, Owner, PassThroughBackend,
    Registry, RegistryBuilder, RoutingRegistry,
};

const fn is_debug_send_sync<T: Debug + Send + Sync + 'static>() {}

const _: () = {
    is_debug_send_sync::<LockGuard>();
    is_debug_send_sync::<DistributedLock>();
    is_debug_send_sync::<Registry>();
    is_debug_send_sync::<RegistryBuilder>();
    is_debug_send_sync::<RoutingRegistry>();
    is_debug_send_sync::<Arc<dyn LockRegistry>>();
    is_debug_send_sync::<Box<dyn LockRegistry>>();
    is_debug_send_sync::<Arc<dyn LockBackend>>();
    is_debug_send_sync::<Arc<dyn Observer>>();
    is_debug_send_sync::<MemoryBackend>();
    is_debug_send_sync::<PassThroughBackend>();
    is_debug_send_sync::<BlockingRegistry>();
    is_debug_send_sync::<BlockingLock>();
    is_debug_send_sync::<BlockingGuard>();
    is_debug_send_sync::<LockOptions>();
    is_debug_send_sync::<Owner>();
    is_debug_send_sync::<Executed<u8>>();
    is_debug_send_sync::<CloseReport>();
    is_debug_send_sync::<Capabilities>();
    is_debug_send_sync::<FencingToken>();
    is_debug_send_sync::<Holder>();
    is_debug_send_sync::<Finding>();
    is_debug_send_sync::<Claim>();
    is_debug_send_sync::<Key>();
    is_debug_send_sync::<LostReason>();
    is_debug_send_sync::<LockError>();
    is_debug_send_sync::<BackendError>();
    is_debug_send_sync::<ConfigError>();
};

const fn is_error<T: Error + Send + Sync + 'static>() {}

// The traits with which `?` converts an error into a `Box<dyn Error + Send + Sync>` or an
// `anyhow::Error`.
const _: () = {
    is_error::<LockError>();
    is_error::<BackendError>();
    is_error::<ConfigError>();
};

/// Awaits a future that must be `Send`.
async fn require_send<F: Future + Send>(future: F) -> F::Output {
    future.await
}

/// Spawns a future, which must be `Send` and borrow nothing, and returns its output.
async fn spawn_and_join<F: Future<Output: Send> + Send + 'static>(future: F) -> F::Output {
    let task: tokio::task::JoinHandle<F::Output> = tokio::spawn(future);
    task.await.unwrap()
}

#[tokio::test]
async fn every_future_of_a_lock_can_be_sent() {
    let registry = Registry::in_memory().unwrap();
    let lock = registry.obtain("k");
    let options = LockOptions::new().wait(Duration::ZERO);
    drop(require_send(lock.lock()).await.unwrap());
    require_send(registry.idle()).await;
    drop(require_send(lock.try_lock()).await.unwrap());
    drop(require_send(lock.try_lock_for(Duration::ZERO)).await.unwrap());
    drop(require_send(lock.try_lock_with(options)).await.unwrap());
    drop(require_send(lock.holders()).await.unwrap());
}

#[tokio::test]
async fn every_future_of_a_guard_can_be_sent() {
    let registry = Registry::in_memory().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    require_send(guard.extend(Duration::from_secs(30))).await.unwrap();
    require_send(guard.protect(async {})).await.unwrap();
    require_send(guard.unlock()).await.unwrap();
}

#[tokio::test]
async fn every_future_of_a_registry_can_be_sent() {
    let registry = Registry::in_memory().unwrap();
    require_send(registry.list()).await.unwrap();
    require_send(registry.force_release("k")).await.unwrap();
    require_send(registry.diagnose()).await.unwrap();
    require_send(registry.idle()).await;
    _ = require_send(registry.close(Duration::ZERO)).await;
}

#[tokio::test]
async fn a_guard_can_be_moved_to_another_task_and_unlocked_there() {
    let registry = Registry::in_memory().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    spawn_and_join(guard.unlock()).await.unwrap();
    assert_eq!(registry.held(), 0);
}

#[tokio::test]
async fn a_guard_can_be_shared_between_tasks() {
    let registry = Registry::in_memory().unwrap();
    let guard = Arc::new(registry.obtain("k").lock().await.unwrap());
    let shared = Arc::clone(&guard);
    assert!(spawn_and_join(async move { shared.protect(async {}).await }).await.is_ok());
    assert!(guard.is_held());
}

#[tokio::test]
async fn a_loss_future_outlives_the_borrow_of_the_guard() {
    let registry = Registry::in_memory().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    let lost = guard.lost();
    let watcher = tokio::spawn(lost);
    // The guard can be consumed while another task watches for its loss.
    guard.unlock().await.unwrap();
    watcher.abort();
}

#[tokio::test]
async fn registries_of_any_kind_are_usable_through_one_trait() {
    let memory = Registry::in_memory().unwrap();
    let routing = RoutingRegistry::new(Arc::new(memory.clone()));
    let registries: [Arc<dyn LockRegistry>; 2] = [Arc::new(memory), Arc::new(routing)];
    for registry in registries {
        let guard = registry.obtain("k").lock().await.unwrap();
        guard.unlock().await.unwrap();
        // The methods of the extension trait also exist on the trait object and on a borrow of it.
        let borrowed: &dyn LockRegistry = &*registry;
        let done = borrowed.execute_locked("k", async |_| 7).await.unwrap();
        assert_eq!(done.output, 7);
    }
}

#[tokio::test]
async fn locked_work_can_be_sent_when_the_work_can() {
    let concrete = Registry::in_memory().unwrap();
    let erased: Arc<dyn LockRegistry> = Arc::new(concrete.clone());
    let text = String::from("captured");

    let seen = text.clone();
    let done = spawn_and_join(async move {
        let work = async |guard: &LockGuard| {
            tokio::task::yield_now().await;
            (guard.is_held(), seen.len())
        };
        concrete.execute_locked("k", work).await
    });
    assert_eq!(done.await.unwrap().output, (true, 8));

    let done = spawn_and_join(async move {
        let work = async |guard: &LockGuard| {
            guard.extend(Duration::from_secs(30)).await.unwrap();
            text
        };
        erased.execute_locked_with("k", LockOptions::new().wait(Duration::from_secs(1)), work).await
    });
    assert_eq!(done.await.unwrap().unwrap().output, "captured");
}

#[tokio::test]
async fn locked_work_may_be_tied_to_its_thread() {
    let registry = Registry::in_memory().unwrap();
    let count = Cell::new(0);
    let work = async |_: &LockGuard| count.set(count.get() + 1);
    registry.execute_locked("k", work).await.unwrap().unlocked.unwrap();
    registry
        .execute_locked_with("k", LockOptions::new().wait(Duration::ZERO), work)
        .await
        .unwrap()
        .unwrap()
        .unlocked
        .unwrap();
    assert_eq!(count.get(), 2);
}

#[tokio::test]
async fn a_scope_of_an_owner_can_be_sent() {
    let registry = Registry::in_memory().unwrap();
    let nested = spawn_and_join(async move {
        Owner::scope(async {
            let outer = registry.obtain("k").lock().await.unwrap();
            let inner = registry.obtain("k").lock().await.unwrap();
            outer.fencing_token() == inner.fencing_token()
        })
        .await
    });
    assert!(nested.await);
}
