//! Connections break and servers stop.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendErrorKind, LockBackend, Registry, Release, Renewal};
use registry_testkit::within;

use super::common::{
    TEST_TIMEOUT, backend, busy, claim, config, error_chain, grant, lock, registry, server,
};
use crate::server::*;

#[tokio::test]
async fn a_killed_server_has_its_locks_after_the_restart() {
    let mut server = server().await;
    let backend = backend(config(&server)).await;
    let held = claim("k");
    grant(&backend, &held).await;
    for _ in 0..3 {
        server.kill();
        let error = backend.try_acquire(&claim("k")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Transient, "{}", error_chain(&error));
        server.start_again().await.unwrap();
        let renewed = backend.renew(std::slice::from_ref(&held)).await.remove(0);
        assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{renewed:?}");
        busy(&backend, &claim("k")).await;
    }
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn a_missing_reply_leaves_the_outcome_unknown() {
    let server = server().await;
    let config = config(&server).with_busy_timeout(Duration::from_millis(100));
    let config = config.with_connect_timeout(Duration::from_secs(2));
    let backend = backend(config.with_response_timeout(Duration::from_secs(2))).await;
    let held = claim("k");
    grant(&backend, &held).await;
    server.pause().unwrap();
    let error = within(TEST_TIMEOUT, backend.try_acquire(&held)).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", error_chain(&error));
    // Without a connection the request is not sent.
    let error = within(TEST_TIMEOUT, backend.try_acquire(&held)).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", error_chain(&error));
    server.resume().unwrap();
    grant(&backend, &held).await;
}

#[tokio::test]
async fn a_waiter_is_woken_although_another_registry_of_the_store_was_closed() {
    let server = server().await;
    let a = registry(config(&server)).await;
    let shared = Arc::new(Backend::open(config(&server)).await.unwrap());
    let build = || {
        let shared = Arc::<Backend>::clone(&shared);
        Registry::builder(shared).poll(Duration::from_secs(600)).build().unwrap()
    };
    let (b, closed) = (build(), build());
    let guard = lock(&a, "k").await;
    let other = b.obtain("k");
    let waiting = tokio::spawn(async move { other.lock().await.unwrap() });
    tokio::time::sleep(Duration::from_millis(300)).await;
    _ = closed.close(TEST_TIMEOUT).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    guard.unlock().await.unwrap();
    let guard = within(Duration::from_secs(5), waiting).await.unwrap();
    // A later waiter is woken too.
    let next = a.obtain("k");
    let _ = (guard.unlock().await, lock(&a, "k2").await);
    let guard = next.lock().await.unwrap();
    let other = b.obtain("k");
    let waiting = tokio::spawn(async move { other.lock().await.unwrap() });
    tokio::time::sleep(Duration::from_millis(300)).await;
    guard.unlock().await.unwrap();
    within(Duration::from_secs(5), waiting).await.unwrap().unlock().await.unwrap();
}

/// A registry that relies on wake-ups.
pub(crate) async fn slow_poller(config: Config) -> Registry {
    let backend = Arc::new(Backend::open(config).await.unwrap());
    Registry::builder(backend).poll(Duration::from_secs(3600)).build().unwrap()
}
