//! Redis by URL, on real servers: sentinels, a cluster, a quorum, a Unix socket, layouts, and
//! required replicas.

use std::time::Duration;

use lock_registry::{GuaranteeClass, Registry, backend::BackendErrorKind, connect};
use registry_testkit::error_text;
use registry_testkit::redis::{
    RedisCluster, RedisOptions, RedisQuorum, RedisServer, SentinelOptions, SentinelSetup,
};

#[cfg(feature = "config")]
use super::CANARY;
use super::{assert_lock_and_unlock, connect_error_kind};

/// Asserts that two registries of this URL exclude each other, list the held keys, and can force
/// the release of a lock.
pub(crate) async fn assert_locks(url: &str, class: GuaranteeClass) {
    let (one, other) = (connect(url).await.unwrap(), connect(url).await.unwrap());
    assert_eq!(one.capabilities().class, class, "{url}");
    // Several keys, so that a cluster stores them on different masters.
    let keys = ["a", "b", "c", "orders/42"];
    let mut guards = Vec::new();
    for key in keys {
        guards.push(one.obtain(key).try_lock().await.unwrap().expect("the key is not locked"));
        assert!(other.obtain(key).try_lock().await.unwrap().is_none(), "{url}: {key}");
    }
    let listed = |registry: Registry| async move {
        let holders = registry.list().await.unwrap();
        let mut keys: Vec<_> = holders.iter().map(|holder| holder.key.to_string()).collect();
        keys.sort();
        (registry, keys)
    };
    let (other, held) = listed(other).await;
    assert_eq!(held, keys, "{url}");
    let released = guards.pop().unwrap();
    assert!(other.force_release("orders/42").await.unwrap(), "{url}");
    assert!(!other.force_release("orders/42").await.unwrap(), "{url}");
    drop(released);
    for guard in guards {
        assert!(guard.fencing_token().get() > 0);
        guard.unlock().await.unwrap();
    }
    let (other, held) = listed(other).await;
    assert!(held.is_empty(), "{url}: {held:?}");
    assert!(!other.diagnose().await.unwrap().is_empty());
    assert_lock_and_unlock(&other).await;
}

/// So long that a loaded machine does not end a lease or a request.
const LONG_TIMEOUTS: &str = "lease=60s&timeout=60s&connect_timeout=60s";

#[tokio::test]
async fn sentinels_report_the_master_and_have_a_separate_login() {
    let servers = RedisOptions::new().login("worker", "canary");
    let options = SentinelOptions::new().servers(servers).sentinel_login("watcher", "canary2");
    let setup = SentinelSetup::start_with(&options).await.unwrap();
    let url = setup.url().replace("://", "://worker:canary@");
    let login = "sentinel_user=watcher&sentinel_password=canary2";
    assert_locks(&format!("{url}/1?{login}&{LONG_TIMEOUTS}"), GuaranteeClass::BestEffort).await;
    // A grant counts when both replicas have it.
    let replicated = format!("{url}?{login}&{LONG_TIMEOUTS}&replicas=2&replica_timeout=50s");
    assert_lock_and_unlock(&connect(&replicated).await.unwrap()).await;

    for wrong in
        ["", "?sentinel_password=canary", "?sentinel_user=watcher&sentinel_password=canary"]
    {
        assert_eq!(
            connect_error_kind(&format!("{url}{wrong}")).await,
            BackendErrorKind::Denied,
            "{wrong}"
        );
    }
    let unknown = url.replace("/mymaster", "/unheard-of");
    connect_error_kind(&format!("{unknown}?{login}")).await;

    #[cfg(feature = "config")]
    {
        // The sentinels' password comes from the environment, the servers' password from the URL.
        let config = lock_registry::RegistryConfig::new().url(&url).with_vars([
            ("LOCK_REGISTRY_SENTINEL_USER", "watcher"),
            ("LOCK_REGISTRY_SENTINEL_PASSWORD", "canary2"),
        ]);
        let config = config.unwrap();
        let shown = format!("{config:?} {:?}", config.settings().unwrap());
        assert!(!shown.contains(CANARY) && shown.contains("sentinel_password"), "{shown}");
        assert_lock_and_unlock(&config.connect().await.unwrap()).await;
    }
}

#[tokio::test]
async fn a_cluster_is_discovered_from_some_of_its_members() {
    let options = RedisOptions::new().login("worker", "canary");
    let cluster = RedisCluster::start_with(&options).await.unwrap();
    let url = cluster.url().replace("://", "://worker:canary@");
    assert_locks(&format!("{url}?{LONG_TIMEOUTS}"), GuaranteeClass::BestEffort).await;
    let (first, _) = url.split_once(',').unwrap();
    assert_locks(&format!("{first}/0?{LONG_TIMEOUTS}&publish=plain"), GuaranteeClass::BestEffort)
        .await;
    assert_eq!(connect_error_kind(&cluster.url()).await, BackendErrorKind::Denied);
}

#[tokio::test]
async fn a_quorum_needs_a_majority_of_its_masters() {
    let options = RedisOptions::new().login("default", "canary");
    let mut quorum = RedisQuorum::start_with(3, &options).await.unwrap();
    let url = quorum.url().replace("://", "://:canary@");
    assert_locks(&format!("{url}/3?{LONG_TIMEOUTS}"), GuaranteeClass::BestEffort).await;
    quorum.servers_mut()[1].kill();
    assert_locks(&format!("{url}?lease=60s&connect_timeout=500ms"), GuaranteeClass::BestEffort)
        .await;
    quorum.servers_mut()[2].kill();
    assert_eq!(
        connect_error_kind(&format!("{url}?connect_timeout=500ms")).await,
        BackendErrorKind::Transient
    );
}

#[tokio::test]
async fn restarted_masters_have_no_vote_during_the_restart_guard() {
    let quorum = RedisQuorum::start(3).await.unwrap();
    let registry = connect(&format!("{}?restart_guard=1h&lease=60s", quorum.url())).await.unwrap();
    let error = registry.obtain("key").try_lock().await.unwrap_err();
    assert!(error.is_retryable(), "{}", error_text(&error));
}

#[cfg(unix)]
#[tokio::test]
async fn a_server_is_reachable_by_its_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a b.sock");
    let arguments = ["--unixsocket", path.to_str().unwrap(), "--requirepass", "canary"];
    let server = RedisServer::start(&arguments).await.unwrap();
    let path = path.to_str().unwrap().replace(' ', "%20");
    assert_locks(&format!("redis+unix://:canary@{path}?{LONG_TIMEOUTS}"), GuaranteeClass::Volatile)
        .await;
    // The port and the socket lead to the same locks. Another database has separate locks.
    let by_port = connect(&format!("redis://:canary@{}", server.addr())).await.unwrap();
    let by_socket = connect(&format!("redis+unix://default:canary@{path}")).await.unwrap();
    let guard = by_socket.obtain("key").try_lock().await.unwrap().unwrap();
    assert!(by_port.obtain("key").try_lock().await.unwrap().is_none());
    let elsewhere = connect(&format!("redis+unix://:canary@{path}?db=1")).await.unwrap();
    assert_lock_and_unlock(&elsewhere).await;
    guard.unlock().await.unwrap();
    for wrong in [format!("redis+unix://{path}"), format!("redis+unix://:canary2@{path}")] {
        assert_eq!(connect_error_kind(&wrong).await, BackendErrorKind::Denied);
    }
    connect_error_kind(&format!("redis+unix://:canary@{path}.absent")).await;
}

#[tokio::test]
async fn the_layout_determines_the_names_of_keys() {
    let server = RedisServer::start(&[]).await.unwrap();
    for (options, name) in [
        ("layout=native", "lock-registry:{key}"),
        ("layout=spring&namespace=shop", "shop:key"),
        ("layout=redisson", "key"),
        ("layout=redisson&namespace=shop", "shop:key"),
    ] {
        let registry = connect(&format!("{}?{options}", server.url())).await.unwrap();
        let guard = registry.obtain("key").try_lock().await.unwrap().unwrap();
        let reply = server.send_command(&format!("EXISTS {name}")).await.unwrap();
        assert_eq!(reply.trim(), ":1", "{options}");
        assert_eq!(registry.capabilities().labels, options == "layout=native");
        guard.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_grant_without_the_required_replicas_is_a_retryable_error() {
    let server = RedisServer::start(&[]).await.unwrap();
    let url = format!("{}?replicas=1&replica_timeout=50ms", server.url());
    let registry = connect(&url).await.unwrap();
    let error = registry.obtain("key").try_lock().await.unwrap_err();
    assert!(error.is_retryable(), "{}", error_text(&error));
    let without_replicas = connect(&server.url()).await.unwrap();
    let is_free = async || without_replicas.obtain("key").try_lock().await.unwrap().is_some();
    registry_testkit::eventually(Duration::from_secs(60), is_free).await;
}
