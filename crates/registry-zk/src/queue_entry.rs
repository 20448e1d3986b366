//! The store state of one claim: its node and its watches. Data only; `recipe` acts on it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use registry_core::{Claim, Key, Moment};
use tokio::sync::Mutex;
use zookeeper_client::OneshotWatcher;

use crate::connection::StoppableClient;
use crate::layout::Naming;
use crate::mutex::lock;
use crate::queue::node_bytes;

/// The queue entry of a claim in one session. It never outlives that session, and no other session
/// uses it.
pub(crate) struct QueueEntry {
    pub(crate) key: Key,
    /// Path of the key's node.
    pub(crate) dir: String,
    /// Bytes of the node's path in the transaction that ends the session.
    pub(crate) node_bytes: usize,
    /// The engine has requested the release.
    is_release_requested: AtomicBool,
    /// Locked during each operation on the claim, so that operations are serial.
    pub(crate) state: Arc<Mutex<ClaimState>>,
    /// Number of calls that wait for the claim to reach the head.
    waiters: AtomicUsize,
    /// When the last attempt began or the last wait ended.
    last_active_at: std::sync::Mutex<Moment>,
}

/// The nodes, watches and lease of a claim.
pub(crate) struct ClaimState {
    /// The session no longer has this entry.
    pub(crate) is_removed: bool,
    pub(crate) node: Option<ClaimNode>,
    /// The creation of a node was requested, and its outcome is unknown.
    pub(crate) is_creation_unresolved: bool,
    /// Held until this time unless renewed; then `recipe::release_abandoned` releases it.
    pub(crate) held_until: Option<Moment>,
    /// Watch on the own node of a held claim.
    pub(crate) own_watch: Option<OwnNodeWatch>,
    /// The node directly before the own node, and its watch.
    pub(crate) predecessor: Option<WatchedPredecessor>,
    /// Nodes before the own node that only the connected server shows. A majority does not have
    /// them. A node that a majority later creates under this name comes after the own node.
    pub(crate) unconfirmed_nodes: Vec<String>,
    pub(crate) lease: Duration,
}

pub(crate) struct ClaimNode {
    pub(crate) path: String,
    /// The transaction that created the node.
    pub(crate) czxid: i64,
}

impl ClaimNode {
    /// Returns the node's name among the children.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }
}

pub(crate) struct OwnNodeWatch {
    pub(crate) watch: NodeWatch,
    /// Number of reconnects of the session when the node was last seen.
    pub(crate) seen_at_reconnect: u32,
}

pub(crate) struct WatchedPredecessor {
    pub(crate) name: String,
    /// `None` if the [watch budget](WatchBudget) was used up.
    pub(crate) watch: Option<NodeWatch>,
    pub(crate) verified_at: Moment,
}

impl WatchedPredecessor {
    /// Returns whether a watch on the node `name` is set and has not fired.
    pub(crate) fn is_watching(&self, name: &str) -> bool {
        self.name == name && self.watch.as_ref().is_some_and(|watch| !watch.has_fired())
    }
}

impl QueueEntry {
    pub(crate) fn new(claim: &Claim, dir: String, naming: Naming) -> Self {
        let state = ClaimState {
            is_removed: false,
            node: None,
            is_creation_unresolved: false,
            held_until: None,
            own_watch: None,
            predecessor: None,
            unconfirmed_nodes: Vec::new(),
            lease: claim.lease(),
        };
        Self {
            key: claim.key().clone(),
            node_bytes: node_bytes(&dir, claim.id(), naming),
            is_release_requested: AtomicBool::new(false),
            dir,
            state: Arc::new(Mutex::new(state)),
            waiters: AtomicUsize::new(0),
            last_active_at: std::sync::Mutex::new(Moment::now()),
        }
    }

    /// Marks the claim as waiting until the returned value is dropped.
    pub(crate) fn begin_wait(&self) -> WaitGuard<'_> {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        WaitGuard(self)
    }

    /// Records that the claim has a caller now.
    pub(crate) fn mark_active(&self) {
        *lock(&self.last_active_at) = Moment::now();
    }

    /// Records that the engine has requested the release.
    pub(crate) fn mark_release_requested(&self) {
        self.is_release_requested.store(true, Ordering::Release);
    }

    /// Returns whether the claim's holder has not released it, and it is held or an operation is in
    /// progress.
    pub(crate) fn is_in_use(&self, now: Moment) -> bool {
        let is_held = || match self.state.try_lock() {
            Ok(state) => state.held_until.is_some_and(|until| now < until),
            Err(_) => true,
        };
        !self.is_release_requested.load(Ordering::Acquire) && is_held()
    }

    /// Returns whether the claim is abandoned: held and not renewed in time, or queued without a
    /// caller.
    pub(crate) fn is_abandoned(&self, state: &ClaimState, now: Moment) -> bool {
        match state.held_until {
            Some(until) => until <= now,
            None => {
                let idle = state.lease.max(IDLE_MIN);
                self.waiters.load(Ordering::Acquire) == 0
                    && lock(&self.last_active_at).after(idle) <= now
            }
        }
    }
}

impl fmt::Debug for QueueEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueEntry").field("key", &self.key).finish_non_exhaustive()
    }
}

/// A call that waits for the claim.
pub(crate) struct WaitGuard<'a>(&'a QueueEntry);

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        // Recorded before the count: the next attempt follows the wait, however long that was.
        self.0.mark_active();
        self.0.waiters.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ClaimState {
    /// Clears all state of the node, which no longer exists.
    pub(crate) fn clear_node(&mut self) {
        self.node = None;
        self.held_until = None;
        self.own_watch = None;
        self.predecessor = None;
        self.unconfirmed_nodes.clear();
    }

    /// Returns whether the claim certainly has no node in the store.
    pub(crate) fn has_no_node(&self) -> bool {
        self.node.is_none() && !self.is_creation_unresolved
    }
}

/// A watch that fires at one change, or when the client that set it is stopped. Any number of tasks
/// can wait for it.
#[derive(Clone)]
pub(crate) struct NodeWatch(Shared<BoxFuture<'static, ()>>);

impl NodeWatch {
    pub(crate) fn new(
        watcher: OneshotWatcher,
        reservation: WatchReservation,
        client: &StoppableClient,
    ) -> Self {
        let stopped = client.stopped();
        let changed = async move {
            tokio::select! {
                // Checked first, because the watcher of a stopped client panics.
                biased;
                () = stopped => {}
                _ = watcher.changed() => {}
            }
            drop(reservation);
        };
        Self(changed.boxed().shared())
    }

    /// Returns whether the watch has fired. Events that the server sent before a received response
    /// are included.
    pub(crate) fn has_fired(&self) -> bool {
        self.0.clone().now_or_never().is_some()
    }

    pub(crate) async fn fired(self) {
        self.0.await;
    }
}

/// The watch budget: how many bytes of paths a session may watch at a time.
///
/// After each reconnect, the client library sends all its watches to the server again, at most [128
/// KiB](Self::TOTAL_MAX) per request. It treats the response to a second such request as unexpected
/// and breaks the connection, repeatedly until the session expires. The budget keeps the watches
/// within one request.
///
/// A node beyond the budget is not watched: its waiter polls, and its holder detects a loss at the
/// next renewal.
#[derive(Clone, Default)]
pub(crate) struct WatchBudget(Arc<AtomicUsize>);

impl WatchBudget {
    /// Limit for all watches together. Below the library's 128 KiB, because the library may still
    /// have watches that were just dropped.
    pub(crate) const TOTAL_MAX: usize = 120 * 1024;
    /// Limit for watches of held locks, so that waiters have some left.
    pub(crate) const HELD_MAX: usize = 96 * 1024;

    /// Reserves the bytes of `path`, if the total stays within `max`.
    pub(crate) fn reserve(&self, path: &str, max: usize) -> Option<WatchReservation> {
        let add = |used: usize| used.checked_add(path.len()).filter(|used| *used <= max);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).ok()?;
        Some(WatchReservation { watch_budget: self.clone(), bytes: path.len() })
    }
}

/// Reserved bytes of the watch budget. Returned on drop.
pub(crate) struct WatchReservation {
    watch_budget: WatchBudget,
    bytes: usize,
}

impl Drop for WatchReservation {
    fn drop(&mut self) {
        self.watch_budget.0.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// A waiter may pause between two attempts after a store error, so it is not abandoned before this
/// time.
const IDLE_MIN: Duration = Duration::from_secs(5);
