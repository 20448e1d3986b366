//! The lease-based backend: the operations on a lock's row. The statements are in `sql`. Only the
//! server's clock is used.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, FencingToken, Finding, Grant, GuaranteeClass,
    Holder, Key, LockBackend, Reach, Release, Renewal,
};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, Row};

use super::config::PostgresConfig;
use super::ears::{Channel, Ears};
use super::error::{self, damaged, explain};
use super::link::{Link, Repeat};
use super::open::{self, Opened};
use super::renew::CLAIMS_MAX;
use super::sql::{self, Text, Texts};
use super::statement::{Statement, Value};
use crate::server::{Errand, RecentRows, RowId};

/// Locks in a PostgreSQL database. They exclude all clients of that database.
///
/// A grant lasts until its lease ends on the server's clock. A token is that clock's time in
/// microseconds, or the key's last token plus one if that is larger. So tokens grow across release,
/// expiry, restart, failover and purge.
///
/// A grant or a renewal is on the server's disk when it is answered, if the server is configured so
/// (`synchronous_commit`, `fsync`). A release need not be. A release wakes the waiting callers of
/// all processes by `NOTIFY`.
///
/// A promoted standby has the grants that were replicated to it. With asynchronous replication the
/// last grants may be missing, and their keys are then free. Tokens grow even then, unless the
/// standby's clock is behind by more than the promotion took. So fenced writes stay safe.
///
/// The backend uses its own connections and never joins a transaction of the application. It opens
/// at most as many as [configured](PostgresConfig::with_connections), plus three, independent of
/// the number of held or awaited locks.
///
/// # Examples
/// ```no_run
/// use registry_core::{Attempt, Claim, Key, LockBackend, Release};
/// use registry_jdbc::{PostgresBackend, PostgresConfig};
/// # use std::time::Duration;
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let config = PostgresConfig::from_url("postgres://worker:secret@db.example/shop")?;
/// let backend = PostgresBackend::open(config).await?;
/// let claim = Claim::new(Key::new("orders/42")?, Duration::from_secs(30));
/// assert!(matches!(backend.try_acquire(&claim).await?, Attempt::Granted(_)));
/// assert_eq!(backend.release(&claim).await?, Release::Freed);
/// backend.close().await;
/// # Ok(())
/// # }
/// ```
pub struct PostgresBackend {
    pub(super) config: PostgresConfig,
    pub(super) store: String,
    pub(super) texts: Texts,
    pub(super) link: Link,
    pub(super) ears: Option<Ears>,
    channel: Channel,
    let_go: RecentRows,
    /// Rows for which a wait ended without a notification. Their next attempt probably finds them
    /// held, so it reads the row first.
    not_woken: RecentRows,
}

impl PostgresBackend {
    /// Connects to the server, and creates the tables if they are missing.
    ///
    /// # Errors
    /// [`BackendError`] with a message that says what to do:
    ///
    /// - `Misconfigured` for a missing database, missing or newer tables, an old server or an
    ///   invalid name.
    /// - `Denied` for a wrong user or password, or a missing right.
    /// - `Transient` if the server cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future may leave complete tables behind, never partial ones.
    pub async fn open(config: PostgresConfig) -> Result<Self, BackendError> {
        let Opened { tables, store } = open::open(&config).await?;
        let channel = Channel::of(RowId::of_namespace(&config.namespace));
        let ears = config.for_listening().map(|server| Ears::new(server, channel.clone()));
        Ok(Self {
            texts: Texts::new(&tables),
            link: Link::new(&config),
            config,
            store,
            ears,
            channel,
            let_go: RecentRows::default(),
            not_woken: RecentRows::default(),
        })
    }

    /// Returns the statements that create the tables, for installations where this program must not
    /// create them.
    #[must_use]
    pub const fn schema() -> &'static str {
        sql::SCHEMA
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.config.namespace
    }

    /// Returns whether the backend has a listener.
    pub(super) const fn hears(&self) -> bool {
        self.ears.is_some()
    }

    /// Returns the statements and the channel for the backends whose locks end with a connection.
    pub(super) fn for_session(&self) -> ForSession {
        ForSession { texts: self.texts.clone(), channel: self.channel.clone() }
    }

    /// Returns the name of this namespace's notification channel.
    pub(super) fn channel(&self) -> &str {
        self.channel.name()
    }

    /// Returns the current position in the listener's notifications, for
    /// [`heard_of`](Self::heard_of).
    pub(super) fn moment(&self) -> u64 {
        self.ears.as_ref().map_or(0, Ears::moment)
    }

    /// Returns when the lock may have been released after `moment`. Never returns if there is no
    /// listener.
    pub(super) async fn heard_of(&self, key: &Key, moment: u64) {
        match &self.ears {
            Some(ears) => ears.wait(self.row_id(key).short(), moment).await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn row_id(&self, key: &Key) -> RowId {
        RowId::of(&self.config.namespace, key)
    }

    /// Returns the statement that finds the claim's grant and keeps it from passing to another
    /// claim.
    pub(super) fn fence_statement(&self, claim: &Claim, token: FencingToken) -> Statement<'_> {
        self.fencing(&self.texts.fence, claim, token)
    }

    /// Returns the same for a grant that ends with a connection.
    pub(super) fn fence_held_statement(&self, claim: &Claim, token: FencingToken) -> Statement<'_> {
        self.fencing(&self.texts.fence_held, claim, token)
    }

    fn fencing<'a>(&self, text: &'a Text, claim: &Claim, token: FencingToken) -> Statement<'a> {
        let id = self.row_id(claim.key());
        let token = Value::Number(i64::from(token));
        Statement::new(text, [bytes(id.bytes()), claim_id(claim), token])
    }

    /// Grants the key if it is free, or returns its holder. Returns `None` if another client
    /// acquired or released the key between the statements.
    async fn ask_for(&self, claim: &Claim, mark: u64) -> Result<Option<Attempt>, BackendError> {
        let id = self.row_id(claim.key());
        let block = Value::Number(i64::from(claim.token_block()));
        let label = Value::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec()));
        let lease = Value::Number(micros(claim.lease()));
        let statement = if self.let_go.take(id) {
            let values = [bytes(id.bytes()), claim_id(claim), block, label, lease];
            Statement::new(&self.texts.take_again, values)
        } else {
            let namespace = bytes(self.config.namespace.as_bytes());
            let key = bytes(claim.key().as_str().as_bytes());
            let values = [bytes(id.bytes()), namespace, key, claim_id(claim), block, label, lease];
            Statement::new(&self.texts.acquire, values)
        };
        let statement = statement.for_one();
        // Only the engine may retry: the first request may be executed after the release that
        // follows the second one.
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Never).await?;
        if let Some(row) = rows.first() {
            let grant = Grant::new(Some(fencing_token(column(row, 0)?)?), claim.lease());
            return Ok(Some(Attempt::Granted(grant)));
        }
        // The holder may be this claim itself, granted by an attempt whose answer was lost.
        self.who_holds(claim, mark).await.map_err(BackendError::as_unknown)
    }

    async fn who_holds(&self, claim: &Claim, mark: u64) -> Result<Option<Attempt>, BackendError> {
        let rows = self.look_at(self.row_id(claim.key())).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let held = told_of(Holder::new(claim.key().clone()), row, 1)?;
        let left = held.lease_left.unwrap_or_default();
        if column::<Vec<u8>>(row, 0)? == claim.id().to_bytes() {
            return Ok(Some(Attempt::Granted(Grant::new(held.token, left.min(claim.lease())))));
        }
        Ok(Some(Attempt::Busy(
            Busy::new().with_retry_after(left).with_mark(mark).with_holder(held),
        )))
    }

    async fn look_at(&self, id: RowId) -> Result<Vec<PgRow>, BackendError> {
        let statement = Statement::new(&self.texts.look, [bytes(id.bytes())]);
        self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await
    }

    /// Returns the parameters of a release notification: channel, message, mark.
    pub(super) fn news(&self, id: RowId) -> [Value; 3] {
        news(&self.channel, id)
    }

    /// Returns the message that wakes the waiting callers of the lock.
    pub(super) fn message(id: RowId) -> Value {
        bytes(&id.short())
    }

    /// Returns whether a transaction has marked itself as [holding this lock](crate::LockIn).
    pub(super) async fn is_locked_in(&self, key: &Key) -> Result<bool, BackendError> {
        let mark = Value::Number(self.row_id(key).mark());
        let statement = Statement::new(&self.texts.locked_in, [mark]);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        let row = rows.first().ok_or_else(|| damaged("a statement was not answered"))?;
        column(row, 0)
    }

    /// Checks that the row of the table `meta` exists, after several attempts without an answer.
    /// Without that row no lock is ever granted.
    async fn check_meta(&self) -> Result<(), BackendError> {
        let statement = Statement::new(&self.texts.meta, []);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        if rows.is_empty() {
            return Err(damaged("the table with the name meta has lost its row").as_refused());
        }
        Ok(())
    }
}

/// The statements and the channel of this backend, for
/// [`PostgresSessionBackend`](crate::PostgresSessionBackend) and
/// [`PostgresRowBackend`](crate::PostgresRowBackend).
pub(super) struct ForSession {
    pub(super) texts: Texts,
    channel: Channel,
}

impl ForSession {
    /// Returns the parameters of a release notification: channel, message, mark.
    pub(super) fn news(&self, id: RowId) -> [Value; 3] {
        news(&self.channel, id)
    }
}

fn news(channel: &Channel, id: RowId) -> [Value; 3] {
    let mark = Value::Number(channel.mark(id.short()));
    [Value::Word(channel.name().to_owned()), PostgresBackend::message(id), mark]
}

#[async_trait]
impl LockBackend for PostgresBackend {
    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::new("postgres", GuaranteeClass::A, Reach::Network)
            .with_fencing()
            .with_labels()
            .with_inspect();
        if self.ears.is_some() { capabilities.with_wakes() } else { capabilities }
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        // Another client may acquire or release the row between reading and locking it. After
        // several such attempts the answer is `Busy` without a holder, which makes the engine retry
        // at once.
        const TRIES_MAX: u32 = 3;
        if self.not_woken.take(self.row_id(claim.key()))
            && let Some(held) = self.who_holds(claim, self.moment()).await?
        {
            return Ok(held);
        }
        for turn in 0..TRIES_MAX {
            let mark = self.moment();
            match self.ask_for(claim, mark).await {
                Ok(Some(attempt)) => return Ok(attempt),
                Ok(None) => {}
                Err(error) => {
                    let is_locked = error::tells_of_locked_row(&error);
                    // An earlier attempt of this loop may itself have been granted, on a connection
                    // that then broke.
                    let error = if turn > 0 { error.as_unknown() } else { error };
                    if is_locked && self.is_locked_in(claim.key()).await? {
                        return Ok(Attempt::Busy(Busy::new().with_mark(mark)));
                    }
                    return Err(error);
                }
            }
        }
        self.check_meta().await?;
        Ok(Attempt::Busy(Busy::new().with_retry_after(Duration::ZERO)))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.renew_in_chunks(claims).await
    }

    fn renewals_max(&self) -> usize {
        CLAIMS_MAX
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let id = self.row_id(claim.key());
        let [channel, message, mark] = self.news(id);
        let used = Value::Number(i64::from(claim.token_block()));
        let values = [bytes(id.bytes()), claim_id(claim), channel, message, mark, used];
        let statement = Statement::new(&self.texts.release, values).for_one();
        // A repeated release would return `NotHeld`. So the caller decides whether to repeat it.
        let rows = self.link.rows(Errand::Release, &statement, Repeat::Never).await?;
        let released = freed(&rows);
        if released == Release::Freed {
            self.let_go.note(id);
        }
        self.purge_by_chance(claim).await;
        Ok(released)
    }

    fn wakes_confirmed(&self, _claim: &Claim, busy: &Busy) -> bool {
        // The end of a session that holds the key sends no notification.
        busy.retry_after.is_some()
            && self.ears.as_ref().is_some_and(|ears| ears.are_confirmed(busy.mark))
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let id = self.row_id(claim.key());
        // The note remains if this future is dropped before it returns.
        self.not_woken.note(id);
        self.heard_of(claim.key(), busy.mark).await;
        self.not_woken.take(id);
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        self.holder(key).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.holders().await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.free_by_force(key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.look_for_trouble().await
    }

    async fn close(&self) {
        if let Some(ears) = &self.ears {
            ears.close();
        }
        self.link.close().await;
    }
}

/// Reads token, label and times from four adjacent columns, beginning at `first`.
pub(super) fn told_of(holder: Holder, row: &PgRow, first: usize) -> Result<Holder, BackendError> {
    let label: Option<Vec<u8>> = column(row, first + 1)?;
    let label = label.map(|label| String::from_utf8_lossy(&label).into_owned());
    let (held_for, left): (i64, Option<i64>) = (column(row, first + 2)?, column(row, first + 3)?);
    Ok(holder
        .with_label(label)
        .with_token(Some(fencing_token(column(row, first)?)?))
        .with_times(Some(span(held_for)), left.map(span)))
}

pub(super) fn column<'r, T>(row: &'r PgRow, index: usize) -> Result<T, BackendError>
where
    T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
{
    row.try_get(index).map_err(explain)
}

fn fencing_token(token: i64) -> Result<FencingToken, BackendError> {
    FencingToken::try_from(token).map_err(|_| damaged("a row's token is negative"))
}

pub(super) fn claim_id(claim: &Claim) -> Value {
    bytes(&claim.id().to_bytes())
}

pub(super) fn bytes(bytes: &[u8]) -> Value {
    Value::Bytes(bytes.to_vec())
}

/// Converts to the unit of the tables. Limits endless leases, so that a sum with the clock cannot
/// overflow.
pub(super) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).map_or(MICROS_MAX, |micros| micros.min(MICROS_MAX))
}

/// A thousand years.
const MICROS_MAX: i64 = 1000 * 366 * 24 * 60 * 60 * 1_000_000;

pub(super) fn span(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

pub(super) fn freed(rows: &[PgRow]) -> Release {
    if rows.is_empty() { Release::NotHeld } else { Release::Freed }
}

impl fmt::Debug for PostgresBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresBackend").field("config", &self.config).finish_non_exhaustive()
    }
}
