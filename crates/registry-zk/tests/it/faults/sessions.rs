//! Sessions that end because an operator closes them or because they expire.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use registry_core::election::{Election, Leadership, Term};
use registry_core::{FencingToken, LockOptions, LockRegistryExt as _, LostReason};
use registry_testkit::history::Window;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::workload::{
    LONG, Workload, WorkloadOptions, assert_a_suspended_holder_is_replaced,
};
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_testkit::{assert_acquire_error, eventually, within};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::other_process;
use super::support::{
    LONG_SESSION, MINUTE_SESSION, SESSION, backend, finish, registry, registry_over,
};

#[tokio::test]
async fn an_error_names_operation_key_and_address() {
    let mut server = ZooKeeperServer::start().await.unwrap();
    let registry = registry(&server.url(), SESSION).await;
    server.kill();
    let error = within(LONG, registry.obtain("orders/42").lock()).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    let cause = assert_acquire_error(&error, "orders/42", &server.addr().to_string());
    assert!(cause.starts_with("zookeeper: "), "{cause}");
}

#[tokio::test]
async fn a_server_paused_for_longer_than_a_session_admits_no_second_holder() {
    let server = ZooKeeperServer::start().await.unwrap();
    let workload = super::support::start_workload(&server.url(), SESSION).await;
    workload.pause_until_losses(&server).await;
    let outcome = finish(workload, &server.url()).await;
    let losses = outcome.long_held_losses();
    assert!(losses.contains(&LostReason::Expired), "{losses:?}");
    outcome.assert_guarantees();
}

#[tokio::test]
async fn a_server_crash_without_data_loss_ends_no_hold() {
    let mut server = ZooKeeperServer::start().await.unwrap();
    let workload = super::support::start_workload(&server.url(), MINUTE_SESSION).await;
    for _ in 0..3 {
        workload.wait_for_progress().await;
        server.kill();
        server.restart().await.unwrap();
    }
    workload.wait_for_progress().await;
    finish(workload, &server.url()).await.assert_no_losses();
}

/// The nodes are deleted at once, and other clients can acquire the locks before the client is
/// notified.
#[tokio::test]
async fn a_session_ended_by_an_operator_is_lost_and_replaced() {
    let server = ZooKeeperServer::start().await.unwrap();
    let (mut backends, mut registries) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let backend = backend(&server.url(), SESSION).await;
        registries.push(registry_over(&backend));
        backends.push(backend);
    }
    let workload = Workload::begin(registries, WorkloadOptions::new().queued()).await;
    let mut windows = Vec::new();
    for _ in 0..2 {
        for (number, backend) in backends.iter().enumerate() {
            workload.wait_for_progress().await;
            workload.wait_until_long_held().await;
            let session = backend.session_id().unwrap();
            let begin = workload.now();
            server.end_session(session).await.unwrap();
            let key = format!("steady/{number}");
            eventually(LONG, async || {
                workload.losses().iter().any(|loss| loss.key == key && loss.at > begin)
            })
            .await;
            workload.wait_until_long_held().await;
            // A holder that is not notified loses the lock when its lease ends.
            let lease = u64::try_from((SESSION / 2).as_nanos()).unwrap();
            windows.push(Window::new(begin, workload.now() + lease));
            eventually(LONG, async || backend.session_id() != Some(session)).await;
        }
    }
    workload.wait_for_progress().await;
    let outcome = finish(workload, &server.url()).await;
    let losses = outcome.long_held_losses();
    // On a loaded machine, the lease may end before the client detects the loss.
    let is_expected =
        |reason: &LostReason| matches!(reason, LostReason::Gone | LostReason::Expired);
    assert!(losses.iter().all(is_expected), "{losses:?}");
    outcome.assert_guarantees_except_in(&windows);
}

/// The waiter goes to the end of the queue, and acquires the lock within its time limit.
#[tokio::test]
async fn a_waiter_whose_session_is_ended_is_queued_again_in_a_new_session() {
    let server = ZooKeeperServer::start().await.unwrap();
    let held = registry(&server.url(), LONG_SESSION).await;
    let guard = held.obtain("k").lock().await.unwrap();
    let backend = backend(&server.url(), SESSION).await;
    let client = registry_over(&backend);
    let lock = client.obtain("k");
    let waiter_task =
        tokio::spawn(async move { lock.lock_with(LockOptions::new().wait(LONG)).await });
    eventually(LONG, async || server.metric("zk_watch_count").await.unwrap() > 0).await;
    let session = backend.session_id().unwrap();
    server.end_session(session).await.unwrap();
    // The waiter is queued again, in another session.
    eventually(LONG, async || {
        let other = backend.session_id().filter(|other| *other != session)?;
        let nodes = server.send_command("dump").await.unwrap();
        let (_, after) = nodes.split_once(&format!("{other:#x}:"))?;
        after.lines().nth(1)?.contains("-lock-").then_some(())
    })
    .await;
    assert!(guard.is_held());
    guard.unlock().await.unwrap();
    let next = within(LONG, waiter_task).await.unwrap().unwrap();
    assert!(next.is_held());
    next.unlock().await.unwrap();
}

#[test]
fn a_session_that_a_caller_in_another_runtime_opens_outlives_that_runtime() {
    let (registry_runtime, other_runtime) = (Runtime::new().unwrap(), Runtime::new().unwrap());
    let (_server, backend, client) = registry_runtime.block_on(async {
        let server = ZooKeeperServer::start().await.unwrap();
        let backend = backend(&server.url(), LONG_SESSION).await;
        let client = registry_over(&backend);
        server.end_session(backend.session_id().unwrap()).await.unwrap();
        // The client detects the end. The next caller opens a new session.
        eventually(LONG, async || backend.session_id().is_none()).await;
        (server, backend, client)
    });
    let lock_and_unlock = async || {
        within(LONG, client.obtain("k").lock()).await.unwrap().unlock().await.unwrap();
    };
    other_runtime.block_on(lock_and_unlock());
    let session = backend.session_id();
    assert!(session.is_some());
    drop(other_runtime);
    registry_runtime.block_on(lock_and_unlock());
    assert_eq!(backend.session_id(), session);
}

#[test]
fn a_session_whose_runtime_has_ended_is_replaced() {
    let (registry_runtime, other_runtime) = (Runtime::new().unwrap(), Runtime::new().unwrap());
    let server = registry_runtime.block_on(ZooKeeperServer::start()).unwrap();
    // No registry exists yet, so the session belongs to this runtime.
    let backend = other_runtime.block_on(backend(&server.url(), SESSION));
    drop(other_runtime);
    registry_runtime.block_on(async {
        let client = registry_over(&backend);
        within(LONG, client.obtain("k").lock()).await.unwrap().unlock().await.unwrap();
    });
}

/// Suspends a process that holds a lock, for longer than its session. Other clients acquire the
/// lock, and the process detects the loss as soon as it resumes.
#[tokio::test]
async fn a_suspended_holder_is_replaced_and_detects_the_loss() {
    let server = ZooKeeperServer::start().await.unwrap();
    let url = server.url();
    // Long sessions, so that only the suspended process loses its session.
    let workload = super::support::start_workload(&url, LONG_SESSION).await;
    let client = registry(&url, LONG_SESSION).await;
    let other_client = other_process::spawn_client(&url).await;
    let events =
        assert_a_suspended_holder_is_replaced(&workload, other_client, client).await.unwrap();
    let new_client = registry(&url, MINUTE_SESSION).await;
    let outcome = workload.end(new_client, LONG, events).await;
    assert_eq!(outcome.long_held_losses(), [], "no other holder was suspended");
    outcome.with_paused_holders_of("paused").assert_guarantees();
}

/// The node of the old session may still exist when the former leader campaigns again, in the same
/// session or in a new one.
#[tokio::test]
async fn a_former_leader_does_not_lead_through_the_node_of_a_dying_session() {
    let server = ZooKeeperServer::start().await.unwrap();
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let url = format!("zk://{}", proxy.addr());
    let elections = [
        registry(&url, SESSION).await.election("role"),
        registry(&server.url(), LONG_SESSION).await.election("role"),
    ];
    let terms = Arc::<Mutex<Vec<FencingToken>>>::default();
    let mut candidates = JoinSet::new();
    for election in elections.clone() {
        let terms = Arc::clone(&terms);
        candidates.spawn(async move {
            let work = async |term: Term| {
                {
                    let mut terms = terms.lock().unwrap();
                    assert!(terms.last() < Some(&term.token()), "{terms:?}");
                    terms.push(term.token());
                }
                term.stopping().await;
            };
            election.run(work).await.unwrap();
        });
    }
    for pause in [Duration::ZERO, SESSION / 4, SESSION] {
        let [disturbed, other] = elections.each_ref().map(Election::leadership);
        let leads = |leadership: &watch::Receiver<Leadership>| *leadership.borrow();
        // The other candidate then waits in the queue.
        eventually(LONG, async || {
            elections[1].step_down();
            matches!(leads(&disturbed), Leadership::Leader(_))
        })
        .await;
        proxy.set_mode(ProxyMode::BlackHole).await.unwrap();
        eventually(LONG, async || leads(&disturbed) == Leadership::Follower).await;
        tokio::time::sleep(pause).await;
        proxy.set_mode(ProxyMode::Pass).await.unwrap();
        // The next leader is the other candidate, or the disturbed candidate if the other has
        // stepped down.
        eventually(LONG, async || {
            let leaders = [leads(&disturbed), leads(&other)];
            assert!(leaders.contains(&Leadership::Follower), "two leaders: {leaders:?}");
            leaders.iter().any(|leads| matches!(leads, Leadership::Leader(_)))
        })
        .await;
    }
    assert!(candidates.try_join_next().is_none(), "no candidate has ended");
}
