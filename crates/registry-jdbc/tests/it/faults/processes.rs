//! A client in another process is killed while it holds locks. Other clients acquire them long
//! before the lease ends.

use std::sync::Arc;
use std::time::Duration;

use registry_testkit::holder::{LockHolder, run_child_process, serve};

use super::server::{LockMode, ServerKind, TEST_TIMEOUT, registry_with_mode};
use super::workload::{KEYS, LONG_LEASE as WORKLOAD_LEASE, Workload};

/// So long that no client of the test waits until its end.
const LEASE: Duration = Duration::from_secs(60);
/// The server detects at once that a process on the same host has died. The rest is for a loaded
/// machine.
const DETECTION_MAX: Duration = Duration::from_secs(20);

#[test]
#[ignore = "started by the other tests, as another process"]
fn a_client_process() {
    run_child_process(async |target| {
        let (mode, url) = target.split_once(' ').unwrap();
        let mode = if mode == "Row" { LockMode::Row } else { LockMode::Session };
        let registry = Arc::new(registry_with_mode(url, LEASE, mode).await);
        serve(registry).await;
    });
}

async fn client(url: &str, mode: LockMode) -> LockHolder {
    let target = format!("{mode:?} {url}");
    LockHolder::spawn_test("faults::processes::a_client_process", &target).await.unwrap()
}

/// During a workload, kills a client that holds every contested key, and one more key, which the
/// workload does not use.
async fn killing_a_client_frees_its_locks(kind: ServerKind, mode: LockMode) {
    let server = kind.start().await;
    let workload = Workload::begin_with_lease(&server, WORKLOAD_LEASE, mode).await;
    let first_registry = registry_with_mode(&server.url(), LEASE, mode).await;
    let (mut deaths, mut events) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let mut client = client(&server.url(), mode).await;
        let mut token = None;
        for key in KEYS.into_iter().chain(["its own"]) {
            token = Some(client.lock(key, TEST_TIMEOUT).await.unwrap().token);
        }
        let died = workload.now();
        client.process().kill().unwrap();
        let next = registry_core::LockRegistry::obtain(&first_registry, "its own");
        let next = registry_testkit::within(DETECTION_MAX, next.lock()).await.unwrap();
        assert!(Some(next.fencing_token()) > token);
        next.unlock().await.unwrap();
        workload.wait_for_progress().await;
        client.process().wait_exit(TEST_TIMEOUT).await.unwrap();
        deaths.push((client.process().id(), died));
        events.extend(client.events());
    }
    let outcome = workload.end_with(&server, events).await.with_deaths(&deaths);
    let keys_held_at_death = |(client, at): &(u32, u64)| {
        let grants = outcome.history.grants.iter();
        let held = grants.filter(|grant| grant.client == *client && grant.lost == Some(*at));
        held.map(|grant| grant.key.to_string()).collect::<Vec<_>>()
    };
    for death in &deaths {
        assert_eq!(keys_held_at_death(death), ["a", "b", "c", "its own"]);
    }
    assert!(outcome.losses.is_empty(), "no other client was killed: {:?}", outcome.losses);
    outcome.assert_guarantees();
}

async fn killing_a_client_frees_its_session_locks(kind: ServerKind) {
    killing_a_client_frees_its_locks(kind, LockMode::Session).await;
}

async fn killing_a_client_frees_its_row_locks(kind: ServerKind) {
    killing_a_client_frees_its_locks(kind, LockMode::Row).await;
}

on_both_servers! {
    killing_a_client_frees_its_session_locks,
    killing_a_client_frees_its_row_locks,
}
