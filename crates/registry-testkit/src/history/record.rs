//! Combines events into operations with windows. Verifies only that the record is consistent.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;

use registry_core::ClaimMode;

use super::event::{HistoryEvent, HistoryEventKind};

/// The time span within which an operation took effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Window {
    /// The time of the call.
    pub from: u64,
    /// The time of the answer; `u64::MAX` if there was none.
    pub to: u64,
}

impl Window {
    /// Creates a window between two times.
    #[must_use]
    pub const fn new(from: u64, to: u64) -> Self {
        Self { from, to }
    }

    /// Creates a window without an end.
    pub(crate) const fn open(from: u64) -> Self {
        Self::new(from, u64::MAX)
    }
}

/// A granted acquisition with its later events.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedGrant {
    /// The lock's key.
    pub key: Arc<str>,
    /// The client that acquired the lock.
    pub client: u32,
    /// The mode in which it was acquired.
    pub mode: ClaimMode,
    /// The times of the call and of the answer.
    pub acquire: Window,
    /// The fencing token of the acquisition, if the store issues tokens.
    pub token: Option<u64>,
    /// The changes of the mode. No conversion or release follows one with an unknown outcome.
    pub conversions: Vec<RecordedConversion>,
    /// The end of the guard, including all recorded renewals. `None` without a lease.
    pub valid_until: Option<u64>,
    /// When the guard reported its loss.
    pub lost: Option<u64>,
    /// The release, if it was called.
    pub release: Option<RecordedRelease>,
}

/// A change of the mode of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedConversion {
    /// The requested mode.
    pub mode: ClaimMode,
    /// The times of the call and of the answer.
    pub window: Window,
    /// The outcome.
    pub result: ConversionResult,
}

/// The outcome of a change of the mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a conversion is granted, refused, or has an unknown outcome"
)]
pub enum ConversionResult {
    /// The grant has the new mode, with this token.
    Granted(Option<u64>),
    /// The grant keeps its mode.
    Refused,
    /// The outcome is unknown, and the holder has no guard any more.
    Unknown,
}

/// The release of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedRelease {
    /// The times of the call and of the answer.
    pub window: Window,
    /// The outcome.
    pub result: ReleaseResult,
}

/// The outcome of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a release frees, finds no lock, or has an unknown outcome"
)]
pub enum ReleaseResult {
    /// The lock was held until the release.
    Freed,
    /// The lock had been lost before.
    NotHeld,
    /// The outcome is unknown.
    Unknown,
}

/// An acquisition that was busy, or whose outcome is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedAttempt {
    /// The lock's key.
    pub key: Arc<str>,
    /// The client that called it.
    pub client: u32,
    /// The requested mode.
    pub mode: ClaimMode,
    /// The times of the call and of the answer. Has no end if the outcome is unknown.
    pub window: Window,
}

/// A fenced write to the resource that a lock protects.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedWrite {
    /// The key of the lock.
    pub key: Arc<str>,
    /// The client that wrote.
    pub client: u32,
    /// The token that the write carried.
    pub token: u64,
    /// The times of the call and of the answer.
    pub window: Window,
    /// The answer of the resource.
    pub answer: WriteResult,
}

/// The answer of a resource to a fenced write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a write is accepted, rejected, or has an unknown outcome"
)]
pub enum WriteResult {
    /// The resource accepted the write.
    Accepted,
    /// The resource rejected the write.
    Rejected,
    /// The answer is unknown.
    Unknown,
}

/// All operations, in the order in which they were called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct History {
    /// Acquisitions that were granted.
    pub grants: Vec<RecordedGrant>,
    /// Acquisitions that were answered with "busy".
    pub busy: Vec<RecordedAttempt>,
    /// Acquisitions with an unknown outcome.
    pub unknown: Vec<RecordedAttempt>,
    /// Fenced writes.
    pub writes: Vec<RecordedWrite>,
}

impl History {
    /// Combines events into a history. Their order does not matter. Events of several processes can
    /// be combined if their recorders have the same clock and different sources.
    ///
    /// # Errors
    /// Returns [`InconsistentRecord`] if the events are inconsistent. Such a record proves nothing
    /// about the locks.
    pub fn from_events(
        events: impl IntoIterator<Item = HistoryEvent>,
    ) -> Result<Self, InconsistentRecord> {
        let mut events: Vec<HistoryEvent> = events.into_iter().collect();
        events.sort_by_key(|event| event.at);
        let mut operations: HashMap<u64, usize> = HashMap::new();
        let mut partial: Vec<PartialOperation> = Vec::new();
        for event in events {
            match (operations.entry(event.op), &event.what) {
                (
                    Entry::Vacant(entry),
                    HistoryEventKind::AcquireCalled { key, .. }
                    | HistoryEventKind::WriteCalled { key, .. },
                ) => {
                    entry.insert(partial.len());
                    partial.push(PartialOperation::new(Arc::clone(key), &event));
                }
                (Entry::Occupied(entry), _) => partial[*entry.get()].add(event)?,
                (Entry::Vacant(_), _) => return Err(InconsistentRecord::new(event)),
            }
        }
        let mut history = Self::default();
        for operation in partial {
            operation.add_to(&mut history);
        }
        Ok(history)
    }

    /// Returns the time of the first event.
    pub(crate) fn start(&self) -> u64 {
        let grants = self.grants.first().map(|grant| grant.acquire);
        let attempts = [&self.busy, &self.unknown].map(|list| list.first().map(|one| one.window));
        let writes = self.writes.first().map(|write| write.window);
        let firsts = [grants, attempts[0], attempts[1], writes];
        firsts.into_iter().flatten().map(|window| window.from).min().unwrap_or(0)
    }
}

/// An operation whose events are still being added.
struct PartialOperation {
    key: Arc<str>,
    client: u32,
    mode: ClaimMode,
    write_token: Option<u64>,
    called: u64,
    answer: Option<(u64, HistoryEventKind)>,
    conversions: Vec<RecordedConversion>,
    valid_until: Option<u64>,
    lost: Option<u64>,
    release_called: Option<u64>,
    released: Option<(u64, ReleaseResult)>,
}

impl PartialOperation {
    fn new(key: Arc<str>, called: &HistoryEvent) -> Self {
        let (mode, write_token) = match called.what {
            HistoryEventKind::AcquireCalled { mode, .. } => (mode, None),
            HistoryEventKind::WriteCalled { token, .. } => (ClaimMode::Exclusive, Some(token)),
            _ => (ClaimMode::Exclusive, None),
        };
        Self {
            key,
            client: called.client,
            mode,
            write_token,
            called: called.at,
            answer: None,
            conversions: Vec::new(),
            valid_until: None,
            lost: None,
            release_called: None,
            released: None,
        }
    }

    fn add(&mut self, event: HistoryEvent) -> Result<(), InconsistentRecord> {
        let is_write = self.write_token.is_some();
        let is_granted = matches!(self.answer, Some((_, HistoryEventKind::AcquireGranted { .. })));
        let conversion = self.conversions.last();
        let is_converting = conversion.is_some_and(|last| last.window.to == u64::MAX);
        let has_guard = conversion.is_none_or(|last| last.result != ConversionResult::Unknown);
        let is_consistent = match &event.what {
            HistoryEventKind::AcquireCalled { .. } | HistoryEventKind::WriteCalled { .. } => false,
            HistoryEventKind::AcquireGranted { .. }
            | HistoryEventKind::AcquireBusy
            | HistoryEventKind::AcquireFailed => !is_write && self.answer.is_none(),
            HistoryEventKind::WriteAccepted
            | HistoryEventKind::WriteRejected
            | HistoryEventKind::WriteFailed => is_write && self.answer.is_none(),
            HistoryEventKind::ValidUntil { .. } | HistoryEventKind::Lost => is_granted,
            HistoryEventKind::ReleaseCalled | HistoryEventKind::ConvertCalled { .. } => {
                is_granted && has_guard && self.release_called.is_none()
            }
            HistoryEventKind::ConvertGranted { .. }
            | HistoryEventKind::ConvertRefused
            | HistoryEventKind::ConvertFailed => is_converting,
            HistoryEventKind::ReleaseFreed
            | HistoryEventKind::ReleaseNotHeld
            | HistoryEventKind::ReleaseFailed => {
                self.release_called.is_some() && self.released.is_none()
            }
        };
        if !is_consistent {
            return Err(InconsistentRecord::new(event));
        }
        match event.what {
            HistoryEventKind::ValidUntil { until } => {
                self.valid_until = self.valid_until.map(|before| before.max(until));
            }
            HistoryEventKind::Lost => self.lost = Some(self.lost.unwrap_or(event.at)),
            HistoryEventKind::ConvertCalled { mode } => self.conversions.push(RecordedConversion {
                mode,
                window: Window::open(event.at),
                result: ConversionResult::Unknown,
            }),
            HistoryEventKind::ConvertGranted { token, valid_until } => {
                // The conversion has replaced the guard, so the end of the old guard is void.
                self.valid_until = valid_until;
                self.complete_conversion(event.at, ConversionResult::Granted(token));
            }
            HistoryEventKind::ConvertRefused => {
                self.complete_conversion(event.at, ConversionResult::Refused);
            }
            HistoryEventKind::ConvertFailed => {
                self.complete_conversion(event.at, ConversionResult::Unknown);
            }
            HistoryEventKind::ReleaseCalled => self.release_called = Some(event.at),
            HistoryEventKind::ReleaseFreed => {
                self.released = Some((event.at, ReleaseResult::Freed))
            }
            HistoryEventKind::ReleaseNotHeld => {
                self.released = Some((event.at, ReleaseResult::NotHeld))
            }
            HistoryEventKind::ReleaseFailed => {
                self.released = Some((event.at, ReleaseResult::Unknown))
            }
            answer => {
                if let HistoryEventKind::AcquireGranted { valid_until, .. } = &answer {
                    self.valid_until = *valid_until;
                }
                self.answer = Some((event.at, answer));
            }
        }
        Ok(())
    }

    fn complete_conversion(&mut self, at: u64, result: ConversionResult) {
        if let Some(conversion) = self.conversions.last_mut() {
            conversion.window.to = at;
            conversion.result = result;
        }
    }

    fn add_to(self, history: &mut History) {
        let Self { key, client, mode, .. } = self;
        let answered = self.answer.as_ref().map_or(u64::MAX, |(at, _)| *at);
        let window = Window::new(self.called, answered);
        let answer = self.answer.map(|(_, what)| what);
        if let Some(token) = self.write_token {
            let answer = match answer {
                Some(HistoryEventKind::WriteAccepted) => WriteResult::Accepted,
                Some(HistoryEventKind::WriteRejected) => WriteResult::Rejected,
                _ => WriteResult::Unknown,
            };
            history.writes.push(RecordedWrite { key, client, token, window, answer });
            return;
        }
        match answer {
            Some(HistoryEventKind::AcquireGranted { token, .. }) => {
                history.grants.push(RecordedGrant {
                    key,
                    client,
                    mode,
                    acquire: window,
                    token,
                    conversions: self.conversions,
                    valid_until: self.valid_until,
                    lost: self.lost,
                    release: self.release_called.map(|called| {
                        let (at, result) =
                            self.released.unwrap_or((u64::MAX, ReleaseResult::Unknown));
                        RecordedRelease { window: Window::new(called, at), result }
                    }),
                })
            }
            Some(HistoryEventKind::AcquireBusy) => {
                history.busy.push(RecordedAttempt { key, client, mode, window })
            }
            // A failed acquisition may still take effect after its error.
            _ => history.unknown.push(RecordedAttempt {
                key,
                client,
                mode,
                window: Window::open(self.called),
            }),
        }
    }
}

/// An inconsistent event, such as an answer without a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InconsistentRecord {
    event: Box<HistoryEvent>,
}

impl InconsistentRecord {
    fn new(event: HistoryEvent) -> Self {
        Self { event: Box::new(event) }
    }
}

impl fmt::Display for InconsistentRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the record is inconsistent at {:?}", self.event)
    }
}

impl std::error::Error for InconsistentRecord {}
