//! The claims that wait, in a table of their own. No statement of a grant uses this table.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use registry_core::{BackendError, Claim, ClaimMode, Key, WaiterStore, WaitingClaim};

use super::backend::SqliteBackend;
use super::clock::duration_between;

#[async_trait]
impl WaiterStore for SqliteBackend {
    async fn register(&self, claim: &Claim, waited_for: Duration) -> Result<(), BackendError> {
        let (statements, claim) = (Arc::clone(&self.statements), claim.clone());
        let register = move || statements.register_waiter(&claim, waited_for);
        self.writer.execute(register).await.map(drop)
    }

    async fn unregister(&self, claim: &Claim) -> Result<(), BackendError> {
        let is_purge_due = claim.id().to_bytes()[0] == PURGE_ID_BYTE;
        let (statements, claim) = (Arc::clone(&self.statements), claim.clone());
        let unregister = move || statements.unregister_waiter(&claim);
        self.writer.execute(unregister).await?;
        if is_purge_due {
            let statements = Arc::clone(&self.statements);
            self.writer.execute_low_priority(move || statements.purge_waiters()).await?;
        }
        Ok(())
    }

    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError> {
        let (statements, key) = (Arc::clone(&self.statements), key.cloned());
        let rows = self.reader.fetch_all(move || statements.waiters(key.as_ref())).await?;
        let now = self.statements.clock.now();
        let mut waiting = Vec::with_capacity(rows.len());
        for row in &rows {
            let mode = self.column::<String>(row, 1)?.parse().unwrap_or(ClaimMode::Exclusive);
            let waited_for = duration_between(self.column(row, 3)?, now);
            let expires_in = duration_between(now, self.column(row, 4)?);
            let claim = WaitingClaim::new(self.decode_key(self.column(row, 0)?)?)
                .with_mode(mode)
                .with_label(self.column(row, 2)?)
                .with_times(Some(waited_for), Some(expires_in));
            waiting.push(claim);
        }
        Ok(waiting)
    }
}

/// The removal of a registration also deletes all expired ones if the claim's random id begins with
/// this byte: one in 256.
const PURGE_ID_BYTE: u8 = 0;
