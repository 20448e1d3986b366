//! Opens the file: checks its tables, creates missing tables, and detects a reboot.

use std::path::Path;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::{ConnectOptions, Connection, Row, SqliteConnection};

use super::clock::BootId;
use super::config::SqliteConfig;
use super::connection::{self, BusyRetry, ReconnectingConnection};
use super::error::{at_path, explain};
use super::paths::DatabasePaths;
use super::sql;
use super::worker::WorkerThread;

/// The result of opening a store.
#[derive(Debug)]
pub(super) struct OpenedStore {
    pub(super) writer: ReconnectingConnection,
    pub(super) reader: ReconnectingConnection,
    pub(super) worker: WorkerThread,
    pub(super) paths: DatabasePaths,
    /// The id that the file received when its tables were created.
    pub(super) store_id: Vec<u8>,
}

/// Opens the store for a process of this boot.
pub(super) async fn open(config: &SqliteConfig, boot: BootId) -> Result<OpenedStore, BackendError> {
    let paths = DatabasePaths::resolve(&config.path)?;
    let path = paths.path.as_path();
    let worker = WorkerThread::start()?;

    // Dropping this future drops the connections below, which rolls back an unfinished
    // transaction.
    let mut retry = BusyRetry::new(config.busy_timeout, &worker);
    let (connection, store_id) = loop {
        match initialize(path, boot).await {
            Ok(done) => break done,
            Err(OpenError::Sqlite(error)) if retry.pause_before_retry(&error).await => {}
            Err(OpenError::Sqlite(error)) => return Err(explain(error, path)),
            Err(OpenError::Refused(error)) => return Err(error),
        }
    };
    let database_id = paths.database_id().map_err(BackendError::as_refused)?;

    // This connection stays open until the writer and the reader are open, so that SQLite does not
    // delete the log and the index.
    let options = connection::options(path).create_if_missing(false);
    let connect = |options| {
        ReconnectingConnection::open(
            paths.clone(),
            database_id,
            options,
            config.busy_timeout,
            &worker,
        )
    };
    let reader = connect(options.clone().pragma("query_only", "ON")).await?;
    let writer = connect(options).await?;
    // Only the checkpoint can fail. SQLite repeats it later.
    let _ = connection.close().await;
    for statement in [sql::ACQUIRE_AT, sql::RELEASE] {
        writer.prepare(statement).await?;
    }
    Ok(OpenedStore { writer, reader, store_id, worker, paths })
}

enum OpenError {
    Sqlite(sqlx::Error),
    Refused(BackendError),
}

impl From<sqlx::Error> for OpenError {
    fn from(error: sqlx::Error) -> Self {
        Self::Sqlite(error)
    }
}

async fn initialize(path: &Path, boot: BootId) -> Result<(SqliteConnection, Vec<u8>), OpenError> {
    let mut connection = connection::options(path).connect().await?;
    // The read comes first, so that an unusable file (no database, newer tables) stays unchanged.
    let mut meta = read_meta(&mut connection, path).await?;
    enable_wal(&mut connection, path).await?;
    if meta.is_none() {
        create_tables(&mut connection).await?;
        meta = read_meta(&mut connection, path).await?;
    }
    let Some(MetaRow { store_id, boot: last_boot }) = meta else {
        return Err(OpenError::Refused(corrupt_meta(path)));
    };
    if last_boot != boot.bytes() {
        // The new boot id frees all rows of the earlier boot. A process of the earlier boot then
        // gets errors.
        sqlx::query(sql::SAVE_BOOT).bind(boot.bytes().to_vec()).execute(&mut connection).await?;
    }
    Ok((connection, store_id))
}

struct MetaRow {
    store_id: Vec<u8>,
    boot: Vec<u8>,
}

async fn read_meta(
    connection: &mut SqliteConnection,
    path: &Path,
) -> Result<Option<MetaRow>, OpenError> {
    if sqlx::query(sql::ALL_TABLES).fetch_all(&mut *connection).await?.is_empty() {
        return Ok(None);
    }
    let rows = sqlx::query(sql::META).fetch_all(connection).await?;
    let row = rows.first().ok_or_else(|| OpenError::Refused(corrupt_meta(path)))?;
    let version: i64 = row.try_get(0)?;
    if version > sql::VERSION {
        return Err(OpenError::Refused(
            at_path(
                BackendErrorKind::Misconfigured,
                path,
                format!(
                    "the lock tables are of version {version}, this program supports version {known}; update the \
                     program",
                    known = sql::VERSION
                ),
            )
            .as_refused(),
        ));
    }
    // A later version must migrate older tables here. No version is older than 1.
    if version < sql::VERSION {
        return Err(OpenError::Refused(corrupt_meta(path)));
    }
    Ok(Some(MetaRow { boot: row.try_get(1)?, store_id: row.try_get(2)? }))
}

/// Enables the write-ahead log. Then readers never block a writer, and every commit changes a file
/// that the kernel can watch. The setting is stored in the file.
async fn enable_wal(connection: &mut SqliteConnection, path: &Path) -> Result<(), OpenError> {
    let rows = sqlx::query("PRAGMA main.journal_mode = WAL").fetch_all(connection).await?;
    let mode: String = rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get(0)?;
    if mode.eq_ignore_ascii_case("wal") {
        return Ok(());
    }
    Err(OpenError::Refused(
        at_path(
            BackendErrorKind::Misconfigured,
            path,
            format!(
                "the journal mode of the file remains {mode:?}, but this store needs \"wal\"; move the file to a local disk"
            ),
        )
        .as_refused(),
    ))
}

async fn create_tables(connection: &mut SqliteConnection) -> Result<(), OpenError> {
    // With `IMMEDIATE`, if several processes find no tables, one process creates the tables while
    // the other processes wait.
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    sqlx::raw_sql(sql::SCHEMA).execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(())
}

/// Returns the error for a missing or invalid meta row.
pub(super) fn corrupt_meta(path: &Path) -> BackendError {
    let message = "the table lock_registry_meta was created or changed by another program; restore it, or drop it and \
                   lock_registry_locks";
    at_path(BackendErrorKind::Misconfigured, path, message).as_refused()
}
