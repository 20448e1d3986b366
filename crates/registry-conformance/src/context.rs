//! The context of a clause: one store, its clients, registries over them, and ways to wait for the
//! store's clock. Contains no clause; see `clauses`.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimMode, Grant, Key, LockAdmin,
    LockBackend, LockError, LockEvent, LockGuard, LostReason, Observer, Registry, RegistryBuilder,
    Release, Renewal, ValueStore,
};
use tokio::time::{Instant, sleep, timeout};

use crate::faulty::{Faults, FaultyBackend};
use crate::harness::{Clock, Harness, RemoteHolder, Store};

/// One store under test, with the operations that clauses need.
#[derive(Debug)]
pub struct TestContext {
    store: Box<dyn Store>,
    clock: Clock,
    capabilities: Capabilities,
}

impl TestContext {
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

    /// Opens a further client of the store.
    pub(crate) async fn client(&self) -> Arc<dyn LockBackend> {
        self.store.client().await
    }

    /// Returns a client that may use the claims of `client`: a further client, or `client` itself
    /// if grants end with their client.
    pub(crate) async fn another_client(
        &self,
        client: &Arc<dyn LockBackend>,
    ) -> Arc<dyn LockBackend> {
        if self.store.grants_outlive_client() { self.client().await } else { Arc::clone(client) }
    }

    /// Opens a further client of the store, with injected faults.
    pub(crate) async fn faulty(&self, faults: Faults) -> Arc<FaultyBackend> {
        Arc::new(FaultyBackend::new(self.client().await, faults))
    }

    /// Returns the builder of a registry over `client`, with a [`Self::long_lease`].
    pub(crate) fn builder(&self, client: Arc<dyn LockBackend>) -> RegistryBuilder {
        // A long operation time-out, so that a loaded machine does not fail the clause.
        Registry::builder(client).lease(self.long_lease()).timeout(Duration::from_secs(8))
    }

    /// Returns a registry over a client of its own, as another process would open it, with a
    /// [`Self::long_lease`].
    pub(crate) async fn registry(&self) -> Registry {
        self.registry_with_lease(self.long_lease()).await
    }

    /// Returns a registry over a client of its own, with this lease.
    pub(crate) async fn registry_with_lease(&self, lease: Duration) -> Registry {
        let builder = self.builder(self.client().await).lease(lease);
        builder.build().expect("the registry is built")
    }

    /// Returns a registry over `faulty`, with this lease.
    pub(crate) fn registry_over(&self, faulty: &Arc<FaultyBackend>, lease: Duration) -> Registry {
        let client: Arc<dyn LockBackend> = Arc::<FaultyBackend>::clone(faulty);
        self.builder(client).lease(lease).build().expect("the registry is built")
    }

    /// Returns a registry over a client of its own, and the count of its busy responses.
    pub(crate) async fn counting_registry(&self) -> (Registry, Arc<BusyCount>) {
        let count = Arc::new(BusyCount::default());
        let builder = self.builder(self.client().await).observer(Arc::clone(&count) as _);
        (builder.build().expect("the registry is built"), count)
    }

    /// Returns a new claim of `orders:42` in this mode, with a [`Self::long_lease`]. Sends no
    /// request.
    pub(crate) fn claim(&self, mode: ClaimMode) -> Claim {
        Claim::new(key("orders:42"), self.long_lease()).with_mode(mode)
    }

    /// Acquires `orders:42` through `client` with a new claim in this mode, and returns the claim.
    pub(crate) async fn acquire_in(&self, client: &dyn LockBackend, mode: ClaimMode) -> Claim {
        let claim = self.claim(mode);
        assert_granted(client, &claim).await;
        claim
    }

    /// Waits until a waiting or converting claim blocks new readers of `orders:42`. `registry` must
    /// have no shared grant that its readers could join.
    pub(crate) async fn wait_until_readers_are_blocked(&self, registry: &Registry) {
        self.eventually("new readers are blocked", async || !can_acquire_as_reader(registry).await)
            .await;
    }

    /// Waits until readers of `registry` can acquire `orders:42`.
    pub(crate) async fn wait_until_readers_enter(&self, registry: &Registry) {
        self.eventually("readers can enter", async || can_acquire_as_reader(registry).await).await;
    }

    /// Acquires `orders:42` through `client` with a new claim of this lease, and returns the claim.
    pub(crate) async fn acquire_with_lease(
        &self,
        client: &dyn LockBackend,
        lease: Duration,
    ) -> Claim {
        let claim = Claim::new(key("orders:42"), lease);
        assert_granted(client, &claim).await;
        claim
    }

    /// Asserts that the lock of `guard` is lost for this reason within `lease` plus
    /// [`Self::max_wait`].
    pub(crate) async fn assert_lost(&self, guard: &LockGuard, lease: Duration, reason: LostReason) {
        let lost = timeout(lease + self.max_wait(), guard.lost()).await;
        assert_eq!(lost.expect("the loss is reported"), reason);
    }

    /// Acquires and releases the lock through `registry`. Panics unless the lock becomes free
    /// within [`Self::max_wait`], long before a [`Self::long_lease`] ends.
    pub(crate) async fn assert_becomes_free(&self, registry: &Registry, name: &str) {
        let guard = registry.obtain(name).try_lock_for(self.max_wait()).await;
        let guard = guard.unwrap_or_else(|error| panic!("acquiring {name:?} failed: {error:?}"));
        let guard = guard.unwrap_or_else(|| panic!("{name:?} is still locked"));
        guard.unlock().await.expect("a held lock is unlocked");
    }

    /// Opens a client of the same store in another namespace.
    pub(crate) async fn other_namespace(&self) -> Arc<dyn LockBackend> {
        self.store
            .other_namespace()
            .await
            .expect("the harness has no namespaces: list it in `without`")
    }

    /// Restarts the store with its data.
    pub(crate) async fn restart(&self) {
        assert!(self.store.restart().await, "the harness has no restart: list it in `without`");
    }

    /// Deletes the data of the store.
    pub(crate) async fn wipe(&self) {
        assert!(self.store.wipe().await, "the harness has no wipe: list it in `without`");
    }

    /// Starts another process over this store.
    pub(crate) async fn remote(&self, lease: Duration) -> Box<dyn RemoteHolder> {
        self.store.remote(lease).await.expect("the harness has no remote: list it in `without`")
    }

    /// Returns a lease that clauses let expire.
    pub(crate) fn short_lease(&self) -> Duration {
        self.store.lease().max(self.capabilities.lease_min)
    }

    /// Returns a lease that renewals keep alive.
    pub(crate) fn renewable_lease(&self) -> Duration {
        self.store.renewable_lease().max(self.capabilities.lease_min)
    }

    /// Returns one hour, or the longest lease of the store if that is shorter. A clause normally
    /// ends before this lease, so a key that becomes free was released.
    pub(crate) fn long_lease(&self) -> Duration {
        Duration::from_secs(3_600).min(self.capabilities.lease_max)
    }

    /// Returns how long a clause waits for an event that should occur soon. Far below
    /// [`Self::long_lease`], and far above the pauses of a loaded machine.
    pub(crate) fn max_wait(&self) -> Duration {
        match self.clock {
            Clock::Paused => Duration::from_secs(60),
            Clock::Real => Duration::from_secs(45),
        }
    }

    /// Returns how long a whole clause may take.
    pub(crate) fn limit(&self) -> Duration {
        match self.clock {
            Clock::Paused => Duration::from_secs(24 * 3_600),
            Clock::Real => Duration::from_secs(240),
        }
    }

    /// Renews the lock of `guard`, and retries retryable store errors, such as a lost reply.
    pub(crate) async fn renew_with_retries(
        &self,
        guard: &LockGuard,
        lease: Duration,
    ) -> Result<(), LockError> {
        let until = Instant::now() + self.max_wait();
        loop {
            match guard.extend(lease).await {
                Err(LockError::Backend { source, .. })
                    if source.is_retryable() && Instant::now() < until => {}
                outcome => return outcome,
            }
        }
    }

    /// Ends the grant of `claim` without informing its holder, as a forced release or a loss of
    /// data does.
    pub(crate) async fn break_claim(&self, claim: &Claim) {
        if self.store().break_claim(claim).await {
            return;
        }
        let client = self.client().await;
        // A store with injected faults may release the claim and still return an error.
        while client.release(claim).await.is_err() {}
        client.close().await;
    }

    /// Waits until `check` returns true. Panics with `what` after [`Self::max_wait`].
    pub(crate) async fn eventually(&self, what: &str, check: impl AsyncFnMut() -> bool) {
        self.within(self.max_wait(), what, check).await;
    }

    /// Waits until `check` returns true. Panics with `what` after `limit`.
    pub(crate) async fn within(
        &self,
        limit: Duration,
        what: &str,
        mut check: impl AsyncFnMut() -> bool,
    ) {
        let until = Instant::now() + limit;
        while !check().await {
            assert!(Instant::now() < until, "not within {limit:?}: {what}");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the grant of `claim` has expired on the store's clock, without writing to the
    /// key.
    pub(crate) async fn wait_until_expired(&self, client: &dyn LockBackend, claim: &Claim) {
        self.wait_until_expired_alongside(client, claim, 0).await;
    }

    /// As [`wait_until_expired`](Self::wait_until_expired), while `others` other claims hold the
    /// key.
    pub(crate) async fn wait_until_expired_alongside(
        &self,
        client: &dyn LockBackend,
        claim: &Claim,
        others: usize,
    ) {
        if !self.capabilities.inspect {
            // Without `inspect`, only an acquire could detect the expiry, and that would write to
            // the key.
            sleep(claim.lease() * 3 / 2 + Duration::from_millis(50)).await;
            return;
        }
        let limit = claim.lease() * 4 + self.max_wait();
        self.within(limit, "an unrenewed grant ends with its lease", async || {
            admin(client).inspect(claim.key()).await.expect("inspect answers").len() <= others
        })
        .await;
    }

    /// Waits until the store grants `claim`.
    pub(crate) async fn wait_until_granted(
        &self,
        client: &dyn LockBackend,
        claim: &Claim,
    ) -> Grant {
        let until = Instant::now() + self.max_wait() + self.short_lease() * 4;
        loop {
            match attempt(client, claim).await {
                Attempt::Granted(grant) => return grant,
                Attempt::Busy(busy) => {
                    assert!(
                        Instant::now() < until,
                        "{:?} is not free in time: {busy:?}",
                        claim.key()
                    );
                }
                Attempt::Gone => panic!("{:?} is no conversion", claim.key()),
            }
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Counts the busy responses of one registry, so that a clause knows when a caller waits in the
/// store.
#[derive(Debug, Default)]
pub(crate) struct BusyCount {
    all: AtomicUsize,
    queued: AtomicUsize,
}

impl BusyCount {
    pub(crate) fn get(&self) -> usize {
        self.all.load(Ordering::Acquire)
    }

    /// Returns the number of responses to claims that have a place in the queue.
    pub(crate) fn queued(&self) -> usize {
        self.queued.load(Ordering::Acquire)
    }
}

impl Observer for BusyCount {
    fn on(&self, event: &LockEvent<'_>) {
        if let LockEvent::Busy { busy, .. } = event {
            self.queued.fetch_add(usize::from(busy.is_queued), Ordering::AcqRel);
            self.all.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Counts the holders in a critical section. Panics if a new holder breaks the exclusion.
#[derive(Debug, Default)]
pub(crate) struct CriticalSection(AtomicUsize);

impl CriticalSection {
    const WRITER: usize = 1 << 16;

    /// Runs `work` as the only holder.
    pub(crate) async fn write(&self, work: impl Future<Output = ()>) {
        let before = self.0.fetch_add(Self::WRITER, Ordering::AcqRel);
        assert_eq!(before, 0, "a writer holds next to other holders");
        work.await;
        self.0.fetch_sub(Self::WRITER, Ordering::AcqRel);
    }

    /// Runs `work` as a holder of `units`. All holders together may have at most `of` units.
    pub(crate) async fn share(&self, units: usize, of: usize, work: impl Future<Output = ()>) {
        let before = self.0.fetch_add(units, Ordering::AcqRel);
        assert!(before < Self::WRITER, "a reader or permit holds next to a writer");
        assert!(before + units <= of, "{units} units next to {before}: more than {of}");
        work.await;
        self.0.fetch_sub(units, Ordering::AcqRel);
    }
}

/// Tries to acquire `orders:42` as a new reader, and releases it again. Returns whether the reader
/// acquired it.
async fn can_acquire_as_reader(registry: &Registry) -> bool {
    match registry.obtain("orders:42").try_read().await.expect("the store answers") {
        Some(guard) => {
            unlock(guard).await;
            true
        }
        None => false,
    }
}

/// Releases the lock of `guard`. Panics if it was lost, or on a store error.
#[track_caller]
pub(crate) fn unlock(guard: LockGuard) -> impl Future<Output = ()> + Send {
    let at = Location::caller();
    async move {
        let unlocked = guard.unlock().await;
        unlocked.unwrap_or_else(|error| panic!("{at}: a held lock was not unlocked: {error:?}"));
    }
}

/// Returns `text` as a key.
pub(crate) fn key(text: &str) -> Key {
    Key::new(text).expect("the clause's key is valid")
}

/// Returns the administrative operations of a store that can be inspected.
pub(crate) fn admin(client: &dyn LockBackend) -> &dyn LockAdmin {
    client.admin().expect("a store that can be inspected has an admin")
}

/// Returns the value blocks of a store that has them.
pub(crate) fn values(client: &dyn LockBackend) -> &dyn ValueStore {
    client.values().expect("a store with value blocks")
}

/// Tries to acquire the key with a new claim, and releases the claim. Returns whether it was
/// granted.
pub(crate) async fn is_free(client: &dyn LockBackend, name: &Key) -> bool {
    let probe =
        Claim::new(name.clone(), Duration::from_secs(600).min(client.capabilities().lease_max));
    match attempt(client, &probe).await {
        Attempt::Granted(_) => {
            assert_freed(client, &probe).await;
            true
        }
        Attempt::Busy(_) | Attempt::Gone => {
            // A store with a queue may have queued the claim.
            release(client, &probe).await;
            false
        }
    }
}

/// Tries to acquire `claim`. Panics on a store error.
#[track_caller]
pub(crate) fn attempt<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Attempt> + Send + 'a {
    let at = Location::caller();
    async move { unwrap_answer(at, "acquire", claim, client.try_acquire(claim).await) }
}

/// Acquires `claim`. Panics unless it is granted.
#[track_caller]
pub(crate) fn assert_granted<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Grant> + Send + 'a {
    let at = Location::caller();
    async move {
        match unwrap_answer(at, "acquire", claim, client.try_acquire(claim).await) {
            Attempt::Granted(grant) => grant,
            other => panic!("{at}: {:?} should be granted, but: {other:?}", claim.key()),
        }
    }
}

/// Tries to acquire `claim`. Panics unless the response is [`Attempt::Busy`].
#[track_caller]
pub(crate) fn assert_busy<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Busy> + Send + 'a {
    let at = Location::caller();
    async move {
        match unwrap_answer(at, "acquire", claim, client.try_acquire(claim).await) {
            Attempt::Busy(busy) => busy,
            other => panic!("{at}: {:?} should be busy, but: {other:?}", claim.key()),
        }
    }
}

/// Renews `claim` in a batch of its own. Panics on a store error.
#[track_caller]
pub(crate) fn renew<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Renewal> + Send + 'a {
    let at = Location::caller();
    async move {
        let mut answers = client.renew(std::slice::from_ref(claim)).await;
        assert_eq!(answers.len(), 1, "{at}: one claim, one answer");
        unwrap_answer(at, "renew", claim, answers.swap_remove(0))
    }
}

/// Renews claims as the engine does: each call has claims of one shard, and at most `batch_max`
/// claims. Returns the answers in the order of `claims`.
pub(crate) async fn renew_all(
    client: &dyn LockBackend,
    claims: &[Claim],
) -> Vec<Result<Renewal, BackendError>> {
    let mut shards = BTreeMap::<u32, Vec<usize>>::new();
    for (index, claim) in claims.iter().enumerate() {
        shards.entry(client.shard(claim)).or_default().push(index);
    }
    let batch_max = client.capabilities().renewal.batch_max.max(1);
    let mut answers: Vec<_> = claims.iter().map(|_| None).collect();
    for batch in shards.values().flat_map(|shard| shard.chunks(batch_max)) {
        let batch_claims: Vec<_> = batch.iter().map(|index| claims[*index].clone()).collect();
        let batch_answers = client.renew(&batch_claims).await;
        assert_eq!(batch_answers.len(), batch.len(), "one answer for each claim");
        for (index, answer) in batch.iter().zip(batch_answers) {
            answers[*index] = Some(answer);
        }
    }
    answers.into_iter().flatten().collect()
}

/// Renews `claim`. Panics unless it is still granted.
#[track_caller]
pub(crate) fn assert_renewed<'a>(
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

/// Releases `claim`. Panics on a store error.
#[track_caller]
pub(crate) fn release<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = Release> + Send + 'a {
    let at = Location::caller();
    async move { unwrap_answer(at, "release", claim, client.release(claim).await) }
}

/// Releases `claim`. Panics unless it was held.
#[track_caller]
pub(crate) fn assert_freed<'a>(
    client: &'a dyn LockBackend,
    claim: &'a Claim,
) -> impl Future<Output = ()> + Send + 'a {
    let at = Location::caller();
    async move {
        let answer = unwrap_answer(at, "release", claim, client.release(claim).await);
        assert_eq!(answer, Release::Freed, "{at}: {:?} was held", claim.key());
    }
}

/// Returns the answer. Panics on a store error, with the location of the clause's call.
fn unwrap_answer<T>(
    at: &Location<'_>,
    operation: &str,
    claim: &Claim,
    answer: Result<T, BackendError>,
) -> T {
    answer
        .unwrap_or_else(|error| panic!("{at}: {operation} of {:?} failed: {error:?}", claim.key()))
}
