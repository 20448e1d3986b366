//! The lock recipe: enqueues a claim, checks its position, and dequeues it. Called by `backend`
//! with the sessions of a claim; opening sessions and keeping them alive is in `session`.
//!
//! Requests are sent in the order of the calls here, and answered in that order. A list requested
//! directly after the creation of a node therefore contains that node, and an uncontended
//! acquisition takes one round trip.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, ClaimId, FencingToken, Grant, Holder,
    Key, Moment, Release, Renewal,
};
use tokio::sync::OwnedMutexGuard;
use zookeeper_client::{CreateMode, Error, Stat};

use crate::error::{explain, is_refusal};
use crate::node::{label, make_parents, note};
use crate::place::{Ahead, Node, OwnWatch, Place, Room, Stake, Watch};
use crate::queue::{Queue, Standing, find, prefix};
use crate::session::{By, Session, Sessions, lock};

/// Enqueues `claim` if it is not queued, and returns whether it is at the head.
pub(crate) async fn try_acquire(
    sessions: &Arc<Sessions>,
    claim: &Claim,
    dir: impl Fn() -> String + Send + Sync,
) -> Result<Attempt, BackendError> {
    loop {
        let (session, place) = sessions.enter(claim, &dir).await?;
        if place.key != *claim.key() {
            let says = "zookeeper: one claim was made for two keys";
            return Err(BackendError::new(BackendErrorKind::Protocol, says).as_refused());
        }
        let mut stake = place.stake.lock().await;
        if stake.left {
            // Dequeued while this call waited for the mutex. Another entry exists or follows.
            continue;
        }
        place.attend();
        stake.lease = claim.lease();
        let attempt = contend(&session, &place, &mut stake, claim).await;
        if stake.is_empty() {
            leave(&session, claim.id(), &place, &mut stake);
        }
        return attempt;
    }
}

fn leave(session: &Session, claim: ClaimId, place: &Arc<Place>, stake: &mut Stake) {
    stake.left = true;
    session.forget(claim, place);
}

async fn contend(
    session: &Arc<Session>,
    place: &Place,
    stake: &mut Stake,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    let mut was_behind = false;
    for _ in 0..TRIES {
        if stake.in_doubt {
            find_again(session, place, stake, claim).await?;
        }
        if stake.held_until.is_some_and(|until| until <= Moment::now()) {
            // The grant has expired, so a new one needs a new token.
            remove(session, stake).await?;
        }
        let children = if stake.node.is_none() {
            match enter(session, place, stake, claim).await? {
                Some(children) => children,
                None => continue,
            }
        } else if stands_as_before(session, stake).await? {
            return Ok(Attempt::Busy(Busy::new()));
        } else {
            look(session, place).await?
        };
        let children = without_ghosts(stake, children);
        let queue = line_up(session, &place.dir, children).await?;
        let Some(node) = &stake.node else { continue };
        let (ahead, is_next) = match queue.place_of(node.name()) {
            Standing::First => return granted(session, stake, claim),
            Standing::Behind { ahead, is_next } => (ahead, is_next),
            // Another client has deleted the node.
            Standing::Absent => {
                stake.lose_node();
                continue;
            }
        };
        let path = format!("{}/{ahead}", place.dir);
        if is_next && is_ghost(session, &place.dir, ahead, &path).await? {
            stake.ghosts.push(ahead.to_owned());
            (stake.ahead, was_behind) = (None, true);
            continue;
        }
        if !claim.queue() {
            remove(session, stake).await?;
            return Ok(Attempt::Busy(Busy::new()));
        }
        if let Some(before) = &mut stake.ahead
            && before.is_watching(ahead)
        {
            before.looked_at = Moment::now();
            return Ok(Attempt::Busy(Busy::new()));
        }
        // Watched by data, not by existence: an existence watch on a missing node would remain set.
        match session.bounded(watch_data(session, &path)).await? {
            Ok((data, stat, watch)) => {
                let name = ahead.to_owned();
                stake.ahead = Some(Ahead { name, watch, looked_at: Moment::now() });
                let busy = Busy::new();
                return Ok(Attempt::Busy(if is_next {
                    busy.with_holder(holder(&place.key, &data, stat.czxid))
                } else {
                    busy
                }));
            }
            // Already deleted: list again.
            Err(Error::NoNode) => (stake.ahead, was_behind) = (None, true),
            Err(error) => return Err(explain(&error).as_unknown()),
        }
    }
    stake.ahead = None;
    if !was_behind {
        // Not contention: in each try, the connection broke, or the node or its parent was missing.
        let says = "zookeeper: the nodes of locks cannot be made, or do not last: connections break at each try, or somebody deletes them";
        return Err(BackendError::transient(says));
    }
    // The queue changes faster than this client reads it. A waiter retries at once.
    Ok(Attempt::Busy(Busy::new()))
}

/// Creates the node of `claim` and returns all children. Returns `None` if the caller must try
/// again: the parents were missing and now exist, or the connection was lost.
async fn enter(
    session: &Arc<Session>,
    place: &Place,
    stake: &mut Stake,
    claim: &Claim,
) -> Result<Option<Vec<String>>, BackendError> {
    let path = format!("{}/{}", place.dir, prefix(claim.id(), session.config().naming));
    let options = CreateMode::EphemeralSequential.with_acls(session.config().acls());
    let client = session.client();
    let sent_at = Moment::now();
    // From here on a node may exist, even if this future is dropped or the response is lost.
    stake.in_doubt = true;
    let data = note(claim);
    let created = client.create(&path, &data, &options);
    let listed = client.list_children(&place.dir);
    // Responses arrive in request order. Awaiting the second one first wakes this task only once.
    let listed = session.bounded(listed).await;
    match session.bounded(created).await? {
        Ok((stat, number)) => {
            stake.in_doubt = false;
            let path = format!("{path}{number}");
            let czxid = if stat.is_invalid() {
                // Servers before 3.5 do not return the creating transaction.
                let seen = session.bounded(client.check_stat(&path)).await?;
                seen.map_err(|error| explain(&error).as_unknown())?.map(|stat| stat.czxid)
            } else {
                Some(stat.czxid)
            };
            stake.node = czxid.map(|czxid| Node { path, czxid });
            session.answered(sent_at);
        }
        Err(Error::NoNode) => {
            stake.in_doubt = false;
            // Never created, or removed by the servers because it was empty, which can happen at
            // any time.
            make_parents(session, &place.dir).await?;
            return Ok(None);
        }
        // The next try reconnects and finds out whether the node exists.
        Err(Error::ConnectionLoss) => return Ok(None),
        Err(error) => {
            stake.in_doubt = !is_refusal(&error);
            return Err(explain(&error));
        }
    }
    match listed? {
        Ok(children) => Ok(Some(children)),
        Err(error) => Err(explain(&error).as_unknown()),
    }
}

/// Determines whether a request whose response was lost created a node for `claim`.
///
/// Requests of this session are executed in order, and a leader rejects those of an earlier
/// connection once it knows of a later one. A node that does not exist now is therefore never
/// created later. This holds only for the current leader's state, so a majority is asked first: a
/// replaced leader would not know.
async fn find_again(
    session: &Arc<Session>,
    place: &Place,
    stake: &mut Stake,
    claim: &Claim,
) -> Result<(), BackendError> {
    let children = match read_certainly(session, &place.dir).await? {
        Ok(children) => children,
        Err(Error::NoNode) => Vec::new(),
        Err(error) => return Err(explain(&error).as_unknown()),
    };
    stake.lose_node();
    for name in find(&children, &prefix(claim.id(), session.config().naming)) {
        let path = format!("{}/{name}", place.dir);
        let found = session.bounded(session.client().check_stat(&path)).await?;
        match found.map_err(|error| explain(&error).as_unknown())? {
            // Only nodes of this session count. A node of the same claim from an earlier session
            // can vanish at any time.
            Some(stat) if stat.ephemeral_owner == session.id() && stake.node.is_none() => {
                stake.node = Some(Node { path, czxid: stat.czxid });
            }
            Some(_) => delete(session, &path).await.map(drop)?,
            None => {}
        }
    }
    stake.in_doubt = false;
    Ok(())
}

/// Returns whether the node directly before a waiter certainly still exists. Concurrent callers
/// share one request, whatever the length of the queue. Returns false periodically, so that a
/// waiter whose own node was deleted lists the queue and finds out.
async fn stands_as_before(session: &Arc<Session>, stake: &Stake) -> Result<bool, BackendError> {
    let Some(Ahead { watch: Some(watch), looked_at, .. }) = &stake.ahead else {
        return Ok(false);
    };
    let look_after = (session.timeout() * LOOK_AFTER).min(LOOK_AFTER_MAX);
    if watch.has_fired() || looked_at.after(look_after) <= Moment::now() {
        return Ok(false);
    }
    tokio::select! {
        biased;
        () = watch.clone().fired() => Ok(false),
        caught_up = session.catch_up() => {
            caught_up?;
            Ok(!watch.has_fired())
        }
    }
}

/// Returns whether this client would be notified of the end of the node directly before a waiter.
pub(crate) fn is_watched(session: &Session, place: &Place) -> bool {
    let Ok(stake) = place.stake.try_lock() else { return false };
    let Some(Ahead { watch: Some(watch), .. }) = &stake.ahead else { return false };
    session.is_healthy() && !watch.has_fired()
}

/// Returns whether the head of a queue exists only on the connected server. A waiter would wait
/// forever for a node that this server kept and the others deleted. A majority is therefore asked
/// about a head that stays for a session time-out. The same majority decides all writes, also those
/// of a holder.
async fn is_ghost(
    session: &Session,
    dir: &str,
    name: &str,
    path: &str,
) -> Result<bool, BackendError> {
    if !lock(session.heads()).is_old(dir, name, session.timeout()) {
        return Ok(false);
    }
    let is_there = session.check(path).await.map_err(BackendError::as_unknown)?;
    if is_there {
        lock(session.heads()).confirm(dir);
    }
    Ok(!is_there)
}

/// Removes the nodes that only the connected server shows.
fn without_ghosts(stake: &mut Stake, mut children: Vec<String>) -> Vec<String> {
    if !stake.ghosts.is_empty() {
        stake.ghosts.retain(|ghost| children.contains(ghost));
        children.retain(|child| !stake.ghosts.contains(child));
    }
    children
}

/// Returns all children as the leader knows them. A lagging server could list a node of this
/// session that is deleted.
async fn look(session: &Arc<Session>, place: &Place) -> Result<Vec<String>, BackendError> {
    match read(session, &place.dir).await? {
        Ok(children) => Ok(children),
        Err(Error::NoNode) => Ok(Vec::new()),
        Err(error) => Err(explain(&error).as_unknown()),
    }
}

/// Returns the children of `dir`, at least as recent as this call.
pub(crate) async fn read(
    session: &Arc<Session>,
    dir: &str,
) -> Result<Result<Vec<String>, Error>, BackendError> {
    let client = session.client();
    let synced = client.sync(dir);
    let listed = client.list_children(dir);
    match session.bounded(synced).await? {
        Ok(()) => session.bounded(listed).await,
        Err(error) => Ok(Err(error)),
    }
}

/// Returns the children of `dir`, at least as recent as this call even if another leader was
/// elected.
async fn read_certainly(
    session: &Arc<Session>,
    dir: &str,
) -> Result<Result<Vec<String>, Error>, BackendError> {
    session.round(By::Majority).await.map_err(BackendError::as_unknown)?;
    // A server rejects a session that has seen more than the server, so this list includes the
    // state that the majority confirmed.
    session.bounded(session.client().list_children(dir)).await
}

/// Sorts the contenders. If their names do not determine the order, requests each node's
/// transaction, all concurrently.
pub(crate) async fn line_up(
    session: &Arc<Session>,
    dir: &str,
    children: Vec<String>,
) -> Result<Queue, BackendError> {
    let unordered = match Queue::of(children) {
        Ok(queue) => return Ok(queue),
        Err(unordered) => unordered,
    };
    let made = unordered.names().iter().map(async |name| {
        let client = session.client();
        let path = format!("{dir}/{name}");
        let seen = client.check_stat(&path);
        let stat = session.bounded(seen).await?.map_err(|error| explain(&error).as_unknown())?;
        Ok::<_, BackendError>(stat.map(|stat| stat.czxid))
    });
    let made = try_join_all(made).await?;
    Ok(unordered.by_transactions(made))
}

/// Reads a node, and watches it if the [watch budget](Room) allows.
async fn watch_data(
    session: &Session,
    path: &str,
) -> Result<(Vec<u8>, Stat, Option<Watch>), Error> {
    let client = session.client();
    match session.room().take(path, Room::ALL) {
        Some(taken) => {
            let (data, stat, watcher) = client.get_and_watch_data(path).await?;
            Ok((data, stat, Some(Watch::new(watcher, taken, &client))))
        }
        None => client.get_data(path).await.map(|(data, stat)| (data, stat, None)),
    }
}

fn granted(session: &Session, stake: &mut Stake, claim: &Claim) -> Result<Attempt, BackendError> {
    let token = stake.node.as_ref().and_then(|node| token(node.czxid));
    let lease = certain(session, claim)?;
    let until = Moment::now().after(claim.lease());
    stake.held_until = Some(stake.held_until.map_or(until, |held| held.max(until)));
    stake.ahead = None;
    let Some(token) = token else {
        let says = "zookeeper: the servers number their transactions below zero";
        return Err(BackendError::new(BackendErrorKind::Protocol, says));
    };
    Ok(Attempt::Granted(Grant::new(Some(token), lease)))
}

/// Returns how long a claim is certainly held: its lease, limited by the validity of the session.
fn certain(session: &Session, claim: &Claim) -> Result<Duration, BackendError> {
    let left = session.certain_left();
    if left < CERTAIN_MIN {
        let says = "zookeeper: the servers have been silent, and have yet to confirm that the session lives";
        return Err(BackendError::transient(says));
    }
    Ok(left.min(claim.lease()))
}

pub(crate) fn token(czxid: i64) -> Option<FencingToken> {
    FencingToken::try_from(czxid).ok()
}

pub(crate) fn holder(key: &Key, data: &[u8], czxid: i64) -> Holder {
    Holder::new(key.clone()).with_label(label(data)).with_token(token(czxid))
}

/// Deletes the node of `stake`, if any. Returns false if it did not exist.
async fn remove(session: &Session, stake: &mut Stake) -> Result<bool, BackendError> {
    let Some(node) = &stake.node else { return Ok(false) };
    let was_there = delete(session, &node.path).await?;
    stake.lose_node();
    Ok(was_there)
}

/// Deletes a node. Returns false if it did not exist.
pub(crate) async fn delete(session: &Session, path: &str) -> Result<bool, BackendError> {
    match session.bounded(session.client().delete(path, None)).await? {
        Ok(()) => Ok(true),
        Err(Error::NoNode) => Ok(false),
        Err(error) => Err(explain(&error)),
    }
}

/// Verifies that the node of a held claim exists, and watches it. The caller must have completed a
/// [round](Session::round) directly before.
pub(crate) async fn renew(
    session: &Arc<Session>,
    sessions: &Arc<Sessions>,
    place: &Arc<Place>,
    claim: &Claim,
) -> Result<Renewal, BackendError> {
    let mut stake = place.stake.lock().await;
    let now = Moment::now();
    let Some(until) = stake.held_until.filter(|until| *until > now) else {
        return Ok(Renewal::Gone);
    };
    if !see_own(session, sessions, place, &mut stake).await? {
        stake.lose_node();
        leave(session, claim.id(), place, &mut stake);
        return Ok(Renewal::Gone);
    }
    let lease = certain(session, claim)?;
    stake.held_until = Some(until.max(Moment::now().after(claim.lease())));
    Ok(Renewal::Renewed(lease))
}

/// Returns whether the claim's own node exists. A watch that was set before the round and has not
/// fired proves that without a request.
async fn see_own(
    session: &Arc<Session>,
    sessions: &Arc<Sessions>,
    place: &Arc<Place>,
    stake: &mut Stake,
) -> Result<bool, BackendError> {
    let Some(node) = &stake.node else { return Ok(false) };
    let reconnects = session.reconnects();
    let watched = stake.own.as_ref().filter(|own| !own.watch.has_fired());
    if watched.is_some_and(|own| own.seen_at == reconnects) {
        return Ok(true);
    }
    let client = session.client();
    let room = if watched.is_none() { session.room().take(&node.path, Room::OWN) } else { None };
    let (stat, new_watch) = if let Some(taken) = room {
        let seen = session.bounded(client.check_and_watch_stat(&node.path)).await?;
        let (stat, watcher) = seen.map_err(|error| explain(&error))?;
        (stat, Some(Watch::new(watcher, taken, &client)))
    } else {
        let seen = session.bounded(client.check_stat(&node.path)).await?;
        (seen.map_err(|error| explain(&error))?, None)
    };
    let is_ours =
        stat.is_some_and(|stat| stat.czxid == node.czxid && stat.ephemeral_owner == session.id());
    if !is_ours {
        return Ok(false);
    }
    if let Some(watch) = new_watch {
        stake.own = Some(OwnWatch { watch: watch.clone(), seen_at: reconnects });
        tell_when_it_fires(session, sessions, place, watch);
    } else if let Some(own) = &mut stake.own {
        own.seen_at = reconnects;
    }
    Ok(true)
}

/// Requests verification of the lock when the watch on its node fires.
fn tell_when_it_fires(
    session: &Session,
    sessions: &Arc<Sessions>,
    place: &Arc<Place>,
    watch: Watch,
) {
    let (sessions, place) = (Arc::downgrade(sessions), Arc::downgrade(place));
    session.spawn(async move {
        watch.fired().await;
        let (Some(sessions), Some(place)) = (sessions.upgrade(), place.upgrade()) else { return };
        // After a release by this process, no holder is left to notify.
        if place.stake.lock().await.held_until.is_some() {
            sessions.hints().look_at(std::iter::once(&place.key));
        }
    });
}

/// Waits until the preceding node is gone, or the session's client is stopped.
pub(crate) async fn wait(place: &Place) {
    let _attended = place.attended();
    let watch = place.stake.lock().await.ahead.as_ref().map(|ahead| ahead.watch.clone());
    match watch {
        Some(Some(watch)) => watch.fired().await,
        // Without a watch no notification arrives; the engine polls.
        Some(None) => pending().await,
        None => {}
    }
}

/// Waits without a queue entry until the current holder of `dir` is gone. Returns early if that
/// cannot be determined.
pub(crate) async fn wait_outside(session: &Arc<Session>, dir: &str) {
    let Ok(Ok(children)) = read(session, dir).await else { return };
    let Ok(queue) = line_up(session, dir, children).await else { return };
    let Some(first) = queue.first() else { return };
    let path = format!("{dir}/{first}");
    match session.bounded(watch_data(session, &path)).await {
        Ok(Ok((_, _, Some(watch)))) => watch.fired().await,
        Ok(Ok((_, _, None))) => pending().await,
        _ => {}
    }
}

/// Dequeues `claim`, whether it is held or waiting.
pub(crate) async fn release(
    session: &Arc<Session>,
    claim: &Claim,
    dir: impl FnOnce() -> String,
) -> Result<Release, BackendError> {
    let place = session.find(claim.id()).filter(|place| place.key == *claim.key());
    let Some(place) = place else {
        return search_and_release(session, claim, &dir()).await;
    };
    place.give_back();
    let mut stake = place.stake.lock().await;
    if stake.left {
        return Ok(Release::NotHeld);
    }
    if stake.in_doubt {
        find_again(session, &place, &mut stake, claim).await?;
    }
    let was_held = stake.held_until.is_some_and(|until| Moment::now() < until);
    let was_there = remove(session, &mut stake).await?;
    leave(session, claim.id(), &place, &mut stake);
    Ok(if was_held && was_there { Release::Freed } else { Release::NotHeld })
}

/// Releases a claim that this session does not know. An earlier session may have created its node.
async fn search_and_release(
    session: &Arc<Session>,
    claim: &Claim,
    dir: &str,
) -> Result<Release, BackendError> {
    let children = match read_certainly(session, dir).await? {
        Ok(children) => children,
        Err(Error::NoNode) => return Ok(Release::NotHeld),
        Err(error) => return Err(explain(&error)),
    };
    let prefix = prefix(claim.id(), session.config().naming);
    let names: Vec<_> = find(&children, &prefix).map(str::to_owned).collect();
    if names.is_empty() {
        return Ok(Release::NotHeld);
    }
    let queue = line_up(session, dir, children).await?;
    let mut release = Release::NotHeld;
    for name in names {
        let was_there = delete(session, &format!("{dir}/{name}")).await?;
        if was_there && queue.first() == Some(&name) {
            release = Release::Freed;
        }
    }
    Ok(release)
}

/// Releases all overdue claims of `session`.
pub(crate) fn tend(session: &Arc<Session>) {
    let now = Moment::now();
    for (claim, place) in session.places() {
        // An operation that holds this mutex is responsible for the claim.
        let Ok(stake) = Arc::clone(&place.stake).try_lock_owned() else { continue };
        if place.is_overdue(&stake, now) {
            session.spawn(give_up(Arc::clone(session), claim, place, stake));
        }
    }
}

/// Tries once to dequeue an overdue claim. After a failure, the next run of [`tend`] tries again.
async fn give_up(
    session: Arc<Session>,
    claim: ClaimId,
    place: Arc<Place>,
    mut stake: OwnedMutexGuard<Stake>,
) {
    if stake.left {
        return;
    }
    if stake.in_doubt {
        let claim = Claim::new(place.key.clone(), Duration::ZERO).with_id(claim);
        if find_again(&session, &place, &mut stake, &claim).await.is_err() {
            return;
        }
    }
    if remove(&session, &mut stake).await.is_ok() {
        leave(&session, claim, &place, &mut stake);
    }
}

/// Tries per call while the queue changes between two reads.
const TRIES: u32 = 8;

/// After this many session time-outs, a waiter lists the whole queue even if its watch has not
/// fired: its own node may have been deleted.
const LOOK_AFTER: u32 = 3;
const LOOK_AFTER_MAX: Duration = Duration::from_secs(60);

/// A shorter validity would be over before the holder could use it.
const CERTAIN_MIN: Duration = Duration::from_millis(20);
