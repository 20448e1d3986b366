//! Renews many grants at once: one statement for up to 100 grants.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, Renewal};

use super::backend::SqliteBackend;
use super::clock::span;
use super::sql;
use super::statement::Statement;
use crate::error::Detached;

impl SqliteBackend {
    /// Renews the claims and returns the results in their order.
    pub(super) async fn renew_in_chunks(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut answers = Vec::with_capacity(claims.len());
        let mut file_is_locked: Option<BackendError> = None;
        for chunk in claims.chunks(sql::largest(&*sql::RENEW)) {
            // Another process keeps the file locked. Waiting again for each chunk would take
            // minutes.
            if let Some(error) = &file_is_locked {
                answers.extend(chunk.iter().map(|_| Err(error.clone())));
                continue;
            }
            match self.renew_chunk(chunk).await {
                Ok(renewals) => answers.extend(renewals.into_iter().map(Ok)),
                // A process that uses the replacement files may have been granted the keys.
                Err(error) if Detached::of(&error).is_some() => {
                    answers.extend(chunk.iter().map(|_| Ok(Renewal::Gone)));
                }
                Err(error) => {
                    answers.extend(chunk.iter().map(|_| Err(error.clone())));
                    file_is_locked = Some(error).filter(BackendError::is_retryable);
                }
            }
        }
        answers
    }

    async fn renew_chunk(&self, claims: &[Claim]) -> Result<Vec<Renewal>, BackendError> {
        let claims: Arc<[Claim]> = claims.into();
        if claims.len() > 1 {
            let changes = self.writer.changes(self.renewal(&*sql::RENEW, &claims)).await?;
            if usize::try_from(changes) == Ok(claims.len()) {
                return Ok(claims.iter().map(|claim| Renewal::Renewed(claim.lease())).collect());
            }
            // Some grants are gone. A second statement shows which. It renews the others again,
            // which is harmless.
        }
        let rows = self.writer.rows(self.renewal(&*sql::RENEW_TELLING, &claims)).await?;
        let now = self.statements.clock.now();
        let mut left = HashMap::<Vec<u8>, Duration>::with_capacity(rows.len());
        for row in &rows {
            left.insert(self.column(row, 0)?, span(now, self.column(row, 1)?));
        }
        let answer = |claim: &Claim| left.get(claim.id().to_bytes().as_slice()).copied();
        Ok(claims
            .iter()
            .map(|claim| answer(claim).map_or(Renewal::Gone, Renewal::Renewed))
            .collect())
    }

    fn renewal(
        &self,
        sizes: &'static [sql::Sized],
        claims: &Arc<[Claim]>,
    ) -> impl FnMut() -> Statement + Send + use<> {
        let size = sql::sized(sizes, claims.len());
        let (statements, claims) = (Arc::clone(&self.statements), Arc::clone(claims));
        move || statements.renew(size, &claims)
    }
}
