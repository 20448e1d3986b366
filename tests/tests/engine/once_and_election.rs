//! Tests jobs and elections under an owner that holds the lock already, and a leader whose registry
//! closes.

use std::time::Duration;

use registry_core::election::{Leadership, Term};
use registry_core::once::{Outcome, Run};
use registry_core::{LockOptions, LockRegistryExt as _, Owner, Registry};
use tokio::time::{sleep, timeout};

#[tokio::test]
async fn a_tick_does_not_run_twice_at_once_under_one_owner() {
    let registry = Registry::in_memory().unwrap();
    let owner = Owner::new();
    let job = registry.once("report").tick(7);
    let job_of_owner = job.clone().options(LockOptions::new().owner(&owner));
    for job in [job, job_of_owner] {
        let work = async |_: Run| job.run(async |_: Run| ()).await.unwrap();
        let nested = owner.within(job.try_run(async |run| Err::<(), _>(work(run).await))).await;
        assert_eq!(nested.unwrap(), Outcome::Ran(Err(Outcome::Busy)));
    }
}

#[tokio::test(start_paused = true)]
async fn two_candidates_of_one_owner_do_not_lead_at_once() {
    let registry = Registry::in_memory().unwrap();
    let [first, second] = [registry.election("role"), registry.election("role")];
    let leads_too = first.run_term(async |_: Term| {
        timeout(Duration::from_secs(60), second.run_term(async |_: Term| ())).await.is_ok()
    });
    assert_eq!(Owner::scope(leads_too).await.unwrap(), Some(false));
}

#[tokio::test(start_paused = true)]
async fn candidates_of_one_registry_and_one_owner_have_their_own_priorities() {
    let registry = Registry::in_memory().unwrap();
    let candidates = registry.obtain("role/candidates");
    let role = registry.obtain("role").lock().await.unwrap();
    let [low, high] = [1, 2].map(|priority| registry.election("role").priority(priority));
    let campaigns = Owner::scope(async { tokio::join!(low.campaign(), high.campaign()) });
    let both_are_announced = timeout(Duration::from_secs(60), async {
        let mut priorities = Vec::new();
        while priorities != ["1", "2"] {
            sleep(Duration::from_millis(1)).await;
            let holders = candidates.holders().await.unwrap();
            priorities = holders.into_iter().filter_map(|holder| holder.label).collect();
            priorities.sort();
        }
    });
    tokio::select! {
        _ = campaigns => panic!("a candidate led while the role was locked"),
        announced = both_are_announced => announced.expect("each candidate announces its priority"),
    }
    role.unlock().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_closes_lets_its_leaders_step_down() {
    let registry = Registry::in_memory().unwrap();
    let election = registry.election("role");
    let running = election.run(async |term: Term| {
        term.stopping().await;
        assert!(term.is_held());
    });
    let mut leadership = election.leadership();
    let closing = async {
        leadership.wait_for(|now| matches!(now, Leadership::Leader(_))).await.unwrap();
        registry.close(Duration::from_secs(60)).await
    };
    let (ran, report) = tokio::join!(running, closing);
    ran.unwrap();
    assert!(report.is_clean() && report.released == 1, "{report:?}");
    assert_eq!(*leadership.borrow(), Leadership::Follower);
}
