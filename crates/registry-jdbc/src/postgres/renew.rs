//! Renews many claims in few statements.

use registry_core::{BackendError, Claim, Renewal};

use super::backend::{PostgresBackend, column, micros, span};
use super::error::{damaged, row_is_locked};
use super::link::Repeat;
use super::statement::{Statement, Value};
use crate::server::Errand;

/// How many claims one statement renews.
pub(super) const CLAIMS_MAX: usize = 1000;

impl PostgresBackend {
    /// One answer for each claim, in their order.
    pub(super) async fn renew_in_chunks(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut answers = Vec::with_capacity(claims.len());
        let mut trouble: Option<BackendError> = None;
        for chunk in claims.chunks(CLAIMS_MAX) {
            // Whatever keeps one statement from being answered would make every other wait as long.
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
        // Two renewals do what one does.
        let rows = self.link.rows(Errand::Renew(shortest), &statement, Repeat::Harmless).await?;
        if rows.len() != claims.len() {
            return Err(damaged("a renewal was not answered for each claim"));
        }
        rows.iter()
            .zip(claims)
            .map(|(row, claim)| {
                let (left, is_there): (Option<i64>, bool) = (column(row, 0)?, column(row, 1)?);
                Ok(match left {
                    // More than was asked for is there while the server's clock is behind, and gone when it is put right.
                    Some(left) => Ok(Renewal::Renewed(span(left).min(claim.lease()))),
                    None if is_there => Err(row_is_locked()),
                    None => Ok(Renewal::Gone),
                })
            })
            .collect()
    }
}
