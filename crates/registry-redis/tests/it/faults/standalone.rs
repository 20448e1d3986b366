//! One server that writes to disk before it responds. While it keeps its data and its clock, faults
//! cost only time.

use std::time::Duration;

use registry_core::LostReason;
use registry_redis::RedisConfig;
use registry_testkit::clock::ClockShim;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::redis::{RedisOptions, RedisServer};
use registry_testkit::workload::{
    WorkloadOptions, assert_releases_without_reply_free_their_keys, end_acquisition_without_reply,
};
use tokio::time::sleep;

use super::remote_client;
use super::workload::{LEASE, LONG, LONG_LEASE, Workload, registry, secs};

async fn server() -> (RedisServer, RedisConfig) {
    let server = RedisServer::start(&[]).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    (server, config)
}

#[tokio::test]
async fn a_server_suspended_for_less_than_a_lease_loses_no_lock() {
    let (server, config) = server().await;
    let workload = Workload::start(&config, LONG_LEASE).await;
    workload.pause_briefly(&server).await;
    workload.end(&[&server]).await.assert_no_losses();
}

#[tokio::test]
async fn a_server_suspended_for_longer_than_a_lease_creates_no_second_holder() {
    let (server, config) = server().await;
    let workload = Workload::start(&config, LEASE).await;
    workload.pause_until_losses(&server).await;
    workload.end(&[&server]).await.assert_losses_are(LostReason::Expired);
}

#[tokio::test]
async fn crashes_of_a_durable_server_violate_no_guarantee() {
    let (mut server, config) = server().await;
    let workload = Workload::start(&config, LEASE).await;
    for down in [Duration::ZERO, LEASE / 2, LEASE * 3 / 2] {
        workload.wait_for_progress().await;
        server.kill();
        sleep(down).await;
        server.restart().await.unwrap();
    }
    workload.wait_for_progress().await;
    workload.end(&[&server]).await.assert_guarantees();
}

/// Locks whose records are lost are free. Two holders may therefore exist until the first one's
/// next renewal detects the loss.
#[tokio::test]
async fn a_restart_without_data_costs_exclusion_until_the_next_renewal_and_tokens_keep_growing() {
    let (mut server, config) = server().await;
    let workload = Workload::start(&config, LEASE).await;
    let mut windows = Vec::new();
    for round in 1..=2 {
        workload.wait_for_progress().await;
        workload.wait_until_long_held().await;
        let begin = workload.now();
        server.kill();
        server.delete_data().unwrap();
        server.restart().await.unwrap();
        windows.push(workload.window(begin, LEASE));
        workload.wait_for_progress().await;
        workload.wait_for_long_held_losses(3 * round).await;
        let losses = workload.losses();
        let delays = losses.iter().filter(|loss| loss.at > begin && loss.key.starts_with("steady"));
        let delays = delays.map(|loss| Duration::from_nanos(loss.at - begin));
        println!("notified after {:?}", delays.collect::<Vec<_>>());
    }
    let outcome = workload.end(&[&server]).await;
    outcome.assert_guarantees_except_in(&windows);
}

#[tokio::test]
async fn flushed_scripts_and_closed_connections_lose_no_lock() {
    let (server, config) = server().await;
    let workload = Workload::start(&config, LONG_LEASE).await;
    for _ in 0..5 {
        for command in ["SCRIPT FLUSH", "CLIENT KILL TYPE normal", "CLIENT KILL TYPE pubsub"] {
            server.send_command(command).await.unwrap();
            workload.wait_for_progress().await;
        }
    }
    workload.end(&[&server]).await.assert_no_losses();
}

#[tokio::test]
async fn a_grant_whose_response_was_lost_is_used_or_released() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let via_proxy = RedisConfig::from_url(&format!("redis://{}", proxy.addr())).unwrap();
    // So long that only a release can free the key in time.
    let lease = secs(600);
    let registry_b = registry(&config, lease).await;
    for round in 0..20 {
        let key = format!("reply/{round}");
        // A new registry in each round. Otherwise the proxy could cut the response to a release of
        // the previous round instead.
        let registry_a = registry(&via_proxy, lease).await;
        // Opens a connection, and the server caches the script.
        registry_a.obtain("before").lock().await.unwrap().unlock().await.unwrap();
        proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
        let lock = registry_a.obtain(&key);
        let acquiring = tokio::spawn(async move { lock.lock().await });
        // The server has granted the lock, but the response was lost.
        let held =
            async || server.send_command(&format!("EXISTS lock-registry:{{{key}}}")).await.unwrap();
        registry_testkit::eventually(LONG, async || held().await == ":1\r\n").await;
        end_acquisition_without_reply(round, &proxy, acquiring, &registry_b, &key).await;
    }
}

#[tokio::test]
async fn a_release_whose_response_was_lost_frees_the_key() {
    let (server, config) = server().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let via_proxy = RedisConfig::from_url(&format!("redis://{}", proxy.addr())).unwrap();
    let (registry_a, registry_b) =
        (registry(&via_proxy, secs(600)).await, registry(&config, secs(600)).await);
    assert_releases_without_reply_free_their_keys(20, &proxy, &registry_a, &registry_b).await;
}

#[tokio::test]
async fn lost_truncated_or_late_responses_violate_no_guarantee() {
    let (server, config) = server().await;
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let via_proxy =
        |proxy: &FaultProxy| RedisConfig::from_url(&format!("redis://{}", proxy.addr())).unwrap();
    let client_configs: Vec<_> = proxies.iter().map(via_proxy).collect();
    let workload =
        Workload::start_with(&client_configs, &config, WorkloadOptions::new(), LEASE).await;
    workload.disturb_connections(&proxies, Duration::ZERO).await;
    workload.end(&[&server]).await.assert_guarantees();
}

/// All leases end at once on the server, but not on the clients. Holders detect the loss at their
/// next renewal.
#[tokio::test]
async fn a_server_clock_that_jumps_ahead_ends_leases_early_and_tokens_keep_growing() {
    let clock = ClockShim::new().unwrap();
    let server = RedisServer::start_with(RedisOptions::new().clock(&clock)).await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let workload = Workload::start(&config, LEASE).await;
    workload.wait_for_progress().await;
    workload.wait_until_long_held().await;
    let begin = workload.now();
    clock.jump_wall(61).unwrap();
    let window = workload.window(begin, LEASE);
    workload.wait_for_long_held_losses(3).await;
    workload.wait_for_progress().await;
    let outcome = workload.end(&[&server]).await;
    outcome.assert_guarantees_except_in(&[window]);
}

/// All leases last longer on the server, and no client relies on that. They are over once the clock
/// is corrected.
#[tokio::test]
async fn a_server_clock_that_was_wrong_for_a_while_costs_exclusion_until_the_next_renewal() {
    let clock = ClockShim::new().unwrap();
    let server = RedisServer::start_with(RedisOptions::new().clock(&clock)).await.unwrap();
    // The server sends this user no invalidations.
    server.send_command("ACL SETUSER plain on >p ~* &* +@all -client|tracking").await.unwrap();
    let url = format!("redis://plain:p@{}", server.addr());
    let config = RedisConfig::from_url(&url).unwrap();
    let workload = Workload::start(&config, LEASE).await;
    workload.wait_until_long_held().await;
    clock.jump_wall(-61).unwrap();
    workload.wait_for_progress().await;
    // Every holder should renew during this time.
    sleep(LEASE * 3 / 2).await;
    workload.wait_until_long_held().await;
    // On a loaded machine, a renewal may be too late, and the lock expires.
    let losses = workload.losses();
    assert!(losses.iter().all(|loss| loss.reason == LostReason::Expired), "{losses:?}");
    let losses_before = workload.long_held_losses();
    let begin = workload.now();
    clock.jump_wall(61).unwrap();
    let window = workload.window(begin, LEASE);
    workload.wait_for_long_held_losses(losses_before + 3).await;
    workload.wait_for_progress().await;
    let outcome = workload.end(&[&server]).await;
    outcome.assert_guarantees_except_in(&[window]);
}

#[tokio::test]
async fn a_suspended_holder_is_replaced_and_notified() {
    let (server, _) = server().await;
    let (url, servers) = (server.url(), [&server]);
    let outcome = remote_client::a_suspended_holder_is_replaced_and_notified(&url, &servers);
    outcome.await.assert_guarantees();
}
