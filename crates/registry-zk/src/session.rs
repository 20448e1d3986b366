//! The sessions that the locks of a backend live in: opened, kept alive, and replaced after their end. Queues are in `recipe`.
//!
//! A claim belongs to the session in which its node was created, and is lost with it.
//!
//! The end of a session is one transaction with the paths of all its nodes. A server that cannot read a transaction of that size
//! stops, and so do all other members. Hence a session has at most [`NODE_BYTES_MAX`] bytes of paths. Its client can watch fewer:
//! nodes beyond [`WATCHED_BYTES_MAX`] go to further sessions, and when there are as many sessions as are allowed, to those with room
//! for unwatched nodes. When all of them are full, attempts are refused.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared, join_all};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use registry_core::{BackendError, BackendErrorKind, Claim, ClaimId, Key, LossHints, Moment};
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
    /// The oldest first. A new claim goes to the first one with room for its node.
    live: Mutex<Vec<Arc<Session>>>,
    /// Locked while a session is being opened.
    opening: tokio::sync::Mutex<Outage>,
    /// No session is opened only to watch more nodes before this moment.
    open_another_at: Mutex<Moment>,
    /// Claims whose session has ended, and when. Removed when the engine has been notified.
    displaced: Mutex<HashMap<ClaimId, Moment>>,
    /// Attempts to attach sessions to new clients. They outlive a session that is closed meanwhile, so that it is ended all the same.
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

    /// Returns a connected session, for questions that any session can ask. Opens one if there is none.
    pub(crate) async fn get(self: &Arc<Self>) -> Result<Arc<Session>, BackendError> {
        let session = match self.current() {
            Some(session) => session,
            None => self.open(None).await?,
        };
        session.connected().await?;
        Ok(session)
    }

    /// The first connected session; the first one if none is connected.
    pub(crate) fn current(&self) -> Option<Arc<Session>> {
        self.choose(|_| true)
    }

    /// All sessions that have not ended, the oldest first.
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

    /// Returns the place of `claim` and its session.
    pub(crate) fn find(&self, claim: ClaimId) -> Option<(Arc<Session>, Arc<Place>)> {
        let live = lock(&self.live);
        let live = live.iter().filter(|session| !session.is_over());
        live.into_iter().find_map(|session| Some((Arc::clone(session), session.find(claim)?)))
    }

    /// Returns the place of `claim` and its session, connected. A new place goes to the first session with room for its node, and
    /// to a new session if there is no room.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        claim: &Claim,
        dir: impl Fn() -> String + Send + Sync,
    ) -> Result<(Arc<Session>, Arc<Place>), BackendError> {
        // Ends: whoever takes the room that was seen here makes progress, and the number of sessions is limited.
        loop {
            if let Some((session, place)) = self.find(claim.id()) {
                // It has a caller, who may have to wait for the connection.
                place.attend();
                session.connected().await?;
                return Ok((session, place));
            }
            let new = Place::new(claim, dir(), self.config.naming);
            let (session, bytes_max) = match self.session_for(&new) {
                Some(found) => found,
                None => self.open_for(&new).await?,
            };
            // Before there is a place, so that an outage leaves none behind.
            session.connected().await?;
            if let Some(place) = self.put(&session, claim.id(), new, bytes_max) {
                return Ok((session, place));
            }
        }
    }

    /// Returns the session for a new place, and how many bytes of paths it may have including that place: a connected session
    /// that can watch the place's node. If there is none, and no further session may be opened for that, any session with room.
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

    /// Returns whether a session may be opened only to watch more nodes. Not during an outage: the server's limit of
    /// connections may leave just one, which a session that holds locks needs.
    fn may_open_another(&self) -> bool {
        let live = self.live();
        live.len() < self.config.sessions_max as usize
            && live.iter().all(|session| session.is_connected())
            && *lock(&self.open_another_at) <= Moment::now()
    }

    /// Opens a session for `place`. If another session has room for it, the wait is short, and a failure puts the next attempt off.
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

    /// Puts a place into `session`, which may have `bytes_max` bytes with it. Returns `None` if it would have more, or has ended.
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

    /// Opens a session, with room for a place if one is given.
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

    /// Removes a session that has ended, and notifies the holders of its claims. Other sessions are not affected.
    fn retire(&self, session: &Arc<Session>) {
        if session.over.swap(true, Ordering::AcqRel) {
            return;
        }
        // First, so that no place is put into it any more.
        lock(&self.live).retain(|live| !Arc::ptr_eq(live, session));
        let places = std::mem::take(&mut *lock(&session.places)).by_claim;
        {
            let now = Moment::now();
            let mut displaced = lock(&self.displaced);
            // An entry this old belongs to a caller that has given up.
            displaced.retain(|_, at| at.after(DISPLACED_FOR) > now);
            displaced.extend(places.keys().map(|claim| (*claim, now)));
        }
        self.hints.look_at(places.values().map(|place| &place.key));
    }

    /// Stops the client of `session`, which has no connection, and attaches the session to a new one as soon as a server can be reached.
    fn attach_again(self: &Arc<Self>, session: &Arc<Session>) {
        let last = session.client();
        let (sessions, session) = (Arc::downgrade(self), Arc::downgrade(session));
        let config = Arc::clone(&self.config);
        let mut attaching = lock(&self.attaching);
        while attaching.try_join_next().is_some() {}
        attaching.spawn(async move {
            // Before anything else: two clients of one session would take it from each other.
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
            // Where the session is not used any more, the client ends it when it is dropped.
            let (Some(sessions), Some(session)) = (sessions.upgrade(), session.upgrade()) else {
                return;
            };
            match attached {
                Some((connection, sent_at)) => session.resume(&sessions, connection, sent_at),
                None => sessions.retire(&session),
            }
        });
    }

    /// Ends `session` if it is not the first one and has had no node for the time-out of a session.
    fn end_if_unused(&self, session: &Arc<Session>) {
        let mut live = lock(&self.live);
        let is_first = live.first().is_some_and(|first| Arc::ptr_eq(first, session));
        if !is_first && lock(&session.places).unused_for(Moment::now()) > session.timeout() {
            // With its last user the client ends the session.
            live.retain(|live| !Arc::ptr_eq(live, session));
        }
    }

    /// Returns whether the session of `claim` has ended. Returns true once.
    pub(crate) fn was_displaced(&self, claim: ClaimId) -> bool {
        lock(&self.displaced).remove(&claim).is_some()
    }

    /// Ends all sessions but those in which a lock is held. A node whose release was refused does not keep its session: the servers
    /// delete it with the session, whatever rights are missing.
    pub(crate) async fn close(&self) {
        let ended: Vec<_> = {
            let mut live = lock(&self.live);
            let (needed, ended) = live.drain(..).partition(|session| session.is_needed());
            *live = needed;
            ended
        };
        join_all(ended.into_iter().map(async |session| {
            let mut states = session.client().state_watcher();
            // The client ends the session when its last user is gone.
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

/// A time in which no session can be had.
#[derive(Default)]
struct Outage {
    tries: u32,
    last: Option<(Moment, BackendError)>,
}

impl Outage {
    /// All who want a session at the same time share one try.
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

/// The registries over a backend.
#[derive(Default)]
pub(crate) struct Hints(Mutex<Vec<LossHints>>);

impl Hints {
    pub(crate) fn add(&self, hints: LossHints) {
        let mut all = lock(&self.0);
        all.retain(LossHints::is_live);
        all.push(hints);
    }

    /// Whether a registry still listens.
    pub(crate) fn are_wanted(&self) -> bool {
        lock(&self.0).iter().any(LossHints::is_live)
    }

    pub(crate) fn look_at<'a>(&self, keys: impl Iterator<Item = &'a Key>) {
        let all = lock(&self.0).clone();
        keys.for_each(|key| all.iter().for_each(|hints| hints.look_at(key)));
    }
}

/// The claims of one session, and the bytes of their nodes' paths.
struct Places {
    by_claim: HashMap<ClaimId, Arc<Place>>,
    /// Counted from before a node is asked for until it is certainly gone.
    bytes: usize,
    /// When the last place was removed.
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

/// All sessions of a backend are full. Found as the [source](std::error::Error::source) of the [`BackendError`] with which an attempt
/// is refused.
///
/// A session ends in one transaction with the paths of its nodes. Transactions of more than twice the servers' `jute.maxbuffer`
/// stop the whole ensemble, so a session has at most [`ZkConfig::NODE_BYTES_MAX`] bytes of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "lock {key:?} does not fit: the nodes of this backend take {bytes} of {bytes_max} bytes in {sessions_max} sessions"
)]
#[non_exhaustive]
pub struct SessionsExhausted {
    /// The key of the refused lock.
    pub key: String,
    /// The bytes of paths of all nodes, of held locks and of waiters.
    pub bytes: usize,
    /// The limit of all sessions together.
    pub bytes_max: usize,
    /// The limit of sessions: [`ZkConfig::with_sessions_max`], in URLs the option `sessions`.
    pub sessions_max: u32,
}

impl SessionsExhausted {
    /// Locks that are released make room, so another attempt can succeed.
    fn refuse(self) -> BackendError {
        let says = format!(
            "zookeeper: no session has room for the node of lock {:?}: {} of {} bytes are in use; raise `sessions`, which is {}, or hold \
             fewer or shorter keys in one process",
            self.key, self.bytes, self.bytes_max, self.sessions_max
        );
        BackendError::transient(says).with_source(self).as_refused()
    }
}

/// A question to the servers that any number may wait for.
type Round = Shared<BoxFuture<'static, Result<(), BackendError>>>;

/// Who answers a question to the servers. When it is answered, what the leader had done before is known here as well: the server that
/// we are connected to has caught up, and has told what was watched before it passed the answer on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum By {
    /// A majority, by a write that changes nothing. This alone proves that no other leader has ended the session.
    Majority,
    /// The leader, or who takes itself for it: one that has lost the others in silence answers for a while.
    Leader,
}

/// One session.
pub(crate) struct Session {
    connection: watch::Sender<Arc<Connection>>,
    /// The session's id, which its nodes bear.
    id: i64,
    timeout: Duration,
    config: Arc<ZkConfig>,
    over: AtomicBool,
    proof: Mutex<Proof>,
    /// When a majority was asked last.
    asked_at: Mutex<Moment>,
    /// When the last question that the leader has answered was sent.
    leader_asked_at: Mutex<Moment>,
    /// The next questions, [to](By) a majority and to the leader, as long as they have not left.
    next_rounds: [Mutex<Option<Round>>; 2],
    /// How often it was connected again.
    reconnects: AtomicU32,
    places: Mutex<Places>,
    room: Room,
    heads: Mutex<Heads>,
    /// They end with the session.
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
            // The client would wait for a silent server as if it had been granted what it had asked for. If there is no time for another
            // one, it has to do.
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

    /// Goes on with a new client, to which a majority has confirmed the session after `sent_at`.
    fn resume(self: &Arc<Self>, sessions: &Arc<Sessions>, connection: Connection, sent_at: Moment) {
        self.connection.send_replace(Arc::new(connection));
        self.answered(sent_at);
        self.reconnected(sessions);
        self.begin_pulse(sessions);
    }

    /// Has all its locks verified: other clients of the server may have been notified meanwhile, and this one was not.
    fn reconnected(&self, sessions: &Sessions) {
        self.reconnects.fetch_add(1, Ordering::AcqRel);
        let places = self.places();
        sessions.hints.look_at(places.iter().map(|(_, place)| &place.key));
    }

    /// A chroot that is mistyped would be a place of its own where nobody else contends.
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

    /// The client that the session has now.
    pub(crate) fn client(&self) -> Arc<Connection> {
        Arc::clone(&self.connection.borrow())
    }

    pub(crate) fn config(&self) -> &ZkConfig {
        &self.config
    }

    /// The session's id, which nodes bear that live with it.
    pub(crate) fn id(&self) -> i64 {
        self.id
    }

    /// How long the servers keep the session after they have heard of it last, as they said.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.client().state().is_terminated()
    }

    pub(crate) fn reconnects(&self) -> u32 {
        self.reconnects.load(Ordering::Acquire)
    }

    /// How long the session certainly lives on.
    pub(crate) fn certain_left(&self) -> Duration {
        lock(&self.proof).left(Moment::now())
    }

    /// Notes that a majority has written down what left at `sent_at`, as was heard just now.
    pub(crate) fn answered(&self, sent_at: Moment) {
        lock(&self.proof).answered(sent_at, Moment::now());
    }

    /// Waits until there is a connection, so that nothing is asked that may be carried out much later.
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
                    // The sender is our own.
                    _ = connections.changed() => {}
                }
            }
        };
        timeout(self.config.request_timeout, connected).await.unwrap_or_else(|_| Err(unreachable()))
    }

    /// Waits for the answer to one request, within limits.
    pub(crate) async fn bounded<T>(
        &self,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<Result<T, Error>, BackendError> {
        let answer = self.unless_stopped(request);
        let answer = timeout(self.config.request_timeout, answer).await.map_err(|_| silent())?;
        Ok(answer.unwrap_or(Err(Error::ConnectionLoss)))
    }

    /// Waits for the answer to one request. Returns `None` if the client is stopped before.
    pub(crate) async fn unless_stopped<T>(&self, request: impl Future<Output = T>) -> Option<T> {
        let stopped = self.client().stopped();
        tokio::select! {
            biased;
            () = stopped => None,
            answer = request => Some(answer),
        }
    }

    /// Asks the servers whether the session lives. All who ask at about the same time share one question, which leaves after they
    /// have asked.
    pub(crate) fn round(self: &Arc<Self>, by: By) -> Round {
        let mut next = lock(&self.next_rounds[by as usize]);
        if let Some(round) = &*next {
            return round.clone();
        }
        let session = Arc::downgrade(self);
        let round = async move {
            // Let others join who are about to ask.
            tokio::task::yield_now().await;
            let session = session.upgrade().ok_or_else(|| explain(&Error::ClientClosed))?;
            *lock(&session.next_rounds[by as usize]) = None;
            session.connected().await?;
            match by {
                By::Majority => session.prove().await,
                By::Leader => {
                    let sent_at = Moment::now();
                    let synced = session.bounded(session.client().sync("/")).await?;
                    synced.map_err(|error| explain(&error))?;
                    *lock(&session.leader_asked_at) = sent_at;
                    Ok(())
                }
            }
        };
        let round = round.boxed().shared();
        *next = Some(round.clone());
        round
    }

    /// Waits until this client has seen what the leader did up to [`LEADER_LAG`] ago. All waiters of a session together ask
    /// the leader once in that time.
    pub(crate) async fn catch_up(self: &Arc<Self>) -> Result<(), BackendError> {
        if lock(&self.leader_asked_at).after(LEADER_LAG) >= Moment::now() {
            return Ok(());
        }
        self.round(By::Leader).await
    }

    /// Returns whether there is a connection, and the last proof of life is fresh.
    pub(crate) fn is_healthy(&self) -> bool {
        self.is_connected() && self.certain_left() > self.timeout() / 2
    }

    /// Has a majority write down that nothing has changed. That counts even when it takes longer than anybody waits for it, as on disks that
    /// are slow for a while.
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
            // Perhaps nobody waits any more.
            drop(tell.send(written.map(drop)));
        });
        let told = timeout(self.config.request_timeout, told).await.map_err(|_| silent())?;
        told.unwrap_or_else(|_| Err(explain(&Error::ClientClosed)))
    }

    /// Asks a majority whether there is a node, by a write that changes nothing.
    pub(crate) async fn check(&self, path: &str) -> Result<bool, BackendError> {
        let checked = timeout(self.config.request_timeout, self.write_check(path)).await;
        checked.map_err(|_| silent())?
    }

    async fn write_check(&self, path: &str) -> Result<bool, BackendError> {
        let client = self.client();
        let checked = self.unless_stopped(client.write_check(path)).await;
        checked.unwrap_or(Err(Error::ConnectionLoss)).map_err(|error| explain(&error))
    }

    /// The room for what is watched in this session.
    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    /// Who keeps us waiting in this session.
    pub(crate) fn heads(&self) -> &Mutex<Heads> {
        &self.heads
    }

    /// Returns the place of `claim`.
    pub(crate) fn find(&self, claim: ClaimId) -> Option<Arc<Place>> {
        lock(&self.places).by_claim.get(&claim).map(Arc::clone)
    }

    /// All places.
    pub(crate) fn places(&self) -> Vec<(ClaimId, Arc<Place>)> {
        let places = lock(&self.places);
        places.by_claim.iter().map(|(claim, place)| (*claim, Arc::clone(place))).collect()
    }

    /// Forgets the place of `claim`, unless it is another one by now.
    pub(crate) fn forget(&self, claim: ClaimId, place: &Arc<Place>) {
        lock(&self.places).forget(claim, place);
    }

    /// Returns whether a lock is held in it that its holder has not released.
    fn is_needed(&self) -> bool {
        let now = Moment::now();
        self.places().iter().any(|(_, place)| place.is_needed(now))
    }

    fn is_connected(&self) -> bool {
        self.client().state() == SessionState::SyncConnected
    }

    /// Does `work` for as long as the session is there.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        lock(&self.tasks).spawn(work);
    }

    /// Whether it is time for another proof.
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

/// Begins a session with any of the servers, within `limit`.
///
/// The client asks them one after the other, in an order of its own, and waits for long for one that takes connections and says nothing. So
/// where there are several, other attempts begin beside one that has no answer yet, and the first to have a session wins.
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
    // One that fails has asked all of them.
    let first = timeout(limit, attempts.next()).await;
    let first = first.map_err(|_| unreachable())?.unwrap_or(Err(Error::NoHosts));
    first.map_err(|error| explain(&error).as_refused())
}

/// Keeps a session's proof fresh, notices its end, and has what nobody takes care of any more given back.
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
                        // Another pulse begins with the next client.
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

/// The limit of path bytes in one session: half of the smallest `jute.maxbuffer` in use, 1 MiB, and a quarter of what servers with
/// that setting can read in one transaction.
pub(crate) const NODE_BYTES_MAX: usize = 512 * 1024;

/// Up to so many bytes of paths, a session watches every node of held locks and a predecessor of every waiter; see [`Room`].
pub(crate) const WATCHED_BYTES_MAX: usize = Room::OWN;

/// How long an acquisition waits for a session that is opened only to watch more nodes.
const OPEN_ANOTHER_WITHIN: Duration = Duration::from_secs(1);
/// How long after a failure another attempt at one is made.
const OPEN_ANOTHER_PAUSE: Duration = Duration::from_secs(30);

/// An answer of the leader serves all waiters that ask within this time.
const LEADER_LAG: Duration = Duration::from_millis(100);

/// How long it is known that the session of a claim has ended.
const DISPLACED_FOR: Duration = Duration::from_secs(10 * 60);

/// How often a majority is asked in the time-out of a session. The client itself would say a word as often if nothing else were said.
const PROOFS: u32 = 10;
const TICK_MAX: Duration = Duration::from_millis(250);

/// How long the client may try to reconnect by itself. Its first attempts are quick, and reach other servers at once.
const PATIENCE_MAX: Duration = Duration::from_secs(1);
/// The pause between attempts to attach a session to a new client.
const PAUSE_ATTACHING: Duration = Duration::from_millis(500);

/// How many attempts at a session may go on beside each other.
const ATTEMPTS: u32 = 8;

/// The pause after the first failure to get a session; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
