//! The options with which a server starts.

use crate::server_options::ServerOptions;

/// The environment variable that names a program to use instead of `mariadbd`. Ignored by servers
/// whose options name a program.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_MARIADB_SERVER";

/// The options of a [`MariaDbServer`](super::MariaDbServer). By default, the program is the one
/// named by [`SERVER_VARIABLE`], or else the `mariadbd` on `PATH` or in `/usr/sbin`. The user
/// `root` needs no password. Committed data is on disk.
pub type MariaDbOptions = ServerOptions<MariaDb>;

/// The options that only MariaDB has.
#[derive(Debug, Clone, Default)]
pub struct MariaDb {
    pub(super) password: Option<String>,
    pub(super) is_galera_node: bool,
}

impl MariaDbOptions {
    /// Disables fsync. A killed server still keeps its data, which is in the kernel's page cache.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.args(&["--innodb-flush-method=nosync"])
    }

    /// Makes the server the only node of a Galera cluster. Debian's server package depends on the
    /// package of the required library.
    #[must_use]
    pub fn galera_node(mut self) -> Self {
        self.store.is_galera_node = true;
        self
    }

    /// Requires this password for the user `root`. It must not contain `'` or a backslash.
    ///
    /// The testkit's own commands use a Unix socket in the server's folder, without a password.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.store.password = Some(password.to_owned());
        self
    }
}
