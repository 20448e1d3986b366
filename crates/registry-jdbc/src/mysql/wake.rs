//! Wakes waiters of a key after a release by any process. Only a hint: the engine then queries the
//! store.
//!
//! These servers send no notifications, so the store polls. One task per backend polls all awaited
//! keys that are due, with one plain read by primary key. The task exists while there are waiters,
//! and [`LINGER`] longer. It writes and locks nothing.
//!
//! - The pause between two polls of a key is an eighth of the time since the wait began, between 5
//!   and 250 ms. So a release after one second is seen up to an eighth of a second late. A long
//!   wait costs the server few polls.
//! - Polling takes at most a tenth of the time: after each poll, the task pauses for nine times its
//!   duration. A server under load answers late, and is polled less.
//! - A waiter is woken if its key is free, or is held by another grant than the one that the waiter
//!   knows.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{BackendError, Key};
use sqlx::Row;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::link::Link;
use super::sql;
use super::statement::Statements;
use crate::server::{Errand, RowId};

/// The divisor of the wait so far that gives the pause between two polls of a key.
const PART_OF_WAIT: u32 = 8;
/// The minimum pause.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// The maximum pause.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// One of this many units of time may be spent on polling.
const SHARE: u32 = 10;
/// The maximum pause after a poll, so that a server is polled soon after an outage.
const REST_MAX: Duration = Duration::from_secs(1);
/// How long a successful poll counts as recent: longer than the longest pause and rest together.
const ANSWERED_LATELY: Duration = Duration::from_secs(2);
/// How long the task stays without waiters, because another wait is likely.
const LINGER: Duration = Duration::from_secs(1);

/// The waiters of this backend.
pub(super) struct Wakes {
    shared: Arc<Shared>,
}

struct Shared {
    link: Arc<Link>,
    statements: Arc<Statements>,
    waiting: Mutex<Waiting>,
    /// A waiter was added, the last one left, or a poll became due early.
    news: Notify,
}

#[derive(Default)]
struct Waiting {
    waiters: HashMap<u64, Waiter>,
    next_id: u64,
    task: Option<JoinHandle<()>>,
    /// When the server last answered a poll of all due keys.
    answered_at: Option<Instant>,
}

struct Waiter {
    row: RowId,
    /// The token of the grant that the waiter knows.
    mark: u64,
    since: Instant,
    /// When to poll next.
    due: Instant,
    wake: oneshot::Sender<()>,
}

impl Wakes {
    pub(super) fn new(link: Arc<Link>, statements: Arc<Statements>) -> Self {
        let (waiting, news) = (Mutex::default(), Notify::new());
        Self { shared: Arc::new(Shared { link, statements, waiting, news }) }
    }

    /// Returns when the lock in `row` may be free. `mark` is the token of the grant that made the
    /// attempt fail.
    pub(super) async fn wait(&self, row: RowId, mark: u64) {
        let (wake, woken) = oneshot::channel();
        let now = Instant::now();
        let waiter = Waiter { row, mark, since: now, due: now + jittered(PAUSE_MIN), wake };
        let _place = self.enter(waiter);
        // A dropped sender means that the backend was closed.
        let _ = woken.await;
    }

    /// Returns whether the task polls all awaited keys, and the server has answered it recently.
    pub(super) fn are_confirmed(&self) -> bool {
        let waiting = self.shared.waiting();
        waiting.task.as_ref().is_some_and(|task| !task.is_finished())
            && waiting.answered_at.is_some_and(|at| at.elapsed() < ANSWERED_LATELY)
    }

    fn enter(&self, waiter: Waiter) -> Place<'_> {
        let mut waiting = self.shared.waiting();
        let id = waiting.next_id;
        waiting.next_id += 1;
        waiting.waiters.insert(id, waiter);
        if waiting.task.as_ref().is_none_or(JoinHandle::is_finished) {
            let shared = Arc::clone(&self.shared);
            waiting.task = Some(Handle::current().spawn(async move { shared.watch().await }));
        }
        drop(waiting);
        self.shared.news.notify_one();
        Place { shared: &self.shared, id }
    }

    /// Polls this key at once if it has waiters: this process has released it.
    pub(super) fn look_soon(&self, key: &Key) {
        let mut waiting = self.shared.waiting();
        if waiting.waiters.is_empty() {
            return;
        }
        let (row, now) = (self.shared.statements.row(key), Instant::now());
        for waiter in waiting.waiters.values_mut().filter(|waiter| waiter.row == row) {
            waiter.due = now;
        }
        drop(waiting);
        self.shared.news.notify_one();
    }

    /// Ends the task. Waiters, which belong to other registries over the same store, are woken to
    /// try again. The first new waiter starts the task again.
    pub(super) fn close(&self) {
        let mut waiting = self.shared.waiting();
        if let Some(task) = waiting.task.take() {
            task.abort();
        }
        let woken = std::mem::take(&mut waiting.waiters);
        drop(waiting);
        drop(woken);
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
            self.shared.news.notify_one();
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
        loop {
            let next = self.waiting().waiters.values().map(|waiter| waiter.due).min();
            let Some(next) = next else {
                if timeout(LINGER, self.news.notified()).await.is_err() && self.retire() {
                    return;
                }
                continue;
            };
            tokio::select! {
                () = sleep_until(next) => {
                    let begun = Instant::now();
                    self.look().await;
                    sleep((begun.elapsed() * (SHARE - 1)).min(REST_MAX)).await;
                }
                () = self.news.notified() => {}
            }
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

    /// Polls the due keys and wakes their waiters as needed.
    async fn look(&self) {
        let mut answered = true;
        for rows in self.due().chunks(sql::SIZES[sql::SIZES.len() - 1]) {
            // A store error wakes no waiter: the waiter's own attempt, at the next poll, meets the
            // error and returns it.
            match self.held(rows).await {
                Ok(held) => self.wake(rows, &held),
                Err(_) => answered = false,
            }
        }
        if answered {
            self.waiting().answered_at = Some(Instant::now());
        }
    }

    /// Returns the rows to poll now. Rows that are due within half a pause are included, so that
    /// one poll serves them all.
    fn due(&self) -> Vec<RowId> {
        let now = Instant::now();
        let mut waiting = self.waiting();
        let mut rows = Vec::new();
        for waiter in waiting.waiters.values_mut() {
            let pause = pause(now.saturating_duration_since(waiter.since));
            if waiter.due <= now + pause / 2 {
                waiter.due = now + jittered(pause);
                rows.push(waiter.row);
            }
        }
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// Returns the held rows among these, with the tokens of their grants.
    async fn held(&self, rows: &[RowId]) -> Result<HashMap<Vec<u8>, u64>, BackendError> {
        let found = self.link.rows(Errand::Acquire, || self.statements.held(rows)).await?;
        let mut held = HashMap::with_capacity(found.len());
        for row in &found {
            let told = || Ok((row.try_get(0)?, row.try_get::<i64, _>(1)?));
            let (id, token) = told().map_err(|error| self.link.explain(error))?;
            held.insert(id, u64::try_from(token).unwrap_or_default());
        }
        Ok(held)
    }

    fn wake(&self, rows: &[RowId], held: &HashMap<Vec<u8>, u64>) {
        let mut waiting = self.waiting();
        let woken = waiting.waiters.extract_if(|_, waiter| {
            rows.binary_search(&waiter.row).is_ok()
                && held.get(waiter.row.bytes()) != Some(&waiter.mark)
        });
        let woken: Vec<Waiter> = woken.map(|(_, waiter)| waiter).collect();
        // A woken waiter may be dropped at once, and its drop takes the lock.
        drop(waiting);
        for waiter in woken {
            // The receiver may have been dropped.
            let _ = waiter.wake.send(());
        }
    }
}

/// Returns when `look` reports a free lock. For locks that the task does not know, as it polls rows
/// only.
pub(super) async fn until_free<F>(look: impl Fn() -> F)
where
    F: Future<Output = Result<bool, BackendError>>,
{
    let began = Instant::now();
    loop {
        sleep(before_next_look(began)).await;
        // A store error is ignored: the caller's own attempt returns it.
        if matches!(look().await, Ok(true)) {
            return;
        }
    }
}

/// Returns the pause before the next poll of a caller that polls on its own since `began`.
pub(super) fn before_next_look(began: Instant) -> Duration {
    pause(began.elapsed()).mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Returns the pause after a wait of this length.
fn pause(waited: Duration) -> Duration {
    (waited / PART_OF_WAIT).clamp(PAUSE_MIN, PAUSE_MAX)
}

/// Varies the pause by a fifth, so that processes that began to wait together do not poll together.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.8 + 0.4 * fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_grow_rare_as_a_wait_grows_old_and_stay_within_their_bounds() {
        let millis = |millis| Duration::from_millis(millis);
        for (waited, paused) in
            [(0, 5), (40, 5), (80, 10), (800, 100), (2_000, 250), (100_000, 250)]
        {
            assert_eq!(pause(millis(waited)), millis(paused), "after {waited} ms");
        }
        let mut looks = 0;
        let mut waited = Duration::ZERO;
        while waited < millis(60_000) {
            waited += pause(waited);
            looks += 1;
        }
        assert!(looks < 300, "{looks} looks in a minute");
    }
}
