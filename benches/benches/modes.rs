//! Measures shared locks, permits and locks of several keys next to exclusive locks, on every
//! store.
//!
//! Names of stores on the command line select them. Client and server may run on all processors:
//! the requests for several keys overlap.

use lock_registry_benches::compare_modes;
use registry_core::{LockBackend, MemoryBackend};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_jdbc::{
    MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig, SqliteBackend, SqliteConfig,
};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::redis::RedisServer;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_zk::{ZkBackend, ZkConfig};

fn main() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        if is_selected("memory") {
            bench("memory", MemoryBackend::new()).await;
        }
        if is_selected("sqlite") {
            let folder = tempfile::tempdir().unwrap();
            let config = SqliteConfig::new(folder.path().join("locks.db"));
            bench("SQLite", SqliteBackend::open(config).await.unwrap()).await;
        }
        if is_selected("redis") {
            // Disk writes would dominate the time.
            let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
            let config = RedisConfig::from_url(&server.url()).unwrap();
            bench("Redis", RedisBackend::open(config).await.unwrap()).await;
        }
        if is_selected("postgres") {
            let server = PostgresServer::start().await.unwrap();
            let config = PostgresConfig::from_url(&server.url()).unwrap();
            bench("PostgreSQL", PostgresBackend::open(config).await.unwrap()).await;
        }
        if is_selected("mariadb") {
            let server = MariaDbServer::start().await.unwrap();
            let config = MySqlConfig::from_url(&server.url()).unwrap();
            bench("MariaDB", MySqlBackend::open(config).await.unwrap()).await;
        }
        if is_selected("etcd") {
            let server = EtcdServer::start().await.unwrap();
            let address = (server.addr().ip().to_string(), server.addr().port());
            bench("etcd", EtcdBackend::open(EtcdConfig::new([address])).await.unwrap()).await;
        }
        if is_selected("zk") {
            let server = ZooKeeperServer::start().await.unwrap();
            let config = ZkConfig::from_url(&server.url()).unwrap();
            bench("ZooKeeper", ZkBackend::open(config).await.unwrap()).await;
        }
    });
}

/// Returns whether the command line names this store, or none.
fn is_selected(store: &str) -> bool {
    let mut names = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let first = names.next();
    first.as_ref().is_none_or(|first| first == store || names.any(|name| name == store))
}

async fn bench(store: &'static str, backend: impl LockBackend + 'static) {
    tokio::spawn(compare_modes(store, backend)).await.unwrap();
}
