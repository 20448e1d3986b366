//! Deletes the rows of keys that have been free for `purge_after`, a bounded piece at a time.
//!
//! The largest deleted token is kept: a trigger records it in the same transaction. The progress of
//! the search is stored in the file, because a command that locks once and exits must also
//! contribute.

use std::sync::Arc;

use registry_core::{BackendError, Claim};

use super::backend::SqliteBackend;
use super::clock::micros;
use super::sql;
use super::statement::{RowKey, Statements};

/// A release purges a piece if its claim's random id begins with this byte: one in 256. A piece has
/// twice as many rows, so the search is faster than releases can add rows.
const SIGN: u8 = 0;

impl SqliteBackend {
    /// Purges a piece after one in 256 releases, chosen by the claim's random id.
    pub(super) async fn purge_by_chance(&self, claim: &Claim) {
        if claim.id().to_bytes()[0] == SIGN {
            // The release is done and must not fail because of the purge. The next acquisition
            // reports a fault of the file.
            let _ = self.purge_piece().await;
        }
    }

    /// Purges the next piece. Returns the number of deleted rows.
    pub(super) async fn purge_piece(&self) -> Result<u64, BackendError> {
        let swept = self.reader.rows(|| sqlx::query(sql::SWEEP)).await?;
        let Some(swept) = swept.first() else { return Ok(0) };
        let from: RowKey = (self.column(swept, 0)?, self.column(swept, 1)?);
        let dead_since =
            self.statements.clock.now().saturating_sub(micros(self.config.purge_after));

        let (statements, start) = (Arc::clone(&self.statements), from.clone());
        let piece = self.reader.rows(move || statements.survey(&start, dead_since)).await?;
        let (purged, next) = match piece.first() {
            None => (0, RowKey::default()),
            Some(row) => {
                let to: RowKey = (self.column(row, 0)?, self.column(row, 1)?);
                let (rows, dead): (i64, i64) = (self.column(row, 2)?, self.column(row, 3)?);
                let purged =
                    if dead == 0 { 0 } else { self.delete(&from, &to, dead_since).await? };
                (purged, if rows < sql::PURGE_ROWS_MAX { RowKey::default() } else { to })
            }
        };
        // Two processes may overwrite each other here. Then a piece is searched twice.
        if next != from {
            self.writer.changes(move || Statements::swept(&next)).await?;
        }
        Ok(purged)
    }

    /// Deletes the dead rows between two rows. Checks each row again, because it may have been
    /// granted since the search.
    async fn delete(
        &self,
        from: &RowKey,
        to: &RowKey,
        dead_since: i64,
    ) -> Result<u64, BackendError> {
        let (statements, from, to) = (Arc::clone(&self.statements), from.clone(), to.clone());
        self.writer.changes(move || statements.purge(&from, &to, dead_since)).await
    }
}
