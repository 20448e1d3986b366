//! Keys that several claims can hold: shared claims, permits, and claims that wait in the store.
//!
//! [`LockRecord`] decides each request. In the row of such a key, the claim is [`RECORD_MARKER`],
//! and the label is the text of the record. `until` is the latest end of its entries. Until then,
//! the statements for exclusive claims find such a row held, and do not change it. A request reads
//! the row, and writes its change only if the row is still the same. Exceptions are the statements
//! for a claim that is alone in its record, which read nothing first. `since` grows with each
//! change after which a waiting claim may be granted. `release_watcher` compares `since` to detect
//! such a change.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, ClaimMode, FencingToken, Grant, Holder,
    Key, LockRecord, Release, Renewal,
};

use super::backend::{SqliteBackend, busy_limit};
use super::open;

/// The claim in the row of a key that several claims can hold. The id of a claim is longer.
pub(super) const RECORD_MARKER: &[u8] = b"+";

/// The bit that is set in the version of a row with a record. The version of any other row is its
/// token, in which this bit is not set.
pub(super) const MULTI_CLAIM_BIT: u64 = 1 << 63;

/// The columns of a row that a change reads and sets. The default is a missing row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SqliteRowColumns {
    pub(super) claim: Option<Vec<u8>>,
    /// `None` if the row is missing.
    pub(super) token: Option<i64>,
    pub(super) block: i64,
    pub(super) label: Option<String>,
    pub(super) since: i64,
    pub(super) until: i64,
}

impl SqliteRowColumns {
    fn has_record(&self) -> bool {
        self.claim.as_deref() == Some(RECORD_MARKER)
    }

    /// Returns the version of a busy response for this row.
    fn version(&self) -> u64 {
        if self.has_record() {
            self.since.cast_unsigned() | MULTI_CLAIM_BIT
        } else {
            self.token.unwrap_or(0).cast_unsigned()
        }
    }
}

/// A row as it was read.
struct ReadRow {
    columns: SqliteRowColumns,
    /// The largest token of all deleted rows. New tokens are larger.
    floor: i64,
}

impl SqliteBackend {
    /// Tries to acquire the key in the mode of `claim`.
    pub(super) async fn attempt_on_record(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        if claim.mode() != ClaimMode::Exclusive
            && !claim.is_conversion()
            && let Some(grant) = self.try_grant_single_entry(claim).await?
        {
            return Ok(Attempt::Granted(grant));
        }
        for _ in 0..CHANGES_MAX {
            let row = self.read_row(claim.key()).await?.ok_or_else(|| self.other_boot_error())?;
            let now = self.now();
            let mut record = self.record(claim.key(), &row.columns, now)?;
            record.remove_expired(now);
            let before = record.clone();
            let mut new_token = None;
            let attempt = record.acquire(claim, now, || {
                let token = self.next_token(&row)?;
                new_token = Some(token);
                Ok::<_, BackendError>(token)
            })?;
            let is_granted = matches!(attempt, Attempt::Granted(_));
            if record == before || !is_granted && record.may_skip_write(&before, claim, now) {
                return Ok(self.with_seen_version(attempt, &row.columns));
            }
            let had_entry = before.entries().iter().any(|entry| entry.id == claim.id());
            // After a conversion to a weaker mode, other claims may be granted. The same applies
            // after the grant of a queued claim, because the claims behind it move up.
            let wakes_waiters = is_granted && had_entry;
            let mut new = self.row_with(&row.columns, &record, now, wakes_waiters);
            if let Some(token) = new_token {
                new.token = Some(token.get().cast_signed());
                new.block = i64::from(claim.token_block());
            }
            if self.write_row(claim.key(), busy_limit(claim), &row.columns, &new).await? {
                return Ok(self.with_seen_version(attempt, &new));
            }
        }
        Err(self.too_many_changes())
    }

    /// Grants a free key to `claim`, which is then alone in its record, in one statement. Returns
    /// `None` if the key is held, if earlier tokens may be ahead of the wall clock, or if a process
    /// of another boot has opened the file.
    async fn try_grant_single_entry(&self, claim: &Claim) -> Result<Option<Grant>, BackendError> {
        let wall = self.statements.clock.wall();
        if !self.is_above_granted_tokens(wall) {
            return Ok(None);
        }
        let token = self.fencing_token(wall)?;
        let (statements, owned_claim) = (Arc::clone(&self.statements), claim.clone());
        let make_statement = move || statements.acquire_single_entry(&owned_claim, token);
        if self.writer.execute_low_priority(make_statement).await? == 0 {
            return Ok(None);
        }
        self.raise_next_token_min(wall.saturating_add(i64::from(claim.token_block()) - 1));
        Ok(Some(Grant::new(token, claim.lease())))
    }

    /// Ends the grant or the wait of `claim`.
    pub(super) async fn release_in_record(&self, claim: &Claim) -> Result<Release, BackendError> {
        if claim.mode() != ClaimMode::Exclusive {
            let (statements, owned_claim) = (Arc::clone(&self.statements), claim.clone());
            let make_statement = move || statements.release_single_entry(&owned_claim);
            if self.writer.execute_within(busy_limit(claim), make_statement).await? > 0 {
                return Ok(Release::Freed);
            }
        }
        for _ in 0..CHANGES_MAX {
            let Some(ReadRow { columns: row, .. }) = self.read_row(claim.key()).await? else {
                return Ok(Release::NotHeld);
            };
            let now = self.now();
            let mut record = self.record(claim.key(), &row, now)?;
            let Some(entry) = record.release(claim).filter(|_| row.has_record()) else {
                return Ok(Release::NotHeld);
            };
            let mut new = self.row_with(&row, &record, now, true);
            if entry.token.map(|token| token.get().cast_signed()) == row.token {
                // The ended grant is the newest one, so the next grant can use its unused tokens.
                new.block = new.block.min(i64::from(claim.token_block()));
            }
            if self.write_row(claim.key(), busy_limit(claim), &row, &new).await? {
                return Ok(LockRecord::release_response(Some(&entry), now));
            }
        }
        Err(self.too_many_changes())
    }

    /// Ends all grants in the record of the key. Claims that wait keep their places.
    pub(super) async fn force_release_in_record(&self, key: &Key) -> Result<Release, BackendError> {
        for _ in 0..CHANGES_MAX {
            let Some(ReadRow { columns: row, .. }) = self.read_row(key).await? else {
                return Ok(Release::NotHeld);
            };
            let now = self.now();
            let mut record = self.record(key, &row, now)?;
            if !row.has_record() || record.force_release(now) == Release::NotHeld {
                return Ok(Release::NotHeld);
            }
            let new = self.row_with(&row, &record, now, true);
            if self.write_row(key, Duration::MAX, &row, &new).await? {
                return Ok(Release::Freed);
            }
        }
        Err(self.too_many_changes())
    }

    /// Extends the lease of `claim`.
    pub(super) async fn renew_in_record(&self, claim: &Claim) -> Result<Renewal, BackendError> {
        for _ in 0..CHANGES_MAX {
            let Some(ReadRow { columns: row, .. }) = self.read_row(claim.key()).await? else {
                return Ok(Renewal::Gone);
            };
            let now = self.now();
            let mut record = self.record(claim.key(), &row, now)?;
            let renewal = record.renew(claim, now);
            if renewal == Renewal::Gone || !row.has_record() {
                return Ok(Renewal::Gone);
            }
            let new = SqliteRowColumns {
                label: Some(record.to_text()),
                until: record.until().cast_signed(),
                ..row.clone()
            };
            if new == row || self.write_row(claim.key(), busy_limit(claim), &row, &new).await? {
                return Ok(renewal);
            }
        }
        Err(self.too_many_changes())
    }

    /// Returns the holders in the record of a row with [`RECORD_MARKER`].
    pub(super) fn holders_of_record(
        &self,
        key: &Key,
        text: Option<&str>,
    ) -> Result<Vec<Holder>, BackendError> {
        Ok(self.parse_record(text)?.holders(key, self.now()))
    }

    /// Returns the row of a key. Returns `None` if a process of another boot has opened the file:
    /// all grants of this boot have ended.
    async fn read_row(&self, key: &Key) -> Result<Option<ReadRow>, BackendError> {
        let (statements, key) = (Arc::clone(&self.statements), key.clone());
        // The writer's connection: a reader may return the row as it was before the last change by
        // this process.
        let rows = self.writer.fetch_all(move || statements.read_row(&key)).await?;
        let row = rows.first().ok_or_else(|| open::corrupt_meta(self.path()))?;
        let boot: Vec<u8> = self.column(row, 0)?;
        if boot != *self.statements.boot {
            return Ok(None);
        }
        let floor = self.column(row, 1)?;
        let Some(token) = self.column::<Option<i64>>(row, 3)? else {
            return Ok(Some(ReadRow { columns: SqliteRowColumns::default(), floor }));
        };
        let columns = SqliteRowColumns {
            claim: self.column(row, 2)?,
            token: Some(token),
            block: self.column(row, 4)?,
            label: self.column(row, 5)?,
            since: self.column(row, 6)?,
            until: self.column(row, 7)?,
        };
        Ok(Some(ReadRow { columns, floor }))
    }

    /// Returns the record of a row, or a record of its exclusive grant. `sql::READ_ROW` returns no
    /// claim of an earlier boot, because that grant has ended.
    fn record(
        &self,
        key: &Key,
        row: &SqliteRowColumns,
        now: u64,
    ) -> Result<LockRecord, BackendError> {
        let is_live = row.until.cast_unsigned() > now;
        if row.has_record() && is_live {
            return self.parse_record(row.label.as_deref());
        }
        let mut record = LockRecord::new();
        if let Some(id) = row.claim.as_deref().and_then(|claim| claim.try_into().ok())
            && is_live
        {
            let holder = Claim::new(key.clone(), Duration::ZERO)
                .with_id(registry_core::ClaimId::from_bits(u128::from_be_bytes(id)))
                .with_token_block(u32::try_from(row.block).unwrap_or(u32::MAX))
                .with_label(row.label.as_deref().map(Into::into));
            let token = self.fencing_token(row.token.unwrap_or(0))?;
            let (since, until) = (row.since.cast_unsigned(), row.until.cast_unsigned());
            record.insert(LockRecord::granted_entry(&holder, token, since, until));
        }
        Ok(record)
    }

    fn parse_record(&self, text: Option<&str>) -> Result<LockRecord, BackendError> {
        LockRecord::parse(text.unwrap_or_default())
            .map_err(|_| self.corrupt_row("the record of several claims is invalid"))
    }

    /// Returns the row for `record`. A row without claims keeps its tokens.
    fn row_with(
        &self,
        row: &SqliteRowColumns,
        record: &LockRecord,
        now: u64,
        wakes_waiters: bool,
    ) -> SqliteRowColumns {
        let now = now.cast_signed();
        let is_free = record.is_empty();
        let raises_since = wakes_waiters || !row.has_record();
        SqliteRowColumns {
            claim: (!is_free).then(|| RECORD_MARKER.to_vec()),
            label: (!is_free).then(|| record.to_text()),
            since: if raises_since { now.max(row.since.saturating_add(1)) } else { row.since },
            until: if is_free { now } else { record.until().cast_signed() },
            ..row.clone()
        }
    }

    /// Writes `new` if the row is still as `old`. Returns whether it was written.
    async fn write_row(
        &self,
        key: &Key,
        limit: Duration,
        old: &SqliteRowColumns,
        new: &SqliteRowColumns,
    ) -> Result<bool, BackendError> {
        let statements = Arc::clone(&self.statements);
        let (key, old, new) = (key.clone(), old.clone(), new.clone());
        let make_statement = move || statements.write_row(&key, &old, &new);
        Ok(self.writer.execute_within(limit, make_statement).await? > 0)
    }

    fn next_token(&self, row: &ReadRow) -> Result<FencingToken, BackendError> {
        let last = match row.columns.token {
            Some(token) => token.checked_add(row.columns.block),
            None => Some(0),
        };
        let (Some(last), Some(above_floor)) = (last, row.floor.checked_add(1)) else {
            return Err(self.corrupt_row("the token of a row is at its limit"));
        };
        let token = self.statements.clock.wall().max(last).max(above_floor);
        self.raise_next_token_min(token);
        self.fencing_token(token)
    }

    fn with_seen_version(&self, attempt: Attempt, row: &SqliteRowColumns) -> Attempt {
        let with_seen_version = |busy: Busy| {
            busy.with_seen_version(row.version()).with_wake_check(self.release_watcher.wake_check())
        };
        match attempt {
            Attempt::Busy(busy) => Attempt::Busy(with_seen_version(busy)),
            attempt => attempt,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.statements.clock.now()).unwrap_or(0)
    }

    fn too_many_changes(&self) -> BackendError {
        let message =
            format!("other clients changed the key during each of {CHANGES_MAX} attempts; retry");
        super::error::at_path(BackendErrorKind::Transient, self.path(), message).as_refused()
    }
}

/// The number of changes by other clients after which a request fails.
const CHANGES_MAX: u32 = 100;

#[cfg(test)]
mod tests {
    use sqlx::Executor as _;

    use super::*;
    use crate::sqlite::tests::{TestFolder, begin_write, key};

    /// Another process has granted, released and purged the key since the row was read as missing.
    #[tokio::test]
    async fn a_missing_row_is_written_only_with_a_token_above_those_of_purged_rows() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let mut writer = begin_write(&folder.file()).await;
        writer.execute("UPDATE lock_registry_meta SET floor = 1000").await.unwrap();
        writer.execute("COMMIT").await.unwrap();
        let missing = SqliteRowColumns::default();
        for (token, is_written) in [(999, false), (1_000, false), (1_001, true)] {
            let row = SqliteRowColumns { token: Some(token), block: 1, ..missing.clone() };
            let written = backend.write_row(&key("k"), Duration::MAX, &missing, &row).await;
            assert_eq!(written.unwrap(), is_written, "{token}");
        }
    }
}
