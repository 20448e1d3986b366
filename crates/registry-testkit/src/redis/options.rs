//! How a server is to be started.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

#[cfg(target_os = "linux")]
use crate::clock::ClockShim;
use crate::tls::TlsFolder;

/// Names another program than `redis-server`, for all servers that are not told theirs; Valkey's, for example.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_REDIS_SERVER";

/// How a [`RedisServer`](super::RedisServer) is to be started. Without any option, the program is found on the path as
/// `redis-server`, or where [`SERVER_VARIABLE`] says, and writes each command to its file before it answers.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) environment: Vec<(String, OsString)>,
    pub(super) login: Option<(String, String)>,
    pub(super) tls: Option<TlsFolder>,
    /// The file with which a sentinel is started, as it is at first.
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
    /// A server with its defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds lines of the configuration as arguments, such as `["--maxmemory", "3mb"]`. Of two that say different things, the
    /// later one counts.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
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

    /// Lets only this user in, who may do everything; the testkit's own questions are asked in that name. With the name
    /// `default`, clients may leave the name out.
    #[must_use]
    pub fn login(mut self, user: &str, password: &str) -> Self {
        self.login = Some((user.to_owned(), password.to_owned()));
        self
    }

    /// Encrypts all connections with the server's certificate from `folder`. Clients need none, unless
    /// `["--tls-auth-clients", "yes"]` is among the arguments; then it is one of the same authority.
    ///
    /// The testkit's own questions are asked through a door of their own, a socket in the server's folder.
    #[must_use]
    pub fn tls(mut self, folder: &TlsFolder) -> Self {
        self.tls = Some(folder.clone());
        self
    }

    /// Lets the server live by these clocks, which must outlive it.
    #[cfg(target_os = "linux")]
    #[must_use]
    pub fn clock(self, clock: &ClockShim) -> Self {
        clock
            .environment()
            .into_iter()
            .fold(self, |options, (name, value)| options.env(name, value))
    }

    /// The login as lines of the configuration, word by word.
    pub(super) fn login_lines(&self) -> Vec<Vec<String>> {
        let Some((user, password)) = &self.login else { return Vec::new() };
        let words = |line: &str| line.split(' ').map(ToOwned::to_owned).collect();
        if user == "default" {
            return vec![words(&format!("requirepass {password}"))];
        }
        vec![words(&format!("user {user} on >{password} ~* &* +@all")), words("user default off")]
    }
}
