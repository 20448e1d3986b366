//! Locks rows in the caller's own transaction ([`LockIn`]).

use std::time::Duration;

use registry_core::{FencingToken, Key, Registry};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Postgres, Row, Transaction, raw_sql};
use tokio::time::timeout;

use super::backend::{PostgresBackend, bytes};
use super::error;
use super::row::PostgresRowBackend;
use super::session::PostgresSessionBackend;
use super::statement::{Statement, Value};
use crate::lock_in::{LockIn, LockInError, Patience, TransactionLock};

impl LockIn<Postgres> for Registry {
    async fn lock_in(
        &self,
        transaction: &mut Transaction<'_, Postgres>,
        key: &str,
    ) -> Result<TransactionLock, LockInError> {
        loop {
            if let Some(lock) = self.try_lock_in_for(transaction, key, Duration::MAX).await? {
                return Ok(lock);
            }
        }
    }

    async fn try_lock_in_for(
        &self,
        transaction: &mut Transaction<'_, Postgres>,
        key: &str,
        wait: Duration,
    ) -> Result<Option<TransactionLock>, LockInError> {
        let Some(place) = place(self) else {
            return Err(LockInError::unsupported(key, "PostgreSQL"));
        };
        let key = Key::new(key).map_err(|source| LockInError::InvalidKey { source })?;
        let patience = Patience::of(wait);
        // The first attempt does not wait, so an error of the transaction is returned at once, even
        // if another caller holds the lock.
        let at_once = attempts(&place, transaction, &key, Patience::of(Duration::ZERO)).await?;
        if at_once.is_some() || wait.is_zero() {
            return Ok(at_once);
        }
        self.in_local_turn(&key, wait, attempts(&place, transaction, &key, patience)).await
    }
}

async fn attempts(
    place: &Where<'_>,
    connection: &mut PgConnection,
    key: &Key,
    patience: Patience,
) -> Result<Option<TransactionLock>, LockInError> {
    let backend = place.rows;
    loop {
        let moment = backend.moment();
        match attempt(place, connection, key, patience.left()).await? {
            Answer::Taken(token) => return Ok(Some(TransactionLock::new(key.clone(), token))),
            _ if patience.left().is_zero() => return Ok(None),
            // No pause is necessary: the statement has waited for the row, and the server wakes
            // such a waiting statement.
            Answer::RowLocked | Answer::Overtaken => {}
            Answer::Held { left } => {
                let limit = left.min(LOOK_AGAIN).min(patience.left());
                let _ = timeout(limit, backend.heard_of(key, moment)).await;
            }
            Answer::InSession => {
                let limit = LOOK_AGAIN.min(patience.left());
                let _ = timeout(limit, backend.heard_of(key, moment)).await;
            }
        }
    }
}

/// The layout of a registry's locks.
struct Where<'a> {
    rows: &'a PostgresBackend,
    /// The lock is a row and, in addition, an advisory lock of a session.
    in_sessions: bool,
}

fn place(registry: &Registry) -> Option<Where<'_>> {
    let leases = registry.backend::<PostgresBackend>();
    let rows = || registry.backend::<PostgresRowBackend>().map(|backend| &backend.rows);
    let session = || registry.backend::<PostgresSessionBackend>().map(|backend| &backend.rows);
    let in_rows = leases.or_else(rows).map(|rows| Where { rows, in_sessions: false });
    in_rows.or_else(|| session().map(|rows| Where { rows, in_sessions: true }))
}

/// The result of one attempt. Only `Taken` leaves anything locked.
enum Answer {
    Taken(FencingToken),
    /// A lease holds the key, with this time left.
    Held {
        left: Duration,
    },
    /// Another transaction has locked the row.
    RowLocked,
    /// Another client acquired a lease between reading the row and locking it.
    Overtaken,
    /// A session holds the key, or another transaction does where locks belong to sessions.
    InSession,
}

async fn attempt(
    place: &Where<'_>,
    connection: &mut PgConnection,
    key: &Key,
    wait: Duration,
) -> Result<Answer, LockInError> {
    let row_wait = wait.clamp(ROW_WAIT_MIN, place.rows.config.busy_timeout);
    let text = place.rows.lock_in_statement(key, row_wait, place.in_sessions).plain();
    // Sent as one message. The savepoint releases the locks of a failed attempt, and keeps an error
    // from ending the transaction.
    let answer = ask(connection, format!("SAVEPOINT {SAVEPOINT}; {text}")).await;
    let answer = match answer {
        Ok(rows) => read(&rows, key),
        Err(source) if error::is_row_locked(&source) => Ok(Some(Answer::RowLocked)),
        Err(source) if error::is_no_such_table(&source) => Ok(None),
        Err(source) if error::is_busy(&source) => Err(LockInError::conflict(key, Some(source))),
        Err(source) => Err(LockInError::database(key, source)),
    };
    let end = match &answer {
        Ok(Some(Answer::Taken(_))) => "",
        _ => "ROLLBACK TO SAVEPOINT lock_registry_lock_in;",
    };
    let ended = ask(connection, format!("{end} RELEASE SAVEPOINT {SAVEPOINT}")).await;
    let answer = answer?.ok_or_else(|| LockInError::other_database(key))?;
    ended.map_err(|source| LockInError::database(key, source))?;
    Ok(answer)
}

/// Returns `None` if the transaction is not in the store's database.
fn read(rows: &[PgRow], key: &Key) -> Result<Option<Answer>, LockInError> {
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
    answer(row).map_err(database)
}

fn answer(row: &PgRow) -> Result<Option<Answer>, sqlx::Error> {
    if let Some(token) = row.try_get::<Option<i64>, _>(1)? {
        let token = FencingToken::try_from(token);
        return token
            .map(Answer::Taken)
            .map(Some)
            .map_err(|error| sqlx::Error::Decode(error.into()));
    }
    if row.try_get::<Option<bool>, _>(6)? == Some(true) {
        return Ok(Some(Answer::InSession));
    }
    Ok(Some(match row.try_get::<Option<i64>, _>(2)? {
        None => Answer::Overtaken,
        Some(left) => Answer::Held { left: super::backend::span(left) },
    }))
}

/// Sends plain text, which is independent of prepared statements and of the pooler's assignment of
/// connections.
async fn ask(connection: &mut PgConnection, text: String) -> Result<Vec<PgRow>, sqlx::Error> {
    connection.fetch_all(raw_sql(AssertSqlSafe(text))).await
}

impl PostgresBackend {
    /// Returns the statement that locks the row for the transaction that sends it, and waits for it
    /// at most `row_wait`.
    fn lock_in_statement(&self, key: &Key, row_wait: Duration, in_sessions: bool) -> Statement<'_> {
        let id = self.row_id(key);
        Statement::new(
            if in_sessions { &self.texts.lock_in_session } else { &self.texts.lock_in },
            [
                bytes(id.bytes()),
                bytes(self.namespace().as_bytes()),
                bytes(key.as_str().as_bytes()),
                Value::Word(self.store.replace('-', "")),
                Value::Word(format!("{}ms", row_wait.as_millis().max(1))),
                Value::Number(id.mark()),
                Value::Word(self.channel().to_owned()),
                Self::message(id),
                Value::Number(id.number()),
            ],
        )
    }
}

const SAVEPOINT: &str = "lock_registry_lock_in";

/// A limit of zero would mean no limit.
const ROW_WAIT_MIN: Duration = Duration::from_millis(1);

/// The polling interval while a lock is held, because its end may send no notification.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
