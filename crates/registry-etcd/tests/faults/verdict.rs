//! The verdict on a workload: the checkers of the testkit, and which violations the fault explains.

use std::time::Duration;

use registry_core::LostReason;
use registry_testkit::check::{Checked, check_in_line};
use registry_testkit::history::{Ending, Grant, History, WriteAnswer};

use crate::contest::Loss;

/// How late a holder may be notified of the end of its lease on a busy machine, in nanoseconds.
const LATE: u64 = 2_000_000_000;

/// The result of a workload.
pub(crate) struct Outcome {
    pub(crate) history: History,
    /// Holds that ended without a release, in the order of their loss notifications.
    pub(crate) losses: Vec<Loss>,
    /// The errors that callers received.
    pub(crate) errors: Vec<String>,
    /// How long a new client took to acquire all keys, one after the other.
    pub(crate) taken_after: Duration,
}

impl Outcome {
    /// Asserts that all promises were kept.
    ///
    /// # Panics
    /// Panics with the first broken promise.
    pub(crate) fn assert_flawless(&self) -> Checked {
        self.losses_were_told();
        self.writes_were_refused_with_reason();
        let checked =
            check_in_line(&self.history).unwrap_or_else(|violation| panic!("{violation}"));
        assert!(checked.grants >= 20 && checked.writes >= 20, "that was too little: {checked:?}");
        println!(
            "{checked:?}, {} losses, {} errors, all keys taken after {:?}",
            self.losses.len(),
            self.errors.len(),
            self.taken_after,
        );
        checked
    }

    /// Asserts that all promises were kept, except that the members may have ended leases of live
    /// holders.
    ///
    /// A holder that reaches a lagging member learns of that late, so the next grant may come
    /// first. The holder must learn of its loss within [`LATE`], or by its release. Tokens and
    /// fenced writes must be safe.
    ///
    /// # Panics
    /// Panics with the first broken promise.
    pub(crate) fn assert_flawless_but_for_members_behind(mut self) -> Checked {
        let grants = self.history.grants.clone();
        for grant in &mut self.history.grants {
            let in_vain = grant.release.filter(|release| release.ending == Ending::NotHeld);
            let Some(lost) = grant.lost.or_else(|| Some(in_vain?.window.from)) else {
                continue;
            };
            let next = grants
                .iter()
                .filter(|next| next.key == grant.key && next.token > grant.token)
                .map(|next| next.acquire.to)
                .min();
            if let Some(next) = next.filter(|next| *next < lost && lost - next < LATE) {
                println!(
                    "{}: two valid guards for {:?}",
                    grant.key,
                    Duration::from_nanos(lost - next)
                );
                grant.lost = Some(next);
            }
        }
        self.assert_flawless()
    }

    /// Asserts that every loss was reported, at the latest at the end of the lease.
    fn losses_were_told(&self) {
        for grant in &self.history.grants {
            let until = grant.valid_until.expect("etcd has leases").saturating_add(LATE);
            let released = grant.release.map_or(u64::MAX, |release| release.window.from);
            let end = released.min(grant.lost.unwrap_or(u64::MAX));
            assert!(end <= until, "not told in time: {grant:?}");
        }
    }

    /// Asserts that a write was refused only if a newer token existed.
    fn writes_were_refused_with_reason(&self) {
        for write in &self.history.writes {
            let newer = |grant: &Grant| {
                grant.key == write.key
                    && grant.token > Some(write.token)
                    && grant.acquire.from < write.window.to
            };
            assert!(
                write.answer != WriteAnswer::Rejected || self.history.grants.iter().any(newer),
                "{write:?} was refused, and nobody had a newer token"
            );
        }
    }

    /// Returns the reasons of the losses of steady keys.
    pub(crate) fn steady_losses(&self) -> Vec<LostReason> {
        let steady = self.losses.iter().filter(|loss| loss.key.starts_with("steady"));
        steady.map(|loss| loss.reason).collect()
    }
}
