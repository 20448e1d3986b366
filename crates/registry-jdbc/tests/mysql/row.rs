//! Locks that are rows, locked by a transaction of their own.

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use registry_core::{BackendErrorKind, LockError, Registry};
use registry_jdbc::sqlx::{Connection, Executor};
use registry_jdbc::{
    Fence, FenceError, LockIn, LockInError, MySqlBackend, RowLocksExhausted, SpringTable, SqlMode,
};
use registry_testkit::mariadb::MariaDbServer;
use tokio::time::timeout;

use crate::common::{TEST_TIMEOUT, config, data, lock, server};
use crate::server::*;
use crate::servers::row::*;

#[tokio::test]
async fn a_closed_connection_frees_the_lock_and_notifies_the_holder_at_once() {
    let server = server().await;
    let (first, second) = (registry(&server).await, registry(&server).await);
    let guards = [lock(&first, "orders/42").await, lock(&first, "orders/43").await];
    let began = Instant::now();
    end_sessions(&server).await;
    for guard in &guards {
        timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    }
    assert!(began.elapsed() < LOSS_NOTICE_MAX, "after {:?}", began.elapsed());
    let next = timeout(TEST_TIMEOUT, second.obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(next.fencing_token() > guards[0].fencing_token());
    let other = lock(&first, "orders/43").await;
    assert!(other.is_held() && !is_free(&first, "orders/42").await);
}

#[tokio::test]
async fn each_lock_has_a_connection_and_an_attempt_beyond_the_limit_fails() {
    let server = server().await;
    let limited = row(config(&server).with_row_locks(2)).await;
    let registry = registry_over(Arc::<MySqlBackend>::clone(&limited));
    let guards = [lock(&registry, "a").await, lock(&registry, "b").await];
    assert_eq!(holders(&server).await, 2);
    let error = registry.obtain("c").try_lock().await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.refused() && source.to_string().contains("row_locks"), "{source}");
    let exhausted = source.source().and_then(|source| source.downcast_ref());
    assert_eq!(exhausted.map(|exhausted: &RowLocksExhausted| exhausted.locks_max), Some(2));
    assert!(!is_free(&registry_over(limited), "a").await);
    let [first, second] = guards;
    first.unlock().await.unwrap();
    let third = lock(&registry, "c").await;
    second.unlock().await.unwrap();
    third.unlock().await.unwrap();
    assert_eq!(holders(&server).await, 0);
}

#[tokio::test]
async fn a_waiter_has_no_connection_and_acquires_the_lock_soon_after_its_release() {
    let server = server().await;
    let (a, b) = (registry(&server).await, registry(&server).await);
    let guard = lock(&a, "orders/42").await;
    let handle = b.obtain("orders/42");
    let mut waiting = Box::pin(handle.lock());
    assert!(timeout(Duration::from_millis(300), &mut waiting).await.is_err());
    guard.unlock().await.unwrap();
    drop(timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap());
}

#[tokio::test]
async fn a_short_pause_of_the_server_ends_no_lock_and_a_long_one_does() {
    let server = server().await;
    let config = config(&server).with_response_timeout(Duration::from_secs(3));
    let registry = registry_over(row(config).await);
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

/// `read_only` does not stop the user of these tests from writing.
#[tokio::test]
async fn a_read_only_server_grants_nothing_and_notifies_the_holders() {
    let server = server().await;
    let spring =
        MySqlBackend::open_mode(config(&server), SqlMode::Spring(SpringTable::v7())).await.unwrap();
    for registry in
        [registry(&server).await, session(&server).await, registry_over(Arc::new(spring))]
    {
        let guard = lock(&registry, "orders/42").await;
        server.sql("SET GLOBAL read_only = 1").await.unwrap();
        if registry.capabilities().reports_invalidations {
            timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
        } else {
            guard.unlock().await.unwrap();
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

async fn fences(server: &MariaDbServer, a: Registry, b: Registry) {
    server.sql("CREATE TABLE sale (coupon TEXT) ENGINE = InnoDB").await.unwrap();
    let guard = lock(&a, "coupon/7").await;
    let holders = server.sql("SELECT id FROM information_schema.processlist").await.unwrap();
    let (mut data, mut second) = (data(server).await, data(server).await);
    sell(&guard, &mut data).await.unwrap();
    // The next holder commits after this transaction, even if the server has ended the lock.
    let mut open = second.begin().await.unwrap();
    guard.fence(&mut open).await.unwrap();
    open.execute("INSERT INTO app.sale VALUES ('7')").await.unwrap();
    for id in holders.lines() {
        // All connections except the application's. One may already have ended.
        server.sql(&format!("KILL CONNECTION {id}")).await.ok();
    }
    let next = b.obtain("coupon/7");
    let mut waiting = Box::pin(next.lock());
    assert!(timeout(Duration::from_secs(1), &mut waiting).await.is_err(), "granted too early");
    open.commit().await.unwrap();
    let next = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
    // A holder that has lost the lock cannot commit, whether it was notified or not.
    let error = sell(&guard, &mut data).await.unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
    sell(&next, &mut data).await.unwrap();
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap().trim(), "3");
}

#[tokio::test]
async fn a_transaction_is_fenced_by_a_row_lock() {
    let server = server().await;
    fences(&server, registry(&server).await, registry(&server).await).await;
}

#[tokio::test]
async fn a_transaction_is_fenced_by_a_lock_of_a_session() {
    let server = server().await;
    fences(&server, session(&server).await, session(&server).await).await;
}

#[tokio::test]
async fn lock_in_does_not_support_session_locks() {
    let server = server().await;
    let registry = session(&server).await;
    let mut data = data(&server).await;
    let mut tx = data.begin().await.unwrap();
    let error = registry.lock_in(&mut tx, "orders/42").await.unwrap_err();
    assert!(matches!(error, LockInError::Unsupported { .. }), "{error:?}");
}
