//! Tests the testkit's SQL servers, single and combined. Needs PostgreSQL, PgBouncer and MariaDB.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use registry_testkit::clock::ClockShim;
use registry_testkit::eventually;
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::{PostgresOptions, PostgresServer};
use registry_testkit::tls::TlsFolder;
use tokio::time::timeout;

/// Sufficient for the slowest machine. It costs time only when a test fails.
const LIMIT: Duration = Duration::from_secs(60);
/// How long the tests wait for an answer that must not arrive.
const SILENCE: Duration = Duration::from_millis(300);

/// Returns how many seconds `seconds`, a server's clock, is behind the clock of this process.
fn seconds_behind(seconds: &str) -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    i64::try_from(now).unwrap() - seconds.parse::<i64>().unwrap()
}

async fn is_unresponsive(answer: impl Future<Output = io::Result<String>>) -> bool {
    timeout(SILENCE, answer).await.is_err()
}

#[tokio::test]
async fn a_killed_postgres_restarts_with_its_data() {
    let mut server = PostgresServer::start().await.unwrap();
    server.sql("create table t (n int)").await.unwrap();
    for round in 1..=2 {
        server.sql(&format!("insert into t values ({round})")).await.unwrap();
        server.kill();
        assert!(!server.is_up());
        server.sql("select 1").await.unwrap_err();
        server.restart().await.unwrap();
        let rows = server.sql("select n from t order by n").await.unwrap();
        assert_eq!(rows.lines().count(), round);
    }
    server.pause().unwrap();
    server.kill();
    server.restart().await.unwrap();
    server.stop().await.unwrap();
    server.restart().await.unwrap();
    assert!(!server.output_text().contains("not properly shut down"), "{}", server.output_text());
    let refused = server.sql("select wrong").await.unwrap_err().to_string();
    assert!(refused.contains("\"wrong\" does not exist"), "{refused}");
}

#[tokio::test]
async fn a_postgres_can_be_paused_as_a_whole_or_in_one_backend() {
    let server = PostgresServer::start_with(PostgresOptions::new().without_fsync()).await.unwrap();
    assert_eq!(server.sql("show fsync").await.unwrap(), "off");
    let find_pid = async {
        let pid = "select pid from pg_stat_activity where query = 'select pg_sleep(60)'";
        eventually(LIMIT, async || server.sql(pid).await?.parse::<i32>().map_err(io::Error::other))
            .await
    };
    let sleeping_query = server.sql("select pg_sleep(60)");
    let (pid, sleeping_query) = {
        let mut sleeping_query = Box::pin(sleeping_query);
        tokio::select! {
            pid = find_pid => (pid, sleeping_query),
            ended = &mut sleeping_query => panic!("{ended:?}"),
        }
    };
    server.pause_backend(pid).unwrap();
    assert_eq!(server.sql("select 1").await.unwrap(), "1");
    server.pause().unwrap();
    assert!(is_unresponsive(server.sql("select 1")).await);
    server.resume().unwrap();
    assert_eq!(server.sql("select 1").await.unwrap(), "1");
    server.pause_backend(1).unwrap_err();
    server.kill_backend(pid).unwrap();
    sleeping_query.await.unwrap_err();
}

#[tokio::test]
async fn writes_that_a_standby_did_not_receive_are_lost_with_the_primary() {
    let mut primary = PostgresServer::start().await.unwrap();
    primary.sql("create table t (n int); insert into t values (1)").await.unwrap();
    let standby = primary.standby().await.unwrap();
    primary.sql("insert into t values (2)").await.unwrap();
    eventually(LIMIT, async || standby.sql("select n from t").await.is_ok_and(|n| n == "1\n2"))
        .await;
    standby.sql("insert into t values (9)").await.unwrap_err();
    let wal_sender = primary.sql("select pid from pg_stat_replication").await.unwrap();
    primary.pause_backend(wal_sender.parse().unwrap()).unwrap();
    primary.sql("insert into t values (3)").await.unwrap();
    primary.kill();
    standby.promote().await.unwrap();
    standby.sql("insert into t values (4)").await.unwrap();
    assert_eq!(standby.sql("select n from t order by n").await.unwrap(), "1\n2\n4");
}

#[tokio::test]
async fn pgbouncer_reuses_connections_and_both_require_the_password() {
    let tls = TlsFolder::new().unwrap();
    let options = PostgresOptions::new().password("secret").tls(&tls);
    let server = PostgresServer::start_with(options).await.unwrap();
    let mut bouncer = PgBouncer::start_with(&server, &["default_pool_size = 1"]).await.unwrap();
    assert_eq!(server.url(), format!("postgres://postgres:secret@{}/postgres", server.addr()));
    let encrypted = "select ssl from pg_stat_ssl where pid = pg_backend_pid()";
    assert_eq!(bouncer.sql("postgres", encrypted).await.unwrap(), "t");
    assert_eq!(server.sql(encrypted).await.unwrap(), "f");
    let mode = bouncer.sql("pgbouncer", "show config").await.unwrap();
    assert!(mode.contains("pool_mode|transaction|"), "{mode}");
    bouncer.pause().unwrap();
    assert!(is_unresponsive(bouncer.sql("postgres", "select 1")).await);
    bouncer.resume().unwrap();
    bouncer.kill();
    bouncer.restart().await.unwrap();
    assert_eq!(bouncer.sql("postgres", "select 1").await.unwrap(), "1");
}

#[tokio::test]
async fn sql_servers_use_the_clock_of_their_options() {
    let clock = ClockShim::new().unwrap();
    let postgres = PostgresServer::start_with(PostgresOptions::new().clock(&clock)).await.unwrap();
    let mariadb = MariaDbServer::start_with(MariaDbOptions::new().clock(&clock)).await.unwrap();
    for (jump, expected) in [(7_200, -7_200), (-10_800, 3_600)] {
        clock.jump_wall(jump).unwrap();
        let now = "select extract(epoch from clock_timestamp())::bigint";
        let behind = seconds_behind(&postgres.sql(now).await.unwrap());
        assert!((behind - expected).abs() < 300, "{behind}");
        let behind = seconds_behind(&mariadb.sql("SELECT UNIX_TIMESTAMP()").await.unwrap());
        assert!((behind - expected).abs() < 300, "{behind}");
    }
}

#[tokio::test]
async fn a_killed_mariadb_restarts_with_its_data() {
    let mut server = MariaDbServer::start().await.unwrap();
    server.sql("CREATE TABLE t (n INT)").await.unwrap();
    for round in 1..=2 {
        server.sql(&format!("INSERT INTO t VALUES ({round})")).await.unwrap();
        server.kill();
        assert!(!server.is_up());
        server.sql("SELECT 1").await.unwrap_err();
        server.restart().await.unwrap();
        assert_eq!(server.sql("SELECT n FROM t").await.unwrap().lines().count(), round);
    }
    server.pause().unwrap();
    assert!(is_unresponsive(server.sql("SELECT 1")).await);
    server.resume().unwrap();
    assert_eq!(server.sql("SELECT 1").await.unwrap(), "1");
    server.stop().await.unwrap();
    assert!(!server.is_up());
    server.restart().await.unwrap();
    let refused = server.sql("SELECT wrong").await.unwrap_err().to_string();
    assert!(refused.contains("Unknown column 'wrong'"), "{refused}");
}

#[tokio::test]
async fn a_mariadb_requires_password_and_tls_except_from_the_testkit() {
    let tls = TlsFolder::new().unwrap();
    let options = MariaDbOptions::new().password("secret").tls(&tls).without_fsync();
    let server = MariaDbServer::start_with(options).await.unwrap();
    assert_eq!(server.url(), format!("mysql://root:secret@{}/app", server.addr()));
    let client = |args: &[&str]| {
        let mut client = std::process::Command::new("mariadb");
        client.args(["--no-defaults", "--protocol=tcp", "--host=127.0.0.1", "--user=root"]);
        client.arg(format!("--port={}", server.addr().port()));
        client.args(args).args(["--execute=SELECT 1"]).output().unwrap().status.success()
    };
    let authority = format!("--ssl-ca={}", tls.ca_file().display());
    let encrypted = [authority.as_str(), "--ssl-verify-server-cert"];
    assert!(client(&[encrypted[0], encrypted[1], "--password=secret"]));
    assert!(!client(&[encrypted[0], encrypted[1], "--password=wrong"]));
    assert!(!client(&["--skip-ssl", "--password=secret"]));
    assert_eq!(server.sql("SELECT 1").await.unwrap(), "1");
}

#[tokio::test]
async fn sql_servers_that_cannot_start_report_the_reason() {
    let wrong = PostgresOptions::new().settings(&["max_connections=none"]);
    let error = PostgresServer::start_with(wrong).await.unwrap_err().to_string();
    assert!(error.contains("max_connections"), "{error}");
    let error = MariaDbServer::start_with(MariaDbOptions::new().args(&["--no-such-thing"])).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("no-such-thing"), "{error}");
    let missing = PostgresOptions::new().program("/nowhere/postgres");
    let error = PostgresServer::start_with(missing).await.unwrap_err().to_string();
    assert!(error.contains("/nowhere/initdb"), "{error}");
}
