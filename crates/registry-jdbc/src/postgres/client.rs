//! Connections to the server.

use futures_util::FutureExt as _;
use registry_core::BackendError;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, Connection as _, Postgres, raw_sql};
use tokio::time::timeout;

use super::config::{PostgresConfig, StatementMode};
use super::error;
use crate::server::{AfterConnect, ConnectionPool, Dialect as _, PoolError};

pub(super) fn pool(config: &PostgresConfig) -> ConnectionPool<PgConnection> {
    let pool = ConnectionPool::new(config.statement_options(), Postgres::settings(config).limits);
    // Not through a pooler, which may assign the connection to another client. There each statement
    // sets its own limit.
    match config.statements {
        StatementMode::Prepared => pool.with_after_connect(set_lock_timeout(config)),
        StatementMode::Unprepared => pool,
    }
}

/// Returns `HOST:PORT` of a server, or the directory of its socket.
pub(super) fn address(server: &PgConnectOptions) -> String {
    let (host, port) = (server.get_host(), server.get_port());
    match server.get_socket() {
        Some(directory) => directory.display().to_string(),
        None if host.contains(':') && !host.starts_with('[') => format!("[{host}]:{port}"),
        None => format!("{host}:{port}"),
    }
}

/// Opens a connection outside the pool.
pub(super) async fn connect(config: &PostgresConfig) -> Result<PgConnection, BackendError> {
    let server = config.statement_options();
    match timeout(config.connect_timeout, PgConnection::connect_with(&server)).await {
        Ok(connected) => connected.map_err(|error| error::not_connected(PoolError::Sqlx(error))),
        Err(_) => Err(error::not_connected(PoolError::TimedOut)),
    }
}

/// Returns the initial statement that limits how long a statement waits for its tables, which it
/// locks before anything else. Without the limit, a statement that waits for a table rebuild could
/// grant a lock that its caller has given up.
fn set_lock_timeout(config: &PostgresConfig) -> AfterConnect<PgConnection> {
    let text = format!("SET lock_timeout = {}", config.busy_timeout.as_millis().max(1));
    Box::new(move |connection| {
        let after_connect = raw_sql(AssertSqlSafe(text.clone()));
        async move { after_connect.execute(connection).await.map(drop) }.boxed()
    })
}
