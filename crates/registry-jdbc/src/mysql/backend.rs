//! Implements `LockBackend` on the rows of locks. The SQL is in `sql`. Uses only the server's
//! clock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, FencingToken, Finding, Grant, GuaranteeClass,
    Holder, Key, LockAdmin, LockBackend, Reach, Release, Renewal, RenewalPolicy,
};
use sqlx::mysql::{MySqlQueryResult, MySqlRow};
use sqlx::{MySql, RawSql, Row};
use tokio::time::sleep;

use super::client::{MySqlClient, Resend};
use super::config::MySqlConfig;
use super::error;
use super::fence::FENCE_CHECK_PAUSES;
use super::open::{self, OpenedMySqlStore};
use super::sql;
use super::statement::{StatementBinder, from_micros};
use super::waiters::MySqlWaiters;
use crate::server::{ConnectionUse, RecentRows};

/// Locks in a MariaDB or MySQL database. They exclude all clients of the database. Requires MariaDB
/// 10.6, MySQL 8.0, or newer, and InnoDB tables.
///
/// A grant lives until its lease expires on the server's clock. A token is that clock's time in
/// microseconds, or the key's last token plus one if that is larger. Tokens grow across release,
/// expiry, restart, failover and purge. Grants and renewals are on the server's disk before the
/// response, if the server is configured so (`innodb_flush_log_at_trx_commit`).
///
/// These servers send no notifications, so the backend polls all awaited keys with one small
/// statement. Polling starts milliseconds after a wait began, and slows down with its length.
///
/// A promoted replica has only what it had received until then: the last grants may be missing, and
/// their keys are free. Tokens grow even then, unless the replica's clock is behind by more than
/// the promotion took. So fenced writes stay safe.
///
/// A server that is set `read_only` grants and renews nothing, even for users that may write to it.
///
/// The backend opens its own connections and never joins a transaction of the application. It opens
/// at most as many as [configured](MySqlConfig::with_connections), plus two, for any number of held
/// or awaited locks.
///
/// # Examples
/// ```no_run
/// use registry_core::{Attempt, Claim, Key, LockBackend, Release};
/// use registry_jdbc::{MySqlBackend, MySqlConfig};
/// # use std::time::Duration;
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let config = MySqlConfig::from_url("mysql://worker:secret@db.example/shop")?;
/// let backend = MySqlBackend::open(config).await?;
/// let claim = Claim::new(Key::new("orders/42")?, Duration::from_secs(30));
/// assert!(matches!(backend.try_acquire(&claim).await?, Attempt::Granted(_)));
/// assert_eq!(backend.release(&claim).await?, Release::Freed);
/// backend.close().await;
/// # Ok(())
/// # }
/// ```
pub struct MySqlBackend {
    pub(super) config: MySqlConfig,
    pub(super) store: Vec<u8>,
    pub(super) client: Arc<MySqlClient>,
    pub(super) statements: Arc<StatementBinder>,
    pub(super) waiters: MySqlWaiters,
    recently_released: RecentRows,
}

impl MySqlBackend {
    /// Connects to the server, and creates the tables if they are missing.
    ///
    /// # Errors
    /// [`BackendError`] with a message that says what to do:
    /// - `Misconfigured` for an unusable setup: no such database, missing or newer tables, an old
    ///   server, an invalid name.
    /// - `Denied` for a wrong user or password, or a missing privilege.
    /// - `Transient` when the server cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future may leave some of the tables behind. The next open of the store creates
    /// the others.
    pub async fn open(config: MySqlConfig) -> Result<Self, BackendError> {
        let client = Arc::new(MySqlClient::new(&config));
        let OpenedMySqlStore { texts, store } = open::open(&config, &client).await?;
        let statements = Arc::new(StatementBinder { texts, namespace: config.namespace.clone() });
        let waiters = MySqlWaiters::new(Arc::clone(&client), Arc::clone(&statements));
        Ok(Self {
            config,
            store,
            client,
            statements,
            waiters,
            recently_released: RecentRows::default(),
        })
    }

    /// Returns the SQL that creates the tables of this store, for databases where only an
    /// administrator may create tables.
    #[must_use]
    pub const fn schema() -> &'static str {
        sql::SCHEMA
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.config.namespace
    }

    /// Returns the statement that finds the claim's grant and locks its row.
    pub(super) fn fence_statement(&self, claim: &Claim, token: FencingToken) -> RawSql {
        self.statements.fence(claim, token)
    }

    /// Grants the key if it is free, in one statement.
    async fn try_take(&self, claim: &Claim) -> Result<Option<FencingToken>, BackendError> {
        // Never repeated here: a delayed first request could be executed after the release of the
        // second one. Only the engine retries.
        let result = if self.recently_released.remove(self.statements.row(claim.key())) {
            let make = || self.statements.reacquire(claim);
            match self.client.execute(ConnectionUse::Acquire, Resend::Never, make).await {
                Err(error) if error::is_row_lock_error(&error) => {
                    // Possibly locked by a fence of a new holder. Then the key is busy.
                    let held = self
                        .current_grant(claim.key(), ConnectionUse::Acquire)
                        .await
                        .map_err(BackendError::as_unknown)?;
                    let is_held = held.is_some();
                    return if is_held { Ok(None) } else { Err(error) };
                }
                result => result?,
            }
        } else {
            let make = || self.statements.acquire(claim);
            self.client.execute(ConnectionUse::Acquire, Resend::Never, make).await?
        };
        match result.last_insert_id() {
            0 => Ok(None),
            token => self.fencing_token(i64::try_from(token).unwrap_or(-1)).map(Some),
        }
    }

    /// Waits for the end of a transaction that this claim has fenced, which locks the row. Gives up
    /// after the sum of [`FENCE_CHECK_PAUSES`].
    async fn wait_for_fence(&self, claim: &Claim) -> Result<(), BackendError> {
        for pause in FENCE_CHECK_PAUSES.into_iter().map(Some).chain([None]) {
            // If this fails, nothing was released.
            let is_open = self.has_open_fence(claim).await.map_err(BackendError::as_refused)?;
            if !is_open {
                return Ok(());
            }
            if let Some(pause) = pause {
                sleep(pause).await;
            }
        }
        Err(error::fenced_transaction_open(self.client.address()))
    }

    async fn has_open_fence(&self, claim: &Claim) -> Result<bool, BackendError> {
        if !self.is_locked(claim.key(), ConnectionUse::Release).await? {
            return Ok(false);
        }
        // An empty result also means that there is no row.
        let held = self.current_grant(claim.key(), ConnectionUse::Release).await?;
        Ok(held.is_some_and(|held| held.claim == claim.id().to_bytes()))
    }

    /// Returns the current grant of the key.
    async fn current_grant(
        &self,
        key: &Key,
        connection_use: ConnectionUse,
    ) -> Result<Option<StoredGrant>, BackendError> {
        let make = || self.statements.current_grant(key);
        let rows = self.client.rows(connection_use, make).await?;
        rows.first().map(|row| self.decode_grant(row)).transpose()
    }

    /// Reads key, claim, token, label and times.
    fn decode_grant(&self, row: &MySqlRow) -> Result<StoredGrant, BackendError> {
        let lease_left = from_micros(self.column(row, 5)?);
        let token = self.fencing_token(self.column(row, 2)?)?;
        let holder = self.decode_holder(self.key_in(row)?, row, 2)?;
        Ok(StoredGrant { claim: self.column(row, 1)?, token, lease_left, holder })
    }

    /// Returns the key in the first column.
    pub(super) fn key_in(&self, row: &MySqlRow) -> Result<Key, BackendError> {
        let key = String::from_utf8(self.column(row, 0)?).ok();
        let key = key.and_then(|key| Key::new(&key).ok());
        key.ok_or_else(|| self.corrupt("a row's key is invalid"))
    }

    /// Reads token, label and times from the columns that start at `first`.
    pub(super) fn decode_holder(
        &self,
        key: Key,
        row: &MySqlRow,
        first: usize,
    ) -> Result<Holder, BackendError> {
        let label: Option<Vec<u8>> = self.column(row, first + 1)?;
        let left: Option<i64> = self.column(row, first + 3)?;
        Ok(Holder::new(key)
            .with_label(label.map(|label| String::from_utf8_lossy(&label).into_owned()))
            .with_token(Some(self.fencing_token(self.column(row, first)?)?))
            .with_times(Some(from_micros(self.column(row, first + 2)?)), left.map(from_micros)))
    }

    pub(super) fn column<'r, T>(&self, row: &'r MySqlRow, index: usize) -> Result<T, BackendError>
    where
        T: sqlx::Decode<'r, MySql> + sqlx::Type<MySql>,
    {
        row.try_get(index).map_err(|error| self.client.explain(error))
    }

    fn fencing_token(&self, token: i64) -> Result<FencingToken, BackendError> {
        FencingToken::try_from(token).map_err(|_| self.corrupt("a row's token is negative"))
    }

    fn corrupt(&self, message: &str) -> BackendError {
        error::corrupt(self.client.address(), message)
    }

    /// Reads the meta row after an attempt failed although the key is free. Without that row, or on
    /// a replica, nothing is ever granted.
    async fn check_meta(&self) -> Result<(), BackendError> {
        let rows = self.client.rows(ConnectionUse::Acquire, || self.statements.meta()).await?;
        let row =
            rows.first().ok_or_else(|| self.corrupt("the meta table has no row").as_refused())?;
        if self.column::<i64>(row, 2)? == 0 {
            // New connections may lead to the server's successor.
            self.client.close_idle();
            return Err(error::read_only(self.client.address()));
        }
        Ok(())
    }
}

/// A grant as stored in a row.
#[derive(Debug)]
struct StoredGrant {
    claim: Vec<u8>,
    token: FencingToken,
    lease_left: Duration,
    holder: Holder,
}

#[async_trait]
impl LockBackend for MySqlBackend {
    fn capabilities(&self) -> Capabilities {
        let renewal = RenewalPolicy::new().with_batch_max(sql::SIZES[sql::SIZES.len() - 1]);
        Capabilities::new("mysql", GuaranteeClass::Durable, Reach::Network)
            .with_fencing()
            .with_wakes()
            .with_labels()
            .with_inspect()
            .with_renewal(renewal)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        // Between the failed attempt and the query the key may become free. After this many
        // repetitions, the attempt returns `Busy` without a holder and is retried at once.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            if let Some(token) = self.try_take(claim).await? {
                return Ok(Attempt::Granted(Grant::new(token, claim.lease())));
            }
            // The failed statement may be a repetition of one that was executed on a connection
            // that broke.
            let held = self.current_grant(claim.key(), ConnectionUse::Acquire).await;
            let Some(held) = held.map_err(BackendError::as_unknown)? else {
                continue;
            };
            if held.claim == claim.id().to_bytes() {
                let lease = held.lease_left.min(claim.lease());
                return Ok(Attempt::Granted(Grant::new(held.token, lease)));
            }
            return Ok(Attempt::Busy(
                Busy::new()
                    .with_retry_after(held.lease_left)
                    .with_mark(held.token.get())
                    .with_holder(held.holder)
                    .with_wake_check(self.waiters.wake_check()),
            ));
        }
        self.check_meta().await?;
        let busy = Busy::new().with_retry_after(Duration::ZERO);
        Ok(Attempt::Busy(busy.with_wake_check(self.waiters.wake_check())))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.renew_in_chunks(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        if claim.is_fenced() {
            self.wait_for_fence(claim).await?;
        }
        // Not repeated: the second result would be that the claim held nothing. The caller decides
        // about a retry.
        let make = || self.statements.release(claim);
        let result = self.client.execute(ConnectionUse::Release, Resend::Never, make).await?;
        let released = release_outcome(&result);
        if released == Release::Freed {
            self.recently_released.insert(self.statements.row(claim.key()));
        }
        self.waiters.poll_soon(claim.key());
        self.maybe_purge(claim).await;
        Ok(released)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.waiters.wait(self.statements.row(claim.key()), busy.mark).await;
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        self.waiters.close();
        self.client.close().await;
    }
}

#[async_trait]
impl LockAdmin for MySqlBackend {
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

pub(super) fn release_outcome(result: &MySqlQueryResult) -> Release {
    if result.rows_affected() == 0 { Release::NotHeld } else { Release::Freed }
}

impl fmt::Debug for MySqlBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlBackend").field("config", &self.config).finish_non_exhaustive()
    }
}
