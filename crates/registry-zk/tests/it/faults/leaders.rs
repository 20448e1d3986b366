//! Two leaders at once: a partitioned leader, and the leader that the other members have elected.

use std::time::Duration;

use registry_core::LockOptions;
use registry_testkit::recording_client::{RecordedGuard, RecordingClient};
use registry_testkit::workload::{LONG, Workload, WorkloadOptions};
use registry_testkit::zookeeper::{ZooKeeperEnsemble, ZooKeeperOptions};
use registry_testkit::{eventually, within};

use super::support::{LONG_SESSION, SESSION, finish, operator, registry};

/// The member that continues alone for two minutes. The other members wait two seconds for it.
const PARTITIONED: usize = 1;
/// A key with a permanent holder that can reach only the partitioned member. The holder also
/// contends for other keys. After the partition, it receives no responses, because these queue
/// behind its writes.
const STEADY: &str = "steady/0";
/// A key with another such holder, which writes nothing. The partitioned member always responds to
/// this holder.
const IDLE: &str = "quiet";
/// So long that clients of the other members lose no session during the election.
const OTHERS_SESSION: Duration = LONG_SESSION.saturating_mul(6);
/// Parent of the store's keys.
const BASE: &str = "/lock-registry/default";

async fn leaders(ensemble: &ZooKeeperEnsemble) -> Vec<usize> {
    let mut leaders = Vec::new();
    for (number, member) in ensemble.members().iter().enumerate() {
        // A member may not respond during an election.
        if matches!(member.mode().await, Ok(Some(mode)) if mode == "leader") {
            leaders.push(number);
        }
    }
    leaders
}

/// Records the state of a guard until its lock is lost.
async fn record_until_lost(guard: RecordedGuard) {
    let lost = guard.lost();
    tokio::pin!(lost);
    loop {
        guard.record_state();
        tokio::select! {
            _ = &mut lost => return guard.record_state(),
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
    let partitioned_options = options.clone().settings(&["syncLimit=480"]);
    let options = [options.clone(), partitioned_options, options];
    let ensemble = ZooKeeperEnsemble::start_isolatable(&options).await.unwrap();
    assert_eq!(ensemble.leader().await.unwrap(), PARTITIONED);
    let [one, partitioned, two] = ensemble.members() else {
        unreachable!("the ensemble has three members")
    };
    let others = format!("{},{}", one.url(), two.addr());
    let registries = vec![
        registry(&partitioned.url(), SESSION).await,
        registry(&others, OTHERS_SESSION).await,
        registry(&others, OTHERS_SESSION).await,
    ];
    let workload = Workload::begin(registries, WorkloadOptions::new().queued()).await;
    let (other_client, partitioned_operator) =
        (registry(&others, OTHERS_SESSION).await, operator(partitioned).await);
    let recording_client = RecordingClient::new(workload.recorder(), 7_000);
    workload.wait_for_progress().await;
    workload.wait_until_long_held().await;
    let idle_client = registry(&partitioned.url(), SESSION).await;
    let held = RecordingClient::new(workload.recorder(), 7_001);
    let held =
        held.lock_with(&idle_client.obtain(IDLE), LockOptions::new()).await.unwrap().unwrap();
    let holder_task = tokio::spawn(record_until_lost(held));

    let cut_at = workload.now();
    ensemble.isolate(PARTITIONED).await.unwrap();
    eventually(LONG, async || leaders(&ensemble).await.len() == 2).await;
    // The new leader grants the locks that clients of the old leader hold.
    let mut next_guards = Vec::new();
    for key in [STEADY, IDLE] {
        let lock = other_client.obtain(key);
        let next = recording_client
            .lock_with(&lock, LockOptions::new().wait(LONG))
            .await
            .unwrap()
            .unwrap();
        assert!(workload.write_as(7_000, key, next.fencing_token()));
        next_guards.push(next);
    }
    // Both former holders detected the loss before that.
    within(LONG, holder_task).await.unwrap();
    workload.wait_for_long_held_losses(1).await;
    let losses = workload.losses();
    let lost = losses.iter().find(|loss| loss.key == STEADY && loss.at > cut_at);
    let lost = lost.expect("the former holder detects the loss first");
    println!("{:?} after {:?}", lost.reason, Duration::from_nanos(lost.at - cut_at));
    workload.wait_for_progress().await;
    // The old leader still acts as a leader. It shows the nodes of the former holders, and not
    // those of the next ones.
    partitioned_operator.sync("/").await.unwrap();
    for next in next_guards {
        let lock_path = format!("{BASE}/{}", next.key().replace('/', "%2F"));
        let nodes = partitioned_operator.list_children(&lock_path).await.unwrap();
        assert!(!nodes.is_empty());
        for node in nodes {
            let node = partitioned_operator
                .check_stat(&format!("{lock_path}/{node}"))
                .await
                .unwrap()
                .unwrap();
            assert!(node.czxid < i64::from(next.fencing_token()));
        }
        assert!(next.is_held());
        next.unlock().await.unwrap();
    }
    eventually(LONG, async || leaders(&ensemble).await.len() == 2).await;

    ensemble.reconnect().await.unwrap();
    eventually(LONG, async || {
        let mode = ensemble.members()[PARTITIONED].mode().await;
        matches!(mode, Ok(Some(mode)) if mode == "follower")
    })
    .await;
    workload.wait_for_progress().await;
    workload.wait_until_long_held().await;
    let losses = workload.losses();
    let others = losses.iter().filter(|loss| loss.key.starts_with("steady") && loss.key != STEADY);
    assert_eq!(others.count(), 0, "no other client was partitioned: {losses:?}");
    drop((other_client, idle_client));
    finish(workload, &ensemble.url()).await.assert_guarantees();
}
