//! This client's cache of its claims: the queue entry and the lease of each claim. `queue` searches
//! the store for a claim that is not in this cache.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{Busy, Claim, ClaimId, Key, Moment};
use tokio::sync::OwnedMutexGuard;

use crate::lease::EtcdLease;
use crate::names::EtcdKeyNames;
use crate::proto::KeyValue;
use crate::record::EntryRecord;
use crate::watcher::{KeyWatch, WatchScope, Watcher};

/// A claim's entry in a queue.
#[derive(Debug)]
pub(crate) struct ClaimEntry {
    /// The entry's key.
    pub(crate) name: Vec<u8>,
    pub(crate) lease: EtcdLease,
    /// The requested duration of the lease in seconds. `None` for a lease that another client
    /// created.
    pub(crate) ttl_seconds: Option<i64>,
    /// The revision in which the key was created. `None` while the revision is unknown, or while
    /// the key may not exist.
    pub(crate) create_revision: Option<i64>,
    /// The claim was granted. It holds the lock until its entry is deleted.
    pub(crate) is_granted: bool,
    /// The token of the grant, if it is not `create_revision`: the revision of an upgrade, or of a
    /// write directly before the grant.
    pub(crate) token_override: Option<i64>,
    /// The start of the grant delay. Set when the entry becomes first after a holder that may not
    /// have detected its loss.
    pub(crate) delayed_since: Option<Moment>,
    /// The lease must not return to the pool. Either an earlier request for this entry may still
    /// take effect, or the entry is named after another lease.
    pub(crate) must_not_recycle: bool,
    /// The entry that blocks this one, if the last read found one.
    pub(crate) predecessor: Option<BlockingEntry>,
    /// The watch on the entry's own key, while the claim holds the lock. A renewal creates it.
    pub(crate) own_watch: Option<KeyWatch>,
    /// The lease of the entry's tombstone, if known.
    pub(crate) tombstone_lease: Option<i64>,
    /// The request to upgrade the claim, while the upgrade waits.
    pub(crate) upgrade: Option<UpgradeRequest>,
}

/// A key in the queue behind the entry of a held claim. It blocks new readers while the claim's
/// upgrade waits.
#[derive(Debug)]
pub(crate) struct UpgradeRequest {
    pub(crate) name: Vec<u8>,
    /// The lease of this key only. The request can therefore expire without the claim.
    pub(crate) lease: EtcdLease,
    /// The shared holder closest to the end of the queue, if the last read found one.
    pub(crate) reader: Option<BlockingEntry>,
    /// The start of the delay after the loss of a reader.
    pub(crate) delayed_since: Option<Moment>,
    /// The token of the upgrade, and the creation revision of the entry that blocks new readers.
    /// While that entry exists, no other claim takes a token.
    pub(crate) token: Option<(i64, i64)>,
}

impl UpgradeRequest {
    pub(crate) fn new(name: Vec<u8>, lease: EtcdLease) -> Self {
        Self { name, lease, reader: None, delayed_since: None, token: None }
    }

    /// Creates the request for a key that was found in the queue.
    pub(crate) fn from_key_value(found: KeyValue) -> Self {
        Self::new(found.key, EtcdLease::new(found.lease, Duration::ZERO, Moment::now()))
    }
}

impl ClaimEntry {
    /// Creates an entry that is not in the queue yet.
    pub(crate) fn new(queue: &[u8], lease: EtcdLease, ttl_seconds: i64) -> Self {
        Self {
            name: EtcdKeyNames::entry_name(queue, lease.id),
            lease,
            ttl_seconds: Some(ttl_seconds),
            create_revision: None,
            is_granted: false,
            token_override: None,
            delayed_since: None,
            must_not_recycle: false,
            predecessor: None,
            own_watch: None,
            tombstone_lease: None,
            upgrade: None,
        }
    }

    /// Returns the entry that `claim` waits for, and the lease that must be extended during the
    /// wait.
    pub(crate) fn predecessor_and_lease(
        &mut self,
        claim: &Claim,
    ) -> Option<(&mut BlockingEntry, &mut EtcdLease)> {
        if claim.is_conversion() {
            let upgrade = self.upgrade.as_mut()?;
            return Some((upgrade.reader.as_mut()?, &mut upgrade.lease));
        }
        Some((self.predecessor.as_mut()?, &mut self.lease))
    }

    /// Returns the last `Busy` if it is valid without another request. The predecessor must be
    /// watched and not deleted, and the entry's own lease must not have expired. The read that
    /// returned the `Busy` must be newer than [`WATCHED_READ_INTERVAL`].
    pub(crate) fn cached_busy(&self, now: Moment) -> Option<Busy> {
        let predecessor = self.predecessor.as_ref()?;
        let (busy, read_at) = predecessor.last_busy.as_ref()?;
        let is_valid = !predecessor.is_deleted
            && predecessor.watch.as_ref().is_some_and(KeyWatch::is_established)
            && now.since(*read_at) < WATCHED_READ_INTERVAL
            && now.since(self.lease.last_extended()) < self.lease.ttl();
        is_valid.then(|| busy.clone())
    }

    /// Returns whether the lease was last extended at least twice its duration ago. One duration
    /// does not suffice, because a new leader extends all leases to their full duration.
    fn is_unextended_for_two_leases(&self, now: Moment) -> bool {
        let requested = self.ttl_seconds.and_then(|ttl_seconds| u64::try_from(ttl_seconds).ok());
        let ttl = self.lease.ttl().max(Duration::from_secs(requested.unwrap_or(0)));
        now.since(self.lease.last_extended()) >= ttl * 2
    }

    /// Creates the entry for a key that was found in the queue. The caller determines whether it is
    /// granted. Its predecessor and the remaining time of its lease are unknown.
    pub(crate) fn from_key_value(found: KeyValue) -> Self {
        let token = EntryRecord::of(&found).token;
        Self {
            token_override: Some(token).filter(|token| *token != found.create_revision),
            name: found.key,
            lease: EtcdLease::new(found.lease, Duration::ZERO, Moment::now()),
            ttl_seconds: None,
            create_revision: Some(found.create_revision),
            is_granted: false,
            delayed_since: None,
            must_not_recycle: false,
            predecessor: None,
            own_watch: None,
            tombstone_lease: None,
            upgrade: None,
        }
    }
}

/// The entry for which a claim waits: an earlier entry that blocks its own entry, or a reader that
/// delays its upgrade. That reader's entry may be behind the entry of the claim.
#[derive(Debug)]
pub(crate) struct BlockingEntry {
    pub(crate) name: Vec<u8>,
    /// The revision in which the predecessor's key was created.
    pub(crate) create_revision: i64,
    pub(crate) lease: i64,
    /// The latest known revision in which the key existed.
    pub(crate) last_seen_revision: i64,
    /// The watch has reported the deletion of the predecessor's key.
    pub(crate) is_deleted: bool,
    /// The `Busy` response of the last read of the whole queue, and the time of that read.
    pub(crate) last_busy: Option<(Busy, Moment)>,
    /// The key has a record, so this library created the key. Other programs write none.
    pub(crate) has_record: bool,
    /// The events that may let the claim be granted.
    pub(crate) scope: WatchScope,
    /// The watch on the predecessor's key. The first wait creates it.
    pub(crate) watch: Option<KeyWatch>,
}

impl BlockingEntry {
    pub(crate) fn new(found: KeyValue, last_seen_revision: i64) -> Self {
        let KeyValue { key: name, create_revision, value, lease, .. } = found;
        Self {
            name,
            create_revision,
            lease,
            last_seen_revision,
            is_deleted: false,
            last_busy: None,
            has_record: !value.is_empty(),
            scope: WatchScope::Deletion,
            watch: None,
        }
    }

    pub(crate) fn with_scope(mut self, scope: WatchScope) -> Self {
        self.scope = scope;
        self
    }

    /// Watches the predecessor's key, or all keys of `queue` if the scope requires it. The watch
    /// starts after the last seen revision.
    pub(crate) fn create_watch(&self, watcher: &Watcher, queue: Vec<u8>) -> KeyWatch {
        let name = match self.scope {
            WatchScope::DeletionInQueue => queue,
            _ => self.name.clone(),
        };
        watcher.watch_for_waiter(name, self.scope, self.last_seen_revision.saturating_add(1))
    }

    /// Takes the watch of `earlier` if both are the same entry with the same scope.
    pub(crate) fn with_watch_from(mut self, earlier: Option<&mut Self>) -> Self {
        let is_same = |earlier: &&mut Self| {
            earlier.create_revision == self.create_revision
                && earlier.name == self.name
                && earlier.scope == self.scope
        };
        self.watch = earlier.filter(is_same).and_then(|earlier| earlier.watch.take());
        self
    }
}

type SharedEntry = Arc<tokio::sync::Mutex<Option<ClaimEntry>>>;

/// The entries of all claims.
#[derive(Debug, Default)]
pub(crate) struct ClaimCache(Mutex<ClaimTable>);

#[derive(Debug, Default)]
struct ClaimTable {
    entries: HashMap<(ClaimId, Key), SharedEntry>,
    /// The time of the last search for expired entries.
    last_sweep: Option<Moment>,
}

/// Exclusive access to the entry of one claim. The requests of a claim therefore run one at a time.
pub(crate) struct EntryGuard<'a> {
    claims: &'a ClaimCache,
    id: (ClaimId, Key),
    entry: Option<OwnedMutexGuard<Option<ClaimEntry>>>,
}

impl ClaimCache {
    /// Waits for exclusive access to the entry of `claim`.
    pub(crate) async fn lock_entry(&self, claim: &Claim) -> EntryGuard<'_> {
        let id = (claim.id(), claim.key().clone());
        let shared = Arc::clone(self.table().entries.entry(id.clone()).or_default());
        EntryGuard { claims: self, id, entry: Some(shared.lock_owned().await) }
    }

    /// Removes and returns the expired entries. The engine no longer extends the leases of these
    /// entries. Returns none within [`SWEEP_INTERVAL`] after the last search.
    pub(crate) fn take_expired(&self) -> Vec<ClaimEntry> {
        let (now, mut table) = (Moment::now(), self.table());
        if table.last_sweep.is_some_and(|last_sweep| now.since(last_sweep) < SWEEP_INTERVAL) {
            return Vec::new();
        }
        table.last_sweep = Some(now);
        let mut expired = Vec::new();
        table.entries.retain(|_, shared| {
            // The table is locked, so every current user of an entry already has a reference to the
            // entry.
            let is_unused = Arc::strong_count(shared) == 1;
            let Some(mut entry) = shared.try_lock().ok().filter(|_| is_unused) else { return true };
            let is_expired =
                entry.as_ref().is_none_or(|entry| entry.is_unextended_for_two_leases(now));
            if is_expired {
                expired.extend(entry.take());
            }
            !is_expired
        });
        expired
    }

    fn table(&self) -> MutexGuard<'_, ClaimTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::ops::Deref for EntryGuard<'_> {
    type Target = Option<ClaimEntry>;

    fn deref(&self) -> &Option<ClaimEntry> {
        self.entry.as_ref().expect("the entry is present until the guard is dropped")
    }
}

impl std::ops::DerefMut for EntryGuard<'_> {
    fn deref_mut(&mut self) -> &mut Option<ClaimEntry> {
        self.entry.as_mut().expect("the entry is present until the guard is dropped")
    }
}

impl Drop for EntryGuard<'_> {
    fn drop(&mut self) {
        let mut table = self.claims.table();
        let is_empty = self.entry.take().is_none_or(|entry| entry.is_none());
        // A count of 1 means that no other caller uses or awaits the entry. A new caller must lock
        // the table first.
        if is_empty
            && table.entries.get(&self.id).is_some_and(|shared| Arc::strong_count(shared) == 1)
        {
            table.entries.remove(&self.id);
        }
    }
}

/// The interval at which a waiter with a watched predecessor reads its queue. Another client may
/// have deleted the waiter's key, and the holder may have changed.
const WATCHED_READ_INTERVAL: Duration = Duration::from_secs(3 * 60);
/// The minimum interval between two searches for expired entries.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(3);

    async fn insert_entries(claims: &ClaimCache, count: u32) -> Vec<Claim> {
        let claim = |n: u32| Claim::new(Key::new(&n.to_string()).unwrap(), Duration::from_secs(2));
        let all: Vec<_> = (0..count).map(claim).collect();
        for claim in &all {
            let lease = EtcdLease::new(1, TTL, Moment::now());
            *claims.lock_entry(claim).await = Some(ClaimEntry::new(b"q/", lease, 3));
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn an_expired_entry_is_removed_and_returned_once() {
        let claims = ClaimCache::default();
        let [used, renewed, ..] = &*insert_entries(&claims, 10).await else { panic!("ten") };
        tokio::time::advance(TTL).await;
        assert!(claims.take_expired().is_empty(), "the members may have extended the lease");
        tokio::time::advance(TTL).await;
        claims.lock_entry(renewed).await.as_mut().unwrap().lease.record_extension(
            Moment::now(),
            TTL,
            1,
        );
        let in_use = claims.lock_entry(used).await;
        assert_eq!(claims.take_expired().len(), 8);
        drop(in_use);
        tokio::time::advance(SWEEP_INTERVAL).await;
        assert_eq!(claims.take_expired().len(), 1);
        assert_eq!(claims.table().entries.len(), 1);
        assert!(claims.lock_entry(renewed).await.is_some());
        drop(claims.lock_entry(used).await);
        assert_eq!(claims.table().entries.len(), 1);
    }

    /// The lease is unknown until the next renewal reads it.
    #[tokio::test(start_paused = true)]
    async fn an_entry_with_an_unknown_lease_is_not_expired() {
        let claims = ClaimCache::default();
        let [claim] = &*insert_entries(&claims, 1).await else { panic!("one") };
        let lease = EtcdLease::new(2, Duration::ZERO, Moment::now());
        claims.lock_entry(claim).await.as_mut().unwrap().lease = lease;
        tokio::time::advance(TTL).await;
        assert!(claims.take_expired().is_empty());
    }

    /// A waiter extends its lease without a confirmation by a majority.
    #[tokio::test(start_paused = true)]
    async fn an_entry_that_waits_longer_than_a_lease_is_not_expired() {
        let claims = ClaimCache::default();
        let all = insert_entries(&claims, 10).await;
        for _ in 0..6 {
            tokio::time::advance(TTL * 2 / 3).await;
            for claim in &all {
                let mut entry_guard = claims.lock_entry(claim).await;
                let entry = entry_guard.as_mut().expect("the lease was extended");
                entry.lease.record_extension(Moment::now(), TTL, 1);
            }
            assert!(claims.take_expired().is_empty());
        }
    }
}
