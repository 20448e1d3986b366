//! Connections to the server.

use futures_util::FutureExt as _;
use registry_core::BackendError;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use tokio::time::timeout;

use super::config::{PostgresConfig, StatementMode};
use super::error;
use crate::server::{AfterConnect, ConnectionPool, PoolError};

pub(super) fn pool(config: &PostgresConfig) -> ConnectionPool<PgConnection> {
    let pool = ConnectionPool::new(config.connect_options(), config.settings.pool_limits());
    // A pooler may assign the connection to another client. So each unprepared statement, which may
    // pass through a pooler, sets its own limit.
    match config.statements {
        StatementMode::Prepared => pool.with_after_connect(set_lock_timeout(config)),
        StatementMode::Unprepared => pool,
    }
}

/// Opens a connection outside the pool.
pub(super) async fn connect(config: &PostgresConfig) -> Result<PgConnection, BackendError> {
    let server = config.connect_options();
    match timeout(config.settings.connect_timeout, PgConnection::connect_with(&server)).await {
        Ok(connected) => connected.map_err(|error| error::not_connected(PoolError::Sqlx(error))),
        Err(_) => Err(error::not_connected(PoolError::TimedOut)),
    }
}

/// Limits how long the statements of a new connection wait for locks on tables and rows. Without
/// the limit, a statement could wait for a table rebuild, and then grant a lock whose caller has
/// timed out.
fn set_lock_timeout(config: &PostgresConfig) -> AfterConnect<PgConnection> {
    let text = format!("SET lock_timeout = {}", config.settings.busy_timeout.as_millis().max(1));
    Box::new(move |connection| {
        let after_connect = raw_sql(AssertSqlSafe(text.clone()));
        async move { after_connect.execute(connection).await.map(drop) }.boxed()
    })
}
