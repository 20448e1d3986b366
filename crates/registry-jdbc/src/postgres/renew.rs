//! Renews many leases with one statement, in both layouts.

use registry_core::{BackendError, Claim, Renewal};

use super::backend::{column, from_micros, micros};
use super::client::PgClient;
use super::error::{corrupt, row_locked};
use super::statement::{BoundStatement, PgParam};
use crate::server::{ConnectionUse, Resend};

/// The maximum number of claims that one statement renews.
pub(super) const CLAIMS_MAX: usize = 1000;

pub(super) fn claim_ids(claims: &[&Claim]) -> PgParam {
    PgParam::ManyBytes(claims.iter().map(|claim| claim.id().to_bytes().to_vec()).collect())
}

pub(super) fn leases(claims: &[&Claim]) -> PgParam {
    PgParam::Numbers(claims.iter().map(|claim| micros(claim.lease())).collect())
}

/// Sends a renewal, and reads one row for each claim: the time left, and whether the grant exists.
pub(super) async fn renew_rows(
    client: &PgClient,
    statement: BoundStatement<'_>,
    claims: &[&Claim],
) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
    let shortest = claims.iter().map(|claim| claim.lease()).min().unwrap_or_default();
    // A repeated renewal has the same effect as a single one.
    let rows = client.rows(ConnectionUse::Renew(shortest), &statement, Resend::Allowed).await?;
    if rows.len() != claims.len() {
        return Err(corrupt("a renewal did not return one row per claim"));
    }
    let answers = rows.iter().zip(claims).map(|(row, claim)| {
        let (left, exists): (Option<i64>, bool) = (column(row, 0)?, column(row, 1)?);
        Ok(match left {
            // The time left can exceed the lease while the server's clock is behind. The excess
            // vanishes when the clock is corrected.
            Some(left) => Ok(Renewal::Renewed(from_micros(left).min(claim.lease()))),
            None if exists => Err(row_locked()),
            None => Ok(Renewal::Gone),
        })
    });
    answers.collect()
}
