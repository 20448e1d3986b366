//! The lock recipe: enqueues a claim, checks its position, and dequeues it. `backend` calls this
//! module. `session` opens sessions and keeps them alive.
//!
//! The client sends requests in the order of the calls, and the server answers in this order. A
//! list requested directly after the creation of a node therefore contains the node. An uncontended
//! acquisition thus takes one round trip.

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

use crate::error::{is_refused, to_backend_error};
use crate::mutex::lock;
use crate::node_data::{decode_label, encode_node_data};
use crate::queue::{ContenderQueue, QueuePosition, claim_nodes, node_prefix};
use crate::queue_entry::{
    ClaimNode, ClaimState, NodeWatch, OwnNodeWatch, QueueEntry, WatchBudget, WatchedPredecessor,
};
use crate::session::{ConfirmedBy, SessionPool, ZkSession};

/// Enqueues `claim` if it is not queued. Returns `Granted` if its node is the head of the queue,
/// otherwise `Busy`.
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
        let attempt = run_attempt(&session, &entry, &mut state, claim).await;
        if state.has_no_node() {
            remove_entry(&session, claim.id(), &entry, &mut state);
        }
        return attempt;
    }
}

fn remove_entry(
    session: &ZkSession,
    claim: ClaimId,
    entry: &Arc<QueueEntry>,
    state: &mut ClaimState,
) {
    state.is_removed = true;
    session.remove_entry(claim, entry);
}

async fn run_attempt(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    let mut was_predecessor_deleted = false;
    for _ in 0..ATTEMPTS_MAX {
        if state.is_creation_unresolved {
            resolve_creation(session, entry, state, claim).await?;
        }
        if state.held_until.is_some_and(|until| until <= Moment::now()) {
            // The grant has expired. A new grant needs a new token, and so a new node.
            delete_own_node(session, state).await?;
        }
        let children = if state.node.is_none() {
            match create_node(session, entry, state, claim).await? {
                Some(children) => children,
                None => continue,
            }
        } else if is_predecessor_unchanged(session, state).await? {
            return Ok(Attempt::Busy(Busy::new()));
        } else {
            read_children_or_empty(session, entry).await?
        };
        let children = exclude_missing_on_majority(state, children);
        let queue = sort_contenders(session, &entry.dir, children).await?;
        let Some(node) = &state.node else { continue };
        let (predecessor_name, is_predecessor_head) = match queue.position_of(node.name()) {
            QueuePosition::Head => return grant(session, state, claim),
            QueuePosition::Behind { predecessor, is_predecessor_head } => {
                (predecessor, is_predecessor_head)
            }
            // Another client has deleted the claim's node.
            QueuePosition::Absent => {
                state.clear_node();
                continue;
            }
        };
        let path = format!("{}/{predecessor_name}", entry.dir);
        if is_predecessor_head
            && head_is_missing_on_majority(session, &entry.dir, predecessor_name, &path).await?
        {
            state.nodes_missing_on_majority.push(predecessor_name.to_owned());
            (state.predecessor, was_predecessor_deleted) = (None, true);
            continue;
        }
        if !claim.joins_queue() {
            delete_own_node(session, state).await?;
            return Ok(Attempt::Busy(Busy::new()));
        }
        if let Some(predecessor) = &mut state.predecessor
            && predecessor.is_watching(predecessor_name)
        {
            predecessor.verified_at = Moment::now();
            return Ok(Attempt::Busy(Busy::new()));
        }
        // This is a data watch. An existence watch on a missing node would remain set.
        match session.with_request_timeout(watch_data(session, &path)).await? {
            Ok((data, stat, watch)) => {
                let name = predecessor_name.to_owned();
                state.predecessor =
                    Some(WatchedPredecessor { name, watch, verified_at: Moment::now() });
                let busy = Busy::new();
                return Ok(Attempt::Busy(if is_predecessor_head {
                    busy.with_holder(decode_holder(&entry.key, &data, stat.czxid))
                } else {
                    busy
                }));
            }
            // The predecessor is already deleted, so the next attempt lists the children again.
            Err(Error::NoNode) => (state.predecessor, was_predecessor_deleted) = (None, true),
            Err(error) => return Err(to_backend_error(&error).as_unknown()),
        }
    }
    state.predecessor = None;
    if !was_predecessor_deleted {
        // Contention is not the cause. In each attempt, the connection broke, or the node or its
        // parent was missing.
        let message = format!(
            "zookeeper: the node of the lock cannot be created: in each of {ATTEMPTS_MAX} attempts, the connection broke or another client deleted the node; check the network, and that no other program deletes nodes below the lock's path"
        );
        return Err(BackendError::transient(message));
    }
    // The queue changes faster than this client reads it. Without a watched predecessor,
    // `wait_for_predecessor` returns at once.
    Ok(Attempt::Busy(Busy::new()))
}

/// Creates the node of `claim` and returns all children of `dir`. Returns `None` if the caller must
/// try again. This happens after the creation of missing parents and after a lost connection.
async fn create_node(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Option<Vec<String>>, BackendError> {
    let path = format!("{}/{}", entry.dir, node_prefix(claim.id(), session.config().naming));
    let options = CreateMode::EphemeralSequential.with_acls(session.config().acls());
    let client = session.client();
    let sent_at = Moment::now();
    // From here on, a node may exist. A dropped future or a lost response does not undo the
    // request.
    state.is_creation_unresolved = true;
    let data = encode_node_data(claim);
    let created = client.create(&path, &data, &options);
    let listed = client.list_children(&entry.dir);
    // Responses arrive in the order of the requests. Awaiting the second response first wakes this
    // task only once.
    let listed = session.with_request_timeout(listed).await;
    match session.with_request_timeout(created).await? {
        Ok((stat, number)) => {
            state.is_creation_unresolved = false;
            let path = format!("{path}{number}");
            let czxid = if stat.is_invalid() {
                // Servers before 3.5 do not return the id of the transaction that created the node.
                let response = session.with_request_timeout(client.check_stat(&path)).await?;
                response
                    .map_err(|error| to_backend_error(&error).as_unknown())?
                    .map(|stat| stat.czxid)
            } else {
                Some(stat.czxid)
            };
            state.node = czxid.map(|czxid| ClaimNode { path, czxid });
            session.record_majority_response(sent_at);
        }
        Err(Error::NoNode) => {
            state.is_creation_unresolved = false;
            // The parent was never created, or the servers removed the empty container, which they
            // may do at any time.
            create_parents(session, &entry.dir).await?;
            return Ok(None);
        }
        // The next attempt waits for a connection and determines whether the node exists.
        Err(Error::ConnectionLoss) => return Ok(None),
        Err(error) => {
            state.is_creation_unresolved = !is_refused(&error);
            return Err(to_backend_error(&error));
        }
    }
    match listed? {
        Ok(children) => Ok(Some(children)),
        Err(error) => Err(to_backend_error(&error).as_unknown()),
    }
}

/// Creates `path` and its parents as containers. The servers delete a container that has been empty
/// for some time.
async fn create_parents(session: &ZkSession, path: &str) -> Result<(), BackendError> {
    let acls = session.config().acls();
    for mode in [CreateMode::Container, CreateMode::Persistent] {
        // `NoNode` means that a parent was deleted during the call.
        for _ in 0..MKDIR_ATTEMPTS_MAX {
            match session
                .with_request_timeout(session.client().mkdir(path, &mode.with_acls(acls)))
                .await?
            {
                Ok(()) => return Ok(()),
                Err(Error::NoNode) => {}
                // Servers before 3.5 do not support containers.
                Err(Error::Unimplemented) if mode == CreateMode::Container => break,
                Err(error) => return Err(to_backend_error(&error)),
            }
        }
    }
    Err(to_backend_error(&Error::NoNode))
}

/// Determines whether a request whose response was lost created a node for `claim`.
///
/// A majority first confirms the session, because a former leader could return an old list. A node
/// that is missing in the list then cannot appear later: the servers execute the requests of a
/// session in order, and the leader rejects requests from the session's earlier connections.
async fn resolve_creation(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<(), BackendError> {
    let children = match read_children_after_confirmation(session, &entry.dir).await? {
        Ok(children) => children,
        Err(Error::NoNode) => Vec::new(),
        Err(error) => return Err(to_backend_error(&error).as_unknown()),
    };
    state.clear_node();
    for name in claim_nodes(&children, &node_prefix(claim.id(), session.config().naming)) {
        let path = format!("{}/{name}", entry.dir);
        let found = session.with_request_timeout(session.client().check_stat(&path)).await?;
        match found.map_err(|error| to_backend_error(&error).as_unknown())? {
            // Only a node of this session counts. The servers may delete a node of an earlier
            // session at any time.
            Some(stat) if stat.ephemeral_owner == session.id() && state.node.is_none() => {
                state.node = Some(ClaimNode { path, czxid: stat.czxid });
            }
            Some(_) => delete(session, &path).await.map(drop)?,
            None => {}
        }
    }
    state.is_creation_unresolved = false;
    Ok(())
}

/// Returns whether the node directly before a waiter certainly still exists. Sends at most one
/// request to the leader, which concurrent callers share, and does not list the queue. Periodically
/// returns false: the waiter then lists the queue, and so detects a deletion of its own node.
async fn is_predecessor_unchanged(
    session: &Arc<ZkSession>,
    state: &ClaimState,
) -> Result<bool, BackendError> {
    let Some(WatchedPredecessor { watch: Some(watch), verified_at, .. }) = &state.predecessor
    else {
        return Ok(false);
    };
    let relist_after = (session.timeout() * RELIST_AFTER_TIMEOUTS).min(RELIST_AFTER_MAX);
    if watch.has_fired() || verified_at.after(relist_after) <= Moment::now() {
        return Ok(false);
    }
    tokio::select! {
        biased;
        () = watch.clone().wait_until_fired() => {
            // A watch also fires when the client that set it is stopped. The session then continues
            // on a new client.
            session.wait_until_connected().await?;
            Ok(false)
        }
        synced = session.sync_with_leader() => {
            synced?;
            Ok(!watch.has_fired())
        }
    }
}

/// Returns whether a watch reports the deletion of the node directly before the waiter.
pub(crate) fn is_predecessor_watched(session: &ZkSession, entry: &QueueEntry) -> bool {
    let Ok(state) = entry.state.try_lock() else { return false };
    let Some(WatchedPredecessor { watch: Some(watch), .. }) = &state.predecessor else {
        return false;
    };
    session.is_healthy() && !watch.has_fired()
}

/// Returns whether the head of a queue exists only on the connected server.
///
/// A waiter would wait forever for a node that the other servers have deleted. After the same node
/// has been the head for one session time-out, this function therefore asks a majority.
async fn head_is_missing_on_majority(
    session: &ZkSession,
    dir: &str,
    name: &str,
    path: &str,
) -> Result<bool, BackendError> {
    if !lock(session.head_cache()).needs_majority_check(dir, name, session.timeout()) {
        return Ok(false);
    }
    let exists = session.exists_on_majority(path).await.map_err(BackendError::as_unknown)?;
    if exists {
        lock(session.head_cache()).record_majority_check(dir);
    }
    Ok(!exists)
}

/// Removes the nodes that only the connected server has.
fn exclude_missing_on_majority(state: &mut ClaimState, mut children: Vec<String>) -> Vec<String> {
    if !state.nodes_missing_on_majority.is_empty() {
        state.nodes_missing_on_majority.retain(|name| children.contains(name));
        children.retain(|child| !state.nodes_missing_on_majority.contains(child));
    }
    children
}

/// Returns all children that the leader has, or none if the parent is missing. Without a `sync`, a
/// lagging server could list a deleted node of this session.
async fn read_children_or_empty(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
) -> Result<Vec<String>, BackendError> {
    match read_children(session, &entry.dir).await? {
        Ok(children) => Ok(children),
        Err(Error::NoNode) => Ok(Vec::new()),
        Err(error) => Err(to_backend_error(&error).as_unknown()),
    }
}

/// Returns the children of `dir` as of this call or later, unless another leader was elected.
pub(crate) async fn read_children(
    session: &Arc<ZkSession>,
    dir: &str,
) -> Result<Result<Vec<String>, Error>, BackendError> {
    let client = session.client();
    let synced = client.sync(dir);
    let listed = client.list_children(dir);
    match session.with_request_timeout(synced).await? {
        Ok(()) => session.with_request_timeout(listed).await,
        Err(error) => Ok(Err(error)),
    }
}

/// Returns the children of `dir` as of this call or later, even after a leader election.
async fn read_children_after_confirmation(
    session: &Arc<ZkSession>,
    dir: &str,
) -> Result<Result<Vec<String>, Error>, BackendError> {
    session.confirm(ConfirmedBy::Majority).await.map_err(BackendError::as_unknown)?;
    // A server rejects a session that has seen a newer transaction. The list therefore includes the
    // state that the majority confirmed.
    session.with_request_timeout(session.client().list_children(dir)).await
}

/// Sorts the contenders. If their names do not determine the order, concurrently requests the
/// transaction that created each node.
pub(crate) async fn sort_contenders(
    session: &Arc<ZkSession>,
    dir: &str,
    children: Vec<String>,
) -> Result<ContenderQueue, BackendError> {
    let unordered = match ContenderQueue::from_children(children) {
        Ok(queue) => return Ok(queue),
        Err(unordered) => unordered,
    };
    let czxids = unordered.names().iter().map(async |name| {
        let client = session.client();
        let path = format!("{dir}/{name}");
        let request = client.check_stat(&path);
        let stat = session
            .with_request_timeout(request)
            .await?
            .map_err(|error| to_backend_error(&error).as_unknown())?;
        Ok::<_, BackendError>(stat.map(|stat| stat.czxid))
    });
    let czxids = try_join_all(czxids).await?;
    Ok(unordered.sort_by_transaction(czxids))
}

/// Reads a node, and watches it if the [watch budget](WatchBudget) allows.
async fn watch_data(
    session: &ZkSession,
    path: &str,
) -> Result<(Vec<u8>, Stat, Option<NodeWatch>), Error> {
    let client = session.client();
    match session.watch_budget().reserve(path, WatchBudget::TOTAL_MAX) {
        Some(reservation) => {
            let (data, stat, watcher) = client.get_and_watch_data(path).await?;
            Ok((data, stat, Some(NodeWatch::new(watcher, reservation, &client))))
        }
        None => client.get_data(path).await.map(|(data, stat)| (data, stat, None)),
    }
}

fn grant(
    session: &ZkSession,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    let token = state.node.as_ref().and_then(|node| fencing_token(node.czxid));
    let lease = lease_within_validity(session, claim)?;
    let until = Moment::now().after(claim.lease());
    state.held_until = Some(state.held_until.map_or(until, |held| held.max(until)));
    state.predecessor = None;
    let Some(token) = token else {
        let message = "zookeeper: the server returned a negative transaction id, which is not a valid fencing token; check that the server's data directory was not copied from another server";
        return Err(BackendError::new(BackendErrorKind::Protocol, message));
    };
    Ok(Attempt::Granted(Grant::new(token, lease)))
}

/// Returns how long a claim is certainly held: its lease, limited by the validity of the session.
fn lease_within_validity(session: &ZkSession, claim: &Claim) -> Result<Duration, BackendError> {
    let validity = session.remaining_validity();
    if validity < VALIDITY_MIN {
        let message = "zookeeper: the session is not confirmed: no recent response from a majority of the servers; check that they run";
        return Err(BackendError::transient(message));
    }
    Ok(validity.min(claim.lease()))
}

pub(crate) fn fencing_token(czxid: i64) -> Option<FencingToken> {
    FencingToken::try_from(czxid).ok()
}

pub(crate) fn decode_holder(key: &Key, data: &[u8], czxid: i64) -> Holder {
    Holder::new(key.clone()).with_label(decode_label(data)).with_token(fencing_token(czxid))
}

/// Deletes the node of `state`, if any. Returns false if it did not exist.
async fn delete_own_node(
    session: &ZkSession,
    state: &mut ClaimState,
) -> Result<bool, BackendError> {
    let Some(node) = &state.node else { return Ok(false) };
    let existed = delete(session, &node.path).await?;
    state.clear_node();
    Ok(existed)
}

/// Deletes a node. Returns false if it did not exist.
pub(crate) async fn delete(session: &ZkSession, path: &str) -> Result<bool, BackendError> {
    match session.with_request_timeout(session.client().delete(path, None)).await? {
        Ok(()) => Ok(true),
        Err(Error::NoNode) => Ok(false),
        Err(error) => Err(to_backend_error(&error)),
    }
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
        state.clear_node();
        remove_entry(session, claim.id(), entry, &mut state);
        return Ok(Renewal::Gone);
    }
    let lease = lease_within_validity(session, claim)?;
    state.held_until = Some(until.max(Moment::now().after(claim.lease())));
    Ok(Renewal::Renewed(lease))
}

/// Returns whether the claim's own node exists. Sets a watch on the node if possible. If a watch
/// from before the confirmation has not fired, and the client has not reconnected since, the node
/// exists, and no request is needed.
async fn verify_own_node(
    session: &Arc<ZkSession>,
    sessions: &Arc<SessionPool>,
    entry: &Arc<QueueEntry>,
    state: &mut ClaimState,
) -> Result<bool, BackendError> {
    let Some(node) = &state.node else { return Ok(false) };
    let reconnects = session.reconnects();
    let watched = state.own_watch.as_ref().filter(|own_watch| !own_watch.watch.has_fired());
    if watched.is_some_and(|own_watch| own_watch.reconnects_when_verified == reconnects) {
        return Ok(true);
    }
    let client = session.client();
    let reservation = if watched.is_none() {
        session.watch_budget().reserve(&node.path, WatchBudget::HELD_MAX)
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
        // After a release by this process, no holder needs a verification.
        if entry.state.lock().await.held_until.is_some() {
            sessions.request_verification(&entry.key);
        }
    });
}

/// Waits until the predecessor's node is deleted or the session's client is stopped.
pub(crate) async fn wait_for_predecessor(entry: &QueueEntry) {
    let _wait_guard = entry.begin_wait();
    let watch =
        entry.state.lock().await.predecessor.as_ref().map(|predecessor| predecessor.watch.clone());
    match watch {
        Some(Some(watch)) => watch.wait_until_fired().await,
        // Without a watch, no event arrives. The engine limits this wait and polls.
        Some(None) => pending().await,
        None => {}
    }
}

/// Waits without a queue entry until the holder's node below `dir` is deleted or the session's
/// client is stopped. Returns at once if no holder exists or a request fails. Never returns if the
/// watch budget is used up. The engine limits this wait and polls.
pub(crate) async fn wait_without_entry(session: &Arc<ZkSession>, dir: &str) {
    let Ok(Ok(children)) = read_children(session, dir).await else { return };
    let Ok(queue) = sort_contenders(session, dir, children).await else { return };
    let Some(head) = queue.head() else { return };
    let path = format!("{dir}/{head}");
    match session.with_request_timeout(watch_data(session, &path)).await {
        Ok(Ok((_, _, Some(watch)))) => watch.wait_until_fired().await,
        Ok(Ok((_, _, None))) => pending().await,
        _ => {}
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
        resolve_creation(session, &entry, &mut state, claim).await?;
    }
    let was_held = state.held_until.is_some_and(|until| Moment::now() < until);
    let existed = delete_own_node(session, &mut state).await?;
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
        Err(Error::NoNode) => return Ok(Release::NotHeld),
        Err(error) => return Err(to_backend_error(&error)),
    };
    let node_prefix = node_prefix(claim.id(), session.config().naming);
    let names: Vec<_> = claim_nodes(&children, &node_prefix).map(str::to_owned).collect();
    if names.is_empty() {
        return Ok(Release::NotHeld);
    }
    let queue = sort_contenders(session, dir, children).await?;
    let mut release = Release::NotHeld;
    for name in names {
        let existed = delete(session, &format!("{dir}/{name}")).await?;
        if existed && queue.head() == Some(&name) {
            release = Release::Freed;
        }
    }
    Ok(release)
}

/// Starts tasks that release all abandoned claims of `session`.
pub(crate) fn release_abandoned(session: &Arc<ZkSession>) {
    let now = Moment::now();
    for (claim, entry) in session.entries() {
        // If an operation holds this mutex, the claim is not abandoned.
        let Ok(state) = Arc::clone(&entry.state).try_lock_owned() else { continue };
        if entry.is_abandoned(&state, now) {
            session.spawn(release_abandoned_claim(Arc::clone(session), claim, entry, state));
        }
    }
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
    if state.is_creation_unresolved {
        let claim = Claim::new(entry.key.clone(), Duration::ZERO).with_id(claim);
        if resolve_creation(&session, &entry, &mut state, &claim).await.is_err() {
            return;
        }
    }
    if delete_own_node(&session, &mut state).await.is_ok() {
        remove_entry(&session, claim, &entry, &mut state);
    }
}

/// The maximum number of attempts per call while the queue changes between two reads.
const ATTEMPTS_MAX: u32 = 8;

/// The maximum number of attempts to create the parents of a node while the servers delete empty
/// parents.
const MKDIR_ATTEMPTS_MAX: u32 = 4;

/// A waiter lists the whole queue after this multiple of the session time-out, at most
/// `RELIST_AFTER_MAX`. It does so even if its watch has not fired, because its own node may have
/// been deleted.
const RELIST_AFTER_TIMEOUTS: u32 = 3;
const RELIST_AFTER_MAX: Duration = Duration::from_secs(60);

/// The minimum validity for a grant. A shorter validity would end before the holder could use the
/// lock.
const VALIDITY_MIN: Duration = Duration::from_millis(20);
