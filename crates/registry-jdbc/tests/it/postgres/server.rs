//! The types and the SQL of this server. The shared tests in `servers` use them.

use std::io;

use registry_core::{Attempt, BackendError, Claim};
pub(crate) use registry_jdbc::sqlx::postgres::{
    PgConnectOptions as AppConnectOptions, PgConnection as Connection, PgPoolOptions as PoolOptions,
};
pub(crate) use registry_jdbc::{PostgresBackend as Backend, PostgresConfig as Config};
use registry_jdbc::{SqlMode, StatementMode};
use registry_testkit::eventually;
use registry_testkit::pgbouncer::PgBouncer;
pub(crate) use registry_testkit::postgres::{PostgresOptions as Options, PostgresServer as Server};
use registry_testkit::proxy::FaultProxy;

use super::common::TEST_TIMEOUT;

pub(crate) const SCHEME: &str = "postgres";
pub(crate) const OTHER_SCHEME: &str = "mysql";
pub(crate) const ADMIN: &str = "postgres";
pub(crate) const DATABASE: &str = "postgres";
pub(crate) const SCHEMA: &str = "public";
pub(crate) const SCHEMA_COMMAND: &str = "lockreg schema postgres";
/// Whether the tables remember the tokens of rows that any client deletes.
pub(crate) const REMEMBERS_DELETED_TOKENS: bool = true;
/// Whether an attempt detects that an open transaction holds the lock. Otherwise the attempt
/// returns an error.
pub(crate) const DETECTS_TRANSACTIONS: bool = true;
/// A user without rights on the tables.
pub(crate) const WORKER: &str = "worker";
pub(crate) const CREATE_WORKER: &str = "CREATE ROLE worker LOGIN";
/// A part of the error that a user without rights gets before the tables exist.
pub(crate) const REFUSAL: &str = "lockreg schema postgres";
pub(crate) const KEY_COLUMN: &str = "key";
pub(crate) const BEGIN_READ_COMMITTED: &str = "BEGIN";
pub(crate) const SET_LEVEL: &str = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL";
pub(crate) const LEASE_IS_OVER: &str = "\
    SELECT (until <= extract(epoch FROM clock_timestamp()) * 1000000)::int FROM lock_registry_locks";
pub(crate) const OPEN_TRANSACTIONS: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'";

pub(crate) const CREATE_SALE: &str = "CREATE TABLE sale (coupon text)";
pub(crate) const SELL: &str = "INSERT INTO sale VALUES ('7')";

/// A takeover by another client, as the store does it, but without the commit.
pub(crate) const TAKE_OVER: &str = "BEGIN; SELECT * FROM lock_registry_locks FOR UPDATE; UPDATE lock_registry_locks SET claim = '\\x00'";

/// The changes of the next grant.
pub(crate) const NEXT_GRANT: &str =
    "UPDATE lock_registry_locks SET claim = '\\x01', token = token + block";

pub(crate) const SET_TIME_ZONE: &str = "ALTER DATABASE postgres SET timezone = 'Asia/Kathmandu'";

/// Returns the columns of a Spring 7 row, its lease in microseconds, and 1 if the lease began
/// within the last 30 s.
pub(crate) const SPRING_ROW: &str = "\
    SELECT region, lock_key, replace(client_id, '-', ''), (extract(epoch FROM expired_after - created_date) * 1000000)::bigint, \
        (abs(extract(epoch FROM created_date - timezone('UTC', clock_timestamp()))) < 30)::int FROM int_lock";

/// Returns 1 if the lock of a Spring 6 row ends in `{seconds}` seconds, with a time to live of ten
/// seconds.
pub(crate) const SPRING_6_LEASE: &str = "\
    SELECT (abs(extract(epoch FROM created_date + interval '10 s' - timezone('UTC', clock_timestamp())) - {seconds}) < 1.5)::int \
    FROM int_lock";

/// Locks `foo` in two regions, as Spring does.
pub(crate) const SPRING_INSERT: &str = "\
    INSERT INTO INT_LOCK (REGION, LOCK_KEY, CLIENT_ID, CREATED_DATE, EXPIRED_AFTER) \
    SELECT r, 'acbd18db-4cc2-385c-adef-654fccc4a4d8', 'short', timezone('UTC', now()), timezone('UTC', now()) + interval '60 s' \
    FROM unnest(ARRAY['DEFAULT', 'OTHER']) AS r";

/// Takes all locks over, as Spring does. Returns an error soon if the row is locked.
pub(crate) const SPRING_STEAL: &str = "\
    SET lock_timeout = '100ms'; UPDATE INT_LOCK SET CLIENT_ID = 'x', EXPIRED_AFTER = timezone('UTC', now()) + interval '1 h'";

/// The server processes that hold a session lock.
pub(crate) const SESSION_HOLDERS: &str =
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'";

pub(crate) async fn assert_no_session_locks(server: &Server) {
    let count = format!("SELECT count(*) FROM ({SESSION_HOLDERS}) h");
    assert_eq!(server.sql(&count).await.unwrap(), "0");
}

/// Returns the id of the next transaction that writes.
pub(crate) async fn write_counter(server: &Server) -> String {
    server.sql("SELECT pg_snapshot_xmax(pg_current_snapshot())").await.unwrap()
}

/// The server processes that keep a row locked.
pub(crate) const ROW_HOLDERS: &str =
    "SELECT pid FROM pg_stat_activity WHERE state = 'idle in transaction'";

/// The number of locked rows.
pub(crate) async fn row_lock_count(server: &Server) -> usize {
    server.sql(ROW_HOLDERS).await.unwrap().lines().filter(|line| !line.is_empty()).count()
}

/// How the conformance suite connects to the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServerKind {
    Direct,
    /// Through a pooler with a small pool.
    PgBouncer,
    /// Through a pooler with a connection for each row lock.
    LargePgBouncer,
}

/// The server of the conformance suite.
#[derive(Debug)]
pub(crate) struct TestServer {
    server: Server,
    bouncer: Option<PgBouncer>,
}

impl TestServer {
    pub(crate) async fn start(kind: &ServerKind) -> Self {
        let options = Options::new().settings(&["max_connections=1000"]);
        let server = Server::start_with(options).await.unwrap();
        let limits = ["max_client_conn = 1000", "default_pool_size = 800"];
        let bouncer = match kind {
            ServerKind::Direct => None,
            ServerKind::PgBouncer => Some(PgBouncer::start(&server).await.unwrap()),
            ServerKind::LargePgBouncer => {
                Some(PgBouncer::start_with(&server, &limits).await.unwrap())
            }
        };
        Self { server, bouncer }
    }

    pub(crate) fn config(&self) -> Config {
        let Some(bouncer) = &self.bouncer else {
            return Config::from_url(&self.server.url()).unwrap();
        };
        let config = Config::from_url(&bouncer.url()).unwrap();
        config.with_statements(StatementMode::Unprepared).with_listen(&self.server.url()).unwrap()
    }

    /// An orderly stop: a crash may lose the last releases, whose keys then stay locked until the
    /// end of their lease.
    pub(crate) async fn restart(&mut self) {
        self.server.stop().await.unwrap();
        self.server.restart().await.unwrap();
    }

    /// Ends the connection that holds the lock. `hash_input` contains namespace and key in
    /// hexadecimal digits.
    pub(crate) async fn end_connection(&self, mode: &SqlMode, hash_input: &str, _: &Claim) {
        // In mode `session`, the first eight bytes of the hash are the advisory lock. In mode
        // `row`, the next eight bytes are an advisory lock that identifies the connection.
        let from = if *mode == SqlMode::Session { 1 } else { 17 };
        let number = format!(
            "('x' || substr(encode(sha256('\\x{hash_input}'), 'hex'), {from}, 16))::bit(64)::bigint"
        );
        let end = format!(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND granted \
             AND (classid::bigint << 32 | objid::bigint) = {number}"
        );
        self.server.sql(&end).await.unwrap();
    }

    pub(crate) async fn wipe(&self) {
        let tables = "DROP TABLE lock_registry_locks, lock_registry_meta, lock_registry_values, lock_registry_waiters; DROP FUNCTION lock_registry_purged";
        self.server.sql(tables).await.unwrap();
        self.server.sql("DROP TABLE IF EXISTS INT_LOCK").await.unwrap();
    }
}

/// Waits until the server blocks a statement on a row lock.
pub(crate) async fn wait_for_blocked_statement(server: &Server) {
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    let waits = async || server.sql(waiting).await.is_ok_and(|count| count != "0");
    eventually(TEST_TIMEOUT, waits).await;
}

/// Checks the result of a lease attempt while a row lock or a transaction holds the key.
pub(crate) fn expect_row_locked(attempt: Result<Attempt, BackendError>) {
    assert!(matches!(&attempt, Ok(Attempt::Busy(busy)) if busy.holder.is_none()), "{attempt:?}");
}

pub(crate) fn config_through(proxy: &FaultProxy) -> Config {
    Config::new("127.0.0.1", proxy.addr().port(), DATABASE).with_login(ADMIN, None)
}

pub(crate) fn listening_at(config: Config, url: &str) -> Config {
    config.with_listen(url).unwrap()
}

/// The connections of the backends, except the listeners.
const STATEMENT_CONNECTIONS: &str =
    "application_name = 'lock-registry' AND query NOT LIKE 'LISTEN%' AND query <> 'SELECT 1'";
pub(crate) const LISTENERS: &str = "application_name = 'lock-registry' AND (query LIKE 'LISTEN%' OR query = 'SELECT 1') AND state = 'idle'";

pub(crate) async fn pid(server: &Server, which: &str) -> i32 {
    let statement = format!("SELECT pid FROM pg_stat_activity WHERE {which} LIMIT 1");
    let pid = async || server.sql(&statement).await?.parse().map_err(io::Error::other);
    eventually(TEST_TIMEOUT, pid).await
}

/// Pauses one connection of the backend, which must be the only one.
pub(crate) async fn pause_statements(server: &Server) -> i32 {
    let pid = pid(server, STATEMENT_CONNECTIONS).await;
    server.pause_backend(pid).unwrap();
    pid
}

pub(crate) fn resume_statements(server: &Server, pid: i32) {
    server.resume_backend(pid).unwrap();
}

pub(crate) async fn wait_for_listener(server: &Server) {
    pid(server, LISTENERS).await;
}

/// Ends all connections of the backends.
pub(crate) async fn end_connections(server: &Server) {
    let all = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'lock-registry'";
    server.sql(all).await.unwrap();
}

/// Returns the ids of the server processes that hold an advisory lock of a backend.
pub(crate) async fn connection_ids(server: &Server) -> String {
    let holders = "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND granted";
    server.sql(holders).await.unwrap()
}

pub(crate) async fn end_connections_by_id(server: &Server, ids: &str) {
    for pid in ids.lines() {
        server.sql(&format!("SELECT pg_terminate_backend({pid}, 5000)")).await.unwrap();
    }
}

/// Checks that the listener uses the same TLS settings as the other connections, for any listener
/// URL.
#[cfg(feature = "tls")]
pub(crate) async fn check_encrypted_listener(server: &Server, ca: Vec<u8>) {
    use registry_core::LockAdmin as _;
    use registry_jdbc::Encryption;

    let config = super::common::config(server);
    let elsewhere = config.clone().with_listen(&server.url()).unwrap();
    let listens =
        |findings: Vec<registry_core::Finding>| !format!("{findings:?}").contains("the listener");
    for (config, may_listen) in [
        (elsewhere.clone().with_certificate_authority(ca), true),
        (elsewhere.with_encryption(Encryption::Required), true),
        (config.with_listen("postgres://postgres:canary@127.0.0.1:1/x").unwrap(), false),
    ] {
        let findings = super::common::backend(config).await.diagnose().await.unwrap();
        assert!(!format!("{findings:?}").contains("canary"));
        assert_eq!(listens(findings), may_listen);
    }
}
