//! The recipe: how a claim gets in line, finds out whose turn it is, and gets out again. Knows nothing of sessions beyond the one that it is
//! given.
//!
//! Requests are sent in the order in which they are made here, and answered in that order. So a list that is asked for right behind the making of
//! a node has that node in it, and an acquisition nobody is in the way of costs one wait.

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

/// Gets `claim` in line if it is not, and tells whether it is its turn.
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
            // Taken out while we waited; there is another one now, or will be.
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
            // What is over is over, and gets a new token.
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
            // Somebody has removed it.
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
        // By data and not by existence: no watch is left behind on what is not there.
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
            // It is gone already; look again.
            Err(Error::NoNode) => (stake.ahead, was_behind) = (None, true),
            Err(error) => return Err(explain(&error).as_unknown()),
        }
    }
    stake.ahead = None;
    if !was_behind {
        // That is nobody who has the lock: each time the connection was lost, or the node or what is above it.
        let says = "zookeeper: the nodes of locks cannot be made, or do not last: connections break at each try, or somebody deletes them";
        return Err(BackendError::transient(says));
    }
    // The crowd moves faster than we look; whoever waits asks again at once.
    Ok(Attempt::Busy(Busy::new()))
}

/// Makes the node of `claim`, and tells all children. `None` if there was no place for it, and now there is.
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
    // From here on there may be a node, whatever becomes of us and the answer.
    stake.in_doubt = true;
    let data = note(claim);
    let created = client.create(&path, &data, &options);
    let listed = client.list_children(&place.dir);
    // Of two answers that come in their order the second is awaited first: so who waits is woken once.
    let listed = session.bounded(listed).await;
    match session.bounded(created).await? {
        Ok((stat, number)) => {
            stake.in_doubt = false;
            let path = format!("{path}{number}");
            let czxid = if stat.is_invalid() {
                // Servers before 3.5 do not tell when they have made it.
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
            // Never made, or removed by the servers because it was empty: they may do that at any time.
            make_parents(session, &place.dir).await?;
            return Ok(None);
        }
        // The connection may be there again soon, and tell.
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

/// Finds out whether a node was made for `claim` by a request whose answer was lost.
///
/// Our own requests are carried out in their order, and the leader takes none of an earlier connection once it knows of a later one. So
/// what is not there now will not come; if it is the leader that says so, and not one that has been replaced and does not know. Therefore
/// a majority is asked first.
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
            // Only what lives with this session is ours. The same claim may have had a node in an earlier one, which can vanish
            // at any moment.
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

/// Whether the one directly before one that waits is certainly still there. All who ask at about the same time share one question,
/// however long the line is. Now and then nobody is believed, so that one whose own node was removed by somebody finds out.
async fn stands_as_before(session: &Arc<Session>, stake: &Stake) -> Result<bool, BackendError> {
    let Some(Ahead { watch: Some(watch), looked_at, .. }) = &stake.ahead else {
        return Ok(false);
    };
    let look_after = (session.timeout() * LOOK_AFTER).min(LOOK_AFTER_MAX);
    if watch.has_fired() || looked_at.after(look_after) <= Moment::now() {
        return Ok(false);
    }
    session.catch_up().await?;
    Ok(!watch.has_fired())
}

/// Whether the end of the node directly before that of a waiter would be told.
pub(crate) fn is_watched(session: &Session, place: &Place) -> bool {
    let Ok(stake) = place.stake.try_lock() else { return false };
    let Some(Ahead { watch: Some(watch), .. }) = &stake.ahead else { return false };
    session.is_healthy() && !watch.has_fired()
}

/// Whether the head of a line is there only to the server that we are connected to. What one has kept that the others have deleted would be
/// waited for without end, so a majority is asked about those who have been the head for long: once in the time-out of a session. Its answer
/// is that by which all writes are decided, those of a holder as well.
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

/// Leaves out whom only our server shows.
fn without_ghosts(stake: &mut Stake, mut children: Vec<String>) -> Vec<String> {
    if !stake.ghosts.is_empty() {
        stake.ghosts.retain(|ghost| children.contains(ghost));
        children.retain(|child| !stake.ghosts.contains(child));
    }
    children
}

/// All children, as the leader knows them. A server that lags behind could show a node of ours that is gone.
async fn look(session: &Arc<Session>, place: &Place) -> Result<Vec<String>, BackendError> {
    match read(session, &place.dir).await? {
        Ok(children) => Ok(children),
        Err(Error::NoNode) => Ok(Vec::new()),
        Err(error) => Err(explain(&error).as_unknown()),
    }
}

/// The children of `dir`, not older than this question.
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

/// The children of `dir`, not older than this question whoever takes itself for the leader.
async fn read_certainly(
    session: &Arc<Session>,
    dir: &str,
) -> Result<Result<Vec<String>, Error>, BackendError> {
    session.round(By::Majority).await.map_err(BackendError::as_unknown)?;
    // No server takes our session that has not seen what we have seen.
    session.bounded(session.client().list_children(dir)).await
}

/// Puts those who contend in order. Where their names do not tell it, their nodes are asked: one question each, all at once.
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

/// Reads a node, and watches it if there is [room](Room) for that.
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

/// How long a claim is certainly held: no longer than it was asked for, and than the session lives.
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

/// Deletes the node that `stake` has, if any. False if it was gone.
async fn remove(session: &Session, stake: &mut Stake) -> Result<bool, BackendError> {
    let Some(node) = &stake.node else { return Ok(false) };
    let was_there = delete(session, &node.path).await?;
    stake.lose_node();
    Ok(was_there)
}

/// Deletes a node. False if it was gone.
pub(crate) async fn delete(session: &Session, path: &str) -> Result<bool, BackendError> {
    match session.bounded(session.client().delete(path, None)).await? {
        Ok(()) => Ok(true),
        Err(Error::NoNode) => Ok(false),
        Err(error) => Err(explain(&error)),
    }
}

/// Looks whether the node of a held claim is still there, and makes sure to hear when it is not. The session must have had a
/// [round](Session::round) just before.
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

/// Whether the own node is there. If its watch was set before the round and has not fired, it is; so that costs nothing.
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

/// Has the holder look as soon as something happens to its node.
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
        // What is being given back goes by our own doing, and leaves nobody to be told.
        if place.stake.lock().await.held_until.is_some() {
            sessions.hints().look_at(std::iter::once(&place.key));
        }
    });
}

/// Waits until the one directly before has gone, or the session is over.
pub(crate) async fn wait(place: &Place) {
    let _attended = place.attended();
    let watch = place.stake.lock().await.ahead.as_ref().map(|ahead| ahead.watch.clone());
    match watch {
        Some(Some(watch)) => watch.fired().await,
        // Nobody will tell.
        Some(None) => pending().await,
        None => {}
    }
}

/// Waits, without a place in line, until whoever holds the lock of `dir` now has gone. Ends early where that cannot be found out.
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

/// Gets `claim` out of line, whether it is its turn or not.
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

/// The same for a claim that this session does not know: it may have been made in an earlier one.
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

/// Has everything given back that nobody takes care of any more.
pub(crate) fn tend(session: &Arc<Session>) {
    let now = Moment::now();
    for (claim, place) in session.places() {
        // Whoever has it locked takes care of it.
        let Ok(stake) = Arc::clone(&place.stake).try_lock_owned() else { continue };
        if place.is_overdue(&stake, now) {
            session.spawn(give_up(Arc::clone(session), claim, place, stake));
        }
    }
}

/// Tries once; as long as it fails it is tried again at the next turn.
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

/// More often than this a crowd does not change between two looks.
const TRIES: u32 = 8;

/// After so many time-outs of the session a waiter lists the whole queue, even if its watch has not fired: its own node may have been deleted.
const LOOK_AFTER: u32 = 3;
const LOOK_AFTER_MAX: Duration = Duration::from_secs(60);

/// What is certain for less than this is over before anybody can use it.
const CERTAIN_MIN: Duration = Duration::from_millis(20);
