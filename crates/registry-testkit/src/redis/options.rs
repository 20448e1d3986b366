//! The options with which a server starts.

use crate::server_options::ServerOptions;

/// The environment variable that names a program to use instead of `redis-server`, such as
/// `valkey-server`. Ignored by servers whose options name a program.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_REDIS_SERVER";

/// The options of a [`RedisServer`](super::RedisServer). By default, the program is the one named
/// by [`SERVER_VARIABLE`], or else the `redis-server` on `PATH`. The server flushes each write to
/// its append-only file before it replies.
pub type RedisOptions = ServerOptions<Redis>;

/// The options that only Redis has.
#[derive(Debug, Clone, Default)]
pub struct Redis {
    pub(super) login: Option<(String, String)>,
    /// The initial configuration file of a sentinel, without the lines common to all servers.
    pub(super) sentinel: Option<String>,
}

impl RedisOptions {
    /// Admits only this user, with all permissions. The testkit's own commands use this login. If
    /// the user is `default`, clients may omit the user name.
    #[must_use]
    pub fn login(mut self, user: &str, password: &str) -> Self {
        self.store.login = Some((user.to_owned(), password.to_owned()));
        self
    }

    /// Returns the configuration lines of the login, split into words.
    pub(super) fn login_lines(&self) -> Vec<Vec<String>> {
        let Some((user, password)) = &self.store.login else { return Vec::new() };
        let words = |line: &str| line.split(' ').map(ToOwned::to_owned).collect();
        if user == "default" {
            return vec![words(&format!("requirepass {password}"))];
        }
        vec![words(&format!("user {user} on >{password} ~* &* +@all")), words("user default off")]
    }
}
