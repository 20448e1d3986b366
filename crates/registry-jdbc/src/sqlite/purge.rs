//! Deletes the rows of keys that have been free for `purge_after`, a bounded range at a time.
//!
//! A trigger stores the largest deleted token in the same transaction. The position of the search
//! is stored in the file, so that processes that lock once and exit also advance it.

use std::sync::Arc;

use registry_core::{BackendError, Claim};

use super::backend::SqliteBackend;
use super::clock::to_micros;
use super::sql;
use super::statement::{RowKey, SqliteStatementBinder};

/// A release purges a range if its claim's random id begins with this byte: one in 256. A range has
/// 512 rows, so the search is faster than releases can add rows.
const PURGE_ID_BYTE: u8 = 0;

impl SqliteBackend {
    /// Purges a range after one in 256 releases, chosen by the claim's random id.
    pub(super) async fn purge_at_random(&self, claim: &Claim) {
        if claim.id().to_bytes()[0] == PURGE_ID_BYTE {
            // The release succeeded and must not fail because of the purge. The next acquisition
            // returns an error of the file.
            let _ = self.purge_next_range().await;
        }
    }

    /// Purges the next range. Returns the number of deleted rows.
    pub(super) async fn purge_next_range(&self) -> Result<u64, BackendError> {
        let position = self.reader.fetch_all(|| sqlx::query(sql::PURGE_POSITION)).await?;
        let Some(position) = position.first() else { return Ok(0) };
        let start: RowKey = (self.column(position, 0)?, self.column(position, 1)?);
        let free_since =
            self.statements.clock.now().saturating_sub(to_micros(self.config.purge_after));

        let (statements, range_start) = (Arc::clone(&self.statements), start.clone());
        let range = self
            .reader
            .fetch_all(move || statements.purge_candidates(&range_start, free_since))
            .await?;
        let (purged, next) = match range.first() {
            None => (0, RowKey::default()),
            Some(row) => {
                let end: RowKey = (self.column(row, 0)?, self.column(row, 1)?);
                let (rows, purgeable): (i64, i64) = (self.column(row, 2)?, self.column(row, 3)?);
                let purged =
                    if purgeable == 0 { 0 } else { self.delete(&start, &end, free_since).await? };
                (purged, if rows < sql::PURGE_ROWS_MAX { RowKey::default() } else { end })
            }
        };
        // Two processes may overwrite each other's position. Then a range is searched twice.
        if next != start {
            self.writer.execute(move || SqliteStatementBinder::save_purge_position(&next)).await?;
        }
        Ok(purged)
    }

    /// Deletes the purgeable rows between two rows. Checks each row again, because it may have been
    /// granted since the search.
    async fn delete(
        &self,
        start: &RowKey,
        end: &RowKey,
        free_since: i64,
    ) -> Result<u64, BackendError> {
        let (statements, start, end) = (Arc::clone(&self.statements), start.clone(), end.clone());
        self.writer.execute(move || statements.purge(&start, &end, free_since)).await
    }
}
