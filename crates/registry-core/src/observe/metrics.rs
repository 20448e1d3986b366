//! Exports lock events as metrics.

use metrics::{counter, histogram};

use crate::error::LostReason;
use crate::event::{LockEvent, Observer};

/// Counts events with the `metrics` facade. Keys are not labels, because their number has no limit.
///
/// | metric | kind | labels |
/// |---|---|---|
/// | `lock_registry_grants_total` | counter | `store`, `how`: `store`, `reentry`, `handover` |
/// | `lock_registry_wait_seconds` | histogram | `store` |
/// | `lock_registry_gave_up_total` | counter | `store` |
/// | `lock_registry_attempts_failed_total` | counter | `store` |
/// | `lock_registry_renewals_total` | counter | `store`, `outcome`: `renewed`, `failed` |
/// | `lock_registry_lost_total` | counter | `store`, `reason` |
/// | `lock_registry_held_seconds` | histogram | `store` |
/// | `lock_registry_left_to_lease_total` | counter | `store` |
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MetricsObserver {
    store: &'static str,
}

impl MetricsObserver {
    /// Creates an observer that labels every metric with this store name.
    #[must_use]
    pub const fn new(store: &'static str) -> Self {
        Self { store }
    }
}

impl Observer for MetricsObserver {
    fn on(&self, event: &LockEvent<'_>) {
        let store = self.store;
        let granted = |how: &'static str| {
            counter!("lock_registry_grants_total", "store" => store, "how" => how).increment(1);
        };
        let renewed = |outcome: &'static str| {
            counter!("lock_registry_renewals_total", "store" => store, "outcome" => outcome)
                .increment(1);
        };
        match event {
            LockEvent::Granted { waited, .. } => {
                granted("store");
                histogram!("lock_registry_wait_seconds", "store" => store)
                    .record(waited.as_secs_f64());
            }
            LockEvent::Reentered { .. } => granted("reentry"),
            LockEvent::HandedOver { .. } => granted("handover"),
            LockEvent::Joined { .. } => granted("joined"),
            LockEvent::GaveUp { .. } => {
                counter!("lock_registry_gave_up_total", "store" => store).increment(1)
            }
            LockEvent::AttemptFailed { .. } => {
                counter!("lock_registry_attempts_failed_total", "store" => store).increment(1);
            }
            LockEvent::Renewed { .. } => renewed("renewed"),
            LockEvent::RenewFailed { .. } => renewed("failed"),
            LockEvent::Lost { reason, .. } => {
                let reason = match reason {
                    LostReason::Expired => "expired",
                    LostReason::Gone => "gone",
                    LostReason::MaxHold => "max_hold",
                    LostReason::Closed => "closed",
                };
                counter!("lock_registry_lost_total", "store" => store, "reason" => reason)
                    .increment(1);
            }
            LockEvent::Released { held_for, .. } => {
                histogram!("lock_registry_held_seconds", "store" => store)
                    .record(held_for.as_secs_f64());
            }
            LockEvent::LeftToLease { .. } => {
                counter!("lock_registry_left_to_lease_total", "store" => store).increment(1);
            }
            LockEvent::Waiting { .. }
            | LockEvent::Busy { .. }
            | LockEvent::ReleaseFailed { .. }
            | LockEvent::Closing
            | LockEvent::Closed => {}
        }
    }
}
