//! Locks that each have a connection of their own, because only its end can end one of several. So there can be only so many.
//!
//! Who waits for a lock has no connection: it is asked for, and left alone.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{Attempt, BackendError, Claim, Key, LossHints, Release, Renewal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::session::{Hints, Session, Wire};

/// All locks of one backend.
pub(crate) struct Sessions<W: Wire> {
    wire: Arc<W>,
    hints: Arc<Hints>,
    /// By the names of their locks. Whoever uses one has a clone of it.
    open: Mutex<HashMap<Vec<u8>, Arc<Session<W>>>>,
}

impl<W: Wire> Sessions<W> {
    /// Connects to nothing yet.
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
        // At once: a connection that does not answer holds up no other.
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

    pub(crate) fn tell_losses(&self, hints: LossHints) {
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

/// A session that somebody asks something. The last one who has asked takes it away if nothing is held by it.
struct InUse<'a, W: Wire> {
    all: &'a Sessions<W>,
    /// `None` at the very end.
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
        // Clones are only made under this lock.
        let is_unused =
            |session: &Arc<Session<W>>| Arc::strong_count(session) == 1 && !session.holds();
        let unused = if open.get(&self.name).is_some_and(is_unused) {
            open.remove(&self.name)
        } else {
            None
        };
        // Those whose lock has ended without a word to anybody.
        let forgotten: Vec<_> = if open.len() > FORGOTTEN_MAX {
            open.extract_if(|_, session| is_unused(session)).collect()
        } else {
            Vec::new()
        };
        drop(open);
        drop((unused, forgotten));
    }
}

/// Connections for so many locks and no more.
pub(crate) struct Places<C> {
    max: u32,
    free: Arc<Semaphore>,
    /// By which nothing is held. The one that came back last is on top.
    idle: Mutex<Vec<(C, Instant)>>,
}

/// The right to have a connection.
pub(crate) type Place = OwnedSemaphorePermit;

impl<C> Places<C> {
    pub(crate) fn new(max: u32) -> Self {
        let permits = usize::try_from(max).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { max, free: Arc::new(Semaphore::new(permits)), idle: Mutex::default() }
    }

    /// A place, and a connection if there is one that nobody needs.
    pub(crate) fn enter(&self) -> Result<(Place, Option<C>), RowLocksExhausted> {
        let place = Arc::clone(&self.free).try_acquire_owned();
        let place = place.map_err(|_| RowLocksExhausted { locks_max: self.max })?;
        let last = self.idle().pop();
        // Firewalls forget connections that are silent, and the others have been for longer.
        let silent = last.as_ref().is_some_and(|(_, since)| since.elapsed() > SILENCE_MAX);
        if silent {
            self.close_idle();
        }
        Ok((place, last.filter(|_| !silent).map(|(connection, _)| connection)))
    }

    /// Gives a connection back by which nothing is held.
    pub(crate) fn leave(&self, place: Place, connection: C) {
        let mut idle = self.idle();
        idle.push((connection, Instant::now()));
        // What a crowd has left behind goes one by one.
        let stale = idle.first().is_some_and(|(_, since)| since.elapsed() > SILENCE_MAX);
        let stale = stale.then(|| idle.remove(0));
        drop(idle);
        drop(stale);
        // Only now may the next one look for a connection.
        drop(place);
    }

    /// Closes the connections by which nothing is held.
    pub(crate) fn close_idle(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(C, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As many row locks are held as are allowed. Found as the [source](std::error::Error::source) of the
/// [`BackendError`] that an attempt to take one more fails with.
///
/// A row lock takes a connection of its own for as long as it is held, so their number is limited: by
/// `with_row_locks` of the store's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all {locks_max} row locks that may be held at once are held")]
#[non_exhaustive]
pub struct RowLocksExhausted {
    /// How many may be held at once.
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

/// With more sessions than this one looks whether all of them are in use.
const FORGOTTEN_MAX: usize = 64;

/// A connection that has not been used for this long is not used again.
const SILENCE_MAX: Duration = Duration::from_secs(30);
