//! Sends a statement to the server and returns its response.
//!
//! Retries a statement that the server rolled back because of a conflict, and one that was sent on
//! an idle connection that had broken unnoticed.

use std::fmt;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use registry_core::BackendError;
use sqlx::mysql::{MySqlQueryResult, MySqlRow};
use sqlx::{MySql, MySqlConnection, RawSql, Row as _};
use tokio::time::sleep;

use super::config::MySqlConfig;
use super::error::{self, ErrorEffect};
use super::sql;
use super::statement::MySqlQuery;
use crate::server::{
    self, ConnectionPool, ConnectionUse, PoolError, PoolLimits, PooledConnection, SessionFailure,
};

/// The maximum number of attempts for a statement that the server rolls back because of conflicts.
const CONFLICTS_MAX: u32 = 5;
/// The maximum pause before the second attempt. It doubles with each attempt; the minimum is half
/// of it.
const CONFLICT_PAUSE: Duration = Duration::from_millis(4);

pub(super) struct MySqlClient {
    pool: ConnectionPool<MySqlConnection>,
    response_timeout: Duration,
    /// The name of the store with its host and port, for messages.
    store: String,
}

/// Whether a statement may be sent again when the connection breaks, although it may have been
/// executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resend {
    Allowed,
    Never,
}

/// Sends a statement and receives the response.
type SendFn<T> =
    for<'c> fn(MySqlQuery, &'c mut MySqlConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>;

impl MySqlClient {
    /// Creates the client without connecting.
    pub(super) fn new(config: &MySqlConfig) -> Self {
        let limits = PoolLimits {
            connections: config.connections,
            connect_timeout: config.connect_timeout,
            acquire_timeout: config.response_timeout,
            response_timeout: config.response_timeout,
            row_lock_timeout: config.busy_timeout,
        };
        let lock_timeout = config.busy_timeout.as_millis().div_ceil(1_000);
        let lock_timeout = u64::try_from(lock_timeout).unwrap_or(u64::MAX);
        let pool = ConnectionPool::new(config.server.clone(), limits).with_after_connect(Box::new(
            move |connection: &mut MySqlConnection| {
                let after_connect = sqlx::raw_sql(sql::session(lock_timeout));
                async move { after_connect.execute(connection).await.map(drop) }.boxed()
            },
        ));
        Self {
            pool,
            response_timeout: config.response_timeout,
            store: format!("mysql at {}", config.address()),
        }
    }

    /// Sends a statement that changes rows.
    pub(super) async fn execute(
        &self,
        connection_use: ConnectionUse,
        resend: Resend,
        make: impl Fn() -> MySqlQuery + Send + Sync,
    ) -> Result<MySqlQueryResult, BackendError> {
        self.send(connection_use, resend, make, |statement, connection| {
            statement.execute(connection).boxed()
        })
        .await
    }

    /// Sends a statement that returns rows.
    pub(super) async fn rows(
        &self,
        connection_use: ConnectionUse,
        make: impl Fn() -> MySqlQuery + Send + Sync,
    ) -> Result<Vec<MySqlRow>, BackendError> {
        let fetch: SendFn<_> = |statement, connection| statement.fetch_all(connection).boxed();
        self.send(connection_use, Resend::Allowed, make, fetch).await
    }

    async fn send<T: Send>(
        &self,
        connection_use: ConnectionUse,
        resend: Resend,
        make: impl Fn() -> MySqlQuery + Send + Sync,
        send: SendFn<T>,
    ) -> Result<T, BackendError> {
        let (mut conflicts, mut reconnect) = (0, false);
        // Once an attempt may have been executed, the outcome is unknown, whatever later attempts
        // return.
        let mut is_unknown = false;
        let with_outcome =
            |error: BackendError, is_unknown| if is_unknown { error.as_unknown() } else { error };
        loop {
            let pooled = if reconnect {
                self.pool.acquire_new(connection_use).await
            } else {
                self.pool.acquire(connection_use).await
            };
            let mut pooled = pooled
                .map_err(|pool_error| with_outcome(self.not_connected(pool_error), is_unknown))?;
            let was_idle = pooled.was_idle();
            let (connection, timer) = pooled.split();
            let error = match timer.wait_for(send(make(), connection)).await {
                Some(Ok(answer)) => {
                    pooled.release();
                    return Ok(answer);
                }
                Some(Err(error)) => error,
                // Dropping it closes the connection, so no later statement receives the
                // late response.
                None => {
                    drop(pooled);
                    // After a failover, the old address may silently drop all packets.
                    self.pool.close_idle();
                    return Err(error::timed_out(&self.store, self.response_timeout));
                }
            };
            match error::error_effect(&error) {
                ErrorEffect::Rejected => {
                    pooled.release();
                    return Err(with_outcome(self.explain(error), is_unknown));
                }
                ErrorEffect::RolledBack => {
                    pooled.release();
                    conflicts += 1;
                    if conflicts >= CONFLICTS_MAX {
                        return Err(with_outcome(self.explain(error), is_unknown));
                    }
                    let pause = CONFLICT_PAUSE * 2_u32.pow(conflicts - 1);
                    sleep(pause.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
                }
                ErrorEffect::Broken => {
                    drop(pooled);
                    // The connection broke while it was idle, as all do when the server restarts.
                    let error = self.explain(error);
                    if !was_idle || reconnect || resend == Resend::Never {
                        // The other idle connections are probably broken too.
                        self.pool.close_idle();
                        let error = with_outcome(error, is_unknown);
                        // The request may still be executed, so the caller decides about a retry.
                        let is_stale = was_idle && !reconnect;
                        return Err(if is_stale { error.on_stale_connection() } else { error });
                    }
                    reconnect = true;
                    is_unknown = !error.refused();
                }
            }
        }
    }

    /// Sends several statements as one transaction in one packet. Returns the rows of the queries
    /// after it.
    ///
    /// Retries after a conflict: the server has rolled the transaction back. After any error the
    /// connection is closed, which ends the transaction.
    pub(super) async fn transaction(
        &self,
        connection_use: ConnectionUse,
        make: impl Fn() -> RawSql + Send + Sync,
    ) -> Result<Vec<MySqlRow>, BackendError> {
        let mut conflicts = 0;
        loop {
            let pooled = self.pool.acquire(connection_use).await;
            let mut pooled = pooled.map_err(|pool_error| self.not_connected(pool_error))?;
            let was_idle = pooled.was_idle();
            let (connection, timer) = pooled.split();
            let error = match timer.wait_for(make().fetch_all(connection)).await {
                Some(Ok(rows)) => {
                    pooled.release();
                    return Ok(rows);
                }
                Some(Err(error)) => error,
                None => {
                    drop(pooled);
                    self.pool.close_idle();
                    return Err(error::timed_out(&self.store, self.response_timeout));
                }
            };
            drop(pooled);
            match error::error_effect(&error) {
                ErrorEffect::RolledBack if conflicts + 1 < CONFLICTS_MAX => {
                    let pause = CONFLICT_PAUSE * 2_u32.pow(conflicts);
                    conflicts += 1;
                    sleep(pause.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
                }
                ErrorEffect::Broken if was_idle => {
                    self.pool.close_idle();
                    return Err(self.explain(error).on_stale_connection());
                }
                _ => return Err(self.explain(error)),
            }
        }
    }

    /// Returns an exclusively used connection, for more than one statement.
    pub(super) async fn acquire(
        &self,
    ) -> Result<PooledConnection<'_, MySqlConnection>, BackendError> {
        self.pool
            .acquire(ConnectionUse::Acquire)
            .await
            .map_err(|pool_error| self.not_connected(pool_error))
    }

    pub(super) fn explain(&self, error: sqlx::Error) -> BackendError {
        error::explain(error, &self.store)
    }

    fn not_connected(&self, pool_error: PoolError) -> BackendError {
        server::error::not_connected(pool_error, &self.store, |error| self.explain(error))
    }

    /// Returns what an error outside of a transaction means for a session.
    pub(super) fn failure(&self, error: sqlx::Error) -> SessionFailure {
        match error::error_effect(&error) {
            ErrorEffect::Broken => SessionFailure::Broken(self.explain(error)),
            ErrorEffect::Rejected | ErrorEffect::RolledBack => {
                SessionFailure::Rejected(self.explain(error))
            }
        }
    }

    /// Reads a column of a session's response. An unreadable column ends the session.
    pub(super) fn read<'r, T>(&self, row: &'r MySqlRow, index: usize) -> Result<T, SessionFailure>
    where
        T: sqlx::Decode<'r, MySql> + sqlx::Type<MySql>,
    {
        row.try_get(index).map_err(|error| SessionFailure::Broken(self.explain(error)))
    }

    /// Returns the name of the store in errors.
    pub(super) fn store(&self) -> &str {
        &self.store
    }

    /// Closes the idle connections. New ones are opened on demand.
    pub(super) fn close_idle(&self) {
        self.pool.close_idle();
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

impl fmt::Debug for MySqlClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlClient").field("store", &self.store).finish_non_exhaustive()
    }
}
