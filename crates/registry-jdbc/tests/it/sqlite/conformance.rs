//! The conformance suite over a SQLite file. Two clients are two backends on the same file, as in
//! two processes.

use async_trait::async_trait;
use registry_conformance::{Harness, Store};

use super::store::SqliteStore;

#[derive(Debug)]
struct SqliteHarness;

#[async_trait]
impl Harness for SqliteHarness {
    async fn store(&self) -> Box<dyn Store> {
        Box::new(SqliteStore::fresh())
    }
}

registry_conformance::conformance! {
    harness = SqliteHarness,
    runs = 422,
    skips = 13,
    without = [fair, reports_invalidations, remote],
}
