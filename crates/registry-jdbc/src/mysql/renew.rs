//! Renews many grants at once: one statement for up to 1,024 grants.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use registry_core::{BackendError, Claim, Renewal};

use super::backend::MySqlBackend;
use super::client::Resend;
use super::error;
use super::sql;
use super::statement::from_micros;
use crate::server::ConnectionUse;

impl MySqlBackend {
    /// Renews the claims and returns the results in their order.
    pub(super) async fn renew_in_chunks(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut by_lease: HashMap<Duration, Vec<usize>> = HashMap::new();
        for (index, claim) in claims.iter().enumerate() {
            by_lease.entry(claim.lease()).or_default().push(index);
        }
        let mut answers: Vec<Option<Result<Renewal, BackendError>>> = vec![None; claims.len()];
        let mut store_error: Option<BackendError> = None;
        for (lease, indices) in by_lease {
            for indices in indices.chunks(sql::SIZES[sql::SIZES.len() - 1]) {
                let chunk: Vec<&Claim> = indices.iter().map(|&index| &claims[index]).collect();
                // After an error no further statement is sent: the same fault would probably delay
                // each of them as long.
                let renewed = match &store_error {
                    Some(error) => Err(error.clone()),
                    None => self.renew_chunk(&chunk, lease).await,
                };
                match renewed {
                    Ok(renewals) => {
                        for (&index, renewal) in indices.iter().zip(renewals) {
                            answers[index] = Some(renewal);
                        }
                    }
                    Err(error) => {
                        for &index in indices {
                            answers[index] = Some(Err(error.clone()));
                        }
                        store_error = Some(error);
                    }
                }
            }
        }
        answers.into_iter().map(|answer| answer.expect("every place is in one chunk")).collect()
    }

    /// Renews claims with the same lease.
    async fn renew_chunk(
        &self,
        claims: &[&Claim],
        lease: Duration,
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let requested_at = Instant::now();
        // A repeated renewal has no further effect.
        let make = || self.statements.renew(claims, lease);
        let done = self.client.execute(ConnectionUse::Renew(lease), Resend::Allowed, make).await?;
        let wanted: HashSet<_> = claims.iter().map(|claim| claim.id()).collect();
        if usize::try_from(done.rows_affected()) == Ok(wanted.len()) {
            return Ok(claims.iter().map(|_| Ok(Renewal::Renewed(lease))).collect());
        }
        // Some grants are gone, or a fence has their rows locked. The rows show which.
        let rows = self
            .client
            .rows(ConnectionUse::Renew(lease), || self.statements.unexpired(claims))
            .await?;
        let since = requested_at.elapsed();
        let mut unexpired = HashMap::<Vec<u8>, Duration>::with_capacity(rows.len());
        for row in &rows {
            unexpired.insert(self.column(row, 0)?, from_micros(self.column(row, 1)?));
        }
        let answer = |claim: &&Claim| match unexpired.get(claim.id().to_bytes().as_slice()) {
            None => Ok(Renewal::Gone),
            // A renewed grant lasts its lease from the execution of the statement, which was after
            // `requested_at`. A skipped row that lasts as long was granted or renewed recently, so
            // the result is also true.
            Some(left) if left.saturating_add(since) >= lease => {
                Ok(Renewal::Renewed((*left).min(lease)))
            }
            Some(_) => Err(error::row_locked(self.client.address())),
        };
        Ok(claims.iter().map(answer).collect())
    }
}
