//! Asks the server, over whichever connection is free, and sorts what goes wrong.

use futures_util::FutureExt as _;
use registry_core::BackendError;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use tokio::time::timeout;

use super::config::PostgresConfig;
use super::error::{self, explain};
use super::statement::{Manner, Statement};
use crate::server::{Errand, Greet, Pool, PoolLimits, Refusal, Seat};

#[derive(Debug)]
pub(super) struct Link {
    pool: Pool<PgConnection>,
    manner: Manner,
}

/// Whether a statement may be sent once more when the connection breaks, although it may have been done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    Harmless,
    Never,
}

impl Link {
    /// Connects to nothing yet.
    pub(super) fn new(config: &PostgresConfig) -> Self {
        let limits = PoolLimits {
            connections: config.connections,
            connect: config.connect_timeout,
            patience: config.response_timeout,
            answer: config.response_timeout,
            row: config.busy_timeout,
        };
        let pool = Pool::new(config.for_statements(), limits);
        Self {
            // Not through a pooler, where it would be said to whoever comes next. There each statement says it for itself.
            pool: if config.prepared { pool.with_greeting(patience(config)) } else { pool },
            manner: config.manner(),
        }
    }

    pub(super) const fn is_prepared(&self) -> bool {
        matches!(self.manner, Manner::Prepared)
    }

    /// The answer to `statement`.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection; the server may finish the statement.
    pub(super) async fn rows(
        &self,
        errand: Errand,
        statement: &Statement<'_>,
        repeat: Repeat,
    ) -> Result<Vec<PgRow>, BackendError> {
        let seat = self.pool.enter(errand).await.map_err(refused)?;
        let was_idle = seat.was_idle();
        match self.ask(seat, statement).await {
            // It broke while nobody used it, as all do when the server is started anew.
            Err(Trouble::Broken(first)) if was_idle && repeat == Repeat::Harmless => {
                let again = self.ask_anew(errand, statement).await;
                // Whatever is known of the second try, the first one may have got through before the connection broke.
                again.map_err(|error| if first.refused() { error } else { error.as_unknown() })
            }
            // The request may still arrive, so its caller decides.
            Err(Trouble::Broken(error)) if was_idle => {
                self.pool.close_idle();
                Err(error.on_stale_connection())
            }
            Err(trouble) => {
                // What one connection has met, the others would: a server that has moved away may swallow all that is sent to it.
                if !matches!(trouble, Trouble::Answered(_)) {
                    self.pool.close_idle();
                }
                Err(trouble.told())
            }
            Ok(rows) => Ok(rows),
        }
    }

    async fn ask_anew(
        &self,
        errand: Errand,
        statement: &Statement<'_>,
    ) -> Result<Vec<PgRow>, BackendError> {
        let seat = self.pool.enter_anew(errand).await.map_err(refused)?;
        self.ask(seat, statement).await.map_err(Trouble::told)
    }

    async fn ask(
        &self,
        mut seat: Seat<'_, PgConnection>,
        statement: &Statement<'_>,
    ) -> Result<Vec<PgRow>, Trouble> {
        let (connection, watch) = seat.ask();
        match watch.answered(statement.send(connection, self.manner)).await {
            Some(Ok(rows)) => {
                seat.leave();
                Ok(rows)
            }
            Some(Err(error)) if error::spares_connection(&error) => {
                seat.leave();
                Err(Trouble::Answered(explain(error)))
            }
            Some(Err(error)) => Err(Trouble::Broken(explain(error))),
            None => Err(Trouble::Silent(error::silent())),
        }
    }

    /// Closes the connections that are not at work. More are opened if somebody asks.
    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

/// A connection that no pool knows of.
pub(super) async fn connect(config: &PostgresConfig) -> Result<PgConnection, BackendError> {
    let server = config.for_statements();
    match timeout(config.connect_timeout, PgConnection::connect_with(&server)).await {
        Ok(connected) => connected.map_err(error::not_connected),
        Err(_) => Err(error::unreachable_in_time()),
    }
}

/// Says how long a statement waits for its tables: it has them before it can say anything by itself. Whoever waits for ever, for somebody who rebuilds
/// a table, would be granted a lock after all when nobody wants it any more.
fn patience(config: &PostgresConfig) -> Greet<PgConnection> {
    let text = format!("SET lock_timeout = {}", config.busy_timeout.as_millis().max(1));
    Box::new(move |connection| {
        let greeting = raw_sql(AssertSqlSafe(text.clone()));
        async move { greeting.execute(connection).await.map(drop) }.boxed()
    })
}

enum Trouble {
    /// The server has answered, and the connection is as good as before.
    Answered(BackendError),
    /// The connection is of no use any more.
    Broken(BackendError),
    /// Nothing was heard for so long that nobody waits any more.
    Silent(BackendError),
}

impl Trouble {
    fn told(self) -> BackendError {
        match self {
            Self::Answered(error) | Self::Broken(error) | Self::Silent(error) => error,
        }
    }
}

/// Nothing was sent.
fn refused(refusal: Refusal) -> BackendError {
    match refusal {
        Refusal::Exhausted => error::exhausted(),
        Refusal::Silent => error::unreachable_in_time(),
        Refusal::Sqlx(error) => error::not_connected(error),
    }
}
