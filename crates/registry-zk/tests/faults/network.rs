//! Connections that fall silent or break, with and without the reply to what the servers have done.

use std::net::SocketAddr;
use std::time::Duration;

use registry_core::{LockError, LockRegistry as _};
use registry_testkit::contest::LONG;
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_testkit::{eventually, within};

use crate::lab::{LONG_SESSION, SESSION, contest_by, end, operator, registry};

const ROUNDS: u32 = 20;
/// Where the store has its keys.
const BASE: &str = "/lock-registry/default";

fn url(addr: SocketAddr) -> String {
    format!("zk://{addr}")
}

#[tokio::test]
async fn replies_that_are_lost_cut_or_late_break_no_promise() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let ways: Vec<_> = proxies.iter().map(|proxy| url(proxy.addr())).collect();
    let contest = contest_by(&ways, SESSION).await;
    let faults = [
        Mode::ResetAfterRequest,
        Mode::CutAfter { reply_bytes: 40 },
        Mode::DropReplies,
        Mode::HoldReplies,
        Mode::BlackHole,
        Mode::HalfClose,
        Mode::Refuse,
        Mode::Delay(Duration::from_millis(100)),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let proxy = &proxies[number % proxies.len()];
        contest.goes_on().await;
        proxy.set_mode(fault).await.unwrap();
        if fault == Mode::Refuse {
            proxy.cut_all().await;
        }
        // The others go on meanwhile, at the latest when the session of this one is over.
        contest.goes_on().await;
        proxy.set_mode(Mode::Pass).await.unwrap();
    }
    contest.goes_on().await;
    end(contest, &server.url()).await.assert_flawless();
}

/// Bytes are kept back for longer than a session, and come in the end: in one direction, in the other, in both.
#[tokio::test]
async fn what_arrives_when_the_session_is_over_breaks_no_promise() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let ways: Vec<_> = proxies.iter().map(|proxy| url(proxy.addr())).collect();
    let contest = contest_by(&ways, SESSION).await;
    for (lost, fault) in (1..).zip([Mode::HoldReplies, Mode::BlackHole]) {
        contest.goes_on().await;
        contest.steady().await;
        // Each of them holds a key.
        for proxy in &proxies {
            proxy.set_mode(fault).await.unwrap();
        }
        contest.loses_steadily(3 * lost).await;
        tokio::time::sleep(SESSION).await;
        for proxy in &proxies {
            proxy.set_mode(Mode::Pass).await.unwrap();
        }
    }
    contest.goes_on().await;
    end(contest, &server.url()).await.assert_flawless();
}

#[tokio::test]
async fn a_grant_whose_reply_was_lost_is_taken_up_or_given_back() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    // So long that only giving back can free the key in time.
    let theirs = registry(&server.url(), LONG * 2).await;
    let operator = operator(&server).await;
    for round in 0..ROUNDS {
        let key = format!("reply-{round}");
        // Each time another one: what is still being given back has answers of its own, which would be cut off instead.
        let ours = registry(&url(proxy.addr()), LONG * 2).await;
        // From here on the node of the key is there, so that the next request makes the one of the claim.
        let before = ours.obtain(&key).lock().await.unwrap();
        proxy.set_mode(Mode::Pass).await.unwrap();
        before.unlock().await.unwrap();
        proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
        let lock = ours.obtain(&key);
        let taking = tokio::spawn(async move { lock.lock().await });
        // The server has granted it, and nobody was told.
        let path = format!("{BASE}/{key}");
        let is_held = async || operator.list_children(&path).await.is_ok_and(|all| !all.is_empty());
        eventually(LONG, is_held).await;
        if round % 2 == 0 {
            proxy.set_mode(Mode::Pass).await.unwrap();
            let guard = within(LONG, taking).await.unwrap().unwrap();
            assert_eq!(operator.list_children(&path).await.unwrap().len(), 1, "it is adopted");
            guard.unlock().await.unwrap();
        } else {
            taking.abort();
            proxy.set_mode(Mode::Pass).await.unwrap();
        }
        let next = within(LONG, theirs.obtain(&key).lock()).await.unwrap();
        next.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_release_whose_reply_was_lost_frees_the_key_and_is_no_loss() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let ours = registry(&url(proxy.addr()), LONG_SESSION).await;
    let theirs = registry(&server.url(), LONG_SESSION).await;
    for round in 0..ROUNDS {
        let key = format!("reply-{round}");
        let guard = ours.obtain(&key).lock().await.unwrap();
        let token = guard.fencing_token();
        proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
        let releasing = tokio::spawn(async move { guard.unlock().await });
        let next = within(LONG, theirs.obtain(&key).lock()).await.unwrap();
        assert!(next.fencing_token() > token);
        proxy.set_mode(Mode::Pass).await.unwrap();
        // Either it was found out that the key is free, or the question is open; never that it was lost.
        let released = within(LONG, releasing).await.unwrap();
        assert!(!matches!(released, Err(LockError::Lost { .. })), "{released:?}");
        ours.idle().await;
        assert!(next.is_held());
        next.unlock().await.unwrap();
    }
}

/// A caller that goes away in mid-flight, at every moment of an acquisition, leaves no node behind.
#[tokio::test]
async fn tiny_waits_leave_nobody_in_line() {
    let server = ZooKeeperServer::start().await.unwrap();
    let theirs = registry(&server.url(), LONG_SESSION).await;
    let held = theirs.obtain("k").lock().await.unwrap();
    let ours = registry(&server.url(), LONG * 2).await;
    for micros in 0..100 {
        let lock = ours.obtain("k");
        let wait = Duration::from_micros(micros * 20);
        let dropped = tokio::time::timeout(wait, lock.try_lock_for(LONG));
        assert!(dropped.await.is_err(), "somebody else holds it");
    }
    let operator = operator(&server).await;
    let line = async || operator.list_children(&format!("{BASE}/k")).await.unwrap().len();
    eventually(LONG, async || line().await == 1).await;
    assert!(held.is_held());
    held.unlock().await.unwrap();
}
