//! What must be known to reach the servers, and how locks are kept in them.

use std::fmt;
use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use zookeeper_client::{Acls, AuthId, Connector, Permission};

use crate::path::{Paths, is_path};

/// Where the locks of a [`ZkBackend`](crate::ZkBackend) live, and in what form.
#[derive(Clone)]
#[non_exhaustive]
pub struct ZkConfig {
    hosts: Vec<(String, u16)>,
    pub(crate) chroot: Option<String>,
    root: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) layout: Layout,
    pub(crate) naming: Naming,
    pub(crate) session_timeout: Duration,
    pub(crate) sessions_max: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) request_timeout: Duration,
    auth: Vec<Auth>,
    pub(crate) acl: Acl,
    #[cfg(feature = "tls")]
    tls: Option<zookeeper_client::TlsOptions>,
}

/// How the nodes of locks are placed, and so with whom they are shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// This library's own: `/lock-registry/NAMESPACE/KEY`, with all in the key that could disturb others percent-encoded.
    #[default]
    Native,
    /// That of Apache Curator's `InterProcessMutex`, which Spring Integration's `ZookeeperLockRegistry` uses: `ROOT/KEY`, the key as it is.
    /// Keys that are no path, or would stand in line for another key's lock, are refused.
    Curator,
}

/// What the node of one who contends is called.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Naming {
    /// `_c_UUID-lock-NUMBER`, as Apache Curator does. Programs with kazoo wait for such nodes only if they are told to, by
    /// `extra_lock_patterns=["-lock-"]`.
    #[default]
    Curator,
    /// `HEX__lock__NUMBER`, as kazoo does. Programs with Curator do not wait for such nodes.
    Kazoo,
}

/// Who may do what with the nodes that are made.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acl {
    /// Everybody may do everything, as Curator leaves it unless it is told otherwise.
    #[default]
    Open,
    /// Those who have logged in as we have.
    Creator,
    /// As listed.
    List(Vec<zookeeper_client::Acl>),
}

/// A way to log in.
#[derive(Clone)]
struct Auth {
    scheme: String,
    credentials: Vec<u8>,
}

impl ZkConfig {
    /// How long the session outlives the last word of its client, if nothing else is asked for. Servers grant at most 40 s unless
    /// they are set up otherwise.
    pub const SESSION_TIMEOUT: Duration = Duration::from_secs(30);
    /// The shortest time-out of a session that can be asked for.
    pub const SESSION_TIMEOUT_MIN: Duration = Duration::from_millis(400);
    /// The longest one.
    pub const SESSION_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);
    /// How many sessions a backend may have unless [`with_sessions_max`](Self::with_sessions_max) sets another limit.
    pub const SESSIONS_DEFAULT: u32 = 8;
    /// The highest limit of sessions. Servers accept 60 connections of one host by default (`maxClientCnxns`).
    pub const SESSIONS_MAX: u32 = 32;
    /// How many bytes of node paths one session may have. Its end is one transaction with all of them, and servers cannot read
    /// a transaction of more than twice their `jute.maxbuffer`, 1 MiB by default: they stop, and cannot start again.
    pub const NODE_BYTES_MAX: usize = crate::session::NODE_BYTES_MAX;
    /// How long it may take to get a session.
    pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
    /// How long the answer to one request may take.
    pub const REQUEST_TIMEOUT: Duration = Duration::from_millis(2_500);
    /// Where the keys of the native layout are.
    pub const NATIVE_ROOT: &'static str = "/lock-registry";
    /// Where Spring Integration has its keys.
    pub const CURATOR_ROOT: &'static str = "/SpringIntegration-LockRegistry";
    /// The namespace of the native layout.
    pub const NAMESPACE: &'static str = "default";

    /// Servers, and perhaps the node that everything is below, as ZooKeeper's own clients take them: `HOST[:PORT],…[/CHROOT]`.
    ///
    /// # Errors
    /// [`BackendError`] when that cannot be read.
    pub fn new(servers: &str) -> Result<Self, BackendError> {
        let (hosts, chroot) = match servers.find('/') {
            Some(at) => (&servers[..at], Some(&servers[at..])),
            None => (servers, None),
        };
        let hosts: Option<Vec<_>> = hosts.split(',').map(host).collect();
        let hosts = hosts.ok_or_else(|| {
            unusable("a server is neither HOST nor HOST:PORT, with the port from 1 to 65535")
        })?;
        let config = Self::of_hosts(hosts);
        Ok(match chroot.filter(|chroot| *chroot != "/") {
            Some(chroot) => config.with_chroot(chroot),
            None => config,
        })
    }

    /// Servers by name, or address without brackets, and port.
    #[must_use]
    pub fn of_hosts(hosts: Vec<(String, u16)>) -> Self {
        Self {
            hosts,
            chroot: None,
            root: None,
            namespace: None,
            layout: Layout::default(),
            naming: Naming::default(),
            session_timeout: Self::SESSION_TIMEOUT,
            sessions_max: Self::SESSIONS_DEFAULT,
            connect_timeout: Self::CONNECT_TIMEOUT,
            request_timeout: Self::REQUEST_TIMEOUT,
            auth: Vec::new(),
            acl: Acl::default(),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Puts everything below this node, which must be there.
    #[must_use]
    pub fn with_chroot(mut self, chroot: impl Into<String>) -> Self {
        self.chroot = Some(chroot.into());
        self
    }

    /// Puts keys below this node, which is made if it is not there. Default: [`NATIVE_ROOT`](Self::NATIVE_ROOT) or
    /// [`CURATOR_ROOT`](Self::CURATOR_ROOT).
    #[must_use]
    pub fn with_root(mut self, root: impl Into<String>) -> Self {
        self.root = Some(root.into());
        self
    }

    /// Keeps locks of equal keys apart. In the layout of Curator it is what Curator calls a namespace, and there is none unless it is given; in
    /// the native layout the default is [`NAMESPACE`](Self::NAMESPACE).
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// How nodes are placed.
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// What nodes are called. Nodes of either name are waited for.
    #[must_use]
    pub fn with_naming(mut self, naming: Naming) -> Self {
        self.naming = naming;
        self
    }

    /// How long the servers keep the session, and its locks, after the last word of this client. They may grant less or more, within their
    /// own limits. The longest lease is half of it. Default: [`SESSION_TIMEOUT`](Self::SESSION_TIMEOUT).
    #[must_use]
    pub fn with_session_timeout(mut self, timeout: Duration) -> Self {
        self.session_timeout = timeout;
        self
    }

    /// How many sessions the backend may have, from 1 to [`SESSIONS_MAX`](Self::SESSIONS_MAX). Each has a connection of its own. A further one is
    /// opened when the paths of the nodes of held locks and waiters take 96 KiB in each of the others, which is what one session can
    /// watch, and ended when it has been empty for its time-out. When this limit is reached, each session takes up to
    /// [`NODE_BYTES_MAX`](Self::NODE_BYTES_MAX) bytes; then attempts are refused with
    /// [`SessionsExhausted`](crate::SessionsExhausted). Default: [`SESSIONS_DEFAULT`](Self::SESSIONS_DEFAULT).
    #[must_use]
    pub fn with_sessions_max(mut self, sessions: u32) -> Self {
        self.sessions_max = sessions;
        self
    }

    /// How long it may take to get a session. Default: [`CONNECT_TIMEOUT`](Self::CONNECT_TIMEOUT).
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long the answer to one request may take, and how long a request may wait for a connection. After that its outcome is
    /// found out later. Default: [`REQUEST_TIMEOUT`](Self::REQUEST_TIMEOUT).
    #[must_use]
    pub fn with_request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Logs in with the scheme `digest`. Several logins add up.
    #[must_use]
    pub fn with_login(self, user: &str, password: &str) -> Self {
        self.with_auth("digest", format!("{user}:{password}"))
    }

    /// Logs in with a scheme that the servers know.
    #[must_use]
    pub fn with_auth(mut self, scheme: &str, credentials: impl Into<Vec<u8>>) -> Self {
        self.auth.push(Auth { scheme: scheme.to_owned(), credentials: credentials.into() });
        self
    }

    /// Who may do what with nodes that are made: those of locks and what is above them. Who waits must be allowed to read the nodes of
    /// others, and whoever contends to make and delete nodes.
    #[must_use]
    pub fn with_acl(mut self, acl: Acl) -> Self {
        self.acl = acl;
        self
    }

    /// Encrypts connections. Servers must show a certificate that one of these authorities has signed, for the name by which they are
    /// reached; PEM.
    ///
    /// # Errors
    /// [`BackendError`] when these are no certificates.
    #[cfg(feature = "tls")]
    pub fn with_certificate_authority(mut self, pem: &str) -> Result<Self, BackendError> {
        let tls = self.tls.take().unwrap_or_default().with_pem_ca(pem);
        self.tls = Some(tls.map_err(|_| {
            unusable("the certificates of the authorities cannot be read; they are to be in the PEM format")
        })?);
        Ok(self)
    }

    /// Shows this certificate to servers that want one; PEM.
    ///
    /// # Errors
    /// [`BackendError`] when these are no certificate and key.
    #[cfg(feature = "tls")]
    pub fn with_client_certificate(
        mut self,
        certificate: &str,
        key: &str,
    ) -> Result<Self, BackendError> {
        let tls = self.tls.take().unwrap_or_default().with_pem_identity(certificate, key);
        self.tls = Some(tls.map_err(|_| {
            unusable(
                "the client's certificate or key cannot be read; they are to be in the PEM format",
            )
        })?);
        Ok(self)
    }

    /// Where keys are, below the chroot.
    pub(crate) fn root(&self) -> &str {
        match (&self.root, self.layout) {
            (Some(root), _) => root,
            (None, Layout::Native) => Self::NATIVE_ROOT,
            (None, Layout::Curator) => Self::CURATOR_ROOT,
        }
    }

    pub(crate) fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or(Self::NAMESPACE)
    }

    pub(crate) fn has_login(&self) -> bool {
        !self.auth.is_empty()
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        #[cfg(feature = "tls")]
        return self.tls.is_some();
        #[cfg(not(feature = "tls"))]
        false
    }

    /// Refuses what cannot work, without I/O. Opening a store asks this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first thing that is wrong.
    pub fn check(&self) -> Result<(), BackendError> {
        let is_host = |(name, port): &(String, u16)| {
            *port != 0 && !name.is_empty() && !name.contains([',', '/', ' '])
        };
        if self.hosts.is_empty() || !self.hosts.iter().all(is_host) {
            return Err(unusable("there is no server, or one has no name or no port"));
        }
        #[cfg(feature = "tls")]
        if self.is_encrypted() {
            // The client would panic at a name that no certificate can have.
            let is_name = |(name, _): &(String, u16)| {
                rustls::pki_types::ServerName::try_from(name.as_str()).is_ok()
            };
            if !self.hosts.iter().all(is_name) {
                return Err(unusable("a server's name is none that a certificate can have"));
            }
            // It takes what the process has settled on, and would panic where there are several to choose from.
            if rustls::crypto::CryptoProvider::get_default().is_none() {
                // Somebody else may have been faster, and then it is theirs.
                let _ = rustls::crypto::ring::default_provider().install_default();
            }
        }
        if self.chroot.as_deref().is_some_and(|chroot| !is_path(chroot)) {
            return Err(unusable("the chroot is no path such as `/app`"));
        }
        // Only of Curator's layout: in the other one keys would be children of everything.
        let may_be_top = self.layout == Layout::Curator && self.root() == "/";
        if !is_path(self.root()) && !may_be_top {
            return Err(unusable("the root is no path such as `/locks`"));
        }
        if self.namespace.as_deref() == Some("") {
            return Err(unusable("the namespace is empty"));
        }
        if Paths::new(self).are_the_servers() {
            return Err(unusable("keys would be below `/zookeeper`, which belongs to the servers"));
        }
        let timeouts = Self::SESSION_TIMEOUT_MIN..=Self::SESSION_TIMEOUT_MAX;
        if !timeouts.contains(&self.session_timeout) {
            return Err(unusable("the time-out of the session is not between 400 ms and 24 h"));
        }
        if !(1..=Self::SESSIONS_MAX).contains(&self.sessions_max) {
            return Err(unusable("the limit of sessions is not between 1 and 32"));
        }
        if self.connect_timeout.is_zero() || self.request_timeout.is_zero() {
            return Err(unusable("a time-out of zero is over before anything is asked"));
        }
        if self.acl == Acl::Creator && !self.has_login() {
            return Err(unusable(
                "nodes that only their creator may touch need a login, or nobody could tell who that is",
            ));
        }
        if let Acl::List(list) = &self.acl {
            let needed = [Permission::READ, Permission::CREATE, Permission::DELETE];
            if !needed.iter().all(|right| list.iter().any(|acl| acl.permission().has(*right))) {
                return Err(unusable(
                    "the list of rights lets nobody read, create and delete nodes, so locks could not be given back",
                ));
            }
        }
        Ok(())
    }

    pub(crate) fn has_several_servers(&self) -> bool {
        self.hosts.len() > 1
    }

    /// Servers as the client takes them.
    pub(crate) fn servers(&self) -> String {
        let hosts = self.hosts.iter().map(|(name, port)| {
            if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") }
        });
        hosts.collect::<Vec<_>>().join(",")
    }

    /// What begins a session of this time-out.
    pub(crate) fn connector(&self, session_timeout: Duration) -> Connector {
        let connector = zookeeper_client::Client::connector()
            .with_session_timeout(session_timeout)
            .with_connection_timeout(silence(session_timeout, self.request_timeout));
        let connector = self.auth.iter().fold(connector, |connector, auth| {
            connector.with_auth(&auth.scheme, &auth.credentials)
        });
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            return connector.with_tls(tls.clone());
        }
        connector
    }

    /// The rights to what is made.
    pub(crate) fn acls(&self) -> Acls<'_> {
        match &self.acl {
            Acl::Open => Acls::anyone_all(),
            Acl::Creator => Acls::creator_all(),
            Acl::List(list) => Acls::new(list),
        }
    }
}

impl Acl {
    /// Reads `open`, `creator`, or a list such as `world:anyone:r,digest:USER:HASH:cdrwa`, as ZooKeeper's own shell shows it.
    ///
    /// # Errors
    /// [`BackendError`] when that cannot be read.
    pub fn parse(text: &str) -> Result<Self, BackendError> {
        match text {
            "open" => Ok(Self::Open),
            "creator" => Ok(Self::Creator),
            list => {
                let list: Option<Vec<_>> = list.split(',').map(entry).collect();
                list.map(Self::List).ok_or_else(|| {
                    unusable(
                        "the rights to nodes are neither `open` nor `creator` nor a list of SCHEME:ID:RIGHTS with rights out of `cdrwa`",
                    )
                })
            }
        }
    }
}

/// Returns how long a connection may be silent before it is given up. The client sends a ping after three eighths of that.
///
/// By itself the client waits for two fifths of the session, which is nearly as long as the longest lease. Bounded by the time-out of a request, so
/// that shorter leases outlive a half-open connection. Not shorter than [`SILENCE_MIN`], or a busy server would be taken for a silent one.
fn silence(session_timeout: Duration, request_timeout: Duration) -> Duration {
    let silence = (session_timeout / 5).min(request_timeout);
    silence.max(SILENCE_MIN.min(session_timeout * 2 / 5))
}

fn entry(text: &str) -> Option<zookeeper_client::Acl> {
    let (scheme, rest) = text.split_once(':')?;
    let (id, rights) = rest.rsplit_once(':')?;
    let right = |c| {
        Some(match c {
            'c' => Permission::CREATE,
            'd' => Permission::DELETE,
            'r' => Permission::READ,
            'w' => Permission::WRITE,
            'a' => Permission::ADMIN,
            _ => return None,
        })
    };
    let given = rights.chars().try_fold(Permission::NONE, |all, c| Some(all | right(c)?))?;
    let is_some = !scheme.is_empty() && !rights.is_empty();
    is_some.then(|| zookeeper_client::Acl::new(given, AuthId::new(scheme, id)))
}

fn host(text: &str) -> Option<(String, u16)> {
    let (name, port) = match text.rsplit_once(':') {
        // The colons of an IPv6 address stand in brackets.
        Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()?),
        _ => (text, PORT),
    };
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    (!name.is_empty() && port != 0).then(|| (name.to_owned(), port))
}

fn unusable(problem: &'static str) -> BackendError {
    BackendError::new(BackendErrorKind::Misconfigured, format!("zookeeper: {problem}")).as_refused()
}

impl fmt::Debug for ZkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkConfig")
            .field("servers", &self.servers())
            .field("chroot", &self.chroot)
            .field("root", &self.root())
            .field("namespace", &self.namespace)
            .field("layout", &self.layout)
            .field("naming", &self.naming)
            .field("session_timeout", &self.session_timeout)
            .field("sessions_max", &self.sessions_max)
            .field("logins", &self.auth.len())
            .field("acl", &self.acl)
            .field("encrypted", &self.is_encrypted())
            .finish_non_exhaustive()
    }
}

/// Without the identities, which may be hashes of passwords.
impl fmt::Debug for Acl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open => f.write_str("Open"),
            Self::Creator => f.write_str("Creator"),
            Self::List(list) => write!(f, "List({} entries)", list.len()),
        }
    }
}

/// No connection is given up for its silence before this time, unless the session is shorter than 5 s.
const SILENCE_MIN: Duration = Duration::from_secs(2);

/// Where ZooKeeper listens unless it is told otherwise.
const PORT: u16 = 2181;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_as_other_clients_read_them() {
        for (text, servers, chroot) in [
            ("h", "h:2181", None),
            ("h:1", "h:1", None),
            ("a,b:2,[::1]:3,[::2]", "a:2181,b:2,[::1]:3,[::2]:2181", None),
            ("h/", "h:2181", None),
            ("h/app/x", "h:2181", Some("/app/x")),
        ] {
            let config = ZkConfig::new(text).unwrap();
            config.check().unwrap();
            assert_eq!((config.servers().as_str(), config.chroot.as_deref()), (servers, chroot));
        }
        for bad in ["", ",", "h:0", "h:x", "a,,b", ":1", "/app"] {
            assert!(ZkConfig::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_connection_may_be_silent_for_a_request_s_time_out_but_not_for_half_a_lease() {
        for (session, request, silence_of) in [
            (30_000, 2_500, 2_500),
            (30_000, 1_000, 2_000),
            (30_000, 30_000, 6_000),
            (10_000, 2_500, 2_000),
            (4_000, 2_500, 1_600),
            (400, 2_500, 160),
        ] {
            let millis = Duration::from_millis;
            assert_eq!(silence(millis(session), millis(request)), millis(silence_of));
        }
    }

    #[test]
    fn what_cannot_work_is_refused_before_anything_is_asked() {
        let good = || ZkConfig::new("h").unwrap();
        let hour = Duration::from_secs(3_600);
        for bad in [
            good().with_chroot("app"),
            good().with_chroot("/app/"),
            good().with_root("/"),
            good().with_root("/a//b"),
            good().with_namespace(""),
            good().with_root("/zookeeper"),
            good().with_root("/zookeeper/locks").with_layout(Layout::Curator),
            good().with_root("/").with_layout(Layout::Curator).with_namespace("zookeeper"),
            good().with_layout(Layout::Curator).with_namespace("zookeeper"),
            ZkConfig::new("h/zookeeper").unwrap(),
            good().with_session_timeout(Duration::from_millis(1)),
            good().with_session_timeout(hour * 25),
            good().with_connect_timeout(Duration::ZERO),
            good().with_sessions_max(0),
            good().with_sessions_max(33),
            good().with_acl(Acl::Creator),
            good().with_acl(Acl::List(Vec::new())),
            good().with_acl(Acl::parse("world:anyone:cr,digest:u:aGFzaA=:cra").unwrap()),
            ZkConfig::of_hosts(Vec::new()),
            ZkConfig::of_hosts(vec![("a,b".to_owned(), 1)]),
        ] {
            assert!(!bad.check().unwrap_err().is_retryable(), "{bad:?}");
        }
        good().with_root("/").with_layout(Layout::Curator).check().unwrap();
        good().with_root("/zookeeper-locks").with_namespace("zookeeper").check().unwrap();
        good().with_chroot("/app").with_root("/zookeeper").check().unwrap();
        good().with_acl(Acl::Creator).with_login("u", "p").check().unwrap();
        good()
            .with_acl(Acl::parse("world:anyone:r,digest:u:aGFzaA=:crd").unwrap())
            .check()
            .unwrap();
    }

    #[test]
    fn rights_are_read_as_the_shell_shows_them() {
        assert_eq!(Acl::parse("open").unwrap(), Acl::Open);
        assert_eq!(Acl::parse("creator").unwrap(), Acl::Creator);
        let Acl::List(list) = Acl::parse("world:anyone:r,digest:u:aGFzaA=:cdrwa").unwrap() else {
            panic!("a list")
        };
        assert_eq!(list[0].permission(), Permission::READ);
        assert_eq!((list[1].scheme(), list[1].id()), ("digest", "u:aGFzaA="));
        assert_eq!(list[1].permission(), Permission::ALL);
        for bad in
            ["", "world", "world:anyone", "world:anyone:", "world:anyone:x", "a:b:r,", "closed"]
        {
            assert!(Acl::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn nothing_that_prints_shows_a_secret() {
        let acl = Acl::parse("digest:u:CANARY=:r").unwrap();
        let config = ZkConfig::new("h").unwrap().with_login("u", "CANARY").with_acl(acl);
        assert!(!format!("{config:?}").contains("CANARY"), "{config:?}");
    }
}
