//! The conformance suite over all kinds of Redis servers.
//!
//! The clauses share one set of servers, each clause in its own namespace. Only clauses that
//! restart or empty the servers get their own set.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{SharedServers, assert_conformance_on_shared_servers};
use registry_core::LockBackend;
use registry_redis::{Layout, RedisBackend, RedisConfig};
use registry_testkit::redis::{
    RedisCluster, RedisOptions, RedisQuorum, RedisServer, SentinelOptions, SentinelSetup,
};
#[cfg(feature = "tls")]
use registry_testkit::tls::TlsFolder;
use tokio::time::{Instant, sleep};

/// Long, because the suite has its own time limits.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long the opening of a client is retried.
const OPEN_LIMIT: Duration = Duration::from_secs(60);

/// A set of servers of one kind.
#[async_trait]
trait ServerSet: Debug + Send + Sync + Sized + 'static {
    /// Whether concurrent attempts may split the votes, so that none has a majority.
    const MAY_SPLIT_VOTES: bool = false;

    async fn begin() -> Self;
    fn config(&self) -> RedisConfig;
    async fn restart(&mut self);
    async fn wipe(&mut self);
}

#[derive(Debug)]
struct Shared<S>(S);

#[async_trait]
impl<S: ServerSet> SharedServers for Shared<S> {
    async fn client(&self, namespace: &str) -> Arc<dyn LockBackend> {
        let config = self.0.config().with_namespace(namespace);
        let config = config.with_connect_timeout(TIMEOUT).with_response_timeout(TIMEOUT);
        let until = Instant::now() + OPEN_LIMIT;
        loop {
            match RedisBackend::open(config.clone()).await {
                Err(error) if error.is_retryable() && Instant::now() < until => {}
                opened => return Arc::new(opened.unwrap()),
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    fn may_split_votes(&self) -> bool {
        S::MAY_SPLIT_VOTES
    }

    async fn restart(&mut self) {
        self.0.restart().await;
    }

    async fn wipe(&mut self) {
        self.0.wipe().await;
    }
}

fn run_all_clauses<S: ServerSet>(runs: usize, skips: usize) {
    let start = || async { Shared(S::begin().await) };
    assert_conformance_on_shared_servers(start, runs, skips);
}

#[async_trait]
impl ServerSet for RedisServer {
    async fn begin() -> Self {
        Self::start(&[]).await.unwrap()
    }

    fn config(&self) -> RedisConfig {
        RedisConfig::from_url(&self.url()).unwrap()
    }

    async fn restart(&mut self) {
        self.restart().await.unwrap();
    }

    async fn wipe(&mut self) {
        self.kill();
        self.delete_data().unwrap();
        self.restart().await.unwrap();
    }
}

#[test]
fn a_server_passes_all_clauses() {
    run_all_clauses::<RedisServer>(427, 8);
}

#[async_trait]
impl ServerSet for SentinelSetup {
    /// No clause tests the loss of a master, and on a busy machine sentinels with a short time-out
    /// would replace it.
    async fn begin() -> Self {
        let patient = SentinelOptions::new()
            .sentinel_line("sentinel down-after-milliseconds mymaster 20000")
            .sentinel_line("sentinel failover-timeout mymaster 60000");
        Self::start_with(&patient).await.unwrap()
    }

    fn config(&self) -> RedisConfig {
        RedisConfig::from_url(&self.url()).unwrap()
    }

    /// The replica that takes over has all data, because no client writes meanwhile.
    async fn restart(&mut self) {
        self.failover().await.unwrap();
    }

    async fn wipe(&mut self) {
        let master = self.master().await.unwrap();
        self.server(master).send_command("FLUSHALL").await.unwrap();
    }
}

#[test]
fn a_sentinel_master_passes_all_clauses() {
    run_all_clauses::<SentinelSetup>(427, 8);
}

#[async_trait]
impl ServerSet for RedisCluster {
    /// No clause tests the loss of a node, and on a busy machine nodes with a short time-out would
    /// suspect each other.
    async fn begin() -> Self {
        let patient = RedisOptions::new().args(&["--cluster-node-timeout", "10000"]);
        Self::start_with(&patient).await.unwrap()
    }

    fn config(&self) -> RedisConfig {
        RedisConfig::from_url(&self.url()).unwrap()
    }

    async fn restart(&mut self) {
        for slot in [0, 8_000, 16_000] {
            self.failover(slot).await.unwrap();
        }
    }

    async fn wipe(&mut self) {
        for slot in [0, 8_000, 16_000] {
            let master = self.master_of(slot).await.unwrap();
            self.node(master).send_command("FLUSHALL").await.unwrap();
        }
    }
}

#[test]
fn a_cluster_passes_all_clauses() {
    run_all_clauses::<RedisCluster>(427, 8);
}

#[async_trait]
impl ServerSet for RedisQuorum {
    const MAY_SPLIT_VOTES: bool = true;

    async fn begin() -> Self {
        Self::start(5).await.unwrap()
    }

    fn config(&self) -> RedisConfig {
        RedisConfig::from_url(&self.url()).unwrap()
    }

    async fn restart(&mut self) {
        for server in self.servers_mut() {
            server.restart().await.unwrap();
        }
    }

    async fn wipe(&mut self) {
        for server in self.servers_mut() {
            server.wipe().await;
        }
    }
}

#[test]
fn a_quorum_passes_all_clauses() {
    run_all_clauses::<RedisQuorum>(232, 203);
}

/// A server that requires TLS and a login.
#[cfg(feature = "tls")]
#[derive(Debug)]
struct TlsServer {
    server: RedisServer,
    certificates: TlsFolder,
}

#[cfg(feature = "tls")]
#[async_trait]
impl ServerSet for TlsServer {
    async fn begin() -> Self {
        let certificates = TlsFolder::new().unwrap();
        let options = RedisOptions::new().tls(&certificates).login("worker", "opensesame");
        let server = RedisServer::start_with(options).await.unwrap();
        Self { server, certificates }
    }

    fn config(&self) -> RedisConfig {
        RedisConfig::from_url(&self.server.url())
            .unwrap()
            .with_certificate_authority(std::fs::read(self.certificates.ca_file()).unwrap())
            .with_login(Some("worker"), "opensesame")
    }

    async fn restart(&mut self) {
        self.server.restart().await.unwrap();
    }

    async fn wipe(&mut self) {
        self.server.wipe().await;
    }
}

#[cfg(feature = "tls")]
#[test]
fn an_encrypted_server_with_users_passes_all_clauses() {
    run_all_clauses::<TlsServer>(427, 8);
}

/// A server with locks in the Spring Integration layout.
#[derive(Debug)]
struct SpringLayout(RedisServer);

/// A server with locks in the Redisson layout.
#[derive(Debug)]
struct RedissonLayout(RedisServer);

macro_rules! layout {
    ($name:ident, $layout:expr) => {
        #[async_trait]
        impl ServerSet for $name {
            async fn begin() -> Self {
                Self(RedisServer::start(&[]).await.unwrap())
            }

            fn config(&self) -> RedisConfig {
                RedisConfig::from_url(&self.0.url()).unwrap().with_layout($layout)
            }

            async fn restart(&mut self) {
                self.0.restart().await.unwrap();
            }

            async fn wipe(&mut self) {
                self.0.wipe().await;
            }
        }
    };
}

layout!(SpringLayout, Layout::Spring);
layout!(RedissonLayout, Layout::Redisson);

#[test]
fn the_spring_layout_passes_all_clauses_except_labels() {
    run_all_clauses::<SpringLayout>(230, 205);
}

#[test]
fn the_redisson_layout_passes_all_clauses_except_labels() {
    run_all_clauses::<RedissonLayout>(230, 205);
}
