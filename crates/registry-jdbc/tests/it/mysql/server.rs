//! The types and the SQL of this server. The shared tests in `servers` use them.

use registry_core::{Attempt, BackendError, Claim};
use registry_jdbc::SqlMode;
pub(crate) use registry_jdbc::sqlx::mysql::{
    MySqlConnectOptions as AppConnectOptions, MySqlConnection as Connection,
    MySqlPoolOptions as PoolOptions,
};
pub(crate) use registry_jdbc::{MySqlBackend as Backend, MySqlConfig as Config};
pub(crate) use registry_testkit::mariadb::{MariaDbOptions as Options, MariaDbServer as Server};
use registry_testkit::proxy::FaultProxy;

pub(crate) const SCHEME: &str = "mysql";
pub(crate) const OTHER_SCHEME: &str = "postgres";
pub(crate) const ADMIN: &str = "root";
pub(crate) const DATABASE: &str = "app";
pub(crate) const SCHEMA: &str = "app";
pub(crate) const SCHEMA_COMMAND: &str = "lockreg schema mysql";
/// Whether the tables remember the tokens of rows that any client deletes.
pub(crate) const REMEMBERS_DELETED_TOKENS: bool = false;
/// Whether an attempt detects that an open transaction holds the lock. Otherwise the attempt
/// returns an error.
pub(crate) const DETECTS_TRANSACTIONS: bool = false;
/// A user without rights on the tables.
pub(crate) const WORKER: &str = "worker@'127.0.0.1'";
pub(crate) const CREATE_WORKER: &str = "CREATE USER worker@'127.0.0.1'";
/// A part of the error that a user without rights gets before the tables exist.
pub(crate) const REFUSAL: &str = "check user and password";
pub(crate) const KEY_COLUMN: &str = "lock_key";
pub(crate) const BEGIN_READ_COMMITTED: &str =
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; BEGIN";
pub(crate) const SET_LEVEL: &str = "SET SESSION TRANSACTION ISOLATION LEVEL";
pub(crate) const LEASE_IS_OVER: &str =
    "SELECT until <= UNIX_TIMESTAMP(NOW(6)) * 1000000 FROM lock_registry_locks";
pub(crate) const OPEN_TRANSACTIONS: &str = "SELECT count(*) FROM information_schema.innodb_trx";

pub(crate) const CREATE_SALE: &str = "CREATE TABLE sale (coupon TEXT) ENGINE = InnoDB";
pub(crate) const SELL: &str = "INSERT INTO app.sale VALUES ('7')";

/// A takeover by another client, as the store does it, but without the commit.
pub(crate) const TAKE_OVER: &str =
    "BEGIN; UPDATE lock_registry_locks SET claim = '0123456789abcdef'";

/// The changes of the next grant.
pub(crate) const NEXT_GRANT: &str =
    "UPDATE lock_registry_locks SET claim = '1', token = token + block";

pub(crate) const SET_TIME_ZONE: &str = "SET GLOBAL time_zone = '+05:45'";

/// Returns the columns of a Spring 7 row, its lease in microseconds, and 1 if the lease began
/// within the last 30 s.
pub(crate) const SPRING_ROW: &str = "\
    SELECT REGION, LOCK_KEY, REPLACE(CLIENT_ID, '-', ''), TIMESTAMPDIFF(MICROSECOND, CREATED_DATE, EXPIRED_AFTER), \
        ABS(TIMESTAMPDIFF(SECOND, CREATED_DATE, UTC_TIMESTAMP(6))) < 30 FROM INT_LOCK";

/// Returns 1 if the lock of a Spring 6 row ends in `{seconds}` seconds, with a time to live of ten
/// seconds.
pub(crate) const SPRING_6_LEASE: &str = "\
    SELECT ABS(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), CREATED_DATE + INTERVAL 10 SECOND) - {seconds} * 1000000) < 1500000 \
    FROM INT_LOCK";

/// Locks `foo` in two regions, as Spring does.
pub(crate) const SPRING_INSERT: &str = "\
    INSERT INTO INT_LOCK (REGION, LOCK_KEY, CLIENT_ID, CREATED_DATE, EXPIRED_AFTER) \
    SELECT r, 'acbd18db-4cc2-385c-adef-654fccc4a4d8', 'short', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL 60 SECOND \
    FROM (SELECT 'DEFAULT' AS r UNION SELECT 'OTHER') AS regions";

/// Takes all locks over, as Spring does. Returns an error soon if the row is locked.
pub(crate) const SPRING_STEAL: &str = "\
    SET SESSION innodb_lock_wait_timeout = 1; \
    UPDATE INT_LOCK SET CLIENT_ID = 'x', EXPIRED_AFTER = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR";

/// The name of the session lock of `orders/42`: the SHA-256 of the namespace's length in eight
/// bytes, the namespace "default", and the key.
pub(crate) const SESSION_LOCK_NAME: &str =
    "03c4a6d03c53a5b0798ba12d99188f66cdd4889a81a1eee70b87671214fd83ff";

/// Checks that no session holds the lock of `orders/42`.
pub(crate) async fn assert_no_session_locks(server: &Server) {
    let is_free = server.sql(&format!("SELECT IS_FREE_LOCK('{SESSION_LOCK_NAME}')")).await.unwrap();
    assert_eq!(is_free.trim(), "1");
}

/// Ends all connections of the backends. The testkit itself connects through a Unix socket.
pub(crate) async fn end_connections(server: &Server) {
    let all = "SELECT id FROM information_schema.processlist WHERE host LIKE '127.0.0.1:%'";
    for id in server.sql(all).await.unwrap().lines() {
        // The connection may already have ended.
        server.sql(&format!("KILL CONNECTION {id}")).await.ok();
    }
}

/// InnoDB's counters of written rows and of waits for row locks.
pub(crate) async fn write_counter(server: &Server) -> String {
    let counters = "'Innodb_rows_inserted', 'Innodb_rows_updated', 'Innodb_rows_deleted', 'Innodb_row_lock_waits'";
    server.sql(&format!("SHOW GLOBAL STATUS WHERE Variable_name IN ({counters})")).await.unwrap()
}

/// The number of transactions with a locked row. The server refreshes this table ten times a
/// second.
pub(crate) async fn row_lock_count(server: &Server) -> usize {
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    let open = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_rows_locked > 0";
    server.sql(open).await.unwrap().trim().parse().unwrap()
}

/// How the conformance suite starts the server.
pub(crate) type ServerKind = Options;

/// The server of the conformance suite.
#[derive(Debug)]
pub(crate) struct TestServer(Server);

impl TestServer {
    pub(crate) async fn start(options: &ServerKind) -> Self {
        let options = options.clone().args(&["--max-connections=1000"]);
        Self(Server::start_with(options).await.unwrap())
    }

    pub(crate) fn config(&self) -> Config {
        Config::from_url(&self.0.url()).unwrap()
    }

    /// Every confirmed write is on disk, so this may be a crash.
    pub(crate) async fn restart(&mut self) {
        self.0.restart().await.unwrap();
    }

    /// Ends the connection that holds the lock. `hash_input` contains namespace and key in
    /// hexadecimal digits.
    pub(crate) async fn end_connection(&self, mode: &SqlMode, hash_input: &str, claim: &Claim) {
        // In mode `session`, the named lock is the lock itself. In mode `row`, another named lock
        // identifies the connection that keeps the row locked.
        let name = if *mode == SqlMode::Session {
            format!("SHA2(UNHEX('{hash_input}'), 256)")
        } else {
            format!("'lock_registry_row_{}'", claim.id())
        };
        let holder = format!("SELECT IFNULL(IS_USED_LOCK({name}), '')");
        let holder = self.0.sql(&holder).await.unwrap();
        if !holder.trim().is_empty() {
            self.0.sql(&format!("KILL CONNECTION {}", holder.trim())).await.unwrap();
        }
    }

    pub(crate) async fn wipe(&self) {
        self.0
            .sql("DROP TABLE lock_registry_locks, lock_registry_meta, lock_registry_values, lock_registry_waiters")
            .await
            .unwrap();
        self.0.sql("DROP TABLE IF EXISTS INT_LOCK").await.unwrap();
    }
}

/// Waits until the server blocks a statement on a row lock.
pub(crate) async fn wait_for_blocked_statement(server: &Server) {
    let waiting =
        "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'";
    registry_testkit::eventually(super::common::TEST_TIMEOUT, async || {
        server.sql(waiting).await.is_ok_and(|count| count != "0")
    })
    .await;
}

/// Checks the result of a lease attempt while a row lock or a transaction holds the key.
pub(crate) fn expect_row_locked(attempt: Result<Attempt, BackendError>) {
    assert!(attempt.as_ref().is_err_and(BackendError::is_retryable), "{attempt:?}");
}

pub(crate) fn config_through(proxy: &FaultProxy) -> Config {
    Config::new("127.0.0.1", proxy.addr().port(), DATABASE).with_login(ADMIN, None)
}

/// These servers send no notifications, so there is no listener to configure.
pub(crate) fn listening_at(config: Config, _: &str) -> Config {
    config
}

pub(crate) async fn wait_for_listener(_: &Server) {}

#[cfg(feature = "tls")]
pub(crate) async fn check_encrypted_listener(_: &Server, _: Vec<u8>) {}

/// Pauses the whole server, and with it the connections of the backends.
pub(crate) async fn pause_statements(server: &Server) {
    server.pause().unwrap();
}

pub(crate) fn resume_statements(server: &Server, (): ()) {
    server.resume().unwrap();
}

/// Returns the ids of all connections.
pub(crate) async fn connection_ids(server: &Server) -> String {
    server.sql("SELECT id FROM information_schema.processlist").await.unwrap()
}

pub(crate) async fn end_connections_by_id(server: &Server, ids: &str) {
    for id in ids.lines() {
        // The connection may already have ended.
        server.sql(&format!("KILL CONNECTION {id}")).await.ok();
    }
}
