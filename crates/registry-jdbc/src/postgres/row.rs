//! Locks that are rows: a transaction of this backend keeps each row locked for as long as the lock
//! is held, by `SELECT … FOR NO KEY UPDATE`.
//!
//! The connections and their queues are in `server::sessions`; the statements are in `sql`.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Holder, Invalidations, Key, LockAdmin, LockBackend, Reach, Release, Renewal,
};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Executor as _, raw_sql};

use super::backend::SessionStatements;
use super::backend::{PostgresBackend, bytes, claim_id, column};
use super::config::{PostgresConfig, misconfigured};
use super::error::{self, corrupt, explain, row_locked};
use super::session::PostgresSessionBackend;
use super::statement::{BoundStatement, PgParam};
use crate::server::{
    LockAttempt, RowId, RowLockConnections, RowLockPermit, SessionFailure, SessionProtocol,
    SqlSessions, TokenPlan,
};

/// Locks in a PostgreSQL database that are rows: pessimistic row locks. A transaction of its own
/// keeps each row locked until the lock is released.
///
/// They are the rows in which a [`PostgresBackend`] stores its leases, and which
/// [`LockIn`](crate::LockIn) locks in a transaction of the caller. All three exclude each other. So
/// a namespace may contain locks of each kind, and may change from one to another while it is in
/// use.
///
/// A grant takes two steps on one connection:
///
/// - A separate, committed statement writes the claim and a larger token to the row, unless another
///   client holds the row.
/// - Then a transaction locks the row `FOR NO KEY UPDATE`, if the row still contains this claim.
///
/// A crash between the steps loses only a token. So every token is committed before use, and no two
/// transactions have the same one. `FOR NO KEY UPDATE` excludes everything that `FOR UPDATE`
/// excludes, except the check of a [`Fence`](crate::Fence).
///
/// One transaction cannot release one of several rows. So each held lock has its own connection,
/// which belongs neither to the application nor to a pool. The
/// [configuration](PostgresConfig::with_row_locks) limits their number; an attempt beyond the limit
/// fails with [`RowLocksExhausted`](crate::RowLocksExhausted). A waiting caller uses no connection.
///
/// When a process dies, the server frees its locks at once. If the server cannot notice (host lost,
/// process stopped), it ends the transaction after [`SILENCE`](Self::SILENCE). A lease is never
/// longer than that, so the holder has given up by then.
///
/// If the *server* ends the connection (`pg_terminate_backend`, restart, failover, a firewall that
/// cuts connections), the lock is free at once. Its holder notices up to a third of a second later,
/// or at the end of its lease if no answer arrives. During that time there can be two holders,
/// which is why this backend has guarantee class best-effort. Tokens grow nevertheless, so fenced writes stay
/// safe, including those of a [`Fence`](crate::Fence).
///
/// The holder of such a lock is listed like the holder of a lease, without the time left.
/// [`inspect`](registry_core::LockAdmin::inspect) reports a caller's transaction that holds the key without a
/// name. [Breaking](registry_core::LockAdmin::force_release) a lock ends the connection that holds it. For that
/// the user must be the holder's user, or have the rights of `pg_signal_backend`. A caller's
/// transaction is not ended.
///
/// An open transaction keeps the server from vacuuming dead rows in all tables of the database. So
/// hold these locks for seconds or minutes. They work through a pooler in every mode, because a
/// transaction keeps its connection. Each held lock also takes one of the pooler's connections.
pub struct PostgresRowBackend {
    /// The tables and the listener.
    pub(super) rows: PostgresBackend,
    sessions: SqlSessions<PgRowProtocol>,
}

impl PostgresRowBackend {
    /// The idle time after which the server ends a holder's transaction. It is
    /// also the maximum lease.
    pub const SILENCE: Duration = PostgresSessionBackend::SILENCE;

    /// Connects to the server, and creates the tables if they are missing.
    ///
    /// # Errors
    /// As for [`PostgresBackend::open`].
    ///
    /// # Cancel safety
    /// Dropping the future may leave complete tables behind, never partial ones.
    pub async fn open(config: PostgresConfig) -> Result<Self, BackendError> {
        let rows = PostgresBackend::open(config.clone()).await?;
        let connections = RowLockConnections::new(config.row_locks);
        let protocol = PgRowProtocol { rows: rows.session_statements(), config, connections };
        Ok(Self { rows, sessions: SqlSessions::new(protocol) })
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.rows.namespace()
    }
}

#[async_trait]
impl LockBackend for PostgresRowBackend {
    fn capabilities(&self) -> Capabilities {
        let capabilities =
            Capabilities::new("postgres", GuaranteeClass::BestEffort, Reach::Network)
                .with_fencing()
                .with_invalidations()
                .with_labels()
                .with_inspect()
                .with_leases(Capabilities::LEASE_MIN, Self::SILENCE);
        if self.rows.has_listener() { capabilities.with_wakes() } else { capabilities }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mark = self.rows.position();
        let attempt = self.sessions.try_acquire(claim).await;
        Ok(match attempt.map_err(|error| self.rows.client.with_address(error))? {
            Attempt::Busy(busy) => Attempt::Busy(busy.with_mark(mark)),
            granted @ Attempt::Granted(_) => granted,
        })
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.sessions.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = self.sessions.release(claim).await;
        self.rows.maybe_purge(claim).await;
        released.map_err(|error| self.rows.client.with_address(error))
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.rows.wait_for_release(claim.key(), busy.mark).await;
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.sessions.subscribe_invalidations(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        self.sessions.protocol().connections.close_idle();
        self.rows.close().await;
    }
}

#[async_trait]
impl LockAdmin for PostgresRowBackend {
    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        self.rows.holder(key).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.rows.holders().await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.rows.force_release_key(key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = self.rows.diagnose().await?;
        findings.extend(self.rows.check_connection_limit(self.rows.config.row_locks).await?);
        Ok(findings)
    }
}

impl fmt::Debug for PostgresRowBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresRowBackend")
            .field("config", &self.rows.config)
            .field("sessions", &self.sessions)
            .finish()
    }
}

/// Sends the statements of one lock's session.
struct PgRowProtocol {
    rows: SessionStatements,
    config: PostgresConfig,
    connections: RowLockConnections<PgConnection>,
}

/// The connection of one lock.
struct PgRowConnection {
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
    fn row_id(&self, key: &Key) -> RowId {
        RowId::new(&self.config.namespace, key)
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
                bytes(self.config.namespace.as_bytes()),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                PgParam::Number(i64::from(claim.token_block())),
                PgParam::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec())),
                PgParam::Identifier(format!("{}ms", ROW_WAIT.as_millis())),
            ],
        );
        let rows = statement.send(&mut connected.connection, self.config.simple_query_mode()).await;
        let rows = rows.map_err(error::session_failure)?;
        let row = rows
            .first()
            .ok_or_else(|| SessionFailure::Broken(corrupt("a statement returned no row")))?;
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
        let silence = PgParam::Identifier(format!("{}s", PostgresRowBackend::SILENCE.as_secs()));
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
        let lock_timeout = self.config.busy_timeout.as_millis().max(1);
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
        let rows = statement.send(&mut connected.connection, self.config.simple_query_mode()).await;
        let rows = rows.map_err(error::session_failure)?;
        let row = rows
            .first()
            .ok_or_else(|| SessionFailure::Broken(corrupt("a statement returned no row")))?;
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
            None => super::client::connect(&self.config).await?,
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
        let row = rows
            .first()
            .ok_or_else(|| SessionFailure::Broken(corrupt("a statement returned no row")))?;
        let number: Option<String> = column(row, 1).map_err(SessionFailure::Broken)?;
        let is_same_transaction = number.is_some()
            && Some(PgRowTransaction::read(row).map_err(SessionFailure::Broken)?)
                == connected.transaction;
        if is_same_transaction { Ok(()) } else { Err(SessionFailure::Broken(pooler_detected())) }
    }

    // A locked row is not purged.
    async fn ensure_row(
        &self,
        _: &mut PgRowConnection,
        _: &Claim,
        _: FencingToken,
        _: ClaimId,
    ) -> Result<(), SessionFailure> {
        Ok(())
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
