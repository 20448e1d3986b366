//! One server that keeps its data and its clock: every fault costs only time.

use std::time::Duration;

use tokio::time::sleep;

use crate::contest::{Contest, LEASE};
use crate::server::Kind;

async fn a_server_that_stands_still_makes_no_second_holder(kind: Kind) {
    let server = kind.start().await;
    let contest = Contest::begin(&server).await;
    for _ in 0..2 {
        // Pause 1: shorter than the lease.
        server.pause();
        sleep(LEASE / 4).await;
        server.resume();
        contest.goes_on().await;
        // Pause 2: until a hold is lost.
        let before = contest.holds_on().await;
        server.pause();
        contest.loses(before).await;
        server.resume();
        contest.goes_on().await;
    }
    contest.end(&server).await.assert_flawless();
}

async fn a_pause_shorter_than_the_lease_ends_no_hold(kind: Kind) {
    let server = kind.start().await;
    // Long enough for a busy machine.
    let lease = Duration::from_secs(8);
    let contest = Contest::begin_by(&vec![server.url(); 3], lease).await;
    for _ in 0..2 {
        server.pause();
        sleep(Duration::from_millis(1_500)).await;
        server.resume();
        contest.goes_on().await;
    }
    let outcome = contest.end(&server).await;
    assert_eq!(outcome.losses, 0);
    outcome.assert_flawless();
}

async fn crashes_break_no_promise(kind: Kind) {
    let mut server = kind.start().await;
    let contest = Contest::begin(&server).await;
    let mut windows = Vec::new();
    for down in [Duration::ZERO, LEASE / 2, LEASE * 3 / 2] {
        let begin = contest.now();
        server.kill();
        sleep(down).await;
        server.start_again().await;
        windows.push((begin, contest.after(LEASE)));
        contest.goes_on().await;
    }
    // A grant is on disk before it is returned; a release need not be.
    let outcome = contest.end(&server).await;
    outcome.with_releases_taken_back(&windows).assert_flawless();
}

async fn cut_connections_break_no_promise(kind: Kind) {
    let server = kind.start().await;
    let contest = Contest::begin(&server).await;
    for _ in 0..6 {
        server.cut_all().await;
        contest.goes_on().await;
    }
    contest.end(&server).await.assert_flawless();
}

on_both_servers! {
    a_server_that_stands_still_makes_no_second_holder,
    a_pause_shorter_than_the_lease_ends_no_hold,
    crashes_break_no_promise,
    cut_connections_break_no_promise,
}
