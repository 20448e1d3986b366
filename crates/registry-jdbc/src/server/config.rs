//! The common part of `PostgresConfig` and `MySqlConfig`: the form of URLs, most options, and the
//! limits that depend on each other.

use std::path::PathBuf;
use std::time::Duration;

use registry_core::config::{
    BackendConfig, Host, InvalidValue, Login, OptionError, OptionRow, PemFiles, SERVER_TIME_MIN,
    TIME_MAX, UrlParts, Values, display_host, format_time, parse_choice, parse_count, parse_switch,
    parse_time,
};
use registry_core::{BackendError, RegistryBuilder};

use super::encryption::EncryptionSettings;
use super::{IDLE_TIMEOUT, PURGE_AFTER_MIN, PoolLimits, SpringTable, SqlMode};

/// The options of all database servers, in the order of the tables in the book.
/// [`ServerSettings::assign`] sets their fields.
pub(crate) const OPTIONS: &[OptionRow] = &[
    OptionRow::namespace("`default`"),
    OptionRow::LEASE.with_help(
        "how long a key stays locked after its holder dies; at most `1m` with `mode=session` and `mode=row`",
    ),
    OptionRow::POLL.with_default("`250ms`; with `layout=spring` `100ms`"),
    OptionRow::TIMEOUT,
    OptionRow::layout(&["native", "spring"]),
    OptionRow::CONNECT_TIMEOUT,
    OptionRow::time(
        "busy_timeout",
        (SERVER_TIME_MIN, RegistryBuilder::TIMEOUT_MAX),
        "`1s`, or five sixths of `timeout` if that is shorter",
        "how long a statement waits for a row that another transaction has locked; MariaDB and MySQL round up to whole seconds",
    ),
    OptionRow::time(
        "purge_after",
        (PURGE_AFTER_MIN, TIME_MAX),
        "`1h`; at least twice the longest wait for a response",
        "how long rows of free keys are kept",
    ),
    OptionRow::new(
        "pool",
        Values::Count { min: 1, max: CONNECTIONS_MAX },
        "`4`",
        "the maximum number of connections for statements",
    ),
    OptionRow::new(
        "mode",
        Values::Choice { what: "lock mode", names: &["lease", "session", "row"] },
        "`lease`",
        "whether a lock is a row with a lease, an advisory lock of a connection, or a locked row",
    ),
    OptionRow::new(
        "row_locks",
        Values::Count { min: 1, max: CONNECTIONS_MAX },
        "`16`",
        "with `mode=row`: the maximum number of locks held at once",
    ),
    OptionRow::new(
        "table_prefix",
        Values::Text { bytes_max: PREFIX_BYTES_MAX },
        "`lock_registry`",
        "the prefix of the tables' names: lower-case letters, digits and `_`",
    ),
    OptionRow::new("create_schema", Values::Switch, "`true`", "whether missing tables are created"),
    OptionRow::new(
        "spring",
        Values::Choice { what: "Spring version", names: &["v6", "v7"] },
        "`v7`",
        "with `layout=spring`: the version of Spring Integration. `v6` requires `lease`",
    ),
    OptionRow::new(
        "region",
        Values::Text { bytes_max: 100 },
        "`DEFAULT`",
        "with `layout=spring`: the region, which replaces the namespace",
    ),
    OptionRow::new(
        "prefix",
        Values::Text { bytes_max: 100 },
        "`INT_`",
        "with `layout=spring`: the prefix of `LOCK` in the table's name",
    ),
    EncryptionSettings::SSLMODE,
    PemFiles::CA,
    PemFiles::CERT,
    PemFiles::KEY,
];

/// The maximum of `pool` and `row_locks`. It exceeds the connection limit of any real server.
const CONNECTIONS_MAX: u32 = 10_000;
/// The longest name with this prefix is that of PostgreSQL's trigger `PREFIX_truncated`. PostgreSQL
/// cuts names after 63 bytes.
const PREFIX_BYTES_MAX: usize = 50;

/// Whether opening a store creates missing tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CreateSchema {
    /// Missing tables are created. Existing ones are not changed.
    #[default]
    IfMissing,
    /// The store cannot be opened if its tables are missing. `lockreg schema` prints the statements
    /// that create them.
    Never,
}

/// The settings that the configurations of all database servers contain.
#[derive(Debug, Clone)]
pub(crate) struct ServerSettings {
    address: ServerAddress,
    pub(crate) namespace: String,
    pub(crate) table_prefix: String,
    pub(crate) create_schema: CreateSchema,
    pub(crate) connections: u32,
    pub(crate) row_locks: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) busy_timeout: Duration,
    pub(crate) purge_after: Duration,
    pub(crate) encryption: EncryptionSettings,
    options: GivenOptions,
}

/// The values that depend on each other, as options or methods have set them.
#[derive(Debug, Clone, Default)]
struct GivenOptions {
    is_spring: bool,
    mode: Option<SqlMode>,
    spring_version: Option<SpringVersionOption>,
    spring_region: Option<String>,
    spring_prefix: Option<String>,
    has_namespace: bool,
    has_row_locks: bool,
    lease: Option<Duration>,
    timeout: Option<Duration>,
    busy_timeout: Option<Duration>,
    purge_after: Option<Duration>,
    /// Set only by a method.
    response_timeout: Option<Duration>,
}

/// The value of the option `spring`: the version of Spring Integration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SpringVersionOption {
    /// Version 6 and earlier.
    V6,
    V7,
}

impl ServerSettings {
    // This is longer than the engine's default operation time-out.
    pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
    pub(crate) const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
    pub(crate) const PURGE_AFTER: Duration = Duration::from_secs(60 * 60);

    /// Returns the default settings of a store on this server.
    pub(crate) fn new(address: ServerAddress) -> Self {
        Self {
            address,
            namespace: "default".to_owned(),
            table_prefix: "lock_registry".to_owned(),
            create_schema: CreateSchema::IfMissing,
            connections: 4,
            row_locks: 16,
            connect_timeout: Duration::from_secs(2),
            response_timeout: Self::RESPONSE_TIMEOUT,
            busy_timeout: Self::BUSY_TIMEOUT,
            purge_after: Self::PURGE_AFTER,
            encryption: EncryptionSettings::default(),
            options: GivenOptions::default(),
        }
    }

    /// Sets one of the [`OPTIONS`].
    pub(crate) fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        let options = &mut self.options;
        match name {
            "namespace" => {
                self.namespace = value.to_owned();
                options.has_namespace = true;
            }
            "lease" => options.lease = Some(parse_time(value)?),
            "poll" => {}
            "timeout" => options.timeout = Some(parse_time(value)?),
            "layout" => options.is_spring = value == "spring",
            "connect_timeout" => self.connect_timeout = parse_time(value)?,
            "busy_timeout" => options.busy_timeout = Some(parse_time(value)?),
            "purge_after" => options.purge_after = Some(parse_time(value)?),
            "pool" => self.connections = parse_count(value)?,
            "mode" => {
                let modes = [
                    ("lease", SqlMode::Lease),
                    ("session", SqlMode::Session),
                    ("row", SqlMode::Row),
                ];
                options.mode = Some(parse_choice(value, &modes)?);
            }
            "row_locks" => {
                self.row_locks = parse_count(value)?;
                options.has_row_locks = true;
            }
            "table_prefix" => self.table_prefix = value.to_owned(),
            "create_schema" => {
                self.create_schema = match parse_switch(value)? {
                    true => CreateSchema::IfMissing,
                    false => CreateSchema::Never,
                };
            }
            "spring" => {
                let versions = [("v6", SpringVersionOption::V6), ("v7", SpringVersionOption::V7)];
                options.spring_version = Some(parse_choice(value, &versions)?);
            }
            "region" => options.spring_region = Some(value.to_owned()),
            "prefix" => options.spring_prefix = Some(value.to_owned()),
            _ if self.encryption.assign(name, value)? => {}
            _ => return Err(InvalidValue::unknown_option()),
        }
        self.derive_limits();
        Ok(())
    }

    pub(crate) fn set_response_timeout(&mut self, response_timeout: Duration) {
        self.options.response_timeout = Some(response_timeout);
        self.derive_limits();
    }

    pub(crate) fn set_busy_timeout(&mut self, busy_timeout: Duration) {
        self.options.busy_timeout = Some(busy_timeout);
        self.derive_limits();
    }

    pub(crate) fn set_purge_after(&mut self, purge_after: Duration) {
        self.options.purge_after = Some(purge_after);
        self.derive_limits();
    }

    /// Computes `busy_timeout`, `response_timeout` and `purge_after` from the values that options
    /// or methods have set.
    fn derive_limits(&mut self) {
        let GivenOptions { timeout, busy_timeout, purge_after, response_timeout, .. } =
            self.options;
        self.busy_timeout = match (busy_timeout, timeout) {
            (Some(busy_timeout), _) => busy_timeout,
            // After the operation time-out (`timeout`), the engine treats the outcome of a
            // statement as unknown.
            (None, Some(timeout)) => {
                Self::BUSY_TIMEOUT.min(timeout.saturating_mul(5) / 6).max(SERVER_TIME_MIN)
            }
            (None, None) => Self::BUSY_TIMEOUT,
        };
        // The client must wait longer than a statement can take on the server. After the operation
        // time-out (`timeout`), the engine treats the outcome of a statement as unknown.
        let longest = self.busy_timeout.max(timeout.unwrap_or_default());
        let derived = Self::RESPONSE_TIMEOUT.max(longest.saturating_mul(6) / 5);
        self.response_timeout = response_timeout.unwrap_or(derived);
        // A row must be kept until every statement that could have read it has timed out.
        let default = Self::PURGE_AFTER.max(self.response_timeout.saturating_mul(2));
        self.purge_after = purge_after.unwrap_or(default);
    }

    /// Checks the settings together. Also checks each value, because the methods `with_*` do not
    /// check their values.
    pub(crate) fn validate(&self, config: &dyn BackendConfig) -> Result<(), OptionError> {
        self.options.validate()?;
        if !is_valid_table_prefix(&self.table_prefix) {
            return Err(OptionError::new(
                "table_prefix",
                format!(
                    "is {:?}; the tables' prefix must be 1 to {PREFIX_BYTES_MAX} lower-case letters, digits and underscores, without a leading digit",
                    self.table_prefix
                ),
            ));
        }
        OptionError::check_not_empty("namespace", &self.namespace)?;
        config.check_value("namespace", &self.namespace)?;
        config.check_value("pool", &self.connections.to_string())?;
        config.check_value("row_locks", &self.row_locks.to_string())?;
        for (option, value) in [
            ("connect_timeout", self.connect_timeout),
            ("busy_timeout", self.busy_timeout),
            ("purge_after", self.purge_after),
        ] {
            config.check_value(option, &format_time(value))?;
        }
        self.check_limits()?;
        self.encryption.validate(config.kind().name)
    }

    fn check_limits(&self) -> Result<(), OptionError> {
        let limits = SERVER_TIME_MIN..=TIME_MAX;
        OptionError::check_time("response_timeout", self.response_timeout, &limits)?;
        if self.busy_timeout >= self.response_timeout {
            return Err(OptionError::new(
                "busy_timeout",
                format!(
                    "is {}, not shorter than the `response_timeout` {}",
                    format_time(self.busy_timeout),
                    format_time(self.response_timeout)
                ),
            ));
        }
        let purge_after_min = self.response_timeout.saturating_mul(2);
        if self.purge_after < purge_after_min {
            return Err(OptionError::new(
                "purge_after",
                format!(
                    "is {}, less than {}, twice the longest wait for a response (response_timeout)",
                    format_time(self.purge_after),
                    format_time(purge_after_min)
                ),
            ));
        }
        Ok(())
    }

    /// Returns the lock mode that the options select.
    pub(crate) fn mode(&self) -> SqlMode {
        self.options.mode()
    }

    /// Returns the default poll interval for Spring's table, or `None` for the native tables.
    /// Spring peers send no release notifications, so the interval is shorter than the engine's
    /// default. It equals the default of Spring's `idleBetweenTries`.
    pub(crate) fn poll(&self) -> Option<Duration> {
        self.options.is_spring.then_some(Duration::from_millis(100))
    }

    pub(crate) fn hosts(&self) -> Vec<Host> {
        match &self.address {
            ServerAddress::Host(host) => vec![host.clone()],
            ServerAddress::Socket(_) => Vec::new(),
        }
    }

    /// Returns `HOST:PORT` of the server, or the path of its socket.
    pub(crate) fn address(&self) -> String {
        match &self.address {
            ServerAddress::Host(host) => display_host(host),
            ServerAddress::Socket(path) => path.display().to_string(),
        }
    }

    pub(crate) fn pool_limits(&self) -> PoolLimits {
        PoolLimits {
            connections: self.connections,
            connect_timeout: self.connect_timeout,
            acquire_timeout: self.response_timeout,
            response_timeout: self.response_timeout,
            row_lock_timeout: self.busy_timeout,
        }
    }
}

impl GivenOptions {
    /// Returns the lock mode.
    fn mode(&self) -> SqlMode {
        if !self.is_spring {
            return self.mode.clone().unwrap_or(SqlMode::Lease);
        }
        let mut table = match (self.spring_version, self.lease) {
            (Some(SpringVersionOption::V6), Some(lease)) => SpringTable::v6(lease),
            _ => SpringTable::v7(),
        };
        if let Some(region) = &self.spring_region {
            table = table.with_region(region);
        }
        if let Some(prefix) = &self.spring_prefix {
            table = table.with_prefix(prefix);
        }
        SqlMode::Spring(table)
    }

    /// Checks the options together.
    fn validate(&self) -> Result<(), OptionError> {
        self.check_spring()?;
        if self.has_row_locks && !matches!(self.mode, Some(SqlMode::Row)) {
            return Err(OptionError::new(
                "row_locks",
                "has no effect without `mode=row`; set `mode=row` or remove the option",
            ));
        }
        // The engine checks the same limit, but only after the store was opened.
        match (self.lease, &self.mode) {
            (Some(lease), Some(SqlMode::Session | SqlMode::Row)) if lease > IDLE_TIMEOUT => {
                Err(OptionError::new(
                    "lease",
                    format!(
                        "is {}, more than the maximum {} with `mode=session` and `mode=row`",
                        format_time(lease),
                        format_time(IDLE_TIMEOUT)
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Checks the options of `layout=spring`, and refuses them in other layouts.
    fn check_spring(&self) -> Result<(), OptionError> {
        if !self.is_spring {
            let options = [
                ("spring", self.spring_version.is_some()),
                ("region", self.spring_region.is_some()),
                ("prefix", self.spring_prefix.is_some()),
            ];
            return match options.iter().find(|(_, is_set)| *is_set) {
                Some((option, _)) => Err(OptionError::new(
                    option,
                    "has no effect without `layout=spring`; set `layout=spring` or remove the option",
                )),
                None => Ok(()),
            };
        }
        if matches!(self.mode, Some(SqlMode::Session | SqlMode::Row)) {
            let problem = "must be `lease` with `layout=spring`; leave `mode` out";
            return Err(OptionError::new("mode", problem));
        }
        if self.has_namespace {
            let problem = "has no effect with `layout=spring`; set `region` instead";
            return Err(OptionError::new("namespace", problem));
        }
        if self.spring_version == Some(SpringVersionOption::V6) && self.lease.is_none() {
            return Err(OptionError::new(
                "spring",
                "is v6, which requires `lease`; set `lease` to the `timeToLive` of the peers (10s by default)",
            ));
        }
        if let SqlMode::Spring(table) = self.mode() {
            table.check().map_err(OptionError::general)?;
        }
        Ok(())
    }
}

/// Implements the methods that the configurations of all database servers share. Each configuration
/// has the fields `server` (the connection `$options` of sqlx) and `settings` (`ServerSettings`).
macro_rules! server_config {
    ($config:ident, $options:ident) => {
        impl $config {
            /// The default time limit for a response. It is longer than the engine's default
            /// operation time-out.
            pub const RESPONSE_TIMEOUT: Duration = ServerSettings::RESPONSE_TIMEOUT;

            /// The default time for which rows of free keys are kept.
            pub const PURGE_AFTER: Duration = ServerSettings::PURGE_AFTER;

            /// The default time limit for waiting for a row that another transaction has locked.
            pub const BUSY_TIMEOUT: Duration = ServerSettings::BUSY_TIMEOUT;

            /// Sets the user and, if given, the password. The password is sent only if the server
            /// requests one.
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
            /// The default authentication of MySQL 8 sends the password itself, unless the server
            /// has already authenticated the user since its start. To send the password, the
            /// connection must be encrypted.
            ///
            /// [`Encryption::Preferred`]: crate::Encryption::Preferred
            #[must_use]
            pub fn with_encryption(mut self, encryption: crate::Encryption) -> Self {
                self.settings.encryption.set(encryption);
                self
            }

            /// Trusts these certificates (PEM) in addition to the host's authorities. Feature
            /// `tls`.
            ///
            /// Also sets [`Encryption::VerifyHost`]; a later call of
            /// [`with_encryption`](Self::with_encryption) overrides that.
            ///
            /// [`Encryption::VerifyHost`]: crate::Encryption::VerifyHost
            #[cfg(feature = "tls")]
            #[must_use]
            pub fn with_certificate_authority(mut self, certificates: impl Into<Vec<u8>>) -> Self {
                self.settings.encryption.set_authority(certificates.into());
                self
            }

            /// Sets the client certificate (PEM) and its private key (PEM), which identify this
            /// program to the server. Feature `tls`.
            ///
            /// Also sets [`Encryption::Required`], unless the encryption was set before; a later
            /// call of [`with_encryption`](Self::with_encryption) overrides that.
            ///
            /// [`Encryption::Required`]: crate::Encryption::Required
            #[cfg(feature = "tls")]
            #[must_use]
            pub fn with_client_certificate(
                mut self,
                certificate: impl AsRef<[u8]>,
                key: impl AsRef<[u8]>,
            ) -> Self {
                let (certificate, key) = (certificate.as_ref().to_vec(), key.as_ref().to_vec());
                self.settings.encryption.set_client(certificate, key);
                self
            }

            /// Sets the namespace. Locks of different namespaces are independent, even if their
            /// keys are equal. Default: `default`.
            #[must_use]
            pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
                self.settings.namespace = namespace.into();
                self
            }

            /// Sets the prefix of the table names. Default: `lock_registry`.
            #[must_use]
            pub fn with_table_prefix(mut self, prefix: impl Into<String>) -> Self {
                self.settings.table_prefix = prefix.into();
                self
            }

            /// Sets whether missing tables are created. Default: [`CreateSchema::IfMissing`].
            ///
            /// [`CreateSchema::IfMissing`]: crate::CreateSchema::IfMissing
            #[must_use]
            pub fn with_create_schema(mut self, create_schema: crate::CreateSchema) -> Self {
                self.settings.create_schema = create_schema;
                self
            }

            /// Sets the maximum number of connections for statements. Default: 4.
            ///
            /// When all connections are busy, renewals may open one additional connection, and
            /// releases another. A connection that does not answer is replaced before it is closed.
            /// So the pool may have up to `2 * (connections + 2)` open connections for a short
            /// time. PostgreSQL's listener has one more connection, which is not in the pool.
            #[must_use]
            pub fn with_connections(mut self, connections: u32) -> Self {
                self.settings.connections = connections;
                self
            }

            /// Sets the maximum number of locks that are held at once in the mode
            /// [`Row`](crate::SqlMode::Row). Each held lock takes one additional connection.
            /// Default: 16.
            #[must_use]
            pub fn with_row_locks(mut self, row_locks: u32) -> Self {
                self.settings.row_locks = row_locks;
                self
            }

            /// Sets the time limit for connecting. Default: 2 s.
            #[must_use]
            pub fn with_connect_timeout(mut self, connect_timeout: Duration) -> Self {
                self.settings.connect_timeout = connect_timeout;
                self
            }

            /// Sets the time limit for a response. After this time, the store closes the
            /// connection.
            ///
            /// Default: 10 s, which is longer than the engine's default operation time-out. If six
            /// fifths of `busy_timeout` or of the option `timeout` are longer, they are the
            /// default.
            #[must_use]
            pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
                self.settings.set_response_timeout(response_timeout);
                self
            }

            /// Sets how long a statement waits for a row that another transaction has locked.
            /// Default: 1 s, or five sixths of the option `timeout` if that is shorter. MariaDB and
            /// MySQL round up to whole seconds.
            ///
            /// After this time, the statement fails with a transient error. A transaction with a
            /// [fence](crate::Fence), for example, keeps such a row locked until it ends.
            #[must_use]
            pub fn with_busy_timeout(mut self, busy_timeout: Duration) -> Self {
                self.settings.set_busy_timeout(busy_timeout);
                self
            }

            /// Sets how long rows of free keys are kept. Default: one hour, or twice
            /// [`response_timeout`](Self::with_response_timeout) if that is longer.
            ///
            /// Must be at least one minute, and at least twice
            /// [`response_timeout`](Self::with_response_timeout). Otherwise a statement could
            /// outlast an acquisition, a release and the deletion of the row, and then issue a
            /// smaller token.
            #[must_use]
            pub fn with_purge_after(mut self, purge_after: Duration) -> Self {
                self.settings.set_purge_after(purge_after);
                self
            }

            /// Checks the configuration without I/O. Opening a store calls this first.
            ///
            /// # Errors
            /// [`BackendError`], `Misconfigured`, for the first invalid setting.
            pub fn check(&self) -> Result<(), BackendError> {
                self.validate().map_err(|error| error.into_backend_error(STORE.name))
            }

            /// Returns the client's connection options for statements.
            pub(crate) fn connect_options(&self) -> $options {
                self.settings.encryption.apply_to(self.server.clone())
            }
        }
    };
}
pub(crate) use server_config;

/// The server of a URL.
pub(crate) struct ServerUrl {
    pub(crate) address: ServerAddress,
    /// The port. It is also part of the name of PostgreSQL's socket.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "only PostgreSQL's sockets have a port")
    )]
    pub(crate) port: u16,
    /// The name of the database. Empty if the URL has none.
    pub(crate) database: String,
    pub(crate) login: Option<Login>,
}

#[derive(Debug, Clone)]
pub(crate) enum ServerAddress {
    Host(Host),
    /// A path on this host: PostgreSQL's socket directory, or the socket of MariaDB or MySQL.
    Socket(PathBuf),
}

impl ServerUrl {
    /// Parses `SCHEME://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`. The slashes of a socket are
    /// `%2F`.
    pub(crate) fn parse(url: &UrlParts<'_>, default_port: u16) -> Result<Self, BackendError> {
        let syntax = syntax(url);
        let (login, host) = url.login_and_hosts(&syntax)?;
        let database = url.path.strip_prefix('/').unwrap_or_default();
        if database.contains('/') {
            return Err(
                url.invalid("contains a `/` in the name of the database; write it as `%2F`")
            );
        }
        if login.as_ref().is_some_and(|login| login.user.expose().is_empty()) {
            return Err(url.invalid("contains a password without a user; write `USER:PASSWORD@`"));
        }
        let database = url.text(database, "a database")?;
        if database.contains('\0') {
            return Err(url.invalid("contains a NUL character in the name of the database"));
        }
        let (address, port) = if host
            .get(..3)
            .is_some_and(|start| start.eq_ignore_ascii_case("%2f"))
        {
            let (socket, port) = match host.split_once(':') {
                Some((socket, port)) => (socket, port.parse().ok().filter(|port| *port != 0)),
                None => (host, Some(default_port)),
            };
            let port = port.ok_or_else(|| url.invalid_host())?;
            let socket = match &*url.scheme {
                // The path of PostgreSQL's socket directory may end in a slash.
                "postgres" | "postgresql" => socket.trim_end_matches("%2F").trim_end_matches("%2f"),
                _ => socket,
            };
            (ServerAddress::Socket(url.file_path(socket, &syntax)?), port)
        } else if host.contains(',') {
            return Err(url.invalid(
                "contains several servers; write one host, such as a DNS name of the primary",
            ));
        } else {
            let (name, port) = url.host(host, default_port)?;
            (ServerAddress::Host((name, port)), port)
        };
        Ok(Self { address, port, database, login })
    }
}

/// Returns an error if the URL has no database.
pub(crate) fn require_database(url: &UrlParts<'_>) -> Result<(), BackendError> {
    if matches!(url.path, "" | "/") { Err(no_database(url)) } else { Ok(()) }
}

fn no_database(url: &UrlParts<'_>) -> BackendError {
    url.invalid(&format!("contains no database; {}", syntax(url)))
}

/// Returns the expected form of the URL, for errors.
fn syntax(url: &UrlParts<'_>) -> String {
    format!("write `{}://USER:PASSWORD@HOST:PORT/DATABASE`", url.scheme)
}

fn is_valid_table_prefix(name: &str) -> bool {
    name.len() <= PREFIX_BYTES_MAX
        // Table names are not quoted, so a server may convert capital letters to lower case.
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

#[cfg(all(test, feature = "postgres", feature = "mysql"))]
mod tests {
    use registry_core::config::StoreKind;

    use crate::stores::{MYSQL, POSTGRES};

    use super::*;

    fn parse(store: &StoreKind, url: &str) -> Result<Box<dyn BackendConfig>, BackendError> {
        (store.parse)(&UrlParts::split(url).expect("the URL has a scheme"))
    }

    #[test]
    fn a_url_contains_host_port_and_database() {
        for (store, url, address, database) in [
            (&POSTGRES, "postgres://db/shop", "db:5432", "shop"),
            (&POSTGRES, "postgresql://db.example.com:6432/shop", "db.example.com:6432", "shop"),
            (&POSTGRES, "postgres://[::1]/a%20b", "[::1]:5432", "a b"),
            (&POSTGRES, "postgres://%2Frun%2Fpg/shop", "/run/pg", "shop"),
            (&POSTGRES, "postgres://u@%2frun%2fpg:1/shop", "/run/pg", "shop"),
            (&POSTGRES, "postgres://%2Frun%2Fpg%2F/shop", "/run/pg", "shop"),
            (&POSTGRES, "postgres://%2frun%2fpg%2f:1/shop", "/run/pg", "shop"),
            (&MYSQL, "mysql://db/shop", "db:3306", "shop"),
            (&MYSQL, "mariadb://u:p@db:3307/shop", "db:3307", "shop"),
            (&MYSQL, "mysql://%2Frun%2Fdb.sock/shop", "/run/db.sock", "shop"),
        ] {
            let config = parse(store, url).unwrap_or_else(|error| panic!("{url}: {error}"));
            assert_eq!(config.address(), address, "{url}");
            assert_eq!(config.hosts().is_empty(), address.starts_with('/'), "{url}");
            assert!(format!("{config:?}").contains(&format!("{database:?}")), "{config:?}");
        }
    }

    #[test]
    fn user_and_password_are_decoded_and_redacted() {
        for (url, user, password) in [
            ("postgres://worker@db/x", "worker", None),
            ("postgres://worker:secret@db/x", "worker", Some("secret")),
            ("postgres://w%40rk:p%2Fa%3As%25@db/x", "w@rk", Some("p/a:s%")),
        ] {
            let server = ServerUrl::parse(&UrlParts::split(url).unwrap(), 1).unwrap();
            let login = server.login.unwrap();
            assert_eq!(login.user.expose(), user);
            assert_eq!(login.password.as_ref().map(|password| password.expose()), password);
            let config = parse(&POSTGRES, url).unwrap();
            let output = format!("{login:?}{config:?}{config:#?}");
            assert!(
                !output.contains(user) && password.is_none_or(|p| !output.contains(p)),
                "{output}"
            );
        }
    }

    #[test]
    fn an_error_about_a_url_without_a_database_contains_a_hint() {
        for (url, hint) in [
            ("postgres:", "contains no server"),
            ("postgres://db", "contains no database"),
            ("postgres://db/", "contains no database"),
            ("postgres://db/a/b", "`%2F`"),
            ("postgres:///x", "no valid host"),
            ("postgres://db:0/x", "no valid host"),
            ("postgres://a,b/x", "several servers"),
            ("postgres://:p@db/x", "without a user"),
            ("postgres://u:p@p@db/x", "`%40`"),
        ] {
            let error = parse(&POSTGRES, url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url}: {error}");
        }
    }

    #[test]
    fn an_error_names_the_scheme_of_the_url() {
        let error = parse(&MYSQL, "mariadb://db").unwrap_err().to_string();
        assert!(error.contains("`mariadb://USER"), "{error}");
    }
}
