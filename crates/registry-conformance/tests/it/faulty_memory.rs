//! Runs the clauses that use the engine over the in-process store with network faults. Requests and
//! replies are delayed and repeated; those that the engine retries are also lost. Each client has
//! random faults from a fixed seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Clock, Fault, Faults, FaultyBackend, Harness, Operation, Store};
use registry_core::{LockBackend, MemoryBackend};

#[derive(Debug)]
struct FaultyHarness {
    seed: u64,
}

#[async_trait]
impl Harness for FaultyHarness {
    fn clock(&self) -> Clock {
        Clock::Paused
    }

    async fn store(&self) -> Box<dyn Store> {
        let store = MemoryBackend::new();
        Box::new(FaultyStore { store, seed: AtomicU64::new(self.seed) })
    }
}

#[derive(Debug)]
struct FaultyStore {
    store: MemoryBackend,
    seed: AtomicU64,
}

#[async_trait]
impl Store for FaultyStore {
    async fn client(&self) -> Arc<dyn LockBackend> {
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        Arc::new(FaultyBackend::new(Arc::new(self.store.clone()), tolerated_faults(seed)))
    }

    fn fault_free(&self) -> bool {
        false
    }
}

/// Returns faults that the engine hides from holders and waiters.
fn tolerated_faults(seed: u64) -> Faults {
    let ms = Duration::from_millis;
    let mut faults = Faults::seeded(seed);
    for operation in [Operation::Acquire, Operation::Renew, Operation::Release] {
        faults = faults
            .sometimes(operation, 0.4, Fault::DelayRequest(ms(5)))
            .sometimes(operation, 0.4, Fault::DelayReply(ms(5)))
            .sometimes(operation, 0.3, Fault::Repeat);
    }
    // The engine retries these calls. A lost acquire would fail calls that do not wait. An acquire
    // repeated after its release would keep the key locked until its lease ends.
    for operation in [Operation::Renew, Operation::Release] {
        faults = faults
            .sometimes(operation, 0.2, Fault::LoseReply)
            .sometimes(operation, 0.1, Fault::LoseRequest)
            .sometimes(operation, 0.2, Fault::RepeatLate(ms(50)));
    }
    faults.sometimes(Operation::Wait, 0.3, Fault::LoseWake).sometimes(
        Operation::Wait,
        0.3,
        Fault::WakeEarly(ms(30)),
    )
}

mod seed_1 {
    use super::FaultyHarness;

    registry_conformance::conformance! {
        harness = FaultyHarness { seed: 1_000 },
        runs = 233,
        skips = 202,
        without = [fault_free, fair, namespaces, restart, wipe, remote],
    }
}

mod seed_2 {
    use super::FaultyHarness;

    registry_conformance::conformance! {
        harness = FaultyHarness { seed: 2_000 },
        runs = 233,
        skips = 202,
        without = [fault_free, fair, namespaces, restart, wipe, remote],
    }
}
