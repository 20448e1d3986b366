//! Deletes the rows of keys that have not been locked for some time, in batches of limited size.
//!
//! A trigger of the tables keeps the largest of their tokens in the same transaction. Called after
//! releases.

use std::time::Duration;

use registry_core::{BackendError, Claim};

use super::backend::{bytes, column, micros};
use super::client::PgClient;
use super::sql::PgStatements;
use super::statement::{BoundStatement, PgParam};
use crate::server::{BATCH_ROWS, ConnectionUse, Resend};

/// Purges a batch after some of the releases.
pub(super) async fn maybe_purge(
    claim: &Claim,
    client: &PgClient,
    texts: &PgStatements,
    min_age: Duration,
) {
    crate::server::maybe_purge(claim, |start| purge_batch(client, texts, min_age, start)).await;
}

/// Searches the batch that follows `start`, and returns the number of deleted rows.
async fn purge_batch(
    client: &PgClient,
    texts: &PgStatements,
    min_age: Duration,
    start: [u8; 32],
) -> Result<i64, BackendError> {
    let rows_max = PgParam::Number(i64::from(BATCH_ROWS));
    let values = [bytes(&start), rows_max, PgParam::Number(micros(min_age))];
    let statement = BoundStatement::new(&texts.purge, values);
    let rows = client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
    rows.first().map_or(Ok(0), |row| column(row, 0))
}
