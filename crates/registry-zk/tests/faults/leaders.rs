//! Two leaders at once: a partitioned one, and the one that the other members elected.

use std::time::Duration;

use registry_core::{LockOptions, LockRegistry as _};
use registry_testkit::contest::{Contest, LONG};
use registry_testkit::witness::{Witness, WitnessedGuard};
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions};
use registry_testkit::{eventually, within};

use crate::lab::{LONG_SESSION, SESSION, end, operator, registry};

/// The member that continues alone for a minute. The other members wait two seconds for it.
const ALONE: usize = 1;
/// Keys that are held permanently by clients that can reach only that member. One client also
/// contends for other keys; one writes nothing. The server answers the second one all the time. The
/// first one gets no more responses, because they queue behind its writes.
const STEADY: &str = "steady/0";
const QUIET: &str = "quiet";
/// Clients of the other members lose nothing while those elect a leader.
const OTHERS_SESSION: Duration = LONG_SESSION.saturating_mul(2);
/// Parent of the store's keys.
const BASE: &str = "/lock-registry/default";

async fn leaders(ensemble: &ZooKeeperEnsemble) -> Vec<usize> {
    let mut leaders = Vec::new();
    for (number, member) in ensemble.members().iter().enumerate() {
        // A member may not answer during an election.
        if matches!(member.mode().await, Ok(Some(mode)) if mode == "leader") {
            leaders.push(number);
        }
    }
    leaders
}

/// Holds a lock until it is lost.
async fn hold(guard: WitnessedGuard) {
    let lost = guard.lost();
    tokio::pin!(lost);
    loop {
        guard.note();
        tokio::select! {
            _ = &mut lost => return guard.note(),
            () = tokio::time::sleep(Duration::from_millis(25)) => {}
        }
    }
}

/// Two clients can reach only the partitioned leader, the others only the other members. All
/// contend for the same keys.
#[tokio::test]
async fn clients_of_two_leaders_never_hold_one_lock_at_once() {
    // Shortens the wait of a member that contacts a new leader too early through a proxy.
    let options = ZooKeeperOptions::new().settings(&["initLimit=12"]);
    let patient = options.clone().settings(&["syncLimit=240"]);
    let options = [options.clone(), patient, options];
    let ensemble = ZooKeeperEnsemble::start_apart(&options).await.unwrap();
    assert_eq!(ensemble.leader().await.unwrap(), ALONE);
    let [one, alone, two] = ensemble.members() else { unreachable!("there are three") };
    let others = format!("{},{}", one.url(), two.addr());
    let contest = Contest::begin(vec![
        registry(&alone.url(), SESSION).await,
        registry(&others, OTHERS_SESSION).await,
        registry(&others, OTHERS_SESSION).await,
    ]);
    let contest = contest.await;
    let (theirs, there) = (registry(&others, OTHERS_SESSION).await, operator(alone).await);
    let witness = Witness::new(contest.recorder(), 7_000);
    let quiet = registry(&alone.url(), SESSION).await;
    let held = Witness::new(contest.recorder(), 7_001);
    let held = held.lock_with(&quiet.obtain(QUIET), LockOptions::new()).await.unwrap().unwrap();
    let holding = tokio::spawn(hold(held));
    contest.goes_on().await;
    contest.steady().await;

    let cut_at = contest.now();
    ensemble.cut_off(ALONE).await.unwrap();
    eventually(LONG, async || leaders(&ensemble).await.len() == 2).await;
    // The new leader grants the locks that clients of the old leader hold.
    let mut taken = Vec::new();
    for key in [STEADY, QUIET] {
        let lock = theirs.obtain(key);
        let next = witness.lock_with(&lock, LockOptions::new().wait(LONG)).await.unwrap().unwrap();
        assert!(contest.write_as(7_000, key, next.fencing_token().unwrap()));
        taken.push(next);
    }
    // Both former holders detected the loss before that.
    within(SESSION, holding).await.unwrap();
    let losses = contest.losses();
    let lost = losses.iter().find(|loss| loss.key == STEADY && loss.at > cut_at);
    let lost = lost.expect("its holder knows before that it is lost");
    println!("{:?} after {:?}", lost.reason, Duration::from_nanos(lost.at - cut_at));
    contest.goes_on().await;
    // The old leader still acts as a leader. It shows the nodes of the former holders, and not
    // those of the next ones.
    there.sync("/").await.unwrap();
    for next in taken {
        let line = format!("{BASE}/{}", next.key().replace('/', "%2F"));
        let nodes = there.list_children(&line).await.unwrap();
        assert!(!nodes.is_empty());
        for node in nodes {
            let node = there.check_stat(&format!("{line}/{node}")).await.unwrap().unwrap();
            assert!(node.czxid < i64::from(next.fencing_token().unwrap()));
        }
        assert!(next.is_held());
        next.unlock().await.unwrap();
    }
    assert_eq!(leaders(&ensemble).await.len(), 2);

    ensemble.join_again().await.unwrap();
    eventually(LONG, async || {
        let mode = ensemble.members()[ALONE].mode().await;
        matches!(mode, Ok(Some(mode)) if mode == "follower")
    })
    .await;
    contest.goes_on().await;
    contest.steady().await;
    let losses = contest.losses();
    let others = losses.iter().filter(|loss| loss.key.starts_with("steady") && loss.key != STEADY);
    assert_eq!(others.count(), 0, "nobody else was cut off: {losses:?}");
    drop((theirs, quiet));
    end(contest, &ensemble.url()).await.assert_flawless();
}
