//! Renews many grants at once: one statement for up to 100 grants.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, Renewal};

use super::backend::SqliteBackend;
use super::clock::duration_between;
use super::error::FileMismatch;
use super::sql;
use super::statement::SqliteQuery;

impl SqliteBackend {
    /// Renews the claims and returns the results in their order.
    pub(super) async fn renew_in_chunks(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut results = Vec::with_capacity(claims.len());
        let mut retryable_error: Option<BackendError> = None;
        for chunk in claims.chunks(sql::batch_items_max(&*sql::RENEW)) {
            // Another process probably keeps the file locked. A new wait for each chunk could take
            // minutes.
            if let Some(error) = &retryable_error {
                results.extend(chunk.iter().map(|_| Err(error.clone())));
                continue;
            }
            match self.renew_chunk(chunk).await {
                Ok(renewals) => {
                    for (renewal, claim) in renewals.into_iter().zip(chunk) {
                        results.push(match renewal {
                            // The claim may be in the record of several claims.
                            Renewal::Gone => self.renew_in_record(claim).await,
                            renewed => Ok(renewed),
                        });
                    }
                }
                // The files were replaced, so a process with the new files may have been granted
                // the keys.
                Err(error) if FileMismatch::from_error(&error).is_some() => {
                    results.extend(chunk.iter().map(|_| Ok(Renewal::Gone)));
                }
                Err(error) => {
                    results.extend(chunk.iter().map(|_| Err(error.clone())));
                    retryable_error = Some(error).filter(BackendError::is_retryable);
                }
            }
        }
        results
    }

    async fn renew_chunk(&self, claims: &[Claim]) -> Result<Vec<Renewal>, BackendError> {
        let claims: Arc<[Claim]> = claims.into();
        if claims.len() > 1 {
            let changes = self.writer.execute(self.renew_statement(&*sql::RENEW, &claims)).await?;
            if usize::try_from(changes) == Ok(claims.len()) {
                return Ok(claims.iter().map(|claim| Renewal::Renewed(claim.lease())).collect());
            }
            // Some grants have ended or are in records. A second statement shows which exclusive
            // grants still exist. It renews them again, which is harmless.
        }
        let rows =
            self.writer.fetch_all(self.renew_statement(&*sql::RENEW_RETURNING, &claims)).await?;
        let now = self.statements.clock.now();
        let mut leases = HashMap::<Vec<u8>, Duration>::with_capacity(rows.len());
        for row in &rows {
            leases.insert(self.column(row, 0)?, duration_between(now, self.column(row, 1)?));
        }
        let lease_of = |claim: &Claim| leases.get(claim.id().to_bytes().as_slice()).copied();
        Ok(claims
            .iter()
            .map(|claim| lease_of(claim).map_or(Renewal::Gone, Renewal::Renewed))
            .collect())
    }

    fn renew_statement(
        &self,
        batches: &'static [sql::BatchStatement],
        claims: &Arc<[Claim]>,
    ) -> impl FnMut() -> SqliteQuery + Send + use<> {
        let batch = sql::smallest_batch_for(batches, claims.len());
        let (statements, claims) = (Arc::clone(&self.statements), Arc::clone(claims));
        move || statements.renew(batch, &claims)
    }
}
