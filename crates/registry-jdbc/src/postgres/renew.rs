//! Renews many claims with few statements.

use registry_core::{BackendError, Claim, Renewal};

use super::backend::{PostgresBackend, column, micros, span};
use super::error::{damaged, row_is_locked};
use super::link::Repeat;
use super::statement::{Statement, Value};
use crate::server::Errand;

/// The maximum number of claims that one statement renews.
pub(super) const CLAIMS_MAX: usize = 1000;

impl PostgresBackend {
    /// Returns one answer for each claim, in the same order.
    pub(super) async fn renew_in_chunks(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut answers = Vec::with_capacity(claims.len());
        let mut trouble: Option<BackendError> = None;
        for chunk in claims.chunks(CLAIMS_MAX) {
            // After a store error the remaining chunks fail at once. Otherwise each could wait for
            // the full time-out.
            let answer = match trouble.take() {
                Some(error) => Err(error),
                None => self.renew_chunk(chunk).await,
            };
            match answer {
                Ok(renewals) => answers.extend(renewals),
                Err(error) => {
                    answers.extend(chunk.iter().map(|_| Err(error.clone())));
                    trouble = Some(error);
                }
            }
        }
        answers
    }

    async fn renew_chunk(
        &self,
        claims: &[Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let ids = claims.iter().map(|claim| self.row_id(claim.key()).bytes().to_vec());
        let statement = Statement::new(
            &self.texts.renew,
            [
                Value::ManyBytes(ids.collect()),
                Value::ManyBytes(
                    claims.iter().map(|claim| claim.id().to_bytes().to_vec()).collect(),
                ),
                Value::Numbers(claims.iter().map(|claim| micros(claim.lease())).collect()),
            ],
        );
        let shortest = claims.iter().map(Claim::lease).min().unwrap_or_default();
        // A repeated renewal has the same effect as a single one.
        let rows = self.link.rows(Errand::Renew(shortest), &statement, Repeat::Harmless).await?;
        if rows.len() != claims.len() {
            return Err(damaged("a renewal was not answered for each claim"));
        }
        rows.iter()
            .zip(claims)
            .map(|(row, claim)| {
                let (left, is_there): (Option<i64>, bool) = (column(row, 0)?, column(row, 1)?);
                Ok(match left {
                    // The time left can exceed the lease while the server's clock is behind. The
                    // excess vanishes when the clock is corrected.
                    Some(left) => Ok(Renewal::Renewed(span(left).min(claim.lease()))),
                    None if is_there => Err(row_is_locked()),
                    None => Ok(Renewal::Gone),
                })
            })
            .collect()
    }
}
