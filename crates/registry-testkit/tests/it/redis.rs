//! Tests the testkit's Redis servers, single and combined. Needs `redis-server`.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use registry_testkit::clock::ClockShim;
use registry_testkit::eventually;
use registry_testkit::process::HelperProcess;
use registry_testkit::redis::{
    RedisCluster, RedisOptions, RedisQuorum, RedisReply, RedisServer, SentinelOptions,
    SentinelSetup,
};
use registry_testkit::tls::TlsFolder;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Sufficient for the slowest machine. It costs time only when a test fails.
const LIMIT: Duration = Duration::from_secs(60);

async fn get(server: &RedisServer, key: &str) -> Option<String> {
    server.send_command_args(&["GET", key]).await.unwrap().into_result().unwrap().text()
}

async fn set(server: &RedisServer, key: &str, value: &str) {
    server.send_command_args(&["SET", key, value]).await.unwrap().into_result().unwrap();
}

async fn error_of(server: &RedisServer, words: &[&str]) -> String {
    server.send_command_args(words).await.unwrap().into_result().unwrap_err().to_string()
}

#[tokio::test]
async fn replies_are_complete_and_arguments_may_contain_any_byte() {
    let server = RedisServer::start(&[]).await.unwrap();
    let value = "a b\r\n\"".repeat(100_000).into_bytes();
    let words: [&[u8]; 3] = [b"SET", b"\0\r\n", &value];
    assert_eq!(server.send_command_args(&words).await.unwrap(), RedisReply::Status("OK".into()));
    let read = server.send_command_args(&[&b"GET"[..], b"\0\r\n"]).await.unwrap();
    assert!(read == RedisReply::Value(value));
    server.send_command_args(&["SET", "long", &"x".repeat(1_000_000)]).await.unwrap();
    assert_eq!(
        server.send_command("GET long").await.unwrap().len(),
        "$1000000\r\n".len() + 1_000_002
    );
    assert_eq!(server.send_command("SHUTDOWN NOSAVE").await.unwrap(), "");
}

#[tokio::test]
async fn a_killed_server_restarts_with_its_data_at_once() {
    let mut server = RedisServer::start(&[]).await.unwrap();
    for round in ["one", "two", "three"] {
        set(&server, round, round).await;
        server.kill();
        assert!(!server.is_up());
        server.send_command("PING").await.unwrap_err();
        server.restart().await.unwrap();
        assert_eq!(get(&server, round).await.as_deref(), Some(round));
    }
    server.pause().unwrap();
    server.restart().await.unwrap();
    assert!(server.is_up() && !server.is_paused());
    assert_eq!(get(&server, "one").await.as_deref(), Some("one"));
}

#[tokio::test]
async fn a_server_that_cannot_start_reports_the_reason() {
    let wrong = RedisServer::start(&["--maxmemory", "much"]).await.unwrap_err().to_string();
    assert!(wrong.contains("much"), "{wrong}");
    let missing = RedisOptions::new().program("no-such-server");
    let missing = RedisServer::start_with(missing).await.unwrap_err().to_string();
    assert!(missing.contains("no-such-server"), "{missing}");
}

#[tokio::test]
async fn masters_of_a_quorum_are_independent() {
    let mut quorum = RedisQuorum::start(5).await.unwrap();
    let addresses: Vec<String> =
        quorum.servers().iter().map(|server| server.addr().to_string()).collect();
    assert_eq!(quorum.url(), format!("redis+quorum://{}", addresses.join(",")));
    set(&quorum.servers()[0], "k", "v").await;
    quorum.servers_mut()[4].kill();
    for server in &quorum.servers()[1..4] {
        assert_eq!(get(server, "k").await, None);
    }
}

#[tokio::test]
async fn sentinels_elect_another_master_on_request() {
    let mut setup = SentinelSetup::start().await.unwrap();
    let old = setup.master().await.unwrap();
    assert!(setup.url().starts_with("redis+sentinel://127.0.0.1:"), "{}", setup.url());
    assert!(setup.url().ends_with("/mymaster") && !setup.url().contains(&old.to_string()));
    set(setup.server(old), "k", "v").await;
    setup.server(old).send_command_args(&["WAIT", "2", "0"]).await.unwrap();
    let new = setup.failover().await.unwrap();
    assert!(new != old && new == setup.master().await.unwrap());
    assert_eq!(get(setup.server(new), "k").await.as_deref(), Some("v"));
    // The server saved its new role in its configuration.
    setup.server_mut(new).restart().await.unwrap();
    let role = setup.server(new).send_command_args(&["ROLE"]).await.unwrap();
    assert_eq!(role.items()[0].text().as_deref(), Some("master"));
}

#[tokio::test]
async fn what_isolated_replicas_missed_is_lost_with_the_master() {
    let mut setup = SentinelSetup::start().await.unwrap();
    let master = setup.master().await.unwrap();
    set(setup.server(master), "before", "v").await;
    setup.server(master).send_command_args(&["WAIT", "2", "0"]).await.unwrap();
    let replicas = setup.isolate_replicas().await.unwrap();
    assert_eq!(replicas.len(), 2);
    let mut writer = setup.server(master).connect().await.unwrap();
    writer.send_command_args(&["SET", "after", "v"]).await.unwrap().into_result().unwrap();
    assert_eq!(writer.send_command_args(&["WAIT", "1", "1"]).await.unwrap().number(), Some(0));
    let old = setup.kill_master().await.unwrap();
    setup.resume_all_except(old).unwrap();
    let new = setup.wait_for_new_master(old).await.unwrap();
    assert!(old == master && replicas.contains(&new));
    assert_eq!(get(setup.server(new), "before").await.as_deref(), Some("v"));
    assert_eq!(get(setup.server(new), "after").await, None);
}

#[tokio::test]
async fn sentinels_and_servers_can_require_different_logins() {
    let options = SentinelOptions::new()
        .servers(RedisOptions::new().login("app", "secret"))
        .sentinel_login("default", "other");
    let setup = SentinelSetup::start_with(&options).await.unwrap();
    let old = setup.pause_master().await.unwrap();
    let new = setup.wait_for_new_master(old).await.unwrap();
    setup.resume(old).unwrap();
    for addr in [new, setup.sentinels()[0].addr()] {
        let text = ping(TcpStream::connect(addr).unwrap()).unwrap();
        assert!(text.starts_with("-NOAUTH"), "{text}");
    }
}

/// Returns the reply to a `PING` without a login.
fn ping(mut stream: impl Read + Write) -> io::Result<String> {
    stream.write_all(b"PING\r\n")?;
    let mut line = vec![0; 1_024];
    let length = stream.read(&mut line)?;
    line.truncate(length);
    Ok(String::from_utf8_lossy(&line).into_owned())
}

#[tokio::test]
async fn replicas_of_a_cluster_are_promoted() {
    let mut cluster = RedisCluster::start().await.unwrap();
    assert_eq!(cluster.nodes().len(), 6);
    let slot = RedisCluster::slot_of("k");
    let first = cluster.master_of(slot).await.unwrap();
    set(cluster.node(first), "k", "v").await;
    // A requested failover loses no write.
    let second = cluster.failover(slot).await.unwrap();
    assert_eq!(get(cluster.node(second), "k").await.as_deref(), Some("v"));
    let moved = error_of(cluster.node(first), &["GET", "k"]).await;
    assert_eq!(moved, format!("MOVED {slot} {second}"));
    cluster.wait_until_consistent().await.unwrap();
    // A crash loses the writes that did not reach the replica.
    assert_eq!(cluster.isolate_replicas_of(slot).await.unwrap(), [first]);
    set(cluster.node(second), "k", "lost").await;
    assert_eq!(cluster.kill_master_of(slot).await.unwrap(), second);
    cluster.resume(first).unwrap();
    assert_eq!(cluster.wait_for_new_master_of(slot, second).await.unwrap(), first);
    assert_eq!(get(cluster.node(first), "k").await.as_deref(), Some("v"));
    cluster.node_mut(second).restart().await.unwrap();
    cluster.wait_until_consistent().await.unwrap();
    assert_eq!(cluster.replicas_of(slot).await.unwrap(), [second]);
}

#[tokio::test]
async fn a_slot_moves_with_its_keys_and_may_stop_half_way() {
    let cluster = RedisCluster::start_with(&RedisOptions::new().login("app", "pw")).await.unwrap();
    let slot = RedisCluster::slot_of("{k}");
    let from = cluster.master_of(slot).await.unwrap();
    let other = RedisCluster::slot_of("other");
    let to = cluster.master_of(other).await.unwrap();
    assert_ne!(from, to);
    for number in 0..250 {
        set(cluster.node(from), &format!("{{k}}{number}"), "v").await;
    }
    let migration = cluster.begin_migration(slot, to).await.unwrap();
    assert!(cluster.migrate_key(&migration, "{k}7").await.unwrap());
    assert!(!cluster.migrate_key(&migration, "{k}7").await.unwrap());
    let ask = error_of(cluster.node(from), &["GET", "{k}7"]).await;
    assert_eq!(ask, format!("ASK {slot} {to}"));
    assert_eq!(get(cluster.node(from), "{k}8").await.as_deref(), Some("v"));
    let both = error_of(cluster.node(from), &["MGET", "{k}7", "{k}8"]).await;
    assert!(both.starts_with("TRYAGAIN"), "{both}");
    cluster.finish_migration(migration).await.unwrap();
    assert_eq!(cluster.master_of(slot).await.unwrap(), to);
    assert_eq!(error_of(cluster.node(from), &["GET", "{k}7"]).await, format!("MOVED {slot} {to}"));
    for number in 0..250 {
        let value = get(cluster.node(to), &format!("{{k}}{number}")).await;
        assert_eq!(value.as_deref(), Some("v"), "{number}");
    }
    cluster.migrate(slot, from).await.unwrap();
    assert_eq!(get(cluster.node(from), "{k}249").await.as_deref(), Some("v"));
}

/// Returns the reply to a `PING` over TLS. The client trusts `ca` and presents the certificate of
/// `client`.
fn ping_encrypted(
    addr: SocketAddr,
    ca: &TlsFolder,
    client: Option<&TlsFolder>,
) -> io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca.ca_file()).unwrap()).unwrap();
    // Other crates of the build may enable several providers, and then none is the default.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match client {
        None => config.with_no_client_auth(),
        Some(client) => {
            let certificate = CertificateDer::from_pem_file(client.client_cert_file()).unwrap();
            let key = PrivateKeyDer::from_pem_file(client.client_key_file()).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    let name = addr.ip().into();
    let session = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    ping(StreamOwned::new(session, TcpStream::connect(addr)?))
}

#[tokio::test]
async fn a_tls_server_is_verified_by_its_authority_and_its_name() {
    let tls = TlsFolder::new().unwrap();
    let server = RedisServer::start_tls(&tls, &["--requirepass", "pw"]).await.unwrap();
    assert_eq!(server.url(), format!("rediss://{}", server.addr()));
    let text = ping_encrypted(server.addr(), &tls, None).unwrap();
    assert!(text.starts_with("-NOAUTH"), "{text}");
    let other = TlsFolder::new().unwrap();
    let other_authority = ping_encrypted(server.addr(), &other, None).unwrap_err().to_string();
    assert!(other_authority.contains("certificate"), "{other_authority}");
    let elsewhere = TlsFolder::for_hosts(&["elsewhere.test"]).unwrap();
    let named_otherwise = RedisServer::start_tls(&elsewhere, &[]).await.unwrap();
    let wrong = ping_encrypted(named_otherwise.addr(), &elsewhere, None).unwrap_err().to_string();
    assert!(wrong.contains("not valid for name"), "{wrong}");
    // The server does not accept unencrypted commands.
    let plain = ping(TcpStream::connect(server.addr()).unwrap());
    assert!(!plain.is_ok_and(|text| text.starts_with(['+', '-'])));
}

#[tokio::test]
async fn a_tls_server_can_require_client_certificates() {
    let tls = TlsFolder::new().unwrap();
    let server = RedisServer::start_tls(&tls, &["--tls-auth-clients", "yes"]).await.unwrap();
    assert_eq!(ping_encrypted(server.addr(), &tls, Some(&tls)).unwrap(), "+PONG\r\n");
    let other = TlsFolder::new().unwrap();
    for client in [None, Some(&other)] {
        let text = ping_encrypted(server.addr(), &tls, client);
        assert!(!text.as_ref().is_ok_and(|text| text.starts_with('+')), "{text:?}");
    }
}

#[tokio::test]
async fn sentinels_and_clusters_can_use_tls() {
    let tls = TlsFolder::new().unwrap();
    let server = RedisOptions::new().tls(&tls);
    let sentinel = SentinelOptions::new().servers(server.clone());
    let (setup, cluster) =
        tokio::try_join!(SentinelSetup::start_with(&sentinel), RedisCluster::start_with(&server))
            .unwrap();
    assert!(setup.url().starts_with("rediss+sentinel://"), "{}", setup.url());
    assert!(cluster.url().starts_with("rediss+cluster://"), "{}", cluster.url());
    let slot = RedisCluster::slot_of("k");
    let master = cluster.master_of(slot).await.unwrap();
    for addr in [setup.sentinels()[0].addr(), setup.master().await.unwrap(), master] {
        assert_eq!(ping_encrypted(addr, &tls, None).unwrap(), "+PONG\r\n");
    }
    set(cluster.node(master), "k", "v").await;
    let to = cluster.master_of(RedisCluster::slot_of("other")).await.unwrap();
    cluster.migrate(slot, to).await.unwrap();
    assert_eq!(get(cluster.node(to), "k").await.as_deref(), Some("v"));
}

#[tokio::test]
async fn a_key_expires_by_the_wall_clock_of_its_server() {
    let clock = ClockShim::new().unwrap();
    let server = RedisServer::start_with(RedisOptions::new().clock(&clock)).await.unwrap();
    server.send_command_args(&["SET", "minute", "v", "EX", "60"]).await.unwrap();
    clock.jump_wall(61).unwrap();
    eventually(LIMIT, async || get(&server, "minute").await.is_none()).await;
    server.send_command_args(&["SET", "minute", "v", "EX", "60"]).await.unwrap();
    clock.jump_wall(-3_600).unwrap();
    let left = async || server.send_command_args(&["TTL", "minute"]).await.unwrap().number();
    eventually(LIMIT, async || left().await > Some(3_600)).await;
}

/// Set in the child process of the next test. The child prints the process id of its server.
const CHILD: &str = "THE_TEST_TO_BE_KILLED";

#[tokio::test]
async fn a_killed_test_leaves_no_server() {
    if std::env::var_os(CHILD).is_some() {
        let server = RedisServer::start(&[]).await.unwrap();
        let info = server.send_command("INFO server").await.unwrap();
        let id = info.lines().find_map(|line| line.strip_prefix("process_id:")).unwrap();
        // Even a paused server must end.
        server.pause().unwrap();
        println!("\nserver {id}");
        std::future::pending::<()>().await;
    }
    // The killed child leaves its files in this folder.
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("TMPDIR", folder.path());
    command
        .args(["redis::a_killed_test_leaves_no_server", "--exact", "--nocapture"])
        .env(CHILD, "yes");
    let mut test = HelperProcess::spawn(command).unwrap();
    let id = |line: &str| line.strip_prefix("server ").map(ToOwned::to_owned);
    let id = test.expect_map(id, LIMIT).await.unwrap();
    let stat = || std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    assert!(stat().contains(") T "), "{}", stat());
    test.kill().unwrap();
    eventually(LIMIT, async || stat().is_empty() || stat().contains(") Z ")).await;
}
