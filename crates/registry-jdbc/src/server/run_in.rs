//! Writes the record of a job in the caller's transaction ([`RunIn`]).

use registry_core::LockGuard;
use registry_core::once::{Outcome, ScheduledJob};
use sqlx::Transaction;

use super::backend::{ModeState, SqlBackend};
use super::dialect::SpringDialect;
use super::fence::classify;
use crate::fence::FenceError;
use crate::run_in::{RunIn, RunInError, TransactionRun, run_in};

impl<D: SpringDialect> RunIn<D> for ScheduledJob {
    async fn run_in(
        &self,
        transaction: &mut Transaction<'_, D>,
    ) -> Result<Outcome<TransactionRun>, RunInError> {
        // Boxed, because the future is large.
        Box::pin(run_in(self, transaction, write_record::<D>)).await
    }
}

/// Writes the record of a job to the value block of its key, in the fenced transaction. Returns
/// whether the record was written.
async fn write_record<D: SpringDialect>(
    guard: &LockGuard,
    transaction: &mut Transaction<'_, D>,
    value: Vec<u8>,
) -> Result<bool, FenceError> {
    let unsupported = || FenceError::unsupported(guard, D::PRODUCT_NAME);
    let backend = guard.backend::<SqlBackend<D>>().ok_or_else(unsupported)?;
    let (table, text) = match &backend.mode_state {
        ModeState::Lease(table) => (table, table.value_statements().write.clone()),
        ModeState::Session { table, .. } | ModeState::Row { table, .. } => {
            (&**table, table.value_statements().write_in_session.clone())
        }
        ModeState::Spring(_) => return Err(unsupported()),
    };
    let token = guard.fencing_token();
    let write = table.write_value_statement(&text, guard.claim(), token, &value);
    D::simple_query(transaction, write.inlined::<D>()).await.map_err(classify::<D>)?;
    // Not every server returns the number of rows that plain text wrote, so read the value again.
    let read = table.read_value_statement(guard.claim().key());
    let found = D::simple_query(transaction, read.inlined::<D>()).await.map_err(classify::<D>)?;
    let Some(row) = found.first() else { return Ok(false) };
    let stored = D::number(row, 0).map_err(classify::<D>)?;
    let bytes = D::bytes(row, 1).map_err(classify::<D>)?;
    Ok(stored == Some(i64::from(token)) && bytes == Some(value))
}
