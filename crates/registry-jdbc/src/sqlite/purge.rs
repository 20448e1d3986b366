//! Deletes the rows of keys that nobody has locked for a while, a bounded piece at a time.
//!
//! Their tokens are not forgotten: a trigger of the tables keeps the largest in the same transaction. How far the search has
//! come is kept in the file, because a command that locks once and exits must do its share too.

use std::sync::Arc;

use registry_core::{BackendError, Claim};

use super::backend::SqliteBackend;
use super::clock::micros;
use super::sql;

/// One release in this many searches one piece of [`sql::PURGE_ROWS_MAX`] rows. More rows are searched than releases can add.
const RELEASES_PER_PIECE: u8 = u8::MAX;

impl SqliteBackend {
    /// Searches a piece, now and then: the claim's random id is the die.
    pub(super) async fn purge_by_chance(&self, claim: &Claim) {
        if claim.id().to_bytes()[0] == RELEASES_PER_PIECE {
            // The release is done and is not to fail because of housekeeping. What is wrong with the file, the next
            // acquisition will tell.
            let _ = self.purge_piece().await;
        }
    }

    /// Searches the next piece and tells how many rows were deleted.
    pub(super) async fn purge_piece(&self) -> Result<u64, BackendError> {
        let swept = self.reader.rows(|| sqlx::query(sql::SWEEP)).await?;
        let Some(swept) = swept.first() else { return Ok(0) };
        let from: (String, Vec<u8>) = (self.column(swept, 0)?, self.column(swept, 1)?);
        let dead_since = self.clock.now().saturating_sub(micros(self.config.purge_after));

        let piece = self
            .reader
            .rows(|| {
                sqlx::query(sql::SURVEY)
                    .bind(from.0.clone())
                    .bind(from.1.clone())
                    .bind(dead_since)
                    .bind(Arc::clone(&self.boot))
            })
            .await?;
        let start = (String::new(), Vec::new());
        let (purged, next) = match piece.first() {
            None => (0, start),
            Some(row) => {
                let to: (String, Vec<u8>) = (self.column(row, 0)?, self.column(row, 1)?);
                let (rows, dead): (i64, i64) = (self.column(row, 2)?, self.column(row, 3)?);
                let purged =
                    if dead == 0 { 0 } else { self.delete(&from, &to, dead_since).await? };
                (purged, if rows < sql::PURGE_ROWS_MAX { start } else { to })
            }
        };
        // Two processes may overwrite each other here; then a piece is searched twice.
        if next != from {
            self.writer
                .changes(|| sqlx::query(sql::SWEPT).bind(next.0.clone()).bind(next.1.clone()))
                .await?;
        }
        Ok(purged)
    }

    /// Deletes what is dead between two rows. Asks each row again, as it may have come alive since the search.
    async fn delete(
        &self,
        from: &(String, Vec<u8>),
        to: &(String, Vec<u8>),
        dead_since: i64,
    ) -> Result<u64, BackendError> {
        self.writer
            .changes(|| {
                sqlx::query(sql::PURGE)
                    .bind(from.0.clone())
                    .bind(from.1.clone())
                    .bind(dead_since)
                    .bind(Arc::clone(&self.boot))
                    .bind(to.0.clone())
                    .bind(to.1.clone())
            })
            .await
    }
}
