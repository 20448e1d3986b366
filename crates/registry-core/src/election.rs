//! Leader election: at most one candidate of a role runs its work at a time, across all processes.
//!
//! The leader is the holder of the role's lock. The role's value block contains a record: the
//! leader's label and data, and the start of its term. A candidate acquires the lock, writes this
//! record, and runs the work. To step down, it signals the work, and waits until the work ends, for
//! at most the rest of the lease. It then writes that the role is vacant, releases the lock, and
//! reports [`Leadership::Follower`].

use std::convert::Infallible;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::background::BackgroundReleaser;
use crate::clock::{Moment, sleep};
use crate::engine::{backoff, lost_error};
use crate::error::{InvalidOption, LockError, LostReason};
use crate::event::LockEvent;
use crate::fencing::FencingToken;
use crate::guard::{Hold, LockGuard};
use crate::local_lock::LocalLock;
use crate::lock::DistributedLock;
use crate::mode::ClaimMode;
use crate::once::{host_time, unix_millis};
use crate::options::LockOptions;
use crate::owner::Owner;
use crate::value::LockValue;

/// A candidate for a role, from [`LockRegistryExt::election`](crate::LockRegistryExt::election). At
/// most one candidate of a role leads at a time.
///
/// Clones are the same candidate. A handle on which [`run`](Self::run) is not called can still
/// observe the role.
#[derive(Clone)]
pub struct Election {
    lock: DistributedLock,
    /// Candidates with a priority hold this lock in shared mode while they campaign. The label is
    /// the priority.
    candidates: DistributedLock,
    priority: Option<u32>,
    options: LockOptions,
    data: Arc<[u8]>,
    candidate: Arc<Candidate>,
}

/// The state that the clones of a candidate share.
struct Candidate {
    leadership: watch::Sender<Leadership>,
    /// Signals the current term to stop.
    stop_sender: Mutex<Option<watch::Sender<bool>>>,
    /// Locked while [`Election::run_term`] campaigns or leads.
    running: tokio::sync::Mutex<()>,
}

/// Whether a candidate leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leadership {
    /// Another candidate leads, or the role is vacant. The work of this candidate does not run.
    Follower,
    /// This candidate leads, under this fencing token.
    Leader(FencingToken),
}

/// The leader of a role, as every client can read it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Leader {
    /// The fencing token of the leader's term. A later term has a larger token.
    pub token: FencingToken,
    /// The label of the leader, if it has one.
    pub label: Option<String>,
    /// The [data](Election::data) of the leader.
    pub data: Vec<u8>,
    /// The time at which the term began: on the store's clock if clients can read that clock,
    /// otherwise on the leader's.
    pub since: SystemTime,
}

impl Election {
    /// The maximum length of the [data](Self::data) of a candidate, in bytes.
    pub const DATA_BYTES_MAX: usize = 1_024;

    pub(crate) fn new(lock: DistributedLock, candidates: DistributedLock) -> Self {
        // Without a fair lock, a candidate that has stepped down could become leader again while
        // another one waits.
        let engine = lock.local_lock().map(|local_lock| local_lock.engine());
        let is_fair_on_request = engine.is_ok_and(|engine| engine.capabilities.fair_on_request);
        let options =
            if is_fair_on_request { LockOptions::new().fair(true) } else { LockOptions::new() };
        Self {
            lock,
            candidates,
            priority: None,
            options,
            data: Arc::default(),
            candidate: Arc::new(Candidate {
                leadership: watch::Sender::new(Leadership::Follower),
                stop_sender: Mutex::default(),
                running: tokio::sync::Mutex::default(),
            }),
        }
    }

    /// Sets the label of this candidate, for example its host. [`leader`](Self::leader) returns it
    /// while the candidate leads.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.options = self.options.label(label);
        self
    }

    /// Sets the lease: how long the role stays taken if the leader's process dies.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options = self.options.lease(lease);
        self
    }

    /// Sets the data of this candidate, for example its address and version. At most
    /// [`DATA_BYTES_MAX`](Self::DATA_BYTES_MAX) bytes. [`leader`](Self::leader) returns the data
    /// while the candidate leads.
    #[must_use]
    pub fn data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.data = data.into().into();
        self
    }

    /// Sets the priority of this candidate. When the role becomes vacant, candidates with a
    /// priority leave it to a waiting candidate whose priority is higher.
    ///
    /// A priority is a preference, not a guarantee. If no other candidate becomes leader for the
    /// length of a lease, the candidate takes the role nevertheless. A leader does not step down
    /// for a candidate with a higher priority. Candidates without a priority ignore the priorities
    /// of others. The store must support [shared locks](crate::Capabilities::shared) and
    /// [labels](crate::Capabilities::labels), and [report holders](crate::Capabilities::inspect).
    /// While it campaigns, a candidate with a priority holds the shared lock of the key
    /// `ROLE/candidates`.
    #[must_use]
    pub fn priority(mut self, priority: u32) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Returns the name of the role.
    #[must_use]
    pub fn role(&self) -> &str {
        self.lock.key()
    }

    /// Campaigns, runs `work` for each term that this candidate wins, steps down when `work` ends,
    /// and campaigns again. After a store error, the engine emits an event, and the candidate
    /// retries.
    ///
    /// If the term is lost, `work` is dropped at its current `.await`. To clean up after a loss,
    /// await [`Term::lost`] in another task, which must not write without the fencing token. After
    /// [`step_down`](Self::step_down), `work` has the rest of the lease to end. The same applies
    /// while the registry closes, but at most until the time limit of the close. Of several `run`
    /// calls on clones, only one campaigns or leads at a time. After each term, the next waiting
    /// call campaigns.
    ///
    /// # Errors
    /// Returns `Ok` when the registry is closed. [`LockError::Unsupported`] if the store has no
    /// [value blocks](crate::Capabilities::values), or lacks what a [`priority`](Self::priority)
    /// needs. [`LockError::InvalidKey`], [`LockError::InvalidOption`] and
    /// [`LockError::ForeignValue`], which a retry cannot resolve.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`. The background releaser releases the lock and sends
    /// [`Leadership::Follower`].
    ///
    /// # Panics
    /// If `work` panics. The lock is then released in the background.
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistryExt, Registry};
    /// use registry_core::election::Leadership;
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let election = registry.election("scheduler").label("host 1");
    /// let candidate = election.clone();
    /// let running = candidate.run(|term| async move {
    ///     println!("leading under token {}", term.token());
    ///     term.stopping().await;
    /// });
    /// let mut leadership = election.leadership();
    /// let leads = async {
    ///     let leads = leadership.wait_for(|now| matches!(now, Leadership::Leader(_))).await;
    ///     leads.map(|now| *now)
    /// };
    /// tokio::select! {
    ///     ended = running => ended?,
    ///     leads = leads => println!("{:?}", leads?),
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn run<W, F>(&self, mut work: W) -> Result<(), LockError>
    where
        W: FnMut(Term) -> F,
        F: Future<Output = ()>,
    {
        let mut failures = 0;
        loop {
            match self.run_term(&mut work).await {
                Ok(_) => {
                    failures = 0;
                    // Without this pause, work that ends at once would make the candidate send
                    // requests without end.
                    sleep(backoff(0)).await;
                }
                Err(LockError::Closed) => return Ok(()),
                Err(error @ (LockError::Backend { .. } | LockError::Lost { .. })) => {
                    self.emit_failure(&error);
                    // A candidate that cannot lead leaves the role to others for longer.
                    let is_permanent =
                        matches!(error, LockError::Backend { .. }) && !error.is_retryable();
                    let pause = backoff(failures);
                    let pause = if is_permanent { pause * 30 } else { pause };
                    tokio::select! {
                        biased;
                        () = self.lock.local_lock()?.engine().closing.wait() => return Ok(()),
                        () = sleep(pause) => {}
                    }
                    failures = failures.saturating_add(1);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Emits an event for a failed read or write of the role's record. For requests for the lock,
    /// the engine emits the event.
    fn emit_failure(&self, error: &LockError) {
        if let LockError::Backend { operation, source, .. } = error
            && *operation != "acquire"
            && let Ok(local_lock) = self.lock.local_lock()
        {
            let (key, mode) = (local_lock.key().as_str(), ClaimMode::Exclusive);
            let failed = || LockEvent::AttemptFailed { key, mode, error: source };
            local_lock.engine().emit(failed);
        }
    }

    /// Campaigns until this candidate leads, runs `work` for one term, and steps down. Returns the
    /// output of `work`. Returns `None` if `work` was dropped because it did not end in time after
    /// [`step_down`](Self::step_down) or while the registry closed. Also returns `None` if
    /// `step_down` was called during the campaign; `work` does not start then.
    ///
    /// # Errors
    /// As [`DistributedLock::lock`], [`DistributedLock::value`] and [`LockGuard::set_value`].
    /// [`LockError::Lost`] if the term was lost before `work` ended. [`LockError::Closed`] if the
    /// registry is closed. Otherwise as [`run`](Self::run).
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub async fn run_term<F: Future>(
        &self,
        work: impl FnOnce(Term) -> F,
    ) -> Result<Option<F::Output>, LockError> {
        let _running = self.candidate.running.lock().await;
        let (stop, stopping) = watch::channel(false);
        let stop = StopSignal::install(&self.candidate, stop);
        let engine = self.lock.local_lock()?.engine();
        engine.emit(|| LockEvent::Campaigning { key: self.role() });
        let (guard, vacant_record) = self.campaign().await?;
        if !guard.is_held() {
            let reason = guard.hold().grant().loss().unwrap_or(LostReason::Expired);
            return Err(lost_error(guard.claim().key(), reason));
        }
        // Read before `Leader` is sent, so that a step-down in response to `Leader` stops work that
        // has started.
        let stops_before_work = *stopping.borrow();
        // Ended last, so that `Follower` is sent after the work has ended and the lock is released.
        // If this future is dropped, the background releaser sends `Follower`.
        let reported = ReportedTerm::begin(&self.candidate, &guard);
        let term = Term { hold: Arc::clone(guard.hold()), stopping: stopping.clone() };
        // A step-down during the campaign ends the term before its work begins.
        let output = if stops_before_work {
            Ok(None)
        } else {
            let mut work = pin!(guard.protect(work(term)));
            tokio::select! {
                biased;
                output = &mut work => output.map(Some),
                () = self.wait_for_stop_request(&guard, stopping) => {
                    let limit = guard.valid_for();
                    tokio::select! {
                        biased;
                        output = &mut work => output.map(Some),
                        () = sleep(limit) => Ok(None),
                    }
                }
            }
        };
        // The last poll of the work may have lasted beyond the lease.
        let output = output.and_then(|output| match guard.hold().grant().loss() {
            Some(reason) => Err(lost_error(guard.claim().key(), reason)),
            None => Ok(output),
        });
        if output.is_ok() {
            // If this write fails, observers detect the vacancy because the lock has no holder,
            // unless the store cannot report holders. The engine emits a failed release as an
            // event, and repeats it.
            _ = guard.set_value(vacant_record.to_bytes()).await;
            _ = guard.unlock().await;
        }
        reported.end();
        drop(stop);
        output
    }

    /// Waits until [`step_down`](Self::step_down) is called or the registry is closing. In the
    /// latter case, calls `step_down`, because `close` waits for the release of the role.
    async fn wait_for_stop_request(&self, guard: &LockGuard, stopping: watch::Receiver<bool>) {
        tokio::select! {
            biased;
            () = wait_for_stop_signal(stopping) => {}
            () = guard.hold().grant().engine().closing.wait() => {
                self.step_down();
            }
        }
    }

    /// Waits until this candidate holds the lock of the role, and writes that it leads. For
    /// programs that run the work elsewhere, such as in a child process; others call
    /// [`run`](Self::run).
    ///
    /// The caller ends its work when the guard is lost. To step down, it first ends its work,
    /// writes [`VacantRecord::to_bytes`] with [`LockGuard::set_value`], and then unlocks the
    /// guard. `campaign` sends nothing to [`leadership`](Self::leadership).
    ///
    /// # Errors
    /// As [`run_term`](Self::run_term).
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    pub async fn campaign(&self) -> Result<(LockGuard, VacantRecord), LockError> {
        if self.data.len() > Self::DATA_BYTES_MAX {
            return Err(InvalidOption::data_too_long(self.data.len(), Self::DATA_BYTES_MAX).into());
        }
        // The value block is checked before the wait, so that the error for a foreign value is
        // returned at once. It is checked again while the lock is held.
        self.parse_record(self.lock.read_value().await?.value.as_ref())?;
        let guard = match self.priority {
            Some(priority) => self.lock_by_priority(priority).await?,
            None => self.lock_role().await?,
        };
        let read = guard.read_value().await?;
        self.parse_record(read.value.as_ref())?;
        let now = read.now.unwrap_or_else(host_time);
        let read_at = Moment::now();
        let label = guard.claim().label().map(str::to_owned);
        let record = Record { leads: true, since: now, label, data: self.data.to_vec() };
        guard.set_value_while_held(record.to_bytes()).await?;
        Ok((guard, VacantRecord { time_at_read: now, read_at }))
    }

    /// Acquires the lock of the role. The owner is new, because two candidates of one owner would
    /// share the lock by re-entry, and lead at the same time.
    async fn lock_role(&self) -> Result<LockGuard, LockError> {
        self.lock.lock_with(self.options.clone().owner(&Owner::new())).await
    }

    /// Acquires the lock of the role. Meanwhile, other candidates see the priority of this one.
    async fn lock_by_priority(&self, priority: u32) -> Result<LockGuard, LockError> {
        let engine = self.candidates.local_lock()?.engine();
        engine.require_mode(ClaimMode::Shared)?;
        engine.require_inspect()?;
        if !engine.capabilities.labels {
            let store = engine.capabilities.store;
            return Err(LockError::Unsupported { capability: "labels", store });
        }
        tokio::select! {
            biased;
            never = self.announce(priority) => match never {},
            guard = self.lock_unless_outranked(priority) => guard,
        }
    }

    /// Holds the shared lock of the candidates until the future is dropped. Each call uses a new
    /// owner. With the owner of another candidate, this candidate would re-enter that candidate's
    /// hold, whose label is another priority. Without the lock, the candidate campaigns
    /// nevertheless, so errors are only retried.
    async fn announce(&self, priority: u32) -> Infallible {
        let mut options = LockOptions::new().label(priority.to_string()).owner(&Owner::new());
        options.lease = self.options.lease;
        let mut failures = 0;
        loop {
            match self.candidates.acquire(ClaimMode::Shared, options.clone()).await {
                Ok(guard) => {
                    guard.lost().await;
                    failures = 0;
                }
                Err(_) => failures += 1,
            }
            sleep(backoff(failures)).await;
        }
    }

    /// Acquires the lock of the role, and releases it again while a candidate with a higher
    /// priority campaigns. That candidate may be unable to lead. After the length of a lease
    /// without a new leader, this candidate therefore keeps the lock.
    async fn lock_unless_outranked(&self, priority: u32) -> Result<LockGuard, LockError> {
        let (mut deadline, mut last_token, mut attempt) = (None, None, 0);
        loop {
            let guard = self.lock_role().await?;
            if !self.is_outranked(priority).await {
                return Ok(guard);
            }
            let now = Moment::now();
            // The token of the last leader, which changes with each term.
            let token = guard.value().await?.map(|value| value.token);
            if token != last_token {
                (deadline, last_token, attempt) = (None, token, 0);
            }
            let lease = guard.hold().grant().lease_length();
            if now >= *deadline.get_or_insert_with(|| now.after(lease)) {
                return Ok(guard);
            }
            // The background releaser repeats a failed release.
            _ = guard.unlock().await;
            sleep(backoff(attempt)).await;
            attempt += 1;
        }
    }

    /// Returns whether a candidate with a higher priority campaigns. Returns false after an error,
    /// so that the role does not stay vacant.
    async fn is_outranked(&self, priority: u32) -> bool {
        let holders = self.candidates.holders().await.unwrap_or_default();
        let priorities = holders.iter().filter_map(|holder| holder.label.as_deref()?.parse().ok());
        priorities.max().is_some_and(|highest: u32| highest > priority)
    }

    /// Parses the record in the value block of the role.
    fn parse_record(&self, value: Option<&LockValue>) -> Result<Option<Record>, LockError> {
        let foreign = || LockError::ForeignValue {
            key: self.role().to_owned(),
            expected: "the record of an election",
        };
        value.map(|value| Record::parse(&value.bytes).ok_or_else(foreign)).transpose()
    }

    /// Signals the work of the current term to stop. During a campaign, the next term ends before
    /// its work begins. Returns whether this candidate leads or campaigns, in [`run`](Self::run) or
    /// [`run_term`](Self::run_term).
    ///
    /// The work has the rest of the lease to end. The role is free when
    /// [`leadership`](Self::leadership) reports [`Leadership::Follower`]. [`run`](Self::run) then
    /// campaigns again. If the store is fair, [always](crate::Capabilities::fair) or [on
    /// request](crate::Capabilities::fair_on_request), this candidate queues behind all waiting
    /// ones.
    pub fn step_down(&self) -> bool {
        self.candidate.stop_sender().as_ref().is_some_and(|stop| stop.send(true).is_ok())
    }

    /// Returns a receiver that reports whether this candidate leads.
    ///
    /// [`Leadership::Follower`] is sent only after the work has ended. Unless the term was lost, it
    /// is sent after the store has responded to the release or the release has failed. If the
    /// future of [`run`](Self::run) is dropped, the work is dropped with it, and the background
    /// releaser sends `Follower` and releases the lock. Do not hold a borrow of the receiver across
    /// an `.await`: it blocks the sender.
    #[must_use]
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.candidate.leadership.subscribe()
    }

    /// Returns the leader of the role, or `None` if the role is vacant. Any client can call it.
    ///
    /// The leader is read from the value block, and is returned only while the store reports a
    /// holder of the lock. A leader that died is therefore returned until its lease ends, or, if
    /// the store [cannot report holders](crate::Capabilities::inspect), until the next leader
    /// writes.
    ///
    /// # Errors
    /// As [`DistributedLock::value`] and [`DistributedLock::holders`]. [`LockError::ForeignValue`]
    /// if the value block of the role is not the record of an election.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn leader(&self) -> Result<Option<Leader>, LockError> {
        let Some(value) = self.lock.value().await? else { return Ok(None) };
        let Some(record) = self.parse_record(Some(&value))?.filter(|record| record.leads) else {
            return Ok(None);
        };
        if self.lock.local_lock()?.engine().capabilities.inspect {
            let holders = self.lock.holders().await?;
            // A holder with a larger token is a new leader that has not written its record yet.
            let has_written = |token: FencingToken| token <= value.token;
            if !holders.iter().any(|holder| holder.token.is_none_or(has_written)) {
                return Ok(None);
            }
        }
        let Record { since, label, data, .. } = record;
        Ok(Some(Leader { token: value.token, label, data, since }))
    }

    /// Returns an observer of the role, which reports each change of its leader.
    #[must_use]
    pub fn observe(&self) -> LeaderObserver {
        LeaderObserver { election: self.clone(), seen: None, interval: LeaderObserver::INTERVAL }
    }
}

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Election").field("role", &self.role()).finish_non_exhaustive()
    }
}

impl Candidate {
    fn stop_sender(&self) -> std::sync::MutexGuard<'_, Option<watch::Sender<bool>>> {
        self.stop_sender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates the value block of a vacant role, which a leader writes when it steps down. From
/// [`Election::campaign`].
#[derive(Debug, Clone, Copy)]
pub struct VacantRecord {
    /// The time at `read_at`, on the clock of [`Leader::since`].
    time_at_read: SystemTime,
    read_at: Moment,
}

impl VacantRecord {
    /// Returns the value block of a vacant role, with the current time.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let since = self.time_at_read + Moment::now().since(self.read_at);
        Record { leads: false, since, label: None, data: Vec::new() }.to_bytes()
    }
}

/// The stop signal of a campaign and its term. Dropping this value removes the signal.
struct StopSignal<'a>(&'a Candidate);

impl<'a> StopSignal<'a> {
    fn install(candidate: &'a Candidate, stop: watch::Sender<bool>) -> Self {
        *candidate.stop_sender() = Some(stop);
        Self(candidate)
    }
}

impl Drop for StopSignal<'_> {
    fn drop(&mut self) {
        *self.0.stop_sender() = None;
    }
}

/// Sends `Leader` when it is created, and `Follower` when it ends or is dropped.
struct ReportedTerm {
    follower: Option<FollowerOnDrop>,
    background: BackgroundReleaser,
}

/// Sends `Follower` when it is dropped, unless another term has begun. Emits
/// [`LockEvent::LeadershipEnded`] in any case.
struct FollowerOnDrop {
    candidate: Arc<Candidate>,
    local_lock: Arc<LocalLock>,
    token: FencingToken,
}

impl ReportedTerm {
    fn begin(candidate: &Arc<Candidate>, guard: &LockGuard) -> Self {
        let token = guard.fencing_token();
        candidate.leadership.send_replace(Leadership::Leader(token));
        let local_lock = Arc::clone(guard.hold().grant().local_lock());
        let engine = local_lock.engine();
        engine.emit(|| LockEvent::LeadershipBegan { key: local_lock.key().as_str(), token });
        let background = engine.background.clone();
        let candidate = Arc::clone(candidate);
        Self { follower: Some(FollowerOnDrop { candidate, local_lock, token }), background }
    }

    fn end(mut self) {
        self.follower = None;
    }
}

impl Drop for ReportedTerm {
    fn drop(&mut self) {
        if let Some(follower) = self.follower.take() {
            // In the background, because the task that drops the future of `run` may hold a borrow
            // of the receiver, which would block the sender.
            self.background.submit_call(Box::pin(async move { drop(follower) }));
        }
    }
}

impl Drop for FollowerOnDrop {
    fn drop(&mut self) {
        let (key, token) = (self.local_lock.key().as_str(), self.token);
        self.candidate.leadership.send_if_modified(|current| {
            let is_current_term = *current == Leadership::Leader(token);
            if is_current_term {
                *current = Leadership::Follower;
            }
            is_current_term
        });
        self.local_lock.engine().emit(|| LockEvent::LeadershipEnded { key, token });
    }
}

/// Waits until a term is signalled to stop. Never resolves if the term ends without the signal.
async fn wait_for_stop_signal(mut stopping: watch::Receiver<bool>) {
    if stopping.wait_for(|stops| *stops).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// One term of a leader.
#[derive(Clone)]
pub struct Term {
    hold: Arc<Hold>,
    stopping: watch::Receiver<bool>,
}

impl Term {
    /// Returns the fencing token of this term. Send it with each write: a resource that compares
    /// tokens refuses the writes of an earlier term.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.hold.token()
    }

    /// Returns whether this candidate certainly leads now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.hold.is_held()
    }

    /// Waits until the term is lost and returns the reason. As [`LockGuard::lost`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub fn lost(&self) -> impl Future<Output = LostReason> + Send + 'static + use<> {
        Arc::clone(&self.hold).lost()
    }

    /// Waits until [`Election::step_down`] is called, or the registry begins to close. The work
    /// then has the rest of the lease to end, and while the registry closes, at most the time limit
    /// of the close. Never resolves otherwise.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub fn stopping(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        wait_for_stop_signal(self.stopping.clone())
    }
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Term").field("token", &self.token()).finish_non_exhaustive()
    }
}

/// Reports each change of a role's leader, from [`Election::observe`].
#[derive(Debug)]
pub struct LeaderObserver {
    election: Election,
    /// The last result of [`changed`](Self::changed). `None` before its first call.
    seen: Option<Option<Leader>>,
    interval: Duration,
}

impl LeaderObserver {
    /// The default interval between two reads of the store.
    pub const INTERVAL: Duration = Duration::from_secs(1);

    /// Sets the interval between two reads of the store.
    #[must_use]
    pub fn with_interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Waits until the leader differs from the one that this method returned last. The first call
    /// returns the current leader. `None` means that the role is vacant.
    ///
    /// Several changes within one interval are reported as one. Transient store errors are retried.
    ///
    /// # Errors
    /// As [`Election::leader`], for errors that a retry cannot resolve.
    ///
    /// # Cancel safety
    /// Dropping the future loses no change.
    pub async fn changed(&mut self) -> Result<Option<Leader>, LockError> {
        let mut failures = 0;
        loop {
            match self.election.leader().await {
                Ok(leader) if self.seen.as_ref() != Some(&leader) => {
                    self.seen = Some(leader.clone());
                    return Ok(leader);
                }
                Ok(_) => {
                    failures = 0;
                    sleep(self.interval).await;
                }
                Err(error) if error.is_retryable() => {
                    sleep(backoff(failures)).await;
                    failures = failures.saturating_add(1);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The record of a role in its value block.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Record {
    /// False if the leader has stepped down.
    leads: bool,
    since: SystemTime,
    label: Option<String>,
    data: Vec<u8>,
}

impl Record {
    /// Parses the value block of a role. Returns `None` for any other value block.
    fn parse(bytes: &[u8]) -> Option<Self> {
        // Label and data come last, because they may contain line breaks.
        let mut lines = bytes.splitn(5, |byte| *byte == b'\n');
        let mut line = || std::str::from_utf8(lines.next()?).ok();
        if line()? != HEADER {
            return None;
        }
        let leads = match line()? {
            "leader" => true,
            "vacant" => false,
            _ => return None,
        };
        let since = line()?.strip_prefix("since ")?.parse().ok()?;
        let since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(since))?;
        let label_bytes: Option<usize> = match line()? {
            "no label" => None,
            length => Some(length.strip_prefix("label ")?.parse().ok()?),
        };
        let (label, data) = lines.next()?.split_at_checked(label_bytes.unwrap_or(0))?;
        let label = label_bytes.map(|_| String::from_utf8(label.to_vec()));
        Some(Self { leads, since, label: label.transpose().ok()?, data: data.to_vec() })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let state = if self.leads { "leader" } else { "vacant" };
        let label = match &self.label {
            Some(label) => format!("label {}\n{label}", label.len()),
            None => "no label\n".to_owned(),
        };
        let text = format!("{HEADER}\n{state}\nsince {}\n{label}", unix_millis(self.since));
        [text.as_bytes(), &self.data].concat()
    }
}

/// The first line of the record. The number is the version of the format.
const HEADER: &str = "lock-registry election 1";

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_late_end_of_a_dropped_term_does_not_hide_the_next_term() {
        let registry = crate::Registry::in_memory().unwrap();
        let election = crate::LockRegistryExt::election(&registry, "role");
        let guards = [registry.obtain("a"), registry.obtain("b")]
            .map(|lock| async move { lock.lock().await.unwrap() });
        let [first, second] = futures_util::future::join_all(guards).await.try_into().unwrap();
        drop(ReportedTerm::begin(&election.candidate, &first));
        let next = ReportedTerm::begin(&election.candidate, &second);
        registry.idle().await;
        let leader = Leadership::Leader(second.fencing_token());
        assert_eq!(*election.leadership().borrow(), leader);
        next.end();
        assert_eq!(*election.leadership().borrow(), Leadership::Follower);
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let since = SystemTime::UNIX_EPOCH + Duration::from_millis(1_764_081_600_123);
        for label in [None, Some(""), Some("no label"), Some("höst 1\n100 %")] {
            for data in [&b""[..], b"\n\n", b"10.0.0.1:80 \xff\0"] {
                let (label, data) = (label.map(str::to_owned), data.to_vec());
                let record = Record { leads: label.is_some(), since, label, data };
                assert_eq!(Record::parse(&record.to_bytes()), Some(record));
            }
        }
        for other in
            ["", HEADER, "lock-registry election 1\nleader\nsince 1\nno label", "x\n\n\n\n"]
        {
            assert_eq!(Record::parse(other.as_bytes()), None, "{other:?}");
        }
    }
}
