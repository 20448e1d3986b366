//! Reads the result of a renewal, in both layouts.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::time::{Duration, Instant};

use registry_core::{BackendError, Claim, Renewal};
use sqlx::mysql::{MySqlQueryResult, MySqlRow};
use sqlx::{Decode, MySql, Row as _, Type};

use super::client::MySqlClient;
use super::error;
use super::statement::{MySqlQuery, from_micros};
use crate::server::ConnectionUse;

/// A renewal of claims with the same lease, which the server has executed.
pub(super) struct SentRenewal<'a> {
    pub(super) client: &'a MySqlClient,
    pub(super) claims: &'a [&'a Claim],
    pub(super) requested_at: Instant,
    pub(super) done: MySqlQueryResult,
}

impl SentRenewal<'_> {
    /// Returns one answer for each claim. `unexpired` finds the holders of the keys, with the time
    /// that they have left; `holder` is how a claim appears there.
    pub(super) async fn answers<H>(
        self,
        holder: impl Fn(&Claim) -> H + Send,
        unexpired: impl Fn() -> MySqlQuery + Send + Sync,
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError>
    where
        H: Eq + Hash + Send + for<'r> Decode<'r, MySql> + Type<MySql>,
    {
        let Self { client, claims, requested_at, done } = self;
        let lease = claims[0].lease();
        let wanted: HashSet<_> = claims.iter().map(|claim| claim.id()).collect();
        if usize::try_from(done.rows_affected()) == Ok(wanted.len()) {
            return Ok(claims.iter().map(|_| Ok(Renewal::Renewed(lease))).collect());
        }
        // Some grants are gone, or a fence has their rows locked. The rows show which.
        let rows = client.rows(ConnectionUse::Renew(lease), unexpired).await?;
        let since = requested_at.elapsed();
        let read = |row: &MySqlRow| -> Result<(Option<H>, Duration), sqlx::Error> {
            Ok((row.try_get(0)?, from_micros(row.try_get(1)?)))
        };
        let unexpired: Result<HashMap<_, _>, _> = rows.iter().map(read).collect();
        let unexpired = unexpired.map_err(|error| client.explain(error))?;
        let answer = |claim: &&Claim| match unexpired.get(&Some(holder(claim))) {
            None => Ok(Renewal::Gone),
            // A renewed grant lasts its lease from the execution of the statement, which was after
            // `requested_at`. A skipped row that lasts as long was granted or renewed recently, so
            // the result is also true.
            Some(left) if left.saturating_add(since) >= lease => {
                Ok(Renewal::Renewed((*left).min(lease)))
            }
            Some(_) => Err(error::row_locked(error::STORE)),
        };
        Ok(claims.iter().map(answer).collect())
    }
}
