//! The public handle of one lock: a key of one registry.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::acquire;
use crate::backend::Holder;
use crate::error::LockError;
use crate::guard::LockGuard;
use crate::key::InvalidKey;
use crate::local_lock::LocalLock;
use crate::options::LockOptions;

/// A lock: one key of a registry.
///
/// Cloning is cheap. All handles of a key in one registry are the same lock.
///
/// An acquisition first waits for the other callers of this process, in the order of their arrival,
/// and then for other processes. A lock is not re-entrant unless it is acquired for an
/// [`Owner`](crate::Owner).
///
/// If a `lock()` future is kept but not polled, it can block other callers for up to one and a half
/// leases. Then the registry releases the future's claim and local permit, and the future starts
/// over at its next poll.
#[derive(Clone)]
pub struct DistributedLock(LockTarget);

#[derive(Clone)]
enum LockTarget {
    LocalLock(Arc<LocalLock>),
    /// The key is invalid. `obtain` cannot fail, so each operation on the lock returns the error.
    Invalid(Arc<str>, InvalidKey),
}

impl DistributedLock {
    pub(crate) fn new(local_lock: Arc<LocalLock>) -> Self {
        Self(LockTarget::LocalLock(local_lock))
    }

    pub(crate) fn invalid(key: &str, reason: InvalidKey) -> Self {
        Self(LockTarget::Invalid(key.into(), reason))
    }

    /// Returns the key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        match &self.0 {
            LockTarget::LocalLock(local_lock) => local_lock.key().as_str(),
            LockTarget::Invalid(key, _) => key,
        }
    }

    /// Acquires this lock, waiting without a time limit.
    ///
    /// # Errors
    /// [`LockError::Backend`] for a store error: at once if a retry cannot help, otherwise when all
    /// attempts have failed for the length of a lease. [`LockError::InvalidKey`] before any I/O.
    /// [`LockError::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the local queue. A claim that was already sent is
    /// released in the background.
    ///
    /// # Panics
    /// Outside a tokio runtime, or in one without time, it panics when it has to wait.
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistry, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let guard = registry.obtain("orders/42").lock().await?;
    /// // … work, giving guard.fencing_token() along with each write …
    /// guard.unlock().await?;
    /// # Ok(()) }
    /// ```
    pub async fn lock(&self) -> Result<LockGuard, LockError> {
        self.lock_with(LockOptions::new()).await
    }

    /// Acquires this lock if it is free. Returns `Ok(None)` if it is held.
    ///
    /// Sends a request to the store, unless another caller of this process holds the lock or is
    /// acquiring it.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but a store error is returned at once. If another caller of this
    /// process is acquiring the lock and its last request failed, this call returns that error.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<LockGuard>, LockError> {
        self.try_lock_with(LockOptions::new()).await
    }

    /// Acquires this lock, waiting at most `wait`. Returns `Ok(None)` if the lock was held until
    /// the deadline.
    ///
    /// If a request is in flight at the deadline, this also waits for its response, at most for the
    /// operation time-out.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but a store error that a retry may resolve is retried until the
    /// deadline. It is then returned, unless the last response was "busy". A caller queued behind
    /// another local caller returns that caller's store error.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_lock_for(&self, wait: Duration) -> Result<Option<LockGuard>, LockError> {
        self.try_lock_with(LockOptions::new().wait(wait)).await
    }

    /// Acquires this lock with `options`. Without [`LockOptions::wait`], it waits without a time
    /// limit.
    ///
    /// # Errors
    /// As [`lock`](Self::lock). [`LockError::WaitElapsed`] if the lock was held until the end of
    /// the wait. [`LockError::InvalidOption`] for a value that the store does not accept, before
    /// any I/O.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn lock_with(&self, options: LockOptions) -> Result<LockGuard, LockError> {
        match (acquire(self.local_lock()?, &options).await?, options.wait) {
            (Some(guard), _) => Ok(guard),
            (None, Some(wait)) => Err(LockError::WaitElapsed { key: self.key().into(), wait }),
            // Without a deadline, the wait ends only with a guard or an error.
            (None, None) => Err(LockError::Closed),
        }
    }

    /// Acquires this lock with `options`. Returns `Ok(None)` if the lock was held until the end of
    /// their [`wait`](LockOptions::wait). Without a wait, it tries once, as
    /// [`try_lock`](Self::try_lock).
    ///
    /// # Errors
    /// As [`try_lock`](Self::try_lock) without a wait, and as
    /// [`try_lock_for`](Self::try_lock_for) with one. [`LockError::InvalidOption`] for a value that
    /// the store does not accept, before any I/O.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_lock_with(
        &self,
        mut options: LockOptions,
    ) -> Result<Option<LockGuard>, LockError> {
        options.wait.get_or_insert(Duration::ZERO);
        acquire(self.local_lock()?, &options).await
    }

    /// Returns the holders of this lock, with the times of their grants. Empty if the lock is free;
    /// an exclusive lock has at most one holder.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store cannot report holders; [`LockError::Backend`];
    /// [`LockError::InvalidKey`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn holders(&self) -> Result<Vec<Holder>, LockError> {
        let local_lock = self.local_lock()?;
        let engine = local_lock.engine();
        engine.require_inspect()?;
        engine.backend.check_key(local_lock.key())?;
        let (backend, key) = (Arc::clone(&engine.backend), local_lock.key().clone());
        let inspected = Box::pin(async move {
            match backend.admin() {
                Some(admin) => admin.inspect(&key).await,
                None => Ok(None),
            }
        });
        let holder = engine.query("inspect", local_lock.key().as_str(), inspected).await?;
        Ok(holder.into_iter().collect())
    }

    fn local_lock(&self) -> Result<&Arc<LocalLock>, LockError> {
        match &self.0 {
            LockTarget::LocalLock(local_lock) => Ok(local_lock),
            LockTarget::Invalid(_, reason) => Err((*reason).into()),
        }
    }
}

impl fmt::Debug for DistributedLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedLock").field("key", &self.key()).finish_non_exhaustive()
    }
}
