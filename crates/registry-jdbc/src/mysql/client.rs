//! Connections to the server.

use std::time::Duration;

use futures_util::FutureExt as _;
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, MySqlConnection, Row as _};

use super::config::MySqlConfig;
use super::sql;
use super::statement::send;
use crate::server::{
    Answer, ConnectionPool, PoolLimits, QueryMode, ServerErrors as _, SessionFailure, SqlClient,
    Statement, StatementText, Value, session_failure,
};

pub(crate) type MySqlClient = SqlClient<MySql>;

pub(super) fn pool(config: &MySqlConfig) -> ConnectionPool<MySqlConnection> {
    let lock_timeout = config.settings.busy_timeout.as_millis().div_ceil(1_000);
    let lock_timeout = u64::try_from(lock_timeout).unwrap_or(u64::MAX);
    let row_lock_timeout = Duration::from_secs(lock_timeout);
    let limits = PoolLimits { row_lock_timeout, ..config.settings.pool_limits() };
    let pool = ConnectionPool::new(config.connect_options(), limits);
    pool.with_after_connect(Box::new(move |connection: &mut MySqlConnection| {
        let after_connect = sqlx::raw_sql(sql::connection_settings(lock_timeout));
        async move { after_connect.execute(connection).await.map(drop) }.boxed()
    }))
}

/// Sends a statement of a session, outside of a transaction. Does not retry.
pub(super) async fn send_once(
    connection: &mut MySqlConnection,
    text: &StatementText,
    values: impl Into<Vec<Value>>,
) -> Result<Answer<MySqlRow>, SessionFailure> {
    let statement = Statement::new(text, values);
    let answer = send(connection, &statement, QueryMode::Prepared).await;
    answer.map_err(session_failure::<MySql>)
}

/// Reads a column of a session's response. If the column cannot be decoded, the session ends.
pub(super) fn read<'r, T>(row: &'r MySqlRow, index: usize) -> Result<T, SessionFailure>
where
    T: sqlx::Decode<'r, MySql> + sqlx::Type<MySql>,
{
    row.try_get(index).map_err(|error| SessionFailure::Broken(MySql::explain(error)))
}
