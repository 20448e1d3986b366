//! SQL databases as lock stores, through sqlx. "jdbc" is Spring's name for this kind of store; no
//! Java is involved.
//!
//! Each database is a feature:
//!
//! | feature | backend | excludes |
//! |---|---|---|
//! | `postgres` | `PostgresBackend` | clients of the database |
//! | `mysql` | `MySqlBackend`, for MariaDB and MySQL | clients of the database |
//! | `sqlite` | `SqliteBackend` | the processes of one Linux host that open the same file |
//!
//! A lock in a database server is a lease by default. Other values of `SqlMode` make it a lock of a
//! connection, a row locked by a transaction, or a row in Spring Integration's table.
//!
//! A lease is a row. The row contains the claim that holds the lock (or the record of several
//! claims), the reserved fencing tokens and the end of the lease. A single statement writes a
//! grant, so an interrupted acquisition leaves no open transaction. The engine in `registry-core`
//! decides about waiting, renewal, hand-over and loss, and calls the backend through `LockBackend`.
//!
//! Three traits use the caller's own transaction:
//!
//! - `Fence` checks a guard in the transaction, so that the transaction cannot commit after another
//!   client was granted the lock.
//! - `LockIn` acquires a lock that lasts as long as the transaction.
//! - `RunIn` runs a tick of a job in the transaction.
#![cfg_attr(
    all(feature = "sqlite", target_os = "linux"),
    doc = r#"
# Examples
```
use std::sync::Arc;
use registry_jdbc::{SqliteBackend, SqliteConfig};

# #[tokio::main(flavor = "current_thread")]
# async fn main() -> Result<(), Box<dyn std::error::Error>> {
# let folder = tempfile::tempdir()?;
# let path = folder.path().join("locks.db");
let backend = SqliteBackend::open(SqliteConfig::new(path)).await?;
let registry = registry_core::Registry::builder(Arc::new(backend)).build()?;
# use registry_core::LockRegistry;
let guard = registry.obtain("orders/42").lock().await?;
guard.unlock().await?;
# Ok(())
# }
```
"#
)]

#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod server;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
mod fence;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
mod run_in;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod lock_in;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
#[cfg_attr(
    not(lock_registry_mutants),
    expect(dead_code, unreachable_pub, reason = "public only with `--cfg lock_registry_mutants`")
)]
mod mutant;

#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub use fence::{Fence, FenceError};
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub use lock_in::{LockIn, LockInError, TransactionLock};
#[cfg(all(lock_registry_mutants, any(feature = "postgres", feature = "mysql")))]
pub use mutant::{Mutant, switch_mutant};
#[cfg(feature = "mysql")]
pub use mysql::{MySqlBackend, MySqlConfig};
#[cfg(feature = "postgres")]
pub use postgres::{PostgresBackend, PostgresConfig, StatementMode};
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub use run_in::{RunIn, RunInError, TransactionRun};
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub use server::{
    CreateSchema, Encryption, RowLocksExhausted, SpringTable, SqlBackend, SqlMode, SqlServer,
};
#[cfg(feature = "sqlite")]
pub use sqlite::{SqliteBackend, SqliteConfig};

/// The kinds of stores, for configuration by URL and options.
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod stores {
    #[cfg(feature = "mysql")]
    pub use crate::mysql::STORE as MYSQL;
    #[cfg(feature = "postgres")]
    pub use crate::postgres::STORE as POSTGRES;
    #[cfg(feature = "sqlite")]
    pub use crate::sqlite::STORE as SQLITE;
}

/// The sqlx that this crate was built with. [`Fence`] and the other traits take transactions of
/// this version.
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub use sqlx;

// The examples of the README are compiled.
#[cfg(all(doctest, feature = "sqlite", feature = "postgres", feature = "mysql"))]
#[doc = include_str!("../README.md")]
struct Readme;
