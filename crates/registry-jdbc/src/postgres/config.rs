//! The configuration of a PostgreSQL store: server, tables, limits and time-outs. Applications
//! build it; `open`, `client` and the listener read it. This module opens no connection.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use registry_core::config::{
    self, BackendConfig, Host, InvalidValue, OptionError, OptionRow, StoreKind, UrlParts, Values,
    parse_switch,
};
use registry_core::{BackendError, Capabilities};
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{ConnectOptions as _, Postgres};

use super::statement::QueryMode;
use crate::server::config::{
    OPTIONS, ServerAddress, ServerSettings, ServerUrl, require_database, server_config,
};
use crate::server::{EncryptedOptions, Encryption, ServerErrors as _, capabilities};

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
        "whether the server keeps prepared statements; `false` behind a pooler in transaction mode",
    ),
    OptionRow::new(
        "listen",
        Values::Secret { non_secret_values: &["off"], syntax: "a `postgres:` URL without options" },
        "the store's URL; `off` with `prepared=false`",
        "a URL that bypasses any pooler, for a connection that receives release notifications, percent-encoded in the query of another URL",
    ),
];

/// The server, the tables and the time limits of a [`PostgresBackend`](crate::PostgresBackend).
#[derive(Clone)]
#[non_exhaustive]
pub struct PostgresConfig {
    pub(super) server: PgConnectOptions,
    pub(super) listen: Listen,
    /// The schema of the tables.
    pub(super) schema: Option<String>,
    pub(super) statements: StatementMode,
    pub(super) settings: ServerSettings,
}

server_config!(PostgresConfig, PgConnectOptions);

/// Whether the server keeps statements prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StatementMode {
    /// Each connection prepares a statement once.
    #[default]
    Prepared,
    /// Statements are sent as plain text.
    ///
    /// Use this mode behind a pooler in transaction mode, such as `PgBouncer` with
    /// `pool_mode = transaction`. In this mode, no listener receives release notifications, unless
    /// [`with_listen`](PostgresConfig::with_listen) sets its URL.
    Unprepared,
}

/// Where the listener receives release notifications.
#[derive(Clone)]
pub(super) enum Listen {
    /// The listener connects to the server that receives the statements. With
    /// [`StatementMode::Unprepared`] there is no listener.
    SameServer,
    /// The listener connects to another address, which bypasses the pooler of the statements.
    OtherServer(Box<PgConnectOptions>),
    /// There is no listener, so waiting callers poll.
    Off,
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
    /// another server. The client cannot ignore `PGOPTIONS` and, with the feature `tls`, variables
    /// such as `PGSSLROOTCERT`. If one of them is set and this configuration does not override it,
    /// [`check`](Self::check) returns an error.
    ///
    /// # Errors
    /// `Misconfigured` if the URL is invalid or contains options. The error does not repeat the
    /// URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        config::from_url(url, &[], Self::parse)
    }

    fn parse(url: &UrlParts<'_>) -> Result<Self, BackendError> {
        parse_server(url).map(Self::with_server)
    }

    fn with_server(server: PgConnectOptions) -> Self {
        let address = match server.get_socket() {
            Some(directory) => ServerAddress::Socket(directory.clone()),
            None => ServerAddress::Host((server.get_host().to_owned(), server.get_port())),
        };
        Self {
            server: with_fixed_options(server),
            listen: Listen::SameServer,
            schema: None,
            statements: StatementMode::Prepared,
            settings: ServerSettings::new(address),
        }
    }

    /// Sets the URL to which the listener connects, for a server behind a pooler.
    ///
    /// `LISTEN` needs a connection that stays with one server process. The listener's connection is
    /// encrypted in the same way as all other connections.
    ///
    /// # Errors
    /// `Misconfigured` if the URL is invalid, contains options, or names no database. The error
    /// does not repeat the URL, which may contain a password.
    pub fn with_listen(mut self, url: &str) -> Result<Self, BackendError> {
        let server = parse_listen(url).ok_or_else(|| {
            Postgres::misconfigured(
                "the URL of the listener is invalid; write `postgres://USER:PASSWORD@HOST:PORT/DATABASE` without options",
            )
        })?;
        self.listen = Listen::OtherServer(Box::new(with_fixed_options(server)));
        Ok(self)
    }

    /// Turns the listener off: waiting callers poll.
    #[must_use]
    pub fn without_listen(mut self) -> Self {
        self.listen = Listen::Off;
        self
    }

    /// Sets the schema of the tables. Default: the schema in which the `search_path` finds them,
    /// otherwise its first schema.
    #[must_use]
    pub fn with_schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// Sets whether the server keeps statements prepared. Default: [`StatementMode::Prepared`].
    #[must_use]
    pub fn with_statements(mut self, statements: StatementMode) -> Self {
        self.statements = statements;
        self
    }

    /// Returns the mode in which statements are sent.
    pub(super) fn query_mode(&self) -> QueryMode {
        match self.statements {
            StatementMode::Prepared => QueryMode::Prepared,
            StatementMode::Unprepared => self.plain_query_mode(),
        }
    }

    /// Returns the mode that sends statements as plain text, whatever the configuration is.
    pub(super) fn plain_query_mode(&self) -> QueryMode {
        QueryMode::PlainPooled { lock_timeout: self.settings.busy_timeout }
    }

    /// Returns the client's options for the listener, or `None` if there is no listener.
    pub(super) fn listener_options(&self) -> Option<PgConnectOptions> {
        match &self.listen {
            Listen::SameServer => match self.statements {
                StatementMode::Prepared => Some(self.connect_options()),
                // A pooler would not pass notifications on.
                StatementMode::Unprepared => None,
            },
            Listen::OtherServer(server) => {
                Some(self.settings.encryption.apply_to(PgConnectOptions::clone(server)))
            }
            Listen::Off => None,
        }
    }

    /// Returns the environment variables that name files for the client, without those that this
    /// configuration overrides.
    fn file_variables(&self) -> &'static [&'static str] {
        #[cfg(feature = "tls")]
        return match (
            self.settings.encryption.has_authority(),
            self.settings.encryption.has_client(),
        ) {
            (false, false) => &["PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY"],
            (true, false) => &["PGSSLCERT", "PGSSLKEY"],
            (false, true) => &["PGSSLROOTCERT"],
            (true, true) => &[],
        };
        #[cfg(not(feature = "tls"))]
        &[]
    }
}

impl EncryptedOptions for PgConnectOptions {
    fn with_encryption(self, encryption: Encryption) -> Self {
        self.ssl_mode(match encryption {
            Encryption::Off => PgSslMode::Disable,
            Encryption::Preferred => PgSslMode::Prefer,
            Encryption::Required => PgSslMode::Require,
            Encryption::VerifyAuthority => PgSslMode::VerifyCa,
            Encryption::VerifyHost => PgSslMode::VerifyFull,
        })
    }

    #[cfg(feature = "tls")]
    fn with_authority(self, certificates: Vec<u8>) -> Self {
        self.ssl_root_cert_from_pem(certificates)
    }

    #[cfg(feature = "tls")]
    fn with_client(self, certificate: &[u8], key: &[u8]) -> Self {
        self.ssl_client_cert_from_pem(certificate).ssl_client_key_from_pem(key)
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
            "schema" => self.schema = Some(value.to_owned()),
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
            _ => self.settings.assign(name, value)?,
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), OptionError> {
        if let Some(variable) = conflicting_variable(&self.server, self.file_variables()) {
            return Err(OptionError::general(format!(
                "the environment variable {variable} is set, and would change how the lock store connects; start this program without it"
            )));
        }
        if let Some(schema) = &self.schema
            && !is_identifier(schema)
        {
            return Err(OptionError::new(
                "schema",
                format!(
                    "is {schema:?}; a schema must have at most {IDENTIFIER_BYTES_MAX} letters, digits and underscores, and no leading digit"
                ),
            ));
        }
        self.settings.validate(self)
    }

    fn capabilities(&self) -> Capabilities {
        capabilities::<Postgres>(self, &self.settings.mode())
    }

    fn hosts(&self) -> Vec<Host> {
        self.settings.hosts()
    }

    fn address(&self) -> String {
        self.settings.address()
    }

    fn poll(&self) -> Option<Duration> {
        self.settings.poll()
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

    pub(super) fn waiters(&self) -> String {
        format!("{}.{}_waiters", quoted(&self.schema), self.prefix)
    }

    pub(super) fn values(&self) -> String {
        format!("{}.{}_values", quoted(&self.schema), self.prefix)
    }
}

/// Returns the identifier in quotes, with its own quotes doubled. Schema names that the server
/// returned have not been checked, so they may contain any character.
pub(super) fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

fn is_identifier(name: &str) -> bool {
    name.len() <= IDENTIFIER_BYTES_MAX
        && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn parse_server(url: &UrlParts<'_>) -> Result<PgConnectOptions, BackendError> {
    if !matches!(&*url.scheme, "postgres" | "postgresql") {
        return Err(url.invalid("has no PostgreSQL scheme; use `postgres`"));
    }
    let parsed = ServerUrl::parse(url, PORT)?;
    let mut server = match parsed.address {
        ServerAddress::Host((host, _)) => default_options().host(&host),
        ServerAddress::Socket(directory) => default_options().socket(directory),
    };
    server = server.port(parsed.port);
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
    // A default database could differ from the store's database. The listener would then receive no
    // notifications.
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

/// Returns the name of a set environment variable that would change how the client connects:
/// `PGOPTIONS`, or one of `names`.
fn conflicting_variable(server: &PgConnectOptions, names: &[&'static str]) -> Option<&'static str> {
    let is_set = |name: &&&str| std::env::var_os(name).is_some();
    let options_variable = server.get_options().map(|_| "PGOPTIONS");
    options_variable.or_else(|| names.iter().find(is_set).copied())
}

fn with_fixed_options(server: PgConnectOptions) -> PgConnectOptions {
    // A pooler refuses the startup parameter `extra_float_digits`, which this store does not need.
    server.application_name("lock-registry").extra_float_digits(None).disable_statement_logging()
}

/// The default port of a server.
const PORT: u16 = 5432;
const IDENTIFIER_BYTES_MAX: usize = 63;

// Implemented manually, because the debug output of the client's options contains the password.
impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("port", &self.server.get_port())
            .field("database", &self.server.get_database())
            .field(
                "listen",
                &match self.listen {
                    Listen::SameServer => "here",
                    Listen::OtherServer(_) => "elsewhere",
                    Listen::Off => "off",
                },
            )
            .field("schema", &self.schema)
            .field("statements", &self.statements)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_has_precedence_over_the_limits_that_follow_from_the_option_timeout() {
        let seconds = Duration::from_secs;
        let mut config = PostgresConfig::from_url("postgres://db/shop")
            .unwrap()
            .with_response_timeout(seconds(30))
            .with_busy_timeout(seconds(2))
            .with_purge_after(seconds(90));
        config.set("timeout", "1200ms").unwrap();
        let settings = &config.settings;
        assert_eq!(settings.response_timeout, seconds(30));
        assert_eq!(settings.busy_timeout, seconds(2));
        assert_eq!(settings.purge_after, seconds(90));
    }

    #[test]
    fn a_time_without_limit_is_refused() {
        let valid = || PostgresConfig::from_url("postgres://db/shop").unwrap();
        for config in [
            valid().with_response_timeout(Duration::MAX),
            valid().with_busy_timeout(Duration::MAX),
            valid().with_purge_after(Duration::MAX),
            valid().with_connect_timeout(Duration::MAX),
        ] {
            assert!(config.check().unwrap_err().refused(), "{config:?}");
        }
    }
}
