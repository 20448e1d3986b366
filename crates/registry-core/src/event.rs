//! The events of a registry, and the observers that receive them.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

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
    /// A call began to acquire a lock. [`AcquireEnded`](Self::AcquireEnded) with the same `id`
    /// follows in any case, even if the call's future is dropped. No other call, hold or release of
    /// this process has this `id`.
    #[non_exhaustive]
    AcquireBegan { id: u64, key: &'a str, mode: ClaimMode },
    /// A call that acquires a lock ended.
    #[non_exhaustive]
    AcquireEnded { id: u64, key: &'a str, mode: ClaimMode, waited: Duration, end: AcquireEnd },
    /// A caller holds the lock. [`HoldEnded`](Self::HoldEnded) with the same `id` follows.
    #[non_exhaustive]
    HoldBegan { id: u64, key: &'a str, mode: ClaimMode, token: FencingToken },
    /// The last guard of a hold is gone, or the lock was lost or converted. A conversion begins a
    /// new hold.
    #[non_exhaustive]
    HoldEnded {
        id: u64,
        key: &'a str,
        mode: ClaimMode,
        token: FencingToken,
        held_for: Duration,
        end: HoldEnd,
    },
    /// The release of a held lock began. [`ReleaseEnded`](Self::ReleaseEnded) with the same `id`
    /// follows.
    #[non_exhaustive]
    ReleaseBegan { id: u64, key: &'a str, mode: ClaimMode, token: FencingToken },
    /// A release has an outcome. Lost locks are released without these events.
    #[non_exhaustive]
    ReleaseEnded { id: u64, key: &'a str, mode: ClaimMode, end: ReleaseEnd },
    /// A caller waits in the local queue, behind other callers of this process.
    #[non_exhaustive]
    Waiting { key: &'a str, mode: ClaimMode },
    /// The store responded that other claims hold the key or are before this claim in its queue.
    #[non_exhaustive]
    Busy { key: &'a str, mode: ClaimMode, busy: &'a Busy },
    /// An attempt failed, or the value block of an election could not be read or written. The
    /// outcome is unknown unless the error is [`refused`](BackendError::refused).
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
    /// The store confirmed the release of a held lock.
    #[non_exhaustive]
    Released { key: &'a str, mode: ClaimMode, held_for: Duration },
    /// A release failed. If the error is transient, the engine repeats the release until its
    /// outcome is known or the lease is over.
    #[non_exhaustive]
    ReleaseFailed { key: &'a str, mode: ClaimMode, error: &'a BackendError },
    /// A claim could not be released, so its key may stay locked until its lease ends. Possible
    /// causes: the store did not respond for the length of the lease or refused the release, or
    /// `close` ended before a `min_hold`.
    #[non_exhaustive]
    LeftToLease { key: &'a str, mode: ClaimMode },
    /// A candidate of the role `key` began to campaign.
    #[non_exhaustive]
    Campaigning { key: &'a str },
    /// A candidate became the leader of the role `key`.
    /// [`LeadershipEnded`](Self::LeadershipEnded) follows.
    #[non_exhaustive]
    LeadershipBegan { key: &'a str, token: FencingToken },
    /// A leader has stepped down or lost its term, or the future of its term was dropped.
    #[non_exhaustive]
    LeadershipEnded { key: &'a str, token: FencingToken },
    /// A tick of the job `key` ended, or a call ran no tick. `completed_at` is the time at which
    /// the last known tick was completed. It is a time on the store's clock if clients can read
    /// that clock. Otherwise, it is on the clock of the host that ran the tick.
    #[non_exhaustive]
    Tick { key: &'a str, end: TickEnd, completed_at: Option<SystemTime> },
    /// The registry began to close and grants no more locks.
    Closing,
    /// The registry is closed.
    Closed,
}

/// How a call that acquires a lock ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireEnd {
    /// The caller holds the lock.
    Acquired(FencingToken),
    /// The lock was held until the deadline.
    Busy,
    /// The call returned an error.
    Failed,
    /// The call's future was dropped, or it panicked.
    Dropped,
}

/// How a hold ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldEnd {
    /// The last guard was unlocked, dropped or converted.
    Released,
    /// The lock was lost.
    Lost(LostReason),
}

/// How a release ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseEnd {
    /// The claim does not hold the key any more.
    Released,
    /// The claim passed to the next caller of this process.
    HandedOver,
    /// The outcome is unknown, and the claim ends with its lease at the latest.
    Failed,
}

/// How a tick of a job ended. See [`ScheduledJob::run`](crate::once::ScheduledJob::run).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TickEnd {
    /// This process ran the tick and recorded it.
    Done,
    /// The tick was completed before.
    AlreadyDone,
    /// Another holder has the lock of the job.
    Busy,
    /// The tick is not recorded: its work or a request failed, the lock was lost, or the call was
    /// dropped.
    Failed,
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
