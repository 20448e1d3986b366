//! Clients in other processes, which a test can suspend.

use std::env;
use std::io::Write as _;
use std::process::Command;
use std::sync::Arc;

use registry_core::{LockOptions, LockRegistry as _};
use registry_redis::RedisConfig;
use registry_testkit::eventually;
use registry_testkit::holder::{HolderOptions, LockHolder, serve};
use registry_testkit::redis::RedisServer;
use registry_testkit::witness::Witness;

use crate::contest::{Contest, Keys, LEASE, LONG, registry};
use crate::verdict::Outcome;

/// Passes the servers' URL to the other process.
const URL_VARIABLE: &str = "LOCK_REGISTRY_TEST_URL";

#[test]
#[ignore = "started by the other tests, as another process"]
fn the_other_process() {
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
pub(crate) async fn client(url: &str) -> LockHolder {
    let mut program = Command::new(env::current_exe().unwrap());
    program.args(["elsewhere::the_other_process", "--exact", "--ignored", "--nocapture"]);
    program.env(URL_VARIABLE, url);
    LockHolder::spawn_command(program).await.unwrap()
}

/// Suspends a client that holds a lock for longer than its lease, during the workload. Other
/// clients continue, and the suspended client detects the loss as soon as it resumes.
pub(crate) async fn a_stopped_holder_is_replaced_and_knows_it(
    url: &str,
    servers: &[&RedisServer],
) -> Outcome {
    let config = RedisConfig::from_url(url).unwrap();
    // Longer leases, so that a busy machine ends no hold of the clients that are not suspended.
    let ways = vec![config.clone(); 3];
    let contest = Contest::begin_with(&ways, &config, Keys::default(), LEASE * 3).await;
    let ours = registry(&config, LEASE).await;
    let witness = Witness::new(contest.recorder(), 7_000);
    let mut theirs = client(url).await;
    for _ in 0..2 {
        let held = theirs.lock("paused", LONG).await.unwrap();
        theirs.process().pause().await.unwrap();
        let lock = ours.obtain("paused");
        let next = witness.lock_with(&lock, LockOptions::new().wait(LONG)).await.unwrap().unwrap();
        assert!(next.fencing_token() > held.token);
        assert!(contest.write_as(7_000, "paused", next.fencing_token().unwrap()));
        theirs.process().resume().unwrap();
        assert_eq!(theirs.lost("paused", LONG).await.unwrap(), "expired");
        assert_eq!(theirs.status("paused", LONG).await.unwrap(), None);
        assert!(
            !contest.write_as(7_001, "paused", held.token.unwrap()),
            "somebody newer has written"
        );
        assert!(theirs.unlock("paused", LONG).await.is_err(), "it was lost");
        assert!(next.is_held(), "the successor is left alone");
        next.unlock().await.unwrap();
    }
    contest.goes_on().await;
    let held = eventually(LONG, async || theirs.try_lock("paused", LONG).await.unwrap()).await;
    assert!(contest.write_as(7_001, "paused", held.token.unwrap()));
    theirs.unlock("paused", LONG).await.unwrap();
    let events = theirs.events();
    theirs.quit(LONG).await.unwrap();
    drop((witness, ours));
    let outcome = contest.end_with(servers, events).await;
    assert_eq!(outcome.steady_losses(), [], "nobody else was stopped");
    outcome
}
