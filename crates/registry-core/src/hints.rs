//! How a store that hears of changes by itself has the engine look after a claim at once. Knows keys only; the looking is
//! done by the keeper.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use crate::keeper::Shared;
use crate::key::Key;

/// Tells one registry that the record of a key may not be what it was, so that it asks the store at once instead of at its
/// next renewal.
///
/// Given to [`LockBackend::tell_losses`](crate::LockBackend::tell_losses). Clones tell the same registry, and none keeps it
/// alive. Every call is cheap, waits for nothing, never panics, and may come from any thread, inside or outside a runtime,
/// at any rate.
///
/// A hint decides nothing: what the store answers to the renewal that follows does. A hint too many costs that renewal; one
/// too few costs the time until the next renewal.
#[derive(Clone)]
pub struct LossHints(Weak<Shared>);

impl LossHints {
    pub(crate) fn new(keeper: Weak<Shared>) -> Self {
        Self(keeper)
    }

    /// Has the registry look after what it holds on `key`, if anything.
    pub fn look_at(&self, key: &Key) {
        if let Some(keeper) = self.0.upgrade() {
            keeper.hear(|news| _ = news.keys.insert(key.clone()));
        }
    }

    /// Has the registry look after everything that it holds. For changes that nobody can tell any more, as after a connection
    /// was lost.
    pub fn look_at_all(&self) {
        if let Some(keeper) = self.0.upgrade() {
            keeper.hear(|news| news.all = true);
        }
    }

    /// Whether the registry still listens. False once it is closed or gone, and from then on: this handle can be dropped.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.0.upgrade().is_some_and(|keeper| keeper.listens())
    }
}

impl fmt::Debug for LossHints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossHints").field("is_live", &self.is_live()).finish()
    }
}

/// What has been heard and not been acted on yet.
#[derive(Debug, Default)]
pub(crate) struct News {
    keys: HashSet<Key>,
    all: bool,
}

impl News {
    pub(crate) fn is_about(&self, key: &Key) -> bool {
        self.all || self.keys.contains(key)
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.all && self.keys.is_empty()
    }
}

/// Where news waits for the keeper.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<News>);

impl Inbox {
    pub(crate) fn put(&self, note: impl FnOnce(&mut News)) {
        note(&mut self.news());
    }

    pub(crate) fn take(&self) -> News {
        std::mem::take(&mut *self.news())
    }

    fn news(&self) -> MutexGuard<'_, News> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
