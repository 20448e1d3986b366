//! Locks that end with a connection. Exclusion is violated only if the server itself has ended the
//! connection, and only until the holder notices.

use std::time::Duration;

use tokio::time::sleep;

use crate::contest::{Contest, LEASE};
use crate::server::{ANSWER_LIMIT, Kind, LONG, Mode};

on_both_servers! {
    connections_of_sessions_are_cut,
    connections_of_rows_are_cut,
    the_server_of_sessions_stands_still_for_a_moment,
    the_server_of_rows_stands_still_for_a_moment,
    the_server_of_sessions_stands_still_for_long,
    the_server_of_rows_stands_still_for_long,
    the_server_of_sessions_is_killed,
    the_server_of_rows_is_killed,
}

/// The maximum time that a holder relies on its lock after the server has ended the connection.
const UNAWARE: Duration = LEASE.saturating_add(Duration::from_secs(1));

async fn connections_are_cut(kind: Kind, mode: Mode) {
    let server = kind.start().await;
    let contest = Contest::begin_in(&server, mode).await;
    let mut windows = Vec::new();
    for _ in 0..4 {
        let losses = contest.holds_on().await;
        let before = contest.now();
        server.cut_all().await;
        windows.push((before, contest.after(UNAWARE)));
        contest.loses(losses).await;
        contest.goes_on().await;
    }
    contest.end(&server).await.assert_flawless_but_between(&windows);
    assert_eq!(server.open_transactions().await, "0");
}

async fn connections_of_sessions_are_cut(kind: Kind) {
    connections_are_cut(kind, Mode::Session).await;
}

async fn connections_of_rows_are_cut(kind: Kind) {
    connections_are_cut(kind, Mode::Row).await;
}

/// The pause is shorter than the response timeout, so no lock is lost.
async fn stands_still_for_a_moment(kind: Kind, mode: Mode) {
    let server = kind.start().await;
    let contest = Contest::begin_in(&server, mode).await;
    for _ in 0..4 {
        server.pause();
        sleep(ANSWER_LIMIT / 3).await;
        server.resume();
        contest.goes_on().await;
    }
    contest.end(&server).await.assert_flawless();
}

async fn the_server_of_sessions_stands_still_for_a_moment(kind: Kind) {
    stands_still_for_a_moment(kind, Mode::Session).await;
}

async fn the_server_of_rows_stands_still_for_a_moment(kind: Kind) {
    stands_still_for_a_moment(kind, Mode::Row).await;
}

/// The pause is longer than a lease: holders lose their locks by their own clock, while the server
/// still excludes all other clients.
async fn stands_still_for_long(kind: Kind, mode: Mode) {
    let server = kind.start().await;
    let contest = Contest::begin_in(&server, mode).await;
    for _ in 0..2 {
        let losses = contest.holds_on().await;
        server.pause();
        contest.loses(losses).await;
        sleep(LEASE).await;
        server.resume();
        contest.goes_on().await;
    }
    contest.end(&server).await.assert_flawless();
    registry_testkit::eventually(LONG, async || server.open_transactions().await == "0").await;
}

async fn the_server_of_sessions_stands_still_for_long(kind: Kind) {
    stands_still_for_long(kind, Mode::Session).await;
}

async fn the_server_of_rows_stands_still_for_long(kind: Kind) {
    stands_still_for_long(kind, Mode::Row).await;
}

async fn is_killed(kind: Kind, mode: Mode) {
    let mut server = kind.start().await;
    let contest = Contest::begin_in(&server, mode).await;
    let mut windows = Vec::new();
    for _ in 0..2 {
        let losses = contest.holds_on().await;
        let before = contest.now();
        server.kill();
        server.start_again().await;
        windows.push((before, contest.after(UNAWARE)));
        contest.loses(losses).await;
        contest.goes_on().await;
    }
    contest.end(&server).await.assert_flawless_but_between(&windows);
}

async fn the_server_of_sessions_is_killed(kind: Kind) {
    is_killed(kind, Mode::Session).await;
}

async fn the_server_of_rows_is_killed(kind: Kind) {
    is_killed(kind, Mode::Row).await;
}
