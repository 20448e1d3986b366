//! A store with a connection of high latency. A request that was sent reaches the store even if its
//! future was dropped.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, LockBackend, Release, Renewal,
};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// The connection to a store. If it breaks, an acquire returns an error at once, and reaches the
/// store later.
#[derive(Debug)]
pub(crate) struct RemoteStore {
    store: Arc<dyn LockBackend>,
    latency: Mutex<Duration>,
    fail_next: Mutex<Option<Duration>>,
    in_flight: Mutex<JoinSet<()>>,
}

impl RemoteStore {
    pub(crate) fn to(store: Arc<dyn LockBackend>) -> Self {
        Self {
            store,
            latency: Mutex::default(),
            fail_next: Mutex::default(),
            in_flight: Mutex::default(),
        }
    }

    /// Makes the next acquire return an error and reach the store `after` this time.
    pub(crate) fn fail_next_acquire(&self, after: Duration) {
        *self.fail_next.lock().unwrap() = Some(after);
    }

    pub(crate) fn set_latency(&self, latency: Duration) {
        *self.latency.lock().unwrap() = latency;
    }

    async fn send<T: Send + 'static>(
        &self,
        request: impl Future<Output = T> + Send + 'static,
    ) -> T {
        let latency = *self.latency.lock().unwrap();
        let (reply, replied) = oneshot::channel();
        self.in_flight.lock().unwrap().spawn(async move {
            tokio::time::sleep(latency).await;
            let answer = request.await;
            tokio::time::sleep(latency).await;
            drop(reply.send(answer));
        });
        replied.await.unwrap()
    }
}

#[async_trait]
impl LockBackend for RemoteStore {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let (store, claim) = (Arc::clone(&self.store), claim.clone());
        let arrives_late = self.fail_next.lock().unwrap().take();
        let Some(delay) = arrives_late else {
            return self.send(async move { store.try_acquire(&claim).await }).await;
        };
        self.in_flight.lock().unwrap().spawn(async move {
            tokio::time::sleep(delay).await;
            drop(store.try_acquire(&claim).await);
        });
        Err(BackendError::transient("the connection broke on purpose"))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let (store, claims) = (Arc::clone(&self.store), claims.to_vec());
        self.send(async move { store.renew(&claims).await }).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let (store, claim) = (Arc::clone(&self.store), claim.clone());
        self.send(async move { store.release(&claim).await }).await
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.store.wait(claim, busy).await;
    }
}
