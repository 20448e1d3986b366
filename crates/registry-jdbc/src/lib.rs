//! SQL databases as lock stores, through sqlx. "jdbc" is Spring's word for this kind of store; no Java is involved.
//!
//! Each database is a feature:
//!
//! | feature | backend | excludes |
//! |---|---|---|
//! | `postgres` | `PostgresBackend` | all who reach the database |
//! | `postgres` | `PostgresSessionBackend`: locks that live as long as a connection | all who reach the database |
//! | `postgres` | `PostgresRowBackend`: rows that a transaction locks | all who reach the database |
//! | `mysql` | `MySqlBackend`, for MariaDB and MySQL | all who reach the database |
//! | `mysql` | `MySqlSessionBackend`: locks that live as long as a connection | all who reach the server |
//! | `mysql` | `MySqlRowBackend`: rows that a transaction locks | all who reach the database |
//! | `sqlite` | `SqliteBackend` | the processes of one Linux host that open the same file |
//!
//! A lock is a row. It names the claim that holds it, the fencing tokens that were reserved and the end of the lease;
//! every operation is a single statement, so there is no half-done acquisition to clean up. Waiting, renewal, hand-over
//! and loss are not decided here: the engine in `registry-core` drives a backend through `LockBackend`.
//!
//! The other half of a token lives here too: `Fence` checks a guard inside the caller's own transaction, so that
//! the transaction cannot commit after the lock was lost. `LockIn` has a lock that lasts as long as such a transaction.
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
mod config;
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
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod lock_in;
#[cfg(feature = "sqlite")]
mod error;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
#[cfg_attr(
    not(lock_registry_mutants),
    expect(
        dead_code,
        unreachable_pub,
        reason = "public only in the builds that prove the harness"
    )
)]
mod mutant;

#[cfg(feature = "sqlite")]
pub use config::SqliteConfig;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub use fence::{Fence, FenceError};
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub use lock_in::{LockIn, LockInError, TransactionLock};
#[cfg(all(lock_registry_mutants, any(feature = "postgres", feature = "mysql")))]
pub use mutant::{Mutant, switch_mutant};
#[cfg(feature = "mysql")]
pub use mysql::{
    MySqlBackend, MySqlConfig, MySqlRowBackend, MySqlSessionBackend, MySqlSpringBackend,
};
#[cfg(feature = "postgres")]
pub use postgres::{
    PostgresBackend, PostgresConfig, PostgresRowBackend, PostgresSessionBackend,
    PostgresSpringBackend,
};
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub use server::{Encryption, RowLocksExhausted, SpringTable};
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteBackend;

/// The sqlx that this crate was built with: [`Fence`] takes its transactions.
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub use sqlx;

// The examples of the README are compiled.
#[cfg(all(doctest, feature = "sqlite", feature = "postgres", feature = "mysql"))]
#[doc = include_str!("../README.md")]
struct Readme;
