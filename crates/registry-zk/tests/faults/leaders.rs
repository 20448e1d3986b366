//! Two leaders at once: one that has lost the others in silence, and the one that those have meanwhile.

use registry_core::LockOptions;
use registry_core::LockRegistry as _;
use registry_testkit::contest::{Contest, LONG};
use registry_testkit::eventually;
use registry_testkit::witness::Witness;
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions};

use crate::lab::{PATIENT_SESSION, SESSION, end, operator, registry};

/// The member that goes on alone for a minute. The others wait two seconds for it.
const ALONE: usize = 2;
/// A key that is held for good by the client who knows only that member, and its node.
const STEADY: &str = "steady/0";
const STEADY_NODE: &str = "/lock-registry/default/steady%2F0";

/// Has that member lead.
async fn until_it_leads(ensemble: &mut ZooKeeperEnsemble) {
    for _ in 0..10 {
        let leader = ensemble.leader().await.unwrap();
        if leader == ALONE {
            return;
        }
        // Of two that know as much it is the one with the greater number.
        ensemble.members_mut()[leader].kill();
        ensemble.leader().await.unwrap();
        ensemble.members_mut()[leader].start_again().await.unwrap();
    }
    panic!("another member is preferred each time");
}

async fn leaders(ensemble: &ZooKeeperEnsemble) -> Vec<usize> {
    let mut leaders = Vec::new();
    for (number, member) in ensemble.members().iter().enumerate() {
        // One that looks for a leader is silent at times.
        if matches!(member.mode().await, Ok(Some(mode)) if mode == "leader") {
            leaders.push(number);
        }
    }
    leaders
}

/// One client has only the leader that was cut off, and two have the others. All of them contend for the same keys.
#[tokio::test]
async fn clients_of_two_leaders_never_hold_one_lock_at_once() {
    let options = ZooKeeperOptions::new();
    let patient = options.clone().settings(&["syncLimit=240"]);
    let options = [options.clone(), options, patient];
    let mut ensemble = ZooKeeperEnsemble::start_apart(&options).await.unwrap();
    until_it_leads(&mut ensemble).await;
    let [one, two, alone] = ensemble.members() else { unreachable!("there are three") };
    let others = format!("{},{}", one.url(), two.addr());
    let contest = Contest::begin(vec![
        registry(&alone.url(), SESSION).await,
        registry(&others, PATIENT_SESSION).await,
        registry(&others, PATIENT_SESSION).await,
    ]);
    let contest = contest.await;
    let (theirs, there) = (registry(&others, PATIENT_SESSION).await, operator(alone).await);
    let witness = Witness::new(contest.recorder(), 7_000);
    contest.goes_on().await;
    contest.steady().await;

    let cut_at = contest.now();
    ensemble.cut_off(ALONE).await.unwrap();
    eventually(LONG, async || leaders(&ensemble).await.len() == 2).await;
    // What the client of the first one holds is granted by the second one.
    let lock = theirs.obtain(STEADY);
    let next = witness.lock_with(&lock, LockOptions::new().wait(LONG)).await.unwrap().unwrap();
    let losses = contest.losses();
    let lost = losses.iter().find(|loss| loss.key == STEADY && loss.at > cut_at);
    let lost = lost.expect("its holder knows before that it is lost");
    println!("lost for {:?} after {:?}", lost.reason, lost.at - cut_at);
    assert!(contest.write_as(7_000, STEADY, next.fencing_token().unwrap()));
    contest.goes_on().await;
    // The first one still takes itself for the leader, and shows what it knows: the lost holder is there, and the next one is not.
    there.sync("/").await.unwrap();
    let line = there.list_children(STEADY_NODE).await.unwrap();
    assert!(!line.is_empty());
    for name in line {
        let node = there.check_stat(&format!("{STEADY_NODE}/{name}")).await.unwrap().unwrap();
        assert!(node.czxid < i64::from(next.fencing_token().unwrap()));
    }
    assert_eq!(leaders(&ensemble).await.len(), 2);
    assert!(next.is_held());
    next.unlock().await.unwrap();

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
    drop(theirs);
    end(contest, &ensemble.url()).await.assert_flawless();
}
