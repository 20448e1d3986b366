//! Tests that use internals: the clock, the connections, the purge. The other tests are in
//! `tests/`.

mod callers;
mod grants;
mod plans;
mod purging;
mod times;
mod faults;
mod waiting;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{Attempt, Busy, Claim, Grant, Key, LockBackend};
use tempfile::TempDir;

use super::backend::SqliteBackend;
use super::clock::{ManualClock, StoreClock};
use crate::sqlite::config::SqliteConfig;

const LEASE: Duration = Duration::from_secs(30);

/// A folder with a database. Dropping it deletes both.
struct TestFolder(TempDir);

impl TestFolder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("locks.db")
    }

    fn config(&self) -> SqliteConfig {
        SqliteConfig::new(self.file())
    }

    /// Opens the store as one process. Two backends act as two processes.
    async fn process(&self) -> SqliteBackend {
        SqliteBackend::open(self.config()).await.unwrap()
    }

    async fn process_with_clock(&self, clock: &Arc<ManualClock>) -> SqliteBackend {
        let clock: Arc<dyn StoreClock> = Arc::<ManualClock>::clone(clock);
        SqliteBackend::open_with_clock(self.config(), clock).await.unwrap()
    }
}

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

fn claim(text: &str) -> Claim {
    Claim::new(key(text), LEASE)
}

async fn grant(backend: &SqliteBackend, claim: &Claim) -> Grant {
    match backend.try_acquire(claim).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Busy(busy) => panic!("busy: {busy:?}"),
    }
}

async fn token(backend: &SqliteBackend, claim: &Claim) -> u64 {
    grant(backend, claim).await.token.get()
}

async fn busy(backend: &SqliteBackend, claim: &Claim) -> Busy {
    match backend.try_acquire(claim).await.unwrap() {
        Attempt::Busy(busy) => busy,
        Attempt::Granted(grant) => panic!("granted: {grant:?}"),
    }
}
