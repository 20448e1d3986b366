//! The SQLite store.
//!
//! The groups of modules are listed in the order in which an acquisition passes through them.
//! Groups that an acquisition does not use are last.

// Before the first acquisition.
mod config;
mod open;
mod paths;
// The operations on a lock's row, and their SQL.
mod backend;
mod batch;
mod renew;
mod records;
mod values;
mod waiter_store;
mod statement;
mod clock;
mod sql;
// Access to the file while other processes write.
mod connection;
mod serial_executor;
mod worker;
mod error;
// Waiting for a release by any process.
mod release_watcher;
mod commit_watch;
// Checking a token in the caller's transaction.
mod fence;
mod run_in;
// Housekeeping.
mod purge;
mod diagnose;

pub use backend::SqliteBackend;
pub use config::{STORE, SqliteConfig};

#[cfg(test)]
mod tests {
    //! A database for the tests of this module's files.

    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::time::Duration;

    use registry_core::{Attempt, Busy, Claim, Grant, Key, LockBackend};
    use sqlx::{ConnectOptions, Executor, SqliteConnection};
    use tempfile::TempDir;

    use super::backend::SqliteBackend;
    use super::clock::{ManualClock, StoreClock};
    use super::config::SqliteConfig;
    use super::connection;

    pub(super) const LEASE: Duration = Duration::from_secs(30);

    /// A folder with a database. Dropping it deletes both.
    pub(super) struct TestFolder(pub(super) TempDir);

    impl TestFolder {
        pub(super) fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        pub(super) fn file(&self) -> PathBuf {
            self.0.path().join("locks.db")
        }

        pub(super) fn config(&self) -> SqliteConfig {
            SqliteConfig::new(self.file())
        }

        /// Opens the store as one process. Two backends act as two processes.
        pub(super) async fn open_backend(&self) -> SqliteBackend {
            SqliteBackend::open(self.config()).await.unwrap()
        }

        pub(super) async fn open_backend_with_clock(
            &self,
            clock: &Arc<ManualClock>,
        ) -> SqliteBackend {
            let clock: Arc<dyn StoreClock> = Arc::<ManualClock>::clone(clock);
            SqliteBackend::open_with_clock(self.config(), clock).await.unwrap()
        }
    }

    pub(super) fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    pub(super) fn claim(text: &str) -> Claim {
        Claim::new(key(text), LEASE)
    }

    pub(super) async fn acquire(backend: &SqliteBackend, claim: &Claim) -> Grant {
        match backend.try_acquire(claim).await.unwrap() {
            Attempt::Granted(grant) => grant,
            other => panic!("not granted: {other:?}"),
        }
    }

    pub(super) async fn acquire_token(backend: &SqliteBackend, claim: &Claim) -> u64 {
        acquire(backend, claim).await.token.get()
    }

    pub(super) async fn expect_busy(backend: &SqliteBackend, claim: &Claim) -> Busy {
        match backend.try_acquire(claim).await.unwrap() {
            Attempt::Busy(busy) => busy,
            other => panic!("not busy: {other:?}"),
        }
    }

    /// Returns another connection, with an open write transaction.
    pub(super) async fn begin_write(path: &Path) -> SqliteConnection {
        let mut connection = connection::options(path).connect().await.unwrap();
        connection.execute("BEGIN IMMEDIATE").await.unwrap();
        connection
    }

    pub(super) async fn rollback(connection: &mut SqliteConnection) {
        connection.execute("ROLLBACK").await.unwrap();
    }
}
