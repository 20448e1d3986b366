//! A semaphore: permits of one key, each with its own lease.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::backend::Holder;
use crate::error::LockError;
use crate::guard::LockGuard;
use crate::lock::DistributedLock;
use crate::mode::ClaimMode;
use crate::options::LockOptions;

/// A semaphore: a key with a number of units. Each permit takes some of them.
///
/// Each guard is one permit with its own lease, token and loss notification. The units of a process
/// that crashed become free when its leases end. Cloning is cheap.
///
/// All semaphores of a key must state the same number of units. While permits that state another
/// number are held, an acquisition returns [`LockError::UnitsMismatch`].
#[derive(Clone)]
pub struct Semaphore {
    lock: DistributedLock,
    units: Arc<AtomicU32>,
}

impl Semaphore {
    pub(crate) fn new(lock: DistributedLock, units: u32) -> Self {
        Self { lock, units: Arc::new(units.into()) }
    }

    /// Returns the key of the semaphore.
    #[must_use]
    pub fn key(&self) -> &str {
        self.lock.key()
    }

    /// Returns the number of units of the semaphore.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.units.load(Ordering::Acquire)
    }

    /// Takes one unit, waiting without a time limit.
    ///
    /// # Errors
    /// As [`DistributedLock::lock`]. [`LockError::UnitsMismatch`] if the held permits state another
    /// number of units. [`LockError::Unsupported`], before any I/O, if the store does not support
    /// permits.
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistryExt, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let uploads = registry.semaphore("uploads", 3);
    /// let permit = uploads.acquire().await?;
    /// assert!(uploads.try_acquire_many(3).await?.is_none());
    /// permit.unlock().await?;
    /// # Ok(()) }
    /// ```
    pub async fn acquire(&self) -> Result<LockGuard, LockError> {
        self.acquire_many(1).await
    }

    /// Takes `take` units together, waiting without a time limit.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire). [`LockError::InvalidOption`] if `take` is zero or larger than
    /// [`units`](Self::units), before any I/O.
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn acquire_many(&self, take: u32) -> Result<LockGuard, LockError> {
        self.acquire_with(take, LockOptions::new()).await
    }

    /// Takes `take` units with `options`. Without [`LockOptions::wait`], waits without a time
    /// limit.
    ///
    /// # Errors
    /// As [`acquire_many`](Self::acquire_many) and [`DistributedLock::lock_with`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn acquire_with(
        &self,
        take: u32,
        options: LockOptions,
    ) -> Result<LockGuard, LockError> {
        self.lock.acquire_in(|| self.mode(take), &options).await
    }

    /// Takes one unit if one is free and no earlier claim waits in the store. Returns `Ok(None)`
    /// otherwise.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire) and [`DistributedLock::try_lock`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn try_acquire(&self) -> Result<Option<LockGuard>, LockError> {
        self.try_acquire_many(1).await
    }

    /// Takes `take` units together if they are free and no earlier claim waits in the store.
    /// Returns `Ok(None)` otherwise.
    ///
    /// # Errors
    /// As [`acquire_many`](Self::acquire_many) and [`DistributedLock::try_lock`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn try_acquire_many(&self, take: u32) -> Result<Option<LockGuard>, LockError> {
        self.try_acquire_with(take, LockOptions::new()).await
    }

    /// Takes one unit, waiting at most `wait`. Returns `Ok(None)` if it could not take one before
    /// the deadline.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire) and [`DistributedLock::try_lock_for`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn try_acquire_for(&self, wait: Duration) -> Result<Option<LockGuard>, LockError> {
        self.try_acquire_with(1, LockOptions::new().wait(wait)).await
    }

    /// Takes `take` units with `options`. Without [`LockOptions::wait`], tries once. Returns
    /// `Ok(None)` if it could not take the units before the deadline.
    ///
    /// # Errors
    /// As [`acquire_many`](Self::acquire_many) and [`DistributedLock::try_lock_with`].
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`].
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn try_acquire_with(
        &self,
        take: u32,
        options: LockOptions,
    ) -> Result<Option<LockGuard>, LockError> {
        self.lock.try_acquire_in(|| self.mode(take), options).await
    }

    /// Changes the number of units of this semaphore and its clones. First acquires the exclusive
    /// lock of the key, so it waits until no permit is held.
    ///
    /// Other processes must change their number too: while permits with one number are held, an
    /// acquisition with another number fails.
    ///
    /// # Errors
    /// As [`DistributedLock::lock`] and [`LockGuard::unlock`]. [`LockError::InvalidOption`] for
    /// zero units. The number is changed even if the unlock fails.
    ///
    /// # Cancel safety
    /// If the future is dropped, the number may or may not be changed.
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn resize(&self, units: u32) -> Result<(), LockError> {
        crate::options::validate_units(ClaimMode::Permits { take: 1, of: units })?;
        let guard = self.lock.lock().await?;
        self.units.store(units, Ordering::Release);
        guard.unlock().await
    }

    /// Returns the holders of permits, with the units that each has taken.
    ///
    /// # Errors
    /// As [`DistributedLock::holders`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn holders(&self) -> Result<Vec<Holder>, LockError> {
        self.lock.holders().await
    }

    fn mode(&self, take: u32) -> ClaimMode {
        ClaimMode::Permits { take, of: self.units() }
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore")
            .field("key", &self.key())
            .field("units", &self.units())
            .finish_non_exhaustive()
    }
}
