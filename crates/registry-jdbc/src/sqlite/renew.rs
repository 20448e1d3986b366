//! Prolongs many grants at once: a statement for each hundred or so, not one for each.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, Claim, Renewal};

use super::backend::{SqliteBackend, key_bytes};
use super::clock::{micros, span};
use super::link::Statement;
use super::sql;

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
                Err(error) => {
                    answers.extend(chunk.iter().map(|_| Err(error.clone())));
                    file_is_locked = Some(error).filter(BackendError::is_retryable);
                }
            }
        }
        answers
    }

    async fn renew_chunk(&self, claims: &[Claim]) -> Result<Vec<Renewal>, BackendError> {
        if self.place.check(self.identity).is_err() {
            // Whoever locks in the file that took this one's place has been told that the keys are free.
            return Ok(vec![Renewal::Gone; claims.len()]);
        }
        if claims.len() > 1 {
            let size = sql::sized(&*sql::RENEW, claims.len());
            let make = || self.statement(size, claims, self.clock.now());
            let changes = self.writer.changes(make).await?;
            if usize::try_from(changes) == Ok(claims.len()) {
                return Ok(claims.iter().map(|claim| Renewal::Renewed(claim.lease())).collect());
            }
            // Some are gone. Asking again tells which, and does the others no harm.
        }
        let size = sql::sized(&*sql::RENEW_TELLING, claims.len());
        let mut now = 0;
        let rows = self
            .writer
            .rows(|| {
                now = self.clock.now();
                self.statement(size, claims, now)
            })
            .await?;
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

    /// A process that is stopped after it read the clock, and continued after a lease has run out, prolongs that lease if nobody
    /// took the key meanwhile. This excludes as well as before: nobody was granted the key, and from here on nobody is.
    fn statement(&self, size: &'static sql::Sized, claims: &[Claim], now: i64) -> Statement {
        let mut statement = sqlx::query(size.text.as_str())
            .bind(now)
            .bind(Arc::clone(&self.boot))
            .bind(Arc::clone(&self.namespace));
        for claim in claims {
            statement = statement
                .bind(key_bytes(claim.key()))
                .bind(claim.id().to_bytes().to_vec())
                .bind(now.saturating_add(micros(claim.lease())));
        }
        for _ in claims.len()..size.items_max {
            statement = statement.bind(None::<Vec<u8>>).bind(None::<Vec<u8>>).bind(None::<i64>);
        }
        statement
    }
}
