//! Grants or releases several keys at once: one statement for up to 100 keys. For more keys, each
//! key has its own statement.

use std::collections::{HashMap, HashSet};
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
        if claims.len() > sql::batch_items_max(&*sql::ACQUIRE_ALL) {
            return Ok(BatchAttempt::Declined);
        }
        let batch = sql::smallest_batch_for(&*sql::ACQUIRE_ALL, claims.len());
        let (statements, owned): (_, Arc<[Claim]>) = (Arc::clone(&self.statements), claims.into());
        let wall = self.statements.clock.wall();
        let make_statement = move || statements.acquire_all(batch, &owned, wall);
        let rows = self.writer.fetch_all_low_priority(make_statement).await?;
        if rows.is_empty() {
            return Ok(BatchAttempt::Declined);
        }
        let mut tokens = HashMap::<Vec<u8>, i64>::with_capacity(rows.len());
        for row in &rows {
            tokens.insert(self.column(row, 0)?, self.column(row, 1)?);
        }
        let missing = || self.corrupt_row("a grant of several keys did not return all keys");
        let grants = claims.iter().map(|claim| {
            let token = *tokens.get(claim.key().as_str().as_bytes()).ok_or_else(missing)?;
            let last = token.saturating_add(i64::from(claim.token_block()) - 1);
            self.raise_next_token_min(last);
            Ok(Grant::new(self.fencing_token(token)?, claim.lease()))
        });
        let grants: Result<_, BackendError> = grants.collect();
        grants.map(BatchAttempt::Granted).map_err(BackendError::as_unknown)
    }

    async fn release_all(&self, claims: &[Claim]) -> Vec<Result<Release, BackendError>> {
        let mut freed = HashSet::new();
        if claims.len() <= sql::batch_items_max(&*sql::RELEASE_ALL) {
            let batch = sql::smallest_batch_for(&*sql::RELEASE_ALL, claims.len());
            let (statements, owned): (_, Arc<[Claim]>) =
                (Arc::clone(&self.statements), claims.into());
            let rows = self.writer.fetch_all(move || statements.release_all(batch, &owned)).await;
            let keys = rows.and_then(|rows| {
                rows.iter().map(|row| self.column::<Vec<u8>>(row, 0)).collect::<Result<_, _>>()
            });
            match keys {
                Ok(keys) => freed = keys,
                Err(error) if FileMismatch::from_error(&error).is_none() => {
                    return vec![Err(error); claims.len()];
                }
                // Each release then reports the mismatch in its own way.
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

#[cfg(test)]
mod tests {
    use registry_core::{BatchAttempt, LockAdmin as _, LockBackend as _, LockBatch as _, Release};

    use crate::sqlite::tests::{TestFolder, acquire, acquire_token, claim, expect_busy, key};

    #[tokio::test]
    async fn released_keys_are_acquired_and_released_together() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        // More keys than the smallest statement has parameters for.
        let names: Vec<String> = (0..15).map(|n| format!("key {n}")).collect();
        let claims = || names.iter().map(|name| claim(name)).collect::<Vec<_>>();
        let mut first_tokens = Vec::new();
        for claim in claims() {
            first_tokens.push(acquire_token(&a, &claim).await);
            a.release(&claim).await.unwrap();
        }

        let held = claims();
        let attempt = a.try_acquire_all(&held).await.unwrap();
        let BatchAttempt::Granted(grants) = attempt else { panic!("{attempt:?}") };
        for (grant, first) in grants.iter().zip(first_tokens) {
            assert!(grant.token.get() > first, "{grant:?} after {first}");
        }
        expect_busy(&b, &claim("key 14")).await;
        for released in a.release_all(&held).await {
            assert_eq!(released.unwrap(), Release::Freed);
        }

        acquire(&b, &claim("key 7")).await;
        assert_eq!(a.try_acquire_all(&claims()).await.unwrap(), BatchAttempt::Declined);
        for name in ["key 0", "key 14"] {
            assert_eq!(a.inspect(&key(name)).await.unwrap(), []);
        }
    }
}
