//! A fenced transaction commits only if no other client was granted the lock since.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, LockOptions, Registry, Release, Renewal};
use registry_jdbc::sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use registry_jdbc::{Fence, FenceError, PostgresBackend};
use registry_testkit::postgres::PostgresServer;
use tokio::time::timeout;

use crate::common::{self, TEST_TIMEOUT, backend, claim, config, data, lock, registry};

async fn start_server() -> PostgresServer {
    let server = common::server().await;
    server.sql("CREATE TABLE sale (coupon text)").await.unwrap();
    server
}

async fn sell(guard: &registry_core::LockGuard, data: &mut PgConnection) -> Result<(), FenceError> {
    let mut transaction = data.begin().await.unwrap();
    guard.fence(&mut transaction).await?;
    transaction.execute("INSERT INTO sale VALUES ('7')").await.unwrap();
    transaction.commit().await.unwrap();
    Ok(())
}

async fn sales(server: &PostgresServer) -> String {
    server.sql("SELECT count(*) FROM sale").await.unwrap()
}

#[tokio::test]
async fn a_holder_commits_with_every_token_of_its_block() {
    let server = start_server().await;
    let registry = registry(config(&server)).await;
    let mut data = data(&server).await;
    let mut guard = lock(&registry, "coupon/7").await;
    for _ in 0..3 {
        let waiting = registry.obtain("coupon/7");
        let next = async { waiting.lock().await.unwrap() };
        let token = guard.fencing_token();
        let (_, next) = tokio::join!(guard.unlock(), next);
        assert!(next.fencing_token() > token);
        sell(&next, &mut data).await.unwrap();
        guard = next;
    }
    assert_eq!(sales(&server).await, "3");
}

#[tokio::test]
async fn a_holder_without_a_loss_notification_cannot_commit() {
    let server = start_server().await;
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
    let mut data = data(&server).await;
    let stale = lock(&a, "coupon/7").await;
    assert!(b.force_release("coupon/7").await.unwrap());
    assert!(stale.is_held(), "it has received no notification yet");
    let error = sell(&stale, &mut data).await.unwrap_err();
    assert!(matches!(&error, FenceError::Lost { key, .. } if key == "coupon/7"), "{error:?}");
    let successor = lock(&b, "coupon/7").await;
    assert!(matches!(sell(&stale, &mut data).await.unwrap_err(), FenceError::Lost { .. }));
    sell(&successor, &mut data).await.unwrap();
    assert_eq!(sales(&server).await, "1");
}

#[tokio::test]
async fn a_takeover_waits_for_the_end_of_a_fenced_transaction() {
    let server = start_server().await;
    let long_busy_timeout = || config(&server).with_busy_timeout(Duration::from_millis(300));
    let (a, b) = (registry(long_busy_timeout()).await, registry(long_busy_timeout()).await);
    let mut data = data(&server).await;

    let options = LockOptions::new().lease(Duration::from_secs(2)).auto_renew(false);
    let guard = a.obtain("coupon/7").lock_with(options).await.unwrap();
    let mut transaction = data.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    transaction.execute("INSERT INTO sale VALUES ('7')").await.unwrap();

    // The lease expires while the transaction is open. The lock is free, but no client can be
    // granted it yet.
    timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    let successor = b.obtain("coupon/7");
    let mut takeover = Box::pin(async { successor.lock().await.unwrap() });
    assert!(timeout(Duration::from_secs(1), &mut takeover).await.is_err());
    transaction.commit().await.unwrap();
    let successor = timeout(TEST_TIMEOUT, takeover).await.unwrap();
    assert!(successor.fencing_token() > guard.fencing_token());
    assert_eq!(sales(&server).await, "1", "the sale existed before the successor was");
}

#[tokio::test]
async fn the_holder_renews_and_releases_next_to_its_fenced_transaction() {
    let server = start_server().await;
    let busy_timeout = Duration::from_millis(200);
    let backend = Arc::new(backend(config(&server).with_busy_timeout(busy_timeout)).await);
    let registry = Registry::builder(Arc::<PostgresBackend>::clone(&backend)).build().unwrap();
    let mut data = data(&server).await;
    let guard = lock(&registry, "coupon/7").await;
    let mut transaction = data.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();

    let holder_claim = guard.claim().clone();
    assert!(matches!(
        backend.renew(std::slice::from_ref(&holder_claim)).await[0],
        Ok(Renewal::Renewed(_))
    ));
    // Without its row the fenced key could be granted, so the row cannot be deleted.
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
async fn a_fence_waits_for_an_earlier_takeover_and_sees_it() {
    let server = start_server().await;
    let a = registry(config(&server)).await;
    let guard = lock(&a, "coupon/7").await;
    // As the store does it, but without the commit.
    let mut other_transaction = data(&server).await;
    common::run(&mut other_transaction, "BEGIN").await;
    let mut data = data(&server).await;
    common::run(
        &mut other_transaction,
        "SELECT * FROM lock_registry_locks FOR UPDATE; UPDATE lock_registry_locks SET claim = '\\x00'",
    )
    .await;
    let mut transaction = data.begin().await.unwrap();
    let mut fence = Box::pin(guard.fence(&mut transaction));
    assert!(timeout(Duration::from_millis(500), &mut fence).await.is_err());
    common::run(&mut other_transaction, "COMMIT").await;
    let error = timeout(TEST_TIMEOUT, fence).await.unwrap().unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
}

#[tokio::test]
async fn a_fence_detects_an_outdated_snapshot() {
    let server = start_server().await;
    let backend = Arc::new(backend(config(&server)).await);
    let registry = Registry::builder(Arc::<PostgresBackend>::clone(&backend)).build().unwrap();
    let other = common::registry(config(&server)).await;
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        // Each level has its own key. With one key, the claim that the first guard still believes
        // to hold would be handed over to the next caller of this process.
        let guard = lock(&registry, level).await;
        let mut data = data(&server).await;
        let begin = AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
        let mut transaction = data.begin_with(begin).await.unwrap();
        transaction.execute("SELECT * FROM sale").await.unwrap();
        // A renewal after the snapshot does not make the fence fail.
        let holder_claim = [guard.claim().clone()];
        assert!(matches!(backend.renew(&holder_claim).await[0], Ok(Renewal::Renewed(_))));
        guard.fence(&mut transaction).await.unwrap();
        transaction.rollback().await.unwrap();

        let begin = AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
        let mut transaction = data.begin_with(begin).await.unwrap();
        transaction.execute("SELECT * FROM sale").await.unwrap();
        // After a renewal, a release and a new grant, the snapshot of the transaction may still
        // contain the old row.
        assert!(matches!(backend.renew(&holder_claim).await[0], Ok(Renewal::Renewed(_))));
        assert!(other.force_release(level).await.unwrap());
        let successor = lock(&other, level).await;
        assert!(guard.is_held(), "it has received no notification yet");
        let error = guard.fence(&mut transaction).await.unwrap_err();
        let is_expected = matches!(error, FenceError::Lost { .. } | FenceError::Busy { .. });
        assert!(is_expected, "{level}: {error:?}");
        transaction.rollback().await.unwrap();
        successor.unlock().await.unwrap();
    }
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
    let mut data = connect().await;
    assert!(matches!(sell(&guard, &mut data).await.unwrap_err(), FenceError::OtherDatabase));
    let _branch = backend(registry_jdbc::PostgresConfig::from_url(&branch).unwrap()).await;
    let mut data = connect().await;
    assert!(matches!(sell(&guard, &mut data).await.unwrap_err(), FenceError::OtherDatabase));
    // A lock of another kind of store cannot fence.
    let guard = lock(&Registry::in_memory().unwrap(), "coupon/7").await;
    let error = sell(&guard, &mut data).await.unwrap_err();
    assert!(matches!(error, FenceError::Unsupported { database: "PostgreSQL", .. }), "{error:?}");
}
