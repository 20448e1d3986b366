//! Locks in the caller's own transaction: its row, by the caller.
//!
//! InnoDB keeps whatever row a transaction has locked until it ends, savepoint or not, and has no limit for a wait that would be the statement's
//! own. So the row is made, and looked at, by the store's own connections; the caller's only ever locks it when it looks free, and never waits.
//!
//! The caller's statements up to that lock open no snapshot: with `REPEATABLE READ` the transaction would go on reading what was there before it had
//! the lock. One that has a snapshot from before is refused.

use std::time::Duration;

use registry_core::{FencingToken, Key, Registry};
use sqlx::mysql::MySqlRow;
use sqlx::{Executor as _, MySql, MySqlConnection, Row, Transaction};
use tokio::time::{Instant, sleep};

use super::backend::MySqlBackend;
use super::error;
use super::link::Repeat;
use super::row::MySqlRowBackend;
use super::wake;
use crate::lock_in::{LockIn, LockInError, Patience, TransactionLock};
use crate::server::Errand;

impl LockIn<MySql> for Registry {
    async fn lock_in(
        &self,
        transaction: &mut Transaction<'_, MySql>,
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
        transaction: &mut Transaction<'_, MySql>,
        key: &str,
        wait: Duration,
    ) -> Result<Option<TransactionLock>, LockInError> {
        let leases = self.backend::<MySqlBackend>();
        let rows = || self.backend::<MySqlRowBackend>().map(|backend| &backend.rows);
        let Some(backend) = leases.or_else(rows) else {
            return Err(LockInError::unsupported(key, "MySQL"));
        };
        let key = Key::new(key).map_err(|source| LockInError::InvalidKey { source })?;
        let patience = Patience::of(wait);
        // A transaction that has the lock already must not wait for a local caller that waits for this transaction.
        let at_once = attempts(backend, transaction, &key, Patience::of(Duration::ZERO)).await?;
        if at_once.is_some() || wait.is_zero() {
            return Ok(at_once);
        }
        self.in_local_turn(&key, wait, attempts(backend, transaction, &key, patience)).await
    }
}

async fn attempts(
    backend: &MySqlBackend,
    connection: &mut MySqlConnection,
    key: &Key,
    patience: Patience,
) -> Result<Option<TransactionLock>, LockInError> {
    let began = Instant::now();
    loop {
        if let Some(token) = attempt(backend, connection, key).await? {
            return Ok(Some(TransactionLock::new(key.clone(), token)));
        }
        let left = patience.left();
        if left.is_zero() {
            return Ok(None);
        }
        sleep(wake::before_next_look(began).min(PAUSE_MAX).min(left)).await;
    }
}

/// `None` if somebody else has the lock. Then the transaction has locked nothing.
async fn attempt(
    backend: &MySqlBackend,
    connection: &mut MySqlConnection,
    key: &Key,
) -> Result<Option<FencingToken>, LockInError> {
    // Where all looks free at home but not in the transaction, that is elsewhere, or somebody just came or went. The second time it is asked.
    for _ in 0..2 {
        if !backend.make_free(key).await.map_err(|source| LockInError::backend(key, source))? {
            return Ok(None);
        }
        if let Some(token) = take(backend, connection, key).await? {
            return Ok(Some(token));
        }
        let is_locked = backend.is_locked(key, Errand::Acquire).await;
        if is_locked.map_err(|source| LockInError::backend(key, source))? {
            return Ok(None);
        }
    }
    // A plain read would open the snapshot that the caller reads from when the lock is its own, and not see what is written until then.
    let meta = connection.fetch_optional(backend.statements.meta_now_there()).await;
    let meta = meta.map_err(|error| sort(key, error))?;
    check_store(backend, meta.as_ref(), 1, key)?;
    Ok(None)
}

async fn take(
    backend: &MySqlBackend,
    connection: &mut MySqlConnection,
    key: &Key,
) -> Result<Option<FencingToken>, LockInError> {
    let sort = |error| sort(key, error);
    let lock = connection.fetch_optional(backend.statements.lock_row_there(key));
    let Some(row) = lock.await.map_err(sort)? else { return Ok(None) };
    // Since the look at it. Its holder cannot renew until this transaction ends, so better at once.
    if row.try_get::<i64, _>(0).map_err(sort)? != 0 {
        return Err(LockInError::conflict(key, None));
    }
    let claim: Option<Vec<u8>> = row.try_get(2).map_err(sort)?;
    if claim.is_some() {
        // Somebody had the key since the look at it, and the row does not tell when that ended.
        return Err(LockInError::conflict(key, None));
    }
    let seen = backend.statements.row_seen_there(key, claim, row.try_get(3).map_err(sort)?);
    let seen = connection.fetch_optional(seen).await.map_err(sort)?;
    check_store(backend, seen.as_ref(), 0, key)?;
    if seen.is_some_and(|seen| seen.try_get::<i64, _>(1).is_ok_and(|is_seen| is_seen == 0)) {
        // It began to read before the key was granted last, and would go on reading what whoever had it has overwritten.
        return Err(LockInError::conflict(key, None));
    }
    let token: i64 = row.try_get(1).map_err(sort)?;
    let written = FencingToken::try_from(token);
    let written = written.map_err(|error| sort(sqlx::Error::Decode(error.into())))?;
    connection.execute(backend.statements.raise_token_there(key, token)).await.map_err(sort)?;
    Ok(Some(written))
}

/// Refuses the transaction if it is not where the store is, whose id is in this column of what it reads.
fn check_store(
    backend: &MySqlBackend,
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

fn sort(key: &Key, source: sqlx::Error) -> LockInError {
    if error::is_no_such_table(&source) {
        LockInError::other_database(key)
    } else if error::is_busy(&source) {
        LockInError::conflict(key, Some(source))
    } else {
        LockInError::database(key, source)
    }
}

impl MySqlBackend {
    /// Whether nobody holds a lease on the key. Afterwards there is a row for it, which has changed since the last holder ended.
    async fn make_free(&self, key: &Key) -> Result<bool, registry_core::BackendError> {
        let look = || self.statements.is_free(key);
        let rows = self.link.rows(Errand::Acquire, look).await?;
        if let Some(row) = rows.first() {
            let (is_free, names_holder) =
                (self.column::<i64>(row, 0)? != 0, self.column::<i64>(row, 1)? != 0);
            if !is_free || !names_holder {
                return Ok(is_free);
            }
            let clear = || self.statements.clear_ended(key);
            let cleared = self.link.change(Errand::Acquire, Repeat::Harmless, clear).await?;
            return Ok(cleared.rows_affected() > 0);
        }
        let make = || self.statements.make_row(key);
        self.link.change(Errand::Acquire, Repeat::Harmless, make).await?;
        Ok(true)
    }

    /// Whether a transaction has locked the key's row, in this very moment.
    pub(super) async fn is_locked(
        &self,
        key: &Key,
        errand: Errand,
    ) -> Result<bool, registry_core::BackendError> {
        let look = || self.statements.lock_row(key);
        Ok(self.link.rows(errand, look).await?.is_empty())
    }
}

/// The longest pause between two attempts of a waiting transaction. Guards of a busy process leave the row free for milliseconds, which a
/// longer pause would miss again and again.
const PAUSE_MAX: Duration = Duration::from_millis(10);
