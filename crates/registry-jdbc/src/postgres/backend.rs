//! The lease-based backend: the operations on a lock's row. The statements are in `sql`. Only the
//! server's clock is used.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Claim, FencingToken, Finding, Grant, Holder, Key, Release,
    Renewal, WakeCheck,
};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Postgres, Row};

use super::client::PgClient;
use super::config::PostgresConfig;
use super::diagnose::check_server;
use super::error::{self, corrupt, explain};
use super::listener::{NotificationChannel, PgReleaseListener};
use super::open::{self, OpenedPgStore};
use super::purge;
use super::renew::{CLAIMS_MAX, claim_ids, leases, renew_rows};
use super::sql::{PgStatementText, PgStatements};
use super::statement::{BoundStatement, PgParam};
use crate::server::{ConnectionUse, LeaseStore, RecentRows, Resend, RowId, TransactionStore};

/// The leases of one namespace.
pub(crate) struct PgRows {
    pub(super) config: PostgresConfig,
    pub(super) store: String,
    pub(super) texts: PgStatements,
    pub(super) client: PgClient,
    pub(super) listener: Option<PgReleaseListener>,
    channel: NotificationChannel,
    recently_released: RecentRows,
    /// Rows for which a wait ended without a notification. Their next attempt probably finds them
    /// held, so it reads the row first.
    not_notified: RecentRows,
}

impl PgRows {
    pub(super) async fn open(config: PostgresConfig) -> Result<Self, BackendError> {
        let OpenedPgStore { tables, store } = open::open(&config).await?;
        let channel = NotificationChannel::new(RowId::namespace_hash(&config.namespace));
        let listener =
            config.listener_options().map(|server| PgReleaseListener::new(server, channel.clone()));
        Ok(Self {
            texts: PgStatements::new(&tables),
            client: PgClient::new(&config),
            config,
            store,
            listener,
            channel,
            recently_released: RecentRows::default(),
            not_notified: RecentRows::default(),
        })
    }

    /// Returns the name of this namespace's notification channel.
    pub(super) fn channel(&self) -> &str {
        self.channel.name()
    }

    /// Returns when the lock may have been released after `position`. Never returns if there is no
    /// listener.
    pub(super) async fn wait_for_release(&self, key: &Key, position: u64) {
        match &self.listener {
            Some(listener) => listener.wait(self.row_id(key).notification_id(), position).await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn row_id(&self, key: &Key) -> RowId {
        RowId::new(&self.config.namespace, key)
    }

    /// Finds the grant as it was issued, in the caller's transaction, by the statement of its kind.
    pub(super) async fn fence_by(
        &self,
        text: &PgStatementText,
        connection: &mut PgConnection,
        claim: &Claim,
        token: FencingToken,
    ) -> Result<Option<bool>, sqlx::Error> {
        let id = self.row_id(claim.key());
        let token = PgParam::Number(i64::from(token));
        let statement = BoundStatement::new(text, [bytes(id.bytes()), claim_id(claim), token]);
        statement.find_in(connection, self.client.is_prepared()).await
    }

    /// Grants the key if it is free, or returns its holder. Returns `None` if another client
    /// acquired or released the key between the statements.
    async fn acquire(&self, claim: &Claim, mark: u64) -> Result<Option<Attempt>, BackendError> {
        let id = self.row_id(claim.key());
        let block = PgParam::Number(i64::from(claim.token_block()));
        let label = PgParam::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec()));
        let lease = PgParam::Number(micros(claim.lease()));
        let statement = if self.recently_released.remove(id) {
            let values = [bytes(id.bytes()), claim_id(claim), block, label, lease];
            BoundStatement::new(&self.texts.reacquire, values)
        } else {
            let namespace = bytes(self.config.namespace.as_bytes());
            let key = bytes(claim.key().as_str().as_bytes());
            let values = [bytes(id.bytes()), namespace, key, claim_id(claim), block, label, lease];
            BoundStatement::new(&self.texts.acquire, values)
        };
        let statement = statement.at_most_one();
        // Only the engine may retry: the first request may be executed after the release that
        // follows the second one.
        let rows = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Never).await?;
        if let Some(row) = rows.first() {
            let grant = Grant::new(fencing_token(column(row, 0)?)?, claim.lease());
            return Ok(Some(Attempt::Granted(grant)));
        }
        // The holder may be this claim itself, granted by an attempt whose answer was lost.
        self.find_holder(claim, mark).await.map_err(BackendError::as_unknown)
    }

    async fn find_holder(&self, claim: &Claim, mark: u64) -> Result<Option<Attempt>, BackendError> {
        let rows = self.fetch_grant(self.row_id(claim.key())).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let holder = decode_holder(Holder::new(claim.key().clone()), row, 1)?;
        let remaining = holder.lease_left.unwrap_or_default();
        if column::<Vec<u8>>(row, 0)? == claim.id().to_bytes() {
            let token = fencing_token(column(row, 1)?)?;
            return Ok(Some(Attempt::Granted(Grant::new(token, remaining.min(claim.lease())))));
        }
        Ok(Some(Attempt::Busy(
            Busy::new().with_retry_after(remaining).with_mark(mark).with_holder(holder),
        )))
    }

    async fn fetch_grant(&self, id: RowId) -> Result<Vec<PgRow>, BackendError> {
        let statement = BoundStatement::new(&self.texts.current_grant, [bytes(id.bytes())]);
        self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await
    }

    /// Returns the parameters of a release notification: channel, message, presence lock.
    pub(super) fn notification_params(&self, id: RowId) -> [PgParam; 3] {
        let presence_lock = PgParam::Number(self.channel.presence_lock(id.notification_id()));
        [PgParam::Identifier(self.channel().to_owned()), Self::message(id), presence_lock]
    }

    /// Returns the message that wakes the waiting callers of the lock.
    pub(super) fn message(id: RowId) -> PgParam {
        bytes(&id.notification_id())
    }

    /// Returns whether a transaction has marked itself as [holding this lock](crate::LockIn).
    pub(super) async fn is_locked_by_transaction(&self, key: &Key) -> Result<bool, BackendError> {
        let mark = PgParam::Number(self.row_id(key).transaction_mark());
        let statement = BoundStatement::new(&self.texts.locked_in, [mark]);
        let rows = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
        let row = one_row(&rows)?;
        column(row, 0)
    }
}

/// Checks that the row of the table `meta` exists.
pub(super) async fn check_meta(
    client: &PgClient,
    texts: &PgStatements,
) -> Result<(), BackendError> {
    let statement = BoundStatement::new(&texts.meta, []);
    let rows = client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
    if rows.is_empty() {
        return Err(corrupt("the meta table has no row").as_refused());
    }
    Ok(())
}

/// Reads the row of the table `meta` in the caller's transaction.
pub(super) async fn transaction_store(
    texts: &PgStatements,
    store: &str,
    connection: &mut PgConnection,
) -> Result<TransactionStore, sqlx::Error> {
    let rows = sqlx::query(texts.meta.safe()).persistent(false).fetch_all(connection).await?;
    let found: Option<String> = rows.first().and_then(|row| row.try_get(1).ok());
    if found.as_deref() != Some(store) {
        return Ok(TransactionStore::Other);
    }
    let has_old_snapshot = rows.first().is_some_and(|row| row.try_get(2).unwrap_or(false));
    Ok(TransactionStore::Same { has_old_snapshot })
}

impl LeaseStore for PgRows {
    type Database = Postgres;

    const RENEWALS_MAX: usize = CLAIMS_MAX;
    const RENEWS_ONE_LEASE: bool = false;

    fn namespace(&self) -> &str {
        &self.config.namespace
    }

    fn has_wakes(&self) -> bool {
        self.listener.is_some()
    }

    fn position(&self) -> u64 {
        self.listener.as_ref().map_or(0, PgReleaseListener::position)
    }

    async fn attempt(&self, claim: &Claim, position: u64) -> Result<Option<Attempt>, BackendError> {
        if self.not_notified.remove(self.row_id(claim.key()))
            && let Some(holder) = self.find_holder(claim, position).await?
        {
            return Ok(Some(holder));
        }
        match self.acquire(claim, position).await {
            Err(error)
                if error::is_row_lock_error(&error)
                    && self.is_locked_by_transaction(claim.key()).await? =>
            {
                Ok(Some(Attempt::Busy(Busy::new().with_mark(position))))
            }
            attempt => attempt,
        }
    }

    async fn check_meta(&self) -> Result<(), BackendError> {
        check_meta(&self.client, &self.texts).await
    }

    async fn renew_chunk(
        &self,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let ids = claims.iter().map(|claim| self.row_id(claim.key()).bytes().to_vec());
        let values = [PgParam::ManyBytes(ids.collect()), claim_ids(claims), leases(claims)];
        renew_rows(&self.client, BoundStatement::new(&self.texts.renew, values), claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let id = self.row_id(claim.key());
        let [channel, message, presence_lock] = self.notification_params(id);
        let used = PgParam::Number(i64::from(claim.token_block()));
        let values = [bytes(id.bytes()), claim_id(claim), channel, message, presence_lock, used];
        let statement = BoundStatement::new(&self.texts.release, values).at_most_one();
        // A repeated release would return `NotHeld`. So the caller decides whether to repeat it.
        let rows = self.client.rows(ConnectionUse::Release, &statement, Resend::Never).await?;
        let released = release_outcome(&rows);
        if released == Release::Freed {
            self.recently_released.insert(id);
        }
        purge::maybe_purge(claim, &self.client, &self.texts, self.config.purge_after).await;
        Ok(released)
    }

    fn wake_check(&self) -> Option<Arc<dyn WakeCheck>> {
        self.listener.as_ref().map(PgReleaseListener::wake_check)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let id = self.row_id(claim.key());
        // The row stays remembered if this future is dropped before it returns.
        self.not_notified.insert(id);
        self.wait_for_release(claim.key(), busy.mark).await;
        self.not_notified.remove(id);
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        self.find_any_holder(key).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.holders().await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.force_release_key(key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = check_server(&self.client, &self.config).await?;
        findings.extend(self.check_listener().await);
        Ok(findings)
    }

    async fn close(&self) {
        if let Some(listener) = &self.listener {
            listener.close();
        }
        self.client.close().await;
    }

    async fn fence(
        &self,
        connection: &mut PgConnection,
        claim: &Claim,
        token: FencingToken,
    ) -> Result<Option<bool>, sqlx::Error> {
        self.fence_by(&self.texts.fence, connection, claim, token).await
    }

    async fn transaction_store(
        &self,
        connection: &mut PgConnection,
    ) -> Result<TransactionStore, sqlx::Error> {
        transaction_store(&self.texts, &self.store, connection).await
    }
}

/// Reads token, label and times from four adjacent columns, beginning at `first`.
pub(super) fn decode_holder(
    holder: Holder,
    row: &PgRow,
    first: usize,
) -> Result<Holder, BackendError> {
    let label: Option<Vec<u8>> = column(row, first + 1)?;
    let label = label.map(|label| String::from_utf8_lossy(&label).into_owned());
    let (held_for, remaining): (i64, Option<i64>) =
        (column(row, first + 2)?, column(row, first + 3)?);
    Ok(holder
        .with_label(label)
        .with_token(Some(fencing_token(column(row, first)?)?))
        .with_times(Some(from_micros(held_for)), remaining.map(from_micros)))
}

/// Returns the row of a statement that always returns one.
pub(super) fn one_row(rows: &[PgRow]) -> Result<&PgRow, BackendError> {
    rows.first().ok_or_else(|| corrupt("a statement returned no row"))
}

pub(super) fn column<'r, T>(row: &'r PgRow, index: usize) -> Result<T, BackendError>
where
    T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
{
    row.try_get(index).map_err(explain)
}

pub(super) fn fencing_token(token: i64) -> Result<FencingToken, BackendError> {
    FencingToken::try_from(token).map_err(|_| corrupt("a row's token is negative"))
}

pub(super) fn claim_id(claim: &Claim) -> PgParam {
    bytes(&claim.id().to_bytes())
}

pub(super) fn bytes(bytes: &[u8]) -> PgParam {
    PgParam::Bytes(bytes.to_vec())
}

/// Converts to the unit of the tables. Limits endless leases, so that a sum with the clock cannot
/// overflow.
pub(super) fn micros(from_micros: Duration) -> i64 {
    i64::try_from(from_micros.as_micros()).map_or(MICROS_MAX, |micros| micros.min(MICROS_MAX))
}

/// A thousand years.
const MICROS_MAX: i64 = 1000 * 366 * 24 * 60 * 60 * 1_000_000;

pub(super) fn from_micros(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

pub(super) fn release_outcome(rows: &[PgRow]) -> Release {
    if rows.is_empty() { Release::NotHeld } else { Release::Freed }
}

impl fmt::Debug for PgRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresBackend").field("config", &self.config).finish_non_exhaustive()
    }
}
