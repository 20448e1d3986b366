//! Only the server's wall clock ends leases. A jump of that clock affects them, but not tokens and
//! fenced writes.

use std::time::Duration;

use registry_core::{Attempt, Claim, Key, Release};
use registry_testkit::clock::ClockShim;

use crate::contest::{Contest, LEASE};
use crate::server::{Kind, backend};

const HOUR: i64 = 3_600;

/// All leases end at once. A holder is notified at its next renewal, at most a lease later. Until
/// then a second holder with a larger token may exist.
async fn a_clock_that_jumps_ahead_costs_exclusion_until_the_next_renewal(kind: Kind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_by(&clock).await;
    let contest = Contest::begin(&server).await;
    let mut windows = Vec::new();
    for _ in 0..2 {
        let before = contest.holds_on().await;
        let begin = contest.now();
        clock.jump_wall(61).unwrap();
        let end = contest.after(LEASE);
        contest.loses(before).await;
        contest.goes_on().await;
        windows.push((begin, end));
    }
    contest.end(&server).await.assert_flawless_but_between(&windows);
}

/// Current leases last an hour longer. Their holders renew and release as usual, and tokens grow.
async fn a_clock_that_is_put_back_breaks_no_promise(kind: Kind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_by(&clock).await;
    let contest = Contest::begin(&server).await;
    clock.jump_wall(-HOUR).unwrap();
    contest.goes_on().await;
    contest.goes_on().await;
    contest.end(&server).await.assert_flawless();
}

/// A limitation: the lock of a dead holder is not free after its lease, but an hour later. An
/// operator can release it.
async fn a_clock_that_is_put_back_leaves_locks_of_the_dead_behind(kind: Kind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_by(&clock).await;
    let ours = backend(&server.url()).await;
    let key = Key::new("orphan").unwrap();
    let dead = Claim::new(key.clone(), LEASE);
    let Attempt::Granted(before) = ours.try_acquire(&dead).await.unwrap() else { panic!("busy") };
    clock.jump_wall(-HOUR).unwrap();
    let left = ours.inspect(&key).await.unwrap().unwrap().lease_left.unwrap();
    assert!(left > Duration::from_secs(3_500), "{left:?}");
    let claim = Claim::new(key.clone(), LEASE);
    assert!(matches!(ours.try_acquire(&claim).await.unwrap(), Attempt::Busy(_)));
    assert_eq!(ours.force_release(&key).await.unwrap(), Release::Freed);
    let Attempt::Granted(after) = ours.try_acquire(&claim).await.unwrap() else { panic!("busy") };
    assert!(after.token > before.token, "{after:?} {before:?}");
    // A lease that started after the jump has its normal length.
    let left = ours.inspect(&key).await.unwrap().unwrap().lease_left.unwrap();
    assert!(left <= LEASE, "{left:?}");
}

on_both_servers! {
    a_clock_that_jumps_ahead_costs_exclusion_until_the_next_renewal,
    a_clock_that_is_put_back_breaks_no_promise,
    a_clock_that_is_put_back_leaves_locks_of_the_dead_behind,
}
