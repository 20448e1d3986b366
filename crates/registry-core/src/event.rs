//! Everything that can happen to a lock, as one closed list, and those who are told.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::Busy;
use crate::contained::contain;
use crate::error::{BackendError, LostReason};
use crate::fencing::FencingToken;

/// Something that happened. Fields named `key` are the lock's key.
#[derive(Debug)]
#[non_exhaustive]
#[expect(
    missing_docs,
    reason = "the fields repeat their types' docs; each variant says when it happens"
)]
pub enum LockEvent<'a> {
    /// A caller queues behind others of this process.
    #[non_exhaustive]
    Waiting { key: &'a str },
    /// The store says that somebody else holds the key.
    #[non_exhaustive]
    Busy { key: &'a str, busy: &'a Busy },
    /// An attempt failed; its outcome is unknown unless the error says otherwise.
    #[non_exhaustive]
    AttemptFailed { key: &'a str, error: &'a BackendError },
    /// A caller gave up: the key was held by others until its deadline.
    #[non_exhaustive]
    GaveUp { key: &'a str, waited: Duration },
    /// The store granted the key.
    #[non_exhaustive]
    Granted { key: &'a str, token: Option<FencingToken>, waited: Duration, attempts: u32 },
    /// The owner of a held lock entered it again.
    #[non_exhaustive]
    Reentered { key: &'a str, token: Option<FencingToken> },
    /// A holder passed the claim on to the next caller of this process, without the store.
    #[non_exhaustive]
    HandedOver { key: &'a str, token: Option<FencingToken> },
    /// A renewal was confirmed.
    #[non_exhaustive]
    Renewed { key: &'a str, valid_for: Duration },
    /// A renewal failed, or stayed unanswered until it was tried again; the lock is still held for `valid_for`.
    #[non_exhaustive]
    RenewFailed { key: &'a str, error: &'a BackendError, valid_for: Duration },
    /// A held lock is not held any more. The holder has been told.
    #[non_exhaustive]
    Lost { key: &'a str, token: Option<FencingToken>, reason: LostReason },
    /// The store confirmed that the key of a lock that was let go is free of its claim.
    #[non_exhaustive]
    Released { key: &'a str, held_for: Duration },
    /// A release failed; if that can help, it is repeated until its outcome is known or the lease is over.
    #[non_exhaustive]
    ReleaseFailed { key: &'a str, error: &'a BackendError },
    /// A claim is not given back, and only the store's clock frees its key: the store did not answer for as long as the lease, or
    /// refused; or closing does not wait for a `min_hold`.
    #[non_exhaustive]
    LeftToLease { key: &'a str },
    /// The registry began to close: it grants no more.
    Closing,
    /// The registry is closed.
    Closed,
}

/// Is told what happens in a registry, on the task where it happens: it must be quick and must not block.
/// A panic in it is caught and ignored, and so is a panic of the payload's destructor.
pub trait Observer: fmt::Debug + Send + Sync {
    /// Takes note of `event`.
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

    pub(crate) fn tell(&self, event: &LockEvent<'_>) {
        for observer in &self.0 {
            // Somebody's broken metrics must not cost somebody else's lock.
            contain(|| observer.on(event));
        }
    }
}
