//! Runs the suite against the in-process store on paused time, which shows that a correct store
//! passes.

use std::sync::Arc;

use async_trait::async_trait;
use registry_conformance::{Clock, Harness, Store};
use registry_core::{LockBackend, MemoryBackend};

#[derive(Debug)]
struct Memory;

#[async_trait]
impl Harness for Memory {
    fn clock(&self) -> Clock {
        Clock::Paused
    }

    async fn store(&self) -> Box<dyn Store> {
        Box::new(OneMemory(MemoryBackend::new()))
    }
}

#[derive(Debug)]
struct OneMemory(MemoryBackend);

#[async_trait]
impl Store for OneMemory {
    async fn client(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.0.clone())
    }
}

registry_conformance::conformance! {
    harness = Memory,
    runs = 420,
    skips = 15,
    without = [fair, namespaces, restart, wipe, remote],
}
