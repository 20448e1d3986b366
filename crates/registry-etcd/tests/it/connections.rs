//! Connections to members that drop packets, open no stream, enable authentication, or have an
//! untrusted certificate. Callers wait no longer than necessary, and errors contain the cause.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{Key, LockAdmin as _, Registry};
use registry_etcd::{EtcdBackend, EtcdConfig, Layout};
use registry_testkit::etcd::{EtcdOptions, EtcdServer};
use registry_testkit::eventually;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use tokio::time::{Instant, sleep};

fn config_at(addr: SocketAddr) -> EtcdConfig {
    EtcdConfig::new([(addr.ip().to_string(), addr.port())])
}

fn registry(backend: EtcdBackend, lease: Duration) -> Registry {
    Registry::builder(Arc::new(backend)).lease(lease).build().unwrap()
}

/// The usual order when authentication is enabled: all clients are configured with a login, then
/// the members require it. No client needs a restart.
#[tokio::test]
async fn a_client_logs_in_when_authentication_is_enabled_later() {
    let server = EtcdServer::start().await.unwrap();
    let config = config_at(server.addr()).with_login("worker", "opensesame");
    let (first_client, second_client) =
        (EtcdBackend::open(config.clone()).await, EtcdBackend::open(config).await);
    let (first_client, second_client) = (first_client.unwrap(), second_client.unwrap());
    let (first_client, second_client) =
        (registry(first_client, LEASE), registry(second_client, LEASE));
    let guard = first_client.obtain("key").lock().await.unwrap();
    let lock = second_client.obtain("key");
    let waiting = tokio::spawn(async move { lock.lock().await });
    for args in [
        &["user", "add", "root:root"][..],
        &["role", "add", "root"],
        &["user", "grant-role", "root", "root"],
        &["user", "add", "worker:opensesame"],
        &["user", "grant-role", "worker", "root"],
        &["auth", "enable"],
    ] {
        server.ctl(args).await.unwrap();
    }
    // Long enough for a lease without renewals to end.
    sleep(LEASE * 2).await;
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
    waiting.await.unwrap().unwrap().unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_callers_share_one_failed_connection_attempt() {
    let options = EtcdOptions::new().login("worker", "opensesame");
    let server = EtcdServer::start_with(options).await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let config = config_at(proxy.addr()).with_login("worker", "opensesame");
    // Verifying a password is slow on a busy machine.
    let config = config.with_response_timeout(Duration::from_secs(2));
    let backend = EtcdBackend::open(config).await.unwrap();
    let key = Key::new("key").unwrap();
    proxy.set_mode(ProxyMode::BlackHole).await.unwrap();
    // The response times out, and the client drops the connection.
    backend.inspect(&key).await.unwrap_err();
    let started = Instant::now();
    for response in join_all((0..60).map(|_| backend.inspect(&key))).await {
        assert!(response.unwrap_err().is_retryable());
    }
    let waited = started.elapsed();
    assert!(waited < Duration::from_secs(40), "an attempt takes 2 s, all callers took {waited:?}");
    proxy.set_mode(ProxyMode::Pass).await.unwrap();
    assert_eq!(
        eventually(Duration::from_secs(60), async || backend.inspect(&key).await).await,
        Vec::new()
    );
}

/// Members may limit transactions to fewer operations than there are locks to renew.
#[tokio::test]
async fn renewals_are_split_when_members_limit_transactions() {
    let options = EtcdOptions::new().args(&["--max-txn-ops", "7"]);
    let server = EtcdServer::start_with(options).await.unwrap();
    let registry = registry(EtcdBackend::open(config_at(server.addr())).await.unwrap(), LEASE);
    let mut guards = Vec::new();
    for n in 0..30 {
        guards.push(registry.obtain(&format!("key-{n}")).lock().await.unwrap());
    }
    // Long enough for a lease without renewals to end.
    sleep(LEASE * 2).await;
    for guard in guards {
        assert!(guard.is_held());
        guard.unlock().await.unwrap();
    }
}

/// A member that accepts connections and opens no stream must not block the client, because no
/// caller receives a response meanwhile.
#[tokio::test]
async fn a_member_that_does_not_open_a_stream_is_replaced() {
    let server = EtcdServer::start().await.unwrap();
    let proxies = [server.addr(); 2].map(|addr| FaultProxy::start(addr).unwrap());
    let members = proxies.iter().map(|proxy| (proxy.addr().ip().to_string(), proxy.addr().port()));
    let backend = EtcdBackend::open(EtcdConfig::new(members)).await.unwrap();
    let registry = registry(backend, LEASE);
    let guard = registry.obtain("key").lock().await.unwrap();
    sleep(Duration::from_millis(300)).await;
    let (current, other) = if proxies[0].counts().live > 0 {
        (&proxies[0], &proxies[1])
    } else {
        (&proxies[1], &proxies[0])
    };
    other.set_mode(ProxyMode::BlackHole).await.unwrap();
    current.set_mode(ProxyMode::Refuse).await.unwrap();
    current.cut_all().await;
    sleep(Duration::from_millis(200)).await;
    current.set_mode(ProxyMode::Pass).await.unwrap();
    sleep(LEASE * 2).await;
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
}

/// The network drops packets without an error, like a firewall that has lost a connection's state.
#[tokio::test]
async fn short_leases_survive_a_silent_connection() {
    let server = EtcdServer::start().await.unwrap();
    let proxies = [server.addr(); 2].map(|addr| FaultProxy::start(addr).unwrap());
    let members = proxies.iter().map(|proxy| (proxy.addr().ip().to_string(), proxy.addr().port()));
    let backend = EtcdBackend::open(EtcdConfig::new(members)).await.unwrap();
    let registry = registry(backend, Duration::from_secs(5));
    let mut guards = Vec::new();
    for n in 0..100 {
        // Spreads the renewals over time, so that the connection becomes silent in every phase of
        // a renewal.
        guards.push(registry.obtain(&format!("key-{n}")).lock().await.unwrap());
        sleep(Duration::from_millis(15)).await;
    }
    for _ in 0..3 {
        let [first, second] = &proxies;
        let (current, other) =
            if first.counts().live > 0 { (first, second) } else { (second, first) };
        current.set_mode(ProxyMode::BlackHole).await.unwrap();
        sleep(Duration::from_secs(5)).await;
        let lost = guards.iter().filter(|guard| !guard.is_held()).count();
        assert_eq!(lost, 0, "the other connection is used in time");
        assert!(other.counts().live > 0);
        current.set_mode(ProxyMode::Pass).await.unwrap();
        current.cut_all().await;
    }
    registry.obtain("another").lock().await.unwrap().unlock().await.unwrap();
}

/// A waiter cannot distinguish a silent connection from a connection without events.
#[tokio::test]
async fn a_waiter_with_a_silent_connection_is_granted_the_lock() {
    let server = EtcdServer::start().await.unwrap();
    let holder = registry(EtcdBackend::open(config_at(server.addr())).await.unwrap(), LEASE);
    let guard = holder.obtain("key").lock().await.unwrap();
    let proxies = [server.addr(); 2].map(|addr| FaultProxy::start(addr).unwrap());
    let members = proxies.iter().map(|proxy| (proxy.addr().ip().to_string(), proxy.addr().port()));
    let waiter = EtcdBackend::open(EtcdConfig::new(members)).await.unwrap();
    // The lease is so long that no keep-alive detects the silence either.
    let lock = registry(waiter, Duration::from_secs(3_600)).obtain("key");
    let waiting = tokio::spawn(async move { lock.lock().await });
    let queued = async || {
        let names = server.ctl(&["get", "lock-registry/key/", "--prefix", "--keys-only"]).await;
        let names = names.unwrap();
        let count = names.lines().filter(|line| !line.is_empty()).count();
        if count == 2 { Ok(()) } else { Err(format!("{count} entries")) }
    };
    eventually(Duration::from_secs(60), queued).await;
    // Long enough for the member to confirm the watch.
    sleep(Duration::from_secs(1)).await;
    let [first, second] = &proxies;
    let current = if first.counts().live > 0 { first } else { second };
    current.set_mode(ProxyMode::BlackHole).await.unwrap();
    guard.unlock().await.unwrap();
    let granted = registry_testkit::within(Duration::from_secs(60), waiting).await.unwrap();
    granted.unwrap().unlock().await.unwrap();
}

/// In the etcdctl layout, other programs may store any keys next to the locks.
#[tokio::test]
async fn a_list_ignores_any_number_of_other_keys() {
    let server = EtcdServer::start().await.unwrap();
    let config = config_at(server.addr()).with_layout(Layout::Etcdctl).with_namespace("shared");
    let backend = EtcdBackend::open(config).await.unwrap();
    let large = "x".repeat(100_000);
    for number in 0..60 {
        server.ctl(&["put", &format!("shared/file/{number}.txt"), &large]).await.unwrap();
    }
    let backend = Arc::new(backend);
    let registry = Registry::builder(Arc::clone(&backend) as _).build().unwrap();
    let guard = registry.obtain("key").lock().await.unwrap();
    let listed = backend.list().await.unwrap();
    assert_eq!(listed.iter().map(|holder| holder.key.as_str()).collect::<Vec<_>>(), ["key"]);
    guard.unlock().await.unwrap();
}

#[cfg(feature = "tls")]
mod encrypted {
    use registry_core::BackendErrorKind::{Denied, Misconfigured, Transient};
    use registry_testkit::eventually;
    use registry_testkit::tls::TlsFolder;

    use super::*;

    #[tokio::test]
    async fn certificate_errors_are_reported() {
        let (trusted, untrusted) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
        let server = EtcdServer::start_with(EtcdOptions::new().tls(&trusted)).await.unwrap();
        let pem = |path| std::fs::read(path).unwrap();
        let authority =
            |of: &TlsFolder| config_at(server.addr()).with_certificate_authority(pem(of.ca_file()));
        let with_client_cert = |config: EtcdConfig, of: &TlsFolder| {
            config.with_client_certificate(pem(of.client_cert_file()), pem(of.client_key_file()))
        };
        EtcdBackend::open(with_client_cert(authority(&trusted), &trusted)).await.unwrap();
        for (config, kind, what) in [
            (with_client_cert(authority(&untrusted), &trusted), Misconfigured, "another authority"),
            (authority(&trusted), Denied, "no client certificate"),
            (
                with_client_cert(authority(&trusted), &untrusted),
                Denied,
                "a certificate of another authority",
            ),
            (config_at(server.addr()), Transient, "not encrypted"),
        ] {
            // The connection may be lost before the client has read the member's alert.
            let reported = async || match EtcdBackend::open(config.clone()).await {
                Err(error) if error.kind() == kind => Ok(()),
                Err(error) => {
                    assert_eq!(error.kind(), Transient, "{what}: {error:?}");
                    Err(format!("{error:?}"))
                }
                Ok(_) => panic!("{what}: connected"),
            };
            eventually(LONG, reported).await;
        }
    }
}

/// Sufficient on any machine; reached only by a failing test.
#[cfg(feature = "tls")]
const LONG: Duration = Duration::from_secs(60);
/// Short, so that tests of expiring leases stay fast.
const LEASE: Duration = Duration::from_secs(3);
