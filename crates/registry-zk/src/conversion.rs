//! Changes the mode of a held claim: upgrade and downgrade. `recipe` grants and ends claims.
//!
//! A transaction writes the new mode into the data of the claim's node, if this data has not
//! changed. An upgrade first creates a second node of the claim, the upgrade request, which blocks
//! all claims behind it. The transaction that makes the claim exclusive deletes the request, and
//! fails if the request no longer exists. The transaction also checks that the first node that
//! blocks new readers exists. This node can be the request itself. The id of this transaction is
//! the token of the upgraded claim. The transaction also writes the lock's node: see `later_token`.

use std::sync::Arc;

use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, ClaimId, ClaimMode, Grant, Moment,
    QueuedEntry, UpgradePosition, upgrade_position,
};
use zookeeper_client::{Error, MultiWriteResult};

use crate::blockers::{Blocker, find_stale_blocker, watch_blockers};
use crate::error::{is_refused, to_backend_error};
use crate::later_token::LOCK_DATA;
use crate::node_data::{NodeGrant, decode_grant, encode_node_data};
use crate::nodes::{
    CreatedNode, commit, create_sequential, delete, fencing_token, negative_transaction_error,
    read_children_after_confirmation, sort_contenders,
};
use crate::queue::{claim_nodes, node_bytes, node_prefix, parse_queued_entry};
use crate::queue_entry::{ClaimState, QueueEntry, UpgradeRequest, name_of};
use crate::recipe::{
    end_lost_claim, exclude_stale_nodes, is_blocked_as_before, lease_within_validity,
    read_children_or_empty,
};
use crate::session::{SessionPool, ZkSession};

/// Changes the mode of the grant that the claim has.
pub(crate) async fn convert(
    sessions: &SessionPool,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    // A claim without an entry lost its grant when its session ended.
    let Some((session, entry)) = sessions.find_entry(claim.id()) else { return Ok(Attempt::Gone) };
    if entry.key != *claim.key() {
        return Ok(Attempt::Gone);
    }
    session.wait_until_connected().await?;
    let mut state = entry.state.lock().await;
    if state.is_removed {
        return Ok(Attempt::Gone);
    }
    entry.record_activity();
    let conversion = run_conversion(&session, &entry, &mut state, claim).await?;
    Ok(match conversion {
        ConversionOutcome::Done => grant_converted(&session, &mut state, claim)?,
        ConversionOutcome::Busy(busy) => Attempt::Busy(busy),
        ConversionOutcome::Gone => Attempt::Gone,
        ConversionOutcome::Lost => {
            end_lost_claim(&session, &entry, &mut state, claim.id()).await;
            Attempt::Gone
        }
    })
}

/// The result of a conversion.
enum ConversionOutcome {
    /// The claim has the requested mode.
    Done,
    Busy(Busy),
    /// The claim is not granted, was upgraded after this request was sent, or cannot be converted
    /// to this mode.
    Gone,
    /// Another client has deleted the node of the claim.
    Lost,
}

async fn run_conversion(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<ConversionOutcome, BackendError> {
    for _ in 0..CONVERSION_ATTEMPTS_MAX {
        if state.held_until.is_none_or(|until| until <= Moment::now()) {
            return Ok(ConversionOutcome::Gone);
        }
        if state.is_conversion_unresolved {
            resolve_conversion(session, entry, state, claim.id()).await?;
        }
        let Some(node) = &state.node else { return Ok(ConversionOutcome::Lost) };
        let NodeGrant { mode, token } = node.grant;
        let token_before = claim.token_before_conversion();
        let is_late = token_before.is_some_and(|before| i64::from(before) != token);
        let is_done = match (mode, claim.mode()) {
            (ours, wanted) if ours == wanted => {
                delete_upgrade_request(session, state).await?;
                return conversion_of_existing_node(session, state).await;
            }
            // The request is late: the grant was upgraded after the request was sent, and its
            // holder relies on the upgrade.
            _ if is_late => return Ok(ConversionOutcome::Gone),
            (ClaimMode::Exclusive, ClaimMode::Upgradable | ClaimMode::Shared)
            | (ClaimMode::Upgradable, ClaimMode::Shared) => {
                write_mode(session, entry, state, claim, ModeWrite::Downgrade { token }).await?
            }
            (ClaimMode::Upgradable, ClaimMode::Exclusive) => {
                match upgrade(session, entry, state, claim).await? {
                    UpgradeOutcome::Done => true,
                    UpgradeOutcome::Retry => false,
                    UpgradeOutcome::Busy(busy) => return Ok(ConversionOutcome::Busy(busy)),
                }
            }
            // No other conversion exists: two shared claims that are upgraded would deadlock.
            _ => return Ok(ConversionOutcome::Gone),
        };
        if is_done {
            return Ok(ConversionOutcome::Done);
        }
    }
    Err(BackendError::transient(format!(
        "zookeeper: the queue changed or the connection broke during each of {CONVERSION_ATTEMPTS_MAX} attempts to convert the lock; retry"
    )))
}

/// The result of one attempt to upgrade a claim.
enum UpgradeOutcome {
    Done,
    Busy(Busy),
    /// The queue or the claim has changed.
    Retry,
}

/// Makes an upgradable claim exclusive if no other claim holds the lock.
async fn upgrade(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<UpgradeOutcome, BackendError> {
    state.upgrade_lease = claim.lease();
    let children = match &state.upgrade {
        None => match request_upgrade(session, entry, state, claim).await? {
            Some(children) => children,
            None => return Ok(UpgradeOutcome::Retry),
        },
        Some(upgrade) => {
            if is_blocked_as_before(session, upgrade.reader.as_ref()).await? {
                return Ok(UpgradeOutcome::Busy(Busy::new().with_queue_entry()));
            }
            read_children_or_empty(session, entry).await?.names
        }
    };
    let children = exclude_stale_nodes(state, children);
    let queue = sort_contenders(session, &entry.dir, children).await?;
    let (Some(node), Some(upgrade)) = (&state.node, &mut state.upgrade) else {
        return Ok(UpgradeOutcome::Retry);
    };
    let names = queue.names();
    let (Some(own_index), Some(request_index)) =
        (queue.position_of(node.name()), queue.position_of(name_of(&upgrade.path)))
    else {
        // `resolve_conversion` detects which of the two was deleted.
        state.is_conversion_unresolved = true;
        return Ok(UpgradeOutcome::Retry);
    };
    // The claim holds the lock, so each claim before it is shared now. An exclusive or upgradable
    // claim behind it has never held the lock. The names of the nodes therefore suffice.
    let entries = names.iter().enumerate().map(|(index, name)| match index {
        _ if index < own_index => QueuedEntry::Claim(ClaimMode::Shared),
        _ if index == own_index => QueuedEntry::Claim(ClaimMode::Upgradable),
        _ => parse_queued_entry(name),
    });
    let blocking = match upgrade_position(&entries.collect::<Vec<_>>(), own_index) {
        UpgradePosition::Grantable(blocking) => blocking,
        UpgradePosition::ReadersNotBlocked => return Ok(UpgradeOutcome::Retry),
        UpgradePosition::Behind(reader) => {
            let dir = &entry.dir;
            let blockers = vec![Blocker::unread(reader)];
            if let Some(missing) =
                find_stale_blocker(session, dir, names, ClaimMode::Shared, &blockers).await?
            {
                state.stale_nodes.push(missing);
                return Ok(UpgradeOutcome::Retry);
            }
            let watched = upgrade.reader.take();
            let watched =
                watch_blockers(session, dir, names, &entry.key, blockers, watched).await?;
            let Some((watched, holder)) = watched else { return Ok(UpgradeOutcome::Retry) };
            upgrade.reader = Some(watched);
            let busy = Busy::new().with_queue_entry();
            return Ok(UpgradeOutcome::Busy(match holder {
                Some(holder) => busy.with_holder(holder),
                None => busy,
            }));
        }
    };
    if blocking != request_index && queue.is_sequence_exhausted() {
        // The transaction would not detect that another node with the same name has replaced this
        // node.
        let message = format!(
            "zookeeper: the lock cannot be upgraded while other claims wait, because the sequence numbers of {} are exhausted; delete this node while the lock is free",
            entry.dir
        );
        return Err(BackendError::new(BackendErrorKind::Misconfigured, message).as_refused());
    }
    let must_exist = format!("{}/{}", entry.dir, names[blocking]);
    let write = ModeWrite::Upgrade { must_exist: &must_exist };
    let is_done = write_mode(session, entry, state, claim, write).await?;
    Ok(if is_done { UpgradeOutcome::Done } else { UpgradeOutcome::Retry })
}

/// Creates the request to upgrade the claim. Returns the children that the lock's node then has, or
/// `None` if the caller must try again.
async fn request_upgrade(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Option<Vec<String>>, BackendError> {
    let naming = session.config().naming;
    let queued = QueuedEntry::UpgradeRequest;
    session.reserve_upgrade_request(entry, node_bytes(&entry.dir, claim.id(), naming, queued))?;
    let prefix = node_prefix(claim.id(), naming, queued);
    // From here on, the request may exist.
    state.is_conversion_unresolved = true;
    let data = encode_node_data(claim, None, None);
    match create_sequential(session, &entry.dir, &prefix, &data).await? {
        Ok(CreatedNode { path, czxid, listed }) => {
            let Some(czxid) = czxid else { return Ok(None) };
            state.is_conversion_unresolved = false;
            state.upgrade = Some(UpgradeRequest { path, czxid, reader: None });
            let names = listed.map(|listed| Some(listed.names));
            names.map_err(|error| to_backend_error(&error).as_unknown())
        }
        // The next attempt detects whether the request or the node of the claim exists.
        Err(Error::NoNode | Error::ConnectionLoss) => Ok(None),
        Err(error) => {
            state.is_conversion_unresolved = !is_refused(&error);
            Err(to_backend_error(&error))
        }
    }
}

/// A change of the mode of a held claim.
#[derive(Clone, Copy)]
enum ModeWrite<'a> {
    /// The claim keeps this token.
    Downgrade { token: i64 },
    /// Changes nothing unless the node with the path `must_exist` exists. The token is the id of
    /// the transaction.
    Upgrade { must_exist: &'a str },
}

/// Writes the mode of the claim into the data of its node, and deletes its upgrade request.
/// Returns false if the caller must try again.
async fn write_mode(
    session: &ZkSession,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
    write: ModeWrite<'_>,
) -> Result<bool, BackendError> {
    let Some(node) = &mut state.node else { return Ok(false) };
    let kept_token = match write {
        ModeWrite::Downgrade { token } => Some(token),
        ModeWrite::Upgrade { .. } => None,
    };
    let data = encode_node_data(claim, Some(claim.mode()), kept_token);
    let client = session.client();
    let mut writer = client.new_multi_writer();
    let mut add_operations = || {
        writer.add_set_data(&node.path, &data, Some(node.version))?;
        if let ModeWrite::Upgrade { must_exist } = write {
            writer.add_check_version(must_exist, ANY_VERSION)?;
            writer.add_set_data(&entry.dir, LOCK_DATA, None)?;
        }
        match &state.upgrade {
            Some(upgrade) => writer.add_delete(&upgrade.path, None),
            None => Ok(()),
        }
    };
    add_operations().map_err(|error| to_backend_error(&error).as_refused())?;
    // The watch would report this write as a change by another client.
    state.own_watch = None;
    state.is_conversion_unresolved = true;
    let sent_at = Moment::now();
    let error = match commit(session, writer).await? {
        Ok(results) => {
            let Some(MultiWriteResult::SetData { stat }) = results.first() else {
                return Ok(false);
            };
            node.version = stat.version;
            let token = kept_token.unwrap_or(stat.mzxid);
            node.grant = NodeGrant { mode: claim.mode(), token };
            state.upgrade = None;
            state.is_conversion_unresolved = false;
            session.record_majority_response(sent_at);
            return Ok(true);
        }
        // `resolve_conversion` detects what has changed.
        Err(Error::NoNode | Error::BadVersion | Error::ConnectionLoss) => return Ok(false),
        Err(error) => error,
    };
    state.is_conversion_unresolved = !is_refused(&error);
    Err(to_backend_error(&error))
}

/// Determines whether the upgrade request of the claim exists, after a conversion whose outcome is
/// unknown.
///
/// `recipe::resolve_creation` states why the outcome cannot change afterwards.
pub(crate) async fn resolve_upgrade_request(
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
    let earlier = state.upgrade.take();
    for name in claim_nodes(&children, claim, session.config().naming) {
        if parse_queued_entry(name) != QueuedEntry::UpgradeRequest {
            continue;
        }
        let path = format!("{}/{name}", entry.dir);
        let found = session.with_request_timeout(session.client().check_stat(&path)).await?;
        match found.map_err(|error| to_backend_error(&error).as_unknown())? {
            Some(stat) if stat.ephemeral_owner == session.id() && state.upgrade.is_none() => {
                state.upgrade = Some(UpgradeRequest { path, czxid: stat.czxid, reader: None });
            }
            Some(_) => delete(session, &path).await.map(drop)?,
            None => {}
        }
    }
    if let (Some(found), Some(earlier)) = (&mut state.upgrade, earlier)
        && found.czxid == earlier.czxid
    {
        found.reader = earlier.reader;
    }
    Ok(())
}

/// Like [`resolve_upgrade_request`]. Also determines the mode of the claim, and whether its node
/// exists.
pub(crate) async fn resolve_conversion(
    session: &Arc<ZkSession>,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: ClaimId,
) -> Result<(), BackendError> {
    resolve_upgrade_request(session, entry, state, claim).await?;
    if let Some(node) = &mut state.node {
        let read = session.with_request_timeout(session.client().get_data(&node.path)).await?;
        match read {
            Ok((data, stat)) if stat.czxid == node.czxid => {
                let Some(grant) = decode_grant(name_of(&node.path), &data, &stat) else {
                    let message = format!(
                        "zookeeper: another program has replaced the data of {}, which states the mode of the lock; release the lock",
                        node.path
                    );
                    return Err(BackendError::new(BackendErrorKind::Protocol, message));
                };
                (node.grant, node.version) = (grant, stat.version);
            }
            Ok(_) | Err(Error::NoNode) => state.clear_node(),
            Err(error) => return Err(to_backend_error(&error).as_unknown()),
        }
    }
    state.is_conversion_unresolved = false;
    Ok(())
}

/// Deletes the request to upgrade the claim, if any.
pub(crate) async fn delete_upgrade_request(
    session: &ZkSession,
    state: &mut ClaimState,
) -> Result<(), BackendError> {
    if let Some(upgrade) = &state.upgrade {
        delete(session, &upgrade.path).await?;
        state.upgrade = None;
    }
    Ok(())
}

/// Returns `Done` if the node of a claim that already has the requested mode exists, else `Lost`.
async fn conversion_of_existing_node(
    session: &ZkSession,
    state: &ClaimState,
) -> Result<ConversionOutcome, BackendError> {
    let Some(node) = &state.node else { return Ok(ConversionOutcome::Lost) };
    let client = session.client();
    // Without a `sync`, a lagging server could return a deleted node.
    let (synced, found) = (client.sync(&node.path), client.check_stat(&node.path));
    let synced = session.with_request_timeout(synced).await?;
    synced.map_err(|error| to_backend_error(&error).as_unknown())?;
    let found = session.with_request_timeout(found).await?;
    let stat = found.map_err(|error| to_backend_error(&error).as_unknown())?;
    let exists = stat.is_some_and(|stat| stat.czxid == node.czxid);
    Ok(if exists { ConversionOutcome::Done } else { ConversionOutcome::Lost })
}

/// Returns the grant of a converted claim. Does not shorten its lease.
fn grant_converted(
    session: &ZkSession,
    state: &mut ClaimState,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    let now = Moment::now();
    let until = now.after(claim.lease());
    let until = state.held_until.map_or(until, |held| held.max(until));
    let lease = lease_within_validity(session, until.since(now))?;
    let token = state.node.as_ref().and_then(|node| fencing_token(node.grant.token));
    let token = token.ok_or_else(negative_transaction_error)?;
    state.held_until = Some(until);
    Ok(Attempt::Granted(Grant::new(token, lease)))
}

/// The version argument that matches every version of a node.
pub(crate) const ANY_VERSION: i32 = -1;
/// The maximum number of attempts if the queue changes between a read and a write, or the
/// connection breaks.
const CONVERSION_ATTEMPTS_MAX: usize = 32;
