//! Logs lock events with `tracing`.

use tracing::{debug, info, trace, warn};

use crate::error::BackendError;
use crate::event::{LockEvent, Observer};

/// Logs every event with `tracing`, target `lock_registry`. The field `mode` contains the mode of
/// the lock; for permits, with its units.
///
/// | level | events |
/// |---|---|
/// | warn | lost locks, failed renewals, claims left to their lease |
/// | info | start and end of closing |
/// | debug | grants, conversions, releases, failed attempts and releases, expired waits |
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
            LockEvent::Waiting { key, mode } => {
                trace!(target: TARGET, ?key, %mode, "waiting for local callers")
            }
            LockEvent::Busy { key, mode, busy } => {
                let holder = busy.holder.as_ref().and_then(|holder| holder.label.as_deref());
                let retry_after = busy.retry_after;
                trace!(target: TARGET, ?key, %mode, holder, ?retry_after, "lock busy");
            }
            LockEvent::AttemptFailed { key, mode, error } => {
                debug!(target: TARGET, ?key, %mode, error = as_source(error), "attempt failed");
            }
            LockEvent::GaveUp { key, mode, waited } => {
                debug!(target: TARGET, ?key, %mode, ?waited, "gave up waiting")
            }
            LockEvent::Granted { key, mode, token, waited, attempts } => {
                let token = token.get();
                debug!(target: TARGET, ?key, %mode, token, ?waited, attempts, "lock granted");
            }
            LockEvent::Reentered { key, mode, token } => {
                debug!(target: TARGET, ?key, %mode, token = token.get(), "lock re-entered");
            }
            LockEvent::HandedOver { key, mode, token } => {
                debug!(target: TARGET, ?key, %mode, token = token.get(), "lock handed over");
            }
            LockEvent::Joined { key, mode, token } => {
                debug!(target: TARGET, ?key, %mode, token = token.get(), "shared lock joined");
            }
            LockEvent::Converted { key, from, mode, token } => {
                debug!(target: TARGET, ?key, %from, %mode, token = token.get(), "lock converted");
            }
            LockEvent::Renewed { key, mode, valid_for } => {
                trace!(target: TARGET, ?key, %mode, ?valid_for, "lease renewed")
            }
            LockEvent::RenewFailed { key, mode, error, valid_for } => {
                let error = as_source(error);
                warn!(target: TARGET, ?key, %mode, error, ?valid_for, "renewal failed");
            }
            LockEvent::Lost { key, mode, token, reason } => {
                warn!(target: TARGET, ?key, %mode, token = token.get(), ?reason, "lock lost");
            }
            LockEvent::Released { key, mode, held_for } => {
                debug!(target: TARGET, ?key, %mode, ?held_for, "lock released")
            }
            LockEvent::ReleaseFailed { key, mode, error } => {
                debug!(target: TARGET, ?key, %mode, error = as_source(error), "release failed");
            }
            LockEvent::LeftToLease { key, mode } => {
                warn!(target: TARGET, ?key, %mode, "claim left to its lease")
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
