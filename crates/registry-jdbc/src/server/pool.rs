//! A connection pool for statements that are transactions of their own.
//!
//! sqlx's pool is unsuitable. It pings the server, from a separate task, each time that a
//! connection is returned. It also takes back connections whose last use was cancelled, with any
//! open transaction. Here a caller returns a connection explicitly after complete use; every other
//! connection is closed. So a forgotten transaction cannot undo a grant.

use std::fmt;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::Connection;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};

/// The purpose of a connection. Renewals and releases each have a reserved connection, which no
/// acquisition can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Errand {
    Acquire,
    /// With the shortest lease of the claims.
    Renew(Duration),
    Release,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolLimits {
    /// The number of connections, in addition to the two that are reserved for renewals and
    /// releases.
    pub(crate) connections: u32,
    /// The time limit for connecting.
    pub(crate) connect: Duration,
    /// The time limit for a connection to become free.
    pub(crate) patience: Duration,
    /// The time limit for an answer.
    pub(crate) answer: Duration,
    /// How long a statement may wait for a row on the server.
    pub(crate) row: Duration,
}

impl PoolLimits {
    /// Returns the time without an answer after which the connection is probably half open. A
    /// renewal does not wait for rows, and several attempts must fit into the rest of the lease.
    fn doubt_after(&self, errand: Errand) -> Duration {
        let doubt = match errand {
            Errand::Renew(lease) => lease / DOUBT_PART_OF_LEASE,
            Errand::Acquire | Errand::Release => self.row.saturating_add(DOUBT_AFTER),
        };
        doubt.min(self.answer)
    }
}

/// The reason why no connection is available. No statement was sent.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// All connections are busy.
    Exhausted,
    /// The server did not answer within the time limit.
    Silent,
    /// The server or the network returned an error.
    Sqlx(sqlx::Error),
}

/// Connections with the same options.
pub(crate) struct Pool<C: Connection> {
    options: C::Options,
    limits: PoolLimits,
    greet: Option<Greet<C>>,
    /// The most recently returned connection is last.
    idle: Mutex<Vec<Idle<C>>>,
    all: Semaphore,
    for_renewals: Semaphore,
    for_releases: Semaphore,
    /// For connections that are probably half open. Each exchanges its permit for one of these, so
    /// that a new connection can use the first one.
    doubtful: Semaphore,
}

/// Prepares a new connection before its first use.
pub(crate) type Greet<C> =
    Box<dyn for<'c> Fn(&'c mut C) -> BoxFuture<'c, Result<(), sqlx::Error>> + Send + Sync>;

struct Idle<C> {
    connection: C,
    since: Instant,
}

impl<C: Connection> Pool<C> {
    /// Creates the pool without connecting.
    pub(crate) fn new(options: C::Options, limits: PoolLimits) -> Self {
        let connections = usize::try_from(limits.connections).unwrap_or(1).max(1);
        let connections = connections.min(Semaphore::MAX_PERMITS / 2);
        Self {
            options,
            limits,
            greet: None,
            idle: Mutex::default(),
            all: Semaphore::new(connections),
            for_renewals: Semaphore::new(1),
            for_releases: Semaphore::new(1),
            doubtful: Semaphore::new(connections + KEPT),
        }
    }

    /// Sets what prepares each new connection.
    pub(crate) fn with_greeting(mut self, greet: Greet<C>) -> Self {
        self.greet = Some(greet);
        self
    }

    /// Returns a connection for `errand`. Waits for a free one.
    pub(crate) async fn enter(&self, errand: Errand) -> Result<Seat<'_, C>, Refusal> {
        let permit = timeout(self.limits.patience, self.permit(errand))
            .await
            .map_err(|_| Refusal::Exhausted)?;
        if let Some(idle) = self.pop() {
            let mut connection = idle.connection;
            // Firewalls drop idle connections without a notification.
            if idle.since.elapsed() < SILENCE_MAX
                || matches!(timeout(PING_LIMIT, connection.ping()).await, Ok(Ok(())))
            {
                return Ok(Seat::new(self, errand, permit, connection, true));
            }
            // The other connections have been idle for longer. Without an answer, pinging each
            // would take too long.
            self.close_idle();
        }
        self.connect(errand, permit).await
    }

    /// Returns a new connection for `errand`. Closes the idle ones, because the caller has found
    /// one of them broken.
    pub(crate) async fn enter_anew(&self, errand: Errand) -> Result<Seat<'_, C>, Refusal> {
        self.close_idle();
        let permit = timeout(self.limits.patience, self.permit(errand))
            .await
            .map_err(|_| Refusal::Exhausted)?;
        self.connect(errand, permit).await
    }

    /// Closes the idle connections.
    pub(crate) fn close_idle(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    /// Closes the idle connections, and sends the server a termination message for each.
    pub(crate) async fn close(&self) {
        let idle = std::mem::take(&mut *self.idle());
        for idle in idle {
            // The server notices the closed connection anyway.
            let _ = timeout(PING_LIMIT, idle.connection.close()).await;
        }
    }

    async fn permit(&self, errand: Errand) -> SemaphorePermit<'_> {
        const OPEN: &str = "no semaphore of a pool is ever closed";
        let all = self.all.acquire();
        let kept = match errand {
            Errand::Acquire => return all.await.expect(OPEN),
            Errand::Renew(_) => &self.for_renewals,
            Errand::Release => &self.for_releases,
        };
        tokio::select! {
            biased;
            permit = all => permit.expect(OPEN),
            permit = kept.acquire() => permit.expect(OPEN),
        }
    }

    async fn connect<'a>(
        &'a self,
        errand: Errand,
        permit: SemaphorePermit<'a>,
    ) -> Result<Seat<'a, C>, Refusal> {
        let greeted = async {
            let mut connection = C::connect_with(&self.options).await?;
            if let Some(greet) = &self.greet {
                greet(&mut connection).await?;
            }
            Ok(connection)
        };
        match timeout(self.limits.connect, greeted).await {
            Ok(Ok(connection)) => Ok(Seat::new(self, errand, permit, connection, false)),
            Ok(Err(error)) => Err(Refusal::Sqlx(error)),
            Err(_) => Err(Refusal::Silent),
        }
    }

    fn pop(&self) -> Option<Idle<C>> {
        self.idle().pop()
    }

    fn push(&self, connection: C) {
        let mut idle = self.idle();
        idle.push(Idle { connection, since: Instant::now() });
        // Connections of a past peak are closed one at a time.
        let stale = idle.first().is_some_and(|oldest| oldest.since.elapsed() > IDLE_MAX);
        let stale = stale.then(|| idle.remove(0));
        drop(idle);
        drop(stale);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle<C>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// Implemented manually: the options contain a password and print it.
impl<C: Connection> fmt::Debug for Pool<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("limits", &self.limits)
            .field("idle", &self.idle().len())
            .finish_non_exhaustive()
    }
}

/// A connection in use. Dropping it closes the connection; [`leave`](Self::leave) returns it to the
/// pool.
pub(crate) struct Seat<'a, C: Connection> {
    pool: &'a Pool<C>,
    errand: Errand,
    connection: C,
    was_idle: bool,
    permit: SemaphorePermit<'a>,
}

impl<'a, C: Connection> Seat<'a, C> {
    fn new(
        pool: &'a Pool<C>,
        errand: Errand,
        permit: SemaphorePermit<'a>,
        connection: C,
        was_idle: bool,
    ) -> Self {
        Self { pool, errand, connection, was_idle, permit }
    }

    /// Returns the connection, and a watch for the answer to a statement on it.
    pub(crate) fn ask(&mut self) -> (&mut C, Watch<'a, '_, C>) {
        let Self { pool, errand, connection, permit, .. } = self;
        (connection, Watch { pool: *pool, errand: *errand, permit })
    }

    /// Returns whether the connection was idle before, so that it may have broken meanwhile.
    pub(crate) const fn was_idle(&self) -> bool {
        self.was_idle
    }

    /// Returns the connection to the pool. All statements must have been answered, and no
    /// transaction may be open.
    pub(crate) fn leave(self) {
        self.pool.push(self.connection);
        // Released last, so that the next caller finds the connection.
        drop(self.permit);
    }
}

/// Waits for one answer.
pub(crate) struct Watch<'a, 's, C: Connection> {
    pool: &'a Pool<C>,
    errand: Errand,
    permit: &'s mut SemaphorePermit<'a>,
}

impl<C: Connection> Watch<'_, '_, C> {
    /// Waits for `answer` up to the time limit. Returns `None` if the server did not answer.
    ///
    /// After a shorter time it assumes that the connection is half open. The idle connections are
    /// as old, so it closes them, and it permits one more connection in place of this one. So a
    /// repeated renewal does not meet one half-open connection after the other.
    pub(crate) async fn answered<T>(self, answer: impl Future<Output = T>) -> Option<T> {
        let limits = &self.pool.limits;
        let doubt = limits.doubt_after(self.errand);
        let mut answer = pin!(answer);
        if let Ok(answer) = timeout(doubt, &mut answer).await {
            return Some(answer);
        }
        self.pool.close_idle();
        if let Ok(permit) = self.pool.doubtful.try_acquire() {
            *self.permit = permit;
        }
        timeout(limits.answer.saturating_sub(doubt), answer).await.ok()
    }
}

impl<C: Connection> Deref for Seat<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.connection
    }
}

impl<C: Connection> DerefMut for Seat<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.connection
    }
}

/// The idle time after which a connection is pinged before use.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// The time limit for a ping or for closing a connection.
const PING_LIMIT: Duration = Duration::from_secs(1);

/// The time after which an answer is late, in addition to the wait for a row.
const DOUBT_AFTER: Duration = Duration::from_millis(500);

/// The answer to a renewal is late after the lease divided by this number, which is before the
/// engine repeats the renewal.
const DOUBT_PART_OF_LEASE: u32 = 8;

/// The number of connections that are reserved for renewals and releases.
const KEPT: usize = 2;

/// The idle time after which a connection is closed.
const IDLE_MAX: Duration = Duration::from_secs(300);
