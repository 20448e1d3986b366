//! A connection pool for requests that each begin and end their own transaction.
//!
//! sqlx's pool is unsuitable. Each time a connection returns, a separate task of sqlx's pool pings
//! the server. sqlx also reuses connections whose last use was cancelled, even with an open
//! transaction. Here, a caller returns a connection explicitly after all its statements were
//! answered, and a connection that is not returned is closed. So no grant becomes part of an open
//! transaction, whose rollback would undo the grant.

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
/// acquisition can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionUse {
    Acquire,
    /// A renewal. Contains the shortest lease of the claims.
    Renew(Duration),
    Release,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolLimits {
    /// The number of connections, in addition to the two that are reserved for renewals and
    /// releases.
    pub(crate) connections: u32,
    /// The time limit for connecting.
    pub(crate) connect_timeout: Duration,
    /// The time limit for a connection to become free.
    pub(crate) acquire_timeout: Duration,
    /// The time limit for an answer.
    pub(crate) response_timeout: Duration,
    /// How long a statement may wait for a row on the server.
    pub(crate) row_lock_timeout: Duration,
}

impl PoolLimits {
    /// Returns the time without a response after which the connection is probably half open. For
    /// renewals it depends on the lease: they wait for no row, and several attempts must fit into
    /// the rest of the lease.
    fn late_after(&self, connection_use: ConnectionUse) -> Duration {
        let late_after = match connection_use {
            ConnectionUse::Renew(lease) => lease / LATE_LEASE_DIVISOR,
            ConnectionUse::Acquire | ConnectionUse::Release => {
                self.row_lock_timeout.saturating_add(LATE_AFTER)
            }
        };
        late_after.min(self.response_timeout)
    }
}

/// Why no connection is available. No statement was sent.
#[derive(Debug)]
pub(crate) enum PoolError {
    /// No connection became free within the time limit.
    Exhausted,
    /// No connection was established within the time limit.
    TimedOut,
    /// The server or the network returned an error.
    Sqlx(sqlx::Error),
}

/// Connections with the same options.
pub(crate) struct ConnectionPool<C: Connection> {
    options: C::Options,
    limits: PoolLimits,
    after_connect: Option<AfterConnect<C>>,
    /// The most recently returned connection is last, and is used first.
    idle: Mutex<Vec<Idle<C>>>,
    permits: Semaphore,
    renewal_permits: Semaphore,
    release_permits: Semaphore,
    /// Permits for connections that are probably half open. Such a connection exchanges its permit
    /// for one of these, so that a new connection can use the original permit.
    half_open_permits: Semaphore,
}

/// Prepares a new connection before its first use.
pub(crate) type AfterConnect<C> =
    Box<dyn for<'c> Fn(&'c mut C) -> BoxFuture<'c, Result<(), sqlx::Error>> + Send + Sync>;

struct Idle<C> {
    connection: C,
    since: Instant,
}

impl<C: Connection> ConnectionPool<C> {
    /// Creates the pool without connecting.
    pub(crate) fn new(options: C::Options, limits: PoolLimits) -> Self {
        let connections = usize::try_from(limits.connections).unwrap_or(1).max(1);
        let connections = connections.min(Semaphore::MAX_PERMITS / 2);
        Self {
            options,
            limits,
            after_connect: None,
            idle: Mutex::default(),
            permits: Semaphore::new(connections),
            renewal_permits: Semaphore::new(1),
            release_permits: Semaphore::new(1),
            half_open_permits: Semaphore::new(connections + RESERVED),
        }
    }

    /// Sets the function that prepares each new connection.
    pub(crate) fn with_after_connect(mut self, after_connect: AfterConnect<C>) -> Self {
        self.after_connect = Some(after_connect);
        self
    }

    /// Returns a connection for `connection_use`. Waits for a free one.
    pub(crate) async fn acquire(
        &self,
        connection_use: ConnectionUse,
    ) -> Result<PooledConnection<'_, C>, PoolError> {
        let permit = timeout(self.limits.acquire_timeout, self.acquire_permit(connection_use))
            .await
            .map_err(|_| PoolError::Exhausted)?;
        if let Some(idle) = self.pop() {
            let mut connection = idle.connection;
            // Firewalls drop idle connections without a notification.
            if idle.since.elapsed() < PING_AFTER_IDLE
                || matches!(timeout(PING_TIMEOUT, connection.ping()).await, Ok(Ok(())))
            {
                return Ok(PooledConnection::new(self, connection_use, permit, connection, true));
            }
            // All other connections have been idle for longer, so they have probably broken too. To
            // ping each of them could take too long.
            self.close_idle();
        }
        self.connect(connection_use, permit).await
    }

    /// Returns a new connection for `connection_use`. Closes the idle connections, because the
    /// caller has found one of them broken.
    pub(crate) async fn acquire_new(
        &self,
        connection_use: ConnectionUse,
    ) -> Result<PooledConnection<'_, C>, PoolError> {
        self.close_idle();
        let permit = timeout(self.limits.acquire_timeout, self.acquire_permit(connection_use))
            .await
            .map_err(|_| PoolError::Exhausted)?;
        self.connect(connection_use, permit).await
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
            // Errors are ignored, because the server also notices the closed socket.
            let _ = timeout(PING_TIMEOUT, idle.connection.close()).await;
        }
    }

    async fn acquire_permit(&self, connection_use: ConnectionUse) -> SemaphorePermit<'_> {
        const OPEN: &str = "no semaphore of a pool is ever closed";
        let shared = self.permits.acquire();
        let reserved = match connection_use {
            ConnectionUse::Acquire => return shared.await.expect(OPEN),
            ConnectionUse::Renew(_) => &self.renewal_permits,
            ConnectionUse::Release => &self.release_permits,
        };
        tokio::select! {
            biased;
            permit = shared => permit.expect(OPEN),
            permit = reserved.acquire() => permit.expect(OPEN),
        }
    }

    async fn connect<'a>(
        &'a self,
        connection_use: ConnectionUse,
        permit: SemaphorePermit<'a>,
    ) -> Result<PooledConnection<'a, C>, PoolError> {
        let connecting = async {
            let mut connection = C::connect_with(&self.options).await?;
            if let Some(after_connect) = &self.after_connect {
                after_connect(&mut connection).await?;
            }
            Ok(connection)
        };
        match timeout(self.limits.connect_timeout, connecting).await {
            Ok(Ok(connection)) => {
                Ok(PooledConnection::new(self, connection_use, permit, connection, false))
            }
            Ok(Err(error)) => Err(PoolError::Sqlx(error)),
            Err(_) => Err(PoolError::TimedOut),
        }
    }

    fn pop(&self) -> Option<Idle<C>> {
        self.idle().pop()
    }

    fn push(&self, connection: C) {
        let mut idle = self.idle();
        idle.push(Idle { connection, since: Instant::now() });
        // Each return closes at most one connection: the one with the longest idle time.
        let stale = idle.first().is_some_and(|oldest| oldest.since.elapsed() > IDLE_MAX);
        let stale = stale.then(|| idle.remove(0));
        drop(idle);
        drop(stale);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle<C>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// Implemented manually, because the debug output of `options` contains the password.
impl<C: Connection> fmt::Debug for ConnectionPool<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionPool")
            .field("limits", &self.limits)
            .field("idle", &self.idle().len())
            .finish_non_exhaustive()
    }
}

/// A connection in use. Dropping it closes the connection; [`release`](Self::release) returns it to
/// the pool.
pub(crate) struct PooledConnection<'a, C: Connection> {
    pool: &'a ConnectionPool<C>,
    connection_use: ConnectionUse,
    connection: C,
    was_idle: bool,
    permit: SemaphorePermit<'a>,
}

impl<'a, C: Connection> PooledConnection<'a, C> {
    fn new(
        pool: &'a ConnectionPool<C>,
        connection_use: ConnectionUse,
        permit: SemaphorePermit<'a>,
        connection: C,
        was_idle: bool,
    ) -> Self {
        Self { pool, connection_use, connection, was_idle, permit }
    }

    /// Returns the connection, and a timer for the response to a statement on it.
    pub(crate) fn split(&mut self) -> (&mut C, ResponseTimer<'a, '_, C>) {
        let Self { pool, connection_use, connection, permit, .. } = self;
        (connection, ResponseTimer { pool: *pool, connection_use: *connection_use, permit })
    }

    /// Returns whether the connection was idle before this use. Such a connection may have broken
    /// unnoticed.
    pub(crate) const fn was_idle(&self) -> bool {
        self.was_idle
    }

    /// Returns the connection to the pool. All statements must have been answered, and no
    /// transaction may be open.
    pub(crate) fn release(self) {
        self.pool.push(self.connection);
        // The permit is released after the push, so that the next caller finds the connection.
        drop(self.permit);
    }
}

/// Waits for one response.
pub(crate) struct ResponseTimer<'a, 's, C: Connection> {
    pool: &'a ConnectionPool<C>,
    connection_use: ConnectionUse,
    permit: &'s mut SemaphorePermit<'a>,
}

impl<C: Connection> ResponseTimer<'_, '_, C> {
    /// Waits for `response` up to the time limit. Returns `None` if the server did not answer.
    ///
    /// After a shorter time, it assumes that this connection is half open. The idle connections are
    /// probably half open too, so it closes them. It also permits one more connection in place of
    /// this connection. So a repeated renewal does not use one half-open connection after another.
    pub(crate) async fn wait_for<T>(self, response: impl Future<Output = T>) -> Option<T> {
        let limits = &self.pool.limits;
        let late_after = limits.late_after(self.connection_use);
        let mut response = pin!(response);
        if let Ok(response) = timeout(late_after, &mut response).await {
            return Some(response);
        }
        self.pool.close_idle();
        if let Ok(permit) = self.pool.half_open_permits.try_acquire() {
            *self.permit = permit;
        }
        timeout(limits.response_timeout.saturating_sub(late_after), response).await.ok()
    }
}

impl<C: Connection> Deref for PooledConnection<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.connection
    }
}

impl<C: Connection> DerefMut for PooledConnection<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.connection
    }
}

/// The idle time after which a connection is pinged before use.
const PING_AFTER_IDLE: Duration = Duration::from_secs(30);

/// The time limit for a ping or for closing a connection.
const PING_TIMEOUT: Duration = Duration::from_secs(1);

/// The time after which a response is late, in addition to the wait for a row.
const LATE_AFTER: Duration = Duration::from_millis(500);

/// The response to a renewal is late after the lease divided by this number. The engine repeats a
/// renewal after a sixth of the lease, and at the latest after its time-out (default: 3 s). So for
/// leases over 24 s, the engine repeats the renewal first.
const LATE_LEASE_DIVISOR: u32 = 8;

/// The number of connections that are reserved for renewals and releases.
const RESERVED: usize = 2;

/// An idle connection is closed after this time, when another connection returns to the pool.
const IDLE_MAX: Duration = Duration::from_secs(300);
