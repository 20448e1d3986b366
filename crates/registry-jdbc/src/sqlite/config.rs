//! Configuration of a SQLite store. `SqliteBackend::open` validates it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The location and the time limits of a [`SqliteBackend`](crate::SqliteBackend).
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SqliteConfig {
    /// The database file. It is created if it does not exist. Its folder must exist.
    pub path: PathBuf,
    /// The namespace of the locks. Equal keys in different namespaces are different locks. Default:
    /// `default`.
    pub namespace: String,
    /// How long a statement is retried while another process writes to the file. After that it
    /// returns a retryable error. Default: 2.5 s, which is below the engine's own timeout.
    pub busy_timeout: Duration,
    /// How long a key must have been free before its row may be deleted. Default: one hour.
    pub purge_after: Duration,
}

impl SqliteConfig {
    /// Returns a configuration for the file at `path`, with the namespace `default`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            namespace: "default".to_owned(),
            busy_timeout: Duration::from_millis(2_500),
            purge_after: Duration::from_secs(60 * 60),
        }
    }

    /// Sets [`namespace`](Self::namespace).
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets [`busy_timeout`](Self::busy_timeout).
    #[must_use]
    pub fn with_busy_timeout(mut self, busy_timeout: Duration) -> Self {
        self.busy_timeout = busy_timeout;
        self
    }

    /// Sets [`purge_after`](Self::purge_after).
    #[must_use]
    pub fn with_purge_after(mut self, purge_after: Duration) -> Self {
        self.purge_after = purge_after;
        self
    }

    /// Returns the path of the database file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

// Implemented manually, so that a secret field added later is not printed by default.
impl fmt::Debug for SqliteConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteConfig")
            .field("path", &self.path)
            .field("namespace", &self.namespace)
            .field("busy_timeout", &self.busy_timeout)
            .field("purge_after", &self.purge_after)
            .finish()
    }
}
