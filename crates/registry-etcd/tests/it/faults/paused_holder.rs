//! A process that is paused for longer than its lease and then writes. The member must refuse the
//! write.

use std::error::Error;
use std::io::{self, Write as _};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use registry_core::{ClaimMode, LockGuard, Registry};
use registry_etcd::{EtcdBackend, EtcdConfig, Fence as _, FenceError};
use registry_testkit::etcd::{CTL_VARIABLE, EtcdServer};
use registry_testkit::holder::{
    FencedWriter, assert_a_paused_holder_cannot_write, run_child_process, serve_with_writer,
    write_refused_by_server,
};
use registry_testkit::proxy::{FaultProxy, ProxyMode};

use super::workload::{LEASE, LONG, registry, secs};

/// Writes in a fenced transaction. If the guard refuses, sends the same transaction with `etcdctl`,
/// so that the server's comparison must refuse as well.
#[derive(Debug)]
struct StockKey {
    /// The server's address.
    addr: String,
    /// The claim's key. Known from the first write, when the lock's queue has no other key.
    entry: OnceLock<String>,
}

impl StockKey {
    /// Runs `etcdctl` and returns its output.
    fn ctl(&self, args: &[&str], input: &str) -> io::Result<String> {
        let program = std::env::var_os(CTL_VARIABLE).unwrap_or_else(|| "etcdctl".into());
        let mut command = Command::new(program);
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.addr]);
        command.args(["--dial-timeout", "30s", "--command-timeout", "30s"]).args(args);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        // The drop of the pipe ends the input.
        child.stdin.take().expect("piped").write_all(input.as_bytes())?;
        let output = child.wait_with_output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

#[async_trait]
impl FencedWriter for StockKey {
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        if self.entry.get().is_none() {
            let queue = format!("lock-registry/{}/", guard.key().replace('/', "%2F"));
            let entry = self.ctl(&["get", "--prefix", "--keys-only", &queue], "")?;
            assert_eq!(entry.lines().count(), 1, "not one entry: {entry:?}");
            self.entry.get_or_init(|| entry);
        }
        match guard.txn().put("stock", value).commit().await {
            Ok(_) => return Ok(()),
            Err(FenceError::Lost { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let entry = self.entry.get().ok_or("the holder has written nothing yet")?;
        let token = guard.fencing_token();
        let comparison = format!("create({entry:?}) = \"{token}\"");
        // Comparisons, operations, and operations after a refusal, each followed by an empty line.
        let reply = self.ctl(&["txn"], &format!("{comparison}\n\nput stock {value:?}\n\n\n"))?;
        match reply.lines().next() {
            Some("SUCCESS") => Ok(()),
            Some("FAILURE") => Err(write_refused_by_server(reply)),
            _ => Err(format!("etcdctl printed {reply:?}").into()),
        }
    }
}

#[test]
#[ignore = "started by the other test, as another process"]
fn a_holder_process() {
    run_child_process(async |url| {
        // So long that a loaded machine does not end the lease of the successor.
        let registry = registry(&EtcdConfig::from_url(&url).unwrap(), secs(10)).await;
        let addr = url.strip_prefix("etcd://").unwrap().to_owned();
        let writer = StockKey { addr, entry: OnceLock::new() };
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
    let server = EtcdServer::start().await.unwrap();
    let url = format!("etcd://{}", server.addr());
    let read = async || {
        server.ctl(&["get", "stock", "--print-value-only"]).await.unwrap().trim().to_owned()
    };
    let test = "faults::paused_holder::a_holder_process";
    assert_a_paused_holder_cannot_write(test, &url, mode, LONG, read).await.unwrap();
}

/// Readers hold the key at the same time, so their tokens do not order their writes.
#[tokio::test]
async fn readers_that_hold_the_key_together_write_in_any_order() {
    let server = EtcdServer::start().await.unwrap();
    let config = EtcdConfig::from_url(&format!("etcd://{}", server.addr())).unwrap();
    let (a, b) = (registry(&config, secs(10)).await, registry(&config, secs(10)).await);
    let older = a.obtain("stock/42").read().await.unwrap();
    let newer = b.obtain("stock/42").read().await.unwrap();
    assert!(newer.fencing_token() > older.fencing_token());
    for (guard, value) in [(&older, "1"), (&newer, "2"), (&older, "3")] {
        guard.txn().put("stock", value).commit().await.unwrap();
        let stock = server.ctl(&["get", "stock", "--print-value-only"]).await.unwrap();
        assert_eq!(stock.trim(), value);
    }
    older.unlock().await.unwrap();
    newer.unlock().await.unwrap();
}

/// The guard's own check passes. Then the network delays the transaction until the lock is lost.
#[tokio::test]
async fn a_transaction_that_arrives_after_the_loss_is_refused() {
    let server = EtcdServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    // The request must not time out before the lease ends.
    let config = EtcdConfig::from_url(&format!("etcd://{}", proxy.addr())).unwrap();
    let backend = EtcdBackend::open(config.with_response_timeout(LONG)).await.unwrap();
    let first = Registry::builder(Arc::new(backend)).lease(LEASE).timeout(secs(1)).build().unwrap();
    let direct = EtcdConfig::from_url(&format!("etcd://{}", server.addr())).unwrap();
    let second = registry(&direct, LEASE).await;

    let guard = first.obtain("stock/42").lock().await.unwrap();
    guard.txn().put("stock", "by the first holder").commit().await.unwrap();
    proxy.set_mode(ProxyMode::BlackHole).await.unwrap();
    assert!(guard.is_held());
    let late = guard.txn().put("stock", "too late").commit();
    let successor = async {
        let next = second.obtain("stock/42").lock().await.unwrap();
        next.txn().put("stock", "by the successor").commit().await.unwrap();
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        next
    };
    let (refused, next) = tokio::join!(late, successor);
    assert!(matches!(refused, Err(FenceError::Lost { .. })), "{refused:?}");
    let stock = server.ctl(&["get", "stock", "--print-value-only"]).await.unwrap();
    assert_eq!(stock.trim(), "by the successor");
    next.unlock().await.unwrap();
}
