//! Lists holders and releases locks by force. A key's holder is a lease, a row lock of one of the
//! store's connections, or a caller's transaction.

use std::time::Duration;

use registry_core::{BackendError, Holder, Key, Release};
use sqlx::mysql::MySqlRow;
use sqlx::query;
use tokio::time::{Instant, sleep};

use super::backend::{MySqlBackend, freed};
use super::error;
use super::link::Repeat;
use super::statement::{By, Statement};
use crate::server::Errand;

impl MySqlBackend {
    /// Returns the holder of `key`. For a caller's transaction, only the key is known.
    pub(super) async fn holder(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        // Between the two queries the key may pass to another holder, or come free.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            let rows = self.ask(|by| self.statements.holder(key, by)).await?;
            if let Some(row) = rows.first() {
                return self.told_of(key.clone(), row, 1).map(Some);
            }
            if !self.is_kept_by_a_transaction(key).await? {
                return Ok(None);
            }
        }
        Ok(Some(Holder::new(key.clone())))
    }

    /// Returns the holders of the namespace's keys, without those of callers' transactions. Finding
    /// them would require briefly locking each row.
    pub(super) async fn holders(&self) -> Result<Vec<Holder>, BackendError> {
        let rows = self.ask(|by| self.statements.list(by)).await?;
        rows.iter().map(|row| self.told_of(self.key_in(row)?, row, 1)).collect()
    }

    /// Releases `key` by force: ends the lease, or the connection that has the row locked for a
    /// claim.
    pub(super) async fn free_by_force(&self, key: &Key) -> Result<Release, BackendError> {
        let released = match self.holding(key).await? {
            Some(holding) => self.end_connection(key, &holding).await?,
            None => self.end_lease(key).await?,
        };
        self.wakes.look_soon(key);
        Ok(released)
    }

    async fn end_lease(&self, key: &Key) -> Result<Release, BackendError> {
        // Queried first: an update would wait for a transaction that has the row locked, even if
        // there is nothing to update.
        if self.ask(|by| self.statements.holder(key, by)).await?.is_empty() {
            if self.is_kept_by_a_transaction(key).await? {
                return Err(error::is_a_callers(self.link.place()));
            }
            return Ok(Release::NotHeld);
        }
        let make = || self.statements.force_release(key);
        let done = self.link.change(Errand::Release, Repeat::Never, make).await?;
        Ok(freed(&done))
    }

    async fn end_connection(&self, key: &Key, holding: &Holding) -> Result<Release, BackendError> {
        let kill = || query("KILL CONNECTION ?").bind(holding.connection).persistent(false);
        let killed = self.link.change(Errand::Release, Repeat::Never, kill).await;
        // A connection that has ended meanwhile is not an error.
        if let Err(error) = killed
            && !error::tells_of_no_such_connection(&error)
        {
            return Err(error::not_ended(error, self.link.place()));
        }
        // KILL returns before the connection has ended.
        let began = Instant::now();
        while self.holding(key).await?.as_ref() == Some(holding) {
            if began.elapsed() > END_WAIT {
                return Err(error::still_there(self.link.place()));
            }
            sleep(END_PAUSE).await;
        }
        Ok(Release::Freed)
    }

    /// Runs a query for all holders, or for leases alone if the server has no named locks.
    async fn ask(
        &self,
        question: impl Fn(By) -> Statement + Send + Sync,
    ) -> Result<Vec<MySqlRow>, BackendError> {
        match self.link.rows(Errand::Acquire, || question(By::Whatever)).await {
            Err(error) if error::tells_of_no_named_locks(&error) => {
                self.link.rows(Errand::Acquire, || question(By::Lease)).await
            }
            answer => answer,
        }
    }

    /// Returns the connection that has the row locked for a claim.
    async fn holding(&self, key: &Key) -> Result<Option<Holding>, BackendError> {
        let look = || self.statements.holding(key);
        let rows = match self.link.rows(Errand::Release, look).await {
            Err(error) if error::tells_of_no_named_locks(&error) => return Ok(None),
            rows => rows?,
        };
        let Some(row) = rows.first() else { return Ok(None) };
        let claim = self.column(row, 0)?;
        let connection: Option<i64> = self.column(row, 1)?;
        Ok(connection.map(|connection| Holding { claim, connection }))
    }

    /// Returns whether the row stays locked for longer than the checks of other clients lock it.
    async fn is_kept_by_a_transaction(&self, key: &Key) -> Result<bool, BackendError> {
        for pause in LOOK_PAUSES {
            let unlocked = || self.statements.lock_row(key);
            let there = || self.statements.row_seen(key);
            if !self.link.rows(Errand::Acquire, unlocked).await?.is_empty()
                || self.link.rows(Errand::Acquire, there).await?.is_empty()
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
struct Holding {
    claim: Vec<u8>,
    connection: i64,
}

/// A row that is locked for longer than their sum has a holder.
const LOOK_PAUSES: [Duration; 4] =
    [Duration::from_millis(1), Duration::from_millis(2), Duration::from_millis(4), Duration::ZERO];

/// How long `KILL` waits until the connection has ended. [`END_PAUSE`] is the interval of the
/// checks.
const END_WAIT: Duration = Duration::from_secs(1);
const END_PAUSE: Duration = Duration::from_millis(2);
