//! Row locks: each lock is a row that a transaction of its own keeps locked.

use std::time::{Duration, Instant};

use registry_jdbc::sqlx::Connection as _;
use registry_jdbc::{Fence, FenceError, LockIn, PostgresConfig, StatementMode};
use registry_testkit::pgbouncer::PgBouncer;
use tokio::time::timeout;

use super::common::{TEST_TIMEOUT, app_connection, backend, config, lock, server};
use super::server::*;
use super::servers::row::*;
use super::servers::session::AT_ONCE;

#[tokio::test]
async fn a_closed_connection_notifies_its_holder_at_once_and_other_locks_stay_held() {
    let server = server().await;
    let (first, second) = (row_registry(&server).await, row_registry(&server).await);
    let ended = lock(&first, "orders/42").await;
    let pid = server.sql(ROW_HOLDERS).await.unwrap();
    let kept = lock(&first, "orders/43").await;
    let began = Instant::now();
    server.sql(&format!("SELECT pg_terminate_backend({pid})")).await.unwrap();
    timeout(TEST_TIMEOUT, ended.lost()).await.unwrap();
    assert!(began.elapsed() < AT_ONCE, "after {:?}", began.elapsed());
    let next = timeout(TEST_TIMEOUT, second.obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(next.fencing_token() > ended.fencing_token());
    assert!(kept.is_held() && !is_free(&second, "orders/43").await);
    kept.unlock().await.unwrap();
    // The store continues with another connection.
    lock(&first, "orders/43").await.unlock().await.unwrap();
}

#[tokio::test]
async fn a_short_pause_of_the_server_ends_no_lock_and_a_long_one_does() {
    let server = server().await;
    let config = config(&server).with_response_timeout(Duration::from_secs(3));
    let registry = registry_over(row_backend(config).await);
    let guard = lock(&registry, "orders/42").await;
    let pid: i32 = server.sql(ROW_HOLDERS).await.unwrap().parse().unwrap();
    let other = lock(&registry, "orders/43").await;
    server.pause_backend(pid).unwrap();
    assert!(timeout(ONE_SECOND, guard.lost()).await.is_err());
    server.resume_backend(pid).unwrap();
    assert!(timeout(ONE_SECOND, guard.lost()).await.is_err());
    server.pause_backend(pid).unwrap();
    timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    assert!(other.is_held(), "it has a connection of its own");
    assert_eq!(row_lock_count(&server).await, 2, "the row is locked still");
    server.resume_backend(pid).unwrap();
    drop(timeout(TEST_TIMEOUT, registry.obtain("orders/42").lock()).await.unwrap().unwrap());
}

#[tokio::test]
async fn the_servers_idle_timeout_does_not_end_a_held_lock() {
    let server = server().await;
    let (a, b) = (row_registry(&server).await, row_registry(&server).await);
    // An administrator may set this timeout. The backend overrides it in its own sessions.
    server.sql("ALTER SYSTEM SET idle_in_transaction_session_timeout = '700ms'").await.unwrap();
    server.sql("SELECT pg_reload_conf()").await.unwrap();
    let guard = lock(&a, "orders/42").await;
    assert!(timeout(Duration::from_secs(2), guard.lost()).await.is_err());
    assert!(!is_free(&b, "orders/42").await);
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn row_locks_work_through_a_pooler_whose_end_notifies_the_holders() {
    let server = server().await;
    let mut bouncer = PgBouncer::start_with(&server, &["default_pool_size = 3"]).await.unwrap();
    let pooled = PostgresConfig::from_url(&bouncer.url())
        .unwrap()
        .with_statements(StatementMode::Unprepared);
    let pooled = pooled.with_listen(&server.url()).unwrap();
    let (a, b) = (registry_over(row_backend(pooled).await), row_registry(&server).await);
    let guards = [lock(&a, "orders/42").await, lock(&a, "orders/43").await];
    assert!(!is_free(&b, "orders/42").await && !is_free(&b, "orders/43").await);
    // Settings for one transaction do not remain for the next one on the same connection.
    for turn in 0..20 {
        lock(&a, &format!("turn/{turn}")).await.unlock().await.unwrap();
    }
    let [first, second] = guards;
    first.unlock().await.unwrap();
    drop(lock(&b, "orders/42").await);
    bouncer.kill();
    timeout(TEST_TIMEOUT, second.lost()).await.unwrap();
    drop(timeout(TEST_TIMEOUT, b.obtain("orders/43").lock()).await.unwrap().unwrap());
}

#[tokio::test]
async fn a_transaction_of_the_caller_and_a_session_exclude_each_other() {
    let server = server().await;
    let (a, b) = (session_registry(&server).await, session_registry(&server).await);
    let mut conn = app_connection(&server).await;
    let guard = lock(&a, "orders/42").await;
    let token = guard.fencing_token();
    let mut tx = conn.begin().await.unwrap();
    assert_eq!(b.try_lock_in(&mut tx, "orders/42").await.unwrap(), None);
    let limit = Duration::from_millis(300);
    assert_eq!(b.try_lock_in_for(&mut tx, "orders/42", limit).await.unwrap(), None);
    let mut waiting = Box::pin(b.lock_in(&mut tx, "orders/42"));
    assert!(timeout(limit, &mut waiting).await.is_err());
    guard.unlock().await.unwrap();
    let transaction_lock = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
    assert!(transaction_lock.fencing_token() > token);
    assert!(!is_free(&a, "orders/42").await);
    let handle = a.obtain("orders/42");
    let mut waiting = Box::pin(handle.lock());
    assert!(timeout(limit, &mut waiting).await.is_err());
    tx.commit().await.unwrap();
    let next = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
    assert!(next.fencing_token() > transaction_lock.fencing_token());
}

#[tokio::test]
async fn a_fence_refuses_a_transaction_on_another_server() {
    let server = server().await;
    let elsewhere = super::common::server().await;
    let guard = lock(&row_registry(&server).await, "coupon/7").await;
    backend(config(&elsewhere)).await;
    let mut conn = app_connection(&elsewhere).await;
    let mut tx = conn.begin().await.unwrap();
    let error = guard.fence(&mut tx).await.unwrap_err();
    assert!(matches!(error, FenceError::OtherDatabase), "{error:?}");
}
