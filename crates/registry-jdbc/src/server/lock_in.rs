//! Locks rows in the caller's own transaction ([`LockIn`]).

use std::time::Duration;

use registry_core::{ClaimId, Key, Registry};
use sqlx::Transaction;

use super::backend::{ModeState, SqlBackend};
use super::dialect::{Dialect, SpringDialect};
use super::lease_table::LeaseTable;
use crate::lock_in::{Deadline, LockIn, LockInError, TransactionLock};

/// The table of a registry, if a transaction can hold its locks.
#[derive(Debug)]
pub(crate) struct LockableTable<'a, D: Dialect> {
    pub(crate) table: &'a LeaseTable<D>,
    /// Whether each lock is also an advisory lock, which the transaction must acquire in addition
    /// to the row's lock.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "only PostgreSQL has such locks of transactions")
    )]
    pub(crate) has_session_locks: bool,
}

impl<D: Dialect> Clone for LockableTable<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Dialect> Copy for LockableTable<'_, D> {}

impl<D: SpringDialect> LockIn<D> for Registry {
    async fn try_lock_in_for(
        &self,
        transaction: &mut Transaction<'_, D>,
        key: &str,
        wait: Duration,
    ) -> Result<Option<TransactionLock>, LockInError> {
        let lockable = lockable_table::<D>(self)
            .ok_or_else(|| LockInError::unsupported(key, D::PRODUCT_NAME))?;
        let key = Key::new(key).map_err(|source| LockInError::InvalidKey { source })?;
        // No release of this lock reaches the backend, which otherwise purges rows at releases. So
        // this call may purge. After the attempt, a purge could wait for the row that the
        // transaction has locked.
        lockable.table.store.maybe_purge(ClaimId::random()).await;
        let deadline = Deadline::after(wait);
        // The first attempt neither waits nor joins the local queue. So an error of the transaction
        // is returned at once, even if another caller holds the lock. A transaction that already
        // holds the lock also succeeds at once. In the local queue, this call could wait for a
        // caller that waits for this transaction.
        let without_wait = Deadline::after(Duration::ZERO);
        let first = D::lock_in(lockable, transaction, &key, without_wait).await?;
        let token = match first {
            None if !wait.is_zero() => {
                let locking = D::lock_in(lockable, transaction, &key, deadline);
                self.with_local_permit(&key, wait, locking).await?
            }
            first => first,
        };
        Ok(token.map(|token| TransactionLock::new(key, token)))
    }
}

fn lockable_table<D: SpringDialect>(registry: &Registry) -> Option<LockableTable<'_, D>> {
    match &registry.backend::<SqlBackend<D>>()?.mode_state {
        ModeState::Lease(table) => Some(LockableTable { table, has_session_locks: false }),
        ModeState::Row { table, .. } => Some(LockableTable { table, has_session_locks: false }),
        ModeState::Session { table, .. } if D::TRANSACTIONS_HOLD_SESSION_LOCKS => {
            Some(LockableTable { table, has_session_locks: true })
        }
        ModeState::Session { .. } | ModeState::Spring(_) => None,
    }
}
