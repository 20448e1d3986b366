//! Hears of releases. One connection and one task, as long as somebody waits; knows nothing of locks.
//!
//! A message may be lost with its connection, so everybody is woken after each reconnect; and waiting never relies on messages alone,
//! that is the engine's part. All releases of a namespace are heard, whoever waits for them, so the last ones are remembered: a release between
//! the answer "busy" and the wait is not missed.
//!
//! A message costs the server more than the rest of a release: it sends them one transaction after the other. So whoever listens says so, by advisory locks,
//! and a release that finds nobody there sends none; see [`Channel`].

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

/// Which lock a message is about.
type Lock = [u8; 16];

/// Where the releases of one namespace are told, and how those who tell know whether anybody listens.
///
/// Who listens keeps all of the channel's marks for its session, shared. Who releases tries to have one of them alone until its transaction ends:
/// if it cannot, somebody listens. If it can, whoever comes to listen meanwhile gets its marks only after the release is there to be seen, and looks
/// then. Two releases at once may take each other for a listener, which costs a message; that is why there are several marks.
#[derive(Debug, Clone)]
pub(super) struct Channel {
    name: String,
    first_mark: i64,
}

impl Channel {
    /// For the part of the store that has this hash.
    pub(super) fn of(part: [u8; 8]) -> Self {
        // All eight bytes are in the name, and all but the last bits in the marks.
        let first_mark = i64::from_be_bytes(part) & !(MARKS - 1);
        Self { name: format!("lock_registry_{}", hex(&part)), first_mark }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The mark that a release of this lock tries to have alone.
    pub(super) fn mark(&self, lock: Lock) -> i64 {
        self.first_mark + i64::from(lock[0]) % MARKS
    }

    /// Says that this session listens.
    async fn listen(&self, listener: &mut PgListener) -> Result<(), sqlx::Error> {
        listener.listen(&self.name).await?;
        let marks =
            "SELECT pg_advisory_lock_shared(mark) FROM generate_series($1, $1 + $2 - 1) AS mark";
        let marks = sqlx::query(marks).bind(self.first_mark).bind(MARKS);
        listener.execute(marks).await.map(drop)
    }
}

/// A power of two. Each listener takes as many entries in the server's table of locks.
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
    /// Numbers everything that was heard, and every start of listening.
    count: u64,
    /// Since which number nothing was missed; `None` while nobody listens.
    since: Option<u64>,
    /// A message of this connection's own has arrived. Behind a pooler that mixes connections up, none does.
    proven: bool,
    /// The last releases, and their numbers.
    releases: VecDeque<(u64, Lock)>,
    waiting: HashMap<Lock, Waiting>,
    /// Whether there is a task that has not yet resolved to end.
    is_attended: bool,
}

/// Those who wait for one lock.
#[derive(Default)]
struct Waiting {
    woken: Arc<Notify>,
    count: usize,
}

impl Ears {
    /// Listens to `channel` from the moment when somebody waits.
    pub(super) fn new(server: PgConnectOptions, channel: Channel) -> Self {
        Self { server, channel, table: Arc::default(), task: Mutex::default() }
    }

    /// This moment, for [`wait`](Self::wait). To be read before a question whose answer may be outdated by a release.
    pub(super) fn moment(&self) -> u64 {
        self.table.heard().count
    }

    /// Returns when the lock may have been released after `moment`. If nobody listened then, returns as soon as somebody does.
    pub(super) async fn wait(&self, lock: Lock, moment: u64) {
        let waiter = self.table.enter(lock);
        loop {
            let woken = waiter.woken.notified();
            tokio::pin!(woken);
            // Listening starts before the look, or a release could slip through in between.
            woken.as_mut().enable();
            self.begin();
            if self.table.heard().may_be_free(&lock, moment) {
                return;
            }
            woken.await;
        }
    }

    /// Returns whether a release after `moment` would be heard: the connection answers, and has heard its own message.
    pub(super) fn are_confirmed(&self, moment: u64) -> bool {
        let heard = self.table.heard();
        heard.proven && heard.since.is_some_and(|since| since <= moment)
    }

    /// Listens, has `word` told, and says whether it was heard. It is not where one listens through a pooler that mixes connections up, or in another database.
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

    /// Ends the connection. It is made anew for those who wait, in other registries over the same store, and for those who come.
    pub(super) fn close(&self) {
        if let Some(task) = self.task().take() {
            task.abort();
        }
        self.table.end();
        self.table.wake_all();
    }

    /// Makes sure that somebody listens.
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

    /// Nothing is missed from here on; whatever happened before was.
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
        // Nobody is woken while the table is locked: a waker is foreign code.
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

    /// Ends the task's duty unless somebody waits; under the lock, so that nobody comes in between and relies on it.
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

/// Somebody who waits.
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

/// Connects, again and again, until nobody has waited for a while.
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
        // At random, so that not all come back at once to a server that has just started.
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

async fn connect(server: &PgConnectOptions, channel: &Channel) -> Result<PgListener, sqlx::Error> {
    // Nothing is listened to without a pool; this one is for one connection and never makes another.
    let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
    let pool = pool.test_before_acquire(false).connect_lazy_with(server.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    channel.listen(&mut listener).await?;
    Ok(listener)
}

/// Hears until the connection breaks, or nobody waits any more: then true.
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
                // A connection that has died without a word answers nothing.
                if !matches!(timeout(ANSWER_LIMIT, listener.execute("SELECT 1")).await, Ok(Ok(_))) {
                    return false;
                }
            }
        }
    }
}

/// Bytes as small hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn read(message: &str) -> Option<Lock> {
    u128::from_str_radix(message, 16).ok().map(u128::to_be_bytes)
}

/// How the message begins by which a connection finds out whether it hears anything. No lock is written like this.
const PROOF: &str = "proof ";

/// How many releases are remembered: those of the time between an answer and the wait.
const RELEASES_MAX: usize = 1024;

/// The pauses between tries to connect.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// How often the connection is asked whether it is alive.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// After how many of those without anybody who waits it is closed.
const IDLE_BEATS_MAX: u32 = 6;

/// How long listening, and then hearing, may take when it is tried out: less than the questions of an engine may.
const TRY_OUT_LIMIT: Duration = Duration::from_secs(1);

/// How long the server may take to answer.
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
