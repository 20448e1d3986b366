//! Checks the history of a workload by the checkers of the testkit. Accounts for violations that
//! the fault explains.

use std::time::Duration;

use registry_core::LostReason;
use registry_testkit::check::{Checked, check_queued};
use registry_testkit::history::{History, RecordedGrant, ReleaseResult, WriteResult};

use super::workload::WorkloadLoss;

/// The maximum delay of a loss notification on a busy machine, in nanoseconds.
const NOTIFICATION_DELAY_MAX: u64 = 2_000_000_000;

/// The result of a workload.
pub(crate) struct WorkloadOutcome {
    pub(crate) history: History,
    /// Holds that ended without a release, in the order of their loss notifications.
    pub(crate) losses: Vec<WorkloadLoss>,
    /// The errors that callers received.
    pub(crate) errors: Vec<String>,
    /// The time in which a new client acquired all keys, one after the other.
    pub(crate) reacquired_after: Duration,
}

impl WorkloadOutcome {
    /// Asserts that all guarantees were met.
    ///
    /// # Panics
    /// Panics with the first violation.
    pub(crate) fn assert_no_violation(&self) -> Checked {
        self.assert_losses_reported_in_time();
        self.assert_rejections_justified();
        let checked = check_queued(&self.history).unwrap_or_else(|violation| panic!("{violation}"));
        assert!(
            checked.grants >= 20 && checked.writes >= 20,
            "too few grants or writes: {checked:?}"
        );
        println!(
            "{checked:?}, {} losses, {} errors, all keys reacquired after {:?}",
            self.losses.len(),
            self.errors.len(),
            self.reacquired_after,
        );
        checked
    }

    /// Asserts that all guarantees were met, except that the members may have ended leases of live
    /// holders.
    ///
    /// A holder that is connected to a lagging member detects its loss late, possibly after the
    /// next grant. It must detect the loss within [`NOTIFICATION_DELAY_MAX`] or by its release.
    /// Tokens and fenced writes must be safe.
    ///
    /// # Panics
    /// Panics with the first violation.
    pub(crate) fn assert_safe_despite_lagging_members(mut self) -> Checked {
        let grants = self.history.grants.clone();
        for grant in &mut self.history.grants {
            let late_release =
                grant.release.filter(|release| release.ending == ReleaseResult::NotHeld);
            let Some(lost) = grant.lost.or_else(|| Some(late_release?.window.from)) else {
                continue;
            };
            let next = grants
                .iter()
                .filter(|next| next.key == grant.key && next.token > grant.token)
                .map(|next| next.acquire.to)
                .min();
            if let Some(next) =
                next.filter(|next| *next < lost && lost - next < NOTIFICATION_DELAY_MAX)
            {
                println!(
                    "{}: two valid guards for {:?}",
                    grant.key,
                    Duration::from_nanos(lost - next)
                );
                grant.lost = Some(next);
            }
        }
        self.assert_no_violation()
    }

    /// Asserts that every loss was reported, at the latest at the end of the lease.
    fn assert_losses_reported_in_time(&self) {
        for grant in &self.history.grants {
            let until =
                grant.valid_until.expect("etcd has leases").saturating_add(NOTIFICATION_DELAY_MAX);
            let released = grant.release.map_or(u64::MAX, |release| release.window.from);
            let end = released.min(grant.lost.unwrap_or(u64::MAX));
            assert!(end <= until, "not reported in time: {grant:?}");
        }
    }

    /// Asserts that a write was rejected only if a newer token existed.
    fn assert_rejections_justified(&self) {
        for write in &self.history.writes {
            let newer = |grant: &RecordedGrant| {
                grant.key == write.key
                    && grant.token > Some(write.token)
                    && grant.acquire.from < write.window.to
            };
            assert!(
                write.answer != WriteResult::Rejected || self.history.grants.iter().any(newer),
                "{write:?} was rejected, but no newer token existed"
            );
        }
    }

    /// Returns the reasons of the losses of steady keys.
    pub(crate) fn steady_losses(&self) -> Vec<LostReason> {
        let steady = self.losses.iter().filter(|loss| loss.key.starts_with("steady"));
        steady.map(|loss| loss.reason).collect()
    }
}
