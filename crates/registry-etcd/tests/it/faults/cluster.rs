//! A cluster of three members. It tolerates the loss of any one member, and only the clients of
//! that member are affected.

use registry_core::LostReason;
use registry_etcd::EtcdConfig;
use registry_testkit::etcd::EtcdCluster;
use tokio::time::sleep;

use super::workload::{LEASE, Workload, millis, secs};

async fn cluster() -> (EtcdCluster, EtcdConfig) {
    let cluster = EtcdCluster::start(3).await.unwrap();
    let config = EtcdConfig::from_url(&cluster.url()).unwrap();
    (cluster, config)
}

/// Longer than any election takes on a busy machine.
const LEASE_OVER_ELECTIONS: std::time::Duration = secs(12);

#[tokio::test]
async fn the_crash_of_any_member_ends_no_hold() {
    let (mut cluster, config) = cluster().await;
    let workload = Workload::start(&config, LEASE_OVER_ELECTIONS).await;
    for _ in 0..2 {
        let leader = cluster.leader().await.unwrap();
        for member in [(leader + 1) % 3, leader] {
            workload.wait_for_progress().await;
            cluster.member_mut(member).kill();
            workload.wait_for_progress().await;
            cluster.member_mut(member).restart().await.unwrap();
        }
    }
    workload.wait_for_progress().await;
    workload.end(cluster.member(0)).await.assert_no_losses();
}

#[tokio::test]
async fn a_leader_paused_for_longer_than_a_lease_breaks_no_fenced_write() {
    let (cluster, config) = cluster().await;
    let workload = Workload::start(&config, LEASE).await;
    for _ in 0..4 {
        workload.wait_for_progress().await;
        workload.wait_until_long_held().await;
        let leader = cluster.leader().await.unwrap();
        cluster.member(leader).pause().unwrap();
        sleep(LEASE * 2).await;
        workload.wait_for_progress().await;
        cluster.member(leader).resume().unwrap();
    }
    workload.wait_for_progress().await;
    // When the leader resumes, members of this etcd version may end leases of live holders (etcd
    // issue 15247).
    workload.end(cluster.member(0)).await.assert_guarantees_despite_late_losses();
}

#[tokio::test]
async fn a_leader_paused_for_about_a_lease_breaks_no_fenced_write() {
    let (cluster, config) = cluster().await;
    let workload = Workload::start(&config, LEASE).await;
    // A resumed leader sends outdated responses until it detects that it is no longer the leader.
    for part in [3, 4, 5, 6] {
        workload.wait_for_progress().await;
        let leader = cluster.leader().await.unwrap();
        cluster.member(leader).pause().unwrap();
        sleep(LEASE * part / 5).await;
        cluster.member(leader).resume().unwrap();
    }
    workload.wait_for_progress().await;
    // When the leader resumes, members of this etcd version may end leases of live holders (etcd
    // issue 15247).
    workload.end(cluster.member(0)).await.assert_guarantees_despite_late_losses();
}

#[tokio::test]
async fn without_a_majority_no_lock_is_granted_until_it_returns() {
    let (mut cluster, config) = cluster().await;
    let workload = Workload::start(&config, LEASE).await;
    for round in 1..=2 {
        workload.wait_for_progress().await;
        workload.wait_until_long_held().await;
        let leader = cluster.leader().await.unwrap();
        let others = [(leader + 1) % 3, (leader + 2) % 3];
        for other in others {
            cluster.member_mut(other).kill();
        }
        workload.wait_for_long_held_losses(3 * round).await;
        sleep(millis(500)).await;
        for other in others {
            cluster.member_mut(other).restart_without_waiting().await.unwrap();
        }
        for other in others {
            cluster.member_mut(other).wait_until_serving().await.unwrap();
        }
    }
    workload.wait_for_progress().await;
    workload.end(cluster.member(0)).await.assert_losses_are(LostReason::Expired);
}
