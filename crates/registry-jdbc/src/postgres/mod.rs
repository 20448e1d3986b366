//! The PostgreSQL store.
//!
//! The modules are listed in the order in which an acquisition passes through them. Modules for the
//! time after its release are last.

// Configuration and opening.
mod config;
mod open;
// The operations on a lock's row, and their statements.
mod backend;
mod renew;
mod sql;
mod statement;
// Connections to the server, and its errors.
mod client;
mod error;
// Waiting for a release by any process.
mod listener;
// Locks that last as long as a connection: one for all locks, or one for each.
mod session;
mod row;
// Listing and breaking locks.
mod holders;
// Locks and fences in the caller's own transaction.
mod fence;
mod lock_in;
// Locks in the table of another program.
mod spring;
// Housekeeping.
mod purge;
mod diagnose;

pub use backend::PostgresBackend;
pub use config::PostgresConfig;
pub use row::PostgresRowBackend;
pub use session::PostgresSessionBackend;
pub use spring::PostgresSpringBackend;

#[cfg(test)]
mod tests;
