//! Redis servers by URL: real servers, with and without users, and the errors if they cannot be
//! reached.
#![cfg(feature = "redis")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

#[cfg(feature = "redis-tls")]
mod encrypted;
mod several;

use std::time::Duration;

use lock_registry::{
    ConfigError, GuaranteeClass, Registry, RegistryConfig, backend::BackendErrorKind, connect,
};
use registry_testkit::error_text;
use registry_testkit::redis::RedisServer;

const CANARY: &str = "canary";

async fn server(options: &[&str]) -> RedisServer {
    RedisServer::start(options).await.expect("redis-server starts")
}

/// Starts a server with these users in addition to the default one, each in the syntax of `ACL
/// SETUSER`.
async fn server_with(users: &[&str]) -> RedisServer {
    let words = users.iter().flat_map(|user| std::iter::once("--user").chain(user.split(' ')));
    server(&words.collect::<Vec<_>>()).await
}

/// Returns the kind of the error that `url` causes. The error must not contain the password.
async fn connect_error_kind(url: &str) -> BackendErrorKind {
    let error = connect(url).await.expect_err("it cannot be opened");
    assert!(!error_text(&error).contains(CANARY), "{}", error_text(&error));
    let ConfigError::Open { store, source, .. } = &error else { panic!("{error:?}") };
    assert!(url.starts_with(&format!("{store}://")), "{error:?}");
    source.kind()
}

async fn assert_lock_and_unlock(registry: &Registry) {
    let guard = registry.obtain("key").try_lock().await.unwrap().expect("the key is not locked");
    assert!(guard.fencing_token().get() > 0);
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn two_registries_of_a_server_exclude_each_other_and_see_the_holder() {
    let server = server(&[]).await;
    let url = format!("{}?label=worker%201&lease=60s&timeout=60s&poll=1h", server.url());
    let (one, other) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    assert_eq!(one.capabilities().class, GuaranteeClass::Volatile);
    let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
    assert!(other.obtain("key").try_lock().await.unwrap().is_none());
    let holder = other.obtain("key").holders().await.unwrap().remove(0);
    assert_eq!(holder.label.as_deref(), Some("worker 1"));
    assert!(holder.lease_left.is_some_and(|left| left > Duration::from_secs(30)), "{holder:?}");
    // The release message ends the wait long before the poll.
    let waiter = tokio::spawn(async move {
        other.obtain("key").lock().await.unwrap().unlock().await.unwrap();
        other
    });
    guard.unlock().await.unwrap();
    let other = waiter.await.unwrap();
    assert!(other.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn locks_in_different_namespaces_and_databases_are_independent() {
    let server = server(&[]).await;
    let url = server.url();
    let here = connect(&url).await.unwrap();
    let guard = here.obtain("key").try_lock().await.unwrap().unwrap();
    for elsewhere in [format!("{url}?namespace=shop"), format!("{url}/1"), format!("{url}/15")] {
        assert_lock_and_unlock(&connect(&elsewhere).await.unwrap()).await;
    }
    // The default namespace can also be given explicitly.
    let same = connect(&format!("{url}/0?namespace=lock-registry")).await.unwrap();
    assert!(same.obtain("key").try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn an_unknown_database_number_is_an_error() {
    let server = server(&[]).await;
    let kind = connect_error_kind(&format!("{}/999", server.url())).await;
    assert_eq!(kind, BackendErrorKind::Misconfigured);
}

#[tokio::test]
async fn a_password_is_required_and_never_shown() {
    let server = server(&["--requirepass", "right-canary/@ü"]).await;
    let addr = server.addr();
    let right = format!("redis://:right-canary%2F%40%C3%BC@{addr}");
    let registry = connect(&right).await.unwrap();
    assert_lock_and_unlock(&registry).await;
    let shown = format!("{registry:?} {:?}", RegistryConfig::from_url(&right).unwrap().settings());
    assert!(!shown.contains(CANARY), "{shown}");
    for wrong in [
        format!("redis://:wrong-canary@{addr}"),
        format!("redis://canary:right-canary%2F%40%C3%BC@{addr}"),
        format!("redis://{addr}"),
    ] {
        assert_eq!(connect_error_kind(&wrong).await, BackendErrorKind::Denied, "{wrong}");
    }
}

#[tokio::test]
async fn a_user_logs_in_with_name_and_password() {
    let server = server_with(&["worker on >canary ~* &* +@all", "default off"]).await;
    let addr = server.addr();
    assert_lock_and_unlock(&connect(&format!("redis://worker:canary@{addr}")).await.unwrap()).await;
    for wrong in ["worker:canary2@", ":canary@", ""] {
        let kind = connect_error_kind(&format!("redis://{wrong}{addr}")).await;
        assert_eq!(kind, BackendErrorKind::Denied, "{wrong}");
    }
}

/// Waits until the server's response to `command` contains `part`.
async fn wait_for_reply(command: &str, server: &RedisServer, part: &str) {
    let polling = async {
        while !server.send_command(command).await.unwrap().contains(part) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), polling).await.expect(part);
}

/// The rights that the book lists, word for word.
const RIGHTS: &str = "resetkeys resetchannels -@all ~lock-registry:* &lock-registry:* +evalsha +eval +script|load +get \
                      +getex +set +del +pttl +pexpire +publish +time +scan +subscribe +unsubscribe +client|tracking \
                      +client|caching +info +config|get";

#[tokio::test]
async fn the_acl_rules_of_the_book_permit_every_operation() {
    let user = format!("worker on >canary {RIGHTS}");
    let server = server_with(&[&user]).await;
    let url = format!("redis://worker:canary@{}?poll=1h&lease=60s&timeout=60s", server.addr());
    let (one, other) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
    // Only the release message ends this wait, so the user must have the right to receive it.
    let waiter = tokio::spawn(async move {
        other.obtain("key").lock().await.unwrap().unlock().await.unwrap();
        other
    });
    wait_for_reply("PUBSUB NUMSUB lock-registry:{key}", &server, ":1").await;
    guard.unlock().await.unwrap();
    let other = waiter.await.unwrap();
    let guard = one.obtain("key").try_lock().await.unwrap().unwrap();
    assert_eq!(other.list().await.unwrap().len(), 1);
    assert!(other.obtain("key").holders().await.unwrap().len() == 1);
    let findings = other.diagnose().await.unwrap();
    assert!(!findings.is_empty());
    assert!(other.force_release("key").await.unwrap());
    drop(guard);
    // The lock is held for longer than its lease, so the registry must renew it.
    let short = connect(&format!("redis://worker:canary@{}?lease=2s", server.addr())).await;
    let short = short.unwrap();
    let guard = short.obtain("renewed").try_lock().await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
    // The client library sends its name with `CLIENT SETINFO` and tolerates a refusal.
    let log = server.send_command("ACL LOG").await.unwrap();
    let lines: Vec<&str> = log.lines().collect();
    let mut denied = lines.windows(3).filter(|lines| lines[0] == "object").map(|lines| lines[2]);
    assert!(denied.all(|object| object == "client|setinfo"), "{log}");
}

#[tokio::test]
async fn another_database_number_requires_the_select_right() {
    let (plain, selects) =
        (format!("plain on >canary {RIGHTS}"), format!("selects on >canary {RIGHTS} +select"));
    let server = server_with(&[&plain, &selects]).await;
    let addr = server.addr();
    assert_lock_and_unlock(&connect(&format!("redis://selects:canary@{addr}/1")).await.unwrap())
        .await;
    let kind = connect_error_kind(&format!("redis://plain:canary@{addr}/1")).await;
    assert_eq!(kind, BackendErrorKind::Denied);
}

#[tokio::test]
async fn an_error_reports_a_missing_right() {
    let user = "worker on >canary ~lock-registry:* &lock-registry:* +@all -eval -evalsha";
    let server = server_with(&[user]).await;
    let registry = connect(&format!("redis://worker:canary@{}", server.addr())).await.unwrap();
    let error = registry.obtain("key").try_lock().await.unwrap_err();
    let text = error_text(&error);
    assert!(text.contains("this user lacks a required right") && !text.contains(CANARY), "{text}");
}

#[tokio::test]
async fn an_unreachable_server_is_a_transient_error() {
    let mut server = server(&[]).await;
    let url = format!("redis://worker:canary@{}", server.addr());
    server.kill();
    assert_eq!(connect_error_kind(&url).await, BackendErrorKind::Transient);
    let unknown_host = "redis://worker:canary@no-such-host.invalid";
    assert_eq!(connect_error_kind(unknown_host).await, BackendErrorKind::Transient);
}

#[tokio::test]
async fn a_silent_server_is_an_error_after_connect_timeout() {
    let server = server(&[]).await;
    server.pause().unwrap();
    let url = format!("redis://:canary@{}?connect_timeout=50ms", server.addr());
    assert_eq!(connect_error_kind(&url).await, BackendErrorKind::Transient);
}

#[cfg(feature = "redis-tls")]
#[tokio::test]
async fn a_server_without_tls_is_an_error() {
    let server = server(&[]).await;
    let url = format!("rediss://worker:canary@{}", server.addr());
    assert_eq!(connect_error_kind(&url).await, BackendErrorKind::Transient);
}

#[tokio::test]
async fn an_invalid_url_is_refused_before_any_io() {
    // No server listens here, so an attempt to connect would return another error.
    for (rest, hint) in [
        ("?connect_timeout=1ms", "less than the minimum"),
        ("?token_memory=soon", "not a time"),
        ("?busy_timeout=1s", "sqlite"),
        ("?namespace=", "empty"),
        ("?layout=sprnig", "`spring`"),
        ("?restart_guard=30s", "redis+quorum"),
        ("?ca=/etc/ssl/ca.pem", "rediss://"),
        ("?sentinel_password=canary", "redis+sentinel"),
        ("?password=canary", "unknown option"),
        ("/locks", "database number"),
    ] {
        let error = connect(&format!("redis://:canary@127.0.0.1:1{rest}")).await.unwrap_err();
        assert!(!matches!(error, ConfigError::Open { .. }), "{rest}: {error:?}");
        let text = error_text(&error);
        assert!(text.contains(hint) && !text.contains(CANARY), "{rest}: {text}");
    }
}

#[cfg(feature = "config")]
#[tokio::test]
async fn redis_options_are_accepted_from_every_source() {
    let server = server(&[]).await;
    let config = RegistryConfig::new()
        .with_toml(&format!("url = '{}?connect_timeout=3s'\ntoken_memory = '2days'", server.url()))
        .unwrap()
        .with_vars([("LOCK_REGISTRY_CONNECT_TIMEOUT", "9s")])
        .unwrap();
    let set: Vec<_> =
        config.settings().unwrap().into_iter().map(|set| (set.name, set.value)).collect();
    for expected in [("connect_timeout", "9s"), ("token_memory", "2days")] {
        assert!(set.iter().any(|(name, value)| (*name, &**value) == expected), "{set:?}");
    }
    let registry = config.connect().await.unwrap();
    assert_lock_and_unlock(&registry).await;
    // The token is kept for two days after the last grant.
    let left = server.send_command("PTTL lock-registry:{key}:token").await.unwrap();
    let left: u64 = left.trim_start_matches(':').trim().parse().expect("a time in milliseconds");
    assert!(left > 47 * 60 * 60 * 1_000, "{left}");
}
