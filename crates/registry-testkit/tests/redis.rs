//! Redis servers, alone and together: what the other tests build on. Needs `redis-server`.

#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

use std::net::SocketAddr;

use registry_testkit::redis::{
    RedisCluster, RedisQuorum, RedisServer, Reply, SentinelOptions, SentinelSetup, ServerOptions,
};

async fn get(server: &RedisServer, key: &str) -> Option<String> {
    server.ask_args(&["GET", key]).await.unwrap().granted().unwrap().text()
}

async fn set(server: &RedisServer, key: &str, value: &str) {
    server.ask_args(&["SET", key, value]).await.unwrap().granted().unwrap();
}

async fn refusal(server: &RedisServer, words: &[&str]) -> String {
    server.ask_args(words).await.unwrap().granted().unwrap_err().to_string()
}

#[tokio::test]
async fn answers_come_whole_and_words_may_contain_anything() {
    let server = RedisServer::start(&[]).await.unwrap();
    let value = "a b\r\n\"".repeat(100_000).into_bytes();
    let words: [&[u8]; 3] = [b"SET", b"\0\r\n", &value];
    assert_eq!(server.ask_args(&words).await.unwrap(), Reply::Status("OK".into()));
    let read = server.ask_args(&[&b"GET"[..], b"\0\r\n"]).await.unwrap();
    assert!(read == Reply::Value(value));
    server.ask_args(&["SET", "long", &"x".repeat(1_000_000)]).await.unwrap();
    assert_eq!(server.ask("GET long").await.unwrap().len(), "$1000000\r\n".len() + 1_000_002);
    assert_eq!(server.ask("SHUTDOWN NOSAVE").await.unwrap(), "");
}

#[tokio::test]
async fn a_killed_server_comes_back_with_its_data_at_once() {
    let mut server = RedisServer::start(&[]).await.unwrap();
    for round in ["one", "two", "three"] {
        set(&server, round, round).await;
        server.kill();
        assert!(!server.is_up());
        server.ask("PING").await.unwrap_err();
        server.start_again().await.unwrap();
        assert_eq!(get(&server, round).await.as_deref(), Some(round));
    }
    server.pause().unwrap();
    server.start_again().await.unwrap();
    assert!(server.is_up() && !server.is_paused());
    assert_eq!(get(&server, "one").await.as_deref(), Some("one"));
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let wrong = RedisServer::start(&["--maxmemory", "much"]).await.unwrap_err().to_string();
    assert!(wrong.contains("much"), "{wrong}");
    let missing = ServerOptions::new().program("no-such-server");
    let missing = RedisServer::start_with(missing).await.unwrap_err().to_string();
    assert!(missing.contains("no-such-server"), "{missing}");
}

#[tokio::test]
async fn masters_of_a_quorum_know_nothing_of_each_other() {
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
async fn sentinels_choose_another_master_when_they_are_told_to() {
    let setup = SentinelSetup::start().await.unwrap();
    let old = setup.master().await.unwrap();
    assert!(setup.url().starts_with("redis+sentinel://127.0.0.1:"), "{}", setup.url());
    assert!(setup.url().ends_with("/mymaster") && !setup.url().contains(&old.to_string()));
    set(setup.server(old), "k", "v").await;
    setup.server(old).ask_args(&["WAIT", "2", "0"]).await.unwrap();
    let new = setup.failover().await.unwrap();
    assert!(new != old && new == setup.master().await.unwrap());
    assert_eq!(get(setup.server(new), "k").await.as_deref(), Some("v"));
}

#[tokio::test]
async fn what_isolated_replicas_missed_is_lost_with_the_master() {
    let mut setup = SentinelSetup::start().await.unwrap();
    let master = setup.master().await.unwrap();
    set(setup.server(master), "before", "v").await;
    setup.server(master).ask_args(&["WAIT", "2", "0"]).await.unwrap();
    let replicas = setup.isolate_replicas().await.unwrap();
    assert_eq!(replicas.len(), 2);
    let mut writer = setup.server(master).connect().await.unwrap();
    writer.ask_args(&["SET", "after", "v"]).await.unwrap().granted().unwrap();
    assert_eq!(writer.ask_args(&["WAIT", "1", "1"]).await.unwrap().number(), Some(0));
    let old = setup.kill_master().await.unwrap();
    setup.resume_replicas(old).unwrap();
    let new = setup.wait_for_new_master(old).await.unwrap();
    assert!(old == master && replicas.contains(&new));
    assert_eq!(get(setup.server(new), "before").await.as_deref(), Some("v"));
    assert_eq!(get(setup.server(new), "after").await, None);
}

#[tokio::test]
async fn sentinels_and_servers_can_want_logins_of_their_own() {
    let options = SentinelOptions::new()
        .servers(ServerOptions::new().login("app", "secret"))
        .sentinel_login("default", "other");
    let setup = SentinelSetup::start_with(&options).await.unwrap();
    let old = setup.pause_master().await.unwrap();
    let new = setup.wait_for_new_master(old).await.unwrap();
    setup.resume(old).unwrap();
    for addr in [new, setup.sentinels()[0].addr()] {
        let stranger = refused_without_login(addr).await;
        assert!(stranger.starts_with("-NOAUTH"), "{stranger}");
    }
}

/// What somebody without a login is told.
async fn refused_without_login(addr: SocketAddr) -> String {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    let mut stream = BufReader::new(tokio::net::TcpStream::connect(addr).await.unwrap());
    stream.write_all(b"PING\r\n").await.unwrap();
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    line
}

#[tokio::test]
async fn replicas_of_a_cluster_take_over() {
    let mut cluster = RedisCluster::start().await.unwrap();
    assert_eq!(cluster.nodes().len(), 6);
    let slot = RedisCluster::slot_of("k");
    let first = cluster.master_of(slot).await.unwrap();
    set(cluster.node(first), "k", "v").await;
    // Asked for, nothing is lost.
    let second = cluster.failover(slot).await.unwrap();
    assert_eq!(get(cluster.node(second), "k").await.as_deref(), Some("v"));
    let moved = refusal(cluster.node(first), &["GET", "k"]).await;
    assert_eq!(moved, format!("MOVED {slot} {second}"));
    cluster.settle().await.unwrap();
    // After a crash, what had not reached the replica is.
    assert_eq!(cluster.isolate_replicas_of(slot).await.unwrap(), [first]);
    set(cluster.node(second), "k", "lost").await;
    assert_eq!(cluster.kill_master_of(slot).await.unwrap(), second);
    cluster.resume(first).unwrap();
    assert_eq!(cluster.wait_for_new_master_of(slot, second).await.unwrap(), first);
    assert_eq!(get(cluster.node(first), "k").await.as_deref(), Some("v"));
    cluster.node_mut(second).start_again().await.unwrap();
    cluster.settle().await.unwrap();
    assert_eq!(cluster.replicas_of(slot).await.unwrap(), [second]);
}

#[tokio::test]
async fn a_slot_moves_with_its_keys_and_may_stop_half_way() {
    let cluster = RedisCluster::start_with(&ServerOptions::new().login("app", "pw")).await.unwrap();
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
    let ask = refusal(cluster.node(from), &["GET", "{k}7"]).await;
    assert_eq!(ask, format!("ASK {slot} {to}"));
    assert_eq!(get(cluster.node(from), "{k}8").await.as_deref(), Some("v"));
    let both = refusal(cluster.node(from), &["MGET", "{k}7", "{k}8"]).await;
    assert!(both.starts_with("TRYAGAIN"), "{both}");
    cluster.finish_migration(migration).await.unwrap();
    assert_eq!(cluster.master_of(slot).await.unwrap(), to);
    assert_eq!(refusal(cluster.node(from), &["GET", "{k}7"]).await, format!("MOVED {slot} {to}"));
    for number in 0..250 {
        let value = get(cluster.node(to), &format!("{{k}}{number}")).await;
        assert_eq!(value.as_deref(), Some("v"), "{number}");
    }
    cluster.migrate(slot, from).await.unwrap();
    assert_eq!(get(cluster.node(from), "{k}249").await.as_deref(), Some("v"));
}
