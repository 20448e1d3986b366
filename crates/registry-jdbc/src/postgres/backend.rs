//! The lease-based backend: the operations on a lock's row. The statements are in `sql`. Only the
//! server's clock is used.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, FencingToken, Finding, Grant, GuaranteeClass,
    Holder, Key, LockAdmin, LockBackend, Reach, Release, Renewal, RenewalPolicy,
};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, Row};

use super::client::{PgClient, Resend};
use super::config::PostgresConfig;
use super::error::{self, corrupt, explain};
use super::listener::{NotificationChannel, PgReleaseListener};
use super::open::{self, OpenedPgStore};
use super::renew::CLAIMS_MAX;
use super::sql::{self, PgStatementText, PgStatements};
use super::statement::{BoundStatement, PgParam};
use crate::server::{ConnectionUse, RecentRows, RowId};

/// Locks in a PostgreSQL database. They exclude all clients of that database.
///
/// A grant lasts until its lease ends on the server's clock. A token is that clock's time in
/// microseconds, or the key's last token plus one if that is larger. So tokens grow across release,
/// expiry, restart, failover and purge.
///
/// A grant or a renewal is on the server's disk when it is answered, if the server is configured so
/// (`synchronous_commit`, `fsync`). A release need not be. A release wakes the waiting callers of
/// all processes by `NOTIFY`.
///
/// A promoted standby has the grants that were replicated to it. With asynchronous replication the
/// last grants may be missing, and their keys are then free. Tokens grow even then, unless the
/// standby's clock is behind by more than the promotion took. So fenced writes stay safe.
///
/// The backend uses its own connections and never joins a transaction of the application. It opens
/// at most as many as [configured](PostgresConfig::with_connections), plus three, independent of
/// the number of held or awaited locks.
///
/// # Examples
/// ```no_run
/// use registry_core::{Attempt, Claim, Key, LockBackend, Release};
/// use registry_jdbc::{PostgresBackend, PostgresConfig};
/// # use std::time::Duration;
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let config = PostgresConfig::from_url("postgres://worker:secret@db.example/shop")?;
/// let backend = PostgresBackend::open(config).await?;
/// let claim = Claim::new(Key::new("orders/42")?, Duration::from_secs(30));
/// assert!(matches!(backend.try_acquire(&claim).await?, Attempt::Granted(_)));
/// assert_eq!(backend.release(&claim).await?, Release::Freed);
/// backend.close().await;
/// # Ok(())
/// # }
/// ```
pub struct PostgresBackend {
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

impl PostgresBackend {
    /// Connects to the server, and creates the tables if they are missing.
    ///
    /// # Errors
    /// [`BackendError`] with a message that says what to do:
    ///
    /// - `Misconfigured` for a missing database, missing or newer tables, an old server or an
    ///   invalid name.
    /// - `Denied` for a wrong user or password, or a missing right.
    /// - `Transient` if the server cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future may leave complete tables behind, never partial ones.
    pub async fn open(config: PostgresConfig) -> Result<Self, BackendError> {
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

    /// Returns the statements that create the tables, for installations where this program must not
    /// create them.
    #[must_use]
    pub const fn schema() -> &'static str {
        sql::SCHEMA
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.config.namespace
    }

    /// Returns whether the backend has a listener.
    pub(super) const fn has_listener(&self) -> bool {
        self.listener.is_some()
    }

    /// Returns the statements and the channel for the backends whose locks end with a connection.
    pub(super) fn session_statements(&self) -> SessionStatements {
        SessionStatements { texts: self.texts.clone(), channel: self.channel.clone() }
    }

    /// Returns the name of this namespace's notification channel.
    pub(super) fn channel(&self) -> &str {
        self.channel.name()
    }

    /// Returns the current position in the listener's notifications, for
    /// [`wait_for_release`](Self::wait_for_release).
    pub(super) fn position(&self) -> u64 {
        self.listener.as_ref().map_or(0, PgReleaseListener::position)
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

    /// Returns the statement that finds the claim's grant and keeps it from passing to another
    /// claim.
    pub(super) fn fence_statement(&self, claim: &Claim, token: FencingToken) -> BoundStatement<'_> {
        self.build_fence(&self.texts.fence, claim, token)
    }

    /// Returns the same for a grant that ends with a connection.
    pub(super) fn fence_held_statement(
        &self,
        claim: &Claim,
        token: FencingToken,
    ) -> BoundStatement<'_> {
        self.build_fence(&self.texts.fence_held, claim, token)
    }

    fn build_fence<'a>(
        &self,
        text: &'a PgStatementText,
        claim: &Claim,
        token: FencingToken,
    ) -> BoundStatement<'a> {
        let id = self.row_id(claim.key());
        let token = PgParam::Number(i64::from(token));
        BoundStatement::new(text, [bytes(id.bytes()), claim_id(claim), token])
    }

    /// Grants the key if it is free, or returns its holder. Returns `None` if another client
    /// acquired or released the key between the statements.
    async fn attempt(&self, claim: &Claim, mark: u64) -> Result<Option<Attempt>, BackendError> {
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
        let busy = Busy::new().with_retry_after(remaining).with_mark(mark).with_holder(holder);
        Ok(Some(Attempt::Busy(match &self.listener {
            Some(listener) => busy.with_wake_check(listener.wake_check()),
            None => busy,
        })))
    }

    async fn fetch_grant(&self, id: RowId) -> Result<Vec<PgRow>, BackendError> {
        let statement = BoundStatement::new(&self.texts.current_grant, [bytes(id.bytes())]);
        self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await
    }

    /// Returns the parameters of a release notification: channel, message, presence lock.
    pub(super) fn notification_params(&self, id: RowId) -> [PgParam; 3] {
        notification_params(&self.channel, id)
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
        let row = rows.first().ok_or_else(|| corrupt("a statement returned no row"))?;
        column(row, 0)
    }

    /// Checks that the row of the table `meta` exists, after several attempts without an answer.
    /// Without that row no lock is ever granted.
    async fn check_meta(&self) -> Result<(), BackendError> {
        let statement = BoundStatement::new(&self.texts.meta, []);
        let rows = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
        if rows.is_empty() {
            return Err(corrupt("the meta table has no row").as_refused());
        }
        Ok(())
    }
}

/// The statements and the channel of this backend, for
/// [`PostgresSessionBackend`](crate::PostgresSessionBackend) and
/// [`PostgresRowBackend`](crate::PostgresRowBackend).
pub(super) struct SessionStatements {
    pub(super) texts: PgStatements,
    channel: NotificationChannel,
}

impl SessionStatements {
    /// Returns the parameters of a release notification: channel, message, presence lock.
    pub(super) fn notification_params(&self, id: RowId) -> [PgParam; 3] {
        notification_params(&self.channel, id)
    }
}

fn notification_params(channel: &NotificationChannel, id: RowId) -> [PgParam; 3] {
    let presence_lock = PgParam::Number(channel.presence_lock(id.notification_id()));
    [PgParam::Identifier(channel.name().to_owned()), PostgresBackend::message(id), presence_lock]
}

#[async_trait]
impl LockBackend for PostgresBackend {
    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::new("postgres", GuaranteeClass::Durable, Reach::Network)
            .with_fencing()
            .with_labels()
            .with_inspect()
            .with_renewal(RenewalPolicy::new().with_batch_max(CLAIMS_MAX));
        if self.listener.is_some() { capabilities.with_wakes() } else { capabilities }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        // Another client may acquire or release the row between reading and locking it. After
        // several such attempts the answer is `Busy` without a holder, which makes the engine retry
        // at once.
        const TRIES_MAX: u32 = 3;
        if self.not_notified.remove(self.row_id(claim.key()))
            && let Some(holder) = self.find_holder(claim, self.position()).await?
        {
            return Ok(holder);
        }
        for attempt_number in 0..TRIES_MAX {
            let mark = self.position();
            match self.attempt(claim, mark).await {
                Ok(Some(attempt)) => return Ok(attempt),
                Ok(None) => {}
                Err(error) => {
                    let is_locked = error::is_row_lock_error(&error);
                    // An earlier attempt of this loop may itself have been granted, on a connection
                    // that then broke.
                    let error = if attempt_number > 0 { error.as_unknown() } else { error };
                    if is_locked && self.is_locked_by_transaction(claim.key()).await? {
                        return Ok(Attempt::Busy(Busy::new().with_mark(mark)));
                    }
                    return Err(error);
                }
            }
        }
        self.check_meta().await?;
        Ok(Attempt::Busy(Busy::new().with_retry_after(Duration::ZERO)))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.renew_in_chunks(claims).await
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
        self.maybe_purge(claim).await;
        Ok(released)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let id = self.row_id(claim.key());
        // The row stays remembered if this future is dropped before it returns.
        self.not_notified.insert(id);
        self.wait_for_release(claim.key(), busy.mark).await;
        self.not_notified.remove(id);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        if let Some(listener) = &self.listener {
            listener.close();
        }
        self.client.close().await;
    }
}

#[async_trait]
impl LockAdmin for PostgresBackend {
    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        self.holder(key).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.holders().await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.force_release_key(key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.check_store().await
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

pub(super) fn column<'r, T>(row: &'r PgRow, index: usize) -> Result<T, BackendError>
where
    T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
{
    row.try_get(index).map_err(explain)
}

fn fencing_token(token: i64) -> Result<FencingToken, BackendError> {
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

impl fmt::Debug for PostgresBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresBackend").field("config", &self.config).finish_non_exhaustive()
    }
}
