//! The auto traits of the types: where guards, locks, registries and their futures may be moved and
//! shared. Most of these tests pass by compiling.

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

const fn is_plain_data<T: Debug + Send + Sync + 'static>() {}

const _: () = {
    is_plain_data::<LockGuard>();
    is_plain_data::<DistributedLock>();
    is_plain_data::<Registry>();
    is_plain_data::<RegistryBuilder>();
    is_plain_data::<RoutingRegistry>();
    is_plain_data::<Arc<dyn LockRegistry>>();
    is_plain_data::<Box<dyn LockRegistry>>();
    is_plain_data::<Arc<dyn LockBackend>>();
    is_plain_data::<Arc<dyn Observer>>();
    is_plain_data::<MemoryBackend>();
    is_plain_data::<PassThroughBackend>();
    is_plain_data::<BlockingRegistry>();
    is_plain_data::<BlockingLock>();
    is_plain_data::<BlockingGuard>();
    is_plain_data::<LockOptions>();
    is_plain_data::<Owner>();
    is_plain_data::<Executed<u8>>();
    is_plain_data::<CloseReport>();
    is_plain_data::<Capabilities>();
    is_plain_data::<FencingToken>();
    is_plain_data::<Holder>();
    is_plain_data::<Finding>();
    is_plain_data::<Claim>();
    is_plain_data::<Key>();
    is_plain_data::<LostReason>();
    is_plain_data::<LockError>();
    is_plain_data::<BackendError>();
    is_plain_data::<ConfigError>();
};

const fn is_error<T: Error + Send + Sync + 'static>() {}

// The traits with which `?` converts an error into a `Box<dyn Error + Send + Sync>` or an
// `anyhow::Error`.
const _: () = {
    is_error::<LockError>();
    is_error::<BackendError>();
    is_error::<ConfigError>();
};

/// Takes a future that may be spawned.
async fn sent<F: Future + Send>(future: F) -> F::Output {
    future.await
}

/// Takes a future that may outlive everything it was created from.
async fn sent_away<F: Future<Output: Send> + Send + 'static>(future: F) -> F::Output {
    let task: tokio::task::JoinHandle<F::Output> = tokio::spawn(future);
    task.await.unwrap()
}

#[tokio::test]
async fn every_future_of_a_lock_can_be_sent() {
    let registry = Registry::in_memory().unwrap();
    let lock = registry.obtain("k");
    let options = LockOptions::new().wait(Duration::ZERO);
    drop(sent(lock.lock()).await.unwrap());
    sent(registry.idle()).await;
    drop(sent(lock.try_lock()).await.unwrap());
    drop(sent(lock.try_lock_for(Duration::ZERO)).await.unwrap());
    drop(sent(lock.try_lock_with(options)).await.unwrap());
    drop(sent(lock.holders()).await.unwrap());
}

#[tokio::test]
async fn every_future_of_a_guard_can_be_sent() {
    let registry = Registry::in_memory().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    sent(guard.extend(Duration::from_secs(30))).await.unwrap();
    sent(guard.protect(async {})).await.unwrap();
    sent(guard.unlock()).await.unwrap();
}

#[tokio::test]
async fn every_future_of_a_registry_can_be_sent() {
    let registry = Registry::in_memory().unwrap();
    sent(registry.list()).await.unwrap();
    sent(registry.force_release("k")).await.unwrap();
    sent(registry.diagnose()).await.unwrap();
    sent(registry.idle()).await;
    _ = sent(registry.close(Duration::ZERO)).await;
}

#[tokio::test]
async fn a_guard_can_be_moved_to_another_task_and_unlocked_there() {
    let registry = Registry::in_memory().unwrap();
    let guard = registry.obtain("k").lock().await.unwrap();
    sent_away(guard.unlock()).await.unwrap();
    assert_eq!(registry.held(), 0);
}

#[tokio::test]
async fn a_guard_can_be_shared_between_tasks() {
    let registry = Registry::in_memory().unwrap();
    let guard = Arc::new(registry.obtain("k").lock().await.unwrap());
    let shared = Arc::clone(&guard);
    assert!(sent_away(async move { shared.protect(async {}).await }).await.is_ok());
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
    let done = sent_away(async move {
        let work = async |guard: &LockGuard| {
            tokio::task::yield_now().await;
            (guard.is_held(), seen.len())
        };
        concrete.execute_locked("k", work).await
    });
    assert_eq!(done.await.unwrap().output, (true, 8));

    let done = sent_away(async move {
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
    let nested = sent_away(async move {
        Owner::scope(async {
            let outer = registry.obtain("k").lock().await.unwrap();
            let inner = registry.obtain("k").lock().await.unwrap();
            outer.fencing_token() == inner.fencing_token()
        })
        .await
    });
    assert!(nested.await);
}
