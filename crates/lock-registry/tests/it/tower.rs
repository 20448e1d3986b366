//! Guarantees for requests under a lock.
#![cfg(feature = "tower")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use lock_registry::tower::{LockLayer, LockService, LockServiceError};
use lock_registry::{LockError, Registry, connect};
use tokio::sync::Notify;
use tower_layer::Layer;
use tower_service::Service;

type BoxFuture<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

/// A service that signals its start, waits for permission to continue, and counts concurrent
/// requests.
#[derive(Clone, Default)]
struct SlowService(Arc<RequestState>);

#[derive(Default)]
struct RequestState {
    running: AtomicUsize,
    started: Notify,
    resume: Notify,
}

impl Service<&'static str> for SlowService {
    type Response = &'static str;
    type Error = Infallible;
    type Future = BoxFuture<&'static str, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, key: &'static str) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            assert_eq!(shared.running.fetch_add(1, Ordering::SeqCst), 0, "two at once");
            shared.started.notify_one();
            shared.resume.notified().await;
            shared.running.fetch_sub(1, Ordering::SeqCst);
            Ok(key)
        })
    }
}

type KeyOf = fn(&&'static str) -> String;

async fn locked(wait: Duration) -> (Registry, SlowService, LockService<SlowService, KeyOf>) {
    let registry = connect("memory:").await.unwrap();
    let slow = SlowService::default();
    let key: KeyOf = |request| (*request).to_owned();
    let layer = LockLayer::new(Arc::new(registry.clone()), key).wait(wait);
    let service = layer.layer(slow.clone());
    (registry, slow, service)
}

async fn call(
    mut service: LockService<SlowService, KeyOf>,
    key: &'static str,
) -> Result<&'static str, LockServiceError<Infallible>> {
    poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(key).await
}

#[tokio::test]
async fn requests_of_one_key_run_one_after_the_other() {
    let (registry, slow, service) = locked(Duration::from_secs(60)).await;
    let calls: Vec<_> = (0..4).map(|_| tokio::task::spawn(call(service.clone(), "a"))).collect();
    for _ in &calls {
        slow.0.started.notified().await;
        slow.0.resume.notify_one();
    }
    for done in calls {
        assert_eq!(done.await.unwrap().unwrap(), "a");
    }
    registry.idle().await;
    assert!(registry.obtain("a").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn a_busy_key_is_a_separate_error() {
    let (registry, _slow, service) = locked(Duration::ZERO).await;
    let guard = registry.obtain("a").lock().await.unwrap();
    let error = call(service, "a").await.unwrap_err();
    assert!(matches!(&error, LockServiceError::Busy { key, .. } if key == "a"), "{error:?}");
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_lost_lock_stops_the_request() {
    let (registry, slow, service) = locked(Duration::ZERO).await;
    let running = tokio::task::spawn(call(service, "a"));
    slow.0.started.notified().await;
    _ = registry.close(Duration::ZERO).await;
    let error = running.await.unwrap().unwrap_err();
    assert!(matches!(error, LockServiceError::Lock(LockError::Lost { .. })), "{error:?}");
    assert_eq!(slow.0.running.load(Ordering::SeqCst), 1, "the inner future was dropped");
}

#[tokio::test]
async fn an_invalid_key_is_refused_before_the_service_starts() {
    let (_registry, _slow, service) = locked(Duration::ZERO).await;
    let error = call(service, "").await.unwrap_err();
    assert!(matches!(error, LockServiceError::Lock(LockError::InvalidKey(_))), "{error:?}");
}
