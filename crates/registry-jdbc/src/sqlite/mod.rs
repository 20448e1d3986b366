//! The SQLite store.
//!
//! The modules are listed in the order in which one acquisition uses them. Modules for what follows
//! a release are last.

// Before the first acquisition.
mod config;
mod open;
mod paths;
// The operations on a lock's row, and their SQL.
mod backend;
mod renew;
mod statement;
mod clock;
mod sql;
// Access to the file while other processes write.
mod connection;
mod serial_executor;
mod worker;
mod error;
// Waiting for a release by any process.
mod waiters;
mod commit_watch;
// Checking a token in the caller's transaction.
mod fence;
// Housekeeping.
mod purge;
mod diagnose;

pub use backend::SqliteBackend;
pub use config::{STORE, SqliteConfig};

#[cfg(test)]
mod tests;
