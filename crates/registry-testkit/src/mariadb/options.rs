//! How a server is to be started.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::clock::ClockShim;
use crate::programs;
use crate::tls::TlsFolder;

/// Names another program than `mariadbd`, for all servers that are not told theirs.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_MARIADB_SERVER";

/// How a [`MariaDbServer`](super::MariaDbServer) is to be started. Without any option, the program is found on the path as `mariadbd`, or
/// where [`SERVER_VARIABLE`] says; the user `root` needs no password; and what is committed is on the disk.
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
    /// A server with its defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds arguments, such as `["--max-connections=20"]`. Of two that say different things, the later one counts.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// Does not wait for the disk. A killed server still has its data, because the kernel lives on.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.args(&["--innodb-flush-method=nosync"])
    }

    /// Makes the server the only node of a Galera cluster. The library for it comes with Debian's package of the server.
    #[must_use]
    pub fn galera_node(mut self) -> Self {
        self.is_galera_node = true;
        self
    }

    /// Starts another program that takes the same arguments.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = program.into();
        self
    }

    /// Gives the server an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Lets only those in who know this password, which is that of the user `root`. It must not contain `'` or a backslash.
    ///
    /// The testkit's own questions are asked through a door of their own, a socket in the server's folder.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Takes only encrypted connections, with the server's certificate from `folder`. The testkit's own questions do not need
    /// them, as for [`password`](Self::password).
    #[must_use]
    pub fn tls(mut self, folder: &TlsFolder) -> Self {
        self.tls = Some(folder.clone());
        self
    }

    /// Lets the server live by these clocks, which must outlive it.
    #[must_use]
    pub fn clock(self, clock: &ClockShim) -> Self {
        clock
            .environment()
            .into_iter()
            .fold(self, |options, (name, value)| options.env(name, value))
    }
}
