//! Fences a transaction by a lock in the same database ([`Fence`](crate::Fence)).

use registry_core::LockGuard;
use sqlx::Transaction;

use super::SqlBackend;
use super::backend::Locks;
use super::dialect::{Dialect, LeaseStore, TransactionStore};
use crate::fence::{FenceError, fenced_claim};

pub(crate) async fn fence<D: Dialect>(
    guard: &LockGuard,
    transaction: &mut Transaction<'_, D>,
) -> Result<(), FenceError> {
    let claim = fenced_claim(guard)?;
    let token = guard.fencing_token();
    let Some(backend) = guard.backend::<SqlBackend<D>>() else {
        return Err(FenceError::unsupported(guard, D::DATABASE));
    };
    if let Locks::Session { session, .. } = &backend.locks {
        match session.ensure_row(claim).await {
            Ok(true) => {}
            Ok(false) => return Err(FenceError::lost(guard)),
            Err(source) => {
                return Err(FenceError::backend(guard, backend.with_address(source)));
            }
        }
    }
    let found = match &backend.locks {
        Locks::Lease(rows) => rows.fence(transaction, claim, token).await,
        Locks::Session { rows, .. } | Locks::Row { rows, .. } => {
            D::fence_held(rows, transaction, claim, token).await
        }
        Locks::Spring(spring) => spring.fence(transaction, claim, token).await,
    };
    match found.map_err(classify::<D>)? {
        None => Err(explain_missing_row(guard, backend, transaction).await),
        // The snapshot is older than the grant: reads after the fence would return rows that the
        // previous holder has overwritten.
        Some(false) => Err(FenceError::Busy { source: None }),
        // From here on no other client can be granted the lock. But the guard may have been
        // notified of its loss while the statement waited, and then the caller must not write.
        Some(true) if guard.is_held() => Ok(()),
        Some(true) => Err(FenceError::lost(guard)),
    }
}

/// Returns the error for a missing row. Causes: the lock was lost, the transaction is in another
/// database with lock tables, or its snapshot is older than the grant.
async fn explain_missing_row<D: Dialect>(
    guard: &LockGuard,
    backend: &SqlBackend<D>,
    transaction: &mut Transaction<'_, D>,
) -> FenceError {
    let store = match backend.rows() {
        Ok(rows) => rows.transaction_store(transaction).await,
        Err(spring) => spring.transaction_store(transaction).await,
    };
    match store {
        Err(error) => classify::<D>(error),
        Ok(TransactionStore::Other) => FenceError::OtherDatabase,
        // The grant, or the row that was rewritten for this fence, may be newer than the
        // transaction's snapshot. The next transaction sees whether the lock was lost.
        Ok(TransactionStore::Same { has_old_snapshot: true }) if guard.is_held() => {
            FenceError::Busy { source: None }
        }
        Ok(TransactionStore::Same { .. }) => FenceError::lost(guard),
    }
}

fn classify<D: Dialect>(source: sqlx::Error) -> FenceError {
    if D::is_no_such_table(&source) {
        FenceError::OtherDatabase
    } else if D::is_busy(&source) {
        FenceError::Busy { source: Some(source) }
    } else {
        FenceError::Database { source }
    }
}
