//! Fences a transaction by a lock in the same database ([`Fence`]).

use registry_core::LockGuard;
use sqlx::{Postgres, Transaction};

use crate::fence::{Fence, FenceError};
use crate::server;

impl Fence<Postgres> for LockGuard {
    async fn fence(&self, transaction: &mut Transaction<'_, Postgres>) -> Result<(), FenceError> {
        server::fence(self, transaction).await
    }
}
