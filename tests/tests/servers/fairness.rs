//! Real processes that compete for one key receive fair shares of the grants, on stores without a
//! queue.

#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use registry_testkit::holder::{HolderRequest, HolderShare, LockHolder, run_child_process, serve};
use registry_testkit::redis::RedisServer;

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(300);

/// How long the processes compete.
const SPAN: Duration = Duration::from_secs(8);
/// How long a process may hand the claim over locally before it detects another process.
const HAND_OVER_SPAN: Duration = Duration::from_secs(1);

#[test]
#[ignore = "started by the other tests, as another process"]
fn the_other_process() {
    run_child_process(async |url| {
        let registry = lock_registry::connect(&url).await.unwrap();
        serve(Arc::new(registry)).await;
    });
}

#[tokio::test]
async fn eight_processes_share_a_key_of_sqlite_although_one_has_eight_tasks() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("locks.db").display());
    let hold = Duration::from_millis(50);
    let shares = shares(&url, &[8, 1, 1, 1, 1, 1, 1, 1], hold).await;
    check(&shares, hold);
}

#[tokio::test]
async fn twenty_processes_share_a_key_in_the_layout_of_spring() {
    let server = RedisServer::start(&[]).await.unwrap();
    let url = format!("{}?layout=spring&namespace=locks", server.url());
    let hold = Duration::from_millis(5);
    let shares = shares(&url, &[1; 20], hold).await;
    check(&shares, hold);
}

/// Checks that each process has between an eighth of the median number of grants and four times the
/// median. The longest wait must be within the bound.
fn check(shares: &[HolderShare], hold: Duration) {
    let mut sorted = shares.to_vec();
    sorted.sort_unstable();
    println!("{sorted:?}");
    let median = sorted[sorted.len() / 2].grants;
    let processes = u32::try_from(sorted.len()).unwrap();
    let bound = (HAND_OVER_SPAN + hold) * processes * 2;
    for share in &sorted {
        assert!(share.grants <= 4 * median, "{share:?} of a median of {median}: {sorted:?}");
        assert!(8 * share.grants >= median, "{share:?} of a median of {median}: {sorted:?}");
        assert!(share.longest_wait <= bound, "{share:?} beyond {bound:?}: {sorted:?}");
    }
}

/// Runs one process for each number of tasks, all on one key. Returns their shares.
async fn shares(url: &str, tasks: &[u32], hold: Duration) -> Vec<HolderShare> {
    let mut processes =
        join_all(tasks.iter().map(async |_| {
            LockHolder::spawn_test("fairness::the_other_process", url).await.unwrap()
        }))
        .await;
    join_all(processes.iter_mut().zip(tasks).map(async |(process, &tasks)| {
        let key = "orders/42".to_owned();
        let contend = HolderRequest::Contend { key, tasks, hold, span: SPAN };
        process.request(contend, LONG).await.unwrap()
    }))
    .await
}
