//! Configuration of a MariaDB or MySQL store: how to reach the server, and where the locks are.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use registry_core::config::{
    self, BackendConfig, Host, InvalidValue, OptionError, StoreKind, UrlParts,
};
use registry_core::{BackendError, Capabilities};
use sqlx::mysql::{MySqlConnectOptions, MySqlSslMode};
use sqlx::{ConnectOptions as _, MySql};

use crate::server::config::{
    OPTIONS, ServerAddress, ServerSettings, ServerUrl, require_database, server_config,
};
use crate::server::{EncryptedOptions, Encryption, capabilities};

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
    pub(super) settings: ServerSettings,
}

server_config!(MySqlConfig, MySqlConnectOptions);

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
    /// `Misconfigured` if the URL is invalid or contains options. The error does not contain the
    /// URL, which may hold a password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        config::from_url(url, &[], Self::parse)
    }

    fn parse(url: &UrlParts<'_>) -> Result<Self, BackendError> {
        if !matches!(&*url.scheme, "mysql" | "mariadb") {
            return Err(url.invalid("has no MySQL scheme; use `mysql` or `mariadb`"));
        }
        let parsed = ServerUrl::parse(url, PORT)?;
        let config = match parsed.address {
            ServerAddress::Host((host, port)) => Self::new(&host, port, &parsed.database),
            ServerAddress::Socket(socket) => Self::unix(socket, &parsed.database),
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
        let address = match server.get_socket() {
            Some(socket) => ServerAddress::Socket(socket.clone()),
            None => ServerAddress::Host((server.get_host().to_owned(), server.get_port())),
        };
        let settings = ServerSettings::new(address);
        Self { server: without_session_settings(server), settings }
    }
}

impl EncryptedOptions for MySqlConnectOptions {
    fn with_encryption(self, encryption: Encryption) -> Self {
        self.ssl_mode(match encryption {
            Encryption::Off => MySqlSslMode::Disabled,
            Encryption::Preferred => MySqlSslMode::Preferred,
            Encryption::Required => MySqlSslMode::Required,
            Encryption::VerifyAuthority => MySqlSslMode::VerifyCa,
            Encryption::VerifyHost => MySqlSslMode::VerifyIdentity,
        })
    }

    #[cfg(feature = "tls")]
    fn with_authority(self, certificates: Vec<u8>) -> Self {
        self.ssl_ca_from_pem(certificates)
    }

    #[cfg(feature = "tls")]
    fn with_client(self, certificate: &[u8], key: &[u8]) -> Self {
        self.ssl_client_cert_from_pem(certificate).ssl_client_key_from_pem(key)
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
        self.settings.assign(name, value)
    }

    fn validate(&self) -> Result<(), OptionError> {
        if self.server.get_database().is_none_or(str::is_empty) {
            return Err(OptionError::general(
                "the URL names no database; write mysql://HOST/DATABASE",
            ));
        }
        self.settings.validate(self)
    }

    fn capabilities(&self) -> Capabilities {
        capabilities::<MySql>(self, &self.settings.mode())
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

/// Turns off the session settings of sqlx, because `client` sends all settings in one message.
fn without_session_settings(server: MySqlConnectOptions) -> MySqlConnectOptions {
    server
        .pipes_as_concat(false)
        .no_engine_substitution(false)
        .timezone(None)
        .set_names(false)
        .disable_statement_logging()
}

/// Default port of MariaDB and MySQL.
const PORT: u16 = 3_306;

// Implemented manually, because the debug output of the client's options contains the password.
impl fmt::Debug for MySqlConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlConfig")
            .field("database", &self.server.get_database())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
