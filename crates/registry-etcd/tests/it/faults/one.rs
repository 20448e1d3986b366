//! One member: it pauses, crashes, compacts its history and runs out of space; leases are revoked,
//! connections break, logins expire, and clients pause.

use registry_core::{LockError, LostReason};
use registry_etcd::EtcdConfig;
use registry_testkit::etcd::{EtcdOptions, EtcdServer};
use registry_testkit::holder::HolderRequest;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::workload::{
    assert_a_suspended_holder_is_replaced, end_acquisition_without_reply,
};
use registry_testkit::{assert_acquire_error, eventually, within};
use tokio::time::{Instant, sleep};

use super::child_process;
use super::workload::{LEASE, LONG, LONG_LEASE, Workload, millis, registry, secs};

pub(crate) async fn server() -> (EtcdServer, EtcdConfig) {
    let server = EtcdServer::start().await.unwrap();
    let config = config_of(server.addr());
    (server, config)
}

pub(crate) fn config_of(addr: std::net::SocketAddr) -> EtcdConfig {
    EtcdConfig::new([(addr.ip().to_string(), addr.port())])
}

#[tokio::test]
async fn an_error_names_operation_key_and_address() {
    let (mut server, config) = server().await;
    let registry = registry(&config, LEASE).await;
    server.kill();
    let error = within(LONG, registry.obtain("orders/42").lock()).await.unwrap_err();
    assert_eq!(
        assert_acquire_error(&error, "orders/42", &server.addr().to_string()),
        "etcd: no connection; check that the member runs at this address"
    );
}

#[tokio::test]
async fn a_member_paused_for_less_than_a_lease_ends_no_hold() {
    let (server, config) = server().await;
    let workload = Workload::start(&config, LONG_LEASE).await;
    workload.pause_briefly(&server).await;
    workload.end(&server).await.assert_no_losses();
}

#[tokio::test]
async fn a_member_paused_for_longer_than_a_lease_causes_no_second_holder() {
    let (server, config) = server().await;
    let workload = Workload::start(&config, LEASE).await;
    workload.pause_until_losses(&server).await;
    workload.end(&server).await.assert_losses_are(LostReason::Expired);
}

#[tokio::test]
async fn crashes_of_the_member_break_no_guarantee() {
    let (mut server, config) = server().await;
    let workload = Workload::start(&config, LEASE).await;
    for down in [millis(0), LEASE / 2, LEASE * 3 / 2] {
        workload.wait_for_progress().await;
        server.kill();
        sleep(down).await;
        server.restart().await.unwrap();
    }
    workload.wait_for_progress().await;
    workload.end(&server).await.assert_guarantees();
}

/// Returns the lease of the first entry in the queue of `key`.
pub(crate) async fn first_lease(server: &EtcdServer, key: &str) -> Option<String> {
    let queue = format!("lock-registry/{key}/");
    let args = ["get", &queue, "--prefix", "--sort-by", "CREATE", "--limit", "1", "--keys-only"];
    let names = server.ctl(&args).await.unwrap();
    names.trim().rsplit_once('/').map(|(_, lease)| lease.to_owned())
}

#[tokio::test]
async fn a_holder_is_notified_at_once_of_a_revoked_lease() {
    let (server, config) = server().await;
    let workload = Workload::start(&config, LONG_LEASE).await;
    for round in 1..=10 {
        workload.wait_for_progress().await;
        workload.wait_until_long_held().await;
        for number in 0..3 {
            let lease = first_lease(&server, &format!("steady%2F{number}")).await.unwrap();
            server.ctl(&["lease", "revoke", &lease]).await.unwrap();
        }
        workload.wait_for_long_held_losses(3 * round).await;
    }
    workload.wait_for_progress().await;
    workload.end(&server).await.assert_losses_are(LostReason::Gone);
}

/// Returns all keys of locks: queue entries and tombstones.
pub(crate) async fn lock_keys(server: &EtcdServer) -> Vec<String> {
    let names = server.ctl(&["get", "lock-registry/", "--prefix", "--keys-only"]).await.unwrap();
    names.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// No claim waits behind the holder. Only the holder's tombstone reveals to the next claim that the
/// holder may not have been notified yet.
#[tokio::test]
async fn a_waiter_is_granted_only_after_the_previous_holder_is_notified_of_its_loss() {
    let (server, config) = server().await;
    // `registry` derives the response timeout from the lease. The grants of the second client are
    // delayed, because the previous holder lost the lock.
    let (first_client, second_client) =
        (registry(&config, LEASE).await, registry(&config, LONG_LEASE).await);
    let (lock, next) = (first_client.obtain("key"), second_client.obtain("key"));
    for round in 0..6 {
        let guard = lock.lock().await.unwrap();
        if round == 0 {
            // Longer than a tombstone's lease lasts without a keep-alive.
            sleep(LEASE * 5).await;
        }
        let keys = lock_keys(&server).await;
        assert_eq!(keys.len(), 2, "an entry and its tombstone: {keys:?}");
        if round % 2 == 0 {
            let lease = first_lease(&server, "key").await.unwrap();
            server.ctl(&["lease", "revoke", &lease]).await.unwrap();
        } else {
            server.ctl(&["del", "lock-registry/key/", "--prefix"]).await.unwrap();
        }
        let waits = round % 3 == 0;
        let acquired = if waits { next.lock().await.map(Some) } else { next.try_lock().await };
        let acquired = acquired.unwrap().expect("the queue is empty");
        assert!(!guard.is_held(), "the holder was not notified");
        acquired.unlock().await.unwrap();
        // The tombstone is deleted, so the next claim is not delayed.
        eventually(LONG, async || match lock_keys(&server).await {
            keys if keys.is_empty() => Ok(()),
            keys => Err(format!("{keys:?}")),
        })
        .await;
        drop(guard);
    }
}

/// The next claim cannot know whether the holder was notified, so its grant is delayed.
#[tokio::test]
async fn a_grant_after_an_unreachable_holder_is_delayed() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let (first_client, second_client) =
        (registry(&config_of(proxy.addr()), LONG_LEASE).await, registry(&config, LONG_LEASE).await);
    let guard = first_client.obtain("key").lock().await.unwrap();
    proxy.set_mode(ProxyMode::BlackHole).await.unwrap();
    let lease = first_lease(&server, "key").await.unwrap();
    server.ctl(&["lease", "revoke", &lease]).await.unwrap();
    let started = Instant::now();
    let acquired =
        second_client.obtain("key").try_lock().await.unwrap().expect("the queue is empty");
    assert!(started.elapsed() >= millis(250), "too soon: after {:?}", started.elapsed());
    assert_eq!(within(LONG, guard.lost()).await, LostReason::Expired);
    acquired.unlock().await.unwrap();
}

/// The process continues to hold another lock, so the end of the process does not delete the keys.
#[tokio::test]
async fn a_lost_lock_leaves_no_keys() {
    let (server, config) = server().await;
    let first_client = registry(&config, LEASE).await;
    let other = first_client.obtain("other").lock().await.unwrap();
    for round in 0..4 {
        let guard = first_client.obtain("key").lock().await.unwrap();
        server.ctl(&["del", "lock-registry/key/", "--prefix"]).await.unwrap();
        within(LONG, guard.lost()).await;
        if round % 2 == 0 {
            guard.unlock().await.unwrap_err();
        } else {
            drop(guard);
        }
        eventually(LONG, async || match lock_keys(&server).await {
            // The entry and the tombstone of the other lock.
            keys if keys.len() == 2 => Ok(()),
            keys => Err(format!("{keys:?}")),
        })
        .await;
    }
    other.unlock().await.unwrap();
}

#[tokio::test]
async fn compaction_ends_no_hold_and_no_wait() {
    let (server, config) = server().await;
    let workload = Workload::start(&config, LONG_LEASE).await;
    for _ in 0..10 {
        workload.wait_for_progress().await;
        let status = server.ctl(&["get", "x", "-w", "json"]).await.unwrap();
        let revision = status.split(r#""revision":"#).nth(1).unwrap();
        let revision: String = revision.chars().take_while(char::is_ascii_digit).collect();
        server.ctl(&["compaction", &revision]).await.unwrap();
    }
    workload.wait_for_progress().await;
    workload.end(&server).await.assert_no_losses();
}

#[tokio::test]
async fn lost_truncated_or_late_replies_break_no_guarantee() {
    let (server, config) = server().await;
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let configs: Vec<_> = proxies.iter().map(|proxy| config_of(proxy.addr())).collect();
    let workload = Workload::start_with(&configs, &config, LEASE).await;
    workload.disturb_connections(&proxies, LEASE / 2).await;
    workload.end(&server).await.assert_guarantees();
}

#[tokio::test]
async fn a_grant_with_a_lost_reply_is_adopted_or_released() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    // So long that only a release can free the key in time.
    let lease = secs(600);
    let second_client = registry(&config, lease).await;
    for round in 0..10 {
        let key = format!("reply-{round}");
        let first_client = registry(&config_of(proxy.addr()), lease).await;
        // Opens a connection and creates a lease.
        first_client.obtain("before").lock().await.unwrap().unlock().await.unwrap();
        proxy.set_mode(ProxyMode::DropReplies).await.unwrap();
        let lock = first_client.obtain(&key);
        let acquiring = tokio::spawn(async move { lock.lock().await });
        // The member has granted the lock, but the response was lost.
        let granted = async || match first_lease(&server, &key).await {
            Some(_) => Ok(()),
            None => Err("no entry".to_owned()),
        };
        eventually(LONG, granted).await;
        end_acquisition_without_reply(round, &proxy, acquiring, &second_client, &key).await;
    }
}

#[tokio::test]
async fn an_expired_login_is_renewed() {
    let options = EtcdOptions::new().login("worker", "opensesame").args(&["--auth-token-ttl", "2"]);
    let server = EtcdServer::start_with(options).await.unwrap();
    let config = config_of(server.addr()).with_login("worker", "opensesame");
    let workload = Workload::start(&config, LONG_LEASE).await;
    for _ in 0..3 {
        sleep(secs(3)).await;
        workload.wait_for_progress().await;
    }
    workload.end(&server).await.assert_no_losses();
}

/// The login expires during an idle time, then a caller waits for a lock.
#[tokio::test]
async fn a_waiter_with_an_expired_login_is_woken() {
    let options = EtcdOptions::new().login("worker", "opensesame").args(&["--auth-token-ttl", "2"]);
    let server = EtcdServer::start_with(options).await.unwrap();
    let config = config_of(server.addr()).with_login("worker", "opensesame");
    let (first_client, second_client) =
        (registry(&config, secs(60)).await, registry(&config, secs(60)).await);
    let guard = second_client.obtain("key").lock().await.unwrap();
    sleep(secs(4)).await;
    let lock = first_client.obtain("key");
    let waiting = tokio::spawn(async move { lock.lock().await });
    sleep(secs(4)).await;
    guard.unlock().await.unwrap();
    within(LONG, waiting).await.unwrap().unwrap().unlock().await.unwrap();
}

#[tokio::test]
async fn a_paused_holder_is_replaced_and_detects_its_loss() {
    let (server, config) = server().await;
    let url = format!("etcd://{}", server.addr());
    let configs = vec![config.clone(); 3];
    // Longer leases, so that a busy machine ends no hold of the clients that are not suspended.
    let workload = Workload::start_with(&configs, &config, LONG_LEASE).await;
    let successor = registry(&config, LONG_LEASE).await;
    let child = child_process::spawn_client(&url).await;
    let events = assert_a_suspended_holder_is_replaced(&workload, child, successor).await.unwrap();
    let outcome = workload.end_with(&server, events).await;
    assert_eq!(outcome.long_held_losses(), [], "no other client was paused");
    outcome.assert_guarantees();
}

/// The gap in etcdctl's recipe: a waiter that was suspended beyond its lease must not hold a lock
/// that was granted to another client meanwhile.
#[tokio::test]
async fn a_waiter_paused_beyond_its_lease_does_not_hold_the_lock_after_it_resumes() {
    let (server, config) = server().await;
    let url = format!("etcd://{}", server.addr());
    let (first, third) = (registry(&config, secs(60)).await, registry(&config, secs(60)).await);
    let mut waiter = child_process::spawn_client(&url).await;
    for _ in 0..2 {
        let guard = first.obtain("key").lock().await.unwrap();
        assert!(waiter.try_lock("key", LONG).await.unwrap().is_none());
        // The client joins the queue and is then suspended until its entry has expired.
        let queued = async || match entry_count(&server, "key").await {
            2 => Ok(()),
            other => Err(format!("{other} entries")),
        };
        let expired = async || match entry_count(&server, "key").await {
            1 => Ok(()),
            other => Err(format!("{other} entries")),
        };
        let pending = waiter.send(&HolderRequest::lock("key")).unwrap();
        eventually(LONG, queued).await;
        waiter.process().pause().await.unwrap();
        eventually(LONG, expired).await;
        guard.unlock().await.unwrap();
        let next = third.obtain("key").lock().await.unwrap();
        waiter.process().resume().unwrap();
        // The client has a new entry behind that of the third client.
        eventually(LONG, queued).await;
        assert!(next.is_held());
        next.unlock().await.unwrap();
        waiter.held(pending, LONG).await.unwrap();
        waiter.unlock("key", LONG).await.unwrap();
    }
    waiter.quit(LONG).await.unwrap();
}

async fn entry_count(server: &EtcdServer, key: &str) -> usize {
    let queue = format!("lock-registry/{key}/");
    let names = server.ctl(&["get", &queue, "--prefix", "--keys-only"]).await.unwrap();
    names.lines().filter(|line| !line.is_empty()).count()
}

/// A request that fails because the members have no space must not return `Busy`.
#[tokio::test]
async fn a_member_without_space_returns_an_error_and_grants_nothing() {
    let options = EtcdOptions::new().args(&["--quota-backend-bytes", "200000"]);
    let server = EtcdServer::start_with(options).await.unwrap();
    let registry = registry(&config_of(server.addr()), LEASE).await;
    let large = "x".repeat(100_000);
    for number in 0..100 {
        if server.ctl(&["put", &format!("large/{number}"), &large]).await.is_err() {
            break;
        }
    }
    let error = registry.obtain("key").try_lock().await.unwrap_err();
    assert!(matches!(error, LockError::Backend { .. }) && error.is_retryable(), "{error:?}");
    let found = registry.diagnose().await.unwrap();
    assert!(found.iter().any(|finding| finding.message.contains("NOSPACE")), "{found:?}");
}
