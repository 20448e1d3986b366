//! What must be known to reach a server.

use std::fmt;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use registry_core::{BackendError, BackendErrorKind};

use crate::error::explain;

/// Where the locks of a [`RedisBackend`](crate::RedisBackend) live.
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisConfig {
    pub(crate) server: ConnectionInfo,
    /// Locks of different namespaces never meet, even if their keys are equal. `lock-registry` unless set.
    pub namespace: String,
    /// How long connecting may take. 2 s unless set.
    pub connect_timeout: Duration,
    /// How long a command may stay unanswered before the connection counts as dead. 10 s unless set, which is above the engine's own
    /// time-out.
    pub response_timeout: Duration,
    /// How long the newest fencing token of a key is remembered after its last grant. One day unless set. Tokens do not go
    /// backwards after that either, unless the server's clock does.
    pub token_memory: Duration,
}

impl RedisConfig {
    /// The server at `host`, a name or an address without brackets, and `port`: nobody logs in, the database is 0.
    #[must_use]
    #[expect(clippy::missing_panics_doc, reason = "it does not panic")]
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        let server = (host.into(), port).into_connection_info();
        Self::at(server.expect("host and port are all that there is to an address"))
    }

    /// Reads `redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`, the same with `rediss://` for an encrypted connection
    /// (feature `tls`), or `redis+unix:///PATH[?db=DATABASE&user=USER&pass=PASSWORD]`.
    ///
    /// # Errors
    /// `Misconfigured` for what cannot be read. The message does not repeat the URL, which may hold a password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        let server = url.into_connection_info().map_err(|error| explain(&error))?;
        let unverified = matches!(server.addr(), ConnectionAddr::TcpTls { insecure: true, .. });
        if unverified {
            return Err(BackendError::new(
                BackendErrorKind::Misconfigured,
                "a connection that is encrypted but not verified protects nothing; leave out #insecure",
            )
            .as_refused());
        }
        Ok(Self::at(server))
    }

    fn at(server: ConnectionInfo) -> Self {
        #[cfg(feature = "tls")]
        if matches!(server.addr(), ConnectionAddr::TcpTls { .. }) {
            choose_cryptography();
        }
        Self {
            server,
            namespace: "lock-registry".to_owned(),
            connect_timeout: Duration::from_secs(2),
            response_timeout: Duration::from_secs(10),
            token_memory: Duration::from_secs(24 * 60 * 60),
        }
    }

    /// The same over an encrypted connection, verified against the certificate authorities of the host. Feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        if let ConnectionAddr::Tcp(host, port) = self.server.addr() {
            let (host, port) = (host.clone(), *port);
            let addr = ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
            self.server = self.server.set_addr(addr);
            choose_cryptography();
        }
        self
    }

    /// The same with this password, of this user or else of the server as a whole.
    #[must_use]
    pub fn with_login(self, user: Option<&str>, password: &str) -> Self {
        self.with_settings(|settings| {
            let settings = settings.set_password(password);
            match user {
                Some(user) => settings.set_username(user),
                None => settings,
            }
        })
    }

    /// The same with the locks in the database of this number.
    #[must_use]
    pub fn with_database(self, database: u32) -> Self {
        self.with_settings(|settings| settings.set_db(database.into()))
    }

    fn with_settings(
        mut self,
        change: impl FnOnce(RedisConnectionInfo) -> RedisConnectionInfo,
    ) -> Self {
        let settings = change(self.server.redis_settings().clone());
        self.server = self.server.set_redis_settings(settings);
        self
    }

    /// The same with this namespace.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// The same with this time to connect.
    #[must_use]
    pub fn with_connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// The same with this patience with unanswered commands.
    #[must_use]
    pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
        self.response_timeout = response_timeout;
        self
    }

    /// The same with the newest tokens remembered for this long.
    #[must_use]
    pub fn with_token_memory(mut self, token_memory: Duration) -> Self {
        self.token_memory = token_memory;
        self
    }
}

/// The client panics if it finds no cryptography, or finds two to choose from. A program that has chosen keeps its choice.
#[cfg(feature = "tls")]
fn choose_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // It fails where another thread was faster, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

// By hand: the URL may hold a password.
impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("server", &self.server.addr().to_string())
            .field("database", &self.server.redis_settings().db())
            .field("namespace", &self.namespace)
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .field("token_memory", &self.token_memory)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_password_is_printed() {
        let config = RedisConfig::from_url("redis://worker:hunter2@127.0.0.1:6379/3").unwrap();
        let printed = format!("{config:?}");
        assert!(!printed.contains("hunter2"), "{printed}");
        assert!(printed.contains("127.0.0.1:6379") && printed.contains("database: 3"), "{printed}");
    }

    #[test]
    fn parts_say_the_same_as_a_url() {
        let parts = RedisConfig::new("127.0.0.1", 6380)
            .with_login(Some("worker"), "hunter2")
            .with_database(3);
        let url = RedisConfig::from_url("redis://worker:hunter2@127.0.0.1:6380/3").unwrap();
        let said = |config: &RedisConfig| {
            let settings = config.server.redis_settings();
            let login = (settings.username(), settings.password());
            format!("{:?} {login:?} {}", config.server.addr(), settings.db())
        };
        assert_eq!(said(&parts), said(&url));
        assert!(!format!("{parts:?}").contains("hunter2"));
    }

    #[cfg(feature = "tls")]
    #[tokio::test]
    async fn a_server_that_does_not_encrypt_is_an_error_and_no_panic() {
        let server = registry_testkit::redis::RedisServer::start(&[]).await.unwrap();
        let plain = RedisConfig::from_url(&server.url()).unwrap();
        let encrypted = RedisConfig::from_url(&server.url().replace("redis:", "rediss:")).unwrap();
        for config in [plain.with_tls(), encrypted] {
            let error = crate::RedisBackend::open(config).await.unwrap_err();
            assert!(error.refused(), "{error:?}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused_without_repeating_it() {
        for url in [
            "redis://:hunter2@host:99999999/",
            "redis://u:hunter2@h/notanumber",
            "nonsense-hunter2",
        ] {
            let error = RedisConfig::from_url(url).unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{url}");
            assert!(error.refused());
            let mut text = format!("{error} {error:?}");
            let mut source = std::error::Error::source(&error);
            while let Some(error) = source {
                text += &format!("{error} {error:?}");
                source = error.source();
            }
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
}
