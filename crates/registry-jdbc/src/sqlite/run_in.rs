//! Writes the record of a job in a transaction on the same file.

use registry_core::LockGuard;
use registry_core::once::{Outcome, ScheduledJob};
use sqlx::{Sqlite, Transaction};

use super::backend::SqliteBackend;
use super::fence::fence_error;
use crate::fence::FenceError;
use crate::run_in::{RunIn, RunInError, TransactionRun, run_in};

impl RunIn<Sqlite> for ScheduledJob {
    async fn run_in(
        &self,
        transaction: &mut Transaction<'_, Sqlite>,
    ) -> Result<Outcome<TransactionRun>, RunInError> {
        // Boxed, because the future is large.
        Box::pin(run_in(self, transaction, write)).await
    }
}

/// Writes the value block in the transaction, which is fenced. Returns whether it was written.
async fn write(
    guard: &LockGuard,
    transaction: &mut Transaction<'_, Sqlite>,
    value: Vec<u8>,
) -> Result<bool, FenceError> {
    let backend = guard.backend::<SqliteBackend>();
    let backend = backend.ok_or_else(|| FenceError::unsupported(guard, "SQLite"))?;
    let statement = backend.write_value_statement(guard.claim(), guard.fencing_token(), value);
    let written = statement.execute(&mut **transaction).await.map_err(fence_error)?;
    Ok(written.rows_affected() > 0)
}
