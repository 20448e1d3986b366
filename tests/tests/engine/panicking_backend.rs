//! An in-process store that panics once, in a chosen method.
#![expect(clippy::unwrap_used, reason = "a helper of tests may panic")]
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
    /// The points where it can panic. `done` means after the store has executed the request.
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

    fn pass(&self, method: &str) {
        let panics = self.panics_in.lock().unwrap().take_if(|chosen| *chosen == method).is_some();
        // The mutex is unlocked here, so the panic does not poison it.
        assert!(!panics, "{method} panics on purpose");
    }
}

#[async_trait]
impl LockBackend for PanickingBackend {
    fn capabilities(&self) -> Capabilities {
        self.pass("capabilities");
        self.inner.capabilities()
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.pass("check_key");
        self.inner.check_key(key)
    }

    fn shard(&self, claim: &Claim) -> u32 {
        self.pass("shard");
        self.inner.shard(claim)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.pass("try_acquire");
        let attempt = self.inner.try_acquire(claim).await;
        self.pass("try_acquire, done");
        attempt
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.pass("renew");
        self.inner.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.pass("release");
        let release = self.inner.release(claim).await;
        self.pass("release, done");
        release
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.pass("wait");
        self.inner.wait(claim, busy).await;
    }

    fn subscribe(&self, hints: Invalidations) {
        self.pass("subscribe");
        self.inner.subscribe(hints);
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
        self.pass("waiters");
        self.inner.waiters()
    }

    async fn close(&self) {
        self.pass("close");
        self.inner.close().await;
    }
}

#[async_trait]
impl LockAdmin for PanickingBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        self.pass("inspect");
        self.inner.inspect(key).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.pass("list");
        self.inner.list().await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.pass("force_release");
        self.inner.force_release(key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.pass("diagnose");
        self.inner.diagnose().await
    }
}
