//! Session locks and row locks, which end with a connection. Exclusion is violated only if the
//! server itself ended the connection, and only until the holder detects that.

use std::time::Duration;

use registry_testkit::eventually;
use tokio::time::sleep;

use super::server::{LockMode, RESPONSE_TIMEOUT, ServerKind, TEST_TIMEOUT};
use super::workload::{LEASE, Workload};

on_both_servers! {
    closed_connections_of_sessions_cost_exclusion_briefly,
    closed_connections_of_row_locks_cost_exclusion_briefly,
    a_short_pause_ends_no_session_lock,
    a_short_pause_ends_no_row_lock,
    a_long_pause_violates_no_property_of_session_locks,
    a_long_pause_violates_no_property_of_row_locks,
    a_killed_server_of_sessions_costs_exclusion_briefly,
    a_killed_server_of_row_locks_costs_exclusion_briefly,
}

/// The maximum time that a holder relies on its lock after the server has ended the connection.
const UNNOTIFIED_MAX: Duration = LEASE.saturating_add(Duration::from_secs(1));

async fn closed_connections_cost_exclusion_briefly(kind: ServerKind, mode: LockMode) {
    let server = kind.start().await;
    let workload = Workload::begin_with_mode(&server, mode).await;
    let mut windows = Vec::new();
    for _ in 0..4 {
        workload.wait_until_long_held().await;
        let losses = workload.long_held_losses();
        let before = workload.now();
        server.close_all_connections().await;
        windows.push(workload.window(before, UNNOTIFIED_MAX));
        workload.wait_for_long_held_losses(losses + 1).await;
        workload.wait_for_progress().await;
    }
    workload.end(&server).await.assert_guarantees_except_in(&windows);
    assert_eq!(server.open_transactions().await, "0");
}

async fn closed_connections_of_sessions_cost_exclusion_briefly(kind: ServerKind) {
    closed_connections_cost_exclusion_briefly(kind, LockMode::Session).await;
}

async fn closed_connections_of_row_locks_cost_exclusion_briefly(kind: ServerKind) {
    closed_connections_cost_exclusion_briefly(kind, LockMode::Row).await;
}

/// The pause is shorter than the response timeout, so the clients keep their connections.
async fn a_short_pause_ends_no_hold(kind: ServerKind, mode: LockMode) {
    let server = kind.start().await;
    let workload = Workload::begin_with_mode(&server, mode).await;
    for _ in 0..4 {
        server.pause();
        sleep(RESPONSE_TIMEOUT / 3).await;
        server.resume();
        workload.wait_for_progress().await;
    }
    workload.end(&server).await.assert_guarantees();
}

async fn a_short_pause_ends_no_session_lock(kind: ServerKind) {
    a_short_pause_ends_no_hold(kind, LockMode::Session).await;
}

async fn a_short_pause_ends_no_row_lock(kind: ServerKind) {
    a_short_pause_ends_no_hold(kind, LockMode::Row).await;
}

/// The pause is longer than a lease: holders lose their locks by their own clock, while the server
/// still excludes all other clients.
async fn a_long_pause_violates_no_property(kind: ServerKind, mode: LockMode) {
    let server = kind.start().await;
    let workload = Workload::begin_with_mode(&server, mode).await;
    for _ in 0..2 {
        workload.wait_until_long_held().await;
        let losses = workload.long_held_losses();
        server.pause();
        workload.wait_for_long_held_losses(losses + 1).await;
        sleep(LEASE).await;
        server.resume();
        workload.wait_for_progress().await;
    }
    workload.end(&server).await.assert_guarantees();
    eventually(TEST_TIMEOUT, async || server.open_transactions().await == "0").await;
}

async fn a_long_pause_violates_no_property_of_session_locks(kind: ServerKind) {
    a_long_pause_violates_no_property(kind, LockMode::Session).await;
}

async fn a_long_pause_violates_no_property_of_row_locks(kind: ServerKind) {
    a_long_pause_violates_no_property(kind, LockMode::Row).await;
}

async fn a_killed_server_costs_exclusion_briefly(kind: ServerKind, mode: LockMode) {
    let mut server = kind.start().await;
    let workload = Workload::begin_with_mode(&server, mode).await;
    let mut windows = Vec::new();
    for _ in 0..2 {
        workload.wait_until_long_held().await;
        let losses = workload.long_held_losses();
        let before = workload.now();
        server.kill();
        server.restart().await;
        windows.push(workload.window(before, UNNOTIFIED_MAX));
        workload.wait_for_long_held_losses(losses + 1).await;
        workload.wait_for_progress().await;
    }
    workload.end(&server).await.assert_guarantees_except_in(&windows);
}

async fn a_killed_server_of_sessions_costs_exclusion_briefly(kind: ServerKind) {
    a_killed_server_costs_exclusion_briefly(kind, LockMode::Session).await;
}

async fn a_killed_server_of_row_locks_costs_exclusion_briefly(kind: ServerKind) {
    a_killed_server_costs_exclusion_briefly(kind, LockMode::Row).await;
}
