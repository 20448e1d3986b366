//! Deletes the rows of keys that have been free for `purge_after`, a bounded piece at a time.
//!
//! The largest deleted token is kept: it is written to the meta table before the rows are deleted.
//! The two statements need no transaction: between them, a token is only recorded twice.

use std::time::Duration;

use registry_core::{BackendError, Claim};
use sqlx::Row as _;
use tokio::time::timeout;

use super::backend::MySqlBackend;
use super::link::{Link, Repeat};
use super::sql::Texts;
use super::statement;
use crate::server::Errand;

/// A release purges a piece if its claim's random id begins with this byte: one in 256.
const SIGN: u8 = 0;

/// How much longer a release may take because of the purge, for example while all connections are
/// in use.
const TIME_MAX: Duration = Duration::from_millis(500);

/// The rows of a piece: twice as many as releases can have added since the last purge. So at most
/// half of all rows are dead.
const PIECE_ROWS: usize = 512;

impl MySqlBackend {
    /// Purges a random piece after one in 256 releases, chosen by the claim's random id.
    pub(super) async fn purge_by_chance(&self, claim: &Claim) {
        by_chance(claim, &self.link, &self.statements.texts, self.config.purge_after).await;
    }

    /// Purges the piece that starts at `place`. Returns the number of deleted rows.
    #[cfg(test)]
    pub(super) async fn purge_piece(&self, place: [u8; 32]) -> Result<u64, BackendError> {
        piece(&self.link, &self.statements.texts, self.config.purge_after, place).await
    }
}

/// Purges after one in 256 releases, for every backend with rows in the tables.
pub(super) async fn by_chance(claim: &Claim, link: &Link, texts: &Texts, dead_for: Duration) {
    if claim.id().to_bytes()[0] == SIGN {
        // The release is done and must not fail because of the purge. The next acquisition reports
        // a fault of the tables.
        let place: [u8; 32] = std::array::from_fn(|_| fastrand::u8(..));
        let _ = timeout(TIME_MAX, piece(link, texts, dead_for, place)).await;
    }
}

/// Purges the piece that starts at `place`. Returns the number of deleted rows.
async fn piece(
    link: &Link,
    texts: &Texts,
    dead_for: Duration,
    place: [u8; 32],
) -> Result<u64, BackendError> {
    let make = || statement::piece(texts, place, PIECE_ROWS, dead_for);
    let rows = link.rows(Errand::Acquire, make).await?;
    let mut ids: Vec<Vec<u8>> = Vec::with_capacity(rows.len());
    let mut token: Option<i64> = None;
    let explain = |error| link.explain(error);
    for row in &rows {
        ids.push(row.try_get(0).map_err(explain)?);
        token = token.max(Some(row.try_get(1).map_err(explain)?));
    }
    let Some(token) = token else { return Ok(0) };
    let raise = || statement::raise_floor(texts, token);
    link.change(Errand::Acquire, Repeat::Harmless, raise).await?;
    let delete = || statement::purge(texts, &ids, dead_for, token);
    Ok(link.change(Errand::Acquire, Repeat::Harmless, delete).await?.rows_affected())
}
