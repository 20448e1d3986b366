//! Failovers by sentinels. Writes that were not replicated are lost; holders are notified, tokens
//! grow, and fenced writes are safe.

use std::time::Duration;

use registry_core::{BackendErrorKind, LockError, LockOptions, LockRegistry as _, LostReason};
use registry_redis::RedisConfig;
use registry_testkit::history::Recorder;
use registry_testkit::history::host_clock;
use registry_testkit::redis::{RedisServer, SentinelSetup};
use registry_testkit::{eventually, within};
use tokio::time::{Instant, sleep};

use crate::contest::{Contest, LEASE, LONG, Resource, registry, secs};

async fn setup() -> (SentinelSetup, RedisConfig) {
    let setup = SentinelSetup::start().await.unwrap();
    let config = RedisConfig::from_url(&setup.url()).unwrap();
    (setup, config)
}

/// Returns the only server that holds locks, the master. The replicas are copies of it.
async fn master(setup: &SentinelSetup) -> &RedisServer {
    setup.server(setup.master().await.unwrap())
}

/// Waits until the workload's three clients use this server.
async fn followed(master: &RedisServer) {
    let clients = async || {
        let clients = master.ask("CLIENT LIST").await.unwrap();
        clients.lines().filter(|client| client.contains("cmd=eval")).count()
    };
    eventually(LONG, async || clients().await >= 3).await;
}

#[tokio::test]
async fn clients_follow_a_failover_by_command_and_tokens_grow_over_it() {
    let (setup, config) = setup().await;
    let contest = Contest::begin(&config).await;
    contest.goes_on().await;
    let begin = contest.now();
    let new = setup.failover().await.unwrap();
    // The old master keeps its role until the sentinels reconfigure it.
    let over = Instant::now();
    followed(setup.server(new)).await;
    println!("all clients are there {:?} after the failover", over.elapsed());
    let end = contest.after(LEASE);
    contest.goes_on().await;
    let outcome = contest.end(&[master(&setup).await]).await;
    outcome.assert_flawless_but_between(&[(begin, end)]);
}

#[tokio::test]
async fn clients_follow_a_failover_by_a_crash_and_tokens_grow_over_it() {
    let (mut setup, config) = setup().await;
    let contest = Contest::begin(&config).await;
    contest.goes_on().await;
    let begin = contest.now();
    let old = setup.kill_master().await.unwrap();
    let new = setup.wait_for_new_master(old).await.unwrap();
    let over = Instant::now();
    followed(setup.server(new)).await;
    println!("all clients are there {:?} after the failover", over.elapsed());
    let end = contest.after(LEASE);
    contest.goes_on().await;
    let outcome = contest.end(&[master(&setup).await]).await;
    outcome.assert_flawless_but_between(&[(begin, end)]);
}

/// The old master resumes and has not been reconfigured yet. No client may use it.
#[tokio::test]
async fn an_old_master_that_wakes_up_after_a_failover_is_not_asked_any_more() {
    let (setup, config) = setup().await;
    let contest = Contest::begin(&config).await;
    contest.goes_on().await;
    let begin = contest.now();
    let old = setup.pause_master().await.unwrap();
    setup.wait_for_new_master(old).await.unwrap();
    contest.goes_on().await;
    setup.resume(old).unwrap();
    let end = contest.after(LEASE);
    contest.goes_on().await;
    // As long as it believes that it is the master.
    sleep(LEASE * 3 / 2).await;
    let role = setup.server(old).ask("ROLE").await.unwrap();
    println!("the old master still thinks that it is one: {}", role.contains("master"));
    contest.goes_on().await;
    let outcome = contest.end(&[master(&setup).await]).await;
    outcome.assert_flawless_but_between(&[(begin, end)]);
}

/// A sequence that certainly loses a lock. The documented cost is exclusion until the next renewal,
/// and nothing else.
#[tokio::test]
async fn a_grant_that_no_replica_has_is_lost_by_a_crash_and_its_holder_told_at_its_next_renewal() {
    let (mut setup, config) = setup().await;
    let (ours, theirs) = (registry(&config, secs(30)).await, registry(&config, secs(30)).await);
    // Both servers have cached the scripts.
    for registry in [&ours, &theirs] {
        registry.obtain("before").lock().await.unwrap().unlock().await.unwrap();
    }
    let old = setup.master().await.unwrap();
    setup.isolate_replicas().await.unwrap();
    let guard = ours.obtain("k").lock().await.unwrap();
    setup.server_mut(old).kill();
    setup.resume_replicas(old).unwrap();
    let next = within(LONG, theirs.obtain("k").lock()).await.unwrap();
    println!("the first holder is told already: {}", !guard.is_held());
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Gone);
    let (recorder, resource) = (Recorder::new(host_clock()), Resource::default());
    let (token, newer) = (guard.fencing_token().unwrap(), next.fencing_token().unwrap());
    assert!(newer > token, "tokens grow though the last one is lost");
    assert!(resource.write(&recorder, 2, "k", newer));
    assert!(!resource.write(&recorder, 1, "k", token));
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    assert!(next.is_held(), "the successor is left alone");
    next.unlock().await.unwrap();
}

#[tokio::test]
async fn a_grant_that_must_have_a_replica_is_refused_where_it_would_be_lost() {
    let (mut setup, config) = setup().await;
    let safe = config.clone().with_replicas(1).with_replica_timeout(Duration::from_millis(200));
    let (ours, theirs) = (registry(&safe, secs(30)).await, registry(&config, secs(30)).await);
    let before = ours.obtain("before").lock().await.unwrap();
    let old = setup.master().await.unwrap();
    setup.isolate_replicas().await.unwrap();
    let options = || LockOptions::new().wait(secs(1));
    let error = ours.obtain("k").lock_with(options()).await.unwrap_err();
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!((source.kind(), source.refused()), (BackendErrorKind::Transient, true), "{error:?}");
    println!("{source}");
    assert!(before.renew(secs(30)).await.is_err(), "nothing is counted on that may be lost");
    ours.idle().await;
    assert!(
        setup.server(old).ask("EXISTS lock-registry:{k}").await.unwrap().contains(":0"),
        "what was refused is given back"
    );
    setup.server_mut(old).kill();
    setup.resume_replicas(old).unwrap();
    let next = within(LONG, theirs.obtain("k").lock()).await.unwrap();
    next.unlock().await.unwrap();
    // The locks that the replica had received still exist.
    eventually(LONG, async || before.renew(secs(30)).await.is_ok()).await;
    assert!(theirs.obtain("before").try_lock().await.unwrap().is_none());
    before.unlock().await.unwrap();
}
