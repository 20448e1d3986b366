//! What must be known to open a store. Checks nothing: opening does, where the message can name the file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the locks of a [`SqliteBackend`](crate::SqliteBackend) live.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SqliteConfig {
    /// The database file. It is made if it is absent; its folder is not.
    pub path: PathBuf,
    /// Locks of different namespaces never meet, even if their keys are equal. `default` unless set.
    pub namespace: String,
    /// How long a statement tries again while another process writes to the file, before it gives up with an error
    /// that may pass. 2.5 s unless set, which is below the engine's own time-out.
    pub busy_timeout: Duration,
    /// How long a key must have been free before its row may be deleted. One hour unless set.
    pub purge_after: Duration,
}

impl SqliteConfig {
    /// Locks in the file at `path`, in the namespace `default`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            namespace: "default".to_owned(),
            busy_timeout: Duration::from_millis(2_500),
            purge_after: Duration::from_secs(60 * 60),
        }
    }

    /// The same with this namespace.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// The same with this patience towards other writers.
    #[must_use]
    pub fn with_busy_timeout(mut self, busy_timeout: Duration) -> Self {
        self.busy_timeout = busy_timeout;
        self
    }

    /// The same with rows of free keys kept for this long.
    #[must_use]
    pub fn with_purge_after(mut self, purge_after: Duration) -> Self {
        self.purge_after = purge_after;
        self
    }

    /// The database file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

// By hand, so that a secret that joins this struct one day does not print itself.
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
