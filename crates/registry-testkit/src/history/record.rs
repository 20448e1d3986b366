//! Puts events together into operations with windows. Judges nothing but whether the record itself makes sense.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;

use super::event::{Event, What};

/// The time in which something took effect, somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Window {
    /// Not before it was called.
    pub from: u64,
    /// Not after it had answered; `u64::MAX` if it never did.
    pub to: u64,
}

impl Window {
    /// A window from one moment to another.
    #[must_use]
    pub const fn new(from: u64, to: u64) -> Self {
        Self { from, to }
    }

    /// A window that was never closed.
    pub(crate) const fn open(from: u64) -> Self {
        Self::new(from, u64::MAX)
    }
}

/// An acquisition that was granted, and all that became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The lock's key.
    pub key: Arc<str>,
    /// Who got it.
    pub client: u32,
    /// When it was asked for and answered.
    pub acquire: Window,
    /// The fencing token, from stores that have them.
    pub token: Option<u64>,
    /// When the guard ended by itself, with all renewals that were recorded.
    pub valid_until: Option<u64>,
    /// When the holder was told that it is lost.
    pub lost: Option<u64>,
    /// Its release, if it was asked for.
    pub release: Option<Release>,
}

/// The release of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Release {
    /// When it was asked for and answered.
    pub window: Window,
    /// How it ended.
    pub ending: Ending,
}

/// How a release ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a release frees, finds nothing, or nobody knows")]
pub enum Ending {
    /// The lock was held until then.
    Freed,
    /// The lock had been lost.
    NotHeld,
    /// Nobody knows.
    Unknown,
}

/// An acquisition that left its caller without a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// The lock's key.
    pub key: Arc<str>,
    /// Who asked.
    pub client: u32,
    /// When it was asked for and answered.
    pub window: Window,
}

/// A fenced write to the resource that a lock protects.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Write {
    /// The key of the lock.
    pub key: Arc<str>,
    /// Who wrote.
    pub client: u32,
    /// The token that the write carried.
    pub token: u64,
    /// When it was asked for and answered.
    pub window: Window,
    /// What the resource answered.
    pub answer: WriteAnswer,
}

/// What a resource answered to a fenced write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a write is taken, refused, or nobody knows")]
pub enum WriteAnswer {
    /// It took it.
    Accepted,
    /// It refused it.
    Rejected,
    /// Nobody knows.
    Unknown,
}

/// What happened, operation by operation, in the order in which they were called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct History {
    /// Acquisitions that were granted.
    pub grants: Vec<Grant>,
    /// Acquisitions that were told that somebody else holds the lock.
    pub busy: Vec<Attempt>,
    /// Acquisitions of which nobody knows whether they were granted.
    pub unknown: Vec<Attempt>,
    /// Fenced writes.
    pub writes: Vec<Write>,
}

impl History {
    /// Puts events together, those of several processes too if their recorders had one clock and different sources.
    /// Their order does not matter.
    ///
    /// # Errors
    /// [`BrokenRecord`] when they do not fit together: then nothing follows from them, least of all that all is well.
    pub fn from_events(events: impl IntoIterator<Item = Event>) -> Result<Self, BrokenRecord> {
        let mut events: Vec<Event> = events.into_iter().collect();
        events.sort_by_key(|event| event.at);
        let mut operations: HashMap<u64, usize> = HashMap::new();
        let mut drafts: Vec<Draft> = Vec::new();
        for event in events {
            match (operations.entry(event.op), &event.what) {
                (
                    Entry::Vacant(entry),
                    What::AcquireCalled { key } | What::WriteCalled { key, .. },
                ) => {
                    entry.insert(drafts.len());
                    drafts.push(Draft::new(Arc::clone(key), &event));
                }
                (Entry::Occupied(entry), _) => drafts[*entry.get()].add(event)?,
                (Entry::Vacant(_), _) => return Err(BrokenRecord::new(event)),
            }
        }
        let mut history = Self::default();
        for draft in drafts {
            draft.file(&mut history);
        }
        Ok(history)
    }

    /// The time of the first event.
    pub(crate) fn start(&self) -> u64 {
        let grants = self.grants.first().map(|grant| grant.acquire);
        let attempts = [&self.busy, &self.unknown].map(|list| list.first().map(|one| one.window));
        let writes = self.writes.first().map(|write| write.window);
        let firsts = [grants, attempts[0], attempts[1], writes];
        firsts.into_iter().flatten().map(|window| window.from).min().unwrap_or(0)
    }
}

/// An operation while its events come in.
struct Draft {
    key: Arc<str>,
    client: u32,
    write_token: Option<u64>,
    called: u64,
    answer: Option<(u64, What)>,
    valid_until: Option<u64>,
    lost: Option<u64>,
    release_called: Option<u64>,
    released: Option<(u64, Ending)>,
}

impl Draft {
    fn new(key: Arc<str>, called: &Event) -> Self {
        let write_token = match called.what {
            What::WriteCalled { token, .. } => Some(token),
            _ => None,
        };
        Self {
            key,
            client: called.client,
            write_token,
            called: called.at,
            answer: None,
            valid_until: None,
            lost: None,
            release_called: None,
            released: None,
        }
    }

    fn add(&mut self, event: Event) -> Result<(), BrokenRecord> {
        let write = self.write_token.is_some();
        let held = matches!(self.answer, Some((_, What::AcquireGranted { .. })));
        let fits = match &event.what {
            What::AcquireCalled { .. } | What::WriteCalled { .. } => false,
            What::AcquireGranted { .. } | What::AcquireBusy | What::AcquireFailed => {
                !write && self.answer.is_none()
            }
            What::WriteAccepted | What::WriteRejected | What::WriteFailed => {
                write && self.answer.is_none()
            }
            What::ValidUntil { .. } | What::Lost => held,
            What::ReleaseCalled => held && self.release_called.is_none(),
            What::ReleaseFreed | What::ReleaseNotHeld | What::ReleaseFailed => {
                self.release_called.is_some() && self.released.is_none()
            }
        };
        if !fits {
            return Err(BrokenRecord::new(event));
        }
        match event.what {
            What::ValidUntil { until } => {
                self.valid_until = self.valid_until.map(|before| before.max(until));
            }
            What::Lost => self.lost = Some(self.lost.unwrap_or(event.at)),
            What::ReleaseCalled => self.release_called = Some(event.at),
            What::ReleaseFreed => self.released = Some((event.at, Ending::Freed)),
            What::ReleaseNotHeld => self.released = Some((event.at, Ending::NotHeld)),
            What::ReleaseFailed => self.released = Some((event.at, Ending::Unknown)),
            answer => {
                if let What::AcquireGranted { valid_until, .. } = &answer {
                    self.valid_until = *valid_until;
                }
                self.answer = Some((event.at, answer));
            }
        }
        Ok(())
    }

    fn file(self, history: &mut History) {
        let Self { key, client, .. } = self;
        let answered = self.answer.as_ref().map_or(u64::MAX, |(at, _)| *at);
        let window = Window::new(self.called, answered);
        let answer = self.answer.map(|(_, what)| what);
        if let Some(token) = self.write_token {
            let answer = match answer {
                Some(What::WriteAccepted) => WriteAnswer::Accepted,
                Some(What::WriteRejected) => WriteAnswer::Rejected,
                _ => WriteAnswer::Unknown,
            };
            history.writes.push(Write { key, client, token, window, answer });
            return;
        }
        match answer {
            Some(What::AcquireGranted { token, .. }) => history.grants.push(Grant {
                key,
                client,
                acquire: window,
                token,
                valid_until: self.valid_until,
                lost: self.lost,
                release: self.release_called.map(|called| {
                    let (at, ending) = self.released.unwrap_or((u64::MAX, Ending::Unknown));
                    Release { window: Window::new(called, at), ending }
                }),
            }),
            Some(What::AcquireBusy) => history.busy.push(Attempt { key, client, window }),
            // What failed may still take effect after it has said so.
            _ => history.unknown.push(Attempt { key, client, window: Window::open(self.called) }),
        }
    }
}

/// Events that do not fit together, such as an answer without a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenRecord {
    event: Box<Event>,
}

impl BrokenRecord {
    fn new(event: Event) -> Self {
        Self { event: Box::new(event) }
    }
}

impl fmt::Display for BrokenRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the record is broken at {:?}", self.event)
    }
}

impl std::error::Error for BrokenRecord {}
