//! Runs statements on one connection, one at a time, and checks that its files are still those that
//! other processes use.
//!
//! `serial_executor` orders the statements.
//!
//! SQLite has one writer for all processes. While another process writes, a statement fails at
//! once and is retried here, not in SQLite's busy handler. Every attempt reads the clock again, so
//! a delayed statement never uses an outdated time.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use registry_core::{BackendError, BackendErrorKind};
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Either, Executor, SqlSafeStr, SqliteConnection};
use tokio::sync::OwnedMutexGuard;

use super::error::{Detached, at_path, detached_error, explain, is_busy};
use super::paths::{DatabasePaths, FileId, FileIds};
use super::serial_executor::{Panicked, Priority, SerialExecutor};
use super::statement::SqliteQuery;
use super::worker::WorkerThread;

/// Returns the options of every connection of the store.
///
/// `synchronous = NORMAL` does not sync at commit. A power cut may then undo the last grants and
/// releases, but it also ends their boot, so all locks are free afterwards. Later tokens are still
/// larger, because they are based on the wall clock. A crash of the process alone loses nothing,
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

/// A connection that is reopened after its thread has ended.
pub(super) struct ReconnectingConnection {
    connector: Arc<FileConnector>,
    executor: SerialExecutor<SqliteConnectionState>,
}

struct FileConnector {
    paths: DatabasePaths,
    /// The identity of the database when the store was opened. Another database has other locks.
    database_id: FileId,
    options: SqliteConnectOptions,
    busy_timeout: Duration,
    worker: WorkerThread,
    /// The files that the connection has open. Only the call that reopens the connection changes
    /// them.
    verified: Mutex<Option<VerifiedFiles>>,
}

#[derive(Clone, Copy)]
struct VerifiedFiles {
    file_ids: FileIds,
    /// The time of the last check that they are at their paths.
    checked_at: Instant,
}

/// How long a check of the files is valid before a statement. After a statement they are always
/// checked.
pub(super) const CHECK_VALID_FOR: Duration = Duration::from_millis(1);

/// How long a statement of low priority may be queued. Otherwise the statements of cancelled
/// calls and then their releases would run before those of waiting calls.
const QUEUE_TIME_MAX: Duration = Duration::from_secs(1);

enum SqliteConnectionState {
    Open(SqliteConnection),
    /// The thread of the connection has ended.
    Broken,
    Closed,
}

impl ReconnectingConnection {
    /// Connects to the database `database_id` at `paths`. Calls that their callers do not poll run
    /// on `worker`.
    pub(super) async fn open(
        paths: DatabasePaths,
        database_id: FileId,
        options: SqliteConnectOptions,
        busy_timeout: Duration,
        worker: &WorkerThread,
    ) -> Result<Self, BackendError> {
        let worker = worker.clone();
        let connector = FileConnector {
            paths,
            database_id,
            options,
            busy_timeout,
            worker,
            verified: Mutex::default(),
        };
        let connection = connector.connect().await.map_err(BackendError::as_refused)?;
        let executor =
            SerialExecutor::new(SqliteConnectionState::Open(connection), &connector.worker);
        Ok(Self { connector: Arc::new(connector), executor })
    }

    /// Runs a statement that returns rows. Calls `make_statement` for every attempt.
    pub(super) async fn fetch_all(
        &self,
        make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<Vec<SqliteRow>, BackendError> {
        self.run(Priority::Normal, Duration::MAX, make_statement).await.map(|(rows, _)| rows)
    }

    /// Runs a statement without rows and returns the number of changed rows. Calls
    /// `make_statement` for every attempt.
    pub(super) async fn execute(
        &self,
        make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<u64, BackendError> {
        self.execute_within(Duration::MAX, make_statement).await
    }

    /// Like [`execute`](Self::execute), with a shorter limit for retries while other processes
    /// write.
    pub(super) async fn execute_within(
        &self,
        busy_limit: Duration,
        make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<u64, BackendError> {
        self.run(Priority::Normal, busy_limit, make_statement).await.map(|(_, changes)| changes)
    }

    /// Like [`fetch_all`](Self::fetch_all), with low priority.
    pub(super) async fn fetch_all_low_priority(
        &self,
        make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<Vec<SqliteRow>, BackendError> {
        self.run(Priority::Low, Duration::MAX, make_statement).await.map(|(rows, _)| rows)
    }

    /// Like [`execute`](Self::execute), with low priority.
    pub(super) async fn execute_low_priority(
        &self,
        make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<u64, BackendError> {
        self.run(Priority::Low, Duration::MAX, make_statement).await.map(|(_, changes)| changes)
    }

    async fn run(
        &self,
        priority: Priority,
        busy_limit: Duration,
        mut make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<(Vec<SqliteRow>, u64), BackendError> {
        let connector = Arc::clone(&self.connector);
        let queued_at = Instant::now();
        let work = async move |mut state: ConnectionGuard| {
            if priority == Priority::Low && queued_at.elapsed() > QUEUE_TIME_MAX {
                return Err(connector.queue_time_error());
            }
            let mut retry =
                BusyRetry::new(connector.busy_timeout.min(busy_limit), &connector.worker);
            loop {
                let connection = connector.connection(&mut state).await?;
                // A write to a replaced log can damage the database of the other processes.
                connector.check_unless_recent().map_err(BackendError::as_refused)?;
                let result = run_once(make_statement(), connection).await;
                if let Err(error) = &result
                    && retry.pause_before_retry(error).await
                {
                    continue;
                }
                // Checked before the result is returned: if the files were replaced before the
                // commit, other processes do not see it. The commit may have happened, so the error
                // is not "refused".
                return match (connector.check(), result) {
                    (Ok(()), result) => {
                        result.map_err(|error| connector.on_error(&mut state, error))
                    }
                    (Err(detached_error), _) => Err(detached_error),
                };
            }
        };
        self.executor
            .call(priority, work)
            .await
            .unwrap_or_else(|panicked| Err(self.connector.panicked_error(panicked)))
    }

    /// Checks that the files that the connection has open are still at their paths.
    ///
    /// # Errors
    /// As for [`DatabasePaths::check`].
    pub(super) fn check(&self) -> Result<(), BackendError> {
        self.connector.check()
    }

    /// Compiles a statement, so that its first use is as fast as later ones.
    pub(super) async fn prepare(&self, statement: &'static str) -> Result<(), BackendError> {
        let connector = Arc::clone(&self.connector);
        let work = async move |mut state: ConnectionGuard| {
            let connection = connector.connection(&mut state).await?;
            match connection.prepare(statement.into_sql_str()).await {
                Ok(_) => Ok(()),
                Err(error) => Err(connector.on_error(&mut state, error)),
            }
        };
        self.executor
            .call(Priority::Normal, work)
            .await
            .unwrap_or_else(|panicked| Err(self.connector.panicked_error(panicked)))
    }

    /// Closes the connection. Later statements return an error.
    pub(super) async fn close(&self) {
        let work = async |mut state: ConnectionGuard| {
            if let SqliteConnectionState::Open(connection) =
                std::mem::replace(&mut *state, SqliteConnectionState::Closed)
            {
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
            .call(Priority::Normal, async |mut state: ConnectionGuard| {
                *state = SqliteConnectionState::Broken
            })
            .await
            .unwrap();
    }
}

type ConnectionGuard = OwnedMutexGuard<SqliteConnectionState>;

impl FileConnector {
    async fn connection<'s>(
        &self,
        state: &'s mut SqliteConnectionState,
    ) -> Result<&'s mut SqliteConnection, BackendError> {
        if matches!(state, SqliteConnectionState::Broken) {
            *state = SqliteConnectionState::Open(
                self.connect().await.map_err(BackendError::as_refused)?,
            );
        }
        match state {
            SqliteConnectionState::Open(connection) => Ok(connection),
            SqliteConnectionState::Broken | SqliteConnectionState::Closed => {
                let message = "the store is closed; open a new one";
                Err(at_path(BackendErrorKind::Misconfigured, &self.paths.path, message)
                    .as_refused())
            }
        }
    }

    /// Connects, and verifies which files the connection has open.
    ///
    /// SQLite opens them by name and does not report which file it opened. But a file that was at
    /// its path before and after is the opened file. Its inode cannot have been reused, because
    /// this connection or an earlier one keeps the file open.
    async fn connect(&self) -> Result<SqliteConnection, BackendError> {
        // The first connection creates log and index, so only the second attempt can find them
        // before it connects. Other connections that close may remove them again.
        const ATTEMPTS_MAX: u32 = 5;
        let path = &self.paths.path;
        let mut earlier_connections = Vec::new();
        let mut reason = Detached::Log;
        for _ in 0..ATTEMPTS_MAX {
            let before = self.paths.current_ids();
            let connection = connect(&self.options, self.busy_timeout, &self.worker).await;
            let connection = connection.map_err(|error| explain(error, path))?;
            let after = self.paths.current_ids()?;
            if after.database != self.database_id {
                return Err(detached_error(path, Detached::Database));
            }
            let is_same = before.is_ok_and(|before| before == after);
            if is_same && self.paths.has_shared_memory_open(&after) {
                *self.verified() =
                    Some(VerifiedFiles { file_ids: after, checked_at: Instant::now() });
                return Ok(connection);
            }
            reason = if is_same { Detached::SharedMemory } else { Detached::Log };
            earlier_connections.push(connection);
        }
        Err(detached_error(path, reason))
    }

    fn check(&self) -> Result<(), BackendError> {
        let Some(verified) = *self.verified() else { return Ok(()) };
        let now = Instant::now();
        self.paths.check(&verified.file_ids)?;
        if let Some(verified) = self.verified().as_mut() {
            verified.checked_at = now;
        }
        Ok(())
    }

    fn check_unless_recent(&self) -> Result<(), BackendError> {
        let checked_at = self.verified().as_ref().map(|verified| verified.checked_at);
        if checked_at.is_some_and(|checked_at| checked_at.elapsed() < CHECK_VALID_FOR) {
            Ok(())
        } else {
            self.check()
        }
    }

    fn verified(&self) -> MutexGuard<'_, Option<VerifiedFiles>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the error for a statement that was not run.
    fn queue_time_error(&self) -> BackendError {
        let message = format!(
            "the statement was queued for longer than {QUEUE_TIME_MAX:?} behind other statements of this process; retry, or reduce the \
             number of concurrent calls"
        );
        at_path(BackendErrorKind::Transient, &self.paths.path, message).as_refused()
    }

    /// Returns the error for a statement that may have run.
    fn panicked_error(&self, Panicked: Panicked) -> BackendError {
        let message = "a statement panicked, so its outcome is unknown; report this bug";
        at_path(BackendErrorKind::Protocol, &self.paths.path, message)
    }

    fn on_error(&self, state: &mut SqliteConnectionState, error: sqlx::Error) -> BackendError {
        if matches!(error, sqlx::Error::WorkerCrashed) {
            *state = SqliteConnectionState::Broken;
        }
        explain(error, &self.paths.path)
    }
}

/// Connects and opens the log. Retries while the last connection of another process deletes the
/// log.
pub(super) async fn connect(
    options: &SqliteConnectOptions,
    busy_timeout: Duration,
    worker: &WorkerThread,
) -> sqlx::Result<SqliteConnection> {
    let mut retry = BusyRetry::new(busy_timeout, worker);
    loop {
        let connected = async {
            let mut connection = options.connect().await?;
            // SQLite opens the log only at the first read.
            connection.fetch_all("SELECT 1 FROM main.sqlite_schema LIMIT 1").await?;
            Ok(connection)
        };
        match connected.await {
            Err(error) if retry.pause_before_retry(&error).await => {}
            result => return result,
        }
    }
}

/// Runs a statement until SQLite reports that it is done, which is after the commit.
///
/// `fetch_one` and `fetch_optional` stop at the first row. The commit then happens while the
/// statement is reset, and its error (a full disk) is lost. `execute` and `fetch_all` wait for the
/// end of the stream. This costs one more thread switch, a sixth of the total time.
async fn run_once(
    statement: SqliteQuery,
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

impl fmt::Debug for ReconnectingConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconnectingConnection")
            .field("path", &self.connector.paths.path)
            .finish_non_exhaustive()
    }
}

/// The retry limit and the pauses while other processes write.
pub(super) struct BusyRetry {
    timeout: Duration,
    first_busy_at: Option<Instant>,
    attempts: u32,
    /// Provides the timers: a timer of the caller's runtime would panic after that runtime ended.
    worker: WorkerThread,
}

impl BusyRetry {
    pub(super) fn new(timeout: Duration, worker: &WorkerThread) -> Self {
        Self { timeout, first_busy_at: None, attempts: 0, worker: worker.clone() }
    }

    /// Returns whether to retry the statement that failed with `error`. If so, returns after a
    /// pause.
    ///
    /// A write takes about 30 us, so the first retries have no pause. Later pauses are random and
    /// grow to 16 ms, so that processes do not retry simultaneously.
    pub(super) async fn pause_before_retry(&mut self, error: &sqlx::Error) -> bool {
        const IMMEDIATE_RETRIES: u32 = 3;
        const PAUSE_MS_MAX: u64 = 16;
        if !is_busy(error)
            || self.first_busy_at.get_or_insert_with(Instant::now).elapsed() >= self.timeout
        {
            return false;
        }
        self.attempts += 1;
        if self.attempts <= IMMEDIATE_RETRIES {
            tokio::task::yield_now().await;
        } else {
            let longest = PAUSE_MS_MAX.min(1 << (self.attempts - IMMEDIATE_RETRIES).min(32));
            self.worker.sleep(Duration::from_millis(fastrand::u64(1..=longest))).await;
        }
        true
    }
}
