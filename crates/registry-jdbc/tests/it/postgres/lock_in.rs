//! `lock_in`: a lock that lasts until the caller's transaction ends.

use std::time::Duration;

use registry_core::{Attempt, LockBackend, Registry};
use registry_jdbc::sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};
use registry_jdbc::{LockIn, LockInError, PostgresConfig, StatementMode};
use registry_testkit::pgbouncer::PgBouncer;
use tokio::time::timeout;

use super::common::{
    TEST_TIMEOUT, app_connection, backend, claim, config, error_chain, grant, lock, registry, run,
    server,
};

#[tokio::test]
async fn a_row_locked_by_another_program_is_an_error_and_not_busy() {
    let server = server().await;
    let backend = backend(config(&server).with_busy_timeout(Duration::from_millis(50))).await;
    let lease_claim = claim("orders/42");
    grant(&backend, &lease_claim).await;
    backend.release(&lease_claim).await.unwrap();
    let mut other_program = app_connection(&server).await;
    run(&mut other_program, "BEGIN; SELECT * FROM lock_registry_locks FOR UPDATE").await;
    let error = backend.try_acquire(&claim("orders/42")).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", error_chain(&error));
    run(&mut other_program, "ROLLBACK").await;
    assert!(matches!(backend.try_acquire(&claim("orders/42")).await, Ok(Attempt::Granted(_))));
}

#[tokio::test]
async fn lock_in_preserves_settings_and_savepoints() {
    let server = server().await;
    let registry = registry(config(&server)).await;
    let (mut one, mut two) = (app_connection(&server).await, app_connection(&server).await);
    let mut blocker = two.begin().await.unwrap();
    registry.lock_in(&mut blocker, "b").await.unwrap();
    let mut tx = one.begin().await.unwrap();
    tx.execute("SET LOCAL lock_timeout = '4321ms'; CREATE TEMP TABLE note (n int)").await.unwrap();
    for (key, is_acquired) in [("a", true), ("a", true), ("b", false)] {
        assert_eq!(registry.try_lock_in(&mut tx, key).await.unwrap().is_some(), is_acquired);
        let setting = tx.fetch_one("SHOW lock_timeout").await.unwrap();
        assert_eq!(setting.get::<String, _>(0), "4321ms");
        tx.execute("INSERT INTO note VALUES (1)").await.unwrap();
    }
    let mut inner = tx.begin().await.unwrap();
    registry.lock_in(&mut inner, "c").await.unwrap();
    inner.rollback().await.unwrap();
    // The lock lasted as long as the nested transaction in which it was acquired.
    registry.lock_in(&mut blocker, "c").await.unwrap();
    assert_eq!(registry.try_lock_in(&mut blocker, "a").await.unwrap(), None);
    let notes = tx.fetch_one("SELECT count(*) FROM note").await.unwrap();
    assert_eq!(notes.get::<i64, _>(0), 3);
    tx.commit().await.unwrap();
}

#[tokio::test]
async fn a_transaction_with_a_snapshot_is_refused_before_it_locks() {
    let server = server().await;
    let registry = registry(config(&server)).await;
    let mut conn = app_connection(&server).await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let begin = || AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
        for first_statement in ["SELECT 1 FROM lock_registry_locks", ""] {
            let mut tx = conn.begin_with(begin()).await.unwrap();
            tx.execute(first_statement).await.unwrap();
            let error = registry.try_lock_in(&mut tx, "orders/42").await.unwrap_err();
            assert!(matches!(error, LockInError::Isolation { .. }), "{error:?}");
            assert!(!error.is_retryable(), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(level) && text.contains("READ COMMITTED"), "{text}");
            // The transaction remains usable without the lock.
            tx.execute("SELECT 1").await.unwrap();
            lock(&registry, "orders/42").await.unlock().await.unwrap();
            tx.commit().await.unwrap();
        }
    }
    for level in ["READ UNCOMMITTED", "READ COMMITTED"] {
        let begin = AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
        let mut tx = conn.begin_with(begin).await.unwrap();
        registry.lock_in(&mut tx, "orders/42").await.unwrap();
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_deadlock_of_two_transactions_is_returned_as_a_conflict() {
    let server = server().await;
    let config = config(&server).with_busy_timeout(Duration::from_secs(5));
    let registry = registry(config).await;
    let (mut one, mut two) = (app_connection(&server).await, app_connection(&server).await);
    let (mut one, mut two) = (one.begin().await.unwrap(), two.begin().await.unwrap());
    registry.lock_in(&mut one, "a").await.unwrap();
    registry.lock_in(&mut two, "b").await.unwrap();
    let deadlock = async {
        tokio::select! {
            ended = registry.lock_in(&mut one, "b") => ended,
            ended = registry.lock_in(&mut two, "a") => ended,
        }
    };
    let error = timeout(TEST_TIMEOUT, deadlock).await.unwrap().unwrap_err();
    assert!(matches!(error, LockInError::Conflict { .. }), "{error:?}");
}

#[tokio::test]
async fn lock_in_works_through_a_pooler_in_transaction_mode() {
    let server = server().await;
    let bouncer = PgBouncer::start(&server).await.unwrap();
    let config = PostgresConfig::from_url(&bouncer.url())
        .unwrap()
        .with_statements(StatementMode::Unprepared);
    let registry = registry(config).await;
    let connect = async || PgConnection::connect(&bouncer.url()).await.unwrap();
    let (mut one, mut two) = (connect().await, connect().await);
    let mut tx = one.begin().await.unwrap();
    registry.lock_in(&mut tx, "orders/42").await.unwrap();
    let mut other = two.begin().await.unwrap();
    assert_eq!(registry.try_lock_in(&mut other, "orders/42").await.unwrap(), None);
    let mut waiting = Box::pin(registry.lock_in(&mut other, "orders/42"));
    assert!(timeout(Duration::from_millis(200), &mut waiting).await.is_err());
    tx.commit().await.unwrap();
    timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
    other.commit().await.unwrap();
}

#[tokio::test]
async fn an_invalid_lock_in_is_refused_and_the_transaction_continues() {
    let server = server().await;
    server.sql("CREATE DATABASE branch").await.unwrap();
    let registry = registry(config(&server)).await;
    let mut conn = app_connection(&server).await;
    let mut tx = conn.begin().await.unwrap();
    let error = registry.lock_in(&mut tx, "").await.unwrap_err();
    assert!(matches!(error, LockInError::InvalidKey { .. }), "{error:?}");
    let error = Registry::in_memory().unwrap().lock_in(&mut tx, "a").await.unwrap_err();
    assert!(matches!(error, LockInError::Unsupported { database: "PostgreSQL", .. }), "{error:?}");
    tx.execute("SELECT 1").await.unwrap();

    let url = server.url();
    let branch = format!("{}/branch", url.strip_suffix("/postgres").unwrap());
    let mut conn = PgConnection::connect(&branch).await.unwrap();
    for _ in 0..2 {
        let mut tx = conn.begin().await.unwrap();
        let error = registry.lock_in(&mut tx, "a").await.unwrap_err();
        assert!(matches!(error, LockInError::OtherDatabase { .. }), "{error:?}");
        tx.execute("SELECT 1").await.unwrap();
        tx.commit().await.unwrap();
        // The first round has no tables, the second has tables of another store.
        backend(PostgresConfig::from_url(&branch).unwrap()).await;
    }
}
