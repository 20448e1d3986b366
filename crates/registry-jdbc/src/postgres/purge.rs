//! Deletes the rows of keys that have not been locked for some time, in batches of limited size.
//!
//! A trigger of the tables keeps the largest of their tokens in the same transaction. Called after
//! releases.

use std::time::Duration;

use registry_core::{BackendError, Claim};
use tokio::time::timeout;

use super::backend::{PostgresBackend, bytes, column, micros};
use super::link::{Link, Repeat};
use super::sql::Texts;
use super::statement::{Statement, Value};
use crate::server::Errand;

/// A release searches a batch if its claim's random id begins with this byte: one in 256.
const SIGN: u8 = 0;

/// The maximum time that a batch adds to a release, even if all connections are busy.
const TIME_MAX: Duration = Duration::from_millis(500);

/// The number of rows in a batch. It is twice the number that releases can have added since the
/// last batch, so that at most half of all rows are dead.
const PIECE_ROWS: i64 = 512;

impl PostgresBackend {
    /// Searches a batch if the claim's random id begins with [`SIGN`].
    pub(super) async fn purge_by_chance(&self, claim: &Claim) {
        by_chance(claim, &self.link, &self.texts, self.config.purge_after).await;
    }
}

/// The same for every backend with rows in the tables.
pub(super) async fn by_chance(claim: &Claim, link: &Link, texts: &Texts, dead_for: Duration) {
    if claim.id().to_bytes()[0] == SIGN {
        // The release is complete and must not fail because of housekeeping. The next acquisition
        // returns any error of the tables.
        let place: [u8; 32] = std::array::from_fn(|_| fastrand::u8(..));
        let _ = timeout(TIME_MAX, piece(link, texts, dead_for, &place)).await;
    }
}

/// Searches the batch that follows `place`, and returns the number of deleted rows.
async fn piece(
    link: &Link,
    texts: &Texts,
    dead_for: Duration,
    place: &[u8],
) -> Result<i64, BackendError> {
    let values = [bytes(place), Value::Number(PIECE_ROWS), Value::Number(micros(dead_for))];
    let statement = Statement::new(&texts.purge, values);
    let rows = link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
    rows.first().map_or(Ok(0), |row| column(row, 0))
}
