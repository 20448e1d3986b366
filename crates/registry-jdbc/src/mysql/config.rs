//! Configuration of a MariaDB or MySQL store: how to reach the server, and where the locks are.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use registry_core::config::{
    self, BackendConfig, Host, InvalidValue, OptionError, StoreKind, UrlParts, display_host,
    parse_count, parse_time,
};
use registry_core::{BackendError, BackendErrorKind};
use sqlx::ConnectOptions as _;
use sqlx::mysql::{MySqlConnectOptions, MySqlSslMode};

use crate::server::config::{
    Limits, OPTIONS, PREFIX_BYTES_MAX, ServerAddress, ServerUrl, SharedFields, SqlOptions,
    require_database,
};
use crate::server::{CreateSchema, Encryption, ROW_LOCKS};

/// MariaDB and MySQL.
pub static STORE: StoreKind = StoreKind::new("mysql", &[OPTIONS], |url| {
    let config = MySqlConfig::parse(url)?;
    require_database(url)?;
    Ok(Box::new(config))
});

/// The server, the tables and the time limits of a [`MySqlBackend`](crate::MySqlBackend).
#[derive(Clone)]
#[non_exhaustive]
pub struct MySqlConfig {
    pub(super) server: MySqlConnectOptions,
    pub(super) encryption: Encryption,
    pub(super) namespace: String,
    pub(super) table_prefix: String,
    pub(super) create_schema: CreateSchema,
    pub(super) connections: u32,
    pub(super) row_locks: u32,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) busy_timeout: Duration,
    pub(super) purge_after: Duration,
    pub(super) options: SqlOptions,
}

impl MySqlConfig {
    /// Returns a configuration for this database of the server at `host`, a name or an address. The
    /// namespace is `default`.
    #[must_use]
    pub fn new(host: &str, port: u16, database: &str) -> Self {
        Self::with_server(MySqlConnectOptions::new().host(host).port(port).database(database))
    }

    /// Returns a configuration for this database of the server with this Unix socket.
    #[must_use]
    pub fn unix(socket: impl AsRef<Path>, database: &str) -> Self {
        Self::with_server(MySqlConnectOptions::new().socket(socket).database(database))
    }

    /// Parses `mysql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`, or `mariadb://…`. HOST may be a
    /// Unix socket, with `%2F` for its slashes. The default user is `root`, the default port 3306.
    ///
    /// # Errors
    /// `Misconfigured` if the URL is invalid. The error does not contain the URL, which may hold a
    /// password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        config::from_url(url, &[], Self::parse)
    }

    fn parse(url: &UrlParts<'_>) -> Result<Self, BackendError> {
        if !matches!(&*url.scheme, "mysql" | "mariadb") {
            return Err(url.invalid("has no scheme of MySQL; use `mysql` or `mariadb`"));
        }
        let parsed = ServerUrl::parse(url, PORT)?;
        let config = match parsed.address {
            ServerAddress::Host((host, port)) => Self::new(&host, port, &parsed.database),
            ServerAddress::Socket(socket, _) => Self::unix(socket, &parsed.database),
        };
        Ok(match parsed.login {
            Some(login) => {
                let password = login.password.as_ref().map(config::Secret::expose);
                config.with_login(login.user.expose(), password)
            }
            None => config,
        })
    }

    fn with_server(server: MySqlConnectOptions) -> Self {
        Self {
            server: without_session_settings(server),
            encryption: Encryption::default(),
            namespace: "default".to_owned(),
            table_prefix: "lock_registry".to_owned(),
            create_schema: CreateSchema::IfMissing,
            connections: 4,
            row_locks: ROW_LOCKS,
            connect_timeout: Duration::from_secs(2),
            response_timeout: Self::RESPONSE_TIMEOUT,
            busy_timeout: Self::BUSY_TIMEOUT,
            purge_after: Self::PURGE_AFTER,
            options: SqlOptions::default(),
        }
    }

    /// The default of [`with_response_timeout`](Self::with_response_timeout), above the engine's
    /// own timeout.
    pub const RESPONSE_TIMEOUT: Duration = Limits::DEFAULT.response_timeout;

    /// The default of [`with_purge_after`](Self::with_purge_after).
    pub const PURGE_AFTER: Duration = Limits::DEFAULT.purge_after;

    /// The default of [`with_busy_timeout`](Self::with_busy_timeout).
    pub const BUSY_TIMEOUT: Duration = Limits::DEFAULT.busy_timeout;

    /// Sets the user, and the password if there is one.
    #[must_use]
    pub fn with_login(mut self, user: &str, password: Option<&str>) -> Self {
        self.server = self.server.username(user);
        if let Some(password) = password {
            self.server = self.server.password(password);
        }
        self
    }

    /// Sets how connections are encrypted. Default: [`Encryption::Preferred`].
    ///
    /// The default authentication of MySQL 8 sends the password itself at first. It needs an
    /// encrypted connection, or a server that has authenticated the user since it was started.
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

    /// Trusts these certificate authorities (PEM) in addition to the host's. Also verifies that the
    /// server's certificate names the host, unless [`with_encryption`](Self::with_encryption) is
    /// called afterwards. Feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_certificate_authority(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.server = self.server.ssl_ca_from_pem(certificates.into());
        self.with_encryption(Encryption::VerifyHost)
    }

    /// Sets the client certificate (PEM) and its private key `key` (PEM). Feature `tls`.
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

    /// Sets the namespace. Equal keys in different namespaces are different locks. Default:
    /// `default`.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets the prefix of the tables' names. Default: `lock_registry`.
    #[must_use]
    pub fn with_table_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.table_prefix = prefix.into();
        self
    }

    /// Sets whether missing tables are created. Default: [`CreateSchema::IfMissing`].
    #[must_use]
    pub fn with_create_schema(mut self, create_schema: CreateSchema) -> Self {
        self.create_schema = create_schema;
        self
    }

    /// Sets the maximum number of connections. Default: 4. If all are in use, one more is opened
    /// for renewals and one for releases. Connections that do not answer are replaced before they
    /// are closed, so the number can briefly double.
    #[must_use]
    pub fn with_connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// Sets the maximum number of locks that are held at once in the mode
    /// [`Row`](crate::SqlMode::Row). Each takes one more connection. Default: 16.
    #[must_use]
    pub fn with_row_locks(mut self, row_locks: u32) -> Self {
        self.row_locks = row_locks;
        self
    }

    /// Sets the time limit for connecting. Default: 2 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// Sets how long a statement may stay unanswered, after which its connection is closed.
    /// Default: 10 s, which is above the engine's own timeout.
    #[must_use]
    pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
        self.response_timeout = response_timeout;
        self
    }

    /// Sets how long a statement waits for a row that another transaction has locked. After that it
    /// returns a retryable error. Default: 1 s. The server counts whole seconds, so the value is
    /// rounded up. A transaction with a [fence](crate::Fence) locks rows in this way.
    #[must_use]
    pub fn with_busy_timeout(mut self, busy_timeout: Duration) -> Self {
        self.busy_timeout = busy_timeout;
        self
    }

    /// Sets how long rows of free keys are kept. Default: one hour. The minimum is one minute, and
    /// twice [`response_timeout`](Self::with_response_timeout).
    ///
    /// A statement may begin before a key is locked and released and its row deleted. It must end
    /// within this time, or its token could be smaller than the released one.
    #[must_use]
    pub fn with_purge_after(mut self, purge_after: Duration) -> Self {
        self.purge_after = purge_after;
        self
    }

    /// Returns host and port, or the socket, for messages.
    pub(super) fn address(&self) -> String {
        match self.server.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", self.server.get_host(), self.server.get_port()),
        }
    }

    /// Validates the configuration without I/O. Opening a store calls this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first invalid value.
    pub fn check(&self) -> Result<(), BackendError> {
        self.validate().map_err(|error| misconfigured(&error.to_string()))
    }

    fn shared_fields(&self) -> SharedFields<'_> {
        SharedFields {
            namespace: &self.namespace,
            connections: self.connections,
            row_locks: self.row_locks,
            connect_timeout: self.connect_timeout,
            limits: Limits {
                busy_timeout: self.busy_timeout,
                response_timeout: self.response_timeout,
                purge_after: self.purge_after,
            },
            encryption: self.encryption,
        }
    }

    /// Returns this configuration with the files and the encryption of its options.
    pub(super) fn with_encryption_options(mut self) -> Result<Self, BackendError> {
        let encryption = self.options.encryption("mysql")?;
        #[cfg(feature = "tls")]
        {
            let pem = self.options.pem_files.read("mysql")?;
            if let Some(ca) = pem.ca {
                self = self.with_certificate_authority(ca);
            }
            if let Some((certificate, key)) = pem.client {
                self = self.with_client_certificate(certificate, key);
            }
        }
        if let Some(encryption) = encryption {
            self = self.with_encryption(encryption);
        }
        Ok(self)
    }
}

impl BackendConfig for MySqlConfig {
    fn kind(&self) -> &'static StoreKind {
        &STORE
    }

    fn scheme(&self) -> &'static str {
        "mysql"
    }

    fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        match name {
            "namespace" => self.namespace = value.to_owned(),
            "table_prefix" => self.table_prefix = value.to_owned(),
            "create_schema" => self.create_schema = CreateSchema::parse(value)?,
            "pool" => self.connections = parse_count(value)?,
            "row_locks" => self.row_locks = parse_count(value)?,
            "connect_timeout" => self.connect_timeout = parse_time(value)?,
            _ if STORE.option(name, self.scheme()).is_none() => {
                return Err(InvalidValue::unknown_option());
            }
            _ => {}
        }
        self.options.assign(name, value)?;
        if let Some(limits) = self.options.limits() {
            self.busy_timeout = limits.busy_timeout;
            self.response_timeout = limits.response_timeout;
            self.purge_after = limits.purge_after;
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), OptionError> {
        if self.server.get_database().is_none_or(str::is_empty) {
            return Err(OptionError::general(
                "the URL names no database; write mysql://HOST/DATABASE",
            ));
        }
        self.options.validate()?;
        let prefix = &self.table_prefix;
        if !is_identifier(prefix) {
            return Err(OptionError::new(
                "table_prefix",
                format!(
                    "is {prefix:?}; the tables' prefix must have at most {PREFIX_BYTES_MAX} lower-case letters, digits and underscores, and no leading digit"
                ),
            ));
        }
        self.shared_fields().validate(self)
    }

    fn hosts(&self) -> Vec<Host> {
        match self.server.get_socket() {
            Some(_) => Vec::new(),
            None => vec![(self.server.get_host().to_owned(), self.server.get_port())],
        }
    }

    fn address(&self) -> String {
        match self.server.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => self.hosts().iter().map(display_host).collect(),
        }
    }

    fn poll(&self) -> Option<Duration> {
        self.options.poll()
    }
}

fn is_identifier(name: &str) -> bool {
    name.len() <= PREFIX_BYTES_MAX
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Turns off the session settings of the client: `client` sends all of them in one statement.
fn without_session_settings(server: MySqlConnectOptions) -> MySqlConnectOptions {
    server
        .pipes_as_concat(false)
        .no_engine_substitution(false)
        .timezone(None)
        .set_names(false)
        .disable_statement_logging()
}

pub(super) fn misconfigured(message: &str) -> BackendError {
    BackendError::new(BackendErrorKind::Misconfigured, format!("mysql: {message}")).as_refused()
}

/// Default port of MariaDB and MySQL.
const PORT: u16 = 3_306;

// Implemented manually: the derived output of the client's options would include the password.
impl fmt::Debug for MySqlConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlConfig")
            .field("address", &self.address())
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
