//! Elections of many roles between four processes, on each store. Forced changes of the leaders
//! follow from four causes: processes are killed, processes are paused beyond the lease, leaders
//! step down, and the server is killed and started again.

#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::print_stdout, reason = "the tests print their measurements")]
#![expect(clippy::print_stderr, reason = "a test prints the output of a process that has ended")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, io, process, thread};

use lock_registry::election::{Election, Term};
use lock_registry::{LockRegistryExt as _, Registry, RegistryConfig};
use registry_testkit::eventually;
use registry_testkit::holder::{BusyPrinter, child_process, run_child_process};
use registry_testkit::process::HelperProcess;
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;

use crate::resource::{Resource, Step, Work, now};
use crate::stores::{LONG, Store, long_or, on_each_store};

const LEASE: Duration = Duration::from_secs(2);
const PROCESSES: usize = 4;
const ROLES: usize = 48;
/// The pause between two steps of a leader's work.
const STEP: Duration = Duration::from_millis(100);

/// The environment variable with the address of the resource, for a child process.
const RESOURCE: &str = "ELECTION_RESOURCE";

/// Returns the number of changes of leaders to force.
fn changes() -> usize {
    long_or(1_000, 100)
}

on_each_store! {
    no_two_terms_are_valid_at_once_under_forced_changes,
    a_candidate_that_was_paused_beyond_its_session_campaigns_on,
}

#[test]
#[ignore = "started by the other tests, as another process"]
fn a_process_with_candidates() {
    run_child_process(async |url| {
        let resource: SocketAddr = env::var(RESOURCE).unwrap().parse().unwrap();
        let registry = connect(&url).await;
        let elections: BTreeMap<_, _> =
            (0..ROLES).map(role).map(|role| (role.clone(), registry.election(&role))).collect();
        step_down_on_request(elections.clone());
        let mut candidates = JoinSet::new();
        for (role, election) in elections {
            candidates.spawn(async move {
                election.run(|term| lead(resource, role.clone(), term)).await.unwrap();
            });
        }
        candidates.join_all().await;
    });
}

/// Connects as soon as the server responds: it may still be starting.
async fn connect(url: &str) -> Registry {
    loop {
        let config = RegistryConfig::from_url(url).unwrap().observer(Arc::new(BusyPrinter));
        match config.connect().await {
            Ok(registry) => return registry,
            Err(error) => eprintln!("{error}"),
        }
        sleep(STEP).await;
    }
}

fn role(number: usize) -> String {
    format!("role {number}")
}

/// Steps down from each role that the test writes to the input. Exits at the end of the input, when
/// the test has ended.
fn step_down_on_request(elections: BTreeMap<String, Election>) {
    thread::spawn(move || {
        for role in io::stdin().lines().map_while(Result::ok) {
            elections[&role].step_down();
        }
        process::exit(0);
    });
}

/// The work of a leader: writes to the resource until it is signalled to stop.
async fn lead(resource: SocketAddr, role: String, term: Term) {
    let mut work = Work::connect(resource, &role, term.token()).await;
    let begin = Step::Begin { at: now(), process: process::id(), tick: None };
    let mut accepted = work.write(begin).await;
    let mut stopping = Box::pin(term.stopping());
    // A signalled leader takes three more steps. The next leader must wait for them.
    let mut steps_left = None;
    while steps_left != Some(0_u32) {
        let (from, held, to) = (now(), term.is_held(), now());
        if !held {
            // The engine must drop the work at this await.
            yield_now().await;
            work.write(Step::Violation("the work continues after its term".into())).await;
        } else if !accepted {
            let text = "a term is valid after the begin of the next one";
            work.write(Step::Violation(text.into())).await;
        }
        accepted = work.write(Step::Valid { from, to }).await;
        steps_left = match steps_left {
            Some(steps) => {
                sleep(STEP / 10).await;
                Some(steps - 1)
            }
            None => tokio::select! {
                () = &mut stopping => Some(3),
                () = sleep(STEP) => None,
            },
        };
    }
    work.write(Step::End).await;
}

struct Processes {
    url: String,
    resource: SocketAddr,
    processes: Vec<HelperProcess>,
}

impl Processes {
    fn start(store: &Store, resource: SocketAddr, number: usize) -> Self {
        let mut all = Self { url: store.url(LEASE), resource, processes: Vec::new() };
        all.processes = (0..number).map(|_| all.spawn()).collect();
        all
    }

    fn spawn(&self) -> HelperProcess {
        let mut command = child_process("elections::a_process_with_candidates", &self.url).unwrap();
        command.env(RESOURCE, self.resource.to_string());
        HelperProcess::spawn(command).unwrap()
    }

    fn choose_running(&self) -> usize {
        let chosen = fastrand::usize(..PROCESSES);
        let process = &self.processes[chosen];
        assert!(!process.has_exited(), "a process has ended: {}", process.stderr());
        chosen
    }

    /// Makes the leader of a role step down. Returns false if no process leads it now.
    fn step_down(&mut self, role: &str, leader: Option<u32>) -> bool {
        let leader = self.processes.iter_mut().find(|process| Some(process.id()) == leader);
        leader.is_some_and(|leader| leader.write_line(role).is_ok())
    }
}

async fn wait_for_all_leaders(resource: &Resource) {
    for number in 0..ROLES {
        let leader = resource.wait_for_work(&role(number), LONG).await;
        resource.assert_no_violation();
        assert!(leader.is_some(), "{} has no leader", role(number));
    }
}

async fn no_two_terms_are_valid_at_once_under_forced_changes(mut store: Store) {
    let begin = Instant::now();
    let resource = Resource::start(LEASE).await;
    let mut processes = Processes::start(&store, resource.address, PROCESSES);
    resource.wait_until_begun(ROLES, LONG).await;
    let (mut kills, mut pauses, mut restarts, mut step_downs) = (0, 0, 0, 0);
    for round in 0.. {
        wait_for_all_leaders(&resource).await;
        if resource.begun() >= ROLES + changes() {
            break;
        }
        match round % 6 {
            1 => {
                let killed = processes.choose_running();
                processes.processes[killed].kill().unwrap();
                processes.processes[killed] = processes.spawn();
                kills += 1;
            }
            3 => {
                let paused = &processes.processes[processes.choose_running()];
                paused.pause().await.unwrap();
                // About half of the pauses end after other processes have become leaders.
                sleep(LEASE.mul_f64(0.8 + fastrand::f64())).await;
                paused.resume().unwrap();
                pauses += 1;
            }
            5 => {
                store.restart().await;
                restarts += 1;
            }
            _ => {
                let begun = resource.begun();
                for number in fastrand::choose_multiple(0..ROLES, ROLES / 4) {
                    let role = role(number);
                    let leader = resource.process(&role);
                    step_downs += u32::from(processes.step_down(&role, leader));
                }
                resource.wait_until_begun(begun + 1, LONG).await;
            }
        }
    }
    resource.assert_no_violation();
    println!(
        "{}: {} changes in {:?}: {step_downs} step-downs, {kills} kills, {pauses} pauses, \
         {restarts} restarts, {} refused writes",
        store.url,
        resource.begun() - ROLES,
        begin.elapsed(),
        resource.refused(),
    );
}

/// The sessions and leases of the candidates end during the pause.
async fn a_candidate_that_was_paused_beyond_its_session_campaigns_on(store: Store) {
    let resource = Resource::start(LEASE).await;
    let leaders = Processes::start(&store, resource.address, 1);
    wait_for_all_leaders(&resource).await;
    let candidates = Processes::start(&store, resource.address, 1);
    let candidate = &candidates.processes[0];
    eventually(LONG, async || {
        let lines = candidate.lines();
        (0..ROLES).map(role).all(|role| {
            let notice = format!("{{\"busy_key\":\"{role}\"}}");
            // On a loaded machine, a term of the leader may end early. This candidate then leads.
            resource.process(&role) == Some(candidate.id())
                || lines.iter().any(|line| **line == *notice)
        })
    })
    .await;
    candidate.pause().await.unwrap();
    sleep(LEASE * 2).await;
    candidate.resume().unwrap();
    leaders.processes[0].kill().unwrap();
    eventually(LONG, async || {
        (0..ROLES).all(|number| resource.process(&role(number)) == Some(candidate.id()))
    })
    .await;
    resource.assert_no_violation();
}
