//! Renews many claims with few statements.

use registry_core::{BackendError, Claim, Renewal};

use super::backend::{PostgresBackend, column, from_micros, micros};
use super::client::Resend;
use super::error::{corrupt, row_locked};
use super::statement::{BoundStatement, PgParam};
use crate::server::ConnectionUse;

/// The maximum number of claims that one statement renews.
pub(super) const CLAIMS_MAX: usize = 1000;

impl PostgresBackend {
    /// Returns one answer for each claim, in the same order.
    pub(super) async fn renew_in_chunks(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut answers = Vec::with_capacity(claims.len());
        let mut store_error: Option<BackendError> = None;
        for chunk in claims.chunks(CLAIMS_MAX) {
            // After a store error the remaining chunks fail at once. Otherwise each could wait for
            // the full time-out.
            let answer = match store_error.take() {
                Some(error) => Err(error),
                None => self.renew_chunk(chunk).await,
            };
            match answer {
                Ok(renewals) => answers.extend(renewals),
                Err(error) => {
                    answers.extend(chunk.iter().map(|_| Err(error.clone())));
                    store_error = Some(error);
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
        let statement = BoundStatement::new(
            &self.texts.renew,
            [
                PgParam::ManyBytes(ids.collect()),
                PgParam::ManyBytes(
                    claims.iter().map(|claim| claim.id().to_bytes().to_vec()).collect(),
                ),
                PgParam::Numbers(claims.iter().map(|claim| micros(claim.lease())).collect()),
            ],
        );
        let shortest = claims.iter().map(Claim::lease).min().unwrap_or_default();
        // A repeated renewal has the same effect as a single one.
        let rows =
            self.client.rows(ConnectionUse::Renew(shortest), &statement, Resend::Allowed).await?;
        if rows.len() != claims.len() {
            return Err(corrupt("a renewal did not return one row per claim"));
        }
        rows.iter()
            .zip(claims)
            .map(|(row, claim)| {
                let (left, exists): (Option<i64>, bool) = (column(row, 0)?, column(row, 1)?);
                Ok(match left {
                    // The time left can exceed the lease while the server's clock is behind. The
                    // excess vanishes when the clock is corrected.
                    Some(left) => Ok(Renewal::Renewed(from_micros(left).min(claim.lease()))),
                    None if exists => Err(row_locked()),
                    None => Ok(Renewal::Gone),
                })
            })
            .collect()
    }
}
