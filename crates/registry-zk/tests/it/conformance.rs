//! Conformance of the ZooKeeper store: one standalone server, and an ensemble of three.
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Clause, Need, SharedServers, assert_conformance_on_shared_servers};
use registry_core::LockBackend;
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions, ZooKeeperServer};
use registry_zk::{Layout, Naming, ZkBackend, ZkConfig};

/// So long that no session or lease ends while a clause runs, even on a slow machine.
const SESSION_TIMEOUT: Duration = Duration::from_secs(1_200);
/// Long, because the suite has its own time limits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A deployment of servers: standalone or an ensemble.
#[async_trait]
trait Servers: Debug + Send + Sync + Sized + 'static {
    /// Whether any text is a valid key.
    const ACCEPTS_ALL_KEYS: bool = true;
    /// Whether the store records how many units a semaphore has, and refuses another number.
    const COMPARES_UNITS: bool = true;

    async fn start_servers() -> Self;
    fn config(&self) -> ZkConfig;
    async fn restart(&mut self);
}

#[derive(Debug)]
struct Shared<S>(S);

#[async_trait]
impl<S: Servers> SharedServers for Shared<S> {
    async fn client(&self, namespace: &str) -> Arc<dyn LockBackend> {
        let config = self.0.config().with_namespace(namespace);
        let config = config.with_session_timeout(SESSION_TIMEOUT);
        let config = config.with_connect_timeout(REQUEST_TIMEOUT);
        let config = config.with_request_timeout(REQUEST_TIMEOUT);
        Arc::new(ZkBackend::open(config).await.unwrap())
    }

    fn lacks(&self) -> &[Need] {
        &[Need::Wipe, Need::GrantsOutliveClient]
    }

    fn applies(&self, clause: &Clause) -> bool {
        let accepts_keys =
            S::ACCEPTS_ALL_KEYS || clause.theme != "keys" || clause.name.contains("refused");
        accepts_keys
            && (S::COMPARES_UNITS || !clause.name.starts_with("a_different_total_of_units"))
    }

    async fn restart(&mut self) {
        self.0.restart().await;
    }
}

fn assert_conformance<S: Servers>(runs: usize, skips: usize) {
    let start = || async { Shared(S::start_servers().await) };
    assert_conformance_on_shared_servers(start, runs, skips);
}

/// `ZkConfig` takes the URL without `zk://`.
fn config(url: &str) -> ZkConfig {
    ZkConfig::new(url.strip_prefix("zk://").unwrap()).unwrap()
}

/// Returns options for servers that grant sessions as long as the suite requests.
fn long_session_options() -> ZooKeeperOptions {
    ZooKeeperOptions::new().settings(&["maxSessionTimeout=1200000"])
}

#[async_trait]
impl Servers for ZooKeeperServer {
    async fn start_servers() -> Self {
        Self::start_with(long_session_options()).await.unwrap()
    }

    fn config(&self) -> ZkConfig {
        config(&self.url())
    }

    async fn restart(&mut self) {
        self.kill();
        self.restart().await.unwrap();
    }
}

#[test]
fn a_server_fulfils_all_clauses() {
    assert_conformance::<ZooKeeperServer>(393, 42);
}

#[async_trait]
impl Servers for ZooKeeperEnsemble {
    /// No clause tests an election, and on a busy machine members with short limits would elect
    /// another leader.
    async fn start_servers() -> Self {
        let options = long_session_options().without_fsync();
        let options = options.settings(&["initLimit=120", "syncLimit=120"]);
        Self::start_with(3, &options).await.unwrap()
    }

    fn config(&self) -> ZkConfig {
        config(&self.url())
    }

    /// Stops all members before it restarts any, so that no member keeps state in memory.
    async fn restart(&mut self) {
        for member in self.members_mut() {
            member.kill();
        }
        for member in self.members_mut() {
            member.restart_without_waiting().await.unwrap();
        }
        self.wait_until_serving().await.unwrap();
    }
}

#[test]
fn an_ensemble_fulfils_all_clauses() {
    assert_conformance::<ZooKeeperEnsemble>(393, 42);
}

/// Nodes with Curator's layout and kazoo's names.
#[derive(Debug)]
struct CuratorLayout(ZooKeeperServer);

#[async_trait]
impl Servers for CuratorLayout {
    async fn start_servers() -> Self {
        Self(ZooKeeperServer::start_servers().await)
    }

    fn config(&self) -> ZkConfig {
        config(&self.0.url()).with_layout(Layout::Curator).with_naming(Naming::Kazoo)
    }

    async fn restart(&mut self) {
        self.0.restart().await.unwrap();
    }

    const ACCEPTS_ALL_KEYS: bool = false;
}

#[test]
fn the_curator_layout_fulfils_all_clauses_except_those_of_arbitrary_keys() {
    assert_conformance::<CuratorLayout>(221, 214);
}

/// Nodes of Curator's readers-writer lock.
#[derive(Debug)]
struct CuratorReadWrite(ZooKeeperServer);

#[async_trait]
impl Servers for CuratorReadWrite {
    async fn start_servers() -> Self {
        Self(ZooKeeperServer::start_servers().await)
    }

    fn config(&self) -> ZkConfig {
        config(&self.0.url()).with_layout(Layout::Curator).with_naming(Naming::CuratorReadWrite)
    }

    async fn restart(&mut self) {
        self.0.restart().await.unwrap();
    }

    const ACCEPTS_ALL_KEYS: bool = false;
}

#[test]
fn the_readers_writer_lock_of_curator_fulfils_all_clauses_except_those_of_arbitrary_keys() {
    assert_conformance::<CuratorReadWrite>(266, 169);
}

/// Nodes of Curator's semaphore.
#[derive(Debug)]
struct CuratorSemaphore(ZooKeeperServer);

#[async_trait]
impl Servers for CuratorSemaphore {
    async fn start_servers() -> Self {
        Self(ZooKeeperServer::start_servers().await)
    }

    fn config(&self) -> ZkConfig {
        config(&self.0.url()).with_layout(Layout::Curator).with_naming(Naming::CuratorSemaphore)
    }

    async fn restart(&mut self) {
        self.0.restart().await.unwrap();
    }

    const ACCEPTS_ALL_KEYS: bool = false;
    const COMPARES_UNITS: bool = false;
}

#[test]
fn the_semaphore_of_curator_fulfils_all_clauses_except_those_of_arbitrary_keys_and_other_units() {
    assert_conformance::<CuratorSemaphore>(250, 185);
}
