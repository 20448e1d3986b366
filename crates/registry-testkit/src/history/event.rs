//! One step of one operation, as it is recorded and as it travels from a helper process: one line of JSON.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Something that happened to a lock or a resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Event {
    /// When, in nanoseconds of the recorder's clock.
    pub at: u64,
    /// The operation that it belongs to: a hold from its acquisition to its release, or a write.
    pub op: u64,
    /// Who did it.
    pub client: u32,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

impl Event {
    /// An event made by hand, for records that come from elsewhere.
    #[must_use]
    pub const fn new(at: u64, op: u64, client: u32, what: What) -> Self {
        Self { at, op, client, what }
    }
}

/// The same events with their tokens numbered from zero. Stores make tokens of the time of day; two runs of one seed differ
/// in nothing else.
#[must_use]
pub fn ranked(mut events: Vec<Event>) -> Vec<Event> {
    fn token(what: &mut What) -> Option<&mut u64> {
        match what {
            What::AcquireGranted { token, .. } => token.as_mut(),
            What::WriteCalled { token, .. } => Some(token),
            _ => None,
        }
    }
    let tokens = events.iter_mut().filter_map(|event| token(&mut event.what).copied());
    let ordered: Vec<u64> = tokens.collect::<BTreeSet<u64>>().into_iter().collect();
    for token in events.iter_mut().filter_map(|event| token(&mut event.what)) {
        *token = ordered.partition_point(|other| other < token) as u64;
    }
    events
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
#[non_exhaustive]
pub enum What {
    /// Somebody is about to ask for the lock.
    AcquireCalled {
        /// The lock's key.
        key: Arc<str>,
    },
    /// They got it.
    AcquireGranted {
        /// The fencing token, from stores that have them.
        token: Option<u64>,
        /// When the guard ends by itself, unless it is renewed.
        valid_until: Option<u64>,
    },
    /// Somebody else has it.
    AcquireBusy,
    /// It failed with an unknown outcome.
    AcquireFailed,
    /// The guard ends later than was recorded before.
    ValidUntil {
        /// When it ends by itself, unless it is renewed again.
        until: u64,
    },
    /// The guard says that it is lost.
    Lost,
    /// The holder is about to release.
    ReleaseCalled,
    /// It held until then, and the lock is released.
    ReleaseFreed,
    /// It had lost the lock before.
    ReleaseNotHeld,
    /// It failed with an unknown outcome.
    ReleaseFailed,
    /// Somebody is about to write to the protected resource.
    WriteCalled {
        /// The key of the lock that protects it.
        key: Arc<str>,
        /// The token that the write carries.
        token: u64,
    },
    /// The resource took the write.
    WriteAccepted,
    /// The resource refused the write.
    WriteRejected,
    /// It failed with an unknown outcome.
    WriteFailed,
}
