//! Exclusive leases of several keys, granted or released in one statement.

use futures_util::future::join_all;
use registry_core::{BackendError, BatchAttempt, Claim, Grant, Release};

use super::dialect::{Dialect, LeaseStore as _, WakeupSource as _};
use super::lease_table::LeaseTable;
use super::statement::fencing_token;

impl<D: Dialect> LeaseTable<D> {
    /// Grants all claims in one statement. Declines unless this process has recently released all
    /// of the keys. The row of any other key is probably missing or held, and then the statement
    /// would grant nothing.
    pub(super) async fn try_acquire_all(
        &self,
        claims: &[Claim],
    ) -> Result<BatchAttempt, BackendError> {
        let rows: Vec<_> = claims.iter().map(|claim| self.row_id(claim.key())).collect();
        if !self.recently_released.remove_all(&rows) {
            return Ok(BatchAttempt::Declined);
        }
        let tokens = D::acquire_all(self, claims).await?;
        if tokens.len() != claims.len() {
            return Ok(BatchAttempt::Declined);
        }
        let grant = |(token, claim): (i64, &Claim)| {
            Ok(Grant::new(fencing_token::<D>(token)?, claim.lease()))
        };
        let grants: Result<_, BackendError> = tokens.into_iter().zip(claims).map(grant).collect();
        grants.map(BatchAttempt::Granted).map_err(BackendError::as_unknown)
    }

    /// Releases all claims in one statement. A separate statement then releases each claim that the
    /// first statement did not find, because that claim may be in a record.
    pub(super) async fn release_all(&self, claims: &[Claim]) -> Vec<Result<Release, BackendError>> {
        let freed = match D::release_all(self, claims).await {
            Ok(freed) => freed,
            Err(error) => return vec![Err(error); claims.len()],
        };
        join_all(claims.iter().enumerate().map(|(index, claim)| {
            let is_freed = freed.get(index).copied().unwrap_or_default();
            async move {
                if !is_freed {
                    return self.release(claim).await;
                }
                self.recently_released.insert(self.row_id(claim.key()));
                self.wakeups.on_release(claim.key());
                self.store.maybe_purge(claim.id()).await;
                Ok(Release::Freed)
            }
        }))
        .await
    }
}
