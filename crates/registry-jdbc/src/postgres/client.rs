//! Sends statements to the server over a free connection, and classifies errors.

use std::sync::Arc;

use futures_util::FutureExt as _;
use registry_core::BackendError;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use tokio::time::timeout;

use super::config::PostgresConfig;
use super::error::{self, explain};
use super::statement::{BoundStatement, QueryMode};
use crate::server::{
    AfterConnect, ConnectionPool, ConnectionUse, PoolError, PoolLimits, PooledConnection,
};

#[derive(Debug)]
pub(super) struct PgClient {
    /// `HOST:PORT` or the socket's directory, for messages.
    address: Arc<str>,
    pool: ConnectionPool<PgConnection>,
    query_mode: QueryMode,
}

/// Whether a statement may be sent again after the connection breaks, although the server may have
/// executed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resend {
    Allowed,
    Never,
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
        Self {
            address: address(&config.statement_options()).into(),
            // Not through a pooler, which may assign the connection to another client. There each
            // statement sets its own limit.
            pool: if config.prepared {
                pool.with_after_connect(set_lock_timeout(config))
            } else {
                pool
            },
            query_mode: config.query_mode(),
        }
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
        let rows = self.try_rows(connection_use, statement, resend).await;
        rows.map_err(|error| self.with_address(error))
    }

    /// Adds the server's address to an error.
    pub(super) fn with_address(&self, error: BackendError) -> BackendError {
        error.with_address(Arc::clone(&self.address))
    }

    async fn try_rows(
        &self,
        connection_use: ConnectionUse,
        statement: &BoundStatement<'_>,
        resend: Resend,
    ) -> Result<Vec<PgRow>, BackendError> {
        let pooled = self.pool.acquire(connection_use).await.map_err(into_backend_error)?;
        let was_idle = pooled.was_idle();
        match self.send(pooled, statement).await {
            // The connection broke while it was idle, as all do when the server restarts.
            Err(StatementFailure::Broken(first)) if was_idle && resend == Resend::Allowed => {
                let retried = self.send_on_new(connection_use, statement).await;
                // The first attempt may have been executed before the connection broke, whatever
                // the second one returned.
                retried.map_err(|error| if first.refused() { error } else { error.as_unknown() })
            }
            // The server may still execute the request, so the caller decides.
            Err(StatementFailure::Broken(error)) if was_idle => {
                self.pool.close_idle();
                Err(error.on_stale_connection())
            }
            Err(store_error) => {
                // The idle connections would probably fail in the same way: a server that has moved
                // away may drop all packets.
                if !matches!(store_error, StatementFailure::Rejected(_)) {
                    self.pool.close_idle();
                }
                Err(store_error.into_error())
            }
            Ok(rows) => Ok(rows),
        }
    }

    async fn send_on_new(
        &self,
        connection_use: ConnectionUse,
        statement: &BoundStatement<'_>,
    ) -> Result<Vec<PgRow>, BackendError> {
        let pooled = self.pool.acquire_new(connection_use).await.map_err(into_backend_error)?;
        self.send(pooled, statement).await.map_err(StatementFailure::into_error)
    }

    async fn send(
        &self,
        mut pooled: PooledConnection<'_, PgConnection>,
        statement: &BoundStatement<'_>,
    ) -> Result<Vec<PgRow>, StatementFailure> {
        let (connection, timer) = pooled.split();
        match timer.wait_for(statement.send(connection, self.query_mode)).await {
            Some(Ok(rows)) => {
                pooled.release();
                Ok(rows)
            }
            Some(Err(error)) if error::keeps_connection(&error) => {
                pooled.release();
                Err(StatementFailure::Rejected(explain(error)))
            }
            Some(Err(error)) => Err(StatementFailure::Broken(explain(error))),
            None => Err(StatementFailure::TimedOut(error::timed_out())),
        }
    }

    /// Closes the idle connections. New ones are opened on demand.
    pub(super) async fn close(&self) {
        self.pool.close().await;
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
    let connected = match timeout(config.connect_timeout, PgConnection::connect_with(&server)).await
    {
        Ok(connected) => connected.map_err(error::not_connected),
        Err(_) => Err(error::connect_timed_out()),
    };
    connected.map_err(|error| error.with_address(address(&server)))
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

enum StatementFailure {
    /// The server answered, and the connection is usable.
    Rejected(BackendError),
    /// The connection is unusable.
    Broken(BackendError),
    /// The server did not answer within the time limit.
    TimedOut(BackendError),
}

impl StatementFailure {
    fn into_error(self) -> BackendError {
        match self {
            Self::Rejected(error) | Self::Broken(error) | Self::TimedOut(error) => error,
        }
    }
}

/// Converts a refusal. No statement was sent.
fn into_backend_error(pool_error: PoolError) -> BackendError {
    match pool_error {
        PoolError::Exhausted => error::exhausted(),
        PoolError::TimedOut => error::connect_timed_out(),
        PoolError::Sqlx(error) => error::not_connected(error),
    }
}
