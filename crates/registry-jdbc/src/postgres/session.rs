//! Locks that last as long as a connection: `pg_try_advisory_lock` on a dedicated connection.
//!
//! The connection and its queue are in `server::session`; the statements are in `sql`.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Invalidations, Key, LockAdmin, LockBackend, Reach, Release, Renewal,
};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor as _, raw_sql};
use tokio::time::timeout;

use super::backend::{PostgresBackend, bytes, claim_id, column, from_micros};
use super::client;
use super::config::{PostgresConfig, misconfigured};
use super::error::{self, corrupt, explain};
use super::statement::{BoundStatement, PgParam};
use crate::server::{LockAttempt, RowId, SessionFailure, SessionProtocol, SqlSession, TokenPlan};

/// Locks in a PostgreSQL database that end with their holder's connection, not with a lease.
///
/// They are advisory locks, `pg_try_advisory_lock(N)`. N is the first eight bytes of a SHA-256
/// hash, as a signed number in network byte order. The hash covers the length of the namespace in
/// eight bytes, the namespace, and the key. Among ten thousand keys that are held at once, two
/// share a number with odds of 3 in 10^12; the only effect is that they exclude each other. The
/// lock also excludes every other program in this database that locks the same number, in any
/// language.
///
/// These locks respect the leases of a [`PostgresBackend`], but a `PostgresBackend` does not
/// respect these locks. All programs that lock in one namespace must use the same kind of lock.
///
/// All locks of a backend share one connection, which belongs neither to the application nor to a
/// pool. While a lock is held, the backend checks the connection several times a second. If it is
/// broken, all holders are notified at once. When a process dies, the server frees its locks at
/// once, without waiting for a lease. If the server cannot notice (host lost, process stopped), it
/// ends the session after [`SILENCE`](Self::SILENCE). A lease is never longer than that, so the
/// holder has given up by then.
///
/// If the *server* ends the session (`pg_terminate_backend`, restart, failover, a firewall that
/// cuts connections), the lock is free at once. Its holder notices up to a third of a second later,
/// or at the end of its lease if no answer arrives. During that time there can be two holders,
/// which is why this backend has guarantee class best-effort. Tokens grow as in a [`PostgresBackend`], in the
/// same tables. So fenced writes to other systems stay safe, including those of a
/// [`Fence`](crate::Fence). [`LockIn`](crate::LockIn) acquires both the row and the advisory lock
/// for a transaction.
///
/// The server does not know the key or the holder of such a lock, so the lock cannot be listed or
/// broken. An administrator can only end the session by `pg_terminate_backend`, which frees all of
/// its locks.
///
/// A pooler that gives each transaction another connection would pass locks to unrelated clients.
/// If one is detected, opening or locking fails. A pooler with one connection per session works.
pub struct PostgresSessionBackend {
    /// The tables and the listener.
    pub(super) rows: PostgresBackend,
    pub(super) session: SqlSession<PgSessionProtocol>,
}

impl PostgresSessionBackend {
    /// The idle time after which the server ends the session. It is also the
    /// maximum lease.
    pub const SILENCE: Duration = Duration::from_secs(60);

    /// Connects to the server, and creates the tables if they are missing.
    ///
    /// # Errors
    /// As for [`PostgresBackend::open`]; also `Misconfigured` behind a pooler that changes
    /// connections between transactions.
    ///
    /// # Cancel safety
    /// Dropping the future may leave complete tables behind, never partial ones.
    pub async fn open(config: PostgresConfig) -> Result<Self, BackendError> {
        let rows = PostgresBackend::open(config.clone()).await?;
        let protocol = PgSessionProtocol { rows: rows.session_statements(), config };
        protocol.detect_pooler().await?;
        Ok(Self { rows, session: SqlSession::new(protocol) })
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.rows.namespace()
    }
}

#[async_trait]
impl LockBackend for PostgresSessionBackend {
    fn capabilities(&self) -> Capabilities {
        let capabilities =
            Capabilities::new("postgres", GuaranteeClass::BestEffort, Reach::Network)
                .with_fencing()
                .with_invalidations()
                .with_leases(Capabilities::LEASE_MIN, Self::SILENCE);
        if self.rows.has_listener() { capabilities.with_wakes() } else { capabilities }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mark = self.rows.position();
        let attempt = self.session.try_acquire(claim).await;
        Ok(match attempt.map_err(|error| self.rows.client.with_address(error))? {
            Attempt::Busy(busy) => Attempt::Busy(busy.with_mark(mark)),
            granted @ Attempt::Granted(_) => granted,
        })
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.session.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = self.session.release(claim).await;
        self.rows.maybe_purge(claim).await;
        released.map_err(|error| self.rows.client.with_address(error))
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.rows.wait_for_release(claim.key(), busy.mark).await;
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.session.subscribe_invalidations(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        self.session.close().await;
        self.rows.close().await;
    }
}

#[async_trait]
impl LockAdmin for PostgresSessionBackend {
    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.rows.diagnose().await
    }
}

impl fmt::Debug for PostgresSessionBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresSessionBackend").field("config", &self.rows.config).finish()
    }
}

/// Sends the statements of a session.
pub(super) struct PgSessionProtocol {
    rows: super::backend::SessionStatements,
    config: PostgresConfig,
}

/// A connection, and the process id of its server process.
pub(super) struct PgSessionConnection {
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
        let row = rows
            .first()
            .ok_or_else(|| SessionFailure::Broken(corrupt("a statement returned no row")))?;
        if column::<i32>(row, 0).map_err(SessionFailure::Broken)? == self.server_process {
            Ok(())
        } else {
            Err(SessionFailure::Broken(pooler_detected()))
        }
    }
}

impl PgSessionProtocol {
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
        let probed = timeout(self.config.response_timeout, probe).await;
        match probed.map_err(|_| error::timed_out())? {
            Ok(_) if are_two => {}
            Ok(_) => return Err(pooler_detected()),
            Err(SessionFailure::Rejected(error) | SessionFailure::Broken(error)) => {
                return Err(error);
            }
        }
        for connected in [one, two] {
            // Optional: the server would notice the end of the connection anyway.
            let _ = timeout(self.config.connect_timeout, connected.connection.close()).await;
        }
        Ok(())
    }

    async fn connect_unconfigured(&self) -> Result<PgSessionConnection, BackendError> {
        let mut connection = client::connect(&self.config).await?;
        let query =
            timeout(self.config.connect_timeout, connection.fetch_all(raw_sql(CHECK_SESSION)));
        let rows = query.await.map_err(|_| error::connect_timed_out())?.map_err(explain)?;
        let row = rows.first().ok_or_else(|| corrupt("a statement returned no row"))?;
        Ok(PgSessionConnection { server_process: column(row, 0)?, connection })
    }

    async fn send(
        &self,
        connected: &mut PgSessionConnection,
        statement: &BoundStatement<'_>,
    ) -> Result<Vec<PgRow>, SessionFailure> {
        let rows = statement.send(&mut connected.connection, self.config.query_mode()).await;
        let rows = rows.map_err(error::session_failure)?;
        connected.check_process(&rows)?;
        Ok(rows)
    }

    fn row_id(&self, key: &Key) -> RowId {
        RowId::new(&self.config.namespace, key)
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
                bytes(self.config.namespace.as_bytes()),
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
            let seconds = PostgresSessionBackend::SILENCE.as_secs();
            let lock_timeout = self.config.busy_timeout.as_millis().max(1);
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
        let configured = timeout(self.config.connect_timeout, configure).await;
        match configured.map_err(|_| error::connect_timed_out())? {
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
                bytes(self.config.namespace.as_bytes()),
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

    fn timed_out(&self) -> BackendError {
        error::timed_out()
    }

    fn closed(&self) -> BackendError {
        error::closed()
    }

    fn queue_timed_out(&self) -> BackendError {
        error::queue_timed_out()
    }

    fn response_timeout(&self) -> Duration {
        self.config.response_timeout
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
