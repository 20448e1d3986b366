//! The options with which a server starts.

use crate::server_options::ServerOptions;

/// The environment variable that names another `postgres` program. Ignored by servers whose options
/// name a program. The companion programs (`initdb`, `pg_basebackup`) must be in the same folder.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_POSTGRES_SERVER";

/// The options of a [`PostgresServer`](super::PostgresServer). By default:
///
/// - The program is the one named by [`SERVER_VARIABLE`], or else the `postgres` on `PATH`, or else
///   the newest one installed by Debian's packages.
/// - Clients need no password.
/// - Committed data is on disk.
pub type PostgresOptions = ServerOptions<Postgres>;

/// The options that only PostgreSQL has.
#[derive(Debug, Clone, Default)]
pub struct Postgres {
    pub(super) password: Option<String>,
}

impl PostgresOptions {
    /// Adds settings, such as `["max_connections=20"]`. A later setting overrides an earlier one.
    #[must_use]
    pub fn settings(self, settings: &[&str]) -> Self {
        self.args(settings)
    }

    /// Disables fsync. A killed server still keeps its data, which is in the kernel's page cache.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.settings(&["fsync=off"])
    }

    /// Requires this password for the user `postgres`, with SCRAM-SHA-256.
    ///
    /// The testkit's own commands use a Unix socket in the server's folder, without a password.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.store.password = Some(password.to_owned());
        self
    }

    /// Returns the content of `pg_hba.conf`. The first matching line applies.
    pub(super) fn pg_hba_lines(&self) -> String {
        let kind = if self.tls.is_some() { "hostssl" } else { "host" };
        let auth_method = if self.store.password.is_some() { "scram-sha-256" } else { "trust" };
        format!(
            "local all all trust\nlocal replication all trust\n{kind} all all 127.0.0.1/32 {auth_method}\n"
        )
    }
}
