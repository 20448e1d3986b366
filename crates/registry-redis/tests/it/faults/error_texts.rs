//! The error texts of acquisitions that fail because servers are down: operation, key, address,
//! cause and hint.

use registry_core::{LockError, Registry};
use registry_redis::RedisConfig;
use registry_testkit::redis::{RedisCluster, RedisQuorum, RedisServer, SentinelSetup};
use registry_testkit::{assert_acquire_error, within};

use super::workload::{LONG, registry, secs};

const KEY: &str = "orders/42";

async fn open(url: &str) -> Registry {
    registry(&RedisConfig::from_url(url).unwrap(), secs(1)).await
}

async fn failed_lock(registry: &Registry) -> LockError {
    within(LONG, registry.obtain(KEY).lock()).await.unwrap_err()
}

#[tokio::test]
async fn an_error_names_operation_key_and_address() {
    let mut server = RedisServer::start(&[]).await.unwrap();
    let registry = open(&server.url()).await;
    server.kill();
    let error = failed_lock(&registry).await;
    assert_eq!(
        assert_acquire_error(&error, KEY, &server.addr().to_string()),
        "redis: the connection was refused; check that the server runs at this address"
    );
}

#[tokio::test]
async fn an_error_of_a_quorum_names_one_of_its_masters() {
    let mut quorum = RedisQuorum::start(3).await.unwrap();
    let registry = open(&quorum.url()).await;
    quorum.servers_mut().iter_mut().for_each(|server| server.kill());
    let error = failed_lock(&registry).await;
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    let address = source.address().unwrap();
    assert!(quorum.servers().iter().any(|master| master.addr().to_string() == address), "{error}");
    assert_eq!(
        assert_acquire_error(&error, KEY, address),
        "redis: the connection was refused; check that the server runs at this address; 2 of 3 masters are required"
    );
}

#[tokio::test]
async fn an_error_of_a_cluster_names_the_server_of_the_key() {
    let mut cluster = RedisCluster::start().await.unwrap();
    let registry = open(&cluster.url()).await;
    let slot = RedisCluster::slot_of(format!("lock-registry:{{{KEY}}}"));
    let master = cluster.master_of(slot).await.unwrap();
    for node in cluster.nodes() {
        cluster.node_mut(node).kill();
    }
    let error = failed_lock(&registry).await;
    // This asserts the operation, the key and the address, but not the cause.
    let _cause = assert_acquire_error(&error, KEY, &master.to_string());
}

#[tokio::test]
async fn an_error_of_a_failed_master_names_the_master_and_not_its_sentinels() {
    let mut setup = SentinelSetup::start().await.unwrap();
    let registry = open(&setup.url()).await;
    let master = setup.master().await.unwrap();
    // Without sentinels there is no failover.
    setup.sentinels_mut().iter_mut().for_each(|server| server.kill());
    setup.server_mut(master).kill();
    let error = failed_lock(&registry).await;
    // This asserts the operation, the key and the address, but not the cause.
    let _cause = assert_acquire_error(&error, KEY, &master.to_string());
}
