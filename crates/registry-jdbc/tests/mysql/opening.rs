//! Connecting to a store and creating its schema.

use registry_core::{BackendErrorKind, LockBackend};
#[cfg(feature = "tls")]
use registry_jdbc::Encryption;
use registry_jdbc::MySqlConfig;
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
#[cfg(feature = "tls")]
use registry_testkit::tls::TlsFolder;

use crate::common::{backend, claim, config, error_chain, grant, server};
use crate::servers::opening::*;

#[tokio::test]
async fn an_error_for_a_user_that_cannot_create_tables_names_the_command() {
    let server = server().await;
    server
        .sql("CREATE USER worker@'127.0.0.1'; GRANT SELECT ON app.* TO worker@'127.0.0.1'")
        .await
        .unwrap();
    let error = open_refused(config(&server).with_login("worker", None)).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    assert!(error.to_string().contains("lockreg schema mysql"), "{error}");
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
        let error = open_refused(config(&server).with_table_prefix(name)).await;
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
    }
    let error =
        open_refused(config(&server).with_table_prefix("absent").with_create_schema(false)).await;
    assert!(error.to_string().contains("lockreg schema mysql"), "{error}");
    // A database may have any name.
    server.sql("CREATE DATABASE `a``b c`").await.unwrap();
    let strange = MySqlConfig::new("127.0.0.1", server.addr().port(), "a`b c");
    grant(&backend(strange.with_login("root", None)).await, &claim("k")).await;
}

#[tokio::test]
async fn a_refused_login_is_explained_without_the_password() {
    let options = MariaDbOptions::new().password("canary-right");
    let server = MariaDbServer::start_with(options).await.unwrap();
    let addr = server.addr();
    let url = |login: &str, database: &str| format!("mysql://{login}@{addr}/{database}");
    for (url, kind) in [
        (url("root:canary-wrong", "app"), BackendErrorKind::Denied),
        (url("canary-user:canary-right", "app"), BackendErrorKind::Denied),
        (url("root:canary-right", "missing"), BackendErrorKind::Misconfigured),
        ("mysql://u:canary@127.0.0.1:1/x".to_owned(), BackendErrorKind::Transient),
    ] {
        let config = MySqlConfig::from_url(&url).unwrap();
        assert!(!format!("{config:?}{config:#?}").contains("canary"));
        let error = open_refused(config).await;
        assert_eq!(error.kind(), kind, "{}", error_chain(&error));
        let error_chain = error_chain(&error);
        assert!(
            !error_chain.contains("canary-right") && !error_chain.contains("canary-wrong"),
            "{error_chain}"
        );
    }
    for url in
        ["mysql://u:canary@h:999999/x", "postgres://u:canary@h/x", "mysql://u:canary@h/x?y=z"]
    {
        let error = MySqlConfig::from_url(url).unwrap_err();
        assert!(!error_chain(&error).contains("canary"), "{}", error_chain(&error));
    }
    open_refused(MySqlConfig::from_url(&format!("mysql://root:canary-right@{addr}")).unwrap())
        .await;
    let right = url("root:canary-right", "app").replace("mysql:", "mariadb:");
    let right = backend(MySqlConfig::from_url(&right).unwrap()).await;
    assert!(!format!("{right:?}").contains("canary"));
    grant(&right, &claim("k")).await;
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn encrypted_connections_are_verified_as_configured() {
    let (folder, other) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
    let options = MariaDbOptions::new().password("secret").tls(&folder);
    let server = MariaDbServer::start_with(options).await.unwrap();
    let ca = |folder: &TlsFolder| std::fs::read(folder.ca_file()).unwrap();
    for config in [
        config(&server),
        config(&server).with_encryption(Encryption::Required),
        config(&server).with_certificate_authority(ca(&folder)),
    ] {
        let backend = backend(config).await;
        let held = claim("k");
        grant(&backend, &held).await;
        backend.release(&held).await.unwrap();
    }
    let error = open_refused(config(&server).with_encryption(Encryption::Off)).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    let plain = MariaDbServer::start().await.unwrap();
    for config in [
        config(&server).with_encryption(Encryption::VerifyHost),
        config(&server).with_certificate_authority(ca(&other)),
        config(&plain).with_encryption(Encryption::Required),
    ] {
        let error = open_refused(config).await;
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", error_chain(&error));
    }
}
