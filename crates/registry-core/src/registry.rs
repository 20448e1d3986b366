//! The trait [`LockRegistry`] for framework code, and [`Registry`], which implements it over any
//! backend.

use std::any::Any;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::active_count::ActiveCount;
use crate::backend::{Finding, Holder, LockBackend, Release};
use crate::background::BackgroundReleaser;
use crate::call::{Call, within};
use crate::capabilities::Capabilities;
use crate::engine::Engine;
use crate::error::{ConfigError, InvalidOption, LockError, LostReason};
use crate::event::{LockEvent, Observer, Observers};
use crate::fairness::Fairness;
use crate::invalidation::{InvalidationQueue, Invalidations};
use crate::key::Key;
use crate::local_lock::{LocalLock, LocalLocks};
use crate::lock::DistributedLock;
use crate::memory::MemoryBackend;
use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};
use crate::one_shot::OneShotEvent;
use crate::options::{ClaimOptions, Defaults, HandOverLimits, LockOptions};
use crate::panic_safe::with_panic_safe_waker;
use crate::renewer::LeaseRenewer;
use crate::schedule::RenewalSchedule;
use crate::shared_backend::SharedBackendEntry;
use crate::waiting_list::WaitingClaim;

/// Provides locks by key, independent of the store. Framework code holds an
/// `Arc<dyn LockRegistry>`.
///
/// [`LockRegistryExt`](crate::LockRegistryExt) adds convenience methods.
///
/// Only this crate can create a [`DistributedLock`]. Another implementation therefore wraps one or
/// more registries and forwards its calls, for example to change keys or to select a registry.
#[async_trait]
pub trait LockRegistry: fmt::Debug + Send + Sync {
    /// Returns the lock of `key`. Cheap, without I/O.
    ///
    /// Never fails: an invalid key causes an error when the lock is used. The same key always
    /// returns the same lock.
    fn obtain(&self, key: &str) -> DistributedLock;

    /// Returns the features and guarantees of this registry's store.
    fn capabilities(&self) -> Capabilities;

    /// Closes this registry and releases its locks.
    ///
    /// New and waiting acquisitions return [`LockError::Closed`]. For at most `limit`, this waits
    /// until all guards are released. After that, each remaining lock is lost with
    /// [`LostReason::Closed`], and its key is freed only after its holder is notified. A key that
    /// is kept for a [`min_hold`](crate::LockOptions::min_hold) beyond `limit` stays locked until
    /// its lease ends. In addition to `limit`, this waits for the store for at most three operation
    /// time-outs. A second call is harmless.
    ///
    /// # Cancel safety
    /// If the future is dropped, the registry stays in the closing state. Another call continues.
    async fn close(&self, limit: Duration) -> CloseReport;
}

#[async_trait]
impl<R: LockRegistry + ?Sized> LockRegistry for Arc<R> {
    fn obtain(&self, key: &str) -> DistributedLock {
        (**self).obtain(key)
    }

    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    async fn close(&self, limit: Duration) -> CloseReport {
        (**self).close(limit).await
    }
}

/// The outcome of [`LockRegistry::close`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[must_use = "locks may have been lost or abandoned"]
#[non_exhaustive]
pub struct CloseReport {
    /// Of the locks held at the start of closing, the number that were released and freed in the
    /// store.
    pub released: usize,
    /// The number of locks lost since the start of closing, including those with guards alive at
    /// the limit. Their holders have been notified.
    pub lost: usize,
    /// The number of claims, counted from the start of closing, that end only with their leases.
    /// The store did not respond or refused the release, or `min_hold` reaches beyond the limit.
    pub abandoned: usize,
}

impl CloseReport {
    /// Returns whether every lock was released and freed.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.abandoned == 0
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            released: self.released + other.released,
            lost: self.lost + other.lost,
            abandoned: self.abandoned + other.abandoned,
        }
    }
}

/// A registry over one store. Clones are the same registry.
///
/// Its background tasks run in the tokio runtime in which it was built. A `current_thread` runtime
/// runs them only inside `block_on`. Outside `block_on`, dropped guards are not released, and locks
/// are lost at the end of their leases, because leases are not renewed. After the runtime has shut
/// down, locking fails with [`LockError::Closed`]. After the last clone and the last guard are
/// dropped, pending releases are completed in the background.
#[derive(Clone)]
pub struct Registry {
    engine: Arc<Engine>,
    local_locks: Arc<LocalLocks>,
    close_state: Arc<CloseState>,
}

/// The handles of the background tasks, and the state that all calls of [`Registry::close`] share.
struct CloseState {
    /// The lease renewer's task, until `close` takes it to wait for its end.
    renewer: Mutex<Option<JoinHandle<()>>>,
    /// The last step of `close`, once it has begun.
    finish: OnceLock<Shared<BoxFuture<'static, ()>>>,
    /// The background releaser's task. Ends when the registry is dropped and no job is pending.
    _background: JoinHandle<()>,
    /// The stall detector's task. Ends when the registry is dropped.
    _stall_detector: JoinHandle<()>,
    /// Set by the first call of `close`.
    counts: OnceLock<CountsAtClose>,
}

/// The engine's counts when `close` was first called.
#[derive(Clone, Copy)]
struct CountsAtClose {
    held: usize,
    lost: usize,
    left_to_lease: usize,
    failed_releases: usize,
}

impl Registry {
    /// Returns a builder for a registry over `backend`.
    pub fn builder(backend: Arc<dyn LockBackend>) -> RegistryBuilder {
        // Some stores accept only shorter leases, and the default must work in every store.
        let lease = Defaults::LEASE.min(backend.capabilities().lease_max);
        RegistryBuilder {
            backend,
            defaults: Defaults {
                lease,
                auto_renew: true,
                poll: Defaults::POLL,
                hand_over_limits: Defaults::HAND_OVER_LIMITS,
                operation_timeout: Defaults::OPERATION_TIMEOUT,
                label: None,
                fair: false,
                register_waiters: true,
                address: None,
            },
            observers: Observers::default(),
        }
    }

    /// Opens a registry over a new in-process store, with all defaults.
    ///
    /// # Errors
    /// [`ConfigError::NoRuntime`] outside a tokio runtime that has time enabled.
    pub fn in_memory() -> Result<Self, ConfigError> {
        Self::builder(Arc::new(MemoryBackend::new())).build()
    }

    /// Checks that a registry can be built in the current context. A caller that must connect to a
    /// store before it builds the registry can thus fail before it connects.
    ///
    /// # Errors
    /// [`ConfigError::NoRuntime`] outside a tokio runtime that has time enabled.
    pub fn check_runtime() -> Result<(), ConfigError> {
        runtime().map(drop)
    }

    /// Waits until the background releaser has no pending release or other store call. Renewals are
    /// not included. Tests await this instead of sleeping.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn idle(&self) {
        self.engine.background.wait_until_drained().await;
    }

    /// Returns the number of keys with a handle, guard or waiter in this registry.
    #[must_use]
    pub fn local_locks(&self) -> usize {
        self.local_locks.len()
    }

    /// Returns the number of locks that this registry holds now. A lock counts until its release
    /// has ended. Readers that share a grant count as one.
    #[must_use]
    pub fn held(&self) -> usize {
        self.engine.active_grants.count()
    }

    /// Returns the holders of all locked keys, of this and all other clients, sorted by key.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store cannot report holders; [`LockError::Backend`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn list(&self) -> Result<Vec<Holder>, LockError> {
        self.engine.require_inspect()?;
        let backend = Arc::clone(&self.engine.backend);
        let listed = Box::pin(async move {
            match backend.admin() {
                Some(admin) => admin.list().await,
                None => Ok(Vec::new()),
            }
        });
        let mut holders = self.engine.query("list", "*", listed).await?;
        holders.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(holders)
    }

    /// Returns the claims that wait for any key, of this and all other clients, sorted by key. For
    /// each key, the longest wait is first. See [`DistributedLock::waiters`].
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store cannot list waiters; [`LockError::Backend`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn list_waiters(&self) -> Result<Vec<WaitingClaim>, LockError> {
        self.engine.list_waiters(None).await
    }

    /// Frees `key`, whichever client holds it, and returns whether it was held. The holder's
    /// fencing token is outdated from the next grant on.
    ///
    /// A holder in any registry that shares this backend object is notified at once. A holder
    /// elsewhere is notified at once if the store [reports
    /// losses](Capabilities::reports_invalidations), and otherwise at its next renewal or at the
    /// end of its lease.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store cannot force a release; [`LockError::InvalidKey`];
    /// [`LockError::Backend`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the key may or may not be freed.
    pub async fn force_release(&self, key: &str) -> Result<bool, LockError> {
        self.engine.require_inspect()?;
        let key = Key::new(key)?;
        self.engine.backend.check_key(&key)?;
        let (backend, shared_backend) =
            (Arc::clone(&self.engine.backend), Arc::clone(&self.engine.shared_backend));
        let forced_key = key.clone();
        let released = Box::pin(async move {
            let released = match backend.admin() {
                Some(admin) => admin.force_release(&forced_key).await,
                None => Ok(Release::NotHeld),
            };
            // A store need not report a change to the client that made it. After an error, the
            // registries verify their claims too, because the store may have freed the key.
            if !mutated(Mutant::ForcedReleaseUnverified) {
                shared_backend.request_verification(&forced_key);
            }
            released
        });
        Ok(self.engine.query("break", key.as_str(), released).await? == Release::Freed)
    }

    /// Checks the store for problems in its configuration or state, including problems that are
    /// about to occur.
    ///
    /// # Errors
    /// [`LockError::Backend`] if the store cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn diagnose(&self) -> Result<Vec<Finding>, LockError> {
        let backend = Arc::clone(&self.engine.backend);
        let diagnosed = Box::pin(async move {
            match backend.admin() {
                Some(admin) => admin.diagnose().await,
                None => Ok(Vec::new()),
            }
        });
        self.engine.query("diagnose", "*", diagnosed).await
    }

    /// Returns the backend if it is a `B`.
    #[must_use]
    pub fn backend<B: LockBackend>(&self) -> Option<&B> {
        let backend: &dyn Any = &*self.engine.backend;
        backend.downcast_ref()
    }
}

impl Registry {
    /// Returns how long a store operation may take before its outcome counts as unknown.
    #[cfg(feature = "blocking")]
    pub(crate) fn operation_timeout(&self) -> Duration {
        self.engine.defaults.operation_timeout
    }

    /// Returns the local lock of `key`, which all callers in this registry share.
    pub(crate) fn local_lock(&self, key: Key) -> Arc<LocalLock> {
        self.local_locks.get_or_insert(key, |key| {
            let (engine, local_locks) = (Arc::clone(&self.engine), Arc::clone(&self.local_locks));
            Arc::new(LocalLock::new(key, engine, local_locks))
        })
    }

    /// Notifies all holders that their lock is lost, and releases their claims.
    async fn lose_all(&self) {
        let engine = &self.engine;
        // The loop repeats because grants can appear in the schedule: a pending claim may be
        // granted, and a grant is absent while its renewal is recorded. Their own callers release
        // the other grants.
        loop {
            for grant in engine.schedule.all() {
                grant.lose(LostReason::Closed);
            }
            if engine.pending_claims.count() == 0 && engine.active_grants.count() == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        engine.background.wait_until_drained().await;
    }
}

/// The methods of [`LockRegistry`], so that code with a `Registry` need not import the trait.
impl Registry {
    /// Returns the lock of `key`. See [`LockRegistry::obtain`].
    #[must_use]
    pub fn obtain(&self, key: &str) -> DistributedLock {
        if let Some(local_lock) = self.local_locks.get(key) {
            return DistributedLock::new(local_lock);
        }
        match Key::new(key) {
            Ok(key) => DistributedLock::new(self.local_lock(key)),
            Err(reason) => DistributedLock::invalid(key, reason),
        }
    }

    /// Returns the features and guarantees of this registry's store.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.engine.capabilities.clone()
    }

    /// Closes this registry and releases its locks. See [`LockRegistry::close`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the registry stays in the closing state. Another call continues.
    pub async fn close(&self, limit: Duration) -> CloseReport {
        let engine = &self.engine;
        let close_state = &self.close_state;
        let before = *close_state.counts.get_or_init(|| CountsAtClose {
            held: engine.active_grants.count(),
            lost: engine.lost_claims.load(Ordering::Acquire),
            left_to_lease: engine.left_to_lease.load(Ordering::Acquire),
            failed_releases: engine.failed_releases.load(Ordering::Acquire),
        });
        if begin_to_close(engine, &self.local_locks) {
            engine.emit(|| LockEvent::Closing);
        }
        let all_released = async {
            // The order matters: a pending claim may become an active grant, and its release may
            // become a job of the background releaser.
            engine.pending_claims.wait_until_zero().await;
            engine.active_grants.wait_until_zero().await;
            engine.background.wait_until_drained().await;
        };
        let in_time = tokio::time::timeout(limit, all_released).await.is_ok();
        if !in_time {
            // The holders lose their locks now. The store still has the operation time-out to
            // respond.
            engine.close_limit_reached.set();
            let _ = tokio::time::timeout(engine.defaults.operation_timeout, self.lose_all()).await;
        }
        let lost = engine.lost_claims.load(Ordering::Acquire) - before.lost;
        // A claim that is being released may be counted both as an active grant and as a job of the
        // background releaser, hence `max`. `pending_claims` also counts a claim that began after
        // `begin_to_close`. Such a claim sends no request, but the report may count it as
        // abandoned.
        let held = engine.active_grants.count();
        let in_flight = if in_time {
            0
        } else {
            held.max(engine.background.pending_releases()) + engine.pending_claims.count()
        };
        let left_to_lease = engine.left_to_lease.load(Ordering::Acquire) - before.left_to_lease;
        let failed_releases =
            engine.failed_releases.load(Ordering::Acquire) - before.failed_releases;
        let report = CloseReport {
            released: before.held.saturating_sub(lost + held + failed_releases),
            lost,
            abandoned: in_flight + left_to_lease,
        };
        engine.stop_renewal();
        // All calls of `close` share one `finish` future, which each of them polls. If a call is
        // dropped, the background releaser polls it.
        let finish = close_state.finish.get_or_init(|| {
            let renewer = close_state.renewer.lock().unwrap_or_else(PoisonError::into_inner).take();
            finish(Arc::clone(engine), renewer).boxed().shared()
        });
        Call::new(&engine.background, with_panic_safe_waker(finish.clone()).boxed()).await;
        report
    }
}

#[async_trait]
impl LockRegistry for Registry {
    fn obtain(&self, key: &str) -> DistributedLock {
        Self::obtain(self, key)
    }

    fn capabilities(&self) -> Capabilities {
        Self::capabilities(self)
    }

    async fn close(&self, limit: Duration) -> CloseReport {
        Self::close(self, limit).await
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("backend", &self.engine.backend)
            .field("held", &self.held())
            .field("local_locks", &self.local_locks())
            .finish_non_exhaustive()
    }
}

/// Configures a [`Registry`]. Created by [`Registry::builder`].
#[derive(Debug)]
#[must_use = "a builder does nothing until it is built"]
pub struct RegistryBuilder {
    backend: Arc<dyn LockBackend>,
    defaults: Defaults,
    observers: Observers,
}

impl RegistryBuilder {
    /// The shortest poll interval.
    pub const POLL_MIN: Duration = Duration::from_millis(1);
    /// The longest poll interval: one hour.
    pub const POLL_MAX: Duration = Duration::from_secs(60 * 60);
    /// The shortest operation time-out.
    pub const TIMEOUT_MIN: Duration = Duration::from_millis(10);
    /// The longest operation time-out: one hour.
    pub const TIMEOUT_MAX: Duration = Duration::from_secs(60 * 60);
    /// The maximum number of consecutive hand-overs.
    ///
    /// A grant reserves one fencing token per hand-over. Many stores take tokens from their clock,
    /// one per microsecond. Up to this limit, a key uses tokens more slowly than the clock
    /// advances. New tokens therefore exceed all earlier ones, even after such a store has lost its
    /// data.
    pub const HANDOFF_MAX: u32 = 256;

    /// Sets the lease: how long a key stays locked after its holder dies. Default: 30 s, or the
    /// store's maximum if that is shorter.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.defaults.lease = lease;
        self
    }

    /// Sets whether leases are renewed while their guards live. Default: yes.
    pub fn auto_renew(mut self, auto_renew: bool) -> Self {
        self.defaults.auto_renew = auto_renew;
        self
    }

    /// Sets the poll interval of waiters. Each interval is lengthened at random by up to 25 %, and
    /// a wake-up from the store ends it earlier. If the store confirms its wake-ups, waiters poll
    /// less often. Default: 250 ms. Between [`POLL_MIN`](Self::POLL_MIN) and
    /// [`POLL_MAX`](Self::POLL_MAX).
    pub fn poll(mut self, poll: Duration) -> Self {
        self.defaults.poll = poll;
        self
    }

    /// Sets how many times in a row a claim may pass to the next caller of this process without a
    /// request to the store. Zero disables hand-over. Default: 32, and up to 64 within 20 ms of the
    /// grant. At most [`HANDOFF_MAX`](Self::HANDOFF_MAX). The same number, but at most 64, limits
    /// how many readers join a shared grant of this process.
    ///
    /// Only the first waiting caller receives a claim this way, and only if its options equal those
    /// of the claim. These claims are not handed over:
    ///
    /// - shared claims, upgradable claims and permits,
    /// - claims that were [upgraded](crate::LockGuard::upgrade),
    /// - claims that were granted more than 1 s ago, or 20 ms if other processes compete for the
    ///   key,
    /// - claims with [`fair`](Self::fair), or in a store with a [queue](crate::Capabilities::fair),
    /// - claims with `min_hold` or `max_hold`, or without [`auto_renew`](Self::auto_renew),
    /// - claims whose lease was changed by [`extend`](crate::LockGuard::extend),
    /// - claims under which a fenced write was begun,
    /// - claims whose loss is possible: an invalidation is not verified yet, or less than a third
    ///   of the lease remains.
    pub fn handoff(mut self, times: u32) -> Self {
        self.defaults.hand_over_limits = HandOverLimits::uniform(times);
        self
    }

    /// Sets the operation time-out: how long a store operation may take before its outcome counts
    /// as unknown. Default: 3 s. Between [`TIMEOUT_MIN`](Self::TIMEOUT_MIN) and
    /// [`TIMEOUT_MAX`](Self::TIMEOUT_MAX).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.defaults.operation_timeout = timeout;
        self
    }

    /// Sets whether waiting registries acquire a lock in the order of their claims. See
    /// [`LockOptions::fair`]. Default: false.
    pub fn fair(mut self, fair: bool) -> Self {
        self.defaults.fair = fair;
        self
    }

    /// Sets whether this registry registers its waiters in the store. Any client can then list them
    /// with [`DistributedLock::waiters`]. Default: true. A wait of less than a second is never
    /// registered. A longer one costs one request per third of the lease, and one at its end. A
    /// store with a [queue](crate::Capabilities::fair) lists its waiters without these requests,
    /// whatever this setting is.
    pub fn waiters(mut self, register: bool) -> Self {
        self.defaults.register_waiters = register;
        self
    }

    /// Sets the label that other clients see when they query the holder of a lock. The limits are
    /// those of [`LockOptions::label`]. Default: none.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.defaults.label = Some(label.into().into());
        self
    }

    /// Sets the store's address, which the error of an operation without a response shows:
    /// `HOST:PORT`, several of these separated by commas, or a path. It must contain no user,
    /// password or query. Default: none.
    pub fn address(mut self, address: impl Into<Arc<str>>) -> Self {
        self.defaults.address = Some(address.into());
        self
    }

    /// Adds an observer, which receives all events of this registry.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.add(observer);
        self
    }

    /// Opens the registry in the current tokio runtime, which must have time enabled.
    ///
    /// # Errors
    /// [`ConfigError::NoRuntime`] outside a runtime, or in one without time.
    /// [`ConfigError::Invalid`] for values out of range, and for [`fair`](Self::fair) if the store
    /// does not support it.
    pub fn build(self) -> Result<Registry, ConfigError> {
        let runtime = runtime()?;
        let Self { backend, defaults, observers } = self;
        let capabilities = backend.capabilities();
        check_range("poll", defaults.poll, Self::POLL_MIN, Self::POLL_MAX)?;
        check_range("timeout", defaults.operation_timeout, Self::TIMEOUT_MIN, Self::TIMEOUT_MAX)?;
        if defaults.hand_over_limits.max > Self::HANDOFF_MAX {
            return Err(ConfigError::Invalid(format!(
                "handoff {} is larger than the limit of {}: each hand-over reserves a fencing token, and tokens must not \
                 outrun the store's clock",
                defaults.hand_over_limits.max,
                Self::HANDOFF_MAX
            )));
        }
        let default_options = ClaimOptions::resolve(
            &LockOptions::new(),
            ClaimMode::Exclusive,
            &defaults,
            &capabilities,
        )
        .map_err(|error| ConfigError::Invalid(error.to_string()))?;
        let default_read_options =
            ClaimOptions { mode: ClaimMode::Shared, ..default_options.clone() };
        let (background, background_work) = BackgroundReleaser::new();
        let stall_detector_task = background.stall_detector().task();
        let local_locks = Arc::new(LocalLocks::new());
        let schedule = Arc::new(RenewalSchedule::default());
        let table = Arc::clone(&local_locks);
        let invalidations =
            Arc::new(InvalidationQueue::new(runtime.clone(), move |key| table.contains(key)));
        let renewer = LeaseRenewer {
            backend: Arc::clone(&backend),
            schedule: Arc::clone(&schedule),
            invalidations: Arc::clone(&invalidations),
            local_locks: Arc::clone(&local_locks),
        };
        let shared_backend =
            Arc::new(SharedBackendEntry::new(&backend, Invalidations::new(&invalidations)));
        let engine = Arc::new(Engine {
            fairness: Fairness::new(&capabilities, defaults.poll),
            memory: (&*backend as &dyn Any).downcast_ref().cloned(),
            backend,
            capabilities,
            defaults,
            default_options: Arc::new(default_options),
            default_read_options: Arc::new(default_read_options),
            observers,
            schedule,
            invalidations,
            background,
            active_grants: ActiveCount::default(),
            pending_claims: ActiveCount::default(),
            closing: OneShotEvent::default(),
            close_limit_reached: OneShotEvent::default(),
            lost_claims: 0.into(),
            left_to_lease: 0.into(),
            failed_releases: 0.into(),
            shared_backend,
        });
        engine.backend.subscribe(Invalidations::new(&engine.invalidations));
        let close_state = CloseState {
            renewer: Mutex::new(Some(runtime.spawn(renewer.run()))),
            finish: OnceLock::new(),
            _background: runtime.spawn({
                let on_shutdown =
                    CloseOnRuntimeShutdown(Arc::downgrade(&engine), Arc::clone(&local_locks));
                async move {
                    background_work.await;
                    drop(on_shutdown);
                }
            }),
            _stall_detector: runtime.spawn(stall_detector_task),
            counts: OnceLock::new(),
        };
        Ok(Registry { engine, local_locks, close_state: Arc::new(close_state) })
    }
}

/// Makes all current and later waits return [`LockError::Closed`]. Returns true for the first call.
fn begin_to_close(engine: &Engine, local_locks: &LocalLocks) -> bool {
    let is_first = engine.closing.set();
    if is_first {
        for local_lock in local_locks.all() {
            local_lock.close();
        }
    }
    is_first
}

/// Waits for the lease renewer's task, closes the backend, and emits the last event.
async fn finish(engine: Arc<Engine>, renewer: Option<JoinHandle<()>>) {
    let limit = engine.defaults.operation_timeout;
    if let Some(renewer) = renewer {
        // The renewer completes its calls before it ends. The backend is therefore closed during a
        // call only if the call outlasts `limit`.
        let _ = within(limit, renewer).await;
    }
    engine.close_backend().response_within(limit).await;
    engine.emit(|| LockEvent::Closed);
}

/// Returns the current runtime if a registry can run in it.
fn runtime() -> Result<Handle, ConfigError> {
    let runtime = Handle::try_current().map_err(|_| ConfigError::NoRuntime)?;
    // tokio offers no other check for its time driver. Without time, waiting would panic later.
    std::panic::catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO)))
        .map_err(|_| ConfigError::NoRuntime)?;
    Ok(runtime)
}

/// Owned by the background releaser's task. If the task ends while the registry still exists,
/// dropping this value begins to close the registry.
struct CloseOnRuntimeShutdown(Weak<Engine>, Arc<LocalLocks>);

impl Drop for CloseOnRuntimeShutdown {
    fn drop(&mut self) {
        // If the registry still exists, its runtime has shut down. Without the close, waiters in
        // other runtimes would never be woken.
        if let Some(engine) = self.0.upgrade() {
            begin_to_close(&engine, &self.1);
        }
    }
}

fn check_range(
    option: &'static str,
    given: Duration,
    min: Duration,
    max: Duration,
) -> Result<(), ConfigError> {
    if (min..=max).contains(&given) {
        return Ok(());
    }
    let problem = format!("is not between {min:?} and {max:?}");
    Err(ConfigError::Invalid(InvalidOption::new(option, given, problem).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn many_dropped_handles_leave_no_memory() {
        let registry = Registry::in_memory().unwrap();
        let kept: Vec<_> = (0..100).map(|n| registry.obtain(&format!("kept/{n}"))).collect();
        let dropped: Vec<_> = (0..200_000).map(|n| registry.obtain(&n.to_string())).collect();
        assert!(registry.local_locks.capacity() >= 200_000);
        drop(dropped);
        assert_eq!(registry.local_locks(), kept.len());
        let capacity = registry.local_locks.capacity();
        assert!(capacity <= 50_000, "capacity for {capacity} keys is left");
    }
}
