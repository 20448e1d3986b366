//! A process that is paused for longer than its lease and then writes. The server must refuse the
//! write.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{ClaimMode, LockGuard};
use registry_redis::{Fenced, FencedWrites, RedisConfig};
use registry_testkit::eventually;
use registry_testkit::holder::{
    FencedWriter, assert_a_paused_holder_cannot_write, run_child_process, serve_with_writer,
    write_refused_by_server,
};
use registry_testkit::redis::RedisServer;

use super::workload::{LONG, registry, secs};

/// So long that a loaded machine does not end the lease of the successor.
const LEASE: Duration = secs(10);

#[derive(Debug)]
struct StockKey(FencedWrites);

#[async_trait]
impl FencedWriter for StockKey {
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        match self.0.set(guard.fencing_token(), "stock", value).await? {
            Fenced::Written(()) => Ok(()),
            stale => Err(write_refused_by_server(format!("{stale:?}"))),
        }
    }
}

#[test]
#[ignore = "started by the other test, as another process"]
fn a_holder_process() {
    run_child_process(async |url| {
        let config = RedisConfig::from_url(&url).unwrap();
        let registry = registry(&config, LEASE).await;
        let writer = Arc::new(StockKey(
            eventually(LONG, async || FencedWrites::open(config.clone()).await).await,
        ));
        serve_with_writer(Arc::new(registry), writer).await;
    });
}

#[tokio::test]
async fn a_paused_holder_cannot_write() {
    assert_refuses_a_paused_holder(ClaimMode::Exclusive).await;
}

#[tokio::test]
async fn a_paused_reader_cannot_write() {
    assert_refuses_a_paused_holder(ClaimMode::Shared).await;
}

#[tokio::test]
async fn a_paused_permit_holder_cannot_write() {
    assert_refuses_a_paused_holder(ClaimMode::Permits { take: 1, of: 2 }).await;
}

async fn assert_refuses_a_paused_holder(mode: ClaimMode) {
    let server = RedisServer::start(&[]).await.unwrap();
    let read = async || {
        // A bulk string: its length in bytes, then its text.
        let reply = server.send_command("GET stock").await.unwrap();
        reply.split_once("\r\n").map_or("", |(_length, text)| text).trim().to_owned()
    };
    let test = "faults::paused_holder::a_holder_process";
    assert_a_paused_holder_cannot_write(test, &server.url(), mode, LONG, read).await.unwrap();
}
