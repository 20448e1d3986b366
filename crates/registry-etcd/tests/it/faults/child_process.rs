//! Clients in other processes, which a test can suspend.

use std::env;
use std::io::Write as _;
use std::process::Command;
use std::sync::Arc;

use registry_etcd::EtcdConfig;
use registry_testkit::holder::{HolderOptions, LockHolder, serve};

use super::workload::{LEASE, registry};

/// Passes the members' URL to the other process.
const URL_VARIABLE: &str = "LOCK_REGISTRY_TEST_URL";

#[test]
#[ignore = "started by the other tests, as another process"]
fn run_child_process() {
    let Ok(url) = env::var(URL_VARIABLE) else { return };
    // Ends the line that the test harness has begun.
    _ = writeln!(std::io::stdout());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let config = EtcdConfig::from_url(&url).unwrap();
        let registry = Arc::new(registry(&config, LEASE).await);
        serve(registry, &HolderOptions::new("etcd").history()).await;
    });
    // Exits at once, so that the test harness prints nothing more.
    std::process::exit(0);
}

/// Starts a client in its own process.
pub(crate) async fn client(url: &str) -> LockHolder {
    let mut program = Command::new(env::current_exe().unwrap());
    program.args([
        "faults::child_process::run_child_process",
        "--exact",
        "--ignored",
        "--nocapture",
    ]);
    program.env(URL_VARIABLE, url);
    LockHolder::spawn_command(program).await.unwrap()
}
