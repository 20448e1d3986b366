//! Prolongs many grants at once: a statement for each hundred or so, not one for each.

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
    /// Answers for each claim, in their order.
    pub(super) async fn renew_in_chunks(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut answers = Vec::with_capacity(claims.len());
        let mut file_is_locked: Option<BackendError> = None;
        for chunk in claims.chunks(sql::largest(&*sql::RENEW)) {
            // Somebody keeps the file to himself. Waiting once more for every chunk would take minutes.
            if let Some(error) = &file_is_locked {
                answers.extend(chunk.iter().map(|_| Err(error.clone())));
                continue;
            }
            match self.renew_chunk(chunk).await {
                Ok(renewals) => answers.extend(renewals.into_iter().map(Ok)),
                // Whoever locks in the files that took these ones' place has been told that the keys are free.
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
            // Some are gone. Asking again tells which, and does the others no harm.
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
