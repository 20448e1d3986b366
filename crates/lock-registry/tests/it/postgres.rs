//! PostgreSQL servers by URL: real servers, and the errors if they cannot be reached.
#![cfg(all(feature = "postgres", target_os = "linux"))]

use std::time::Duration;

use lock_registry::{ConfigError, GuaranteeClass, backend::BackendErrorKind, connect};
use registry_testkit::error_text;
use registry_testkit::postgres::{PostgresOptions, PostgresServer};

#[tokio::test]
async fn two_registries_of_a_database_exclude_each_other_and_see_the_holder() {
    let server = PostgresServer::start().await.unwrap();
    server.sql("CREATE SCHEMA locks").await.unwrap();
    let options = "label=worker%201&lease=60s&timeout=60s&poll=1h&pool=2&schema=locks&table_prefix=app&busy_timeout=2s\
                   &connect_timeout=5s&purge_after=2h&sslmode=disable";
    let url = format!("{}?{options}", server.url());
    let one = connect(&url).await.unwrap();
    let other = connect(&url.replace("postgres:", "postgresql:")).await.unwrap();
    assert_eq!(one.capabilities().class, GuaranteeClass::Durable);
    assert!(one.capabilities().wakes);
    let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
    assert!(other.obtain("key").try_lock().await.unwrap().is_none());
    let holder = other.obtain("key").holders().await.unwrap().remove(0);
    assert_eq!(holder.label.as_deref(), Some("worker 1"));
    assert!(holder.lease_left.is_some_and(|left| left > Duration::from_secs(30)), "{holder:?}");
    assert_eq!(server.sql("SELECT count(*) FROM locks.app_locks").await.unwrap(), "1");
    // The release notification ends the wait long before the poll.
    let waiter = tokio::spawn(async move {
        other.obtain("key").lock().await.unwrap().unlock().await.unwrap();
        other
    });
    guard.unlock().await.unwrap();
    assert!(waiter.await.unwrap().list().await.unwrap().is_empty());
}

#[tokio::test]
async fn capabilities_report_whether_the_store_listens() {
    let server = PostgresServer::start().await.unwrap();
    let url = server.url();
    let elsewhere = url.replace(':', "%3A").replace('/', "%2F").replace('@', "%40");
    for (options, wakes) in [
        (String::new(), true),
        ("?listen=off".to_owned(), false),
        ("?prepared=false".to_owned(), false),
        (format!("?prepared=false&listen={elsewhere}"), true),
    ] {
        let registry = connect(&format!("{url}{options}")).await.unwrap();
        assert_eq!(registry.capabilities().wakes, wakes, "{options}");
        registry.obtain("key").lock().await.unwrap().unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_refused_connection_has_its_kind_and_no_login_is_shown() {
    let options = PostgresOptions::new().password("right");
    let server = PostgresServer::start_with(options).await.unwrap();
    let right = server.url();
    connect(&right).await.unwrap();
    for (url, kind) in [
        (right.replace(":right@", ":canary@"), BackendErrorKind::Denied),
        (right.replace("//postgres:", "//canary:"), BackendErrorKind::Denied),
        #[cfg(feature = "postgres-tls")]
        (format!("{right}?sslmode=require"), BackendErrorKind::Misconfigured),
        (format!("{right}?create_schema=false&table_prefix=x"), BackendErrorKind::Misconfigured),
        ("postgres://u:canary@127.0.0.1:1/x".to_owned(), BackendErrorKind::Transient),
    ] {
        let error = connect(&url).await.unwrap_err();
        assert!(!error_text(&error).contains("canary"), "{}", error_text(&error));
        let ConfigError::Open { store: "postgres", source, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(source.kind(), kind, "{}", error_text(&error));
    }
}

#[cfg(not(feature = "postgres-tls"))]
#[tokio::test]
async fn an_error_about_encryption_that_is_not_built_in_names_the_feature() {
    let error = connect("postgres://127.0.0.1:1/app?sslmode=require").await.unwrap_err();
    assert!(
        matches!(&error, ConfigError::Invalid(message) if message.contains("`postgres-tls`")),
        "{error}"
    );
}
