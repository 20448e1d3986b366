//! Session locks, which end with the connection of the session.

use std::sync::Arc;

use registry_core::{Attempt, LockBackend, Registry, Release};
use registry_jdbc::MySqlBackend;
use registry_jdbc::sqlx::{AssertSqlSafe, Executor, MySqlConnection, Row};
use tokio::time::timeout;

use super::common::{TEST_TIMEOUT, app_connection, claim, lock, server};
use super::server::*;
use super::servers::session::*;

async fn number(connection: &mut MySqlConnection, expression: &str) -> Option<i64> {
    let text = format!("SELECT CAST({expression} AS SIGNED)");
    connection.fetch_one(AssertSqlSafe(text)).await.unwrap().get(0)
}

#[tokio::test]
async fn all_locks_of_a_process_share_one_connection() {
    let server = server().await;
    let backend = session_backend(&server).await;
    let registry = registry_over(&backend);
    let first = lock(&registry, "orders/42").await;
    let mut conn = app_connection(&server).await;
    let holder = number(&mut conn, &format!("IS_USED_LOCK('{SESSION_LOCK_NAME}')")).await;
    assert!(holder.is_some());
    let mut guards = Vec::new();
    for n in 0..30 {
        guards.push(lock(&registry, &format!("orders/many/{n}")).await);
    }
    assert_eq!(registry.held(), 31);
    // The server would grant a named lock to the same session again, so the backend must exclude
    // the second registry.
    let second_registry = Registry::builder(Arc::<MySqlBackend>::clone(&backend)).build().unwrap();
    assert!(second_registry.obtain("orders/42").try_lock().await.unwrap().is_none());
    let connection = holder.unwrap();
    server.sql(&format!("KILL CONNECTION {connection}")).await.unwrap();
    for guard in guards.iter().chain([&first]) {
        timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    }
    assert_eq!(number(&mut conn, &format!("IS_USED_LOCK('{SESSION_LOCK_NAME}')")).await, None);
}

#[tokio::test]
async fn other_programs_exclude_the_session_by_the_lock_name() {
    let server = server().await;
    let backend = session_backend(&server).await;
    let mut other = app_connection(&server).await;
    assert_eq!(number(&mut other, &format!("GET_LOCK('{SESSION_LOCK_NAME}', 0)")).await, Some(1));
    assert!(matches!(attempt(&backend, &claim("orders/42")).await, Attempt::Busy(_)));
    assert_eq!(number(&mut other, &format!("RELEASE_LOCK('{SESSION_LOCK_NAME}')")).await, Some(1));
    let held = claim("orders/42");
    assert!(matches!(attempt(&backend, &held).await, Attempt::Granted(_)));
    assert_eq!(number(&mut other, &format!("GET_LOCK('{SESSION_LOCK_NAME}', 0)")).await, Some(0));
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    assert_eq!(number(&mut other, &format!("GET_LOCK('{SESSION_LOCK_NAME}', 0)")).await, Some(1));
}
