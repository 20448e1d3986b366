//! Opens the store: checks the server's version and the tables, and creates missing tables. Called
//! by the backend's `open`.

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection, Executor as _, Postgres, Row, raw_sql};
use tokio::time::timeout;

use super::config::{PostgresConfig, TableNames, quoted};
use super::error;
use super::sql::{self, PgStatements};
use super::statement::simple_query;
use crate::server::{CreateSchema, RowStatements, ServerErrors as _, read_meta};

/// Opens the store on a separate connection. Returns the statements, and the id of the tables from
/// the meta row. Dropping the future closes that connection, and the server rolls unfinished work
/// back.
pub(super) async fn open(config: &PostgresConfig) -> Result<(PgStatements, Vec<u8>), BackendError> {
    let mut connection = super::client::connect(config).await?;
    let opened = timeout(OPENING_LIMIT, check_tables(config, &mut connection)).await;
    let opened = opened.unwrap_or_else(|_| Err(error::timed_out(error::STORE, OPENING_LIMIT)))?;
    // Errors are ignored, because the server also notices the closed socket.
    let _ = timeout(config.settings.connect_timeout, connection.close()).await;
    Ok(opened)
}

async fn check_tables(
    config: &PostgresConfig,
    connection: &mut PgConnection,
) -> Result<(PgStatements, Vec<u8>), BackendError> {
    if let Some(version) = connection.server_version_num()
        && version < SERVER_VERSION_MIN
    {
        return Err(Postgres::misconfigured(&format!(
            "the server has version {}, older than the minimum {}; update it",
            version / MAJOR_VERSION,
            SERVER_VERSION_MIN / MAJOR_VERSION
        )));
    }
    let schema = match find_tables(config, connection).await? {
        Some(schema) => schema,
        None if config.settings.create_schema == CreateSchema::IfMissing => {
            let created = create_tables(config, connection).await;
            match (find_tables(config, connection).await?, created) {
                // Created by this call or concurrently by another process.
                (Some(schema), _) => schema,
                (None, Err(error)) if error::is_denied(&error) => {
                    let message = "postgres: the lock tables are missing and this user cannot create them; create them with the output of `lockreg schema postgres`";
                    return Err(BackendError::new(BackendErrorKind::Denied, message)
                        .with_source(Postgres::explain(error))
                        .as_refused());
                }
                (None, Err(error)) => return Err(Postgres::explain(error)),
                (None, Ok(())) => return Err(tables_missing()),
            }
        }
        None => return Err(tables_missing()),
    };
    let tables = TableNames { schema, prefix: config.settings.table_prefix.clone() };
    let statements = PgStatements::new(tables);
    let row_statements: &RowStatements = statements.as_ref();
    let rows = simple_query(connection, row_statements.meta.as_str().to_owned())
        .await
        .map_err(Postgres::explain)?;
    let tables_id = read_meta::<Postgres>(&rows)?;
    Ok((statements, tables_id))
}

/// Returns the schema that contains the tables. Returns `None` if the meta table is missing, or the
/// table of waiters, which was added to the schema last.
async fn find_tables(
    config: &PostgresConfig,
    connection: &mut PgConnection,
) -> Result<Option<String>, BackendError> {
    let named = |table: &str| {
        let table = format!("{}_{table}", config.settings.table_prefix);
        match &config.schema {
            Some(schema) => format!("{}.{table}", quoted(schema)),
            None => table,
        }
    };
    let (meta, newest) = (named("meta"), named("waiters"));
    // The schema and the prefix have been checked: they contain only letters, digits and
    // underscores.
    let text = format!(
        "SELECT nspname::text FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace \
         WHERE pg_class.oid = to_regclass('{meta}') AND to_regclass('{newest}') IS NOT NULL"
    );
    // A simple query without a prepared statement works through every connection pooler.
    let rows = simple_query(connection, text).await.map_err(Postgres::explain)?;
    rows.first().map(|row| row.try_get(0).map_err(Postgres::explain)).transpose()
}

async fn create_tables(
    config: &PostgresConfig,
    connection: &mut PgConnection,
) -> Result<(), sqlx::Error> {
    let set_search_path = match &config.schema {
        Some(schema) => format!("SELECT set_config('search_path', '{}', true);", quoted(schema)),
        None => String::new(),
    };
    // Statements of one message are one transaction, so a partial schema is impossible. The
    // advisory lock makes other processes wait while this process creates the tables. Its number is
    // the first eight bytes of the SHA-256 of "lock-registry schema".
    let text = format!(
        "SELECT set_config('client_min_messages', 'warning', true); SELECT pg_advisory_xact_lock({SCHEMA_LOCK}); {set_search_path} {}",
        schema(&config.settings.table_prefix)
    );
    connection.execute(raw_sql(AssertSqlSafe(text))).await?;
    Ok(())
}

/// Returns the statements that create tables whose names begin with `prefix`.
pub(super) fn schema(prefix: &str) -> String {
    sql::SCHEMA.replace("lock_registry", prefix)
}

fn tables_missing() -> BackendError {
    Postgres::misconfigured(
        "the lock tables are missing; create them with the output of `lockreg schema postgres`, or let this program create them",
    )
}

const SERVER_VERSION_MIN: u32 = 14 * MAJOR_VERSION;

/// The factor of the major version in the server's version number.
const MAJOR_VERSION: u32 = 10_000;

/// The time limit for opening. It includes the wait for another process that creates the tables.
const OPENING_LIMIT: Duration = Duration::from_secs(30);

const SCHEMA_LOCK: i64 = -7_203_615_683_950_152_646;
