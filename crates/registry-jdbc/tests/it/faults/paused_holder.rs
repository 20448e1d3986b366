//! A holder is paused for longer than its lease, and then tries to write. Both the fence and the
//! token column of the written table refuse the write.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{ClaimMode, LockGuard};
use registry_testkit::holder::{
    FencedWriter, assert_a_paused_holder_cannot_write, run_child_process, serve_with_writer,
    write_refused_by_server,
};

use super::app_connection::AppConnection;
use super::server::{LockMode, ServerKind, TEST_TIMEOUT, registry_with_mode};

/// So long that a loaded machine does not end the lease of the successor.
const LEASE: Duration = Duration::from_secs(10);

/// The table behind a database URL. Writes in a fenced transaction. If the fence returns an error,
/// writes without it, so that the table's comparison of tokens must refuse as well.
#[derive(Debug)]
struct StockTable(String);

#[async_trait]
impl FencedWriter for StockTable {
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let token = guard.fencing_token();
        let update =
            format!("UPDATE stock SET value = '{value}', token = {token} WHERE token <= {token}");
        let mut connection = AppConnection::connect_to(&self.0).await;
        let mut transaction = connection.begin().await;
        let fenced = transaction.fence(guard).await;
        if fenced.is_ok() {
            assert_eq!(transaction.update(update).await, 1);
            transaction.commit().await;
            return Ok(());
        }
        transaction.rollback().await;
        let mut transaction = connection.begin().await;
        let changed = transaction.update(update).await;
        transaction.commit().await;
        if changed == 0 {
            return Err(write_refused_by_server("no row has this token or an older one"));
        }
        Ok(())
    }
}

#[test]
#[ignore = "started by the other test, as another process"]
fn a_holder_process() {
    run_child_process(async |url| {
        let registry = registry_with_mode(&url, LEASE, LockMode::Lease).await;
        let writer = Arc::new(StockTable(url));
        serve_with_writer(Arc::new(registry), writer).await;
    });
}

async fn a_paused_holder_cannot_write(kind: ServerKind) {
    assert_refuses_a_paused_holder(kind, ClaimMode::Exclusive).await;
}

async fn a_paused_reader_cannot_write(kind: ServerKind) {
    assert_refuses_a_paused_holder(kind, ClaimMode::Shared).await;
}

async fn a_paused_permit_holder_cannot_write(kind: ServerKind) {
    assert_refuses_a_paused_holder(kind, ClaimMode::Permits { take: 1, of: 2 }).await;
}

async fn assert_refuses_a_paused_holder(kind: ServerKind, mode: ClaimMode) {
    let server = kind.start().await;
    server.sql("CREATE TABLE stock (value varchar(40), token bigint)").await.unwrap();
    server.sql("INSERT INTO stock VALUES ('', 0)").await.unwrap();
    let read = async || server.sql("SELECT value FROM stock").await.unwrap().trim().to_owned();
    let test = "faults::paused_holder::a_holder_process";
    assert_a_paused_holder_cannot_write(test, &server.url(), mode, TEST_TIMEOUT, read)
        .await
        .unwrap();
}

on_both_servers! {
    a_paused_holder_cannot_write,
    a_paused_reader_cannot_write,
    a_paused_permit_holder_cannot_write,
}
