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
use super::error::{self, Fate};
use super::sql;
use super::statement::Statement;
use crate::server::{Errand, Failure, Pool, PoolLimits, Refusal, Seat};

/// The maximum number of attempts for a statement that the server rolls back because of conflicts.
const CONFLICTS_MAX: u32 = 5;
/// The maximum pause before the second attempt. It doubles with each attempt; the minimum is half
/// of it.
const CONFLICT_PAUSE: Duration = Duration::from_millis(4);

pub(super) struct Link {
    pool: Pool<MySqlConnection>,
    response_timeout: Duration,
    /// Host and port, for messages.
    place: String,
}

/// Whether a statement may be sent again when the connection breaks, although it may have been
/// executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    Harmless,
    Never,
}

/// Sends a statement and receives the response.
type Ask<T> =
    for<'c> fn(Statement, &'c mut MySqlConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>;

impl Link {
    /// Creates the link without connecting.
    pub(super) fn new(config: &MySqlConfig) -> Self {
        let limits = PoolLimits {
            connections: config.connections,
            connect: config.connect_timeout,
            patience: config.response_timeout,
            answer: config.response_timeout,
            row: config.busy_timeout,
        };
        let patience = config.busy_timeout.as_millis().div_ceil(1_000);
        let patience = u64::try_from(patience).unwrap_or(u64::MAX);
        let pool = Pool::new(config.server.clone(), limits).with_greeting(Box::new(
            move |connection: &mut MySqlConnection| {
                let greeting = sqlx::raw_sql(sql::session(patience));
                async move { greeting.execute(connection).await.map(drop) }.boxed()
            },
        ));
        Self { pool, response_timeout: config.response_timeout, place: config.place() }
    }

    /// Sends a statement that changes rows.
    pub(super) async fn change(
        &self,
        errand: Errand,
        repeat: Repeat,
        make: impl Fn() -> Statement + Send + Sync,
    ) -> Result<MySqlQueryResult, BackendError> {
        self.ask(errand, repeat, make, |statement, connection| {
            statement.execute(connection).boxed()
        })
        .await
    }

    /// Sends a statement that returns rows.
    pub(super) async fn rows(
        &self,
        errand: Errand,
        make: impl Fn() -> Statement + Send + Sync,
    ) -> Result<Vec<MySqlRow>, BackendError> {
        let fetch: Ask<_> = |statement, connection| statement.fetch_all(connection).boxed();
        self.ask(errand, Repeat::Harmless, make, fetch).await
    }

    async fn ask<T: Send>(
        &self,
        errand: Errand,
        repeat: Repeat,
        make: impl Fn() -> Statement + Send + Sync,
        ask: Ask<T>,
    ) -> Result<T, BackendError> {
        let (mut conflicts, mut anew) = (0, false);
        // Once an attempt may have been executed, the outcome is unknown, whatever later attempts
        // return.
        let mut is_open = false;
        let told = |error: BackendError, is_open| if is_open { error.as_unknown() } else { error };
        loop {
            let seat = if anew {
                self.pool.enter_anew(errand).await
            } else {
                self.pool.enter(errand).await
            };
            let mut seat = seat.map_err(|refusal| told(self.refused(refusal), is_open))?;
            let was_idle = seat.was_idle();
            let (connection, watch) = seat.ask();
            let error = match watch.answered(ask(make(), connection)).await {
                Some(Ok(answer)) => {
                    seat.leave();
                    return Ok(answer);
                }
                Some(Err(error)) => error,
                // Dropping the seat closes the connection, so no later statement receives the late
                // response.
                None => {
                    drop(seat);
                    // After a failover, the old address may silently drop all packets.
                    self.pool.close_idle();
                    return Err(error::silent(&self.place, self.response_timeout));
                }
            };
            match error::fate(&error) {
                Fate::Answered => {
                    seat.leave();
                    return Err(told(self.explain(error), is_open));
                }
                Fate::Undone => {
                    seat.leave();
                    conflicts += 1;
                    if conflicts >= CONFLICTS_MAX {
                        return Err(told(self.explain(error), is_open));
                    }
                    let pause = CONFLICT_PAUSE * 2_u32.pow(conflicts - 1);
                    sleep(pause.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
                }
                Fate::Broken => {
                    drop(seat);
                    // The connection broke while it was idle, as all do when the server restarts.
                    let error = self.explain(error);
                    if !was_idle || anew || repeat == Repeat::Never {
                        // The other idle connections are probably broken too.
                        self.pool.close_idle();
                        let error = told(error, is_open);
                        // The request may still be executed, so the caller decides about a retry.
                        let is_stale = was_idle && !anew;
                        return Err(if is_stale { error.on_stale_connection() } else { error });
                    }
                    anew = true;
                    is_open = !error.refused();
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
        errand: Errand,
        make: impl Fn() -> RawSql + Send + Sync,
    ) -> Result<Vec<MySqlRow>, BackendError> {
        let mut conflicts = 0;
        loop {
            let seat = self.pool.enter(errand).await;
            let mut seat = seat.map_err(|refusal| self.refused(refusal))?;
            let was_idle = seat.was_idle();
            let (connection, watch) = seat.ask();
            let error = match watch.answered(make().fetch_all(connection)).await {
                Some(Ok(rows)) => {
                    seat.leave();
                    return Ok(rows);
                }
                Some(Err(error)) => error,
                None => {
                    drop(seat);
                    self.pool.close_idle();
                    return Err(error::silent(&self.place, self.response_timeout));
                }
            };
            drop(seat);
            match error::fate(&error) {
                Fate::Undone if conflicts + 1 < CONFLICTS_MAX => {
                    let pause = CONFLICT_PAUSE * 2_u32.pow(conflicts);
                    conflicts += 1;
                    sleep(pause.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
                }
                Fate::Broken if was_idle => {
                    self.pool.close_idle();
                    return Err(self.explain(error).on_stale_connection());
                }
                _ => return Err(self.explain(error)),
            }
        }
    }

    /// Returns an exclusively used connection, for more than one statement.
    pub(super) async fn seat(&self) -> Result<Seat<'_, MySqlConnection>, BackendError> {
        self.pool.enter(Errand::Acquire).await.map_err(|refusal| self.refused(refusal))
    }

    pub(super) fn explain(&self, error: sqlx::Error) -> BackendError {
        error::explain(error, &self.place)
    }

    fn refused(&self, refusal: Refusal) -> BackendError {
        error::not_connected(refusal, &self.place)
    }

    /// Returns what an error outside of a transaction means for a session.
    pub(super) fn failure(&self, error: sqlx::Error) -> Failure {
        match error::fate(&error) {
            Fate::Broken => Failure::Broken(self.explain(error)),
            Fate::Answered | Fate::Undone => Failure::Answered(self.explain(error)),
        }
    }

    /// Reads a column of a session's response. An unreadable column ends the session.
    pub(super) fn read<'r, T>(&self, row: &'r MySqlRow, index: usize) -> Result<T, Failure>
    where
        T: sqlx::Decode<'r, MySql> + sqlx::Type<MySql>,
    {
        row.try_get(index).map_err(|error| Failure::Broken(self.explain(error)))
    }

    /// Returns the error for a session whose connection actor has ended.
    pub(super) fn closed(&self) -> BackendError {
        let place = self.place();
        BackendError::transient(format!("mysql at {place}: the store was closed meanwhile"))
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// Closes the idle connections. New ones are opened on demand.
    pub(super) fn forget(&self) {
        self.pool.close_idle();
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("place", &self.place).finish_non_exhaustive()
    }
}
