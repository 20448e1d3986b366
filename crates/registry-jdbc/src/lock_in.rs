//! A lock that lasts exactly as long as the caller's transaction.
//!
//! It needs no lease, no renewal and no release: commit or rollback ends it, and so does the end of the connection. It is the row of the lock,
//! locked by the caller, so it excludes the leases of the same key and is excluded by them.

use std::future::Future;
use std::time::Duration;

use registry_core::{BackendError, FencingToken, InvalidKey, Key};
use sqlx::{Database, Transaction};
use tokio::time::Instant;

/// Locks within a transaction of the caller, on the database that the locks live in.
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
pub trait LockIn<DB: Database> {
    /// Waits until the lock of `key` is the transaction's.
    ///
    /// Meanwhile the transaction stays open, with whatever it has locked before: lock first, and rather wait for a
    /// [limited time](Self::try_lock_in_for). Two transactions that lock several keys must do so in the same order; if they do not, the database
    /// ends one of them ([`LockInError::Conflict`]), or neither gets on where the one waits for a lease.
    ///
    /// The lock is not a guard's: whoever holds the key by a guard, even in this process, keeps the transaction out, and the other way round.
    /// To lock the same key again in the same transaction is granted, with a larger token.
    ///
    /// A call makes one attempt at once. If that fails, the caller waits in the local queue of the key, together with the registry's callers for guards; no
    /// guard is handed over past it.
    ///
    /// In PostgreSQL the lock may be had through a pooler that gives each transaction another connection. The transaction must have the isolation
    /// level `READ COMMITTED`, the server's default. `REPEATABLE READ` and `SERIALIZABLE` are refused ([`LockInError::Isolation`]) before anything is
    /// locked: their snapshot is taken before the lock is granted, so the transaction would not see what the holder before has written.
    ///
    /// In MariaDB and MySQL the caller looks again and again, every 5 to 10 ms: the server has no
    /// limit for a wait that would be the statement's alone. A lease that is wanted while a transaction has the lock waits for the row
    /// (`busy_timeout`), and is then told of trouble that may pass, as the server does not say why the row is locked; in PostgreSQL it is told "busy".
    /// With `REPEATABLE READ`, the default of these servers, lock before the transaction reads anything. A transaction that read earlier, and before the
    /// end of the key's last holder, is refused ([`LockInError::Conflict`]): it would go on reading what others have overwritten since.
    ///
    /// The locks may be leases or rows that transactions lock. In PostgreSQL they may be those of sessions, too: then the transaction takes the
    /// advisory lock as well, and one that finds it taken looks again twice a second and whenever a release is heard of. The named locks of MariaDB and MySQL
    /// end with a connection and never with a transaction ([`LockInError::Unsupported`]).
    ///
    /// # Errors
    /// [`LockInError`]. Unless it says otherwise the transaction holds the lock neither way, and should be rolled back.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the transaction open, perhaps with the lock: roll it back.
    fn lock_in(
        &self,
        transaction: &mut Transaction<'_, DB>,
        key: &str,
    ) -> impl Future<Output = Result<TransactionLock, LockInError>> + Send;

    /// Takes the lock of `key` for the transaction if nobody has it. `None` if somebody does: the transaction can go on without.
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

    /// Waits at most this long until the lock of `key` is the transaction's. `None` if it was not to be had: the transaction can go on without.
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

/// Says that a transaction has a lock. There is nothing to let go: the end of the transaction does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransactionLock {
    key: Key,
    token: FencingToken,
}

impl TransactionLock {
    pub(crate) const fn new(key: Key, token: FencingToken) -> Self {
        Self { key, token }
    }

    /// The key that is locked.
    #[must_use]
    pub fn key(&self) -> &str {
        self.key.as_str()
    }

    /// The token of this grant: larger than all that were given to holders of the key before.
    ///
    /// It is written to the lock's row in the same transaction. A transaction that is rolled back takes it back, too. The next one is larger
    /// all the same, because tokens are at least the database's clock in microseconds; but where that clock was set back, or is behind the tokens,
    /// the same one is given out again. So show it to the outside world, if at all, only after the commit.
    #[must_use]
    pub const fn fencing_token(&self) -> FencingToken {
        self.token
    }
}

/// Why a transaction could not be given a lock. That somebody else has it is none of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockInError {
    /// The key is one that cannot be locked. Nothing was sent.
    #[error("the key cannot be locked")]
    #[non_exhaustive]
    InvalidKey {
        /// What stands against it.
        source: InvalidKey,
    },
    /// The registry's locks are no rows in this kind of database. Nothing was sent.
    #[error("lock {key:?} is no row in {database}, so no {database} transaction can hold it")]
    #[non_exhaustive]
    Unsupported {
        /// The key.
        key: String,
        /// The transaction's kind of database.
        database: &'static str,
    },
    /// The transaction is on a database that does not hold the registry's locks.
    #[error("the transaction is on another database than lock {key:?}")]
    #[non_exhaustive]
    OtherDatabase {
        /// The key.
        key: String,
    },
    /// A transaction of this isolation level goes on reading what was there before it had the lock. Nothing was locked.
    #[error(
        "lock {key:?} cannot be had in a transaction of isolation level {level}, which reads the past; begin the transaction with READ COMMITTED"
    )]
    #[non_exhaustive]
    Isolation {
        /// The key.
        key: String,
        /// The level of the transaction.
        level: String,
    },
    /// Another transaction was in the way. Roll back and begin again.
    #[error("another transaction came between; lock {key:?} can be had by one that begins anew")]
    #[non_exhaustive]
    Conflict {
        /// The key.
        key: String,
        /// What the database said, if it was the one that found it.
        source: Option<sqlx::Error>,
    },
    /// The transaction's connection failed, or the database could not do what it was asked for.
    #[error("the database could not lock {key:?} in the transaction")]
    #[non_exhaustive]
    Database {
        /// The key.
        key: String,
        /// What the database said.
        source: sqlx::Error,
    },
    /// What the store has to do beside the transaction failed.
    #[error("the store could not prepare lock {key:?} for the transaction")]
    #[non_exhaustive]
    Backend {
        /// The key.
        key: String,
        /// What the store said.
        source: BackendError,
    },
}

impl LockInError {
    /// Whether a transaction that begins anew may succeed.
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

/// How long somebody still wants to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience(Option<Instant>);

impl Patience {
    /// For this long; without end if that is beyond all clocks.
    pub(crate) fn of(wait: Duration) -> Self {
        Self(Instant::now().checked_add(wait))
    }

    pub(crate) fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }
}
