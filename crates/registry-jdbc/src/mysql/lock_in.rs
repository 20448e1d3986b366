//! Locks a key's row in the caller's own transaction.
//!
//! InnoDB keeps the row locks of a transaction until the transaction ends, even after a rollback to
//! a savepoint. InnoDB has no lock timeout for a single statement. So connections of the store
//! create and check the row. The caller's connection locks only a row that appears free, and never
//! waits for it.
//!
//! Before that lock, the statements on the caller's connection open no snapshot. Otherwise a
//! transaction with `REPEATABLE READ` would read rows as they were before the grant. If the caller
//! has opened an older snapshot itself, the call returns an error.

use std::time::Duration;

use registry_core::config::BackendConfig as _;
use registry_core::{BackendError, FencingToken, Key};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, MySqlConnection, Row};
use tokio::time::{Instant, sleep};

use super::backend::{MySqlLeaseTable, is_locked_or_missing};
use super::error;
use super::release_poller;
use super::statement::simple_query;
use crate::lock_in::{Deadline, LockInError, response_within};
use crate::server::statement::flag;
use crate::server::{ConnectionUse, Resend, ServerErrors as _, Statement, StatementText, Value};

pub(super) async fn attempt_until(
    table: &MySqlLeaseTable,
    connection: &mut MySqlConnection,
    key: &Key,
    deadline: Deadline,
) -> Result<Option<FencingToken>, LockInError> {
    let started_at = Instant::now();
    loop {
        if let Some(token) = attempt(table, connection, key).await? {
            return Ok(Some(token));
        }
        let remaining = deadline.remaining();
        if remaining.is_zero() {
            return Ok(None);
        }
        sleep(release_poller::poll_pause(started_at).min(PAUSE_MAX).min(remaining)).await;
    }
}

/// Makes one attempt. Returns `None` if the lock is held. Then the transaction has not locked the
/// key's row, but it may have locked the meta row.
async fn attempt(
    table: &MySqlLeaseTable,
    connection: &mut MySqlConnection,
    key: &Key,
) -> Result<Option<FencingToken>, LockInError> {
    let backend_error = |source: BackendError| {
        LockInError::backend(key, source.with_address(table.store.config.address()))
    };
    // The store's connections may find the row free, while the transaction finds no row to lock.
    // Then the transaction is on another database, or another client briefly locked the row. After
    // a second such round, the id of the tables shows whether the database is another one.
    for _ in 0..2 {
        if !prepare_row(table, key).await.map_err(backend_error)? {
            return Ok(None);
        }
        if let Some(token) = try_lock(table, connection, key).await? {
            return Ok(Some(token));
        }
        if is_locked_or_missing(table, key, ConnectionUse::Acquire).await.map_err(backend_error)? {
            return Ok(None);
        }
    }
    // A plain read would open the caller's snapshot before the grant. The transaction would then
    // not see all writes before the grant. A read that locks the meta row opens no snapshot.
    let meta = send(table, connection, key, &table.store.statements.meta_locking_read, []).await?;
    check_database(table, meta.as_ref(), 1, key)?;
    check_writable(meta.as_ref(), 2, key)?;
    Ok(None)
}

async fn try_lock(
    table: &MySqlLeaseTable,
    connection: &mut MySqlConnection,
    key: &Key,
) -> Result<Option<FencingToken>, LockInError> {
    let (statements, id) = (&table.store.statements, || table.id_value(key));
    let classify = |error| classify(key, error);
    let locked = send(table, connection, key, &statements.lock_row, [id()]).await?;
    let Some(row) = locked else { return Ok(None) };
    // Another client was granted a lease since the check. The row lock of this transaction blocks
    // renewals of that lease, so return an error at once.
    if row.try_get::<i64, _>(0).map_err(classify)? != 0 {
        return Err(LockInError::conflict(key, None));
    }
    let claim: Option<Vec<u8>> = row.try_get(2).map_err(classify)?;
    if claim.is_some() {
        // Another client held the key since the check, and the row does not show when that grant
        // ended.
        return Err(LockInError::conflict(key, None));
    }
    let newest_token = Value::Number(row.try_get(3).map_err(classify)?);
    let values = [id(), Value::MaybeBytes(claim), newest_token];
    let seen = send(table, connection, key, &statements.is_current_in_snapshot, values).await?;
    check_database(table, seen.as_ref(), 0, key)?;
    check_writable(seen.as_ref(), 2, key)?;
    if is_false(seen.as_ref(), 1) {
        // The snapshot is older than the last grant, so the transaction would read rows that the
        // holder of that grant has overwritten.
        return Err(LockInError::conflict(key, None));
    }
    let token: i64 = row.try_get(1).map_err(classify)?;
    let fencing_token = FencingToken::try_from(token)
        .map_err(|error| classify(sqlx::Error::Decode(error.into())))?;
    let values = [id(), Value::Number(token)];
    send(table, connection, key, &statements.raise_token, values).await?;
    Ok(Some(fencing_token))
}

/// Sends a statement in the caller's transaction. Returns its first row.
async fn send(
    table: &MySqlLeaseTable,
    connection: &mut MySqlConnection,
    key: &Key,
    text: &StatementText,
    values: impl Into<Vec<Value>>,
) -> Result<Option<MySqlRow>, LockInError> {
    let text = Statement::new(text, values).inlined::<MySql>();
    let response = simple_query(connection, text);
    let rows = response_within(table.store.settings().response_timeout, response).await;
    Ok(rows.map_err(|error| classify(key, error))?.into_iter().next())
}

/// Returns an error if the transaction is not on the store's database. `column` of `row` contains
/// the id of the tables.
fn check_database(
    table: &MySqlLeaseTable,
    row: Option<&MySqlRow>,
    column: usize,
    key: &Key,
) -> Result<(), LockInError> {
    let store: Option<Vec<u8>> = row.and_then(|row| row.try_get(column).ok());
    if store.as_ref() == Some(&table.store.id) {
        Ok(())
    } else {
        Err(LockInError::other_database(key))
    }
}

/// Returns an error if the server of the caller's connection is read-only. This server may differ
/// from the server of the store's connections. `column` of `row` shows whether it is writable.
fn check_writable(row: Option<&MySqlRow>, column: usize, key: &Key) -> Result<(), LockInError> {
    if is_false(row, column) {
        return Err(LockInError::backend(key, error::read_only(error::STORE)));
    }
    Ok(())
}

fn is_false(row: Option<&MySqlRow>, column: usize) -> bool {
    row.is_some_and(|row| row.try_get::<i64, _>(column).is_ok_and(|value| value == 0))
}

fn classify(key: &Key, source: sqlx::Error) -> LockInError {
    if MySql::lacks_lock_tables(&source) {
        LockInError::other_database(key)
    } else if MySql::is_conflict(&source) {
        LockInError::conflict(key, Some(source))
    } else {
        LockInError::database(key, source)
    }
}

/// Creates the row if it is missing, and removes the claim of an ended grant. Returns true if the
/// row contains no lease and was written after the end of the last grant. Returns false if another
/// client holds a lease, has just inserted the row, or keeps the row of an ended grant locked.
/// Returns an error if the server is read-only.
async fn prepare_row(table: &MySqlLeaseTable, key: &Key) -> Result<bool, BackendError> {
    let (store, statements) = (&table.store, &table.store.statements);
    let change = async |text, values: Vec<Value>| {
        let statement = Statement::new(text, values);
        store.client.send(ConnectionUse::Acquire, Resend::Allowed, &statement).await
    };
    let found = store.query(&statements.is_free, [table.id_value(key)]).await?;
    let Some(row) = found.into_iter().next() else {
        let values = vec![table.id_value(key), table.namespace_value(), Value::key(key)];
        let is_inserted = change(&statements.insert_row, values).await?.affected_rows > 0;
        if !is_inserted {
            // Another client has inserted the row, or the server is read-only.
            store.check_writable(ConnectionUse::Acquire).await?;
        }
        return Ok(is_inserted);
    };
    let (is_free, has_claim) = (flag::<MySql>(&row, 0)?, flag::<MySql>(&row, 1)?);
    if !flag::<MySql>(&row, 2)? {
        store.check_writable(ConnectionUse::Acquire).await?;
        return Ok(false);
    }
    if !is_free || !has_claim {
        return Ok(is_free);
    }
    Ok(change(&statements.clear_ended, vec![table.id_value(key)]).await?.affected_rows > 0)
}

/// The longest pause between two attempts of a waiting transaction. If another process locks the
/// key again and again, the row is free for only milliseconds. A longer pause would miss that time.
const PAUSE_MAX: Duration = Duration::from_millis(10);
