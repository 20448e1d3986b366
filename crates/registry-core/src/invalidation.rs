//! Invalidations: a store's reports that the record of a key may have changed, and the queue that
//! collects them.
//!
//! This module holds keys only. The lease renewer verifies the claims, and `lease` decides when.

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
/// A backend receives it through [`LockBackend::subscribe`](crate::LockBackend::subscribe). Clones
/// notify the same registry, and none of them keeps it alive. Calls are cheap, do not wait and
/// never panic. They may come from any thread, inside or outside a runtime, at any rate.
///
/// A hint by itself ends no lock: the store's response to the following verification does. A
/// verification is an early renewal. If the response is that the claim is gone, the lock is lost;
/// otherwise it continues unchanged. Some claims must not be renewed: their holder has disabled
/// renewal, or they have reached `max_hold`. For those, the engine requests the shortest lease that
/// the store accepts, which does not extend the lease they have. A superfluous hint therefore costs
/// one renewal, and a missing one delays the loss until the next renewal.
///
/// Only one verification of a claim runs at a time. Hints during it cause one more after its
/// response. Verifications of one claim are at least 10 ms apart. If hints continue without a
/// pause, the interval grows, up to one second or a twentieth of the lease, whichever is shorter.
/// After a store error, a verification is retried after the same pause as a renewal; a further hint
/// shortens the pause. A hint for a key that this registry does not hold costs almost nothing. If a
/// grant of that key is in flight, its claim is verified after its arrival.
///
/// A backend keeps the handles of all its registries in an [`InvalidationSet`].
#[derive(Clone)]
pub struct Invalidations(Weak<InvalidationQueue>);

impl Invalidations {
    // Upgrades to the queue only, never to the engine. Dropping the last reference
    // to the engine would drop the backend, possibly while it executes this call.
    pub(crate) fn new(queue: &Arc<InvalidationQueue>) -> Self {
        Self(Arc::downgrade(queue))
    }

    /// Makes the registry verify its claim on `key`, if it has one.
    pub fn notify(&self, key: &Key) {
        if let Some(queue) = self.0.upgrade() {
            queue.push(key);
        }
    }

    /// Makes the registry verify all its claims. For a backend that does not know what has changed,
    /// for example after a reconnect.
    pub fn notify_all(&self) {
        if let Some(queue) = self.0.upgrade() {
            queue.push_all();
        }
    }

    /// Returns whether the registry still accepts hints. Once false, it stays false: the registry
    /// or its runtime is closed or gone, and this handle can be dropped.
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
    /// Adds the handle of a registry, and removes those of closed registries.
    pub fn subscribe(&self, invalidations: Invalidations) {
        let mut all = self.lock();
        *all = all.iter().filter(|one| one.is_live()).cloned().chain([invalidations]).collect();
    }

    /// Makes all registries verify their claims on `key`.
    pub fn notify(&self, key: &Key) {
        self.all().iter().for_each(|one| one.notify(key));
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

    /// Returns the runtime of an open registry. For tasks of a backend that must not end with the
    /// runtime of the caller that starts them.
    #[must_use]
    pub fn runtime(&self) -> Option<Handle> {
        let all = self.all();
        let mut queues = all.iter().filter_map(|one| one.0.upgrade());
        queues.find(|queue| queue.is_open()).map(|queue| queue.runtime.clone())
    }

    /// Returns the handles without keeping the lock: a notification wakes a task of its registry.
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
    /// The invalidation epoch of all keys, for reports that may have been missed.
    epoch_of_all: AtomicU32,
    /// Whether the registry has a local lock for a key. Others need no verification.
    is_known: Box<dyn Fn(&Key) -> bool + Send + Sync>,
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
    /// Ordered, so that a simulation is reproducible.
    Of(BTreeSet<Key>),
    OfAll,
}

impl InvalidationQueue {
    pub(crate) fn new(
        runtime: Handle,
        is_known: impl Fn(&Key) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self {
            state: Mutex::default(),
            changed: Notify::new(),
            epoch_of_all: 0.into(),
            is_known: Box::new(is_known),
            runtime,
        }
    }

    /// Makes the lease renewer verify the claim on `key`, if there is one.
    fn push(&self, key: &Key) {
        if !(self.is_known)(key) {
            return;
        }
        let mut state = self.state();
        if state.closed {
            return;
        }
        match &mut state.invalidated {
            invalidated @ Invalidated::None => {
                *invalidated = Invalidated::Of(BTreeSet::from([key.clone()]));
                drop(state);
                self.changed.notify_one();
            }
            Invalidated::Of(keys) => {
                if !keys.contains(key) {
                    keys.insert(key.clone());
                }
                if keys.len() > KEYS_MAX {
                    state.invalidated = Invalidated::OfAll;
                }
            }
            Invalidated::OfAll => {}
        }
    }

    /// Makes the lease renewer verify all held claims.
    fn push_all(&self) {
        let mut state = self.state();
        if !state.closed {
            state.invalidated = Invalidated::OfAll;
            drop(state);
            self.changed.notify_one();
        }
    }

    pub(crate) fn take(&self) -> Invalidated {
        std::mem::take(&mut self.state().invalidated)
    }

    /// Returns the invalidation epoch of all keys.
    pub(crate) fn epoch_of_all(&self) -> u32 {
        self.epoch_of_all.load(Ordering::Relaxed)
    }

    /// Begins the next invalidation epoch of all keys.
    pub(crate) fn invalidate_all(&self) {
        self.epoch_of_all.fetch_add(1, Ordering::Relaxed);
    }

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
    pub(crate) of_key: u32,
    pub(crate) of_all: u32,
}

/// More queued keys than this count as an invalidation of all keys.
const KEYS_MAX: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Arc<InvalidationQueue> {
        Arc::new(InvalidationQueue::new(Handle::current(), |_| true))
    }

    #[tokio::test]
    async fn a_set_notifies_all_open_registries_and_drops_the_others() {
        let (set, key) = (InvalidationSet::default(), Key::new("k").unwrap());
        assert!(set.is_empty() && set.runtime().is_none());
        let (a, b, dropped) = (queue(), queue(), queue());
        for queue in [&a, &b, &dropped] {
            set.subscribe(Invalidations::new(queue));
        }
        drop(dropped);
        set.notify(&key);
        for queue in [&a, &b] {
            assert!(matches!(queue.take(), Invalidated::Of(keys) if keys.contains(&key)));
        }
        a.close();
        set.notify_all();
        assert!(matches!(a.take(), Invalidated::None), "it is closed");
        assert!(matches!(b.take(), Invalidated::OfAll));
        assert!(!set.is_empty() && set.runtime().is_some());
        b.close();
        assert!(set.is_empty() && set.runtime().is_none());
        set.subscribe(Invalidations::new(&queue()));
        assert_eq!(set.all().len(), 1, "the closed registries are removed");
    }
}
