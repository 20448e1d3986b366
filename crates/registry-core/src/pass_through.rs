//! The store that never contends: locking switched off by configuration.

use async_trait::async_trait;

use crate::backend::{Attempt, Claim, Finding, Grant, LockBackend, Release, Renewal};
use crate::capabilities::{Capabilities, GuaranteeClass, Reach};
use crate::error::BackendError;

/// A store that grants everything to everybody. Callers of one registry still take turns per key; nobody else is excluded.
///
/// For tests of code that locks, and for deployments that run a single process and want no store.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct PassThroughBackend;

impl PassThroughBackend {
    /// The store that grants everything.
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

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        Ok(vec![Finding::warning("locking is turned off: this store grants every lock")])
    }
}
