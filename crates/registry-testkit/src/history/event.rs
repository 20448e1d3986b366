//! One step of one operation, as it is recorded and as a helper process sends it: one line of JSON.

use std::collections::BTreeSet;
use std::sync::Arc;

use registry_core::ClaimMode;
use serde::{Deserialize, Serialize};

/// A step of an operation on a lock or a resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HistoryEvent {
    /// The time, in nanoseconds of the recorder's clock.
    pub at: u64,
    /// The operation to which the event belongs: a hold from its acquisition to its release, or a
    /// write.
    pub op: u64,
    /// The client that performs the operation.
    pub client: u32,
    /// The kind of step.
    #[serde(flatten)]
    pub what: HistoryEventKind,
}

impl HistoryEvent {
    /// Creates an event, for records that come from other sources.
    #[must_use]
    pub const fn new(at: u64, op: u64, client: u32, what: HistoryEventKind) -> Self {
        Self { at, op, client, what }
    }
}

/// Returns the events with each token replaced by its rank, starting at zero. Stores derive tokens
/// from the time of day, so two runs of one seed differ only in their tokens.
#[must_use]
pub fn with_ranked_tokens(mut events: Vec<HistoryEvent>) -> Vec<HistoryEvent> {
    fn token(what: &mut HistoryEventKind) -> Option<&mut u64> {
        match what {
            HistoryEventKind::AcquireGranted { token, .. }
            | HistoryEventKind::ConvertGranted { token, .. } => token.as_mut(),
            HistoryEventKind::WriteCalled { token, .. } => Some(token),
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

/// The kind of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
#[non_exhaustive]
pub enum HistoryEventKind {
    /// A client is about to acquire the lock.
    AcquireCalled {
        /// The lock's key.
        key: Arc<str>,
        /// The requested mode.
        #[serde(default = "exclusive", skip_serializing_if = "is_exclusive")]
        mode: ClaimMode,
    },
    /// The lock was granted.
    AcquireGranted {
        /// The fencing token, if the store issues tokens.
        token: Option<u64>,
        /// The end of the guard, unless it is renewed.
        valid_until: Option<u64>,
    },
    /// Another client holds the lock.
    AcquireBusy,
    /// The acquisition failed with an unknown outcome.
    AcquireFailed,
    /// The holder is about to change the mode of the lock.
    ConvertCalled {
        /// The requested mode.
        mode: ClaimMode,
    },
    /// The lock has the requested mode.
    ConvertGranted {
        /// The fencing token from now on, if the store issues tokens.
        token: Option<u64>,
        /// The end of the guard, unless it is renewed.
        valid_until: Option<u64>,
    },
    /// Other clients hold the lock, which keeps its mode.
    ConvertRefused,
    /// The conversion failed with an unknown outcome. The holder has no guard any more.
    ConvertFailed,
    /// The guard was valid at this time, for example after a renewal.
    ValidUntil {
        /// The end of the guard, unless it is renewed again.
        until: u64,
    },
    /// The guard reports its loss.
    Lost,
    /// The holder is about to release the lock.
    ReleaseCalled,
    /// The lock was held until the release and is released.
    ReleaseFreed,
    /// The lock had been lost before the release.
    ReleaseNotHeld,
    /// The release failed with an unknown outcome.
    ReleaseFailed,
    /// A client is about to write to the protected resource.
    WriteCalled {
        /// The key of the lock that protects it.
        key: Arc<str>,
        /// The token that the write carries.
        token: u64,
    },
    /// The resource accepted the write.
    WriteAccepted,
    /// The resource rejected the write.
    WriteRejected,
    /// The write failed with an unknown outcome.
    WriteFailed,
}

fn exclusive() -> ClaimMode {
    ClaimMode::Exclusive
}

fn is_exclusive(mode: &ClaimMode) -> bool {
    *mode == ClaimMode::Exclusive
}
