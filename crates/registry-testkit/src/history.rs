//! A recorder of lock operations for tests, and the resulting history, which `check` verifies.
//!
//! Each operation is recorded in two steps: before it begins and after it has answered. The
//! operation took effect within the window between these steps. An operation that never answered
//! has an unknown outcome, for example because its future was dropped or its process killed.

mod event;
mod record;

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use registry_core::{ClaimMode, FencingToken};

pub use event::{HistoryEvent, HistoryEventKind, with_ranked_tokens};
pub use record::{
    ConversionResult, History, InconsistentRecord, RecordedAttempt, RecordedConversion,
    RecordedGrant, RecordedRelease, RecordedWrite, ReleaseResult, Window, WriteResult,
};

/// Returns a clock that counts the nanoseconds of tokio time since this call. Tokio time may be
/// paused.
pub fn tokio_clock() -> impl Fn() -> u64 + Send + Sync + 'static {
    let start = tokio::time::Instant::now();
    move || nanos(start.elapsed())
}

/// Returns a clock that counts the nanoseconds since the host started. On Linux, the clock includes
/// suspended time. All processes of a host have the same clock, so that their events can be merged.
///
/// # Panics
/// Panics if the operating system has no monotonic clock.
#[cfg(unix)]
pub fn host_clock() -> impl Fn() -> u64 + Send + Sync + 'static {
    #[cfg(target_os = "linux")]
    const CLOCK: nix::time::ClockId = nix::time::ClockId::CLOCK_BOOTTIME;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: nix::time::ClockId = nix::time::ClockId::CLOCK_MONOTONIC;
    || nanos(Duration::from(CLOCK.now().expect("every unix has a monotonic clock")))
}

/// A `u64` holds 584 years of nanoseconds. Longer spans count as infinite.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Records lock operations. Each event costs a clock reading and a push. Clones write to the same
/// record.
///
/// All times come from one clock, and no two events of a recorder have the same time. While the
/// clock stands still, as on paused time, each event is one nanosecond after the last.
#[derive(Clone)]
pub struct Recorder(Arc<RecorderState>);

struct RecorderState {
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    /// The earliest time for the next event.
    next: AtomicU64,
    source: u32,
    operations: AtomicU32,
    events: EventSink,
}

enum EventSink {
    StoredEvents(Mutex<Vec<HistoryEvent>>),
    ForwardedEvents(Box<dyn Fn(&HistoryEvent) + Send + Sync>),
}

impl Recorder {
    /// Creates a recorder that stores its events. `clock` returns nanoseconds and must never run
    /// backwards.
    #[must_use]
    pub fn new(clock: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self::with_events(clock, 0, EventSink::StoredEvents(Mutex::default()))
    }

    /// Creates a recorder that passes each event to `sink` immediately. The events of a killed
    /// process are then not lost.
    ///
    /// `source` distinguishes the recorder's operations from those of other recorders when their
    /// events are merged. The process id is sufficient.
    #[must_use]
    pub fn forwarding(
        clock: impl Fn() -> u64 + Send + Sync + 'static,
        source: u32,
        sink: impl Fn(&HistoryEvent) + Send + Sync + 'static,
    ) -> Self {
        Self::with_events(clock, source, EventSink::ForwardedEvents(Box::new(sink)))
    }

    fn with_events(
        clock: impl Fn() -> u64 + Send + Sync + 'static,
        source: u32,
        events: EventSink,
    ) -> Self {
        Self(Arc::new(RecorderState {
            clock: Box::new(clock),
            next: AtomicU64::new(0),
            source,
            operations: AtomicU32::new(0),
            events,
        }))
    }

    /// Records an exclusive acquisition. Call it before the acquisition. `client` is a number that
    /// the test chooses for the caller.
    ///
    /// Do not record a re-entry: it is not a separate acquisition.
    pub fn acquire(&self, client: u32, key: impl Into<Arc<str>>) -> AcquireRecord {
        self.acquire_as(client, key, ClaimMode::Exclusive)
    }

    /// Records an acquisition in `mode`, as [`acquire`](Self::acquire).
    pub fn acquire_as(
        &self,
        client: u32,
        key: impl Into<Arc<str>>,
        mode: ClaimMode,
    ) -> AcquireRecord {
        let called = HistoryEventKind::AcquireCalled { key: key.into(), mode };
        AcquireRecord(self.begin(client, called))
    }

    /// Records a fenced write to a resource that the lock of `key` protects. Call it before the
    /// write.
    pub fn write(&self, client: u32, key: impl Into<Arc<str>>, token: FencingToken) -> WriteRecord {
        WriteRecord(
            self.begin(
                client,
                HistoryEventKind::WriteCalled { key: key.into(), token: token.get() },
            ),
        )
    }

    /// Returns the events so far, in no particular order. Empty for a recorder with a `sink`.
    #[must_use]
    pub fn events(&self) -> Vec<HistoryEvent> {
        match &self.0.events {
            EventSink::StoredEvents(events) => {
                events.lock().unwrap_or_else(PoisonError::into_inner).clone()
            }
            EventSink::ForwardedEvents(_) => Vec::new(),
        }
    }

    /// Returns the history so far, as the checks expect it.
    ///
    /// # Panics
    /// Never: the events of one recorder always fit together.
    #[must_use]
    pub fn history(&self) -> History {
        History::from_events(self.events()).expect("operations of one recorder fit together")
    }

    fn begin(&self, client: u32, what: HistoryEventKind) -> RecordedOperation {
        let number = self.0.operations.fetch_add(1, Ordering::Relaxed);
        let id = u64::from(self.0.source) << 32 | u64::from(number);
        let operation = RecordedOperation { recorder: self.clone(), id, client };
        operation.record(what);
        operation
    }

    /// Returns a time later than that of every completed event.
    fn next_time(&self) -> u64 {
        let now = (self.0.clock)();
        let after = |next: u64| now.max(next).saturating_add(1);
        let next = &self.0.next;
        let next = next.fetch_update(Ordering::AcqRel, Ordering::Acquire, |next| Some(after(next)));
        next.map_or(now, |next| now.max(next))
    }

    /// Returns the end of a guard that is valid for `valid_for` from now. It is never later than
    /// the true end.
    fn expiry_of(&self, valid_for: impl FnOnce() -> Duration) -> u64 {
        // The clock is read before the guard, so the result is never late. `next_time` may be ahead
        // of the clock, so its result must not be used here.
        let now = (self.0.clock)();
        now.saturating_add(nanos(valid_for()))
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("source", &self.0.source).finish_non_exhaustive()
    }
}

/// An operation in progress.
#[derive(Debug)]
struct RecordedOperation {
    recorder: Recorder,
    id: u64,
    client: u32,
}

impl RecordedOperation {
    fn record(&self, what: HistoryEventKind) {
        let event =
            HistoryEvent { at: self.recorder.next_time(), op: self.id, client: self.client, what };
        match &self.recorder.0.events {
            EventSink::StoredEvents(events) => {
                events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
            }
            EventSink::ForwardedEvents(sink) => sink(&event),
        }
    }
}

/// An acquisition without an answer yet. Dropping it leaves its outcome unknown.
#[derive(Debug)]
#[must_use = "an acquisition without an answer is recorded as unknown"]
pub struct AcquireRecord(RecordedOperation);

impl AcquireRecord {
    /// Records a grant. `valid_for` returns how long the guard is valid.
    pub fn granted(
        self,
        token: Option<FencingToken>,
        valid_for: impl FnOnce() -> Duration,
    ) -> HoldRecord {
        let valid_until = Some(self.0.recorder.expiry_of(valid_for));
        self.0.record(HistoryEventKind::AcquireGranted {
            token: token.map(FencingToken::get),
            valid_until,
        });
        HoldRecord(self.0)
    }

    /// Records a grant by a store without leases. It is valid until it is released or lost.
    pub fn granted_without_lease(self, token: Option<FencingToken>) -> HoldRecord {
        let token = token.map(FencingToken::get);
        self.0.record(HistoryEventKind::AcquireGranted { token, valid_until: None });
        HoldRecord(self.0)
    }

    /// Records that another client holds the lock and nothing was granted.
    pub fn busy(self) {
        self.0.record(HistoryEventKind::AcquireBusy);
    }

    /// Records a failure. The store may still have granted the lock.
    pub fn failed(self) {
        self.0.record(HistoryEventKind::AcquireFailed);
    }
}

/// A lock that is held, as far as the recorder knows. If this value is dropped without a release,
/// the history contains a grant that was never released.
#[derive(Debug)]
#[must_use = "a hold that is forgotten is recorded as never released"]
pub struct HoldRecord(RecordedOperation);

impl HoldRecord {
    /// Records that the guard is held and valid for this long, for example after a renewal. Zero is
    /// not recorded, because a guard that is no longer held also returns zero.
    pub fn valid_for(&self, valid_for: impl FnOnce() -> Duration) {
        let mut is_valid = false;
        let until = self.0.recorder.expiry_of(|| {
            let valid_for = valid_for();
            is_valid = !valid_for.is_zero();
            valid_for
        });
        if is_valid {
            self.0.record(HistoryEventKind::ValidUntil { until });
        }
    }

    /// Records that the guard is no longer held.
    pub fn lost(&self) {
        self.0.record(HistoryEventKind::Lost);
    }

    /// Records a change of the mode. Call it before the conversion.
    pub fn convert(self, mode: ClaimMode) -> ConvertRecord {
        self.0.record(HistoryEventKind::ConvertCalled { mode });
        ConvertRecord(self.0)
    }

    /// Records a release. Call it before the release, or before dropping the guard.
    pub fn release(self) -> ReleaseRecord {
        self.0.record(HistoryEventKind::ReleaseCalled);
        ReleaseRecord(self.0)
    }
}

/// A conversion without an answer yet. Dropping it leaves its outcome unknown. The holder then has
/// no guard any more.
#[derive(Debug)]
#[must_use = "a conversion without an answer is recorded as unknown"]
pub struct ConvertRecord(RecordedOperation);

impl ConvertRecord {
    /// Records that the lock has the requested mode. `valid_for` returns how long the new guard is
    /// valid.
    pub fn granted(
        self,
        token: Option<FencingToken>,
        valid_for: impl FnOnce() -> Duration,
    ) -> HoldRecord {
        let token = token.map(FencingToken::get);
        let valid_until = Some(self.0.recorder.expiry_of(valid_for));
        self.0.record(HistoryEventKind::ConvertGranted { token, valid_until });
        HoldRecord(self.0)
    }

    /// Records that other clients hold the lock, and that the guard is unchanged.
    pub fn refused(self) -> HoldRecord {
        self.0.record(HistoryEventKind::ConvertRefused);
        HoldRecord(self.0)
    }

    /// Records a failure, after which there is no guard.
    pub fn failed(self) {
        self.0.record(HistoryEventKind::ConvertFailed);
    }
}

/// A release without an answer yet. Dropping it leaves its outcome unknown.
#[derive(Debug)]
#[must_use = "a release without an answer is recorded as unknown"]
pub struct ReleaseRecord(RecordedOperation);

impl ReleaseRecord {
    /// Records that the lock was held until now and is released.
    pub fn freed(self) {
        self.0.record(HistoryEventKind::ReleaseFreed);
    }

    /// Records that the lock had been lost before the release.
    pub fn not_held(self) {
        self.0.record(HistoryEventKind::ReleaseNotHeld);
    }

    /// Records a failure. The store may still have released the lock.
    pub fn failed(self) {
        self.0.record(HistoryEventKind::ReleaseFailed);
    }
}

/// A fenced write without an answer yet. Dropping it leaves its outcome unknown.
#[derive(Debug)]
#[must_use = "a write without an answer is recorded as unknown"]
pub struct WriteRecord(RecordedOperation);

impl WriteRecord {
    /// Records that the resource accepted the write.
    pub fn accepted(self) {
        self.0.record(HistoryEventKind::WriteAccepted);
    }

    /// Records that the resource rejected the write.
    pub fn rejected(self) {
        self.0.record(HistoryEventKind::WriteRejected);
    }

    /// Records a failure. The resource may still have accepted the write.
    pub fn failed(self) {
        self.0.record(HistoryEventKind::WriteFailed);
    }
}
