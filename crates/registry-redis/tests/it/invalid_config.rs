//! Opening a store with an invalid configuration returns an error with the reason, without retries.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind, Claim, Key, LockBackend as _};
use registry_redis::{Fsync, RedisBackend, RedisConfig};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::redis::{RedisServer, SentinelOptions, SentinelSetup};
use registry_testkit::{error_text, eventually};

async fn assert_refused(
    config: RedisConfig,
    kind: BackendErrorKind,
    expected: &str,
) -> BackendError {
    let error = RedisBackend::open(config).await.unwrap_err();
    assert_eq!((error.kind(), error.refused()), (kind, true), "{error:?}");
    let text = error_text(&error);
    assert!(text.contains(expected), "{text}");
    error
}

fn config(url: &str) -> RedisConfig {
    RedisConfig::from_url(url).unwrap()
}

#[cfg(feature = "tls")]
mod encryption {
    use registry_testkit::tls::TlsFolder;

    use super::*;

    fn read(path: std::path::PathBuf) -> Vec<u8> {
        std::fs::read(path).unwrap()
    }

    #[tokio::test]
    async fn a_certificate_of_an_unknown_authority_is_not_trusted() {
        let (folder, other) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
        let server = RedisServer::start_tls(&folder, &[]).await.unwrap();
        let without_authority = config(&server.url());
        assert_refused(without_authority.clone(), BackendErrorKind::Misconfigured, "not trusted")
            .await;
        let wrong = without_authority.clone().with_certificate_authority(read(other.ca_file()));
        assert_refused(wrong, BackendErrorKind::Misconfigured, "not trusted").await;
        RedisBackend::open(without_authority.with_certificate_authority(read(folder.ca_file())))
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_certificate_for_another_host_is_not_trusted() {
        let folder = TlsFolder::for_hosts(&["elsewhere.example"]).unwrap();
        let server = RedisServer::start_tls(&folder, &[]).await.unwrap();
        let config = config(&server.url()).with_certificate_authority(read(folder.ca_file()));
        assert_refused(config, BackendErrorKind::Misconfigured, "not trusted").await;
    }

    #[tokio::test]
    async fn a_server_can_require_a_client_certificate() {
        let folder = TlsFolder::new().unwrap();
        let server = RedisServer::start_tls(&folder, &["--tls-auth-clients", "yes"]).await.unwrap();
        let config = config(&server.url()).with_certificate_authority(read(folder.ca_file()));
        assert_refused(config.clone(), BackendErrorKind::Denied, "certificate").await;
        let (certificate, key) = (read(folder.client_cert_file()), read(folder.client_key_file()));
        RedisBackend::open(config.with_client_certificate(certificate, key)).await.unwrap();
    }

    #[tokio::test]
    async fn an_invalid_certificate_is_refused_without_printing_it() {
        let config = config("redis://127.0.0.1:1").with_certificate_authority(*b"hunter2");
        let error = assert_refused(config.clone(), BackendErrorKind::Misconfigured, "").await;
        assert!(!error_text(&error).contains("hunter2"), "{error:?}");
        let config = config.with_client_certificate(*b"hunter2", *b"hunter2");
        let error = assert_refused(config, BackendErrorKind::Misconfigured, "").await;
        assert!(!error_text(&error).contains("hunter2"), "{error:?}");
    }
}

#[tokio::test]
async fn an_unknown_service_or_login_at_the_sentinels_is_reported() {
    let options = SentinelOptions::new().sentinel_login("default", "opensesame");
    let setup = SentinelSetup::start_with(&options).await.unwrap();
    let right = config(&setup.url()).with_sentinel_login(None, "opensesame");
    RedisBackend::open(right.clone()).await.unwrap();
    let unknown = setup.url().replace("mymaster", "other");
    let unknown = config(&unknown).with_sentinel_login(None, "opensesame");
    assert_refused(unknown, BackendErrorKind::Misconfigured, "no service of this name").await;
    assert_refused(config(&setup.url()), BackendErrorKind::Denied, "sentinel requires its own")
        .await;
    let wrong = config(&setup.url()).with_sentinel_login(None, "hunter2");
    let error = assert_refused(wrong, BackendErrorKind::Denied, "").await;
    assert!(!error_text(&error).contains("hunter2"), "{error:?}");
}

#[tokio::test]
async fn a_server_that_is_no_sentinel_or_cluster_member_is_reported() {
    let server = RedisServer::start(&[]).await.unwrap();
    let url = format!("redis+sentinel://{}/mymaster", server.addr());
    assert_refused(config(&url), BackendErrorKind::Misconfigured, "not a sentinel").await;
    let url = format!("redis+cluster://{}", server.addr());
    assert_refused(config(&url), BackendErrorKind::Misconfigured, "cluster").await;
}

#[tokio::test]
async fn a_server_without_waitaof_is_refused_at_once() {
    let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
    let config = config(&server.url()).with_fsync(Fsync::Required);
    assert_refused(config, BackendErrorKind::Misconfigured, "(`fsync`); use Redis 7.2").await;
}

/// Servers repeat unknown commands in their errors, which would disclose the password.
#[tokio::test]
async fn an_error_of_a_server_without_hello_or_auth_contains_no_password() {
    for unknown in ["HELLO", "AUTH"] {
        let server = RedisServer::start(&["--rename-command", unknown, ""]).await.unwrap();
        let hosts = || [(server.addr().ip().to_string(), server.addr().port())];
        let [(host, port)] = hosts();
        for config in [
            RedisConfig::new(host, port),
            RedisConfig::cluster(hosts()),
            RedisConfig::sentinel(hosts(), "x"),
        ] {
            for user in [None, Some("worker")] {
                let config = config.clone().with_login(user, "hunter2");
                let config = config.with_sentinel_login(user, "hunter2");
                match RedisBackend::open(config).await {
                    Ok(_) => assert_eq!(unknown, "AUTH", "`HELLO` is required"),
                    Err(error) => {
                        let text = error_text(&error);
                        assert!(!text.contains("hunter2"), "{text}");
                    }
                }
            }
        }
    }
}

/// Such a password occurs by chance in error texts such as "connection refused". The backend must
/// not conclude from this that the server repeated the password in a refusal.
#[tokio::test]
async fn a_short_password_turns_no_other_error_into_a_refused_login() {
    for password in ["1", "e", "refused"] {
        let config = RedisConfig::new("127.0.0.1", 1).with_login(None, password);
        let error = RedisBackend::open(config).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Transient, "{password}: {error:?}");
    }
    let server = RedisServer::start(&["--maxclients", "1"]).await.unwrap();
    let _only = server.connect().await.unwrap();
    let port = server.addr().port();
    let config = RedisConfig::new("127.0.0.1", port).with_login(None, "max");
    let error = RedisBackend::open(config).await.unwrap_err();
    assert_ne!(error.kind(), BackendErrorKind::Denied, "{error:?}");
}

/// The vote of such a server would count twice.
#[tokio::test]
async fn a_quorum_with_a_duplicate_server_is_refused() {
    let (one, other) =
        (RedisServer::start(&[]).await.unwrap(), RedisServer::start(&[]).await.unwrap());
    let ports = (one.addr().port(), other.addr().port());
    let masters = [("127.0.0.1", ports.0), ("127.0.0.1", ports.1), ("localhost", ports.0)];
    let quorum = RedisConfig::quorum(masters.map(|(host, port)| (host.to_owned(), port)));
    let expected = format!("127.0.0.1:{} and localhost:{} are the same server", ports.0, ports.0);
    assert_refused(quorum, BackendErrorKind::Misconfigured, &expected).await;
}

#[tokio::test]
async fn a_duplicate_server_is_refused_whatever_address_responds_first() {
    let (one, other) =
        (RedisServer::start(&[]).await.unwrap(), RedisServer::start(&[]).await.unwrap());
    let slow = FaultProxy::start(one.addr()).unwrap();
    slow.set_mode(ProxyMode::Delay(Duration::from_millis(5))).await.unwrap();
    let masters = [slow.addr(), one.addr(), other.addr()];
    let quorum = masters.map(|addr| (addr.ip().to_string(), addr.port()));
    let quorum = RedisConfig::quorum(quorum);
    // Opening waits only briefly for a master that the majority does not need, so an attempt may
    // not detect the duplicate.
    let error = eventually(Duration::from_secs(60), async || {
        RedisBackend::open(quorum.clone()).await.err()
    })
    .await;
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
    let expected = format!("{} and {} are the same server", slow.addr(), one.addr());
    assert!(error_text(&error).contains(&expected), "{error:?}");
}

/// With two votes, this server alone would be a majority of the three addresses.
#[tokio::test]
async fn an_address_of_a_known_server_has_no_vote_when_it_becomes_reachable_later() {
    let (one, other) =
        (RedisServer::start(&[]).await.unwrap(), RedisServer::start(&[]).await.unwrap());
    let late = FaultProxy::start(one.addr()).unwrap();
    late.set_mode(ProxyMode::Refuse).await.unwrap();
    let to_other = FaultProxy::start(other.addr()).unwrap();
    let masters = [late.addr(), one.addr(), to_other.addr()];
    let quorum = RedisConfig::quorum(masters.map(|addr| (addr.ip().to_string(), addr.port())));
    let backend = RedisBackend::open(quorum).await.unwrap();

    to_other.set_mode(ProxyMode::BlackHole).await.unwrap();
    late.set_mode(ProxyMode::Pass).await.unwrap();
    let claim = Claim::new(Key::new("orders/42").unwrap(), Duration::from_secs(30));
    let expected = format!("{} and {} are the same server", late.addr(), one.addr());
    eventually(Duration::from_secs(60), async || {
        let error = backend.try_acquire(&claim).await.expect_err("one of two servers responds");
        error_text(&error).contains(&expected).then_some(())
    })
    .await;
    backend.close().await;
}
