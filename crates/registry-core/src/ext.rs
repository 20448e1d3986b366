//! Convenience methods for every [`LockRegistry`]: semaphores, locks of several keys, jobs,
//! elections, and work that runs while a lock is held.

use std::future::Future;

use crate::election::Election;
use crate::error::LockError;
use crate::guard::LockGuard;
use crate::multi::MultiLock;
use crate::once::Job;
use crate::options::LockOptions;
use crate::registry::LockRegistry;
use crate::semaphore::Semaphore;

/// Convenience methods for [`LockRegistry`]. Implemented for every registry.
pub trait LockRegistryExt: LockRegistry {
    /// Returns the semaphore of `key` with this number of units. No I/O.
    #[must_use]
    fn semaphore(&self, key: &str, units: u32) -> Semaphore {
        Semaphore::new(self.obtain(key), units)
    }

    /// Returns one lock of all `keys`, which are acquired together. No I/O.
    #[must_use]
    fn obtain_all<K: AsRef<str>>(&self, keys: impl IntoIterator<Item = K>) -> MultiLock {
        MultiLock::new(keys.into_iter().map(|key| self.obtain(key.as_ref())).collect())
    }

    /// Returns the job of this name, which runs once per tick of a schedule across all processes.
    /// No I/O. The name is the key of its lock and of its value block.
    fn once(&self, job: &str) -> Job {
        Job::new(self.obtain(job))
    }

    /// Returns a candidate for the role of this name. Across all processes, at most one candidate
    /// leads at a time. No I/O. The name is the key of the role's lock and of its value block.
    #[must_use]
    fn election(&self, role: &str) -> Election {
        Election::new(self.obtain(role), self.obtain(&format!("{role}/candidates")))
    }

    /// Acquires the lock of `key`, runs `work`, and releases the lock.
    ///
    /// `work` receives the guard, for its fencing token. If the lock is lost, `work` is dropped at
    /// its current `.await`.
    ///
    /// # Errors
    /// Those of [`DistributedLock::lock`](crate::DistributedLock::lock), and [`LockError::Lost`] if
    /// the lock was lost before `work` completed. If the release fails, [`Executed`] contains both
    /// the error and the output of `work`.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work` and releases the lock in the background.
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistryExt, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let done = registry.execute_locked("orders/42", async |guard| guard.fencing_token()).await?;
    /// println!("the work ran under token {}", done.output);
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

    /// As [`execute_locked`](Self::execute_locked), but acquires the lock with `options`. Returns
    /// `Ok(None)` if the lock was held until the end of [`LockOptions::wait`]. Without this option,
    /// the call waits without a time limit.
    ///
    /// A wait of zero does not ensure that only one of several processes runs a job. A short job
    /// may have released its key before the next process makes its attempt. To prevent this, keep
    /// the key locked with [`LockOptions::min_hold`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::lock_with`](crate::DistributedLock::lock_with), except
    /// [`LockError::WaitElapsed`]. [`LockError::Lost`] and a failed release as in
    /// [`execute_locked`](Self::execute_locked).
    ///
    /// # Cancel safety
    /// As [`execute_locked`](Self::execute_locked).
    fn execute_locked_with<T, W>(
        &self,
        key: &str,
        options: LockOptions,
        work: W,
    ) -> impl Future<Output = Result<Option<Executed<T>>, LockError>>
    where
        W: AsyncFnOnce(&LockGuard) -> T,
    {
        let lock = self.obtain(key);
        async move {
            match lock.lock_with(options).await {
                Ok(guard) => execute(guard, work).await.map(Some),
                Err(LockError::WaitElapsed { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        }
    }
}

impl<R: LockRegistry + ?Sized> LockRegistryExt for R {}

/// The outcome of [`LockRegistryExt::execute_locked`] and [`LockRegistryExt::execute_locked_with`].
#[derive(Debug)]
#[must_use = "the release may have failed, which only `unlocked` reports"]
#[non_exhaustive]
pub struct Executed<T> {
    /// The output of the work.
    pub output: T,
    /// The result of the release. [`LockError::Lost`] means that the lock may have been lost before
    /// the work ended.
    pub unlocked: Result<(), LockError>,
}

async fn execute<T, W>(guard: LockGuard, work: W) -> Result<Executed<T>, LockError>
where
    W: AsyncFnOnce(&LockGuard) -> T,
{
    let output = guard.protect(work(&guard)).await?;
    Ok(Executed { output, unlocked: guard.unlock().await })
}
