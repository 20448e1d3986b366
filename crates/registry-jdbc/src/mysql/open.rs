//! Opens the store: reads the meta table first, and creates the tables only if they are missing.

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, MySqlConnection, raw_sql};
use tokio::time::timeout;

use super::client::MySqlClient;
use super::config::MySqlConfig;
use super::error::{self, is_table_denied};
use super::sql::{self, MySqlStatements, quoted};
use super::statement::simple_query;
use crate::server::statement::number;
use crate::server::{CreateSchema, RowStatements, ServerErrors as _, Statement, Value, read_meta};

/// Opens the store on an exclusively used connection. Dropping the future closes the connection.
/// Tables that the server has already created remain.
pub(super) async fn open(
    config: &MySqlConfig,
    client: &MySqlClient,
) -> Result<(MySqlStatements, Vec<u8>), BackendError> {
    let mut connection = client.acquire().await?;
    let opened = timeout(OPENING_LIMIT, check_tables(config, &mut connection)).await;
    let opened = opened.unwrap_or_else(|_| Err(error::timed_out(error::STORE, OPENING_LIMIT)))?;
    connection.release();
    Ok(opened)
}

async fn check_tables(
    config: &MySqlConfig,
    connection: &mut MySqlConnection,
) -> Result<(MySqlStatements, Vec<u8>), BackendError> {
    // Every statement names the database, so that a fence finds the tables whatever the current
    // database of the caller's connection is.
    let database = config.server.get_database().unwrap_or_default();
    let statements = MySqlStatements::new(database, &config.settings.table_prefix);
    let may_create = config.settings.create_schema == CreateSchema::IfMissing;
    let mut meta = fetch_meta(&statements, connection).await;
    if meta.as_ref().is_err_and(MySql::lacks_lock_tables) && may_create {
        set_schema_lock(connection, true).await;
        create_tables(config, connection).await?;
        meta = fetch_meta(&statements, connection).await;
        set_schema_lock(connection, false).await;
    } else if meta.as_ref().is_ok_and(Vec::is_empty) {
        // Another process may be creating the tables; it inserts the meta row last.
        set_schema_lock(connection, true).await;
        meta = fetch_meta(&statements, connection).await;
        let prefix = &config.settings.table_prefix;
        if meta.as_ref().is_ok_and(Vec::is_empty)
            && may_create
            && has_no_locks(database, prefix, connection).await?
        {
            // The process that created the tables ended before it inserted the meta row.
            create_tables(config, connection).await?;
            meta = fetch_meta(&statements, connection).await;
        }
        set_schema_lock(connection, false).await;
    }
    let id = read_meta::<MySql>(&meta.map_err(MySql::explain)?)?;
    check_label_column(&statements, database, &config.settings.table_prefix, connection).await?;
    Ok((statements, id))
}

/// Returns whether the table of locks is empty. A lost meta row of a table in use must not be
/// replaced: it contains the largest token of the deleted rows.
async fn has_no_locks(
    database: &str,
    prefix: &str,
    connection: &mut MySqlConnection,
) -> Result<bool, BackendError> {
    let table = format!("{}.{}", quoted(database), quoted(&format!("{prefix}_locks")));
    let rows = simple_query(connection, format!("SELECT 1 FROM {table} LIMIT 1")).await;
    Ok(rows.map_err(MySql::explain)?.is_empty())
}

/// Acquires or releases the named lock under which tables are created. The lock only prevents an
/// error in a second process, so a server without named locks is supported. Closing the connection
/// also releases the lock.
async fn set_schema_lock(connection: &mut MySqlConnection, acquire: bool) {
    let text = if acquire {
        "SELECT GET_LOCK('lock-registry schema', 20)"
    } else {
        "SELECT RELEASE_LOCK('lock-registry schema')"
    };
    let _ = raw_sql(text).execute(connection).await;
}

async fn create_tables(
    config: &MySqlConfig,
    connection: &mut MySqlConnection,
) -> Result<(), BackendError> {
    let Err(error) = raw_sql(sql::schema(&config.settings.table_prefix)).execute(connection).await
    else {
        return Ok(());
    };
    if !error::is_denied(&error) {
        return Err(MySql::explain(error));
    }
    let message = "mysql: the lock tables are missing or incomplete, and this user cannot create them; create them with the output of `lockreg schema mysql`";
    let source = MySql::explain(error);
    Err(BackendError::new(BackendErrorKind::Denied, message).with_source(source).as_refused())
}

/// Refuses tables of a version before the first release, whose column `label` is too small for the
/// record of several claims.
async fn check_label_column(
    statements: &MySqlStatements,
    database: &str,
    prefix: &str,
    connection: &mut MySqlConnection,
) -> Result<(), BackendError> {
    let table = format!("{prefix}_locks");
    let values = [Value::bytes(database.as_bytes()), Value::bytes(table.as_bytes())];
    let text = Statement::new(&statements.label_size, values).inlined::<MySql>();
    let rows = simple_query(connection, text).await.map_err(MySql::explain)?;
    let Some(row) = rows.first() else { return Ok(()) };
    let bytes_max = number::<MySql>(row, 0)?;
    if bytes_max >= LABEL_BYTES_MIN {
        return Ok(());
    }
    Err(MySql::misconfigured(&format!(
        "the column `label` of the lock tables stores {bytes_max} bytes, and shared locks need {LABEL_BYTES_MIN}; run `ALTER TABLE {table} MODIFY label MEDIUMBLOB`"
    )))
}

async fn fetch_meta(
    statements: &MySqlStatements,
    connection: &mut MySqlConnection,
) -> Result<Vec<MySqlRow>, sqlx::Error> {
    // Tables of an older version lack the newest table. The caller then creates the missing tables.
    match simple_query(connection, statements.has_newest_table.as_str().to_owned()).await {
        // A user without rights on the newest table, that of waiters, can lock.
        Err(error) if is_table_denied(&error) => {}
        found => _ = found?,
    }
    let row_statements: &RowStatements = statements.as_ref();
    simple_query(connection, row_statements.meta.as_str().to_owned()).await
}

/// The minimum size of the column `label`.
const LABEL_BYTES_MIN: i64 = (1 << 24) - 1;

/// The time limit for opening. It includes the wait for another process that creates the tables.
const OPENING_LIMIT: Duration = Duration::from_secs(30);
