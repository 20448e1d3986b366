//! The conformance suite over one member and over a cluster.
//!
//! The clauses share one set of servers, each clause in its own namespace. Only clauses that
//! restart the servers get their own set.
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Need, SharedServers, assert_conformance_on_shared_servers};
use registry_core::LockBackend;
use registry_etcd::{EtcdBackend, EtcdConfig, Layout};
use registry_testkit::etcd::{EtcdCluster, EtcdOptions, EtcdServer};
#[cfg(feature = "tls")]
use registry_testkit::tls::TlsFolder;

/// Long, because the suite has its own time limits.
const TIMEOUT: Duration = Duration::from_secs(30);

fn config_of(server: &EtcdServer) -> EtcdConfig {
    EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())])
}

/// A set of servers of one kind.
#[async_trait]
trait Servers: Debug + Send + Sync + Sized + 'static {
    async fn begin() -> Self;
    fn config(&self) -> EtcdConfig;
    async fn restart(&mut self);
}

#[derive(Debug)]
struct Shared<S>(S);

#[async_trait]
impl<S: Servers> SharedServers for Shared<S> {
    async fn client(&self, namespace: &str) -> Arc<dyn LockBackend> {
        // The user of an encrypted member has rights on keys with this prefix only.
        let config = self.0.config().with_namespace(format!("lock-registry-{namespace}"));
        let config = config.with_connect_timeout(TIMEOUT).with_response_timeout(TIMEOUT);
        Arc::new(EtcdBackend::open(config).await.unwrap())
    }

    fn lacks(&self) -> &[Need] {
        &[Need::Wipe]
    }

    async fn restart(&mut self) {
        self.0.restart().await;
    }
}

fn assert_conformance<S: Servers>(runs: usize, skips: usize) {
    let start = || async { Shared(S::begin().await) };
    assert_conformance_on_shared_servers(start, runs, skips);
}

#[async_trait]
impl Servers for EtcdServer {
    async fn begin() -> Self {
        Self::start().await.unwrap()
    }

    fn config(&self) -> EtcdConfig {
        config_of(self)
    }

    async fn restart(&mut self) {
        self.restart().await.unwrap();
    }
}

#[test]
fn a_member_passes_all_clauses() {
    assert_conformance::<EtcdServer>(395, 40);
}

#[async_trait]
impl Servers for EtcdCluster {
    /// No clause tests an election, and on a busy machine members with a short time-out would elect
    /// another leader.
    async fn begin() -> Self {
        let args = ["--heartbeat-interval", "500", "--election-timeout", "5000"];
        Self::start_with(3, &EtcdOptions::new().args(&args)).await.unwrap()
    }

    fn config(&self) -> EtcdConfig {
        EtcdConfig::from_url(&self.url()).unwrap()
    }

    async fn restart(&mut self) {
        for number in 0..3 {
            self.member_mut(number).kill();
        }
        for number in 0..3 {
            self.member_mut(number).restart_without_waiting().await.unwrap();
        }
        for number in 0..3 {
            self.member_mut(number).wait_until_serving().await.unwrap();
        }
    }
}

#[test]
fn a_cluster_passes_all_clauses() {
    assert_conformance::<EtcdCluster>(395, 40);
}

/// A member with locks in the etcdctl layout.
#[derive(Debug)]
struct EtcdctlLayout(EtcdServer);

#[async_trait]
impl Servers for EtcdctlLayout {
    async fn begin() -> Self {
        Self(EtcdServer::start().await.unwrap())
    }

    fn config(&self) -> EtcdConfig {
        config_of(&self.0).with_layout(Layout::Etcdctl)
    }

    async fn restart(&mut self) {
        self.0.restart().await.unwrap();
    }
}

#[test]
fn the_etcdctl_layout_passes_all_clauses() {
    assert_conformance::<EtcdctlLayout>(230, 205);
}

/// A member that requires TLS, a client certificate and a login.
#[cfg(feature = "tls")]
#[derive(Debug)]
struct AuthenticatedServer {
    server: EtcdServer,
    certificates: TlsFolder,
}

#[cfg(feature = "tls")]
#[async_trait]
impl Servers for AuthenticatedServer {
    async fn begin() -> Self {
        let certificates = TlsFolder::new().unwrap();
        let options = EtcdOptions::new().tls(&certificates).login("worker", "opensesame");
        Self { server: EtcdServer::start_with(options).await.unwrap(), certificates }
    }

    fn config(&self) -> EtcdConfig {
        let pem = |path| std::fs::read(path).unwrap();
        config_of(&self.server)
            .with_certificate_authority(pem(self.certificates.ca_file()))
            .with_client_certificate(
                pem(self.certificates.client_cert_file()),
                pem(self.certificates.client_key_file()),
            )
            .with_login("worker", "opensesame")
    }

    async fn restart(&mut self) {
        self.server.restart().await.unwrap();
    }
}

#[cfg(feature = "tls")]
#[test]
fn an_encrypted_member_with_users_and_certificates_passes_all_clauses() {
    assert_conformance::<AuthenticatedServer>(395, 40);
}
