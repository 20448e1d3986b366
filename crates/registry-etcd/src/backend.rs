//! The `LockBackend` implementation. The queue of a lock is in `queue`, renewal is in `renew`.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, Finding, GuaranteeClass, Holder, InvalidKey,
    Invalidations, Key, LockBackend, Reach, Release, Renewal,
};

use crate::claims::Claims;
use crate::config::EtcdConfig;
use crate::ears::Ears;
use crate::error::Failure;
use crate::keep_alive::KeepAlive;
use crate::link::Link;
use crate::names::{Names, end_of};
use crate::pool::Pool;
use crate::record;
use crate::traces::Traces;
use crate::txn::{self, Answer};
use crate::wire::{KeyValue, LeaseTimeToLiveRequest, RangeRequest, RangeResponse, TxnRequest};

/// A lock store on an etcd cluster of version 3.4 or later.
///
/// Each lock has a queue in the cluster, with at most one claim per process and key. The first
/// claim in the queue holds the lock. A release, or the end of the holder's lease, wakes only the
/// next claim. Fencing tokens are the revisions in which the keys were created. They grow over
/// every failure that a majority of the members survives.
///
/// Each claim has its own lease for as long as it lasts. A lock that is no longer renewed is
/// therefore freed independently of the other locks of its process. A later claim reuses the lease
/// of a finished claim, which saves a write. One stream keeps all leases alive, or a few streams if
/// the member is slow. Another stream carries all watches.
///
/// Leases last whole seconds, at least 2. The lease in the cluster is up to 2 s longer than the
/// requested one, and the members check for expired leases every 0.5 s. The lock of a crashed
/// holder is free that long after its lease.
pub struct EtcdBackend {
    pub(crate) config: EtcdConfig,
    pub(crate) names: Names,
    pub(crate) host: String,
    pub(crate) link: Link,
    pub(crate) keep_alive: KeepAlive,
    pub(crate) ears: Ears,
    pub(crate) pool: Pool,
    pub(crate) traces: Traces,
    pub(crate) claims: Claims,
}

impl EtcdBackend {
    /// Connects to a member and logs in.
    ///
    /// # Errors
    /// Returns a [`BackendError`] whose message names the remedy. `Misconfigured`: the
    /// configuration cannot work. `Denied`: the user or password is wrong. `Transient`: no member
    /// can be reached, or the cluster has no leader.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub async fn open(config: EtcdConfig) -> Result<Self, BackendError> {
        let link = Link::new(&config)?;
        let names = Names::new(config.layout, config.namespace());
        let backend = Self {
            host: record::host(),
            keep_alive: KeepAlive::new(link.clone()),
            ears: Ears::new(link.clone()),
            pool: Pool::new(link.clone()),
            traces: Traces::default(),
            claims: Claims::default(),
            link,
            names,
            config,
        };
        backend.try_out().await?;
        Ok(backend)
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.config.namespace()
    }

    /// Reads one key of the namespace. Tries each configured member at most once.
    async fn try_out(&self) -> Result<(), BackendError> {
        let mut tried = 0;
        loop {
            let probe = RangeRequest { limit: 1, ..self.all_names(Vec::new()) };
            tried += 1;
            match self.link.call(probe).await {
                Ok(_) => return Ok(()),
                Err(Failure::Elsewhere(_)) if tried < self.link.members() => {}
                Err(failure) => return Err(failure.into_error()),
            }
        }
    }

    pub(crate) async fn ask(&self, txn: TxnRequest) -> Result<Answer, Failure> {
        let answer = self.link.call(txn).await?;
        Answer::read(answer).map_err(Failure::Trouble)
    }

    pub(crate) async fn range(&self, range: RangeRequest) -> Result<RangeResponse, BackendError> {
        self.link.call(range).await.map_err(Failure::into_error)
    }

    async fn first(&self, key: &Key) -> Result<Option<KeyValue>, BackendError> {
        Ok(self.range(txn::first(&self.names.queue(key))).await?.kvs.into_iter().next())
    }

    /// Returns the holder of `key`, given the first entry of its queue.
    async fn holder(&self, key: Key, first: &KeyValue) -> Result<Holder, BackendError> {
        let asked = LeaseTimeToLiveRequest { id: first.lease };
        let answer = self.link.call(asked).await.map_err(Failure::into_error)?;
        let left = u64::try_from(answer.ttl).ok().map(Duration::from_secs);
        Ok(record::holder(key, first, left))
    }

    /// Returns a range request for the keys of this namespace from `after` on. It requests no sort
    /// order: keys arrive in order anyway, and a sorted request makes the member read all keys for
    /// each page.
    fn all_names(&self, after: Vec<u8>) -> RangeRequest {
        let prefix = self.names.prefix().as_bytes();
        let begin = if prefix.is_empty() { b"\0" } else { prefix };
        RangeRequest {
            key: if after.is_empty() { begin.to_vec() } else { after },
            range_end: end_of(prefix),
            limit: PAGE,
            ..RangeRequest::default()
        }
    }
}

#[async_trait]
impl LockBackend for EtcdBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("etcd", GuaranteeClass::A, Reach::Network)
            .with_fencing()
            .with_fair()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
            .with_leases(LEASE_MIN, Capabilities::LEASE_MAX)
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.names.check(key)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.step_up(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut answers = Vec::with_capacity(claims.len());
        for batch in claims.chunks(BATCH_MAX) {
            answers.extend(self.renew_batch(batch).await);
        }
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.step_down(claim).await
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.stand_by(claim, busy.mark).await;
    }

    fn subscribe_invalidations(&self, hints: Invalidations) {
        self.ears.tell(hints);
    }

    fn verify_after(&self) -> Option<Duration> {
        Some(FIRST_LOOK)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        match self.first(key).await? {
            Some(first) => self.holder(key.clone(), &first).await.map(Some),
            None => Ok(None),
        }
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        // Queues are contiguous, so the first entry of each is found page by page.
        let mut firsts: Vec<(Key, KeyValue)> = Vec::new();
        let mut after = Vec::new();
        loop {
            // Each page reads the current revision: the members may have compacted that of the
            // first page.
            let page = self.range(self.all_names(after)).await?;
            after = page.kvs.last().map(|last| [&*last.key, b"\0"].concat()).unwrap_or_default();
            let more = page.more && !after.is_empty();
            for found in page.kvs {
                // Keys without a lease belong to other programs.
                let Some(key) = self.names.key(&found.key).filter(|_| found.lease != 0) else {
                    continue;
                };
                match firsts.last_mut() {
                    Some((last, first)) if *last == key => {
                        if found.create_revision < first.create_revision {
                            *first = found;
                        }
                    }
                    _ => firsts.push((key, found)),
                }
            }
            if !more {
                break;
            }
        }
        let mut holders = Vec::with_capacity(firsts.len());
        for some in firsts.chunks(BATCH_MAX) {
            let told = some.iter().map(|(key, first)| self.holder(key.clone(), first));
            for holder in join_all(told).await {
                holders.push(holder?);
            }
        }
        Ok(holders)
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        for _ in 0..TRIES {
            let Some(first) = self.first(key).await? else { return Ok(Release::NotHeld) };
            // The lease is not revoked: it may belong to a peer's session that holds other locks.
            let gone = txn::delete(&first.key, first.create_revision);
            if self.ask(gone).await.map_err(Failure::into_error)?.succeeded {
                return Ok(Release::Freed);
            }
        }
        Err(BackendError::transient("etcd: the lock has another holder each time").as_refused())
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.look_for_trouble().await
    }

    async fn close(&self) {
        if self.ears.are_wanted() {
            // Another registry still uses this backend.
            return;
        }
        self.pool.close().await;
        self.traces.close(&self.pool).await;
        self.link.close();
    }
}

impl fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The shortest lease that members grant by default.
const LEASE_MIN: Duration = Duration::from_secs(2);
/// How long a lock is held before the store watches its key for losses. Each watch costs the
/// members resources.
const FIRST_LOOK: Duration = Duration::from_millis(25);
/// The number of operations per transaction. The members' default limit is 128.
const BATCH_MAX: usize = 100;
/// The number of keys per page.
const PAGE: i64 = 1_000;
/// The limit of attempts for an operation that concurrent changes may invalidate.
pub(crate) const TRIES: usize = 4;
