//! ZooKeeper by URL: real servers, with and without logins, and the errors if they cannot be used.
#![cfg(feature = "zk")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use lock_registry::{ConfigError, GuaranteeClass, Registry, backend::BackendErrorKind, connect};
use registry_testkit::error_text;
use registry_testkit::zookeeper::{ZooKeeperOptions, ZooKeeperServer};

const CANARY: &str = "canary";

async fn server() -> ZooKeeperServer {
    ZooKeeperServer::start().await.expect("ZooKeeper starts")
}

/// Returns the error that `url` causes. It must not contain the password.
async fn connect_error(url: &str) -> (BackendErrorKind, String) {
    let error = connect(url).await.expect_err("it cannot be opened");
    assert!(!error_text(&error).contains(CANARY), "{}", error_text(&error));
    let ConfigError::Open { source, .. } = &error else { panic!("{error:?}") };
    (source.kind(), source.to_string())
}

async fn assert_lock_and_unlock(registry: &Registry) {
    let guard = registry.obtain("key").try_lock().await.unwrap().expect("the key is not locked");
    assert!(guard.fencing_token().get() > 0);
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn two_registries_of_a_server_exclude_each_other_and_see_the_holder() {
    let server = server().await;
    let url = format!("{}?label=worker%201&lease=20s&timeout=60s&poll=1h", server.url());
    let (one, other) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    assert_eq!(one.capabilities().class, GuaranteeClass::Durable);
    assert_eq!(one.capabilities().lease_max, Duration::from_secs(20));
    let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
    assert!(other.obtain("key").try_lock().await.unwrap().is_none());
    let holder = other.obtain("key").holders().await.unwrap().remove(0);
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
async fn locks_in_different_namespaces_roots_and_layouts_are_independent() {
    let server = server().await;
    let url = server.url();
    let here = connect(&url).await.unwrap();
    let guard = here.obtain("key").try_lock().await.unwrap().unwrap();
    for elsewhere in ["?namespace=shop", "?root=/elsewhere", "?layout=curator"] {
        assert_lock_and_unlock(&connect(&format!("{url}{elsewhere}")).await.unwrap()).await;
    }
    // The defaults can also be given explicitly.
    for same in ["?namespace=default", "?root=/lock-registry", "/?layout=native&naming=kazoo"] {
        let same = connect(&format!("{url}{same}")).await.unwrap();
        assert!(same.obtain("key").try_lock().await.unwrap().is_none());
    }
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_chroot_must_exist_and_contains_all_nodes() {
    let server = server().await;
    let (kind, message) = connect_error(&format!("{}/app", server.url())).await;
    assert_eq!(kind, BackendErrorKind::Misconfigured, "{message}");
    assert!(message.contains("create it"), "{message}");
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
    let default_session = connect(&url).await.unwrap();
    assert_eq!(default_session.capabilities().lease_max, Duration::from_secs(2));
    assert_lock_and_unlock(&default_session).await;
    let (kind, message) = connect_error(&format!("{url}?lease=10s")).await;
    assert_eq!(kind, BackendErrorKind::Misconfigured);
    assert!(message.contains("maxSessionTimeout") && message.contains("2s"), "{message}");
    assert_lock_and_unlock(&connect(&format!("{url}?lease=1s&session=3s")).await.unwrap()).await;
}

#[tokio::test]
async fn an_acl_restricts_nodes_to_clients_with_the_same_login() {
    let server = server().await;
    let url = |login: &str, rest: &str| {
        format!("zk://{login}{}?acl=creator&root=/private{rest}", server.addr())
    };
    let client = connect(&url("app:canary@", "")).await.unwrap();
    let guard = client.obtain("key").lock().await.unwrap();
    let again = connect(&url("", "&auth=digest:app:canary")).await.unwrap();
    assert!(again.obtain("key").try_lock().await.unwrap().is_none());
    let other_login = connect(&url("other:canary@", "")).await.unwrap();
    let error = other_login.obtain("key").try_lock().await.unwrap_err();
    let text = error_text(&error);
    assert!(text.contains("this login lacks a required right") && !text.contains(CANARY), "{text}");
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn an_unreachable_zookeeper_is_a_transient_error() {
    let mut server = server().await;
    server.kill();
    let (kind, message) = connect_error(&format!("zk://app:canary@{}", server.addr())).await;
    assert_eq!(kind, BackendErrorKind::Transient, "{message}");
}

#[tokio::test]
async fn an_invalid_combination_of_options_is_refused_before_any_io() {
    for (options, hint) in [
        ("lease=10s&session=15s", "less than twice the `lease`"),
        ("session=1ms", "less than the minimum"),
        ("layout=spring", "`native` and `curator`"),
        ("naming=zoo", "did you mean"),
        ("namespace=", "is empty"),
        ("auth=canary", "SCHEME:CREDENTIALS"),
        ("acl=canary", "SCHEME:ID:RIGHTS"),
        // Without a login, the creator has no identity.
        ("acl=creator", "requires a login"),
        ("ca=x.pem", "encrypted"),
        ("purge_after=1h", "option of sqlite"),
    ] {
        let error = connect(&format!("zk://127.0.0.1:1?{options}")).await.unwrap_err();
        let text = error_text(&error);
        assert!(text.contains(hint) && !text.contains(CANARY), "{options}: {text}");
    }
}

#[cfg(feature = "zk-tls")]
mod encrypted {
    use std::sync::Arc;

    use lock_registry::zk::{ZkBackend, ZkConfig};
    use registry_core::config::BackendConfig as _;
    use registry_testkit::eventually;
    use registry_testkit::tls::TlsFolder;

    use super::*;

    #[tokio::test]
    async fn a_server_with_an_untrusted_certificate_is_refused() {
        let directory = TlsFolder::new().unwrap();
        let options = ZooKeeperOptions::new().tls(&directory);
        let server = ZooKeeperServer::start_with(options).await.unwrap();
        let url_with_ca =
            |ca: std::path::PathBuf| format!("zks://{}?ca={}", server.addr(), ca.display());
        let trusted = format!("{}&connect_timeout=20s", url_with_ca(directory.ca_file()));
        assert_lock_and_unlock(&connect(&trusted).await.unwrap()).await;
        let untrusted = TlsFolder::new().unwrap();
        // The client retries until `connect_timeout`.
        let url = format!("{}&connect_timeout=3s", url_with_ca(untrusted.ca_file()));
        let (_, message) = connect_error(&url).await;
        assert!(message.contains("a certificate of `ca`"), "{message}");
        // The server sends no response over an unencrypted connection.
        connect_error(&format!("zk://{}?connect_timeout=2s", server.addr())).await;
    }

    #[tokio::test]
    async fn a_backend_opened_directly_trusts_the_configured_authority() {
        let directory = TlsFolder::new().unwrap();
        let options = ZooKeeperOptions::new().tls(&directory);
        let server = ZooKeeperServer::start_with(options).await.unwrap();
        let config = ZkConfig::from_url(&format!("zks://{}", server.addr())).unwrap();
        let refused = ZkBackend::open(config.clone()).await.unwrap_err();
        assert!(refused.to_string().contains("option `ca`"), "{refused}");

        let mut by_option = config.clone();
        by_option.set("ca", directory.ca_file().to_str().unwrap()).unwrap();
        let pem = std::fs::read_to_string(directory.ca_file()).unwrap();
        let by_method = config.with_certificate_authority(&pem).unwrap();
        for config in [by_option, by_method] {
            // On a loaded machine, one attempt may time out.
            let open = async || ZkBackend::open(config.clone()).await;
            let backend = eventually(Duration::from_secs(60), open).await;
            assert_lock_and_unlock(&Registry::builder(Arc::new(backend)).build().unwrap()).await;
        }
    }

    #[tokio::test]
    async fn a_server_that_requires_a_client_certificate_accepts_it() {
        let directory = TlsFolder::new().unwrap();
        let options = ZooKeeperOptions::new().tls(&directory).settings(&["ssl.clientAuth=need"]);
        let server = ZooKeeperServer::start_with(options).await.unwrap();
        let url = format!("zks://{}?ca={}", server.addr(), directory.ca_file().display());
        let (cert, key) = (directory.client_cert_file(), directory.client_key_file());
        let client = format!("{url}&cert={}&key={}", cert.display(), key.display());
        assert_lock_and_unlock(&connect(&format!("{client}&connect_timeout=20s")).await.unwrap())
            .await;
        connect_error(&format!("{url}&connect_timeout=3s")).await;
    }
}
