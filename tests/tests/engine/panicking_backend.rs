//! An in-process store that panics once, in a chosen method.
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]
#![deny(clippy::missing_trait_methods)]

use std::sync::Mutex;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, Finding, Holder, InvalidKey, Invalidations,
    Key, LockAdmin, LockBackend, LockBatch, MemoryBackend, Release, Renewal, ValueStore,
    WaiterStore,
};

#[derive(Debug)]
pub(crate) struct PanickingBackend {
    inner: MemoryBackend,
    panics_in: Mutex<Option<&'static str>>,
}

impl PanickingBackend {
    /// The points at which the backend can panic. `done`: after the store has executed the request.
    pub(crate) const METHODS: &[&str] = &[
        "capabilities",
        "check_key",
        "shard",
        "try_acquire",
        "try_acquire, done",
        "renew",
        "release",
        "release, done",
        "wait",
        "inspect",
        "list",
        "force_release",
        "diagnose",
        "close",
    ];

    pub(crate) fn over(inner: MemoryBackend) -> Self {
        Self { inner, panics_in: Mutex::new(None) }
    }

    pub(crate) fn panic_once_in(&self, method: &'static str) {
        assert!(Self::METHODS.contains(&method));
        *self.panics_in.lock().unwrap() = Some(method);
    }

    pub(crate) fn has_panicked(&self) -> bool {
        self.panics_in.lock().unwrap().is_none()
    }

    fn panic_if_chosen(&self, method: &str) {
        let panics = self.panics_in.lock().unwrap().take_if(|chosen| *chosen == method).is_some();
        // The mutex is already unlocked, so the panic does not poison it.
        assert!(!panics, "{method} panics on purpose");
    }
}

#[async_trait]
impl LockBackend for PanickingBackend {
    fn capabilities(&self) -> Capabilities {
        self.panic_if_chosen("capabilities");
        self.inner.capabilities()
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.panic_if_chosen("check_key");
        self.inner.check_key(key)
    }

    fn shard(&self, claim: &Claim) -> u32 {
        self.panic_if_chosen("shard");
        self.inner.shard(claim)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.panic_if_chosen("try_acquire");
        let attempt = self.inner.try_acquire(claim).await;
        self.panic_if_chosen("try_acquire, done");
        attempt
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.panic_if_chosen("renew");
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.panic_if_chosen("release");
        let release = self.inner.release(claim).await;
        self.panic_if_chosen("release, done");
        release
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.panic_if_chosen("wait");
        self.inner.wait(claim, busy).await;
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.panic_if_chosen("subscribe");
        self.inner.subscribe(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    fn batch(&self) -> Option<&dyn LockBatch> {
        None
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        self.inner.values()
    }

    fn waiters(&self) -> Option<&dyn WaiterStore> {
        self.panic_if_chosen("waiters");
        self.inner.waiters()
    }

    async fn close(&self) {
        self.panic_if_chosen("close");
        self.inner.close().await;
    }
}

#[async_trait]
impl LockAdmin for PanickingBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        self.panic_if_chosen("inspect");
        self.inner.inspect(key).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.panic_if_chosen("list");
        self.inner.list().await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.panic_if_chosen("force_release");
        self.inner.force_release(key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.panic_if_chosen("diagnose");
        self.inner.diagnose().await
    }
}
