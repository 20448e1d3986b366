//! Locks in a SQLite file that also contains the application's tables. A fenced transaction commits
//! only if no other client was granted the lock since. Waiters undo no renewal.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    ClaimMode, LockBackend, LockError, LockGuard, LockOptions, LockRegistryExt as _, Registry,
};
use registry_jdbc::sqlx::sqlite::SqliteConnectOptions;
use registry_jdbc::sqlx::{self, ConnectOptions, Connection, Executor, Row, SqliteConnection};
use registry_jdbc::{Fence, FenceError, SqliteBackend, SqliteConfig};
use registry_testkit::holder::{
    FencedWriter, assert_a_paused_holder_cannot_write, run_child_process, serve_with_writer,
    write_refused_by_server,
};
use registry_testkit::waiter_race::assert_a_waiter_undoes_no_renewal;
use tempfile::TempDir;
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(20);

struct SqliteShop {
    _folder: TempDir,
    path: PathBuf,
}

impl SqliteShop {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shop.db");
        let mut conn = connect(&path).await;
        conn.execute("CREATE TABLE sale (coupon TEXT)").await.unwrap();
        Self { _folder: folder, path }
    }

    async fn registry(&self) -> Registry {
        registry(&self.path).await
    }

    async fn connect(&self) -> SqliteConnection {
        connect(&self.path).await
    }

    async fn sales(&self) -> i64 {
        let mut conn = self.connect().await;
        let count = sqlx::query("SELECT count(*) FROM sale").fetch_one(&mut conn);
        count.await.unwrap().get(0)
    }
}

async fn registry(path: &Path) -> Registry {
    let backend = SqliteBackend::open(SqliteConfig::new(path)).await.unwrap();
    Registry::builder(Arc::new(backend)).build().unwrap()
}

async fn connect(path: &Path) -> SqliteConnection {
    SqliteConnectOptions::new().filename(path).create_if_missing(true).connect().await.unwrap()
}

async fn sell(guard: &LockGuard, conn: &mut SqliteConnection) -> Result<(), FenceError> {
    let mut transaction = conn.begin().await.unwrap();
    guard.fence(&mut transaction).await?;
    transaction.execute("INSERT INTO sale VALUES ('7')").await.unwrap();
    transaction.commit().await.unwrap();
    Ok(())
}

async fn lock(registry: &Registry) -> LockGuard {
    registry.obtain("coupon/7").lock().await.unwrap()
}

#[tokio::test]
async fn a_holder_whose_log_was_removed_does_not_commit() {
    let shop = SqliteShop::new().await;
    let registry = shop.registry().await;
    let guard = lock(&registry).await;
    let mut conn = shop.connect().await;
    sell(&guard, &mut conn).await.unwrap();
    // The registry itself detects the loss only at the next renewal.
    std::fs::remove_file(shop.path.with_extension("db-wal")).unwrap();
    let error = sell(&guard, &mut conn).await.unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
}

#[tokio::test]
async fn a_holder_commits() {
    let shop = SqliteShop::new().await;
    let registry = shop.registry().await;
    let guard = lock(&registry).await;
    let mut conn = shop.connect().await;
    sell(&guard, &mut conn).await.unwrap();
    sell(&guard, &mut conn).await.unwrap();
    assert_eq!(shop.sales().await, 2);
    guard.unlock().await.unwrap();
}

/// Returns a client with its own registry, which waits for the lock and then inserts a sale in a
/// fenced transaction.
fn next_holder(shop: &SqliteShop) -> impl Future<Output = ()> + Send + 'static {
    let path = shop.path.clone();
    async move {
        let registry = registry(&path).await;
        let mut conn = connect(&path).await;
        let guard = lock(&registry).await;
        sell(&guard, &mut conn).await.unwrap();
        guard.unlock().await.unwrap();
    }
}

/// A fenced transaction excludes all other writers of the file, so the next holder commits after
/// it. Meanwhile the lock reaches its `max_hold` or `min_hold`, or the registry is closed.
#[tokio::test]
async fn hold_limits_and_a_close_admit_no_other_holder_during_an_open_fenced_transaction() {
    const HOLD_LIMIT: Duration = Duration::from_secs(4);
    let (plain, max_hold_options) = (LockOptions::new(), LockOptions::new().max_hold(HOLD_LIMIT));
    let min_hold_options = LockOptions::new().min_hold(HOLD_LIMIT);
    for (options, is_closed) in
        [(max_hold_options, false), (min_hold_options, false), (plain, true)]
    {
        let shop = SqliteShop::new().await;
        let registry = shop.registry().await;
        let mut conn = shop.connect().await;
        let guard = registry.obtain("coupon/7").lock_with(options.clone()).await.unwrap();
        let mut transaction = conn.begin().await.unwrap();
        guard.fence(&mut transaction).await.unwrap();
        transaction.execute("INSERT INTO sale VALUES ('7')").await.unwrap();
        let end = tokio::spawn(async move {
            if is_closed {
                _ = registry.close(HOLD_LIMIT).await;
            } else {
                tokio::time::sleep(HOLD_LIMIT).await;
                drop(guard);
            }
            registry
        });
        let mut next_holder = tokio::spawn(next_holder(&shop));
        let longer = HOLD_LIMIT + Duration::from_secs(1);
        assert!(timeout(longer, &mut next_holder).await.is_err(), "{options:?}: overtaken");
        transaction.commit().await.unwrap();
        // On a loaded machine, the close may give up its release. The next holder then waits for
        // the end of the lease.
        timeout(TIMEOUT * 3, next_holder).await.unwrap().unwrap();
        assert_eq!(shop.sales().await, 2, "{options:?}");
        drop(end.await.unwrap());
    }
}

#[tokio::test]
async fn a_fence_future_that_is_not_polled_admits_no_other_holder() {
    let shop = SqliteShop::new().await;
    let registry = shop.registry().await;
    let mut conn = shop.connect().await;
    let guard = lock(&registry).await;
    let mut transaction = conn.begin().await.unwrap();
    let mut fence = Box::pin(guard.fence(&mut transaction));
    let is_ready = futures_util::poll!(fence.as_mut()).map(Result::unwrap).is_ready();
    let mut next_holder = tokio::spawn(next_holder(&shop));
    assert!(timeout(Duration::from_secs(1), &mut next_holder).await.is_err(), "two holders");
    if !is_ready {
        fence.as_mut().await.unwrap();
    }
    drop(fence);
    transaction.execute("INSERT INTO sale VALUES ('7')").await.unwrap();
    drop(guard);
    assert!(timeout(Duration::from_secs(1), &mut next_holder).await.is_err(), "overtaken");
    transaction.commit().await.unwrap();
    timeout(TIMEOUT, next_holder).await.unwrap().unwrap();
    assert_eq!(shop.sales().await, 2);
}

#[tokio::test]
async fn every_token_of_a_block_passes_the_fence() {
    let shop = SqliteShop::new().await;
    let registry = shop.registry().await;
    let mut conn = shop.connect().await;
    // A local hand-over does not use the store. Each holder has a larger token of the same grant.
    let mut guard = lock(&registry).await;
    for _ in 0..3 {
        let waiting = registry.obtain("coupon/7");
        let next_holder = async { waiting.lock().await.unwrap() };
        let token = guard.fencing_token();
        let (_, next_holder) = tokio::join!(guard.unlock(), next_holder);
        assert!(next_holder.fencing_token() > token);
        sell(&next_holder, &mut conn).await.unwrap();
        guard = next_holder;
    }
    let again = guard.reenter().unwrap();
    sell(&again, &mut conn).await.unwrap();
    assert_eq!(shop.sales().await, 4);
}

#[tokio::test]
async fn a_holder_that_does_not_know_of_its_loss_cannot_commit() {
    let shop = SqliteShop::new().await;
    let (a, b) = (shop.registry().await, shop.registry().await);
    let (mut conn_a, mut conn_b) = (shop.connect().await, shop.connect().await);

    for (successors, mode) in (1..).zip(["exclusive", "shared", "permits"]) {
        let acquire = async |registry: &Registry, units| match mode {
            "shared" => registry.obtain("coupon/7").read().await.unwrap(),
            "permits" => registry.semaphore("coupon/7", 2).acquire_many(units).await.unwrap(),
            _ => lock(registry).await,
        };
        let stale = acquire(&a, 2).await;
        assert!(b.force_release("coupon/7").await.unwrap());
        assert!(stale.is_held(), "{mode}: it cannot know yet");
        let error = sell(&stale, &mut conn_a).await.unwrap_err();
        assert!(matches!(&error, FenceError::Lost { key, .. } if key == "coupon/7"), "{error:?}");

        let successor = acquire(&b, 1).await;
        let error = sell(&stale, &mut conn_a).await.unwrap_err();
        assert!(matches!(error, FenceError::Lost { .. }) && !error.is_retryable(), "{mode}");
        sell(&successor, &mut conn_b).await.unwrap();
        assert_eq!(shop.sales().await, successors);
        drop(stale);
        successor.unlock().await.unwrap();
        a.idle().await;
    }
}

#[tokio::test]
async fn a_holder_that_knows_of_its_loss_is_refused_without_io() {
    let shop = SqliteShop::new().await;
    let registry = shop.registry().await;
    let options = LockOptions::new().lease(Duration::from_millis(100)).auto_renew(false);
    let lock = registry.obtain("coupon/7");
    let guard = lock.lock_with(options.wait(TIMEOUT)).await.unwrap();
    timeout(TIMEOUT, guard.lost()).await.unwrap();
    // A database without tables: a query to it would return another error.
    let other_folder = tempfile::tempdir().unwrap();
    let mut conn = connect(&other_folder.path().join("x.db")).await;
    let mut transaction = conn.begin().await.unwrap();
    let error = guard.fence(&mut transaction).await.unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
}

#[tokio::test]
async fn a_fenced_transaction_delays_the_next_holder_until_it_ends() {
    let shop = SqliteShop::new().await;
    let (a, b) = (shop.registry().await, shop.registry().await);
    let mut conn = shop.connect().await;

    let options = LockOptions::new().lease(Duration::from_secs(10)).auto_renew(false);
    let guard = a.obtain("coupon/7").lock_with(options).await.unwrap();
    let mut transaction = conn.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    transaction.execute("INSERT INTO sale VALUES ('7')").await.unwrap();

    // The lease expires while the transaction is open. The key is free, but the transaction delays
    // the next grant.
    timeout(TIMEOUT, guard.lost()).await.unwrap();
    let successor = b.obtain("coupon/7");
    let mut takeover = Box::pin(async { successor.lock().await.unwrap() });
    assert!(timeout(Duration::from_secs(1), &mut takeover).await.is_err());
    transaction.commit().await.unwrap();

    let successor = timeout(TIMEOUT, takeover).await.unwrap();
    assert!(successor.fencing_token() > guard.fencing_token());
    assert_eq!(shop.sales().await, 1, "the sale was there before the successor was");
}

/// The caller of `unlock` may be the one that commits the transaction, so `unlock` must not wait
/// for its end.
#[tokio::test]
async fn an_unlock_during_an_open_fenced_transaction_returns_an_error_that_names_the_transaction() {
    let shop = SqliteShop::new().await;
    // Far longer than the test waits for `unlock`.
    let config = SqliteConfig::new(&shop.path).with_busy_timeout(TIMEOUT * 2);
    let backend = Arc::new(SqliteBackend::open(config).await.unwrap());
    let registry = Registry::builder(backend).timeout(TIMEOUT * 3).build().unwrap();
    let mut conn = shop.connect().await;
    for commits in [true, false] {
        let guard = lock(&registry).await;
        let mut transaction = conn.begin().await.unwrap();
        guard.fence(&mut transaction).await.unwrap();
        match timeout(TIMEOUT, guard.unlock()).await.unwrap() {
            Err(LockError::Backend { source, .. }) => {
                assert!(source.refused() && source.is_retryable(), "{source:?}");
                assert!(source.to_string().contains("commit"), "{source}");
            }
            result => panic!("{result:?}"),
        }
        if commits {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
        }
        // The background releaser frees the key, so no caller waits for the end of the lease.
        registry.idle().await;
        assert_eq!(registry.held(), 0);
    }
    lock(&registry).await.unlock().await.unwrap();
}

#[tokio::test]
async fn a_transaction_with_an_outdated_snapshot_gets_a_retryable_error() {
    let shop = SqliteShop::new().await;
    let registry = shop.registry().await;
    let guard = lock(&registry).await;
    let (mut conn, mut other) = (shop.connect().await, shop.connect().await);

    let mut transaction = conn.begin().await.unwrap();
    sqlx::query("SELECT * FROM sale").fetch_all(&mut *transaction).await.unwrap();
    other.execute("INSERT INTO sale VALUES ('6')").await.unwrap();
    let error = guard.fence(&mut transaction).await.unwrap_err();
    assert!(matches!(error, FenceError::Busy { .. }) && error.is_retryable(), "{error:?}");
    transaction.rollback().await.unwrap();

    let mut transaction = conn.begin_with("BEGIN IMMEDIATE").await.unwrap();
    sqlx::query("SELECT * FROM sale").fetch_all(&mut *transaction).await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    transaction.commit().await.unwrap();
}

#[tokio::test]
async fn a_transaction_on_another_database_is_refused() {
    let (shop, other_shop) = (SqliteShop::new().await, SqliteShop::new().await);
    let registry = shop.registry().await;
    let guard = lock(&registry).await;
    let mut conn = other_shop.connect().await;
    // The other file has no lock tables.
    assert!(matches!(sell(&guard, &mut conn).await.unwrap_err(), FenceError::OtherDatabase));
    // The shop's file is attached to the other one.
    let attach = sqlx::query("ATTACH ?1 AS shop").bind(shop.path.to_str().unwrap().to_owned());
    attach.execute(&mut conn).await.unwrap();
    assert!(matches!(sell(&guard, &mut conn).await.unwrap_err(), FenceError::OtherDatabase));
    // The other file has lock tables of its own.
    let _other_registry = other_shop.registry().await;
    let mut conn = other_shop.connect().await;
    assert!(matches!(sell(&guard, &mut conn).await.unwrap_err(), FenceError::OtherDatabase));
}

#[tokio::test]
async fn a_lock_of_another_store_cannot_fence() {
    let shop = SqliteShop::new().await;
    let guard = lock(&Registry::in_memory().unwrap()).await;
    let error = sell(&guard, &mut shop.connect().await).await.unwrap_err();
    assert!(matches!(error, FenceError::Unsupported { database: "SQLite", .. }), "{error:?}");
    assert!(error.to_string().contains("coupon/7"));
}

#[tokio::test]
async fn a_fence_checks_the_namespace_of_its_lock() {
    let shop = SqliteShop::new().await;
    let config = SqliteConfig::new(&shop.path).with_namespace("other");
    let other = Arc::new(SqliteBackend::open(config).await.unwrap());
    let backend: Arc<dyn LockBackend> = Arc::<SqliteBackend>::clone(&other);
    let other = Registry::builder(backend).build().unwrap();
    let (guard, other_guard) = (lock(&shop.registry().await).await, lock(&other).await);
    assert!(other.force_release("coupon/7").await.unwrap());
    let mut conn = shop.connect().await;
    sell(&guard, &mut conn).await.unwrap();
    assert!(matches!(sell(&other_guard, &mut conn).await.unwrap_err(), FenceError::Lost { .. }));
}

/// The table in a SQLite file. Writes in a fenced transaction. If the fence returns an error,
/// writes without it, so that the table's comparison of tokens must refuse as well.
#[derive(Debug)]
struct StockTable(PathBuf);

#[async_trait]
impl FencedWriter for StockTable {
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let token = i64::from(guard.fencing_token());
        let update = || {
            sqlx::query("UPDATE stock SET value = ?, token = ? WHERE token <= ?")
                .bind(value.to_owned())
                .bind(token)
                .bind(token)
        };
        let mut connection = connect(&self.0).await;
        let mut transaction = connection.begin().await?;
        let fenced = guard.fence(&mut transaction).await;
        if fenced.is_ok() {
            assert_eq!(update().execute(&mut *transaction).await?.rows_affected(), 1);
            return Ok(transaction.commit().await?);
        }
        transaction.rollback().await?;
        let changed = update().execute(&mut connection).await?.rows_affected();
        if changed == 0 {
            return Err(write_refused_by_server("no row has this token or an older one"));
        }
        Ok(())
    }
}

#[test]
#[ignore = "started by the other test, as another process"]
fn a_holder_process() {
    run_child_process(async |path| {
        let path = PathBuf::from(path);
        let backend = SqliteBackend::open(SqliteConfig::new(&path)).await.unwrap();
        // So long that a loaded machine does not end the lease of the successor.
        let registry = Registry::builder(Arc::new(backend)).lease(Duration::from_secs(10)).build();
        let writer = Arc::new(StockTable(path));
        serve_with_writer(Arc::new(registry.unwrap()), writer).await;
    });
}

#[tokio::test]
async fn a_paused_holder_cannot_write() {
    assert_refuses_a_paused_holder(ClaimMode::Exclusive).await;
}

#[tokio::test]
async fn a_paused_reader_cannot_write() {
    assert_refuses_a_paused_holder(ClaimMode::Shared).await;
}

#[tokio::test]
async fn a_paused_permit_holder_cannot_write() {
    assert_refuses_a_paused_holder(ClaimMode::Permits { take: 1, of: 2 }).await;
}

async fn assert_refuses_a_paused_holder(mode: ClaimMode) {
    let shop = SqliteShop::new().await;
    let mut conn = shop.connect().await;
    conn.execute("CREATE TABLE stock (value TEXT, token INTEGER)").await.unwrap();
    conn.execute("INSERT INTO stock VALUES ('', 0)").await.unwrap();
    let path = shop.path.to_str().unwrap();
    let read = async || {
        let mut conn = shop.connect().await;
        sqlx::query("SELECT value FROM stock").fetch_one(&mut conn).await.unwrap().get(0)
    };
    let test = "sqlite::fence::a_holder_process";
    assert_a_paused_holder_cannot_write(test, path, mode, TIMEOUT * 3, read).await.unwrap();
}

#[tokio::test]
async fn a_waiter_that_joins_the_queue_undoes_no_renewal() {
    let folder = tempfile::tempdir().unwrap();
    let config = SqliteConfig::new(folder.path().join("locks.db"));
    let holding = SqliteBackend::open(config.clone()).await.unwrap();
    let waiting = SqliteBackend::open(config).await.unwrap();
    assert_a_waiter_undoes_no_renewal(&holding, &waiting).await;
}
