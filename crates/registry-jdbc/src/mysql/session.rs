//! Session locks: `GET_LOCK` on a dedicated connection, so the locks live as long as the
//! connection.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, ClaimId, FencingToken, Key};
use sqlx::mysql::MySqlRow;
use sqlx::{Connection, MySql, MySqlConnection, Row, query};
use tokio::time::timeout;

use super::backend::MySqlLeaseTable;
use super::client::{read, send_once};
use super::config::MySqlConfig;
use super::error;
use super::release_poller;
use super::sql;
use crate::server::statement::{corrupt, maybe_number};
use crate::server::{
    IDLE_TIMEOUT, LockAttempt, PoolError, ServerErrors as _, SessionFailure, SessionGrant,
    SessionProtocol, StatementText, TokenPlan, Value,
};

/// Sends the statements of a session.
pub(crate) struct MySqlSessionProtocol {
    table: Arc<MySqlLeaseTable>,
}

/// A connection with its id on the server.
pub(crate) struct MySqlSessionConnection {
    connection: MySqlConnection,
    id: u64,
}

impl MySqlSessionConnection {
    /// Checks that the first column is the id of this connection. A proxy that changes connections
    /// returns another id.
    fn check_connection(&self, row: &MySqlRow) -> Result<(), SessionFailure> {
        if read::<u64>(row, 0)? == self.id {
            return Ok(());
        }
        Err(SessionFailure::Broken(MySql::misconfigured(
            "session locks do not work through a proxy that gives each statement another connection; connect to the server directly, or set mode=lease",
        )))
    }
}

impl MySqlSessionProtocol {
    /// Returns whether the named lock is free and the key has no lease.
    async fn is_free(&self, key: &Key) -> Result<bool, BackendError> {
        let values = [self.lock_name_value(key), self.table.id_value(key)];
        let text = &self.table.store.statements.session_is_free;
        let rows = self.table.store.query(text, values).await?;
        let free = rows.first().map(|row| maybe_number::<MySql>(row, 0)).transpose()?;
        Ok(free.flatten() != Some(0))
    }

    fn lock_name_value(&self, key: &Key) -> Value {
        Value::Text(self.table.row_id(key).hex())
    }

    /// Sends a query for the connection's id and a number. Checks the id, and returns the number.
    /// `lock_name` is the query's parameter, if it has one.
    async fn fetch_number(
        &self,
        connected: &mut MySqlSessionConnection,
        text: &'static str,
        lock_name: Option<Value>,
    ) -> Result<Option<i64>, SessionFailure> {
        let text = StatementText::positional(text, &[]);
        let rows =
            send_once(&mut connected.connection, &text, Vec::from_iter(lock_name)).await?.rows;
        let row = one_row(&rows)?;
        connected.check_connection(row)?;
        read(row, 1)
    }

    /// Issues the token after the named lock was acquired. Writes the claim, unless the token was
    /// reserved. Returns `None` if the key has a lease.
    ///
    /// `now_if_unchanged` is the server's time if the row still contains this session's last claim.
    async fn grant(
        &self,
        connected: &mut MySqlSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
        now_if_unchanged: Option<i64>,
    ) -> Result<Option<SessionGrant>, SessionFailure> {
        if let Some(granted) = now_if_unchanged.and_then(|now| plan.grant_from_reservation(now)) {
            return Ok(Some(granted));
        }
        let values = [
            self.table.id_value(claim.key()),
            self.table.namespace_value(),
            Value::key(claim.key()),
            Value::claim(claim),
            Value::Number(plan.tokens_to_write(now_if_unchanged)),
            Value::label(claim),
        ];
        let text = &self.table.store.statements.session_write_claim;
        let token = send_once(&mut connected.connection, text, values).await?.last_insert_id;
        if token == 0 {
            // No claim was written: the key has a lease, or the server is read-only.
            return self.check_session(connected).await.map(|()| None);
        }
        let token = i64::try_from(token).ok();
        let granted =
            token.and_then(|token| plan.grant_from_write(claim, token, now_if_unchanged)).map(Some);
        granted.ok_or_else(|| SessionFailure::Broken(corrupt::<MySql>("a row's token is invalid")))
    }

    /// Acquires the named lock. Returns whether it was free, and the server's time if the row still
    /// contains `row_claim`.
    async fn lock_and_read(
        &self,
        connected: &mut MySqlSessionConnection,
        key: &Key,
        row_claim: ClaimId,
    ) -> Result<(bool, Option<i64>), SessionFailure> {
        let values = try_lock_values(&self.table, key, row_claim, 0);
        let text = &self.table.store.statements.session_try_lock;
        let rows = send_once(&mut connected.connection, text, values).await?.rows;
        let row = one_row(&rows)?;
        connected.check_connection(row)?;
        let is_acquired = read::<Option<i64>>(row, 1)? == Some(1);
        Ok((is_acquired, read(row, 2)?))
    }
}

/// Returns the parameters of `session_try_lock`. The name of the named lock is the row's id.
pub(super) fn try_lock_values(
    table: &MySqlLeaseTable,
    key: &Key,
    row_claim: ClaimId,
    lock_timeout_seconds: i64,
) -> [Value; 4] {
    [
        table.id_value(key),
        Value::bytes(&row_claim.to_bytes()),
        Value::Text(table.row_id(key).hex()),
        Value::Number(lock_timeout_seconds),
    ]
}

fn one_row(rows: &[MySqlRow]) -> Result<&MySqlRow, SessionFailure> {
    crate::server::statement::one_row::<MySql>(rows).map_err(SessionFailure::Broken)
}

impl SessionProtocol for MySqlSessionProtocol {
    type Database = MySql;
    type Connection = MySqlSessionConnection;

    async fn open(table: Arc<MySqlLeaseTable>) -> Result<Self, BackendError> {
        Ok(Self { table })
    }

    fn table(&self) -> &MySqlLeaseTable {
        &self.table
    }

    async fn connect(&self) -> Result<MySqlSessionConnection, BackendError> {
        let connecting = async {
            let mut connection = connect(&self.table.store.config, IDLE_TIMEOUT).await?;
            sqlx::raw_sql(sql::SESSION_WAITS_FOR_NO_ROW).execute(&mut connection).await?;
            let row = query(CHECK_SESSION).fetch_one(&mut connection).await?;
            Ok(MySqlSessionConnection { id: row.try_get(0)?, connection })
        };
        match timeout(self.table.store.settings().connect_timeout, connecting).await {
            Ok(connected) => {
                connected.map_err(|error| error::not_connected(PoolError::Sqlx(error)))
            }
            Err(_) => Err(error::not_connected(PoolError::TimedOut)),
        }
    }

    async fn try_acquire(
        &self,
        connected: &mut MySqlSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> Result<LockAttempt, SessionFailure> {
        const TRY_LOCK: &str = "SELECT CONNECTION_ID(), CAST(GET_LOCK($1, 0) AS SIGNED)";
        let locked = match &plan.last_row {
            None => {
                let name = Some(self.lock_name_value(claim.key()));
                let acquired = self.fetch_number(connected, TRY_LOCK, name).await;
                acquired.map(|acquired| (acquired == Some(1), None))
            }
            Some(last) => self.lock_and_read(connected, claim.key(), last.claim).await,
        };
        let granted = match locked {
            Ok((false, _)) => return Ok(LockAttempt::Busy(None)),
            Ok((true, now_if_unchanged)) => {
                self.grant(connected, claim, plan, now_if_unchanged).await
            }
            Err(failure) => Err(failure),
        };
        match granted {
            Ok(Some(granted)) => Ok(LockAttempt::Grant(granted)),
            Ok(None) => self.unlock(connected, claim.key()).await.map(|()| LockAttempt::Busy(None)),
            Err(SessionFailure::Rejected(error)) => {
                // The session holds the named lock if a later statement failed, and may hold it if
                // this statement was interrupted.
                self.unlock(connected, claim.key()).await?;
                if MySql::is_row_lock_error(&error) {
                    return Ok(LockAttempt::RowLocked(error));
                }
                Err(SessionFailure::Rejected(error))
            }
            Err(broken) => Err(broken),
        }
    }

    async fn unlock(
        &self,
        connected: &mut MySqlSessionConnection,
        key: &Key,
    ) -> Result<(), SessionFailure> {
        const UNLOCK: &str = "SELECT CONNECTION_ID(), CAST(RELEASE_LOCK($1) AS SIGNED)";
        let unlocked = self.fetch_number(connected, UNLOCK, Some(self.lock_name_value(key))).await;
        unlocked.map(drop).map_err(SessionFailure::into_broken)
    }

    async fn check_session(
        &self,
        connected: &mut MySqlSessionConnection,
    ) -> Result<(), SessionFailure> {
        match self.fetch_number(connected, CHECK_SESSION, None).await? {
            Some(0) => Err(SessionFailure::Broken(error::read_only(error::STORE))),
            _ => Ok(()),
        }
    }

    async fn ensure_row(
        &self,
        connected: &mut MySqlSessionConnection,
        claim: &Claim,
        token: FencingToken,
        row_claim: ClaimId,
    ) -> Result<(), SessionFailure> {
        let (statements, id) = (&self.table.store.statements, self.table.id_value(claim.key()));
        let (claim_value, token, block) =
            (Value::claim(claim), Value::token(token), Value::token_block(claim));
        if row_claim != claim.id() {
            let earlier_claim = Value::bytes(&row_claim.to_bytes());
            let values =
                [id.clone(), claim_value.clone(), token.clone(), block.clone(), earlier_claim];
            send_once(&mut connected.connection, &statements.session_update_claim, values).await?;
        }
        let (namespace, key) = (self.table.namespace_value(), Value::key(claim.key()));
        let values = [id, namespace, key, claim_value, token, block];
        send_once(&mut connected.connection, &statements.session_ensure_row, values).await.map(drop)
    }

    /// The servers send no notifications, so this polls at growing intervals.
    async fn wait(&self, key: &Key, _: u64) {
        release_poller::poll_until_free(|| self.is_free(key)).await;
    }
}

/// Opens a connection outside of the pool. The server closes the connection after `idle_timeout`
/// without a statement.
pub(super) async fn connect(
    config: &MySqlConfig,
    idle_timeout: Duration,
) -> Result<MySqlConnection, sqlx::Error> {
    let mut connection = MySqlConnection::connect_with(&config.connect_options()).await?;
    sqlx::raw_sql(sql::connection_settings(ROW_WAIT.as_secs())).execute(&mut connection).await?;
    let idle_timeout = i64::try_from(idle_timeout.as_secs()).unwrap_or(i64::MAX);
    query("SET SESSION wait_timeout = ?").bind(idle_timeout).execute(&mut connection).await?;
    Ok(connection)
}

/// Returns the connection's id, and whether the server is still writable.
const CHECK_SESSION: &str =
    "SELECT CONNECTION_ID(), CAST(CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";

/// How long a statement waits for a row. The server accepts only whole seconds. For session locks,
/// [`sql::SESSION_WAITS_FOR_NO_ROW`] overrides this limit.
const ROW_WAIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::RowId;

    #[test]
    fn lock_names_match_the_documentation() {
        let name = |namespace, key| RowId::new(namespace, &Key::new(key).unwrap()).hex();
        assert_eq!(
            name("default", "orders/42"),
            "03c4a6d03c53a5b0798ba12d99188f66cdd4889a81a1eee70b87671214fd83ff"
        );
        assert_ne!(name("a", "bc"), name("ab", "c"));
    }
}
