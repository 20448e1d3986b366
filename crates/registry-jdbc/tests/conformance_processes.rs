//! The conformance suite over a SQLite file, across processes. Every second client runs in another
//! process, and so does a holder that is suspended and killed.
#![cfg(all(feature = "sqlite", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "a helper of tests, which may")]

mod stores;

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::remote::{RemoteBackend, serve};
use registry_conformance::{Harness, RemoteHolder, RemoteLock, Store};
use registry_core::{FencingToken, LockBackend, Registry};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use registry_testkit::holder::{self, HolderCommand, HolderReport, LockHolder};
use stores::SqliteStore;

#[test]
#[ignore = "started by the other tests, as another process"]
fn child_process() {
    holder::run_child_process(async |file| {
        serve(Arc::new(SqliteBackend::open(SqliteConfig::new(file)).await.unwrap())).await;
    });
}

#[test]
#[ignore = "started by the other tests, as another process"]
fn a_holder_process() {
    holder::run_child_process(async |target| {
        let (lease_ms, file) = target.split_once(' ').unwrap();
        let lease = Duration::from_millis(lease_ms.parse().unwrap());
        let backend = SqliteBackend::open(SqliteConfig::new(file)).await.unwrap();
        let registry = Registry::builder(Arc::new(backend)).lease(lease).build().unwrap();
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
    /// Every second client runs in its own process.
    async fn client(&self) -> Arc<dyn LockBackend> {
        let local = self.file.client().await;
        if self.clients.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return local;
        }
        let file = self.file.path();
        let program = holder::child_process("child_process", file.to_str().unwrap()).unwrap();
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
        let holder = LockHolder::spawn_test("a_holder_process", &target).await.unwrap();
        Some(Box::new(HolderProcess(holder)))
    }
}

#[derive(Debug)]
struct HolderProcess(LockHolder);

/// Far longer than a reply takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

#[async_trait]
impl RemoteHolder for HolderProcess {
    async fn lock(&mut self, key: &str, wait: Duration) -> RemoteLock {
        let wait_ms = Some(u64::try_from(wait.as_millis()).unwrap());
        self.0
            .send_command(&HolderCommand::Lock {
                key: key.into(),
                wait_ms,
                lease_ms: None,
                renew: None,
            })
            .unwrap();
        let outcome = self.0.report(wait + LIMIT, |report| match report {
            HolderReport::Held { key: of, token, .. } if of == key => {
                Some(RemoteLock::Held { token: token.and_then(FencingToken::new) })
            }
            HolderReport::Busy { key: of } if of == key => Some(RemoteLock::Busy),
            HolderReport::Failed { key: Some(of), problem, .. } if of == key => panic!("{problem}"),
            _ => None,
        });
        outcome.await.unwrap()
    }

    async fn unlock(&mut self, key: &str) -> bool {
        match self.0.unlock(key, LIMIT).await {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::TimedOut => panic!("{error}"),
            Err(_) => false,
        }
    }

    async fn is_held(&mut self, key: &str) -> bool {
        self.0.status(key, LIMIT).await.unwrap().is_some()
    }

    async fn kill(&mut self) {
        self.0.process().kill().unwrap();
        self.0.process().wait_exit(LIMIT).await.unwrap();
    }

    async fn pause(&mut self) {
        self.0.process().pause().await.unwrap();
    }

    async fn resume(&mut self) {
        self.0.process().resume().unwrap();
    }
}

registry_conformance::conformance! {
    harness = SqliteProcessesHarness,
    runs = 227,
    skips = 5,
    without = [fair, reports_invalidations],
}
