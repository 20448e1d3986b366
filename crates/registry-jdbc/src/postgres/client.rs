//! Sends statements to the server over a free connection, and classifies errors.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use registry_core::BackendError;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, Postgres, raw_sql};
use tokio::time::timeout;

use super::config::PostgresConfig;
use super::error;
use super::statement::{BoundStatement, QueryMode};
use crate::server::{
    AfterConnect, ConnectionPool, ConnectionUse, PoolError, PoolLimits, Request, Resend, SqlClient,
};

#[derive(Debug)]
pub(super) struct PgClient {
    client: SqlClient<Postgres>,
    query_mode: QueryMode,
}

/// A statement with the way in which it is sent.
struct SentStatement<'a>(&'a BoundStatement<'a>, QueryMode);

impl Request<PgConnection> for SentStatement<'_> {
    type Answer = Vec<PgRow>;

    fn send<'c>(
        &'c self,
        connection: &'c mut PgConnection,
    ) -> BoxFuture<'c, Result<Self::Answer, sqlx::Error>> {
        self.0.send(connection, self.1).boxed()
    }
}

impl PgClient {
    /// Creates the client without connecting.
    pub(super) fn new(config: &PostgresConfig) -> Self {
        let limits = PoolLimits {
            connections: config.connections,
            connect_timeout: config.connect_timeout,
            acquire_timeout: config.response_timeout,
            response_timeout: config.response_timeout,
            row_lock_timeout: config.busy_timeout,
        };
        let pool = ConnectionPool::new(config.statement_options(), limits);
        // Not through a pooler, which may assign the connection to another client. There each
        // statement sets its own limit.
        let pool =
            if config.prepared { pool.with_after_connect(set_lock_timeout(config)) } else { pool };
        let client = SqlClient::new(pool, config.response_timeout);
        Self { client, query_mode: config.query_mode() }
    }

    pub(super) const fn is_prepared(&self) -> bool {
        matches!(self.query_mode, QueryMode::Prepared)
    }

    /// Returns the rows that `statement` returns.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection. The server may complete the statement.
    pub(super) async fn rows(
        &self,
        connection_use: ConnectionUse,
        statement: &BoundStatement<'_>,
        resend: Resend,
    ) -> Result<Vec<PgRow>, BackendError> {
        let request = SentStatement(statement, self.query_mode);
        self.client.send(connection_use, resend, &request).await
    }

    /// Closes the idle connections. New ones are opened on demand.
    pub(super) async fn close(&self) {
        self.client.close().await;
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
