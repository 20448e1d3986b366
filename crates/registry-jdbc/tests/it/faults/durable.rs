//! One server that loses no data and whose clock does not jump. Pauses, crashes and closed
//! connections delay clients, but violate no guarantee.

use std::time::Duration;

use tokio::time::sleep;

use super::server::ServerKind;
use super::workload::{LEASE, Workload};

async fn a_paused_server_causes_no_second_holder(kind: ServerKind) {
    let server = kind.start().await;
    let workload = Workload::begin(&server).await;
    for _ in 0..2 {
        // Pause 1: shorter than the lease.
        server.pause();
        sleep(LEASE / 4).await;
        server.resume();
        workload.wait_for_progress().await;
        // Pause 2: until a hold is lost.
        workload.wait_until_long_held().await;
        let before = workload.long_held_losses();
        server.pause();
        workload.wait_for_long_held_losses(before + 1).await;
        server.resume();
        workload.wait_for_progress().await;
    }
    workload.end(&server).await.assert_guarantees();
}

async fn a_pause_shorter_than_the_lease_ends_no_hold(kind: ServerKind) {
    let server = kind.start().await;
    // Long enough for a busy machine.
    let lease = Duration::from_secs(8);
    let workload = Workload::begin_with_urls(&vec![server.url(); 3], lease).await;
    for _ in 0..2 {
        server.pause();
        sleep(Duration::from_millis(1_500)).await;
        server.resume();
        workload.wait_for_progress().await;
    }
    let outcome = workload.end(&server).await;
    assert!(outcome.losses.is_empty(), "{:?}", outcome.losses);
    outcome.assert_guarantees();
}

async fn server_crashes_violate_no_property(kind: ServerKind) {
    let mut server = kind.start().await;
    let workload = Workload::begin(&server).await;
    let mut windows = Vec::new();
    for downtime in [Duration::ZERO, LEASE / 2, LEASE * 3 / 2] {
        let begin = workload.now();
        server.kill();
        sleep(downtime).await;
        server.restart().await;
        windows.push(workload.window(begin, LEASE));
        workload.wait_for_progress().await;
    }
    // A grant is on disk before it is returned, but a release need not be. A crash may undo a
    // release, so a free key may be reported as busy within the windows.
    let outcome = workload.end(&server).await;
    outcome.without_busy_answers_in(&windows).assert_guarantees();
}

async fn closed_connections_violate_no_property(kind: ServerKind) {
    let server = kind.start().await;
    let workload = Workload::begin(&server).await;
    for _ in 0..6 {
        server.close_all_connections().await;
        workload.wait_for_progress().await;
    }
    workload.end(&server).await.assert_guarantees();
}

on_both_servers! {
    a_paused_server_causes_no_second_holder,
    a_pause_shorter_than_the_lease_ends_no_hold,
    server_crashes_violate_no_property,
    closed_connections_violate_no_property,
}
