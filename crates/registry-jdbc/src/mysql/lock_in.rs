//! Locks a key's row in the caller's own transaction.
//!
//! InnoDB keeps the row locks of a transaction until it ends, even after a rollback to a savepoint.
//! It has no lock timeout for a single statement. So connections of the store create and check the
//! row. The caller's connection only locks a row that appears free, and never waits.
//!
//! The caller's statements before that lock open no snapshot. With `REPEATABLE READ`, the
//! transaction would otherwise read rows as they were before it had the lock. A transaction with an
//! older snapshot is refused.

use std::time::Duration;

use registry_core::{FencingToken, Key, Registry};
use sqlx::mysql::MySqlRow;
use sqlx::{Executor as _, MySql, MySqlConnection, Row, Transaction};
use tokio::time::{Instant, sleep};

use super::backend::MySqlRows;
use super::error;
use super::waiters;
use crate::lock_in::{Deadline, LockIn, LockInError, TransactionLock};
use crate::server::{ConnectionUse, Locks, Resend, SqlBackend};

impl LockIn<MySql> for Registry {
    async fn try_lock_in_for(
        &self,
        transaction: &mut Transaction<'_, MySql>,
        key: &str,
        wait: Duration,
    ) -> Result<Option<TransactionLock>, LockInError> {
        let backend: &MySqlRows =
            match self.backend::<SqlBackend<MySql>>().map(|backend| &backend.locks) {
                Some(Locks::Lease(rows)) => rows,
                Some(Locks::Row { rows, .. }) => rows,
                _ => return Err(LockInError::unsupported(key, "MySQL")),
            };
        let key = Key::new(key).map_err(|source| LockInError::InvalidKey { source })?;
        let deadline = Deadline::after(wait);
        // A transaction that already has the lock must not wait for a local caller that waits for
        // this transaction.
        let first =
            attempt_until(backend, transaction, &key, Deadline::after(Duration::ZERO)).await?;
        if first.is_some() || wait.is_zero() {
            return Ok(first);
        }
        self.with_local_permit(&key, wait, attempt_until(backend, transaction, &key, deadline))
            .await
    }
}

async fn attempt_until(
    backend: &MySqlRows,
    connection: &mut MySqlConnection,
    key: &Key,
    deadline: Deadline,
) -> Result<Option<TransactionLock>, LockInError> {
    let started_at = Instant::now();
    loop {
        if let Some(token) = attempt(backend, connection, key).await? {
            return Ok(Some(TransactionLock::new(key.clone(), token)));
        }
        let remaining = deadline.remaining();
        if remaining.is_zero() {
            return Ok(None);
        }
        sleep(waiters::poll_pause(started_at).min(PAUSE_MAX).min(remaining)).await;
    }
}

/// Attempts once. Returns `None` if the lock is held; the transaction has locked nothing then.
async fn attempt(
    backend: &MySqlRows,
    connection: &mut MySqlConnection,
    key: &Key,
) -> Result<Option<FencingToken>, LockInError> {
    // If the row is free for the store but not in the transaction, the transaction is on another
    // database, or the holder changed meanwhile. After a second such round, the store's id decides.
    for _ in 0..2 {
        if !backend.prepare_row(key).await.map_err(|source| LockInError::backend(key, source))? {
            return Ok(None);
        }
        if let Some(token) = try_lock(backend, connection, key).await? {
            return Ok(Some(token));
        }
        let is_locked = backend.is_locked(key, ConnectionUse::Acquire).await;
        if is_locked.map_err(|source| LockInError::backend(key, source))? {
            return Ok(None);
        }
    }
    // A plain read would open the caller's snapshot before the lock is granted. The transaction
    // would then not see writes up to the grant.
    let meta = connection.fetch_optional(backend.statements.meta_now_inline()).await;
    let meta = meta.map_err(|error| classify(key, error))?;
    check_store(backend, meta.as_ref(), 1, key)?;
    Ok(None)
}

async fn try_lock(
    backend: &MySqlRows,
    connection: &mut MySqlConnection,
    key: &Key,
) -> Result<Option<FencingToken>, LockInError> {
    let classify = |error| classify(key, error);
    let lock = connection.fetch_optional(backend.statements.lock_row_inline(key));
    let Some(row) = lock.await.map_err(classify)? else { return Ok(None) };
    // A lease was granted since the check. Its holder cannot renew until this transaction ends, so
    // fail at once.
    if row.try_get::<i64, _>(0).map_err(classify)? != 0 {
        return Err(LockInError::conflict(key, None));
    }
    let claim: Option<Vec<u8>> = row.try_get(2).map_err(classify)?;
    if claim.is_some() {
        // The key was held since the check, and the row does not show when that ended.
        return Err(LockInError::conflict(key, None));
    }
    let seen = backend.statements.row_seen_inline(key, claim, row.try_get(3).map_err(classify)?);
    let seen = connection.fetch_optional(seen).await.map_err(classify)?;
    check_store(backend, seen.as_ref(), 0, key)?;
    if seen.is_some_and(|seen| seen.try_get::<i64, _>(1).is_ok_and(|is_seen| is_seen == 0)) {
        // The snapshot is older than the last grant: the transaction would read rows that its
        // holder has overwritten.
        return Err(LockInError::conflict(key, None));
    }
    let token: i64 = row.try_get(1).map_err(classify)?;
    let written = FencingToken::try_from(token);
    let written = written.map_err(|error| classify(sqlx::Error::Decode(error.into())))?;
    connection
        .execute(backend.statements.raise_token_inline(key, token))
        .await
        .map_err(classify)?;
    Ok(Some(written))
}

/// Returns an error if the transaction is not on the store's database. The store's id is in this
/// column of `row`.
fn check_store(
    backend: &MySqlRows,
    row: Option<&MySqlRow>,
    column: usize,
    key: &Key,
) -> Result<(), LockInError> {
    let store: Option<Vec<u8>> = row.and_then(|row| row.try_get(column).ok());
    if store.as_deref() == Some(backend.store.as_slice()) {
        Ok(())
    } else {
        Err(LockInError::other_database(key))
    }
}

fn classify(key: &Key, source: sqlx::Error) -> LockInError {
    if error::is_no_such_table(&source) {
        LockInError::other_database(key)
    } else if error::is_busy(&source) {
        LockInError::conflict(key, Some(source))
    } else {
        LockInError::database(key, source)
    }
}

impl MySqlRows {
    /// Returns whether there is no lease on the key. If so, the key has a row that has changed
    /// since the last holder ended.
    async fn prepare_row(&self, key: &Key) -> Result<bool, registry_core::BackendError> {
        let build = || self.statements.is_free(key);
        let rows = self.client.rows(ConnectionUse::Acquire, build).await?;
        if let Some(row) = rows.first() {
            let (is_free, names_holder) =
                (self.column::<i64>(row, 0)? != 0, self.column::<i64>(row, 1)? != 0);
            if !is_free || !names_holder {
                return Ok(is_free);
            }
            let clear = || self.statements.clear_ended(key);
            let cleared =
                self.client.execute(ConnectionUse::Acquire, Resend::Allowed, clear).await?;
            return Ok(cleared.rows_affected() > 0);
        }
        let insert = || self.statements.insert_row(key);
        self.client.execute(ConnectionUse::Acquire, Resend::Allowed, insert).await?;
        Ok(true)
    }

    /// Returns whether a transaction currently has the key's row locked.
    pub(super) async fn is_locked(
        &self,
        key: &Key,
        connection_use: ConnectionUse,
    ) -> Result<bool, registry_core::BackendError> {
        let build = || self.statements.lock_row(key);
        Ok(self.client.rows(connection_use, build).await?.is_empty())
    }
}

/// The longest pause between two attempts of a waiting transaction. Guards of a busy process leave
/// the row free for milliseconds, which a longer pause would miss.
const PAUSE_MAX: Duration = Duration::from_millis(10);
