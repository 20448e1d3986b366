//! Runs the whole suite over one set of servers.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use async_trait::async_trait;
use registry_conformance::{Clause, Harness, Need, Store, all_clauses, run};
use registry_core::LockBackend;
use registry_etcd::{EtcdBackend, EtcdConfig};
use tokio::sync::RwLock;

/// The number of clauses that run concurrently; they mostly wait.
const CONCURRENT_CLAUSES: usize = 8;

/// A set of servers of one kind.
#[async_trait]
pub(crate) trait Servers: Debug + Send + Sync + Sized + 'static {
    async fn begin() -> Self;
    fn config(&self) -> EtcdConfig;
    async fn restart(&mut self);
}

/// Runs all clauses that the servers support. Asserts that `runs` clauses run and `skips` clauses
/// are skipped.
///
/// # Panics
/// Panics with the names of the clauses that failed.
pub(crate) fn assert_conformance<S: Servers>(runs: usize, skips: usize) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let servers = Arc::new(RwLock::new(runtime.block_on(S::begin())));
    let capabilities = {
        let servers = Arc::clone(&servers);
        runtime.block_on(async move { open(&servers, "lock-registry-probe").await.capabilities() })
    };
    let is_supported = |need: &Need| match need {
        Need::Remote | Need::Wipe => false,
        Need::Handoff => !capabilities.fair,
        _ => true,
    };
    let (supported, skipped): (Vec<&'static Clause>, Vec<_>) =
        all_clauses().iter().partition(|clause| clause.needs.iter().all(is_supported));
    assert_eq!((supported.len(), skipped.len()), (runs, skips), "skipped: {skipped:?}");

    let next = AtomicUsize::new(0);
    let failed = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENT_CLAUSES {
            scope.spawn(|| {
                while let Some(&clause) = supported.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let harness = SharedServers { servers: Arc::clone(&servers), clause };
                    let supported =
                        catch_unwind(AssertUnwindSafe(|| run(harness, clause.theme, clause.name)));
                    if supported.is_err() {
                        let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                        failed.push(format!("{clause:?}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(failed.is_empty(), "{} clauses failed: {failed:#?}", failed.len());
}

async fn open<S: Servers>(servers: &RwLock<S>, namespace: &str) -> Arc<dyn LockBackend> {
    let config = servers.read().await.config().with_namespace(namespace);
    Arc::new(EtcdBackend::open(config).await.unwrap())
}

/// The servers of one clause.
#[derive(Debug)]
struct SharedServers<S> {
    servers: Arc<RwLock<S>>,
    clause: &'static Clause,
}

#[async_trait]
impl<S: Servers> Harness for SharedServers<S> {
    async fn store(&self) -> Box<dyn Store> {
        let servers = if self.clause.needs.contains(&Need::Restart) {
            Arc::new(RwLock::new(S::begin().await))
        } else {
            Arc::clone(&self.servers)
        };
        let namespace = format!("lock-registry-{}-{}", self.clause.theme, self.clause.name);
        Box::new(InNamespace { servers, namespace })
    }
}

#[derive(Debug)]
struct InNamespace<S> {
    servers: Arc<RwLock<S>>,
    namespace: String,
}

#[async_trait]
impl<S: Servers> Store for InNamespace<S> {
    async fn client(&self) -> Arc<dyn LockBackend> {
        open(&self.servers, &self.namespace).await
    }

    async fn other_namespace(&self) -> Option<Arc<dyn LockBackend>> {
        Some(open(&self.servers, &format!("{}-other", self.namespace)).await)
    }

    async fn restart(&self) -> bool {
        self.servers.write().await.restart().await;
        true
    }
}
