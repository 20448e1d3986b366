//! Registries for the tests, and the testkit's workload over them.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use registry_core::Registry;
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::eventually;
use registry_testkit::history::HistoryEvent;
use registry_testkit::redis::RedisServer;
use registry_testkit::workload::{self, WorkloadOptions, WorkloadOutcome};

pub(crate) use registry_testkit::workload::LONG;

/// Short, so that tests of expiring leases stay fast.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// Survives every short fault, even on a loaded machine.
pub(crate) const LONG_LEASE: Duration = Duration::from_secs(20);
/// The response timeout. A lease of two seconds does not permit the engine's default of three.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The response timeout of long leases, for a loaded machine.
const RESPONSE_TIMEOUT_MAX: Duration = Duration::from_secs(3);
/// The default number of clients.
const CLIENTS: usize = 3;
/// How many times in a row a client hands a lock over between its callers.
const HAND_OVERS: u32 = 2;

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Opens a store with its own connections, like another process. Retries, because one attempt may
/// time out on a loaded machine.
pub(crate) async fn backend(config: &RedisConfig) -> RedisBackend {
    eventually(LONG, async || RedisBackend::open(config.clone()).await).await
}

/// Returns a registry with its own connections, like another process.
pub(crate) async fn registry(config: &RedisConfig, lease: Duration) -> Registry {
    let builder =
        Registry::builder(Arc::new(backend(config).await)).lease(lease).handoff(HAND_OVERS);
    let timeout = (lease / 4).clamp(RESPONSE_TIMEOUT, RESPONSE_TIMEOUT_MAX);
    builder.timeout(timeout).build().unwrap()
}

/// A workload over Redis.
pub(crate) struct Workload {
    workload: workload::Workload,
    config: RedisConfig,
    lease: Duration,
}

impl Workload {
    /// Starts the workload with three clients and waits until each key was granted.
    pub(crate) async fn start(config: &RedisConfig, lease: Duration) -> Self {
        let client_configs = vec![config.clone(); CLIENTS];
        Self::start_with(&client_configs, config, WorkloadOptions::new(), lease).await
    }

    /// Like [`start`](Self::start), with one configuration per client. `direct` reaches the servers
    /// without a proxy.
    pub(crate) async fn start_with(
        client_configs: &[RedisConfig],
        direct: &RedisConfig,
        options: WorkloadOptions,
        lease: Duration,
    ) -> Self {
        let mut registries = Vec::new();
        for client_config in client_configs {
            registries.push(registry(client_config, lease).await);
        }
        let options = options.hand_overs(HAND_OVERS);
        let workload = workload::Workload::begin(registries, options).await;
        Self { workload, config: direct.clone(), lease }
    }

    /// Stops the workload after all faults have ended. Asserts that a new client acquires every key
    /// within a lease and that all locks are released. No lock may remain on the masters `servers`.
    pub(crate) async fn end(self, servers: &[&RedisServer]) -> WorkloadOutcome {
        self.end_with(servers, Vec::new()).await
    }

    /// Like [`end`](Self::end), with the records of other processes.
    pub(crate) async fn end_with(
        self,
        servers: &[&RedisServer],
        other_events: Vec<HistoryEvent>,
    ) -> WorkloadOutcome {
        let verifier = registry(&self.config, self.lease).await;
        let outcome = self.workload.end(verifier, self.lease + secs(15), other_events).await;
        eventually(self.lease + secs(20), async || check_no_locks_remain(servers).await).await;
        outcome
    }
}

impl Deref for Workload {
    type Target = workload::Workload;

    fn deref(&self) -> &workload::Workload {
        &self.workload
    }
}

/// Returns an error with the locks that remain on the servers.
async fn check_no_locks_remain(servers: &[&RedisServer]) -> Result<(), String> {
    for server in servers {
        let names =
            server.send_command_args(&["KEYS", "*"]).await.map_err(|error| error.to_string())?;
        let names = names.items().iter().filter_map(|name| name.text());
        let is_lock = |name: &String| !name.ends_with("}:token") && !name.ends_with("{}:age");
        let locks: Vec<String> = names.filter(is_lock).collect();
        if !locks.is_empty() {
            return Err(format!("{} still has {locks:?}", server.addr()));
        }
    }
    Ok(())
}
