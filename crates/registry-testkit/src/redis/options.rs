//! The options with which a server starts.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

#[cfg(target_os = "linux")]
use crate::clock::ClockShim;
use crate::tls::TlsFolder;

/// The environment variable that names a program to use instead of `redis-server`, such as
/// `valkey-server`. Ignored by servers whose options name a program.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_REDIS_SERVER";

/// The options of a [`RedisServer`](super::RedisServer). By default, the program is the one named
/// by [`SERVER_VARIABLE`], or else the `redis-server` on `PATH`. The server flushes each command to
/// its file before it replies.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) environment: Vec<(String, OsString)>,
    pub(super) login: Option<(String, String)>,
    pub(super) tls: Option<TlsFolder>,
    /// The initial configuration file of a sentinel, without the lines common to all servers.
    pub(super) sentinel: Option<String>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            program: env::var_os(SERVER_VARIABLE)
                .map_or_else(|| "redis-server".into(), PathBuf::from),
            args: Vec::new(),
            environment: Vec::new(),
            login: None,
            tls: None,
            sentinel: None,
        }
    }
}

impl ServerOptions {
    /// Creates the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds configuration lines as arguments, such as `["--maxmemory", "3mb"]`. A later line
    /// overrides an earlier one.
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

    /// Admits only this user, with all permissions. The testkit's own commands use this login. If
    /// the user is `default`, clients may omit the user name.
    #[must_use]
    pub fn login(mut self, user: &str, password: &str) -> Self {
        self.login = Some((user.to_owned(), password.to_owned()));
        self
    }

    /// Accepts only TLS connections, with the server's certificate from `folder`. Clients need a
    /// certificate of the same authority only with the arguments `["--tls-auth-clients", "yes"]`.
    ///
    /// The testkit's own commands use a Unix socket in the server's folder.
    #[must_use]
    pub fn tls(mut self, folder: &TlsFolder) -> Self {
        self.tls = Some(folder.clone());
        self
    }

    /// Makes the server use these clocks, which must outlive it.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn clock(self, clock: &ClockShim) -> Self {
        clock
            .environment()
            .into_iter()
            .fold(self, |options, (name, value)| options.env(name, value))
    }

    /// Returns the configuration lines of the login, split into words.
    pub(super) fn login_lines(&self) -> Vec<Vec<String>> {
        let Some((user, password)) = &self.login else { return Vec::new() };
        let words = |line: &str| line.split(' ').map(ToOwned::to_owned).collect();
        if user == "default" {
            return vec![words(&format!("requirepass {password}"))];
        }
        vec![words(&format!("user {user} on >{password} ~* &* +@all")), words("user default off")]
    }
}
