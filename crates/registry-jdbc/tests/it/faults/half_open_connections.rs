//! Half-open connections: the TCP connection is still open, but no byte arrives in either
//! direction.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, LockGuard, Registry};
use registry_jdbc::{MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig};
use registry_testkit::proxy::FaultProxy;
use registry_testkit::{eventually, within};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::server::{Server, ServerKind, TEST_TIMEOUT};

const LEASE: Duration = Duration::from_secs(5);
/// The time limit of all acquisitions together: three times the engine's default timeout.
const DURATION_MAX: Duration = Duration::from_secs(9);

/// Opens a registry with the default timeouts.
async fn registry(url: &str) -> Registry {
    let backend: Arc<dyn LockBackend> = if url.starts_with("postgres") {
        Arc::new(PostgresBackend::open(PostgresConfig::from_url(url).unwrap()).await.unwrap())
    } else {
        Arc::new(MySqlBackend::open(MySqlConfig::from_url(url).unwrap()).await.unwrap())
    };
    Registry::builder(backend).lease(LEASE).build().unwrap()
}

/// Runs this many callers at once. Each locks and unlocks its own key.
async fn lock_many(registry: &Registry, callers: usize) {
    let mut tasks = JoinSet::new();
    for number in 0..callers {
        let lock = registry.obtain(&format!("crowd/{number}"));
        tasks.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    }
    within(TEST_TIMEOUT, tasks.join_all()).await;
}

/// Returns a registry that connects through the proxy, with a guard and several idle connections.
/// All connections are half-open.
async fn half_open(kind: ServerKind) -> (Server, FaultProxy, Registry, LockGuard) {
    let server = kind.start().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let first_registry = registry(&server.url_via(proxy.addr())).await;
    let guard = first_registry.obtain("held").lock().await.unwrap();
    eventually(TEST_TIMEOUT, async || {
        lock_many(&first_registry, 16).await;
        proxy.counts().live >= 4
    })
    .await;
    proxy.silence_connections();
    (server, proxy, first_registry, guard)
}

async fn a_lease_survives_half_open_connections(kind: ServerKind) {
    let (_server, _proxy, _registry, guard) = half_open(kind).await;
    let lost = timeout(LEASE * 3, guard.lost()).await;
    assert!(lost.is_err(), "lost while connections were half open: {lost:?}");
    guard.unlock().await.unwrap();
}

async fn acquisitions_continue_over_half_open_connections(kind: ServerKind) {
    let (_server, _proxy, first_registry, guard) = half_open(kind).await;
    let began = Instant::now();
    lock_many(&first_registry, 8).await;
    let took = began.elapsed();
    println!("{kind:?}: eight acquisitions and releases took {took:?}");
    assert!(took < DURATION_MAX, "{took:?}");
    assert!(guard.is_held(), "lost while connections were half open");
    guard.unlock().await.unwrap();
}

on_both_servers! {
    a_lease_survives_half_open_connections,
    acquisitions_continue_over_half_open_connections,
}
