//! Locks that last as long as a connection: `pg_try_advisory_lock` on a dedicated connection.
//!
//! The connection and its queue are in `server::session`; the statements are in `sql`.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, ClaimId, FencingToken, Key};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor as _, raw_sql};
use tokio::time::timeout;

use super::backend::{PgRows, bytes, claim_id, column, from_micros, one_row};
use super::client;
use super::config::misconfigured;
use super::error::{self, corrupt, explain};
use super::statement::{BoundStatement, PgParam};
use crate::server::{
    LockAttempt, PoolError, RowId, SILENCE, SessionFailure, SessionProtocol, TokenPlan,
};

/// Sends the statements of a session.
pub(crate) struct PgSessionProtocol {
    rows: Arc<PgRows>,
}

/// A connection, and the process id of its server process.
pub(crate) struct PgSessionConnection {
    connection: PgConnection,
    server_process: i32,
}

impl PgSessionConnection {
    async fn fetch(&mut self, text: &'static str) -> Result<Vec<PgRow>, sqlx::Error> {
        self.connection.fetch_all(raw_sql(text)).await
    }

    async fn check_session(&mut self) -> Result<(), SessionFailure> {
        let rows = self.fetch(CHECK_SESSION).await.map_err(error::session_failure)?;
        self.check_process(&rows)
    }

    /// Checks that the first column is the expected process id. So a pooler that changes
    /// connections is detected no later than at the next answer.
    fn check_process(&self, rows: &[PgRow]) -> Result<(), SessionFailure> {
        let row = one_row(rows).map_err(SessionFailure::Broken)?;
        if column::<i32>(row, 0).map_err(SessionFailure::Broken)? == self.server_process {
            Ok(())
        } else {
            Err(SessionFailure::Broken(pooler_detected()))
        }
    }
}

impl PgSessionProtocol {
    /// Fails behind a pooler that changes connections between transactions.
    pub(super) async fn open(rows: Arc<PgRows>) -> Result<Self, BackendError> {
        let protocol = Self { rows };
        protocol.detect_pooler().await?;
        Ok(protocol)
    }

    /// Detects a pooler that changes connections between transactions. Leaves nothing behind on
    /// them.
    async fn detect_pooler(&self) -> Result<(), BackendError> {
        // Two simultaneous sessions must have two server processes. Otherwise a pooler shares one
        // process between both.
        let (mut one, mut two) =
            (self.connect_unconfigured().await?, self.connect_unconfigured().await?);
        let are_two = one.server_process != two.server_process;
        let probe = async {
            // The open transaction occupies one process. A pooler that shares processes serves the
            // second connection from another one, which changes its process id.
            one.fetch("BEGIN").await.map_err(error::session_failure)?;
            one.check_session().await?;
            two.check_session().await?;
            one.fetch("ROLLBACK").await.map_err(error::session_failure)
        };
        let probed = timeout(self.rows.config.response_timeout, probe).await;
        match probed
            .map_err(|_| error::timed_out(error::STORE, self.rows.config.response_timeout))?
        {
            Ok(_) if are_two => {}
            Ok(_) => return Err(pooler_detected()),
            Err(SessionFailure::Rejected(error) | SessionFailure::Broken(error)) => {
                return Err(error);
            }
        }
        for connected in [one, two] {
            // Optional: the server would notice the end of the connection anyway.
            let _ = timeout(self.rows.config.connect_timeout, connected.connection.close()).await;
        }
        Ok(())
    }

    async fn connect_unconfigured(&self) -> Result<PgSessionConnection, BackendError> {
        let mut connection = client::connect(&self.rows.config).await?;
        let query =
            timeout(self.rows.config.connect_timeout, connection.fetch_all(raw_sql(CHECK_SESSION)));
        let rows =
            query.await.map_err(|_| error::not_connected(PoolError::TimedOut))?.map_err(explain)?;
        let row = one_row(&rows)?;
        Ok(PgSessionConnection { server_process: column(row, 0)?, connection })
    }

    async fn send(
        &self,
        connected: &mut PgSessionConnection,
        statement: &BoundStatement<'_>,
    ) -> Result<Vec<PgRow>, SessionFailure> {
        let rows = statement.send(&mut connected.connection, self.rows.config.query_mode()).await;
        let rows = rows.map_err(error::session_failure)?;
        connected.check_process(&rows)?;
        Ok(rows)
    }

    fn row_id(&self, key: &Key) -> RowId {
        self.rows.row_id(key)
    }

    async fn attempt(
        &self,
        connected: &mut PgSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> Result<LockAttempt, SessionFailure> {
        let Some(last) = &plan.last else {
            return self.write_claim(connected, claim, plan, WriteMode::Acquired).await;
        };
        let id = self.row_id(claim.key());
        let values = [
            PgParam::Number(id.advisory_lock_key()),
            bytes(id.bytes()),
            bytes(&last.claim.to_bytes()),
        ];
        let statement = BoundStatement::new(&self.rows.texts.session_try_lock, values).inlined();
        let rows = connected.connection.fetch_all(raw_sql(AssertSqlSafe(statement))).await;
        let rows = rows.map_err(error::session_failure)?;
        connected.check_process(&rows)?;
        if !column::<bool>(&rows[0], 1).map_err(SessionFailure::Broken)? {
            return Ok(LockAttempt::Busy(None));
        }
        let Some(row) = rows.get(1) else {
            return self.write_claim(connected, claim, plan, WriteMode::AlreadyLocked).await;
        };
        match plan.grant_from_reservation(column(row, 0).map_err(SessionFailure::Broken)?) {
            Some(granted) => Ok(LockAttempt::Grant(granted)),
            None => self.write_claim(connected, claim, plan, WriteMode::Consecutive).await,
        }
    }

    /// Writes the claim and a larger token to the row, unless another client holds the row by a
    /// lease.
    async fn write_claim(
        &self,
        connected: &mut PgSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
        mode: WriteMode,
    ) -> Result<LockAttempt, SessionFailure> {
        let id = self.row_id(claim.key());
        let is_consecutive = mode == WriteMode::Consecutive;
        let texts = &self.rows.texts;
        let text = if mode == WriteMode::Acquired {
            &texts.session_acquire
        } else {
            &texts.session_write_claim
        };
        let statement = BoundStatement::new(
            text,
            [
                bytes(id.bytes()),
                bytes(self.rows.config.namespace.as_bytes()),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                PgParam::Number(plan.tokens_to_write(is_consecutive)),
                PgParam::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec())),
                PgParam::Number(id.advisory_lock_key()),
                PgParam::Identifier(format!("{}ms", ROW_WAIT.as_millis())),
            ],
        );
        let rows = self.send(connected, &statement).await?;
        let row = &rows[0];
        let Some(token) = column::<Option<i64>>(row, 2).map_err(SessionFailure::Broken)? else {
            if column::<bool>(row, 4).map_err(SessionFailure::Broken)? {
                return Ok(LockAttempt::RowLocked(error::row_locked()));
            }
            let left = column::<Option<i64>>(row, 3).map_err(SessionFailure::Broken)?;
            return Ok(LockAttempt::Busy(left.map(from_micros)));
        };
        let granted = plan.grant_from_write(claim, token, is_consecutive).map(LockAttempt::Grant);
        granted.ok_or_else(|| SessionFailure::Broken(corrupt("a row's token is invalid")))
    }
}

/// How the session obtains the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteMode {
    Acquired,
    /// The session has the advisory lock already. The previous holder is unknown.
    AlreadyLocked,
    /// The session has the advisory lock already, and no other client had it since the session's
    /// last grant.
    Consecutive,
}

impl SessionProtocol for PgSessionProtocol {
    type Connection = PgSessionConnection;

    async fn connect(&self) -> Result<PgSessionConnection, BackendError> {
        let mut connected = self.connect_unconfigured().await?;
        let configure = async {
            // The server checks the connection as well. On a Unix socket some of these settings
            // have no effect.
            let seconds = SILENCE.as_secs();
            let lock_timeout = self.rows.config.busy_timeout.as_millis().max(1);
            let text = format!(
                "SET default_transaction_isolation = 'read committed'; SET lock_timeout = {lock_timeout}; SET idle_session_timeout = '{seconds}s'; SET tcp_user_timeout = '{seconds}s'; SET tcp_keepalives_idle = {}; \
                 SET tcp_keepalives_interval = {}; SET tcp_keepalives_count = 3; {}; {CHECK_SESSION}",
                seconds / 2,
                seconds / 6,
                self.rows.texts.session_prepare.as_str(),
            );
            let rows = connected.connection.fetch_all(raw_sql(AssertSqlSafe(text))).await;
            connected.check_process(&rows.map_err(error::session_failure)?)
        };
        let configured = timeout(self.rows.config.connect_timeout, configure).await;
        match configured.map_err(|_| error::not_connected(PoolError::TimedOut))? {
            Ok(()) => Ok(connected),
            Err(SessionFailure::Rejected(error) | SessionFailure::Broken(error)) => Err(error),
        }
    }

    async fn try_acquire(
        &self,
        connected: &mut PgSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> Result<LockAttempt, SessionFailure> {
        match self.attempt(connected, claim, plan).await {
            Err(SessionFailure::Rejected(error)) => {
                // The session keeps the advisory lock even if the statement that acquired it
                // failed.
                self.unlock(connected, claim.key()).await?;
                if error::is_row_lock_error(&error) {
                    return Ok(LockAttempt::RowLocked(error));
                }
                Err(SessionFailure::Rejected(error))
            }
            attempt => attempt,
        }
    }

    async fn unlock(
        &self,
        connected: &mut PgSessionConnection,
        key: &Key,
    ) -> Result<(), SessionFailure> {
        let id = self.row_id(key);
        let [channel, message, presence_lock] = self.rows.notification_params(id);
        let values = [PgParam::Number(id.advisory_lock_key()), channel, message, presence_lock];
        let statement = BoundStatement::new(&self.rows.texts.session_unlock, values).at_most_one();
        self.send(connected, &statement).await.map(drop).map_err(SessionFailure::into_broken)
    }

    async fn check_session(
        &self,
        connected: &mut PgSessionConnection,
    ) -> Result<(), SessionFailure> {
        connected.check_session().await
    }

    async fn ensure_row(
        &self,
        connected: &mut PgSessionConnection,
        claim: &Claim,
        token: FencingToken,
        row_claim: ClaimId,
    ) -> Result<(), SessionFailure> {
        let statement = BoundStatement::new(
            &self.rows.texts.session_ensure_row,
            [
                bytes(self.row_id(claim.key()).bytes()),
                bytes(self.rows.config.namespace.as_bytes()),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                PgParam::Number(i64::from(token)),
                PgParam::Number(i64::from(claim.token_block())),
                PgParam::Identifier(format!("{}ms", ROW_WAIT.as_millis())),
                bytes(&row_claim.to_bytes()),
            ],
        );
        self.send(connected, &statement).await.map(drop)
    }

    fn name(&self, key: &Key) -> Vec<u8> {
        self.row_id(key).advisory_lock_key().to_be_bytes().to_vec()
    }

    async fn wait(&self, key: &Key, position: u64) {
        self.rows.wait_for_release(key, position).await;
    }

    fn store(&self) -> &str {
        error::STORE
    }

    fn response_timeout(&self) -> Duration {
        self.rows.config.response_timeout
    }
}

fn pooler_detected() -> BackendError {
    misconfigured(
        "session locks do not work through a pooler that gives each transaction another connection; connect past it, or use leases",
    )
}

const CHECK_SESSION: &str = "SELECT pg_backend_pid()";

/// How long a statement waits for a row that another transaction has inserted and not committed.
/// All locks of the session wait with it.
const ROW_WAIT: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advisory_lock_keys_match_the_documentation() {
        let number = |namespace: &str, key: &str| {
            RowId::new(namespace, &Key::new(key).unwrap()).advisory_lock_key()
        };
        assert_eq!(number("default", "orders/42"), 0x03c4_a6d0_3c53_a5b0);
        assert_ne!(number("a", "bc"), number("ab", "c"));
        // A number whose first bit is set is negative.
        assert!((0..64).any(|n| number("default", &n.to_string()) < 0));
    }
}
