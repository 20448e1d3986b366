//! The configuration of the PostgreSQL stores: server, tables, limits and time-outs. Opens no
//! connection. Applications build it; `open`, `client` and the listener read it.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use registry_core::config::{
    self, BackendConfig, Host, InvalidValue, OptionError, OptionRow, StoreKind, UrlParts, Values,
    display_host, parse_count, parse_switch, parse_time,
};
use registry_core::{BackendError, BackendErrorKind};
use sqlx::ConnectOptions as _;
use sqlx::postgres::{PgConnectOptions, PgSslMode};

use super::statement::QueryMode;
use crate::server::config::{
    Limits, OPTIONS, PREFIX_BYTES_MAX, ServerAddress, ServerUrl, SharedFields, SqlOptions,
    require_database,
};
use crate::server::{CreateSchema, Encryption, ROW_LOCKS};

/// PostgreSQL.
pub static STORE: StoreKind = StoreKind::new("postgres", &[OPTIONS, POSTGRES_OPTIONS], |url| {
    let config = PostgresConfig::parse(url)?;
    require_database(url)?;
    Ok(Box::new(config))
});

/// The options that other database servers do not have. `PostgresConfig::assign` sets their fields.
const POSTGRES_OPTIONS: &[OptionRow] = &[
    OptionRow::new(
        "schema",
        Values::Text { bytes_max: IDENTIFIER_BYTES_MAX },
        "where `search_path` finds the tables, else its first schema",
        "the schema of the tables",
    ),
    OptionRow::new(
        "prepared",
        Values::Switch,
        "`true`",
        "whether the server keeps prepared statements; `false` behind a pooler of transactions",
    ),
    OptionRow::new(
        "listen",
        Values::Secret { shown: &["off"], form: "a `postgres:` URL without options" },
        "the store's URL; with `prepared=false` `off`",
        "a direct connection, past any pooler, that receives release notifications; percent-encoded in the query of a URL",
    ),
];

/// The configuration of a [`PostgresBackend`](crate::PostgresBackend) and of the other PostgreSQL
/// stores.
#[derive(Clone)]
#[non_exhaustive]
pub struct PostgresConfig {
    pub(super) server: PgConnectOptions,
    pub(super) encryption: Encryption,
    #[cfg(feature = "tls")]
    tls_identity: TlsIdentity,
    pub(super) listen: Listen,
    pub(super) namespace: String,
    pub(super) tables: TableOptions,
    pub(super) connections: u32,
    pub(super) row_locks: u32,
    pub(super) statements: StatementMode,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    pub(super) busy_timeout: Duration,
    pub(super) purge_after: Duration,
    pub(super) options: SqlOptions,
}

/// Whether the server keeps statements prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StatementMode {
    /// Each connection prepares a statement once.
    #[default]
    Prepared,
    /// Statements are sent as plain text.
    ///
    /// Use this mode behind a pooler that gives each transaction another connection, such as
    /// `PgBouncer` with `pool_mode = transaction`. Then there is no listener unless
    /// [`with_listen`](PostgresConfig::with_listen) sets its URL.
    Unprepared,
}

/// Trusted certificates and the client's own certificate, all in PEM.
#[cfg(feature = "tls")]
#[derive(Clone, Default)]
struct TlsIdentity {
    authority: Option<Vec<u8>>,
    /// The certificate and its private key.
    client: Option<(Vec<u8>, Vec<u8>)>,
}

#[cfg(feature = "tls")]
impl TlsIdentity {
    fn apply_to(&self, mut server: PgConnectOptions) -> PgConnectOptions {
        if let Some(authority) = &self.authority {
            server = server.ssl_root_cert_from_pem(authority.clone());
        }
        if let Some((certificate, key)) = &self.client {
            server = server.ssl_client_cert_from_pem(certificate).ssl_client_key_from_pem(key);
        }
        server
    }
}

/// Where the listener receives release notifications.
#[derive(Clone)]
pub(super) enum Listen {
    /// From the server that receives the statements.
    SameServer,
    /// From another address, which bypasses the pooler of the statements.
    OtherServer(Box<PgConnectOptions>),
    /// Nowhere: waiting callers poll.
    Off,
}

/// The names of the tables, and whether the store creates them.
#[derive(Debug, Clone)]
pub(super) struct TableOptions {
    pub(super) schema: Option<String>,
    pub(super) prefix: String,
    pub(super) create: CreateSchema,
}

impl PostgresConfig {
    /// Returns a configuration for this database of the server at `host`, which is a name or an
    /// address. The namespace is `default`.
    #[must_use]
    pub fn new(host: &str, port: u16, database: &str) -> Self {
        Self::with_server(default_options().host(host).port(port).database(database))
    }

    /// Returns a configuration for this database of the server whose Unix sockets are in `folder`.
    #[must_use]
    pub fn unix(folder: impl AsRef<Path>, port: u16, database: &str) -> Self {
        let server = default_options().socket(folder.as_ref());
        Self::with_server(server.port(port).database(database))
    }

    /// Parses `postgres://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`.
    ///
    /// HOST may be a directory of Unix sockets, with `%2F` for its slashes. Defaults: the user of
    /// this process, no password, port 5432, and the database with the user's name. Environment
    /// variables such as `PGPASSWORD` and password files are ignored, because they may belong to
    /// another server.
    ///
    /// # Errors
    /// `Misconfigured` if the URL cannot be parsed. The error does not repeat the URL, which may
    /// contain a password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        config::from_url(url, &[], Self::parse)
    }

    fn parse(url: &UrlParts<'_>) -> Result<Self, BackendError> {
        parse_server(url).map(Self::with_server)
    }

    fn with_server(server: PgConnectOptions) -> Self {
        Self {
            server: with_fixed_options(server),
            encryption: Encryption::default(),
            #[cfg(feature = "tls")]
            tls_identity: TlsIdentity::default(),
            listen: Listen::SameServer,
            namespace: "default".to_owned(),
            tables: TableOptions {
                schema: None,
                prefix: "lock_registry".to_owned(),
                create: CreateSchema::IfMissing,
            },
            connections: 4,
            row_locks: ROW_LOCKS,
            statements: StatementMode::Prepared,
            connect_timeout: Duration::from_secs(2),
            response_timeout: Self::RESPONSE_TIMEOUT,
            busy_timeout: Self::BUSY_TIMEOUT,
            purge_after: Self::PURGE_AFTER,
            options: SqlOptions::default(),
        }
    }

    /// The default time limit for a response. It is longer than the engine's own time-out.
    pub const RESPONSE_TIMEOUT: Duration = Limits::DEFAULT.response_timeout;

    /// The default time for which rows of free keys are kept.
    pub const PURGE_AFTER: Duration = Limits::DEFAULT.purge_after;

    /// The default time limit for waiting for a row that another transaction has locked.
    pub const BUSY_TIMEOUT: Duration = Limits::DEFAULT.busy_timeout;

    /// Sets the user, and the password that is sent if the server requests one.
    #[must_use]
    pub fn with_login(mut self, user: &str, password: Option<&str>) -> Self {
        self.server = self.server.username(user);
        if let Some(password) = password {
            self.server = self.server.password(password);
        }
        self
    }

    /// Sets how connections are encrypted. Default: [`Encryption::Preferred`].
    #[must_use]
    pub fn with_encryption(mut self, encryption: Encryption) -> Self {
        self.encryption = encryption;
        let mode = match encryption {
            Encryption::Off => PgSslMode::Disable,
            Encryption::Preferred => PgSslMode::Prefer,
            Encryption::Required => PgSslMode::Require,
            Encryption::VerifyAuthority => PgSslMode::VerifyCa,
            Encryption::VerifyHost => PgSslMode::VerifyFull,
        };
        self.server = self.server.ssl_mode(mode);
        self
    }

    /// Trusts these certificates (PEM) in addition to the host's authorities. Feature `tls`.
    ///
    /// Also sets [`Encryption::VerifyHost`]; a later call of
    /// [`with_encryption`](Self::with_encryption) overrides that.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_certificate_authority(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.tls_identity.authority = Some(certificates.into());
        self.with_encryption(Encryption::VerifyHost)
    }

    /// Sets the client certificate (PEM) and its private key (PEM), which identify this program to
    /// the server. Feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_client_certificate(
        mut self,
        certificate: impl AsRef<[u8]>,
        key: impl AsRef<[u8]>,
    ) -> Self {
        self.tls_identity.client = Some((certificate.as_ref().to_vec(), key.as_ref().to_vec()));
        self
    }

    /// Sets the URL at which the listener connects, for a server behind a pooler.
    ///
    /// `LISTEN` needs a connection that stays with one server process. The listener's connection is
    /// encrypted in the same way as the others.
    ///
    /// # Errors
    /// `Misconfigured` if the URL cannot be parsed. The error does not repeat the URL, which may
    /// contain a password.
    pub fn with_listen(mut self, url: &str) -> Result<Self, BackendError> {
        let invalid = || misconfigured("the URL of the listener is invalid");
        let server = parse_listen(url).ok_or_else(invalid)?;
        self.listen = Listen::OtherServer(Box::new(with_fixed_options(server)));
        Ok(self)
    }

    /// Turns the listener off: waiting callers poll.
    #[must_use]
    pub fn without_listen(mut self) -> Self {
        self.listen = Listen::Off;
        self
    }

    /// Sets the namespace. Locks of different namespaces are independent, even if their keys are
    /// equal. Default: `default`.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets the schema of the tables. Default: the schema in which the `search_path` finds them,
    /// otherwise its first schema.
    #[must_use]
    pub fn with_schema(mut self, schema: impl Into<String>) -> Self {
        self.tables.schema = Some(schema.into());
        self
    }

    /// Sets the prefix of the table names. Default: `lock_registry`.
    #[must_use]
    pub fn with_table_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.tables.prefix = prefix.into();
        self
    }

    /// Sets whether missing tables are created. Default: [`CreateSchema::IfMissing`].
    #[must_use]
    pub fn with_create_schema(mut self, create_schema: CreateSchema) -> Self {
        self.tables.create = create_schema;
        self
    }

    /// Sets the maximum number of connections for statements. Default: 4.
    ///
    /// Up to three more are opened on demand. Renewals and releases get one each when all
    /// connections are busy, and the listener has one. A connection that does not answer is
    /// replaced before it is closed. So twice as many connections, plus two, may be open for a
    /// short time.
    #[must_use]
    pub fn with_connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// Sets the maximum number of locks that are held at once in the mode
    /// [`Row`](crate::SqlMode::Row). Each of them takes one more connection. Default: 16.
    #[must_use]
    pub fn with_row_locks(mut self, row_locks: u32) -> Self {
        self.row_locks = row_locks;
        self
    }

    /// Sets whether the server keeps statements prepared. Default: [`StatementMode::Prepared`].
    #[must_use]
    pub fn with_statements(mut self, statements: StatementMode) -> Self {
        self.statements = statements;
        self
    }

    /// Sets the time limit for connecting. Default: 2 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// Sets the time limit for a response, after which the connection counts as dead. Default:
    /// 10 s, which is longer than the engine's own time-out.
    #[must_use]
    pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
        self.response_timeout = response_timeout;
        self
    }

    /// Sets how long a statement waits for a row that another transaction has locked. Default: 1 s.
    ///
    /// After that the statement fails with a transient error. A transaction with a
    /// [fence](crate::Fence) makes other statements wait in this way.
    #[must_use]
    pub fn with_busy_timeout(mut self, busy_timeout: Duration) -> Self {
        self.busy_timeout = busy_timeout;
        self
    }

    /// Sets how long rows of free keys are kept. Default: one hour.
    ///
    /// The minimum is one minute, and twice [`response_timeout`](Self::with_response_timeout).
    /// Otherwise a statement could outlast an acquisition, a release and the deletion of the row,
    /// and then issue a smaller token.
    #[must_use]
    pub fn with_purge_after(mut self, purge_after: Duration) -> Self {
        self.purge_after = purge_after;
        self
    }

    /// Returns the mode in which statements are sent.
    pub(super) fn query_mode(&self) -> QueryMode {
        match self.statements {
            StatementMode::Prepared => QueryMode::Prepared,
            StatementMode::Unprepared => self.simple_query_mode(),
        }
    }

    /// Returns the mode that sends statements as plain text, whatever the configuration is.
    pub(super) fn simple_query_mode(&self) -> QueryMode {
        QueryMode::Simple { lock_timeout: self.busy_timeout }
    }

    /// Returns the client's options for connections that send statements.
    pub(super) fn statement_options(&self) -> PgConnectOptions {
        self.with_tls_identity(self.server.clone())
    }

    fn with_tls_identity(&self, server: PgConnectOptions) -> PgConnectOptions {
        #[cfg(feature = "tls")]
        let server = self.tls_identity.apply_to(server);
        server
    }

    /// Returns the client's options for the listener, or `None` if it is off.
    pub(super) fn listener_options(&self) -> Option<PgConnectOptions> {
        match &self.listen {
            Listen::SameServer => match self.statements {
                StatementMode::Prepared => Some(self.statement_options()),
                // A pooler would not pass notifications on.
                StatementMode::Unprepared => None,
            },
            Listen::OtherServer(server) => {
                let server = PgConnectOptions::clone(server).ssl_mode(self.server.get_ssl_mode());
                Some(self.with_tls_identity(server))
            }
            Listen::Off => None,
        }
    }

    /// Returns the environment variables with file names that the client reads and this
    /// configuration does not override.
    fn unset_file_variables(&self) -> &'static [&'static str] {
        #[cfg(feature = "tls")]
        return match (&self.tls_identity.authority, &self.tls_identity.client) {
            (None, None) => &["PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY"],
            (Some(_), None) => &["PGSSLCERT", "PGSSLKEY"],
            (None, Some(_)) => &["PGSSLROOTCERT"],
            (Some(_), Some(_)) => &[],
        };
        #[cfg(not(feature = "tls"))]
        &[]
    }

    /// Checks the configuration without I/O. Opening a store calls this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first invalid setting.
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

    fn check_names(&self) -> Result<(), OptionError> {
        if let Some(schema) = &self.tables.schema
            && !is_identifier(schema, IDENTIFIER_BYTES_MAX)
        {
            return Err(OptionError::new(
                "schema",
                format!(
                    "is {schema:?}; a schema must have at most {IDENTIFIER_BYTES_MAX} letters, digits and underscores, and no leading digit"
                ),
            ));
        }
        let prefix = &self.tables.prefix;
        // Table names are not quoted, so the server would convert capital letters to lower case.
        if !is_identifier(prefix, PREFIX_BYTES_MAX)
            || prefix.contains(|c: char| c.is_ascii_uppercase())
        {
            return Err(OptionError::new(
                "table_prefix",
                format!(
                    "is {prefix:?}; the tables' prefix must have at most {PREFIX_BYTES_MAX} lower-case letters, digits and underscores, and no leading digit"
                ),
            ));
        }
        Ok(())
    }

    /// Returns this configuration with the files and the encryption of its options.
    pub(super) fn with_encryption_options(mut self) -> Result<Self, BackendError> {
        let encryption = self.options.encryption("postgres")?;
        #[cfg(feature = "tls")]
        {
            let pem = self.options.pem_files.read("postgres")?;
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

impl BackendConfig for PostgresConfig {
    fn kind(&self) -> &'static StoreKind {
        &STORE
    }

    fn scheme(&self) -> &'static str {
        "postgres"
    }

    fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        match name {
            "namespace" => self.namespace = value.to_owned(),
            "schema" => self.tables.schema = Some(value.to_owned()),
            "table_prefix" => self.tables.prefix = value.to_owned(),
            "create_schema" => self.tables.create = CreateSchema::parse(value)?,
            "pool" => self.connections = parse_count(value)?,
            "row_locks" => self.row_locks = parse_count(value)?,
            "connect_timeout" => self.connect_timeout = parse_time(value)?,
            "prepared" => {
                self.statements = match parse_switch(value)? {
                    true => StatementMode::Prepared,
                    false => StatementMode::Unprepared,
                };
            }
            "listen" if value == "off" => self.listen = Listen::Off,
            "listen" => {
                let server = parse_listen(value).ok_or_else(|| {
                    InvalidValue::new(
                        "is neither `off` nor a URL such as `postgres://USER:PASSWORD@HOST:PORT/DATABASE` without options; \
                         percent-encode it in the query of another URL",
                    )
                })?;
                self.listen = Listen::OtherServer(Box::new(with_fixed_options(server)));
            }
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
        if let Some(variable) = conflicting_variable(&self.server, self.unset_file_variables()) {
            return Err(OptionError::general(format!(
                "the environment variable {variable} is set, and would change how the lock store connects; start this program without it"
            )));
        }
        self.options.validate()?;
        self.check_names()?;
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

/// The schema and the prefix of the tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TableNames {
    pub(super) schema: String,
    pub(super) prefix: String,
}

impl TableNames {
    pub(super) fn locks(&self) -> String {
        format!("{}.{}_locks", quoted(&self.schema), self.prefix)
    }

    pub(super) fn meta(&self) -> String {
        format!("{}.{}_meta", quoted(&self.schema), self.prefix)
    }
}

/// Returns the quoted identifier. Schema names that the server returned have not been checked.
pub(super) fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

fn is_identifier(name: &str, bytes_max: usize) -> bool {
    name.len() <= bytes_max
        && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn parse_server(url: &UrlParts<'_>) -> Result<PgConnectOptions, BackendError> {
    if !matches!(&*url.scheme, "postgres" | "postgresql") {
        return Err(url.invalid("has no scheme of PostgreSQL; use `postgres`"));
    }
    let parsed = ServerUrl::parse(url, PORT)?;
    let mut server = match parsed.address {
        ServerAddress::Host((host, port)) => default_options().host(&host).port(port),
        ServerAddress::Socket(directory, port) => default_options().socket(directory).port(port),
    };
    if let Some(login) = parsed.login {
        server = server.username(login.user.expose());
        if let Some(password) = login.password {
            server = server.password(password.expose());
        }
    }
    let database =
        if parsed.database.is_empty() { server.get_username().to_owned() } else { parsed.database };
    Ok(server.database(&database))
}

/// Parses the URL of the listener, which has no options.
fn parse_listen(url: &str) -> Option<PgConnectOptions> {
    let url = UrlParts::split(url).filter(|url| url.query.is_none())?;
    url.check().ok()?;
    // In another database, the listener would receive no releases.
    require_database(&url).ok()?;
    parse_server(&url).ok()
}

/// Returns options that ignore the environment, as far as the client allows; see
/// [`conflicting_variable`].
fn default_options() -> PgConnectOptions {
    let user = whoami::username().unwrap_or_else(|_| "postgres".to_owned());
    PgConnectOptions::new_without_pgpass()
        .host("localhost")
        .port(PORT)
        .username(&user)
        // An empty password has the same effect as none.
        .password("")
        .ssl_mode(PgSslMode::Prefer)
}

/// Returns the name of an environment variable that would change how the client connects, and that
/// no option overrides.
fn conflicting_variable(server: &PgConnectOptions, names: &[&'static str]) -> Option<&'static str> {
    let is_set = |name: &&&str| std::env::var_os(name).is_some();
    let options_variable = server.get_options().map(|_| "PGOPTIONS");
    options_variable.or_else(|| names.iter().find(is_set).copied())
}

fn with_fixed_options(server: PgConnectOptions) -> PgConnectOptions {
    // A pooler refuses settings that it does not know, and no floating-point numbers are read here.
    server.application_name("lock-registry").extra_float_digits(None).disable_statement_logging()
}

pub(super) fn misconfigured(message: &str) -> BackendError {
    BackendError::new(BackendErrorKind::Misconfigured, format!("postgres: {message}")).as_refused()
}

/// The default port of a server.
const PORT: u16 = 5432;
const IDENTIFIER_BYTES_MAX: usize = 63;

// Implemented manually: the client's options contain a password and print it.
impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("host", &self.server.get_host())
            .field("socket", &self.server.get_socket())
            .field("port", &self.server.get_port())
            .field("database", &self.server.get_database())
            .field("encryption", &self.encryption)
            .field(
                "listen",
                &match self.listen {
                    Listen::SameServer => "here",
                    Listen::OtherServer(_) => "elsewhere",
                    Listen::Off => "off",
                },
            )
            .field("namespace", &self.namespace)
            .field("tables", &self.tables)
            .field("connections", &self.connections)
            .field("row_locks", &self.row_locks)
            .field("statements", &self.statements)
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .field("busy_timeout", &self.busy_timeout)
            .field("purge_after", &self.purge_after)
            .finish_non_exhaustive()
    }
}
