//! Locks that live as long as a connection: `GET_LOCK` on one of its own.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Key, LockBackend, LossHints, Reach, Release, Renewal,
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

/// Locks on a MariaDB or MySQL server that end with the connection of the one who holds them, not with a lease.
///
/// They are the server's named locks, `GET_LOCK(NAME, 0)`, where NAME is the SHA-256 of namespace and key in 64 small hexadecimal digits: as many as
/// MySQL takes. (What is hashed is the length of the namespace in eight bytes, the namespace, the key.) Such locks are of the whole server, not of a
/// database, and everybody who takes the same name is kept out, whatever the language. Leases of a [`MySqlBackend`] are respected, but
/// do not respect these: all who lock in one namespace must do it in the same way. Servers that replicate each other do not replicate named locks: on Galera or a
/// group only one of them may be written to.
///
/// All locks of a backend share one connection, which is neither the application's nor one of a pool. It is looked after several times a
/// second while anything is held: when it is found broken, all holders are told at once. A process that dies frees its locks in that moment, without
/// a lease to be waited for. Where the server cannot notice (the host is gone, the process stands still) it ends the session after
/// [`SILENCE`](Self::SILENCE), and a lease is never longer than that: so the holder has given up by then.
///
/// But when the *server* ends the session (`KILL`, a restart, a failover, a firewall that cuts connections), the lock is free at
/// once, while its holder learns of it up to a third of a second later, or when its lease is over if no word gets through. For that moment there can be two
/// holders, which is why this store is of class C. Tokens grow as in a [`MySqlBackend`], in the same tables: fenced writes to other
/// systems stay safe, those of a [`Fence`](crate::Fence) included. [`LockIn`](crate::LockIn) is not for these locks: no transaction can have one.
///
/// A server that is set `read_only` grants nothing, and once it is set so, holders are told that their locks are lost.
///
/// What is behind such a lock the server does not know; so it cannot be listed or broken, but by `KILL`, which takes all locks of that process.
///
/// A proxy that gives each statement another connection would hand locks to strangers: where one is noticed, locking fails.
pub struct MySqlSessionBackend {
    /// For the tables, and for those who wait.
    pub(super) rows: MySqlBackend,
    pub(super) session: Session<MySqlWire>,
}

impl MySqlSessionBackend {
    /// How long the server hears nothing of a session before it ends it; and the longest lease.
    pub const SILENCE: Duration = Duration::from_secs(60);

    /// Connects to the server, and makes the tables if they are absent.
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

    /// The namespace that this backend's locks live in.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.rows.namespace()
    }

    /// Whether nobody has the named lock, nor a lease.
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
            .with_tells_losses()
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

    /// Looks, less often as the wait grows old: nobody is told of anything.
    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        wake::until_free(|| self.is_free(claim.key())).await;
    }

    fn tell_losses(&self, hints: LossHints) {
        self.session.tell_losses(hints);
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

/// What is said to the server of a session.
pub(super) struct MySqlWire {
    config: MySqlConfig,
    link: Arc<Link>,
    statements: Arc<Statements>,
}

/// A connection and the server's number for it.
pub(super) struct Connected {
    connection: MySqlConnection,
    id: u64,
}

impl Connected {
    /// Checks the first column: who mixes connections up is found out by the next answer.
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

    /// With the lock in hand. `None` if somebody holds the key by a lease.
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
            // Nothing was noted: somebody holds a lease, or the server does not mean to be written to.
            return self.look(connected).await.map(|()| None);
        }
        let token = i64::try_from(token).ok();
        let taken = token.and_then(|token| terms.written(claim, token, goes_on)).map(Some);
        let says = || error::damaged(self.link.place(), "a row's token is none");
        taken.ok_or_else(|| Failure::Broken(says()))
    }

    /// Takes the lock. What time it is, if a claim of the session is still noted in the row.
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
                // The lock is the session's even if what followed failed.
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

/// A connection that no pool knows of, and that the server ends if it hears nothing of it for so long.
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

/// Which session it is, and whether the server still means to be written to.
const LOOK: &str =
    "SELECT CONNECTION_ID(), CAST(CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";

/// How long a statement waits for a row. The server counts whole seconds.
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
