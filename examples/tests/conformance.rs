//! Runs the conformance suite against the example backend of `src/table.rs`, on paused time.

// ANCHOR: suite
use std::sync::Arc;

use async_trait::async_trait;
use lock_registry::backend::LockBackend;
use lock_registry_examples::table::{Table, TableBackend};
use registry_conformance::{Clock, Harness, Store};

#[derive(Debug)]
struct TableHarness;

#[async_trait]
impl Harness for TableHarness {
    fn clock(&self) -> Clock {
        Clock::Paused // the table lives in this process and follows tokio's time
    }

    async fn store(&self) -> Box<dyn Store> {
        // A store of its own for each promise: a file, a namespace, a server.
        Box::new(TableStore(Table::start()))
    }
}

#[derive(Debug)]
struct TableStore(Arc<TableBackend>);

#[async_trait]
impl Store for TableStore {
    async fn client(&self) -> Arc<dyn LockBackend> {
        // A store in a server opens a connection here, as another process would.
        Arc::clone(&self.0) as Arc<dyn LockBackend>
    }
}

registry_conformance::conformance! {
    harness = TableHarness,
    runs = 206,
    skips = 229,
    without = [
        fair,
        fair_on_request,
        shared,
        upgradable,
        permits,
        values,
        waiters,
        reports_invalidations,
        labels,
        inspect,
        namespaces,
        restart,
        wipe,
        remote,
    ],
}
// ANCHOR_END: suite
