//! What this client remembers of its claims: where each one stands, and its lease. A memory only: what is not in it is found in the queue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
        }
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
        }
    }
}

/// The one that stands before a claim.
#[derive(Debug, Clone)]
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
}

impl Before {
    pub(crate) fn new(found: KeyValue, seen: i64) -> Self {
        let KeyValue { key: name, create_revision: created, value, lease } = found;
        Self { name, created, lease, seen, gone: false, first: None, is_ours: !value.is_empty() }
    }
}

type Known = Arc<tokio::sync::Mutex<Option<Place>>>;

/// The places of all claims.
#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    known: HashMap<(ClaimId, Key), Known>,
    /// How many there may be until those that are over are looked for.
    tidy_at: usize,
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

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Forgets places whose lease nobody keeps alive: the engine has left them to their end.
    fn tidy(&mut self) {
        if self.known.len() < self.tidy_at.max(TIDY_MIN) {
            return;
        }
        self.known.retain(|_, known| {
            let over = known
                .try_lock()
                .is_ok_and(|place| place.as_ref().is_none_or(|place| !place.lease.may_last()));
            !(over && Arc::strong_count(known) == 1)
        });
        self.tidy_at = self.known.len() * 2;
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
        } else {
            table.tidy();
        }
    }
}

const TIDY_MIN: usize = 1_000;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn what_is_over_is_forgotten() {
        let claims = Claims::default();
        let claim = |n: u32| Claim::new(Key::new(&n.to_string()).unwrap(), Duration::from_secs(2));
        drop(claims.seat(&claim(0)).await);
        assert_eq!(claims.table().known.len(), 0);
        for n in 0..3_000 {
            let lease = Lease::new(1, Duration::ZERO, Moment::now());
            *claims.seat(&claim(n)).await = Some(Place::new(b"q/", lease, 1));
        }
        assert!(claims.table().known.len() <= TIDY_MIN);
        let lasting = claim(0);
        let lease = Lease::new(1, Duration::from_secs(60), Moment::now());
        *claims.seat(&lasting).await = Some(Place::new(b"q/", lease, 1));
        for n in 0..3_000 {
            let lease = Lease::new(1, Duration::ZERO, Moment::now());
            *claims.seat(&claim(n)).await = Some(Place::new(b"q/", lease, 1));
        }
        assert!(claims.seat(&lasting).await.is_some());
    }

    /// Those who wait keep their leases alive, but ask nobody whether that counts.
    #[tokio::test(start_paused = true)]
    async fn who_waits_for_longer_than_a_lease_is_not_forgotten() {
        const TTL: Duration = Duration::from_secs(3);
        let claims = Claims::default();
        let claims_of_many: Vec<_> = (0..TIDY_MIN * 2)
            .map(|n| Claim::new(Key::new(&n.to_string()).unwrap(), Duration::from_secs(2)))
            .collect();
        for claim in &claims_of_many {
            let lease = Lease::new(1, TTL, Moment::now());
            *claims.seat(claim).await = Some(Place::new(b"q/", lease, 1));
        }
        for _ in 0..3 {
            tokio::time::advance(TTL * 2 / 3).await;
            for claim in &claims_of_many {
                let mut seat = claims.seat(claim).await;
                let place = seat.as_mut().expect("it was kept alive");
                place.lease.kept_alive(Moment::now(), TTL, 1);
            }
        }
    }
}
