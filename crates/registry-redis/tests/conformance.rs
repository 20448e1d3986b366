//! The promises of lock-registry over a Redis server, each clause on a server of its own.
#![expect(clippy::unwrap_used, reason = "a helper of tests, which may")]

use std::sync::Arc;

use async_trait::async_trait;
use registry_conformance::{Harness, Store};
use registry_core::LockBackend;
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::redis::RedisServer;
use tokio::sync::Mutex;

#[derive(Debug)]
struct Standalone;

#[async_trait]
impl Harness for Standalone {
    async fn store(&self) -> Box<dyn Store> {
        Box::new(OneServer(Mutex::new(RedisServer::start(&[]).await.unwrap())))
    }
}

#[derive(Debug)]
struct OneServer(Mutex<RedisServer>);

impl OneServer {
    async fn open(&self, namespace: &str) -> Arc<dyn LockBackend> {
        let config = RedisConfig::from_url(&self.0.lock().await.url()).unwrap();
        Arc::new(RedisBackend::open(config.with_namespace(namespace)).await.unwrap())
    }
}

#[async_trait]
impl Store for OneServer {
    async fn client(&self) -> Arc<dyn LockBackend> {
        self.open("lock-registry").await
    }

    async fn stranger(&self) -> Option<Arc<dyn LockBackend>> {
        Some(self.open("other").await)
    }

    async fn restart(&self) -> bool {
        let mut server = self.0.lock().await;
        server.kill();
        server.start_again().await.unwrap();
        true
    }

    async fn wipe(&self) -> bool {
        let mut server = self.0.lock().await;
        server.kill();
        server.lose_data().unwrap();
        server.start_again().await.unwrap();
        true
    }
}

registry_conformance::conformance! {
    harness = Standalone,
    runs = 213,
    skips = 8,
    without = [fair, remote],
}
