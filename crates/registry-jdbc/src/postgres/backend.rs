//! Implements the backend's `Dialect` for PostgreSQL. The statements are in `sql`.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use registry_core::config::OpenBackend;
use registry_core::{
    Attempt, BackendError, Busy, Claim, FencingToken, Finding, Key, LockBackend, Release, Renewal,
    WakeCheck,
};
use sqlx::postgres::{PgConnection, PgRow, PgValueFormat};
use sqlx::{Postgres, Row as _};

use super::client;
use super::config::PostgresConfig;
use super::error;
use super::listener::{NotificationChannel, PgReleaseListener};
use super::row::PgRowProtocol;
use super::session::PgSessionProtocol;
use super::sql::{self, PgStatements};
use super::statement;
use super::{diagnose, lock_in, open};
use crate::PostgresBackend;
use crate::lock_in::{Deadline, LockInError};
use crate::server::config::ServerSettings;
use crate::server::statement::{corrupt, flag, from_micros, maybe_number, micros, number, one_row};
use crate::server::{
    Answer, ConnectionPool, ConnectionUse, Dialect, LeaseTable, LockableTable, PURGE_BATCH_ROWS,
    QueryMode, Resend, RowId, SqlClient, SqlMode, SqlStore, Statement, StatementText, Value,
    WakeupSource,
};

pub(super) type PgLeaseTable = LeaseTable<Postgres>;

impl Dialect for Postgres {
    const PRODUCT_NAME: &'static str = "PostgreSQL";
    const BACKEND: &'static str = "PostgresBackend";
    const SCHEMA: &'static str = sql::SCHEMA;
    // This form does not depend on the server's setting for backslashes.
    const BYTES_PREFIX: &'static str = "E'\\\\x";
    const RENEWALS_MAX: usize = 1000;
    const RENEWAL_NEEDS_EQUAL_LEASES: bool = false;
    const SUPPORTS_SHARED_CLAIMS: bool = true;
    const TRANSACTIONS_HOLD_SESSION_LOCKS: bool = true;

    type Statements = PgStatements;
    type Wakeups = PgWakeups;
    type Session = PgSessionProtocol;
    type RowLock = PgRowProtocol;

    fn settings(config: &PostgresConfig) -> &ServerSettings {
        &config.settings
    }

    fn settings_mut(config: &mut PostgresConfig) -> &mut ServerSettings {
        &mut config.settings
    }

    fn pool(config: &PostgresConfig) -> ConnectionPool<PgConnection> {
        client::pool(config)
    }

    fn query_mode(config: &PostgresConfig) -> QueryMode {
        config.query_mode()
    }

    async fn open_tables(
        config: &PostgresConfig,
        _: &SqlClient<Self>,
    ) -> Result<(PgStatements, Vec<u8>), BackendError> {
        open::open(config).await
    }

    fn send<'c>(
        connection: &'c mut PgConnection,
        statement: &'c Statement<'_>,
        mode: QueryMode,
    ) -> BoxFuture<'c, Result<Answer<PgRow>, sqlx::Error>> {
        statement::send(connection, statement, mode)
    }

    fn simple_query(
        connection: &mut PgConnection,
        text: String,
    ) -> BoxFuture<'_, Result<Vec<PgRow>, sqlx::Error>> {
        statement::simple_query(connection, text)
    }

    fn number(row: &PgRow, index: usize) -> Result<Option<i64>, sqlx::Error> {
        row.try_get(index)
    }

    fn bytes(row: &PgRow, index: usize) -> Result<Option<Vec<u8>>, sqlx::Error> {
        let value = row.try_get_raw(index)?;
        // The setting `bytea_output=escape` selects this text format, which sqlx cannot read.
        if value.format() == PgValueFormat::Text
            && let Ok(text) = value.as_bytes()
            && !text.starts_with(b"\\x")
        {
            return Ok(Some(unescape_bytes(text)));
        }
        row.try_get(index)
    }

    fn text(row: &PgRow, index: usize) -> Result<Option<String>, sqlx::Error> {
        row.try_get(index)
    }

    fn flag(row: &PgRow, index: usize) -> Result<bool, sqlx::Error> {
        row.try_get(index)
    }

    fn has_wakeups(config: &PostgresConfig, _: &SqlMode) -> bool {
        config.listener_options().is_some()
    }

    fn wakeups(store: &SqlStore<Self>, namespace: &str) -> PgWakeups {
        PgWakeups::new(&store.config, namespace)
    }

    fn granted_token(answer: &Answer<PgRow>) -> Result<Option<i64>, BackendError> {
        answer.rows.first().map(|row| number::<Self>(row, 0)).transpose()
    }

    async fn attempt_on_locked_row(
        table: &PgLeaseTable,
        claim: &Claim,
        position: u64,
        error: BackendError,
    ) -> Result<Option<Attempt>, BackendError> {
        if !Self::is_locked_by_transaction(table, claim.key()).await? {
            return Err(error);
        }
        Ok(Some(Attempt::Busy(Busy::new().with_seen_version(position))))
    }

    async fn renew(
        table: &PgLeaseTable,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let values = [row_ids(table, claims), Value::claims(claims), leases(claims)];
        renew(&table.store, &table.store.statements.renew, values, claims).await
    }

    const HAS_BATCHES: bool = true;

    async fn acquire_all(table: &PgLeaseTable, claims: &[Claim]) -> Result<Vec<i64>, BackendError> {
        let Some(first) = claims.first() else { return Ok(Vec::new()) };
        let values = [
            row_ids(table, claims),
            Value::claims(claims),
            Value::token_block(first),
            Value::label(first),
            Value::lease(first),
        ];
        let statement = Statement::new(&table.store.statements.acquire_all, values);
        // Not sent again after a broken connection, like the attempt of a single claim.
        let client = &table.store.client;
        let answer = client.send(ConnectionUse::Acquire, Resend::Never, &statement).await?;
        let token = |row| number::<Self>(row, 0);
        answer.rows.iter().map(token).collect::<Result<_, _>>().map_err(BackendError::as_unknown)
    }

    async fn release_all(
        table: &PgLeaseTable,
        claims: &[Claim],
    ) -> Result<Vec<bool>, BackendError> {
        let channel = &table.wakeups.channel;
        let ids = claims.iter().map(|claim| table.row_id(claim.key()));
        let (messages, presence_locks) = ids
            .map(|id| id.notification_id())
            .map(|id| (id.to_vec(), channel.presence_lock(id)))
            .unzip();
        let values = [
            row_ids(table, claims),
            Value::claims(claims),
            Value::Numbers(claims.iter().map(|claim| i64::from(claim.token_block())).collect()),
            Value::Text(channel.name().to_owned()),
            Value::ManyBytes(messages),
            Value::Numbers(presence_locks),
        ];
        let statement = Statement::new(&table.store.statements.release_all, values);
        let answer = table.store.release(&statement).await?;
        if answer.rows.len() != claims.len() {
            return Err(corrupt::<Self>("a release did not return one row per claim").as_unknown());
        }
        let is_freed = |row| flag::<Self>(row, 0);
        answer.rows.iter().map(is_freed).collect::<Result<_, _>>().map_err(BackendError::as_unknown)
    }

    /// Returns whether a transaction holds the holder lock of this key; see
    /// [`RowId::holder_lock_key`].
    async fn is_locked_by_transaction(
        table: &PgLeaseTable,
        key: &Key,
    ) -> Result<bool, BackendError> {
        let lock_key = Value::Number(table.row_id(key).holder_lock_key());
        let found = table.store.query(&table.store.statements.has_holder_lock, [lock_key]).await?;
        flag::<Self>(one_row::<Self>(&found)?, 0)
    }

    /// Frees `key`: ends a lease, or ends the connection that has the row locked for a claim.
    async fn force_release(table: &PgLeaseTable, key: &Key) -> Result<Release, BackendError> {
        let (store, statements) = (&table.store, &table.store.statements);
        let send = async |text, resend, values: Vec<Value>| {
            let statement = Statement::new(text, values);
            store.client.send(ConnectionUse::Release, resend, &statement).await
        };
        let notification = table.wakeups.notification(table.row_id(key));
        let values = [&[table.id_value(key)], &notification[..2]].concat();
        let released = send(&statements.force_release, Resend::Never, values).await?;
        if released.release_outcome() == Release::Freed {
            return Ok(Release::Freed);
        }
        let end_timeout = CONNECTION_END_TIMEOUT.min(store.settings().response_timeout / 2);
        let values = vec![table.id_value(key), Value::Number(micros(end_timeout) / 1_000)];
        let ended = send(&statements.terminate_row_holder, Resend::Never, values).await;
        match ended.map_err(error::explain_termination_denied)?.rows.first() {
            Some(row) if flag::<Self>(row, 0)? => {
                // The ended transaction was not committed, so it sent no notification.
                send(&statements.row_notify, Resend::Allowed, notification).await?;
                Ok(Release::Freed)
            }
            Some(_) => Err(error::still_connected(error::STORE)),
            None if Self::is_locked_by_transaction(table, key).await? => {
                Err(error::held_by_caller_transaction(error::STORE))
            }
            None => Ok(Release::NotHeld),
        }
    }

    /// In the same transaction, a trigger of the tables records the largest of the deleted tokens.
    async fn purge_batch(store: &SqlStore<Self>, start: [u8; 32]) -> Result<u64, BackendError> {
        let min_age = Value::Number(micros(store.settings().purge_after));
        let values = [Value::bytes(&start), Value::Number(i64::from(PURGE_BATCH_ROWS)), min_age];
        let rows = store.query(&store.statements.purge, values).await?;
        let deleted = rows.first().map_or(Ok(0), |row| number::<Self>(row, 0))?;
        Ok(u64::try_from(deleted).unwrap_or(0))
    }

    async fn diagnose(store: &SqlStore<Self>) -> Result<Vec<Finding>, BackendError> {
        diagnose::check_server(store).await
    }

    async fn diagnose_wakeups(table: &PgLeaseTable) -> Option<Finding> {
        diagnose::check_listener(table).await
    }

    async fn diagnose_row_locks(table: &PgLeaseTable) -> Result<Vec<Finding>, BackendError> {
        diagnose::diagnose_row_locks(table).await
    }

    async fn lock_in(
        lockable: LockableTable<'_, Self>,
        connection: &mut PgConnection,
        key: &Key,
        deadline: Deadline,
    ) -> Result<Option<FencingToken>, LockInError> {
        lock_in::attempt_until(lockable, connection, key, deadline).await
    }
}

/// Release notifications, if the configuration has a listener.
pub(crate) struct PgWakeups {
    pub(super) listener: Option<PgReleaseListener>,
    pub(super) channel: NotificationChannel,
}

impl PgWakeups {
    pub(super) fn new(config: &PostgresConfig, namespace: &str) -> Self {
        let channel = NotificationChannel::new(RowId::namespace_hash(namespace));
        let listener =
            config.listener_options().map(|server| PgReleaseListener::new(server, channel.clone()));
        Self { listener, channel }
    }
}

impl WakeupSource for PgWakeups {
    fn position(&self) -> u64 {
        self.listener.as_ref().map_or(0, PgReleaseListener::position)
    }

    fn busy_version(&self, position: u64, _: FencingToken) -> u64 {
        position
    }

    async fn wait(&self, id: RowId, version: u64) {
        match &self.listener {
            Some(listener) => listener.wait(id.notification_id(), version).await,
            None => std::future::pending().await,
        }
    }

    fn wake_check(&self) -> Option<Arc<dyn WakeCheck>> {
        self.listener.as_ref().map(PgReleaseListener::wake_check)
    }

    /// Returns the channel, the message, and the key of the presence lock.
    fn notification(&self, id: RowId) -> Vec<Value> {
        let presence_lock = Value::Number(self.channel.presence_lock(id.notification_id()));
        let channel = Value::Text(self.channel.name().to_owned());
        vec![channel, Value::bytes(&id.notification_id()), presence_lock]
    }

    fn close(&self) {
        if let Some(listener) = &self.listener {
            listener.close();
        }
    }
}

fn row_ids<C: Borrow<Claim>>(table: &PgLeaseTable, claims: &[C]) -> Value {
    let id = |claim: &C| table.row_id(claim.borrow().key()).bytes().to_vec();
    Value::ManyBytes(claims.iter().map(id).collect())
}

pub(super) fn leases(claims: &[&Claim]) -> Value {
    Value::Numbers(claims.iter().map(|claim| micros(claim.lease())).collect())
}

/// Sends a renewal. Reads one row for each claim: the time left if it was renewed, and whether the
/// grant exists.
pub(super) async fn renew(
    store: &SqlStore<Postgres>,
    text: &StatementText,
    values: impl Into<Vec<Value>>,
    claims: &[&Claim],
) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
    let shortest_lease = claims.iter().map(|claim| claim.lease()).min().unwrap_or_default();
    // A repeated renewal has the same effect as a single one, so `query` may send it again.
    let statement = Statement::new(text, values);
    let rows = store.client.query(ConnectionUse::Renew(shortest_lease), &statement).await?;
    if rows.len() != claims.len() {
        return Err(corrupt::<Postgres>("a renewal did not return one row per claim"));
    }
    let answers = rows.iter().zip(claims).map(|(row, claim)| {
        Ok(match maybe_number::<Postgres>(row, 0)? {
            // After the server's clock was set back, the time left can exceed the lease. The excess
            // vanishes when the clock is corrected.
            Some(left) => Ok(Renewal::Renewed(from_micros(left).min(claim.lease()))),
            None if flag::<Postgres>(row, 1)? => Err(error::row_locked()),
            None => Ok(Renewal::Gone),
        })
    });
    answers.collect()
}

/// The maximum time that a forced release waits for the end of the connection. If half of the
/// response time-out is shorter, that limit applies.
const CONNECTION_END_TIMEOUT: Duration = Duration::from_secs(1);

/// Decodes the format `escape` of a `bytea`: a backslash is doubled, and some bytes are three octal
/// digits after a backslash. <https://www.postgresql.org/docs/current/datatype-binary.html>
fn unescape_bytes(mut text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    loop {
        text = match text {
            [] => return bytes,
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..] => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest
            }
            [b'\\', byte, rest @ ..] | [byte, rest @ ..] => {
                bytes.push(*byte);
                rest
            }
        };
    }
}

#[async_trait]
impl OpenBackend for PostgresConfig {
    async fn open(&self) -> Result<Arc<dyn LockBackend>, BackendError> {
        Ok(Arc::new(PostgresBackend::open_mode(self.clone(), self.settings.mode()).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_read_from_the_escape_format() {
        assert_eq!(unescape_bytes(br"a\\b\000\377'x"), b"a\\b\0\xff'x");
    }
}
