//! Tests `RecordingClient`, which records the calls and locks of a client of the engine, on paused
//! time. The checks accept the recorded histories of a correct store.

#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    LockBackend, LockError, LockOptions, MemoryBackend, PassThroughBackend, Registry,
};
use registry_testkit::check::{Promise, check, validity};
use registry_testkit::history::{HistoryEventKind, Recorder, tokio_clock, with_ranked_tokens};
use registry_testkit::recording_client::RecordingClient;
use registry_testkit::seed::{Seed, Seeds, assert_repeatable};
use tokio::task::JoinSet;
use tokio::time::{advance, sleep};

const KEY: &str = "orders/42";
const LEASE: Duration = Duration::from_secs(2);

fn registry(backend: impl LockBackend) -> Registry {
    Registry::builder(Arc::new(backend)).lease(LEASE).auto_renew(false).build().unwrap()
}

/// Simulates several processes over one store that use one lock; some of them hold it longer than
/// their lease.
async fn run_workload(backend: impl LockBackend + Clone, seed: Seed) -> Recorder {
    let recorder = Recorder::new(tokio_clock());
    let mut clients = JoinSet::new();
    // Two clients share each process, so that hand-overs occur as well.
    let processes: Vec<Registry> = (0..3).map(|_| registry(backend.clone())).collect();
    for client in 0..6 {
        let recording_client = RecordingClient::new(&recorder, client);
        let mut rng = seed.stream(u64::from(client));
        let registry = processes[client as usize % processes.len()].clone();
        clients.spawn(async move {
            let lock = registry.obtain(KEY);
            for _ in 0..20 {
                let wait = Duration::from_millis(rng.u64(..3_000));
                let options = LockOptions::new().wait(wait);
                let Ok(Some(guard)) = recording_client.lock_with(&lock, options).await else {
                    continue;
                };
                sleep(Duration::from_millis(rng.u64(..2_500))).await;
                match rng.u8(..4) {
                    0 => drop(guard),
                    _ => _ = guard.unlock().await,
                }
            }
            registry.idle().await;
        });
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
    recorder
}

#[test]
fn a_workload_on_the_in_process_store_passes_every_check() {
    let ran = Seeds::first(20).run(|seed| {
        let recorder = seed.simulate(async { run_workload(MemoryBackend::new(), seed).await });
        let checked = check(&recorder.history()).unwrap_or_else(|found| panic!("{found}"));
        assert!(checked.tokens >= 20 && checked.busy > 0 && checked.unknown > 0, "{checked:?}");
    });
    assert!(ran > 0);
}

#[test]
fn a_recorded_workload_is_repeatable() {
    let events = assert_repeatable(Seed::new(1), |seed| {
        seed.simulate(async {
            with_ranked_tokens(run_workload(MemoryBackend::new(), seed).await.events())
        })
    });
    assert!(events.len() > 100);
}

#[test]
fn a_store_that_grants_every_claim_is_found() {
    let recorder = Seed::new(0).simulate(async {
        let recorder = Recorder::new(tokio_clock());
        let mut guards = Vec::new();
        for client in 0..2 {
            let recording_client = RecordingClient::new(&recorder, client);
            let lock = registry(PassThroughBackend::new()).obtain(KEY);
            guards.push(
                recording_client.lock_with(&lock, LockOptions::new()).await.unwrap().unwrap(),
            );
        }
        recorder
    });
    let found = validity(&recorder.history()).unwrap_err();
    assert_eq!(found.promise, Promise::ValidGuardsAreCompatible);
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_outlives_its_lease_is_recorded_as_lost_at_its_end() {
    let recorder = Recorder::new(tokio_clock());
    let registry = registry(MemoryBackend::new());
    let recording_client = RecordingClient::new(&recorder, 1);
    let guard = recording_client
        .lock_with(&registry.obtain(KEY), LockOptions::new())
        .await
        .unwrap()
        .unwrap();
    guard.record_state();
    let lost = guard.lost();
    lost.await;
    advance(LEASE * 5).await;
    assert!(matches!(guard.unlock().await, Err(LockError::Lost { .. })));
    let history = recorder.history();
    let [grant] = &*history.grants else { panic!("{history:?}") };
    // The loss was reported late, but the guard was valid only until its lease ended.
    assert!(grant.lost.unwrap() > grant.valid_until.unwrap());
    assert!(grant.valid_until.unwrap() <= grant.acquire.to + LEASE.as_nanos() as u64);
    assert_eq!(check(&history).unwrap().grants, 1);
}

#[tokio::test(start_paused = true)]
async fn dropped_operations_are_recorded_as_unknown() {
    let recorder = Recorder::new(tokio_clock());
    let registry = registry(MemoryBackend::new());
    let lock = registry.obtain(KEY);
    let (one, two) = (RecordingClient::new(&recorder, 1), RecordingClient::new(&recorder, 2));
    let guard = one.lock_with(&lock, LockOptions::new()).await.unwrap().unwrap();
    let waiting = two.lock_with(&lock, LockOptions::new());
    tokio::time::timeout(LEASE / 10, waiting).await.unwrap_err();
    drop(guard);
    registry.idle().await;
    let history = recorder.history();
    assert_eq!((history.grants.len(), history.unknown.len()), (1, 1));
    assert_eq!(check(&history).unwrap().unknown, 2);
    let released = |what: &HistoryEventKind| {
        matches!(what, HistoryEventKind::ReleaseFreed | HistoryEventKind::ReleaseNotHeld)
    };
    assert!(!recorder.events().iter().any(|event| released(&event.what)));
}

#[tokio::test(start_paused = true)]
async fn a_lock_error_is_recorded_as_unknown_and_returned() {
    let recorder = Recorder::new(tokio_clock());
    let registry = registry(MemoryBackend::new());
    let (recording_client, lock) = (RecordingClient::new(&recorder, 1), registry.obtain(""));
    let refused = recording_client.lock_with(&lock, LockOptions::new()).await;
    assert!(matches!(refused, Err(LockError::InvalidKey(_))));
    assert_eq!(recorder.history().unknown.len(), 1);
}
