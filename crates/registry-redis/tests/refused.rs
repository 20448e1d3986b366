//! Opening a store with an invalid configuration returns an error with the reason, without retries.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::redis::{RedisServer, SentinelOptions, SentinelSetup};
use registry_testkit::{error_text, eventually};

async fn refused(config: RedisConfig, kind: BackendErrorKind, says: &str) -> BackendError {
    let error = RedisBackend::open(config).await.unwrap_err();
    assert_eq!((error.kind(), error.refused()), (kind, true), "{error:?}");
    let text = error_text(&error);
    assert!(text.contains(says), "{text}");
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
    async fn a_certificate_that_nobody_vouches_for_is_not_trusted() {
        let (folder, other) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
        let server = RedisServer::start_tls(&folder, &[]).await.unwrap();
        let stranger = config(&server.url());
        refused(stranger.clone(), BackendErrorKind::Misconfigured, "not trusted").await;
        let wrong = stranger.clone().with_certificate_authority(read(other.ca_file()));
        refused(wrong, BackendErrorKind::Misconfigured, "not trusted").await;
        RedisBackend::open(stranger.with_certificate_authority(read(folder.ca_file())))
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_certificate_for_another_host_is_not_trusted() {
        let folder = TlsFolder::for_hosts(&["elsewhere.example"]).unwrap();
        let server = RedisServer::start_tls(&folder, &[]).await.unwrap();
        let config = config(&server.url()).with_certificate_authority(read(folder.ca_file()));
        refused(config, BackendErrorKind::Misconfigured, "not trusted").await;
    }

    #[tokio::test]
    async fn a_server_that_wants_to_know_who_we_are_is_told() {
        let folder = TlsFolder::new().unwrap();
        let server = RedisServer::start_tls(&folder, &["--tls-auth-clients", "yes"]).await.unwrap();
        let config = config(&server.url()).with_certificate_authority(read(folder.ca_file()));
        refused(config.clone(), BackendErrorKind::Denied, "certificate").await;
        let (certificate, key) = (read(folder.client_cert_file()), read(folder.client_key_file()));
        RedisBackend::open(config.with_client_certificate(certificate, key)).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_no_certificate_is_refused_without_repeating_it() {
        let config = config("redis://127.0.0.1:1").with_certificate_authority(*b"hunter2");
        let error = refused(config.clone(), BackendErrorKind::Misconfigured, "").await;
        assert!(!error_text(&error).contains("hunter2"), "{error:?}");
        let config = config.with_client_certificate(*b"hunter2", *b"hunter2");
        let error = refused(config, BackendErrorKind::Misconfigured, "").await;
        assert!(!error_text(&error).contains("hunter2"), "{error:?}");
    }
}

#[tokio::test]
async fn sentinels_that_do_not_know_the_service_or_the_caller_say_so() {
    let options = SentinelOptions::new().sentinel_login("default", "opensesame");
    let setup = SentinelSetup::start_with(&options).await.unwrap();
    let right = config(&setup.url()).with_sentinel_login(None, "opensesame");
    RedisBackend::open(right.clone()).await.unwrap();
    let unknown = setup.url().replace("mymaster", "other");
    let unknown = config(&unknown).with_sentinel_login(None, "opensesame");
    refused(unknown, BackendErrorKind::Misconfigured, "no service of this name").await;
    refused(config(&setup.url()), BackendErrorKind::Denied, "sentinel wants its own").await;
    let wrong = config(&setup.url()).with_sentinel_login(None, "hunter2");
    let error = refused(wrong, BackendErrorKind::Denied, "").await;
    assert!(!error_text(&error).contains("hunter2"), "{error:?}");
}

#[tokio::test]
async fn a_server_that_is_no_sentinel_or_in_no_cluster_says_so() {
    let server = RedisServer::start(&[]).await.unwrap();
    let url = format!("redis+sentinel://{}/mymaster", server.addr());
    refused(config(&url), BackendErrorKind::Misconfigured, "is none").await;
    let url = format!("redis+cluster://{}", server.addr());
    refused(config(&url), BackendErrorKind::Misconfigured, "cluster").await;
}

#[tokio::test]
async fn a_server_that_cannot_wait_for_its_disk_is_refused_at_once() {
    let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
    let config = config(&server.url()).with_fsync(true);
    refused(config, BackendErrorKind::Misconfigured, "").await;
}

/// Servers repeat unknown commands in their errors, which would disclose the password.
#[tokio::test]
async fn a_server_that_knows_no_greeting_makes_us_print_no_password() {
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
                    Ok(_) => assert_eq!(unknown, "AUTH", "a greeting is needed"),
                    Err(error) => {
                        let text = error_text(&error);
                        assert!(!text.contains("hunter2"), "{text}");
                    }
                }
            }
        }
    }
}

/// Many error texts of the operating system contain such a password.
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

/// The server's vote would count twice.
#[tokio::test]
async fn a_quorum_that_names_one_server_twice_is_refused() {
    let (one, other) =
        (RedisServer::start(&[]).await.unwrap(), RedisServer::start(&[]).await.unwrap());
    let ports = (one.addr().port(), other.addr().port());
    let masters = [("127.0.0.1", ports.0), ("127.0.0.1", ports.1), ("localhost", ports.0)];
    let quorum = RedisConfig::quorum(masters.map(|(host, port)| (host.to_owned(), port)));
    let says = format!("127.0.0.1:{} and localhost:{} are the same server", ports.0, ports.0);
    refused(quorum, BackendErrorKind::Misconfigured, &says).await;
}

#[tokio::test]
async fn a_quorum_is_refused_although_the_second_name_of_a_server_answers_first() {
    let (one, other) =
        (RedisServer::start(&[]).await.unwrap(), RedisServer::start(&[]).await.unwrap());
    let slow = FaultProxy::start(one.addr()).unwrap();
    slow.set_mode(Mode::Delay(Duration::from_millis(5))).await.unwrap();
    let masters = [slow.addr(), one.addr(), other.addr()];
    let quorum = masters.map(|addr| (addr.ip().to_string(), addr.port()));
    let quorum = RedisConfig::quorum(quorum);
    // Opening waits only briefly for a master that the majority does not need.
    let error = eventually(Duration::from_secs(60), async || {
        RedisBackend::open(quorum.clone()).await.err()
    })
    .await;
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
    let says = format!("{} and {} are the same server", slow.addr(), one.addr());
    assert!(error_text(&error).contains(&says), "{error:?}");
}
