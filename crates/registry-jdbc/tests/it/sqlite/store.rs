//! The SQLite store of the conformance suite: a file in a temporary folder of its own.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::Store;
use registry_core::LockBackend;
use registry_jdbc::{SqliteBackend, SqliteConfig};
use tempfile::TempDir;

/// Long, because the clauses of the suite have their own time limits.
const BUSY_TIMEOUT: Duration = Duration::from_secs(20);

/// The configuration of every client.
pub(crate) fn config(file: impl Into<PathBuf>) -> SqliteConfig {
    SqliteConfig::new(file).with_busy_timeout(BUSY_TIMEOUT)
}

#[derive(Debug)]
pub(crate) struct SqliteStore {
    folder: TempDir,
}

impl SqliteStore {
    pub(crate) fn fresh() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("locks.db")
    }

    async fn open(&self, config: SqliteConfig) -> Arc<dyn LockBackend> {
        Arc::new(SqliteBackend::open(config).await.unwrap())
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn client(&self) -> Arc<dyn LockBackend> {
        self.open(config(self.path())).await
    }

    async fn other_namespace(&self) -> Option<Arc<dyn LockBackend>> {
        Some(self.open(config(self.path()).with_namespace("other")).await)
    }

    // A file has no server. After its last client has closed, the next one reads the file from
    // disk.
    async fn restart(&self) -> bool {
        true
    }

    async fn wipe(&self) -> bool {
        for file in fs::read_dir(self.folder.path()).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
        true
    }
}
