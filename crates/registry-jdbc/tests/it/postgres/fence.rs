//! A fenced transaction commits only if no other client was granted the lock since.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, Registry, Release, Renewal};
use registry_jdbc::sqlx::{Connection, PgConnection};
use registry_jdbc::{Fence, FenceError, PostgresBackend};

use super::common::{self, app_connection, backend, claim, config, lock, registry};
use super::servers::fence::*;

#[tokio::test]
async fn the_holder_renews_and_releases_during_its_fenced_transaction() {
    let server = start_server().await;
    let busy_timeout = Duration::from_millis(200);
    let backend = Arc::new(backend(config(&server).with_busy_timeout(busy_timeout)).await);
    let registry = Registry::builder(Arc::<PostgresBackend>::clone(&backend)).build().unwrap();
    let mut conn = app_connection(&server).await;
    let guard = lock(&registry, "coupon/7").await;
    let mut transaction = conn.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();

    let holder_claim = guard.claim().clone();
    assert!(matches!(
        backend.renew(std::slice::from_ref(&holder_claim)).await[0],
        Ok(Renewal::Renewed(_))
    ));
    // Without its row, the fenced key could be granted. The transaction therefore keeps the row
    // from being deleted.
    let deletes = "SET lock_timeout = '200ms'; DELETE FROM lock_registry_locks";
    server.sql(deletes).await.unwrap_err();
    server.sql(&deletes.replace("DELETE FROM", "TRUNCATE")).await.unwrap_err();
    // A release frees the lock, but the next grant must wait for the transaction.
    assert_eq!(backend.release(&holder_claim).await.unwrap(), Release::Freed);
    let error = backend.try_acquire(&claim("coupon/7")).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", common::error_chain(&error));
    transaction.rollback().await.unwrap();
    common::grant(&backend, &claim("coupon/7")).await;
}

#[tokio::test]
async fn a_fence_detects_a_transaction_on_another_database() {
    let server = start_server().await;
    server.sql("CREATE DATABASE branch").await.unwrap();
    let guard = lock(&registry(config(&server)).await, "coupon/7").await;
    let branch = server.url().replace("/postgres?", "/branch?");
    let branch =
        branch.strip_suffix("/postgres").map(|url| format!("{url}/branch")).unwrap_or(branch);
    let connect = async || PgConnection::connect(&branch).await.unwrap();
    let mut conn = connect().await;
    assert!(matches!(sell(&guard, &mut conn).await.unwrap_err(), FenceError::OtherDatabase));
    let _branch_backend = backend(registry_jdbc::PostgresConfig::from_url(&branch).unwrap()).await;
    let mut conn = connect().await;
    assert!(matches!(sell(&guard, &mut conn).await.unwrap_err(), FenceError::OtherDatabase));
    // A lock of another kind of store cannot fence.
    let guard = lock(&Registry::in_memory().unwrap(), "coupon/7").await;
    let error = sell(&guard, &mut conn).await.unwrap_err();
    assert!(matches!(error, FenceError::Unsupported { database: "PostgreSQL", .. }), "{error:?}");
}
