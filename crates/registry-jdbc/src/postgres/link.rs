//! Sends statements to the server over a free connection, and classifies errors.

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

/// Whether a statement may be sent again after the connection breaks, although the server may have
/// executed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    Harmless,
    Never,
}

impl Link {
    /// Creates the link without connecting.
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
            // Not through a pooler, which may assign the connection to another client. There each
            // statement sets its own limit.
            pool: if config.prepared { pool.with_greeting(patience(config)) } else { pool },
            manner: config.manner(),
        }
    }

    pub(super) const fn is_prepared(&self) -> bool {
        matches!(self.manner, Manner::Prepared)
    }

    /// Returns the rows that `statement` returns.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection. The server may complete the statement.
    pub(super) async fn rows(
        &self,
        errand: Errand,
        statement: &Statement<'_>,
        repeat: Repeat,
    ) -> Result<Vec<PgRow>, BackendError> {
        let seat = self.pool.enter(errand).await.map_err(refused)?;
        let was_idle = seat.was_idle();
        match self.ask(seat, statement).await {
            // The connection broke while it was idle, as all do when the server restarts.
            Err(Trouble::Broken(first)) if was_idle && repeat == Repeat::Harmless => {
                let again = self.ask_anew(errand, statement).await;
                // The first attempt may have been executed before the connection broke, whatever
                // the second one returned.
                again.map_err(|error| if first.refused() { error } else { error.as_unknown() })
            }
            // The server may still execute the request, so the caller decides.
            Err(Trouble::Broken(error)) if was_idle => {
                self.pool.close_idle();
                Err(error.on_stale_connection())
            }
            Err(trouble) => {
                // The idle connections would probably fail in the same way: a server that has moved
                // away may drop all packets.
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

    /// Closes the idle connections. New ones are opened on demand.
    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

/// Opens a connection outside the pool.
pub(super) async fn connect(config: &PostgresConfig) -> Result<PgConnection, BackendError> {
    let server = config.for_statements();
    match timeout(config.connect_timeout, PgConnection::connect_with(&server)).await {
        Ok(connected) => connected.map_err(error::not_connected),
        Err(_) => Err(error::unreachable_in_time()),
    }
}

/// Returns the greeting that limits how long a statement waits for its tables, which it locks
/// before anything else. Without the limit, a statement that waits for a table rebuild could grant
/// a lock that its caller has given up.
fn patience(config: &PostgresConfig) -> Greet<PgConnection> {
    let text = format!("SET lock_timeout = {}", config.busy_timeout.as_millis().max(1));
    Box::new(move |connection| {
        let greeting = raw_sql(AssertSqlSafe(text.clone()));
        async move { greeting.execute(connection).await.map(drop) }.boxed()
    })
}

enum Trouble {
    /// The server answered, and the connection is usable.
    Answered(BackendError),
    /// The connection is unusable.
    Broken(BackendError),
    /// The server did not answer within the time limit.
    Silent(BackendError),
}

impl Trouble {
    fn told(self) -> BackendError {
        match self {
            Self::Answered(error) | Self::Broken(error) | Self::Silent(error) => error,
        }
    }
}

/// Converts a refusal. No statement was sent.
fn refused(refusal: Refusal) -> BackendError {
    match refusal {
        Refusal::Exhausted => error::exhausted(),
        Refusal::Silent => error::unreachable_in_time(),
        Refusal::Sqlx(error) => error::not_connected(error),
    }
}
