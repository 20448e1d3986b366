//! The SQLite store.
//!
//! The modules are listed in the order in which one acquisition runs through them; what comes after its release is last.

// Before the first one.
mod open;
mod file;
// What is asked of a lock's row, and how it is said.
mod backend;
mod renew;
mod statement;
mod clock;
mod sql;
// How it reaches the file while others write.
mod link;
mod serial_executor;
mod worker;
// Waiting for a release, whichever process makes it.
mod wake;
mod watch;
// In the caller's own transaction.
mod fence;
// Housekeeping.
mod purge;
mod diagnose;

pub use backend::SqliteBackend;

#[cfg(test)]
mod tests;
