//! The store that grants every claim, for configurations that switch locking off.

use async_trait::async_trait;

use crate::backend::{Attempt, Claim, Finding, Grant, LockAdmin, LockBackend, Release, Renewal};
use crate::capabilities::{Capabilities, GuaranteeClass, Reach};
use crate::error::BackendError;

/// A store that grants every claim. Callers of one registry still wait for each other per key;
/// other clients are not excluded.
///
/// For tests of code that locks, and for deployments with a single process and no store.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct PassThroughBackend;

impl PassThroughBackend {
    /// Creates the store.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }
}

#[async_trait]
impl LockBackend for PassThroughBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("pass-through", GuaranteeClass::None, Reach::Process)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        Ok(Attempt::Granted(Grant::new(None, claim.lease())))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        claims.iter().map(|claim| Ok(Renewal::Renewed(claim.lease()))).collect()
    }

    async fn release(&self, _claim: &Claim) -> Result<Release, BackendError> {
        Ok(Release::Freed)
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }
}

#[async_trait]
impl LockAdmin for PassThroughBackend {
    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        Ok(vec![Finding::warning("locking is turned off: this store grants every lock")])
    }
}
