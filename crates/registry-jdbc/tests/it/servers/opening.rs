//! Connecting to a store and creating its tables.

use std::time::Duration;

use registry_core::{BackendErrorKind, LockAdmin, LockBackend};

use super::common::{backend, busy, claim, config, error_chain, grant, server};
use super::server::*;

/// Checks that opening returns an error, without an effect in the store. Returns the error.
pub(crate) async fn expect_refusal(config: Config) -> registry_core::BackendError {
    let error = Backend::open(config).await.unwrap_err();
    assert!(error.refused(), "{}", error_chain(&error));
    error
}

#[tokio::test]
async fn concurrent_starts_create_the_tables_once() {
    let server = server().await;
    let mut starts = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let config = config(&server);
        starts.spawn(async move { backend(config).await });
    }
    let backends = starts.join_all().await;
    grant(&backends[0], &claim("k")).await;
    for backend in &backends {
        busy(backend, &claim("k")).await;
    }
}

#[tokio::test]
async fn tables_of_another_version_are_refused_unchanged() {
    let server = server().await;
    backend(config(&server)).await.close().await;
    server.sql("UPDATE lock_registry_meta SET version = 2").await.unwrap();
    let error = expect_refusal(config(&server)).await;
    assert!(error.to_string().contains("version 2"), "{error}");
}

/// With a shorter `purge_after`, a row could be created, used and purged during one statement. That
/// statement would then issue a smaller token.
#[tokio::test]
async fn purge_after_exceeds_the_duration_of_any_statement() {
    let server = server().await;
    let seconds = Duration::from_secs;
    for (purge_after, response_timeout, is_accepted) in
        [(60, 10, true), (59, 10, false), (119, 60, false), (120, 60, true)]
    {
        let config = config(&server).with_purge_after(seconds(purge_after));
        let config = config.with_response_timeout(seconds(response_timeout));
        if is_accepted {
            backend(config).await;
        } else {
            let error = expect_refusal(config).await;
            assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", error_chain(&error));
            assert!(error.to_string().contains("purge_after"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_user_without_the_right_to_create_tables_can_lock() {
    let server = server().await;
    server.sql(CREATE_WORKER).await.unwrap();
    let worker = || config(&server).with_login("worker", None);
    let error = expect_refusal(worker()).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    assert!(error.to_string().contains(REFUSAL), "{error}");

    server.sql(Backend::schema()).await.unwrap();
    server.sql(Backend::schema()).await.unwrap();
    let error = expect_refusal(worker()).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    for (rights, table) in [
        ("SELECT, INSERT, UPDATE, DELETE", "locks"),
        ("SELECT, UPDATE", "meta"),
        ("SELECT, INSERT, UPDATE", "values"),
    ] {
        let grant = format!("GRANT {rights} ON {SCHEMA}.lock_registry_{table} TO {WORKER}");
        server.sql(&grant).await.unwrap();
    }
    let backend = backend(worker().with_purge_after(Duration::from_secs(60))).await;
    // Locks until rows were purged as well. Some releases purge rows that are old enough.
    let was_purged =
        async || server.sql("SELECT floor FROM lock_registry_meta").await.unwrap() != "0";
    let mut number = 0;
    while !was_purged().await {
        assert!(number < 20_000, "nothing was purged");
        for _ in 0..100 {
            let claim = claim(&format!("k{number}"));
            grant(&backend, &claim).await;
            backend.release(&claim).await.unwrap();
            number += 1;
        }
        let make_older =
            "UPDATE lock_registry_locks SET since = since - 3600000000, until = until - 3600000000";
        server.sql(make_older).await.unwrap();
    }
    assert!(backend.diagnose().await.is_ok());
    // Only the listing of waiters needs a right on their table.
    let waiting = claim("waits");
    let waiters = backend.waiters().expect("leases have a list of waiters");
    let error = waiters.register(&waiting, Duration::ZERO).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    let grant = format!(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON {SCHEMA}.lock_registry_waiters TO {WORKER}"
    );
    server.sql(&grant).await.unwrap();
    waiters.register(&waiting, Duration::ZERO).await.unwrap();
    assert_eq!(waiters.waiting(None).await.unwrap().len(), 1);
    waiters.unregister(&waiting).await.unwrap();
}

#[tokio::test]
async fn a_refused_login_is_explained_without_the_password() {
    let options = Options::new().password("canary-right");
    let server = Server::start_with(options).await.unwrap();
    let addr = server.addr();
    let url = |login: &str, database: &str| format!("{SCHEME}://{login}@{addr}/{database}");
    let valid_login = format!("{ADMIN}:canary-right");
    for (url, kind) in [
        (url(&format!("{ADMIN}:canary-wrong"), DATABASE), BackendErrorKind::Denied),
        (url("canary-user:canary-right", DATABASE), BackendErrorKind::Denied),
        (url(&valid_login, "missing"), BackendErrorKind::Misconfigured),
        (format!("{SCHEME}://u:canary@127.0.0.1:1/x"), BackendErrorKind::Transient),
    ] {
        let config = listening_at(Config::from_url(&url).unwrap(), &url);
        assert!(!format!("{config:?}{config:#?}").contains("canary"));
        let error = expect_refusal(config).await;
        assert_eq!(error.kind(), kind, "{}", error_chain(&error));
        let output = error_chain(&error).replace("user \"canary-user\"", "");
        assert!(!output.contains("canary-right") && !output.contains("canary-wrong"), "{output}");
    }
    for url in [
        format!("{SCHEME}://u:canary@h:999999/x"),
        format!("{OTHER_SCHEME}://u:canary@h/x"),
        format!("{SCHEME}://u:canary@h/x?y=z"),
    ] {
        let error = Config::from_url(&url).unwrap_err();
        assert!(!error_chain(&error).contains("canary"), "{}", error_chain(&error));
    }
    let with_password = backend(Config::from_url(&url(&valid_login, DATABASE)).unwrap()).await;
    assert!(!format!("{with_password:?}").contains("canary"));
    grant(&with_password, &claim("k")).await;
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn encrypted_connections_are_verified_as_configured() {
    use registry_jdbc::Encryption;
    use registry_testkit::tls::TlsFolder;

    let (folder, other) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
    let options = Options::new().password("secret").tls(&folder);
    let server = Server::start_with(options).await.unwrap();
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
    check_encrypted_listener(&server, ca(&folder)).await;
    let error = expect_refusal(config(&server).with_encryption(Encryption::Off)).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", error_chain(&error));
    let plain = Server::start().await.unwrap();
    for config in [
        config(&server).with_encryption(Encryption::VerifyHost),
        config(&server).with_certificate_authority(ca(&other)),
        config(&plain).with_encryption(Encryption::Required),
    ] {
        let error = expect_refusal(config).await;
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", error_chain(&error));
    }
}
