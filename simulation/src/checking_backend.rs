//! A backend that records each request of one process to the store, and panics if a request
//! violates I8.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use fastrand::Rng;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, ClaimMode, InvalidKey,
    Invalidations, Key, LockAdmin, LockBackend, LockBatch, LockEvent, Observer, Queueing, Release,
    Renewal, ValueStore, WaiterStore,
};

use super::FaultProfile;

/// Checks the requests of the engine of one process, and passes them to its network.
#[derive(Debug)]
pub(super) struct CheckingBackend {
    inner: Arc<dyn LockBackend>,
    is_calm: bool,
    /// The process has crashed.
    is_cut: AtomicBool,
    requests: Mutex<RequestLog>,
    invalidations: Mutex<InvalidationSource>,
}

/// Sends invalidations at random. They can be false, or report this process's own changes.
#[derive(Debug)]
struct InvalidationSource {
    rng: Rng,
    sender: Option<Invalidations>,
}

#[derive(Debug, Default)]
struct RequestLog {
    /// The number of unanswered attempts of each key that need the local permit.
    acquiring: HashMap<Key, usize>,
    /// The number of unanswered releases of exclusive claims of each key, without lost and
    /// converted claims.
    releasing: HashMap<Key, usize>,
    /// The exclusive claims that this process holds, as far as it can know. Converted claims are
    /// left out, because they do not keep the local permit.
    held: HashMap<Key, ClaimId>,
    /// Claims that were lost. The engine releases them in the background, while local callers
    /// already compete.
    lost: HashSet<ClaimId>,
}

impl CheckingBackend {
    pub(super) fn new(
        inner: Arc<dyn LockBackend>,
        fault_profile: FaultProfile,
        rng: Rng,
    ) -> Arc<Self> {
        Arc::new(Self {
            inner,
            is_calm: fault_profile == FaultProfile::Calm,
            is_cut: AtomicBool::new(false),
            requests: Mutex::default(),
            invalidations: Mutex::new(InvalidationSource { rng, sender: None }),
        })
    }

    /// Sometimes sends an invalidation for `key` or for all keys.
    fn maybe_invalidate(&self, key: &Key) {
        let mut invalidations = self.invalidations.lock().unwrap_or_else(PoisonError::into_inner);
        let draw = invalidations.rng.u8(..);
        match &invalidations.sender {
            Some(sender) if !self.is_calm && draw < 20 => sender.notify(key),
            Some(sender) if !self.is_calm && draw == 20 => sender.notify_all(),
            _ => {}
        }
    }

    fn requests(&self) -> MutexGuard<'_, RequestLog> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receives losses before the engine acts on them.
impl Observer for CheckingBackend {
    fn on(&self, event: &LockEvent<'_>) {
        if let LockEvent::Lost { key, .. } = event {
            let mut requests = self.requests();
            if let Some(claim) = Key::new(key).ok().and_then(|key| requests.held.remove(&key)) {
                requests.lost.insert(claim);
            }
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl LockBackend for CheckingBackend {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.inner.check_key(key)
    }

    fn shard(&self, claim: &Claim) -> u32 {
        self.inner.shard(claim)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.check_connected()?;
        let key = claim.key();
        {
            let mut requests = self.requests();
            if needs_permit(claim) {
                if let Some(held) = requests.held.get(key) {
                    let own = claim.id();
                    assert_eq!(*held, own, "I8: a process contends for {key:?} that it holds");
                }
                let acquiring = requests.acquiring.entry(key.clone()).or_default();
                *acquiring += 1;
                assert!(
                    !self.is_calm || *acquiring == 1,
                    "I8: two contenders of one process for {key:?}"
                );
                let releasing = requests.releasing.get(key).copied().unwrap_or_default();
                assert!(
                    !self.is_calm || releasing == 0,
                    "I8: a process contends for {key:?} before its release was answered"
                );
            }
        }
        self.maybe_invalidate(key);
        let answer = self.inner.try_acquire(claim).await;
        self.maybe_invalidate(key);
        let mut requests = self.requests();
        if needs_permit(claim) {
            *requests.acquiring.entry(key.clone()).or_default() -= 1;
        }
        // A granted conversion ends the tracking: until then, the claim has its local permit.
        let is_converted = claim.is_conversion() && matches!(answer, Ok(Attempt::Granted(_)));
        if is_converted && requests.held.get(key) == Some(&claim.id()) {
            requests.held.remove(key);
        }
        drop(requests);
        answer
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        if let Err(error) = self.check_connected() {
            return vec![Err(error); claims.len()];
        }
        claims.iter().for_each(|claim| self.maybe_invalidate(claim.key()));
        let answers = self.inner.renew(claims).await;
        claims.iter().for_each(|claim| self.maybe_invalidate(claim.key()));
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.check_connected()?;
        let key = claim.key();
        let is_tracked = {
            let mut requests = self.requests();
            if requests.held.get(key) == Some(&claim.id()) {
                requests.held.remove(key);
            }
            let has_permit = claim.mode() == ClaimMode::Exclusive && !claim.is_conversion();
            let is_tracked = has_permit && !requests.lost.contains(&claim.id());
            if is_tracked {
                *requests.releasing.entry(key.clone()).or_default() += 1;
            }
            is_tracked
        };
        self.maybe_invalidate(key);
        let answer = self.inner.release(claim).await;
        self.maybe_invalidate(key);
        if is_tracked {
            *self.requests().releasing.entry(key.clone()).or_default() -= 1;
        }
        answer
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.inner.wait(claim, busy).await;
    }

    fn subscribe(&self, registry_invalidations: Invalidations) {
        let mut invalidations = self.invalidations.lock().unwrap_or_else(PoisonError::into_inner);
        invalidations.sender = Some(registry_invalidations.clone());
        drop(invalidations);
        self.inner.subscribe(registry_invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.inner.admin()
    }

    fn batch(&self) -> Option<&dyn LockBatch> {
        // Without this trait, the engine sends one request per key, which is checked.
        None
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        self.inner.values()
    }

    fn waiters(&self) -> Option<&dyn WaiterStore> {
        self.inner.waiters()
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

impl CheckingBackend {
    /// Makes all later attempts, renewals and releases fail, because the process has crashed.
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
    }

    fn check_connected(&self) -> Result<(), BackendError> {
        if self.is_cut.load(Ordering::Relaxed) {
            return Err(BackendError::transient("the process has crashed on purpose"));
        }
        Ok(())
    }

    /// Records that a client of this process has a guard of this claim.
    pub(super) fn record_hold(&self, claim: &Claim) {
        if claim.mode() == ClaimMode::Exclusive && !claim.is_conversion() {
            self.requests().held.insert(claim.key().clone(), claim.id());
        }
    }
}

/// Returns whether the engine sends this attempt only for the caller with the local permit.
/// Conversions need no permit. Attempts that are not exclusive and do not wait need none either.
fn needs_permit(claim: &Claim) -> bool {
    let may_skip = claim.mode() != ClaimMode::Exclusive && claim.queueing() == Queueing::Skip;
    !claim.is_conversion() && !may_skip
}
