//! What must be known to reach the servers, and how locks are kept in them.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};
use registry_core::{BackendError, BackendErrorKind};

use crate::error::explain;

/// Where the locks of a [`RedisBackend`](crate::RedisBackend) live, and in what form.
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisConfig {
    pub(crate) servers: Servers,
    pub(crate) access: Access,
    pub(crate) layout: Layout,
    pub(crate) publish: Publish,
    pub(crate) namespace: Option<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) token_memory: Duration,
    pub(crate) durability: Durability,
    pub(crate) restart_guard: Duration,
}

/// How the servers work together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Servers {
    /// One server, or whatever answers like one.
    Single(Address),
    /// Sentinels that know which server is the master of `service` now.
    Sentinel { sentinels: Vec<Address>, service: String },
    /// Some members of a cluster; they know the others.
    Cluster(Vec<Address>),
    /// Masters that know nothing of each other.
    Quorum(Vec<Address>),
}

/// Where one server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Address {
    /// `host` is a name or an address without brackets.
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// How to get in: the same for all servers, but for the sentinels' login.
#[derive(Clone, Default)]
pub(crate) struct Access {
    login: Option<Login>,
    sentinel_login: Option<Login>,
    database: u32,
    encrypted: bool,
    #[cfg(feature = "tls")]
    certificates: Option<redis::TlsCertificates>,
}

/// A password, and the user whose it is if it is not that of the server as a whole.
#[derive(Clone)]
struct Login {
    user: Option<String>,
    password: String,
}

impl Access {
    /// All that a client must know to reach a server that holds locks.
    pub(crate) fn server(&self, address: &Address) -> redis::RedisResult<redis::Client> {
        self.client(address, self.login.as_ref(), self.database, ProtocolVersion::RESP3)
    }

    /// All that a client must know to reach a sentinel.
    pub(crate) fn sentinel(&self, address: &Address) -> redis::RedisResult<redis::Client> {
        self.client(address, self.sentinel_login.as_ref(), 0, ProtocolVersion::RESP2)
    }

    fn client(
        &self,
        address: &Address,
        login: Option<&Login>,
        database: u32,
        protocol: ProtocolVersion,
    ) -> redis::RedisResult<redis::Client> {
        let addr = match address {
            Address::Tcp { host, port } if self.encrypted => ConnectionAddr::TcpTls {
                host: host.clone(),
                port: *port,
                insecure: false,
                tls_params: None,
            },
            Address::Tcp { host, port } => ConnectionAddr::Tcp(host.clone(), *port),
            Address::Unix(path) => ConnectionAddr::Unix(path.clone()),
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
        // Without TCP_NODELAY each command would wait for the acknowledgement of the last.
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
impl Access {
    /// Refuses certificates that are none: the client would leave out what it cannot read.
    fn check_certificates(&self) -> Result<(), &'static str> {
        // The client takes what the process has settled on, and would panic where another library has brought a second one to
        // choose from. Somebody else may be faster, and then it is theirs.
        if self.encrypted && rustls::crypto::CryptoProvider::get_default().is_none() {
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        use rustls::pki_types::pem::PemObject as _;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};

        let Some(certificates) = &self.certificates else { return Ok(()) };
        let are_some = |pem: &[u8]| {
            let mut read = CertificateDer::pem_slice_iter(pem).peekable();
            read.peek().is_some() && read.all(|certificate| certificate.is_ok())
        };
        if certificates.root_cert.as_ref().is_some_and(|pem| !are_some(pem)) {
            return Err(
                "the certificates of the authorities cannot be read; they are to be in the PEM format",
            );
        }
        let Some(ours) = &certificates.client_tls else { return Ok(()) };
        if !are_some(&ours.client_cert) {
            return Err("the client's certificate cannot be read; it is to be in the PEM format");
        }
        if PrivateKeyDer::from_pem_slice(&ours.client_key).is_err() {
            return Err("the client's private key cannot be read; it is to be in the PEM format");
        }
        Ok(())
    }
}

/// What the keys and values of a lock look like in the server, and so who else can contend for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Layout {
    /// This library's own: tells who holds a lock, and since when.
    #[default]
    Native,
    /// That of Spring Integration's `RedisLockRegistry`, whose registry key is the namespace. No labels.
    Spring,
    /// That of Redisson's `RLock`, whose name is the key, after the namespace and a colon if there is one. No labels.
    Redisson,
}

/// By which command those who wait are told of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Publish {
    /// As it fits the layout: `SPUBLISH` in a cluster and `PUBLISH` elsewhere; always `PUBLISH` in the Spring layout.
    #[default]
    Auto,
    /// `PUBLISH`: reaches every node of a cluster.
    Plain,
    /// `SPUBLISH`: stays with the nodes that have the lock. Redis 7 and later.
    Sharded,
}

/// What a grant must have survived before it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Durability {
    /// How many replicas must have it.
    pub(crate) replicas: u32,
    /// Whether the server and these replicas must have written it to their disks.
    pub(crate) fsync: bool,
    /// How long that may take.
    pub(crate) limit: Duration,
}

impl Durability {
    pub(crate) const fn is_wanted(self) -> bool {
        self.replicas > 0 || self.fsync
    }
}

impl RedisConfig {
    /// The patience with unanswered commands unless [another](Self::with_response_timeout) is set.
    pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

    /// The server at `host`, a name or an address without brackets, and `port`: nobody logs in, the database is 0.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self::at(Servers::Single(Address::Tcp { host: host.into(), port }))
    }

    /// The server that listens at the socket `path`.
    #[must_use]
    pub fn unix(path: impl Into<PathBuf>) -> Self {
        Self::at(Servers::Single(Address::Unix(path.into())))
    }

    /// The server that is master of `service` now, as some of these sentinels say.
    #[must_use]
    pub fn sentinel(
        sentinels: impl IntoIterator<Item = (String, u16)>,
        service: impl Into<String>,
    ) -> Self {
        Self::at(Servers::Sentinel { sentinels: addresses(sentinels), service: service.into() })
    }

    /// The cluster that these servers are members of. They need not be all; each tells of the others.
    #[must_use]
    pub fn cluster(members: impl IntoIterator<Item = (String, u16)>) -> Self {
        Self::at(Servers::Cluster(addresses(members)))
    }

    /// These masters, which know nothing of each other; a lock is held by whoever holds it on more than half of them.
    #[must_use]
    pub fn quorum(masters: impl IntoIterator<Item = (String, u16)>) -> Self {
        Self::at(Servers::Quorum(addresses(masters)))
    }

    /// Reads a URL: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`, `redis+unix:///PATH[?db=DATABASE&user=USER&pass=PASSWORD]`,
    /// `redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],HOST[:PORT]…/SERVICE[/DATABASE]`,
    /// `redis+cluster://[[USER]:PASSWORD@]HOST[:PORT],…` or `redis+quorum://[[USER]:PASSWORD@]HOST[:PORT],…[/DATABASE]`; for encrypted
    /// connections (feature `tls`) the same with `rediss`. Sentinels listen on port 26379 unless told otherwise, servers on 6379.
    ///
    /// # Errors
    /// `Misconfigured` for what cannot be read. The message does not repeat the URL, which may hold a password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(unusable("the URL cannot be used"));
        };
        let (plain, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
        if kind == "unix" {
            return Self::from_one(url);
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
            let one = Self::from_one(&format!("{plain}://{login}{host}{port}/{path}"))?;
            let Servers::Single(address) = &one.servers else { continue };
            all.push(address.clone());
            config.get_or_insert(one);
        }
        let Some(mut config) = config else { return Err(unusable("the URL names no server")) };
        config.servers = match kind {
            "" if all.len() == 1 => return Ok(config),
            "" => return Err(unusable("the URL names several servers; one is what it can have")),
            "sentinel" => Servers::Sentinel { sentinels: all, service: service.to_owned() },
            "cluster" => Servers::Cluster(all),
            "quorum" => Servers::Quorum(all),
            _ => return Err(unusable("the URL's scheme is none of Redis")),
        };
        Ok(config)
    }

    fn from_one(url: &str) -> Result<Self, BackendError> {
        let info = url.into_connection_info().map_err(|error| explain(&error))?;
        let (address, encrypted) = match info.addr() {
            ConnectionAddr::TcpTls { insecure: true, .. } => {
                return Err(unusable(
                    "a connection that is encrypted but not verified protects nothing; leave out #insecure",
                ));
            }
            ConnectionAddr::Tcp(host, port) => {
                (Address::Tcp { host: host.clone(), port: *port }, false)
            }
            ConnectionAddr::TcpTls { host, port, .. } => {
                (Address::Tcp { host: host.clone(), port: *port }, true)
            }
            ConnectionAddr::Unix(path) => (Address::Unix(path.clone()), false),
            _ => return Err(unusable("the URL cannot be used")),
        };
        let settings = info.redis_settings();
        let mut config = Self::at(Servers::Single(address));
        config.access.login = settings.password().map(|password| Login {
            user: settings.username().map(str::to_owned),
            password: password.to_owned(),
        });
        config.access.database = u32::try_from(settings.db())
            .map_err(|_| unusable("the number of the database is out of range"))?;
        if encrypted {
            config.encrypt();
        }
        Ok(config)
    }

    fn at(servers: Servers) -> Self {
        Self {
            servers,
            access: Access::default(),
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

    /// The same over encrypted connections, verified against the certificate authorities of the host. Feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        self.encrypt();
        self
    }

    fn encrypt(&mut self) {
        self.access.encrypted = true;
        #[cfg(feature = "tls")]
        choose_cryptography();
    }

    /// The same over encrypted connections that are verified against these certificates (PEM) instead of the host's authorities.
    /// Feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_certificate_authority(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.certificates().root_cert = Some(certificates.into());
        self.with_tls()
    }

    /// The same over encrypted connections, in which this certificate (PEM) tells the servers who we are; `key` (PEM) is its private key.
    /// Feature `tls`.
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
        self.access.certificates.get_or_insert_with(none)
    }

    /// The same with this password, of this user or else of the server as a whole.
    #[must_use]
    pub fn with_login(mut self, user: Option<&str>, password: &str) -> Self {
        let user = user.map(str::to_owned);
        self.access.login = Some(Login { user, password: password.to_owned() });
        self
    }

    /// The same with this password for the sentinels, which are not asked for one unless it is given here.
    #[must_use]
    pub fn with_sentinel_login(mut self, user: Option<&str>, password: &str) -> Self {
        let user = user.map(str::to_owned);
        self.access.sentinel_login = Some(Login { user, password: password.to_owned() });
        self
    }

    /// The same with the locks in the database of this number. A cluster has only number 0.
    #[must_use]
    pub fn with_database(mut self, database: u32) -> Self {
        self.access.database = database;
        self
    }

    /// The same with locks that look like this. Native unless set.
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// The same with releases told by this command.
    #[must_use]
    pub fn with_publish(mut self, publish: Publish) -> Self {
        self.publish = publish;
        self
    }

    /// The same with this namespace. Locks of different namespaces never meet, even if their keys are equal. `lock-registry` unless
    /// set; none in the Redisson layout.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// The same with this time to connect. 2 s unless set.
    #[must_use]
    pub fn with_connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// The same with this patience with unanswered commands, after which the connection counts as dead. 10 s unless set, which is
    /// above the engine's own time-out.
    #[must_use]
    pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
        self.response_timeout = response_timeout;
        self
    }

    /// The same with the newest fencing token of a key remembered for this long after its last grant. One day unless set. Tokens do not
    /// go backwards after that either, unless the server's clock does.
    #[must_use]
    pub fn with_token_memory(mut self, token_memory: Duration) -> Self {
        self.token_memory = token_memory;
        self
    }

    /// The same with grants and renewals that count only when this many replicas have them. None unless set.
    ///
    /// A grant that does not get there in [time](Self::with_replica_timeout) is given back and counts as trouble. This narrows the
    /// gap in which a failover frees a lock that is held and does not close it: a replica that has it not may be promoted.
    #[must_use]
    pub fn with_replicas(mut self, replicas: u32) -> Self {
        self.durability.replicas = replicas;
        self
    }

    /// The same with grants and renewals that count only when they are on the disk of the server, and of as many replicas as
    /// [`with_replicas`](Self::with_replicas) says. Off unless set. Redis 7.2 and later, with `appendonly yes`.
    #[must_use]
    pub fn with_fsync(mut self, fsync: bool) -> Self {
        self.durability.fsync = fsync;
        self
    }

    /// The same with this much time for replicas and disks. 1 s unless set.
    #[must_use]
    pub fn with_replica_timeout(mut self, limit: Duration) -> Self {
        self.durability.limit = limit;
        self
    }

    /// The same with masters of a quorum that have no vote for this long after they were started. Zero unless set.
    ///
    /// For masters that may have lost their data by the restart; at least the longest lease in use. A master that keeps all its writes
    /// (`appendfsync always`) needs no such time.
    #[must_use]
    pub fn with_restart_guard(mut self, restart_guard: Duration) -> Self {
        self.restart_guard = restart_guard;
        self
    }

    /// The namespace that is meant.
    pub(crate) fn namespace(&self) -> &str {
        match (&self.namespace, self.layout) {
            (Some(namespace), _) => namespace,
            (None, Layout::Redisson) => "",
            (None, Layout::Native | Layout::Spring) => "lock-registry",
        }
    }

    /// Refuses what cannot work, without I/O. Opening a store asks this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first thing that is wrong.
    pub fn check(&self) -> Result<(), BackendError> {
        let no = |says: String| Err(unusable_as(format!("redis: {says}")));
        let least = usize::from(self.layout != Layout::Redisson);
        if !(least..=NAMESPACE_BYTES_MAX).contains(&self.namespace().len()) {
            return no(format!("a namespace has {least} to {NAMESPACE_BYTES_MAX} bytes"));
        }
        for (option, given) in [
            ("connect_timeout", self.connect_timeout),
            ("response_timeout", self.response_timeout),
            ("token_memory", self.token_memory),
            ("replica_timeout", self.durability.limit),
        ] {
            if !(Duration::from_millis(10)..=TIME_MAX).contains(&given) {
                return no(format!("{option} of {given:?} is not between 10 ms and 366 days"));
            }
        }
        if self.durability.is_wanted() && self.durability.limit >= self.response_timeout {
            return no("replica_timeout must be shorter than response_timeout".to_owned());
        }
        if self.access.encrypted && !cfg!(feature = "tls") {
            return no("encrypted connections need the feature `tls`".to_owned());
        }
        #[cfg(feature = "tls")]
        self.access.check_certificates().or_else(|says| no(says.to_owned()))?;
        self.check_servers().or_else(|says| no(says.to_owned()))
    }

    fn check_servers(&self) -> Result<(), &'static str> {
        if !self.restart_guard.is_zero() && !matches!(self.servers, Servers::Quorum(_)) {
            return Err("restart_guard is for a quorum");
        }
        let all = match &self.servers {
            Servers::Single(_) => return Ok(()),
            Servers::Sentinel { service, .. } if service.is_empty() => {
                return Err("the sentinels must be told which service is meant");
            }
            Servers::Sentinel { sentinels, .. } => sentinels,
            Servers::Cluster(_) if self.access.database != 0 => {
                return Err("a cluster has only database 0");
            }
            Servers::Cluster(members) => members,
            Servers::Quorum(masters) if masters.len() < 3 => {
                return Err("a quorum has at least three masters; of two, neither may fail");
            }
            Servers::Quorum(_) if self.layout != Layout::Native => {
                return Err("a quorum has only the native layout");
            }
            Servers::Quorum(_) if self.durability.is_wanted() => {
                return Err("the masters of a quorum have no replicas that count");
            }
            Servers::Quorum(masters) => masters,
        };
        if all.is_empty() {
            return Err("no server is named");
        }
        let mut sorted: Vec<_> = all.iter().map(Address::to_string).collect();
        sorted.sort();
        sorted.dedup();
        if sorted.len() != all.len() {
            return Err("a server is named twice");
        }
        Ok(())
    }
}

fn addresses(all: impl IntoIterator<Item = (String, u16)>) -> Vec<Address> {
    all.into_iter().map(|(host, port)| Address::Tcp { host, port }).collect()
}

/// Whether `host` ends with a port. The colons of an IPv6 address stand in brackets.
fn has_port(host: &str) -> bool {
    host.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'))
}

fn unusable(says: &str) -> BackendError {
    unusable_as(format!("redis: {says}"))
}

fn unusable_as(says: String) -> BackendError {
    BackendError::new(BackendErrorKind::Misconfigured, says).as_refused()
}

const NAMESPACE_BYTES_MAX: usize = 255;
const TIME_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The client panics if it finds no cryptography, or finds two to choose from. A program that has chosen keeps its choice.
#[cfg(feature = "tls")]
fn choose_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // It fails where another thread was faster, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

// By hand: it holds passwords and keys.
impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("servers", &self.servers)
            .field("encrypted", &self.access.encrypted)
            .field("database", &self.access.database)
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
    fn parts_say_the_same_as_a_url() {
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
            let said = |config: &RedisConfig| {
                let login = config.access.login.clone().unwrap();
                format!("{config:?} {:?} {}", login.user, login.password)
            };
            assert_eq!(said(&parts), said(&url));
        }
        let url = RedisConfig::from_url("redis+sentinel://a,b:1/x").unwrap();
        assert!(format!("{url:?}").contains("26379"), "{url:?}");
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let hosts = |n: u16| (1..=n).map(|port| ("h".to_owned(), port));
        for (config, says) in [
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
            assert!(error.refused() && error.to_string().contains(says), "{error}");
        }
        RedisConfig::new("h", 1).with_layout(Layout::Redisson).check().unwrap();
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
