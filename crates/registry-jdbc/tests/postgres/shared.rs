//! Runs the whole suite over one server, each clause in a namespace of its own; only those that restart or empty the server get their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use async_trait::async_trait;
use registry_conformance::{Clause, Harness, Need, Store, all_clauses, run};
use registry_core::LockBackend;
use registry_jdbc::{PostgresBackend, PostgresConfig, PostgresSpringBackend, SpringTable};
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::PostgresServer;
use tokio::sync::RwLock;

/// How many clauses run at a time: they mostly wait.
const AT_ONCE: usize = 8;

/// How the server is reached.
#[derive(Debug, Clone)]
pub(crate) enum Way {
    Directly,
    ThroughPgBouncer,
    /// Directly, with locks that look like Spring's, in a region for each namespace.
    AsSpring(SpringTable),
}

/// Runs all clauses that the store can keep: `runs` and `skips` count them, so that none is forgotten.
///
/// # Panics
/// With the names of the clauses that were not kept.
pub(crate) fn keeps_its_promises(way: Way, runs: usize, skips: usize) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let servers = Arc::new(RwLock::new(runtime.block_on(Servers::begin(&way))));
    let can = |need: &Need| !matches!(need, Need::Remote | Need::Fair | Need::TellsLosses);
    let (kept, skipped): (Vec<&'static Clause>, Vec<_>) =
        all_clauses().iter().partition(|clause| clause.needs.iter().all(can));
    assert_eq!((kept.len(), skipped.len()), (runs, skips), "skipped: {skipped:?}");

    let next = AtomicUsize::new(0);
    let broken = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(&clause) = kept.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let harness =
                        SharedServers { way: way.clone(), servers: Arc::clone(&servers), clause };
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

#[derive(Debug)]
struct Servers {
    way: Way,
    server: PostgresServer,
    bouncer: Option<PgBouncer>,
}

impl Servers {
    async fn begin(way: &Way) -> Self {
        let server = PostgresServer::start().await.unwrap();
        let bouncer = match way {
            Way::Directly | Way::AsSpring(_) => None,
            Way::ThroughPgBouncer => Some(PgBouncer::start(&server).await.unwrap()),
        };
        Self { way: way.clone(), server, bouncer }
    }

    async fn open(&self, namespace: &str) -> Arc<dyn LockBackend> {
        let config = match &self.bouncer {
            None => PostgresConfig::from_url(&self.server.url()).unwrap(),
            Some(bouncer) => {
                let config = PostgresConfig::from_url(&bouncer.url()).unwrap();
                config.with_prepared(false).with_listen(&self.server.url()).unwrap()
            }
        };
        if let Way::AsSpring(table) = &self.way {
            let table = table.clone().with_region(namespace);
            return Arc::new(PostgresSpringBackend::open(config, table).await.unwrap());
        }
        Arc::new(PostgresBackend::open(config.with_namespace(namespace)).await.unwrap())
    }
}

/// Servers for one clause.
#[derive(Debug)]
struct SharedServers {
    way: Way,
    servers: Arc<RwLock<Servers>>,
    clause: &'static Clause,
}

#[async_trait]
impl Harness for SharedServers {
    async fn store(&self) -> Box<dyn Store> {
        let upsets = |need: &Need| matches!(need, Need::Restart | Need::Wipe);
        let servers = if self.clause.needs.iter().any(upsets) {
            Arc::new(RwLock::new(Servers::begin(&self.way).await))
        } else {
            Arc::clone(&self.servers)
        };
        let namespace = format!("{}-{}", self.clause.theme, self.clause.name);
        Box::new(InNamespace { servers, namespace })
    }
}

#[derive(Debug)]
struct InNamespace {
    servers: Arc<RwLock<Servers>>,
    namespace: String,
}

#[async_trait]
impl Store for InNamespace {
    async fn client(&self) -> Arc<dyn LockBackend> {
        self.servers.read().await.open(&self.namespace).await
    }

    async fn stranger(&self) -> Option<Arc<dyn LockBackend>> {
        Some(self.servers.read().await.open(&format!("{}-other", self.namespace)).await)
    }

    async fn restart(&self) -> bool {
        let mut servers = self.servers.write().await;
        // In good order: a release of the last moment need not survive a crash, and then costs the rest of its lease.
        servers.server.stop().await.unwrap();
        servers.server.start_again().await.unwrap();
        true
    }

    async fn wipe(&self) -> bool {
        let servers = self.servers.read().await;
        let tables = "DROP TABLE lock_registry_locks, lock_registry_meta; DROP FUNCTION lock_registry_purged";
        servers.server.sql(tables).await.unwrap();
        servers.server.sql("DROP TABLE IF EXISTS INT_LOCK").await.unwrap();
        true
    }
}
