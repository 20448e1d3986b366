//! How a server is to be started.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::clock::ClockShim;
use crate::programs;
use crate::tls::TlsFolder;

/// Names another program than the `postgres` that is found, for all servers that are not told theirs. Its companions (`initdb`,
/// `pg_basebackup`) are those beside it.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_POSTGRES_SERVER";

/// How a [`PostgresServer`](super::PostgresServer) is to be started. Without any option, the program is the `postgres` on the path, or the
/// newest one where Debian's packages put it, or where [`SERVER_VARIABLE`] says; everybody who connects is let in; and what is
/// committed is on the disk.
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
    /// A server with its defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds settings, such as `["max_connections=20"]`. Of two that say different things, the later one counts.
    #[must_use]
    pub fn settings(mut self, settings: &[&str]) -> Self {
        self.settings.extend(settings.iter().map(|&setting| setting.to_owned()));
        self
    }

    /// Does not wait for the disk. A killed server still has its data, because the kernel lives on.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.settings(&["fsync=off"])
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

    /// Lets only those in who know this password, which is that of the user `postgres`; SCRAM-SHA-256.
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

    /// Who is let in. The first line that fits a connection counts.
    pub(super) fn doors(&self) -> String {
        let kind = if self.tls.is_some() { "hostssl" } else { "host" };
        let proof = if self.password.is_some() { "scram-sha-256" } else { "trust" };
        format!(
            "local all all trust\nlocal replication all trust\n{kind} all all 127.0.0.1/32 {proof}\n"
        )
    }
}
