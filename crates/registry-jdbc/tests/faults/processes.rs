//! Clients in other processes, which can be killed at any point.

use std::env;
use std::io::Write as _;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use registry_testkit::holder::{HolderOptions, LockHolder, serve};

use crate::server::{LockMode, ServerKind, TEST_TIMEOUT, registry_in};
use crate::workload::{KEYS, Workload};

const URL_VARIABLE: &str = "LOCK_REGISTRY_TEST_URL";
const MODE_VARIABLE: &str = "LOCK_REGISTRY_TEST_MODE";

/// So long that no client can have waited for its end.
const LEASE: Duration = Duration::from_secs(60);
/// The server notices at once that a process on the same host has died.
const DETECTION_MAX: Duration = Duration::from_secs(20);

#[test]
#[ignore = "started by the other tests, as another process"]
fn a_client_process() {
    let Ok(url) = env::var(URL_VARIABLE) else { return };
    let is_row = env::var(MODE_VARIABLE).unwrap() == "Row";
    // Ends the line that the test harness has begun.
    _ = writeln!(std::io::stdout());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mode = if is_row { LockMode::Row } else { LockMode::Session };
        let registry = Arc::new(registry_in(&url, LEASE, mode).await);
        serve(registry, &HolderOptions::new("sql").history()).await;
    });
    // Exits at once: the test harness must not print its summary.
    std::process::exit(0);
}

async fn client(url: &str, mode: LockMode) -> LockHolder {
    let mut program = Command::new(env::current_exe().unwrap());
    program.args(["processes::a_client_process", "--exact", "--ignored", "--nocapture"]);
    program.env(URL_VARIABLE, url).env(MODE_VARIABLE, format!("{mode:?}"));
    LockHolder::spawn_command(program).await.unwrap()
}

/// During a workload, a client dies that holds every key, and also one that no other client
/// competes for.
async fn killing_a_client_frees_its_locks(kind: ServerKind, mode: LockMode) {
    let server = kind.start().await;
    let workload = Workload::begin_with_mode(&server, mode).await;
    let first_registry = registry_in(&server.url(), LEASE, mode).await;
    let (mut deaths, mut events) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let mut client = client(&server.url(), mode).await;
        let mut token = None;
        for key in KEYS.into_iter().chain(["its own"]) {
            token = client.lock(key, TEST_TIMEOUT).await.unwrap().token;
        }
        let died = workload.now();
        client.process().kill().unwrap();
        let next = registry_core::LockRegistry::obtain(&first_registry, "its own");
        let next = registry_testkit::within(DETECTION_MAX, next.lock()).await.unwrap();
        assert!(Some(next.fencing_token()) > token);
        next.unlock().await.unwrap();
        workload.wait_for_grants().await;
        client.process().wait_exit(TEST_TIMEOUT).await.unwrap();
        deaths.push((client.process().id(), died));
        events.extend(client.events());
    }
    let outcome = workload.end_with(&server, events).await.with_deaths(&deaths);
    let held = |(client, at): &(u32, u64)| {
        let grants = outcome.history.grants.iter();
        let held = grants.filter(|grant| grant.client == *client && grant.lost == Some(*at));
        held.map(|grant| grant.key.to_string()).collect::<Vec<_>>()
    };
    for death in &deaths {
        assert_eq!(held(death), ["a", "b", "c", "its own"]);
    }
    assert_eq!(outcome.losses, 0, "no other client was killed");
    outcome.assert_flawless();
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
