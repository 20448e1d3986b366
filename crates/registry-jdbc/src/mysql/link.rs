//! The way to the server: a statement out, its answer back. Repeats what the server undid because of others, and what a connection that had
//! died in silence did not deliver.

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

/// How often a statement is sent that the server undoes because of others.
const CONFLICTS_MAX: u32 = 5;
/// How long one waits before it is sent again, at most; half of it at least. Doubles each time.
const CONFLICT_PAUSE: Duration = Duration::from_millis(4);

pub(super) struct Link {
    pool: Pool<MySqlConnection>,
    response_timeout: Duration,
    /// Host and port, for messages.
    place: String,
}

/// Whether a statement may be sent once more when the connection breaks, although it may have been done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    Harmless,
    Never,
}

/// Sends a statement and takes in the answer.
type Ask<T> =
    for<'c> fn(Statement, &'c mut MySqlConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>;

impl Link {
    /// Connects to nothing yet.
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

    /// Sends a statement that changes something.
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

    /// Sends a statement that answers with rows.
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
        // Once a try may have got through, the outcome is open, whatever is known of later ones.
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
                // The connection is closed, so nobody meets the late answer.
                None => {
                    drop(seat);
                    // A server that has moved away may swallow all that is sent to it.
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
                    // It broke while nobody used it, as all do when the server is started anew.
                    let error = self.explain(error);
                    if !was_idle || anew || repeat == Repeat::Never {
                        // What one connection has met, the others would.
                        self.pool.close_idle();
                        let error = told(error, is_open);
                        // The request may still arrive, so its caller decides.
                        let is_stale = was_idle && !anew;
                        return Err(if is_stale { error.on_stale_connection() } else { error });
                    }
                    anew = true;
                    is_open = !error.refused();
                }
            }
        }
    }

    /// Sends several statements that are one transaction in one packet, and returns the rows of the queries after it.
    ///
    /// A conflict is repeated: the server has rolled the transaction back. After any error the connection is closed, and
    /// the transaction ends with it.
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

    /// A connection that is nobody else's, for what is more than a statement.
    pub(super) async fn seat(&self) -> Result<Seat<'_, MySqlConnection>, BackendError> {
        self.pool.enter(Errand::Acquire).await.map_err(|refusal| self.refused(refusal))
    }

    pub(super) fn explain(&self, error: sqlx::Error) -> BackendError {
        error::explain(error, &self.place)
    }

    fn refused(&self, refusal: Refusal) -> BackendError {
        error::not_connected(refusal, &self.place)
    }

    /// What it means for a session that it was told this outside of a transaction.
    pub(super) fn failure(&self, error: sqlx::Error) -> Failure {
        match error::fate(&error) {
            Fate::Broken => Failure::Broken(self.explain(error)),
            Fate::Answered | Fate::Undone => Failure::Answered(self.explain(error)),
        }
    }

    /// Reads what a session was answered. What cannot be read is its end.
    pub(super) fn read<'r, T>(&self, row: &'r MySqlRow, index: usize) -> Result<T, Failure>
    where
        T: sqlx::Decode<'r, MySql> + sqlx::Type<MySql>,
    {
        row.try_get(index).map_err(|error| Failure::Broken(self.explain(error)))
    }

    /// Nobody takes care of a session any more.
    pub(super) fn closed(&self) -> BackendError {
        let place = self.place();
        BackendError::transient(format!("mysql at {place}: the store was closed meanwhile"))
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// Closes the connections that are not at work. More are made if somebody asks.
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
