//! The processes of a trial, their shared state, and the checks at its end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    ClaimMode, FencingToken, Key, LockAdmin as _, LockGuard, MemoryBackend, MultiGuard, Registry,
};
use registry_testkit::history::{History, Recorder, tokio_clock};
use registry_testkit::seed::Seed;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::checking_backend::CheckingBackend;
use super::client::TrialClient;
use super::modes::{check_arrival_order, check_units, check_writer_is_not_starved, is_semaphore};
use super::{FaultProfile, Step, TRIAL_MAX, TrialModes, TrialOutcome};

/// The longest lease that clients request for an acquisition.
pub(super) const LEASE_MAX: Duration = Duration::from_secs(4);

/// The longest lease that clients request for a renewal.
const RENEWED_MAX: Duration = Duration::from_secs(8);

/// The engine's request timeout.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(200);

/// The maximum number of processes of a trial that crash.
const CRASHES_MAX: u64 = 3;

pub(super) struct Trial {
    seed: Seed,
    fault_profile: FaultProfile,
    store: MemoryBackend,
    handoffs: u32,
    slots: Vec<ProcessSlot>,
    crashed: Vec<TrialProcess>,
    clients: Vec<TrialClient>,
    state: Arc<TrialState>,
}

/// One registry with its network.
#[derive(Clone)]
pub(super) struct TrialProcess {
    pub(super) registry: Registry,
    pub(super) checking_backend: Arc<CheckingBackend>,
    pub(super) crash: Crash,
    network: Arc<FaultyBackend>,
}

/// A process that is replaced when it crashes.
#[derive(Clone)]
pub(super) struct ProcessSlot(Arc<Mutex<TrialProcess>>);

impl ProcessSlot {
    pub(super) fn current(&self) -> TrialProcess {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, process: TrialProcess) -> TrialProcess {
        std::mem::replace(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner), process)
    }
}

/// Whether a process has crashed.
#[derive(Clone, Default)]
pub(super) struct Crash(Arc<(AtomicBool, Notify)>);

impl Crash {
    pub(super) async fn wait(&self) {
        // `notify_waiters` wakes the clients in the order of their calls, so that a replay of the
        // seed is identical.
        let crashed = self.0.1.notified();
        if !self.0.0.load(Ordering::Relaxed) {
            crashed.await;
        }
    }

    fn crash(&self) {
        self.0.0.store(true, Ordering::Relaxed);
        self.0.1.notify_waiters();
    }
}

/// The state that the clients of all processes share.
pub(super) struct TrialState {
    pub(super) recorder: Recorder,
    pub(super) keys: usize,
    pub(super) has_all_modes: bool,
    pub(super) grants_left: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) dropped: AtomicU64,
    /// The store without faults, to verify the results of releases. `None` with hand-over, which
    /// keeps the claim, and with repeated requests, which can be granted after the release.
    store: Option<MemoryBackend>,
    start: Instant,
    trace: Mutex<Vec<Step>>,
    /// The newest token that each protected resource has seen.
    resources: Mutex<HashMap<String, FencingToken>>,
    /// All live guards, by key.
    guards: Mutex<HashMap<String, Vec<TrackedGuard>>>,
    grants: AtomicU64,
}

impl Trial {
    pub(super) fn new(
        seed: Seed,
        fault_profile: FaultProfile,
        modes: TrialModes,
        grants: u64,
    ) -> Self {
        let has_all_modes = modes == TrialModes::All;
        let mut rng = seed.stream(1);
        let store = MemoryBackend::new();
        let handoffs = [0, 1, 32][rng.usize(0..3)];
        let state = Arc::new(TrialState {
            recorder: Recorder::new(tokio_clock()),
            keys: if has_all_modes { rng.usize(2..=4) } else { rng.usize(1..=4) },
            has_all_modes,
            grants_left: AtomicU64::new(grants),
            lost: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            store: (handoffs == 0 && fault_profile != FaultProfile::Stormy).then(|| store.clone()),
            start: Instant::now(),
            trace: Mutex::default(),
            resources: Mutex::default(),
            guards: Mutex::default(),
            grants: AtomicU64::new(0),
        });
        let mut trial = Self {
            seed,
            fault_profile,
            store,
            handoffs,
            slots: Vec::new(),
            crashed: Vec::new(),
            clients: Vec::new(),
            state,
        };
        for number in 0..rng.u64(2..=4) {
            let process = trial.start_process(number, &mut rng);
            trial.slots.push(ProcessSlot(Arc::new(Mutex::new(process))));
        }
        let (slots, state) = (&trial.slots, &trial.state);
        trial.clients = (0..rng.usize(4..=12))
            .map(|number| {
                TrialClient::new(
                    number,
                    slots[number % slots.len()].clone(),
                    Arc::clone(state),
                    seed.stream(1_000 + number as u64),
                )
            })
            .collect();
        trial
    }

    /// Starts the process with this number.
    fn start_process(&self, number: u64, rng: &mut fastrand::Rng) -> TrialProcess {
        let faults = faults(self.fault_profile, self.seed.stream(100 + number).u64(..));
        let network = Arc::new(FaultyBackend::new(Arc::new(self.store.clone()), faults));
        let backend: Arc<FaultyBackend> = Arc::clone(&network);
        let rng_of_backend = self.seed.stream(200 + number);
        let checking_backend = CheckingBackend::new(backend, self.fault_profile, rng_of_backend);
        let registry = Registry::builder(Arc::clone(&checking_backend) as _)
            .observer(Arc::clone(&checking_backend) as _)
            .handoff(self.handoffs)
            .lease(LEASE_MAX / 2)
            .timeout(REQUEST_TIMEOUT)
            .poll(Duration::from_millis(rng.u64(20..500)))
            .build()
            .expect("the values are in range");
        TrialProcess { registry, checking_backend, crash: Crash::default(), network }
    }

    /// Returns the processes that have not crashed.
    fn processes(&self) -> Vec<TrialProcess> {
        self.slots.iter().map(ProcessSlot::current).collect()
    }

    /// Crashes processes at random times, and starts a new process in place of each.
    async fn crash_processes(&mut self) {
        let mut rng = self.seed.stream(2);
        for number in 0..CRASHES_MAX {
            sleep(Duration::from_millis(rng.u64(1_000..20_000))).await;
            let process = self.start_process(50 + number, &mut rng);
            let crashed = self.slots[rng.usize(..self.slots.len())].replace(process);
            // No later request of the process is sent, and its clients drop their futures and
            // guards.
            crashed.checking_backend.cut();
            crashed.crash.crash();
            self.crashed.push(crashed);
        }
    }

    /// Runs all clients to their end.
    pub(super) async fn run_to_end(&mut self) {
        let mut tasks = JoinSet::new();
        for client in self.clients.drain(..) {
            tasks.spawn(client.run_to_end());
        }
        let all = async {
            while let Some(ended) = tasks.join_next().await {
                if let Err(error) = ended {
                    std::panic::resume_unwind(error.into_panic());
                }
            }
        };
        let has_crashes = self.state.has_all_modes;
        let crashes = async {
            if has_crashes {
                self.crash_processes().await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            ended = timeout(TRIAL_MAX, all) => assert!(ended.is_ok(), "I5: a client hangs"),
            () = crashes => {}
        }
    }

    /// Stops the faults and checks the final state.
    pub(super) async fn check_final_state(&self) {
        let processes = self.processes();
        for process in &processes {
            process.network.clear_faults();
        }
        // Every pending release completes within the longest lease and one or two requests.
        let limit = RENEWED_MAX + Duration::from_secs(2);
        for process in &processes {
            let idle = timeout(limit, process.registry.idle()).await;
            assert!(idle.is_ok(), "I6: a release of a process never completes");
        }
        for process in processes.iter().chain(&self.crashed) {
            process.network.wait_for_late_repetitions().await;
        }
        if self.fault_profile == FaultProfile::Stormy || !self.crashed.is_empty() {
            // An acquisition can arrive again after its release, and a crashed process leaves
            // claims. No process knows of these claims, so only their leases end them.
            sleep(RENEWED_MAX).await;
        }
        let left = processes[0].registry.list().await.expect("the network is healed");
        assert!(left.is_empty(), "I6: no guard exists, but the store lists {left:?}");
        for process in &processes {
            let registry = &process.registry;
            assert_eq!(registry.held(), 0, "I7: a process holds a claim without a guard");
            assert_eq!(registry.local_locks(), 0, "I8: a local lock remains");
            for key in 0..self.state.keys {
                let taken =
                    registry.obtain(&key.to_string()).try_lock_for(Duration::from_secs(1)).await;
                match taken {
                    Ok(Some(guard)) => guard.unlock().await.expect("nothing fails any more"),
                    other => panic!("I5: key {key} cannot be acquired after the faults: {other:?}"),
                }
            }
            assert_eq!(registry.local_locks(), 0, "I8: a local lock remains");
        }
        if self.state.has_all_modes {
            for key in 0..self.state.keys {
                check_arrival_order(&processes, &key.to_string()).await;
                if is_semaphore(key) {
                    check_units(&processes, &key.to_string()).await;
                } else {
                    check_writer_is_not_starved(&processes, &key.to_string()).await;
                }
            }
        }
        assert_eq!(self.store.records(), 0, "a free key takes no memory");
    }

    pub(super) fn history(&self) -> History {
        self.state.recorder.history()
    }

    pub(super) fn outcome(&self) -> TrialOutcome {
        let trace = self.state.trace.lock().unwrap_or_else(PoisonError::into_inner);
        TrialOutcome {
            grants: self.state.grants.load(Ordering::Relaxed),
            lost: self.state.lost.load(Ordering::Relaxed),
            dropped: self.state.dropped.load(Ordering::Relaxed),
            faults: {
                let processes = self.processes();
                let all = processes.iter().chain(&self.crashed);
                all.map(|process| process.network.injected_faults()).sum()
            },
            crashes: self.crashed.len() as u64,
            trace: trace.clone(),
        }
    }
}

impl TrialState {
    /// Records one step of the trial.
    pub(super) fn trace(&self, client: usize, what: &'static str) {
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        trace.push((self.start.elapsed(), client, what));
    }

    /// Counts a grant, and checks it as in [`track_one`](Self::track_one).
    pub(super) fn granted(&self, guard: &Arc<LockGuard>) {
        self.grants.fetch_add(1, Ordering::Relaxed);
        self.track_one(guard);
    }

    /// Counts the grants of a guard of several keys, and checks each as in
    /// [`track_one`](Self::track_one).
    pub(super) fn granted_several(&self, several: &Arc<MultiGuard>) {
        self.grants_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .ok();
        for (index, guard) in several.guards().iter().enumerate() {
            self.grants.fetch_add(1, Ordering::Relaxed);
            self.track(guard, TrackedGuard::OfSeveral(Arc::downgrade(several), index));
        }
    }

    /// Checks that no valid guard of the key excludes this one, and records this one. I2.
    pub(super) fn track_one(&self, guard: &Arc<LockGuard>) {
        self.track(guard, TrackedGuard::One(Arc::downgrade(guard)));
    }

    fn track(&self, guard: &LockGuard, tracked: TrackedGuard) {
        let mut guards = self.guards.lock().unwrap_or_else(PoisonError::into_inner);
        let of_key = guards.entry(guard.key().to_owned()).or_default();
        of_key.retain(TrackedGuard::exists);
        if guard.is_held() {
            let mut taken = guard.mode().units();
            for (mode, other) in of_key.iter().filter_map(TrackedGuard::held_mode) {
                taken += mode.units();
                let fits = match guard.mode() {
                    ClaimMode::Permits { of, .. } => mode.units() > 0 && taken <= of,
                    own => own.is_compatible(mode),
                };
                let key = guard.key();
                assert!(fits, "I2: two valid guards of {key:?}: {other} and {guard:?}");
            }
        }
        of_key.push(tracked);
    }

    /// Checks that the store no longer holds a grant whose release succeeded. I4.
    pub(super) async fn check_released(&self, key: &str, token: FencingToken) {
        let Some(store) = &self.store else { return };
        let key = Key::new(key).expect("it was locked");
        let holders = store.inspect(&key).await.expect("the store itself never fails");
        let holds = holders.iter().any(|holder| holder.token == Some(token));
        assert!(!holds, "I4: {key:?} was released, but the store still lists it");
    }

    /// Writes to the resource that the key protects if the guard is exclusive. Otherwise reads the
    /// resource. The resource rejects the write if it has seen a newer token. I1.
    pub(super) fn write(&self, client: usize, guard: &LockGuard) {
        let token = guard.fencing_token();
        if guard.mode() != ClaimMode::Exclusive {
            return self.read(guard);
        }
        let write_record = self.recorder.write(client as u32, guard.key(), token);
        let mut resources = self.resources.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = resources.entry(guard.key().to_owned()).or_insert(token);
        if token < *newest {
            assert!(!guard.is_held(), "I1: a valid guard's token {token} is older than {newest}");
            write_record.rejected();
        } else {
            *newest = token;
            write_record.accepted();
        }
    }

    /// Reads the resource that the key protects. A valid reader sees no write of a later holder.
    /// I1.
    fn read(&self, guard: &LockGuard) {
        let resources = self.resources.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(newest) = resources.get(guard.key()) {
            let token = guard.fencing_token();
            let is_stale = guard.is_held() && token < *newest;
            assert!(!is_stale, "I1: a valid guard's token {token} is older than {newest}");
        }
    }
}

/// A guard of one key, or one of the guards of a `MultiGuard`.
enum TrackedGuard {
    One(Weak<LockGuard>),
    OfSeveral(Weak<MultiGuard>, usize),
}

impl TrackedGuard {
    fn exists(&self) -> bool {
        match self {
            Self::One(guard) => guard.strong_count() > 0,
            Self::OfSeveral(guard, _) => guard.strong_count() > 0,
        }
    }

    /// Returns the mode of the guard and its description, if it is valid.
    fn held_mode(&self) -> Option<(ClaimMode, String)> {
        let mode =
            |guard: &LockGuard| guard.is_held().then(|| (guard.mode(), format!("{guard:?}")));
        match self {
            Self::One(guard) => mode(&*guard.upgrade()?),
            Self::OfSeveral(guard, index) => mode(&guard.upgrade()?.guards()[*index]),
        }
    }
}

fn faults(fault_profile: FaultProfile, seed: u64) -> Faults {
    use Operation::{Acquire, Release, Renew, Wait};

    let ms = Duration::from_millis;
    let mut faults = Faults::seeded(seed);
    for operation in [Acquire, Renew, Release] {
        faults = faults.sometimes(operation, 0.5, Fault::DelayRequest(ms(40))).sometimes(
            operation,
            0.5,
            Fault::DelayReply(ms(40)),
        );
    }
    if fault_profile == FaultProfile::Calm {
        return faults;
    }
    faults =
        faults.sometimes(Wait, 0.3, Fault::LoseWake).sometimes(Wait, 0.1, Fault::WakeEarly(ms(30)));
    for operation in [Acquire, Renew, Release] {
        faults = faults
            .sometimes(operation, 0.02, Fault::Refuse)
            .sometimes(operation, 0.04, Fault::LoseRequest)
            .sometimes(operation, 0.06, Fault::LoseReply);
    }
    if fault_profile == FaultProfile::Stormy {
        for operation in [Acquire, Renew, Release] {
            faults = faults
                .sometimes(operation, 0.02, Fault::DelayRequest(ms(3_000)))
                .sometimes(operation, 0.02, Fault::DelayReply(ms(3_000)))
                .sometimes(operation, 0.03, Fault::Repeat)
                .sometimes(operation, 0.02, Fault::RepeatLate(ms(2_000)));
        }
    }
    faults
}
