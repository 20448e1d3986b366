//! Runs the whole suite over one server, each clause in its own namespace. Only clauses that
//! restart or empty the server have a server of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use async_trait::async_trait;
use registry_conformance::{Clause, Harness, Need, Store, all_clauses, run};
use registry_core::{Claim, LockBackend};
use registry_jdbc::SqlMode;
use tokio::sync::RwLock;

use crate::server::{Backend, HAS_SPRING_WAKES, ServerKind, TestServer};

/// The number of concurrent clauses; they spend most of their time waiting.
const CONCURRENT_CLAUSES: usize = 8;

fn ends_with_connection(mode: &SqlMode) -> bool {
    matches!(mode, SqlMode::Session | SqlMode::Row)
}

/// Whether locks of this kind can satisfy the clause.
fn supports(mode: &SqlMode, clause: &Clause) -> bool {
    let can = |need: &Need| match (mode, need) {
        (_, Need::Remote | Need::Fair) => false,
        (SqlMode::Session, need) => !matches!(need, Need::Inspect | Need::Labels),
        (SqlMode::Row, _) => true,
        (SqlMode::Spring(_), Need::Wakes) => HAS_SPRING_WAKES,
        (_, need) => *need != Need::ReportsInvalidations,
    };
    // Another client cannot acquire again, renew or release a lock that belongs to a connection.
    let is_bound_to_client = clause.name.ends_with("_through_another_client")
        || matches!(
            clause.name,
            "concurrent_repetitions_of_one_acquire_are_one_grant"
                | "of_many_concurrent_claims_exactly_one_is_granted"
                | "a_repeated_acquire_has_the_same_token"
        );
    // All locks of one session are lost together.
    let is_session_wide = clause.name == "one_lost_lock_does_not_stop_the_renewal_of_others";
    clause.needs.iter().all(can)
        && !(is_bound_to_client && ends_with_connection(mode))
        && !(is_session_wide && matches!(mode, SqlMode::Session))
}

/// Runs all clauses that the store supports. `runs` and `skips` are the expected counts, so that no
/// clause is omitted unnoticed.
///
/// # Panics
/// With the names of the failed clauses.
pub(crate) fn run_conformance(kind: &ServerKind, mode: &SqlMode, runs: usize, skips: usize) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = Arc::new(RwLock::new(runtime.block_on(TestServer::start(kind))));
    let (supported, skipped): (Vec<&'static Clause>, Vec<_>) =
        all_clauses().iter().partition(|clause| supports(mode, clause));
    assert_eq!((supported.len(), skipped.len()), (runs, skips), "skipped: {skipped:?}");

    let next = AtomicUsize::new(0);
    let failed = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENT_CLAUSES {
            scope.spawn(|| {
                while let Some(&clause) = supported.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (kind, mode, server) = (kind.clone(), mode.clone(), Arc::clone(&server));
                    let harness = SharedServer { kind, mode, server, clause };
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

/// The server for one clause.
#[derive(Debug)]
struct SharedServer {
    kind: ServerKind,
    mode: SqlMode,
    server: Arc<RwLock<TestServer>>,
    clause: &'static Clause,
}

#[async_trait]
impl Harness for SharedServer {
    async fn store(&self) -> Box<dyn Store> {
        let needs_own_server = |need: &Need| matches!(need, Need::Restart | Need::Wipe);
        let server = if self.clause.needs.iter().any(needs_own_server) {
            Arc::new(RwLock::new(TestServer::start(&self.kind).await))
        } else {
            Arc::clone(&self.server)
        };
        let namespace = format!("{}-{}", self.clause.theme, self.clause.name);
        Box::new(InNamespace { mode: self.mode.clone(), server, namespace })
    }
}

#[derive(Debug)]
struct InNamespace {
    mode: SqlMode,
    server: Arc<RwLock<TestServer>>,
    namespace: String,
}

impl InNamespace {
    /// Spring's table has a region for each namespace.
    async fn open(&self, namespace: &str) -> Arc<dyn LockBackend> {
        // One clause holds this many locks.
        let config = self.server.read().await.config().with_namespace(namespace);
        let mode = match &self.mode {
            SqlMode::Spring(table) => SqlMode::Spring(table.clone().with_region(namespace)),
            mode => mode.clone(),
        };
        Arc::new(Backend::open_mode(config.with_row_locks(260), mode).await.unwrap())
    }
}

#[async_trait]
impl Store for InNamespace {
    async fn client(&self) -> Arc<dyn LockBackend> {
        self.open(&self.namespace).await
    }

    async fn other_namespace(&self) -> Option<Arc<dyn LockBackend>> {
        Some(self.open(&format!("{}-other", self.namespace)).await)
    }

    async fn restart(&self) -> bool {
        self.server.write().await.restart().await;
        true
    }

    // Ends the connection, as the server would.
    async fn break_claim(&self, claim: &Claim) -> bool {
        if !ends_with_connection(&self.mode) {
            return false;
        }
        let hashed = hashed(&self.namespace, claim);
        self.server.read().await.end_connection(&self.mode, &hashed, claim).await;
        true
    }

    async fn wipe(&self) -> bool {
        self.server.read().await.wipe().await;
        true
    }
}

/// The input of the hash that names a session's lock, in hexadecimal digits.
fn hashed(namespace: &str, claim: &Claim) -> String {
    let length = u64::try_from(namespace.len()).unwrap().to_be_bytes();
    let bytes = length.into_iter().chain(namespace.bytes()).chain(claim.key().as_str().bytes());
    bytes.map(|byte| format!("{byte:02x}")).collect()
}
