//! Runs the whole suite over one set of servers.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Clause, Harness, Need, Store, all_clauses, run};
use registry_core::LockBackend;
use registry_zk::{ZkBackend, ZkConfig};
use tokio::sync::RwLock;

/// Number of concurrent clauses, which mostly wait.
const CONCURRENT_CLAUSES: usize = 8;

/// So long that no session or lease ends while a clause runs, even on a slow machine.
const SESSION_TIMEOUT: Duration = Duration::from_secs(1_200);
/// Long, because the suite has its own time limits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A deployment of servers: standalone or an ensemble.
#[async_trait]
pub(crate) trait Servers: Debug + Send + Sync + Sized + 'static {
    /// Whether any text is a valid key.
    const ACCEPTS_ALL_KEYS: bool = true;

    async fn start_servers() -> Self;
    fn config(&self) -> ZkConfig;
    async fn restart(&mut self);
}

/// Runs all clauses that the servers support. `runs` and `skips` are the expected numbers, so that
/// no clause is skipped by mistake.
///
/// # Panics
/// Panics with the names of the failed clauses.
pub(crate) fn assert_conformance<S: Servers>(runs: usize, skips: usize) {
    let is_supported = |clause: &&Clause| {
        let needs = |need: &Need| {
            !matches!(need, Need::Remote | Need::Handoff | Need::Wipe | Need::Roaming)
        };
        let has_plain_keys = clause.theme != "keys" || clause.name.contains("refused");
        clause.needs.iter().all(needs) && (S::ACCEPTS_ALL_KEYS || has_plain_keys)
    };
    let (selected, skipped): (Vec<&'static Clause>, Vec<_>) =
        all_clauses().iter().partition(is_supported);
    assert_eq!((selected.len(), skipped.len()), (runs, skips), "skipped: {skipped:?}");

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let servers = Arc::new(RwLock::new(runtime.block_on(S::start_servers())));
    let next = AtomicUsize::new(0);
    let failed = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENT_CLAUSES {
            scope.spawn(|| {
                while let Some(&clause) = selected.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let harness = SharedServers { servers: Arc::clone(&servers), clause };
                    let result =
                        catch_unwind(AssertUnwindSafe(|| run(harness, clause.theme, clause.name)));
                    if result.is_err() {
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
    let config = servers.read().await.config();
    let config = config
        .with_namespace(namespace)
        .with_session_timeout(SESSION_TIMEOUT)
        .with_connect_timeout(REQUEST_TIMEOUT)
        .with_request_timeout(REQUEST_TIMEOUT);
    Arc::new(ZkBackend::open(config).await.unwrap())
}

/// Servers for one clause.
#[derive(Debug)]
struct SharedServers<S> {
    servers: Arc<RwLock<S>>,
    clause: &'static Clause,
}

#[async_trait]
impl<S: Servers> Harness for SharedServers<S> {
    async fn store(&self) -> Box<dyn Store> {
        let servers = if self.clause.needs.contains(&Need::Restart) {
            Arc::new(RwLock::new(S::start_servers().await))
        } else {
            Arc::clone(&self.servers)
        };
        let namespace = format!("{}-{}", self.clause.theme, self.clause.name);
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

    fn roams(&self) -> bool {
        false
    }
}
