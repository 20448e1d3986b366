//! The options with which a server starts.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::clock::ClockShim;
use crate::programs;
use crate::tls::TlsFolder;

/// The environment variable that names another `postgres` program. Ignored by servers whose options
/// name a program. The companion programs (`initdb`, `pg_basebackup`) must be in the same folder.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_POSTGRES_SERVER";

/// The options of a [`PostgresServer`](super::PostgresServer). By default:
///
/// - The program is the one named by [`SERVER_VARIABLE`], or else the `postgres` on `PATH`, or else
///   the newest one installed by Debian's packages.
/// - Clients need no password.
/// - Committed data is on disk.
#[derive(Debug, Clone)]
pub struct PostgresOptions {
    pub(super) program: PathBuf,
    pub(super) settings: Vec<String>,
    pub(super) environment: Vec<(String, OsString)>,
    pub(super) password: Option<String>,
    pub(super) tls: Option<TlsFolder>,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self {
            program: programs::postgres(SERVER_VARIABLE),
            settings: Vec::new(),
            environment: Vec::new(),
            password: None,
            tls: None,
        }
    }
}

impl PostgresOptions {
    /// Creates the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds settings, such as `["max_connections=20"]`. A later setting overrides an earlier one.
    #[must_use]
    pub fn settings(mut self, settings: &[&str]) -> Self {
        self.settings.extend(settings.iter().map(|&setting| setting.to_owned()));
        self
    }

    /// Disables fsync. A killed server still keeps its data, which is in the kernel's page cache.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.settings(&["fsync=off"])
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

    /// Requires this password for the user `postgres`, with SCRAM-SHA-256.
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

    /// Returns the content of `pg_hba.conf`. The first matching line applies.
    pub(super) fn pg_hba_lines(&self) -> String {
        let kind = if self.tls.is_some() { "hostssl" } else { "host" };
        let auth_method = if self.password.is_some() { "scram-sha-256" } else { "trust" };
        format!(
            "local all all trust\nlocal replication all trust\n{kind} all all 127.0.0.1/32 {auth_method}\n"
        )
    }
}
