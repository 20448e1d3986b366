//! The events of a registry, and the observers that receive them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::Busy;
use crate::error::{BackendError, LostReason};
use crate::fencing::FencingToken;
use crate::mode::ClaimMode;
use crate::panic_safe::catch_panic;

/// An event of a registry. A field named `key` contains the lock's key. A field named `mode`
/// contains the mode that is acquired or held; for permits, with its units.
#[derive(Debug)]
#[non_exhaustive]
#[expect(
    missing_docs,
    reason = "the fields repeat their types' docs; each variant says when it happens"
)]
pub enum LockEvent<'a> {
    /// A caller waits in the local queue, behind other callers of this process.
    #[non_exhaustive]
    Waiting { key: &'a str, mode: ClaimMode },
    /// The store responded that another claim holds the key.
    #[non_exhaustive]
    Busy { key: &'a str, mode: ClaimMode, busy: &'a Busy },
    /// An attempt failed. Its outcome is unknown unless the error is
    /// [`refused`](BackendError::refused).
    #[non_exhaustive]
    AttemptFailed { key: &'a str, mode: ClaimMode, error: &'a BackendError },
    /// The deadline of a caller passed while the key was held.
    #[non_exhaustive]
    GaveUp { key: &'a str, mode: ClaimMode, waited: Duration },
    /// The store granted the key.
    #[non_exhaustive]
    Granted { key: &'a str, mode: ClaimMode, token: FencingToken, waited: Duration, attempts: u32 },
    /// The owner of a held lock acquired it again.
    #[non_exhaustive]
    Reentered { key: &'a str, mode: ClaimMode, token: FencingToken },
    /// A holder handed its claim over to the next caller of this process, without a request to the
    /// store.
    #[non_exhaustive]
    HandedOver { key: &'a str, mode: ClaimMode, token: FencingToken },
    /// A reader joined a shared grant of this process, without a request to the store.
    #[non_exhaustive]
    Joined { key: &'a str, mode: ClaimMode, token: FencingToken },
    /// The mode of a held lock was changed from `from` to `mode`, without a release in between.
    #[non_exhaustive]
    Converted { key: &'a str, from: ClaimMode, mode: ClaimMode, token: FencingToken },
    /// A renewal was confirmed.
    #[non_exhaustive]
    Renewed { key: &'a str, mode: ClaimMode, valid_for: Duration },
    /// A renewal failed, or had no response before its repetition. The lock is still held for
    /// `valid_for`.
    #[non_exhaustive]
    RenewFailed { key: &'a str, mode: ClaimMode, error: &'a BackendError, valid_for: Duration },
    /// A held lock was lost. Its holder has been notified.
    #[non_exhaustive]
    Lost { key: &'a str, mode: ClaimMode, token: FencingToken, reason: LostReason },
    /// The store confirmed a release.
    #[non_exhaustive]
    Released { key: &'a str, mode: ClaimMode, held_for: Duration },
    /// A release failed. If the error is transient, the engine repeats the release until its
    /// outcome is known or the lease is over.
    #[non_exhaustive]
    ReleaseFailed { key: &'a str, mode: ClaimMode, error: &'a BackendError },
    /// A claim could not be released, so its key stays locked until its lease ends. The store did
    /// not respond for the length of the lease, the store refused the release, or the registry was
    /// closed before the end of a `min_hold`.
    #[non_exhaustive]
    LeftToLease { key: &'a str, mode: ClaimMode },
    /// The registry began to close and grants no more locks.
    Closing,
    /// The registry is closed.
    Closed,
}

/// Receives registry events synchronously, on the task that emits them. An implementation must be
/// fast and must not block.
///
/// The registry catches and ignores a panic of an observer.
pub trait Observer: fmt::Debug + Send + Sync {
    /// Receives `event`.
    fn on(&self, event: &LockEvent<'_>);
}

/// The observers of one registry.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observers(Vec<Arc<dyn Observer>>);

impl Observers {
    pub(crate) fn add(&mut self, observer: Arc<dyn Observer>) {
        self.0.push(observer);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn emit(&self, event: &LockEvent<'_>) {
        for observer in &self.0 {
            // A panic in an observer must not end the lock operation that emits the event.
            catch_panic(|| observer.on(event));
        }
    }
}
