//! Leader election: one leader at a time, an orderly step-down, and what observers see.

use std::time::Duration;

use registry_core::election::{Election, Leadership, Term};
use registry_core::{
    Claim, ClaimMode, DistributedLock, FencingToken, LockError, LockRegistryExt as _, LostReason,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::context::{TestContext, assert_granted, key};
use crate::faulty::{Fault, Faults, Operation};
use crate::sweep::sweep;

/// Of several candidates, one leads at a time. With fencing, each term has a larger token.
pub async fn one_candidate_leads_at_a_time(context: &TestContext) {
    // Each candidate sends `+` when a term begins, and `-` when its work ends.
    let (event_sender, mut events) = mpsc::unbounded_channel();
    let mut candidates = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let (election, sender) = (context.registry().await.election("role"), event_sender.clone());
        candidates.spawn(async move {
            election
                .run(async |term: Term| {
                    sender.send(('+', term.token())).expect("the test lives");
                    tokio::task::yield_now().await;
                    sender.send(('-', term.token())).expect("the test lives");
                })
                .await
        });
    }
    let mut last = None;
    for _ in 0..10 {
        let (event, token) = receive(context, &mut events).await;
        assert_eq!(event, '+', "two terms at once");
        assert!(last < Some(token) || !context.capabilities().fencing, "{token} after {last:?}");
        last = Some(token);
        assert_eq!(receive(context, &mut events).await, ('-', token), "two terms at once");
    }
    candidates.shutdown().await;
}

/// A step-down signals the work, waits for its end, releases the lock, and only then reports
/// `Leadership::Follower`.
pub async fn a_step_down_releases_only_after_the_work_has_ended(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let election = local.election("role");
    let (stopping, stopped) = oneshot::channel();
    let (end, ended) = oneshot::channel::<()>();
    let candidate = election.clone();
    let running = tokio::spawn(async move {
        candidate
            .run_term(async |term: Term| {
                term.stopping().await;
                stopping.send(term.token()).expect("the test waits");
                ended.await.expect("the test lives");
            })
            .await
    });
    let mut leadership = election.leadership();
    let token = wait_until_leads(context, &election).await;
    assert!(election.step_down());
    assert_eq!(stopped.await.expect("the work is signalled"), token);
    // The work has not ended, so the candidate still leads.
    assert_eq!(*leadership.borrow_and_update(), Leadership::Leader(token));
    assert!(remote.obtain("role").try_lock().await.expect("the store answers").is_none());
    end.send(()).expect("the work waits");
    let follows = leadership.wait_for(|now| *now == Leadership::Follower);
    within(context, follows).await.expect("the candidate lives");
    let lock = remote.obtain("role").try_lock().await.expect("the store answers");
    lock.expect("a follower has released the lock").unlock().await.expect("the lock is released");
    running.await.expect("no panic").expect("the term ends").expect("the work has ended");
    assert!(!election.step_down(), "a follower stepped down");
}

/// Work that does not end after a step-down is dropped at the end of the lease of the role.
pub async fn work_that_does_not_end_is_dropped_after_a_step_down(context: &TestContext) {
    let registry = context.registry_with_lease(context.renewable_lease()).await;
    let election = registry.election("role");
    let candidate = election.clone();
    let running = tokio::spawn(async move {
        candidate.run_term(async |_: Term| std::future::pending::<()>().await).await
    });
    wait_until_leads(context, &election).await;
    assert!(election.step_down());
    let limit = context.renewable_lease() + context.max_wait();
    let ended = timeout(limit, running).await.expect("the work is dropped").expect("no panic");
    assert_eq!(ended.expect("the term ends"), None);
}

/// Another candidate leads after a step-down. In a store without a queue, the former leader may win
/// again, so the clause repeats its step-down until the other one leads. A former leader reports
/// `Leadership::Leader` until its release is answered. With fencing, the clause therefore accepts
/// only a larger token.
pub async fn another_candidate_leads_after_a_step_down(context: &TestContext) {
    let elections =
        [context.registry().await.election("role"), context.registry().await.election("role")];
    let running = elections.each_ref().map(spawn_candidate);
    let mut last = None;
    for next in [0, 1, 0, 1] {
        let token = within(context, async {
            loop {
                let reported = *elections[next].leadership().borrow();
                if let Leadership::Leader(token) = reported
                    && (last < Some(token) || !context.capabilities().fencing)
                {
                    return token;
                }
                // Repeated, because the other candidate may not be waiting yet when this one steps
                // down.
                elections[1 - next].step_down();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        last = Some(token);
    }
    running.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Observers see the leader with its label and data, and see the vacancy after it steps down.
pub async fn observers_see_the_leader_and_the_vacancy(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let election = local.election("role").label("host 1").data("10.0.0.1:80");
    let observer = remote.election("role");
    let mut changes = observer.observe().with_interval(Duration::from_millis(20));
    assert_eq!(observer.leader().await.expect("the role is read"), None);
    assert_eq!(within(context, changes.changed()).await.expect("the role is read"), None);
    let candidate = election.clone();
    let running =
        tokio::spawn(
            async move { candidate.run_term(async |term: Term| term.stopping().await).await },
        );
    let token = wait_until_leads(context, &election).await;
    let leader = within(context, changes.changed()).await.expect("the role is read");
    let leader = leader.expect("a candidate leads");
    assert_eq!((leader.token, &leader.data[..]), (token, &b"10.0.0.1:80"[..]));
    assert_eq!(leader.label.as_deref(), Some("host 1"));
    assert_eq!(observer.leader().await.expect("the role is read"), Some(leader));
    election.step_down();
    running.await.expect("no panic").expect("the term ends");
    assert_eq!(within(context, changes.changed()).await.expect("the role is read"), None);
}

/// After the lock of a leader was broken, observers see the vacancy: the leader's record stays in
/// the value block, but no claim holds the role.
pub async fn observers_see_the_vacancy_after_a_forced_release(context: &TestContext) {
    let local = context.registry_with_lease(context.renewable_lease()).await;
    let remote = context.registry().await;
    let election = local.election("role");
    let candidate = election.clone();
    let running = tokio::spawn(async move {
        candidate.run_term(async |_: Term| std::future::pending::<()>().await).await
    });
    wait_until_leads(context, &election).await;
    let observer = remote.election("role");
    assert!(observer.leader().await.expect("the role is read").is_some());
    remote.force_release("role").await.expect("a held lock is broken");
    let ended = running.await.expect("no panic").expect_err("the term is lost");
    assert!(matches!(ended, LockError::Lost { .. }), "{ended}");
    assert_eq!(observer.leader().await.expect("the role is read"), None);
}

/// A leader whose lock was broken is notified, its work is dropped, and it leads again. With
/// fencing, its next term has a larger token.
pub async fn a_lost_term_drops_the_work_and_begins_a_new_campaign(context: &TestContext) {
    let local = context.registry_with_lease(context.renewable_lease()).await;
    let remote = context.registry().await;
    let election = local.election("role");
    let candidate = election.clone();
    let (term_sender, mut terms) = mpsc::unbounded_channel();
    let running = tokio::spawn(async move {
        candidate
            .run(async |term: Term| {
                let lost = tokio::spawn(term.lost());
                term_sender.send((term.token(), lost)).expect("the test lives");
                std::future::pending::<()>().await;
            })
            .await
    });
    let (token, lost) = receive(context, &mut terms).await;
    remote.force_release("role").await.expect("a held lock is broken");
    assert_eq!(within(context, lost).await.expect("no panic"), LostReason::Gone);
    let (next_token, _) = receive(context, &mut terms).await;
    assert!(next_token > token || !context.capabilities().fencing, "{next_token} after {token}");
    running.abort();
}

/// A candidate leads after the lease of a dead leader has ended.
pub async fn a_candidate_leads_after_a_dead_leader(context: &TestContext) {
    let dead = context.client().await;
    assert_granted(&*dead, &Claim::new(key("role"), context.short_lease())).await;
    let election = context.registry().await.election("role");
    let running = spawn_candidate(&election);
    wait_until_leads(context, &election).await;
    running.abort();
}

/// A store error during the campaign does not end it, and leaves no claim that blocks the role.
pub async fn a_failed_campaign_is_retried_and_leaves_no_record(context: &TestContext) {
    let faults = Faults::none()
        .at_call(Operation::Value, 1, Fault::LoseRequest)
        .at_call(Operation::Acquire, 1, Fault::LoseReply)
        .at_call(Operation::SetValue, 1, Fault::LoseReply);
    let faulty = context.faulty(faults).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let election = local.election("role");
    let running = spawn_candidate(&election);
    wait_until_leads(context, &election).await;
    running.abort();
    _ = running.await;
    let options = registry_core::LockOptions::new().wait(context.max_wait());
    let lock = remote.obtain("role").lock_with(options).await.expect("the role is free");
    lock.unlock().await.expect("the lock is released");
}

/// If the release of a step-down has no reply, the candidate still reports `Leadership::Follower`,
/// and the role becomes free.
pub async fn a_failed_release_does_not_keep_the_role(context: &TestContext) {
    let faults = Faults::none().at_call(Operation::SetValue, 2, Fault::LoseReply).at_call(
        Operation::Release,
        1,
        Fault::LoseRequest,
    );
    let faulty = context.faulty(faults).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    let election = local.election("role");
    let candidate = election.clone();
    let running =
        tokio::spawn(
            async move { candidate.run_term(async |term: Term| term.stopping().await).await },
        );
    wait_until_leads(context, &election).await;
    election.step_down();
    running.await.expect("no panic").expect("the term ends");
    assert_eq!(*election.leadership().borrow(), Leadership::Follower);
    let options = registry_core::LockOptions::new().wait(context.max_wait());
    let lock = remote.obtain("role").lock_with(options).await.expect("the role is free");
    lock.unlock().await.expect("the lock is released");
}

/// Of the waiting candidates, the one with the highest priority leads next, even if it began to
/// wait later. This also applies to a vacancy that follows long after an earlier one.
pub async fn a_candidate_with_a_higher_priority_is_preferred(context: &TestContext) {
    let mut elections = Vec::new();
    for _ in 0..4 {
        let election = context.registry().await.election("role").lease(context.renewable_lease());
        elections.push(election);
    }
    let observer = context.registry().await.obtain("role/candidates");
    let mut running = vec![spawn_candidate(&elections[0])];
    let mut last = wait_until_leads(context, &elections[0]).await;
    for (candidate, priority) in elections.iter().zip(0..).skip(1) {
        running.push(spawn_candidate(&candidate.clone().priority(priority)));
        within(context, wait_until_campaigns(&observer, priority)).await;
    }
    // A leader announces no priority, so the others defer only to waiting candidates.
    for (leader, next) in [(0, 3), (3, 2), (2, 1)] {
        running[leader].abort();
        let token = wait_until_leads(context, &elections[next]).await;
        assert!(last < token || !context.capabilities().fencing, "{token} after {last}");
        last = token;
        // A candidate defers to others for at most a lease. This sleep lets the deadlines of this
        // vacancy pass. They must not apply to the next one.
        tokio::time::sleep(context.renewable_lease()).await;
    }
    running[1].abort();
}

/// A candidate with a lower priority leads if the preferred candidate does not.
pub async fn a_candidate_leads_if_the_preferred_one_does_not_campaign(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    // Announces a priority without a campaign, like a candidate that has just died.
    let options = registry_core::LockOptions::new().label("9");
    let announced = remote.obtain("role/candidates").acquire(ClaimMode::Shared, options).await;
    let announced = announced.expect("a free lock is acquired");
    let election = local.election("role").priority(1).lease(context.renewable_lease());
    let running = spawn_candidate(&election);
    wait_until_leads(context, &election).await;
    assert!(announced.is_held());
    running.abort();
}

/// Waits until a candidate with this priority campaigns.
async fn wait_until_campaigns(candidates: &DistributedLock, priority: u32) {
    let label = priority.to_string();
    loop {
        let holders = candidates.holders().await.expect("the store answers");
        if holders.iter().any(|holder| holder.label.as_deref() == Some(&label)) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// An election ends without an error when its registry is closed.
pub async fn an_election_ends_when_its_registry_is_closed(context: &TestContext) {
    let registry = context.registry().await;
    let election = registry.election("role");
    let running = spawn_candidate(&election);
    wait_until_leads(context, &election).await;
    _ = registry.close(context.max_wait()).await;
    let ended = within(context, running).await.expect("no panic");
    ended.expect("the end of the registry is no error");
    assert_eq!(*election.leadership().borrow(), Leadership::Follower);
}

/// A campaign may be dropped at every poll. The role is then free, and the candidate is a follower.
#[expect(clippy::async_yields_async, reason = "each call of `make` returns a new future to sweep")]
pub async fn a_campaign_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let election = local.election("role");
    let make = async || {
        let election = election.clone();
        async move { election.run_term(async |_: Term| tokio::task::yield_now().await).await }
    };
    sweep(make, 1_000, async |_| {
        let mut leadership = election.leadership();
        let follows = leadership.wait_for(|now| *now == Leadership::Follower);
        within(context, follows).await.expect("the candidate lives");
        let options = registry_core::LockOptions::new().wait(context.max_wait());
        let lock = remote.obtain("role").lock_with(options).await.expect("the role is free");
        lock.unlock().await.expect("the lock is released");
    })
    .await;
}

/// Runs a candidate whose work only waits for the end of its term.
fn spawn_candidate(election: &Election) -> tokio::task::JoinHandle<Result<(), LockError>> {
    let candidate = election.clone();
    tokio::spawn(async move { candidate.run(async |term: Term| term.stopping().await).await })
}

/// Waits until the candidate leads.
async fn wait_until_leads(context: &TestContext, election: &Election) -> FencingToken {
    let mut leadership = election.leadership();
    let leads = leadership.wait_for(|now| matches!(now, Leadership::Leader(_)));
    match *within(context, leads).await.expect("the candidate lives") {
        Leadership::Leader(token) => token,
        _ => unreachable!("the wait ends when the candidate leads"),
    }
}

async fn receive<T>(context: &TestContext, receiver: &mut mpsc::UnboundedReceiver<T>) -> T {
    within(context, receiver.recv()).await.expect("the candidates live")
}

async fn within<T>(context: &TestContext, future: impl Future<Output = T>) -> T {
    let limit = context.short_lease() * 4 + context.max_wait();
    timeout(limit, future).await.expect("the event occurs in time")
}
