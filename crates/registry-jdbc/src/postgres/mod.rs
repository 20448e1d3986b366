//! The PostgreSQL store.
//!
//! The modules are listed in the order in which an acquisition of a lease passes through them. The
//! other modes and the housekeeping follow.

// Configuration and opening.
mod config;
mod open;
// The operations on a lock's row, and their statements.
mod backend;
mod sql;
mod statement;
// Connections to the server, and its errors.
mod client;
mod error;
// Waiting for a release by any process.
mod listener;
// Locks that last as long as a connection: one connection for all locks, or one connection for each
// lock.
mod session;
mod row;
// Locks in the caller's own transaction.
mod lock_in;
// Locks in the table of another program.
mod spring;
// Housekeeping.
mod diagnose;

pub use config::{PostgresConfig, STORE, StatementMode};

use sqlx::Postgres;

use crate::server::{SqlBackend, SqlServer};

/// Locks in a PostgreSQL database. They exclude all clients of that database.
///
/// [`SqlMode`](crate::SqlMode) lists the kinds of locks. By default a lock is a lease: a grant
/// lasts until its lease ends on the server's clock. A token is the server's time in microseconds,
/// or the key's last token plus one if that is larger. So tokens grow across release, expiry,
/// restart, failover and purge.
///
/// If `synchronous_commit` and `fsync` are on, a grant or a renewal is on the server's disk before
/// the response. A release is not necessarily on disk. A release wakes the waiting callers of all
/// processes by `NOTIFY`.
///
/// A promoted standby has the grants that were replicated to it. With asynchronous replication the
/// last grants may be missing, and their keys are then free. Tokens grow even in this case, unless
/// the standby's clock is behind by more than the promotion took. So fenced writes stay safe.
///
/// The backend uses its own connections. Only [`Fence`](crate::Fence), [`LockIn`](crate::LockIn)
/// and [`RunIn`](crate::RunIn) use a transaction of the application. For any number of held or
/// awaited leases, the backend has at most as many connections as
/// [configured](PostgresConfig::with_connections), plus three, and replacements of connections that
/// do not answer.
///
/// # Examples
/// ```no_run
/// use registry_core::{Attempt, Claim, Key, LockBackend, Release};
/// use registry_jdbc::{PostgresBackend, PostgresConfig};
/// # use std::time::Duration;
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let config = PostgresConfig::from_url("postgres://worker:secret@db.example/shop")?;
/// let backend = PostgresBackend::open(config).await?;
/// let claim = Claim::new(Key::new("orders/42")?, Duration::from_secs(30));
/// assert!(matches!(backend.try_acquire(&claim).await?, Attempt::Granted(_)));
/// assert_eq!(backend.release(&claim).await?, Release::Freed);
/// backend.close().await;
/// # Ok(())
/// # }
/// ```
pub type PostgresBackend = SqlBackend<Postgres>;

impl SqlServer for Postgres {
    type Config = PostgresConfig;
}
