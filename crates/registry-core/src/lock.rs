//! The handle that users keep: one key of one registry, to be locked as often as they like.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::acquire;
use crate::backend::Holder;
use crate::error::LockError;
use crate::guard::LockGuard;
use crate::key::InvalidKey;
use crate::options::LockOptions;
use crate::slot::Slot;

/// A lock: a key in a registry. Cheap to clone; all handles of a key in a registry are the same lock.
///
/// Locking waits first for the other callers of this process, in the order of their arrival, and then for other processes.
/// Locks are not re-entrant unless they are taken for an [`Owner`](crate::Owner).
///
/// A `lock()` future that is kept and not polled may keep others waiting for a lease, and half a lease more. Then it gives up its claim
/// and its local turn, and starts over when it is polled again.
#[derive(Clone)]
pub struct DistributedLock(Target);

#[derive(Clone)]
enum Target {
    Slot(Arc<Slot>),
    /// `obtain` cannot fail; locking does.
    Invalid(Arc<str>, InvalidKey),
}

impl DistributedLock {
    pub(crate) fn new(slot: Arc<Slot>) -> Self {
        Self(Target::Slot(slot))
    }

    pub(crate) fn invalid(key: &str, reason: InvalidKey) -> Self {
        Self(Target::Invalid(key.into(), reason))
    }

    /// The key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        match &self.0 {
            Target::Slot(slot) => slot.key().as_str(),
            Target::Invalid(key, _) => key,
        }
    }

    /// Waits until this lock is ours, in this process and in the store.
    ///
    /// # Errors
    /// [`LockError::Backend`] if the store is in trouble: at once if trying again cannot help, otherwise after a lease's
    /// length of trouble in a row. [`LockError::InvalidKey`] before any I/O; [`LockError::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the local queue; a claim already sent is given back in the background.
    ///
    /// # Panics
    /// Polled outside a tokio runtime, or in one without time, it panics where it would have to wait.
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
        // Without a deadline nothing but a guard or an error ends the wait.
        acquire(self.slot()?, &LockOptions::new()).await?.ok_or(LockError::Closed)
    }

    /// Takes this lock if nobody has it. `None` when somebody has.
    ///
    /// The store is always asked, unless another caller of this process has the lock or is after it.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but trouble with the store is told at once, also that of a caller of this process who is after the lock.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<LockGuard>, LockError> {
        self.lock_with(LockOptions::new().wait(Duration::ZERO)).await
    }

    /// Waits for this lock for at most `wait`. `None` when others had it all the time.
    ///
    /// A request that is on its way at the deadline is given the operation time-out to be answered.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but trouble is told at the deadline, and only if the store's last word was not "busy". Who waits in line behind
    /// other callers of this process is told of theirs.
    /// [`LockError::InvalidOption`] for a wait beyond [`LockOptions::WAIT_MAX`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn try_lock_for(&self, wait: Duration) -> Result<Option<LockGuard>, LockError> {
        self.lock_with(LockOptions::new().wait(wait)).await
    }

    /// Takes this lock as `options` say. `None` only if they say for how long to wait, and others had it all the time.
    ///
    /// # Errors
    /// As [`lock`](Self::lock); [`LockError::InvalidOption`] for what the store does not take, before any I/O.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn lock_with(&self, options: LockOptions) -> Result<Option<LockGuard>, LockError> {
        acquire(self.slot()?, &options).await
    }

    /// Tells who holds this lock, since when and until when. `None` when nobody does.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store cannot tell; [`LockError::Backend`]; [`LockError::InvalidKey`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    ///
    /// # Panics
    /// As [`lock`](Self::lock).
    pub async fn holder(&self) -> Result<Option<Holder>, LockError> {
        let slot = self.slot()?;
        let engine = slot.engine();
        engine.require_inspect()?;
        engine.backend.check_key(slot.key())?;
        let (backend, key) = (Arc::clone(&engine.backend), slot.key().clone());
        let asked = Box::pin(async move { backend.inspect(&key).await });
        engine.ask("inspect", slot.key().as_str(), asked).await
    }

    fn slot(&self) -> Result<&Arc<Slot>, LockError> {
        match &self.0 {
            Target::Slot(slot) => Ok(slot),
            Target::Invalid(_, reason) => Err((*reason).into()),
        }
    }
}

impl fmt::Debug for DistributedLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedLock").field("key", &self.key()).finish_non_exhaustive()
    }
}
