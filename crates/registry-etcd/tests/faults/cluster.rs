//! A cluster of three members. It tolerates the loss of any one member, and only the clients of
//! that member are affected.

use registry_core::LostReason;
use registry_etcd::EtcdConfig;
use registry_testkit::etcd::EtcdCluster;
use tokio::time::sleep;

use crate::contest::{Contest, Keys, LEASE, millis, secs};

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
    let ways = vec![config.clone(); 3];
    let contest = Contest::begin_with(&ways, &config, Keys::default(), LEASE_OVER_ELECTIONS).await;
    for _ in 0..2 {
        let leader = cluster.leader().await.unwrap();
        for member in [(leader + 1) % 3, leader] {
            contest.goes_on().await;
            cluster.member_mut(member).kill();
            contest.goes_on().await;
            cluster.member_mut(member).start_again().await.unwrap();
        }
    }
    contest.goes_on().await;
    let outcome = contest.end(cluster.member(0)).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

#[tokio::test]
async fn a_leader_that_stands_still_for_longer_than_a_lease_misleads_no_writer() {
    let (cluster, config) = cluster().await;
    let contest = Contest::begin(&config).await;
    for _ in 0..4 {
        contest.goes_on().await;
        contest.steady().await;
        let leader = cluster.leader().await.unwrap();
        cluster.member(leader).pause().unwrap();
        sleep(LEASE * 2).await;
        contest.goes_on().await;
        cluster.member(leader).resume().unwrap();
    }
    contest.goes_on().await;
    // When it resumes, servers of this version may end leases of live holders (etcd issue 15247).
    contest.end(cluster.member(0)).await.assert_flawless_but_for_members_behind();
}

#[tokio::test]
async fn a_leader_that_stands_still_for_about_a_lease_misleads_no_writer() {
    let (cluster, config) = cluster().await;
    let contest = Contest::begin(&config).await;
    // A resumed leader sends outdated answers until it learns that it is no longer the leader.
    for part in [3, 4, 5, 6] {
        contest.goes_on().await;
        let leader = cluster.leader().await.unwrap();
        cluster.member(leader).pause().unwrap();
        sleep(LEASE * part / 5).await;
        cluster.member(leader).resume().unwrap();
    }
    contest.goes_on().await;
    // When it resumes, servers of this version may end leases of live holders (etcd issue 15247).
    contest.end(cluster.member(0)).await.assert_flawless_but_for_members_behind();
}

#[tokio::test]
async fn without_a_majority_nobody_is_granted_anything_and_with_it_all_goes_on() {
    let (mut cluster, config) = cluster().await;
    let contest = Contest::begin(&config).await;
    for round in 1..=2 {
        contest.goes_on().await;
        contest.steady().await;
        let leader = cluster.leader().await.unwrap();
        let others = [(leader + 1) % 3, (leader + 2) % 3];
        for other in others {
            cluster.member_mut(other).kill();
        }
        contest.loses_steadily(3 * round).await;
        sleep(millis(500)).await;
        for other in others {
            cluster.member_mut(other).launch_again().await.unwrap();
        }
        for other in others {
            cluster.member_mut(other).serving().await.unwrap();
        }
    }
    contest.goes_on().await;
    let outcome = contest.end(cluster.member(0)).await;
    let losses = outcome.steady_losses();
    assert!(losses.iter().all(|reason| *reason == LostReason::Expired), "{losses:?}");
    outcome.assert_flawless();
}
