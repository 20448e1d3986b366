//! `FencedWrites` on real servers: a fenced write of a former holder is refused.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use registry_core::{BackendErrorKind, FencingToken, LockGuard, LockOptions, LostReason, Registry};
use registry_redis::{Fenced, FencedScript, FencedWrites, RedisBackend, RedisConfig, ScriptReply};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::redis::{RedisCluster, RedisOptions, RedisServer};

fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

fn config(url: &str) -> RedisConfig {
    // Opening a connection may take long on a busy machine.
    RedisConfig::from_url(url).unwrap().with_connect_timeout(Duration::from_secs(60))
}

async fn writes(server: &RedisServer) -> FencedWrites {
    FencedWrites::open(config(&server.url())).await.unwrap()
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
    assert!(server.send_command("GET k").await.unwrap().contains("second"));
    assert_eq!(writes.set(token(1), "other", "x").await.unwrap(), Fenced::Written(()));
}

/// Tokens of other stores may exceed the integers that a Lua number represents exactly.
#[tokio::test]
async fn tokens_of_any_size_are_distinguished() {
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
    let reply = writes.run(token(5), &nothing, &["m"], &[]).await.unwrap();
    assert_eq!(reply, Fenced::Written(ScriptReply::Nil));
    let many = FencedScript::new("return {KEYS[1], {1, 'x'}, redis.status_reply('fine')}");
    let bytes = |text: &str| ScriptReply::Bytes(text.as_bytes().to_vec());
    let reply = writes.run(token(5), &many, &["m"], &[]).await.unwrap();
    let inner = ScriptReply::Array(vec![ScriptReply::Int(1), bytes("x")]);
    let all = ScriptReply::Array(vec![bytes("m"), inner, bytes("fine")]);
    assert_eq!(reply, Fenced::Written(all));
    let several = FencedScript::new("return 'first', 'second'");
    let reply = writes.run(token(5), &several, &["m"], &[]).await.unwrap();
    assert_eq!(reply, Fenced::Written(bytes("first")));
}

#[tokio::test]
async fn an_invalid_write_returns_the_reason() {
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

/// The reply is lost, or a command of the script fails after an earlier command has written.
#[tokio::test]
async fn an_error_of_a_write_that_was_executed_leaves_the_outcome_unknown() {
    let server = RedisServer::start(&[]).await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let writes = FencedWrites::open(config(&format!("redis://{}", proxy.addr()))).await.unwrap();
    // Caches the script, so that the next request is the write itself.
    writes.set(token(1), "k", "before").await.unwrap();
    proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
    let error = writes.set(token(1), "k", "unanswered").await.unwrap_err();
    assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Transient, false), "{error:?}");
    assert!(server.send_command("GET k").await.unwrap().contains("unanswered"));

    proxy.set_mode(ProxyMode::Pass).await.unwrap();
    let failing = FencedScript::new(
        "redis.call('SET', KEYS[1], 'half'); return redis.call('LPUSH', KEYS[1], 'rest')",
    );
    let error = writes.run(token(1), &failing, &["k"], &[]).await.unwrap_err();
    assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Protocol, false), "{error:?}");
    assert!(server.send_command("GET k").await.unwrap().contains("half"));

    let busy = "redis.call('SET', KEYS[1], 'rest'); return redis.error_reply('BUSY later')";
    let error = writes.run(token(1), &FencedScript::new(busy), &["k"], &[]).await.unwrap_err();
    assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Transient, false), "{error:?}");
    assert!(server.send_command("GET k").await.unwrap().contains("rest"));
}

/// The holder ignores the end of its lease and writes after the next holder.
#[tokio::test]
async fn a_write_after_the_lease_is_refused() {
    let server = RedisServer::start(&[]).await.unwrap();
    let open = async || {
        let backend = RedisBackend::open(config(&server.url())).await.unwrap();
        Registry::builder(Arc::new(backend)).build().unwrap()
    };
    let (registry_a, registry_b) = (open().await, open().await);
    let writes = writes(&server).await;
    let options = LockOptions::new().lease(Duration::from_secs(2)).auto_renew(false);
    let slow = registry_a.obtain("k").lock_with(options).await.unwrap();
    slow.lost().await;
    let next = registry_b.obtain("k").lock().await.unwrap();
    let newest = next.fencing_token();
    assert_eq!(writes.set(newest, "r", "next").await.unwrap(), Fenced::Written(()));
    let late = writes.set(slow.fencing_token(), "r", "first").await.unwrap();
    assert_eq!(late, Fenced::Stale { newest });
}

/// Asserts that a holder's write is refused once the next holder has written. `end` ends the lock.
/// If `is_parked`, the write is polled once before `end` and completed after the write of the next
/// holder.
async fn assert_refused_after(
    options: LockOptions,
    end: impl AsyncFnOnce(&Registry, LockGuard),
    is_parked: bool,
) {
    let server = RedisServer::start(&[]).await.unwrap();
    let open = async || {
        let backend = RedisBackend::open(config(&server.url())).await.unwrap();
        Registry::builder(Arc::new(backend)).build().unwrap()
    };
    let (registry_a, registry_b) = (open().await, open().await);
    let (writes, next_writes) = (writes(&server).await, writes(&server).await);
    let guard = registry_a.obtain("k").lock_with(options).await.unwrap();
    let token = guard.fencing_token();
    let first = writes.set(token, "r", "first").await.unwrap();
    assert_eq!(first, Fenced::Written(()));
    let mut late = Box::pin(writes.set(token, "r", "late"));
    let mut result_of_first_poll = None;
    if is_parked && let Poll::Ready(written) = futures_util::poll!(late.as_mut()) {
        result_of_first_poll = Some(written.unwrap());
    }
    end(&registry_a, guard).await;
    let next = registry_b.obtain("k").lock().await.unwrap();
    let newest = next.fencing_token();
    let written = next_writes.set(newest, "r", "next").await.unwrap();
    assert_eq!(written, Fenced::Written(()));
    let late = match result_of_first_poll {
        Some(result) => result,
        None => late.await.unwrap(),
    };
    match late {
        Fenced::Stale { newest: reported } => assert_eq!(reported, newest),
        // The first poll sent the write, which arrived before the write of the next holder.
        written => assert!(is_parked, "{written:?}"),
    }
    assert!(server.send_command("GET r").await.unwrap().contains("next"));
}

#[tokio::test]
async fn a_write_after_the_max_hold_is_refused() {
    let options = LockOptions::new().max_hold(Duration::from_secs(1));
    assert_refused_after(
        options,
        async |_, guard| assert_eq!(guard.lost().await, LostReason::MaxHold),
        false,
    )
    .await;
}

#[tokio::test]
async fn a_write_after_the_end_of_a_min_hold_is_refused() {
    let options = LockOptions::new().min_hold(Duration::from_secs(1));
    assert_refused_after(options, async |_, guard| guard.unlock().await.unwrap(), false).await;
}

#[tokio::test]
async fn a_write_after_the_close_is_refused() {
    let close = async |registry_a: &Registry, guard: LockGuard| {
        assert_eq!(registry_a.close(Duration::from_millis(100)).await.lost, 1);
        drop(guard);
    };
    assert_refused_after(LockOptions::new(), close, false).await;
}

#[tokio::test]
async fn a_parked_write_never_follows_that_of_the_next_holder() {
    assert_refused_after(LockOptions::new(), async |_, guard| drop(guard), true).await;
}

#[tokio::test]
async fn a_cluster_stores_the_token_in_the_slot_of_the_resource() {
    // No node fails, and on a busy machine nodes with a short time-out would suspect each other.
    let options = RedisOptions::new().args(&["--cluster-node-timeout", "10000"]);
    let cluster = RedisCluster::start_with(&options).await.unwrap();
    let writes = FencedWrites::open(config(&cluster.url())).await.unwrap();
    for key in ["a", "b", "c", "{tag}x", "x{tag}y", "d/{e"] {
        assert_eq!(writes.set(token(2), key, "x").await.unwrap(), Fenced::Written(()), "{key}");
        let late = writes.set(token(1), key, "y").await.unwrap();
        assert_eq!(late, Fenced::Stale { newest: token(2) }, "{key}");
    }
}
