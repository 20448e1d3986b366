//! Session locks: `GET_LOCK` on a dedicated connection, so the locks live as long as the
//! connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Invalidations, Key, LockBackend, Reach, Release, Renewal,
};
use sqlx::mysql::MySqlRow;
use sqlx::{Connection, MySqlConnection, Row, query};
use tokio::time::timeout;

use super::backend::MySqlBackend;
use super::config::MySqlConfig;
use super::error;
use super::link::Link;
use super::sql;
use super::statement::Statements;
use super::wake;
use crate::server::{Errand, Failure, Session, Taken, Terms, Took, Wire};

/// Locks on a MariaDB or MySQL server that end with the holder's connection, not with a lease.
///
/// They are the server's named locks, `GET_LOCK(NAME, 0)`. NAME is the SHA-256 of namespace and key
/// in 64 lowercase hexadecimal digits, the longest name that MySQL accepts. (The hash input is the
/// length of the namespace in eight bytes, the namespace, the key.) Named locks belong to the whole
/// server, not to a database. They exclude programs in any language that take the same name. This
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
/// store is of class C. Tokens grow as in a [`MySqlBackend`], in the same tables. So fenced writes
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
    pub(super) session: Session<MySqlWire>,
}

impl MySqlSessionBackend {
    /// How long the server keeps a silent session. Also the longest lease.
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
        let (link, statements) = (Arc::clone(&rows.link), Arc::clone(&rows.statements));
        Ok(Self { rows, session: Session::new(MySqlWire { config, link, statements }) })
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.rows.namespace()
    }

    /// Returns whether the named lock is free and there is no lease.
    async fn is_free(&self, key: &Key) -> Result<bool, BackendError> {
        let look = || self.rows.statements.session_is_free(key);
        let rows = self.rows.link.rows(Errand::Acquire, look).await?;
        let free = rows.first().map(|row| self.rows.column::<Option<i64>>(row, 0)).transpose()?;
        Ok(free.flatten() != Some(0))
    }
}

#[async_trait]
impl LockBackend for MySqlSessionBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("mysql", GuaranteeClass::C, Reach::Network)
            .with_fencing()
            .with_wakes()
            .with_invalidations()
            .with_leases(Capabilities::LEASE_MIN, Self::SILENCE)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.session.take(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.session.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = self.session.release(claim).await;
        self.rows.purge_by_chance(claim).await;
        released
    }

    /// Polls at growing intervals, because the server sends no notifications.
    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        wake::until_free(|| self.is_free(claim.key())).await;
    }

    fn subscribe_invalidations(&self, hints: Invalidations) {
        self.session.subscribe_invalidations(hints);
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.rows.diagnose().await
    }

    async fn close(&self) {
        self.session.close().await;
        self.rows.close().await;
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
pub(super) struct MySqlWire {
    config: MySqlConfig,
    link: Arc<Link>,
    statements: Arc<Statements>,
}

/// A connection and the server's id of it.
pub(super) struct Connected {
    connection: MySqlConnection,
    id: u64,
}

impl Connected {
    /// Compares the connection id in the first column, to detect a proxy that switches connections.
    fn is_the_same(&self, wire: &MySqlWire, row: &MySqlRow) -> Result<(), Failure> {
        if wire.link.read::<u64>(row, 0)? == self.id {
            return Ok(());
        }
        Err(Failure::Broken(super::config::unusable(
            "session locks do not work through a proxy that gives each statement another connection; connect past it, or use leases",
        )))
    }
}

impl MySqlWire {
    fn row_name(&self, key: &Key) -> String {
        self.statements.row(key).hex()
    }

    async fn ask(
        &self,
        connected: &mut Connected,
        text: &'static str,
        name: Option<String>,
    ) -> Result<Option<i64>, Failure> {
        let asked = name.into_iter().fold(query(text), |query, name| query.bind(name));
        let row = asked.fetch_one(&mut connected.connection).await;
        let row = row.map_err(|error| self.link.failure(error))?;
        connected.is_the_same(self, &row)?;
        self.link.read(&row, 1)
    }

    /// Notes the claim, after the named lock was taken. `None` if there is a lease on the key.
    async fn grant(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        terms: &Terms,
        seen: Option<i64>,
    ) -> Result<Option<Taken>, Failure> {
        if let Some(taken) = seen.and_then(|now| terms.unwritten(now)) {
            return Ok(Some(taken));
        }
        let goes_on = seen.is_some();
        let grant = self.statements.session_note(claim, terms.block(goes_on));
        let done = grant.execute(&mut connected.connection).await;
        let token = done.map_err(|error| self.link.failure(error))?.last_insert_id();
        if token == 0 {
            // Nothing was noted: there is a lease, or the server is read-only.
            return self.look(connected).await.map(|()| None);
        }
        let token = i64::try_from(token).ok();
        let taken = token.and_then(|token| terms.written(claim, token, goes_on)).map(Some);
        let says = || error::damaged(self.link.place(), "a row's token is none");
        taken.ok_or_else(|| Failure::Broken(says()))
    }

    /// Takes the named lock. Also returns the time if a claim of the session is still noted in the
    /// row.
    async fn take_and_look(
        &self,
        connected: &mut Connected,
        key: &Key,
        noted: ClaimId,
    ) -> Result<(bool, Option<i64>), Failure> {
        let look = self.statements.session_look(key, noted, 0);
        let row = look.fetch_one(&mut connected.connection).await;
        let row = row.map_err(|error| self.link.failure(error))?;
        connected.is_the_same(self, &row)?;
        let got = self.link.read::<Option<i64>>(&row, 1)? == Some(1);
        Ok((got, self.link.read(&row, 2)?))
    }
}

impl Wire for MySqlWire {
    type Connection = Connected;

    async fn connect(&self) -> Result<Connected, BackendError> {
        let begin = async {
            let mut connection = connect(&self.config, MySqlSessionBackend::SILENCE).await?;
            sqlx::raw_sql(sql::SESSION_WAITS_FOR_NO_ROW).execute(&mut connection).await?;
            let row = query(LOOK).fetch_one(&mut connection).await?;
            Ok(Connected { id: row.try_get(0)?, connection })
        };
        match timeout(self.config.connect_timeout, begin).await {
            Ok(begun) => begun.map_err(|error| self.link.explain(error)),
            Err(_) => Err(error::silent(self.link.place(), self.config.connect_timeout)),
        }
    }

    async fn take(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        terms: &Terms,
    ) -> Result<Took, Failure> {
        const TAKE: &str = "SELECT CONNECTION_ID(), CAST(GET_LOCK(?, 0) AS SIGNED)";
        let seen = match &terms.last {
            None => {
                let got = self.ask(connected, TAKE, Some(self.row_name(claim.key()))).await?;
                Ok((got == Some(1), None))
            }
            Some(last) => self.take_and_look(connected, claim.key(), last.claim).await,
        };
        let taken = match seen {
            Ok((false, _)) => return Ok(Took::Busy(None)),
            Ok((true, seen)) => self.grant(connected, claim, terms, seen).await,
            Err(failure) => Err(failure),
        };
        match taken {
            Ok(Some(taken)) => Ok(Took::Grant(taken)),
            Ok(None) => self.give_back(connected, claim.key()).await.map(|()| Took::Busy(None)),
            Err(Failure::Answered(error)) => {
                // The session holds the lock even if the next statement failed.
                self.give_back(connected, claim.key()).await?;
                if error::tells_of_locked_row(&error) {
                    return Ok(Took::RowLocked(error));
                }
                Err(Failure::Answered(error))
            }
            Err(broken) => Err(broken),
        }
    }

    async fn give_back(&self, connected: &mut Connected, key: &Key) -> Result<(), Failure> {
        const GIVE_BACK: &str = "SELECT CONNECTION_ID(), CAST(RELEASE_LOCK(?) AS SIGNED)";
        let given = self.ask(connected, GIVE_BACK, Some(self.row_name(key))).await;
        given.map(drop).map_err(Failure::into_broken)
    }

    async fn look(&self, connected: &mut Connected) -> Result<(), Failure> {
        match self.ask(connected, LOOK, None).await? {
            Some(0) => Err(Failure::Broken(error::read_only(self.link.place()))),
            _ => Ok(()),
        }
    }

    async fn keep(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        token: FencingToken,
        noted: ClaimId,
    ) -> Result<(), Failure> {
        if noted != claim.id() {
            let mark = self.statements.session_mark(claim, token, noted);
            let marked = mark.execute(&mut connected.connection).await;
            marked.map_err(|error| self.link.failure(error))?;
        }
        let keep = self.statements.session_keep(claim, token).execute(&mut connected.connection);
        keep.await.map(drop).map_err(|error| self.link.failure(error))
    }

    fn name(&self, key: &Key) -> Vec<u8> {
        self.statements.row(key).bytes().to_vec()
    }

    fn silent(&self) -> BackendError {
        error::silent(self.link.place(), self.config.response_timeout)
    }

    fn closed(&self) -> BackendError {
        self.link.closed()
    }

    fn overdue(&self) -> BackendError {
        error::overdue(self.link.place())
    }

    fn answer_limit(&self) -> Duration {
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
const LOOK: &str =
    "SELECT CONNECTION_ID(), CAST(CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";

/// How long a statement waits for a row. The server accepts only whole seconds.
const ROW_WAIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::RowId;

    #[test]
    fn locks_have_the_names_that_other_programs_take() {
        let name = |namespace, key| RowId::of(namespace, &Key::new(key).unwrap()).hex();
        assert_eq!(
            name("default", "orders/42"),
            "03c4a6d03c53a5b0798ba12d99188f66cdd4889a81a1eee70b87671214fd83ff"
        );
        assert_ne!(name("a", "bc"), name("ab", "c"));
    }
}
