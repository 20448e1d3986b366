//! Opens the file: reads before it writes, creates missing tables, and detects a reboot.

use std::path::Path;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::{ConnectOptions, Connection, Row, SqliteConnection};

use super::clock::BootId;
use super::file::Place;
use super::link::{self, Busy, Link};
use super::sql;
use super::worker::Worker;
use crate::config::SqliteConfig;
use crate::error::explain;

/// The result of opening a store.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) writer: Link,
    pub(super) reader: Link,
    pub(super) worker: Worker,
    pub(super) place: Place,
    /// The id that the file received when its tables were created.
    pub(super) store: Vec<u8>,
}

/// Opens the store for a process of this boot.
pub(super) async fn open(config: &SqliteConfig, boot: BootId) -> Result<Opened, BackendError> {
    let place = Place::find(&config.path)?;
    let path = place.path.as_path();
    let worker = Worker::start()?;

    // Everything below uses connections of its own. Dropping this future drops them, and rolls back
    // an unfinished transaction.
    let mut busy = Busy::new(config.busy_timeout, &worker);
    let (connection, store) = loop {
        match set_up(path, boot).await {
            Ok(done) => break done,
            Err(Trouble::Sqlite(error)) if busy.again(&error).await => {}
            Err(Trouble::Sqlite(error)) => return Err(explain(error, path)),
            Err(Trouble::Refused(error)) => return Err(error),
        }
    };
    let database = place.database().map_err(BackendError::as_refused)?;

    // The connection that created the tables stays open until the others are, so log and index stay
    // the same files.
    let options = link::options(path).create_if_missing(false);
    let link = |options| Link::open(place.clone(), database, options, config.busy_timeout, &worker);
    let reader = link(options.clone().pragma("query_only", "ON")).await?;
    let writer = link(options).await?;
    // Only the checkpoint can fail, and it is repeated later.
    let _ = connection.close().await;
    for statement in [sql::ACQUIRE_AT, sql::RELEASE] {
        writer.prepare(statement).await?;
    }
    Ok(Opened { writer, reader, store, worker, place })
}

enum Trouble {
    Sqlite(sqlx::Error),
    Refused(BackendError),
}

impl From<sqlx::Error> for Trouble {
    fn from(error: sqlx::Error) -> Self {
        Self::Sqlite(error)
    }
}

async fn set_up(path: &Path, boot: BootId) -> Result<(SqliteConnection, Vec<u8>), Trouble> {
    let mut connection = link::options(path).connect().await?;
    // Reads first, so that an unusable file (no database, newer tables) stays unchanged.
    let mut meta = read_meta(&mut connection, path).await?;
    use_wal(&mut connection, path).await?;
    if meta.is_none() {
        make_tables(&mut connection).await?;
        meta = read_meta(&mut connection, path).await?;
    }
    let Some(Meta { store, boot: last_boot }) = meta else {
        return Err(Trouble::Refused(damaged(path)));
    };
    if last_boot != boot.bytes() {
        // Frees all rows of the earlier boot. A process that still runs with that boot then gets
        // errors.
        sqlx::query(sql::BOOT).bind(boot.bytes().to_vec()).execute(&mut connection).await?;
    }
    Ok((connection, store))
}

struct Meta {
    store: Vec<u8>,
    boot: Vec<u8>,
}

async fn read_meta(
    connection: &mut SqliteConnection,
    path: &Path,
) -> Result<Option<Meta>, Trouble> {
    if sqlx::query(sql::META_TABLE).fetch_all(&mut *connection).await?.is_empty() {
        return Ok(None);
    }
    let rows = sqlx::query(sql::META).fetch_all(connection).await?;
    let row = rows.first().ok_or_else(|| Trouble::Refused(damaged(path)))?;
    let version: i64 = row.try_get(0)?;
    if version > sql::VERSION {
        return Err(Trouble::Refused(
            BackendError::new(
                BackendErrorKind::Misconfigured,
                format!(
                    "sqlite file {path:?}: its lock tables are of version {version}, this program knows \
                     version {known}; update the program",
                    known = sql::VERSION
                ),
            )
            .as_refused(),
        ));
    }
    // A migration from version 1 to a later version is to be called from `set_up`.
    if version < sql::VERSION {
        return Err(Trouble::Refused(damaged(path)));
    }
    Ok(Some(Meta { boot: row.try_get(1)?, store: row.try_get(2)? }))
}

/// Enables the write-ahead log: readers then never block a writer, and every commit changes a file
/// that can be watched. The setting is stored in the file.
async fn use_wal(connection: &mut SqliteConnection, path: &Path) -> Result<(), Trouble> {
    let rows = sqlx::query("PRAGMA main.journal_mode = WAL").fetch_all(connection).await?;
    let mode: String = rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get(0)?;
    if mode.eq_ignore_ascii_case("wal") {
        return Ok(());
    }
    Err(Trouble::Refused(
        BackendError::new(
            BackendErrorKind::Misconfigured,
            format!(
                "sqlite file {path:?}: its journal mode stays {mode:?}, this store needs \"wal\"; \
                 put the file on a local disk"
            ),
        )
        .as_refused(),
    ))
}

async fn make_tables(connection: &mut SqliteConnection) -> Result<(), Trouble> {
    // IMMEDIATE: if several processes find no tables, one creates them while the others wait.
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    sqlx::raw_sql(sql::SCHEMA).execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(())
}

/// Returns the error for a missing or invalid meta row.
pub(super) fn damaged(path: &Path) -> BackendError {
    BackendError::new(
        BackendErrorKind::Misconfigured,
        format!(
            "sqlite file {path:?}: the table lock_registry_meta was made or changed by something else; \
             restore it, or drop it and lock_registry_locks"
        ),
    )
    .as_refused()
}
