//! The queue of a lock, whose first entry holds the lock. Joins, reads, waits in and leaves the
//! queue. Called by the `LockBackend` implementation.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join;
use registry_core::{Attempt, BackendError, Busy, Claim, FencingToken, Grant, Moment, Release};
use tokio::time::{Instant, sleep, sleep_until};

use crate::backend::{EtcdBackend, TRIES};
use crate::claims::{Before, Place, Seat};

use crate::ears::Heard;
use crate::error::{Failure, unreadable};
use crate::keep_alive::KeptAlive;
use crate::lease::{Lease, seconds};
use crate::link::Limits;
use crate::record;
use crate::txn;
use crate::wire::{KeyValue, LeaseTimeToLiveRequest};

/// The result of one read of the queue.
enum Step {
    Answer(Attempt),
    /// The queue has changed or the entry is lost: try again.
    Again,
}

impl EtcdBackend {
    /// Adds the claim to the queue unless it has an entry, and returns whether that entry is first.
    pub(crate) async fn step_up(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mut seat = self.claims.seat(claim).await;
        for _ in 0..TRIES {
            let step = match &mut *seat {
                Some(place) if place.created.is_some() => self.look(claim, &mut seat).await?,
                _ => self.join(claim, &mut seat).await?,
            };
            if let Step::Answer(attempt) = step {
                return Ok(attempt);
            }
        }
        Err(BackendError::transient("etcd: the leases end faster than they can be used"))
    }

    /// Joins the queue. A claim that does not wait joins only an empty queue.
    async fn join(&self, claim: &Claim, seat: &mut Seat<'_>) -> Result<Step, BackendError> {
        self.clear_away_what_is_over();
        let queue = self.names.queue(claim.key());
        let mut place = match seat.take() {
            // The entry of an attempt with an unknown outcome.
            Some(place) => place,
            None => {
                let seconds = seconds(claim.lease());
                Place::new(&queue, self.pool.take(seconds).await?, seconds)
            }
        };
        match self.refresh(claim, &mut place.lease).await {
            Ok(KeptAlive::Yes) => {}
            Ok(KeptAlive::Unknown) => {
                self.abandon(place);
                return Ok(Step::Again);
            }
            // No request for the entry was sent this time.
            Err(error) => return Err(self.keep_or_drop(seat, place, error.as_refused())),
        }
        let trace = match self.new_trace(&queue, &place).await {
            Ok(trace) => trace,
            Err(error) => return Err(self.keep_or_drop(seat, place, error.as_refused())),
        };
        let trace_lease = trace.as_ref().map(|trace| trace.lease);
        let record = record::write(claim, &self.host);
        let join = if claim.queue() { txn::join } else { txn::join_empty };
        let join = join(&queue, &place.name, record, place.lease.id, trace);
        let mut answer = match self.ask(join).await {
            Ok(answer) => answer,
            Err(Failure::NoLease) => {
                // The missing lease may be the tombstone's. Without the entry's lease, no earlier
                // request for the entry can take effect any more.
                self.abandon(place);
                self.pool.distrust();
                trace_lease.into_iter().for_each(|lease| self.traces.forget(lease));
                return Ok(Step::Again);
            }
            Err(failure) => return Err(self.keep_or_drop(seat, place, failure.into_error())),
        };
        place.lease.prove(answer.header.raft_term);
        let revision = answer.header.revision;
        if answer.succeeded {
            place.created = Some(revision);
            place.trace = trace_lease;
            answer.skip()?;
            if claim.queue() {
                let before = answer.keys()?.into_iter().find(|other| other.key != place.name);
                place.before = before.map(|before| Before::new(before, revision));
            }
            let traces = answer.keys_if_any()?;
            if place.before.is_none() && self.others(&place, &traces) {
                return Ok(self.let_hear(seat, place, traces).await);
            }
            return Ok(self.judge(claim, seat, place, None));
        }
        let (own, first) = (answer.key()?, answer.key()?);
        if let Some(own) = own {
            if !record::is_of(&own.value, claim.id()) {
                // Another client has chosen the same lease number.
                self.abandon(place);
                return Ok(Step::Again);
            }
            place.created = Some(own.create_revision);
            **seat = Some(place);
            return Ok(Step::Again);
        }
        let Some(first) = first else { return Err(unreadable()) };
        self.leave_unused(seat, place);
        if record::is_of(&first.value, claim.id()) {
            return self.adopt(claim, seat, first).await;
        }
        Ok(Step::Answer(Attempt::Busy(busy(claim, &first).with_mark(mark(&first)))))
    }

    /// Reads the queue for an existing entry. Verifies first that the entry still exists with the
    /// same revision.
    async fn look(&self, claim: &Claim, seat: &mut Seat<'_>) -> Result<Step, BackendError> {
        if let Some(busy) = seat.as_ref().and_then(|place| place.still_waits(Moment::now())) {
            return Ok(Step::Answer(Attempt::Busy(busy)));
        }
        let (Some(mut place), queue) = (seat.take(), self.names.queue(claim.key())) else {
            return Ok(Step::Again);
        };
        let created = place.created.unwrap_or_default();
        match self.refresh(claim, &mut place.lease).await {
            Ok(KeptAlive::Yes) => {}
            Ok(KeptAlive::Unknown) => {
                // The next entry may hold the lock by now, so the claim must rejoin behind it.
                self.abandon(place);
                return Ok(Step::Again);
            }
            Err(error) => {
                **seat = Some(place);
                return Err(error.as_unknown());
            }
        }
        let mut was_before = match place.before.take() {
            Some(before) => match self.still_waits(&mut place, before).await {
                Ok(Ok(answer)) => {
                    **seat = Some(place);
                    return Ok(Step::Answer(answer));
                }
                Ok(Err(before)) => Some(before),
                Err(error) => {
                    **seat = Some(place);
                    return Err(error.as_unknown());
                }
            },
            None => None,
        };
        let traces = self.names.traces(&queue);
        // A tombstone that was written again later is younger than the entries behind it, so the
        // search by revision does not find it.
        let trace = was_before.as_ref().and_then(|before| self.names.trace(&before.name));
        let look = txn::look(&queue, &place.name, created, traces.as_deref(), trace.as_deref());
        let look = self.ask(look);
        let (answer, let_go) = match &was_before {
            // This entry is probably first now, so both requests run concurrently.
            Some(before) if before.gone => join(look, self.has_let_go(before)).await,
            _ => (look.await, false),
        };
        let answer = answer.and_then(|mut answer| {
            let found = (answer.key(), answer.key(), answer.key(), answer.keys_if_any());
            let (Ok(own), Ok(before), Ok(first), Ok(mut traces)) = found else {
                return Err(Failure::Trouble(unreadable()));
            };
            let again = answer.keys_if_any().map_err(Failure::Trouble)?.into_iter();
            let left_again = was_before.as_ref().map(|before| txn::left_again(before.created));
            traces.extend(again.filter(|trace| Some(&trace.value) == left_again.as_ref()));
            Ok((answer.header, own, before, first, traces))
        });
        let (header, own, before, first, traces) = match answer {
            Ok(answer) => answer,
            Err(failure) => {
                place.before = was_before;
                **seat = Some(place);
                return Err(failure.into_error().as_unknown());
            }
        };
        place.lease.prove(header.raft_term);
        if own.is_none_or(|own| own.create_revision != created) {
            self.abandon(place);
            return Ok(Step::Again);
        }
        place.before = before
            .map(|before| Before::new(before, header.revision).with_watch_of(was_before.as_mut()));
        if place.before.is_none() {
            if place.lease.left() < claim.lease() / 2 {
                // The entry is first, but its remaining lease is not proven: the leader has just
                // changed.
                place.before = was_before;
                **seat = Some(place);
                return Ok(Step::Again);
            }
            let unheard = match was_before.filter(|_| !let_go) {
                Some(before) => before.gone || !self.has_let_go(&before).await,
                None => false,
            };
            let settles = match place.settling {
                Some(since) => Moment::now().since(since) < SETTLING,
                None => unheard || self.others(&place, &traces),
            };
            if settles {
                return Ok(self.let_hear(seat, place, traces).await);
            }
        }
        Ok(self.judge(claim, seat, place, first.as_ref()))
    }

    /// Returns `Busy` if the entry and its predecessor `before` are unchanged. Otherwise returns
    /// `before`, and the caller must read the whole queue.
    async fn still_waits(
        &self,
        place: &mut Place,
        before: Before,
    ) -> Result<Result<Attempt, Before>, BackendError> {
        let fresh = |(_, at): &&(Busy, Moment)| Moment::now().since(*at) < LOOK_EACH;
        let Some((busy, _)) = before.first.as_ref().filter(fresh).filter(|_| !before.gone) else {
            return Ok(Err(before));
        };
        let (busy, peek) = (busy.clone(), txn::peek(&place.name, &before.name));
        let mut answer = match self.ask(peek).await {
            Ok(answer) => answer,
            Err(failure) => {
                place.before = Some(before);
                return Err(failure.into_error());
            }
        };
        let (own, other) = (answer.key()?, answer.key()?);
        let is = |found: Option<KeyValue>, created| {
            found.is_some_and(|found| found.create_revision == created)
        };
        if !is(own, place.created.unwrap_or_default()) || !is(other, before.created) {
            return Ok(Err(before));
        }
        place.lease.prove(answer.header.raft_term);
        place.before = Some(Before { seen: answer.header.revision, ..before });
        Ok(Ok(Attempt::Busy(busy)))
    }

    /// Creates a tombstone for an entry that is not in the queue yet.
    async fn new_trace(
        &self,
        queue: &[u8],
        place: &Place,
    ) -> Result<Option<txn::Trace>, BackendError> {
        let names = (self.names.trace(&place.name), self.names.traces(queue), place.seconds);
        let (Some(name), Some(all), Some(seconds)) = names else { return Ok(None) };
        let lease = self.traces.lease(seconds, &self.pool, &self.keep_alive).await?;
        Ok(Some(txn::Trace { name, lease, all }))
    }

    /// Returns whether any of these tombstones belongs to another entry.
    fn others(&self, place: &Place, traces: &[KeyValue]) -> bool {
        let own = self.names.trace(&place.name);
        traces.iter().any(|trace| own.as_ref() != Some(&trace.key))
    }

    /// Waits for `SETTLING` before the entry, which is first now, is checked again. Its predecessor
    /// was deleted without a release, and the wait lets that holder detect its loss. A holder whose
    /// lease expired detects the loss earlier, but the two cases cannot be distinguished.
    async fn let_hear(
        &self,
        seat: &mut Seat<'_>,
        mut place: Place,
        mut traces: Vec<KeyValue>,
    ) -> Step {
        let own = self.names.trace(&place.name);
        traces.retain(|trace| own.as_ref() != Some(&trace.key));
        let since = *place.settling.get_or_insert_with(Moment::now);
        // A caller that is cancelled during the wait and calls again continues the same wait.
        **seat = Some(place);
        sleep(SETTLING.saturating_sub(Moment::now().since(since))).await;
        for trace in traces {
            self.pool.erase(trace.key, trace.create_revision);
        }
        Step::Again
    }

    async fn lives(&self, lease: i64) -> bool {
        let asked = LeaseTimeToLiveRequest { id: lease };
        matches!(self.link.call(asked).await, Ok(answer) if answer.ttl > 0)
    }

    /// Returns whether the deleted predecessor released its lock, in a layout without tombstones.
    /// Its lease still exists then; otherwise the lease has ended with the lock. Peers end their
    /// lease even at a release, and a delay would not help them to detect a loss. They therefore
    /// always count as released.
    async fn has_let_go(&self, before: &Before) -> bool {
        if !before.is_ours || self.names.have_traces() {
            return true;
        }
        self.lives(before.lease).await
    }

    /// Returns the grant if the entry is first, otherwise `Busy`.
    fn judge(
        &self,
        claim: &Claim,
        seat: &mut Seat<'_>,
        mut place: Place,
        first: Option<&KeyValue>,
    ) -> Step {
        let attempt = match &mut place.before {
            None => {
                place.granted = true;
                let token = place.created.and_then(|created| FencingToken::try_from(created).ok());
                let lease = place.lease.left().min(claim.lease());
                Attempt::Granted(Grant::new(token, lease))
            }
            Some(before) => {
                let told = first.map_or_else(Busy::new, |first| busy(claim, first));
                let told = told.with_mark(u64::try_from(before.created).unwrap_or(0));
                before.first = first.map(|_| (told.clone(), Moment::now()));
                Attempt::Busy(told)
            }
        };
        **seat = Some(place);
        Step::Answer(attempt)
    }

    /// Takes over the entry that another client created for the same claim.
    async fn adopt(
        &self,
        claim: &Claim,
        seat: &mut Seat<'_>,
        first: KeyValue,
    ) -> Result<Step, BackendError> {
        let lease = Lease::new(first.lease, Duration::ZERO, Moment::now());
        **seat = Some(Place::found(first, lease, true));
        self.look(claim, seat).await
    }

    /// Keeps the lease alive if it may end before the claim's lease would.
    async fn refresh(&self, claim: &Claim, lease: &mut Lease) -> Result<KeptAlive, BackendError> {
        if lease.left() >= claim.lease() {
            return Ok(KeptAlive::Yes);
        }
        let patience = self.link.patience();
        let limits = Limits { silence: patience, total: patience };
        self.keep_alive.keep_alive(lease, limits).await
    }

    /// Ends an entry's lease and erases its tombstone, in the background.
    pub(crate) fn abandon(&self, place: Place) {
        if place.seconds.is_some() {
            self.pool.end(place.lease.id);
        }
        if let Some(trace) = self.names.trace(&place.name) {
            self.pool.erase_later(trace);
        }
    }

    /// Abandons the entries that the engine left to expire, because the leases of their tombstones
    /// may last for long.
    fn clear_away_what_is_over(&self) {
        let over = self.claims.over().into_iter();
        // Another client maintains the leases that it created.
        over.filter(|place| place.seconds.is_some()).for_each(|place| self.abandon(place));
    }

    /// Handles a failed request: keeps the entry if a request for it may have taken effect,
    /// otherwise reuses its lease.
    fn keep_or_drop(
        &self,
        seat: &mut Seat<'_>,
        mut place: Place,
        error: BackendError,
    ) -> BackendError {
        if !error.refused() {
            place.stray = true;
        }
        if place.stray {
            **seat = Some(place);
            return error.as_unknown();
        }
        self.give_lease_back(place);
        error
    }

    /// Handles an entry that was not created in the queue.
    fn leave_unused(&self, seat: &mut Seat<'_>, place: Place) {
        if place.stray {
            **seat = Some(place);
        } else {
            self.give_lease_back(place);
        }
    }

    /// Returns an entry's lease to the pool, unless a request for the entry may still arrive.
    fn give_lease_back(&self, place: Place) {
        match place.seconds {
            Some(seconds) if !place.stray => self.pool.give_back(seconds, place.lease),
            _ => self.abandon(place),
        }
    }

    /// Removes the claim's entry from the queue.
    pub(crate) async fn step_down(&self, claim: &Claim) -> Result<Release, BackendError> {
        let mut seat = self.claims.seat(claim).await;
        let known = seat.as_ref().is_some_and(|place| place.created.is_some());
        if !known {
            return self.leave_unknown(claim, &mut seat).await;
        }
        let Some(place) = &mut *seat else { return Ok(Release::NotHeld) };
        // The deletion of the own key is not a loss.
        place.watch = None;
        let (created, queue) = (place.created.unwrap_or_default(), self.names.queue(claim.key()));
        let trace = self.names.trace(&place.name);
        let leave = if place.granted {
            txn::delete_with(&place.name, created, trace.as_deref())
        } else {
            txn::leave(&queue, &place.name, created, trace.as_deref())
        };
        let mut answer = self.ask(leave).await.map_err(Failure::into_error)?;
        let was_first = answer.succeeded && (place.granted || answer.key()?.is_none());
        if let Some(place) = seat.take() {
            self.give_lease_back(place);
        }
        Ok(if was_first { Release::Freed } else { Release::NotHeld })
    }

    /// Removes the claim's entry from the queue if the cache does not know its revision.
    async fn leave_unknown(
        &self,
        claim: &Claim,
        seat: &mut Seat<'_>,
    ) -> Result<Release, BackendError> {
        let freed = match self.find(claim).await? {
            Some(found) => {
                let created = found.created.unwrap_or_default();
                let trace = self.names.trace(&found.name);
                let gone = txn::delete_with(&found.name, created, trace.as_deref());
                let gone = self.ask(gone).await;
                gone.map_err(Failure::into_error)?.succeeded && found.granted
            }
            None => false,
        };
        if let Some(place) = &**seat {
            // Without its lease, no earlier request for the entry can take effect.
            self.pool.end_now(place.lease.id).await.map_err(BackendError::as_unknown)?;
            if let Some(place) = seat.take() {
                self.abandon(place);
            }
        }
        Ok(if freed { Release::Freed } else { Release::NotHeld })
    }

    /// Searches the queue for the claim's entry.
    pub(crate) async fn find(&self, claim: &Claim) -> Result<Option<Place>, BackendError> {
        let all = self.range(txn::all(&self.names.queue(claim.key()))).await?.kvs;
        let at = all.iter().position(|place| record::is_of(&place.value, claim.id()));
        Ok(at.and_then(|at| {
            let found = all.into_iter().nth(at)?;
            let lease = Lease::new(found.lease, Duration::ZERO, Moment::now());
            Some(Place::found(found, lease, at == 0))
        }))
    }

    /// Returns the key of the claim that was granted in the revision `created`; `None` if it does
    /// not exist.
    pub(crate) async fn name_of(
        &self,
        claim: &Claim,
        created: i64,
    ) -> Result<Option<Vec<u8>>, BackendError> {
        let known = {
            let seat = self.claims.seat(claim).await;
            let place = seat.as_ref().filter(|place| place.created == Some(created));
            place.map(|place| place.name.clone())
        };
        if known.is_some() {
            return Ok(known);
        }
        let mark = u64::try_from(created).unwrap_or(0);
        Ok(self.one_of(claim, mark).await?.map(|(name, _)| name))
    }

    /// Waits until the claim's predecessor may be deleted, and keeps the claim's lease alive
    /// meanwhile. `mark` is the creation revision of the predecessor.
    pub(crate) async fn stand_by(&self, claim: &Claim, mark: u64) {
        let known = {
            let mut seat = self.claims.seat(claim).await;
            seat.as_mut().and_then(|place| {
                let before = place.before.as_mut()?;
                // Stored with the entry, so that the next poll does not create another watch.
                let watch = before.watch.take_if(|watch| watch.lives() || watch.heard_of_end());
                let watch = watch.unwrap_or_else(|| {
                    self.ears.wait(before.name.clone(), before.seen.saturating_add(1))
                });
                let heard = before.watch.insert(watch).heard();
                let every = beats(place.lease.ttl());
                let since = Moment::now().since(place.lease.latest());
                Some((heard, every, every.saturating_sub(since)))
            })
        };
        let (heard, _watch, every, mut beat_at) = match known {
            Some((heard, every, first)) => (heard, None, Some(every), Some(Instant::now() + first)),
            None => match self.one_of(claim, mark).await {
                Ok(Some((name, seen))) => {
                    let watch = self.ears.wait(name, seen.saturating_add(1));
                    (watch.heard(), Some(watch), None, None)
                }
                Ok(None) => return,
                Err(_) => return sleep(PAUSE).await,
            },
        };
        let mut heard = pin!(heard);
        loop {
            let beat = async {
                match beat_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                heard = &mut heard => {
                    if heard != Heard::Deleted {
                        // The caller reads the queue again, after a pause that limits the rate.
                        return sleep(PAUSE).await;
                    }
                    if let Some(place) = &mut *self.claims.seat(claim).await
                        && let Some(before) = &mut place.before
                    {
                        before.gone = true;
                    }
                    return;
                }
                () = beat => {}
            }
            let every = every.unwrap_or(BEAT_MIN);
            let next = match self.beat(claim, every / 4).await {
                Ok(KeptAlive::Yes) => every,
                // The entry may be lost, so the caller must read the queue.
                Ok(KeptAlive::Unknown) => return,
                Err(_) => (every / 8).max(BEAT_RETRY_MIN),
            };
            beat_at = Some(Instant::now() + next);
        }
    }

    /// Returns the entry that was created in the revision `mark`, and a revision in which it
    /// existed.
    async fn one_of(
        &self,
        claim: &Claim,
        mark: u64,
    ) -> Result<Option<(Vec<u8>, i64)>, BackendError> {
        let mark = i64::try_from(mark).unwrap_or(0);
        let found = self.range(txn::of_revision(&self.names.queue(claim.key()), mark)).await?;
        let revision = found.header.ok_or_else(unreadable)?.revision;
        Ok(found.kvs.into_iter().next().map(|found| (found.key, revision)))
    }

    /// Keeps the lease of a waiter alive.
    async fn beat(&self, claim: &Claim, limit: Duration) -> Result<KeptAlive, BackendError> {
        let mut seat = self.claims.seat(claim).await;
        let Some(place) = &mut *seat else { return Ok(KeptAlive::Unknown) };
        let limit = self.link.patience().min(limit.max(BEAT_MIN));
        self.trace_lease(place.seconds);
        let limits = Limits { silence: limit, total: limit };
        let kept = self.keep_alive.keep_alive(&mut place.lease, limits).await?;
        if kept == KeptAlive::Unknown
            && let Some(before) = &mut place.before
        {
            // The cached `Busy` must not answer the next poll.
            before.first = None;
        }
        Ok(kept)
    }

    /// Returns the tombstone lease for entries of this duration, if it exists. Requests its renewal
    /// if that is due.
    pub(crate) fn trace_lease(&self, seconds: Option<i64>) -> Option<i64> {
        self.clear_away_what_is_over();
        seconds.and_then(|seconds| self.traces.kept(seconds, &self.keep_alive))
    }
}

fn busy(claim: &Claim, first: &KeyValue) -> Busy {
    Busy::new().with_holder(record::holder(claim.key().clone(), first, None))
}

fn mark(place: &KeyValue) -> u64 {
    u64::try_from(place.create_revision).unwrap_or(0)
}

/// Returns the interval at which a waiter keeps its lease alive. It is as long as retries permit,
/// because the cluster carries the load of all waiters.
fn beats(ttl: Duration) -> Duration {
    (ttl * 3 / 4).min(ttl.saturating_sub(BEAT_SPARE)).max(ttl / 3).clamp(BEAT_MIN, BEAT_MAX)
}

/// The time that remains for retries, if the lease is long enough.
const BEAT_SPARE: Duration = Duration::from_secs(5);
const BEAT_RETRY_MIN: Duration = Duration::from_millis(100);
/// The minimum interval at which a waiter keeps its lease alive.
const BEAT_MIN: Duration = Duration::from_millis(500);
/// The maximum interval, however long the lease lasts according to the member.
const BEAT_MAX: Duration = Duration::from_secs(60 * 60);
/// How long the next grant is delayed after a holder's lease was ended early, so that the holder
/// can detect its loss. It is many times the 25 ms after which every held lock is watched, because
/// responses may be slow on a busy machine. A released lock is granted without this delay.
const SETTLING: Duration = Duration::from_millis(250);
/// How often a waiter reads the whole queue. This only updates the reported holder.
const LOOK_EACH: Duration = Duration::from_secs(10);
/// The pause before the next read if a watch is not possible.
const PAUSE: Duration = Duration::from_millis(100);
