//! A blocking API for threads that do not run async code.
//!
//! Calls from inside a runtime return [`LockError::InsideRuntime`] instead of blocking the
//! runtime's tasks. Calls from a thread of `spawn_blocking` return the same error. In such a
//! thread, use `Handle::block_on` with the async registry.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, Runtime};

use crate::backend::Holder;
use crate::capabilities::Capabilities;
use crate::error::{ConfigError, LockError, LostReason};
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::lock::DistributedLock;
use crate::options::LockOptions;
use crate::registry::{CloseReport, Registry};

/// A registry with its own runtime, for threads that do not run async code. Clones are the same
/// registry.
///
/// Dropping the last clone, lock or guard blocks until all releases are complete, but at most for
/// the operation time-out. Inside a runtime, the drop returns at once, and a separate thread waits.
///
/// # Examples
/// ```
/// # use registry_core::Registry;
/// # use registry_core::blocking::BlockingRegistry;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let registry = BlockingRegistry::open(async { Registry::in_memory() })?;
/// let guard = registry.obtain("orders/42").lock()?;
/// guard.unlock()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct BlockingRegistry {
    registry: Registry,
    runtime: Arc<OwnedRuntime>,
}

/// The runtime and its registry. `Drop` shuts the runtime down on a thread that may block.
struct OwnedRuntime {
    runtime: Option<Runtime>,
    registry: Registry,
}

impl OwnedRuntime {
    fn block_on<F: Future>(&self, work: F) -> Result<F::Output, LockError> {
        if Handle::try_current().is_ok() {
            return Err(LockError::InsideRuntime);
        }
        let runtime = self.runtime.as_ref().ok_or(LockError::Closed)?;
        Ok(runtime.block_on(work))
    }
}

/// Shuts the runtime down once the registry's pending releases are complete, or after the operation
/// time-out.
fn shut_down(runtime: Runtime, registry: &Registry) {
    let limit = registry.operation_timeout();
    // `block_on` would panic in a thread-local destructor. It would also have no time limit if a
    // task blocks the runtime's thread.
    let done = Arc::new((Mutex::new(false), Condvar::new()));
    let (done_in_task, registry) = (Arc::clone(&done), registry.clone());
    runtime.spawn(async move {
        registry.idle().await;
        drop(registry);
        *done_in_task.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        done_in_task.1.notify_all();
    });
    let is_done = done.0.lock().unwrap_or_else(PoisonError::into_inner);
    drop(done.1.wait_timeout_while(is_done, limit, |is_done| !*is_done));
    runtime.shutdown_background();
}

impl Drop for OwnedRuntime {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if Handle::try_current().is_err_and(|error| error.is_missing_context()) {
            shut_down(runtime, &self.registry);
            return;
        }
        // This thread runs async tasks or is ending, so it must not block. A new thread may block.
        let registry = self.registry.clone();
        let runtime = Arc::new(Mutex::new(Some(runtime)));
        let take = |runtime: &Mutex<Option<Runtime>>| {
            runtime.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        let runtime_in_thread = Arc::clone(&runtime);
        let spawned = thread::Builder::new().name("lock-registry-end".into()).spawn(move || {
            if let Some(runtime) = take(&runtime_in_thread) {
                shut_down(runtime, &registry);
            }
        });
        if spawned.is_err()
            && let Some(runtime) = take(&runtime)
        {
            runtime.shutdown_background();
        }
    }
}

impl BlockingRegistry {
    /// Starts a runtime with one thread and opens the registry in it.
    ///
    /// # Errors
    /// The errors of `open`. [`ConfigError::Invalid`] if the runtime cannot be started, or if the
    /// calling thread is inside a runtime.
    pub fn open<F>(open: F) -> Result<Self, ConfigError>
    where
        F: Future<Output = Result<Registry, ConfigError>>,
    {
        if Handle::try_current().is_ok() {
            return Err(ConfigError::Invalid(LockError::InsideRuntime.to_string()));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("lock-registry")
            .enable_all()
            .build()
            .map_err(|error| ConfigError::Invalid(format!("cannot start a runtime: {error}")))?;
        let registry = runtime.block_on(open)?;
        let runtime = Arc::new(OwnedRuntime { runtime: Some(runtime), registry: registry.clone() });
        Ok(Self { registry, runtime })
    }

    /// Returns the lock of `key`. See [`Registry::obtain`].
    #[must_use]
    pub fn obtain(&self, key: &str) -> BlockingLock {
        BlockingLock { lock: self.registry.obtain(key), runtime: Arc::clone(&self.runtime) }
    }

    /// Returns the functions and promises of the store.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.registry.capabilities()
    }

    /// Returns the underlying async registry.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Closes the registry and releases its locks. See [`Registry::close`].
    ///
    /// # Errors
    /// [`LockError::InsideRuntime`].
    pub fn close(&self, limit: Duration) -> Result<CloseReport, LockError> {
        self.runtime.block_on(self.registry.close(limit))
    }
}

impl fmt::Debug for BlockingRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockingRegistry").field(&self.registry).finish()
    }
}

/// A lock for threads that do not run async code. See [`DistributedLock`].
#[derive(Clone)]
pub struct BlockingLock {
    lock: DistributedLock,
    runtime: Arc<OwnedRuntime>,
}

impl BlockingLock {
    /// Returns the key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        self.lock.key()
    }

    /// Acquires this lock, blocking without a time limit. See [`DistributedLock::lock`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::lock`], and [`LockError::InsideRuntime`].
    pub fn lock(&self) -> Result<BlockingGuard, LockError> {
        self.lock_with(LockOptions::new())
    }

    /// Acquires this lock if it is free. See [`DistributedLock::try_lock`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_lock`], and [`LockError::InsideRuntime`].
    pub fn try_lock(&self) -> Result<Option<BlockingGuard>, LockError> {
        self.try_lock_with(LockOptions::new())
    }

    /// Acquires this lock, blocking at most `wait`. See [`DistributedLock::try_lock_for`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_lock_for`], and [`LockError::InsideRuntime`].
    pub fn try_lock_for(&self, wait: Duration) -> Result<Option<BlockingGuard>, LockError> {
        self.try_lock_with(LockOptions::new().wait(wait))
    }

    /// Acquires this lock with `options`. See [`DistributedLock::lock_with`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::lock_with`], and [`LockError::InsideRuntime`].
    pub fn lock_with(&self, options: LockOptions) -> Result<BlockingGuard, LockError> {
        let guard = self.runtime.block_on(self.lock.lock_with(options))??;
        Ok(BlockingGuard { guard, runtime: Arc::clone(&self.runtime) })
    }

    /// Acquires this lock with `options`. See [`DistributedLock::try_lock_with`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_lock_with`], and [`LockError::InsideRuntime`].
    pub fn try_lock_with(&self, options: LockOptions) -> Result<Option<BlockingGuard>, LockError> {
        let guard = self.runtime.block_on(self.lock.try_lock_with(options))??;
        Ok(guard.map(|guard| BlockingGuard { guard, runtime: Arc::clone(&self.runtime) }))
    }

    /// Returns the holders of this lock. See [`DistributedLock::holders`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::holders`], and [`LockError::InsideRuntime`].
    pub fn holders(&self) -> Result<Vec<Holder>, LockError> {
        self.runtime.block_on(self.lock.holders())?
    }
}

impl fmt::Debug for BlockingLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockingLock").field(&self.lock).finish()
    }
}

/// A held lock, for threads that do not run async code. See [`LockGuard`].
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct BlockingGuard {
    // This field precedes `runtime`, so that the guard is dropped while its background releaser
    // still runs.
    guard: LockGuard,
    runtime: Arc<OwnedRuntime>,
}

impl BlockingGuard {
    /// Returns the key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        self.guard.key()
    }

    /// Returns the fencing token of this grant. See [`LockGuard::fencing_token`].
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.guard.fencing_token()
    }

    /// Returns the instant until which the lock is certainly held. See [`LockGuard::valid_until`].
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        self.guard.valid_until()
    }

    /// Returns whether the lock is certainly held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// Blocks until the lock is lost, but at most for `limit`. Returns the reason, or `None` after
    /// `limit`.
    ///
    /// # Errors
    /// [`LockError::InsideRuntime`].
    pub fn lost_within(&self, limit: Duration) -> Result<Option<LostReason>, LockError> {
        self.runtime.block_on(async { tokio::time::timeout(limit, self.guard.lost()).await.ok() })
    }

    /// Extends the lease to at least `lease` from now. See [`LockGuard::extend`].
    ///
    /// # Errors
    /// Those of [`LockGuard::extend`], and [`LockError::InsideRuntime`].
    pub fn extend(&self, lease: Duration) -> Result<(), LockError> {
        self.runtime.block_on(self.guard.extend(lease))?
    }

    /// Releases the lock and waits for the store. See [`LockGuard::unlock`].
    ///
    /// # Errors
    /// Those of [`LockGuard::unlock`], and [`LockError::InsideRuntime`]. In the latter case, the
    /// lock is released in the background.
    pub fn unlock(self) -> Result<(), LockError> {
        let Self { guard, runtime } = self;
        runtime.block_on(guard.unlock())?
    }

    /// Returns the underlying async guard.
    pub fn guard(&self) -> &LockGuard {
        &self.guard
    }
}

impl fmt::Debug for BlockingGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockingGuard").field(&self.guard).finish()
    }
}
