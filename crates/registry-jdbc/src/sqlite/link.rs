//! One connection, one statement at a time, on files that are still those of the others. Knows nothing of locks; the order of
//! arrival is kept by `serial_executor`.
//!
//! SQLite has one writer for all processes. While another one writes, a statement is refused at once and tried again here,
//! instead of inside SQLite's own busy handler: so every try reads the clock anew, and a statement that had to wait never
//! decides on a time that has passed.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use registry_core::{BackendError, BackendErrorKind};
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Either, Executor, SqlSafeStr, SqliteConnection};
use tokio::sync::OwnedMutexGuard;

use super::file::{Files, Identity, Place};
use super::serial_executor::{Panicked, Priority, SerialExecutor};
use super::statement::Statement;
use super::worker::Worker;
use crate::error::{Detached, detached, explain, is_busy};

/// How every connection of the store is set up.
///
/// `synchronous = NORMAL` does not sync at commit. A power cut may then undo the last grants and releases, but it also ends the
/// boot that they belong to: all locks are free afterwards, and newer tokens are larger because the wall clock is in them. A
/// crash of the process alone loses nothing, as the log is already with the kernel.
pub(super) fn options(path: &std::path::Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .busy_timeout(Duration::ZERO)
        .synchronous(SqliteSynchronous::Normal)
        // A statement that is not fetched must not keep its transaction open: a renewal returns a row for each claim.
        .row_buffer_size(1_024)
        .disable_statement_logging()
}

/// A connection that is made again when it breaks.
pub(super) struct Link {
    setup: Arc<Setup>,
    executor: SerialExecutor<State>,
}

struct Setup {
    place: Place,
    /// The database that was opened first; another one has other locks.
    database: Identity,
    options: SqliteConnectOptions,
    busy_timeout: Duration,
    worker: Worker,
    /// The files that the connection has open. They change with the connection, under its turn.
    opened: Mutex<Option<Opened>>,
}

#[derive(Clone, Copy)]
struct Opened {
    files: Files,
    /// When they were found to be in their place.
    seen_at: Instant,
}

/// How long the files may be taken to be in their place before a statement. After it they are looked at in any case.
pub(super) const SEEN_FOR: Duration = Duration::from_millis(1);

/// How long a statement of low priority may be queued. A caller that has given it up would still have it run, and then its release, while
/// the next ones wait.
const QUEUED_MAX: Duration = Duration::from_secs(1);

enum State {
    Open(SqliteConnection),
    /// The thread behind the connection is gone.
    Broken,
    Closed,
}

impl Link {
    /// Connects to the `database` at `place`. Calls that their callers do not poll run on `worker`.
    pub(super) async fn open(
        place: Place,
        database: Identity,
        options: SqliteConnectOptions,
        busy_timeout: Duration,
        worker: &Worker,
    ) -> Result<Self, BackendError> {
        let worker = worker.clone();
        let setup =
            Setup { place, database, options, busy_timeout, worker, opened: Mutex::default() };
        let connection = setup.connect().await.map_err(BackendError::as_refused)?;
        let executor = SerialExecutor::new(State::Open(connection), &setup.worker);
        Ok(Self { setup: Arc::new(setup), executor })
    }

    /// Runs a statement that returns rows. `make` is called for every try.
    pub(super) async fn rows(
        &self,
        make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<Vec<SqliteRow>, BackendError> {
        self.run(Priority::Normal, Duration::MAX, make).await.map(|(rows, _)| rows)
    }

    /// Runs a statement without rows and tells how many rows it changed. `make` is called for every try.
    pub(super) async fn changes(
        &self,
        make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<u64, BackendError> {
        self.changes_within(Duration::MAX, make).await
    }

    /// As [`changes`](Self::changes), with less patience towards other writers.
    pub(super) async fn changes_within(
        &self,
        busy_limit: Duration,
        make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<u64, BackendError> {
        self.run(Priority::Normal, busy_limit, make).await.map(|(_, changes)| changes)
    }

    /// As [`rows`](Self::rows), after all statements that are queued otherwise.
    pub(super) async fn rows_last(
        &self,
        make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<Vec<SqliteRow>, BackendError> {
        self.run(Priority::Low, Duration::MAX, make).await.map(|(rows, _)| rows)
    }

    /// As [`changes`](Self::changes), after all statements that are queued otherwise.
    pub(super) async fn changes_last(
        &self,
        make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<u64, BackendError> {
        self.run(Priority::Low, Duration::MAX, make).await.map(|(_, changes)| changes)
    }

    async fn run(
        &self,
        priority: Priority,
        busy_limit: Duration,
        mut make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<(Vec<SqliteRow>, u64), BackendError> {
        let setup = Arc::clone(&self.setup);
        let queued_at = Instant::now();
        let work = async move |mut state: Turn| {
            if priority == Priority::Low && queued_at.elapsed() > QUEUED_MAX {
                return Err(setup.overloaded());
            }
            let mut busy = Busy::new(setup.busy_timeout.min(busy_limit), &setup.worker);
            loop {
                let connection = setup.connection(&mut state).await?;
                // What is written to a log that is not the others' any more can damage theirs.
                setup.check_before().map_err(BackendError::as_refused)?;
                let result = run_once(make(), connection).await;
                if let Err(error) = &result
                    && busy.again(error).await
                {
                    continue;
                }
                // Before the answer is believed: if the files were taken away before the commit, whoever opens the new
                // ones does not see it. It may be written all the same, so it is not "refused".
                return match (setup.check(), result) {
                    (Ok(()), result) => result.map_err(|error| setup.failed(&mut state, error)),
                    (Err(detached), _) => Err(detached),
                };
            }
        };
        self.executor
            .call(priority, work)
            .await
            .unwrap_or_else(|panicked| Err(self.setup.no_answer(panicked)))
    }

    /// Tells whether the files that the connection has open are still those that others find.
    ///
    /// # Errors
    /// As [`Place::check`].
    pub(super) fn check(&self) -> Result<(), BackendError> {
        self.setup.check()
    }

    /// Compiles a statement, so that its first use is as fast as the others.
    pub(super) async fn prepare(&self, statement: &'static str) -> Result<(), BackendError> {
        let setup = Arc::clone(&self.setup);
        let work = async move |mut state: Turn| {
            let connection = setup.connection(&mut state).await?;
            match connection.prepare(statement.into_sql_str()).await {
                Ok(_) => Ok(()),
                Err(error) => Err(setup.failed(&mut state, error)),
            }
        };
        self.executor
            .call(Priority::Normal, work)
            .await
            .unwrap_or_else(|panicked| Err(self.setup.no_answer(panicked)))
    }

    /// Closes the connection; later statements are refused.
    pub(super) async fn close(&self) {
        let work = async |mut state: Turn| {
            if let State::Open(connection) = std::mem::replace(&mut *state, State::Closed) {
                // What can fail here is the checkpoint, which the next opener makes up for.
                let _ = connection.close().await;
            }
        };
        // It has nothing more to close if it panicked.
        let _ = self.executor.call(Priority::Normal, work).await;
    }

    /// As if the thread behind the connection had died.
    #[cfg(test)]
    pub(super) async fn break_connection(&self) {
        self.executor
            .call(Priority::Normal, async |mut state: Turn| *state = State::Broken)
            .await
            .unwrap();
    }
}

type Turn = OwnedMutexGuard<State>;

impl Setup {
    async fn connection<'s>(
        &self,
        state: &'s mut State,
    ) -> Result<&'s mut SqliteConnection, BackendError> {
        if matches!(state, State::Broken) {
            *state = State::Open(self.connect().await.map_err(BackendError::as_refused)?);
        }
        match state {
            State::Open(connection) => Ok(connection),
            State::Broken | State::Closed => Err(BackendError::new(
                BackendErrorKind::Misconfigured,
                format!("sqlite file {:?}: the store is closed; open another", self.place.path),
            )
            .as_refused()),
        }
    }

    /// Connects, and makes sure which files the connection has open.
    ///
    /// SQLite opens them by name and does not tell which it found. But if a file was under its name before and still is, it is
    /// the one; it cannot have been removed and its inode used again, as the connection itself, or one before it, keeps it.
    async fn connect(&self) -> Result<SqliteConnection, BackendError> {
        // The very first connection makes log and index, so a second one must see them. The others that close may remove
        // them once more.
        const TRIES_MAX: u32 = 5;
        let path = &self.place.path;
        let mut kept = Vec::new();
        let mut what = Detached::Log;
        for _ in 0..TRIES_MAX {
            let before = self.place.files();
            let connection = connect(&self.options, self.busy_timeout, &self.worker).await;
            let connection = connection.map_err(|error| explain(error, path))?;
            let after = self.place.files()?;
            if after.database != self.database {
                return Err(detached(path, Detached::Database));
            }
            let is_same = before.is_ok_and(|before| before == after);
            if is_same && self.place.shares_memory_by(&after) {
                *self.opened() = Some(Opened { files: after, seen_at: Instant::now() });
                return Ok(connection);
            }
            what = if is_same { Detached::SharedMemory } else { Detached::Log };
            kept.push(connection);
        }
        Err(detached(path, what))
    }

    fn check(&self) -> Result<(), BackendError> {
        let Some(opened) = *self.opened() else { return Ok(()) };
        let now = Instant::now();
        self.place.check(&opened.files)?;
        if let Some(opened) = self.opened().as_mut() {
            opened.seen_at = now;
        }
        Ok(())
    }

    fn check_before(&self) -> Result<(), BackendError> {
        let seen_at = self.opened().as_ref().map(|opened| opened.seen_at);
        if seen_at.is_some_and(|seen_at| seen_at.elapsed() < SEEN_FOR) {
            Ok(())
        } else {
            self.check()
        }
    }

    fn opened(&self) -> MutexGuard<'_, Option<Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The statement has not run.
    fn overloaded(&self) -> BackendError {
        let path = &self.place.path;
        BackendError::transient(format!(
            "sqlite file {path:?}: the statement waited for more than {QUEUED_MAX:?} for other statements of this process"
        ))
        .as_refused()
    }

    /// The statement may or may not have run.
    fn no_answer(&self, Panicked: Panicked) -> BackendError {
        BackendError::new(
            BackendErrorKind::Protocol,
            format!("sqlite file {:?}: a statement ended in a panic", self.place.path),
        )
    }

    fn failed(&self, state: &mut State, error: sqlx::Error) -> BackendError {
        if matches!(error, sqlx::Error::WorkerCrashed) {
            *state = State::Broken;
        }
        explain(error, &self.place.path)
    }
}

/// Connects and opens the log, with patience: the last of other connections may be tidying up.
pub(super) async fn connect(
    options: &SqliteConnectOptions,
    busy_timeout: Duration,
    worker: &Worker,
) -> sqlx::Result<SqliteConnection> {
    let mut busy = Busy::new(busy_timeout, worker);
    loop {
        let connected = async {
            let mut connection = options.connect().await?;
            // Not before the first read.
            connection.fetch_all("SELECT 1 FROM main.sqlite_schema LIMIT 1").await?;
            Ok(connection)
        };
        match connected.await {
            Err(error) if busy.again(&error).await => {}
            result => return result,
        }
    }
}

/// Runs a statement until SQLite says that it is done, which it says after the commit.
///
/// Not with `fetch_one` or `fetch_optional`: they stop at the first row, the commit then happens while the statement is reset,
/// and its failure (a full disk) goes unheard. Nor with `execute` or `fetch_all`: they wait for the stream to end, which is another
/// switch of threads, a sixth of the whole.
async fn run_once(
    statement: Statement,
    connection: &mut SqliteConnection,
) -> sqlx::Result<(Vec<SqliteRow>, u64)> {
    let mut answers = connection.fetch_many(statement);
    let mut rows = Vec::new();
    while let Some(answer) = answers.try_next().await? {
        match answer {
            Either::Right(row) => rows.push(row),
            Either::Left(done) => return Ok((rows, done.rows_affected())),
        }
    }
    // The thread ended in the middle of it.
    Err(sqlx::Error::WorkerCrashed)
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("path", &self.setup.place.path).finish_non_exhaustive()
    }
}

/// Patience with other writers.
pub(super) struct Busy {
    timeout: Duration,
    since: Option<Instant>,
    tries: u32,
    /// Has the clock of the pauses: a timer of the caller's runtime would panic once that runtime has ended.
    worker: Worker,
}

impl Busy {
    pub(super) fn new(timeout: Duration, worker: &Worker) -> Self {
        Self { timeout, since: None, tries: 0, worker: worker.clone() }
    }

    /// Whether the statement that failed with `error` shall be tried again; if so, after a pause.
    ///
    /// A write takes some 30 us, so the first tries come at once; then the pauses grow to 16 ms, at random so that processes
    /// do not march in step.
    pub(super) async fn again(&mut self, error: &sqlx::Error) -> bool {
        const TRIES_AT_ONCE: u32 = 3;
        const PAUSE_MS_MAX: u64 = 16;
        if !is_busy(error) || self.since.get_or_insert_with(Instant::now).elapsed() >= self.timeout
        {
            return false;
        }
        self.tries += 1;
        if self.tries <= TRIES_AT_ONCE {
            tokio::task::yield_now().await;
        } else {
            let longest = PAUSE_MS_MAX.min(1 << (self.tries - TRIES_AT_ONCE).min(32));
            self.worker.sleep(Duration::from_millis(fastrand::u64(1..=longest))).await;
        }
        true
    }
}
