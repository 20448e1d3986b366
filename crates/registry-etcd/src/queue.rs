//! The queue of a lock: who is first in it holds the lock. Joins, looks, waits and leaves.

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

/// What came of one look.
enum Step {
    Answer(Attempt),
    /// The queue has changed, or the place is lost: once more.
    Again,
}

impl EtcdBackend {
    /// Takes the claim's place in the queue, if it has none, and looks whether it is the first.
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

    /// Joins the queue; if the claim does not wait, only where nobody stands.
    async fn join(&self, claim: &Claim, seat: &mut Seat<'_>) -> Result<Step, BackendError> {
        self.clear_away_what_is_over();
        let queue = self.names.queue(claim.key());
        let mut place = match seat.take() {
            // The one of an attempt whose outcome is not known.
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
            // Nothing was asked for the place this time.
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
                // It may be that of the trace. Nothing that was asked for the place may arrive any more.
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
                // Nobody else has this lease, unless somebody chose the same number.
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

    /// Looks at the place of the claim again: first of all, whether it is still there and still the same.
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
                // The next one of the queue may hold the lock by now. Whoever was too late stands behind it.
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
        // One that was left again later is younger than those who stood behind it by then.
        let trace = was_before.as_ref().and_then(|before| self.names.trace(&before.name));
        let look = txn::look(&queue, &place.name, created, traces.as_deref(), trace.as_deref());
        let look = self.ask(look);
        let (answer, let_go) = match &was_before {
            // Most likely it is its turn: both questions at once.
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
                // Granted, but it is not proven for how long: the leader has just changed.
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

    /// The answer to one who stands where it stood, behind the one who stood `before` it. Otherwise all of the queue has to be looked at.
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

    /// A trace for a place that is not taken yet.
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

    /// Whether any of these traces is that of somebody else.
    fn others(&self, place: &Place, traces: &[KeyValue]) -> bool {
        let own = self.names.trace(&place.name);
        traces.iter().any(|trace| own.as_ref() != Some(&trace.key))
    }

    /// Lets somebody who was first without leaving by its own will hear of its end, before the place that is the first now is looked at again. At
    /// the end of a lease that was not kept alive its holder has known for longer, but these cannot be told apart.
    async fn let_hear(
        &self,
        seat: &mut Seat<'_>,
        mut place: Place,
        mut traces: Vec<KeyValue>,
    ) -> Step {
        let own = self.names.trace(&place.name);
        traces.retain(|trace| own.as_ref() != Some(&trace.key));
        let since = *place.settling.get_or_insert_with(Moment::now);
        // Whoever is dropped meanwhile and asks again goes on waiting.
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

    /// Whether the one before, which is gone, left by its own will, where there are no traces to tell. If it did not, its lease has ended
    /// too; but peers end theirs with the lock, and none of them would hear of a loss any sooner.
    async fn has_let_go(&self, before: &Before) -> bool {
        if !before.is_ours || self.names.have_traces() {
            return true;
        }
        self.lives(before.lease).await
    }

    /// Whether the place is the first.
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

    /// Takes over what another client was granted for the same claim.
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

    /// Makes sure that the lease lasts for as long as the claim wants.
    async fn refresh(&self, claim: &Claim, lease: &mut Lease) -> Result<KeptAlive, BackendError> {
        if lease.left() >= claim.lease() {
            return Ok(KeptAlive::Yes);
        }
        let patience = self.link.patience();
        let limits = Limits { silence: patience, total: patience };
        self.keep_alive.keep_alive(lease, limits).await
    }

    /// Does away with a place that is worth nothing any more, and with whatever may be left of it.
    pub(crate) fn abandon(&self, place: Place) {
        if place.seconds.is_some() {
            self.pool.end(place.lease.id);
        }
        if let Some(trace) = self.names.trace(&place.name) {
            self.pool.erase_later(trace);
        }
    }

    /// Does away with places that the engine has left to their end: their traces have leases that may go on for long.
    fn clear_away_what_is_over(&self) {
        let over = self.claims.over().into_iter();
        // What another client has made it keeps itself.
        over.filter(|place| place.seconds.is_some()).for_each(|place| self.abandon(place));
    }

    /// After trouble: a place that something may have been asked for is remembered.
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

    /// A place that was not taken.
    fn leave_unused(&self, seat: &mut Seat<'_>, place: Place) {
        if place.stray {
            **seat = Some(place);
        } else {
            self.give_lease_back(place);
        }
    }

    /// Keeps the lease of a place that is over for the next claim, if nothing is on its way for it.
    fn give_lease_back(&self, place: Place) {
        match place.seconds {
            Some(seconds) if !place.stray => self.pool.give_back(seconds, place.lease),
            _ => self.abandon(place),
        }
    }

    /// Leaves the queue.
    pub(crate) async fn step_down(&self, claim: &Claim) -> Result<Release, BackendError> {
        let mut seat = self.claims.seat(claim).await;
        let known = seat.as_ref().is_some_and(|place| place.created.is_some());
        if !known {
            return self.leave_unknown(claim, &mut seat).await;
        }
        let Some(place) = &mut *seat else { return Ok(Release::NotHeld) };
        // What comes of it is our own doing, and no loss.
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

    /// Leaves the queue wherever the claim stands in it, if it does.
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
            // Nothing that was asked for the place can take effect after that.
            self.pool.end_now(place.lease.id).await.map_err(BackendError::as_unknown)?;
            if let Some(place) = seat.take() {
                self.abandon(place);
            }
        }
        Ok(if freed { Release::Freed } else { Release::NotHeld })
    }

    /// Looks for the claim in the queue.
    pub(crate) async fn find(&self, claim: &Claim) -> Result<Option<Place>, BackendError> {
        let all = self.range(txn::all(&self.names.queue(claim.key()))).await?.kvs;
        let at = all.iter().position(|place| record::is_of(&place.value, claim.id()));
        Ok(at.and_then(|at| {
            let found = all.into_iter().nth(at)?;
            let lease = Lease::new(found.lease, Duration::ZERO, Moment::now());
            Some(Place::found(found, lease, at == 0))
        }))
    }

    /// The key by which the claim that was granted in the revision `created` holds its lock; `None` if it is not there.
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

    /// Returns when the one before the claim may be gone; keeps its place in the queue until then. `mark` is when the one before came.
    pub(crate) async fn stand_by(&self, claim: &Claim, mark: u64) {
        let known = {
            let mut seat = self.claims.seat(claim).await;
            seat.as_mut().and_then(|place| {
                let before = place.before.as_mut()?;
                // Kept with the place: the next poll must not pay for another one.
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
                        // It is looked again, but not at once and again and again.
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
                // The place may be lost: it is time to look.
                Ok(KeptAlive::Unknown) => return,
                Err(_) => (every / 8).max(BEAT_RETRY_MIN),
            };
            beat_at = Some(Instant::now() + next);
        }
    }

    /// The one that came to be in the revision `mark`, and the revision in which it was there.
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

    /// Keeps the lease of one who waits alive.
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
            // Nothing that is remembered of the place may answer the next poll.
            before.first = None;
        }
        Ok(kept)
    }

    /// The lease for traces of places of this time, if there is one. Has it kept alive.
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

/// How often a waiter keeps its lease alive: as seldom as leaves time to try again, as all waiters of the cluster add up.
fn beats(ttl: Duration) -> Duration {
    (ttl * 3 / 4).min(ttl.saturating_sub(BEAT_SPARE)).max(ttl / 3).clamp(BEAT_MIN, BEAT_MAX)
}

/// The time that is left for further tries, where the lease is long enough.
const BEAT_SPARE: Duration = Duration::from_secs(5);
const BEAT_RETRY_MIN: Duration = Duration::from_millis(100);
/// The least time between two signs of life of one who waits.
const BEAT_MIN: Duration = Duration::from_millis(500);
/// The most, whatever a member says of how long a lease lasts.
const BEAT_MAX: Duration = Duration::from_secs(60 * 60);
/// How long a holder whose lease somebody has ended early has to hear of it before the next one begins. It is many times the time
/// after which all holders listen, as answers may be slow on a machine that has much to do. None is lost where a lock is let go.
const SETTLING: Duration = Duration::from_millis(250);
/// How often a waiter looks at all of the queue, in which somebody else may be the first by now: only to tell who.
const LOOK_EACH: Duration = Duration::from_secs(10);
/// How long a waiter that cannot listen waits before it looks.
const PAUSE: Duration = Duration::from_millis(100);
