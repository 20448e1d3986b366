//! The option `mode` of URLs of database servers: locks with leases, session locks and row locks.
//! Tested with PostgreSQL and MariaDB.
#![cfg(all(feature = "postgres", feature = "mysql", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use lock_registry::postgres::sqlx::{Connection, MySqlConnection, PgConnection};
use lock_registry::{
    GuaranteeClass, Registry, connect,
    postgres::{LockIn, LockInError},
};
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;

async fn assert_locks(url: &str, query: &str) -> Registry {
    let (one, other) = (format!("{url}?{query}"), format!("{url}?{query}&label=other"));
    let (one, other) = (connect(&one).await.unwrap(), connect(&other).await.unwrap());
    let guard = one.obtain("orders/42").lock().await.unwrap();
    assert!(other.obtain("orders/42").try_lock().await.unwrap().is_none());
    let token = guard.fencing_token();
    guard.unlock().await.unwrap();
    let next = other.obtain("orders/42").lock().await.unwrap();
    assert!(next.fencing_token() > token);
    next.unlock().await.unwrap();
    _ = other.close(Duration::from_secs(5)).await;
    one
}

#[tokio::test]
async fn locks_in_postgresql_are_leases_or_end_with_a_connection() {
    let server = PostgresServer::start().await.unwrap();
    for (query, class) in [
        ("namespace=a", GuaranteeClass::Durable),
        ("mode=lease", GuaranteeClass::Durable),
        ("mode=session&namespace=b", GuaranteeClass::BestEffort),
        ("mode=row&row_locks=2&namespace=c", GuaranteeClass::BestEffort),
    ] {
        let registry = assert_locks(&server.url(), query).await;
        assert_eq!(registry.capabilities().class, class, "{query}");
        let mut connection = PgConnection::connect(&server.url()).await.unwrap();
        let mut tx = connection.begin().await.unwrap();
        let locked = registry.lock_in(&mut tx, "orders/42").await;
        assert_eq!(locked.unwrap().key(), "orders/42");
    }
    let long = connect(&format!("{}?mode=session&lease=5m", server.url())).await;
    assert!(long.is_err(), "a lock in session mode cannot have a lease of five minutes");
}

#[tokio::test]
async fn locks_in_mariadb_are_leases_or_end_with_a_connection() {
    let server = MariaDbServer::start().await.unwrap();
    for (query, class) in [
        ("mode=lease", GuaranteeClass::Durable),
        ("mode=session", GuaranteeClass::BestEffort),
        ("mode=row", GuaranteeClass::BestEffort),
    ] {
        let registry = assert_locks(&server.url(), query).await;
        assert_eq!(registry.capabilities().class, class, "{query}");
        let mut connection = MySqlConnection::connect(&server.url()).await.unwrap();
        let mut tx = connection.begin().await.unwrap();
        let locked = registry.lock_in(&mut tx, "orders/42").await;
        let is_unsupported = matches!(locked, Err(LockInError::Unsupported { .. }));
        assert_eq!(is_unsupported, query == "mode=session", "{locked:?}");
    }
}
