//! Runs statements on one connection, one at a time, and checks that its files are still those that
//! other processes use.
//!
//! Contains no lock logic. `serial_executor` orders the statements.
//!
//! SQLite has one writer for all processes. While another process writes, a statement is refused at
//! once and retried here, not in SQLite's busy handler. So every try reads the clock again, and a
//! statement that had to wait never uses an outdated time.

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

/// Returns the options of every connection of the store.
///
/// `synchronous = NORMAL` does not sync at commit. A power cut may then undo the last grants and
/// releases, but it also ends their boot, so all locks are free afterwards. Newer tokens are larger
/// all the same, because they contain the wall clock. A crash of the process alone loses nothing,
/// because the kernel already has the log.
pub(super) fn options(path: &std::path::Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .busy_timeout(Duration::ZERO)
        .synchronous(SqliteSynchronous::Normal)
        // An unread statement must not keep its transaction open, and a renewal returns a row for
        // each claim.
        .row_buffer_size(1_024)
        .disable_statement_logging()
}

/// A connection that is reopened when it breaks.
pub(super) struct Link {
    setup: Arc<Setup>,
    executor: SerialExecutor<State>,
}

struct Setup {
    place: Place,
    /// The database that was opened first. Another one has other locks.
    database: Identity,
    options: SqliteConnectOptions,
    busy_timeout: Duration,
    worker: Worker,
    /// The files that the connection has open. Only the call that reopens the connection changes
    /// them.
    opened: Mutex<Option<Opened>>,
}

#[derive(Clone, Copy)]
struct Opened {
    files: Files,
    /// When they were last found at their paths.
    seen_at: Instant,
}

/// How long a check of the files is valid before a statement. After a statement they are always
/// checked.
pub(super) const SEEN_FOR: Duration = Duration::from_millis(1);

/// How long a statement of low priority may be queued. Otherwise the statements of callers that
/// gave up would run, and then their releases, while newer ones wait.
const QUEUED_MAX: Duration = Duration::from_secs(1);

enum State {
    Open(SqliteConnection),
    /// The thread of the connection has ended.
    Broken,
    Closed,
}

impl Link {
    /// Connects to the `database` at `place`. Calls that are not polled by their callers run on
    /// `worker`.
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

    /// Runs a statement without rows and returns the number of changed rows. `make` is called for
    /// every try.
    pub(super) async fn changes(
        &self,
        make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<u64, BackendError> {
        self.changes_within(Duration::MAX, make).await
    }

    /// Like [`changes`](Self::changes), with a shorter limit for retries while other processes
    /// write.
    pub(super) async fn changes_within(
        &self,
        busy_limit: Duration,
        make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<u64, BackendError> {
        self.run(Priority::Normal, busy_limit, make).await.map(|(_, changes)| changes)
    }

    /// Like [`rows`](Self::rows), with low priority.
    pub(super) async fn rows_last(
        &self,
        make: impl FnMut() -> Statement + Send + 'static,
    ) -> Result<Vec<SqliteRow>, BackendError> {
        self.run(Priority::Low, Duration::MAX, make).await.map(|(rows, _)| rows)
    }

    /// Like [`changes`](Self::changes), with low priority.
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
                // A write to a replaced log can damage the database of the other processes.
                setup.check_before().map_err(BackendError::as_refused)?;
                let result = run_once(make(), connection).await;
                if let Err(error) = &result
                    && busy.again(error).await
                {
                    continue;
                }
                // Checked before the result is returned: if the files were replaced before the
                // commit, other processes do not see it. The commit may have happened, so the error
                // is not "refused".
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

    /// Checks that the files that the connection has open are still at their paths.
    ///
    /// # Errors
    /// As for [`Place::check`].
    pub(super) fn check(&self) -> Result<(), BackendError> {
        self.setup.check()
    }

    /// Compiles a statement, so that its first use is as fast as later ones.
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

    /// Closes the connection. Later statements return an error.
    pub(super) async fn close(&self) {
        let work = async |mut state: Turn| {
            if let State::Open(connection) = std::mem::replace(&mut *state, State::Closed) {
                // Only the checkpoint can fail, and the next process that opens the file repeats
                // it.
                let _ = connection.close().await;
            }
        };
        // After a panic there is nothing to close.
        let _ = self.executor.call(Priority::Normal, work).await;
    }

    /// Simulates the end of the connection's thread.
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

    /// Connects, and verifies which files the connection has open.
    ///
    /// SQLite opens them by name and does not report which it opened. But a file that was at its
    /// path before and after is the one. Its inode cannot have been reused, because this connection
    /// or an earlier one keeps the file open.
    async fn connect(&self) -> Result<SqliteConnection, BackendError> {
        // The first connection creates log and index, so only the second try can see them before.
        // Other connections that close may remove them again.
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

    /// Returns the error for a statement that was not run.
    fn overloaded(&self) -> BackendError {
        let path = &self.place.path;
        BackendError::transient(format!(
            "sqlite file {path:?}: the statement waited for more than {QUEUED_MAX:?} for other statements of this process"
        ))
        .as_refused()
    }

    /// Returns the error for a statement that may have run.
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

/// Connects and opens the log. Retries while another process's last connection cleans up.
pub(super) async fn connect(
    options: &SqliteConnectOptions,
    busy_timeout: Duration,
    worker: &Worker,
) -> sqlx::Result<SqliteConnection> {
    let mut busy = Busy::new(busy_timeout, worker);
    loop {
        let connected = async {
            let mut connection = options.connect().await?;
            // SQLite opens the log only at the first read.
            connection.fetch_all("SELECT 1 FROM main.sqlite_schema LIMIT 1").await?;
            Ok(connection)
        };
        match connected.await {
            Err(error) if busy.again(&error).await => {}
            result => return result,
        }
    }
}

/// Runs a statement until SQLite reports that it is done, which is after the commit.
///
/// `fetch_one` and `fetch_optional` stop at the first row. The commit then happens while the
/// statement is reset, and its error (a full disk) is lost. `execute` and `fetch_all` wait for the
/// end of the stream. That is one more thread switch, a sixth of the total time.
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
    // The thread ended before the statement did.
    Err(sqlx::Error::WorkerCrashed)
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("path", &self.setup.place.path).finish_non_exhaustive()
    }
}

/// The retry limit and the pauses while other processes write.
pub(super) struct Busy {
    timeout: Duration,
    since: Option<Instant>,
    tries: u32,
    /// For timers: a timer of the caller's runtime would panic once that runtime has ended.
    worker: Worker,
}

impl Busy {
    pub(super) fn new(timeout: Duration, worker: &Worker) -> Self {
        Self { timeout, since: None, tries: 0, worker: worker.clone() }
    }

    /// Returns whether to retry the statement that failed with `error`. If so, returns after a
    /// pause.
    ///
    /// A write takes about 30 us, so the first retries come at once. Then the pauses grow to 16 ms,
    /// randomly, so that processes do not retry in step.
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
