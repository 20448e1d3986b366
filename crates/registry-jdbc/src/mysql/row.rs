//! Row locks: while a lock is held, a transaction of this backend keeps its row locked by `SELECT …
//! LOCK IN SHARE MODE`.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, FencingToken, Key};
use sqlx::{MySql, MySqlConnection};
use tokio::time::{sleep, timeout};

use super::backend::MySqlLeaseTable;
use super::client::{read, send_once};
use super::error;
use super::release_poller;
use super::sql;
use super::statement::{send, simple_query};
use crate::server::statement::{corrupt, fencing_token, flag, one_row};
use crate::server::{
    ErrorEffect, IDLE_TIMEOUT, LockAttempt, PoolError, QueryMode, RowLockPermit, RowLockPool,
    RowStatements, ServerErrors as _, SessionFailure, SessionProtocol, Statement, TokenPlan, Value,
};

/// Sends the statements of the sessions. Each session holds the row of one lock.
pub(crate) struct MySqlRowProtocol {
    table: Arc<MySqlLeaseTable>,
    connections: RowLockPool<MySqlConnection>,
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
    connection_id: u64,
    /// Whether the connection holds the holder lock: the named lock that shows which claim holds
    /// the row.
    has_holder_lock: bool,
}

impl MySqlRowProtocol {
    async fn is_free(&self, key: &Key) -> Result<bool, BackendError> {
        let (store, id) = (&self.table.store, || [self.table.id_value(key)]);
        if let Some(row) = store.query(&store.statements.lock_row, id()).await?.first() {
            return Ok(!flag::<MySql>(row, 0)?);
        }
        Ok(store.query(&store.statements.lease_left, id()).await?.is_empty())
    }

    /// Writes the claim and a larger token to the row, unless the key is held. Creates the row if
    /// there is none.
    async fn write_claim(
        &self,
        connected: &mut MySqlRowConnection,
        claim: &Claim,
    ) -> Result<Option<FencingToken>, SessionFailure> {
        for pause in WRITE_CLAIM_PAUSES {
            let (statements, id) =
                (&self.table.store.statements, || self.table.id_value(claim.key()));
            let values =
                [id(), Value::claim(claim), Value::token_block(claim), Value::label(claim)];
            let token = send_once(&mut connected.connection, &statements.row_write_claim, values)
                .await?
                .last_insert_id;
            if token != 0 {
                let token = fencing_token::<MySql>(i64::try_from(token).unwrap_or(-1));
                return token.map(Some).map_err(SessionFailure::Broken);
            }
            self.check_writable(connected).await?;
            let left = send_once(&mut connected.connection, &statements.lease_left, [id()]).await?;
            match left.rows.first() {
                None => {
                    let key = Value::key(claim.key());
                    let values = [id(), self.table.namespace_value(), key];
                    send_once(&mut connected.connection, &statements.insert_row, values).await?;
                }
                Some(row) if read::<Option<i64>>(row, 0)?.is_some() => return Ok(None),
                // A holder has locked the row, or another client's check of the row has locked it
                // for milliseconds.
                Some(_) => sleep(pause).await,
            }
        }
        Ok(None)
    }

    /// Returns an error if the server is read-only. Such a server must not grant locks.
    async fn check_writable(
        &self,
        connected: &mut MySqlRowConnection,
    ) -> Result<(), SessionFailure> {
        let statements: &RowStatements = self.table.store.statements.as_ref().as_ref();
        let rows = send_once(&mut connected.connection, &statements.meta, []).await?.rows;
        let message = "the meta table has no row";
        let missing = || SessionFailure::Rejected(corrupt::<MySql>(message).as_refused());
        if read::<i64>(rows.first().ok_or_else(missing)?, 2)? == 0 {
            // After a failover, new connections may reach the new primary.
            self.connections.close_idle();
            return Err(SessionFailure::Broken(error::read_only(error::STORE)));
        }
        Ok(())
    }

    /// Locks the row, if it still contains the claim.
    async fn lock(
        &self,
        connected: &mut MySqlRowConnection,
        claim: &Claim,
    ) -> Result<bool, SessionFailure> {
        simple_query(&mut connected.connection, "START TRANSACTION".into())
            .await
            .map_err(broken)?;
        let text = &self.table.store.statements.row_lock;
        let lock = Statement::new(text, [self.table.id_value(claim.key()), Value::claim(claim)]);
        let lock = send(&mut connected.connection, &lock, QueryMode::Prepared).await;
        let rows = lock.map_err(broken)?.rows;
        let Some(row) = rows.first() else {
            simple_query(&mut connected.connection, "ROLLBACK".into()).await.map_err(broken)?;
            return Ok(false);
        };
        let connection_id = read(row, 0)?;
        let statements =
            format!("{SAVEPOINT}; DO GET_LOCK('{}', 0)", sql::holder_lock_name(claim.id()));
        let holder_lock = simple_query(&mut connected.connection, statements).await;
        let has_holder_lock = match holder_lock {
            Ok(_) => true,
            // Some clusters have no named locks. On such a cluster, listings omit the holder.
            Err(error) if MySql::error_effect(&error) == ErrorEffect::Rejected => false,
            Err(error) => return Err(broken(error)),
        };
        connected.transaction = Some(MySqlRowTransaction { connection_id, has_holder_lock });
        Ok(true)
    }
}

impl SessionProtocol for MySqlRowProtocol {
    type Database = MySql;
    type Connection = MySqlRowConnection;

    async fn open(table: Arc<MySqlLeaseTable>) -> Result<Self, BackendError> {
        Ok(Self { connections: RowLockPool::new(table.store.settings().row_locks), table })
    }

    fn table(&self) -> &MySqlLeaseTable {
        &self.table
    }

    async fn connect(&self) -> Result<MySqlRowConnection, BackendError> {
        let (permit, idle) =
            self.connections.acquire().map_err(|full| full.into_backend_error("mysql"))?;
        if let Some(connection) = idle {
            return Ok(MySqlRowConnection { connection, permit, transaction: None });
        }
        let connecting = super::session::connect(&self.table.store.config, IDLE_TIMEOUT);
        let connected = timeout(self.table.store.settings().connect_timeout, connecting).await;
        let connection = connected
            .map_err(|_| error::not_connected(PoolError::TimedOut))?
            .map_err(|error| error::not_connected(PoolError::Sqlx(error)))?;
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
            // The remaining idle connections are probably broken too.
            self.connections.close_idle();
        }
        let Some(token) = claimed? else { return Ok(LockAttempt::Busy(None)) };
        let locked = self.lock(connected, claim).await?;
        let grant = plan.grant_from_write(claim, i64::from(token), None).filter(|_| locked);
        Ok(grant.map_or(LockAttempt::Busy(None), LockAttempt::Grant))
    }

    async fn unlock(
        &self,
        connected: &mut MySqlRowConnection,
        _: &Key,
    ) -> Result<(), SessionFailure> {
        let has_holder_lock =
            connected.transaction.as_ref().is_some_and(|held| held.has_holder_lock);
        let end = if has_holder_lock { "COMMIT; DO RELEASE_ALL_LOCKS()" } else { "COMMIT" };
        simple_query(&mut connected.connection, end.into()).await.map_err(broken)?;
        connected.transaction = None;
        Ok(())
    }

    async fn check_session(
        &self,
        connected: &mut MySqlRowConnection,
    ) -> Result<(), SessionFailure> {
        // If the transaction has ended, the statement fails, because its savepoint no longer
        // exists.
        let rows =
            simple_query(&mut connected.connection, CHECK_SESSION.into()).await.map_err(broken)?;
        let row = one_row::<MySql>(&rows).map_err(SessionFailure::Broken)?;
        let expected_id = connected.transaction.as_ref().map(|held| held.connection_id);
        if Some(read::<u64>(row, 0)?) != expected_id {
            return Err(SessionFailure::Broken(MySql::misconfigured(
                "row locks do not work through a proxy that gives each statement another connection; connect to the server directly, or set mode=lease",
            )));
        }
        if read::<i64>(row, 1)? == 0 {
            return Err(SessionFailure::Broken(error::read_only(error::STORE)));
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

    /// The servers send no notifications, so this polls at growing intervals.
    async fn wait(&self, key: &Key, _: u64) {
        release_poller::poll_until_free(|| self.is_free(key)).await;
    }

    fn close_idle(&self) {
        self.connections.close_idle();
    }
}

/// Converts an error inside the transaction. Any such error may have ended the transaction, and
/// with it the lock.
fn broken(error: sqlx::Error) -> SessionFailure {
    SessionFailure::Broken(MySql::explain(error))
}

/// The pauses between attempts to write the claim to a locked row. A row that is locked for longer
/// than their sum counts as held, so the attempt then returns `Busy`.
const WRITE_CLAIM_PAUSES: [Duration; 5] = [
    Duration::from_millis(1),
    Duration::from_millis(2),
    Duration::from_millis(3),
    Duration::from_millis(4),
    Duration::ZERO,
];

/// The savepoint that identifies the transaction.
const SAVEPOINT: &str = "SAVEPOINT lock_registry_row";

/// Checks the transaction by a rollback to its savepoint, which releases no lock that is older than
/// the savepoint. Returns the connection's id, and whether the server is still writable.
const CHECK_SESSION: &str = "ROLLBACK TO SAVEPOINT lock_registry_row; \
    SELECT CONNECTION_ID(), CAST(CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";
