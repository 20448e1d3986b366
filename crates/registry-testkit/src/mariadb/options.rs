//! The options with which a server starts.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::clock::ClockShim;
use crate::programs;
use crate::tls::TlsFolder;

/// The environment variable that names a program to use instead of `mariadbd`. Ignored by servers
/// whose options name a program.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_MARIADB_SERVER";

/// The options of a [`MariaDbServer`](super::MariaDbServer). By default, the program is the one
/// named by [`SERVER_VARIABLE`], or else the `mariadbd` on `PATH`. The user `root` needs no
/// password. Committed data is on disk.
#[derive(Debug, Clone)]
pub struct MariaDbOptions {
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) environment: Vec<(String, OsString)>,
    pub(super) password: Option<String>,
    pub(super) tls: Option<TlsFolder>,
    pub(super) is_galera_node: bool,
}

impl Default for MariaDbOptions {
    fn default() -> Self {
        Self {
            program: programs::server(SERVER_VARIABLE, "mariadbd"),
            args: Vec::new(),
            environment: Vec::new(),
            password: None,
            tls: None,
            is_galera_node: false,
        }
    }
}

impl MariaDbOptions {
    /// Creates the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds arguments, such as `["--max-connections=20"]`. A later argument overrides an earlier
    /// one.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// Disables fsync. A killed server still keeps its data, which is in the kernel's page cache.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.args(&["--innodb-flush-method=nosync"])
    }

    /// Makes the server the only node of a Galera cluster. Debian's server package contains the
    /// required library.
    #[must_use]
    pub fn galera_node(mut self) -> Self {
        self.is_galera_node = true;
        self
    }

    /// Sets another program that accepts the same arguments.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = program.into();
        self
    }

    /// Sets an environment variable of the server.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Requires this password for the user `root`. It must not contain `'` or a backslash.
    ///
    /// The testkit's own commands use a Unix socket in the server's folder, without a password.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Accepts only TLS connections, with the server's certificate from `folder`. The testkit's own
    /// commands use the Unix socket, as for [`password`](Self::password).
    #[must_use]
    pub fn tls(mut self, folder: &TlsFolder) -> Self {
        self.tls = Some(folder.clone());
        self
    }

    /// Makes the server use these clocks, which must outlive it.
    #[must_use]
    pub fn clock(self, clock: &ClockShim) -> Self {
        clock
            .environment()
            .into_iter()
            .fold(self, |options, (name, value)| options.env(name, value))
    }
}
