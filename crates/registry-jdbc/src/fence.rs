//! The other half of a fencing token: a check inside the caller's own transaction.
//!
//! A lease can run out while its holder is paused, and the holder learns of it too late. What it then writes must not count. Here
//! the write and the check are one transaction, so the database itself decides. Nothing else in this crate touches a connection of
//! the caller.

use std::future::Future;

use registry_core::LockGuard;
use sqlx::{Database, Row, Sqlite, Transaction};

use crate::error;
use crate::sqlite::SqliteBackend;

/// Guards a transaction by a lock that lives in the same database.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use registry_core::{LockRegistry, Registry};
/// use registry_jdbc::{Fence, SqliteBackend, SqliteConfig, sqlx};
/// use sqlx::Connection;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # if !cfg!(target_os = "linux") { return Ok(()) }
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("shop.db");
/// let backend = SqliteBackend::open(SqliteConfig::new(&path)).await?;
/// let registry = Registry::builder(Arc::new(backend)).build()?;
/// # let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
/// let mut data = sqlx::SqliteConnection::connect_with(&options).await?; // the same file
/// # sqlx::query("CREATE TABLE coupon (used)").execute(&mut data).await?;
///
/// let guard = registry.obtain("coupon/7").lock().await?;
/// let mut tx = data.begin().await?;
/// guard.fence(&mut tx).await?; // first, see below
/// sqlx::query("INSERT INTO coupon VALUES (1)").execute(&mut *tx).await?;
/// tx.commit().await?; // cannot happen after somebody else was granted the lock
/// guard.unlock().await?;
/// # Ok(())
/// # }
/// ```
pub trait Fence<DB: Database> {
    /// Makes `transaction` one that can commit only as long as nobody else was granted the lock.
    ///
    /// Checks the guard's claim, its token and its lease in the transaction, and keeps the lock's row from changing until the
    /// transaction ends. Whoever waits for the lock waits for the transaction too, even if the lease runs out meanwhile; so
    /// keep it short. After an error roll it back.
    ///
    /// In SQLite this takes the write lock of the database. Fence before the transaction reads anything, or begin it with
    /// `BEGIN IMMEDIATE`: SQLite refuses to turn a transaction that has read into one that writes if somebody wrote in
    /// between ([`FenceError::Busy`]). Only what is written to the same file is protected, not to databases attached to it.
    ///
    /// # Errors
    /// [`FenceError::Lost`] when the lock is not this guard's any more; the others say that the check could not be made.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the transaction open and perhaps unchecked: roll it back.
    fn fence(
        &self,
        transaction: &mut Transaction<'_, DB>,
    ) -> impl Future<Output = Result<(), FenceError>> + Send;
}

/// Why a transaction must not commit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// The lock is not this guard's any more. Nothing was written.
    #[error("lock {key:?} was lost")]
    #[non_exhaustive]
    Lost {
        /// The key.
        key: String,
    },
    /// The lock lives in another kind of store.
    #[error(
        "lock {key:?} does not live in {database}, so it cannot fence a {database} transaction"
    )]
    #[non_exhaustive]
    Unsupported {
        /// The key.
        key: String,
        /// The transaction's kind of database.
        database: &'static str,
    },
    /// The transaction is on a database that does not hold the lock.
    #[error(
        "the transaction is on another database than the lock; open the same file, as the main database"
    )]
    OtherDatabase,
    /// Another transaction was in the way. Roll back and begin again, with `BEGIN IMMEDIATE` if it reads before it fences.
    #[error("another transaction is in the way of the fence")]
    #[non_exhaustive]
    Busy {
        /// What the database said.
        source: sqlx::Error,
    },
    /// The check failed in the database.
    #[error("the database could not check the fence")]
    #[non_exhaustive]
    Database {
        /// What the database said.
        source: sqlx::Error,
    },
}

impl FenceError {
    /// Whether the same transaction may succeed if it is rolled back and begun again.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Busy { .. })
    }

    fn lost(guard: &LockGuard) -> Self {
        Self::Lost { key: guard.key().to_owned() }
    }
}

impl Fence<Sqlite> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, Sqlite>) -> Result<(), FenceError> {
        if !self.is_held() {
            return Err(FenceError::lost(self));
        }
        let (Some(backend), Some(token)) = (self.backend::<SqliteBackend>(), self.fencing_token())
        else {
            return Err(FenceError::Unsupported { key: self.key().to_owned(), database: "SQLite" });
        };
        let found = backend
            .fence_statement(self.claim(), token)
            .execute(&mut **transaction)
            .await
            .map_err(sort)?
            .rows_affected();
        if found == 0 {
            return Err(why_not_found(self, backend, transaction).await);
        }
        // From here on nobody else can be granted the lock. But while the statement waited for its turn the guard may have been
        // told of its loss, and a holder that knows must not write.
        // And a row that others do not see, because the files were taken from under this process, keeps nobody out.
        if self.is_held() && backend.is_in_place() { Ok(()) } else { Err(FenceError::lost(self)) }
    }
}

/// The row is not there: because the lock was lost, or because this is another database with lock tables.
async fn why_not_found(
    guard: &LockGuard,
    backend: &SqliteBackend,
    transaction: &mut Transaction<'_, Sqlite>,
) -> FenceError {
    let rows = sqlx::query("SELECT store FROM main.lock_registry_meta WHERE id = 1")
        .fetch_all(&mut **transaction)
        .await;
    let store: Option<Vec<u8>> = match rows {
        Ok(rows) => rows.first().and_then(|row| row.try_get(0).ok()),
        Err(error) => return sort(error),
    };
    if store.is_some_and(|store| backend.is_store(&store)) {
        FenceError::lost(guard)
    } else {
        FenceError::OtherDatabase
    }
}

fn sort(source: sqlx::Error) -> FenceError {
    if error::is_no_such_table(&source) {
        FenceError::OtherDatabase
    } else if error::is_busy(&source) {
        FenceError::Busy { source }
    } else {
        FenceError::Database { source }
    }
}
