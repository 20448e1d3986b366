//! Leases in the native tables: the operations on a lock's row. All times are the server's. The
//! module [`records`](super::records) handles rows with several claims or with a queue.

use std::fmt;

use registry_core::{
    Attempt, BackendError, Busy, Claim, ClaimMode, FencingToken, Finding, Grant, Holder, Key,
    Release, Renewal,
};

use super::dialect::{Dialect, LeaseStore, WakeupSource, attempt_from_existing_grant, decode_key};
use super::records::{self, RECORD_MARKER};
use super::statement::{bytes, decode_holder, fencing_token, number};
use super::store::SqlStore;
use super::values::ValueStatements;
use super::waiter_store::WaiterStatements;
use super::{ConnectionUse, RecentRows, Resend, RowId, Statement, StatementText, Value};

/// The statements that all kinds of servers have. Parameters have the same numbers on all servers.
/// Notification parameters differ, so they come last.
#[derive(Debug, Clone)]
pub(crate) struct RowStatements {
    pub(crate) meta: StatementText,
    pub(crate) acquire: StatementText,
    /// As `acquire`, for a row that this process has recently released.
    pub(crate) reacquire: StatementText,
    pub(crate) current_grant: StatementText,
    pub(crate) holders: HolderStatements,
    /// The same queries for leases only, for servers without named locks. Such a server cannot
    /// report which connection has a row locked for a claim.
    pub(crate) lease_holders_only: Option<HolderStatements>,
    pub(crate) release: StatementText,
    pub(crate) fence: StatementText,
    /// As `fence`, for a grant of a key that several claims may hold. Fences of these claims do not
    /// wait for each other.
    pub(crate) fence_shared_grant: StatementText,
    pub(crate) fence_session_grant: StatementText,
    pub(crate) read_row: StatementText,
    /// Creates the row of a key, if it is missing.
    pub(crate) insert_record: StatementText,
    /// Writes a row with a record, if it is unchanged.
    pub(crate) write_record: StatementText,
    /// As `write_record`, for renewals. Skips a row that another transaction has locked, so that
    /// this row does not delay other renewals.
    pub(crate) write_renewal: StatementText,
    /// As `write_record`, but first waits for all open transactions that fence the key.
    pub(crate) write_grant: StatementText,
    /// As `reacquire`, for a claim that is then alone in a record.
    pub(crate) acquire_released_row: StatementText,
    /// As `release`, for a claim that is alone in a record.
    pub(crate) release_single_entry: StatementText,
    pub(crate) values: ValueStatements,
    pub(crate) waiters: WaiterStatements,
}

/// Queries for holders.
#[derive(Debug, Clone)]
pub(crate) struct HolderStatements {
    pub(crate) of_key: StatementText,
    pub(crate) of_namespace: StatementText,
}

impl HolderStatements {
    fn select(&self, key: Option<&Key>) -> &StatementText {
        if key.is_some() { &self.of_key } else { &self.of_namespace }
    }
}

/// The leases of one namespace, in the native tables.
pub(crate) struct LeaseTable<D: Dialect> {
    pub(crate) store: SqlStore<D>,
    pub(crate) wakeups: D::Wakeups,
    pub(super) recently_released: RecentRows,
    /// Rows whose last attempt in [`records`](super::records) was busy. The next exclusive attempt
    /// also uses `records`.
    pub(super) rows_busy_in_records: RecentRows,
    /// Rows with a record whose only entry was the grant of a claim of this process. The release of
    /// this claim probably finds no other entry.
    pub(super) rows_with_single_entry: RecentRows,
    /// Rows with a wait that no wake-up has ended. The next attempt probably finds such a row held,
    /// so it reads the row before it tries to write.
    rows_waited_without_wakeup: RecentRows,
}

impl<D: Dialect> LeaseTable<D> {
    pub(super) async fn open(config: D::Config) -> Result<Self, BackendError> {
        let store = SqlStore::<D>::open(config).await?;
        let wakeups = D::wakeups(&store, &store.settings().namespace);
        Ok(Self {
            store,
            wakeups,
            recently_released: RecentRows::default(),
            rows_busy_in_records: RecentRows::default(),
            rows_with_single_entry: RecentRows::default(),
            rows_waited_without_wakeup: RecentRows::default(),
        })
    }

    pub(super) fn statements(&self) -> &RowStatements {
        self.store.statements.as_ref().as_ref()
    }

    pub(crate) fn row_id(&self, key: &Key) -> RowId {
        RowId::new(&self.store.settings().namespace, key)
    }

    pub(crate) fn id_value(&self, key: &Key) -> Value {
        Value::bytes(self.row_id(key).bytes())
    }

    pub(crate) fn namespace_value(&self) -> Value {
        Value::bytes(self.store.settings().namespace.as_bytes())
    }

    /// Returns the fence statement for a session grant, which ends with its connection.
    pub(super) fn fence_session_grant(&self, claim: &Claim, token: FencingToken) -> Statement<'_> {
        self.fence_statement(&self.statements().fence_session_grant, claim, token)
    }

    fn fence_statement<'a>(
        &self,
        text: &'a StatementText,
        claim: &Claim,
        token: FencingToken,
    ) -> Statement<'a> {
        let values = [self.id_value(claim.key()), Value::claim(claim), Value::token(token)];
        Statement::new(text, values)
    }

    /// Grants the key if it is free, or returns its holder. Returns `None` if another client
    /// acquired or released the key between the statements.
    async fn acquire(
        &self,
        claim: &Claim,
        notification_position: u64,
    ) -> Result<Option<Attempt>, BackendError> {
        let id = self.id_value(claim.key());
        let [token_block, label, lease] =
            [Value::token_block(claim), Value::label(claim), Value::lease(claim)];
        let statement = if self.recently_released.remove(self.row_id(claim.key())) {
            let values = [id, Value::claim(claim), token_block, label, lease];
            Statement::new(&self.statements().reacquire, values)
        } else {
            let (namespace, key) = (self.namespace_value(), Value::key(claim.key()));
            let values = [id, namespace, key, Value::claim(claim), token_block, label, lease];
            Statement::new(&self.statements().acquire, values)
        };
        let statement = statement.with_at_most_one_row();
        // Never resent here; only the engine retries. Otherwise, the server could execute the first
        // request late, after the second one was granted and released.
        let answer =
            self.store.client.send(ConnectionUse::Acquire, Resend::Never, &statement).await?;
        if let Some(token) = D::granted_token(&answer)? {
            let grant = Grant::new(fencing_token::<D>(token)?, claim.lease());
            return Ok(Some(Attempt::Granted(grant)));
        }
        // The holder may be this claim itself, if the answer to an earlier attempt was lost.
        self.attempt_from_current_row(claim, notification_position)
            .await
            .map_err(BackendError::as_unknown)
    }

    /// Returns the result of an attempt of `claim` on a row that is probably held. Returns `None`
    /// if the key is free.
    pub(crate) async fn attempt_from_current_row(
        &self,
        claim: &Claim,
        notification_position: u64,
    ) -> Result<Option<Attempt>, BackendError> {
        let rows = self.current_grant(claim.key(), ConnectionUse::Acquire).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let holder_id = bytes::<D>(row, 0)?;
        if holder_id.as_deref() == Some(&RECORD_MARKER) {
            return Box::pin(self.attempt_on_record(claim, notification_position)).await.map(Some);
        }
        let holder = decode_holder::<D>(Holder::new(claim.key().clone()), row, 1)?;
        let is_own = holder_id.as_deref() == Some(&claim.id().to_bytes());
        let version = self
            .wakeups
            .busy_version(notification_position, fencing_token::<D>(number::<D>(row, 1)?)?);
        match attempt_from_existing_grant::<D>(claim, is_own, holder, version)? {
            Attempt::Busy(_) if claim.joins_queue() => {
                Box::pin(self.attempt_on_record(claim, notification_position)).await.map(Some)
            }
            // With a wake check, the engine polls less often. A busy response from a record has
            // none: no notification is sent when an entry expires, so the engine must poll at its
            // usual interval.
            Attempt::Busy(busy) => Ok(Some(Attempt::Busy(match self.wakeups.wake_check() {
                Some(check) => busy.with_wake_check(check),
                None => busy,
            }))),
            attempt => Ok(Some(attempt)),
        }
    }

    /// Makes one attempt. Chooses the statements by the recent uses of the row.
    async fn attempt_once(
        &self,
        claim: &Claim,
        notification_position: u64,
    ) -> Result<Option<Attempt>, BackendError> {
        let row = self.row_id(claim.key());
        let is_exclusive = is_exclusive_grant(claim);
        if !is_exclusive && !claim.is_conversion() && self.recently_released.remove(row) {
            if let Some(grant) = Box::pin(self.acquire_released_row(claim)).await? {
                return Ok(Some(Attempt::Granted(grant)));
            }
            let attempt = Box::pin(self.attempt_on_record(claim, notification_position)).await;
            return attempt.map(Some).map_err(BackendError::as_unknown);
        }
        if !is_exclusive || self.rows_busy_in_records.remove(row) {
            // Boxed, because the future is large, and most attempts need no record.
            return Box::pin(self.attempt_on_record(claim, notification_position)).await.map(Some);
        }
        if self.rows_waited_without_wakeup.remove(row)
            && let Some(attempt) =
                self.attempt_from_current_row(claim, notification_position).await?
        {
            return Ok(Some(attempt));
        }
        self.acquire(claim, notification_position).await
    }

    /// Returns claim, token, label and times of the key's grant.
    pub(crate) async fn current_grant(
        &self,
        key: &Key,
        connection_use: ConnectionUse,
    ) -> Result<Vec<D::Row>, BackendError> {
        let statement = Statement::new(&self.statements().current_grant, [self.id_value(key)]);
        self.store.client.query(connection_use, &statement).await
    }

    /// Ends the grant of a claim that is alone in its row.
    async fn release_exclusive(&self, claim: &Claim) -> Result<Release, BackendError> {
        let id = self.row_id(claim.key());
        let mut values =
            vec![self.id_value(claim.key()), Value::claim(claim), Value::token_block(claim)];
        values.extend(self.wakeups.notification(id));
        let statement = Statement::new(&self.statements().release, values).with_at_most_one_row();
        let released = self.store.release(&statement).await?.release_outcome();
        if released == Release::Freed {
            self.recently_released.insert(id);
        }
        self.wakeups.on_release(claim.key());
        Ok(released)
    }

    /// Returns the holder of one key, or the holders of the namespace. If the server cannot report
    /// the holders of row locks, the query returns only leases.
    pub(crate) async fn query_holders(
        &self,
        key: Option<&Key>,
    ) -> Result<Vec<D::Row>, BackendError> {
        let value = key.map_or_else(|| self.namespace_value(), |key| self.id_value(key));
        let RowStatements { holders, lease_holders_only, .. } = self.statements();
        match (self.store.query(holders.select(key), [value.clone()]).await, lease_holders_only) {
            (Err(error), Some(lease_holders)) if D::lacks_named_locks(&error) => {
                self.store.query(lease_holders.select(key), [value]).await
            }
            (holders, _) => holders,
        }
    }
}

impl<D: Dialect> LeaseStore for LeaseTable<D> {
    type Database = D;

    fn store(&self) -> &SqlStore<D> {
        &self.store
    }

    fn wakeups(&self) -> &D::Wakeups {
        &self.wakeups
    }

    fn namespace(&self) -> &str {
        &self.store.settings().namespace
    }

    async fn attempt(
        &self,
        claim: &Claim,
        notification_position: u64,
    ) -> Result<Option<Attempt>, BackendError> {
        match self.attempt_once(claim, notification_position).await {
            Err(error) if D::is_row_lock_error(&error) => {
                D::attempt_on_locked_row(self, claim, notification_position, error).await
            }
            attempt => attempt,
        }
    }

    async fn renew_chunk(
        &self,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let is_exclusive = |claim: &Claim| claim.mode() == ClaimMode::Exclusive;
        let exclusive: Vec<&Claim> =
            claims.iter().copied().filter(|claim| is_exclusive(claim)).collect();
        let mut renewed = Vec::new();
        if !exclusive.is_empty() {
            renewed = D::renew(self, &exclusive).await?;
        }
        let mut renewed = renewed.into_iter();
        let mut answers: Vec<_> = claims
            .iter()
            .map(|claim| if is_exclusive(claim) { renewed.next() } else { None })
            .map(|answer| answer.unwrap_or(Ok(Renewal::Gone)))
            .collect();
        // An exclusive claim that the statement did not find may be in a record.
        let gone = |index: &usize| matches!(answers[*index], Ok(Renewal::Gone));
        let missing: Vec<usize> = (0..claims.len()).filter(gone).collect();
        let rest: Vec<&Claim> = missing.iter().map(|&index| claims[index]).collect();
        let found = Box::pin(self.renew_in_records(&rest)).await;
        for (index, answer) in missing.into_iter().zip(found) {
            answers[index] = answer;
        }
        Ok(answers)
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        if claim.is_fenced() {
            D::wait_for_fence(self, claim).await?;
        }
        let mut released = Release::NotHeld;
        if claim.mode() == ClaimMode::Exclusive {
            released = self.release_exclusive(claim).await?;
        }
        if released == Release::NotHeld {
            released = Box::pin(self.release_in_record(claim)).await?;
        }
        self.store.maybe_purge(claim.id()).await;
        Ok(released)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let id = self.row_id(claim.key());
        // If this future is dropped before a wake-up, the row stays in the set.
        self.rows_waited_without_wakeup.insert(id);
        self.wakeups.wait(id, busy.seen_version).await;
        self.rows_waited_without_wakeup.remove(id);
    }

    /// Returns the holders of `key`. For a lock in a caller's transaction, the returned `Holder`
    /// contains only the key.
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        // Between the two queries, the key may get another holder or become free.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            if let Some(row) = self.query_holders(Some(key)).await?.first() {
                return records::decode_holders::<D>(key.clone(), row);
            }
            if !D::is_locked_by_transaction(self, key).await? {
                return Ok(Vec::new());
            }
        }
        Ok(vec![Holder::new(key.clone())])
    }

    /// Returns the holders of the namespace. Locks in callers' transactions are not listed: other
    /// connections do not see their uncommitted rows.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let rows = self.query_holders(None).await?;
        let mut holders = Vec::with_capacity(rows.len());
        for row in &rows {
            let key = bytes::<D>(row, 0)?.and_then(|key| String::from_utf8(key).ok());
            holders.extend(records::decode_holders::<D>(decode_key::<D>(key.as_deref())?, row)?);
        }
        Ok(holders)
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        match Box::pin(self.force_release_in_record(key)).await? {
            Some(released) => Ok(released),
            None => self.store.not_held_if_writable(D::force_release(self, key).await?).await,
        }
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = D::diagnose(&self.store).await?;
        findings.extend(D::diagnose_wakeups(self).await);
        Ok(findings)
    }

    fn fence(&self, claim: &Claim, token: FencingToken) -> Statement<'_> {
        let statements = self.statements();
        let text = match claim.mode() {
            ClaimMode::Exclusive => &statements.fence,
            _ => &statements.fence_shared_grant,
        };
        let mut statement = self.fence_statement(text, claim, token);
        statement.values.push(Value::entry_prefix(claim));
        statement
    }
}

/// Returns whether `claim` requests a new exclusive grant, not a conversion.
fn is_exclusive_grant(claim: &Claim) -> bool {
    claim.mode() == ClaimMode::Exclusive && !claim.is_conversion()
}

impl<D: Dialect> fmt::Debug for LeaseTable<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(D::BACKEND).field("config", &self.store.config).finish_non_exhaustive()
    }
}
