//! The configuration of a Redis store: the servers, their credentials, and the format of the locks.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};
use registry_core::config::{
    self, BackendConfig, Host, InvalidValue, OptionError, OptionRow, PemFiles, SERVER_TIME_MIN,
    Secret, StoreKind, TIME_MAX, UrlParts, Values, display_host, format_time, parse_choice,
    parse_count, parse_switch, parse_time,
};
use registry_core::{
    BackendError, Capabilities, GuaranteeClass, Reach, RegistryBuilder, RenewalPolicy,
};

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
    pub(crate) min_process_age: Duration,
    pem_files: PemFiles,
    /// The values of the options `lease`, `timeout`, `replica_timeout` and `restart_guard`, if set.
    /// `check_limits` compares them with each other.
    lease_option: Option<Duration>,
    timeout_option: Option<Duration>,
    replica_timeout_option: Option<Duration>,
    restart_guard_option: Option<Duration>,
    /// Whether a method has set `response_timeout`. If not, the option `timeout` may change it.
    is_response_timeout_set: bool,
    /// Whether a method or an option has set the limit of `durability`. If not, the option
    /// `timeout` may change it.
    is_replica_timeout_set: bool,
}

/// Redis and Valkey.
pub static STORE: StoreKind = StoreKind::new("redis", &[OPTIONS], |url| {
    RedisConfig::parse(url).map(|config| Box::new(config) as Box<dyn BackendConfig>)
});

/// The options, in the order of the tables in the book. `RedisConfig::assign` sets the fields.
const OPTIONS: &[OptionRow] = &[
    OptionRow::namespace("`lock-registry`; with `layout=redisson` none"),
    OptionRow::LEASE,
    OptionRow::TIMEOUT,
    OptionRow::layout(&["native", "spring", "redisson"]).only(NO_QUORUM, is_no_quorum),
    OptionRow::layout(&["native"]).only("redis+quorum stores", is_quorum),
    OptionRow::CONNECT_TIMEOUT,
    OptionRow::time(
        "token_memory",
        (SERVER_TIME_MIN, TIME_MAX),
        "`1day`",
        "how long the newest token of a key is kept after its last grant",
    ),
    OptionRow::new(
        "publish",
        Values::Choice { what: "publish command", names: &["auto", "plain", "sharded"] },
        "`auto`",
        "how releases are published: `plain` by `PUBLISH`, `sharded` by `SPUBLISH`",
    ),
    OptionRow::new(
        "replicas",
        Values::Count { min: 0, max: u32::MAX },
        "`0`",
        "how many replicas must have a grant before it counts",
    )
    .only(NO_QUORUM, is_no_quorum),
    OptionRow::new(
        "fsync",
        Values::Switch,
        "`false`",
        "whether a grant must be on disk before it counts, also on replicas",
    )
    .only(NO_QUORUM, is_no_quorum),
    OptionRow::time(
        "replica_timeout",
        (SERVER_TIME_MIN, RegistryBuilder::TIMEOUT_MAX),
        "`1s`, or five sixths of `timeout` if that is shorter",
        "how long replicas and disks may take; less than `timeout`",
    )
    .only(NO_QUORUM, is_no_quorum),
    OptionRow::time(
        "restart_guard",
        (Duration::ZERO, TIME_MAX),
        "`0s`",
        "how long a master grants no locks after its start; `0s`, or at least the `lease`",
    )
    .only("redis+quorum stores", is_quorum),
    OptionRow::new(
        "db",
        Values::Count { min: 0, max: u32::MAX },
        "`0`",
        "the number of the database",
    )
    .only("redis+unix stores", |scheme| scheme.ends_with("+unix")),
    OptionRow::new(
        "sentinel_password",
        Values::Secret { non_secret_values: &[], syntax: "a text" },
        "none",
        "the password for the sentinels",
    )
    .only("redis+sentinel stores", is_sentinel),
    OptionRow::new(
        "sentinel_user",
        Values::Secret { non_secret_values: &[], syntax: "a text" },
        "none",
        "the user for the sentinels; requires `sentinel_password`",
    )
    .only("redis+sentinel stores", is_sentinel),
    PemFiles::CA.only(ENCRYPTED, is_encrypted),
    PemFiles::CERT.only(ENCRYPTED, is_encrypted),
    PemFiles::KEY.only(ENCRYPTED, is_encrypted),
];

const NO_QUORUM: &str = "redis stores without `+quorum`";
const ENCRYPTED: &str = "encrypted redis stores (`rediss://`)";

fn is_quorum(scheme: &str) -> bool {
    scheme.ends_with("+quorum")
}

fn is_no_quorum(scheme: &str) -> bool {
    !is_quorum(scheme)
}

fn is_sentinel(scheme: &str) -> bool {
    scheme.ends_with("+sentinel")
}

fn is_encrypted(scheme: &str) -> bool {
    scheme.starts_with("rediss")
}

/// How the servers are organized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServerAddresses {
    /// One server, or a proxy that behaves like one.
    Single(ServerAddress),
    /// Sentinels that report the current master of `service`.
    Sentinel { sentinels: Vec<ServerAddress>, service: String },
    /// Some members of a cluster. They report all members.
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

/// Credentials and encryption for all servers. Sentinels have a separate login.
#[derive(Clone, Default)]
pub(crate) struct ConnectionSettings {
    login: Option<RedisLogin>,
    sentinel_user: Option<Secret>,
    sentinel_password: Option<Secret>,
    database: u32,
    encrypted: bool,
    #[cfg(feature = "tls")]
    certificates: Option<redis::TlsCertificates>,
}

/// A password and its user. Without a user, the password is the server-wide password.
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
        let login = self.sentinel_password.as_ref().map(|password| RedisLogin {
            user: self.sentinel_user.as_ref().map(|user| user.expose().to_owned()),
            password: password.expose().to_owned(),
        });
        self.client(address, login.as_ref(), 0, ProtocolVersion::RESP2)
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
        // Without TCP_NODELAY, each command would wait for the acknowledgement of the previous
        // command.
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
    /// Returns an error for unreadable certificates, because the client library would silently
    /// ignore them. For encrypted connections, also installs the cryptography provider.
    fn check_certificates(&self) -> Result<(), &'static str> {
        use rustls::pki_types::pem::PemObject as _;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};

        if self.encrypted {
            install_crypto_provider();
        }
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

/// The format of a lock's keys and values. The format determines which other programs can contend
/// for the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Layout {
    /// This library's own format, with the holder's label and the time of acquisition.
    #[default]
    Native,
    /// The format of Spring Integration's `RedisLockRegistry`. The namespace is its registry key.
    /// This format stores no labels.
    Spring,
    /// The format of Redisson's `RLock`. The lock's name is the key. A namespace, if set, and a
    /// colon precede the key. This format stores no labels.
    Redisson,
}

/// The command that publishes a release to the waiters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Publish {
    /// `SPUBLISH` in a cluster, otherwise `PUBLISH`. In the Spring layout, `PUBLISH` in any case.
    #[default]
    Auto,
    /// `PUBLISH`, which reaches every node of a cluster.
    Plain,
    /// `SPUBLISH`, which reaches only the nodes of the lock's shard. Requires Redis 7.
    Sharded,
}

/// Whether a grant or renewal must be on disk before it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Fsync {
    /// A grant need not be on disk. It counts as soon as the server, and the replicas that
    /// [`with_replicas`](RedisConfig::with_replicas) requires, have it.
    #[default]
    NotRequired,
    /// The server must have written the grant to disk, and so must the number of replicas that
    /// [`with_replicas`](RedisConfig::with_replicas) sets. Requires Redis 7.2 with `appendonly
    /// yes`.
    Required,
}

/// The durability that a grant needs before it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Durability {
    /// The number of replicas that must have received the grant.
    pub(crate) replicas: u32,
    /// Whether the server and these replicas must have written the grant to disk.
    pub(crate) fsync: Fsync,
    /// The time limit for replicas and disks.
    pub(crate) limit: Duration,
}

impl Durability {
    pub(crate) const fn is_required(self) -> bool {
        self.replicas > 0 || matches!(self.fsync, Fsync::Required)
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
            sentinels: tcp_addresses(sentinels),
            service: service.into(),
        })
    }

    /// Configures a cluster by some of its members. These members report all members.
    #[must_use]
    pub fn cluster(members: impl IntoIterator<Item = (String, u16)>) -> Self {
        Self::with_servers(ServerAddresses::Cluster(tcp_addresses(members)))
    }

    /// Configures a quorum of independent masters. A claim holds the lock if more than half of the
    /// masters have granted it. At least three masters are required.
    #[must_use]
    pub fn quorum(masters: impl IntoIterator<Item = (String, u16)>) -> Self {
        Self::with_servers(ServerAddresses::Quorum(tcp_addresses(masters)))
    }

    /// Parses a URL. Schemes that start with `rediss` encrypt the connections (feature `tls`).
    ///
    /// - `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`
    /// - `redis+unix://[[USER]:PASSWORD@]/PATH[?db=DATABASE]`
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
        config::from_url(url, &["db"], Self::parse)
    }

    fn parse(url: &UrlParts<'_>) -> Result<Self, BackendError> {
        let (base_scheme, topology) = url.scheme.split_once('+').unwrap_or((&url.scheme, ""));
        let syntax = match topology {
            "" => "HOST:PORT",
            "unix" => "/PATH",
            "sentinel" => "HOST:PORT,HOST:PORT/SERVICE",
            "cluster" => "HOST:PORT,HOST:PORT",
            "quorum" => "HOST:PORT,HOST:PORT,HOST:PORT",
            _ => return Err(url.invalid(NO_REDIS_SCHEME)),
        };
        // A Unix socket is never encrypted.
        if !matches!(base_scheme, "redis" | "rediss")
            || (base_scheme, topology) == ("rediss", "unix")
        {
            return Err(url.invalid(NO_REDIS_SCHEME));
        }
        let syntax = format!("write `{}://{syntax}`", url.scheme);
        let (login, hosts) = url.login_and_hosts(&syntax)?;
        let (servers, database) = match topology {
            "" if hosts.contains(',') => {
                return Err(url.invalid(&format!(
                    "contains several servers; write a single server, or use `{base_scheme}+sentinel:`, `{base_scheme}+cluster:` or `{base_scheme}+quorum:`"
                )));
            }
            "" => {
                let (host, port) = url.host(hosts, PORT)?;
                (ServerAddresses::Single(ServerAddress::Tcp { host, port }), url.path)
            }
            "unix" if !hosts.is_empty() => {
                return Err(url.invalid(&format!(
                    "contains a host after `//`, which a socket does not have; {syntax}"
                )));
            }
            "unix" => {
                let path = url.file_path(url.path, &syntax)?;
                (ServerAddresses::Single(ServerAddress::Unix(path)), "")
            }
            "sentinel" => {
                let sentinels = tcp_addresses(url.hosts(hosts, SENTINEL_PORT, &syntax)?);
                let path = url.path.strip_prefix('/').unwrap_or_default();
                let (service, number) = path.split_at(path.find('/').unwrap_or(path.len()));
                let service = url.text(service, "a service")?;
                if service.is_empty() {
                    return Err(url.invalid(&format!(
                        "contains no service name for the sentinels; {syntax}"
                    )));
                }
                (ServerAddresses::Sentinel { sentinels, service }, number)
            }
            "cluster" => (
                ServerAddresses::Cluster(tcp_addresses(url.hosts(hosts, PORT, &syntax)?)),
                url.path,
            ),
            _ => {
                let masters = url.hosts(hosts, PORT, &syntax)?;
                if masters.len() < QUORUM_MIN {
                    return Err(url.invalid(&format!(
                        "contains fewer than {QUORUM_MIN} servers, which tolerate no failure; {syntax}"
                    )));
                }
                (ServerAddresses::Quorum(tcp_addresses(masters)), url.path)
            }
        };
        let mut config = Self::with_servers(servers);
        config.connection.database = parse_database(database, url)?;
        if topology == "cluster" && config.connection.database != 0 {
            return Err(url.invalid(
                "contains a database number; a cluster has only number 0, so leave it out",
            ));
        }
        if let Some(login) = login {
            // Without a password, the client would not send the user.
            let (user, Some(password)) = (login.user, login.password) else {
                return Err(incomplete_login(url));
            };
            if user.expose().is_empty() && password.expose().is_empty() {
                return Err(incomplete_login(url));
            }
            let user = Some(user.expose()).filter(|user| !user.is_empty());
            config = config.with_login(user, password.expose());
        }
        if base_scheme == "rediss" {
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
            durability: Durability {
                replicas: 0,
                fsync: Fsync::NotRequired,
                limit: REPLICA_TIMEOUT,
            },
            min_process_age: Duration::ZERO,
            pem_files: PemFiles::default(),
            lease_option: None,
            timeout_option: None,
            replica_timeout_option: None,
            restart_guard_option: None,
            is_response_timeout_set: false,
            is_replica_timeout_set: false,
        }
    }

    /// Encrypts the connections and verifies the servers against the host's certificate
    /// authorities. A connection over a Unix socket is never encrypted. Requires the feature `tls`.
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

    /// Sets the user and the password. Without a user, the password is the server-wide password.
    #[must_use]
    pub fn with_login(mut self, user: Option<&str>, password: &str) -> Self {
        let user = user.map(str::to_owned);
        self.connection.login = Some(RedisLogin { user, password: password.to_owned() });
        self
    }

    /// Sets the login for the sentinels. By default, the client sends no login to sentinels.
    #[must_use]
    pub fn with_sentinel_login(mut self, user: Option<&str>, password: &str) -> Self {
        self.connection.sentinel_user = user.map(Secret::new);
        self.connection.sentinel_password = Some(Secret::new(password));
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

    /// Sets the time limit for a response. After this time, the client replaces the connection. The
    /// default is 10 s, which exceeds the engine's default time-out of 3 s.
    #[must_use]
    pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
        self.response_timeout = response_timeout;
        self.is_response_timeout_set = true;
        self
    }

    /// Sets how long the newest fencing token of a key is stored after its last grant. The default
    /// is one day. The token is stored for at least twice the lease. Tokens grow even after the
    /// stored token has expired, unless the server's clock goes backwards.
    #[must_use]
    pub fn with_token_memory(mut self, token_memory: Duration) -> Self {
        self.token_memory = token_memory;
        self
    }

    /// Sets the number of replicas that must have received a grant or renewal before it counts. The
    /// default is 0.
    ///
    /// If a grant does not reach the replicas in [time](Self::with_replica_timeout), the store
    /// releases it and returns a store error. A renewal that does not reach them also returns a
    /// store error. This setting reduces the risk that a failover frees a held lock. A risk
    /// remains, because a failover may promote a replica without the grant.
    #[must_use]
    pub fn with_replicas(mut self, replicas: u32) -> Self {
        self.durability.replicas = replicas;
        self
    }

    /// Sets whether a grant or renewal must be on disk before it counts. The default is
    /// [`Fsync::NotRequired`].
    #[must_use]
    pub fn with_fsync(mut self, fsync: Fsync) -> Self {
        self.durability.fsync = fsync;
        self
    }

    /// Sets the time limit for the replicas and disks that a grant or renewal needs. The default is
    /// 1 s.
    #[must_use]
    pub fn with_replica_timeout(mut self, limit: Duration) -> Self {
        self.durability.limit = limit;
        self.is_replica_timeout_set = true;
        self
    }

    /// Sets the minimum uptime of a quorum master. Clients measure it from the first response of
    /// the server process. A master with a shorter uptime grants no locks. The default is zero.
    ///
    /// Use this setting for masters that may lose data at a restart. Set at least the longest lease
    /// in use. A master that logs all writes (`appendfsync always`) does not need a minimum uptime.
    #[must_use]
    pub fn with_restart_guard(mut self, restart_guard: Duration) -> Self {
        self.min_process_age = restart_guard;
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

    /// Returns an error if the configuration cannot work. Performs no I/O.
    /// [`RedisBackend::open`](crate::RedisBackend::open) calls this function first.
    ///
    /// # Errors
    /// Returns [`BackendError`] of kind `Misconfigured` for the first invalid setting.
    pub fn check(&self) -> Result<(), BackendError> {
        self.validate().map_err(|error| error.into_backend_error("redis"))
    }

    fn check_limits(&self) -> Result<(), OptionError> {
        for (option, value) in [
            ("connect_timeout", self.connect_timeout),
            ("token_memory", self.token_memory),
            ("replica_timeout", self.durability.limit),
            ("restart_guard", self.min_process_age),
        ] {
            // A store without this option does not use the value.
            if self.kind().option(option, self.scheme()).is_some() {
                self.check_value(option, &format_time(value))?;
            }
        }
        let limits = SERVER_TIME_MIN..=TIME_MAX;
        OptionError::check_time("response_timeout", self.response_timeout, &limits)?;
        if self.durability.is_required() && self.durability.limit >= self.response_timeout {
            return Err(OptionError::new(
                "replica_timeout",
                format!(
                    "is {}, not shorter than the `response_timeout` {}; use a shorter one",
                    format_time(self.durability.limit),
                    format_time(self.response_timeout)
                ),
            ));
        }
        let lease = self.lease_option.unwrap_or(Duration::from_secs(30));
        if let Some(guard) = self.restart_guard_option
            && !guard.is_zero()
            && guard < lease
        {
            return Err(OptionError::new(
                "restart_guard",
                format!(
                    "is {}, less than the `lease` {}, so a restarted master could grant a lock that another client holds; use a longer one",
                    format_time(guard),
                    format_time(lease)
                ),
            ));
        }
        let timeout = self.timeout_option.unwrap_or(Duration::from_secs(3));
        match self.replica_timeout_option {
            Some(given) if given >= timeout => Err(OptionError::new(
                "replica_timeout",
                format!(
                    "is {}, not less than the `timeout` {} of the whole operation; use a shorter one",
                    format_time(given),
                    format_time(timeout)
                ),
            )),
            _ => Ok(()),
        }
    }

    fn check_servers(&self) -> Result<(), OptionError> {
        let is_quorum = matches!(self.servers, ServerAddresses::Quorum(_));
        if !self.min_process_age.is_zero() && !is_quorum {
            return Err(OptionError::new(
                "restart_guard",
                "has no effect without a quorum; use `redis+quorum:`, or remove the option",
            ));
        }
        let all = match &self.servers {
            ServerAddresses::Single(_) => return Ok(()),
            ServerAddresses::Sentinel { service, .. } if service.is_empty() => {
                return Err(OptionError::general(
                    "the service name of the sentinels is missing; add it as the path of the URL",
                ));
            }
            ServerAddresses::Sentinel { sentinels, .. } => sentinels,
            ServerAddresses::Cluster(_) if self.connection.database != 0 => {
                return Err(OptionError::general(
                    "a cluster has only database 0; leave the database number out",
                ));
            }
            ServerAddresses::Cluster(members) => members,
            ServerAddresses::Quorum(masters) if masters.len() < QUORUM_MIN => {
                return Err(OptionError::general(
                    "a quorum requires at least three masters; list more masters",
                ));
            }
            ServerAddresses::Quorum(_) if self.layout != Layout::Native => {
                return Err(OptionError::general(
                    "a quorum supports only the native layout; set `layout=native`",
                ));
            }
            ServerAddresses::Quorum(_) if self.durability.is_required() => {
                return Err(OptionError::general(
                    "a quorum supports neither replicas nor fsync; remove both options",
                ));
            }
            ServerAddresses::Quorum(masters) => masters,
        };
        if all.is_empty() {
            return Err(OptionError::general("the list of servers is empty; name at least one"));
        }
        let mut sorted: Vec<_> = all.iter().map(ServerAddress::to_string).collect();
        sorted.sort();
        sorted.dedup();
        if sorted.len() != all.len() {
            return Err(OptionError::general("a server is listed twice; list each server once"));
        }
        Ok(())
    }

    /// Derives the limits that depend on the engine's time-out.
    fn derive_time_limits(&mut self) {
        let Some(timeout) = self.timeout_option else { return };
        if !self.is_response_timeout_set {
            // A connection must not fail before the engine's time-out ends.
            self.response_timeout = Self::RESPONSE_TIMEOUT.max(timeout * 6 / 5);
        }
        if !self.is_replica_timeout_set {
            // The engine releases a grant that arrives after its time-out, so the wait for replicas
            // must be shorter.
            self.durability.limit = REPLICA_TIMEOUT.min(timeout * 5 / 6).max(SERVER_TIME_MIN);
        }
    }

    #[cfg(feature = "tls")]
    pub(crate) fn with_pem_files(mut self) -> Result<Self, BackendError> {
        let pem = self.pem_files.read("redis")?;
        if let Some(ca) = pem.ca {
            self = self.with_certificate_authority(ca);
        }
        if let Some((certificate, key)) = pem.client {
            self = self.with_client_certificate(certificate, key);
        }
        Ok(self)
    }
}

impl BackendConfig for RedisConfig {
    fn kind(&self) -> &'static StoreKind {
        &STORE
    }

    fn scheme(&self) -> &'static str {
        match (&self.servers, self.connection.encrypted) {
            (ServerAddresses::Single(ServerAddress::Unix(_)), _) => "redis+unix",
            (ServerAddresses::Single(_), false) => "redis",
            (ServerAddresses::Single(_), true) => "rediss",
            (ServerAddresses::Sentinel { .. }, false) => "redis+sentinel",
            (ServerAddresses::Sentinel { .. }, true) => "rediss+sentinel",
            (ServerAddresses::Cluster(_), false) => "redis+cluster",
            (ServerAddresses::Cluster(_), true) => "rediss+cluster",
            (ServerAddresses::Quorum(_), false) => "redis+quorum",
            (ServerAddresses::Quorum(_), true) => "rediss+quorum",
        }
    }

    fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        match name {
            "namespace" => self.namespace = Some(value.to_owned()),
            "lease" => self.lease_option = Some(parse_time(value)?),
            "timeout" => self.timeout_option = Some(parse_time(value)?),
            "layout" => self.layout = parse_choice(value, &LAYOUTS)?,
            "connect_timeout" => self.connect_timeout = parse_time(value)?,
            "token_memory" => self.token_memory = parse_time(value)?,
            "publish" => self.publish = parse_choice(value, &PUBLISH_COMMANDS)?,
            "replicas" => self.durability.replicas = parse_count(value)?,
            "fsync" => {
                self.durability.fsync = match parse_switch(value)? {
                    true => Fsync::Required,
                    false => Fsync::NotRequired,
                };
            }
            "replica_timeout" => {
                self.durability.limit = parse_time(value)?;
                self.replica_timeout_option = Some(self.durability.limit);
                self.is_replica_timeout_set = true;
            }
            "restart_guard" => {
                self.min_process_age = parse_time(value)?;
                self.restart_guard_option = Some(self.min_process_age);
            }
            "db" => self.connection.database = parse_count(value)?,
            "sentinel_user" => self.connection.sentinel_user = Some(Secret::new(value)),
            "sentinel_password" => self.connection.sentinel_password = Some(Secret::new(value)),
            _ if self.pem_files.assign(name, value)? => {}
            _ => return Err(InvalidValue::unknown_option()),
        }
        self.derive_time_limits();
        Ok(())
    }

    fn validate(&self) -> Result<(), OptionError> {
        if self.namespace().is_empty() && self.layout != Layout::Redisson {
            return Err(OptionError::new(
                "namespace",
                "is empty; in Redis only `layout=redisson` accepts an empty namespace",
            ));
        }
        self.check_value("namespace", self.namespace())?;
        if self.layout == Layout::Spring && self.publish == Publish::Sharded {
            return Err(OptionError::new(
                "publish",
                "is sharded, and Spring publishes and subscribes without shards; set `publish=plain`",
            ));
        }
        if self.connection.sentinel_user.is_some() && self.connection.sentinel_password.is_none() {
            let problem = "has no effect without `sentinel_password`; set both";
            return Err(OptionError::new("sentinel_user", problem));
        }
        self.pem_files.validate()?;
        self.check_limits()?;
        if self.connection.encrypted && !cfg!(feature = "tls") {
            return Err(OptionError::general(
                "encrypted connections need the feature `tls`; build with this feature",
            ));
        }
        #[cfg(feature = "tls")]
        self.connection.check_certificates().map_err(OptionError::general)?;
        self.check_servers()
    }

    fn capabilities(&self) -> Capabilities {
        let class = match self.servers {
            ServerAddresses::Single(_) => GuaranteeClass::Volatile,
            ServerAddresses::Sentinel { .. }
            | ServerAddresses::Cluster(_)
            | ServerAddresses::Quorum(_) => GuaranteeClass::BestEffort,
        };
        let mut capabilities = Capabilities::new("redis", class, Reach::Network)
            .with_fencing()
            .with_wakes()
            .with_inspect()
            .with_invalidations()
            .with_renewal(RenewalPolicy::new().with_verify_after(VERIFY_AFTER));
        if self.layout == Layout::Native {
            capabilities = capabilities.with_labels();
            if !matches!(self.servers, ServerAddresses::Quorum(_)) {
                capabilities = capabilities
                    .with_shared()
                    .with_upgradable()
                    .with_permits()
                    .with_values()
                    .with_waiters()
                    .with_fair_on_request();
            }
        }
        if self.layout == Layout::Spring {
            // The default pause between two attempts of `RedisLockRegistry`.
            capabilities = capabilities.with_peer_poll(Duration::from_millis(100));
        }
        capabilities
    }

    fn hosts(&self) -> Vec<Host> {
        let host = |address: &ServerAddress| match address {
            ServerAddress::Tcp { host, port } => Some((host.clone(), *port)),
            ServerAddress::Unix(_) => None,
        };
        match &self.servers {
            ServerAddresses::Single(server) => host(server).into_iter().collect(),
            ServerAddresses::Sentinel { sentinels: all, .. }
            | ServerAddresses::Cluster(all)
            | ServerAddresses::Quorum(all) => all.iter().filter_map(host).collect(),
        }
    }

    fn address(&self) -> String {
        match &self.servers {
            ServerAddresses::Single(server) => server.to_string(),
            _ => self.hosts().iter().map(display_host).collect::<Vec<_>>().join(","),
        }
    }
}

const NO_REDIS_SCHEME: &str = "has no Redis scheme; use `redis`, `redis+unix`, `redis+sentinel`, `redis+cluster` or `redis+quorum`";

const LAYOUTS: [(&str, Layout); 3] =
    [("native", Layout::Native), ("spring", Layout::Spring), ("redisson", Layout::Redisson)];

const PUBLISH_COMMANDS: [(&str, Publish); 3] =
    [("auto", Publish::Auto), ("plain", Publish::Plain), ("sharded", Publish::Sharded)];

fn parse_database(path: &str, url: &UrlParts<'_>) -> Result<u32, BackendError> {
    let number = path.strip_prefix('/').unwrap_or(path);
    let is_decimal = number.bytes().all(|byte| byte.is_ascii_digit());
    match number.parse() {
        Err(_) if number.is_empty() => Ok(0),
        Ok(number) if is_decimal => Ok(number),
        _ => Err(url.invalid("contains a path that is not a database number, such as `/0`")),
    }
}

fn incomplete_login(url: &UrlParts<'_>) -> BackendError {
    url.invalid(
        "contains an incomplete login; write `USER:PASSWORD@`, or `:PASSWORD@` without a user",
    )
}

fn tcp_addresses(all: impl IntoIterator<Item = (String, u16)>) -> Vec<ServerAddress> {
    all.into_iter().map(|(host, port)| ServerAddress::Tcp { host, port }).collect()
}

/// The time after the grant at which the engine first verifies a claim. The verification also
/// registers the key for client tracking. Tracking costs the server more than the lock itself, so
/// the server does not track locks that are held for less than this time.
const VERIFY_AFTER: Duration = Duration::from_millis(25);

/// The default port of Redis servers.
const PORT: u16 = 6_379;
/// The default port of sentinels.
const SENTINEL_PORT: u16 = 26_379;
/// The minimum number of masters. A smaller quorum tolerates no failure.
const QUORUM_MIN: usize = 3;
const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);

/// Installs a cryptography provider, unless the program has chosen a provider. The client library
/// panics if it finds no provider, or several providers without a default.
#[cfg(feature = "tls")]
fn install_crypto_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // The call fails if another thread has installed a provider. The client library then uses
        // that provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

// The manual implementation omits passwords and keys.
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
            .field("restart_guard", &self.min_process_age)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use registry_core::BackendErrorKind;

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
    fn a_method_has_precedence_over_the_limits_that_follow_from_the_option_timeout() {
        let seconds = Duration::from_secs;
        let mut config = RedisConfig::from_url("redis://127.0.0.1").unwrap();
        config.set("timeout", "20s").unwrap();
        assert_eq!(config.response_timeout, seconds(24));
        let mut config = RedisConfig::from_url("redis://127.0.0.1")
            .unwrap()
            .with_response_timeout(seconds(30))
            .with_replica_timeout(seconds(2));
        config.set("timeout", "1200ms").unwrap();
        assert_eq!((config.response_timeout, config.durability.limit), (seconds(30), seconds(2)));
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
            (
                RedisConfig::quorum(hosts().into_iter().chain([("b".to_owned(), 6379)])),
                "redis+quorum://worker:hunter2@a:6380,[::1],b",
            ),
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

    fn parsed(url: &str) -> RedisConfig {
        RedisConfig::from_url(url).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    fn tcp(host: &str, port: u16) -> ServerAddress {
        ServerAddress::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn a_url_contains_host_port_and_database() {
        let one = |host, port, database| (ServerAddresses::Single(tcp(host, port)), database);
        for (url, server) in [
            ("redis://db", one("db", 6_379, 0)),
            ("REDIS://db.example.com:6380/", one("db.example.com", 6_380, 0)),
            ("redis://10.1.2.3/15", one("10.1.2.3", 6_379, 15)),
            ("redis://[::1]", one("::1", 6_379, 0)),
            ("redis://[2001:db8::1]:7000/2", one("2001:db8::1", 7_000, 2)),
        ] {
            let config = parsed(url);
            assert_eq!((config.servers, config.connection.database), server, "{url}");
        }
    }

    #[test]
    fn the_scheme_selects_the_topology_of_several_servers() {
        let hosts = |all: &[(&str, u16)]| {
            all.iter().map(|(host, port)| tcp(host, *port)).collect::<Vec<_>>()
        };
        let sentinels_of = |service: &str, sentinels| ServerAddresses::Sentinel {
            sentinels: hosts(sentinels),
            service: service.to_owned(),
        };
        let socket = |path: &str| ServerAddresses::Single(ServerAddress::Unix(path.into()));
        for (url, servers, database) in [
            ("redis+sentinel://s/main", sentinels_of("main", &[("s", 26_379)]), 0),
            (
                "redis+sentinel://a,b:1,[::1],[::1]:2/my%2Fmain/7",
                sentinels_of("my/main", &[("a", 26_379), ("b", 1), ("::1", 26_379), ("::1", 2)]),
                7,
            ),
            ("redis+cluster://a", ServerAddresses::Cluster(hosts(&[("a", 6_379)])), 0),
            (
                "redis+cluster://a:1,b/",
                ServerAddresses::Cluster(hosts(&[("a", 1), ("b", 6_379)])),
                0,
            ),
            ("redis+cluster://a/0", ServerAddresses::Cluster(hosts(&[("a", 6_379)])), 0),
            (
                "redis+quorum://h:1,h:2,g/3",
                ServerAddresses::Quorum(hosts(&[("h", 1), ("h", 2), ("g", 6_379)])),
                3,
            ),
            ("redis+unix:///run/a%20b.sock", socket("/run/a b.sock"), 0),
            ("redis+unix:///redis.sock?db=3", socket("/redis.sock"), 3),
        ] {
            let config = parsed(url);
            assert_eq!((config.servers, config.connection.database), (servers, database), "{url}");
        }
    }

    #[test]
    fn user_and_password_are_decoded_and_redacted() {
        for (url, user, password) in [
            ("redis://:secret@db", None, "secret"),
            ("redis://worker:secret@db", Some("worker"), "secret"),
            ("redis://w%40rk:p%2Fa%3As%25%20%C3%BC%0A@db", Some("w@rk"), "p/a:s% ü\n"),
            ("redis://worker:a:b@db:1", Some("worker"), "a:b"),
            ("redis://worker:@db", Some("worker"), ""),
            ("redis+sentinel://worker:secret@a,b/main", Some("worker"), "secret"),
            ("redis+cluster://:secret@a,b", None, "secret"),
            ("redis+quorum://worker:secret@a,b,c/1", Some("worker"), "secret"),
            ("redis+unix://worker:secret@/run/redis.sock", Some("worker"), "secret"),
        ] {
            let config = parsed(url);
            let login = config.connection.login.clone().unwrap();
            assert_eq!((login.user.as_deref(), &*login.password), (user, password), "{url}");
            let output = format!("{config:?}{config:#?}");
            assert!(password.is_empty() || !output.contains(password), "{output}");
            assert!(user.is_none_or(|user| !output.contains(user)), "{output}");
        }
    }

    #[test]
    fn the_scheme_rediss_encrypts() {
        for kind in ["://a/1", "+sentinel://a,b/main", "+cluster://a,b", "+quorum://a,b,c/1"] {
            let encrypted = parsed(&format!("rediss{kind}"));
            let plain = parsed(&format!("redis{kind}"));
            assert!(encrypted.connection.encrypted && !plain.connection.encrypted, "{kind}");
            assert_eq!(encrypted.servers, plain.servers);
            assert_eq!(encrypted.connection.database, plain.connection.database);
        }
        RedisConfig::from_url("rediss+unix:///run/redis.sock").unwrap_err();
    }

    #[test]
    fn an_error_about_a_url_without_a_server_contains_a_hint() {
        for (url, hint) in [
            ("redis:", "redis://HOST"),
            ("redis:db", "redis://HOST"),
            ("redis://", "no valid host"),
            ("redis:///0", "no valid host"),
            ("redis://:secret@", "no valid host"),
            ("redis://db:", "port"),
            ("redis://db:0", "port"),
            ("redis://db:65536", "port"),
            ("redis://db:+1", "port"),
            ("redis://dä", "no valid host"),
            ("redis://::1", "no valid host"),
            ("redis://a,b", "several servers"),
            ("redis://a,b", "`redis+sentinel:`"),
            ("redis://db/x", "not a database number"),
            ("redis://db/-1", "not a database number"),
            ("redis://db/+1", "not a database number"),
            ("redis://db/0/0", "not a database number"),
            ("redis://db/99999999999", "not a database number"),
            ("redis://worker@db", "incomplete login"),
            ("redis://@db", "incomplete login"),
            ("redis://:@db", "incomplete login"),
            ("redis://worker:x@y@db", "`%40`"),
            ("redis://worker:1/2@db", "`%40`"),
            ("redis://worker:1?label=x@db", "`%40`"),
            ("redis://worker:1/x:y", "not a database number"),
            ("redis://worker:100%@db", "`%25`"),
            ("redis://worker:%ff@db", "UTF-8"),
            ("redis://db#insecure", "`%23`"),
        ] {
            let error = RedisConfig::from_url(url).unwrap_err().to_string();
            assert!(error.contains(hint), "{url}: {error}");
        }
    }

    #[test]
    fn an_error_about_an_invalid_topology_contains_a_hint() {
        const SENTINELS: &str = "write `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE`";
        const CLUSTER: &str = "write `redis+cluster://HOST:PORT,HOST:PORT`";
        const QUORUM: &str = "write `redis+quorum://HOST:PORT,HOST:PORT,HOST:PORT`";
        const SOCKET: &str = "write `redis+unix:///PATH`";
        for (url, problem, hint) in [
            ("redis+sentinel:main", "contains no server", SENTINELS),
            ("redis+sentinel:///main", "contains no server", SENTINELS),
            ("redis+sentinel://a,b", "no service name", SENTINELS),
            ("redis+sentinel://a,b/", "no service name", SENTINELS),
            ("redis+sentinel://a,b//1", "no service name", SENTINELS),
            ("redis+sentinel://a,b/main/x", "not a database number", "`/0`"),
            ("redis+sentinel://a,b/main/1/2", "not a database number", "`/0`"),
            ("redis+sentinel://a,b/main//1", "not a database number", "`/0`"),
            ("redis+sentinel://a,b/%ff", "a service", "not UTF-8"),
            ("redis+sentinel://a,,b/main", "lists an invalid server", SENTINELS),
            ("redis+sentinel://a,b:0/main", "port from 1 to 65535", SENTINELS),
            ("redis+sentinel://a,b,A:26379/main", "twice", "default port is 26379"),
            ("redis+sentinel://worker@a/main", "incomplete login", "`:PASSWORD@`"),
            ("redis+cluster:", "contains no server", CLUSTER),
            ("redis+cluster://", "contains no server", CLUSTER),
            ("redis+cluster://a,", "lists an invalid server", CLUSTER),
            ("redis+cluster://a,b c", "lists an invalid server", CLUSTER),
            ("redis+cluster://a,::1", "lists an invalid server", CLUSTER),
            ("redis+cluster://a,b/1", "number 0", "leave it out"),
            ("redis+cluster://a,b/main", "not a database number", "`/0`"),
            ("redis+cluster://[::1],[::1]:6379", "twice", "each server once"),
            ("redis+quorum://", "contains no server", QUORUM),
            ("redis+quorum://a,b", "fewer than 3", QUORUM),
            ("redis+quorum://a,b/1", "fewer than 3", QUORUM),
            ("redis+quorum://a,b,a:6379", "twice", "default port is 6379"),
            ("redis+quorum://a,b,c/main", "not a database number", "`/0`"),
            ("redis+quorum://a:1,b:2/3@c:4", "`@`", "`%40`"),
            ("redis+unix:/run/redis.sock", "contains no server", SOCKET),
            ("redis+unix://", "no path", SOCKET),
            ("redis+unix:///", "ends in `/`", "not of its directory"),
            ("redis+unix:///run/", "ends in `/`", "not of its directory"),
            ("redis+unix://run/redis.sock", "contains a host", SOCKET),
            ("redis+unix:///run/a@b.sock", "`@`", "path and options write `%40`"),
            ("redis+unix:///run/%00", "NUL", "invalid in a file name"),
        ] {
            let error = RedisConfig::from_url(url).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains(hint), "{url}: {error}");
        }
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
            (RedisConfig::cluster(hosts(0)), "list of servers is empty"),
            (RedisConfig::sentinel(hosts(1), ""), "service"),
            (RedisConfig::new("h", 1).with_namespace(""), "namespace"),
            (
                RedisConfig::new("h", 1).with_layout(Layout::Spring).with_publish(Publish::Sharded),
                "publish",
            ),
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
