//! The MariaDB and MySQL store.
//!
//! The modules are listed in the order in which one acquisition runs through them; what comes after its release is last.

// Before the first one.
mod config;
mod open;
// What is asked of a lock's row, and how it is said.
mod backend;
mod renew;
mod statement;
mod sql;
mod plain;
// How it reaches the server.
mod link;
mod error;
// Waiting for a release, whichever process makes it.
mod wake;
// Locks that live as long as a connection: one for all of them, one for each.
mod session;
mod row;
// Who holds what, and ending it.
mod holders;
// The other half of a token.
mod fence;
// As long as the caller's transaction.
mod lock_in;
// Locks that look like those of another program.
mod spring;
// Housekeeping.
mod purge;
mod diagnose;

pub use backend::MySqlBackend;
pub use config::MySqlConfig;
pub use row::MySqlRowBackend;
pub use session::MySqlSessionBackend;
pub use spring::MySqlSpringBackend;

#[cfg(test)]
mod tests;
