//! Deletes the rows of keys that have not been locked for some time, in batches of limited size.
//!
//! A trigger of the tables keeps the largest of their tokens in the same transaction. Called after
//! releases.

use std::time::Duration;

use registry_core::{BackendError, Claim};
use tokio::time::timeout;

use super::backend::{PgRows, bytes, column, micros};
use super::client::PgClient;
use super::sql::PgStatements;
use super::statement::{BoundStatement, PgParam};
use crate::server::{ConnectionUse, Resend};

/// A release searches a batch if its claim's random id begins with this byte: one in 256.
const PURGE_FIRST_BYTE: u8 = 0;

/// The maximum time that a batch adds to a release, even if all connections are busy.
const BATCH_TIMEOUT: Duration = Duration::from_millis(500);

/// The number of rows in a batch. It is twice the number that releases can have added since the
/// last batch, so that at most half of all rows are dead.
const BATCH_ROWS: i64 = 512;

impl PgRows {
    /// Searches a batch if the claim's random id begins with [`PURGE_FIRST_BYTE`].
    pub(super) async fn maybe_purge(&self, claim: &Claim) {
        maybe_purge(claim, &self.client, &self.texts, self.config.purge_after).await;
    }
}

/// The same for every backend with rows in the tables.
pub(super) async fn maybe_purge(
    claim: &Claim,
    client: &PgClient,
    texts: &PgStatements,
    min_age: Duration,
) {
    if claim.id().to_bytes()[0] == PURGE_FIRST_BYTE {
        // The release is complete and must not fail because of housekeeping. The next acquisition
        // returns any error of the tables.
        let start: [u8; 32] = std::array::from_fn(|_| fastrand::u8(..));
        let _ = timeout(BATCH_TIMEOUT, purge_batch(client, texts, min_age, &start)).await;
    }
}

/// Searches the batch that follows `start`, and returns the number of deleted rows.
async fn purge_batch(
    client: &PgClient,
    texts: &PgStatements,
    min_age: Duration,
    start: &[u8],
) -> Result<i64, BackendError> {
    let values = [bytes(start), PgParam::Number(BATCH_ROWS), PgParam::Number(micros(min_age))];
    let statement = BoundStatement::new(&texts.purge, values);
    let rows = client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
    rows.first().map_or(Ok(0), |row| column(row, 0))
}
