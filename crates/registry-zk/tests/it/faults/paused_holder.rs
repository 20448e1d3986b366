//! A process that is paused for longer than its lease and then writes. The server must refuse the
//! write.

use std::error::Error;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use registry_core::{ClaimMode, LockGuard};
use registry_testkit::holder::{
    FencedWriter, assert_a_paused_holder_cannot_write, run_child_process, serve_with_writer,
    write_refused_by_server,
};
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_zk::{FenceError, Multi as _};
use zookeeper_client::{Acls, CheckWriteError, Client, CreateMode, Error as ZkError};

use super::support::{LONG_SESSION, MINUTE_SESSION, operator, registry};

const STOCK: &str = "/stock";

/// Writes in a fenced multi. If the guard refuses, sends the same multi over another session. The
/// server must refuse this multi as well.
#[derive(Debug)]
struct StockNode {
    client: Client,
    /// The claim's node. Known from the first write, when the lock's queue has no other node.
    node: OnceLock<String>,
}

#[async_trait]
impl FencedWriter for StockNode {
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let lock = format!("/lock-registry/default/{}", guard.key().replace('/', "%2F"));
        if self.node.get().is_none() {
            let nodes = self.client.list_children(&lock).await?;
            let [node] = &*nodes else { return Err(format!("not one node: {nodes:?}").into()) };
            self.node.get_or_init(|| format!("{lock}/{node}"));
        }
        let committed = match guard.multi() {
            Ok(multi) => multi.set(STOCK, value, None).commit().await,
            Err(error) => Err(error),
        };
        match committed {
            Ok(_) => return Ok(()),
            Err(FenceError::Lost { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let node = self.node.get().ok_or("the holder has written nothing yet")?;
        let mut multi = self.client.new_check_writer(node, None)?;
        multi.add_set_data(STOCK, value.as_bytes(), None)?;
        match multi.commit().await {
            Ok(_) => Ok(()),
            Err(CheckWriteError::CheckFailed { source: ZkError::NoNode }) => {
                Err(write_refused_by_server("the node of the claim does not exist"))
            }
            Err(error) => Err(error.into()),
        }
    }
}

#[test]
#[ignore = "started by the other test, as another process"]
fn a_holder_process() {
    run_child_process(async |url| {
        let registry = registry(&url, LONG_SESSION).await;
        let connector = Client::connector().with_session_timeout(MINUTE_SESSION);
        let client = connector.connect(url.strip_prefix("zk://").unwrap()).await.unwrap();
        let writer = StockNode { client, node: OnceLock::new() };
        serve_with_writer(Arc::new(registry), Arc::new(writer)).await;
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
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.create(STOCK, b"", &persistent).await.unwrap();
    let read = async || String::from_utf8(operator.get_data(STOCK).await.unwrap().0).unwrap();
    let test = "faults::paused_holder::a_holder_process";
    assert_a_paused_holder_cannot_write(test, &server.url(), mode, LONG, read).await.unwrap();
}
