//! The testkit's workload over the SQL stores.

use std::ops::Deref;
use std::time::Duration;

use registry_core::Registry;
use registry_testkit::eventually;
use registry_testkit::history::HistoryEvent;
use registry_testkit::workload::{self, WorkloadOptions, WorkloadOutcome};

use super::server::{HAND_OVERS_MAX, LockMode, Server, TEST_TIMEOUT, registry_with_mode};

/// A short lease, so that tests in which a lease expires are fast.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// Survives every short fault, even on a loaded machine.
pub(crate) const LONG_LEASE: Duration = Duration::from_secs(20);
/// The default number of clients.
const CLIENTS: usize = 3;
/// The keys that all clients compete for.
pub(crate) const KEYS: [&str; 3] = ["a", "b", "c"];
/// The keys with permanent holders.
const STEADY_KEYS: [&str; 3] = ["steady/0", "steady/1", "steady/2"];

/// A workload over a SQL store.
pub(crate) struct Workload {
    workload: workload::Workload,
    mode: LockMode,
}

impl Workload {
    /// Starts the clients, and returns after each key was granted.
    pub(crate) async fn begin(server: &Server) -> Self {
        Self::begin_with_mode(server, LockMode::Lease).await
    }

    /// As [`begin`](Self::begin), for locks of this mode.
    pub(crate) async fn begin_with_mode(server: &Server, mode: LockMode) -> Self {
        Self::begin_with_lease(server, LEASE, mode).await
    }

    /// As [`begin_with_mode`](Self::begin_with_mode), with this lease.
    pub(crate) async fn begin_with_lease(server: &Server, lease: Duration, mode: LockMode) -> Self {
        Self::begin_clients(&vec![server.url(); CLIENTS], lease, mode).await
    }

    /// As [`begin`](Self::begin), with one URL for each client.
    pub(crate) async fn begin_with_urls(urls: &[String], lease: Duration) -> Self {
        Self::begin_clients(urls, lease, LockMode::Lease).await
    }

    async fn begin_clients(urls: &[String], lease: Duration, mode: LockMode) -> Self {
        let mut registries: Vec<Registry> = Vec::new();
        for url in urls {
            registries.push(registry_with_mode(url, lease, mode).await);
        }
        let keys = |keys: [&str; 3]| keys.map(str::to_owned).to_vec();
        let options = WorkloadOptions::new().keys(keys(KEYS), keys(STEADY_KEYS));
        let options = options.hand_overs(HAND_OVERS_MAX);
        Self { workload: workload::Workload::begin(registries, options).await, mode }
    }

    /// Ends the workload after the faults have ended. Checks that every key is released and that a
    /// new client acquires each of them.
    pub(crate) async fn end(self, server: &Server) -> WorkloadOutcome {
        self.end_with(server, Vec::new()).await
    }

    /// As [`end`](Self::end), with the events that clients in other processes have recorded.
    pub(crate) async fn end_with(
        self,
        server: &Server,
        other_events: Vec<HistoryEvent>,
    ) -> WorkloadOutcome {
        self.wait_for_progress().await;
        let verifier = registry_with_mode(&server.url(), LEASE, self.mode).await;
        let outcome = self.workload.end(verifier, TEST_TIMEOUT, other_events).await;
        // After a grant of unknown outcome, or a release that a crash undid, the key is free at the
        // end of the lease.
        eventually(LEASE + Duration::from_secs(20), async || server.held_keys().await == "0").await;
        outcome
    }
}

impl Deref for Workload {
    type Target = workload::Workload;

    fn deref(&self) -> &workload::Workload {
        &self.workload
    }
}
