//! The types and the SQL of this server, for the tests of all servers.

pub(crate) use registry_jdbc::sqlx::postgres::{
    PgConnectOptions as DataOptions, PgConnection as Connection, PgPoolOptions as PoolOptions,
};
pub(crate) use registry_jdbc::{PostgresBackend as Backend, PostgresConfig as Config};
pub(crate) use registry_testkit::postgres::PostgresServer as Server;

pub(crate) const SCHEMA: &str = "public";

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
