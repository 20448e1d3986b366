//! Locks that last as long as a connection. A session has one connection for all of its locks. A
//! backend has one session, or one session for each lock (see `row_lock_sessions`). This module
//! contains no SQL: each kind of server implements [`SessionProtocol`].
//!
//! The connection actor in `connection_actor` runs one command at a time and completes each command
//! that it has started. So a dropped caller leaves no partial exchange on the connection. The
//! server does not expire these locks. Instead, the connection actor releases a lock that is not
//! renewed in time. While a lock is held, the actor regularly checks that the session still exists
//! on the server. If the session has ended, all of its locks are lost, and the actor notifies their
//! holders at once.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Claim, ClaimId, FencingToken, Grant, Holder, InvalidationSet,
    Invalidations, Key, Release, Renewal,
};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::connection_actor::{
    self, ActorState as _, ConnectionActor, InlineCommand, RunningCommand, StartOutcome,
};
use super::dialect::{Dialect, ServerErrors as _, WakeupSource as _};
use super::lease_table::LeaseTable;
use super::token_reservation::{SessionGrant, TokenPlan, TokenReservations};
use super::{PURGE_AFTER_MIN, error};
use crate::mutant::{Mutant, mutated};

/// The statements that a session sends.
pub(crate) trait SessionProtocol: Send + Sync + Sized + 'static {
    type Database: Dialect;
    type Connection: Send;

    /// Creates the protocol for locks in this table.
    fn open(
        table: Arc<LeaseTable<Self::Database>>,
    ) -> impl Future<Output = Result<Self, BackendError>> + Send;

    fn table(&self) -> &LeaseTable<Self::Database>;

    /// Opens a session.
    fn connect(&self) -> impl Future<Output = Result<Self::Connection, BackendError>> + Send;

    /// Acquires the lock if it is free. The session must not hold the lock yet. Writes the row,
    /// unless `plan` provides a reserved token. If the result is neither a grant nor `Broken`, the
    /// session does not hold the lock afterwards.
    ///
    /// Must wait as briefly as the server permits for a row that another transaction has locked,
    /// because all commands of the session wait too. MySQL, unlike MariaDB, permits no limit below
    /// one second.
    fn try_acquire(
        &self,
        connection: &mut Self::Connection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> impl Future<Output = Result<LockAttempt, SessionFailure>> + Send;

    /// Releases the lock. A failed release must end the session: while the session exists, no other
    /// client can acquire the lock.
    fn unlock(
        &self,
        connection: &mut Self::Connection,
        key: &Key,
    ) -> impl Future<Output = Result<(), SessionFailure>> + Send;

    /// Checks that the session still exists, and in MariaDB and MySQL that the server is writable.
    fn check_session(
        &self,
        connection: &mut Self::Connection,
    ) -> impl Future<Output = Result<(), SessionFailure>> + Send;

    /// Ensures that the row of a held lock exists and contains the claim and its token. A lock
    /// outside of the row (an advisory lock or `GET_LOCK`) does not protect the row from a purge.
    /// After a grant from a reservation, the row contains `row_claim`, the earlier claim that
    /// reserved the token. The default does nothing, for protocols that lock the row itself: each
    /// grant writes the row, and a locked row is not purged.
    fn ensure_row(
        &self,
        _connection: &mut Self::Connection,
        _claim: &Claim,
        _token: FencingToken,
        _row_claim: ClaimId,
    ) -> impl Future<Output = Result<(), SessionFailure>> + Send {
        std::future::ready(Ok(()))
    }

    /// Receives a connection that holds no locks. Returns the connection, or `None` if the session
    /// must not keep it, for example because a pool has taken it.
    fn recycle(&self, connection: Self::Connection) -> Option<Self::Connection> {
        Some(connection)
    }

    /// Returns the name of the lock on the server. The session never holds two keys with the same
    /// name at once.
    fn lock_name(&self, key: &Key) -> Vec<u8> {
        self.table().row_id(key).bytes().to_vec()
    }

    /// Waits until the lock may have been released after `position`. The default waits for a
    /// wake-up from the table's [`WakeupSource`](super::WakeupSource).
    fn wait(&self, key: &Key, position: u64) -> impl Future<Output = ()> + Send {
        self.table().wakeups.wait(self.table().row_id(key), position)
    }

    /// Closes the idle connections that [`recycle`](Self::recycle) has taken.
    fn close_idle(&self) {}

    /// Returns the time limit for an answer.
    fn response_timeout(&self) -> Duration {
        self.table().store.settings().response_timeout
    }
}

/// The result of an attempt.
#[derive(Debug)]
pub(crate) enum LockAttempt {
    Grant(SessionGrant),
    /// Another client holds the lock. Contains the time left of that client's lease, if known.
    Busy(Option<Duration>),
    /// Another transaction has locked the row, so the server does not report whether the lock is
    /// free. Contains the error to return after the last retry.
    RowLocked(BackendError),
}

/// The effect of a failed command.
#[derive(Debug)]
pub(crate) enum SessionFailure {
    /// The server refused the command, or no connection was opened. Nothing was acquired or
    /// released. An existing session continues.
    Rejected(BackendError),
    /// The session has ended, or must end.
    Broken(BackendError),
}

impl SessionFailure {
    /// Converts the failure of a command that must succeed for the session to continue.
    pub(crate) fn into_broken(self) -> Self {
        match self {
            Self::Rejected(error) | Self::Broken(error) => Self::Broken(error),
        }
    }
}

/// The locks of one connection. The connection actor is created by the first command.
pub(crate) struct SqlSession<P: SessionProtocol> {
    protocol: Arc<P>,
    subscribers: Arc<InvalidationSet>,
    actor: Mutex<Option<ActorHandle<P>>>,
    /// Whether a lock is held.
    has_locks: Arc<AtomicBool>,
}

/// The connection actor, its queues and its task.
struct ActorHandle<P: SessionProtocol> {
    actor: Arc<ConnectionActor<SessionState<P>>>,
    commands: CommandSenders,
    task: JoinHandle<()>,
}

impl<P: SessionProtocol> SqlSession<P> {
    /// Creates the session without connecting.
    pub(crate) fn new(protocol: P) -> Self {
        Self::with_subscribers(Arc::new(protocol), Arc::default())
    }

    /// Creates one of several sessions with the same protocol.
    pub(super) fn with_subscribers(protocol: Arc<P>, subscribers: Arc<InvalidationSet>) -> Self {
        Self { protocol, subscribers, actor: Mutex::default(), has_locks: Arc::default() }
    }

    /// Attempts to acquire the lock. While another transaction, such as a purge, has the row
    /// locked, retries for a short time. Between two attempts the connection is free for other
    /// commands.
    pub(crate) async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mut pauses = ROW_LOCK_PAUSES.iter();
        loop {
            let (claim, requested_at) = (claim.clone(), Instant::now());
            match self
                .request(|reply| SessionCommand::Acquire { claim, requested_at, reply })
                .await??
            {
                AcquireResponse::Attempt(attempt) => return Ok(attempt),
                AcquireResponse::RowLocked(error) => match pauses.next() {
                    Some(pause) => self.pause(*pause).await,
                    None => return Err(error),
                },
            }
        }
    }

    /// Returns a sleep that uses the timer of the session's runtime. The caller's runtime may end
    /// while another runtime polls the caller's future.
    fn pause(&self, pause: Duration) -> Sleep {
        let runtime = self.runtime();
        let _runtime = runtime.enter();
        sleep(pause)
    }

    pub(crate) fn protocol(&self) -> &P {
        &self.protocol
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let owned = claims.to_vec();
        match self.request(|reply| SessionCommand::Renew { claims: owned, reply }).await {
            Ok(responses) => responses.into_iter().map(Ok).collect(),
            Err(_) => {
                claims.iter().map(|_| Err(error::session_ended(P::Database::STORE))).collect()
            }
        }
    }

    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let claim = claim.clone();
        self.request(|reply| SessionCommand::Release { claim, reply }).await
    }

    /// Ensures that a fence finds the row of the claim's lock. Returns false if the claim holds no
    /// lock.
    pub(crate) async fn ensure_row(&self, claim: &Claim) -> Result<bool, BackendError> {
        let claim = claim.clone();
        self.request(|reply| SessionCommand::EnsureRow { claim, reply }).await?
    }

    pub(crate) fn subscribe_invalidations(&self, invalidations: Invalidations) {
        self.subscribers.subscribe(invalidations);
    }

    pub(super) fn holds_locks(&self) -> bool {
        self.has_locks.load(Ordering::Acquire)
    }

    /// Closes the session, unless it still holds locks, for example of another registry. The next
    /// acquisition opens a new session.
    pub(crate) async fn close(&self) {
        let commands = self.actor().as_ref().map(|actor| actor.commands.clone());
        let Some(commands) = commands else { return };
        let (reply, done) = oneshot::channel();
        if commands.urgent.send(SessionCommand::Close { reply }).await.is_ok() {
            let _ = done.await;
        }
    }

    async fn request<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> SessionCommand,
    ) -> Result<T, BackendError> {
        let (reply, response) = oneshot::channel();
        match self.dispatch(command(reply)) {
            Dispatch::Inline(mut command) => {
                if let Some(response) = poll_fn(|cx| command.poll(cx)).await {
                    response.send();
                }
            }
            Dispatch::Queue(commands, command) => {
                let sent = commands.queue_for(&command).send(command).await;
                sent.map_err(|_| error::session_ended(P::Database::STORE).as_refused())?;
            }
        }
        response.await.map_err(|_| error::session_ended(P::Database::STORE))
    }

    /// Starts the command, or returns the queue for it. If the connection actor is closed, because
    /// its runtime ended or a command panicked, opens a new actor.
    fn dispatch(&self, command: SessionCommand) -> Dispatch<P> {
        let mut actor = self.actor();
        let handle = actor.get_or_insert_with(|| self.open());
        let command = match handle.actor.try_start(command, SessionState::run) {
            StartOutcome::Inline(command) => return Dispatch::Inline(command),
            StartOutcome::InUse(command) => {
                return Dispatch::Queue(handle.commands.clone(), command);
            }
            StartOutcome::Closed(command) => command,
        };
        *handle = self.open();
        match handle.actor.try_start(command, SessionState::run) {
            StartOutcome::Inline(command) => Dispatch::Inline(command),
            // If the runtime is about to end, the new task has ended too. Sending the command then
            // returns an error.
            StartOutcome::InUse(command) | StartOutcome::Closed(command) => {
                Dispatch::Queue(handle.commands.clone(), command)
            }
        }
    }

    fn open(&self) -> ActorHandle<P> {
        let (urgent, urgent_queue) = mpsc::channel(QUEUE_MAX);
        let (acquisitions, acquisitions_queue) = mpsc::channel(QUEUE_MAX);
        let commands = CommandSenders { urgent, acquisitions };
        let queue = CommandQueue { urgent: urgent_queue, acquisitions: acquisitions_queue };
        self.has_locks.store(false, Ordering::Release);
        let state = SessionState {
            protocol: Arc::clone(&self.protocol),
            subscribers: Arc::clone(&self.subscribers),
            connection: None,
            held: HashMap::new(),
            reservations: TokenReservations::default(),
            has_locks: Arc::clone(&self.has_locks),
            check_at: None,
            next_expiry: None,
        };
        let runtime = self.runtime();
        let actor = Arc::new(ConnectionActor::new(state, runtime.clone()));
        let task = runtime.spawn(run_actor(CloseOnDrop(Arc::clone(&actor)), queue));
        ActorHandle { actor, commands, task }
    }

    /// Returns the runtime of a subscribed registry, otherwise the current runtime. A caller's own
    /// runtime may end while its locks are still held.
    fn runtime(&self) -> Handle {
        self.subscribers.runtime().unwrap_or_else(Handle::current)
    }

    fn actor(&self) -> MutexGuard<'_, Option<ActorHandle<P>>> {
        self.actor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a command is executed.
enum Dispatch<P: SessionProtocol> {
    /// The caller runs it.
    Inline(InlineCommand<SessionState<P>>),
    /// The actor's task runs it.
    Queue(CommandSenders, SessionCommand),
}

/// The queues of a session's connection. Renewals and releases have priority: each acquisition
/// before a renewal delays the renewal by a round trip, and a late renewal loses the lock.
#[derive(Clone)]
struct CommandSenders {
    urgent: mpsc::Sender<SessionCommand>,
    acquisitions: mpsc::Sender<SessionCommand>,
}

impl CommandSenders {
    fn queue_for(&self, command: &SessionCommand) -> &mpsc::Sender<SessionCommand> {
        let is_acquisition = matches!(command, SessionCommand::Acquire { .. });
        if is_acquisition && !mutated(Mutant::SessionRenewsInQueue) {
            &self.acquisitions
        } else {
            &self.urgent
        }
    }
}

/// The receiving ends of [`CommandSenders`].
struct CommandQueue {
    urgent: mpsc::Receiver<SessionCommand>,
    acquisitions: mpsc::Receiver<SessionCommand>,
}

impl CommandQueue {
    /// Returns the next command, or `None` when all senders are dropped.
    async fn next(&mut self) -> Option<SessionCommand> {
        tokio::select! {
            biased;
            Some(command) = self.urgent.recv() => Some(command),
            Some(command) = self.acquisitions.recv() => Some(command),
            else => None,
        }
    }

    /// Returns the next command if one is queued. Skips acquisitions whose caller was dropped.
    fn next_queued(&mut self) -> Option<SessionCommand> {
        if let Ok(command) = self.urgent.try_recv() {
            return Some(command);
        }
        while let Ok(command) = self.acquisitions.try_recv() {
            if command.is_awaited() {
                return Some(command);
            }
        }
        None
    }
}

/// Dropping the session closes the connection, and so releases all locks.
impl<P: SessionProtocol> Drop for SqlSession<P> {
    fn drop(&mut self) {
        if let Some(handle) = self.actor().take() {
            handle.task.abort();
            handle.actor.close();
        }
    }
}

impl<P: SessionProtocol> fmt::Debug for SqlSession<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqlSession").finish_non_exhaustive()
    }
}

enum SessionCommand {
    Acquire {
        claim: Claim,
        requested_at: Instant,
        reply: oneshot::Sender<Result<AcquireResponse, BackendError>>,
    },
    Renew {
        claims: Vec<Claim>,
        reply: oneshot::Sender<Vec<Renewal>>,
    },
    Release {
        claim: Claim,
        reply: oneshot::Sender<Release>,
    },
    EnsureRow {
        claim: Claim,
        reply: oneshot::Sender<Result<bool, BackendError>>,
    },
    Close {
        reply: oneshot::Sender<()>,
    },
}

impl SessionCommand {
    /// Returns false for an acquisition whose caller was dropped. Other commands always run.
    fn is_awaited(&self) -> bool {
        !matches!(self, Self::Acquire { reply, .. } if reply.is_closed())
    }
}

/// The response to an acquisition.
enum AcquireResponse {
    Attempt(Attempt),
    /// As [`LockAttempt::RowLocked`].
    RowLocked(BackendError),
}

/// The response to a command, with its reply channel.
enum CommandResponse {
    Acquire(
        oneshot::Sender<Result<AcquireResponse, BackendError>>,
        Result<AcquireResponse, BackendError>,
    ),
    Renew(oneshot::Sender<Vec<Renewal>>, Vec<Renewal>),
    Release(oneshot::Sender<Release>, Release),
    EnsureRow(oneshot::Sender<Result<bool, BackendError>>, Result<bool, BackendError>),
    Close(oneshot::Sender<()>),
}

impl CommandResponse {
    /// Sends the response. If the caller was dropped, an unreceived grant ends with its lease.
    fn send(self) {
        match self {
            Self::Acquire(reply, response) => drop(reply.send(response)),
            Self::Renew(reply, response) => drop(reply.send(response)),
            Self::Release(reply, response) => drop(reply.send(response)),
            Self::EnsureRow(reply, response) => drop(reply.send(response)),
            Self::Close(reply) => drop(reply.send(())),
        }
    }
}

/// Runs the task of the connection actor. The task ends when all senders are dropped, or when the
/// state was dropped. Held locks then end with the connection.
async fn run_actor<P: SessionProtocol>(close_on_drop: CloseOnDrop<P>, mut queue: CommandQueue) {
    let CloseOnDrop(actor) = &close_on_drop;
    loop {
        let mut command = tokio::select! {
            biased;
            () = actor.wait_for_work() => None,
            command = queue.next() => match command {
                Some(command) => Some(command),
                None => return,
            },
        };
        let Some((mut state, response)) = actor.take_over().await else { return };
        if let Some(response) = response {
            response.send();
        }
        loop {
            if state.next_due().is_some_and(|time| time <= Instant::now()) {
                state.run_scheduled().await;
                state.after_command();
            }
            let Some(command) = command.take().or_else(|| queue.next_queued()) else { break };
            state.execute(command).await.send();
        }
        actor.return_state(state);
    }
}

/// Closes the actor when its task ends, so that the state is dropped.
struct CloseOnDrop<P: SessionProtocol>(Arc<ConnectionActor<SessionState<P>>>);

impl<P: SessionProtocol> Drop for CloseOnDrop<P> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The state of the connection actor.
struct SessionState<P: SessionProtocol> {
    protocol: Arc<P>,
    subscribers: Arc<InvalidationSet>,
    connection: Option<P::Connection>,
    /// The held locks by lock name. Empty if there is no connection.
    held: HashMap<Vec<u8>, HeldLock>,
    reservations: TokenReservations,
    /// A copy of `!held.is_empty()` for other tasks.
    has_locks: Arc<AtomicBool>,
    /// When to check next that the session still exists. `None` if no lock is held.
    check_at: Option<Instant>,
    /// No lease ends before this time. `None` if no lock is held.
    next_expiry: Option<Instant>,
}

struct HeldLock {
    key: Key,
    claim: ClaimId,
    token: FencingToken,
    /// The claim in the row: `claim`, or an earlier claim of this session that reserved the token.
    row_claim: ClaimId,
    label: Option<String>,
    since: Instant,
    /// The time at which the lock is released, unless it is renewed.
    until: Instant,
}

impl<P: SessionProtocol> connection_actor::ActorState for SessionState<P> {
    type Output = CommandResponse;

    fn next_due(&self) -> Option<Instant> {
        self.next_expiry.into_iter().chain(self.check_at).min()
    }
}

impl<P: SessionProtocol> SessionState<P> {
    fn run(mut self: Box<Self>, command: SessionCommand) -> RunningCommand<Self> {
        Box::pin(async move {
            let response = self.execute(command).await;
            (self, response)
        })
    }

    async fn execute(&mut self, command: SessionCommand) -> CommandResponse {
        let response = match command {
            // The caller has probably timed out, and its next attempt is already queued.
            SessionCommand::Acquire { requested_at, reply, .. }
                if requested_at.elapsed()
                    > self.protocol.response_timeout() / QUEUE_TIME_DIVISOR =>
            {
                CommandResponse::Acquire(reply, Err(error::queue_timed_out(P::Database::STORE)))
            }
            SessionCommand::Acquire { claim, reply, .. } => {
                CommandResponse::Acquire(reply, self.try_acquire(&claim).await)
            }
            SessionCommand::Renew { claims, reply } => {
                CommandResponse::Renew(reply, self.renew(&claims).await)
            }
            SessionCommand::Release { claim, reply } => {
                CommandResponse::Release(reply, self.release(&claim).await)
            }
            SessionCommand::EnsureRow { claim, reply } => {
                CommandResponse::EnsureRow(reply, self.ensure_row(&claim).await)
            }
            SessionCommand::Close { reply } => {
                self.release_expired().await;
                if self.held.is_empty() {
                    self.end_session();
                }
                return CommandResponse::Close(reply);
            }
        };
        self.after_command();
        response
    }

    /// Recycles the connection if no lock is held, and updates `has_locks`. Must run before the
    /// response is sent: a caller that reads `has_locks` as false may drop the session.
    fn after_command(&mut self) {
        if self.held.is_empty() {
            self.connection =
                self.connection.take().and_then(|connection| self.protocol.recycle(connection));
        }
        self.has_locks.store(!self.held.is_empty(), Ordering::Release);
    }

    async fn try_acquire(&mut self, claim: &Claim) -> Result<AcquireResponse, BackendError> {
        let name = self.protocol.lock_name(claim.key());
        self.release_expired().await;
        if self.held.get(&name).is_some_and(|held| held.claim != claim.id()) {
            // An operator may have ended the session to free the key.
            self.check_session().await;
        }
        if let Some(held) = self.held.get(&name) {
            let left = held.until.saturating_duration_since(Instant::now());
            return Ok(AcquireResponse::Attempt(if held.claim == claim.id() {
                Attempt::Granted(Grant::new(held.token, left.min(claim.lease())))
            } else {
                Attempt::Busy(held.to_busy(left))
            }));
        }
        let requested_at = Instant::now();
        let attempt = match self.attempt_lock(&name, claim).await {
            // An idle connection may have broken unnoticed. The session held no lock, so a new
            // session loses none.
            Err(SessionFailure::Broken(_)) if self.held.is_empty() => {
                self.end_session();
                self.attempt_lock(&name, claim).await
            }
            attempt => attempt,
        };
        let granted = match self.end_if_broken(attempt)? {
            LockAttempt::Grant(granted) => granted,
            LockAttempt::Busy(lease_left) => {
                self.reservations.remove(&name);
                let busy = Busy::new();
                let busy = lease_left.into_iter().fold(busy, Busy::with_retry_after);
                return Ok(AcquireResponse::Attempt(Attempt::Busy(busy)));
            }
            LockAttempt::RowLocked(error) => {
                self.reservations.remove(&name);
                return Ok(AcquireResponse::RowLocked(error));
            }
        };
        self.reservations.record_grant(&name, &granted, requested_at);
        let now = Instant::now();
        let token = granted.token;
        let held = HeldLock {
            key: claim.key().clone(),
            claim: claim.id(),
            token,
            row_claim: granted.row.claim,
            label: claim.label().map(str::to_owned),
            since: now,
            until: now + claim.lease(),
        };
        self.schedule_expiry(held.until);
        self.held.insert(name, held);
        self.check_at.get_or_insert(now + CHECK_INTERVAL);
        let grant = Grant::new(token, claim.lease());
        Ok(AcquireResponse::Attempt(Attempt::Granted(grant)))
    }

    async fn attempt_lock(
        &mut self,
        name: &[u8],
        claim: &Claim,
    ) -> Result<LockAttempt, SessionFailure> {
        let limit = self.protocol.response_timeout();
        let connection = match &mut self.connection {
            Some(connection) => connection,
            slot @ None => {
                self.reservations.clear();
                let connected = self.protocol.connect().await;
                slot.insert(
                    connected.map_err(|error| SessionFailure::Rejected(error.as_refused()))?,
                )
            }
        };
        let plan = self.reservations.plan(name, claim, Instant::now());
        let attempt = timeout(limit, self.protocol.try_acquire(connection, claim, &plan)).await;
        attempt.unwrap_or_else(|_| {
            Err(SessionFailure::Broken(error::timed_out(P::Database::STORE, limit)))
        })
    }

    /// Renews the claims that the session holds. One check of the session covers all of its locks.
    async fn renew(&mut self, claims: &[Claim]) -> Vec<Renewal> {
        if !self.held.is_empty() {
            self.check_session().await;
        }
        let now = Instant::now();
        let responses = claims.iter().map(|claim| {
            let held = self.held.get_mut(&self.protocol.lock_name(claim.key()));
            match held.filter(|held| held.claim == claim.id() && held.until > now) {
                Some(held) => {
                    held.until = held.until.max(now + claim.lease());
                    Renewal::Renewed(held.until - now)
                }
                None => Renewal::Gone,
            }
        });
        responses.collect()
    }

    async fn release(&mut self, claim: &Claim) -> Release {
        let name = self.protocol.lock_name(claim.key());
        self.release_expired().await;
        let Some(held) = self.held.get(&name).filter(|held| held.claim == claim.id()) else {
            return Release::NotHeld;
        };
        let token = held.token;
        // If `unlock` fails, the session ends. It is then unknown how long the lock was held, and a
        // retry is useless. So the result is `NotHeld`.
        if !self.unlock(&name).await {
            return Release::NotHeld;
        }
        self.reservations.return_unused(&name, token, claim.token_block());
        Release::Freed
    }

    async fn ensure_row(&mut self, claim: &Claim) -> Result<bool, BackendError> {
        let name = self.protocol.lock_name(claim.key());
        self.release_expired().await;
        let held = self.held.get_mut(&name);
        let (Some(held), Some(connection)) = (held, &mut self.connection) else { return Ok(false) };
        if held.claim != claim.id() {
            return Ok(false);
        }
        // A fence blocks only grants that write the row. Without a reservation, the next grant must
        // write the row.
        if !mutated(Mutant::SessionSkipsFenceWrite) {
            self.reservations.remove(&name);
        }
        if held.row_claim == claim.id() && held.since.elapsed() < PURGE_AGE_MIN {
            return Ok(true);
        }
        let ensured = self.protocol.ensure_row(connection, claim, held.token, held.row_claim);
        let limit = self.protocol.response_timeout();
        let ensured = timeout(limit, ensured).await;
        let ensured = ensured.unwrap_or_else(|_| {
            Err(SessionFailure::Broken(error::timed_out(P::Database::STORE, limit)))
        });
        if ensured.is_ok() {
            held.row_claim = claim.id();
        }
        self.end_if_broken(ensured).map(|()| true)
    }

    /// Releases the lock. Returns whether the server confirmed the release. Otherwise ends the
    /// session.
    async fn unlock(&mut self, name: &[u8]) -> bool {
        let (Some(held), Some(connection)) = (self.held.get(name), &mut self.connection) else {
            return false;
        };
        let key = held.key.clone();
        let limit = self.protocol.response_timeout();
        let released = timeout(limit, self.protocol.unlock(connection, &key)).await;
        self.held.remove(name);
        let released = matches!(released, Ok(Ok(())));
        if !released {
            // After a failed release, only the end of the session frees the lock.
            self.end_session();
        }
        released
    }

    /// Does the scheduled work: releases expired leases, and checks the session.
    async fn run_scheduled(&mut self) {
        self.release_expired().await;
        if self.held.is_empty() {
            self.check_at = None;
        } else if self.check_at.is_some_and(|time| time <= Instant::now()) {
            self.check_session().await;
        }
    }

    async fn release_expired(&mut self) {
        let now = Instant::now();
        if self.next_expiry.is_none_or(|time| now < time) {
            return;
        }
        let expired = self.held.iter().filter(|(_, held)| held.until <= now);
        let expired: Vec<Vec<u8>> = expired.map(|(name, _)| name.clone()).collect();
        for name in expired {
            // A failed release ends the session, which also releases the lock.
            self.unlock(&name).await;
        }
        self.next_expiry = self.held.values().map(|held| held.until).min();
    }

    fn schedule_expiry(&mut self, until: Instant) {
        self.next_expiry = Some(self.next_expiry.map_or(until, |first| first.min(until)));
    }

    async fn check_session(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let limit = self.protocol.response_timeout();
        match timeout(limit, self.protocol.check_session(connection)).await {
            Ok(Ok(()) | Err(SessionFailure::Rejected(_))) => {
                self.check_at = Some(Instant::now() + CHECK_INTERVAL);
            }
            Ok(Err(SessionFailure::Broken(_))) | Err(_) => self.end_session(),
        }
    }

    fn end_if_broken<T>(&mut self, response: Result<T, SessionFailure>) -> Result<T, BackendError> {
        response.map_err(|failure| match failure {
            SessionFailure::Rejected(error) => error,
            SessionFailure::Broken(error) => {
                self.end_session();
                error
            }
        })
    }

    /// Ends the session, and notifies the holders.
    fn end_session(&mut self) {
        // The connection is closed first, so that the server can free the locks before the holders
        // react.
        self.connection = None;
        self.check_at = None;
        self.next_expiry = None;
        self.reservations.clear();
        let held = std::mem::take(&mut self.held);
        held.values().for_each(|held| self.subscribers.notify(&held.key));
    }
}

/// The drop notifies the holders if the runtime ends, or a command panics, while locks are held.
impl<P: SessionProtocol> Drop for SessionState<P> {
    fn drop(&mut self) {
        self.end_session();
    }
}

impl HeldLock {
    fn to_busy(&self, left: Duration) -> Busy {
        let holder = Holder::new(self.key.clone())
            .with_label(self.label.clone())
            .with_token(Some(self.token))
            .with_times(Some(self.since.elapsed()), Some(left));
        Busy::new().with_retry_after(left).with_holder(holder)
    }
}

/// The maximum number of commands in each queue. Further callers wait for capacity.
const QUEUE_MAX: usize = 1024;

/// An acquisition that was queued for longer than `response_timeout` divided by this number is
/// refused.
const QUEUE_TIME_DIVISOR: u32 = 3;

/// The pauses between attempts while another transaction has the row locked. A purge locks the row
/// for less than their sum. A transaction with a fence may lock the row for any time.
const ROW_LOCK_PAUSES: [Duration; 4] = [
    Duration::from_millis(10),
    Duration::from_millis(30),
    Duration::from_millis(60),
    Duration::from_millis(100),
];

/// For this time after [`HeldLock::since`], no purge deletes the row. This is shorter than
/// [`PURGE_AFTER_MIN`], because a purge counts from the grant, which precedes the response.
const PURGE_AGE_MIN: Duration = PURGE_AFTER_MIN.saturating_sub(Duration::from_secs(5));

/// The interval between checks of the session while a lock is held.
const CHECK_INTERVAL: Duration = Duration::from_millis(300);
