//! Row locks: while a lock is held, a transaction of this backend keeps its row locked by `SELECT …
//! FOR NO KEY UPDATE`.
//!
//! The sessions and their connections are in `server::row_lock_sessions`; the statements are in
//! `sql`.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, ClaimId, FencingToken, Key};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Postgres, Row as _};

use super::backend::PgLeaseTable;
use super::error::{self, row_locked};
use super::statement::{send, simple_query};
use crate::server::statement::{fencing_token, flag, maybe_number, one_row, text};
use crate::server::{
    IDLE_TIMEOUT, LockAttempt, RowLockPermit, RowLockPool, ServerErrors as _, SessionFailure,
    SessionProtocol, Statement, TokenPlan, Value, WakeupSource as _,
};

/// Sends the statements of the sessions of row locks. Each held lock has its own session.
pub(crate) struct PgRowProtocol {
    table: Arc<PgLeaseTable>,
    connections: RowLockPool<PgConnection>,
}

/// The connection of one lock.
pub(crate) struct PgRowConnection {
    connection: PgConnection,
    permit: RowLockPermit,
    /// The open transaction, if there is one.
    transaction: Option<PgRowTransaction>,
}

/// The identity of a transaction.
#[derive(Debug, PartialEq, Eq)]
struct PgRowTransaction {
    server_process: i32,
    id: String,
}

impl PgRowTransaction {
    fn read(row: &PgRow) -> Result<Self, BackendError> {
        let column = row.try_get(0).map_err(Postgres::explain);
        Ok(Self { server_process: column?, id: row.try_get(1).map_err(Postgres::explain)? })
    }
}

impl PgRowConnection {
    /// Sends plain text, which works on any connection that a pooler assigns.
    async fn simple_query(&mut self, text: String) -> Result<Vec<PgRow>, sqlx::Error> {
        simple_query(&mut self.connection, text).await
    }
}

/// The result of the first step of a grant, which writes the claim to the row.
enum ClaimWrite {
    Token(FencingToken),
    /// Another client holds a lease.
    Leased,
    /// Another transaction has locked the row.
    Locked,
}

impl PgRowProtocol {
    /// Sends a statement outside of a transaction.
    async fn send(
        &self,
        connected: &mut PgRowConnection,
        statement: &Statement<'_>,
    ) -> Result<Vec<PgRow>, SessionFailure> {
        let query_mode = self.table.store.config.plain_query_mode();
        let answer = send(&mut connected.connection, statement, query_mode).await;
        Ok(answer.map_err(error::session_failure)?.rows)
    }

    /// Writes the claim and a larger token to the row, unless another client holds the row. Does
    /// not wait for a locked row, but waits up to 200 ms ([`ROW_WAIT`]) for an uncommitted insert.
    async fn write_claim(
        &self,
        connected: &mut PgRowConnection,
        claim: &Claim,
    ) -> Result<ClaimWrite, SessionFailure> {
        let statement = Statement::new(
            &self.table.store.statements.row_write_claim,
            [
                self.table.id_value(claim.key()),
                self.table.namespace_value(),
                Value::key(claim.key()),
                Value::claim(claim),
                Value::token_block(claim),
                Value::label(claim),
                Value::Text(format!("{}ms", ROW_WAIT.as_millis())),
            ],
        );
        let rows = self.send(connected, &statement).await?;
        let read = || {
            let row = one_row::<Postgres>(&rows)?;
            Ok(match maybe_number::<Postgres>(row, 0)? {
                Some(token) => ClaimWrite::Token(fencing_token::<Postgres>(token)?),
                None if flag::<Postgres>(row, 1)? => ClaimWrite::Leased,
                None => ClaimWrite::Locked,
            })
        };
        read().map_err(SessionFailure::Broken)
    }

    /// Locks the row if it still contains the claim.
    async fn lock(
        &self,
        connected: &mut PgRowConnection,
        claim: &Claim,
    ) -> Result<bool, SessionFailure> {
        let id = self.table.row_id(claim.key());
        let statement = Statement::new(
            &self.table.store.statements.row_lock,
            [
                self.table.id_value(claim.key()),
                Value::claim(claim),
                Value::Number(id.holder_lock_key()),
                Value::Text(format!("{}s", IDLE_TIMEOUT.as_secs())),
                Value::Number(claim_lock_key(claim.id())),
            ],
        );
        // Sent as one message. The settings end with the transaction.
        let lock_timeout = self.table.store.settings().busy_timeout.as_millis().max(1);
        let text = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = {lock_timeout}; {}",
            statement.inlined::<Postgres>()
        );
        let rows = connected.simple_query(text).await.map_err(broken)?;
        let Some(row) = rows.last() else {
            connected.simple_query("ROLLBACK".to_owned()).await.map_err(broken)?;
            return Ok(false);
        };
        connected.transaction = Some(PgRowTransaction::read(row).map_err(SessionFailure::Broken)?);
        Ok(true)
    }

    /// Returns whether a transaction holds the key's holder lock.
    async fn has_holder_lock(
        &self,
        connected: &mut PgRowConnection,
        key: &Key,
    ) -> Result<bool, SessionFailure> {
        let lock_key = Value::Number(self.table.row_id(key).holder_lock_key());
        let statement = Statement::new(&self.table.store.statements.has_holder_lock, [lock_key]);
        let rows = self.send(connected, &statement).await?;
        let row = one_row::<Postgres>(&rows).map_err(SessionFailure::Broken)?;
        flag::<Postgres>(row, 0).map_err(SessionFailure::Broken)
    }
}

impl SessionProtocol for PgRowProtocol {
    type Database = Postgres;
    type Connection = PgRowConnection;

    async fn open(table: Arc<PgLeaseTable>) -> Result<Self, BackendError> {
        Ok(Self { connections: RowLockPool::new(table.store.settings().row_locks), table })
    }

    fn table(&self) -> &PgLeaseTable {
        &self.table
    }

    async fn connect(&self) -> Result<PgRowConnection, BackendError> {
        let (permit, idle) =
            self.connections.acquire().map_err(|full| full.into_backend_error("postgres"))?;
        let connection = match idle {
            Some(connection) => connection,
            None => super::client::connect(&self.table.store.config).await?,
        };
        Ok(PgRowConnection { connection, permit, transaction: None })
    }

    async fn try_acquire(
        &self,
        connected: &mut PgRowConnection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> Result<LockAttempt, SessionFailure> {
        // The attempt is repeated if another transaction releases the row between the statement
        // that reads the row and the statement that checks the holder lock.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            match self.write_claim(connected, claim).await {
                Ok(ClaimWrite::Token(token)) => {
                    let locked = self.lock(connected, claim).await?;
                    let grant = plan.grant_from_write(claim, i64::from(token), None);
                    let grant = grant.filter(|_| locked);
                    return Ok(grant.map_or(LockAttempt::Busy(None), LockAttempt::Grant));
                }
                Ok(ClaimWrite::Leased) => return Ok(LockAttempt::Busy(None)),
                Ok(ClaimWrite::Locked) => {
                    if self.has_holder_lock(connected, claim.key()).await? {
                        return Ok(LockAttempt::Busy(None));
                    }
                }
                // The insertion of a missing row waits for a transaction that has inserted it.
                Err(SessionFailure::Rejected(error)) if Postgres::is_row_lock_error(&error) => {
                    if self.has_holder_lock(connected, claim.key()).await? {
                        return Ok(LockAttempt::Busy(None));
                    }
                    return Err(SessionFailure::Rejected(error));
                }
                Err(session_failure) => {
                    if matches!(session_failure, SessionFailure::Broken(_)) {
                        // The idle connections would probably fail in the same way.
                        self.connections.close_idle();
                    }
                    return Err(session_failure);
                }
            }
        }
        Err(SessionFailure::Rejected(row_locked()))
    }

    async fn unlock(
        &self,
        connected: &mut PgRowConnection,
        key: &Key,
    ) -> Result<(), SessionFailure> {
        let id = self.table.row_id(key);
        let notification = self.table.wakeups.notification(id);
        let statement = Statement::new(&self.table.store.statements.row_notify, notification);
        // Sent as one message. The commit sends the notification.
        connected
            .simple_query(format!("{}; COMMIT", statement.inlined::<Postgres>()))
            .await
            .map_err(broken)?;
        connected.transaction = None;
        Ok(())
    }

    async fn check_session(&self, connected: &mut PgRowConnection) -> Result<(), SessionFailure> {
        // In a failed transaction, the statement fails. Outside of a transaction, the transaction
        // id is `NULL`.
        let rows = connected.simple_query(CHECK_SESSION.to_owned()).await.map_err(broken)?;
        let row = one_row::<Postgres>(&rows).map_err(SessionFailure::Broken)?;
        let transaction_id = text::<Postgres>(row, 1).map_err(SessionFailure::Broken)?;
        let is_same_transaction = transaction_id.is_some()
            && Some(PgRowTransaction::read(row).map_err(SessionFailure::Broken)?)
                == connected.transaction;
        if is_same_transaction { Ok(()) } else { Err(SessionFailure::Broken(pooler_detected())) }
    }

    fn recycle(&self, connected: PgRowConnection) -> Option<PgRowConnection> {
        let PgRowConnection { connection, permit, transaction } = connected;
        if transaction.is_none() {
            self.connections.release(permit, connection);
        }
        None
    }

    fn close_idle(&self) {
        self.connections.close_idle();
    }
}

/// Returns the number of the advisory lock that shows for which claim a transaction has locked the
/// row. If two claims have the same number, `list` may report the wrong claim as the holder.
fn claim_lock_key(claim: ClaimId) -> i64 {
    let mut key = [0; 8];
    key.copy_from_slice(&claim.to_bytes()[..8]);
    i64::from_be_bytes(key)
}

/// Converts an error inside the transaction. Any such error ends the transaction, and with it the
/// lock.
fn broken(error: sqlx::Error) -> SessionFailure {
    SessionFailure::Broken(Postgres::explain(error))
}

fn pooler_detected() -> BackendError {
    Postgres::misconfigured(
        "the transaction that holds the row is no longer on this connection, perhaps because a pooler gives each statement another connection; connect to the server directly, or set mode=lease",
    )
}

const CHECK_SESSION: &str = "SELECT pg_backend_pid(), pg_current_xact_id_if_assigned()::text";

/// How long `write_claim` waits for another transaction that is inserting the same row.
const ROW_WAIT: Duration = Duration::from_millis(200);
