//! What happened to locks, for `check` to judge: a recorder for tests, and the history that it leaves.
//!
//! An operation is recorded in two steps, before it begins and after it has answered. What lies between is the window in
//! which it took effect. An operation that never answered (its future was dropped, its process killed) is in the
//! record as what it is: unknown.

mod event;
mod record;

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use registry_core::FencingToken;

pub use event::{Event, What, ranked};
pub use record::{
    Attempt, BrokenRecord, Ending, Grant, History, Release, Window, Write, WriteAnswer,
};

/// Nanoseconds of virtual time since now, for recorders in tests on tokio's clock, paused or not.
pub fn tokio_clock() -> impl Fn() -> u64 + Send + Sync + 'static {
    let start = tokio::time::Instant::now();
    move || nanos(start.elapsed())
}

/// Nanoseconds since the host was started, time asleep included. The same clock in all processes of one host, so that
/// what they record can be put together.
///
/// # Panics
/// When the operating system has no monotonic clock.
#[cfg(unix)]
pub fn host_clock() -> impl Fn() -> u64 + Send + Sync + 'static {
    #[cfg(target_os = "linux")]
    const CLOCK: nix::time::ClockId = nix::time::ClockId::CLOCK_BOOTTIME;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: nix::time::ClockId = nix::time::ClockId::CLOCK_MONOTONIC;
    || nanos(Duration::from(CLOCK.now().expect("every unix has a monotonic clock")))
}

/// 584 years of nanoseconds fit; longer spans are as good as forever.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Writes down what happens to locks. Cheap: a clock reading and a push for each event. Clones write the same record.
///
/// All its times come from one clock, and no two events of a recorder have the same time: where the clock stands still,
/// as paused time does, the order of events is kept by single nanoseconds.
#[derive(Clone)]
pub struct Recorder(Arc<Inner>);

struct Inner {
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    /// The earliest time that the next event may have.
    next: AtomicU64,
    source: u32,
    operations: AtomicU32,
    events: Events,
}

enum Events {
    Kept(Mutex<Vec<Event>>),
    Sent(Box<dyn Fn(&Event) + Send + Sync>),
}

impl Recorder {
    /// A recorder that keeps its events, with times in nanoseconds from `clock`, which must never run backwards.
    #[must_use]
    pub fn new(clock: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self::with_events(clock, 0, Events::Kept(Mutex::default()))
    }

    /// A recorder that gives each event to `sink` at once, so that the events of a process that is killed are not lost
    /// with it.
    ///
    /// `source` tells its operations from those of other recorders when their events are put together; the process id
    /// will do.
    #[must_use]
    pub fn sending(
        clock: impl Fn() -> u64 + Send + Sync + 'static,
        source: u32,
        sink: impl Fn(&Event) + Send + Sync + 'static,
    ) -> Self {
        Self::with_events(clock, source, Events::Sent(Box::new(sink)))
    }

    fn with_events(
        clock: impl Fn() -> u64 + Send + Sync + 'static,
        source: u32,
        events: Events,
    ) -> Self {
        Self(Arc::new(Inner {
            clock: Box::new(clock),
            next: AtomicU64::new(0),
            source,
            operations: AtomicU32::new(0),
            events,
        }))
    }

    /// Call it before asking for a lock. `client` is whoever asks, by a number of the test's choice.
    ///
    /// Getting in again by re-entry is no acquisition of its own and is not recorded.
    pub fn acquire(&self, client: u32, key: impl Into<Arc<str>>) -> Acquiring {
        let op = self.begin(client, What::AcquireCalled { key: key.into() });
        Acquiring(op)
    }

    /// Call it before a fenced write to a resource that is protected by the lock of `key`.
    pub fn write(&self, client: u32, key: impl Into<Arc<str>>, token: FencingToken) -> Writing {
        Writing(self.begin(client, What::WriteCalled { key: key.into(), token: token.get() }))
    }

    /// The events so far, in no particular order. Empty for a recorder that sends them elsewhere.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        match &self.0.events {
            Events::Kept(events) => events.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            Events::Sent(_) => Vec::new(),
        }
    }

    /// What happened so far, in the form in which it is judged.
    ///
    /// # Panics
    /// Never: what a recorder records can be put together.
    #[must_use]
    pub fn history(&self) -> History {
        History::from_events(self.events()).expect("operations of one recorder fit together")
    }

    fn begin(&self, client: u32, what: What) -> Operation {
        let number = self.0.operations.fetch_add(1, Ordering::Relaxed);
        let id = u64::from(self.0.source) << 32 | u64::from(number);
        let operation = Operation { recorder: self.clone(), id, client };
        operation.tell(what);
        operation
    }

    /// The time, later than that of all events whose recording has ended.
    fn stamp(&self) -> u64 {
        let now = (self.0.clock)();
        let after = |next: u64| now.max(next).saturating_add(1);
        let next = &self.0.next;
        let next = next.fetch_update(Ordering::AcqRel, Ordering::Acquire, |next| Some(after(next)));
        next.map_or(now, |next| now.max(next))
    }

    /// When a guard that is valid for `valid_for` from now ends. Never later than it really does.
    fn end_of(&self, valid_for: impl FnOnce() -> Duration) -> u64 {
        // The clock first, and the bare clock: a stamp may run ahead of it.
        let now = (self.0.clock)();
        now.saturating_add(nanos(valid_for()))
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("source", &self.0.source).finish_non_exhaustive()
    }
}

/// One operation under way.
#[derive(Debug)]
struct Operation {
    recorder: Recorder,
    id: u64,
    client: u32,
}

impl Operation {
    fn tell(&self, what: What) {
        let event = Event { at: self.recorder.stamp(), op: self.id, client: self.client, what };
        match &self.recorder.0.events {
            Events::Kept(events) => {
                events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
            }
            Events::Sent(sink) => sink(&event),
        }
    }
}

/// An acquisition that was asked for and not answered yet. Dropping it leaves its outcome unknown.
#[derive(Debug)]
#[must_use = "an acquisition without an answer is recorded as unknown"]
pub struct Acquiring(Operation);

impl Acquiring {
    /// It was granted. `valid_for` asks the guard how long it is valid.
    pub fn granted(
        self,
        token: Option<FencingToken>,
        valid_for: impl FnOnce() -> Duration,
    ) -> Holding {
        let valid_until = Some(self.0.recorder.end_of(valid_for));
        self.0.tell(What::AcquireGranted { token: token.map(FencingToken::get), valid_until });
        Holding(self.0)
    }

    /// It was granted by a store without leases: until it is released or lost.
    pub fn granted_for_good(self, token: Option<FencingToken>) -> Holding {
        let token = token.map(FencingToken::get);
        self.0.tell(What::AcquireGranted { token, valid_until: None });
        Holding(self.0)
    }

    /// Somebody else holds the lock, and nothing was granted.
    pub fn busy(self) {
        self.0.tell(What::AcquireBusy);
    }

    /// It failed. The store may have granted it all the same.
    pub fn failed(self) {
        self.0.tell(What::AcquireFailed);
    }
}

/// A lock that is held, as far as the recorder knows. Dropping it without a release records a holder that went away.
#[derive(Debug)]
#[must_use = "a hold that is forgotten is recorded as never released"]
pub struct Holding(Operation);

impl Holding {
    /// The guard is held and valid for that long, by a renewal for example. Zero says nothing: a guard that
    /// is not held any more answers it.
    pub fn valid_for(&self, valid_for: impl FnOnce() -> Duration) {
        let now = (self.0.recorder.0.clock)();
        let until = self.0.recorder.end_of(valid_for);
        if until > now {
            self.0.tell(What::ValidUntil { until });
        }
    }

    /// The guard says that it is not held any more.
    pub fn lost(&self) {
        self.0.tell(What::Lost);
    }

    /// Call it before the release, or before the guard is dropped.
    pub fn release(self) -> Releasing {
        self.0.tell(What::ReleaseCalled);
        Releasing(self.0)
    }
}

/// A release that was asked for and not answered yet. Dropping it leaves its outcome unknown.
#[derive(Debug)]
#[must_use = "a release without an answer is recorded as unknown"]
pub struct Releasing(Operation);

impl Releasing {
    /// The lock was held until now and is released.
    pub fn freed(self) {
        self.0.tell(What::ReleaseFreed);
    }

    /// The lock had been lost before.
    pub fn not_held(self) {
        self.0.tell(What::ReleaseNotHeld);
    }

    /// It failed. The store may have released it all the same.
    pub fn failed(self) {
        self.0.tell(What::ReleaseFailed);
    }
}

/// A fenced write that was asked for and not answered yet. Dropping it leaves its outcome unknown.
#[derive(Debug)]
#[must_use = "a write without an answer is recorded as unknown"]
pub struct Writing(Operation);

impl Writing {
    /// The resource took it.
    pub fn accepted(self) {
        self.0.tell(What::WriteAccepted);
    }

    /// The resource refused it.
    pub fn rejected(self) {
        self.0.tell(What::WriteRejected);
    }

    /// It failed. The resource may have taken it all the same.
    pub fn failed(self) {
        self.0.tell(What::WriteFailed);
    }
}
