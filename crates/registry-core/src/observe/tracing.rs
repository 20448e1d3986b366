//! Logs lock events with `tracing`.

use tracing::{debug, info, trace, warn};

use crate::error::BackendError;
use crate::event::{LockEvent, Observer};

/// Logs every event with `tracing`, target `lock_registry`.
///
/// | level | events |
/// |---|---|
/// | warn | lost locks, failed renewals, claims left to their lease |
/// | info | start and end of closing |
/// | debug | grants, releases, failed attempts and releases, expired waits |
/// | trace | local waits, busy responses, renewals |
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct TracingObserver;

impl TracingObserver {
    /// Creates an observer that logs to the current subscriber.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }
}

impl Observer for TracingObserver {
    fn on(&self, event: &LockEvent<'_>) {
        match event {
            LockEvent::Waiting { key } => trace!(target: TARGET, ?key, "waiting for local callers"),
            LockEvent::Busy { key, busy } => {
                let holder = busy.holder.as_ref().and_then(|holder| holder.label.as_deref());
                trace!(target: TARGET, ?key, holder, retry_after = ?busy.retry_after, "lock busy");
            }
            LockEvent::AttemptFailed { key, error } => {
                debug!(target: TARGET, ?key, error = as_source(error), "attempt failed");
            }
            LockEvent::GaveUp { key, waited } => {
                debug!(target: TARGET, ?key, ?waited, "gave up waiting")
            }
            LockEvent::Granted { key, token, waited, attempts } => {
                let token = token.get();
                debug!(target: TARGET, ?key, token, ?waited, attempts, "lock granted");
            }
            LockEvent::Reentered { key, token } => {
                debug!(target: TARGET, ?key, token = token.get(), "lock re-entered");
            }
            LockEvent::HandedOver { key, token } => {
                debug!(target: TARGET, ?key, token = token.get(), "lock handed over");
            }
            LockEvent::Joined { key, token } => {
                debug!(target: TARGET, ?key, token = token.get(), "shared lock joined");
            }
            LockEvent::Renewed { key, valid_for } => {
                trace!(target: TARGET, ?key, ?valid_for, "lease renewed")
            }
            LockEvent::RenewFailed { key, error, valid_for } => {
                let error = as_source(error);
                warn!(target: TARGET, ?key, error, ?valid_for, "renewal failed");
            }
            LockEvent::Lost { key, token, reason } => {
                warn!(target: TARGET, ?key, token = token.get(), ?reason, "lock lost");
            }
            LockEvent::Released { key, held_for } => {
                debug!(target: TARGET, ?key, ?held_for, "lock released")
            }
            LockEvent::ReleaseFailed { key, error } => {
                debug!(target: TARGET, ?key, error = as_source(error), "release failed");
            }
            LockEvent::LeftToLease { key } => {
                warn!(target: TARGET, ?key, "claim left to its lease")
            }
            LockEvent::Closing => info!(target: TARGET, "registry closing"),
            LockEvent::Closed => info!(target: TARGET, "registry closed"),
        }
    }
}

fn as_source(error: &BackendError) -> &(dyn std::error::Error + 'static) {
    error
}

const TARGET: &str = "lock_registry";
