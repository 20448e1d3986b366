//! Fences a transaction by a lock in the same database.

use registry_core::LockGuard;
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, Row, Transaction};

use super::backend::MySqlBackend;
use super::error;
use crate::fence::{Fence, FenceError};

impl Fence<MySql> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, MySql>) -> Result<(), FenceError> {
        if !self.is_held() {
            return Err(FenceError::lost(self));
        }
        let (Some(backend), Some(token)) = (self.backend::<MySqlBackend>(), self.fencing_token())
        else {
            return Err(FenceError::unsupported(self, "MySQL"));
        };
        let statement = backend.fence_statement(self.claim(), token);
        let found = statement.fetch_all(&mut **transaction).await.map_err(sort)?;
        if found.is_empty() {
            return Err(why_not_found(self, backend, transaction).await);
        }
        // From here on nobody else can be granted the lock. But while the statement waited for its turn the guard may have been
        // told of its loss, and a holder that knows must not write.
        if self.is_held() { Ok(()) } else { Err(FenceError::lost(self)) }
    }
}

/// The row is not there: because the lock was lost, or because this is another database with lock tables.
async fn why_not_found(
    guard: &LockGuard,
    backend: &MySqlBackend,
    transaction: &mut Transaction<'_, MySql>,
) -> FenceError {
    let rows: Vec<MySqlRow> = match backend.statements.meta().fetch_all(&mut **transaction).await {
        Ok(rows) => rows,
        Err(error) => return sort(error),
    };
    let store: Option<Vec<u8>> = rows.first().and_then(|row| row.try_get(1).ok());
    if store.is_some_and(|store| backend.is_store(&store)) {
        FenceError::lost(guard)
    } else {
        FenceError::OtherDatabase
    }
}

fn sort(source: sqlx::Error) -> FenceError {
    if error::is_no_such_table(&source) {
        FenceError::OtherDatabase
    } else if error::is_busy(&source) {
        FenceError::Busy { source }
    } else {
        FenceError::Database { source }
    }
}
