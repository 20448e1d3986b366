//! Row locks: a transaction of the store locks the row for as long as the lock is held (`SELECT …
//! LOCK IN SHARE MODE`).

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, FencingToken, Key};
use sqlx::{AssertSqlSafe, Executor as _, MySqlConnection, raw_sql};
use tokio::time::{sleep, timeout};

use super::backend::MySqlRows;
use super::client::MySqlClient;
use super::config::misconfigured;
use super::error;
use super::sql;
use super::statement::{MySqlQuery, StatementBinder};
use super::waiters;
use crate::server::{
    ConnectionUse, ErrorEffect, LockAttempt, RowLockConnections, RowLockPermit, SILENCE,
    SessionFailure, SessionProtocol, TokenPlan,
};

/// The SQL of one lock's connection.
pub(crate) struct MySqlRowProtocol {
    rows: Arc<MySqlRows>,
    client: Arc<MySqlClient>,
    statements: Arc<StatementBinder>,
    connections: RowLockConnections<MySqlConnection>,
}

/// A connection for one lock.
pub(crate) struct MySqlRowConnection {
    connection: MySqlConnection,
    permit: RowLockPermit,
    /// The transaction that has the row locked, if any.
    transaction: Option<MySqlRowTransaction>,
}

/// The open transaction of a connection.
struct MySqlRowTransaction {
    /// The server's id of the connection.
    connection: u64,
    /// Whether the connection holds the named lock that identifies the holder.
    is_named: bool,
}

impl MySqlRowProtocol {
    pub(super) fn new(rows: Arc<MySqlRows>) -> Self {
        Self {
            client: Arc::clone(&rows.client),
            statements: Arc::clone(&rows.statements),
            connections: RowLockConnections::new(rows.config.row_locks),
            rows,
        }
    }

    async fn is_free(&self, key: &Key) -> Result<bool, BackendError> {
        let unlocked = || self.statements.lock_row(key);
        let unlocked = self.client.rows(ConnectionUse::Acquire, unlocked).await?;
        if let Some(row) = unlocked.first() {
            return Ok(self.rows.column::<i64>(row, 0)? == 0);
        }
        let there = || self.statements.row_seen(key);
        Ok(self.client.rows(ConnectionUse::Acquire, there).await?.is_empty())
    }

    /// Within a transaction, any error may have ended the transaction, and with it the lock.
    fn broken(&self, error: sqlx::Error) -> SessionFailure {
        SessionFailure::Broken(self.client.explain(error))
    }

    async fn execute(
        &self,
        connected: &mut MySqlRowConnection,
        statement: MySqlQuery,
    ) -> Result<u64, SessionFailure> {
        let done = statement.execute(&mut connected.connection).await;
        done.map(|done| done.last_insert_id()).map_err(|error| self.client.failure(error))
    }

    /// Writes the claim and a larger token to the row, unless the key is held. Creates the row if
    /// there is none.
    async fn write_claim(
        &self,
        connected: &mut MySqlRowConnection,
        claim: &Claim,
    ) -> Result<Option<FencingToken>, SessionFailure> {
        for pause in WRITE_CLAIM_PAUSES {
            let token = self.execute(connected, self.statements.row_write_claim(claim)).await?;
            if token != 0 {
                let token = i64::try_from(token).unwrap_or(-1);
                let message = || error::corrupt(error::STORE, "a row's token is negative");
                let token = FencingToken::try_from(token);
                return token.map(Some).map_err(|_| SessionFailure::Broken(message()));
            }
            self.check_writable(connected).await?;
            let statement = self.statements.row_seen(claim.key());
            let rows = statement.fetch_all(&mut connected.connection).await;
            let rows = rows.map_err(|error| self.client.failure(error))?;
            match rows.first() {
                None => {
                    self.execute(connected, self.statements.insert_row(claim.key())).await?;
                }
                Some(row) if self.client.read::<Option<i64>>(row, 0)?.is_some() => return Ok(None),
                // Locked by a holder, or for milliseconds by another client that checks whether it
                // is free.
                Some(_) => sleep(pause).await,
            }
        }
        Ok(None)
    }

    /// Returns an error if the server is read-only: it must not grant anything.
    async fn check_writable(
        &self,
        connected: &mut MySqlRowConnection,
    ) -> Result<(), SessionFailure> {
        let meta = self.statements.meta().fetch_all(&mut connected.connection).await;
        let rows = meta.map_err(|error| self.client.failure(error))?;
        let message = "the meta table has no row";
        let lost = || SessionFailure::Rejected(error::corrupt(error::STORE, message).as_refused());
        let row = rows.first().ok_or_else(lost)?;
        if self.client.read::<i64>(row, 2)? == 0 {
            // New connections may lead to the server's successor.
            self.connections.close_idle();
            return Err(SessionFailure::Broken(error::read_only()));
        }
        Ok(())
    }

    /// Locks the row, if it still contains the claim.
    async fn lock(
        &self,
        connected: &mut MySqlRowConnection,
        claim: &Claim,
    ) -> Result<bool, SessionFailure> {
        let begin = connected.connection.execute(raw_sql("START TRANSACTION")).await;
        begin.map_err(|error| self.broken(error))?;
        let lock = self.statements.row_lock(claim).fetch_all(&mut connected.connection).await;
        let rows = lock.map_err(|error| self.broken(error))?;
        let Some(row) = rows.first() else {
            let end = connected.connection.execute(raw_sql("ROLLBACK")).await;
            end.map_err(|error| self.broken(error))?;
            return Ok(false);
        };
        let number = self.client.read(row, 0)?;
        let statements = format!("{SAVEPOINT}; DO GET_LOCK('{}', 0)", sql::row_name(claim.id()));
        let named = connected.connection.execute(raw_sql(AssertSqlSafe(statements))).await;
        let is_named = match named {
            Ok(_) => true,
            // Some clusters have no named locks. The holder of the row is not shown there.
            Err(error) if error::error_effect(&error) == ErrorEffect::Rejected => false,
            Err(error) => return Err(self.broken(error)),
        };
        connected.transaction = Some(MySqlRowTransaction { connection: number, is_named });
        Ok(true)
    }
}

impl SessionProtocol for MySqlRowProtocol {
    type Connection = MySqlRowConnection;

    async fn connect(&self) -> Result<MySqlRowConnection, BackendError> {
        let (permit, idle) =
            self.connections.acquire().map_err(|full| full.into_backend_error("mysql"))?;
        if let Some(connection) = idle {
            return Ok(MySqlRowConnection { connection, permit, transaction: None });
        }
        let connecting = super::session::connect(&self.rows.config, SILENCE);
        let connected = timeout(self.rows.config.connect_timeout, connecting).await;
        let connection = connected
            .map_err(|_| error::timed_out(error::STORE, self.rows.config.connect_timeout))?
            .map_err(|error| self.client.explain(error))?;
        Ok(MySqlRowConnection { connection, permit, transaction: None })
    }

    async fn try_acquire(
        &self,
        connected: &mut MySqlRowConnection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> Result<LockAttempt, SessionFailure> {
        let claimed = self.write_claim(connected, claim).await;
        if matches!(claimed, Err(SessionFailure::Broken(_))) {
            // The other idle connections are probably broken too.
            self.connections.close_idle();
        }
        let Some(token) = claimed? else { return Ok(LockAttempt::Busy(None)) };
        let locked = self.lock(connected, claim).await?;
        let taken = plan.grant_from_write(claim, i64::from(token), false).filter(|_| locked);
        Ok(taken.map_or(LockAttempt::Busy(None), LockAttempt::Grant))
    }

    async fn unlock(
        &self,
        connected: &mut MySqlRowConnection,
        _: &Key,
    ) -> Result<(), SessionFailure> {
        let is_named = connected.transaction.as_ref().is_some_and(|held| held.is_named);
        let end = if is_named { "COMMIT; DO RELEASE_ALL_LOCKS()" } else { "COMMIT" };
        let end = connected.connection.execute(raw_sql(end)).await;
        end.map_err(|error| self.broken(error))?;
        connected.transaction = None;
        Ok(())
    }

    async fn check_session(
        &self,
        connected: &mut MySqlRowConnection,
    ) -> Result<(), SessionFailure> {
        // Fails if the transaction is over, for any reason, because its savepoint no longer exists.
        let rows = connected.connection.fetch_all(raw_sql(CURRENT_GRANT)).await;
        let rows = rows.map_err(|error| self.broken(error))?;
        let message = || error::corrupt(error::STORE, "a statement returned no row");
        let row = rows.last().ok_or_else(|| SessionFailure::Broken(message()))?;
        let held_by = connected.transaction.as_ref().map(|held| held.connection);
        if Some(self.client.read::<u64>(row, 0)?) != held_by {
            return Err(SessionFailure::Broken(misconfigured(
                "row locks do not work through a proxy that gives each statement another connection; connect past it, or use leases",
            )));
        }
        if self.client.read::<i64>(row, 1)? == 0 {
            return Err(SessionFailure::Broken(error::read_only()));
        }
        Ok(())
    }

    fn recycle(&self, connected: MySqlRowConnection) -> Option<MySqlRowConnection> {
        let MySqlRowConnection { connection, permit, transaction } = connected;
        if transaction.is_none() {
            self.connections.release(permit, connection);
        }
        None
    }

    fn name(&self, key: &Key) -> Vec<u8> {
        self.statements.row(key).bytes().to_vec()
    }

    /// Polls at growing intervals, because the server sends no notifications.
    async fn wait(&self, key: &Key, _: u64) {
        waiters::poll_until_free(|| self.is_free(key)).await;
    }

    fn close_idle(&self) {
        self.connections.close_idle();
    }

    fn store(&self) -> &str {
        error::STORE
    }

    fn response_timeout(&self) -> Duration {
        self.rows.config.response_timeout
    }
}

/// A row that is locked for longer than their sum has a holder. The server does not report which.
const WRITE_CLAIM_PAUSES: [Duration; 5] = [
    Duration::from_millis(1),
    Duration::from_millis(2),
    Duration::from_millis(3),
    Duration::from_millis(4),
    Duration::ZERO,
];

/// The savepoint that identifies the transaction.
const SAVEPOINT: &str = "SAVEPOINT lock_registry_row";

/// Releases no earlier lock. Returns the connection's id, and whether the server is still writable.
const CURRENT_GRANT: &str = "ROLLBACK TO SAVEPOINT lock_registry_row; \
    SELECT CONNECTION_ID(), CAST(CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";
