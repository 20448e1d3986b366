//! Connections break and servers stop; no grant is lost or misreported.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockAdmin, LockBackend, Release, Renewal};
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
use registry_testkit::within;
use tokio::time::Instant;

use super::common::{
    TEST_TIMEOUT, app_connection, backend, busy, claim, config, error_chain, grant, lock, registry,
    run, server,
};
use super::servers::failures::*;

#[tokio::test]
async fn a_waiter_is_woken_after_the_server_restarts() {
    let mut server = server().await;
    let (a, b) = (registry(config(&server)).await, slow_poller(config(&server)).await);
    let guard = lock(&a, "k").await;
    let other = b.obtain("k");
    let waiting = tokio::spawn(async move { other.lock().await.unwrap() });
    server.kill();
    server.restart().await.unwrap();
    guard.unlock().await.unwrap();
    within(TEST_TIMEOUT, waiting).await.unwrap().unlock().await.unwrap();
}

#[tokio::test]
async fn many_waiters_share_polls_that_become_rarer() {
    let server = server().await;
    let holder = registry(config(&server)).await;
    let waiters = slow_poller(config(&server)).await;
    let (mut guards, mut waiting) = (Vec::new(), tokio::task::JoinSet::new());
    for n in 0..50 {
        let name = format!("k{n}");
        guards.push(lock(&holder, &name).await);
        let other = waiters.obtain(&name);
        waiting.spawn(async move { other.lock().await.unwrap().unlock().await.unwrap() });
    }
    let selects = async || {
        let status = "SHOW GLOBAL STATUS LIKE 'Com_select'";
        let row = server.sql(status).await.unwrap();
        row.split('\t').next_back().unwrap().parse::<u64>().unwrap()
    };
    // If each waiter polled separately, 40 queries would take a tenth of a second.
    let (before, began) = (selects().await, Instant::now());
    registry_testkit::eventually(TEST_TIMEOUT, async || selects().await >= before + 40).await;
    assert!(began.elapsed() > Duration::from_millis(300), "{:?}", began.elapsed());
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    within(TEST_TIMEOUT, waiting.join_all()).await;
}

#[tokio::test]
async fn a_read_only_server_returns_a_retryable_error() {
    let server = server().await;
    server.sql("CREATE USER app@'127.0.0.1'; GRANT ALL ON app.* TO app@'127.0.0.1'").await.unwrap();
    let backend = backend(config(&server).with_login("app", None)).await;
    server.sql("SET GLOBAL read_only = ON").await.unwrap();
    let error = backend.try_acquire(&claim("k")).await.unwrap_err();
    assert!(error.is_retryable(), "{}", error_chain(&error));
    assert!(error.to_string().contains("replica"), "{error}");
    let findings = backend.diagnose().await.unwrap();
    assert!(findings.iter().any(|finding| finding.message.contains("read_only is on")));
    server.sql("SET GLOBAL read_only = OFF").await.unwrap();
    grant(&backend, &claim("k")).await;
}

#[tokio::test]
async fn a_replica_grants_nothing_even_to_privileged_users() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    let held = claim("held");
    grant(&backend, &held).await;
    server.sql("SET GLOBAL read_only = ON").await.unwrap();
    let error = backend.try_acquire(&claim("k")).await.unwrap_err();
    assert!(
        error.is_retryable() && error.to_string().contains("replica"),
        "{}",
        error_chain(&error)
    );
    let not_renewed = backend.renew(std::slice::from_ref(&held)).await.remove(0).unwrap_err();
    let not_released = backend.release(&held).await.unwrap_err();
    assert!(not_released.refused(), "{not_released:?}");
    let not_broken = backend.force_release(held.key()).await.unwrap_err();
    for error in [not_renewed, not_released, not_broken] {
        let text = error_chain(&error);
        assert!(error.is_retryable() && text.contains("replica"), "{text}");
    }
    busy(&backend, &claim("held")).await;
    server.sql("SET GLOBAL read_only = OFF").await.unwrap();
    grant(&backend, &claim("k")).await;
    assert!(matches!(backend.renew(&[held]).await[0], Ok(Renewal::Renewed(_))));
}

#[tokio::test]
async fn an_interrupted_statement_has_no_effect_and_returns_a_refused_error() {
    let server = server().await;
    let config = config(&server).with_busy_timeout(Duration::from_secs(8));
    let backend = Arc::new(backend(config).await);
    let held = claim("k");
    grant(&backend, &held).await;
    let mut other = app_connection(&server).await;
    run(&mut other, "BEGIN; SELECT * FROM lock_registry_locks FOR UPDATE").await;
    let (releasing, claim) = (Arc::clone(&backend), held.clone());
    let release = tokio::spawn(async move { releasing.release(&claim).await });
    let waiting = "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'";
    let id = registry_testkit::eventually(TEST_TIMEOUT, async || {
        let id = server.sql(waiting).await.ok()?;
        (!id.is_empty()).then_some(id)
    })
    .await;
    server.sql(&format!("KILL QUERY {id}")).await.unwrap();
    let error = within(TEST_TIMEOUT, release).await.unwrap().unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", error_chain(&error));
    run(&mut other, "ROLLBACK").await;
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn diagnose_reports_weak_settings() {
    let options = MariaDbOptions::new().without_fsync().args(&[
        "--innodb-flush-log-at-trx-commit=2",
        "--log-bin=log",
        "--sync-binlog=0",
        "--server-id=1",
    ]);
    let server = MariaDbServer::start_with(options).await.unwrap();
    let findings = backend(config(&server)).await.diagnose().await.unwrap();
    let text: Vec<&str> = findings.iter().map(|finding| finding.message.as_str()).collect();
    let text = text.join("\n");
    for fragment in [
        "innodb_flush_log_at_trx_commit is 2",
        "innodb_flush_method is nosync",
        "sync_binlog is 0",
        "class best-effort",
    ] {
        assert!(text.contains(fragment), "{fragment}: {text}");
    }
    let node = MariaDbOptions::new().galera_node();
    let node = MariaDbServer::start_with(node).await.unwrap();
    let findings = backend(config(&node)).await.diagnose().await.unwrap();
    assert!(findings.iter().any(|finding| finding.message.contains("Galera")), "{findings:?}");
    let healthy_server = MariaDbServer::start().await.unwrap();
    let findings = backend(config(&healthy_server)).await.diagnose().await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert!(findings[0].message.contains("10."), "{findings:?}");
}

#[tokio::test]
async fn locks_work_with_any_session_settings_of_the_server() {
    let options = MariaDbOptions::new().args(&[
        "--transaction-isolation=SERIALIZABLE",
        "--sql-mode=ANSI,ORACLE,SIMULTANEOUS_ASSIGNMENT,NO_BACKSLASH_ESCAPES",
        "--default-time-zone=+05:30",
        "--autocommit=0",
        "--lower-case-table-names=1",
        "--sql-safe-updates=1",
        "--character-set-server=latin1",
        "--log-bin=log",
        "--server-id=1",
    ]);
    let server = MariaDbServer::start_with(options).await.unwrap();
    assert_one_holder_at_a_time(&server).await;
    let (backend, held) = (backend(config(&server)).await, claim("renewed"));
    grant(&backend, &held).await;
    let renewed = backend.renew(&[held]).await.remove(0).unwrap();
    assert!(matches!(renewed, Renewal::Renewed(_)), "{renewed:?}");
}
