//! Fences a transaction by a lock in the same database.

use std::time::Duration;

use registry_core::{Claim, FencingToken, LockGuard};
use sqlx::{Executor as _, MySql, RawSql, Row, Transaction};

use super::backend::MySqlBackend;
use super::error;
use super::row::MySqlRowBackend;
use super::session::MySqlSessionBackend;
use super::spring::MySqlSpringBackend;
use crate::fence::{Fence, FenceError, fenced_claim};

impl Fence<MySql> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, MySql>) -> Result<(), FenceError> {
        let claim = fenced_claim(self)?;
        if let Some(backend) = self.backend::<MySqlSessionBackend>() {
            match backend.session.keep(claim).await {
                Ok(true) => {}
                Ok(false) => return Err(FenceError::lost(self)),
                Err(source) => return Err(FenceError::backend(self, source)),
            }
        }
        let fenced = self.fencing_token().and_then(|token| fenced(self, claim, token));
        let Some(Fenced { statement, meta, store }) = fenced else {
            return Err(FenceError::unsupported(self, "MySQL"));
        };
        let found = transaction.fetch_all(statement).await.map_err(sort)?;
        let Some(found) = found.first() else {
            return Err(why_not_found(self, meta, store, transaction).await);
        };
        if found.try_get::<i64, _>(0).map_err(sort)? == 0 {
            // It began to read before the lock was granted. What it reads behind the fence would be what the holder before has overwritten.
            return Err(FenceError::Busy { source: None });
        }
        // From here on nobody else can be granted the lock. But while the statement waited for its turn the guard may have been
        // told of its loss, and a holder that knows must not write.
        if self.is_held() { Ok(()) } else { Err(FenceError::lost(self)) }
    }
}

/// What is asked in the caller's transaction, and who answers.
pub(super) struct Fenced<'a> {
    /// Finds the grant, and keeps it as it is.
    pub(super) statement: RawSql,
    pub(super) meta: RawSql,
    /// The id of the tables.
    pub(super) store: &'a [u8],
}

/// Of the layout that the guard's lock is in, if it is in a MariaDB or MySQL store.
fn fenced<'a>(guard: &'a LockGuard, claim: &Claim, token: FencingToken) -> Option<Fenced<'a>> {
    let native = guard.backend::<MySqlBackend>().map(|backend| Fenced {
        statement: backend.fence_statement(claim, token),
        meta: backend.statements.meta_there(),
        store: &backend.store,
    });
    let session = guard.backend::<MySqlSessionBackend>().map(|backend| &backend.rows);
    let row = || guard.backend::<MySqlRowBackend>().map(|backend| &backend.rows);
    let native = native.or_else(|| {
        session.or_else(row).map(|backend| Fenced {
            statement: backend.statements.fence_held(claim, token),
            meta: backend.statements.meta_there(),
            store: &backend.store,
        })
    });
    let spring = || guard.backend::<MySqlSpringBackend>();
    native.or_else(|| spring().map(|backend| backend.fenced(claim, token)))
}

/// The row is not there: because the lock was lost, or because this is another database with lock tables.
async fn why_not_found(
    guard: &LockGuard,
    meta: RawSql,
    store: &[u8],
    transaction: &mut Transaction<'_, MySql>,
) -> FenceError {
    let rows = match transaction.fetch_all(meta).await {
        Ok(rows) => rows,
        Err(error) => return sort(error),
    };
    let found: Option<Vec<u8>> = rows.first().and_then(|row| row.try_get(1).ok());
    if found.as_deref() == Some(store) {
        FenceError::lost(guard)
    } else {
        FenceError::OtherDatabase
    }
}

/// A release looks so often, with these pauses, whether the row of a fenced claim is unlocked. Others lock it for less than that, to look at it.
pub(super) const UNLOCK_PAUSES: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(16),
    Duration::from_millis(64),
];

fn sort(source: sqlx::Error) -> FenceError {
    if error::is_no_such_table(&source) {
        FenceError::OtherDatabase
    } else if error::is_busy(&source) {
        FenceError::Busy { source: Some(source) }
    } else {
        FenceError::Database { source }
    }
}
