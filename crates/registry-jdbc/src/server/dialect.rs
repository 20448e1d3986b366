//! The traits between [`SqlBackend`](super::SqlBackend) and the kinds of database servers. Each
//! kind of server implements [`Dialect`] and [`SpringDialect`]. Each of the two table layouts
//! implements [`LeaseStore`] once for all servers. This module contains no SQL.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use registry_core::config::BackendConfig;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, FencingToken, Finding, Grant, Holder,
    Key, Release, Renewal, WakeCheck,
};

use super::config::ServerSettings;
use super::lease_table::{LeaseTable, RowStatements};
use super::lock_in::LockableTable;
use super::spring::SpringVersion;
use super::spring_rows::{SpringLeaseTable, SpringStatements};
use super::statement::corrupt;
use super::store::SqlStore;
use super::{
    Answer, ConnectionPool, ConnectionUse, ErrorEffect, QueryMode, RowId, SessionProtocol,
    SpringTable, SqlClient, SqlMode, Statement, StatementText, Value,
};
use crate::lock_in::{Deadline, LockInError};

/// A kind of database server that can store locks. sqlx's type of that database implements it.
pub trait SqlServer: sqlx::Database {
    /// The configuration of a store.
    type Config: BackendConfig + 'static;
}

/// Classifies the errors of a kind of server.
pub(crate) trait ServerErrors {
    /// The name of the store in capabilities and errors.
    const STORE: &'static str;

    /// Returns whether to send the statement again, and whether to keep the connection.
    fn error_effect(error: &sqlx::Error) -> ErrorEffect;

    fn misconfigured(message: &str) -> BackendError {
        let message = format!("{}: {message}", Self::STORE);
        BackendError::new(BackendErrorKind::Misconfigured, message).as_refused()
    }

    /// Adds a kind and a hint to an error.
    fn explain(error: sqlx::Error) -> BackendError;

    /// Returns whether a table is missing or belongs to another program.
    fn lacks_lock_tables(error: &sqlx::Error) -> bool;

    /// Returns whether a conflict with another transaction caused the error.
    fn is_conflict(error: &sqlx::Error) -> bool;

    /// Returns whether the statement failed because another transaction kept a row locked for
    /// longer than the time limit.
    fn is_row_lock_error(error: &BackendError) -> bool;

    /// Returns whether a query for holders failed because the server has no named locks, such as
    /// `GET_LOCK` of MariaDB, which show the connection that holds a row.
    fn lacks_named_locks(_error: &BackendError) -> bool {
        false
    }
}

/// What differs between the kinds of database servers, except for Spring's table.
pub(crate) trait Dialect: SqlServer + ServerErrors + Sized {
    /// The name of the product in errors.
    const PRODUCT_NAME: &'static str;
    /// The name of the backend type.
    const BACKEND: &'static str;
    /// The statements that create the tables.
    const SCHEMA: &'static str;
    /// The text before the hexadecimal digits of a value of bytes in a plain statement.
    const BYTES_PREFIX: &'static str;
    /// The maximum number of claims that one statement renews.
    const RENEWALS_MAX: usize;
    /// Whether all claims of one statement must have the same lease.
    const RENEWAL_NEEDS_EQUAL_LEASES: bool;
    /// Whether several claims can hold a key together in lease mode.
    const SUPPORTS_SHARED_CLAIMS: bool;
    /// Whether a transaction can hold the same kind of lock as a session, such as an advisory lock.
    const TRANSACTIONS_HOLD_SESSION_LOCKS: bool;

    type Statements: AsRef<RowStatements> + fmt::Debug + Send + Sync + 'static;
    type Wakeups: WakeupSource;
    /// The protocol of a connection that holds all locks.
    type Session: SessionProtocol<Database = Self>;
    /// The protocol of connections that hold one lock each.
    type RowLock: SessionProtocol<Database = Self>;

    fn settings(config: &Self::Config) -> &ServerSettings;

    /// As [`settings`](Self::settings), to change them.
    fn settings_mut(config: &mut Self::Config) -> &mut ServerSettings;

    /// Creates the pool without connecting.
    fn pool(config: &Self::Config) -> ConnectionPool<Self::Connection>;

    fn query_mode(_config: &Self::Config) -> QueryMode {
        QueryMode::Prepared
    }

    /// Checks the tables, and creates missing ones. Returns the statements, and the id that the
    /// tables received at their creation.
    fn open_tables(
        config: &Self::Config,
        client: &SqlClient<Self>,
    ) -> impl Future<Output = Result<(Self::Statements, Vec<u8>), BackendError>> + Send;

    /// Sends a statement in this mode.
    fn send<'c>(
        connection: &'c mut Self::Connection,
        statement: &'c Statement<'_>,
        mode: QueryMode,
    ) -> BoxFuture<'c, Result<Answer<Self::Row>, sqlx::Error>>;

    /// Sends plain text, without preparing it. Returns the rows.
    fn simple_query(
        connection: &mut Self::Connection,
        text: String,
    ) -> BoxFuture<'_, Result<Vec<Self::Row>, sqlx::Error>>;

    /// Reads an integer column. Returns `None` for null.
    fn number(row: &Self::Row, index: usize) -> Result<Option<i64>, sqlx::Error>;

    fn bytes(row: &Self::Row, index: usize) -> Result<Option<Vec<u8>>, sqlx::Error>;

    fn text(row: &Self::Row, index: usize) -> Result<Option<String>, sqlx::Error>;

    fn flag(row: &Self::Row, index: usize) -> Result<bool, sqlx::Error>;

    /// Returns whether a release wakes waiting callers in this mode.
    fn has_wakeups(config: &Self::Config, mode: &SqlMode) -> bool;

    /// Creates the source of wake-ups of a namespace.
    fn wakeups(store: &SqlStore<Self>, namespace: &str) -> Self::Wakeups;

    /// Reads the token that a statement has granted.
    fn granted_token(answer: &Answer<Self::Row>) -> Result<Option<i64>, BackendError>;

    /// Returns the result of an attempt that failed with `error`, because another transaction has
    /// locked the row. `position` is the [position](WakeupSource::position) before the attempt.
    fn attempt_on_locked_row(
        table: &LeaseTable<Self>,
        claim: &Claim,
        position: u64,
        error: BackendError,
    ) -> impl Future<Output = Result<Option<Attempt>, BackendError>> + Send;

    /// Renews at most [`RENEWALS_MAX`](Self::RENEWALS_MAX) claims.
    fn renew(
        table: &LeaseTable<Self>,
        claims: &[&Claim],
    ) -> impl Future<Output = Result<Vec<Result<Renewal, BackendError>>, BackendError>> + Send;

    /// Whether one statement can acquire several keys, and one statement can release several keys.
    const HAS_BATCHES: bool = false;

    /// Grants all claims, if the rows of all keys exist, are free, and are not locked by another
    /// transaction. Returns their tokens in the order of the claims, or no token if nothing was
    /// granted. Waits for no row.
    fn acquire_all(
        _rows: &LeaseTable<Self>,
        _claims: &[Claim],
    ) -> impl Future<Output = Result<Vec<i64>, BackendError>> + Send {
        std::future::ready(Ok(Vec::new()))
    }

    /// Ends the grants of the claims that are alone in their rows. Returns for each claim whether
    /// its grant was ended.
    fn release_all(
        _rows: &LeaseTable<Self>,
        _claims: &[Claim],
    ) -> impl Future<Output = Result<Vec<bool>, BackendError>> + Send {
        std::future::ready(Ok(Vec::new()))
    }

    /// If an open transaction that `claim` fences blocks the release of `claim`, waits for the end
    /// of the transaction. Returns an error if the transaction does not end soon.
    fn wait_for_fence(
        _rows: &LeaseTable<Self>,
        _claim: &Claim,
    ) -> impl Future<Output = Result<(), BackendError>> + Send {
        std::future::ready(Ok(()))
    }

    /// Returns whether a transaction holds the key's lock.
    fn is_locked_by_transaction(
        table: &LeaseTable<Self>,
        key: &Key,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send;

    fn force_release(
        table: &LeaseTable<Self>,
        key: &Key,
    ) -> impl Future<Output = Result<Release, BackendError>> + Send;

    /// Deletes the dead rows of the batch that begins at the id `start`. A row is dead if its
    /// `since` and `until` are both older than the setting `purge_after`. Returns the number of
    /// deleted rows.
    fn purge_batch(
        store: &SqlStore<Self>,
        start: [u8; 32],
    ) -> impl Future<Output = Result<u64, BackendError>> + Send;

    fn diagnose(
        store: &SqlStore<Self>,
    ) -> impl Future<Output = Result<Vec<Finding>, BackendError>> + Send;

    /// Returns a finding if releases do not wake waiting callers.
    fn diagnose_wakeups(_rows: &LeaseTable<Self>) -> impl Future<Output = Option<Finding>> + Send {
        std::future::ready(None)
    }

    /// Returns findings about row locks: the server permits too few connections for the configured
    /// number of row locks, or row locks have been held for too long.
    fn diagnose_row_locks(
        table: &LeaseTable<Self>,
    ) -> impl Future<Output = Result<Vec<Finding>, BackendError>> + Send;

    /// Locks the key for the caller's transaction, waiting at most until `deadline`. Returns `None`
    /// if the lock is still held at that time. The call has then not locked the key's row.
    fn lock_in(
        lockable: LockableTable<'_, Self>,
        connection: &mut Self::Connection,
        key: &Key,
        deadline: Deadline,
    ) -> impl Future<Output = Result<Option<FencingToken>, LockInError>> + Send;
}

/// What differs between the kinds of database servers in the table of Spring Integration.
pub(crate) trait SpringDialect: Dialect {
    /// The file of Spring Integration that creates its table.
    const SCHEMA_FILE: &'static str;
    /// Whether an attempt is a transaction of several statements. If so, a separate query first
    /// checks that the key is free.
    const ATTEMPT_IS_TRANSACTION: bool;

    type SpringStatements: AsRef<SpringStatements> + fmt::Debug + Send + Sync + 'static;

    /// Returns the name of Spring's table for errors and [`create_table`](Self::create_table).
    fn table_name(config: &Self::Config, table: &SpringTable) -> String;

    /// Finds Spring's table. Returns its quoted name, and whether its rows contain the end of the
    /// lock. Returns `None` if the table is missing.
    fn find_table(
        store: &SqlStore<Self>,
        table: &SpringTable,
    ) -> impl Future<Output = Result<Option<(String, bool)>, BackendError>> + Send;

    fn create_table(name: &str, version: SpringVersion) -> StatementText;

    /// Returns the statements for the table with this quoted name.
    fn spring_statements(
        store: &SqlStore<Self>,
        quoted_name: &str,
        table: &SpringTable,
    ) -> Self::SpringStatements;

    /// As [`wakeups`](Dialect::wakeups), for a region of Spring's table.
    fn spring_wakeups(store: &SqlStore<Self>, region_scope: &str) -> Self::Wakeups;

    /// Returns a text that is unique for the table and region. For each key of the region, the
    /// native table has a row with the token. The ids and the namespace of these rows are derived
    /// from this text.
    fn region_scope(quoted_name: &str, table: &SpringTable) -> String;

    /// Returns the namespace of the region's native rows. It differs from every configured
    /// namespace, because its first byte is not valid UTF-8.
    fn native_namespace(region_scope: &str) -> Vec<u8>;

    /// Renews at most [`RENEWALS_MAX`](Dialect::RENEWALS_MAX) claims.
    fn renew_spring(
        spring: &SpringLeaseTable<Self>,
        claims: &[&Claim],
    ) -> impl Future<Output = Result<Vec<Result<Renewal, BackendError>>, BackendError>> + Send;

    fn release_spring(
        spring: &SpringLeaseTable<Self>,
        claim: &Claim,
    ) -> impl Future<Output = Result<Release, BackendError>> + Send;
}

/// Wakes callers that wait for a release.
pub(crate) trait WakeupSource: Send + Sync + 'static {
    /// Returns the current position in the sequence of the server's notifications. Constant if the
    /// server sends none.
    fn position(&self) -> u64 {
        0
    }

    /// Chooses what [`wait`](Self::wait) compares after a busy attempt: the `position` before it,
    /// or the `version` of the row that it found. A row's version is the token of its newest grant,
    /// or `since` if the row contains a record.
    fn busy_version(&self, position: u64, version: FencingToken) -> u64;

    /// Waits until the lock may have been released since the attempt that returned `version`.
    fn wait(&self, id: RowId, version: u64) -> impl Future<Output = ()> + Send;

    /// Returns the check whether wake-ups currently arrive. `None` if this source sends no
    /// wake-ups.
    fn wake_check(&self) -> Option<Arc<dyn WakeCheck>>;

    /// Returns the statement parameters by which a release notifies waiting callers.
    fn notification(&self, _id: RowId) -> Vec<Value> {
        Vec::new()
    }

    /// Records that this process may have released the key.
    fn on_release(&self, _key: &Key) {}

    fn close(&self);
}

/// Leases in the tables of one layout: native, or Spring's.
pub(crate) trait LeaseStore: fmt::Debug + Send + Sync + Sized + 'static {
    type Database: Dialect;

    fn store(&self) -> &SqlStore<Self::Database>;

    fn wakeups(&self) -> &<Self::Database as Dialect>::Wakeups;

    /// Returns the namespace, or the region of Spring's table.
    fn namespace(&self) -> &str;

    /// Grants the key if it is free, or returns its holder. Returns `None` if another client
    /// acquired or released the key meanwhile.
    fn attempt(
        &self,
        claim: &Claim,
        position: u64,
    ) -> impl Future<Output = Result<Option<Attempt>, BackendError>> + Send;

    /// Renews at most [`RENEWALS_MAX`](Dialect::RENEWALS_MAX) claims, and returns the results in
    /// their order.
    fn renew_chunk(
        &self,
        claims: &[&Claim],
    ) -> impl Future<Output = Result<Vec<Result<Renewal, BackendError>>, BackendError>> + Send;

    fn release(&self, claim: &Claim) -> impl Future<Output = Result<Release, BackendError>> + Send;

    /// Waits until the lock may have been released.
    fn wait(&self, claim: &Claim, busy: &Busy) -> impl Future<Output = ()> + Send;

    fn inspect(&self, key: &Key) -> impl Future<Output = Result<Vec<Holder>, BackendError>> + Send;

    fn list(&self) -> impl Future<Output = Result<Vec<Holder>, BackendError>> + Send;

    fn force_release(
        &self,
        key: &Key,
    ) -> impl Future<Output = Result<Release, BackendError>> + Send;

    fn diagnose(&self) -> impl Future<Output = Result<Vec<Finding>, BackendError>> + Send;

    /// Returns the fence statement for the caller's transaction. The statement finds the row with
    /// this claim and token, and locks the row against a grant to another claim. If the grant does
    /// not exist, the statement returns no row. Otherwise the first column is a flag: whether the
    /// transaction's snapshot contains the grant.
    fn fence(&self, claim: &Claim, token: FencingToken) -> Statement<'_>;
}

/// Returns the result of an attempt that found `grant` in the key's row. `is_own` is true if
/// `claim` holds this grant.
pub(super) fn attempt_from_existing_grant<D: Dialect>(
    claim: &Claim,
    is_own: bool,
    grant: Holder,
    version: u64,
) -> Result<Attempt, BackendError> {
    let left = grant.lease_left.unwrap_or_default();
    if is_own {
        let token = grant.token.ok_or_else(|| corrupt::<D>("a grant has no row with a token"))?;
        return Ok(Attempt::Granted(Grant::new(token, left.min(claim.lease()))));
    }
    Ok(Attempt::Busy(
        Busy::new().with_retry_after(left).with_seen_version(version).with_holder(grant),
    ))
}

/// Reads a key from a column.
pub(super) fn decode_key<D: Dialect>(text: Option<&str>) -> Result<Key, BackendError> {
    let key = text.and_then(|text| Key::new(text).ok());
    key.ok_or_else(|| corrupt::<D>("a row's key is invalid"))
}

/// Acquires a lease.
pub(super) async fn try_acquire<S: LeaseStore>(
    store: &S,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    // Another client may acquire or release the key between two statements. After several such
    // attempts the result is `Busy` with a pause of zero, which makes the engine retry at once.
    const TRIES_MAX: u32 = 3;
    for attempt_number in 0..TRIES_MAX {
        match store.attempt(claim, store.wakeups().position()).await {
            Ok(Some(attempt)) => return Ok(attempt),
            Ok(None) => {}
            // The server has executed an earlier attempt of this loop, so the error must not be
            // marked as refused.
            Err(error) if attempt_number > 0 => return Err(error.as_unknown()),
            Err(error) => return Err(error),
        }
    }
    store.store().check_writable(ConnectionUse::Acquire).await?;
    Ok(Attempt::Busy(Busy::new().with_retry_after(Duration::ZERO)))
}

/// Renews leases, as many as possible with each statement. Returns the results in the order of the
/// claims.
pub(super) async fn renew<S: LeaseStore>(
    store: &S,
    claims: &[Claim],
) -> Vec<Result<Renewal, BackendError>> {
    let mut order: Vec<usize> = (0..claims.len()).collect();
    if S::Database::RENEWAL_NEEDS_EQUAL_LEASES {
        order.sort_by_key(|&index| claims[index].lease());
    }
    let mut answers = vec![None; claims.len()];
    let mut store_error: Option<BackendError> = None;
    let fits_one_statement = |&one: &usize, &other: &usize| {
        !S::Database::RENEWAL_NEEDS_EQUAL_LEASES || claims[one].lease() == claims[other].lease()
    };
    for indices in
        order.chunk_by(fits_one_statement).flat_map(|group| group.chunks(S::Database::RENEWALS_MAX))
    {
        let chunk: Vec<&Claim> = indices.iter().map(|&index| &claims[index]).collect();
        // After a store error the remaining chunks fail at once. Otherwise each could wait for the
        // full time-out.
        let renewed = match &store_error {
            Some(error) => Err(error.clone()),
            None => store.renew_chunk(&chunk).await,
        };
        let renewed = renewed.unwrap_or_else(|error| {
            let failed = indices.iter().map(|_| Err(error.clone())).collect();
            store_error = Some(error);
            failed
        });
        for (&index, renewal) in indices.iter().zip(renewed) {
            answers[index] = Some(renewal);
        }
    }
    answers.into_iter().map(|answer| answer.expect("every claim is in one chunk")).collect()
}
