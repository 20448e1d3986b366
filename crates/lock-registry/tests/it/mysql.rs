//! MariaDB servers by URL: real servers, and the errors if they cannot be used.
#![cfg(all(feature = "mysql", target_os = "linux"))]

use lock_registry::{
    ConfigError, GuaranteeClass,
    backend::BackendErrorKind,
    connect,
    mysql::{Fence as _, sqlx},
};
use registry_testkit::error_text;
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
#[cfg(feature = "mysql-tls")]
use registry_testkit::tls::TlsFolder;
use sqlx::{Connection as _, MySqlConnection};

const CANARY: &str = "canary";

/// Returns the kind of the error that `url` causes. The error must not contain the password.
async fn connect_error_kind(url: &str) -> BackendErrorKind {
    let error = connect(url).await.expect_err("it cannot be opened");
    assert!(!error_text(&error).contains(CANARY), "{}", error_text(&error));
    let ConfigError::Open { store: "mysql", source, .. } = &error else { panic!("{error:?}") };
    source.kind()
}

#[tokio::test]
async fn a_url_selects_a_server_and_a_guard_fences_a_transaction_in_it() {
    let server = MariaDbServer::start_with(MariaDbOptions::new().password(CANARY)).await.unwrap();
    let options =
        "namespace=shop&lease=20s&table_prefix=shop_locks&pool=2&busy_timeout=1s&purge_after=1day";
    let first = connect(&format!("{}?{options}", server.url())).await.unwrap();
    let url = server.url().replace("mysql://", "mariadb://");
    let second = connect(&format!("{url}?{options}")).await.unwrap();
    let capabilities = first.capabilities();
    assert_eq!((capabilities.store, capabilities.class), ("mysql", GuaranteeClass::Durable));
    assert!(!format!("{first:?}").contains(CANARY));

    let guard = first.obtain("orders/42").lock().await.unwrap();
    assert!(second.obtain("orders/42").try_lock().await.unwrap().is_none());
    server.sql("CREATE TABLE orders (id INT PRIMARY KEY) ENGINE = InnoDB").await.unwrap();
    let mut connection = MySqlConnection::connect(&server.url()).await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    sqlx::query("INSERT INTO orders VALUES (42)").execute(&mut *transaction).await.unwrap();
    transaction.commit().await.unwrap();
    guard.unlock().await.unwrap();
    second.obtain("orders/42").lock().await.unwrap().unlock().await.unwrap();
    let names = server.sql("SELECT namespace FROM shop_locks_locks").await.unwrap();
    assert_eq!(names, "shop");
}

#[tokio::test]
async fn an_error_has_its_kind_and_no_password() {
    let server = MariaDbServer::start_with(MariaDbOptions::new().password(CANARY)).await.unwrap();
    let addr = server.addr();
    for (url, kind) in [
        (format!("mysql://root:wrong-{CANARY}@{addr}/app"), BackendErrorKind::Denied),
        (format!("mysql://{CANARY}:wrong@{addr}/app"), BackendErrorKind::Denied),
        (format!("mysql://root:{CANARY}@{addr}/missing"), BackendErrorKind::Misconfigured),
        (
            format!("mysql://root:{CANARY}@{addr}/app?create_schema=false"),
            BackendErrorKind::Misconfigured,
        ),
        (format!("mysql://root:{CANARY}@127.0.0.1:1/app"), BackendErrorKind::Transient),
        (format!("mysql://root:{CANARY}@%2Fmissing%2Fsocket/app"), BackendErrorKind::Transient),
        #[cfg(feature = "mysql-tls")]
        (
            format!("mysql://root:{CANARY}@{addr}/app?sslmode=require"),
            BackendErrorKind::Misconfigured,
        ),
    ] {
        assert_eq!(connect_error_kind(&url).await, kind);
    }
    // A user who may not create the missing tables.
    let grant = format!(
        "CREATE USER {CANARY} IDENTIFIED BY 'right'; GRANT SELECT, INSERT, UPDATE, DELETE ON app.* TO {CANARY}"
    );
    server.sql(&grant).await.unwrap();
    let url = format!("mysql://{CANARY}:right@{addr}/app?table_prefix=missing");
    assert_eq!(connect_error_kind(&url).await, BackendErrorKind::Denied);
    for option in ["schema=locks", "prepared=false", "listen=off", "replicas=1"] {
        let error = connect(&format!("{}?{option}", server.url())).await.unwrap_err();
        assert!(
            matches!(&error, ConfigError::Invalid(message) if message.contains("is an option of")),
            "{error}"
        );
    }
}

#[cfg(not(feature = "mysql-tls"))]
#[tokio::test]
async fn an_error_about_encryption_that_is_not_built_in_names_the_feature() {
    let error = connect("mysql://127.0.0.1:1/app?sslmode=require").await.unwrap_err();
    assert!(
        matches!(&error, ConfigError::Invalid(message) if message.contains("`mysql-tls`")),
        "{error}"
    );
}

#[cfg(feature = "mysql-tls")]
#[tokio::test]
async fn only_the_certificate_authority_in_the_file_is_trusted() {
    let (trusted, untrusted) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
    let options = MariaDbOptions::new().password(CANARY).tls(&trusted);
    let server = MariaDbServer::start_with(options).await.unwrap();
    let url_with_ca =
        |directory: &TlsFolder| format!("{}?ca={}", server.url(), directory.ca_file().display());
    let registry = connect(&url_with_ca(&trusted)).await.unwrap();
    registry.obtain("k").lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(connect_error_kind(&url_with_ca(&untrusted)).await, BackendErrorKind::Misconfigured);
    assert_eq!(
        connect_error_kind(&format!("{}?sslmode=disable", server.url())).await,
        BackendErrorKind::Denied
    );
}
