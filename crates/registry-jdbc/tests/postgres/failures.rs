//! Connections break and servers stop; no grant is lost or misreported.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendErrorKind, LockAdmin, LockBackend, Release};
use registry_jdbc::{PostgresBackend, PostgresConfig};
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::{PostgresOptions, PostgresServer};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::{eventually, within};
use tokio::time::timeout;

use crate::common::{
    TEST_TIMEOUT, backend, busy, claim, config, data, error_chain, grant, key, lock, registry, run,
    server,
};
use crate::servers::failures::*;

/// The sessions of the store, except the listener.
const SESSIONS: &str =
    "application_name = 'lock-registry' AND query NOT LIKE 'LISTEN%' AND query <> 'SELECT 1'";
const LISTENERS: &str = "application_name = 'lock-registry' AND (query LIKE 'LISTEN%' OR query = 'SELECT 1') AND state = 'idle'";

async fn pid(server: &PostgresServer, which: &str) -> i32 {
    let statement = format!("SELECT pid FROM pg_stat_activity WHERE {which} LIMIT 1");
    eventually(TEST_TIMEOUT, async || {
        server.sql(&statement).await?.parse().map_err(io::Error::other)
    })
    .await
}

#[tokio::test]
async fn a_dropped_call_corrupts_no_connection() {
    let server = server().await;
    let backend = backend(config(&server).with_connections(1)).await;
    let (first, dropped, last) = (claim("first"), claim("dropped"), claim("last"));
    grant(&backend, &first).await;
    for round in 0..3 {
        let pid = pid(&server, SESSIONS).await;
        server.pause_backend(pid).unwrap();
        let call = timeout(Duration::from_millis(300), backend.try_acquire(&dropped)).await;
        assert!(call.is_err(), "the server was paused");
        server.resume_backend(pid).unwrap();

        // A new grant is committed, so every client sees it.
        grant(&backend, &last).await;
        let seen =
            "SELECT count(*) FROM lock_registry_locks WHERE key = 'last' AND claim IS NOT NULL";
        assert_eq!(server.sql(seen).await.unwrap(), "1", "round {round}");
        assert_eq!(backend.release(&last).await.unwrap(), Release::Freed);
        let open = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'";
        assert_eq!(server.sql(open).await.unwrap(), "0");
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
    let all = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'lock-registry'";
    server.sql(all).await.unwrap();
    busy(&backend, &claim("k0")).await;
    server.stop().await.unwrap();
    server.start_again().await.unwrap();
    grant(&backend, &claim("other")).await;
    assert!(backend.inspect(&key("k1")).await.unwrap().is_some());
}

/// A client that reaches the server through the proxy.
async fn open_through(
    proxy: &FaultProxy,
    change: impl FnOnce(PostgresConfig) -> PostgresConfig,
) -> PostgresBackend {
    let config = PostgresConfig::new("127.0.0.1", proxy.addr().port(), "postgres");
    backend(change(config.with_login("postgres", None))).await
}

#[tokio::test]
async fn a_grant_with_a_lost_reply_is_returned_by_the_next_attempt() {
    let server = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let (direct, proxied) =
        (backend(config(&server)).await, open_through(&proxy, |config| config).await);
    let held = claim("k");
    // Prepares the statement, so that the next request is the attempt itself.
    grant(&proxied, &claim("other")).await;
    proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
    let error = proxied.try_acquire(&held).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", error_chain(&error));
    proxy.set_mode(ProxyMode::Pass).await.unwrap();
    let token = direct.inspect(&key("k")).await.unwrap().unwrap().token;
    assert!(token.is_some(), "the attempt had arrived");
    assert_eq!(grant(&proxied, &held).await.token, token.unwrap());
    assert_eq!(proxied.release(&held).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn an_attempt_that_a_pooler_lost_has_an_unknown_outcome() {
    let server = server().await;
    let bouncer = PgBouncer::start(&server).await.unwrap();
    let config = PostgresConfig::from_url(&bouncer.url()).unwrap().with_prepared(false);
    let backend = backend(config.with_busy_timeout(Duration::from_secs(9))).await;
    let held = claim("k");
    grant(&backend, &held).await;
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    let mut data = data(&server).await;
    run(&mut data, "BEGIN; SELECT * FROM lock_registry_locks FOR UPDATE").await;
    let backend = Arc::new(backend);
    let attempting = Arc::clone(&backend);
    // An attempt on an idle connection would be retried; `close` forces a new connection.
    backend.close().await;
    let attempt = tokio::spawn(async move { attempting.try_acquire(&claim("k")).await });
    let waiting = pid(&server, "wait_event_type = 'Lock'").await;
    // The server process dies without a message to PgBouncer, which then sends an error of its own.
    let killed = std::process::Command::new("kill").args(["-9", &waiting.to_string()]).status();
    assert!(killed.unwrap().success());
    let error = within(TEST_TIMEOUT, attempt).await.unwrap().unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", error_chain(&error));
}

#[tokio::test]
async fn several_unresponsive_connections_cost_one_timeout() {
    let server = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let backend = Arc::new(
        open_through(&proxy, |config| {
            let config = config.with_busy_timeout(Duration::from_millis(100));
            config.with_response_timeout(Duration::from_millis(500))
        })
        .await,
    );
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..4 {
        let backend = Arc::clone(&backend);
        calls.spawn(async move { grant(&backend, &claim(&format!("k{n}"))).await });
    }
    calls.join_all().await;
    let before = proxy.counts().live;
    assert!(before > 2, "{before} connections");
    // As after a failover: existing connections do not respond, and new ones work.
    proxy.set_mode(ProxyMode::BlackHole).await.unwrap();
    let error = within(TEST_TIMEOUT, backend.try_acquire(&claim("k0"))).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", error_chain(&error));
    let no_connection_is_left = async || match proxy.counts().live {
        0 => Ok(()),
        live => Err(io::Error::other(format!("{live} connections are kept"))),
    };
    proxy.set_mode(ProxyMode::Pass).await.unwrap();
    eventually(TEST_TIMEOUT, no_connection_is_left).await;
    busy(&backend, &claim("k0")).await;
}

#[tokio::test]
async fn a_waiter_is_woken_by_a_release_in_another_process() {
    let server = server().await;
    let (a, b) = (registry(config(&server)).await, slow_poller(config(&server)).await);
    for _ in 0..3 {
        let guard = lock(&a, "k").await;
        let other = b.obtain("k");
        let waiting = tokio::spawn(async move { other.lock().await.unwrap() });
        pid(&server, LISTENERS).await;
        guard.unlock().await.unwrap();
        within(TEST_TIMEOUT, waiting).await.unwrap().unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_missed_release_is_found_after_the_listener_reconnects() {
    let server = server().await;
    let (a, b) = (registry(config(&server)).await, slow_poller(config(&server)).await);
    for _ in 0..3 {
        let guard = lock(&a, "k").await;
        let other = b.obtain("k");
        let waiting = tokio::spawn(async move { other.lock().await.unwrap() });
        let listener = pid(&server, LISTENERS).await;
        server.pause_backend(listener).unwrap();
        guard.unlock().await.unwrap();
        // Not with SIGKILL: the server would treat that as a crash and restart, and might lose the
        // release.
        server.sql(&format!("SELECT pg_terminate_backend({listener})")).await.unwrap();
        server.resume_backend(listener).unwrap();
        within(TEST_TIMEOUT, waiting).await.unwrap().unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_read_only_server_returns_a_retryable_error() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    server.sql("ALTER DATABASE postgres SET default_transaction_read_only = on").await.unwrap();
    let all = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'lock-registry'";
    server.sql(all).await.unwrap();
    let error = backend.try_acquire(&claim("k")).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", error_chain(&error));
    assert!(error.to_string().contains("standby"), "{error}");
    server
        .sql("SET default_transaction_read_only = off; ALTER DATABASE postgres RESET default_transaction_read_only")
        .await
        .unwrap();
    grant(&backend, &claim("k")).await;
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
        assert!(error.to_string().contains("lockreg schema postgres"), "{error}");
    }
    server.sql("DELETE FROM lock_registry_meta").await.unwrap();
    let error = PostgresBackend::open(config(&server)).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol, "{}", error_chain(&error));
}

#[tokio::test]
async fn diagnose_reports_weak_settings() {
    let settings =
        ["fsync=off", "synchronous_commit=off", "default_transaction_isolation=serializable"];
    let options = PostgresOptions::new().settings(&settings);
    let server = PostgresServer::start_with(options).await.unwrap();
    let backend = backend(config(&server).without_listen()).await;
    let findings = backend.diagnose().await.unwrap();
    let text =
        findings.iter().map(|finding| finding.message.as_str()).collect::<Vec<_>>().join("\n");
    for fragment in [
        "PostgreSQL 1",
        "fsync is off",
        "synchronous_commit is off",
        "serializable",
        "no listener receives",
    ] {
        assert!(text.contains(fragment), "{fragment}: {text}");
    }
    let healthy_server = PostgresServer::start().await.unwrap();
    let findings = crate::common::backend(config(&healthy_server)).await.diagnose().await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
}

/// The other places accept LISTEN, but no notification ever arrives there.
#[tokio::test]
async fn diagnose_reports_a_listener_without_notifications() {
    let server = server().await;
    server.sql("CREATE DATABASE elsewhere").await.unwrap();
    let bouncer = PgBouncer::start(&server).await.unwrap();
    let url = server.url();
    let (before, after) = url.rsplit_once("/postgres").unwrap();
    let elsewhere = format!("{before}/elsewhere{after}");
    for (listen, is_received) in [(server.url(), true), (bouncer.url(), false), (elsewhere, false)]
    {
        let config = config(&server).with_listen(&listen).unwrap();
        let findings = backend(config).await.diagnose().await.unwrap();
        let is_reported = findings.iter().any(|f| f.message.contains("do not arrive"));
        assert_eq!(is_reported, !is_received, "{listen}: {findings:?}");
    }
}

#[tokio::test]
async fn locks_work_with_serializable_as_the_default() {
    let options = PostgresOptions::new().settings(&["default_transaction_isolation=serializable"]);
    let server = PostgresServer::start_with(options).await.unwrap();
    let registry = Arc::new(registry(config(&server)).await);
    let counter = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let registry = crate::common::registry(config(&server)).await;
        let counter = Arc::clone(&counter);
        tasks.spawn(async move {
            for _ in 0..20 {
                let guard = lock(&registry, "k").await;
                let seen = counter.load(std::sync::atomic::Ordering::SeqCst);
                tokio::task::yield_now().await;
                counter.store(seen + 1, std::sync::atomic::Ordering::SeqCst);
                guard.unlock().await.unwrap();
            }
        });
    }
    within(TEST_TIMEOUT, tasks.join_all()).await;
    assert_eq!(counter.load(std::sync::atomic::Ordering::SeqCst), 80);
    drop(registry);
}
