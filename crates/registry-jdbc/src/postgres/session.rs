//! Session locks: `pg_try_advisory_lock` on a dedicated connection, so the locks last as long as
//! the connection.
//!
//! The connection and its queue are in `server::session`; the statements are in `sql`.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, ClaimId, FencingToken, Key};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Connection, Postgres, Row as _};
use tokio::time::timeout;

use super::backend::PgLeaseTable;
use super::client;
use super::error::{self, corrupt};
use super::statement::{send, simple_query};
use crate::server::statement::{flag, from_micros, maybe_number, number, one_row};
use crate::server::{
    IDLE_TIMEOUT, LockAttempt, PoolError, ServerErrors as _, SessionFailure, SessionProtocol,
    Statement, TokenPlan, Value, WakeupSource as _,
};

/// Sends the statements of a session.
pub(crate) struct PgSessionProtocol {
    table: Arc<PgLeaseTable>,
}

/// A connection with the id of its server process.
pub(crate) struct PgSessionConnection {
    connection: PgConnection,
    server_process: i32,
}

impl PgSessionConnection {
    /// Sends `text` by the simple query protocol. Fails unless the first row begins with the id of
    /// this session's server process.
    async fn simple_query(
        &mut self,
        text: impl Into<String>,
    ) -> Result<Vec<PgRow>, SessionFailure> {
        let rows = simple_query(&mut self.connection, text.into()).await;
        let rows = rows.map_err(error::session_failure)?;
        self.check_process(&rows)?;
        Ok(rows)
    }

    /// Returns an error if a pooler has assigned another server process.
    fn check_process(&self, rows: &[PgRow]) -> Result<(), SessionFailure> {
        if server_process(rows).map_err(SessionFailure::Broken)? == self.server_process {
            Ok(())
        } else {
            Err(SessionFailure::Broken(pooler_detected()))
        }
    }
}

impl PgSessionProtocol {
    /// Returns an error if a pooler changes connections between transactions. Leaves no session
    /// state on the connections.
    async fn detect_pooler(&self) -> Result<(), BackendError> {
        // Two simultaneous sessions must have two server processes. Otherwise a pooler shares one
        // process between the two sessions.
        let (mut one, mut two) =
            (self.connect_unconfigured().await?, self.connect_unconfigured().await?);
        if one.server_process == two.server_process {
            return Err(pooler_detected());
        }
        let probe = async {
            // The open transaction of `one` occupies a process. If `two` used this process before,
            // a pooler must now assign another process to `two`, which `check_process` detects.
            one.simple_query(format!("BEGIN; {CHECK_SESSION}")).await?;
            two.simple_query(CHECK_SESSION).await?;
            one.simple_query(format!("{CHECK_SESSION}; ROLLBACK")).await
        };
        let probed = timeout(self.table.store.settings().response_timeout, probe).await;
        match probed.map_err(|_| {
            error::timed_out(error::STORE, self.table.store.settings().response_timeout)
        })? {
            Ok(_) => {}
            Err(SessionFailure::Rejected(error) | SessionFailure::Broken(error)) => {
                return Err(error);
            }
        }
        for connected in [one, two] {
            // Errors are ignored, because the server also notices the closed socket.
            let _ =
                timeout(self.table.store.settings().connect_timeout, connected.connection.close())
                    .await;
        }
        Ok(())
    }

    async fn connect_unconfigured(&self) -> Result<PgSessionConnection, BackendError> {
        let config = &self.table.store.config;
        let mut connection = client::connect(config).await?;
        let query = timeout(
            config.settings.connect_timeout,
            simple_query(&mut connection, CHECK_SESSION.into()),
        );
        let rows = query
            .await
            .map_err(|_| error::not_connected(PoolError::TimedOut))?
            .map_err(Postgres::explain)?;
        Ok(PgSessionConnection { server_process: server_process(&rows)?, connection })
    }

    async fn send(
        &self,
        connected: &mut PgSessionConnection,
        statement: &Statement<'_>,
    ) -> Result<Vec<PgRow>, SessionFailure> {
        let query_mode = self.table.store.config.query_mode();
        let answer = send(&mut connected.connection, statement, query_mode).await;
        let rows = answer.map_err(error::session_failure)?.rows;
        connected.check_process(&rows)?;
        Ok(rows)
    }

    async fn attempt(
        &self,
        connected: &mut PgSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> Result<LockAttempt, SessionFailure> {
        let Some(last) = &plan.last_row else {
            return self.write_claim(connected, claim, plan, AdvisoryLockState::NotHeld).await;
        };
        let id = self.table.row_id(claim.key());
        let (lock_key, row_claim) =
            (Value::Number(id.advisory_lock_key()), Value::bytes(&last.claim.to_bytes()));
        let values = [lock_key, self.table.id_value(claim.key()), row_claim];
        let statement = Statement::new(&self.table.store.statements.session_try_lock, values);
        let rows = connected.simple_query(statement.inlined::<Postgres>()).await?;
        if !flag::<Postgres>(&rows[0], 1).map_err(SessionFailure::Broken)? {
            return Ok(LockAttempt::Busy(None));
        }
        let Some(row) = rows.get(1) else {
            return self.write_claim(connected, claim, plan, AdvisoryLockState::Held).await;
        };
        let now = number::<Postgres>(row, 0).map_err(SessionFailure::Broken)?;
        match plan.grant_from_reservation(now) {
            Some(granted) => Ok(LockAttempt::Grant(granted)),
            None => {
                let lock_state = AdvisoryLockState::HeldAndUnchanged { now };
                self.write_claim(connected, claim, plan, lock_state).await
            }
        }
    }

    /// Acquires the advisory lock if `lock_state` is `NotHeld`. Then writes the claim and a larger
    /// token to the row, unless another client holds a lease or has locked the row.
    async fn write_claim(
        &self,
        connected: &mut PgSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
        lock_state: AdvisoryLockState,
    ) -> Result<LockAttempt, SessionFailure> {
        let id = self.table.row_id(claim.key());
        let now_if_unchanged = match lock_state {
            AdvisoryLockState::HeldAndUnchanged { now } => Some(now),
            AdvisoryLockState::NotHeld | AdvisoryLockState::Held => None,
        };
        let statements = &self.table.store.statements;
        let text = if lock_state == AdvisoryLockState::NotHeld {
            &statements.session_acquire
        } else {
            &statements.session_write_claim
        };
        let statement = Statement::new(
            text,
            [
                self.table.id_value(claim.key()),
                self.table.namespace_value(),
                Value::key(claim.key()),
                Value::claim(claim),
                Value::Number(plan.tokens_to_write(now_if_unchanged)),
                Value::label(claim),
                Value::Number(id.advisory_lock_key()),
                Value::Text(format!("{}ms", ROW_WAIT.as_millis())),
            ],
        );
        let rows = self.send(connected, &statement).await?;
        let row = &rows[0];
        let column = |index| maybe_number::<Postgres>(row, index).map_err(SessionFailure::Broken);
        let Some(token) = column(2)? else {
            if flag::<Postgres>(row, 4).map_err(SessionFailure::Broken)? {
                return Ok(LockAttempt::RowLocked(error::row_locked()));
            }
            let left = column(3)?;
            return Ok(LockAttempt::Busy(left.map(from_micros)));
        };
        let granted = plan.grant_from_write(claim, token, now_if_unchanged).map(LockAttempt::Grant);
        granted.ok_or_else(|| SessionFailure::Broken(corrupt("a row's token is invalid")))
    }
}

/// The state of the advisory lock before the claim is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AdvisoryLockState {
    /// The session does not hold the advisory lock. The statement acquires it.
    NotHeld,
    /// The session already holds the advisory lock. Another client may have been granted the key
    /// since this session's last grant.
    Held,
    /// The session already holds the advisory lock. No other client was granted the key since this
    /// session's last grant.
    HeldAndUnchanged {
        /// The server's time.
        now: i64,
    },
}

impl SessionProtocol for PgSessionProtocol {
    type Database = Postgres;
    type Connection = PgSessionConnection;

    /// Returns an error behind a pooler that changes connections between transactions.
    async fn open(table: Arc<PgLeaseTable>) -> Result<Self, BackendError> {
        let protocol = Self { table };
        protocol.detect_pooler().await?;
        Ok(protocol)
    }

    fn table(&self) -> &PgLeaseTable {
        &self.table
    }

    async fn connect(&self) -> Result<PgSessionConnection, BackendError> {
        let mut connected = self.connect_unconfigured().await?;
        let configure = async {
            // The idle and TCP settings make the server end a dead connection. The TCP settings
            // have no effect on a Unix socket.
            let seconds = IDLE_TIMEOUT.as_secs();
            let lock_timeout = self.table.store.settings().busy_timeout.as_millis().max(1);
            let text = format!(
                "SET default_transaction_isolation = 'read committed'; SET lock_timeout = {lock_timeout}; SET idle_session_timeout = '{seconds}s'; SET tcp_user_timeout = '{seconds}s'; SET tcp_keepalives_idle = {}; \
                 SET tcp_keepalives_interval = {}; SET tcp_keepalives_count = 3; {}; {CHECK_SESSION}",
                seconds / 2,
                seconds / 6,
                self.table.store.statements.session_prepare.as_str(),
            );
            connected.simple_query(text).await
        };
        let configured = timeout(self.table.store.settings().connect_timeout, configure).await;
        match configured.map_err(|_| error::not_connected(PoolError::TimedOut))? {
            Ok(_) => Ok(connected),
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
                // A session keeps an advisory lock even if the acquiring statement fails.
                self.unlock(connected, claim.key()).await?;
                if Postgres::is_row_lock_error(&error) {
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
        let id = self.table.row_id(key);
        let mut values = vec![Value::Number(id.advisory_lock_key())];
        values.extend(self.table.wakeups.notification(id));
        let text = &self.table.store.statements.session_unlock;
        let statement = Statement::new(text, values).with_at_most_one_row();
        self.send(connected, &statement).await.map(drop).map_err(SessionFailure::into_broken)
    }

    async fn check_session(
        &self,
        connected: &mut PgSessionConnection,
    ) -> Result<(), SessionFailure> {
        connected.simple_query(CHECK_SESSION).await.map(drop)
    }

    async fn ensure_row(
        &self,
        connected: &mut PgSessionConnection,
        claim: &Claim,
        token: FencingToken,
        row_claim: ClaimId,
    ) -> Result<(), SessionFailure> {
        let statement = Statement::new(
            &self.table.store.statements.session_ensure_row,
            [
                self.table.id_value(claim.key()),
                self.table.namespace_value(),
                Value::key(claim.key()),
                Value::claim(claim),
                Value::token(token),
                Value::token_block(claim),
                Value::Text(format!("{}ms", ROW_WAIT.as_millis())),
                Value::bytes(&row_claim.to_bytes()),
            ],
        );
        self.send(connected, &statement).await.map(drop)
    }

    fn lock_name(&self, key: &Key) -> Vec<u8> {
        self.table.row_id(key).advisory_lock_key().to_be_bytes().to_vec()
    }
}

/// Reads the process id in the first column.
fn server_process(rows: &[PgRow]) -> Result<i32, BackendError> {
    one_row::<Postgres>(rows)?.try_get(0).map_err(Postgres::explain)
}

fn pooler_detected() -> BackendError {
    Postgres::misconfigured(
        "session locks do not work through a pooler in transaction mode; connect to the server directly, or set mode=lease",
    )
}

const CHECK_SESSION: &str = "SELECT pg_backend_pid()";

/// How long a statement waits for another transaction that has inserted the row without a commit
/// or, in `ensure_row`, has locked the row. All commands of the session wait during that time.
const ROW_WAIT: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::RowId;

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
