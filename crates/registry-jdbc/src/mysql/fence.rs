//! Fences a transaction by a lock in the same database.

use std::time::Duration;

use registry_core::{Claim, FencingToken, LockGuard};
use sqlx::{Executor as _, MySql, RawSql, Row, Transaction};

use super::backend::MySqlBackend;
use super::error;
use super::row::MySqlRowBackend;
use super::session::MySqlSessionBackend;
use super::spring::MySqlSpringBackend;
use crate::fence::{Fence, FenceError, fenced_claim};

impl Fence<MySql> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, MySql>) -> Result<(), FenceError> {
        let claim = fenced_claim(self)?;
        if let Some(backend) = self.backend::<MySqlSessionBackend>() {
            match backend.session.ensure_row(claim).await {
                Ok(true) => {}
                Ok(false) => return Err(FenceError::lost(self)),
                Err(source) => return Err(FenceError::backend(self, source)),
            }
        }
        let fence_query = fence_query(self, claim, self.fencing_token());
        let Some(MySqlFenceQuery { statement, meta, store }) = fence_query else {
            return Err(FenceError::unsupported(self, "MySQL"));
        };
        let found = transaction.fetch_all(statement).await.map_err(classify)?;
        let Some(found) = found.first() else {
            return Err(explain_missing_row(self, meta, store, transaction).await);
        };
        if found.try_get::<i64, _>(0).map_err(classify)? == 0 {
            // The snapshot is older than the grant: reads after the fence would return rows that
            // the previous holder has overwritten.
            return Err(FenceError::Busy { source: None });
        }
        // From here on no other claim can be granted the lock. But the guard may have been notified
        // of its loss while the statement waited, and such a holder must not write.
        if self.is_held() { Ok(()) } else { Err(FenceError::lost(self)) }
    }
}

/// The queries in the caller's transaction, and the id of the expected store.
pub(super) struct MySqlFenceQuery<'a> {
    /// Finds the grant and locks its row.
    pub(super) statement: RawSql,
    pub(super) meta: RawSql,
    /// The id of the tables.
    pub(super) store: &'a [u8],
}

/// Returns the statements for the layout of the guard's lock. `None` if the lock is not in a
/// MariaDB or MySQL store.
fn fence_query<'a>(
    guard: &'a LockGuard,
    claim: &Claim,
    token: FencingToken,
) -> Option<MySqlFenceQuery<'a>> {
    let native = guard.backend::<MySqlBackend>().map(|backend| MySqlFenceQuery {
        statement: backend.fence_statement(claim, token),
        meta: backend.statements.meta_inline(),
        store: &backend.store,
    });
    let session = guard.backend::<MySqlSessionBackend>().map(|backend| &backend.rows);
    let row = || guard.backend::<MySqlRowBackend>().map(|backend| &backend.rows);
    let native = native.or_else(|| {
        session.or_else(row).map(|backend| MySqlFenceQuery {
            statement: backend.statements.fence_held(claim, token),
            meta: backend.statements.meta_inline(),
            store: &backend.store,
        })
    });
    let spring = || guard.backend::<MySqlSpringBackend>();
    native.or_else(|| spring().map(|backend| backend.fence_query(claim, token)))
}

/// Returns why the row was not found: the lock was lost, or this is another database with lock
/// tables.
async fn explain_missing_row(
    guard: &LockGuard,
    meta: RawSql,
    store: &[u8],
    transaction: &mut Transaction<'_, MySql>,
) -> FenceError {
    let rows = match transaction.fetch_all(meta).await {
        Ok(rows) => rows,
        Err(error) => return classify(error),
    };
    let found: Option<Vec<u8>> = rows.first().and_then(|row| row.try_get(1).ok());
    if found.as_deref() == Some(store) {
        FenceError::lost(guard)
    } else {
        FenceError::OtherDatabase
    }
}

/// The pauses between a release's checks whether the row of a fenced claim is unlocked. Other
/// readers lock the row for less than their sum.
pub(super) const FENCE_CHECK_PAUSES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(16),
    Duration::from_millis(64),
];

fn classify(source: sqlx::Error) -> FenceError {
    if error::is_no_such_table(&source) {
        FenceError::OtherDatabase
    } else if error::is_busy(&source) {
        FenceError::Busy { source: Some(source) }
    } else {
        FenceError::Database { source }
    }
}
