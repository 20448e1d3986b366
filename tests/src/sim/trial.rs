//! The processes of a trial, their shared state, and the checks at its end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{FencingToken, Key, LockAdmin as _, LockGuard, MemoryBackend, Registry};
use registry_testkit::history::{History, Recorder, tokio_clock};
use registry_testkit::seed::Seed;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::checking_backend::CheckingBackend;
use super::client::TrialClient;
use super::{FaultProfile, Step, TRIAL_MAX, TrialOutcome};

/// The longest lease that clients request for an acquisition.
pub(super) const LEASE_MAX: Duration = Duration::from_secs(4);

/// The longest lease that clients request for a renewal.
const RENEWED_MAX: Duration = Duration::from_secs(8);

/// The engine's request timeout.
const ANSWER_LIMIT: Duration = Duration::from_millis(200);

pub(super) struct Trial {
    fault_profile: FaultProfile,
    store: MemoryBackend,
    processes: Vec<TrialProcess>,
    clients: Vec<TrialClient>,
    state: Arc<TrialState>,
}

/// One registry with its network.
#[derive(Clone)]
pub(super) struct TrialProcess {
    pub(super) registry: Registry,
    pub(super) checking_backend: Arc<CheckingBackend>,
    network: Arc<FaultyBackend>,
}

/// The state that the clients of all processes share.
pub(super) struct TrialState {
    pub(super) recorder: Recorder,
    pub(super) keys: usize,
    pub(super) grants_left: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) dropped: AtomicU64,
    /// The store itself, to verify the results of releases. `None` with hand-over, which keeps the
    /// claim, and with late requests, which create new claims.
    store: Option<MemoryBackend>,
    start: Instant,
    trace: Mutex<Vec<Step>>,
    /// The newest token that each protected resource has seen.
    resources: Mutex<HashMap<String, FencingToken>>,
    /// All live guards, by key.
    guards: Mutex<HashMap<String, Vec<Weak<LockGuard>>>>,
    grants: AtomicU64,
}

impl Trial {
    pub(super) fn new(seed: Seed, fault_profile: FaultProfile, grants: u64) -> Self {
        let mut rng = seed.stream(1);
        let store = MemoryBackend::new();
        let handoffs = [0, 1, 32][rng.usize(0..3)];
        let state = Arc::new(TrialState {
            recorder: Recorder::new(tokio_clock()),
            keys: rng.usize(1..=4),
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
        let processes: Vec<_> = (0..rng.u64(2..=4))
            .map(|process| {
                let faults = faults(fault_profile, seed.stream(100 + process).u64(..));
                let network = Arc::new(FaultyBackend::new(Arc::new(store.clone()), faults));
                let backend: Arc<FaultyBackend> = Arc::clone(&network);
                let checking_backend =
                    CheckingBackend::new(backend, fault_profile, seed.stream(200 + process));
                let registry = Registry::builder(Arc::clone(&checking_backend) as _)
                    .observer(Arc::clone(&checking_backend) as _)
                    .handoff(handoffs)
                    .lease(LEASE_MAX / 2)
                    .timeout(ANSWER_LIMIT)
                    .poll(Duration::from_millis(rng.u64(20..500)))
                    .build()
                    .expect("the values are in range");
                TrialProcess { registry, checking_backend, network }
            })
            .collect();
        let clients = (0..rng.usize(4..=12))
            .map(|number| {
                let process = processes[number % processes.len()].clone();
                TrialClient::new(
                    number,
                    process,
                    Arc::clone(&state),
                    seed.stream(1_000 + number as u64),
                )
            })
            .collect();
        Self { fault_profile, store, processes, clients, state }
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
        assert!(timeout(TRIAL_MAX, all).await.is_ok(), "I5: a client hangs");
    }

    /// Stops the faults and checks the final state.
    pub(super) async fn check_final_state(&self) {
        for process in &self.processes {
            process.network.clear_faults();
        }
        // Every pending release completes within the longest lease and one or two requests.
        let limit = RENEWED_MAX + Duration::from_secs(2);
        for process in &self.processes {
            let idle = timeout(limit, process.registry.idle()).await;
            assert!(idle.is_ok(), "I6: a release of a process never completes");
        }
        for process in &self.processes {
            process.network.wait_for_late_requests().await;
        }
        if self.fault_profile == FaultProfile::Stormy {
            // No process knows of an acquisition that arrived again after its release; only its
            // lease ends it.
            tokio::time::sleep(RENEWED_MAX).await;
        }
        let left = self.processes[0].registry.list().await.expect("the network is healed");
        assert!(left.is_empty(), "I6: no guard exists, but the store lists {left:?}");
        for process in &self.processes {
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
            faults: self.processes.iter().map(|process| process.network.faults()).sum(),
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

    /// Checks that no other guard of the key is valid now, and records this one. I2.
    pub(super) fn granted(&self, guard: &Arc<LockGuard>) {
        self.grants.fetch_add(1, Ordering::Relaxed);
        let mut guards = self.guards.lock().unwrap_or_else(PoisonError::into_inner);
        let of_key = guards.entry(guard.key().to_owned()).or_default();
        of_key.retain(|other| other.strong_count() > 0);
        for other in of_key.iter().filter_map(Weak::upgrade) {
            assert!(
                !(other.is_held() && guard.is_held()),
                "I2: two valid guards of {:?}: {other:?} and {guard:?}",
                guard.key()
            );
        }
        of_key.push(Arc::downgrade(guard));
    }

    /// Checks that the store no longer holds a grant whose release succeeded. I4.
    pub(super) async fn check_released(&self, key: &str, token: FencingToken) {
        let Some(store) = &self.store else { return };
        let key = Key::new(key).expect("it was locked");
        let holders = store.inspect(&key).await.expect("the store itself never fails");
        let holds = holders.iter().any(|holder| holder.token == Some(token));
        assert!(!holds, "I4: {key:?} was released, but the store still lists it");
    }

    /// Writes to the resource that the key protects. The resource rejects the write if it has seen
    /// a newer token. I1.
    pub(super) fn write(&self, client: usize, guard: &LockGuard) {
        let token = guard.fencing_token();
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
