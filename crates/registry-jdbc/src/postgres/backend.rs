//! What is asked of a lock's row. Says nothing of SQL, see `sql`, and reads no clock: the server's counts.

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

/// Locks in a PostgreSQL database: they exclude all who reach it.
///
/// A grant lives until its lease is over on the server's clock. Tokens are that clock's microseconds, or one more than the last of the key
/// where that is larger: they grow over release, expiry, restart, failover and purge. A grant and a renewal are on the server's disk when
/// they are answered, if the server is set up so (`synchronous_commit`, `fsync`); a release need not be. A release wakes the waiters of
/// all processes by `NOTIFY`.
///
/// A standby that is promoted has what it had got until then: with asynchronous replication the last grants may be missing, and
/// their keys are free. Tokens grow even then, unless its clock is behind by more than the promotion took; so fenced writes stay safe.
///
/// The connections are its own: no transaction of the application is ever joined. At most as many as
/// [configured](PostgresConfig::with_connections) are opened, and three more, however many locks are held or awaited.
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
    /// Rows that were awaited, without a wake-up. Their next attempt most likely finds them held, so it begins with the look.
    not_woken: RecentRows,
}

impl PostgresBackend {
    /// Connects to the server, and makes the tables if they are absent.
    ///
    /// # Errors
    /// [`BackendError`] with a message that says what to do: `Misconfigured` for what cannot work (no such database, missing or newer
    /// tables, an old server, a name that is none), `Denied` for a wrong user or password or a missing right, `Transient` when the
    /// server cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future may leave finished tables behind, never half-made ones.
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

    /// The statements that make the tables of this store, for those who let nobody else make tables.
    #[must_use]
    pub const fn schema() -> &'static str {
        sql::SCHEMA
    }

    /// The namespace that this backend's locks live in.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.config.namespace
    }

    /// Whether releases are heard of.
    pub(super) const fn hears(&self) -> bool {
        self.ears.is_some()
    }

    /// What those need who lock by a session.
    pub(super) fn for_session(&self) -> ForSession {
        ForSession { texts: self.texts.clone(), channel: self.channel.clone() }
    }

    /// What those who wait in this namespace listen to.
    pub(super) fn channel(&self) -> &str {
        self.channel.name()
    }

    /// This moment, for [`heard_of`](Self::heard_of).
    pub(super) fn moment(&self) -> u64 {
        self.ears.as_ref().map_or(0, Ears::moment)
    }

    /// Returns when the lock may have been released after `moment`; never if nobody listens.
    pub(super) async fn heard_of(&self, key: &Key, moment: u64) {
        match &self.ears {
            Some(ears) => ears.wait(self.row_id(key).short(), moment).await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn row_id(&self, key: &Key) -> RowId {
        RowId::of(&self.config.namespace, key)
    }

    /// The statement that finds the claim's grant and keeps it from becoming anybody else's.
    pub(super) fn fence_statement(&self, claim: &Claim, token: FencingToken) -> Statement<'_> {
        self.fencing(&self.texts.fence, claim, token)
    }

    /// The same for a grant that ends with a connection.
    pub(super) fn fence_held_statement(&self, claim: &Claim, token: FencingToken) -> Statement<'_> {
        self.fencing(&self.texts.fence_held, claim, token)
    }

    fn fencing<'a>(&self, text: &'a Text, claim: &Claim, token: FencingToken) -> Statement<'a> {
        let id = self.row_id(claim.key());
        let token = Value::Number(i64::from(token));
        Statement::new(text, [bytes(id.bytes()), claim_id(claim), token])
    }

    /// Grants the key if it is free, or tells who has it. `None` if it was taken or let go in this very moment.
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
        // A first request may be carried out after the release of a second one: only the engine repeats it.
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Never).await?;
        if let Some(row) = rows.first() {
            let grant = Grant::new(Some(fencing_token(column(row, 0)?)?), claim.lease());
            return Ok(Some(Attempt::Granted(grant)));
        }
        // The holder may be this claim itself, by an attempt whose answer was lost.
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

    /// What a release says: channel, message, mark.
    pub(super) fn news(&self, id: RowId) -> [Value; 3] {
        news(&self.channel, id)
    }

    /// What those who wait for the lock are told.
    pub(super) fn message(id: RowId) -> Value {
        bytes(&id.short())
    }

    /// Whether a transaction has marked itself as one [with this lock](crate::LockIn).
    pub(super) async fn is_locked_in(&self, key: &Key) -> Result<bool, BackendError> {
        let mark = Value::Number(self.row_id(key).mark());
        let statement = Statement::new(&self.texts.locked_in, [mark]);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        let row = rows.first().ok_or_else(|| damaged("a statement was not answered"))?;
        column(row, 0)
    }

    /// Reads the row of all, when an attempt was answered with nothing several times: without that row nothing is ever granted.
    async fn check_meta(&self) -> Result<(), BackendError> {
        let statement = Statement::new(&self.texts.meta, []);
        let rows = self.link.rows(Errand::Acquire, &statement, Repeat::Harmless).await?;
        if rows.is_empty() {
            return Err(damaged("the table with the name meta has lost its row").as_refused());
        }
        Ok(())
    }
}

/// The same tables and the same channel, for [`PostgresSessionBackend`](crate::PostgresSessionBackend).
pub(super) struct ForSession {
    pub(super) texts: Texts,
    channel: Channel,
}

impl ForSession {
    /// What a release says: channel, message, mark.
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
        // Between the look at the row and its lock somebody else may take it or let it go. Whoever is that unlucky several times
        // is told "busy" without a name and comes back at once.
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
                    // What was faster than an attempt may have been the same attempt, on a connection that had broken.
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
        // Asked twice, it would say that the claim held nothing. Who repeats it must know that.
        let rows = self.link.rows(Errand::Release, &statement, Repeat::Never).await?;
        let released = freed(&rows);
        if released == Release::Freed {
            self.let_go.note(id);
        }
        self.purge_by_chance(claim).await;
        Ok(released)
    }

    fn wakes_confirmed(&self, _claim: &Claim, busy: &Busy) -> bool {
        // The end of a session that holds the key is told to nobody.
        busy.retry_after.is_some()
            && self.ears.as_ref().is_some_and(|ears| ears.are_confirmed(busy.mark))
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let id = self.row_id(claim.key());
        // Stays if this is dropped before it returns.
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

/// Reads token, label and times, which stand side by side from column `first` on.
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

/// As the tables count; leases without end are cut off where a sum with the clock could overflow.
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
