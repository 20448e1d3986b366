//! Runs the whole suite over one server, each clause in its own namespace. Only clauses that
//! restart or empty the server have a server of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use async_trait::async_trait;
use registry_conformance::{Clause, Harness, Need, Store, all_clauses, run};
use registry_core::{Claim, LockBackend};
use registry_jdbc::{MySqlBackend, MySqlConfig, SpringTable, SqlMode};
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
use tokio::sync::RwLock;

/// The number of concurrent clauses; they spend most of their time waiting.
const CONCURRENT_CLAUSES: usize = 8;

/// How locks are held.
#[derive(Debug, Clone)]
pub(crate) enum StoreMode {
    Lease,
    Session,
    Row,
    /// With locks in Spring's format, and a region for each namespace.
    Spring(SpringTable),
}

impl StoreMode {
    fn ends_with_connection(&self) -> bool {
        matches!(self, Self::Session | Self::Row)
    }

    /// Whether locks of this kind can satisfy the clause.
    fn supports(&self, clause: &Clause) -> bool {
        let is_supported_here = |need: &Need| !matches!(need, Need::Remote | Need::Fair);
        let can = match self {
            Self::Lease => |need: &Need| *need != Need::ReportsInvalidations,
            Self::Spring(_) => {
                |need: &Need| !matches!(need, Need::ReportsInvalidations | Need::Wakes)
            }
            Self::Session => |need: &Need| !matches!(need, Need::Inspect | Need::Labels),
            Self::Row => |_: &Need| true,
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
    let options = MariaDbOptions::new().args(&["--max-connections=1000"]);
    run_conformance_on(&options, mode, runs, skips);
}

/// The same on a server with these options.
///
/// # Panics
/// As [`run_conformance`].
pub(crate) fn run_conformance_on(
    options: &MariaDbOptions,
    mode: StoreMode,
    runs: usize,
    skips: usize,
) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(MariaDbServer::start_with(options.clone())).unwrap();
    let server = Arc::new(RwLock::new(server));
    let (supported, skipped): (Vec<&'static Clause>, Vec<_>) =
        all_clauses().iter().partition(|clause| mode.supports(clause));
    assert_eq!((supported.len(), skipped.len()), (runs, skips), "skipped: {skipped:?}");

    let next = AtomicUsize::new(0);
    let failed = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENT_CLAUSES {
            scope.spawn(|| {
                while let Some(&clause) = supported.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (mode, server) = (mode.clone(), Arc::clone(&server));
                    let harness = SharedServer { options: options.clone(), mode, server, clause };
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
    options: MariaDbOptions,
    mode: StoreMode,
    server: Arc<RwLock<MariaDbServer>>,
    clause: &'static Clause,
}

#[async_trait]
impl Harness for SharedServer {
    async fn store(&self) -> Box<dyn Store> {
        let needs_own_server = |need: &Need| matches!(need, Need::Restart | Need::Wipe);
        let server = if self.clause.needs.iter().any(needs_own_server) {
            let own = MariaDbServer::start_with(self.options.clone()).await.unwrap();
            Arc::new(RwLock::new(own))
        } else {
            Arc::clone(&self.server)
        };
        let namespace = format!("{}-{}", self.clause.theme, self.clause.name);
        Box::new(InNamespace { mode: self.mode.clone(), server, namespace })
    }
}

#[derive(Debug)]
struct InNamespace {
    mode: StoreMode,
    server: Arc<RwLock<MariaDbServer>>,
    namespace: String,
}

impl InNamespace {
    async fn open(&self, namespace: &str) -> Arc<dyn LockBackend> {
        let url = self.server.read().await.url();
        let config = MySqlConfig::from_url(&url).unwrap().with_namespace(namespace);
        // One clause holds this many locks.
        let config = config.with_row_locks(260);
        match &self.mode {
            StoreMode::Lease => Arc::new(MySqlBackend::open(config).await.unwrap()),
            StoreMode::Session => {
                Arc::new(MySqlBackend::open_mode(config, SqlMode::Session).await.unwrap())
            }
            StoreMode::Row => {
                Arc::new(MySqlBackend::open_mode(config, SqlMode::Row).await.unwrap())
            }
            StoreMode::Spring(table) => {
                let table = table.clone().with_region(namespace);
                Arc::new(MySqlBackend::open_mode(config, SqlMode::Spring(table)).await.unwrap())
            }
        }
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

    // Every confirmed write is on disk, so this may be a crash.
    async fn restart(&self) -> bool {
        self.server.write().await.start_again().await.unwrap();
        true
    }

    // Ends the connection, as the server would.
    async fn break_claim(&self, claim: &Claim) -> bool {
        if !self.mode.ends_with_connection() {
            return false;
        }
        // The named lock is the session's lock, or it identifies the connection of the transaction.
        let name = if matches!(self.mode, StoreMode::Session) {
            format!("SHA2(UNHEX('{}'), 256)", hashed(&self.namespace, claim))
        } else {
            format!("'lock_registry_row_{}'", claim.id())
        };
        let server = self.server.read().await;
        let holder = server.sql(&format!("SELECT IFNULL(IS_USED_LOCK({name}), '')")).await.unwrap();
        if !holder.trim().is_empty() {
            server.sql(&format!("KILL CONNECTION {}", holder.trim())).await.unwrap();
        }
        true
    }

    async fn wipe(&self) -> bool {
        let tables = "DROP TABLE lock_registry_locks, lock_registry_meta";
        self.server.read().await.sql(tables).await.unwrap();
        self.server.read().await.sql("DROP TABLE IF EXISTS INT_LOCK").await.unwrap();
        true
    }
}

/// The input of the hash that names a session's lock, in hexadecimal digits.
fn hashed(namespace: &str, claim: &Claim) -> String {
    let length = u64::try_from(namespace.len()).unwrap().to_be_bytes();
    let bytes = length.into_iter().chain(namespace.bytes()).chain(claim.key().as_str().bytes());
    bytes.map(|byte| format!("{byte:02x}")).collect()
}
