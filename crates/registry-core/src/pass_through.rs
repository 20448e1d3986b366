//! The store that grants every claim, for configurations that switch locking off.

use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;

use crate::backend::{Attempt, Claim, Finding, Grant, LockAdmin, LockBackend, Release, Renewal};
use crate::capabilities::{Capabilities, GuaranteeClass, Reach};
use crate::error::{BackendError, BackendErrorKind};
use crate::fencing::FencingToken;

/// The next token of every key in this process.
static NEXT_TOKEN: AtomicU64 = AtomicU64::new(1);

/// A store that grants every claim. Callers of one registry still wait for each other per key. The
/// store does not exclude other clients.
///
/// The tokens of all keys come from one counter of this process, which starts at 1. They cannot be
/// compared with the tokens of other processes, so [`Capabilities::fencing`] is false.
///
/// Use this store in tests of code that locks, and in deployments with a single process and no
/// store.
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
        let block = u64::from(claim.token_block());
        let token = FencingToken::new(NEXT_TOKEN.fetch_add(block, Ordering::Relaxed));
        let token = token.ok_or_else(|| {
            let message =
                "the pass-through store has run out of fencing tokens; restart the process";
            BackendError::new(BackendErrorKind::Protocol, message).as_refused()
        })?;
        Ok(Attempt::Granted(Grant::new(token, claim.lease())))
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
