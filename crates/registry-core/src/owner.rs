//! Owners, for which locks are re-entrant.
//!
//! An owner is an explicit value, because threads and tasks do not identify a caller. A future may
//! change its thread at each `.await`, and one task may run several callers.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};

/// An identity under which locks are re-entrant.
///
/// Clones are the same owner. A lock that is acquired without an owner is not re-entrant: a second
/// `lock()` waits for the first guard, even on the same task. Re-entry sends no request to the
/// store, does not shorten the lease, and returns the same fencing token. Permits of a
/// [`Semaphore`](crate::Semaphore) are not re-entrant: each acquisition takes further units. Each
/// registry tracks re-entry separately. An owner has no meaning in another process.
///
/// # Examples
/// ```
/// # use registry_core::{LockOptions, Owner, Registry};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let registry = Registry::in_memory()?;
/// let lock = registry.obtain("orders/42");
/// let owner = Owner::new();
/// let options = LockOptions::new().owner(&owner);
/// let outer = lock.lock_with(options.clone()).await?;
/// let inner = lock.lock_with(options).await?;
/// assert_eq!(inner.fencing_token(), outer.fencing_token());
/// inner.unlock().await?;
/// outer.unlock().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(u64);

impl Owner {
    /// Creates an owner that differs from all others.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "a default would differ each time")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs `work` under the owner of the surrounding scope, or under a new owner if there is none.
    ///
    /// All locks that `work` acquires without an explicit owner belong to this owner, at any call
    /// depth. Tasks that `work` spawns do not inherit the owner.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`.
    pub async fn scope<F: Future>(work: F) -> F::Output {
        match Self::current() {
            Some(_) => work.await,
            None => Self::new().within(work).await,
        }
    }

    /// Runs `work` under this owner. See [`Owner::scope`].
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`.
    pub async fn within<F: Future>(&self, work: F) -> F::Output {
        CURRENT.scope(self.clone(), work).await
    }

    /// Returns the owner of the surrounding scope, if there is one.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Clone::clone).ok()
    }
}

tokio::task_local! {
    static CURRENT: Owner;
}
