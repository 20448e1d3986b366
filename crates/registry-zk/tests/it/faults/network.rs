//! Connections that stall or break, with and without the response to an executed request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{Attempt, Claim, ClaimId, Key, LockBackend as _, Queueing, Release};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::workload::{LONG, assert_releases_without_reply_free_their_keys};
use registry_testkit::zookeeper::{ZooKeeperOptions, ZooKeeperServer};
use registry_testkit::{eventually, within};
use registry_zk::ZkBackend;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use zookeeper_client::{Acls, Client, CreateMode};

use super::support::{
    LONG_SESSION, SESSION, backend, config, finish, operator, registry, registry_over, secs,
    start_workload_at,
};

const ROUNDS: u32 = 20;
/// Parent of the store's keys.
const BASE: &str = "/lock-registry/default";

fn url(addr: SocketAddr) -> String {
    format!("zk://{addr}")
}

#[tokio::test]
async fn lost_cut_or_late_replies_break_no_guarantee() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let urls: Vec<_> = proxies.iter().map(|proxy| url(proxy.addr())).collect();
    let workload = start_workload_at(&urls, SESSION).await;
    workload.disturb_connections(&proxies, Duration::ZERO).await;
    finish(workload, &server.url()).await.assert_guarantees();
}

/// The proxy holds messages for longer than a session and then delivers them: first only replies,
/// then requests and replies.
#[tokio::test]
async fn messages_after_the_end_of_a_session_break_no_guarantee() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let urls: Vec<_> = proxies.iter().map(|proxy| url(proxy.addr())).collect();
    let workload = start_workload_at(&urls, SESSION).await;
    for (round, fault) in (1..).zip([ProxyMode::HoldReplies, ProxyMode::BlackHole]) {
        workload.wait_for_progress().await;
        workload.wait_until_long_held().await;
        // Each client holds a key.
        for proxy in &proxies {
            proxy.set_mode(fault).await.unwrap();
        }
        workload.wait_for_long_held_losses(3 * round).await;
        tokio::time::sleep(SESSION).await;
        for proxy in &proxies {
            proxy.set_mode(ProxyMode::Pass).await.unwrap();
        }
    }
    workload.wait_for_progress().await;
    finish(workload, &server.url()).await.assert_guarantees();
}

#[tokio::test]
async fn a_grant_with_a_lost_reply_is_adopted_or_released() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    // So long that only a release can free the key in time.
    let other_client = registry(&server.url(), LONG * 2).await;
    let operator = operator(&server).await;
    let mut missed = 0;
    for round in 0..ROUNDS {
        let key = format!("reply-{round}");
        // A new registry each round: the previous one may still release a lock, and the proxy would
        // cut that response instead.
        let client = registry(&url(proxy.addr()), LONG * 2).await;
        // This creates the key's node, so that the next request creates the claim's node.
        let before = client.obtain(&key).lock().await.unwrap();
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        before.unlock().await.unwrap();
        proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
        let lock = client.obtain(&key);
        let acquiring = tokio::spawn(async move { lock.lock().await });
        // The server has granted the lock, and the response was lost.
        let path = format!("{BASE}/{key}");
        let is_held = async || operator.list_children(&path).await.is_ok_and(|all| !all.is_empty());
        if timeout(secs(10), eventually(LONG, is_held)).await.is_err() {
            // The proxy cut another response, such as that to a verification of the previous lock.
            // The acquisition was never sent.
            missed += 1;
            acquiring.abort();
            proxy.set_mode(ProxyMode::Pass).await.unwrap();
            continue;
        }
        if round % 2 == 0 {
            proxy.set_mode(ProxyMode::Pass).await.unwrap();
            let guard = within(LONG, acquiring).await.unwrap().unwrap();
            assert_eq!(
                operator.list_children(&path).await.unwrap().len(),
                1,
                "the node is adopted"
            );
            guard.unlock().await.unwrap();
        } else {
            acquiring.abort();
            proxy.set_mode(ProxyMode::Pass).await.unwrap();
        }
        let next = within(LONG, other_client.obtain(&key).lock()).await.unwrap();
        next.unlock().await.unwrap();
    }
    assert!(missed <= 1, "in {missed} of {ROUNDS} rounds, the proxy cut another response");
}

/// If the servers grant a shorter session than requested, the client opens a second one with the
/// granted time-out. Both attempts share one time limit.
#[tokio::test]
async fn an_open_session_is_used_if_a_second_connection_fails() {
    let options = ZooKeeperOptions::new().settings(&["maxSessionTimeout=10000"]);
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let (to, listener) = (server.addr(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let proxy_addr = listener.local_addr().unwrap();
    let mut forwarding = JoinSet::new();
    forwarding.spawn(async move {
        let (mut first, _) = listener.accept().await.unwrap();
        let mut server = TcpStream::connect(to).await.unwrap();
        let unresponsive = async {
            let mut others = Vec::new();
            while let Ok((other, _)) = listener.accept().await {
                others.push(other);
            }
        };
        tokio::join!(unresponsive, tokio::io::copy_bidirectional(&mut first, &mut server))
            .1
            .unwrap();
    });
    let config = config(&format!("zk://{proxy_addr},{proxy_addr}"), LONG_SESSION)
        .with_connect_timeout(secs(6));
    let client = registry_over(&Arc::new(within(LONG, ZkBackend::open(config)).await.unwrap()));
    let guard = client.obtain("k").lock().await.unwrap();
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
async fn create_leftover_node(operator: &Client, claim: &Claim) {
    let open = Acls::anyone_all();
    let dir = format!("{BASE}/{}", claim.key());
    operator.mkdir(&dir, &CreateMode::Persistent.with_acls(open)).await.unwrap();
    let path = format!("{dir}/{}", prefix(claim.id()));
    operator.create(&path, b"", &CreateMode::EphemeralSequential.with_acls(open)).await.unwrap();
}

#[tokio::test]
async fn a_release_deletes_the_nodes_of_a_claim_in_two_sessions() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let first = backend(&server.url(), LONG_SESSION).await;
    let second = backend(&server.url(), LONG_SESSION).await;
    for round in 0..ROUNDS {
        let key = Key::new(&format!("two-{round}")).unwrap();
        let claim = Claim::new(key, secs(5)).with_queueing(Queueing::Join);
        create_leftover_node(&operator, &claim).await;
        let attempt = first.try_acquire(&claim).await.unwrap();
        assert!(matches!(attempt, Attempt::Busy(_)), "its other node exists: {attempt:?}");
        let lock_path = format!("{BASE}/{}", claim.key());
        assert_eq!(operator.list_children(&lock_path).await.unwrap().len(), 2);
        assert_eq!(second.release(&claim).await.unwrap(), Release::Freed);
        assert_eq!(operator.list_children(&lock_path).await.unwrap_or_default(), [""; 0]);
    }
}

#[tokio::test]
async fn a_lost_reply_is_resolved_despite_a_leftover_node_of_an_earlier_session() {
    // So long that the session sends no periodic request, whose response the proxy would cut
    // instead.
    let session = secs(1_000);
    let options = ZooKeeperOptions::new().settings(&["maxSessionTimeout=1200000"]);
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let operator = operator(&server).await;
    let client = backend(&url(proxy.addr()), session).await;
    for round in 0..ROUNDS {
        let key = Key::new(&format!("two-{round}")).unwrap();
        let claim = Claim::new(key, secs(60)).with_queueing(Queueing::Join);
        create_leftover_node(&operator, &claim).await;
        let before = proxy.counts().reset;
        proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
        let attempt = {
            let (client, claim) = (Arc::clone(&client), claim.clone());
            tokio::spawn(async move { client.try_acquire(&claim).await })
        };
        let lock_path = format!("{BASE}/{}", claim.key());
        let nodes = async || operator.list_children(&lock_path).await.unwrap().len();
        eventually(LONG, async || nodes().await == 2).await;
        // The proxy may see the response later than the node appears.
        proxy.until(LONG, |counts| counts.reset > before).await.unwrap();
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        let mut attempt = within(LONG, attempt).await.unwrap();
        while attempt.is_err() {
            attempt = client.try_acquire(&claim).await;
        }
        // The other node is deleted, and no third one was created.
        assert!(matches!(attempt, Ok(Attempt::Granted(_))), "{attempt:?}");
        assert_eq!(nodes().await, 1);
        assert_eq!(client.release(&claim).await.unwrap(), Release::Freed);
        assert_eq!(nodes().await, 0);
    }
}

/// However many bytes of the responses arrive, the caller gets a grant or a store error, never
/// `Busy`.
#[tokio::test]
async fn a_connection_that_breaks_at_each_attempt_is_a_store_error() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let operator = operator(&server).await;
    let client = backend(&url(proxy.addr()), LONG_SESSION * 5).await;
    let key = Key::new("k").unwrap();
    let mut errors = 0;
    for reply_bytes in (0..400).step_by(9) {
        let claim = Claim::new(key.clone(), secs(5));
        proxy.set_mode(ProxyMode::CutAfter { reply_bytes }).await.unwrap();
        match within(LONG, client.try_acquire(&claim)).await {
            Ok(Attempt::Granted(_)) => {}
            Ok(busy) => {
                panic!("busy although the lock is free, after {reply_bytes} bytes: {busy:?}")
            }
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                errors += 1;
            }
        }
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        proxy.cut_all().await;
        eventually(LONG, async || client.release(&claim).await).await;
        let nodes = operator.list_children(&format!("{BASE}/k")).await.unwrap_or_default();
        assert_eq!(nodes, [""; 0], "{reply_bytes} bytes");
    }
    println!("{errors} store errors");
    assert!(errors > 10, "{errors}");
}

/// Forwards all requests to the server until one creates a node. Then it ends the connection.
async fn forward_until_create(mut from: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    /// The type of the request that creates a node (`create2`).
    const CREATE: [u8; 4] = 15_i32.to_be_bytes();
    let mut server = TcpStream::connect(to).await?;
    let (mut requests, mut replies) = from.split();
    let (mut server_replies, mut server_requests) = server.split();
    let forwarding = async {
        // The first request opens the session and has no type.
        for number in 0.. {
            let length = requests.read_u32().await?;
            let mut request = vec![0; length as usize];
            requests.read_exact(&mut request).await?;
            if number > 0 && request[4..8] == CREATE {
                break;
            }
            server_requests.write_all(&[&length.to_be_bytes()[..], &request].concat()).await?;
        }
        Ok::<_, std::io::Error>(())
    };
    tokio::select! {
        ended = forwarding => ended?,
        ended = tokio::io::copy(&mut server_replies, &mut replies) => drop(ended?),
    }
    // Closes the connection in order, without a reset.
    from.shutdown().await?;
    tokio::io::copy(&mut from, &mut tokio::io::sink()).await.map(drop)
}

#[tokio::test]
async fn a_node_that_cannot_be_created_is_a_store_error_and_not_busy() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let path = format!("{BASE}/k");
    operator.mkdir(&path, &CreateMode::Persistent.with_acls(Acls::anyone_all())).await.unwrap();
    let (to, listener) = (server.addr(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let proxy_addr = listener.local_addr().unwrap();
    let mut forwarding = JoinSet::new();
    forwarding.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            connections.spawn(forward_until_create(client, to));
        }
    });
    let client = backend(&url(proxy_addr), LONG_SESSION).await;
    let claim = Claim::new(Key::new("k").unwrap(), secs(5));
    let error = within(LONG, client.try_acquire(&claim)).await.unwrap_err();
    println!("{error:?}");
    assert!(error.is_retryable() && !error.refused(), "{error:?}");
    assert!(error.to_string().contains("was not determined"), "{error:?}");
}

#[tokio::test]
async fn a_release_with_a_lost_reply_frees_the_key_and_reports_no_loss() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let client = registry(&url(proxy.addr()), LONG_SESSION).await;
    let other_client = registry(&server.url(), LONG_SESSION).await;
    assert_releases_without_reply_free_their_keys(ROUNDS, &proxy, &client, &other_client).await;
}

/// A caller that is dropped at any point of an acquisition leaves no node.
#[tokio::test]
async fn a_dropped_acquisition_leaves_no_node() {
    let server = ZooKeeperServer::start().await.unwrap();
    let other_client = registry(&server.url(), LONG_SESSION).await;
    let held = other_client.obtain("k").lock().await.unwrap();
    let client = registry(&server.url(), LONG * 2).await;
    for micros in 0..100 {
        let lock = client.obtain("k");
        let wait = Duration::from_micros(micros * 20);
        let dropped = timeout(wait, lock.try_lock_for(LONG));
        assert!(dropped.await.is_err(), "another client holds the lock");
    }
    let operator = operator(&server).await;
    let contenders = async || operator.list_children(&format!("{BASE}/k")).await.unwrap().len();
    eventually(LONG, async || contenders().await == 1).await;
    assert!(held.is_held());
    held.unlock().await.unwrap();
}
