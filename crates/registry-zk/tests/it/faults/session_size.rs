//! Sessions with many nodes or long paths. The end of a session is one transaction with all paths,
//! which every server must be able to read.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use registry_core::{LockError, LockGuard, LockOptions, LostReason, Registry};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions, ZooKeeperServer};
use registry_testkit::{eventually, within};
use registry_zk::{Multi as _, SessionsExhausted, ZkBackend, ZkConfig};
use tokio::time::timeout;

use super::support::{config, registry, secs};

/// So long that no session ends while the locks are acquired, even on a slow machine.
const SESSION: Duration = Duration::from_secs(60);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of concurrent callers.
const CONCURRENT_CALLERS: usize = 200;
/// About 140 keys of this length fill a session.
const LONG_KEY_LENGTH: usize = 3_600;

fn long_key(number: usize) -> String {
    format!("{number:04}{}", "k".repeat(LONG_KEY_LENGTH - 4))
}

async fn open(url: &str, sessions_max: u32) -> (Arc<ZkBackend>, Registry) {
    let config = config(url, SESSION).with_request_timeout(REQUEST_TIMEOUT);
    let config = config.with_sessions_max(sessions_max);
    let backend = Arc::new(ZkBackend::open(config).await.unwrap());
    let builder = Registry::builder(Arc::clone(&backend) as Arc<_>).timeout(REQUEST_TIMEOUT);
    (backend, builder.build().unwrap())
}

async fn acquire_all(registry: &Registry, keys: impl Iterator<Item = String>) -> Vec<LockGuard> {
    let locks = keys.map(|key| registry.obtain(&key));
    let guards = stream::iter(locks).map(|lock| async move {
        let options = LockOptions::new().wait(LONG);
        lock.lock_with(options).await.unwrap()
    });
    guards.buffer_unordered(CONCURRENT_CALLERS).collect().await
}

/// Acquires long keys until one is refused. Returns the guards and the error.
async fn acquire_until_refused(registry: &Registry) -> (Vec<LockGuard>, LockError) {
    let mut guards = Vec::new();
    loop {
        match registry.obtain(&long_key(guards.len())).try_lock().await {
            Ok(guard) => guards.push(guard.unwrap()),
            Err(error) => return (guards, error),
        }
    }
}

/// Holds all keys in one client, ends its sessions, and asserts that the ensemble still serves
/// requests.
async fn assert_ensemble_survives_session_end_with(keys: impl Iterator<Item = String> + Clone) {
    // The heap must be large enough for all nodes.
    let options = ZooKeeperOptions::new().without_fsync().env("_JAVA_OPTIONS", "-Xmx192m");
    let mut ensemble = ZooKeeperEnsemble::start_with(3, &options).await.unwrap();
    let proxy = FaultProxy::start(ensemble.members()[0].addr()).unwrap();
    let (backend, client) = open(&format!("zk://{}", proxy.addr()), 8).await;
    let guards = acquire_all(&client, keys.clone()).await;
    let count = u64::try_from(guards.len()).unwrap();
    let sessions = backend.session_ids();
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    println!("{held} of {count} keys held in {} sessions", sessions.len());

    proxy.set_mode(ProxyMode::Refuse).await.unwrap();
    proxy.cut_all().await;
    // Ends the sessions as the leader does after their time-out.
    for session in sessions {
        ensemble.members()[1].end_session(session).await.unwrap();
    }
    ensemble.wait_until_serving().await.unwrap();
    for member in ensemble.members() {
        eventually(LONG, async || member.metric("zk_ephemerals_count").await.unwrap() == 0).await;
    }
    // Each member must also be able to read its own log.
    for number in 0..3 {
        ensemble.members_mut()[number].kill();
        ensemble.members_mut()[number].restart().await.unwrap();
        let other_client = registry(&ensemble.members()[number].url(), secs(10)).await;
        for key in keys.clone().step_by(usize::try_from(count / 3).unwrap()) {
            let lock = other_client.obtain(&key);
            let next = within(LONG, lock.lock()).await.unwrap();
            next.unlock().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ensemble_survives_the_end_of_a_process_with_thirty_thousand_keys() {
    assert_ensemble_survives_session_end_with((0..30_000).map(|number| format!("held/{number}")))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ensemble_survives_the_end_of_a_process_with_six_hundred_long_keys() {
    assert_ensemble_survives_session_end_with((0..600).map(long_key)).await;
}

#[tokio::test]
async fn the_error_of_a_lock_beyond_the_capacity_names_key_size_limit_and_option() {
    let options = ZooKeeperOptions::new().without_fsync();
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let (_backend, client) = open(&server.url(), 1).await;
    let (mut guards, refused) = acquire_until_refused(&client).await;
    let count = guards.len();
    let text = refused.to_string();
    let LockError::Backend { key, source, .. } = refused else { panic!("{refused:?}") };
    assert_eq!(key, long_key(count));
    assert!(source.is_retryable() && source.refused(), "{source:?}");
    assert!(text.contains(&key) && text.contains("`sessions`"), "{text}");
    let exhausted = source.source().unwrap().downcast_ref::<SessionsExhausted>().unwrap();
    assert_eq!((&*exhausted.key, exhausted.sessions_max), (&*key, 1));
    assert_eq!(exhausted.bytes_max, ZkConfig::NODE_BYTES_MAX);
    assert!(
        exhausted.bytes <= exhausted.bytes_max
            && exhausted.bytes + LONG_KEY_LENGTH + 200 > exhausted.bytes_max
    );
    assert_eq!(server.metric("zk_ephemerals_count").await.unwrap(), count as u64);

    // A released lock frees capacity for one more, in time for a waiting caller.
    let lock = client.obtain(&long_key(count));
    let waiter_task =
        tokio::spawn(async move { lock.try_lock_with(LockOptions::new().wait(LONG)).await });
    guards.pop().unwrap().unlock().await.unwrap();
    let next = within(LONG, waiter_task).await.unwrap().unwrap().unwrap();
    assert!(
        client.obtain(&long_key(count - 1)).try_lock().await.is_err(),
        "the session is full again"
    );
    next.unlock().await.unwrap();
}

#[tokio::test]
async fn a_waiter_releases_its_capacity_however_it_ends() {
    let options = ZooKeeperOptions::new().without_fsync();
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let (_other_backend, other_client) = open(&server.url(), 8).await;
    let held = acquire_all(&other_client, (0..200).map(long_key)).await;
    let (_backend, client) = open(&format!("zk://{}", proxy.addr()), 1).await;
    let mut waiter_tasks: Vec<_> = (0..200)
        .map(|number| {
            let lock = client.obtain(&long_key(number));
            tokio::spawn(async move { lock.lock().await })
        })
        .collect();
    let queued_waiters = async || {
        let nodes = server.metric("zk_ephemerals_count").await.unwrap();
        nodes.saturating_sub(200)
    };
    // The other attempts are refused repeatedly.
    eventually(LONG, async || queued_waiters().await > 130).await;
    for waiter_task in waiter_tasks.drain(..) {
        waiter_task.abort();
    }
    eventually(LONG, async || queued_waiters().await == 0).await;
    drop(held);
    eventually(LONG, async || server.metric("zk_ephemerals_count").await.unwrap() == 0).await;

    // Attempts that are dropped, or whose responses are lost.
    for round in 0..40 {
        let lost = round % 8 == 7;
        if lost {
            proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
        }
        let lock = client.obtain(&long_key(1_000 + round));
        let limit = Duration::from_micros(300 * round as u64);
        drop(timeout(limit, lock.try_lock()).await);
        if lost {
            proxy.set_mode(ProxyMode::Pass).await.unwrap();
        }
    }
    eventually(LONG, async || server.metric("zk_ephemerals_count").await.unwrap() == 0).await;
    within(LONG, client.idle()).await;
    let (guards, _) = acquire_until_refused(&client).await;
    assert!(guards.len() > 130, "{} keys fit", guards.len());
}

#[tokio::test]
async fn a_further_session_works_like_the_first_and_its_end_loses_only_its_own_locks() {
    let options = ZooKeeperOptions::new().without_fsync();
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let (backend, client) = open(&server.url(), 2).await;
    let [first] = backend.session_ids()[..] else { panic!("one session at first") };
    let (guards, _) = acquire_until_refused(&client).await;
    let [_, second] = backend.session_ids()[..] else { panic!("two sessions") };
    let last = guards.last().unwrap();
    let multi = last.multi().unwrap().create("/written", "in the second session");
    multi.commit().await.unwrap();
    let (other_backend, other_client) = open(&server.url(), 1).await;
    let busy = other_client.obtain(last.key()).try_lock().await.unwrap();
    assert!(busy.is_none(), "the lock of the second session is exclusive");

    server.end_session(second).await.unwrap();
    assert_eq!(within(LONG, last.lost()).await, LostReason::Gone);
    assert!(last.multi().is_err());
    // As many nodes remain as guards are held.
    eventually(LONG, async || {
        let held = guards.iter().filter(|guard| guard.is_held()).count();
        held < guards.len()
            && u64::try_from(held).unwrap() == server.metric("zk_ephemerals_count").await.unwrap()
    })
    .await;
    assert!(guards[0].is_held());
    assert_eq!(backend.session_ids(), [first]);
    let next = within(LONG, other_client.obtain(last.key()).lock()).await.unwrap();
    next.unlock().await.unwrap();
    // A new session replaces the one that has ended.
    let again = within(LONG, client.obtain(&long_key(5_000)).lock()).await.unwrap();
    assert_eq!(backend.session_ids().len(), 2);
    again.unlock().await.unwrap();

    drop(guards);
    _ = client.close(LONG).await;
    _ = other_client.close(LONG).await;
    drop((backend, other_backend));
    eventually(LONG, async || server.clients().await.unwrap().is_empty()).await;
}

#[tokio::test]
async fn a_further_session_ends_when_it_has_been_empty_for_its_time_out() {
    let options = ZooKeeperOptions::new().without_fsync();
    let server = ZooKeeperServer::start_with(options).await.unwrap();
    let config = config(&server.url(), secs(20)).with_request_timeout(REQUEST_TIMEOUT);
    let backend = Arc::new(ZkBackend::open(config).await.unwrap());
    let client = Registry::builder(Arc::clone(&backend) as Arc<_>).lease(secs(10)).build().unwrap();
    let guards = acquire_all(&client, (0..200).map(long_key)).await;
    assert!(backend.session_ids().len() > 1);
    drop(guards);
    eventually(LONG, async || backend.session_ids().len() == 1).await;
    let [session] = backend.session_ids()[..] else { panic!("one session") };
    let clients = async || server.clients().await.unwrap();
    eventually(LONG, async || clients().await.iter().all(|client| client.session == session)).await;
    client.obtain("k").lock().await.unwrap().unlock().await.unwrap();
}
