//! The server's wall clock jumps. It decides when a lease ends in the store, so a jump ends or
//! prolongs leases. Tokens still increase, and fenced writes stay safe.

use std::time::Duration;

use registry_core::{Attempt, Claim, Key, Release};
use registry_testkit::clock::ClockShim;

use super::server::{ServerKind, backend};
use super::workload::{LEASE, Workload};

const HOUR: i64 = 3_600;

/// All leases end at once. A holder is notified at its next renewal, at most a lease later. Until
/// then a second holder with a larger token may exist.
async fn a_clock_jump_violates_exclusion_until_the_next_renewal(kind: ServerKind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_with_clock(&clock).await;
    let workload = Workload::begin(&server).await;
    let mut windows = Vec::new();
    for _ in 0..2 {
        workload.wait_until_long_held().await;
        let before = workload.long_held_losses();
        let begin = workload.now();
        clock.jump_wall(61).unwrap();
        let window = workload.window(begin, LEASE);
        workload.wait_for_long_held_losses(before + 1).await;
        workload.wait_for_progress().await;
        windows.push(window);
    }
    workload.end(&server).await.assert_guarantees_except_in(&windows);
}

/// Active leases last an hour longer. Their holders renew and release as usual, and tokens grow.
async fn a_clock_that_is_set_back_violates_no_property(kind: ServerKind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_with_clock(&clock).await;
    let workload = Workload::begin(&server).await;
    clock.jump_wall(-HOUR).unwrap();
    workload.wait_for_progress().await;
    workload.wait_for_progress().await;
    workload.end(&server).await.assert_guarantees();
}

/// A limitation: the lock of a dead holder is free an hour after the end of its lease. An operator
/// can force-release it earlier.
async fn a_clock_that_is_set_back_prolongs_locks_of_dead_clients(kind: ServerKind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_with_clock(&clock).await;
    let backend = backend(&server.url()).await;
    let key = Key::new("orphan").unwrap();
    let dead_claim = Claim::new(key.clone(), LEASE);
    let Attempt::Granted(before) = backend.try_acquire(&dead_claim).await.unwrap() else {
        panic!("busy")
    };
    clock.jump_wall(-HOUR).unwrap();
    let left = backend.admin().unwrap().inspect(&key).await.unwrap().remove(0).lease_left.unwrap();
    assert!(left > Duration::from_secs(3_500), "{left:?}");
    let claim = Claim::new(key.clone(), LEASE);
    assert!(matches!(backend.try_acquire(&claim).await.unwrap(), Attempt::Busy(_)));
    assert_eq!(backend.admin().unwrap().force_release(&key).await.unwrap(), Release::Freed);
    let Attempt::Granted(after) = backend.try_acquire(&claim).await.unwrap() else {
        panic!("busy")
    };
    assert!(after.token > before.token, "{after:?} {before:?}");
    // A lease that started after the jump has its normal length.
    let left = backend.admin().unwrap().inspect(&key).await.unwrap().remove(0).lease_left.unwrap();
    assert!(left <= LEASE, "{left:?}");
}

on_both_servers! {
    a_clock_jump_violates_exclusion_until_the_next_renewal,
    a_clock_that_is_set_back_violates_no_property,
    a_clock_that_is_set_back_prolongs_locks_of_dead_clients,
}
