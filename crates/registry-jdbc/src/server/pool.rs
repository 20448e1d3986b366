//! Connections to a server, for statements that are transactions of their own.
//!
//! sqlx's pool is not used: it asks the server a question more each time that a connection comes back, from a task of its own, and it
//! takes back connections whose last use was dropped half-way, with whatever that left open. Here a connection comes back only from
//! whoever says that its use is complete; every other one is closed. So a transaction that somebody forgot cannot swallow a grant.

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

/// What a connection is wanted for. Whatever acquisitions do, renewals and releases get through: each has a connection that
/// no acquisition can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Errand {
    Acquire,
    /// Of claims with this lease.
    Renew(Duration),
    Release,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolLimits {
    /// How many connections there are, besides the two that are kept for renewals and releases.
    pub(crate) connections: u32,
    /// How long connecting may take.
    pub(crate) connect: Duration,
    /// How long one waits for a connection to come free.
    pub(crate) patience: Duration,
    /// How long an answer may take.
    pub(crate) answer: Duration,
    /// How long a statement may wait for a row on the server.
    pub(crate) row: Duration,
}

impl PoolLimits {
    /// After this time without an answer the connection is probably half open. A renewal waits for no row, and several tries must
    /// fit into the rest of the lease.
    fn doubt_after(&self, errand: Errand) -> Duration {
        let doubt = match errand {
            Errand::Renew(lease) => lease / DOUBT_PART_OF_LEASE,
            Errand::Acquire | Errand::Release => self.row.saturating_add(DOUBT_AFTER),
        };
        doubt.min(self.answer)
    }
}

/// Why there is no connection. Nothing was sent.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// All of them are at work.
    Exhausted,
    /// The server did not answer in time.
    Silent,
    /// The server, or the way to it, said no.
    Sqlx(sqlx::Error),
}

/// Connections of one kind to one place.
pub(crate) struct Pool<C: Connection> {
    options: C::Options,
    limits: PoolLimits,
    greet: Option<Greet<C>>,
    /// The one that came back last is on top.
    idle: Mutex<Vec<Idle<C>>>,
    all: Semaphore,
    for_renewals: Semaphore,
    for_releases: Semaphore,
    /// For connections that are probably half open: each leaves its place among the others to one that works.
    doubtful: Semaphore,
}

/// Tells a new connection what it has to know before it is used.
pub(crate) type Greet<C> =
    Box<dyn for<'c> Fn(&'c mut C) -> BoxFuture<'c, Result<(), sqlx::Error>> + Send + Sync>;

struct Idle<C> {
    connection: C,
    since: Instant,
}

impl<C: Connection> Pool<C> {
    /// Connects to nothing yet.
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

    /// The same with connections that are told this before they are used.
    pub(crate) fn with_greeting(mut self, greet: Greet<C>) -> Self {
        self.greet = Some(greet);
        self
    }

    /// A connection for `errand`, when there is one.
    pub(crate) async fn enter(&self, errand: Errand) -> Result<Seat<'_, C>, Refusal> {
        let permit = timeout(self.limits.patience, self.permit(errand))
            .await
            .map_err(|_| Refusal::Exhausted)?;
        if let Some(idle) = self.pop() {
            let mut connection = idle.connection;
            // Firewalls forget connections that are silent.
            if idle.since.elapsed() < SILENCE_MAX
                || matches!(timeout(PING_LIMIT, connection.ping()).await, Ok(Ok(())))
            {
                return Ok(Seat::new(self, errand, permit, connection, true));
            }
            // The others have been silent for longer; to ask them all would take long if nobody answers.
            self.close_idle();
        }
        self.connect(errand, permit).await
    }

    /// A new connection for `errand`. Those that wait for work are closed: whoever asks has found one of them broken.
    pub(crate) async fn enter_anew(&self, errand: Errand) -> Result<Seat<'_, C>, Refusal> {
        self.close_idle();
        let permit = timeout(self.limits.patience, self.permit(errand))
            .await
            .map_err(|_| Refusal::Exhausted)?;
        self.connect(errand, permit).await
    }

    /// Closes the connections that are not at work.
    pub(crate) fn close_idle(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    /// Closes the connections that are not at work, and says so to the server.
    pub(crate) async fn close(&self) {
        let idle = std::mem::take(&mut *self.idle());
        for idle in idle {
            // The server notices anyway.
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
        // What a crowd has left behind goes one by one.
        let stale = idle.first().is_some_and(|oldest| oldest.since.elapsed() > IDLE_MAX);
        let stale = stale.then(|| idle.remove(0));
        drop(idle);
        drop(stale);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle<C>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// By hand: the options hold a password, and print it.
impl<C: Connection> fmt::Debug for Pool<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("limits", &self.limits)
            .field("idle", &self.idle().len())
            .finish_non_exhaustive()
    }
}

/// A connection at work. Closed when it is dropped; see [`leave`](Self::leave).
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

    /// The connection, and what watches over the answer to a statement on it.
    pub(crate) fn ask(&mut self) -> (&mut C, Watch<'a, '_, C>) {
        let Self { pool, errand, connection, permit, .. } = self;
        (connection, Watch { pool: *pool, errand: *errand, permit })
    }

    /// Whether it was connected before, so that it may have broken since.
    pub(crate) const fn was_idle(&self) -> bool {
        self.was_idle
    }

    /// Says that the use is complete: all that was asked has been answered, and no transaction is open.
    pub(crate) fn leave(self) {
        self.pool.push(self.connection);
        // Only now may the next one look for a connection.
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
    /// Waits for `answer` as long as it may take. `None` when the server was silent for all that time.
    ///
    /// Before that it comes to doubt the connection. The peer of a half-open connection says nothing, and the idle connections
    /// are as old: they are closed, and another connection may be opened in the place of this one. So a renewal that is repeated
    /// does not meet one half-open connection after the other.
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

/// A connection that has not been used for this long is asked whether it is alive.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long it may take to answer that.
const PING_LIMIT: Duration = Duration::from_secs(1);

/// An answer that takes longer than this, besides the wait for a row, makes the connection doubtful.
const DOUBT_AFTER: Duration = Duration::from_millis(500);

/// The answer to a renewal makes it so after this part of the lease: sooner than the engine repeats it.
const DOUBT_PART_OF_LEASE: u32 = 8;

/// The connections that are kept for renewals and releases.
const KEPT: usize = 2;

/// A connection that nobody needs for this long is closed.
const IDLE_MAX: Duration = Duration::from_secs(300);
