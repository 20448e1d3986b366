//! The sessions of row locks. Each lock has its own session and connection, because only the end of
//! a transaction releases a row. So the number of locks is limited. Used by backends in mode `Row`.
//!
//! A waiting caller has no connection: each attempt takes a connection from a pool, and returns it
//! unless the lock is granted.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{
    Attempt, BackendError, Claim, InvalidationSet, Invalidations, Key, Release, Renewal,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::session::{SessionProtocol, SqlSession};

/// The sessions of a backend in mode `Row`, one for each lock.
pub(crate) struct RowLockSessions<P: SessionProtocol> {
    protocol: Arc<P>,
    subscribers: Arc<InvalidationSet>,
    /// The sessions by lock name. Each [`SessionRef`] has a clone of its session's `Arc`.
    sessions: Mutex<HashMap<Vec<u8>, Arc<SqlSession<P>>>>,
}

impl<P: SessionProtocol> RowLockSessions<P> {
    /// Creates the sessions without connecting.
    pub(crate) fn new(protocol: P) -> Self {
        Self {
            protocol: Arc::new(protocol),
            subscribers: Arc::default(),
            sessions: Mutex::default(),
        }
    }

    pub(crate) fn protocol(&self) -> &P {
        &self.protocol
    }

    pub(crate) async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.session_for(claim.key()).try_acquire(claim).await
    }

    pub(crate) async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        // The renewals run concurrently, so that a connection without an answer does not delay
        // other renewals.
        join_all(claims.iter().map(|claim| async {
            let session = self.session_for(claim.key());
            let mut responses = session.renew(std::slice::from_ref(claim)).await;
            responses.pop().unwrap_or(Ok(Renewal::Gone))
        }))
        .await
    }

    pub(crate) async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.session_for(claim.key()).release(claim).await
    }

    pub(crate) fn subscribe_invalidations(&self, invalidations: Invalidations) {
        self.subscribers.subscribe(invalidations);
    }

    fn session_for(&self, key: &Key) -> SessionRef<'_, P> {
        let name = self.protocol.lock_name(key);
        let mut sessions = self.sessions();
        let session = sessions.entry(name.clone()).or_insert_with(|| {
            Arc::new(SqlSession::with_subscribers(
                Arc::clone(&self.protocol),
                Arc::clone(&self.subscribers),
            ))
        });
        SessionRef { parent: self, session: Some(Arc::clone(session)), name }
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Arc<SqlSession<P>>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: SessionProtocol> fmt::Debug for RowLockSessions<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowLockSessions")
            .field("sessions", &self.sessions().len())
            .finish_non_exhaustive()
    }
}

/// A session in use. Dropping the last reference removes the session, unless it holds a lock.
struct SessionRef<'a, P: SessionProtocol> {
    parent: &'a RowLockSessions<P>,
    /// `None` only during the drop.
    session: Option<Arc<SqlSession<P>>>,
    name: Vec<u8>,
}

impl<P: SessionProtocol> std::ops::Deref for SessionRef<'_, P> {
    type Target = SqlSession<P>;

    fn deref(&self) -> &SqlSession<P> {
        self.session.as_ref().expect("the session is present until the drop")
    }
}

impl<P: SessionProtocol> Drop for SessionRef<'_, P> {
    fn drop(&mut self) {
        let mut sessions = self.parent.sessions();
        drop(self.session.take());
        // Clones are created only under this mutex, so the count is exact.
        let is_unused = |session: &Arc<SqlSession<P>>| {
            Arc::strong_count(session) == 1 && !session.holds_locks()
        };
        let unused = if sessions.get(&self.name).is_some_and(is_unused) {
            sessions.remove(&self.name)
        } else {
            None
        };
        // A lock that ended without a release leaves an unused session.
        let expired: Vec<_> = if sessions.len() > UNUSED_SESSIONS_MAX {
            sessions.extract_if(|_, session| is_unused(session)).collect()
        } else {
            Vec::new()
        };
        drop(sessions);
        drop((unused, expired));
    }
}

/// A pool of connections for row locks. Each held lock and each running attempt uses one
/// connection.
pub(crate) struct RowLockPool<C> {
    max: u32,
    permits: Arc<Semaphore>,
    /// Connections without a lock. The most recently returned connection is last.
    idle: Mutex<Vec<(C, Instant)>>,
}

/// The permit for one connection.
pub(crate) type RowLockPermit = OwnedSemaphorePermit;

impl<C> RowLockPool<C> {
    pub(crate) fn new(max: u32) -> Self {
        let permits = usize::try_from(max).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { max, permits: Arc::new(Semaphore::new(permits)), idle: Mutex::default() }
    }

    /// Returns a permit, and a connection that was idle for at most [`IDLE_MAX`], if one exists.
    pub(crate) fn acquire(&self) -> Result<(RowLockPermit, Option<C>), RowLocksExhausted> {
        let permit = Arc::clone(&self.permits).try_acquire_owned();
        let permit = permit.map_err(|_| RowLocksExhausted { locks_max: self.max })?;
        let last = self.idle().pop();
        // Firewalls drop idle connections without a notification. All other connections have been
        // idle for longer, so they are closed too.
        let is_stale = last.as_ref().is_some_and(|(_, since)| since.elapsed() > IDLE_MAX);
        if is_stale {
            self.close_idle();
        }
        Ok((permit, last.filter(|_| !is_stale).map(|(connection, _)| connection)))
    }

    /// Puts a connection back into the pool. The connection must hold no lock.
    pub(crate) fn release(&self, permit: RowLockPermit, connection: C) {
        let mut idle = self.idle();
        idle.push((connection, Instant::now()));
        // Each return closes at most one connection: the one with the longest idle time.
        let stale = idle.first().is_some_and(|(_, since)| since.elapsed() > IDLE_MAX);
        let stale = stale.then(|| idle.remove(0));
        drop(idle);
        drop(stale);
        // The permit is released after the push, so that the next caller finds the connection.
        drop(permit);
    }

    /// Closes the connections that hold no lock.
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
/// Each held row lock and each running attempt occupies a connection, so their number is limited.
/// The limit is `with_row_locks` of the store's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the limit of {locks_max} row locks is reached")]
#[non_exhaustive]
pub struct RowLocksExhausted {
    /// The maximum number of held row locks and running attempts together.
    pub locks_max: u32,
}

impl RowLocksExhausted {
    pub(crate) fn into_backend_error(self, store: &str) -> BackendError {
        let message = format!(
            "{store}: the limit of {} row locks (`row_locks`) is reached; raise it, or use leases",
            self.locks_max
        );
        BackendError::transient(message).with_source(self).as_refused()
    }
}

/// The number of sessions above which all unused sessions are removed.
const UNUSED_SESSIONS_MAX: usize = 64;

/// The idle time after which a connection is no longer used.
const IDLE_MAX: Duration = Duration::from_secs(30);
