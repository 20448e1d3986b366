//! Clients in other processes, which a test can suspend.

use std::env;
use std::io::Write as _;
use std::process::Command;
use std::sync::Arc;

use registry_core::LockOptions;
use registry_redis::RedisConfig;
use registry_testkit::eventually;
use registry_testkit::holder::{HolderOptions, LockHolder, serve};
use registry_testkit::recording_client::RecordingClient;
use registry_testkit::redis::RedisServer;

use super::outcome::WorkloadOutcome;
use super::workload::{LEASE, LONG, Workload, WorkloadKeys, registry};

/// Passes the servers' URL to the other process.
const URL_VARIABLE: &str = "LOCK_REGISTRY_TEST_URL";

#[test]
#[ignore = "started by the other tests, as another process"]
fn client_process() {
    let Some(url) = env::var_os(URL_VARIABLE) else { return };
    // Ends the line that the test harness has begun.
    _ = writeln!(std::io::stdout());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let config = RedisConfig::from_url(url.to_str().unwrap()).unwrap();
        let registry = Arc::new(registry(&config, LEASE).await);
        serve(registry, &HolderOptions::new("redis").history()).await;
    });
    // Exits at once, so that the test harness prints nothing more.
    std::process::exit(0);
}

/// Starts a client in its own process.
pub(crate) async fn start_client_process(url: &str) -> LockHolder {
    let mut program = Command::new(env::current_exe().unwrap());
    program.args(["faults::remote_client::client_process", "--exact", "--ignored", "--nocapture"]);
    program.env(URL_VARIABLE, url);
    LockHolder::spawn_command(program).await.unwrap()
}

/// Suspends a client that holds a lock for longer than its lease, during the workload. Other
/// clients continue, and the suspended client detects the loss as soon as it resumes.
pub(crate) async fn a_suspended_holder_is_replaced_and_notified(
    url: &str,
    servers: &[&RedisServer],
) -> WorkloadOutcome {
    let config = RedisConfig::from_url(url).unwrap();
    // Longer leases, so that a busy machine ends no hold of the clients that are not suspended.
    let client_configs = vec![config.clone(); 3];
    let workload =
        Workload::start_with(&client_configs, &config, WorkloadKeys::default(), LEASE * 3).await;
    let registry_a = registry(&config, LEASE).await;
    let recording_client = RecordingClient::new(workload.recorder(), 7_000);
    let mut remote = start_client_process(url).await;
    for _ in 0..2 {
        let held = remote.lock("paused", LONG).await.unwrap();
        remote.process().pause().await.unwrap();
        let lock = registry_a.obtain("paused");
        let next = recording_client
            .lock_with(&lock, LockOptions::new().wait(LONG))
            .await
            .unwrap()
            .unwrap();
        assert!(Some(next.fencing_token()) > held.token);
        assert!(workload.write_as(7_000, "paused", next.fencing_token()));
        remote.process().resume().unwrap();
        assert_eq!(remote.lost("paused", LONG).await.unwrap(), "expired");
        assert_eq!(remote.status("paused", LONG).await.unwrap(), None);
        assert!(
            !workload.write_as(7_001, "paused", held.token.unwrap()),
            "a newer token has written"
        );
        assert!(remote.unlock("paused", LONG).await.is_err(), "it was lost");
        assert!(next.is_held(), "the next holder keeps its lock");
        next.unlock().await.unwrap();
    }
    workload.wait_for_grants().await;
    let held = eventually(LONG, async || remote.try_lock("paused", LONG).await.unwrap()).await;
    assert!(workload.write_as(7_001, "paused", held.token.unwrap()));
    remote.unlock("paused", LONG).await.unwrap();
    let events = remote.events();
    remote.quit(LONG).await.unwrap();
    drop((recording_client, registry_a));
    let outcome = workload.end_with(servers, events).await;
    assert_eq!(outcome.steady_losses(), [], "no other client was suspended");
    outcome
}
