//! How soon a client reconnects, and how a session ends.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::select_all;
use registry_core::{LockGuard, LockOptions, LockRegistry as _, Registry};
use registry_testkit::contest::LONG;
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_testkit::{eventually, within};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use zookeeper_client::{Acls, CreateMode, Permission};

use crate::lab::{backend, operator, over, registry, secs};
use registry_zk::Multi as _;

/// A proxy to a server. Its open connections can fall silent; new connections work.
struct Way {
    addr: SocketAddr,
    silence: watch::Sender<()>,
    accepted: watch::Receiver<u32>,
    _carrying: JoinSet<()>,
}

impl Way {
    async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (silence, _) = watch::channel(());
        let (count, accepted) = watch::channel(0);
        let mut carrying = JoinSet::new();
        let silences = silence.clone();
        carrying.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let mut silence = silences.subscribe();
                count.send_modify(|count| *count += 1);
                connections.spawn(async move {
                    let mut server = TcpStream::connect(server).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        // Both ends stay open.
                        _ = silence.changed() => std::future::pending().await,
                    }
                });
            }
        });
        Self { addr, silence, accepted, _carrying: carrying }
    }
}

async fn hold(registry: &Registry, lease: Duration, count: usize) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for number in 0..count {
        let lock = registry.obtain(&format!("held/{number}"));
        let options = LockOptions::new().lease(lease).wait(LONG);
        guards.push(lock.lock_with(options).await.unwrap().unwrap());
    }
    guards
}

/// Asserts that no guard is lost for two leases.
async fn last(guards: &[LockGuard], lease: Duration) {
    let any = select_all(guards.iter().map(|guard| Box::pin(guard.lost())));
    assert!(timeout(lease * 2, any).await.is_err(), "one was lost");
    assert!(guards.iter().all(LockGuard::is_held));
}

#[tokio::test]
async fn a_connection_that_falls_silent_is_replaced_before_leases_of_five_seconds_end() {
    let server = ZooKeeperServer::start().await.unwrap();
    for session in [secs(10), secs(30)] {
        let mut way = Way::to(server.addr()).await;
        let ours = registry(&format!("zk://{}", way.addr), session).await;
        let guards = hold(&ours, secs(5), 5).await;
        let before = *way.accepted.borrow_and_update();
        way.silence.send(()).unwrap();
        last(&guards, secs(5)).await;
        assert!(*way.accepted.borrow() > before);
        for guard in guards {
            guard.unlock().await.unwrap();
        }
    }
}

/// Refuses all connections for `outage`, with a session of 30 s and leases of half of it.
async fn reconnects_soon_after(outage: Duration, ways: usize) {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxies: Vec<_> = (0..ways).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let addrs: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    let backend = backend(&format!("zk://{}", addrs.join(",")), secs(30)).await;
    let session = backend.session_id();
    let ours = over(&backend);
    let guards = hold(&ours, secs(15), 100).await;
    let theirs = registry(&server.url(), secs(60)).await;
    let awaited = theirs.obtain("awaited").lock().await.unwrap();
    let lock = ours.obtain("awaited");
    let waiting = LockOptions::new().wait(LONG);
    let waiting = tokio::spawn(async move { lock.lock_with(waiting).await });
    let operator = operator(&server).await;
    let dir = "/lock-registry/default";
    let awaited_by = async || operator.list_children(&format!("{dir}/awaited")).await.unwrap();
    eventually(LONG, async || awaited_by().await.len() == 2).await;
    let in_line = awaited_by().await;
    for proxy in &proxies {
        proxy.set_mode(Mode::Refuse).await.unwrap();
        proxy.cut_all().await;
    }
    // A real pause: the length of the outage is the subject of the test.
    sleep(outage).await;
    for proxy in &proxies {
        proxy.set_mode(Mode::Pass).await.unwrap();
    }
    let begin = Instant::now();
    let another = LockOptions::new().wait(LONG);
    let another = ours.obtain("another").lock_with(another).await.unwrap().unwrap();
    println!("{ways} ways, {outage:?}: connected after {:?}", begin.elapsed());
    assert!(begin.elapsed() < secs(3), "connected after {:?}", begin.elapsed());
    another.unlock().await.unwrap();
    last(&guards, secs(15)).await;
    assert_eq!(backend.session_id(), session);

    // The waiter is still at its position in the queue, and watches still fire.
    assert_eq!(awaited_by().await, in_line);
    awaited.unlock().await.unwrap();
    within(LONG, waiting).await.unwrap().unwrap().unwrap().unlock().await.unwrap();
    for name in operator.list_children(&format!("{dir}/held%2F0")).await.unwrap() {
        operator.delete(&format!("{dir}/held%2F0/{name}"), None).await.unwrap();
    }
    let begin = Instant::now();
    within(LONG, guards[0].lost()).await;
    assert!(begin.elapsed() < secs(4), "by its watch, not by a renewal");
    guards[1].multi().unwrap().create("/written", "").commit().await.unwrap();
}

#[tokio::test]
async fn a_server_that_was_down_for_seven_seconds_ends_no_hold_of_fifteen() {
    reconnects_soon_after(secs(7), 1).await;
}

#[tokio::test]
async fn servers_that_were_all_down_end_no_hold_of_a_longer_lease() {
    reconnects_soon_after(Duration::from_millis(6_500), 3).await;
}

#[tokio::test]
async fn closing_ends_a_session_although_its_nodes_may_not_be_deleted() {
    let server = ZooKeeperServer::start().await.unwrap();
    let operator = operator(&server).await;
    let dir = "/lock-registry/default/k";
    let open = CreateMode::Persistent.with_acls(Acls::anyone_all());
    operator.mkdir("/lock-registry/default", &open).await.unwrap();
    let rights = Permission::READ | Permission::CREATE;
    let acls = [zookeeper_client::Acl::new(rights, zookeeper_client::AuthId::anyone())];
    let options = CreateMode::Persistent.with_acls(Acls::new(&acls));
    operator.create(dir, b"", &options).await.unwrap();

    let backend = backend(&server.url(), secs(30)).await;
    let session = backend.session_id().unwrap();
    let ours = over(&backend);
    let guard = ours.obtain("k").lock().await.unwrap();
    guard.unlock().await.unwrap_err();
    assert_eq!(operator.list_children(dir).await.unwrap().len(), 1);
    ours.close(LONG).await;
    eventually(LONG, async || operator.list_children(dir).await.unwrap().is_empty()).await;
    let clients = server.clients().await.unwrap();
    assert!(clients.iter().all(|client| client.session != session), "{clients:?}");
    // Another registry can use the backend, with a new session.
    let ours = over(&backend);
    let guard = within(LONG, ours.obtain("another").lock()).await.unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_session_that_is_closed_during_an_outage_ends_after_it() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    // Too long for the session to end by its time-out.
    let backend = backend(&format!("zk://{}", proxy.addr()), LONG * 2).await;
    let session = backend.session_id().unwrap();
    let ours = over(&backend);
    ours.obtain("k").lock().await.unwrap().unlock().await.unwrap();
    let is_known = async || {
        let dump = server.ask("dump").await.unwrap();
        dump.to_lowercase().contains(&format!("{session:x}"))
    };
    assert!(is_known().await);
    proxy.set_mode(Mode::Refuse).await.unwrap();
    proxy.cut_all().await;
    // Long enough that the first client has been stopped.
    sleep(secs(3)).await;
    ours.close(secs(1)).await;
    assert!(is_known().await);
    proxy.set_mode(Mode::Pass).await.unwrap();
    eventually(LONG, async || !is_known().await).await;
}

#[tokio::test]
async fn a_waiter_keeps_its_place_in_the_queue_over_a_short_outage() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let guard = registry(&server.url(), secs(30)).await.obtain("k").lock().await.unwrap();
    let backend = backend(&format!("zk://{}", proxy.addr()), secs(30)).await;
    let lock = over(&backend).obtain("k");
    let options = LockOptions::new().lease(secs(5)).wait(LONG);
    let mut waiting = tokio::spawn(async move { lock.lock_with(options).await });
    let operator = operator(&server).await;
    let queue = async || {
        let mut names = operator.list_children("/lock-registry/default/k").await.unwrap();
        names.sort();
        names
    };
    eventually(LONG, async || queue().await.len() == 2).await;
    let before = queue().await;
    // After this time, the waiter's attempts are further apart than its lease.
    sleep(secs(25)).await;
    for _ in 0..3 {
        proxy.set_mode(Mode::Refuse).await.unwrap();
        proxy.cut_all().await;
        sleep(Duration::from_millis(700)).await;
        proxy.set_mode(Mode::Pass).await.unwrap();
        // Covers its next attempt and several runs of the removal of abandoned nodes.
        assert!(timeout(secs(3), &mut waiting).await.is_err());
        assert_eq!(queue().await, before);
    }
    guard.unlock().await.unwrap();
    drop(within(LONG, waiting).await.unwrap().unwrap().unwrap());
}
