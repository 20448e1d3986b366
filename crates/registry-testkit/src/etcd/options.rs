//! The options with which servers start.

use std::path::PathBuf;
use std::time::Duration;

use crate::programs;
use crate::tls::TlsFolder;

/// The environment variable that names a program to use instead of `etcd`.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_ETCD_SERVER";
/// The environment variable that names a program to use instead of `etcdctl`.
pub const CTL_VARIABLE: &str = "LOCK_REGISTRY_ETCDCTL";

/// The options of an [`EtcdServer`](super::EtcdServer), or of each member of an
/// [`EtcdCluster`](super::EtcdCluster).
#[derive(Debug, Clone)]
pub struct EtcdOptions {
    pub(super) program: PathBuf,
    pub(super) ctl: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) login: Option<(String, String)>,
    pub(super) tls: Option<TlsFolder>,
    pub(super) peer_delay: Option<Duration>,
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self {
            program: programs::server(SERVER_VARIABLE, "etcd"),
            ctl: programs::server(CTL_VARIABLE, "etcdctl"),
            args: Vec::new(),
            login: None,
            tls: None,
            peer_delay: None,
        }
    }
}

impl EtcdOptions {
    /// Creates the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds arguments, such as `["--auth-token-ttl", "1"]`.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// Enables authentication with two users. The testkit itself uses `root`, with the password
    /// `root`. The given user has all permissions on keys that begin with `lock-registry`.
    #[must_use]
    pub fn login(mut self, user: &str, password: &str) -> Self {
        self.login = Some((user.to_owned(), password.to_owned()));
        self
    }

    /// Encrypts all client connections with the server's certificate from `folder`. Accepts only
    /// clients with a certificate of the same authority.
    #[must_use]
    pub fn tls(mut self, folder: &TlsFolder) -> Self {
        self.tls = Some(folder.clone());
        self
    }

    /// Delays all bytes between the members of a cluster by `delay`, in each direction.
    #[must_use]
    pub fn peer_delay(mut self, delay: Duration) -> Self {
        self.peer_delay = Some(delay);
        self
    }
}
