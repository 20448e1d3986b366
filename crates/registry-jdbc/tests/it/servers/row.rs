//! Row locks: each lock is a row that a transaction of its own keeps locked.

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use registry_core::{Attempt, Claim, GuaranteeClass, LockAdmin, LockBackend, LockError, Registry};
use registry_jdbc::sqlx::{Connection as _, Executor};
use registry_jdbc::{Fence, FenceError, LockIn, RowLocksExhausted, SqlMode};
use tokio::time::timeout;

use super::common::{TEST_TIMEOUT, app_connection, backend, claim, config, grant, lock, server};
use super::fence::sell;
use super::server::*;

pub(crate) const ONE_SECOND: Duration = Duration::from_secs(1);

pub(crate) async fn row_backend(config: Config) -> Arc<Backend> {
    Arc::new(Backend::open_mode(config, SqlMode::Row).await.unwrap())
}

pub(crate) fn registry_over(backend: Arc<dyn LockBackend>) -> Registry {
    Registry::builder(backend).build().unwrap()
}

pub(crate) async fn row_registry(server: &Server) -> Registry {
    registry_over(row_backend(config(server)).await)
}

pub(crate) async fn session_registry(server: &Server) -> Registry {
    registry_over(Arc::new(Backend::open_mode(config(server), SqlMode::Session).await.unwrap()))
}

pub(crate) async fn attempt(backend: &dyn LockBackend, claim: &Claim) -> Attempt {
    backend.try_acquire(claim).await.unwrap()
}

pub(crate) async fn is_free(registry: &Registry, key: &str) -> bool {
    registry.obtain(key).try_lock().await.unwrap().is_some()
}

#[tokio::test]
async fn capabilities_and_findings_match_the_backend() {
    let server = server().await;
    let backend = row_backend(config(&server)).await;
    let capabilities = backend.capabilities();
    assert_eq!(capabilities.class, GuaranteeClass::BestEffort);
    assert_eq!(capabilities.lease_max, Backend::IDLE_TIMEOUT);
    assert!(
        capabilities.reports_invalidations
            && capabilities.fencing
            && capabilities.inspect
            && capabilities.labels
    );
    let findings = backend.diagnose().await.unwrap();
    assert!(!findings.iter().any(|finding| finding.message.contains("row")), "{findings:?}");
    let many = row_backend(config(&server).with_row_locks(1_000)).await;
    let findings = many.diagnose().await.unwrap();
    assert!(findings.iter().any(|f| f.message.contains("max_connections")), "{findings:?}");
    let none =
        Backend::open_mode(config(&server).with_row_locks(0), SqlMode::Row).await.unwrap_err();
    assert!(!none.is_retryable(), "{none}");
}

/// Writes the next grant to the row, without a loss notification for the holder.
#[tokio::test]
async fn a_lost_holder_cannot_commit_after_the_next_grant_before_its_notification() {
    let server = server().await;
    server.sql(CREATE_SALE).await.unwrap();
    let mut conn = app_connection(&server).await;
    let stale = lock(&session_registry(&server).await, "coupon/7").await;
    server.sql(NEXT_GRANT).await.unwrap();
    assert!(stale.is_held());
    let error = sell(&stale, &mut conn).await.unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
}

/// Runs in real time: the server's clock ends the lock of an unresponsive holder.
#[tokio::test]
async fn the_server_frees_the_locks_of_a_frozen_process_after_a_minute() {
    let server = server().await;
    let session_config = config(&server).with_namespace("sessions");
    let rows = row_registry(&server).await;
    let session_backend =
        Backend::open_mode(session_config.clone(), SqlMode::Session).await.unwrap();
    let sessions = registry_over(Arc::new(session_backend));
    let (moved_row_config, moved_session_config) = (config(&server), session_config);
    let (held_sender, held) = tokio::sync::oneshot::channel();
    let (unblock, unblocked) = std::sync::mpsc::channel::<()>();
    // A runtime whose only thread is blocked, so all its tasks stop, as in a frozen process.
    let blocked = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let locked = runtime.block_on(async {
            let row = registry_over(row_backend(moved_row_config).await);
            let session = Backend::open_mode(moved_session_config, SqlMode::Session).await.unwrap();
            let session = registry_over(Arc::new(session));
            let guards = [lock(&row, "orders/42").await, lock(&session, "orders/42").await];
            (row, session, guards)
        });
        held_sender.send(()).unwrap();
        unblocked.recv().ok();
        runtime.block_on(async {
            for guard in &locked.2 {
                assert!(!guard.is_held(), "it was ended long ago");
                timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
            }
        });
    });
    held.await.unwrap();
    let began = Instant::now();
    // The lock of a live holder, for comparison. Its row is deleted below, and the fence still
    // succeeds.
    let kept = lock(&sessions, "kept").await;
    let acquisitions = [&rows, &sessions].map(|registry| async move {
        let handle = registry.obtain("orders/42");
        let guard = timeout(4 * TEST_TIMEOUT, handle.lock()).await.unwrap().unwrap();
        (began.elapsed(), guard)
    });
    for (after, guard) in futures_util::future::join_all(acquisitions).await {
        assert!(after > Duration::from_secs(55), "it was free after {after:?}");
        assert!(guard.is_held());
    }
    assert!(kept.is_held());
    let delete = format!("DELETE FROM lock_registry_locks WHERE {KEY_COLUMN} = 'kept'");
    server.sql(&delete).await.unwrap();
    let mut conn = app_connection(&server).await;
    let mut tx = conn.begin().await.unwrap();
    kept.fence(&mut tx).await.unwrap();
    tx.commit().await.unwrap();
    unblock.send(()).unwrap();
    blocked.join().unwrap();
}

#[tokio::test]
async fn leases_rows_and_transactions_of_the_caller_exclude_each_other_and_tokens_grow() {
    let server = server().await;
    let (leases, rows) = (backend(config(&server)).await, row_backend(config(&server)).await);
    let registry = registry_over(Arc::<Backend>::clone(&rows));
    let mut conn = app_connection(&server).await;

    let lease = claim("orders/42");
    let first = grant(&leases, &lease).await.token;
    assert!(matches!(attempt(&*rows, &claim("orders/42")).await, Attempt::Busy(_)));
    leases.release(&lease).await.unwrap();

    let held = claim("orders/42");
    let Attempt::Granted(second) = attempt(&*rows, &held).await else { panic!("busy") };
    let second = second.token;
    expect_row_locked(leases.try_acquire(&claim("orders/42")).await);
    let mut tx = conn.begin().await.unwrap();
    assert_eq!(registry.try_lock_in(&mut tx, "orders/42").await.unwrap(), None);
    rows.release(&held).await.unwrap();

    let third = registry.lock_in(&mut tx, "orders/42").await.unwrap().fencing_token();
    assert!(matches!(attempt(&*rows, &claim("orders/42")).await, Attempt::Busy(_)));
    tx.commit().await.unwrap();
    let fourth = grant(&leases, &lease).await.token;
    assert!(first < second && second < third && third < fourth);
}

#[tokio::test]
async fn each_lock_has_a_connection_and_an_attempt_beyond_the_limit_fails() {
    let server = server().await;
    let limited = row_backend(config(&server).with_row_locks(2)).await;
    let registry = registry_over(Arc::<Backend>::clone(&limited));
    let guards = [lock(&registry, "a").await, lock(&registry, "b").await];
    assert_eq!(row_lock_count(&server).await, 2);
    let error = registry.obtain("c").try_lock().await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.refused() && source.to_string().contains("row_locks"), "{source}");
    let exhausted = source.source().and_then(|source| source.downcast_ref());
    assert_eq!(exhausted.map(|exhausted: &RowLocksExhausted| exhausted.locks_max), Some(2));
    // At the limit, a key that the same backend holds is still reported as busy.
    let second_registry = registry_over(limited);
    assert!(!is_free(&second_registry, "a").await);
    // A waiter waits until the key is free and the number of row locks is below the limit.
    let third = registry.obtain("c");
    let mut waiting = Box::pin(third.lock());
    assert!(timeout(Duration::from_millis(300), &mut waiting).await.is_err());
    let [first, second] = guards;
    first.unlock().await.unwrap();
    let third = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
    second.unlock().await.unwrap();
    third.unlock().await.unwrap();
    assert_eq!(row_lock_count(&server).await, 0);
}

#[tokio::test]
async fn a_waiter_has_no_connection_and_is_woken_by_a_release_in_another_process() {
    let server = server().await;
    let (a, b) = (row_registry(&server).await, row_registry(&server).await);
    let guards = [lock(&a, "orders/1").await, lock(&a, "orders/2").await];
    let handles = [b.obtain("orders/1"), b.obtain("orders/2")];
    let mut waiting = handles.iter().map(|handle| Box::pin(handle.lock())).collect::<Vec<_>>();
    for waiting in &mut waiting {
        assert!(timeout(Duration::from_millis(300), waiting).await.is_err());
    }
    assert_eq!(row_lock_count(&server).await, 2);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    for waiting in waiting {
        drop(timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap());
    }
}

async fn assert_fences(server: &Server, a: Registry, b: Registry) {
    server.sql(CREATE_SALE).await.unwrap();
    let guard = lock(&a, "coupon/7").await;
    let connections = connection_ids(server).await;
    let (mut conn, mut second) = (app_connection(server).await, app_connection(server).await);
    sell(&guard, &mut conn).await.unwrap();
    // The next holder commits after this transaction, even after the server ended the connection of
    // the lock.
    let mut open = second.begin().await.unwrap();
    guard.fence(&mut open).await.unwrap();
    open.execute(SELL).await.unwrap();
    end_connections_by_id(server, &connections).await;
    let next = b.obtain("coupon/7");
    let mut waiting = Box::pin(next.lock());
    assert!(timeout(Duration::from_secs(1), &mut waiting).await.is_err(), "granted too early");
    open.commit().await.unwrap();
    let next = timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap();
    // A holder that has lost the lock cannot commit, whether it was notified or not.
    let error = sell(&guard, &mut conn).await.unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
    sell(&next, &mut conn).await.unwrap();
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap().trim(), "3");
}

#[tokio::test]
async fn a_transaction_is_fenced_by_a_row_lock() {
    let server = server().await;
    assert_fences(&server, row_registry(&server).await, row_registry(&server).await).await;
}

#[tokio::test]
async fn a_transaction_is_fenced_by_a_lock_of_a_session() {
    let server = server().await;
    assert_fences(&server, session_registry(&server).await, session_registry(&server).await).await;
}
