//! Sends requests to a server over pooled connections.
//!
//! The client repeats a request that MariaDB or MySQL rolled back because of a conflict. With any
//! server, it repeats a request whose connection broke unnoticed while the connection was idle, if
//! the request may be sent again ([`Resend`]).

use std::fmt;
use std::time::Duration;

use registry_core::BackendError;
use tokio::time::sleep;

use super::dialect::{Dialect, ServerErrors};
use super::{
    Answer, ConnectionPool, ConnectionUse, PoolError, QueryMode, SessionFailure, Statement, error,
};

/// The maximum number of attempts for a request that the server rolls back because of conflicts.
const CONFLICTS_MAX: u32 = 5;
/// The maximum pause before the second attempt. The maximum doubles with each attempt. The pause is
/// random, and at least half of the maximum.
const CONFLICT_PAUSE: Duration = Duration::from_millis(4);

pub(crate) struct SqlClient<D: Dialect> {
    pool: ConnectionPool<D::Connection>,
    response_timeout: Duration,
    query_mode: QueryMode,
}

/// Whether a request may be sent again after the connection breaks, although the server may have
/// executed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resend {
    Allowed,
    Never,
    /// As `Never`, for a request of several statements in one message that begin and end a
    /// transaction. After any error the connection is closed, because the transaction may be open.
    Transaction,
}

/// What a failed statement means for a retry and for its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorEffect {
    /// The server rolled the statement back because of a conflict. It may be sent again at once, on
    /// the same connection.
    #[cfg_attr(
        not(feature = "mysql"),
        expect(dead_code, reason = "PostgreSQL returns such errors to the caller")
    )]
    RolledBack,
    /// The server returned an error. The connection is usable.
    Rejected,
    /// The connection is unusable.
    Broken,
}

impl<D: Dialect> SqlClient<D> {
    /// Creates the client without connecting.
    pub(crate) fn new(
        pool: ConnectionPool<D::Connection>,
        response_timeout: Duration,
        query_mode: QueryMode,
    ) -> Self {
        Self { pool, response_timeout, query_mode }
    }

    /// Returns the rows of a query. Queries may be repeated.
    ///
    /// # Cancel safety
    /// As for [`send`](Self::send).
    pub(crate) async fn query(
        &self,
        connection_use: ConnectionUse,
        statement: &Statement<'_>,
    ) -> Result<Vec<D::Row>, BackendError> {
        Ok(self.send(connection_use, Resend::Allowed, statement).await?.rows)
    }

    /// Sends the request, and returns its answer.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection. The server may complete the request.
    pub(crate) async fn send(
        &self,
        connection_use: ConnectionUse,
        resend: Resend,
        request: &Statement<'_>,
    ) -> Result<Answer<D::Row>, BackendError> {
        let mode = match resend {
            Resend::Allowed | Resend::Never => self.query_mode,
            Resend::Transaction => QueryMode::Plain,
        };
        let (mut conflicts, mut reconnect) = (0, false);
        // If the server may have executed one attempt, the outcome stays unknown, whatever later
        // attempts return.
        let mut is_unknown = false;
        let mark_if_unknown =
            |error: BackendError, is_unknown| if is_unknown { error.as_unknown() } else { error };
        loop {
            let pooled = if reconnect {
                self.pool.acquire_new(connection_use).await
            } else {
                self.pool.acquire(connection_use).await
            };
            let mut pooled =
                pooled.map_err(|reason| mark_if_unknown(self.not_connected(reason), is_unknown))?;
            let was_idle = pooled.was_idle();
            let (connection, timer) = pooled.split();
            let error = match timer.wait_for(D::send(connection, request, mode)).await {
                Some(Ok(answer)) => {
                    pooled.release();
                    return Ok(answer);
                }
                Some(Err(error)) => error,
                // The drop closes the connection, so no later statement receives the late response.
                None => {
                    drop(pooled);
                    // After a failover, the old address may silently drop all packets.
                    self.pool.close_idle();
                    let error = error::timed_out(D::STORE, self.response_timeout);
                    return Err(mark_if_unknown(error, is_unknown));
                }
            };
            let effect = D::error_effect(&error);
            let error = D::explain(error);
            if effect != ErrorEffect::Broken && resend != Resend::Transaction {
                pooled.release();
            } else {
                drop(pooled);
            }
            match effect {
                ErrorEffect::Rejected => return Err(mark_if_unknown(error, is_unknown)),
                ErrorEffect::RolledBack => {
                    conflicts += 1;
                    if conflicts >= CONFLICTS_MAX {
                        return Err(mark_if_unknown(error, is_unknown));
                    }
                    let pause = CONFLICT_PAUSE * 2_u32.pow(conflicts - 1);
                    sleep(pause.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
                }
                ErrorEffect::Broken => {
                    // A connection that was idle has probably broken before this request, for
                    // example by a restart of the server. A request on any other connection is not
                    // repeated.
                    if !was_idle || reconnect || resend != Resend::Allowed {
                        // The remaining idle connections are probably broken too.
                        self.pool.close_idle();
                        let error = mark_if_unknown(error, is_unknown);
                        // The server may have executed the request, so the engine decides about a
                        // retry.
                        let is_stale = was_idle && !reconnect;
                        return Err(if is_stale { error.as_stale_connection() } else { error });
                    }
                    reconnect = true;
                    is_unknown = !error.refused();
                }
            }
        }
    }

    /// Returns a connection for several statements. No other caller uses the connection until it is
    /// released.
    #[cfg(feature = "mysql")]
    pub(crate) async fn acquire(
        &self,
    ) -> Result<super::PooledConnection<'_, D::Connection>, BackendError> {
        let pooled = self.pool.acquire(ConnectionUse::Acquire).await;
        pooled.map_err(|reason| self.not_connected(reason))
    }

    fn not_connected(&self, reason: PoolError) -> BackendError {
        error::not_connected(reason, D::STORE, D::explain)
    }

    /// Closes the idle connections. New ones are opened on demand.
    pub(crate) fn close_idle(&self) {
        self.pool.close_idle();
    }

    /// Closes the idle connections with a termination message. New ones are opened on demand.
    pub(crate) async fn close(&self) {
        self.pool.close().await;
    }
}

/// Converts an error of a session's statement that ran outside of a transaction.
pub(crate) fn session_failure<D: ServerErrors>(error: sqlx::Error) -> SessionFailure {
    match D::error_effect(&error) {
        ErrorEffect::Broken => SessionFailure::Broken(D::explain(error)),
        _ => SessionFailure::Rejected(D::explain(error)),
    }
}

impl<D: Dialect> fmt::Debug for SqlClient<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqlClient").field("store", &D::STORE).finish_non_exhaustive()
    }
}
