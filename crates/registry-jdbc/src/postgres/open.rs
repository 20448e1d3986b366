//! Opens the store: looks before it writes, makes the tables if there are none.

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor as _, Row, raw_sql};
use tokio::time::timeout;

use super::config::{PostgresConfig, TableNames, quoted, unusable};
use super::error::{self, explain};
use super::sql;

/// What a store that is set up consists of.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) tables: TableNames,
    /// The id that the tables were given when they were made.
    pub(super) store: String,
}

/// Opens the store. Connections of its own: dropping the future closes them, and with them whatever is unfinished.
pub(super) async fn open(config: &PostgresConfig) -> Result<Opened, BackendError> {
    config.check()?;
    let mut connection = super::link::connect(config).await?;
    let opened = timeout(OPENING_LIMIT, set_up(config, &mut connection)).await;
    let opened = opened.unwrap_or_else(|_| Err(error::silent()))?;
    // Tidiness: the server would notice anyway.
    let _ = timeout(config.connect_timeout, connection.close()).await;
    Ok(opened)
}

async fn set_up(
    config: &PostgresConfig,
    connection: &mut PgConnection,
) -> Result<Opened, BackendError> {
    if let Some(version) = connection.server_version_num()
        && version < SERVER_VERSION_MIN
    {
        return Err(unusable("the server is older than version 14"));
    }
    let schema = match find_tables(config, connection).await? {
        Some(schema) => schema,
        None if config.tables.create => {
            let made = make_tables(config, connection).await;
            match (find_tables(config, connection).await?, made) {
                // Whether we made them, or somebody else did who was faster.
                (Some(schema), _) => schema,
                (None, Err(error)) if error::is_denied(&error) => {
                    let says = "postgres: the lock tables are missing and this user may not make them; have them made by what \
                                `lockreg schema postgres` prints";
                    return Err(BackendError::new(BackendErrorKind::Denied, says)
                        .with_source(error)
                        .as_refused());
                }
                (None, Err(error)) => return Err(explain(error)),
                (None, Ok(())) => return Err(missing()),
            }
        }
        None => return Err(missing()),
    };
    let tables = TableNames { schema, prefix: config.tables.prefix.clone() };
    let texts = sql::Texts::new(&tables);
    let rows = rows(connection, texts.meta.as_str().to_owned()).await?;
    let Some(row) = rows.first() else {
        return Err(error::damaged("the table with the name meta has lost its row").as_refused());
    };
    let version: i32 = row.try_get(0).map_err(explain)?;
    if version != sql::VERSION {
        return Err(unusable(&format!(
            "the lock tables are of version {version}, this program knows version {}; update the older one",
            sql::VERSION
        )));
    }
    Ok(Opened { tables, store: row.try_get(1).map_err(explain)? })
}

/// The schema that the tables are in.
async fn find_tables(
    config: &PostgresConfig,
    connection: &mut PgConnection,
) -> Result<Option<String>, BackendError> {
    let meta = format!("{}_meta", config.tables.prefix);
    let named = match &config.tables.schema {
        Some(schema) => format!("{}.{meta}", quoted(schema)),
        None => meta,
    };
    // Both names were checked: they hold nothing but letters, digits and underscores.
    let text = format!(
        "SELECT nspname::text FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace \
         WHERE pg_class.oid = to_regclass('{named}')"
    );
    let rows = rows(connection, text).await?;
    rows.first().map(|row| row.try_get(0).map_err(explain)).transpose()
}

/// Plain text, which a pooler in whatever mode passes on as it is.
async fn rows(connection: &mut PgConnection, text: String) -> Result<Vec<PgRow>, BackendError> {
    connection.fetch_all(raw_sql(AssertSqlSafe(text))).await.map_err(explain)
}

async fn make_tables(
    config: &PostgresConfig,
    connection: &mut PgConnection,
) -> Result<(), sqlx::Error> {
    let place = match &config.tables.schema {
        Some(schema) => format!("SELECT set_config('search_path', '{}', true);", quoted(schema)),
        None => String::new(),
    };
    // Statements that are sent together are one transaction: all of it is there, or nothing. Of several processes that find no tables one makes
    // them while the others wait. The number is the first eight bytes of the SHA-256 of "lock-registry schema".
    let text = format!(
        "SELECT set_config('client_min_messages', 'warning', true); SELECT pg_advisory_xact_lock({SCHEMA_LOCK}); {place} {}",
        schema(&config.tables.prefix)
    );
    connection.execute(raw_sql(AssertSqlSafe(text))).await?;
    Ok(())
}

/// What makes tables whose names begin with `prefix`.
pub(super) fn schema(prefix: &str) -> String {
    sql::SCHEMA.replace("lock_registry", prefix)
}

fn missing() -> BackendError {
    unusable(
        "the lock tables are missing; have them made by what `lockreg schema postgres` prints, or let this program make them",
    )
}

const SERVER_VERSION_MIN: u32 = 14_00_00;

/// Making tables may wait for somebody else who does.
const OPENING_LIMIT: Duration = Duration::from_secs(30);

const SCHEMA_LOCK: i64 = -7_203_615_683_950_152_646;
