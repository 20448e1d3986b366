//! Decides when rows are purged: one release and one `lock_in` in 256 also purge a batch of rows,
//! and one removal of a waiter's registration in 256 also purges the expired registrations. The
//! statements are in the `sql` module of each kind of server.

use std::future::Future;
use std::time::Duration;

use registry_core::{BackendError, ClaimId};
use tokio::time::timeout;

/// An operation purges if the random id of its claim begins with this byte: one in 256. A `lock_in`
/// has no claim, so it draws a random id.
const PURGE_ID_BYTE: u8 = 0;

/// The maximum time that a purge adds to the operation that runs it, even if all connections are
/// busy.
const PURGE_TIMEOUT: Duration = Duration::from_millis(500);

/// The number of rows that a batch checks, live and dead. This is twice the number of releases
/// between two batches, so that at most about half of all rows are dead.
pub(crate) const PURGE_BATCH_ROWS: u16 = 512;

/// Calls `purge_batch` with the id of a random first row, for one `id` in 256.
pub(crate) async fn maybe_purge<T, F>(id: ClaimId, purge_batch: impl FnOnce([u8; 32]) -> F)
where
    F: Future<Output = Result<T, BackendError>>,
{
    if id.to_bytes()[0] == PURGE_ID_BYTE {
        // The caller's operation must not fail because of the purge. The next acquisition returns
        // any error of the tables.
        let start: [u8; 32] = std::array::from_fn(|_| fastrand::u8(..));
        let _ = timeout(PURGE_TIMEOUT, purge_batch(start)).await;
    }
}
