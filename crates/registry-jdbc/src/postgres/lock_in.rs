//! Locks rows in the caller's own transaction.

use std::time::Duration;

use registry_core::{FencingToken, Key};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Postgres, Row};
use tokio::time::timeout;

use super::error;
use super::statement::simple_query;
use crate::lock_in::{Deadline, LockInError, response_within};
use crate::server::statement::from_micros;
use crate::server::{LockableTable, ServerErrors as _, Statement, Value, WakeupSource as _};

pub(super) async fn attempt_until(
    lockable: LockableTable<'_, Postgres>,
    connection: &mut PgConnection,
    key: &Key,
    deadline: Deadline,
) -> Result<Option<FencingToken>, LockInError> {
    let table = lockable.table;
    loop {
        let position = table.wakeups.position();
        match attempt(lockable, connection, key, deadline.remaining()).await? {
            LockInOutcome::Granted(token) => return Ok(Some(token)),
            _ if deadline.remaining().is_zero() => return Ok(None),
            // No pause is necessary: before `RowLocked`, the statement has waited on the server.
            // After `AcquiredConcurrently`, the next attempt finds the new holder's lease.
            LockInOutcome::RowLocked | LockInOutcome::AcquiredConcurrently => {}
            LockInOutcome::Leased { remaining } => {
                let limit = remaining.min(POLL_INTERVAL).min(deadline.remaining());
                let _ = timeout(limit, table.wakeups.wait(table.row_id(key), position)).await;
            }
            LockInOutcome::AdvisoryLockHeld => {
                let limit = POLL_INTERVAL.min(deadline.remaining());
                let _ = timeout(limit, table.wakeups.wait(table.row_id(key), position)).await;
            }
        }
    }
}

/// The result of one attempt. Only after `Granted` does the transaction hold new locks.
enum LockInOutcome {
    Granted(FencingToken),
    /// Another client holds a lease on the key, with this time left.
    Leased {
        remaining: Duration,
    },
    /// Another transaction has locked the row.
    RowLocked,
    /// Another client acquired a lease between reading the row and locking it.
    AcquiredConcurrently,
    /// Another session or transaction holds the advisory lock of the key.
    AdvisoryLockHeld,
}

async fn attempt(
    lockable: LockableTable<'_, Postgres>,
    connection: &mut PgConnection,
    key: &Key,
    wait: Duration,
) -> Result<LockInOutcome, LockInError> {
    let settings = lockable.table.store.settings();
    let row_wait = wait.clamp(ROW_WAIT_MIN, settings.busy_timeout);
    let limit = row_wait.saturating_add(settings.response_timeout);
    let text = statement(lockable, key, row_wait).inlined::<Postgres>();
    // The statements are one message of plain text, which is independent of prepared statements and
    // of a pooler's assignment of connections. The savepoint releases the locks of a failed
    // attempt, and keeps an error from ending the transaction.
    let response = simple_query(connection, format!("SAVEPOINT {SAVEPOINT}; {text}"));
    let outcome = match response_within(limit, response).await {
        Ok(rows) => decode(&rows, key),
        // The connection is broken or does not answer, so the savepoint cannot be released.
        Err(source @ sqlx::Error::Io(_)) => return Err(LockInError::database(key, source)),
        Err(source) if error::is_row_locked(&source) => Ok(Some(LockInOutcome::RowLocked)),
        Err(source) if Postgres::lacks_lock_tables(&source) => Ok(None),
        Err(source) if Postgres::is_conflict(&source) => {
            Err(LockInError::conflict(key, Some(source)))
        }
        Err(source) => Err(LockInError::database(key, source)),
    };
    let cleanup = match &outcome {
        Ok(Some(LockInOutcome::Granted(_))) => "",
        _ => "ROLLBACK TO SAVEPOINT lock_registry_lock_in;",
    };
    let response = simple_query(connection, format!("{cleanup} RELEASE SAVEPOINT {SAVEPOINT}"));
    let ended = response_within(limit, response).await;
    let outcome = outcome?.ok_or_else(|| LockInError::other_database(key))?;
    ended.map_err(|source| LockInError::database(key, source))?;
    Ok(outcome)
}

/// Returns `None` if the transaction is not in the store's database.
fn decode(rows: &[PgRow], key: &Key) -> Result<Option<LockInOutcome>, LockInError> {
    let database_error = |source| LockInError::database(key, source);
    let row = rows.first().ok_or_else(|| database_error(sqlx::Error::RowNotFound))?;
    if !row.try_get::<bool, _>(0).map_err(database_error)? {
        return Ok(None);
    }
    if let Some(level) = row.try_get::<Option<String>, _>(3).map_err(database_error)? {
        // At this isolation level, the transaction keeps the snapshot of its first statement, which
        // would be older than the lock. So the statement has locked nothing.
        return Err(LockInError::isolation(key, &level));
    }
    decode_outcome(row).map_err(database_error)
}

fn decode_outcome(row: &PgRow) -> Result<Option<LockInOutcome>, sqlx::Error> {
    if let Some(token) = row.try_get::<Option<i64>, _>(1)? {
        let token = FencingToken::try_from(token);
        return token
            .map(LockInOutcome::Granted)
            .map(Some)
            .map_err(|error| sqlx::Error::Decode(error.into()));
    }
    if row.try_get::<Option<bool>, _>(6)? == Some(true) {
        return Ok(Some(LockInOutcome::AdvisoryLockHeld));
    }
    Ok(Some(match row.try_get::<Option<i64>, _>(2)? {
        None => LockInOutcome::AcquiredConcurrently,
        Some(remaining) => LockInOutcome::Leased { remaining: from_micros(remaining) },
    }))
}

/// Returns the statement that locks the row for the transaction. The statement waits for the row at
/// most `row_wait`.
fn statement<'a>(
    lockable: LockableTable<'a, Postgres>,
    key: &Key,
    row_wait: Duration,
) -> Statement<'a> {
    let table = lockable.table;
    let id = table.row_id(key);
    let statements = &table.store.statements;
    let mut values = vec![
        table.id_value(key),
        table.namespace_value(),
        Value::key(key),
        Value::Bytes(table.store.id.clone()),
        Value::Text(format!("{}ms", row_wait.as_millis().max(1))),
        Value::Number(id.holder_lock_key()),
    ];
    values.extend(table.wakeups.notification(id).drain(..2));
    values.push(Value::Number(id.advisory_lock_key()));
    let text = match lockable.has_session_locks {
        true => &statements.lock_in_session,
        false => &statements.lock_in,
    };
    Statement::new(text, values)
}

const SAVEPOINT: &str = "lock_registry_lock_in";

/// A limit of zero would mean no limit.
const ROW_WAIT_MIN: Duration = Duration::from_millis(1);

/// The polling interval while another client holds the lock. The server sends no notification when
/// a lease expires.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
