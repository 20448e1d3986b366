//! The SQLite store. One acquisition runs through: `backend` says what is asked of the row, `sql` says it in SQL, `link`
//! gets it through while other processes write, `clock` dates it. `open` and `file` come before all of this; `wake`, on
//! top of `watch`, tells waiters of a release; `purge` and `diagnose` are housekeeping.

mod backend;
mod clock;
mod diagnose;
mod file;
mod link;
mod open;
mod purge;
mod renew;
mod sql;
mod wake;
mod watch;

pub use backend::SqliteBackend;

#[cfg(test)]
mod tests;
