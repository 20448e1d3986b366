//! The sessions of a backend. Opens sessions, keeps them alive, and replaces a session that has
//! ended. `recipe` handles the queues. `backend` calls both modules.
//!
//! A claim belongs to the session that created its node. The claim is lost when this session ends.
//!
//! The servers end a session by one transaction with the paths of all its nodes. A transaction that
//! is too large to read stops all servers. A session therefore has at most
//! [`ZkConfig::NODE_BYTES_MAX`] bytes of paths. Its client can watch all needed nodes only up to
//! [`WATCHED_BYTES_MAX`] bytes of paths. Beyond this limit, the backend opens further sessions for
//! new nodes. At the limit of sessions, and while no further session can be opened, new nodes go to
//! a session with capacity for unwatched nodes. When all sessions are full, the backend refuses
//! attempts.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared, join_all};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use registry_core::{
    BackendError, BackendErrorKind, Claim, ClaimId, InvalidationSet, Key, Moment, sleep,
};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::task::coop::unconstrained;
use tokio::time::{MissedTickBehavior, interval};
use zookeeper_client::{Error, SessionState, StateWatcher};

use crate::config::ZkConfig;
use crate::connection::StoppableClient;
use crate::error::{connect_error, not_connected, timed_out, to_backend_error};
use crate::head_cache::HeadCache;
use crate::mutex::lock;
use crate::queue_entry::{QueueEntry, WatchBudget};
use crate::session_validity::SessionValidity;
use crate::timer::timeout;
use crate::units::refuse_too_many_units;

/// Starts tasks that release all abandoned claims of a session.
type ReleaseAbandoned = fn(&Arc<ZkSession>);

/// The sessions of one backend.
pub(crate) struct SessionPool {
    config: Arc<ZkConfig>,
    release_abandoned: ReleaseAbandoned,
    subscribers: InvalidationSet,
    /// The sessions, oldest first. A session whose end has not been processed yet is still in the
    /// list. `find_session_for` selects the session of a new claim.
    live: Mutex<Vec<Arc<ZkSession>>>,
    /// The failures to open a session. Locked while a session is opened.
    open_backoff: tokio::sync::Mutex<ConnectBackoff>,
    /// The earliest time at which the backend may open a session whose only purpose is to watch
    /// more nodes.
    extra_session_allowed_at: Mutex<Moment>,
    /// The claims whose session has ended, and the time of the end. A claim is removed when the
    /// engine is notified of the end. The end of a further session removes claims that are older
    /// than [`ENDED_CLAIMS_TTL`].
    claims_of_ended_sessions: Mutex<HashMap<ClaimId, Moment>>,
    /// The tasks that attach sessions to new clients. A task continues even if its session is
    /// closed in the meantime, because only a connected client can end a session.
    attach_tasks: Mutex<JoinSet<()>>,
}

impl SessionPool {
    pub(crate) fn new(config: ZkConfig, release_abandoned: ReleaseAbandoned) -> Arc<Self> {
        Arc::new(Self {
            config: Arc::new(config),
            release_abandoned,
            subscribers: InvalidationSet::default(),
            live: Mutex::default(),
            open_backoff: tokio::sync::Mutex::default(),
            extra_session_allowed_at: Mutex::new(Moment::now()),
            claims_of_ended_sessions: Mutex::default(),
            attach_tasks: Mutex::default(),
        })
    }

    pub(crate) fn subscribers(&self) -> &InvalidationSet {
        &self.subscribers
    }

    /// Returns the runtime of a subscribed registry, otherwise the current runtime. A caller's own
    /// runtime may end while other callers use the session that the caller has opened.
    fn runtime(&self) -> Handle {
        self.subscribers.runtime().unwrap_or_else(Handle::current)
    }

    /// Returns the leader's time since 1970, as estimated from the newest queue node that a live
    /// session of this client has created. `None` if there is no such node.
    pub(crate) fn server_time(&self) -> Option<Duration> {
        let times = self.live_sessions();
        let times = times.iter().filter_map(|session| session.server_time());
        let (created, read_at) = times.max_by_key(|(_, read_at)| *read_at)?;
        Some(created + Moment::now().since(read_at))
    }

    /// Makes all registries verify their claims on `key`.
    pub(crate) fn request_verification(&self, key: &Key) {
        self.subscribers.notify(key);
    }

    /// Returns a connected session for requests that any session can send. Opens a session if none
    /// exists.
    pub(crate) async fn get_or_open(self: &Arc<Self>) -> Result<Arc<ZkSession>, BackendError> {
        let session = match self.first_usable() {
            Some(session) => session,
            None => self.open(None).await?,
        };
        session.wait_until_connected().await?;
        Ok(session)
    }

    /// Returns the first connected session, or the first session if none is connected.
    pub(crate) fn first_usable(&self) -> Option<Arc<ZkSession>> {
        self.select_session(|_| true)
    }

    /// Returns all sessions that have not ended, oldest first.
    pub(crate) fn live_sessions(&self) -> Vec<Arc<ZkSession>> {
        lock(&self.live).iter().filter(|session| !session.has_ended()).map(Arc::clone).collect()
    }

    fn select_session(&self, predicate: impl Fn(&ZkSession) -> bool) -> Option<Arc<ZkSession>> {
        let live = lock(&self.live);
        let mut matching = live.iter().filter(|session| !session.has_ended() && predicate(session));
        let first = matching.next()?;
        let is_connected = |session: &&Arc<ZkSession>| session.is_connected();
        let chosen = Some(first).filter(is_connected).or_else(|| matching.find(is_connected));
        Some(Arc::clone(chosen.unwrap_or(first)))
    }

    /// Returns the queue entry of `claim` and its session.
    pub(crate) fn find_entry(&self, claim: ClaimId) -> Option<(Arc<ZkSession>, Arc<QueueEntry>)> {
        let live = lock(&self.live);
        let live = live.iter().filter(|session| !session.has_ended());
        live.into_iter().find_map(|session| Some((Arc::clone(session), session.find_entry(claim)?)))
    }

    /// Returns the queue entry of `claim` and its session, and waits until the session is
    /// connected. If no entry exists, inserts a new entry into a session with capacity for its
    /// node. Opens a new session if `find_session_for` finds none.
    pub(crate) async fn find_or_insert_entry(
        self: &Arc<Self>,
        claim: &Claim,
        dir: impl Fn() -> String + Send + Sync,
    ) -> Result<(Arc<ZkSession>, Arc<QueueEntry>), BackendError> {
        // The loop repeats only if the session ends, or if another claim takes the capacity and so
        // progresses. The number of sessions is limited, so `open_for` returns an error when all
        // sessions are full.
        loop {
            if let Some((session, entry)) = self.find_entry(claim.id()) {
                // The activity is recorded before the wait for the connection. The entry is
                // therefore not abandoned during the wait.
                entry.record_activity();
                session.wait_until_connected().await?;
                return Ok((session, entry));
            }
            let new_entry = QueueEntry::new(claim, dir(), self.config.naming);
            refuse_too_many_units(&self.config, claim, &new_entry.dir)?;
            let (session, capacity) = match self.find_session_for(&new_entry) {
                Some(found) => found,
                None => self.open_for(&new_entry).await?,
            };
            // The entry is inserted only after the session is connected, so an outage leaves no
            // unused entry.
            session.wait_until_connected().await?;
            if let Some(entry) = self.insert_entry(&session, claim.id(), new_entry, capacity) {
                return Ok((session, entry));
            }
        }
    }

    /// Returns the session for a new queue entry, and the capacity that it must have for this
    /// entry. Prefers a connected session that can watch the entry's node. Returns any session with
    /// capacity if the backend may not open a session only to watch more nodes.
    fn find_session_for(&self, entry: &QueueEntry) -> Option<(Arc<ZkSession>, Capacity)> {
        let watching = self.find_with_capacity(entry, Capacity::Watched);
        if let Some(session) = watching.filter(|session| session.is_connected()) {
            return Some((session, Capacity::Watched));
        }
        if self.may_open_extra_session() {
            return None;
        }
        let session = self.find_with_capacity(entry, Capacity::Unwatched)?;
        let can_watch = lock(&session.entries).has_capacity(entry, Capacity::Watched);
        Some((session, if can_watch { Capacity::Watched } else { Capacity::Unwatched }))
    }

    fn find_with_capacity(&self, entry: &QueueEntry, capacity: Capacity) -> Option<Arc<ZkSession>> {
        self.select_session(|session| lock(&session.entries).has_capacity(entry, capacity))
    }

    /// Returns whether the backend may open a session only to watch more nodes. Returns false
    /// during an outage. The servers' connection limit may then permit only one more connection,
    /// which a session with held locks needs.
    fn may_open_extra_session(&self) -> bool {
        let live = self.live_sessions();
        live.len() < self.config.sessions_max as usize
            && live.iter().all(|session| session.is_connected())
            && *lock(&self.extra_session_allowed_at) <= Moment::now()
    }

    /// Opens a session for `entry`. If another session has capacity, this function waits for at
    /// most `EXTRA_SESSION_TIMEOUT`. If no session is opened in this time, it returns the other
    /// session.
    async fn open_for(
        self: &Arc<Self>,
        entry: &QueueEntry,
    ) -> Result<(Arc<ZkSession>, Capacity), BackendError> {
        let Some(unwatched) = self.find_with_capacity(entry, Capacity::Unwatched) else {
            return self.open(Some(entry)).await.map(|session| (session, Capacity::Unwatched));
        };
        match timeout(EXTRA_SESSION_TIMEOUT, self.open(Some(entry))).await {
            Ok(Ok(session)) => Ok((session, Capacity::Watched)),
            Ok(Err(_)) | Err(_) => {
                *lock(&self.extra_session_allowed_at) = Moment::now().after(EXTRA_SESSION_PAUSE);
                Ok((unwatched, Capacity::Unwatched))
            }
        }
    }

    /// Adds a queue entry to `session`. Returns `None` if the session does not have this capacity
    /// for the entry, or has ended.
    fn insert_entry(
        &self,
        session: &Arc<ZkSession>,
        claim: ClaimId,
        entry: QueueEntry,
        capacity: Capacity,
    ) -> Option<Arc<QueueEntry>> {
        let live = lock(&self.live);
        let is_live = live.iter().any(|live| Arc::ptr_eq(live, session));
        if is_live { lock(&session.entries).insert_entry(claim, entry, capacity) } else { None }
    }

    /// Opens a session. Returns an existing session instead if it has capacity for the given queue
    /// entry. Without an entry, returns any existing session instead.
    async fn open(
        self: &Arc<Self>,
        entry: Option<&QueueEntry>,
    ) -> Result<Arc<ZkSession>, BackendError> {
        let mut backoff = self.open_backoff.lock().await;
        let existing = match entry {
            Some(entry) => self.find_session_for(entry).map(|(session, _)| session),
            None => self.first_usable(),
        };
        if let Some(session) = existing {
            return Ok(session);
        }
        if let Some(entry) = entry {
            let live = self.live_sessions();
            if live.len() >= self.config.sessions_max as usize {
                let bytes = live.iter().map(|session| lock(&session.entries).bytes).sum();
                return Err(SessionsExhausted {
                    key: entry.key.as_str().to_owned(),
                    bytes,
                    bytes_max: ZkConfig::NODE_BYTES_MAX * live.len(),
                    sessions_max: self.config.sessions_max,
                }
                .into_backend_error());
            }
        }
        backoff.check_pause()?;
        match ZkSession::connect(self).await {
            Ok(session) => {
                *backoff = ConnectBackoff::default();
                let ended: Vec<_> = {
                    let mut live = lock(&self.live);
                    live.push(Arc::clone(&session));
                    live.iter().filter(|session| session.has_ended()).map(Arc::clone).collect()
                };
                ended.iter().for_each(|session| self.remove_ended_session(session));
                Ok(session)
            }
            Err(error) => Err(backoff.record_failure(error)),
        }
    }

    /// Removes a session that has ended, and requests a verification of its locks. Other sessions
    /// are not affected.
    fn remove_ended_session(&self, session: &Arc<ZkSession>) {
        if session.has_ended.swap(true, Ordering::AcqRel) {
            return;
        }
        // The session leaves `live` first, so `insert_entry` adds no further entry to the session.
        lock(&self.live).retain(|live| !Arc::ptr_eq(live, session));
        let entries = std::mem::take(&mut *lock(&session.entries)).by_claim;
        {
            let now = Moment::now();
            let mut claims_of_ended_sessions = lock(&self.claims_of_ended_sessions);
            // After `ENDED_CLAIMS_TTL`, the caller of a claim has stopped retrying.
            claims_of_ended_sessions.retain(|_, at| at.after(ENDED_CLAIMS_TTL) > now);
            claims_of_ended_sessions.extend(entries.keys().map(|claim| (*claim, now)));
        }
        entries.values().for_each(|entry| self.request_verification(&entry.key));
    }

    /// Stops the disconnected client of `session` in the background. Then attaches the session to a
    /// new client as soon as a server responds. Removes the session if it has expired, if the
    /// servers reject the login, or if no server responds for 7/5 of the session time-out.
    fn reattach_in_background(self: &Arc<Self>, session: &Arc<ZkSession>) {
        let old_client = EndOnDrop(session.client());
        let runtime = session.runtime.clone();
        let (sessions, session) = (Arc::downgrade(self), Arc::downgrade(session));
        let config = Arc::clone(&self.config);
        let mut attach_tasks = lock(&self.attach_tasks);
        while attach_tasks.try_join_next().is_some() {}
        let attach = async move {
            let client = &old_client.0;
            // The old client is stopped first. With two clients, each reconnect of a client would
            // move the session away from the other client.
            client.stop().await;
            let (info, timeout) = (client.session().clone(), client.session_timeout());
            let deadline = Moment::now().after(timeout * 7 / 5);
            let attached = loop {
                match StoppableClient::attach(&config, timeout, info.clone()).await {
                    Err(Error::SessionExpired | Error::AuthFailed) => break None,
                    Err(_) if Moment::now() >= deadline => break None,
                    Err(_) => sleep(ATTACH_PAUSE).await,
                    Ok(attached) => break Some(attached),
                }
            };
            // If the session is no longer used, the drop of the new client ends the session.
            let (Some(sessions), Some(session)) = (sessions.upgrade(), session.upgrade()) else {
                return;
            };
            match attached {
                Some((client, sent_at)) => session.resume(&sessions, client, sent_at),
                None => sessions.remove_ended_session(&session),
            }
        };
        attach_tasks.spawn_on(attach, &runtime);
    }

    /// Ends `session` if it is not the oldest session and has had no entry for the session
    /// time-out.
    fn end_if_unused(&self, session: &Arc<ZkSession>) {
        let mut live = lock(&self.live);
        let is_first = live.first().is_some_and(|first| Arc::ptr_eq(first, session));
        if !is_first && lock(&session.entries).unused_for(Moment::now()) > session.timeout() {
            // The client ends the session when its last reference is dropped.
            live.retain(|live| !Arc::ptr_eq(live, session));
        }
    }

    /// Removes `claim` from the claims whose session has ended. Returns true if `claim` was one of
    /// these claims.
    pub(crate) fn remove_claim_of_ended_session(&self, claim: ClaimId) -> bool {
        lock(&self.claims_of_ended_sessions).remove(&claim).is_some()
    }

    /// Ends all sessions except those that are in use. A session with a node whose release the
    /// servers refused also ends. The servers then delete the node with the session, regardless of
    /// rights.
    pub(crate) async fn close(&self) {
        let ended: Vec<_> = {
            let mut live = lock(&self.live);
            let (in_use, ended) = live.drain(..).partition(|session| session.is_in_use());
            *live = in_use;
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

impl fmt::Debug for SessionPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionPool").field("live", &self.live_sessions()).finish_non_exhaustive()
    }
}

/// The old client of a session that is being attached to a new client. When this value is dropped,
/// the session has the new client, or it ends. It also ends if the runtime of the attach task ends.
struct EndOnDrop(Arc<StoppableClient>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The failed attempts to open a session since the last success.
#[derive(Default)]
struct ConnectBackoff {
    failures: u32,
    last_failure: Option<(Moment, BackendError)>,
}

impl ConnectBackoff {
    /// Returns the last error until the pause after this error is over. Concurrent callers
    /// therefore share one attempt.
    fn check_pause(&self) -> Result<(), BackendError> {
        let Some((at, error)) = &self.last_failure else { return Ok(()) };
        let pause = OPEN_PAUSE_BASE.saturating_mul(1 << self.failures.min(6)).min(OPEN_PAUSE_MAX);
        if Moment::now() < at.after(pause) { Err(error.clone()) } else { Ok(()) }
    }

    fn record_failure(&mut self, error: BackendError) -> BackendError {
        self.failures = self.failures.saturating_add(1);
        self.last_failure = Some((Moment::now(), error.clone()));
        error
    }
}

/// The capacity that a session needs for a new queue entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Capacity {
    /// The session can also watch the node of the entry.
    Watched,
    Unwatched,
}

/// The queue entries of one session, and the bytes of their nodes' paths.
struct SessionEntries {
    by_claim: HashMap<ClaimId, Arc<QueueEntry>>,
    /// The bytes of all entries. An entry counts before its node is requested, and until its node
    /// is certainly deleted.
    bytes: usize,
    /// As `bytes`, but counts only the queue node and one unit of a claim in Curator's semaphore.
    /// The client watches no other unit of the claim.
    watch_bytes: usize,
    /// The time at which an entry was last removed, or the session was opened.
    last_removal_at: Moment,
}

impl Default for SessionEntries {
    fn default() -> Self {
        Self { by_claim: HashMap::new(), bytes: 0, watch_bytes: 0, last_removal_at: Moment::now() }
    }
}

impl SessionEntries {
    fn has_capacity(&self, entry: &QueueEntry, capacity: Capacity) -> bool {
        let can_watch = || self.watch_bytes.saturating_add(entry.watch_bytes) <= WATCHED_BYTES_MAX;
        self.bytes.saturating_add(entry.node_bytes) <= ZkConfig::NODE_BYTES_MAX
            && (capacity == Capacity::Unwatched || can_watch())
    }

    fn insert_entry(
        &mut self,
        claim: ClaimId,
        entry: QueueEntry,
        capacity: Capacity,
    ) -> Option<Arc<QueueEntry>> {
        if let Some(entry) = self.by_claim.get(&claim) {
            return Some(Arc::clone(entry));
        }
        if !self.has_capacity(&entry, capacity) {
            return None;
        }
        self.bytes += entry.node_bytes;
        self.watch_bytes += entry.watch_bytes;
        Some(Arc::clone(self.by_claim.entry(claim).or_insert_with(|| Arc::new(entry))))
    }

    fn remove_entry(&mut self, claim: ClaimId, entry: &Arc<QueueEntry>) {
        if self.by_claim.get(&claim).is_some_and(|other| Arc::ptr_eq(other, entry)) {
            self.by_claim.remove(&claim);
            let request_bytes = entry.upgrade_request_bytes.load(Ordering::Acquire);
            self.bytes -= entry.node_bytes + request_bytes;
            self.watch_bytes -= entry.watch_bytes + request_bytes;
            self.last_removal_at = Moment::now();
        }
    }

    /// Adds the bytes of the request to upgrade the claim of `entry`. They count until the entry is
    /// removed. Returns false if the session's bytes would then exceed `bytes_max`.
    fn add_upgrade_request(&mut self, entry: &QueueEntry, bytes: usize, bytes_max: usize) -> bool {
        if entry.upgrade_request_bytes.load(Ordering::Acquire) > 0 {
            return true;
        }
        if self.bytes.saturating_add(bytes) > bytes_max {
            return false;
        }
        entry.upgrade_request_bytes.store(bytes, Ordering::Release);
        self.bytes += bytes;
        self.watch_bytes += bytes;
        true
    }

    fn unused_for(&self, now: Moment) -> Duration {
        if self.by_claim.is_empty() { now.since(self.last_removal_at) } else { Duration::ZERO }
    }
}

/// The error when all sessions of a backend are full. It is the [source](std::error::Error::source)
/// of the [`BackendError`] of a refused attempt.
///
/// The servers end a session by one transaction with the paths of its nodes. A transaction of more
/// than twice the servers' `jute.maxbuffer` stops the whole ensemble. A session therefore has at
/// most [`ZkConfig::NODE_BYTES_MAX`] bytes of paths.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no capacity for lock {key:?}: the nodes of this backend take {bytes} of {bytes_max} bytes in {sessions_max} sessions"
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
    /// Returns a transient error, because a release frees capacity and a retry can then succeed.
    fn into_backend_error(self) -> BackendError {
        let message = format!(
            "zookeeper: no session has capacity for this lock's node: {} of {} bytes are in use; raise `sessions`, which is {}, or use \
             fewer or shorter keys in one process",
            self.bytes, self.bytes_max, self.sessions_max
        );
        BackendError::transient(message).with_source(self).as_refused()
    }
}

/// A confirmation that any number of callers can await.
type SharedConfirmation = Shared<BoxFuture<'static, Result<(), BackendError>>>;

/// The servers that confirm a session. The leader orders the request after all earlier changes. The
/// connected server applies these changes and sends their watch events before it sends the response
/// to the request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ConfirmedBy {
    /// A majority, by a write that changes nothing. Only a majority proves that no other leader has
    /// ended the session.
    Majority,
    /// The leader, by a `sync`. A partitioned former leader also responds for a while.
    Leader,
    /// As `Leader`, but at least [`LEADER_PAUSE`] after the previous `sync`, so that many waiters
    /// share one request. The pause is shorter if the request time-out is below 500 ms.
    LeaderAfterPause,
}

pub(crate) struct ZkSession {
    current_client: watch::Sender<Arc<StoppableClient>>,
    /// The session's id, which its ephemeral nodes have as their owner.
    id: i64,
    timeout: Duration,
    config: Arc<ZkConfig>,
    /// The runtime of all tasks of the session and its clients. The session ends with this runtime.
    runtime: Handle,
    has_ended: AtomicBool,
    validity: Mutex<SessionValidity>,
    /// The leader's wall clock when it created the newest node of this session, and the time of the
    /// response.
    server_time: Mutex<Option<(Duration, Moment)>>,
    /// The time at which a confirmation by a majority was last requested.
    majority_requested_at: Mutex<Moment>,
    /// The time at which a confirmation by the leader was last requested.
    leader_requested_at: Mutex<Moment>,
    /// The next confirmation for each value of [`ConfirmedBy`], until its request is sent.
    next_confirmations: [Mutex<Option<SharedConfirmation>>; 3],
    /// The number of reconnects.
    reconnects: AtomicU32,
    entries: Mutex<SessionEntries>,
    watch_budget: WatchBudget,
    head_cache: Mutex<HeadCache>,
    /// The tasks of the session. Dropping the session aborts them.
    tasks: Mutex<JoinSet<()>>,
}

impl ZkSession {
    async fn connect(sessions: &Arc<SessionPool>) -> Result<Arc<Self>, BackendError> {
        let config = Arc::clone(&sessions.config);
        let runtime = sessions.runtime();
        let requested_at = Moment::now();
        let requested = config.session_timeout;
        let mut client = connect(&config, requested, config.connect_timeout, &runtime).await?;
        let granted = client.session_timeout();
        if config.has_several_servers() && granted < requested * 2 / 3 {
            // The client's wait for an unresponsive server grows with the requested time-out. A
            // second client therefore requests the granted, shorter time-out. If the second client
            // cannot connect in the remaining time, the first client is used.
            let remaining =
                config.connect_timeout.saturating_sub(Moment::now().since(requested_at));
            client = connect(&config, granted, remaining, &runtime).await.unwrap_or(client);
        }
        let timeout = client.session_timeout();
        let session = Arc::new(Self {
            id: client.session_id().0,
            timeout,
            current_client: watch::Sender::new(Arc::new(client)),
            validity: Mutex::new(SessionValidity::new(timeout, requested_at)),
            server_time: Mutex::default(),
            config,
            runtime,
            has_ended: AtomicBool::new(false),
            majority_requested_at: Mutex::new(requested_at),
            leader_requested_at: Mutex::new(requested_at),
            next_confirmations: Default::default(),
            reconnects: AtomicU32::new(0),
            entries: Mutex::new(SessionEntries::default()),
            watch_budget: WatchBudget::default(),
            head_cache: Mutex::default(),
            tasks: Mutex::default(),
        });
        session.verify_chroot().await?;
        session.start_keep_alive(sessions);
        Ok(session)
    }

    fn start_keep_alive(self: &Arc<Self>, sessions: &Arc<SessionPool>) {
        let states = self.client().state_watcher();
        let (weak_session, weak_sessions) = (Arc::downgrade(self), Arc::downgrade(sessions));
        self.spawn(keep_alive(weak_session, weak_sessions, states, self.timeout()));
    }

    /// Continues the session on a new client. A majority has confirmed the session by a write sent
    /// at `sent_at`.
    fn resume(
        self: &Arc<Self>,
        sessions: &Arc<SessionPool>,
        client: StoppableClient,
        sent_at: Moment,
    ) {
        self.current_client.send_replace(Arc::new(client));
        self.record_majority_response(sent_at);
        self.on_reconnect(sessions);
        self.start_keep_alive(sessions);
    }

    /// Requests a verification of all locks of the session, because a disconnected client receives
    /// no watch events.
    fn on_reconnect(&self, sessions: &SessionPool) {
        self.reconnects.fetch_add(1, Ordering::AcqRel);
        self.entries().iter().for_each(|(_, entry)| sessions.request_verification(&entry.key));
    }

    /// Verifies that the chroot exists. Otherwise, a client with a mistyped chroot could create a
    /// separate tree, in which no other client contends.
    async fn verify_chroot(&self) -> Result<(), BackendError> {
        let Some(chroot) = &self.config.chroot else { return Ok(()) };
        let found = self.with_request_timeout(self.client().check_stat(chroot)).await?;
        match found.map_err(|error| to_backend_error(&error).as_refused())? {
            Some(_) => Ok(()),
            None => {
                let message = format!(
                    "zookeeper: the chroot {chroot:?} does not exist; create it, for example with `zkCli.sh create {chroot}`"
                );
                Err(BackendError::new(BackendErrorKind::Misconfigured, message).as_refused())
            }
        }
    }

    /// Returns the current client of the session.
    pub(crate) fn client(&self) -> Arc<StoppableClient> {
        Arc::clone(&self.current_client.borrow())
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

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire) || self.client().state().is_terminated()
    }

    pub(crate) fn reconnects(&self) -> u32 {
        self.reconnects.load(Ordering::Acquire)
    }

    /// Returns how much longer the session is certain to exist.
    pub(crate) fn remaining_validity(&self) -> Duration {
        lock(&self.validity).remaining(Moment::now())
    }

    /// Records that a majority has just committed a write that was sent at `sent_at`.
    pub(crate) fn record_majority_response(&self, sent_at: Moment) {
        lock(&self.validity).record_majority_response(sent_at, Moment::now());
    }

    /// Records the creation time of a node that was just created, in ms since 1970. Servers before
    /// 3.5 return none.
    pub(crate) fn record_server_time(&self, created_ms: i64) {
        if let Ok(created_ms @ 1..) = u64::try_from(created_ms) {
            let created = Duration::from_millis(created_ms);
            *lock(&self.server_time) = Some((created, Moment::now()));
        }
    }

    /// Returns the leader's time since 1970, and the time at which it was read.
    fn server_time(&self) -> Option<(Duration, Moment)> {
        *lock(&self.server_time)
    }

    /// Waits until the client is connected, for at most the request time-out. Without a connection,
    /// the client library could send a request much later.
    pub(crate) async fn wait_until_connected(&self) -> Result<(), BackendError> {
        if self.is_connected() {
            return Ok(());
        }
        let mut clients = self.current_client.subscribe();
        let connected = async {
            loop {
                let client = Arc::clone(&clients.borrow_and_update());
                tokio::select! {
                    biased;
                    connected = client.wait_until_connected() => return connected,
                    // This channel never closes, because its sender is a field of `self`.
                    _ = clients.changed() => {}
                }
            }
        };
        timeout(self.config.request_timeout, connected)
            .await
            .unwrap_or_else(|_| Err(not_connected()))
    }

    /// Waits for the response to requests of the current client, for at most the request time-out.
    pub(crate) async fn with_request_timeout<T>(
        &self,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<Result<T, Error>, BackendError> {
        let response = self.unless_stopped(request);
        let response = timeout(self.config.request_timeout, response)
            .await
            .map_err(|_| timed_out(self.config.request_timeout))?;
        Ok(response.unwrap_or(Err(Error::ConnectionLoss)))
    }

    /// Waits for the response to requests of the current client. Returns `None` if the client has
    /// stopped by then; the outcome of the requests is then unknown.
    pub(crate) async fn unless_stopped<T>(&self, request: impl Future<Output = T>) -> Option<T> {
        let mut stopped = pin!(self.client().wait_until_stopped());
        let response = tokio::select! {
            biased;
            () = &mut stopped => return None,
            response = request => response,
        };
        // If the client stops between the two polls, the library may return an unexpected error
        // instead of a response, so `response` is discarded.
        let is_stopped = unconstrained(stopped).now_or_never().is_some();
        (!is_stopped).then_some(response)
    }

    /// Returns a future that confirms with the servers that the session exists. Concurrent callers
    /// share one request. The request is sent after the calls of all these callers.
    pub(crate) fn confirm(self: &Arc<Self>, by: ConfirmedBy) -> SharedConfirmation {
        let mut next = lock(&self.next_confirmations[by as usize]);
        if let Some(confirmation) = &*next {
            return confirmation.clone();
        }
        let session = Arc::downgrade(self);
        let pause = match by {
            ConfirmedBy::Majority | ConfirmedBy::Leader => Duration::ZERO,
            ConfirmedBy::LeaderAfterPause => self.pause_before_leader(),
        };
        let confirmation = async move {
            // Other callers can join this confirmation during the pause. During the yield, callers
            // in tasks that are ready now can join it.
            if !pause.is_zero() {
                sleep(pause).await;
            }
            tokio::task::yield_now().await;
            let session =
                session.upgrade().ok_or_else(|| to_backend_error(&Error::ClientClosed))?;
            *lock(&session.next_confirmations[by as usize]) = None;
            session.wait_until_connected().await?;
            match by {
                ConfirmedBy::Majority => session.confirm_by_write().await,
                ConfirmedBy::Leader | ConfirmedBy::LeaderAfterPause => {
                    *lock(&session.leader_requested_at) = Moment::now();
                    let synced = session.with_request_timeout(session.client().sync("/")).await?;
                    synced.map_err(|error| to_backend_error(&error))
                }
            }
        };
        let confirmation = confirmation.boxed().shared();
        *next = Some(confirmation.clone());
        confirmation
    }

    /// Returns the rest of [`LEADER_PAUSE`] since the last request to the leader. The engine's
    /// operation time-out includes this pause, so the pause is at most a fifth of the request
    /// time-out.
    fn pause_before_leader(&self) -> Duration {
        let next = lock(&self.leader_requested_at).after(LEADER_PAUSE);
        next.since(Moment::now()).min(self.config.request_timeout / 5)
    }

    /// Returns whether the client is connected and the session is certain to exist for more than
    /// half of its time-out.
    pub(crate) fn is_healthy(&self) -> bool {
        self.is_connected() && self.remaining_validity() > self.timeout() / 2
    }

    /// Commits a write that changes nothing, which requires a majority. The response extends the
    /// session's validity even if it arrives after the request time-out. Slow disks can cause such
    /// a delay.
    async fn confirm_by_write(self: &Arc<Self>) -> Result<(), BackendError> {
        let sent_at = Moment::now();
        *lock(&self.majority_requested_at) = sent_at;
        let (sender, receiver) = oneshot::channel();
        let session = Arc::clone(self);
        self.spawn(async move {
            let path = session.config.chroot.as_deref().unwrap_or("/");
            let written = session.exists_by_write(path).await;
            if written.is_ok() {
                session.record_majority_response(sent_at);
            }
            // The receiver may have timed out.
            drop(sender.send(written.map(drop)));
        });
        let result = timeout(self.config.request_timeout, receiver)
            .await
            .map_err(|_| timed_out(self.config.request_timeout))?;
        result.unwrap_or_else(|_| Err(to_backend_error(&Error::ClientClosed)))
    }

    /// Returns whether a node exists, as decided by a majority with a write that changes nothing.
    pub(crate) async fn exists_on_majority(&self, path: &str) -> Result<bool, BackendError> {
        let checked = timeout(self.config.request_timeout, self.exists_by_write(path)).await;
        checked.map_err(|_| timed_out(self.config.request_timeout))?
    }

    async fn exists_by_write(&self, path: &str) -> Result<bool, BackendError> {
        let client = self.client();
        let checked = self.unless_stopped(client.exists_by_write(path)).await;
        checked.unwrap_or(Err(Error::ConnectionLoss)).map_err(|error| to_backend_error(&error))
    }

    /// Returns the watch budget of the session.
    pub(crate) fn watch_budget(&self) -> &WatchBudget {
        &self.watch_budget
    }

    /// Returns the cache of the heads of the queues in which this session waits.
    pub(crate) fn head_cache(&self) -> &Mutex<HeadCache> {
        &self.head_cache
    }

    /// Returns the queue entry of `claim`.
    pub(crate) fn find_entry(&self, claim: ClaimId) -> Option<Arc<QueueEntry>> {
        lock(&self.entries).by_claim.get(&claim).map(Arc::clone)
    }

    /// Returns all queue entries.
    pub(crate) fn entries(&self) -> Vec<(ClaimId, Arc<QueueEntry>)> {
        let entries = lock(&self.entries);
        entries.by_claim.iter().map(|(claim, entry)| (*claim, Arc::clone(entry))).collect()
    }

    /// Reserves capacity for the request to upgrade the claim of `entry`.
    pub(crate) fn reserve_upgrade_request(
        &self,
        entry: &QueueEntry,
        bytes: usize,
    ) -> Result<(), BackendError> {
        let mut entries = lock(&self.entries);
        if entries.add_upgrade_request(entry, bytes, ZkConfig::NODE_BYTES_MAX) {
            return Ok(());
        }
        // The upgrade needs the session of its claim, so further sessions would not help.
        Err(BackendError::transient(format!(
            "zookeeper: the session of this lock has no capacity for the node of the upgrade: {} of {} bytes are in use; use fewer or \
             shorter keys in one process",
            entries.bytes,
            ZkConfig::NODE_BYTES_MAX
        ))
        .as_refused())
    }

    /// Removes `entry` unless `claim` has a different queue entry now.
    pub(crate) fn remove_entry(&self, claim: ClaimId, entry: &Arc<QueueEntry>) {
        lock(&self.entries).remove_entry(claim, entry);
    }

    /// Returns whether a claim of the session is held or has an operation in progress. Ignores
    /// claims whose release the engine has requested.
    fn is_in_use(&self) -> bool {
        let now = Moment::now();
        self.entries().iter().any(|(_, entry)| entry.is_in_use(now))
    }

    fn is_connected(&self) -> bool {
        self.client().state() == SessionState::SyncConnected
    }

    /// Spawns a task that runs `work` until it ends or the session is dropped.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        lock(&self.tasks).spawn_on(work, &self.runtime);
    }

    /// Returns whether the next confirmation by a majority is due.
    fn is_confirmation_due(&self, now: Moment) -> bool {
        lock(&self.majority_requested_at).after(self.timeout() / CONFIRMATIONS_PER_TIMEOUT) <= now
    }
}

impl fmt::Debug for ZkSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkSession")
            .field("id", &self.client().session_id())
            .field("state", &self.client().state())
            .field("entries", &lock(&self.entries).by_claim.len())
            .finish_non_exhaustive()
    }
}

/// Opens a session with any of the servers, within `limit`. The tasks of its client run in
/// `runtime`.
///
/// The client library tries the servers one after the other, in its own order. It waits long for a
/// server that accepts connections and does not respond. With several servers, this function
/// therefore starts further attempts while an attempt is pending, and uses the first session.
async fn connect(
    config: &ZkConfig,
    session_timeout: Duration,
    limit: Duration,
    runtime: &Handle,
) -> Result<StoppableClient, BackendError> {
    let attempts = if config.has_several_servers() { CONCURRENT_CONNECTS } else { 1 };
    let attempts = (0..attempts).map(async |number| {
        sleep(limit * number / CONCURRENT_CONNECTS).await;
        StoppableClient::open(config, session_timeout, None, runtime).await
    });
    let mut attempts: FuturesUnordered<_> = attempts.collect();
    // A failed attempt has tried every server, so the first error ends all attempts.
    let first = timeout(limit, attempts.next()).await;
    let is_encrypted = config.is_encrypted();
    let first = first.map_err(|_| connect_error(None, is_encrypted))?;
    let first = first.unwrap_or(Err(Error::NoHosts));
    first.map_err(|error| connect_error(Some(&error), is_encrypted))
}

/// Confirms a session regularly, detects its end, releases abandoned claims, and replaces a client
/// that stays disconnected.
async fn keep_alive(
    session: Weak<ZkSession>,
    sessions: Weak<SessionPool>,
    mut states: StateWatcher,
    timeout: Duration,
) {
    let mut tick = interval((timeout / CONFIRMATIONS_PER_TIMEOUT).min(TICK_MAX));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let reconnect_limit = (timeout / CONFIRMATIONS_PER_TIMEOUT).min(RECONNECT_LIMIT_MAX);
    let mut disconnected_at = None;
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
                sessions.remove_ended_session(&session);
                return;
            }
            Some(SessionState::SyncConnected) => {
                session.on_reconnect(&sessions);
            }
            Some(_) => {}
            None => {
                while lock(&session.tasks).try_join_next().is_some() {}
                (sessions.release_abandoned)(&session);
                sessions.end_if_unused(&session);
                let now = Moment::now();
                let state = session.client().state();
                if state.is_terminated() {
                    // `states` reports no change if the task of the library has panicked.
                    sessions.remove_ended_session(&session);
                    return;
                }
                if state == SessionState::Disconnected {
                    if disconnected_at.get_or_insert(now).after(reconnect_limit) <= now {
                        sessions.reattach_in_background(&session);
                        // The next client gets its own `keep_alive` task.
                        return;
                    }
                } else {
                    disconnected_at = None;
                }
                if session.is_confirmation_due(now) && state == SessionState::SyncConnected {
                    *lock(&session.majority_requested_at) = now;
                    let confirmation = session.confirm(ConfirmedBy::Majority);
                    session.spawn(confirmation.map(drop));
                }
            }
        }
    }
}

/// The path bytes up to which a session can watch every node that it needs: the node of every held
/// lock and the predecessor of every waiter. See [`WatchBudget`].
const WATCHED_BYTES_MAX: usize = WatchBudget::TOTAL_MAX_FOR_HELD;

/// How long an acquisition waits for a session that is opened only to watch more nodes.
const EXTRA_SESSION_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause between a failure to open a session only to watch more nodes and the next attempt.
const EXTRA_SESSION_PAUSE: Duration = Duration::from_secs(30);

/// The minimum pause between two confirmations by the leader for waiters.
const LEADER_PAUSE: Duration = Duration::from_millis(100);

/// The pool records the end of a claim's session for at least this time, unless the engine is
/// notified earlier.
const ENDED_CLAIMS_TTL: Duration = Duration::from_secs(10 * 60);

/// The number of writes to a majority per session time-out.
const CONFIRMATIONS_PER_TIMEOUT: u32 = 10;
const TICK_MAX: Duration = Duration::from_millis(250);

/// The maximum time for which a disconnected client may reconnect on its own. The first attempts of
/// the client have short pauses and try other servers.
const RECONNECT_LIMIT_MAX: Duration = Duration::from_secs(1);
/// The pause between two attempts to attach a session to a new client.
const ATTACH_PAUSE: Duration = Duration::from_millis(500);

/// The maximum number of concurrent attempts to open a session.
const CONCURRENT_CONNECTS: u32 = 8;

/// Half of the pause after the first failure to open a session. The pause doubles with each further
/// failure.
const OPEN_PAUSE_BASE: Duration = Duration::from_millis(20);
const OPEN_PAUSE_MAX: Duration = Duration::from_secs(1);
