//! Conformance of the ZooKeeper store: one standalone server, and an ensemble of three.
#![expect(clippy::unwrap_used, reason = "a helper of tests, which may")]

mod shared;

use async_trait::async_trait;
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions, ZooKeeperServer};
use registry_zk::{Layout, Naming, ZkConfig};
use shared::{Servers, keeps_its_promises};

/// `ZkConfig` takes the URL without `zk://`.
fn config(url: &str) -> ZkConfig {
    ZkConfig::new(url.strip_prefix("zk://").unwrap()).unwrap()
}

/// Servers that grant sessions as long as the suite requests.
fn patient() -> ZooKeeperOptions {
    ZooKeeperOptions::new().settings(&["maxSessionTimeout=1200000"])
}

#[async_trait]
impl Servers for ZooKeeperServer {
    async fn begin() -> Self {
        Self::start_with(patient()).await.unwrap()
    }

    fn config(&self) -> ZkConfig {
        config(&self.url())
    }

    async fn restart(&mut self) {
        self.kill();
        self.start_again().await.unwrap();
    }
}

#[test]
fn a_server_keeps_all_promises() {
    keeps_its_promises::<ZooKeeperServer>(214, 18);
}

#[async_trait]
impl Servers for ZooKeeperEnsemble {
    async fn begin() -> Self {
        Self::start_with(3, &patient()).await.unwrap()
    }

    fn config(&self) -> ZkConfig {
        config(&self.url())
    }

    /// All members at once, which loses the maximum of state.
    async fn restart(&mut self) {
        for member in self.members_mut() {
            member.kill();
        }
        for member in self.members_mut() {
            member.launch_again().await.unwrap();
        }
        self.serving().await.unwrap();
    }
}

#[test]
fn an_ensemble_keeps_all_promises() {
    keeps_its_promises::<ZooKeeperEnsemble>(214, 18);
}

/// Nodes with Curator's layout and kazoo's names.
#[derive(Debug)]
struct AsOthers(ZooKeeperServer);

#[async_trait]
impl Servers for AsOthers {
    async fn begin() -> Self {
        Self(ZooKeeperServer::begin().await)
    }

    fn config(&self) -> ZkConfig {
        config(&self.0.url()).with_layout(Layout::Curator).with_naming(Naming::Kazoo)
    }

    async fn restart(&mut self) {
        self.0.restart().await;
    }

    const TAKES_ALL_KEYS: bool = false;
}

#[test]
fn nodes_as_others_make_them_keep_all_promises_but_those_of_strange_keys() {
    keeps_its_promises::<AsOthers>(207, 25);
}
