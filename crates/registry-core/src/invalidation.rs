//! Invalidations: a store's reports that the record of a key may have changed, and the queue that
//! collects them.
//!
//! This module contains only keys. The lease renewer verifies the claims, and `lease` computes the
//! times of the verifications.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::key::Key;

/// The handle by which a backend notifies one registry that the record of a key may have changed.
/// The registry then verifies its claim at once instead of at its next renewal.
///
/// A backend receives the handle through [`LockBackend::subscribe`](crate::LockBackend::subscribe).
/// All clones notify the same registry. A handle does not keep the registry alive. Calls of its
/// methods are cheap, do not wait and never panic. You may call them on any thread, inside or
/// outside a runtime, at any rate.
///
/// A notification by itself ends no lock. The registry sends a verification, which is an early
/// renewal, and the store's response decides. If the claim is gone, the lock is lost; otherwise,
/// the lock continues unchanged. A superfluous notification therefore costs one renewal. A missing
/// notification delays the loss until the next renewal.
///
/// A claim is not renewed if its holder has disabled renewal, or if its lease ends with its
/// `max_hold`. The verification of such a claim must not extend its lease. It therefore requests
/// the shortest lease that the store accepts. If the rest of the lease is not longer than that, no
/// verification is sent.
///
/// A claim has one verification at a time: the next one waits for the response to the last one.
/// This wait lasts at most for the operation time-out or a sixth of the lease, whichever is
/// shorter. After four verifications without a response, the registry first waits for a response.
/// Notifications during a verification cause one more verification. Verifications of one claim are
/// at least 10 ms apart. This interval grows while notifications continue without a pause. Its
/// maximum is one second or a twentieth of the lease, whichever is shorter, but at least 20 ms.
///
/// If a verification fails with a store error, the registry retries it after the same pause as a
/// renewal. A further notification shortens this pause. A notification for a key that this registry
/// does not hold costs almost nothing. If an acquisition of the key is in flight, the registry
/// verifies the claim after the response has arrived.
///
/// A backend keeps the handles of all its registries in an [`InvalidationSet`].
#[derive(Clone)]
pub struct Invalidations(Weak<InvalidationQueue>);

impl Invalidations {
    // The handle refers to the queue only, not to the engine. Dropping the last reference to the
    // engine would drop the backend, possibly while the backend executes this call.
    pub(crate) fn new(queue: &Arc<InvalidationQueue>) -> Self {
        Self(Arc::downgrade(queue))
    }

    /// Makes the registry verify its claim on `key`, if it has a claim on `key`.
    pub fn notify(&self, key: &Key) {
        if let Some(queue) = self.0.upgrade() {
            queue.push(key);
        }
    }

    /// Makes the registry verify all its claims. For a backend that does not know which keys have
    /// changed, for example after a reconnect.
    pub fn notify_all(&self) {
        if let Some(queue) = self.0.upgrade() {
            queue.push_all();
        }
    }

    /// Returns whether the registry still accepts notifications. The registry accepts none after it
    /// is closed or its runtime has shut down. This state is final, and the handle can then be
    /// dropped.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.0.upgrade().is_some_and(|queue| queue.is_open())
    }
}

impl fmt::Debug for Invalidations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidations").field("is_live", &self.is_live()).finish()
    }
}

/// The handles of all open registries over one backend.
///
/// # Examples
/// ```
/// # use registry_core::{InvalidationSet, Invalidations, Key};
/// #[derive(Debug, Default)]
/// struct Backend {
///     registries: InvalidationSet,
/// }
///
/// impl Backend {
///     // Called by `LockBackend::subscribe`.
///     fn subscribe(&self, invalidations: Invalidations) {
///         self.registries.subscribe(invalidations);
///     }
///
///     // Called when the store reports that another client has deleted the record of `key`.
///     fn on_deleted(&self, key: &Key) {
///         self.registries.notify(key);
///     }
///
///     // Called when reports of the store may have been lost.
///     fn on_reconnected(&self) {
///         self.registries.notify_all();
///     }
/// }
/// ```
#[derive(Debug, Default)]
pub struct InvalidationSet(Mutex<Arc<[Invalidations]>>);

impl InvalidationSet {
    /// Adds the handle of a registry, and removes the handles of closed registries.
    pub fn subscribe(&self, invalidations: Invalidations) {
        let mut all = self.lock();
        *all =
            all.iter().filter(|handle| handle.is_live()).cloned().chain([invalidations]).collect();
    }

    /// Makes all registries verify their claims on `key`.
    pub fn notify(&self, key: &Key) {
        self.all().iter().for_each(|handle| handle.notify(key));
    }

    /// Makes all registries verify all their claims.
    pub fn notify_all(&self) {
        self.all().iter().for_each(Invalidations::notify_all);
    }

    /// Returns whether no open registry is subscribed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.lock().iter().any(Invalidations::is_live)
    }

    /// Returns the runtime of an open registry. A backend uses it for tasks that must not end with
    /// the runtime of the caller that starts them.
    #[must_use]
    pub fn runtime(&self) -> Option<Handle> {
        let all = self.all();
        let mut queues = all.iter().filter_map(|handle| handle.0.upgrade());
        queues.find(|queue| queue.is_open()).map(|queue| queue.runtime.clone())
    }

    /// Returns the handles. The caller thus does not hold the mutex while its notifications wake
    /// tasks of the registries.
    fn all(&self) -> Arc<[Invalidations]> {
        Arc::clone(&self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Arc<[Invalidations]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queue of invalidations that the lease renewer has not handled yet.
pub(crate) struct InvalidationQueue {
    state: Mutex<QueueState>,
    /// Wakes the lease renewer's task.
    pub(crate) changed: Notify,
    /// The invalidation epoch of the registry. Each invalidation of all keys increments it.
    registry_epoch: AtomicU32,
    /// Returns whether the registry has a local lock of a key. Other keys need no verification.
    has_local_lock: Box<dyn Fn(&Key) -> bool + Send + Sync>,
    /// The runtime of the registry.
    runtime: Handle,
}

#[derive(Debug, Default)]
struct QueueState {
    invalidated: Invalidated,
    /// The lease renewer has ended.
    closed: bool,
}

/// The keys that a store has reported as changed.
#[derive(Debug, Default)]
pub(crate) enum Invalidated {
    #[default]
    None,
    /// The set is ordered, so that a simulation is reproducible.
    Keys(BTreeSet<Key>),
    All,
}

impl InvalidationQueue {
    pub(crate) fn new(
        runtime: Handle,
        has_local_lock: impl Fn(&Key) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self {
            state: Mutex::default(),
            changed: Notify::new(),
            registry_epoch: 0.into(),
            has_local_lock: Box::new(has_local_lock),
            runtime,
        }
    }

    /// Makes the lease renewer verify the claim on `key`, if the registry has such a claim.
    fn push(&self, key: &Key) {
        if !(self.has_local_lock)(key) {
            return;
        }
        let mut state = self.state();
        if state.closed {
            return;
        }
        match &mut state.invalidated {
            invalidated @ Invalidated::None => {
                *invalidated = Invalidated::Keys(BTreeSet::from([key.clone()]));
                drop(state);
                self.changed.notify_one();
            }
            Invalidated::Keys(keys) => {
                if !keys.contains(key) {
                    keys.insert(key.clone());
                }
                if keys.len() > KEYS_MAX {
                    state.invalidated = Invalidated::All;
                }
            }
            Invalidated::All => {}
        }
    }

    /// Makes the lease renewer verify all held claims.
    fn push_all(&self) {
        let mut state = self.state();
        if !state.closed {
            state.invalidated = Invalidated::All;
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Empties the queue, and returns its content.
    pub(crate) fn take(&self) -> Invalidated {
        std::mem::take(&mut self.state().invalidated)
    }

    /// Returns the invalidation epoch of the registry.
    pub(crate) fn registry_epoch(&self) -> u32 {
        self.registry_epoch.load(Ordering::Relaxed)
    }

    /// Begins the next invalidation epoch of the registry.
    pub(crate) fn increment_registry_epoch(&self) {
        self.registry_epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Empties the queue, and ignores later notifications.
    pub(crate) fn close(&self) {
        *self.state() = QueueState { invalidated: Invalidated::None, closed: true };
    }

    fn is_open(&self) -> bool {
        !self.state().closed
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The invalidation epoch of one key. Two epochs differ if an invalidation arrived between them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Epoch {
    pub(crate) key: u32,
    pub(crate) registry: u32,
}

/// The maximum number of queued keys. A longer queue becomes an invalidation of all keys.
const KEYS_MAX: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Arc<InvalidationQueue> {
        Arc::new(InvalidationQueue::new(Handle::current(), |_| true))
    }

    #[tokio::test]
    async fn a_set_notifies_open_registries_and_removes_closed_registries() {
        let (set, key) = (InvalidationSet::default(), Key::new("k").unwrap());
        assert!(set.is_empty() && set.runtime().is_none());
        let (a, b, dropped) = (queue(), queue(), queue());
        for queue in [&a, &b, &dropped] {
            set.subscribe(Invalidations::new(queue));
        }
        drop(dropped);
        set.notify(&key);
        for queue in [&a, &b] {
            assert!(matches!(queue.take(), Invalidated::Keys(keys) if keys.contains(&key)));
        }
        a.close();
        set.notify_all();
        assert!(matches!(a.take(), Invalidated::None), "the registry is closed");
        assert!(matches!(b.take(), Invalidated::All));
        assert!(!set.is_empty() && set.runtime().is_some());
        b.close();
        assert!(set.is_empty() && set.runtime().is_none());
        set.subscribe(Invalidations::new(&queue()));
        assert_eq!(set.all().len(), 1, "the closed registries are removed");
    }
}
