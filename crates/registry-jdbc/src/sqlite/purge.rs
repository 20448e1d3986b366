//! Deletes the rows of keys that have been free for `purge_after`, and the rows of earlier boots.
//! Each purge covers a limited range of rows.
//!
//! A trigger stores the largest deleted token in the same transaction. The position of the last
//! range is stored in the file, so that processes that lock once and exit also advance it.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim};

use super::backend::SqliteBackend;
use super::clock::to_micros;
use super::sql;
use super::statement::{RowKey, SqliteStatementBinder};

/// A release purges one range if the first byte of its claim's random id equals this value (1 in
/// 256 releases). A range has 512 rows, so on average each release checks two rows, and it has
/// added at most one.
const PURGE_ID_BYTE: u8 = 0;

/// How long a purge waits for the end of another connection's write transaction. A purge that
/// reaches this limit is left to a later release.
const BUSY_LIMIT: Duration = Duration::from_millis(10);

impl SqliteBackend {
    /// Purges a range after one in 256 releases, chosen by the claim's random id.
    pub(super) async fn purge_at_random(&self, claim: &Claim) {
        if claim.id().to_bytes()[0] == PURGE_ID_BYTE {
            // The release is complete, and must neither fail nor wait long because of the purge.
            // The next acquisition returns any error of the file.
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
                let (rows, dead_rows): (i64, i64) = (self.column(row, 2)?, self.column(row, 3)?);
                let purged =
                    if dead_rows == 0 { 0 } else { self.delete(&start, &end, free_since).await? };
                (purged, if rows < sql::PURGE_ROWS_MAX { RowKey::default() } else { end })
            }
        };
        // Two processes may overwrite each other's position. Then ranges are searched twice.
        if next != start {
            let save = move || SqliteStatementBinder::save_purge_position(&next);
            self.writer.execute_within(BUSY_LIMIT, save).await?;
        }
        Ok(purged)
    }

    /// Deletes the dead rows between two row keys. Checks each row again, because its key may have
    /// been granted since the search.
    async fn delete(
        &self,
        start: &RowKey,
        end: &RowKey,
        free_since: i64,
    ) -> Result<u64, BackendError> {
        let (statements, start, end) = (Arc::clone(&self.statements), start.clone(), end.clone());
        // If another connection writes, a later release purges the range.
        let purge = move || statements.purge(&start, &end, free_since);
        self.writer.execute_within(BUSY_LIMIT, purge).await
    }
}

#[cfg(test)]
mod tests {
    //! Purged rows are deleted, and tokens still grow.

    use std::time::Duration;

    use registry_core::LockBackend;
    use sqlx::Row;

    use crate::sqlite::backend::SqliteBackend;
    use crate::sqlite::clock::ManualClock;
    use crate::sqlite::tests::{TestFolder, acquire, acquire_token, claim, expect_busy};

    async fn row_count(backend: &SqliteBackend) -> i64 {
        let count = || sqlx::query("SELECT count(*) FROM lock_registry_locks");
        backend.reader.fetch_all(count).await.unwrap()[0].get(0)
    }

    async fn purge_ranges(backend: &SqliteBackend, ranges: usize) -> u64 {
        let mut purged = 0;
        for _ in 0..ranges {
            purged += backend.purge_next_range().await.unwrap();
        }
        purged
    }

    #[tokio::test]
    async fn rows_of_free_keys_are_purged_and_their_tokens_are_never_granted_again() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let released = claim("released").with_token_block(1_000);
        let newest = acquire_token(&backend, &released).await;
        backend.release(&released).await.unwrap();
        let expired = claim("expired").with_lease(Duration::from_secs(1));
        acquire_token(&backend, &expired).await;

        clock.advance(backend.config.purge_after);
        let held = claim("held");
        acquire(&backend, &held).await;
        // The expired lease ended a second later.
        assert_eq!(purge_ranges(&backend, 1).await, 1);
        clock.advance(Duration::from_secs(1));
        assert_eq!(purge_ranges(&backend, 1).await, 1);
        assert_eq!(row_count(&backend).await, 1);
        expect_busy(&backend, &claim("held")).await;

        clock.set_wall(0);
        assert_eq!(acquire_token(&backend, &claim("released")).await, newest + 1_000);
        // Every key starts above all purged tokens, so no purged key needs a row.
        assert!(acquire_token(&backend, &claim("new")).await >= newest + 1_000);
    }

    #[tokio::test]
    async fn rows_of_an_earlier_boot_are_purged_at_once() {
        let folder = TestFolder::new();
        let first = {
            let backend = folder.open_backend_with_clock(&ManualClock::with_boot_id(1)).await;
            let first = acquire_token(&backend, &claim("k")).await;
            backend.close().await;
            first
        };
        let clock = ManualClock::with_boot_id(2);
        clock.set_wall(0);
        let backend = folder.open_backend_with_clock(&clock).await;
        assert_eq!(purge_ranges(&backend, 1).await, 1);
        assert!(acquire_token(&backend, &claim("k")).await > first);
    }

    #[tokio::test]
    async fn a_process_of_an_earlier_boot_purges_nothing() {
        let folder = TestFolder::new();
        let (old, new) = (ManualClock::with_boot_id(1), ManualClock::with_boot_id(2));
        let stale = folder.open_backend_with_clock(&old).await;
        let live = folder.open_backend_with_clock(&new).await;
        acquire(&live, &claim("k")).await;
        assert_eq!(purge_ranges(&stale, 2).await, 0);
        expect_busy(&live, &claim("k")).await;
    }

    #[tokio::test]
    async fn a_manually_deleted_row_keeps_its_tokens_reserved() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let first = acquire_token(&backend, &claim("k")).await;
        clock.set_wall(0);
        backend.writer.execute(|| sqlx::query("DELETE FROM lock_registry_locks")).await.unwrap();
        assert_eq!(acquire_token(&backend, &claim("k")).await, first + 1);
    }

    #[tokio::test]
    async fn the_purge_covers_a_large_table_of_several_namespaces_in_ranges() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let insert = |namespace: &'static str| {
            move || {
                sqlx::query(
                    "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 700) \
                     INSERT INTO lock_registry_locks SELECT ?1, CAST(n AS BLOB), NULL, n, 1, NULL, 0, 0, ?2 FROM n",
                )
                .bind(namespace)
                .bind([1_u8; 16].to_vec())
            }
        };
        backend.writer.execute(insert("default")).await.unwrap();
        backend.writer.execute(insert("elsewhere")).await.unwrap();
        acquire(&backend, &claim("held")).await;
        clock.advance(backend.config.purge_after);
        // The table has 1,401 rows, and a range 512. Another process continues at the stored
        // position.
        assert_eq!(purge_ranges(&backend, 1).await, 512);
        backend.close().await;
        let backend = folder.open_backend_with_clock(&clock).await;
        assert_eq!(purge_ranges(&backend, 2).await, 1_400 - 512);
        assert_eq!(row_count(&backend).await, 1);
        assert_eq!(purge_ranges(&backend, 2).await, 0);
    }

    #[tokio::test]
    async fn a_release_purges_rows_at_random() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        // One release in 256 purges, by the claim's random id. 20,000 releases without a purge are
        // less likely than a disk failure.
        for n in 0..20_000 {
            let claim = claim(&format!("k{n}"));
            acquire(&backend, &claim).await;
            backend.release(&claim).await.unwrap();
            clock.advance(backend.config.purge_after);
            if n > 0 && row_count(&backend).await <= 1 {
                return;
            }
        }
        panic!("nothing was purged");
    }
}
