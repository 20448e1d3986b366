//! Checks a fencing token inside the caller's own transaction.
//!
//! A lease can expire while its holder is paused, and the holder may notice too late. The holder's
//! later writes must not take effect. The write and the check are therefore one transaction, and
//! the database decides. In this crate, only `Fence`, `LockIn` and `RunIn` use a connection of the
//! caller.

use std::future::Future;

use registry_core::{BackendError, Claim, LockGuard};
use sqlx::{Database, Transaction};

use crate::mutant::{Mutant, mutated};

/// Protects a transaction by a lock that is stored in the same database. [`LockGuard`] implements
/// it for `sqlx::Postgres`, `sqlx::MySql` and `sqlx::Sqlite`.
#[cfg_attr(
    feature = "sqlite",
    doc = r#"
# Examples
```
# use std::sync::Arc;
# use registry_core::{LockRegistry, Registry};
use registry_jdbc::{Fence, SqliteBackend, SqliteConfig, sqlx};
use sqlx::Connection;

# #[tokio::main(flavor = "current_thread")]
# async fn main() -> Result<(), Box<dyn std::error::Error>> {
# if !cfg!(target_os = "linux") { return Ok(()) }
# let folder = tempfile::tempdir()?;
# let path = folder.path().join("shop.db");
let backend = SqliteBackend::open(SqliteConfig::new(&path)).await?;
let registry = Registry::builder(Arc::new(backend)).build()?;
# let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
let mut data = sqlx::SqliteConnection::connect_with(&options).await?; // the same file
# sqlx::query("CREATE TABLE coupon (used)").execute(&mut data).await?;

let guard = registry.obtain("coupon/7").lock().await?;
let mut tx = data.begin().await?;
guard.fence(&mut tx).await?; // first, see below
sqlx::query("INSERT INTO coupon VALUES (1)").execute(&mut *tx).await?;
tx.commit().await?; // cannot happen after another client was granted the lock
guard.unlock().await?;
# Ok(())
# }
```
"#
)]
pub trait Fence<DB: Database> {
    /// Ensures that `transaction` can commit only if no conflicting claim has been granted the
    /// lock.
    ///
    /// Checks the guard's claim and token in the transaction. For a lease, also checks that it has
    /// not expired. After this check, the lock is granted to no conflicting claim until the
    /// transaction ends. A client that waits for the lock also waits for the transaction, even if
    /// the lease expires or the lock is released meanwhile. Keep the transaction short. After an
    /// error, roll the transaction back.
    ///
    /// The claim of a fenced lock is not handed over. The next local caller acquires a new claim.
    /// So this transaction commits before the next caller's transaction, or not at all. End the
    /// transaction before [`unlock`](LockGuard::unlock). If the open transaction blocks the
    /// release, `unlock` returns an error, and the background releaser releases the lock later.
    ///
    /// In SQLite, the fence takes the write lock of the database. Fence before the transaction
    /// reads anything, or begin the transaction with `BEGIN IMMEDIATE`. SQLite refuses to upgrade a
    /// read transaction to a write transaction if another connection wrote in between
    /// ([`FenceError::Busy`]). The fence protects only writes to the same file, not to attached
    /// databases.
    ///
    /// In PostgreSQL, the fence locks one row `FOR KEY SHARE`. This blocks neither other locks nor
    /// renewals of this lock. With `REPEATABLE READ` and `SERIALIZABLE`, fence before the
    /// transaction reads anything. Otherwise the server may report a conflict with a renewal after
    /// that read, or the snapshot may be older than the grant ([`FenceError::Busy`]).
    ///
    /// The guard of a reader or a permit can fence too. In PostgreSQL, a new reader that joins
    /// other readers does not wait for the transaction. All other new claims, and conversions of
    /// the same guard, wait until the transaction ends.
    ///
    /// In MariaDB and MySQL, the fence locks one row: `FOR UPDATE` for an exclusive lease,
    /// otherwise `LOCK IN SHARE MODE`. If several claims hold the key, an open transaction blocks
    /// the grants, renewals and releases of all of them. The fence does not block other
    /// locks, but it blocks renewals of this lease. So the transaction must end well before the
    /// lease does.
    ///
    /// With `REPEATABLE READ`, the default of MariaDB and MySQL, fence before the transaction reads
    /// anything. A transaction that has read keeps its snapshot, and can overwrite newer rows that
    /// the snapshot does not contain. If the lock's row shows that the snapshot is older than the
    /// grant, the fence returns [`FenceError::Busy`]. A hand-over within this process does not
    /// change the row, so the fence cannot detect that a snapshot is older than the hand-over.
    ///
    /// With [`SqlMode::Spring`](crate::SqlMode::Spring), PostgreSQL locks the row of Spring's table
    /// `FOR SHARE`, which also blocks renewals of this lock. MariaDB and MySQL lock this row and
    /// the native row `FOR UPDATE`.
    ///
    /// In PostgreSQL, a rollback to a savepoint also undoes a fence that is newer than the
    /// savepoint. Fence the outermost transaction, or make sure that the rollback also undoes all
    /// protected writes.
    ///
    /// The fence waits while another transaction has the row locked, for example a transaction that
    /// has acquired the key by `lock_in` after the end of this lease. In PostgreSQL the wait has no
    /// limit, unless `lock_timeout` is set in the session of the fenced transaction. In MariaDB and
    /// MySQL, `innodb_lock_wait_timeout` of that session is the limit. At the limit, the fence
    /// returns [`FenceError::Busy`].
    ///
    /// The fence locks the row even if it then finds that the lock is lost. In that case, call
    /// [`Transaction::rollback`] at once: a dropped transaction is rolled back only when its
    /// connection is used again or returns to its pool.
    ///
    /// A session lock or a row lock ends with its connection. But the next grant must also change
    /// the lock's row, so it waits until this transaction ends. So the transaction commits before
    /// the next grant or not at all, even if the holder does not notice the end of its connection.
    ///
    /// # Errors
    /// [`FenceError::Lost`] if this guard no longer holds the lock. After any other [`FenceError`],
    /// it is unknown whether this guard holds the lock.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the transaction open and possibly unchecked. Roll the transaction
    /// back.
    fn fence(
        &self,
        transaction: &mut Transaction<'_, DB>,
    ) -> impl Future<Output = Result<(), FenceError>> + Send;
}

/// Returns the guard's claim for comparison with the row, and excludes the claim from hand-over.
/// After a hand-over, two local callers would use the same claim. A comparison with the row could
/// then not distinguish their transactions.
pub(crate) fn fenced_claim(guard: &LockGuard) -> Result<&Claim, FenceError> {
    if mutated(Mutant::FenceAllowsHandOver) {
        return Ok(guard.claim());
    }
    guard.claim_for_fence().map_err(|_| FenceError::lost(guard))
}

/// Why a transaction must not commit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// This guard no longer holds the lock. The fence changed no data.
    #[error("lock {key:?} was lost; roll back, and acquire the lock again")]
    #[non_exhaustive]
    Lost {
        /// The key.
        key: String,
    },
    /// The lock is stored in another kind of store.
    #[error(
        "lock {key:?} is not stored in {database}, so it cannot fence a {database} transaction; use a lock of a registry on that database"
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
        "the transaction is not on the lock's database; connect to that database, as the main database"
    )]
    OtherDatabase,
    /// Another transaction blocked the fence, or the snapshot of this transaction is older than the
    /// grant. Roll back and retry. In SQLite, use `BEGIN IMMEDIATE` if the transaction reads before
    /// it fences.
    #[error(
        "another transaction blocks the fence, or this transaction's snapshot is older than the grant; roll back and retry"
    )]
    #[non_exhaustive]
    Busy {
        /// The database's error, if the database found the conflict.
        source: Option<sqlx::Error>,
    },
    /// A statement of the store on its own connection failed, for session locks. In SQLite, the
    /// state of the store's files cannot be read.
    #[error("fence on {key:?} failed; roll back, and check the store's error")]
    #[non_exhaustive]
    Backend {
        /// The key.
        key: String,
        /// The store's error.
        source: BackendError,
    },
    /// The check failed in the database.
    #[error(
        "the fence could not be checked in the database; roll back, and check the database's error"
    )]
    #[non_exhaustive]
    Database {
        /// The database's error.
        source: sqlx::Error,
    },
}

impl FenceError {
    /// Returns whether a new transaction may succeed, after a rollback of this one.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Busy { .. } => true,
            Self::Backend { source, .. } => source.is_retryable(),
            _ => false,
        }
    }

    pub(crate) fn lost(guard: &LockGuard) -> Self {
        Self::Lost { key: guard.key().to_owned() }
    }

    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub(crate) fn backend(guard: &LockGuard, source: BackendError) -> Self {
        Self::Backend { key: guard.key().to_owned(), source }
    }

    pub(crate) fn unsupported(guard: &LockGuard, database: &'static str) -> Self {
        Self::Unsupported { key: guard.key().to_owned(), database }
    }
}
