//! The options with which servers start.

use std::path::PathBuf;
use std::time::Duration;

use crate::programs;
use crate::server_options::ServerOptions;

/// The environment variable that names a program to use instead of `etcd`.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_ETCD_SERVER";
/// The environment variable that names a program to use instead of `etcdctl`.
pub const CTL_VARIABLE: &str = "LOCK_REGISTRY_ETCDCTL";

/// The options of an [`EtcdServer`](super::EtcdServer), or of each member of an
/// [`EtcdCluster`](super::EtcdCluster).
pub type EtcdOptions = ServerOptions<Etcd>;

/// The options that only etcd has.
#[derive(Debug, Clone)]
pub struct Etcd {
    pub(super) ctl: PathBuf,
    pub(super) login: Option<(String, String)>,
    pub(super) peer_delay: Option<Duration>,
}

impl Default for Etcd {
    fn default() -> Self {
        Self { ctl: programs::find(CTL_VARIABLE, "etcdctl"), login: None, peer_delay: None }
    }
}

impl EtcdOptions {
    /// Enables authentication with two users. The testkit itself uses `root`, with the password
    /// `root`. The given user has all permissions on keys that begin with `lock-registry`.
    #[must_use]
    pub fn login(mut self, user: &str, password: &str) -> Self {
        self.store.login = Some((user.to_owned(), password.to_owned()));
        self
    }

    /// Delays all bytes between the members of a cluster by `delay`, in each direction.
    #[must_use]
    pub fn peer_delay(mut self, delay: Duration) -> Self {
        self.store.peer_delay = Some(delay);
        self
    }
}
