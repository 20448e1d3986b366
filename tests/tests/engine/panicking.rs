//! Backends that panic: the panic reaches the caller, other callers are not affected, and the
//! background releaser and the lease renewer keep running.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockError, LockOptions, LockRegistryExt as _, MemoryBackend, Registry};
use tokio::sync::oneshot;

use super::panicking_backend::PanickingBackend;

/// Longer than the default lease.
const LONG: Duration = Duration::from_secs(60);

fn over(store: &MemoryBackend) -> (Registry, Arc<PanickingBackend>) {
    let backend = Arc::new(PanickingBackend::over(store.clone()));
    let registry = Registry::builder(Arc::clone(&backend) as _).build().unwrap();
    (registry, backend)
}

/// Runs `call` in its own task, which must panic.
async fn assert_panics<T: Send + 'static>(
    what: &str,
    call: impl Future<Output = T> + Send + 'static,
) {
    match tokio::spawn(call).await {
        Err(error) => assert!(error.is_panic(), "{what}"),
        Ok(_) => panic!("the panic in {what} did not reach its caller"),
    }
}

/// Checks that the registry still works: it queues, renews, releases in the background, and closes.
async fn assert_works(registry: Registry) {
    let minutes = Duration::from_secs(300);
    for key in ["k", "other"] {
        let lock = registry.obtain(key);
        let guard = lock.try_lock_for(LONG).await.unwrap().unwrap();
        tokio::time::sleep(minutes).await;
        assert!(guard.is_held(), "{key}: renewals have stopped");
        drop(guard);
        lock.try_lock_for(LONG).await.unwrap().unwrap().unlock().await.unwrap();
    }
    wait_until_idle(&registry).await;
    assert_eq!((registry.local_locks(), registry.held()), (0, 0));
    assert!(registry.close(Duration::from_secs(60)).await.is_clean());
}

async fn wait_until_idle(registry: &Registry) {
    let idle = tokio::time::timeout(Duration::from_secs(60), registry.idle());
    idle.await.expect("the background releaser becomes idle");
}

#[tokio::test(start_paused = true)]
async fn a_panic_reaches_only_its_caller() {
    for method in PanickingBackend::METHODS {
        // These methods are not called by a request of a caller, or another test covers them.
        if ["capabilities", "shard", "close"].contains(method) {
            continue;
        }
        let store = MemoryBackend::new();
        let (local, backend) = over(&store);
        let other_holder = local.obtain("other holder").lock().await.unwrap();
        let registry = local.clone();
        let lock = local.obtain("k");
        let busy = *method == "wait";
        let remote_guard = if busy {
            let remote = Registry::builder(Arc::new(store.clone())).build().unwrap();
            Some(remote.obtain("k").lock().await.unwrap())
        } else {
            None
        };
        let held = match *method {
            "renew" | "release" | "release, done" => Some(lock.lock().await.unwrap()),
            _ => None,
        };
        backend.panic_once_in(method);
        assert_panics(method, async move {
            match (*method, held) {
                ("renew", Some(held)) => drop(held.extend(Duration::from_secs(30)).await),
                (_, Some(held)) => drop(held.unlock().await),
                ("inspect", _) => drop(lock.holders().await),
                ("list", _) => drop(registry.list().await),
                ("force_release", _) => drop(registry.force_release("k").await),
                ("diagnose", _) => drop(registry.diagnose().await),
                _ => drop(lock.lock().await),
            }
        })
        .await;
        if let Some(remote_guard) = remote_guard {
            remote_guard.unlock().await.unwrap();
        }
        assert!(other_holder.is_held(), "{method}");
        other_holder.unlock().await.unwrap();
        assert_works(local).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_does_not_block_the_next_caller() {
    for method in ["try_acquire", "try_acquire, done", "release", "release, done"] {
        let (local, backend) = over(&MemoryBackend::new());
        let (lock, next) = (local.obtain("k"), local.obtain("k"));
        let (start, started) = oneshot::channel::<()>();
        let first = tokio::spawn(async move {
            let locked = if method.starts_with("release") { lock.lock().await.ok() } else { None };
            started.await.unwrap();
            match locked {
                Some(guard) => drop(guard.unlock().await),
                None => drop(lock.lock().await),
            }
        });
        tokio::task::yield_now().await;
        // Different options than the first holder's, so that the claim is not handed over.
        let options = LockOptions::new().lease(Duration::from_secs(20));
        backend.panic_once_in(method);
        start.send(()).unwrap();
        tokio::task::yield_now().await;
        let limit = Duration::from_secs(31);
        let acquired = tokio::time::timeout(limit, next.lock_with(options)).await;
        acquired.expect(method).unwrap().unlock().await.unwrap();
        drop(next);
        assert!(first.await.unwrap_err().is_panic(), "{method}");
        assert_works(local).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_the_release_of_one_key_does_not_keep_the_other_key() {
    let store = MemoryBackend::new();
    let (registry, backend) = over(&store);
    let guard = registry.obtain_all(["a", "b"]).lock().await.unwrap();
    backend.panic_once_in("release");
    assert_panics("release", guard.unlock()).await;
    let (remote, _) = over(&store);
    let second = Duration::from_secs(1);
    assert!(remote.obtain("b").try_lock_for(second).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_panic_does_not_stop_the_background_releaser() {
    for method in ["release", "release, done"] {
        let (local, backend) = over(&MemoryBackend::new());
        let guard = local.obtain("k").lock().await.unwrap();
        backend.panic_once_in(method);
        drop(guard);
        wait_until_idle(&local).await;
        assert!(backend.has_panicked(), "{method}");
        assert_works(local).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_does_not_stop_the_lease_renewer() {
    let (local, backend) = over(&MemoryBackend::new());
    let (guard, other) =
        (local.obtain("a").lock().await.unwrap(), local.obtain("b").lock().await.unwrap());
    backend.panic_once_in("renew");
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(backend.has_panicked());
    assert!(guard.is_held() && other.is_held(), "one panic costs a renewal, not a lock");
    drop((guard, other));
    assert_works(local).await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_when_it_is_closed_is_closed() {
    let (local, backend) = over(&MemoryBackend::new());
    backend.panic_once_in("close");
    assert!(local.close(LONG).await.is_clean());
    assert!(backend.has_panicked());
    assert!(local.close(LONG).await.is_clean());
    assert!(matches!(local.obtain("k").lock().await, Err(LockError::Closed)));
}

#[tokio::test]
async fn a_store_that_panics_in_capabilities_builds_no_registry() {
    let backend = Arc::new(PanickingBackend::over(MemoryBackend::new()));
    backend.panic_once_in("capabilities");
    let build = AssertUnwindSafe(|| Registry::builder(Arc::clone(&backend) as _).build());
    assert!(catch_unwind(build).is_err());
    assert!(Registry::builder(backend).build().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_panic_after_a_grant_loses_no_grant() {
    let (local, backend) = over(&MemoryBackend::new());
    backend.panic_once_in("capabilities");
    let guard = local.obtain("k").try_lock().await.unwrap().unwrap();
    assert!(backend.has_panicked());
    guard.unlock().await.unwrap();
    assert_works(local).await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_while_renewals_are_batched_loses_no_lease() {
    for method in ["shard", "capabilities"] {
        let (local, backend) = over(&MemoryBackend::new());
        let guard = local.obtain("k").lock().await.unwrap();
        backend.panic_once_in(method);
        let lease = guard.valid_for();
        tokio::time::sleep(lease * 3).await;
        assert!(backend.has_panicked(), "{method}");
        assert!(guard.is_held(), "{method}");
        guard.unlock().await.unwrap();
    }
}
