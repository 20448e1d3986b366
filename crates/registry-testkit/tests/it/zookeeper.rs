//! Tests the testkit's ZooKeeper servers, single and as an ensemble. Needs Java and Debian's
//! ZooKeeper package.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::process::Command;
use std::time::Duration;

use registry_testkit::tls::TlsFolder;
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions, ZooKeeperServer};
use registry_testkit::{eventually, within};
use tokio::time::timeout;
use zookeeper_client::{Acls, Client, CreateMode, SessionState};

/// Sufficient for the slowest machine. It costs time only when a test fails.
const LIMIT: Duration = Duration::from_secs(60);
/// How long the tests wait for an answer that must not arrive.
const SILENCE: Duration = Duration::from_millis(300);

/// Connects a client with this session timeout.
async fn client(url: &str, session: Duration) -> Client {
    let hosts = url.strip_prefix("zk://").unwrap();
    Client::connector().with_session_timeout(session).connect(hosts).await.unwrap()
}

/// Creates a node and returns its sequence number, if it is sequential.
async fn create(client: &Client, path: &str, mode: CreateMode) -> i64 {
    let options = mode.with_acls(Acls::anyone_all());
    client.create(path, b"", &options).await.unwrap().1.into_i64()
}

#[tokio::test]
async fn a_killed_zookeeper_restarts_with_its_data_and_its_sessions() {
    let mut server = ZooKeeperServer::start().await.unwrap();
    assert_eq!(server.mode().await.unwrap().as_deref(), Some("standalone"));
    let client = client(&server.url(), LIMIT).await;
    create(&client, "/kept", CreateMode::Persistent).await;
    create(&client, "/mine", CreateMode::Ephemeral).await;
    for _ in 0..2 {
        server.kill();
        assert!(!server.is_up());
        server.send_command("ruok").await.unwrap_err();
        server.restart().await.unwrap();
        let mine = within(LIMIT, client.check_stat("/mine")).await.unwrap().unwrap();
        assert_eq!(mine.ephemeral_owner, client.session_id().0);
    }
    server.pause().unwrap();
    assert!(timeout(SILENCE, client.check_stat("/kept")).await.is_err());
    server.resume().unwrap();
    assert!(within(LIMIT, client.check_stat("/kept")).await.unwrap().is_some());
    server.kill();
    server.delete_data().unwrap();
    server.restart().await.unwrap();
    let other = self::client(&server.url(), LIMIT).await;
    assert!(other.check_stat("/kept").await.unwrap().is_none());
}

#[tokio::test]
async fn a_session_is_ended_from_a_second_connection() {
    let alone = ZooKeeperServer::start().await.unwrap();
    let ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let [one, two, _] = ensemble.members() else { unreachable!() };
    for (own, other) in [(&alone, &alone), (one, two), (two, one)] {
        let client = client(&own.url(), Duration::from_secs(6)).await;
        create(&client, "/mine", CreateMode::Ephemeral).await;
        let mut states = client.state_watcher();
        if own.addr() != other.addr() {
            own.end_session(client.session_id().0).await.unwrap_err();
        }
        other.end_session(client.session_id().0).await.unwrap();
        within(LIMIT, async { while states.changed().await != SessionState::Expired {} }).await;
        let observer = self::client(&other.url(), LIMIT).await;
        eventually(LIMIT, async || observer.check_stat("/mine").await.unwrap().is_none()).await;
        other.end_session(client.session_id().0).await.unwrap_err();
    }
}

#[tokio::test]
async fn an_ensemble_elects_another_leader_and_needs_two() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    // The client detects an unresponsive member within two fifths of this session timeout.
    let client = client(&ensemble.url(), Duration::from_secs(5)).await;
    create(&client, "/one", CreateMode::Persistent).await;
    let first = ensemble.leader().await.unwrap();
    ensemble.members()[first].pause().unwrap();
    let second = ensemble.leader().await.unwrap();
    assert_ne!(first, second);
    // An operation that is in progress when the connection breaks fails, so the test repeats it.
    eventually(LIMIT, async || client.check_stat("/one").await).await;
    ensemble.members()[first].resume().unwrap();
    ensemble.members_mut()[second].kill();
    ensemble.leader().await.unwrap();
    eventually(LIMIT, async || client.check_stat("/one").await).await;
    let third = (second + 1) % 3;
    ensemble.members_mut()[third].kill();
    let alone = (second + 2) % 3;
    // A single member has no majority and does not serve.
    eventually(LIMIT, async || {
        ensemble.members()[alone].mode().await.is_ok_and(|mode| mode.is_none())
    })
    .await;
    ensemble.members_mut()[second].restart().await.unwrap();
    ensemble.wait_until_serving().await.unwrap();
    let other = self::client(&ensemble.url(), LIMIT).await;
    assert!(within(LIMIT, other.check_stat("/one")).await.unwrap().is_some());
}

#[tokio::test]
async fn clients_are_counted_and_containers_removed() {
    let server =
        ZooKeeperServer::start_with(ZooKeeperOptions::new().without_fsync()).await.unwrap();
    let client = client(&server.url(), LIMIT).await;
    create(&client, "/locks", CreateMode::Container).await;
    create(&client, "/locks/one", CreateMode::Ephemeral).await;
    let ours = async || {
        let clients = server.clients().await.unwrap();
        *clients.iter().find(|known| known.session == client.session_id().0).unwrap()
    };
    let before = ours().await;
    let (_, _, watcher) = client.get_and_watch_data("/locks/one").await.unwrap();
    assert_eq!(server.metric("zk_watch_count").await.unwrap(), 1);
    client.delete("/locks/one", None).await.unwrap();
    within(LIMIT, watcher.changed()).await;
    // The server counts a packet only after sending it.
    eventually(LIMIT, async || ours().await.events() > before.events()).await;
    let after = ours().await;
    assert_eq!(after.received - before.received, 2);
    assert_eq!(after.events() - before.events(), 1);
    eventually(LIMIT, async || client.check_stat("/locks").await.unwrap().is_none()).await;
    server.metric("zk_nonsense").await.unwrap_err();
}

/// After the maximum sequence number, all later nodes get the same number. Concurrently created
/// nodes may even get numbers from -2147483648, less than those of all earlier nodes. Only the
/// transaction ids of their creation give their order.
#[tokio::test]
async fn sequential_nodes_after_an_overflow_are_ordered_by_their_transactions_alone() {
    let mut server = ZooKeeperServer::start().await.unwrap();
    let client = client(&server.url(), Duration::from_secs(6)).await;
    create(&client, "/locks", CreateMode::Persistent).await;
    server.kill();
    server.set_child_counter("/nothing", 7).await.unwrap_err();
    server.set_child_counter("/locks", i32::MAX - 1).await.unwrap();
    server.restart().await.unwrap();

    // The session of the first client may have expired in the meantime.
    let client = self::client(&server.url(), LIMIT).await;
    let last = i64::from(i32::MAX);
    for (path, number) in [("/locks/a-", last - 1), ("/locks/b-", last), ("/locks/c-", last)] {
        assert_eq!(create(&client, path, CreateMode::EphemeralSequential).await, number);
    }
    let [first, second] = ["/locks/b-2147483647", "/locks/c-2147483647"];
    let first = client.check_stat(first).await.unwrap().unwrap().czxid;
    let second = client.check_stat(second).await.unwrap().unwrap().czxid;
    assert!(first < second);
}

#[tokio::test]
async fn a_tls_zookeeper_has_an_unencrypted_port_for_the_testkit() {
    let tls = TlsFolder::new().unwrap();
    let server = ZooKeeperServer::start_with(ZooKeeperOptions::new().tls(&tls)).await.unwrap();
    let handshake = Command::new("openssl")
        .args([
            "s_client",
            "-brief",
            "-verify_return_error",
            "-connect",
            &server.addr().to_string(),
        ])
        .arg("-CAfile")
        .arg(tls.ca_file())
        .output()
        .unwrap();
    assert!(handshake.status.success(), "{handshake:?}\n{}", server.output_text());
    let addr = server.addr().to_string();
    let plain = Client::connector().with_fail_eagerly().connect(&addr);
    within(LIMIT, plain).await.unwrap_err();
    assert_eq!(server.mode().await.unwrap().as_deref(), Some("standalone"));
}

#[tokio::test]
async fn a_zookeeper_that_cannot_start_reports_the_reason() {
    let wrong = ZooKeeperOptions::new().settings(&["tickTime=none"]);
    let error = ZooKeeperServer::start_with(wrong).await.unwrap_err().to_string();
    assert!(error.contains("\"none\""), "{error}");
    let missing = ZooKeeperOptions::new().classes("/nowhere/zookeeper.jar");
    let error = ZooKeeperServer::start_with(missing).await.unwrap_err().to_string();
    assert!(error.contains("ClassNotFoundException"), "{error}");
}
