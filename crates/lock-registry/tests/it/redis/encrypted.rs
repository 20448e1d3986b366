//! Encrypted connections: trusted certificate authorities and client certificates.

use lock_registry::{ConfigError, GuaranteeClass, backend::BackendErrorKind, connect};
use registry_testkit::error_text;
use registry_testkit::redis::{
    RedisCluster, RedisOptions, RedisQuorum, RedisServer, SentinelOptions, SentinelSetup,
};
use registry_testkit::tls::TlsFolder;

use super::several::assert_locks;
use super::{CANARY, connect_error_kind};

/// Returns the options of a URL that trusts the certificate authority in `directory`.
fn ca_query(directory: &TlsFolder) -> String {
    format!("ca={}&lease=60s&timeout=60s&connect_timeout=60s", directory.ca_file().display())
}

#[tokio::test]
async fn only_the_certificate_authority_in_the_file_is_trusted() {
    let (trusted, untrusted) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
    let server = RedisServer::start_tls(&trusted, &["--requirepass", "canary"]).await.unwrap();
    let url = server.url().replace("://", "://:canary@");
    assert_locks(&format!("{url}?{}", ca_query(&trusted)), GuaranteeClass::Volatile).await;
    for url in [format!("{url}?{}", ca_query(&untrusted)), url.clone()] {
        connect_error_kind(&url).await;
    }
    connect_error_kind(&url.replace("rediss:", "redis:")).await;
}

#[tokio::test]
async fn a_client_certificate_is_sent() {
    let directory = TlsFolder::new().unwrap();
    let server = RedisServer::start_tls(&directory, &["--tls-auth-clients", "yes"]).await.unwrap();
    let anonymous = format!("{}?{}", server.url(), ca_query(&directory));
    connect_error_kind(&anonymous).await;
    let (cert, key) = (directory.client_cert_file(), directory.client_key_file());
    let named = format!("{anonymous}&cert={}&key={}", cert.display(), key.display());
    assert_locks(&named, GuaranteeClass::Volatile).await;
}

#[tokio::test]
async fn every_topology_supports_tls() {
    let directory = TlsFolder::new().unwrap();
    let options = RedisOptions::new().tls(&directory);
    let quorum = RedisQuorum::start_with(3, &options).await.unwrap();
    assert_locks(&format!("{}?{}", quorum.url(), ca_query(&directory)), GuaranteeClass::BestEffort)
        .await;
    drop(quorum);
    let setup = SentinelSetup::start_with(&SentinelOptions::new().servers(options.clone())).await;
    let setup = setup.unwrap();
    assert_locks(&format!("{}?{}", setup.url(), ca_query(&directory)), GuaranteeClass::BestEffort)
        .await;
    drop(setup);
    let cluster = RedisCluster::start_with(&options).await.unwrap();
    assert_locks(
        &format!("{}?{}", cluster.url(), ca_query(&directory)),
        GuaranteeClass::BestEffort,
    )
    .await;
}

#[tokio::test]
async fn an_invalid_file_is_refused_before_any_connection() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (empty, other) = (file("empty.pem", ""), file("canary.pem", "canary"));
    let tls = TlsFolder::new().unwrap();
    let cert = tls.client_cert_file().display().to_string();
    let locked = file("locked.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\ncanary");
    for (options, hint) in [
        ("ca=/absent/ca.pem".to_owned(), "file \"/absent/ca.pem\" of option `ca` cannot be read"),
        (format!("ca={}", directory.path().display()), "not a regular file"),
        (format!("ca={empty}"), "contains no PEM certificate"),
        (format!("cert={empty}&key={other}"), "option `cert` contains no PEM certificate"),
        (format!("cert={cert}&key=canary"), "the file of option `key` cannot be read"),
        (format!("cert={cert}&key={other}"), "must contain a PEM private key"),
        (format!("cert={cert}&key={locked}"), "without a passphrase"),
    ] {
        // No server listens here, so an attempt to connect would return another error.
        let error = connect(&format!("rediss://:canary@127.0.0.1:1?{options}")).await.unwrap_err();
        let text = error_text(&error);
        assert!(text.contains(hint) && !text.contains(CANARY), "{options}: {text}");
        let ConfigError::Open { store: "rediss", source, .. } = &error else { panic!("{error:?}") };
        assert_eq!((source.kind(), source.refused()), (BackendErrorKind::Misconfigured, true));
    }
}
