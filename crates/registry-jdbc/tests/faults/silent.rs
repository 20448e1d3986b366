//! Half-open connections: the peer is gone, but the connection was not closed.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, LockGuard, LockRegistry, Registry};
use registry_jdbc::{MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig};
use registry_testkit::proxy::FaultProxy;
use registry_testkit::{eventually, within};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::server::{Kind, LONG, Server};

const LEASE: Duration = Duration::from_secs(5);
/// The time limit of an acquisition: the engine's own timeout, and one retry.
const PROMPT: Duration = Duration::from_secs(9);

/// Uses the default timeouts.
async fn registry(url: &str) -> Registry {
    let backend: Arc<dyn LockBackend> = if url.starts_with("postgres") {
        Arc::new(PostgresBackend::open(PostgresConfig::from_url(url).unwrap()).await.unwrap())
    } else {
        Arc::new(MySqlBackend::open(MySqlConfig::from_url(url).unwrap()).await.unwrap())
    };
    Registry::builder(backend).lease(LEASE).build().unwrap()
}

/// Runs this many callers at once; each locks and unlocks its own key.
async fn crowd(registry: &Registry, callers: usize) {
    let mut crowd = JoinSet::new();
    for number in 0..callers {
        let lock = registry.obtain(&format!("crowd/{number}"));
        crowd.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    within(LONG, crowd.join_all()).await;
}

/// Returns a registry that connects through the proxy, with a guard and several idle connections.
/// All connections are half-open.
async fn half_open(kind: Kind) -> (Server, FaultProxy, Registry, LockGuard) {
    let server = kind.start().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let ours = registry(&server.url_by(proxy.addr())).await;
    let guard = ours.obtain("held").lock().await.unwrap();
    eventually(LONG, async || {
        crowd(&ours, 16).await;
        proxy.counts().live >= 4
    })
    .await;
    proxy.silence_living();
    (server, proxy, ours, guard)
}

async fn a_lease_survives_connections_that_are_half_open(kind: Kind) {
    let (_server, _proxy, _ours, guard) = half_open(kind).await;
    let lost = timeout(LEASE * 3, guard.lost()).await;
    assert!(lost.is_err(), "lost while connections were half open: {lost:?}");
    guard.unlock().await.unwrap();
}

async fn acquisitions_go_on_over_connections_that_are_half_open(kind: Kind) {
    let (_server, _proxy, ours, guard) = half_open(kind).await;
    let began = Instant::now();
    crowd(&ours, 8).await;
    let took = began.elapsed();
    println!("{kind:?}: eight acquisitions and releases took {took:?}");
    assert!(took < PROMPT, "{took:?}");
    assert!(guard.is_held(), "lost while connections were half open");
    guard.unlock().await.unwrap();
}

on_both_servers! {
    a_lease_survives_connections_that_are_half_open,
    acquisitions_go_on_over_connections_that_are_half_open,
}
