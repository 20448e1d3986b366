//! The MariaDB and MySQL store.
//!
//! The modules are listed in the order in which one acquisition uses them. Modules for what follows
//! a release are last.

// Before the first acquisition.
mod config;
mod open;
// The operations on a lock's row, and their SQL.
mod backend;
mod renew;
mod statement;
mod sql;
mod inline;
// Sending statements to the server.
mod client;
mod error;
// Waiting for a release by any process.
mod waiters;
// Locks that live as long as a connection: one connection for all locks, or one for each.
mod session;
mod row;
// Listing holders and forced release.
mod holders;
// Checking a token in the caller's transaction.
mod fence;
// Locks that last as long as the caller's transaction.
mod lock_in;
// Locks in the table layout of Spring Integration.
mod spring;
// Housekeeping.
mod purge;
mod diagnose;

pub use backend::MySqlBackend;
pub use config::MySqlConfig;
pub use row::MySqlRowBackend;
pub use session::MySqlSessionBackend;
pub use spring::MySqlSpringBackend;

#[cfg(all(test, feature = "server-tests"))]
mod tests;
