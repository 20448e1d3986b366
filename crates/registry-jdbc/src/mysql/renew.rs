//! Renews many grants at once: one statement for up to 1,024 grants.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use registry_core::{BackendError, Claim, Renewal};

use super::backend::MySqlBackend;
use super::error;
use super::link::Repeat;
use super::sql;
use super::statement::span;
use crate::server::Errand;

impl MySqlBackend {
    /// Renews the claims and returns the results in their order.
    pub(super) async fn renew_in_chunks(
        &self,
        claims: &[Claim],
    ) -> Vec<Result<Renewal, BackendError>> {
        let mut by_lease: HashMap<Duration, Vec<usize>> = HashMap::new();
        for (place, claim) in claims.iter().enumerate() {
            by_lease.entry(claim.lease()).or_default().push(place);
        }
        let mut answers: Vec<Option<Result<Renewal, BackendError>>> = vec![None; claims.len()];
        let mut trouble: Option<BackendError> = None;
        for (lease, places) in by_lease {
            for places in places.chunks(sql::SIZES[sql::SIZES.len() - 1]) {
                let chunk: Vec<&Claim> = places.iter().map(|&place| &claims[place]).collect();
                // After an error no further statement is sent: the same fault would probably delay
                // each of them as long.
                let renewed = match &trouble {
                    Some(error) => Err(error.clone()),
                    None => self.renew_chunk(&chunk, lease).await,
                };
                match renewed {
                    Ok(renewals) => {
                        for (&place, renewal) in places.iter().zip(renewals) {
                            answers[place] = Some(renewal);
                        }
                    }
                    Err(error) => {
                        for &place in places {
                            answers[place] = Some(Err(error.clone()));
                        }
                        trouble = Some(error);
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
        let asked_at = Instant::now();
        // A repeated renewal has no further effect.
        let make = || self.statements.renew(claims, lease);
        let done = self.link.change(Errand::Renew(lease), Repeat::Harmless, make).await?;
        let wanted: HashSet<_> = claims.iter().map(|claim| claim.id()).collect();
        if usize::try_from(done.rows_affected()) == Ok(wanted.len()) {
            return Ok(claims.iter().map(|_| Ok(Renewal::Renewed(lease))).collect());
        }
        // Some grants are gone, or a fence has their rows locked. The rows show which.
        let rows = self.link.rows(Errand::Renew(lease), || self.statements.lasting(claims)).await?;
        let since = asked_at.elapsed();
        let mut lasting = HashMap::<Vec<u8>, Duration>::with_capacity(rows.len());
        for row in &rows {
            lasting.insert(self.column(row, 0)?, span(self.column(row, 1)?));
        }
        let answer = |claim: &&Claim| match lasting.get(claim.id().to_bytes().as_slice()) {
            None => Ok(Renewal::Gone),
            // A renewed grant lasts its lease from the execution of the statement, which was after
            // `asked_at`. A skipped row that lasts as long was granted or renewed recently, so the
            // result is also true.
            Some(left) if left.saturating_add(since) >= lease => {
                Ok(Renewal::Renewed((*left).min(lease)))
            }
            Some(_) => Err(error::row_is_locked(self.link.place())),
        };
        Ok(claims.iter().map(answer).collect())
    }
}
