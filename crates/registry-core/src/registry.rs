//! The trait that framework code is written against, and the one engine that implements it over any backend.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::backend::{Finding, Holder, LockBackend, Release};
use crate::call::{Call, within};
use crate::capabilities::Capabilities;
use crate::contained::shielded;
use crate::engine::Engine;
use crate::error::{ConfigError, InvalidOption, LockError, LostReason};
use crate::event::{LockEvent, Observer, Observers};
use crate::fairness::Fairness;
use crate::gauge::Gauge;
use crate::janitor::Janitor;
use crate::keeper::Keeper;
use crate::key::Key;
use crate::lock::DistributedLock;
use crate::memory::MemoryBackend;
use crate::mutant::{Mutant, mutated};
use crate::options::{Defaults, Handoffs, LockOptions, Terms};
use crate::siblings::Sibling;
use crate::signal::Signal;
use crate::slot::{Slot, SlotTable};

/// Gives out locks by key, whatever store they live in. Framework code holds an `Arc<dyn LockRegistry>`.
///
/// [`LockRegistryExt`](crate::LockRegistryExt) has the convenience on top.
#[async_trait]
pub trait LockRegistry: fmt::Debug + Send + Sync {
    /// The lock of `key`. Cheap, without I/O, and never fails: a key that cannot be locked says so when it is locked. The same key gives
    /// the same lock.
    fn obtain(&self, key: &str) -> DistributedLock;

    /// What this registry's store can do and what it promises.
    fn capabilities(&self) -> Capabilities;

    /// Ends this registry: gives no more locks, sends waiters away with [`LockError::Closed`], waits up to `limit` for guards
    /// to be let go, and gives back what is left. A guard that is still alive then is lost with
    /// [`LostReason::Closed`], and only then is its key freed. A key that is kept for a
    /// [`min_hold`](crate::LockOptions::min_hold) beyond `limit` is left to its lease. Closing twice is harmless.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the registry closing; calling again goes on where it was.
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

/// What [`LockRegistry::close`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct CloseReport {
    /// Locks that were let go and given back, of those that were held when closing began.
    pub released: usize,
    /// Locks that were lost since closing began, among them those whose guards were still alive at the limit. Their holders
    /// have been told.
    pub lost: usize,
    /// Claims that were left to their lease since closing began: the store did not answer or refused, or `min_hold` reaches
    /// beyond the limit. The store's clock frees them.
    pub abandoned: usize,
}

impl CloseReport {
    /// Whether everything was let go and given back.
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
/// It lives in the tokio runtime that it was built in. While that runtime is not driven (a `current_thread` runtime outside of
/// `block_on`), leases are not renewed, so guards are lost at their deadlines, and dropped guards are not released. When it has shut
/// down, locking fails with [`LockError::Closed`]. When the last clone and the last guard are gone, pending releases are finished in
/// the background.
#[derive(Clone)]
pub struct Registry {
    engine: Arc<Engine>,
    closing: Arc<Closing>,
}

struct Closing {
    /// The keeper's task, until closing waits for it.
    keeper: Mutex<Option<JoinHandle<()>>>,
    /// The last part of closing, once it has begun.
    finish: OnceLock<Shared<BoxFuture<'static, ()>>>,
    /// The janitor's task. Ends by itself when the registry is gone and nothing is left to do.
    _janitor: JoinHandle<()>,
    /// The task that looks after futures that are not polled. Ends as the janitor's does.
    _watch: JoinHandle<()>,
    start: OnceLock<Start>,
}

/// The engine's counts when closing began.
#[derive(Clone, Copy)]
struct Start {
    held: usize,
    lost: usize,
    left_to_lease: usize,
    endings_left: usize,
}

impl Registry {
    /// Begins a registry over `backend`.
    pub fn builder(backend: Arc<dyn LockBackend>) -> RegistryBuilder {
        // Some stores take only shorter ones, which nobody need know who does not care.
        let lease = Defaults::LEASE.min(backend.capabilities().lease_max);
        RegistryBuilder {
            backend,
            defaults: Defaults {
                lease,
                renew: true,
                poll: Defaults::POLL,
                handoffs: Defaults::HANDOFFS,
                answer_limit: Defaults::ANSWER_LIMIT,
                label: None,
            },
            observers: Observers::default(),
        }
    }

    /// A registry over a fresh in-process store, with all defaults.
    ///
    /// # Errors
    /// [`ConfigError::NoRuntime`] outside a tokio runtime.
    pub fn in_memory() -> Result<Self, ConfigError> {
        Self::builder(Arc::new(MemoryBackend::new())).build()
    }

    /// Checks that a registry can be opened here, for those who open its store first.
    ///
    /// # Errors
    /// [`ConfigError::NoRuntime`] outside a tokio runtime that has time enabled.
    pub fn check_runtime() -> Result<(), ConfigError> {
        runtime().map(drop)
    }

    /// Waits until nothing is left to be given back in the background. Tests await this instead of sleeping.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn idle(&self) {
        self.engine.janitor.idle().await;
    }

    /// The number of keys with a handle, guard or waiter in this registry.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.engine.slots.len()
    }

    /// The number of locks that this registry holds now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.engine.held.alive()
    }

    /// Tells the holders of all keys that are held, by whomever, in the order of their keys.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store cannot tell; [`LockError::Backend`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn list(&self) -> Result<Vec<Holder>, LockError> {
        self.engine.require_inspect()?;
        let backend = Arc::clone(&self.engine.backend);
        let mut holders =
            self.engine.ask("list", "*", Box::pin(async move { backend.list().await })).await?;
        holders.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(holders)
    }

    /// Frees `key`, whichever client holds it, and returns whether it was held. The holder's fencing token is outdated from the next grant on.
    ///
    /// A holder in any registry over this backend is notified at once. A holder elsewhere is notified at once where the store
    /// [tells losses](Capabilities::tells_losses), and otherwise at its next renewal.
    ///
    /// # Errors
    /// [`LockError::Unsupported`] if the store cannot do it; [`LockError::InvalidKey`]; [`LockError::Backend`].
    ///
    /// # Cancel safety
    /// Dropping the future may or may not have freed the key.
    pub async fn force_release(&self, key: &str) -> Result<bool, LockError> {
        self.engine.require_inspect()?;
        let key = Key::new(key)?;
        self.engine.backend.check_key(&key)?;
        let (backend, sibling) =
            (Arc::clone(&self.engine.backend), Arc::clone(&self.engine.sibling));
        let asked = key.clone();
        let freed = Box::pin(async move {
            let freed = backend.force_release(&asked).await;
            // Whatever the answer is: after an error the key may be free, too. The store need not report to its client what that did.
            if !mutated(Mutant::BrokenLockUnverified) {
                sibling.verify(&asked);
            }
            freed
        });
        Ok(self.engine.ask("break", key.as_str(), freed).await? == Release::Freed)
    }

    /// Looks for what is set up wrong in the store, or soon will be.
    ///
    /// # Errors
    /// [`LockError::Backend`] if the store cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn diagnose(&self) -> Result<Vec<Finding>, LockError> {
        let backend = Arc::clone(&self.engine.backend);
        self.engine.ask("diagnose", "*", Box::pin(async move { backend.diagnose().await })).await
    }

    /// The backend, if it is a `B`.
    #[must_use]
    pub fn backend<B: LockBackend>(&self) -> Option<&B> {
        let backend: &dyn std::any::Any = &*self.engine.backend;
        backend.downcast_ref()
    }
}

impl Registry {
    /// How long a store operation may stay unanswered.
    #[cfg(feature = "blocking")]
    pub(crate) fn answer_limit(&self) -> Duration {
        self.engine.defaults.answer_limit
    }

    /// What all callers of `key` share.
    pub(crate) fn slot(&self, key: Key) -> Arc<Slot> {
        let engine = &self.engine;
        engine.slots.get_or_insert(key, |key| Arc::new(Slot::new(key, Arc::clone(engine))))
    }

    /// Tells all holders that their lock is lost, and gives back what they had.
    async fn lose_all(&self) {
        let engine = &self.engine;
        // More than one look: a caller that contends may yet come to hold.
        loop {
            let all = engine.keeper.all();
            if all.is_empty() && engine.contending.alive() == 0 {
                break;
            }
            for held in all {
                held.lose(LostReason::Closed);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // What is still counted is on its way back, in its caller's hands.
        engine.held.none_left().await;
        engine.janitor.idle().await;
    }
}

#[async_trait]
impl LockRegistry for Registry {
    fn obtain(&self, key: &str) -> DistributedLock {
        let engine = &self.engine;
        if let Some(slot) = engine.slots.get(key) {
            return DistributedLock::new(slot);
        }
        match Key::new(key) {
            Ok(key) => DistributedLock::new(self.slot(key)),
            Err(reason) => DistributedLock::invalid(key, reason),
        }
    }

    fn capabilities(&self) -> Capabilities {
        self.engine.capabilities.clone()
    }

    async fn close(&self, limit: Duration) -> CloseReport {
        let engine = &self.engine;
        let closing = &self.closing;
        let start = *closing.start.get_or_init(|| Start {
            held: engine.held.alive(),
            lost: engine.lost.load(Ordering::Acquire),
            left_to_lease: engine.left_to_lease.load(Ordering::Acquire),
            endings_left: engine.endings_left.load(Ordering::Acquire),
        });
        if engine.begin_to_close() {
            engine.tell(|| LockEvent::Closing);
        }
        let orderly = async {
            // In this order: a caller that contends may come to hold, a holder leaves work to the janitor.
            engine.contending.none_left().await;
            engine.held.none_left().await;
            engine.janitor.idle().await;
        };
        let in_order = tokio::time::timeout(limit, orderly).await.is_ok();
        if !in_order {
            // The holders' time is over; the store still gets its own to answer.
            engine.out_of_time.give();
            let _ = tokio::time::timeout(engine.defaults.answer_limit, self.lose_all()).await;
        }
        let lost = engine.lost.load(Ordering::Acquire) - start.lost;
        // What is being given back counts as held and is the janitor's. A caller that comes to its turn only now is
        // counted for a moment, but asks the store for nothing.
        let held = engine.held.alive();
        let under_way = if in_order {
            0
        } else {
            held.max(engine.janitor.claims()) + engine.contending.alive()
        };
        let left = engine.left_to_lease.load(Ordering::Acquire) - start.left_to_lease;
        let endings_left = engine.endings_left.load(Ordering::Acquire) - start.endings_left;
        let report = CloseReport {
            released: start.held.saturating_sub(lost + held + endings_left),
            lost,
            abandoned: under_way + left,
        };
        engine.keeper.stop();
        // One for all calls: whichever of them is polled drives it, so that none waits for one that is not. The janitor drives it for a
        // call that is dropped.
        let finish = closing.finish.get_or_init(|| {
            let keeper = closing.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
            finish(Arc::clone(engine), keeper).boxed().shared()
        });
        Call::new(&engine.janitor, shielded(finish.clone()).boxed()).await;
        report
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("backend", &self.engine.backend)
            .field("held", &self.held())
            .field("slots", &self.slots())
            .finish_non_exhaustive()
    }
}

/// Sets up a [`Registry`]. Made by [`Registry::builder`].
#[derive(Debug)]
#[must_use = "a builder does nothing until it is built"]
pub struct RegistryBuilder {
    backend: Arc<dyn LockBackend>,
    defaults: Defaults,
    observers: Observers,
}

impl RegistryBuilder {
    /// The shortest poll that can be asked for.
    pub const POLL_MIN: Duration = Duration::from_millis(1);
    /// The longest poll that can be asked for: one hour.
    pub const POLL_MAX: Duration = Duration::from_secs(60 * 60);
    /// The shortest time that a store operation can be given.
    pub const TIMEOUT_MIN: Duration = Duration::from_millis(10);
    /// The longest time that a store operation can be given: one hour.
    pub const TIMEOUT_MAX: Duration = Duration::from_secs(60 * 60);
    /// The largest number of hand-overs in a row that can be configured.
    ///
    /// A grant reserves a fencing token for each hand-over, and a token counts a microsecond of the store's clock. With this
    /// limit the tokens of a key stay behind the clock, so that they grow even after the store has lost its data.
    pub const HANDOFF_MAX: u32 = 256;

    /// How long a key stays taken when its holder dies. Default: 30 s, or the longest that the store takes if that is shorter.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.defaults.lease = lease;
        self
    }

    /// Whether leases are renewed while their guards live. Default: yes.
    pub fn renew(mut self, renew: bool) -> Self {
        self.defaults.renew = renew;
        self
    }

    /// How often a waiter looks by itself, at the most; wake-ups by the store shorten the wait. Jittered upwards by up to a quarter.
    /// Default: 250 ms. Between [`POLL_MIN`](Self::POLL_MIN) and [`POLL_MAX`](Self::POLL_MAX).
    pub fn poll(mut self, poll: Duration) -> Self {
        self.defaults.poll = poll;
        self
    }

    /// How many times in a row a claim may pass to the next caller of this process without asking the store. Zero switches
    /// it off. Default: 32, and up to 64 within 20 ms of the grant. At most [`HANDOFF_MAX`](Self::HANDOFF_MAX).
    pub fn handoff(mut self, times: u32) -> Self {
        self.defaults.handoffs = Handoffs::exactly(times);
        self
    }

    /// How long a store operation may stay unanswered before its outcome counts as unknown. Default: 3 s. Between
    /// [`TIMEOUT_MIN`](Self::TIMEOUT_MIN) and [`TIMEOUT_MAX`](Self::TIMEOUT_MAX).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.defaults.answer_limit = timeout;
        self
    }

    /// What others see when they ask who holds a lock. Default: nothing.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.defaults.label = Some(label.into().into());
        self
    }

    /// Tells `observer` what happens.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.add(observer);
        self
    }

    /// Opens the registry in the current tokio runtime, which must have time enabled.
    ///
    /// # Errors
    /// [`ConfigError::NoRuntime`] outside a runtime, or in one without time; [`ConfigError::Invalid`] for values out of range.
    pub fn build(self) -> Result<Registry, ConfigError> {
        let runtime = runtime()?;
        let Self { backend, defaults, observers } = self;
        let capabilities = backend.capabilities();
        check_range("poll", defaults.poll, Self::POLL_MIN, Self::POLL_MAX)?;
        check_range("timeout", defaults.answer_limit, Self::TIMEOUT_MIN, Self::TIMEOUT_MAX)?;
        if defaults.handoffs.max > Self::HANDOFF_MAX {
            return Err(ConfigError::Invalid(format!(
                "handoff {} is larger than the limit of {}: each hand-over reserves a fencing token, and tokens must not \
                 outrun the store's clock",
                defaults.handoffs.max,
                Self::HANDOFF_MAX
            )));
        }
        let default_terms = Terms::resolve(&LockOptions::new(), &defaults, &capabilities)
            .map_err(|error| ConfigError::Invalid(error.to_string()))?;
        let (janitor, janitor_work) = Janitor::new();
        let watch_work = janitor.watch().work();
        let slots = Arc::new(SlotTable::new());
        let keeper = Keeper::new(Arc::clone(&slots));
        let keeper_work = keeper.work(Arc::clone(&backend));
        let sibling = Arc::new(Sibling::new(&backend, keeper.loss_hints()));
        let engine = Arc::new(Engine {
            fairness: Fairness::new(&capabilities, defaults.poll),
            backend,
            capabilities,
            defaults,
            default_terms: Arc::new(default_terms),
            observers,
            keeper,
            janitor,
            held: Gauge::default(),
            contending: Gauge::default(),
            closing: Signal::default(),
            out_of_time: Signal::default(),
            lost: 0.into(),
            left_to_lease: 0.into(),
            endings_left: 0.into(),
            slots,
            sibling,
        });
        engine.backend.tell_losses(engine.keeper.loss_hints());
        let closing = Closing {
            keeper: Mutex::new(Some(runtime.spawn(keeper_work))),
            finish: OnceLock::new(),
            _janitor: runtime.spawn({
                let home = Home(Arc::downgrade(&engine));
                async move {
                    janitor_work.await;
                    drop(home);
                }
            }),
            _watch: runtime.spawn(watch_work),
            start: OnceLock::new(),
        };
        Ok(Registry { engine, closing: Arc::new(closing) })
    }
}

/// Waits for the keeper's task and closes the backend.
async fn finish(engine: Arc<Engine>, keeper: Option<JoinHandle<()>>) {
    let limit = engine.defaults.answer_limit;
    if let Some(keeper) = keeper {
        // Renewals in flight are carried to their end, so that the backend is not closed under them.
        let _ = within(limit, keeper).await;
    }
    engine.close_backend().answer_within(limit).await;
    engine.tell(|| LockEvent::Closed);
}

/// The current runtime, if a registry can live in it.
fn runtime() -> Result<Handle, ConfigError> {
    let runtime = Handle::try_current().map_err(|_| ConfigError::NoRuntime)?;
    // The only way to ask it whether it has time. Without, waiting would panic later.
    std::panic::catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO)))
        .map_err(|_| ConfigError::NoRuntime)?;
    Ok(runtime)
}

/// Lives as long as the runtime does its work for the registry.
struct Home(Weak<Engine>);

impl Drop for Home {
    fn drop(&mut self) {
        // The runtime has shut down under the registry. Nobody would ever wake those who wait elsewhere.
        if let Some(engine) = self.0.upgrade() {
            engine.begin_to_close();
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
    async fn many_dropped_handles_keep_no_room() {
        let registry = Registry::in_memory().unwrap();
        let kept: Vec<_> = (0..100).map(|n| registry.obtain(&format!("kept/{n}"))).collect();
        let dropped: Vec<_> = (0..200_000).map(|n| registry.obtain(&n.to_string())).collect();
        assert!(registry.engine.slots.room() >= 200_000);
        drop(dropped);
        assert_eq!(registry.slots(), kept.len());
        let room = registry.engine.slots.room();
        assert!(room <= 50_000, "room for {room} slots is left");
    }
}
