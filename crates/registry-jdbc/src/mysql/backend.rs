//! Implements `LockBackend` on the rows of locks. The SQL is in `sql`. Uses only the server's
//! clock.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use registry_core::{
    Attempt, BackendError, Busy, Claim, FencingToken, Finding, Grant, Holder, Key, Release,
    Renewal, WakeCheck,
};
use sqlx::mysql::{MySqlQueryResult, MySqlRow};
use sqlx::{MySql, MySqlConnection, Row, query};

use super::client::{MySqlClient, new_client};
use super::config::MySqlConfig;
use super::diagnose::check_server;
use super::error;
use super::fence::{find_in, transaction_store, wait_for_fence};
use super::open::{self, OpenedMySqlStore};
use super::purge;
use super::renew::SentRenewal;
use super::sql::{MySqlStatements, SIZES};
use super::statement::{StatementBinder, from_micros};
use super::waiters::MySqlWaiters;
use crate::server::{ConnectionUse, LeaseStore, RecentRows, Resend, TransactionStore};

/// The leases of one namespace.
pub(crate) struct MySqlRows {
    pub(super) config: MySqlConfig,
    pub(super) store: Vec<u8>,
    pub(super) client: Arc<MySqlClient>,
    pub(super) statements: Arc<StatementBinder>,
    pub(super) waiters: MySqlWaiters,
    recently_released: RecentRows,
}

impl MySqlRows {
    pub(super) async fn open(config: MySqlConfig) -> Result<Self, BackendError> {
        let client = Arc::new(new_client(&config));
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
        error::corrupt(error::STORE, message)
    }
}

/// Reads the meta row after an attempt failed although the key is free. Without that row, or on a
/// replica, nothing is ever granted.
pub(super) async fn check_meta(
    client: &MySqlClient,
    texts: &MySqlStatements,
) -> Result<(), BackendError> {
    let rows = client.rows(ConnectionUse::Acquire, || query(texts.meta.safe())).await?;
    let row = rows.first();
    let row =
        row.ok_or_else(|| error::corrupt(error::STORE, "the meta table has no row").as_refused())?;
    if row.try_get::<i64, _>(2).map_err(|error| client.explain(error))? == 0 {
        // New connections may lead to the server's successor.
        client.close_idle();
        return Err(error::read_only());
    }
    Ok(())
}

/// A grant as stored in a row.
#[derive(Debug)]
struct StoredGrant {
    claim: Vec<u8>,
    token: FencingToken,
    lease_left: Duration,
    holder: Holder,
}

impl LeaseStore for MySqlRows {
    type Database = MySql;

    const RENEWALS_MAX: usize = SIZES[SIZES.len() - 1];
    const RENEWS_ONE_LEASE: bool = true;

    fn namespace(&self) -> &str {
        &self.config.namespace
    }

    fn has_wakes(&self) -> bool {
        true
    }

    async fn attempt(&self, claim: &Claim, _: u64) -> Result<Option<Attempt>, BackendError> {
        if let Some(token) = self.try_take(claim).await? {
            return Ok(Some(Attempt::Granted(Grant::new(token, claim.lease()))));
        }
        // The failed statement may be a repetition of one that was executed on a connection that
        // broke.
        let held = self.current_grant(claim.key(), ConnectionUse::Acquire).await;
        let Some(held) = held.map_err(BackendError::as_unknown)? else { return Ok(None) };
        if held.claim == claim.id().to_bytes() {
            let lease = held.lease_left.min(claim.lease());
            return Ok(Some(Attempt::Granted(Grant::new(held.token, lease))));
        }
        Ok(Some(Attempt::Busy(
            Busy::new()
                .with_retry_after(held.lease_left)
                .with_mark(held.token.get())
                .with_holder(held.holder),
        )))
    }

    async fn check_meta(&self) -> Result<(), BackendError> {
        check_meta(&self.client, &self.statements.texts).await
    }

    async fn renew_chunk(
        &self,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let lease = claims[0].lease();
        let requested_at = Instant::now();
        // A repeated renewal has no further effect.
        let make = || self.statements.renew(claims, lease);
        let done = self.client.execute(ConnectionUse::Renew(lease), Resend::Allowed, make).await?;
        let renewal = SentRenewal { client: &self.client, claims, requested_at, done };
        renewal
            .answers(|claim| claim.id().to_bytes().to_vec(), || self.statements.unexpired(claims))
            .await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        if claim.is_fenced() {
            wait_for_fence(|| self.has_open_fence(claim)).await?;
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
        purge::maybe_purge(claim, &self.client, &self.statements.texts, self.config.purge_after)
            .await;
        Ok(released)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.waiters.wait(self.statements.row(claim.key()), busy.mark).await;
    }

    fn wake_check(&self) -> Option<Arc<dyn WakeCheck>> {
        Some(self.waiters.wake_check())
    }

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
        check_server(&self.client).await
    }

    async fn close(&self) {
        self.waiters.close();
        self.client.close().await;
    }

    async fn fence(
        &self,
        connection: &mut MySqlConnection,
        claim: &Claim,
        token: FencingToken,
    ) -> Result<Option<bool>, sqlx::Error> {
        find_in(connection, self.statements.fence(claim, token)).await
    }

    async fn transaction_store(
        &self,
        connection: &mut MySqlConnection,
    ) -> Result<TransactionStore, sqlx::Error> {
        transaction_store(&self.statements.texts, &self.store, connection).await
    }
}

pub(super) fn release_outcome(result: &MySqlQueryResult) -> Release {
    if result.rows_affected() == 0 { Release::NotHeld } else { Release::Freed }
}

impl fmt::Debug for MySqlRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlBackend").field("config", &self.config).finish_non_exhaustive()
    }
}
