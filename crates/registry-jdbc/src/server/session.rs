//! Locks that last as long as a connection. A session has one connection for all of its locks. A
//! backend has either one session, or, see `sessions`, one for each lock. Contains no SQL, see
//! [`Wire`].
//!
//! The connection actor in `hands` runs one command at a time and completes each command that it
//! has started. So a dropped caller leaves no partial exchange on the connection. The server counts
//! no leases here, so the actor's task does: it releases a lock that is not renewed in time. While
//! a lock is held, the task regularly checks on the server that the session still exists. If it
//! does not, all locks are lost, and their holders are notified at once.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Claim, ClaimId, FencingToken, Grant, Holder, Invalidations, Key,
    Release, Renewal,
};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::PURGE_AFTER_MIN;
use super::hands::{self, Begun, Desk as _, Errand, Hands, Here};
use super::runs::{Runs, Taken, Terms};
use crate::mutant::{Mutant, mutated};

/// The statements that a session sends.
pub(crate) trait Wire: Send + Sync + 'static {
    type Connection: Send;

    /// Opens a session.
    fn connect(&self) -> impl Future<Output = Result<Self::Connection, BackendError>> + Send;

    /// Takes the lock, which this session does not hold, if it is free. Writes the row, unless the
    /// terms permit otherwise. Unless the lock is granted or the session is over, the session does
    /// not hold it afterwards.
    ///
    /// Does not wait for a row that another transaction has locked: all locks of the session would
    /// wait with it.
    fn take(
        &self,
        connection: &mut Self::Connection,
        claim: &Claim,
        terms: &Terms,
    ) -> impl Future<Output = Result<Took, Failure>> + Send;

    /// Releases the lock. If that fails the session is over, because no other client could take the
    /// lock while the session exists.
    fn give_back(
        &self,
        connection: &mut Self::Connection,
        key: &Key,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Checks that the session still exists.
    fn look(
        &self,
        connection: &mut Self::Connection,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Ensures that the row of a held lock exists and contains the claim and its token. The row may
    /// have been purged, or it may contain `noted`, the earlier claim that reserved the token.
    fn keep(
        &self,
        connection: &mut Self::Connection,
        claim: &Claim,
        token: FencingToken,
        noted: ClaimId,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Takes a connection without locks, or returns it to the session.
    fn spare(&self, connection: Self::Connection) -> Option<Self::Connection> {
        Some(connection)
    }

    /// Returns the name of the server's lock. Two keys with the same name are never held at once.
    fn name(&self, key: &Key) -> Vec<u8>;

    /// Returns the error for an answer that did not arrive in time.
    fn silent(&self) -> BackendError;

    /// Returns the error for a session whose task has ended.
    fn closed(&self) -> BackendError;

    /// Returns the error for an acquisition that was not sent, because the connection was busy with
    /// other statements for too long.
    fn overdue(&self) -> BackendError;

    /// Returns the time limit for an answer.
    fn answer_limit(&self) -> Duration;
}

/// What an attempt returned.
#[derive(Debug)]
pub(crate) enum Took {
    Grant(Taken),
    /// Another client holds the lock. The time that its lease has left, if the server returned it.
    Busy(Option<Duration>),
    /// Another transaction has locked the row, so it is not known whether the lock is free. The
    /// error is for callers that have retried long enough.
    RowLocked(BackendError),
}

/// The effect of a failed command.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server refused the command. Nothing was taken or released, and the session continues.
    Answered(BackendError),
    /// The session is over.
    Broken(BackendError),
}

impl Failure {
    /// Returns the failure of a command without which the session cannot continue.
    pub(crate) fn into_broken(self) -> Self {
        match self {
            Self::Answered(error) | Self::Broken(error) => Self::Broken(error),
        }
    }
}

/// The locks of one connection.
pub(crate) struct Session<W: Wire> {
    wire: Arc<W>,
    hints: Arc<Hints>,
    desk: Mutex<Option<Attended<W>>>,
    /// Whether a lock is held.
    holds: Arc<AtomicBool>,
}

/// The connection actor, its queues and its task.
struct Attended<W: Wire> {
    hands: Arc<Hands<Desk<W>>>,
    commands: Commands,
    work: JoinHandle<()>,
}

/// The receivers of loss notifications: registries, each with its runtime.
#[derive(Default)]
pub(super) struct Hints(Mutex<Vec<(Invalidations, Option<Handle>)>>);

impl<W: Wire> Session<W> {
    /// Creates the session without connecting.
    pub(crate) fn new(wire: W) -> Self {
        Self::of(Arc::new(wire), Arc::default())
    }

    /// Creates one of several sessions with the same wire.
    pub(super) fn of(wire: Arc<W>, hints: Arc<Hints>) -> Self {
        Self { wire, hints, desk: Mutex::default(), holds: Arc::default() }
    }

    /// Tries to take the lock. Retries for a short time while another transaction has the row
    /// locked, as a purge does; between two tries the connection is free for other statements.
    pub(crate) async fn take(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mut pauses = ROW_PAUSES.iter();
        loop {
            let (claim, asked_at) = (claim.clone(), Instant::now());
            match self.ask(|reply| Command::Take { claim, asked_at, reply }).await?? {
                Answered::Attempt(attempt) => return Ok(attempt),
                Answered::RowLocked(error) => match pauses.next() {
                    Some(pause) => self.pause(*pause).await,
                    None => return Err(error),
                },
            }
        }
    }

    /// Sleeps by the timer of the session's runtime: the caller's runtime may end while another one
    /// polls this.
    fn pause(&self, pause: Duration) -> Sleep {
        let home = self.home();
        let _home = home.enter();
        sleep(pause)
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let wanted = claims.to_vec();
        match self.ask(|reply| Command::Renew { claims: wanted, reply }).await {
            Ok(answers) => answers.into_iter().map(Ok).collect(),
            Err(_) => claims.iter().map(|_| Err(self.wire.closed())).collect(),
        }
    }

    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let claim = claim.clone();
        self.ask(|reply| Command::Release { claim, reply }).await
    }

    /// Ensures that a fence finds the row of the claim's lock. Returns false if the claim holds
    /// nothing.
    pub(crate) async fn keep(&self, claim: &Claim) -> Result<bool, BackendError> {
        let claim = claim.clone();
        self.ask(|reply| Command::Keep { claim, reply }).await?
    }

    pub(crate) fn subscribe_invalidations(&self, hints: Invalidations) {
        self.hints.add(hints);
    }

    pub(super) fn holds(&self) -> bool {
        self.holds.load(Ordering::Acquire)
    }

    /// Closes the session, unless it holds locks, which may belong to another registry. The next
    /// acquisition opens a new one.
    pub(crate) async fn close(&self) {
        let commands = self.desk().as_ref().map(|desk| desk.commands.clone());
        let Some(commands) = commands else { return };
        let (reply, done) = oneshot::channel();
        if commands.urgent.send(Command::Close { reply }).await.is_ok() {
            let _ = done.await;
        }
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, BackendError> {
        let (reply, answer) = oneshot::channel();
        match self.begin(command(reply)) {
            Begin::Here(mut here) => {
                if let Some(answer) = poll_fn(|cx| here.poll(cx)).await {
                    answer.tell();
                }
            }
            Begin::Ask(commands, command) => {
                let sent = commands.line_of(&command).send(command).await;
                sent.map_err(|_| self.wire.closed().as_refused())?;
            }
        }
        answer.await.map_err(|_| self.wire.closed())
    }

    /// Starts the command. Opens a new connection actor if the runtime of the last one has ended.
    fn begin(&self, command: Command) -> Begin<W> {
        let mut desk = self.desk();
        let attended = desk.get_or_insert_with(|| self.open());
        let command = match attended.hands.begin(command, Desk::run) {
            Begun::Here(here) => return Begin::Here(here),
            Begun::Taken(command) => return Begin::Ask(attended.commands.clone(), command),
            Begun::Gone(command) => command,
        };
        *attended = self.open();
        match attended.hands.begin(command, Desk::run) {
            Begun::Here(here) => Begin::Here(here),
            // In a runtime that is about to end, the new task is gone too. Sending the command then
            // returns an error.
            Begun::Taken(command) | Begun::Gone(command) => {
                Begin::Ask(attended.commands.clone(), command)
            }
        }
    }

    fn open(&self) -> Attended<W> {
        let (urgent, urgent_inbox) = mpsc::channel(QUEUE_MAX);
        let (acquisitions, acquisitions_inbox) = mpsc::channel(QUEUE_MAX);
        let commands = Commands { urgent, acquisitions };
        let inbox = Inbox { urgent: urgent_inbox, acquisitions: acquisitions_inbox };
        self.holds.store(false, Ordering::Release);
        let desk = Desk {
            wire: Arc::clone(&self.wire),
            hints: Arc::clone(&self.hints),
            connection: None,
            held: HashMap::new(),
            runs: Runs::default(),
            holds: Arc::clone(&self.holds),
            look_at: None,
            overdue_from: None,
        };
        let home = self.home();
        let hands = Arc::new(Hands::new(desk, home.clone()));
        let work = home.spawn(attend(Attendance(Arc::clone(&hands)), inbox));
        Attended { hands, commands, work }
    }

    /// Returns the runtime of a registry. A caller's runtime may end while locks that it took are
    /// still held.
    fn home(&self) -> Handle {
        self.hints.home().unwrap_or_else(Handle::current)
    }

    fn desk(&self) -> MutexGuard<'_, Option<Attended<W>>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a command is executed.
enum Begin<W: Wire> {
    /// The caller runs it.
    Here(Here<Desk<W>>),
    /// The actor's task runs it.
    Ask(Commands, Command),
}

/// The queues of a session's connection. Renewals and releases are sent before acquisitions: they
/// cost a round trip each, while a lock that is not renewed in time is lost.
#[derive(Clone)]
struct Commands {
    urgent: mpsc::Sender<Command>,
    acquisitions: mpsc::Sender<Command>,
}

impl Commands {
    fn line_of(&self, command: &Command) -> &mpsc::Sender<Command> {
        let is_acquisition = matches!(command, Command::Take { .. });
        if is_acquisition && !mutated(Mutant::SessionRenewsInTurn) {
            &self.acquisitions
        } else {
            &self.urgent
        }
    }
}

/// The receiving ends of [`Commands`].
struct Inbox {
    urgent: mpsc::Receiver<Command>,
    acquisitions: mpsc::Receiver<Command>,
}

impl Inbox {
    /// Returns the next command, or `None` when all senders are dropped.
    async fn next(&mut self) -> Option<Command> {
        tokio::select! {
            biased;
            Some(command) = self.urgent.recv() => Some(command),
            Some(command) = self.acquisitions.recv() => Some(command),
            else => None,
        }
    }

    /// Returns the next command if one is queued. Skips acquisitions whose caller was dropped.
    fn next_queued(&mut self) -> Option<Command> {
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
impl<W: Wire> Drop for Session<W> {
    fn drop(&mut self) {
        if let Some(attended) = self.desk().take() {
            attended.work.abort();
            attended.hands.give_up();
        }
    }
}

impl<W: Wire> fmt::Debug for Session<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

impl Hints {
    /// Adds the receiver of a registry that is being built.
    pub(super) fn add(&self, hints: Invalidations) {
        let mut all = self.all();
        all.retain(|(hints, _)| hints.is_live());
        all.push((hints, Handle::try_current().ok()));
    }

    /// Returns the runtime of a live registry.
    fn home(&self) -> Option<Handle> {
        let all = self.all();
        let mut live = all.iter().filter(|(hints, _)| hints.is_live());
        live.find_map(|(_, home)| home.clone())
    }

    fn all(&self) -> MutexGuard<'_, Vec<(Invalidations, Option<Handle>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify<'a>(&self, keys: impl Iterator<Item = &'a Key>) {
        let all = self.all().clone();
        keys.for_each(|key| all.iter().for_each(|(hints, _)| hints.notify(key)));
    }
}

enum Command {
    Take { claim: Claim, asked_at: Instant, reply: oneshot::Sender<Result<Answered, BackendError>> },
    Renew { claims: Vec<Claim>, reply: oneshot::Sender<Vec<Renewal>> },
    Release { claim: Claim, reply: oneshot::Sender<Release> },
    Keep { claim: Claim, reply: oneshot::Sender<Result<bool, BackendError>> },
    Close { reply: oneshot::Sender<()> },
}

impl Command {
    fn is_awaited(&self) -> bool {
        !matches!(self, Self::Take { reply, .. } if reply.is_closed())
    }
}

/// The answer to an acquisition.
enum Answered {
    Attempt(Attempt),
    /// As [`Took::RowLocked`].
    RowLocked(BackendError),
}

/// The answer to a command, with its reply channel.
enum Answer {
    Take(oneshot::Sender<Result<Answered, BackendError>>, Result<Answered, BackendError>),
    Renew(oneshot::Sender<Vec<Renewal>>, Vec<Renewal>),
    Release(oneshot::Sender<Release>, Release),
    Keep(oneshot::Sender<Result<bool, BackendError>>, Result<bool, BackendError>),
    Close(oneshot::Sender<()>),
}

impl Answer {
    /// Sends the answer. The caller may have been dropped. Then an unreceived grant ends with its
    /// lease.
    fn tell(self) {
        match self {
            Self::Take(reply, answer) => drop(reply.send(answer)),
            Self::Renew(reply, answer) => drop(reply.send(answer)),
            Self::Release(reply, answer) => drop(reply.send(answer)),
            Self::Keep(reply, answer) => drop(reply.send(answer)),
            Self::Close(reply) => drop(reply.send(())),
        }
    }
}

/// The task of the connection actor. Ends when all senders are dropped; held locks then end with
/// the connection.
async fn attend<W: Wire>(attendance: Attendance<W>, mut inbox: Inbox) {
    let Attendance(hands) = &attendance;
    loop {
        let mut command = tokio::select! {
            biased;
            () = hands.idle() => None,
            command = inbox.next() => match command {
                Some(command) => Some(command),
                None => return,
            },
        };
        let Some((mut desk, left)) = hands.fetch().await else { return };
        if let Some(left) = left {
            left.tell();
        }
        loop {
            if desk.next_errand().is_some_and(|moment| moment <= Instant::now()) {
                desk.tend().await;
                desk.settle();
            }
            let Some(command) = command.take().or_else(|| inbox.next_queued()) else { break };
            desk.obey(command).await.tell();
        }
        hands.leave(desk);
    }
}

/// Drops the actor's state when the task ends.
struct Attendance<W: Wire>(Arc<Hands<Desk<W>>>);

impl<W: Wire> Drop for Attendance<W> {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

/// The state of the connection actor.
struct Desk<W: Wire> {
    wire: Arc<W>,
    hints: Arc<Hints>,
    connection: Option<W::Connection>,
    /// Empty if there is no connection.
    held: HashMap<Vec<u8>, Held>,
    runs: Runs,
    /// A copy of `!held.is_empty()` for other tasks.
    holds: Arc<AtomicBool>,
    /// When to check that the session still exists, if a lock is held.
    look_at: Option<Instant>,
    /// No lease ends before this.
    overdue_from: Option<Instant>,
}

struct Held {
    key: Key,
    claim: ClaimId,
    token: FencingToken,
    /// The claim in the row: its own, or an earlier one of this session.
    noted: ClaimId,
    label: Option<String>,
    since: Instant,
    /// The lock is released then, unless it is renewed.
    until: Instant,
}

impl<W: Wire> hands::Desk for Desk<W> {
    type Answer = Answer;

    fn next_errand(&self) -> Option<Instant> {
        self.overdue_from.into_iter().chain(self.look_at).min()
    }
}

impl<W: Wire> Desk<W> {
    fn run(mut self: Box<Self>, command: Command) -> Errand<Self> {
        Box::pin(async move {
            let answer = self.obey(command).await;
            (self, answer)
        })
    }

    async fn obey(&mut self, command: Command) -> Answer {
        let answer = match command {
            // The caller's own time-out has probably passed, and its next attempt is queued behind
            // this one.
            Command::Take { asked_at, reply, .. }
                if asked_at.elapsed() > self.wire.answer_limit() / QUEUED_PART =>
            {
                Answer::Take(reply, Err(self.wire.overdue()))
            }
            Command::Take { claim, reply, .. } => Answer::Take(reply, self.take(&claim).await),
            Command::Renew { claims, reply } => Answer::Renew(reply, self.renew(&claims).await),
            Command::Release { claim, reply } => Answer::Release(reply, self.release(&claim).await),
            Command::Keep { claim, reply } => Answer::Keep(reply, self.keep(&claim).await),
            Command::Close { reply } => {
                self.end_overdue().await;
                if self.held.is_empty() {
                    self.lose();
                }
                return Answer::Close(reply);
            }
        };
        self.settle();
        answer
    }

    /// Runs before an answer is sent: a caller that sees that nothing is held may drop the session.
    fn settle(&mut self) {
        if self.held.is_empty() {
            self.connection = self.connection.take().and_then(|spare| self.wire.spare(spare));
        }
        self.holds.store(!self.held.is_empty(), Ordering::Release);
    }

    async fn take(&mut self, claim: &Claim) -> Result<Answered, BackendError> {
        let name = self.wire.name(claim.key());
        self.end_overdue().await;
        if self.held.get(&name).is_some_and(|held| held.claim != claim.id()) {
            // An operator may just have ended the session, to free the key.
            self.look().await;
        }
        if let Some(held) = self.held.get(&name) {
            let left = held.until.saturating_duration_since(Instant::now());
            return Ok(Answered::Attempt(if held.claim == claim.id() {
                Attempt::Granted(Grant::new(Some(held.token), left.min(claim.lease())))
            } else {
                Attempt::Busy(held.told(left))
            }));
        }
        let asked_at = Instant::now();
        let taken = match self.ask_to_take(&name, claim).await {
            // An idle connection may break unnoticed. Nothing was held, so nothing is lost.
            Err(Failure::Broken(_)) if self.held.is_empty() => {
                self.lose();
                self.ask_to_take(&name, claim).await
            }
            taken => taken,
        };
        let taken = match self.sort(taken)? {
            Took::Grant(taken) => taken,
            Took::Busy(lease_left) => {
                self.runs.forget(&name);
                let busy = Busy::new();
                let busy = lease_left.into_iter().fold(busy, Busy::with_retry_after);
                return Ok(Answered::Attempt(Attempt::Busy(busy)));
            }
            Took::RowLocked(error) => {
                self.runs.forget(&name);
                return Ok(Answered::RowLocked(error));
            }
        };
        self.runs.went_on(&name, &taken, asked_at);
        let now = Instant::now();
        let token = taken.token;
        let held = Held {
            key: claim.key().clone(),
            claim: claim.id(),
            token,
            noted: taken.note.claim,
            label: claim.label().map(str::to_owned),
            since: now,
            until: now + claim.lease(),
        };
        self.note_end(held.until);
        self.held.insert(name, held);
        self.look_at.get_or_insert(now + LOOK_EVERY);
        let grant = Grant::new(Some(token), claim.lease());
        Ok(Answered::Attempt(Attempt::Granted(grant)))
    }

    async fn ask_to_take(&mut self, name: &[u8], claim: &Claim) -> Result<Took, Failure> {
        let limit = self.wire.answer_limit();
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                self.runs.clear();
                let connected = self.wire.connect().await;
                none.insert(connected.map_err(|error| Failure::Answered(error.as_refused()))?)
            }
        };
        let terms = self.runs.terms(name, claim, Instant::now());
        let taken = timeout(limit, self.wire.take(connection, claim, &terms)).await;
        taken.unwrap_or_else(|_| Err(Failure::Broken(self.wire.silent())))
    }

    /// One check of the session covers all of its locks.
    async fn renew(&mut self, claims: &[Claim]) -> Vec<Renewal> {
        if !self.held.is_empty() {
            self.look().await;
        }
        let now = Instant::now();
        let answers = claims.iter().map(|claim| {
            let held = self.held.get_mut(&self.wire.name(claim.key()));
            match held.filter(|held| held.claim == claim.id() && held.until > now) {
                Some(held) => {
                    held.until = held.until.max(now + claim.lease());
                    Renewal::Renewed(held.until - now)
                }
                None => Renewal::Gone,
            }
        });
        answers.collect()
    }

    async fn release(&mut self, claim: &Claim) -> Release {
        let name = self.wire.name(claim.key());
        self.end_overdue().await;
        if self.held.get(&name).is_none_or(|held| held.claim != claim.id()) {
            return Release::NotHeld;
        }
        // After a broken session it is unknown whether the lock was held until now, and a retry is
        // useless.
        if self.give_back(&name).await { Release::Freed } else { Release::NotHeld }
    }

    async fn keep(&mut self, claim: &Claim) -> Result<bool, BackendError> {
        let name = self.wire.name(claim.key());
        self.end_overdue().await;
        let held = self.held.get_mut(&name);
        let (Some(held), Some(connection)) = (held, &mut self.connection) else { return Ok(false) };
        if held.claim != claim.id() {
            return Ok(false);
        }
        // A fence prevents changes of the row. It would not exclude a grant that leaves the row
        // unchanged.
        if !mutated(Mutant::SessionForgetsFences) {
            self.runs.forget(&name);
        }
        if held.noted == claim.id() && held.since.elapsed() < KEPT_ANYWAY {
            return Ok(true);
        }
        let kept = self.wire.keep(connection, claim, held.token, held.noted);
        let kept = timeout(self.wire.answer_limit(), kept).await;
        let kept = kept.unwrap_or_else(|_| Err(Failure::Broken(self.wire.silent())));
        if kept.is_ok() {
            held.noted = claim.id();
        }
        self.sort(kept).map(|()| true)
    }

    /// Releases the lock. Returns whether the server confirmed it; otherwise the session is over.
    async fn give_back(&mut self, name: &[u8]) -> bool {
        let (Some(held), Some(connection)) = (self.held.get(name), &mut self.connection) else {
            return false;
        };
        let key = held.key.clone();
        let limit = self.wire.answer_limit();
        let given = timeout(limit, self.wire.give_back(connection, &key)).await;
        self.held.remove(name);
        let given = matches!(given, Ok(Ok(())));
        if !given {
            // Only the end of the session frees a lock whose release failed.
            self.lose();
        }
        given
    }

    /// Does the scheduled work: releases expired leases, and checks the session.
    async fn tend(&mut self) {
        self.end_overdue().await;
        if self.held.is_empty() {
            self.look_at = None;
        } else if self.look_at.is_some_and(|moment| moment <= Instant::now()) {
            self.look().await;
        }
    }

    async fn end_overdue(&mut self) {
        let now = Instant::now();
        if self.overdue_from.is_none_or(|moment| now < moment) {
            return;
        }
        let overdue = self.held.iter().filter(|(_, held)| held.until <= now);
        let overdue: Vec<Vec<u8>> = overdue.map(|(name, _)| name.clone()).collect();
        for name in overdue {
            // A failed release ends the session, which releases the lock too.
            self.give_back(&name).await;
        }
        self.overdue_from = self.held.values().map(|held| held.until).min();
    }

    fn note_end(&mut self, until: Instant) {
        self.overdue_from = Some(self.overdue_from.map_or(until, |first| first.min(until)));
    }

    async fn look(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let limit = self.wire.answer_limit();
        match timeout(limit, self.wire.look(connection)).await {
            Ok(Ok(()) | Err(Failure::Answered(_))) => {
                self.look_at = Some(Instant::now() + LOOK_EVERY);
            }
            Ok(Err(Failure::Broken(_))) | Err(_) => self.lose(),
        }
    }

    fn sort<T>(&mut self, answer: Result<T, Failure>) -> Result<T, BackendError> {
        answer.map_err(|failure| match failure {
            Failure::Answered(error) => error,
            Failure::Broken(error) => {
                self.lose();
                error
            }
        })
    }

    /// Ends the session, and notifies the holders.
    fn lose(&mut self) {
        // Closed before the notification, so that the server can detect it first.
        self.connection = None;
        self.look_at = None;
        self.overdue_from = None;
        self.runs.clear();
        let held = std::mem::take(&mut self.held);
        self.hints.notify(held.values().map(|held| &held.key));
    }
}

/// Covers the end of the runtime and panics while locks are held.
impl<W: Wire> Drop for Desk<W> {
    fn drop(&mut self) {
        self.lose();
    }
}

impl Held {
    fn told(&self, left: Duration) -> Busy {
        let holder = Holder::new(self.key.clone())
            .with_label(self.label.clone())
            .with_token(Some(self.token))
            .with_times(Some(self.since.elapsed()), Some(left));
        Busy::new().with_retry_after(left).with_holder(holder)
    }
}

/// The maximum number of queued commands. Further callers wait for capacity.
const QUEUE_MAX: usize = 1024;

/// An acquisition leaves the queue after the time limit for an answer, divided by this number.
const QUEUED_PART: u32 = 3;

/// The pauses between attempts while another transaction has the row locked. A purge ends sooner; a
/// transaction with a fence may take any time.
const ROW_PAUSES: [Duration; 4] = [
    Duration::from_millis(10),
    Duration::from_millis(30),
    Duration::from_millis(60),
    Duration::from_millis(100),
];

/// No row is purged sooner than this after a grant.
const KEPT_ANYWAY: Duration = PURGE_AFTER_MIN.saturating_sub(Duration::from_secs(5));

/// The interval between checks of the session while a lock is held.
const LOOK_EVERY: Duration = Duration::from_millis(300);
