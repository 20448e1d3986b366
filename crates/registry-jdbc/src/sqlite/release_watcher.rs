//! Wakes waiters of a key after a release by any process of the host. A wake-up may be spurious.
//!
//! One task per backend reads the awaited keys whenever `commit_watch` reports a commit. The task
//! exists while there are waiters, and for [`IDLE_TIMEOUT`] after the last waiter. It never writes,
//! so waiting does not slow down writers.
//!
//! - The task wakes a waiter if its key is free. The first read after the registration of a waiter
//!   also wakes it if the key was granted again since the waiter's attempt. At later reads, a key
//!   that was released and granted again wakes no waiters, so few processes compete for it. If
//!   several claims can hold the key, a waiter is woken by every change after which its claim may
//!   be granted.
//! - The kernel reports a commit during its write, just before other processes can read the commit.
//!   The first read may be too early, so more reads follow.
//! - Reading takes about a tenth of the time at most. Unused time accumulates in a budget, so a
//!   single release is detected at once. In a database with many other commits, reads are
//!   milliseconds apart and take less than a tenth of a core.

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
use super::records::MULTI_CLAIM_BIT;
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
/// Reads take at most about a tenth (one divided by this number) of the total time.
const READ_TIME_DIVISOR: u32 = 10;
/// The minimum time that the budget charges for each chunk of keys. With continuous commits, it
/// keeps the reads 3 ms apart.
const CHUNK_COST_MIN: Duration = Duration::from_micros(300);
/// The maximum time that the budget charges for each chunk. A longer read probably waited for a
/// processor, and this wait must not delay the next read.
const CHUNK_COST_MAX: Duration = Duration::from_millis(1);
/// The maximum unused time that the read budget accumulates.
const BUDGET_MAX: Duration = Duration::from_millis(5);
/// The longest pause after a read.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// How long the task continues without waiters. Another wait is likely, and closing the inotify
/// watch can take milliseconds.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// Registers waiters with the task, which it starts when needed.
pub(super) struct ReleaseWatcher {
    watcher: Arc<WatcherTask>,
    /// Runs the task. A waiter's own runtime may end before other waiters are woken, or may have no
    /// I/O driver.
    worker: WorkerThread,
}

struct WatcherTask {
    reader: Arc<ReconnectingConnection>,
    statements: Arc<SqliteStatementBinder>,
    wal: PathBuf,
    waiters: Waiters<Key, SeenVersion>,
    /// Whether the kernel reports commits, and no read has failed since the last read of all
    /// awaited keys.
    is_confirmed: AtomicBool,
}

/// The version of the key in the busy response of the waiter's attempt.
struct SeenVersion {
    version: u64,
    /// Whether the key has not been read since the registration of the waiter.
    is_new: bool,
}

impl ReleaseWatcher {
    pub(super) fn new(
        reader: Arc<ReconnectingConnection>,
        statements: Arc<SqliteStatementBinder>,
        wal: PathBuf,
        worker: WorkerThread,
    ) -> Self {
        Self {
            watcher: Arc::new(WatcherTask {
                reader,
                statements,
                wal,
                waiters: Waiters::default(),
                is_confirmed: AtomicBool::new(false),
            }),
            worker,
        }
    }

    /// Waits until `key` may be free. `seen_version` is the version of the busy response to the
    /// caller's attempt: the token of the other grant, or a version with [`MULTI_CLAIM_BIT`].
    pub(super) async fn wait(&self, key: &Key, seen_version: u64) {
        let waiters = &self.watcher.waiters;
        let waiter =
            waiters.register(key.clone(), SeenVersion { version: seen_version, is_new: true });
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

impl Drop for ReleaseWatcher {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for ReleaseWatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseWatcher")
            .field("waiters", &self.watcher.waiters)
            .finish_non_exhaustive()
    }
}

impl WakeCheck for WatcherTask {
    /// Returns whether a release would wake the waiters.
    fn confirms_wake_ups(&self, _claim: &Claim, _busy: &Busy) -> bool {
        self.is_confirmed.load(Ordering::Acquire) && self.waiters.has_task()
    }
}

impl WatcherTask {
    /// Reads awaited keys after each commit, until there has been no waiter for [`IDLE_TIMEOUT`].
    async fn run(self: Arc<Self>) {
        let mut watch = CommitWatch::start(&self.wal);
        let mut schedule = ReadSchedule::idle();
        let mut budget = ReadBudget::new();
        // A read of all keys has failed, so a waiter may have missed a release.
        let mut has_missed_read = false;
        self.is_confirmed.store(false, Ordering::Release);
        while self.waiters.wait_for_waiter(IDLE_TIMEOUT).await {
            let (filter, succeeded) = tokio::select! {
                () = watch.changed() => {
                    // The watch polls if it has failed, for example because the log was removed.
                    // Try to watch the new log.
                    if watch.is_polling() {
                        self.retry_watch(&mut watch);
                    }
                    if !watch.is_polling() {
                        schedule = ReadSchedule::starting_now();
                    }
                    (WaiterFilter::All, self.read_and_wake(WaiterFilter::All, &mut budget).await)
                }
                () = self.waiters.changed() => {
                    watch.reset_interval();
                    (WaiterFilter::New, self.read_and_wake(WaiterFilter::New, &mut budget).await)
                }
                () = schedule.next_read() => {
                    (WaiterFilter::All, self.read_and_wake(WaiterFilter::All, &mut budget).await)
                }
            };
            if filter == WaiterFilter::All {
                has_missed_read = !succeeded;
            }
            let is_confirmed = succeeded && !has_missed_read && !watch.is_polling();
            self.is_confirmed.store(is_confirmed, Ordering::Release);
        }
    }

    fn retry_watch(&self, watch: &mut CommitWatch) {
        let new_watch = CommitWatch::start(&self.wal);
        if !new_watch.is_polling() {
            *watch = new_watch;
        }
    }

    /// Reads the keys of these waiters, wakes waiters of free or changed keys, and pauses if the
    /// budget is used up. Returns whether all reads succeeded.
    async fn read_and_wake(&self, filter: WaiterFilter, budget: &mut ReadBudget) -> bool {
        let started = std::time::Instant::now();
        let keys = self.waiting_keys(filter);
        let mut chunks = 0;
        let mut succeeded = true;
        for chunk in keys.chunks(sql::batch_items_max(&*sql::HELD_VERSIONS)) {
            chunks += 1;
            // A store error wakes no waiter. The waiter's next attempt receives the error and
            // returns it.
            match self.held_versions(chunk).await {
                Ok(held_versions) => self.wake_waiters(chunk, &held_versions),
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

    async fn held_versions(&self, keys: &[Key]) -> Result<HashMap<Vec<u8>, u64>, BackendError> {
        let batch = sql::smallest_batch_for(&*sql::HELD_VERSIONS, keys.len());
        let (statements, keys) = (Arc::clone(&self.statements), keys.to_vec());
        let rows = self.reader.fetch_all(move || statements.held_versions(batch, &keys)).await?;
        Ok(rows
            .iter()
            .filter_map(|row| {
                let version: i64 = row.try_get(1).ok()?;
                Some((row.try_get(0).ok()?, version.cast_unsigned()))
            })
            .collect())
    }

    fn wake_waiters(&self, keys: &[Key], held_versions: &HashMap<Vec<u8>, u64>) {
        self.waiters.wake_if(|key, seen| {
            if keys.binary_search(key).is_err() {
                return false;
            }
            let is_first_read = std::mem::replace(&mut seen.is_new, false);
            let held_version = held_versions.get(key.as_str().as_bytes());
            held_version.is_none_or(|version| {
                let has_several_claims = (*version | seen.version) & MULTI_CLAIM_BIT != 0;
                (is_first_read || has_several_claims) && *version != seen.version
            })
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

    /// Waits until the next read is due. If none is scheduled, never returns. Dropping the future
    /// skips no read.
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

/// Returns the time that the budget charges for a read of this duration.
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
        // The pause compensates for the deficit, so it must not add to the budget.
        let pause = (missing * READ_TIME_DIVISOR).min(PAUSE_MAX);
        self.updated_at += pause;
        Some(pause)
    }
}

/// Which waiters' keys to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaiterFilter {
    All,
    /// Only waiters that were registered since the last read, to detect a release between their
    /// failed attempt and their registration.
    New,
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use registry_core::{LockAdmin, LockBackend};
    use tokio::time::timeout;

    use super::*;
    use crate::sqlite::clock::ManualClock;
    use crate::sqlite::tests::{LEASE, TestFolder, acquire, claim, expect_busy, key};

    #[test]
    fn reading_takes_at_most_a_tenth_of_the_time() {
        let mut budget = ReadBudget::new();
        let read_time = Duration::from_millis(1);
        assert_eq!(budget.spend(read_time), None, "the first read needs no pause");
        let mut paused = Duration::ZERO;
        for _ in 0..1_000 {
            paused += budget.spend(read_time).unwrap_or_default();
        }
        // The budget is used up. After each further millisecond of reading, the pause is ten
        // milliseconds, less the duration of the test itself.
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

    const TIMEOUT: Duration = Duration::from_secs(10);
    const QUIET_TIME: Duration = Duration::from_millis(300);

    #[tokio::test]
    async fn a_release_wakes_a_waiter_of_another_process() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        for _ in 0..20 {
            let (claim_a, claim_b) = (claim("k"), claim("k"));
            acquire(&a, &claim_a).await;
            let busy_reply = expect_busy(&b, &claim_b).await;
            let release = async {
                tokio::task::yield_now().await;
                a.release(&claim_a).await.unwrap();
            };
            timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), release) })
                .await
                .unwrap();
            acquire(&b, &claim_b).await;
            b.release(&claim_b).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_forced_release_wakes_a_waiter() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        acquire(&a, &claim_a).await;
        let busy_reply = expect_busy(&b, &claim_b).await;
        let forced_release = async { a.force_release(&key("k")).await.unwrap() };
        timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), forced_release) })
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_change_before_the_wait_is_not_missed() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        acquire(&a, &claim_a).await;
        let busy_reply = expect_busy(&b, &claim_b).await;
        a.release(&claim_a).await.unwrap();
        timeout(TIMEOUT, b.wait(&claim_b, &busy_reply))
            .await
            .expect("it was free before the wait began");

        acquire(&a, &claim("k")).await;
        timeout(TIMEOUT, b.wait(&claim_b, &busy_reply))
            .await
            .expect("the key was granted again since the busy reply");
    }

    #[tokio::test]
    async fn a_waiter_sleeps_while_the_lock_is_held_or_only_renewed() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        acquire(&a, &claim_a).await;
        let busy_reply = expect_busy(&b, &claim_b).await;
        let renew = async {
            for n in 0..20 {
                a.renew(std::slice::from_ref(&claim_a)).await.remove(0).unwrap();
                let other = claim(&format!("other{n}"));
                acquire(&a, &other).await;
                a.release(&other).await.unwrap();
            }
        };
        let both = async { tokio::join!(b.wait(&claim_b, &busy_reply), renew) };
        assert!(timeout(QUIET_TIME, both).await.is_err());
        assert_eq!(b.release_watcher.count(), 0, "a dropped waiter is removed");
    }

    #[tokio::test]
    async fn wake_ups_are_confirmed_while_a_waiter_waits_and_the_kernel_reports_commits() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        acquire(&a, &claim_a).await;
        let busy_reply = expect_busy(&b, &claim_b).await;
        assert!(!busy_reply.confirms_wake_ups(&claim_b), "no waiter exists yet");
        let mut wait = std::pin::pin!(b.wait(&claim_b, &busy_reply));
        let confirmed = async {
            while !busy_reply.confirms_wake_ups(&claim_b) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(TIMEOUT, async {
            tokio::select! { () = &mut wait => panic!("it is held"), () = confirmed => {} }
        })
        .await
        .expect("wake-ups are confirmed");
    }

    #[tokio::test]
    async fn a_release_wakes_only_the_waiters_of_its_key() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, Arc::new(folder.open_backend().await));
        let mut held = Vec::new();
        let mut waiters = tokio::task::JoinSet::new();
        for n in 0..150 {
            let (claim_a, claim_b) = (claim(&format!("k{n}")), claim(&format!("k{n}")));
            acquire(&a, &claim_a).await;
            let busy_reply = expect_busy(&b, &claim_b).await;
            let b = Arc::clone(&b);
            waiters.spawn(async move {
                b.wait(&claim_b, &busy_reply).await;
                n
            });
            held.push(claim_a);
        }
        for n in [149, 0, 77] {
            a.release(&held[n]).await.unwrap();
            let woken = timeout(TIMEOUT, waiters.join_next()).await.unwrap().unwrap().unwrap();
            assert_eq!(woken, n);
        }
        assert!(timeout(QUIET_TIME, waiters.join_next()).await.is_err());
        assert_eq!(b.release_watcher.count(), 147);
    }

    #[tokio::test]
    async fn the_watcher_task_runs_only_while_a_waiter_waits() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        acquire(&a, &claim_a).await;
        let busy_reply = expect_busy(&b, &claim_b).await;
        assert!(!b.release_watcher.has_task());
        assert!(timeout(Duration::from_millis(10), b.wait(&claim_b, &busy_reply)).await.is_err());
        assert!(b.release_watcher.has_task());
        let task_ended = async {
            while b.release_watcher.has_task() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(TIMEOUT, task_ended).await.unwrap();
        // A new wait starts the task again.
        let release = async { a.release(&claim_a).await.unwrap() };
        timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), release) })
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_watch_of_a_removed_log_falls_back_to_intervals() {
        let folder = TestFolder::new();
        let mut watch = CommitWatch::start(&folder.file());
        assert!(watch.is_polling(), "the log does not exist yet");

        std::fs::write(folder.file(), "").unwrap();
        watch = CommitWatch::start(&folder.file());
        assert!(!watch.is_polling());
        std::fs::write(folder.file(), "x").unwrap();
        timeout(TIMEOUT, watch.changed()).await.unwrap();
        std::fs::remove_file(folder.file()).unwrap();
        let fallen_back = async {
            while !watch.is_polling() {
                watch.changed().await;
            }
        };
        timeout(TIMEOUT, fallen_back).await.unwrap();
        timeout(TIMEOUT, watch.changed()).await.expect("a removed log is polled");
    }

    #[test]
    fn a_waiter_in_a_runtime_without_io_is_woken() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let folder = TestFolder::new();
            let (a, b) = (folder.open_backend().await, folder.open_backend().await);
            let (claim_a, claim_b) = (claim("k"), claim("k"));
            acquire(&a, &claim_a).await;
            let busy_reply = expect_busy(&b, &claim_b).await;
            let release = async { a.release(&claim_a).await.unwrap() };
            timeout(TIMEOUT, async { tokio::join!(b.wait(&claim_b, &busy_reply), release) })
                .await
                .unwrap();
        });
    }

    #[tokio::test]
    async fn an_expired_lease_is_detected_at_the_first_read() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let (a, b) = (
            folder.open_backend_with_clock(&clock).await,
            folder.open_backend_with_clock(&clock).await,
        );
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        acquire(&a, &claim_a).await;
        let busy_reply = expect_busy(&b, &claim_b).await;
        clock.advance(LEASE);
        timeout(TIMEOUT, b.wait(&claim_b, &busy_reply)).await.unwrap();
    }

    /// Prints the duration of wake-ups, for manual runs: `cargo test … -- --ignored --nocapture
    /// latency`.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "a measurement, not a promise"]
    async fn latency_of_a_wake_up() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let mut latencies = Vec::new();
        for _ in 0..500 {
            let (claim_a, claim_b) = (claim("k"), claim("k"));
            acquire(&a, &claim_a).await;
            let busy_reply = expect_busy(&b, &claim_b).await;
            let release = async {
                sleep(Duration::from_millis(5)).await;
                a.release(&claim_a).await.unwrap();
                Instant::now()
            };
            let wait = async {
                b.wait(&claim_b, &busy_reply).await;
                acquire(&b, &claim_b).await;
                Instant::now()
            };
            let (released, granted) = tokio::join!(release, wait);
            latencies.push(granted.saturating_duration_since(released));
            b.release(&claim_b).await.unwrap();
        }
        latencies.sort_unstable();
        println!("p50 {:?} p99 {:?} max {:?}", latencies[250], latencies[495], latencies[499]);
    }
}
