//! The options that the servers of all stores have in common. Each store has a type alias, such as
//! `RedisOptions`, that adds methods for its own options.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

#[cfg(target_os = "linux")]
use crate::clock::ClockShim;
use crate::managed_server::ServerDescription;
use crate::tls::TlsFolder;

/// The options with which a server starts. By default, acknowledged writes are on disk.
#[derive(Debug, Clone)]
pub struct ServerOptions<S> {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) environment: Vec<(String, OsString)>,
    pub(crate) tls: Option<TlsFolder>,
    pub(crate) store: S,
}

impl<S: ServerDescription> Default for ServerOptions<S> {
    fn default() -> Self {
        Self {
            program: S::program(),
            args: Vec::new(),
            environment: Vec::new(),
            tls: None,
            store: S::default(),
        }
    }
}

impl<S: ServerDescription> ServerOptions<S> {
    /// Creates the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds arguments of the server program. A later argument overrides an earlier one. For
    /// PostgreSQL, PgBouncer and ZooKeeper, adds settings.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
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

    /// Accepts only TLS connections from clients, with the server's certificate from `folder`. The
    /// testkit's own commands use a Unix socket or another port, without TLS; `etcdctl` uses TLS
    /// with the client certificate.
    ///
    /// etcd requires a client certificate of the same authority. Redis requires one with the
    /// arguments `["--tls-auth-clients", "yes"]`, ZooKeeper with the setting
    /// `["ssl.clientAuth=need"]`.
    #[must_use]
    pub fn tls(mut self, folder: &TlsFolder) -> Self {
        self.tls = Some(folder.clone());
        self
    }

    /// Makes the server read its time from `clock`, which must outlive the server.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn clock(mut self, clock: &ClockShim) -> Self {
        let variables = clock.environment().into_iter();
        self.environment.extend(variables.map(|(name, value)| (name.to_owned(), value)));
        self
    }

    /// Sets the environment of a server's command.
    pub(crate) fn set_environment(&self, command: &mut Command) {
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
    }
}
