//! Checks the token of a lock in a transaction on the same file.

use registry_core::LockGuard;
use sqlx::{Row, Sqlite, Transaction};

use super::backend::SqliteBackend;
use super::error::{self, FileMismatch};
use crate::fence::{Fence, FenceError, fenced_claim};

impl Fence<Sqlite> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, Sqlite>) -> Result<(), FenceError> {
        let claim = fenced_claim(self)?;
        let Some(backend) = self.backend::<SqliteBackend>() else {
            return Err(FenceError::unsupported(self, "SQLite"));
        };
        let found = backend
            .fence_statement(claim, self.fencing_token())
            .execute(&mut **transaction)
            .await
            .map_err(fence_error)?
            .rows_affected();
        if found == 0 {
            return Err(missing_row_error(self, backend, transaction).await);
        }
        // From now on no other claim can be granted the lock. But while the statement waited, the
        // guard may have been notified of its loss. Then its holder must not write. The holder must
        // not write either if the files were replaced, because other processes use other rows.
        if !self.is_held() {
            return Err(FenceError::lost(self));
        }
        backend.check_files().map_err(|source| match FileMismatch::from_error(&source) {
            Some(_) => FenceError::lost(self),
            None => FenceError::Backend { key: self.key().to_owned(), source },
        })
    }
}

/// Returns the error for a missing row: the lock was lost, or the transaction is on another
/// database with lock tables.
async fn missing_row_error(
    guard: &LockGuard,
    backend: &SqliteBackend,
    transaction: &mut Transaction<'_, Sqlite>,
) -> FenceError {
    let rows = sqlx::query("SELECT store FROM main.lock_registry_meta WHERE id = 1")
        .fetch_all(&mut **transaction)
        .await;
    let store: Option<Vec<u8>> = match rows {
        Ok(rows) => rows.first().and_then(|row| row.try_get(0).ok()),
        Err(error) => return fence_error(error),
    };
    if store.is_some_and(|store| backend.has_store_id(&store)) {
        FenceError::lost(guard)
    } else {
        FenceError::OtherDatabase
    }
}

pub(super) fn fence_error(source: sqlx::Error) -> FenceError {
    if error::is_missing_table(&source) {
        FenceError::OtherDatabase
    } else if error::is_busy(&source) {
        FenceError::Busy { source: Some(source) }
    } else {
        FenceError::Database { source }
    }
}
