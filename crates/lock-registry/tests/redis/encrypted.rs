//! Encrypted connections: trusted certificate authorities and client certificates.

use lock_registry::{BackendErrorKind, ConfigError, GuaranteeClass, connect};
use registry_testkit::error_text;
use registry_testkit::redis::{
    RedisCluster, RedisQuorum, RedisServer, SentinelOptions, SentinelSetup, ServerOptions,
};
use registry_testkit::tls::TlsFolder;

use super::several::serves;
use super::{CANARY, refused};

fn ca(folder: &TlsFolder) -> String {
    format!("ca={}&lease=60s&timeout=60s&connect_timeout=60s", folder.ca_file().display())
}

#[tokio::test]
async fn an_authority_is_believed_that_a_file_names_and_no_other() {
    let (ours, theirs) = (TlsFolder::new().unwrap(), TlsFolder::new().unwrap());
    let server = RedisServer::start_tls(&ours, &["--requirepass", "canary"]).await.unwrap();
    let url = server.url().replace("://", "://:canary@");
    serves(&format!("{url}?{}", ca(&ours)), GuaranteeClass::B).await;
    for untrusted in [format!("{url}?{}", ca(&theirs)), url.clone()] {
        refused(&untrusted).await;
    }
    refused(&url.replace("rediss:", "redis:")).await;
}

#[tokio::test]
async fn a_certificate_says_who_we_are() {
    let folder = TlsFolder::new().unwrap();
    let server = RedisServer::start_tls(&folder, &["--tls-auth-clients", "yes"]).await.unwrap();
    let anonymous = format!("{}?{}", server.url(), ca(&folder));
    refused(&anonymous).await;
    let (cert, key) = (folder.client_cert_file(), folder.client_key_file());
    let named = format!("{anonymous}&cert={}&key={}", cert.display(), key.display());
    serves(&named, GuaranteeClass::B).await;
}

#[tokio::test]
async fn several_servers_are_reached_in_secret_too() {
    let folder = TlsFolder::new().unwrap();
    let options = ServerOptions::new().tls(&folder);
    let quorum = RedisQuorum::start_with(3, &options).await.unwrap();
    serves(&format!("{}?{}", quorum.url(), ca(&folder)), GuaranteeClass::C).await;
    drop(quorum);
    let setup = SentinelSetup::start_with(&SentinelOptions::new().servers(options.clone())).await;
    let setup = setup.unwrap();
    serves(&format!("{}?{}", setup.url(), ca(&folder)), GuaranteeClass::C).await;
    drop(setup);
    let cluster = RedisCluster::start_with(&options).await.unwrap();
    serves(&format!("{}?{}", cluster.url(), ca(&folder)), GuaranteeClass::C).await;
}

#[tokio::test]
async fn a_file_that_cannot_be_used_is_told_before_anything_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (empty, other) = (file("empty.pem", ""), file("canary.pem", "canary"));
    let tls = TlsFolder::new().unwrap();
    let cert = tls.client_cert_file().display().to_string();
    let locked = file("locked.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\ncanary");
    for (options, hint) in [
        (
            "ca=/absent/ca.pem".to_owned(),
            "\"/absent/ca.pem\", the file of option `ca`, cannot be read",
        ),
        (format!("ca={}", folder.path().display()), "not a file"),
        (format!("ca={empty}"), "holds no certificate"),
        (format!("cert={empty}&key={other}"), "option `cert`, holds no certificate"),
        (format!("cert={cert}&key=canary"), "the file of option `key` cannot be read"),
        (format!("cert={cert}&key={other}"), "holds no private key"),
        (format!("cert={cert}&key={locked}"), "free of a passphrase"),
    ] {
        // No server listens here, so an attempt to connect would return another error.
        let error = connect(&format!("rediss://:canary@127.0.0.1:1?{options}")).await.unwrap_err();
        let text = error_text(&error);
        assert!(text.contains(hint) && !text.contains(CANARY), "{options}: {text}");
        let ConfigError::Open { store: "rediss", source, .. } = &error else { panic!("{error:?}") };
        assert_eq!((source.kind(), source.refused()), (BackendErrorKind::Misconfigured, true));
    }
}
