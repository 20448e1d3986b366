//! A fenced transaction commits only if no other client was granted the lock since.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, LockGuard, LockOptions, Registry, Renewal};
use registry_jdbc::sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection};
use registry_jdbc::{Fence, FenceError, MySqlBackend, MySqlConfig};
use registry_testkit::mariadb::MariaDbServer;
use tokio::time::timeout;

use crate::common::{self, TEST_TIMEOUT, backend, claim, config, data, lock, registry};

async fn start_server() -> MariaDbServer {
    let server = common::server().await;
    server.sql("CREATE TABLE sale (coupon TEXT) ENGINE = InnoDB").await.unwrap();
    server
}

async fn sell(guard: &LockGuard, data: &mut MySqlConnection) -> Result<(), FenceError> {
    let mut transaction = data.begin().await.unwrap();
    if let Err(error) = guard.fence(&mut transaction).await {
        // A dropped transaction is rolled back when its connection is next used, and this
        // connection stays idle.
        transaction.rollback().await.unwrap();
        return Err(error);
    }
    transaction.execute("INSERT INTO app.sale VALUES ('7')").await.unwrap();
    transaction.commit().await.unwrap();
    Ok(())
}

async fn sales(server: &MariaDbServer) -> String {
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
    let (a, b) = (registry(config(&server)).await, registry(config(&server)).await);
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
    assert!(timeout(Duration::from_millis(2_500), &mut takeover).await.is_err());
    transaction.commit().await.unwrap();
    let successor = timeout(TEST_TIMEOUT, takeover).await.unwrap();
    assert!(successor.fencing_token() > guard.fencing_token());
    assert_eq!(sales(&server).await, "1", "the sale existed before the successor was");
}

#[tokio::test]
async fn a_renewal_does_not_wait_for_a_fence_and_returns_an_error() {
    let server = start_server().await;
    let backend = Arc::new(backend(config(&server)).await);
    let registry = Registry::builder(Arc::<MySqlBackend>::clone(&backend)).build().unwrap();
    let mut data = data(&server).await;
    let (fenced, other) = (lock(&registry, "coupon/7").await, lock(&registry, "coupon/8").await);
    let mut transaction = data.begin().await.unwrap();
    fenced.fence(&mut transaction).await.unwrap();

    let claims = [fenced.claim().clone(), other.claim().clone()];
    let renewals = backend.renew(&claims).await;
    let error = renewals[0].as_ref().unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", common::error_chain(error));
    assert!(matches!(renewals[1], Ok(Renewal::Renewed(_))));
    transaction.commit().await.unwrap();
    assert!(matches!(backend.renew(&claims).await[0], Ok(Renewal::Renewed(_))));
    assert!(fenced.is_held() && other.is_held());
}

#[tokio::test]
async fn a_fence_waits_for_an_earlier_takeover_and_sees_it() {
    let server = start_server().await;
    let a = registry(config(&server)).await;
    let guard = lock(&a, "coupon/7").await;
    // As the store does it, but without the commit.
    let mut other_transaction = data(&server).await;
    common::run(
        &mut other_transaction,
        "BEGIN; UPDATE lock_registry_locks SET claim = '0123456789abcdef'",
    )
    .await;
    let mut data = data(&server).await;
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
    let registry = Registry::builder(Arc::<MySqlBackend>::clone(&backend)).build().unwrap();
    let other = common::registry(config(&server)).await;
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let guard = lock(&registry, level).await;
        let mut data = data(&server).await;
        let set = AssertSqlSafe(format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}"));
        data.execute(set).await.unwrap();
        let holder_claim = [guard.claim().clone()];
        for is_lost in [false, true] {
            let mut transaction = data.begin().await.unwrap();
            // Takes the snapshot of the transaction.
            transaction.execute("SELECT * FROM sale").await.unwrap();
            transaction.execute("SELECT count(*) FROM lock_registry_meta").await.unwrap();
            assert!(matches!(backend.renew(&holder_claim).await[0], Ok(Renewal::Renewed(_))));
            if !is_lost {
                // A renewal after the snapshot does not make the fence fail.
                guard.fence(&mut transaction).await.unwrap();
                transaction.rollback().await.unwrap();
                continue;
            }
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
}

#[tokio::test]
async fn a_fence_detects_another_server_and_works_from_another_database() {
    let (server, elsewhere) = (start_server().await, start_server().await);
    let guard = lock(&registry(config(&server)).await, "coupon/7").await;
    let mut other_connection = data(&elsewhere).await;
    assert!(matches!(
        sell(&guard, &mut other_connection).await.unwrap_err(),
        FenceError::OtherDatabase
    ));
    let _branch = backend(config(&elsewhere)).await;
    assert!(matches!(
        sell(&guard, &mut other_connection).await.unwrap_err(),
        FenceError::OtherDatabase
    ));

    // Databases of one server share transactions, so the fence works there too.
    server.sql("CREATE DATABASE branch").await.unwrap();
    let mut connection = data(&server).await;
    common::run(&mut connection, "USE branch").await;
    sell(&guard, &mut connection).await.unwrap();
    assert_eq!(sales(&server).await, "1");

    // A lock of another kind of store cannot fence.
    let guard = lock(&Registry::in_memory().unwrap(), "coupon/7").await;
    let error = sell(&guard, &mut connection).await.unwrap_err();
    assert!(matches!(error, FenceError::Unsupported { database: "MySQL", .. }), "{error:?}");
    // A store with other tables has separate locks, so the same key can be granted there.
    let config: MySqlConfig = config(&server).with_table_prefix("other");
    common::grant(&backend(config).await, &claim("coupon/7")).await;
}
