//! Wakes waiters of a key after a release by any process. A wake-up is only a hint: the engine then
//! makes an attempt.
//!
//! These servers send no notifications, so the store polls. One task per backend polls all keys
//! that are due. One plain read by primary key covers up to 1,024 keys. The task exists while there
//! are waiters, and for [`IDLE_TIME_MAX`] after the last waiter. It writes and locks nothing.
//!
//! - The pause between two polls of a key is an eighth of the time since the wait began, between 5
//!   and 250 ms. It varies randomly by up to a fifth. So after a wait of one second, the task sees
//!   a release at most about an eighth of a second late. A long wait costs the server few polls.
//! - After each poll, the task pauses for nine times the duration of the poll, but for at most one
//!   second. So the task polls a slow server less often.
//! - The task wakes a waiter if the waiter's key is free, or if another grant than before holds the
//!   key.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{BackendError, Busy, Claim, Key, Waiters, WakeCheck};
use sqlx::{MySql, Row};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until};

use super::client::MySqlClient;
use super::sql;
use super::statement::PollStatements;
use crate::server::{ConnectionUse, RowId, ServerErrors as _};

/// The pause between two polls of a key is the wait so far divided by this number.
const PAUSE_DIVISOR: u32 = 8;
/// The minimum pause between two polls of a key, before [`jittered`] varies it.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// The maximum pause between two polls of a key, before [`jittered`] varies it.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// Polls take at most a tenth (one divided by this number) of the task's time, unless
/// [`PAUSE_AFTER_POLL_MAX`] limits the pause after a poll.
const POLL_TIME_DIVISOR: u32 = 10;
/// The maximum pause after a poll, so that a server is polled soon after an outage.
const PAUSE_AFTER_POLL_MAX: Duration = Duration::from_secs(1);
/// How long a successful poll confirms that wake-ups arrive. It is longer than [`PAUSE_MAX`] and
/// [`PAUSE_AFTER_POLL_MAX`] together.
const CONFIRMATION_MAX_AGE: Duration = Duration::from_secs(2);
/// How long the task continues without waiters. Another wait within this time is likely.
const IDLE_TIME_MAX: Duration = Duration::from_secs(1);

/// The waiters of this backend, and the task that polls for them.
pub(super) struct MySqlReleasePoller {
    shared: Arc<PollerShared>,
}

struct PollerShared {
    client: Arc<MySqlClient>,
    statements: Arc<PollStatements>,
    waiters: Waiters<RowId, PolledWaiter>,
    /// When the server last answered a poll of all due keys.
    answered_at: Mutex<Option<Instant>>,
}

struct PolledWaiter {
    /// The version of the row that the waiter's attempt found: the token of the grant, or `since`
    /// of the record.
    known_version: u64,
    started_at: Instant,
    /// When to poll next.
    due: Instant,
}

impl MySqlReleasePoller {
    pub(super) fn new(client: Arc<MySqlClient>, statements: Arc<PollStatements>) -> Self {
        let (waiters, answered_at) = (Waiters::default(), Mutex::default());
        Self { shared: Arc::new(PollerShared { client, statements, waiters, answered_at }) }
    }

    /// Waits until the lock in `row` may be free. `known_version` is the version of the row that
    /// the caller's attempt found.
    pub(super) async fn wait(&self, row: RowId, known_version: u64) {
        let (waiters, now) = (&self.shared.waiters, Instant::now());
        let polled =
            PolledWaiter { known_version, started_at: now, due: now + jittered(PAUSE_MIN) };
        let waiter = waiters.register(row, polled);
        waiters.ensure_task(|| Handle::current().spawn(Arc::clone(&self.shared).run()));
        waiter.woken().await;
    }

    pub(super) fn wake_check(&self) -> Arc<dyn WakeCheck> {
        Arc::clone(&self.shared) as _
    }

    /// Makes the next poll due for this key, if the key has waiters. Called after a release by this
    /// process. The poll begins at once, or after the pause that follows the previous poll.
    pub(super) fn poll_soon(&self, key: &Key) {
        let waiters = &self.shared.waiters;
        if waiters.is_empty() {
            return;
        }
        let (row, now) = (self.shared.statements.row_id(key), Instant::now());
        waiters.for_each(|waiting, waiter| {
            if *waiting == row {
                waiter.due = now;
            }
        });
        waiters.notify_task();
    }

    /// Ends the task, and wakes all waiters.
    pub(super) fn close(&self) {
        self.shared.waiters.close();
    }
}

impl Drop for MySqlReleasePoller {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for MySqlReleasePoller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlReleasePoller")
            .field("waiters", &self.shared.waiters)
            .finish_non_exhaustive()
    }
}

impl WakeCheck for PollerShared {
    /// Returns whether the task exists, and the server has recently answered a poll of all due
    /// keys.
    fn confirms_wake_ups(&self, _claim: &Claim, _busy: &Busy) -> bool {
        let answered_at = *self.answered_at();
        self.waiters.has_task() && answered_at.is_some_and(|at| at.elapsed() < CONFIRMATION_MAX_AGE)
    }
}

impl PollerShared {
    fn answered_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.answered_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls until there have been no waiters for [`IDLE_TIME_MAX`].
    async fn run(self: Arc<Self>) {
        while self.waiters.wait_for_waiter(IDLE_TIME_MAX).await {
            let mut next = None;
            self.waiters.for_each(|_, waiter| next = next.into_iter().chain([waiter.due]).min());
            let Some(next) = next else { continue };
            tokio::select! {
                () = sleep_until(next) => {
                    let poll_started_at = Instant::now();
                    self.poll_due().await;
                    let pause = poll_started_at.elapsed() * (POLL_TIME_DIVISOR - 1);
                    sleep(pause.min(PAUSE_AFTER_POLL_MAX)).await;
                }
                () = self.waiters.changed() => {}
            }
        }
    }

    /// Polls the due keys and wakes their waiters as needed.
    async fn poll_due(&self) {
        let due = self.take_due();
        // Without a due key, for example after its waiter gave up, this sends no query.
        let mut answered = !due.is_empty();
        for rows in due.chunks(sql::LIST_SIZES[sql::LIST_SIZES.len() - 1]) {
            // A store error wakes no waiter. The waiter's next attempt receives the error and
            // returns it.
            match self.query_held(rows).await {
                Ok(held) => self.wake_released(rows, &held),
                Err(_) => answered = false,
            }
        }
        if answered {
            *self.answered_at() = Some(Instant::now());
        }
    }

    /// Returns the rows to poll now, and schedules their next polls. Rows that are due within half
    /// of their pause are included, so that one poll covers them all.
    fn take_due(&self) -> Vec<RowId> {
        let now = Instant::now();
        let mut rows = Vec::new();
        self.waiters.for_each(|row, waiter| {
            let pause = pause(now.saturating_duration_since(waiter.started_at));
            if waiter.due <= now + pause / 2 {
                waiter.due = now + jittered(pause);
                rows.push(*row);
            }
        });
        rows.dedup();
        rows
    }

    /// Returns the ids and versions of those rows that are held.
    async fn query_held(&self, rows: &[RowId]) -> Result<HashMap<Vec<u8>, u64>, BackendError> {
        let statement = self.statements.held_rows(rows);
        let found = self.client.query(ConnectionUse::Acquire, &statement).await?;
        let mut held = HashMap::with_capacity(found.len());
        for row in &found {
            let decode = || Ok((row.try_get(0)?, row.try_get::<i64, _>(1)?));
            let (id, version) = decode().map_err(MySql::explain)?;
            held.insert(id, u64::try_from(version).unwrap_or_default());
        }
        Ok(held)
    }

    fn wake_released(&self, rows: &[RowId], held: &HashMap<Vec<u8>, u64>) {
        self.waiters.wake_if(|row, waiter| {
            rows.binary_search(row).is_ok() && held.get(row.bytes()) != Some(&waiter.known_version)
        });
    }
}

/// Waits until `is_free` reports a free lock. For session and row locks, which the task does not
/// poll.
pub(super) async fn poll_until_free<F>(is_free: impl Fn() -> F)
where
    F: Future<Output = Result<bool, BackendError>>,
{
    let started_at = Instant::now();
    loop {
        sleep(poll_pause(started_at)).await;
        // A store error is ignored, because the caller's next attempt returns it.
        if matches!(is_free().await, Ok(true)) {
            return;
        }
    }
}

/// Returns the pause before the next poll of a caller that has polled since `started_at`.
pub(super) fn poll_pause(started_at: Instant) -> Duration {
    pause(started_at.elapsed()).mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Returns the pause after a wait of this length.
fn pause(waited: Duration) -> Duration {
    (waited / PAUSE_DIVISOR).clamp(PAUSE_MIN, PAUSE_MAX)
}

/// Varies the pause by up to a fifth, so that processes whose waits began at the same time do not
/// poll at the same time.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.8 + 0.4 * fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_pauses_grow_with_the_wait_within_their_bounds() {
        let millis = |millis| Duration::from_millis(millis);
        for (waited, paused) in
            [(0, 5), (40, 5), (80, 10), (800, 100), (2_000, 250), (100_000, 250)]
        {
            assert_eq!(pause(millis(waited)), millis(paused), "after {waited} ms");
        }
        let mut polls = 0;
        let mut waited = Duration::ZERO;
        while waited < millis(60_000) {
            waited += pause(waited);
            polls += 1;
        }
        assert!(polls < 300, "{polls} polls in a minute");
    }
}
