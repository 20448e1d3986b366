//! Connecting to a store and creating its schema.

use registry_core::{BackendErrorKind, LockBackend};
#[cfg(feature = "tls")]
use registry_jdbc::Encryption;
use registry_jdbc::{PostgresBackend, PostgresConfig};
use registry_testkit::postgres::{PostgresOptions, PostgresServer};
#[cfg(feature = "tls")]
use registry_testkit::tls::TlsFolder;

use crate::lab::{backend, busy, claim, config, grant, server, told};

async fn refused(config: PostgresConfig) -> registry_core::BackendError {
    let error = PostgresBackend::open(config).await.unwrap_err();
    assert!(error.refused(), "{}", told(&error));
    error
}

#[tokio::test]
async fn many_that_start_at_once_make_the_tables_once() {
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
async fn whoever_may_only_use_the_tables_needs_no_more() {
    let server = server().await;
    server.sql("CREATE ROLE worker LOGIN").await.unwrap();
    let worker = || config(&server).with_login("worker", None);
    let error = refused(worker()).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", told(&error));
    assert!(error.to_string().contains("lockreg schema postgres"), "{error}");

    server.sql(PostgresBackend::schema()).await.unwrap();
    server.sql(PostgresBackend::schema()).await.unwrap();
    let error = refused(worker()).await;
    assert_eq!(error.kind(), BackendErrorKind::Denied, "{}", told(&error));
    server
        .sql(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON lock_registry_locks TO worker; \
             GRANT SELECT, UPDATE ON lock_registry_meta TO worker",
        )
        .await
        .unwrap();
    let backend = backend(worker().with_purge_after(std::time::Duration::from_secs(60))).await;
    // Runs until rows have been deleted as well. Some releases delete rows that are old enough.
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
        let age =
            "UPDATE lock_registry_locks SET since = since - 3600000000, until = until - 3600000000";
        server.sql(age).await.unwrap();
    }
    assert!(backend.diagnose().await.is_ok());
}

#[tokio::test]
async fn tables_are_where_and_called_as_one_wants() {
    let server = server().await;
    server.sql("CREATE SCHEMA \"Elsewhere\"").await.unwrap();
    let here = backend(config(&server)).await;
    let there = backend(config(&server).with_schema("Elsewhere")).await;
    let other = backend(config(&server).with_table_prefix("app_locks")).await;
    for backend in [&here, &there, &other] {
        grant(backend, &claim("k")).await;
    }
    let found = "SELECT count(*) FROM \"Elsewhere\".lock_registry_locks, public.app_locks_locks";
    assert_eq!(server.sql(found).await.unwrap(), "1");
    // From now on, the search path finds the tables in this schema first, for every client.
    server.sql("ALTER ROLE postgres SET search_path = \"Elsewhere\", public").await.unwrap();
    busy(&backend(config(&server)).await, &claim("k")).await;

    let error = refused(config(&server).with_schema("missing")).await;
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", told(&error));
    for name in ["", "1a", "a b", "a\"b", "a;b", "ä", &"x".repeat(64)] {
        let error = refused(config(&server).with_schema(name)).await;
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
        refused(config(&server).with_table_prefix(name)).await;
    }
    refused(config(&server).with_table_prefix("Capital")).await;
    let error =
        refused(config(&server).with_table_prefix("absent").with_create_schema(false)).await;
    assert!(error.to_string().contains("lockreg schema postgres"), "{error}");
}

#[tokio::test]
async fn tables_of_another_version_are_left_alone() {
    let server = server().await;
    backend(config(&server)).await.close().await;
    server.sql("UPDATE lock_registry_meta SET version = 2").await.unwrap();
    let error = refused(config(&server)).await;
    assert!(error.to_string().contains("version 2"), "{error}");
}

#[tokio::test]
async fn who_is_not_let_in_is_told_why_and_no_password_is_shown() {
    let options = PostgresOptions::new().password("canary-right");
    let server = PostgresServer::start_with(options).await.unwrap();
    let addr = server.addr();
    let url = |login: &str, database: &str| format!("postgres://{login}@{addr}/{database}");
    for (url, kind) in [
        (url("postgres:canary-wrong", "postgres"), BackendErrorKind::Denied),
        (url("canary-nobody:canary-right", "postgres"), BackendErrorKind::Denied),
        (url("postgres:canary-right", "missing"), BackendErrorKind::Misconfigured),
        ("postgres://u:canary@127.0.0.1:1/x".to_owned(), BackendErrorKind::Transient),
    ] {
        let config = PostgresConfig::from_url(&url).unwrap().with_listen(&url).unwrap();
        assert!(!format!("{config:?}{config:#?}").contains("canary"));
        let error = refused(config).await;
        assert_eq!(error.kind(), kind, "{}", told(&error));
        let told = told(&error).replace("user \"canary-nobody\"", "");
        assert!(!told.contains("canary-right") && !told.contains("canary-wrong"), "{told}");
    }
    for url in
        ["postgres://u:canary@h:999999/x", "mysql://u:canary@h/x", "postgres://u:canary@h/x?y=z"]
    {
        let error = PostgresConfig::from_url(url).unwrap_err();
        assert!(!told(&error).contains("canary"), "{}", told(&error));
    }
    let right =
        backend(PostgresConfig::from_url(&url("postgres:canary-right", "postgres")).unwrap()).await;
    assert!(!format!("{right:?}").contains("canary"));
    grant(&right, &claim("k")).await;
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn encrypted_connections_are_verified_if_that_is_wanted() {
    let (folder, other) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
    let options = PostgresOptions::new().password("secret").tls(&folder);
    let server = PostgresServer::start_with(options).await.unwrap();
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
    // The listener uses the same TLS settings as the other connections, on any server.
    let elsewhere = config(&server).with_listen(&server.url()).unwrap();
    let listens =
        |findings: Vec<registry_core::Finding>| !format!("{findings:?}").contains("listening");
    for (config, may_listen) in [
        (elsewhere.clone().with_certificate_authority(ca(&folder)), true),
        (elsewhere.with_encryption(Encryption::Required), true),
        (config(&server).with_listen("postgres://postgres:canary@127.0.0.1:1/x").unwrap(), false),
    ] {
        let findings = backend(config).await.diagnose().await.unwrap();
        assert!(!format!("{findings:?}").contains("canary"));
        assert_eq!(listens(findings), may_listen);
    }
    refused(config(&server).with_encryption(Encryption::Off)).await;
    for untrusted in [
        config(&server).with_encryption(Encryption::VerifyHost),
        config(&server).with_certificate_authority(ca(&other)),
    ] {
        let error = refused(untrusted).await;
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", told(&error));
    }
    let plain = PostgresServer::start().await.unwrap();
    refused(config(&plain).with_encryption(Encryption::Required)).await;
}

/// The token of a statement that started before a row was created, used and deleted would be
/// smaller than the row's.
#[tokio::test]
async fn rows_are_kept_for_longer_than_any_statement_may_last() {
    let server = server().await;
    let seconds = std::time::Duration::from_secs;
    for (purge_after, response_timeout, works) in
        [(60, 10, true), (59, 10, false), (119, 60, false), (120, 60, true)]
    {
        let config = config(&server).with_purge_after(seconds(purge_after));
        let config = config.with_response_timeout(seconds(response_timeout));
        if works {
            backend(config).await;
        } else {
            let error = refused(config).await;
            assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", told(&error));
            assert!(error.to_string().contains("purge_after"), "{error}");
        }
    }
}

const URL_IN: &str = "LOCK_REGISTRY_TEST_URL";

/// Runs this same test in a child process with these variables. Returns its output.
fn in_an_environment_of(url: &str, variables: &[(&str, &str)]) -> String {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args([
        "--exact",
        "--nocapture",
        "opening::what_the_environment_says_of_servers_counts_for_nothing",
    ]);
    let child = child.env(URL_IN, url).envs(variables.iter().copied());
    let output = child.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn what_the_environment_says_of_servers_counts_for_nothing() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    if let Ok(url) = std::env::var(URL_IN) {
        let config = PostgresConfig::from_url(&url).unwrap();
        println!("TOLD {config:?}");
        match runtime.block_on(PostgresBackend::open(config)) {
            Ok(_) => println!("OPENED"),
            Err(error) => println!("{:?} {}", error.kind(), told(&error)),
        }
        return;
    }
    let secret = "canary-in-the-environment";
    let options = PostgresOptions::new().password(secret);
    let server = runtime.block_on(PostgresServer::start_with(options)).unwrap();
    let elsewhere = [
        ("PGHOST", "192.0.2.1"),
        ("PGHOSTADDR", "192.0.2.1"),
        ("PGPORT", "1"),
        ("PGUSER", "nobody"),
        ("PGDATABASE", "nowhere"),
        ("PGSSLMODE", "verify-full"),
        ("PGAPPNAME", "somebody"),
    ];
    let told = in_an_environment_of(&server.url(), &elsewhere);
    assert!(told.contains("OPENED"), "{told}");
    // The password in the environment may be meant for another server.
    let bare = server.url().replace(&format!(":{secret}"), "");
    assert!(!bare.contains(secret) && bare != server.url());
    let told = in_an_environment_of(&bare, &[("PGPASSWORD", secret)]);
    assert!(told.contains("Denied") && !told.contains(secret), "{told}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("*:*:*:*:{secret}\n")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(file.path(), mode).unwrap();
    let path = file.path().to_str().unwrap();
    let told = in_an_environment_of(&bare, &[("PGPASSFILE", path)]);
    assert!(told.contains("Denied") && !told.contains(secret), "{told}");
    // A variable that cannot be ignored is rejected by name.
    for (name, value) in [("PGOPTIONS", "-c search_path=x"), ("PGSSLROOTCERT", path)] {
        let told = in_an_environment_of(&server.url(), &[(name, value)]);
        assert!(told.contains("Misconfigured") && told.contains(name), "{told}");
    }
    // A part that the URL omits has a documented default.
    let told = in_an_environment_of("postgres://127.0.0.1:1", &elsewhere);
    assert!(told.contains("127.0.0.1") && !told.contains("nowhere"), "{told}");
    for url in ["postgres:///shop", "postgres://h/d?sslmode=require", "http://h/d", "nonsense"] {
        PostgresConfig::from_url(url).unwrap_err();
    }
    let (socket, ipv6) = ("postgres://u@%2Frun%2Fpg:7/d", "postgres://[::1]:7/a%20b");
    let socket = format!("{:?}", PostgresConfig::from_url(socket).unwrap());
    assert!(socket.contains("/run/pg") && socket.contains("port: 7"), "{socket}");
    let ipv6 = format!("{:?}", PostgresConfig::from_url(ipv6).unwrap());
    assert!(ipv6.contains("\"::1\"") && ipv6.contains("\"a b\""), "{ipv6}");
}
