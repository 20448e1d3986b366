//! The configuration of a Redis store: its servers, the access to them, and the format of the
//! locks.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};
use registry_core::{BackendError, BackendErrorKind};

use crate::error::to_backend_error;

/// The servers and the format of the locks of a [`RedisBackend`](crate::RedisBackend).
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisConfig {
    pub(crate) servers: ServerAddresses,
    pub(crate) connection: ConnectionSettings,
    pub(crate) layout: Layout,
    pub(crate) publish: Publish,
    pub(crate) namespace: Option<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) token_memory: Duration,
    pub(crate) durability: Durability,
    pub(crate) restart_guard: Duration,
}

/// How the servers are organized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServerAddresses {
    /// One server, or a proxy that behaves like one.
    Single(ServerAddress),
    /// Sentinels that report the current master of `service`.
    Sentinel { sentinels: Vec<ServerAddress>, service: String },
    /// Some members of a cluster; they report the others.
    Cluster(Vec<ServerAddress>),
    /// Independent masters.
    Quorum(Vec<ServerAddress>),
}

/// The address of one server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum ServerAddress {
    /// `host` is a host name, or an IP address without brackets.
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Credentials and encryption. All servers share them, except that sentinels have their own login.
#[derive(Clone, Default)]
pub(crate) struct ConnectionSettings {
    login: Option<RedisLogin>,
    sentinel_login: Option<RedisLogin>,
    database: u32,
    encrypted: bool,
    #[cfg(feature = "tls")]
    certificates: Option<redis::TlsCertificates>,
}

/// A password and its user. Without a user it is the server-wide password.
#[derive(Clone)]
struct RedisLogin {
    user: Option<String>,
    password: String,
}

impl ConnectionSettings {
    /// Returns a client for a server that holds locks.
    pub(crate) fn server_client(
        &self,
        address: &ServerAddress,
    ) -> redis::RedisResult<redis::Client> {
        self.client(address, self.login.as_ref(), self.database, ProtocolVersion::RESP3)
    }

    /// Returns a client for a sentinel.
    pub(crate) fn sentinel_client(
        &self,
        address: &ServerAddress,
    ) -> redis::RedisResult<redis::Client> {
        self.client(address, self.sentinel_login.as_ref(), 0, ProtocolVersion::RESP2)
    }

    fn client(
        &self,
        address: &ServerAddress,
        login: Option<&RedisLogin>,
        database: u32,
        protocol: ProtocolVersion,
    ) -> redis::RedisResult<redis::Client> {
        let addr = match address {
            ServerAddress::Tcp { host, port } if self.encrypted => ConnectionAddr::TcpTls {
                host: host.clone(),
                port: *port,
                insecure: false,
                tls_params: None,
            },
            ServerAddress::Tcp { host, port } => ConnectionAddr::Tcp(host.clone(), *port),
            ServerAddress::Unix(path) => ConnectionAddr::Unix(path.clone()),
        };
        let info: ConnectionInfo = addr.into_connection_info()?;
        let mut settings = info
            .redis_settings()
            .clone()
            .set_db(database.into())
            .set_protocol(protocol)
            .set_lib_name("lock-registry", env!("CARGO_PKG_VERSION"));
        if let Some(login) = login {
            settings = settings.set_password(&login.password);
            if let Some(user) = &login.user {
                settings = settings.set_username(user);
            }
        }
        // Without TCP_NODELAY, each command would wait for the acknowledgement of the previous one.
        let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
        let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
        #[cfg(feature = "tls")]
        if self.encrypted
            && let Some(certificates) = &self.certificates
        {
            return redis::Client::build_with_tls(info, certificates.clone());
        }
        redis::Client::open(info)
    }
}

#[cfg(feature = "tls")]
impl ConnectionSettings {
    /// Refuses unreadable certificates, because the client library would silently ignore them.
    fn check_certificates(&self) -> Result<(), &'static str> {
        // The client library uses the process-wide provider, and panics if there is none and
        // several are compiled in. If another thread installs one first, that one is used.
        if self.encrypted && rustls::crypto::CryptoProvider::get_default().is_none() {
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        use rustls::pki_types::pem::PemObject as _;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};

        let Some(certificates) = &self.certificates else { return Ok(()) };
        let is_pem = |pem: &[u8]| {
            let mut read = CertificateDer::pem_slice_iter(pem).peekable();
            read.peek().is_some() && read.all(|certificate| certificate.is_ok())
        };
        if certificates.root_cert.as_ref().is_some_and(|pem| !is_pem(pem)) {
            return Err("the certificates of the authorities are not valid PEM");
        }
        let Some(client_tls) = &certificates.client_tls else { return Ok(()) };
        if !is_pem(&client_tls.client_cert) {
            return Err("the client's certificate is not valid PEM");
        }
        if PrivateKeyDer::from_pem_slice(&client_tls.client_key).is_err() {
            return Err("the client's private key is not valid PEM");
        }
        Ok(())
    }
}

/// The format of a lock's keys and values, which determines the other programs that can contend for
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Layout {
    /// This library's own format, with the holder's label and the time of acquisition.
    #[default]
    Native,
    /// The format of Spring Integration's `RedisLockRegistry`. The namespace is its registry key.
    /// No labels.
    Spring,
    /// The format of Redisson's `RLock`. The lock's name is the key, prefixed with the namespace
    /// and a colon if a namespace is set. No labels.
    Redisson,
}

/// The command that publishes a release to the waiters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Publish {
    /// Chosen by the topology and the layout: `SPUBLISH` in a cluster, otherwise `PUBLISH`. The
    /// Spring layout always uses `PUBLISH`.
    #[default]
    Auto,
    /// `PUBLISH`: reaches every node of a cluster.
    Plain,
    /// `SPUBLISH`: reaches only the nodes of the lock's shard. Requires Redis 7.
    Sharded,
}

/// The durability that a grant needs before it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Durability {
    /// The number of replicas that must have received it.
    pub(crate) replicas: u32,
    /// Whether the server and these replicas must have written it to disk.
    pub(crate) fsync: bool,
    /// The time limit for both.
    pub(crate) limit: Duration,
}

impl Durability {
    pub(crate) const fn is_required(self) -> bool {
        self.replicas > 0 || self.fsync
    }
}

impl RedisConfig {
    /// The default [response timeout](Self::with_response_timeout).
    pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

    /// Configures a single server. `host` is a host name, or an IP address without brackets. The
    /// default is database 0 without a login.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self::with_servers(ServerAddresses::Single(ServerAddress::Tcp { host: host.into(), port }))
    }

    /// Configures a single server that listens on the Unix socket `path`.
    #[must_use]
    pub fn unix(path: impl Into<PathBuf>) -> Self {
        Self::with_servers(ServerAddresses::Single(ServerAddress::Unix(path.into())))
    }

    /// Configures the current master of `service`, as reported by these sentinels.
    #[must_use]
    pub fn sentinel(
        sentinels: impl IntoIterator<Item = (String, u16)>,
        service: impl Into<String>,
    ) -> Self {
        Self::with_servers(ServerAddresses::Sentinel {
            sentinels: addresses(sentinels),
            service: service.into(),
        })
    }

    /// Configures a cluster by some of its members, which report the others.
    #[must_use]
    pub fn cluster(members: impl IntoIterator<Item = (String, u16)>) -> Self {
        Self::with_servers(ServerAddresses::Cluster(addresses(members)))
    }

    /// Configures a quorum of independent masters. A claim that more than half of them grant holds
    /// the lock.
    #[must_use]
    pub fn quorum(masters: impl IntoIterator<Item = (String, u16)>) -> Self {
        Self::with_servers(ServerAddresses::Quorum(addresses(masters)))
    }

    /// Parses a URL. The schemes with `rediss` instead of `redis` encrypt the connections (feature
    /// `tls`).
    ///
    /// - `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`
    /// - `redis+unix:///PATH[?db=DATABASE&user=USER&pass=PASSWORD]`
    /// - `redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],HOST[:PORT]…/SERVICE[/DATABASE]`
    /// - `redis+cluster://[[USER]:PASSWORD@]HOST[:PORT],…`
    /// - `redis+quorum://[[USER]:PASSWORD@]HOST[:PORT],…[/DATABASE]`
    ///
    /// The default port is 26379 for sentinels and 6379 for other servers.
    ///
    /// # Errors
    /// Returns `Misconfigured` for a URL that cannot be parsed. The message does not repeat the
    /// URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(invalid_url("the URL cannot be used"));
        };
        let (plain, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
        if kind == "unix" {
            return Self::from_single_server_url(url);
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (format!("{login}@"), hosts),
            None => (String::new(), authority),
        };
        let (service, path) = match kind {
            "sentinel" => path.split_once('/').unwrap_or((path, "")),
            _ => ("", path),
        };
        let mut config: Option<Self> = None;
        let mut all = Vec::new();
        for host in hosts.split(',') {
            let port = if kind == "sentinel" && !has_port(host) { ":26379" } else { "" };
            let one =
                Self::from_single_server_url(&format!("{plain}://{login}{host}{port}/{path}"))?;
            let ServerAddresses::Single(address) = &one.servers else { continue };
            all.push(address.clone());
            config.get_or_insert(one);
        }
        let Some(mut config) = config else { return Err(invalid_url("the URL names no server")) };
        config.servers = match kind {
            "" if all.len() == 1 => return Ok(config),
            "" => {
                return Err(invalid_url(
                    "the URL names several servers; use redis+sentinel, redis+cluster or redis+quorum",
                ));
            }
            "sentinel" => ServerAddresses::Sentinel { sentinels: all, service: service.to_owned() },
            "cluster" => ServerAddresses::Cluster(all),
            "quorum" => ServerAddresses::Quorum(all),
            _ => return Err(invalid_url("the URL's scheme is not a Redis scheme")),
        };
        Ok(config)
    }

    fn from_single_server_url(url: &str) -> Result<Self, BackendError> {
        let info = url.into_connection_info().map_err(|error| to_backend_error(&error))?;
        let (address, encrypted) = match info.addr() {
            ConnectionAddr::TcpTls { insecure: true, .. } => {
                return Err(invalid_url(
                    "#insecure disables the verification of certificates; remove it",
                ));
            }
            ConnectionAddr::Tcp(host, port) => {
                (ServerAddress::Tcp { host: host.clone(), port: *port }, false)
            }
            ConnectionAddr::TcpTls { host, port, .. } => {
                (ServerAddress::Tcp { host: host.clone(), port: *port }, true)
            }
            ConnectionAddr::Unix(path) => (ServerAddress::Unix(path.clone()), false),
            _ => return Err(invalid_url("the URL cannot be used")),
        };
        let settings = info.redis_settings();
        let mut config = Self::with_servers(ServerAddresses::Single(address));
        config.connection.login = settings.password().map(|password| RedisLogin {
            user: settings.username().map(str::to_owned),
            password: password.to_owned(),
        });
        config.connection.database = u32::try_from(settings.db())
            .map_err(|_| invalid_url("the number of the database is out of range"))?;
        if encrypted {
            config.encrypt();
        }
        Ok(config)
    }

    fn with_servers(servers: ServerAddresses) -> Self {
        Self {
            servers,
            connection: ConnectionSettings::default(),
            layout: Layout::Native,
            publish: Publish::Auto,
            namespace: None,
            connect_timeout: Duration::from_secs(2),
            response_timeout: Self::RESPONSE_TIMEOUT,
            token_memory: Duration::from_secs(24 * 60 * 60),
            durability: Durability { replicas: 0, fsync: false, limit: Duration::from_secs(1) },
            restart_guard: Duration::ZERO,
        }
    }

    /// Encrypts the connections and verifies the servers against the host's certificate
    /// authorities. Requires the feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        self.encrypt();
        self
    }

    fn encrypt(&mut self) {
        self.connection.encrypted = true;
        #[cfg(feature = "tls")]
        install_crypto_provider();
    }

    /// Encrypts the connections and verifies the servers against these authorities (PEM) instead of
    /// the host's. Requires the feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_certificate_authority(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.certificates().root_cert = Some(certificates.into());
        self.with_tls()
    }

    /// Encrypts the connections and authenticates the client by this certificate (PEM) and its
    /// private `key` (PEM). Requires the feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_client_certificate(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        let pair =
            redis::ClientTlsConfig { client_cert: certificate.into(), client_key: key.into() };
        self.certificates().client_tls = Some(pair);
        self.with_tls()
    }

    #[cfg(feature = "tls")]
    fn certificates(&mut self) -> &mut redis::TlsCertificates {
        let none = || redis::TlsCertificates { client_tls: None, root_cert: None };
        self.connection.certificates.get_or_insert_with(none)
    }

    /// Sets the password of this user. Without a user it is the server-wide password.
    #[must_use]
    pub fn with_login(mut self, user: Option<&str>, password: &str) -> Self {
        let user = user.map(str::to_owned);
        self.connection.login = Some(RedisLogin { user, password: password.to_owned() });
        self
    }

    /// Sets the password for the sentinels. By default, no login is sent to them.
    #[must_use]
    pub fn with_sentinel_login(mut self, user: Option<&str>, password: &str) -> Self {
        let user = user.map(str::to_owned);
        self.connection.sentinel_login = Some(RedisLogin { user, password: password.to_owned() });
        self
    }

    /// Sets the number of the database that holds the locks. The default is 0, the only database of
    /// a cluster.
    #[must_use]
    pub fn with_database(mut self, database: u32) -> Self {
        self.connection.database = database;
        self
    }

    /// Sets the format of the locks. The default is [`Layout::Native`].
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the command that publishes releases. The default is [`Publish::Auto`].
    #[must_use]
    pub fn with_publish(mut self, publish: Publish) -> Self {
        self.publish = publish;
        self
    }

    /// Sets the namespace. Locks in different namespaces are independent, even if their keys are
    /// equal. The default is `lock-registry`, or no namespace in the Redisson layout.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Sets the time limit for connecting. The default is 2 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// Sets the time limit for a response, after which the connection counts as dead. The default
    /// is 10 s, which exceeds the engine's time-out.
    #[must_use]
    pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
        self.response_timeout = response_timeout;
        self
    }

    /// Sets how long the newest fencing token of a key is stored after its last grant. The default
    /// is one day. Tokens do not go backwards after that time either, unless the server's clock
    /// does.
    #[must_use]
    pub fn with_token_memory(mut self, token_memory: Duration) -> Self {
        self.token_memory = token_memory;
        self
    }

    /// Sets the number of replicas that must have received a grant or renewal before it counts. The
    /// default is 0.
    ///
    /// A grant that does not reach them in [time](Self::with_replica_timeout) is released and
    /// returned as a store error. This reduces the risk that a failover frees a held lock, but does
    /// not exclude it: a replica without the grant may be promoted.
    #[must_use]
    pub fn with_replicas(mut self, replicas: u32) -> Self {
        self.durability.replicas = replicas;
        self
    }

    /// Sets whether a grant or renewal counts only once it is on disk. The server and as many
    /// replicas as [`with_replicas`](Self::with_replicas) sets must have written it. The default is
    /// `false`. Requires Redis 7.2 with `appendonly yes`.
    #[must_use]
    pub fn with_fsync(mut self, fsync: bool) -> Self {
        self.durability.fsync = fsync;
        self
    }

    /// Sets the time limit for replicas and disks. The default is 1 s.
    #[must_use]
    pub fn with_replica_timeout(mut self, limit: Duration) -> Self {
        self.durability.limit = limit;
        self
    }

    /// Sets how long a quorum master has no vote after its start. The default is zero.
    ///
    /// Use this for masters that may lose data at a restart, and set at least the longest lease in
    /// use. A master that logs all writes (`appendfsync always`) does not need it.
    #[must_use]
    pub fn with_restart_guard(mut self, restart_guard: Duration) -> Self {
        self.restart_guard = restart_guard;
        self
    }

    /// Returns the configured namespace or the default of the layout.
    pub(crate) fn namespace(&self) -> &str {
        match (&self.namespace, self.layout) {
            (Some(namespace), _) => namespace,
            (None, Layout::Redisson) => "",
            (None, Layout::Native | Layout::Spring) => "lock-registry",
        }
    }

    /// Returns an error if the configuration cannot work. Performs no I/O. Opening a store calls
    /// this first.
    ///
    /// # Errors
    /// Returns [`BackendError`] of kind `Misconfigured` for the first invalid setting.
    pub fn check(&self) -> Result<(), BackendError> {
        let invalid = |message: String| Err(misconfigured(format!("redis: {message}")));
        let min = usize::from(self.layout != Layout::Redisson);
        if !(min..=NAMESPACE_BYTES_MAX).contains(&self.namespace().len()) {
            return invalid(format!(
                "the namespace has {} bytes; {min} to {NAMESPACE_BYTES_MAX} are allowed",
                self.namespace().len()
            ));
        }
        for (option, value) in [
            ("connect_timeout", self.connect_timeout),
            ("response_timeout", self.response_timeout),
            ("token_memory", self.token_memory),
            ("replica_timeout", self.durability.limit),
        ] {
            if !(Duration::from_millis(10)..=TIME_MAX).contains(&value) {
                return invalid(format!("{option} of {value:?} is not between 10 ms and 366 days"));
            }
        }
        if self.durability.is_required() && self.durability.limit >= self.response_timeout {
            return invalid("replica_timeout must be shorter than response_timeout".to_owned());
        }
        if self.connection.encrypted && !cfg!(feature = "tls") {
            return invalid("encrypted connections need the feature `tls`".to_owned());
        }
        #[cfg(feature = "tls")]
        self.connection.check_certificates().or_else(|message| invalid(message.to_owned()))?;
        self.check_servers().or_else(|message| invalid(message.to_owned()))
    }

    fn check_servers(&self) -> Result<(), &'static str> {
        if !self.restart_guard.is_zero() && !matches!(self.servers, ServerAddresses::Quorum(_)) {
            return Err("restart_guard is for a quorum");
        }
        let all = match &self.servers {
            ServerAddresses::Single(_) => return Ok(()),
            ServerAddresses::Sentinel { service, .. } if service.is_empty() => {
                return Err("no sentinel service is set");
            }
            ServerAddresses::Sentinel { sentinels, .. } => sentinels,
            ServerAddresses::Cluster(_) if self.connection.database != 0 => {
                return Err("a cluster has only database 0");
            }
            ServerAddresses::Cluster(members) => members,
            ServerAddresses::Quorum(masters) if masters.len() < 3 => {
                return Err("a quorum requires at least three masters");
            }
            ServerAddresses::Quorum(_) if self.layout != Layout::Native => {
                return Err("a quorum supports only the native layout");
            }
            ServerAddresses::Quorum(_) if self.durability.is_required() => {
                return Err("a quorum supports neither replicas nor fsync");
            }
            ServerAddresses::Quorum(masters) => masters,
        };
        if all.is_empty() {
            return Err("no server is named");
        }
        let mut sorted: Vec<_> = all.iter().map(ServerAddress::to_string).collect();
        sorted.sort();
        sorted.dedup();
        if sorted.len() != all.len() {
            return Err("a server is named twice");
        }
        Ok(())
    }
}

fn addresses(all: impl IntoIterator<Item = (String, u16)>) -> Vec<ServerAddress> {
    all.into_iter().map(|(host, port)| ServerAddress::Tcp { host, port }).collect()
}

/// Returns whether `host` ends with a port. The colons of an IPv6 address are inside brackets.
fn has_port(host: &str) -> bool {
    host.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'))
}

fn invalid_url(message: &str) -> BackendError {
    misconfigured(format!("redis: {message}"))
}

fn misconfigured(message: String) -> BackendError {
    BackendError::new(BackendErrorKind::Misconfigured, message).as_refused()
}

const NAMESPACE_BYTES_MAX: usize = 255;
const TIME_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// Installs a cryptography provider, unless the program has chosen one. The client library panics
/// if it finds none, or several to choose from.
#[cfg(feature = "tls")]
fn install_crypto_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Fails if another thread was faster; its provider is used then.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

// Written manually, because the fields include passwords and keys.
impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("servers", &self.servers)
            .field("encrypted", &self.connection.encrypted)
            .field("database", &self.connection.database)
            .field("layout", &self.layout)
            .field("publish", &self.publish)
            .field("namespace", &self.namespace())
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .field("token_memory", &self.token_memory)
            .field("durability", &self.durability)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_password_is_printed() {
        let config = RedisConfig::from_url("redis://worker:hunter2@127.0.0.1:6379/3").unwrap();
        let config = config.with_sentinel_login(None, "hunter2");
        let printed = format!("{config:?}");
        assert!(!printed.contains("hunter2"), "{printed}");
        assert!(printed.contains("6379") && printed.contains("database: 3"), "{printed}");
    }

    #[test]
    fn constructors_are_equivalent_to_urls() {
        let hosts = || [("a".to_owned(), 6380), ("::1".to_owned(), 6379)];
        for (parts, url) in [
            (
                RedisConfig::new("127.0.0.1", 6380).with_database(3),
                "redis://worker:hunter2@127.0.0.1:6380/3",
            ),
            (
                RedisConfig::sentinel(hosts(), "x").with_database(1),
                "redis+sentinel://worker:hunter2@a:6380,[::1]:6379/x/1",
            ),
            (RedisConfig::cluster(hosts()), "redis+cluster://worker:hunter2@a:6380,[::1]"),
            (RedisConfig::quorum(hosts()), "redis+quorum://worker:hunter2@a:6380,[::1]"),
        ] {
            let parts = parts.with_login(Some("worker"), "hunter2");
            let url = RedisConfig::from_url(url).unwrap();
            let describe = |config: &RedisConfig| {
                let login = config.connection.login.clone().unwrap();
                format!("{config:?} {:?} {}", login.user, login.password)
            };
            assert_eq!(describe(&parts), describe(&url));
        }
        let url = RedisConfig::from_url("redis+sentinel://a,b:1/x").unwrap();
        assert!(format!("{url:?}").contains("26379"), "{url:?}");
    }

    #[test]
    fn an_invalid_configuration_is_refused() {
        let hosts = |n: u16| (1..=n).map(|port| ("h".to_owned(), port));
        for (config, message) in [
            (RedisConfig::quorum(hosts(2)), "three"),
            (RedisConfig::quorum(hosts(3)).with_layout(Layout::Spring), "native"),
            (RedisConfig::quorum(hosts(3)).with_replicas(1), "replicas"),
            (RedisConfig::quorum(hosts(3).chain(hosts(1))), "twice"),
            (RedisConfig::cluster(hosts(1)).with_database(1), "database 0"),
            (RedisConfig::cluster(hosts(0)), "no server"),
            (RedisConfig::sentinel(hosts(1), ""), "service"),
            (RedisConfig::new("h", 1).with_namespace(""), "namespace"),
            (RedisConfig::new("h", 1).with_token_memory(Duration::ZERO), "token_memory"),
            (RedisConfig::new("h", 1).with_restart_guard(Duration::from_secs(1)), "quorum"),
        ] {
            let error = config.check().unwrap_err();
            assert!(error.refused() && error.to_string().contains(message), "{error}");
        }
        RedisConfig::new("h", 1).with_layout(Layout::Redisson).check().unwrap();
    }

    #[cfg(all(feature = "tls", feature = "server-tests"))]
    #[tokio::test]
    async fn a_server_without_tls_causes_an_error_and_no_panic() {
        let server = registry_testkit::redis::RedisServer::start(&[]).await.unwrap();
        let plain = RedisConfig::from_url(&server.url()).unwrap();
        let encrypted = RedisConfig::from_url(&server.url().replace("redis:", "rediss:")).unwrap();
        for config in [plain.with_tls(), encrypted] {
            let error = crate::RedisBackend::open(config).await.unwrap_err();
            assert!(error.refused(), "{error:?}");
        }
    }

    #[test]
    fn an_unreadable_url_is_refused_without_printing_it() {
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
