//! The other half of a fencing token: a check inside the caller's own transaction.
//!
//! A lease can run out while its holder is paused, and the holder learns of it too late. What it then writes must not count. Here
//! the write and the check are one transaction, so the database itself decides. Nothing else in this crate touches a connection of
//! the caller.

use std::future::Future;

use registry_core::{BackendError, Claim, LockGuard};
use sqlx::{Database, Transaction};

use crate::mutant::{Mutant, mutated};

/// Guards a transaction by a lock that lives in the same database.
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
tx.commit().await?; // cannot happen after somebody else was granted the lock
guard.unlock().await?;
# Ok(())
# }
```
"#
)]
pub trait Fence<DB: Database> {
    /// Makes `transaction` one that can commit only as long as nobody else was granted the lock.
    ///
    /// Checks the guard's claim, its token and its lease in the transaction, and keeps the lock's row from becoming anybody else's
    /// until the transaction ends. Whoever waits for the lock waits for the transaction too, even if the lease runs out meanwhile
    /// or the lock is let go; so keep it short. After an error roll it back.
    ///
    /// The claim of a fenced lock is not handed over to the next caller of this process, who acquires one of its own: so this transaction commits before that one's, or not
    /// at all. End the transaction before [`unlock`](LockGuard::unlock): next to an open one, that fails where the store cannot release the lock yet, and the background
    /// releases it later.
    ///
    /// In SQLite this takes the write lock of the database. Fence before the transaction reads anything, or begin it with
    /// `BEGIN IMMEDIATE`: SQLite refuses to turn a transaction that has read into one that writes if somebody wrote in
    /// between ([`FenceError::Busy`]). Only what is written to the same file is protected, not to databases attached to it.
    ///
    /// In PostgreSQL this locks one row `FOR KEY SHARE`: other locks, and this one's renewals, go on. With the isolation levels
    /// `REPEATABLE READ` and `SERIALIZABLE` fence first, or the server may find that a renewal came after what was read, or the
    /// transaction not see yet that the lock was granted ([`FenceError::Busy`]).
    ///
    /// In MariaDB and MySQL this locks one row `FOR UPDATE`: other locks go on, but this one's renewals cannot, so the transaction must be
    /// over well before the lease is. With `REPEATABLE READ`, which is what these servers begin transactions with unless they are told otherwise, fence first: a
    /// transaction that has read goes on reading the past, and lets itself overwrite what it does not see. Where the lock's row shows that the past is from before the
    /// grant, the fence refuses ([`FenceError::Busy`]); where the lock was handed over within this process it does not.
    ///
    /// In all three a lock is gone, too, that a transaction takes after a savepoint which it is rolled back to. So fence the outermost transaction, or what is rolled back must be all that
    /// the fence is for. A row is locked even if the lock turns out to be lost. Roll back at once then, by
    /// [`Transaction::rollback`]: one that is merely dropped is rolled back when its connection is used again or returns to its pool.
    ///
    /// A lock that ends with a connection, of a session or of a row's transaction, is fenced by its row too: whoever is granted the key next has to change the row
    /// first. So even where the server has ended the connection and the holder has not heard of it, either the transaction commits
    /// before the next grant, or it does not commit.
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

/// The claim that a fence compares. From here on no other local caller takes it over: its row would not tell their transactions apart.
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
        "the transaction is on another database than the lock; open the one that the lock is in, as the main database"
    )]
    OtherDatabase,
    /// Another transaction was in the way, or this one goes on seeing what was there before the lock was granted. Roll back and begin again; in SQLite with
    /// `BEGIN IMMEDIATE` if it reads before it fences.
    #[error(
        "another transaction is in the way of the fence, or this one began to read before the lock was granted"
    )]
    #[non_exhaustive]
    Busy {
        /// What the database said, if it was the one that found it.
        source: Option<sqlx::Error>,
    },
    /// What the store has to do beside the transaction failed.
    #[error("the store could not prepare the fence of lock {key:?}")]
    #[non_exhaustive]
    Backend {
        /// The key.
        key: String,
        /// What the store said.
        source: BackendError,
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
