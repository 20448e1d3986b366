//! Takes snapshots of the store, and publishes each of them for all connections.
//!
//! An open page causes no further snapshots. Text that is the same for all connections is formatted
//! once per snapshot, and the connections share its bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use lock_registry::modes::WaitingClaim;
use lock_registry::{Holder, Key, LockError, Registry};
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tokio::sync::{Notify, broadcast};
use tokio::time::sleep;

use super::history::{History, ObservedHold};
use super::wait_graph::WaitGraph;
use crate::output::whole_millis;
use crate::snapshot::{GrantCounter, Snapshot};

/// Takes the snapshots, and keeps the state that all connections share.
#[derive(Debug)]
pub(crate) struct Monitor {
    registry: Arc<Registry>,
    published: RwLock<Arc<Published>>,
    /// The events for pages that already show the published snapshot.
    changes: broadcast::Sender<Bytes>,
    history: Mutex<History>,
    refresh: Notify,
}

/// The last snapshot that succeeded, the values that are derived from it, and the result of the
/// last attempt. Only the [`OnceLock`] fields change: each is set at its first use.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) snapshot: Arc<Snapshot>,
    /// The time of the snapshot in milliseconds since 1970.
    pub(crate) taken_at_ms: u64,
    /// The time of the last attempt, which may have failed.
    tried_at_ms: u64,
    /// The duration of the snapshot.
    pub(crate) took: Duration,
    /// The error of the last attempt to take a snapshot, if it failed.
    pub(crate) error: Option<String>,
    /// The number of failed attempts since this process started.
    pub(crate) failures: u64,
    pub(crate) grants_per_second: f64,
    pub(crate) graph: Arc<WaitGraph>,
    rows: Arc<BTreeMap<Key, Row>>,
    /// The event with all rows, for a page that has none yet.
    all_rows_event: OnceLock<Bytes>,
    /// The answer of `/api/locks`.
    pub(crate) listing: OnceLock<Bytes>,
    /// The answer of `/metrics`.
    pub(crate) metrics: OnceLock<Bytes>,
}

/// The holders and waiters of a key as the page shows them. Times are points in time, in
/// milliseconds since 1970. Unlike ages, they change only if the lock changes or is renewed.
/// [`keep_times`] removes small differences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Row {
    key: Key,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    holders: Vec<Claimant>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    waiters: Vec<Claimant>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Claimant {
    label: Option<String>,
    mode: String,
    /// Text, because a number in JavaScript represents only integers of up to 53 bits exactly.
    token: Option<String>,
    /// The time of the grant, or of the beginning of the wait.
    since: Option<u64>,
    /// The end of the lease.
    ends: Option<u64>,
}

/// The data of one server-sent event.
#[derive(Debug, Serialize)]
struct Update<'a> {
    /// `set` contains all rows, so the page must discard its own rows.
    all: bool,
    /// The time of the snapshot.
    at: u64,
    /// The time of the last attempt. The page compares this time with the clock of the browser.
    /// `at` is not suitable, because it does not change while snapshots fail.
    now: u64,
    error: Option<&'a str>,
    /// Grants per second.
    rate: f64,
    held: usize,
    waiting: usize,
    set: Vec<&'a Row>,
    removed: Vec<&'a Key>,
    /// `None` if it has not changed.
    graph: Option<&'a WaitGraph>,
}

/// The maximum number of events that wait for a slow connection. A connection that misses an event
/// receives all rows again.
const EVENT_BACKLOG_MAX: usize = 16;

/// The average share of one processor for snapshots. The requests of clients have a separate share
/// of the same size.
const PROCESSOR_SHARE: f64 = 0.04;
/// The maximum pause that [`PROCESSOR_SHARE`] and [`SNAPSHOT_PAUSE_FACTOR`] may cause. A longer
/// interval still applies.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The minimum pause after a successful snapshot, in multiples of its duration, up to
/// [`PAUSE_MAX`]. Limits the load of a store that scans all keys to find the locks, such as Redis
/// with millions of other keys.
const SNAPSHOT_PAUSE_FACTOR: u32 = 4;

/// The maximum interval after a failed snapshot, and the maximum pause that requests of clients
/// cause.
const SHORT_PAUSE_MAX: Duration = Duration::from_secs(5);

impl Monitor {
    /// Takes the first snapshot, and returns a monitor that has published it.
    pub(crate) async fn start(registry: Arc<Registry>) -> Result<Self, LockError> {
        let mut history = History::default();
        let first = Published::new(Snapshot::take(&registry).await?, None);
        history.record(&first.snapshot.holders, first.taken_at_ms);
        Ok(Self {
            registry,
            published: RwLock::new(Arc::new(first)),
            changes: broadcast::channel(EVENT_BACKLOG_MAX).0,
            history: Mutex::new(history),
            refresh: Notify::new(),
        })
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Returns the published snapshot.
    pub(crate) fn published(&self) -> Arc<Published> {
        Arc::clone(&self.published.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn history(&self, key: &Key) -> Vec<ObservedHold> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).of(key)
    }

    /// Returns the number of connections that receive events.
    pub(crate) fn event_stream_count(&self) -> usize {
        self.changes.receiver_count()
    }

    /// Returns the event with all rows, and a receiver of the events after it.
    pub(crate) fn subscribe(&self) -> (Bytes, broadcast::Receiver<Bytes>) {
        let published = self.published.read().unwrap_or_else(PoisonError::into_inner);
        // `publish` has the write lock while it sends an event, so the receiver gets the events of
        // all later snapshots and no others.
        let changes = self.changes.subscribe();
        let latest = Arc::clone(&published);
        drop(published);
        (latest.event_with_all_rows(), changes)
    }

    /// Ends the current pause, so that the next snapshot is taken now.
    pub(crate) fn refresh(&self) {
        self.refresh.notify_one();
    }

    /// Takes snapshots until the future is dropped.
    pub(crate) async fn run(&self, interval: Duration) {
        let mut grants = GrantCounter::default();
        grants.record(&self.published().snapshot);
        // The processor time of snapshots lengthens the pause to at most 60 s, and that of client
        // requests to at most 5 s.
        let mut snapshot_cpu = ProcessorLimit::new(PAUSE_MAX);
        let mut request_cpu = ProcessorLimit::new(SHORT_PAUSE_MAX);
        let mut took = Duration::ZERO;
        let (mut ended_at, mut used_at_end) = (Instant::now(), processor_time());
        loop {
            let before = self.published();
            // A failed snapshot is repeated soon. With a long interval, the page would show the
            // failure until the next snapshot.
            let interval =
                if before.error.is_some() { interval.min(SHORT_PAUSE_MAX) } else { interval };
            let store_pause = (took * SNAPSHOT_PAUSE_FACTOR).min(PAUSE_MAX);
            let pause = interval.max(store_pause).max(snapshot_cpu.pause).max(request_cpu.pause);
            tokio::select! {
                () = sleep(pause) => {}
                () = self.refresh.notified() => {}
            }
            let (started_at, used_at_start) = (Instant::now(), processor_time());
            let snapshot = Snapshot::take(&self.registry).await;
            took = if snapshot.is_ok() { started_at.elapsed() } else { Duration::ZERO };
            let latest = match snapshot {
                Ok(snapshot) => {
                    grants.record(&snapshot);
                    let mut latest = Published::new(snapshot, Some(&before));
                    latest.grants_per_second = grants.per_second();
                    let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
                    history.record(&latest.snapshot.holders, latest.taken_at_ms);
                    latest
                }
                Err(error) => before.with_error(error.to_string()),
            };
            let event = latest.changes_since(&before);
            self.publish(latest, event);
            let (now, used) = (Instant::now(), processor_time());
            snapshot_cpu.record(used.saturating_sub(used_at_start), now - ended_at);
            request_cpu.record(used_at_start.saturating_sub(used_at_end), now - ended_at);
            (ended_at, used_at_end) = (now, used);
        }
    }

    fn publish(&self, latest: Published, event: Bytes) {
        let mut published = self.published.write().unwrap_or_else(PoisonError::into_inner);
        *published = Arc::new(latest);
        // Sending fails only if no page is open.
        _ = self.changes.send(event);
    }
}

impl Published {
    fn new(snapshot: Snapshot, before: Option<&Self>) -> Self {
        let took = snapshot.age();
        let now = time_since_1970();
        let taken_at_ms = whole_millis(now.saturating_sub(took));
        let rows = rows_of(&snapshot, taken_at_ms, before.map(|before| &*before.rows));
        Self {
            graph: Arc::new(WaitGraph::of(&snapshot)),
            snapshot: Arc::new(snapshot),
            taken_at_ms,
            tried_at_ms: whole_millis(now),
            took,
            error: None,
            failures: before.map_or(0, |before| before.failures),
            grants_per_second: 0.0,
            rows: Arc::new(rows),
            all_rows_event: OnceLock::new(),
            listing: OnceLock::new(),
            metrics: OnceLock::new(),
        }
    }

    /// Returns the same snapshot with the error of an attempt to take the next one.
    fn with_error(&self, error: String) -> Self {
        Self {
            snapshot: Arc::clone(&self.snapshot),
            graph: Arc::clone(&self.graph),
            rows: Arc::clone(&self.rows),
            tried_at_ms: whole_millis(time_since_1970()),
            error: Some(error),
            failures: self.failures + 1,
            all_rows_event: OnceLock::new(),
            listing: OnceLock::new(),
            metrics: OnceLock::new(),
            ..*self
        }
    }

    fn event_with_all_rows(&self) -> Bytes {
        let update = || {
            let rows = self.rows.values().collect();
            event(&self.update(true, rows, Vec::new(), Some(&self.graph)))
        };
        self.all_rows_event.get_or_init(update).clone()
    }

    fn changes_since(&self, before: &Self) -> Bytes {
        let changed = self.rows.values().filter(|row| before.rows.get(&row.key) != Some(row));
        let removed = before.rows.keys().filter(|key| !self.rows.contains_key(*key));
        let graph = (self.graph != before.graph).then_some(&*self.graph);
        event(&self.update(false, changed.collect(), removed.collect(), graph))
    }

    fn update<'a>(
        &'a self,
        all: bool,
        set: Vec<&'a Row>,
        removed: Vec<&'a Key>,
        graph: Option<&'a WaitGraph>,
    ) -> Update<'a> {
        Update {
            all,
            at: self.taken_at_ms,
            now: self.tried_at_ms,
            error: self.error.as_deref(),
            rate: self.grants_per_second,
            held: self.snapshot.holders.len(),
            waiting: self.snapshot.waiters.len(),
            set,
            removed,
            graph,
        }
    }
}

/// Formats a server-sent event. A line break would end its data, and `serde_json` escapes all line
/// breaks.
fn event(update: &Update<'_>) -> Bytes {
    let json = serde_json::to_string(update).unwrap_or_default();
    format!("data: {json}\n\n").into()
}

fn rows_of(
    snapshot: &Snapshot,
    taken_at_ms: u64,
    before: Option<&BTreeMap<Key, Row>>,
) -> BTreeMap<Key, Row> {
    let mut rows: BTreeMap<Key, Row> = BTreeMap::new();
    let empty = |key: &Key| Row { key: key.clone(), holders: Vec::new(), waiters: Vec::new() };
    for holder in &snapshot.holders {
        let row = rows.entry(holder.key.clone()).or_insert_with(|| empty(&holder.key));
        row.holders.push(Claimant::holder(holder, taken_at_ms));
    }
    for waiter in &snapshot.waiters {
        let row = rows.entry(waiter.key.clone()).or_insert_with(|| empty(&waiter.key));
        row.waiters.push(Claimant::waiter(waiter, taken_at_ms));
    }
    for row in rows.values_mut() {
        if let Some(before) = before.and_then(|rows| rows.get(&row.key)) {
            keep_times(&mut row.holders, &before.holders);
            keep_times(&mut row.waiters, &before.waiters);
        }
    }
    rows
}

/// Keeps the times of the previous snapshot if the new ones differ by at most
/// [`TIME_TOLERANCE_MS`]. The calculated times vary with the duration of the request, and each
/// difference would be sent to all pages.
fn keep_times(claimants: &mut [Claimant], before: &[Claimant]) {
    for (claimant, before) in claimants.iter_mut().zip(before) {
        if (&claimant.label, &claimant.mode, &claimant.token)
            == (&before.label, &before.mode, &before.token)
        {
            for (time, before) in
                [(&mut claimant.since, before.since), (&mut claimant.ends, before.ends)]
            {
                if let (Some(new), Some(old)) = (*time, before)
                    && new.abs_diff(old) <= TIME_TOLERANCE_MS
                {
                    *time = Some(old);
                }
            }
        }
    }
}

const TIME_TOLERANCE_MS: u64 = 1_000;

impl Claimant {
    fn holder(holder: &Holder, now_ms: u64) -> Self {
        Self {
            label: holder.label.clone(),
            mode: holder.mode.to_string(),
            token: holder.token.map(|token| token.to_string()),
            since: holder.held_for.map(|held| now_ms.saturating_sub(whole_millis(held))),
            ends: holder.lease_left.map(|left| now_ms.saturating_add(whole_millis(left))),
        }
    }

    fn waiter(waiter: &WaitingClaim, now_ms: u64) -> Self {
        Self {
            label: waiter.label.clone(),
            mode: waiter.mode.to_string(),
            token: None,
            since: waiter.waited_for.map(|waited| now_ms.saturating_sub(whole_millis(waited))),
            // The entry of a waiter is renewed while its process waits, and the page does not show
            // its end.
            ends: None,
        }
    }
}

/// Limits processor time by longer pauses between snapshots.
struct ProcessorLimit {
    /// The pause after which the average share is [`PROCESSOR_SHARE`].
    pause: Duration,
    pause_max: Duration,
}

impl ProcessorLimit {
    fn new(pause_max: Duration) -> Self {
        Self { pause: Duration::ZERO, pause_max }
    }

    /// Adds processor time that was used within `elapsed`.
    fn record(&mut self, used: Duration, elapsed: Duration) {
        let pause = self.pause + used.div_f64(PROCESSOR_SHARE);
        self.pause = pause.saturating_sub(elapsed).min(self.pause_max);
    }
}

fn time_since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::view::tests::snapshot;

    #[test]
    fn the_average_processor_share_is_limited_for_expensive_snapshots() {
        let interval = Duration::from_secs(1);
        for (used_ms, expected) in [(5, 1.0), (100, 2.5), (1_000, 25.0)] {
            let mut limit = ProcessorLimit::new(PAUSE_MAX);
            let used = Duration::from_millis(used_ms);
            let mut pause = interval;
            let mut elapsed = Duration::ZERO;
            for _ in 0..100 {
                elapsed += used + pause;
                limit.record(used, used + pause);
                pause = interval.max(limit.pause);
            }
            let average = elapsed.as_secs_f64() / 100.0;
            assert!((average / expected - 1.0).abs() < 0.05, "{used_ms} ms: {average} s per round");
        }
    }

    fn event_of(bytes: &Bytes) -> serde_json::Value {
        let text = std::str::from_utf8(bytes).unwrap();
        let data = text.strip_prefix("data: ").and_then(|data| data.strip_suffix("\n\n")).unwrap();
        assert!(!data.contains(['\n', '\r']));
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn an_event_has_only_the_rows_that_changed() {
        let first = Published::new(snapshot(&[("a", "x", 5), ("b", "y", 5)], &["b"]), None);
        let all = event_of(&first.event_with_all_rows());
        assert_eq!((all["all"].as_bool(), all["set"].as_array().unwrap().len()), (Some(true), 2));
        assert_eq!(all["set"][1]["waiters"][0]["label"], "waiter");
        assert!(all["set"][0].get("waiters").is_none());

        let second = Published::new(snapshot(&[("a", "x", 5), ("c", "z", 0)], &[]), Some(&first));
        let changes = event_of(&second.changes_since(&first));
        assert_eq!(
            (&changes["set"][0]["key"], changes["set"].as_array().unwrap().len()),
            (&"c".into(), 1)
        );
        assert_eq!(changes["removed"], serde_json::json!(["b"]));

        let failed = second.with_error("no connection".to_owned());
        let changes = event_of(&failed.changes_since(&second));
        assert_eq!((&changes["error"], failed.failures), (&"no connection".into(), 1));
        assert_eq!(changes["set"], serde_json::json!([]));
        assert_eq!(Published::new(snapshot(&[], &[]), Some(&failed)).failures, 1);
    }

    #[test]
    fn text_from_other_users_cannot_end_an_event() {
        let only = Published::new(snapshot(&[("a\n\ndata: b", "x\r\n\r\nevent: y", 5)], &[]), None);
        let all = event_of(&only.event_with_all_rows());
        assert_eq!(all["set"][0]["key"], "a\n\ndata: b");
    }
}
