//! Connecting to a store and creating its schema.

use registry_core::{BackendErrorKind, LockBackend as _};
use registry_jdbc::{CreateSchema, MySqlConfig};
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};

use super::common::{backend, claim, config, error_chain, grant, server};
use super::servers::opening::*;

#[tokio::test]
async fn an_error_for_a_user_that_cannot_create_tables_names_the_command() {
    let server = server().await;
    server
        .sql("CREATE USER worker@'127.0.0.1'; GRANT SELECT ON app.* TO worker@'127.0.0.1'")
        .await
        .unwrap();
    let error = expect_refusal(config(&server).with_login("worker", None)).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    assert!(error.to_string().contains("lockreg schema mysql"), "{error}");
}

#[tokio::test]
async fn a_column_that_is_too_small_for_records_is_refused() {
    let server = server().await;
    backend(config(&server)).await.close().await;
    let widen = "ALTER TABLE lock_registry_locks MODIFY label MEDIUMBLOB";
    server.sql("ALTER TABLE lock_registry_locks MODIFY label VARBINARY(1024)").await.unwrap();
    let error = expect_refusal(config(&server)).await;
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", error_chain(&error));
    assert!(error.to_string().contains(widen), "{error}");
    server.sql(widen).await.unwrap();
    backend(config(&server)).await;
}

/// A process that creates the tables may end before it inserts the meta row.
#[tokio::test]
async fn a_missing_meta_row_is_inserted_when_the_store_is_opened() {
    let server = server().await;
    backend(config(&server)).await.close().await;
    server.sql("DELETE FROM lock_registry_meta").await.unwrap();
    let error = expect_refusal(config(&server).with_create_schema(CreateSchema::Never)).await;
    assert!(error.to_string().contains("the meta table has no row"), "{error}");
    grant(&backend(config(&server)).await, &claim("k")).await;
}

#[tokio::test]
async fn table_names_are_configurable() {
    let server = server().await;
    let here = backend(config(&server)).await;
    let other = backend(config(&server).with_table_prefix("app_locks")).await;
    for backend in [&here, &other] {
        grant(backend, &claim("k")).await;
    }
    let found = "SELECT count(*) FROM lock_registry_locks JOIN app_locks_locks USING (id)";
    assert_eq!(server.sql(found).await.unwrap(), "1");
    for name in ["", "1a", "a b", "a`b", "a;b", "ä", "Capital", &"x".repeat(64)] {
        let error = expect_refusal(config(&server).with_table_prefix(name)).await;
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
    }
    let error = expect_refusal(
        config(&server).with_table_prefix("absent").with_create_schema(CreateSchema::Never),
    )
    .await;
    assert!(error.to_string().contains("lockreg schema mysql"), "{error}");
    // A database may have any name.
    server.sql("CREATE DATABASE `a``b {now}`").await.unwrap();
    let strange = MySqlConfig::new("127.0.0.1", server.addr().port(), "a`b {now}");
    grant(&backend(strange.with_login("root", None)).await, &claim("k")).await;
}

#[tokio::test]
async fn a_url_may_name_mariadb_and_must_name_a_database() {
    let options = MariaDbOptions::new().password("canary-right");
    let server = MariaDbServer::start_with(options).await.unwrap();
    let url = format!("mariadb://root:canary-right@{}", server.addr());
    expect_refusal(MySqlConfig::from_url(&url).unwrap()).await;
    let backend = backend(MySqlConfig::from_url(&format!("{url}/app")).unwrap()).await;
    grant(&backend, &claim("k")).await;
}
