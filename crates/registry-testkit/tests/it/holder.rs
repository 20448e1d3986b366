//! The lock holder: a second process over a real store, paused, killed and queried.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

use std::io::ErrorKind;
use std::time::Duration;

use registry_testkit::check::{SearchResult, check, search};
use registry_testkit::eventually;
use registry_testkit::history::History;
use registry_testkit::holder::{HolderCommand, HolderOptions, HolderReport, LockHolder, program};
use tempfile::TempDir;

/// Sufficient for the slowest machine. It costs time only when a test fails.
const LIMIT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(2);
/// A key may be any text.
const KEY: &str = "orders/42 \"quoted\"\n🔒";

fn folder() -> (TempDir, HolderOptions) {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", folder.path().join("locks.db").display());
    (folder, HolderOptions::new(store).lease(LEASE))
}

async fn start(options: &HolderOptions) -> LockHolder {
    LockHolder::spawn(options).await.unwrap()
}

#[tokio::test]
async fn two_processes_exclude_each_other() {
    let (_folder, options) = folder();
    let (mut one, mut two) = (start(&options).await, start(&options).await);
    let held = one.lock(KEY, LIMIT).await.unwrap();
    assert!(held.valid_for <= LEASE && held.valid_for > Duration::ZERO);
    assert_eq!(one.status(KEY, LIMIT).await.unwrap().unwrap().token, held.token);
    assert_eq!(two.try_lock(KEY, LIMIT).await.unwrap(), None);
    assert_eq!(two.status(KEY, LIMIT).await.unwrap(), None);
    two.send_command(&HolderCommand::lock(KEY)).unwrap();
    one.unlock(KEY, LIMIT).await.unwrap();
    let next = two.held(KEY, LIMIT).await.unwrap();
    assert!(next.token > held.token);
    two.unlock(KEY, LIMIT).await.unwrap();
    one.quit(LIMIT).await.unwrap();
    two.quit(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_killed_holder_frees_its_lock_at_the_end_of_its_lease() {
    let (_folder, options) = folder();
    let (mut one, mut two) = (start(&options).await, start(&options).await);
    let held = one.lock(KEY, LIMIT).await.unwrap();
    two.send_command(&HolderCommand::lock(KEY)).unwrap();
    one.process().kill().unwrap();
    let next = two.held(KEY, LIMIT).await.unwrap();
    assert!(next.token > held.token);
    two.quit(LIMIT).await.unwrap();
}

#[tokio::test]
async fn a_holder_that_was_stopped_beyond_its_lease_reports_the_loss() {
    let (_folder, options) = folder();
    let (mut one, mut two) = (start(&options).await, start(&options).await);
    one.lock(KEY, LIMIT).await.unwrap();
    one.process().pause().await.unwrap();
    two.lock(KEY, LIMIT).await.unwrap();
    one.process().resume().unwrap();
    let reason = one.lost(KEY, LIMIT).await.unwrap();
    assert!(["expired", "gone"].contains(&&*reason), "{reason}");
    assert_eq!(one.status(KEY, LIMIT).await.unwrap().map(|held| held.valid_for), None);
    let lost = one.unlock(KEY, LIMIT).await.unwrap_err();
    assert!(lost.to_string().contains("lost"), "{lost}");
    assert!(two.status(KEY, LIMIT).await.unwrap().is_some());
    two.unlock(KEY, LIMIT).await.unwrap();
}

#[tokio::test]
async fn waits_can_be_cancelled_and_guards_dropped() {
    let (_folder, options) = folder();
    let (mut one, mut two) = (start(&options).await, start(&options).await);
    one.lock(KEY, LIMIT).await.unwrap();
    two.send_command(&HolderCommand::lock(KEY)).unwrap();
    two.unlock(KEY, LIMIT).await.unwrap();
    one.send_command(&HolderCommand::Drop { key: KEY.into() }).unwrap();
    eventually(LIMIT, async || two.try_lock(KEY, LIMIT).await.unwrap()).await;
    let never = two.unlock("never", LIMIT).await.unwrap_err();
    assert!(never.to_string().contains("not requested"), "{never}");
    let invalid = two.lock("", LIMIT).await.unwrap_err();
    assert!(invalid.to_string().contains("must not be empty"), "{invalid}");
}

#[tokio::test]
async fn a_holder_ends_with_its_input_and_releases_its_locks() {
    let (_folder, options) = folder();
    let (mut one, mut two) =
        (start(&options.clone().lease(LIMIT * 10)).await, start(&options).await);
    one.lock(KEY, LIMIT).await.unwrap();
    one.close_input();
    assert!(one.process().wait_exit(LIMIT).await.unwrap().success());
    assert!(two.try_lock(KEY, LIMIT).await.unwrap().is_some());
}

#[tokio::test]
async fn the_histories_of_several_processes_are_checked_as_one() {
    let (_folder, options) = folder();
    let options = options.history();
    let mut holders = Vec::new();
    for _ in 0..3 {
        let mut holder = start(&options).await;
        holder
            .send_command(&HolderCommand::Repeat { key: KEY.into(), rounds: 40, hold_ms: 0 })
            .unwrap();
        holders.push(holder);
    }
    // One holder is killed during its rounds. The events that it recorded until then count.
    let killed = holders.pop().unwrap();
    eventually(LIMIT, async || killed.events().len() > 20).await;
    killed.process().kill().unwrap();
    killed.process().wait_exit(LIMIT).await.unwrap();
    for holder in &mut holders {
        let rounds =
            |report: &HolderReport| matches!(report, HolderReport::Repeated { .. }).then_some(());
        holder.report(LIMIT, rounds).await.unwrap();
    }
    holders.push(killed);
    let history = History::from_events(holders.iter().flat_map(LockHolder::events)).unwrap();
    let checked = check(&history).unwrap_or_else(|found| panic!("{found}"));
    assert!(checked.tokens >= 84, "{checked:?}");
    assert_eq!(search(&history, LIMIT), SearchResult::Linearizable);
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_is_reported_with_its_causes() {
    for store in ["memory:", "sqlite:/nonexistent/folder/locks.db", "carrier-pigeon:"] {
        match LockHolder::spawn(&HolderOptions::new(store)).await {
            Ok(holder) => {
                assert_eq!(store, "memory:");
                holder.quit(LIMIT).await.unwrap();
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Other);
                assert!(error.to_string().contains("failed to open its store"), "{error}");
            }
        }
    }
}

#[test]
fn the_program_is_built_once_and_found_again() {
    let first = program().unwrap();
    assert!(first.is_file());
    assert_eq!(program().unwrap(), first);
    // The program is built in the target folder of this test, not in a separate one.
    let test = std::env::current_exe().unwrap();
    assert!(test.starts_with(first.parent().unwrap()), "{first:?} is not next to {test:?}");
}
