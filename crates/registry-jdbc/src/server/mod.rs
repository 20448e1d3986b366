//! The backend that all database servers share. `postgres` and `mysql` implement its [`Dialect`],
//! and contain the SQL.

// The backend, and what a kind of server implements for it.
pub(crate) mod config;
mod backend;
mod dialect;
// Leases, in the native tables and in the table of another program.
mod store;
mod lease_table;
mod records;
mod batch;
mod values;
mod waiter_store;
pub(crate) mod spring_rows;
pub(crate) mod spring;
// Sending statements.
pub(crate) mod statement;
mod client;
mod pool;
mod encryption;
// Row ids, and sets of recently used rows.
mod row_id;
mod recent_rows;
// Locks that last as long as a connection: one connection for all locks, or one connection for each
// lock.
mod session;
mod row_lock_sessions;
mod connection_actor;
mod token_reservation;
// Transactions of the caller.
mod fence;
mod lock_in;
mod run_in;
// Housekeeping.
mod purge;
mod diagnose;

// Errors of all servers.
pub(crate) mod error;

#[cfg(all(test, target_os = "linux", feature = "mysql", feature = "server-tests"))]
pub(crate) use backend::BackendTable;
pub(crate) use backend::capabilities;
pub use backend::{SqlBackend, SqlMode};
pub(crate) use client::{ErrorEffect, Resend, SqlClient, session_failure};
pub use config::CreateSchema;
pub(crate) use diagnose::{check_clock, check_row_locks, host_micros};
pub use dialect::SqlServer;
pub(crate) use dialect::{Dialect, ServerErrors, SpringDialect, WakeupSource};
pub(crate) use encryption::EncryptedOptions;
pub use encryption::Encryption;
pub(crate) use lease_table::{HolderStatements, LeaseTable, RowStatements};
pub(crate) use lock_in::LockableTable;
#[cfg(feature = "postgres")]
pub(crate) use pool::AfterConnect;
#[cfg(feature = "mysql")]
pub(crate) use pool::PooledConnection;
pub(crate) use pool::{ConnectionPool, ConnectionUse, PoolError, PoolLimits};
pub(crate) use purge::PURGE_BATCH_ROWS;
pub(crate) use recent_rows::RecentRows;
pub(crate) use records::RECORD_MARKER;
pub(crate) use row_id::RowId;
pub use row_lock_sessions::RowLocksExhausted;
pub(crate) use row_lock_sessions::{RowLockPermit, RowLockPool, RowLockSessions};
pub(crate) use session::{LockAttempt, SessionFailure, SessionProtocol, SqlSession};
pub use spring::SpringTable;
pub(crate) use spring_rows::{SpringLeaseTable, SpringStatements};
pub(crate) use statement::{Answer, QueryMode, Statement, StatementText, Value};
pub(crate) use store::{SqlStore, read_meta};
#[cfg(feature = "mysql")]
pub(crate) use token_reservation::SessionGrant;
pub(crate) use token_reservation::TokenPlan;
pub(crate) use values::ValueStatements;
pub(crate) use waiter_store::WaiterStatements;

/// The minimum time for which rows of free keys are kept. The configuration also requires at least
/// twice the response timeout. So no client acts on a row that was deleted after the client read
/// it.
pub(crate) const PURGE_AFTER_MIN: std::time::Duration = std::time::Duration::from_secs(60);

/// The idle time after which a server ends the connection of a session or row lock.
pub(crate) const IDLE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);
