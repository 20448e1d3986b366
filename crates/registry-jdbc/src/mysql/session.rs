//! Session locks: `GET_LOCK` on a dedicated connection, so the locks live as long as the
//! connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Invalidations, Key, LockAdmin, LockBackend, Reach, Release, Renewal,
};
use sqlx::mysql::MySqlRow;
use sqlx::{Connection, MySqlConnection, Row, query};
use tokio::time::timeout;

use super::backend::MySqlBackend;
use super::client::MySqlClient;
use super::config::MySqlConfig;
use super::error;
use super::sql;
use super::statement::StatementBinder;
use super::waiters;
use crate::server::{
    ConnectionUse, LockAttempt, SessionFailure, SessionGrant, SessionProtocol, SqlSession,
    TokenPlan,
};

/// Locks on a MariaDB or MySQL server that end with the holder's connection, not with a lease.
///
/// They are the server's named locks, `GET_LOCK(NAME, 0)`. NAME is the SHA-256 of namespace and key
/// in 64 lowercase hexadecimal digits, the longest name that MySQL accepts. (The hash input is the
/// length of the namespace in eight bytes, the namespace, the key.) Named locks belong to the whole
/// server, not to a database. They exclude programs in any language that lock the same name. This
/// backend respects leases of a [`MySqlBackend`], but a `MySqlBackend` does not respect these
/// locks: use one kind for all locks of a namespace. Servers do not replicate named locks: on
/// Galera or a replication group, write to only one of the servers.
///
/// All locks of a backend share one connection, outside of the application's connections and of the
/// pool. While a lock is held, the connection is checked several times a second. If it is broken,
/// all holders are notified at once. The locks of a process that dies are free at once, without a
/// lease to wait for. If the server cannot notice (the host is unreachable, the process is
/// stopped), it ends the session after [`SILENCE`](Self::SILENCE). A lease is never longer than
/// that, so the holder has given up by then.
///
/// If the *server* ends the session (`KILL`, a restart, a failover, a firewall that cuts
/// connections), the lock is free at once. Its holder is notified up to a third of a second later,
/// or at the end of its lease if no message arrives. Until then there can be two holders, so this
/// store is of class best-effort. Tokens grow as in a [`MySqlBackend`], in the same tables. So fenced writes
/// to other systems stay safe, including those of a [`Fence`](crate::Fence).
/// [`LockIn`](crate::LockIn) does not support these locks: a transaction cannot hold one.
///
/// A server that is set `read_only` grants nothing. When it becomes read-only, the holders are
/// notified that their locks are lost.
///
/// The server does not know the key of such a lock. So it cannot be listed, and only `KILL` breaks
/// it, which ends all locks of that process.
///
/// A proxy that sends each statement on another connection would mix up the locks of its clients.
/// If the backend detects one, locking fails.
pub struct MySqlSessionBackend {
    /// For the tables, and for waiters.
    pub(super) rows: MySqlBackend,
    pub(super) session: SqlSession<MySqlSessionProtocol>,
}

impl MySqlSessionBackend {
    /// How long the server keeps an idle session. Also the maximum lease.
    pub const SILENCE: Duration = Duration::from_secs(60);

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
        Ok(Self {
            rows,
            session: SqlSession::new(MySqlSessionProtocol { config, client, statements }),
        })
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.rows.namespace()
    }

    /// Returns whether the named lock is free and there is no lease.
    async fn is_free(&self, key: &Key) -> Result<bool, BackendError> {
        let build = || self.rows.statements.session_is_free(key);
        let rows = self.rows.client.rows(ConnectionUse::Acquire, build).await?;
        let free = rows.first().map(|row| self.rows.column::<Option<i64>>(row, 0)).transpose()?;
        Ok(free.flatten() != Some(0))
    }
}

#[async_trait]
impl LockBackend for MySqlSessionBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("mysql", GuaranteeClass::BestEffort, Reach::Network)
            .with_fencing()
            .with_wakes()
            .with_invalidations()
            .with_leases(Capabilities::LEASE_MIN, Self::SILENCE)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.session.try_acquire(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.session.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = self.session.release(claim).await;
        self.rows.maybe_purge(claim).await;
        released
    }

    /// Polls at growing intervals, because the server sends no notifications.
    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        waiters::poll_until_free(|| self.is_free(claim.key())).await;
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
impl LockAdmin for MySqlSessionBackend {
    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.rows.diagnose().await
    }
}

impl fmt::Debug for MySqlSessionBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlSessionBackend")
            .field("config", &self.rows.config)
            .finish_non_exhaustive()
    }
}

/// The SQL of a session's connection.
pub(super) struct MySqlSessionProtocol {
    config: MySqlConfig,
    client: Arc<MySqlClient>,
    statements: Arc<StatementBinder>,
}

/// A connection and the server's id of it.
pub(super) struct MySqlSessionConnection {
    connection: MySqlConnection,
    id: u64,
}

impl MySqlSessionConnection {
    /// Compares the connection id in the first column, to detect a proxy that switches connections.
    fn check_connection(
        &self,
        protocol: &MySqlSessionProtocol,
        row: &MySqlRow,
    ) -> Result<(), SessionFailure> {
        if protocol.client.read::<u64>(row, 0)? == self.id {
            return Ok(());
        }
        Err(SessionFailure::Broken(super::config::misconfigured(
            "session locks do not work through a proxy that gives each statement another connection; connect past it, or use leases",
        )))
    }
}

impl MySqlSessionProtocol {
    fn row_name(&self, key: &Key) -> String {
        self.statements.row(key).hex()
    }

    async fn fetch_number(
        &self,
        connected: &mut MySqlSessionConnection,
        text: &'static str,
        name: Option<String>,
    ) -> Result<Option<i64>, SessionFailure> {
        let asked = name.into_iter().fold(query(text), |query, name| query.bind(name));
        let row = asked.fetch_one(&mut connected.connection).await;
        let row = row.map_err(|error| self.client.failure(error))?;
        connected.check_connection(self, &row)?;
        self.client.read(&row, 1)
    }

    /// Writes the claim, after the named lock was acquired. Returns `None` if the key has a lease.
    async fn grant(
        &self,
        connected: &mut MySqlSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
        seen: Option<i64>,
    ) -> Result<Option<SessionGrant>, SessionFailure> {
        if let Some(granted) = seen.and_then(|now| plan.grant_from_reservation(now)) {
            return Ok(Some(granted));
        }
        let is_consecutive = seen.is_some();
        let grant =
            self.statements.session_write_claim(claim, plan.tokens_to_write(is_consecutive));
        let done = grant.execute(&mut connected.connection).await;
        let token = done.map_err(|error| self.client.failure(error))?.last_insert_id();
        if token == 0 {
            // No claim was written: the key has a lease, or the server is read-only.
            return self.check_session(connected).await.map(|()| None);
        }
        let token = i64::try_from(token).ok();
        let granted =
            token.and_then(|token| plan.grant_from_write(claim, token, is_consecutive)).map(Some);
        let message = || error::corrupt(self.client.address(), "a row's token is invalid");
        granted.ok_or_else(|| SessionFailure::Broken(message()))
    }

    /// Acquires the named lock. Also returns the time if the row still contains a claim of the
    /// session.
    async fn lock_and_read(
        &self,
        connected: &mut MySqlSessionConnection,
        key: &Key,
        row_claim: ClaimId,
    ) -> Result<(bool, Option<i64>), SessionFailure> {
        let statement = self.statements.session_try_lock(key, row_claim, 0);
        let row = statement.fetch_one(&mut connected.connection).await;
        let row = row.map_err(|error| self.client.failure(error))?;
        connected.check_connection(self, &row)?;
        let got = self.client.read::<Option<i64>>(&row, 1)? == Some(1);
        Ok((got, self.client.read(&row, 2)?))
    }
}

impl SessionProtocol for MySqlSessionProtocol {
    type Connection = MySqlSessionConnection;

    async fn connect(&self) -> Result<MySqlSessionConnection, BackendError> {
        let connecting = async {
            let mut connection = connect(&self.config, MySqlSessionBackend::SILENCE).await?;
            sqlx::raw_sql(sql::SESSION_WAITS_FOR_NO_ROW).execute(&mut connection).await?;
            let row = query(CURRENT_GRANT).fetch_one(&mut connection).await?;
            Ok(MySqlSessionConnection { id: row.try_get(0)?, connection })
        };
        match timeout(self.config.connect_timeout, connecting).await {
            Ok(connected) => connected.map_err(|error| self.client.explain(error)),
            Err(_) => Err(error::timed_out(self.client.address(), self.config.connect_timeout)),
        }
    }

    async fn try_acquire(
        &self,
        connected: &mut MySqlSessionConnection,
        claim: &Claim,
        plan: &TokenPlan,
    ) -> Result<LockAttempt, SessionFailure> {
        const TRY_LOCK: &str = "SELECT CONNECTION_ID(), CAST(GET_LOCK(?, 0) AS SIGNED)";
        let seen = match &plan.last {
            None => {
                let got = self
                    .fetch_number(connected, TRY_LOCK, Some(self.row_name(claim.key())))
                    .await?;
                Ok((got == Some(1), None))
            }
            Some(last) => self.lock_and_read(connected, claim.key(), last.claim).await,
        };
        let granted = match seen {
            Ok((false, _)) => return Ok(LockAttempt::Busy(None)),
            Ok((true, seen)) => self.grant(connected, claim, plan, seen).await,
            Err(failure) => Err(failure),
        };
        match granted {
            Ok(Some(granted)) => Ok(LockAttempt::Grant(granted)),
            Ok(None) => self.unlock(connected, claim.key()).await.map(|()| LockAttempt::Busy(None)),
            Err(SessionFailure::Rejected(error)) => {
                // The session holds the lock even if the next statement failed.
                self.unlock(connected, claim.key()).await?;
                if error::is_row_lock_error(&error) {
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
        const UNLOCK: &str = "SELECT CONNECTION_ID(), CAST(RELEASE_LOCK(?) AS SIGNED)";
        let unlocked = self.fetch_number(connected, UNLOCK, Some(self.row_name(key))).await;
        unlocked.map(drop).map_err(SessionFailure::into_broken)
    }

    async fn check_session(
        &self,
        connected: &mut MySqlSessionConnection,
    ) -> Result<(), SessionFailure> {
        match self.fetch_number(connected, CURRENT_GRANT, None).await? {
            Some(0) => Err(SessionFailure::Broken(error::read_only(self.client.address()))),
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
        if row_claim != claim.id() {
            let mark = self.statements.session_update_claim(claim, token, row_claim);
            let marked = mark.execute(&mut connected.connection).await;
            marked.map_err(|error| self.client.failure(error))?;
        }
        let ensure_row =
            self.statements.session_ensure_row(claim, token).execute(&mut connected.connection);
        ensure_row.await.map(drop).map_err(|error| self.client.failure(error))
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

/// Opens a connection outside of the pool, which the server closes after this time without a
/// statement.
pub(super) async fn connect(
    config: &MySqlConfig,
    silence: Duration,
) -> Result<MySqlConnection, sqlx::Error> {
    let mut connection = MySqlConnection::connect_with(&config.server).await?;
    sqlx::raw_sql(sql::session(ROW_WAIT.as_secs())).execute(&mut connection).await?;
    let silence = i64::try_from(silence.as_secs()).unwrap_or(i64::MAX);
    query("SET SESSION wait_timeout = ?").bind(silence).execute(&mut connection).await?;
    Ok(connection)
}

/// Returns the connection's id, and whether the server is still writable.
const CURRENT_GRANT: &str =
    "SELECT CONNECTION_ID(), CAST(CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";

/// How long a statement waits for a row. The server accepts only whole seconds.
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
