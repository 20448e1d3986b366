//! Connections break and servers stop; no grant is lost or misreported.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockAdmin, LockBackend, Release};
use registry_jdbc::{PostgresConfig, StatementMode};
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::{PostgresOptions, PostgresServer};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::{eventually, within};

use super::common::{
    TEST_TIMEOUT, app_connection, backend, busy, claim, config, error_chain, grant, lock, registry,
    run, server,
};
use super::server::*;
use super::servers::failures::*;

#[tokio::test]
async fn an_attempt_that_a_pooler_lost_has_an_unknown_outcome() {
    let server = server().await;
    let bouncer = PgBouncer::start(&server).await.unwrap();
    let config = PostgresConfig::from_url(&bouncer.url())
        .unwrap()
        .with_statements(StatementMode::Unprepared);
    let backend = backend(config.with_busy_timeout(Duration::from_secs(9))).await;
    let held = claim("k");
    grant(&backend, &held).await;
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    let mut conn = app_connection(&server).await;
    run(&mut conn, "BEGIN; SELECT * FROM lock_registry_locks FOR UPDATE").await;
    let backend = Arc::new(backend);
    let attempting = Arc::clone(&backend);
    // `close` forces a new connection. The error of an idle connection would be marked as stale.
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
    let config = config_through(&proxy).with_busy_timeout(Duration::from_millis(100));
    let backend = Arc::new(backend(config.with_response_timeout(Duration::from_millis(500))).await);
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..4 {
        let backend = Arc::clone(&backend);
        calls.spawn(async move { grant(&backend, &claim(&format!("k{n}"))).await });
    }
    calls.join_all().await;
    let before = proxy.counts().live;
    assert!(before > 2, "{before} connections");
    // As after a failover: existing connections do not respond, and later new ones work.
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
    end_connections(&server).await;
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
    let findings = super::common::backend(config(&healthy_server)).await.diagnose().await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
}

/// PgBouncer and another database accept LISTEN, but no notification arrives there.
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
    assert_one_holder_at_a_time(&server).await;
}
