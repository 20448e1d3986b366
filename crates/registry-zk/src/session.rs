//! The sessions of a backend: opened, kept alive, and replaced after their end. Queues are in
//! `recipe`. Called by `backend`.
//!
//! A claim belongs to the session that created its node, and is lost with that session.
//!
//! The end of a session is one transaction with the paths of all its nodes. A server that cannot
//! read a transaction of that size stops, and so do all other members. A session therefore has at
//! most [`NODE_BYTES_MAX`] bytes of paths. Its client can watch fewer: nodes beyond
//! [`WATCHED_BYTES_MAX`] go to further sessions. At the limit of sessions, they go to a session
//! with room for unwatched nodes. When all sessions are full, attempts are refused.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared, join_all};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use registry_core::{BackendError, BackendErrorKind, Claim, ClaimId, Invalidations, Key, Moment};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use zookeeper_client::{Error, SessionState, StateWatcher};

use crate::config::ZkConfig;
use crate::connection::Connection;
use crate::error::{explain, silent, unreachable};
use crate::heads::Heads;
use crate::place::{Place, Room};
use crate::proof::Proof;
use crate::recipe::tend;

/// The sessions of one backend.
pub(crate) struct Sessions {
    config: Arc<ZkConfig>,
    hints: Hints,
    /// Oldest first. A new claim goes to the first session with room for its node.
    live: Mutex<Vec<Arc<Session>>>,
    /// Locked while a session is being opened.
    opening: tokio::sync::Mutex<Outage>,
    /// Until this time, no session is opened only to watch more nodes.
    open_another_at: Mutex<Moment>,
    /// Claims whose session has ended, and when. An entry is removed once the engine is notified.
    displaced: Mutex<HashMap<ClaimId, Moment>>,
    /// Attempts to attach sessions to new clients. They outlive a session that is closed meanwhile,
    /// so that the servers still end it.
    attaching: Mutex<JoinSet<()>>,
}

impl Sessions {
    pub(crate) fn new(config: ZkConfig) -> Arc<Self> {
        Arc::new(Self {
            config: Arc::new(config),
            hints: Hints::default(),
            live: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            open_another_at: Mutex::new(Moment::now()),
            displaced: Mutex::default(),
            attaching: Mutex::default(),
        })
    }

    pub(crate) fn hints(&self) -> &Hints {
        &self.hints
    }

    /// Returns a connected session, for requests that any session can send. Opens one if none
    /// exists.
    pub(crate) async fn get(self: &Arc<Self>) -> Result<Arc<Session>, BackendError> {
        let session = match self.current() {
            Some(session) => session,
            None => self.open(None).await?,
        };
        session.connected().await?;
        Ok(session)
    }

    /// Returns the first connected session, or the first session if none is connected.
    pub(crate) fn current(&self) -> Option<Arc<Session>> {
        self.choose(|_| true)
    }

    /// Returns all sessions that have not ended, oldest first.
    pub(crate) fn live(&self) -> Vec<Arc<Session>> {
        lock(&self.live).iter().filter(|session| !session.is_over()).map(Arc::clone).collect()
    }

    fn choose(&self, fits: impl Fn(&Session) -> bool) -> Option<Arc<Session>> {
        let live = lock(&self.live);
        let mut fitting = live.iter().filter(|session| !session.is_over() && fits(session));
        let first = fitting.next()?;
        let is_connected = |session: &&Arc<Session>| session.is_connected();
        let chosen = Some(first).filter(is_connected).or_else(|| fitting.find(is_connected));
        Some(Arc::clone(chosen.unwrap_or(first)))
    }

    /// Returns the queue entry of `claim` and its session.
    pub(crate) fn find(&self, claim: ClaimId) -> Option<(Arc<Session>, Arc<Place>)> {
        let live = lock(&self.live);
        let live = live.iter().filter(|session| !session.is_over());
        live.into_iter().find_map(|session| Some((Arc::clone(session), session.find(claim)?)))
    }

    /// Returns the queue entry of `claim` and its session, which is connected. A new entry goes to
    /// the first session with room for its node, or to a new session if none has room.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        claim: &Claim,
        dir: impl Fn() -> String + Send + Sync,
    ) -> Result<(Arc<Session>, Arc<Place>), BackendError> {
        // Terminates: if another claim takes the room found here, that claim progresses, and the
        // number of sessions is limited.
        loop {
            if let Some((session, place)) = self.find(claim.id()) {
                // Marked before the wait for the connection, so that the entry does not become
                // overdue meanwhile.
                place.attend();
                session.connected().await?;
                return Ok((session, place));
            }
            let new = Place::new(claim, dir(), self.config.naming);
            let (session, bytes_max) = match self.session_for(&new) {
                Some(found) => found,
                None => self.open_for(&new).await?,
            };
            // Connected before the entry is added, so that an outage leaves no entry behind.
            session.connected().await?;
            if let Some(place) = self.put(&session, claim.id(), new, bytes_max) {
                return Ok((session, place));
            }
        }
    }

    /// Returns the session for a new queue entry, and its limit of path bytes including that entry.
    /// Default: a connected session that can watch the entry's node. If none has room and no
    /// further session may be opened for that, any session with room.
    fn session_for(&self, place: &Place) -> Option<(Arc<Session>, usize)> {
        let watching = self.with_room(place, WATCHED_BYTES_MAX);
        if let Some(session) = watching.filter(|session| session.is_connected()) {
            return Some((session, WATCHED_BYTES_MAX));
        }
        if self.may_open_another() {
            return None;
        }
        let session = self.with_room(place, NODE_BYTES_MAX)?;
        let is_watching = lock(&session.places).has_room(place.node_bytes, WATCHED_BYTES_MAX);
        Some((session, if is_watching { WATCHED_BYTES_MAX } else { NODE_BYTES_MAX }))
    }

    fn with_room(&self, place: &Place, bytes_max: usize) -> Option<Arc<Session>> {
        self.choose(|session| lock(&session.places).has_room(place.node_bytes, bytes_max))
    }

    /// Returns whether a session may be opened only to watch more nodes. Returns false during an
    /// outage: the server's connection limit may leave just one, which a session with held locks
    /// needs.
    fn may_open_another(&self) -> bool {
        let live = self.live();
        live.len() < self.config.sessions_max as usize
            && live.iter().all(|session| session.is_connected())
            && *lock(&self.open_another_at) <= Moment::now()
    }

    /// Opens a session for `place`. If another session has room for it, the wait is short, and a
    /// failure delays the next attempt.
    async fn open_for(
        self: &Arc<Self>,
        place: &Place,
    ) -> Result<(Arc<Session>, usize), BackendError> {
        let Some(unwatched) = self.with_room(place, NODE_BYTES_MAX) else {
            return self.open(Some(place)).await.map(|session| (session, NODE_BYTES_MAX));
        };
        match timeout(OPEN_ANOTHER_WITHIN, self.open(Some(place))).await {
            Ok(Ok(session)) => Ok((session, WATCHED_BYTES_MAX)),
            Ok(Err(_)) | Err(_) => {
                *lock(&self.open_another_at) = Moment::now().after(OPEN_ANOTHER_PAUSE);
                Ok((unwatched, NODE_BYTES_MAX))
            }
        }
    }

    /// Adds a queue entry to `session`, up to `bytes_max` bytes in total. Returns `None` if it does
    /// not fit or the session has ended.
    fn put(
        &self,
        session: &Arc<Session>,
        claim: ClaimId,
        place: Place,
        bytes_max: usize,
    ) -> Option<Arc<Place>> {
        let live = lock(&self.live);
        let is_live = live.iter().any(|live| Arc::ptr_eq(live, session));
        if is_live { lock(&session.places).put(claim, place, bytes_max) } else { None }
    }

    /// Opens a session, with room for a queue entry if one is given.
    async fn open(self: &Arc<Self>, place: Option<&Place>) -> Result<Arc<Session>, BackendError> {
        let mut outage = self.opening.lock().await;
        let opened = match place {
            Some(place) => self.session_for(place).map(|(session, _)| session),
            None => self.current(),
        };
        if let Some(session) = opened {
            return Ok(session);
        }
        if let Some(place) = place {
            let live = self.live();
            if live.len() >= self.config.sessions_max as usize {
                let bytes = live.iter().map(|session| lock(&session.places).bytes).sum();
                return Err(SessionsExhausted {
                    key: place.key.as_str().to_owned(),
                    bytes,
                    bytes_max: NODE_BYTES_MAX * live.len(),
                    sessions_max: self.config.sessions_max,
                }
                .refuse());
            }
        }
        outage.allows_another_try()?;
        match Session::connect(self).await {
            Ok(session) => {
                *outage = Outage::default();
                let over: Vec<_> = {
                    let mut live = lock(&self.live);
                    live.push(Arc::clone(&session));
                    live.iter().filter(|session| session.is_over()).map(Arc::clone).collect()
                };
                over.iter().for_each(|over| self.retire(over));
                Ok(session)
            }
            Err(error) => Err(outage.goes_on(error)),
        }
    }

    /// Removes a session that has ended, and notifies the holders of its claims. Other sessions are
    /// not affected.
    fn retire(&self, session: &Arc<Session>) {
        if session.over.swap(true, Ordering::AcqRel) {
            return;
        }
        // Removed first, so that no further entry is added to it.
        lock(&self.live).retain(|live| !Arc::ptr_eq(live, session));
        let places = std::mem::take(&mut *lock(&session.places)).by_claim;
        {
            let now = Moment::now();
            let mut displaced = lock(&self.displaced);
            // The caller of an entry this old has stopped retrying.
            displaced.retain(|_, at| at.after(DISPLACED_FOR) > now);
            displaced.extend(places.keys().map(|claim| (*claim, now)));
        }
        self.hints.notify(places.values().map(|place| &place.key));
    }

    /// Stops the disconnected client of `session`, and attaches the session to a new client as soon
    /// as a server can be reached.
    fn attach_again(self: &Arc<Self>, session: &Arc<Session>) {
        let last = session.client();
        let (sessions, session) = (Arc::downgrade(self), Arc::downgrade(session));
        let config = Arc::clone(&self.config);
        let mut attaching = lock(&self.attaching);
        while attaching.try_join_next().is_some() {}
        attaching.spawn(async move {
            // Stopped first: two clients of one session would take it from each other.
            last.stop().await;
            let (info, timeout) = (last.session().clone(), last.session_timeout());
            drop(last);
            let until = Moment::now().after(timeout * 7 / 5);
            let attached = loop {
                match Connection::attach(&config, timeout, info.clone()).await {
                    Err(Error::SessionExpired | Error::AuthFailed) => break None,
                    Err(_) if Moment::now() >= until => break None,
                    Err(_) => sleep(PAUSE_ATTACHING).await,
                    Ok(attached) => break Some(attached),
                }
            };
            // If the session is no longer used, dropping the new client ends it.
            let (Some(sessions), Some(session)) = (sessions.upgrade(), session.upgrade()) else {
                return;
            };
            match attached {
                Some((connection, sent_at)) => session.resume(&sessions, connection, sent_at),
                None => sessions.retire(&session),
            }
        });
    }

    /// Ends `session` if it is not the first one and has had no node for the session time-out.
    fn end_if_unused(&self, session: &Arc<Session>) {
        let mut live = lock(&self.live);
        let is_first = live.first().is_some_and(|first| Arc::ptr_eq(first, session));
        if !is_first && lock(&session.places).unused_for(Moment::now()) > session.timeout() {
            // The client ends the session when its last reference is dropped.
            live.retain(|live| !Arc::ptr_eq(live, session));
        }
    }

    /// Returns whether the session of `claim` has ended. Returns true once.
    pub(crate) fn was_displaced(&self, claim: ClaimId) -> bool {
        lock(&self.displaced).remove(&claim).is_some()
    }

    /// Ends all sessions except those with a held lock. A node whose release was refused does not
    /// keep its session: the servers delete it with the session, regardless of rights.
    pub(crate) async fn close(&self) {
        let ended: Vec<_> = {
            let mut live = lock(&self.live);
            let (needed, ended) = live.drain(..).partition(|session| session.is_needed());
            *live = needed;
            ended
        };
        join_all(ended.into_iter().map(async |session| {
            let mut states = session.client().state_watcher();
            // The client ends the session when its last reference is dropped.
            drop(session);
            let closed = async { while !states.changed().await.is_terminated() {} };
            let _ = timeout(self.config.request_timeout, closed).await;
        }))
        .await;
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("live", &self.live()).finish_non_exhaustive()
    }
}

/// Failed attempts to open a session, since the last success.
#[derive(Default)]
struct Outage {
    tries: u32,
    last: Option<(Moment, BackendError)>,
}

impl Outage {
    /// Returns the last error until the pause after it is over. Concurrent callers share one
    /// attempt.
    fn allows_another_try(&self) -> Result<(), BackendError> {
        let Some((at, error)) = &self.last else { return Ok(()) };
        let pause = PAUSE_MIN.saturating_mul(1 << self.tries.min(6)).min(PAUSE_MAX);
        if Moment::now() < at.after(pause) { Err(error.clone()) } else { Ok(()) }
    }

    fn goes_on(&mut self, error: BackendError) -> BackendError {
        self.tries = self.tries.saturating_add(1);
        self.last = Some((Moment::now(), error.clone()));
        error
    }
}

/// The invalidation handles of the registries that use a backend.
#[derive(Default)]
pub(crate) struct Hints(Mutex<Vec<Invalidations>>);

impl Hints {
    pub(crate) fn add(&self, hints: Invalidations) {
        let mut all = lock(&self.0);
        all.retain(Invalidations::is_live);
        all.push(hints);
    }

    /// Returns whether any registry still uses the backend.
    pub(crate) fn are_wanted(&self) -> bool {
        lock(&self.0).iter().any(Invalidations::is_live)
    }

    pub(crate) fn notify<'a>(&self, keys: impl Iterator<Item = &'a Key>) {
        let all = lock(&self.0).clone();
        keys.for_each(|key| all.iter().for_each(|hints| hints.notify(key)));
    }
}

/// The claims of one session, and the bytes of their nodes' paths.
struct Places {
    by_claim: HashMap<ClaimId, Arc<Place>>,
    /// Counts a node from before its creation is requested until it is certainly deleted.
    bytes: usize,
    /// When the last entry was removed.
    emptied_at: Moment,
}

impl Default for Places {
    fn default() -> Self {
        Self { by_claim: HashMap::new(), bytes: 0, emptied_at: Moment::now() }
    }
}

impl Places {
    fn has_room(&self, bytes: usize, max: usize) -> bool {
        self.bytes.saturating_add(bytes) <= max
    }

    fn put(&mut self, claim: ClaimId, place: Place, bytes_max: usize) -> Option<Arc<Place>> {
        if let Some(place) = self.by_claim.get(&claim) {
            return Some(Arc::clone(place));
        }
        if !self.has_room(place.node_bytes, bytes_max) {
            return None;
        }
        self.bytes += place.node_bytes;
        Some(Arc::clone(self.by_claim.entry(claim).or_insert_with(|| Arc::new(place))))
    }

    fn forget(&mut self, claim: ClaimId, place: &Arc<Place>) {
        if self.by_claim.get(&claim).is_some_and(|other| Arc::ptr_eq(other, place)) {
            self.by_claim.remove(&claim);
            self.bytes -= place.node_bytes;
            self.emptied_at = Moment::now();
        }
    }

    fn unused_for(&self, now: Moment) -> Duration {
        if self.by_claim.is_empty() { now.since(self.emptied_at) } else { Duration::ZERO }
    }
}

/// All sessions of a backend are full. This is the [source](std::error::Error::source) of the
/// [`BackendError`] that refuses an attempt.
///
/// A session ends in one transaction with the paths of its nodes. A transaction of more than twice
/// the servers' `jute.maxbuffer` stops the whole ensemble. A session therefore has at most
/// [`ZkConfig::NODE_BYTES_MAX`] bytes of paths.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "lock {key:?} does not fit: the nodes of this backend take {bytes} of {bytes_max} bytes in {sessions_max} sessions"
)]
#[non_exhaustive]
pub struct SessionsExhausted {
    /// The key of the refused lock.
    pub key: String,
    /// The path bytes of all nodes, of held locks and of waiters.
    pub bytes: usize,
    /// The limit of path bytes in all sessions together.
    pub bytes_max: usize,
    /// The limit of sessions: [`ZkConfig::with_sessions_max`], or the URL option `sessions`.
    pub sessions_max: u32,
}

impl SessionsExhausted {
    /// Returns a transient error: released locks make room, so a retry can succeed.
    fn refuse(self) -> BackendError {
        let says = format!(
            "zookeeper: no session has room for the node of lock {:?}: {} of {} bytes are in use; raise `sessions`, which is {}, or hold \
             fewer or shorter keys in one process",
            self.key, self.bytes, self.bytes_max, self.sessions_max
        );
        BackendError::transient(says).with_source(self).as_refused()
    }
}

/// One request to the servers that any number of callers can await.
type Round = Shared<BoxFuture<'static, Result<(), BackendError>>>;

/// The servers that answer a round. When it completes, the connected server has applied everything
/// that the leader did before the answer. It has also sent the events of this client's watches
/// before it passed on the answer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum By {
    /// A majority, by a write that changes nothing. Only this proves that no other leader has ended
    /// the session.
    Majority,
    /// The leader, by a `sync`. A partitioned former leader also answers for a while.
    Leader,
}

pub(crate) struct Session {
    connection: watch::Sender<Arc<Connection>>,
    /// The session's id, which its ephemeral nodes have as their owner.
    id: i64,
    timeout: Duration,
    config: Arc<ZkConfig>,
    over: AtomicBool,
    proof: Mutex<Proof>,
    /// When the last request to a majority was sent.
    asked_at: Mutex<Moment>,
    /// When the last request to the leader was sent.
    leader_asked_at: Mutex<Moment>,
    /// The next rounds, [by](By) a majority and by the leader, until they are sent.
    next_rounds: [Mutex<Option<Round>>; 2],
    /// Number of reconnects.
    reconnects: AtomicU32,
    places: Mutex<Places>,
    room: Room,
    heads: Mutex<Heads>,
    /// Aborted when the session is dropped.
    tasks: Mutex<JoinSet<()>>,
}

impl Session {
    async fn connect(sessions: &Arc<Sessions>) -> Result<Arc<Self>, BackendError> {
        let config = Arc::clone(&sessions.config);
        let asked_at = Moment::now();
        let asked = config.session_timeout;
        let mut client = connect(&config, asked, config.connect_timeout).await?;
        let granted = client.session_timeout();
        if config.has_several_servers() && granted < asked * 2 / 3 {
            // The client waits for a silent server according to the time-out that it requested, not
            // the granted one. If no time is left for a second connection, the first one is used.
            let left = config.connect_timeout.saturating_sub(Moment::now().since(asked_at));
            client = connect(&config, granted, left).await.unwrap_or(client);
        }
        let timeout = client.session_timeout();
        let session = Arc::new(Self {
            id: client.session_id().0,
            timeout,
            connection: watch::Sender::new(Arc::new(client)),
            proof: Mutex::new(Proof::new(timeout, asked_at)),
            config,
            over: AtomicBool::new(false),
            asked_at: Mutex::new(asked_at),
            leader_asked_at: Mutex::new(asked_at),
            next_rounds: Default::default(),
            reconnects: AtomicU32::new(0),
            places: Mutex::new(Places::default()),
            room: Room::default(),
            heads: Mutex::default(),
            tasks: Mutex::default(),
        });
        session.require_chroot().await?;
        session.begin_pulse(sessions);
        Ok(session)
    }

    fn begin_pulse(self: &Arc<Self>, sessions: &Arc<Sessions>) {
        let states = self.client().state_watcher();
        let (weak, owner) = (Arc::downgrade(self), Arc::downgrade(sessions));
        self.spawn(pulse(weak, owner, states, self.timeout()));
    }

    /// Continues the session on a new client. A majority has confirmed the session by a write sent
    /// at `sent_at`.
    fn resume(self: &Arc<Self>, sessions: &Arc<Sessions>, connection: Connection, sent_at: Moment) {
        self.connection.send_replace(Arc::new(connection));
        self.answered(sent_at);
        self.reconnected(sessions);
        self.begin_pulse(sessions);
    }

    /// Requests verification of all locks of the session: the client received no watch events while
    /// it was disconnected.
    fn reconnected(&self, sessions: &Sessions) {
        self.reconnects.fetch_add(1, Ordering::AcqRel);
        let places = self.places();
        sessions.hints.notify(places.iter().map(|(_, place)| &place.key));
    }

    /// Verifies that the chroot exists. A mistyped chroot would be a separate tree, in which no
    /// other client contends.
    async fn require_chroot(&self) -> Result<(), BackendError> {
        let Some(chroot) = &self.config.chroot else { return Ok(()) };
        let found = self.bounded(self.client().check_stat(chroot)).await?;
        match found.map_err(|error| explain(&error).as_refused())? {
            Some(_) => Ok(()),
            None => {
                let says = "zookeeper: the chroot of the servers' address is not there; make it, for example by `zkCli.sh create`";
                Err(BackendError::new(BackendErrorKind::Misconfigured, says).as_refused())
            }
        }
    }

    /// Returns the current client of the session.
    pub(crate) fn client(&self) -> Arc<Connection> {
        Arc::clone(&self.connection.borrow())
    }

    pub(crate) fn config(&self) -> &ZkConfig {
        &self.config
    }

    /// Returns the session's id, which its ephemeral nodes have as their owner.
    pub(crate) fn id(&self) -> i64 {
        self.id
    }

    /// Returns how long the servers keep the session after its last message, as they granted it.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.client().state().is_terminated()
    }

    pub(crate) fn reconnects(&self) -> u32 {
        self.reconnects.load(Ordering::Acquire)
    }

    /// Returns how much longer the session is certain to exist.
    pub(crate) fn certain_left(&self) -> Duration {
        lock(&self.proof).left(Moment::now())
    }

    /// Records that a majority has just confirmed a write that was sent at `sent_at`.
    pub(crate) fn answered(&self, sent_at: Moment) {
        lock(&self.proof).answered(sent_at, Moment::now());
    }

    /// Waits until the client is connected. A request sent without a connection might be executed
    /// much later.
    pub(crate) async fn connected(&self) -> Result<(), BackendError> {
        if self.is_connected() {
            return Ok(());
        }
        let mut connections = self.connection.subscribe();
        let connected = async {
            loop {
                let connection = Arc::clone(&connections.borrow_and_update());
                tokio::select! {
                    biased;
                    connected = connection.connected() => return connected,
                    // Never closes: the sender is a field of `self`.
                    _ = connections.changed() => {}
                }
            }
        };
        timeout(self.config.request_timeout, connected).await.unwrap_or_else(|_| Err(unreachable()))
    }

    /// Waits for the response to one request, at most the request time-out.
    pub(crate) async fn bounded<T>(
        &self,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<Result<T, Error>, BackendError> {
        let answer = self.unless_stopped(request);
        let answer = timeout(self.config.request_timeout, answer).await.map_err(|_| silent())?;
        Ok(answer.unwrap_or(Err(Error::ConnectionLoss)))
    }

    /// Waits for the response to one request. Returns `None` if the client is stopped first.
    pub(crate) async fn unless_stopped<T>(&self, request: impl Future<Output = T>) -> Option<T> {
        let stopped = self.client().stopped();
        tokio::select! {
            biased;
            () = stopped => None,
            answer = request => Some(answer),
        }
    }

    /// Asks the servers whether the session exists. Concurrent callers share one request, which is
    /// sent after all of them have called.
    pub(crate) fn round(self: &Arc<Self>, by: By) -> Round {
        let mut next = lock(&self.next_rounds[by as usize]);
        if let Some(round) = &*next {
            return round.clone();
        }
        let session = Arc::downgrade(self);
        let round = async move {
            // Lets other ready tasks join this round.
            tokio::task::yield_now().await;
            let session = session.upgrade().ok_or_else(|| explain(&Error::ClientClosed))?;
            *lock(&session.next_rounds[by as usize]) = None;
            session.connected().await?;
            match by {
                By::Majority => session.prove().await,
                By::Leader => {
                    *lock(&session.leader_asked_at) = Moment::now();
                    let synced = session.bounded(session.client().sync("/")).await?;
                    synced.map_err(|error| explain(&error))
                }
            }
        };
        let round = round.boxed().shared();
        *next = Some(round.clone());
        round
    }

    /// Waits until this client has seen all changes that the leader had before this call. Waiters
    /// that call within [`LEADER_PAUSE`] after a request to the leader share the next one.
    pub(crate) async fn catch_up(self: &Arc<Self>) -> Result<(), BackendError> {
        let next = lock(&self.leader_asked_at).after(LEADER_PAUSE);
        let pause = next.since(Moment::now());
        if !pause.is_zero() {
            sleep(pause).await;
        }
        self.round(By::Leader).await
    }

    /// Returns whether the client is connected and more than half of the session time-out is
    /// certain.
    pub(crate) fn is_healthy(&self) -> bool {
        self.is_connected() && self.certain_left() > self.timeout() / 2
    }

    /// Commits a write through a majority that changes nothing. The answer extends the session's
    /// validity even if it arrives after the request time-out, for example on slow disks.
    async fn prove(self: &Arc<Self>) -> Result<(), BackendError> {
        let sent_at = Moment::now();
        *lock(&self.asked_at) = sent_at;
        let (tell, told) = oneshot::channel();
        let session = Arc::clone(self);
        self.spawn(async move {
            let path = session.config.chroot.as_deref().unwrap_or("/");
            let written = session.write_check(path).await;
            if written.is_ok() {
                session.answered(sent_at);
            }
            // The receiver may have timed out.
            drop(tell.send(written.map(drop)));
        });
        let told = timeout(self.config.request_timeout, told).await.map_err(|_| silent())?;
        told.unwrap_or_else(|_| Err(explain(&Error::ClientClosed)))
    }

    /// Returns whether a node exists, decided by a majority with a write that changes nothing.
    pub(crate) async fn check(&self, path: &str) -> Result<bool, BackendError> {
        let checked = timeout(self.config.request_timeout, self.write_check(path)).await;
        checked.map_err(|_| silent())?
    }

    async fn write_check(&self, path: &str) -> Result<bool, BackendError> {
        let client = self.client();
        let checked = self.unless_stopped(client.write_check(path)).await;
        checked.unwrap_or(Err(Error::ConnectionLoss)).map_err(|error| explain(&error))
    }

    /// Returns the watch budget of the session.
    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    /// Returns the heads of the queues in which this session waits.
    pub(crate) fn heads(&self) -> &Mutex<Heads> {
        &self.heads
    }

    /// Returns the queue entry of `claim`.
    pub(crate) fn find(&self, claim: ClaimId) -> Option<Arc<Place>> {
        lock(&self.places).by_claim.get(&claim).map(Arc::clone)
    }

    /// Returns all queue entries.
    pub(crate) fn places(&self) -> Vec<(ClaimId, Arc<Place>)> {
        let places = lock(&self.places);
        places.by_claim.iter().map(|(claim, place)| (*claim, Arc::clone(place))).collect()
    }

    /// Removes `place` unless `claim` has another queue entry by now.
    pub(crate) fn forget(&self, claim: ClaimId, place: &Arc<Place>) {
        lock(&self.places).forget(claim, place);
    }

    /// Returns whether the session has a held lock that its holder has not released.
    fn is_needed(&self) -> bool {
        let now = Moment::now();
        self.places().iter().any(|(_, place)| place.is_needed(now))
    }

    fn is_connected(&self) -> bool {
        self.client().state() == SessionState::SyncConnected
    }

    /// Runs `work` until it ends or the session is dropped.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        lock(&self.tasks).spawn(work);
    }

    /// Returns whether the next write that proves the session is due.
    fn is_due(&self, now: Moment) -> bool {
        lock(&self.asked_at).after(self.timeout() / PROOFS) <= now
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("id", &self.client().session_id())
            .field("state", &self.client().state())
            .field("places", &lock(&self.places).by_claim.len())
            .finish_non_exhaustive()
    }
}

/// Opens a session with any of the servers, within `limit`.
///
/// The client library tries the servers one after the other, in its own order. It waits long for a
/// server that accepts connections and does not answer. With several servers, further attempts
/// therefore start while one is pending, and the first session is used.
async fn connect(
    config: &ZkConfig,
    session_timeout: Duration,
    limit: Duration,
) -> Result<Connection, BackendError> {
    let attempts = if config.has_several_servers() { ATTEMPTS } else { 1 };
    let attempts = (0..attempts).map(async |number| {
        sleep(limit * number / ATTEMPTS).await;
        Connection::open(config, session_timeout, None).await
    });
    let mut attempts: FuturesUnordered<_> = attempts.collect();
    // A failed attempt has tried every server, so its error is returned at once.
    let first = timeout(limit, attempts.next()).await;
    let first = first.map_err(|_| unreachable())?.unwrap_or(Err(Error::NoHosts));
    first.map_err(|error| explain(&error).as_refused())
}

/// Keeps the validity of a session up to date, detects its end, and releases overdue claims.
async fn pulse(
    session: Weak<Session>,
    sessions: Weak<Sessions>,
    mut states: StateWatcher,
    timeout: Duration,
) {
    let mut tick = interval((timeout / PROOFS).min(TICK_MAX));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let patience = (timeout / PROOFS).min(PATIENCE_MAX);
    let mut lost_at = None;
    loop {
        let state = tokio::select! {
            state = states.changed() => Some(state),
            _ = tick.tick() => None,
        };
        let (Some(session), Some(sessions)) = (session.upgrade(), sessions.upgrade()) else {
            return;
        };
        match state {
            Some(state) if state.is_terminated() => {
                sessions.retire(&session);
                return;
            }
            Some(SessionState::SyncConnected) => {
                session.reconnected(&sessions);
            }
            Some(_) => {}
            None => {
                while lock(&session.tasks).try_join_next().is_some() {}
                tend(&session);
                sessions.end_if_unused(&session);
                let now = Moment::now();
                let state = session.client().state();
                if state == SessionState::Disconnected {
                    if lost_at.get_or_insert(now).after(patience) <= now {
                        sessions.attach_again(&session);
                        // The next client gets its own `pulse` task.
                        return;
                    }
                } else {
                    lost_at = None;
                }
                if session.is_due(now) && state == SessionState::SyncConnected {
                    *lock(&session.asked_at) = now;
                    let round = session.round(By::Majority);
                    session.spawn(round.map(drop));
                }
            }
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The limit of path bytes in one session: 512 KiB. This is half of the default `jute.maxbuffer` (1
/// MiB), and a quarter of the largest transaction that servers with that setting can read.
pub(crate) const NODE_BYTES_MAX: usize = 512 * 1024;

/// Up to this many path bytes, a session watches the node of every held lock and the predecessor of
/// every waiter; see [`Room`].
pub(crate) const WATCHED_BYTES_MAX: usize = Room::OWN;

/// How long an acquisition waits for a session that is opened only to watch more nodes.
const OPEN_ANOTHER_WITHIN: Duration = Duration::from_secs(1);
/// Pause between a failure to open such a session and the next attempt.
const OPEN_ANOTHER_PAUSE: Duration = Duration::from_secs(30);

/// Pause between two requests to the leader on behalf of waiters.
const LEADER_PAUSE: Duration = Duration::from_millis(100);

/// How long the end of a claim's session is remembered.
const DISPLACED_FOR: Duration = Duration::from_secs(10 * 60);

/// Writes to a majority per session time-out. This replaces the client's own pings, which are about
/// as frequent.
const PROOFS: u32 = 10;
const TICK_MAX: Duration = Duration::from_millis(250);

/// How long the client may try to reconnect on its own. Its first attempts are fast and try other
/// servers at once.
const PATIENCE_MAX: Duration = Duration::from_secs(1);
/// Pause between attempts to attach a session to a new client.
const PAUSE_ATTACHING: Duration = Duration::from_millis(500);

/// Maximum number of concurrent attempts to open a session.
const ATTEMPTS: u32 = 8;

/// Pause after the first failure to open a session. It doubles with each further failure.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
