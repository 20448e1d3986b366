//! The tower layer over the in-process store: which requests run at the same time, and which errors
//! their callers receive.
#![cfg(feature = "tower")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use lock_registry::modes::ClaimMode;
use lock_registry::tower::{LockLayer, LockService, LockServiceError, RequestMode};
use lock_registry::{LockError, LockRegistryExt as _, Registry, connect};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;
use tower_layer::Layer;
use tower_service::Service;

type BoxFuture<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

/// A service that signals the start of each request and waits until the test resumes it. Panics if
/// more than `at_once_max` requests run at the same time.
#[derive(Clone)]
struct SlowService(Arc<RequestState>);

struct RequestState {
    at_once_max: usize,
    running: AtomicUsize,
    started: Notify,
    resume: Semaphore,
}

impl Service<&'static str> for SlowService {
    type Response = &'static str;
    type Error = Infallible;
    type Future = BoxFuture<&'static str, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: &'static str) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            let others = shared.running.fetch_add(1, Ordering::SeqCst);
            assert!(others < shared.at_once_max, "{} at once", others + 1);
            shared.started.notify_one();
            shared.resume.acquire().await.unwrap().forget();
            shared.running.fetch_sub(1, Ordering::SeqCst);
            Ok(request)
        })
    }
}

type KeyOf = fn(&&'static str) -> String;

/// Returns a service whose requests of one key exclude each other.
async fn exclusive_service(
    wait: Duration,
) -> (Registry, SlowService, LockService<SlowService, KeyOf>) {
    service_in_mode(ClaimMode::Exclusive, 1, wait).await
}

/// Returns a service that locks the last word of a request, in `mode`.
async fn service_in_mode<M: Clone>(
    mode: M,
    at_once_max: usize,
    wait: Duration,
) -> (Registry, SlowService, LockService<SlowService, KeyOf, M>) {
    let registry = connect("memory:").await.unwrap();
    let slow = SlowService(Arc::new(RequestState {
        at_once_max,
        running: AtomicUsize::new(0),
        started: Notify::new(),
        resume: Semaphore::new(0),
    }));
    let key: KeyOf = |request| request.rsplit(' ').next().unwrap_or_default().to_owned();
    let layer = LockLayer::new(Arc::new(registry.clone()), key).mode(mode).wait(wait);
    let service = layer.layer(slow.clone());
    (registry, slow, service)
}

async fn call<M: RequestMode<&'static str>>(
    mut service: LockService<SlowService, KeyOf, M>,
    request: &'static str,
) -> Result<&'static str, LockServiceError<Infallible>> {
    poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(request).await
}

/// Sends a request in a task, and waits until the service runs it.
async fn start<M>(
    slow: &SlowService,
    service: &LockService<SlowService, KeyOf, M>,
    request: &'static str,
) -> JoinHandle<Result<&'static str, LockServiceError<Infallible>>>
where
    M: RequestMode<&'static str> + Clone + Send + Sync + 'static,
{
    let running = tokio::task::spawn(call(service.clone(), request));
    slow.0.started.notified().await;
    running
}

fn assert_busy(outcome: Result<&'static str, LockServiceError<Infallible>>) {
    assert!(
        matches!(&outcome, Err(LockServiceError::Busy { key, .. }) if key == "a"),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn requests_of_one_key_run_one_after_the_other() {
    let (registry, slow, service) = exclusive_service(Duration::from_secs(60)).await;
    let calls: Vec<_> = (0..4).map(|_| tokio::task::spawn(call(service.clone(), "a"))).collect();
    for _ in &calls {
        slow.0.started.notified().await;
        slow.0.resume.add_permits(1);
    }
    for done in calls {
        assert_eq!(done.await.unwrap().unwrap(), "a");
    }
    registry.idle().await;
    assert!(registry.obtain("a").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn a_busy_key_is_a_separate_error() {
    let (registry, _slow, service) = exclusive_service(Duration::ZERO).await;
    let guard = registry.obtain("a").lock().await.unwrap();
    assert_busy(call(service, "a").await);
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_lost_lock_stops_the_request() {
    let (registry, slow, service) = exclusive_service(Duration::ZERO).await;
    let running = start(&slow, &service, "a").await;
    _ = registry.close(Duration::ZERO).await;
    let error = running.await.unwrap().unwrap_err();
    assert!(matches!(error, LockServiceError::Lock(LockError::Lost { .. })), "{error:?}");
    assert_eq!(slow.0.running.load(Ordering::SeqCst), 1, "the inner future was dropped");
}

#[tokio::test]
async fn an_invalid_key_is_refused_before_the_service_starts() {
    let (_registry, _slow, service) = exclusive_service(Duration::ZERO).await;
    let error = call(service, "").await.unwrap_err();
    assert!(matches!(error, LockServiceError::Lock(LockError::InvalidKey(_))), "{error:?}");
}

#[tokio::test]
async fn reads_run_at_once_and_writes_run_alone() {
    let mode = |request: &&'static str| match request.split(' ').next() {
        Some("read") => ClaimMode::Shared,
        _ => ClaimMode::Exclusive,
    };
    let (registry, slow, service) = service_in_mode(mode, 2, Duration::ZERO).await;
    let reads = [start(&slow, &service, "read a").await, start(&slow, &service, "read a").await];
    assert_busy(call(service.clone(), "write a").await);
    slow.0.resume.add_permits(2);
    for read in reads {
        assert_eq!(read.await.unwrap().unwrap(), "read a");
    }
    registry.idle().await;
    let write = start(&slow, &service, "write a").await;
    assert_busy(call(service.clone(), "read a").await);
    assert_busy(call(service, "write a").await);
    slow.0.resume.add_permits(1);
    assert_eq!(write.await.unwrap().unwrap(), "write a");
}

#[tokio::test]
async fn a_semaphore_limits_the_requests_that_run_at_once() {
    let mode = ClaimMode::Permits { take: 1, of: 2 };
    let (registry, slow, service) = service_in_mode(mode, 2, Duration::ZERO).await;
    let running = [start(&slow, &service, "a").await, start(&slow, &service, "a").await];
    assert_busy(call(service.clone(), "a").await);
    slow.0.resume.add_permits(2);
    for request in running {
        assert_eq!(request.await.unwrap().unwrap(), "a");
    }
    registry.idle().await;
    let permit = registry.semaphore("a", 3).acquire().await.unwrap();
    let error = call(service, "a").await.unwrap_err();
    assert!(matches!(error, LockServiceError::Lock(LockError::UnitsMismatch { .. })), "{error:?}");
    permit.unlock().await.unwrap();
}
