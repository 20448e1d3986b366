//! Three members: one is enough to lose, two are not.

use registry_core::LostReason;
use registry_testkit::zookeeper::ZooKeeperEnsemble;
use tokio::time::sleep;

use crate::lab::{LONG_SESSION, SESSION, contest, end, secs};

/// How many times each of the members is killed.
const ROUNDS: usize = 2;

#[tokio::test]
async fn members_that_crash_one_at_a_time_end_no_hold() {
    let mut ensemble = ZooKeeperEnsemble::start().await.unwrap();
    let url = ensemble.url();
    let contest = contest(&url, LONG_SESSION).await;
    for _ in 0..ROUNDS {
        let leader = ensemble.leader().await.unwrap();
        let follower = (leader + 1) % 3;
        // The leader last, because another member is it then.
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
        // Under another leader. What the first one still has to say when it goes on is of the past.
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
    // Long enough that holders know nothing any more; and so short that they may go on.
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
