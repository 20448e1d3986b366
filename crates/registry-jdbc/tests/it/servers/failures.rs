//! Connections break and servers stop. Leases survive, and waiters are still woken.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use registry_core::{BackendErrorKind, LockAdmin, LockBackend, Registry, Release, Renewal};
use registry_jdbc::CreateSchema;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::within;
use tokio::time::timeout;

use super::common::{
    TEST_TIMEOUT, backend, busy, claim, config, error_chain, grant, key, lock, registry, server,
};
use super::server::*;

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
        server.restart().await.unwrap();
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

/// Opens a registry that relies on wake-ups, because it polls once an hour.
pub(crate) async fn slow_poller(config: Config) -> Registry {
    let backend = Arc::new(Backend::open(config).await.unwrap());
    Registry::builder(backend).poll(Duration::from_secs(3600)).build().unwrap()
}

#[tokio::test]
async fn a_dropped_call_corrupts_no_connection() {
    let server = server().await;
    let backend = backend(config(&server).with_connections(1)).await;
    let (first, dropped, last) = (claim("first"), claim("dropped"), claim("last"));
    grant(&backend, &first).await;
    for round in 0..3 {
        let paused = pause_statements(&server).await;
        let call = timeout(Duration::from_millis(300), backend.try_acquire(&dropped)).await;
        assert!(call.is_err(), "the server was paused");
        resume_statements(&server, paused);

        // A new grant is committed, so every client sees it.
        grant(&backend, &last).await;
        let seen = format!(
            "SELECT count(*) FROM lock_registry_locks WHERE {KEY_COLUMN} = 'last' AND claim IS NOT NULL"
        );
        assert_eq!(server.sql(&seen).await.unwrap(), "1", "round {round}");
        assert_eq!(backend.release(&last).await.unwrap(), Release::Freed);
        assert_eq!(server.sql(OPEN_TRANSACTIONS).await.unwrap(), "0");
    }
}

#[tokio::test]
async fn connections_that_broke_while_idle_are_replaced() {
    let mut server = server().await;
    let backend = Arc::new(backend(config(&server)).await);
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..4 {
        let backend = Arc::clone(&backend);
        calls.spawn(async move { grant(&backend, &claim(&format!("k{n}"))).await });
    }
    calls.join_all().await;
    end_connections(&server).await;
    busy(&backend, &claim("k0")).await;
    server.stop().await.unwrap();
    server.restart().await.unwrap();
    grant(&backend, &claim("other")).await;
    assert!(!backend.inspect(&key("k1")).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_grant_with_a_lost_reply_is_returned_by_the_next_attempt() {
    let server = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let (direct, proxied) = (backend(config(&server)).await, backend(config_through(&proxy)).await);
    let held = claim("k");
    // Prepares the statement, so that the next request is the attempt itself.
    grant(&proxied, &claim("other")).await;
    proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
    let error = proxied.try_acquire(&held).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", error_chain(&error));
    proxy.set_mode(ProxyMode::Pass).await.unwrap();
    let token = direct.inspect(&key("k")).await.unwrap().remove(0).token;
    assert!(token.is_some(), "the attempt had arrived");
    assert_eq!(grant(&proxied, &held).await.token, token.unwrap());
    assert_eq!(proxied.release(&held).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn a_waiter_is_woken_by_a_release_in_another_process() {
    let server = server().await;
    let (a, b) = (registry(config(&server)).await, slow_poller(config(&server)).await);
    for _ in 0..3 {
        let guard = lock(&a, "k").await;
        let other = b.obtain("k");
        let waiting = tokio::spawn(async move { other.lock().await.unwrap() });
        wait_for_listener(&server).await;
        guard.unlock().await.unwrap();
        within(TEST_TIMEOUT, waiting).await.unwrap().unlock().await.unwrap();
    }
}

#[tokio::test]
async fn an_error_for_missing_tables_names_the_command_that_creates_them() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    let held = claim("k");
    grant(&backend, &held).await;
    server.sql("DROP TABLE lock_registry_locks").await.unwrap();
    for error in [
        backend.try_acquire(&held).await.unwrap_err(),
        backend.release(&held).await.unwrap_err(),
        backend.renew(std::slice::from_ref(&held)).await.remove(0).unwrap_err(),
        backend.inspect(&key("k")).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", error_chain(&error));
        assert!(error.to_string().contains(SCHEMA_COMMAND), "{error}");
    }
    server.sql(Backend::schema()).await.unwrap();
    server.sql("DELETE FROM lock_registry_meta").await.unwrap();
    let error = backend.try_acquire(&held).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol, "{}", error_chain(&error));
    let config = config(&server).with_create_schema(CreateSchema::Never);
    let error = Backend::open(config).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol, "{}", error_chain(&error));
}

/// Checks that the holders of one lock increment a counter one at a time.
pub(crate) async fn assert_one_holder_at_a_time(server: &Server) {
    let counter = Arc::new(AtomicU32::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let registry = registry(config(server)).await;
        let counter = Arc::clone(&counter);
        tasks.spawn(async move {
            for _ in 0..20 {
                let guard = lock(&registry, "k").await;
                let seen = counter.load(Ordering::SeqCst);
                tokio::task::yield_now().await;
                counter.store(seen + 1, Ordering::SeqCst);
                guard.unlock().await.unwrap();
            }
        });
    }
    within(TEST_TIMEOUT, tasks.join_all()).await;
    assert_eq!(counter.load(Ordering::SeqCst), 80);
}
