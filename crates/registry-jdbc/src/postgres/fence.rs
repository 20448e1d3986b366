//! Fences a transaction by a lock in the same database ([`Fence`]).

use registry_core::{Claim, FencingToken, LockGuard};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, Row, Transaction};

use super::backend::PostgresBackend;
use super::error;
use super::row::PostgresRowBackend;
use super::session::PostgresSessionBackend;
use super::spring::PostgresSpringBackend;
use super::sql::PgStatementText;
use super::statement::BoundStatement;
use crate::fence::{Fence, FenceError, fenced_claim};

impl Fence<Postgres> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, Postgres>) -> Result<(), FenceError> {
        let claim = fenced_claim(self)?;
        if let Some(backend) = self.backend::<PostgresSessionBackend>() {
            match backend.session.ensure_row(claim).await {
                Ok(true) => {}
                Ok(false) => return Err(FenceError::lost(self)),
                Err(source) => return Err(FenceError::backend(self, source)),
            }
        }
        let fence_query = fence_query(self, claim, self.fencing_token());
        let Some(fence_query) = fence_query else {
            return Err(FenceError::unsupported(self, "PostgreSQL"));
        };
        // A pooler keeps the connection for the duration of a transaction, so an unnamed prepared
        // statement is still present.
        let statement = fence_query.statement.query().persistent(fence_query.prepared);
        let found = statement.fetch_all(&mut **transaction).await.map_err(classify)?;
        if found.is_empty() {
            return Err(explain_missing_row(self, &fence_query, transaction).await);
        }
        // From here on no other client can be granted the lock. But the guard may have been
        // notified of its loss while the statement waited, and then the caller must not write.
        if self.is_held() { Ok(()) } else { Err(FenceError::lost(self)) }
    }
}

/// The parameters of a fence for one layout of the tables.
pub(super) struct PgFenceQuery<'a> {
    /// Finds the grant, and keeps its row from passing to another claim.
    pub(super) statement: BoundStatement<'a>,
    pub(super) meta: &'a PgStatementText,
    /// The id of the tables.
    pub(super) store: &'a str,
    pub(super) prepared: bool,
}

/// Returns the parameters for the layout of the guard's lock, or `None` if the guard is not from a
/// PostgreSQL store.
fn fence_query<'a>(
    guard: &'a LockGuard,
    claim: &Claim,
    token: FencingToken,
) -> Option<PgFenceQuery<'a>> {
    let native = guard.backend::<PostgresBackend>().map(|backend| PgFenceQuery {
        statement: backend.fence_statement(claim, token),
        meta: &backend.texts.meta,
        store: &backend.store,
        prepared: backend.client.is_prepared(),
    });
    let session = guard.backend::<PostgresSessionBackend>().map(|backend| &backend.rows);
    let row = || guard.backend::<PostgresRowBackend>().map(|backend| &backend.rows);
    let native = native.or_else(|| {
        session.or_else(row).map(|backend| PgFenceQuery {
            statement: backend.fence_held_statement(claim, token),
            meta: &backend.texts.meta,
            store: &backend.store,
            prepared: backend.client.is_prepared(),
        })
    });
    let spring = || guard.backend::<PostgresSpringBackend>();
    native.or_else(|| spring().map(|backend| backend.fence_query(claim, token)))
}

/// Returns the error for a missing row. Causes: the lock was lost, the transaction is in another
/// database with lock tables, or its snapshot is older than the grant.
async fn explain_missing_row(
    guard: &LockGuard,
    fence_query: &PgFenceQuery<'_>,
    transaction: &mut Transaction<'_, Postgres>,
) -> FenceError {
    let meta = sqlx::query(fence_query.meta.safe()).persistent(false);
    let rows: Vec<PgRow> = match meta.fetch_all(&mut **transaction).await {
        Ok(rows) => rows,
        Err(error) => return classify(error),
    };
    let store: Option<String> = rows.first().and_then(|row| row.try_get(1).ok());
    if store.as_deref() != Some(fence_query.store) {
        return FenceError::OtherDatabase;
    }
    // The grant, or the row that was rewritten for this fence, may be newer than the transaction's
    // snapshot. The next transaction sees whether the lock was lost.
    let has_old_snapshot = rows.first().is_some_and(|row| row.try_get(2).unwrap_or(false));
    if has_old_snapshot && guard.is_held() {
        FenceError::Busy { source: None }
    } else {
        FenceError::lost(guard)
    }
}

fn classify(source: sqlx::Error) -> FenceError {
    if error::is_no_such_table(&source) {
        FenceError::OtherDatabase
    } else if error::is_busy(&source) {
        FenceError::Busy { source: Some(source) }
    } else {
        FenceError::Database { source }
    }
}
