//! The lock recipe: enqueues a claim, checks its position, and dequeues it. `backend` calls this
//! module. `session` opens sessions and keeps them alive. `blockers` decides which nodes a claim
//! waits for, and `conversion` changes the mode of a held claim.
//!
//! The client sends requests in the order of the calls, and the server answers in this order. A
//! list requested directly after the creation of a node therefore contains the node. An uncontended
//! acquisition thus takes one round trip.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, ClaimId, ClaimMode, Grant, Moment,
    QueuedEntry, Queueing, Release, Renewal,
};
use tokio::sync::OwnedMutexGuard;
use zookeeper_client::Error;

use crate::blockers::{self, Blocker, Blockers, QueueSnapshot, watch_blockers};
use crate::conversion::{delete_upgrade_request, resolve_conversion, resolve_upgrade_request};
use crate::error::{is_refused, to_backend_error};
use crate::later_token::ensure_largest_token;
use crate::node_data::{NodeGrant, encode_node_data};
use crate::nodes::{
    CreatedNode, ListedChildren, create_parents, create_sequential, delete, fencing_token,
    negative_transaction_error, read_children, read_children_after_confirmation,
    read_listed_children, sort_contenders,
};
use crate::queue::{claim_nodes, node_prefix, parse_queued_entry};
use crate::queue_entry::{
    ClaimNode, ClaimState, NodeWatch, OwnNodeWatch, QueueEntry, WatchBudget, WatchedNodes,
};
use crate::semaphore::{self, SemaphoreAttempt};
use crate::session::{ConfirmedBy, SessionPool, ZkSession};

/// Enqueues `claim` if it is not queued. Returns `Granted` if no node before its own blocks the
/// claim, otherwise `Busy`. In Curator's semaphore, the units of the claim must also be free.
pub(crate) async fn try_acquire(
    sessions: &Arc<SessionPool>,
    claim: &Claim,
    dir: impl Fn() -> String + Send + Sync,
) -> Result<Attempt, BackendError> {
    loop {
        let (session, entry) = sessions.find_or_insert_entry(claim, &dir).await?;
        if entry.key != *claim.key() {
            let message =
                "zookeeper: a claim was used with two different keys; use a new claim for each key";
            return Err(BackendError::new(BackendErrorKind::Protocol, message).as_refused());
        }
        let mut state = entry.state.lock().await;
        if state.is_removed {
            // The next iteration finds the claim's current entry or inserts a new entry.
            continue;
        }
        entry.record_activity();
        state.lease = claim.lease();
        let had_no_node = state.has_no_node();
        let attempt = run_attempt(&session, &entry, &mut state, claim).await;
        if state.has_no_node() {
            remove_entry(&session, claim.id(), &entry, &mut state);
        } else if had_no_node {
            // The attempt created a node, or may have created one. The engine releases the node
            // only after an attempt of unknown outcome, not after a refused one.
            return attempt.map_err(BackendError::as_unknown);
        }
        return attempt;
    }
}

pub(crate) fn remove_entry(
    session: &ZkSession,
    claim: ClaimId,
    entry: &Arc<QueueEntry>,
    state: &mut ClaimState,
) {
    state.is_removed = true;
    session.remove_entry(claim, entry);
}

/// Returns whether a claim that is not granted keeps its queue entry.
fn keeps_entry(session: &ZkSession, claim: &Claim) -> bool {
    match claim.queueing() {
        Queueing::Join => true,
        Queueing::ExclusiveIntent => {
            session.config().has_modes() && claim.mode() == ClaimMode::Exclusive
        }
        _ => false,
    }
}

/// The result of one step of an attempt.
enum Step {
    Done(Attempt),
    /// The connection broke, or a node was missing. The next step repeats the work.
    Retry,
    /// The queue changed during the step. The next step reads it again.
    QueueChanged,
}

/// Runs up to `STEPS_MAX` steps, each of which creates the claim's node if it is missing and
/// determines its position.
async fn run_attempt(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    let mut is_contended = false;
    for _ in 0..STEPS_MAX {
        match run_step(session, entry, state, claim).await? {
            Step::Done(attempt) => return Ok(attempt),
            Step::Retry => is_contended = false,
            Step::QueueChanged => is_contended = true,
        }
    }
    state.watched_blockers = None;
    if !is_contended {
        let message = format!(
            "zookeeper: the position of the claim was not determined in {STEPS_MAX} steps, in the last of which the connection broke, or the claim's node or its parent was missing; check the network, and that no other program deletes nodes below the lock's path"
        );
        return Err(BackendError::transient(message));
    }
    // The queue changes faster than this client reads it. Without watched nodes,
    // `wait_for_blockers` returns at once.
    Ok(Attempt::Busy(Busy::new().with_queue_entry()))
}

/// Creates the claim's node unless it exists, reads the queue, and decides on the claim.
async fn run_step(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Step, BackendError> {
    resolve_unknown_requests(session, entry, state, claim).await?;
    delete_expired_node(session, state).await?;
    let is_curator_semaphore = session.config().is_curator_semaphore();
    if is_curator_semaphore && semaphore::has_left_queue(entry, state) {
        if semaphore::units_exist(session, state).await? {
            return grant(session, state, claim).map(Step::Done);
        }
        delete_nodes(session, state).await?;
    }
    let ListedChildren { names, parent_mzxid } = if state.node.is_none() {
        match create_node(session, entry, state, claim).await? {
            Some(listed) => listed,
            None => return Ok(Step::Retry),
        }
    } else if is_blocked_as_before(session, state.watched_blockers.as_ref()).await? {
        return Ok(Step::Done(Attempt::Busy(Busy::new().with_queue_entry())));
    } else {
        read_children_or_empty(session, entry).await?
    };
    let children = exclude_stale_nodes(state, names);
    let queue = sort_contenders(session, &entry.dir, children).await?;
    let Some(node) = &state.node else { return Ok(Step::Retry) };
    let Some(own_index) = queue.position_of(node.name()) else {
        // Another client has deleted the claim's node.
        delete_upgrade_request(session, state).await?;
        state.clear_node();
        return Ok(Step::Retry);
    };
    let before = &queue.names()[..own_index];
    // The queue of Curator's semaphore is that of an exclusive lock.
    let mode = if is_curator_semaphore { ClaimMode::Exclusive } else { node.grant.mode };
    let (dir, watched) = (&entry.dir, state.watched_blockers.as_ref());
    let keeps_entry = keeps_entry(session, claim);
    match blockers::find_blockers(session, dir, before, mode, watched, keeps_entry).await? {
        Blockers::None if is_curator_semaphore => {
            let attempt = semaphore::try_acquire(session, entry, state, claim, keeps_entry).await?;
            match attempt {
                SemaphoreAttempt::Granted => grant(session, state, claim).map(Step::Done),
                SemaphoreAttempt::Busy(busy) => Ok(Step::Done(Attempt::Busy(busy))),
                SemaphoreAttempt::Retry => Ok(Step::Retry),
            }
        }
        Blockers::None => {
            if ensure_largest_token(session, entry, state, claim, parent_mzxid).await? {
                return grant(session, state, claim).map(Step::Done);
            }
            Ok(Step::Retry)
        }
        Blockers::Nodes(blockers) => {
            watch_blockers_or_dequeue(session, entry, state, claim, before, mode, blockers).await
        }
        Blockers::Changed => {
            state.watched_blockers = None;
            Ok(Step::QueueChanged)
        }
        Blockers::UnitsMismatch(held_total) => {
            delete_nodes(session, state).await?;
            Ok(Step::Done(Attempt::Busy(Busy::new().with_units_in_store(held_total))))
        }
    }
}

/// Determines the outcome of earlier requests whose outcome is unknown.
async fn resolve_unknown_requests(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<(), BackendError> {
    if state.is_creation_unresolved {
        resolve_creation(session, entry, state, claim.id()).await?;
    }
    if state.is_conversion_unresolved {
        resolve_conversion(session, entry, state, claim.id()).await?;
    }
    Ok(())
}

/// Deletes the node of an expired grant, because a new grant needs a new token, and so a new node.
async fn delete_expired_node(
    session: &Arc<ZkSession>,
    state: &mut ClaimState,
) -> Result<(), BackendError> {
    if state.held_until.is_some_and(|until| until <= Moment::now()) {
        delete_nodes(session, state).await?;
    }
    Ok(())
}

/// If the claim keeps its queue entry, watches its blockers. Otherwise deletes its nodes.
async fn watch_blockers_or_dequeue(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
    before: &[String],
    mode: ClaimMode,
    blockers: Vec<Blocker>,
) -> Result<Step, BackendError> {
    let dir = &entry.dir;
    let missing = blockers::find_stale_blocker(session, dir, before, mode, &blockers).await?;
    if let Some(missing) = missing {
        state.stale_nodes.push(missing);
        state.watched_blockers = None;
        return Ok(Step::QueueChanged);
    }
    if !keeps_entry(session, claim) {
        if session.config().is_curator_semaphore()
            && semaphore::wait_for_predecessor(session, entry, claim, before, blockers).await?
        {
            return Ok(Step::QueueChanged);
        }
        delete_nodes(session, state).await?;
        return Ok(Step::Done(Attempt::Busy(Busy::new())));
    }
    let watched = state.watched_blockers.take();
    let watched = watch_blockers(session, dir, before, &entry.key, blockers, watched).await?;
    let Some((watched, holder)) = watched else { return Ok(Step::QueueChanged) };
    state.watched_blockers = Some(watched);
    let busy = Busy::new().with_queue_entry();
    Ok(Step::Done(Attempt::Busy(match holder {
        Some(holder) => busy.with_holder(holder),
        None => busy,
    })))
}

/// Creates the node of `claim` and returns all children of its parent. Returns `None` if the caller
/// must try again. This happens after the creation of missing parents and after a lost connection.
async fn create_node(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Option<ListedChildren>, BackendError> {
    let queued = QueuedEntry::Claim(claim.mode());
    let prefix = node_prefix(claim.id(), session.config().naming, queued);
    // From here on, a node may exist. A dropped future or a lost response does not undo the
    // request.
    state.is_creation_unresolved = true;
    // The names of the nodes in Curator's semaphore do not contain the number of units, so the data
    // states it.
    let is_permit = matches!(claim.mode(), ClaimMode::Permits { .. });
    let stated_mode = (session.config().is_curator_semaphore() && is_permit).then(|| claim.mode());
    let data = encode_node_data(claim, stated_mode, None);
    let created = create_sequential(session, &entry.dir, &prefix, &data).await?;
    let CreatedNode { path, czxid, listed } = match created {
        Ok(created) => created,
        Err(Error::NoNode) => {
            state.is_creation_unresolved = false;
            // The parent was never created, or the servers removed the empty container, which they
            // may do at any time.
            create_parents(session, &entry.dir).await?;
            return Ok(None);
        }
        // The next step waits for a connection and determines whether the node exists.
        Err(Error::ConnectionLoss) => return Ok(None),
        Err(error) => {
            state.is_creation_unresolved = !is_refused(&error);
            return Err(to_backend_error(&error));
        }
    };
    state.is_creation_unresolved = false;
    state.node = czxid.map(|czxid| ClaimNode {
        path,
        czxid,
        grant: NodeGrant { mode: claim.mode(), token: czxid },
        version: 0,
    });
    listed.map(Some).map_err(|error| to_backend_error(&error).as_unknown())
}

/// Determines whether a request whose response was lost created a node for `claim`.
///
/// A majority first confirms the session, because a former leader could return an old list. A node
/// that is missing in the list then cannot appear later. The servers execute the requests of a
/// session in order, and the leader rejects requests from the session's earlier connections.
async fn resolve_creation(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: ClaimId,
) -> Result<(), BackendError> {
    let children = match read_children_after_confirmation(session, &entry.dir).await? {
        Ok(children) => children,
        Err(Error::NoNode) => Vec::new(),
        Err(error) => return Err(to_backend_error(&error).as_unknown()),
    };
    state.clear_node();
    if session.config().is_curator_semaphore() {
        semaphore::resolve_units(session, entry, state, claim).await?;
    }
    for name in claim_nodes(&children, claim, session.config().naming) {
        let path = format!("{}/{name}", entry.dir);
        let found = session.with_request_timeout(session.client().check_stat(&path)).await?;
        match found.map_err(|error| to_backend_error(&error).as_unknown())? {
            // Only a node of this session counts. The servers may delete a node of an earlier
            // session at any time.
            Some(stat) if stat.ephemeral_owner == session.id() && state.node.is_none() => {
                let QueuedEntry::Claim(mode) = parse_queued_entry(name) else {
                    delete(session, &path).await?;
                    continue;
                };
                let grant = NodeGrant { mode, token: stat.czxid };
                state.node =
                    Some(ClaimNode { path, czxid: stat.czxid, grant, version: stat.version });
            }
            Some(_) => delete(session, &path).await.map(drop)?,
            None => {}
        }
    }
    state.is_creation_unresolved = false;
    Ok(())
}

/// Returns true if the same nodes certainly still block the waiter. Sends at most one request to
/// the leader, which concurrent callers share, and does not list the queue. Periodically returns
/// false: the waiter then lists the queue, and so detects a deletion of its own node.
pub(crate) async fn is_blocked_as_before(
    session: &Arc<ZkSession>,
    watched: Option<&WatchedNodes>,
) -> Result<bool, BackendError> {
    let Some(watched) = watched else { return Ok(false) };
    let relist_after = (session.timeout() * RELIST_AFTER_TIMEOUTS).min(RELIST_AFTER_MAX);
    if !watched.are_unchanged() || watched.verified_at.after(relist_after) <= Moment::now() {
        return Ok(false);
    }
    tokio::select! {
        biased;
        () = watched.wait_for_change() => {
            // A watch also fires when the client that set it is stopped. The session then continues
            // on a new client.
            session.wait_until_connected().await?;
            Ok(false)
        }
        synced = session.confirm(ConfirmedBy::LeaderAfterPause) => {
            synced?;
            Ok(watched.are_unchanged())
        }
    }
}

/// Returns whether watches report every change that may let the claim be granted.
pub(crate) fn are_blockers_watched(session: &ZkSession, entry: &QueueEntry, claim: &Claim) -> bool {
    let Ok(state) = entry.state.try_lock() else { return false };
    session.is_healthy() && state.awaited_nodes(claim).is_some_and(WatchedNodes::are_unchanged)
}

/// Removes from the list the nodes that the connected server still has and a majority has not.
pub(crate) fn exclude_stale_nodes(
    state: &mut ClaimState,
    mut children: Vec<String>,
) -> Vec<String> {
    if !state.stale_nodes.is_empty() {
        state.stale_nodes.retain(|name| children.contains(name));
        children.retain(|child| !state.stale_nodes.contains(child));
    }
    children
}

/// Returns all children that the leader has, or none if the parent is missing. Without a `sync`, a
/// lagging server could list a deleted node of this session.
pub(crate) async fn read_children_or_empty(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
) -> Result<ListedChildren, BackendError> {
    match read_listed_children(session, &entry.dir).await? {
        Ok(listed) => Ok(listed),
        Err(Error::NoNode) => Ok(ListedChildren::default()),
        Err(error) => Err(to_backend_error(&error).as_unknown()),
    }
}

/// Records and returns the grant of the claim.
fn grant(
    session: &ZkSession,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    let lease = lease_within_validity(session, claim.lease())?;
    let until = Moment::now().after(claim.lease());
    state.held_until = Some(state.held_until.map_or(until, |held| held.max(until)));
    state.watched_blockers = None;
    let token = state.node.as_ref().and_then(|node| fencing_token(node.grant.token));
    let token = token.ok_or_else(negative_transaction_error)?;
    Ok(Attempt::Granted(Grant::new(token, lease)))
}

/// Returns how long a claim with this lease is certainly held. The validity of the session is the
/// upper limit.
pub(crate) fn lease_within_validity(
    session: &ZkSession,
    lease: Duration,
) -> Result<Duration, BackendError> {
    let validity = session.remaining_validity();
    if validity < VALIDITY_MIN {
        let message = "zookeeper: the session is not confirmed: no recent response from a majority of the servers; check that they run";
        return Err(BackendError::transient(message));
    }
    Ok(validity.min(lease))
}

/// Deletes the nodes of `state`, if any. Returns whether the node of the claim existed.
pub(crate) async fn delete_nodes(
    session: &ZkSession,
    state: &mut ClaimState,
) -> Result<bool, BackendError> {
    delete_upgrade_request(session, state).await?;
    let deletions = state.other_unit_paths.iter().map(|path| delete(session, path));
    try_join_all(deletions).await?;
    state.other_unit_paths.clear();
    let Some(node) = &state.node else { return Ok(false) };
    let existed = delete(session, &node.path).await?;
    state.clear_node();
    Ok(existed)
}

/// Verifies that the node of a held claim exists, and watches the node. The caller must have
/// completed a [confirmation](ZkSession::confirm) directly before this call.
pub(crate) async fn renew(
    session: &Arc<ZkSession>,
    sessions: &Arc<SessionPool>,
    entry: &Arc<QueueEntry>,
    claim: &Claim,
) -> Result<Renewal, BackendError> {
    let mut state = entry.state.lock().await;
    let now = Moment::now();
    let Some(until) = state.held_until.filter(|until| *until > now) else {
        return Ok(Renewal::Gone);
    };
    if !verify_own_node(session, sessions, entry, &mut state).await? {
        end_lost_claim(session, entry, &mut state, claim.id()).await;
        return Ok(Renewal::Gone);
    }
    let lease = lease_within_validity(session, claim.lease())?;
    state.held_until = Some(until.max(Moment::now().after(claim.lease())));
    Ok(Renewal::Renewed(lease))
}

/// Ends the claim whose node another client has deleted. If its request to be upgraded cannot be
/// deleted now, [`release_abandoned`] tries again.
pub(crate) async fn end_lost_claim(
    session: &ZkSession,
    entry: &Arc<QueueEntry>,
    state: &mut ClaimState,
    claim: ClaimId,
) {
    // If another unit is missing, the node of the first unit may still exist.
    let are_deleted =
        state.other_unit_paths.is_empty() || delete_nodes(session, state).await.is_ok();
    if are_deleted {
        state.clear_node();
    }
    state.held_until = None;
    if delete_upgrade_request(session, state).await.is_ok() && state.has_no_node() {
        remove_entry(session, claim, entry, state);
    }
}

/// Returns whether the claim's own node exists. Sets a watch on the node if possible.
///
/// Sends one request for each further unit in Curator's semaphore. The claim's own node needs no
/// request if a watch was set before the confirmation and has not fired, and if the client has not
/// reconnected since. The node then still exists.
async fn verify_own_node(
    session: &Arc<ZkSession>,
    sessions: &Arc<SessionPool>,
    entry: &Arc<QueueEntry>,
    state: &mut ClaimState,
) -> Result<bool, BackendError> {
    let Some(node) = &state.node else { return Ok(false) };
    // Only the first unit is watched.
    if !semaphore::all_exist(session, &state.other_unit_paths).await? {
        return Ok(false);
    }
    let reconnects = session.reconnects();
    let watched = state.own_watch.as_ref().filter(|own_watch| !own_watch.watch.has_fired());
    if watched.is_some_and(|own_watch| own_watch.reconnects_when_verified == reconnects) {
        return Ok(true);
    }
    let client = session.client();
    let reservation = if watched.is_none() {
        session.watch_budget().reserve(&node.path, WatchBudget::TOTAL_MAX_FOR_HELD)
    } else {
        None
    };
    let (stat, new_watch) = if let Some(reservation) = reservation {
        let response =
            session.with_request_timeout(client.check_and_watch_stat(&node.path)).await?;
        let (stat, watcher) = response.map_err(|error| to_backend_error(&error))?;
        (stat, Some(NodeWatch::new(watcher, reservation, &client)))
    } else {
        let response = session.with_request_timeout(client.check_stat(&node.path)).await?;
        (response.map_err(|error| to_backend_error(&error))?, None)
    };
    let is_own_node =
        stat.is_some_and(|stat| stat.czxid == node.czxid && stat.ephemeral_owner == session.id());
    if !is_own_node {
        return Ok(false);
    }
    if let Some(watch) = new_watch {
        state.own_watch =
            Some(OwnNodeWatch { watch: watch.clone(), reconnects_when_verified: reconnects });
        request_verification_when_fired(session, sessions, entry, watch);
    } else if let Some(own_watch) = &mut state.own_watch {
        own_watch.reconnects_when_verified = reconnects;
    }
    Ok(true)
}

/// Requests a verification of the lock when the watch on its node fires.
fn request_verification_when_fired(
    session: &ZkSession,
    sessions: &Arc<SessionPool>,
    entry: &Arc<QueueEntry>,
    watch: NodeWatch,
) {
    let (sessions, entry) = (Arc::downgrade(sessions), Arc::downgrade(entry));
    session.spawn(async move {
        watch.wait_until_fired().await;
        let (Some(sessions), Some(entry)) = (sessions.upgrade(), entry.upgrade()) else { return };
        let state = entry.state.lock().await;
        // A release or a conversion by this process also fires the watch, but clears `own_watch`
        // while it has `entry.state` locked. The claim then needs no verification.
        let has_fired = state.own_watch.as_ref().is_some_and(|own| own.watch.has_fired());
        if state.held_until.is_some() && has_fired {
            sessions.request_verification(&entry.key);
        }
    });
}

/// Waits until a node that blocks the claim is changed or deleted, or the session's client is
/// stopped. Returns at once if no nodes are recorded. If the watch budget is used up, no event
/// arrives: the engine limits this wait and polls.
pub(crate) async fn wait_for_blockers(entry: &QueueEntry, claim: &Claim) {
    let _wait_guard = entry.begin_wait();
    let change = entry.state.lock().await.awaited_nodes(claim).map(WatchedNodes::wait_for_change);
    if let Some(change) = change {
        change.await;
    }
}

/// Waits without a queue entry until a node below `dir` that blocks the claim is changed or
/// deleted, or the session's client is stopped. If the queue of Curator's semaphore is empty, waits
/// until the number of taken units changes. Returns at once if nothing blocks the claim or a
/// request fails. Never returns if the watch budget is used up. The engine limits this wait and
/// polls.
pub(crate) async fn wait_without_entry(session: &Arc<ZkSession>, dir: &str, claim: &Claim) {
    let Ok(Ok(children)) = read_children(session, dir).await else { return };
    let Ok(queue) = sort_contenders(session, dir, children).await else { return };
    let names = queue.names();
    if session.config().is_curator_semaphore() && names.is_empty() {
        return semaphore::wait_for_units(session, dir, claim).await;
    }
    let found = match claim.mode() {
        _ if session.config().is_curator_semaphore() => blockers::find_head(names),
        // An exclusive claim is not granted while the first node of the queue exists.
        ClaimMode::Exclusive => blockers::find_head(names),
        mode => match blockers::find_blockers(session, dir, names, mode, None, true).await {
            Ok(found) => found,
            Err(_) => return,
        },
    };
    let Blockers::Nodes(blockers) = found else { return };
    let watched = watch_blockers(session, dir, names, claim.key(), blockers, None).await;
    if let Ok(Some((watched, _))) = watched {
        watched.wait_for_change().await;
    }
}

/// Dequeues `claim`, whether it is held or waiting.
pub(crate) async fn release(
    session: &Arc<ZkSession>,
    claim: &Claim,
    dir: impl FnOnce() -> String,
) -> Result<Release, BackendError> {
    let entry = session.find_entry(claim.id()).filter(|entry| entry.key == *claim.key());
    let Some(entry) = entry else {
        return search_and_release(session, claim, &dir()).await;
    };
    entry.record_release_request();
    let mut state = entry.state.lock().await;
    if state.is_removed {
        return Ok(Release::NotHeld);
    }
    if state.is_creation_unresolved {
        resolve_creation(session, &entry, &mut state, claim.id()).await?;
    }
    if state.is_conversion_unresolved {
        resolve_upgrade_request(session, &entry, &mut state, claim.id()).await?;
    }
    let was_held = state.held_until.is_some_and(|until| Moment::now() < until);
    let existed = delete_nodes(session, &mut state).await?;
    remove_entry(session, claim.id(), &entry, &mut state);
    Ok(if was_held && existed { Release::Freed } else { Release::NotHeld })
}

/// Deletes the nodes of a claim without an entry in this session. An earlier session may have
/// created the nodes.
async fn search_and_release(
    session: &Arc<ZkSession>,
    claim: &Claim,
    dir: &str,
) -> Result<Release, BackendError> {
    let children = match read_children_after_confirmation(session, dir).await? {
        Ok(children) => children,
        Err(Error::NoNode) => Vec::new(),
        Err(error) => return Err(to_backend_error(&error)),
    };
    let mut release = Release::NotHeld;
    if session.config().is_curator_semaphore() {
        for unit in semaphore::find_units(session, dir, claim.id()).await? {
            if delete(session, &unit).await? {
                release = Release::Freed;
            }
        }
    }
    let naming = session.config().naming;
    let names: Vec<_> = claim_nodes(&children, claim.id(), naming).map(str::to_owned).collect();
    if names.is_empty() {
        return Ok(release);
    }
    let holders = if session.config().is_curator_semaphore() && claim.mode() != ClaimMode::Exclusive
    {
        // In Curator's semaphore, a node of the queue holds no units. The nodes of the units are
        // elsewhere.
        QueueSnapshot::default()
    } else {
        blockers::read_queue(session, dir)
            .await?
            .ok_or_else(|| blockers::queue_changed().as_unknown())?
    };
    for name in names {
        let existed = delete(session, &format!("{dir}/{name}")).await?;
        if existed && holders.is_granted(&name) {
            release = Release::Freed;
        }
    }
    Ok(release)
}

/// Starts tasks that release all abandoned claims of `session` and delete lapsed upgrade requests.
pub(crate) fn release_abandoned(session: &Arc<ZkSession>) {
    let now = Moment::now();
    for (claim, entry) in session.entries() {
        // If an operation holds this mutex, the claim is not abandoned.
        let Ok(state) = Arc::clone(&entry.state).try_lock_owned() else { continue };
        if entry.is_abandoned(&state, now) {
            session.spawn(release_abandoned_claim(Arc::clone(session), claim, entry, state));
        } else if entry.is_upgrade_lapsed(&state, now) {
            session.spawn(withdraw_lapsed_upgrade(Arc::clone(session), claim, entry, state));
        }
    }
}

/// Tries once to delete the request to upgrade a held claim. After a failure, the next run of
/// [`release_abandoned`] tries again.
async fn withdraw_lapsed_upgrade(
    session: Arc<ZkSession>,
    claim: ClaimId,
    entry: Arc<QueueEntry>,
    mut state: OwnedMutexGuard<ClaimState>,
) {
    if state.is_removed {
        return;
    }
    if state.is_conversion_unresolved {
        drop(resolve_conversion(&session, &entry, &mut state, claim).await);
    }
    drop(delete_upgrade_request(&session, &mut state).await);
}

/// Tries once to dequeue an abandoned claim. After a failure, the next run of [`release_abandoned`]
/// tries again.
async fn release_abandoned_claim(
    session: Arc<ZkSession>,
    claim: ClaimId,
    entry: Arc<QueueEntry>,
    mut state: OwnedMutexGuard<ClaimState>,
) {
    if state.is_removed {
        return;
    }
    if state.is_creation_unresolved
        && resolve_creation(&session, &entry, &mut state, claim).await.is_err()
    {
        return;
    }
    if state.is_conversion_unresolved
        && resolve_upgrade_request(&session, &entry, &mut state, claim).await.is_err()
    {
        return;
    }
    if delete_nodes(&session, &mut state).await.is_ok() {
        remove_entry(&session, claim, &entry, &mut state);
    }
}

/// The maximum number of steps of one attempt. A step is repeated if the queue changes between two
/// reads, the connection breaks, or a node is missing.
const STEPS_MAX: u32 = 8;

/// A waiter lists the whole queue after this multiple of the session time-out, but at the latest
/// after `RELIST_AFTER_MAX`. It does so even if its watch has not fired, because its own node may
/// have been deleted.
const RELIST_AFTER_TIMEOUTS: u32 = 3;
const RELIST_AFTER_MAX: Duration = Duration::from_secs(90);

/// The minimum validity for a grant. A shorter validity would end before the holder could use the
/// lock.
const VALIDITY_MIN: Duration = Duration::from_millis(20);
