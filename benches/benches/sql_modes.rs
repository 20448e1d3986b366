//! Measures the modes of the SQL stores whose locks end with a connection: `session` and `row`. The
//! references are the server's own locks: an advisory or named lock, or a row lock.
//!
//! The references have no token, no lease and no loss notification, and they notify no waiter. A
//! grant of the row store writes a token. A grant of the session store reads the row to decide
//! whether it must write one. The last reference of each `session` mode acquires the server's lock
//! and makes only that read. Its ratio is therefore the cost of the client.

use std::sync::Arc;
use std::time::Duration;

use lock_registry_benches::{Row, compare, record_server, row, write_results};
use registry_core::{DistributedLock, LockBackend, Registry};
use registry_jdbc::{MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig, SqlMode};
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection};
use sqlx::postgres::{PgAdvisoryLock, PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, Row as _};
use tokio::sync::Mutex;

fn main() {
    lock_registry_benches::pin_to_one_processor();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        postgres().await;
        mariadb().await;
    });
    write_results("sql_modes");
}

async fn postgres() {
    let server = PostgresServer::start().await.unwrap();
    record_server("PostgreSQL", &server.sql("SHOW server_version").await.unwrap());
    let config = PostgresConfig::from_url(&server.url()).unwrap();
    let session = EngineLock::new(
        PostgresBackend::open_mode(config.clone(), SqlMode::Session).await.unwrap(),
    );
    let row = EngineLock::new(
        PostgresBackend::open_mode(config.with_namespace("rows"), SqlMode::Row).await.unwrap(),
    );
    let options: PgConnectOptions = server.url().parse().unwrap();
    let reference_connection = Mutex::new(options.connect().await.unwrap());
    let advisory = PgAdvisoryLock::new("orders/42");

    let reference = || async {
        let mut connection = reference_connection.lock().await;
        let held = advisory.acquire(&mut *connection).await.unwrap();
        held.release_now().await.unwrap();
    };
    let against = "sqlx's `PgAdvisoryLock`";
    compare(mode_row("PostgreSQL, session"), against, reference, || async {
        session.lock_and_unlock().await
    })
    .await;
    prepare(&reference_connection).await;
    let against = "an advisory lock and a token written";
    compare(
        mode_row("PostgreSQL, session"),
        against,
        || async { write_token(&reference_connection).await },
        || async { session.lock_and_unlock().await },
    )
    .await;
    let against = "an advisory lock and the check of the row, on one bare connection";
    compare(
        mode_row("PostgreSQL, session"),
        against,
        || async { verify_row(&reference_connection).await },
        || async { session.lock_and_unlock().await },
    )
    .await;
    let reference = || async {
        let mut connection = reference_connection.lock().await;
        connection.execute("BEGIN; SELECT FROM lock_row WHERE id = 1 FOR UPDATE").await.unwrap();
        connection.execute("COMMIT").await.unwrap();
    };
    let against = "`BEGIN`, `SELECT FOR UPDATE`, `COMMIT`";
    compare(mode_row("PostgreSQL, row"), against, reference, || async {
        row.lock_and_unlock().await
    })
    .await;
    _ = session.registry.close(Duration::from_secs(1)).await;
    _ = row.registry.close(Duration::from_secs(1)).await;
}

/// Returns the row of the results table for a mode of a store.
fn mode_row(mode: &str) -> Row {
    row("modes", format!("{mode}: uncontended lock and unlock"))
}

async fn prepare(reference_connection: &Mutex<PgConnection>) {
    let table = "CREATE TABLE lock_row (id int PRIMARY KEY, token bigint); INSERT INTO lock_row VALUES (1, 0)";
    reference_connection.lock().await.execute(table).await.unwrap();
    reference_connection.lock().await.execute("SET synchronous_commit = off").await.unwrap();
    let statements = "\
        PREPARE try_lock (bigint) AS SELECT pg_backend_pid(), pg_try_advisory_lock($1); \
        PREPARE read_row (bytea, bytea) AS SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint \
            FROM lock_registry_locks WHERE id = $1 AND claim = $2";
    reference_connection.lock().await.execute(sqlx::raw_sql(statements)).await.unwrap();
}

/// The minimum for a token that is committed before the grant: one statement to acquire and write,
/// one to release.
async fn write_token(reference_connection: &Mutex<PgConnection>) {
    const ACQUIRE: &str = "\
        INSERT INTO lock_registry_locks AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1, $1, $1, $1, now, 1, NULL, now, now \
        FROM (SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint AS now \
            FROM pg_try_advisory_lock($2) AS got WHERE got) AS clock \
        ON CONFLICT (id) DO UPDATE SET claim = excluded.claim, token = greatest(excluded.token, l.token + l.block), \
            since = excluded.since, until = excluded.until \
        RETURNING token";
    let mut connection = reference_connection.lock().await;
    let acquire = sqlx::query_scalar(ACQUIRE).bind([7_u8; 32].as_slice()).bind(7_i64);
    let token: i64 = acquire.fetch_one(&mut *connection).await.unwrap();
    assert!(token > 0);
    let release = sqlx::query_scalar("SELECT pg_advisory_unlock($1)").bind(7_i64);
    let was_held: bool = release.fetch_one(&mut *connection).await.unwrap();
    assert!(was_held);
}

/// The minimum that verifies that the row is unchanged: one message to acquire and read, one
/// statement to release. The read is a second statement, because its snapshot must include the
/// writes made before the lock was acquired. The row is the one that `write_token` wrote.
async fn verify_row(reference_connection: &Mutex<PgConnection>) {
    let bytes = "07".repeat(32);
    let acquire = format!("EXECUTE try_lock (7); EXECUTE read_row ('\\x{bytes}', '\\x{bytes}')");
    let mut connection = reference_connection.lock().await;
    let rows = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(acquire))).await.unwrap();
    assert!(rows[0].get::<bool, _>(1) && rows[1].get::<i64, _>(0) > 0);
    let release = sqlx::query("SELECT pg_backend_pid(), pg_advisory_unlock($1)").bind(7_i64);
    assert!(release.fetch_one(&mut *connection).await.unwrap().get::<bool, _>(1));
}

async fn mariadb() {
    let server = MariaDbServer::start().await.unwrap();
    record_server("MariaDB", &server.sql("SELECT VERSION()").await.unwrap());
    let config = MySqlConfig::from_url(&server.url()).unwrap();
    let session =
        EngineLock::new(MySqlBackend::open_mode(config.clone(), SqlMode::Session).await.unwrap());
    let row = EngineLock::new(
        MySqlBackend::open_mode(config.with_namespace("rows"), SqlMode::Row).await.unwrap(),
    );
    let options: MySqlConnectOptions = server.url().parse().unwrap();
    let reference_connection = Mutex::new(options.connect().await.unwrap());

    let reference = || async {
        let mut connection = reference_connection.lock().await;
        assert_eq!(call_lock_function(&mut connection, "SELECT GET_LOCK(?, 0)").await, 1);
        assert_eq!(call_lock_function(&mut connection, "SELECT RELEASE_LOCK(?)").await, 1);
    };
    let against = "`GET_LOCK` and `RELEASE_LOCK`";
    compare(mode_row("MariaDB, session"), against, reference, || async {
        session.lock_and_unlock().await
    })
    .await;
    let insert_row = "\
        INSERT INTO lock_registry_locks (id, namespace, lock_key, claim, token, block, label, since, until) \
        VALUES (REPEAT(x'07', 32), 'bare', 'bare', REPEAT(x'07', 16), 1, 1, NULL, 0, 9000000000000000)";
    reference_connection.lock().await.execute(insert_row).await.unwrap();
    let against = "a named lock and the check of the row, on one bare connection";
    compare(
        mode_row("MariaDB, session"),
        against,
        || async { verify_row_of_named_lock(&reference_connection).await },
        || async {
            session.lock_and_unlock().await;
        },
    )
    .await;
    let table = "CREATE TABLE lock_row (id INT PRIMARY KEY, token BIGINT) ENGINE = InnoDB";
    reference_connection.lock().await.execute(table).await.unwrap();
    reference_connection.lock().await.execute("INSERT INTO lock_row VALUES (1, 0)").await.unwrap();
    let reference = || async {
        let mut connection = reference_connection.lock().await;
        connection.execute(sqlx::raw_sql("START TRANSACTION")).await.unwrap();
        connection.execute("SELECT id FROM lock_row WHERE id = 1 FOR UPDATE").await.unwrap();
        connection.execute(sqlx::raw_sql("COMMIT")).await.unwrap();
    };
    let against = "`START TRANSACTION`, `SELECT FOR UPDATE`, `COMMIT`";
    compare(mode_row("MariaDB, row"), against, reference, || async { row.lock_and_unlock().await })
        .await;
    _ = session.registry.close(Duration::from_secs(1)).await;
    _ = row.registry.close(Duration::from_secs(1)).await;
}

/// The minimum that verifies that the row is unchanged: one statement that acquires the lock and
/// then reads, one that releases it.
async fn verify_row_of_named_lock(reference_connection: &Mutex<MySqlConnection>) {
    const ACQUIRE: &str = "\
        SELECT CONNECTION_ID(), tried.got, \
            (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) FROM lock_registry_locks AS l \
            WHERE l.id = IF(tried.got = 1, CAST(? AS BINARY(32)), NULL) AND l.claim = ? LIMIT 1) \
        FROM (SELECT CAST(GET_LOCK(?, 0) AS SIGNED) AS got) AS tried";
    const RELEASE: &str = "SELECT CONNECTION_ID(), CAST(RELEASE_LOCK(?) AS SIGNED)";
    let mut connection = reference_connection.lock().await;
    let acquire = sqlx::query(ACQUIRE).bind([7_u8; 32].as_slice()).bind([7_u8; 16].as_slice());
    let row = acquire.bind("orders/42").fetch_one(&mut *connection).await.unwrap();
    assert!(row.get::<i64, _>(1) == 1 && row.get::<Option<i64>, _>(2) > Some(0));
    let row = sqlx::query(RELEASE).bind("orders/42").fetch_one(&mut *connection).await.unwrap();
    assert_eq!(row.get::<i64, _>(1), 1);
}

async fn call_lock_function(connection: &mut MySqlConnection, text: &'static str) -> i64 {
    let query = sqlx::query_scalar(text).bind("03c4a6d03c53a5b0798ba12d99188f66");
    query.fetch_one(connection).await.unwrap()
}

/// A registry over one of the stores, and its lock.
struct EngineLock {
    registry: Registry,
    lock: DistributedLock,
}

impl EngineLock {
    fn new(backend: impl LockBackend + 'static) -> Self {
        let registry = Registry::builder(Arc::new(backend)).build().unwrap();
        let lock = registry.obtain("orders/42");
        Self { registry, lock }
    }

    async fn lock_and_unlock(&self) {
        self.lock.lock().await.unwrap().unlock().await.unwrap();
    }
}
