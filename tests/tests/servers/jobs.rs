//! Jobs of eight processes whose wall clocks differ by up to ten minutes, on each store. Processes
//! are killed at random and started again. No tick runs twice, and no tick is lost.

#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::print_stdout, reason = "the tests print their measurements")]
#![expect(clippy::print_stderr, reason = "a test prints the output of a process that has ended")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use std::{env, io, process, thread};

use lock_registry::once::{CatchUp, DoneRecord, Outcome, Run, Tick};
use lock_registry::{FencingToken, LockError, LockRegistryExt as _, Registry};
use registry_testkit::clock::ClockShim;
use registry_testkit::eventually;
use registry_testkit::holder::{child_process, run_child_process};
use registry_testkit::process::HelperProcess;
use serde::{Deserialize, Serialize};
use tokio::task::yield_now;
use tokio::time::sleep;

use crate::resource::{Resource, Step, Work, now};
use crate::stores::{LONG, Store, config, long_or, on_each_store};

const LEASE: Duration = Duration::from_secs(2);
const PROCESSES: usize = 8;
/// The maximum difference between the wall clocks of two processes.
const WALL_SECS: i64 = 600;
const PERIOD: Duration = Duration::from_millis(100);
/// The maximum duration of the work.
const WORK: Duration = Duration::from_millis(40);
/// The keys of a job whose ticks are numbers, and of one whose ticks are periods.
const NUMBERED: &str = "numbered";
const PERIODIC: &str = "periodic";

/// The environment variable with a [`JobTask`] as JSON, for a child process.
const TASK: &str = "JOB_TASK";

#[derive(Debug, Clone, Serialize, Deserialize)]
struct JobTask {
    resource: SocketAddr,
    ticks: u64,
    catch_up: bool,
}

/// The number of ticks.
fn ticks() -> u64 {
    long_or(200, 30)
}

on_each_store! {
    no_tick_runs_twice_or_is_lost_while_processes_are_killed,
}

#[test]
#[ignore = "started by the other tests, as another process"]
fn a_process_with_jobs() {
    run_child_process(async |url| {
        let task: JobTask = serde_json::from_str(&env::var(TASK).unwrap()).unwrap();
        exit_at_end_of_input();
        let registry = config(&url).connect().await.unwrap();
        tokio::join!(run_numbers(&registry, &task), run_periods(&registry, &task));
    });
}

/// Exits this process at the end of its input, when the test has ended.
fn exit_at_end_of_input() {
    thread::spawn(|| {
        io::stdin().lines().for_each(drop);
        process::exit(0);
    });
}

/// Runs the ticks in their order. Never returns.
async fn run_numbers(registry: &Registry, task: &JobTask) {
    let mut next = 1;
    loop {
        if next > task.ticks {
            // Another process may be killed before it has recorded the last tick.
            next = task.ticks;
            sleep(PERIOD).await;
        }
        let mut ran = BTreeSet::new();
        let job = registry.once(NUMBERED).tick(next);
        let outcome = job.run(|run| work(task, NUMBERED, run, &mut ran)).await;
        match report(task, NUMBERED, outcome, ran).await {
            Some(done) => next = done + 1,
            None => sleep(WORK / 4).await,
        }
    }
}

/// Runs the periods that are due. Never returns.
async fn run_periods(registry: &Registry, task: &JobTask) {
    let catch_up = if task.catch_up { CatchUp::All } else { CatchUp::Skip };
    loop {
        let mut ran = BTreeSet::new();
        let job = registry.once(PERIODIC).every(PERIOD).catch_up(catch_up);
        let outcome = job.run(|run| work(task, PERIODIC, run, &mut ran)).await;
        report(task, PERIODIC, outcome, ran).await;
        sleep(PERIOD / 4).await;
    }
}

/// Returns the work of a run, which writes to the resource when it begins and when it ends. Adds
/// the tick to `ran`.
fn work(
    task: &JobTask,
    key: &'static str,
    run: Run,
    ran: &mut BTreeSet<(u64, FencingToken)>,
) -> impl Future<Output = ()> + use<> {
    let (at, token, resource) = (now(), run.fencing_token(), task.resource);
    let tick = run.tick().number();
    ran.extend(tick.map(|tick| (tick, token)));
    async move {
        let mut work = Work::connect(resource, key, token).await;
        let process = process::id();
        let mut accepted = work.write(Step::Begin { at, process, tick }).await;
        if accepted {
            sleep(random_span(WORK)).await;
            accepted = work.write(Step::End).await;
        }
        if !accepted {
            // A later run has written, so this one has lost its lock.
            yield_now().await;
            work.write(Step::Violation("a refused run continues".into())).await;
        }
    }
}

fn random_span(max: Duration) -> Duration {
    max.mul_f64(fastrand::f64())
}

/// Reports recorded ticks to the resource. Returns the last tick that is known to be recorded.
async fn report(
    task: &JobTask,
    key: &str,
    outcome: Result<Outcome<()>, LockError>,
    ran: BTreeSet<(u64, FencingToken)>,
) -> Option<u64> {
    match outcome {
        Ok(Outcome::Ran(())) => {
            for (tick, token) in &ran {
                Work::connect(task.resource, key, *token).await.write(Step::Recorded(*tick)).await;
            }
            ran.last().map(|(tick, _)| *tick)
        }
        Ok(Outcome::AlreadyDone { tick, .. }) => tick.number(),
        Ok(_) => None,
        Err(error) => {
            eprintln!("{key}: {error}");
            sleep(LEASE / 10).await;
            None
        }
    }
}

/// The processes, each with a wall clock of its own.
struct Processes {
    url: String,
    task: JobTask,
    processes: Vec<(ClockShim, HelperProcess)>,
}

impl Processes {
    fn start(store: &Store, task: JobTask) -> Self {
        let mut all = Self { url: store.url(LEASE), task, processes: Vec::new() };
        for number in 0..PROCESSES {
            let clock = ClockShim::new().unwrap();
            let (number, last) = (i64::try_from(number).unwrap(), PROCESSES as i64 - 1);
            clock.jump_wall(WALL_SECS * number / last - WALL_SECS / 2).unwrap();
            let process = all.spawn(&clock);
            all.processes.push((clock, process));
        }
        all
    }

    fn spawn(&self, clock: &ClockShim) -> HelperProcess {
        let mut command = child_process("jobs::a_process_with_jobs", &self.url).unwrap();
        command.envs(clock.environment()).env(TASK, serde_json::to_string(&self.task).unwrap());
        HelperProcess::spawn(command).unwrap()
    }

    /// Kills the process of this number and starts it again.
    fn restart(&mut self, number: usize) {
        let (clock, killed) = &self.processes[number];
        assert!(!killed.has_exited(), "a process has ended: {}", killed.stderr());
        killed.kill().unwrap();
        let started = self.spawn(clock);
        self.processes[number].1 = started;
    }

    fn number_of(&self, id: u32) -> Option<usize> {
        self.processes.iter().position(|(_, process)| process.id() == id)
    }
}

/// Runs and records the current period of [`PERIODIC`] in this process. Returns the period. `None`
/// after an error, and while the lock of a call that failed is being released.
async fn run_current_period(registry: &Registry) -> Option<u64> {
    let job = registry.once(PERIODIC).every(PERIOD);
    match job.run(|run| async move { run.tick().number() }).await.ok()? {
        Outcome::Ran(period) => period,
        // An earlier call has recorded the period, but returned an error.
        Outcome::AlreadyDone { tick, .. } => tick.number(),
        _ => None,
    }
}

async fn no_tick_runs_twice_or_is_lost_while_processes_are_killed(store: Store) {
    let begin = Instant::now();
    let resource = Resource::start(LEASE).await;
    let ticks = ticks();
    // Without a common clock, a process that is ahead would have to catch up with all periods since
    // those of a process that is behind.
    let task = JobTask { resource: resource.address, ticks, catch_up: store.has_clock };
    let registry = store.connect(LEASE).await;
    // The test runs the first period itself. Without a record, a job has no missed periods: if a
    // process that runs the first period were killed before it records the period, the next run
    // would begin with a later period.
    let first_period = eventually(LONG, async || run_current_period(&registry).await).await;
    let mut processes = Processes::start(&store, task);
    let (mut kills, mut kills_at_work) = (0, 0_u32);
    // Without a common clock, the process that is ahead runs the periods. While it is down, the
    // others find them done.
    let periods_min = if store.has_clock { ticks } else { ticks / 6 };
    let is_done = || {
        let [ran, periods] = [NUMBERED, PERIODIC].map(|key| resource.finished(key).len() as u64);
        ran >= ticks && periods >= periods_min
    };
    while !is_done() {
        let in_time = begin.elapsed() < LONG;
        assert!(in_time, "not done: {:?}", [NUMBERED, PERIODIC].map(|key| resource.finished(key)));
        sleep(random_span(LEASE / 4)).await;
        let mut killed = None;
        if fastrand::bool() {
            // The kill falls into the work of a job, or into the request that records its tick.
            let key = fastrand::choice([NUMBERED, PERIODIC]).unwrap();
            killed = resource.wait_for_work(key, LEASE).await;
            sleep(random_span(WORK)).await;
        }
        let at_work = killed.and_then(|id| processes.number_of(id));
        kills_at_work += u32::from(at_work.is_some());
        processes.restart(at_work.unwrap_or_else(|| fastrand::usize(..PROCESSES)));
        resource.assert_no_violation();
        kills += 1;
    }
    // The process that ran the last tick may have been killed before it recorded the tick. Another
    // process then repeats it.
    let lock = registry.obtain(NUMBERED);
    eventually(LONG, async || {
        let value = lock.value().await.ok().flatten();
        value.is_some_and(|value| {
            DoneRecord::parse(&value.bytes).unwrap().tick == Tick::Number(ticks)
        })
    })
    .await;
    resource.assert_no_violation();
    assert_eq!(resource.finished(NUMBERED), (1..=ticks).collect(), "a tick is lost");
    let periods = resource.finished(PERIODIC);
    let period = PERIOD.as_millis() as u64;
    assert!(periods.iter().all(|tick| tick % period == 0), "{periods:?}");
    if store.has_clock {
        // No process runs the first period.
        let mut due = (first_period..*periods.last().unwrap()).step_by(period as usize).skip(1);
        assert_eq!(due.find(|tick| !periods.contains(tick)), None, "a period is lost: {periods:?}");
    }
    println!(
        "{}: {} periods and {ticks} ticks in {:?}, {kills} kills, {kills_at_work} of them during \
         work, {} refused writes",
        store.url,
        periods.len(),
        begin.elapsed(),
        resource.refused(),
    );
}
