//! Fences a transaction by a lock in the same database.

use registry_core::{FencingToken, LockGuard};
use sqlx::{Executor as _, MySql, RawSql, Row, Transaction};

use super::backend::MySqlBackend;
use super::error;
use super::row::MySqlRowBackend;
use super::session::MySqlSessionBackend;
use super::spring::MySqlSpringBackend;
use crate::fence::{Fence, FenceError};

impl Fence<MySql> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, MySql>) -> Result<(), FenceError> {
        if !self.is_held() {
            return Err(FenceError::lost(self));
        }
        if let Some(backend) = self.backend::<MySqlSessionBackend>() {
            match backend.session.keep(self.claim()).await {
                Ok(true) => {}
                Ok(false) => return Err(FenceError::lost(self)),
                Err(source) => return Err(FenceError::backend(self, source)),
            }
        }
        let fenced = self.fencing_token().and_then(|token| fenced(self, token));
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
fn fenced(guard: &LockGuard, token: FencingToken) -> Option<Fenced<'_>> {
    let native = guard.backend::<MySqlBackend>().map(|backend| Fenced {
        statement: backend.fence_statement(guard.claim(), token),
        meta: backend.statements.meta_there(),
        store: &backend.store,
    });
    let session = guard.backend::<MySqlSessionBackend>().map(|backend| &backend.rows);
    let row = || guard.backend::<MySqlRowBackend>().map(|backend| &backend.rows);
    let native = native.or_else(|| {
        session.or_else(row).map(|backend| Fenced {
            statement: backend.statements.fence_held(guard.claim(), token),
            meta: backend.statements.meta_there(),
            store: &backend.store,
        })
    });
    let spring = || guard.backend::<MySqlSpringBackend>();
    native.or_else(|| spring().map(|backend| backend.fenced(guard.claim(), token)))
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

fn sort(source: sqlx::Error) -> FenceError {
    if error::is_no_such_table(&source) {
        FenceError::OtherDatabase
    } else if error::is_busy(&source) {
        FenceError::Busy { source: Some(source) }
    } else {
        FenceError::Database { source }
    }
}
