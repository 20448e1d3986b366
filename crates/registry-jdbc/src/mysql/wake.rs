//! Wakes those who wait for a key, when it has been released, by whichever process. Only a hint: the engine asks the store.
//!
//! These servers tell nobody of changes, so somebody has to look. One task per backend looks at all awaited keys for which it is time, with one
//! plain read by primary key; it exists only while somebody waits, and a moment longer. It writes and locks nothing.
//!
//! - How often: the pause between two looks at a key is an eighth of the time that it has been waited for. So a lock that is held for 8 ms is
//!   had 1 ms late, one that is held for a second an eighth of a second late, and a long wait costs its server few looks.
//! - It spends a tenth of the time on looking: the next look is no sooner than nine times what the last one took. A server under load answers
//!   late, and is asked less.
//! - It wakes a waiter whose key it finds free, or held by another grant than the waiter was told of when it came.

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

/// The pause between two looks at a key is this part of the time that it has been waited for.
const PART_OF_WAIT: u32 = 8;
/// But not shorter than this,
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// nor longer than this.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// Of so many units of time, one may be spent on looking.
const SHARE: u32 = 10;
/// But the rest after a look is not longer than this: a server that was away is looked at soon after it is back.
const REST_MAX: Duration = Duration::from_secs(1);
/// A look that was answered counts for this long: longer than the longest pause and rest together.
const ANSWERED_LATELY: Duration = Duration::from_secs(2);
/// How long the task stays without waiters: who waited once will again.
const LINGER: Duration = Duration::from_secs(1);

/// Those who wait in this backend.
pub(super) struct Wakes {
    shared: Arc<Shared>,
}

struct Shared {
    link: Arc<Link>,
    statements: Arc<Statements>,
    waiting: Mutex<Waiting>,
    /// Somebody came, or the last one went, or a look is due before its time.
    news: Notify,
}

#[derive(Default)]
struct Waiting {
    waiters: HashMap<u64, Waiter>,
    next_id: u64,
    task: Option<JoinHandle<()>>,
    /// When the server last answered a look at all keys that were due.
    answered_at: Option<Instant>,
}

struct Waiter {
    row: RowId,
    /// The token of the grant that the waiter knows of.
    mark: u64,
    since: Instant,
    /// When to look next.
    due: Instant,
    wake: oneshot::Sender<()>,
}

impl Wakes {
    pub(super) fn new(link: Arc<Link>, statements: Arc<Statements>) -> Self {
        let (waiting, news) = (Mutex::default(), Notify::new());
        Self { shared: Arc::new(Shared { link, statements, waiting, news }) }
    }

    /// Returns when the lock in `row` may be free. `mark` is the token of the grant that stood in the way.
    pub(super) async fn wait(&self, row: RowId, mark: u64) {
        let (wake, woken) = oneshot::channel();
        let now = Instant::now();
        let waiter = Waiter { row, mark, since: now, due: now + jittered(PAUSE_MIN), wake };
        let _place = self.enter(waiter);
        // An end without a word is the close.
        let _ = woken.await;
    }

    /// Returns whether the task looks at all awaited keys, and the server has answered it lately.
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

    /// Looks at this key at once, if anybody waits for it: this process itself has released it.
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

    /// Ends the task. Those who wait, in other registries over the same store, are woken to come again; it begins anew with the first of them.
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

/// A waiter's place; leaving it is dropping it.
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
        // No code that runs under it can panic half-way through a change.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The task.
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

    /// Ends the task unless somebody has come; under the lock, so that nobody comes in between.
    fn retire(&self) -> bool {
        let mut waiting = self.waiting();
        let idle = waiting.waiters.is_empty();
        if idle {
            waiting.task = None;
        }
        idle
    }

    /// Looks at the keys for which it is time, and wakes those for whom it is.
    async fn look(&self) {
        let mut answered = true;
        for rows in self.due().chunks(sql::SIZES[sql::SIZES.len() - 1]) {
            // Trouble wakes nobody: the waiter's own attempt, at the next poll, will meet it and can tell it.
            match self.held(rows).await {
                Ok(held) => self.wake(rows, &held),
                Err(_) => answered = false,
            }
        }
        if answered {
            self.waiting().answered_at = Some(Instant::now());
        }
    }

    /// The rows to look at now. Those that would be next in a moment come along, so that one look serves them all.
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

    /// Those of the rows that are held, and by which grant.
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
        // Whoever is woken may be dropped on the spot, and that leaves the line.
        drop(waiting);
        for waiter in woken {
            // Nobody listens if the waiter has just gone.
            let _ = waiter.wake.send(());
        }
    }
}

/// Returns when `look` says that the lock is free. For locks that the task knows nothing of: it looks at rows.
pub(super) async fn until_free<F>(look: impl Fn() -> F)
where
    F: Future<Output = Result<bool, BackendError>>,
{
    let began = Instant::now();
    loop {
        sleep(before_next_look(began)).await;
        // Whoever wants the lock finds out about trouble better than this.
        if matches!(look().await, Ok(true)) {
            return;
        }
    }
}

/// The pause before the next look of somebody who has looked by himself since then.
pub(super) fn before_next_look(began: Instant) -> Duration {
    pause(began.elapsed()).mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// The pause after a wait of this length.
fn pause(waited: Duration) -> Duration {
    (waited / PART_OF_WAIT).clamp(PAUSE_MIN, PAUSE_MAX)
}

/// A fifth more or less, so that processes that began to wait together do not look together.
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
