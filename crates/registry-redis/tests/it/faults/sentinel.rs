//! Failovers by sentinels. Writes that were not replicated are lost; holders are notified, tokens
//! grow, and fenced writes are safe.

use std::time::Duration;

use registry_core::{BackendErrorKind, LockError, LockOptions, LostReason};
use registry_redis::RedisConfig;
use registry_testkit::history::Recorder;
use registry_testkit::history::host_clock;
use registry_testkit::redis::{RedisServer, SentinelOptions, SentinelSetup};
use registry_testkit::workload::FencedResource;
use registry_testkit::{eventually, within};
use tokio::time::{Instant, sleep};

use super::workload::{LEASE, LONG, Workload, registry, secs};

async fn setup() -> (SentinelSetup, RedisConfig) {
    // On a busy machine, sentinels with the default time-out would replace a healthy master.
    let options = SentinelOptions::new()
        .sentinel_line("sentinel down-after-milliseconds mymaster 5000")
        .sentinel_line("sentinel failover-timeout mymaster 10000");
    let setup = SentinelSetup::start_with(&options).await.unwrap();
    let config = RedisConfig::from_url(&setup.url()).unwrap();
    (setup, config)
}

/// Returns the master. Only its locks are checked, because the replicas are copies of the master.
async fn master(setup: &SentinelSetup) -> &RedisServer {
    setup.server(setup.master().await.unwrap())
}

/// Waits until the workload's three clients use this server.
async fn wait_for_clients(master: &RedisServer) {
    let clients = async || {
        let clients = master.send_command("CLIENT LIST").await.unwrap();
        clients.lines().filter(|client| client.contains("cmd=eval")).count()
    };
    eventually(LONG, async || clients().await >= 3).await;
}

#[tokio::test]
async fn clients_follow_a_manual_failover_and_tokens_keep_growing() {
    let (setup, config) = setup().await;
    let workload = Workload::start(&config, LEASE).await;
    workload.wait_for_progress().await;
    let begin = workload.now();
    let new = setup.failover().await.unwrap();
    // The old master keeps its role until the sentinels reconfigure it.
    let failover_at = Instant::now();
    wait_for_clients(setup.server(new)).await;
    println!("all clients are there {:?} after the failover", failover_at.elapsed());
    let window = workload.window(begin, LEASE);
    workload.wait_for_progress().await;
    let outcome = workload.end(&[master(&setup).await]).await;
    outcome.assert_guarantees_except_in(&[window]);
}

#[tokio::test]
async fn clients_follow_a_failover_after_a_crash_and_tokens_keep_growing() {
    let (mut setup, config) = setup().await;
    let workload = Workload::start(&config, LEASE).await;
    workload.wait_for_progress().await;
    let begin = workload.now();
    let old = setup.kill_master().await.unwrap();
    let new = setup.wait_for_new_master(old).await.unwrap();
    let failover_at = Instant::now();
    wait_for_clients(setup.server(new)).await;
    println!("all clients are there {:?} after the failover", failover_at.elapsed());
    let window = workload.window(begin, LEASE);
    workload.wait_for_progress().await;
    let outcome = workload.end(&[master(&setup).await]).await;
    outcome.assert_guarantees_except_in(&[window]);
}

/// The old master resumes and has not been reconfigured yet. No client may use it.
#[tokio::test]
async fn an_old_master_that_resumes_after_a_failover_is_not_used() {
    let (setup, config) = setup().await;
    let workload = Workload::start(&config, LEASE).await;
    workload.wait_for_progress().await;
    let begin = workload.now();
    let old = setup.pause_master().await.unwrap();
    setup.wait_for_new_master(old).await.unwrap();
    workload.wait_for_progress().await;
    setup.resume(old).unwrap();
    let window = workload.window(begin, LEASE);
    workload.wait_for_progress().await;
    // For about this long, the old master considers itself the master.
    sleep(LEASE * 3 / 2).await;
    let role = setup.server(old).send_command("ROLE").await.unwrap();
    println!("the old master still reports to be one: {}", role.contains("master"));
    workload.wait_for_progress().await;
    let outcome = workload.end(&[master(&setup).await]).await;
    outcome.assert_guarantees_except_in(&[window]);
}

/// This lease is longer than a failover whose first election fails. Sentinels retry after twice the
/// `failover-timeout`, which is 20 s here.
const FAILOVER_LEASE: Duration = Duration::from_secs(120);

/// A sequence that certainly loses a lock. The documented cost is exclusion until the next renewal,
/// and nothing else.
#[tokio::test]
async fn a_grant_without_a_replica_is_lost_by_a_crash_and_the_holder_is_notified_at_its_next_renewal()
 {
    let (mut setup, config) = setup().await;
    let (registry_a, registry_b) =
        (registry(&config, FAILOVER_LEASE).await, registry(&config, FAILOVER_LEASE).await);
    // Each registry opens its connection, and the master caches the scripts.
    for registry in [&registry_a, &registry_b] {
        registry.obtain("before").lock().await.unwrap().unlock().await.unwrap();
    }
    let old = setup.master().await.unwrap();
    setup.isolate_replicas().await.unwrap();
    let guard = registry_a.obtain("k").lock().await.unwrap();
    setup.server_mut(old).kill();
    setup.resume_all_except(old).unwrap();
    let next = within(LONG, registry_b.obtain("k").lock()).await.unwrap();
    println!("the first holder is notified already: {}", !guard.is_held());
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Gone);
    let (recorder, resource) = (Recorder::new(host_clock()), FencedResource::default());
    let (token, newer) = (guard.fencing_token(), next.fencing_token());
    assert!(newer > token, "tokens grow although the last one is lost");
    assert!(resource.write(&recorder, 2, "k", newer));
    assert!(!resource.write(&recorder, 1, "k", token));
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    assert!(next.is_held(), "the next holder keeps its lock");
    next.unlock().await.unwrap();
}

#[tokio::test]
async fn a_grant_that_requires_a_replica_is_refused_without_one() {
    let (mut setup, config) = setup().await;
    let safe = config.clone().with_replicas(1).with_replica_timeout(Duration::from_millis(200));
    let (registry_a, registry_b) =
        (registry(&safe, FAILOVER_LEASE).await, registry(&config, FAILOVER_LEASE).await);
    let before = registry_a.obtain("before").lock().await.unwrap();
    let old = setup.master().await.unwrap();
    setup.isolate_replicas().await.unwrap();
    let options = || LockOptions::new().wait(secs(1));
    let error = registry_a.obtain("k").try_lock_with(options()).await.unwrap_err();
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!((source.kind(), source.refused()), (BackendErrorKind::Transient, true), "{error:?}");
    println!("{source}");
    assert!(
        before.extend(FAILOVER_LEASE).await.is_err(),
        "a renewal that may be lost does not count"
    );
    registry_a.idle().await;
    assert!(
        setup.server(old).send_command("EXISTS lock-registry:{k}").await.unwrap().contains(":0"),
        "the refused grant is released"
    );
    setup.server_mut(old).kill();
    setup.resume_all_except(old).unwrap();
    let next = within(LONG, registry_b.obtain("k").lock()).await.unwrap();
    next.unlock().await.unwrap();
    // The locks that the replica had received still exist.
    eventually(LONG, async || before.extend(FAILOVER_LEASE).await.is_ok()).await;
    assert!(registry_b.obtain("before").try_lock().await.unwrap().is_none());
    before.unlock().await.unwrap();
}
