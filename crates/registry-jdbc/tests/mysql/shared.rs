//! Runs the whole suite over one server, each clause in its own namespace. Only clauses that
//! restart or empty the server have a server of their own.

use std::sync::Arc;

use async_trait::async_trait;
use registry_conformance::{Clause, SharedServers, assert_conformance_on_shared_servers};
use registry_core::{Claim, LockBackend};
use registry_jdbc::{
    MySqlBackend, MySqlConfig, MySqlRowBackend, MySqlSessionBackend, MySqlSpringBackend,
    SpringTable,
};
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};

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
    let options = options.clone();
    let start = move || {
        let (options, mode) = (options.clone(), mode.clone());
        async move { Servers { mode, server: MariaDbServer::start_with(options).await.unwrap() } }
    };
    assert_conformance_on_shared_servers(start, runs, skips);
}

/// A server, with locks of one kind.
#[derive(Debug)]
struct Servers {
    mode: StoreMode,
    server: MariaDbServer,
}

#[async_trait]
impl SharedServers for Servers {
    async fn client(&self, namespace: &str) -> Arc<dyn LockBackend> {
        let config = MySqlConfig::from_url(&self.server.url()).unwrap().with_namespace(namespace);
        // One clause holds this many locks.
        let config = config.with_row_locks(260);
        match &self.mode {
            StoreMode::Lease => Arc::new(MySqlBackend::open(config).await.unwrap()),
            StoreMode::Session => Arc::new(MySqlSessionBackend::open(config).await.unwrap()),
            StoreMode::Row => Arc::new(MySqlRowBackend::open(config).await.unwrap()),
            StoreMode::Spring(table) => {
                let table = table.clone().with_region(namespace);
                Arc::new(MySqlSpringBackend::open(config, table).await.unwrap())
            }
        }
    }

    fn applies(&self, clause: &Clause) -> bool {
        self.mode.satisfies(clause)
    }

    // Every confirmed write is on disk, so this may be a crash.
    async fn restart(&mut self) {
        self.server.start_again().await.unwrap();
    }

    // Ends the connection, as the server would.
    async fn break_claim(&self, namespace: &str, claim: &Claim) -> bool {
        if !self.mode.ends_with_connection() {
            return false;
        }
        // The named lock is the session's lock, or it identifies the connection of the transaction.
        let name = if matches!(self.mode, StoreMode::Session) {
            format!("SHA2(UNHEX('{}'), 256)", hashed(namespace, claim))
        } else {
            format!("'lock_registry_row_{}'", claim.id())
        };
        let holder =
            self.server.sql(&format!("SELECT IFNULL(IS_USED_LOCK({name}), '')")).await.unwrap();
        if !holder.trim().is_empty() {
            self.server.sql(&format!("KILL CONNECTION {}", holder.trim())).await.unwrap();
        }
        true
    }

    async fn wipe(&mut self) {
        let tables = "DROP TABLE lock_registry_locks, lock_registry_meta";
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
