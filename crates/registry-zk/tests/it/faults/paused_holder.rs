//! A holder that is paused for longer than its lease, and then writes.

use std::error::Error;
use std::sync::Arc;

use async_trait::async_trait;
use registry_core::LockGuard;
use registry_testkit::holder::{
    FencedWriter, assert_a_paused_holder_cannot_write, run_child_process, serve_with_writer,
};
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_zk::Multi as _;
use zookeeper_client::{Acls, CreateMode};

use super::support::{SESSION, operator, registry};

const STOCK: &str = "/stock";

#[derive(Debug)]
struct StockNode;

#[async_trait]
impl FencedWriter for StockNode {
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        guard.multi()?.set(STOCK, value, None).commit().await?;
        Ok(())
    }
}

#[test]
#[ignore = "started by the other test, as another process"]
fn a_holder_process() {
    run_child_process(async |url| {
        let registry = registry(&url, SESSION).await;
        serve_with_writer(Arc::new(registry), Arc::new(StockNode)).await;
    });
}

#[tokio::test]
async fn a_paused_holder_cannot_write() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.create(STOCK, b"", &persistent).await.unwrap();
    let read = async || String::from_utf8(operator.get_data(STOCK).await.unwrap().0).unwrap();
    let test = "faults::paused_holder::a_holder_process";
    assert_a_paused_holder_cannot_write(test, &server.url(), LONG, read).await.unwrap();
}
