//! Outages of one server: a client reconnects and keeps its session, and `close` ends a session.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::select_all;
use registry_core::{LockGuard, LockOptions, Registry};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_testkit::{eventually, within};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use zookeeper_client::{Acls, CreateMode, Permission};

use super::support::{backend, operator, registry, registry_over, secs};
use registry_zk::Multi as _;

/// A proxy to a server. On request, its open connections stay open but forward nothing. New
/// connections work.
struct SilencingProxy {
    addr: SocketAddr,
    silence: watch::Sender<()>,
    accepted: watch::Receiver<u32>,
    _forwarding: JoinSet<()>,
}

impl SilencingProxy {
    async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (silence, _) = watch::channel(());
        let (count, accepted) = watch::channel(0);
        let mut forwarding = JoinSet::new();
        let silence_sender = silence.clone();
        forwarding.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let mut silence = silence_sender.subscribe();
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
        Self { addr, silence, accepted, _forwarding: forwarding }
    }
}

async fn acquire_all(registry: &Registry, lease: Duration, count: usize) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for number in 0..count {
        let lock = registry.obtain(&format!("held/{number}"));
        let options = LockOptions::new().lease(lease).wait(LONG);
        guards.push(lock.lock_with(options).await.unwrap());
    }
    guards
}

/// Asserts that no guard is lost for two leases.
async fn assert_all_stay_held(guards: &[LockGuard], lease: Duration) {
    let any = select_all(guards.iter().map(|guard| Box::pin(guard.lost())));
    assert!(timeout(lease * 2, any).await.is_err(), "a lock was lost");
    assert!(guards.iter().all(LockGuard::is_held));
}

#[tokio::test]
async fn an_unresponsive_connection_is_replaced_before_a_lease_of_five_seconds_ends() {
    let server = ZooKeeperServer::start().await.unwrap();
    for session in [secs(10), secs(30)] {
        let mut proxy = SilencingProxy::start(server.addr()).await;
        let client = registry(&format!("zk://{}", proxy.addr), session).await;
        let guards = acquire_all(&client, secs(5), 5).await;
        let before = *proxy.accepted.borrow_and_update();
        proxy.silence.send(()).unwrap();
        assert_all_stay_held(&guards, secs(5)).await;
        assert!(*proxy.accepted.borrow() > before);
        for guard in guards {
            guard.unlock().await.unwrap();
        }
    }
}

/// Refuses all connections for `outage`, with a session of 30 s and leases of 15 s, and asserts
/// that the client reconnects within 6 s.
async fn assert_fast_reconnect_after(outage: Duration, server_count: usize) {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxies: Vec<_> =
        (0..server_count).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let addrs: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    let backend = backend(&format!("zk://{}", addrs.join(",")), secs(30)).await;
    let session = backend.session_id();
    let client = registry_over(&backend);
    let guards = acquire_all(&client, secs(15), 100).await;
    let other_client = registry(&server.url(), secs(60)).await;
    let contended = other_client.obtain("awaited").lock().await.unwrap();
    let lock = client.obtain("awaited");
    let options = LockOptions::new().wait(LONG);
    let waiter_task = tokio::spawn(async move { lock.try_lock_with(options).await });
    let operator = operator(&server).await;
    let dir = "/lock-registry/default";
    let contenders = async || operator.list_children(&format!("{dir}/awaited")).await.unwrap();
    eventually(LONG, async || contenders().await.len() == 2).await;
    let contenders_before = contenders().await;
    for proxy in &proxies {
        proxy.set_mode(ProxyMode::Refuse).await.unwrap();
        proxy.cut_all().await;
    }
    // A real pause: the length of the outage is the subject of the test.
    sleep(outage).await;
    for proxy in &proxies {
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
    }
    let begin = Instant::now();
    let other = LockOptions::new().wait(LONG);
    let other = client.obtain("another").lock_with(other).await.unwrap();
    println!("{server_count} servers, {outage:?}: connected after {:?}", begin.elapsed());
    assert!(begin.elapsed() < secs(6), "connected after {:?}", begin.elapsed());
    other.unlock().await.unwrap();
    assert_all_stay_held(&guards, secs(15)).await;
    assert_eq!(backend.session_id(), session);

    // The waiter is still at its position in the queue, and watches still fire.
    assert_eq!(contenders().await, contenders_before);
    contended.unlock().await.unwrap();
    within(LONG, waiter_task).await.unwrap().unwrap().unwrap().unlock().await.unwrap();
    for name in operator.list_children(&format!("{dir}/held%2F0")).await.unwrap() {
        operator.delete(&format!("{dir}/held%2F0/{name}"), None).await.unwrap();
    }
    let begin = Instant::now();
    within(LONG, guards[0].lost()).await;
    assert!(begin.elapsed() < secs(4), "the watch reports the loss before a renewal does");
    guards[1].multi().unwrap().create("/written", "").commit().await.unwrap();
}

#[tokio::test]
async fn an_outage_of_seven_seconds_ends_no_lease_of_fifteen_seconds() {
    assert_fast_reconnect_after(secs(7), 1).await;
}

#[tokio::test]
async fn an_outage_of_three_servers_ends_no_lease_of_fifteen_seconds() {
    assert_fast_reconnect_after(Duration::from_millis(6_500), 3).await;
}

#[tokio::test]
async fn close_ends_a_session_whose_nodes_the_client_may_not_delete() {
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
    let client = registry_over(&backend);
    let guard = client.obtain("k").lock().await.unwrap();
    guard.unlock().await.unwrap_err();
    assert_eq!(operator.list_children(dir).await.unwrap().len(), 1);
    _ = client.close(LONG).await;
    eventually(LONG, async || operator.list_children(dir).await.unwrap().is_empty()).await;
    let clients = server.clients().await.unwrap();
    assert!(clients.iter().all(|client| client.session != session), "{clients:?}");
    // Another registry can use the backend, with a new session.
    let client = registry_over(&backend);
    let guard = within(LONG, client.obtain("another").lock()).await.unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_session_that_is_closed_during_an_outage_ends_after_it() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    // Too long for the session to end by its time-out.
    let backend = backend(&format!("zk://{}", proxy.addr()), LONG * 2).await;
    let session = backend.session_id().unwrap();
    let client = registry_over(&backend);
    client.obtain("k").lock().await.unwrap().unlock().await.unwrap();
    let is_session_listed = async || {
        let dump = server.send_command("dump").await.unwrap();
        dump.to_lowercase().contains(&format!("{session:x}"))
    };
    assert!(is_session_listed().await);
    proxy.set_mode(ProxyMode::Refuse).await.unwrap();
    proxy.cut_all().await;
    // Long enough for the session to stop its first ZooKeeper client.
    sleep(secs(3)).await;
    _ = client.close(secs(1)).await;
    assert!(is_session_listed().await);
    proxy.set_mode(ProxyMode::Pass).await.unwrap();
    eventually(LONG, async || !is_session_listed().await).await;
}

#[tokio::test]
async fn a_waiter_keeps_its_queue_position_during_a_short_outage() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let guard = registry(&server.url(), secs(30)).await.obtain("k").lock().await.unwrap();
    let backend = backend(&format!("zk://{}", proxy.addr()), secs(30)).await;
    let lock = registry_over(&backend).obtain("k");
    let options = LockOptions::new().lease(secs(5)).wait(LONG);
    let mut waiter_task = tokio::spawn(async move { lock.try_lock_with(options).await });
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
        proxy.set_mode(ProxyMode::Refuse).await.unwrap();
        proxy.cut_all().await;
        sleep(Duration::from_millis(700)).await;
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        // Covers the waiter's next attempt and several runs of the removal of abandoned nodes.
        assert!(timeout(secs(3), &mut waiter_task).await.is_err());
        assert_eq!(queue().await, before);
    }
    guard.unlock().await.unwrap();
    drop(within(LONG, waiter_task).await.unwrap().unwrap().unwrap());
}
