//! This client's cache of its claims: the queue entry and the lease of each. A claim that is not in
//! the cache is looked up in the queue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{Busy, Claim, ClaimId, Key, Moment};
use tokio::sync::OwnedMutexGuard;

use crate::ears::Watch;
use crate::lease::Lease;
use crate::names::Names;
use crate::wire::KeyValue;

/// A claim's entry in a queue.
#[derive(Debug)]
pub(crate) struct Place {
    /// The entry's key.
    pub(crate) name: Vec<u8>,
    pub(crate) lease: Lease,
    /// The requested duration of the lease in seconds. `None` for a lease that another client
    /// created.
    pub(crate) seconds: Option<i64>,
    /// The revision in which the key was created. `None` while that is unknown, or while the key
    /// may not exist.
    pub(crate) created: Option<i64>,
    /// The entry was first in the queue, and so has been since.
    pub(crate) granted: bool,
    /// When the entry became first after a holder that may not know yet that its lock is lost.
    pub(crate) settling: Option<Moment>,
    /// An earlier request for this entry may still take effect.
    pub(crate) stray: bool,
    /// The predecessor in the queue, if the last read found one.
    pub(crate) before: Option<Before>,
    /// Watches for the deletion of the entry.
    pub(crate) watch: Option<Watch>,
    /// The lease of the entry's tombstone, if known.
    pub(crate) trace: Option<i64>,
}

impl Place {
    /// Creates an entry that is not in the queue yet.
    pub(crate) fn new(queue: &[u8], lease: Lease, seconds: i64) -> Self {
        Self {
            name: Names::place(queue, lease.id),
            lease,
            seconds: Some(seconds),
            created: None,
            granted: false,
            settling: None,
            stray: false,
            before: None,
            watch: None,
            trace: None,
        }
    }

    /// Returns the last `Busy` if it is still valid without a request: the predecessor is watched
    /// and not deleted, and the entry's own lease was kept alive.
    pub(crate) fn still_waits(&self, now: Moment) -> Option<Busy> {
        let before = self.before.as_ref()?;
        let (busy, at) = before.first.as_ref()?;
        let is_certain = !before.gone
            && before.watch.as_ref().is_some_and(Watch::is_confirmed)
            && now.since(*at) < LOOK_EACH_WATCHED
            && now.since(self.lease.latest()) < self.lease.ttl();
        is_certain.then(|| busy.clone())
    }

    /// Returns whether the lease has not been kept alive for twice its duration. One duration is
    /// not enough: the members extend leases when their leader changes, and the entry is then
    /// still valid.
    fn is_over(&self, now: Moment) -> bool {
        let asked_for = self.seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let lasts = self.lease.ttl().max(Duration::from_secs(asked_for.unwrap_or(0)));
        now.since(self.lease.latest()) >= lasts * 2
    }

    /// Creates the entry for a key that was found in the queue.
    pub(crate) fn found(key: KeyValue, lease: Lease, is_first: bool) -> Self {
        Self {
            name: key.key,
            lease,
            seconds: None,
            created: Some(key.create_revision),
            granted: is_first,
            settling: None,
            stray: false,
            before: None,
            watch: None,
            trace: None,
        }
    }
}

/// The predecessor of an entry.
#[derive(Debug)]
pub(crate) struct Before {
    pub(crate) name: Vec<u8>,
    /// The revision in which its key was created.
    pub(crate) created: i64,
    pub(crate) lease: i64,
    /// A revision in which the key existed.
    pub(crate) seen: i64,
    /// The watch has reported its deletion.
    pub(crate) gone: bool,
    /// The holder of the lock at the last read of the whole queue, and the time of that read.
    pub(crate) first: Option<(Busy, Moment)>,
    /// This library created the key. Peers write no record.
    pub(crate) is_ours: bool,
    /// Watches for its deletion, once a caller has waited for it.
    pub(crate) watch: Option<Watch>,
}

impl Before {
    pub(crate) fn new(found: KeyValue, seen: i64) -> Self {
        let KeyValue { key: name, create_revision: created, value, lease } = found;
        Self {
            name,
            created,
            lease,
            seen,
            gone: false,
            first: None,
            is_ours: !value.is_empty(),
            watch: None,
        }
    }

    /// Takes over the watch of an earlier read, if that found the same key.
    pub(crate) fn with_watch_of(mut self, earlier: Option<&mut Self>) -> Self {
        let is_same =
            |earlier: &&mut Self| earlier.created == self.created && earlier.name == self.name;
        self.watch = earlier.filter(is_same).and_then(|earlier| earlier.watch.take());
        self
    }
}

type Known = Arc<tokio::sync::Mutex<Option<Place>>>;

/// The entries of all claims.
#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    known: HashMap<(ClaimId, Key), Known>,
    /// The time of the last search for expired entries.
    looked: Option<Moment>,
}

/// Exclusive access to the entry of one claim, so that its requests run one at a time.
pub(crate) struct Seat<'a> {
    claims: &'a Claims,
    id: (ClaimId, Key),
    place: Option<OwnedMutexGuard<Option<Place>>>,
}

impl Claims {
    pub(crate) async fn seat(&self, claim: &Claim) -> Seat<'_> {
        let id = (claim.id(), claim.key().clone());
        let known = Arc::clone(self.table().known.entry(id.clone()).or_default());
        Seat { claims: self, id, place: Some(known.lock_owned().await) }
    }

    /// Removes and returns the entries whose lease is no longer kept alive. The engine has left
    /// them to expire.
    pub(crate) fn over(&self) -> Vec<Place> {
        let (now, mut table) = (Moment::now(), self.table());
        if table.looked.is_some_and(|looked| now.since(looked) < OVER_EACH) {
            return Vec::new();
        }
        table.looked = Some(now);
        let mut over = Vec::new();
        table.known.retain(|_, known| {
            // The table is locked, so every user of an entry already has a reference to it.
            let unused = Arc::strong_count(known) == 1;
            let Some(mut place) = known.try_lock().ok().filter(|_| unused) else { return true };
            let is_over = place.as_ref().is_none_or(|place| place.is_over(now));
            if is_over {
                over.extend(place.take());
            }
            !is_over
        });
        over
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::ops::Deref for Seat<'_> {
    type Target = Option<Place>;

    fn deref(&self) -> &Option<Place> {
        self.place.as_ref().expect("it is here until it is dropped")
    }
}

impl std::ops::DerefMut for Seat<'_> {
    fn deref_mut(&mut self) -> &mut Option<Place> {
        self.place.as_mut().expect("it is here until it is dropped")
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut table = self.claims.table();
        let is_empty = self.place.take().is_none_or(|place| place.is_none());
        // No other caller uses or awaits the entry, and a new one must lock the table first.
        if is_empty && table.known.get(&self.id).is_some_and(|known| Arc::strong_count(known) == 1)
        {
            table.known.remove(&self.id);
        }
    }
}

/// How often a waiter with a watched predecessor reads its queue. Another client may have deleted
/// the waiter's key, and the holder may have changed.
const LOOK_EACH_WATCHED: Duration = Duration::from_secs(3 * 60);
/// How often expired entries are searched for.
const OVER_EACH: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(3);

    async fn take_places(claims: &Claims, count: u32) -> Vec<Claim> {
        let claim = |n: u32| Claim::new(Key::new(&n.to_string()).unwrap(), Duration::from_secs(2));
        let all: Vec<_> = (0..count).map(claim).collect();
        for claim in &all {
            let lease = Lease::new(1, TTL, Moment::now());
            *claims.seat(claim).await = Some(Place::new(b"q/", lease, 3));
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_over_is_forgotten_and_told_once() {
        let claims = Claims::default();
        let [used, kept, ..] = &*take_places(&claims, 10).await else { panic!("ten") };
        tokio::time::advance(TTL).await;
        assert!(claims.over().is_empty(), "the members may give it more time");
        tokio::time::advance(TTL).await;
        claims.seat(kept).await.as_mut().unwrap().lease.kept_alive(Moment::now(), TTL, 1);
        let in_use = claims.seat(used).await;
        assert_eq!(claims.over().len(), 8);
        drop(in_use);
        tokio::time::advance(OVER_EACH).await;
        assert_eq!(claims.over().len(), 1);
        assert_eq!(claims.table().known.len(), 1);
        assert!(claims.seat(kept).await.is_some());
        drop(claims.seat(used).await);
        assert_eq!(claims.table().known.len(), 1);
    }

    /// The next renewal looks up its lease, which is unknown until then.
    #[tokio::test(start_paused = true)]
    async fn a_place_whose_lease_is_not_known_just_now_is_not_over() {
        let claims = Claims::default();
        let [claim] = &*take_places(&claims, 1).await else { panic!("one") };
        let lease = Lease::new(2, Duration::ZERO, Moment::now());
        claims.seat(claim).await.as_mut().unwrap().lease = lease;
        tokio::time::advance(TTL).await;
        assert!(claims.over().is_empty());
    }

    /// Waiters keep their leases alive but do not verify them by a majority.
    #[tokio::test(start_paused = true)]
    async fn who_waits_for_longer_than_a_lease_is_not_forgotten() {
        let claims = Claims::default();
        let all = take_places(&claims, 10).await;
        for _ in 0..6 {
            tokio::time::advance(TTL * 2 / 3).await;
            for claim in &all {
                let mut seat = claims.seat(claim).await;
                let place = seat.as_mut().expect("it was kept alive");
                place.lease.kept_alive(Moment::now(), TTL, 1);
            }
            assert!(claims.over().is_empty());
        }
    }
}
