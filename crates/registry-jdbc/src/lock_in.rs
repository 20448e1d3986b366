//! A lock that lasts as long as the caller's transaction.
//!
//! Such a lock has no lease, no renewal and no release. It ends with the transaction: by commit, by
//! rollback, or with the connection. The caller's transaction locks the row of the key. So this
//! lock and leases of the same key exclude each other.

use std::future::Future;
use std::io;
use std::time::Duration;

use registry_core::{BackendError, FencingToken, InvalidKey, Key};
use sqlx::{Database, Transaction};
use tokio::time::{Instant, timeout};

/// Acquires locks within a transaction of the caller. The transaction must be on the database that
/// stores the locks. [`Registry`](registry_core::Registry) implements it for `sqlx::Postgres` and
/// `sqlx::MySql`.
///
/// # Examples
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn example(registry: registry_core::Registry) -> Result<(), Box<dyn std::error::Error>> {
/// use registry_jdbc::{LockIn, sqlx};
/// use sqlx::Connection;
///
/// let mut data = sqlx::PgConnection::connect("postgres://db.example/shop").await?;
/// let mut tx = data.begin().await?;
/// let lock = registry.lock_in(&mut tx, "orders/42").await?; // first, see below
/// sqlx::query("UPDATE orders SET sold = true WHERE id = 42").execute(&mut *tx).await?;
/// println!("sold under token {:?}", lock.fencing_token());
/// tx.commit().await?; // and the lock is free
/// # Ok(())
/// # }
/// ```
pub trait LockIn<DB: Database>: Sync {
    /// Waits until the transaction holds the lock of `key`.
    ///
    /// The transaction stays open during the wait and keeps its row locks. So call this method
    /// before the transaction locks rows, and prefer a [limited wait](Self::try_lock_in_for).
    ///
    /// Transactions that lock several keys must lock them in the same order. Otherwise two of them
    /// can deadlock:
    ///
    /// - PostgreSQL detects the deadlock after `deadlock_timeout`, unless `busy_timeout` is
    ///   shorter. One call then returns [`LockInError::Conflict`].
    /// - PostgreSQL does not detect the deadlock if one transaction waits for a lease or an
    ///   advisory lock.
    /// - MariaDB and MySQL never detect it, because waiting calls poll.
    ///
    /// An undetected deadlock lasts until a limited wait ends.
    ///
    /// The lock belongs to the transaction, not to a guard. The transaction and guards of the same
    /// key exclude each other, even within this process. Locking the same key again in the same
    /// transaction succeeds and returns a larger token.
    ///
    /// A call first makes one attempt. If the key is held, the caller joins the registry's local
    /// wait queue of the key, which also contains callers that wait for guards. A released guard
    /// never hands its claim over to a caller behind this one.
    ///
    /// In PostgreSQL, the lock also works through a pooler in transaction mode. The transaction
    /// must have the isolation level `READ COMMITTED`, the server's default. With `REPEATABLE READ`
    /// or `SERIALIZABLE`, the call locks nothing and returns [`LockInError::Isolation`]. The
    /// snapshot of such a transaction is older than the grant, so the transaction would not see the
    /// writes of the previous holder.
    ///
    /// In MariaDB and MySQL, a waiting caller polls every 2.5 to 10 ms, because the server has no
    /// lock timeout for a single statement. While a transaction holds the lock, an attempt to
    /// acquire a lease waits for the row for at most `busy_timeout`, rounded up to whole seconds.
    /// The attempt then fails with a retryable error, because the server does not report why the
    /// row is locked. In PostgreSQL, such an attempt finds the lock held, and the caller waits.
    ///
    /// With `REPEATABLE READ`, the default of MariaDB and MySQL, lock before the transaction reads
    /// anything. If the snapshot is older than the end of the last grant, the call returns
    /// [`LockInError::Conflict`], because the transaction would read outdated rows.
    ///
    /// The registry may use the mode `lease` or `row`. In PostgreSQL it may also use `session`: the
    /// transaction then acquires the advisory lock as well. While another session holds the
    /// advisory lock, the call polls twice a second and after each release notification. Session
    /// locks of MariaDB and MySQL are not supported ([`LockInError::Unsupported`]): their named
    /// locks end with a connection, never with a transaction.
    ///
    /// In PostgreSQL, a rollback to an earlier savepoint also releases the lock. Call this method
    /// on the outermost transaction.
    ///
    /// # Errors
    /// [`LockInError`]. The transaction must not rely on the lock. Roll the transaction back,
    /// unless the variant says that nothing was sent or locked.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the transaction open, possibly with the lock. Roll the
    /// transaction back.
    fn lock_in(
        &self,
        transaction: &mut Transaction<'_, DB>,
        key: &str,
    ) -> impl Future<Output = Result<TransactionLock, LockInError>> + Send {
        async move {
            loop {
                if let Some(lock) = self.try_lock_in_for(transaction, key, Duration::MAX).await? {
                    return Ok(lock);
                }
            }
        }
    }

    /// Acquires the lock of `key` for the transaction without waiting. Returns `None` if the lock
    /// is held; the transaction can continue without it.
    ///
    /// # Errors
    /// As for [`lock_in`](Self::lock_in).
    ///
    /// # Cancel safety
    /// As for [`lock_in`](Self::lock_in).
    fn try_lock_in(
        &self,
        transaction: &mut Transaction<'_, DB>,
        key: &str,
    ) -> impl Future<Output = Result<Option<TransactionLock>, LockInError>> + Send {
        self.try_lock_in_for(transaction, key, Duration::ZERO)
    }

    /// Acquires the lock of `key` for the transaction, waiting at most `wait`. Returns `None` if
    /// the lock was held until then; the transaction can continue without it.
    ///
    /// # Errors
    /// As for [`lock_in`](Self::lock_in).
    ///
    /// # Cancel safety
    /// As for [`lock_in`](Self::lock_in).
    fn try_lock_in_for(
        &self,
        transaction: &mut Transaction<'_, DB>,
        key: &str,
        wait: Duration,
    ) -> impl Future<Output = Result<Option<TransactionLock>, LockInError>> + Send;
}

/// A lock that a transaction holds. The end of the transaction releases the lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransactionLock {
    key: Key,
    token: FencingToken,
}

impl TransactionLock {
    pub(crate) const fn new(key: Key, token: FencingToken) -> Self {
        Self { key, token }
    }

    /// Returns the locked key.
    #[must_use]
    pub fn key(&self) -> &str {
        self.key.as_str()
    }

    /// Returns the token of this grant, which is larger than all earlier committed tokens of the
    /// key.
    ///
    /// Use the token outside the transaction only after the commit. The token is written to the
    /// lock's row in the same transaction, so a rollback also undoes the token. The next grant may
    /// then have the same token, if the database's clock was set back or is behind the tokens.
    /// Otherwise the next token is larger, because tokens are at least that clock's time in
    /// microseconds.
    #[must_use]
    pub const fn fencing_token(&self) -> FencingToken {
        self.token
    }
}

/// Why a transaction could not acquire a lock. Contention is not an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockInError {
    /// The key is invalid. Nothing was sent.
    #[error("invalid lock key: {source}")]
    #[non_exhaustive]
    InvalidKey {
        /// Why the key is invalid.
        source: InvalidKey,
    },
    /// The registry's locks are in another kind of store, or their mode is not supported: `Spring`,
    /// or in MariaDB and MySQL `Session`. Nothing was sent.
    #[error(
        "a {database} transaction cannot hold lock {key:?}: the registry uses another store, or a mode that lock_in does not support; use a registry on that database in a supported mode"
    )]
    #[non_exhaustive]
    Unsupported {
        /// The key.
        key: String,
        /// The transaction's kind of database.
        database: &'static str,
    },
    /// The transaction is on a database that does not hold the registry's locks.
    #[error("the transaction is not on the database of lock {key:?}; begin it there")]
    #[non_exhaustive]
    OtherDatabase {
        /// The key.
        key: String,
    },
    /// A transaction of this isolation level reads a snapshot that is older than the grant. Nothing
    /// was locked.
    #[error(
        "lock {key:?} cannot be acquired with isolation level {level}, whose snapshot is older than the grant; begin the transaction with READ COMMITTED"
    )]
    #[non_exhaustive]
    Isolation {
        /// The key.
        key: String,
        /// The isolation level of the transaction.
        level: String,
    },
    /// Another transaction conflicts with this transaction, or the snapshot of this transaction is
    /// older than the end of the last grant. Roll back and retry.
    #[error(
        "another transaction conflicts with the acquisition of lock {key:?}; roll back and retry"
    )]
    #[non_exhaustive]
    Conflict {
        /// The key.
        key: String,
        /// The database's error, if the database found the conflict.
        source: Option<sqlx::Error>,
    },
    /// The transaction's connection failed or did not answer in time, or the database could not run
    /// a statement. After an I/O error, drop the transaction and its connection: a rollback would
    /// wait for the same connection.
    #[error(
        "lock_in on {key:?} failed in the database; check the database's error, and roll back, or after an I/O error drop the connection"
    )]
    #[non_exhaustive]
    Database {
        /// The key.
        key: String,
        /// The database's error.
        source: sqlx::Error,
    },
    /// Only in MariaDB and MySQL: a statement on one of the store's own connections failed, or the
    /// server of the transaction is read-only. Roll back.
    #[error("lock_in on {key:?} failed; roll back, and check the store's error")]
    #[non_exhaustive]
    Backend {
        /// The key.
        key: String,
        /// The store's error.
        source: BackendError,
    },
}

impl LockInError {
    /// Returns whether a new transaction may succeed. Returns false for
    /// [`Database`](Self::Database); inspect its source to decide.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Conflict { .. } => true,
            Self::Backend { source, .. } => source.is_retryable(),
            _ => false,
        }
    }

    pub(crate) fn unsupported(key: &str, database: &'static str) -> Self {
        Self::Unsupported { key: key.to_owned(), database }
    }

    pub(crate) fn other_database(key: &Key) -> Self {
        Self::OtherDatabase { key: key.to_string() }
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn isolation(key: &Key, level: &str) -> Self {
        Self::Isolation { key: key.to_string(), level: level.to_ascii_uppercase() }
    }

    pub(crate) fn conflict(key: &Key, source: Option<sqlx::Error>) -> Self {
        Self::Conflict { key: key.to_string(), source }
    }

    pub(crate) fn database(key: &Key, source: sqlx::Error) -> Self {
        Self::Database { key: key.to_string(), source }
    }

    #[cfg(feature = "mysql")]
    pub(crate) fn backend(key: &Key, source: BackendError) -> Self {
        Self::Backend { key: key.to_string(), source }
    }
}

/// Waits for the response to a statement of the caller's transaction. Without a response within
/// `limit`, returns an I/O error: the caller's connection may be half open.
pub(crate) async fn response_within<T>(
    limit: Duration,
    response: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    timeout(limit, response).await.unwrap_or_else(|_| {
        let message = format!("the server did not answer within {limit:?}");
        Err(sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, message)))
    })
}

/// The deadline of a wait. `None` if the wait has no time limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// Returns the deadline after `wait`. If the clock cannot represent it, the wait has no time
    /// limit.
    pub(crate) fn after(wait: Duration) -> Self {
        Self(Instant::now().checked_add(wait))
    }

    pub(crate) fn remaining(self) -> Duration {
        self.0.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_missing_response_of_the_callers_connection_is_an_error() {
        let no_response = std::future::pending::<Result<(), sqlx::Error>>();
        let error = response_within(Duration::ZERO, no_response).await.unwrap_err();
        let sqlx::Error::Io(cause) = error else { panic!("{error:?}") };
        assert_eq!(cause.kind(), io::ErrorKind::TimedOut);
    }
}
