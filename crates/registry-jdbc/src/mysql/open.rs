//! Opens the store: reads the meta table first, and creates the tables only if they are missing.

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row, raw_sql};
use tokio::time::timeout;

use super::config::{MySqlConfig, unusable};
use super::error;
use super::link::Link;
use super::sql::{self, Texts};

/// The result of opening a store.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) texts: Texts,
    /// The id that the tables received when they were created.
    pub(super) store: Vec<u8>,
}

/// Opens the store on an exclusively used connection. Dropping the future closes it, and rolls back
/// unfinished work.
pub(super) async fn open(config: &MySqlConfig, link: &Link) -> Result<Opened, BackendError> {
    config.check()?;
    let mut seat = link.seat().await?;
    let opened = timeout(OPENING_LIMIT, set_up(config, link, &mut seat)).await;
    let opened = opened.unwrap_or_else(|_| Err(error::silent(link.place(), OPENING_LIMIT)))?;
    seat.leave();
    Ok(opened)
}

async fn set_up(
    config: &MySqlConfig,
    link: &Link,
    connection: &mut MySqlConnection,
) -> Result<Opened, BackendError> {
    // Named in every statement, so that a fence finds the tables from any current database of the
    // caller's connection.
    let database = config.server.get_database().unwrap_or_default();
    let texts = Texts::new(database, &config.table_prefix);
    let mut meta = read_meta(&texts, connection).await;
    if meta.as_ref().is_err_and(error::is_no_such_table) && config.create_schema {
        alone(connection, true).await;
        make_tables(config, link, connection).await?;
        meta = read_meta(&texts, connection).await;
        alone(connection, false).await;
    } else if meta.as_ref().is_ok_and(Vec::is_empty) {
        // Another process may be creating the tables; it inserts the meta row last.
        alone(connection, true).await;
        meta = read_meta(&texts, connection).await;
        alone(connection, false).await;
    }
    let rows = meta.map_err(|error| link.explain(error))?;
    let row = rows.first();
    let row = row.ok_or_else(|| error::damaged(link.place(), "the meta table has lost its row"))?;
    let version: i32 = row.try_get(0).map_err(|error| link.explain(error))?;
    if version != sql::VERSION {
        return Err(unusable(&format!(
            "the lock tables are of version {version}, this program knows version {}; update the older one",
            sql::VERSION
        )));
    }
    Ok(Opened { store: row.try_get(1).map_err(|error| link.explain(error))?, texts })
}

/// Takes or releases the named lock under which tables are created. It only spares the second
/// process an error, so a server without named locks is fine. Closing the connection also releases
/// it.
async fn alone(connection: &mut MySqlConnection, begin: bool) {
    let text = if begin {
        "SELECT GET_LOCK('lock-registry schema', 20)"
    } else {
        "SELECT RELEASE_LOCK('lock-registry schema')"
    };
    let _ = raw_sql(text).execute(connection).await;
}

async fn make_tables(
    config: &MySqlConfig,
    link: &Link,
    connection: &mut MySqlConnection,
) -> Result<(), BackendError> {
    let Err(error) = raw_sql(sql::schema(&config.table_prefix)).execute(connection).await else {
        return Ok(());
    };
    if !error::is_denied(&error) {
        return Err(link.explain(error));
    }
    let says = format!(
        "mysql at {}: the lock tables are missing and this user may not make them; have them made by what \
         `lockreg schema mysql` prints",
        link.place()
    );
    Err(BackendError::new(BackendErrorKind::Denied, says).with_source(error).as_refused())
}

async fn read_meta(
    texts: &Texts,
    connection: &mut MySqlConnection,
) -> Result<Vec<MySqlRow>, sqlx::Error> {
    sqlx::query(texts.meta.safe()).fetch_all(connection).await
}

/// Creating tables may wait for another process that creates them.
const OPENING_LIMIT: Duration = Duration::from_secs(30);
