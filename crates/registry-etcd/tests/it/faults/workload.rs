//! Registries for the tests, and the testkit's workload over them.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use registry_core::Registry;
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::eventually;
use registry_testkit::history::HistoryEvent;
use registry_testkit::workload::{self, WorkloadOptions, WorkloadOutcome};

pub(crate) use registry_testkit::workload::LONG;

/// Short, so that tests of expiring leases stay fast.
pub(crate) const LEASE: Duration = Duration::from_secs(3);
/// Survives every short fault, even on a loaded machine.
pub(crate) const LONG_LEASE: Duration = Duration::from_secs(20);
/// The response timeout. A lease of three seconds does not permit the engine's default of three
/// seconds.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The response timeout of long leases, for a loaded machine.
const RESPONSE_TIMEOUT_MAX: Duration = Duration::from_secs(3);
/// The default number of clients.
const CLIENTS: usize = 3;

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns a registry with its own connections, like another process.
pub(crate) async fn registry(config: &EtcdConfig, lease: Duration) -> Registry {
    let timeout = (lease / 4).clamp(RESPONSE_TIMEOUT, RESPONSE_TIMEOUT_MAX);
    let config = config.clone().with_response_timeout(timeout);
    let backend = eventually(LONG, async || EtcdBackend::open(config.clone()).await).await;
    let builder = Registry::builder(Arc::new(backend)).lease(lease);
    builder.timeout(timeout).build().unwrap()
}

/// A workload over etcd.
pub(crate) struct Workload {
    workload: workload::Workload,
    config: EtcdConfig,
    lease: Duration,
}

impl Workload {
    /// Starts the workload with three clients and waits until each key was granted.
    pub(crate) async fn start(config: &EtcdConfig, lease: Duration) -> Self {
        Self::start_with(&vec![config.clone(); CLIENTS], config, lease).await
    }

    /// Like [`start`](Self::start), with one configuration per client. `direct` reaches the members
    /// without a proxy.
    pub(crate) async fn start_with(
        configs: &[EtcdConfig],
        direct: &EtcdConfig,
        lease: Duration,
    ) -> Self {
        let mut registries = Vec::new();
        for config in configs {
            registries.push(registry(config, lease).await);
        }
        let options = WorkloadOptions::new().queued();
        let workload = workload::Workload::begin(registries, options).await;
        Self { workload, config: direct.clone(), lease }
    }

    /// Stops the workload after all faults have ended. Asserts that a new client acquires every key
    /// within a lease and that all locks are released. No key may remain in the cluster.
    pub(crate) async fn end(self, server: &EtcdServer) -> WorkloadOutcome {
        self.end_with(server, Vec::new()).await
    }

    /// Like [`end`](Self::end), with the records of other processes.
    pub(crate) async fn end_with(
        self,
        server: &EtcdServer,
        other_events: Vec<HistoryEvent>,
    ) -> WorkloadOutcome {
        // A long lease gives the verifier a long response timeout, for a loaded machine.
        let verifier = registry(&self.config, self.lease.max(LONG_LEASE)).await;
        let outcome = self.workload.end(verifier, self.lease + secs(15), other_events).await;
        eventually(self.lease + secs(20), async || check_no_keys_remain(server).await).await;
        outcome
    }
}

impl Deref for Workload {
    type Target = workload::Workload;

    fn deref(&self) -> &workload::Workload {
        &self.workload
    }
}

/// Returns an error with the keys that remain in the cluster of this member.
async fn check_no_keys_remain(server: &EtcdServer) -> Result<(), String> {
    let names = server.ctl(&["get", "lock-registry/", "--prefix", "--keys-only"]).await;
    let names = names.map_err(|error| error.to_string())?;
    if names.is_empty() { Ok(()) } else { Err(format!("remaining keys: {names}")) }
}
