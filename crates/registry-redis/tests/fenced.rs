//! Writes that a stale holder cannot make.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendErrorKind, FencingToken, LockOptions, LockRegistry, Registry};
use registry_redis::{Fenced, FencedScript, FencedWrites, RedisBackend, RedisConfig, ScriptReply};
use registry_testkit::redis::{RedisCluster, RedisServer};

fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

async fn writes(server: &RedisServer) -> FencedWrites {
    FencedWrites::open(RedisConfig::from_url(&server.url()).unwrap()).await.unwrap()
}

#[tokio::test]
async fn an_older_token_writes_nothing() {
    let server = RedisServer::start(&[]).await.unwrap();
    let writes = writes(&server).await;
    assert_eq!(writes.set(token(17), "k", "first").await.unwrap(), Fenced::Written(()));
    assert_eq!(writes.set(token(17), "k", "again").await.unwrap(), Fenced::Written(()));
    assert_eq!(writes.set(token(18), "k", "second").await.unwrap(), Fenced::Written(()));
    let stale = Fenced::Stale { newest: token(18) };
    assert_eq!(writes.set(token(17), "k", "late").await.unwrap(), stale);
    assert_eq!(writes.set(token(9), "k", "later").await.unwrap(), stale);
    assert!(server.ask("GET k").await.unwrap().contains("second"));
    assert_eq!(writes.set(token(1), "other", "x").await.unwrap(), Fenced::Written(()));
}

/// Other stores have larger numbers than Lua can count.
#[tokio::test]
async fn tokens_of_any_size_are_told_apart() {
    let server = RedisServer::start(&[]).await.unwrap();
    let writes = writes(&server).await;
    let last = u64::try_from(i64::MAX).unwrap();
    assert_eq!(writes.set(token(last), "k", "x").await.unwrap(), Fenced::Written(()));
    let stale = Fenced::Stale { newest: token(last) };
    assert_eq!(writes.set(token(last - 1), "k", "y").await.unwrap(), stale);
}

#[tokio::test]
async fn hashes_and_scripts_are_fenced_too() {
    let server = RedisServer::start(&[]).await.unwrap();
    let writes = writes(&server).await;
    assert_eq!(writes.hset(token(2), "h", "f", b"\0v").await.unwrap(), Fenced::Written(()));
    assert!(matches!(writes.hset(token(1), "h", "f", "w").await.unwrap(), Fenced::Stale { .. }));
    let add = FencedScript::new("return redis.call('INCRBY', KEYS[1], ARGV[1])");
    let added = writes.run(token(5), &add, &["n"], &[b"40"]).await.unwrap();
    assert_eq!(added, Fenced::Written(ScriptReply::Int(40)));
    let added = writes.run(token(5), &add, &["n"], &[b"2"]).await.unwrap();
    assert_eq!(added, Fenced::Written(ScriptReply::Int(42)));
    let nothing = FencedScript::new("redis.call('SET', KEYS[1], 1)");
    let said = writes.run(token(5), &nothing, &["m"], &[]).await.unwrap();
    assert_eq!(said, Fenced::Written(ScriptReply::Nil));
    let many = FencedScript::new("return {KEYS[1], {1, 'x'}, redis.status_reply('fine')}");
    let bytes = |text: &str| ScriptReply::Bytes(text.as_bytes().to_vec());
    let said = writes.run(token(5), &many, &["m"], &[]).await.unwrap();
    let inner = ScriptReply::Array(vec![ScriptReply::Int(1), bytes("x")]);
    let all = ScriptReply::Array(vec![bytes("m"), inner, bytes("fine")]);
    assert_eq!(said, Fenced::Written(all));
}

#[tokio::test]
async fn what_cannot_be_written_says_why() {
    let server = RedisServer::start(&[]).await.unwrap();
    let writes = writes(&server).await;
    let none = writes.run(token(1), &FencedScript::new(""), &[], &[]).await.unwrap_err();
    assert_eq!((none.kind(), none.refused()), (BackendErrorKind::Misconfigured, true));
    let broken = FencedScript::new("this is not Lua");
    let error = writes.run(token(1), &broken, &["k"], &[]).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol);
    let quorum = RedisConfig::quorum((1..=3).map(|port| ("127.0.0.1".to_owned(), port)));
    let error = FencedWrites::open(quorum).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
}

/// The whole point: the lease is over, the holder does not know, and its write is refused.
#[tokio::test]
async fn a_holder_that_came_too_late_is_refused() {
    let server = RedisServer::start(&[]).await.unwrap();
    let open = async || {
        let config = RedisConfig::from_url(&server.url()).unwrap();
        Registry::builder(Arc::new(RedisBackend::open(config).await.unwrap())).build().unwrap()
    };
    let (ours, theirs) = (open().await, open().await);
    let writes = writes(&server).await;
    let options = LockOptions::new().lease(Duration::from_millis(500)).renew(false);
    let slow = ours.obtain("k").lock_with(options).await.unwrap().unwrap();
    slow.lost().await;
    let next = theirs.obtain("k").lock().await.unwrap();
    let theirs = next.fencing_token().unwrap();
    assert_eq!(writes.set(theirs, "r", "theirs").await.unwrap(), Fenced::Written(()));
    let late = writes.set(slow.fencing_token().unwrap(), "r", "ours").await.unwrap();
    assert_eq!(late, Fenced::Stale { newest: theirs });
}

#[tokio::test]
async fn in_a_cluster_the_token_is_where_the_resource_is() {
    let cluster = RedisCluster::start().await.unwrap();
    let config = RedisConfig::from_url(&cluster.url()).unwrap();
    let writes = FencedWrites::open(config).await.unwrap();
    for key in ["a", "b", "c", "{tag}x", "x{tag}y", "d/{e"] {
        assert_eq!(writes.set(token(2), key, "x").await.unwrap(), Fenced::Written(()), "{key}");
        let late = writes.set(token(1), key, "y").await.unwrap();
        assert_eq!(late, Fenced::Stale { newest: token(2) }, "{key}");
    }
}
