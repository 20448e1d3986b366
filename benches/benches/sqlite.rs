//! What the engine and the SQLite store cost on top of the two statements that a lock cannot do without.

use std::str::FromStr;

use std::sync::Arc;
use std::time::Duration;

use criterion::Criterion;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use registry_core::{LockRegistry, Registry};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, Executor};
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

const GROUP: &str = "uncontended pair on SQLite";

/// A lease row: taken if it is free or over, given back by its owner.
const ACQUIRE: &str = "INSERT INTO leases (name, owner, token, until) VALUES (?1, ?2, ?3, ?4) \
    ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, token = token + 1, until = excluded.until \
    WHERE owner IS NULL OR until < ?3";
const RELEASE: &str = "UPDATE leases SET owner = NULL WHERE name = ?1 AND owner = ?2";

async fn bare(folder: &std::path::Path) -> SqliteConnection {
    let url = format!("sqlite:{}", folder.join("bare.db").display());
    let mut connection = SqliteConnectOptions::from_str(&url)
        .unwrap()
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Normal)
        .connect()
        .await
        .unwrap();
    connection
        .execute(
            "CREATE TABLE leases (name TEXT PRIMARY KEY, owner BLOB, token INTEGER NOT NULL, \
             until INTEGER NOT NULL) WITHOUT ROWID",
        )
        .await
        .unwrap();
    connection
}

fn pair(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let runtime: Runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let connection = Mutex::new(runtime.block_on(bare(folder.path())));
    let registry = runtime.block_on(async {
        let config = SqliteConfig::new(folder.path().join("locks.db"));
        let backend = SqliteBackend::open(config).await.unwrap();
        Registry::builder(Arc::new(backend)).build().unwrap()
    });
    let lock = registry.obtain("orders/42");
    let bare = async || {
        let mut connection = connection.lock().await;
        let owner = [7_u8; 16];
        let taken = sqlx::query(ACQUIRE)
            .bind("orders/42")
            .bind(owner.as_slice())
            .bind(1_i64)
            .bind(2_i64)
            .execute(&mut *connection)
            .await
            .unwrap();
        assert_eq!(taken.rows_affected(), 1);
        let freed = sqlx::query(RELEASE)
            .bind("orders/42")
            .bind(owner.as_slice())
            .execute(&mut *connection)
            .await
            .unwrap();
        assert_eq!(freed.rows_affected(), 1);
    };
    let ours = async || lock.lock().await.unwrap().unlock().await.unwrap();
    let mut group = criterion.benchmark_group(GROUP);
    group.bench_function("reference", |bench| {
        bench.to_async(&runtime).iter(bare);
    });
    group.bench_function("lock and unlock", |bench| {
        bench.to_async(&runtime).iter(ours);
    });
    group.finish();
    runtime.block_on(registry.close(Duration::from_secs(1)));
}

/// Keeps all threads of this process on one processor.
///
/// Each statement passes from one thread to another and back. On several processors its time is mostly that of waking a sleeping
/// one, which differs by a factor of four with where the kernel happens to put the threads.
fn stay_on_one_processor() {
    let all = sched_getaffinity(Pid::this()).unwrap();
    let first = (0..CpuSet::count()).find(|cpu| all.is_set(*cpu).unwrap()).unwrap();
    let mut one = CpuSet::new();
    one.set(first).unwrap();
    sched_setaffinity(Pid::this(), &one).unwrap();
}

fn main() {
    stay_on_one_processor();
    lock_registry_benches::run(&[GROUP], pair);
}
