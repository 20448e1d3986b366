//! Wakes waiters of a key after a release by any process. Wake-ups are not authoritative: the
//! engine then queries the store.
//!
//! These servers send no notifications, so the store polls. One task per backend polls all awaited
//! keys that are due, with one plain read by primary key. The task exists while there are waiters,
//! and [`IDLE_TIME_MAX`] longer. It writes and locks nothing.
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

use registry_core::{BackendError, Busy, Claim, Key, Waiters, WakeCheck};
use sqlx::Row;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until};

use super::client::MySqlClient;
use super::sql;
use super::statement::StatementBinder;
use crate::server::{ConnectionUse, RowId};

/// The divisor of the wait so far that gives the pause between two polls of a key.
const PAUSE_DIVISOR: u32 = 8;
/// The minimum pause.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// The maximum pause.
const PAUSE_MAX: Duration = Duration::from_millis(250);
/// One of this many units of time may be spent on polling.
const POLL_TIME_DIVISOR: u32 = 10;
/// The maximum pause after a poll, so that a server is polled soon after an outage.
const PAUSE_AFTER_POLL_MAX: Duration = Duration::from_secs(1);
/// How long a successful poll counts as recent: longer than the longest pause and rest together.
const CONFIRMATION_MAX_AGE: Duration = Duration::from_secs(2);
/// How long the task stays without waiters, because another wait is likely.
const IDLE_TIME_MAX: Duration = Duration::from_secs(1);

/// The waiters of this backend, and the task that polls for them.
pub(super) struct MySqlReleasePoller {
    shared: Arc<PollerShared>,
}

struct PollerShared {
    client: Arc<MySqlClient>,
    statements: Arc<StatementBinder>,
    waiters: Waiters<RowId, PolledWaiter>,
    /// When the server last answered a poll of all due keys.
    answered_at: Mutex<Option<Instant>>,
}

struct PolledWaiter {
    /// The token of the grant that the waiter knows.
    known_token: u64,
    since: Instant,
    /// When to poll next.
    due: Instant,
}

impl MySqlReleasePoller {
    pub(super) fn new(client: Arc<MySqlClient>, statements: Arc<StatementBinder>) -> Self {
        let (waiters, answered_at) = (Waiters::default(), Mutex::default());
        Self { shared: Arc::new(PollerShared { client, statements, waiters, answered_at }) }
    }

    /// Returns when the lock in `row` may be free. `known_token` is the token of the grant that
    /// made the attempt fail.
    pub(super) async fn wait(&self, row: RowId, known_token: u64) {
        let (waiters, now) = (&self.shared.waiters, Instant::now());
        let state = PolledWaiter { known_token, since: now, due: now + jittered(PAUSE_MIN) };
        let waiter = waiters.register(row, state);
        waiters.ensure_task(|| Handle::current().spawn(Arc::clone(&self.shared).run()));
        waiter.woken().await;
    }

    pub(super) fn wake_check(&self) -> Arc<dyn WakeCheck> {
        Arc::clone(&self.shared) as _
    }

    /// Polls this key at once if it has waiters: this process has released it.
    pub(super) fn poll_soon(&self, key: &Key) {
        let waiters = &self.shared.waiters;
        if waiters.is_empty() {
            return;
        }
        let (row, now) = (self.shared.statements.row(key), Instant::now());
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
    /// Returns whether the task polls all awaited keys, and the server has answered it recently.
    fn wakes_confirmed(&self, _claim: &Claim, _busy: &Busy) -> bool {
        let answered_at = *self.answered_at();
        self.waiters.has_task() && answered_at.is_some_and(|at| at.elapsed() < CONFIRMATION_MAX_AGE)
    }
}

impl PollerShared {
    fn answered_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.answered_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the task.
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
        let mut answered = true;
        for rows in self.due().chunks(sql::SIZES[sql::SIZES.len() - 1]) {
            // A store error wakes no waiter: the waiter's own attempt, at the next poll, receives
            // the error and returns it.
            match self.held(rows).await {
                Ok(held) => self.wake(rows, &held),
                Err(_) => answered = false,
            }
        }
        if answered {
            *self.answered_at() = Some(Instant::now());
        }
    }

    /// Returns the rows to poll now. Rows that are due within half a pause are included, so that
    /// one poll serves them all.
    fn due(&self) -> Vec<RowId> {
        let now = Instant::now();
        let mut rows = Vec::new();
        self.waiters.for_each(|row, waiter| {
            let pause = pause(now.saturating_duration_since(waiter.since));
            if waiter.due <= now + pause / 2 {
                waiter.due = now + jittered(pause);
                rows.push(*row);
            }
        });
        rows.dedup();
        rows
    }

    /// Returns the held rows among these, with the tokens of their grants.
    async fn held(&self, rows: &[RowId]) -> Result<HashMap<Vec<u8>, u64>, BackendError> {
        let found = self.client.rows(ConnectionUse::Acquire, || self.statements.held(rows)).await?;
        let mut held = HashMap::with_capacity(found.len());
        for row in &found {
            let decode = || Ok((row.try_get(0)?, row.try_get::<i64, _>(1)?));
            let (id, token) = decode().map_err(|error| self.client.explain(error))?;
            held.insert(id, u64::try_from(token).unwrap_or_default());
        }
        Ok(held)
    }

    fn wake(&self, rows: &[RowId], held: &HashMap<Vec<u8>, u64>) {
        self.waiters.wake_if(|row, waiter| {
            rows.binary_search(row).is_ok() && held.get(row.bytes()) != Some(&waiter.known_token)
        });
    }
}

/// Returns when `is_free` reports a free lock. For locks that the task does not know, as it polls
/// rows only.
pub(super) async fn poll_until_free<F>(is_free: impl Fn() -> F)
where
    F: Future<Output = Result<bool, BackendError>>,
{
    let started_at = Instant::now();
    loop {
        sleep(poll_pause(started_at)).await;
        // A store error is ignored: the caller's own attempt returns it.
        if matches!(is_free().await, Ok(true)) {
            return;
        }
    }
}

/// Returns the pause before the next poll of a caller that polls on its own since `started_at`.
pub(super) fn poll_pause(started_at: Instant) -> Duration {
    pause(started_at.elapsed()).mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Returns the pause after a wait of this length.
fn pause(waited: Duration) -> Duration {
    (waited / PAUSE_DIVISOR).clamp(PAUSE_MIN, PAUSE_MAX)
}

/// Varies the pause by a fifth, so that processes that began to wait together do not poll together.
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
