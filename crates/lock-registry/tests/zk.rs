//! ZooKeeper by URL: real servers, with and without logins, and the errors if they cannot be used.
#![cfg(feature = "zk")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use lock_registry::{
    BackendErrorKind, ConfigError, GuaranteeClass, LockRegistry, Registry, connect,
};
use registry_testkit::error_text;
use registry_testkit::zookeeper::{ZooKeeperOptions, ZooKeeperServer};

const CANARY: &str = "canary";

async fn server() -> ZooKeeperServer {
    ZooKeeperServer::start().await.expect("ZooKeeper starts")
}

/// Returns the error that `url` causes. It must not contain the password.
async fn refused(url: &str) -> (BackendErrorKind, String) {
    let error = connect(url).await.expect_err("it cannot be opened");
    assert!(!error_text(&error).contains(CANARY), "{}", error_text(&error));
    let ConfigError::Open { source, .. } = &error else { panic!("{error:?}") };
    (source.kind(), source.to_string())
}

async fn locks_and_unlocks(registry: &Registry) {
    let guard = registry.obtain("key").try_lock().await.unwrap().expect("nobody holds it");
    assert!(guard.fencing_token().is_some());
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_server_excludes_two_registries_and_tells_who_holds() {
    let server = server().await;
    let url = format!("{}?label=worker%201&lease=20s&timeout=60s&poll=1h", server.url());
    let (one, other) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    assert_eq!(one.capabilities().class, GuaranteeClass::A);
    assert_eq!(one.capabilities().lease_max, Duration::from_secs(20));
    let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
    assert!(other.obtain("key").try_lock().await.unwrap().is_none());
    let holder = other.obtain("key").holder().await.unwrap().unwrap();
    assert_eq!(holder.label.as_deref(), Some("worker 1"));
    // The watch ends the wait long before the poll.
    let waiter = tokio::spawn(async move {
        other.obtain("key").lock().await.unwrap().unlock().await.unwrap();
        other
    });
    guard.unlock().await.unwrap();
    let other = waiter.await.unwrap();
    assert!(other.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn namespaces_roots_and_layouts_keep_locks_apart() {
    let server = server().await;
    let url = server.url();
    let here = connect(&url).await.unwrap();
    let guard = here.obtain("key").try_lock().await.unwrap().unwrap();
    for elsewhere in ["?namespace=shop", "?root=/elsewhere", "?layout=curator"] {
        locks_and_unlocks(&connect(&format!("{url}{elsewhere}")).await.unwrap()).await;
    }
    // The defaults can also be given explicitly.
    for same in ["?namespace=default", "?root=/lock-registry", "/?layout=native&naming=kazoo"] {
        let same = connect(&format!("{url}{same}")).await.unwrap();
        assert!(same.obtain("key").try_lock().await.unwrap().is_none());
    }
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_chroot_must_be_there_and_keeps_everything_below_it() {
    let server = server().await;
    let (kind, says) = refused(&format!("{}/app", server.url())).await;
    assert_eq!(kind, BackendErrorKind::Misconfigured, "{says}");
    assert!(says.contains("make it"), "{says}");
    // A lock of the Curator layout creates the chroot's node.
    let outside = connect(&format!("{}?layout=curator&root=/", server.url())).await.unwrap();
    let parent = outside.obtain("app").lock().await.unwrap();
    let inside = connect(&format!("{}/app?root=/x", server.url())).await.unwrap();
    let guard = inside.obtain("key").lock().await.unwrap();
    let same = connect(&format!("{}?root=/app/x", server.url())).await.unwrap();
    assert!(same.obtain("key").try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
    parent.unlock().await.unwrap();
}

#[tokio::test]
async fn a_lease_is_half_of_the_session_that_the_servers_grant() {
    let options = ZooKeeperOptions::new().settings(&["maxSessionTimeout=4000"]);
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let url = server.url();
    let as_it_comes = connect(&url).await.unwrap();
    assert_eq!(as_it_comes.capabilities().lease_max, Duration::from_secs(2));
    locks_and_unlocks(&as_it_comes).await;
    let (kind, says) = refused(&format!("{url}?lease=10s")).await;
    assert_eq!(kind, BackendErrorKind::Misconfigured);
    assert!(says.contains("maxSessionTimeout") && says.contains("2s"), "{says}");
    locks_and_unlocks(&connect(&format!("{url}?lease=1s&session=3s")).await.unwrap()).await;
}

#[tokio::test]
async fn nodes_can_be_kept_to_those_who_log_in_alike() {
    let server = server().await;
    let url = |login: &str, rest: &str| {
        format!("zk://{login}{}?acl=creator&root=/private{rest}", server.addr())
    };
    let ours = connect(&url("app:canary@", "")).await.unwrap();
    let guard = ours.obtain("key").lock().await.unwrap();
    let again = connect(&url("", "&auth=digest:app:canary")).await.unwrap();
    assert!(again.obtain("key").try_lock().await.unwrap().is_none());
    let strangers = connect(&url("other:canary@", "")).await.unwrap();
    let error = strangers.obtain("key").try_lock().await.unwrap_err();
    let text = error_text(&error);
    assert!(text.contains("may not do that") && !text.contains(CANARY), "{text}");
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn servers_that_are_not_there_are_told_as_such() {
    let mut server = server().await;
    server.kill();
    let (kind, says) = refused(&format!("zk://app:canary@{}", server.addr())).await;
    assert_eq!(kind, BackendErrorKind::Transient, "{says}");
}

#[tokio::test]
async fn what_does_not_fit_is_refused_before_anything_is_sent() {
    for (options, hint) in [
        ("lease=10s&session=15s", "less than twice the `lease`"),
        ("session=1ms", "less than the least"),
        ("layout=spring", "`native` and `curator`"),
        ("naming=zoo", "did you mean"),
        ("namespace=", "is empty"),
        ("auth=canary", "SCHEME:CREDENTIALS"),
        ("acl=canary", "SCHEME:ID:RIGHTS"),
        // Without a login, the creator has no identity.
        ("acl=creator", "need a login"),
        ("ca=x.pem", "encrypted"),
        ("purge_after=1h", "for sqlite"),
    ] {
        let error = connect(&format!("zk://127.0.0.1:1?{options}")).await.unwrap_err();
        let text = error_text(&error);
        assert!(text.contains(hint) && !text.contains(CANARY), "{options}: {text}");
    }
}

#[cfg(feature = "zk-tls")]
mod encrypted {
    use registry_testkit::tls::TlsFolder;

    use super::*;

    #[tokio::test]
    async fn an_encrypted_server_is_believed_by_its_certificate_alone() {
        let folder = TlsFolder::new().unwrap();
        let options = ZooKeeperOptions::new().tls(&folder);
        let server = ZooKeeperServer::start_with(options).await.unwrap();
        let ca = |ca: std::path::PathBuf| {
            format!("zks://{}?ca={}&connect_timeout=20s", server.addr(), ca.display())
        };
        locks_and_unlocks(&connect(&ca(folder.ca_file())).await.unwrap()).await;
        let stranger = TlsFolder::new().unwrap();
        refused(&ca(stranger.ca_file())).await;
        // Over an unencrypted connection the server does not answer.
        refused(&format!("zk://{}?connect_timeout=2s", server.addr())).await;
    }

    #[tokio::test]
    async fn a_server_that_wants_a_certificate_gets_ours() {
        let folder = TlsFolder::new().unwrap();
        let options = ZooKeeperOptions::new().tls(&folder).settings(&["ssl.clientAuth=need"]);
        let server = ZooKeeperServer::start_with(options).await.unwrap();
        let url = format!("zks://{}?ca={}", server.addr(), folder.ca_file().display());
        let (cert, key) = (folder.client_cert_file(), folder.client_key_file());
        let ours = format!("{url}&cert={}&key={}", cert.display(), key.display());
        locks_and_unlocks(&connect(&format!("{ours}&connect_timeout=20s")).await.unwrap()).await;
        refused(&format!("{url}&connect_timeout=3s")).await;
    }
}
