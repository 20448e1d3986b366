//! Locks that live as long as a connection: `pg_try_advisory_lock` on one of its own.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Key, LockBackend, LossHints, Reach, Release, Renewal,
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

/// Locks in a PostgreSQL database that end with the connection of the one who holds them, not with a lease.
///
/// They are advisory locks, `pg_try_advisory_lock(N)`, where N is the first eight bytes of the SHA-256 of namespace and key, as a signed number in
/// network byte order. (What is hashed is the length of the namespace in eight bytes, the namespace, the key.) Of ten thousand keys that are
/// held at once, the odds are 3 in 10^12 that any two share a number; they then exclude each other, nothing worse. Everybody in this database who
/// takes the same number is kept out, whatever the language. Leases of a [`PostgresBackend`] are respected, but do not respect these: all
/// who lock in one namespace must do it in the same way.
///
/// All locks of a backend share one connection, which is neither the application's nor one of a pool. It is looked after several times a
/// second while anything is held: when it is found broken, all holders are told at once. A process that dies frees its locks in that moment, without
/// a lease to be waited for. Where the server cannot notice (the host is gone, the process stands still) it ends the session after
/// [`SILENCE`](Self::SILENCE), and a lease is never longer than that: so the holder has given up by then.
///
/// But when the *server* ends the session (`pg_terminate_backend`, a restart, a failover, a firewall that cuts connections), the lock is free at
/// once, while its holder learns of it up to a third of a second later, or when its lease is over if no word gets through. For that moment there can be two
/// holders, which is why this store is of class C. Tokens grow as in a [`PostgresBackend`], in the same tables: fenced writes to other
/// systems stay safe, those of a [`Fence`](crate::Fence) included. [`LockIn`](crate::LockIn) takes both the row and the advisory lock, for a transaction.
///
/// What is behind such a lock, who holds it and since when, the server does not know; so it cannot be listed or broken, but by
/// `pg_terminate_backend`, which takes all locks of that process.
///
/// A pooler that gives each transaction another connection would hand locks to strangers: where one is noticed, opening or locking fails. One that keeps
/// a connection per session is fine.
pub struct PostgresSessionBackend {
    /// For the tables, and for those who wait.
    pub(super) rows: PostgresBackend,
    pub(super) session: Session<PostgresWire>,
}

impl PostgresSessionBackend {
    /// How long the server hears nothing of a session before it ends it; and the longest lease.
    pub const SILENCE: Duration = Duration::from_secs(60);

    /// Connects to the server, and makes the tables if they are absent.
    ///
    /// # Errors
    /// As for [`PostgresBackend::open`]; `Misconfigured` also behind a pooler that mixes connections up.
    ///
    /// # Cancel safety
    /// Dropping the future may leave finished tables behind, never half-made ones.
    pub async fn open(config: PostgresConfig) -> Result<Self, BackendError> {
        let rows = PostgresBackend::open(config.clone()).await?;
        let wire = PostgresWire { rows: rows.for_session(), config };
        wire.check_way().await?;
        Ok(Self { rows, session: Session::new(wire) })
    }

    /// The namespace that this backend's locks live in.
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
            .with_tells_losses()
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

impl fmt::Debug for PostgresSessionBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresSessionBackend").field("config", &self.rows.config).finish()
    }
}

/// What is said to the server of a session.
pub(super) struct PostgresWire {
    rows: super::backend::ForSession,
    config: PostgresConfig,
}

/// A connection and which of the server's processes it was given.
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

    /// Checks the first column: who mixes connections up is found out at the latest by the next answer.
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
    /// Refuses a pooler that mixes connections up. Leaves nothing behind on them.
    async fn check_way(&self) -> Result<(), BackendError> {
        // Two sessions at once are two processes of the server, or something in between lends the same one to both.
        let (mut one, mut two) = (self.connect_plainly().await?, self.connect_plainly().await?);
        let are_two = one.server_process != two.server_process;
        let stay = async {
            // One process is busy with a transaction; who has to go round it shows up.
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
            // Tidiness: the server would notice anyway.
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

    /// Notes the claim and a larger token in the row, unless somebody holds it by a lease.
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

/// How a lock comes to its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Take,
    /// The session has it already. Who had it before is not known.
    Keep,
    /// It has it already, and nobody else had it since it last had.
    GoOn,
}

impl Wire for PostgresWire {
    type Connection = Connected;

    async fn connect(&self) -> Result<Connected, BackendError> {
        let mut connected = self.connect_plainly().await?;
        let tell = async {
            // The server looks after the connection as well. On a socket in a folder some of these mean nothing, and do no harm.
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
                // The lock is the session's even if the statement that took it failed.
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

/// How long a statement, and all locks of the session with it, waits for a row that another transaction has inserted and not committed.
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
        // One whose first bit is set is negative.
        assert!((0..64).any(|n| number("default", &n.to_string()) < 0));
    }
}
