//! A client in another process, which tests can suspend.

use std::env;
use std::io::Write as _;
use std::process::Command;
use std::sync::Arc;

use registry_testkit::holder::{HolderOptions, LockHolder, serve};

use super::support::{SESSION, registry};

/// Passes the servers' URL to the other process.
const URL_VARIABLE: &str = "LOCK_REGISTRY_TEST_URL";

#[test]
#[ignore = "started by the other tests, as another process"]
fn the_other_process() {
    let Ok(url) = env::var(URL_VARIABLE) else { return };
    // Ends the line that the test harness has started.
    _ = writeln!(std::io::stdout());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let registry = Arc::new(registry(&url, SESSION).await);
        serve(registry, &HolderOptions::new("zk").history()).await;
    });
    // Exits at once: the harness's report has no reader.
    std::process::exit(0);
}

/// Starts a client in its own process.
pub(crate) async fn spawn_client(url: &str) -> LockHolder {
    let mut program = Command::new(env::current_exe().unwrap());
    program.args([
        "faults::other_process::the_other_process",
        "--exact",
        "--ignored",
        "--nocapture",
    ]);
    program.env(URL_VARIABLE, url);
    LockHolder::spawn_command(program).await.unwrap()
}
