//! Clients in other processes, which a test can suspend.

use std::sync::Arc;

use registry_redis::RedisConfig;
use registry_testkit::holder::{LockHolder, run_child_process, serve};
use registry_testkit::redis::RedisServer;
use registry_testkit::workload::{WorkloadOutcome, assert_a_suspended_holder_is_replaced};

use super::workload::{LEASE, LONG_LEASE, Workload, registry};

#[test]
#[ignore = "started by the other tests, as another process"]
fn client_process() {
    run_child_process(async |url| {
        let config = RedisConfig::from_url(&url).unwrap();
        let registry = Arc::new(registry(&config, LEASE * 3).await);
        serve(registry).await;
    });
}

/// Starts a client in its own process.
pub(crate) async fn start_client_process(url: &str) -> LockHolder {
    LockHolder::spawn_test("faults::remote_client::client_process", url).await.unwrap()
}

/// During a workload, suspends a client that holds a lock, for longer than its lease. Other clients
/// continue, and the suspended client detects the loss as soon as it resumes.
pub(crate) async fn a_suspended_holder_is_replaced_and_notified(
    url: &str,
    servers: &[&RedisServer],
) -> WorkloadOutcome {
    let config = RedisConfig::from_url(url).unwrap();
    // Longer leases, so that a busy machine ends no hold of the clients that are not suspended.
    let workload = Workload::start(&config, LONG_LEASE).await;
    let successor = registry(&config, LONG_LEASE).await;
    let suspended = start_client_process(url).await;
    let events =
        assert_a_suspended_holder_is_replaced(&workload, suspended, successor).await.unwrap();
    let outcome = workload.end_with(servers, events).await;
    assert_eq!(outcome.long_held_losses(), [], "no other client was suspended");
    outcome
}
