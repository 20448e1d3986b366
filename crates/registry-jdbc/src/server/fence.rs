//! Fences a transaction by a lock in the same database ([`Fence`](crate::Fence)).

use registry_core::LockGuard;
use sqlx::Transaction;

use super::SqlBackend;
use super::backend::ModeState;
use super::dialect::{LeaseStore as _, SpringDialect};
use super::store::TransactionDatabase;
use crate::fence::{Fence, FenceError, fenced_claim};

impl<D: SpringDialect> Fence<D> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, D>) -> Result<(), FenceError> {
        fence(self, transaction).await
    }
}

async fn fence<D: SpringDialect>(
    guard: &LockGuard,
    transaction: &mut Transaction<'_, D>,
) -> Result<(), FenceError> {
    let claim = fenced_claim(guard)?;
    let token = guard.fencing_token();
    let Some(backend) = guard.backend::<SqlBackend<D>>() else {
        return Err(FenceError::unsupported(guard, D::PRODUCT_NAME));
    };
    if let ModeState::Session { session, .. } = &backend.mode_state {
        match session.ensure_row(claim).await {
            Ok(true) => {}
            Ok(false) => return Err(FenceError::lost(guard)),
            Err(source) => {
                return Err(FenceError::backend(guard, backend.with_address(source)));
            }
        }
    }
    let statement = match &backend.mode_state {
        ModeState::Lease(table) => table.fence(claim, token),
        ModeState::Session { table, .. } | ModeState::Row { table, .. } => {
            table.fence_session_grant(claim, token)
        }
        ModeState::Spring(spring) => spring.fence(claim, token),
    };
    let found =
        D::simple_query(transaction, statement.inlined::<D>()).await.map_err(classify::<D>)?;
    match found.first().map(|row| D::flag(row, 0)).transpose().map_err(classify::<D>)? {
        None => Err(explain_missing_row(guard, backend, transaction).await),
        // The snapshot is older than the grant, so reads after the fence would return rows that the
        // previous holder has overwritten.
        Some(false) => Err(FenceError::Busy { source: None }),
        // From now on no other client can be granted the lock. But the guard may have been notified
        // of its loss while the statement waited. Then the caller must not write.
        Some(true) if guard.is_held() => Ok(()),
        Some(true) => Err(FenceError::lost(guard)),
    }
}

/// Returns the error for a missing row. Causes: the lock was lost, the transaction is in another
/// database with lock tables, or its snapshot is older than the grant.
async fn explain_missing_row<D: SpringDialect>(
    guard: &LockGuard,
    backend: &SqlBackend<D>,
    transaction: &mut Transaction<'_, D>,
) -> FenceError {
    match backend.store().transaction_database(transaction).await {
        Err(error) => classify::<D>(error),
        Ok(TransactionDatabase::Other) => FenceError::OtherDatabase,
        // The snapshot may be older than the grant, or than the row that `ensure_row` wrote. A new
        // transaction shows whether the lock was lost.
        Ok(TransactionDatabase::Same { keeps_snapshot: true }) if guard.is_held() => {
            FenceError::Busy { source: None }
        }
        Ok(TransactionDatabase::Same { .. }) => FenceError::lost(guard),
    }
}

pub(super) fn classify<D: SpringDialect>(source: sqlx::Error) -> FenceError {
    if D::lacks_lock_tables(&source) {
        FenceError::OtherDatabase
    } else if D::is_conflict(&source) {
        FenceError::Busy { source: Some(source) }
    } else {
        FenceError::Database { source }
    }
}
