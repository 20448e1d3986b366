//! Logs lock events with `tracing`.

use std::sync::Arc;

use dashmap::DashMap;
use tracing::field::Empty;
use tracing::{Span, debug, info, info_span, trace, warn};

use crate::error::BackendError;
use crate::event::{AcquireEnd, HoldEnd, LockEvent, Observer, ReleaseEnd};

/// Logs lock events with `tracing`, target `lock_registry`. The begin and end events of calls,
/// holds and releases are not logged: they begin and end the spans below. The field `mode` contains
/// the mode of the lock; for permits, also the numbers of units.
///
/// | level | events |
/// |---|---|
/// | warn | lost locks, failed renewals, claims that may stay in the store until their lease ends |
/// | info | a registry begins to close or is closed; a leader's term begins or ends |
/// | trace | local waits, busy responses, confirmed renewals |
/// | debug | all other logged events |
///
/// The observer also creates three spans of level info. Their parent is the span in which the call
/// was made, so that a layer such as `tracing-opentelemetry` adds them to its trace. The engine
/// does not enter them.
///
/// | span | duration |
/// |---|---|
/// | `wait` | from the call until it ends |
/// | `hold` | from the acquisition until the last guard is gone, or the lock is lost or converted |
/// | `release` | from the release until it succeeds or fails, or the claim is handed over |
///
/// Their fields are `key`, `mode`, `store`, `token` and `outcome`. `outcome`, and the `token` of
/// `wait`, are recorded at the end.
#[derive(Debug, Clone, Default)]
pub struct TracingObserver {
    store: Option<&'static str>,
    /// The open spans, by the `id` of their events.
    spans: Arc<DashMap<u64, Span>>,
}

impl TracingObserver {
    /// Creates an observer that logs to the current subscriber.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the field `store` of the spans.
    #[must_use]
    pub fn store(mut self, store: &'static str) -> Self {
        self.store = Some(store);
        self
    }

    fn begin(&self, id: u64, span: Span) {
        if !span.is_disabled() {
            self.spans.insert(id, span);
        }
    }

    fn end(&self, id: u64, outcome: &str) {
        if let Some((_, span)) = self.spans.remove(&id) {
            span.record("outcome", outcome);
        }
    }
}

impl Observer for TracingObserver {
    fn on(&self, event: &LockEvent<'_>) {
        let store = self.store;
        match event {
            LockEvent::AcquireBegan { id, key, mode } => self.begin(
                *id,
                info_span!(target: TARGET, "wait", key, %mode, store, token = Empty, outcome = Empty),
            ),
            LockEvent::AcquireEnded { id, end, .. } => {
                let outcome = match end {
                    AcquireEnd::Acquired(token) => {
                        if let Some(span) = self.spans.get(id) {
                            span.record("token", token.get());
                        }
                        "acquired"
                    }
                    AcquireEnd::Busy => "busy",
                    AcquireEnd::Failed => "failed",
                    AcquireEnd::Dropped => "dropped",
                };
                self.end(*id, outcome);
            }
            LockEvent::HoldBegan { id, key, mode, token } => {
                let token = token.get();
                let span =
                    info_span!(target: TARGET, "hold", key, %mode, store, token, outcome = Empty);
                self.begin(*id, span);
            }
            LockEvent::HoldEnded { id, end, .. } => match end {
                HoldEnd::Released => self.end(*id, "released"),
                HoldEnd::Lost(reason) => self.end(*id, &format!("lost: {reason}")),
            },
            LockEvent::ReleaseBegan { id, key, mode, token } => {
                let token = token.get();
                let span =
                    info_span!(target: TARGET, "release", key, %mode, store, token, outcome = Empty);
                self.begin(*id, span);
            }
            LockEvent::ReleaseEnded { id, end, .. } => {
                let outcome = match end {
                    ReleaseEnd::Released => "released",
                    ReleaseEnd::HandedOver => "handed over",
                    ReleaseEnd::Failed => "failed",
                };
                self.end(*id, outcome);
            }
            LockEvent::Campaigning { key } => debug!(target: TARGET, ?key, "campaigning"),
            LockEvent::LeadershipBegan { key, token } => {
                info!(target: TARGET, ?key, token = token.get(), "leadership began")
            }
            LockEvent::LeadershipEnded { key, token } => {
                info!(target: TARGET, ?key, token = token.get(), "leadership ended")
            }
            LockEvent::Tick { key, end, .. } => debug!(target: TARGET, ?key, ?end, "tick ended"),
            LockEvent::Waiting { key, mode } => {
                trace!(target: TARGET, ?key, %mode, "waiting for local callers")
            }
            LockEvent::Busy { key, mode, busy } => {
                let holder = busy.holder.as_ref().and_then(|holder| holder.label.as_deref());
                let retry_after = busy.retry_after;
                trace!(target: TARGET, ?key, %mode, holder, ?retry_after, "lock busy");
            }
            LockEvent::AttemptFailed { key, mode, error } => {
                debug!(target: TARGET, ?key, %mode, error = as_dyn_error(error), "attempt failed");
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
                let error = as_dyn_error(error);
                warn!(target: TARGET, ?key, %mode, error, ?valid_for, "renewal failed");
            }
            LockEvent::Lost { key, mode, token, reason } => {
                warn!(target: TARGET, ?key, %mode, token = token.get(), ?reason, "lock lost");
            }
            LockEvent::Released { key, mode, held_for } => {
                debug!(target: TARGET, ?key, %mode, ?held_for, "lock released")
            }
            LockEvent::ReleaseFailed { key, mode, error } => {
                debug!(target: TARGET, ?key, %mode, error = as_dyn_error(error), "release failed");
            }
            LockEvent::LeftToLease { key, mode } => {
                warn!(target: TARGET, ?key, %mode, "claim left to its lease")
            }
            LockEvent::Closing => info!(target: TARGET, "registry closing"),
            LockEvent::Closed => info!(target: TARGET, "registry closed"),
        }
    }
}

fn as_dyn_error(error: &BackendError) -> &(dyn std::error::Error + 'static) {
    error
}

const TARGET: &str = "lock_registry";
