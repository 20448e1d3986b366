//! A registry whose home runtime is not driven reports an error instead of hanging.

use std::time::Duration;

use registry_core::LockError;
use registry_testkit::redis::RedisServer;
use tokio::runtime::Builder;
use tokio::time::timeout;

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(30);

#[test]
fn a_call_to_a_server_whose_runtime_is_not_driven_fails() {
    let other_runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // The tasks of a runtime of this kind run only inside `block_on`.
    let registry_runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let server = other_runtime.block_on(RedisServer::start(&[])).unwrap();
    let url = format!("{}?connect_timeout=60s", server.url());
    let local = registry_runtime.block_on(lock_registry::connect(&url)).unwrap();
    let outcome =
        other_runtime.block_on(async { timeout(LONG, local.obtain("k").try_lock()).await });
    let outcome = outcome.expect("the call never returns");
    assert!(matches!(outcome, Err(LockError::Backend { .. })), "{outcome:?}");
}
