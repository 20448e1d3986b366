//! Runs a tick of a job in the caller's own transaction. So a single commit covers both the work
//! and the record that the tick is done.

use std::future::Future;

use registry_core::once::{BeginOutcome, Outcome, ScheduledJob, Tick};
use registry_core::{FencingToken, LockError, LockGuard};
use sqlx::{Database, Transaction};

use crate::fence::{Fence, FenceError};

/// Runs a job in a transaction on the database that stores its lock. [`ScheduledJob`] implements it
/// for `sqlx::Postgres`, `sqlx::MySql` and `sqlx::Sqlite`.
#[cfg_attr(
    all(feature = "sqlite", target_os = "linux"),
    doc = r#"
# Examples
```
# use std::sync::Arc;
# use registry_core::{LockRegistryExt, Registry};
use registry_core::once::Outcome;
use registry_jdbc::{RunIn, SqliteBackend, SqliteConfig, sqlx};
use sqlx::Connection;

# #[tokio::main(flavor = "current_thread")]
# async fn main() -> Result<(), Box<dyn std::error::Error>> {
# let folder = tempfile::tempdir()?;
# let path = folder.path().join("shop.db");
let backend = SqliteBackend::open(SqliteConfig::new(&path)).await?;
let registry = Registry::builder(Arc::new(backend)).build()?;
# let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
let mut data = sqlx::SqliteConnection::connect_with(&options).await?; // the same file
# sqlx::query("CREATE TABLE interest (tick)").execute(&mut data).await?;

let mut tx = data.begin().await?;
match registry.once("interest").tick(7).run_in(&mut tx).await? {
    Outcome::Ran(run) => {
        sqlx::query("INSERT INTO interest VALUES (7)").execute(&mut *tx).await?;
        tx.commit().await?; // the work and the record, or neither
        run.unlock().await?;
    }
    _ => tx.rollback().await?, // done before, or another process runs it
}
# Ok(())
# }
```
"#
)]
pub trait RunIn<DB: Database> {
    /// Acquires the lock of the job if a tick is due, [fences](Fence::fence) `transaction`, and
    /// writes the record that the tick is done. The caller then does the work in the same
    /// transaction and commits it, so the tick is done exactly once. After a rollback, the tick is
    /// due again.
    ///
    /// With [`ScheduledJob::catch_up`], several ticks may be due. One call runs only the first of
    /// them. Repeat the call in another transaction for the next tick.
    ///
    /// # Errors
    /// [`RunInError::Lock`] for the errors of [`ScheduledJob::run`]. [`RunInError::Fence`] for the
    /// errors of [`Fence::fence`], or if the record cannot be written. After an error, roll the
    /// transaction back.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the transaction open, possibly with the record. Roll the
    /// transaction back.
    fn run_in(
        &self,
        transaction: &mut Transaction<'_, DB>,
    ) -> impl Future<Output = Result<Outcome<TransactionRun>, RunInError>> + Send;
}

/// The run of one tick in a transaction. Dropping it releases the lock of the job in the
/// background. While the transaction is open, no other claim is granted the lock.
#[derive(Debug)]
#[must_use = "the tick is done when the transaction is committed"]
pub struct TransactionRun {
    tick: Tick,
    guard: LockGuard,
}

impl TransactionRun {
    /// Returns the tick.
    #[must_use]
    pub fn tick(&self) -> &Tick {
        &self.tick
    }

    /// Returns the fencing token of the run, for resources outside of the database.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.guard.fencing_token()
    }

    /// Releases the lock. Call it after the end of the transaction.
    ///
    /// # Errors
    /// As [`LockGuard::unlock`]. A committed tick stays done.
    ///
    /// # Cancel safety
    /// As [`LockGuard::unlock`].
    pub async fn unlock(self) -> Result<(), LockError> {
        self.guard.unlock().await
    }
}

/// Why a tick did not run in a transaction.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunInError {
    /// The record could not be read, or the lock could not be acquired. Nothing was written.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The transaction could not be fenced, or the record could not be written in it.
    #[error(transparent)]
    Fence(#[from] FenceError),
}

/// Fences the transaction, and writes the record that the tick is done. `write` writes the record,
/// or returns `false` if the guard no longer holds the lock.
pub(crate) async fn run_in<'t, DB: Database>(
    job: &ScheduledJob,
    transaction: &mut Transaction<'t, DB>,
    write: impl AsyncFnOnce(&LockGuard, &mut Transaction<'t, DB>, Vec<u8>) -> Result<bool, FenceError>,
) -> Result<Outcome<TransactionRun>, RunInError>
where
    LockGuard: Fence<DB>,
{
    let (guard, mut ticks) = match job.begin().await? {
        BeginOutcome::Due(guard, ticks) => (guard, ticks),
        BeginOutcome::AlreadyDone(record) => return Ok(record.already_done()),
        _ => return Ok(Outcome::Busy),
    };
    // `BeginOutcome::Due` contains at least one tick, so this error is never returned.
    let tick = ticks.next().ok_or(LockError::Closed)?;
    guard.fence(transaction).await?;
    let record = ticks.record(&guard, &tick);
    if !write(&guard, transaction, record).await? {
        return Err(FenceError::lost(&guard).into());
    }
    Ok(Outcome::Ran(TransactionRun { tick, guard }))
}
