//! Determines which nodes of a queue block a claim, and which hold the lock, by the rules of
//! [`registry_core::queue_position`]. `recipe`, `conversion`, `semaphore` and `inspect` call this
//! module.
//!
//! The name of a node states the mode in which its claim was enqueued. Only exclusive and
//! upgradable claims are converted. A reader (a shared or upgradable claim) therefore also reads
//! the data of such nodes before its own, nearest first, until one of them blocks it. The list of
//! the nodes may be older than this data. An upgrade between the two reads does no harm. Either the
//! upgrade request is in the list and blocks the reader, or the request was created after the
//! reader's node. In the second case, the upgrade waits for the reader.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use registry_core::{
    BackendError, ClaimMode, Holder, Key, Moment, QueuePosition, QueuedEntry, granted_entries,
    queue_position, sleep,
};
use zookeeper_client::Error;

use crate::error::to_backend_error;
use crate::mutex::lock;
use crate::node_data::{NodeGrant, decode_grant_or_exclusive, decode_label, is_convertible};
use crate::nodes::{fencing_token, read_children, sort_contenders};
use crate::queue::{ContenderQueue, parse_queued_entry};
use crate::queue_entry::{NodeWatch, WatchBudget, WatchedNodes};
use crate::session::ZkSession;

const EXCLUSIVE: QueuedEntry = QueuedEntry::Claim(ClaimMode::Exclusive);

/// What keeps a claim from being granted.
pub(crate) enum Blockers {
    /// No node. The claim is granted, except in Curator's semaphore, where it is only the head of
    /// the queue.
    None,
    /// These nodes before the claim's own. The claim is not granted while all of them exist
    /// unchanged.
    Nodes(Vec<Blocker>),
    /// The holders' permits state this total of units, and the claim states another total.
    UnitsMismatch(u32),
    /// A node was deleted after the queue was listed.
    Changed,
}

/// A node that blocks a claim.
pub(crate) struct Blocker {
    /// The position in the queue.
    index: usize,
    /// `None` if the node was not read in this attempt.
    node: Option<ReadNode>,
}

/// A contender's node, and the watch on it if one was requested and the watch budget allowed it.
struct ReadNode {
    data: Vec<u8>,
    grant: NodeGrant,
    watch: Option<NodeWatch>,
}

/// Returns the nodes among `before` that block a claim of this mode. `watched` are the nodes that
/// blocked it before. `is_waiting` states whether the claim will wait for a change.
pub(crate) async fn find_blockers(
    session: &ZkSession,
    dir: &str,
    before: &[String],
    mode: ClaimMode,
    watched: Option<&WatchedNodes>,
    is_waiting: bool,
) -> Result<Blockers, BackendError> {
    if mode == ClaimMode::Exclusive {
        // Every other claim blocks an exclusive one.
        let predecessor = before.len().checked_sub(1);
        return Ok(predecessor.map_or(Blockers::None, |index| Blockers::unread([index])));
    }
    // A claim that may have been converted counts as exclusive until its data is read.
    let assumed =
        |name: &String| if is_convertible(name) { EXCLUSIVE } else { parse_queued_entry(name) };
    let mut entries: Vec<_> = before.iter().map(assumed).collect();
    let mut read = HashMap::new();
    // Each iteration reads another node.
    loop {
        let nearest = match queue_position(&entries, mode) {
            QueuePosition::Granted => return Ok(Blockers::None),
            QueuePosition::UnitsMismatch(of) => return Ok(Blockers::UnitsMismatch(of)),
            QueuePosition::TooFewUnits => {
                return Ok(Blockers::unread(entries_to_await(&entries, mode)));
            }
            QueuePosition::Behind(nearest) => nearest,
        };
        let name = &before[nearest];
        if let Some(node) = read.remove(&nearest) {
            return Ok(Blockers::Nodes(vec![Blocker { index: nearest, node: Some(node) }]));
        }
        let is_reader = matches!(mode, ClaimMode::Shared | ClaimMode::Upgradable);
        let is_unchanged = watched.is_some_and(|watched| watched.find_watch(name).is_some());
        // Permits are compatible with no mode of a converted claim.
        if !is_reader || !is_convertible(name) || is_unchanged {
            return Ok(Blockers::unread([nearest]));
        }
        // An upgradable claim rarely blocks a shared claim, so the read of its node sets no watch.
        // If the upgradable claim does block, `watch_blockers` sets the watch.
        let is_watched =
            is_waiting && (parse_queued_entry(name) == EXCLUSIVE || mode == ClaimMode::Upgradable);
        let Some(node) = read_node(session, dir, name, is_watched).await? else {
            return Ok(Blockers::Changed);
        };
        entries[nearest] = QueuedEntry::Claim(node.grant.mode);
        read.insert(nearest, node);
    }
}

/// Returns the head of the queue as the only blocker.
pub(crate) fn find_head(names: &[String]) -> Blockers {
    if names.is_empty() { Blockers::None } else { Blockers::unread([0]) }
}

impl Blockers {
    fn unread(indexes: impl IntoIterator<Item = usize>) -> Self {
        let unread = |index| Blocker { index, node: None };
        Self::Nodes(indexes.into_iter().map(unread).collect())
    }
}

impl Blocker {
    /// Returns the blocker at this position, whose node was not read.
    pub(crate) fn unread(index: usize) -> Self {
        Self { index, node: None }
    }
}

/// Returns the nearest entries whose units leave too few for a claim of this mode. The claim is not
/// granted before one of these entries is removed.
fn entries_to_await(entries: &[QueuedEntry], mode: ClaimMode) -> Vec<usize> {
    let ClaimMode::Permits { take, of } = mode else { return Vec::new() };
    let mut free = u64::from(of);
    let mut indexes = Vec::new();
    for (index, entry) in entries.iter().enumerate().rev() {
        if free < u64::from(take) {
            break;
        }
        if let QueuedEntry::Claim(mode) = entry {
            free = free.saturating_sub(u64::from(mode.units()));
        }
        indexes.push(index);
    }
    indexes
}

/// Returns the name of a blocking node that the connected server lists and a majority does not
/// have.
///
/// A waiter would wait forever for a node that the other servers have deleted. If a node has
/// blocked waiters for one session time-out, this function therefore checks with a majority whether
/// the node exists. The predecessor of an exclusive claim is checked only if it is the head of the
/// queue. At most [`MAJORITY_CHECKS_MAX`] blockers are checked per call.
pub(crate) async fn find_stale_blocker(
    session: &ZkSession,
    dir: &str,
    before: &[String],
    mode: ClaimMode,
    blockers: &[Blocker],
) -> Result<Option<String>, BackendError> {
    for Blocker { index, .. } in blockers.iter().take(MAJORITY_CHECKS_MAX) {
        let (name, path) = (&before[*index], format!("{dir}/{}", before[*index]));
        let cache_key = match (index, mode) {
            (0, _) => dir,
            (_, ClaimMode::Exclusive) => continue,
            _ => &path,
        };
        if !lock(session.head_cache()).observe_head(cache_key, name, session.timeout()) {
            continue;
        }
        if !session.exists_on_majority(&path).await.map_err(BackendError::as_unknown)? {
            return Ok(Some(name.clone()));
        }
        lock(session.head_cache()).record_majority_check(cache_key);
    }
    Ok(None)
}

/// Watches the nodes that block a claim, and returns the head of the queue as the holder if its
/// node was read. Reuses the watches of `watched`. Returns `None` if a node no longer exists, or
/// has changed its mode or token since it was read.
pub(crate) async fn watch_blockers(
    session: &ZkSession,
    dir: &str,
    before: &[String],
    key: &Key,
    blockers: Vec<Blocker>,
    watched: Option<WatchedNodes>,
) -> Result<Option<(WatchedNodes, Option<Holder>)>, BackendError> {
    let is_complete = blockers.len() <= WATCHES_MAX;
    let watches = blockers.into_iter().take(WATCHES_MAX).map(async |Blocker { index, node }| {
        let name = &before[index];
        let holder_of = |node: &ReadNode| (index == 0).then(|| node.holder(key));
        if let Some(watch) = watched.as_ref().and_then(|watched| watched.find_watch(name)) {
            return Ok(Some(((name.clone(), Some(watch.clone())), None)));
        }
        match node {
            Some(node) if node.watch.is_some() => {
                let holder = holder_of(&node);
                Ok(Some(((name.clone(), node.watch), holder)))
            }
            earlier => {
                let Some(node) = read_node(session, dir, name, true).await? else {
                    return Ok(None);
                };
                let is_changed = earlier.is_some_and(|earlier| earlier.grant != node.grant);
                let holder = holder_of(&node);
                Ok((!is_changed).then_some(((name.clone(), node.watch), holder)))
            }
        }
    });
    let watches: Vec<Result<_, BackendError>> = join_all(watches).await;
    let Some(watches) = watches.into_iter().collect::<Result<Option<Vec<_>>, _>>()? else {
        return Ok(None);
    };
    let (nodes, holders): (Vec<_>, Vec<_>) = watches.into_iter().unzip();
    let watched = WatchedNodes { nodes, is_complete, verified_at: Moment::now() };
    Ok(Some((watched, holders.into_iter().flatten().next())))
}

/// Reads a node, and watches it if requested and if the [watch budget](WatchBudget) allows. Returns
/// `None` if the node does not exist.
async fn read_node(
    session: &ZkSession,
    dir: &str,
    name: &str,
    is_watched: bool,
) -> Result<Option<ReadNode>, BackendError> {
    let path = format!("{dir}/{name}");
    let client = session.client();
    let budget = session.watch_budget();
    let reservation = if is_watched { budget.reserve(&path, WatchBudget::TOTAL_MAX) } else { None };
    let read = async {
        match reservation {
            // This is a data watch. An existence watch on a missing node would remain set.
            Some(reservation) => {
                let (data, stat, watcher) = client.get_and_watch_data(&path).await?;
                Ok((data, stat, Some(NodeWatch::new(watcher, reservation, &client))))
            }
            None => client.get_data(&path).await.map(|(data, stat)| (data, stat, None)),
        }
    };
    match session.with_request_timeout(read).await? {
        Ok((data, stat, watch)) => {
            let grant = decode_grant_or_exclusive(name, &data, &stat);
            Ok(Some(ReadNode { data, grant, watch }))
        }
        Err(Error::NoNode) => Ok(None),
        Err(error) => Err(to_backend_error(&error).as_unknown()),
    }
}

impl ReadNode {
    fn holder(&self, key: &Key) -> Holder {
        Holder::new(key.clone())
            .with_mode(self.grant.mode)
            .with_label(decode_label(&self.data))
            .with_token(fencing_token(self.grant.token))
    }
}

/// The nodes of a queue, divided into holders and waiting nodes.
#[derive(Default)]
pub(crate) struct QueueSnapshot {
    granted: Vec<(String, ReadNode)>,
    /// The upgrade requests.
    requests: Vec<String>,
    /// The nodes that do not hold the lock, including the upgrade requests.
    waiting: Vec<String>,
}

impl QueueSnapshot {
    /// Returns whether the node `name` holds the lock.
    pub(crate) fn is_granted(&self, name: &str) -> bool {
        self.granted.iter().any(|(granted, _)| granted == name)
    }

    /// Returns the nodes that do not hold the lock, in the order of the queue.
    pub(crate) fn into_waiting(self) -> Vec<String> {
        self.waiting
    }

    /// Returns all nodes that a forced release deletes.
    pub(crate) fn names_to_release(&self) -> impl Iterator<Item = &str> {
        self.granted.iter().map(|(name, _)| &**name).chain(self.requests.iter().map(|name| &**name))
    }

    /// Returns the holders of `key`, in the order of their tokens.
    pub(crate) fn holders(&self, key: &Key) -> Vec<Holder> {
        let mut holders: Vec<_> = self.granted.iter().map(|(_, node)| node.holder(key)).collect();
        holders.sort_by_key(|holder| holder.token);
        holders
    }
}

/// Reads the queue of the lock at `dir`. Returns `None` if it changes during each of [`READS_MAX`]
/// reads.
pub(crate) async fn read_queue(
    session: &Arc<ZkSession>,
    dir: &str,
) -> Result<Option<QueueSnapshot>, BackendError> {
    for _ in 0..READS_MAX {
        let children = match read_children(session, dir).await? {
            Ok(children) => children,
            Err(Error::NoNode) => return Ok(Some(QueueSnapshot::default())),
            Err(error) => return Err(to_backend_error(&error)),
        };
        let queue = sort_contenders(session, dir, children).await?;
        if let Some(snapshot) = read_snapshot(session, dir, &queue).await? {
            return Ok(Some(snapshot));
        }
        sleep(READ_PAUSE).await;
    }
    Ok(None)
}

/// Returns the error for a `None` of [`read_queue`].
pub(crate) fn queue_changed() -> BackendError {
    BackendError::transient(format!(
        "zookeeper: the queue changed during each of {READS_MAX} reads; retry"
    ))
    .as_refused()
}

/// Reads the nodes of `queue` up to the first exclusive claim, and divides them into holders and
/// waiting nodes. Returns `None` if a node was deleted meanwhile.
async fn read_snapshot(
    session: &ZkSession,
    dir: &str,
    queue: &ContenderQueue,
) -> Result<Option<QueueSnapshot>, BackendError> {
    let names = queue.names();
    let (mut entries, mut nodes) = (Vec::new(), Vec::new());
    // No node behind a claim that is exclusive now is granted, so such a claim ends the search.
    while entries.last() != Some(&EXCLUSIVE) && entries.len() < names.len() {
        let rest = &names[entries.len()..];
        let exclusive = rest.iter().position(|name| parse_queued_entry(name) == EXCLUSIVE);
        let batch = exclusive.map_or(rest.len(), |at| at + 1).min(CONCURRENT_READS);
        let read = rest[..batch].iter().map(|name| read_contender(session, dir, name));
        for (name, node) in rest.iter().zip(try_join_all(read).await?) {
            let Some(node) = node else { return Ok(None) };
            entries.push(match parse_queued_entry(name) {
                QueuedEntry::UpgradeRequest => QueuedEntry::UpgradeRequest,
                QueuedEntry::Claim(_) => QueuedEntry::Claim(node.grant.mode),
            });
            nodes.push((name.clone(), node));
        }
    }
    let unread = &names[entries.len()..];
    let is_request = |name: &&String| parse_queued_entry(name) == QueuedEntry::UpgradeRequest;
    let mut snapshot = QueueSnapshot {
        requests: names.iter().filter(is_request).cloned().collect(),
        ..QueueSnapshot::default()
    };
    for (is_granted, node) in granted_entries(&entries).into_iter().zip(nodes) {
        if is_granted {
            snapshot.granted.push(node);
        } else {
            snapshot.waiting.push(node.0);
        }
    }
    snapshot.waiting.extend_from_slice(unread);
    Ok(Some(snapshot))
}

/// Reads a node. If the login may not read its data, uses the mode in its name. A claim that may
/// have been converted then counts as exclusive.
async fn read_contender(
    session: &ZkSession,
    dir: &str,
    name: &str,
) -> Result<Option<ReadNode>, BackendError> {
    let path = format!("{dir}/{name}");
    let (data, stat) = match session.with_request_timeout(session.client().get_data(&path)).await? {
        Ok(read) => read,
        Err(Error::NoNode) => return Ok(None),
        // The login may still check the node's existence.
        Err(Error::NoAuth) => {
            let found = session.with_request_timeout(session.client().check_stat(&path)).await?;
            match found.map_err(|error| to_backend_error(&error))? {
                Some(stat) => (Vec::new(), stat),
                None => return Ok(None),
            }
        }
        Err(error) => return Err(to_backend_error(&error)),
    };
    let grant = decode_grant_or_exclusive(name, &data, &stat);
    Ok(Some(ReadNode { data, grant, watch: None }))
}

/// The maximum number of watches of a waiter for permits. A waiter with more blockers also polls.
const WATCHES_MAX: usize = 128;
/// The maximum number of blockers of a waiter whose existence a majority checks.
const MAJORITY_CHECKS_MAX: usize = 16;
/// The number of nodes that are read concurrently.
pub(crate) const CONCURRENT_READS: usize = 64;
/// The maximum number of reads of a queue that changes during each read.
const READS_MAX: u32 = 8;
/// The pause between two of these reads.
const READ_PAUSE: Duration = Duration::from_millis(5);
