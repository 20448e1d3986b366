//! Tests `with_local_permit`: callers that acquire a lock without the engine wait in the same local
//! queue as callers of `lock()`.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::poll;
use registry_core::{Attempt, Claim, Key, LockBackend, MemoryBackend, Registry};
use tokio::time::{Instant, timeout};

const LEASE: Duration = Duration::from_secs(30);

fn store() -> (MemoryBackend, Registry) {
    let backend = MemoryBackend::new();
    let registry = Registry::builder(Arc::new(backend.clone())).lease(LEASE).build();
    (backend, registry.expect("a runtime"))
}

fn key() -> Key {
    Key::new("k").expect("a key")
}

#[tokio::test(start_paused = true)]
async fn with_local_permit_a_caller_waits_in_the_queue_and_gets_no_hand_over() {
    let (backend, registry) = store();
    let lock = registry.obtain("k");
    let first = lock.lock().await.unwrap();
    let claim = Claim::new(key(), LEASE);
    let key = key();
    let attempt = async {
        let attempt = backend.try_acquire(&claim).await.unwrap();
        assert!(matches!(attempt, Attempt::Granted(_)), "{attempt:?}");
        backend.release(&claim).await.unwrap();
    };
    let mut permit = pin!(registry.with_local_permit(&key, Duration::MAX, attempt));
    assert!(poll!(permit.as_mut()).is_pending(), "another caller is in front");
    let mut behind = pin!(lock.lock());
    assert!(poll!(behind.as_mut()).is_pending(), "two guards of one key");
    first.unlock().await.unwrap();
    assert!(poll!(behind.as_mut()).is_pending(), "`behind` overtook `permit`");
    permit.await;
    behind.await.unwrap().unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_a_permit_attempts_run_after_the_wait_or_one_second() {
    let (_backend, registry) = store();
    let guard = registry.obtain("k").lock().await.unwrap();
    let began = Instant::now();
    assert_eq!(
        registry.with_local_permit(&key(), Duration::from_millis(500), async { 7 }).await,
        7
    );
    assert_eq!(began.elapsed(), Duration::from_millis(500));
    // The caller in front may wait for a row that this caller has locked. Attempts therefore begin
    // after one second without a permit.
    let began = Instant::now();
    assert_eq!(registry.with_local_permit(&key(), Duration::MAX, async { 7 }).await, 7);
    assert_eq!(began.elapsed(), Duration::from_secs(1));
    guard.unlock().await.unwrap();
    _ = registry.close(Duration::ZERO).await;
    assert_eq!(registry.with_local_permit(&key(), Duration::MAX, async { 7 }).await, 7);
}

#[tokio::test(start_paused = true)]
async fn a_permit_ends_after_the_length_of_a_lease_polled_or_not() {
    for is_polled in [true, false] {
        let (_backend, registry) = store();
        let key = key();
        let mut permit = pin!(registry.with_local_permit(&key, Duration::MAX, pending::<()>()));
        assert!(poll!(permit.as_mut()).is_pending());
        let lock = registry.obtain("k");
        let behind = timeout(LEASE * 2, lock.lock());
        let guard = if is_polled {
            tokio::select! {
                guard = behind => guard,
                () = permit.as_mut() => panic!("the attempt never ends"),
            }
        } else {
            behind.await
        };
        let guard = guard.expect("the permit goes to the next caller").unwrap();
        // The caller without its permit waits for the next one, and blocks no other caller.
        assert!(poll!(permit.as_mut()).is_pending());
        guard.unlock().await.unwrap();
    }
}
