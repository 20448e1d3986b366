//! What one claim has in the store: its node, and what is watched for it. Data only; `recipe` does what is done.

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

/// A claim in one session. It never outlives that, and no other session has a part in it.
pub(crate) struct Place {
    pub(crate) key: Key,
    /// The node of the key.
    pub(crate) dir: String,
    /// How many bytes the path of its node takes in the transaction that ends the session.
    pub(crate) node_bytes: usize,
    /// The engine has asked for its release.
    given_back: AtomicBool,
    /// Locked for as long as something is done about the claim: one thing at a time.
    pub(crate) stake: Arc<Mutex<Stake>>,
    /// Who waits for its turn now.
    waiting: AtomicUsize,
    /// When the last attempt began, or the last wait ended.
    attended_at: std::sync::Mutex<Moment>,
}

/// What a claim has.
pub(crate) struct Stake {
    /// The session does not know this place any more.
    pub(crate) left: bool,
    pub(crate) node: Option<Node>,
    /// A node was asked for, and it is not known whether it was made.
    pub(crate) in_doubt: bool,
    /// Held, and given back at this moment unless it is renewed.
    pub(crate) held_until: Option<Moment>,
    /// Watches the own node of a held claim.
    pub(crate) own: Option<OwnWatch>,
    /// Watches the one directly before.
    pub(crate) ahead: Option<Ahead>,
    /// Those before the own node that only our server shows. A majority does not have them, and if it ever has one of this name, that comes
    /// after us: it is made later.
    pub(crate) ghosts: Vec<String>,
    pub(crate) lease: Duration,
}

pub(crate) struct Node {
    pub(crate) path: String,
    /// The transaction that made it.
    pub(crate) czxid: i64,
}

impl Node {
    /// Its name among the children.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }
}

pub(crate) struct OwnWatch {
    pub(crate) watch: Watch,
    /// How often the session had been connected again when the node was last seen.
    pub(crate) seen_at: u32,
}

pub(crate) struct Ahead {
    pub(crate) name: String,
    /// None if there was no [room](Room) for it.
    pub(crate) watch: Option<Watch>,
    pub(crate) looked_at: Moment,
}

impl Ahead {
    /// Whether a watch on the node `name` is set and has not fired.
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

    /// Says that somebody waits for its turn, for as long as the answer lives.
    pub(crate) fn attended(&self) -> Attended<'_> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        Attended(self)
    }

    /// Notes that the claim has a caller now.
    pub(crate) fn attend(&self) {
        *lock(&self.attended_at) = Moment::now();
    }

    /// Notes that the holder or waiter is done with it.
    pub(crate) fn give_back(&self) {
        self.given_back.store(true, Ordering::Release);
    }

    /// Returns whether it is held, or an operation on it is in progress, and its holder has not released it.
    pub(crate) fn is_needed(&self, now: Moment) -> bool {
        let is_held = || match self.stake.try_lock() {
            Ok(stake) => stake.held_until.is_some_and(|until| now < until),
            Err(_) => true,
        };
        !self.given_back.load(Ordering::Acquire) && is_held()
    }

    /// Whether nobody takes care of the claim any more: it is held and was not renewed, or it stands in line and nobody waits.
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

/// Somebody waits.
pub(crate) struct Attended<'a>(&'a Place);

impl Drop for Attended<'_> {
    fn drop(&mut self) {
        // First, because the next attempt of a waiter follows its wait, however long that was.
        self.0.attend();
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Stake {
    /// Forgets the node, which is gone.
    pub(crate) fn lose_node(&mut self) {
        self.node = None;
        self.held_until = None;
        self.own = None;
        self.ahead = None;
        self.ghosts.clear();
    }

    /// Whether it may have something in the store.
    pub(crate) fn is_empty(&self) -> bool {
        self.node.is_none() && !self.in_doubt
    }
}

/// A watch for one change, or for the end of the client that it was set with. Any number may wait for it, and nobody need wait for it.
#[derive(Clone)]
pub(crate) struct Watch(Shared<BoxFuture<'static, ()>>);

impl Watch {
    pub(crate) fn new(watcher: OneshotWatcher, taken: Taken, client: &Connection) -> Self {
        let stopped = client.stopped();
        let changed = async move {
            tokio::select! {
                // First, because the watcher of a stopped client panics.
                biased;
                () = stopped => {}
                _ = watcher.changed() => {}
            }
            drop(taken);
        };
        Self(changed.boxed().shared())
    }

    /// Whether it has happened. What the server has told before an answer that has come is known by then.
    pub(crate) fn has_fired(&self) -> bool {
        self.0.clone().now_or_never().is_some()
    }

    pub(crate) async fn fired(self) {
        self.0.await;
    }
}

/// How many bytes of paths a session may watch at a time.
///
/// After each loss of a connection the client tells the servers all that it watches. It tells no more than [128 KiB](Self::ALL) in one request, and
/// takes the answer to a second one for one that nobody asked for: then it breaks the connection, again and again until the session is
/// over. So there are never more.
///
/// What there is no room for is not watched: one that waits polls, and a holder hears of a loss at its next renewal.
#[derive(Clone, Default)]
pub(crate) struct Room(Arc<AtomicUsize>);

impl Room {
    /// For all watches together. A little less than what the client tells at once: it may still know of some that were dropped just now.
    pub(crate) const ALL: usize = 120 * 1024;
    /// For those of held locks, so that those who wait have some left.
    pub(crate) const OWN: usize = 96 * 1024;

    /// Room for a watch of `path`, if there are no more than `max` bytes with it.
    pub(crate) fn take(&self, path: &str, max: usize) -> Option<Taken> {
        let grow = |used: usize| used.checked_add(path.len()).filter(|used| *used <= max);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, grow).ok()?;
        Some(Taken { room: self.clone(), bytes: path.len() })
    }
}

/// Room that is taken, for as long as this lives.
pub(crate) struct Taken {
    room: Room,
    bytes: usize,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.room.0.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Between two questions of one that waits there may be a pause, after trouble.
const IDLE_MIN: Duration = Duration::from_secs(5);
