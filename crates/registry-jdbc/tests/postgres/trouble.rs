//! Connections break and servers stop; no grant is lost or reported wrongly.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendErrorKind, LockBackend, LockRegistry, Registry, Release, Renewal};
use registry_jdbc::{PostgresBackend, PostgresConfig};
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::{PostgresOptions, PostgresServer};
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::{eventually, within};
use tokio::time::timeout;

use crate::lab::{
    SOON, backend, busy, claim, config, data, grant, key, lock, registry, run, server, told,
};

/// The sessions of the store, except the listener.
const SESSIONS: &str =
    "application_name = 'lock-registry' AND query NOT LIKE 'LISTEN%' AND query <> 'SELECT 1'";
const LISTENERS: &str = "application_name = 'lock-registry' AND (query LIKE 'LISTEN%' OR query = 'SELECT 1') AND state = 'idle'";

async fn pid(server: &PostgresServer, which: &str) -> i32 {
    let statement = format!("SELECT pid FROM pg_stat_activity WHERE {which} LIMIT 1");
    eventually(SOON, async || server.sql(&statement).await?.parse().map_err(io::Error::other)).await
}

#[tokio::test]
async fn a_call_that_is_dropped_half_way_poisons_no_connection() {
    let server = server().await;
    let backend = backend(config(&server).with_connections(1)).await;
    let (first, dropped, last) = (claim("first"), claim("dropped"), claim("last"));
    grant(&backend, &first).await;
    for round in 0..3 {
        let pid = pid(&server, SESSIONS).await;
        server.pause_backend(pid).unwrap();
        let call = timeout(Duration::from_millis(300), backend.try_acquire(&dropped)).await;
        assert!(call.is_err(), "the server stood still");
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
async fn a_server_that_was_killed_has_its_locks_when_it_is_back() {
    let mut server = server().await;
    let backend = backend(config(&server)).await;
    let held = claim("k");
    grant(&backend, &held).await;
    for _ in 0..3 {
        server.kill();
        let error = backend.try_acquire(&claim("k")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Transient, "{}", told(&error));
        server.start_again().await.unwrap();
        assert!(matches!(
            backend.renew(std::slice::from_ref(&held)).await[0],
            Ok(Renewal::Renewed(_))
        ));
        busy(&backend, &claim("k")).await;
    }
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn connections_that_broke_while_nobody_used_them_are_made_anew() {
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
async fn through(
    proxy: &FaultProxy,
    change: impl FnOnce(PostgresConfig) -> PostgresConfig,
) -> PostgresBackend {
    let config = PostgresConfig::new("127.0.0.1", proxy.addr().port(), "postgres");
    backend(change(config.with_login("postgres", None))).await
}

#[tokio::test]
async fn a_grant_whose_answer_was_lost_is_found_by_asking_again() {
    let server = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let (near, far) = (backend(config(&server)).await, through(&proxy, |config| config).await);
    let held = claim("k");
    // Prepares the statement, so that the next request is the attempt itself.
    grant(&far, &claim("other")).await;
    proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
    let error = far.try_acquire(&held).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", told(&error));
    proxy.set_mode(Mode::Pass).await.unwrap();
    let token = near.inspect(&key("k")).await.unwrap().unwrap().token;
    assert!(token.is_some(), "the attempt had arrived");
    assert_eq!(grant(&far, &held).await.token, token);
    assert_eq!(far.release(&held).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn an_attempt_that_a_pooler_lost_on_the_way_leaves_the_outcome_open() {
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
    let asking = Arc::clone(&backend);
    // An attempt on an idle connection would be retried; `close` forces a new connection.
    backend.close().await;
    let attempt = tokio::spawn(async move { asking.try_acquire(&claim("k")).await });
    let waiting = pid(&server, "wait_event_type = 'Lock'").await;
    // The server process dies without a message to PgBouncer, which then sends an error of its own.
    let killed = std::process::Command::new("kill").args(["-9", &waiting.to_string()]).status();
    assert!(killed.unwrap().success());
    let error = within(SOON, attempt).await.unwrap().unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", told(&error));
}

#[tokio::test]
async fn connections_that_all_fell_silent_cost_one_time_out() {
    let server = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let backend = Arc::new(
        through(&proxy, |config| {
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
    // As after a failover: existing connections are silent, and new ones work.
    proxy.set_mode(Mode::BlackHole).await.unwrap();
    let error = within(SOON, backend.try_acquire(&claim("k0"))).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", told(&error));
    let nobody_is_left = async || match proxy.counts().live {
        0 => Ok(()),
        live => Err(io::Error::other(format!("{live} connections are kept"))),
    };
    proxy.set_mode(Mode::Pass).await.unwrap();
    eventually(SOON, nobody_is_left).await;
    busy(&backend, &claim("k0")).await;
}

#[tokio::test]
async fn a_server_that_says_nothing_leaves_the_outcome_open() {
    let server = server().await;
    let config = config(&server).with_busy_timeout(Duration::from_millis(100));
    let config = config.with_connect_timeout(Duration::from_secs(2));
    let backend = backend(config.with_response_timeout(Duration::from_secs(2))).await;
    let held = claim("k");
    grant(&backend, &held).await;
    server.pause().unwrap();
    let error = within(SOON, backend.try_acquire(&held)).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", told(&error));
    // Without a connection the request is not sent.
    let error = within(SOON, backend.try_acquire(&held)).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", told(&error));
    server.resume().unwrap();
    grant(&backend, &held).await;
}

#[tokio::test]
async fn who_waits_is_woken_by_a_release_in_another_process() {
    let server = server().await;
    let (a, b) = (registry(config(&server)).await, slow_poller(config(&server)).await);
    for _ in 0..3 {
        let guard = lock(&a, "k").await;
        let other = b.obtain("k");
        let waiting = tokio::spawn(async move { other.lock().await.unwrap() });
        pid(&server, LISTENERS).await;
        guard.unlock().await.unwrap();
        within(SOON, waiting).await.unwrap().unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_release_that_nobody_heard_is_found_after_listening_again() {
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
        within(SOON, waiting).await.unwrap().unlock().await.unwrap();
    }
}

#[tokio::test]
async fn who_waits_is_woken_although_another_registry_over_the_store_was_closed() {
    let server = server().await;
    let a = registry(config(&server)).await;
    let shared = Arc::new(PostgresBackend::open(config(&server)).await.unwrap());
    let build = || {
        let shared = Arc::<PostgresBackend>::clone(&shared);
        Registry::builder(shared).poll(Duration::from_secs(600)).build().unwrap()
    };
    let (b, closed) = (build(), build());
    let guard = lock(&a, "k").await;
    let other = b.obtain("k");
    let waiting = tokio::spawn(async move { other.lock().await.unwrap() });
    tokio::time::sleep(Duration::from_millis(300)).await;
    closed.close(SOON).await;
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
async fn slow_poller(config: PostgresConfig) -> Registry {
    let backend = Arc::new(PostgresBackend::open(config).await.unwrap());
    Registry::builder(backend).poll(Duration::from_secs(3600)).build().unwrap()
}

#[tokio::test]
async fn a_server_that_takes_no_writes_is_trouble_that_may_pass() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    server.sql("ALTER DATABASE postgres SET default_transaction_read_only = on").await.unwrap();
    let all = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'lock-registry'";
    server.sql(all).await.unwrap();
    let error = backend.try_acquire(&claim("k")).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", told(&error));
    assert!(error.to_string().contains("standby"), "{error}");
    server
        .sql("SET default_transaction_read_only = off; ALTER DATABASE postgres RESET default_transaction_read_only")
        .await
        .unwrap();
    grant(&backend, &claim("k")).await;
}

#[tokio::test]
async fn tables_that_are_gone_are_named_with_what_makes_them() {
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
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", told(&error));
        assert!(error.to_string().contains("lockreg schema postgres"), "{error}");
    }
    server.sql("DELETE FROM lock_registry_meta").await.unwrap();
    let error = PostgresBackend::open(config(&server)).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol, "{}", told(&error));
}

#[tokio::test]
async fn doctor_tells_what_is_set_up_wrong() {
    let settings =
        ["fsync=off", "synchronous_commit=off", "default_transaction_isolation=serializable"];
    let options = PostgresOptions::new().settings(&settings);
    let server = PostgresServer::start_with(options).await.unwrap();
    let backend = backend(config(&server).without_listen()).await;
    let findings = backend.diagnose().await.unwrap();
    let text =
        findings.iter().map(|finding| finding.message.as_str()).collect::<Vec<_>>().join("\n");
    for hint in [
        "PostgreSQL 1",
        "fsync is off",
        "synchronous_commit is off",
        "serializable",
        "nobody listens",
    ] {
        assert!(text.contains(hint), "{hint}: {text}");
    }
    let well = PostgresServer::start().await.unwrap();
    let findings = crate::lab::backend(config(&well)).await.diagnose().await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
}

/// The other places accept LISTEN, but no notification ever arrives there.
#[tokio::test]
async fn doctor_tells_when_listening_leads_to_where_nothing_is_heard() {
    let server = server().await;
    server.sql("CREATE DATABASE elsewhere").await.unwrap();
    let bouncer = PgBouncer::start(&server).await.unwrap();
    let url = server.url();
    let (before, after) = url.rsplit_once("/postgres").unwrap();
    let elsewhere = format!("{before}/elsewhere{after}");
    for (listen, is_heard) in [(server.url(), true), (bouncer.url(), false), (elsewhere, false)] {
        let config = config(&server).with_listen(&listen).unwrap();
        let findings = backend(config).await.diagnose().await.unwrap();
        let told = findings.iter().any(|f| f.message.contains("are not heard of"));
        assert_eq!(told, !is_heard, "{listen}: {findings:?}");
    }
}

#[tokio::test]
async fn locks_work_where_everything_is_serializable() {
    let options = PostgresOptions::new().settings(&["default_transaction_isolation=serializable"]);
    let server = PostgresServer::start_with(options).await.unwrap();
    let registry = Arc::new(registry(config(&server)).await);
    let counter = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let registry = crate::lab::registry(config(&server)).await;
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
    within(SOON, tasks.join_all()).await;
    assert_eq!(counter.load(std::sync::atomic::Ordering::SeqCst), 80);
    drop(registry);
}
