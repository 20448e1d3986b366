//! The stores that several processes share, each with a server of its own.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Duration;
use std::{env, io};

use async_trait::async_trait;
use lock_registry::{Registry, RegistryConfig};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::redis::RedisServer;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_testkit::{ManagedServer, ServerDescription};

/// Long enough for any machine; reached only by a test that fails.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// Returns the configuration for a URL. `connect` retries for up to [`LONG`], because one attempt
/// may time out on a loaded machine.
pub(crate) fn config(url: &str) -> RegistryConfig {
    RegistryConfig::from_url(url).unwrap().connect_within(LONG)
}

/// A store that other processes reach by its URL.
pub(crate) struct Store {
    pub(crate) url: String,
    /// The option of the URL that sets the length of a lease.
    lease_option: &'static str,
    /// Whether the store has a clock, from which all clients take the ticks of a period. Otherwise
    /// each client uses its own wall clock.
    pub(crate) has_clock: bool,
    server: Box<dyn StoreServer>,
}

#[async_trait]
trait StoreServer: Send + Sync {
    /// Kills the server and starts it again with its data.
    async fn restart_server(&mut self) -> io::Result<()>;
}

#[async_trait]
impl<S: ServerDescription> StoreServer for ManagedServer<S> {
    async fn restart_server(&mut self) -> io::Result<()> {
        self.restart().await
    }
}

/// The folder of a SQLite file, which has no server to restart.
#[async_trait]
impl StoreServer for tempfile::TempDir {
    async fn restart_server(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Store {
    pub(crate) async fn sqlite() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("locks.db").display());
        Self { url, lease_option: "lease", has_clock: false, server: Box::new(folder) }
    }

    pub(crate) async fn postgres() -> Self {
        let server = PostgresServer::start().await.unwrap();
        Self::of(server.url(), "lease", true, server)
    }

    pub(crate) async fn mariadb() -> Self {
        let server = MariaDbServer::start().await.unwrap();
        Self::of(server.url(), "lease", true, server)
    }

    pub(crate) async fn redis() -> Self {
        let server = RedisServer::start(&[]).await.unwrap();
        Self::of(server.url(), "lease", true, server)
    }

    pub(crate) async fn etcd() -> Self {
        let server = EtcdServer::start().await.unwrap();
        Self::of(format!("etcd://{}", server.addr()), "lease", false, server)
    }

    pub(crate) async fn zookeeper() -> Self {
        let server = ZooKeeperServer::start().await.unwrap();
        Self::of(server.url(), "session", true, server)
    }

    fn of(
        url: String,
        lease_option: &'static str,
        has_clock: bool,
        server: impl StoreServer + 'static,
    ) -> Self {
        Self { url, lease_option, has_clock, server: Box::new(server) }
    }

    pub(crate) fn url(&self, lease: Duration) -> String {
        format!("{}?{}={}s", self.url, self.lease_option, lease.as_secs())
    }

    /// Opens a registry in the process of the test.
    pub(crate) async fn connect(&self, lease: Duration) -> Registry {
        config(&self.url(lease)).connect().await.unwrap()
    }

    pub(crate) async fn restart(&mut self) {
        self.server.restart_server().await.unwrap();
    }
}

/// Returns `long` with `SERVER_TESTS=long` in the environment, and `short` otherwise.
pub(crate) fn long_or<T>(long: T, short: T) -> T {
    match env::var("SERVER_TESTS").as_deref() {
        Err(_) => short,
        Ok("long") => long,
        Ok(other) => panic!("SERVER_TESTS is {other:?}; the only value is \"long\""),
    }
}

/// Runs each of these functions on each store, as a test.
macro_rules! on_each_store {
    ($($scenario:ident),* $(,)?) => {
        on_each_store! { @stores [sqlite postgres mariadb redis etcd zookeeper] [$($scenario)*] }
    };
    (@stores [$($store:ident)*] $scenarios:tt) => {
        $(on_each_store! { @tests $store $scenarios })*
    };
    (@tests $store:ident [$($scenario:ident)*]) => {
        mod $store {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario($crate::stores::Store::$store().await).await;
            })*
        }
    };
}

pub(crate) use on_each_store;
