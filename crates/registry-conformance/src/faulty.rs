//! A backend that wraps another one and loses, delays and repeats its requests and replies,
//! according to a script or a random seed. For tests of the engine and of code that uses the
//! engine. Contains no lock logic of its own.
#![deny(clippy::missing_trait_methods)]

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, BatchAttempt, Busy, Capabilities, Claim, FencingToken,
    Finding, Holder, InvalidKey, Invalidations, Key, LockAdmin, LockBackend, LockBatch, Release,
    Renewal, ValueRead, ValueStore, ValueWrite, WaiterStore,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::context::{admin, values};

mod injector;

use injector::{CallFaults, FaultInjector};
pub use injector::{Fault, Faults, Operation};

/// Wraps any backend and injects the faults of a [`Faults`] plan.
///
/// A fault never changes a result of the wrapped backend. It loses, delays, repeats or refuses
/// requests, and it loses or delays replies. It also loses, delays or adds wake-ups. On a paused
/// single-threaded runtime, the same seed gives the same faults.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # use std::sync::Arc;
/// # use std::time::Duration;
/// use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
/// use registry_core::{Claim, Key, LockBackend, MemoryBackend};
///
/// let store = MemoryBackend::new();
/// let faults = Faults::seeded(7).at_call(Operation::Acquire, 1, Fault::LoseReply);
/// let faulty = FaultyBackend::new(Arc::new(store.clone()), faults);
///
/// let claim = Claim::new(Key::new("orders:42").unwrap(), Duration::from_secs(30));
/// assert!(faulty.try_acquire(&claim).await.unwrap_err().is_retryable());
/// let other = Claim::new(claim.key().clone(), Duration::from_secs(30));
/// // The store executed the request: the key is locked.
/// let answer = store.try_acquire(&other).await;
/// assert!(matches!(answer, Ok(registry_core::Attempt::Busy(_))));
/// # }
/// ```
pub struct FaultyBackend {
    inner: Arc<dyn LockBackend>,
    injector: Mutex<FaultInjector>,
    /// The number of times that the plan was replaced. A replacement ends the running delays.
    version: watch::Sender<u64>,
    /// The tasks that execute requests again after a delay.
    late_repetitions: Mutex<JoinSet<()>>,
}

impl FaultyBackend {
    /// Wraps `inner` and starts with `faults`.
    #[must_use]
    pub fn new(inner: Arc<dyn LockBackend>, faults: Faults) -> Self {
        Self {
            inner,
            injector: Mutex::new(FaultInjector::new(faults)),
            version: watch::Sender::new(0),
            late_repetitions: Mutex::new(JoinSet::new()),
        }
    }

    /// Replaces the plan. Scripted faults count calls from 1 again. Running delays end at once, so
    /// a pending [`Fault::WakeEarly`] wakes its waiter at once.
    pub fn apply(&self, faults: Faults) {
        self.injector().replace_plan(faults);
        self.version.send_modify(|version| *version += 1);
    }

    /// Injects no faults into later calls. Running delays end at once. A running call keeps its
    /// other faults, and late repetitions are still executed.
    pub fn clear_faults(&self) {
        self.apply(Faults::none());
    }

    /// Returns how often `operation` was called since the start, whatever the outcome. A batch is
    /// one call.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.injector().calls(operation)
    }

    /// Returns how often all operations except [`Operation::Wait`] were called since the start. A
    /// wait may send no request. Calls of [`WaiterStore`] are not counted.
    #[must_use]
    pub fn requests(&self) -> u64 {
        let injector = self.injector();
        Operation::ALL
            .into_iter()
            .filter(|op| *op != Operation::Wait)
            .map(|op| injector.calls(op))
            .sum()
    }

    /// Returns the number of faults that applied to calls since the start. Also counts a fault
    /// without effect, for example if another fault of its call kept the request from the store.
    #[must_use]
    pub fn injected_faults(&self) -> u64 {
        self.injector().injected()
    }

    /// Returns the wrapped backend.
    #[must_use]
    pub fn inner(&self) -> &Arc<dyn LockBackend> {
        &self.inner
    }

    /// Waits until all late repetitions so far have been executed.
    ///
    /// # Cancel safety
    /// Dropping the future drops the repetitions that have not been executed yet.
    pub async fn wait_for_late_repetitions(&self) {
        loop {
            let mut repetitions = std::mem::take(&mut *self.late_repetitions());
            if repetitions.is_empty() {
                return;
            }
            while repetitions.join_next().await.is_some() {}
        }
    }

    /// Passes one call to the inner backend, with the faults of the plan.
    async fn call<T, F>(
        &self,
        operation: Operation,
        fail: impl Fn(BackendError) -> T + Send,
        request: impl Fn(Arc<dyn LockBackend>) -> F + Send + Sync + 'static,
    ) -> T
    where
        F: Future<Output = T> + Send + 'static,
        T: Send,
    {
        let faults_of_call = self.injector().begin_call(operation);
        self.delay(faults_of_call.delay_request).await;
        if faults_of_call.refuse {
            return fail(BackendError::transient("refused on purpose").as_refused());
        }
        if faults_of_call.deny {
            return fail(
                BackendError::new(BackendErrorKind::Denied, "denied on purpose").as_refused(),
            );
        }
        if faults_of_call.lose_request {
            return fail(BackendError::transient("request lost on purpose"));
        }
        let reply = request(Arc::clone(&self.inner)).await;
        if faults_of_call.repeat {
            drop(request(Arc::clone(&self.inner)).await);
        }
        if let Some(after) = faults_of_call.repeat_late {
            self.repeat_late(after, request);
        }
        self.delay(faults_of_call.delay_reply).await;
        if faults_of_call.lose_reply {
            return fail(BackendError::transient("reply lost on purpose"));
        }
        reply
    }

    /// Executes `request` once more after `after`, in a task of its own.
    fn repeat_late<T, F>(
        &self,
        after: Duration,
        request: impl Fn(Arc<dyn LockBackend>) -> F + Send + 'static,
    ) where
        F: Future<Output = T> + Send + 'static,
        T: Send,
    {
        let inner = Arc::clone(&self.inner);
        let mut repetitions = self.late_repetitions();
        // Completed repetitions would accumulate until `wait_for_late_repetitions` is called.
        while repetitions.try_join_next().is_some() {}
        repetitions.spawn(async move {
            sleep(after).await;
            drop(request(inner).await);
        });
    }

    /// Waits for `time`, or until the plan is replaced.
    async fn delay(&self, time: Option<Duration>) {
        let Some(time) = time else { return };
        let mut version = self.version.subscribe();
        tokio::select! {
            biased;
            () = sleep(time) => (),
            _ = version.changed() => (),
        }
    }

    fn injector(&self) -> std::sync::MutexGuard<'_, FaultInjector> {
        self.injector.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn late_repetitions(&self) -> std::sync::MutexGuard<'_, JoinSet<()>> {
        self.late_repetitions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for FaultyBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyBackend").field("inner", &self.inner).finish_non_exhaustive()
    }
}

#[async_trait]
impl LockBackend for FaultyBackend {
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
        let claim = claim.clone();
        self.call(Operation::Acquire, Err, move |inner| {
            let claim = claim.clone();
            async move {
                Ok(match inner.try_acquire(&claim).await? {
                    // The plan may lose or delay wake-ups, so the engine must not poll less often.
                    Attempt::Busy(busy) => Attempt::Busy(busy.without_wake_check()),
                    granted => granted,
                })
            }
        })
        .await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let count = claims.len();
        let claims: Arc<[Claim]> = claims.into();
        let fail = move |error: BackendError| vec![Err(error); count];
        self.call(Operation::Renew, fail, move |inner| {
            let claims = Arc::clone(&claims);
            async move { inner.renew(&claims).await }
        })
        .await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let claim = claim.clone();
        self.call(Operation::Release, Err, move |inner| {
            let claim = claim.clone();
            async move { inner.release(&claim).await }
        })
        .await
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let faults_of_call: CallFaults = self.injector().begin_call(Operation::Wait);
        self.delay(faults_of_call.delay_request).await;
        let premature_wake_up = async {
            match faults_of_call.wake_early {
                Some(after) => self.delay(Some(after)).await,
                None => std::future::pending().await,
            }
        };
        let woken = async {
            self.inner.wait(claim, busy).await;
            if faults_of_call.lose_wake {
                std::future::pending::<()>().await;
            }
            self.delay(faults_of_call.delay_reply).await;
        };
        tokio::select! {
            biased;
            () = premature_wake_up => (),
            () = woken => (),
        }
    }

    // An invalidation is not a request, so no fault applies to it.
    fn subscribe(&self, invalidations: Invalidations) {
        self.inner.subscribe(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.inner.admin().map(|_| self as &dyn LockAdmin)
    }

    fn batch(&self) -> Option<&dyn LockBatch> {
        self.inner.batch().map(|_| self as &dyn LockBatch)
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        self.inner.values().map(|_| self as &dyn ValueStore)
    }

    // No grant depends on waiter registrations, so no fault applies to them.
    fn waiters(&self) -> Option<&dyn WaiterStore> {
        self.inner.waiters()
    }

    async fn close(&self) {
        self.wait_for_late_repetitions().await;
        self.inner.close().await;
    }
}

/// A batch is one call of [`Operation::Acquire`] or [`Operation::Release`].
#[async_trait]
impl LockBatch for FaultyBackend {
    async fn try_acquire_all(&self, claims: &[Claim]) -> Result<BatchAttempt, BackendError> {
        let claims: Arc<[Claim]> = claims.into();
        self.call(Operation::Acquire, Err, move |inner| {
            let claims = Arc::clone(&claims);
            async move {
                let Some(batch) = inner.batch() else { return Ok(BatchAttempt::Declined) };
                Ok(match batch.try_acquire_all(&claims).await? {
                    BatchAttempt::Busy(index, busy) => {
                        BatchAttempt::Busy(index, busy.without_wake_check())
                    }
                    attempt => attempt,
                })
            }
        })
        .await
    }

    async fn release_all(&self, claims: &[Claim]) -> Vec<Result<Release, BackendError>> {
        let count = claims.len();
        let claims: Arc<[Claim]> = claims.into();
        let fail = move |error: BackendError| vec![Err(error); count];
        self.call(Operation::Release, fail, move |inner| {
            let claims = Arc::clone(&claims);
            async move {
                match inner.batch() {
                    Some(batch) => batch.release_all(&claims).await,
                    None => join_all(claims.iter().map(|claim| inner.release(claim))).await,
                }
            }
        })
        .await
    }
}

#[async_trait]
impl LockAdmin for FaultyBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        let key = key.clone();
        self.call(Operation::Inspect, Err, move |inner| {
            let key = key.clone();
            async move { admin(&*inner).inspect(&key).await }
        })
        .await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.call(Operation::List, Err, |inner| async move { admin(&*inner).list().await }).await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let key = key.clone();
        self.call(Operation::ForceRelease, Err, move |inner| {
            let key = key.clone();
            async move { admin(&*inner).force_release(&key).await }
        })
        .await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.call(Operation::Diagnose, Err, |inner| async move { admin(&*inner).diagnose().await })
            .await
    }
}

#[async_trait]
impl ValueStore for FaultyBackend {
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        let key = key.clone();
        self.call(Operation::Value, Err, move |inner| {
            let key = key.clone();
            async move { values(&*inner).value(&key).await }
        })
        .await
    }

    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        let (claim, value) = (claim.clone(), Arc::<[u8]>::from(value));
        self.call(Operation::SetValue, Err, move |inner| {
            let (claim, value) = (claim.clone(), Arc::clone(&value));
            async move { values(&*inner).set_value(&claim, token, &value).await }
        })
        .await
    }
}
