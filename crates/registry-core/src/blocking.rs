//! A blocking API for threads that do not run async code.
//!
//! Blocking calls from inside a runtime return [`LockError::InsideRuntime`] instead of blocking the
//! runtime's tasks. [`BlockingRegistry::open`] returns [`ConfigError::Invalid`] instead. A thread
//! of `spawn_blocking` counts as inside a runtime. In such a thread, use `Handle::block_on` with
//! the async registry.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, Runtime};

use crate::backend::Holder;
use crate::capabilities::Capabilities;
use crate::error::{ConfigError, LockError, LostReason};
use crate::ext::LockRegistryExt as _;
use crate::fencing::FencingToken;
use crate::guard::LockGuard;
use crate::lock::DistributedLock;
use crate::mode::ClaimMode;
use crate::multi::{MultiGuard, MultiLock};
use crate::options::LockOptions;
use crate::registry::{CloseReport, Registry};
use crate::semaphore::Semaphore;

/// A registry with its own runtime, for threads that do not run async code. Clones are the same
/// registry.
///
/// Dropping the last clone, lock, semaphore or guard blocks until all releases are complete, but at
/// most for the operation time-out. Inside a runtime, the drop returns at once, and a separate
/// thread waits.
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
        // Any other error means that this thread is ending. `block_on` would panic then.
        if !Handle::try_current().is_err_and(|error| error.is_missing_context()) {
            return Err(LockError::InsideRuntime);
        }
        let runtime = self.runtime.as_ref().ok_or(LockError::Closed)?;
        Ok(runtime.block_on(work))
    }
}

/// A value of the async API, and the runtime that runs its futures.
#[derive(Clone)]
struct InRuntime<T> {
    // This field precedes `runtime`, so that a guard is dropped while its background releaser still
    // runs.
    value: T,
    runtime: Arc<OwnedRuntime>,
}

impl<T> InRuntime<T> {
    fn block_on<F: Future>(&self, work: F) -> Result<F::Output, LockError> {
        self.runtime.block_on(work)
    }

    /// Blocks until `acquisition` returns a guard.
    fn acquire<G>(
        &self,
        acquisition: impl Future<Output = Result<G, LockError>>,
    ) -> Result<InRuntime<G>, LockError> {
        let value = self.block_on(acquisition)??;
        Ok(InRuntime { value, runtime: Arc::clone(&self.runtime) })
    }

    /// Blocks until `acquisition` returns a guard, or `None`.
    fn try_acquire<G>(
        &self,
        acquisition: impl Future<Output = Result<Option<G>, LockError>>,
    ) -> Result<Option<InRuntime<G>>, LockError> {
        let value = self.block_on(acquisition)??;
        Ok(value.map(|value| InRuntime { value, runtime: Arc::clone(&self.runtime) }))
    }

    /// Blocks until the future that `work` returns for the value is complete.
    fn consume<F: Future>(
        self,
        work: impl FnOnce(T) -> F,
    ) -> Result<InRuntime<F::Output>, LockError> {
        let Self { value, runtime } = self;
        let value = runtime.block_on(work(value))?;
        Ok(InRuntime { value, runtime })
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
    /// The errors of the future `open`. [`ConfigError::Invalid`] if the runtime cannot be started,
    /// or if the calling thread is inside a runtime.
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
            .map_err(|error| {
                ConfigError::Invalid(format!(
                    "cannot start a runtime: {error}; raise the process's limits of threads and open files"
                ))
            })?;
        let registry = match runtime.block_on(open) {
            Ok(registry) => registry,
            Err(error) => {
                // A name lookup may still run. The drop of the runtime would wait for it.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let runtime = Arc::new(OwnedRuntime { runtime: Some(runtime), registry: registry.clone() });
        Ok(Self { registry, runtime })
    }

    /// Returns the lock of `key`. See [`Registry::obtain`].
    #[must_use]
    pub fn obtain(&self, key: &str) -> BlockingLock {
        BlockingLock(self.in_runtime(self.registry.obtain(key)))
    }

    /// Returns the semaphore of `key` with this number of units. See
    /// [`LockRegistryExt::semaphore`](crate::LockRegistryExt::semaphore).
    #[must_use]
    pub fn semaphore(&self, key: &str, units: u32) -> BlockingSemaphore {
        BlockingSemaphore(self.in_runtime(self.registry.semaphore(key, units)))
    }

    /// Returns one lock of all `keys`. See
    /// [`LockRegistryExt::obtain_all`](crate::LockRegistryExt::obtain_all).
    #[must_use]
    pub fn obtain_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> BlockingMultiLock {
        BlockingMultiLock(self.in_runtime(self.registry.obtain_all(keys)))
    }

    fn in_runtime<T>(&self, value: T) -> InRuntime<T> {
        InRuntime { value, runtime: Arc::clone(&self.runtime) }
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

/// Formats a type of this module as the value of the async API that it contains.
macro_rules! debug_as_value {
    ($($name:ident),*) => {
        $(impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.0.value).finish()
            }
        })*
    };
}

debug_as_value!(
    BlockingLock,
    BlockingSemaphore,
    BlockingMultiLock,
    BlockingGuard,
    BlockingMultiGuard
);

impl fmt::Debug for BlockingRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockingRegistry").field(&self.registry).finish()
    }
}

/// A lock for threads that do not run async code. See [`DistributedLock`].
#[derive(Clone)]
pub struct BlockingLock(InRuntime<DistributedLock>);

impl BlockingLock {
    /// Returns the key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        self.0.value.key()
    }

    /// Acquires this lock, blocking without a time limit. See [`DistributedLock::lock`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::lock`], and [`LockError::InsideRuntime`].
    pub fn lock(&self) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.lock()).map(BlockingGuard)
    }

    /// Acquires this lock if it is free. See [`DistributedLock::try_lock`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_lock`], and [`LockError::InsideRuntime`].
    pub fn try_lock(&self) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_lock())?.map(BlockingGuard))
    }

    /// Acquires this lock, blocking at most `wait`. See [`DistributedLock::try_lock_for`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_lock_for`], and [`LockError::InsideRuntime`].
    pub fn try_lock_for(&self, wait: Duration) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_lock_for(wait))?.map(BlockingGuard))
    }

    /// Acquires this lock with `options`. See [`DistributedLock::lock_with`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::lock_with`], and [`LockError::InsideRuntime`].
    pub fn lock_with(&self, options: LockOptions) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.lock_with(options)).map(BlockingGuard)
    }

    /// Acquires this lock with `options`. See [`DistributedLock::try_lock_with`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_lock_with`], and [`LockError::InsideRuntime`].
    pub fn try_lock_with(&self, options: LockOptions) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_lock_with(options))?.map(BlockingGuard))
    }

    /// Acquires this lock for reading, blocking without a time limit. See
    /// [`DistributedLock::read`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::read`], and [`LockError::InsideRuntime`].
    pub fn read(&self) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.read()).map(BlockingGuard)
    }

    /// Acquires this lock for reading if it is free for readers. See [`DistributedLock::try_read`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_read`], and [`LockError::InsideRuntime`].
    pub fn try_read(&self) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_read())?.map(BlockingGuard))
    }

    /// Acquires this lock for reading, blocking at most `wait`. See
    /// [`DistributedLock::try_read_for`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_read_for`], and [`LockError::InsideRuntime`].
    pub fn try_read_for(&self, wait: Duration) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_read_for(wait))?.map(BlockingGuard))
    }

    /// Acquires this lock for reading with `options`. See [`DistributedLock::read_with`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::read_with`], and [`LockError::InsideRuntime`].
    pub fn read_with(&self, options: LockOptions) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.read_with(options)).map(BlockingGuard)
    }

    /// Acquires this lock for reading with `options`. See [`DistributedLock::try_read_with`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_read_with`], and [`LockError::InsideRuntime`].
    pub fn try_read_with(&self, options: LockOptions) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_read_with(options))?.map(BlockingGuard))
    }

    /// Acquires this lock as upgradable, blocking without a time limit. See
    /// [`DistributedLock::upgradable`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::upgradable`], and [`LockError::InsideRuntime`].
    pub fn upgradable(&self) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.upgradable()).map(BlockingGuard)
    }

    /// Acquires this lock as upgradable with `options`. See [`DistributedLock::upgradable_with`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::upgradable_with`], and [`LockError::InsideRuntime`].
    pub fn upgradable_with(&self, options: LockOptions) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.upgradable_with(options)).map(BlockingGuard)
    }

    /// Acquires this lock as upgradable with `options`. See
    /// [`DistributedLock::try_upgradable_with`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_upgradable_with`], and [`LockError::InsideRuntime`].
    pub fn try_upgradable_with(
        &self,
        options: LockOptions,
    ) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_upgradable_with(options))?.map(BlockingGuard))
    }

    /// Acquires this lock in `mode`. See [`DistributedLock::acquire`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::acquire`], and [`LockError::InsideRuntime`].
    pub fn acquire(
        &self,
        mode: ClaimMode,
        options: LockOptions,
    ) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.acquire(mode, options)).map(BlockingGuard)
    }

    /// Acquires this lock in `mode`. See [`DistributedLock::try_acquire`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::try_acquire`], and [`LockError::InsideRuntime`].
    pub fn try_acquire(
        &self,
        mode: ClaimMode,
        options: LockOptions,
    ) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_acquire(mode, options))?.map(BlockingGuard))
    }

    /// Returns the holders of this lock. See [`DistributedLock::holders`].
    ///
    /// # Errors
    /// Those of [`DistributedLock::holders`], and [`LockError::InsideRuntime`].
    pub fn holders(&self) -> Result<Vec<Holder>, LockError> {
        self.0.block_on(self.0.value.holders())?
    }
}

/// A semaphore for threads that do not run async code. See [`Semaphore`].
#[derive(Clone)]
pub struct BlockingSemaphore(InRuntime<Semaphore>);

impl BlockingSemaphore {
    /// Returns the key of the semaphore.
    #[must_use]
    pub fn key(&self) -> &str {
        self.0.value.key()
    }

    /// Returns the units of the semaphore.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.0.value.units()
    }

    /// Takes one unit, blocking without a time limit. See [`Semaphore::acquire`].
    ///
    /// # Errors
    /// Those of [`Semaphore::acquire`], and [`LockError::InsideRuntime`].
    pub fn acquire(&self) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.acquire()).map(BlockingGuard)
    }

    /// Takes `take` units together, blocking without a time limit. See [`Semaphore::acquire_many`].
    ///
    /// # Errors
    /// Those of [`Semaphore::acquire_many`], and [`LockError::InsideRuntime`].
    pub fn acquire_many(&self, take: u32) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.acquire_many(take)).map(BlockingGuard)
    }

    /// Takes `take` units with `options`. See [`Semaphore::acquire_with`].
    ///
    /// # Errors
    /// Those of [`Semaphore::acquire_with`], and [`LockError::InsideRuntime`].
    pub fn acquire_with(
        &self,
        take: u32,
        options: LockOptions,
    ) -> Result<BlockingGuard, LockError> {
        self.0.acquire(self.0.value.acquire_with(take, options)).map(BlockingGuard)
    }

    /// Takes one unit if it is free. See [`Semaphore::try_acquire`].
    ///
    /// # Errors
    /// Those of [`Semaphore::try_acquire`], and [`LockError::InsideRuntime`].
    pub fn try_acquire(&self) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_acquire())?.map(BlockingGuard))
    }

    /// Takes `take` units together if they are free. See [`Semaphore::try_acquire_many`].
    ///
    /// # Errors
    /// Those of [`Semaphore::try_acquire_many`], and [`LockError::InsideRuntime`].
    pub fn try_acquire_many(&self, take: u32) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_acquire_many(take))?.map(BlockingGuard))
    }

    /// Takes one unit, blocking at most `wait`. See [`Semaphore::try_acquire_for`].
    ///
    /// # Errors
    /// Those of [`Semaphore::try_acquire_for`], and [`LockError::InsideRuntime`].
    pub fn try_acquire_for(&self, wait: Duration) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_acquire_for(wait))?.map(BlockingGuard))
    }

    /// Takes `take` units with `options`. See [`Semaphore::try_acquire_with`].
    ///
    /// # Errors
    /// Those of [`Semaphore::try_acquire_with`], and [`LockError::InsideRuntime`].
    pub fn try_acquire_with(
        &self,
        take: u32,
        options: LockOptions,
    ) -> Result<Option<BlockingGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_acquire_with(take, options))?.map(BlockingGuard))
    }

    /// Changes the number of units, blocking until no permit is held. See [`Semaphore::resize`].
    ///
    /// # Errors
    /// Those of [`Semaphore::resize`], and [`LockError::InsideRuntime`].
    pub fn resize(&self, units: u32) -> Result<(), LockError> {
        self.0.block_on(self.0.value.resize(units))?
    }

    /// Returns the holders of permits, with the units of each. See [`Semaphore::holders`].
    ///
    /// # Errors
    /// Those of [`Semaphore::holders`], and [`LockError::InsideRuntime`].
    pub fn holders(&self) -> Result<Vec<Holder>, LockError> {
        self.0.block_on(self.0.value.holders())?
    }
}

/// A lock of several keys, for threads that do not run async code. See [`MultiLock`].
#[derive(Clone)]
pub struct BlockingMultiLock(InRuntime<MultiLock>);

impl BlockingMultiLock {
    /// Returns the keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.value.keys()
    }

    /// Acquires all keys, blocking without a time limit. See [`MultiLock::lock`].
    ///
    /// # Errors
    /// Those of [`MultiLock::lock`], and [`LockError::InsideRuntime`].
    pub fn lock(&self) -> Result<BlockingMultiGuard, LockError> {
        self.0.acquire(self.0.value.lock()).map(BlockingMultiGuard)
    }

    /// Acquires all keys if all of them are free. See [`MultiLock::try_lock`].
    ///
    /// # Errors
    /// Those of [`MultiLock::try_lock`], and [`LockError::InsideRuntime`].
    pub fn try_lock(&self) -> Result<Option<BlockingMultiGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_lock())?.map(BlockingMultiGuard))
    }

    /// Acquires all keys, blocking at most `wait`. See [`MultiLock::try_lock_for`].
    ///
    /// # Errors
    /// Those of [`MultiLock::try_lock_for`], and [`LockError::InsideRuntime`].
    pub fn try_lock_for(&self, wait: Duration) -> Result<Option<BlockingMultiGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_lock_for(wait))?.map(BlockingMultiGuard))
    }

    /// Acquires all keys with `options`. See [`MultiLock::lock_with`].
    ///
    /// # Errors
    /// Those of [`MultiLock::lock_with`], and [`LockError::InsideRuntime`].
    pub fn lock_with(&self, options: LockOptions) -> Result<BlockingMultiGuard, LockError> {
        self.0.acquire(self.0.value.lock_with(options)).map(BlockingMultiGuard)
    }

    /// Acquires all keys with `options`. See [`MultiLock::try_lock_with`].
    ///
    /// # Errors
    /// Those of [`MultiLock::try_lock_with`], and [`LockError::InsideRuntime`].
    pub fn try_lock_with(
        &self,
        options: LockOptions,
    ) -> Result<Option<BlockingMultiGuard>, LockError> {
        Ok(self.0.try_acquire(self.0.value.try_lock_with(options))?.map(BlockingMultiGuard))
    }
}

/// A held lock, for threads that do not run async code. See [`LockGuard`].
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct BlockingGuard(InRuntime<LockGuard>);

impl BlockingGuard {
    /// Returns the key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        self.guard().key()
    }

    /// Returns the mode in which the lock is held.
    #[must_use]
    pub fn mode(&self) -> ClaimMode {
        self.guard().mode()
    }

    /// Returns the fencing token of this grant. See [`LockGuard::fencing_token`].
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.guard().fencing_token()
    }

    /// Returns the instant until which the lock is certainly held. See [`LockGuard::valid_until`].
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        self.guard().valid_until()
    }

    /// Returns whether the lock is certainly held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guard().is_held()
    }

    /// Blocks until the lock is lost, but at most for `limit`. Returns the reason, or `None` after
    /// `limit`.
    ///
    /// # Errors
    /// [`LockError::InsideRuntime`].
    pub fn lost_within(&self, limit: Duration) -> Result<Option<LostReason>, LockError> {
        self.0.block_on(async { tokio::time::timeout(limit, self.guard().lost()).await.ok() })
    }

    /// Extends the lease to at least `lease` from now. See [`LockGuard::extend`].
    ///
    /// # Errors
    /// Those of [`LockGuard::extend`], and [`LockError::InsideRuntime`].
    pub fn extend(&self, lease: Duration) -> Result<(), LockError> {
        self.0.block_on(self.guard().extend(lease))?
    }

    /// Makes this lock exclusive, blocking until all shared holders have released theirs. See
    /// [`LockGuard::upgrade`].
    ///
    /// # Errors
    /// Those of [`LockGuard::upgrade`], and [`LockError::InsideRuntime`]. In the latter case, the
    /// lock is released in the background.
    pub fn upgrade(self) -> Result<Self, LockError> {
        self.convert(LockGuard::upgrade)
    }

    /// As [`upgrade`](Self::upgrade), but blocks at most for `wait`. See
    /// [`LockGuard::try_upgrade_for`].
    ///
    /// # Errors
    /// Those of [`LockGuard::try_upgrade_for`], and [`LockError::InsideRuntime`]. In the latter
    /// case, the lock is released in the background.
    pub fn try_upgrade_for(self, wait: Duration) -> Result<Result<Self, Self>, LockError> {
        let InRuntime { value, runtime } = self.0.consume(|guard| guard.try_upgrade_for(wait))?;
        let with_runtime = |value| Self(InRuntime { value, runtime: Arc::clone(&runtime) });
        Ok(value?.map(with_runtime).map_err(with_runtime))
    }

    /// Makes this lock shared, without a release in between. See [`LockGuard::downgrade`].
    ///
    /// # Errors
    /// Those of [`LockGuard::downgrade`], and [`LockError::InsideRuntime`]. In the latter case, the
    /// lock is released in the background.
    pub fn downgrade(self) -> Result<Self, LockError> {
        self.convert(LockGuard::downgrade)
    }

    /// Makes this exclusive lock upgradable, without a release in between. See
    /// [`LockGuard::downgrade_to_upgradable`].
    ///
    /// # Errors
    /// Those of [`LockGuard::downgrade_to_upgradable`], and [`LockError::InsideRuntime`]. In the
    /// latter case, the lock is released in the background.
    pub fn downgrade_to_upgradable(self) -> Result<Self, LockError> {
        self.convert(LockGuard::downgrade_to_upgradable)
    }

    fn convert<F>(self, conversion: impl FnOnce(LockGuard) -> F) -> Result<Self, LockError>
    where
        F: Future<Output = Result<LockGuard, LockError>>,
    {
        let InRuntime { value, runtime } = self.0.consume(conversion)?;
        Ok(Self(InRuntime { value: value?, runtime }))
    }

    /// Releases the lock and waits for the store. See [`LockGuard::unlock`].
    ///
    /// # Errors
    /// Those of [`LockGuard::unlock`], and [`LockError::InsideRuntime`]. In the latter case, the
    /// lock is released in the background.
    pub fn unlock(self) -> Result<(), LockError> {
        self.0.consume(LockGuard::unlock)?.value
    }

    /// Returns the underlying async guard.
    pub fn guard(&self) -> &LockGuard {
        &self.0.value
    }
}

/// The guard of several keys, for threads that do not run async code. See [`MultiGuard`].
#[must_use = "the locks are released as soon as the guard is dropped"]
pub struct BlockingMultiGuard(InRuntime<MultiGuard>);

impl BlockingMultiGuard {
    /// Returns the keys with their fencing tokens, sorted by key.
    pub fn fencing_tokens(&self) -> impl Iterator<Item = (&str, FencingToken)> {
        self.guard().fencing_tokens()
    }

    /// Returns the instant until which all keys are certainly held. See
    /// [`MultiGuard::valid_until`].
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        self.guard().valid_until()
    }

    /// Returns whether all keys are certainly held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guard().is_held()
    }

    /// Blocks until one of the keys is lost, but at most for `limit`. Returns the key and the
    /// reason, or `None` after `limit`.
    ///
    /// # Errors
    /// [`LockError::InsideRuntime`].
    pub fn lost_within(&self, limit: Duration) -> Result<Option<(String, LostReason)>, LockError> {
        self.0.block_on(async { tokio::time::timeout(limit, self.guard().lost()).await.ok() })
    }

    /// Releases all keys and waits for the store. See [`MultiGuard::unlock`].
    ///
    /// # Errors
    /// Those of [`MultiGuard::unlock`], and [`LockError::InsideRuntime`]. In the latter case, the
    /// locks are released in the background.
    pub fn unlock(self) -> Result<(), LockError> {
        self.0.consume(MultiGuard::unlock)?.value
    }

    /// Returns the underlying async guard.
    pub fn guard(&self) -> &MultiGuard {
        &self.0.value
    }
}
