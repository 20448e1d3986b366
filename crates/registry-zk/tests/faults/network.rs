//! Connections that fall silent or break, with and without the response to an executed request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, Claim, ClaimId, Key, LockBackend as _, LockError, LockRegistry as _, Release,
};
use registry_testkit::contest::LONG;
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::zookeeper::{ZooKeeperOptions, ZooKeeperServer};
use registry_testkit::{eventually, within};
use registry_zk::ZkBackend;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use zookeeper_client::{Acls, Client, CreateMode};

use crate::lab::{
    LONG_SESSION, SESSION, backend, config, contest_by, end, operator, over, registry, secs,
};

const ROUNDS: u32 = 20;
/// Parent of the store's keys.
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
        // The other clients continue, at the latest when this client's session has ended.
        contest.goes_on().await;
        proxy.set_mode(Mode::Pass).await.unwrap();
    }
    contest.goes_on().await;
    end(contest, &server.url()).await.assert_flawless();
}

/// Bytes are delayed for longer than a session and then delivered: in one direction, in the other,
/// in both.
#[tokio::test]
async fn what_arrives_when_the_session_is_over_breaks_no_promise() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let ways: Vec<_> = proxies.iter().map(|proxy| url(proxy.addr())).collect();
    let contest = contest_by(&ways, SESSION).await;
    for (lost, fault) in (1..).zip([Mode::HoldReplies, Mode::BlackHole]) {
        contest.goes_on().await;
        contest.steady().await;
        // Each client holds a key.
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
    // So long that only a release can free the key in time.
    let theirs = registry(&server.url(), LONG * 2).await;
    let operator = operator(&server).await;
    let mut missed = 0;
    for round in 0..ROUNDS {
        let key = format!("reply-{round}");
        // A new registry each round: the previous one may still release a lock, and the proxy would
        // cut that response instead.
        let ours = registry(&url(proxy.addr()), LONG * 2).await;
        // This creates the key's node, so that the next request creates the claim's node.
        let before = ours.obtain(&key).lock().await.unwrap();
        proxy.set_mode(Mode::Pass).await.unwrap();
        before.unlock().await.unwrap();
        proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
        let lock = ours.obtain(&key);
        let taking = tokio::spawn(async move { lock.lock().await });
        // The server has granted the lock, and the response was lost.
        let path = format!("{BASE}/{key}");
        let is_held = async || operator.list_children(&path).await.is_ok_and(|all| !all.is_empty());
        if timeout(secs(10), eventually(LONG, is_held)).await.is_err() {
            // The proxy cut another response, such as that to a verification of the previous lock.
            // The acquisition was never sent.
            missed += 1;
            taking.abort();
            proxy.set_mode(Mode::Pass).await.unwrap();
            continue;
        }
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
    assert!(missed <= 1, "{missed} of {ROUNDS} answers were others");
}

/// If the servers grant a shorter session than requested, the client opens a second one with the
/// granted time-out. Both attempts share one time limit.
#[tokio::test]
async fn a_session_that_is_there_is_not_given_up_for_a_better_one_that_cannot_be_had() {
    let options = ZooKeeperOptions::new().settings(&["maxSessionTimeout=10000"]);
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let (to, listener) = (server.addr(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let way = listener.local_addr().unwrap();
    let mut carrying = JoinSet::new();
    carrying.spawn(async move {
        let (mut first, _) = listener.accept().await.unwrap();
        let mut server = TcpStream::connect(to).await.unwrap();
        let silent = async {
            let mut others = Vec::new();
            while let Ok((other, _)) = listener.accept().await {
                others.push(other);
            }
        };
        tokio::join!(silent, tokio::io::copy_bidirectional(&mut first, &mut server)).1.unwrap();
    });
    let config = config(&format!("zk://{way},{way}"), LONG_SESSION).with_connect_timeout(secs(2));
    let ours = over(&Arc::new(within(LONG, ZkBackend::open(config)).await.unwrap()));
    let guard = ours.obtain("k").lock().await.unwrap();
    guard.unlock().await.unwrap();
}

/// Returns the name of a claim's node without its number.
fn prefix(claim: ClaimId) -> String {
    let id = claim.to_string();
    let [a, b, c, d, e] = [&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]];
    format!("_c_{a}-{b}-{c}-{d}-{e}-lock-")
}

/// Creates a node of `claim` in another session. Such a node exists when a client has abandoned a
/// session that the servers still keep.
async fn leave_behind(operator: &Client, claim: &Claim) {
    let open = Acls::anyone_all();
    let dir = format!("{BASE}/{}", claim.key());
    operator.mkdir(&dir, &CreateMode::Persistent.with_acls(open)).await.unwrap();
    let path = format!("{dir}/{}", prefix(claim.id()));
    operator.create(&path, b"", &CreateMode::EphemeralSequential.with_acls(open)).await.unwrap();
}

#[tokio::test]
async fn a_claim_that_has_nodes_in_two_sessions_is_released_with_both() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let first = backend(&server.url(), LONG_SESSION).await;
    let second = backend(&server.url(), LONG_SESSION).await;
    for round in 0..ROUNDS {
        let key = Key::new(&format!("two-{round}")).unwrap();
        let claim = Claim::new(key, secs(5)).with_queue(true);
        leave_behind(&operator, &claim).await;
        let attempt = first.try_acquire(&claim).await.unwrap();
        assert!(matches!(attempt, Attempt::Busy(_)), "its other node is there: {attempt:?}");
        let line = format!("{BASE}/{}", claim.key());
        assert_eq!(operator.list_children(&line).await.unwrap().len(), 2);
        assert_eq!(second.release(&claim).await.unwrap(), Release::Freed);
        assert_eq!(operator.list_children(&line).await.unwrap_or_default(), [""; 0]);
    }
}

#[tokio::test]
async fn a_lost_reply_is_made_good_whatever_an_earlier_session_has_left_of_the_claim() {
    // So long that no other request is sent in the session, whose response the proxy would cut
    // instead.
    let session = secs(1_000);
    let options = ZooKeeperOptions::new().settings(&["maxSessionTimeout=1200000"]);
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let operator = operator(&server).await;
    let ours = backend(&url(proxy.addr()), session).await;
    for round in 0..ROUNDS {
        let key = Key::new(&format!("two-{round}")).unwrap();
        let claim = Claim::new(key, secs(60)).with_queue(true);
        leave_behind(&operator, &claim).await;
        let before = proxy.counts().reset;
        proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
        let attempt = {
            let (ours, claim) = (Arc::clone(&ours), claim.clone());
            tokio::spawn(async move { ours.try_acquire(&claim).await })
        };
        let line = format!("{BASE}/{}", claim.key());
        let nodes = async || operator.list_children(&line).await.unwrap().len();
        eventually(LONG, async || nodes().await == 2).await;
        // The proxy may see the response later than the node appears.
        proxy.until(LONG, |counts| counts.reset > before).await.unwrap();
        proxy.set_mode(Mode::Pass).await.unwrap();
        let mut attempt = within(LONG, attempt).await.unwrap();
        while attempt.is_err() {
            attempt = ours.try_acquire(&claim).await;
        }
        // The other node is deleted, and no third one was created.
        assert!(matches!(attempt, Ok(Attempt::Granted(_))), "{attempt:?}");
        assert_eq!(nodes().await, 1);
        assert_eq!(ours.release(&claim).await.unwrap(), Release::Freed);
        assert_eq!(nodes().await, 0);
    }
}

/// At whatever byte the responses break off, the caller gets a store error, and never `Busy`.
#[tokio::test]
async fn connections_that_break_at_each_try_are_told_as_trouble() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let operator = operator(&server).await;
    let ours = backend(&url(proxy.addr()), LONG_SESSION * 5).await;
    let key = Key::new("k").unwrap();
    let mut told = 0;
    for reply_bytes in (0..400).step_by(9) {
        let claim = Claim::new(key.clone(), secs(5));
        proxy.set_mode(Mode::CutAfter { reply_bytes }).await.unwrap();
        match within(LONG, ours.try_acquire(&claim)).await {
            Ok(Attempt::Granted(_)) => {}
            Ok(busy) => panic!("nobody has it, {reply_bytes} bytes: {busy:?}"),
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                told += 1;
            }
        }
        proxy.set_mode(Mode::Pass).await.unwrap();
        proxy.cut_all().await;
        eventually(LONG, async || ours.release(&claim).await).await;
        let line = operator.list_children(&format!("{BASE}/k")).await.unwrap_or_default();
        assert_eq!(line, [""; 0], "{reply_bytes} bytes");
    }
    println!("{told} times trouble");
    assert!(told > 10, "{told}");
}

/// Forwards all requests to the server until one creates a node. Then it ends the connection.
async fn carry_no_creation(mut from: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    const CREATE: [u8; 4] = 15_i32.to_be_bytes();
    let mut server = TcpStream::connect(to).await?;
    let (mut requests, mut replies) = from.split();
    let (mut answers, mut asked) = server.split();
    let there = async {
        // The first request opens the session and has no type.
        for number in 0.. {
            let length = requests.read_u32().await?;
            let mut request = vec![0; length as usize];
            requests.read_exact(&mut request).await?;
            if number > 0 && request[4..8] == CREATE {
                break;
            }
            asked.write_all(&[&length.to_be_bytes()[..], &request].concat()).await?;
        }
        Ok::<_, std::io::Error>(())
    };
    tokio::select! {
        ended = there => ended?,
        ended = tokio::io::copy(&mut answers, &mut replies) => drop(ended?),
    }
    // Closes the connection in order, without a reset.
    from.shutdown().await?;
    tokio::io::copy(&mut from, &mut tokio::io::sink()).await.map(drop)
}

#[tokio::test]
async fn a_node_that_cannot_be_made_is_trouble_and_not_somebody_else_s_lock() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let path = format!("{BASE}/k");
    operator.mkdir(&path, &CreateMode::Persistent.with_acls(Acls::anyone_all())).await.unwrap();
    let (to, listener) = (server.addr(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let way = listener.local_addr().unwrap();
    let mut carrying = JoinSet::new();
    carrying.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            connections.spawn(carry_no_creation(client, to));
        }
    });
    let ours = backend(&url(way), LONG_SESSION).await;
    let claim = Claim::new(Key::new("k").unwrap(), secs(5));
    let error = within(LONG, ours.try_acquire(&claim)).await.unwrap_err();
    println!("{error:?}");
    assert!(error.is_retryable() && !error.refused(), "{error:?}");
    assert!(error.to_string().contains("cannot be made"), "{error:?}");
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
        // The release detects that the key is free, or its outcome is unknown. It must not report a
        // loss.
        let released = within(LONG, releasing).await.unwrap();
        assert!(!matches!(released, Err(LockError::Lost { .. })), "{released:?}");
        ours.idle().await;
        assert!(next.is_held());
        next.unlock().await.unwrap();
    }
}

/// A caller that is dropped at any point of an acquisition leaves no node.
#[tokio::test]
async fn tiny_waits_leave_nobody_in_line() {
    let server = ZooKeeperServer::start().await.unwrap();
    let theirs = registry(&server.url(), LONG_SESSION).await;
    let held = theirs.obtain("k").lock().await.unwrap();
    let ours = registry(&server.url(), LONG * 2).await;
    for micros in 0..100 {
        let lock = ours.obtain("k");
        let wait = Duration::from_micros(micros * 20);
        let dropped = timeout(wait, lock.try_lock_for(LONG));
        assert!(dropped.await.is_err(), "somebody else holds it");
    }
    let operator = operator(&server).await;
    let line = async || operator.list_children(&format!("{BASE}/k")).await.unwrap().len();
    eventually(LONG, async || line().await == 1).await;
    assert!(held.is_held());
    held.unlock().await.unwrap();
}
