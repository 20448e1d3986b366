//! The listener: wakes waiting callers when a release notification arrives. It has one connection
//! and one task while callers wait, and knows nothing of locks.
//!
//! A notification can be lost with its connection, so every reconnect wakes all waiting callers.
//! The engine also polls, so no wait relies on notifications alone. The listener receives all
//! releases of a namespace and remembers the latest. So it does not miss a release between the
//! answer "busy" and the wait.
//!
//! A notification costs the server more than the rest of a release, because the server serialises
//! the transactions that send one. So each listener holds advisory locks, and a release without
//! listeners sends no notification; see [`Channel`].

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fmt::Write as _;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::BackendError;
use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::error;

/// The lock that a notification is about.
type Lock = [u8; 16];

/// The notification channel of one namespace, and the advisory locks (marks) that show whether
/// anything listens.
///
/// A listener's session holds all marks of the channel in shared mode. A release tries to take one
/// mark exclusively until its transaction ends. If that fails, a listener exists. If it succeeds, a
/// new listener obtains its marks only after the release is visible, and its waiting callers then
/// check the lock. Two simultaneous releases may take each other for a listener, which costs one
/// notification. Several marks make that rare.
#[derive(Debug, Clone)]
pub(super) struct Channel {
    name: String,
    first_mark: i64,
}

impl Channel {
    /// Returns the channel of the part of the store with this hash.
    pub(super) fn of(part: [u8; 8]) -> Self {
        // The name contains all eight bytes, the marks all but the last bits.
        let first_mark = i64::from_be_bytes(part) & !(MARKS - 1);
        Self { name: format!("lock_registry_{}", hex(&part)), first_mark }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the mark that a release of this lock tries to take exclusively.
    pub(super) fn mark(&self, lock: Lock) -> i64 {
        self.first_mark + i64::from(lock[0]) % MARKS
    }

    /// Listens to the channel, and takes the marks for this session.
    async fn listen(&self, listener: &mut PgListener) -> Result<(), sqlx::Error> {
        listener.listen(&self.name).await?;
        let marks =
            "SELECT pg_advisory_lock_shared(mark) FROM generate_series($1, $1 + $2 - 1) AS mark";
        let marks = sqlx::query(marks).bind(self.first_mark).bind(MARKS);
        listener.execute(marks).await.map(drop)
    }
}

/// The number of marks, a power of two. Each listener takes as many entries in the server's lock
/// table.
const MARKS: i64 = 16;

pub(super) struct Ears {
    server: PgConnectOptions,
    channel: Channel,
    table: Arc<Table>,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Table {
    heard: Mutex<Heard>,
}

#[derive(Default)]
struct Heard {
    /// The sequence number of the last notification or start of listening.
    count: u64,
    /// The number since which no notification was missed. `None` while the listener is not
    /// connected.
    since: Option<u64>,
    /// The connection has received its own probe. Behind a pooler that changes connections it never
    /// does.
    proven: bool,
    /// The latest releases with their sequence numbers.
    releases: VecDeque<(u64, Lock)>,
    waiting: HashMap<Lock, Waiting>,
    /// A task runs that has not yet decided to end.
    is_attended: bool,
}

/// The waiting callers of one lock.
#[derive(Default)]
struct Waiting {
    woken: Arc<Notify>,
    count: usize,
}

impl Ears {
    /// Creates a listener for `channel`. It connects when the first caller waits.
    pub(super) fn new(server: PgConnectOptions, channel: Channel) -> Self {
        Self { server, channel, table: Arc::default(), task: Mutex::default() }
    }

    /// Returns the current position, for [`wait`](Self::wait). Read it before a query whose answer
    /// a release may make obsolete.
    pub(super) fn moment(&self) -> u64 {
        self.table.heard().count
    }

    /// Returns when the lock may have been released after `moment`. If the listener was not
    /// connected then, returns as soon as it is.
    pub(super) async fn wait(&self, lock: Lock, moment: u64) {
        let waiter = self.table.enter(lock);
        loop {
            let woken = waiter.woken.notified();
            tokio::pin!(woken);
            // Registered before the check. Otherwise a release between the two would be missed.
            woken.as_mut().enable();
            self.begin();
            if self.table.heard().may_be_free(&lock, moment) {
                return;
            }
            woken.await;
        }
    }

    /// Returns whether a release after `moment` would be received: the connection answers, and has
    /// received its own probe.
    pub(super) fn are_confirmed(&self, moment: u64) -> bool {
        let heard = self.table.heard();
        heard.proven && heard.since.is_some_and(|since| since <= moment)
    }

    /// Listens on a new connection, runs `tell`, which sends `word`, and returns whether `word`
    /// arrived. It does not arrive through a pooler that changes connections, or in another
    /// database.
    pub(super) async fn try_out(
        &self,
        word: &str,
        tell: impl Future<Output = Result<(), BackendError>>,
    ) -> Result<bool, BackendError> {
        let listening = timeout(TRY_OUT_LIMIT, connect(&self.server, &self.channel)).await;
        let mut listener = match listening {
            Ok(Ok(listener)) => listener,
            Ok(Err(error)) => return Err(error::not_connected(error)),
            Err(_) => return Err(error::unreachable_in_time()),
        };
        tell.await?;
        let heard = timeout(TRY_OUT_LIMIT, async {
            while let Ok(Some(message)) = listener.try_recv().await {
                if message.payload() == word {
                    return true;
                }
            }
            false
        });
        Ok(heard.await.unwrap_or(false))
    }

    /// Closes the connection. The listener reconnects for remaining callers, which belong to other
    /// registries over the same store, and for new ones.
    pub(super) fn close(&self) {
        if let Some(task) = self.task().take() {
            task.abort();
        }
        self.table.end();
        self.table.wake_all();
    }

    /// Starts the listener's task unless it runs.
    fn begin(&self) {
        let mut task = self.task();
        if task.as_ref().is_none_or(JoinHandle::is_finished) || !self.table.heard().is_attended {
            self.table.heard().is_attended = true;
            let (table, server) = (Arc::clone(&self.table), self.server.clone());
            *task = Some(tokio::spawn(listen(table, server, self.channel.clone())));
        }
    }

    fn task(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ears {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Ears {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ears").field("channel", &self.channel.name).finish_non_exhaustive()
    }
}

impl Table {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, lock: Lock) -> Waiter<'_> {
        let mut heard = self.heard();
        let waiting = heard.waiting.entry(lock).or_default();
        waiting.count += 1;
        Waiter { table: self, lock, woken: Arc::clone(&waiting.woken) }
    }

    /// Records that no notification is missed from here on. Earlier ones may have been missed.
    fn begin(&self) {
        {
            let mut heard = self.heard();
            heard.count += 1;
            heard.since = Some(heard.count);
            heard.releases.clear();
        }
        self.wake_all();
    }

    fn wake_all(&self) {
        let woken: Vec<_> =
            self.heard().waiting.values().map(|waiting| Arc::clone(&waiting.woken)).collect();
        // Callers are woken without the lock on the table: a waker is foreign code.
        woken.iter().for_each(|woken| woken.notify_waiters());
    }

    fn end(&self) {
        let mut heard = self.heard();
        heard.since = None;
        heard.proven = false;
    }

    fn release(&self, lock: Lock) {
        let woken = {
            let mut heard = self.heard();
            heard.count += 1;
            let number = heard.count;
            heard.releases.push_back((number, lock));
            if heard.releases.len() > RELEASES_MAX
                && let Some((forgotten, _)) = heard.releases.pop_front()
            {
                heard.since = heard.since.map(|since| since.max(forgotten));
            }
            heard.waiting.get(&lock).map(|waiting| Arc::clone(&waiting.woken))
        };
        if let Some(woken) = woken {
            woken.notify_waiters();
        }
    }

    fn is_awaited(&self) -> bool {
        !self.heard().waiting.is_empty()
    }

    /// Ends the task's duty unless a caller waits. Under the lock, so that no caller can start to
    /// wait in between and rely on the task.
    fn retire(&self) -> bool {
        let mut heard = self.heard();
        let idle = heard.waiting.is_empty();
        heard.is_attended &= !idle;
        idle
    }
}

impl Heard {
    fn may_be_free(&self, lock: &Lock, moment: u64) -> bool {
        let Some(since) = self.since else { return false };
        let after = |(number, _): &&(u64, Lock)| *number > moment;
        since > moment
            || self.releases.iter().rev().take_while(after).any(|(_, released)| released == lock)
    }
}

/// The registration of one waiting caller.
struct Waiter<'a> {
    table: &'a Table,
    lock: Lock,
    woken: Arc<Notify>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut heard = self.table.heard();
        if let Some(waiting) = heard.waiting.get_mut(&self.lock) {
            waiting.count -= 1;
            if waiting.count == 0 {
                heard.waiting.remove(&self.lock);
            }
        }
    }
}

/// Connects repeatedly, until no caller has waited for some time.
async fn listen(table: Arc<Table>, server: PgConnectOptions, channel: Channel) {
    let mut pause = RETRY_MIN;
    loop {
        let connected = timeout(ANSWER_LIMIT, connect(&server, &channel)).await;
        if let Ok(Ok(listener)) = connected {
            pause = RETRY_MIN;
            table.begin();
            let idle = hear(&table, listener, &channel).await;
            table.end();
            if idle && table.retire() {
                return;
            }
        } else if table.retire() {
            return;
        }
        // Randomised, so that listeners do not reconnect at the same time to a server that has just
        // started.
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

async fn connect(server: &PgConnectOptions, channel: &Channel) -> Result<PgListener, sqlx::Error> {
    // `PgListener` needs a pool. This one has a single connection and never opens another.
    let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
    let pool = pool.test_before_acquire(false).connect_lazy_with(server.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    channel.listen(&mut listener).await?;
    Ok(listener)
}

/// Receives notifications. Returns false if the connection breaks, true if no caller has waited for
/// some time.
async fn hear(table: &Table, mut listener: PgListener, channel: &Channel) -> bool {
    let proof = format!("{PROOF}{:016x}", fastrand::u64(..));
    let notify = sqlx::query("SELECT pg_notify($1, $2)").bind(&channel.name).bind(&proof);
    if !matches!(timeout(ANSWER_LIMIT, listener.execute(notify)).await, Ok(Ok(_))) {
        return false;
    }
    let mut beat = interval(HEARTBEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut idle_beats = 0_u32;
    loop {
        tokio::select! {
            biased;
            heard = listener.try_recv() => match heard {
                Ok(Some(message)) => {
                    if let Some(lock) = read(message.payload()) {
                        table.release(lock);
                    } else if message.payload() == proof {
                        table.heard().proven = true;
                    }
                }
                Ok(None) | Err(_) => return false,
            },
            _ = beat.tick() => {
                idle_beats = if table.is_awaited() { 0 } else { idle_beats + 1 };
                if idle_beats > IDLE_BEATS_MAX {
                    return true;
                }
                // A query detects a half-open connection: it gets no answer.
                if !matches!(timeout(ANSWER_LIMIT, listener.execute("SELECT 1")).await, Ok(Ok(_))) {
                    return false;
                }
            }
        }
    }
}

/// Returns the bytes as lower-case hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn read(message: &str) -> Option<Lock> {
    u128::from_str_radix(message, 16).ok().map(u128::to_be_bytes)
}

/// The prefix of the probe by which a connection checks that it receives notifications. No lock's
/// message begins like this.
const PROOF: &str = "proof ";

/// The number of remembered releases. They cover the time between an answer and the wait.
const RELEASES_MAX: usize = 1024;

/// The minimum pause between two attempts to connect; [`RETRY_MAX`] is the maximum.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// The interval between checks of the connection.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The number of checks without a waiting caller after which the connection is closed.
const IDLE_BEATS_MAX: u32 = 6;

/// The time limit of a trial for connecting, and again for receiving. It is shorter than the
/// engine's own time-out.
const TRY_OUT_LIMIT: Duration = Duration::from_secs(1);

/// The time limit for the server's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    const A: Lock = [1; 16];
    const B: Lock = [2; 16];

    #[test]
    fn a_release_between_question_and_wait_is_not_missed() {
        let table = Table::default();
        table.begin();
        let moment = table.heard().count;
        assert!(!table.heard().may_be_free(&A, moment));
        table.release(B);
        assert!(!table.heard().may_be_free(&A, moment));
        table.release(A);
        assert!(table.heard().may_be_free(&A, moment));
        let moment = table.heard().count;
        assert!(!table.heard().may_be_free(&A, moment));
    }

    #[test]
    fn who_may_have_missed_something_looks() {
        let table = Table::default();
        let moment = table.heard().count;
        assert!(!table.heard().may_be_free(&A, moment), "there is nobody who hears yet");
        table.begin();
        assert!(table.heard().may_be_free(&A, moment));
        let moment = table.heard().count;
        table.end();
        table.begin();
        assert!(table.heard().may_be_free(&A, moment));
        let moment = table.heard().count;
        (0..=RELEASES_MAX).for_each(|_| table.release(B));
        assert!(table.heard().may_be_free(&A, moment), "more than can be remembered");
        let moment = table.heard().count;
        assert!(!table.heard().may_be_free(&A, moment));
    }

    #[test]
    fn messages_are_read_as_they_are_written() {
        let lock: Lock = std::array::from_fn(|n| u8::try_from(n * 17).unwrap());
        assert_eq!(read(&hex(&lock)), Some(lock));
        assert_eq!(read("not ours"), None);
    }
}
