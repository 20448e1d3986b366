//! Runs the conformance suite over one server, each clause in its own namespace. Only clauses that
//! restart or empty the server have a server of their own.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Clause, SharedServers, assert_conformance_on_shared_servers};
use registry_core::{Claim, LockBackend};
use registry_jdbc::SqlMode;

use super::server::{Backend, ServerKind, TestServer};

/// Long, because the clauses of the suite have their own time limits.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long a request waits for a row lock. Shorter than the operation timeout in the suite.
const BUSY_TIMEOUT: Duration = Duration::from_secs(6);

fn ends_with_connection(mode: &SqlMode) -> bool {
    matches!(mode, SqlMode::Session | SqlMode::Row)
}

/// Returns whether locks of this mode can satisfy a clause whose other requirements are met.
fn satisfies(mode: &SqlMode, clause: &Clause) -> bool {
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
    let is_excluded = is_bound_to_client && ends_with_connection(mode)
        || is_session_wide && matches!(mode, SqlMode::Session);
    !is_excluded
}

/// Runs all clauses that the store supports. `runs` and `skips` are the expected counts, so that no
/// clause is omitted unnoticed.
///
/// # Panics
/// With the names of the failed clauses.
pub(crate) fn run_conformance(kind: &ServerKind, mode: &SqlMode, runs: usize, skips: usize) {
    let (kind, mode) = (kind.clone(), mode.clone());
    let start = move || {
        let (kind, mode) = (kind.clone(), mode.clone());
        async move { Servers { mode, server: TestServer::start(&kind).await } }
    };
    assert_conformance_on_shared_servers(start, runs, skips);
}

/// A server, with locks of one kind.
#[derive(Debug)]
struct Servers {
    mode: SqlMode,
    server: TestServer,
}

#[async_trait]
impl SharedServers for Servers {
    /// Spring's table has a region for each namespace.
    async fn client(&self, namespace: &str) -> Arc<dyn LockBackend> {
        // One clause holds this many locks.
        let config = self.server.config().with_namespace(namespace).with_row_locks(260);
        let config = config.with_connect_timeout(TIMEOUT).with_response_timeout(TIMEOUT);
        let config = config.with_busy_timeout(BUSY_TIMEOUT);
        let mode = match &self.mode {
            SqlMode::Spring(table) => SqlMode::Spring(table.clone().with_region(namespace)),
            mode => mode.clone(),
        };
        Arc::new(Backend::open_mode(config, mode).await.unwrap())
    }

    fn applies(&self, clause: &Clause) -> bool {
        satisfies(&self.mode, clause)
    }

    async fn restart(&mut self) {
        self.server.restart().await;
    }

    // Ends the connection that holds the lock.
    async fn break_claim(&self, namespace: &str, claim: &Claim) -> bool {
        if !ends_with_connection(&self.mode) {
            return false;
        }
        self.server.end_connection(&self.mode, &hash_input(namespace, claim), claim).await;
        true
    }

    async fn wipe(&mut self) {
        self.server.wipe().await;
    }
}

/// Returns the input of the hash that names a session's lock, in hexadecimal digits.
fn hash_input(namespace: &str, claim: &Claim) -> String {
    let length = u64::try_from(namespace.len()).unwrap().to_be_bytes();
    let bytes = length.into_iter().chain(namespace.bytes()).chain(claim.key().as_str().bytes());
    bytes.map(|byte| format!("{byte:02x}")).collect()
}
