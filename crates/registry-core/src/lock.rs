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
use crate::mode::ClaimMode;
use crate::options::LockOptions;
use crate::waiting_list::WaitingClaim;

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
    /// attempts have failed for the length of a lease. [`LockError::HeldByOwner`] if the
    /// [owner](crate::Owner) of the caller holds the lock, or acquires it during the wait, in a
    /// mode that excludes this one. [`LockError::InvalidKey`] before any I/O.
    /// [`LockError::Closed`] if the registry is closed.
    ///
    /// # Cancel safety
    /// Dropping the future removes the caller from the local queue. A claim that was already sent
    /// is released in the background.
    ///
    /// # Panics
    /// Outside a tokio runtime with time enabled, the future panics when it has to wait.
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistry, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let guard = registry.obtain("orders/42").lock().await?;
    /// // … work, and send guard.fencing_token() with each write …
    /// guard.unlock().await?;
    /// # Ok(()) }
    /// ```
    pub async fn lock(&self) -> Result<LockGuard, LockError> {
        self.acquire_in(|| ClaimMode::Exclusive, &LockOptions::new()).await
    }

    /// Acquires this lock if it is free. Returns `Ok(None)` if it is held.
    ///
    /// Sends a request to the store, unless a caller of this process has acquired the exclusive
    /// lock, or is acquiring or releasing it.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but a store error is returned at once. If another caller of this
    /// process is acquiring or releasing the lock and its last request failed, this call returns
    /// that error.
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

    /// Acquires this lock with `options`. Without [`LockOptions::wait`], the call waits without a
    /// time limit.
    ///
    /// # Errors
    /// Without a wait, as [`lock`](Self::lock). With a wait, as
    /// [`try_lock_for`](Self::try_lock_for), and [`LockError::WaitElapsed`] if the lock was held
    /// until the end of the wait. [`LockError::InvalidOption`] for a value that the store does not
    /// accept, before any I/O.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn lock_with(&self, options: LockOptions) -> Result<LockGuard, LockError> {
        self.acquire_in(|| ClaimMode::Exclusive, &options).await
    }

    /// Acquires this lock with `options`. Returns `Ok(None)` if the lock was held until the end of
    /// their [`wait`](LockOptions::wait). Without a wait, the call tries once, as
    /// [`try_lock`](Self::try_lock).
    ///
    /// # Errors
    /// Without a wait, as [`try_lock`](Self::try_lock). With a wait, as
    /// [`try_lock_for`](Self::try_lock_for). [`LockError::InvalidOption`] for a value that the
    /// store does not accept, before any I/O.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_lock_with(
        &self,
        options: LockOptions,
    ) -> Result<Option<LockGuard>, LockError> {
        self.try_acquire(ClaimMode::Exclusive, options).await
    }

    /// Acquires this lock for reading, waiting without a time limit. Other readers and one
    /// [upgradable](Self::upgradable) holder may hold the lock at the same time, but no exclusive
    /// holder.
    ///
    /// A waiting exclusive caller blocks new readers, in other processes too, so that readers
    /// cannot starve it. Readers of one process that use the same options share one grant of the
    /// store, within the limits of a hand-over.
    ///
    /// # Errors
    /// As [`lock`](Self::lock). [`LockError::Unsupported`] if the store has no shared locks, before
    /// any I/O.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistry, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let lock = registry.obtain("prices");
    /// let (first, second) = (lock.read().await?, lock.read().await?);
    /// assert!(lock.try_lock().await?.is_none());
    /// first.unlock().await?;
    /// second.unlock().await?;
    /// # Ok(()) }
    /// ```
    pub async fn read(&self) -> Result<LockGuard, LockError> {
        self.read_with(LockOptions::new()).await
    }

    /// Acquires this lock for reading if no exclusive caller holds it or waits for it. Returns
    /// `Ok(None)` otherwise.
    ///
    /// # Errors
    /// As [`try_lock`](Self::try_lock) and [`read`](Self::read).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_read(&self) -> Result<Option<LockGuard>, LockError> {
        self.try_read_with(LockOptions::new()).await
    }

    /// Acquires this lock for reading, waiting at most `wait`. Returns `Ok(None)` if the lock did
    /// not become free for readers before the deadline.
    ///
    /// # Errors
    /// As [`try_lock_for`](Self::try_lock_for) and [`read`](Self::read).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_read_for(&self, wait: Duration) -> Result<Option<LockGuard>, LockError> {
        self.try_read_with(LockOptions::new().wait(wait)).await
    }

    /// Acquires this lock for reading with `options`. Without [`LockOptions::wait`], the call waits
    /// without a time limit.
    ///
    /// # Errors
    /// As [`lock_with`](Self::lock_with) and [`read`](Self::read).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn read_with(&self, options: LockOptions) -> Result<LockGuard, LockError> {
        self.acquire_in(|| ClaimMode::Shared, &options).await
    }

    /// Acquires this lock for reading with `options`. Without a wait, the call tries once, as
    /// [`try_read`](Self::try_read).
    ///
    /// # Errors
    /// As [`try_lock_with`](Self::try_lock_with) and [`read`](Self::read).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_read_with(
        &self,
        options: LockOptions,
    ) -> Result<Option<LockGuard>, LockError> {
        self.try_acquire(ClaimMode::Shared, options).await
    }

    /// Acquires this lock for reading, so that [`LockGuard::upgrade`] can make it exclusive. Waits
    /// without a time limit. Readers may hold the lock at the same time, but no other upgradable
    /// holder and no exclusive holder.
    ///
    /// If two readers could upgrade, each would wait until the other one releases the lock. Only
    /// one holder is upgradable, so this deadlock cannot happen.
    ///
    /// # Errors
    /// As [`lock`](Self::lock). [`LockError::Unsupported`] if the store has no upgradable locks,
    /// before any I/O.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistry, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let guard = registry.obtain("prices").upgradable().await?;
    /// // … read, and find that a change is necessary …
    /// let guard = guard.upgrade().await?;
    /// // … write …
    /// let guard = guard.downgrade().await?;
    /// // … read on …
    /// guard.unlock().await?;
    /// # Ok(()) }
    /// ```
    pub async fn upgradable(&self) -> Result<LockGuard, LockError> {
        self.upgradable_with(LockOptions::new()).await
    }

    /// Acquires this lock as [upgradable](Self::upgradable) with `options`. Without
    /// [`LockOptions::wait`], the call waits without a time limit.
    ///
    /// # Errors
    /// As [`lock_with`](Self::lock_with) and [`upgradable`](Self::upgradable).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn upgradable_with(&self, options: LockOptions) -> Result<LockGuard, LockError> {
        self.acquire_in(|| ClaimMode::Upgradable, &options).await
    }

    /// Acquires this lock as [upgradable](Self::upgradable) with `options`. Without a wait, the
    /// call tries once. Returns `Ok(None)` if the lock was not free in time.
    ///
    /// # Errors
    /// As [`try_lock_with`](Self::try_lock_with) and [`upgradable`](Self::upgradable).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_upgradable_with(
        &self,
        options: LockOptions,
    ) -> Result<Option<LockGuard>, LockError> {
        self.try_acquire(ClaimMode::Upgradable, options).await
    }

    /// Acquires this lock in `mode`, for callers that choose the mode at run time. Without
    /// [`LockOptions::wait`], the call waits without a time limit.
    ///
    /// A [`Semaphore`](crate::Semaphore) acquires the mode [`ClaimMode::Permits`].
    ///
    /// # Errors
    /// As [`lock_with`](Self::lock_with). [`LockError::Unsupported`] if the store does not have the
    /// mode, before any I/O. [`LockError::UnitsMismatch`] for permits, as
    /// [`Semaphore::acquire`](crate::Semaphore::acquire).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn acquire(
        &self,
        mode: ClaimMode,
        options: LockOptions,
    ) -> Result<LockGuard, LockError> {
        self.acquire_in(|| mode, &options).await
    }

    /// As [`acquire`](Self::acquire), in the mode that `mode` returns, which may change while the
    /// caller waits.
    pub(crate) async fn acquire_in(
        &self,
        mode: impl Fn() -> ClaimMode,
        options: &LockOptions,
    ) -> Result<LockGuard, LockError> {
        match (acquire(self.local_lock()?, mode, options).await?, options.wait) {
            (Some(guard), _) => Ok(guard),
            (None, Some(wait)) => Err(LockError::WaitElapsed { key: self.key().into(), wait }),
            // Without a deadline, the wait ends only with a guard or an error.
            (None, None) => Err(LockError::Closed),
        }
    }

    /// Acquires this lock in `mode`. Without a wait, the call tries once. Returns `Ok(None)` if the
    /// lock was not free in time.
    ///
    /// # Errors
    /// As [`try_lock_with`](Self::try_lock_with) and [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_acquire(
        &self,
        mode: ClaimMode,
        options: LockOptions,
    ) -> Result<Option<LockGuard>, LockError> {
        self.try_acquire_in(|| mode, options).await
    }

    /// As [`try_acquire`](Self::try_acquire), in the mode that `mode` returns, which may change
    /// while the caller waits.
    pub(crate) async fn try_acquire_in(
        &self,
        mode: impl Fn() -> ClaimMode,
        mut options: LockOptions,
    ) -> Result<Option<LockGuard>, LockError> {
        options.wait.get_or_insert(Duration::ZERO);
        acquire(self.local_lock()?, mode, &options).await
    }

    /// Returns the holders of this lock, with modes, labels and times. Empty if the lock is free.
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
        let request = Box::pin(async move {
            match backend.admin() {
                Some(admin) => admin.inspect(&key).await,
                None => Ok(Vec::new()),
            }
        });
        engine.query("inspect", local_lock.key().as_str(), request).await
    }

    /// Returns the claims that wait for this lock, of this and all other clients, the longest wait
    /// first.
    ///
    /// Each registry has at most one waiting claim per key, however many of its callers wait. An
    /// upgrade that waits is an additional claim. In a store without a queue, a claim is listed
    /// once it has waited for about a second, if its registry
    /// [registers](crate::RegistryBuilder::waiters) its waiters.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store cannot list waiters; [`LockError::Backend`];
    /// [`LockError::InvalidKey`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn waiters(&self) -> Result<Vec<WaitingClaim>, LockError> {
        let local_lock = self.local_lock()?;
        let engine = local_lock.engine();
        engine.backend.check_key(local_lock.key())?;
        engine.list_waiters(Some(local_lock.key())).await
    }

    pub(crate) fn local_lock(&self) -> Result<&Arc<LocalLock>, LockError> {
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
