//! A client in another process, which tests can suspend.

use std::sync::Arc;

use registry_testkit::holder::{LockHolder, run_child_process, serve};

use super::support::{LONG_SESSION, registry};

#[test]
#[ignore = "started by the other tests, as another process"]
fn the_other_process() {
    run_child_process(async |url| {
        let registry = Arc::new(registry(&url, LONG_SESSION).await);
        serve(registry).await;
    });
}

/// Starts a client in its own process.
pub(crate) async fn spawn_client(url: &str) -> LockHolder {
    LockHolder::spawn_test("faults::other_process::the_other_process", url).await.unwrap()
}
