//! Grants or releases several keys at once: one statement for up to 100 keys.

use std::collections::HashSet;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::{
    BackendError, BatchAttempt, Claim, Grant, LockBackend as _, LockBatch, Release,
};

use super::backend::SqliteBackend;
use super::error::FileMismatch;
use super::sql;

#[async_trait]
impl LockBatch for SqliteBackend {
    async fn try_acquire_all(&self, claims: &[Claim]) -> Result<BatchAttempt, BackendError> {
        let token = self.statements.clock.wall();
        if claims.len() > sql::batch_items_max(&*sql::ACQUIRE_ALL)
            || !self.is_above_granted_tokens(token)
        {
            return Ok(BatchAttempt::Declined);
        }
        let size = sql::smallest_batch_for(&*sql::ACQUIRE_ALL, claims.len());
        let (statements, owned): (_, Arc<[Claim]>) = (Arc::clone(&self.statements), claims.into());
        let make_statement = move || statements.acquire_all(size, &owned, token);
        if self.writer.execute_low_priority(make_statement).await? == 0 {
            return Ok(BatchAttempt::Declined);
        }
        let block = claims.iter().map(Claim::token_block).max().unwrap_or_default();
        self.raise_next_token_min(token.saturating_add(i64::from(block)) - 1);
        let token = self.fencing_token(token)?;
        let grant = |claim: &Claim| Grant::new(token, claim.lease());
        Ok(BatchAttempt::Granted(claims.iter().map(grant).collect()))
    }

    async fn release_all(&self, claims: &[Claim]) -> Vec<Result<Release, BackendError>> {
        let mut freed = HashSet::new();
        if claims.len() <= sql::batch_items_max(&*sql::RELEASE_ALL) {
            let size = sql::smallest_batch_for(&*sql::RELEASE_ALL, claims.len());
            let (statements, owned): (_, Arc<[Claim]>) =
                (Arc::clone(&self.statements), claims.into());
            let rows = self.writer.fetch_all(move || statements.release_all(size, &owned)).await;
            let keys = rows.and_then(|rows| {
                rows.iter().map(|row| self.column::<Vec<u8>>(row, 0)).collect::<Result<_, _>>()
            });
            match keys {
                Ok(keys) => freed = keys,
                Err(error) if FileMismatch::from_error(&error).is_none() => {
                    return vec![Err(error); claims.len()];
                }
                // Each release then reports that the claim held nothing.
                Err(_) => {}
            }
        }
        join_all(claims.iter().map(|claim| {
            let is_freed = freed.contains(claim.key().as_str().as_bytes());
            async move {
                if !is_freed {
                    // The claim may be in the record of several claims.
                    return self.release(claim).await;
                }
                self.purge_at_random(claim).await;
                Ok(Release::Freed)
            }
        }))
        .await
    }
}
