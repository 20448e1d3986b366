//! A holder that is paused for longer than its lease, and then writes.

use std::error::Error;
use std::sync::Arc;

use async_trait::async_trait;
use registry_core::LockGuard;
use registry_etcd::{EtcdConfig, Fence as _};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::holder::{
    FencedWriter, assert_a_paused_holder_cannot_write, run_child_process, serve_with_writer,
};

use super::workload::{LEASE, LONG, registry};

#[derive(Debug)]
struct StockKey;

#[async_trait]
impl FencedWriter for StockKey {
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        guard.txn().put("stock", value).commit().await?;
        Ok(())
    }
}

#[test]
#[ignore = "started by the other test, as another process"]
fn a_holder_process() {
    run_child_process(async |url| {
        let registry = registry(&EtcdConfig::from_url(&url).unwrap(), LEASE).await;
        serve_with_writer(Arc::new(registry), Arc::new(StockKey)).await;
    });
}

#[tokio::test]
async fn a_paused_holder_cannot_write() {
    let server = EtcdServer::start().await.unwrap();
    let url = format!("etcd://{}", server.addr());
    let read = async || {
        server.ctl(&["get", "stock", "--print-value-only"]).await.unwrap().trim().to_owned()
    };
    let test = "faults::paused_holder::a_holder_process";
    assert_a_paused_holder_cannot_write(test, &url, LONG, read).await.unwrap();
}
