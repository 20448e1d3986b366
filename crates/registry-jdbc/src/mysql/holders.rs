//! Lists holders and releases locks by force. A key's holder is a lease, a row lock of one of the
//! store's connections, or a caller's transaction.

use std::time::Duration;

use registry_core::{BackendError, Holder, Key, Release};
use sqlx::mysql::MySqlRow;
use sqlx::query;
use tokio::time::{Instant, sleep};

use super::backend::{MySqlRows, release_outcome};
use super::error;
use super::statement::{HolderKinds, MySqlQuery};
use crate::server::{ConnectionUse, Resend};

impl MySqlRows {
    /// Returns the holder of `key`. For a caller's transaction, only the key is known.
    pub(super) async fn holder(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        // Between the two queries the key may pass to another holder, or become free.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            let rows = self.query_holders(|kinds| self.statements.holder(key, kinds)).await?;
            if let Some(row) = rows.first() {
                return self.decode_holder(key.clone(), row, 1).map(Some);
            }
            if !self.is_locked_by_transaction(key).await? {
                return Ok(None);
            }
        }
        Ok(Some(Holder::new(key.clone())))
    }

    /// Returns the holders of the namespace's keys, without those of callers' transactions. Finding
    /// them would require briefly locking each row.
    pub(super) async fn holders(&self) -> Result<Vec<Holder>, BackendError> {
        let rows = self.query_holders(|kinds| self.statements.list(kinds)).await?;
        rows.iter().map(|row| self.decode_holder(self.key_in(row)?, row, 1)).collect()
    }

    /// Releases `key` by force: ends the lease, or the connection that has the row locked for a
    /// claim.
    pub(super) async fn force_release_key(&self, key: &Key) -> Result<Release, BackendError> {
        let released = match self.holder_connection(key).await? {
            Some(holder_connection) => self.end_connection(key, &holder_connection).await?,
            None => self.end_lease(key).await?,
        };
        self.waiters.poll_soon(key);
        Ok(released)
    }

    async fn end_lease(&self, key: &Key) -> Result<Release, BackendError> {
        // Queried first: an update would wait for a transaction that has the row locked, even if
        // there is nothing to update.
        if self.query_holders(|kinds| self.statements.holder(key, kinds)).await?.is_empty() {
            if self.is_locked_by_transaction(key).await? {
                return Err(error::held_by_caller_transaction(error::STORE));
            }
            return Ok(Release::NotHeld);
        }
        let make = || self.statements.force_release(key);
        let done = self.client.execute(ConnectionUse::Release, Resend::Never, make).await?;
        Ok(release_outcome(&done))
    }

    async fn end_connection(
        &self,
        key: &Key,
        holder_connection: &HolderConnection,
    ) -> Result<Release, BackendError> {
        let kill =
            || query("KILL CONNECTION ?").bind(holder_connection.connection).persistent(false);
        let killed = self.client.execute(ConnectionUse::Release, Resend::Never, kill).await;
        // A connection that has ended meanwhile is not an error.
        if let Err(error) = killed
            && !error::is_no_such_connection(&error)
        {
            return Err(error::explain_not_ended(error));
        }
        // KILL returns before the connection has ended.
        let began = Instant::now();
        while self.holder_connection(key).await?.as_ref() == Some(holder_connection) {
            if began.elapsed() > END_WAIT {
                return Err(error::still_connected(error::STORE));
            }
            sleep(END_PAUSE).await;
        }
        Ok(Release::Freed)
    }

    /// Runs a query for all holders, or for leases alone if the server has no named locks.
    async fn query_holders(
        &self,
        statement: impl Fn(HolderKinds) -> MySqlQuery + Send + Sync,
    ) -> Result<Vec<MySqlRow>, BackendError> {
        match self.client.rows(ConnectionUse::Acquire, || statement(HolderKinds::All)).await {
            Err(error) if error::lacks_named_locks(&error) => {
                self.client.rows(ConnectionUse::Acquire, || statement(HolderKinds::Lease)).await
            }
            answer => answer,
        }
    }

    /// Returns the connection that has the row locked for a claim.
    async fn holder_connection(&self, key: &Key) -> Result<Option<HolderConnection>, BackendError> {
        let build = || self.statements.holder_connection(key);
        let rows = match self.client.rows(ConnectionUse::Release, build).await {
            Err(error) if error::lacks_named_locks(&error) => return Ok(None),
            rows => rows?,
        };
        let Some(row) = rows.first() else { return Ok(None) };
        let claim = self.column(row, 0)?;
        let connection: Option<i64> = self.column(row, 1)?;
        Ok(connection.map(|connection| HolderConnection { claim, connection }))
    }

    /// Returns whether the row stays locked for longer than the checks of other clients lock it.
    async fn is_locked_by_transaction(&self, key: &Key) -> Result<bool, BackendError> {
        for pause in ROW_CHECK_PAUSES {
            let unlocked = || self.statements.lock_row(key);
            let there = || self.statements.row_seen(key);
            if !self.client.rows(ConnectionUse::Acquire, unlocked).await?.is_empty()
                || self.client.rows(ConnectionUse::Acquire, there).await?.is_empty()
            {
                return Ok(false);
            }
            sleep(pause).await;
        }
        Ok(true)
    }
}

/// The connection that has a row locked, and its claim.
#[derive(Debug, PartialEq, Eq)]
struct HolderConnection {
    claim: Vec<u8>,
    connection: i64,
}

/// A row that is locked for longer than their sum has a holder.
const ROW_CHECK_PAUSES: [Duration; 4] =
    [Duration::from_millis(1), Duration::from_millis(2), Duration::from_millis(4), Duration::ZERO];

/// How long `KILL` waits until the connection has ended. [`END_PAUSE`] is the interval of the
/// checks.
const END_WAIT: Duration = Duration::from_secs(1);
const END_PAUSE: Duration = Duration::from_millis(2);
