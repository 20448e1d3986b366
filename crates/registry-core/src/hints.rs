//! How a store that hears of changes by itself has held claims looked after at once. Knows keys only, and decides nothing: the
//! keeper looks, and `lease` says when.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use crate::keeper::Shared;
use crate::key::Key;

/// Tells one registry that the record of a key may not be what it was, so that it asks the store at once and not at its next
/// renewal.
///
/// A backend gets it by [`LockBackend::tell_losses`](crate::LockBackend::tell_losses). Clones tell the same registry, and none
/// keeps it alive. Calls are cheap, wait for nothing and never panic. They may come from any thread, inside or outside a
/// runtime, at any rate.
///
/// A hint decides nothing: what the store answers to the look that follows does. A look is a renewal, before its time. The lock is lost
/// if the answer is that the claim is gone, and otherwise goes on as it was. A claim that is not to be renewed, because its holder does
/// not want that or it has reached its `max_hold`, is looked after by asking for as little time as the store takes, which does
/// not make its lease longer. So a hint too many costs a renewal, and one too few the time until the next.
///
/// There is one look at a time: hints that come during it lead to one more when it is answered. Looks at one claim are at least 10 ms
/// apart; where hints never end, further and further, up to a second or a twentieth of the lease. If the store fails they are
/// repeated as rarely as renewals are. A hint for a key that this registry does not hold costs next to nothing; if the grant is
/// on its way just then, it is looked after when it has come.
///
/// # Examples
/// ```
/// # use std::sync::{Mutex, PoisonError};
/// # use registry_core::{Key, LossHints};
/// /// The registries over one backend.
/// #[derive(Debug, Default)]
/// struct Listeners(Mutex<Vec<LossHints>>);
///
/// impl Listeners {
///     // Called by `LockBackend::tell_losses`.
///     fn add(&self, hints: LossHints) {
///         let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
///         all.retain(LossHints::is_live);
///         all.push(hints);
///     }
///
///     // Called when the store tells that somebody has deleted the record of `key`.
///     fn deleted(&self, key: &Key) {
///         let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
///         all.iter().for_each(|hints| hints.look_at(key));
///     }
///
///     // Called when the store may have told something that did not arrive.
///     fn connected_again(&self) {
///         let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
///         all.iter().for_each(LossHints::look_at_all);
///     }
/// }
/// ```
#[derive(Clone)]
pub struct LossHints(Weak<Shared>);

impl LossHints {
    // What is upgraded here for a moment is the keeper's part, never the engine: the last one to have that would drop the
    // backend, perhaps in the midst of it.
    pub(crate) fn new(keeper: Weak<Shared>) -> Self {
        Self(keeper)
    }

    /// Has the registry look after what it holds on `key`, if anything.
    pub fn look_at(&self, key: &Key) {
        if let Some(keeper) = self.0.upgrade() {
            keeper.hear_of(key);
        }
    }

    /// Has the registry look after everything that it holds. For when it is not known what has changed, as after a connection
    /// was lost and made again.
    pub fn look_at_all(&self) {
        if let Some(keeper) = self.0.upgrade() {
            keeper.hear_of_all();
        }
    }

    /// Whether both notify the same registry.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.0.ptr_eq(&other.0)
    }

    /// Whether the registry still listens. False, and false for ever, once it is closed or gone, or its runtime is: then this
    /// handle is of no more use.
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

/// News that the keeper has not seen yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<Letters>);

#[derive(Debug, Default)]
struct Letters {
    news: News,
    /// Nobody looks here any more.
    closed: bool,
}

/// What a store has told by itself.
#[derive(Debug, Default)]
pub(crate) enum News {
    #[default]
    None,
    /// In an order of their own, so that a simulation goes the same way each time.
    Of(BTreeSet<Key>),
    OfAll,
}

impl Inbox {
    /// Puts in news of `key`. True if the keeper has to be called: it has not been yet.
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

    /// Puts in news that may concern every key. True if the keeper has to be called.
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

/// How much has been heard of one key. Two marks that differ were taken before and after a hint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NewsMark {
    pub(crate) of_key: u32,
    pub(crate) of_all: u32,
}

/// More keys than this, in the time that the keeper takes to come round, count as all.
const KEYS_MAX: usize = 10_000;
