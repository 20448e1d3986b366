//! The configuration of an etcd store: its members, the credentials, and the format of the locks.
//! No I/O.

use std::fmt;
use std::time::Duration;

use registry_core::config::{
    self, BackendConfig, Host, InvalidValue, OptionError, OptionRow, PemFiles, SERVER_TIME_MIN,
    StoreKind, UrlParts, display_host, format_time, parse_choice, parse_time,
};
use registry_core::{
    BackendError, Capabilities, GuaranteeClass, Reach, RegistryBuilder, RenewalPolicy,
};
use tonic::transport::Endpoint;
#[cfg(feature = "tls")]
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::error::misconfigured;

/// etcd.
pub static STORE: StoreKind = StoreKind::new("etcd", &[OPTIONS], |url| {
    EtcdConfig::parse(url).map(|config| Box::new(config) as Box<dyn BackendConfig>)
});

/// The options, in the order of the tables in the book. `EtcdConfig::assign` sets the field of each
/// option.
const OPTIONS: &[OptionRow] = &[
    OptionRow::namespace("`lock-registry`; with `layout=etcdctl` none"),
    OptionRow::LEASE.with_min(LEASE_MIN),
    OptionRow::TIMEOUT,
    OptionRow::layout(&["native", "etcdctl"]),
    OptionRow::CONNECT_TIMEOUT,
    PemFiles::CA.only(ENCRYPTED, is_encrypted),
    PemFiles::CERT.only(ENCRYPTED, is_encrypted),
    PemFiles::KEY.only(ENCRYPTED, is_encrypted),
];

const ENCRYPTED: &str = "encrypted etcd stores (`etcds://`)";

fn is_encrypted(scheme: &str) -> bool {
    scheme == "etcds"
}

/// The members and the format of the locks of an [`EtcdBackend`](crate::EtcdBackend).
#[derive(Clone)]
#[non_exhaustive]
pub struct EtcdConfig {
    pub(crate) members: Vec<Host>,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) layout: Layout,
    namespace: Option<String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
    /// A method has set `response_timeout`, so the option `timeout` does not.
    is_response_timeout_set: bool,
    is_encrypted: bool,
    pem_files: PemFiles,
    #[cfg(feature = "tls")]
    ca_certificates: Option<Vec<u8>>,
    #[cfg(feature = "tls")]
    client_certificate: Option<(Vec<u8>, Vec<u8>)>,
}

/// A user and the user's password.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) user: String,
    pub(crate) password: String,
}

/// The format of a lock's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Layout {
    /// The format of this library: `NAMESPACE/KEY/LEASE`. Namespace and key are percent-encoded, so
    /// every key is valid.
    #[default]
    Native,
    /// The format of `etcdctl lock NAME`, of Go's `concurrency.Mutex` and of etcd's own lock API
    /// (`v3lock`). Programs that use one of these contend for the same locks.
    ///
    /// The names are `KEY/LEASE`, or `NAMESPACE/KEY/LEASE` with a namespace, without escaping. A
    /// lock's key must not contain a slash, because every etcd key below a lock's name is an entry
    /// of its queue. The part of `NAME` before its last slash is the namespace.
    Etcdctl,
}

impl EtcdConfig {
    /// The default port of members.
    pub const PORT: u16 = 2379;
    /// The default [response timeout](Self::with_response_timeout).
    pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);

    /// Configures a cluster by some of its members. A member is a host and its client port. A host
    /// is a name, or an IP address without brackets.
    #[must_use]
    pub fn new(members: impl IntoIterator<Item = (String, u16)>) -> Self {
        Self {
            members: members.into_iter().collect(),
            credentials: None,
            layout: Layout::Native,
            namespace: None,
            connect_timeout: Duration::from_secs(2),
            response_timeout: Self::RESPONSE_TIMEOUT,
            is_response_timeout_set: false,
            is_encrypted: false,
            pem_files: PemFiles::default(),
            #[cfg(feature = "tls")]
            ca_certificates: None,
            #[cfg(feature = "tls")]
            client_certificate: None,
        }
    }

    /// Parses a URL: `etcd://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]…`, or `etcds://…` for
    /// encrypted connections (feature `tls`).
    ///
    /// # Errors
    /// Returns `Misconfigured` for a URL that cannot be parsed or contains options. The methods of
    /// this type set the options. The message does not repeat the URL, which may contain a
    /// password.
    pub fn from_url(url: &str) -> Result<Self, BackendError> {
        config::from_url(url, &[], Self::parse)
    }

    fn parse(url: &UrlParts<'_>) -> Result<Self, BackendError> {
        if !matches!(&*url.scheme, "etcd" | "etcds") {
            return Err(url.invalid("has no etcd scheme; use `etcd` or `etcds`"));
        }
        let syntax = format!("write `{}://HOST:PORT,HOST:PORT`", url.scheme);
        let (login, hosts) = url.login_and_hosts(&syntax)?;
        let mut config = Self::new(url.hosts(hosts, Self::PORT, &syntax)?);
        config.is_encrypted = is_encrypted(&url.scheme);
        if !matches!(url.path, "" | "/") {
            return Err(url.invalid(
                "contains a path, which etcd does not support; set the prefix of keys with option `namespace`",
            ));
        }
        let Some(login) = login else { return Ok(config) };
        match login.password.filter(|password| !password.expose().is_empty()) {
            Some(password) if !login.user.expose().is_empty() => {
                Ok(config.with_login(login.user.expose(), password.expose()))
            }
            _ => {
                Err(url.invalid("contains an incomplete login; write `USER:PASSWORD@` or no login"))
            }
        }
    }

    /// Sets the user and the password.
    #[must_use]
    pub fn with_login(mut self, user: &str, password: &str) -> Self {
        self.credentials =
            Some(Credentials { user: user.to_owned(), password: password.to_owned() });
        self
    }

    /// Sets the format of the locks. The default is [`Layout::Native`].
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the namespace. Locks in different namespaces are independent, even if their keys are
    /// equal. The default is `lock-registry`, or no namespace in the etcdctl layout.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Sets the time limit for connecting to a member. The default is 2 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// Sets the time limit for a response, after which the next member is used. The default is 3 s.
    #[must_use]
    pub fn with_response_timeout(mut self, response_timeout: Duration) -> Self {
        self.response_timeout = response_timeout;
        self.is_response_timeout_set = true;
        self
    }

    /// Encrypts the connections and verifies the members against the host's certificate
    /// authorities. Requires the feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        self.is_encrypted = true;
        self
    }

    /// Encrypts the connections and verifies the members against these certificate authorities
    /// (PEM). The host's certificate authorities are not used. Requires the feature `tls`.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_certificate_authority(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.ca_certificates = Some(certificates.into());
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
        self.client_certificate = Some((certificate.into(), key.into()));
        self.with_tls()
    }

    /// Returns the configured namespace or the default of the layout.
    pub(crate) fn namespace(&self) -> &str {
        match (&self.namespace, self.layout) {
            (Some(namespace), _) => namespace,
            (None, Layout::Native) => "lock-registry",
            (None, Layout::Etcdctl) => "",
        }
    }

    /// Returns an error if the configuration cannot work. Performs no I/O.
    /// [`EtcdBackend::open`](crate::EtcdBackend::open) calls this before it connects.
    ///
    /// # Errors
    /// Returns [`BackendError`] of kind `Misconfigured` for the first invalid setting.
    pub fn check(&self) -> Result<(), BackendError> {
        self.validate().map_err(|error| misconfigured(error.to_string()))
    }

    #[cfg(feature = "tls")]
    pub(crate) fn with_pem_files(mut self) -> Result<Self, BackendError> {
        let pem = self.pem_files.read("etcd")?;
        if let Some(ca) = pem.ca {
            self = self.with_certificate_authority(ca);
        }
        if let Some((certificate, key)) = pem.client {
            self = self.with_client_certificate(certificate, key);
        }
        Ok(self)
    }

    /// Returns the endpoint of each member.
    pub(crate) fn endpoints(&self) -> Result<Vec<Endpoint>, BackendError> {
        self.check()?;
        #[cfg(feature = "tls")]
        let tls = self.is_encrypted.then(|| self.tls());
        let scheme = if self.is_encrypted { "https" } else { "http" };
        let endpoint = |member: &Host| {
            let endpoint = Endpoint::from_shared(format!("{scheme}://{}", display_host(member)))
                .map_err(|_| {
                    misconfigured("the name of a member is not a valid host name; correct the name")
                })?
                .user_agent(concat!("lock-registry/", env!("CARGO_PKG_VERSION")))
                .map_err(|_| misconfigured("the user agent is invalid; report this bug"))?
                .tcp_nodelay(true)
                .connect_timeout(self.connect_timeout)
                // Members reject clients that ping more often than every 5 s. The default response
                // time-out therefore detects a dead host earlier than a ping.
                .http2_keep_alive_interval(PING_INTERVAL)
                .keep_alive_timeout(PING_TIMEOUT)
                .keep_alive_while_idle(false);
            #[cfg(feature = "tls")]
            if let Some(tls) = &tls {
                return endpoint.tls_config(tls.clone()).map_err(|_| {
                    misconfigured(
                        "the certificates or the key are invalid; provide them in PEM format",
                    )
                });
            }
            Ok(endpoint)
        };
        self.members.iter().map(endpoint).collect()
    }

    #[cfg(feature = "tls")]
    fn tls(&self) -> ClientTlsConfig {
        let tls = match &self.ca_certificates {
            Some(certificates) => {
                ClientTlsConfig::new().ca_certificate(Certificate::from_pem(certificates))
            }
            None => ClientTlsConfig::new().with_native_roots(),
        };
        match &self.client_certificate {
            Some((certificate, key)) => tls.identity(Identity::from_pem(certificate, key)),
            None => tls,
        }
    }
}

impl BackendConfig for EtcdConfig {
    fn kind(&self) -> &'static StoreKind {
        &STORE
    }

    fn scheme(&self) -> &'static str {
        if self.is_encrypted { "etcds" } else { "etcd" }
    }

    fn assign(&mut self, name: &str, value: &str) -> Result<(), InvalidValue> {
        match name {
            "namespace" => self.namespace = Some(value.to_owned()),
            "lease" => {}
            // The engine's time-out is also the response time-out: after it, the client drops the
            // connection to a member without responses. The next request uses the next member.
            "timeout" => {
                let timeout = parse_time(value)?;
                if !self.is_response_timeout_set {
                    self.response_timeout = timeout;
                }
            }
            "layout" => {
                let layouts = [("native", Layout::Native), ("etcdctl", Layout::Etcdctl)];
                self.layout = parse_choice(value, &layouts)?;
            }
            "connect_timeout" => self.connect_timeout = parse_time(value)?,
            _ if self.pem_files.assign(name, value)? => {}
            _ => return Err(InvalidValue::unknown_option()),
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), OptionError> {
        if self.namespace().is_empty() && self.layout == Layout::Native {
            return Err(OptionError::new(
                "namespace",
                "is empty; in etcd only `layout=etcdctl` accepts an empty namespace",
            ));
        }
        self.check_value("namespace", self.namespace())?;
        self.check_value("connect_timeout", &format_time(self.connect_timeout))?;
        let limits = SERVER_TIME_MIN..=TIME_MAX;
        OptionError::check_time("response_timeout", self.response_timeout, &limits)?;
        self.pem_files.validate()?;
        if self.is_encrypted && !cfg!(feature = "tls") {
            return Err(OptionError::general(
                "encrypted connections require the feature `tls`; build with this feature",
            ));
        }
        if self.members.is_empty() {
            return Err(OptionError::general("no member is configured; name at least one"));
        }
        let mut members = self.members.clone();
        members.sort();
        members.dedup();
        if members.len() != self.members.len() {
            return Err(OptionError::general(
                "a member is configured twice; name each member once",
            ));
        }
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::new("etcd", GuaranteeClass::Durable, Reach::Network);
        let capabilities = match self.layout {
            Layout::Native => {
                capabilities.with_shared().with_upgradable().with_permits().with_values()
            }
            Layout::Etcdctl => capabilities,
        };
        capabilities
            .with_fencing()
            .with_fair()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
            .with_waiters()
            .with_leases(LEASE_MIN, Capabilities::LEASE_MAX)
            .with_renewal(RenewalPolicy::new().with_verify_after(VERIFY_AFTER))
    }

    fn hosts(&self) -> Vec<Host> {
        self.members.clone()
    }
}

/// The shortest lease that members grant by default.
pub(crate) const LEASE_MIN: Duration = Duration::from_secs(2);
/// The time after which the backend watches a held lock for losses. It does not watch shorter
/// holds, because each watch uses resources of the members.
const VERIFY_AFTER: Duration = Duration::from_millis(25);
const TIME_MAX: Duration = RegistryBuilder::TIMEOUT_MAX;
const PING_INTERVAL: Duration = Duration::from_secs(6);
const PING_TIMEOUT: Duration = Duration::from_secs(4);

// Written manually, because the fields include passwords and keys.
impl fmt::Debug for EtcdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdConfig")
            .field("members", &self.members)
            .field("encrypted", &self.is_encrypted)
            .field("layout", &self.layout)
            .field("namespace", &self.namespace())
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_contains_members_and_credentials() {
        let url = "etcd://worker:hunter%2F2@a:2380,[::1]:2379,b/";
        let config = EtcdConfig::from_url(url).unwrap();
        let members = [("a", 2380), ("::1", 2379), ("b", 2379)];
        assert_eq!(config.members, members.map(|(host, port)| (host.to_owned(), port)));
        let credentials = config.credentials.as_ref().unwrap();
        assert_eq!(
            (credentials.user.as_str(), credentials.password.as_str()),
            ("worker", "hunter/2")
        );
        config.endpoints().unwrap();
        let printed = format!("{config:?}");
        assert!(!printed.contains("hunter"), "{printed}");
    }

    #[test]
    fn an_error_about_an_invalid_url_contains_a_hint_and_no_secret() {
        for (url, hint) in [
            ("etcd:", "contains no server"),
            ("etcd://", "contains no server"),
            ("etcd://a,a", "twice"),
            ("etcd://a:0", "port from 1"),
            ("etcd://canary@a", "USER:PASSWORD@"),
            ("etcd://:canary@a", "USER:PASSWORD@"),
            ("etcd://a/canary", "`namespace`"),
        ] {
            let error = EtcdConfig::from_url(url).unwrap_err().to_string();
            assert!(error.contains(hint) && !error.contains("canary"), "{url}: {error}");
        }
    }

    #[test]
    fn the_error_of_an_invalid_url_does_not_repeat_the_url() {
        for url in [
            "",
            "etcd",
            "etcd://",
            "etcd://a,,b",
            "etcd://a:hunter2",
            "etcd://hunter2@a",
            "etcd://u:hunter2@a b",
            "etcd://u:hunter2@a/path",
            "etcd://u:hunter2@[::1",
            "etcd://u:hunter2@[::1]x",
            "http://u:hunter2@a",
        ] {
            let error = EtcdConfig::from_url(url).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(error.refused() && !text.contains("hunter2"), "{url}: {text}");
        }
    }

    #[test]
    fn an_invalid_configuration_is_refused() {
        let valid = || EtcdConfig::new([("h".to_owned(), 1)]);
        for (config, expected) in [
            (EtcdConfig::new([]), "no member"),
            (EtcdConfig::new([("h".to_owned(), 1), ("h".to_owned(), 1)]), "twice"),
            (EtcdConfig::new([("not a host".to_owned(), 1)]), "name of a member"),
            (valid().with_namespace(""), "namespace"),
            (valid().with_namespace("n".repeat(256)), "namespace"),
            (valid().with_connect_timeout(Duration::ZERO), "connect_timeout"),
            (valid().with_response_timeout(Duration::MAX), "response_timeout"),
        ] {
            let error = config.endpoints().unwrap_err();
            assert!(error.refused() && error.to_string().contains(expected), "{error}");
        }
        valid().with_layout(Layout::Etcdctl).check().unwrap();
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn encryption_without_the_feature_is_refused() {
        let error = EtcdConfig::from_url("etcds://a").unwrap().check().unwrap_err();
        assert!(error.to_string().contains("feature"), "{error}");
    }
}
