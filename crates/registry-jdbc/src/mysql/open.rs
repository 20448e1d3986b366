//! Opens the store: reads the meta table first, and creates the tables only if they are missing.

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row, raw_sql};
use tokio::time::timeout;

use super::client::MySqlClient;
use super::config::{MySqlConfig, misconfigured};
use super::error;
use super::sql::{self, MySqlStatements};

/// The result of opening a store.
#[derive(Debug)]
pub(super) struct OpenedMySqlStore {
    pub(super) texts: MySqlStatements,
    /// The id that the tables received when they were created.
    pub(super) store: Vec<u8>,
}

/// Opens the store on an exclusively used connection. Dropping the future closes it, and rolls back
/// unfinished work.
pub(super) async fn open(
    config: &MySqlConfig,
    client: &MySqlClient,
) -> Result<OpenedMySqlStore, BackendError> {
    config.check()?;
    let mut connection = client.acquire().await?;
    let opened = timeout(OPENING_LIMIT, check_tables(config, client, &mut connection)).await;
    let opened = opened.unwrap_or_else(|_| Err(error::timed_out(error::STORE, OPENING_LIMIT)))?;
    connection.release();
    Ok(opened)
}

async fn check_tables(
    config: &MySqlConfig,
    client: &MySqlClient,
    connection: &mut MySqlConnection,
) -> Result<OpenedMySqlStore, BackendError> {
    // Named in every statement, so that a fence finds the tables from any current database of the
    // caller's connection.
    let database = config.server.get_database().unwrap_or_default();
    let texts = MySqlStatements::new(database, &config.table_prefix);
    let mut meta = read_meta(&texts, connection).await;
    if meta.as_ref().is_err_and(error::is_no_such_table) && config.create_schema {
        set_schema_lock(connection, true).await;
        create_tables(config, client, connection).await?;
        meta = read_meta(&texts, connection).await;
        set_schema_lock(connection, false).await;
    } else if meta.as_ref().is_ok_and(Vec::is_empty) {
        // Another process may be creating the tables; it inserts the meta row last.
        set_schema_lock(connection, true).await;
        meta = read_meta(&texts, connection).await;
        set_schema_lock(connection, false).await;
    }
    let rows = meta.map_err(|error| client.explain(error))?;
    let row = rows.first();
    let row = row.ok_or_else(|| error::corrupt(error::STORE, "the meta table has no row"))?;
    let version: i32 = row.try_get(0).map_err(|error| client.explain(error))?;
    if version != sql::VERSION {
        return Err(misconfigured(&format!(
            "the lock tables are of version {version}, this program knows version {}; update the older one",
            sql::VERSION
        )));
    }
    Ok(OpenedMySqlStore { store: row.try_get(1).map_err(|error| client.explain(error))?, texts })
}

/// Takes or releases the named lock under which tables are created. It only prevents an error
/// in the second process, so a server without named locks is supported. Closing the connection also
/// releases it.
async fn set_schema_lock(connection: &mut MySqlConnection, begin: bool) {
    let text = if begin {
        "SELECT GET_LOCK('lock-registry schema', 20)"
    } else {
        "SELECT RELEASE_LOCK('lock-registry schema')"
    };
    let _ = raw_sql(text).execute(connection).await;
}

async fn create_tables(
    config: &MySqlConfig,
    client: &MySqlClient,
    connection: &mut MySqlConnection,
) -> Result<(), BackendError> {
    let Err(error) = raw_sql(sql::schema(&config.table_prefix)).execute(connection).await else {
        return Ok(());
    };
    if !error::is_denied(&error) {
        return Err(client.explain(error));
    }
    let message = "mysql: the lock tables are missing and this user cannot create them; create them with the output of `lockreg schema mysql`";
    Err(BackendError::new(BackendErrorKind::Denied, message).with_source(error).as_refused())
}

async fn read_meta(
    texts: &MySqlStatements,
    connection: &mut MySqlConnection,
) -> Result<Vec<MySqlRow>, sqlx::Error> {
    sqlx::query(texts.meta.safe()).fetch_all(connection).await
}

/// Creating tables may wait for another process that creates them.
const OPENING_LIMIT: Duration = Duration::from_secs(30);
