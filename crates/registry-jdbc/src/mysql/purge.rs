//! Deletes the rows of keys that have been free for `purge_after`, a bounded batch at a time.
//!
//! The largest deleted token is kept: it is written to the meta table before the rows are deleted.
//! The two statements need no transaction: between them, a token is only recorded twice.

use std::time::Duration;

use registry_core::{BackendError, Claim};
use sqlx::Row as _;

#[cfg(all(test, feature = "server-tests"))]
use super::backend::MySqlRows;
use super::client::MySqlClient;
use super::sql::MySqlStatements;
use super::statement;
use crate::server::{self, BATCH_ROWS, ConnectionUse, Resend};

#[cfg(all(test, feature = "server-tests"))]
impl MySqlRows {
    /// Purges the batch that starts at `start`. Returns the number of deleted rows.
    pub(super) async fn purge_batch_at(&self, start: [u8; 32]) -> Result<u64, BackendError> {
        purge_batch(&self.client, &self.statements.texts, self.config.purge_after, start).await
    }
}

/// Purges a batch after some of the releases.
pub(super) async fn maybe_purge(
    claim: &Claim,
    client: &MySqlClient,
    texts: &MySqlStatements,
    min_age: Duration,
) {
    server::maybe_purge(claim, |start| purge_batch(client, texts, min_age, start)).await;
}

/// Purges the batch that starts at `start`. Returns the number of deleted rows.
async fn purge_batch(
    client: &MySqlClient,
    texts: &MySqlStatements,
    min_age: Duration,
    start: [u8; 32],
) -> Result<u64, BackendError> {
    let make = || statement::purge_candidates(texts, start, usize::from(BATCH_ROWS), min_age);
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
