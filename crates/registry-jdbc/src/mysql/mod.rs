//! The MariaDB and MySQL store.
//!
//! The modules are listed in the order in which one acquisition uses them. Modules for what follows
//! a release are last.

// Before the first acquisition.
mod config;
mod open;
// The operations on a lock's row, and their SQL.
mod backend;
mod statement;
mod sql;
// Sending statements to the server.
mod client;
mod error;
// Waiting for a release by any process.
mod waiters;
// Locks that live as long as a connection: one connection for all locks, or one for each.
mod session;
mod row;
// Locks that last as long as the caller's transaction.
mod lock_in;
// Locks in the table layout of Spring Integration.
mod spring;
// Housekeeping.
mod diagnose;

pub use config::{MySqlConfig, STORE};

use sqlx::MySql;

use crate::server::{SqlBackend, SqlServer};

/// Locks in a MariaDB or MySQL database. Requires MariaDB 10.6, MySQL 8.0, or newer, and InnoDB
/// tables.
///
/// [`SqlMode`](crate::SqlMode) lists what a lock can be. By default it is a lease: it excludes all
/// clients of the database, and lives until it expires on the server's clock. A token is that
/// clock's time in microseconds, or the key's last token plus one if that is larger. Tokens grow
/// across release, expiry, restart, failover and purge. Grants and renewals are on the server's
/// disk before the response, if the server is configured so (`innodb_flush_log_at_trx_commit`).
///
/// These servers send no notifications, so the backend polls all awaited keys with one small
/// statement. Polling starts milliseconds after a wait began, and slows down with its length.
///
/// A promoted replica has only what it had received until then: the last grants may be missing, and
/// their keys are free. Tokens grow even then, unless the replica's clock is behind by more than
/// the promotion took. So fenced writes stay safe.
///
/// A server that is set `read_only` grants and renews nothing, even for users that may write to it.
///
/// The backend opens its own connections and never joins a transaction of the application. It opens
/// at most as many as [configured](MySqlConfig::with_connections), plus two, for any number of held
/// or awaited leases.
///
/// # Examples
/// ```no_run
/// use registry_core::{Attempt, Claim, Key, LockBackend, Release};
/// use registry_jdbc::{MySqlBackend, MySqlConfig};
/// # use std::time::Duration;
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let config = MySqlConfig::from_url("mysql://worker:secret@db.example/shop")?;
/// let backend = MySqlBackend::open(config).await?;
/// let claim = Claim::new(Key::new("orders/42")?, Duration::from_secs(30));
/// assert!(matches!(backend.try_acquire(&claim).await?, Attempt::Granted(_)));
/// assert_eq!(backend.release(&claim).await?, Release::Freed);
/// backend.close().await;
/// # Ok(())
/// # }
/// ```
pub type MySqlBackend = SqlBackend<MySql>;

impl SqlServer for MySql {
    type Config = MySqlConfig;
}

#[cfg(test)]
mod tests;
