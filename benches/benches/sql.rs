//! Measures the overhead of the engine and the PostgreSQL and MariaDB stores over the two
//! statements that a lock needs.
//!
//! A grant must be on disk before it is returned; a release need not be. PostgreSQL can choose this
//! for each statement. MariaDB cannot: it flushes every statement, in the reference and in the
//! engine.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use lock_registry_benches::{compare, record_server, row, write_results};
use registry_core::{DistributedLock, LockBackend, Registry};
use registry_jdbc::{MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig};
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions as _, Executor as _};
use tokio::sync::Mutex;

/// The number of tasks that lock at once. Each has its own key and its own connection.
const TASKS: u8 = 16;

fn main() {
    lock_registry_benches::pin_to_one_processor();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        postgres().await;
        mariadb().await;
    });
    write_results("sql");
}

async fn postgres() {
    let server = PostgresServer::start().await.unwrap();
    record_server("PostgreSQL", &server.sql("SHOW server_version").await.unwrap());
    let config = PostgresConfig::from_url(&server.url()).unwrap();
    let config = config.with_connections(TASKS.into());
    let engine = EngineLocks::new(PostgresBackend::open(config).await.unwrap());
    let mut pairs = Vec::new();
    for number in 0..TASKS {
        pairs.push(PostgresPair::connect(&server, number).await);
    }
    let pairs = &pairs;

    let reference = || async { pairs[0].lock_and_unlock(FlushMode::Grants).await };
    let uncontended = row("pairs", "PostgreSQL: uncontended lock and unlock");
    compare(uncontended.clone(), AGAINST, reference, || async { engine.lock_and_unlock().await })
        .await;
    let flushed = || async { pairs[0].lock_and_unlock(FlushMode::All).await };
    let against = "the same, both statements flushed";
    compare(uncontended, against, flushed, || async { engine.lock_and_unlock().await }).await;
    let reference = || async {
        run_concurrently(pairs.iter().map(|pair| pair.lock_and_unlock(FlushMode::Grants))).await
    };
    let row = row("pairs", "PostgreSQL: 16 uncontended pairs at once, 16 connections");
    compare(row, AT_ONCE, reference, || async { engine.lock_and_unlock_all().await }).await;
    _ = engine.registry.close(Duration::from_secs(1)).await;
}

async fn mariadb() {
    let server = MariaDbServer::start().await.unwrap();
    record_server("MariaDB", &server.sql("SELECT VERSION()").await.unwrap());
    let config = MySqlConfig::from_url(&server.url()).unwrap();
    let config = config.with_connections(TASKS.into());
    let engine = EngineLocks::new(MySqlBackend::open(config).await.unwrap());
    let mut pairs = Vec::new();
    for number in 0..TASKS {
        pairs.push(MariaDbPair::connect(&server, number).await);
    }
    let pairs = &pairs;

    let reference = || async { pairs[0].lock_and_unlock().await };
    let uncontended = row("pairs", "MariaDB: uncontended lock and unlock");
    compare(uncontended, AGAINST, reference, || async { engine.lock_and_unlock().await }).await;
    let reference =
        || async { run_concurrently(pairs.iter().map(MariaDbPair::lock_and_unlock)).await };
    let row = row("pairs", "MariaDB: 16 uncontended pairs at once, 16 connections");
    compare(row, AT_ONCE, reference, || async { engine.lock_and_unlock_all().await }).await;
    _ = engine.registry.close(Duration::from_secs(1)).await;
}

/// Runs all futures concurrently. A future is polled only when it is woken, like a task.
async fn run_concurrently(pairs: impl Iterator<Item = impl Future<Output = ()>>) {
    pairs.collect::<FuturesUnordered<_>>().count().await;
}

const AGAINST: &str = "two bare prepared statements with the same durability";
const AT_ONCE: &str = "those statements on 16 connections";

/// A registry over one of the stores, and its locks.
struct EngineLocks {
    registry: Registry,
    locks: Vec<DistributedLock>,
}

impl EngineLocks {
    fn new(backend: impl LockBackend + 'static) -> Self {
        let registry = Registry::builder(Arc::new(backend)).build().unwrap();
        let locks = (0..TASKS).map(|key| registry.obtain(&format!("orders/{key}"))).collect();
        Self { registry, locks }
    }

    async fn lock_and_unlock(&self) {
        self.locks[0].lock().await.unwrap().unlock().await.unwrap();
    }

    async fn lock_and_unlock_all(&self) {
        let pairs = self.locks.iter().map(async |lock| {
            lock.lock().await.unwrap().unlock().await.unwrap();
        });
        run_concurrently(pairs).await;
    }
}

/// Which of the statements wait for the disk.
#[derive(Clone, Copy)]
enum FlushMode {
    All,
    Grants,
}

/// The number of tokens that each grant of the references reserves.
const BLOCK: i64 = 65;
const LEASE_MICROS: i64 = 30_000_000;
const CLAIM: [u8; 16] = [7; 16];

/// Acquires a lease row if it is free or expired, with a token above all earlier ones, and releases
/// it by claim. No waiter is notified. The choice between two connections decides whether a
/// statement is flushed.
struct PostgresPair {
    sync_commit: Mutex<PgConnection>,
    async_commit: Mutex<PgConnection>,
    id: [u8; 32],
}

impl PostgresPair {
    async fn connect(server: &PostgresServer, number: u8) -> Self {
        let options: PgConnectOptions = server.url().parse().unwrap();
        let sync_commit = Mutex::new(options.connect().await.unwrap());
        let async_commit = Mutex::new(options.connect().await.unwrap());
        async_commit.lock().await.execute("SET synchronous_commit = off").await.unwrap();
        Self { sync_commit, async_commit, id: [number; 32] }
    }

    async fn lock_and_unlock(&self, flush: FlushMode) {
        const ACQUIRE: &str = "\
            INSERT INTO lock_registry_locks AS l (id, namespace, key, claim, token, block, label, since, until) \
            SELECT $1, $2, $3, $4, greatest(now, floor + 1), $5, $6, now, now + $7 \
            FROM lock_registry_meta, (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now) AS clock \
            ON CONFLICT (id) DO UPDATE SET claim = excluded.claim, token = greatest(excluded.token, l.token + l.block), \
                block = excluded.block, label = excluded.label, since = excluded.since, until = excluded.until \
            WHERE l.claim IS NULL OR l.until <= excluded.since \
            RETURNING token";
        const RELEASE: &str = "\
            UPDATE lock_registry_locks SET claim = NULL, until = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint \
            WHERE id = $1 AND claim = $2 AND until > (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

        let acquire = sqlx::query_scalar(ACQUIRE)
            .bind(self.id.as_slice())
            .bind(b"default".as_slice())
            .bind(b"orders/42".as_slice())
            .bind(CLAIM.as_slice())
            .bind(BLOCK)
            .bind(None::<Vec<u8>>)
            .bind(LEASE_MICROS);
        let token: i64 = acquire.fetch_one(&mut *self.sync_commit.lock().await).await.unwrap();
        assert!(token > 0);
        let release = sqlx::query(RELEASE).bind(self.id.as_slice()).bind(CLAIM.as_slice());
        let connection = match flush {
            FlushMode::All => &self.sync_commit,
            FlushMode::Grants => &self.async_commit,
        };
        let freed = release.execute(&mut *connection.lock().await).await.unwrap();
        assert_eq!(freed.rows_affected(), 1);
    }
}

/// Acquires and releases a lease row as [`PostgresPair`] does, in MariaDB and over one connection.
struct MariaDbPair {
    connection: Mutex<MySqlConnection>,
    id: [u8; 32],
}

impl MariaDbPair {
    async fn connect(server: &MariaDbServer, number: u8) -> Self {
        let options: MySqlConnectOptions = server.url().parse().unwrap();
        let mut connection = options.connect().await.unwrap();
        connection.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await.unwrap();
        Self { connection: Mutex::new(connection), id: [number; 32] }
    }

    async fn lock_and_unlock(&self) {
        const ACQUIRE: &str = "\
            INSERT INTO lock_registry_locks (id, namespace, lock_key, claim, token, block, label, since, until) \
            SELECT ?, ?, ?, ?, LAST_INSERT_ID(GREATEST(now, floor + 1)), ?, ?, now, now + ? \
            FROM (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) AS now, floor \
                FROM lock_registry_meta WHERE id = 1) AS clock \
            ON DUPLICATE KEY UPDATE \
                token = IF(claim IS NULL OR until <= VALUES(since), \
                    LAST_INSERT_ID(GREATEST(VALUES(token), lock_registry_locks.token + lock_registry_locks.block)), token), \
                block = VALUES(block), label = VALUES(label), since = VALUES(since), \
                until = IF(claim IS NULL OR until <= VALUES(since), VALUES(until), until), \
                claim = IF(until = VALUES(until), VALUES(claim), claim)";
        const RELEASE: &str = "\
            UPDATE lock_registry_locks SET claim = NULL, until = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) \
            WHERE id = ? AND claim = ? AND until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

        let mut connection = self.connection.lock().await;
        let acquire = sqlx::query(ACQUIRE)
            .bind(self.id.as_slice())
            .bind(b"default".as_slice())
            .bind(b"orders/42".as_slice())
            .bind(CLAIM.as_slice())
            .bind(BLOCK)
            .bind(None::<Vec<u8>>)
            .bind(LEASE_MICROS);
        let granted = acquire.execute(&mut *connection).await.unwrap();
        assert!(granted.last_insert_id() > 0);
        let release = sqlx::query(RELEASE).bind(self.id.as_slice()).bind(CLAIM.as_slice());
        let freed = release.execute(&mut *connection).await.unwrap();
        assert_eq!(freed.rows_affected(), 1);
    }
}
