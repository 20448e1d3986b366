//! `Registry::close` over the in-process store behind faults: its report is correct, no lock stays
//! held, and no caller waits longer than necessary.

use std::sync::Arc;
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    LockBackend, LockError, LockEvent, LockOptions, MemoryBackend, Observer, Registry,
};
use tokio::sync::Notify;
use tokio::time::{advance, timeout};

use super::panicking_backend::PanickingBackend;

/// During an `unlock`, the lock is neither held any more nor queued at the background releaser.
/// `close` must not close the store before the `unlock` completes.
#[tokio::test(start_paused = true)]
async fn close_waits_for_an_unlock_in_flight() {
    let store = MemoryBackend::new();
    let slow =
        Faults::none().always(Operation::Release, Fault::DelayRequest(Duration::from_millis(500)));
    let faulty: Arc<dyn LockBackend> = Arc::new(FaultyBackend::new(Arc::new(store.clone()), slow));
    let local = Registry::builder(faulty).build().unwrap();
    let remote = Registry::builder(Arc::new(store)).build().unwrap();
    let guard = local.obtain("k").lock().await.unwrap();
    let unlocking = tokio::spawn(guard.unlock());
    tokio::task::yield_now().await;
    let report = local.close(Duration::from_secs(60)).await;
    assert!(report.is_clean(), "{report:?}");
    let next = remote.obtain("k").try_lock().await.unwrap();
    assert!(next.is_some(), "closed with a clean report, and the key is still locked");
    unlocking.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_caller_in_flight_during_close_returns_closed() {
    let store = MemoryBackend::new();
    let slow =
        Faults::none().always(Operation::Acquire, Fault::DelayReply(Duration::from_millis(500)));
    let faulty: Arc<dyn LockBackend> = Arc::new(FaultyBackend::new(Arc::new(store.clone()), slow));
    let local = Registry::builder(faulty).build().unwrap();
    let locking = tokio::spawn({
        let lock = local.obtain("k");
        async move { lock.lock().await }
    });
    tokio::task::yield_now().await;
    let report = local.close(Duration::from_secs(60)).await;
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(store.records(), 0, "closed with a clean report, and the key is locked");
    assert!(matches!(locking.await.unwrap(), Err(LockError::Closed)));
    advance(Duration::from_secs(60)).await;
    assert_eq!(store.records(), 0);
    assert_eq!((local.local_locks(), local.held()), (0, 0));
}

/// The limit applies to holders. Waiting calls return an error at once.
#[tokio::test(start_paused = true)]
async fn waiters_return_closed_before_the_limit() {
    let store = MemoryBackend::new();
    let open = || Registry::builder(Arc::new(store.clone())).build().unwrap();
    let (local, remote) = (open(), open());
    let held = local.obtain("local").lock().await.unwrap();
    let remote_guard = remote.obtain("remote").lock().await.unwrap();
    let waiters = ["local", "remote"].map(|key| {
        let lock = local.obtain(key);
        tokio::spawn(async move { lock.lock().await })
    });
    tokio::task::yield_now().await;
    let closing = tokio::spawn({
        let local = local.clone();
        async move { local.close(Duration::from_secs(60)).await }
    });
    for waiter in waiters {
        let result = timeout(Duration::from_secs(1), waiter).await.unwrap();
        assert!(matches!(result.unwrap(), Err(LockError::Closed)));
    }
    assert!(held.is_held() && !closing.is_finished());
    held.unlock().await.unwrap();
    assert!(closing.await.unwrap().is_clean());
    remote_guard.unlock().await.unwrap();
}

/// A key stays locked for its `min_hold` even without the registry. Therefore `close` need not
/// wait for the end of the `min_hold`.
#[tokio::test(start_paused = true)]
async fn a_min_hold_does_not_delay_close() {
    let store = MemoryBackend::new();
    let local = Registry::builder(Arc::new(store.clone())).build().unwrap();
    let remote = Registry::builder(Arc::new(store)).build().unwrap();
    let options = LockOptions::new().min_hold(Duration::from_secs(3_600));
    let guard = local.obtain("k").lock_with(options).await.unwrap();
    guard.unlock().await.unwrap();
    let started = tokio::time::Instant::now();
    let report = local.close(Duration::from_millis(50)).await;
    assert!(started.elapsed() < Duration::from_millis(500), "it took {:?}", started.elapsed());
    assert_eq!((report.released, report.lost, report.abandoned), (0, 0, 1));
    tokio::time::sleep(Duration::from_secs(3_500)).await;
    assert!(remote.obtain("k").try_lock().await.unwrap().is_none(), "its min_hold is not over");
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert!(remote.obtain("k").try_lock().await.unwrap().is_some());
}

/// If the store refuses a release, the key stays locked. The report is then not clean.
#[tokio::test(start_paused = true)]
async fn a_refused_release_is_reported() {
    let refuses = Faults::none().always(Operation::Release, Fault::Deny);
    let faulty = FaultyBackend::new(Arc::new(MemoryBackend::new()), refuses);
    let local = Registry::builder(Arc::new(faulty)).build().unwrap();
    let guard = local.obtain("k").lock().await.unwrap();
    let report = {
        let closing = local.close(Duration::from_secs(60));
        tokio::pin!(closing);
        assert!(futures_util::poll!(closing.as_mut()).is_pending());
        drop(guard);
        closing.await
    };
    assert_eq!((report.released, report.lost, report.abandoned), (0, 0, 1), "{report:?}");
}

/// The limit applies to holders. A release that started in time may take as long as the store
/// needs.
#[tokio::test(start_paused = true)]
async fn an_unlock_that_began_in_time_completes() {
    let slow =
        Faults::none().always(Operation::Release, Fault::DelayRequest(Duration::from_millis(400)));
    let faulty = FaultyBackend::new(Arc::new(MemoryBackend::new()), slow);
    let local = Registry::builder(Arc::new(faulty)).build().unwrap();
    let unlocking = tokio::spawn(local.obtain("k").lock().await.unwrap().unlock());
    tokio::time::sleep(Duration::from_millis(50)).await;
    let report = local.close(Duration::from_millis(100)).await;
    assert!(report.is_clean() && report.released == 1, "{report:?}");
    unlocking.await.unwrap().unwrap();
}

/// A store that panics returns no result, and without a result the report does not count a release.
#[tokio::test(start_paused = true)]
async fn a_release_that_panics_is_not_reported_as_done() {
    let store = MemoryBackend::new();
    let backend = Arc::new(PanickingBackend::over(store.clone()));
    let local = Registry::builder(Arc::clone(&backend) as _).build().unwrap();
    let guard = local.obtain("k").lock().await.unwrap();
    backend.panic_once_in("release");
    drop(guard);
    let report = local.close(Duration::from_secs(1)).await;
    assert!(backend.has_panicked());
    assert_eq!(report.is_clean(), store.records() == 0, "{report:?}, {} records", store.records());
}

/// Repeated releases of one claim to a silent store count as one claim. Queries about a lock do not
/// count.
#[tokio::test(start_paused = true)]
async fn a_claim_is_abandoned_once_however_often_its_release_was_sent() {
    let never = Fault::DelayRequest(Duration::from_secs(100_000));
    let silent = Faults::none()
        .always(Operation::Release, never)
        .always(Operation::Inspect, never)
        .always(Operation::List, never);
    let faulty = FaultyBackend::new(Arc::new(MemoryBackend::new()), silent);
    let local = Registry::builder(Arc::new(faulty)).build().unwrap();
    let (one, other) =
        (local.obtain("one").lock().await.unwrap(), local.obtain("other").lock().await.unwrap());
    drop(one);
    other.unlock().await.unwrap_err();
    local.obtain("one").holders().await.unwrap_err();
    local.list().await.unwrap_err();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let report = local.close(Duration::from_secs(1)).await;
    assert_eq!((report.lost, report.abandoned), (0, 2), "{report:?}");
}

/// After a request whose reply was lost, a grant may appear late. The search for it delays `close`
/// by no more than its limit.
#[tokio::test(start_paused = true)]
async fn the_search_for_a_late_grant_does_not_delay_close() {
    let lossy = Faults::none().at_call(Operation::Acquire, 1, Fault::LoseRequest);
    let faulty = FaultyBackend::new(Arc::new(MemoryBackend::new()), lossy);
    let local = Registry::builder(Arc::new(faulty)).build().unwrap();
    local.obtain("k").lock().await.unwrap().unlock().await.unwrap();
    let started = tokio::time::Instant::now();
    let report = local.close(Duration::from_secs(1)).await;
    assert!(started.elapsed() < Duration::from_millis(1_500), "it took {:?}", started.elapsed());
    assert_eq!((report.lost, report.abandoned), (0, 1), "{report:?}");
}

/// Notifies when a registry has closed.
#[derive(Debug, Default)]
struct CloseNotifier(Notify);

impl Observer for CloseNotifier {
    fn on(&self, event: &LockEvent<'_>) {
        if matches!(event, LockEvent::Closed) {
            self.0.notify_one();
        }
    }
}

/// The background task that releases dropped guards completes a `close` that its caller dropped.
#[tokio::test(start_paused = true)]
async fn a_close_that_is_dropped_while_a_renewal_is_in_flight_closes_the_registry() {
    let late = Faults::none().always(Operation::Renew, Fault::DelayReply(Duration::from_secs(1)));
    let faulty = FaultyBackend::new(Arc::new(MemoryBackend::new()), late);
    let closed = Arc::new(CloseNotifier::default());
    let local = Registry::builder(Arc::new(faulty))
        .lease(Duration::from_secs(30))
        .observer(Arc::clone(&closed) as _)
        .build()
        .unwrap();
    let _guard = local.obtain("k").lock().await.unwrap();
    // The renewal begins after a third of the lease.
    tokio::time::sleep(Duration::from_millis(10_100)).await;
    let close = timeout(Duration::from_millis(100), local.close(Duration::ZERO));
    assert!(close.await.is_err(), "close waits for the renewal");
    timeout(Duration::from_secs(30), closed.0.notified()).await.expect("the registry closes");
}
