//! A fenced transaction commits only if no other client was granted the lock since.

use std::sync::Arc;

use registry_core::{LockBackend, LockOptions, Registry, Renewal};
use registry_jdbc::sqlx::Connection as _;
use registry_jdbc::{Fence, FenceError, MySqlBackend, MySqlConfig};
use tokio::time::timeout;

use super::common::{self, TEST_TIMEOUT, app_connection, backend, claim, config, lock, registry};
use super::servers::fence::*;

#[tokio::test]
async fn a_renewal_does_not_wait_for_a_fence_and_returns_an_error() {
    let server = start_server().await;
    let backend = Arc::new(backend(config(&server)).await);
    let registry = Registry::builder(Arc::<MySqlBackend>::clone(&backend)).build().unwrap();
    let mut conn = app_connection(&server).await;
    let (fenced, other) = (lock(&registry, "coupon/7").await, lock(&registry, "coupon/8").await);
    let mut transaction = conn.begin().await.unwrap();
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

/// The row does not show whose transaction has locked it.
#[tokio::test]
async fn a_reader_is_released_after_the_fenced_transaction_of_another_reader() {
    let server = start_server().await;
    let registry = registry(config(&server)).await;
    let other_registry = common::registry(config(&server)).await;
    let (mut conn, mut other_conn) = (app_connection(&server).await, app_connection(&server).await);
    let reader = registry.obtain("coupon/7").read_with(LockOptions::new()).await.unwrap();
    let other = other_registry.obtain("coupon/7").read_with(LockOptions::new()).await.unwrap();
    sell(&reader, &mut conn).await.unwrap();
    let mut transaction = other_conn.begin().await.unwrap();
    other.fence(&mut transaction).await.unwrap();

    let error = reader.unlock().await.unwrap_err();
    assert!(error.to_string().contains("or another holder of the key"), "{error:?}");
    transaction.commit().await.unwrap();
    timeout(TEST_TIMEOUT, registry.idle()).await.unwrap();
    assert_eq!(registry.obtain("coupon/7").holders().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_fence_detects_another_server_and_works_from_another_database() {
    let (server, elsewhere) = (start_server().await, start_server().await);
    let guard = lock(&registry(config(&server)).await, "coupon/7").await;
    let mut other_connection = app_connection(&elsewhere).await;
    assert!(matches!(
        sell(&guard, &mut other_connection).await.unwrap_err(),
        FenceError::OtherDatabase
    ));
    let _other_backend = backend(config(&elsewhere)).await;
    assert!(matches!(
        sell(&guard, &mut other_connection).await.unwrap_err(),
        FenceError::OtherDatabase
    ));

    // A transaction spans all databases of a server, so the fence works from another database.
    server.sql("CREATE DATABASE branch").await.unwrap();
    let mut connection = app_connection(&server).await;
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
