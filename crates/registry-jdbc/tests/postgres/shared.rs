//! Runs the whole suite over one server, each clause in its own namespace. Only clauses that
//! restart or empty the server have a server of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use async_trait::async_trait;
use registry_conformance::{Clause, Harness, Need, Store, all_clauses, run};
use registry_core::{Claim, LockBackend};
use registry_jdbc::{PostgresBackend, PostgresConfig, SpringTable, SqlMode};
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::{PostgresOptions, PostgresServer};
use tokio::sync::RwLock;

/// The number of concurrent clauses; they spend most of their time waiting.
const CONCURRENT_CLAUSES: usize = 8;

/// The connection to the server, and the kind of locks.
#[derive(Debug, Clone)]
pub(crate) enum StoreMode {
    Direct,
    PgBouncer,
    Session,
    Row,
    RowPgBouncer,
    /// Directly, with locks in Spring's format, and a region for each namespace.
    Spring(SpringTable),
}

impl StoreMode {
    fn ends_with_connection(&self) -> bool {
        matches!(self, Self::Session | Self::Row | Self::RowPgBouncer)
    }

    /// Whether locks of this kind can satisfy the clause.
    fn supports(&self, clause: &Clause) -> bool {
        let is_supported_here = |need: &Need| !matches!(need, Need::Remote | Need::Fair);
        let can = match self {
            Self::Direct | Self::PgBouncer | Self::Spring(_) => {
                |need: &Need| *need != Need::ReportsInvalidations
            }
            Self::Session => |need: &Need| !matches!(need, Need::Inspect | Need::Labels),
            Self::Row | Self::RowPgBouncer => |_: &Need| true,
        };
        // Another client cannot acquire again, renew or release a lock that belongs to a
        // connection.
        let is_bound_to_client = clause.name.ends_with("_through_another_client")
            || matches!(
                clause.name,
                "concurrent_repetitions_of_one_acquire_are_one_grant"
                    | "of_many_concurrent_claims_exactly_one_is_granted"
                    | "a_repeated_acquire_has_the_same_token"
            );
        // All locks of one session are lost together.
        let is_session_wide = clause.name == "one_lost_lock_does_not_stop_the_renewal_of_others";
        clause.needs.iter().all(|need| is_supported_here(need) && can(need))
            && !(is_bound_to_client && self.ends_with_connection())
            && !(is_session_wide && matches!(self, Self::Session))
    }
}

/// Runs all clauses that the store supports. `runs` and `skips` are the expected counts, so that no
/// clause is omitted unnoticed.
///
/// # Panics
/// With the names of the failed clauses.
pub(crate) fn run_conformance(mode: StoreMode, runs: usize, skips: usize) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let servers = Arc::new(RwLock::new(runtime.block_on(Servers::begin(&mode))));
    let (supported, skipped): (Vec<&'static Clause>, Vec<_>) =
        all_clauses().iter().partition(|clause| mode.supports(clause));
    assert_eq!((supported.len(), skipped.len()), (runs, skips), "skipped: {skipped:?}");

    let next = AtomicUsize::new(0);
    let failed = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENT_CLAUSES {
            scope.spawn(|| {
                while let Some(&clause) = supported.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let harness =
                        SharedServers { mode: mode.clone(), servers: Arc::clone(&servers), clause };
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
    assert!(failed.is_empty(), "{} promises are broken: {failed:#?}", failed.len());
}

#[derive(Debug)]
struct Servers {
    mode: StoreMode,
    server: PostgresServer,
    bouncer: Option<PgBouncer>,
}

impl Servers {
    async fn begin(mode: &StoreMode) -> Self {
        let options = PostgresOptions::new().settings(&["max_connections=1000"]);
        let server = match mode {
            StoreMode::Row | StoreMode::RowPgBouncer => PostgresServer::start_with(options).await,
            _ => PostgresServer::start().await,
        };
        let server = server.unwrap();
        let bouncer = match mode {
            StoreMode::Direct | StoreMode::Session | StoreMode::Row | StoreMode::Spring(_) => None,
            StoreMode::PgBouncer => Some(PgBouncer::start(&server).await.unwrap()),
            StoreMode::RowPgBouncer => {
                let limits = ["max_client_conn = 1000", "default_pool_size = 800"];
                Some(PgBouncer::start_with(&server, &limits).await.unwrap())
            }
        };
        Self { mode: mode.clone(), server, bouncer }
    }

    async fn open(&self, namespace: &str) -> Arc<dyn LockBackend> {
        let config = match &self.bouncer {
            None => PostgresConfig::from_url(&self.server.url()).unwrap(),
            Some(bouncer) => {
                let config = PostgresConfig::from_url(&bouncer.url()).unwrap();
                config.with_prepared(false).with_listen(&self.server.url()).unwrap()
            }
        };
        // One clause holds this many locks.
        let config = config.with_namespace(namespace).with_row_locks(260);
        match &self.mode {
            StoreMode::Session => {
                Arc::new(PostgresBackend::open_mode(config, SqlMode::Session).await.unwrap())
            }
            StoreMode::Row | StoreMode::RowPgBouncer => {
                Arc::new(PostgresBackend::open_mode(config, SqlMode::Row).await.unwrap())
            }
            StoreMode::Spring(table) => {
                let table = table.clone().with_region(namespace);
                Arc::new(PostgresBackend::open_mode(config, SqlMode::Spring(table)).await.unwrap())
            }
            StoreMode::Direct | StoreMode::PgBouncer => {
                Arc::new(PostgresBackend::open(config).await.unwrap())
            }
        }
    }
}

/// The servers for one clause.
#[derive(Debug)]
struct SharedServers {
    mode: StoreMode,
    servers: Arc<RwLock<Servers>>,
    clause: &'static Clause,
}

#[async_trait]
impl Harness for SharedServers {
    async fn store(&self) -> Box<dyn Store> {
        let needs_own_server = |need: &Need| matches!(need, Need::Restart | Need::Wipe);
        let servers = if self.clause.needs.iter().any(needs_own_server) {
            Arc::new(RwLock::new(Servers::begin(&self.mode).await))
        } else {
            Arc::clone(&self.servers)
        };
        let namespace = format!("{}-{}", self.clause.theme, self.clause.name);
        Box::new(InNamespace { mode: self.mode.clone(), servers, namespace })
    }
}

#[derive(Debug)]
struct InNamespace {
    mode: StoreMode,
    servers: Arc<RwLock<Servers>>,
    namespace: String,
}

#[async_trait]
impl Store for InNamespace {
    async fn client(&self) -> Arc<dyn LockBackend> {
        self.servers.read().await.open(&self.namespace).await
    }

    async fn other_namespace(&self) -> Option<Arc<dyn LockBackend>> {
        Some(self.servers.read().await.open(&format!("{}-other", self.namespace)).await)
    }

    async fn restart(&self) -> bool {
        let mut servers = self.servers.write().await;
        // An orderly stop: a crash may lose the last releases, whose keys then stay locked until
        // the end of their lease.
        servers.server.stop().await.unwrap();
        servers.server.start_again().await.unwrap();
        true
    }

    // Ends the connection, as the server would.
    async fn break_claim(&self, claim: &Claim) -> bool {
        if !self.mode.ends_with_connection() {
            return false;
        }
        let hashed = hashed(&self.namespace, claim);
        // The advisory lock is the session's lock, or it identifies the connection of the
        // transaction.
        let from = if matches!(self.mode, StoreMode::Session) { 1 } else { 17 };
        let number = format!(
            "('x' || substr(encode(sha256('\\x{hashed}'), 'hex'), {from}, 16))::bit(64)::bigint"
        );
        let cut = format!(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND granted \
             AND (classid::bigint << 32 | objid::bigint) = {number}"
        );
        self.servers.read().await.server.sql(&cut).await.unwrap();
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

/// The input of the hash that names a session's lock, in hexadecimal digits.
fn hashed(namespace: &str, claim: &Claim) -> String {
    let length = u64::try_from(namespace.len()).unwrap().to_be_bytes();
    let bytes = length.into_iter().chain(namespace.bytes()).chain(claim.key().as_str().bytes());
    bytes.map(|byte| format!("{byte:02x}")).collect()
}
