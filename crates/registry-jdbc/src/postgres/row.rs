//! Locks that are rows, locked in a transaction of ours for as long as they are held: `SELECT … FOR NO KEY UPDATE`.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Holder, Key, LockBackend, LossHints, Reach, Release, Renewal,
};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Executor as _, raw_sql};

use super::backend::ForSession;
use super::backend::{PostgresBackend, bytes, claim_id, column};
use super::config::{PostgresConfig, unusable};
use super::error::{self, damaged, explain, row_is_locked};
use super::session::PostgresSessionBackend;
use super::statement::{Statement, Value};
use crate::server::{Failure, Place, Places, RowId, Sessions, Terms, Took, Wire};

/// Locks in a PostgreSQL database that are rows, each locked by a transaction of its own until it is let go: the pessimistic lock of old.
///
/// The rows are those that a [`PostgresBackend`] has its leases in, and the same that [`LockIn`](crate::LockIn) locks in a transaction of the caller.
/// All three exclude each other, so a namespace may have locks of each kind, and move from one to another while it is in use.
///
/// A grant is two steps on one connection: a statement of its own notes the claim and a larger token in the row, unless somebody holds it,
/// and is committed; then a transaction locks the row `FOR NO KEY UPDATE`, if it is still this claim that is noted in it. What is lost in
/// between, by a crash, is a number. So a token was committed before anybody can use it, and no two transactions ever have the same.
/// `FOR NO KEY UPDATE` keeps out all that `FOR UPDATE` does, but for the check of a [`Fence`](crate::Fence), which is what it leaves room for.
///
/// One transaction cannot let go one of several rows, so each held lock has a connection of its own, which is neither the application's nor one of
/// a pool. There can be [so many](PostgresConfig::with_row_locks) at once; whoever wants one more is told of
/// [`RowLocksExhausted`](crate::RowLocksExhausted). Who waits has none. A process that dies frees its locks in that moment. Where the server
/// cannot notice (the host is gone, the process stands still) it ends the transaction after [`SILENCE`](Self::SILENCE), and a lease is never longer
/// than that: so the holder has given up by then.
///
/// But when the *server* ends the connection (`pg_terminate_backend`, a restart, a failover, a firewall that cuts connections), the lock is free at
/// once, while its holder learns of it up to a third of a second later, or when its lease is over if no word gets through. For that moment there can be two
/// holders, which is why this store is of class C. Tokens grow all the same, so fenced writes stay safe, those of a [`Fence`](crate::Fence) included.
///
/// Who holds such a lock is told like the holder of a lease, but for the time that is left; so is, without a name, that a transaction of a caller has the key. To
/// [break](LockBackend::force_release) such a lock ends the connection that holds it, for which the user must be the holder's, or have the rights of
/// `pg_signal_backend`. A transaction of a caller is not ended.
///
/// A transaction that stays open keeps the server from cleaning up dead rows, in all tables of the database: hold such locks for seconds or
/// minutes. Through a pooler they work in every mode, as a transaction keeps its connection; each held lock takes one of the pooler's too.
pub struct PostgresRowBackend {
    /// For the tables, and for those who wait.
    pub(super) rows: PostgresBackend,
    sessions: Sessions<RowWire>,
}

impl PostgresRowBackend {
    /// How long the server hears nothing of a holder before it ends the transaction; and the longest lease.
    pub const SILENCE: Duration = PostgresSessionBackend::SILENCE;

    /// Connects to the server, and makes the tables if they are absent.
    ///
    /// # Errors
    /// As for [`PostgresBackend::open`].
    ///
    /// # Cancel safety
    /// Dropping the future may leave finished tables behind, never half-made ones.
    pub async fn open(config: PostgresConfig) -> Result<Self, BackendError> {
        let rows = PostgresBackend::open(config.clone()).await?;
        let places = Places::new(config.row_locks);
        let wire = RowWire { rows: rows.for_session(), config, places };
        Ok(Self { rows, sessions: Sessions::new(wire) })
    }

    /// The namespace that this backend's locks live in.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.rows.namespace()
    }
}

#[async_trait]
impl LockBackend for PostgresRowBackend {
    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::new("postgres", GuaranteeClass::C, Reach::Network)
            .with_fencing()
            .with_tells_losses()
            .with_labels()
            .with_inspect()
            .with_leases(Capabilities::LEASE_MIN, Self::SILENCE);
        if self.rows.hears() { capabilities.with_wakes() } else { capabilities }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let mark = self.rows.moment();
        Ok(match self.sessions.take(claim).await? {
            Attempt::Busy(busy) => Attempt::Busy(busy.with_mark(mark)),
            granted @ Attempt::Granted(_) => granted,
        })
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.sessions.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = self.sessions.release(claim).await;
        self.rows.purge_by_chance(claim).await;
        released
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.rows.heard_of(claim.key(), busy.mark).await;
    }

    fn tell_losses(&self, hints: LossHints) {
        self.sessions.tell_losses(hints);
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        self.rows.holder(key).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.rows.holders().await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.rows.free_by_force(key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = self.rows.diagnose().await?;
        findings.extend(self.rows.look_for_room(self.rows.config.row_locks).await?);
        Ok(findings)
    }

    async fn close(&self) {
        self.sessions.wire().places.close_idle();
        self.rows.close().await;
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

/// What is said to the server for one lock.
struct RowWire {
    rows: ForSession,
    config: PostgresConfig,
    places: Places<PgConnection>,
}

/// A connection for one lock.
struct Connected {
    connection: PgConnection,
    place: Place,
    /// The open transaction, if there is one.
    transaction: Option<Transaction>,
}

/// How a transaction is known.
#[derive(Debug, PartialEq, Eq)]
struct Transaction {
    server_process: i32,
    number: String,
}

impl Transaction {
    fn read(row: &PgRow) -> Result<Self, BackendError> {
        Ok(Self { server_process: column(row, 0)?, number: column(row, 1)? })
    }
}

impl Connected {
    /// As text, so that it does not matter which connection a pooler has for it.
    async fn ask(&mut self, text: String) -> Result<Vec<PgRow>, sqlx::Error> {
        self.connection.fetch_all(raw_sql(AssertSqlSafe(text))).await
    }
}

/// What became of the first step.
enum Noted {
    Token(FencingToken),
    /// Somebody holds a lease.
    Leased,
    /// Somebody's transaction has locked the row.
    Locked,
}

impl RowWire {
    fn row_id(&self, key: &Key) -> RowId {
        RowId::of(&self.config.namespace, key)
    }

    /// Notes the claim and a larger token in the row, unless somebody holds it. It waits for nobody.
    async fn note(&self, connected: &mut Connected, claim: &Claim) -> Result<Noted, Failure> {
        let id = self.row_id(claim.key());
        let statement = Statement::new(
            &self.rows.texts.row_note,
            [
                bytes(id.bytes()),
                bytes(self.config.namespace.as_bytes()),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                Value::Number(i64::from(claim.token_block())),
                Value::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec())),
                Value::Word(format!("{}ms", ROW_WAIT.as_millis())),
            ],
        );
        let rows = statement.send(&mut connected.connection, self.config.plainly()).await;
        let rows = rows.map_err(error::failure)?;
        let row = rows.first().ok_or_else(|| Failure::Broken(damaged("nothing was answered")))?;
        if let Some(token) = column::<Option<i64>>(row, 0).map_err(Failure::Broken)? {
            let token = FencingToken::try_from(token);
            let token = token.map_err(|_| Failure::Broken(damaged("a row's token is negative")))?;
            return Ok(Noted::Token(token));
        }
        let is_leased: bool = column(row, 1).map_err(Failure::Broken)?;
        Ok(if is_leased { Noted::Leased } else { Noted::Locked })
    }

    /// Locks the row, if the claim is still what is noted in it.
    async fn lock(&self, connected: &mut Connected, claim: &Claim) -> Result<bool, Failure> {
        let id = self.row_id(claim.key());
        let silence = Value::Word(format!("{}s", PostgresRowBackend::SILENCE.as_secs()));
        let statement = Statement::new(
            &self.rows.texts.row_lock,
            [
                bytes(id.bytes()),
                claim_id(claim),
                Value::Number(id.mark()),
                silence,
                Value::Number(mark(claim.id())),
            ],
        );
        // One message. What is set ends with the transaction.
        let patience = self.config.busy_timeout.as_millis().max(1);
        let text = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL lock_timeout = {patience}; {}",
            statement.plain()
        );
        let rows = connected.ask(text).await.map_err(broken)?;
        let Some(row) = rows.last() else {
            connected.ask("ROLLBACK".to_owned()).await.map_err(broken)?;
            return Ok(false);
        };
        connected.transaction = Some(Transaction::read(row).map_err(Failure::Broken)?);
        Ok(true)
    }

    /// Whether a transaction has marked itself as one with this lock.
    async fn is_marked(&self, connected: &mut Connected, key: &Key) -> Result<bool, Failure> {
        let mark = Value::Number(self.row_id(key).mark());
        let statement = Statement::new(&self.rows.texts.locked_in, [mark]);
        let rows = statement.send(&mut connected.connection, self.config.plainly()).await;
        let rows = rows.map_err(error::failure)?;
        let row = rows.first().ok_or_else(|| Failure::Broken(damaged("nothing was answered")))?;
        column(row, 0).map_err(Failure::Broken)
    }
}

impl Wire for RowWire {
    type Connection = Connected;

    async fn connect(&self) -> Result<Connected, BackendError> {
        let (place, idle) = self.places.enter().map_err(|full| full.told("postgres"))?;
        let connection = match idle {
            Some(connection) => connection,
            None => super::link::connect(&self.config).await?,
        };
        Ok(Connected { connection, place, transaction: None })
    }

    async fn take(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        terms: &Terms,
    ) -> Result<Took, Failure> {
        // Between a look at the row and the look at who has it somebody may let it go.
        const TRIES_MAX: u32 = 3;
        for _ in 0..TRIES_MAX {
            match self.note(connected, claim).await {
                Ok(Noted::Token(token)) => {
                    let locked = self.lock(connected, claim).await?;
                    let taken = terms.written(claim, i64::from(token), false);
                    let taken = taken.filter(|_| locked);
                    return Ok(taken.map_or(Took::Busy(None), Took::Grant));
                }
                Ok(Noted::Leased) => return Ok(Took::Busy(None)),
                Ok(Noted::Locked) => {
                    if self.is_marked(connected, claim.key()).await? {
                        return Ok(Took::Busy(None));
                    }
                }
                Err(failure) => {
                    if matches!(failure, Failure::Broken(_)) {
                        // What one connection has met the others would.
                        self.places.close_idle();
                    }
                    return Err(failure);
                }
            }
        }
        Err(Failure::Answered(row_is_locked()))
    }

    async fn give_back(&self, connected: &mut Connected, key: &Key) -> Result<(), Failure> {
        let id = self.row_id(key);
        let statement = Statement::new(&self.rows.texts.row_tell, self.rows.news(id));
        // One message; those who listen are told by the commit.
        connected.ask(format!("{}; COMMIT", statement.plain())).await.map_err(broken)?;
        connected.transaction = None;
        Ok(())
    }

    async fn look(&self, connected: &mut Connected) -> Result<(), Failure> {
        // Fails in a transaction that has failed; outside of one there is no number.
        let rows = connected.ask(LOOK.to_owned()).await.map_err(broken)?;
        let row = rows.first().ok_or_else(|| Failure::Broken(damaged("nothing was answered")))?;
        let number: Option<String> = column(row, 1).map_err(Failure::Broken)?;
        let is_the_same = number.is_some()
            && Some(Transaction::read(row).map_err(Failure::Broken)?) == connected.transaction;
        if is_the_same { Ok(()) } else { Err(Failure::Broken(mixed_up())) }
    }

    // A row that is locked is not purged.
    async fn keep(
        &self,
        _: &mut Connected,
        _: &Claim,
        _: FencingToken,
        _: ClaimId,
    ) -> Result<(), Failure> {
        Ok(())
    }

    fn spare(&self, connected: Connected) -> Option<Connected> {
        let Connected { connection, place, transaction } = connected;
        if transaction.is_none() {
            self.places.leave(place, connection);
        }
        None
    }

    fn name(&self, key: &Key) -> Vec<u8> {
        self.row_id(key).bytes().to_vec()
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

/// What the transaction marks itself with that holds the lock for this claim; two with the same mark cost a mistaken name.
fn mark(claim: ClaimId) -> i64 {
    let mut mark = [0; 8];
    mark.copy_from_slice(&claim.to_bytes()[..8]);
    i64::from_be_bytes(mark)
}

/// In a transaction whatever fails is its end, and that of the lock.
fn broken(error: sqlx::Error) -> Failure {
    Failure::Broken(explain(error))
}

fn mixed_up() -> BackendError {
    unusable(
        "the transaction that a row is locked by is not the connection's any more; is there a pooler that gives each statement another one?",
    )
}

const LOOK: &str = "SELECT pg_backend_pid(), pg_current_xact_id_if_assigned()::text";

/// How long the first step waits for somebody who makes the same row in this moment.
const ROW_WAIT: Duration = Duration::from_millis(200);
