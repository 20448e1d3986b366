//! The listener: wakes waiting callers when a release notification arrives. While callers wait, and
//! for about half a minute after that, it has one connection and one task. It neither acquires nor
//! releases registry locks. Its advisory locks only show that it exists.
//!
//! A notification can be lost with its connection, so every reconnect wakes all waiting callers.
//! The engine also polls, so no wait relies on notifications alone. The listener receives all
//! releases of a namespace and stores the last 1024. So a caller misses no release between the
//! answer "busy" and its wait.
//!
//! A notification costs the server more than the rest of a release, because the server serialises
//! the transactions that send one. So each listener holds advisory locks, and a release without
//! listeners sends no notification; see [`NotificationChannel`].

use std::collections::VecDeque;
use std::fmt;
use std::fmt::Write as _;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{BackendError, Busy, Claim, Waiters, WakeCheck};
use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::error;
use crate::server::PoolError;

/// Identifies a lock in notifications.
type LockId = [u8; 16];

/// The notification channel of one namespace, and its presence locks: advisory locks that show
/// whether a listener exists.
///
/// A listener's session holds all presence locks of the channel in shared mode. A release tries to
/// take one presence lock exclusively until its transaction ends. If it gets the presence lock, no
/// listener exists. A listener that starts now waits for the end of this transaction before it
/// wakes its callers, which then try the registry's lock again.
///
/// If the release fails to take the presence lock, a listener exists, or another release holds that
/// lock. The second case costs one needless notification, and several presence locks make it rare.
#[derive(Debug, Clone)]
pub(super) struct NotificationChannel {
    name: String,
    first_presence_lock: i64,
}

impl NotificationChannel {
    /// Returns the channel of the namespace with this hash.
    pub(super) fn new(namespace_hash: [u8; 8]) -> Self {
        // The name contains all 64 bits of the hash. The keys of the presence locks are the hash
        // with its low 4 bits replaced by 0 to 15.
        let first_presence_lock = i64::from_be_bytes(namespace_hash) & !(PRESENCE_LOCKS - 1);
        Self { name: format!("lock_registry_{}", hex(&namespace_hash)), first_presence_lock }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the presence lock that a release of this lock tries to take exclusively.
    pub(super) fn presence_lock(&self, lock: LockId) -> i64 {
        self.first_presence_lock + i64::from(lock[0]) % PRESENCE_LOCKS
    }

    /// Listens to the channel, and takes the presence locks for this session.
    async fn listen(&self, listener: &mut PgListener) -> Result<(), sqlx::Error> {
        listener.listen(&self.name).await?;
        let acquire_all = "SELECT pg_advisory_lock_shared(lock_key) FROM generate_series($1, $1 + $2 - 1) AS lock_key";
        let acquire_all =
            sqlx::query(acquire_all).bind(self.first_presence_lock).bind(PRESENCE_LOCKS);
        listener.execute(acquire_all).await.map(drop)
    }
}

/// The number of presence locks, a power of two. Each listener occupies that many entries of the
/// server's lock table.
const PRESENCE_LOCKS: i64 = 16;

pub(super) struct PgReleaseListener {
    server: PgConnectOptions,
    channel: NotificationChannel,
    shared: Arc<ListenerShared>,
}

#[derive(Default)]
struct ListenerShared {
    state: Mutex<ListenerState>,
    waiters: Waiters<LockId>,
}

#[derive(Default)]
struct ListenerState {
    /// The number of the task that may change this state. An aborted task may still run its last
    /// poll, and a task ends without notice when its runtime shuts down.
    task: u64,
    /// The sequence number of the last event: a notification, or the start of a connection.
    last_sequence: u64,
    /// All releases after this sequence number are in `releases`. `None` while the listener is not
    /// connected.
    complete_since: Option<u64>,
    /// Whether the connection has received its own probe. A connection through a transaction pooler
    /// never receives its probe.
    is_verified: bool,
    /// The latest releases with their sequence numbers.
    releases: VecDeque<(u64, LockId)>,
}

impl PgReleaseListener {
    /// Creates a listener for `channel`. It connects when the first caller waits.
    pub(super) fn new(server: PgConnectOptions, channel: NotificationChannel) -> Self {
        Self { server, channel, shared: Arc::default() }
    }

    /// Returns the current position, for [`wait`](Self::wait). A caller reads the position before
    /// it queries the lock. Then `wait` also sees releases since the query.
    pub(super) fn position(&self) -> u64 {
        self.shared.state().last_sequence
    }

    /// Waits until the lock may have been released after `position`. If the listener was
    /// disconnected at `position`, returns as soon as it has connected.
    pub(super) async fn wait(&self, lock: LockId, position: u64) {
        let waiters = &self.shared.waiters;
        let waiter = waiters.register(lock, ());
        waiters.ensure_task(|| {
            let (shared, server) = (Arc::clone(&self.shared), self.server.clone());
            let task = self.shared.begin_task();
            tokio::spawn(run_listener(shared, task, server, self.channel.clone()))
        });
        if !self.shared.state().ends_wait_at_once(&lock, position) {
            waiter.woken().await;
        }
    }

    pub(super) fn wake_check(&self) -> Arc<dyn WakeCheck> {
        Arc::clone(&self.shared) as _
    }

    /// Listens on a new connection and runs `send_probe`, which sends `payload`. Returns whether
    /// `payload` arrived. The payload does not arrive if a pooler changes connections, or if the
    /// two connections lead to different databases.
    pub(super) async fn self_test(
        &self,
        payload: &str,
        send_probe: impl Future<Output = Result<(), BackendError>>,
    ) -> Result<bool, BackendError> {
        let listening = timeout(SELF_TEST_TIMEOUT, connect(&self.server, &self.channel)).await;
        let mut listener = match listening {
            Ok(Ok(listener)) => listener,
            Ok(Err(error)) => return Err(error::not_connected(PoolError::Sqlx(error))),
            Err(_) => return Err(error::not_connected(PoolError::TimedOut)),
        };
        send_probe.await?;
        let received = timeout(SELF_TEST_TIMEOUT, async {
            while let Ok(Some(message)) = listener.try_recv().await {
                if message.payload() == payload {
                    return true;
                }
            }
            false
        });
        Ok(received.await.unwrap_or(false))
    }

    /// Closes the connection, and wakes all callers. The listener reconnects when a caller waits
    /// again.
    pub(super) fn close(&self) {
        // The task that is aborted then has an earlier number, so it cannot change the state any
        // more. After the abort, a new task might already have begun.
        self.shared.begin_task();
        self.shared.waiters.close();
    }
}

impl Drop for PgReleaseListener {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for PgReleaseListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgReleaseListener")
            .field("channel", &self.channel.name)
            .finish_non_exhaustive()
    }
}

impl WakeCheck for ListenerShared {
    /// Returns whether the listener receives every release since the attempt: its task runs, it has
    /// been connected since then, and it has received its own probe.
    fn confirms_wake_ups(&self, _claim: &Claim, busy: &Busy) -> bool {
        if !self.waiters.has_task() {
            return false;
        }
        let state = self.state();
        state.is_verified
            && state
                .complete_since
                .is_some_and(|complete_since| complete_since <= busy.seen_version)
    }
}

impl ListenerShared {
    fn state(&self) -> MutexGuard<'_, ListenerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Discards what an earlier task has recorded about its connection. Returns the number of the
    /// task that starts now.
    fn begin_task(&self) -> u64 {
        let mut state = self.state();
        state.task += 1;
        state.set_disconnected();
        state.task
    }

    /// Records that the task misses no notification from now on. It may have missed earlier
    /// notifications.
    fn mark_connected(&self, task: u64) {
        {
            let mut state = self.state();
            if state.task != task {
                return;
            }
            state.last_sequence += 1;
            state.complete_since = Some(state.last_sequence);
            state.releases.clear();
        }
        self.waiters.wake_all();
    }

    fn mark_disconnected(&self, task: u64) {
        let mut state = self.state();
        if state.task == task {
            state.set_disconnected();
        }
    }

    /// Records that the connection of the task has received its own probe.
    fn mark_verified(&self, task: u64) {
        let mut state = self.state();
        state.is_verified |= state.task == task;
    }

    fn on_release(&self, lock: LockId) {
        {
            let mut state = self.state();
            state.last_sequence += 1;
            let number = state.last_sequence;
            state.releases.push_back((number, lock));
            if state.releases.len() > RELEASES_MAX
                && let Some((dropped, _)) = state.releases.pop_front()
            {
                state.complete_since =
                    state.complete_since.map(|complete_since| complete_since.max(dropped));
            }
        }
        self.waiters.wake(&lock);
    }
}

impl ListenerState {
    fn set_disconnected(&mut self) {
        self.complete_since = None;
        self.is_verified = false;
    }

    fn ends_wait_at_once(&self, lock: &LockId, position: u64) -> bool {
        let Some(complete_since) = self.complete_since else { return false };
        let is_after = |(number, _): &&(u64, LockId)| *number > position;
        complete_since > position
            || self.releases.iter().rev().take_while(is_after).any(|(_, released)| released == lock)
    }
}

/// Keeps the listener connected. Ends when more than [`IDLE_CHECKS_MAX`] consecutive checks have
/// found no waiting caller, or when an attempt to connect fails while no caller waits.
async fn run_listener(
    shared: Arc<ListenerShared>,
    task: u64,
    server: PgConnectOptions,
    channel: NotificationChannel,
) {
    let mut pause = RETRY_MIN;
    loop {
        let connected = timeout(RESPONSE_TIMEOUT, connect(&server, &channel)).await;
        if let Ok(Ok(listener)) = connected {
            pause = RETRY_MIN;
            shared.mark_connected(task);
            let is_idle = receive(&shared, task, listener, &channel).await;
            shared.mark_disconnected(task);
            if is_idle && shared.waiters.try_stop() {
                return;
            }
        } else if shared.waiters.try_stop() {
            return;
        }
        // The pause is random, so that many listeners do not reconnect at the same time to a server
        // that has just started.
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

async fn connect(
    server: &PgConnectOptions,
    channel: &NotificationChannel,
) -> Result<PgListener, sqlx::Error> {
    // `PgListener` needs a pool. This pool has a single connection and never opens another
    // connection.
    let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
    let pool = pool.test_before_acquire(false).connect_lazy_with(server.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    channel.listen(&mut listener).await?;
    Ok(listener)
}

/// Receives notifications. Returns false if the connection breaks, true if more than
/// [`IDLE_CHECKS_MAX`] consecutive checks have found no waiting caller.
async fn receive(
    shared: &ListenerShared,
    task: u64,
    mut listener: PgListener,
    channel: &NotificationChannel,
) -> bool {
    let probe = format!("{PROBE_PREFIX}{:016x}", fastrand::u64(..));
    let notify = sqlx::query("SELECT pg_notify($1, $2)").bind(&channel.name).bind(&probe);
    if !matches!(timeout(RESPONSE_TIMEOUT, listener.execute(notify)).await, Ok(Ok(_))) {
        return false;
    }
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut idle_checks = 0_u32;
    loop {
        tokio::select! {
            biased;
            received = listener.try_recv() => match received {
                Ok(Some(message)) => {
                    if let Some(lock) = parse_id(message.payload()) {
                        shared.on_release(lock);
                    } else if message.payload() == probe {
                        shared.mark_verified(task);
                    }
                }
                Ok(None) | Err(_) => return false,
            },
            _ = ticks.tick() => {
                idle_checks = if shared.waiters.is_empty() { idle_checks + 1 } else { 0 };
                if idle_checks > IDLE_CHECKS_MAX {
                    return true;
                }
                // The query detects a half-open connection, which does not answer.
                let check = timeout(RESPONSE_TIMEOUT, listener.execute("SELECT 1")).await;
                if !matches!(check, Ok(Ok(_))) {
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

fn parse_id(message: &str) -> Option<LockId> {
    u128::from_str_radix(message, 16).ok().map(u128::to_be_bytes)
}

/// The prefix of the probe by which a connection checks that it receives notifications. No lock's
/// message begins like this.
const PROBE_PREFIX: &str = "proof ";

/// The number of stored releases. They cover the time between the answer "busy" and the wait.
const RELEASES_MAX: usize = 1024;

/// The first pause between two attempts to connect. The pause doubles up to [`RETRY_MAX`]. Each
/// pause is randomly shortened by up to half.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// The interval between checks of the connection.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The maximum number of consecutive checks without a waiting caller. The next such check closes
/// the connection.
const IDLE_CHECKS_MAX: u32 = 6;

/// The time limit of each of the two steps of `self_test`: connecting and receiving. Both together
/// are shorter than the engine's default time-out.
const SELF_TEST_TIMEOUT: Duration = Duration::from_secs(1);

/// The time limit for the server's answer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    const A: LockId = [1; 16];
    const B: LockId = [2; 16];

    #[test]
    fn a_release_between_the_query_and_the_wait_is_not_missed() {
        let shared = ListenerShared::default();
        shared.mark_connected(shared.begin_task());
        let position = shared.state().last_sequence;
        assert!(!shared.state().ends_wait_at_once(&A, position));
        shared.on_release(B);
        assert!(!shared.state().ends_wait_at_once(&A, position));
        shared.on_release(A);
        assert!(shared.state().ends_wait_at_once(&A, position));
        let position = shared.state().last_sequence;
        assert!(!shared.state().ends_wait_at_once(&A, position));
    }

    #[test]
    fn a_wait_that_may_have_missed_a_release_returns() {
        let shared = ListenerShared::default();
        let position = shared.state().last_sequence;
        assert!(!shared.state().ends_wait_at_once(&A, position), "no listener is connected yet");
        let task = shared.begin_task();
        shared.mark_connected(task);
        assert!(shared.state().ends_wait_at_once(&A, position));
        let position = shared.state().last_sequence;
        shared.mark_disconnected(task);
        shared.mark_connected(task);
        assert!(shared.state().ends_wait_at_once(&A, position));
        let position = shared.state().last_sequence;
        (0..=RELEASES_MAX).for_each(|_| shared.on_release(B));
        assert!(shared.state().ends_wait_at_once(&A, position), "more releases than are stored");
        let position = shared.state().last_sequence;
        assert!(!shared.state().ends_wait_at_once(&A, position));
    }

    #[test]
    fn wake_ups_are_confirmed_only_by_the_verified_connection_of_the_running_task() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let shared = ListenerShared::default();
        let claim = Claim::new(registry_core::Key::new("key").unwrap(), Duration::from_secs(30));
        let confirms = || {
            let busy = Busy::new().with_seen_version(shared.state().last_sequence);
            shared.confirms_wake_ups(&claim, &busy)
        };
        let task = shared.begin_task();
        shared.waiters.ensure_task(|| runtime.spawn(std::future::pending()));
        shared.mark_connected(task);
        assert!(!confirms(), "the probe has not arrived");
        shared.mark_verified(task);
        assert!(confirms());
        // The task ends with its runtime, and cannot record the end of its connection.
        drop(runtime);
        assert!(!confirms());

        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let next_task = shared.begin_task();
        shared.waiters.ensure_task(|| runtime.spawn(std::future::pending()));
        // The last poll of the earlier task.
        shared.mark_connected(task);
        shared.mark_verified(task);
        assert!(!confirms());
        shared.mark_connected(next_task);
        shared.mark_disconnected(task);
        shared.mark_verified(next_task);
        assert!(confirms());
    }

    #[test]
    fn notification_payloads_round_trip() {
        let lock: LockId = std::array::from_fn(|n| u8::try_from(n * 17).unwrap());
        assert_eq!(parse_id(&hex(&lock)), Some(lock));
        assert_eq!(parse_id("another payload"), None);
    }
}
