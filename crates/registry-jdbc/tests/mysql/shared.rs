//! Runs the whole suite over one server, each clause in a namespace of its own; only those that restart or empty the server get their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use async_trait::async_trait;
use registry_conformance::{Clause, Harness, Need, Store, all_clauses, run};
use registry_core::LockBackend;
use registry_jdbc::{MySqlBackend, MySqlConfig, MySqlSpringBackend, SpringTable};
use registry_testkit::mariadb::MariaDbServer;
use tokio::sync::RwLock;

/// How many clauses run at a time: they mostly wait.
const AT_ONCE: usize = 8;

/// Runs all clauses that the store can keep, perhaps with locks that look like Spring's, in a region for each namespace: `runs` and `skips` count them, so that none is forgotten.
///
/// # Panics
/// With the names of the clauses that were not kept.
pub(crate) fn keeps_its_promises(spring: Option<SpringTable>, runs: usize, skips: usize) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = Arc::new(RwLock::new(runtime.block_on(MariaDbServer::start()).unwrap()));
    let can = |need: &Need| match need {
        Need::Remote | Need::Fair | Need::TellsLosses => false,
        Need::Wakes => spring.is_none(),
        _ => true,
    };
    let (kept, skipped): (Vec<&'static Clause>, Vec<_>) =
        all_clauses().iter().partition(|clause| clause.needs.iter().all(can));
    assert_eq!((kept.len(), skipped.len()), (runs, skips), "skipped: {skipped:?}");

    let next = AtomicUsize::new(0);
    let broken = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(&clause) = kept.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let harness = SharedServer {
                        server: Arc::clone(&server),
                        spring: spring.clone(),
                        clause,
                    };
                    let kept =
                        catch_unwind(AssertUnwindSafe(|| run(harness, clause.theme, clause.name)));
                    if kept.is_err() {
                        let mut broken = broken.lock().unwrap_or_else(PoisonError::into_inner);
                        broken.push(format!("{clause:?}"));
                    }
                }
            });
        }
    });
    let broken = broken.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(broken.is_empty(), "{} promises are broken: {broken:#?}", broken.len());
}

/// The server for one clause.
#[derive(Debug)]
struct SharedServer {
    server: Arc<RwLock<MariaDbServer>>,
    spring: Option<SpringTable>,
    clause: &'static Clause,
}

#[async_trait]
impl Harness for SharedServer {
    async fn store(&self) -> Box<dyn Store> {
        let upsets = |need: &Need| matches!(need, Need::Restart | Need::Wipe);
        let server = if self.clause.needs.iter().any(upsets) {
            Arc::new(RwLock::new(MariaDbServer::start().await.unwrap()))
        } else {
            Arc::clone(&self.server)
        };
        let namespace = format!("{}-{}", self.clause.theme, self.clause.name);
        Box::new(InNamespace { server, spring: self.spring.clone(), namespace })
    }
}

#[derive(Debug)]
struct InNamespace {
    server: Arc<RwLock<MariaDbServer>>,
    spring: Option<SpringTable>,
    namespace: String,
}

impl InNamespace {
    async fn open(&self, namespace: &str) -> Arc<dyn LockBackend> {
        let url = self.server.read().await.url();
        let config = MySqlConfig::from_url(&url).unwrap().with_namespace(namespace);
        if let Some(table) = &self.spring {
            let table = table.clone().with_region(namespace);
            return Arc::new(MySqlSpringBackend::open(config, table).await.unwrap());
        }
        Arc::new(MySqlBackend::open(config).await.unwrap())
    }
}

#[async_trait]
impl Store for InNamespace {
    async fn client(&self) -> Arc<dyn LockBackend> {
        self.open(&self.namespace).await
    }

    async fn stranger(&self) -> Option<Arc<dyn LockBackend>> {
        Some(self.open(&format!("{}-other", self.namespace)).await)
    }

    // What was answered is on the disk, so this may be a crash.
    async fn restart(&self) -> bool {
        self.server.write().await.start_again().await.unwrap();
        true
    }

    async fn wipe(&self) -> bool {
        let tables = "DROP TABLE lock_registry_locks, lock_registry_meta";
        self.server.read().await.sql(tables).await.unwrap();
        self.server.read().await.sql("DROP TABLE IF EXISTS INT_LOCK").await.unwrap();
        true
    }
}
