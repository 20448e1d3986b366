//! Elections and jobs over the in-process store, on paused time: no two terms or runs overlap, and
//! no tick is lost. Seeded faults lose, delay and repeat requests and replies. Processes lose their
//! connection for a while, and candidates crash.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::election::{Election, Leadership, Term};
use registry_core::once::{Outcome, Run};
use registry_core::{FencingToken, LockOptions, LockRegistryExt as _, MemoryBackend, Registry};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

const LEASE: Duration = Duration::from_secs(3);
const CANDIDATES: usize = 4;
const STEPS: usize = 30;

/// The terms whose work runs, and the largest token so far.
#[derive(Default)]
struct Terms {
    running: Vec<FencingToken>,
    last: Option<FencingToken>,
}

/// Removes a term when its work ends or is dropped.
struct RunningTerm(Arc<Mutex<Terms>>, FencingToken);

impl RunningTerm {
    fn begin(terms: &Arc<Mutex<Terms>>, token: FencingToken) -> Self {
        let mut state = terms.lock().unwrap();
        assert_eq!(state.running, [], "the work of an earlier term still runs under {token}");
        assert!(state.last < Some(token), "{token} after {:?}", state.last);
        state.last = Some(token);
        state.running.push(token);
        Self(Arc::clone(terms), token)
    }
}

impl Drop for RunningTerm {
    fn drop(&mut self) {
        self.0.lock().unwrap().running.retain(|token| *token != self.1);
    }
}

fn faults(random: &mut fastrand::Rng) -> Faults {
    let mut faults = Faults::seeded(random.u64(..));
    for operation in [
        Operation::Acquire,
        Operation::Renew,
        Operation::Release,
        Operation::Value,
        Operation::SetValue,
    ] {
        faults = faults
            .sometimes(operation, 0.05, Fault::LoseRequest)
            .sometimes(operation, 0.05, Fault::LoseReply)
            .sometimes(operation, 0.1, Fault::DelayRequest(LEASE / 2))
            .sometimes(operation, 0.1, Fault::DelayReply(LEASE / 2))
            .sometimes(operation, 0.05, Fault::RepeatLate(LEASE * 2));
    }
    faults.sometimes(Operation::Wait, 0.3, Fault::LoseWake)
}

/// The processes of one trial, over one store.
struct Trial {
    random: fastrand::Rng,
    store: MemoryBackend,
}

impl Trial {
    fn new(seed: u64) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), store: MemoryBackend::new() }
    }

    /// Opens the registry of a process, behind faults of its own.
    fn process(&mut self) -> (Arc<FaultyBackend>, Registry) {
        let faults = faults(&mut self.random);
        let faulty = Arc::new(FaultyBackend::new(Arc::new(self.store.clone()), faults));
        let registry = Registry::builder(Arc::clone(&faulty) as _).lease(LEASE).build().unwrap();
        (faulty, registry)
    }

    /// Cuts one process off for a while, or lets time pass.
    async fn disturb(&mut self, processes: &[(Arc<FaultyBackend>, Registry)]) {
        if self.random.u8(..4) > 0 {
            return sleep(LEASE / 10 * self.random.u32(..20)).await;
        }
        let (faulty, _) = &processes[self.random.usize(..processes.len())];
        faulty.apply(Faults::outage());
        sleep(LEASE * self.random.u32(..3)).await;
        faulty.apply(faults(&mut self.random));
    }
}

/// The number of trials: more with `SIMULATION=long`.
fn seeds() -> std::ops::Range<u64> {
    if std::env::var("SIMULATION").is_ok() { 0..1_000 } else { 0..100 }
}

fn spawn_candidate(
    election: &Election,
    terms: &Arc<Mutex<Terms>>,
    tasks: &mut JoinSet<()>,
) -> AbortHandle {
    let (election, terms) = (election.clone(), Arc::clone(terms));
    tasks.spawn(async move {
        let work = |term: Term| {
            let terms = Arc::clone(&terms);
            async move {
                let running = RunningTerm::begin(&terms, term.token());
                tokio::select! {
                    () = term.stopping() => sleep(LEASE / 20).await,
                    () = async {
                        loop {
                            assert!(term.is_held(), "the work runs after the end of its term");
                            sleep(LEASE / 30).await;
                        }
                    } => {}
                }
                drop(running);
            }
        };
        election.run(work).await.unwrap();
    })
}

async fn election_trial(seed: u64) {
    let mut trial = Trial::new(seed);
    let processes: Vec<_> = (0..CANDIDATES).map(|_| trial.process()).collect();
    let elections: Vec<_> =
        processes.iter().map(|(_, registry)| registry.election("role")).collect();
    let terms = Arc::new(Mutex::new(Terms::default()));
    let mut tasks = JoinSet::new();
    let mut running: Vec<_> =
        elections.iter().map(|election| spawn_candidate(election, &terms, &mut tasks)).collect();
    for _ in 0..STEPS {
        let n = trial.random.usize(..CANDIDATES);
        match trial.random.u8(..4) {
            0 => _ = elections[n].step_down(),
            1 => {
                // A crash: the next candidate of this process starts while the claim of the aborted
                // one is still being released.
                running[n].abort();
                running[n] = spawn_candidate(&elections[n], &terms, &mut tasks);
            }
            _ => trial.disturb(&processes).await,
        }
        sleep(LEASE / 10).await;
    }
    for (faulty, _) in &processes {
        faulty.clear_faults();
    }
    // A candidate leads once the store responds again.
    let mut leaders: Vec<_> = elections.iter().map(Election::leadership).collect();
    let leads = leaders.iter_mut().map(|leadership| {
        Box::pin(leadership.wait_for(|now| matches!(now, Leadership::Leader(_))))
    });
    let any_leader = futures_util::future::select_all(leads);
    timeout(LEASE * 20, any_leader).await.expect("a candidate leads after the faults").0.unwrap();
    while let Some(Err(ended)) = tasks.try_join_next() {
        assert!(ended.is_cancelled(), "seed {seed}: {ended}");
    }
    tasks.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn no_two_terms_run_at_once_under_faults() {
    for seed in seeds() {
        election_trial(seed).await;
    }
}

/// What the processes of a job have done.
#[derive(Default)]
struct Job {
    running: usize,
    /// The ticks that a process knows to be recorded.
    done: BTreeSet<u64>,
}

/// Counts a run until it ends or is dropped.
struct Running(Arc<Mutex<Job>>);

impl Running {
    fn begin(job: &Arc<Mutex<Job>>, tick: u64) -> Self {
        let mut state = job.lock().unwrap();
        assert_eq!(state.running, 0, "two runs at once");
        assert!(!state.done.contains(&tick), "tick {tick} runs again");
        state.running += 1;
        Self(Arc::clone(job))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.lock().unwrap().running -= 1;
    }
}

async fn run_ticks(registry: Registry, job: Arc<Mutex<Job>>, ticks: u64) {
    let mut tick = 1;
    while tick <= ticks {
        let work = |run: Run| {
            let job = Arc::clone(&job);
            async move {
                let running = Running::begin(&job, run.tick().number().unwrap());
                sleep(LEASE / 10).await;
                drop(running);
            }
        };
        let options = LockOptions::new().wait(LEASE);
        match registry.once("job").tick(tick).options(options).run(work).await {
            Ok(Outcome::Ran(())) => {
                assert!(job.lock().unwrap().done.insert(tick), "tick {tick} was recorded twice");
                tick += 1;
            }
            Ok(Outcome::AlreadyDone { .. }) => tick += 1,
            // Busy, or an error: the tick may still be due.
            Ok(_) | Err(_) => sleep(LEASE / 20).await,
        }
    }
}

async fn job_trial(seed: u64) {
    let mut trial = Trial::new(seed);
    let processes: Vec<_> = (0..CANDIDATES).map(|_| trial.process()).collect();
    let job = Arc::new(Mutex::new(Job::default()));
    let mut tasks = JoinSet::new();
    for (_, registry) in &processes {
        tasks.spawn(run_ticks(registry.clone(), Arc::clone(&job), 20));
    }
    for _ in 0..STEPS {
        trial.disturb(&processes).await;
    }
    for (faulty, _) in &processes {
        faulty.clear_faults();
    }
    let done = timeout(LEASE * 200, tasks.join_all()).await;
    assert!(done.is_ok(), "seed {seed}: a tick is lost");
}

#[tokio::test(start_paused = true)]
async fn no_tick_runs_twice_or_is_lost_under_faults() {
    for seed in seeds() {
        job_trial(seed).await;
    }
}
