//! Tests `LockHolder`: helper processes that share a SQLite store and are paused, killed and
//! queried.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{LostReason, Registry};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use registry_testkit::check::{SearchResult, check, search};
use registry_testkit::eventually;
use registry_testkit::history::History;
use registry_testkit::holder::{
    HolderRequest, LockHolder, report_failure, run_child_process, serve,
};
use tempfile::TempDir;

/// Sufficient for the slowest machine. It costs time only when a test fails.
const LIMIT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(2);
/// With characters that the protocol between the processes must escape.
const KEY: &str = "orders/42 \"quoted\"\n🔒";

#[test]
#[ignore = "started by the other tests, as another process"]
fn a_holder_process() {
    run_child_process(async |target| {
        let (lease_ms, file) = target.split_once(' ').unwrap();
        let backend = match SqliteBackend::open(SqliteConfig::new(file)).await {
            Ok(backend) => Arc::new(backend),
            Err(error) => return report_failure("open its store", &error),
        };
        let lease = Duration::from_millis(lease_ms.parse().unwrap());
        serve(Arc::new(Registry::builder(backend).lease(lease).build().unwrap())).await;
    });
}

/// Returns a folder, and the target of the holder processes: a lease and a file in that folder.
fn folder() -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let target = target(LEASE, &folder);
    (folder, target)
}

fn target(lease: Duration, folder: &TempDir) -> String {
    format!("{} {}", lease.as_millis(), folder.path().join("locks.db").display())
}

async fn start(target: &str) -> LockHolder {
    LockHolder::spawn_test("holder::a_holder_process", target).await.unwrap()
}

#[tokio::test]
async fn two_processes_exclude_each_other() {
    let (_folder, target) = folder();
    let (mut one, mut two) = (start(&target).await, start(&target).await);
    let held = one.lock(KEY, LIMIT).await.unwrap();
    assert!(held.valid_for <= LEASE && held.valid_for > Duration::ZERO);
    assert_eq!(one.status(KEY, LIMIT).await.unwrap().unwrap().token, held.token);
    assert_eq!(two.try_lock(KEY, LIMIT).await.unwrap(), None);
    assert_eq!(two.status(KEY, LIMIT).await.unwrap(), None);
    let pending = two.send(&HolderRequest::lock(KEY)).unwrap();
    one.unlock(KEY, LIMIT).await.unwrap();
    let next = two.held(pending, LIMIT).await.unwrap();
    assert!(next.token > held.token);
    two.unlock(KEY, LIMIT).await.unwrap();
    one.quit(LIMIT).await.unwrap();
    two.quit(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_killed_holder_frees_its_lock_at_the_end_of_its_lease() {
    let (_folder, target) = folder();
    let (mut one, mut two) = (start(&target).await, start(&target).await);
    let held = one.lock(KEY, LIMIT).await.unwrap();
    let pending = two.send(&HolderRequest::lock(KEY)).unwrap();
    one.process().kill().unwrap();
    let next = two.held(pending, LIMIT).await.unwrap();
    assert!(next.token > held.token);
    two.quit(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_holder_that_was_stopped_beyond_its_lease_reports_the_loss() {
    let (_folder, target) = folder();
    let (mut one, mut two) = (start(&target).await, start(&target).await);
    one.lock(KEY, LIMIT).await.unwrap();
    one.process().pause().await.unwrap();
    two.lock(KEY, LIMIT).await.unwrap();
    one.process().resume().unwrap();
    let reason = one.lost(KEY, LIMIT).await.unwrap();
    assert!([LostReason::Expired, LostReason::Gone].contains(&reason), "{reason}");
    assert_eq!(one.status(KEY, LIMIT).await.unwrap().map(|held| held.valid_for), None);
    let lost = one.unlock(KEY, LIMIT).await.unwrap_err();
    assert!(lost.to_string().contains("lost"), "{lost}");
    assert!(two.status(KEY, LIMIT).await.unwrap().is_some());
    two.unlock(KEY, LIMIT).await.unwrap();
}

#[tokio::test]
async fn waits_can_be_cancelled_and_guards_dropped() {
    let (_folder, target) = folder();
    let (mut one, mut two) = (start(&target).await, start(&target).await);
    one.lock(KEY, LIMIT).await.unwrap();
    let pending = two.send(&HolderRequest::lock(KEY)).unwrap();
    two.cancel(pending).unwrap();
    one.request::<()>(HolderRequest::Drop { key: KEY.into() }, LIMIT).await.unwrap();
    eventually(LIMIT, async || two.try_lock(KEY, LIMIT).await.unwrap()).await;
    let never = two.unlock("never", LIMIT).await.unwrap_err();
    assert!(never.to_string().contains("not requested"), "{never}");
    let invalid = two.lock("", LIMIT).await.unwrap_err();
    assert!(invalid.to_string().contains("must not be empty"), "{invalid}");
}

#[tokio::test]
async fn a_holder_ends_with_its_input_and_releases_its_locks() {
    let (folder, short_lease) = folder();
    let long_lease = target(LIMIT * 10, &folder);
    let (mut one, mut two) = (start(&long_lease).await, start(&short_lease).await);
    one.lock(KEY, LIMIT).await.unwrap();
    one.close_input();
    assert!(one.process().wait_exit(LIMIT).await.unwrap().success());
    assert!(two.try_lock(KEY, LIMIT).await.unwrap().is_some());
}

#[tokio::test]
async fn the_histories_of_several_processes_are_checked_as_one() {
    let (_folder, target) = folder();
    let mut holders = Vec::new();
    for _ in 0..3 {
        let mut holder = start(&target).await;
        let repeat = HolderRequest::Repeat { key: KEY.into(), rounds: 40 };
        let pending = holder.send(&repeat).unwrap();
        holders.push((holder, pending));
    }
    // One holder is killed during its rounds. The events that it recorded until then count.
    let (killed, _) = holders.pop().unwrap();
    eventually(LIMIT, async || killed.events().len() > 20).await;
    killed.process().kill().unwrap();
    killed.process().wait_exit(LIMIT).await.unwrap();
    for (holder, pending) in &holders {
        holder.reply::<()>(*pending, LIMIT).await.unwrap();
    }
    let holders = holders.iter().map(|(holder, _)| holder).chain([&killed]);
    let history = History::from_events(holders.flat_map(LockHolder::events)).unwrap();
    let checked = check(&history).unwrap_or_else(|found| panic!("{found}"));
    assert!(checked.tokens >= 84, "{checked:?}");
    assert_eq!(search(&history, LIMIT), SearchResult::Linearizable);
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_is_reported_with_its_causes() {
    let target = "2000 /nonexistent/folder/locks.db";
    let spawned = LockHolder::spawn_test("holder::a_holder_process", target).await;
    let error = spawned.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other);
    assert!(error.to_string().contains("failed to open its store"), "{error}");
}
