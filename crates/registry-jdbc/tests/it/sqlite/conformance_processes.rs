//! The conformance suite over a SQLite file, across processes. Every second client runs in another
//! process, and so does a holder that is suspended and killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::remote::{RemoteBackend, serve};
use registry_conformance::{Harness, RemoteHolder, Store};
use registry_core::{LockBackend, Registry};
use registry_jdbc::SqliteBackend;
use registry_testkit::holder::{self, LockHolder};

use super::store::{SqliteStore, config};

#[test]
#[ignore = "started by the other tests, as another process"]
fn child_process() {
    holder::run_child_process(async |file| {
        serve(Arc::new(SqliteBackend::open(config(file)).await.unwrap())).await;
    });
}

#[test]
#[ignore = "started by the other tests, as another process"]
fn a_holder_process() {
    holder::run_child_process(async |target| {
        let (lease_ms, file) = target.split_once(' ').unwrap();
        let lease = Duration::from_millis(lease_ms.parse().unwrap());
        let backend = SqliteBackend::open(config(file)).await.unwrap();
        let builder = Registry::builder(Arc::new(backend)).lease(lease);
        let registry = builder.timeout(Duration::from_secs(8)).build().unwrap();
        holder::serve(Arc::new(registry)).await;
    });
}

#[derive(Debug)]
struct SqliteProcessesHarness;

#[async_trait]
impl Harness for SqliteProcessesHarness {
    async fn store(&self) -> Box<dyn Store> {
        Box::new(SqliteProcessesStore { file: SqliteStore::fresh(), clients: AtomicU64::new(0) })
    }
}

#[derive(Debug)]
struct SqliteProcessesStore {
    file: SqliteStore,
    clients: AtomicU64,
}

#[async_trait]
impl Store for SqliteProcessesStore {
    /// Every second client runs in a process of its own.
    async fn client(&self) -> Arc<dyn LockBackend> {
        let local = self.file.client().await;
        if self.clients.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return local;
        }
        let file = self.file.path();
        let test = "sqlite::conformance_processes::child_process";
        let program = holder::child_process(test, file.to_str().unwrap()).unwrap();
        Arc::new(RemoteBackend::spawn(program, local).await.unwrap())
    }

    async fn other_namespace(&self) -> Option<Arc<dyn LockBackend>> {
        self.file.other_namespace().await
    }

    async fn restart(&self) -> bool {
        self.file.restart().await
    }

    async fn wipe(&self) -> bool {
        self.file.wipe().await
    }

    async fn remote(&self, lease: Duration) -> Option<Box<dyn RemoteHolder>> {
        let target = format!("{} {}", lease.as_millis(), self.file.path().display());
        let test = "sqlite::conformance_processes::a_holder_process";
        let holder = LockHolder::spawn_test(test, &target).await.unwrap();
        Some(Box::new(holder))
    }
}

registry_conformance::conformance! {
    harness = SqliteProcessesHarness,
    runs = 428,
    skips = 7,
    without = [fair, reports_invalidations],
}
