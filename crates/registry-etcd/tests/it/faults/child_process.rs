//! Clients in other processes, which a test can suspend.

use std::sync::Arc;

use registry_etcd::EtcdConfig;
use registry_testkit::holder::{self, LockHolder, serve};

use super::workload::{LEASE, registry};

#[test]
#[ignore = "started by the other tests, as another process"]
fn run_child_process() {
    holder::run_child_process(async |url| {
        let config = EtcdConfig::from_url(&url).unwrap();
        let registry = Arc::new(registry(&config, LEASE * 2).await);
        serve(registry).await;
    });
}

/// Starts a client in its own process.
pub(crate) async fn spawn_client(url: &str) -> LockHolder {
    LockHolder::spawn_test("faults::child_process::run_child_process", url).await.unwrap()
}
