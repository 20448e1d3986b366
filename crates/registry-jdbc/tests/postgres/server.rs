//! The types and the SQL of this server, for the tests of all servers.

use registry_core::{Attempt, BackendError, Claim};
use registry_jdbc::SqlMode;
pub(crate) use registry_jdbc::sqlx::postgres::{
    PgConnectOptions as DataOptions, PgConnection as Connection, PgPoolOptions as PoolOptions,
};
pub(crate) use registry_jdbc::{PostgresBackend as Backend, PostgresConfig as Config};
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::PostgresOptions;
pub(crate) use registry_testkit::postgres::PostgresServer as Server;

pub(crate) const SCHEMA: &str = "public";
/// A user without rights.
pub(crate) const WORKER: &str = "worker";
pub(crate) const CREATE_WORKER: &str = "CREATE ROLE worker LOGIN";
/// A part of the error that a user without rights gets before the tables exist.
pub(crate) const REFUSAL: &str = "lockreg schema postgres";
pub(crate) const KEY_COLUMN: &str = "key";
pub(crate) const BEGIN_READ_COMMITTED: &str = "BEGIN";

pub(crate) const CREATE_SALE: &str = "CREATE TABLE sale (coupon text)";
pub(crate) const SELL: &str = "INSERT INTO sale VALUES ('7')";

/// A takeover by another client, as the store does it, but without the commit.
pub(crate) const TAKE_OVER: &str = "BEGIN; SELECT * FROM lock_registry_locks FOR UPDATE; UPDATE lock_registry_locks SET claim = '\\x00'";

/// What the next grant changes.
pub(crate) const NEXT_GRANT: &str =
    "UPDATE lock_registry_locks SET claim = '\\x01', token = token + block";

pub(crate) const SET_TIME_ZONE: &str = "ALTER DATABASE postgres SET timezone = 'Asia/Kathmandu'";

/// The row that Spring 7 writes, with the microseconds of its lease, and whether it begins now.
pub(crate) const SPRING_ROW: &str = "\
    SELECT region, lock_key, replace(client_id, '-', ''), (extract(epoch FROM expired_after - created_date) * 1000000)::bigint, \
        (abs(extract(epoch FROM created_date - timezone('UTC', clock_timestamp()))) < 30)::int FROM int_lock";

/// Whether a row of Spring 6 with a time to live of 10 s ends in this number of seconds.
pub(crate) const SPRING_6_LEASE: &str = "\
    SELECT (abs(extract(epoch FROM created_date + interval '10 s' - timezone('UTC', clock_timestamp())) - {seconds}) < 1.5)::int \
    FROM int_lock";

/// Locks `foo` in two regions, as Spring does.
pub(crate) const SPRING_INSERT: &str = "\
    INSERT INTO INT_LOCK (REGION, LOCK_KEY, CLIENT_ID, CREATED_DATE, EXPIRED_AFTER) \
    SELECT r, 'acbd18db-4cc2-385c-adef-654fccc4a4d8', 'short', timezone('UTC', now()), timezone('UTC', now()) + interval '60 s' \
    FROM unnest(ARRAY['DEFAULT', 'OTHER']) AS r";

/// Takes a lock over, without a long wait.
pub(crate) const SPRING_STEAL: &str = "\
    SET lock_timeout = '100ms'; UPDATE INT_LOCK SET CLIENT_ID = 'x', EXPIRED_AFTER = timezone('UTC', now()) + interval '1 h'";

/// The server processes that hold a session lock.
pub(crate) const HOLDERS: &str =
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'";

pub(crate) async fn assert_no_session_locks(server: &Server) {
    assert_eq!(server.sql(&format!("SELECT count(*) FROM ({HOLDERS}) h")).await.unwrap(), "0");
}

/// Ends the connections that hold a session lock.
pub(crate) async fn end_sessions(server: &Server) {
    server.sql(&format!("SELECT pg_terminate_backend(pid) FROM ({HOLDERS}) h")).await.unwrap();
}

/// The id of the next transaction that writes.
pub(crate) async fn writes(server: &Server) -> String {
    server.sql("SELECT pg_snapshot_xmax(pg_current_snapshot())").await.unwrap()
}

/// The server processes that have a row locked.
pub(crate) const ROW_HOLDERS: &str =
    "SELECT pid FROM pg_stat_activity WHERE state = 'idle in transaction'";

pub(crate) async fn holders(server: &Server) -> usize {
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
        let options = PostgresOptions::new().settings(&["max_connections=1000"]);
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
        config.with_prepared(false).with_listen(&self.server.url()).unwrap()
    }

    /// An orderly stop: a crash may lose the last releases, whose keys then stay locked until the
    /// end of their lease.
    pub(crate) async fn restart(&mut self) {
        self.server.stop().await.unwrap();
        self.server.start_again().await.unwrap();
    }

    /// Ends the connection that holds the lock.
    pub(crate) async fn end_connection(&self, mode: &SqlMode, hashed: &str, _: &Claim) {
        // The advisory lock is the session's lock, or it identifies the connection of the
        // transaction.
        let from = if *mode == SqlMode::Session { 1 } else { 17 };
        let number = format!(
            "('x' || substr(encode(sha256('\\x{hashed}'), 'hex'), {from}, 16))::bit(64)::bigint"
        );
        let cut = format!(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND granted \
             AND (classid::bigint << 32 | objid::bigint) = {number}"
        );
        self.server.sql(&cut).await.unwrap();
    }

    pub(crate) async fn wipe(&self) {
        let tables = "DROP TABLE lock_registry_locks, lock_registry_meta; DROP FUNCTION lock_registry_purged";
        self.server.sql(tables).await.unwrap();
        self.server.sql("DROP TABLE IF EXISTS INT_LOCK").await.unwrap();
    }
}

/// Waits until a statement waits for a row lock.
pub(crate) async fn waits_for_a_row(server: &Server) {
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    let waits = async || server.sql(waiting).await.is_ok_and(|count| count != "0");
    registry_testkit::eventually(crate::common::TEST_TIMEOUT, waits).await;
}

/// What an attempt on a lease returns while a transaction of the store has the row locked.
pub(crate) fn expect_row_locked(attempt: Result<Attempt, BackendError>) {
    assert!(matches!(attempt, Ok(Attempt::Busy(_))), "{attempt:?}");
}
