//! Invalidations: a store's reports that the record of a key may have changed, and the queue that
//! collects them.
//!
//! This module holds keys only. The lease renewer verifies the claims, and `lease` decides when.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use crate::keeper::Shared;
use crate::key::Key;

/// The handle by which a backend notifies one registry that the record of a key may have changed.
/// The registry then verifies its claim at once instead of at its next renewal.
///
/// A backend receives it through [`LockBackend::subscribe_invalidations`](crate::LockBackend::subscribe_invalidations).
/// Clones notify the same registry, and none of them keeps it alive. Calls are cheap, do not wait
/// and never panic. They may come from any thread, inside or outside a runtime, at any rate.
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
/// # Examples
/// ```
/// # use std::sync::{Mutex, PoisonError};
/// # use registry_core::{Key, Invalidations};
/// /// The registries over one backend.
/// #[derive(Debug, Default)]
/// struct Listeners(Mutex<Vec<Invalidations>>);
///
/// impl Listeners {
///     // Called by `LockBackend::subscribe_invalidations`.
///     fn add(&self, hints: Invalidations) {
///         let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
///         all.retain(Invalidations::is_live);
///         all.push(hints);
///     }
///
///     // Called when the store tells that somebody has deleted the record of `key`.
///     fn deleted(&self, key: &Key) {
///         let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
///         all.iter().for_each(|hints| hints.notify(key));
///     }
///
///     // Called when the store may have told something that did not arrive.
///     fn connected_again(&self) {
///         let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
///         all.iter().for_each(Invalidations::notify_all);
///     }
/// }
/// ```
#[derive(Clone)]
pub struct Invalidations(Weak<Shared>);

impl Invalidations {
    // Upgrades to the lease renewer's part only, never to the engine. Dropping the last reference
    // to the engine would drop the backend, possibly while it executes this call.
    pub(crate) fn new(keeper: Weak<Shared>) -> Self {
        Self(keeper)
    }

    /// Makes the registry verify its claim on `key`, if it has one.
    pub fn notify(&self, key: &Key) {
        if let Some(keeper) = self.0.upgrade() {
            keeper.hear_of(key);
        }
    }

    /// Makes the registry verify all its claims. For a backend that does not know what has changed,
    /// for example after a reconnect.
    pub fn notify_all(&self) {
        if let Some(keeper) = self.0.upgrade() {
            keeper.hear_of_all();
        }
    }

    /// Returns whether both notify the same registry.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.0.ptr_eq(&other.0)
    }

    /// Returns whether the registry still accepts hints. Once false, it stays false: the registry
    /// or its runtime is closed or gone, and this handle can be dropped.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.0.upgrade().is_some_and(|keeper| keeper.listens())
    }
}

impl fmt::Debug for Invalidations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidations").field("is_live", &self.is_live()).finish()
    }
}

/// The queue of invalidations that the lease renewer has not handled yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<Letters>);

#[derive(Debug, Default)]
struct Letters {
    news: News,
    /// The lease renewer has ended.
    closed: bool,
}

/// The keys that a store has reported as changed.
#[derive(Debug, Default)]
pub(crate) enum News {
    #[default]
    None,
    /// Ordered, so that a simulation is reproducible.
    Of(BTreeSet<Key>),
    OfAll,
}

impl Inbox {
    /// Adds `key`. Returns true if the lease renewer must be woken, because the queue was empty.
    pub(crate) fn put(&self, key: &Key) -> bool {
        let mut letters = self.letters();
        if letters.closed {
            return false;
        }
        match &mut letters.news {
            news @ News::None => {
                *news = News::Of(BTreeSet::from([key.clone()]));
                true
            }
            News::Of(keys) => {
                if !keys.contains(key) {
                    keys.insert(key.clone());
                }
                if keys.len() > KEYS_MAX {
                    letters.news = News::OfAll;
                }
                false
            }
            News::OfAll => false,
        }
    }

    /// Adds all keys. Returns true if the lease renewer must be woken.
    pub(crate) fn put_all(&self) -> bool {
        let mut letters = self.letters();
        !letters.closed && matches!(std::mem::replace(&mut letters.news, News::OfAll), News::None)
    }

    pub(crate) fn take(&self) -> News {
        std::mem::take(&mut self.letters().news)
    }

    pub(crate) fn close(&self) {
        *self.letters() = Letters { news: News::None, closed: true };
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.letters().closed
    }

    fn letters(&self) -> MutexGuard<'_, Letters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The invalidation epoch of one key. Two epochs differ if an invalidation arrived between them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NewsMark {
    pub(crate) of_key: u32,
    pub(crate) of_all: u32,
}

/// More queued keys than this count as an invalidation of all keys.
const KEYS_MAX: usize = 10_000;
