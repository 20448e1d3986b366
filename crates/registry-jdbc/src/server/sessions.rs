//! Locks with one connection each, because only the end of a transaction releases a row lock. So
//! the number of locks is limited. Used by the row backends.
//!
//! A waiting caller has no connection: an attempt uses one and returns it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{Attempt, BackendError, Claim, Invalidations, Key, Release, Renewal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::session::{Hints, Session, Wire};

/// The sessions of all locks of one backend.
pub(crate) struct Sessions<W: Wire> {
    wire: Arc<W>,
    hints: Arc<Hints>,
    /// By lock name. Each user of a session has a clone of its `Arc`.
    open: Mutex<HashMap<Vec<u8>, Arc<Session<W>>>>,
}

impl<W: Wire> Sessions<W> {
    /// Creates the sessions without connecting.
    pub(crate) fn new(wire: W) -> Self {
        Self { wire: Arc::new(wire), hints: Arc::default(), open: Mutex::default() }
    }

    pub(crate) fn wire(&self) -> &W {
        &self.wire
    }

    pub(crate) async fn take(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.of(claim.key()).take(claim).await
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        // Concurrently, so that a connection without an answer does not delay the others.
        join_all(claims.iter().map(|claim| async {
            let session = self.of(claim.key());
            let mut answers = session.renew(std::slice::from_ref(claim)).await;
            answers.pop().unwrap_or(Ok(Renewal::Gone))
        }))
        .await
    }

    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.of(claim.key()).release(claim).await
    }

    pub(crate) fn subscribe_invalidations(&self, hints: Invalidations) {
        self.hints.add(hints);
    }

    fn of(&self, key: &Key) -> InUse<'_, W> {
        let name = self.wire.name(key);
        let mut open = self.open();
        let session = open.entry(name.clone()).or_insert_with(|| {
            Arc::new(Session::of(Arc::clone(&self.wire), Arc::clone(&self.hints)))
        });
        InUse { all: self, session: Some(Arc::clone(session)), name }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Arc<Session<W>>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W: Wire> fmt::Debug for Sessions<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("open", &self.open().len()).finish_non_exhaustive()
    }
}

/// A session in use. The last user removes it if it holds nothing.
struct InUse<'a, W: Wire> {
    all: &'a Sessions<W>,
    /// `None` only during the drop.
    session: Option<Arc<Session<W>>>,
    name: Vec<u8>,
}

impl<W: Wire> std::ops::Deref for InUse<'_, W> {
    type Target = Session<W>;

    fn deref(&self) -> &Session<W> {
        self.session.as_ref().expect("it is here until it is dropped")
    }
}

impl<W: Wire> Drop for InUse<'_, W> {
    fn drop(&mut self) {
        let mut open = self.all.open();
        drop(self.session.take());
        // Clones are created only under this lock, so the count is exact.
        let is_unused =
            |session: &Arc<Session<W>>| Arc::strong_count(session) == 1 && !session.holds();
        let unused = if open.get(&self.name).is_some_and(is_unused) {
            open.remove(&self.name)
        } else {
            None
        };
        // Sessions whose lock has ended without a release.
        let forgotten: Vec<_> = if open.len() > FORGOTTEN_MAX {
            open.extract_if(|_, session| is_unused(session)).collect()
        } else {
            Vec::new()
        };
        drop(open);
        drop((unused, forgotten));
    }
}

/// A limited number of connections, one for each lock.
pub(crate) struct Places<C> {
    max: u32,
    free: Arc<Semaphore>,
    /// Connections without a lock. The most recently returned connection is last.
    idle: Mutex<Vec<(C, Instant)>>,
}

/// The permit for one connection.
pub(crate) type Place = OwnedSemaphorePermit;

impl<C> Places<C> {
    pub(crate) fn new(max: u32) -> Self {
        let permits = usize::try_from(max).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { max, free: Arc::new(Semaphore::new(permits)), idle: Mutex::default() }
    }

    /// Returns a permit, and an idle connection if one exists.
    pub(crate) fn enter(&self) -> Result<(Place, Option<C>), RowLocksExhausted> {
        let place = Arc::clone(&self.free).try_acquire_owned();
        let place = place.map_err(|_| RowLocksExhausted { locks_max: self.max })?;
        let last = self.idle().pop();
        // Firewalls drop idle connections without a notification, and the others have been idle for
        // longer.
        let silent = last.as_ref().is_some_and(|(_, since)| since.elapsed() > SILENCE_MAX);
        if silent {
            self.close_idle();
        }
        Ok((place, last.filter(|_| !silent).map(|(connection, _)| connection)))
    }

    /// Returns a connection without a lock.
    pub(crate) fn leave(&self, place: Place, connection: C) {
        let mut idle = self.idle();
        idle.push((connection, Instant::now()));
        // Connections of a past peak are closed one at a time.
        let stale = idle.first().is_some_and(|(_, since)| since.elapsed() > SILENCE_MAX);
        let stale = stale.then(|| idle.remove(0));
        drop(idle);
        drop(stale);
        // Released last, so that the next caller finds the connection.
        drop(place);
    }

    /// Closes the connections without a lock.
    pub(crate) fn close_idle(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(C, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The limit of row locks is reached. It is the [source](std::error::Error::source) of the
/// [`BackendError`] that an attempt beyond the limit returns.
///
/// A row lock occupies a connection of its own while it is held, so the number is limited. The
/// limit is `with_row_locks` of the store's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all {locks_max} row locks that may be held at once are held")]
#[non_exhaustive]
pub struct RowLocksExhausted {
    /// The maximum number of row locks that are held at once.
    pub locks_max: u32,
}

impl RowLocksExhausted {
    pub(crate) fn told(self, store: &str) -> BackendError {
        let says = format!(
            "{store}: no row lock more may be held; allow more (`row_locks`), or use leases"
        );
        BackendError::transient(says).with_source(self).as_refused()
    }
}

/// The number of sessions above which unused ones are removed.
const FORGOTTEN_MAX: usize = 64;

/// The idle time after which a connection is no longer used.
const SILENCE_MAX: Duration = Duration::from_secs(30);
