//! Runs statements on one connection, one at a time. Checks that the open files are still at their
//! paths, where other processes use them.
//!
//! `serial_executor` orders the statements.
//!
//! SQLite permits one writer at a time among all connections of all processes. While another
//! connection writes, a statement that writes fails at once. This module retries it, instead of
//! SQLite's busy handler. Every attempt binds the statement again, and most bindings read the
//! clock. A delayed grant or renewal of an exclusive claim therefore uses no outdated time.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use registry_core::{BackendError, BackendErrorKind};
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Either, Executor, SqlSafeStr, SqliteConnection};
use tokio::sync::OwnedMutexGuard;

use super::error::{FileMismatch, at_path, explain, file_mismatch_error, is_busy};
use super::paths::{DatabasePaths, FileId, FileIds};
use super::serial_executor::{Panicked, Priority, SerialExecutor};
use super::statement::SqliteQuery;
use super::worker::WorkerThread;

/// Returns the options of every connection of the store.
///
/// `synchronous = NORMAL` does not sync at commit. A power cut may then undo the last grants and
/// releases. That is harmless: a grant is valid for one boot of the host only, so all locks are
/// free after the restart. Later tokens are still larger, because they are at least the wall
/// clock's time, unless that clock was set back. A crash of the process alone loses nothing,
/// because the kernel already has the log. Only a value block must survive a power cut; see
/// [`Durability::Synced`].
pub(super) fn options(path: &std::path::Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .busy_timeout(Duration::ZERO)
        .synchronous(SqliteSynchronous::Normal)
        // A statement whose rows do not fit into the buffer keeps its transaction open until the
        // rows are read. A renewal returns a row for each claim.
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
    /// The files that the connection has open. Only the call that opens the connection changes the
    /// file ids. Each successful check updates `checked_at`.
    verified: Mutex<Option<VerifiedFiles>>,
}

#[derive(Clone, Copy)]
struct VerifiedFiles {
    file_ids: FileIds,
    /// The time of the last check that the files are at their paths.
    checked_at: Instant,
}

/// Before a statement, the files are checked unless the last check is more recent than this time.
/// After the last attempt of a statement, they are always checked.
pub(super) const CHECK_VALID_FOR: Duration = Duration::from_millis(1);

/// How long a statement of low priority may be queued. Without this limit, the connection would
/// spend its time on statements of cancelled calls, while statements of waiting calls are queued.
const QUEUE_TIME_MAX: Duration = Duration::from_secs(1);

/// What a commit waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Durability {
    /// The kernel has the log.
    Unsynced,
    /// The log, with all earlier commits, is on the disk.
    Synced,
}

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
        let (priority, durability) = (Priority::Normal, Durability::Unsynced);
        self.run(priority, durability, Duration::MAX, make_statement).await.map(|(rows, _)| rows)
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
        let (priority, durability) = (Priority::Normal, Durability::Unsynced);
        self.run(priority, durability, busy_limit, make_statement).await.map(|(_, changes)| changes)
    }

    /// Like [`execute`](Self::execute). Returns once the change is on the disk.
    pub(super) async fn execute_synced(
        &self,
        make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<u64, BackendError> {
        let (priority, durability) = (Priority::Normal, Durability::Synced);
        let done = self.run(priority, durability, Duration::MAX, make_statement).await;
        done.map(|(_, changes)| changes)
    }

    /// Like [`fetch_all`](Self::fetch_all), with low priority.
    pub(super) async fn fetch_all_low_priority(
        &self,
        make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<Vec<SqliteRow>, BackendError> {
        let (priority, durability) = (Priority::Low, Durability::Unsynced);
        self.run(priority, durability, Duration::MAX, make_statement).await.map(|(rows, _)| rows)
    }

    /// Like [`execute`](Self::execute), with low priority.
    pub(super) async fn execute_low_priority(
        &self,
        make_statement: impl FnMut() -> SqliteQuery + Send + 'static,
    ) -> Result<u64, BackendError> {
        let (priority, durability) = (Priority::Low, Durability::Unsynced);
        let done = self.run(priority, durability, Duration::MAX, make_statement).await;
        done.map(|(_, changes)| changes)
    }

    async fn run(
        &self,
        priority: Priority,
        durability: Durability,
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
                let result = match durability {
                    Durability::Unsynced => run_once(make_statement(), connection).await,
                    Durability::Synced => run_synced(make_statement(), connection).await,
                };
                if let Err(error) = &result
                    && retry.pause_before_retry(error).await
                {
                    continue;
                }
                // The check precedes the return: if the files were replaced before the commit,
                // other processes do not see the commit. The commit may have happened, so the error
                // is not marked as refused.
                return match (connector.check(), result) {
                    (Ok(()), result) => {
                        result.map_err(|error| connector.on_error(&mut state, error))
                    }
                    (Err(file_mismatch_error), _) => Err(file_mismatch_error),
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
                // Only the checkpoint can fail. The next process that opens the file repeats it.
                let _ = connection.close().await;
            }
        };
        // After a panic, no connection is left to close.
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
    /// Returns the connection. Reopens it if its thread has ended.
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
    /// SQLite opens the files by name, and does not report which files it opened. A file that is at
    /// its path before and after the opening is the opened file. The file's inode cannot have been
    /// reused, because this connection or an earlier connection keeps the file open.
    async fn connect(&self) -> Result<SqliteConnection, BackendError> {
        // If the log (`-wal`) and its index (`-shm`) do not exist, the first attempt creates them.
        // So only the second attempt finds them before it connects. Connections of other processes
        // may remove the files when they close.
        const ATTEMPTS_MAX: u32 = 5;
        let path = &self.paths.path;
        let mut earlier_connections = Vec::new();
        let mut reason = FileMismatch::Log;
        for _ in 0..ATTEMPTS_MAX {
            let before = self.paths.current_ids();
            let connection = connect(&self.options, self.busy_timeout, &self.worker).await;
            let connection = connection.map_err(|error| explain(error, path))?;
            let after = self.paths.current_ids()?;
            if after.database != self.database_id {
                return Err(file_mismatch_error(path, FileMismatch::Database));
            }
            let is_same = before.is_ok_and(|before| before == after);
            if is_same && self.paths.has_shared_memory_open(&after) {
                *self.verified() =
                    Some(VerifiedFiles { file_ids: after, checked_at: Instant::now() });
                return Ok(connection);
            }
            reason = if is_same { FileMismatch::SharedMemory } else { FileMismatch::Log };
            earlier_connections.push(connection);
        }
        Err(file_mismatch_error(path, reason))
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
    fn panicked_error(&self, _: Panicked) -> BackendError {
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
/// The methods `fetch_one` and `fetch_optional` of sqlx stop at the first row. The commit then
/// happens while the statement is reset, and its error (a full disk) is lost. Its `execute` and
/// `fetch_all` also wait for the end of the stream. That wait costs one more thread switch, a sixth
/// of the total time.
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
    // The thread of the connection ended before the statement ended.
    Err(sqlx::Error::WorkerCrashed)
}

/// Runs a statement whose commit is on the disk when this returns.
async fn run_synced(
    statement: SqliteQuery,
    connection: &mut SqliteConnection,
) -> sqlx::Result<(Vec<SqliteRow>, u64)> {
    connection.execute("PRAGMA synchronous = FULL").await?;
    let result = run_once(statement, connection).await;
    // If this fails, later commits are synced too, which is only slower.
    let _ = connection.execute("PRAGMA synchronous = NORMAL").await;
    result
}

impl fmt::Debug for ReconnectingConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconnectingConnection")
            .field("path", &self.connector.paths.path)
            .finish_non_exhaustive()
    }
}

/// The retries of a statement while other processes write: their time limit and their pauses.
pub(super) struct BusyRetry {
    timeout: Duration,
    first_busy_at: Option<Instant>,
    attempts: u32,
    /// Provides the timers, because a timer of the caller's runtime would panic after the end of
    /// that runtime.
    worker: WorkerThread,
}

impl BusyRetry {
    pub(super) fn new(timeout: Duration, worker: &WorkerThread) -> Self {
        Self { timeout, first_busy_at: None, attempts: 0, worker: worker.clone() }
    }

    /// Returns whether to retry the statement that failed with `error`. If so, pauses before it
    /// returns.
    ///
    /// A write takes about 30 µs, so the first retries have no pause. Later pauses are random and
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

#[cfg(test)]
mod tests {
    //! Tests of faults of the file and its connections. No fault causes a wrong result.

    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use registry_core::{BackendErrorKind, LockAdmin, LockBackend, Registry, Release, Renewal};
    use sqlx::{ConnectOptions, Executor};

    use crate::sqlite::backend::SqliteBackend;
    use crate::sqlite::clock::ManualClock;
    use crate::sqlite::connection::{self, CHECK_VALID_FOR, Durability};
    use crate::sqlite::error::FileMismatch;
    use crate::sqlite::serial_executor::Priority;
    use crate::sqlite::tests::{
        TestFolder, acquire, begin_write, claim, expect_busy, key, rollback,
    };

    #[tokio::test]
    async fn an_error_names_operation_key_and_address() {
        let folder = TestFolder::new();
        let registry = Registry::builder(Arc::new(folder.open_backend().await)).build().unwrap();
        std::fs::remove_file(folder.file()).unwrap();
        tokio::time::sleep(CHECK_VALID_FOR).await;
        let error = registry.obtain("orders/42").lock().await.unwrap_err();
        let path = folder.0.path().canonicalize().unwrap().join("locks.db");
        assert_eq!(
            registry_testkit::assert_acquire_error(
                &error,
                "orders/42",
                &path.display().to_string()
            ),
            "sqlite: the file was removed or replaced while in use, so other processes may use another file; \
             restart all processes that use it"
        );
    }

    #[tokio::test]
    async fn a_file_that_stays_locked_is_a_retryable_error() {
        let folder = TestFolder::new();
        let config = folder.config().with_busy_timeout(Duration::from_millis(50));
        let backend = SqliteBackend::open(config).await.unwrap();
        let (held, other) = (claim("k"), claim("other"));
        acquire(&backend, &held).await;

        let mut writer = begin_write(&folder.file()).await;
        let error = backend.try_acquire(&other).await.unwrap_err();
        assert!(error.is_retryable() && error.refused(), "{error:?}");
        assert!(backend.release(&held).await.unwrap_err().is_retryable());
        assert!(
            backend.renew(std::slice::from_ref(&held)).await[0]
                .as_ref()
                .unwrap_err()
                .is_retryable()
        );
        // Readers do not block writers, and writers do not block readers.
        assert!(!backend.inspect(&key("k")).await.unwrap().is_empty());

        rollback(&mut writer).await;
        assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
        acquire(&backend, &other).await;
    }

    #[tokio::test]
    async fn a_failed_commit_is_never_returned_as_a_grant() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        // A deferred constraint is checked at the commit, after the statement has returned its row.
        // A full disk has the same effect on the log, but is harder to create in a test.
        for statement in [
            "PRAGMA foreign_keys = ON",
            "CREATE TABLE parent (id INTEGER PRIMARY KEY)",
            "CREATE TABLE child (id REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
            "CREATE TRIGGER break_commit AFTER INSERT ON lock_registry_locks BEGIN INSERT INTO child VALUES (7); END",
        ] {
            backend.writer.execute(move || sqlx::query(statement)).await.unwrap();
        }
        let failed = claim("k");
        backend.try_acquire(&failed).await.unwrap_err();
        // With the wall clock set back, the backend runs another statement (`ACQUIRE_ABOVE`), whose
        // row arrives before the commit fails.
        clock.set_wall(0);
        backend.try_acquire(&failed).await.unwrap_err();
        assert_eq!(backend.inspect(&key("k")).await.unwrap(), Vec::new());

        backend.writer.execute(|| sqlx::query("DROP TRIGGER break_commit")).await.unwrap();
        acquire(&backend, &failed).await;
    }

    #[tokio::test]
    async fn a_full_file_is_a_clear_error_and_locks_work_again_with_free_space() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let held = claim("held");
        acquire(&backend, &held).await;
        let limit =
            backend.writer.fetch_all(|| sqlx::query("PRAGMA max_page_count = 1")).await.unwrap();
        assert_eq!(limit.len(), 1);

        let claim_of_4_kb = |n: u32| claim(&format!("{n}{}", "x".repeat(4_000)));
        let error = loop {
            match backend.try_acquire(&claim_of_4_kb(fastrand::u32(..))).await {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains("space"), "{error}");
        // Operations that need no space still work.
        assert!(matches!(
            backend.renew(std::slice::from_ref(&held)).await[0],
            Ok(Renewal::Renewed(_))
        ));
        assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);

        backend.writer.fetch_all(|| sqlx::query("PRAGMA max_page_count = 100000")).await.unwrap();
        acquire(&backend, &claim_of_4_kb(0)).await;
    }

    #[tokio::test]
    async fn a_removed_or_replaced_file_ends_all_grants_in_it() {
        for replace in [false, true] {
            let folder = TestFolder::new();
            let backend = folder.open_backend().await;
            let held = claim("k");
            acquire(&backend, &held).await;
            for name in ["locks.db", "locks.db-wal", "locks.db-shm"] {
                std::fs::remove_file(folder.0.path().join(name)).unwrap();
            }
            let successor = if replace { Some(folder.open_backend().await) } else { None };
            if let Some(successor) = &successor {
                acquire(successor, &claim("k")).await;
            }
            assert_eq!(backend.release(&held).await.unwrap(), Release::NotHeld);
            assert_eq!(backend.renew(&[held]).await[0].as_ref().unwrap(), &Renewal::Gone);
            assert!(backend.inspect(&key("k")).await.is_err() && backend.list().await.is_err());
            assert!(backend.force_release(&key("k")).await.is_err());
            let error = backend.try_acquire(&claim("other")).await.unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
            assert!(error.to_string().contains("replaced"), "{error}");
            assert!(backend.diagnose().await.is_err());
        }
    }

    /// Removes a file while it is in use.
    fn remove(file: &Path) {
        std::fs::remove_file(file).unwrap();
    }

    /// Replaces a file by another with the same name, like a restored copy.
    fn replace(file: &Path) {
        let copy = file.with_extension("copy");
        std::fs::copy(file, &copy).unwrap();
        std::fs::rename(&copy, file).unwrap();
    }

    const HARD_LINK: &str = "more than one name";

    /// Checks that held grants end, that no lock is granted, and that the errors of the attempt and
    /// of `diagnose` give the reason.
    async fn check_all_grants_end(file: &str, change: impl Fn(&Path), message: &str) {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let (held, other) = (claim("k"), claim("other"));
        acquire(&backend, &held).await;
        acquire(&backend, &other).await;
        change(&folder.0.path().join(file));
        tokio::time::sleep(CHECK_VALID_FOR).await;

        let error = backend.try_acquire(&claim("free")).await.unwrap_err();
        assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Misconfigured, true));
        assert!(error.to_string().contains(message), "{error}");
        assert!(FileMismatch::from_error(&error).is_some(), "{error:?}");
        backend.try_acquire(&held).await.unwrap_err();
        for renewal in backend.renew(&[held.clone(), other.clone()]).await {
            assert_eq!(renewal.unwrap(), Renewal::Gone);
        }
        match backend.release(&held).await {
            Ok(released) => assert_eq!(released, Release::NotHeld),
            // Once the second name is removed, a repeated release frees the key.
            Err(error) => assert!(error.is_retryable() && message == HARD_LINK, "{error:?}"),
        }
        backend.inspect(&key("k")).await.unwrap_err();
        backend.list().await.unwrap_err();
        backend.force_release(&key("k")).await.unwrap_err();
        match backend.diagnose().await {
            Ok(findings) => {
                assert!(findings.iter().any(|finding| finding.message.contains(message)))
            }
            Err(error) => assert!(error.to_string().contains(message), "{error}"),
        }
    }

    #[tokio::test]
    async fn a_removed_log_ends_all_grants() {
        check_all_grants_end("locks.db-wal", remove, "(-wal) was removed or replaced").await;
    }

    #[tokio::test]
    async fn a_replaced_log_ends_all_grants() {
        check_all_grants_end("locks.db-wal", replace, "(-wal) was removed or replaced").await;
    }

    #[tokio::test]
    async fn removed_shared_memory_ends_all_grants() {
        check_all_grants_end("locks.db-shm", remove, "(-shm) was removed or replaced").await;
    }

    #[tokio::test]
    async fn replaced_shared_memory_ends_all_grants() {
        check_all_grants_end("locks.db-shm", replace, "(-shm) was removed or replaced").await;
    }

    #[tokio::test]
    async fn an_added_hard_link_ends_all_grants() {
        let link = |file: &Path| std::fs::hard_link(file, file.with_extension("second")).unwrap();
        check_all_grants_end("locks.db", link, HARD_LINK).await;
    }

    #[tokio::test]
    async fn grants_work_again_after_a_hard_link_is_removed() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let held = claim("held");
        acquire(&backend, &held).await;
        let second = folder.file().with_extension("second");
        std::fs::hard_link(folder.file(), &second).unwrap();
        tokio::time::sleep(CHECK_VALID_FOR).await;
        let error = backend.release(&held).await.unwrap_err();
        assert!(error.is_retryable(), "{error:?}");
        // The failed attempt may have written its row, which then stays until its lease ends.
        backend.try_acquire(&claim("refused")).await.unwrap_err();
        let findings = backend.diagnose().await.unwrap();
        assert!(
            findings.iter().any(|finding| finding.message.contains("hard link")),
            "{findings:?}"
        );
        remove(&second);
        acquire(&backend, &claim("k")).await;
        assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    }

    #[tokio::test]
    async fn a_statement_on_removed_files_returns_an_error() {
        for name in ["locks.db", "locks.db-wal", "locks.db-shm"] {
            let folder = TestFolder::new();
            let backend = folder.open_backend().await;
            let file = folder.0.path().join(name);
            // The file is removed after the check that precedes the statement.
            let statement = move || {
                remove(&file);
                sqlx::query("UPDATE lock_registry_meta SET sweep_key = x'00'")
            };
            let error = backend.writer.execute(statement).await.unwrap_err();
            assert!(FileMismatch::from_error(&error).is_some(), "{name}: {error:?}");
            assert!(!error.refused(), "{name}: the statement may have been committed");
        }
    }

    #[tokio::test]
    async fn checkpoints_and_vacuum_end_no_grant() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let held = claim("k");
        acquire(&backend, &held).await;
        for statement in [
            "PRAGMA wal_checkpoint(PASSIVE)",
            "PRAGMA wal_checkpoint(TRUNCATE)",
            "VACUUM",
            "PRAGMA wal_checkpoint(RESTART)",
            "PRAGMA wal_checkpoint(TRUNCATE)",
        ] {
            let other = folder.open_backend().await;
            let mut application = connection::options(&folder.file()).connect().await.unwrap();
            application.execute(statement).await.unwrap();
            // Turning the log off is refused.
            application.execute("PRAGMA journal_mode = DELETE").await.unwrap_err();
            sqlx::Connection::close(application).await.unwrap();
            other.close().await;
            let renewed = backend.renew(std::slice::from_ref(&held)).await.remove(0);
            assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{statement}: {renewed:?}");
            expect_busy(&backend, &claim("k")).await;
        }
        assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    }

    #[tokio::test]
    async fn opening_the_file_again_in_the_same_process_detects_replaced_shared_memory() {
        let folder = TestFolder::new();
        let before = folder.open_backend().await;
        acquire(&before, &claim("k")).await;
        // All connections of a process share the file that the first one opened. Other processes do
        // not see it.
        replace(&folder.0.path().join("locks.db-shm"));
        let error = SqliteBackend::open(folder.config()).await.unwrap_err();
        assert_eq!(FileMismatch::from_error(&error), Some(FileMismatch::SharedMemory), "{error}");
        drop(before);
    }

    #[tokio::test]
    async fn a_dropped_attempt_does_not_block_the_next_one() {
        use std::future::Future;
        use std::task::{Context, Waker};

        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        for polls in 0..6 {
            let dropped = claim("k");
            let mut attempt = Box::pin(backend.try_acquire(&dropped));
            let mut done = false;
            for _ in 0..polls {
                done = done
                    || attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
                tokio::task::yield_now().await;
            }
            drop(attempt);
            // A release by the same claim frees the key, whether the attempt was granted or not.
            backend.release(&dropped).await.unwrap();
            let next = claim("k");
            acquire(&backend, &next).await;
            expect_busy(&backend, &claim("k")).await;
            assert_eq!(backend.release(&next).await.unwrap(), Release::Freed);
        }
    }

    #[tokio::test]
    async fn an_unpolled_caller_does_not_delay_other_callers() {
        use std::task::{Context, Waker};

        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let held = claim("held");
        acquire(&backend, &held).await;
        // Another connection writes when the attempts begin, so that no attempt can end at once.
        let mut other = begin_write(&folder.file()).await;
        let stalled_claims = [claim("a"), claim("b"), claim("c")];
        let mut stalled = stalled_claims.each_ref().map(|claim| backend.try_acquire(claim));
        for attempt in &mut stalled {
            assert!(attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        rollback(&mut other).await;

        acquire(&backend, &claim("d")).await;
        assert!(matches!(
            backend.renew(std::slice::from_ref(&held)).await[0],
            Ok(Renewal::Renewed(_))
        ));
        assert!(!backend.inspect(&key("held")).await.unwrap().is_empty());
        assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
        for attempt in stalled {
            assert!(matches!(attempt.await.unwrap(), registry_core::Attempt::Granted(_)));
        }
    }

    /// `2` is `FULL`, `1` is `NORMAL`.
    #[tokio::test]
    async fn only_a_synced_statement_waits_for_the_disk() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let read = || sqlx::query("SELECT synchronous FROM pragma_synchronous");
        for (durability, expected) in [
            (Durability::Unsynced, 1),
            (Durability::Synced, 2),
            (Durability::Unsynced, 1),
            (Durability::Synced, 2),
        ] {
            let read = backend.writer.run(Priority::Normal, durability, Duration::MAX, read);
            let (rows, _) = read.await.unwrap();
            assert_eq!(backend.column::<i64>(&rows[0], 0).unwrap(), expected, "{durability:?}");
        }
    }

    #[tokio::test]
    async fn a_broken_connection_is_reopened() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let held = claim("k");
        acquire(&backend, &held).await;
        backend.writer.break_connection().await;
        backend.reader.break_connection().await;
        expect_busy(&backend, &claim("k")).await;
        assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);

        // The connection is never reopened on a file that no longer exists.
        backend.writer.break_connection().await;
        std::fs::remove_file(folder.file()).unwrap();
        let error = backend.writer.execute(|| sqlx::query("SELECT 1")).await.unwrap_err();
        assert!(error.refused(), "{error:?}");
        assert!(!folder.file().exists());
    }

    #[tokio::test]
    async fn connections_that_break_together_are_reopened_with_a_new_log() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let held = claim("k");
        acquire(&backend, &held).await;
        for _ in 0..20 {
            // No other process has the file open, so the last connection to close removes the log.
            tokio::join!(backend.writer.break_connection(), backend.reader.break_connection());
            let renewed = backend.renew(std::slice::from_ref(&held)).await.remove(0);
            assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{renewed:?}");
            expect_busy(&backend, &claim("k")).await;
        }
        assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    }

    #[tokio::test]
    async fn a_closed_store_returns_errors_at_once() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        backend.close().await;
        backend.close().await;
        let error = backend.try_acquire(&claim("k")).await.unwrap_err();
        assert!(error.refused() && error.to_string().contains("closed"), "{error}");
        assert!(backend.renew(&[claim("k")]).await[0].is_err());
        assert!(backend.inspect(&key("k")).await.is_err());
    }

    #[tokio::test]
    async fn an_error_names_manually_changed_tables() {
        for change in ["DROP TABLE lock_registry_locks", "DELETE FROM lock_registry_meta"] {
            let folder = TestFolder::new();
            let backend = folder.open_backend().await;
            backend.writer.execute(move || sqlx::query(change)).await.unwrap();
            let error = backend.try_acquire(&claim("k")).await.unwrap_err();
            assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
            assert!(error.to_string().contains("lock_registry_meta"), "{error}");
        }
    }

    #[tokio::test]
    async fn diagnose_finds_nothing_in_a_healthy_store() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let findings = backend.diagnose().await.unwrap();
        // A nearly full disk and missing inotify watches depend on the machine, and are no fault of
        // the store.
        assert!(
            findings
                .iter()
                .all(|f| f.message.contains("MiB left") || f.message.contains("inotify")),
            "{findings:?}"
        );
    }
}
