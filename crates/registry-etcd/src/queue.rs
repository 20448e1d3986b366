//! The queue of a lock, whose first entry holds the lock. Enqueues and dequeues claims, reads the
//! queue, and waits for predecessors. Called by the `LockBackend` implementation.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, FencingToken, Grant, Moment, Release,
};
use tokio::time::{Instant, sleep, sleep_until};

use crate::backend::{ATTEMPTS_MAX, EtcdBackend};
use crate::claims::{ClaimEntry, EntryGuard, Predecessor};
use crate::client::RequestLimits;
use crate::error::{CallError, protocol_error};
use crate::keep_alive::LeaseStatus;
use crate::lease::{EtcdLease, ttl_seconds};
use crate::proto::{KeyValue, LeaseTimeToLiveRequest};
use crate::record;
use crate::txn;
use crate::watcher::WatchOutcome;

/// The result of one read of the queue.
enum QueueStep {
    Done(Attempt),
    /// The queue has changed or the entry is lost: try again.
    Retry,
}

/// The result of a check of an entry and its predecessor.
enum PredecessorCheck {
    /// The last `Busy` is still valid.
    Unchanged(Busy),
    /// The caller must read the whole queue.
    MayHaveChanged(Predecessor),
}

impl EtcdBackend {
    /// Adds the claim to the queue unless it has an entry, and returns whether that entry is first.
    pub(crate) async fn enqueue(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mut entry_guard = self.claims.lock_entry(claim).await;
        for _ in 0..ATTEMPTS_MAX {
            let step = match &mut *entry_guard {
                Some(entry) if entry.create_revision.is_some() => {
                    self.poll_entry(claim, &mut entry_guard).await?
                }
                _ => self.enter_queue(claim, &mut entry_guard).await?,
            };
            if let QueueStep::Done(attempt) = step {
                return Ok(attempt);
            }
        }
        Err(BackendError::transient(format!(
            "etcd: in {ATTEMPTS_MAX} attempts, the leases expired before they were used; use longer leases or check the members' load"
        )))
    }

    /// Joins the queue. A claim that does not wait joins only an empty queue.
    async fn enter_queue(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
    ) -> Result<QueueStep, BackendError> {
        self.abandon_expired();
        let queue = self.names.queue(claim.key());
        let mut entry = match entry_guard.take() {
            // The entry of an attempt with an unknown outcome.
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
                return Ok(QueueStep::Retry);
            }
            // This call has sent no request for the entry.
            Err(error) => {
                return Err(self.on_failed_request(entry_guard, entry, error.as_refused()));
            }
        }
        let tombstone = match self.new_tombstone(&queue, &entry).await {
            Ok(tombstone) => tombstone,
            Err(error) => {
                return Err(self.on_failed_request(entry_guard, entry, error.as_refused()));
            }
        };
        let tombstone_lease = tombstone.as_ref().map(|tombstone| tombstone.lease);
        let record = record::encode(claim, &self.host);
        let enqueue = if claim.joins_queue() { txn::enqueue } else { txn::enqueue_if_empty };
        let enqueue = enqueue(&queue, &entry.name, record, entry.lease.id, tombstone);
        let mut results = match self.execute(enqueue).await {
            Ok(results) => results,
            Err(CallError::LeaseNotFound) => {
                // The missing lease may be the tombstone's. The entry's lease is revoked in the
                // background; until then, an earlier request may still create the entry.
                self.abandon(entry);
                self.pool.clear();
                tombstone_lease.into_iter().for_each(|lease| self.tombstones.remove(lease));
                return Ok(QueueStep::Retry);
            }
            Err(failure) => {
                return Err(self.on_failed_request(entry_guard, entry, failure.into_error()));
            }
        };
        entry.lease.confirm(results.header.raft_term);
        let revision = results.header.revision;
        if results.succeeded {
            entry.create_revision = Some(revision);
            entry.tombstone_lease = tombstone_lease;
            results.skip()?;
            if claim.joins_queue() {
                let predecessor =
                    results.next_keys()?.into_iter().find(|other| other.key != entry.name);
                entry.predecessor =
                    predecessor.map(|predecessor| Predecessor::new(predecessor, revision));
            }
            let tombstones = results.next_keys_if_any()?;
            if entry.predecessor.is_none() && self.has_other_tombstone(&entry, &tombstones) {
                return Ok(self.delay_grant(entry_guard, entry, tombstones).await);
            }
            return self.grant_or_busy(claim, entry_guard, entry, None);
        }
        let (own, first) = (results.next_key()?, results.next_key()?);
        if let Some(own) = own {
            if !record::belongs_to(&own.value, claim.id()) {
                // Another client has chosen the same lease number.
                self.abandon(entry);
                return Ok(QueueStep::Retry);
            }
            entry.create_revision = Some(own.create_revision);
            **entry_guard = Some(entry);
            return Ok(QueueStep::Retry);
        }
        let Some(first) = first else { return Err(protocol_error()) };
        self.discard_unused(entry_guard, entry);
        if record::belongs_to(&first.value, claim.id()) {
            return self.adopt(claim, entry_guard, first).await;
        }
        Ok(QueueStep::Done(Attempt::Busy(busy(claim, &first).with_mark(mark(&first)))))
    }

    /// Reads the queue for an existing entry. Verifies first that the entry still exists with the
    /// same revision.
    async fn poll_entry(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
    ) -> Result<QueueStep, BackendError> {
        if let Some(busy) = entry_guard.as_ref().and_then(|entry| entry.cached_busy(Moment::now()))
        {
            return Ok(QueueStep::Done(Attempt::Busy(busy)));
        }
        let (Some(mut entry), queue) = (entry_guard.take(), self.names.queue(claim.key())) else {
            return Ok(QueueStep::Retry);
        };
        let create_revision = entry.create_revision.unwrap_or_default();
        match self.ensure_lease(claim, &mut entry.lease).await {
            Ok(LeaseStatus::Alive) => {}
            Ok(LeaseStatus::NotFound) => {
                // The next entry may hold the lock by now, so the claim must enqueue behind it.
                self.abandon(entry);
                return Ok(QueueStep::Retry);
            }
            Err(error) => {
                **entry_guard = Some(entry);
                return Err(error.as_unknown());
            }
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
        let tombstones = self.names.tombstone_prefix(&queue);
        // A rewritten tombstone is younger than the entries behind its own entry. The search by
        // revision misses it, so it is also read by name.
        let tombstone = old_predecessor
            .as_ref()
            .and_then(|predecessor| self.names.tombstone(&predecessor.name));
        let read = txn::read_queue(
            &queue,
            &entry.name,
            create_revision,
            tombstones.as_deref(),
            tombstone.as_deref(),
        );
        let read = self.execute(read);
        let (results, was_released) = match &old_predecessor {
            // This entry is probably first now, so both requests run concurrently.
            Some(predecessor) if predecessor.is_deleted => {
                join(read, self.was_released(predecessor)).await
            }
            _ => (read.await, false),
        };
        let results = results.and_then(|mut results| {
            let found = (
                results.next_key(),
                results.next_key(),
                results.next_key(),
                results.next_keys_if_any(),
            );
            let (Ok(own), Ok(predecessor), Ok(first), Ok(mut tombstones)) = found else {
                return Err(CallError::Other(protocol_error()));
            };
            let rewritten_candidates =
                results.next_keys_if_any().map_err(CallError::Other)?.into_iter();
            let rewritten = old_predecessor
                .as_ref()
                .map(|predecessor| txn::rewritten_value(predecessor.create_revision));
            tombstones.extend(
                rewritten_candidates
                    .filter(|tombstone| Some(&tombstone.value) == rewritten.as_ref()),
            );
            Ok((results.header, own, predecessor, first, tombstones))
        });
        let (header, own, predecessor, first, tombstones) = match results {
            Ok(results) => results,
            Err(failure) => {
                entry.predecessor = old_predecessor;
                **entry_guard = Some(entry);
                return Err(failure.into_error().as_unknown());
            }
        };
        entry.lease.confirm(header.raft_term);
        if own.is_none_or(|own| own.create_revision != create_revision) {
            self.abandon(entry);
            return Ok(QueueStep::Retry);
        }
        entry.predecessor = predecessor.map(|predecessor| {
            Predecessor::new(predecessor, header.revision).with_watch_of(old_predecessor.as_mut())
        });
        if entry.predecessor.is_none() {
            if entry.lease.remaining() < claim.lease() / 2 {
                // The entry is first, but the extension of its lease is not confirmed: the leader
                // has just changed.
                entry.predecessor = old_predecessor;
                **entry_guard = Some(entry);
                return Ok(QueueStep::Retry);
            }
            let was_lost = match old_predecessor.filter(|_| !was_released) {
                Some(predecessor) => {
                    predecessor.is_deleted || !self.was_released(&predecessor).await
                }
                None => false,
            };
            let needs_delay = match entry.delayed_since {
                Some(since) => Moment::now().since(since) < GRANT_DELAY,
                None => was_lost || self.has_other_tombstone(&entry, &tombstones),
            };
            if needs_delay {
                return Ok(self.delay_grant(entry_guard, entry, tombstones).await);
            }
        }
        self.grant_or_busy(claim, entry_guard, entry, first.as_ref())
    }

    /// Checks whether the entry and its `predecessor` are unchanged.
    async fn check_predecessor(
        &self,
        entry: &mut ClaimEntry,
        predecessor: Predecessor,
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
        let (own, other) = (results.next_key()?, results.next_key()?);
        let is_same = |found: Option<KeyValue>, create_revision| {
            found.is_some_and(|found| found.create_revision == create_revision)
        };
        if !is_same(own, entry.create_revision.unwrap_or_default())
            || !is_same(other, predecessor.create_revision)
        {
            return Ok(PredecessorCheck::MayHaveChanged(predecessor));
        }
        entry.lease.confirm(results.header.raft_term);
        entry.predecessor =
            Some(Predecessor { seen_revision: results.header.revision, ..predecessor });
        Ok(PredecessorCheck::Unchanged(busy))
    }

    /// Creates a tombstone for an entry that is not in the queue yet.
    async fn new_tombstone(
        &self,
        queue: &[u8],
        entry: &ClaimEntry,
    ) -> Result<Option<txn::TombstonePut>, BackendError> {
        let names = (
            self.names.tombstone(&entry.name),
            self.names.tombstone_prefix(queue),
            entry.ttl_seconds,
        );
        let (Some(name), Some(prefix), Some(ttl_seconds)) = names else { return Ok(None) };
        let lease =
            self.tombstones.lease_or_grant(ttl_seconds, &self.pool, &self.keep_alive).await?;
        Ok(Some(txn::TombstonePut { name, lease, prefix }))
    }

    /// Returns whether any of these tombstones belongs to another entry.
    fn has_other_tombstone(&self, entry: &ClaimEntry, tombstones: &[KeyValue]) -> bool {
        let own = self.names.tombstone(&entry.name);
        tombstones.iter().any(|tombstone| own.as_ref() != Some(&tombstone.key))
    }

    /// Waits for `GRANT_DELAY` before the entry, which is first now, is checked again. Its
    /// predecessor was deleted without a release, so that holder needs time to detect its loss. A
    /// holder whose lease expired detects the loss earlier, but the two cases are
    /// indistinguishable.
    async fn delay_grant(
        &self,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        mut tombstones: Vec<KeyValue>,
    ) -> QueueStep {
        let own = self.names.tombstone(&entry.name);
        tombstones.retain(|tombstone| own.as_ref() != Some(&tombstone.key));
        let since = *entry.delayed_since.get_or_insert_with(Moment::now);
        // A caller that is cancelled during the wait and calls again continues the same wait.
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

    /// Returns whether the deleted predecessor released its lock. Always true in a layout with
    /// tombstones, which does not need this check.
    ///
    /// Without tombstones, the predecessor's lease decides: after a release it still exists, after
    /// a loss it does not. A peer revokes its lease at a release too, and a delay would not help it
    /// to detect a loss. Therefore a peer always counts as released.
    async fn was_released(&self, predecessor: &Predecessor) -> bool {
        if !predecessor.has_record || self.names.has_tombstones() {
            return true;
        }
        self.is_lease_alive(predecessor.lease).await
    }

    /// Returns the grant if the entry is first, otherwise `Busy`.
    fn grant_or_busy(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        first: Option<&KeyValue>,
    ) -> Result<QueueStep, BackendError> {
        let attempt = match &mut entry.predecessor {
            None => {
                entry.is_granted = true;
                let revision = entry.create_revision.unwrap_or(-1);
                let token = FencingToken::try_from(revision).map_err(|_| {
                    let message = format!(
                        "etcd: the member returned the revision {revision}, which is not a valid fencing token"
                    );
                    BackendError::new(BackendErrorKind::Protocol, message)
                });
                let lease = entry.lease.remaining().min(claim.lease());
                token.map(|token| Attempt::Granted(Grant::new(token, lease)))
            }
            Some(predecessor) => {
                let busy = first.map_or_else(Busy::new, |first| busy(claim, first));
                let busy = busy.with_mark(u64::try_from(predecessor.create_revision).unwrap_or(0));
                predecessor.last_busy = first.map(|_| (busy.clone(), Moment::now()));
                Ok(Attempt::Busy(busy))
            }
        };
        **entry_guard = Some(entry);
        attempt.map(QueueStep::Done)
    }

    /// Adopts the entry that another client created for the same claim.
    async fn adopt(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        first: KeyValue,
    ) -> Result<QueueStep, BackendError> {
        **entry_guard = Some(ClaimEntry { is_granted: true, ..ClaimEntry::found(first) });
        self.poll_entry(claim, entry_guard).await
    }

    /// Extends the etcd lease if it has less time left than the claim's lease is long.
    async fn ensure_lease(
        &self,
        claim: &Claim,
        lease: &mut EtcdLease,
    ) -> Result<LeaseStatus, BackendError> {
        if lease.remaining() >= claim.lease() {
            return Ok(LeaseStatus::Alive);
        }
        let response_timeout = self.client.response_timeout();
        let limits = RequestLimits { idle_timeout: response_timeout, total: response_timeout };
        self.keep_alive.keep_alive(lease, limits).await
    }

    /// Revokes an entry's lease and deletes its tombstone in the background.
    pub(crate) fn abandon(&self, entry: ClaimEntry) {
        if entry.ttl_seconds.is_some() {
            self.pool.revoke_later(entry.lease.id);
        }
        if let Some(tombstone) = self.names.tombstone(&entry.name) {
            self.pool.delete_lost_tombstone_later(tombstone);
        }
    }

    /// Abandons the entries that the engine left to expire. Without this, their tombstones would
    /// exist until the tombstone lease expires.
    fn abandon_expired(&self) {
        let expired = self.claims.take_expired().into_iter();
        // A lease that another client created is maintained by that client.
        expired.filter(|entry| entry.ttl_seconds.is_some()).for_each(|entry| self.abandon(entry));
    }

    /// Handles a failed request: caches the entry if a request for it may have taken effect,
    /// otherwise reuses its lease.
    fn on_failed_request(
        &self,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        error: BackendError,
    ) -> BackendError {
        if !error.refused() {
            entry.is_unresolved = true;
        }
        if entry.is_unresolved {
            **entry_guard = Some(entry);
            return error.as_unknown();
        }
        self.recycle_lease(entry);
        error
    }

    /// Reuses the lease of an entry that was not created. Keeps the entry if an earlier request may
    /// still create it.
    fn discard_unused(&self, entry_guard: &mut EntryGuard<'_>, entry: ClaimEntry) {
        if entry.is_unresolved {
            **entry_guard = Some(entry);
        } else {
            self.recycle_lease(entry);
        }
    }

    /// Returns an entry's lease to the pool, unless a request for the entry may still arrive.
    fn recycle_lease(&self, entry: ClaimEntry) {
        match entry.ttl_seconds {
            Some(ttl_seconds) if !entry.is_unresolved => {
                self.pool.release(ttl_seconds, entry.lease)
            }
            _ => self.abandon(entry),
        }
    }

    /// Removes the claim's entry from the queue.
    pub(crate) async fn dequeue(&self, claim: &Claim) -> Result<Release, BackendError> {
        let mut entry_guard = self.claims.lock_entry(claim).await;
        let is_known = entry_guard.as_ref().is_some_and(|entry| entry.create_revision.is_some());
        if !is_known {
            return self.dequeue_unknown(claim, &mut entry_guard).await;
        }
        let Some(entry) = &mut *entry_guard else { return Ok(Release::NotHeld) };
        // The deletion of the own key is not a loss.
        entry.watch = None;
        let (create_revision, queue) =
            (entry.create_revision.unwrap_or_default(), self.names.queue(claim.key()));
        let tombstone = self.names.tombstone(&entry.name);
        let dequeue = if entry.is_granted {
            txn::delete_with_tombstone(&entry.name, create_revision, tombstone.as_deref())
        } else {
            txn::dequeue(&queue, &entry.name, create_revision, tombstone.as_deref())
        };
        let mut results = self.execute(dequeue).await.map_err(CallError::into_error)?;
        let was_first = results.succeeded && (entry.is_granted || results.next_key()?.is_none());
        if let Some(entry) = entry_guard.take() {
            self.recycle_lease(entry);
        }
        Ok(if was_first { Release::Freed } else { Release::NotHeld })
    }

    /// Removes the claim's entry from the queue if the cache does not know its revision.
    async fn dequeue_unknown(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
    ) -> Result<Release, BackendError> {
        let was_freed = match self.find_entry(claim).await? {
            Some(found) => {
                let create_revision = found.create_revision.unwrap_or_default();
                let tombstone = self.names.tombstone(&found.name);
                let deletion =
                    txn::delete_with_tombstone(&found.name, create_revision, tombstone.as_deref());
                let deletion = self.execute(deletion).await;
                deletion.map_err(CallError::into_error)?.succeeded && found.is_granted
            }
            None => false,
        };
        if let Some(entry) = &**entry_guard {
            // Without its lease, no earlier request for the entry can take effect.
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
        let all = self.range(txn::entries(&self.names.queue(claim.key()))).await?.kvs;
        let position = all.iter().position(|entry| record::belongs_to(&entry.value, claim.id()));
        Ok(position.and_then(|position| {
            let found = all.into_iter().nth(position)?;
            Some(ClaimEntry { is_granted: position == 0, ..ClaimEntry::found(found) })
        }))
    }

    /// Returns the key of the claim that was granted in the revision `create_revision`; `None` if
    /// it does not exist.
    pub(crate) async fn entry_name(
        &self,
        claim: &Claim,
        create_revision: i64,
    ) -> Result<Option<Vec<u8>>, BackendError> {
        let cached = {
            let entry_guard = self.claims.lock_entry(claim).await;
            let entry =
                entry_guard.as_ref().filter(|entry| entry.create_revision == Some(create_revision));
            entry.map(|entry| entry.name.clone())
        };
        if cached.is_some() {
            return Ok(cached);
        }
        let mark = u64::try_from(create_revision).unwrap_or(0);
        Ok(self.entry_created_in(claim, mark).await?.map(|(name, _)| name))
    }

    /// Waits until the claim's predecessor may be deleted. Keeps the claim's lease alive meanwhile.
    /// `mark` is the creation revision of the predecessor.
    pub(crate) async fn wait_for_predecessor(&self, claim: &Claim, mark: u64) {
        let cached = {
            let mut entry_guard = self.claims.lock_entry(claim).await;
            entry_guard.as_mut().and_then(|entry| {
                let predecessor = entry.predecessor.as_mut()?;
                // Stored with the entry, so that the next poll does not create another watch.
                let watch =
                    predecessor.watch.take_if(|watch| watch.is_active() || watch.is_deleted());
                let watch = watch.unwrap_or_else(|| {
                    self.watcher.watch_predecessor(
                        predecessor.name.clone(),
                        predecessor.seen_revision.saturating_add(1),
                    )
                });
                let outcome = predecessor.watch.insert(watch).outcome();
                let interval = extension_interval(entry.lease.ttl());
                let since = Moment::now().since(entry.lease.last_extended());
                Some((outcome, interval, interval.saturating_sub(since)))
            })
        };
        let (outcome, _watch, interval, mut extend_at) = match cached {
            Some((outcome, interval, first)) => {
                (outcome, None, Some(interval), Some(Instant::now() + first))
            }
            None => match self.entry_created_in(claim, mark).await {
                Ok(Some((name, seen_revision))) => {
                    let watch =
                        self.watcher.watch_predecessor(name, seen_revision.saturating_add(1));
                    (watch.outcome(), Some(watch), None, None)
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
                    if outcome != WatchOutcome::Deleted {
                        // The caller reads the queue again, after a pause that limits the rate.
                        return sleep(RETRY_PAUSE).await;
                    }
                    if let Some(entry) = &mut *self.claims.lock_entry(claim).await
                        && let Some(predecessor) = &mut entry.predecessor
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

    /// Returns the entry that was created in the revision `mark`, and a revision in which it
    /// existed.
    async fn entry_created_in(
        &self,
        claim: &Claim,
        mark: u64,
    ) -> Result<Option<(Vec<u8>, i64)>, BackendError> {
        let mark = i64::try_from(mark).unwrap_or(0);
        let found = self.range(txn::entry_created_in(&self.names.queue(claim.key()), mark)).await?;
        let revision = found.header.ok_or_else(protocol_error)?.revision;
        Ok(found.kvs.into_iter().next().map(|found| (found.key, revision)))
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
        self.tombstone_lease(entry.ttl_seconds);
        let limits = RequestLimits { idle_timeout: limit, total: limit };
        let status = self.keep_alive.keep_alive(&mut entry.lease, limits).await?;
        if status == LeaseStatus::NotFound
            && let Some(predecessor) = &mut entry.predecessor
        {
            // The next poll must not return the cached `Busy`.
            predecessor.last_busy = None;
        }
        Ok(status)
    }

    /// Returns the tombstone lease for entries of this duration, if it exists. Requests its
    /// extension if that is due.
    pub(crate) fn tombstone_lease(&self, ttl_seconds: Option<i64>) -> Option<i64> {
        self.abandon_expired();
        ttl_seconds
            .and_then(|ttl_seconds| self.tombstones.existing_lease(ttl_seconds, &self.keep_alive))
    }
}

fn busy(claim: &Claim, first: &KeyValue) -> Busy {
    Busy::new().with_holder(record::decode_holder(claim.key().clone(), first, None))
}

fn mark(entry: &KeyValue) -> u64 {
    u64::try_from(entry.create_revision).unwrap_or(0)
}

/// Returns the interval at which a waiter keeps its lease alive. It is as long as retries permit,
/// because the cluster carries the load of all waiters.
fn extension_interval(ttl: Duration) -> Duration {
    (ttl * 3 / 4)
        .min(ttl.saturating_sub(RETRY_TIME_MIN))
        .max(ttl / 3)
        .clamp(EXTENSION_INTERVAL_MIN, EXTENSION_INTERVAL_MAX)
}

/// The minimum time for retries before the lease ends, if the lease is long enough.
const RETRY_TIME_MIN: Duration = Duration::from_secs(5);
const EXTENSION_RETRY_MIN: Duration = Duration::from_millis(100);
/// The minimum interval at which a waiter keeps its lease alive.
const EXTENSION_INTERVAL_MIN: Duration = Duration::from_millis(500);
/// The maximum interval, however long the lease lasts according to the member.
const EXTENSION_INTERVAL_MAX: Duration = Duration::from_secs(60 * 60);
/// The delay of the next grant after a holder's lease was ended early, so that the holder can
/// detect its loss. It is many times the 25 ms after which every held lock is watched, because
/// responses may be slow on a busy machine. A released lock is granted without this delay.
const GRANT_DELAY: Duration = Duration::from_millis(250);
/// The interval at which a waiter reads the whole queue. This only updates the reported holder.
const QUEUE_READ_INTERVAL: Duration = Duration::from_secs(10);
/// The pause before the next read if a watch is not possible.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
