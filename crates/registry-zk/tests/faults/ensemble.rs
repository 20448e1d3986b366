//! Three members: the ensemble survives the loss of one, not of two.

use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use registry_core::{LockGuard, LockRegistry as _, LostReason};
use registry_testkit::contest::LONG;
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions};
use registry_testkit::{eventually, within};
use registry_zk::ZkBackend;
use tokio::time::sleep;

use crate::lab::{
    LONG_SESSION, PATIENT_SESSION, SESSION, backend, config, contest, contest_by, end, operator,
    over, registry, secs,
};

/// Number of times that each member is killed.
const ROUNDS: usize = 2;

#[tokio::test]
async fn members_that_crash_one_at_a_time_end_no_hold() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let contest = contest(&url, PATIENT_SESSION).await;
    for _ in 0..ROUNDS {
        let leader = ensemble.leader().await.unwrap();
        let follower = (leader + 1) % 3;
        // The leader last, because that changes the leader.
        for member in [follower, leader] {
            contest.goes_on().await;
            ensemble.members_mut()[member].kill();
            contest.goes_on().await;
            ensemble.members_mut()[member].start_again().await.unwrap();
        }
    }
    contest.goes_on().await;
    let outcome = end(contest, &url).await;
    assert_eq!(outcome.steady_losses(), []);
    outcome.assert_flawless();
}

#[tokio::test]
async fn a_leader_that_stands_still_is_replaced_and_makes_no_second_holder() {
    let ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let contest = contest(&url, SESSION).await;
    for _ in 0..2 {
        contest.goes_on().await;
        let leader = ensemble.leader().await.unwrap();
        ensemble.members()[leader].pause().unwrap();
        // Under another leader. Messages that the first leader sends after it resumes are outdated.
        contest.goes_on().await;
        ensemble.members()[leader].resume().unwrap();
    }
    contest.goes_on().await;
    end(contest, &url).await.assert_flawless();
}

#[tokio::test]
async fn a_majority_that_is_lost_and_comes_back_breaks_no_promise() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let contest = contest(&url, SESSION).await;
    let mut lost = 0;
    // Longer than the holders' leases, or short enough that the holds survive.
    for (down, is_killed) in [(secs(7), false), (secs(1), true), (secs(7), true)] {
        contest.goes_on().await;
        contest.steady().await;
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
            contest.loses_steadily(lost).await;
        }
        sleep(down).await;
        for member in two {
            if is_killed {
                ensemble.members_mut()[member].launch_again().await.unwrap();
            } else {
                ensemble.members()[member].resume().unwrap();
            }
        }
        lost = contest.losses().iter().filter(|loss| loss.key.starts_with("steady")).count();
    }
    contest.goes_on().await;
    let outcome = end(contest, &url).await;
    let reasons = outcome.steady_losses();
    assert!(!reasons.contains(&LostReason::Closed), "{reasons:?}");
    outcome.assert_flawless();
}

#[tokio::test]
async fn a_crash_of_all_members_breaks_no_promise() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let contest = contest(&url, SESSION).await;
    for _ in 0..2 {
        contest.goes_on().await;
        for member in ensemble.members_mut() {
            member.kill();
        }
        for member in ensemble.members_mut() {
            member.launch_again().await.unwrap();
        }
        ensemble.serving().await.unwrap();
    }
    contest.goes_on().await;
    end(contest, &url).await.assert_flawless();
}

/// A partitioned leader continues to act as a leader for a while. The other members may elect a new
/// leader, which ends sessions that the old one still answers.
#[tokio::test]
async fn a_leader_without_a_majority_proves_nothing() {
    // The old leader continues alone for 40 s, ten times the session.
    let alone = ZooKeeperOptions::new().settings(&["syncLimit=160"]);
    let ensemble = ZooKeeperEnsemble::start_with(3, &alone).await.unwrap();
    let leader = ensemble.leader().await.unwrap();
    let members = ensemble.members();
    let ours = registry(&members[leader].url(), SESSION).await;
    let operator = operator(&members[leader]).await;
    let guard = ours.obtain("k").lock().await.unwrap();
    // Long enough that several writes have confirmed the session.
    sleep(SESSION).await;
    assert!(guard.is_held());
    for other in [leader + 1, leader + 2] {
        members[other % 3].pause().unwrap();
    }
    within(LONG, guard.lost()).await;
    // The old leader still answers.
    operator.sync("/").await.unwrap();
    assert_eq!(members[leader].mode().await.unwrap().as_deref(), Some("leader"));
    for other in [leader + 1, leader + 2] {
        members[other % 3].resume().unwrap();
    }
    within(LONG, ours.obtain("k").lock()).await.unwrap().unlock().await.unwrap();
}

/// The silent member accepts connections and does not answer.
#[tokio::test]
async fn a_silent_member_keeps_nobody_out_and_ends_no_session() {
    with_a_silent_member(LONG_SESSION * 2).await;
}

/// The client waits for a fraction of the granted time-out.
#[tokio::test]
async fn nor_does_it_where_shorter_sessions_are_granted_than_were_asked_for() {
    with_a_silent_member(LONG_SESSION * 6).await;
}

async fn with_a_silent_member(session: Duration) {
    const CLIENTS: usize = 12;
    let granted = LONG_SESSION * 2;
    let limit = format!("maxSessionTimeout={}", granted.as_millis());
    let options = ZooKeeperOptions::new().settings(&[&limit]);
    let ensemble = ZooKeeperEnsemble::start_with(3, &options).await.unwrap();
    let (url, members) = (ensemble.url(), ensemble.members());
    let leader = ensemble.leader().await.unwrap();
    let silent = (leader + 1) % 3;
    let clients = join_all((0..CLIENTS).map(|_| backend(&url, session))).await;
    assert!(clients.iter().all(|client| client.session_timeout() == granted));
    let guards = try_join_all(clients.iter().enumerate().map(async |(number, client)| {
        let registry = over(client);
        let guard = registry.obtain(&format!("k/{number}")).lock().await?;
        Ok::<_, registry_core::LockError>((registry, guard))
    }));
    let guards = guards.await.unwrap();
    let sessions: Vec<_> = clients.iter().map(|client| client.session_id().unwrap()).collect();
    members[silent].pause().unwrap();
    // All of these sessions are opened, with the default time-outs.
    for _ in 0..CLIENTS {
        let config = config(&url, session).with_request_timeout(LONG);
        ZkBackend::open(config).await.unwrap();
    }
    // Clients of the silent member reconnect to the other members.
    eventually(LONG, async || {
        let mut there = Vec::new();
        for member in [leader, (leader + 2) % 3] {
            there.extend(members[member].clients().await.unwrap());
        }
        let is_there = |id: &i64| there.iter().any(|client| client.session == *id);
        sessions.iter().all(is_there)
    })
    .await;
    let now: Vec<_> = clients.iter().map(|client| client.session_id().unwrap()).collect();
    assert_eq!(now, sessions);
    assert!(guards.iter().all(|(_, guard): &(_, LockGuard)| guard.is_held()));
    members[silent].resume().unwrap();
}

/// Connections of all clients to all members break and fall silent, two or three faults at a time,
/// so that sessions move between members.
///
/// Members do not crash in this test: ZooKeeper 3.8.0 may then show nodes on one member that the
/// others do not have.
#[tokio::test]
async fn what_goes_wrong_together_breaks_no_promise() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    // Each client has its own proxy to each member.
    let way =
        |_| ensemble.members().iter().map(|to| FaultProxy::start(to.addr()).unwrap()).collect();
    let ways: Vec<Vec<FaultProxy>> = (0..3).map(way).collect();
    let urls = ways.iter().map(|way| {
        let addresses: Vec<_> = way.iter().map(|proxy| proxy.addr().to_string()).collect();
        format!("zk://{}", addresses.join(","))
    });
    let contest = contest_by(&urls.collect::<Vec<_>>(), SESSION).await;
    for _ in 0..10 {
        for _ in 0..random.u8(1..5) {
            let mode = match random.u8(..8) {
                0 => Mode::BlackHole,
                1 => Mode::HoldReplies,
                2 => Mode::DropReplies,
                3 => Mode::ResetAfterRequest,
                4 => Mode::CutAfter { reply_bytes: random.u64(..600) },
                5 => Mode::Delay(Duration::from_millis(random.u64(..200))),
                6 => Mode::Refuse,
                _ => Mode::Pass,
            };
            let way = &ways[random.usize(..3)];
            for proxy in way {
                proxy.set_mode(mode).await.unwrap();
            }
            if random.bool() {
                way[random.usize(..3)].cut_all().await;
            }
            sleep(Duration::from_millis(random.u64(..1_500))).await;
        }
        for proxy in ways.iter().flatten() {
            proxy.set_mode(Mode::Pass).await.unwrap();
        }
        contest.goes_on().await;
    }
    end(contest, &url).await.assert_flawless();
}
