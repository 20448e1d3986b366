//! What is to be said of a contest: the checks of the testkit, and how much of a violation the fault explains.

use std::time::Duration;

use registry_core::LostReason;
use registry_testkit::check::{Checked, check_in_line};
use registry_testkit::history::{Ending, Grant, History, WriteAnswer};

use crate::contest::Loss;

/// How late a holder may hear of the end of its lease on a machine that has other things to do.
const LATE: u64 = 2_000_000_000;

/// What a contest has left.
pub(crate) struct Outcome {
    pub(crate) history: History,
    /// Holds that ended against their holders' will, in the order in which these heard of it.
    pub(crate) losses: Vec<Loss>,
    /// What callers were told of the trouble.
    pub(crate) errors: Vec<String>,
    /// How long a newcomer took to take all keys, one after the other.
    pub(crate) taken_after: Duration,
}

impl Outcome {
    /// All promises were kept.
    ///
    /// # Panics
    /// With the first that was not.
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

    /// All promises were kept, but that the servers themselves may have ended leases of live holders, some of whom asked a member that lags behind
    /// the others: then the next holder may come before the one before has heard of it, which must be soon, or has found out by its
    /// release. Tokens and fenced writes are as safe as ever.
    ///
    /// # Panics
    /// With the first promise that was not kept.
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

    /// Whoever lost a lock heard of it, by the end of its lease at the latest.
    fn losses_were_told(&self) {
        for grant in &self.history.grants {
            let until = grant.valid_until.expect("etcd has leases").saturating_add(LATE);
            let released = grant.release.map_or(u64::MAX, |release| release.window.from);
            let end = released.min(grant.lost.unwrap_or(u64::MAX));
            assert!(end <= until, "not told in time: {grant:?}");
        }
    }

    /// Nobody was refused but for somebody newer.
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

    /// The losses of holders that meant to hold for good.
    pub(crate) fn steady_losses(&self) -> Vec<LostReason> {
        let steady = self.losses.iter().filter(|loss| loss.key.starts_with("steady"));
        steady.map(|loss| loss.reason).collect()
    }
}
