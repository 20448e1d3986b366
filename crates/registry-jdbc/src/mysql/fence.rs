//! Fences a transaction by a lock in the same database ([`Fence`]).

use std::future::Future;
use std::time::Duration;

use registry_core::{BackendError, LockGuard};
use sqlx::{Executor as _, MySql, MySqlConnection, RawSql, Row, Transaction};
use tokio::time::sleep;

use super::error;
use super::inline::inline;
use super::sql::MySqlStatements;
use crate::fence::{Fence, FenceError};
use crate::server::{self, TransactionStore};

impl Fence<MySql> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, MySql>) -> Result<(), FenceError> {
        server::fence(self, transaction).await
    }
}

/// Returns whether the snapshot of the caller's transaction shows the grant that the statement
/// finds. `None` if it finds none.
pub(super) async fn find_in(
    connection: &mut MySqlConnection,
    statement: RawSql,
) -> Result<Option<bool>, sqlx::Error> {
    let found = connection.fetch_all(statement).await?;
    found.first().map(|row| Ok(row.try_get::<i64, _>(0)? != 0)).transpose()
}

/// Reads the meta row in the caller's transaction.
pub(super) async fn transaction_store(
    texts: &MySqlStatements,
    store: &[u8],
    connection: &mut MySqlConnection,
) -> Result<TransactionStore, sqlx::Error> {
    let rows = connection.fetch_all(inline(&texts.meta, &[])).await?;
    let found: Option<Vec<u8>> = rows.first().and_then(|row| row.try_get(1).ok());
    Ok(match found.as_deref() == Some(store) {
        true => TransactionStore::Same { has_old_snapshot: false },
        false => TransactionStore::Other,
    })
}

/// Waits for the end of a transaction that a claim has fenced, which locks the row. Gives up after
/// the sum of [`FENCE_CHECK_PAUSES`].
pub(super) async fn wait_for_fence<F>(has_open_fence: impl Fn() -> F) -> Result<(), BackendError>
where
    F: Future<Output = Result<bool, BackendError>>,
{
    for pause in FENCE_CHECK_PAUSES.into_iter().map(Some).chain([None]) {
        // If this fails, nothing was released.
        if !has_open_fence().await.map_err(BackendError::as_refused)? {
            return Ok(());
        }
        if let Some(pause) = pause {
            sleep(pause).await;
        }
    }
    Err(error::fenced_transaction_open(error::STORE))
}

/// The pauses between a release's checks whether the row of a fenced claim is unlocked. Other
/// readers lock the row for less than their sum.
const FENCE_CHECK_PAUSES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(16),
    Duration::from_millis(64),
];
