//! Row locks: a transaction of the store locks the row for as long as the lock is held (`SELECT …
//! LOCK IN SHARE MODE`).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Finding,
    GuaranteeClass, Holder, Invalidations, Key, LockBackend, Reach, Release, Renewal,
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
/// 1. A statement notes the claim and a larger token in the row and commits, unless the key is held
///    or the row is locked.
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
/// store is of class C. Tokens grow all the same, so fenced writes stay safe, including those of a
/// [`Fence`](crate::Fence).
///
/// The holder of such a lock is reported like that of a lease, without the remaining time: the
/// connection takes a named lock for this. A caller's transaction is reported by its key alone.
/// [Breaking](LockBackend::force_release) such a lock ends the connection that holds it. The user
/// must be the holder's, or have the privilege `CONNECTION ADMIN` (`CONNECTION_ADMIN` in MySQL). A
/// transaction of a caller is never ended.
///
/// A server that is set `read_only` grants nothing. Galera nodes lock no rows for each other: use
/// the same node for all clients.
pub struct MySqlRowBackend {
    /// For the tables, and for waiters.
    pub(super) rows: MySqlBackend,
    sessions: Sessions<RowWire>,
}

impl MySqlRowBackend {
    /// How long the server keeps a silent connection of a holder. Also the longest lease.
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
        let (link, statements) = (Arc::clone(&rows.link), Arc::clone(&rows.statements));
        let places = Places::new(config.row_locks);
        Ok(Self { rows, sessions: Sessions::new(RowWire { config, link, statements, places }) })
    }

    /// Returns the namespace of this backend's locks.
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
            .with_invalidations()
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

    /// Polls at growing intervals, because the server sends no notifications.
    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        wake::until_free(|| self.is_free(claim.key())).await;
    }

    fn subscribe_invalidations(&self, hints: Invalidations) {
        self.sessions.subscribe_invalidations(hints);
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

/// The SQL of one lock's connection.
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
    /// The transaction that has the row locked, if any.
    transaction: Option<Transaction>,
}

/// The open transaction of a connection.
struct Transaction {
    /// The server's id of the connection.
    connection: u64,
    /// Whether the named lock that shows the holder was taken.
    is_named: bool,
}

impl RowWire {
    /// Within a transaction, any error may have ended the transaction, and with it the lock.
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

    /// Notes the claim and a larger token in the row, unless the key is held. Creates the row if
    /// there is none.
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
                // Locked by a holder, or for milliseconds by another client that checks whether it
                // is free.
                Some(_) => sleep(pause).await,
            }
        }
        Ok(None)
    }

    /// Returns an error if the server is read-only: it must not grant anything.
    async fn check_writable(&self, connected: &mut Connected) -> Result<(), Failure> {
        let meta = self.statements.meta().fetch_all(&mut connected.connection).await;
        let rows = meta.map_err(|error| self.link.failure(error))?;
        let says = "the meta table has lost its row";
        let lost = || Failure::Answered(error::damaged(self.link.place(), says).as_refused());
        let row = rows.first().ok_or_else(lost)?;
        if self.link.read::<i64>(row, 2)? == 0 {
            // New connections may lead to the server's successor.
            self.places.close_idle();
            return Err(Failure::Broken(error::read_only(self.link.place())));
        }
        Ok(())
    }

    /// Locks the row, if the claim is still noted in it.
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
            // Some clusters have no named locks. The holder of the row is not shown there.
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
            // The other idle connections are probably broken too.
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
        // Fails if the transaction is over, for any reason, because its savepoint no longer exists.
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

    // A locked row is not purged.
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

/// A row that is locked for longer than their sum has a holder. The server does not report which.
const NOTE_PAUSES: [Duration; 5] = [
    Duration::from_millis(1),
    Duration::from_millis(2),
    Duration::from_millis(3),
    Duration::from_millis(4),
    Duration::ZERO,
];

/// The savepoint that identifies the transaction.
const KEEP: &str = "SAVEPOINT lock_registry_row";

/// Releases no earlier lock. Returns the connection's id, and whether the server is still writable.
const LOOK: &str = "ROLLBACK TO SAVEPOINT lock_registry_row; \
    SELECT CONNECTION_ID(), CAST(CAST(@@global.read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";
