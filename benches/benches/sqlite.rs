//! Measures the overhead of the engine and the SQLite store over the two statements that a lock
//! needs.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use lock_registry_benches::{compare, row, write_results};
use registry_core::Registry;
use registry_jdbc::{SqliteBackend, SqliteConfig};
use sqlx::ConnectOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous};
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

/// Acquires a lease row as the store does: if it is free or expired, with a token above all earlier
/// ones.
const ACQUIRE: &str = "INSERT INTO lock_registry_locks \
        (namespace, key, claim, token, block, label, since, until, boot) \
    VALUES (?1, ?2, ?3, \
        (SELECT ?4 FROM lock_registry_meta WHERE id = 1 AND boot = ?9 AND floor <= ?4), \
        ?5, ?6, ?7, ?8, ?9) \
    ON CONFLICT (namespace, key) DO UPDATE SET claim = excluded.claim, token = excluded.token, \
        block = excluded.block, label = excluded.label, since = excluded.since, \
        until = excluded.until, boot = excluded.boot \
    WHERE (claim IS NULL OR until <= excluded.since) AND token + block <= excluded.token";
/// Releases the row if the claim still holds it.
const RELEASE: &str = "UPDATE lock_registry_locks SET claim = NULL, until = ?4 \
    WHERE namespace = ?1 AND key = ?2 AND claim = ?3 AND until > ?4 AND boot = ?5";

async fn connect_reference(folder: &std::path::Path) -> SqliteConnection {
    let url = format!("sqlite:{}", folder.join("bare.db").display());
    let mut connection = SqliteConnectOptions::from_str(&url)
        .unwrap()
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Normal)
        .connect()
        .await
        .unwrap();
    sqlx::raw_sql(SqliteBackend::schema()).execute(&mut connection).await.unwrap();
    connection
}

fn main() {
    lock_registry_benches::pin_to_one_processor();
    let folder = tempfile::tempdir().unwrap();
    let runtime: Runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let connection = Mutex::new(connect_reference(folder.path()).await);
        let config = SqliteConfig::new(folder.path().join("locks.db"));
        let backend = SqliteBackend::open(config).await.unwrap();
        let registry = Registry::builder(Arc::new(backend)).build().unwrap();
        let lock = registry.obtain("orders/42");
        let clock = AtomicI64::new(0);
        let reference = || async {
            let mut connection = connection.lock().await;
            // Tokens follow this clock, and must grow by the 65 tokens that a grant of this
            // reference reserves. In real time, a pair may take less than 65 µs.
            let now = clock.fetch_add(100, Ordering::Relaxed);
            let claim = [7_u8; 16];
            let boot = [0_u8; 16];
            let granted = sqlx::query(ACQUIRE)
                .bind("default")
                .bind(b"orders/42".as_slice())
                .bind(claim.as_slice())
                .bind(now)
                .bind(65_i64)
                .bind(None::<String>)
                .bind(now)
                .bind(now + 30_000_000)
                .bind(boot.as_slice())
                .execute(&mut *connection)
                .await
                .unwrap();
            assert_eq!(granted.rows_affected(), 1);
            let freed = sqlx::query(RELEASE)
                .bind("default")
                .bind(b"orders/42".as_slice())
                .bind(claim.as_slice())
                .bind(now + 50)
                .bind(boot.as_slice())
                .execute(&mut *connection)
                .await
                .unwrap();
            assert_eq!(freed.rows_affected(), 1);
        };
        let lock_and_unlock = || async { lock.lock().await.unwrap().unlock().await.unwrap() };
        let row = row("pairs", "SQLite: uncontended lock and unlock");
        let against = "the same two statements on one bare connection, same settings";
        compare(row, against, reference, lock_and_unlock).await;
        _ = registry.close(Duration::from_secs(1)).await;
    });
    write_results("sqlite");
}
