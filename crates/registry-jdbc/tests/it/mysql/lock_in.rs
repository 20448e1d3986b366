//! `lock_in`: a lock that lasts until the caller's transaction ends.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, Registry};
use registry_jdbc::sqlx::{Connection, Executor, Row};
use registry_jdbc::{LockIn, LockInError, MySqlBackend, SqlMode};
use tokio::time::timeout;

use super::common::{
    TEST_TIMEOUT, app_connection, backend, claim, config, grant, registry, run, server,
};

/// A local caller waits for the end of the transaction, and is ahead of the second `lock_in` in the
/// local queue.
#[tokio::test]
async fn a_transaction_locks_its_key_again_while_a_local_caller_waits_for_it() {
    let server = server().await;
    let rows = Arc::new(MySqlBackend::open_mode(config(&server), SqlMode::Row).await.unwrap());
    let registries = [registry(config(&server)).await, Registry::builder(rows).build().unwrap()];
    for registry in registries {
        let mut conn = app_connection(&server).await;
        let mut tx = conn.begin().await.unwrap();
        let first = registry.lock_in(&mut tx, "orders/42").await.unwrap();
        let lock = registry.obtain("orders/42");
        let mut waiting = pin!(lock.lock());
        assert!(timeout(Duration::from_millis(300), &mut waiting).await.is_err());
        let again = async {
            timeout(TEST_TIMEOUT, registry.lock_in(&mut tx, "orders/42")).await.unwrap().unwrap()
        };
        let again = tokio::select! {
            again = again => again,
            guard = &mut waiting => panic!("two holders: {guard:?}"),
        };
        assert!(again.fencing_token() > first.fencing_token());
        tx.commit().await.unwrap();
        let guard = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
        assert!(guard.fencing_token() > again.fencing_token());
        guard.unlock().await.unwrap();
        _ = registry.close(TEST_TIMEOUT).await;
    }
}

#[tokio::test]
async fn a_transaction_with_the_lock_reads_the_writes_of_the_previous_holder() {
    let server = server().await;
    server.sql("CREATE TABLE counter (n BIGINT); INSERT INTO counter VALUES (0)").await.unwrap();
    let registry = registry(config(&server)).await;
    let (mut one, mut two) = (app_connection(&server).await, app_connection(&server).await);
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        for connection in [&mut one, &mut two] {
            run(connection, &format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}")).await;
        }
        let mut tx = one.begin().await.unwrap();
        registry.lock_in(&mut tx, "counter").await.unwrap();
        let mut other = two.begin().await.unwrap();
        // The second transaction requests the lock and gets "busy" before the first one writes.
        assert_eq!(registry.try_lock_in(&mut other, "counter").await.unwrap(), None);
        let mut waiting = Box::pin(registry.lock_in(&mut other, "counter"));
        assert!(timeout(Duration::from_millis(200), &mut waiting).await.is_err());
        tx.execute("UPDATE counter SET n = n + 1").await.unwrap();
        let wrote: i64 = tx.fetch_one("SELECT n FROM counter").await.unwrap().get(0);
        tx.commit().await.unwrap();
        timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
        let reads: i64 = other.fetch_one("SELECT n FROM counter").await.unwrap().get(0);
        assert_eq!(reads, wrote, "{level}");
        other.commit().await.unwrap();
    }
}

/// The user of these tests may write despite `read_only`.
#[tokio::test]
async fn a_read_only_server_grants_no_lock_in_and_stores_no_row() {
    let server = server().await;
    let registry = registry(config(&server)).await;
    registry.obtain("known").lock().await.unwrap().unlock().await.unwrap();
    let mut conn = app_connection(&server).await;
    server.sql("SET GLOBAL read_only = 1").await.unwrap();
    for key in ["known", "fresh"] {
        let mut tx = conn.begin().await.unwrap();
        let error =
            timeout(TEST_TIMEOUT, registry.lock_in(&mut tx, key)).await.unwrap().unwrap_err();
        let LockInError::Backend { source, .. } = &error else { panic!("{error:?}") };
        assert!(source.is_retryable() && source.to_string().contains("no writes"), "{source}");
        assert_eq!(source.address(), Some(&*server.addr().to_string()));
        tx.rollback().await.unwrap();
    }
    server.sql("SET GLOBAL read_only = 0").await.unwrap();
    let rows = conn.fetch_all("SELECT id FROM lock_registry_locks").await.unwrap();
    assert_eq!(rows.len(), 1, "a row was stored for `fresh`");
    for key in ["known", "fresh"] {
        let mut tx = conn.begin().await.unwrap();
        registry.lock_in(&mut tx, key).await.unwrap();
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn an_invalid_lock_in_is_refused() {
    let (here, there) = (server().await, server().await);
    let registry = registry(config(&here)).await;
    let mut other_conn = app_connection(&there).await;
    let mut tx = other_conn.begin().await.unwrap();
    let error = registry.lock_in(&mut tx, "").await.unwrap_err();
    assert!(matches!(error, LockInError::InvalidKey { .. }), "{error:?}");
    let error = Registry::in_memory().unwrap().lock_in(&mut tx, "a").await.unwrap_err();
    assert!(matches!(error, LockInError::Unsupported { database: "MySQL", .. }), "{error:?}");
    let error = registry.lock_in(&mut tx, "a").await.unwrap_err();
    assert!(matches!(error, LockInError::OtherDatabase { .. }), "{error:?}");
    tx.rollback().await.unwrap();
    // The other server has tables of the same names, first without and then with a row of this key.
    let other = backend(config(&there)).await;
    for _ in 0..2 {
        let mut tx = other_conn.begin().await.unwrap();
        let error = registry.lock_in(&mut tx, "a").await.unwrap_err();
        assert!(matches!(error, LockInError::OtherDatabase { .. }), "{error:?}");
        tx.rollback().await.unwrap();
        let lease_claim = claim("a");
        grant(&other, &lease_claim).await;
        other.release(&lease_claim).await.unwrap();
    }
}
