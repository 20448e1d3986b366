//! Deletes the rows of keys that nobody has locked for a while, a bounded piece at a time.
//!
//! Their tokens are not forgotten: a trigger of the tables keeps the largest in the same transaction.

use std::time::Duration;

use registry_core::{BackendError, Claim};
use tokio::time::timeout;

use super::backend::{PostgresBackend, bytes, column, micros};
use super::link::{Link, Repeat};
use super::sql::Texts;
use super::statement::{Statement, Value};
use crate::server::Errand;

/// A release searches a piece if its claim's random id begins with this byte: one in 256.
const SIGN: u8 = 0;

/// How long a release may take longer for it, while all connections are at work perhaps.
const TIME_MAX: Duration = Duration::from_millis(500);

/// How many rows a piece has: twice as many as releases can have added since the last one, so that at most half of all rows are dead.
const PIECE_ROWS: i64 = 512;

impl PostgresBackend {
    /// Searches a piece, now and then: the claim's random id is the die.
    pub(super) async fn purge_by_chance(&self, claim: &Claim) {
        by_chance(claim, &self.link, &self.texts, self.config.purge_after).await;
    }
}

/// For whatever has rows in the tables.
pub(super) async fn by_chance(claim: &Claim, link: &Link, texts: &Texts, dead_for: Duration) {
    if claim.id().to_bytes()[0] == SIGN {
        // The release is done and is not to fail because of housekeeping. What is wrong with the tables, the next
        // acquisition will tell.
        let place: [u8; 32] = std::array::from_fn(|_| fastrand::u8(..));
        let _ = timeout(TIME_MAX, piece(link, texts, dead_for, &place)).await;
    }
}

/// Searches the piece that follows `place`, and tells how many rows were deleted.
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
