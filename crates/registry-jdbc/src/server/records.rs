//! Keys that several claims hold or wait for: shared claims, permits, conversions, and claims with
//! a place in the queue.
//!
//! Such a key has one row, whose claim is [`RECORD_MARKER`] and whose label is the text of a
//! [`LockRecord`]. Until the row's `until`, a statement for exclusive claims treats this row as
//! held by another claim, because no claim has that id. A request on the record reads the row,
//! computes the new record, and writes it if the row is still unchanged. If the row has changed,
//! the request starts again.

use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use registry_core::{
    Attempt, BackendError, Claim, ClaimId, ClaimMode, FencingToken, Grant, Holder, Key, LockRecord,
    RecordChange, RecordEntry, Release, Renewal,
};
use tokio::time::sleep;

use super::dialect::{Dialect, WakeupSource as _};
use super::lease_table::LeaseTable;
use super::statement::{bytes, corrupt, decode_holder, fencing_token, maybe_number, number};
use super::{ConnectionUse, Resend, Statement, Value, error};

/// The claim of a row that contains a record. The column has a fixed width on some servers.
pub(crate) const RECORD_MARKER: [u8; 16] = [b'+'; 16];

/// The columns of a row that a request may update.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Columns {
    claim: Option<Vec<u8>>,
    /// The first token of the newest grant.
    token: i64,
    /// The number of tokens that this grant has reserved.
    token_block: i64,
    label: Option<Vec<u8>>,
    /// The time of the grant. In a row with a record, this value instead increases with each change
    /// after which another claim may be granted.
    since: i64,
    /// The end of the grant. In a row with a record, this value is at least the latest end of its
    /// entries. Each write of a record increases `since` or `until`, so equal values mean that the
    /// record is unchanged.
    until: i64,
}

impl Columns {
    fn has_record(&self) -> bool {
        self.claim.as_deref() == Some(&RECORD_MARKER)
    }

    /// Returns the entries of the row that have not expired. A single claim becomes one entry.
    fn record<D: Dialect>(&self, now: u64) -> Result<LockRecord, BackendError> {
        let Some(claim) = &self.claim else { return Ok(LockRecord::new()) };
        if self.has_record() {
            let mut record = parse_record::<D>(self.label.as_deref())?;
            record.remove_expired(now);
            return Ok(record);
        }
        let mut record = LockRecord::new();
        if let Ok(until) = u64::try_from(self.until)
            && now < until
        {
            record.insert(self.exclusive_entry::<D>(claim, until)?);
        }
        Ok(record)
    }

    /// Returns the entry for the row's only claim.
    fn exclusive_entry<D: Dialect>(
        &self,
        claim: &[u8],
        until: u64,
    ) -> Result<RecordEntry, BackendError> {
        // Another program may write a shorter claim id.
        let mut id = [0; 16];
        id.iter_mut().zip(claim).for_each(|(to, from)| *to = *from);
        let label = self.label.as_deref().map(|label| String::from_utf8_lossy(label).into());
        let claim = Claim::new(PLACEHOLDER_KEY.with(Key::clone), Duration::ZERO)
            .with_id(ClaimId::from_bits(u128::from_be_bytes(id)))
            .with_token_block(u32::try_from(self.token_block).unwrap_or(u32::MAX))
            .with_label(label);
        let since = u64::try_from(self.since).unwrap_or(0);
        Ok(LockRecord::granted_entry(&claim, fencing_token::<D>(self.token)?, since, until))
    }
}

thread_local! {
    /// The key of claims that are only converted to entries, which contain no key.
    static PLACEHOLDER_KEY: Key = Key::new("-").expect("a key of one character is valid");
}

fn parse_record<D: Dialect>(text: Option<&[u8]>) -> Result<LockRecord, BackendError> {
    let text = text.and_then(|text| std::str::from_utf8(text).ok());
    let record = text.and_then(|text| LockRecord::parse(text).ok());
    record.ok_or_else(|| corrupt::<D>("the record of a key is corrupt"))
}

/// The row of a key, as it was read.
struct StoredRow {
    /// `None` if the key has no row.
    columns: Option<Columns>,
    /// The server's time.
    now: i64,
    /// The largest token of all purged rows. New tokens are larger.
    floor: i64,
}

impl StoredRow {
    fn parse<D: Dialect>(row: &D::Row) -> Result<Self, BackendError> {
        let columns = match maybe_number::<D>(row, 1)? {
            None => None,
            Some(token) => Some(Columns {
                claim: bytes::<D>(row, 0)?,
                token,
                token_block: number::<D>(row, 2)?,
                label: bytes::<D>(row, 3)?,
                since: number::<D>(row, 4)?,
                until: number::<D>(row, 5)?,
            }),
        };
        Ok(Self { columns, now: number::<D>(row, 6)?, floor: number::<D>(row, 7)? })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.now).unwrap_or(0)
    }

    fn record<D: Dialect>(&self) -> Result<LockRecord, BackendError> {
        self.columns
            .as_ref()
            .map_or_else(|| Ok(LockRecord::new()), |row| row.record::<D>(self.now()))
    }

    fn next_token<D: Dialect>(&self) -> Result<FencingToken, BackendError> {
        let after_last = match &self.columns {
            Some(columns) => columns.token.checked_add(columns.token_block),
            None => Some(0),
        };
        let after_floor = self.floor.checked_add(1);
        let (Some(after_last), Some(after_floor)) = (after_last, after_floor) else {
            return Err(corrupt::<D>("a row's token is at its limit"));
        };
        fencing_token::<D>(self.now.max(after_last).max(after_floor))
    }

    /// Returns the row after `change`.
    fn after<D: Dialect>(&self, change: &Change) -> Result<Columns, BackendError> {
        let (token, token_block) = match (change.grant, &self.columns) {
            (Some((token, token_block)), _) => (i64::from(token), i64::from(token_block)),
            (None, Some(row)) => (
                row.token,
                change.block_used.map_or(row.token_block, |used| row.token_block.min(used)),
            ),
            (None, None) => return Err(corrupt::<D>("a key without a row has a record")),
        };
        let since = match &self.columns {
            None => self.now,
            Some(row) if change.wakes_waiters || row.claim.is_none() => {
                self.now.max(next_time::<D>(row.since)?)
            }
            Some(row) => row.since,
        };
        if change.record.is_empty() {
            return Ok(Columns {
                claim: None,
                token,
                token_block,
                label: None,
                since,
                until: self.now,
            });
        }
        let until = i64::try_from(change.record.until()).unwrap_or(i64::MAX);
        let until = match &self.columns {
            Some(row) if since == row.since => until.max(next_time::<D>(row.until)?),
            _ => until,
        };
        let label = Some(change.record.to_text().into_bytes());
        Ok(Columns { claim: Some(RECORD_MARKER.to_vec()), token, token_block, label, since, until })
    }
}

/// Returns the time one microsecond after a time of a row.
fn next_time<D: Dialect>(time: i64) -> Result<i64, BackendError> {
    time.checked_add(1).ok_or_else(|| corrupt::<D>("a row's time is at its limit"))
}

/// A change of a row that a request writes.
struct Change {
    record: LockRecord,
    /// The token and the token block of a new grant.
    grant: Option<(FencingToken, u32)>,
    /// If this change ends the newest grant, the number of tokens that this grant used. Later
    /// grants may use the rest of its token block.
    block_used: Option<i64>,
    lock_wait: RowLockWait,
    /// Whether another claim may be granted after the change.
    wakes_waiters: bool,
    /// Whether the server may respond before the change is on its disk.
    allows_async_commit: bool,
}

/// Whether a change waits for other transactions that have locked the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RowLockWait {
    /// The change waits for all transactions, including fenced transactions.
    IncludingFences,
    /// The change does not wait. It has no effect on a locked row.
    SkipLocked,
    /// The change waits, but on some servers not for fenced transactions.
    ExceptFences,
}

impl<D: Dialect> LeaseTable<D> {
    /// Makes an attempt of `claim` on the record of its key.
    pub(super) async fn attempt_on_record(
        &self,
        claim: &Claim,
        notification_position: u64,
    ) -> Result<Attempt, BackendError> {
        for _ in 0..WRITE_ATTEMPTS_MAX {
            let stored = self.read_row(claim.key(), ConnectionUse::Acquire).await?;
            let before = stored.record::<D>()?;
            let mut record = before.clone();
            let mut grant = None;
            let attempt = record.acquire(claim, stored.now(), || {
                let token = stored.next_token::<D>()?;
                grant = Some((token, claim.token_block()));
                Ok::<_, BackendError>(token)
            })?;
            let is_granted = matches!(attempt, Attempt::Granted(_));
            if !is_granted && record.may_skip_write(&before, claim, stored.now()) {
                let row = stored.columns.as_ref();
                return Ok(self.with_seen_version(claim, attempt, notification_position, row));
            }
            if record == before {
                return Ok(attempt);
            }
            let lock_wait = match is_granted && !joins_readers(claim, &before) {
                true => RowLockWait::IncludingFences,
                false => RowLockWait::ExceptFences,
            };
            let had_entry = before.entries().iter().any(|entry| entry.id == claim.id());
            let change = Change {
                grant,
                block_used: None,
                lock_wait,
                // After a downgrade, other claims may be granted. The same applies after the grant
                // of a queued claim, because the claims behind it move up.
                wakes_waiters: is_granted && had_entry,
                allows_async_commit: false,
                record,
            };
            match self.write_row(claim.key(), &stored, &change, ConnectionUse::Acquire).await {
                Ok(Some(written)) => {
                    if is_granted && before.is_empty() {
                        self.rows_with_single_entry.insert(self.row_id(claim.key()));
                    }
                    return Ok(self.with_seen_version(
                        claim,
                        attempt,
                        notification_position,
                        Some(&written),
                    ));
                }
                Ok(None) => {}
                Err(error) => match attempt {
                    // The claim is busy, and keeps its place in the queue if it has one.
                    Attempt::Busy(mut busy) if D::is_row_lock_error(&error) => {
                        busy.is_queued = had_entry;
                        if claim.joins_queue() && !had_entry {
                            // The next attempt writes the place.
                            busy.retry_after = Some(QUEUE_RETRY_PAUSE);
                        }
                        let attempt = Attempt::Busy(busy);
                        return Ok(self.with_seen_version(
                            claim,
                            attempt,
                            notification_position,
                            stored.columns.as_ref(),
                        ));
                    }
                    _ => return Err(error),
                },
            }
        }
        Err(self.conflict_error(ConnectionUse::Acquire).await)
    }

    /// Grants `claim` with one statement, without reading the row first, because the row is
    /// probably free. The statement writes a record whose only entry is this grant. Returns `None`
    /// if the row is missing or not free, or if an empty record would not grant the claim.
    pub(super) async fn acquire_released_row(
        &self,
        claim: &Claim,
    ) -> Result<Option<Grant>, BackendError> {
        let RecordChange::Grant(entry) = LockRecord::new().attempt(claim, 0) else {
            return Ok(None);
        };
        let values = [
            self.id_value(claim.key()),
            Value::token_block(claim),
            Value::lease(claim),
            Value::bytes(entry.id_and_mode.as_bytes()),
            Value::bytes(entry.rest.as_bytes()),
        ];
        let statement =
            Statement::new(&self.statements().acquire_released_row, values).with_at_most_one_row();
        let answer =
            self.store.client.send(ConnectionUse::Acquire, Resend::Never, &statement).await?;
        let Some(token) = D::granted_token(&answer)? else { return Ok(None) };
        self.rows_with_single_entry.insert(self.row_id(claim.key()));
        Ok(Some(Grant::new(fencing_token::<D>(token)?, claim.lease())))
    }

    /// Sets `seen_version` of a busy response: `notification_position`, or the version of `row` if
    /// the server sends no notifications. Also adds the row to `rows_busy_in_records`. Returns any
    /// other response unchanged.
    fn with_seen_version(
        &self,
        claim: &Claim,
        attempt: Attempt,
        notification_position: u64,
        row: Option<&Columns>,
    ) -> Attempt {
        match attempt {
            Attempt::Busy(busy) => {
                self.rows_busy_in_records.insert(self.row_id(claim.key()));
                let version =
                    row.map_or(0, |row| if row.has_record() { row.since } else { row.token });
                let version = FencingToken::try_from(version).unwrap_or(FencingToken::MAX);
                Attempt::Busy(
                    busy.with_seen_version(
                        self.wakeups.busy_version(notification_position, version),
                    ),
                )
            }
            attempt => attempt,
        }
    }

    /// Renews claims in records: claims that are not exclusive, and exclusive claims that
    /// [`Dialect::renew`] did not find. Returns the results in the order of `claims`.
    pub(super) async fn renew_in_records(
        &self,
        claims: &[&Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut order: Vec<usize> = (0..claims.len()).collect();
        order.sort_by_key(|&index| claims[index].key());
        let same_key = |&one: &usize, &other: &usize| claims[one].key() == claims[other].key();
        let index_groups: Vec<Vec<usize>> =
            order.chunk_by(same_key).map(<[usize]>::to_vec).collect();
        let renewals = index_groups.into_iter().map(|indices| async move {
            let of_one_key: Vec<&Claim> = indices.iter().map(|&index| claims[index]).collect();
            let renewed = self.renew_in_record(&of_one_key).await;
            (indices, renewed)
        });
        let mut renewals = stream::iter(renewals).buffer_unordered(RENEWALS_CONCURRENT);
        let mut answers = vec![Ok(Renewal::Gone); claims.len()];
        while let Some((indices, renewed)) = renewals.next().await {
            for (n, index) in indices.into_iter().enumerate() {
                answers[index] = match &renewed {
                    Ok(renewed) => Ok(renewed[n]),
                    Err(error) => Err(error.clone()),
                };
            }
        }
        answers
    }

    /// Renews claims of one key.
    async fn renew_in_record(&self, claims: &[&Claim]) -> Result<Vec<Renewal>, BackendError> {
        let key = claims[0].key();
        let shortest = claims.iter().map(|claim| claim.lease()).min().unwrap_or_default();
        let mut pauses = LOCKED_ROW_PAUSES.into_iter();
        let mut previous_columns: Option<Columns> = None;
        for _ in 0..WRITE_ATTEMPTS_MAX {
            let stored = self.read_row(key, ConnectionUse::Renew(shortest)).await?;
            if previous_columns.is_some() && previous_columns == stored.columns {
                // The write skipped the row, because another transaction has locked it.
                sleep(pauses.next().ok_or_else(|| error::row_locked(D::STORE))?).await;
            } else {
                pauses = LOCKED_ROW_PAUSES.into_iter();
            }
            let before = stored.record::<D>()?;
            let mut record = before.clone();
            let renew = |claim: &&Claim| match record.renew(claim, stored.now()) {
                Renewal::Renewed(left) => Renewal::Renewed(left.min(claim.lease())),
                Renewal::Gone => Renewal::Gone,
            };
            let renewed: Vec<Renewal> = claims.iter().map(renew).collect();
            if record == before {
                if renewed.contains(&Renewal::Gone) {
                    // A read-only server that lags may lack the row of a live grant.
                    self.store.check_writable(ConnectionUse::Renew(shortest)).await?;
                }
                return Ok(renewed);
            }
            let change =
                Change { lock_wait: RowLockWait::SkipLocked, ..Change::without_grant(record) };
            let connection_use = ConnectionUse::Renew(shortest);
            if self.write_row(key, &stored, &change, connection_use).await?.is_some() {
                return Ok(renewed);
            }
            previous_columns = stored.columns;
        }
        Err(self.conflict_error(ConnectionUse::Renew(shortest)).await)
    }

    /// Removes the entry of `claim`.
    pub(super) async fn release_in_record(&self, claim: &Claim) -> Result<Release, BackendError> {
        let row = self.row_id(claim.key());
        if self.rows_with_single_entry.remove(row)
            && self.release_single_entry(claim).await? == Release::Freed
        {
            self.recently_released.insert(row);
            self.wakeups.on_release(claim.key());
            return Ok(Release::Freed);
        }
        for round in 0..WRITE_ATTEMPTS_MAX {
            let stored = self.read_row(claim.key(), ConnectionUse::Release).await?;
            let mut record = stored.record::<D>()?;
            let Some(entry) = record.release(claim) else {
                return self.store.not_held_if_writable(Release::NotHeld).await;
            };
            let newest_token = stored.columns.as_ref().map(|row| row.token);
            let is_newest = entry.token.map(i64::from) == newest_token;
            let change = Change {
                block_used: is_newest.then(|| i64::from(claim.token_block())),
                wakes_waiters: true,
                allows_async_commit: true,
                ..Change::without_grant(record)
            };
            let written = self.write_row(claim.key(), &stored, &change, ConnectionUse::Release);
            if let Some(written) = written.await? {
                if written.claim.is_none() {
                    self.recently_released.insert(self.row_id(claim.key()));
                }
                return Ok(LockRecord::release_response(Some(&entry), stored.now()));
            }
            if round == 0 {
                // On a replica, no round would write anything.
                let checked = self.store.check_writable(ConnectionUse::Release).await;
                checked.map_err(BackendError::as_refused)?;
            }
        }
        Err(self.conflict_error(ConnectionUse::Release).await)
    }

    /// Ends the grant of `claim` if its record has no other entry.
    async fn release_single_entry(&self, claim: &Claim) -> Result<Release, BackendError> {
        let mut values =
            vec![self.id_value(claim.key()), Value::entry_prefix(claim), Value::token_block(claim)];
        values.extend(self.wakeups.notification(self.row_id(claim.key())));
        let statement =
            Statement::new(&self.statements().release_single_entry, values).with_at_most_one_row();
        Ok(self.store.release(&statement).await?.release_outcome())
    }

    /// Ends all grants in the record of `key`. Returns `None` if the key has no valid record.
    pub(super) async fn force_release_in_record(
        &self,
        key: &Key,
    ) -> Result<Option<Release>, BackendError> {
        for _ in 0..WRITE_ATTEMPTS_MAX {
            let stored = self.read_row(key, ConnectionUse::Release).await?;
            if !stored.columns.as_ref().is_some_and(Columns::has_record) {
                return Ok(None);
            }
            let Ok(mut record) = stored.record::<D>() else { return Ok(None) };
            if record.force_release(stored.now()) == Release::NotHeld {
                // The uncommitted row of a transaction that holds the key is not visible here.
                if D::is_locked_by_transaction(self, key).await? {
                    return Err(error::held_by_caller_transaction(D::STORE));
                }
                return Ok(Some(Release::NotHeld));
            }
            let change = Change { wakes_waiters: true, ..Change::without_grant(record) };
            if self.write_row(key, &stored, &change, ConnectionUse::Release).await?.is_some() {
                return Ok(Some(Release::Freed));
            }
        }
        Err(self.conflict_error(ConnectionUse::Release).await)
    }

    /// Returns whether `claim` has a grant, or a place in the queue, that has not expired.
    #[cfg(feature = "mysql")]
    pub(crate) async fn has_entry(
        &self,
        claim: &Claim,
        connection_use: ConnectionUse,
    ) -> Result<bool, BackendError> {
        let record = self.read_row(claim.key(), connection_use).await?.record::<D>()?;
        Ok(record.entries().iter().any(|entry| entry.id == claim.id()))
    }

    async fn read_row(
        &self,
        key: &Key,
        connection_use: ConnectionUse,
    ) -> Result<StoredRow, BackendError> {
        let statement = Statement::new(&self.statements().read_row, [self.id_value(key)]);
        let rows = self.store.client.query(connection_use, &statement).await?;
        let row = rows.first().ok_or_else(|| corrupt::<D>("the meta table has no row"))?;
        StoredRow::parse::<D>(row)
    }

    /// Writes `change` if the row is still equal to `stored`. Returns the written columns, or
    /// `None` if no row was written: the row has changed, or a renewal skipped it because it was
    /// locked.
    async fn write_row(
        &self,
        key: &Key,
        stored: &StoredRow,
        change: &Change,
        connection_use: ConnectionUse,
    ) -> Result<Option<Columns>, BackendError> {
        let columns = stored.after::<D>(change)?;
        let statements = self.statements();
        let mut values = vec![
            self.id_value(key),
            Value::MaybeBytes(columns.claim.clone()),
            Value::Number(columns.token),
            Value::Number(columns.token_block),
            Value::MaybeBytes(columns.label.clone()),
            Value::Number(columns.since),
            Value::Number(columns.until),
        ];
        let text = match &stored.columns {
            None => {
                values.extend([self.namespace_value(), Value::key(key)]);
                &statements.insert_record
            }
            Some(seen) => {
                values.extend([
                    Value::MaybeBytes(seen.claim.clone()),
                    Value::Number(seen.token),
                    Value::Number(seen.since),
                    Value::Number(seen.until),
                    Value::Number(i64::from(change.wakes_waiters)),
                    Value::Number(i64::from(change.allows_async_commit)),
                ]);
                values.extend(self.wakeups.notification(self.row_id(key)));
                match change.lock_wait {
                    RowLockWait::IncludingFences => &statements.write_grant,
                    RowLockWait::SkipLocked => &statements.write_renewal,
                    RowLockWait::ExceptFences => &statements.write_record,
                }
            }
        };
        let statement = Statement::new(text, values).with_at_most_one_row();
        let answer = self.store.client.send(connection_use, Resend::Never, &statement).await?;
        let is_written = answer.changed_a_row();
        if is_written && change.wakes_waiters {
            self.wakeups.on_release(key);
        }
        Ok(is_written.then_some(columns))
    }

    /// Returns the error of a request that other clients' changes prevented too often. The request
    /// has changed nothing. Checks the meta row first, and returns the error of a failed check
    /// instead.
    async fn conflict_error(&self, connection_use: ConnectionUse) -> BackendError {
        if let Err(error) = self.store.check_writable(connection_use).await {
            return error.as_refused();
        }
        let message = format!(
            "{}: other clients changed the key during each of {WRITE_ATTEMPTS_MAX} attempts; retry",
            D::STORE
        );
        BackendError::transient(message).as_refused()
    }
}

impl Change {
    /// Creates a change that grants nothing.
    fn without_grant(record: LockRecord) -> Self {
        Self {
            record,
            grant: None,
            block_used: None,
            lock_wait: RowLockWait::ExceptFences,
            wakes_waiters: false,
            allows_async_commit: false,
        }
    }
}

/// Returns the holders in a row of [`HolderStatements`](super::HolderStatements).
pub(super) fn decode_holders<D: Dialect>(
    key: Key,
    row: &D::Row,
) -> Result<Vec<Holder>, BackendError> {
    if bytes::<D>(row, 5)?.as_deref() != Some(&RECORD_MARKER) {
        return Ok(vec![decode_holder::<D>(Holder::new(key), row, 1)?]);
    }
    let now = u64::try_from(number::<D>(row, 6)?).unwrap_or(0);
    Ok(parse_record::<D>(bytes::<D>(row, 2)?.as_deref())?.holders(&key, now))
}

/// Returns whether a new grant of `claim` joins readers. Such a grant need not wait for open fenced
/// transactions. The first reader's grant has waited for the transactions of earlier holders, so
/// the open ones all belong to readers.
fn joins_readers(claim: &Claim, before: &LockRecord) -> bool {
    let is_reader = |entry: &RecordEntry| {
        entry.is_granted() && matches!(entry.mode, ClaimMode::Shared | ClaimMode::Upgradable)
    };
    claim.mode() == ClaimMode::Shared
        && !claim.is_conversion()
        && before.entries().iter().any(is_reader)
}

/// The maximum number of attempts if other clients change the row between a read and a write.
const WRITE_ATTEMPTS_MAX: u32 = 50;

/// The pause before the next attempt of a claim whose place in the queue was not written, because
/// another transaction had locked the row.
const QUEUE_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The pauses between attempts to renew claims in a row that another transaction has locked. A
/// change by another client usually locks the row for less than their sum.
const LOCKED_ROW_PAUSES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(16),
    Duration::from_millis(64),
];

/// The number of keys whose records are renewed at the same time.
const RENEWALS_CONCURRENT: usize = 4;
