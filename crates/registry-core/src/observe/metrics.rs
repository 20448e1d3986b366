//! Exports lock events as metrics.

use metrics::{counter, histogram};

use crate::error::LostReason;
use crate::event::{LockEvent, Observer};
use crate::mode::ClaimMode;

/// Counts events with the `metrics` facade. Keys are not labels, because their number has no limit.
///
/// | metric | kind | labels in addition to `store` and `mode` |
/// |---|---|---|
/// | `lock_registry_grants_total` | counter | `how`: `store`, `reentry`, `handover`, `joined` |
/// | `lock_registry_permit_units_total` | counter | |
/// | `lock_registry_wait_seconds` | histogram | |
/// | `lock_registry_gave_up_total` | counter | |
/// | `lock_registry_attempts_failed_total` | counter | |
/// | `lock_registry_conversions_total` | counter | `from`: the mode before |
/// | `lock_registry_renewals_total` | counter | `outcome`: `renewed`, `failed` |
/// | `lock_registry_lost_total` | counter | `reason` |
/// | `lock_registry_held_seconds` | histogram | |
/// | `lock_registry_left_to_lease_total` | counter | |
///
/// `mode` is `exclusive`, `shared`, `upgradable` or `permits`. The units of permits are no label:
/// `lock_registry_permit_units_total` counts them.
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

    fn on_grant(&self, mode: ClaimMode, how: &'static str) {
        let (store, mode) = (self.store, mode.name());
        counter!("lock_registry_grants_total", "store" => store, "mode" => mode, "how" => how)
            .increment(1);
    }

    fn on_renewal(&self, mode: ClaimMode, outcome: &'static str) {
        let (store, mode) = (self.store, mode.name());
        counter!(
            "lock_registry_renewals_total",
            "store" => store, "mode" => mode, "outcome" => outcome
        )
        .increment(1);
    }
}

impl Observer for MetricsObserver {
    fn on(&self, event: &LockEvent<'_>) {
        let store = self.store;
        match event {
            LockEvent::Granted { mode, waited, .. } => {
                self.on_grant(*mode, "store");
                let (units, mode) = (mode.units(), mode.name());
                histogram!("lock_registry_wait_seconds", "store" => store, "mode" => mode)
                    .record(waited.as_secs_f64());
                if units > 0 {
                    counter!("lock_registry_permit_units_total", "store" => store, "mode" => mode)
                        .increment(units.into());
                }
            }
            LockEvent::Reentered { mode, .. } => self.on_grant(*mode, "reentry"),
            LockEvent::HandedOver { mode, .. } => self.on_grant(*mode, "handover"),
            LockEvent::Joined { mode, .. } => self.on_grant(*mode, "joined"),
            LockEvent::Converted { from, mode, .. } => {
                let (from, mode) = (from.name(), mode.name());
                counter!(
                    "lock_registry_conversions_total",
                    "store" => store, "mode" => mode, "from" => from
                )
                .increment(1);
            }
            LockEvent::GaveUp { mode, .. } => {
                let mode = mode.name();
                counter!("lock_registry_gave_up_total", "store" => store, "mode" => mode)
                    .increment(1);
            }
            LockEvent::AttemptFailed { mode, .. } => {
                let mode = mode.name();
                counter!("lock_registry_attempts_failed_total", "store" => store, "mode" => mode)
                    .increment(1);
            }
            LockEvent::Renewed { mode, .. } => self.on_renewal(*mode, "renewed"),
            LockEvent::RenewFailed { mode, .. } => self.on_renewal(*mode, "failed"),
            LockEvent::Lost { mode, reason, .. } => {
                let mode = mode.name();
                let reason = match reason {
                    LostReason::Expired => "expired",
                    LostReason::Gone => "gone",
                    LostReason::MaxHold => "max_hold",
                    LostReason::Closed => "closed",
                };
                counter!(
                    "lock_registry_lost_total",
                    "store" => store, "mode" => mode, "reason" => reason
                )
                .increment(1);
            }
            LockEvent::Released { mode, held_for, .. } => {
                let mode = mode.name();
                histogram!("lock_registry_held_seconds", "store" => store, "mode" => mode)
                    .record(held_for.as_secs_f64());
            }
            LockEvent::LeftToLease { mode, .. } => {
                let mode = mode.name();
                counter!("lock_registry_left_to_lease_total", "store" => store, "mode" => mode)
                    .increment(1);
            }
            LockEvent::Waiting { .. }
            | LockEvent::Busy { .. }
            | LockEvent::ReleaseFailed { .. }
            | LockEvent::Closing
            | LockEvent::Closed => {}
        }
    }
}
