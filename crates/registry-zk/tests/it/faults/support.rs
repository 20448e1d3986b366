//! Registries for the tests, their settings, and the testkit's workload over them.

use std::sync::Arc;
use std::time::Duration;

use registry_core::Registry;
use registry_testkit::eventually;
use registry_testkit::workload::{LONG, Workload, WorkloadOptions, WorkloadOutcome};
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_zk::{ZkBackend, ZkConfig};
use zookeeper_client::Client;

/// Short, so that a test of an expiring session is fast.
pub(crate) const SESSION: Duration = Duration::from_secs(4);
/// Survives every short fault, even on a loaded machine.
pub(crate) const LONG_SESSION: Duration = Duration::from_secs(20);
/// So long that a server can take half a minute to restart without ending a hold, even on a loaded
/// machine.
pub(crate) const MINUTE_SESSION: Duration = Duration::from_secs(60);
/// Time limit for one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for one request of a long session, for a loaded machine.
const REQUEST_TIMEOUT_MAX: Duration = Duration::from_secs(3);
/// Number of clients.
const CLIENTS: usize = 3;

pub(crate) fn config(url: &str, session: Duration) -> ZkConfig {
    let config = ZkConfig::new(url.strip_prefix("zk://").unwrap()).unwrap();
    let request_timeout = (session / 8).clamp(REQUEST_TIMEOUT, REQUEST_TIMEOUT_MAX);
    config.with_session_timeout(session).with_request_timeout(request_timeout)
}

/// Returns a store with its own session.
pub(crate) async fn backend(url: &str, session: Duration) -> Arc<ZkBackend> {
    Arc::new(eventually(LONG, async || ZkBackend::open(config(url, session)).await).await)
}

/// Returns a registry over `backend`, with the longest leases that the session allows.
pub(crate) fn registry_over(backend: &Arc<ZkBackend>) -> Registry {
    let lease = backend.session_timeout() / 2;
    let builder = Registry::builder(Arc::clone(backend) as Arc<_>).lease(lease);
    let timeout = (lease / 4).clamp(REQUEST_TIMEOUT, REQUEST_TIMEOUT_MAX);
    builder.timeout(timeout).build().unwrap()
}

/// Returns a registry with its own session, like that of another process.
pub(crate) async fn registry(url: &str, session: Duration) -> Registry {
    registry_over(&backend(url, session).await)
}

/// Starts contending clients that all use the same servers.
pub(crate) async fn start_workload(url: &str, session: Duration) -> Workload {
    start_workload_at(&vec![url.to_owned(); CLIENTS], session).await
}

/// Starts contending clients, one for each of `urls`.
pub(crate) async fn start_workload_at(urls: &[String], session: Duration) -> Workload {
    let mut registries = Vec::new();
    for url in urls {
        registries.push(registry(url, session).await);
    }
    Workload::begin(registries, WorkloadOptions::new().queued()).await
}

/// Ends a workload after all faults have ended.
pub(crate) async fn finish(workload: Workload, url: &str) -> WorkloadOutcome {
    // A long session gives the client a long request timeout, for a loaded machine.
    let new_client = registry(url, MINUTE_SESSION).await;
    // Nodes of abandoned sessions exist until those sessions end.
    workload.end(new_client, MINUTE_SESSION + Duration::from_secs(20), Vec::new()).await
}

/// Returns a client without a registry, for the actions of operators and other programs.
pub(crate) async fn operator(server: &ZooKeeperServer) -> Client {
    let connector = Client::connector().with_session_timeout(LONG_SESSION);
    connector.connect(&server.addr().to_string()).await.unwrap()
}

pub(crate) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}
