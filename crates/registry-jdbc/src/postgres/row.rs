//! Locks that are rows: a transaction of this backend keeps each row locked for as long as the lock
//! is held, by `SELECT … FOR NO KEY UPDATE`.
//!
//! The connections and their queues are in `server::sessions`; the statements are in `sql`.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, ClaimId, FencingToken, Key};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Executor as _, raw_sql};

use super::backend::{PgRows, bytes, claim_id, column, one_row};
use super::config::misconfigured;
use super::error::{self, corrupt, explain, row_locked};
use super::statement::{BoundStatement, PgParam};
use crate::server::{
    LockAttempt, RowId, RowLockConnections, RowLockPermit, SILENCE, SessionFailure,
    SessionProtocol, TokenPlan,
};

/// Sends the statements of one lock's session.
pub(crate) struct PgRowProtocol {
    rows: Arc<PgRows>,
    connections: RowLockConnections<PgConnection>,
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
    number: String,
}

impl PgRowTransaction {
    fn read(row: &PgRow) -> Result<Self, BackendError> {
        Ok(Self { server_process: column(row, 0)?, number: column(row, 1)? })
    }
}

impl PgRowConnection {
    /// Sends plain text, so that it works on any connection that a pooler assigns.
    async fn fetch(&mut self, text: String) -> Result<Vec<PgRow>, sqlx::Error> {
        self.connection.fetch_all(raw_sql(AssertSqlSafe(text))).await
    }
}

/// The result of the first step.
enum ClaimWrite {
    Token(FencingToken),
    /// Another client holds a lease.
    Leased,
    /// Another transaction has locked the row.
    Locked,
}

impl PgRowProtocol {
    pub(super) fn new(rows: Arc<PgRows>) -> Self {
        Self { connections: RowLockConnections::new(rows.config.row_locks), rows }
    }

    fn row_id(&self, key: &Key) -> RowId {
        self.rows.row_id(key)
    }

    /// Writes the claim and a larger token to the row, unless another client holds the row. Does
    /// not wait for locked rows.
    async fn write_claim(
        &self,
        connected: &mut PgRowConnection,
        claim: &Claim,
    ) -> Result<ClaimWrite, SessionFailure> {
        let id = self.row_id(claim.key());
        let statement = BoundStatement::new(
            &self.rows.texts.row_write_claim,
            [
                bytes(id.bytes()),
                bytes(self.rows.config.namespace.as_bytes()),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                PgParam::Number(i64::from(claim.token_block())),
                PgParam::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec())),
                PgParam::Identifier(format!("{}ms", ROW_WAIT.as_millis())),
            ],
        );
        let rows =
            statement.send(&mut connected.connection, self.rows.config.simple_query_mode()).await;
        let rows = rows.map_err(error::session_failure)?;
        let row = one_row(&rows).map_err(SessionFailure::Broken)?;
        if let Some(token) = column::<Option<i64>>(row, 0).map_err(SessionFailure::Broken)? {
            let token = FencingToken::try_from(token);
            let token =
                token.map_err(|_| SessionFailure::Broken(corrupt("a row's token is negative")))?;
            return Ok(ClaimWrite::Token(token));
        }
        let is_leased: bool = column(row, 1).map_err(SessionFailure::Broken)?;
        Ok(if is_leased { ClaimWrite::Leased } else { ClaimWrite::Locked })
    }

    /// Locks the row if it still contains the claim.
    async fn lock(
        &self,
        connected: &mut PgRowConnection,
        claim: &Claim,
    ) -> Result<bool, SessionFailure> {
        let id = self.row_id(claim.key());
        let silence = PgParam::Identifier(format!("{}s", SILENCE.as_secs()));
        let statement = BoundStatement::new(
            &self.rows.texts.row_lock,
            [
                bytes(id.bytes()),
                claim_id(claim),
                PgParam::Number(id.transaction_mark()),
                silence,
                PgParam::Number(claim_mark(claim.id())),
            ],
        );
        // Sent as one message. The settings end with the transaction.
        let lock_timeout = self.rows.config.busy_timeout.as_millis().max(1);
        let text = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = {lock_timeout}; {}",
            statement.inlined()
        );
        let rows = connected.fetch(text).await.map_err(broken)?;
        let Some(row) = rows.last() else {
            connected.fetch("ROLLBACK".to_owned()).await.map_err(broken)?;
            return Ok(false);
        };
        connected.transaction = Some(PgRowTransaction::read(row).map_err(SessionFailure::Broken)?);
        Ok(true)
    }

    /// Returns whether a transaction has marked itself as holding this lock.
    async fn is_marked(
        &self,
        connected: &mut PgRowConnection,
        key: &Key,
    ) -> Result<bool, SessionFailure> {
        let mark = PgParam::Number(self.row_id(key).transaction_mark());
        let statement = BoundStatement::new(&self.rows.texts.locked_in, [mark]);
        let rows =
            statement.send(&mut connected.connection, self.rows.config.simple_query_mode()).await;
        let rows = rows.map_err(error::session_failure)?;
        let row = one_row(&rows).map_err(SessionFailure::Broken)?;
        column(row, 0).map_err(SessionFailure::Broken)
    }
}

impl SessionProtocol for PgRowProtocol {
    type Connection = PgRowConnection;

    async fn connect(&self) -> Result<PgRowConnection, BackendError> {
        let (permit, idle) =
            self.connections.acquire().map_err(|full| full.into_backend_error("postgres"))?;
        let connection = match idle {
            Some(connection) => connection,
            None => super::client::connect(&self.rows.config).await?,
        };
        Ok(PgRowConnection { connection, permit, transaction: None })
    }

    async fn try_acquire(
        &self,
        connected: &mut PgRowConnection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> Result<LockAttempt, SessionFailure> {
        // The other transaction may release the row between the statement that reads the row and
        // the one that reads the mark.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            match self.write_claim(connected, claim).await {
                Ok(ClaimWrite::Token(token)) => {
                    let locked = self.lock(connected, claim).await?;
                    let taken = plan.grant_from_write(claim, i64::from(token), false);
                    let taken = taken.filter(|_| locked);
                    return Ok(taken.map_or(LockAttempt::Busy(None), LockAttempt::Grant));
                }
                Ok(ClaimWrite::Leased) => return Ok(LockAttempt::Busy(None)),
                Ok(ClaimWrite::Locked) => {
                    if self.is_marked(connected, claim.key()).await? {
                        return Ok(LockAttempt::Busy(None));
                    }
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
        let id = self.row_id(key);
        let statement =
            BoundStatement::new(&self.rows.texts.row_notify, self.rows.notification_params(id));
        // Sent as one message. The commit sends the notification.
        connected.fetch(format!("{}; COMMIT", statement.inlined())).await.map_err(broken)?;
        connected.transaction = None;
        Ok(())
    }

    async fn check_session(&self, connected: &mut PgRowConnection) -> Result<(), SessionFailure> {
        // The statement fails in a failed transaction. Without a transaction the number is `NULL`.
        let rows = connected.fetch(CHECK_SESSION.to_owned()).await.map_err(broken)?;
        let row = one_row(&rows).map_err(SessionFailure::Broken)?;
        let number: Option<String> = column(row, 1).map_err(SessionFailure::Broken)?;
        let is_same_transaction = number.is_some()
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

    fn name(&self, key: &Key) -> Vec<u8> {
        self.row_id(key).bytes().to_vec()
    }

    async fn wait(&self, key: &Key, position: u64) {
        self.rows.wait_for_release(key, position).await;
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

/// Returns the mark of the transaction that holds the lock for this claim. If two claims have the
/// same mark, a holder may be listed under the wrong name.
fn claim_mark(claim: ClaimId) -> i64 {
    let mut mark = [0; 8];
    mark.copy_from_slice(&claim.to_bytes()[..8]);
    i64::from_be_bytes(mark)
}

/// Any error ends the transaction, and with it the lock.
fn broken(error: sqlx::Error) -> SessionFailure {
    SessionFailure::Broken(explain(error))
}

fn pooler_detected() -> BackendError {
    misconfigured(
        "the row's transaction is no longer on this connection; a pooler may give each statement another connection",
    )
}

const CHECK_SESSION: &str = "SELECT pg_backend_pid(), pg_current_xact_id_if_assigned()::text";

/// How long the first step waits for another transaction that is inserting the same row.
const ROW_WAIT: Duration = Duration::from_millis(200);
