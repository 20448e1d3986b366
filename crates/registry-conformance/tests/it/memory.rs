//! Runs the suite against the in-process store on paused time: a correct store passes all clauses
//! that apply to it.

use std::sync::Arc;

use async_trait::async_trait;
use registry_conformance::{Clock, Harness, Store};
use registry_core::{LockBackend, MemoryBackend};

#[derive(Debug)]
struct MemoryHarness;

#[async_trait]
impl Harness for MemoryHarness {
    fn clock(&self) -> Clock {
        Clock::Paused
    }

    async fn store(&self) -> Box<dyn Store> {
        Box::new(MemoryStore(MemoryBackend::new()))
    }
}

#[derive(Debug)]
struct MemoryStore(MemoryBackend);

#[async_trait]
impl Store for MemoryStore {
    async fn client(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.0.clone())
    }
}

registry_conformance::conformance! {
    harness = MemoryHarness,
    runs = 420,
    skips = 15,
    without = [fair, namespaces, restart, wipe, remote],
}
