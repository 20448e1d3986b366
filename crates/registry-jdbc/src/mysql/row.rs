//! Row locks: a transaction of the store locks the row for as long as the lock is held (`SELECT …
//! LOCK IN SHARE MODE`).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Holder, Invalidations, Key, LockAdmin, LockBackend, Reach, Release, Renewal,
};
use sqlx::{AssertSqlSafe, Executor as _, MySqlConnection, raw_sql};
use tokio::time::{sleep, timeout};

use super::backend::MySqlBackend;
use super::client::MySqlClient;
use super::config::{MySqlConfig, misconfigured};
use super::error::{self, ErrorEffect};
use super::session::MySqlSessionBackend;
use super::sql;
use super::statement::{MySqlQuery, StatementBinder};
use super::waiters;
use crate::server::{
    ConnectionUse, LockAttempt, RowLockConnections, RowLockPermit, SessionFailure, SessionProtocol,
    SqlSessions, TokenPlan,
};

/// Locks in a MariaDB or MySQL database that are rows. Each is locked by its own transaction until
/// it is released.
///
/// The rows are those of a [`MySqlBackend`]'s leases, and those that [`LockIn`](crate::LockIn)
/// locks in a transaction of the caller. All three exclude each other, so a namespace may contain
/// locks of each kind, and move from one to another while in use. While a row is locked, an attempt
/// to acquire a lease returns a retryable error after `busy_timeout`. The server does not report
/// why a row is locked.
///
/// A grant is two steps on one connection:
///
/// 1. A statement writes the claim and a larger token to the row and commits, unless the key is
///    held or the row is locked.
/// 2. A transaction locks the row with `LOCK IN SHARE MODE`, if it still contains this claim.
///
/// A crash in between loses only a token. So a token is committed before it can be used, and no two
/// transactions have the same token. The row lock is compatible only with the check of a
/// [`Fence`](crate::Fence): any other grant has to change the row first.
///
/// One transaction cannot release one of several rows, so each held lock has a connection of its
/// own, outside of the pool. The maximum is [`row_locks`](MySqlConfig::with_row_locks). One more
/// attempt returns [`RowLocksExhausted`](crate::RowLocksExhausted). A waiter has no such
/// connection, and polls every 2.5 to 250 ms.
///
/// The locks of a process that dies are free at once. If the server cannot notice (the host is
/// unreachable, the process is stopped), it closes the connection after [`SILENCE`](Self::SILENCE).
/// A lease is never longer than that, so the holder has given up by then.
///
/// If the *server* ends the connection (`KILL`, a restart, a failover, a firewall that cuts
/// connections), the lock is free at once. Its holder is notified up to a third of a second later,
/// or at the end of its lease if no message arrives. Until then there can be two holders, so this
/// store is of class best-effort. Tokens grow all the same, so fenced writes stay safe, including those of a
/// [`Fence`](crate::Fence).
///
/// The holder of such a lock is reported like that of a lease, without the remaining time: the
/// connection holds a named lock for this. A caller's transaction is reported by its key alone.
/// [Breaking](registry_core::LockAdmin::force_release) such a lock ends the connection that holds it. The user
/// must be the holder's, or have the privilege `CONNECTION ADMIN` (`CONNECTION_ADMIN` in MySQL). A
/// transaction of a caller is never ended.
///
/// A server that is set `read_only` grants nothing. Galera nodes lock no rows for each other: use
/// the same node for all clients.
pub struct MySqlRowBackend {
    /// For the tables, and for waiters.
    pub(super) rows: MySqlBackend,
    sessions: SqlSessions<MySqlRowProtocol>,
}

impl MySqlRowBackend {
    /// How long the server keeps an idle connection of a holder. Also the maximum lease.
    pub const SILENCE: Duration = MySqlSessionBackend::SILENCE;

    /// Connects to the server, and creates the tables if they are missing.
    ///
    /// # Errors
    /// As for [`MySqlBackend::open`].
    ///
    /// # Cancel safety
    /// As for [`MySqlBackend::open`].
    pub async fn open(config: MySqlConfig) -> Result<Self, BackendError> {
        let rows = MySqlBackend::open(config.clone()).await?;
        let (client, statements) = (Arc::clone(&rows.client), Arc::clone(&rows.statements));
        let connections = RowLockConnections::new(config.row_locks);
        Ok(Self {
            rows,
            sessions: SqlSessions::new(MySqlRowProtocol {
                config,
                client,
                statements,
                connections,
            }),
        })
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.rows.namespace()
    }

    async fn is_free(&self, key: &Key) -> Result<bool, BackendError> {
        let statements = &self.rows.statements;
        let unlocked =
            self.rows.client.rows(ConnectionUse::Acquire, || statements.lock_row(key)).await?;
        if let Some(row) = unlocked.first() {
            return Ok(self.rows.column::<i64>(row, 0)? == 0);
        }
        let there =
            self.rows.client.rows(ConnectionUse::Acquire, || statements.row_seen(key)).await?;
        Ok(there.is_empty())
    }
}

#[async_trait]
impl LockBackend for MySqlRowBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("mysql", GuaranteeClass::BestEffort, Reach::Network)
            .with_fencing()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
            .with_leases(Capabilities::LEASE_MIN, Self::SILENCE)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.sessions.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.sessions.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = self.sessions.release(claim).await;
        self.rows.maybe_purge(claim).await;
        released
    }

    /// Polls at growing intervals, because the server sends no notifications.
    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        waiters::poll_until_free(|| self.is_free(claim.key())).await;
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
impl LockAdmin for MySqlRowBackend {
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

impl fmt::Debug for MySqlRowBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlRowBackend")
            .field("config", &self.rows.config)
            .field("sessions", &self.sessions)
            .finish()
    }
}

/// The SQL of one lock's connection.
struct MySqlRowProtocol {
    config: MySqlConfig,
    client: Arc<MySqlClient>,
    statements: Arc<StatementBinder>,
    connections: RowLockConnections<MySqlConnection>,
}

/// A connection for one lock.
struct MySqlRowConnection {
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
                let message = || error::corrupt(self.client.address(), "a row's token is negative");
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
        let lost = || {
            SessionFailure::Rejected(error::corrupt(self.client.address(), message).as_refused())
        };
        let row = rows.first().ok_or_else(lost)?;
        if self.client.read::<i64>(row, 2)? == 0 {
            // New connections may lead to the server's successor.
            self.connections.close_idle();
            return Err(SessionFailure::Broken(error::read_only(self.client.address())));
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
        let connecting = super::session::connect(&self.config, MySqlRowBackend::SILENCE);
        let connected = timeout(self.config.connect_timeout, connecting).await;
        let connection = connected
            .map_err(|_| error::timed_out(self.client.address(), self.config.connect_timeout))?
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
        let message = || error::corrupt(self.client.address(), "a statement returned no row");
        let row = rows.last().ok_or_else(|| SessionFailure::Broken(message()))?;
        let held_by = connected.transaction.as_ref().map(|held| held.connection);
        if Some(self.client.read::<u64>(row, 0)?) != held_by {
            return Err(SessionFailure::Broken(misconfigured(
                "row locks do not work through a proxy that gives each statement another connection; connect past it, or use leases",
            )));
        }
        if self.client.read::<i64>(row, 1)? == 0 {
            return Err(SessionFailure::Broken(error::read_only(self.client.address())));
        }
        Ok(())
    }

    // A locked row is not purged.
    async fn ensure_row(
        &self,
        _: &mut MySqlRowConnection,
        _: &Claim,
        _: FencingToken,
        _: ClaimId,
    ) -> Result<(), SessionFailure> {
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

    fn timed_out(&self) -> BackendError {
        error::timed_out(self.client.address(), self.config.response_timeout)
    }

    fn closed(&self) -> BackendError {
        self.client.closed()
    }

    fn queue_timed_out(&self) -> BackendError {
        error::queue_timed_out(self.client.address())
    }

    fn response_timeout(&self) -> Duration {
        self.config.response_timeout
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
