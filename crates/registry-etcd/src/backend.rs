//! The `LockBackend` implementation. `queue` acquires and releases claims, `renew` renews them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::config::{BackendConfig as _, OpenBackend};
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, Finding, Holder, InvalidKey, Invalidations,
    Key, LockAdmin, LockBackend, Release, Renewal, ValueStore, WaiterStore, WaitingClaim,
};

use crate::claims::ClaimCache;
use crate::client::EtcdClient;
use crate::config::EtcdConfig;
use crate::error::CallError;
use crate::keep_alive::KeepAlive;
use crate::modes;
use crate::names::{EtcdKeyNames, prefix_end};
use crate::pool::LeasePool;
use crate::proto::{KeyValue, LeaseTimeToLiveRequest, RangeRequest, RangeResponse, TxnRequest};
use crate::record;
use crate::tombstones::TombstoneLeases;
use crate::txn::{self, TxnResults};
use crate::watcher::Watcher;

/// A lock store on an etcd cluster of version 3.4 or later.
///
/// Each lock has a queue in the cluster. The first claim in the queue holds the lock. A later claim
/// also holds the lock if its mode is compatible with the modes of all claims before it. For
/// example, readers are compatible with each other and with one upgradable claim. A release, or the
/// end of the holder's lease, wakes only the claims that wait for the removed entry. These are the
/// next exclusive claim, or the readers that waited for a writer. The end of a permit wakes all
/// claims that wait for units.
///
/// A fencing token is the revision that created the claim's key. The token of an upgraded claim is
/// a later revision. The token of a claim that waited behind an upgradable claim can be a later
/// revision too. Tokens increase across every failure that a majority of the members survives.
///
/// Each claim has its own etcd lease. A lock that is no longer renewed therefore expires
/// independently of the other locks of its process. A later claim reuses the lease of a released
/// claim, which saves a write. One stream extends all leases, or up to 16 streams if the member is
/// slow. Another stream carries all watches.
///
/// A claim's lease lasts at least 2 s. Its etcd lease lasts whole seconds, and is up to 2 s longer.
/// The members check for expired leases every 0.5 s. The lock of a crashed holder becomes free up
/// to 2.5 s after the end of its lease. It is granted after a further 250 ms. With
/// `layout=etcdctl`, these 250 ms apply only to a claim that waited directly behind the holder.
pub struct EtcdBackend {
    pub(crate) config: EtcdConfig,
    /// The addresses of all configured members, for errors that no single member caused.
    addresses: Arc<str>,
    pub(crate) names: EtcdKeyNames,
    /// The name of this host, which each entry contains.
    pub(crate) local_host_name: String,
    pub(crate) client: EtcdClient,
    pub(crate) keep_alive: KeepAlive,
    pub(crate) watcher: Watcher,
    pub(crate) pool: LeasePool,
    pub(crate) tombstones: TombstoneLeases,
    pub(crate) claims: ClaimCache,
}

impl EtcdBackend {
    /// Connects to a member and logs in.
    ///
    /// # Errors
    /// Returns a [`BackendError`] of one of these kinds:
    /// - `Misconfigured`: the configuration is invalid, or the server is not etcd 3. Versions
    ///   before 3.4 are not detected. With `etcds://`, also if the member's certificate is not
    ///   trusted, or if the member answers without TLS.
    /// - `Denied`: the members reject the login or the client certificate, or the user lacks a
    ///   permission.
    /// - `Transient`: no member can be reached, the cluster has no leader, or the member requires
    ///   TLS and the URL is `etcd://`.
    /// - `Protocol`: a member sent an unexpected response.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    ///
    /// # Panics
    /// Outside a tokio runtime with time enabled.
    pub async fn open(config: EtcdConfig) -> Result<Self, BackendError> {
        config.check()?;
        #[cfg(feature = "tls")]
        let config = config.with_pem_files()?;
        let client = EtcdClient::new(&config)?;
        let names = EtcdKeyNames::new(config.layout, config.namespace());
        let backend = Self {
            local_host_name: record::host_name(),
            keep_alive: KeepAlive::new(client.clone()),
            watcher: Watcher::new(client.clone()),
            pool: LeasePool::new(client.clone()),
            tombstones: TombstoneLeases::default(),
            claims: ClaimCache::default(),
            addresses: client.addresses().into(),
            client,
            names,
            config,
        };
        backend.probe().await?;
        Ok(backend)
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.config.namespace()
    }

    pub(crate) fn with_address(&self, error: BackendError) -> BackendError {
        error.with_address(Arc::clone(&self.addresses))
    }

    /// Reads one key of the namespace. If a member fails, repeats the read with the next member.
    /// The number of reads is at most the number of configured members.
    async fn probe(&self) -> Result<(), BackendError> {
        let mut tried = 0;
        loop {
            let probe = RangeRequest { limit: 1, ..self.namespace_range(Vec::new()) };
            tried += 1;
            match self.client.call(probe).await {
                Ok(_) => return Ok(()),
                Err(CallError::MemberFailed(_)) if tried < self.client.member_count() => {}
                Err(failure) => return Err(self.with_address(failure.into_error())),
            }
        }
    }

    /// Executes a transaction.
    pub(crate) async fn execute(&self, txn: TxnRequest) -> Result<TxnResults, CallError> {
        let response = self.client.call(txn).await?;
        TxnResults::decode(response).map_err(CallError::Other)
    }

    pub(crate) async fn range(&self, range: RangeRequest) -> Result<RangeResponse, BackendError> {
        self.client.call(range).await.map_err(|failure| self.with_address(failure.into_error()))
    }

    /// Decodes an entry in the queue of `key`, and fetches the remaining time of its lease.
    async fn fetch_holder(&self, key: Key, entry: &KeyValue) -> Result<Holder, BackendError> {
        let request = LeaseTimeToLiveRequest { id: entry.lease };
        let response = self.client.call(request).await.map_err(CallError::into_error)?;
        let remaining = u64::try_from(response.ttl).ok().map(Duration::from_secs);
        Ok(record::decode_holder(key, entry, remaining))
    }

    /// Decodes the entries, each with its key, and fetches the remaining times of their leases.
    /// Returns the holders in the order of their tokens.
    async fn fetch_holders(
        &self,
        entries: &[(Key, KeyValue)],
    ) -> Result<Vec<Holder>, BackendError> {
        let mut holders = Vec::with_capacity(entries.len());
        for batch in entries.chunks(BATCH_MAX) {
            let batch = batch.iter().map(|(key, entry)| self.fetch_holder(key.clone(), entry));
            for holder in join_all(batch).await {
                holders.push(holder?);
            }
        }
        holders.sort_by_key(|holder| holder.token);
        Ok(holders)
    }

    /// Returns the queues of this namespace in the order of their keys, each with its entries in
    /// the order of their creation.
    async fn queues(&self) -> Result<Vec<(Key, Vec<KeyValue>)>, BackendError> {
        // The keys of a queue are contiguous, so one pass over the pages finds all entries of each
        // queue.
        let mut queues: Vec<(Key, Vec<KeyValue>)> = Vec::new();
        let mut start_key = Vec::new();
        loop {
            // Each page reads the current revision, because the members may have compacted the
            // revision of the first page.
            let page = self.range(self.namespace_range(start_key)).await?;
            start_key =
                page.kvs.last().map(|last| [&*last.key, b"\0"].concat()).unwrap_or_default();
            let has_more = page.more && !start_key.is_empty();
            for found in page.kvs {
                // A key with the name of an entry but without a lease belongs to another program.
                let Some(key) = self.names.parse_key(&found.key).filter(|_| found.lease != 0)
                else {
                    continue;
                };
                match queues.last_mut() {
                    Some((last, entries)) if *last == key => entries.push(found),
                    _ => queues.push((key, vec![found])),
                }
            }
            if !has_more {
                break;
            }
        }
        for (_, entries) in &mut queues {
            entries.sort_by_key(|entry| entry.create_revision);
        }
        Ok(queues)
    }

    /// Returns a range request for the keys of this namespace from `start_key` on. An empty
    /// `start_key` requests all keys. The request has no sort order, because members return keys in
    /// order anyway. With a sort order, they would read the whole range for each page.
    fn namespace_range(&self, start_key: Vec<u8>) -> RangeRequest {
        let prefix = self.names.prefix().as_bytes();
        let first_key = if prefix.is_empty() { b"\0" } else { prefix };
        RangeRequest {
            key: if start_key.is_empty() { first_key.to_vec() } else { start_key },
            range_end: prefix_end(prefix),
            limit: PAGE_SIZE,
            ..RangeRequest::default()
        }
    }
}

#[async_trait]
impl LockBackend for EtcdBackend {
    fn capabilities(&self) -> Capabilities {
        self.config.capabilities()
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.names.check_key(key)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.enqueue(claim).await.map_err(|error| self.with_address(error))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut renewals = Vec::with_capacity(claims.len());
        for batch in claims.chunks(BATCH_MAX) {
            let batch = self.renew_batch(batch).await.into_iter();
            renewals.extend(batch.map(|renewed| renewed.map_err(|error| self.with_address(error))));
        }
        renewals
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.remove_entry(claim).await.map_err(|error| self.with_address(error))
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.wait_for_predecessor(claim, busy.seen_version).await;
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.watcher.subscribers().subscribe(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    fn waiters(&self) -> Option<&dyn WaiterStore> {
        Some(self)
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        self.capabilities().values.then_some(self)
    }

    async fn close(&self) {
        if !self.watcher.subscribers().is_empty() {
            // Another registry still uses this backend.
            return;
        }
        self.pool.close().await;
        self.tombstones.close(&self.pool).await;
        self.client.close();
    }
}

#[async_trait]
impl LockAdmin for EtcdBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        let entries = self.range(txn::entries(&self.names.queue_prefix(key))).await?.kvs;
        let granted: Vec<_> =
            modes::granted(entries).into_iter().map(|entry| (key.clone(), entry)).collect();
        self.fetch_holders(&granted).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let granted = self.queues().await?.into_iter().flat_map(|(key, entries)| {
            modes::granted(entries).into_iter().map(move |entry| (key.clone(), entry))
        });
        self.fetch_holders(&granted.collect::<Vec<_>>()).await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        for _ in 0..TRIES_MAX {
            let entries = self.range(txn::entries(&self.names.queue_prefix(key))).await?.kvs;
            let to_delete = modes::granted_or_upgrading(entries);
            if to_delete.is_empty() {
                return Ok(Release::NotHeld);
            }
            let mut freed = false;
            for batch in to_delete.chunks(BATCH_MAX) {
                // This call does not revoke the leases, because another program may hold other
                // locks by the same lease.
                let deletions = batch
                    .iter()
                    .map(|entry| self.execute(txn::delete(&entry.key, entry.create_revision)));
                for deletion in join_all(deletions).await {
                    freed |= deletion.map_err(CallError::into_error)?.succeeded;
                }
            }
            if freed {
                return Ok(Release::Freed);
            }
        }
        Err(BackendError::transient(format!(
            "etcd: the holder of the lock changed during each of {TRIES_MAX} attempts; retry"
        ))
        .with_address(Arc::clone(&self.addresses))
        .as_refused())
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.check_members().await
    }
}

/// The claims that wait are in the queues, so no claim needs a registration.
#[async_trait]
impl WaiterStore for EtcdBackend {
    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError> {
        let queues = match key {
            Some(key) => {
                let entries = txn::entries(&self.names.queue_prefix(key));
                vec![(key.clone(), self.range(entries).await?.kvs)]
            }
            None => self.queues().await?,
        };
        let waiting = queues.into_iter().flat_map(|(key, entries)| {
            modes::waiting(entries).into_iter().map(move |entry| (key.clone(), entry))
        });
        let waiting = self.fetch_holders(&waiting.collect::<Vec<_>>()).await?;
        // The entry of a waiting claim has the same fields as that of a holder.
        let to_waiting = |entry: Holder| {
            WaitingClaim::new(entry.key)
                .with_mode(entry.mode)
                .with_label(entry.label)
                .with_times(entry.held_for, entry.lease_left)
        };
        Ok(waiting.into_iter().map(to_waiting).collect())
    }
}

impl fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The maximum number of operations per transaction, and of concurrent requests. The members'
/// default limit of operations is 128.
const BATCH_MAX: usize = 100;
/// The maximum number of keys per page.
const PAGE_SIZE: i64 = 1_000;
/// The maximum number of attempts for an operation that concurrent changes may invalidate.
pub(crate) const TRIES_MAX: usize = 4;

#[async_trait]
impl OpenBackend for EtcdConfig {
    async fn open(&self) -> Result<Arc<dyn LockBackend>, BackendError> {
        Ok(Arc::new(EtcdBackend::open(self.clone()).await?))
    }
}
