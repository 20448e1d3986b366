//! What this client remembers of its claims: where each one stands, and its lease. A memory only: what is not in it is found in the queue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{Busy, Claim, ClaimId, Key, Moment};
use tokio::sync::OwnedMutexGuard;

use crate::ears::Watch;
use crate::lease::Lease;
use crate::names::Names;
use crate::wire::KeyValue;

/// A claim's place in a queue.
#[derive(Debug)]
pub(crate) struct Place {
    /// Its key.
    pub(crate) name: Vec<u8>,
    pub(crate) lease: Lease,
    /// What was asked for when the lease was made, in seconds. `None` for a lease of another client.
    pub(crate) seconds: Option<i64>,
    /// The revision in which the key came to be. `None` while that is not known, or whether it did.
    pub(crate) created: Option<i64>,
    /// It was the first, and has been since.
    pub(crate) granted: bool,
    /// Since when it has been the first after somebody who may not have heard yet of having been put out.
    pub(crate) settling: Option<Moment>,
    /// Something that was asked for it may not have been carried out yet.
    pub(crate) stray: bool,
    /// The one before it, if there was any at the last look.
    pub(crate) before: Option<Before>,
    /// Listens for its end.
    pub(crate) watch: Option<Watch>,
    /// The lease that its trace is attached to, as far as that is known.
    pub(crate) trace: Option<i64>,
}

impl Place {
    /// A place that is not taken yet.
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

    /// The last answer, if it still holds for all that is known without asking: the one before is watched, nothing was heard of it, and
    /// the place's own lease was kept alive.
    pub(crate) fn still_waits(&self, now: Moment) -> Option<Busy> {
        let before = self.before.as_ref()?;
        let (busy, at) = before.first.as_ref()?;
        let is_certain = !before.gone
            && before.watch.as_ref().is_some_and(Watch::is_confirmed)
            && now.since(*at) < LOOK_EACH_WATCHED
            && now.since(self.lease.latest()) < self.lease.ttl();
        is_certain.then(|| busy.clone())
    }

    /// Whether nobody has kept its lease alive for so long that it is over. Longer than that: the members give leases more time when their
    /// leader changes, and then a place is worth keeping.
    fn is_over(&self, now: Moment) -> bool {
        let asked_for = self.seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let lasts = self.lease.ttl().max(Duration::from_secs(asked_for.unwrap_or(0)));
        now.since(self.lease.latest()) >= lasts * 2
    }

    /// The place that was found under a key.
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

/// The one that stands before a claim.
#[derive(Debug)]
pub(crate) struct Before {
    pub(crate) name: Vec<u8>,
    /// The revision in which it came to be.
    pub(crate) created: i64,
    pub(crate) lease: i64,
    /// A revision in which it was there.
    pub(crate) seen: i64,
    /// It was heard that it is gone.
    pub(crate) gone: bool,
    /// Who was the first of the queue when all of it was looked at last, and when that was.
    pub(crate) first: Option<(Busy, Moment)>,
    /// It is none of a peer, which would write no record.
    pub(crate) is_ours: bool,
    /// Listens for its end, once somebody has waited for that.
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

    /// Takes over the watch of an earlier look, if that was at the same key.
    pub(crate) fn with_watch_of(mut self, earlier: Option<&mut Self>) -> Self {
        let is_same =
            |earlier: &&mut Self| earlier.created == self.created && earlier.name == self.name;
        self.watch = earlier.filter(is_same).and_then(|earlier| earlier.watch.take());
        self
    }
}

type Known = Arc<tokio::sync::Mutex<Option<Place>>>;

/// The places of all claims.
#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    known: HashMap<(ClaimId, Key), Known>,
    /// When those that are over were looked for last.
    looked: Option<Moment>,
}

/// What is known of one claim, for one request about it at a time.
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

    /// Forgets places whose lease nobody keeps alive, and tells them: the engine has left them to their end.
    pub(crate) fn over(&self) -> Vec<Place> {
        let (now, mut table) = (Moment::now(), self.table());
        if table.looked.is_some_and(|looked| now.since(looked) < OVER_EACH) {
            return Vec::new();
        }
        table.looked = Some(now);
        let mut over = Vec::new();
        table.known.retain(|_, known| {
            // Whoever is about to use it has it already, as the table is locked.
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
        // Nobody else has it or waits for it; whoever wants it must ask the table first.
        if is_empty && table.known.get(&self.id).is_some_and(|known| Arc::strong_count(known) == 1)
        {
            table.known.remove(&self.id);
        }
    }
}

/// How often a waiter that is told of the end of the one before it reads its queue: somebody may have deleted its own key, or be the first by now.
const LOOK_EACH_WATCHED: Duration = Duration::from_secs(3 * 60);
/// How often places are looked for that are over.
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

    /// Its lease is found again by the next renewal, and is not known until then.
    #[tokio::test(start_paused = true)]
    async fn a_place_whose_lease_is_not_known_just_now_is_not_over() {
        let claims = Claims::default();
        let [claim] = &*take_places(&claims, 1).await else { panic!("one") };
        let lease = Lease::new(2, Duration::ZERO, Moment::now());
        claims.seat(claim).await.as_mut().unwrap().lease = lease;
        tokio::time::advance(TTL).await;
        assert!(claims.over().is_empty());
    }

    /// Those who wait keep their leases alive, but ask nobody whether that counts.
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
