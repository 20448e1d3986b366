//! Locks that are rows, locked in a transaction of ours for as long as they are held: `SELECT … LOCK IN SHARE MODE`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Holder, Key, LockBackend, LossHints, Reach, Release, Renewal,
};
use sqlx::{AssertSqlSafe, Executor as _, MySqlConnection, raw_sql};
use tokio::time::{sleep, timeout};

use super::backend::MySqlBackend;
use super::config::{MySqlConfig, unusable};
use super::error::{self, Fate};
use super::link::Link;
use super::session::MySqlSessionBackend;
use super::sql;
use super::statement::{Statement, Statements};
use super::wake;
use crate::server::{Errand, Failure, Place, Places, Sessions, Terms, Took, Wire};

/// Locks in a MariaDB or MySQL database that are rows, each locked by a transaction of its own until it is let go: the pessimistic lock of old.
///
/// The rows are those that a [`MySqlBackend`] has its leases in, and the same that [`LockIn`](crate::LockIn) locks in a transaction of the caller.
/// All three exclude each other, so a namespace may have locks of each kind, and move from one to another while it is in use. Who wants a lease
/// while a row is locked is told of trouble that may pass, after `busy_timeout`, as the server does not say why a row is locked.
///
/// A grant is two steps on one connection: a statement of its own notes the claim and a larger token in the row, unless somebody holds it or has it
/// locked, and is committed; then a transaction locks the row `LOCK IN SHARE MODE`, if it is still this claim that is noted in it. What is lost in
/// between, by a crash, is a number. So a token was committed before anybody can use it, and no two transactions ever have the same. That lock is
/// shared with nothing but the check of a [`Fence`](crate::Fence): whoever wants the key has to change the row first.
///
/// One transaction cannot let go one of several rows, so each held lock has a connection of its own, which is neither the application's nor one of
/// a pool. There can be [so many](MySqlConfig::with_row_locks) at once; whoever wants one more is told of
/// [`RowLocksExhausted`](crate::RowLocksExhausted). Who waits has none, and looks every 5 to 250 ms. A process that dies frees its locks in that
/// moment. Where the server cannot notice (the host is gone, the process stands still) it ends the connection after [`SILENCE`](Self::SILENCE), and a
/// lease is never longer than that: so the holder has given up by then.
///
/// But when the *server* ends the connection (`KILL`, a restart, a failover, a firewall that cuts connections), the lock is free at
/// once, while its holder learns of it up to a third of a second later, or when its lease is over if no word gets through. For that moment there can be two
/// holders, which is why this store is of class C. Tokens grow all the same, so fenced writes stay safe, those of a [`Fence`](crate::Fence) included.
///
/// Who holds such a lock is told like the holder of a lease, but for the time that is left: the connection says so by a named lock. That a transaction of a caller has
/// the key is told without a name. To [break](LockBackend::force_release) such a lock ends the connection that holds it, for which the user must be the holder's, or have the right
/// `CONNECTION ADMIN` (`CONNECTION_ADMIN` in MySQL). A transaction of a caller is not ended.
///
/// A server that is set `read_only` grants nothing. Galera nodes lock no rows for each other: let all use the same one.
pub struct MySqlRowBackend {
    /// For the tables, and for those who wait.
    pub(super) rows: MySqlBackend,
    sessions: Sessions<RowWire>,
}

impl MySqlRowBackend {
    /// How long the server hears nothing of a holder before it ends the connection; and the longest lease.
    pub const SILENCE: Duration = MySqlSessionBackend::SILENCE;

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
        let places = Places::new(config.row_locks);
        Ok(Self { rows, sessions: Sessions::new(RowWire { config, link, statements, places }) })
    }

    /// The namespace that this backend's locks live in.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.rows.namespace()
    }

    async fn is_free(&self, key: &Key) -> Result<bool, BackendError> {
        let statements = &self.rows.statements;
        let unlocked = self.rows.link.rows(Errand::Acquire, || statements.lock_row(key)).await?;
        if let Some(row) = unlocked.first() {
            return Ok(self.rows.column::<i64>(row, 0)? == 0);
        }
        let there = self.rows.link.rows(Errand::Acquire, || statements.row_seen(key)).await?;
        Ok(there.is_empty())
    }
}

#[async_trait]
impl LockBackend for MySqlRowBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("mysql", GuaranteeClass::C, Reach::Network)
            .with_fencing()
            .with_wakes()
            .with_tells_losses()
            .with_labels()
            .with_inspect()
            .with_leases(Capabilities::LEASE_MIN, Self::SILENCE)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.sessions.take(claim).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.sessions.renew(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = self.sessions.release(claim).await;
        self.rows.purge_by_chance(claim).await;
        released
    }

    /// Looks, less often as the wait grows old: nobody is told of anything.
    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        wake::until_free(|| self.is_free(claim.key())).await;
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

impl fmt::Debug for MySqlRowBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlRowBackend")
            .field("config", &self.rows.config)
            .field("sessions", &self.sessions)
            .finish()
    }
}

/// What is said to the server for one lock.
struct RowWire {
    config: MySqlConfig,
    link: Arc<Link>,
    statements: Arc<Statements>,
    places: Places<MySqlConnection>,
}

/// A connection for one lock.
struct Connected {
    connection: MySqlConnection,
    place: Place,
    /// What has the row locked, if anything.
    transaction: Option<Transaction>,
}

/// The open transaction of a connection.
struct Transaction {
    /// The server's number for the connection.
    connection: u64,
    /// Whether others can see whose it is.
    is_named: bool,
}

impl RowWire {
    /// In a transaction whatever fails may be its end, and that of the lock.
    fn broken(&self, error: sqlx::Error) -> Failure {
        Failure::Broken(self.link.explain(error))
    }

    async fn change(
        &self,
        connected: &mut Connected,
        statement: Statement,
    ) -> Result<u64, Failure> {
        let done = statement.execute(&mut connected.connection).await;
        done.map(|done| done.last_insert_id()).map_err(|error| self.link.failure(error))
    }

    /// Notes the claim and a larger token in the row, unless somebody holds it. Makes the row if there is none.
    async fn note(
        &self,
        connected: &mut Connected,
        claim: &Claim,
    ) -> Result<Option<FencingToken>, Failure> {
        for pause in NOTE_PAUSES {
            let token = self.change(connected, self.statements.row_note(claim)).await?;
            if token != 0 {
                let token = i64::try_from(token).unwrap_or(-1);
                let says = || error::damaged(self.link.place(), "a row's token is negative");
                let token = FencingToken::try_from(token);
                return token.map(Some).map_err(|_| Failure::Broken(says()));
            }
            self.check_writable(connected).await?;
            let seen = self.statements.row_seen(claim.key());
            let rows = seen.fetch_all(&mut connected.connection).await;
            let rows = rows.map_err(|error| self.link.failure(error))?;
            match rows.first() {
                None => {
                    self.change(connected, self.statements.make_row(claim.key())).await?;
                }
                Some(row) if self.link.read::<Option<i64>>(row, 0)?.is_some() => return Ok(None),
                // Somebody has it locked: a holder, or somebody who merely looks whether it is free and is gone in a moment.
                Some(_) => sleep(pause).await,
            }
        }
        Ok(None)
    }

    /// Nothing is ever granted by a server that does not mean to be written to.
    async fn check_writable(&self, connected: &mut Connected) -> Result<(), Failure> {
        let meta = self.statements.meta().fetch_all(&mut connected.connection).await;
        let rows = meta.map_err(|error| self.link.failure(error))?;
        let says = "the meta table has lost its row";
        let lost = || Failure::Answered(error::damaged(self.link.place(), says).as_refused());
        let row = rows.first().ok_or_else(lost)?;
        if self.link.read::<i64>(row, 2)? == 0 {
            // Connections that are made anew may lead to its successor.
            self.places.close_idle();
            return Err(Failure::Broken(error::read_only(self.link.place())));
        }
        Ok(())
    }

    /// Locks the row, if the claim is still what is noted in it.
    async fn lock(&self, connected: &mut Connected, claim: &Claim) -> Result<bool, Failure> {
        let begin = connected.connection.execute(raw_sql("START TRANSACTION")).await;
        begin.map_err(|error| self.broken(error))?;
        let lock = self.statements.row_lock(claim).fetch_all(&mut connected.connection).await;
        let rows = lock.map_err(|error| self.broken(error))?;
        let Some(row) = rows.first() else {
            let end = connected.connection.execute(raw_sql("ROLLBACK")).await;
            end.map_err(|error| self.broken(error))?;
            return Ok(false);
        };
        let number = self.link.read(row, 0)?;
        let keep = format!("{KEEP}; DO GET_LOCK('{}', 0)", sql::row_name(claim.id()));
        let kept = connected.connection.execute(raw_sql(AssertSqlSafe(keep))).await;
        let is_named = match kept {
            Ok(_) => true,
            // Some clusters have no named locks. Then nobody is told who holds the row.
            Err(error) if error::fate(&error) == Fate::Answered => false,
            Err(error) => return Err(self.broken(error)),
        };
        connected.transaction = Some(Transaction { connection: number, is_named });
        Ok(true)
    }
}

impl Wire for RowWire {
    type Connection = Connected;

    async fn connect(&self) -> Result<Connected, BackendError> {
        let (place, idle) = self.places.enter().map_err(|full| full.told("mysql"))?;
        if let Some(connection) = idle {
            return Ok(Connected { connection, place, transaction: None });
        }
        let begin = super::session::connect(&self.config, MySqlRowBackend::SILENCE);
        let begun = timeout(self.config.connect_timeout, begin).await;
        let begun = begun
            .map_err(|_| error::silent(self.link.place(), self.config.connect_timeout))?
            .map_err(|error| self.link.explain(error))?;
        Ok(Connected { connection: begun, place, transaction: None })
    }

    async fn take(
        &self,
        connected: &mut Connected,
        claim: &Claim,
        terms: &Terms,
    ) -> Result<Took, Failure> {
        let noted = self.note(connected, claim).await;
        if matches!(noted, Err(Failure::Broken(_))) {
            // What one connection has met the others would.
            self.places.close_idle();
        }
        let Some(token) = noted? else { return Ok(Took::Busy(None)) };
        let locked = self.lock(connected, claim).await?;
        let taken = terms.written(claim, i64::from(token), false).filter(|_| locked);
        Ok(taken.map_or(Took::Busy(None), Took::Grant))
    }

    async fn give_back(&self, connected: &mut Connected, _: &Key) -> Result<(), Failure> {
        let is_named = connected.transaction.as_ref().is_some_and(|held| held.is_named);
        let end = if is_named { "COMMIT; DO RELEASE_ALL_LOCKS()" } else { "COMMIT" };
        let end = connected.connection.execute(raw_sql(end)).await;
        end.map_err(|error| self.broken(error))?;
        connected.transaction = None;
        Ok(())
    }

    async fn look(&self, connected: &mut Connected) -> Result<(), Failure> {
        // Fails if the transaction is over, whatever has ended it: then there is no such savepoint.
        let rows = connected.connection.fetch_all(raw_sql(LOOK)).await;
        let rows = rows.map_err(|error| self.broken(error))?;
        let says = || error::damaged(self.link.place(), "nothing was answered");
        let row = rows.last().ok_or_else(|| Failure::Broken(says()))?;
        let held_by = connected.transaction.as_ref().map(|held| held.connection);
        if Some(self.link.read::<u64>(row, 0)?) != held_by {
            return Err(Failure::Broken(unusable(
                "row locks do not work through a proxy that gives each statement another connection; connect past it, or use leases",
            )));
        }
        if self.link.read::<i64>(row, 1)? == 0 {
            return Err(Failure::Broken(error::read_only(self.link.place())));
        }
        Ok(())
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

/// What is locked for longer than these together is somebody's. The server does not say whose.
const NOTE_PAUSES: [Duration; 5] = [
    Duration::from_millis(1),
    Duration::from_millis(2),
    Duration::from_millis(3),
    Duration::from_millis(4),
    Duration::ZERO,
];

/// By which the transaction is known.
const KEEP: &str = "SAVEPOINT lock_registry_row";

/// Releases nothing that was locked before. Then which connection it is, and whether the server still means to be written to.
const LOOK: &str = "ROLLBACK TO SAVEPOINT lock_registry_row; \
    SELECT CONNECTION_ID(), CAST(CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";
