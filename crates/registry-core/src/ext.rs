//! Convenience over [`LockRegistry`]: run something while a lock is held.

use std::future::Future;
use std::time::Duration;

use crate::error::LockError;
use crate::guard::LockGuard;
use crate::options::LockOptions;
use crate::registry::LockRegistry;

/// What every [`LockRegistry`] can do on top of obtaining locks. Implemented for all of them.
pub trait LockRegistryExt: LockRegistry {
    /// Waits for the lock of `key`, runs `work` under it and lets go.
    ///
    /// `work` gets the guard, for its fencing token. If the lock is lost, `work` is dropped at its current `.await`.
    ///
    /// # Errors
    /// Those of [`DistributedLock::lock`](crate::DistributedLock::lock), and [`LockError::Lost`] if the lock was lost before `work` was
    /// done. A failure to let go afterwards does not hide what `work` returned: both are in [`Executed`].
    ///
    /// # Cancel safety
    /// Dropping the future drops `work` and lets go in the background.
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistryExt, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let done = registry.execute_locked("orders/42", async |guard| guard.fencing_token()).await?;
    /// assert!(done.output.is_some());
    /// done.unlocked?;
    /// # Ok(()) }
    /// ```
    fn execute_locked<T, W>(
        &self,
        key: &str,
        work: W,
    ) -> impl Future<Output = Result<Executed<T>, LockError>>
    where
        W: AsyncFnOnce(&LockGuard) -> T,
    {
        let lock = self.obtain(key);
        async move { execute(lock.lock().await?, work).await }
    }

    /// As [`execute_locked`](Self::execute_locked), but gives up after `wait`: `None` if another holder had the lock until then.
    ///
    /// A `wait` of zero does not make a job run once that several processes start: a short job is done, and its key free, before the
    /// next process asks. [`LockOptions::min_hold`] keeps the key taken.
    ///
    /// # Errors
    /// As [`execute_locked`](Self::execute_locked).
    ///
    /// # Cancel safety
    /// As [`execute_locked`](Self::execute_locked).
    fn execute_locked_for<T, W>(
        &self,
        key: &str,
        wait: Duration,
        work: W,
    ) -> impl Future<Output = Result<Option<Executed<T>>, LockError>>
    where
        W: AsyncFnOnce(&LockGuard) -> T,
    {
        let lock = self.obtain(key);
        async move {
            match lock.lock_with(LockOptions::new().wait(wait)).await? {
                Some(guard) => execute(guard, work).await.map(Some),
                None => Ok(None),
            }
        }
    }
}

impl<R: LockRegistry + ?Sized> LockRegistryExt for R {}

/// What [`LockRegistryExt::execute_locked`] did.
#[derive(Debug)]
#[non_exhaustive]
pub struct Executed<T> {
    /// What the work returned.
    pub output: T,
    /// Whether the lock was let go properly. [`LockError::Lost`] means that the end of the work may not have been protected.
    pub unlocked: Result<(), LockError>,
}

async fn execute<T, W>(guard: LockGuard, work: W) -> Result<Executed<T>, LockError>
where
    W: AsyncFnOnce(&LockGuard) -> T,
{
    let output = guard.protect(work(&guard)).await?;
    Ok(Executed { output, unlocked: guard.unlock().await })
}
