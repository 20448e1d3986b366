//! The configuration of a ZooKeeper lock store: servers, sessions, layout, logins and TLS.
//! `ZkConfig::with_pem_files` reads files. `ZkBackend::open` connects to the servers.

use std::fmt;
use std::time::Duration;

use registry_core::config::{
    self, BackendConfig, Host, InvalidValue, OptionError, OptionRow, PemFiles, StoreKind, UrlParts,
    Values, display_host, format_time, parse_choice, parse_count, parse_time,
};
use registry_core::{
    BackendError, BackendErrorKind, Capabilities, GuaranteeClass, Reach, RenewalPolicy,
};
use zookeeper_client::{Acls, AuthId, Connector, Permission};

use crate::layout::{Layout, Naming};
use crate::path::{Paths, encode, is_valid_path};

/// Configuration of a [`ZkBackend`](crate::ZkBackend).
#[derive(Clone)]
#[non_exhaustive]
pub struct ZkConfig {
    hosts: Vec<Host>,
    pub(crate) chroot: Option<String>,
    root: Option<String>,
    namespace: Option<String>,
    layout: Layout,
    pub(crate) naming: Naming,
    pub(crate) session_timeout: Duration,
    pub(crate) sessions_max: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) request_timeout: Duration,
    auth: Vec<Auth>,
    pub(crate) acl: Acl,
    encrypted: bool,
    pem_files: PemFiles,
    /// The engine's lease, if the option `lease` is set.
    pub(crate) lease_option: Option<Duration>,
    /// The session time-out, if the option `session` or a method has set it. Takes precedence over
    /// `lease`.
    session_option: Option<Duration>,
    /// The login of the option `auth`, in addition to the login of the URL.
    auth_option: Option<Auth>,
    #[cfg(feature = "tls")]
    tls: Option<zookeeper_client::TlsOptions>,
    /// [`with_certificate_authority`](Self::with_certificate_authority) was called.
    #[cfg(feature = "tls")]
    has_authority: bool,
}

/// ZooKeeper.
pub static STORE: StoreKind = StoreKind::new("zookeeper", &[OPTIONS], |url| {
    ZkConfig::parse(url).map(|config| Box::new(config) as Box<dyn BackendConfig>)
});

/// The options. `ZkConfig::assign` sets the field of each option. Only `poll` has no field, because
/// the engine reads it.
const OPTIONS: &[OptionRow] = &[
    OptionRow::namespace("`default`; with `layout=curator` none"),
    OptionRow::LEASE.with_default("half of the granted session, at most `30s`"),
    OptionRow::POLL.with_default("`2s`"),
    OptionRow::TIMEOUT,
    OptionRow::layout(&["native", "curator"]),
    OptionRow::CONNECT_TIMEOUT
        .with_default("`5s` for one attempt, `2s` for repeating failed attempts"),
    OptionRow::time(
        "session",
        (ZkConfig::SESSION_TIMEOUT_MIN, ZkConfig::SESSION_TIMEOUT_MAX),
        "twice the option `lease` if it is set, else `30s`",
        "how long the servers keep the session after the last message of this process; they may grant more or less",
    ),
    OptionRow::new(
        "sessions",
        Values::Count { min: 1, max: ZkConfig::SESSIONS_MAX },
        "`8`",
        "the maximum number of sessions, each with its own connection",
    ),
    OptionRow::new(
        "root",
        Values::Text { bytes_max: usize::MAX },
        "`/lock-registry`; with `layout=curator` `/SpringIntegration-LockRegistry`",
        "the parent node of all keys, below the chroot",
    ),
    OptionRow::new(
        "naming",
        Values::Choice {
            what: "node naming",
            names: &["curator", "kazoo", "curator-read-write", "curator-semaphore"],
        },
        "`curator`",
        "the names of lock nodes",
    ),
    OptionRow::new(
        "acl",
        Values::Secret {
            non_secret_values: &["open", "creator"],
            syntax: "a list of SCHEME:ID:RIGHTS",
        },
        "`open`",
        "the access rights of created nodes",
    ),
    OptionRow::new(
        "auth",
        Values::Secret { non_secret_values: &[], syntax: "SCHEME:CREDENTIALS" },
        "none",
        "a login, for schemes other than user and password in the URL",
    ),
    PemFiles::CA.with_default("none; required").only(ENCRYPTED, is_encrypted),
    PemFiles::CERT.only(ENCRYPTED, is_encrypted),
    PemFiles::KEY.only(ENCRYPTED, is_encrypted),
];

const ENCRYPTED: &str = "encrypted zk stores (`zks://`)";

fn is_encrypted(scheme: &str) -> bool {
    scheme == "zks"
}

/// Access rights of created nodes.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acl {
    /// Every client has all rights. This is Curator's default.
    #[default]
    Open,
    /// Only clients with the same login have rights.
    Creator,
    /// The listed rights.
    List(Vec<zookeeper_client::Acl>),
}

/// One login: scheme and credentials.
#[derive(Clone)]
struct Auth {
    scheme: String,
    credentials: Vec<u8>,
}

impl ZkConfig {
    /// The default session time-out: how long the servers keep a session after the last message of
    /// its client. Servers grant at most 40 s by default.
    pub const SESSION_TIMEOUT: Duration = Duration::from_secs(30);
    /// Minimum session time-out that can be requested.
    pub const SESSION_TIMEOUT_MIN: Duration = Duration::from_millis(400);
    /// Maximum session time-out that can be requested.
    pub const SESSION_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);
    /// Default limit of sessions per backend; see [`with_sessions_max`](Self::with_sessions_max).
    pub const SESSIONS_DEFAULT: u32 = 8;
    /// Maximum limit of sessions. Servers accept 60 connections per host by default
    /// (`maxClientCnxns`).
    pub const SESSIONS_MAX: u32 = 32;
    /// The maximum bytes of node paths in one session. The servers end a session by one transaction
    /// with all these paths. Servers stop at a transaction of more than twice their
    /// `jute.maxbuffer` (1 MiB by default) and cannot start again. This constant is a quarter of
    /// the largest transaction that servers with the default can read.
    pub const NODE_BYTES_MAX: usize = 512 * 1024;
    /// Default time limit for opening a session.
    pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
    /// Default time limit for the response to one request.
    pub const REQUEST_TIMEOUT: Duration = Duration::from_millis(2_500);
    /// Default root of the native layout.
    pub const NATIVE_ROOT: &'static str = "/lock-registry";
    /// Default root of the Curator layout, as in Spring Integration.
    pub const CURATOR_ROOT: &'static str = "/SpringIntegration-LockRegistry";
    /// Default namespace of the native layout.
    pub const NAMESPACE: &'static str = "default";

    /// Returns a configuration for these servers and an optional chroot, in the format of
    /// ZooKeeper's own clients: `HOST[:PORT],…[/CHROOT]`.
    ///
    /// # Errors
    /// [`BackendError`] if a server does not have this format. [`check`](Self::check) validates the
    /// chroot.
    pub fn new(servers: &str) -> Result<Self, BackendError> {
        let (hosts, chroot) = match servers.find('/') {
            Some(at) => (&servers[..at], Some(&servers[at..])),
            None => (servers, None),
        };
        let hosts: Option<Vec<_>> = hosts.split(',').map(parse_host).collect();
        let hosts = hosts.ok_or_else(|| {
            misconfigured(
                "a server does not have the form HOST or HOST:PORT, with a port from 1 to 65535; correct the list of servers",
            )
        })?;
        let config = Self::of_hosts(hosts);
        Ok(match chroot.filter(|chroot| *chroot != "/") {
            Some(chroot) => config.with_chroot(chroot),
            None => config,
        })
    }

    /// Parses a URL: `zk://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]…[/CHROOT]`, or `zks://…` for
    /// encrypted connections (feature `tls`).
    ///
    /// # Errors
    /// [`BackendError`] for a URL that cannot be parsed or contains an option. The message does not
    /// repeat the URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        config::from_url(url, &[], Self::parse)
    }

    fn parse(url: &UrlParts<'_>) -> Result<Self, BackendError> {
        if !matches!(&*url.scheme, "zk" | "zks") {
            return Err(url.invalid("has no ZooKeeper scheme; use `zk` or `zks`"));
        }
        let syntax = format!("write `{}://HOST:PORT,HOST:PORT/CHROOT`", url.scheme);
        let (login, hosts) = url.login_and_hosts(&syntax)?;
        let chroot = url.text(url.path, "a chroot")?;
        let mut config = Self::of_hosts(url.hosts(hosts, PORT, &syntax)?);
        config.encrypted = is_encrypted(&url.scheme);
        if !matches!(&*chroot, "" | "/") {
            if chroot.ends_with('/') || chroot.contains("//") {
                return Err(url.invalid(
                    "contains a chroot that ends in `/` or contains `//`; write the path of a node, such as `/app`",
                ));
            }
            config = config.with_chroot(chroot);
        }
        let Some(login) = login else { return Ok(config) };
        match login.password {
            Some(password) if !login.user.expose().is_empty() => {
                Ok(config.with_login(login.user.expose(), password.expose()))
            }
            _ => Err(url.invalid("contains an incomplete login; write `USER:PASSWORD@`")),
        }
    }

    /// Returns a configuration for these servers. A host is a name, or an address without brackets.
    #[must_use]
    pub fn of_hosts(hosts: Vec<Host>) -> Self {
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
            encrypted: false,
            pem_files: PemFiles::default(),
            lease_option: None,
            session_option: None,
            auth_option: None,
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "tls")]
            has_authority: false,
        }
    }

    /// Places all nodes below this node, which must exist.
    #[must_use]
    pub fn with_chroot(mut self, chroot: impl Into<String>) -> Self {
        self.chroot = Some(chroot.into());
        self
    }

    /// Places keys below this node, which is created if it does not exist. Default:
    /// [`NATIVE_ROOT`](Self::NATIVE_ROOT) or [`CURATOR_ROOT`](Self::CURATOR_ROOT).
    #[must_use]
    pub fn with_root(mut self, root: impl Into<String>) -> Self {
        self.root = Some(root.into());
        self
    }

    /// Sets the namespace. Locks in different namespaces are independent, even if their keys are
    /// equal. In the native layout, the default is [`NAMESPACE`](Self::NAMESPACE). In the Curator
    /// layout, this is a Curator namespace, for example `apps/orders`, and the default is no
    /// namespace.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Sets the placement of nodes.
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the names of created nodes. With [`Naming::CuratorReadWrite`], waiters recognise only
    /// the names of this recipe. Otherwise, they recognise the names of [`Naming::Curator`] and
    /// [`Naming::Kazoo`].
    #[must_use]
    pub fn with_naming(mut self, naming: Naming) -> Self {
        self.naming = naming;
        self
    }

    /// Sets how long the servers keep the session and its locks after the last message of this
    /// client. The servers may grant more or less, within their own limits. The longest lease is
    /// half of the granted time-out. Default: [`SESSION_TIMEOUT`](Self::SESSION_TIMEOUT).
    #[must_use]
    pub fn with_session_timeout(mut self, timeout: Duration) -> Self {
        self.session_timeout = timeout;
        self.session_option = Some(timeout);
        self
    }

    /// Limits the sessions of the backend, from 1 to [`SESSIONS_MAX`](Self::SESSIONS_MAX). Each
    /// session has its own connection.
    ///
    /// A session watches all its nodes while their paths take at most 96 KiB together. The paths of
    /// held locks and of waiters count together. When every session has reached this size, the
    /// backend opens another session. A session without nodes ends after the length of its
    /// time-out, except the oldest session. At the limit of sessions, and while no further session
    /// can be opened, each session takes up to [`NODE_BYTES_MAX`](Self::NODE_BYTES_MAX) bytes of
    /// paths. When all sessions are full, the error of an attempt has the source
    /// [`SessionsExhausted`](crate::SessionsExhausted). Default:
    /// [`SESSIONS_DEFAULT`](Self::SESSIONS_DEFAULT).
    #[must_use]
    pub fn with_sessions_max(mut self, sessions: u32) -> Self {
        self.sessions_max = sessions;
        self
    }

    /// Limits the time for opening a session. Default: [`CONNECT_TIMEOUT`](Self::CONNECT_TIMEOUT).
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Limits the time for the response to one request, and the time for which a request waits for
    /// a connection. If no response arrives in time, the backend determines the outcome of the
    /// request later. Default: [`REQUEST_TIMEOUT`](Self::REQUEST_TIMEOUT).
    #[must_use]
    pub fn with_request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Logs in with the scheme `digest`. Repeated calls add further logins.
    #[must_use]
    pub fn with_login(self, user: &str, password: &str) -> Self {
        self.with_auth("digest", format!("{user}:{password}"))
    }

    /// Logs in with any scheme that the servers support.
    #[must_use]
    pub fn with_auth(mut self, scheme: &str, credentials: impl Into<Vec<u8>>) -> Self {
        self.auth.push(Auth { scheme: scheme.to_owned(), credentials: credentials.into() });
        self
    }

    /// Sets the rights of created nodes: lock nodes and their parents. A waiter needs the right to
    /// read the nodes of other clients. Every contender needs the rights to create and delete
    /// nodes. Upgradable locks, value blocks and [`Naming::CuratorSemaphore`] also need the right
    /// to write.
    #[must_use]
    pub fn with_acl(mut self, acl: Acl) -> Self {
        self.acl = acl;
        self
    }

    /// Encrypts connections. The servers' certificates must be signed by one of these authorities,
    /// for the host names of this configuration. `pem` is PEM text.
    ///
    /// # Errors
    /// [`BackendError`] if `pem` contains no valid certificates.
    #[cfg(feature = "tls")]
    pub fn with_certificate_authority(mut self, pem: &str) -> Result<Self, BackendError> {
        let tls = self.tls.take().unwrap_or_default().with_pem_ca(pem);
        self.tls = Some(tls.map_err(|_| {
            misconfigured(
                "the certificates of the certificate authorities are not valid PEM text; provide them in PEM format",
            )
        })?);
        self.has_authority = true;
        Ok(self)
    }

    /// Encrypts connections, and sends this certificate to servers that request one. Both arguments
    /// are PEM text.
    ///
    /// # Errors
    /// [`BackendError`] if an argument is not valid PEM text.
    #[cfg(feature = "tls")]
    pub fn with_client_certificate(
        mut self,
        certificate: &str,
        key: &str,
    ) -> Result<Self, BackendError> {
        let tls = self.tls.take().unwrap_or_default().with_pem_identity(certificate, key);
        self.tls = Some(tls.map_err(|_| {
            misconfigured(
                "the client certificate or its key is not valid PEM text; provide both in PEM format",
            )
        })?);
        Ok(self)
    }

    /// Returns the parent node of all keys, relative to the chroot.
    fn root(&self) -> &str {
        match (&self.root, self.layout) {
            (Some(root), _) => root,
            (None, Layout::Native) => Self::NATIVE_ROOT,
            (None, Layout::Curator) => Self::CURATOR_ROOT,
        }
    }

    /// Returns the paths of the lock nodes.
    pub(crate) fn paths(&self) -> Paths {
        let chroot = self.chroot.as_deref().unwrap_or_default();
        let root = self.root();
        let root = if root == "/" { "" } else { root };
        let base = match (self.layout, &self.namespace) {
            (Layout::Native, namespace) => {
                let namespace = namespace.as_deref().unwrap_or(Self::NAMESPACE);
                format!("{chroot}{root}/{}", encode(namespace))
            }
            // Like Curator, this layout places the namespace above the root path, and encodes
            // nothing. A namespace may be several nodes.
            (Layout::Curator, Some(namespace)) => format!("{chroot}/{namespace}{root}"),
            (Layout::Curator, None) => format!("{chroot}{root}"),
        };
        Paths::new(base, self.layout).with_semaphore(self.is_curator_semaphore())
    }

    /// Returns whether claims may have other modes than exclusive.
    pub(crate) fn has_modes(&self) -> bool {
        self.layout == Layout::Native || self.has_curator_modes()
    }

    /// Returns whether a client of this layout may upgrade a lock, and so writes the lock's node.
    pub(crate) fn has_upgrades(&self) -> bool {
        self.layout == Layout::Native
    }

    /// Returns whether the naming belongs to a recipe of Curator that has other modes than
    /// exclusive.
    fn has_curator_modes(&self) -> bool {
        matches!(self.naming, Naming::CuratorReadWrite | Naming::CuratorSemaphore)
    }

    /// Returns whether the recipe is that of Curator's semaphore.
    pub(crate) fn is_curator_semaphore(&self) -> bool {
        self.naming == Naming::CuratorSemaphore
    }

    /// Returns whether the rights of created nodes include the right to write for some client. The
    /// configuration does not show whether this client is one of these clients.
    fn acl_grants_write(&self) -> bool {
        match &self.acl {
            Acl::Open | Acl::Creator => true,
            Acl::List(list) => list.iter().any(|acl| acl.permission().has(Permission::WRITE)),
        }
    }

    pub(crate) fn has_login(&self) -> bool {
        !self.auth.is_empty() || self.auth_option.is_some()
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        #[cfg(feature = "tls")]
        return self.encrypted || self.tls.is_some();
        #[cfg(not(feature = "tls"))]
        self.encrypted
    }

    /// Validates the configuration without I/O. `ZkBackend::open` calls this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first invalid setting.
    pub fn check(&self) -> Result<(), BackendError> {
        self.validate().map_err(|error| misconfigured(error.to_string()))
    }

    /// Checks the paths and names of the nodes, and the rights that the naming requires.
    fn check_paths(&self) -> Result<(), OptionError> {
        if self.chroot.as_deref().is_some_and(|chroot| !is_valid_path(chroot)) {
            let problem = "the chroot is not a valid path; an example is `/app`";
            return Err(OptionError::general(problem));
        }
        if self.has_curator_modes() && self.layout != Layout::Curator {
            let problem =
                "is that of a recipe in Curator, which requires `layout=curator`; set both";
            return Err(OptionError::new("naming", problem));
        }
        if self.is_curator_semaphore() && !self.acl_grants_write() {
            return Err(OptionError::new(
                "acl",
                "must grant `w` with `naming=curator-semaphore`; add this right",
            ));
        }
        // The native layout refuses root `/`, because its namespaces would be children of the
        // tree's root node, next to the nodes of other programs.
        let is_root_allowed = self.layout == Layout::Curator && self.root() == "/";
        if !is_valid_path(self.root()) && !is_root_allowed {
            return Err(OptionError::new("root", "is not a valid path; an example is `/locks`"));
        }
        if let Some(namespace) = &self.namespace {
            OptionError::check_not_empty("namespace", namespace)?;
        }
        let namespace_path = self.namespace.as_ref().map(|namespace| format!("/{namespace}"));
        if self.layout == Layout::Curator
            && namespace_path.is_some_and(|namespace_path| !is_valid_path(&namespace_path))
        {
            let problem = "is not a valid path without its first slash; an example is `app`";
            return Err(OptionError::new("namespace", problem));
        }
        if self.paths().is_reserved() {
            return Err(OptionError::general(
                "keys would be below `/zookeeper`, which is reserved for the servers; use another root",
            ));
        }
        Ok(())
    }

    fn check_rights(&self) -> Result<(), OptionError> {
        if let Some(auth) = &self.auth_option
            && auth.scheme.is_empty()
        {
            let problem = "does not have the form SCHEME:CREDENTIALS; write for example `digest:USER:PASSWORD`";
            return Err(OptionError::new("auth", problem));
        }
        if self.acl == Acl::Creator && !self.has_login() {
            let problem = "is `creator`, which requires a login that identifies the creator; set option `auth`";
            return Err(OptionError::new("acl", problem));
        }
        if let Acl::List(list) = &self.acl {
            let required = [Permission::READ, Permission::CREATE, Permission::DELETE];
            if !required.iter().all(|right| list.iter().any(|acl| acl.permission().has(*right))) {
                return Err(OptionError::new(
                    "acl",
                    "must grant `r`, `c` and `d`, without which locks cannot be acquired and released; add these rights",
                ));
            }
        }
        Ok(())
    }

    /// Checks that certificates can contain the servers' names. Also installs a default crypto
    /// provider if the process has none.
    #[cfg(feature = "tls")]
    fn check_names_in_certificates(&self) -> Result<(), OptionError> {
        // The client library panics if a certificate cannot contain the server name.
        let is_name =
            |(name, _): &Host| rustls::pki_types::ServerName::try_from(name.as_str()).is_ok();
        if !self.hosts.iter().all(is_name) {
            return Err(OptionError::general(
                "a server name cannot occur in a certificate; use a DNS name or an IP address",
            ));
        }
        // The client library uses the process's default crypto provider. It panics if several
        // providers are compiled in and none is installed.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // If another thread installs a provider first, the client library uses the other
            // provider.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        Ok(())
    }

    #[cfg(feature = "tls")]
    pub(crate) fn with_pem_files(mut self) -> Result<Self, BackendError> {
        let pem = self.pem_files.read("zookeeper")?;
        let text = |pem: Vec<u8>| String::from_utf8_lossy(&pem).into_owned();
        if let Some(ca) = pem.ca {
            self = self.with_certificate_authority(&text(ca))?;
        }
        if let Some((certificate, key)) = pem.client {
            self = self.with_client_certificate(&text(certificate), &text(key))?;
        }
        Ok(self)
    }

    pub(crate) fn has_several_servers(&self) -> bool {
        self.hosts.len() > 1
    }

    /// Returns the servers in the client library's format.
    pub(crate) fn servers(&self) -> String {
        self.hosts.iter().map(display_host).collect::<Vec<_>>().join(",")
    }

    /// Returns the client library's connector for a session of this time-out.
    pub(crate) fn connector(&self, session_timeout: Duration) -> Connector {
        let connector = zookeeper_client::Client::connector()
            .with_session_timeout(session_timeout)
            .with_connection_timeout(connection_timeout(session_timeout, self.request_timeout));
        let connector =
            self.auth.iter().chain(&self.auth_option).fold(connector, |connector, auth| {
                connector.with_auth(&auth.scheme, &auth.credentials)
            });
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            return connector.with_tls(tls.clone());
        }
        connector
    }

    /// Returns the rights of created nodes.
    pub(crate) fn acls(&self) -> Acls<'_> {
        match &self.acl {
            Acl::Open => Acls::anyone_all(),
            Acl::Creator => Acls::creator_all(),
            Acl::List(list) => Acls::new(list),
        }
    }
}

impl BackendConfig for ZkConfig {
    fn kind(&self) -> &'static StoreKind {
        &STORE
    }

    fn scheme(&self) -> &'static str {
        if self.is_encrypted() { "zks" } else { "zk" }
    }

    fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        match name {
            "namespace" => self.namespace = Some(value.to_owned()),
            "lease" => self.lease_option = Some(parse_time(value)?),
            "poll" => {}
            // After its own time-out, the engine treats the outcome as unknown, so the client's
            // time-out is shorter.
            "timeout" => self.request_timeout = parse_time(value)? * 5 / 6,
            "layout" => {
                let layouts = [("native", Layout::Native), ("curator", Layout::Curator)];
                self.layout = parse_choice(value, &layouts)?;
            }
            "connect_timeout" => self.connect_timeout = parse_time(value)?,
            "session" => self.session_option = Some(parse_time(value)?),
            "sessions" => self.sessions_max = parse_count(value)?,
            "root" => self.root = Some(value.to_owned()),
            "naming" => {
                let namings = [
                    ("curator", Naming::Curator),
                    ("kazoo", Naming::Kazoo),
                    ("curator-read-write", Naming::CuratorReadWrite),
                    ("curator-semaphore", Naming::CuratorSemaphore),
                ];
                self.naming = parse_choice(value, &namings)?;
            }
            "acl" => {
                self.acl = parse_acl(value).ok_or_else(|| InvalidValue::new(INVALID_ACL))?;
            }
            "auth" => {
                let (scheme, credentials) = value.split_once(':').unwrap_or_default();
                let credentials = credentials.into();
                self.auth_option = Some(Auth { scheme: scheme.to_owned(), credentials });
            }
            _ if self.pem_files.assign(name, value)? => {}
            _ => return Err(InvalidValue::unknown_option()),
        }
        match (self.session_option, self.lease_option) {
            (Some(session), _) => self.session_timeout = session,
            (None, Some(lease)) => {
                self.session_timeout = (lease * 2).max(Self::SESSION_TIMEOUT_MIN);
            }
            (None, None) => {}
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), OptionError> {
        let is_host =
            |(name, port): &Host| *port != 0 && !name.is_empty() && !name.contains([',', '/', ' ']);
        if self.hosts.is_empty() || !self.hosts.iter().all(is_host) {
            return Err(OptionError::general(
                "the list of servers is empty, or a server has no valid name or port; correct the list",
            ));
        }
        if self.encrypted && !cfg!(feature = "tls") {
            return Err(OptionError::general(
                "encrypted connections require the feature `tls`; build with this feature",
            ));
        }
        #[cfg(feature = "tls")]
        if self.is_encrypted() {
            self.check_names_in_certificates()?;
        }
        #[cfg(feature = "tls")]
        if self.encrypted && !self.has_authority && !self.pem_files.has_ca() {
            return Err(OptionError::general(
                "encrypted connections require option `ca`; set it to the file of the trusted certificate authorities",
            ));
        }
        self.pem_files.validate()?;
        self.check_paths()?;
        if let (Some(lease), Some(session)) = (self.lease_option, self.session_option)
            && session < lease * 2
        {
            return Err(OptionError::new(
                "session",
                format!(
                    "is {}, less than twice the `lease` {}; set a longer session or a shorter lease",
                    format_time(session),
                    format_time(lease)
                ),
            ));
        }
        if let (Some(lease), None) = (self.lease_option, self.session_option)
            && lease > Self::SESSION_TIMEOUT_MAX / 2
        {
            return Err(OptionError::new(
                "lease",
                format!(
                    "is {}, more than the maximum {}, half of the longest session; use a shorter one",
                    format_time(lease),
                    format_time(Self::SESSION_TIMEOUT_MAX / 2)
                ),
            ));
        }
        self.check_value("session", &format_time(self.session_timeout))?;
        self.check_value("sessions", &self.sessions_max.to_string())?;
        self.check_value("connect_timeout", &format_time(self.connect_timeout))?;
        if self.request_timeout.is_zero() {
            return Err(OptionError::general(
                "the request time-out must not be zero; set a longer one",
            ));
        }
        self.check_rights()
    }

    fn capabilities(&self) -> Capabilities {
        // One request renews a session, and so all claims of the session.
        let renewal = RenewalPolicy::new()
            .with_batch_max(RENEWALS_MAX)
            .with_whole_shard()
            .with_verify_after(VERIFY_AFTER);
        let capabilities = Capabilities::new("zookeeper", GuaranteeClass::Durable, Reach::Network);
        let capabilities = match self.layout {
            Layout::Native if self.acl_grants_write() => {
                capabilities.with_shared().with_permits().with_upgradable().with_values()
            }
            Layout::Native => capabilities.with_shared().with_permits(),
            Layout::Curator => match self.naming {
                Naming::CuratorReadWrite => capabilities.with_shared(),
                Naming::CuratorSemaphore => capabilities.with_permits(),
                Naming::Curator | Naming::Kazoo => capabilities,
            },
        };
        capabilities
            .with_renewal(renewal)
            .with_waiters()
            .with_fencing()
            .with_fair()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
            .with_leases(Capabilities::LEASE_MIN, lease_max(self.session_timeout))
    }

    fn hosts(&self) -> Vec<Host> {
        self.hosts.clone()
    }

    fn poll(&self) -> Option<Duration> {
        // The session wakes each waiter when its predecessor's node is deleted. Polling covers only
        // missed events and nodes without a watch.
        Some(POLL)
    }
}

/// Returns the longest lease in a session of this time-out. While confirmations arrive regularly,
/// the session is at any time certain to exist for at least another half of its time-out. See
/// `session_validity`.
pub(crate) fn lease_max(session_timeout: Duration) -> Duration {
    session_timeout / 2
}

impl Acl {
    /// Parses `open`, `creator`, or a list such as `world:anyone:r,digest:USER:HASH:cdrwa`, as
    /// ZooKeeper's own shell accepts it.
    ///
    /// # Errors
    /// [`BackendError`] if `text` has none of these forms.
    pub fn parse(text: &str) -> Result<Self, BackendError> {
        parse_acl(text).ok_or_else(|| misconfigured(format!("the ACL {INVALID_ACL}")))
    }
}

const INVALID_ACL: &str = "is not `open`, `creator`, or a list of SCHEME:ID:RIGHTS with rights out of `cdrwa`; use one of these forms";

fn parse_acl(text: &str) -> Option<Acl> {
    match text {
        "open" => Some(Acl::Open),
        "creator" => Some(Acl::Creator),
        list => list.split(',').map(parse_acl_entry).collect::<Option<_>>().map(Acl::List),
    }
}

/// Returns how long a connection may receive nothing before the client drops the connection. The
/// client sends a ping after three eighths of this time.
///
/// The client library's own limit is two fifths of the session time-out, nearly as long as the
/// longest lease. This limit is a fifth of the session time-out, or the request time-out if that is
/// shorter. Leases shorter than the longest one therefore survive a half-open connection too.
/// [`CONNECTION_TIMEOUT_MIN`] is the lower bound, because the client must not drop the connection
/// to a busy server.
fn connection_timeout(session_timeout: Duration, request_timeout: Duration) -> Duration {
    let connection_timeout = (session_timeout / 5).min(request_timeout);
    connection_timeout.max(CONNECTION_TIMEOUT_MIN.min(session_timeout * 2 / 5))
}

fn parse_acl_entry(text: &str) -> Option<zookeeper_client::Acl> {
    let (scheme, rest) = text.split_once(':')?;
    let (id, rights) = rest.rsplit_once(':')?;
    let parse_permission = |c| {
        Some(match c {
            'c' => Permission::CREATE,
            'd' => Permission::DELETE,
            'r' => Permission::READ,
            'w' => Permission::WRITE,
            'a' => Permission::ADMIN,
            _ => return None,
        })
    };
    let permissions =
        rights.chars().try_fold(Permission::NONE, |all, c| Some(all | parse_permission(c)?))?;
    let is_complete = !scheme.is_empty() && !rights.is_empty();
    is_complete.then(|| zookeeper_client::Acl::new(permissions, AuthId::new(scheme, id)))
}

fn parse_host(text: &str) -> Option<(String, u16)> {
    let (name, port) = match text.rsplit_once(':') {
        // The colons of an IPv6 address are inside brackets.
        Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()?),
        _ => (text, PORT),
    };
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    (!name.is_empty() && port != 0).then(|| (name.to_owned(), port))
}

pub(crate) fn misconfigured(problem: impl fmt::Display) -> BackendError {
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

/// The output omits the identities, which may be password hashes.
impl fmt::Debug for Acl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open => f.write_str("Open"),
            Self::Creator => f.write_str("Creator"),
            Self::List(list) => write!(f, "List({} entries)", list.len()),
        }
    }
}

/// The minimum time without a message before the client drops a connection. In sessions shorter
/// than 5 s, the time is shorter.
const CONNECTION_TIMEOUT_MIN: Duration = Duration::from_secs(2);

const POLL: Duration = Duration::from_secs(2);

/// The time from a grant to its first verification, which also sets a watch on the node of the
/// lock. A lock that is held for less time gets no watch, because each watch costs a request.
const VERIFY_AFTER: Duration = Duration::from_millis(25);

/// The maximum number of claims per renewal. All renewals of a session share one request.
const RENEWALS_MAX: usize = 10_000;

/// ZooKeeper's default port.
const PORT: u16 = 2181;

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(feature = "tls"))]
    #[test]
    fn encryption_without_the_feature_is_refused() {
        let error = ZkConfig::from_url("zks://h").unwrap().check().unwrap_err();
        assert!(error.to_string().contains("feature"), "{error}");
    }

    #[test]
    fn server_lists_parse_as_in_other_clients() {
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
        for invalid in ["", ",", "h:0", "h:x", "a,,b", ":1", "/app"] {
            assert!(ZkConfig::new(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn servers_chroot_and_login_of_a_url_are_parsed() {
        let parsed = |url| ZkConfig::from_url(url).unwrap();
        let config = parsed("zk://app:p%40ss@zk1,zk2:2182,[::1]:1/app/locks");
        let hosts = [("zk1", 2_181), ("zk2", 2_182), ("::1", 1)];
        assert_eq!(config.hosts, hosts.map(|(name, port)| (name.to_owned(), port)));
        assert_eq!(config.chroot.as_deref(), Some("/app/locks"));
        assert_eq!(config.auth[0].credentials, b"app:p@ss");
        assert!(!format!("{config:?}").contains("p@ss"));
        for url in ["zk://h", "zk://h/"] {
            assert!(parsed(url).chroot.is_none() && !parsed(url).has_login());
        }
    }

    #[test]
    fn a_method_has_precedence_over_the_session_that_follows_from_the_option_lease() {
        let seconds = Duration::from_secs;
        let mut config = ZkConfig::from_url("zk://h").unwrap();
        config.set("lease", "30s").unwrap();
        assert_eq!(config.session_timeout, seconds(60));
        let mut config = ZkConfig::from_url("zk://h").unwrap().with_session_timeout(seconds(90));
        config.set("lease", "30s").unwrap();
        assert_eq!(config.session_timeout, seconds(90));
    }

    #[test]
    fn an_error_about_an_invalid_url_contains_a_hint_and_no_secret() {
        for (url, hint) in [
            ("zk:", "contains no server"),
            ("zk://", "contains no server"),
            ("zk:///app", "contains no server"),
            ("zk://h:0", "from 1 to 65535"),
            ("zk://h,,g", "from 1 to 65535"),
            ("zk://h,h:2181", "twice"),
            ("zk://canary@h", "USER:PASSWORD@"),
            ("zk://:canary@h", "USER:PASSWORD@"),
            ("zk://h/a/", "such as `/app`"),
            ("zk://h/a//b", "such as `/app`"),
            ("zk://u:can@ary@h", "`%40`"),
        ] {
            let error = ZkConfig::from_url(url).unwrap_err().to_string();
            assert!(error.contains(hint) && !error.contains("canary"), "{url}: {error}");
        }
    }

    #[test]
    fn the_connection_time_out_is_the_request_time_out_within_the_limits_of_the_session() {
        for (session, request, expected) in [
            (30_000, 2_500, 2_500),
            (30_000, 1_000, 2_000),
            (30_000, 30_000, 6_000),
            (10_000, 2_500, 2_000),
            (4_000, 2_500, 1_600),
            (400, 2_500, 160),
        ] {
            let millis = Duration::from_millis;
            assert_eq!(connection_timeout(millis(session), millis(request)), millis(expected));
        }
    }

    #[test]
    fn an_invalid_configuration_is_refused_without_a_connection() {
        let valid = || ZkConfig::new("h").unwrap();
        let hour = Duration::from_secs(3_600);
        for invalid in [
            valid().with_chroot("app"),
            valid().with_chroot("/app/"),
            valid().with_root("/"),
            valid().with_root("/a//b"),
            valid().with_namespace(""),
            valid().with_root("/zookeeper"),
            valid().with_root("/zookeeper/locks").with_layout(Layout::Curator),
            valid().with_root("/").with_layout(Layout::Curator).with_namespace("zookeeper"),
            valid().with_layout(Layout::Curator).with_namespace("zookeeper"),
            valid().with_layout(Layout::Curator).with_namespace("zookeeper/a"),
            valid().with_layout(Layout::Curator).with_namespace("/a"),
            valid().with_layout(Layout::Curator).with_namespace("a//b"),
            ZkConfig::new("h/zookeeper").unwrap(),
            valid().with_session_timeout(Duration::from_millis(1)),
            valid().with_session_timeout(hour * 25),
            valid().with_connect_timeout(Duration::ZERO),
            valid().with_sessions_max(0),
            valid().with_sessions_max(33),
            valid().with_acl(Acl::Creator),
            valid().with_acl(Acl::List(Vec::new())),
            valid().with_acl(Acl::parse("world:anyone:cr,digest:u:aGFzaA=:cra").unwrap()),
            ZkConfig::of_hosts(Vec::new()),
            ZkConfig::of_hosts(vec![("a,b".to_owned(), 1)]),
        ] {
            assert!(!invalid.check().unwrap_err().is_retryable(), "{invalid:?}");
        }
        valid().with_root("/").with_layout(Layout::Curator).check().unwrap();
        valid().with_root("/zookeeper-locks").with_namespace("zookeeper").check().unwrap();
        valid().with_chroot("/app").with_root("/zookeeper").check().unwrap();
        valid().with_acl(Acl::Creator).with_login("u", "p").check().unwrap();
        valid()
            .with_acl(Acl::parse("world:anyone:r,digest:u:aGFzaA=:crd").unwrap())
            .check()
            .unwrap();
    }

    #[test]
    fn an_acl_list_parses_as_the_shell_accepts_it() {
        assert_eq!(Acl::parse("open").unwrap(), Acl::Open);
        assert_eq!(Acl::parse("creator").unwrap(), Acl::Creator);
        let Acl::List(list) = Acl::parse("world:anyone:r,digest:u:aGFzaA=:cdrwa").unwrap() else {
            panic!("a list")
        };
        assert_eq!(list[0].permission(), Permission::READ);
        assert_eq!((list[1].scheme(), list[1].id()), ("digest", "u:aGFzaA="));
        assert_eq!(list[1].permission(), Permission::ALL);
        for invalid in
            ["", "world", "world:anyone", "world:anyone:", "world:anyone:x", "a:b:r,", "closed"]
        {
            assert!(Acl::parse(invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn debug_output_contains_no_secret() {
        let acl = Acl::parse("digest:u:CANARY=:r").unwrap();
        let config = ZkConfig::new("h").unwrap().with_login("u", "CANARY").with_acl(acl);
        assert!(!format!("{config:?}").contains("CANARY"), "{config:?}");
    }
}
