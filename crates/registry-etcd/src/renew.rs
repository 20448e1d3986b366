//! Renews claims. Keeps each lease alive, then reads all keys in one transaction. That read proves
//! that the keys exist and that the leases last.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::{OptionFuture, join, join_all, try_join};
use registry_core::{BackendError, Claim, Moment, Renewal};
use tokio::time::timeout;

use crate::backend::EtcdBackend;
use crate::claims::Place;

use crate::ears::Watch;
use crate::error::Failure;
use crate::keep_alive::KeptAlive;
use crate::lease::{Lease, seconds};
use crate::link::Limits;
use crate::txn::{self, Answer};
use crate::wire::KeyValue;

/// An entry as it was when its renewal began.
#[derive(Clone)]
struct Renewing {
    name: Vec<u8>,
    created: i64,
    lease: Lease,
    /// The requested duration of the lease, if this client created it.
    seconds: Option<i64>,
    /// The requested duration of the lease, if the renewal replaced the lease.
    new_seconds: Option<i64>,
    /// The lease of the tombstone, if known.
    trace: Option<i64>,
    kept_alive: KeptAlive,
}

type Outcome = Result<Renewal, BackendError>;

impl EtcdBackend {
    /// Renews claims that fit into one transaction.
    pub(crate) async fn renew_batch(&self, claims: &[Claim]) -> Vec<Outcome> {
        let begun = join_all(claims.iter().map(|claim| self.begin(claim))).await;
        let names: Vec<_> =
            begun.iter().flatten().flatten().map(|renewing| &*renewing.name).collect();
        let silence = claims.iter().map(|claim| self.silence_of(claim)).min().unwrap_or_default();
        let seen = match &*names {
            [] => Ok(Seen::default()),
            names => self.see(names, silence).await,
        };
        let settle = claims.iter().zip(begun).map(|(claim, begun)| {
            let seen = &seen;
            async move {
                let answer = match (begun?, seen) {
                    (None, _) => Ok(Renewal::Gone),
                    (Some(renewing), Ok(seen)) => self.settle(claim, renewing, seen).await,
                    (Some(_), Err(error)) => Err(error.clone()),
                };
                if matches!(answer, Ok(Renewal::Gone)) {
                    self.give_up(claim).await;
                }
                answer
            }
        });
        join_all(settle).await
    }

    /// Returns how long the connection may be silent while `claim` is renewed. The rest of the
    /// lease must suffice to try another member.
    fn silence_of(&self, claim: &Claim) -> Duration {
        self.link.patience().min((claim.lease() / 6).max(SILENCE_MIN))
    }

    /// Keeps the claim's lease alive. Returns `None` if the claim has no entry or was not granted.
    async fn begin(&self, claim: &Claim) -> Result<Option<Renewing>, BackendError> {
        let known = {
            let seat = self.claims.seat(claim).await;
            let place = seat.as_ref();
            if place.is_some_and(|place| place.watch.as_ref().is_some_and(Watch::heard_of_end)) {
                // Return at once, so that the holder detects the loss before the next claim is
                // granted.
                return Ok(None);
            }
            place.and_then(Renewing::of)
        };
        let known = match known {
            Some(known) => Some(known),
            None => self.find(claim).await?.as_ref().and_then(Renewing::of),
        };
        let Some(mut renewing) = known else { return Ok(None) };
        let silence = self.silence_of(claim);
        // After that time, the engine starts the next renewal.
        let limits = Limits { silence, total: silence.max(claim.lease() / 3) };
        let trace = self.trace_lease(renewing.seconds);
        let has_none = trace.is_none() || trace != renewing.trace;
        let again = has_none.then(|| self.leave_trace_again(renewing.clone(), silence));
        let again = OptionFuture::from(again);
        let (kept_alive, again) =
            join(self.keep_alive.keep_alive(&mut renewing.lease, limits), again).await;
        renewing.trace = again.unwrap_or(trace);
        renewing.kept_alive = kept_alive?;
        if claim.lease() > renewing.lease.ttl() && renewing.kept_alive == KeptAlive::Yes {
            return self.lengthen(claim, renewing).await;
        }
        Ok(Some(renewing))
    }

    /// Ensures that the entry has a tombstone with a live lease, because another client may have
    /// ended only that lease. Returns the tombstone's lease.
    async fn leave_trace_again(&self, renewing: Renewing, limit: Duration) -> Option<i64> {
        let (trace, seconds) = (self.names.trace(&renewing.name)?, renewing.seconds?);
        let leave = async {
            let lease = self.traces.lease(seconds, &self.pool, &self.keep_alive).await.ok()?;
            let again = txn::leave_again(&renewing.name, renewing.created, &trace, lease);
            match self.ask(again).await {
                Ok(_) => Some(lease),
                Err(Failure::NoLease) => {
                    self.traces.forget(lease);
                    None
                }
                Err(_) => None,
            }
        };
        // The next renewal tries again.
        timeout(limit, leave).await.ok().flatten()
    }

    /// Attaches the claim's key to a longer lease. The key and its revision do not change.
    async fn lengthen(
        &self,
        claim: &Claim,
        mut renewing: Renewing,
    ) -> Result<Option<Renewing>, BackendError> {
        let seconds = seconds(claim.lease());
        let trace = match self.names.trace(&renewing.name) {
            Some(name) => {
                Some((name, self.traces.lease(seconds, &self.pool, &self.keep_alive).await?))
            }
            None => None,
        };
        let trace = trace.as_ref().map(|(name, lease)| (&**name, *lease));
        let trace_lease = trace.map(|(_, lease)| lease);
        let longer = self.pool.grant(seconds).await?;
        let moved = txn::move_to(&renewing.name, renewing.created, longer.id, trace);
        // After an unknown outcome, the next read finds out which lease the key has.
        let moved = self.ask(moved).await.map_err(|failure| {
            if let (Failure::NoLease, Some(lease)) = (&failure, trace_lease) {
                self.traces.forget(lease);
            }
            failure.into_error()
        });
        if !moved?.succeeded {
            self.pool.end(longer.id);
            return Ok(None);
        }
        renewing.lease = longer;
        renewing.new_seconds = Some(seconds);
        renewing.trace = trace_lease;
        Ok(Some(renewing))
    }

    async fn see(&self, names: &[&[u8]], silence: Duration) -> Result<Seen, BackendError> {
        let look = txn::notify_all(names.iter().copied());
        let answer = self.link.call_within(look, silence).await;
        let answer = answer.and_then(|answer| Answer::read(answer).map_err(Failure::Trouble));
        let mut answer = match answer {
            Err(Failure::TooMany) if names.len() > 1 => {
                let (some, others) = names.split_at(names.len() / 2);
                let both = try_join(
                    Box::pin(self.see(some, silence)),
                    Box::pin(self.see(others, silence)),
                );
                let (some, others) = both.await?;
                return Ok(some.and(others));
            }
            answer => answer.map_err(Failure::into_error)?,
        };
        let mut seen = Seen {
            revision: answer.header.revision,
            term: answer.header.raft_term,
            keys: HashMap::new(),
        };
        while let Ok(found) = answer.key() {
            if let Some(found) = found {
                seen.keys.insert(found.key.clone(), found);
            }
        }
        Ok(seen)
    }

    async fn settle(&self, claim: &Claim, mut renewing: Renewing, seen: &Seen) -> Outcome {
        let Some(found) = seen.keys.get(&renewing.name) else { return Ok(Renewal::Gone) };
        if found.create_revision != renewing.created {
            return Ok(Renewal::Gone);
        }
        let mut seat = self.claims.seat(claim).await;
        let place = seat.as_mut().filter(|place| place.created == Some(renewing.created));
        if found.lease != renewing.lease.id {
            // An earlier move of the key succeeded, but its response was lost. The next renewal
            // keeps the right lease alive.
            if let Some(place) = place {
                self.change_lease(
                    place,
                    Lease::new(found.lease, Duration::ZERO, Moment::now()),
                    None,
                );
            }
            return Err(BackendError::transient("etcd: the lock is attached to another lease"));
        }
        if renewing.kept_alive == KeptAlive::Unknown {
            // A member that lags behind may not know a lease that the majority knows.
            return Err(BackendError::transient("etcd: the member does not know the lease"));
        }
        renewing.lease.prove(seen.term);
        let left = renewing.lease.left();
        if let Some(place) = place {
            if renewing.new_seconds.is_some() {
                self.change_lease(place, renewing.lease, renewing.new_seconds);
            } else if place.lease.id == renewing.lease.id && place.lease.left() < left {
                place.lease = renewing.lease;
            }
            place.trace = renewing.trace;
            if !place.watch.as_ref().is_some_and(Watch::lives) && self.ears.are_wanted() {
                let from = seen.revision.saturating_add(1);
                place.watch = Some(self.ears.watch_over(claim.key(), place.name.clone(), from));
            }
        }
        if left < claim.lease() / 2 {
            return Err(BackendError::transient(
                "etcd: the leader that kept the lease alive is none any more",
            ));
        }
        Ok(Renewal::Renewed(left.min(claim.lease())))
    }

    /// Abandons the entry of a lock that is reported as lost.
    async fn give_up(&self, claim: &Claim) {
        let mut seat = self.claims.seat(claim).await;
        if seat.as_ref().is_some_and(|place| place.granted)
            && let Some(place) = seat.take()
        {
            self.abandon(place);
        }
    }

    /// Replaces the lease of an entry by the one that its key is attached to.
    fn change_lease(&self, place: &mut Place, lease: Lease, seconds: Option<i64>) {
        let before = std::mem::replace(&mut place.lease, lease);
        // The key's name contains the old lease number, so no other entry may reuse this lease.
        place.stray = true;
        // The tombstone's lease is unknown as well.
        place.trace = None;
        if place.seconds.is_some() && before.id != place.lease.id {
            self.pool.end(before.id);
        }
        place.seconds = seconds.or(place.seconds);
    }
}

impl Renewing {
    fn of(place: &Place) -> Option<Self> {
        let created = place.created.filter(|_| place.granted)?;
        Some(Self {
            name: place.name.clone(),
            created,
            lease: place.lease.clone(),
            seconds: place.seconds,
            new_seconds: None,
            trace: place.trace,
            kept_alive: KeptAlive::Yes,
        })
    }
}

/// The result of reading many keys.
#[derive(Default)]
struct Seen {
    revision: i64,
    term: u64,
    keys: HashMap<Vec<u8>, KeyValue>,
}

impl Seen {
    /// Merges two results. The earlier revision and term count.
    fn and(mut self, other: Self) -> Self {
        self.keys.extend(other.keys);
        let (revision, term) = (self.revision.min(other.revision), self.term.min(other.term));
        Self { revision, term, ..self }
    }
}

/// The minimum silence after which a connection is dropped, whatever the lease.
const SILENCE_MIN: Duration = Duration::from_millis(500);
