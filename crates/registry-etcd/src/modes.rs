//! Appends shared claims, upgradable claims and permits to a queue, and reads their positions. Also
//! converts claims from one mode to another. `queue` calls this module for these claims and all
//! conversions.
//!
//! Each decision uses one snapshot of the whole queue, by the rules of
//! [`registry_core::queue_position`].

use std::collections::HashSet;

use registry_core::{
    Attempt, BackendError, Busy, Claim, ClaimMode, Grant, Moment, QueuePosition, QueuedEntry,
    Renewal, UpgradePosition, granted_entries, queue_position, upgrade_position,
};
use tokio::time::sleep;

use crate::backend::{EtcdBackend, TRIES_MAX};
use crate::claims::{BlockingEntry, ClaimEntry, EntryGuard, UpgradeRequest};
use crate::error::CallError;
use crate::keep_alive::LeaseStatus;
use crate::lease::ttl_seconds;
use crate::names::EtcdKeyNames;
use crate::proto::KeyValue;
use crate::queue::{GRANT_DELAY, QueueStep, busy_with_holder, fencing_token, version_of};
use crate::record::{self, EntryRecord};
use crate::txn::{self, AppendIf, TxnResults};
use crate::watcher::WatchScope;

/// The state of a queue in one revision.
struct QueueSnapshot {
    entries: Vec<KeyValue>,
    tombstones: Vec<KeyValue>,
    revision: i64,
}

impl QueueSnapshot {
    /// Decodes the parts of [`txn::read_entries`].
    fn decode(results: &mut TxnResults) -> Result<Self, BackendError> {
        let (entries, tombstones) = (results.next_keys()?, results.next_keys_if_any()?);
        Ok(Self { entries, tombstones, revision: results.header.revision })
    }

    /// Returns the index of the entry with this name and creation revision.
    fn position(&self, name: &[u8], create_revision: Option<i64>) -> Option<usize> {
        let is_entry =
            |entry: &KeyValue| entry.key == name && Some(entry.create_revision) == create_revision;
        self.entries.iter().position(is_entry)
    }

    /// Returns the other entries whose token is their creation revision and smaller than `token`,
    /// at most [`TOKENS_REMOVED_MAX`]. Returns each entry with its new record, which has no token.
    fn entries_with_smaller_tokens(
        &self,
        own_entry: &KeyValue,
        token: i64,
    ) -> Vec<(&KeyValue, Vec<u8>)> {
        let others = self.entries.iter().filter(|it| it.key != own_entry.key);
        let smaller = others.filter(|it| it.create_revision < token);
        let records = smaller.filter_map(|it| Some((it, record::record_without_token(it)?)));
        records.take(TOKENS_REMOVED_MAX).collect()
    }

    /// Returns the tombstones whose entries were deleted without a release, except that of the
    /// entry `own_name`.
    fn tombstones_of_lost_entries(&self, names: &EtcdKeyNames, own_name: &[u8]) -> Vec<KeyValue> {
        let entries = self.entries.iter().map(|entry| &*entry.key).chain([own_name]);
        let with_entry: HashSet<_> =
            entries.filter_map(|entry| names.tombstone_name(entry)).collect();
        self.tombstones.iter().filter(|it| !with_entry.contains(&it.key)).cloned().collect()
    }
}

impl EtcdBackend {
    /// Appends the entry of a claim that is not exclusive. A claim that does not wait is appended
    /// only to a queue in which it is granted.
    pub(crate) async fn append_entry(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        tombstone: Option<txn::TombstonePut>,
    ) -> Result<QueueStep, BackendError> {
        let queue = self.names.queue_prefix(claim.key());
        let tombstone_lease = tombstone.as_ref().map(|tombstone| tombstone.lease);
        let mut condition = if claim.joins_queue() { AppendIf::Always } else { AppendIf::Empty };
        for _ in 0..CONFLICTS_MAX {
            let record = record::encode(claim, &self.local_host_name);
            let (name, lease) = (&entry.name, entry.lease.id);
            let append = txn::append(
                &queue,
                name,
                record,
                lease,
                tombstone.clone(),
                condition,
                claim.mode(),
            );
            let mut results = match self.execute(append).await {
                Ok(results) => results,
                Err(CallError::LeaseNotFound) => {
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
            if results.succeeded {
                entry.create_revision = Some(results.header.revision);
                entry.tombstone_lease = tombstone_lease;
                results.skip()?;
                let snapshot = QueueSnapshot::decode(&mut results)?;
                return self.decide(claim, entry_guard, entry, snapshot).await;
            }
            let (own_entry, entries) = (results.next_key()?, results.next_keys()?);
            if let Some(own_entry) = own_entry {
                if record::belongs_to(&own_entry, claim.id()) {
                    entry.create_revision = Some(own_entry.create_revision);
                    **entry_guard = Some(entry);
                } else {
                    // Another client has chosen the same lease id. The entry of this name belongs
                    // to that client.
                    self.abandon(entry);
                }
                return Ok(QueueStep::Retry);
            }
            if let Some(found) = entries.iter().find(|it| record::belongs_to(it, claim.id())) {
                // Another client has created an entry for the same claim.
                self.recycle_unused_entry(entry_guard, entry);
                **entry_guard = Some(ClaimEntry::from_key_value(found.clone()));
                return Ok(QueueStep::Retry);
            }
            let position = queue_position(&modes(&entries), claim.mode());
            if position != QueuePosition::Granted {
                self.recycle_unused_entry(entry_guard, entry);
                let busy = busy_behind(claim, &entries, position);
                return Ok(QueueStep::Done(Attempt::Busy(busy)));
            }
            condition = match claim.mode() {
                _ if entries.is_empty() => AppendIf::Empty,
                // The conditions on shared and upgradable entries compare the mode letter at the
                // start of a record. A record without a token starts with `z` instead.
                _ if entries.iter().any(|it| EntryRecord::of(it).needs_token()) => {
                    AppendIf::UnchangedSince(results.header.revision)
                }
                ClaimMode::Shared => AppendIf::SharedOrUpgradable,
                ClaimMode::Upgradable => AppendIf::Shared,
                _ => AppendIf::UnchangedSince(results.header.revision),
            };
        }
        // In every attempt, other claims changed the queue between the read and the append.
        self.recycle_unused_entry(entry_guard, entry);
        Ok(QueueStep::Done(Attempt::Busy(Busy::new())))
    }

    /// Reads the position of an existing entry of a claim that is not exclusive.
    pub(crate) async fn read_position_non_exclusive(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
    ) -> Result<QueueStep, BackendError> {
        let snapshot = match self.read_snapshot(claim, &mut entry).await {
            Ok(snapshot) => snapshot,
            Err(error) => {
                **entry_guard = Some(entry);
                return Err(error.as_unknown());
            }
        };
        self.decide(claim, entry_guard, entry, snapshot).await
    }

    async fn read_snapshot(
        &self,
        claim: &Claim,
        entry: &mut ClaimEntry,
    ) -> Result<QueueSnapshot, BackendError> {
        let queue = self.names.queue_prefix(claim.key());
        let read = txn::read_entries(&queue, self.names.tombstone_prefix(&queue).as_deref());
        let mut results = self.execute(read).await.map_err(CallError::into_error)?;
        entry.lease.record_majority_response(results.header.raft_term);
        QueueSnapshot::decode(&mut results)
    }

    /// Decides from the snapshot of the queue whether the claim is granted.
    async fn decide(
        &self,
        claim: &Claim,
        entry_guard: &mut EntryGuard<'_>,
        mut entry: ClaimEntry,
        snapshot: QueueSnapshot,
    ) -> Result<QueueStep, BackendError> {
        let Some(own_index) = snapshot.position(&entry.name, entry.create_revision) else {
            self.abandon(entry);
            return Ok(QueueStep::Retry);
        };
        let own_record = EntryRecord::of(&snapshot.entries[own_index]);
        let QueuedEntry::Claim(mode) = own_record.entry else {
            self.abandon(entry);
            return Ok(QueueStep::Retry);
        };
        let before = &snapshot.entries[..own_index];
        let position = queue_position(&modes(before), mode);
        let mut old_predecessor = entry.predecessor.take();
        let predecessor = match position {
            QueuePosition::Granted => None,
            QueuePosition::UnitsMismatch(_) => {
                let busy = busy_behind(claim, before, position);
                return self.withdraw(entry_guard, entry, busy).await;
            }
            QueuePosition::Behind(nearest) => {
                // After a downgrade of the predecessor, a reader may be granted.
                let is_reader = matches!(mode, ClaimMode::Shared | ClaimMode::Upgradable);
                let scope = if is_reader { WatchScope::Change } else { WatchScope::Deletion };
                Some((nearest, scope))
            }
            QueuePosition::TooFewUnits => {
                Some((own_index.saturating_sub(1), WatchScope::DeletionInQueue))
            }
        };
        if let Some((index, scope)) = predecessor {
            let mut predecessor = BlockingEntry::new(before[index].clone(), snapshot.revision)
                .with_scope(scope)
                .with_watch_from(old_predecessor.as_mut());
            let busy = busy_behind(claim, before, position).with_queue_entry();
            predecessor.last_busy = Some((busy.clone(), Moment::now()));
            entry.predecessor = Some(predecessor);
            **entry_guard = Some(entry);
            return Ok(QueueStep::Done(Attempt::Busy(busy)));
        }
        if entry.lease.remaining() < claim.lease() / 2 {
            // The last extension of the entry's lease does not count, because the leader has
            // changed since.
            **entry_guard = Some(entry);
            return Ok(QueueStep::Retry);
        }
        if !entry.is_granted {
            let needs_delay = |since: Moment| Moment::now().since(since) < GRANT_DELAY;
            let lost = snapshot.tombstones_of_lost_entries(&self.names, &entry.name);
            if entry.delayed_since.map_or(!lost.is_empty(), needs_delay) {
                return Ok(self.delay_grant(entry_guard, entry, lost).await);
            }
        }
        if own_record.needs_token() {
            let own_entry = &snapshot.entries[own_index];
            return self.take_token(entry_guard, entry, own_entry, mode).await;
        }
        entry.is_granted = true;
        entry.token_override =
            Some(own_record.token).filter(|token| Some(*token) != entry.create_revision);
        let lease = entry.lease.remaining().min(claim.lease());
        let token = fencing_token(own_record.token);
        **entry_guard = Some(entry);
        token.map(|token| QueueStep::Done(Attempt::Granted(Grant::new(token, lease))))
    }

    /// Stores the token of a granted claim whose record has none. Returns `Retry` unless a request
    /// fails, so the caller reads the queue again.
    ///
    /// Writes the record twice. The first write keeps the value, and its revision becomes the
    /// token. The second write stores this token. Every earlier grant that is incompatible with
    /// this grant ended before the first write, so its token is smaller.
    pub(crate) async fn take_token(
        &self,
        entry_guard: &mut EntryGuard<'_>,
        entry: ClaimEntry,
        own_entry: &KeyValue,
        mode: ClaimMode,
    ) -> Result<QueueStep, BackendError> {
        // If the caller is cancelled or gets no response, the next attempt finds the entry here.
        **entry_guard = Some(entry);
        let touch = txn::replace_record(own_entry, own_entry.value.clone(), &[], None);
        let touched = self.execute(touch).await.map_err(|it| it.into_error().as_unknown())?;
        if touched.succeeded {
            let token = touched.header.revision;
            let own_entry = KeyValue { mod_revision: token, ..own_entry.clone() };
            let store_token = txn::replace_record(
                &own_entry,
                record::convert(&own_entry, mode, token),
                &[],
                None,
            );
            self.execute(store_token).await.map_err(|it| it.into_error().as_unknown())?;
        }
        Ok(QueueStep::Retry)
    }

    /// Removes the entry of a claim whose total of units differs from that of the holders. Returns
    /// `busy`.
    async fn withdraw(
        &self,
        entry_guard: &mut EntryGuard<'_>,
        entry: ClaimEntry,
        busy: Busy,
    ) -> Result<QueueStep, BackendError> {
        let tombstone = self.names.tombstone_name(&entry.name);
        let create_revision = entry.create_revision.unwrap_or_default();
        let deletion =
            txn::delete_with_tombstone(&entry.name, create_revision, tombstone.as_deref());
        match self.execute(deletion).await {
            Ok(_) => {
                self.recycle_lease(entry);
                Ok(QueueStep::Done(Attempt::Busy(busy)))
            }
            Err(failure) => {
                **entry_guard = Some(entry);
                Err(failure.into_error().as_unknown())
            }
        }
    }

    /// Returns the entry that blocks a claim without an entry, or `None` if no entry blocks it.
    pub(crate) async fn find_blocking_entry(
        &self,
        claim: &Claim,
    ) -> Result<Option<BlockingEntry>, BackendError> {
        let found = self.execute(txn::read_entries(&self.names.queue_prefix(claim.key()), None));
        let mut results = found.await.map_err(CallError::into_error)?;
        let QueueSnapshot { entries, revision, .. } = QueueSnapshot::decode(&mut results)?;
        let blocking = match queue_position(&modes(&entries), claim.mode()) {
            QueuePosition::Behind(nearest) => Some((nearest, WatchScope::Change)),
            QueuePosition::TooFewUnits | QueuePosition::UnitsMismatch(_) => {
                Some((entries.len().saturating_sub(1), WatchScope::DeletionInQueue))
            }
            QueuePosition::Granted => None,
        };
        let predecessor = |(index, scope): (usize, WatchScope)| {
            let entry = entries.get(index)?.clone();
            Some(BlockingEntry::new(entry, revision).with_scope(scope))
        };
        Ok(blocking.and_then(predecessor))
    }

    /// Converts the claim's grant to the mode `claim.mode()`.
    pub(crate) async fn convert(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mut entry_guard = self.claims.lock_entry(claim).await;
        if entry_guard.is_none() {
            let Some(found) = self.find_entry(claim).await? else { return Ok(Attempt::Gone) };
            *entry_guard = Some(found);
        }
        let mut snapshot = None;
        for _ in 0..CONFLICTS_MAX {
            let Some(entry) = &mut *entry_guard else { return Ok(Attempt::Gone) };
            let current = match snapshot.take() {
                Some(snapshot) => snapshot,
                None => self.read_snapshot(claim, entry).await.map_err(BackendError::as_unknown)?,
            };
            match self.try_convert(claim, entry, current).await? {
                ConversionOutcome::Done(token) => {
                    entry.is_granted = true;
                    entry.token_override =
                        Some(token).filter(|token| Some(*token) != entry.create_revision);
                    if let Some(upgrade) = entry.upgrade.take() {
                        self.pool.revoke_later(upgrade.lease.id);
                    }
                    drop(entry_guard);
                    return self.grant_converted(claim, token).await;
                }
                ConversionOutcome::Busy(busy) => return Ok(Attempt::Busy(busy)),
                ConversionOutcome::Gone => return Ok(Attempt::Gone),
                ConversionOutcome::Lost => {
                    if let Some(entry) = entry_guard.take() {
                        self.abandon(entry);
                    }
                    return Ok(Attempt::Gone);
                }
                ConversionOutcome::Retry(next) => snapshot = next,
            }
        }
        Err(BackendError::transient(format!(
            "etcd: the queue changed during each of {CONFLICTS_MAX} attempts to convert the lock; retry"
        )))
    }

    /// Tries once to change the mode of the claim of `entry`.
    async fn try_convert(
        &self,
        claim: &Claim,
        entry: &mut ClaimEntry,
        snapshot: QueueSnapshot,
    ) -> Result<ConversionOutcome, BackendError> {
        let Some(own_index) = snapshot.position(&entry.name, entry.create_revision) else {
            return Ok(ConversionOutcome::Lost);
        };
        let entries = modes(&snapshot.entries);
        let own_entry = &snapshot.entries[own_index];
        let EntryRecord { token, .. } = EntryRecord::of(own_entry);
        let is_granted =
            granted_entries(&entries)[own_index] && !EntryRecord::of(own_entry).needs_token();
        let (QueuedEntry::Claim(mode), true) = (entries[own_index], is_granted) else {
            return Ok(ConversionOutcome::Gone);
        };
        let is_request = |it: &&KeyValue| EntryRecord::of(it).is_request_of(claim.id());
        let request = snapshot.entries.iter().find(is_request);
        let converted = claim.token_before_conversion().map(|token| token.get());
        let is_late = converted.is_some_and(|converted| u64::try_from(token) != Ok(converted));
        let record = match (mode, claim.mode()) {
            (ours, wanted) if ours == wanted && request.is_none() => {
                return Ok(ConversionOutcome::Done(token));
            }
            (ours, wanted) if ours == wanted => own_entry.value.clone(),
            // This conversion is late: the grant was upgraded after the conversion was sent, and
            // the holder relies on the upgrade.
            _ if is_late => return Ok(ConversionOutcome::Gone),
            (ClaimMode::Exclusive, ClaimMode::Upgradable | ClaimMode::Shared)
            | (ClaimMode::Upgradable, ClaimMode::Shared) => {
                record::convert(own_entry, claim.mode(), token)
            }
            (ClaimMode::Upgradable, ClaimMode::Exclusive) => {
                return match request {
                    Some(request) => {
                        self.upgrade(claim, entry, &snapshot, own_index, request).await
                    }
                    None => self.request_upgrade(claim, entry, own_entry).await,
                };
            }
            // No other conversion exists: two shared claims that are upgraded would deadlock.
            _ => return Ok(ConversionOutcome::Gone),
        };
        let convert = txn::replace_record(own_entry, record, &[], request);
        let results = self.execute(convert).await.map_err(CallError::into_error)?;
        Ok(if results.succeeded {
            ConversionOutcome::Done(token)
        } else {
            ConversionOutcome::Retry(None)
        })
    }

    /// Appends the request to upgrade the claim. If the claim can be upgraded in this revision, the
    /// creation revision of the request becomes the token of the upgrade.
    async fn request_upgrade(
        &self,
        claim: &Claim,
        entry: &mut ClaimEntry,
        own_entry: &KeyValue,
    ) -> Result<ConversionOutcome, BackendError> {
        if let Some(expired) = entry.upgrade.take() {
            self.pool.revoke_later(expired.lease.id);
        }
        let lease = self.pool.acquire(ttl_seconds(claim.lease())).await?;
        let queue = self.names.queue_prefix(claim.key());
        let name = EtcdKeyNames::entry_name(&queue, lease.id);
        let request = txn::request_upgrade(
            &queue,
            own_entry,
            &name,
            record::encode_request(claim, &self.local_host_name),
            lease.id,
            self.names.tombstone_prefix(&queue).as_deref(),
        );
        let lease_id = lease.id;
        let upgrade = UpgradeRequest::new(name, lease);
        let mut results = match self.execute(request).await {
            Ok(results) => results,
            Err(CallError::LeaseNotFound) => {
                self.pool.clear();
                return Ok(ConversionOutcome::Retry(None));
            }
            Err(failure) => {
                // After the revocation, the members reject the request if it arrives late.
                self.pool.revoke_later(lease_id);
                return Err(failure.into_error());
            }
        };
        entry.lease.record_majority_response(results.header.raft_term);
        if !results.succeeded {
            self.pool.revoke_later(lease_id);
            return Ok(ConversionOutcome::Retry(None));
        }
        entry.upgrade = Some(upgrade);
        results.skip()?;
        Ok(ConversionOutcome::Retry(Some(QueueSnapshot::decode(&mut results)?)))
    }

    /// Makes an upgradable claim exclusive if no other claim holds the key.
    async fn upgrade(
        &self,
        claim: &Claim,
        entry: &mut ClaimEntry,
        snapshot: &QueueSnapshot,
        own_index: usize,
        request: &KeyValue,
    ) -> Result<ConversionOutcome, BackendError> {
        let mut upgrade = match entry.upgrade.take() {
            Some(upgrade) if upgrade.name == request.key => upgrade,
            other => {
                if let Some(other) = other {
                    self.pool.revoke_later(other.lease.id);
                }
                UpgradeRequest::from_key_value(request.clone())
            }
        };
        let mut old_reader = upgrade.reader.take();
        // The upgrade request must block new readers for at least the length of the claim's lease
        // after this attempt.
        let status = self.ensure_lease(claim, &mut upgrade.lease).await;
        let upgrade = entry.upgrade.insert(upgrade);
        if status? == LeaseStatus::NotFound {
            entry.upgrade = None;
            self.pool.clear();
            return Ok(ConversionOutcome::Retry(None));
        }
        let blocking = match upgrade_position(&modes(&snapshot.entries), own_index) {
            UpgradePosition::Grantable(blocking) => &snapshot.entries[blocking],
            UpgradePosition::ReadersNotBlocked => return Ok(ConversionOutcome::Retry(None)),
            UpgradePosition::Behind(reader) => {
                let reader = &snapshot.entries[reader];
                let predecessor = BlockingEntry::new(reader.clone(), snapshot.revision);
                upgrade.reader = Some(predecessor.with_watch_from(old_reader.as_mut()));
                // This reader may be lost too. Its loss then requires another delay.
                upgrade.delayed_since = None;
                let busy = busy_with_holder(claim, reader).with_queue_entry();
                return Ok(ConversionOutcome::Busy(busy.with_seen_version(version_of(reader))));
            }
        };
        let lost = snapshot.tombstones_of_lost_entries(&self.names, &entry.name);
        let needs_delay = |since: Moment| Moment::now().since(since) < GRANT_DELAY;
        if upgrade.delayed_since.map_or(!lost.is_empty(), needs_delay) {
            // Another entry was deleted without a release. If it belonged to a reader, its holder
            // needs time to detect the loss. A caller that was cancelled during the delay waits for
            // the rest of it.
            let since = *upgrade.delayed_since.get_or_insert_with(Moment::now);
            sleep(GRANT_DELAY.saturating_sub(Moment::now().since(since))).await;
            for tombstone in lost {
                self.pool.delete_tombstone_later(tombstone.key, tombstone.create_revision);
            }
            return Ok(ConversionOutcome::Retry(None));
        }
        let own_entry = &snapshot.entries[own_index];
        let token = match upgrade.token {
            Some((token, revision)) if revision == blocking.create_revision => token,
            _ if snapshot.revision == request.create_revision => request.create_revision,
            // A reader that was enqueued before the request, and was granted after it, may have
            // taken a larger token.
            _ => {
                let (value, must_exist) = (request.value.clone(), [own_entry, blocking]);
                let touch = txn::replace_record(request, value, &must_exist, None);
                let touched = self.execute(touch).await.map_err(CallError::into_error)?;
                let taken = (touched.header.revision, blocking.create_revision);
                upgrade.token = touched.succeeded.then_some(taken);
                return Ok(ConversionOutcome::Retry(None));
            }
        };
        upgrade.token = Some((token, blocking.create_revision));
        // If a claim was enqueued while this claim was exclusive, its token is its creation
        // revision, which is smaller than `token`. No such claim is granted while `own_entry`,
        // `request` and `blocking` exist.
        let records = snapshot.entries_with_smaller_tokens(own_entry, token);
        if !records.is_empty() {
            let replace = txn::replace_waiting(&records, &[own_entry, request, blocking]);
            self.execute(replace).await.map_err(CallError::into_error)?;
            return Ok(ConversionOutcome::Retry(None));
        }
        let record = record::convert(own_entry, ClaimMode::Exclusive, token);
        let convert = txn::replace_record(own_entry, record, &[request, blocking], Some(request));
        let results = self.execute(convert).await.map_err(CallError::into_error)?;
        Ok(if results.succeeded {
            ConversionOutcome::Done(token)
        } else {
            ConversionOutcome::Retry(None)
        })
    }

    /// Returns the grant of a converted claim. Renews the claim first if less than `claim.lease()`
    /// remains.
    async fn grant_converted(&self, claim: &Claim, token: i64) -> Result<Attempt, BackendError> {
        let token = fencing_token(token)?;
        for _ in 0..TRIES_MAX {
            let remaining = {
                let entry_guard = self.claims.lock_entry(claim).await;
                entry_guard.as_ref().map(|entry| entry.lease.remaining())
            };
            match remaining {
                Some(remaining) if remaining >= claim.lease() => {
                    return Ok(Attempt::Granted(Grant::new(token, remaining)));
                }
                _ => {}
            }
            let renewal = self.renew_batch(std::slice::from_ref(claim)).await.pop();
            match renewal.transpose()? {
                Some(Renewal::Renewed(lease)) => {
                    return Ok(Attempt::Granted(Grant::new(token, lease)));
                }
                Some(Renewal::Gone) => return Ok(Attempt::Gone),
                None => {}
            }
        }
        Err(BackendError::transient(
            "etcd: the lock was converted, but its lease was not renewed; retry",
        ))
    }
}

/// The result of one attempt to convert a claim.
enum ConversionOutcome {
    /// The claim has the requested mode, and this token.
    Done(i64),
    Busy(Busy),
    /// The claim is not granted, was upgraded after this conversion was sent, or cannot be
    /// converted to this mode.
    Gone,
    /// The entry does not exist.
    Lost,
    /// The caller tries again. Contains the current state of the queue if it was read.
    Retry(Option<QueueSnapshot>),
}

/// Returns the claim mode of each entry, or that it is an upgrade request.
pub(crate) fn modes(entries: &[KeyValue]) -> Vec<QueuedEntry> {
    entries.iter().map(|entry| EntryRecord::of(entry).entry).collect()
}

/// Returns the granted entries. `entries` contains all entries of a queue in the order of their
/// creation.
pub(crate) fn granted(entries: Vec<KeyValue>) -> Vec<KeyValue> {
    let granted = granted_entries(&modes(&entries));
    entries
        .into_iter()
        .zip(granted)
        .filter_map(|(entry, granted)| granted.then_some(entry))
        .collect()
}

/// Returns the entries that wait: the claims that are not granted, and the upgrade requests.
pub(crate) fn waiting(entries: Vec<KeyValue>) -> Vec<KeyValue> {
    let granted = granted_entries(&modes(&entries));
    entries
        .into_iter()
        .zip(granted)
        .filter_map(|(entry, granted)| (!granted).then_some(entry))
        .collect()
}

/// Returns the granted entries and the upgrade requests of a queue.
pub(crate) fn granted_or_upgrading(entries: Vec<KeyValue>) -> Vec<KeyValue> {
    let is_request = |entry: &KeyValue| EntryRecord::of(entry).entry == QueuedEntry::UpgradeRequest;
    let requests: Vec<_> = entries.iter().filter(|entry| is_request(entry)).cloned().collect();
    granted(entries).into_iter().chain(requests).collect()
}

/// Returns whether the entry `name` is granted. `entries` contains at least all entries of the
/// queue up to this entry.
pub(crate) fn is_granted(entries: &[KeyValue], name: &[u8]) -> bool {
    let granted = granted_entries(&modes(entries));
    entries.iter().zip(granted).any(|(entry, granted)| granted && entry.key == name)
}

/// Returns the response for a claim with this position behind `before`.
fn busy_behind(claim: &Claim, before: &[KeyValue], position: QueuePosition) -> Busy {
    let busy = match before.first() {
        Some(first) => busy_with_holder(claim, first),
        None => Busy::new(),
    };
    match position {
        QueuePosition::UnitsMismatch(of) => busy.with_units_in_store(of),
        QueuePosition::Behind(nearest) => busy.with_seen_version(version_of(&before[nearest])),
        _ => busy.with_seen_version(before.last().map_or(0, version_of)),
    }
}

/// The maximum number of tokens that one transaction removes. With three further comparisons, the
/// transaction has fewer operations than the 128 that members allow by default.
const TOKENS_REMOVED_MAX: usize = 100;
/// The maximum number of attempts if other clients change the queue between a read and a write.
const CONFLICTS_MAX: usize = 32;
