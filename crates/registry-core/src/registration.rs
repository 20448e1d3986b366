//! Registers waiting claims in stores without a queue, so that operators can list them.
//!
//! The engine registers a claim after it has waited for [`REGISTER_AFTER`], so that short waits
//! cost no request. A registration has no effect on grants. It ends with the wait. If the process
//! ends before that, the registration expires after the claim's lease.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::Claim;
use crate::clock::{Moment, sleep};
use crate::engine::{Engine, backoff};

/// The registration of one wait. When it is dropped, the background releaser removes the
/// registration from the store.
pub(crate) struct WaiterRegistration {
    engine: Arc<Engine>,
    claim: Claim,
    since: Moment,
    last_request: Option<RegisterRequest>,
}

/// A request that registers a claim.
struct RegisterRequest {
    sent_at: Moment,
    /// Receives a value when the store has confirmed the request. Closed without a value if the
    /// request failed.
    response: oneshot::Receiver<()>,
    is_registered: bool,
}

impl WaiterRegistration {
    /// Creates the registration of a wait that begins at `since`. Sends no request.
    pub(crate) fn new(engine: &Arc<Engine>, claim: &Claim, since: Moment) -> Self {
        Self { engine: Arc::clone(engine), claim: claim.clone(), since, last_request: None }
    }

    /// Sends a request that registers the claim or extends its registration, if a request is due.
    /// The first is due after [`REGISTER_AFTER`], and each further one after a third of the lease.
    /// No request is due if the registry does not register its waiters. A waiter calls this at each
    /// poll interval. The background releaser runs the request.
    ///
    /// A store error does not affect the wait. The next call repeats the request.
    pub(crate) fn refresh(&mut self) {
        let now = Moment::now();
        let is_due = match &mut self.last_request {
            None => now.since(self.since) >= REGISTER_AFTER && self.engine.registers_waiters(),
            Some(request) => request.is_due(now, self.claim.lease() / 3),
        };
        if !is_due {
            return;
        }
        let (backend, claim) = (Arc::clone(&self.engine.backend), self.claim.clone());
        let waited_for = now.since(self.since);
        let (registered, response) = oneshot::channel();
        self.last_request = Some(RegisterRequest { sent_at: now, response, is_registered: false });
        self.engine.background.submit_call(Box::pin(async move {
            if let Some(waiters) = backend.waiters()
                && waiters.register(&claim, waited_for).await.is_ok()
            {
                _ = registered.send(());
            }
        }));
    }
}

impl RegisterRequest {
    /// Returns whether another request is due: this one has failed, or it was confirmed and
    /// `interval` has passed since it was sent.
    fn is_due(&mut self, now: Moment, interval: Duration) -> bool {
        if !self.is_registered {
            match self.response.try_recv() {
                Ok(()) => self.is_registered = true,
                Err(oneshot::error::TryRecvError::Empty) => return false,
                Err(oneshot::error::TryRecvError::Closed) => return true,
            }
        }
        now.since(self.sent_at) >= interval
    }
}

impl Drop for WaiterRegistration {
    fn drop(&mut self) {
        let Some(request) = self.last_request.take() else { return };
        let (backend, claim) = (Arc::clone(&self.engine.backend), self.claim.clone());
        self.engine.background.submit_call(Box::pin(async move {
            if !request.is_registered {
                // If `unregister` overtook this request, the claim would stay registered.
                _ = request.response.await;
            }
            let Some(waiters) = backend.waiters() else { return };
            for attempt in 0..UNREGISTER_ATTEMPTS_MAX {
                match waiters.unregister(&claim).await {
                    Err(error) if error.is_retryable() => sleep(backoff(attempt)).await,
                    _ => return,
                }
            }
        }));
    }
}

/// How long a claim waits before it is registered.
const REGISTER_AFTER: Duration = Duration::from_secs(1);
/// The maximum number of attempts to remove a registration. If all fail, the registration expires.
const UNREGISTER_ATTEMPTS_MAX: u32 = 3;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::task::JoinSet;

    use crate::{LockOptions, MemoryBackend, Registry};

    fn registry(store: &MemoryBackend) -> crate::RegistryBuilder {
        Registry::builder(Arc::new(store.clone()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_is_listed_from_one_second_until_its_wait_ends_even_beyond_its_lease() {
        let store = MemoryBackend::new();
        let (holder, waiter) =
            (registry(&store).build().unwrap(), registry(&store).build().unwrap());
        let held = holder.obtain("orders/42").lock().await.unwrap();
        let lock = waiter.obtain("orders/42");
        let options = LockOptions::new().label("nightly").lease(Duration::from_secs(3));
        let mut waiting = JoinSet::new();
        waiting.spawn(async move { lock.lock_with(options).await });
        tokio::time::sleep(Duration::from_millis(800)).await;
        assert_eq!(holder.list_waiters().await.unwrap(), []);
        for seconds in [2, 5, 30] {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            let listed = holder.obtain("orders/42").waiters().await.unwrap();
            let [claim] = listed.as_slice() else { panic!("one waiter: {listed:?}") };
            assert_eq!(claim.label.as_deref(), Some("nightly"));
            assert!(claim.waited_for.unwrap() >= Duration::from_secs(seconds), "{claim:?}");
            assert!(claim.expires_in.unwrap() <= Duration::from_secs(3), "{claim:?}");
        }
        held.unlock().await.unwrap();
        let guard = waiting.join_next().await.unwrap().unwrap().unwrap();
        waiter.idle().await;
        assert_eq!(holder.list_waiters().await.unwrap(), []);
        guard.unlock().await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_wait_is_not_listed_any_more() {
        let store = MemoryBackend::new();
        let registry = registry(&store).build().unwrap();
        let other = Registry::builder(Arc::new(store)).build().unwrap();
        let held = registry.obtain("orders/42").lock().await.unwrap();
        let lock = other.obtain("orders/42");
        let wait = tokio::time::timeout(Duration::from_secs(5), lock.lock());
        assert!(wait.await.is_err());
        other.idle().await;
        assert_eq!(registry.list_waiters().await.unwrap(), []);
        held.unlock().await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_registry_without_registrations_is_not_listed() {
        let store = MemoryBackend::new();
        let holder = registry(&store).build().unwrap();
        let unregistered = registry(&store).waiters(false).build().unwrap();
        let held = holder.obtain("orders/42").lock().await.unwrap();
        let lock = unregistered.obtain("orders/42");
        let mut waiting = JoinSet::new();
        waiting.spawn(async move { lock.lock().await });
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(holder.list_waiters().await.unwrap(), []);
        held.unlock().await.unwrap();
        waiting.join_next().await.unwrap().unwrap().unwrap().unlock().await.unwrap();
    }
}
