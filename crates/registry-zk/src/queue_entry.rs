//! The state of one claim in the store: its node and its watches. Contains data only. `recipe`
//! sends the requests.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared, select_all};
use registry_core::{Claim, ClaimMode, Key, Moment, QueuedEntry};
use tokio::sync::Mutex;
use tokio::task::coop::unconstrained;
use zookeeper_client::OneshotWatcher;

use crate::connection::StoppableClient;
use crate::layout::Naming;
use crate::mutex::lock;
use crate::node_data::NodeGrant;
use crate::queue::node_bytes;

/// The queue entry of a claim in one session. The entry ends with its session, and no other session
/// uses it.
pub(crate) struct QueueEntry {
    pub(crate) key: Key,
    /// Path of the node whose children are the queue.
    pub(crate) dir: String,
    /// Bytes of the paths of the claim's nodes in the transaction that ends the session.
    pub(crate) node_bytes: usize,
    /// As `node_bytes`, but counts only the first unit in Curator's semaphore, because only its
    /// node is watched.
    pub(crate) watch_bytes: usize,
    /// Bytes of the path of the claim's upgrade request. Zero until the first upgrade request.
    pub(crate) upgrade_request_bytes: AtomicUsize,
    /// The engine has requested the release of the claim.
    is_release_requested: AtomicBool,
    /// Each operation on the claim locks this mutex. The operations of a claim therefore run one at
    /// a time.
    pub(crate) state: Arc<Mutex<ClaimState>>,
    /// The number of calls that wait for the claim's blockers.
    waiters: AtomicUsize,
    /// The time at which the last attempt began or the last wait ended.
    last_active_at: std::sync::Mutex<Moment>,
}

/// The nodes, watches and lease of a claim.
pub(crate) struct ClaimState {
    /// The session no longer has this entry.
    pub(crate) is_removed: bool,
    pub(crate) node: Option<ClaimNode>,
    /// In Curator's semaphore, each unit of granted permits has a node. `node` is the first. These
    /// are the paths of the others.
    pub(crate) other_unit_paths: Vec<String>,
    /// The creation of a node was requested, and its outcome is unknown.
    pub(crate) is_creation_unresolved: bool,
    /// The claim is held until this time. After this time, `recipe::release_abandoned` releases the
    /// claim. `None` if the claim is not held.
    pub(crate) held_until: Option<Moment>,
    /// The watch on a held claim's own node.
    pub(crate) own_watch: Option<OwnNodeWatch>,
    /// The nodes that a waiting claim waits for, and their watches. For an exclusive claim, this is
    /// the node directly before its own. In Curator's semaphore, the head of the queue watches the
    /// children of the parent of all units.
    pub(crate) watched_blockers: Option<WatchedNodes>,
    /// The request to upgrade the claim, while its upgrade waits.
    pub(crate) upgrade: Option<UpgradeRequest>,
    /// A conversion has an unknown outcome, or a node of the upgrade is missing.
    /// `conversion::resolve_conversion` reads the present state.
    pub(crate) is_conversion_unresolved: bool,
    /// The request to upgrade the claim is deleted this long after the last attempt or wait.
    pub(crate) upgrade_lease: Duration,
    /// Nodes before the claim's own that the connected server lists and a majority does not have. A
    /// node that a majority creates later under the same name is behind the claim's own node.
    pub(crate) stale_nodes: Vec<String>,
    pub(crate) lease: Duration,
}

pub(crate) struct ClaimNode {
    pub(crate) path: String,
    /// The transaction that created the node.
    pub(crate) czxid: i64,
    /// The present mode of the claim, and the token of its grant.
    pub(crate) grant: NodeGrant,
    /// The number of writes to the node's data.
    pub(crate) version: i32,
}

impl ClaimNode {
    /// Returns the node's name among the children.
    pub(crate) fn name(&self) -> &str {
        name_of(&self.path)
    }
}

/// Returns the last segment of a path.
pub(crate) fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// A node behind the node of a held claim. It blocks new readers while the claim's upgrade waits.
pub(crate) struct UpgradeRequest {
    pub(crate) path: String,
    /// The transaction that created the node.
    pub(crate) czxid: i64,
    /// The reader that the upgrade waits for, if the last attempt found one.
    pub(crate) reader: Option<WatchedNodes>,
}

pub(crate) struct OwnNodeWatch {
    pub(crate) watch: NodeWatch,
    /// The number of reconnects of the session when the node was last verified.
    pub(crate) reconnects_when_verified: u32,
}

/// The nodes that a claim waits for.
pub(crate) struct WatchedNodes {
    /// The name and the watch of each node. A node has no watch if the [watch budget](WatchBudget)
    /// was used up.
    pub(crate) nodes: Vec<(String, Option<NodeWatch>)>,
    /// `nodes` contains every node whose change may let the claim be granted.
    pub(crate) is_complete: bool,
    pub(crate) verified_at: Moment,
}

impl WatchedNodes {
    /// Returns the watch on the node `name` if it is set and has not fired.
    pub(crate) fn find_watch(&self, name: &str) -> Option<&NodeWatch> {
        let watch = self.nodes.iter().find(|(other, _)| other == name)?.1.as_ref();
        watch.filter(|watch| !watch.has_fired())
    }

    /// Returns whether all nodes are watched, and none of the watches has fired.
    pub(crate) fn are_unchanged(&self) -> bool {
        let is_unchanged =
            |watch: &Option<NodeWatch>| watch.as_ref().is_some_and(|it| !it.has_fired());
        self.is_complete && self.nodes.iter().all(|(_, watch)| is_unchanged(watch))
    }

    /// Returns a future that waits until a watch fires. Without a watch, it waits forever.
    pub(crate) fn wait_for_change(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let watches: Vec<_> =
            self.nodes.iter().filter_map(|(_, watch)| Some(watch.as_ref()?.0.clone())).collect();
        async move {
            if watches.is_empty() {
                return std::future::pending().await;
            }
            select_all(watches).await;
        }
    }
}

impl QueueEntry {
    pub(crate) fn new(claim: &Claim, dir: String, naming: Naming) -> Self {
        let state = ClaimState {
            is_removed: false,
            node: None,
            other_unit_paths: Vec::new(),
            is_creation_unresolved: false,
            held_until: None,
            own_watch: None,
            watched_blockers: None,
            upgrade: None,
            is_conversion_unresolved: false,
            upgrade_lease: claim.lease(),
            stale_nodes: Vec::new(),
            lease: claim.lease(),
        };
        let bytes = |mode| node_bytes(&dir, claim.id(), naming, QueuedEntry::Claim(mode));
        let watched = match claim.mode() {
            ClaimMode::Permits { of, .. } if naming == Naming::CuratorSemaphore => {
                ClaimMode::Permits { take: 1, of }
            }
            mode => mode,
        };
        Self {
            key: claim.key().clone(),
            node_bytes: bytes(claim.mode()),
            watch_bytes: bytes(watched),
            upgrade_request_bytes: AtomicUsize::new(0),
            is_release_requested: AtomicBool::new(false),
            dir,
            state: Arc::new(Mutex::new(state)),
            waiters: AtomicUsize::new(0),
            last_active_at: std::sync::Mutex::new(Moment::now()),
        }
    }

    /// Returns whether the request to upgrade the claim may exist although no caller tries the
    /// upgrade any more.
    pub(crate) fn is_upgrade_lapsed(&self, state: &ClaimState, now: Moment) -> bool {
        (state.upgrade.is_some() || state.is_conversion_unresolved)
            && self.waiters.load(Ordering::Acquire) == 0
            && lock(&self.last_active_at).after(state.upgrade_lease) <= now
    }

    /// Counts a waiter of the claim until the returned value is dropped.
    pub(crate) fn begin_wait(&self) -> WaitGuard<'_> {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        WaitGuard(self)
    }

    /// Records the current time as the last activity of the claim's caller.
    pub(crate) fn record_activity(&self) {
        *lock(&self.last_active_at) = Moment::now();
    }

    /// Records that the engine has requested the release.
    pub(crate) fn record_release_request(&self) {
        self.is_release_requested.store(true, Ordering::Release);
    }

    /// Returns whether the claim is held or an operation is in progress. Returns false after the
    /// engine has requested the release.
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
                let idle = state.lease.max(ABANDON_AFTER_MIN);
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

/// A counted call that waits for the claim's blockers. Dropping this value records the end of the
/// wait.
pub(crate) struct WaitGuard<'a>(&'a QueueEntry);

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        // The end of the wait counts as activity. It is recorded before the count decreases, so the
        // claim does not appear abandoned in between.
        self.0.record_activity();
        self.0.waiters.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ClaimState {
    /// Clears all state of the node, which no longer exists.
    pub(crate) fn clear_node(&mut self) {
        self.node = None;
        self.other_unit_paths.clear();
        self.held_until = None;
        self.own_watch = None;
        self.watched_blockers = None;
        self.stale_nodes.clear();
    }

    /// Returns the nodes that the claim waits for, or its upgrade if `claim` is a conversion.
    pub(crate) fn awaited_nodes(&self, claim: &Claim) -> Option<&WatchedNodes> {
        if claim.is_conversion() {
            return self.upgrade.as_ref()?.reader.as_ref();
        }
        self.watched_blockers.as_ref()
    }

    /// Returns whether the claim certainly has no node in the store.
    pub(crate) fn has_no_node(&self) -> bool {
        self.node.is_none()
            && !self.is_creation_unresolved
            && self.upgrade.is_none()
            && !self.is_conversion_unresolved
    }
}

/// A watch that fires once: at the first change of its node, when the session ends, or when the
/// client that set it is stopped. Any number of tasks can wait for the watch.
#[derive(Clone)]
pub(crate) struct NodeWatch(Shared<BoxFuture<'static, ()>>);

impl NodeWatch {
    pub(crate) fn new(
        watcher: OneshotWatcher,
        reservation: WatchReservation,
        client: &StoppableClient,
    ) -> Self {
        let stopped = client.wait_until_stopped();
        let changed = async move {
            tokio::select! {
                // `stopped` is polled first, because the watcher of a stopped client panics. If the
                // client stops between the two polls, the panic is caught and counts as a change.
                biased;
                () = stopped => {}
                _ = AssertUnwindSafe(watcher.changed()).catch_unwind() => {}
            }
            drop(reservation);
        };
        Self(changed.boxed().shared())
    }

    /// Returns whether the watch has fired. After a response has arrived, the result includes all
    /// events that the server sent before this response. Exception: while another task polls the
    /// watch, the result may be false. That task then notices the event.
    pub(crate) fn has_fired(&self) -> bool {
        // A future is pending when the cooperation budget of the current task is used up, even if
        // its event has arrived.
        unconstrained(self.0.clone()).now_or_never().is_some()
    }

    pub(crate) async fn wait_until_fired(self) {
        self.0.await;
    }
}

/// The watch budget: how many bytes of paths a session may watch at a time.
///
/// After each reconnect, the client library sends all its watches to the server again, at most 128
/// KiB per request. The library treats the response to a second such request as unexpected and
/// breaks the connection. This repeats until the session expires. The budget keeps the watches
/// within one request.
///
/// A node beyond the budget is not watched: its waiter polls, and its holder detects a loss at the
/// next renewal.
#[derive(Clone, Default)]
pub(crate) struct WatchBudget(Arc<AtomicUsize>);

impl WatchBudget {
    /// The limit for all watches together. It is lower than the library's 128 KiB, because the
    /// library may still contain watches that were just dropped.
    pub(crate) const TOTAL_MAX: usize = 120 * 1024;
    /// The limit for all watches together when a held lock adds its watch. The rest of the budget
    /// remains for waiters.
    pub(crate) const TOTAL_MAX_FOR_HELD: usize = 96 * 1024;

    /// Reserves the bytes of `path`. Returns `None` if the total would exceed `max`.
    pub(crate) fn reserve(&self, path: &str, max: usize) -> Option<WatchReservation> {
        let add = |used: usize| used.checked_add(path.len()).filter(|used| *used <= max);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).ok()?;
        Some(WatchReservation { watch_budget: self.clone(), bytes: path.len() })
    }
}

/// Reserved bytes of the watch budget. Dropping this value returns the bytes to the budget.
pub(crate) struct WatchReservation {
    watch_budget: WatchBudget,
    bytes: usize,
}

impl Drop for WatchReservation {
    fn drop(&mut self) {
        self.watch_budget.0.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// The minimum idle time of an abandoned claim. After a store error, a waiter may pause for some
/// time before its next attempt.
const ABANDON_AFTER_MIN: Duration = Duration::from_secs(5);
