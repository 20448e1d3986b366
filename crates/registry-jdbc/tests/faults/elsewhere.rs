//! Clients in other processes, which can be killed at any point.

use std::env;
use std::io::Write as _;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use registry_testkit::holder::{HolderOptions, LockHolder, serve};

use crate::contest::{Contest, KEYS};
use crate::server::{Kind, LONG, Mode, registry_in};

const URL_VARIABLE: &str = "LOCK_REGISTRY_TEST_URL";
const MODE_VARIABLE: &str = "LOCK_REGISTRY_TEST_MODE";

/// So long that no client can have waited for its end.
const LEASE: Duration = Duration::from_secs(60);
/// The server notices at once that a process on the same host has died.
const NOTICED: Duration = Duration::from_secs(20);

#[test]
#[ignore = "started by the other tests, as another process"]
fn the_other_process() {
    let Ok(url) = env::var(URL_VARIABLE) else { return };
    let is_row = env::var(MODE_VARIABLE).unwrap() == "Row";
    // Ends the line that the test harness has begun.
    _ = writeln!(std::io::stdout());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mode = if is_row { Mode::Row } else { Mode::Session };
        let registry = Arc::new(registry_in(&url, LEASE, mode).await);
        serve(registry, &HolderOptions::new("sql").history()).await;
    });
    // Exits at once: the test harness must not print its summary.
    std::process::exit(0);
}

async fn client(url: &str, mode: Mode) -> LockHolder {
    let mut program = Command::new(env::current_exe().unwrap());
    program.args(["elsewhere::the_other_process", "--exact", "--ignored", "--nocapture"]);
    program.env(URL_VARIABLE, url).env(MODE_VARIABLE, format!("{mode:?}"));
    LockHolder::spawn_command(program).await.unwrap()
}

/// During a contest, a client dies that holds every key, and also one that no other client competes
/// for.
async fn a_client_is_killed(kind: Kind, mode: Mode) {
    let server = kind.start().await;
    let contest = Contest::begin_in(&server, mode).await;
    let ours = registry_in(&server.url(), LEASE, mode).await;
    let (mut deaths, mut events) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let mut client = client(&server.url(), mode).await;
        let mut token = None;
        for key in KEYS.into_iter().chain(["its own"]) {
            token = client.lock(key, LONG).await.unwrap().token;
        }
        let died = contest.now();
        client.process().kill().unwrap();
        let next = registry_core::LockRegistry::obtain(&ours, "its own");
        let next = registry_testkit::within(NOTICED, next.lock()).await.unwrap();
        assert!(next.fencing_token() > token);
        next.unlock().await.unwrap();
        contest.goes_on().await;
        client.process().wait_exit(LONG).await.unwrap();
        deaths.push((client.process().id(), died));
        events.extend(client.events());
    }
    let outcome = contest.end_with(&server, events).await.with_deaths(&deaths);
    let held = |(client, at): &(u32, u64)| {
        let grants = outcome.history.grants.iter();
        let held = grants.filter(|grant| grant.client == *client && grant.lost == Some(*at));
        held.map(|grant| grant.key.to_string()).collect::<Vec<_>>()
    };
    for death in &deaths {
        assert_eq!(held(death), ["a", "b", "c", "its own"]);
    }
    assert_eq!(outcome.losses, 0, "nobody else was killed");
    outcome.assert_flawless();
}

async fn a_client_of_sessions_is_killed(kind: Kind) {
    a_client_is_killed(kind, Mode::Session).await;
}

async fn a_client_of_rows_is_killed(kind: Kind) {
    a_client_is_killed(kind, Mode::Row).await;
}

on_both_servers! {
    a_client_of_sessions_is_killed,
    a_client_of_rows_is_killed,
}
