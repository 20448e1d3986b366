//! Deletes the rows of keys that nobody has locked for a while, a bounded piece at a time.
//!
//! Their tokens are not forgotten: the largest is kept in the meta table before the rows go. The two statements need no transaction: in
//! between, a token is kept twice.

use std::time::Duration;

use registry_core::{BackendError, Claim};
use tokio::time::timeout;

use super::backend::MySqlBackend;
use super::link::Repeat;
use crate::server::Errand;

/// A release searches a piece if its claim's random id begins with this byte: one in 256.
const SIGN: u8 = 0;

/// How long a release may take longer for it, while all connections are at work perhaps.
const TIME_MAX: Duration = Duration::from_millis(500);

/// How many rows a piece has: twice as many as releases can have added since the last one, so that at most half of all rows are dead.
const PIECE_ROWS: usize = 512;

impl MySqlBackend {
    /// Searches a piece, now and then: the claim's random id is the die.
    pub(super) async fn purge_by_chance(&self, claim: &Claim) {
        if claim.id().to_bytes()[0] == SIGN {
            // The release is done and is not to fail because of housekeeping. What is wrong with the tables, the next
            // acquisition will tell.
            let place: [u8; 32] = std::array::from_fn(|_| fastrand::u8(..));
            let _ = timeout(TIME_MAX, self.purge_piece(place)).await;
        }
    }

    /// Searches the piece that follows `place`, and tells how many rows were deleted.
    pub(super) async fn purge_piece(&self, place: [u8; 32]) -> Result<u64, BackendError> {
        let dead_for = self.config.purge_after;
        let make = || self.statements.piece(place, PIECE_ROWS, dead_for);
        let rows = self.link.rows(Errand::Acquire, make).await?;
        let mut ids: Vec<Vec<u8>> = Vec::with_capacity(rows.len());
        let mut token: Option<i64> = None;
        for row in &rows {
            ids.push(self.column(row, 0)?);
            token = token.max(Some(self.column(row, 1)?));
        }
        let Some(token) = token else { return Ok(0) };
        let raise = || self.statements.raise_floor(token);
        self.link.change(Errand::Acquire, Repeat::Harmless, raise).await?;
        let delete = || self.statements.purge(&ids, dead_for, token);
        Ok(self.link.change(Errand::Acquire, Repeat::Harmless, delete).await?.rows_affected())
    }
}
