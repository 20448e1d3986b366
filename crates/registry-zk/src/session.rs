//! The session that all locks of a backend live in: kept alive, watched over, and followed by another one when it is over. Knows nothing of
//! queues; see `recipe`.
//!
//! What is over stays over: a claim belongs to the session in which its node was made, and is lost with it.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use registry_core::{BackendError, BackendErrorKind, Claim, ClaimId, Key, LossHints, Moment};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use zookeeper_client::{CheckWriteError, Client, Error, SessionState, StateWatcher};

use crate::config::ZkConfig;
use crate::error::{explain, silent, unreachable};
use crate::heads::Heads;
use crate::place::{Place, Room};
use crate::proof::Proof;
use crate::recipe::tend;

/// The sessions of one backend, one after the other.
pub(crate) struct Sessions {
    config: Arc<ZkConfig>,
    hints: Hints,
    current: Mutex<Option<Arc<Session>>>,
    /// Locked by whoever opens the next one.
    opening: tokio::sync::Mutex<Outage>,
    /// Claims that were in a session that is over, and have not been told.
    displaced: Mutex<HashSet<ClaimId>>,
}

impl Sessions {
    pub(crate) fn new(config: ZkConfig) -> Arc<Self> {
        Arc::new(Self {
            config: Arc::new(config),
            hints: Hints::default(),
            current: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            displaced: Mutex::default(),
        })
    }

    pub(crate) fn hints(&self) -> &Hints {
        &self.hints
    }

    /// The session, connected; a new one if there is none.
    pub(crate) async fn get(self: &Arc<Self>) -> Result<Arc<Session>, BackendError> {
        let session = match self.current() {
            Some(session) => session,
            None => self.open().await?,
        };
        session.connected().await?;
        Ok(session)
    }

    /// The session, unless it is over.
    pub(crate) fn current(&self) -> Option<Arc<Session>> {
        lock(&self.current).clone().filter(|session| !session.is_over())
    }

    async fn open(self: &Arc<Self>) -> Result<Arc<Session>, BackendError> {
        let mut outage = self.opening.lock().await;
        if let Some(session) = self.current() {
            return Ok(session);
        }
        outage.allows_another_try()?;
        match Session::connect(self).await {
            Ok(session) => {
                *outage = Outage::default();
                let last = lock(&self.current).replace(Arc::clone(&session));
                if let Some(last) = last {
                    self.retire(&last);
                }
                Ok(session)
            }
            Err(error) => Err(outage.goes_on(error)),
        }
    }

    /// Notes that `session` is over, and has those told who held something.
    fn retire(&self, session: &Arc<Session>) {
        if session.over.swap(true, Ordering::AcqRel) {
            return;
        }
        let places = std::mem::take(&mut *lock(&session.places));
        // Whoever has not been told of the last session's end does not ask any more.
        *lock(&self.displaced) = places.keys().copied().collect();
        {
            let mut current = lock(&self.current);
            if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, session)) {
                *current = None;
            }
        }
        self.hints.look_at(places.values().map(|place| &place.key));
    }

    /// Whether the session of `claim` is over. Said once.
    pub(crate) fn was_displaced(&self, claim: ClaimId) -> bool {
        lock(&self.displaced).remove(&claim)
    }

    /// Ends the session, unless something is in it.
    pub(crate) async fn close(&self) {
        let session = {
            let mut current = lock(&self.current);
            let is_empty = current.as_ref().is_some_and(|session| lock(&session.places).is_empty());
            if is_empty { current.take() } else { None }
        };
        let Some(session) = session else { return };
        let mut states = session.client.state_watcher();
        // The last one to have the client says good-bye to the servers.
        drop(session);
        let closed = async { while !states.changed().await.is_terminated() {} };
        let _ = timeout(self.config.request_timeout, closed).await;
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("current", &self.current()).finish_non_exhaustive()
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

    fn look_at_all(&self) {
        lock(&self.0).clone().iter().for_each(LossHints::look_at_all);
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
    client: Client,
    config: Arc<ZkConfig>,
    over: AtomicBool,
    proof: Mutex<Proof>,
    /// When a majority was asked last.
    asked_at: Mutex<Moment>,
    /// The next questions, [to](By) a majority and to the leader, as long as they have not left.
    next_rounds: [Mutex<Option<Round>>; 2],
    /// How often it was connected again.
    reconnects: AtomicU32,
    places: Mutex<HashMap<ClaimId, Arc<Place>>>,
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
        let session = Arc::new(Self {
            proof: Mutex::new(Proof::new(client.session_timeout(), asked_at)),
            config,
            over: AtomicBool::new(false),
            asked_at: Mutex::new(asked_at),
            next_rounds: Default::default(),
            reconnects: AtomicU32::new(0),
            places: Mutex::default(),
            room: Room::default(),
            heads: Mutex::default(),
            tasks: Mutex::default(),
            client,
        });
        session.require_chroot().await?;
        let states = session.client.state_watcher();
        let (weak, owner) = (Arc::downgrade(&session), Arc::downgrade(sessions));
        session.spawn(pulse(weak, owner, states, session.timeout()));
        Ok(session)
    }

    /// A chroot that is mistyped would be a place of its own where nobody else contends.
    async fn require_chroot(&self) -> Result<(), BackendError> {
        let Some(chroot) = &self.config.chroot else { return Ok(()) };
        let found = self.bounded(self.client.check_stat(chroot)).await?;
        match found.map_err(|error| explain(&error).as_refused())? {
            Some(_) => Ok(()),
            None => {
                let says = "zookeeper: the chroot of the servers' address is not there; make it, for example by `zkCli.sh create`";
                Err(BackendError::new(BackendErrorKind::Misconfigured, says).as_refused())
            }
        }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn config(&self) -> &ZkConfig {
        &self.config
    }

    /// The session's id, which nodes bear that live with it.
    pub(crate) fn id(&self) -> i64 {
        self.client.session_id().0
    }

    /// How long the servers keep the session after they have heard of it last, as they said.
    pub(crate) fn timeout(&self) -> Duration {
        self.client.session_timeout()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.client.state().is_terminated()
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
        let mut states = self.client.state_watcher();
        let mut state = self.client.state();
        if state == SessionState::SyncConnected {
            return Ok(());
        }
        let connected = async {
            loop {
                match state {
                    SessionState::SyncConnected => return Ok(()),
                    SessionState::AuthFailed => {
                        return Err(explain(&Error::AuthFailed));
                    }
                    state if state.is_terminated() => {
                        return Err(explain(&Error::SessionExpired).as_refused());
                    }
                    _ => state = states.changed().await,
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
        timeout(self.config.request_timeout, request).await.map_err(|_| silent())
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
                    let synced = session.bounded(session.client.sync("/")).await?;
                    synced.map_err(|error| explain(&error))
                }
            }
        };
        let round = round.boxed().shared();
        *next = Some(round.clone());
        round
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
        let writer = self.client.new_check_writer(path, None).map_err(|error| explain(&error))?;
        match writer.commit().await {
            // That a check fails is written down like all else.
            Ok(_) | Err(CheckWriteError::CheckFailed { source: Error::NoAuth }) => Ok(true),
            Err(CheckWriteError::CheckFailed { source: Error::NoNode }) => Ok(false),
            Err(error) => Err(explain(&error.into())),
        }
    }

    /// The room for what is watched in this session.
    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    /// Who keeps us waiting in this session.
    pub(crate) fn heads(&self) -> &Mutex<Heads> {
        &self.heads
    }

    /// The place of `claim`; a new one if it has none.
    pub(crate) fn place(&self, claim: &Claim, dir: impl FnOnce() -> String) -> Arc<Place> {
        let mut places = lock(&self.places);
        let place = places.entry(claim.id());
        Arc::clone(place.or_insert_with(|| Arc::new(Place::new(claim, dir()))))
    }

    /// The place of `claim`, if it has one.
    pub(crate) fn find(&self, claim: &Claim) -> Option<Arc<Place>> {
        let place = lock(&self.places).get(&claim.id()).map(Arc::clone);
        place.filter(|place| place.key == *claim.key())
    }

    /// All places.
    pub(crate) fn places(&self) -> Vec<(ClaimId, Arc<Place>)> {
        lock(&self.places).iter().map(|(claim, place)| (*claim, Arc::clone(place))).collect()
    }

    /// Forgets the place of `claim`, unless it is another one by now.
    pub(crate) fn forget(&self, claim: ClaimId, place: &Arc<Place>) {
        let mut places = lock(&self.places);
        if places.get(&claim).is_some_and(|other| Arc::ptr_eq(other, place)) {
            places.remove(&claim);
        }
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
            .field("id", &self.client.session_id())
            .field("state", &self.client.state())
            .field("places", &lock(&self.places).len())
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
) -> Result<Client, BackendError> {
    let attempts = if config.has_several_servers() { ATTEMPTS } else { 1 };
    let attempts = (0..attempts).map(async |number| {
        sleep(limit * number / ATTEMPTS).await;
        connect_once(config, session_timeout).await
    });
    let mut attempts: FuturesUnordered<_> = attempts.collect();
    // One that fails has asked all of them.
    let first = timeout(limit, attempts.next()).await;
    let first = first.map_err(|_| unreachable())?.unwrap_or(Err(Error::NoHosts));
    first.map_err(|error| explain(&error).as_refused())
}

async fn connect_once(config: &ZkConfig, session_timeout: Duration) -> Result<Client, Error> {
    let connecting = config.connector(session_timeout).with_fail_eagerly();
    let servers = config.servers();
    #[cfg(feature = "tls")]
    if config.is_encrypted() {
        return connecting.secure_connect(&servers).await;
    }
    connecting.connect(&servers).await
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
                // Other clients of the server may have been told something meanwhile that we were not.
                session.reconnects.fetch_add(1, Ordering::AcqRel);
                sessions.hints.look_at_all();
            }
            Some(_) => {}
            None => {
                while lock(&session.tasks).try_join_next().is_some() {}
                tend(&session);
                let now = Moment::now();
                if session.is_due(now) && session.client.state() == SessionState::SyncConnected {
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

/// How often a majority is asked in the time-out of a session. The client itself would say a word as often if nothing else were said.
const PROOFS: u32 = 10;
const TICK_MAX: Duration = Duration::from_millis(250);

/// How many attempts at a session may go on beside each other.
const ATTEMPTS: u32 = 8;

/// The pause after the first failure to get a session; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
