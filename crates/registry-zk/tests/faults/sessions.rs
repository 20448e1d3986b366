//! Sessions that end because they are closed from outside or expire.

use std::time::Duration;

use registry_core::{LockOptions, LockRegistry as _, LostReason};
use registry_testkit::contest::{Contest, LONG};
use registry_testkit::history::Window;
use registry_testkit::within;
use registry_testkit::witness::Witness;
use registry_testkit::zookeeper::ZooKeeperServer;

use crate::elsewhere;
use crate::lab::{LONG_SESSION, PATIENT_SESSION, SESSION, backend, end, over, registry};

#[tokio::test]
async fn a_server_that_stands_still_for_longer_than_a_session_makes_no_second_holder() {
    let server = ZooKeeperServer::start().await.unwrap();
    let contest = crate::lab::contest(&server.url(), SESSION).await;
    for round in 1..=2 {
        contest.goes_on().await;
        contest.steady().await;
        server.pause().unwrap();
        contest.loses_steadily(3 * round).await;
        server.resume().unwrap();
    }
    contest.goes_on().await;
    let outcome = end(contest, &server.url()).await;
    let losses = outcome.steady_losses();
    assert!(losses.contains(&LostReason::Expired), "{losses:?}");
    outcome.assert_flawless();
}

#[tokio::test]
async fn a_server_that_crashes_and_keeps_its_data_ends_no_hold() {
    let mut server = ZooKeeperServer::start().await.unwrap();
    let contest = crate::lab::contest(&server.url(), PATIENT_SESSION).await;
    for _ in 0..3 {
        contest.goes_on().await;
        server.kill();
        server.start_again().await.unwrap();
    }
    contest.goes_on().await;
    let outcome = end(contest, &server.url()).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

/// The nodes are deleted at once, and other clients can acquire the locks before the client is
/// notified.
#[tokio::test]
async fn a_session_that_is_ended_from_outside_is_lost_for_good_and_followed_by_another_one() {
    let server = ZooKeeperServer::start().await.unwrap();
    let (mut backends, mut registries) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let backend = backend(&server.url(), SESSION).await;
        registries.push(over(&backend));
        backends.push(backend);
    }
    let contest = Contest::begin(registries).await;
    let mut windows = Vec::new();
    for round in 1..=2 {
        for (number, backend) in backends.iter().enumerate() {
            contest.goes_on().await;
            contest.steady().await;
            let session = backend.session_id().unwrap();
            let begin = contest.now();
            server.end_session(session).await.unwrap();
            contest.loses_steadily(3 * (round - 1) + number + 1).await;
            contest.steady().await;
            // A holder that is not notified loses the lock when its lease ends.
            let lease = u64::try_from((SESSION / 2).as_nanos()).unwrap();
            windows.push(Window::new(begin, contest.now() + lease));
            assert_ne!(backend.session_id(), Some(session));
        }
    }
    contest.goes_on().await;
    let outcome = end(contest, &server.url()).await;
    let losses = outcome.steady_losses();
    // On a loaded machine, the lease may end before the client detects the loss.
    let told = |reason: &LostReason| matches!(reason, LostReason::Gone | LostReason::Expired);
    assert!(losses.iter().all(told), "{losses:?}");
    for overlap in outcome.assert_flawless_but_between(&windows) {
        let length = Duration::from_nanos(overlap.at.to - overlap.at.from);
        println!("{}: two valid guards for {length:?}", overlap.key);
    }
}

/// The waiter goes to the end of the queue, and acquires the lock within its time limit.
#[tokio::test]
async fn who_waits_in_a_session_that_is_ended_waits_on_in_the_next_one() {
    let server = ZooKeeperServer::start().await.unwrap();
    let held = registry(&server.url(), LONG_SESSION).await;
    let guard = held.obtain("k").lock().await.unwrap();
    let backend = backend(&server.url(), SESSION).await;
    let ours = over(&backend);
    let lock = ours.obtain("k");
    let waiting = tokio::spawn(async move { lock.lock_with(LockOptions::new().wait(LONG)).await });
    registry_testkit::eventually(LONG, async || server.figure("zk_watch_count").await.unwrap() > 0)
        .await;
    let session = backend.session_id().unwrap();
    server.end_session(session).await.unwrap();
    // Queued again, in another session.
    registry_testkit::eventually(LONG, async || {
        let other = backend.session_id().filter(|other| *other != session)?;
        let nodes = server.ask("dump").await.unwrap();
        let (_, after) = nodes.split_once(&format!("{other:#x}:"))?;
        after.lines().nth(1)?.contains("-lock-").then_some(())
    })
    .await;
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
    let next = within(LONG, waiting).await.unwrap().unwrap().unwrap();
    assert!(next.is_held());
    next.unlock().await.unwrap();
}

/// Stops a process that holds a lock for longer than its session. Other clients acquire the lock,
/// and the process detects the loss as soon as it continues.
#[tokio::test]
async fn a_stopped_holder_is_replaced_and_knows_it() {
    let server = ZooKeeperServer::start().await.unwrap();
    let url = server.url();
    // Long sessions, so that only the stopped process loses its session.
    let contest = crate::lab::contest(&url, LONG_SESSION).await;
    let ours = registry(&url, LONG_SESSION).await;
    let witness = Witness::new(contest.recorder(), 7_000);
    let mut theirs = elsewhere::client(&url).await;
    for _ in 0..3 {
        let held = theirs.lock("paused", LONG).await.unwrap();
        theirs.process().pause().await.unwrap();
        let lock = ours.obtain("paused");
        let next = witness.lock_with(&lock, LockOptions::new().wait(LONG)).await.unwrap().unwrap();
        assert!(next.fencing_token() > held.token);
        assert!(contest.write_as(7_000, "paused", next.fencing_token().unwrap()));
        theirs.process().resume().unwrap();
        assert_eq!(theirs.lost("paused", LONG).await.unwrap(), "expired");
        assert_eq!(theirs.status("paused", LONG).await.unwrap(), None);
        let late = contest.write_as(7_001, "paused", held.token.unwrap());
        assert!(!late, "somebody newer has written");
        assert!(theirs.unlock("paused", LONG).await.is_err(), "it was lost");
        assert!(next.is_held(), "the successor is left alone");
        next.unlock().await.unwrap();
    }
    contest.goes_on().await;
    let held = theirs.lock("paused", LONG).await.unwrap();
    assert!(contest.write_as(7_001, "paused", held.token.unwrap()));
    theirs.unlock("paused", LONG).await.unwrap();
    let events = theirs.events();
    theirs.quit(LONG).await.unwrap();
    drop((witness, ours));
    let newcomer = registry(&url, SESSION).await;
    let outcome = contest.end(newcomer, LONG, events).await;
    println!("{outcome}");
    assert_eq!(outcome.steady_losses(), [], "nobody else was stopped");
    outcome.with_stopped_holders_of("paused").assert_flawless();
}
