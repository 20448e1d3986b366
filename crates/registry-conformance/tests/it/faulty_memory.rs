//! Runs the engine's clauses over a store with network faults: requests and replies are delayed,
//! repeated, and lost if the engine retries them. Each client has random faults from a fixed seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{Clock, Fault, Faults, FaultyBackend, Harness, Operation, Store};
use registry_core::{LockBackend, MemoryBackend};

#[derive(Debug)]
struct Faulty {
    seed: u64,
}

#[async_trait]
impl Harness for Faulty {
    fn clock(&self) -> Clock {
        Clock::Paused
    }

    async fn store(&self) -> Box<dyn Store> {
        let store = MemoryBackend::new();
        Box::new(OneFaulty { store, seed: AtomicU64::new(self.seed) })
    }
}

#[derive(Debug)]
struct OneFaulty {
    store: MemoryBackend,
    seed: AtomicU64,
}

#[async_trait]
impl Store for OneFaulty {
    async fn client(&self) -> Arc<dyn LockBackend> {
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        Arc::new(FaultyBackend::new(Arc::new(self.store.clone()), benign(seed)))
    }

    fn faithful(&self) -> bool {
        false
    }
}

/// Returns faults that no holder and no waiter may notice.
fn benign(seed: u64) -> Faults {
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
    use super::Faulty;

    registry_conformance::conformance! {
        harness = Faulty { seed: 1_000 },
        runs = 233,
        skips = 202,
        without = [faithful, fair, namespaces, restart, wipe, remote],
    }
}

mod seed_2 {
    use super::Faulty;

    registry_conformance::conformance! {
        harness = Faulty { seed: 2_000 },
        runs = 233,
        skips = 202,
        without = [faithful, fair, namespaces, restart, wipe, remote],
    }
}
