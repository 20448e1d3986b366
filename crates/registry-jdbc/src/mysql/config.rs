//! What must be known to reach a MariaDB or MySQL server, and where the locks are in it.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::ConnectOptions as _;
use sqlx::mysql::{MySqlConnectOptions, MySqlSslMode};

use crate::server::{Encryption, PURGE_AFTER_MIN, ROW_LOCKS};

/// Where the locks of a [`MySqlBackend`](crate::MySqlBackend) live.
#[derive(Clone)]
#[non_exhaustive]
pub struct MySqlConfig {
    pub(super) server: MySqlConnectOptions,
    pub(super) encryption: Encryption,
    pub(super) namespace: String,
    pub(super) table_prefix: String,
    pub(super) create_schema: bool,
    pub(super) connections: u32,
    pub(super) row_locks: u32,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) busy_timeout: Duration,
    pub(super) purge_after: Duration,
}

impl MySqlConfig {
    /// Locks in this database of the server at `host`, which is a name or an address; in the namespace `default`.
    #[must_use]
    pub fn new(host: &str, port: u16, database: &str) -> Self {
        Self::of(MySqlConnectOptions::new().host(host).port(port).database(database))
    }

    /// Locks in this database of the server with this socket.
    #[must_use]
    pub fn unix(socket: impl AsRef<Path>, database: &str) -> Self {
        Self::of(MySqlConnectOptions::new().socket(socket).database(database))
    }

    /// Locks at `mysql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`, or `mariadb://…`. The user is `root` and the port 3306 unless named.
    ///
    /// # Errors
    /// `Misconfigured` if the URL cannot be read. It is not repeated: it may hold a password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        read_url(url).map(Self::of).ok_or_else(|| {
            unusable(
                "the URL cannot be read, or has options, which are set by methods; write \
                 mysql://USER:PASSWORD@HOST:PORT/DATABASE",
            )
        })
    }

    fn of(server: MySqlConnectOptions) -> Self {
        Self {
            server: quiet(server),
            encryption: Encryption::default(),
            namespace: "default".to_owned(),
            table_prefix: "lock_registry".to_owned(),
            create_schema: true,
            connections: 4,
            row_locks: ROW_LOCKS,
            connect_timeout: Duration::from_secs(2),
            response_timeout: Self::RESPONSE_TIMEOUT,
            busy_timeout: Self::BUSY_TIMEOUT,
            purge_after: Self::PURGE_AFTER,
        }
    }

    /// How long a statement may stay unanswered, unless it is set: above the engine's own time-out.
    pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

    /// How long rows of free keys are kept, unless it is set.
    pub const PURGE_AFTER: Duration = Duration::from_secs(60 * 60);

    /// How long a statement waits for a row, unless it is set.
    pub const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

    /// The same as this user, with this password if one is asked for.
    #[must_use]
    pub fn with_login(mut self, user: &str, password: Option<&str>) -> Self {
        self.server = self.server.username(user);
        if let Some(password) = password {
            self.server = self.server.password(password);
        }
        self
    }

    /// The same with connections that are encrypted in this way. [`Encryption::Preferred`] unless set.
    ///
    /// The usual login of MySQL 8 sends the password itself at first, and so needs an encrypted connection, or a server that has
    /// let the user in since it was started.
    #[must_use]
    pub fn with_encryption(mut self, encryption: Encryption) -> Self {
        self.encryption = encryption;
        let mode = match encryption {
            Encryption::Off => MySqlSslMode::Disabled,
            Encryption::Preferred => MySqlSslMode::Preferred,
            Encryption::Required => MySqlSslMode::Required,
            Encryption::VerifyAuthority => MySqlSslMode::VerifyCa,
            Encryption::VerifyHost => MySqlSslMode::VerifyIdentity,
        };
        self.server = self.server.ssl_mode(mode);
        self
    }

    /// The same with servers that are verified against these certificates (PEM) beside the host's authorities, and made out to the
    /// host's name unless [`with_encryption`](Self::with_encryption) says otherwise afterwards. Feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_certificate_authority(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.server = self.server.ssl_ca_from_pem(certificates.into());
        self.with_encryption(Encryption::VerifyHost)
    }

    /// The same with this certificate (PEM), which tells the server who we are; `key` (PEM) is its private key. Feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_client_certificate(
        mut self,
        certificate: impl AsRef<[u8]>,
        key: impl AsRef<[u8]>,
    ) -> Self {
        self.server =
            self.server.ssl_client_cert_from_pem(certificate).ssl_client_key_from_pem(key);
        self
    }

    /// The same with this namespace. Locks of different namespaces never meet, even if their keys are equal. `default` unless set.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// The same with tables whose names begin with this. `lock_registry` unless set.
    #[must_use]
    pub fn with_table_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.table_prefix = prefix.into();
        self
    }

    /// The same with tables that are made if they are missing (or not). They are made unless set.
    #[must_use]
    pub fn with_create_schema(mut self, create: bool) -> Self {
        self.create_schema = create;
        self
    }

    /// The same with at most this many connections. 4 unless set. Two more are opened when they are needed: one each for renewals
    /// and releases that find all of these at work. Connections that do not answer are replaced before they are given up: as many again, and two,
    /// may be open meanwhile.
    #[must_use]
    pub fn with_connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// The same with at most this many locks of a [`MySqlRowBackend`](crate::MySqlRowBackend) held at once, each of which takes a connection more. 16
    /// unless set.
    #[must_use]
    pub fn with_row_locks(mut self, row_locks: u32) -> Self {
        self.row_locks = row_locks;
        self
    }

    /// The same with this time to connect. 2 s unless set.
    #[must_use]
    pub fn with_connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// The same with this patience with unanswered statements, after which the connection counts as dead. 10 s unless set, which is
    /// above the engine's own time-out.
    #[must_use]
    pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
        self.response_timeout = response_timeout;
        self
    }

    /// The same with this patience with rows that other transactions have locked, after which a statement gives up with an error that may
    /// pass. 1 s unless set; the server counts whole seconds, so it is rounded up. A transaction with a [fence](crate::Fence) keeps others
    /// waiting in this way.
    #[must_use]
    pub fn with_busy_timeout(mut self, busy_timeout: Duration) -> Self {
        self.busy_timeout = busy_timeout;
        self
    }

    /// The same with rows of free keys kept for this long. One hour unless set, one minute and twice
    /// [`response_timeout`](Self::with_response_timeout) at least: a statement that began before a key was locked and let go,
    /// and its row deleted, must be over by then, or its token could be the smaller one.
    #[must_use]
    pub fn with_purge_after(mut self, purge_after: Duration) -> Self {
        self.purge_after = purge_after;
        self
    }

    /// Host and port, or the socket, for messages.
    pub(super) fn place(&self) -> String {
        match self.server.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", self.server.get_host(), self.server.get_port()),
        }
    }

    /// Refuses what cannot work, without I/O. Opening a store asks this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first thing that is wrong.
    pub fn check(&self) -> Result<(), BackendError> {
        if self.server.get_database().is_none_or(str::is_empty) {
            return Err(unusable("no database is named; write mysql://HOST/DATABASE"));
        }
        if self.namespace.len() > NAMESPACE_BYTES_MAX {
            return Err(unusable(&format!("a namespace has at most {NAMESPACE_BYTES_MAX} bytes")));
        }
        let prefix = &self.table_prefix;
        if !is_identifier(prefix) {
            return Err(unusable(&format!(
                "the name {prefix:?} for the tables is not of at most {PREFIX_BYTES_MAX} letters (a to z), digits and underscores, \
                 and no digit first"
            )));
        }
        if self.connections == 0 {
            return Err(unusable("there must be at least one connection"));
        }
        for (option, given, least) in [
            ("connect_timeout", self.connect_timeout, TIME_MIN),
            ("response_timeout", self.response_timeout, TIME_MIN),
            ("busy_timeout", self.busy_timeout, TIME_MIN),
            ("purge_after", self.purge_after, PURGE_AFTER_MIN),
        ] {
            if !(least..=TIME_MAX).contains(&given) {
                return Err(unusable(&format!(
                    "{option} of {given:?} is not between {least:?} and 366 days"
                )));
            }
        }
        if self.connections == 0 || self.row_locks == 0 {
            return Err(unusable("there must be at least one connection, and one row lock"));
        }
        if self.busy_timeout >= self.response_timeout {
            return Err(unusable("busy_timeout must be shorter than response_timeout"));
        }
        if self.purge_after < self.response_timeout * 2 {
            return Err(unusable("purge_after must be at least twice as long as response_timeout"));
        }
        if !cfg!(feature = "tls")
            && !matches!(self.encryption, Encryption::Off | Encryption::Preferred)
        {
            return Err(unusable("encrypted connections need the feature `tls`"));
        }
        Ok(())
    }
}

fn is_identifier(name: &str) -> bool {
    name.len() <= PREFIX_BYTES_MAX
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

fn read_url(url: &str) -> Option<MySqlConnectOptions> {
    // The client would take options out of it that weaken what is set here.
    if url.contains(['?', '#']) || !(url.starts_with("mysql://") || url.starts_with("mariadb://")) {
        return None;
    }
    url.parse().ok()
}

/// What sessions are told is told by `link`, once, and in one go.
fn quiet(server: MySqlConnectOptions) -> MySqlConnectOptions {
    server
        .pipes_as_concat(false)
        .no_engine_substitution(false)
        .timezone(None)
        .set_names(false)
        .disable_statement_logging()
}

pub(super) fn unusable(says: &str) -> BackendError {
    BackendError::new(BackendErrorKind::Misconfigured, format!("mysql: {says}")).as_refused()
}

const NAMESPACE_BYTES_MAX: usize = 255;
/// A table's name has at most 64.
const PREFIX_BYTES_MAX: usize = 50;
const TIME_MIN: Duration = Duration::from_millis(10);
const TIME_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

// By hand: the client's options hold a password, and print it.
impl fmt::Debug for MySqlConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlConfig")
            .field("place", &self.place())
            .field("database", &self.server.get_database())
            .field("encryption", &self.encryption)
            .field("namespace", &self.namespace)
            .field("table_prefix", &self.table_prefix)
            .field("create_schema", &self.create_schema)
            .field("connections", &self.connections)
            .field("row_locks", &self.row_locks)
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .field("busy_timeout", &self.busy_timeout)
            .field("purge_after", &self.purge_after)
            .finish_non_exhaustive()
    }
}
