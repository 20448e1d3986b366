//! The PostgreSQL store.
//!
//! The modules are listed in the order in which one acquisition runs through them; what comes after its release is last.

// Before the first one.
mod config;
mod open;
// What is asked of a lock's row, and how it is said.
mod backend;
mod renew;
mod sql;
mod statement;
// How it reaches the server.
mod link;
mod error;
// Waiting for a release, whichever process makes it.
mod ears;
// Locks that live as long as a connection: one for all of them, one for each.
mod session;
mod row;
// Who holds what, and ending it.
mod holders;
// In the caller's own transaction.
mod fence;
mod lock_in;
// Locks that look like those of another program.
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
