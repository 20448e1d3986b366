//! The queue of a lock: enqueues and dequeues claims, reads the queue, and waits for predecessors.
//! The first entry of a queue holds the lock. `backend` calls this module.
//!
//! A tombstone without its entry shows that the entry was deleted without a release; see
//! `tombstones`.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, ClaimMode, FencingToken, Grant, Moment,
    Queueing, Release,
};
use tokio::time::{Instant, sleep, sleep_until};

use crate::backend::{EtcdBackend, TRIES_MAX};
use crate::claims::{BlockingEntry, ClaimEntry, EntryGuard, UpgradeRequest};
use crate::client::RequestLimits;
use crate::error::{CallError, protocol_error};
use crate::keep_alive::LeaseStatus;
use crate::lease::{EtcdLease, ttl_seconds};
use crate::modes::is_granted;
use crate::proto::{KeyValue, LeaseTimeToLiveRequest, ResponseHeader};
use crate::record::{self, EntryRecord};
use crate::txn::{self, TxnResults};
use crate::watcher::WatchOutcome;

/// The result of one attempt to enqueue a claim or to read its position.
pub(crate) enum QueueStep {
    Done(Attempt),
    /// The queue has changed or the entry is lost. The caller tries again.
    Retry,
}

/// The result of a check of an entry and its predecessor.
enum PredecessorCheck {
    /// The entry and its predecessor still exist. The last `Busy` is still valid.
    Unchanged(Busy),
    /// The caller must read the whole queue.
    MayHaveChanged(BlockingEntry),
}

/// The entries around a waiting claim, from one read of its queue.
struct QueueRead {
    header: ResponseHeader,
    own_entry: Option<KeyValue>,
    predecessor: Option<KeyValue>,
    first_entry: Option<KeyValue>,
    /// The tombstones of earlier entries, and the rewritten tombstone of the old predecessor.
    tombstones: Vec<KeyValue>,
}

impl QueueRead {
    /// Decodes the response to [`txn::read_queue`].
    fn decode(
        mut results: TxnResults,
        old_predecessor: Option<&BlockingEntry>,
    ) -> Result<Self, BackendError> {
        let (own_entry, predecessor) = (results.next_key()?, results.next_key()?);
        let first_entry = results.next_key()?;
        let mut tombstones = results.next_keys_if_any()?;
        let rewritten = old_predecessor
            .map(|predecessor| txn::rewritten_tombstone_value(predecessor.create_revision));
        tombstones.extend(
            results
                .next_keys_if_any()?
                .into_iter()
                .filter(|tombstone| Some(&tombstone.value) == rewritten.as_ref()),
        );
        Ok(Self { header: results.header, own_entry, predecessor, first_entry, tombstones })
    }
}

impl EtcdBackend {
    /// Adds the claim to the queue unless it has an entry. Returns `Granted` if its entry is first
    /// or compatible with all entries before it.
    pub(crate) async fn enqueue(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        if claim.is_conversion() {
            return self.convert(claim).await;
        }
        let mut entry_guard = self.claims.lock_entry(claim).await;
        for _ in 0..TRIES_MAX {
            let step = match &mut *entry_guard {
                Some(entry) if entry.create_revision.is_some() => {
                    self.read_position(claim, &mut entry_guard).await?
                }
                _ => self.create_entry(claim, &mut entry_guard).await?,
            };
            if let QueueStep::Done(attempt) = step {
                return Ok(attempt);
            }
        }
        Err(BackendError::transient(format!(
            "etcd: in each of {TRIES_MAX} attempts, the lease of the claim expired or the queue changed; use longer leases or check the members' load"
        )))
    }

    /// Returns whether a claim that is not granted keeps its queue entry.
    fn keeps_entry(&self, claim: &Claim) -> bool {
        match claim.queueing() {
            Queueing::Join => true,
            Queueing::ExclusiveIntent => {
                self.names.has_modes() && claim.mode() == ClaimMode::Exclusive
            }
            _ => false,
        }
    }

    /// Creates the claim's entry in the queue. An exclusive claim that does not wait joins only an
    /// empty queue.
    async fn create_entry(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
    ) -> Result<QueueStep, BackendError> {
        self.abandon_expired();
        let queue = self.names.queue_prefix(claim.key());
        let mut entry = match entry_guard.take() {
            // An earlier attempt with an unknown outcome may have created this entry.
            Some(entry) => entry,
            None => {
                let ttl_seconds = ttl_seconds(claim.lease());
                ClaimEntry::new(&queue, self.pool.acquire(ttl_seconds).await?, ttl_seconds)
            }
        };
        match self.ensure_lease(claim, &mut entry.lease).await {
            Ok(LeaseStatus::Alive) => {}
            Ok(LeaseStatus::NotFound) => {
                self.abandon(entry);
                // Other leases in the pool have probably ended for the same reason.
                self.pool.clear();
                return Ok(QueueStep::Retry);
            }
            // This attempt has sent no request for the entry, so the error counts as refused.
            Err(error) => {
                return Err(self.on_failed_request(entry_guard, entry, error.as_refused()));
            }
        }
        let tombstone = match self.prepare_tombstone(&queue, &entry).await {
            Ok(tombstone) => tombstone,
            Err(error) => {
                return Err(self.on_failed_request(entry_guard, entry, error.as_refused()));
            }
        };
        if claim.mode() != ClaimMode::Exclusive {
            return self.append_entry(claim, entry_guard, entry, tombstone).await;
        }
        let tombstone_lease = tombstone.as_ref().map(|tombstone| tombstone.lease);
        let record = record::encode(claim, &self.local_host_name);
        let joins_queue = self.keeps_entry(claim);
        let enqueue = if joins_queue { txn::enqueue } else { txn::enqueue_if_empty };
        let enqueue = enqueue(&queue, &entry.name, record, entry.lease.id, tombstone);
        let mut results = match self.execute(enqueue).await {
            Ok(results) => results,
            Err(CallError::LeaseNotFound) => {
                // The members do not know the entry's lease or the tombstone's lease. An earlier
                // request may still create the entry until the background task has revoked the
                // entry's lease.
                self.abandon(entry);
                self.pool.clear();
                tombstone_lease.into_iter().for_each(|lease| self.tombstones.remove(lease));
                return Ok(QueueStep::Retry);
            }
            Err(failure) => {
                return Err(self.on_failed_request(entry_guard, entry, failure.into_error()));
            }
        };
        entry.lease.record_majority_response(results.header.raft_term);
        let revision = results.header.revision;
        if !results.succeeded {
            return self.on_entry_not_created(claim, entry_guard, entry, results).await;
        }
        entry.create_revision = Some(revision);
        entry.tombstone_lease = tombstone_lease;
        results.skip()?;
        if joins_queue {
            let predecessor =
                results.next_keys()?.into_iter().find(|other| other.key != entry.name);
            entry.predecessor =
                predecessor.map(|predecessor| BlockingEntry::new(predecessor, revision));
        }
        let tombstones = results.next_keys_if_any()?;
        if entry.predecessor.is_none() && self.has_tombstone_of_other_entry(&entry, &tombstones) {
            return Ok(self.delay_grant(entry_guard, entry, tombstones).await);
        }
        self.grant_or_busy(claim, entry_guard, entry, None)
    }

    /// Decides on a claim whose entry was not created, because the claim has an entry already or
    /// the queue is not empty.
    async fn on_entry_not_created(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        mut results: TxnResults,
    ) -> Result<QueueStep, BackendError> {
        let (own_entry, first_entry) = (results.next_key()?, results.next_key()?);
        if let Some(own_entry) = own_entry {
            if !record::belongs_to(&own_entry, claim.id()) {
                // The name of an entry contains the id of its lease. Another client has chosen the
                // same id, so the entry of this name belongs to that client.
                self.abandon(entry);
                return Ok(QueueStep::Retry);
            }
            entry.create_revision = Some(own_entry.create_revision);
            **entry_guard = Some(entry);
            return Ok(QueueStep::Retry);
        }
        let Some(first_entry) = first_entry else { return Err(protocol_error()) };
        self.recycle_unused_entry(entry_guard, entry);
        if record::belongs_to(&first_entry, claim.id()) {
            return self.adopt_entry(claim, entry_guard, first_entry).await;
        }
        Ok(QueueStep::Done(Attempt::Busy(
            busy_with_holder(claim, &first_entry).with_seen_version(version_of(&first_entry)),
        )))
    }

    /// Reads the position of an existing entry. Returns `Retry` if the entry no longer exists with
    /// its creation revision.
    async fn read_position(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
    ) -> Result<QueueStep, BackendError> {
        if let Some(busy) = entry_guard.as_ref().and_then(|entry| entry.cached_busy(Moment::now()))
        {
            return Ok(QueueStep::Done(Attempt::Busy(busy)));
        }
        let (Some(mut entry), queue) = (entry_guard.take(), self.names.queue_prefix(claim.key()))
        else {
            return Ok(QueueStep::Retry);
        };
        let create_revision = entry.create_revision.unwrap_or_default();
        match self.ensure_lease(claim, &mut entry.lease).await {
            Ok(LeaseStatus::Alive) => {}
            Ok(LeaseStatus::NotFound) => {
                // The next entry may already hold the lock. The claim must therefore join the end
                // of the queue.
                self.abandon(entry);
                return Ok(QueueStep::Retry);
            }
            Err(error) => {
                **entry_guard = Some(entry);
                return Err(error.as_unknown());
            }
        }
        if claim.mode() != ClaimMode::Exclusive {
            return self.read_position_non_exclusive(claim, entry_guard, entry).await;
        }
        let mut old_predecessor = match entry.predecessor.take() {
            Some(predecessor) => match self.check_predecessor(&mut entry, predecessor).await {
                Ok(PredecessorCheck::Unchanged(busy)) => {
                    **entry_guard = Some(entry);
                    return Ok(QueueStep::Done(Attempt::Busy(busy)));
                }
                Ok(PredecessorCheck::MayHaveChanged(predecessor)) => Some(predecessor),
                Err(error) => {
                    **entry_guard = Some(entry);
                    return Err(error.as_unknown());
                }
            },
            None => None,
        };
        let tombstone_prefix = self.names.tombstone_prefix(&queue);
        // The search finds only tombstones that are older than this entry. The predecessor's
        // tombstone may have been rewritten later, so the transaction also reads it by name.
        let predecessor_tombstone = old_predecessor
            .as_ref()
            .and_then(|predecessor| self.names.tombstone_name(&predecessor.name));
        let request = txn::read_queue(
            &queue,
            &entry.name,
            create_revision,
            tombstone_prefix.as_deref(),
            predecessor_tombstone.as_deref(),
        );
        let response = self.execute(request);
        let (results, was_released) = match &old_predecessor {
            // The predecessor was deleted, so the entry may be first now. The grant then needs both
            // responses, so the two requests run concurrently.
            Some(predecessor) if predecessor.is_deleted => {
                join(response, self.was_released(predecessor)).await
            }
            _ => (response.await, false),
        };
        let read = results.and_then(|results| {
            QueueRead::decode(results, old_predecessor.as_ref()).map_err(CallError::Other)
        });
        let read = match read {
            Ok(read) => read,
            Err(failure) => {
                entry.predecessor = old_predecessor;
                **entry_guard = Some(entry);
                return Err(failure.into_error().as_unknown());
            }
        };
        entry.lease.record_majority_response(read.header.raft_term);
        let Some(own_entry) = read.own_entry.filter(|own| own.create_revision == create_revision)
        else {
            self.abandon(entry);
            return Ok(QueueStep::Retry);
        };
        if let Some(predecessor) = read.predecessor {
            let predecessor = BlockingEntry::new(predecessor, read.header.revision);
            entry.predecessor = Some(predecessor.with_watch_from(old_predecessor.as_mut()));
            return self.grant_or_busy(claim, entry_guard, entry, read.first_entry.as_ref());
        }
        if entry.lease.remaining() < claim.lease() / 2 {
            // The last extension of the entry's lease does not count, because the leader has
            // changed since. The next attempt extends the lease again.
            entry.predecessor = old_predecessor;
            **entry_guard = Some(entry);
            return Ok(QueueStep::Retry);
        }
        let unreleased = old_predecessor.filter(|_| !was_released);
        self.grant_first_entry(claim, entry_guard, entry, unreleased, &own_entry, read.tombstones)
            .await
    }

    /// Grants a claim whose entry is first. If its predecessor or another entry was deleted without
    /// a release, the grant is delayed. `unreleased` is the predecessor, unless its release is
    /// already known.
    async fn grant_first_entry(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        unreleased: Option<BlockingEntry>,
        own_entry: &KeyValue,
        tombstones: Vec<KeyValue>,
    ) -> Result<QueueStep, BackendError> {
        let was_lost = match unreleased {
            Some(predecessor) => predecessor.is_deleted || !self.was_released(&predecessor).await,
            None => false,
        };
        let needs_delay = match entry.delayed_since {
            Some(since) => Moment::now().since(since) < GRANT_DELAY,
            None => was_lost || self.has_tombstone_of_other_entry(&entry, &tombstones),
        };
        if needs_delay {
            return Ok(self.delay_grant(entry_guard, entry, tombstones).await);
        }
        let record = EntryRecord::of(own_entry);
        if record.needs_token() {
            return self.take_token(entry_guard, entry, own_entry, ClaimMode::Exclusive).await;
        }
        entry.token_override =
            Some(record.token).filter(|token| Some(*token) != entry.create_revision);
        self.grant_or_busy(claim, entry_guard, entry, None)
    }

    /// Checks whether the entry and its `predecessor` still exist with their creation revisions.
    async fn check_predecessor(
        &self,
        entry: &mut ClaimEntry,
        predecessor: BlockingEntry,
    ) -> Result<PredecessorCheck, BackendError> {
        let is_recent = |(_, at): &&(Busy, Moment)| Moment::now().since(*at) < QUEUE_READ_INTERVAL;
        let Some((busy, _)) =
            predecessor.last_busy.as_ref().filter(is_recent).filter(|_| !predecessor.is_deleted)
        else {
            return Ok(PredecessorCheck::MayHaveChanged(predecessor));
        };
        let (busy, read) =
            (busy.clone(), txn::read_entry_and_predecessor(&entry.name, &predecessor.name));
        let mut results = match self.execute(read).await {
            Ok(results) => results,
            Err(failure) => {
                entry.predecessor = Some(predecessor);
                return Err(failure.into_error());
            }
        };
        let (found_entry, found_predecessor) = (results.next_key()?, results.next_key()?);
        let is_same = |found: Option<KeyValue>, create_revision| {
            found.is_some_and(|found| found.create_revision == create_revision)
        };
        if !is_same(found_entry, entry.create_revision.unwrap_or_default())
            || !is_same(found_predecessor, predecessor.create_revision)
        {
            return Ok(PredecessorCheck::MayHaveChanged(predecessor));
        }
        entry.lease.record_majority_response(results.header.raft_term);
        entry.predecessor =
            Some(BlockingEntry { last_seen_revision: results.header.revision, ..predecessor });
        Ok(PredecessorCheck::Unchanged(busy))
    }

    /// Prepares the `Put` request of the tombstone of an entry that is not in the queue yet.
    async fn prepare_tombstone(
        &self,
        queue: &[u8],
        entry: &ClaimEntry,
    ) -> Result<Option<txn::TombstonePut>, BackendError> {
        let names = (
            self.names.tombstone_name(&entry.name),
            self.names.tombstone_prefix(queue),
            entry.ttl_seconds,
        );
        let (Some(name), Some(prefix), Some(ttl_seconds)) = names else { return Ok(None) };
        let lease =
            self.tombstones.find_or_grant(ttl_seconds, &self.pool, &self.keep_alive).await?;
        Ok(Some(txn::TombstonePut { name, lease, prefix }))
    }

    /// Returns whether any of these tombstones belongs to another entry.
    fn has_tombstone_of_other_entry(&self, entry: &ClaimEntry, tombstones: &[KeyValue]) -> bool {
        let own_tombstone = self.names.tombstone_name(&entry.name);
        tombstones.iter().any(|tombstone| own_tombstone.as_ref() != Some(&tombstone.key))
    }

    /// Waits for `GRANT_DELAY` before the caller reads the queue again. No entry blocks this entry
    /// now. An earlier entry was deleted without a release, and its holder needs time to detect the
    /// loss. If the earlier entry's lease expired, its holder detected the loss before the expiry.
    /// The delay applies then too, because the cluster does not show why the entry was deleted.
    pub(crate) async fn delay_grant(
        &self,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        mut tombstones: Vec<KeyValue>,
    ) -> QueueStep {
        let own_tombstone = self.names.tombstone_name(&entry.name);
        tombstones.retain(|tombstone| own_tombstone.as_ref() != Some(&tombstone.key));
        let since = *entry.delayed_since.get_or_insert_with(Moment::now);
        // The entry keeps the start of the delay. A caller that was cancelled and calls again waits
        // only for the rest of the delay.
        **entry_guard = Some(entry);
        sleep(GRANT_DELAY.saturating_sub(Moment::now().since(since))).await;
        for tombstone in tombstones {
            self.pool.delete_tombstone_later(tombstone.key, tombstone.create_revision);
        }
        QueueStep::Retry
    }

    async fn is_lease_alive(&self, lease: i64) -> bool {
        let request = LeaseTimeToLiveRequest { id: lease };
        matches!(self.client.call(request).await, Ok(response) if response.ttl > 0)
    }

    /// Returns whether the deleted predecessor released its lock. A layout with tombstones detects
    /// losses by tombstones, so this function then always returns true.
    ///
    /// Without tombstones, the predecessor's lease decides. A forced release by this library keeps
    /// the lease, and an ordinary release usually does. An entry whose lease exists therefore
    /// counts as released. Without the lease, the entry counts as lost. Other programs revoke the
    /// lease on release, so a missing lease does not show a loss of their entries. Each deletion of
    /// their entries therefore counts as a release.
    async fn was_released(&self, predecessor: &BlockingEntry) -> bool {
        if !predecessor.has_record || self.names.has_tombstones() {
            return true;
        }
        self.is_lease_alive(predecessor.lease).await
    }

    /// Returns `Granted` if the entry has no predecessor, otherwise `Busy`. Caches the entry.
    fn grant_or_busy(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        first_entry: Option<&KeyValue>,
    ) -> Result<QueueStep, BackendError> {
        let attempt = match &mut entry.predecessor {
            None => {
                entry.is_granted = true;
                let lease = entry.lease.remaining().min(claim.lease());
                let token = entry.token_override.or(entry.create_revision);
                let token = fencing_token(token.unwrap_or(-1));
                token.map(|token| Attempt::Granted(Grant::new(token, lease)))
            }
            Some(predecessor) => {
                let busy = first_entry
                    .map_or_else(Busy::new, |first_entry| busy_with_holder(claim, first_entry));
                let version = u64::try_from(predecessor.create_revision).unwrap_or(0);
                let busy = busy.with_queue_entry().with_seen_version(version);
                predecessor.last_busy = first_entry.map(|_| (busy.clone(), Moment::now()));
                Ok(Attempt::Busy(busy))
            }
        };
        **entry_guard = Some(entry);
        attempt.map(QueueStep::Done)
    }

    /// Adopts the entry that another client created for the same claim.
    async fn adopt_entry(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        first_entry: KeyValue,
    ) -> Result<QueueStep, BackendError> {
        **entry_guard =
            Some(ClaimEntry { is_granted: true, ..ClaimEntry::from_key_value(first_entry) });
        self.read_position(claim, entry_guard).await
    }

    /// Extends the etcd lease if its remaining time is shorter than the claim's lease.
    pub(crate) async fn ensure_lease(
        &self,
        claim: &Claim,
        lease: &mut EtcdLease,
    ) -> Result<LeaseStatus, BackendError> {
        if lease.remaining() >= claim.lease() {
            return Ok(LeaseStatus::Alive);
        }
        let response_timeout = self.client.response_timeout();
        let limits = RequestLimits { idle_timeout: response_timeout, total: response_timeout };
        self.keep_alive.extend(lease, limits).await
    }

    /// Revokes an entry's lease, if this client created the lease, and the lease of its upgrade
    /// request. Also deletes the entry's tombstone. All of this runs in the background.
    pub(crate) fn abandon(&self, entry: ClaimEntry) {
        if let Some(upgrade) = &entry.upgrade {
            self.pool.revoke_later(upgrade.lease.id);
        }
        if entry.ttl_seconds.is_some() {
            self.pool.revoke_later(entry.lease.id);
        }
        if let Some(tombstone) = self.names.tombstone_name(&entry.name) {
            self.pool.delete_tombstone_of_lost_entry_later(tombstone);
        }
    }

    /// Abandons the entries whose leases the engine no longer extends. Their tombstones are then
    /// deleted before the tombstone lease expires.
    fn abandon_expired(&self) {
        let expired = self.claims.take_expired().into_iter();
        // Only the client that created a lease ends the lease.
        expired.filter(|entry| entry.ttl_seconds.is_some()).for_each(|entry| self.abandon(entry));
    }

    /// Handles a failed request. Caches the entry if a request for it may have taken effect.
    /// Otherwise returns the entry's lease to the pool.
    pub(crate) fn on_failed_request(
        &self,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        error: BackendError,
    ) -> BackendError {
        if !error.refused() {
            entry.must_not_recycle = true;
        }
        if entry.must_not_recycle {
            **entry_guard = Some(entry);
            return error.as_unknown();
        }
        self.recycle_lease(entry);
        error
    }

    /// Puts the lease of an entry that was not created back into the pool. Caches the entry instead
    /// if an earlier request may still create it.
    pub(crate) fn recycle_unused_entry(&self, entry_guard: &mut EntryGuard<'_>, entry: ClaimEntry) {
        if entry.must_not_recycle {
            **entry_guard = Some(entry);
        } else {
            self.recycle_lease(entry);
        }
    }

    /// Puts an entry's lease back into the pool. Abandons the entry instead if its lease must not
    /// be reused, or if another client created the lease.
    pub(crate) fn recycle_lease(&self, entry: ClaimEntry) {
        if let Some(upgrade) = &entry.upgrade {
            self.pool.revoke_later(upgrade.lease.id);
        }
        match entry.ttl_seconds {
            Some(ttl_seconds) if !entry.must_not_recycle => {
                self.pool.release(ttl_seconds, entry.lease)
            }
            _ => self.abandon(entry),
        }
    }

    /// Removes the claim's entry from the queue.
    pub(crate) async fn remove_entry(&self, claim: &Claim) -> Result<Release, BackendError> {
        let mut entry_guard = self.claims.lock_entry(claim).await;
        let is_cached = entry_guard.as_ref().is_some_and(|entry| entry.create_revision.is_some());
        if !is_cached {
            return self.dequeue_uncached(claim, &mut entry_guard).await;
        }
        let Some(entry) = &mut *entry_guard else { return Ok(Release::NotHeld) };
        // Dropping the watch first prevents a loss notification for this release.
        entry.own_watch = None;
        let (create_revision, queue) =
            (entry.create_revision.unwrap_or_default(), self.names.queue_prefix(claim.key()));
        let tombstone = self.names.tombstone_name(&entry.name);
        let is_exclusive = claim.mode() == ClaimMode::Exclusive;
        let (name, tombstone) = (&entry.name, tombstone.as_deref());
        let remove_entry = if entry.is_granted {
            txn::delete_with_tombstone(name, create_revision, tombstone)
        } else if is_exclusive {
            txn::dequeue_exclusive(&queue, name, create_revision, tombstone)
        } else {
            txn::dequeue_non_exclusive(&queue, name, create_revision, tombstone)
        };
        let remove_entry = match &entry.upgrade {
            Some(upgrade) => txn::with_deletion(remove_entry, &upgrade.name),
            None => remove_entry,
        };
        let mut results = match self.execute(remove_entry).await.map_err(CallError::into_error) {
            Ok(results) => results,
            Err(error) => {
                // The request may arrive after a repeated one, and would then delete the tombstone
                // of the next entry with the same lease.
                entry.must_not_recycle |= !error.refused();
                return Err(error);
            }
        };
        let was_granted = results.succeeded
            && (entry.is_granted
                || if is_exclusive {
                    results.next_key()?.is_none()
                } else {
                    is_granted(&results.next_keys()?, name)
                });
        if let Some(entry) = entry_guard.take() {
            self.recycle_lease(entry);
        }
        Ok(if was_granted { Release::Freed } else { Release::NotHeld })
    }

    /// Removes from the queue a claim's entry whose creation revision is not in the cache.
    async fn dequeue_uncached(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
    ) -> Result<Release, BackendError> {
        let was_freed = match self.find_entry(claim).await? {
            Some(found) => {
                let create_revision = found.create_revision.unwrap_or_default();
                let tombstone = self.names.tombstone_name(&found.name);
                let deletion =
                    txn::delete_with_tombstone(&found.name, create_revision, tombstone.as_deref());
                let deletion = match &found.upgrade {
                    Some(upgrade) => txn::with_deletion(deletion, &upgrade.name),
                    None => deletion,
                };
                let deletion = self.execute(deletion).await;
                deletion.map_err(CallError::into_error)?.succeeded && found.is_granted
            }
            None => false,
        };
        if let Some(entry) = &**entry_guard {
            // After the revocation, the members reject an earlier request for the entry that
            // arrives late.
            self.pool.revoke(entry.lease.id).await.map_err(BackendError::as_unknown)?;
            if let Some(entry) = entry_guard.take() {
                self.abandon(entry);
            }
        }
        Ok(if was_freed { Release::Freed } else { Release::NotHeld })
    }

    /// Searches the queue for the claim's entry.
    pub(crate) async fn find_entry(
        &self,
        claim: &Claim,
    ) -> Result<Option<ClaimEntry>, BackendError> {
        let all = self.range(txn::entries(&self.names.queue_prefix(claim.key()))).await?.kvs;
        let Some(found) = all.iter().find(|entry| record::belongs_to(entry, claim.id())) else {
            return Ok(None);
        };
        let is_granted = is_granted(&all, &found.key);
        let is_request = |entry: &&KeyValue| EntryRecord::of(entry).is_request_of(claim.id());
        let upgrade = all.iter().find(is_request).cloned().map(UpgradeRequest::from_key_value);
        Ok(Some(ClaimEntry { is_granted, upgrade, ..ClaimEntry::from_key_value(found.clone()) }))
    }

    /// Returns the name and the creation revision of the claim's entry, if the claim has this
    /// token.
    pub(crate) async fn find_entry_with_token(
        &self,
        claim: &Claim,
        token: i64,
    ) -> Result<Option<(Vec<u8>, i64)>, BackendError> {
        let grant = |entry: &ClaimEntry| {
            let create_revision = entry.create_revision?;
            let is_granted = entry.token_override.unwrap_or(create_revision) == token;
            is_granted.then(|| (entry.name.clone(), create_revision))
        };
        let cached = self.claims.lock_entry(claim).await.as_ref().and_then(grant);
        if cached.is_some() {
            return Ok(cached);
        }
        Ok(self.find_entry(claim).await?.as_ref().and_then(grant))
    }

    /// Waits until the predecessor of the claim is deleted or changed, or its watch fails. Keeps
    /// the lease of a queued claim alive meanwhile, and also returns if the member does not know
    /// this lease. `predecessor_revision` is the creation revision of the predecessor.
    pub(crate) async fn wait_for_predecessor(&self, claim: &Claim, predecessor_revision: u64) {
        let cached = {
            let mut entry_guard = self.claims.lock_entry(claim).await;
            entry_guard.as_mut().and_then(|entry| {
                let (predecessor, lease) = entry.predecessor_and_lease(claim)?;
                // The predecessor keeps its watch, so the next wait does not create another watch.
                let watch =
                    predecessor.watch.take_if(|watch| watch.is_active() || watch.is_deleted());
                let queue = self.names.queue_prefix(claim.key());
                let watch = watch.unwrap_or_else(|| predecessor.create_watch(&self.watcher, queue));
                let outcome = predecessor.watch.insert(watch).wait_for_outcome();
                let interval = extension_interval(lease.ttl());
                let since = Moment::now().since(lease.last_extended());
                Some((outcome, interval, interval.saturating_sub(since)))
            })
        };
        let (outcome, _watch, interval, mut extend_at) = match cached {
            Some((outcome, interval, first_delay)) => {
                (outcome, None, Some(interval), Some(Instant::now() + first_delay))
            }
            None => match self.find_predecessor(claim, predecessor_revision).await {
                Ok(Some(predecessor)) => {
                    let queue = self.names.queue_prefix(claim.key());
                    let watch = predecessor.create_watch(&self.watcher, queue);
                    (watch.wait_for_outcome(), Some(watch), None, None)
                }
                Ok(None) => return,
                Err(_) => return sleep(RETRY_PAUSE).await,
            },
        };
        let mut outcome = pin!(outcome);
        loop {
            let timer = async {
                match extend_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                outcome = &mut outcome => {
                    if outcome == WatchOutcome::Changed {
                        return;
                    }
                    if outcome != WatchOutcome::Deleted {
                        // The caller then reads the queue again. The pause limits the rate of
                        // reads.
                        return sleep(RETRY_PAUSE).await;
                    }
                    if let Some(entry) = &mut *self.claims.lock_entry(claim).await
                        && let Some((predecessor, _)) = entry.predecessor_and_lease(claim)
                    {
                        predecessor.is_deleted = true;
                    }
                    return;
                }
                () = timer => {}
            }
            let interval = interval.unwrap_or(EXTENSION_INTERVAL_MIN);
            let next = match self.extend_waiter_lease(claim, interval / 4).await {
                Ok(LeaseStatus::Alive) => interval,
                // The entry may be lost, so the caller must read the queue.
                Ok(LeaseStatus::NotFound) => return,
                Err(_) => (interval / 8).max(EXTENSION_RETRY_MIN),
            };
            extend_at = Some(Instant::now() + next);
        }
    }

    /// Returns the entry that a claim without an entry waits for. An exclusive claim waits for the
    /// entry that was created in the revision `create_revision`. A claim of another mode waits for
    /// the entry that blocks it now.
    async fn find_predecessor(
        &self,
        claim: &Claim,
        create_revision: u64,
    ) -> Result<Option<BlockingEntry>, BackendError> {
        if claim.mode() != ClaimMode::Exclusive {
            return self.find_blocking_entry(claim).await;
        }
        let create_revision = i64::try_from(create_revision).unwrap_or(0);
        let found = self
            .range(txn::entry_created_in(&self.names.queue_prefix(claim.key()), create_revision))
            .await?;
        let revision = found.header.ok_or_else(protocol_error)?.revision;
        Ok(found.kvs.into_iter().next().map(|found| BlockingEntry::new(found, revision)))
    }

    /// Extends the lease of a waiter.
    async fn extend_waiter_lease(
        &self,
        claim: &Claim,
        limit: Duration,
    ) -> Result<LeaseStatus, BackendError> {
        let mut entry_guard = self.claims.lock_entry(claim).await;
        let Some(entry) = &mut *entry_guard else { return Ok(LeaseStatus::NotFound) };
        let limit = self.client.response_timeout().min(limit.max(EXTENSION_INTERVAL_MIN));
        self.find_and_extend_tombstone_lease(entry.ttl_seconds);
        let limits = RequestLimits { idle_timeout: limit, total: limit };
        let Some((predecessor, lease)) = entry.predecessor_and_lease(claim) else {
            return Ok(LeaseStatus::NotFound);
        };
        let status = self.keep_alive.extend(lease, limits).await?;
        if status == LeaseStatus::NotFound {
            // The next attempt must not return the cached `Busy`.
            predecessor.last_busy = None;
        }
        Ok(status)
    }

    /// Returns the tombstone lease for entries whose own leases last `ttl_seconds`, if that
    /// tombstone lease exists. Requests its extension if the extension is due.
    pub(crate) fn find_and_extend_tombstone_lease(&self, ttl_seconds: Option<i64>) -> Option<i64> {
        self.abandon_expired();
        ttl_seconds
            .and_then(|ttl_seconds| self.tombstones.find_and_extend(ttl_seconds, &self.keep_alive))
    }
}

/// Converts a revision to a fencing token.
pub(crate) fn fencing_token(revision: i64) -> Result<FencingToken, BackendError> {
    FencingToken::try_from(revision).map_err(|_| {
        let message = format!(
            "etcd: the member returned the revision {revision}, which is not a valid fencing token"
        );
        BackendError::new(BackendErrorKind::Protocol, message)
    })
}

pub(crate) fn busy_with_holder(claim: &Claim, first_entry: &KeyValue) -> Busy {
    Busy::new().with_holder(record::decode_holder(claim.key().clone(), first_entry, None))
}

/// Returns the [`Busy::seen_version`] of a claim that waits for `entry`: the creation revision of
/// `entry`.
pub(crate) fn version_of(entry: &KeyValue) -> u64 {
    u64::try_from(entry.create_revision).unwrap_or(0)
}

/// Returns the interval at which a waiter extends its lease. The interval leaves time for retries.
/// It is otherwise as long as possible, because the cluster handles the extensions of all waiters.
fn extension_interval(ttl: Duration) -> Duration {
    // A member may report any duration. Multiplying first could overflow.
    (ttl / 4 * 3)
        .min(ttl.saturating_sub(RETRY_TIME_MIN))
        .max(ttl / 3)
        .clamp(EXTENSION_INTERVAL_MIN, EXTENSION_INTERVAL_MAX)
}

/// The time for retries that an extension leaves before the end of the lease. Short leases leave
/// less time.
const RETRY_TIME_MIN: Duration = Duration::from_secs(5);
/// The minimum pause before a waiter repeats a failed extension.
const EXTENSION_RETRY_MIN: Duration = Duration::from_millis(100);
/// The minimum interval at which a waiter extends its lease.
const EXTENSION_INTERVAL_MIN: Duration = Duration::from_millis(500);
/// The maximum interval, regardless of how long the reported lease lasts.
const EXTENSION_INTERVAL_MAX: Duration = Duration::from_secs(60 * 60);
/// The delay of the next grant after a holder's entry was deleted without a release. The holder
/// detects the loss in this time. The backend starts to watch a lock 25 ms after its grant. The
/// delay is ten times as long, because a busy machine responds slowly. A released lock is granted
/// without this delay.
pub(crate) const GRANT_DELAY: Duration = Duration::from_millis(250);
/// The interval at which a waiter without an established watch reads the whole queue. In between,
/// it reads only its entry and its predecessor, unless these have changed. The reads of the whole
/// queue only update the holder that `Busy` reports.
const QUEUE_READ_INTERVAL: Duration = Duration::from_secs(10);
/// The pause before the next read of the queue after a watch or a request has failed.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_extends_its_lease_in_time_whatever_its_duration() {
        for (ttl, interval) in [(0, 500), (3_000, 1_000), (31_000, 23_250)] {
            let interval = Duration::from_millis(interval);
            assert_eq!(extension_interval(Duration::from_millis(ttl)), interval, "{ttl} ms");
        }
        assert_eq!(extension_interval(Duration::MAX), EXTENSION_INTERVAL_MAX);
    }
}
