//! Runs the whole suite over one server, each clause in its own namespace. Only clauses that
//! restart or empty the server have a server of their own.

use std::sync::Arc;

use async_trait::async_trait;
use registry_conformance::{Clause, SharedServers, assert_conformance_on_shared_servers};
use registry_core::{Claim, LockBackend};
use registry_jdbc::{
    PostgresBackend, PostgresConfig, PostgresRowBackend, PostgresSessionBackend,
    PostgresSpringBackend, SpringTable,
};
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::{PostgresOptions, PostgresServer};

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

    /// Whether locks of this kind can satisfy a clause whose needs are met.
    fn satisfies(&self, clause: &Clause) -> bool {
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
        let is_excluded = is_bound_to_client && self.ends_with_connection()
            || is_session_wide && matches!(self, Self::Session);
        !is_excluded
    }
}

/// Runs all clauses that the store supports. `runs` and `skips` are the expected counts, so that no
/// clause is omitted unnoticed.
///
/// # Panics
/// With the names of the failed clauses.
pub(crate) fn run_conformance(mode: StoreMode, runs: usize, skips: usize) {
    let start = move || {
        let mode = mode.clone();
        async move { Servers::begin(&mode).await }
    };
    assert_conformance_on_shared_servers(start, runs, skips);
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
}

#[async_trait]
impl SharedServers for Servers {
    async fn client(&self, namespace: &str) -> Arc<dyn LockBackend> {
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
            StoreMode::Session => Arc::new(PostgresSessionBackend::open(config).await.unwrap()),
            StoreMode::Row | StoreMode::RowPgBouncer => {
                Arc::new(PostgresRowBackend::open(config).await.unwrap())
            }
            StoreMode::Spring(table) => {
                let table = table.clone().with_region(namespace);
                Arc::new(PostgresSpringBackend::open(config, table).await.unwrap())
            }
            StoreMode::Direct | StoreMode::PgBouncer => {
                Arc::new(PostgresBackend::open(config).await.unwrap())
            }
        }
    }

    fn applies(&self, clause: &Clause) -> bool {
        self.mode.satisfies(clause)
    }

    async fn restart(&mut self) {
        // An orderly stop: a crash may lose the last releases, whose keys then stay locked until
        // the end of their lease.
        self.server.stop().await.unwrap();
        self.server.start_again().await.unwrap();
    }

    // Ends the connection, as the server would.
    async fn break_claim(&self, namespace: &str, claim: &Claim) -> bool {
        if !self.mode.ends_with_connection() {
            return false;
        }
        let hashed = hashed(namespace, claim);
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
        self.server.sql(&cut).await.unwrap();
        true
    }

    async fn wipe(&mut self) {
        let tables = "DROP TABLE lock_registry_locks, lock_registry_meta; DROP FUNCTION lock_registry_purged";
        self.server.sql(tables).await.unwrap();
        self.server.sql("DROP TABLE IF EXISTS INT_LOCK").await.unwrap();
    }
}

/// The input of the hash that names a session's lock, in hexadecimal digits.
fn hashed(namespace: &str, claim: &Claim) -> String {
    let length = u64::try_from(namespace.len()).unwrap().to_be_bytes();
    let bytes = length.into_iter().chain(namespace.bytes()).chain(claim.key().as_str().bytes());
    bytes.map(|byte| format!("{byte:02x}")).collect()
}
