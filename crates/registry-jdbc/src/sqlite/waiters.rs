//! Wakes waiters of a key after a release by any process of the host. A wake-up may be spurious.
//!
//! One task per backend reads the awaited keys whenever `commit_watch` reports a commit. The task
//! exists while there are waiters, and [`IDLE_TIMEOUT`] longer. It never writes, so waiting does
//! not slow down writers:
//!
//! - A waiter is woken if its key is free. At the first read after its registration, it is also
//!   woken if the key has another grant than the known one. If a free key is granted again before
//!   the read, its waiters are not woken, so few processes compete for it.
//! - The kernel reports a commit while it is written, just before it can be read. The first read
//!   may be too early, so more reads follow.
//! - Reading takes at most a tenth of the time. Unused time accumulates in a budget, so a single
//!   release is detected at once. In a database with many other commits, reads are milliseconds
//!   apart and take less than a tenth of a core.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use registry_core::{BackendError, Busy, Claim, Key, Waiters, WakeCheck};
use sqlx::Row;
use tokio::time::{Instant, sleep, sleep_until};

use super::commit_watch::CommitWatch;
use super::connection::ReconnectingConnection;
use super::sql;
use super::statement::SqliteStatementBinder;
use super::worker::WorkerThread;

/// When to read again after the kernel has reported a commit.
const READ_DELAYS: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(20),
    Duration::from_millis(100),
];
/// One of this many units of time may be spent on reading.
const READ_TIME_DIVISOR: u32 = 10;
/// The minimum cost of a read, for each chunk of keys. The measured time excludes the wake-ups of
/// threads, here and in SQLite's connection. With continuous commits, reads are therefore 3 ms
/// apart.
const CHUNK_COST_MIN: Duration = Duration::from_micros(300);
/// The maximum cost. A longer read probably waited for a processor, and that time must not delay
/// the next read.
const CHUNK_COST_MAX: Duration = Duration::from_millis(1);
/// The maximum of the read budget.
const BUDGET_MAX: Duration = Duration::from_millis(5);
/// The longest pause after a read.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// How long the task runs without waiters. Closing the inotify watch can take milliseconds, and
/// another wait is likely.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The waiters of this backend.
pub(super) struct SqliteWaiters {
    watcher: Arc<ReleaseWatcher>,
    /// Runs the task. The runtime of the first waiter may end before the other waiters are woken,
    /// or have no I/O.
    worker: WorkerThread,
}

struct ReleaseWatcher {
    reader: Arc<ReconnectingConnection>,
    statements: Arc<SqliteStatementBinder>,
    wal: PathBuf,
    waiters: Waiters<Key, KnownGrant>,
    /// The kernel reports commits, and the last read succeeded.
    is_confirmed: AtomicBool,
}

/// The grant that a waiter knows.
struct KnownGrant {
    token: u64,
    /// The key was not read since the waiter was registered.
    is_new: bool,
}

impl SqliteWaiters {
    pub(super) fn new(
        reader: Arc<ReconnectingConnection>,
        statements: Arc<SqliteStatementBinder>,
        wal: PathBuf,
        worker: WorkerThread,
    ) -> Self {
        Self {
            watcher: Arc::new(ReleaseWatcher {
                reader,
                statements,
                wal,
                waiters: Waiters::default(),
                is_confirmed: AtomicBool::new(false),
            }),
            worker,
        }
    }

    /// Returns when `key` may be free. `known_token` is the token of the grant that made the
    /// attempt fail.
    pub(super) async fn wait(&self, key: &Key, known_token: u64) {
        let waiters = &self.watcher.waiters;
        let waiter = waiters.register(key.clone(), KnownGrant { token: known_token, is_new: true });
        waiters.ensure_task(|| self.worker.spawn(Arc::clone(&self.watcher).run()));
        waiter.woken().await;
    }

    pub(super) fn wake_check(&self) -> Arc<dyn WakeCheck> {
        Arc::clone(&self.watcher) as _
    }

    /// Ends the task, and wakes all waiters.
    pub(super) fn close(&self) {
        self.watcher.waiters.close();
    }

    /// Returns whether the task exists.
    #[cfg(test)]
    pub(super) fn has_task(&self) -> bool {
        self.watcher.waiters.has_task()
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.watcher.waiters.len()
    }
}

impl Drop for SqliteWaiters {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for SqliteWaiters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteWaiters")
            .field("waiters", &self.watcher.waiters)
            .finish_non_exhaustive()
    }
}

impl WakeCheck for ReleaseWatcher {
    /// Returns whether a release would wake the waiters.
    fn wakes_confirmed(&self, _claim: &Claim, _busy: &Busy) -> bool {
        self.is_confirmed.load(Ordering::Acquire) && self.waiters.has_task()
    }
}

impl ReleaseWatcher {
    /// Reads awaited keys after each commit, until there are no waiters.
    async fn run(self: Arc<Self>) {
        let mut watch = CommitWatch::start(&self.wal);
        let mut schedule = ReadSchedule::idle();
        let mut budget = ReadBudget::new();
        while self.waiters.wait_for_waiter(IDLE_TIMEOUT).await {
            let succeeded = tokio::select! {
                () = watch.changed() => {
                    // The watch may have failed because the log was removed: check for a
                    // new log.
                    if watch.is_interval() {
                        self.retry_watch(&mut watch);
                    }
                    if !watch.is_interval() {
                        schedule = ReadSchedule::starting_now();
                    }
                    self.read_and_wake(WaiterFilter::All, &mut budget).await
                }
                () = self.waiters.changed() => {
                    watch.reset_interval();
                    self.read_and_wake(WaiterFilter::New, &mut budget).await
                }
                () = schedule.next_read() => self.read_and_wake(WaiterFilter::All, &mut budget).await,
            };
            self.is_confirmed.store(succeeded && !watch.is_interval(), Ordering::Release);
        }
    }

    fn retry_watch(&self, watch: &mut CommitWatch) {
        let new_watch = CommitWatch::start(&self.wal);
        if !new_watch.is_interval() {
            *watch = new_watch;
        }
    }

    /// Reads the keys of these waiters, wakes waiters of free keys, and pauses if the budget is
    /// used up. Returns whether all reads succeeded.
    async fn read_and_wake(&self, filter: WaiterFilter, budget: &mut ReadBudget) -> bool {
        let started = std::time::Instant::now();
        let keys = self.waiting_keys(filter);
        let mut chunks = 0;
        let mut succeeded = true;
        for chunk in keys.chunks(sql::batch_items_max(&*sql::HELD_TOKENS)) {
            chunks += 1;
            // A store error wakes no waiter: the waiter's own attempt, at the next poll, gets the
            // error and returns it.
            match self.held_tokens(chunk).await {
                Ok(held_tokens) => self.wake_waiters(chunk, &held_tokens),
                Err(_) => succeeded = false,
            }
        }
        if let Some(pause) = budget.spend(read_cost(started.elapsed(), chunks)) {
            sleep(pause).await;
        }
        succeeded
    }

    fn waiting_keys(&self, filter: WaiterFilter) -> Vec<Key> {
        let mut keys = Vec::new();
        self.waiters.for_each(|key, waiter| {
            if waiter.is_new || matches!(filter, WaiterFilter::All) {
                keys.push(key.clone());
            }
        });
        keys.dedup();
        keys
    }

    async fn held_tokens(&self, keys: &[Key]) -> Result<HashMap<Vec<u8>, u64>, BackendError> {
        let size = sql::batch_for(&*sql::HELD_TOKENS, keys.len());
        let (statements, keys) = (Arc::clone(&self.statements), keys.to_vec());
        let rows = self.reader.fetch_all(move || statements.held_tokens(size, &keys)).await?;
        Ok(rows
            .iter()
            .filter_map(|row| {
                let token: i64 = row.try_get(1).ok()?;
                Some((row.try_get(0).ok()?, token.cast_unsigned()))
            })
            .collect())
    }

    fn wake_waiters(&self, keys: &[Key], held_tokens: &HashMap<Vec<u8>, u64>) {
        self.waiters.wake_if(|key, known| {
            if keys.binary_search(key).is_err() {
                return false;
            }
            let is_first_read = std::mem::replace(&mut known.is_new, false);
            let held_token = held_tokens.get(key.as_str().as_bytes());
            held_token.is_none_or(|token| is_first_read && *token != known.token)
        });
    }
}

/// The schedule of further reads after a commit.
struct ReadSchedule {
    commit_at: Instant,
    reads_done: usize,
}

impl ReadSchedule {
    fn idle() -> Self {
        Self { commit_at: Instant::now(), reads_done: READ_DELAYS.len() }
    }

    fn starting_now() -> Self {
        Self { commit_at: Instant::now(), reads_done: 0 }
    }

    /// Returns when the next read is due, or never. Dropping the future loses nothing.
    async fn next_read(&mut self) {
        match READ_DELAYS.get(self.reads_done) {
            Some(after) => {
                sleep_until(self.commit_at + *after).await;
                self.reads_done += 1;
            }
            None => std::future::pending().await,
        }
    }
}

/// Returns the cost of a read of this duration.
fn read_cost(elapsed: Duration, chunks: u32) -> Duration {
    elapsed.clamp(CHUNK_COST_MIN * chunks, CHUNK_COST_MAX * chunks)
}

/// Limits reading to a tenth of the time.
struct ReadBudget {
    available: Duration,
    updated_at: std::time::Instant,
}

impl ReadBudget {
    fn new() -> Self {
        Self { available: BUDGET_MAX, updated_at: std::time::Instant::now() }
    }

    /// Deducts the time of a read. Returns the pause that compensates for a deficit.
    fn spend(&mut self, spent: Duration) -> Option<Duration> {
        let earned = self.updated_at.elapsed() / READ_TIME_DIVISOR;
        self.updated_at = std::time::Instant::now();
        self.available = (self.available + earned).min(BUDGET_MAX);
        if let Some(left) = self.available.checked_sub(spent) {
            self.available = left;
            return None;
        }
        let missing = spent - self.available;
        self.available = Duration::ZERO;
        // The pause compensates for the read, so it adds nothing to the budget.
        let pause = (missing * READ_TIME_DIVISOR).min(PAUSE_MAX);
        self.updated_at += pause;
        Some(pause)
    }
}

/// Which waiters' keys to read.
#[derive(Debug, Clone, Copy)]
enum WaiterFilter {
    All,
    /// Waiters that were registered since the last read. A release between their failed attempt and
    /// their registration must not be missed.
    New,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_takes_at_most_a_tenth_of_the_time() {
        let mut budget = ReadBudget::new();
        let read_time = Duration::from_millis(1);
        assert_eq!(budget.spend(read_time), None, "the first read needs no pause");
        let mut paused = Duration::ZERO;
        for _ in 0..1_000 {
            paused += budget.spend(read_time).unwrap_or_default();
        }
        // The budget is used up. Each further millisecond was followed by a pause of ten, less the
        // duration of this test itself.
        assert!(paused > Duration::from_secs(8), "{paused:?}");
        assert!(budget.spend(Duration::from_secs(60)) <= Some(PAUSE_MAX));
    }

    #[test]
    fn reads_during_continuous_commits_are_milliseconds_apart() {
        for elapsed in [Duration::from_micros(30), Duration::from_secs(1)] {
            let mut budget = ReadBudget { available: Duration::ZERO, ..ReadBudget::new() };
            let pause = budget.spend(read_cost(elapsed, 1)).unwrap();
            assert!(
                pause > Duration::from_millis(1) && pause <= Duration::from_millis(10),
                "{pause:?}"
            );
        }
        assert_eq!(read_cost(Duration::from_secs(1), 20), Duration::from_millis(20));
        assert_eq!(read_cost(Duration::from_micros(1), 0), Duration::ZERO);
    }
}
