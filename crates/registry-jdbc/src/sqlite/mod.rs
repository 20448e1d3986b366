//! The SQLite store. One acquisition runs through: `backend` says what is asked of the row, `sql` and `statement` say it in SQL, `link`
//! gets it through while other processes write, one after another on a `lane`, `clock` dates it. `open` and `file` come before all of this; `wake`, on
//! top of `watch`, tells waiters of a release; `purge` and `diagnose` are housekeeping.

mod backend;
mod clock;
mod diagnose;
mod file;
mod lane;
mod link;
mod open;
mod purge;
mod renew;
mod sql;
mod statement;
mod wake;
mod watch;

pub use backend::SqliteBackend;

#[cfg(test)]
mod tests;
