//! An etcd cluster by URL: real members, with and without users, and the errors if they cannot be
//! reached.
#![cfg(all(feature = "etcd", target_os = "linux"))]

use std::time::Duration;

use lock_registry::{
    ConfigError, GuaranteeClass, LockError,
    backend::{BackendErrorKind, Severity},
    connect,
    etcd::Fence as _,
};
use registry_testkit::error_text;
use registry_testkit::etcd::{EtcdOptions, EtcdServer};

const CANARY: &str = "canary";

fn url(server: &EtcdServer, login: &str) -> String {
    format!("etcd://{login}{}", server.addr())
}

/// Returns the kind of the error that `url` causes. The error must not contain the password.
async fn connect_error_kind(url: &str) -> BackendErrorKind {
    let error = connect(url).await.expect_err("it cannot be opened");
    assert!(!error_text(&error).contains(CANARY), "{}", error_text(&error));
    let ConfigError::Open { store, source, .. } = &error else { panic!("{error:?}") };
    assert!(url.starts_with(&format!("{store}://")), "{error:?}");
    source.kind()
}

#[tokio::test]
async fn two_registries_of_a_cluster_exclude_each_other_and_see_the_holder() {
    let server = EtcdServer::start().await.unwrap();
    let url = format!("{}?label=worker%201&lease=60s&timeout=60s&poll=1h", url(&server, ""));
    let (one, other) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    let capabilities = one.capabilities();
    assert_eq!((capabilities.class, capabilities.fair), (GuaranteeClass::Durable, true));
    // `RegistryConfig::check` allows the same minimum.
    assert_eq!(capabilities.lease_min, Duration::from_secs(2));
    let guard = one.obtain("orders/42").try_lock().await.unwrap().unwrap();
    assert!(other.obtain("orders/42").try_lock().await.unwrap().is_none());
    let holder = other.obtain("orders/42").holders().await.unwrap().remove(0);
    assert_eq!(holder.label.as_deref(), Some("worker 1"));
    assert!(holder.lease_left.is_some_and(|left| left > Duration::from_secs(30)), "{holder:?}");
    // The deletion of the holder's queue entry ends the wait long before the poll.
    let waiter = tokio::spawn(async move {
        other.obtain("orders/42").lock().await.unwrap().unlock().await.unwrap();
    });
    guard.unlock().await.unwrap();
    waiter.await.unwrap();
    let found = one.diagnose().await.unwrap();
    assert!(found.iter().any(|finding| finding.message.contains("one member")), "{found:?}");
}

#[tokio::test]
async fn a_guard_writes_only_while_it_holds_its_lock() {
    let server = EtcdServer::start().await.unwrap();
    let (one, other) =
        (connect(&url(&server, "")).await.unwrap(), connect(&url(&server, "")).await.unwrap());
    let guard = one.obtain("a/b").lock().await.unwrap();
    let done = guard.txn().put("account", "17").get("account").get("nothing").commit().await;
    assert_eq!(done.unwrap().values, [Some(b"17".to_vec()), None]);
    other.force_release("a/b").await.unwrap();
    let next = other.obtain("a/b").lock().await.unwrap();
    next.txn().put("account", "18").commit().await.unwrap();
    // Refused whether the holder has detected the loss or not.
    let late = guard.txn().put("account", "19").delete_prefix("acc").commit().await;
    assert!(late.is_err(), "{late:?}");
    assert_eq!(server.ctl(&["get", "account", "--print-value-only"]).await.unwrap(), "18");
    next.unlock().await.unwrap();
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
}

#[tokio::test]
async fn a_user_without_the_right_password_is_refused() {
    let options = EtcdOptions::new().login("worker", CANARY);
    let server = EtcdServer::start_with(options).await.unwrap();
    let registry = connect(&url(&server, "worker:canary@")).await.unwrap();
    registry.obtain("key").lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(
        connect_error_kind(&url(&server, "worker:canary2@")).await,
        BackendErrorKind::Denied
    );
    assert_eq!(
        connect_error_kind(&url(&server, "unknown:canary@")).await,
        BackendErrorKind::Denied
    );
    assert_eq!(connect_error_kind(&url(&server, "")).await, BackendErrorKind::Denied);
    let elsewhere = url(&server, "worker:canary@") + "?namespace=elsewhere";
    assert_eq!(connect_error_kind(&elsewhere).await, BackendErrorKind::Denied);
}

#[tokio::test]
async fn an_unreachable_cluster_is_a_transient_error() {
    let mut server = EtcdServer::start().await.unwrap();
    server.kill();
    let gone = url(&server, "worker:canary@");
    assert_eq!(connect_error_kind(&gone).await, BackendErrorKind::Transient);
    let text = error_text(&connect(&gone).await.unwrap_err());
    assert!(text.contains("tcp connect error: Connection refused"), "{text}");
}

#[tokio::test]
async fn unreachable_members_are_skipped() {
    let mut gone = EtcdServer::start().await.unwrap();
    let server = EtcdServer::start().await.unwrap();
    gone.kill();
    // Repeated, so that some rounds try the unreachable member first.
    for _ in 0..8 {
        let url = format!("etcd://{},{}", gone.addr(), server.addr());
        let registry = connect(&url).await.unwrap();
        registry.obtain("key").lock().await.unwrap().unlock().await.unwrap();
        let found = registry.diagnose().await.unwrap();
        assert!(found.iter().any(|finding| finding.severity == Severity::Warning
            && finding.message.contains(&gone.addr().to_string())));
    }
}

#[tokio::test]
async fn the_layout_etcdctl_uses_the_names_of_etcdctl() {
    let server = EtcdServer::start().await.unwrap();
    let url = url(&server, "") + "?layout=etcdctl&namespace=%2Flocks";
    let registry = connect(&url).await.unwrap();
    let guard = registry.obtain("orders").lock().await.unwrap();
    let keys = server.ctl(&["get", "/locks/orders/", "--prefix", "--keys-only"]).await.unwrap();
    assert_eq!(keys.lines().filter(|line| !line.is_empty()).count(), 1, "{keys}");
    let refused = registry.obtain("orders/42").try_lock().await.unwrap_err();
    assert!(matches!(refused, LockError::InvalidKey(_)), "{refused:?}");
    guard.unlock().await.unwrap();
}

#[cfg(feature = "etcd-tls")]
#[tokio::test]
async fn connections_are_encrypted_and_verified() {
    use registry_testkit::tls::TlsFolder;

    let certificates = TlsFolder::new().unwrap();
    let server = EtcdServer::start_with(EtcdOptions::new().tls(&certificates)).await.unwrap();
    let encrypted = format!("etcds://{}", server.addr());
    let ca = certificates.ca_file().display().to_string();
    let cert = certificates.client_cert_file().display().to_string();
    let key = certificates.client_key_file().display().to_string();
    let url = format!("{encrypted}?ca={ca}&cert={cert}&key={key}");
    let registry = connect(&url).await.unwrap();
    registry.obtain("key").lock().await.unwrap().unlock().await.unwrap();
    // Without the certificate authority, without a client certificate, and without encryption.
    let without_ca = format!("{encrypted}?cert={cert}&key={key}");
    assert_eq!(connect_error_kind(&without_ca).await, BackendErrorKind::Misconfigured);
    assert_ne!(
        connect_error_kind(&format!("{encrypted}?ca={ca}")).await,
        BackendErrorKind::Protocol
    );
    assert_eq!(
        connect_error_kind(&format!("etcd://{}", server.addr())).await,
        BackendErrorKind::Transient
    );
    // A member without encryption closes the connection without a response, like a member that is
    // shutting down.
    let plain = EtcdServer::start().await.unwrap();
    let kind = connect_error_kind(&format!("etcds://{}?ca={ca}", plain.addr())).await;
    assert_eq!(kind, BackendErrorKind::Transient);
}
