//! What a clause works with: one store, its clients, registries over them, and ways to wait for the store's clock.
//! Holds no promise; see `clauses`.

use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, Grant, Key, LockBackend, LockError,
    LockGuard, LockRegistry as _, Registry, RegistryBuilder, Release, Renewal,
};
use tokio::time::{Instant, sleep};

use crate::faulty::{Faults, FaultyBackend};
use crate::harness::{Clock, Harness, RemoteHolder, Store};

/// One store under test, with what clauses need to try it.
#[derive(Debug)]
pub struct Lab {
    store: Box<dyn Store>,
    clock: Clock,
    capabilities: Capabilities,
}

impl Lab {
    /// Opens a fresh store of `harness`.
    pub(crate) async fn open(harness: &dyn Harness) -> Self {
        let store = harness.store().await;
        let first = store.client().await;
        let capabilities = first.capabilities();
        first.close().await;
        Self { store, clock: harness.clock(), capabilities }
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// A further client of the store.
    pub(crate) async fn client(&self) -> Arc<dyn LockBackend> {
        self.store.client().await
    }

    /// A client through which claims can be used that `client` got: a further one, if there is any such.
    pub(crate) async fn another_client(
        &self,
        client: &Arc<dyn LockBackend>,
    ) -> Arc<dyn LockBackend> {
        if self.store.roams() { self.client().await } else { Arc::clone(client) }
    }

    /// A further client of the store, with faults put in.
    pub(crate) async fn faulty(&self, faults: Faults) -> Arc<FaultyBackend> {
        Arc::new(FaultyBackend::new(self.client().await, faults))
    }

    /// Begins a registry over `client`, with a lease that never runs out while a clause runs.
    pub(crate) fn builder(&self, client: Arc<dyn LockBackend>) -> RegistryBuilder {
        // Patient with the store: a loaded machine is no broken promise.
        Registry::builder(client).lease(self.long()).timeout(Duration::from_secs(8))
    }

    /// A registry over a client of its own, as another process would open. Its leases never run out while a clause runs.
    pub(crate) async fn registry(&self) -> Registry {
        self.registry_of(self.long()).await
    }

    /// A registry over a client of its own, with this lease.
    pub(crate) async fn registry_of(&self, lease: Duration) -> Registry {
        let builder = self.builder(self.client().await).lease(lease);
        builder.build().expect("the registry is built")
    }

    /// A registry over `faulty`, with this lease.
    pub(crate) fn registry_over(&self, faulty: &Arc<FaultyBackend>, lease: Duration) -> Registry {
        let client: Arc<dyn LockBackend> = Arc::<FaultyBackend>::clone(faulty);
        self.builder(client).lease(lease).build().expect("the registry is built")
    }

    /// Panics unless `registry` gets the lock soon, and gives it back: far sooner than by the end of a long lease.
    pub(crate) async fn free_soon(&self, registry: &Registry, name: &str) {
        let guard = registry.obtain(name).try_lock_for(self.patience()).await;
        let guard = guard.unwrap_or_else(|error| panic!("{name:?} is in trouble: {error:?}"));
        let guard = guard.unwrap_or_else(|| panic!("{name:?} is still taken"));
        guard.unlock().await.expect("a held lock is unlocked");
    }

    /// A client of the same store in another namespace.
    pub(crate) async fn stranger(&self) -> Arc<dyn LockBackend> {
        self.store.stranger().await.expect("the harness has no namespaces: say so in `without`")
    }

    /// Restarts the store, which keeps its data.
    pub(crate) async fn restart(&self) {
        assert!(self.store.restart().await, "the harness has no restart: say so in `without`");
    }

    /// Makes the store lose its data.
    pub(crate) async fn wipe(&self) {
        assert!(self.store.wipe().await, "the harness has no wipe: say so in `without`");
    }

    /// Another process over this store.
    pub(crate) async fn remote(&self, lease: Duration) -> Box<dyn RemoteHolder> {
        self.store.remote(lease).await.expect("the harness has no remote: say so in `without`")
    }

    /// A lease that clauses let run out.
    pub(crate) fn short(&self) -> Duration {
        self.store.lease().max(self.capabilities.lease_min)
    }

    /// A lease that renewals keep alive.
    pub(crate) fn renewed(&self) -> Duration {
        self.store.renewed_lease().max(self.capabilities.lease_min)
    }

    /// A lease that never runs out while a clause runs: what is free before was not freed by expiry.
    pub(crate) fn long(&self) -> Duration {
        Duration::from_secs(3_600).min(self.capabilities.lease_max)
    }

    /// How long a clause waits for what should happen soon. Far below [`Self::long`], far above a busy machine's hiccups.
    pub(crate) fn patience(&self) -> Duration {
        match self.clock {
            Clock::Paused => Duration::from_secs(60),
            Clock::Real => Duration::from_secs(45),
        }
    }

    /// How long a whole clause may take.
    pub(crate) fn limit(&self) -> Duration {
        match self.clock {
            Clock::Paused => Duration::from_secs(24 * 3_600),
            Clock::Real => Duration::from_secs(240),
        }
    }

    /// Renews by hand, again while the store is in trouble: a caller may be told of a reply that was lost.
    pub(crate) async fn renew_by_hand(
        &self,
        guard: &LockGuard,
        lease: Duration,
    ) -> Result<(), LockError> {
        let until = Instant::now() + self.patience();
        loop {
            match guard.renew(lease).await {
                Err(LockError::Backend { source, .. })
                    if source.is_retryable() && Instant::now() < until => {}
                outcome => return outcome,
            }
        }
    }

    /// Ends the grant of `claim` behind its holder's back, as an administrator or a store that lost it would.
    pub(crate) async fn break_claim(&self, claim: &Claim) {
        if self.store().break_claim(claim).await {
            return;
        }
        let client = self.client().await;
        // A store with faults put in may do it and not tell.
        while client.release(claim).await.is_err() {}
        client.close().await;
    }

    /// Waits until `check` is true, and panics when that does not come to pass soon.
    pub(crate) async fn eventually(&self, what: &str, check: impl AsyncFnMut() -> bool) {
        self.within(self.patience(), what, check).await;
    }

    /// Waits until `check` is true, and panics when that does not come to pass within `limit`.
    pub(crate) async fn within(
        &self,
        limit: Duration,
        what: &str,
        mut check: impl AsyncFnMut() -> bool,
    ) {
        let until = Instant::now() + limit;
        while !check().await {
            assert!(Instant::now() < until, "within {limit:?}, {what}");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the store's own clock has ended the grant of `claim`, without touching the key where possible.
    pub(crate) async fn let_expire(&self, client: &dyn LockBackend, claim: &Claim) {
        if !self.capabilities.inspect {
            // Nothing but an attempt could tell, and an attempt would change what the clause is about.
            sleep(claim.lease() * 3 / 2 + Duration::from_millis(50)).await;
            return;
        }
        let limit = claim.lease() * 4 + self.patience();
        self.within(limit, "an unrenewed grant ends with its lease", async || {
            client.inspect(claim.key()).await.expect("inspect answers").is_none()
        })
        .await;
    }

    /// Waits until the store grants `claim`.
    pub(crate) async fn granted_at_last(&self, client: &dyn LockBackend, claim: &Claim) -> Grant {
        let until = Instant::now() + self.patience() + self.short() * 4;
        loop {
            match attempt(client, claim).await {
                Attempt::Granted(grant) => return grant,
                Attempt::Busy(busy) => {
                    assert!(Instant::now() < until, "{:?} is never free: {busy:?}", claim.key());
                }
            }
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// A valid key.
pub(crate) fn key(text: &str) -> Key {
    Key::new(text).expect("the clause's key is valid")
}

/// Whether a fresh claim gets the key. Leaves it free if it was.
pub(crate) async fn is_free(client: &dyn LockBackend, name: &Key) -> bool {
    let probe =
        Claim::new(name.clone(), Duration::from_secs(600).min(client.capabilities().lease_max));
    match attempt(client, &probe).await {
        Attempt::Granted(_) => {
            freed(client, &probe).await;
            true
        }
        Attempt::Busy(_) => {
            // A store that queues may have kept the probe.
            release(client, &probe).await;
            false
        }
    }
}

/// Tries to acquire `claim`; trouble panics.
#[track_caller]
pub(crate) fn attempt<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Attempt> + Send + 'a {
    let at = Location::caller();
    async move { answered(at, "acquire", claim, client.try_acquire(claim).await) }
}

/// Acquires `claim`; panics unless it is granted.
#[track_caller]
pub(crate) fn granted<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Grant> + Send + 'a {
    let at = Location::caller();
    async move {
        match answered(at, "acquire", claim, client.try_acquire(claim).await) {
            Attempt::Granted(grant) => grant,
            Attempt::Busy(busy) => {
                panic!("{at}: {:?} should be granted, but: {busy:?}", claim.key())
            }
        }
    }
}

/// Tries to acquire `claim`; panics unless somebody else holds the key.
#[track_caller]
pub(crate) fn busy<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Busy> + Send + 'a {
    let at = Location::caller();
    async move {
        match answered(at, "acquire", claim, client.try_acquire(claim).await) {
            Attempt::Busy(busy) => busy,
            Attempt::Granted(grant) => {
                panic!("{at}: {:?} should be busy, but: {grant:?}", claim.key())
            }
        }
    }
}

/// Renews `claim` alone; trouble panics.
#[track_caller]
pub(crate) fn renew<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Renewal> + Send + 'a {
    let at = Location::caller();
    async move {
        let mut answers = client.renew(std::slice::from_ref(claim)).await;
        assert_eq!(answers.len(), 1, "{at}: one claim, one answer");
        answered(at, "renew", claim, answers.swap_remove(0))
    }
}

/// Renews `claim`; panics unless the grant is still there.
#[track_caller]
pub(crate) fn renewed<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Duration> + Send + 'a {
    let at = Location::caller();
    async move {
        match renew(client, claim).await {
            Renewal::Renewed(left) => left,
            Renewal::Gone => panic!("{at}: {:?} should be renewed, but is gone", claim.key()),
        }
    }
}

/// Releases `claim`; trouble panics.
#[track_caller]
pub(crate) fn release<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Release> + Send + 'a {
    let at = Location::caller();
    async move { answered(at, "release", claim, client.release(claim).await) }
}

/// Releases `claim`; panics unless it was held.
#[track_caller]
pub(crate) fn freed<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = ()> + Send + 'a {
    let at = Location::caller();
    async move {
        let answer = answered(at, "release", claim, client.release(claim).await);
        assert_eq!(answer, Release::Freed, "{at}: {:?} was held", claim.key());
    }
}

fn answered<T>(
    at: &Location<'_>,
    operation: &str,
    claim: &Claim,
    answer: Result<T, BackendError>,
) -> T {
    answer
        .unwrap_or_else(|error| panic!("{at}: {operation} of {:?} failed: {error:?}", claim.key()))
}
