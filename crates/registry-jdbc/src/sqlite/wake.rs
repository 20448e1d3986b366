//! Wakes waiters of a key after a release by any process of the host. Only a hint: the engine then
//! queries the store.
//!
//! One task per backend reads the awaited keys whenever `watch` reports a commit. The task exists
//! while there are waiters, and [`LINGER`] longer. It never writes, so waiting does not slow down
//! writers:
//!
//! - A waiter is woken if its key is free. At the first read after its arrival, it is also woken if
//!   another grant than the known one holds the key. If a free key is granted again before the
//!   read, its waiters stay asleep, so only few processes compete for it.
//! - The kernel reports a commit while it is written, just before it can be read. So the first read
//!   may be too early, and more reads follow.
//! - Reading takes at most a tenth of the time. Unused time is saved, so a single release is seen
//!   at once. In a database with many other commits, reads are milliseconds apart and take less
//!   than a tenth of a core.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{BackendError, Key};
use sqlx::Row;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::link::Link;
use super::sql;
use super::statement::Statements;
use super::watch::Watch;
use super::worker::Worker;

/// When to read again after the kernel has reported a commit.
const LOOKS_AFTER: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(4),
    Duration::from_millis(20),
    Duration::from_millis(100),
];
/// One of this many units of time may be spent on reading.
const SHARE: u32 = 10;
/// The minimum cost of a read, for each piece of keys. The measured time excludes the wake-ups of
/// threads, here and in SQLite's connection. With continuous commits, reads are therefore 3 ms
/// apart.
const PIECE_MIN: Duration = Duration::from_micros(300);
/// The maximum cost. A read that took longer probably waited for a processor, which must not delay
/// the next read.
const PIECE_MAX: Duration = Duration::from_millis(1);
/// The maximum time that can be saved for reading.
const SAVED_MAX: Duration = Duration::from_millis(5);
/// The longest rest after a read.
const REST_MAX: Duration = Duration::from_millis(250);
/// How long the task stays without waiters. Closing the kernel's watch can take milliseconds, and
/// another wait is likely.
const LINGER: Duration = Duration::from_secs(1);

/// The waiters of this backend.
pub(super) struct Wakes {
    shared: Arc<Shared>,
    /// Runs the task. The runtime of the first waiter may end before the other waiters are woken,
    /// or have no I/O.
    worker: Worker,
}

struct Shared {
    reader: Arc<Link>,
    statements: Arc<Statements>,
    wal: PathBuf,
    waiting: Mutex<Waiting>,
    /// A waiter was added, or the last one left.
    arrivals: Notify,
}

#[derive(Default)]
struct Waiting {
    waiters: HashMap<u64, Waiter>,
    next_id: u64,
    task: Option<JoinHandle<()>>,
    /// The kernel reports commits, and the last read succeeded.
    confirmed: bool,
    closed: bool,
}

struct Waiter {
    key: Key,
    /// The token of the grant that the waiter knows.
    mark: u64,
    /// The key was not read since the waiter arrived.
    fresh: bool,
    wake: oneshot::Sender<()>,
}

impl Wakes {
    pub(super) fn new(
        reader: Arc<Link>,
        statements: Arc<Statements>,
        wal: PathBuf,
        worker: Worker,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                reader,
                statements,
                wal,
                waiting: Mutex::default(),
                arrivals: Notify::new(),
            }),
            worker,
        }
    }

    /// Returns when `key` may be free. `mark` is the token of the grant that made the attempt fail.
    pub(super) async fn wait(&self, key: &Key, mark: u64) {
        let (wake, woken) = oneshot::channel();
        let Some(_place) = self.enter(Waiter { key: key.clone(), mark, fresh: true, wake }) else {
            return std::future::pending().await;
        };
        if woken.await.is_err() {
            // The backend was closed: no further wake-up.
            std::future::pending::<()>().await;
        }
    }

    /// Returns whether a release would wake the waiters.
    pub(super) fn are_confirmed(&self) -> bool {
        let waiting = self.shared.waiting();
        waiting.confirmed && waiting.task.as_ref().is_some_and(|task| !task.is_finished())
    }

    fn enter(&self, waiter: Waiter) -> Option<Place<'_>> {
        let mut waiting = self.shared.waiting();
        if waiting.closed {
            return None;
        }
        let id = waiting.next_id;
        waiting.next_id += 1;
        waiting.waiters.insert(id, waiter);
        if waiting.task.as_ref().is_none_or(JoinHandle::is_finished) {
            let shared = Arc::clone(&self.shared);
            waiting.task = Some(self.worker.spawn(shared.watch()));
        }
        drop(waiting);
        self.shared.arrivals.notify_one();
        Some(Place { shared: &self.shared, id })
    }

    /// Ends the task. No waiter is woken after this.
    pub(super) fn close(&self) {
        let mut waiting = self.shared.waiting();
        waiting.closed = true;
        if let Some(task) = waiting.task.take() {
            task.abort();
        }
    }

    /// Returns whether the task exists.
    #[cfg(test)]
    pub(super) fn is_watching(&self) -> bool {
        self.shared.waiting().task.as_ref().is_some_and(|task| !task.is_finished())
    }

    #[cfg(test)]
    pub(super) fn waiters(&self) -> usize {
        self.shared.waiting().waiters.len()
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Wakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wakes")
            .field("waiters", &self.shared.waiting().waiters.len())
            .finish_non_exhaustive()
    }
}

/// A registered waiter. Dropping it removes the waiter.
struct Place<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiting = self.shared.waiting();
        waiting.waiters.remove(&self.id);
        if waiting.waiters.is_empty() {
            self.shared.arrivals.notify_one();
        }
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // No code that runs under this lock can panic halfway through a change.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the task.
    async fn watch(self: Arc<Self>) {
        let mut watch = Watch::start(&self.wal);
        let mut looks = Looks::none();
        let mut budget = Budget::new();
        loop {
            if self.waiting().waiters.is_empty() {
                if timeout(LINGER, self.arrivals.notified()).await.is_err() && self.retire() {
                    return;
                }
                continue;
            }
            let answered = tokio::select! {
                () = watch.changed() => {
                    // The watch may have failed because the log was removed: try whether there is a
                    // new one.
                    if watch.is_by_time() {
                        self.watch_again(&mut watch);
                    }
                    if !watch.is_by_time() {
                        looks = Looks::after_now();
                    }
                    self.look(Whom::All, &mut budget).await
                }
                () = self.arrivals.notified() => {
                    watch.restart();
                    self.look(Whom::Fresh, &mut budget).await
                }
                () = looks.next() => self.look(Whom::All, &mut budget).await,
            };
            self.waiting().confirmed = answered && !watch.is_by_time();
        }
    }

    fn watch_again(&self, watch: &mut Watch) {
        let again = Watch::start(&self.wal);
        if !again.is_by_time() {
            *watch = again;
        }
    }

    /// Ends the task unless there are new waiters. The lock excludes a new waiter in between.
    fn retire(&self) -> bool {
        let mut waiting = self.waiting();
        let idle = waiting.waiters.is_empty();
        if idle {
            waiting.task = None;
        }
        idle
    }

    /// Reads the keys of these waiters, wakes waiters as needed, and rests if the budget is used
    /// up. Returns whether the database answered.
    async fn look(&self, whom: Whom, budget: &mut Budget) -> bool {
        let started = std::time::Instant::now();
        let keys = self.keys(whom);
        let mut pieces = 0;
        let mut answered = true;
        for chunk in keys.chunks(sql::largest(&*sql::HELD)) {
            pieces += 1;
            // A store error wakes no waiter: the waiter's own attempt, at the next poll, meets the
            // error and returns it.
            match self.held(chunk).await {
                Ok(held) => self.wake(chunk, &held),
                Err(_) => answered = false,
            }
        }
        if let Some(rest) = budget.spend(cost(started.elapsed(), pieces)) {
            sleep(rest).await;
        }
        answered
    }

    fn keys(&self, whom: Whom) -> Vec<Key> {
        let waiting = self.waiting();
        let mut keys: Vec<Key> = waiting
            .waiters
            .values()
            .filter(|waiter| waiter.fresh || matches!(whom, Whom::All))
            .map(|waiter| waiter.key.clone())
            .collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    async fn held(&self, keys: &[Key]) -> Result<HashMap<Vec<u8>, u64>, BackendError> {
        let size = sql::sized(&*sql::HELD, keys.len());
        let (statements, keys) = (Arc::clone(&self.statements), keys.to_vec());
        let rows = self.reader.rows(move || statements.held(size, &keys)).await?;
        Ok(rows
            .iter()
            .filter_map(|row| {
                let token: i64 = row.try_get(1).ok()?;
                Some((row.try_get(0).ok()?, token.cast_unsigned()))
            })
            .collect())
    }

    fn wake(&self, keys: &[Key], held: &HashMap<Vec<u8>, u64>) {
        let mut waiting = self.waiting();
        let woken: Vec<u64> = waiting
            .waiters
            .iter_mut()
            .filter(|(_, waiter)| keys.binary_search(&waiter.key).is_ok())
            .filter_map(|(id, waiter)| {
                let verify_after = std::mem::replace(&mut waiter.fresh, false);
                match held.get(waiter.key.as_str().as_bytes()) {
                    None => Some(*id),
                    Some(token) => (verify_after && *token != waiter.mark).then_some(*id),
                }
            })
            .collect();
        for id in woken {
            if let Some(waiter) = waiting.waiters.remove(&id) {
                // The receiver may have been dropped.
                let _ = waiter.wake.send(());
            }
        }
    }
}

/// The schedule of further reads after a commit.
struct Looks {
    since: Instant,
    done: usize,
}

impl Looks {
    fn none() -> Self {
        Self { since: Instant::now(), done: LOOKS_AFTER.len() }
    }

    fn after_now() -> Self {
        Self { since: Instant::now(), done: 0 }
    }

    /// Returns when the next read is due, or never. Dropping the future loses nothing.
    async fn next(&mut self) {
        match LOOKS_AFTER.get(self.done) {
            Some(after) => {
                sleep_until(self.since + *after).await;
                self.done += 1;
            }
            None => std::future::pending().await,
        }
    }
}

/// Returns the cost of a read of this duration.
fn cost(took: Duration, pieces: u32) -> Duration {
    took.clamp(PIECE_MIN * pieces, PIECE_MAX * pieces)
}

/// The time that may be spent on reading.
struct Budget {
    saved: Duration,
    counted_at: std::time::Instant,
}

impl Budget {
    fn new() -> Self {
        Self { saved: SAVED_MAX, counted_at: std::time::Instant::now() }
    }

    /// Deducts the time of a read. Returns the rest that compensates for a deficit.
    fn spend(&mut self, spent: Duration) -> Option<Duration> {
        let earned = self.counted_at.elapsed() / SHARE;
        self.counted_at = std::time::Instant::now();
        self.saved = (self.saved + earned).min(SAVED_MAX);
        if let Some(left) = self.saved.checked_sub(spent) {
            self.saved = left;
            return None;
        }
        let missing = spent - self.saved;
        self.saved = Duration::ZERO;
        // The rest compensates for the read, so it adds nothing to the savings.
        let rest = (missing * SHARE).min(REST_MAX);
        self.counted_at += rest;
        Some(rest)
    }
}

/// Which waiters' keys to read.
#[derive(Debug, Clone, Copy)]
enum Whom {
    All,
    /// Waiters that arrived since the last read. A release between their failed attempt and their
    /// arrival must not be missed.
    Fresh,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_costs_a_tenth_of_the_time() {
        let mut budget = Budget::new();
        let look = Duration::from_millis(1);
        assert_eq!(budget.spend(look), None, "a single release is seen at once");
        let mut rested = Duration::ZERO;
        for _ in 0..1_000 {
            rested += budget.spend(look).unwrap_or_default();
        }
        // The savings are spent. The rest of the second was compensated tenfold, less the duration
        // of this test itself.
        assert!(rested > Duration::from_secs(8), "{rested:?}");
        assert!(budget.spend(Duration::from_secs(60)) <= Some(REST_MAX));
    }

    #[test]
    fn looks_at_a_busy_database_are_milliseconds_apart_however_fast_or_slow() {
        for took in [Duration::from_micros(30), Duration::from_secs(1)] {
            let mut budget = Budget { saved: Duration::ZERO, ..Budget::new() };
            let rest = budget.spend(cost(took, 1)).unwrap();
            assert!(
                rest > Duration::from_millis(1) && rest <= Duration::from_millis(10),
                "{rest:?}"
            );
        }
        assert_eq!(cost(Duration::from_secs(1), 20), Duration::from_millis(20));
        assert_eq!(cost(Duration::from_micros(1), 0), Duration::ZERO);
    }
}
