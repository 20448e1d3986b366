//! Connecting to a store and creating its schema.

use registry_core::BackendErrorKind;
use registry_jdbc::{CreateSchema, PostgresBackend, PostgresConfig, StatementMode};
use registry_testkit::postgres::{PostgresOptions, PostgresServer};

use super::common::{backend, busy, claim, config, error_chain, grant, server};
use super::servers::opening::*;

#[tokio::test]
async fn schema_and_table_names_are_configurable() {
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

    let error = expect_refusal(config(&server).with_schema("missing")).await;
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{}", error_chain(&error));
    for name in ["", "1a", "a b", "a\"b", "a;b", "ä", &"x".repeat(64)] {
        let error = expect_refusal(config(&server).with_schema(name)).await;
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
        expect_refusal(config(&server).with_table_prefix(name)).await;
    }
    expect_refusal(config(&server).with_table_prefix("Capital")).await;
    let error = expect_refusal(
        config(&server).with_table_prefix("absent").with_create_schema(CreateSchema::Never),
    )
    .await;
    assert!(error.to_string().contains("lockreg schema postgres"), "{error}");
}

#[tokio::test]
async fn a_schema_of_the_search_path_may_contain_quotes_braces_and_dollar_signs() {
    let server = server().await;
    server.sql("CREATE SCHEMA \"o'b$1{now}\"").await.unwrap();
    server.sql("ALTER ROLE postgres SET search_path = \"o'b$1{now}\"").await.unwrap();
    let prepared = backend(config(&server)).await;
    let plain = backend(config(&server).with_statements(StatementMode::Unprepared)).await;
    grant(&prepared, &claim("a")).await;
    busy(&plain, &claim("a")).await;
    grant(&plain, &claim("b")).await;
    busy(&prepared, &claim("b")).await;
}

#[tokio::test]
async fn a_server_may_send_bytes_in_the_escape_format() {
    let server = server().await;
    server.sql("ALTER ROLE postgres SET bytea_output = 'escape'").await.unwrap();
    grant(&backend(config(&server)).await, &claim("a")).await;
    let plain = backend(config(&server).with_statements(StatementMode::Unprepared)).await;
    busy(&plain, &claim("a")).await;
    grant(&plain, &claim("b")).await;
    busy(&backend(config(&server)).await, &claim("b")).await;
}

const URL_VARIABLE: &str = "LOCK_REGISTRY_TEST_URL";

/// Runs the test below in a child process with these environment variables. Returns its output.
fn run_with_environment(url: &str, variables: &[(&str, &str)]) -> String {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args([
        "--exact",
        "--nocapture",
        "postgres::opening::environment_variables_for_servers_are_ignored",
    ]);
    let child = child.env(URL_VARIABLE, url).envs(variables.iter().copied());
    let output = child.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn environment_variables_for_servers_are_ignored() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    if let Ok(url) = std::env::var(URL_VARIABLE) {
        let config = PostgresConfig::from_url(&url).unwrap();
        println!("CONFIG {config:?}");
        match runtime.block_on(PostgresBackend::open(config)) {
            Ok(_) => println!("OPENED"),
            Err(error) => println!("{:?} {}", error.kind(), error_chain(&error)),
        }
        return;
    }
    let secret = "canary-in-the-environment";
    let options = PostgresOptions::new().password(secret);
    let server = runtime.block_on(PostgresServer::start_with(options)).unwrap();
    let other_server = [
        ("PGHOST", "192.0.2.1"),
        ("PGHOSTADDR", "192.0.2.1"),
        ("PGPORT", "1"),
        ("PGUSER", "unknown-user"),
        ("PGDATABASE", "nowhere"),
        ("PGSSLMODE", "verify-full"),
        ("PGAPPNAME", "another-app"),
    ];
    let output = run_with_environment(&server.url(), &other_server);
    assert!(output.contains("OPENED"), "{output}");
    // The password in the environment may be meant for another server.
    let bare = server.url().replace(&format!(":{secret}"), "");
    assert!(!bare.contains(secret) && bare != server.url());
    let output = run_with_environment(&bare, &[("PGPASSWORD", secret)]);
    assert!(output.contains("Denied") && !output.contains(secret), "{output}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("*:*:*:*:{secret}\n")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(file.path(), mode).unwrap();
    let path = file.path().to_str().unwrap();
    let output = run_with_environment(&bare, &[("PGPASSFILE", path)]);
    assert!(output.contains("Denied") && !output.contains(secret), "{output}");
    // A variable that cannot be ignored is rejected by name.
    for (name, value) in [("PGOPTIONS", "-c search_path=x"), ("PGSSLROOTCERT", path)] {
        let output = run_with_environment(&server.url(), &[(name, value)]);
        assert!(output.contains("Misconfigured") && output.contains(name), "{output}");
    }
    // A part that the URL omits has a documented default.
    let output = run_with_environment("postgres://127.0.0.1:1", &other_server);
    assert!(output.contains("127.0.0.1") && !output.contains("nowhere"), "{output}");
    for url in ["postgres:///shop", "postgres://h/d?sslmode=require", "http://h/d", "nonsense"] {
        PostgresConfig::from_url(url).unwrap_err();
    }
    let (socket, ipv6) = ("postgres://u@%2Frun%2Fpg:7/d", "postgres://[::1]:7/a%20b");
    let socket = format!("{:?}", PostgresConfig::from_url(socket).unwrap());
    assert!(socket.contains("/run/pg") && socket.contains("port: 7"), "{socket}");
    let ipv6 = format!("{:?}", PostgresConfig::from_url(ipv6).unwrap());
    assert!(ipv6.contains("\"::1\"") && ipv6.contains("\"a b\""), "{ipv6}");
}
