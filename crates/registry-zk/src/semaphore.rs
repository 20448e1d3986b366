//! Permits as in Curator's `InterProcessSemaphoreV2`, with `naming=curator-semaphore`. `recipe` and
//! `inspect` call this module.
//!
//! A key's node has two children. `locks` is the queue of an `InterProcessMutex`, which `recipe`
//! handles. `leases` contains one node for each taken unit. Only the head of the queue adds nodes
//! to `leases`, so no other claim can take the free units. One transaction creates the nodes of all
//! units of a claim and deletes its node in the queue. An exclusive claim is granted as the head of
//! the queue once no unit is taken, and stays the head.
//!
//! The token is the id of the transaction that granted the claim. This transaction created the
//! nodes of the units, or wrote the mode into the data of the exclusive claim's node. The
//! transaction that enqueued the claim cannot be the token. A claim before it in the queue may have
//! been granted by a later transaction.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use registry_core::{BackendError, Busy, Claim, ClaimId, ClaimMode, Holder, Key, Moment};
use zookeeper_client::{CreateMode, Error, MultiWriteError, MultiWriteResult, Stat};

use crate::blockers::{Blocker, CONCURRENT_READS, watch_blockers};
use crate::error::{is_refused, to_backend_error};
use crate::node_data::{NodeGrant, decode_label, decode_stated_mode, encode_node_data};
use crate::nodes::{create_parents, delete, fencing_token, read_children, sort_contenders};
use crate::queue::{LEASES, QUEUE, claim_prefix, leases_of};
use crate::queue_entry::{ClaimNode, ClaimState, NodeWatch, QueueEntry, WatchBudget, WatchedNodes};
use crate::recipe::delete_nodes;
use crate::session::ZkSession;
use crate::timer::timeout;
use crate::units::unit_data;

/// Returns the name of a unit's node without the sequence number.
fn unit_prefix(session: &ZkSession, claim: ClaimId) -> String {
    format!("{}-lease-", claim_prefix(claim, session.config().naming))
}

/// The result of an attempt to grant the head of the queue.
pub(crate) enum SemaphoreAttempt {
    Granted,
    Busy(Busy),
    /// The connection broke, or a node was missing. The caller must try again.
    Retry,
}

/// Returns whether the claim has left the queue: its node is that of a unit.
pub(crate) fn has_left_queue(entry: &QueueEntry, state: &ClaimState) -> bool {
    let parent =
        |node: &ClaimNode| node.path.rsplit_once('/').map(|(parent, _)| parent == entry.dir);
    state.node.as_ref().and_then(parent) == Some(false)
}

/// Returns whether all units of the claim exist.
pub(crate) async fn units_exist(
    session: &ZkSession,
    state: &ClaimState,
) -> Result<bool, BackendError> {
    let Some(node) = &state.node else { return Ok(false) };
    let synced = session.with_request_timeout(session.client().sync(&node.path)).await?;
    synced.map_err(|error| to_backend_error(&error).as_unknown())?;
    let first = std::slice::from_ref(&node.path);
    Ok(all_exist(session, first).await? && all_exist(session, &state.other_unit_paths).await?)
}

/// Returns whether all of these nodes exist and belong to this session.
pub(crate) async fn all_exist(session: &ZkSession, paths: &[String]) -> Result<bool, BackendError> {
    let found = try_join_all(paths.iter().map(async |path| {
        let client = session.client();
        let request = client.check_stat(path);
        session.with_request_timeout(request).await
    }));
    for stat in found.await? {
        let stat = stat.map_err(|error| to_backend_error(&error).as_unknown())?;
        if stat.is_none_or(|stat| stat.ephemeral_owner != session.id()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Grants the claim at the head of the queue if its units are free. The claim has a node, so no
/// error is marked as refused: the engine must release the claim.
pub(crate) async fn try_acquire(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
    keeps_entry: bool,
) -> Result<SemaphoreAttempt, BackendError> {
    let attempt = try_grant_head(session, entry, state, claim, keeps_entry).await;
    attempt.map_err(BackendError::as_unknown)
}

async fn try_grant_head(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
    keeps_entry: bool,
) -> Result<SemaphoreAttempt, BackendError> {
    let leases = leases_of(&entry.dir);
    let (taken, watch) = count_units(session, &leases, keeps_entry).await?;
    if is_free(claim, taken) {
        return match claim.mode() {
            ClaimMode::Permits { take, .. } => {
                take_units(session, &leases, state, claim, take).await
            }
            _ => grant_exclusive(session, state, claim).await,
        };
    }
    if !keeps_entry {
        delete_nodes(session, state).await?;
        return Ok(SemaphoreAttempt::Busy(Busy::new()));
    }
    state.watched_blockers = Some(WatchedNodes {
        nodes: vec![(LEASES.to_owned(), watch)],
        is_complete: true,
        verified_at: Moment::now(),
    });
    Ok(SemaphoreAttempt::Busy(Busy::new().with_queue_entry()))
}

/// Returns whether the units of a claim are free if this number of units is taken.
fn is_free(claim: &Claim, taken: u64) -> bool {
    match claim.mode() {
        ClaimMode::Permits { take, of } => taken + u64::from(take) <= u64::from(of),
        _ => taken == 0,
    }
}

/// Waits until the node directly before that of this claim changes, for at most
/// [`PREDECESSOR_WAIT_MAX`], if the units of this claim are free. The caller uses this function for
/// a claim that must leave the queue if it is busy.
///
/// Returns true if the caller should try again. Returns false if the units are not free, another
/// claim holds the exclusive lock, or the wait reaches its limit. Always returns false for an
/// exclusive claim.
pub(crate) async fn wait_for_predecessor(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    claim: &Claim,
    before: &[String],
    blockers: Vec<Blocker>,
) -> Result<bool, BackendError> {
    if claim.mode() == ClaimMode::Exclusive {
        return Ok(false);
    }
    let (taken, _) = count_units(session, &leases_of(&entry.dir), false).await?;
    if !is_free(claim, taken) {
        return Ok(false);
    }
    // The claim has a node, which the engine must release after an error.
    let exclusive = read_exclusive_holder(session, &entry.dir).await;
    if exclusive.map_err(BackendError::as_unknown)?.is_some() {
        return Ok(false);
    }
    let watched = watch_blockers(session, &entry.dir, before, &entry.key, blockers, None).await;
    Ok(match watched.map_err(BackendError::as_unknown)? {
        Some((watched, _)) => {
            timeout(PREDECESSOR_WAIT_MAX, watched.wait_for_change()).await.is_ok()
        }
        None => true,
    })
}

/// Returns the number of taken units. Also returns a watch on changes of this number if requested
/// and if the watch budget allows.
async fn count_units(
    session: &ZkSession,
    leases: &str,
    is_watched: bool,
) -> Result<(u64, Option<NodeWatch>), BackendError> {
    let client = session.client();
    let budget = session.watch_budget();
    let reservation =
        if is_watched { budget.reserve(leases, WatchBudget::TOTAL_MAX) } else { None };
    // Without a `sync`, a lagging server could list units that were released.
    let synced = client.sync(leases);
    let listed = async {
        match reservation {
            Some(reservation) => {
                let (children, watcher) = client.list_and_watch_children(leases).await?;
                Ok((children, Some(NodeWatch::new(watcher, reservation, &client))))
            }
            None => client.list_children(leases).await.map(|children| (children, None)),
        }
    };
    let synced = session.with_request_timeout(synced).await?;
    synced.map_err(|error| to_backend_error(&error).as_unknown())?;
    match session.with_request_timeout(listed).await? {
        // Curator counts all children too.
        Ok((children, watch)) => Ok((children.len() as u64, watch)),
        Err(Error::NoNode) => Ok((0, None)),
        Err(error) => Err(to_backend_error(&error).as_unknown()),
    }
}

/// Grants the exclusive claim at the head of the queue: writes the mode into the data of its node.
async fn grant_exclusive(
    session: &ZkSession,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<SemaphoreAttempt, BackendError> {
    let Some(node) = &mut state.node else { return Ok(SemaphoreAttempt::Retry) };
    if state.held_until.is_some() {
        return Ok(SemaphoreAttempt::Granted);
    }
    let data = encode_node_data(claim, Some(ClaimMode::Exclusive), None);
    let sent_at = Moment::now();
    let written = session.client().set_data(&node.path, &data, None);
    match session.with_request_timeout(written).await? {
        Ok(stat) => {
            session.record_majority_response(sent_at);
            node.grant.token = stat.mzxid;
            Ok(SemaphoreAttempt::Granted)
        }
        Err(Error::NoNode | Error::ConnectionLoss) => Ok(SemaphoreAttempt::Retry),
        Err(error) => Err(to_backend_error(&error).as_unknown()),
    }
}

/// Replaces the node of the claim in the queue by the nodes of its units.
async fn take_units(
    session: &Arc<ZkSession>,
    leases: &str,
    state: &mut ClaimState,
    claim: &Claim,
    take: u32,
) -> Result<SemaphoreAttempt, BackendError> {
    let Some(node) = &state.node else { return Ok(SemaphoreAttempt::Retry) };
    let path = format!("{leases}/{}", unit_prefix(session, claim.id()));
    let options = CreateMode::EphemeralSequential.with_acls(session.config().acls());
    let (first, other) = (unit_data(claim, true), unit_data(claim, false));
    let client = session.client();
    let mut writer = client.new_multi_writer();
    let mut add_operations = || {
        // Makes the transaction fail if the claim's node in the queue no longer exists.
        writer.add_delete(&node.path, None)?;
        (0..take).try_for_each(|unit| {
            let data = if unit == 0 { &first } else { &other };
            writer.add_create(&path, data, &options)
        })
    };
    add_operations().map_err(|error| to_backend_error(&error))?;
    // From here on, the transaction may have taken the units, even if no response arrives.
    state.is_creation_unresolved = true;
    let sent_at = Moment::now();
    let committed = async {
        match writer.commit().await {
            Ok(results) => Ok(Ok(results)),
            Err(MultiWriteError::OperationFailed { index, source }) => Ok(Err((index, source))),
            Err(MultiWriteError::RequestFailed { source }) => Err(source),
        }
    };
    let results = match session.with_request_timeout(committed).await? {
        Ok(Ok(results)) => results,
        Ok(Err((index, Error::NoNode))) => {
            state.is_creation_unresolved = false;
            // The parent of the units was never created, or the servers removed it while empty.
            if index > 0 {
                create_parents(session, leases).await?;
            }
            return Ok(SemaphoreAttempt::Retry);
        }
        // The next attempt determines whether the units are taken.
        Err(Error::ConnectionLoss) => return Ok(SemaphoreAttempt::Retry),
        Ok(Err((_, error))) | Err(error) => {
            state.is_creation_unresolved = !is_refused(&error);
            return Err(to_backend_error(&error));
        }
    };
    session.record_majority_response(sent_at);
    let mut created = results.into_iter().filter_map(|result| match result {
        MultiWriteResult::Create { path, stat } => Some((path, stat)),
        _ => None,
    });
    let Some((path, stat)) = created.next() else { return Ok(SemaphoreAttempt::Retry) };
    let other_unit_paths = created.map(|(path, _)| path).collect();
    let czxid = if stat.is_invalid() {
        let found = session.with_request_timeout(client.check_stat(&path)).await?;
        match found.map_err(|error| to_backend_error(&error).as_unknown())? {
            Some(stat) => stat.czxid,
            None => return Ok(SemaphoreAttempt::Retry),
        }
    } else {
        stat.czxid
    };
    state.is_creation_unresolved = false;
    state.clear_node();
    let grant = NodeGrant { mode: claim.mode(), token: czxid };
    state.node = Some(ClaimNode { path, czxid, grant, version: 0 });
    state.other_unit_paths = other_unit_paths;
    Ok(SemaphoreAttempt::Granted)
}

/// Finds the units that the claim has taken in this session, after a transaction whose outcome is
/// unknown. Deletes those of earlier sessions. If another client has deleted some of the units,
/// deletes the others too: the claim is then not granted.
pub(crate) async fn resolve_units(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: ClaimId,
) -> Result<(), BackendError> {
    let mut own_units = Vec::new();
    for path in find_units(session, &entry.dir, claim).await? {
        let found = session.with_request_timeout(session.client().get_data(&path)).await?;
        match found {
            Ok((data, stat)) if stat.ephemeral_owner == session.id() => {
                own_units.push((path, stat.czxid, decode_stated_mode(&data)));
            }
            Ok(_) => delete(session, &path).await.map(drop).map_err(BackendError::as_unknown)?,
            Err(Error::NoNode) => {}
            Err(error) => return Err(to_backend_error(&error).as_unknown()),
        }
    }
    let stated_mode = own_units.first().and_then(|(_, _, mode)| *mode);
    let Some(mode) = stated_mode.filter(|mode| has_all_units(*mode, own_units.len())) else {
        let deletions = own_units.iter().map(|(path, ..)| delete(session, path));
        try_join_all(deletions).await.map_err(BackendError::as_unknown)?;
        return Ok(());
    };
    let mut own_units = own_units.into_iter();
    if let Some((path, czxid, _)) = own_units.next() {
        let grant = NodeGrant { mode, token: czxid };
        state.node = Some(ClaimNode { path, czxid, grant, version: 0 });
        state.other_unit_paths = own_units.map(|(path, ..)| path).collect();
    }
    Ok(())
}

/// Returns whether permits of this mode have exactly this number of units.
fn has_all_units(mode: ClaimMode, units: usize) -> bool {
    matches!(mode, ClaimMode::Permits { take, .. } if take as usize == units)
}

/// Returns the paths of all units of a claim.
pub(crate) async fn find_units(
    session: &Arc<ZkSession>,
    queue: &str,
    claim: ClaimId,
) -> Result<Vec<String>, BackendError> {
    let leases = leases_of(queue);
    let prefix = unit_prefix(session, claim);
    let mut names: Vec<_> = match read_children(session, &leases).await? {
        Ok(children) => children.into_iter().filter(|name| name.starts_with(&prefix)).collect(),
        Err(Error::NoNode) => Vec::new(),
        Err(error) => return Err(to_backend_error(&error).as_unknown()),
    };
    names.sort_unstable();
    Ok(names.into_iter().map(|name| format!("{leases}/{name}")).collect())
}

/// Waits until the number of taken units changes, unless the units of `claim` are free now. Returns
/// at once if a request fails. Never returns if the watch budget is used up: the engine limits this
/// wait and polls.
pub(crate) async fn wait_for_units(session: &Arc<ZkSession>, queue: &str, claim: &Claim) {
    let Ok((taken, watch)) = count_units(session, &leases_of(queue), true).await else { return };
    match watch {
        _ if is_free(claim, taken) => {}
        Some(watch) => watch.wait_until_fired().await,
        None => std::future::pending().await,
    }
}

/// The holders of a key, and the paths of their nodes.
#[derive(Default)]
pub(crate) struct UnitHolders {
    pub(crate) holders: Vec<Holder>,
    pub(crate) paths: Vec<String>,
}

/// Reads the holders of the units of `key`, or its exclusive holder.
///
/// Curator does not record how many units a key has. Each unit that a Curator program has taken is
/// reported as `1 of 1`.
pub(crate) async fn read_holders(
    session: &Arc<ZkSession>,
    key: &Key,
    key_path: &str,
) -> Result<UnitHolders, BackendError> {
    let leases = format!("{key_path}/{LEASES}");
    let mut names = match read_children(session, &leases).await? {
        Ok(names) => names,
        Err(Error::NoNode) => Vec::new(),
        Err(error) => return Err(to_backend_error(&error)),
    };
    names.sort_unstable();
    let mut found = UnitHolders::default();
    let mut last_claim = String::new();
    for chunk in names.chunks(CONCURRENT_READS) {
        let paths = chunk.iter().map(|name| format!("{leases}/{name}"));
        let reads = paths.map(async |path| {
            let unit = read(session, &path).await?;
            Ok::<_, BackendError>(unit.map(|(data, stat)| (path, data, stat)))
        });
        for (name, unit) in chunk.iter().zip(try_join_all(reads).await?) {
            let Some((path, data, stat)) = unit else { continue };
            found.paths.push(path);
            // The names of the claim's other units differ only in the sequence number.
            let claim = name.rsplit_once('-').map_or(&**name, |(claim, _)| claim);
            let mode = match decode_stated_mode(&data) {
                Some(ClaimMode::Permits { .. }) if claim == last_claim => continue,
                Some(mode) => mode,
                None => ClaimMode::Permits { take: 1, of: 1 },
            };
            claim.clone_into(&mut last_claim);
            found.holders.push(holder(key, mode, &data, stat.czxid));
        }
    }
    if found.paths.is_empty()
        && let Some((path, data, stat)) =
            read_exclusive_holder(session, &format!("{key_path}/{QUEUE}")).await?
    {
        found.paths.push(path);
        found.holders.push(holder(key, ClaimMode::Exclusive, &data, stat.mzxid));
    }
    found.holders.sort_by_key(|holder| holder.token);
    Ok(found)
}

/// Reads the head of the queue if its claim holds the exclusive lock. Otherwise returns `None`.
async fn read_exclusive_holder(
    session: &Arc<ZkSession>,
    queue: &str,
) -> Result<Option<(String, Vec<u8>, Stat)>, BackendError> {
    let children = match read_children(session, queue).await? {
        Ok(children) => children,
        Err(Error::NoNode) => return Ok(None),
        Err(error) => return Err(to_backend_error(&error)),
    };
    let contenders = sort_contenders(session, queue, children).await?;
    let Some(head) = contenders.names().first() else { return Ok(None) };
    let path = format!("{queue}/{head}");
    let Some((data, stat)) = read(session, &path).await? else { return Ok(None) };
    let is_exclusive = decode_stated_mode(&data) == Some(ClaimMode::Exclusive);
    Ok(is_exclusive.then_some((path, data, stat)))
}

/// Returns the names of the nodes below `queue` whose claims wait, in the order of the queue.
pub(crate) async fn read_waiting(
    session: &Arc<ZkSession>,
    queue: &str,
) -> Result<Vec<String>, BackendError> {
    let children = match read_children(session, queue).await? {
        Ok(children) => children,
        Err(Error::NoNode) => return Ok(Vec::new()),
        Err(error) => return Err(to_backend_error(&error)),
    };
    let mut names = sort_contenders(session, queue, children).await?.names().to_vec();
    if let Some((exclusive, ..)) = read_exclusive_holder(session, queue).await? {
        names.retain(|name| format!("{queue}/{name}") != exclusive);
    }
    Ok(names)
}

async fn read(session: &ZkSession, path: &str) -> Result<Option<(Vec<u8>, Stat)>, BackendError> {
    match session.with_request_timeout(session.client().get_data(path)).await? {
        Ok(read) => Ok(Some(read)),
        Err(Error::NoNode) => Ok(None),
        Err(error) => Err(to_backend_error(&error)),
    }
}

fn holder(key: &Key, mode: ClaimMode, data: &[u8], token: i64) -> Holder {
    Holder::new(key.clone())
        .with_mode(mode)
        .with_label(decode_label(data))
        .with_token(fencing_token(token))
}

/// The time limit of [`wait_for_predecessor`].
const PREDECESSOR_WAIT_MAX: Duration = Duration::from_millis(250);
