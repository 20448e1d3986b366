//! What a database server implements for [`SqlBackend`](super::SqlBackend): one trait for the
//! server, and one for each layout of leases in its tables. Contains no SQL.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Claim, FencingToken, Finding, Holder, Key, Release, Renewal,
    WakeCheck,
};

use super::{ErrorEffect, SessionProtocol, SpringTable};

/// A kind of database server that can store locks, by the name that sqlx has for it.
pub trait SqlServer: sqlx::Database {
    /// The configuration of a store.
    type Config: fmt::Debug + Send + Sync + 'static;
}

/// What differs between the kinds of database servers.
pub(crate) trait Dialect: SqlServer + Sized {
    /// The name of the store in capabilities and errors.
    const STORE: &'static str;
    /// The name of the kind of database in errors.
    const DATABASE: &'static str;
    /// The statements that create the tables.
    const SCHEMA: &'static str;

    /// Leases in the native tables.
    type Rows: LeaseStore<Database = Self>;
    /// Leases in the table of Spring Integration.
    type Spring: LeaseStore<Database = Self>;
    /// Locks of one connection.
    type Session: SessionProtocol;
    /// Locks with a connection each.
    type RowLock: SessionProtocol;

    fn check(config: &Self::Config) -> Result<(), BackendError>;

    /// Returns `HOST:PORT` of the server, or the path of its socket, for errors.
    fn address(config: &Self::Config) -> String;

    fn misconfigured(message: &str) -> BackendError;

    fn open_rows(
        config: Self::Config,
    ) -> impl Future<Output = Result<Self::Rows, BackendError>> + Send;

    fn open_spring(
        config: Self::Config,
        table: SpringTable,
    ) -> impl Future<Output = Result<Self::Spring, BackendError>> + Send;

    fn open_session(
        rows: Arc<Self::Rows>,
    ) -> impl Future<Output = Result<Self::Session, BackendError>> + Send;

    fn row_lock(rows: Arc<Self::Rows>) -> Self::RowLock;

    /// Searches a batch of rows to purge after some of the releases.
    fn maybe_purge(rows: &Self::Rows, claim: &Claim) -> impl Future<Output = ()> + Send;

    /// Checks whether the server has connections for the configured number of row locks.
    fn check_connection_limit(
        rows: &Self::Rows,
    ) -> impl Future<Output = Result<Vec<Finding>, BackendError>> + Send;

    /// As [`LeaseStore::fence`], for a grant that ends with a connection.
    fn fence_held(
        rows: &Self::Rows,
        connection: &mut Self::Connection,
        claim: &Claim,
        token: FencingToken,
    ) -> impl Future<Output = Result<Option<bool>, sqlx::Error>> + Send;

    fn error_effect(error: &sqlx::Error) -> ErrorEffect;

    /// Adds a kind and a hint to an error.
    fn explain(error: sqlx::Error) -> BackendError;

    /// Returns whether a table is missing or belongs to another program.
    fn is_no_such_table(error: &sqlx::Error) -> bool;

    /// Returns whether a conflict with another transaction caused the error.
    fn is_busy(error: &sqlx::Error) -> bool;
}

/// Leases in the rows of one layout.
pub(crate) trait LeaseStore: fmt::Debug + Send + Sync + Sized + 'static {
    type Database: Dialect;

    /// The maximum number of claims that one statement renews.
    const RENEWALS_MAX: usize;
    /// Whether all claims of one statement must have the same lease.
    const RENEWS_ONE_LEASE: bool;

    /// Returns the namespace, or the region of a foreign table.
    fn namespace(&self) -> &str;

    /// Returns whether releases wake waiting callers.
    fn has_wakes(&self) -> bool;

    /// Returns the current position in the server's notifications, for [`wait`](Self::wait).
    fn position(&self) -> u64 {
        0
    }

    /// Grants the key if it is free, or returns its holder. Returns `None` if another client
    /// acquired or released the key meanwhile.
    fn attempt(
        &self,
        claim: &Claim,
        position: u64,
    ) -> impl Future<Output = Result<Option<Attempt>, BackendError>> + Send;

    /// Checks the meta row after several attempts without an answer. Without that row, or on a
    /// replica, no lock is ever granted.
    fn check_meta(&self) -> impl Future<Output = Result<(), BackendError>> + Send;

    /// Renews at most [`RENEWALS_MAX`](Self::RENEWALS_MAX) claims, and returns the results in their
    /// order.
    fn renew_chunk(
        &self,
        claims: &[&Claim],
    ) -> impl Future<Output = Result<Vec<Result<Renewal, BackendError>>, BackendError>> + Send;

    fn release(&self, claim: &Claim) -> impl Future<Output = Result<Release, BackendError>> + Send;

    /// Returns when the lock may have been released.
    fn wait(&self, claim: &Claim, busy: &Busy) -> impl Future<Output = ()> + Send;

    /// Returns the check whether a release would be noticed, if there can be one.
    fn wake_check(&self) -> Option<Arc<dyn WakeCheck>> {
        None
    }

    fn inspect(
        &self,
        key: &Key,
    ) -> impl Future<Output = Result<Option<Holder>, BackendError>> + Send;

    fn list(&self) -> impl Future<Output = Result<Vec<Holder>, BackendError>> + Send;

    fn force_release(
        &self,
        key: &Key,
    ) -> impl Future<Output = Result<Release, BackendError>> + Send;

    fn diagnose(&self) -> impl Future<Output = Result<Vec<Finding>, BackendError>> + Send;

    fn close(&self) -> impl Future<Output = ()> + Send;

    /// Finds the grant as it was issued, in the caller's transaction, and keeps its row from
    /// passing to another claim. Returns whether the transaction's snapshot shows the grant, or
    /// `None` if there is no such row.
    fn fence(
        &self,
        connection: &mut <Self::Database as sqlx::Database>::Connection,
        claim: &Claim,
        token: FencingToken,
    ) -> impl Future<Output = Result<Option<bool>, sqlx::Error>> + Send;

    /// Reads the meta row in the caller's transaction.
    fn transaction_store(
        &self,
        connection: &mut <Self::Database as sqlx::Database>::Connection,
    ) -> impl Future<Output = Result<TransactionStore, sqlx::Error>> + Send;
}

/// The tables that a caller's transaction sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransactionStore {
    /// Those of another store.
    Other,
    Same {
        /// The transaction reads a snapshot from before the fence.
        has_old_snapshot: bool,
    },
}

/// Acquires a lease.
pub(super) async fn try_acquire<S: LeaseStore>(
    store: &S,
    claim: &Claim,
) -> Result<Attempt, BackendError> {
    // Another client may acquire or release the key between two statements. After several such
    // attempts the answer is `Busy` without a holder, which makes the engine retry at once.
    const TRIES_MAX: u32 = 3;
    for attempt_number in 0..TRIES_MAX {
        match store.attempt(claim, store.position()).await {
            Ok(Some(attempt)) => return Ok(attempt),
            Ok(None) => {}
            // An earlier attempt of this loop may itself have been granted, on a connection that
            // then broke.
            Err(error) if attempt_number > 0 => return Err(error.as_unknown()),
            Err(error) => return Err(error),
        }
    }
    store.check_meta().await?;
    Ok(Attempt::Busy(Busy::new().with_retry_after(Duration::ZERO)))
}

/// Renews leases with few statements. Returns the results in the order of the claims.
pub(super) async fn renew<S: LeaseStore>(
    store: &S,
    claims: &[Claim],
) -> Vec<Result<Renewal, BackendError>> {
    let mut order: Vec<usize> = (0..claims.len()).collect();
    if S::RENEWS_ONE_LEASE {
        order.sort_by_key(|&index| claims[index].lease());
    }
    let mut answers = vec![None; claims.len()];
    let mut store_error: Option<BackendError> = None;
    let fits = |&one: &usize, &other: &usize| {
        !S::RENEWS_ONE_LEASE || claims[one].lease() == claims[other].lease()
    };
    for indices in order.chunk_by(fits).flat_map(|group| group.chunks(S::RENEWALS_MAX)) {
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
