//! What one claim has in the store: its node, and what is watched for it. Data only; `recipe` does what is done.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use registry_core::{Claim, Key, Moment};
use tokio::sync::Mutex;
use zookeeper_client::OneshotWatcher;

/// A claim in one session. It never outlives that, and no other session has a part in it.
pub(crate) struct Place {
    pub(crate) key: Key,
    /// The node of the key.
    pub(crate) dir: String,
    /// Locked for as long as something is done about the claim: one thing at a time.
    pub(crate) stake: Arc<Mutex<Stake>>,
    /// Who waits for its turn now.
    waiting: AtomicUsize,
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
    /// When it was last asked for.
    attended_at: Moment,
    lease: Duration,
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
    /// None if there was no [room](Room) for it.
    pub(crate) watch: Option<Watch>,
    pub(crate) looked_at: Moment,
}

impl Place {
    pub(crate) fn new(claim: &Claim, dir: String) -> Self {
        let stake = Stake {
            left: false,
            node: None,
            in_doubt: false,
            held_until: None,
            own: None,
            ahead: None,
            ghosts: Vec::new(),
            attended_at: Moment::now(),
            lease: claim.lease(),
        };
        Self {
            key: claim.key().clone(),
            dir,
            stake: Arc::new(Mutex::new(stake)),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Says that somebody waits for its turn, for as long as the answer lives.
    pub(crate) fn attended(&self) -> Attended<'_> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        Attended(self)
    }

    /// Whether nobody takes care of the claim any more: it is held and was not renewed, or it stands in line and nobody waits.
    pub(crate) fn is_overdue(&self, stake: &Stake, now: Moment) -> bool {
        match stake.held_until {
            Some(until) => until <= now,
            None => {
                let idle = stake.lease.max(IDLE_MIN);
                self.waiting.load(Ordering::Acquire) == 0 && stake.attended_at.after(idle) <= now
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
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Stake {
    pub(crate) fn attend(&mut self, claim: &Claim) {
        self.attended_at = Moment::now();
        self.lease = claim.lease();
    }

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

/// A watch for one change, which any number may wait for, and which nobody need wait for.
#[derive(Clone)]
pub(crate) struct Watch(Shared<BoxFuture<'static, ()>>);

impl Watch {
    pub(crate) fn new(watcher: OneshotWatcher, taken: Taken) -> Self {
        let changed = watcher.changed().map(move |_| drop(taken));
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
