//! Locks that last as long as a connection: `pg_try_advisory_lock` on a dedicated connection.
//!
//! The connection and its queue are in `server::session`; the statements are in `sql`.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Invalidations, Key, LockBackend, Reach, Release, Renewal,
};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor as _, raw_sql};
use tokio::time::timeout;

use super::backend::{PostgresBackend, bytes, claim_id, column, span};
use super::config::{PostgresConfig, unusable};
use super::error::{self, damaged, explain};
use super::link;
use super::statement::{Statement, Value};
use crate::server::{Failure, RowId, Session, Terms, Took, Wire};

/// Locks in a PostgreSQL database that end with their holder's connection, not with a lease.
///
/// They are advisory locks, `pg_try_advisory_lock(N)`. N is the first eight bytes of a SHA-256
/// hash, as a signed number in network byte order. The hash covers the length of the namespace in
/// eight bytes, the namespace, and the key. Among ten thousand keys that are held at once, two
/// share a number with odds of 3 in 10^12; the only effect is that they exclude each other. The
/// lock also excludes every other program in this database that takes the same number, in any
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
/// which is why this backend has guarantee class C. Tokens grow as in a [`PostgresBackend`], in the
/// same tables. So fenced writes to other systems stay safe, including those of a
/// [`Fence`](crate::Fence). [`LockIn`](crate::LockIn) takes both the row and the advisory lock for
/// a transaction.
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
    pub(super) session: Session<PostgresWire>,
}

impl PostgresSessionBackend {
    /// The time without a sign of life after which the server ends the session. It is also the
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
        let wire = PostgresWire { rows: rows.for_session(), config };
        wire.check_way().await?;
        Ok(Self { rows, session: Session::new(wire) })
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
        let capabilities = Capabilities::new("postgres", GuaranteeClass::C, Reach::Network)
            .with_fencing()
            .with_invalidations()
            .with_leases(Capabilities::LEASE_MIN, Self::SILENCE);
        if self.rows.hears() { capabilities.with_wakes() } else { capabilities }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mark = self.rows.moment();
        Ok(match self.session.take(claim).await? {
            Attempt::Busy(busy) => Attempt::Busy(busy.with_mark(mark)),
            granted @ Attempt::Granted(_) => granted,
        })
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.session.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = self.session.release(claim).await;
        self.rows.purge_by_chance(claim).await;
        released
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.rows.heard_of(claim.key(), busy.mark).await;
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

impl fmt::Debug for PostgresSessionBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresSessionBackend").field("config", &self.rows.config).finish()
    }
}

/// Sends the statements of a session.
pub(super) struct PostgresWire {
    rows: super::backend::ForSession,
    config: PostgresConfig,
}

/// A connection, and the process id of its server process.
pub(super) struct Connected {
    connection: PgConnection,
    server_process: i32,
}

impl Connected {
    async fn ask(&mut self, text: &'static str) -> Result<Vec<PgRow>, sqlx::Error> {
        self.connection.fetch_all(raw_sql(text)).await
    }

    async fn look(&mut self) -> Result<(), Failure> {
        let rows = self.ask(LOOK).await.map_err(error::failure)?;
        self.is_the_same(&rows)
    }

    /// Checks that the first column is the expected process id. So a pooler that changes
    /// connections is detected no later than at the next answer.
    fn is_the_same(&self, rows: &[PgRow]) -> Result<(), Failure> {
        let row = rows.first().ok_or_else(|| Failure::Broken(damaged("nothing was answered")))?;
        if column::<i32>(row, 0).map_err(Failure::Broken)? == self.server_process {
            Ok(())
        } else {
            Err(Failure::Broken(mixed_up()))
        }
    }
}

impl PostgresWire {
    /// Detects a pooler that changes connections between transactions. Leaves nothing behind on
    /// them.
    async fn check_way(&self) -> Result<(), BackendError> {
        // Two simultaneous sessions must have two server processes. Otherwise a pooler shares one
        // process between both.
        let (mut one, mut two) = (self.connect_plainly().await?, self.connect_plainly().await?);
        let are_two = one.server_process != two.server_process;
        let stay = async {
            // The open transaction occupies one process. A pooler that shares processes serves the
            // second connection from another one, which changes its process id.
            one.ask("BEGIN").await.map_err(error::failure)?;
            one.look().await?;
            two.look().await?;
            one.ask("ROLLBACK").await.map_err(error::failure)
        };
        let stayed = timeout(self.config.response_timeout, stay).await;
        match stayed.map_err(|_| error::silent())? {
            Ok(_) if are_two => {}
            Ok(_) => return Err(mixed_up()),
            Err(Failure::Answered(error) | Failure::Broken(error)) => return Err(error),
        }
        for connected in [one, two] {
            // Optional: the server would notice the end of the connection anyway.
            let _ = timeout(self.config.connect_timeout, connected.connection.close()).await;
        }
        Ok(())
    }

    async fn connect_plainly(&self) -> Result<Connected, BackendError> {
        let mut connection = link::connect(&self.config).await?;
        let look = timeout(self.config.connect_timeout, connection.fetch_all(raw_sql(LOOK)));
        let rows = look.await.map_err(|_| error::unreachable_in_time())?.map_err(explain)?;
        let row = rows.first().ok_or_else(|| damaged("nothing was answered"))?;
        Ok(Connected { server_process: column(row, 0)?, connection })
    }

    async fn send(
        &self,
        connected: &mut Connected,
        statement: &Statement<'_>,
    ) -> Result<Vec<PgRow>, Failure> {
        let rows = statement.send(&mut connected.connection, self.config.manner()).await;
        let rows = rows.map_err(error::failure)?;
        connected.is_the_same(&rows)?;
        Ok(rows)
    }

    fn row_id(&self, key: &Key) -> RowId {
        RowId::of(&self.config.namespace, key)
    }

    async fn try_to_take(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        terms: &Terms,
    ) -> Result<Took, Failure> {
        let Some(last) = &terms.last else {
            return self.note(connected, claim, terms, How::Take).await;
        };
        let id = self.row_id(claim.key());
        let values = [Value::Number(id.number()), bytes(id.bytes()), bytes(&last.claim.to_bytes())];
        let look = Statement::new(&self.rows.texts.session_look, values).plain();
        let rows = connected.connection.fetch_all(raw_sql(AssertSqlSafe(look))).await;
        let rows = rows.map_err(error::failure)?;
        connected.is_the_same(&rows)?;
        if !column::<bool>(&rows[0], 1).map_err(Failure::Broken)? {
            return Ok(Took::Busy(None));
        }
        let Some(row) = rows.get(1) else {
            return self.note(connected, claim, terms, How::Keep).await;
        };
        match terms.unwritten(column(row, 0).map_err(Failure::Broken)?) {
            Some(taken) => Ok(Took::Grant(taken)),
            None => self.note(connected, claim, terms, How::GoOn).await,
        }
    }

    /// Writes the claim and a larger token to the row, unless another client holds the row by a
    /// lease.
    async fn note(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        terms: &Terms,
        how: How,
    ) -> Result<Took, Failure> {
        let id = self.row_id(claim.key());
        let goes_on = how == How::GoOn;
        let texts = &self.rows.texts;
        let text = if how == How::Take { &texts.session_take } else { &texts.session_note };
        let statement = Statement::new(
            text,
            [
                bytes(id.bytes()),
                bytes(self.config.namespace.as_bytes()),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                Value::Number(terms.block(goes_on)),
                Value::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec())),
                Value::Number(id.number()),
                Value::Word(format!("{}ms", ROW_WAIT.as_millis())),
            ],
        );
        let rows = self.send(connected, &statement).await?;
        let row = &rows[0];
        let Some(token) = column::<Option<i64>>(row, 2).map_err(Failure::Broken)? else {
            if column::<bool>(row, 4).map_err(Failure::Broken)? {
                return Ok(Took::RowLocked(error::row_is_locked()));
            }
            let left = column::<Option<i64>>(row, 3).map_err(Failure::Broken)?;
            return Ok(Took::Busy(left.map(span)));
        };
        let taken = terms.written(claim, token, goes_on).map(Took::Grant);
        taken.ok_or_else(|| Failure::Broken(damaged("a row's token is none")))
    }
}

/// How the session obtains the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Take,
    /// The session has the advisory lock already. The previous holder is unknown.
    Keep,
    /// The session has the advisory lock already, and no other client had it since the session's
    /// last grant.
    GoOn,
}

impl Wire for PostgresWire {
    type Connection = Connected;

    async fn connect(&self) -> Result<Connected, BackendError> {
        let mut connected = self.connect_plainly().await?;
        let tell = async {
            // The server checks the connection as well. On a Unix socket some of these settings
            // have no effect.
            let seconds = PostgresSessionBackend::SILENCE.as_secs();
            let patience = self.config.busy_timeout.as_millis().max(1);
            let text = format!(
                "SET default_transaction_isolation = 'read committed'; SET lock_timeout = {patience}; SET idle_session_timeout = '{seconds}s'; SET tcp_user_timeout = '{seconds}s'; SET tcp_keepalives_idle = {}; \
                 SET tcp_keepalives_interval = {}; SET tcp_keepalives_count = 3; {}; {LOOK}",
                seconds / 2,
                seconds / 6,
                self.rows.texts.session_prepare.as_str(),
            );
            let rows = connected.connection.fetch_all(raw_sql(AssertSqlSafe(text))).await;
            connected.is_the_same(&rows.map_err(error::failure)?)
        };
        let told = timeout(self.config.connect_timeout, tell).await;
        match told.map_err(|_| error::unreachable_in_time())? {
            Ok(()) => Ok(connected),
            Err(Failure::Answered(error) | Failure::Broken(error)) => Err(error),
        }
    }

    async fn take(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        terms: &Terms,
    ) -> Result<Took, Failure> {
        match self.try_to_take(connected, claim, terms).await {
            Err(Failure::Answered(error)) => {
                // The session keeps the advisory lock even if the statement that took it failed.
                self.give_back(connected, claim.key()).await?;
                if error::tells_of_locked_row(&error) {
                    return Ok(Took::RowLocked(error));
                }
                Err(Failure::Answered(error))
            }
            took => took,
        }
    }

    async fn give_back(&self, connected: &mut Connected, key: &Key) -> Result<(), Failure> {
        let id = self.row_id(key);
        let [channel, message, mark] = self.rows.news(id);
        let values = [Value::Number(id.number()), channel, message, mark];
        let statement = Statement::new(&self.rows.texts.session_give_back, values).for_one();
        self.send(connected, &statement).await.map(drop).map_err(Failure::into_broken)
    }

    async fn look(&self, connected: &mut Connected) -> Result<(), Failure> {
        connected.look().await
    }

    async fn keep(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        token: FencingToken,
        noted: ClaimId,
    ) -> Result<(), Failure> {
        let statement = Statement::new(
            &self.rows.texts.session_keep,
            [
                bytes(self.row_id(claim.key()).bytes()),
                bytes(self.config.namespace.as_bytes()),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                Value::Number(i64::from(token)),
                Value::Number(i64::from(claim.token_block())),
                Value::Word(format!("{}ms", ROW_WAIT.as_millis())),
                bytes(&noted.to_bytes()),
            ],
        );
        self.send(connected, &statement).await.map(drop)
    }

    fn name(&self, key: &Key) -> Vec<u8> {
        self.row_id(key).number().to_be_bytes().to_vec()
    }

    fn silent(&self) -> BackendError {
        error::silent()
    }

    fn closed(&self) -> BackendError {
        error::closed()
    }

    fn overdue(&self) -> BackendError {
        error::overdue()
    }

    fn answer_limit(&self) -> Duration {
        self.config.response_timeout
    }
}

fn mixed_up() -> BackendError {
    unusable(
        "session locks do not work through a pooler that gives each transaction another connection; connect past it, or use leases",
    )
}

const LOOK: &str = "SELECT pg_backend_pid()";

/// How long a statement waits for a row that another transaction has inserted and not committed.
/// All locks of the session wait with it.
const ROW_WAIT: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_have_the_numbers_that_other_programs_take() {
        let number =
            |namespace: &str, key: &str| RowId::of(namespace, &Key::new(key).unwrap()).number();
        assert_eq!(number("default", "orders/42"), 0x03c4_a6d0_3c53_a5b0);
        assert_ne!(number("a", "bc"), number("ab", "c"));
        // A number whose first bit is set is negative.
        assert!((0..64).any(|n| number("default", &n.to_string()) < 0));
    }
}
