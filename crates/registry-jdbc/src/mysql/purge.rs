//! Deletes the rows of keys that have been free for `purge_after`, a bounded batch at a time.
//!
//! The largest deleted token is kept: it is written to the meta table before the rows are deleted.
//! The two statements need no transaction: between them, a token is only recorded twice.

use std::time::Duration;

use registry_core::{BackendError, Claim};
use sqlx::Row as _;
use tokio::time::timeout;

use super::backend::MySqlRows;
use super::client::MySqlClient;
use super::sql::MySqlStatements;
use super::statement;
use crate::server::{ConnectionUse, Resend};

/// A release purges a batch if its claim's random id begins with this byte: one in 256.
const PURGE_FIRST_BYTE: u8 = 0;

/// How much longer a release may take because of the purge, for example while all connections are
/// in use.
const BATCH_TIMEOUT: Duration = Duration::from_millis(500);

/// The rows of a batch: twice as many as releases can have added since the last purge. So at most
/// half of all rows are dead.
const BATCH_ROWS: usize = 512;

impl MySqlRows {
    /// Purges a random batch after one in 256 releases, chosen by the claim's random id.
    pub(super) async fn maybe_purge(&self, claim: &Claim) {
        maybe_purge(claim, &self.client, &self.statements.texts, self.config.purge_after).await;
    }

    /// Purges the batch that starts at `start`. Returns the number of deleted rows.
    #[cfg(all(test, feature = "server-tests"))]
    pub(super) async fn purge_batch_at(&self, start: [u8; 32]) -> Result<u64, BackendError> {
        purge_batch(&self.client, &self.statements.texts, self.config.purge_after, start).await
    }
}

/// Purges after one in 256 releases, for every backend with rows in the tables.
pub(super) async fn maybe_purge(
    claim: &Claim,
    client: &MySqlClient,
    texts: &MySqlStatements,
    min_age: Duration,
) {
    if claim.id().to_bytes()[0] == PURGE_FIRST_BYTE {
        // The release is done and must not fail because of the purge. The next acquisition reports
        // a fault of the tables.
        let start: [u8; 32] = std::array::from_fn(|_| fastrand::u8(..));
        let _ = timeout(BATCH_TIMEOUT, purge_batch(client, texts, min_age, start)).await;
    }
}

/// Purges the batch that starts at `start`. Returns the number of deleted rows.
async fn purge_batch(
    client: &MySqlClient,
    texts: &MySqlStatements,
    min_age: Duration,
    start: [u8; 32],
) -> Result<u64, BackendError> {
    let make = || statement::purge_candidates(texts, start, BATCH_ROWS, min_age);
    let rows = client.rows(ConnectionUse::Acquire, make).await?;
    let mut ids: Vec<Vec<u8>> = Vec::with_capacity(rows.len());
    let mut token: Option<i64> = None;
    let explain = |error| client.explain(error);
    for row in &rows {
        ids.push(row.try_get(0).map_err(explain)?);
        token = token.max(Some(row.try_get(1).map_err(explain)?));
    }
    let Some(token) = token else { return Ok(0) };
    let raise = || statement::raise_floor(texts, token);
    client.execute(ConnectionUse::Acquire, Resend::Allowed, raise).await?;
    let delete = || statement::purge(texts, &ids, min_age, token);
    Ok(client.execute(ConnectionUse::Acquire, Resend::Allowed, delete).await?.rows_affected())
}
