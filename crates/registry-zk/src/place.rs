//! The store state of one claim: its node and its watches. Data only; `recipe` acts on it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use registry_core::{Claim, Key, Moment};
use tokio::sync::Mutex;
use zookeeper_client::OneshotWatcher;

use crate::config::Naming;
use crate::connection::Connection;
use crate::queue::node_bytes;
use crate::session::lock;

/// The queue entry of a claim in one session. It never outlives that session, and no other session
/// uses it.
pub(crate) struct Place {
    pub(crate) key: Key,
    /// Path of the key's node.
    pub(crate) dir: String,
    /// Bytes of the node's path in the transaction that ends the session.
    pub(crate) node_bytes: usize,
    /// The engine has requested the release.
    given_back: AtomicBool,
    /// Locked during each operation on the claim, so that operations are serial.
    pub(crate) stake: Arc<Mutex<Stake>>,
    /// Number of calls that wait for the claim to reach the head.
    waiting: AtomicUsize,
    /// When the last attempt began or the last wait ended.
    attended_at: std::sync::Mutex<Moment>,
}

/// The nodes, watches and lease of a claim.
pub(crate) struct Stake {
    /// The session no longer has this entry.
    pub(crate) left: bool,
    pub(crate) node: Option<Node>,
    /// The creation of a node was requested, and its outcome is unknown.
    pub(crate) in_doubt: bool,
    /// Held until this time unless renewed; then `recipe::tend` releases it.
    pub(crate) held_until: Option<Moment>,
    /// Watch on the own node of a held claim.
    pub(crate) own: Option<OwnWatch>,
    /// The node directly before the own node, and its watch.
    pub(crate) ahead: Option<Ahead>,
    /// Nodes before the own node that only the connected server shows. A majority does not have
    /// them. A node that a majority later creates under this name comes after the own node.
    pub(crate) ghosts: Vec<String>,
    pub(crate) lease: Duration,
}

pub(crate) struct Node {
    pub(crate) path: String,
    /// The transaction that created the node.
    pub(crate) czxid: i64,
}

impl Node {
    /// Returns the node's name among the children.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }
}

pub(crate) struct OwnWatch {
    pub(crate) watch: Watch,
    /// Number of reconnects of the session when the node was last seen.
    pub(crate) seen_at: u32,
}

pub(crate) struct Ahead {
    pub(crate) name: String,
    /// `None` if the [watch budget](Room) was used up.
    pub(crate) watch: Option<Watch>,
    pub(crate) looked_at: Moment,
}

impl Ahead {
    /// Returns whether a watch on the node `name` is set and has not fired.
    pub(crate) fn is_watching(&self, name: &str) -> bool {
        self.name == name && self.watch.as_ref().is_some_and(|watch| !watch.has_fired())
    }
}

impl Place {
    pub(crate) fn new(claim: &Claim, dir: String, naming: Naming) -> Self {
        let stake = Stake {
            left: false,
            node: None,
            in_doubt: false,
            held_until: None,
            own: None,
            ahead: None,
            ghosts: Vec::new(),
            lease: claim.lease(),
        };
        Self {
            key: claim.key().clone(),
            node_bytes: node_bytes(&dir, claim.id(), naming),
            given_back: AtomicBool::new(false),
            dir,
            stake: Arc::new(Mutex::new(stake)),
            waiting: AtomicUsize::new(0),
            attended_at: std::sync::Mutex::new(Moment::now()),
        }
    }

    /// Marks the claim as waiting until the returned value is dropped.
    pub(crate) fn attended(&self) -> Attended<'_> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        Attended(self)
    }

    /// Records that the claim has a caller now.
    pub(crate) fn attend(&self) {
        *lock(&self.attended_at) = Moment::now();
    }

    /// Records that the engine has requested the release.
    pub(crate) fn give_back(&self) {
        self.given_back.store(true, Ordering::Release);
    }

    /// Returns whether the claim's holder has not released it, and it is held or an operation is in
    /// progress.
    pub(crate) fn is_needed(&self, now: Moment) -> bool {
        let is_held = || match self.stake.try_lock() {
            Ok(stake) => stake.held_until.is_some_and(|until| now < until),
            Err(_) => true,
        };
        !self.given_back.load(Ordering::Acquire) && is_held()
    }

    /// Returns whether the claim is abandoned: held and not renewed in time, or queued without a
    /// caller.
    pub(crate) fn is_overdue(&self, stake: &Stake, now: Moment) -> bool {
        match stake.held_until {
            Some(until) => until <= now,
            None => {
                let idle = stake.lease.max(IDLE_MIN);
                self.waiting.load(Ordering::Acquire) == 0
                    && lock(&self.attended_at).after(idle) <= now
            }
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("key", &self.key).finish_non_exhaustive()
    }
}

/// A call that waits for the claim.
pub(crate) struct Attended<'a>(&'a Place);

impl Drop for Attended<'_> {
    fn drop(&mut self) {
        // Recorded before the count: the next attempt follows the wait, however long that was.
        self.0.attend();
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Stake {
    /// Clears all state of the node, which no longer exists.
    pub(crate) fn lose_node(&mut self) {
        self.node = None;
        self.held_until = None;
        self.own = None;
        self.ahead = None;
        self.ghosts.clear();
    }

    /// Returns whether the claim certainly has no node in the store.
    pub(crate) fn is_empty(&self) -> bool {
        self.node.is_none() && !self.in_doubt
    }
}

/// A watch that fires at one change, or when the client that set it is stopped. Any number of tasks
/// can wait for it.
#[derive(Clone)]
pub(crate) struct Watch(Shared<BoxFuture<'static, ()>>);

impl Watch {
    pub(crate) fn new(watcher: OneshotWatcher, taken: Taken, client: &Connection) -> Self {
        let stopped = client.stopped();
        let changed = async move {
            tokio::select! {
                // Checked first, because the watcher of a stopped client panics.
                biased;
                () = stopped => {}
                _ = watcher.changed() => {}
            }
            drop(taken);
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
/// KiB](Self::ALL) per request. It treats the response to a second such request as unexpected and
/// breaks the connection, repeatedly until the session expires. The budget keeps the watches within
/// one request.
///
/// A node beyond the budget is not watched: its waiter polls, and its holder detects a loss at the
/// next renewal.
#[derive(Clone, Default)]
pub(crate) struct Room(Arc<AtomicUsize>);

impl Room {
    /// Limit for all watches together. Below the library's 128 KiB, because the library may still
    /// have watches that were just dropped.
    pub(crate) const ALL: usize = 120 * 1024;
    /// Limit for watches of held locks, so that waiters have some left.
    pub(crate) const OWN: usize = 96 * 1024;

    /// Reserves the bytes of `path`, if the total stays within `max`.
    pub(crate) fn take(&self, path: &str, max: usize) -> Option<Taken> {
        let grow = |used: usize| used.checked_add(path.len()).filter(|used| *used <= max);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, grow).ok()?;
        Some(Taken { room: self.clone(), bytes: path.len() })
    }
}

/// Reserved bytes of the watch budget. Returned on drop.
pub(crate) struct Taken {
    room: Room,
    bytes: usize,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.room.0.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// A waiter may pause between two attempts after a store error, so it is not abandoned before this
/// time.
const IDLE_MIN: Duration = Duration::from_secs(5);
