//! Implements the backend's `Dialect` for MariaDB and MySQL. The statements are in `sql`.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use registry_core::config::OpenBackend;
use registry_core::{
    Attempt, BackendError, Claim, ClaimMode, FencingToken, Finding, Key, LockBackend, Release,
    Renewal, WakeCheck,
};
use sqlx::mysql::MySqlRow;
use sqlx::{Decode, MySql, MySqlConnection, Row as _, Type};
use tokio::time::{Instant, sleep};

use super::config::MySqlConfig;
use super::release_poller::MySqlReleasePoller;
use super::row::MySqlRowProtocol;
use super::session::MySqlSessionProtocol;
use super::sql::{self, LIST_SIZES, MySqlStatements};
use super::statement::{self, PollStatements};
use super::{client, diagnose, error, lock_in, open};
use crate::MySqlBackend;
use crate::lock_in::{Deadline, LockInError};
use crate::server::config::ServerSettings;
use crate::server::statement::{bytes, flag, from_micros, maybe_number, micros, number};
use crate::server::{
    Answer, ConnectionPool, ConnectionUse, Dialect, LeaseTable, LockableTable, PURGE_BATCH_ROWS,
    QueryMode, Resend, RowId, ServerErrors as _, SqlClient, SqlMode, SqlStore, Statement, Value,
    WakeupSource,
};

pub(super) type MySqlLeaseTable = LeaseTable<MySql>;

impl Dialect for MySql {
    const PRODUCT_NAME: &'static str = "MySQL";
    const BACKEND: &'static str = "MySqlBackend";
    const SCHEMA: &'static str = sql::SCHEMA;
    const BYTES_PREFIX: &'static str = "x'";
    const RENEWALS_MAX: usize = LIST_SIZES[LIST_SIZES.len() - 1];
    const RENEWAL_NEEDS_EQUAL_LEASES: bool = true;
    const SUPPORTS_SHARED_CLAIMS: bool = true;
    const TRANSACTIONS_HOLD_SESSION_LOCKS: bool = false;

    type Statements = MySqlStatements;
    type Wakeups = MySqlWakeups;
    type Session = MySqlSessionProtocol;
    type RowLock = MySqlRowProtocol;

    fn settings(config: &MySqlConfig) -> &ServerSettings {
        &config.settings
    }

    fn settings_mut(config: &mut MySqlConfig) -> &mut ServerSettings {
        &mut config.settings
    }

    fn pool(config: &MySqlConfig) -> ConnectionPool<MySqlConnection> {
        client::pool(config)
    }

    async fn open_tables(
        config: &MySqlConfig,
        client: &SqlClient<Self>,
    ) -> Result<(MySqlStatements, Vec<u8>), BackendError> {
        open::open(config, client).await
    }

    fn send<'c>(
        connection: &'c mut MySqlConnection,
        statement: &'c Statement<'_>,
        mode: QueryMode,
    ) -> BoxFuture<'c, Result<Answer<MySqlRow>, sqlx::Error>> {
        statement::send(connection, statement, mode)
    }

    fn simple_query(
        connection: &mut MySqlConnection,
        text: String,
    ) -> BoxFuture<'_, Result<Vec<MySqlRow>, sqlx::Error>> {
        statement::simple_query(connection, text)
    }

    fn number(row: &MySqlRow, index: usize) -> Result<Option<i64>, sqlx::Error> {
        row.try_get(index)
    }

    fn bytes(row: &MySqlRow, index: usize) -> Result<Option<Vec<u8>>, sqlx::Error> {
        row.try_get(index)
    }

    fn text(row: &MySqlRow, index: usize) -> Result<Option<String>, sqlx::Error> {
        row.try_get(index)
    }

    fn flag(row: &MySqlRow, index: usize) -> Result<bool, sqlx::Error> {
        Ok(row.try_get::<i64, _>(index)? != 0)
    }

    fn has_wakeups(_: &MySqlConfig, mode: &SqlMode) -> bool {
        !matches!(mode, SqlMode::Spring(_))
    }

    fn wakeups(store: &SqlStore<Self>, namespace: &str) -> MySqlWakeups {
        let statements = Arc::clone(&store.statements);
        let statements = PollStatements { statements, namespace: namespace.to_owned() };
        MySqlWakeups(Some(MySqlReleasePoller::new(Arc::clone(&store.client), Arc::new(statements))))
    }

    fn granted_token(answer: &Answer<MySqlRow>) -> Result<Option<i64>, BackendError> {
        Ok(match answer.last_insert_id {
            0 => None,
            token => Some(i64::try_from(token).unwrap_or(-1)),
        })
    }

    /// If the row contains a grant, whose fence may have locked the row, returns the result for
    /// this grant. Otherwise returns `error`.
    async fn attempt_on_locked_row(
        table: &MySqlLeaseTable,
        claim: &Claim,
        position: u64,
        error: BackendError,
    ) -> Result<Option<Attempt>, BackendError> {
        // The row contains the claim with the mode before the conversion, which is no result.
        if claim.is_conversion() {
            return Err(error);
        }
        match table.attempt_from_current_row(claim, position).await {
            Ok(Some(held)) => Ok(Some(held)),
            // The server rejected the attempt, so nothing was granted.
            Ok(None) => Err(error),
            Err(second) if second.refused() => Err(error),
            // A row with a record is written once more.
            Err(_) => Err(error.as_unknown()),
        }
    }

    async fn renew(
        table: &MySqlLeaseTable,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let (lease, requested_at) = (claims[0].lease(), Instant::now());
        let (store, statements) = (&table.store, &table.store.statements);
        let ids = claims.iter().map(|claim| table.row_id(claim.key()).bytes().to_vec());
        let ids = Value::ManyBytes(ids.collect());
        let (limit, lease_value) = (claim_count(claims), Value::Number(micros(lease)));
        let values = [ids.clone(), Value::claims(claims), limit, lease_value];
        let renewal = Statement::new(&statements.renew, values);
        // A repeated renewal has the same effect as a single renewal, so it may be sent again.
        let answer =
            store.client.send(ConnectionUse::Renew(lease), Resend::Allowed, &renewal).await?;
        let renewal =
            ExecutedRenewal { store, claims, requested_at, changed: answer.affected_rows };
        let unexpired = Statement::new(&statements.unexpired, [ids]);
        renewal.answers(|claim| claim.id().to_bytes().to_vec(), unexpired).await
    }

    async fn wait_for_fence(table: &MySqlLeaseTable, claim: &Claim) -> Result<(), BackendError> {
        wait_for_fence(claim, async || {
            if !is_locked_or_missing(table, claim.key(), ConnectionUse::Release).await? {
                return Ok(false);
            }
            // If the row is missing, `has_entry` returns false: it requires a row that contains the
            // claim.
            table.has_entry(claim, ConnectionUse::Release).await
        })
        .await
    }

    /// Returns whether the row exists, and stays locked for the sum of [`ROW_CHECK_PAUSES`]. Checks
    /// of other clients lock the row for a shorter time.
    async fn is_locked_by_transaction(
        table: &MySqlLeaseTable,
        key: &Key,
    ) -> Result<bool, BackendError> {
        for pause in ROW_CHECK_PAUSES {
            if !is_locked_or_missing(table, key, ConnectionUse::Acquire).await?
                || table
                    .store
                    .query(&table.store.statements.lease_left, [table.id_value(key)])
                    .await?
                    .is_empty()
            {
                return Ok(false);
            }
            sleep(pause).await;
        }
        Ok(true)
    }

    /// Frees the key: ends a lease, or ends the connection that has the row locked for a claim.
    async fn force_release(table: &MySqlLeaseTable, key: &Key) -> Result<Release, BackendError> {
        let released = match holder_connection(table, key).await? {
            Some(holder_connection) => end_connection(table, key, &holder_connection).await?,
            None => end_lease(table, key).await?,
        };
        table.wakeups.on_release(key);
        Ok(released)
    }

    /// Records the largest token in the meta table, and then deletes the rows. The two statements
    /// need no transaction: between them, both the meta table and the rows contain the tokens.
    async fn purge_batch(store: &SqlStore<Self>, start: [u8; 32]) -> Result<u64, BackendError> {
        let statements = &store.statements;
        let min_age = Value::Number(micros(store.settings().purge_after));
        let values =
            [Value::bytes(&start), Value::Number(i64::from(PURGE_BATCH_ROWS)), min_age.clone()];
        let rows = store.query(&statements.purge_candidates, values).await?;
        let mut ids: Vec<Vec<u8>> = Vec::with_capacity(rows.len());
        let mut token: Option<i64> = None;
        for row in &rows {
            ids.extend(bytes::<Self>(row, 0)?);
            token = token.max(Some(number::<Self>(row, 1)?));
        }
        let Some(token) = token.map(Value::Number) else { return Ok(0) };
        let change = async |statement| {
            store.client.send(ConnectionUse::Acquire, Resend::Allowed, &statement).await
        };
        change(Statement::new(&statements.raise_floor, [token.clone()])).await?;
        let values = [Value::ManyBytes(ids), min_age, token];
        Ok(change(Statement::new(&statements.purge, values)).await?.affected_rows)
    }

    async fn diagnose(store: &SqlStore<Self>) -> Result<Vec<Finding>, BackendError> {
        diagnose::check_server(store).await
    }

    async fn diagnose_row_locks(table: &MySqlLeaseTable) -> Result<Vec<Finding>, BackendError> {
        diagnose::diagnose_row_locks(table).await
    }

    async fn lock_in(
        lockable: LockableTable<'_, Self>,
        connection: &mut MySqlConnection,
        key: &Key,
        deadline: Deadline,
    ) -> Result<Option<FencingToken>, LockInError> {
        lock_in::attempt_until(lockable.table, connection, key, deadline).await
    }
}

/// The poller that wakes waiting callers. `None` for Spring's table, which no task polls.
pub(crate) struct MySqlWakeups(pub(super) Option<MySqlReleasePoller>);

impl WakeupSource for MySqlWakeups {
    fn busy_version(&self, _: u64, version: FencingToken) -> u64 {
        version.get()
    }

    async fn wait(&self, id: RowId, version: u64) {
        match &self.0 {
            Some(poller) => poller.wait(id, version).await,
            None => std::future::pending().await,
        }
    }

    fn wake_check(&self) -> Option<Arc<dyn WakeCheck>> {
        self.0.as_ref().map(MySqlReleasePoller::wake_check)
    }

    fn on_release(&self, key: &Key) {
        if let Some(poller) = &self.0 {
            poller.poll_soon(key);
        }
    }

    fn close(&self) {
        if let Some(poller) = &self.0 {
            poller.close();
        }
    }
}

/// Returns the number of claims, for the `LIMIT` of a statement that renews them.
pub(super) fn claim_count(claims: &[&Claim]) -> Value {
    Value::Number(i64::try_from(claims.len()).unwrap_or(i64::MAX))
}

/// A renewal that the server has executed. All claims have the same lease.
pub(super) struct ExecutedRenewal<'a> {
    pub(super) store: &'a SqlStore<MySql>,
    pub(super) claims: &'a [&'a Claim],
    pub(super) requested_at: Instant,
    pub(super) changed: u64,
}

impl ExecutedRenewal<'_> {
    /// Returns one answer for each claim. For each key that is held, the query `unexpired` returns
    /// the holder, its time left, and whether the server is writable. `holder` converts a claim to
    /// the form of that query's first column.
    pub(super) async fn answers<H>(
        self,
        holder: impl Fn(&Claim) -> H + Send,
        unexpired: Statement<'_>,
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError>
    where
        H: Eq + Hash + Send + for<'r> Decode<'r, MySql> + Type<MySql>,
    {
        let Self { store, claims, requested_at, changed } = self;
        let lease = claims[0].lease();
        let wanted: HashSet<_> = claims.iter().map(|claim| claim.id()).collect();
        if usize::try_from(changed) == Ok(wanted.len()) {
            return Ok(claims.iter().map(|_| Ok(Renewal::Renewed(lease))).collect());
        }
        // Some grants have ended, or a fence has locked their rows. The query shows which of them
        // still exist.
        let rows = store.client.query(ConnectionUse::Renew(lease), &unexpired).await?;
        let elapsed = requested_at.elapsed();
        match rows.first().map(|row| flag::<MySql>(row, 2)).transpose()? {
            Some(true) => {}
            Some(false) => {
                // After a failover, new connections may reach the new primary.
                store.client.close_idle();
                return Err(error::read_only(error::STORE));
            }
            // A read-only server that lags may lack the rows of live grants.
            None => store.check_writable(ConnectionUse::Renew(lease)).await?,
        }
        let read = |row: &MySqlRow| -> Result<(Option<H>, Duration), BackendError> {
            let holder = row.try_get(0).map_err(MySql::explain)?;
            Ok((holder, from_micros(number::<MySql>(row, 1)?)))
        };
        let unexpired: HashMap<_, _> = rows.iter().map(read).collect::<Result<_, _>>()?;
        let answer = |claim: &&Claim| match unexpired.get(&Some(holder(claim))) {
            None => Ok(Renewal::Gone),
            // The renewal was executed after `requested_at`, so a renewed grant has at least its
            // lease left, less `elapsed`. A row that the renewal skipped can have this much time
            // left after a recent grant or renewal. `Renewed` is then correct for it too.
            Some(left) if left.saturating_add(elapsed) >= lease => {
                Ok(Renewal::Renewed((*left).min(lease)))
            }
            Some(_) => Err(error::row_locked(error::STORE)),
        };
        Ok(claims.iter().map(answer).collect())
    }
}

/// Waits for the end of a fenced transaction, which keeps the row of `claim` locked. Returns an
/// error after the sum of [`FENCE_CHECK_PAUSES`].
pub(super) async fn wait_for_fence<F>(
    claim: &Claim,
    has_open_fence: impl Fn() -> F,
) -> Result<(), BackendError>
where
    F: Future<Output = Result<bool, BackendError>>,
{
    for pause in FENCE_CHECK_PAUSES.into_iter().map(Some).chain([None]) {
        // The release has not been sent yet, so an error is marked as refused.
        if !has_open_fence().await.map_err(BackendError::as_refused)? {
            return Ok(());
        }
        if let Some(pause) = pause {
            sleep(pause).await;
        }
    }
    Err(match claim.mode() {
        ClaimMode::Exclusive => error::fenced_transaction_open(error::STORE),
        _ => error::fenced_transaction_of_holder_open(),
    })
}

/// Returns whether a transaction currently has the key's row locked, or the row does not exist.
pub(super) async fn is_locked_or_missing(
    table: &MySqlLeaseTable,
    key: &Key,
    connection_use: ConnectionUse,
) -> Result<bool, BackendError> {
    let statement = Statement::new(&table.store.statements.lock_row, [table.id_value(key)]);
    Ok(table.store.client.query(connection_use, &statement).await?.is_empty())
}

async fn end_lease(table: &MySqlLeaseTable, key: &Key) -> Result<Release, BackendError> {
    // The query comes first, because an update would wait for a transaction that has the row
    // locked, even if the row contains no lease.
    if table.query_holders(Some(key)).await?.is_empty() {
        if MySql::is_locked_by_transaction(table, key).await? {
            return Err(error::held_by_caller_transaction(error::STORE));
        }
        return Ok(Release::NotHeld);
    }
    let statement = Statement::new(&table.store.statements.force_release, [table.id_value(key)]);
    Ok(table.store.release(&statement).await?.release_outcome())
}

async fn end_connection(
    table: &MySqlLeaseTable,
    key: &Key,
    holder: &HolderConnection,
) -> Result<Release, BackendError> {
    let kill = Statement::new(&table.store.statements.kill, [Value::Number(holder.connection_id)]);
    let killed = table.store.release(&kill).await;
    // If the connection has ended meanwhile, the error is ignored.
    if let Err(error) = killed
        && !error::is_no_such_connection(&error)
    {
        return Err(error::explain_termination_denied(error));
    }
    // `KILL` returns before the connection has ended, so this loop waits for its end.
    let killed_at = Instant::now();
    while holder_connection(table, key).await?.as_ref() == Some(holder) {
        if killed_at.elapsed() > CONNECTION_END_TIMEOUT {
            return Err(error::still_connected(error::STORE));
        }
        sleep(CONNECTION_END_PAUSE).await;
    }
    Ok(Release::Freed)
}

/// Returns the connection that has the row locked for a claim.
async fn holder_connection(
    table: &MySqlLeaseTable,
    key: &Key,
) -> Result<Option<HolderConnection>, BackendError> {
    let statement =
        Statement::new(&table.store.statements.holder_connection, [table.id_value(key)]);
    let found = match table.store.client.query(ConnectionUse::Release, &statement).await {
        Err(error) if MySql::lacks_named_locks(&error) => return Ok(None),
        found => found?,
    };
    let Some(row) = found.first() else { return Ok(None) };
    let (claim, connection_id) = (bytes::<MySql>(row, 0)?, maybe_number::<MySql>(row, 1)?);
    Ok(connection_id.map(|connection_id| HolderConnection { claim, connection_id }))
}

/// The connection that has a row locked, and its claim.
#[derive(Debug, PartialEq, Eq)]
struct HolderConnection {
    claim: Option<Vec<u8>>,
    connection_id: i64,
}

/// The pauses between checks of a locked row. A row that is locked for longer than their sum counts
/// as held.
const ROW_CHECK_PAUSES: [Duration; 4] =
    [Duration::from_millis(1), Duration::from_millis(2), Duration::from_millis(4), Duration::ZERO];

/// The pauses between the checks by which a release waits until the row of a fenced claim is
/// unlocked. Checks of other clients lock the row for less than the sum of these pauses.
const FENCE_CHECK_PAUSES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(16),
    Duration::from_millis(64),
];

/// How long a forced release waits until the connection has ended.
const CONNECTION_END_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause between checks whether the connection has ended.
const CONNECTION_END_PAUSE: Duration = Duration::from_millis(2);

#[async_trait]
impl OpenBackend for MySqlConfig {
    async fn open(&self) -> Result<Arc<dyn LockBackend>, BackendError> {
        Ok(Arc::new(MySqlBackend::open_mode(self.clone(), self.settings.mode()).await?))
    }
}
