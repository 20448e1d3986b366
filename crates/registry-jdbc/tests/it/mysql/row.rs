//! Row locks: each lock is a row that a transaction of its own keeps locked.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendErrorKind, LockError};
use registry_jdbc::sqlx::Connection as _;
use registry_jdbc::{LockIn, LockInError, MySqlBackend, SpringTable, SqlMode};
use tokio::time::timeout;

use super::common::{TEST_TIMEOUT, app_connection, config, lock, server};
use super::servers::row::*;

#[tokio::test]
async fn a_short_pause_of_the_server_ends_no_lock_and_a_long_one_does() {
    let server = server().await;
    let config = config(&server).with_response_timeout(Duration::from_secs(3));
    let registry = registry_over(row_backend(config).await);
    let guard = lock(&registry, "orders/42").await;
    server.pause().unwrap();
    assert!(timeout(ONE_SECOND, guard.lost()).await.is_err());
    server.resume().unwrap();
    assert!(timeout(ONE_SECOND, guard.lost()).await.is_err());
    server.pause().unwrap();
    timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    server.resume().unwrap();
    drop(timeout(TEST_TIMEOUT, registry.obtain("orders/42").lock()).await.unwrap().unwrap());
}

/// The user of these tests may write despite `read_only`, so the backend itself must check that
/// setting.
#[tokio::test]
async fn a_read_only_server_grants_nothing_and_notifies_the_holders() {
    let server = server().await;
    let spring =
        MySqlBackend::open_mode(config(&server), SqlMode::Spring(SpringTable::v7())).await.unwrap();
    for registry in [
        row_registry(&server).await,
        session_registry(&server).await,
        registry_over(Arc::new(spring)),
    ] {
        let guard = lock(&registry, "orders/42").await;
        server.sql("SET GLOBAL read_only = 1").await.unwrap();
        if registry.capabilities().reports_invalidations {
            timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
        } else {
            // The release is repeated in the background until the server accepts writes.
            let error = guard.unlock().await.unwrap_err();
            assert!(error.is_retryable(), "{error:?}");
            let rows = server.sql("SELECT COUNT(*) FROM INT_LOCK").await.unwrap();
            assert_eq!(rows.trim(), "1", "a release on a replica deletes no row");
        }
        for key in ["orders/42", "fresh"] {
            // The server may not have noticed yet that the closed session has ended.
            let refused = async || match registry.obtain(key).try_lock().await {
                Err(error) => Ok(error),
                Ok(Some(guard)) => panic!("granted: {guard:?}"),
                Ok(None) => Err("busy"),
            };
            let error = registry_testkit::eventually(TEST_TIMEOUT, refused).await;
            assert!(error.is_retryable(), "{error:?}");
            let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
            assert_eq!(source.kind(), BackendErrorKind::Transient);
            assert!(source.to_string().contains("accepts no writes"), "{source}");
        }
        server.sql("SET GLOBAL read_only = 0").await.unwrap();
        lock(&registry, "orders/42").await.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn lock_in_does_not_support_session_locks() {
    let server = server().await;
    let registry = session_registry(&server).await;
    let mut conn = app_connection(&server).await;
    let mut tx = conn.begin().await.unwrap();
    let error = registry.lock_in(&mut tx, "orders/42").await.unwrap_err();
    assert!(matches!(error, LockInError::Unsupported { .. }), "{error:?}");
}
