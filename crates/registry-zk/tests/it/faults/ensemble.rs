//! An ensemble of three members under crashes, pauses and network faults. It tolerates the loss of
//! one member, but not of two.

use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use registry_core::{LockGuard, LostReason};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::workload::LONG;
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions};
use registry_testkit::{eventually, within};
use registry_zk::ZkBackend;
use tokio::time::sleep;

use super::support::{
    LONG_SESSION, MINUTE_SESSION, SESSION, backend, config, finish, operator, registry,
    registry_over, secs, start_workload, start_workload_at,
};

/// Number of rounds. In each round, a follower and the leader are killed.
const ROUNDS: usize = 2;

#[tokio::test]
async fn members_that_crash_one_at_a_time_end_no_hold() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let workload = start_workload(&url, MINUTE_SESSION).await;
    for _ in 0..ROUNDS {
        let leader = ensemble.leader().await.unwrap();
        let follower = (leader + 1) % 3;
        // The leader last, because that changes the leader.
        for member in [follower, leader] {
            workload.wait_for_progress().await;
            ensemble.members_mut()[member].kill();
            workload.wait_for_progress().await;
            ensemble.members_mut()[member].restart().await.unwrap();
        }
    }
    workload.wait_for_progress().await;
    finish(workload, &url).await.assert_no_losses();
}

#[tokio::test]
async fn a_paused_leader_is_replaced_and_admits_no_second_holder() {
    let ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let workload = start_workload(&url, SESSION).await;
    for _ in 0..2 {
        workload.wait_for_progress().await;
        let leader = ensemble.leader().await.unwrap();
        ensemble.members()[leader].pause().unwrap();
        // Progress requires a new leader, so messages of the old leader are outdated when it
        // resumes.
        workload.wait_for_progress().await;
        ensemble.members()[leader].resume().unwrap();
    }
    workload.wait_for_progress().await;
    finish(workload, &url).await.assert_guarantees();
}

#[tokio::test]
async fn a_temporary_loss_of_the_majority_breaks_no_guarantee() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let workload = start_workload(&url, SESSION).await;
    let mut lost = 0;
    // An outage of 7 s is longer than the holders' leases. An outage of 1 s ends no hold.
    for (down, is_killed) in [(secs(7), false), (secs(1), true), (secs(7), true)] {
        workload.wait_for_progress().await;
        workload.wait_until_long_held().await;
        let leader = ensemble.leader().await.unwrap();
        let two = [leader, (leader + 1) % 3];
        for member in two {
            if is_killed {
                ensemble.members_mut()[member].kill();
            } else {
                ensemble.members()[member].pause().unwrap();
            }
        }
        if down > SESSION {
            lost += 3;
            workload.wait_for_long_held_losses(lost).await;
        }
        sleep(down).await;
        for member in two {
            if is_killed {
                ensemble.members_mut()[member].restart_without_waiting().await.unwrap();
            } else {
                ensemble.members()[member].resume().unwrap();
            }
        }
        ensemble.wait_until_serving().await.unwrap();
        lost = workload.long_held_losses();
    }
    workload.wait_for_progress().await;
    let outcome = finish(workload, &url).await;
    let reasons = outcome.long_held_losses();
    assert!(!reasons.contains(&LostReason::Closed), "{reasons:?}");
    outcome.assert_guarantees();
}

#[tokio::test]
async fn a_crash_of_all_members_breaks_no_guarantee() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let workload = start_workload(&url, SESSION).await;
    for _ in 0..2 {
        workload.wait_for_progress().await;
        for member in ensemble.members_mut() {
            member.kill();
        }
        for member in ensemble.members_mut() {
            member.restart_without_waiting().await.unwrap();
        }
        ensemble.wait_until_serving().await.unwrap();
    }
    workload.wait_for_progress().await;
    finish(workload, &url).await.assert_guarantees();
}

/// A partitioned leader continues to act as a leader for a while. The other members may elect a new
/// leader, which ends sessions that the old leader still serves.
#[tokio::test]
async fn a_leader_without_a_majority_confirms_no_session() {
    // The old leader continues alone for 40 s, four times the session timeout.
    let long_sync_limit = ZooKeeperOptions::new().settings(&["syncLimit=160"]);
    let ensemble = ZooKeeperEnsemble::start_with(3, &long_sync_limit).await.unwrap();
    let leader = ensemble.leader().await.unwrap();
    let members = ensemble.members();
    let client = registry(&members[leader].url(), secs(10)).await;
    let operator = operator(&members[leader]).await;
    let guard = client.obtain("k").lock().await.unwrap();
    // Long enough that several writes have confirmed the session.
    sleep(secs(5)).await;
    assert!(guard.is_held());
    for other in [leader + 1, leader + 2] {
        members[other % 3].pause().unwrap();
    }
    within(LONG, guard.lost()).await;
    // The old leader still responds.
    operator.sync("/").await.unwrap();
    let mode = eventually(secs(10), async || members[leader].mode().await).await;
    assert_eq!(mode.as_deref(), Some("leader"));
    for other in [leader + 1, leader + 2] {
        members[other % 3].resume().unwrap();
    }
    within(LONG, client.obtain("k").lock()).await.unwrap().unlock().await.unwrap();
}

/// The unresponsive member accepts connections and sends no response.
#[tokio::test]
async fn an_unresponsive_member_prevents_no_connection_and_ends_no_session() {
    run_with_an_unresponsive_member(LONG_SESSION * 2).await;
}

/// The client must derive its wait for each member from the granted session time-out, which is
/// shorter than the requested time-out.
#[tokio::test]
async fn an_unresponsive_member_prevents_no_connection_if_shorter_sessions_are_granted() {
    run_with_an_unresponsive_member(LONG_SESSION * 6).await;
}

async fn run_with_an_unresponsive_member(session: Duration) {
    const CLIENTS: usize = 12;
    let granted = LONG_SESSION * 2;
    let limit = format!("maxSessionTimeout={}", granted.as_millis());
    let options = ZooKeeperOptions::new().settings(&[&limit]);
    let ensemble = ZooKeeperEnsemble::start_with(3, &options).await.unwrap();
    let (url, members) = (ensemble.url(), ensemble.members());
    let leader = ensemble.leader().await.unwrap();
    let unresponsive = (leader + 1) % 3;
    let clients = join_all((0..CLIENTS).map(|_| backend(&url, session))).await;
    assert!(clients.iter().all(|client| client.session_timeout() == granted));
    let guards = try_join_all(clients.iter().enumerate().map(async |(number, client)| {
        let registry = registry_over(client);
        let guard = registry.obtain(&format!("k/{number}")).lock().await?;
        Ok::<_, registry_core::LockError>((registry, guard))
    }));
    let guards = guards.await.unwrap();
    let sessions: Vec<_> = clients.iter().map(|client| client.session_id().unwrap()).collect();
    members[unresponsive].pause().unwrap();
    // Further clients connect within the default connection time-out.
    for _ in 0..CLIENTS {
        let config = config(&url, session).with_request_timeout(LONG);
        ZkBackend::open(config).await.unwrap();
    }
    // Clients of the unresponsive member reconnect to the other members.
    eventually(LONG, async || {
        let mut other_clients = Vec::new();
        for member in [leader, (leader + 2) % 3] {
            other_clients.extend(members[member].clients().await.unwrap());
        }
        let is_on_another_member =
            |id: &i64| other_clients.iter().any(|client| client.session == *id);
        sessions.iter().all(is_on_another_member)
    })
    .await;
    let now: Vec<_> = clients.iter().map(|client| client.session_id().unwrap()).collect();
    assert_eq!(now, sessions);
    assert!(guards.iter().all(|(_, guard): &(_, LockGuard)| guard.is_held()));
    members[unresponsive].resume().unwrap();
}

/// Connections of all clients to all members break and stall, with up to four faults before each
/// recovery, so that sessions move between members.
///
/// Members do not crash in this test: ZooKeeper 3.8.0 may then show nodes on one member that the
/// others do not have.
#[tokio::test]
async fn concurrent_network_faults_break_no_guarantee() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    // Each client has its own proxy to each member.
    let proxies =
        |_| ensemble.members().iter().map(|to| FaultProxy::start(to.addr()).unwrap()).collect();
    let proxies_of_clients: Vec<Vec<FaultProxy>> = (0..3).map(proxies).collect();
    let urls = proxies_of_clients.iter().map(|proxies| {
        let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
        format!("zk://{}", addresses.join(","))
    });
    let workload = start_workload_at(&urls.collect::<Vec<_>>(), SESSION).await;
    for _ in 0..10 {
        for _ in 0..random.u8(1..5) {
            let mode = match random.u8(..8) {
                0 => ProxyMode::BlackHole,
                1 => ProxyMode::HoldReplies,
                2 => ProxyMode::DropReplies,
                3 => ProxyMode::ResetAfterRequest,
                4 => ProxyMode::CutAfter { reply_bytes: random.u64(..600) },
                5 => ProxyMode::Delay(Duration::from_millis(random.u64(..200))),
                6 => ProxyMode::Refuse,
                _ => ProxyMode::Pass,
            };
            let proxies = &proxies_of_clients[random.usize(..3)];
            for proxy in proxies {
                proxy.set_mode(mode).await.unwrap();
            }
            if random.bool() {
                proxies[random.usize(..3)].cut_all().await;
            }
            sleep(Duration::from_millis(random.u64(..1_500))).await;
        }
        for proxy in proxies_of_clients.iter().flatten() {
            proxy.set_mode(ProxyMode::Pass).await.unwrap();
        }
        workload.wait_for_progress().await;
    }
    finish(workload, &url).await.assert_guarantees();
}
