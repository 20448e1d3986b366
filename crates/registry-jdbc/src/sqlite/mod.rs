//! The SQLite store.
//!
//! The modules are listed in the order in which one acquisition uses them. Modules for what follows
//! a release are last.

// Before the first acquisition.
mod open;
mod file;
// The operations on a lock's row, and their SQL.
mod backend;
mod renew;
mod statement;
mod clock;
mod sql;
// Access to the file while other processes write.
mod link;
mod serial_executor;
mod worker;
// Waiting for a release by any process.
mod wake;
mod watch;
// Checking a token in the caller's transaction.
mod fence;
// Housekeeping.
mod purge;
mod diagnose;

pub use backend::SqliteBackend;

#[cfg(test)]
mod tests;
