//! The `LockBackend` implementation. It delegates each operation to one `RedisStore` or to a
//! `Quorum`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::config::{BackendConfig as _, OpenBackend};
use registry_core::{
    Attempt, BackendError, BackendErrorKind, BatchAttempt, Busy, Capabilities, Claim, FencingToken,
    Finding, Grant, Holder, InvalidKey, Invalidations, Key, LockAdmin, LockBackend, LockBatch,
    Release, Renewal, RenewalPolicy, ValueRead, ValueStore, ValueWrite, WaiterStore, WaitingClaim,
    WakeCheck,
};

use crate::config::{Layout, RedisConfig, ServerAddresses};
use crate::connections::all_addresses;
use crate::invalidations::InvalidationForwarder;
use crate::multi_claim::AttemptResult;
use crate::quorum::Quorum;
use crate::store::{
    AcquireResult, BatchResult, CorruptRecord, RedisStore, Released, key_names, unexpected_response,
};

/// A lock store on Redis or Valkey servers.
///
/// A grant lives until its lease ends on the server's clock. A fencing token is the server's time
/// in microseconds, or one more than the newest reserved token of the key, whichever is larger.
/// Tokens therefore grow over releases, expiries, and a restart without data. A release publishes a
/// message that wakes the waiters of all processes. If the server supports client tracking, a
/// holder is notified as soon as another client changes or removes its lock.
///
/// If the servers lose a lock's record, another client can acquire the lock. A single server may
/// lose records at a restart, unless it logs all writes (`appendonly yes`, `appendfsync always`). A
/// failover to a replica loses the records that the replica has not received. Holders detect the
/// loss at their next renewal at the latest. Tokens grow even after a loss, so fenced writes stay
/// safe.
///
/// A backend uses two connections per server, regardless of the number of locks and waiters: one
/// for commands, and one that receives release messages. The first waiter opens the second
/// connection. Each sentinel has one or two further connections. With
/// [`with_replicas`](RedisConfig::with_replicas) or [`with_fsync`](RedisConfig::with_fsync), four
/// more connections per server carry the grants and renewals that wait for replicas or disks.
pub struct RedisBackend {
    config: RedisConfig,
    /// The addresses of all configured servers, for errors that no single server caused.
    addresses: Arc<str>,
    storage: Arc<Storage>,
    invalidations: InvalidationForwarder,
}

/// The store that grants the locks.
enum Storage {
    Single(RedisStore),
    Quorum(Quorum),
}

impl WakeCheck for Storage {
    fn confirms_wake_ups(&self, claim: &Claim, _busy: &Busy) -> bool {
        match self {
            Self::Single(store) => store.is_subscribed(claim.key()),
            Self::Quorum(quorum) => quorum.is_subscribed(claim.key()),
        }
    }
}

impl RedisBackend {
    /// Connects to the single server, the master, all masters of a cluster, or a majority of a
    /// quorum. Also reads the files of the options `ca`, `cert` and `key`.
    ///
    /// # Errors
    /// Returns a [`BackendError`] whose message names the remedy. `Misconfigured`: the
    /// configuration cannot work. `Denied`: the user or password is wrong. `Transient`: the servers
    /// cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connections.
    pub async fn open(config: RedisConfig) -> Result<Self, BackendError> {
        config.check()?;
        #[cfg(feature = "tls")]
        let config = config.with_pem_files()?;
        let addresses: Arc<str> = all_addresses(&config.servers).into();
        // An error that names its server keeps that address.
        let with_address = |error: BackendError| error.with_address(Arc::clone(&addresses));
        let invalidations = InvalidationForwarder::new(key_names(&config));
        let storage = match &config.servers {
            ServerAddresses::Quorum(masters) => Storage::Quorum(
                Quorum::open(masters, &config, &invalidations).await.map_err(with_address)?,
            ),
            _ => Storage::Single(
                RedisStore::open(&config, &invalidations).await.map_err(with_address)?,
            ),
        };
        Ok(Self { config, addresses, storage: Arc::new(storage), invalidations })
    }

    /// Adds the addresses of all servers to an error that names no server.
    fn with_address(&self, error: BackendError) -> BackendError {
        error.with_address(Arc::clone(&self.addresses))
    }

    /// Makes the registries verify their grants of `key` after a write by this process. The server
    /// sends no invalidation to the connection that wrote, and the write ends the tracking of the
    /// key.
    fn verify_other_grants(&self, key: &Key) {
        if self.invalidations.is_tracking() {
            self.invalidations.subscribers().notify(key);
        }
    }

    /// Converts a response of the store to the response for the engine.
    fn to_attempt(&self, outcome: AttemptResult, claim: &Claim) -> Attempt {
        match outcome {
            AttemptResult::Exclusive(AcquireResult::Granted { token, lease, .. }) => {
                // The engine must not rely on a longer lease than the requested lease.
                Attempt::Granted(Grant::new(token, lease.min(claim.lease())))
            }
            AttemptResult::Exclusive(AcquireResult::Busy { remaining, holder, event_seq }) => {
                // The version is the number of the last event before the request. `wait` returns at
                // a later event.
                let mut busy = Busy::new().with_seen_version(event_seq).with_holder(holder);
                // A Spring peer with a spin lock publishes no release, so the engine must keep
                // polling.
                if self.config.layout != Layout::Spring {
                    busy = busy.with_wake_check(Arc::clone(&self.storage) as _);
                }
                Attempt::Busy(match remaining {
                    Some(remaining) => busy.with_retry_after(remaining),
                    None => busy,
                })
            }
            AttemptResult::FromRecord(Attempt::Busy(busy), event_seq) => Attempt::Busy(
                busy.with_seen_version(event_seq).with_wake_check(Arc::clone(&self.storage) as _),
            ),
            AttemptResult::FromRecord(attempt, _) => attempt,
        }
    }

    /// Returns the outcome of a release. If grants of other claims remain, makes the registries
    /// verify them.
    fn after_release(
        &self,
        released: Result<Released, BackendError>,
        claim: &Claim,
    ) -> Result<Release, BackendError> {
        let released = released.map_err(|error| self.with_address(error))?;
        if released.others_remain {
            // The verification of the other claims enables tracking of the key again.
            self.verify_other_grants(claim.key());
        }
        Ok(released.outcome)
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.config.namespace()
    }
}

#[async_trait]
impl LockBackend for RedisBackend {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.config.capabilities();
        if !self.invalidations.is_tracking() {
            capabilities.reports_invalidations = false;
            capabilities.renewal = RenewalPolicy::new();
        }
        capabilities
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        match &*self.storage {
            Storage::Single(store) => store.names.check_key(key),
            Storage::Quorum(_) => Ok(()),
        }
    }

    fn shard(&self, claim: &Claim) -> u32 {
        match &*self.storage {
            Storage::Single(store) => store.shard(claim.key()),
            Storage::Quorum(_) => 0,
        }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let outcome = match &*self.storage {
            Storage::Single(store) => store.try_acquire_in_mode(claim).await,
            Storage::Quorum(quorum) => {
                quorum.try_acquire(claim).await.map(AttemptResult::Exclusive)
            }
        };
        let outcome = outcome.map_err(|error| self.with_address(error))?;
        let attempt = self.to_attempt(outcome, claim);
        if matches!(&attempt, Attempt::Busy(busy) if busy.is_queued || busy.units_in_store.is_some())
        {
            // The attempt has written or removed its queue entry, which ends the tracking of the
            // key.
            self.verify_other_grants(claim.key());
        }
        Ok(attempt)
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut renewals = match &*self.storage {
            Storage::Single(store) => store.renew(claims).await,
            Storage::Quorum(quorum) => quorum.renew(claims).await,
        };
        for (renewal, claim) in renewals.iter_mut().zip(claims) {
            // The servers grant the lease rounded up to whole milliseconds. The engine must not
            // rely on a longer lease than the requested lease.
            match renewal {
                Ok(Renewal::Renewed(remaining)) => *remaining = (*remaining).min(claim.lease()),
                // Other grants of the key may have ended too. No invalidation reports their loss if
                // a write of this process had ended the tracking of the key.
                Ok(Renewal::Gone) => self.verify_other_grants(claim.key()),
                Err(error) => *error = self.with_address(error.clone()),
            }
        }
        renewals
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = match &*self.storage {
            Storage::Single(store) => store.release(claim).await,
            Storage::Quorum(quorum) => quorum
                .release(claim)
                .await
                .map(|outcome| Released { outcome, others_remain: false }),
        };
        self.after_release(released, claim)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        match &*self.storage {
            Storage::Single(store) => store.wait(claim.key(), busy.seen_version).await,
            Storage::Quorum(quorum) => quorum.wait(claim.key(), busy.seen_version).await,
        }
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.invalidations.subscribers().subscribe(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    fn batch(&self) -> Option<&dyn LockBatch> {
        match &*self.storage {
            Storage::Single(_) => Some(self),
            // Each key of a quorum is decided in its own rounds.
            Storage::Quorum(_) => None,
        }
    }

    fn waiters(&self) -> Option<&dyn WaiterStore> {
        self.config.capabilities().waiters.then_some(self)
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        self.config.capabilities().values.then_some(self)
    }

    async fn close(&self) {
        if !self.invalidations.subscribers().is_empty() {
            // Another registry still uses the connections of this backend.
            return;
        }
        match &*self.storage {
            Storage::Single(store) => store.connections.close().await,
            Storage::Quorum(quorum) => quorum.close().await,
        }
    }
}

#[async_trait]
impl LockBatch for RedisBackend {
    async fn try_acquire_all(&self, claims: &[Claim]) -> Result<BatchAttempt, BackendError> {
        let Storage::Single(store) = &*self.storage else { return Ok(BatchAttempt::Declined) };
        let outcome = store.try_acquire_all(claims).await;
        Ok(match outcome.map_err(|error| self.with_address(error))? {
            BatchResult::Granted(grants) => {
                let grants = grants.into_iter().zip(claims);
                let grant = |((token, lease), claim): ((_, Duration), &Claim)| {
                    Grant::new(token, lease.min(claim.lease()))
                };
                BatchAttempt::Granted(grants.map(grant).collect())
            }
            BatchResult::Busy(index, busy) => match claims.get(index) {
                Some(claim) => match self.to_attempt(AttemptResult::Exclusive(busy), claim) {
                    Attempt::Busy(busy) => BatchAttempt::Busy(index, busy),
                    _ => return Err(unexpected_response()),
                },
                None => return Err(unexpected_response()),
            },
            BatchResult::Declined => BatchAttempt::Declined,
        })
    }

    async fn release_all(&self, claims: &[Claim]) -> Vec<Result<Release, BackendError>> {
        match &*self.storage {
            Storage::Single(store) => {
                let released = store.release_all(claims).await.into_iter().zip(claims);
                released.map(|(released, claim)| self.after_release(released, claim)).collect()
            }
            Storage::Quorum(_) => join_all(claims.iter().map(|claim| self.release(claim))).await,
        }
    }
}

#[async_trait]
impl LockAdmin for RedisBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        match &*self.storage {
            Storage::Single(store) => store
                .inspect_keys(std::slice::from_ref(key), CorruptRecord::IsError)
                .await
                .map(|found| found.into_iter().map(|found| found.holder).collect()),
            Storage::Quorum(quorum) => {
                quorum.inspect(key).await.map(|holder| holder.into_iter().collect())
            }
        }
        .map_err(|error| self.with_address(error))
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        match &*self.storage {
            Storage::Single(store) => store
                .list()
                .await
                .map(|found| found.into_iter().map(|found| found.holder).collect()),
            Storage::Quorum(quorum) => quorum.list().await,
        }
        .map_err(|error| self.with_address(error))
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        match &*self.storage {
            Storage::Single(store) => store.force_release(key).await,
            Storage::Quorum(quorum) => quorum.force_release(key).await,
        }
        .map_err(|error| self.with_address(error))
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = match &*self.storage {
            Storage::Single(store) => store.diagnose().await,
            Storage::Quorum(quorum) => quorum.diagnose().await,
        }
        .map_err(|error| self.with_address(error))?;
        if !self.invalidations.is_tracking() {
            findings.push(Finding::note(
                "the server does not report changes (CLIENT TRACKING): a holder is notified of a removed lock only at its next \
                 renewal",
            ));
        }
        Ok(findings)
    }
}

#[async_trait]
impl ValueStore for RedisBackend {
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        match &*self.storage {
            Storage::Single(store) => store.value(key).await,
            Storage::Quorum(_) => Err(no_values_in_quorum()),
        }
        .map_err(|error| self.with_address(error))
    }

    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        match &*self.storage {
            Storage::Single(store) => store.set_value(claim, token, value).await,
            Storage::Quorum(_) => Err(no_values_in_quorum()),
        }
        .map_err(|error| self.with_address(error))
    }
}

/// A quorum does not list its waiters ([`Capabilities::waiters`]), so the engine never calls these
/// methods for a quorum.
#[async_trait]
impl WaiterStore for RedisBackend {
    async fn register(&self, claim: &Claim, waited_for: Duration) -> Result<(), BackendError> {
        let Storage::Single(store) = &*self.storage else { return Ok(()) };
        store.register(claim, waited_for).await.map_err(|error| self.with_address(error))
    }

    async fn unregister(&self, claim: &Claim) -> Result<(), BackendError> {
        let Storage::Single(store) = &*self.storage else { return Ok(()) };
        store.unregister(claim).await.map_err(|error| self.with_address(error))
    }

    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError> {
        let Storage::Single(store) = &*self.storage else { return Ok(Vec::new()) };
        store.waiting(key).await.map_err(|error| self.with_address(error))
    }
}

fn no_values_in_quorum() -> BackendError {
    let message = "redis: the masters of a quorum share no data, so they have no value blocks";
    BackendError::new(BackendErrorKind::Misconfigured, message).as_refused()
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

#[async_trait]
impl OpenBackend for RedisConfig {
    async fn open(&self) -> Result<Arc<dyn LockBackend>, BackendError> {
        Ok(Arc::new(RedisBackend::open(self.clone()).await?))
    }
}
