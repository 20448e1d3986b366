//! The state that all locks of one registry share: backend, defaults, schedule of renewals,
//! background releaser, observers.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::FutureExt as _;

use crate::active_count::ActiveCount;
use crate::backend::{Attempt, Claim, LockBackend, Release, Renewal};
use crate::background::BackgroundReleaser;
use crate::call::{Call, CallFuture, first_poll};
use crate::capabilities::Capabilities;
use crate::clock::{Moment, sleep};
use crate::error::{BackendError, LockError};
use crate::event::{LockEvent, Observers};
use crate::fairness::Fairness;
use crate::invalidation::InvalidationQueue;
use crate::key::Key;
use crate::memory::MemoryBackend;
use crate::mode::ClaimMode;
use crate::one_shot::OneShotEvent;
use crate::options::{ClaimOptions, Defaults, LockOptions};
use crate::panic_safe::{catch_panic, discard_panic};
use crate::schedule::RenewalSchedule;
use crate::shared_backend::SharedBackendEntry;
use crate::waiting_list::WaitingClaim;

/// The result of the first poll of a request: the store's response, or the call if it is pending.
pub(crate) type PolledOnce<T> =
    Result<Result<T, BackendError>, CallFuture<Result<T, BackendError>>>;

pub(crate) struct Engine {
    pub(crate) backend: Arc<dyn LockBackend>,
    /// The same backend, if it is the in-process store: its calls need no future.
    pub(crate) memory: Option<MemoryBackend>,
    pub(crate) capabilities: Capabilities,
    pub(crate) defaults: Defaults,
    /// The options of an exclusive claim whose caller sets none. Shared by all these claims.
    pub(crate) default_options: Arc<ClaimOptions>,
    /// The options of a claim in shared mode whose caller sets none.
    pub(crate) default_read_options: Arc<ClaimOptions>,
    pub(crate) fairness: Fairness,
    pub(crate) observers: Observers,
    pub(crate) schedule: Arc<RenewalSchedule>,
    pub(crate) invalidations: Arc<InvalidationQueue>,
    pub(crate) background: BackgroundReleaser,
    /// The number of active grants.
    pub(crate) active_grants: ActiveCount,
    /// The number of pending claims. Each has or may soon have a request in flight.
    pub(crate) pending_claims: ActiveCount,
    /// Set when the registry begins to close, or when its runtime has shut down. Acquisitions that
    /// begin after that send no request.
    pub(crate) closing: OneShotEvent,
    /// Set when the time limit of `close` is over. Waits that would delay `close` further then end.
    pub(crate) close_limit_reached: OneShotEvent,
    /// The number of lost claims.
    pub(crate) lost_claims: AtomicUsize,
    /// The number of claims that could not be released and therefore end with their leases.
    pub(crate) left_to_lease: AtomicUsize,
    /// The number of failed releases of active grants. `left_to_lease` counts these claims too.
    pub(crate) failed_releases: AtomicUsize,
    pub(crate) shared_backend: Arc<SharedBackendEntry>,
}

impl Engine {
    pub(crate) fn emit<'a>(&self, event: impl FnOnce() -> LockEvent<'a>) {
        if !self.observers.is_empty() {
            self.observers.emit(&event());
        }
    }

    /// Returns the options of a claim, or `None` if they are the defaults of an exclusive claim.
    pub(crate) fn claim_options(
        &self,
        options: &LockOptions,
        mode: ClaimMode,
    ) -> Result<Option<Arc<ClaimOptions>>, LockError> {
        match mode {
            ClaimMode::Exclusive if !options.overrides_defaults() => Ok(None),
            ClaimMode::Shared if !options.overrides_defaults() => {
                Ok(Some(Arc::clone(&self.default_read_options)))
            }
            _ => {
                let resolved =
                    ClaimOptions::resolve(options, mode, &self.defaults, &self.capabilities)?;
                Ok(Some(Arc::new(resolved)))
            }
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_set()
    }

    /// Ends the lease renewer's task.
    pub(crate) fn stop_renewal(&self) {
        self.invalidations.close();
        self.schedule.stop();
    }

    /// Returns `Closed` if the registry is closing, or if no runtime runs its background releaser.
    pub(crate) fn check_open(&self) -> Result<(), LockError> {
        if self.is_closing() || !self.background.is_running() {
            return Err(LockError::Closed);
        }
        Ok(())
    }

    /// Returns `Unsupported` if the store grants no claims of this mode.
    pub(crate) fn require_mode(&self, mode: ClaimMode) -> Result<(), LockError> {
        if self.capabilities.supports(mode) {
            return Ok(());
        }
        let (capability, store) = (mode.name(), self.capabilities.store);
        Err(LockError::Unsupported { capability, store })
    }

    /// Returns `Unsupported` if the store cannot report holders.
    pub(crate) fn require_inspect(&self) -> Result<(), LockError> {
        if self.capabilities.inspect && self.backend.admin().is_some() {
            return Ok(());
        }
        Err(LockError::Unsupported { capability: "inspect", store: self.capabilities.store })
    }

    /// Returns whether this registry registers its waiting claims in the store.
    pub(crate) fn registers_waiters(&self) -> bool {
        let Capabilities { waiters, fair, .. } = self.capabilities;
        self.defaults.register_waiters && waiters && !fair
    }

    /// Returns the claims that wait for `key`, or for any key, sorted by key. For each key, the
    /// longest wait is first.
    pub(crate) async fn list_waiters(
        &self,
        key: Option<&Key>,
    ) -> Result<Vec<WaitingClaim>, LockError> {
        if !self.capabilities.waiters || self.backend.waiters().is_none() {
            let store = self.capabilities.store;
            return Err(LockError::Unsupported { capability: "waiters", store });
        }
        let (backend, wanted) = (Arc::clone(&self.backend), key.cloned());
        let request = Box::pin(async move {
            match backend.waiters() {
                Some(waiters) => waiters.waiting(wanted.as_ref()).await,
                None => Ok(Vec::new()),
            }
        });
        let mut waiting = self.query("list waiters", key.map_or("*", Key::as_str), request).await?;
        waiting.sort_by(|a, b| a.key.cmp(&b.key).then(b.waited_for.cmp(&a.waited_for)));
        Ok(waiting)
    }

    /// Records that a claim could not be released and therefore ends with its lease.
    pub(crate) fn record_left_to_lease(&self, claim: &Claim) {
        self.left_to_lease.fetch_add(1, Ordering::AcqRel);
        self.emit(|| LockEvent::LeftToLease { key: claim.key().as_str(), mode: claim.mode() });
    }

    /// Sends a release and polls it once. Returns the call if the store has not responded yet.
    pub(crate) async fn send_release(&self, claim: &Claim) -> PolledOnce<Release> {
        if let Some(memory) = &self.memory {
            return Ok(Ok(memory.release(claim)));
        }
        first_poll(self.release_future(claim)).await
    }

    pub(crate) fn release(&self, claim: &Claim) -> Call<Result<Release, BackendError>> {
        self.call(self.release_future(claim))
    }

    fn release_future(&self, claim: &Claim) -> CallFuture<Result<Release, BackendError>> {
        let (backend, claim) = (Arc::clone(&self.backend), claim.clone());
        Box::pin(async move { backend.release(&claim).await })
    }

    pub(crate) fn try_acquire(&self, claim: Claim) -> Call<Result<Attempt, BackendError>> {
        let backend = Arc::clone(&self.backend);
        self.call(Box::pin(async move { backend.try_acquire(&claim).await }))
    }

    pub(crate) fn renew(&self, claim: Claim) -> Call<Result<Renewal, BackendError>> {
        let backend = Arc::clone(&self.backend);
        self.call(Box::pin(async move {
            let mut responses = backend.renew(std::slice::from_ref(&claim)).await;
            responses.pop().unwrap_or_else(|| Err(BackendError::missing_renewal()))
        }))
    }

    /// Returns the store's [`verify_after`](crate::RenewalPolicy::verify_after).
    pub(crate) fn verify_after(&self) -> Option<Duration> {
        // Called before the grant has a guard: a panic of the backend here would leave the claim
        // without a release.
        catch_panic(|| self.backend.capabilities().renewal.verify_after).unwrap_or_default()
    }

    pub(crate) fn close_backend(&self) -> Call<()> {
        let backend = Arc::clone(&self.backend);
        self.call(Box::pin(async move {
            // All calls of `Registry::close` share this future, and a panic would reach all of
            // them.
            if let Err(panic) = AssertUnwindSafe(backend.close()).catch_unwind().await {
                discard_panic(panic);
            }
        }))
    }

    /// Sends a request that needs no clean-up. Waits for at most the operation time-out.
    pub(crate) async fn query<T: Send + 'static>(
        &self,
        operation: &'static str,
        key: &str,
        future: CallFuture<Result<T, BackendError>>,
    ) -> Result<T, LockError> {
        let limit = self.defaults.operation_timeout;
        let response = self.call(future).monitored_response_within(limit, limit).await;
        response
            .unwrap_or_else(|| Err(self.no_response_error()))
            .map_err(|source| store_error(operation, key, source))
    }

    fn call<T: Send + 'static>(&self, future: CallFuture<T>) -> Call<T> {
        Call::new(&self.background, future)
    }

    /// Returns the error of a call without a response.
    pub(crate) fn no_response_error(&self) -> BackendError {
        let error = BackendError::transient(format!(
            "the {} store did not answer within {:?}; check its load and the network",
            self.capabilities.store, self.defaults.operation_timeout
        ));
        match &self.defaults.address {
            Some(address) => error.with_address(Arc::clone(address)),
            None => error,
        }
    }

    /// Waits until `deadline` on the engine's clock.
    pub(crate) async fn sleep_until(&self, deadline: Moment) {
        loop {
            let left = deadline.since(Moment::now());
            if left.is_zero() {
                return;
            }
            // tokio's timers do not count the time for which the host is suspended, so the clock is
            // read again at this interval.
            sleep(left.min(CLOCK_READ_INTERVAL)).await;
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("backend", &self.backend)
            .field("defaults", &self.defaults)
            .finish_non_exhaustive()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Guards keep the engine alive, so there is no active grant any more.
        self.stop_renewal();
    }
}

/// Returns the public error for a store error.
pub(crate) fn store_error(operation: &'static str, key: &str, source: BackendError) -> LockError {
    LockError::Backend { operation, key: key.to_owned(), source }
}

/// Returns the public error for an operation on a lost lock.
pub(crate) fn lost_error(key: &Key, reason: crate::LostReason) -> LockError {
    LockError::Lost { key: key.as_str().to_owned(), reason }
}

/// Returns the pause before retry number `attempt` (from 0): exponential from 10 ms to 1 s. A
/// random part of up to one half is subtracted, so that clients do not retry at the same time.
pub(crate) fn backoff(attempt: u32) -> Duration {
    let ceiling_ms = 10_u64 << attempt.min(7);
    let ceiling_us = ceiling_ms.min(1_000) * 1_000;
    Duration::from_micros(fastrand::u64(ceiling_us / 2..=ceiling_us))
}

const CLOCK_READ_INTERVAL: Duration = Duration::from_secs(30);
