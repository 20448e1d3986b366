//! Locks rows in the caller's own transaction ([`LockIn`]).

use std::time::Duration;

use registry_core::{FencingToken, Key, Registry};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Postgres, Row, Transaction, raw_sql};
use tokio::time::timeout;

use super::backend::{PgRows, bytes};
use super::error;
use super::statement::{BoundStatement, PgParam};
use crate::lock_in::{Deadline, LockIn, LockInError, TransactionLock};
use crate::server::{LeaseStore as _, Locks, SqlBackend};

impl LockIn<Postgres> for Registry {
    async fn try_lock_in_for(
        &self,
        transaction: &mut Transaction<'_, Postgres>,
        key: &str,
        wait: Duration,
    ) -> Result<Option<TransactionLock>, LockInError> {
        let Some(layout) = layout(self) else {
            return Err(LockInError::unsupported(key, "PostgreSQL"));
        };
        let key = Key::new(key).map_err(|source| LockInError::InvalidKey { source })?;
        let deadline = Deadline::after(wait);
        // The first attempt does not wait, so an error of the transaction is returned at once, even
        // if another caller holds the lock.
        let first =
            attempt_until(&layout, transaction, &key, Deadline::after(Duration::ZERO)).await?;
        if first.is_some() || wait.is_zero() {
            return Ok(first);
        }
        self.with_local_permit(&key, wait, attempt_until(&layout, transaction, &key, deadline))
            .await
    }
}

async fn attempt_until(
    layout: &LockLayout<'_>,
    connection: &mut PgConnection,
    key: &Key,
    deadline: Deadline,
) -> Result<Option<TransactionLock>, LockInError> {
    let backend = layout.rows;
    loop {
        let position = backend.position();
        match attempt(layout, connection, key, deadline.remaining()).await? {
            LockInOutcome::Granted(token) => {
                return Ok(Some(TransactionLock::new(key.clone(), token)));
            }
            _ if deadline.remaining().is_zero() => return Ok(None),
            // No pause is necessary: the statement has waited for the row, and the server wakes
            // such a waiting statement.
            LockInOutcome::RowLocked | LockInOutcome::Superseded => {}
            LockInOutcome::Held { remaining } => {
                let limit = remaining.min(POLL_INTERVAL).min(deadline.remaining());
                let _ = timeout(limit, backend.wait_for_release(key, position)).await;
            }
            LockInOutcome::InSession => {
                let limit = POLL_INTERVAL.min(deadline.remaining());
                let _ = timeout(limit, backend.wait_for_release(key, position)).await;
            }
        }
    }
}

/// The layout of a registry's locks.
struct LockLayout<'a> {
    rows: &'a PgRows,
    /// The lock is a row and, in addition, an advisory lock of a session.
    in_sessions: bool,
}

fn layout(registry: &Registry) -> Option<LockLayout<'_>> {
    match &registry.backend::<SqlBackend<Postgres>>()?.locks {
        Locks::Lease(rows) => Some(LockLayout { rows, in_sessions: false }),
        Locks::Row { rows, .. } => Some(LockLayout { rows, in_sessions: false }),
        Locks::Session { rows, .. } => Some(LockLayout { rows, in_sessions: true }),
        Locks::Spring(_) => None,
    }
}

/// The result of one attempt. Only `Granted` leaves anything locked.
enum LockInOutcome {
    Granted(FencingToken),
    /// A lease holds the key, with this time left.
    Held {
        remaining: Duration,
    },
    /// Another transaction has locked the row.
    RowLocked,
    /// Another client acquired a lease between reading the row and locking it.
    Superseded,
    /// A session holds the key, or another transaction does where locks belong to sessions.
    InSession,
}

async fn attempt(
    layout: &LockLayout<'_>,
    connection: &mut PgConnection,
    key: &Key,
    wait: Duration,
) -> Result<LockInOutcome, LockInError> {
    let row_wait = wait.clamp(ROW_WAIT_MIN, layout.rows.config.busy_timeout);
    let text = layout.rows.lock_in_statement(key, row_wait, layout.in_sessions).inlined();
    // Sent as one message. The savepoint releases the locks of a failed attempt, and keeps an error
    // from ending the transaction.
    let outcome = fetch(connection, format!("SAVEPOINT {SAVEPOINT}; {text}")).await;
    let outcome = match outcome {
        Ok(rows) => decode(&rows, key),
        Err(source) if error::is_row_locked(&source) => Ok(Some(LockInOutcome::RowLocked)),
        Err(source) if error::is_no_such_table(&source) => Ok(None),
        Err(source) if error::is_busy(&source) => Err(LockInError::conflict(key, Some(source))),
        Err(source) => Err(LockInError::database(key, source)),
    };
    let cleanup = match &outcome {
        Ok(Some(LockInOutcome::Granted(_))) => "",
        _ => "ROLLBACK TO SAVEPOINT lock_registry_lock_in;",
    };
    let ended = fetch(connection, format!("{cleanup} RELEASE SAVEPOINT {SAVEPOINT}")).await;
    let outcome = outcome?.ok_or_else(|| LockInError::other_database(key))?;
    ended.map_err(|source| LockInError::database(key, source))?;
    Ok(outcome)
}

/// Returns `None` if the transaction is not in the store's database.
fn decode(rows: &[PgRow], key: &Key) -> Result<Option<LockInOutcome>, LockInError> {
    let database = |source| LockInError::database(key, source);
    let row = rows.first().ok_or_else(|| database(sqlx::Error::RowNotFound))?;
    if !row.try_get::<bool, _>(0).map_err(database)? {
        return Ok(None);
    }
    if let Some(level) = row.try_get::<Option<String>, _>(3).map_err(database)? {
        // The snapshot is older than the lock: it was taken by an earlier read, or by the statement
        // that waited for the lock.
        return Err(LockInError::isolation(key, &level));
    }
    outcome(row).map_err(database)
}

fn outcome(row: &PgRow) -> Result<Option<LockInOutcome>, sqlx::Error> {
    if let Some(token) = row.try_get::<Option<i64>, _>(1)? {
        let token = FencingToken::try_from(token);
        return token
            .map(LockInOutcome::Granted)
            .map(Some)
            .map_err(|error| sqlx::Error::Decode(error.into()));
    }
    if row.try_get::<Option<bool>, _>(6)? == Some(true) {
        return Ok(Some(LockInOutcome::InSession));
    }
    Ok(Some(match row.try_get::<Option<i64>, _>(2)? {
        None => LockInOutcome::Superseded,
        Some(remaining) => {
            LockInOutcome::Held { remaining: super::backend::from_micros(remaining) }
        }
    }))
}

/// Sends plain text, which is independent of prepared statements and of the pooler's assignment of
/// connections.
async fn fetch(connection: &mut PgConnection, text: String) -> Result<Vec<PgRow>, sqlx::Error> {
    connection.fetch_all(raw_sql(AssertSqlSafe(text))).await
}

impl PgRows {
    /// Returns the statement that locks the row for the transaction that sends it, and waits for it
    /// at most `row_wait`.
    fn lock_in_statement(
        &self,
        key: &Key,
        row_wait: Duration,
        in_sessions: bool,
    ) -> BoundStatement<'_> {
        let id = self.row_id(key);
        BoundStatement::new(
            if in_sessions { &self.texts.lock_in_session } else { &self.texts.lock_in },
            [
                bytes(id.bytes()),
                bytes(self.namespace().as_bytes()),
                bytes(key.as_str().as_bytes()),
                PgParam::Identifier(self.store.replace('-', "")),
                PgParam::Identifier(format!("{}ms", row_wait.as_millis().max(1))),
                PgParam::Number(id.transaction_mark()),
                PgParam::Identifier(self.channel().to_owned()),
                Self::message(id),
                PgParam::Number(id.advisory_lock_key()),
            ],
        )
    }
}

const SAVEPOINT: &str = "lock_registry_lock_in";

/// A limit of zero would mean no limit.
const ROW_WAIT_MIN: Duration = Duration::from_millis(1);

/// The polling interval while a lock is held, because its end may send no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
